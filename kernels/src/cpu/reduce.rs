//! Reductions of a matrix x [rows, cols] over its last axis, over its rows, or over both; and what rests on
//! such sums: cumulative sums and division by the standard deviation.
//!
//! With row weights w (`loss_mask`-like; 1 without a mask) and the sums over the reduced axes:
//!   sum   y = sum w x                dx = w dy
//!   mean  y = sum w x / sum w        dx = w dy / sum w      (sum w counts elements; no weight at all gives 0)
//!   max   y = max of x over rows with w != 0 (times w over the last axis); the first largest takes the gradient
//!   l2    y = sqrt(sum w x^2)        dx = w x dy / y        (0 where y = 0)
//! Mean over the last axis divides by cols, the weight staying outside: y = w mean_c x.
//!
//! Sums over rows run in fixed blocks whose partial sums are added in order.

mod cumsum;
mod std_scale;

pub use cumsum::CumSum;
pub use std_scale::{StdScale, StdScaleBackward};

use super::softmax::{max_of, put, row, span, sum_map};
use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;

/// What [`Reduce`] computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    Sum,
    Mean,
    Max,
    L2,
}

/// Which axes [`Reduce`] removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// y [rows].
    Cols,
    /// y [cols].
    Rows,
    /// y [1].
    All,
}

/// y = reduction of x.
///
/// ins: x [rows, cols], and mask [rows] when `masked`; outs: y [rows], [cols] or [1];
/// int_outs, for max: index of the element taken: its column ([`Over::Cols`]), its row ([`Over::Rows`]; -1 and y = -inf
/// when every row is masked) or row * cols + column ([`Over::All`]).
#[derive(Clone, Copy, Debug)]
pub struct Reduce {
    pub rows: usize,
    pub cols: usize,
    pub ld: usize,
    pub reduction: Reduction,
    pub over: Over,
    pub masked: bool,
}

/// Gradient of [`Reduce`].
///
/// ins: x [rows, cols] and y (both read by l2 only, may be empty otherwise), dy [rows], [cols] or [1], and mask [rows]
/// when `masked`; ints, for max: the index; outs: dx [rows, cols].
#[derive(Clone, Copy, Debug)]
pub struct ReduceBackward {
    pub forward: Reduce,
    pub ld_dx: usize,
    pub acc: bool,
}

crate::kernels! {
    Reduce => "reduce", workspace;
    ReduceBackward => "reduce_backward";
}

/// Columns one task reduces over all rows.
const WINDOW: usize = 64;
/// Rows summed before they join the running total, to bound the rounding error of long sums.
const SPAN: usize = 256;

impl Reduce {
    fn block(&self) -> usize {
        par::block_rows(self.rows, self.cols)
    }

    fn workspace(&self) -> usize {
        if self.over == Over::All { self.rows.div_ceil(self.block()) } else { 0 }
    }

    fn cost(&self) -> Cost {
        let n = (self.rows * self.cols) as f64;
        Cost::new(2.0 * n, n)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let x = args.ins[0];
        let mask = self.masked.then(|| args.ins[1]);
        let y = &mut *args.outs[0];
        match (self.reduction, self.over) {
            (Reduction::Max, over) => self.max(x, mask, y, args.int_outs[0], over, args.work),
            (_, Over::Cols) => {
                par::rows_mut(&mut y[..self.rows], 1, self.block(), |first, y| {
                    par::simd!(|| {
                        for (i, y) in y.iter_mut().enumerate() {
                            let r = first + i;
                            let sum = weight(mask, r) * self.row_sum(row(x, r, self.ld, self.cols));
                            *y = self.finish(sum, self.cols as f64);
                        }
                    })
                });
            }
            (_, Over::Rows) => {
                let count = self.weights(mask);
                par::rows_mut(&mut y[..self.cols], 1, WINDOW, |c0, y| {
                    par::simd!(|| self.column_sums(x, mask, c0, y));
                    y.iter_mut().for_each(|y| *y = self.finish(*y, count));
                });
            }
            (_, Over::All) => {
                let count = self.weights(mask) * self.cols as f64;
                let blocks = self.workspace();
                let partial = &mut args.work[..blocks];
                par::rows_mut(partial, 1, 1, |b, partial| {
                    par::simd!(|| {
                        let rows = b * self.block()..((b + 1) * self.block()).min(self.rows);
                        // In f64, because a block of narrow rows has thousands of them.
                        let sum = rows.map(|r| weight(mask, r) * self.row_sum(row(x, r, self.ld, self.cols)));
                        partial[0] = T::of(sum.map(T::to_f64).sum());
                    })
                });
                let sum = partial.iter().map(|x| x.to_f64()).sum::<f64>();
                y[0] = self.finish(T::of(sum), count);
            }
        }
    }

