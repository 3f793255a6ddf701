//! Scores of one token's logits, and the choice of the largest.

use crate::real::Real;

/// Largest number of experts per token.
pub const MAX_TOP_K: usize = 64;

/// How a logit becomes a score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Score {
    Sigmoid,
    /// Softmax over all active experts, before the choice.
    Softmax,
    /// Softmax over the chosen experts.
    SoftmaxSelected,
}

/// (maximum, sum of exp(x - maximum)).
#[inline(always)]
pub(super) fn softmax_terms<T: Real>(x: &[T]) -> (T, T) {
    let most = x.iter().fold(T::NEG_INFINITY, |m, &x| if x > m { x } else { m });
    (most, x.iter().map(|&x| (x - most).exp()).sum())
}

/// The scores a token's experts are chosen by, before bias and elastic weights.
pub(super) fn scores<T: Real>(score: Score, logits: &[T], out: &mut [T]) {
    match score {
        Score::Sigmoid => crate::par::simd(
            #[inline(always)]
            || out.iter_mut().zip(logits).for_each(|(y, &x)| *y = x.vsigmoid()),
        ),
        Score::Softmax => {
            let (most, sum) = softmax_terms(logits);
            out.iter_mut().zip(logits).for_each(|(y, &x)| *y = (x - most).exp() / sum);
        }
        Score::SoftmaxSelected => out.copy_from_slice(logits),
    }
}

/// Indices of the `out.len()` largest keys, largest first; among equals the lower index first.
pub(super) fn top_k<T: Real>(keys: &[T], out: &mut [i32]) {
    let mut n = 0;
    for (e, key) in keys.iter().enumerate() {
        if n == out.len() && !out.last().is_some_and(|&last| *key > keys[last as usize]) {
            continue;
        }
        let mut at = n.min(out.len() - 1);
        while at > 0 && *key > keys[out[at - 1] as usize] {
            out[at] = out[at - 1];
            at -= 1;
        }
        out[at] = e as i32;
        n = (n + 1).min(out.len());
    }
}
