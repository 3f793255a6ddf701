//! Cross entropy on given logits [T, V], for small vocabularies and as the reference of the fused form.

use super::{masked_sum, smoothing_weight, token_loss};
use crate::cpu::softmax::{exp, max_and_sum_exp, put, row, span, sum_map};
use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;
use rayon::prelude::*;

/// Cross entropy of each row of logits, and its masked sum.
///
/// ins: logits [tokens, vocab], loss_mask [tokens]; ints: labels [tokens];
/// outs: lse [tokens], loss [tokens] (not masked), total [1] = sum of loss * loss_mask,
/// count [1] = sum of loss_mask.
#[derive(Clone, Copy, Debug)]
pub struct CeFromLogits {
    pub tokens: usize,
    pub vocab: usize,
    pub ld: usize,
    pub smoothing: f64,
}

/// Gradient of [`CeFromLogits`]'s total times `scale`.
///
/// ins: logits [tokens, vocab], lse [tokens], loss_mask [tokens], scale [1]; ints: labels [tokens];
/// outs: dlogits [tokens, vocab].
#[derive(Clone, Copy, Debug)]
pub struct CeFromLogitsBackward {
    pub tokens: usize,
    pub vocab: usize,
    pub ld: usize,
    pub ld_d: usize,
    pub smoothing: f64,
    pub acc: bool,
}

crate::kernels! {
    CeFromLogits => "cross_entropy";
    CeFromLogitsBackward => "cross_entropy_backward";
}

impl CeFromLogits {
    fn cost(&self) -> Cost {
        let n = (self.tokens * self.vocab) as f64;
        Cost::new(4.0 * n, n)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (logits, mask) = (args.ins[0], args.ins[1]);
        let labels = args.ints[0];
        let [lse, loss, total, count] = args.outs else { unreachable!("cross_entropy has four outputs") };
        let lse = &mut lse[..self.tokens];
        let loss = &mut loss[..self.tokens];
        let smooth = smoothing_weight(self.vocab, self.smoothing) != 0.0;
        lse.par_iter_mut().zip(loss.par_iter_mut()).enumerate().for_each(|(t, (lse, loss))| {
            par::simd!(|| {
                let l = row(logits, t, self.ld, self.vocab);
                let (m, z) = max_and_sum_exp(l);
                *lse = m + z.ln();
                let label = usize::try_from(labels[t]).ok().and_then(|y| l.get(y)).copied().unwrap_or(m);
                let sum = if smooth { sum_map(l, |l| l) } else { T::ZERO };
                *loss = token_loss(*lse, label, sum, self.vocab, self.smoothing);
            })
        });
        (total[0], count[0]) = masked_sum(loss, mask);
    }
}

