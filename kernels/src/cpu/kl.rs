//! Distillation losses per token: KL divergence of vocabulary distributions, and distances of hidden states.
//!
//! With student logits s and teacher logits t, both already divided by the temperature tau, and p = softmax:
//!   forward KL(t || s) = sum_v p_t (t - s) - lse_t + lse_s      ds = (p_s - p_t) / tau
//!   reverse KL(s || t) = sum_v p_s (s - t) - lse_s + lse_t      ds = p_s ((s - t) - gap) / tau
//! gap = sum_v p_s (s - t) (or p_t (t - s)). No factor tau^2 (as nvidia-modelopt's Megatron losses have it). Gradients
//! are multiplied by loss_mask[t] * scale; the teacher gets none.
//!
//! On given logits ([`KlFromLogits`]), optionally over the teacher's top k logits only, both sides renormalised. Fused with
//! both output projections and over a cyclically sharded vocabulary (see [`super::cross_entropy`]): each part computes
//! [`LinearKlStats`], the host gathers them, [`KlCombine`] gives loss and normalisers, [`LinearKlBackward`] recomputes the
//! logits. Hidden states: [`HiddenLoss`].

mod hidden;
mod linear;
mod logits;

pub use hidden::{HiddenDistance, HiddenLoss, HiddenLossBackward};
pub use linear::{LinearKlBackward, LinearKlStats, TwoHeads};
pub use logits::{KlFromLogits, KlFromLogitsBackward};

use super::cross_entropy::masked_sum;
use super::softmax::{exp, max_of, sum_map, sum_zip};
use crate::kernel::{Args, Cost};
use crate::real::Real;

/// Columns of the statistics of [`LinearKlStats`].
pub const KL_STATS: usize = 5;
/// Columns kept for the backward: lse of the teacher, lse of the student, gap.
pub const KL_SAVED: usize = 3;

/// Per-token divergence from the statistics of all parts, and its masked sum.
///
/// ins: stats [parts, tokens, 5], loss_mask [tokens];
/// outs: saved [tokens, 3] = (lse_t, lse_s, gap), loss [tokens] (not masked), total [1] = sum of loss * loss_mask,
/// count [1] = sum of loss_mask.
#[derive(Clone, Copy, Debug)]
pub struct KlCombine {
    pub tokens: usize,
    pub parts: usize,
    pub reverse: bool,
}

crate::kernels! {
    KlCombine => "kl_combine";
}

impl KlCombine {
    fn cost(&self) -> Cost {
        Cost::new((self.tokens * (10 * self.parts + 8)) as f64, (self.tokens * (5 * self.parts + 5)) as f64)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (stats, mask) = (args.ins[0], args.ins[1]);
        let [saved, loss, total, count] = args.outs else { unreachable!("kl_combine has four outputs") };
        for t in 0..self.tokens {
            let mut all = Stats::empty();
            for p in 0..self.parts {
                all = all.join(Stats::load(&stats[(p * self.tokens + t) * KL_STATS..]), self.reverse);
            }
            let (values, divergence) = all.finish(self.reverse);
            saved[t * KL_SAVED..][..KL_SAVED].copy_from_slice(&values);
            loss[t] = divergence;
        }
        (total[0], count[0]) = masked_sum(&loss[..self.tokens], mask);
    }
}

/// What a set of vocabulary entries contributes to a token's divergence.
#[derive(Clone, Copy)]
struct Stats<T> {
    /// max of t, sum of exp(t - max).
    mt: T,
    zt: T,
    ms: T,
    zs: T,
    /// sum of exp(t - mt) (t - s), or reversed sum of exp(s - ms) (s - t).
    d: T,
}

impl<T: Real> Stats<T> {
    fn empty() -> Self {
        Stats { mt: T::NEG_INFINITY, zt: T::ZERO, ms: T::NEG_INFINITY, zs: T::ZERO, d: T::ZERO }
    }

    fn load(s: &[T]) -> Self {
        Stats { mt: s[0], zt: s[1], ms: s[2], zs: s[3], d: s[4] }
    }

    fn store(self, s: &mut [T]) {
        s[..KL_STATS].copy_from_slice(&[self.mt, self.zt, self.ms, self.zs, self.d]);
    }

    /// Of logits that are divided by the temperature already.
    #[inline(always)]
    fn of(s: &[T], t: &[T], reverse: bool) -> Self {
        let (mt, ms) = (max_of(t), max_of(s));
        Stats {
            mt,
            zt: sum_map(t, |t| exp(t - mt)),
            ms,
            zs: sum_map(s, |s| exp(s - ms)),
            d: match reverse {
                false => sum_zip(s, t, |s, t| exp(t - mt) * (t - s)),
                true => sum_zip(s, t, |s, t| exp(s - ms) * (s - t)),
            },
        }
    }

    #[inline(always)]
    fn join(self, other: Self, reverse: bool) -> Self {
        if self.zt == T::ZERO {
            return other;
        }
        if other.zt == T::ZERO {
            return self;
        }
        let (mt, ms) = (self.mt.max(other.mt), self.ms.max(other.ms));
        let (at, bt) = ((self.mt - mt).exp(), (other.mt - mt).exp());
        let (a_s, b_s) = ((self.ms - ms).exp(), (other.ms - ms).exp());
        let (ad, bd) = if reverse { (a_s, b_s) } else { (at, bt) };
        Stats {
            mt,
            zt: self.zt * at + other.zt * bt,
            ms,
            zs: self.zs * a_s + other.zs * b_s,
            d: self.d * ad + other.d * bd,
        }
    }

    /// ((lse_t, lse_s, gap), divergence).
    #[inline(always)]
    fn finish(self, reverse: bool) -> ([T; KL_SAVED], T) {
        let (lse_t, lse_s) = (self.mt + self.zt.ln(), self.ms + self.zs.ln());
        let gap = self.d / if reverse { self.zs } else { self.zt };
        let shift = if reverse { lse_t - lse_s } else { lse_s - lse_t };
        ([lse_t, lse_s, gap], gap + shift)
    }
}

/// Turns student logits s into factor * dKL/ds (factor contains 1 / tau).
#[inline(always)]
fn gradient<T: Real>(s: T, t: T, saved: [T; KL_SAVED], reverse: bool, factor: T) -> T {
    let [lse_t, lse_s, gap] = saved;
    let p_s = exp(s - lse_s);
    if reverse { p_s * ((s - t) - gap) * factor } else { (p_s - exp(t - lse_t)) * factor }
}
