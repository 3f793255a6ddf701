//! Masks over the units of an elastic axis (channels, heads, groups, experts), built from choice probabilities;
//! `mask_mul` multiplies them onto activations.
//!
//! An axis of size S offers prefix choices; M_c keeps units u < choice_c, and r_c = choice_c / S.
//! - soft: m = sum_c p_c M_c; e = sum_c p_c r_c; s = sum_c p_c sqrt(r_c)
//! - hard: one choice n: m = gain M_n; e = n / S; s = gain sqrt(n / S), where gain (1 unless given) carries the gradient
//!
//! e scales a norm's eps and s its output (see `rms_norm`); e carries no gradient. A rank holds the units
//! u = local * parts + part of a cyclic shard.

use crate::cpu::lanes;
use crate::kernel::{Args, Cost};
use crate::real::Real;

/// How a mask follows from its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskKind {
    /// The input holds one probability per choice.
    Soft,
    /// The single choice, without input.
    Hard,
    /// The single choice times the input, one element.
    HardGain,
}

/// Which units an axis keeps.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    pub kind: MaskKind,
    /// Units kept by each choice; exactly one unless the kind is soft.
    pub choices: Vec<usize>,
    /// S: units of the whole axis.
    pub size: usize,
    /// Units on this rank.
    pub units: usize,
    pub part: usize,
    pub parts: usize,
}

impl Axis {
    fn ratio(&self, choice: usize) -> f64 {
        choice as f64 / self.size as f64
    }

    /// Local units below a choice of the whole axis.
    fn local(&self, choice: usize) -> usize {
        (choice.saturating_sub(self.part)).div_ceil(self.parts).min(self.units)
    }

    /// (choice, its weight) for the probabilities or the gain in `ins`.
    fn weighted<'a, T: Real>(&'a self, ins: &'a [&'a [T]]) -> impl Iterator<Item = (usize, T)> + 'a {
        let weight = move |c: usize| if self.kind == MaskKind::Hard { T::ONE } else { ins[0][c] };
        self.choices.iter().enumerate().map(move |(c, &choice)| (choice, weight(c)))
    }
}

/// Builds m, e and s.
///
/// ins: p [choices] (soft), gain [1] (hard with gain) or none; outs: m [units], e [1], s [1].
#[derive(Clone, Debug)]
pub struct AxisMask(pub Axis);

impl AxisMask {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let [m, e, s] = args.outs else { panic!("axis_mask takes 3 outputs") };
        let axis = &self.0;
        m[..axis.units].fill(T::ZERO);
        (e[0], s[0]) = (T::ZERO, T::ZERO);
        for (choice, p) in axis.weighted(args.ins) {
            m[..axis.local(choice)].iter_mut().for_each(|m| *m += p);
            e[0] += T::of(axis.ratio(choice)) * if axis.kind == MaskKind::Soft { p } else { T::ONE };
            s[0] += T::of(axis.ratio(choice).sqrt()) * p;
        }
    }

    fn cost(&self) -> Cost {
        Cost::new((self.0.units * self.0.choices.len()) as f64, self.0.units as f64)
    }
}

/// dp_c += sum_u dm[u] [u < choice_c] + ds sqrt(r_c); for a hard mask the same is the gradient of its gain.
///
/// ins: dm [units] when `mask`, ds [1] when `scale`; outs: dp [choices] or dgain [1].
#[derive(Clone, Debug)]
pub struct AxisMaskBackward {
    pub axis: Axis,
    /// Whether dm is given.
    pub mask: bool,
    /// Whether ds is given.
    pub scale: bool,
}

impl AxisMaskBackward {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let dp = &mut *args.outs[0];
        for (dp, &choice) in dp.iter_mut().zip(&self.axis.choices) {
            if self.mask {
                *dp += lanes::sum1(&args.ins[0][..self.axis.local(choice)], |dm| dm);
            }
            if self.scale {
                *dp += args.ins[usize::from(self.mask)][0] * T::of(self.axis.ratio(choice).sqrt());
            }
        }
    }

    fn cost(&self) -> Cost {
        Cost::new((self.axis.units * self.axis.choices.len()) as f64, self.axis.units as f64)
    }
}

