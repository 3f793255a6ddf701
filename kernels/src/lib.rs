//! Raw operators on buffers, for CPU (`f32`, `f64`) and CUDA.
//!
//! This crate knows slices and sizes. It knows no autodiff, no placements, no models and no recipes: the host
//! records kernels from here into programs and owns every buffer they touch.

pub mod blocks;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod kernel;
pub mod par;
pub mod philox;
pub mod real;

pub use blocks::Blocks;
pub use kernel::{Args, Cost, Element, Kernel};
pub use real::Real;
