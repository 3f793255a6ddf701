//! Linear layers of experts: one matrix per group of rows.
//!
//! Rows are sorted by expert (see `moe_permute`): expert e owns rows `offsets[e]..offsets[e + 1]`, none at all if it
//! got no token. W [E, out, in] is stored stacked; as in a linear layer the kernels use the rows (output features) and
//! columns (input features) that `Blocks` name, of the first `experts` experts, and activations are dense:
//! y_s = W_e x_s, dx_s = W_e^T dy_s, dW_e += sum_s dy_s x_s^T. Rows from `offsets[experts]` on belong to no expert;
//! their outputs are zero.
//!
//! Work is cut at experts and within an expert into at most [`ROWS`] rows, which depends on the offsets alone.

use super::gemm_call::{Mat, matmul};
use crate::blocks::Blocks;
use crate::kernel::{Args, Cost};
use crate::real::Real;
use rayon::prelude::*;
use std::ops::Range;

/// Rows (of activations, or of a weight gradient) of one product.
const ROWS: usize = 192;

/// Sizes of a stacked weight and of the part in use.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupedShape {
    /// S, rows of the activations: T*K.
    pub slots: usize,
    /// Experts in use, one less than the length of offsets.
    pub experts: usize,
    /// Output features.
    pub rows: Blocks,
    /// Input features.
    pub cols: Blocks,
    /// Elements between stored rows of W.
    pub ld_w: usize,
    /// Elements between experts of W.
    pub ld_expert: usize,
}

/// ins: xs [S, cols], w; ints: offsets [experts + 1]; outs: ys [S, rows].
#[derive(Clone, Debug)]
pub struct GroupedLinearForward {
    pub shape: GroupedShape,
    pub ld_x: usize,
    pub ld_y: usize,
    /// ys += instead of =.
    pub acc: bool,
}

/// ins: dys [S, rows], w; ints: offsets [experts + 1]; outs: dxs [S, cols].
#[derive(Clone, Debug)]
pub struct GroupedLinearBackwardInput {
    pub shape: GroupedShape,
    pub ld_dy: usize,
    pub ld_dx: usize,
    /// dxs += instead of =.
    pub acc: bool,
}

/// ins: dys [S, rows], xs [S, cols]; ints: offsets [experts + 1]; outs: dw (+=), laid out as W.
#[derive(Clone, Debug)]
pub struct GroupedLinearBackwardWeight {
    pub shape: GroupedShape,
    pub ld_dy: usize,
    pub ld_x: usize,
}

crate::kernels! {
    GroupedLinearForward => "grouped_linear";
    GroupedLinearBackwardInput => "grouped_linear_backward_input";
    GroupedLinearBackwardWeight => "grouped_linear_backward_weight";
}

impl GroupedShape {
    fn cost(&self) -> Cost {
        let (s, o, i) = (self.slots as f64, self.rows.len() as f64, self.cols.len() as f64);
        Cost::new(2.0 * s * o * i, s * (o + i) + self.experts as f64 * o * i)
    }

    /// Calls `f(expert, first row, rows, out from the first row on)` for pieces of the experts' rows, in parallel, and
    /// clears the rows without an expert unless `acc`.
    fn pieces<T: Real>(
        &self,
        offsets: &[i32],
        out: &mut [T],
        (ld, width, acc): (usize, usize, bool),
        f: impl Fn(usize, usize, usize, &mut [T]) + Sync,
    ) {
        let used = offsets[self.experts] as usize;
        let at = (used * ld).min(out.len());
        let (out, rest) = out.split_at_mut(at);
        if !acc {
            rest.chunks_mut(ld).take(self.slots - used).for_each(|row| row[..width].fill(T::ZERO));
        }
        split(0..self.experts, 0..used, offsets, ld, out, &f);
    }
}

/// Halves the experts, then the rows of one expert, until a piece is small enough.
fn split<T: Real>(
    experts: Range<usize>,
    rows: Range<usize>,
    offsets: &[i32],
    ld: usize,
    out: &mut [T],
    f: &(impl Fn(usize, usize, usize, &mut [T]) + Sync),
) {
    if rows.is_empty() {
        return;
    }
    let (middle, first, second) = if experts.len() > 1 {
        let half = experts.start + experts.len() / 2;
        (offsets[half] as usize, experts.start..half, half..experts.end)
    } else if rows.len() > ROWS {
        let pieces = rows.len().div_ceil(ROWS);
        (rows.start + pieces / 2 * ROWS, experts.clone(), experts)
    } else {
        return f(experts.start, rows.start, rows.len(), out);
    };
    let at = ((middle - rows.start) * ld).min(out.len());
    let (low, high) = out.split_at_mut(at);
    rayon::join(
        || split(first, rows.start..middle, offsets, ld, low, f),
        || split(second, middle..rows.end, offsets, ld, high, f),
    );
}

