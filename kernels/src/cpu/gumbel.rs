//! Gumbel-softmax over the last axis (Jang et al., 2017; Maddison et al., 2017), soft or straight-through.
//!
//!   g = -ln(-ln u), u uniform in (0, 1)      p = softmax((scale * logits + g) / tau)
//! Soft: y = p. Hard: y = one-hot of the arg max of p (the first one on a tie), with the gradient of p.
//!   dlogits = scale / tau * p (dy - sum_c p dy)
//! tau and scale are one-element tensors without gradient, so that a schedule changes no recorded kernel.

use super::softmax::{put, sum_zip};
use crate::kernel::{Args, Cost};
use crate::philox::Stream;
use crate::real::Real;

/// Where the noise of [`GumbelSoftmax`] comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GumbelNoise {
    /// No noise: a plain tempered softmax.
    Zero,
    /// The tensor `ins[3]` [rows, cols] holds g.
    Given,
    /// Drawn at (seed, stream, step, sample * rows * cols + r * cols + c).
    Drawn { seed: u64, stream: u32 },
}

/// Gumbel-softmax of each row.
///
/// ins: logits [rows, cols], tau [1], scale [1], and with [`GumbelNoise::Given`] noise [rows, cols];
/// ints, with [`GumbelNoise::Drawn`]: step [1], sample [1] (which draw of the step this is);
/// outs: y [rows, cols], p [rows, cols] (the soft sample, needed by the backward);
/// int_outs: choice [rows], the arg max of p.
#[derive(Clone, Copy, Debug)]
pub struct GumbelSoftmax {
    pub rows: usize,
    pub cols: usize,
    /// y is one-hot (straight-through) instead of p.
    pub hard: bool,
    pub noise: GumbelNoise,
}

/// Gradient of [`GumbelSoftmax`], soft and hard alike.
///
/// ins: p [rows, cols], dy [rows, cols], tau [1], scale [1]; outs: dlogits [rows, cols].
#[derive(Clone, Copy, Debug)]
pub struct GumbelSoftmaxBackward {
    pub rows: usize,
    pub cols: usize,
    pub acc: bool,
}

crate::kernels! {
    GumbelSoftmax => "gumbel_softmax";
    GumbelSoftmaxBackward => "gumbel_softmax_backward";
}

/// Standard Gumbel noise at `position`.
fn gumbel(stream: &Stream, position: u64) -> f64 {
    -(-stream.uniform(position).ln()).ln()
}

impl GumbelSoftmax {
    fn cost(&self) -> Cost {
        let n = (self.rows * self.cols) as f64;
        Cost::new(40.0 * n, 4.0 * n)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (rows, cols) = (self.rows, self.cols);
        let (logits, tau, scale) = (args.ins[0], args.ins[1][0], args.ins[2][0]);
        let [y, p] = args.outs else { unreachable!("gumbel_softmax has two outputs") };
        for (r, choice) in args.int_outs[0].iter_mut().enumerate().take(rows) {
            let window = r * cols..(r + 1) * cols;
            let (x, p, y) = (&logits[window.clone()], &mut p[window.clone()], &mut y[window.clone()]);
            match self.noise {
                GumbelNoise::Zero => p.iter_mut().zip(x).for_each(|(p, &x)| *p = scale * x / tau),
                GumbelNoise::Given => {
                    for ((p, &x), &g) in p.iter_mut().zip(x).zip(&args.ins[3][window]) {
                        *p = (scale * x + g) / tau;
                    }
                }
                GumbelNoise::Drawn { seed, stream } => {
                    let stream = Stream::new(seed, stream, args.ints[0][0] as u32);
                    let first = u64::from(args.ints[1][0] as u32) * (rows * cols) as u64 + (r * cols) as u64;
                    for ((p, &x), position) in p.iter_mut().zip(x).zip(first..) {
                        *p = (scale * x + T::of(gumbel(&stream, position))) / tau;
                    }
                }
            }
            let (best, max) =
                p.iter().enumerate().fold((0, T::NEG_INFINITY), |a, (c, &v)| if v > a.1 { (c, v) } else { a });
            let mut sum = T::ZERO;
            for p in p.iter_mut() {
                *p = (*p - max).exp();
                sum += *p;
            }
            for (c, (p, y)) in p.iter_mut().zip(y).enumerate() {
                *p /= sum;
                *y = match self.hard {
                    false => *p,
                    true if c == best => T::ONE,
                    true => T::ZERO,
                };
            }
            *choice = best as i32;
        }
    }
}

