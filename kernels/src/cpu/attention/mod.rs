//! Scaled dot product attention with grouped key/value heads, causal or bidirectional, over packed sequences.
//!
//! q, k and v are column segments of one operand `qkv [T, ld]`: q `Hq*D` columns from `q_off`, k and v `Hkv*D` columns
//! from `k_off` and `v_off`. Query head i uses key/value head i % Hkv (heads are stored rank-in-group-major).
//! o_i = sum_j p_ij v_j with p_ij = exp(scale q_i k_j - lse_i), over the keys j of the token's own sequence, and
//! j <= i when causal. The softmax is computed online in tiles (Milakov and Gimelshein 2018; Dao et al. 2022), so
//! nothing of size T x T is kept: the forward saves lse [T, Hq], the backward computes p again:
//! dv_j = sum_i p_ij do_i, ds_ij = p_ij (do_i v_j - delta_i) with delta_i = do_i o_i, dq = scale ds k, dk = scale ds^T q.
//!
//! Forward is parallel over blocks of 64 tokens. Backward is parallel over sequences where none of them has more than a
//! quarter of the work. Otherwise it is over blocks too, whose tasks write all gradients of their own rows: dq as the
//! queries, then dk and dv as the keys. The scores are then computed twice, no two tasks share an output, and nothing
//! needs an order.

mod backward;
#[cfg(test)]
mod tests;
mod tile;

use crate::cpu::vector::{Lanes, WithLanes, each_vector};
use crate::kernel::{Args, Cost};
use crate::real::Real;
use rayon::prelude::*;
use tile::{Left, MAX_HEAD_DIM, TILE, parts, product, transpose};

/// Sizes and layout shared by forward and backward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// T.
    pub tokens: usize,
    /// Tokens of the longest sequence there may be; only the cost depends on it.
    pub longest: usize,
    /// Hq; a multiple of `kv_heads`.
    pub q_heads: usize,
    /// Hkv.
    pub kv_heads: usize,
    /// D, 1 to 256.
    pub head_dim: usize,
    /// First columns of the q, k and v segments.
    pub q_off: usize,
    pub k_off: usize,
    pub v_off: usize,
    /// Elements between rows of qkv and of o.
    pub ld: usize,
    pub ld_o: usize,
    pub causal: bool,
    /// Multiplies q k; usually 1/sqrt(D).
    pub scale: f64,
}

/// ins: qkv [T, ld]; ints: cu_seqlens; outs: o [T, Hq*D] (rows `ld_o` apart), lse [T, Hq].
#[derive(Clone, Debug)]
pub struct AttentionForward {
    pub shape: AttentionShape,
}

/// ins: qkv [T, ld], o (rows `ld_o` apart), lse [T, Hq], do (rows `ld_do` apart); ints: cu_seqlens;
/// outs: dqkv: the three segments, at the offsets of qkv, rows `ld_dqkv` apart.
#[derive(Clone, Debug)]
pub struct AttentionBackward {
    pub shape: AttentionShape,
    pub ld_do: usize,
    pub ld_dqkv: usize,
    /// dqkv += instead of =.
    pub acc: bool,
}

crate::kernels! {
    AttentionForward => "attention", workspace;
    AttentionBackward => "attention_backward", workspace;
}

impl AttentionShape {
    /// Checks the sizes a kernel relies on; a message names the one that is wrong.
    pub fn check(&self) -> Result<(), String> {
        if self.head_dim == 0 || self.head_dim > MAX_HEAD_DIM {
            return Err(format!("attention needs a head dimension of 1 to {MAX_HEAD_DIM}, got {}", self.head_dim));
        }
        if self.kv_heads == 0 || !self.q_heads.is_multiple_of(self.kv_heads) {
            return Err(format!(
                "attention needs query heads ({}) in multiples of key/value heads ({})",
                self.q_heads, self.kv_heads
            ));
        }
        Ok(())
    }

    /// Products of the score matrices of all heads, counting every key of a sequence as visible or half of them when causal,
    /// and every sequence as long as it may be.
    fn score_flops(&self) -> f64 {
        let pairs = (self.tokens * self.longest) as f64 * if self.causal { 0.5 } else { 1.0 };
        2.0 * pairs * (self.q_heads * self.head_dim) as f64
    }

    fn blocks(&self) -> usize {
        self.tokens.div_ceil(TILE)
    }
}

/// Calls `f(start, end, lo, hi)` for each sequence start..end that meets rows `rows`: lo..hi are its rows in there.
fn sequences_in(cu_seqlens: &[i32], rows: std::ops::Range<usize>, mut f: impl FnMut(usize, usize, usize, usize)) {
    let first = cu_seqlens.partition_point(|&s| s as usize <= rows.start).saturating_sub(1);
    for pair in cu_seqlens[first..].windows(2) {
        let (start, end) = (pair[0] as usize, pair[1] as usize);
        if start >= rows.end {
            break;
        }
        let (lo, hi) = (start.max(rows.start), end.min(rows.end));
        if lo < hi {
            f(start, end, lo, hi);
        }
    }
}

impl AttentionForward {
    fn cost(&self) -> Cost {
        let s = &self.shape;
        let columns = 2 * s.q_heads * s.head_dim + 2 * s.kv_heads * s.head_dim;
        Cost::new(2.0 * s.score_flops(), (s.tokens * columns) as f64)
    }

