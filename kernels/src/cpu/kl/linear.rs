//! KL divergence fused with both output projections: logits exist for one tile of tokens and vocabulary at a time.

use super::{KL_SAVED, KL_STATS, Stats, gradient};
use crate::cpu::cross_entropy::{VocabShard, tile};
use crate::cpu::gemm_call::{Mat, matmul};
use crate::cpu::softmax::span;
use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;

/// The two projections of a fused divergence; student and teacher may differ in width.
#[derive(Clone, Copy, Debug)]
pub struct TwoHeads {
    pub tokens: usize,
    /// Width of the student's hidden states, and elements between rows of them and of its weight.
    pub hidden_s: usize,
    pub ld_hs: usize,
    pub ld_ws: usize,
    pub hidden_t: usize,
    pub ld_ht: usize,
    pub ld_wt: usize,
    pub shard: VocabShard,
    pub temperature: f64,
    /// KL(student || teacher) instead of KL(teacher || student).
    pub reverse: bool,
    /// Tokens whose logits are in memory at once; [`crate::cpu::cross_entropy::CHUNK`] suits most shapes.
    pub chunk: usize,
}

/// Statistics of both sides' logits over the vocabulary rows of one part.
///
/// ins: student hidden [tokens, hidden_s], student weight [local, hidden_s], teacher hidden [tokens, hidden_t],
/// teacher weight [local, hidden_t];
/// outs: stats [tokens, 5] = (max t, sum of exp(t - max t), max s, sum of exp(s - max s), d), d = sum of
/// exp(t - max t) (t - s), or of exp(s - max s) (s - t) when reversed.
#[derive(Clone, Copy, Debug)]
pub struct LinearKlStats {
    pub heads: TwoHeads,
}

/// Gradients of the masked sum of divergences, times `scale`, through the student's projection.
///
/// ins: student hidden [tokens, hidden_s], student weight [local, hidden_s], teacher hidden [tokens, hidden_t], teacher
/// weight [local, hidden_t], saved [tokens, 3], loss_mask [tokens], scale [1];
/// outs: dhidden [tokens, hidden_s] (partial over the parts), and dweight [local, hidden_s] (+=) when `weight_grad`.
#[derive(Clone, Copy, Debug)]
pub struct LinearKlBackward {
    pub heads: TwoHeads,
    pub ld_dh: usize,
    pub ld_dw: usize,
    /// Add to dhidden.
    pub acc: bool,
    /// Whether outs[1] is there.
    pub weight_grad: bool,
}

crate::kernels! {
    LinearKlStats => "linear_kl", workspace;
    LinearKlBackward => "linear_kl_backward", workspace;
}

impl TwoHeads {
    fn tile(&self) -> (usize, usize) {
        tile(self.chunk, self.tokens, self.shard.valid())
    }

    fn workspace(&self) -> usize {
        let (chunk, width) = self.tile();
        2 * chunk * width
    }

    /// Work of one computation of both sides' logits.
    fn cost(&self) -> Cost {
        let (t, v, h) = (self.tokens as f64, self.shard.valid() as f64, (self.hidden_s + self.hidden_t) as f64);
        Cost::new(t * v * (2.0 * h + 10.0), (t + v) * h)
    }

    /// Student and teacher logits of `rows` tokens from `start` and `n` vocabulary rows from `first`, over tau.
    fn logits<T: Real>(&self, ins: &[&[T]], (start, rows): (usize, usize), (first, n): (usize, usize), out: &mut [T]) {
        let inverse = T::of(1.0 / self.temperature);
        let (s, t) = out[..2 * rows * n].split_at_mut(rows * n);
        let a = Mat::rows(&ins[0][start * self.ld_hs..], self.ld_hs);
        let b = Mat::cols(&ins[1][first * self.ld_ws..], self.ld_ws);
        matmul((rows, n, self.hidden_s), inverse, a, b, false, s, n, true);
        let a = Mat::rows(&ins[2][start * self.ld_ht..], self.ld_ht);
        let b = Mat::cols(&ins[3][first * self.ld_wt..], self.ld_wt);
        matmul((rows, n, self.hidden_t), inverse, a, b, false, t, n, true);
    }
}

