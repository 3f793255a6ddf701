//! RMS norm with a divisor of its own, for full, masked and sliced widths.
//!
//! y = x * rstd * w * s with rstd = 1 / sqrt(sum_c x^2 / S + eps * e).
//!
//! S (`width`) divides the sum of squares: the active width when a channel slice is computed, the parent's width when
//! masked channels are zero in x. e and s are one-element operands, 1 when absent: the kept ratio of a masked axis
//! and its output scale sqrt(ratio). With a hard mask keeping n of S channels, e = n/S and s = sqrt(n/S) make the masked norm
//! equal the sliced one: rstd(S, e) * s = 1 / sqrt(sum / n + eps).
//!
//! Backward, with g = dy * w * s and rows independent: dx = rstd * g - x * rstd^3 / S * sum_c(g x);
//! dw += sum_t dy * x * rstd * s; ds += sum dy * x * rstd * w. No gradient flows to e.

use super::lanes;
use crate::blocks::Blocks;
use crate::cpu::vector::{Lanes, WithLanes, each_vector};
use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;

/// Forward.
///
/// ins: x [T, C], w (stored; `weight` names its C elements), then e [1] when `eps_ratio`, then s [1] when `scale`;
/// outs: y [T, C], rstd [T].
#[derive(Clone, Debug)]
pub struct RmsNorm {
    pub tokens: usize,
    /// The C elements of the stored weight.
    pub weight: Blocks,
    /// S.
    pub width: usize,
    pub eps: f64,
    pub ld_x: usize,
    pub ld_y: usize,
    /// Whether e is given.
    pub eps_ratio: bool,
    /// Whether s is given.
    pub scale: bool,
}

impl RmsNorm {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (x, w) = (args.ins[0], args.ins[1]);
        let mut more = args.ins[2..].iter();
        let mut scalar = |given: bool| if given { more.next().map_or(T::ONE, |s| s[0]) } else { T::ONE };
        let e = scalar(self.eps_ratio);
        let s = scalar(self.scale);
        let [y, rstd] = args.outs else { panic!("rms_norm takes 2 outputs") };
        let cols = self.weight.len();
        if self.tokens == 0 || cols == 0 {
            return;
        }
        let eps = T::of(self.eps) * e;
        let inv_width = T::ONE / T::of(self.width as f64);
        let block = par::block_rows(self.tokens, 2 * cols);
        let y = &mut y[..(self.tokens - 1) * self.ld_y + cols];
        par::rows_pair_mut((y, self.ld_y), (&mut rstd[..self.tokens], block), block, |first, y, rstd| {
            T::vectors(Forward { kernel: self, first, x, w, eps, inv_width, s, y, rstd });
        });
    }

    fn cost(&self) -> Cost {
        let n = (self.tokens * self.weight.len()) as f64;
        Cost::new(4.0 * n, 2.0 * n)
    }
}

/// A block of the forward pass: tokens from `first`, whose rows of y and rstd are given.
struct Forward<'a, T> {
    kernel: &'a RmsNorm,
    first: usize,
    x: &'a [T],
    w: &'a [T],
    eps: T,
    inv_width: T,
    s: T,
    y: &'a mut [T],
    rstd: &'a mut [T],
}

impl<T: Real> WithLanes<T> for Forward<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes<T = T>>(self, l: L) {
        let kernel = self.kernel;
        let cols = kernel.weight.len();
        for (i, (y, rstd)) in self.y.chunks_mut(kernel.ld_y).zip(self.rstd).enumerate() {
            let x = &self.x[(self.first + i) * kernel.ld_x..][..cols];
            let y = &mut y[..cols];
            // Two sums, taken in turns: one alone waits for itself.
            let mut squares = [l.zero(); 2];
            each_vector!(L::N, 0..cols, |at, end| {
                let x = l.read::<FULL>(x, at, end);
                squares = [squares[1], l.mul_add(x, x, squares[0])];
            });
            *rstd = T::ONE / (l.sum(l.add(squares[0], squares[1])) * self.inv_width + self.eps).sqrt();
            let scale = l.splat(*rstd * self.s);
            for (start, dense, len) in kernel.weight.iter() {
                let (w, x, y) = (&self.w[start..start + len], &x[dense..dense + len], &mut y[dense..dense + len]);
                each_vector!(L::N, 0..len, |at, end| {
                    let x = l.mul(l.read::<FULL>(x, at, end), scale);
                    l.write::<FULL>(l.mul(x, l.read::<FULL>(w, at, end)), y, at, end);
                });
            }
        }
    }
}

