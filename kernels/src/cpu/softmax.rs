//! Softmax and log-softmax over the last axis, forward and backward, and the row arithmetic the loss kernels share.
//!
//! With m = max_c x[r, c] and Z = sum_c exp(x[r, c] - m):
//!   softmax      y = exp(x - m) / Z        dx = y (dy - sum_c y dy)
//!   log-softmax  y = x - m - ln Z          dx = dy - exp(y) sum_c dy
//! Gradients overwrite unless `acc`. A row that is -inf throughout gives NaN, as the formula does.

use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;

/// y[r, :] = softmax or log-softmax of x[r, :].
///
/// ins: x [rows, cols]; outs: y [rows, cols].
#[derive(Clone, Copy, Debug)]
pub struct Softmax {
    pub rows: usize,
    pub cols: usize,
    pub ld_x: usize,
    pub ld_y: usize,
    /// Log-softmax instead of softmax.
    pub log: bool,
}

/// Gradient of [`Softmax`].
///
/// ins: y [rows, cols] (what the forward gave), dy [rows, cols]; outs: dx [rows, cols].
#[derive(Clone, Copy, Debug)]
pub struct SoftmaxBackward {
    pub rows: usize,
    pub cols: usize,
    pub ld_y: usize,
    pub ld_dy: usize,
    pub ld_dx: usize,
    pub log: bool,
    pub acc: bool,
}

crate::kernels! {
    Softmax => "softmax";
    SoftmaxBackward => "softmax_backward";
}

impl Softmax {
    fn cost(&self) -> Cost {
        let n = (self.rows * self.cols) as f64;
        Cost::new(5.0 * n, 2.0 * n)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (rows, cols) = (self.rows, self.cols);
        let x = args.ins[0];
        let out = &mut args.outs[0][..span(rows, self.ld_y, cols)];
        par::rows_mut(out, self.ld_y, par::block_rows(rows, 8 * cols), |first, block| {
            par::simd!(|| {
                for (i, y) in block.chunks_mut(self.ld_y).enumerate() {
                    let x = row(x, first + i, self.ld_x, cols);
                    let y = &mut y[..cols];
                    if self.log {
                        let (m, z) = max_and_sum_exp(x);
                        let lse = m + z.ln();
                        for (y, &x) in y.iter_mut().zip(x) {
                            *y = x - lse;
                        }
                    } else {
                        let m = max_of(x);
                        for (y, &x) in y.iter_mut().zip(x) {
                            *y = exp(x - m);
                        }
                        let inverse = T::ONE / sum_map(y, |y| y);
                        for y in y.iter_mut() {
                            *y *= inverse;
                        }
                    }
                }
            })
        });
    }
}

impl SoftmaxBackward {
    fn cost(&self) -> Cost {
        let n = (self.rows * self.cols) as f64;
        Cost::new(4.0 * n, 3.0 * n)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (rows, cols) = (self.rows, self.cols);
        let (y, dy) = (args.ins[0], args.ins[1]);
        let out = &mut args.outs[0][..span(rows, self.ld_dx, cols)];
        par::rows_mut(out, self.ld_dx, par::block_rows(rows, 4 * cols), |first, block| {
            par::simd!(|| {
                for (i, dx) in block.chunks_mut(self.ld_dx).enumerate() {
                    let y = row(y, first + i, self.ld_y, cols);
                    let dy = row(dy, first + i, self.ld_dy, cols);
                    let dx = &mut dx[..cols];
                    if self.log {
                        let sum = sum_map(dy, |g| g);
                        for ((dx, &y), &dy) in dx.iter_mut().zip(y).zip(dy) {
                            put(dx, dy - exp(y) * sum, self.acc);
                        }
                    } else {
                        let dot = sum_zip(y, dy, |y, g| y * g);
                        for ((dx, &y), &dy) in dx.iter_mut().zip(y).zip(dy) {
                            put(dx, y * (dy - dot), self.acc);
                        }
                    }
                }
            })
        });
    }
}

/// Elements from the first to the last of `rows` rows of `cols` elements, `ld` apart.
pub(super) fn span(rows: usize, ld: usize, cols: usize) -> usize {
    if rows == 0 { 0 } else { (rows - 1) * ld + cols }
}

/// Row `r` of a matrix whose rows lie `ld` elements apart.
#[inline(always)]
pub(super) fn row<T>(x: &[T], r: usize, ld: usize, cols: usize) -> &[T] {
    &x[r * ld..r * ld + cols]
}

/// Overwrites, or adds when `acc`.
#[inline(always)]
pub(super) fn put<T: Real>(out: &mut T, value: T, acc: bool) {
    *out = if acc { *out + value } else { value };
}

#[inline(always)]
pub(super) fn exp<T: Real>(x: T) -> T {
    x.vexp()
}

/// Interleaved partial results a row is reduced in: a fixed order that vectorises.
const LANES: usize = 16;