    /// A transposed key tile for every block of tokens, and the softmax denominators.
    fn workspace(&self) -> usize {
        let s = &self.shape;
        s.blocks() * TILE * (s.head_dim + s.q_heads)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let s = &self.shape;
        debug_assert_eq!(s.check(), Ok(()));
        let ([qkv], [o, lse], [cu]) = (args.ins, args.outs, args.ints) else {
            unreachable!("attention takes qkv, cu_seqlens and gives o, lse")
        };
        if s.tokens == 0 {
            return;
        }
        let lse = &mut lse[..s.tokens * s.q_heads];
        o.par_chunks_mut(TILE * s.ld_o)
            .zip(lse.par_chunks_mut(TILE * s.q_heads))
            .zip(args.work.par_chunks_mut(TILE * (s.head_dim + s.q_heads)))
            .enumerate()
            .for_each(|(block, ((o, lse), work))| {
                let row0 = block * TILE;
                let (keys, sums) = work.split_at_mut(TILE * s.head_dim);
                sequences_in(cu, row0..(row0 + TILE).min(s.tokens), |start, end, lo, hi| {
                    let last = if s.causal { hi } else { end };
                    for group in 0..s.kv_heads {
                        let tile = QueryTile { shape: s, qkv, first: lo, rows: hi - lo, group };
                        let at = lo - row0;
                        tile.forward(start..last, &mut o[at * s.ld_o..], &mut lse[at * s.q_heads..], keys, sums);
                    }
                });
            });
    }
}

/// Rows `first..first + rows` of one sequence as queries of one key/value group.
struct QueryTile<'a, T> {
    shape: &'a AttentionShape,
    qkv: &'a [T],
    first: usize,
    rows: usize,
    group: usize,
}

impl<T: Real> QueryTile<'_, T> {
    /// o and lse of the tile's rows (slices begin at its first row) over the keys `range`.
    ///
    /// While it runs, o holds the unnormalised sum, lse the running maximum and `sums` the running denominator.
    fn forward(&self, range: std::ops::Range<usize>, o: &mut [T], lse: &mut [T], keys: &mut [T], sums: &mut [T]) {
        let (s, d) = (self.shape, self.shape.head_dim);
        let heads = || (self.group..s.q_heads).step_by(s.kv_heads);
        for h in heads() {
            for i in 0..self.rows {
                o[i * s.ld_o + h * d..][..d].fill(T::ZERO);
                lse[i * s.q_heads + h] = T::NEG_INFINITY;
                sums[i * s.q_heads + h] = T::ZERO;
            }
        }
        let mut scores = [T::ZERO; TILE * TILE];
        let mut key = range.start;
        while key < range.end {
            let n = TILE.min(range.end - key);
            transpose(&self.qkv[key * s.ld + s.k_off + self.group * d..], s.ld, n, d, keys);
            let [scored, weighted, _] = parts(s.causal, self.first, key);
            for h in heads() {
                let queries = Left::rows(&self.qkv[self.first * s.ld + s.q_off + h * d..], s.ld);
                product((self.rows, n, d), scored, queries, keys, TILE, false, &mut scores, TILE);
                T::vectors(Softmax { tile: self, h, key, n, scores: &mut scores, o, lse, sums });
                let values = &self.qkv[key * s.ld + s.v_off + self.group * d..];
                let weights = Left::rows(&scores, TILE);
                product((self.rows, d, n), weighted, weights, values, s.ld, true, &mut o[h * d..], s.ld_o);
            }
            key += n;
        }
        for h in heads() {
            for i in 0..self.rows {
                let at = i * s.q_heads + h;
                let inverse = T::ONE / sums[at];
                o[i * s.ld_o + h * d..][..d].iter_mut().for_each(|x| *x *= inverse);
                lse[at] += sums[at].ln();
            }
        }
    }
}

/// Turns the raw scores of head `h` and keys `key..key + n` into exp(scale x - maximum), hidden ones into zero; updates
/// each row's running maximum and sum, and multiplies what was summed under an older maximum.
struct Softmax<'a, T> {
    tile: &'a QueryTile<'a, T>,
    h: usize,
    key: usize,
    n: usize,
    scores: &'a mut [T],
    o: &'a mut [T],
    lse: &'a mut [T],
    sums: &'a mut [T],
}

impl<T: Real> WithLanes<T> for Softmax<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes<T = T>>(self, l: L) {
        let (tile, s) = (self.tile, self.tile.shape);
        let scale = l.splat(T::of(s.scale));
        for (i, row) in self.scores.chunks_exact_mut(TILE).enumerate().take(tile.rows) {
            let visible = if s.causal { (tile.first + i + 1).saturating_sub(self.key).min(self.n) } else { self.n };
            // Whole vectors, whose last elements count nothing.
            let used = visible.next_multiple_of(L::N);
            row[visible..used].fill(T::NEG_INFINITY);
            row[used..].fill(T::ZERO);
            if visible == 0 {
                continue;
            }
            let at = i * s.q_heads + self.h;
            let (maximum, sum) = (&mut self.lse[at], &mut self.sums[at]);
            let mut most = l.splat(*maximum);
            for x in row[..used].chunks_exact_mut(L::N) {
                let scaled = l.mul(l.load(x), scale);
                most = l.max(most, scaled);
                l.store(scaled, x);
            }
            let largest = l.largest(most);
            let m = l.splat(largest);
            let mut total = l.zero();
            for x in row[..used].chunks_exact_mut(L::N) {
                let weight = l.exp(l.sub(l.load(x), m));
                total = l.add(total, weight);
                l.store(weight, x);
            }
            if largest != *maximum {
                // The first keys find zeros.
                let rescale = l.exp(l.sub(l.splat(*maximum), m));
                let o = &mut self.o[i * s.ld_o + self.h * s.head_dim..][..s.head_dim];
                each_vector!(L::N, 0..s.head_dim, |at, end| {
                    l.write::<FULL>(l.mul(l.read::<FULL>(o, at, end), rescale), o, at, end);
                });
                *sum *= l.largest(rescale);
                *maximum = largest;
            }
            *sum += l.sum(total);
        }
    }
}
