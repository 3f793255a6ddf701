//! `flextron`: one parent model, many submodels. A router maps a budget to a width of each elastic axis, and all widths are
//! trained together (Flextron, ICML 2024; Nemotron Elastic, arXiv 2511.16664; reference: Megatron-LM,
//! `megatron/elastification`).
//!
//! The formulas, which know no host:
//!
//! - [`choices`]: the widths an axis may take
//! - [`budget`]: the list of budgets, what the router sees of one, and which one a group of samples trains
//! - [`schedule`]: temperature and logit scale over training
//! - [`sizes`]: parameters and memory as functions of the widths, exactly and as the reference counts them
//! - [`loss`]: the budget loss and how it joins the model's loss
//!
//! The router, as a program of the host: [`router`]. The elastifier itself: [`config`] (the recipe's section), [`target`]
//! (the axes of a model that it routes) and [`elastifier`].
//!
//! beside [`dual`] (numbers that carry their derivatives) and [`random`] (random numbers by position).

pub mod budget;
pub mod choices;
pub mod config;
pub mod dual;
pub mod elastifier;
pub mod loss;
pub mod random;
pub mod router;
pub mod schedule;
pub mod sizes;
pub mod target;

use gantry_plugin_api::ops;

gantry_plugin_api::export_plugin! {
    name: "flextron",
    elastifiers: { "flextron" => elastifier::Flextron },
    operators: [ops::Linear, ops::Activation, ops::StdScale, ops::GumbelSoftmax],
}

/// A sentence that says what is wrong with a value of the config.
pub type Result<T, E = String> = std::result::Result<T, E>;