impl LinearKlStats {
    fn workspace(&self) -> usize {
        self.heads.workspace()
    }

    fn cost(&self) -> Cost {
        self.heads.cost()
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let heads = &self.heads;
        let valid = heads.shard.valid();
        let (chunk, width) = heads.tile();
        let stats = &mut args.outs[0][..heads.tokens * KL_STATS];
        stats.chunks_mut(KL_STATS).for_each(|s| Stats::empty().store(s));
        for (start, stats) in (0..heads.tokens).step_by(chunk).zip(stats.chunks_mut(chunk * KL_STATS)) {
            let rows = stats.len() / KL_STATS;
            for first in (0..valid).step_by(width) {
                let n = width.min(valid - first);
                heads.logits(args.ins, (start, rows), (first, n), args.work);
                let (s, t) = args.work[..2 * rows * n].split_at(rows * n);
                par::rows_mut(stats, KL_STATS, par::block_rows(rows, 16 * n), |i0, block| {
                    par::simd!(|| {
                        for (i, out) in block.chunks_mut(KL_STATS).enumerate() {
                            let window = (i0 + i) * n..(i0 + i + 1) * n;
                            let new = Stats::of(&s[window.clone()], &t[window], heads.reverse);
                            Stats::load(out).join(new, heads.reverse).store(out);
                        }
                    })
                });
            }
        }
    }
}

impl LinearKlBackward {
    fn workspace(&self) -> usize {
        self.heads.workspace()
    }

