//! Token permutation of a mixture of experts: rows sorted by expert, and back.
//!
//! Each of the T*K assignments (t, k) gets a slot; slots are sorted by expert, then token, then k (a stable counting
//! sort). Slots of expert e are `offsets[e]..offsets[e + 1]`. An assignment with a negative expert is dropped: it has
//! slot -1, and the slots from `offsets[E]` on belong to nobody: source -1, rows of zeros.
//!
//! The routing probability travels with the row (`row_probs`) and is applied inside the experts, so going back is a
//! plain sum over k in order: y_t = sum_k ys[slot(t, k)].

use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;

/// Sizes shared by the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PermuteShape {
    /// T.
    pub tokens: usize,
    /// K, assignments per token.
    pub k: usize,
    /// E.
    pub experts: usize,
    /// C.
    pub channels: usize,
    /// Elements between rows of the operand with a row per token (x, dx, y, dy).
    pub ld: usize,
    /// Elements between rows of the operand with a row per slot (xs, dxs, ys, dys).
    pub ld_slots: usize,
}

/// ins: x [T, C], probs [T, K]; ints: indices [T, K]; outs: xs [T*K, C], row_probs [T*K];
/// int_outs: offsets [E + 1], slot [T*K] of every (t, k), source [T*K]: the token of every slot.
#[derive(Clone, Debug)]
pub struct Permute {
    pub shape: PermuteShape,
}

/// Gradient of the probabilities; that of x is [`Unpermute`] on the gradient of xs.
///
/// ins: drow_probs [T*K]; ints: slot [T*K]; outs: dprobs [T, K].
#[derive(Clone, Debug)]
pub struct PermuteProbsBackward {
    pub shape: PermuteShape,
    /// dprobs += instead of =.
    pub acc: bool,
}

/// ins: ys [T*K, C]; ints: slot [T*K]; outs: y [T, C].
#[derive(Clone, Debug)]
pub struct Unpermute {
    pub shape: PermuteShape,
    /// y += instead of =.
    pub acc: bool,
}

/// ins: dy [T, C]; ints: source [T*K]; outs: dys [T*K, C].
#[derive(Clone, Debug)]
pub struct UnpermuteBackward {
    pub shape: PermuteShape,
    /// dys += instead of =.
    pub acc: bool,
}

crate::kernels! {
    Permute => "moe_permute";
    PermuteProbsBackward => "moe_permute_probs_backward";
    Unpermute => "moe_unpermute";
    UnpermuteBackward => "moe_unpermute_backward";
}

impl PermuteShape {
    fn slots(&self) -> usize {
        self.tokens * self.k
    }

    fn cost(&self, adds: bool) -> Cost {
        let moved = (self.slots() * self.channels) as f64;
        let tokens = (self.tokens * self.channels) as f64;
        Cost::new(if adds { moved } else { 0.0 }, moved + tokens)
    }

    /// The counting sort: offsets, slot of every assignment, source token of every slot.
    fn sort(&self, indices: &[i32], offsets: &mut [i32], slot: &mut [i32], source: &mut [i32]) {
        let indices = &indices[..self.slots()];
        let offsets = &mut offsets[..=self.experts];
        offsets.fill(0);
        for &e in indices.iter().filter(|&&e| e >= 0) {
            offsets[e as usize + 1] += 1;
        }
        for e in 0..self.experts {
            offsets[e + 1] += offsets[e];
        }
        // The starts serve as cursors; afterwards each stands at its expert's end, one place early.
        source[..self.slots()].fill(-1);
        for (i, (&e, slot)) in indices.iter().zip(slot).enumerate() {
            *slot = if e < 0 {
                -1
            } else {
                let cursor = &mut offsets[e as usize];
                source[*cursor as usize] = (i / self.k) as i32;
                *cursor += 1;
                *cursor - 1
            };
        }
        offsets.copy_within(..self.experts, 1);
        offsets[0] = 0;
    }

    /// rows[s] (+)= x[source[s]], or zero where there is no source.
    fn spread<T: Real>(&self, x: &[T], source: &[i32], rows: &mut [T], acc: bool) {
        let c = self.channels;
        let source = &source[..self.slots()];
        par::rows_mut(rows, self.ld_slots, par::block_rows(source.len(), c), |first, rows| {
            for (row, &t) in rows.chunks_mut(self.ld_slots).zip(source.get(first..).unwrap_or(&[])) {
                let row = &mut row[..c];
                if t < 0 {
                    if !acc {
                        row.fill(T::ZERO);
                    }
                    continue;
                }
                let x = &x[t as usize * self.ld..][..c];
                if acc {
                    row.iter_mut().zip(x).for_each(|(y, &x)| *y += x);
                } else {
                    row.copy_from_slice(x);
                }
            }
        });
    }