impl GroupedLinearForward {
    fn cost(&self) -> Cost {
        self.shape.cost()
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let ([xs, w], [offsets], [ys]) = (args.ins, args.ints, args.outs) else {
            unreachable!("grouped_linear takes xs, w, offsets and gives ys")
        };
        let s = &self.shape;
        s.pieces(offsets, ys, (self.ld_y, s.rows.len(), self.acc), |e, first, m, y| {
            let (x, w) = (&xs[first * self.ld_x..], &w[e * s.ld_expert..]);
            for (row, y_col, n) in s.rows.iter() {
                let mut acc = self.acc;
                for (col, x_col, k) in s.cols.iter() {
                    let (x, w) = (Mat::rows(&x[x_col..], self.ld_x), Mat::cols(&w[row * s.ld_w + col..], s.ld_w));
                    matmul((m, n, k), T::ONE, x, w, acc, &mut y[y_col..], self.ld_y, false);
                    acc = true;
                }
            }
        });
    }
}

impl GroupedLinearBackwardInput {
    fn cost(&self) -> Cost {
        self.shape.cost()
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let ([dys, w], [offsets], [dxs]) = (args.ins, args.ints, args.outs) else {
            unreachable!("grouped_linear_backward_input takes dys, w, offsets and gives dxs")
        };
        let s = &self.shape;
        s.pieces(offsets, dxs, (self.ld_dx, s.cols.len(), self.acc), |e, first, m, dx| {
            let (dy, w) = (&dys[first * self.ld_dy..], &w[e * s.ld_expert..]);
            for (col, dx_col, n) in s.cols.iter() {
                let mut acc = self.acc;
                for (row, dy_col, k) in s.rows.iter() {
                    let (dy, w) = (Mat::rows(&dy[dy_col..], self.ld_dy), Mat::rows(&w[row * s.ld_w + col..], s.ld_w));
                    matmul((m, n, k), T::ONE, dy, w, acc, &mut dx[dx_col..], self.ld_dx, false);
                    acc = true;
                }
            }
        });
    }
}

