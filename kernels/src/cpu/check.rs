//! Test support: launch a kernel on vectors, and compare a backward kernel with finite differences in f64.

use crate::kernel::{Args, Kernel};
use crate::philox::Stream;

/// Owned operands of one launch.
#[derive(Clone, Default)]
pub struct Call {
    pub ins: Vec<Vec<f64>>,
    pub outs: Vec<Vec<f64>>,
    pub ints: Vec<Vec<i32>>,
    pub int_outs: Vec<Vec<i32>>,
}

impl Call {
    /// Runs `kernel` in f64 on these operands, in place.
    pub fn run(&mut self, kernel: &dyn Kernel) -> &mut Self {
        let ins: Vec<&[f64]> = self.ins.iter().map(Vec::as_slice).collect();
        let mut outs: Vec<&mut [f64]> = self.outs.iter_mut().map(Vec::as_mut_slice).collect();
        let ints: Vec<&[i32]> = self.ints.iter().map(Vec::as_slice).collect();
        let mut int_outs: Vec<&mut [i32]> = self.int_outs.iter_mut().map(Vec::as_mut_slice).collect();
        let mut work = vec![f64::NAN; kernel.workspace()];
        kernel.run_f64(Args { ins: &ins, outs: &mut outs, ints: &ints, int_outs: &mut int_outs, work: &mut work });
        self
    }

    /// Runs `kernel` in f32 on these operands and returns the float outputs as f64.
    pub fn run_f32(&self, kernel: &dyn Kernel) -> Vec<Vec<f64>> {
        let narrow = |v: &Vec<f64>| v.iter().map(|&x| x as f32).collect::<Vec<f32>>();
        let ins: Vec<Vec<f32>> = self.ins.iter().map(narrow).collect();
        let mut outs: Vec<Vec<f32>> = self.outs.iter().map(narrow).collect();
        let mut int_outs = self.int_outs.clone();
        let ins: Vec<&[f32]> = ins.iter().map(Vec::as_slice).collect();
        let ints: Vec<&[i32]> = self.ints.iter().map(Vec::as_slice).collect();
        let mut work = vec![f32::NAN; kernel.workspace()];
        {
            let mut outs: Vec<&mut [f32]> = outs.iter_mut().map(Vec::as_mut_slice).collect();
            let mut int_outs: Vec<&mut [i32]> = int_outs.iter_mut().map(Vec::as_mut_slice).collect();
            kernel.run_f32(Args { ins: &ins, outs: &mut outs, ints: &ints, int_outs: &mut int_outs, work: &mut work });
        }
        outs.iter().map(|v| v.iter().map(|&x| f64::from(x)).collect()).collect()
    }
}

/// `n` standard normal numbers, reproducible by `stream`.
pub fn normal(stream: u32, n: usize) -> Vec<f64> {
    let stream = Stream::new(1234, stream, 0);
    (0..n as u64).map(|i| stream.normal(i)).collect()
}

/// Checks `grad`, the claimed gradient of `f` at `x`, against central differences.
///
/// Panics with the first element that disagrees by more than `tol` relative to the gradient's scale.
pub fn finite_differences(what: &str, x: &[f64], grad: &[f64], tol: f64, mut f: impl FnMut(&[f64]) -> f64) {
    assert_eq!(x.len(), grad.len(), "{what}: lengths");
    let scale = grad.iter().fold(1e-3f64, |m, g| m.max(g.abs()));
    let mut x = x.to_vec();
    for i in 0..x.len() {
        let x0 = x[i];
        let h = 1e-5 * x0.abs().max(1.0);
        x[i] = x0 + h;
        let up = f(&x);
        x[i] = x0 - h;
        let down = f(&x);
        x[i] = x0;
        let numeric = (up - down) / (2.0 * h);
        assert!(
            (numeric - grad[i]).abs() <= tol * scale,
            "{what}[{i}]: gradient {} but finite difference {numeric} (scale {scale})",
            grad[i]
        );
    }
}

/// Largest difference of two vectors relative to the larger norm: ||a - b|| / max(||a||, ||b||).
pub fn relative_l2(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>().sqrt();
    let diff = a.iter().zip(b).map(|(x, y)| (x - y).powi(2)).sum::<f64>().sqrt();
    let scale = norm(a).max(norm(b));
    if scale == 0.0 { 0.0 } else { diff / scale }
}
