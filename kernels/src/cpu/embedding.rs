//! Token embedding over a vocabulary that is spread cyclically over ranks.
//!
//! Rank `part` of `parts` stores token id's row at id / parts when id % parts == part; the others give zeros, so that
//! the sum over ranks is the embedding. An id outside 0..vocab gives zeros and no gradient: reporting it is the data
//! layer's task. `cols` names the stored columns that are used (a slice of the hidden size).

use crate::blocks::Blocks;
use crate::cpu::elementwise::strided_rows;
use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;

/// Where a rank keeps the row of a token.
#[derive(Clone, Copy, Debug)]
struct Shard {
    vocab: usize,
    part: usize,
    parts: usize,
}

impl Shard {
    /// Stored row of `id` on this rank.
    #[inline(always)]
    fn row(&self, id: i32) -> Option<usize> {
        let id = usize::try_from(id).ok()?;
        (id < self.vocab && id % self.parts == self.part).then_some(id / self.parts)
    }

    fn rows(&self) -> usize {
        (self.vocab + self.parts - 1 - self.part) / self.parts
    }
}

/// y[t, :] = W[row(ids[t]), cols], or zeros.
///
/// ints: ids [T]; ins: w [stored rows, ld_w]; outs: y [T, C].
#[derive(Clone, Debug)]
pub struct Embedding {
    pub tokens: usize,
    /// Number of token ids over all ranks.
    pub vocab: usize,
    pub part: usize,
    pub parts: usize,
    pub cols: Blocks,
    pub ld_w: usize,
    pub ld_y: usize,
}

impl Embedding {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (ids, w) = (args.ints[0], args.ins[0]);
        let shard = Shard { vocab: self.vocab, part: self.part, parts: self.parts };
        strided_rows(args.outs[0], self.tokens, self.cols.len(), self.ld_y, |t, y| match shard.row(ids[t]) {
            Some(row) => {
                for (start, at, len) in self.cols.iter() {
                    y[at..at + len].copy_from_slice(&w[row * self.ld_w + start..][..len]);
                }
            }
            None => y.fill(T::ZERO),
        });
    }

    fn cost(&self) -> Cost {
        Cost::new(0.0, 2.0 * (self.tokens * self.cols.len()) as f64)
    }
}

/// dW[row(ids[t]), cols] += dy[t, :], tokens in order for every row.
///
/// ints: ids [T]; ins: dy [T, C]; outs: dw [stored rows, ld_w].
#[derive(Clone, Debug)]
pub struct EmbeddingBackward {
    pub tokens: usize,
    pub vocab: usize,
    pub part: usize,
    pub parts: usize,
    pub cols: Blocks,
    pub ld_dy: usize,
    pub ld_w: usize,
}

impl EmbeddingBackward {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (ids, dy) = (&args.ints[0][..self.tokens], args.ins[0]);
        let shard = Shard { vocab: self.vocab, part: self.part, parts: self.parts };
        let dw = &mut *args.outs[0];
        // Every task owns a range of stored rows and looks through all ids for them: no row is shared. Frequent tokens
        // tend to have neighbouring small ids, so the ranges are many.
        let block = shard.rows().div_ceil(4 * par::MAX_PARTS).max(1);
        par::rows_mut(dw, self.ld_w, block, |first, dw| {
            par::simd!(|| {
                for (t, &id) in ids.iter().enumerate() {
                    let Some(row) = shard.row(id) else { continue };
                    if row < first || row >= first + block {
                        continue;
                    }
                    for (start, at, len) in self.cols.iter() {
                        let dw = &mut dw[(row - first) * self.ld_w + start..][..len];
                        let dy = &dy[t * self.ld_dy + at..][..len];
                        dw.iter_mut().zip(dy).for_each(|(dw, &dy)| *dw += dy);
                    }
                }
            });
        });
    }

    fn cost(&self) -> Cost {
        let n = (self.tokens * self.cols.len()) as f64;
        Cost::new(n, 3.0 * n)
    }
}

