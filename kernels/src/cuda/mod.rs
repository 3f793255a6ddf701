//! CUDA kernels: the same kernel values as in `cpu`, launched on an NVIDIA GPU (f32, compute capability 9.0).
//!
//! One `.cu` source per operator family beside its launcher; matrix products go through cuBLASLt in plain FP32 (no
//! TF32). [`Device`] compiles the sources with NVRTC when it is opened, owns one stream, and launches a
//! `&dyn Kernel` on [`Span`]s of device memory by the kernel's type. [`Device::capture`] records launches as a CUDA
//! graph. A recorded program thus needs nothing of its own for the GPU.
//!
//! Invariants. The driver, NVRTC and cuBLASLt are opened at run time: building needs no CUDA, a missing library is an
//! [`Error`], and a machine without a GPU never opens them. A launch neither allocates nor waits; only opening,
//! allocating, reading, writing and capturing do. Every launcher checks that its operands lie inside their spans before
//! it launches. Reductions have a fixed order: the same inputs give the same bits. The kernels use no toolkit headers.
//!
//! Knows slices of device memory and sizes, as `cpu` does; knows no programs, models or recipes.
#![allow(unsafe_code)]

mod activation;
mod blas;
mod compile;
mod device;
mod elementwise;
mod error;
mod gemm;
mod launch;
mod library;
mod memory;
mod probe;
mod rms_norm;

pub use compile::{SOURCES, Source, compile};
pub use device::{Device, Graph};
pub use error::{Error, Result};
pub use launch::{Operands, supports};
pub use library::{nvrtc_present, present};
pub use memory::{Buffer, Span, Word};
pub use probe::Runtime;

/// Architecture the sources are compiled for: Hopper with its own instructions.
pub const ARCH: &str = "sm_90a";
