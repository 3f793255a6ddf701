//! Cross entropy fused with the output projection: logits exist for one tile of tokens and vocabulary at a time.

use super::{CE_STATS, VocabShard, smoothing_weight, tile};
use crate::cpu::gemm_call::{Mat, matmul};
use crate::cpu::softmax::{exp, max_and_sum_exp, span, sum_map};
use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;

/// Statistics of the logits hidden @ weight^T over the vocabulary rows of one part.
///
/// ins: hidden [tokens, hidden], weight [local, hidden] (the leading columns of rows `ld_w` apart);
/// ints: labels [tokens];
/// outs: stats [tokens, 4] = (max m, sum of exp(l - m), the label's logit if it lives here else 0, sum of l).
/// A part without valid rows gives (-inf, 0, 0, 0).
#[derive(Clone, Copy, Debug)]
pub struct LinearCeStats {
    pub tokens: usize,
    pub hidden: usize,
    pub ld_h: usize,
    pub ld_w: usize,
    pub shard: VocabShard,
    /// Tokens whose logits are in memory at once; [`super::CHUNK`] suits most shapes.
    pub chunk: usize,
}

/// Gradients of the masked sum of losses, times `scale`, through the projection.
///
/// ins: hidden [tokens, hidden], weight [local, hidden], lse [tokens] (of the whole vocabulary), loss_mask [tokens],
/// scale [1]; ints: labels [tokens];
/// outs: dhidden [tokens, hidden] (partial over the parts), and dweight [local, hidden] (+=, rows `ld_w` apart) when
/// `weight_grad`.
#[derive(Clone, Copy, Debug)]
pub struct LinearCeBackward {
    pub tokens: usize,
    pub hidden: usize,
    pub ld_h: usize,
    pub ld_w: usize,
    pub ld_dh: usize,
    pub ld_dw: usize,
    pub shard: VocabShard,
    pub chunk: usize,
    pub smoothing: f64,
    /// Add to dhidden.
    pub acc: bool,
    /// Whether outs[1] is there.
    pub weight_grad: bool,
}

crate::kernels! {
    LinearCeStats => "linear_cross_entropy", workspace;
    LinearCeBackward => "linear_cross_entropy_backward", workspace;
}

impl LinearCeStats {
    fn workspace(&self) -> usize {
        let (chunk, width) = tile(self.chunk, self.tokens, self.shard.valid());
        chunk * width
    }

    fn cost(&self) -> Cost {
        let (t, h, v) = (self.tokens as f64, self.hidden as f64, self.shard.valid() as f64);
        Cost::new(t * v * (2.0 * h + 5.0), t * h + v * h)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (hidden, weight) = (args.ins[0], args.ins[1]);
        let labels = args.ints[0];
        let valid = self.shard.valid();
        let (chunk, width) = tile(self.chunk, self.tokens, valid);
        let stats = &mut args.outs[0][..self.tokens * CE_STATS];
        for s in stats.chunks_mut(CE_STATS) {
            s.copy_from_slice(&[T::NEG_INFINITY, T::ZERO, T::ZERO, T::ZERO]);
        }
        for (start, stats) in (0..self.tokens).step_by(chunk).zip(stats.chunks_mut(chunk * CE_STATS)) {
            let rows = stats.len() / CE_STATS;
            for first in (0..valid).step_by(width) {
                let n = width.min(valid - first);
                let logits = &mut args.work[..rows * n];
                let a = Mat::rows(&hidden[start * self.ld_h..], self.ld_h);
                let b = Mat::cols(&weight[first * self.ld_w..], self.ld_w);
                matmul((rows, n, self.hidden), T::ONE, a, b, false, logits, n, true);
                let logits = &*logits;
                par::rows_mut(stats, CE_STATS, par::block_rows(rows, 8 * n), |i0, block| {
                    par::simd!(|| {
                        for (i, s) in block.chunks_mut(CE_STATS).enumerate() {
                            let l = &logits[(i0 + i) * n..][..n];
                            let (m, z) = max_and_sum_exp(l);
                            (s[0], s[1]) = merge((s[0], s[1]), (m, z));
                            let label = self.shard.row(labels[start + i0 + i]);
                            if let Some(&l) = label.and_then(|y| y.checked_sub(first)).and_then(|y| l.get(y)) {
                                s[2] = l;
                            }
                            s[3] += sum_map(l, |l| l);
                        }
                    })
                });
            }
        }
    }
}

