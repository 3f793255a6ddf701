//! Faults planted in a record must show in the comparison; what has no CUDA kernel must be named.

use super::block::{self, Results, SLICED, SMALL, Sizes};
use super::{TOLERANCE, relative_l2};
use gantry::program::graph::{Action, Graph};
use gantry_kernels::Kernel;
use gantry_kernels::cpu::elementwise::{Binary, Scale};
use gantry_kernels::cpu::gemm::{LinearBackwardInput, LinearForward};
use gantry_kernels::cpu::rms_norm::{RmsNorm, RmsNormBackward};
use std::sync::Arc;

/// A way to spoil a record; true if it found its place.
pub type Fault = fn(&mut Graph) -> bool;

/// Replaces the first kernel of type `K` that `spoil` changes.
fn replace<K: Kernel + Clone>(g: &mut Graph, spoil: impl Fn(&mut K) -> bool) -> bool {
    for step in &mut g.steps {
        if let Action::Launch { kernel, .. } = &mut step.action
            && let Some(mut spoilt) = kernel.as_any().downcast_ref::<K>().cloned()
            && spoil(&mut spoilt)
        {
            *kernel = Arc::new(spoilt);
            return true;
        }
    }
    false
}

pub const FAULTS: &[(&str, Fault)] = &[
    ("eps 1e-6 for 1e-5", |g| replace(g, |k: &mut RmsNorm| std::mem::replace(&mut k.eps, 1e-6) != 1e-6)),
    ("width of the norm one too large", |g| replace(g, |k: &mut RmsNormBackward| (k.width += 1, true).1)),
    ("dropped accumulation into dh", |g| replace(g, |k: &mut LinearBackwardInput| std::mem::take(&mut k.acc))),
    ("dropped accumulation into dx", |g| replace(g, |k: &mut RmsNormBackward| std::mem::take(&mut k.acc))),
    ("dropped bias", |g| replace(g, |k: &mut LinearForward| std::mem::take(&mut k.bias))),
    ("scale 0.5001 for 0.5", |g| replace(g, |k: &mut Scale| k.factor == 0.5 && (k.factor = 0.5001, true).1)),
    ("product of a view read one row on", |g| replace(g, |k: &mut Binary| k.ld_b > k.cols && (k.ld_b -= 1, true).1)),
];

/// The largest error of any result, and its name.
pub fn worst<A: Copy + Into<f64>, B: Copy + Into<f64>>(a: &Results<A>, b: &Results<B>) -> (String, f64) {
    assert_eq!(a.iter().map(|r| &r.0).collect::<Vec<_>>(), b.iter().map(|r| &r.0).collect::<Vec<_>>());
    let errors = a.iter().zip(b).map(|((name, a), (_, b))| (name.clone(), relative_l2(a, b)));
    // A NaN is worse than anything.
    errors
        .max_by(|x, y| (x.1.is_nan(), x.1).partial_cmp(&(y.1.is_nan(), y.1)).unwrap_or(std::cmp::Ordering::Equal))
        .unwrap_or_default()
}

#[test]
fn the_comparison_sees_every_planted_fault() {
    for sizes in [SMALL, SLICED] {
        let right = block::record(sizes, |_| ()).unwrap();
        let exact = right.run_cpu(&right.inputs::<f64>()).unwrap();
        let (name, error) = worst(&right.run_cpu(&right.inputs::<f32>()).unwrap(), &exact);
        assert!(error < TOLERANCE, "{name} of the record as it is: {error:e}");
        for &(what, fault) in FAULTS {
            let wrong = spoilt(sizes, fault, what);
            let (_, error) = worst(&wrong.run_cpu(&wrong.inputs::<f32>()).unwrap(), &exact);
            assert!(error.is_nan() || error > 5.0 * TOLERANCE, "{what}: {error:e} would pass");
        }
    }
}

pub fn spoilt(sizes: Sizes, fault: Fault, what: &str) -> block::Recorded {
    block::record(sizes, |g| assert!(fault(g), "{what}: found no place")).unwrap()
}

/// Needs no GPU: all of the block runs there, and a kernel without a launcher is named.
#[test]
fn kernels_without_a_launcher_are_named() {
    use gantry::program::replay_cuda::unsupported;
    assert_eq!(unsupported(&block::record(SLICED, |_| ()).unwrap().program), [""; 0]);
    let with_dot = block::record(SMALL, |g| {
        for step in &mut g.steps {
            if let Action::Launch { kernel, .. } = &mut step.action
                && kernel.name() == "activation"
            {
                *kernel =
                    Arc::new(gantry_kernels::cpu::elementwise::Dot { rows: 1, cols: 1, ld_a: 1, ld_b: 1, factor: 1.0 });
            }
        }
    })
    .unwrap();
    assert_eq!(unsupported(&with_dot.program), ["dot"]);
}

/// Opening a GPU where there is none is an error in words.
#[test]
fn a_missing_gpu_is_an_error() {
    // Nobody has a thousandth GPU.
    let error = gantry_kernels::cuda::Device::open(1000).err().map(|e| e.to_string()).unwrap_or_default();
    assert!(error.contains("GPU") || error.contains("cannot find"), "{error}");
}