impl GumbelSoftmaxBackward {
    fn cost(&self) -> Cost {
        let n = (self.rows * self.cols) as f64;
        Cost::new(5.0 * n, 3.0 * n)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (p, dy) = (args.ins[0], args.ins[1]);
        let factor = args.ins[3][0] / args.ins[2][0];
        let dx = &mut *args.outs[0];
        for r in 0..self.rows {
            let window = r * self.cols..(r + 1) * self.cols;
            let (p, dy) = (&p[window.clone()], &dy[window.clone()]);
            let dot = sum_zip(p, dy, |p, g| p * g);
            for ((dx, &p), &dy) in dx[window].iter_mut().zip(p).zip(dy) {
                put(dx, factor * p * (dy - dot), self.acc);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, finite_differences, normal, relative_l2};
    use rstest::rstest;

    const ROWS: usize = 3;
    const COLS: usize = 4;

    fn forward(logits: &[f64], hard: bool, noise: GumbelNoise, given: &[f64], ints: Vec<Vec<i32>>) -> Call {
        let mut call = Call {
            ins: vec![logits.to_vec(), vec![0.7], vec![2.5], given.to_vec()],
            outs: vec![vec![f64::NAN; ROWS * COLS]; 2],
            ints,
            int_outs: vec![vec![-1; ROWS]],
        };
        call.run(&GumbelSoftmax { rows: ROWS, cols: COLS, hard, noise });
        call
    }

    #[test]
    fn soft_and_hard_follow_the_formula() {
        let (x, g) = (normal(1, ROWS * COLS), normal(2, ROWS * COLS));
        let soft = forward(&x, false, GumbelNoise::Given, &g, vec![]);
        let hard = forward(&x, true, GumbelNoise::Given, &g, vec![]);
        for r in 0..ROWS {
            let e: Vec<f64> = (0..COLS).map(|c| ((2.5 * x[r * COLS + c] + g[r * COLS + c]) / 0.7).exp()).collect();
            let z: f64 = e.iter().sum();
            let best = (0..COLS).max_by(|&a, &b| e[a].total_cmp(&e[b])).unwrap();
            assert_eq!([soft.int_outs[0][r], hard.int_outs[0][r]], [best as i32; 2]);
            for (c, e) in e.iter().enumerate() {
                let i = r * COLS + c;
                assert!((soft.outs[0][i] - e / z).abs() < 1e-14);
                assert_eq!(soft.outs[0][i], hard.outs[1][i]);
                assert_eq!(hard.outs[0][i], f64::from(u8::from(c == best)));
            }
        }
        let narrow = soft.run_f32(&GumbelSoftmax { rows: ROWS, cols: COLS, hard: false, noise: GumbelNoise::Given });
        assert!(relative_l2(&narrow[0], &soft.outs[0]) < 1e-5);
    }

    #[rstest]
    fn gradient(#[values(false, true)] acc: bool) {
        let (x, g, dy) = (normal(3, ROWS * COLS), normal(4, ROWS * COLS), normal(5, ROWS * COLS));
        let p = forward(&x, true, GumbelNoise::Given, &g, vec![]).outs[1].clone();
        let mut call = Call {
            ins: vec![p, dy.clone(), vec![0.7], vec![2.5]],
            outs: vec![vec![if acc { 1.0 } else { f64::NAN }; ROWS * COLS]],
            ..Call::default()
        };
        call.run(&GumbelSoftmaxBackward { rows: ROWS, cols: COLS, acc });
        let grad: Vec<f64> = call.outs[0].iter().map(|g| if acc { g - 1.0 } else { *g }).collect();
        finite_differences("dlogits", &x, &grad, 1e-7, |x| {
            let y = forward(x, false, GumbelNoise::Given, &g, vec![]);
            y.outs[0].iter().zip(&dy).map(|(y, g)| y * g).sum()
        });
    }

    #[test]
    fn drawn_noise_is_addressed_by_step_and_sample() {
        let noise = GumbelNoise::Drawn { seed: 11, stream: 3 };
        let x = vec![0.0; ROWS * COLS];
        let draw = |step, sample| forward(&x, false, noise, &[], vec![vec![step], vec![sample]]).outs[0].clone();
        assert_eq!(draw(4, 2), draw(4, 2));
        assert_ne!(draw(4, 2), draw(4, 3));
        assert_ne!(draw(4, 2), draw(5, 2));
    }

    /// Gumbel-max: the arg max of logits + g is distributed as softmax(logits); the noise has mean gamma, variance pi^2/6.
    #[test]
    fn drawn_noise_has_the_gumbel_distribution() {
        let stream = Stream::new(5, 6, 7);
        let n = 20_000u64;
        let draws: Vec<f64> = (0..n).map(|i| gumbel(&stream, i)).collect();
        let mean = draws.iter().sum::<f64>() / n as f64;
        let var = draws.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / n as f64;
        assert!((mean - 0.577_215_664_9).abs() < 0.03, "mean {mean}");
        assert!((var - std::f64::consts::PI.powi(2) / 6.0).abs() < 0.07, "variance {var}");
    }
}
