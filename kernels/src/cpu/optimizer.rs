//! Optimiser kernels over flat parameter ranges, and the global-norm clip that precedes them.
//!
//! What changes from step to step (learning rate, decay, step number, gradient scale) comes in small operands, so a
//! recorded list of kernels serves every step. Chain: [`SquaredNorm`] of each range into one element (summed over
//! ranks by the host), [`ClipCoefficient`], then [`Adam`] of each range.
//!
//! Formulas as in Apex's FusedAdam and Megatron's clip_grads: g' = g * scale, with `L2` also + wd p;
//! m = b1 m + (1 - b1) g'; v = b2 v + (1 - b2) g'^2; update = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps), with
//! `Decoupled` also + wd p (Loshchilov and Hutter 2019); p -= lr update.

use super::elementwise::each_part;
use super::lanes;
use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;
use rayon::prelude::*;

/// How weight decay enters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    /// Into the update (AdamW).
    Decoupled,
    /// Into the gradient (Adam with L2).
    L2,
}

/// One step of Adam over n parameters.
///
/// ins: grad [n], hyper [3] = (lr, weight decay, step counted from 1), scale [1] (what gradients are multiplied by:
/// [`ClipCoefficient`]'s output); outs: p [n], m [n], v [n]. A scale that is NaN leaves everything as it is: the
/// gradients were not finite and the step is skipped.
#[derive(Clone, Debug)]
pub struct Adam {
    pub n: usize,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub decay: Decay,
    /// Multiplies the learning rate for these parameters.
    pub lr_mult: f64,
    /// Multiplies the weight decay for these parameters (0: none).
    pub wd_mult: f64,
}

impl Adam {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let [grad, hyper, scale] = args.ins else { panic!("adam takes 3 inputs") };
        let [p, m, v] = args.outs else { panic!("adam takes 3 outputs") };
        let scale = scale[0];
        if scale.to_f64().is_nan() {
            return;
        }
        let step = hyper[2].to_f64();
        let lr = T::of(hyper[0].to_f64() * self.lr_mult);
        let wd = T::of(hyper[1].to_f64() * self.wd_mult);
        let (b1, b2) = (T::of(self.beta1), T::of(self.beta2));
        let (c1, c2) = (T::of(1.0 - self.beta1), T::of(1.0 - self.beta2));
        let correct1 = T::of(1.0 / (1.0 - self.beta1.powf(step)));
        let correct2 = T::of(1.0 / (1.0 - self.beta2.powf(step)));
        let eps = T::of(self.eps);
        let decoupled = self.decay == Decay::Decoupled;
        let part = |grad: &[T], p: &mut [T], m: &mut [T], v: &mut [T]| {
            par::simd!(|| {
                for ((p, &g), (m, v)) in p.iter_mut().zip(grad).zip(m.iter_mut().zip(v)) {
                    let decay = wd * *p;
                    let g = g * scale + if decoupled { T::ZERO } else { decay };
                    *m = b1 * *m + c1 * g;
                    *v = b2 * *v + c2 * (g * g);
                    let update = (*m * correct1) / ((*v * correct2).sqrt() + eps);
                    *p -= lr * (update + if decoupled { decay } else { T::ZERO });
                }
            });
        };
        const PIECE: usize = 16 * 1024;
        let (grad, p, m, v) = (&grad[..self.n], &mut p[..self.n], &mut m[..self.n], &mut v[..self.n]);
        if self.n <= PIECE || rayon::current_num_threads() == 1 {
            part(grad, p, m, v);
        } else {
            let state = m.par_chunks_mut(PIECE).zip(v.par_chunks_mut(PIECE));
            let pieces = p.par_chunks_mut(PIECE).zip(grad.par_chunks(PIECE)).zip(state);
            pieces.for_each(|((p, grad), (m, v))| part(grad, p, m, v));
        }
    }

    fn cost(&self) -> Cost {
        Cost::new(15.0 * self.n as f64, 7.0 * self.n as f64)
    }
}

/// out[0] += sum of x^2 over n elements, accumulated in f64.
///
/// ins: x [n]; outs: out [1].
#[derive(Clone, Debug)]
pub struct SquaredNorm {
    pub n: usize,
}

impl SquaredNorm {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let x = &args.ins[0][..self.n];
        let block = self.n.div_ceil(par::MAX_PARTS).max(16 * 1024);
        let mut parts = [0.0; par::MAX_PARTS];
        each_part(&mut parts, self.n.div_ceil(block), |i| {
            let x = &x[i * block..((i + 1) * block).min(x.len())];
            par::simd!(|| lanes::sum1(x, |x| x.to_f64() * x.to_f64()))
        });
        args.outs[0][0] += T::of(parts.iter().sum());
    }

    fn cost(&self) -> Cost {
        Cost::new(2.0 * self.n as f64, self.n as f64)
    }
}

/// The gradient scale of a step: scale = prescale * min(1, max_norm / (norm + 1e-6)), norm = prescale sqrt(square).
///
/// ins: square [1] (sum of squares of all gradients as stored), prescale [1] (1 / loss scale, or 1 / tokens);
/// outs: scale [1], norm [1]. `max_norm` 0 or less clips nothing. When the norm is not finite, scale is NaN, at which
/// [`Adam`] skips.
#[derive(Clone, Debug)]
pub struct ClipCoefficient {
    pub max_norm: f64,
}

