//! Element-wise kernels on [rows, cols] operands with row strides, and the two sums their gradients need.
//!
//! | need                          | kernel                                        |
//! |-------------------------------|-----------------------------------------------|
//! | y = a + b, y = a * b          | [`Binary`]                                    |
//! | gradients of a * b            | [`Binary`] with `Mul` (and `acc`) on dy       |
//! | copy, y += x                  | [`Scale`] with factor 1 (and `acc`)           |
//! | y = c x, y = c s x, y *= c s  | [`Scale`] (with `scalar`, `in_place`)         |
//! | gradient of the scalar s      | [`Dot`]                                       |
//! | y[t, :] = x[t, :] s[t]        | [`RowScale`]; dx is [`RowScale`] of dy        |
//! | gradient of s[t]              | [`RowDot`]                                    |
//! | y = value                     | [`Fill`]                                      |

use super::lanes;
use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;
use rayon::prelude::*;

/// A [rows, cols] view: dense operands are cut into long rows, whatever their shape, so that narrow rows cost nothing.
#[derive(Clone, Copy)]
struct Shape<const N: usize> {
    rows: usize,
    cols: usize,
    ld: [usize; N],
    /// Elements in all.
    len: usize,
}

impl<const N: usize> Shape<N> {
    fn new(rows: usize, cols: usize, ld: [usize; N]) -> Self {
        const LONG: usize = 4096;
        let len = rows * cols;
        if ld.iter().all(|&ld| ld == cols) || rows == 1 {
            let cols = len.clamp(1, LONG);
            return Shape { rows: len.div_ceil(cols), cols, ld: [cols; N], len };
        }
        Shape { rows, cols, ld, len }
    }

    fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Length of row `r`: the last row of a dense operand may be short.
    #[inline(always)]
    fn row_len(&self, r: usize) -> usize {
        self.cols.min(self.len - r * self.cols)
    }

    /// Row `r` of operand `i`.
    #[inline(always)]
    fn row<'a, T>(&self, x: &'a [T], i: usize, r: usize) -> &'a [T] {
        &x[r * self.ld[i]..][..self.row_len(r)]
    }

    /// Calls `f(row, its elements)` for every row of the output, which is operand 0.
    fn each<T: Send>(&self, y: &mut [T], f: impl Fn(usize, &mut [T]) + Sync) {
        if self.is_empty() {
            return;
        }
        let ld = self.ld[0];
        let end = (self.rows - 1) * ld + self.row_len(self.rows - 1);
        par::rows_mut(&mut y[..end], ld, par::block_rows(self.rows, self.cols), |first, y| {
            par::simd!(|| {
                for (i, y) in y.chunks_mut(ld).enumerate() {
                    let n = self.row_len(first + i);
                    f(first + i, &mut y[..n]);
                }
            });
        });
    }
}

/// Operation of [`Binary`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BinaryOp {
    Add,
    Sub,
    Mul,
}

/// y = a op b, added to y when `acc`.
///
/// ins: a, b; outs: y; all [rows, cols].
#[derive(Clone, Debug)]
pub struct Binary {
    pub op: BinaryOp,
    pub rows: usize,
    pub cols: usize,
    pub ld_a: usize,
    pub ld_b: usize,
    pub ld_y: usize,
    pub acc: bool,
}

impl Binary {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        match self.op {
            BinaryOp::Add => self.apply(args, |a, b| a + b),
            BinaryOp::Sub => self.apply(args, |a, b| a - b),
            BinaryOp::Mul => self.apply(args, |a, b| a * b),
        }
    }

    #[inline(always)]
    fn apply<T: Real>(&self, args: Args<'_, T>, op: impl Fn(T, T) -> T + Sync) {
        let shape = Shape::new(self.rows, self.cols, [self.ld_y, self.ld_a, self.ld_b]);
        let (a, b) = (args.ins[0], args.ins[1]);
        shape.each(
            args.outs[0],
            #[inline(always)]
            |r, y| {
                let ab = shape.row(a, 1, r).iter().zip(shape.row(b, 2, r));
                if self.acc {
                    y.iter_mut().zip(ab).for_each(|(y, (&a, &b))| *y += op(a, b));
                } else {
                    y.iter_mut().zip(ab).for_each(|(y, (&a, &b))| *y = op(a, b));
                }
            },
        );
    }

    fn cost(&self) -> Cost {
        let n = (self.rows * self.cols) as f64;
        Cost::new(n, 3.0 * n)
    }
}