crate::kernels! {
    AxisMask => "axis_mask";
    AxisMaskBackward => "axis_mask_backward";
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, finite_differences, normal};

    fn axis(kind: MaskKind, part: usize, parts: usize) -> Axis {
        let choices = if kind == MaskKind::Soft { vec![3, 6, 10] } else { vec![6] };
        Axis { kind, choices, size: 10, units: (10 + parts - 1 - part) / parts, part, parts }
    }

    fn build(axis: &Axis, p: &[f64]) -> Call {
        let ins = if axis.kind == MaskKind::Hard { vec![] } else { vec![p.to_vec()] };
        let outs = vec![vec![9.0; axis.units], vec![9.0], vec![9.0]];
        let mut call = Call { ins, outs, ..Default::default() };
        call.run(&AxisMask(axis.clone()));
        call
    }

    #[test]
    fn masks_of_every_kind_and_shard() {
        let p = [0.2, 0.5, 0.3];
        for parts in [1, 2, 3, 4] {
            for part in 0..parts {
                let unit = |local: usize| local * parts + part;
                let soft = build(&axis(MaskKind::Soft, part, parts), &p);
                for (local, &m) in soft.outs[0].iter().enumerate() {
                    let want = [(3, 0.2), (6, 0.5), (10, 0.3)].iter().filter(|c| unit(local) < c.0).map(|c| c.1);
                    assert!((m - want.sum::<f64>()).abs() < 1e-15);
                }
                assert!((soft.outs[1][0] - (0.2 * 0.3 + 0.5 * 0.6 + 0.3)).abs() < 1e-15);
                let s = 0.2 * 0.3f64.sqrt() + 0.5 * 0.6f64.sqrt() + 0.3;
                assert!((soft.outs[2][0] - s).abs() < 1e-15);
                for (kind, gain) in [(MaskKind::Hard, 1.0), (MaskKind::HardGain, 0.7)] {
                    let hard = build(&axis(kind, part, parts), &[0.7]);
                    for (local, &m) in hard.outs[0].iter().enumerate() {
                        assert_eq!(m, if unit(local) < 6 { gain } else { 0.0 });
                    }
                    assert_eq!(hard.outs[1][0], 0.6);
                    assert!((hard.outs[2][0] - gain * 0.6f64.sqrt()).abs() < 1e-15);
                }
            }
        }
    }

    #[test]
    fn probability_and_gain_gradients() {
        for (kind, p) in [(MaskKind::Soft, vec![0.2, 0.5, 0.3]), (MaskKind::HardGain, vec![0.7])] {
            for (mask, scale) in [(true, true), (true, false), (false, true)] {
                let axis = axis(kind, 1, 2);
                let (dm, ds) = (normal(1, axis.units), 0.4);
                let loss = |p: &[f64]| {
                    let built = build(&axis, p);
                    let along_m: f64 = built.outs[0].iter().zip(&dm).map(|(m, d)| m * d).sum();
                    f64::from(mask) * along_m + f64::from(scale) * built.outs[2][0] * ds
                };
                let mut ins = vec![];
                ins.extend(mask.then(|| dm.clone()));
                ins.extend(scale.then(|| vec![ds]));
                let mut back = Call { ins, outs: vec![vec![0.0; p.len()]], ..Default::default() };
                let kernel = AxisMaskBackward { axis: axis.clone(), mask, scale };
                back.run(&kernel);
                finite_differences("dp", &p, &back.outs[0], 1e-8, loss);
                let once = back.outs[0].clone();
                back.run(&kernel);
                assert!(back.outs[0].iter().zip(&once).all(|(twice, once)| (twice - 2.0 * once).abs() < 1e-12));
            }
        }
    }
}
