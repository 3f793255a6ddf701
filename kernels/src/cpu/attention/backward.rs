//! Backward of attention; formulas in the parent module.

use super::tile::{Left, TILE, product, transpose};
use super::{AttentionBackward, AttentionShape, sequences_in};
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
            for (i, row) in delta.chunks_exact_mut(s.q_heads).enumerate() {
                let t = block * TILE + i;
                for (h, y) in row.iter_mut().enumerate() {
                    let left = &o[t * s.ld_o + h * s.head_dim..][..s.head_dim];
                    let right = &d_o[t * self.ld_do + h * s.head_dim..][..s.head_dim];
                    *y = left.iter().zip(right).map(|(&a, &b)| a * b).sum();
                }
            }
        });
        let operands = Operands { shape: s, ld_do: self.ld_do, qkv, lse, d_o, delta };
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
        out.p[..q.len() * TILE].fill(T::ZERO);
        out.ds[..q.len() * TILE].fill(T::ZERO);
        let queries = Left { data: &self.qkv[q.start * s.ld + s.q_off + h * d..], row: s.ld, col: 1 };
        product(size, queries, keys, TILE, &mut out.p, TILE);
        let upstream = Left { data: &self.d_o[q.start * self.ld_do + h * d..], row: self.ld_do, col: 1 };
        product(size, upstream, values, TILE, &mut out.ds, TILE);
        let scale = T::of(s.scale);
        let rows = out.p.chunks_exact_mut(TILE).zip(out.ds.chunks_exact_mut(TILE));
        for (i, (p, ds)) in q.clone().zip(rows) {
            let visible = if s.causal { (i + 1).saturating_sub(k.start).min(k.len()) } else { k.len() };
            p[visible..].fill(T::ZERO);
            ds[visible..].fill(T::ZERO);
            let (lse, delta) = (self.lse[i * s.q_heads + h], self.delta[i * s.q_heads + h]);
            let (p, ds) = (&mut p[..visible], &mut ds[..visible]);
            crate::par::simd(
                #[inline(always)]
                || {
                    for (p, ds) in p.iter_mut().zip(ds) {
                        *p = (*p * scale - lse).vexp();
                        *ds = *p * (*ds - delta) * scale;
                    }
                },
            );
        }
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
                let ds = Left { data: &score.ds, row: TILE, col: 1 };
                let rows = &self.qkv[key * s.ld + s.k_off + group * d..];
                product((own.len(), d, k.len()), ds, rows, s.ld, &mut dqkv[s.q_off + h * d..], ld);
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
        let (s, d) = (self.shape, self.shape.head_dim);
        let mut score = Self::tiles();
        self.load(group, own.clone(), tiles);
        let mut query = queries.start;
        while query < queries.end {
            let q = query..(query + TILE).min(queries.end);
            for h in (group..s.q_heads).step_by(s.kv_heads) {
                self.scores(h, q.clone(), own.clone(), tiles, &mut score);
                let size = (own.len(), d, q.len());
                let ds = Left { data: &score.ds, row: 1, col: TILE };
                let rows = &self.qkv[query * s.ld + s.q_off + h * d..];
                product(size, ds, rows, s.ld, &mut dqkv[s.k_off + group * d..], ld);
                let p = Left { data: &score.p, row: 1, col: TILE };
                let rows = &self.d_o[query * self.ld_do + h * d..];
                product(size, p, rows, self.ld_do, &mut dqkv[s.v_off + group * d..], ld);
            }
            query = q.end;
        }
    }
}