    fn cost(&self) -> Cost {
        let h = &self.heads;
        let logits = h.cost();
        let products = if self.weight_grad { 2.0 } else { 1.0 };
        let (t, v, c) = (h.tokens as f64, h.shard.valid() as f64, h.hidden_s as f64);
        Cost::new(logits.flops + 2.0 * products * t * v * c, logits.elements + t * c + v * c)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let heads = &self.heads;
        let (saved, mask, scale) = (args.ins[4], args.ins[5], args.ins[6][0]);
        let factor = scale * T::of(1.0 / heads.temperature);
        let valid = heads.shard.valid();
        let (chunk, width) = heads.tile();
        let (dhidden, dweight) = args.outs.split_at_mut(1);
        let dhidden = &mut dhidden[0][..span(heads.tokens, self.ld_dh, heads.hidden_s)];
        if valid == 0 && !self.acc {
            dhidden.chunks_mut(self.ld_dh).for_each(|d| d[..heads.hidden_s].fill(T::ZERO));
        }
        for (start, dhidden) in (0..heads.tokens).step_by(chunk).zip(dhidden.chunks_mut(chunk * self.ld_dh)) {
            let rows = chunk.min(heads.tokens - start);
            for first in (0..valid).step_by(width) {
                let n = width.min(valid - first);
                heads.logits(args.ins, (start, rows), (first, n), args.work);
                let (d, t) = args.work[..2 * rows * n].split_at_mut(rows * n);
                let t = &*t;
                par::rows_mut(d, n, par::block_rows(rows, 16 * n), |i0, block| {
                    for (i, d) in block.chunks_mut(n).enumerate() {
                        let token = start + i0 + i;
                        let factor = factor * mask[token];
                        if factor == T::ZERO {
                            d.fill(T::ZERO);
                            continue;
                        }
                        let t = &t[(i0 + i) * n..][..n];
                        let s = &saved[token * KL_SAVED..];
                        let values = [s[0], s[1], s[2]];
                        par::simd!(|| {
                            for (d, &t) in d.iter_mut().zip(t) {
                                *d = gradient(*d, t, values, heads.reverse, factor);
                            }
                        });
                    }
                });
                let d = &*d;
                let acc = self.acc || first > 0;
                let w = Mat::rows(&args.ins[1][first * heads.ld_ws..], heads.ld_ws);
                matmul((rows, heads.hidden_s, n), T::ONE, Mat::rows(d, n), w, acc, dhidden, self.ld_dh, true);
                if self.weight_grad {
                    let dw = &mut dweight[0][first * self.ld_dw..];
                    let h = Mat::rows(&args.ins[0][start * heads.ld_hs..], heads.ld_hs);
                    matmul((n, heads.hidden_s, rows), T::ONE, Mat::cols(d, n), h, true, dw, self.ld_dw, true);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, finite_differences, normal, relative_l2};
    use crate::cpu::kl::{KlCombine, KlFromLogits};
    use rstest::rstest;

    const T: usize = 6;
    const HS: usize = 4;
    const HT: usize = 7;
    const VOCAB: usize = 11;
    const MASK: [f64; T] = [1.0, 0.5, 0.0, 1.0, 1.0, 2.0];
    const TAU: f64 = 1.7;

    fn deal(weight: &[f64], cols: usize, parts: usize, part: usize, local: usize) -> Vec<f64> {
        let mut out = vec![f64::NAN; local * (cols + 1)];
        for (r, row) in out.chunks_mut(cols + 1).enumerate() {
            let global = r * parts + part;
            if global < VOCAB {
                row[..cols].copy_from_slice(&weight[global * cols..][..cols]);
            }
        }
        out
    }

    fn stride(x: &[f64], cols: usize) -> Vec<f64> {
        x.chunks(cols).flat_map(|x| x.iter().copied().chain([f64::NAN, f64::NAN])).collect()
    }

    fn heads(parts: usize, part: usize, chunk: usize, reverse: bool) -> TwoHeads {
        TwoHeads {
            tokens: T,
            hidden_s: HS,
            ld_hs: HS + 2,
            ld_ws: HS + 1,
            hidden_t: HT,
            ld_ht: HT + 2,
            ld_wt: HT + 1,
            shard: VocabShard { vocab: VOCAB, local: VOCAB.div_ceil(parts) + 1, parts, part },
            temperature: TAU,
            reverse,
            chunk,
        }
    }

    /// Student hidden and weight, teacher hidden and weight.
    type Operands = [Vec<f64>; 4];

    fn operands() -> Operands {
        [normal(1, T * HS), normal(2, VOCAB * HS), normal(3, T * HT), normal(4, VOCAB * HT)]
    }

    fn shard_ins(x: &Operands, heads: &TwoHeads) -> Vec<Vec<f64>> {
        let VocabShard { parts, part, local, .. } = heads.shard;
        vec![
            stride(&x[0], HS),
            deal(&x[1], HS, parts, part, local),
            stride(&x[2], HT),
            deal(&x[3], HT, parts, part, local),
        ]
    }

    fn fused(x: &Operands, parts: usize, chunk: usize, reverse: bool) -> Call {
        let mut stats = vec![];
        for part in 0..parts {
            let heads = heads(parts, part, chunk, reverse);
            let mut call =
                Call { ins: shard_ins(x, &heads), outs: vec![vec![f64::NAN; T * KL_STATS]], ..Call::default() };
            stats.extend(call.run(&LinearKlStats { heads }).outs[0].clone());
        }
        let mut call = Call {
            ins: vec![stats, MASK.to_vec()],
            outs: vec![vec![f64::NAN; T * KL_SAVED], vec![f64::NAN; T], vec![f64::NAN], vec![f64::NAN]],
            ..Call::default()
        };
        call.run(&KlCombine { tokens: T, parts, reverse });
        call
    }

    fn logits(hidden: &[f64], weight: &[f64], cols: usize) -> Vec<f64> {
        let dot = |h: &[f64], w: &[f64]| h.iter().zip(w).map(|(a, b)| a * b).sum();
        hidden.chunks(cols).flat_map(|h| weight.chunks(cols).map(|w| dot(h, w)).collect::<Vec<f64>>()).collect()
    }

    #[rstest]
    fn parts_and_chunks_agree_with_given_logits(
        #[values(1, 3, 15)] parts: usize,
        #[values(1, 4, 100)] chunk: usize,
        #[values(false, true)] reverse: bool,
    ) {
        let x = operands();
        let fused = fused(&x, parts, chunk, reverse);
        let mut plain = Call {
            ins: vec![logits(&x[0], &x[1], HS), logits(&x[2], &x[3], HT), MASK.to_vec()],
            outs: fused.outs.iter().map(|v| vec![f64::NAN; v.len()]).collect(),
            ..Call::default()
        };
        let kernel =
            KlFromLogits { tokens: T, vocab: VOCAB, ld_s: VOCAB, ld_t: VOCAB, temperature: TAU, reverse, top_k: None };
        plain.run(&kernel);
        for (fused, plain) in fused.outs.iter().zip(&plain.outs) {
            assert!(relative_l2(fused, plain) < 1e-12, "{fused:?} against {plain:?}");
        }
    }

    #[rstest]
    fn gradients(
        #[values(1, 3)] parts: usize,
        #[values(4, 100)] chunk: usize,
        #[values(false, true)] reverse: bool,
        #[values(false, true)] acc: bool,
    ) {
        let x = operands();
        let saved = fused(&x, parts, chunk, reverse).outs[0].clone();
        let ld = HS + 1;
        let mut dhidden = vec![0.0; T * HS];
        let mut dweight = vec![0.0; VOCAB * HS];
        for part in 0..parts {
            let heads = heads(parts, part, chunk, reverse);
            let mut ins = shard_ins(&x, &heads);
            ins.extend([saved.clone(), MASK.to_vec(), vec![0.3]]);
            let before = if acc { 1.0 } else { f64::NAN };
            let outs = vec![vec![before; span(T, ld, HS)], vec![2.0; heads.shard.local * ld]];
            let mut call = Call { ins, outs, ..Call::default() };
            call.run(&LinearKlBackward { heads, ld_dh: ld, ld_dw: ld, acc, weight_grad: true });
            for (sum, d) in dhidden.chunks_mut(HS).zip(call.outs[0].chunks(ld)) {
                sum.iter_mut().zip(d).for_each(|(sum, d)| *sum += if acc { d - 1.0 } else { *d });
            }
            for (r, d) in call.outs[1].chunks(ld).enumerate() {
                for (c, d) in d.iter().enumerate() {
                    match r * parts + part {
                        global if global < VOCAB && c < HS => dweight[global * HS + c] = d - 2.0,
                        _ => assert_eq!(*d, 2.0, "padding is not touched"),
                    }
                }
            }
        }
        let total = |h: &[f64], w: &[f64]| {
            let [_, _, ht, wt] = operands();
            0.3 * fused(&[h.to_vec(), w.to_vec(), ht, wt], parts, chunk, reverse).outs[2][0]
        };
        finite_differences("dhidden", &x[0], &dhidden, 1e-7, |h| total(h, &x[1]));
        finite_differences("dweight", &x[1], &dweight, 1e-7, |w| total(&x[0], w));
    }

    #[test]
    fn single_precision() {
        let heads = TwoHeads { ld_hs: HS, ld_ws: HS, ld_ht: HT, ld_wt: HT, ..heads(1, 0, 4, false) };
        let heads = TwoHeads { shard: VocabShard::whole(VOCAB), ..heads };
        let mut call = Call { ins: operands().to_vec(), outs: vec![vec![f64::NAN; T * KL_STATS]], ..Call::default() };
        let narrow = call.run_f32(&LinearKlStats { heads });
        assert!(relative_l2(&narrow[0], &call.run(&LinearKlStats { heads }).outs[0]) < 1e-5);
    }
}
