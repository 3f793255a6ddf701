//! Backward of attention; formulas in the parent module.

use super::tile::{Left, TILE, parts, product, transpose};
use super::{AttentionBackward, AttentionShape, sequences_in};
use crate::cpu::vector::{Lanes, WithLanes, each_vector};
use crate::kernel::{Args, Cost};
use crate::real::Real;
use rayon::prelude::*;
use std::ops::Range;

impl AttentionBackward {
    pub(super) fn cost(&self) -> Cost {
        let s = &self.shape;
        let columns = 4 * s.q_heads * s.head_dim + 4 * s.kv_heads * s.head_dim;
        Cost::new(7.0 * s.score_flops(), (s.tokens * columns) as f64)
    }

    /// delta [T, Hq], and transposed tiles of keys and values for every block of tokens.
    pub(super) fn workspace(&self) -> usize {
        let s = &self.shape;
        s.tokens * s.q_heads + s.blocks() * 2 * TILE * s.head_dim
    }

    pub(super) fn run<T: Real>(&self, args: Args<'_, T>) {
        let s = &self.shape;
        let ([qkv, o, lse, d_o], [dqkv], [cu]) = (args.ins, args.outs, args.ints) else {
            unreachable!("attention_backward takes qkv, o, lse, do, cu_seqlens and gives dqkv")
        };
        if s.tokens == 0 {
            return;
        }
        let (delta, tiles) = args.work.split_at_mut(s.tokens * s.q_heads);
        delta.par_chunks_mut(TILE * s.q_heads).enumerate().for_each(|(block, delta)| {
            T::vectors(Delta { kernel: self, first: block * TILE, o, d_o, delta });
        });
        let operands = Operands { shape: s, ld_do: self.ld_do, qkv, lse, d_o, delta };
        if self.by_sequence(cu) {
            let run = Sequences { kernel: self, operands: &operands, cu };
            return run.share(0..cu.len() - 1, dqkv, tiles);
        }
        dqkv.par_chunks_mut(TILE * self.ld_dqkv).zip(tiles.par_chunks_mut(2 * TILE * s.head_dim)).enumerate().for_each(
            |(block, (dqkv, tiles))| {
                let rows = block * TILE..((block + 1) * TILE).min(s.tokens);
                if !self.acc {
                    self.clear(rows.len(), dqkv);
                }
                sequences_in(cu, rows.clone(), |start, end, lo, hi| {
                    let d = &mut dqkv[(lo - rows.start) * self.ld_dqkv..];
                    for group in 0..s.kv_heads {
                        let keys = start..if s.causal { hi } else { end };
                        operands.as_queries(group, lo..hi, keys, d, self.ld_dqkv, tiles);
                        let queries = if s.causal { lo } else { start }..end;
                        operands.as_keys(group, lo..hi, queries, d, self.ld_dqkv, tiles);
                    }
                });
            },
        );
    }

    /// Whether sequences are many and even enough to be shared out whole.
    fn by_sequence(&self, cu: &[i32]) -> bool {
        let work = |pair: &[i32]| (pair[1] - pair[0]) as f64 * (pair[1] - pair[0]) as f64;
        let (total, most) = cu.windows(2).map(work).fold((0.0, 0.0f64), |(t, m), w| (t + w, m.max(w)));
        4.0 * most <= total
    }

    fn clear<T: Real>(&self, rows: usize, dqkv: &mut [T]) {
        let s = &self.shape;
        for i in 0..rows {
            let row = &mut dqkv[i * self.ld_dqkv..];
            row[s.q_off..][..s.q_heads * s.head_dim].fill(T::ZERO);
            row[s.k_off..][..s.kv_heads * s.head_dim].fill(T::ZERO);
            row[s.v_off..][..s.kv_heads * s.head_dim].fill(T::ZERO);
        }
    }
}

struct Operands<'a, T> {
    shape: &'a AttentionShape,
    ld_do: usize,
    qkv: &'a [T],
    lse: &'a [T],
    d_o: &'a [T],
    delta: &'a [T],
}

/// p and ds of a tile of queries and keys, rows of [`TILE`] elements.
struct Tiles<T> {
    p: [T; TILE * TILE],
    ds: [T; TILE * TILE],
}