    #[inline(always)]
    fn row_sum<T: Real>(&self, x: &[T]) -> T {
        if self.reduction == Reduction::L2 { sum_map(x, |x| x * x) } else { sum_map(x, |x| x) }
    }

    #[inline(always)]
    fn column_sums<T: Real>(&self, x: &[T], mask: Option<&[T]>, c0: usize, y: &mut [T]) {
        let n = y.len();
        y.fill(T::ZERO);
        for start in (0..self.rows).step_by(SPAN) {
            let mut partial = [T::ZERO; WINDOW];
            for r in start..(start + SPAN).min(self.rows) {
                let w = weight(mask, r);
                let x = &x[r * self.ld + c0..][..n];
                if self.reduction == Reduction::L2 {
                    partial.iter_mut().zip(x).for_each(|(p, &x)| *p += w * x * x);
                } else {
                    partial.iter_mut().zip(x).for_each(|(p, &x)| *p += w * x);
                }
            }
            y.iter_mut().zip(partial).for_each(|(y, p)| *y += p);
        }
    }

    /// Sum of the rows' weights.
    fn weights<T: Real>(&self, mask: Option<&[T]>) -> f64 {
        mask.map_or(self.rows as f64, |m| m[..self.rows].iter().map(|m| m.to_f64()).sum())
    }

    #[inline(always)]
    fn finish<T: Real>(&self, sum: T, count: f64) -> T {
        match self.reduction {
            Reduction::Mean if count == 0.0 => T::ZERO,
            Reduction::Mean => sum / T::of(count),
            Reduction::L2 => sum.sqrt(),
            _ => sum,
        }
    }

    fn max<T: Real>(&self, x: &[T], mask: Option<&[T]>, y: &mut [T], index: &mut [i32], over: Over, work: &mut [T]) {
        let (rows, cols, ld) = (self.rows, self.cols, self.ld);
        match over {
            Over::Cols => {
                par::rows_mut(&mut index[..rows], 1, self.block(), |first, index| {
                    par::simd!(|| {
                        for (i, index) in index.iter_mut().enumerate() {
                            *index = first_max(row(x, first + i, ld, cols)) as i32;
                        }
                    })
                });
                for (r, (y, &c)) in y.iter_mut().zip(&*index).enumerate().take(rows) {
                    *y = weight(mask, r) * x[r * ld + c as usize];
                }
            }
            Over::Rows => {
                par::rows_mut(&mut index[..cols], 1, WINDOW, |c0, index| {
                    let mut best = [T::NEG_INFINITY; WINDOW];
                    index.fill(-1);
                    for r in (0..rows).filter(|&r| weight(mask, r) != T::ZERO) {
                        let x = &x[r * ld + c0..][..index.len()];
                        for ((index, best), &x) in index.iter_mut().zip(&mut best).zip(x) {
                            if *index < 0 || x > *best {
                                (*index, *best) = (r as i32, x);
                            }
                        }
                    }
                });
                for (c, (y, &r)) in y.iter_mut().zip(&*index).enumerate().take(cols) {
                    *y = usize::try_from(r).map_or(T::NEG_INFINITY, |r| x[r * ld + c]);
                }
            }
            Over::All => {
                let partial = &mut work[..self.workspace()];
                let block = self.block();
                let live = |b: usize| (b * block..((b + 1) * block).min(rows)).filter(|&r| weight(mask, r) != T::ZERO);
                par::rows_mut(partial, 1, 1, |b, partial| {
                    par::simd!(|| {
                        partial[0] = live(b).fold(T::NEG_INFINITY, |m, r| m.max(max_of(row(x, r, ld, cols))));
                    })
                });
                let b = first_max(partial);
                y[0] = partial.get(b).copied().unwrap_or(T::NEG_INFINITY);
                index[0] = live(b)
                    .find_map(|r| row(x, r, ld, cols).iter().position(|&x| x == y[0]).map(|c| (r * cols + c) as i32))
                    .unwrap_or(-1);
            }
        }
    }
}

