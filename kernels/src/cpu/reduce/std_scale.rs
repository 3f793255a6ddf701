//! Division of each row by its standard deviation, without centring (how Flextron normalises router logits).
//!
//!   y = x / sigma,   sigma^2 = sum_c (x - mean)^2 / (C - 1)
//!   dx = (dy - sum_c(dy y) (y - mean_c y) / (C - 1)) / sigma
//! A row of one element, or of equal ones, has no deviation: sigma counts as 1 and as a constant.

use crate::cpu::softmax::{put, row, span};
use crate::kernel::{Args, Cost};
use crate::real::Real;

/// y[r, :] = x[r, :] / sigma[r].
///
/// ins: x [rows, cols]; outs: y [rows, cols], sigma [rows] (0 where the row has no deviation).
#[derive(Clone, Copy, Debug)]
pub struct StdScale {
    pub rows: usize,
    pub cols: usize,
    pub ld_x: usize,
    pub ld_y: usize,
}

/// Gradient of [`StdScale`].
///
/// ins: y [rows, cols], sigma [rows], dy [rows, cols]; outs: dx [rows, cols].
#[derive(Clone, Copy, Debug)]
pub struct StdScaleBackward {
    pub rows: usize,
    pub cols: usize,
    pub ld_y: usize,
    pub ld_dy: usize,
    pub ld_dx: usize,
    pub acc: bool,
}

crate::kernels! {
    StdScale => "std_scale";
    StdScaleBackward => "std_scale_backward";
}

fn mean<T: Real>(x: &[T]) -> T {
    x.iter().copied().sum::<T>() / T::of(x.len().max(1) as f64)
}

impl StdScale {
    fn cost(&self) -> Cost {
        let n = (self.rows * self.cols) as f64;
        Cost::new(5.0 * n, 2.0 * n)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let x = args.ins[0];
        let [y, sigma] = args.outs else { unreachable!("std_scale has two outputs") };
        let y = &mut y[..span(self.rows, self.ld_y, self.cols)];
        for (r, (y, sigma)) in y.chunks_mut(self.ld_y).zip(sigma.iter_mut()).enumerate() {
            let x = row(x, r, self.ld_x, self.cols);
            let centre = mean(x);
            let square: T = x.iter().map(|&x| (x - centre) * (x - centre)).sum();
            *sigma = if self.cols < 2 { T::ZERO } else { (square / T::of((self.cols - 1) as f64)).sqrt() };
            let divisor = if *sigma == T::ZERO { T::ONE } else { *sigma };
            y.iter_mut().zip(x).for_each(|(y, &x)| *y = x / divisor);
        }
    }
}

impl StdScaleBackward {
    fn cost(&self) -> Cost {
        let n = (self.rows * self.cols) as f64;
        Cost::new(6.0 * n, 3.0 * n)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (y, sigma, dy) = (args.ins[0], args.ins[1], args.ins[2]);
        let out = &mut args.outs[0][..span(self.rows, self.ld_dx, self.cols)];
        for (r, dx) in out.chunks_mut(self.ld_dx).enumerate() {
            let (y, dy) = (row(y, r, self.ld_y, self.cols), row(dy, r, self.ld_dy, self.cols));
            let (divisor, slope) = if sigma[r] == T::ZERO {
                (T::ONE, T::ZERO)
            } else {
                let dot: T = y.iter().zip(dy).map(|(&y, &dy)| y * dy).sum();
                (sigma[r], dot / T::of((self.cols - 1) as f64))
            };
            let centre = mean(y);
            for ((dx, &y), &dy) in dx.iter_mut().zip(y).zip(dy) {
                put(dx, (dy - slope * (y - centre)) / divisor, self.acc);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, finite_differences, normal, relative_l2};
    use rstest::rstest;

    fn forward(x: &[f64], rows: usize, cols: usize) -> Call {
        let mut call = Call {
            ins: vec![x.to_vec()],
            outs: vec![vec![f64::NAN; rows * cols], vec![f64::NAN; rows]],
            ..Call::default()
        };
        call.run(&StdScale { rows, cols, ld_x: cols, ld_y: cols });
        call
    }

    #[test]
    fn divides_by_the_unbiased_deviation() {
        let call = forward(&[1.0, 3.0, 8.0, 5.0, 5.0, 5.0], 2, 3);
        let sigma = 13f64.sqrt();
        assert!(relative_l2(&call.outs[0], &[1.0 / sigma, 3.0 / sigma, 8.0 / sigma, 5.0, 5.0, 5.0]) < 1e-15);
        assert_eq!(forward(&[4.0, -2.0], 2, 1).outs[0], [4.0, -2.0]);
    }

    #[rstest]
    fn gradient(#[values(1, 2, 5)] cols: usize, #[values(false, true)] acc: bool) {
        let rows = 3;
        let (x, dy) = (normal(1, rows * cols), normal(2, rows * cols));
        let done = forward(&x, rows, cols);
        let ld = cols + 1;
        let mut call = Call {
            ins: vec![done.outs[0].clone(), done.outs[1].clone(), dy.clone()],
            outs: vec![vec![if acc { 1.0 } else { f64::NAN }; span(rows, ld, cols)]],
            ..Call::default()
        };
        call.run(&StdScaleBackward { rows, cols, ld_y: cols, ld_dy: cols, ld_dx: ld, acc });
        let dx: Vec<f64> =
            call.outs[0].chunks(ld).flat_map(|d| d[..cols].iter().map(|g| if acc { g - 1.0 } else { *g })).collect();
        finite_differences("dx", &x, &dx, 1e-7, |x| {
            forward(x, rows, cols).outs[0].iter().zip(&dy).map(|(y, g)| y * g).sum()
        });
    }
}
