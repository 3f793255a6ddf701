//! Auxiliary losses of the router: load balancing over the micro-batch or per sequence, and the z loss.
//!
//! With n = the scores of a token normalised over the active experts E (softmax, or sigmoid / sum), and r = 1 for the
//! K largest n *without* bias, over tokens t that are not padding:
//!   balance  = E / (K T^2) sum_e (sum_t n_te) (sum_t r_te)      (Fedus et al. 2021; Megatron-LM `aux_loss`)
//!   sequence = the same for every sequence over its own T_g tokens, averaged over sequences   (`seq_aux_loss`)
//!   z        = 1/T sum_t logsumexp(l_t)^2                        (Zoph et al. 2022)
//! With `mean_length` every sequence's sum is over the mean of the T_g instead, as Megatron-LM has it; it differs when
//! padding or packing makes sequences unequal.
//! loss = c_balance balance + c_sequence sequence + c_z z. Gradients go through n and the logsumexp; r is a count.
//!
//! Sums over tokens may be spread over ranks, so the work is split: [`RouterStats`] gives the sums, which the host may
//! add over ranks, [`RouterLoss`] the values, [`RouterLossBackward`] the gradient of the rank's own logits.
//! A loss per token is the caller's scale: the upstream gradient times the number of tokens.

use super::scores::{MAX_TOP_K, Score, scores, softmax_terms, top_k};
use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;
use rayon::prelude::*;

/// Tokens of a sequence that are summed before the sums are added up in order.
const BLOCK: usize = 64;

/// Sizes shared by the three kernels. Statistics are [G, 2E + 2]: sum n [E], sum r [E], tokens, sum logsumexp^2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterLossShape {
    /// T of this rank.
    pub tokens: usize,
    /// E, columns of the logits.
    pub experts: usize,
    /// Experts that can be chosen.
    pub active: usize,
    /// K.
    pub k: usize,
    /// Elements between rows of the logits.
    pub ld: usize,
    pub score: Score,
    /// G: sequences that cu_seqlens lists, empty ones included, when statistics are kept per sequence; without, one
    /// group of all tokens, for which `sequence` equals `balance`.
    pub sequences: Option<usize>,
    /// Divide each sequence's balance by the mean number of tokens of a sequence, not by its own.
    pub mean_length: bool,
    /// Whether there is an operand mask.
    pub mask: bool,
}

/// ins: logits [T, E]; ints: cu_seqlens, then padding mask [T] (1 = padding) if `mask`; outs: stats [G, 2E + 2].
#[derive(Clone, Debug)]
pub struct RouterStats {
    pub shape: RouterLossShape,
}

/// ins: stats [G, 2E + 2]; outs: loss [1], metrics [3]: balance, sequence and z without coefficients.
#[derive(Clone, Debug)]
pub struct RouterLoss {
    pub shape: RouterLossShape,
    /// c_balance, c_sequence, c_z.
    pub coefficients: [f64; 3],
}

/// ins: logits [T, E], stats [G, 2E + 2], dloss [1]; ints: cu_seqlens, then padding mask [T] if `mask`;
/// outs: dlogits [T, E] (rows `ld_d` apart).
#[derive(Clone, Debug)]
pub struct RouterLossBackward {
    pub shape: RouterLossShape,
    pub coefficients: [f64; 3],
    pub ld_d: usize,
    /// dlogits += instead of =.
    pub acc: bool,
}

crate::kernels! {
    RouterStats => "router_stats", workspace;
    RouterLoss => "router_loss";
    RouterLossBackward => "router_loss_backward", workspace;
}

impl RouterLossShape {
    /// G.
    pub fn groups(&self) -> usize {
        self.sequences.unwrap_or(1)
    }

    /// Elements of one group's statistics.
    pub fn width(&self) -> usize {
        2 * self.experts + 2
    }

    fn cost(&self) -> Cost {
        let logits = (self.tokens * self.experts) as f64;
        Cost::new(10.0 * logits, logits)
    }

    /// n into `n`; returns 1 / (sum of the scores) for sigmoid scores, which their gradient needs.
    fn normalised<T: Real>(&self, logits: &[T], n: &mut [T]) -> T {
        if self.score != Score::Sigmoid {
            scores(Score::Softmax, logits, n);
            return T::ONE;
        }
        scores(Score::Sigmoid, logits, n);
        let inverse = T::ONE / (n.iter().copied().sum::<T>() + T::of(1e-20));
        n.iter_mut().for_each(|x| *x *= inverse);
        inverse
    }