/// Sum of `f(x)` over a row.
#[inline(always)]
pub(super) fn sum_map<T: Real>(xs: &[T], f: impl Fn(T) -> T) -> T {
    let mut lanes = [T::ZERO; LANES];
    let chunks = xs.chunks_exact(LANES);
    let tail = chunks.remainder();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += f(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(tail) {
        *lane += f(x);
    }
    add_lanes(lanes)
}

/// Sum of `f(x, y)` over two rows of one length.
#[inline(always)]
pub(super) fn sum_zip<T: Real>(xs: &[T], ys: &[T], f: impl Fn(T, T) -> T) -> T {
    let mut lanes = [T::ZERO; LANES];
    let (xc, yc) = (xs.chunks_exact(LANES), ys.chunks_exact(LANES));
    let (xt, yt) = (xc.remainder(), yc.remainder());
    for (xs, ys) in xc.zip(yc) {
        for ((lane, &x), &y) in lanes.iter_mut().zip(xs).zip(ys) {
            *lane += f(x, y);
        }
    }
    for ((lane, &x), &y) in lanes.iter_mut().zip(xt).zip(yt) {
        *lane += f(x, y);
    }
    add_lanes(lanes)
}

#[inline(always)]
fn add_lanes<T: Real>(mut lanes: [T; LANES]) -> T {
    let mut n = LANES / 2;
    while n > 0 {
        for i in 0..n {
            let high = lanes[i + n];
            lanes[i] += high;
        }
        n /= 2;
    }
    lanes[0]
}

/// Largest element of a row; -inf for an empty one, and for NaN as [`Real::max`] treats it.
#[inline(always)]
pub(super) fn max_of<T: Real>(xs: &[T]) -> T {
    let mut lanes = [T::NEG_INFINITY; LANES];
    let chunks = xs.chunks_exact(LANES);
    let tail = chunks.remainder();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = if x > *lane { x } else { *lane };
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(tail) {
        *lane = if x > *lane { x } else { *lane };
    }
    lanes.into_iter().fold(T::NEG_INFINITY, T::max)
}

/// (max, sum of exp(x - max)) of a row.
#[inline(always)]
pub(super) fn max_and_sum_exp<T: Real>(xs: &[T]) -> (T, T) {
    let m = max_of(xs);
    (m, sum_map(xs, |x| exp(x - m)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, finite_differences, normal, relative_l2};
    use rstest::rstest;

    /// Copies a dense matrix into rows `ld` apart, the gaps and nothing after the last row filled with `fill`.
    pub fn strided(x: &[f64], cols: usize, ld: usize, fill: f64) -> Vec<f64> {
        let rows = x.len() / cols;
        let mut out = vec![fill; span(rows, ld, cols)];
        for (r, x) in x.chunks(cols).enumerate() {
            out[r * ld..r * ld + cols].copy_from_slice(x);
        }
        out
    }

    #[rstest]
    fn rows_sum_to_one_and_match_the_formula(#[values(1, 5, 33)] cols: usize, #[values(false, true)] log: bool) {
        let x: Vec<f64> = normal(1, 4 * cols).iter().map(|x| 30.0 * x).collect();
        let (ld_x, ld_y) = (cols + 3, cols + 1);
        let kernel = Softmax { rows: 4, cols, ld_x, ld_y, log };
        let mut call = Call {
            ins: vec![strided(&x, cols, ld_x, f64::NAN)],
            outs: vec![vec![7.0; span(4, ld_y, cols)]],
            ..Call::default()
        };
        let narrow = call.run_f32(&kernel);
        call.run(&kernel);
        let mut expected = vec![7.0; span(4, ld_y, cols)];
        for (r, x) in x.chunks(cols).enumerate() {
            let z: f64 = x.iter().map(|x| x.exp()).sum();
            for (c, x) in x.iter().enumerate() {
                expected[r * ld_y + c] = if log { x - z.ln() } else { x.exp() / z };
            }
        }
        assert!(relative_l2(&call.outs[0], &expected) < 1e-13);
        assert!(relative_l2(&narrow[0], &expected) < 1e-5);
    }

    #[rstest]
    fn gradient(#[values(false, true)] log: bool, #[values(false, true)] acc: bool) {
        let (rows, cols) = (3, 19);
        let x = normal(2, rows * cols);
        let dy = normal(3, rows * cols);
        let forward = Softmax { rows, cols, ld_x: cols, ld_y: cols, log };
        let f = |x: &[f64]| {
            let mut call = Call { ins: vec![x.to_vec()], outs: vec![vec![0.0; rows * cols]], ..Call::default() };
            call.run(&forward).outs[0].clone()
        };
        let (ld_y, ld_dy, ld_dx) = (cols + 1, cols + 2, cols + 3);
        let before = if acc { 0.5 } else { f64::NAN };
        let mut call = Call {
            ins: vec![strided(&f(&x), cols, ld_y, f64::NAN), strided(&dy, cols, ld_dy, f64::NAN)],
            outs: vec![vec![before; span(rows, ld_dx, cols)]],
            ..Call::default()
        };
        call.run(&SoftmaxBackward { rows, cols, ld_y, ld_dy, ld_dx, log, acc });
        let grad: Vec<f64> = call.outs[0]
            .chunks(ld_dx)
            .flat_map(|row| row[..cols].iter().map(|g| if acc { g - 0.5 } else { *g }))
            .collect();
        finite_differences("dx", &x, &grad, 1e-7, |x| f(x).iter().zip(&dy).map(|(y, g)| y * g).sum());
    }
}
