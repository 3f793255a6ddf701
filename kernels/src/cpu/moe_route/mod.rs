//! Router of a mixture of experts: which K experts a token goes to, and with what weight.
//!
//! From logits l [T, E] a token has scores s_e = sigmoid(l_e), or softmax(l)_e. It selects the K experts with the
//! largest s_e + bias_e (ties: the lower index), and its probabilities are s_e of the selected, divided by their
//! sum + 1e-20 when `normalize`, times `scaling`. With `SoftmaxSelected` the selection is by l_e + bias_e and the
//! probabilities are the softmax over the selected. The bias takes part in choosing only and has no gradient.
//! (Megatron-LM, `moe_router_score_function`, `moe_router_pre_softmax`; Wang et al. 2024 for the bias.)
//!
//! Width: logits have E columns, of which the first `active` can be chosen (a hard mask); a softmax runs over them
//! alone. With an elastic weight q [E] scores and bias are multiplied by q_e before selection (a soft mask), and q has
//! a gradient.
//!
//! Capacity: of an expert's assignments the `capacity` with the largest probabilities stay (ties: the earlier token).
//! A dropped assignment has probability 0 and index -1 - e, any negative index meaning dropped; the others keep their
//! probabilities.
//!
//! The auxiliary losses on the logits are separate kernels (`aux_loss`), so is the update of the bias (`bias`).

mod aux_loss;
mod bias;
mod scores;
#[cfg(test)]
mod tests;

pub use aux_loss::{RouterLoss, RouterLossBackward, RouterLossShape, RouterStats};
pub use bias::ExpertBiasUpdate;
pub use scores::{MAX_TOP_K, Score};

use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;
use rayon::prelude::*;
use scores::{scores, softmax_terms, top_k};
use std::cmp::Ordering;

/// Sizes and choices shared by forward and backward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouteShape {
    /// T.
    pub tokens: usize,
    /// E, columns of the logits.
    pub experts: usize,
    /// Experts that can be chosen: `k` to E.
    pub active: usize,
    /// K, at most [`MAX_TOP_K`].
    pub k: usize,
    /// Elements between rows of the logits.
    pub ld: usize,
    pub score: Score,
    /// Divide the selected scores by their sum. Megatron-LM does so for sigmoid scores when K > 1.
    pub normalize: bool,
    pub scaling: f64,
    /// Whether there is an operand q; not with `SoftmaxSelected`.
    pub elastic: bool,
}

/// ins: logits [T, E], then bias [E] if `bias`, then q [E] if elastic; ints: padding mask [T] if `mask` (1 = padding:
/// routed, not counted); outs: probs [T, K]; int_outs: indices [T, K] by falling score, counts [E] of kept assignments.
#[derive(Clone, Debug)]
pub struct RouteForward {
    pub shape: RouteShape,
    pub bias: bool,
    pub mask: bool,
    /// Largest number of tokens of an expert.
    pub capacity: Option<usize>,
    /// counts += instead of =, to collect loads over micro-batches.
    pub acc_counts: bool,
}

/// ins: logits [T, E], dprobs [T, K], then q [E] if elastic; ints: indices [T, K]; outs: dlogits [T, E] (rows `ld_d`
/// apart), then dq [E] (+=) if elastic.
#[derive(Clone, Debug)]
pub struct RouteBackward {
    pub shape: RouteShape,
    pub ld_d: usize,
    /// dlogits += instead of =.
    pub acc: bool,
}

crate::kernels! {
    RouteForward => "moe_route", workspace;
    RouteBackward => "moe_route_backward", workspace;
}

impl RouteShape {
    /// Checks what the kernels rely on; a message names what is wrong.
    pub fn check(&self) -> Result<(), String> {
        if self.k == 0 || self.k > MAX_TOP_K {
            return Err(format!("a router chooses 1 to {MAX_TOP_K} experts per token, got {}", self.k));
        }
        if self.active < self.k || self.active > self.experts {
            return Err(format!(
                "the number of active experts ({}) must be between the experts per token ({}) and all experts ({})",
                self.active, self.k, self.experts
            ));
        }
        if self.elastic && self.score == Score::SoftmaxSelected {
            return Err("soft expert masks need scores of all experts: use sigmoid or softmax before top-k".into());
        }
        Ok(())
    }

    fn cost(&self) -> Cost {
        let logits = (self.tokens * self.experts) as f64;
        Cost::new(8.0 * logits, logits + (2 * self.tokens * self.k) as f64)
    }

    fn block(&self) -> usize {
        par::block_rows(self.tokens, 8 * self.experts)
    }

    fn blocks(&self) -> usize {
        self.tokens.div_ceil(self.block())
    }