/// Joins two (max, sum of exp(l - max)); the right one is of at least one logit.
#[inline(always)]
fn merge<T: Real>(a: (T, T), b: (T, T)) -> (T, T) {
    if a.1 == T::ZERO {
        return b;
    }
    let m = a.0.max(b.0);
    (m, a.1 * (a.0 - m).exp() + b.1 * (b.0 - m).exp())
}

impl LinearCeBackward {
    fn workspace(&self) -> usize {
        let (chunk, width) = tile(self.chunk, self.tokens, self.shard.valid());
        chunk * width
    }

    fn cost(&self) -> Cost {
        let (t, h, v) = (self.tokens as f64, self.hidden as f64, self.shard.valid() as f64);
        let products = if self.weight_grad { 3.0 } else { 2.0 };
        Cost::new(t * v * (2.0 * products * h + 4.0), 2.0 * t * h + products * v * h)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let [hidden, weight, lse, mask, scale] = *args.ins else {
            unreachable!("linear_cross_entropy_backward has five inputs")
        };
        let labels = args.ints[0];
        let a = smoothing_weight(self.shard.vocab, self.smoothing);
        let uniform = T::of(a / self.shard.vocab as f64);
        let valid = self.shard.valid();
        let (chunk, width) = tile(self.chunk, self.tokens, valid);
        let (dhidden, dweight) = args.outs.split_at_mut(1);
        let dhidden = &mut dhidden[0][..span(self.tokens, self.ld_dh, self.hidden)];
        if valid == 0 && !self.acc {
            dhidden.chunks_mut(self.ld_dh).for_each(|d| d[..self.hidden].fill(T::ZERO));
        }
        for (start, dhidden) in (0..self.tokens).step_by(chunk).zip(dhidden.chunks_mut(chunk * self.ld_dh)) {
            let rows = chunk.min(self.tokens - start);
            let h = &hidden[start * self.ld_h..];
            for first in (0..valid).step_by(width) {
                let n = width.min(valid - first);
                let w = &weight[first * self.ld_w..];
                let d = &mut args.work[..rows * n];
                let shape = (rows, n, self.hidden);
                matmul(shape, T::ONE, Mat::rows(h, self.ld_h), Mat::cols(w, self.ld_w), false, d, n, true);
                par::rows_mut(d, n, par::block_rows(rows, 8 * n), |i0, block| {
                    for (i, d) in block.chunks_mut(n).enumerate() {
                        let t = start + i0 + i;
                        let factor = mask[t] * scale[0];
                        if factor == T::ZERO {
                            d.fill(T::ZERO);
                            continue;
                        }
                        let lse = lse[t];
                        par::simd!(|| {
                            for d in d.iter_mut() {
                                *d = (exp(*d - lse) - uniform) * factor;
                            }
                        });
                        let label = self.shard.row(labels[t]).and_then(|y| y.checked_sub(first));
                        if let Some(d) = label.and_then(|y| d.get_mut(y)) {
                            *d += -(T::of(1.0 - a) * factor);
                        }
                    }
                });
                let d = &*d;
                let acc = self.acc || first > 0;
                let shape = (rows, self.hidden, n);
                matmul(shape, T::ONE, Mat::rows(d, n), Mat::rows(w, self.ld_w), acc, dhidden, self.ld_dh, true);
                if self.weight_grad {
                    let dw = &mut dweight[0][first * self.ld_dw..];
                    let shape = (n, self.hidden, rows);
                    matmul(shape, T::ONE, Mat::cols(d, n), Mat::rows(h, self.ld_h), true, dw, self.ld_dw, true);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, finite_differences, normal, relative_l2};
    use crate::cpu::cross_entropy::{CeCombine, CeFromLogits};
    use rstest::rstest;

    const T: usize = 7;
    const H: usize = 6;
    const LD_H: usize = 9;
    const LD_W: usize = 8;
    const LABELS: [i32; T] = [0, 1, 12, 5, -1, 13, 7];
    const MASK: [f64; T] = [1.0, 1.0, 0.5, 0.0, 1.0, 1.0, 1.0];
    const VOCAB: usize = 13;

    /// Rows of the padded vocabulary on each part: `local` of them.
    fn deal(weight: &[f64], parts: usize, part: usize, local: usize) -> Vec<f64> {
        (0..local)
            .flat_map(|r| {
                let global = r * parts + part;
                let mut row = vec![f64::NAN; LD_W];
                if global < VOCAB {
                    row[..H].copy_from_slice(&weight[global * H..][..H]);
                }
                row
            })
            .collect()
    }

    fn hidden_rows(hidden: &[f64]) -> Vec<f64> {
        let mut out = vec![f64::NAN; span(T, LD_H, H)];
        for (t, h) in hidden.chunks(H).enumerate() {
            out[t * LD_H..][..H].copy_from_slice(h);
        }
        out
    }

    fn stats(hidden: &[f64], weight: &[f64], parts: usize, chunk: usize) -> Vec<f64> {
        let local = VOCAB.div_ceil(parts) + 1;
        let mut all = vec![];
        for part in 0..parts {
            let shard = VocabShard { vocab: VOCAB, local, parts, part };
            let kernel = LinearCeStats { tokens: T, hidden: H, ld_h: LD_H, ld_w: LD_W, shard, chunk };
            let mut call = Call {
                ins: vec![hidden_rows(hidden), deal(weight, parts, part, local)],
                outs: vec![vec![f64::NAN; T * CE_STATS]],
                ints: vec![LABELS.to_vec()],
                ..Call::default()
            };
            all.extend(call.run(&kernel).outs[0].clone());
        }
        all
    }

    fn combine(hidden: &[f64], weight: &[f64], parts: usize, chunk: usize, smoothing: f64) -> Call {
        let mut call = Call {
            ins: vec![stats(hidden, weight, parts, chunk), MASK.to_vec()],
            outs: vec![vec![f64::NAN; T], vec![f64::NAN; T], vec![f64::NAN], vec![f64::NAN]],
            ints: vec![LABELS.to_vec()],
            ..Call::default()
        };
        call.run(&CeCombine { tokens: T, parts, vocab: VOCAB, smoothing });
        call
    }

    fn logits(hidden: &[f64], weight: &[f64]) -> Vec<f64> {
        let dot = |h: &[f64], w: &[f64]| h.iter().zip(w).map(|(a, b)| a * b).sum();
        hidden.chunks(H).flat_map(|h| weight.chunks(H).map(|w| dot(h, w)).collect::<Vec<f64>>()).collect()
    }

    #[rstest]
    fn parts_and_chunks_agree_with_given_logits(
        #[values(1, 2, 3, 20)] parts: usize,
        #[values(1, 3, 100)] chunk: usize,
        #[values(0.0, 0.2)] smoothing: f64,
    ) {
        let (hidden, weight) = (normal(1, T * H), normal(2, VOCAB * H));
        let fused = combine(&hidden, &weight, parts, chunk, smoothing);
        let mut plain = Call {
            ins: vec![logits(&hidden, &weight), MASK.to_vec()],
            outs: vec![vec![f64::NAN; T], vec![f64::NAN; T], vec![f64::NAN], vec![f64::NAN]],
            ints: vec![LABELS.to_vec()],
            ..Call::default()
        };
        plain.run(&CeFromLogits { tokens: T, vocab: VOCAB, ld: VOCAB, smoothing });
        for (fused, plain) in fused.outs.iter().zip(&plain.outs) {
            assert!(relative_l2(fused, plain) < 1e-13, "{fused:?} against {plain:?}");
        }
    }

    /// More than one vocabulary tile: the running max and sum are joined.
    #[test]
    fn wide_vocabulary_in_tiles() {
        let (tokens, vocab, hidden) = (2, 700, 3);
        let (_, width) = tile(1 << 16, 1 << 16, vocab);
        assert!(width < vocab);
        let weight: Vec<f64> = normal(3, vocab * hidden).iter().map(|w| 5.0 * w).collect();
        // The chunk (a whole micro-batch) sets the tile, so pretend it is long.
        let many = 1 << 12;
        let x: Vec<f64> = normal(4, tokens * hidden).into_iter().cycle().take(many * hidden).collect();
        let kernel = LinearCeStats {
            tokens: many,
            hidden,
            ld_h: hidden,
            ld_w: hidden,
            shard: VocabShard::whole(vocab),
            chunk: many,
        };
        assert!(kernel.workspace() < many * vocab);
        let mut call = Call {
            ins: vec![x.clone(), weight.clone()],
            outs: vec![vec![f64::NAN; many * CE_STATS]],
            ints: vec![vec![699; many]],
            ..Call::default()
        };
        call.run(&kernel);
        for (h, s) in x.chunks(hidden).zip(call.outs[0].chunks(CE_STATS)) {
            let l: Vec<f64> = weight.chunks(hidden).map(|w| w.iter().zip(h).map(|(a, b)| a * b).sum()).collect();
            let m = l.iter().copied().fold(f64::MIN, f64::max);
            let expected = [m, l.iter().map(|l| (l - m).exp()).sum(), l[699], l.iter().sum()];
            assert!(relative_l2(s, &expected) < 1e-12, "{s:?} against {expected:?}");
        }
    }

    #[rstest]
    fn gradients(#[values(1, 3)] parts: usize, #[values(2, 100)] chunk: usize, #[values(0.0, 0.2)] smoothing: f64) {
        let (hidden, weight) = (normal(5, T * H), normal(6, VOCAB * H));
        let lse = combine(&hidden, &weight, parts, chunk, smoothing).outs[0].clone();
        let (ld_dh, ld_dw) = (H + 1, H + 2);
        let local = VOCAB.div_ceil(parts) + 1;
        let mut dhidden = vec![1.0; span(T, ld_dh, H)];
        let mut dweight = vec![0.0; VOCAB * H];
        // The label outside the vocabulary has a gradient that is not the derivative of its loss: mask it here.
        let mut mask = MASK.to_vec();
        (mask[4], mask[5]) = (0.0, 0.0);
        for part in 0..parts {
            let shard = VocabShard { vocab: VOCAB, local, parts, part };
            let kernel = LinearCeBackward {
                tokens: T,
                hidden: H,
                ld_h: LD_H,
                ld_w: LD_W,
                ld_dh,
                ld_dw,
                shard,
                chunk,
                smoothing,
                acc: true,
                weight_grad: true,
            };
            let ins =
                vec![hidden_rows(&hidden), deal(&weight, parts, part, local), lse.clone(), mask.clone(), vec![0.4]];
            let mut call = Call {
                ins,
                outs: vec![dhidden, vec![2.0; local * ld_dw]],
                ints: vec![LABELS.to_vec()],
                ..Call::default()
            };
            call.run(&kernel);
            for (r, d) in call.outs[1].chunks(ld_dw).enumerate() {
                let global = r * parts + part;
                for (c, d) in d.iter().enumerate() {
                    if global < VOCAB && c < H {
                        dweight[global * H + c] = d - 2.0;
                    } else {
                        assert_eq!(*d, 2.0, "padding is not touched");
                    }
                }
            }
            let without = LinearCeBackward { acc: false, weight_grad: false, ..kernel };
            let mut alone = Call { outs: vec![vec![f64::NAN; span(T, ld_dh, H)]], ..call.clone() };
            alone.run(&without);
            assert!(alone.outs[0].chunks(ld_dh).all(|d| d[..H].iter().all(|d| d.is_finite())));
            if parts == 1 {
                let shifted: Vec<f64> = alone.outs[0].iter().map(|d| d + 1.0).collect();
                for (a, b) in shifted.chunks(ld_dh).zip(call.outs[0].chunks(ld_dh)) {
                    assert!(relative_l2(&a[..H], &b[..H]) < 1e-14);
                }
            }
            dhidden = call.outs.remove(0);
        }
        let total = |hidden: &[f64], weight: &[f64]| {
            let loss = combine(hidden, weight, parts, chunk, smoothing).outs[1].clone();
            0.4 * loss.iter().zip(&mask).map(|(l, m)| l * m).sum::<f64>()
        };
        let dhidden: Vec<f64> = dhidden.chunks(ld_dh).flat_map(|d| d[..H].iter().map(|d| d - 1.0)).collect();
        finite_differences("dhidden", &hidden, &dhidden, 1e-7, |x| total(x, &weight));
        finite_differences("dweight", &weight, &dweight, 1e-7, |w| total(&hidden, w));
    }

    #[test]
    fn single_precision() {
        let (hidden, weight) = (normal(1, T * H), normal(2, VOCAB * H));
        let mut call = Call {
            ins: vec![hidden, weight],
            outs: vec![vec![f64::NAN; T * CE_STATS]],
            ints: vec![LABELS.to_vec()],
            ..Call::default()
        };
        let shard = VocabShard::whole(VOCAB);
        let kernel = LinearCeStats { tokens: T, hidden: H, ld_h: H, ld_w: H, shard, chunk: 4 };
        let narrow = call.run_f32(&kernel);
        assert!(relative_l2(&narrow[0], &call.run(&kernel).outs[0]) < 1e-5);
    }
}
