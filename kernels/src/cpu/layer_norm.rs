//! Layer norm over the leading channels that count.
//!
//! y = (x - mean) / sqrt(var + eps) * w + b with the biased variance, over the first A of C channels (`active`: a hard
//! mask keeps a prefix); the other channels of y are 0, and so are their gradients. A = C is the plain norm.
//!
//! Backward, with g = dy * w and xhat = (x - mean) * rstd, means over the A channels:
//! dx = rstd * (g - mean(g) - xhat * mean(g xhat)); dw += sum_t dy * xhat; db += sum_t dy.

use super::lanes;
use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;

/// Forward.
///
/// ins: x [T, C], w [>= A], b [>= A]; outs: y [T, C], mean [T], rstd [T].
#[derive(Clone, Debug)]
pub struct LayerNorm {
    pub tokens: usize,
    /// C.
    pub cols: usize,
    /// A.
    pub active: usize,
    pub eps: f64,
    pub ld_x: usize,
    pub ld_y: usize,
}

impl LayerNorm {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let [x, w, b] = args.ins else { panic!("layer_norm takes 3 inputs") };
        let [y, mean, rstd] = args.outs else { panic!("layer_norm takes 3 outputs") };
        let (cols, active) = (self.cols, self.active);
        if self.tokens == 0 || cols == 0 {
            return;
        }
        let inv = T::ONE / T::of(active as f64);
        let eps = T::of(self.eps);
        let (w, b) = (&w[..active], &b[..active]);
        let block = par::block_rows(self.tokens, 4 * cols);
        let mean = &mut mean[..self.tokens];
        // Two loops, since y and two statistics make three outputs; the second reads x again.
        par::rows_pair_mut((mean, 1), (&mut rstd[..self.tokens], block), block, |first, mean, rstd| {
            par::simd!(|| {
                for (i, (mean, rstd)) in mean.iter_mut().zip(rstd).enumerate() {
                    let x = &x[(first + i) * self.ld_x..][..active];
                    let m = lanes::sum1(x, |x| x) * inv;
                    let var = lanes::sum1(x, |x| (x - m) * (x - m)) * inv;
                    (*mean, *rstd) = (m, T::ONE / (var + eps).sqrt());
                }
            });
        });
        let (mean, rstd) = (&*mean, &*rstd);
        let y = &mut y[..(self.tokens - 1) * self.ld_y + cols];
        par::rows_mut(y, self.ld_y, block, |first, y| {
            par::simd!(|| {
                for (i, y) in y.chunks_mut(self.ld_y).enumerate() {
                    let t = first + i;
                    let (y, rest) = y[..cols].split_at_mut(active);
                    let x = &x[t * self.ld_x..][..active];
                    let (mean, rstd) = (mean[t], rstd[t]);
                    for ((y, &x), (&w, &b)) in y.iter_mut().zip(x).zip(w.iter().zip(b)) {
                        *y = (x - mean) * rstd * w + b;
                    }
                    rest.fill(T::ZERO);
                }
            });
        });
    }

    fn cost(&self) -> Cost {
        let n = (self.tokens * self.cols) as f64;
        Cost::new(8.0 * n, 3.0 * n)
    }
}

/// Backward; `dx` is added to when `acc`.
///
/// ins: dy [T, C], x [T, C], mean [T], rstd [T], w [>= A]; outs: dx [T, C], dw [>= A] (+=), db [>= A] (+=).
#[derive(Clone, Debug)]
pub struct LayerNormBackward {
    pub tokens: usize,
    pub cols: usize,
    pub active: usize,
    pub ld_dy: usize,
    pub ld_x: usize,
    pub ld_dx: usize,
    pub acc: bool,
}

impl LayerNormBackward {
    /// Per block of rows: the sums for dw, then those for db.
    fn workspace(&self) -> usize {
        par::reduce_parts(self.tokens) * 2 * self.active
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let [dy, x, mean, rstd, w] = args.ins else { panic!("layer_norm_backward takes 5 inputs") };
        let [dx, dw, db] = args.outs else { panic!("layer_norm_backward takes 3 outputs") };
        let (cols, active) = (self.cols, self.active);
        if self.tokens == 0 || active == 0 {
            if !self.acc && cols > 0 {
                dx.chunks_mut(self.ld_dx).take(self.tokens).for_each(|dx| dx[..cols].fill(T::ZERO));
            }
            return;
        }
        let inv = T::ONE / T::of(active as f64);
        let w = &w[..active];
        let block = par::reduce_rows(self.tokens);
        let dx = &mut dx[..(self.tokens - 1) * self.ld_dx + cols];
        let work = &mut args.work[..self.workspace()];
        par::rows_pair_mut((dx, self.ld_dx), (&mut *work, 2 * active), block, |first, dx, sums| {
            par::simd!(|| {
                sums.fill(T::ZERO);
                let (dw, db) = sums.split_at_mut(active);
                for (i, dx) in dx.chunks_mut(self.ld_dx).enumerate() {
                    let t = first + i;
                    let (dx, rest) = dx[..cols].split_at_mut(active);
                    let (dy, x) = (&dy[t * self.ld_dy..][..active], &x[t * self.ld_x..][..active]);
                    let (mean, rstd) = (mean[t], rstd[t]);
                    let g_mean = lanes::dot(dy, w) * inv;
                    let g_xhat = lanes::sum3(dy, x, w, |dy, x, w| dy * w * ((x - mean) * rstd)) * inv;
                    let params = dw.iter_mut().zip(db.iter_mut());
                    for (((dx, &dy), (&x, &w)), (dw, db)) in dx.iter_mut().zip(dy).zip(x.iter().zip(w)).zip(params) {
                        let xhat = (x - mean) * rstd;
                        let old = if self.acc { *dx } else { T::ZERO };
                        *dx = old + rstd * (dy * w - g_mean - xhat * g_xhat);
                        *dw += dy * xhat;
                        *db += dy;
                    }
                    if !self.acc {
                        rest.fill(T::ZERO);
                    }
                }
            });
        });
        for part in work.chunks(2 * active) {
            let (part_w, part_b) = part.split_at(active);
            dw.iter_mut().zip(part_w).for_each(|(dw, &part)| *dw += part);
            db.iter_mut().zip(part_b).for_each(|(db, &part)| *db += part);
        }
    }