    /// `f` on the boundaries of the groups.
    fn with_groups<R>(&self, cu_seqlens: &[i32], f: impl FnOnce(&[i32]) -> R) -> R {
        match self.sequences {
            Some(n) => f(&cu_seqlens[..=n]),
            None => f(&[0, self.tokens as i32]),
        }
    }

    /// Blocks of tokens the statistics need at most, and the blocks of one group.
    fn max_blocks(&self) -> usize {
        self.tokens / BLOCK + self.groups()
    }
}

fn blocks_of(group: &[i32]) -> usize {
    ((group[1] - group[0]) as usize).div_ceil(BLOCK)
}

impl RouterStats {
    fn cost(&self) -> Cost {
        self.shape.cost()
    }

    /// Partial sums of every block, and normalised scores of one token per block.
    fn workspace(&self) -> usize {
        self.shape.max_blocks() * (self.shape.width() + self.shape.active)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let s = &self.shape;
        let ([logits], [cu, mask @ ..], [stats]) = (args.ins, args.ints, args.outs) else {
            unreachable!("router_stats takes logits, cu_seqlens and gives stats")
        };
        let mask = if s.mask { mask.first().copied() } else { None };
        let step = s.width() + s.active;
        s.with_groups(cu, |cu| {
            args.work.par_chunks_mut(step).enumerate().for_each(|(index, work)| {
                let mut block = index;
                for group in cu.windows(2) {
                    let n = blocks_of(group);
                    if block >= n {
                        block -= n;
                        continue;
                    }
                    let first = group[0] as usize + block * BLOCK;
                    let (sums, scratch) = work.split_at_mut(s.width());
                    sums.fill(T::ZERO);
                    for t in first..(first + BLOCK).min(group[1] as usize) {
                        if mask.is_none_or(|mask| mask[t] == 0) {
                            self.token(&logits[t * s.ld..][..s.active], sums, &mut scratch[..s.active]);
                        }
                    }
                    break;
                }
            });
            let mut partials = args.work.chunks_exact(step);
            for (group, stats) in cu.windows(2).zip(stats.chunks_exact_mut(s.width())) {
                stats.fill(T::ZERO);
                for partial in partials.by_ref().take(blocks_of(group)) {
                    stats.iter_mut().zip(partial).for_each(|(s, &p)| *s += p);
                }
            }
        });
    }

    fn token<T: Real>(&self, logits: &[T], sums: &mut [T], n: &mut [T]) {
        let s = &self.shape;
        s.normalised(logits, n);
        let mut chosen = [0; MAX_TOP_K];
        let chosen = &mut chosen[..s.k];
        top_k(n, chosen);
        sums.iter_mut().zip(&*n).for_each(|(sum, &n)| *sum += n);
        for &e in chosen.iter() {
            sums[s.experts + e as usize] += T::ONE;
        }
        let (most, sum) = softmax_terms(logits);
        let z = most + sum.ln();
        sums[2 * s.experts] += T::ONE;
        sums[2 * s.experts + 1] += z * z;
    }
}

/// Tokens in all groups, and groups that have any.
fn totals<T: Real>(s: &RouterLossShape, stats: &[T]) -> (f64, f64) {
    let tokens = stats.chunks_exact(s.width()).take(s.groups()).map(|g| g[2 * s.experts].to_f64());
    tokens.fold((0.0, 0.0), |(sum, n), t| (sum + t, n + f64::from(u8::from(t > 0.0))))
}

/// Tokens that a group's balance is divided by the square of.
fn length<T: Real>(s: &RouterLossShape, group: &[T], (tokens, groups): (f64, f64)) -> f64 {
    if s.mean_length { tokens / groups } else { group[2 * s.experts].to_f64().max(1.0) }
}

impl RouterLoss {
    fn cost(&self) -> Cost {
        let stats = (self.shape.groups() * self.shape.width()) as f64;
        Cost::new(4.0 * stats, stats)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let s = &self.shape;
        let ([stats], [loss, metrics]) = (args.ins, args.outs) else {
            unreachable!("router_loss takes stats and gives loss, metrics")
        };
        let (tokens, groups) = totals(s, stats);
        let mut values = [0.0; 3];
        if tokens > 0.0 {
            let rows = || stats.chunks_exact(s.width()).take(s.groups());
            let factor = s.active as f64 / s.k as f64;
            for e in 0..s.active {
                let (mut n, mut r) = (0.0, 0.0);
                for g in rows().filter(|g| g[2 * s.experts] > T::ZERO) {
                    let (n_g, r_g, t_g) = (g[e].to_f64(), g[s.experts + e].to_f64(), length(s, g, (tokens, groups)));
                    n += n_g;
                    r += r_g;
                    values[1] += factor / (t_g * t_g) * n_g * r_g / groups;
                }
                values[0] += factor / (tokens * tokens) * n * r;
            }
            values[2] = rows().map(|g| g[2 * s.experts + 1].to_f64()).sum::<f64>() / tokens;
        }
        loss[0] = T::of(values.iter().zip(&self.coefficients).map(|(v, c)| v * c).sum());
        metrics.iter_mut().zip(values).for_each(|(m, v)| *m = T::of(v));
    }
}