/// y = factor * s * x, added to y when `acc`; without `scalar`, s = 1. Factor 1 alone copies.
///
/// ins: x [rows, cols] (absent when `in_place`: y is multiplied where it lies), then s [1] when `scalar`;
/// outs: y [rows, cols].
#[derive(Clone, Debug)]
pub struct Scale {
    pub rows: usize,
    pub cols: usize,
    pub ld_x: usize,
    pub ld_y: usize,
    pub factor: f64,
    pub scalar: bool,
    /// Ignored when `in_place`.
    pub acc: bool,
    pub in_place: bool,
}

impl Scale {
    /// y = x.
    pub fn copy(rows: usize, cols: usize, ld_x: usize, ld_y: usize) -> Self {
        Scale { rows, cols, ld_x, ld_y, factor: 1.0, scalar: false, acc: false, in_place: false }
    }

    /// y += x.
    pub fn add_in_place(rows: usize, cols: usize, ld_x: usize, ld_y: usize) -> Self {
        Scale { acc: true, ..Scale::copy(rows, cols, ld_x, ld_y) }
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let s = T::of(self.factor) * if self.scalar { args.ins[usize::from(!self.in_place)][0] } else { T::ONE };
        if self.in_place {
            let shape = Shape::new(self.rows, self.cols, [self.ld_y]);
            shape.each(args.outs[0], |_, y| y.iter_mut().for_each(|y| *y *= s));
            return;
        }
        let x = args.ins[0];
        let shape = Shape::new(self.rows, self.cols, [self.ld_y, self.ld_x]);
        let copy = self.factor == 1.0 && !self.scalar;
        shape.each(
            args.outs[0],
            #[inline(always)]
            |r, y| {
                let x = shape.row(x, 1, r);
                match (copy, self.acc) {
                    (true, false) => y.copy_from_slice(x),
                    (_, false) => y.iter_mut().zip(x).for_each(|(y, &x)| *y = x * s),
                    (_, true) => y.iter_mut().zip(x).for_each(|(y, &x)| *y += x * s),
                }
            },
        );
    }

    fn cost(&self) -> Cost {
        let n = (self.rows * self.cols) as f64;
        Cost::new(n, 2.0 * n)
    }
}

/// y = value.
///
/// outs: y [rows, cols].
#[derive(Clone, Debug)]
pub struct Fill {
    pub rows: usize,
    pub cols: usize,
    pub ld: usize,
    pub value: f64,
}

impl Fill {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let value = T::of(self.value);
        Shape::new(self.rows, self.cols, [self.ld]).each(args.outs[0], |_, y| y.fill(value));
    }

    fn cost(&self) -> Cost {
        Cost::new(0.0, (self.rows * self.cols) as f64)
    }
}

/// out[0] += factor * sum of a * b, accumulated in f64.
///
/// The gradient of s in y = factor * s * x, with a = dy and b = x. ins: a, b [rows, cols]; outs: out [1].
#[derive(Clone, Debug)]
pub struct Dot {
    pub rows: usize,
    pub cols: usize,
    pub ld_a: usize,
    pub ld_b: usize,
    pub factor: f64,
}

impl Dot {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let shape = Shape::new(self.rows, self.cols, [self.ld_a, self.ld_b]);
        let (a, b) = (args.ins[0], args.ins[1]);
        let block = shape.rows.div_ceil(par::MAX_PARTS).max(1);
        let mut parts = [0.0f64; par::MAX_PARTS];
        let sum = |i: usize| {
            par::simd!(|| {
                let mut sum = 0.0;
                for r in (i * block)..((i + 1) * block).min(shape.rows) {
                    sum += lanes::sum2(shape.row(a, 0, r), shape.row(b, 1, r), |a, b| a.to_f64() * b.to_f64());
                }
                sum
            })
        };
        each_part(&mut parts, shape.rows.div_ceil(block), sum);
        args.outs[0][0] += T::of(self.factor * parts.iter().sum::<f64>());
    }

    fn cost(&self) -> Cost {
        let n = (self.rows * self.cols) as f64;
        Cost::new(2.0 * n, 2.0 * n)
    }
}

/// Fills the first `n` partial sums, in parallel.
pub(crate) fn each_part(parts: &mut [f64; par::MAX_PARTS], n: usize, sum: impl Fn(usize) -> f64 + Sync) {
    let parts = &mut parts[..n];
    if n <= 1 || rayon::current_num_threads() == 1 {
        parts.iter_mut().enumerate().for_each(|(i, p)| *p = sum(i));
    } else {
        parts.par_iter_mut().enumerate().for_each(|(i, p)| *p = sum(i));
    }
}

