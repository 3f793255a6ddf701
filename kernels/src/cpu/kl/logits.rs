//! KL divergence on given logits [T, V], over the whole vocabulary or the teacher's top k of it.

use super::{KL_SAVED, Stats, gradient, masked_sum};
use crate::cpu::softmax::{put, row, span};
use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;
use rayon::prelude::*;

/// Divergence of each row of student logits from the teacher's, and its masked sum.
///
/// ins: student logits [tokens, vocab], teacher logits [tokens, vocab], loss_mask [tokens];
/// outs: saved [tokens, 3] = (lse_t, lse_s, gap), loss [tokens] (not masked), total [1], count [1] = sum of loss_mask;
/// int_outs, with `top_k`: index [tokens, k], the teacher's largest logits in falling order, the lower index first on a
/// tie.
#[derive(Clone, Copy, Debug)]
pub struct KlFromLogits {
    pub tokens: usize,
    pub vocab: usize,
    pub ld_s: usize,
    pub ld_t: usize,
    pub temperature: f64,
    pub reverse: bool,
    /// Both distributions renormalised over the teacher's k largest logits; at most `vocab`.
    pub top_k: Option<usize>,
}

/// Gradient of [`KlFromLogits`]'s total, times `scale`, to the student's logits.
///
/// ins: student logits [tokens, vocab], teacher logits [tokens, vocab], saved [tokens, 3], loss_mask [tokens], scale [1];
/// ints, with `top_k`: index [tokens, k]; outs: dlogits [tokens, vocab].
#[derive(Clone, Copy, Debug)]
pub struct KlFromLogitsBackward {
    pub forward: KlFromLogits,
    pub ld_d: usize,
    pub acc: bool,
}

crate::kernels! {
    KlFromLogits => "kl", workspace;
    KlFromLogitsBackward => "kl_backward";
}

impl KlFromLogits {
    /// Both sides' logits over the temperature, gathered.
    fn workspace(&self) -> usize {
        2 * self.tokens * self.width()
    }

    /// Entries of a token that take part.
    fn width(&self) -> usize {
        self.top_k.unwrap_or(self.vocab).min(self.vocab)
    }

    fn cost(&self) -> Cost {
        let n = (self.tokens * self.vocab) as f64;
        Cost::new(12.0 * n, 2.0 * n)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (student, teacher, mask) = (args.ins[0], args.ins[1], args.ins[2]);
        let [saved, loss, total, count] = args.outs else { unreachable!("kl has four outputs") };
        let saved = &mut saved[..self.tokens * KL_SAVED];
        let loss = &mut loss[..self.tokens];
        let k = self.width();
        let inverse = T::of(1.0 / self.temperature);
        if self.top_k.is_some() && k > 0 {
            args.int_outs[0][..self.tokens * k].par_chunks_mut(k).enumerate().for_each(|(t, index)| {
                top_k(row(teacher, t, self.ld_t, self.vocab), index);
            });
        }
        let index = self.top_k.map(|_| &*args.int_outs[0]);
        let work = &mut args.work[..2 * self.tokens * k];
        let rows = saved.par_chunks_mut(KL_SAVED).zip(loss.par_iter_mut()).zip(work.par_chunks_mut((2 * k).max(1)));
        rows.enumerate().for_each(|(token, ((saved, loss), work))| {
            par::simd!(|| {
                let s_row = row(student, token, self.ld_s, self.vocab);
                let t_row = row(teacher, token, self.ld_t, self.vocab);
                let (s, t) = work.split_at_mut(k);
                for (j, (s, t)) in s.iter_mut().zip(t.iter_mut()).enumerate() {
                    let v = index.map_or(j, |index| index[token * k + j] as usize);
                    (*s, *t) = (s_row[v] * inverse, t_row[v] * inverse);
                }
                let (values, divergence) = Stats::of(s, t, self.reverse).finish(self.reverse);
                saved.copy_from_slice(&values);
                *loss = divergence;
            })
        });
        (total[0], count[0]) = masked_sum(loss, mask);
    }
}

/// Indices of the largest elements of `x`, as many as `index` holds, in falling order.
fn top_k<T: Real>(x: &[T], index: &mut [i32]) {
    let k = index.len();
    let mut n = 0;
    for (v, &value) in x.iter().enumerate() {
        if n == k && x[index[k - 1] as usize] >= value {
            continue;
        }
        let mut at = n.min(k - 1);
        while at > 0 && x[index[at - 1] as usize] < value {
            index[at] = index[at - 1];
            at -= 1;
        }
        index[at] = v as i32;
        n = (n + 1).min(k);
    }
}