    fn cost(&self) -> Cost {
        let n = (self.tokens * self.cols) as f64;
        Cost::new(16.0 * n, if self.acc { 4.0 } else { 3.0 } * n)
    }
}

crate::kernels! {
    LayerNorm => "layer_norm";
    LayerNormBackward => "layer_norm_backward", workspace;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, finite_differences, normal, relative_l2};

    const TOKENS: usize = 36;
    const COLS: usize = 7;
    const LD: usize = 9;

    fn norm(active: usize) -> (LayerNorm, LayerNormBackward) {
        (
            LayerNorm { tokens: TOKENS, cols: COLS, active, eps: 0.02, ld_x: LD, ld_y: LD },
            LayerNormBackward { tokens: TOKENS, cols: COLS, active, ld_dy: LD, ld_x: LD, ld_dx: LD, acc: false },
        )
    }

    fn forward(x: &[f64], w: &[f64], b: &[f64]) -> Call {
        let outs = vec![vec![3.0; TOKENS * LD], vec![0.0; TOKENS], vec![0.0; TOKENS]];
        Call { ins: vec![x.into(), w.into(), b.into()], outs, ..Default::default() }
    }

    #[test]
    fn forward_agrees_with_the_formula() {
        let (x, w, b) = (normal(1, TOKENS * LD), normal(2, COLS), normal(3, COLS));
        for active in [COLS, 4] {
            let mut call = forward(&x, &w, &b);
            let single = call.run_f32(&norm(active).0);
            call.run(&norm(active).0);
            for t in 0..TOKENS {
                let row = &x[t * LD..][..active];
                let mean = row.iter().sum::<f64>() / active as f64;
                let var = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / active as f64;
                for c in 0..LD {
                    let want = match c {
                        _ if c < active => (row[c] - mean) / (var + 0.02).sqrt() * w[c] + b[c],
                        _ if c < COLS => 0.0,
                        _ => 3.0,
                    };
                    assert!((call.outs[0][t * LD + c] - want).abs() < 1e-13);
                }
            }
            assert!(relative_l2(&single[0], &call.outs[0]) < 1e-6);
        }
    }

    #[test]
    fn gradients() {
        let (x, w, b) = (normal(1, TOKENS * LD), normal(2, COLS), normal(3, COLS));
        let g = normal(4, TOKENS * LD);
        for active in [COLS, 4] {
            let (kernel, backward) = norm(active);
            let loss = |x: &[f64], w: &[f64], b: &[f64]| {
                let mut call = forward(x, w, b);
                call.run(&kernel);
                (0..TOKENS * LD).filter(|i| i % LD < COLS).map(|i| call.outs[0][i] * g[i]).sum::<f64>()
            };
            let mut saved = forward(&x, &w, &b);
            saved.run(&kernel);
            let mut once = Call {
                ins: vec![g.clone(), x.clone(), saved.outs[1].clone(), saved.outs[2].clone(), w.clone()],
                outs: vec![vec![0.0; TOKENS * LD], vec![0.0; COLS], vec![0.0; COLS]],
                ..Default::default()
            };
            let single = once.run_f32(&backward);
            once.run(&backward);
            finite_differences("dx", &x, &once.outs[0], 1e-7, |x| loss(x, &w, &b));
            finite_differences("dw", &w, &once.outs[1], 1e-7, |w| loss(&x, w, &b));
            finite_differences("db", &b, &once.outs[2], 1e-7, |b| loss(&x, &w, b));
            for (single, double) in single.iter().zip(&once.outs) {
                assert!(relative_l2(single, double) < 1e-5);
            }
            let mut twice = once.clone();
            twice.run(&LayerNormBackward { acc: true, ..backward });
            for (twice, once) in twice.outs.iter().flatten().zip(once.outs.iter().flatten()) {
                assert!((twice - 2.0 * once).abs() < 1e-12);
            }
        }
    }

    #[test]
    fn no_tokens() {
        let mut call = Call { ins: vec![vec![]; 3], outs: vec![vec![]; 3], ..Default::default() };
        call.run(&LayerNorm { tokens: 0, active: 0, ..norm(0).0 });
        let mut call = Call { ins: vec![vec![]; 5], outs: vec![vec![], vec![1.0], vec![1.0]], ..Default::default() };
        call.run(&LayerNormBackward { tokens: 0, active: 1, ..norm(0).1 });
        assert_eq!(call.outs[1], [1.0]);
    }
}