impl<T: Real> Operands<'_, T> {
    /// p and scale * ds of head `h`, queries `q`, keys `k`, whose transposed keys and values are in `tiles`.
    fn scores(&self, h: usize, q: Range<usize>, k: Range<usize>, tiles: &[T], out: &mut Tiles<T>) {
        let (s, d) = (self.shape, self.shape.head_dim);
        let (keys, values) = tiles.split_at(TILE * d);
        let size = (q.len(), k.len(), d);
        let [part, ..] = parts(s.causal, q.start, k.start);
        let queries = Left::rows(&self.qkv[q.start * s.ld + s.q_off + h * d..], s.ld);
        product(size, part, queries, keys, TILE, false, &mut out.p, TILE);
        let upstream = Left::rows(&self.d_o[q.start * self.ld_do + h * d..], self.ld_do);
        product(size, part, upstream, values, TILE, false, &mut out.ds, TILE);
        T::vectors(Weights { operands: self, h, q, k, tiles: out });
    }

    fn load(&self, group: usize, k: Range<usize>, tiles: &mut [T]) {
        let (s, d) = (self.shape, self.shape.head_dim);
        let (keys, values) = tiles.split_at_mut(TILE * d);
        transpose(&self.qkv[k.start * s.ld + s.k_off + group * d..], s.ld, k.len(), d, keys);
        transpose(&self.qkv[k.start * s.ld + s.v_off + group * d..], s.ld, k.len(), d, values);
    }

    fn tiles() -> Tiles<T> {
        Tiles { p: [T::ZERO; TILE * TILE], ds: [T::ZERO; TILE * TILE] }
    }

    /// dq += scale ds k for the queries `own`, to whose first row `dqkv` begins.
    fn as_queries(
        &self,
        group: usize,
        own: Range<usize>,
        keys: Range<usize>,
        dqkv: &mut [T],
        ld: usize,
        tiles: &mut [T],
    ) {
        let (s, d) = (self.shape, self.shape.head_dim);
        let mut score = Self::tiles();
        let mut key = keys.start;
        while key < keys.end {
            let k = key..(key + TILE).min(keys.end);
            self.load(group, k.clone(), tiles);
            for h in (group..s.q_heads).step_by(s.kv_heads) {
                self.scores(h, own.clone(), k.clone(), tiles, &mut score);
                self.add_dq(h, own.clone(), k.clone(), &score, &mut dqkv[s.q_off + h * d..], ld);
            }
            key = k.end;
        }
    }

    /// dk += scale ds^T q and dv += p^T do for the keys `own`, to whose first row `dqkv` begins.
    fn as_keys(
        &self,
        group: usize,
        own: Range<usize>,
        queries: Range<usize>,
        dqkv: &mut [T],
        ld: usize,
        tiles: &mut [T],
    ) {
        let s = self.shape;
        let mut score = Self::tiles();
        self.load(group, own.clone(), tiles);
        let mut query = queries.start;
        while query < queries.end {
            let q = query..(query + TILE).min(queries.end);
            for h in (group..s.q_heads).step_by(s.kv_heads) {
                self.scores(h, q.clone(), own.clone(), tiles, &mut score);
                self.add_dkv(h, q.clone(), own.clone(), &score, dqkv, ld);
            }
            query = q.end;
        }
    }

    /// dq += scale ds k for head `h`; `dq` begins at the first query.
    fn add_dq(&self, h: usize, q: Range<usize>, k: Range<usize>, score: &Tiles<T>, dq: &mut [T], ld: usize) {
        let (s, d) = (self.shape, self.shape.head_dim);
        let [_, part, _] = parts(s.causal, q.start, k.start);
        let rows = &self.qkv[k.start * s.ld + s.k_off + h % s.kv_heads * d..];
        product((q.len(), d, k.len()), part, Left::rows(&score.ds, TILE), rows, s.ld, true, dq, ld);
    }

    /// dk += scale ds^T q and dv += p^T do for query head `h`; `dqkv` begins at the first key's row.
    fn add_dkv(&self, h: usize, q: Range<usize>, k: Range<usize>, score: &Tiles<T>, dqkv: &mut [T], ld: usize) {
        let (s, d) = (self.shape, self.shape.head_dim);
        let [_, _, part] = parts(s.causal, q.start, k.start);
        let (size, group) = ((k.len(), d, q.len()), h % s.kv_heads);
        let rows = &self.qkv[q.start * s.ld + s.q_off + h * d..];
        product(size, part, Left::cols(&score.ds, TILE), rows, s.ld, true, &mut dqkv[s.k_off + group * d..], ld);
        let rows = &self.d_o[q.start * self.ld_do + h * d..];
        product(size, part, Left::cols(&score.p, TILE), rows, self.ld_do, true, &mut dqkv[s.v_off + group * d..], ld);
    }

    /// All gradients of one sequence, to whose first row `dqkv` begins.
    fn sequence(&self, tokens: Range<usize>, dqkv: &mut [T], ld: usize, tiles: &mut [T]) {
        let (s, d) = (self.shape, self.shape.head_dim);
        let mut score = Self::tiles();
        for group in 0..s.kv_heads {
            for key in tokens.clone().step_by(TILE) {
                let k = key..(key + TILE).min(tokens.end);
                self.load(group, k.clone(), tiles);
                for query in (if s.causal { key } else { tokens.start }..tokens.end).step_by(TILE) {
                    let q = query..(query + TILE).min(tokens.end);
                    for h in (group..s.q_heads).step_by(s.kv_heads) {
                        self.scores(h, q.clone(), k.clone(), tiles, &mut score);
                        let dq = &mut dqkv[(query - tokens.start) * ld + s.q_off + h * d..];
                        self.add_dq(h, q.clone(), k.clone(), &score, dq, ld);
                        self.add_dkv(h, q.clone(), k.clone(), &score, &mut dqkv[(key - tokens.start) * ld..], ld);
                    }
                }
            }
        }
    }
}