/// y[r, :] = x[r, :] * s[r], added to y when `acc`.
///
/// ins: x [rows, cols], s [rows]; outs: y [rows, cols].
#[derive(Clone, Debug)]
pub struct RowScale {
    pub rows: usize,
    pub cols: usize,
    pub ld_x: usize,
    pub ld_y: usize,
    pub acc: bool,
}

impl RowScale {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (x, s) = (args.ins[0], args.ins[1]);
        strided_rows(args.outs[0], self.rows, self.cols, self.ld_y, |r, y| {
            let (x, s) = (&x[r * self.ld_x..][..self.cols], s[r]);
            if self.acc {
                y.iter_mut().zip(x).for_each(|(y, &x)| *y += x * s);
            } else {
                y.iter_mut().zip(x).for_each(|(y, &x)| *y = x * s);
            }
        });
    }

    fn cost(&self) -> Cost {
        let n = (self.rows * self.cols) as f64;
        Cost::new(n, 2.0 * n + self.rows as f64)
    }
}

/// ds[r] = sum over c of dy[r, c] * x[r, c], added to ds when `acc`: the gradient of s in [`RowScale`].
///
/// ins: dy, x [rows, cols]; outs: ds [rows].
#[derive(Clone, Debug)]
pub struct RowDot {
    pub rows: usize,
    pub cols: usize,
    pub ld_dy: usize,
    pub ld_x: usize,
    pub acc: bool,
}

impl RowDot {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (dy, x) = (args.ins[0], args.ins[1]);
        let ds = &mut args.outs[0][..self.rows];
        par::rows_mut(ds, 1, par::block_rows(self.rows, self.cols), |first, ds| {
            par::simd!(|| {
                for (r, ds) in (first..).zip(ds) {
                    let sum = lanes::dot(&dy[r * self.ld_dy..][..self.cols], &x[r * self.ld_x..][..self.cols]);
                    *ds = if self.acc { *ds + sum } else { sum };
                }
            });
        });
    }

    fn cost(&self) -> Cost {
        let n = (self.rows * self.cols) as f64;
        Cost::new(2.0 * n, 2.0 * n + self.rows as f64)
    }
}

/// Calls `f(row, its first cols elements)` for every row of `y`, in parallel and vectorised; `f` must inline.
#[inline(always)]
pub(crate) fn strided_rows<T: Send>(
    y: &mut [T],
    rows: usize,
    cols: usize,
    ld: usize,
    f: impl Fn(usize, &mut [T]) + Sync,
) {
    if rows == 0 || cols == 0 {
        return;
    }
    let y = &mut y[..(rows - 1) * ld + cols];
    par::rows_mut(y, ld, par::block_rows(rows, cols), |first, y| {
        par::simd!(|| {
            for (i, y) in y.chunks_mut(ld).enumerate() {
                f(first + i, &mut y[..cols]);
            }
        });
    });
}