    /// Turns the scores of the selected into probabilities.
    fn probabilities<T: Real>(&self, selected: &mut [T]) {
        let scaling = T::of(self.scaling);
        if self.score == Score::SoftmaxSelected {
            let (most, sum) = softmax_terms(selected);
            selected.iter_mut().for_each(|x| *x = (*x - most).exp() / sum * scaling);
        } else if self.normalize {
            let sum = selected.iter().copied().sum::<T>() + T::of(1e-20);
            selected.iter_mut().for_each(|x| *x = *x / sum * scaling);
        } else {
            selected.iter_mut().for_each(|x| *x *= scaling);
        }
    }
}

impl RouteForward {
    fn cost(&self) -> Cost {
        self.shape.cost()
    }

    /// Scores and selection keys of a token for every block of tokens; later the probabilities of one expert.
    fn workspace(&self) -> usize {
        let s = &self.shape;
        (s.blocks() * 2 * s.experts).max(if self.capacity.is_some() { s.tokens } else { 0 })
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let s = &self.shape;
        debug_assert_eq!(s.check(), Ok(()));
        let mut ins = args.ins.iter();
        let mut next = |wanted: bool| if wanted { ins.next().copied() } else { None };
        let (Some(logits), bias, q) = (next(true), next(self.bias), next(s.elastic)) else {
            unreachable!("moe_route takes logits")
        };
        let ([probs], [indices, counts]) = (args.outs, args.int_outs) else {
            unreachable!("moe_route gives probs, indices, counts")
        };
        let (probs, indices) = (&mut probs[..s.tokens * s.k], &mut indices[..s.tokens * s.k]);
        let block = s.block();
        probs
            .par_chunks_mut(block * s.k)
            .zip(indices.par_chunks_mut(block * s.k))
            .zip(args.work.par_chunks_mut(2 * s.experts))
            .enumerate()
            .for_each(|(b, ((probs, indices), work))| {
                let (score, key) = work.split_at_mut(s.experts);
                let (score, key) = (&mut score[..s.active], &mut key[..s.active]);
                let rows = probs.chunks_exact_mut(s.k).zip(indices.chunks_exact_mut(s.k));
                for (i, (probs, indices)) in rows.enumerate() {
                    scores(s.score, &logits[(b * block + i) * s.ld..][..s.active], score);
                    self.select(score, key, bias, q, indices);
                    for (p, &e) in probs.iter_mut().zip(indices.iter()) {
                        *p = score[e as usize];
                    }
                    s.probabilities(probs);
                }
            });
        if let Some(capacity) = self.capacity {
            self.drop_beyond(capacity, probs, indices, args.work);
        }
        let counts = &mut counts[..s.experts];
        if !self.acc_counts {
            counts.fill(0);
        }
        let padding = if self.mask { args.ints.first().copied() } else { None };
        for (t, row) in indices.chunks_exact(s.k).enumerate() {
            if padding.is_none_or(|mask| mask[t] == 0) {
                row.iter().filter(|&&e| e >= 0).for_each(|&e| counts[e as usize] += 1);
            }
        }
    }

    /// Weighs scores by q, and lists the experts with the largest score + bias.
    fn select<T: Real>(
        &self,
        score: &mut [T],
        key: &mut [T],
        bias: Option<&[T]>,
        q: Option<&[T]>,
        indices: &mut [i32],
    ) {
        if let Some(q) = q {
            score.iter_mut().zip(q).for_each(|(s, &q)| *s *= q);
        }
        let Some(bias) = bias else { return top_k(score, indices) };
        match q {
            Some(q) => {
                key.iter_mut().zip(&*score).zip(bias.iter().zip(q)).for_each(|((k, &s), (&b, &q))| *k = s + b * q)
            }
            None => key.iter_mut().zip(&*score).zip(bias).for_each(|((k, &s), &b)| *k = s + b),
        }
        top_k(key, indices)
    }

    fn drop_beyond<T: Real>(&self, capacity: usize, probs: &mut [T], indices: &mut [i32], work: &mut [T]) {
        for e in 0..self.shape.active as i32 {
            let mut n = 0;
            for (&p, _) in probs.iter().zip(&*indices).filter(|(_, i)| **i == e) {
                work[n] = p;
                n += 1;
            }
            if n <= capacity {
                continue;
            }
            // The least probability that stays, and how many of those that have it.
            let (least, mut ties) = if capacity == 0 {
                (None, 0)
            } else {
                let falling = |a: &T, b: &T| b.partial_cmp(a).unwrap_or(Ordering::Equal);
                let least = *work[..n].select_nth_unstable_by(capacity - 1, falling).1;
                (Some(least), capacity - work[..n].iter().filter(|p| **p > least).count())
            };
            for (p, i) in probs.iter_mut().zip(indices.iter_mut()).filter(|(_, i)| **i == e) {
                let above = least.is_some_and(|least| *p > least);
                let tie = !above && ties > 0 && least.is_some_and(|least| *p == least);
                if tie {
                    ties -= 1;
                } else if !above {
                    (*p, *i) = (T::ZERO, -1 - e);
                }
            }
        }
    }
}