    /// y[t] (+)= sum over k of rows[slot(t, k)].
    fn collect<T: Real>(&self, rows: &[T], slot: &[i32], y: &mut [T], acc: bool) {
        let c = self.channels;
        par::rows_mut(y, self.ld, par::block_rows(self.tokens, self.k * c), |first, y| {
            for (i, y) in y.chunks_mut(self.ld).enumerate().take(self.tokens.saturating_sub(first)) {
                let y = &mut y[..c];
                if !acc {
                    y.fill(T::ZERO);
                }
                for &s in slot[(first + i) * self.k..][..self.k].iter().filter(|&&s| s >= 0) {
                    let row = &rows[s as usize * self.ld_slots..][..c];
                    par::simd(
                        #[inline(always)]
                        || y.iter_mut().zip(row).for_each(|(y, &x)| *y += x),
                    );
                }
            }
        });
    }
}

impl Permute {
    fn cost(&self) -> Cost {
        self.shape.cost(false)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let s = &self.shape;
        let ([x, probs], [indices], [xs, row_probs], [offsets, slot, source]) =
            (args.ins, args.ints, args.outs, args.int_outs)
        else {
            unreachable!("moe_permute takes x, probs, indices and gives xs, row_probs, offsets, slot, source")
        };
        s.sort(indices, offsets, slot, source);
        s.spread(x, source, xs, false);
        row_probs[..s.slots()].fill(T::ZERO);
        for (&slot, &p) in slot.iter().zip(&probs[..s.slots()]).filter(|(slot, _)| **slot >= 0) {
            row_probs[slot as usize] = p;
        }
    }
}

impl PermuteProbsBackward {
    fn cost(&self) -> Cost {
        Cost::new(0.0, 2.0 * self.shape.slots() as f64)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let ([drow_probs], [slot], [dprobs]) = (args.ins, args.ints, args.outs) else {
            unreachable!("moe_permute_probs_backward takes drow_probs, slot and gives dprobs")
        };
        for (d, &slot) in dprobs.iter_mut().zip(&slot[..self.shape.slots()]) {
            let before = if self.acc { *d } else { T::ZERO };
            *d = before + if slot < 0 { T::ZERO } else { drow_probs[slot as usize] };
        }
    }
}

impl Unpermute {
    fn cost(&self) -> Cost {
        self.shape.cost(true)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let ([ys], [slot], [y]) = (args.ins, args.ints, args.outs) else {
            unreachable!("moe_unpermute takes ys, slot and gives y")
        };
        self.shape.collect(ys, slot, y, self.acc);
    }
}

impl UnpermuteBackward {
    fn cost(&self) -> Cost {
        self.shape.cost(self.acc)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let ([dy], [source], [dys]) = (args.ins, args.ints, args.outs) else {
            unreachable!("moe_unpermute_backward takes dy, source and gives dys")
        };
        self.shape.spread(dy, source, dys, self.acc);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, normal, relative_l2};

    const INDICES: [i32; 8] = [2, 0, -3, 2, 0, 3, 3, -1];

    fn shape() -> PermuteShape {
        PermuteShape { tokens: 4, k: 2, experts: 4, channels: 3, ld: 5, ld_slots: 4 }
    }

    fn permuted(s: PermuteShape, x: &[f64], probs: &[f64], indices: &[i32]) -> Call {
        let n = s.tokens * s.k;
        let mut call = Call {
            ins: vec![x.to_vec(), probs.to_vec()],
            ints: vec![indices.to_vec()],
            outs: vec![vec![9.0; (n - 1) * s.ld_slots + s.channels], vec![9.0; n]],
            int_outs: vec![vec![9; s.experts + 1], vec![9; n], vec![9; n]],
        };
        call.run(&Permute { shape: s });
        call
    }

    fn run(kernel: &dyn crate::Kernel, ins: Vec<Vec<f64>>, map: &[i32], outs: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
        Call { ins, ints: vec![map.to_vec()], outs, ..Default::default() }.run(kernel).outs.clone()
    }

    #[test]
    fn sorted_by_expert_then_token() {
        let x = normal(1, 4 * 5);
        let probs: Vec<f64> = (1..=8).map(f64::from).collect();
        let call = permuted(shape(), &x, &probs, &INDICES);
        assert_eq!(call.int_outs[0], [0, 2, 2, 4, 6]);
        assert_eq!(call.int_outs[1], [2, 0, -1, 3, 1, 4, 5, -1]);
        assert_eq!(call.int_outs[2], [0, 2, 0, 1, 2, 3, -1, -1]);
        assert_eq!(call.outs[1], [2.0, 5.0, 1.0, 4.0, 6.0, 7.0, 0.0, 0.0]);
        for (slot, &t) in call.int_outs[2].iter().enumerate() {
            let row = &call.outs[0][slot * 4..][..3];
            let expect = if t < 0 { &[0.0; 3] } else { &x[t as usize * 5..][..3] };
            assert_eq!(row, expect, "slot {slot}");
        }
        assert_eq!(call.outs[0][3], 9.0, "wrote beside its columns");
    }