impl GroupedLinearBackwardWeight {
    fn cost(&self) -> Cost {
        self.shape.cost()
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let ([dys, xs], [offsets], [dw]) = (args.ins, args.ints, args.outs) else {
            unreachable!("grouped_linear_backward_weight takes dys, xs, offsets and gives dw")
        };
        let s = &self.shape;
        dw.par_chunks_mut(s.ld_expert).take(s.experts).enumerate().for_each(|(e, dw)| {
            let (first, end) = (offsets[e] as usize, offsets[e + 1] as usize);
            if first == end {
                return;
            }
            let (dy, x) = (&dys[first * self.ld_dy..], &xs[first * self.ld_x..]);
            for (row, dy_col, n) in s.rows.iter() {
                let end_of_block = ((row + n) * s.ld_w).min(dw.len());
                let block = &mut dw[row * s.ld_w..end_of_block];
                block.par_chunks_mut(ROWS * s.ld_w).enumerate().for_each(|(i, dw)| {
                    let m = ROWS.min(n - i * ROWS);
                    let dy = Mat::cols(&dy[dy_col + i * ROWS..], self.ld_dy);
                    for (col, x_col, n) in s.cols.iter() {
                        let x = Mat::rows(&x[x_col..], self.ld_x);
                        matmul((m, n, end - first), T::ONE, dy, x, true, &mut dw[col..], s.ld_w, false);
                    }
                });
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, finite_differences, normal, relative_l2};
    use rstest::rstest;

    /// W [5, 9, 8] stored; experts 0..4, rows and columns of two blocks each.
    fn shape(slots: usize) -> GroupedShape {
        let (rows, cols) = (Blocks::new([(0, 3), (5, 2)]), Blocks::new([(1, 4), (6, 2)]));
        GroupedShape { slots, experts: 4, rows, cols, ld_w: 8, ld_expert: 72 }
    }

    const LD_X: usize = 7;
    const LD_Y: usize = 6;

    fn stored(b: &Blocks) -> Vec<usize> {
        b.iter().flat_map(|(start, _, len)| start..start + len).collect()
    }

    fn run(kernel: &dyn crate::Kernel, a: &[f64], b: &[f64], offsets: &[i32], out: Vec<f64>) -> Call {
        let ins = vec![a.to_vec(), b.to_vec()];
        let mut call = Call { ins, ints: vec![offsets.to_vec()], outs: vec![out], ..Default::default() };
        call.run(kernel);
        call
    }

    /// ys by the definition: rows `LD_Y` apart, zero where there is no expert.
    fn naive(s: &GroupedShape, x: &[f64], w: &[f64], offsets: &[i32]) -> Vec<f64> {
        let (rows, cols) = (stored(&s.rows), stored(&s.cols));
        let mut y = vec![0.0; s.slots * LD_Y];
        for e in 0..s.experts {
            for t in offsets[e] as usize..offsets[e + 1] as usize {
                for (o, &row) in rows.iter().enumerate() {
                    let term = |(i, &col): (usize, &usize)| w[e * 72 + row * 8 + col] * x[t * LD_X + i];
                    y[t * LD_Y + o] = cols.iter().enumerate().map(term).sum();
                }
            }
        }
        y
    }

    #[rstest]
    #[case(12, &[0, 3, 3, 8, 10])]
    #[case(4, &[0, 0, 0, 0, 4])]
    #[case(4, &[0, 0, 0, 0, 0])]
    #[case(900, &[0, 500, 501, 501, 893])]
    fn forward_and_backward(#[case] slots: usize, #[case] offsets: &[i32]) {
        let s = shape(slots);
        let (x, w, dy) = (normal(1, slots * LD_X), normal(2, 5 * 72), normal(3, slots * LD_Y));
        let forward = GroupedLinearForward { shape: s.clone(), ld_x: LD_X, ld_y: LD_Y, acc: false };
        let call = run(&forward, &x, &w, offsets, vec![7.0; slots * LD_Y - 1]);
        let mut expect = naive(&s, &x, &w, offsets);
        expect.iter_mut().skip(5).step_by(LD_Y).for_each(|y| *y = 7.0);
        expect.pop();
        assert!(relative_l2(&call.outs[0], &expect) < 1e-14);
        assert!(relative_l2(&call.run_f32(&forward)[0], &expect) < 1e-6);
        let added = run(&GroupedLinearForward { acc: true, ..forward }, &x, &w, offsets, vec![7.0; slots * LD_Y - 1]);
        let shift = expect.iter().enumerate().map(|(i, y)| if i % LD_Y == 5 { *y } else { y + 7.0 });
        assert!(relative_l2(&added.outs[0], &shift.collect::<Vec<_>>()) < 1e-14);

        let input = GroupedLinearBackwardInput { shape: s.clone(), ld_dy: LD_Y, ld_dx: LD_X, acc: false };
        let weight = GroupedLinearBackwardWeight { shape: s.clone(), ld_dy: LD_Y, ld_x: LD_X };
        let dx = run(&input, &dy, &w, offsets, vec![7.0; slots * LD_X]).outs[0].clone();
        let dw = run(&weight, &dy, &x, offsets, vec![0.5; 5 * 72]).outs[0].clone();
        let fresh: Vec<f64> = dw.iter().map(|d| d - 0.5).collect();
        let loss = |x: &[f64], w: &[f64]| -> f64 {
            let y = naive(&s, x, w, offsets);
            (0..slots * LD_Y).filter(|i| i % LD_Y < 5).map(|i| y[i] * dy[i]).sum()
        };
        if slots <= 12 {
            let columns: Vec<f64> = dx.iter().enumerate().map(|(i, &d)| if i % LD_X < 6 { d } else { 0.0 }).collect();
            finite_differences("dxs", &x, &columns, 1e-7, |x| loss(x, &w));
            finite_differences("dw", &w, &fresh, 1e-7, |w| loss(&x, w));
        }
        // The loss is linear in x and in w: it equals its gradient times either.
        let value = loss(&x, &w);
        let by_x: f64 = (0..slots * LD_X).filter(|i| i % LD_X < 6).map(|i| dx[i] * x[i]).sum();
        let by_w: f64 = fresh.iter().zip(&w).map(|(d, w)| d * w).sum();
        assert!((by_x - value).abs() < 1e-10 && (by_w - value).abs() < 1e-10, "{by_x} {by_w} {value}");
        assert!(dx.iter().skip(6).step_by(LD_X).all(|d| *d == 7.0), "wrote beside its columns");
        let added = run(&GroupedLinearBackwardInput { acc: true, ..input }, &dy, &w, offsets, vec![1.0; slots * LD_X]);
        assert!((0..slots * LD_X).filter(|i| i % LD_X < 6).all(|i| (added.outs[0][i] - dx[i] - 1.0).abs() < 1e-13));
    }

    #[test]
    fn bits_do_not_depend_on_threads() {
        let s =
            GroupedShape { rows: Blocks::full(250), cols: Blocks::full(70), ld_w: 70, ld_expert: 17500, ..shape(1000) };
        let offsets = [0, 430, 430, 700, 990];
        let (x, w, dy) = (normal(1, 70_000), normal(2, 4 * 17500), normal(3, 250_000));
        let on = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let forward = GroupedLinearForward { shape: s.clone(), ld_x: 70, ld_y: 250, acc: false };
                let weight = GroupedLinearBackwardWeight { shape: s.clone(), ld_dy: 250, ld_x: 70 };
                let y = run(&forward, &x, &w, &offsets, vec![0.0; 250_000]);
                (y.outs.clone(), run(&weight, &dy, &x, &offsets, vec![0.0; 4 * 17500]).outs)
            })
        };
        assert_eq!(on(1), on(3));
    }
}
