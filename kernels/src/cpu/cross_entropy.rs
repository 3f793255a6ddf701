//! Vocabulary cross entropy: on given logits, and fused with the output projection so that no [T, V] exists.
//!
//! Per token t with logits l, label y, V the vocabulary without padding, lse = ln sum_v exp(l_v):
//!   ce   = lse - l_y                         (y outside [0, V): lse - max l; only the loss mask removes such a token)
//!   loss = (1 - a) ce - a (mean_v l - lse)   a = s V / (V - 1), s the label smoothing
//!   dl_v = (exp(l_v - lse) - (1 - a) [v = y] - a / V) * loss_mask[t] * scale
//! The gradient for a label outside treats its max as a constant: no target term. (Megatron-LM's
//! vocab_parallel_cross_entropy, with the whole vocabulary's V also when it is sharded.)
//!
//! A sharded vocabulary is dealt out cyclically: label v lives on part v % parts at row v / parts. Each part computes
//! [`LinearCeStats`], the host gathers them, [`CeCombine`] gives the loss on every part, and [`LinearCeBackward`]
//! recomputes the part's logits; its dhidden is a partial sum over the parts.

mod linear;
mod logits;

pub use linear::{LinearCeBackward, LinearCeStats};
pub use logits::{CeFromLogits, CeFromLogitsBackward};

use crate::kernel::{Args, Cost};
use crate::real::Real;

/// One part of a vocabulary that is dealt out cyclically.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VocabShard {
    /// Labels of the whole vocabulary, without padding.
    pub vocab: usize,
    /// Rows stored on this part; those whose label is >= `vocab` are padding (always the last ones).
    pub local: usize,
    pub parts: usize,
    pub part: usize,
}

impl VocabShard {
    /// The whole vocabulary in one part without padding.
    pub fn whole(vocab: usize) -> Self {
        VocabShard { vocab, local: vocab, parts: 1, part: 0 }
    }

    /// Rows of this part that are not padding.
    pub fn valid(&self) -> usize {
        (self.vocab.saturating_sub(self.part)).div_ceil(self.parts).min(self.local)
    }

    /// The local row of `label`, if it lives here.
    pub fn row(&self, label: i32) -> Option<usize> {
        let label = usize::try_from(label).ok().filter(|&l| l < self.vocab)?;
        (label % self.parts == self.part).then_some(label / self.parts)
    }
}

/// Tokens of a chunk and vocabulary rows of a tile whose logits are in memory at once.
///
/// A tile has about 2^20 logits: a few MiB, and both sides of the product long enough to run at speed.
pub(super) fn tile(chunk: usize, tokens: usize, valid: usize) -> (usize, usize) {
    let chunk = chunk.clamp(1, tokens.max(1));
    (chunk, ((1 << 20) / chunk).clamp(256, valid.max(256)).min(valid.max(1)))
}

/// A chunk of tokens that suits most shapes: see [`LinearCeStats::chunk`].
pub const CHUNK: usize = 512;

/// Columns of the statistics of [`LinearCeStats`].
pub const CE_STATS: usize = 4;

/// Per-token loss from the statistics of all parts, and its masked sum.
///
/// ins: stats [parts, tokens, 4], loss_mask [tokens]; ints: labels [tokens];
/// outs: lse [tokens], loss [tokens] (not masked), total [1] = sum of loss * loss_mask,
/// count [1] = sum of loss_mask.
#[derive(Clone, Copy, Debug)]
pub struct CeCombine {
    pub tokens: usize,
    pub parts: usize,
    pub vocab: usize,
    /// Label smoothing s, 0 for none.
    pub smoothing: f64,
}

crate::kernels! {
    CeCombine => "cross_entropy_combine";
}

impl CeCombine {
    fn cost(&self) -> Cost {
        Cost::new((self.tokens * (6 * self.parts + 8)) as f64, (self.tokens * (4 * self.parts + 3)) as f64)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (stats, mask) = (args.ins[0], args.ins[1]);
        let labels = args.ints[0];
        let [lse, loss, total, count] = args.outs else { unreachable!("cross_entropy_combine has four outputs") };
        for t in 0..self.tokens {
            let part = |p: usize| &stats[(p * self.tokens + t) * CE_STATS..][..CE_STATS];
            let m = (0..self.parts).fold(T::NEG_INFINITY, |m, p| m.max(part(p)[0]));
            let [mut z, mut label, mut sum] = [T::ZERO; 3];
            for p in 0..self.parts {
                let s = part(p);
                // A part of padding alone has max -inf and sum 0.
                z += if s[1] > T::ZERO { s[1] * (s[0] - m).exp() } else { s[1] };
                label += s[2];
                sum += s[3];
            }
            lse[t] = m + z.ln();
            let known = labels[t] >= 0 && (labels[t] as usize) < self.vocab;
            loss[t] = token_loss(lse[t], if known { label } else { m }, sum, self.vocab, self.smoothing);
        }
        (total[0], count[0]) = masked_sum(&loss[..self.tokens], mask);
    }
}

/// The smoothed loss of one token; `sum` is the sum of its logits.
#[inline(always)]
fn token_loss<T: Real>(lse: T, label: T, sum: T, vocab: usize, smoothing: f64) -> T {
    let a = smoothing_weight(vocab, smoothing);
    if a == 0.0 {
        return lse - label;
    }
    T::of(1.0 - a) * (lse - label) - T::of(a) * (sum * T::of(1.0 / vocab as f64) - lse)
}

/// The weight a = s V / (V - 1) of the uniform part.
fn smoothing_weight(vocab: usize, smoothing: f64) -> f64 {
    if vocab < 2 { 0.0 } else { smoothing * vocab as f64 / (vocab - 1) as f64 }
}

/// (sum of loss * mask, sum of mask) in f64 and token order. A masked token's loss may be infinite: it is left out.
pub(super) fn masked_sum<T: Real>(loss: &[T], mask: &[T]) -> (T, T) {
    let (mut total, mut count) = (0.0, 0.0);
    for (&loss, &mask) in loss.iter().zip(mask) {
        if mask != T::ZERO {
            total += loss.to_f64() * mask.to_f64();
            count += mask.to_f64();
        }
    }
    (T::of(total), T::of(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_label_lives_on_one_part() {
        for (vocab, parts, local) in [(10, 3, 4), (12, 4, 3), (7, 4, 5), (2, 4, 1)] {
            let shards: Vec<_> = (0..parts).map(|part| VocabShard { vocab, local, parts, part }).collect();
            assert_eq!(shards.iter().map(VocabShard::valid).sum::<usize>(), vocab);
            for label in 0..vocab {
                let homes: Vec<_> = shards.iter().filter_map(|s| Some((s.part, s.row(label as i32)?))).collect();
                assert_eq!(homes, [(label % parts, label / parts)]);
                assert!(label / parts < shards[label % parts].valid());
            }
            assert!(shards.iter().all(|s| s.row(-1).is_none() && s.row(vocab as i32).is_none()));
        }
    }
}
