//! Matrix products: a general one, and the three of a linear layer.
//!
//! A linear layer holds W [out, in] and computes y = x W^T + b. Its kernels use the rows (output features) and columns
//! (input features) of W that `Blocks` name, so that a slice of the layer needs no copy of the parameter: activations
//! are dense, one product is launched per pair of blocks. Parameter gradients add.
//!
//! Products run over k in an order fixed by the sizes, so the bits do not depend on the number of threads.

use super::gemm_call::{Mat, matmul};
use crate::blocks::Blocks;
use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;

/// C[m, n] = alpha * op(A)[m, k] op(B)[k, n], added to C when `acc`.
///
/// ins: a (row-major [m, k], or [k, m] with `ta`), b ([k, n], or [n, k] with `tb`); outs: c [m, n].
/// `lda`, `ldb`, `ldc` are elements between stored rows.
#[derive(Clone, Debug)]
pub struct Gemm {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub ta: bool,
    pub tb: bool,
    pub lda: usize,
    pub ldb: usize,
    pub ldc: usize,
    pub alpha: f64,
    pub acc: bool,
}

impl Gemm {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let [a, b] = args.ins else { panic!("gemm takes 2 inputs") };
        let [c] = args.outs else { panic!("gemm takes 1 output") };
        let a = if self.ta { Mat::cols(a, self.lda) } else { Mat::rows(a, self.lda) };
        let b = if self.tb { Mat::cols(b, self.ldb) } else { Mat::rows(b, self.ldb) };
        matmul((self.m, self.n, self.k), T::of(self.alpha), a, b, self.acc, c, self.ldc, true);
    }

    fn cost(&self) -> Cost {
        product_cost(self.m, self.n, self.k)
    }
}

fn product_cost(m: usize, n: usize, k: usize) -> Cost {
    let [m, n, k] = [m as f64, n as f64, k as f64];
    Cost::new(2.0 * m * n * k, m * k + k * n + m * n)
}

/// y[T, rows] = x[T, cols] W^T + b, added to y when `acc`.
///
/// ins: x [T, cols], w (stored rows `ld_w` apart), then b (stored, indexed as the rows of W) when `bias`;
/// outs: y [T, rows].
#[derive(Clone, Debug)]
pub struct LinearForward {
    pub tokens: usize,
    /// Output features.
    pub rows: Blocks,
    /// Input features.
    pub cols: Blocks,
    pub ld_x: usize,
    pub ld_w: usize,
    pub ld_y: usize,
    pub bias: bool,
    pub acc: bool,
}

impl LinearForward {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (x, w) = (args.ins[0], args.ins[1]);
        let y = &mut *args.outs[0];
        if self.tokens == 0 {
            return;
        }
        if self.bias {
            self.start_from_bias(args.ins[2], y);
        }
        for (row, y_col, n) in self.rows.iter() {
            let mut acc = self.acc || self.bias;
            for (col, x_col, k) in self.cols.iter() {
                let x = Mat::rows(&x[x_col..], self.ld_x);
                let w = Mat::cols(&w[row * self.ld_w + col..], self.ld_w);
                matmul((self.tokens, n, k), T::ONE, x, w, acc, &mut y[y_col..], self.ld_y, true);
                acc = true;
            }
            if !acc {
                y.chunks_mut(self.ld_y).take(self.tokens).for_each(|y| y[y_col..y_col + n].fill(T::ZERO));
            }
        }
    }

    fn start_from_bias<T: Real>(&self, bias: &[T], y: &mut [T]) {
        let n = self.rows.len();
        let end = y.len().min(self.tokens * self.ld_y);
        par::rows_mut(&mut y[..end], self.ld_y, par::block_rows(self.tokens, n), |_, y| {
            for y in y.chunks_mut(self.ld_y) {
                for (row, at, len) in self.rows.iter() {
                    let (y, bias) = (&mut y[at..at + len], &bias[row..row + len]);
                    if self.acc {
                        y.iter_mut().zip(bias).for_each(|(y, &b)| *y += b);
                    } else {
                        y.copy_from_slice(bias);
                    }
                }
            }
        });
    }

    fn cost(&self) -> Cost {
        product_cost(self.tokens, self.rows.len(), self.cols.len())
    }
}

/// dx[T, cols] = dy[T, rows] W, added to dx when `acc`.
///
/// ins: dy [T, rows], w (stored rows `ld_w` apart); outs: dx [T, cols].
#[derive(Clone, Debug)]
pub struct LinearBackwardInput {
    pub tokens: usize,
    pub rows: Blocks,
    pub cols: Blocks,
    pub ld_dy: usize,
    pub ld_w: usize,
    pub ld_dx: usize,
    pub acc: bool,
}

