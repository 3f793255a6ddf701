//! The recipe's section `elastify.config`.

use crate::Result;
use crate::choices::Widths;
use crate::sizes::{Inference, MemoryProfile, Target};
use schemars::JsonSchema;
use serde::Deserialize;
use std::collections::BTreeMap;

/// What a run trains beside its model.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Budgets that are trained: fractions of the model's parameters, or GiB of memory (see `budget_type`).
    pub(crate) budget_list: Vec<f64>,
    /// How often each is drawn, relative to the others; equally often if not given.
    #[serde(default)]
    pub(crate) budget_probs: Option<Vec<f64>>,
    /// Probability that the full model is trained instead of a budget of the list.
    #[serde(default = "original_model_sample_prob")]
    pub(crate) original_model_sample_prob: f64,
    /// Consecutive samples of a step that train one budget; those of a micro-batch if not given. A multiple of
    /// train.micro_batch_size that divides train.global_batch_size.
    #[serde(default)]
    pub(crate) samples_per_budget: Option<u64>,
    /// How budgets are drawn.
    #[serde(default)]
    pub(crate) sampling: SamplingKind,
    /// Widths of the model's elastic axes by name, largest first.
    #[serde(default)]
    pub(crate) axes: BTreeMap<String, Axis>,
    /// Layers that may be dropped, in the order in which they are.
    #[serde(default)]
    pub(crate) layer_ranking: Vec<usize>,
    /// Hidden channels of each gate of the router.
    #[serde(default = "router_inter_dim")]
    pub(crate) router_inter_dim: usize,
    /// Standard deviation of the router's initial weights.
    #[serde(default = "router_std")]
    pub(crate) router_std: f64,
    /// Factor on the router's learning rate.
    #[serde(default = "one")]
    pub(crate) lr_mult_router: f64,
    /// Which logits are divided by their standard deviation.
    #[serde(default)]
    pub(crate) normalize_router_logits: Normalize,
    /// Factor on the logits at the first step.
    #[serde(default = "one")]
    pub(crate) linear_scaler_start: f64,
    /// Factor on the logits at the last step.
    #[serde(default = "ten")]
    pub(crate) linear_scaler_end: f64,
    /// Temperature of the Gumbel softmax at the first step.
    #[serde(default = "one")]
    pub(crate) tau_init: f64,
    /// Factor on the temperature from step to step.
    #[serde(default = "tau_decay")]
    pub(crate) tau_decay: f64,
    /// A sample is hard (one-hot, with the gradient of the soft one) with probability 1 minus this.
    #[serde(default = "hard_sample_th")]
    pub(crate) hard_sample_th: f64,
    /// Factor on the budget loss.
    #[serde(default = "one")]
    pub(crate) loss_alpha: f64,
    /// What a budget counts.
    #[serde(default)]
    pub(crate) budget_type: BudgetType,
    /// Which parameters it counts.
    #[serde(default)]
    pub(crate) param_budget_target: Target,
    /// Bytes per element, for budgets of memory.
    #[serde(default)]
    pub(crate) memory: MemoryProfile,
    /// What is held in memory at inference, for budgets of memory.
    #[serde(default)]
    pub(crate) inference: Inference,
    /// The router keeps its weights: no budget loss.
    #[serde(default)]
    pub(crate) freeze_router: bool,
}

/// Choices of an axis.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Axis {
    /// Widths in units of the axis.
    #[serde(default)]
    units: Option<Vec<usize>>,
    /// Widths as fractions of the axis, rounded down to units.
    #[serde(default)]
    fractions: Option<Vec<f64>>,
    /// Each layer that has the axis chooses its own width.
    #[serde(default)]
    pub(crate) per_layer: bool,
}

impl Axis {
    pub(crate) fn widths(&self, name: &str) -> Result<Widths> {
        match (&self.units, &self.fractions) {
            (Some(units), None) => Ok(Widths::Units(units.clone())),
            (None, Some(fractions)) => Ok(Widths::Fractions(fractions.clone())),
            _ => Err(format!("config.axes.{name}: give either units or fractions")),
        }
    }
}

/// What a budget counts.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum BudgetType {
    /// A fraction of the full model's parameters.
    #[default]
    Param,
    /// GiB of memory at inference.
    Mem,
}

/// Which logits of the router are divided by their standard deviation. Of two choices it leaves nothing to learn but which
/// is first: their logits are then as far apart as ever.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum Normalize {
    #[default]
    None,
    /// Those of axes whose width may differ from layer to layer, as the reference does: neither the residual stream's nor
    /// the depth's.
    LayerAxes,
    All,
}

/// How budgets are drawn.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum SamplingKind {
    /// By the run's seed, the step and the number of the samples.
    #[default]
    Seeded,
    /// The sequence of Megatron-LM's script, whatever the seed.
    Reference,
}

fn original_model_sample_prob() -> f64 {
    0.33
}

fn router_inter_dim() -> usize {
    128
}

fn router_std() -> f64 {
    0.1
}

fn tau_decay() -> f64 {
    0.9999
}

fn hard_sample_th() -> f64 {
    0.996
}

fn one() -> f64 {
    1.0
}

fn ten() -> f64 {
    10.0
}

impl Config {
    /// Refuses what is wrong whatever the model.
    pub(crate) fn check(&self) -> Result<()> {
        let within = |key: &str, value: f64, low: f64, high: f64| match value >= low && value <= high {
            true => Ok(()),
            false if high == f64::MAX => Err(format!("config.{key} is {value}; it must be at least {low}")),
            false => Err(format!("config.{key} is {value}; it must be between {low} and {high}")),
        };
        within("original_model_sample_prob", self.original_model_sample_prob, 0.0, 1.0)?;
        within("hard_sample_th", self.hard_sample_th, 0.0, 1.0)?;
        let above_zero = f64::MIN_POSITIVE;
        for (key, value) in [("tau_init", self.tau_init), ("tau_decay", self.tau_decay)] {
            if !(value.is_finite() && value >= above_zero) {
                return Err(format!("config.{key} is {value}; it must be above 0"));
            }
        }
        for (key, value) in [
            ("router_std", self.router_std),
            ("lr_mult_router", self.lr_mult_router),
            ("linear_scaler_start", self.linear_scaler_start),
            ("linear_scaler_end", self.linear_scaler_end),
            ("loss_alpha", self.loss_alpha),
        ] {
            within(key, value, 0.0, f64::MAX)?;
        }
        if self.router_inter_dim == 0 {
            return Err("config.router_inter_dim is 0; it must be at least 1".into());
        }
        if self.samples_per_budget == Some(0) {
            return Err("config.samples_per_budget is 0; it must be at least 1".into());
        }
        let (inference, keys) = (&self.inference, ["seq_length", "batch_size", "prefill_chunk"]);
        let values = [inference.seq_length, inference.batch_size, inference.prefill_chunk];
        if let Some((key, _)) = keys.into_iter().zip(values).find(|(_, value)| *value == 0) {
            return Err(format!("config.inference.{key} is 0; it must be at least 1"));
        }
        if self.axes.is_empty() && self.layer_ranking.is_empty() {
            return Err(
                "config.axes and config.layer_ranking are empty; name at least one axis to choose widths of".into()
            );
        }
        Ok(())
    }
}