    #[test]
    fn nothing_and_everything_dropped() {
        let s = PermuteShape { tokens: 0, ..shape() };
        let mut none = Call {
            ins: vec![vec![], vec![]],
            ints: vec![vec![]],
            outs: vec![vec![], vec![]],
            int_outs: vec![vec![5; 5], vec![], vec![]],
        };
        assert_eq!(none.run(&Permute { shape: s }).int_outs[0], [0; 5]);
        let all = permuted(shape(), &normal(1, 20), &[1.0; 8], &[-1; 8]);
        assert_eq!((all.int_outs[0].as_slice(), all.int_outs[1].as_slice()), (&[0; 5][..], &[-1; 8][..]));
        let y = run(&Unpermute { shape: shape(), acc: false }, vec![vec![1.0; 32]], &[-1; 8], vec![vec![4.0; 20]]);
        assert_eq!(y[0][..6], [0.0, 0.0, 0.0, 4.0, 4.0, 0.0]);
    }

    /// The maps are linear: <P x, g> = <x, P^T g>, for both directions, with strides and accumulation.
    #[test]
    fn backward_is_the_transpose() {
        let s = shape();
        let (x, probs) = (normal(1, 20), normal(2, 8));
        let (g, gp) = (normal(3, 32), normal(4, 8));
        let call = permuted(s, &x, &probs, &INDICES);
        let (slot, source) = (&call.int_outs[1], &call.int_outs[2]);
        let dot = |a: &[f64], lda: usize, b: &[f64], ldb: usize, rows: usize| -> f64 {
            (0..rows).flat_map(|i| (0..3).map(move |c| a[i * lda + c] * b[i * ldb + c])).sum()
        };
        let dx = run(&Unpermute { shape: s, acc: false }, vec![g.clone()], slot, vec![vec![0.0; 19]]);
        assert!((dot(&call.outs[0], 4, &g, 4, 8) - dot(&x, 5, &dx[0], 5, 4)).abs() < 1e-13);
        let probs_backward = |acc| {
            let kernel = PermuteProbsBackward { shape: s, acc };
            run(&kernel, vec![gp.clone()], slot, vec![vec![7.0; 8]])[0].clone()
        };
        let (d_probs, added) = (probs_backward(false), probs_backward(true));
        let weighted = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        assert!((weighted(&call.outs[1], &gp) - weighted(&probs, &d_probs)).abs() < 1e-13);
        assert_eq!((d_probs[2], d_probs[7]), (0.0, 0.0));
        assert!(added.iter().zip(&d_probs).all(|(a, d)| (a - d - 7.0).abs() < 1e-14));

        let y = run(&Unpermute { shape: s, acc: false }, vec![g.clone()], slot, vec![vec![0.0; 19]]);
        let dys = run(&UnpermuteBackward { shape: s, acc: false }, vec![x.clone()], source, vec![vec![3.0; 31]]);
        assert!((dot(&y[0], 5, &x, 5, 4) - dot(&g, 4, &dys[0], 4, 8)).abs() < 1e-13);

        let ones = vec![vec![1.0; 31]];
        let added = run(&UnpermuteBackward { shape: s, acc: true }, vec![x.clone()], source, ones);
        assert!((0..31).filter(|i| i % 4 < 3).all(|i| (added[0][i] - dys[0][i] - 1.0).abs() < 1e-15));
        let added = run(&Unpermute { shape: s, acc: true }, vec![g], slot, vec![vec![1.0; 19]]);
        assert!((0..19).filter(|i| i % 5 < 3).all(|i| (added[0][i] - y[0][i] - 1.0).abs() < 1e-14));
    }

    #[test]
    fn bits_do_not_depend_on_threads() {
        let s = PermuteShape { tokens: 700, k: 3, experts: 5, channels: 40, ld: 40, ld_slots: 40 };
        let indices: Vec<i32> = (0..2100).map(|i| (i * 7 + i / 3) % 6 - 1).collect();
        let x = normal(1, 700 * 40);
        let on = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let p = permuted(s, &x, &vec![0.5; 2100], &indices);
                let back = run(
                    &Unpermute { shape: s, acc: false },
                    vec![p.outs[0].clone()],
                    &p.int_outs[1],
                    vec![vec![0.0; 28000]],
                );
                (p.outs.clone(), back)
            })
        };
        let (one, three) = (on(1), on(3));
        assert_eq!(one, three);
        let kept = indices.chunks(3).map(|k| k.iter().filter(|e| **e >= 0).count() as f64);
        let expect: Vec<f64> =
            kept.enumerate().flat_map(|(t, n)| x[t * 40..][..40].iter().map(move |v| v * n)).collect();
        assert!(relative_l2(&one.1[0], &expect) < 1e-15);
    }
}