impl KlFromLogitsBackward {
    fn cost(&self) -> Cost {
        let n = (self.forward.tokens * self.forward.vocab) as f64;
        Cost::new(6.0 * n, 3.0 * n)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let [student, teacher, saved, mask, scale] = *args.ins else { unreachable!("kl_backward has five inputs") };
        let f = &self.forward;
        let (k, inverse) = (f.width(), T::of(1.0 / f.temperature));
        let ints = args.ints;
        let out = &mut args.outs[0][..span(f.tokens, self.ld_d, f.vocab)];
        par::rows_mut(out, self.ld_d, par::block_rows(f.tokens, 8 * f.vocab), |first, block| {
            for (i, d) in block.chunks_mut(self.ld_d).enumerate() {
                let token = first + i;
                let d = &mut d[..f.vocab];
                let s = row(student, token, f.ld_s, f.vocab);
                let t = row(teacher, token, f.ld_t, f.vocab);
                let values = [0, 1, 2].map(|j| saved[token * KL_SAVED + j]);
                let factor = mask[token] * scale[0] * inverse;
                let masked = factor == T::ZERO;
                if !self.acc && (masked || f.top_k.is_some()) {
                    d.fill(T::ZERO);
                }
                if masked {
                    continue;
                }
                if f.top_k.is_some() {
                    for &v in &ints[0][token * k..][..k] {
                        let v = v as usize;
                        d[v] += gradient(s[v] * inverse, t[v] * inverse, values, f.reverse, factor);
                    }
                } else {
                    par::simd!(|| {
                        for ((d, &s), &t) in d.iter_mut().zip(s).zip(t) {
                            put(d, gradient(s * inverse, t * inverse, values, f.reverse, factor), self.acc);
                        }
                    });
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

    const T: usize = 4;
    const V: usize = 19;
    const MASK: [f64; T] = [1.0, 0.0, 0.5, 1.0];

    fn kernel(reverse: bool, top_k: Option<usize>) -> KlFromLogits {
        KlFromLogits { tokens: T, vocab: V, ld_s: V, ld_t: V, temperature: 2.0, reverse, top_k }
    }

    fn forward(s: &[f64], t: &[f64], kernel: &KlFromLogits) -> Call {
        let mut call = Call {
            ins: vec![s.to_vec(), t.to_vec(), MASK.to_vec()],
            outs: vec![vec![f64::NAN; T * KL_SAVED], vec![f64::NAN; T], vec![f64::NAN], vec![f64::NAN]],
            int_outs: vec![vec![-1; T * kernel.top_k.unwrap_or(0)]],
            ..Call::default()
        };
        call.run(kernel);
        call
    }

    #[rstest]
    fn matches_the_formula(
        #[values(false, true)] reverse: bool,
        #[values(None, Some(1), Some(5))] top_k: Option<usize>,
    ) {
        let (s, t) = (normal(1, T * V), normal(2, T * V));
        let call = forward(&s, &t, &kernel(reverse, top_k));
        let mut total = 0.0;
        for token in 0..T {
            let (s, t) = (&s[token * V..][..V], &t[token * V..][..V]);
            let mut order: Vec<usize> = (0..V).collect();
            order.sort_by(|&a, &b| t[b].total_cmp(&t[a]));
            if let Some(k) = top_k {
                order.truncate(k);
                let index: Vec<i32> = order.iter().map(|&v| v as i32).collect();
                assert_eq!(call.int_outs[0][token * k..][..k], index);
            }
            let softmax = |x: &[f64]| -> Vec<f64> {
                let z: f64 = order.iter().map(|&v| (x[v] / 2.0).exp()).sum();
                order.iter().map(|&v| (x[v] / 2.0).exp() / z).collect()
            };
            let (p, q) = if reverse { (softmax(s), softmax(t)) } else { (softmax(t), softmax(s)) };
            let kl: f64 = p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum();
            assert!((call.outs[1][token] - kl).abs() < 1e-13, "token {token}: {} against {kl}", call.outs[1][token]);
            total += kl * MASK[token];
        }
        assert!((call.outs[2][0] - total).abs() < 1e-13);
        assert_eq!(call.outs[3][0], 2.5);
        let narrow = call.run_f32(&kernel(reverse, top_k));
        assert!(top_k == Some(1) || relative_l2(&narrow[1], &call.outs[1]) < 1e-5);
    }

    #[rstest]
    fn gradients(
        #[values(false, true)] reverse: bool,
        #[values(None, Some(5))] top_k: Option<usize>,
        #[values(false, true)] acc: bool,
    ) {
        let (s, t) = (normal(3, T * V), normal(4, T * V));
        let kernel = kernel(reverse, top_k);
        let done = forward(&s, &t, &kernel);
        let ld_d = V + 1;
        let mut call = Call {
            ins: vec![s.clone(), t.clone(), done.outs[0].clone(), MASK.to_vec(), vec![0.7]],
            ints: done.int_outs.clone(),
            outs: vec![vec![if acc { 1.0 } else { f64::NAN }; span(T, ld_d, V)]],
            ..Call::default()
        };
        call.run(&KlFromLogitsBackward { forward: kernel, ld_d, acc });
        let grad: Vec<f64> =
            call.outs[0].chunks(ld_d).flat_map(|d| d[..V].iter().map(|g| if acc { g - 1.0 } else { *g })).collect();
        finite_differences("ds", &s, &grad, 1e-7, |s| 0.7 * forward(s, &t, &kernel).outs[2][0]);
    }

    #[test]
    fn top_k_takes_the_first_of_equals() {
        let mut index = [-1; 4];
        top_k(&[1.0, 3.0, 3.0, 0.0, 3.0, 2.0], &mut index);
        assert_eq!(index, [1, 2, 4, 5]);
    }
}