impl RouteBackward {
    fn cost(&self) -> Cost {
        self.shape.cost()
    }

    /// Partial sums of dq.
    fn workspace(&self) -> usize {
        self.shape.blocks() * self.shape.experts
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let s = &self.shape;
        let ([logits, d_probs, q @ ..], [indices], [d_logits, d_q @ ..]) = (args.ins, args.ints, args.outs) else {
            unreachable!("moe_route_backward takes logits, dprobs, indices and gives dlogits")
        };
        let q = if s.elastic { q.first().copied() } else { None };
        let block = s.block();
        let partials = &mut args.work[..s.blocks() * s.experts];
        d_logits.par_chunks_mut(block * self.ld_d).zip(partials.par_chunks_mut(s.experts)).enumerate().for_each(
            |(b, (d_logits, d_q))| {
                d_q.fill(T::ZERO);
                let rows = d_logits.chunks_mut(self.ld_d).enumerate().take((s.tokens - b * block).min(block));
                for (i, d_logits) in rows {
                    let t = b * block + i;
                    if !self.acc {
                        d_logits[..s.experts].fill(T::ZERO);
                    }
                    let logits = &logits[t * s.ld..][..s.active];
                    let at = t * s.k..(t + 1) * s.k;
                    self.token(logits, &indices[at.clone()], &d_probs[at], q, &mut d_logits[..s.active], d_q);
                }
            },
        );
        if let ([d_q, ..], true) = (d_q, s.elastic) {
            for partial in partials.chunks_exact(s.experts) {
                d_q.iter_mut().zip(partial).for_each(|(d, &p)| *d += p);
            }
        }
    }

    fn token<T: Real>(
        &self,
        logits: &[T],
        indices: &[i32],
        d_probs: &[T],
        q: Option<&[T]>,
        d_logits: &mut [T],
        d_q: &mut [T],
    ) {
        let s = &self.shape;
        // Scores y before and d after weighing: first the selected scores, then their gradients.
        let (mut expert, mut y, mut d) = ([0usize; MAX_TOP_K], [T::ZERO; MAX_TOP_K], [T::ZERO; MAX_TOP_K]);
        let (expert, y, d) = (&mut expert[..s.k], &mut y[..s.k], &mut d[..s.k]);
        let softmax = if s.score == Score::Softmax { Some(softmax_terms(logits)) } else { None };
        for j in 0..s.k {
            expert[j] = if indices[j] < 0 { -1 - indices[j] } else { indices[j] } as usize;
            let l = logits[expert[j]];
            y[j] = match (s.score, softmax) {
                (Score::Sigmoid, _) => T::ONE / (T::ONE + (-l).exp()),
                (_, Some((most, sum))) => (l - most).exp() / sum,
                _ => l,
            };
            d[j] = if indices[j] < 0 { T::ZERO } else { d_probs[j] * T::of(s.scaling) };
        }
        if s.score == Score::SoftmaxSelected {
            let (most, sum) = softmax_terms(y);
            y.iter_mut().for_each(|y| *y = (*y - most).exp() / sum);
            let mean: T = y.iter().zip(&*d).map(|(&y, &d)| y * d).sum();
            for j in 0..s.k {
                d_logits[expert[j]] += y[j] * (d[j] - mean);
            }
            return;
        }
        let weight = |e: usize| q.map_or(T::ONE, |q| q[e]);
        if s.normalize {
            let mut sum = T::of(1e-20);
            let mut mean = T::ZERO;
            for j in 0..s.k {
                let score = y[j] * weight(expert[j]);
                sum += score;
                mean += score * d[j];
            }
            mean /= sum;
            d.iter_mut().for_each(|d| *d = (*d - mean) / sum);
        }
        let mut mean = T::ZERO;
        for j in 0..s.k {
            let e = expert[j];
            if q.is_some() {
                d_q[e] += d[j] * y[j];
            }
            d[j] *= weight(e);
            match softmax {
                None => d_logits[e] += d[j] * y[j] * (T::ONE - y[j]),
                Some(_) => {
                    d_logits[e] += d[j] * y[j];
                    mean += d[j] * y[j];
                }
            }
        }
        if let Some((most, sum)) = softmax {
            let factor = mean / sum;
            for (d, &l) in d_logits.iter_mut().zip(logits) {
                *d += -factor * (l - most).exp();
            }
        }
    }
}