impl LinearBackwardInput {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (dy, w) = (args.ins[0], args.ins[1]);
        let dx = &mut *args.outs[0];
        if self.tokens == 0 {
            return;
        }
        for (col, dx_col, n) in self.cols.iter() {
            let mut acc = self.acc;
            for (row, dy_col, k) in self.rows.iter() {
                let dy = Mat::rows(&dy[dy_col..], self.ld_dy);
                let w = Mat::rows(&w[row * self.ld_w + col..], self.ld_w);
                matmul((self.tokens, n, k), T::ONE, dy, w, acc, &mut dx[dx_col..], self.ld_dx, true);
                acc = true;
            }
            if !acc {
                dx.chunks_mut(self.ld_dx).take(self.tokens).for_each(|dx| dx[dx_col..dx_col + n].fill(T::ZERO));
            }
        }
    }

    fn cost(&self) -> Cost {
        product_cost(self.tokens, self.cols.len(), self.rows.len())
    }
}

/// dW += dy^T x, and db += column sums of dy when `bias`.
///
/// ins: dy [T, rows], x [T, cols]; outs: dw (stored rows `ld_w` apart), then db (stored) when `bias`.
#[derive(Clone, Debug)]
pub struct LinearBackwardWeight {
    pub tokens: usize,
    pub rows: Blocks,
    pub cols: Blocks,
    pub ld_dy: usize,
    pub ld_x: usize,
    pub ld_w: usize,
    pub bias: bool,
}

impl LinearBackwardWeight {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (dy, x) = (args.ins[0], args.ins[1]);
        if self.tokens == 0 {
            return;
        }
        let dw = &mut *args.outs[0];
        for (row, dy_col, m) in self.rows.iter() {
            for (col, x_col, n) in self.cols.iter() {
                let dy = Mat::cols(&dy[dy_col..], self.ld_dy);
                let x = Mat::rows(&x[x_col..], self.ld_x);
                let dw = &mut dw[row * self.ld_w + col..];
                matmul((m, n, self.tokens), T::ONE, dy, x, true, dw, self.ld_w, true);
            }
        }
        if self.bias {
            let db = &mut *args.outs[1];
            for (row, dy_col, m) in self.rows.iter() {
                add_column_sums(&dy[dy_col..], self.ld_dy, self.tokens, &mut db[row..row + m]);
            }
        }
    }

    fn cost(&self) -> Cost {
        product_cost(self.rows.len(), self.cols.len(), self.tokens)
    }
}

/// out[c] += sum over rows of x[row, c]: rows in order, columns shared among threads.
pub(crate) fn add_column_sums<T: Real>(x: &[T], ld: usize, rows: usize, out: &mut [T]) {
    const COLUMNS: usize = 64;
    par::rows_mut(out, 1, COLUMNS, |first, out| {
        par::simd!(|| {
            let mut sum = [T::ZERO; COLUMNS];
            for row in 0..rows {
                let x = &x[row * ld + first..][..out.len()];
                for (sum, &x) in sum.iter_mut().zip(x) {
                    *sum += x;
                }
            }
            for (out, &sum) in out.iter_mut().zip(&sum) {
                *out += sum;
            }
        });
    });
}