#[inline(always)]
fn weight<T: Real>(mask: Option<&[T]>, r: usize) -> T {
    mask.map_or(T::ONE, |m| m[r])
}

/// Position of the first largest element; 0 when there is none.
#[inline(always)]
pub(super) fn first_max<T: Real>(x: &[T]) -> usize {
    let m = max_of(x);
    x.iter().position(|&x| x == m).unwrap_or(0)
}

impl ReduceBackward {
    fn cost(&self) -> Cost {
        let n = (self.forward.rows * self.forward.cols) as f64;
        let reads = if self.forward.reduction == Reduction::L2 { 2.0 } else { 1.0 };
        Cost::new(2.0 * n, reads * n)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let f = &self.forward;
        let (x, y, dy) = (args.ins[0], args.ins[1], args.ins[2]);
        let mask = f.masked.then(|| args.ins[3]);
        let ints = args.ints;
        let count = match f.over {
            Over::Cols => f.cols as f64,
            Over::Rows => f.weights(mask),
            Over::All => f.weights(mask) * f.cols as f64,
        };
        let mean = if count == 0.0 { T::ZERO } else { T::of(1.0 / count) };
        let acc = self.acc;
        let out = &mut args.outs[0][..span(f.rows, self.ld_dx, f.cols)];
        par::rows_mut(out, self.ld_dx, f.block(), |first, block| {
            par::simd!(|| {
                for (i, dx) in block.chunks_mut(self.ld_dx).enumerate() {
                    let r = first + i;
                    let dx = &mut dx[..f.cols];
                    let w = weight(mask, r);
                    // The operand `of` (dy or y) that belongs to column c of this row.
                    let at = |of: &[T], c: usize| match f.over {
                        Over::Cols => of[r],
                        Over::Rows => of[c],
                        Over::All => of[0],
                    };
                    match f.reduction {
                        Reduction::Sum | Reduction::Mean => {
                            let w = if f.reduction == Reduction::Mean { w * mean } else { w };
                            for (c, dx) in dx.iter_mut().enumerate() {
                                put(dx, w * at(dy, c), acc);
                            }
                        }
                        Reduction::L2 => {
                            let x = row(x, r, f.ld, f.cols);
                            for (c, (dx, &x)) in dx.iter_mut().zip(x).enumerate() {
                                let y = at(y, c);
                                put(dx, if y == T::ZERO { T::ZERO } else { w * x * at(dy, c) / y }, acc);
                            }
                        }
                        Reduction::Max => {
                            let index = ints[0];
                            for (c, dx) in dx.iter_mut().enumerate() {
                                let (taken, w) = match f.over {
                                    Over::Cols => (index[r] == c as i32, w),
                                    Over::Rows => (index[c] == r as i32, T::ONE),
                                    Over::All => (index[0] == (r * f.cols + c) as i32, T::ONE),
                                };
                                put(dx, if taken { w * at(dy, c) } else { T::ZERO }, acc);
                            }
                        }
                    }
                }
            })
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, finite_differences, normal, relative_l2};
    use rstest::rstest;

    const R: usize = 7;
    const C: usize = 70;
    const LD: usize = 73;
    const MASK: [f64; R] = [1.0, 0.5, 0.0, 1.0, 2.0, 0.0, 1.0];

    fn kernel(reduction: Reduction, over: Over, masked: bool) -> Reduce {
        Reduce { rows: R, cols: C, ld: LD, reduction, over, masked }
    }

    fn size(over: Over) -> usize {
        match over {
            Over::Cols => R,
            Over::Rows => C,
            Over::All => 1,
        }
    }

    fn stride(x: &[f64]) -> Vec<f64> {
        let mut out = vec![f64::NAN; span(R, LD, C)];
        x.chunks(C).enumerate().for_each(|(r, x)| out[r * LD..][..C].copy_from_slice(x));
        out
    }

    fn forward(x: &[f64], kernel: Reduce) -> Call {
        let n = size(kernel.over);
        let mut call = Call {
            ins: vec![stride(x), MASK.to_vec()],
            outs: vec![vec![f64::NAN; n]],
            int_outs: vec![vec![-7; n]],
            ..Call::default()
        };
        call.run(&kernel);
        call
    }

    fn naive(x: &[f64], k: Reduce) -> Vec<f64> {
        let w = |r: usize| if k.masked { MASK[r] } else { 1.0 };
        let groups: Vec<Vec<(usize, usize)>> = match k.over {
            Over::Cols => (0..R).map(|r| (0..C).map(|c| (r, c)).collect()).collect(),
            Over::Rows => (0..C).map(|c| (0..R).map(|r| (r, c)).collect()).collect(),
            Over::All => vec![(0..R * C).map(|i| (i / C, i % C)).collect()],
        };
        let one = |group: &Vec<(usize, usize)>| {
            let sum = |f: &dyn Fn(f64) -> f64| group.iter().map(|&(r, c)| w(r) * f(x[r * C + c])).sum::<f64>();
            match k.reduction {
                Reduction::Sum => sum(&|x| x),
                Reduction::Mean if k.over == Over::Cols => sum(&|x| x) / C as f64,
                Reduction::Mean => sum(&|x| x) / group.iter().map(|&(r, _)| w(r)).sum::<f64>(),
                Reduction::L2 => sum(&|x| x * x).sqrt(),
                Reduction::Max if k.over == Over::Cols => {
                    w(group[0].0) * group.iter().map(|&(r, c)| x[r * C + c]).fold(f64::MIN, f64::max)
                }
                Reduction::Max => {
                    let live = group.iter().filter(|&&(r, _)| w(r) != 0.0);
                    live.map(|&(r, c)| x[r * C + c]).fold(f64::MIN, f64::max)
                }
            }
        };
        groups.iter().map(one).collect()
    }

    #[rstest]
    fn values_and_gradients(
        #[values(Reduction::Sum, Reduction::Mean, Reduction::Max, Reduction::L2)] reduction: Reduction,
        #[values(Over::Cols, Over::Rows, Over::All)] over: Over,
        #[values(false, true)] masked: bool,
        #[values(false, true)] acc: bool,
    ) {
        let x = normal(1, R * C);
        let kernel = kernel(reduction, over, masked);
        let done = forward(&x, kernel);
        assert!(relative_l2(&done.outs[0], &naive(&x, kernel)) < 1e-13);
        assert!(relative_l2(&done.run_f32(&kernel)[0], &done.outs[0]) < 1e-5);

        let dy = normal(2, size(over));
        let ld_dx = C + 1;
        let mut call = Call {
            ins: vec![stride(&x), done.outs[0].clone(), dy.clone(), MASK.to_vec()],
            outs: vec![vec![if acc { 1.0 } else { f64::NAN }; span(R, ld_dx, C)]],
            ints: done.int_outs.clone(),
            ..Call::default()
        };
        call.run(&ReduceBackward { forward: kernel, ld_dx, acc });
        let dx: Vec<f64> =
            call.outs[0].chunks(ld_dx).flat_map(|d| d[..C].iter().map(|g| if acc { g - 1.0 } else { *g })).collect();
        finite_differences("dx", &x, &dx, 1e-6, |x| {
            forward(x, kernel).outs[0].iter().zip(&dy).map(|(y, g)| y * g).sum()
        });
    }

    #[test]
    fn everything_masked() {
        let x = normal(3, R * C);
        for over in [Over::Rows, Over::All] {
            for reduction in [Reduction::Mean, Reduction::Max] {
                let n = size(over);
                let mut call = Call {
                    ins: vec![stride(&x), vec![0.0; R]],
                    outs: vec![vec![f64::NAN; n]],
                    int_outs: vec![vec![-7; n]],
                    ..Call::default()
                };
                call.run(&kernel(reduction, over, true));
                let expected = if reduction == Reduction::Mean { 0.0 } else { f64::NEG_INFINITY };
                assert_eq!(call.outs[0], vec![expected; n]);
            }
        }
    }

    /// Long sums over rows: several blocks and spans, and close to the exact sum in f32.
    #[test]
    fn long_sums() {
        let rows = 40_000;
        let x = vec![0.1f32 as f64; rows * 3];
        for (over, n, each) in [(Over::Rows, 3, rows), (Over::All, 1, 3 * rows)] {
            let kernel = Reduce { rows, cols: 3, ld: 3, reduction: Reduction::Sum, over, masked: false };
            let call = Call { ins: vec![x.clone()], outs: vec![vec![0.0; n]], ..Call::default() };
            let exact = each as f64 * f64::from(0.1f32);
            assert!(call.run_f32(&kernel)[0].iter().all(|y| (y - exact).abs() < 2e-5 * exact));
        }
    }
}