/// Sequences shared out whole.
struct Sequences<'a, T> {
    kernel: &'a AttentionBackward,
    operands: &'a Operands<'a, T>,
    cu: &'a [i32],
}

impl<T: Real> Sequences<'_, T> {
    /// Gradients of the sequences `range`, to whose first row `dqkv` and to whose first block of tokens `tiles` begin.
    fn share(&self, range: Range<usize>, dqkv: &mut [T], tiles: &mut [T]) {
        let token = |s: usize| self.cu[s] as usize;
        let (start, end) = (token(range.start), token(range.end));
        let ld = self.kernel.ld_dqkv;
        // Halves of at least a tile: each then has scratch of its own.
        let middle =
            range.start + self.cu[range.clone()].partition_point(|&t| (t as usize) < start + (end - start) / 2);
        if middle > range.start && middle < range.end && token(middle) >= start + TILE && end >= token(middle) + TILE {
            let (left, right) = dqkv.split_at_mut((token(middle) - start) * ld);
            let blocks = token(middle) / TILE - start / TILE;
            let (near, far) = tiles.split_at_mut(blocks * 2 * TILE * self.operands.shape.head_dim);
            let (first, second) = (range.start..middle, middle..range.end);
            rayon::join(|| self.share(first, left, near), || self.share(second, right, far));
            return;
        }
        for s in range {
            let (from, to) = (token(s), token(s + 1));
            if from < to {
                let dqkv = &mut dqkv[(from - start) * ld..];
                if !self.kernel.acc {
                    self.kernel.clear(to - from, dqkv);
                }
                self.operands.sequence(from..to, dqkv, ld, tiles);
            }
        }
    }
}

/// delta of the rows from `first`.
struct Delta<'a, T> {
    kernel: &'a AttentionBackward,
    first: usize,
    o: &'a [T],
    d_o: &'a [T],
    delta: &'a mut [T],
}

impl<T: Real> WithLanes<T> for Delta<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes<T = T>>(self, l: L) {
        let s = &self.kernel.shape;
        for (i, row) in self.delta.chunks_exact_mut(s.q_heads).enumerate() {
            let t = self.first + i;
            for (h, y) in row.iter_mut().enumerate() {
                let left = &self.o[t * s.ld_o + h * s.head_dim..][..s.head_dim];
                let right = &self.d_o[t * self.kernel.ld_do + h * s.head_dim..][..s.head_dim];
                let mut sum = l.zero();
                each_vector!(L::N, 0..s.head_dim, |at, end| {
                    sum = l.mul_add(l.read::<FULL>(left, at, end), l.read::<FULL>(right, at, end), sum);
                });
                *y = l.sum(sum);
            }
        }
    }
}

/// From products q k and do v to p and scale * ds, zero where the key is hidden.
struct Weights<'a, 'b, T> {
    operands: &'a Operands<'b, T>,
    h: usize,
    q: Range<usize>,
    k: Range<usize>,
    tiles: &'a mut Tiles<T>,
}

impl<T: Real> WithLanes<T> for Weights<'_, '_, T> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes<T = T>>(self, l: L) {
        let (operands, s) = (self.operands, self.operands.shape);
        let scale = l.splat(T::of(s.scale));
        let rows = self.tiles.p.chunks_exact_mut(TILE).zip(self.tiles.ds.chunks_exact_mut(TILE));
        for (i, (p, ds)) in self.q.zip(rows) {
            let keys = self.k.len();
            let visible = if s.causal { (i + 1).saturating_sub(self.k.start).min(keys) } else { keys };
            let lse = l.splat(operands.lse[i * s.q_heads + self.h]);
            let delta = l.splat(operands.delta[i * s.q_heads + self.h]);
            let used = visible.next_multiple_of(L::N);
            for (p, ds) in p[..used].chunks_exact_mut(L::N).zip(ds[..used].chunks_exact_mut(L::N)) {
                let weight = l.exp(l.sub(l.mul(l.load(p), scale), lse));
                l.store(weight, p);
                l.store(l.mul(l.mul(weight, scale), l.sub(l.load(ds), delta)), ds);
            }
            p[visible..].fill(T::ZERO);
            ds[visible..].fill(T::ZERO);
        }
    }
}
