//! A recorded program on a GPU: the operator list that the host records, with the memory the host plans, compiled by
//! NVRTC, captured as a CUDA graph and replayed, gives the CPU's results.
//!
//! Without a GPU the GPU's part says so and passes, unless GANTRY_REQUIRE_CUDA=1. What it compares and how sensitive the
//! comparison is to faults is tested on the CPU, everywhere. Run with `--nocapture` for the report; the test's binary
//! needs nothing of the build machine but the driver, NVRTC and cuBLASLt (GANTRY_NVRTC, GANTRY_CUBLASLT).
#![cfg(feature = "cuda")]

mod block;
mod faults;
mod gpu;
mod kernels;

use gantry_kernels::cuda::Device;

/// Largest ||a - b|| / max(||a||, ||b||) of f32 results on GPU and CPU.
const TOLERANCE: f64 = 1e-5;

/// The GPU, or none after saying why not.
fn device() -> Option<Device> {
    match Device::open(0) {
        Ok(device) => Some(device),
        Err(error) => {
            let required = std::env::var("GANTRY_REQUIRE_CUDA").is_ok_and(|v| v == "1");
            assert!(!required, "GANTRY_REQUIRE_CUDA=1, but {error}");
            println!("skipped: {error}");
            None
        }
    }
}

/// ||a - b|| / max(||a||, ||b||); not a number where either is.
fn relative_l2<A: Copy + Into<f64>, B: Copy + Into<f64>>(a: &[A], b: &[B]) -> f64 {
    assert_eq!(a.len(), b.len());
    let (mut aa, mut bb, mut diff) = (0.0f64, 0.0f64, 0.0f64);
    for (&a, &b) in a.iter().zip(b) {
        let (a, b): (f64, f64) = (a.into(), b.into());
        aa += a * a;
        bb += b * b;
        diff += (a - b) * (a - b);
    }
    if diff == 0.0 { 0.0 } else { (diff / aa.max(bb)).sqrt() }
}
