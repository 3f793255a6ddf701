//! Distances of hidden states, per token: mean squared error and cosine.
//!
//!   MSE     loss = mean_c (s - t)^2          ds = 2 (s - t) / C
//!   cosine  loss = 1 - s.t / sqrt(a b)       ds = (s.t s / a - t) / sqrt(a b),  a = s.s + 1e-12, b = t.t + 1e-12
//! (The 1e-12 as PyTorch's cosine_embedding_loss has it.)

use super::masked_sum;
use crate::cpu::softmax::{put, row, span, sum_zip};
use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;

/// Which distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HiddenDistance {
    MeanSquared,
    Cosine,
}

/// Distance of student and teacher hidden states, and its masked sum.
///
/// ins: student [tokens, hidden], teacher [tokens, hidden], loss_mask [tokens];
/// outs: loss [tokens] (not masked), total [1], count [1] = sum of loss_mask.
#[derive(Clone, Copy, Debug)]
pub struct HiddenLoss {
    pub tokens: usize,
    pub hidden: usize,
    pub ld_s: usize,
    pub ld_t: usize,
    pub distance: HiddenDistance,
}

/// Gradient of [`HiddenLoss`]'s total, times `scale`, to the student.
///
/// ins: student [tokens, hidden], teacher [tokens, hidden], loss_mask [tokens], scale [1];
/// outs: dstudent [tokens, hidden].
#[derive(Clone, Copy, Debug)]
pub struct HiddenLossBackward {
    pub forward: HiddenLoss,
    pub ld_d: usize,
    pub acc: bool,
}

crate::kernels! {
    HiddenLoss => "hidden_loss";
    HiddenLossBackward => "hidden_loss_backward";
}

const EPSILON: f64 = 1e-12;

/// (s.t, s.s + eps, t.t + eps).
#[inline(always)]
fn products<T: Real>(s: &[T], t: &[T]) -> (T, T, T) {
    let eps = T::of(EPSILON);
    (sum_zip(s, t, |s, t| s * t), sum_zip(s, s, |s, _| s * s) + eps, sum_zip(t, t, |t, _| t * t) + eps)
}

impl HiddenLoss {
    fn cost(&self) -> Cost {
        let n = (self.tokens * self.hidden) as f64;
        Cost::new(6.0 * n, 2.0 * n)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (student, teacher, mask) = (args.ins[0], args.ins[1], args.ins[2]);
        let [loss, total, count] = args.outs else { unreachable!("hidden_loss has three outputs") };
        let loss = &mut loss[..self.tokens];
        par::rows_mut(loss, 1, par::block_rows(self.tokens, 4 * self.hidden), |first, block| {
            par::simd!(|| {
                for (i, loss) in block.iter_mut().enumerate() {
                    let s = row(student, first + i, self.ld_s, self.hidden);
                    let t = row(teacher, first + i, self.ld_t, self.hidden);
                    *loss = match self.distance {
                        HiddenDistance::MeanSquared => {
                            sum_zip(s, t, |s, t| (s - t) * (s - t)) * T::of(1.0 / self.hidden as f64)
                        }
                        HiddenDistance::Cosine => {
                            let (dot, a, b) = products(s, t);
                            T::ONE - dot / (a * b).sqrt()
                        }
                    };
                }
            })
        });
        (total[0], count[0]) = masked_sum(loss, mask);
    }
}