crate::kernels! {
    Gemm => "gemm";
    LinearForward => "linear_forward";
    LinearBackwardInput => "linear_backward_input";
    LinearBackwardWeight => "linear_backward_weight";
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, finite_differences, normal, relative_l2};
    use crate::kernel::Element;

    #[test]
    fn gemm_agrees_with_loops_in_every_orientation() {
        let (m, n, k) = (5, 7, 3);
        for case in 0..8 {
            let (ta, tb, acc) = (case & 1 > 0, case & 2 > 0, case & 4 > 0);
            let (lda, ldb, ldc) = (if ta { m } else { k } + 2, if tb { k } else { n } + 1, n + 3);
            let gemm = Gemm { m, n, k, ta, tb, lda, ldb, ldc, alpha: 0.5, acc };
            let mut call =
                Call { ins: vec![normal(1, 60), normal(2, 80)], outs: vec![normal(3, m * ldc)], ..Default::default() };
            let before = call.clone();
            let single = call.run_f32(&gemm);
            call.run(&gemm);
            let (a, b) = (&call.ins[0], &call.ins[1]);
            for i in 0..m {
                for j in 0..ldc {
                    let old = before.outs[0][i * ldc + j];
                    let want = if j >= n {
                        old
                    } else {
                        let product: f64 = (0..k)
                            .map(|l| {
                                (if ta { a[l * lda + i] } else { a[i * lda + l] })
                                    * (if tb { b[j * ldb + l] } else { b[l * ldb + j] })
                            })
                            .sum();
                        0.5 * product + if acc { old } else { 0.0 }
                    };
                    assert!((call.outs[0][i * ldc + j] - want).abs() < 1e-13, "case {case} at {i},{j}");
                }
            }
            assert!(relative_l2(&single[0], &call.outs[0]) < 1e-6);
        }
    }

    /// A linear layer cut to two row blocks and two column blocks, with bias, in strided activations.
    struct Layer {
        forward: LinearForward,
        input: LinearBackwardInput,
        weight: LinearBackwardWeight,
    }

    fn layer(tokens: usize, acc: bool) -> Layer {
        let (rows, cols) = (Blocks::new([(0, 2), (3, 2)]), Blocks::new([(1, 3), (6, 1)]));
        let (ld_x, ld_w, ld_y) = (5, 8, 6);
        Layer {
            forward: LinearForward {
                tokens,
                rows: rows.clone(),
                cols: cols.clone(),
                ld_x,
                ld_w,
                ld_y,
                bias: true,
                acc,
            },
            input: LinearBackwardInput {
                tokens,
                rows: rows.clone(),
                cols: cols.clone(),
                ld_dy: ld_y,
                ld_w,
                ld_dx: ld_x,
                acc,
            },
            weight: LinearBackwardWeight { tokens, rows, cols, ld_dy: ld_y, ld_x, ld_w, bias: true },
        }
    }

    #[test]
    fn linear_uses_the_named_blocks() {
        let layer = layer(3, true);
        let (x, w, b, y) = (normal(1, 15), normal(2, 40), normal(3, 5), normal(4, 18));
        let mut call = Call { ins: vec![x.clone(), w.clone(), b.clone()], outs: vec![y.clone()], ..Default::default() };
        call.run(&layer.forward);
        let (rows, cols) = ([0, 1, 3, 4], [1, 2, 3, 6]);
        for t in 0..3 {
            for j in 0..6 {
                let old = y[t * 6 + j];
                let want = match rows.get(j) {
                    Some(&r) => old + b[r] + (0..4).map(|i| x[t * 5 + i] * w[r * 8 + cols[i]]).sum::<f64>(),
                    None => old,
                };
                assert!((call.outs[0][t * 6 + j] - want).abs() < 1e-13);
            }
        }
    }

    #[test]
    fn linear_gradients() {
        let layer = layer(3, false);
        let (x, w, b, g) = (normal(1, 15), normal(2, 40), normal(3, 5), normal(4, 18));
        let loss = |x: &[f64], w: &[f64], b: &[f64]| {
            let mut call =
                Call { ins: vec![x.into(), w.into(), b.into()], outs: vec![vec![0.0; 18]], ..Default::default() };
            call.run(&layer.forward);
            call.outs[0].iter().zip(&g).map(|(y, g)| y * g).sum::<f64>()
        };
        let mut back = Call { ins: vec![g.clone(), w.clone()], outs: vec![vec![0.0; 15]], ..Default::default() };
        back.run(&layer.input);
        finite_differences("dx", &x, &back.outs[0], 1e-8, |x| loss(x, &w, &b));
        let mut back =
            Call { ins: vec![g.clone(), x.clone()], outs: vec![vec![0.0; 40], vec![0.0; 5]], ..Default::default() };
        back.run(&layer.weight);
        finite_differences("dw", &w, &back.outs[0], 1e-8, |w| loss(&x, w, &b));
        finite_differences("db", &b, &back.outs[1], 1e-8, |b| loss(&x, &w, b));
        let once = back.clone();
        back.run(&layer.weight);
        for (twice, once) in back.outs.iter().flatten().zip(once.outs.iter().flatten()) {
            assert!((twice - 2.0 * once).abs() < 1e-12, "parameter gradients add");
        }
    }

    #[test]
    fn no_tokens_and_no_columns() {
        let empty = LinearForward { cols: Blocks::full(0), bias: false, ..layer(2, false).forward };
        let mut call = Call { ins: vec![vec![], normal(1, 40)], outs: vec![vec![9.0; 12]], ..Default::default() };
        call.run(&empty);
        assert_eq!(call.outs[0][..6], [0.0, 0.0, 0.0, 0.0, 9.0, 9.0]);
        let mut call =
            Call { ins: vec![vec![], normal(1, 40), normal(2, 5)], outs: vec![vec![]], ..Default::default() };
        call.run(&layer(0, false).forward);
    }

    /// Large enough to be shared among threads, with every orientation and a deep inner dimension.
    #[test]
    fn bits_do_not_depend_on_threads() {
        fn products<T: Element>(threads: usize) -> Vec<T> {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("pool");
            let mut all = Vec::new();
            for (m, n, k) in [(200, 130, 700), (96, 96, 5000), (2000, 40, 33), (33, 2000, 128), (1, 900, 900)] {
                for (ta, tb) in [(false, false), (false, true), (true, false)] {
                    let (lda, ldb) = (if ta { m } else { k }, if tb { k } else { n });
                    let gemm = Gemm { m, n, k, ta, tb, lda, ldb, ldc: n, alpha: 1.0, acc: false };
                    let a: Vec<T> = normal(1, m * k).into_iter().map(T::of).collect();
                    let b: Vec<T> = normal(2, k * n).into_iter().map(T::of).collect();
                    let mut c = vec![T::ZERO; m * n];
                    pool.install(|| {
                        let args =
                            Args { ins: &[&a, &b], outs: &mut [&mut c], ints: &[], int_outs: &mut [], work: &mut [] };
                        T::launch(&gemm, args);
                    });
                    all.extend(c);
                }
            }
            all
        }
        let one = products::<f32>(1);
        assert!(one == products::<f32>(2) && one == products::<f32>(3));
        let one = products::<f64>(1);
        assert!(one == products::<f64>(2) && one == products::<f64>(5));
    }
}
