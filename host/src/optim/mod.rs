//! Optimization: what changes from step to step.
//!
//! `schedule.rs` gives the learning rate and weight decay of a step from the recipe alone; `multipliers.rs` what single
//! parameters multiply them by; `update.rs` finalises gradients, clips and applies Adam to a rank's flat parameters.

pub mod multipliers;
pub mod schedule;
pub mod update;