/// Backward; `dx` is added to when `acc` (the residual's gradient is already there).
///
/// ins: dy [T, C], x [T, C], rstd [T], w (stored), then s [1] when `scale`;
/// outs: dx [T, C], dw (stored, +=), then ds [1] (+=) when `scale`.
#[derive(Clone, Debug)]
pub struct RmsNormBackward {
    pub tokens: usize,
    pub weight: Blocks,
    pub width: usize,
    pub ld_dy: usize,
    pub ld_x: usize,
    pub ld_dx: usize,
    pub scale: bool,
    pub acc: bool,
}

impl RmsNormBackward {
    /// Per block of rows: C sums of dy * x * rstd (for dw and ds).
    fn workspace(&self) -> usize {
        par::reduce_parts(self.tokens) * self.weight.len()
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (dy, x, rstd, w) = (args.ins[0], args.ins[1], args.ins[2], args.ins[3]);
        let s = if self.scale { args.ins[4][0] } else { T::ONE };
        let cols = self.weight.len();
        if self.tokens == 0 || cols == 0 {
            return;
        }
        let (dx, params) = args.outs.split_first_mut().unwrap_or_else(|| panic!("rms_norm_backward takes outputs"));
        let inv_width = T::ONE / T::of(self.width as f64);
        let block = par::reduce_rows(self.tokens);
        let dx = &mut dx[..(self.tokens - 1) * self.ld_dx + cols];
        let work = &mut args.work[..self.workspace()];
        par::rows_pair_mut((dx, self.ld_dx), (&mut *work, cols), block, |first, dx, sums| {
            T::vectors(Backward { kernel: self, first, dy, x, rstd, w, inv_width, s, dx, sums });
        });
        par::simd!(|| self.add_parameters(work, w, s, params));
    }

    #[inline(always)]
    fn add_parameters<T: Real>(&self, work: &mut [T], w: &[T], s: T, params: &mut [&mut [T]]) {
        let cols = self.weight.len();
        let (sum, parts) = work.split_at_mut(cols);
        for part in parts.chunks(cols) {
            sum.iter_mut().zip(part).for_each(|(sum, &part)| *sum += part);
        }
        let mut ds = T::ZERO;
        for (start, at, len) in self.weight.iter() {
            let sum = &sum[at..at + len];
            ds += lanes::dot(sum, &w[start..start + len]);
            params[0][start..start + len].iter_mut().zip(sum).for_each(|(dw, &sum)| *dw += sum * s);
        }
        if self.scale {
            params[1][0] += ds;
        }
    }

    fn cost(&self) -> Cost {
        let n = (self.tokens * self.weight.len()) as f64;
        Cost::new(11.0 * n, if self.acc { 4.0 } else { 3.0 } * n)
    }
}

/// A block of the backward pass: tokens from `first`, whose rows of dx are given, and its sums of dy * x * rstd.
struct Backward<'a, T> {
    kernel: &'a RmsNormBackward,
    first: usize,
    dy: &'a [T],
    x: &'a [T],
    rstd: &'a [T],
    w: &'a [T],
    inv_width: T,
    s: T,
    dx: &'a mut [T],
    sums: &'a mut [T],
}

impl<T: Real> WithLanes<T> for Backward<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes<T = T>>(self, l: L) {
        let kernel = self.kernel;
        let cols = kernel.weight.len();
        self.sums.fill(T::ZERO);
        for (i, dx) in self.dx.chunks_mut(kernel.ld_dx).enumerate() {
            let t = self.first + i;
            let (dy, x) = (&self.dy[t * kernel.ld_dy..][..cols], &self.x[t * kernel.ld_x..][..cols]);
            let dx = &mut dx[..cols];
            // Sum of g x / s, in two sums taken in turns: one alone waits for itself.
            let mut along = [l.zero(); 2];
            for (start, dense, len) in kernel.weight.iter() {
                let (dy, x, w) = (&dy[dense..dense + len], &x[dense..dense + len], &self.w[start..start + len]);
                each_vector!(L::N, 0..len, |at, end| {
                    let g = l.mul(l.read::<FULL>(dy, at, end), l.read::<FULL>(w, at, end));
                    along = [along[1], l.mul_add(g, l.read::<FULL>(x, at, end), along[0])];
                });
            }
            let gx = l.sum(l.add(along[0], along[1]));
            let rstd = self.rstd[t];
            let along_g = l.splat(rstd * self.s);
            let along_x = l.splat(rstd * rstd * rstd * self.inv_width * gx * self.s);
            let rstd = l.splat(rstd);
            for (start, dense, len) in kernel.weight.iter() {
                let (dy, x, w) = (&dy[dense..dense + len], &x[dense..dense + len], &self.w[start..start + len]);
                let (dx, sums) = (&mut dx[dense..dense + len], &mut self.sums[dense..dense + len]);
                each_vector!(L::N, 0..len, |at, end| {
                    let (dy, x) = (l.read::<FULL>(dy, at, end), l.read::<FULL>(x, at, end));
                    let sum = l.mul_add(dy, l.mul(x, rstd), l.read::<FULL>(sums, at, end));
                    l.write::<FULL>(sum, sums, at, end);
                    let g = l.mul(dy, l.read::<FULL>(w, at, end));
                    let mut to_x = l.sub_mul(x, along_x, l.mul(g, along_g));
                    if kernel.acc {
                        to_x = l.add(l.read::<FULL>(dx, at, end), to_x);
                    }
                    l.write::<FULL>(to_x, dx, at, end);
                });
            }
        }
    }
}