crate::kernels! {
    Embedding => "embedding";
    EmbeddingBackward => "embedding_backward";
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, normal};

    const VOCAB: usize = 11;
    const IDS: [i32; 8] = [3, 10, 0, 3, -1, 11, 7, i32::MIN];

    /// The stored part of a full [VOCAB, 6] table.
    fn shard(w: &[f64], part: usize, parts: usize) -> Vec<f64> {
        w.chunks(6).skip(part).step_by(parts).flatten().copied().collect()
    }

    fn forward(part: usize, parts: usize) -> Embedding {
        Embedding { tokens: 8, vocab: VOCAB, part, parts, cols: Blocks::new([(0, 2), (4, 1)]), ld_w: 6, ld_y: 5 }
    }

    #[test]
    fn ranks_add_up_to_the_gathered_rows() {
        let w = normal(1, VOCAB * 6);
        for parts in [1, 2, 3] {
            let mut sum = vec![0.0; 40];
            for part in 0..parts {
                let mut call = Call {
                    ins: vec![shard(&w, part, parts)],
                    ints: vec![IDS.to_vec()],
                    outs: vec![vec![9.0; 40]],
                    ..Default::default()
                };
                call.run(&forward(part, parts));
                assert!((0..8).all(|t| call.outs[0][t * 5 + 3..t * 5 + 5] == [9.0, 9.0]));
                sum.iter_mut().zip(&call.outs[0]).for_each(|(sum, y)| *sum += y);
            }
            for (t, &id) in IDS.iter().enumerate() {
                for (c, col) in [0, 1, 4].into_iter().enumerate() {
                    let want = if (0..11).contains(&id) { w[id as usize * 6 + col] } else { 0.0 };
                    assert_eq!(sum[t * 5 + c], want);
                }
            }
        }
    }

    #[test]
    fn gradients_land_in_the_rows_of_their_tokens() {
        let dy = normal(2, 40);
        for parts in [1, 2, 3] {
            for part in 0..parts {
                let old = shard(&normal(3, VOCAB * 6), part, parts);
                let mut call = Call {
                    ins: vec![dy.clone()],
                    ints: vec![IDS.to_vec()],
                    outs: vec![old.clone()],
                    ..Default::default()
                };
                let Embedding { tokens, vocab, cols, ld_w, ld_y, .. } = forward(part, parts);
                call.run(&EmbeddingBackward { tokens, vocab, part, parts, cols, ld_dy: ld_y, ld_w });
                for (i, (&got, &old)) in call.outs[0].iter().zip(&old).enumerate() {
                    let id = (i / 6 * parts + part) as i32;
                    let at = [0, 1, 4].iter().position(|&c| c == i % 6);
                    let tokens = (0..8).filter(|&t| IDS[t] == id);
                    let want = old + at.map_or(0.0, |at| tokens.map(|t| dy[t * 5 + at]).sum());
                    assert!((got - want).abs() < 1e-14, "row {} column {}", i / 6, i % 6);
                }
            }
        }
    }

    #[test]
    fn a_large_vocabulary_in_many_ranges() {
        let (tokens, vocab) = (500, 3000);
        let ids: Vec<i32> = (0..tokens as i32).map(|t| t * t % 2999).collect();
        let kernel = EmbeddingBackward { tokens, vocab, part: 0, parts: 1, cols: Blocks::full(3), ld_dy: 3, ld_w: 3 };
        let dy = normal(1, tokens * 3);
        let mut call = Call {
            ins: vec![dy.clone()],
            ints: vec![ids.clone()],
            outs: vec![vec![0.0; vocab * 3]],
            ..Default::default()
        };
        call.run(&kernel);
        let mut want = vec![0.0; vocab * 3];
        for (t, &id) in ids.iter().enumerate() {
            (0..3).for_each(|c| want[id as usize * 3 + c] += dy[t * 3 + c]);
        }
        assert_eq!(call.outs[0], want);
    }
}