crate::kernels! {
    Binary => "binary";
    Scale => "scale";
    Fill => "fill";
    Dot => "dot";
    RowScale => "row_scale";
    RowDot => "row_dot";
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, finite_differences, normal, relative_l2};
    use crate::kernel::Kernel;

    /// Runs a kernel and compares every element of its [rows, ld] output with `want(row, column, old)`; what lies
    /// between the columns must stay. Also compares f32 with f64.
    fn expect(kernel: &dyn Kernel, call: &mut Call, cols: usize, ld: usize, want: impl Fn(usize, usize, f64) -> f64) {
        let old = call.outs[0].clone();
        let single = call.run_f32(kernel);
        call.run(kernel);
        for (i, (&got, &old)) in call.outs[0].iter().zip(&old).enumerate() {
            let (r, c) = (i / ld, i % ld);
            let want = if c < cols { want(r, c, old) } else { old };
            assert!((got - want).abs() < 1e-12 * want.abs().max(1.0), "{kernel:?} at {r},{c}: {got} is not {want}");
        }
        assert!(relative_l2(&single[0], &call.outs[0]) < 1e-6);
    }

    fn call(ins: Vec<Vec<f64>>, out: usize) -> Call {
        Call { ins, outs: vec![normal(99, out)], ..Default::default() }
    }

    /// Shapes: strided with an early end, dense and small, dense and longer than one piece.
    const SHAPES: [(usize, usize, usize, usize); 4] = [(3, 5, 7, 6), (4, 3, 3, 3), (1, 9, 20, 9), (2600, 5, 5, 5)];

    #[test]
    fn binary_scale_and_fill() {
        for (rows, cols, ld_x, ld_y) in SHAPES {
            let size = |ld: usize| (rows - 1) * ld + cols;
            let (a, b) = (normal(1, size(ld_x)), normal(2, size(ld_y)));
            for acc in [false, true] {
                let keep = |old: f64| if acc { old } else { 0.0 };
                for (op, f) in [
                    (BinaryOp::Add, (|a, b| a + b) as fn(f64, f64) -> f64),
                    (BinaryOp::Sub, |a, b| a - b),
                    (BinaryOp::Mul, |a, b| a * b),
                ] {
                    let kernel = Binary { op, rows, cols, ld_a: ld_x, ld_b: ld_y, ld_y, acc };
                    expect(&kernel, &mut call(vec![a.clone(), b.clone()], size(ld_y)), cols, ld_y, |r, c, old| {
                        f(a[r * ld_x + c], b[r * ld_y + c]) + keep(old)
                    });
                }
                for (factor, scalar) in [(1.0, false), (1.0, true), (-2.5, false), (0.5, true)] {
                    let kernel = Scale { factor, scalar, acc, ..Scale::copy(rows, cols, ld_x, ld_y) };
                    let s = if scalar { 3.0 } else { 1.0 };
                    expect(&kernel, &mut call(vec![a.clone(), vec![3.0]], size(ld_y)), cols, ld_y, |r, c, old| {
                        factor * s * a[r * ld_x + c] + keep(old)
                    });
                }
            }
            let kernel = Scale { factor: 2.0, scalar: true, in_place: true, ..Scale::copy(rows, cols, 0, ld_y) };
            expect(&kernel, &mut call(vec![vec![3.0]], size(ld_y)), cols, ld_y, |_, _, old| 6.0 * old);
            let kernel = Fill { rows, cols, ld: ld_y, value: -1.5 };
            expect(&kernel, &mut call(vec![], size(ld_y)), cols, ld_y, |_, _, _| -1.5);
        }
    }

    #[test]
    fn row_scale_and_its_sums() {
        for (rows, cols, ld_x, ld_y) in SHAPES {
            let size = |ld: usize| (rows - 1) * ld + cols;
            let (x, s) = (normal(1, size(ld_x)), normal(2, rows));
            for acc in [false, true] {
                let keep = |old: f64| if acc { old } else { 0.0 };
                let kernel = RowScale { rows, cols, ld_x, ld_y, acc };
                expect(&kernel, &mut call(vec![x.clone(), s.clone()], size(ld_y)), cols, ld_y, |r, c, old| {
                    s[r] * x[r * ld_x + c] + keep(old)
                });
                let dy = normal(3, size(ld_y));
                let kernel = RowDot { rows, cols, ld_dy: ld_y, ld_x, acc };
                expect(&kernel, &mut call(vec![dy.clone(), x.clone()], rows), 1, 1, |r, _, old| {
                    (0..cols).map(|c| dy[r * ld_y + c] * x[r * ld_x + c]).sum::<f64>() + keep(old)
                });
            }
        }
    }

    #[test]
    fn scalar_gradient() {
        let (rows, cols, ld_x, ld_y) = (3, 5, 7, 6);
        let (x, g, s) = (normal(1, 19), normal(2, 17), [0.7]);
        let kernel = Scale { factor: 2.0, scalar: true, ..Scale::copy(rows, cols, ld_x, ld_y) };
        let mut ds = call(vec![g.clone(), x.clone()], 1);
        let before = ds.outs[0][0];
        ds.run(&Dot { rows, cols, ld_a: ld_y, ld_b: ld_x, factor: 2.0 });
        finite_differences("ds", &s, &[ds.outs[0][0] - before], 1e-8, |s| {
            let mut y = Call { ins: vec![x.clone(), s.to_vec()], outs: vec![vec![0.0; 17]], ..Default::default() };
            y.run(&kernel);
            (0..rows * ld_y - 1).filter(|i| i % ld_y < cols).map(|i| y.outs[0][i] * g[i]).sum()
        });
    }

    #[test]
    fn nothing_to_do() {
        call(vec![vec![], vec![]], 0).run(&Binary {
            op: BinaryOp::Add,
            rows: 0,
            cols: 4,
            ld_a: 4,
            ld_b: 4,
            ld_y: 4,
            acc: false,
        });
        call(vec![vec![], vec![]], 0).run(&RowScale { rows: 0, cols: 4, ld_x: 4, ld_y: 5, acc: false });
        let mut dot = call(vec![vec![], vec![]], 1);
        let before = dot.outs[0][0];
        dot.run(&Dot { rows: 0, cols: 4, ld_a: 5, ld_b: 4, factor: 1.0 });
        assert_eq!(dot.outs[0][0], before);
    }
}
