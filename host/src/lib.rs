//! Gantry: a large-model trainer whose models are plugins.

pub mod failure;
pub mod optim;
#[allow(dead_code)] // until the loop that reads every key is in place
pub mod recipe;

pub mod comm;
pub mod error;
pub mod mesh;
pub mod model;
pub mod program;