impl HiddenLossBackward {
    fn cost(&self) -> Cost {
        let n = (self.forward.tokens * self.forward.hidden) as f64;
        Cost::new(10.0 * n, 3.0 * n)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let [student, teacher, mask, scale] = *args.ins else { unreachable!("hidden_loss_backward has four inputs") };
        let f = &self.forward;
        let out = &mut args.outs[0][..span(f.tokens, self.ld_d, f.hidden)];
        par::rows_mut(out, self.ld_d, par::block_rows(f.tokens, 6 * f.hidden), |first, block| {
            par::simd!(|| {
                for (i, d) in block.chunks_mut(self.ld_d).enumerate() {
                    let s = row(student, first + i, f.ld_s, f.hidden);
                    let t = row(teacher, first + i, f.ld_t, f.hidden);
                    let factor = mask[first + i] * scale[0];
                    // Both gradients are of the form of_s s + of_t t.
                    let (of_s, of_t) = match f.distance {
                        HiddenDistance::MeanSquared => {
                            let two = factor * T::of(2.0 / f.hidden as f64);
                            (two, -two)
                        }
                        HiddenDistance::Cosine => {
                            let (dot, a, b) = products(s, t);
                            let inverse = factor / (a * b).sqrt();
                            (dot / a * inverse, -inverse)
                        }
                    };
                    for ((d, &s), &t) in d[..f.hidden].iter_mut().zip(s).zip(t) {
                        put(d, of_s * s + of_t * t, self.acc);
                    }
                }
            })
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, finite_differences, normal, relative_l2};
    use rstest::rstest;

    const T: usize = 4;
    const C: usize = 21;
    const MASK: [f64; T] = [1.0, 0.0, 0.5, 1.0];

    fn forward(s: &[f64], t: &[f64], distance: HiddenDistance) -> Call {
        let kernel = HiddenLoss { tokens: T, hidden: C, ld_s: C, ld_t: C, distance };
        let mut call = Call {
            ins: vec![s.to_vec(), t.to_vec(), MASK.to_vec()],
            outs: vec![vec![f64::NAN; T], vec![f64::NAN], vec![f64::NAN]],
            ..Call::default()
        };
        call.run(&kernel);
        let narrow = call.run_f32(&kernel);
        assert!(relative_l2(&narrow[0], &call.outs[0]) < 1e-5);
        call
    }

    #[test]
    fn matches_the_formula() {
        let (s, t) = (normal(1, T * C), normal(2, T * C));
        let mse = forward(&s, &t, HiddenDistance::MeanSquared);
        let cosine = forward(&s, &t, HiddenDistance::Cosine);
        for token in 0..T {
            let (s, t) = (&s[token * C..][..C], &t[token * C..][..C]);
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let square = s.iter().zip(t).map(|(s, t)| (s - t).powi(2)).sum::<f64>() / C as f64;
            assert!((mse.outs[0][token] - square).abs() < 1e-13);
            let cos = dot(s, t) / (dot(s, s) * dot(t, t)).sqrt();
            assert!((cosine.outs[0][token] - (1.0 - cos)).abs() < 1e-12);
        }
        let total: f64 = mse.outs[0].iter().zip(MASK).map(|(l, m)| l * m).sum();
        assert!((mse.outs[1][0] - total).abs() < 1e-12 && mse.outs[2][0] == 2.5);
    }

    #[rstest]
    fn gradients(
        #[values(HiddenDistance::MeanSquared, HiddenDistance::Cosine)] distance: HiddenDistance,
        #[values(false, true)] acc: bool,
    ) {
        let (s, t) = (normal(3, T * C), normal(4, T * C));
        let ld_d = C + 2;
        let mut call = Call {
            ins: vec![s.clone(), t.clone(), MASK.to_vec(), vec![0.7]],
            outs: vec![vec![if acc { 1.0 } else { f64::NAN }; span(T, ld_d, C)]],
            ..Call::default()
        };
        let forward_kernel = HiddenLoss { tokens: T, hidden: C, ld_s: C, ld_t: C, distance };
        call.run(&HiddenLossBackward { forward: forward_kernel, ld_d, acc });
        let grad: Vec<f64> =
            call.outs[0].chunks(ld_d).flat_map(|d| d[..C].iter().map(|g| if acc { g - 1.0 } else { *g })).collect();
        finite_differences("ds", &s, &grad, 1e-7, |s| 0.7 * forward(s, &t, distance).outs[1][0]);
    }
}