crate::kernels! {
    RmsNorm => "rms_norm";
    RmsNormBackward => "rms_norm_backward", workspace;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, finite_differences, normal, relative_l2};

    const TOKENS: usize = 37;
    const LD_X: usize = 9;
    const LD_Y: usize = 8;

    /// Seven channels out of nine stored, in two blocks; e and s given.
    fn norm() -> (RmsNorm, RmsNormBackward) {
        let weight = Blocks::new([(0, 4), (6, 3)]);
        let (tokens, width) = (TOKENS, 11);
        let forward = RmsNorm {
            tokens,
            weight: weight.clone(),
            width,
            eps: 0.03,
            ld_x: LD_X,
            ld_y: LD_Y,
            eps_ratio: true,
            scale: true,
        };
        let backward =
            RmsNormBackward { tokens, weight, width, ld_dy: LD_Y, ld_x: LD_X, ld_dx: LD_X, scale: true, acc: false };
        (forward, backward)
    }

    fn forward(x: &[f64], w: &[f64], e: f64, s: f64) -> Call {
        let outs = vec![vec![7.0; TOKENS * LD_Y - 1], vec![0.0; TOKENS]];
        Call { ins: vec![x.into(), w.into(), vec![e], vec![s]], outs, ..Default::default() }
    }

    #[test]
    fn forward_agrees_with_the_formula() {
        let (x, w) = (normal(1, TOKENS * LD_X), normal(2, 9));
        let (e, s) = (0.6, 0.8);
        let mut call = forward(&x, &w, e, s);
        let single = call.run_f32(&norm().0);
        call.run(&norm().0);
        let stored = [0, 1, 2, 3, 6, 7, 8];
        for t in 0..TOKENS {
            let x = &x[t * LD_X..][..7];
            let rstd = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / 11.0 + 0.03 * e).sqrt();
            assert!((call.outs[1][t] - rstd).abs() < 1e-13);
            for c in 0..7 {
                assert!((call.outs[0][t * LD_Y + c] - x[c] * rstd * w[stored[c]] * s).abs() < 1e-13);
            }
        }
        assert!(call.outs[0].iter().skip(7).step_by(LD_Y).all(|&y| y == 7.0), "columns of others stay");
        assert!(relative_l2(&single[0], &call.outs[0]) < 1e-6);
    }

    #[test]
    fn gradients() {
        let (x, w, e, s) = (normal(1, TOKENS * LD_X), normal(2, 9), 0.6, 0.8);
        let g = normal(3, TOKENS * LD_Y);
        let loss = |x: &[f64], w: &[f64], s: f64| {
            let mut call = forward(x, w, e, s);
            call.run(&norm().0);
            let y = &call.outs[0];
            (0..y.len()).filter(|i| i % LD_Y < 7).map(|i| y[i] * g[i]).sum::<f64>()
        };
        let mut saved = forward(&x, &w, e, s);
        saved.run(&norm().0);
        let back = Call {
            ins: vec![g.clone(), x.clone(), saved.outs[1].clone(), w.clone(), vec![s]],
            outs: vec![vec![0.0; TOKENS * LD_X], vec![0.0; 9], vec![0.0]],
            ..Default::default()
        };
        let single = back.run_f32(&norm().1);
        let mut once = back.clone();
        once.run(&norm().1);
        finite_differences("dx", &x, &once.outs[0], 1e-7, |x| loss(x, &w, s));
        finite_differences("dw", &w, &once.outs[1], 1e-7, |w| loss(&x, w, s));
        finite_differences("ds", &[s], &once.outs[2], 1e-7, |s| loss(&x, &w, s[0]));
        for (single, double) in single.iter().zip(&once.outs) {
            assert!(relative_l2(single, double) < 1e-5);
        }
        let mut twice = once.clone();
        twice.run(&RmsNormBackward { acc: true, ..norm().1 });
        for (twice, once) in twice.outs.iter().flatten().zip(once.outs.iter().flatten()) {
            assert!((twice - 2.0 * once).abs() < 1e-12, "everything adds with acc");
        }
    }

    /// A hard mask keeping 5 of 8 channels, at e = 5/8 and s = sqrt(5/8), equals the sliced norm.
    #[test]
    fn masked_equals_sliced() {
        let tokens = 3;
        let norm = |cols: usize, masked: bool| RmsNorm {
            tokens,
            weight: Blocks::full(cols),
            width: cols,
            eps: 0.1,
            ld_x: 8,
            ld_y: cols,
            eps_ratio: masked,
            scale: masked,
        };
        let mut x = normal(1, tokens * 8);
        x.iter_mut().enumerate().filter(|(i, _)| i % 8 >= 5).for_each(|(_, x)| *x = 0.0);
        let w = normal(2, 8);
        let run = |norm: &RmsNorm, cols: usize| {
            let r = 5.0f64 / 8.0;
            let mut call = Call {
                ins: vec![x.clone(), w.clone(), vec![r], vec![r.sqrt()]],
                outs: vec![vec![0.0; tokens * cols], vec![0.0; tokens]],
                ..Default::default()
            };
            call.run(norm);
            call.outs.swap_remove(0)
        };
        let (masked, sliced) = (run(&norm(8, true), 8), run(&norm(5, false), 5));
        for t in 0..tokens {
            for c in 0..8 {
                let want = if c < 5 { sliced[t * 5 + c] } else { 0.0 };
                assert!((masked[t * 8 + c] - want).abs() < 1e-14);
            }
        }
    }

    /// More channels than a vector of either type has, and some left, in two blocks.
    #[test]
    fn wide_rows() {
        let (tokens, cols) = (2, 37);
        let weight = Blocks::new([(0, 17), (19, 20)]);
        let (x, g, w) = (normal(1, tokens * cols), normal(2, tokens * cols), normal(3, 39));
        let norm = RmsNorm {
            tokens,
            weight: weight.clone(),
            width: cols,
            eps: 0.1,
            ld_x: cols,
            ld_y: cols,
            eps_ratio: false,
            scale: false,
        };
        let forward = |x: &[f64], w: &[f64]| {
            let outs = vec![vec![0.0; tokens * cols], vec![0.0; tokens]];
            let mut call = Call { ins: vec![x.into(), w.into()], outs, ..Default::default() };
            call.run(&norm);
            call
        };
        let loss = |x: &[f64], w: &[f64]| forward(x, w).outs[0].iter().zip(&g).map(|(y, g)| y * g).sum::<f64>();
        let saved = forward(&x, &w);
        assert!(relative_l2(&saved.run_f32(&norm)[0], &saved.outs[0]) < 1e-6);
        let backward = RmsNormBackward {
            tokens,
            weight,
            width: cols,
            ld_dy: cols,
            ld_x: cols,
            ld_dx: cols,
            scale: false,
            acc: false,
        };
        let mut back = Call {
            ins: vec![g.clone(), x.clone(), saved.outs[1].clone(), w.clone()],
            outs: vec![vec![0.0; tokens * cols], vec![0.0; 39]],
            ..Default::default()
        };
        let single = back.run_f32(&backward);
        back.run(&backward);
        finite_differences("dx", &x, &back.outs[0], 1e-7, |x| loss(x, &w));
        finite_differences("dw", &w, &back.outs[1], 1e-7, |w| loss(&x, w));
        for (single, double) in single.iter().zip(&back.outs) {
            assert!(relative_l2(single, double) < 1e-5);
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads() {
        let tokens = 1000;
        let weight = Blocks::full(33);
        let kernel =
            RmsNormBackward { tokens, weight, width: 33, ld_dy: 33, ld_x: 33, ld_dx: 33, scale: true, acc: false };
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("pool");
            let call = Call {
                ins: vec![normal(1, tokens * 33), normal(2, tokens * 33), normal(3, tokens), normal(4, 33), vec![0.5]],
                outs: vec![vec![0.0; tokens * 33], vec![0.0; 33], vec![0.0]],
                ..Default::default()
            };
            pool.install(|| call.run_f32(&kernel))
        };
        assert_eq!(run(1), run(3));
    }

    #[test]
    fn no_tokens() {
        let (forward, backward) = norm();
        let mut call = Call {
            ins: vec![vec![], normal(2, 9), vec![1.0], vec![1.0]],
            outs: vec![vec![], vec![]],
            ..Default::default()
        };
        call.run(&RmsNorm { tokens: 0, ..forward });
        let mut call = Call {
            ins: vec![vec![], vec![], vec![], normal(2, 9), vec![1.0]],
            outs: vec![vec![], vec![0.5; 9], vec![0.5]],
            ..Default::default()
        };
        call.run(&RmsNormBackward { tokens: 0, ..backward });
        assert!(call.outs[1].iter().all(|&dw| dw == 0.5));
    }
}
