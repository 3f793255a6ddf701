//! Cumulative sum along the last axis.

use crate::cpu::softmax::{put, row, span};
use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;

/// y[r, c] = sum of x[r, 0..=c]; `reverse`: sum of x[r, c..]. Each is the other's gradient.
///
/// ins: x [rows, cols] (or dy); outs: y [rows, cols] (or dx).
#[derive(Clone, Copy, Debug)]
pub struct CumSum {
    pub rows: usize,
    pub cols: usize,
    pub ld_x: usize,
    pub ld_y: usize,
    pub reverse: bool,
    pub acc: bool,
}

crate::kernels! {
    CumSum => "cumsum";
}

impl CumSum {
    /// The kernel that turns dy [rows, cols] into dx [rows, cols].
    pub fn backward(self, ld_dy: usize, ld_dx: usize, acc: bool) -> Self {
        CumSum { ld_x: ld_dy, ld_y: ld_dx, reverse: !self.reverse, acc, ..self }
    }

    fn cost(&self) -> Cost {
        let n = (self.rows * self.cols) as f64;
        Cost::new(n, 2.0 * n)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let x = args.ins[0];
        let out = &mut args.outs[0][..span(self.rows, self.ld_y, self.cols)];
        par::rows_mut(out, self.ld_y, par::block_rows(self.rows, 2 * self.cols), |first, block| {
            for (i, y) in block.chunks_mut(self.ld_y).enumerate() {
                let pairs = y[..self.cols].iter_mut().zip(row(x, first + i, self.ld_x, self.cols));
                let mut sum = T::ZERO;
                let mut step = |(y, &x): (&mut T, &T)| {
                    sum += x;
                    put(y, sum, self.acc);
                };
                if self.reverse { pairs.rev().for_each(&mut step) } else { pairs.for_each(&mut step) }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, finite_differences, normal};

    #[test]
    fn forward_and_backward() {
        let (rows, cols) = (2, 5);
        let forward = CumSum { rows, cols, ld_x: cols, ld_y: cols, reverse: false, acc: false };
        let run = |x: &[f64], kernel: &CumSum, y: Vec<f64>| {
            let mut call = Call { ins: vec![x.to_vec()], outs: vec![y], ..Call::default() };
            call.run(kernel).outs[0].clone()
        };
        let y = run(&[1.0, 2.0, 3.0, 4.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0], &forward, vec![f64::NAN; 10]);
        assert_eq!(y, [1.0, 3.0, 6.0, 10.0, 15.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        let (x, dy) = (normal(1, rows * cols), normal(2, rows * cols));
        let ld = cols + 2;
        let dx = run(&dy, &forward.backward(cols, ld, true), vec![1.0; span(rows, ld, cols)]);
        let dx: Vec<f64> = dx.chunks(ld).flat_map(|d| d[..cols].iter().map(|d| d - 1.0)).collect();
        finite_differences("dx", &x, &dx, 1e-8, |x| {
            run(x, &forward, vec![0.0; rows * cols]).iter().zip(&dy).map(|(y, g)| y * g).sum()
        });
    }
}