impl RouterLossBackward {
    fn cost(&self) -> Cost {
        self.shape.cost()
    }

    /// dloss/dn of every group, and normalised scores of one token per block of rows.
    fn workspace(&self) -> usize {
        let s = &self.shape;
        s.groups() * s.active + s.tokens.div_ceil(BLOCK) * s.active
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let s = &self.shape;
        let ([logits, stats, upstream], [cu, mask @ ..], [d_logits]) = (args.ins, args.ints, args.outs) else {
            unreachable!("router_loss_backward takes logits, stats, dloss, cu_seqlens and gives dlogits")
        };
        let mask = if s.mask { mask.first().copied() } else { None };
        let (d_n, scratch) = args.work.split_at_mut(s.groups() * s.active);
        let d_z = self.gradients_of_sums(stats, upstream[0].to_f64(), d_n);
        let d_n = &*d_n;
        s.with_groups(cu, |cu| {
            d_logits.par_chunks_mut(BLOCK * self.ld_d).zip(scratch.par_chunks_mut(s.active)).enumerate().for_each(
                |(b, (d_logits, n))| {
                    let first = b * BLOCK;
                    let mut group = cu.partition_point(|&c| c as usize <= first);
                    let rows = d_logits.chunks_mut(self.ld_d).enumerate().take((s.tokens - first).min(BLOCK));
                    for (i, d_logits) in rows {
                        let t = first + i;
                        while group < cu.len() && cu[group] as usize <= t {
                            group += 1;
                        }
                        if !self.acc {
                            d_logits[..s.experts].fill(T::ZERO);
                        }
                        if mask.is_none_or(|mask| mask[t] == 0) {
                            let d_n = &d_n[(group - 1) * s.active..][..s.active];
                            self.token(&logits[t * s.ld..][..s.active], d_n, d_z, n, &mut d_logits[..s.active]);
                        }
                    }
                },
            );
        });
    }

    /// dloss/dn_te of every group's tokens into `d_n` [G, active]; returns dloss/d(logsumexp^2) of a token.
    fn gradients_of_sums<T: Real>(&self, stats: &[T], upstream: f64, d_n: &mut [T]) -> T {
        let s = &self.shape;
        let (tokens, groups) = totals(s, stats);
        if tokens == 0.0 {
            d_n.fill(T::ZERO);
            return T::ZERO;
        }
        let factor = upstream * s.active as f64 / s.k as f64;
        let rows = || stats.chunks_exact(s.width()).take(s.groups());
        for e in 0..s.active {
            let all: f64 = rows().map(|g| g[s.experts + e].to_f64()).sum();
            let balance = self.coefficients[0] * factor / (tokens * tokens) * all;
            for (d, g) in d_n.chunks_exact_mut(s.active).zip(rows()) {
                let t = length(s, g, (tokens, groups));
                let sequence = self.coefficients[1] * factor / (groups * t * t) * g[s.experts + e].to_f64();
                d[e] = T::of(balance + sequence);
            }
        }
        T::of(upstream * self.coefficients[2] / tokens)
    }

    fn token<T: Real>(&self, logits: &[T], d_n: &[T], d_z: T, n: &mut [T], d_logits: &mut [T]) {
        let inverse = self.shape.normalised(logits, n);
        let mean: T = n.iter().zip(d_n).map(|(&n, &d)| n * d).sum();
        if self.shape.score == Score::Sigmoid {
            // n = s * inverse, so ds/dl = s (1 - s) with s = n / inverse cancels one factor.
            for ((d, &n), &d_n) in d_logits.iter_mut().zip(&*n).zip(d_n) {
                *d += (d_n - mean) * n * (T::ONE - n / inverse);
            }
        } else {
            for ((d, &n), &d_n) in d_logits.iter_mut().zip(&*n).zip(d_n) {
                *d += (d_n - mean) * n;
            }
        }
        if d_z != T::ZERO {
            let (most, sum) = softmax_terms(logits);
            let factor = d_z * T::of(2.0) * (most + sum.ln()) / sum;
            par::simd(
                #[inline(always)]
                || d_logits.iter_mut().zip(logits).for_each(|(d, &l)| *d += factor * (l - most).vexp()),
            );
        }
    }
}
