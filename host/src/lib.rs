//! Gantry: a large-model trainer whose models are plugins.

pub mod bench;
pub mod checkpoint;
pub mod cli;
pub mod comm;
pub mod convert;
pub mod data;
pub mod error;
pub mod failure;
pub mod infer;
pub mod mesh;
pub mod model;
pub mod observe;
pub mod optim;
pub mod plugin;
pub mod program;
pub mod recipe;
pub mod schedule;
pub mod train;
