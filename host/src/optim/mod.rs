//! Optimization: what changes from step to step.
//!
//! `schedule.rs` gives the learning rate and weight decay of a step from the recipe alone.

pub mod schedule;