impl CeFromLogitsBackward {
    fn cost(&self) -> Cost {
        let n = (self.tokens * self.vocab) as f64;
        Cost::new(4.0 * n, 2.0 * n)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (logits, lse, mask, scale) = (args.ins[0], args.ins[1], args.ins[2], args.ins[3][0]);
        let labels = args.ints[0];
        let a = smoothing_weight(self.vocab, self.smoothing);
        let uniform = T::of(a / self.vocab as f64);
        let out = &mut args.outs[0][..span(self.tokens, self.ld_d, self.vocab)];
        par::rows_mut(out, self.ld_d, par::block_rows(self.tokens, 4 * self.vocab), |first, block| {
            for (i, d) in block.chunks_mut(self.ld_d).enumerate() {
                let t = first + i;
                let d = &mut d[..self.vocab];
                let factor = mask[t] * scale;
                if factor == T::ZERO {
                    if !self.acc {
                        d.fill(T::ZERO);
                    }
                    continue;
                }
                let l = row(logits, t, self.ld, self.vocab);
                let lse = lse[t];
                par::simd!(|| {
                    for (d, &l) in d.iter_mut().zip(l) {
                        put(d, (exp(l - lse) - uniform) * factor, self.acc);
                    }
                });
                if let Some(d) = usize::try_from(labels[t]).ok().and_then(|y| d.get_mut(y)) {
                    *d += -(T::of(1.0 - a) * factor);
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, finite_differences, normal, relative_l2};
    use rstest::rstest;

    const T: usize = 5;
    const V: usize = 21;
    const LABELS: [i32; T] = [3, 20, -1, 0, 21];
    const MASK: [f64; T] = [1.0, 0.5, 0.0, 1.0, 1.0];

    fn forward(logits: &[f64], smoothing: f64) -> Call {
        let mut call = Call {
            ins: vec![logits.to_vec(), MASK.to_vec()],
            outs: vec![vec![f64::NAN; T], vec![f64::NAN; T], vec![f64::NAN], vec![f64::NAN]],
            ints: vec![LABELS.to_vec()],
            ..Call::default()
        };
        call.run(&CeFromLogits { tokens: T, vocab: V, ld: V, smoothing });
        call
    }

    #[rstest]
    fn matches_the_formula(#[values(0.0, 0.1)] smoothing: f64) {
        let x: Vec<f64> = normal(1, T * V).iter().map(|x| 8.0 * x).collect();
        let call = forward(&x, smoothing);
        let a = smoothing * V as f64 / (V as f64 - 1.0);
        let mut total = 0.0;
        for (t, l) in x.chunks(V).enumerate() {
            let lse = l.iter().map(|l| l.exp()).sum::<f64>().ln();
            let max = l.iter().copied().fold(f64::MIN, f64::max);
            let ce = lse - usize::try_from(LABELS[t]).ok().and_then(|y| l.get(y)).unwrap_or(&max);
            let mean = l.iter().map(|l| l - lse).sum::<f64>() / V as f64;
            let loss = (1.0 - a) * ce - a * mean;
            assert!((call.outs[1][t] - loss).abs() < 1e-12, "token {t}: {} against {loss}", call.outs[1][t]);
            assert!((call.outs[0][t] - lse).abs() < 1e-12);
            total += loss * MASK[t];
        }
        assert!((call.outs[2][0] - total).abs() < 1e-12);
        assert_eq!(call.outs[3][0], 3.5);
        let narrow = call.run_f32(&CeFromLogits { tokens: T, vocab: V, ld: V, smoothing });
        assert!(relative_l2(&narrow[1], &call.outs[1]) < 1e-6);
    }

    /// Labels inside the vocabulary only: for the others the max counts as a constant.
    #[rstest]
    fn gradient(#[values(0.0, 0.1)] smoothing: f64, #[values(false, true)] acc: bool) {
        let x = normal(2, T * V);
        let lse = forward(&x, smoothing).outs[0].clone();
        let ld_d = V + 2;
        let before = if acc { 1.0 } else { f64::NAN };
        let mut call = Call {
            ins: vec![x.clone(), lse, MASK.to_vec(), vec![0.3]],
            outs: vec![vec![before; span(T, ld_d, V)]],
            ints: vec![LABELS.to_vec()],
            ..Call::default()
        };
        call.run(&CeFromLogitsBackward { tokens: T, vocab: V, ld: V, ld_d, smoothing, acc });
        let grad: Vec<f64> =
            call.outs[0].chunks(ld_d).flat_map(|d| d[..V].iter().map(|g| if acc { g - 1.0 } else { *g })).collect();
        for t in [0, 1, 3] {
            finite_differences("dlogits", &x[t * V..][..V], &grad[t * V..][..V], 1e-7, |l| {
                let mut x = x.clone();
                x[t * V..][..V].copy_from_slice(l);
                0.3 * forward(&x, smoothing).outs[2][0]
            });
        }
        assert!(grad[2 * V..3 * V].iter().all(|&g| g.abs() < 1e-15), "a masked token has no gradient");
        let sum: f64 = grad[4 * V..].iter().sum();
        let a = smoothing * V as f64 / (V as f64 - 1.0);
        assert!((sum - 0.3 * (1.0 - a)).abs() < 1e-12, "no target term for a label outside: {sum}");
    }
}