impl ClipCoefficient {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let [square, prescale] = args.ins else { panic!("clip_coefficient takes 2 inputs") };
        let [scale, norm] = args.outs else { panic!("clip_coefficient takes 2 outputs") };
        let prescale = prescale[0].to_f64();
        let n = prescale * square[0].to_f64().sqrt();
        let coefficient = match self.max_norm / (n + 1e-6) {
            _ if !n.is_finite() => f64::NAN,
            c if self.max_norm > 0.0 && c < 1.0 => c,
            _ => 1.0,
        };
        norm[0] = T::of(n);
        scale[0] = T::of(prescale * coefficient);
    }

    fn cost(&self) -> Cost {
        Cost::new(4.0, 4.0)
    }
}

crate::kernels! {
    Adam => "adam";
    SquaredNorm => "squared_norm";
    ClipCoefficient => "clip_coefficient";
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, normal, relative_l2};
    use rstest::rstest;

    fn adam(n: usize, decay: Decay) -> Adam {
        Adam { n, beta1: 0.9, beta2: 0.95, eps: 1e-3, decay, lr_mult: 2.0, wd_mult: 0.5 }
    }

    /// Three steps from known state, element by element, with the formulas of the paper.
    #[rstest]
    fn steps(#[values(Decay::Decoupled, Decay::L2)] decay: Decay, #[values(5, 40_000)] n: usize) {
        let (mut p, mut m, mut v) = (normal(1, n), vec![0.0; n], vec![0.0; n]);
        let mut call = Call { outs: vec![p.clone(), m.clone(), v.clone()], ..Default::default() };
        for step in 1..=3 {
            let (lr, wd, scale) = (0.1 / f64::from(step), 0.3, 0.7);
            let grad = normal(10 + step as u32, n);
            call.ins = vec![grad.clone(), vec![lr, wd, f64::from(step)], vec![scale]];
            let single = call.run_f32(&adam(n, decay));
            call.run(&adam(n, decay));
            for i in 0..n {
                let l2 = if decay == Decay::L2 { 0.5 * wd * p[i] } else { 0.0 };
                let g = grad[i] * scale + l2;
                m[i] = 0.9 * m[i] + 0.1 * g;
                v[i] = 0.95 * v[i] + 0.05 * g * g;
                let update = m[i] / (1.0 - 0.9f64.powi(step)) / ((v[i] / (1.0 - 0.95f64.powi(step))).sqrt() + 1e-3);
                let decoupled = if decay == Decay::Decoupled { 0.5 * wd * p[i] } else { 0.0 };
                p[i] -= 2.0 * lr * (update + decoupled);
            }
            for (got, want) in call.outs.iter().zip([&p, &m, &v]) {
                assert!(relative_l2(got, want) < 1e-14);
            }
            for (single, double) in single.iter().zip(&call.outs) {
                assert!(relative_l2(single, double) < 1e-6);
            }
        }
    }

    #[test]
    fn a_step_with_nan_scale_changes_nothing() {
        let n = 5;
        let mut call = Call {
            ins: vec![vec![f64::INFINITY; n], vec![0.1, 0.1, 1.0], vec![f64::NAN]],
            outs: vec![normal(1, n), normal(2, n), vec![1.0; n]],
            ..Default::default()
        };
        let before = call.outs.clone();
        call.run(&adam(n, Decay::Decoupled));
        assert_eq!(call.outs, before);
    }

    #[test]
    fn squared_norm_adds_and_is_precise() {
        for n in [0, 3, 100_000] {
            let x = normal(1, n);
            let mut call = Call { ins: vec![x.clone()], outs: vec![vec![2.0]], ..Default::default() };
            let single = call.run_f32(&SquaredNorm { n });
            call.run(&SquaredNorm { n });
            let want = 2.0 + x.iter().map(|x| x * x).sum::<f64>();
            assert!((call.outs[0][0] / want - 1.0).abs() < 1e-13);
            assert!((single[0][0] / want - 1.0).abs() < 2e-7);
        }
    }

    #[rstest]
    #[case(1.0, 16.0, 0.5, 0.5 / (2.0 + 1e-6))]
    #[case(1.0, 1.0, 0.5, 0.5)]
    #[case(1.0, 0.0, 1.0, 1.0)]
    #[case(0.0, 100.0, 1.0, 1.0)]
    #[case(1.0, f64::INFINITY, 1.0, f64::NAN)]
    #[case(0.0, f64::NAN, 1.0, f64::NAN)]
    fn clip(#[case] max_norm: f64, #[case] square: f64, #[case] prescale: f64, #[case] want: f64) {
        let mut call =
            Call { ins: vec![vec![square], vec![prescale]], outs: vec![vec![0.0], vec![0.0]], ..Default::default() };
        call.run(&ClipCoefficient { max_norm });
        let got = call.outs[0][0];
        assert!((got - want).abs() < 1e-15 || (got.is_nan() && want.is_nan()), "{got}");
        let norm = prescale * square.sqrt();
        assert!(call.outs[1][0] == norm || norm.is_nan());
    }
}
