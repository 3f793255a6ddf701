//! Learning rate and weight decay as functions of the number of finished steps.
//!
//! The curves are those of Megatron-LM's `OptimizerParamScheduler`. With n finished steps, w warm-up steps, d decay
//! steps (warm-up included), learning rates init, max and min:
//!
//! - n <= w, w > 0: init + (max - init) n / w
//! - constant: max. Else n > d: min
//! - inverse square root: max(min, max sqrt(max(w, 1) / max(n, 1)))
//! - else min + c (max - min), with r = (n - w) / (d - w): linear c = 1 - r; cosine c = (cos(pi r) + 1) / 2;
//!   warm-up-stable-decay c = 1 until n = d - s (s steps of decay), then with r = (n - (d - s)) / s: linear and cosine
//!   as above, exponential c = 2 * 0.5^r - 1, minus square root c = 1 - sqrt(r)
//!
//! Weight decay rises from start to end over k steps: start + c (end - start), linear c = n / k, cosine
//! c = (cos(pi (1 - n / k)) + 1) / 2; end for n > k.
//!
//! Step s (from 1) is taken with the values at n = s - 1, so a warm-up from 0 makes the first step with learning rate 0.

use crate::recipe::{Recipe, ScheduleKind, WeightDecayKind, WsdDecay};
use std::f64::consts::PI;

/// The learning-rate curve.
#[derive(Clone, Debug, PartialEq)]
pub struct LearningRate {
    pub kind: ScheduleKind,
    pub init: f64,
    pub max: f64,
    pub min: f64,
    pub warmup_steps: u64,
    /// Steps until `min`, warm-up included.
    pub decay_steps: u64,
    /// Length and shape of the last phase of [`ScheduleKind::Wsd`].
    pub wsd_decay_steps: u64,
    pub wsd_decay: WsdDecay,
}

/// The weight-decay curve.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightDecay {
    pub kind: WeightDecayKind,
    pub start: f64,
    pub end: f64,
    pub steps: u64,
}

/// Both curves of a recipe.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    pub lr: LearningRate,
    pub weight_decay: WeightDecay,
}

impl Schedule {
    pub fn new(recipe: &Recipe) -> Schedule {
        let (schedule, optimizer, steps) = (&recipe.schedule, &recipe.optimizer, recipe.train.steps);
        Schedule {
            lr: LearningRate {
                kind: schedule.kind,
                init: schedule.init_lr,
                max: optimizer.lr,
                min: optimizer.min_lr,
                warmup_steps: schedule.warmup_steps,
                decay_steps: schedule.decay_steps.unwrap_or(steps),
                wsd_decay_steps: schedule.wsd_decay_steps.unwrap_or(0),
                wsd_decay: schedule.wsd_decay,
            },
            weight_decay: WeightDecay {
                kind: schedule.weight_decay_kind,
                start: schedule.weight_decay_start.unwrap_or(optimizer.weight_decay),
                end: schedule.weight_decay_end.unwrap_or(optimizer.weight_decay),
                steps: schedule.weight_decay_steps.unwrap_or(steps),
            },
        }
    }

    /// (learning rate, weight decay) that step `step`, counted from 1, is taken with.
    pub fn at_step(&self, step: u64) -> (f64, f64) {
        let finished = step.saturating_sub(1);
        (self.lr.after(finished), self.weight_decay.after(finished))
    }
}

impl LearningRate {
    /// The learning rate after `n` finished steps.
    pub fn after(&self, n: u64) -> f64 {
        let (warmup, decay) = (self.warmup_steps, self.decay_steps);
        if warmup > 0 && n <= warmup {
            return self.init + (self.max - self.init) * n as f64 / warmup as f64;
        }
        if self.kind == ScheduleKind::Constant {
            return self.max;
        }
        if n > decay {
            return self.min;
        }
        let ratio = (n - warmup) as f64 / (decay - warmup) as f64;
        let coefficient = match self.kind {
            ScheduleKind::InverseSquareRoot => {
                let lr = self.max * (warmup.max(1) as f64).sqrt() / (n.max(1) as f64).sqrt();
                return lr.max(self.min);
            }
            ScheduleKind::Constant => 1.0,
            ScheduleKind::Linear => 1.0 - ratio,
            ScheduleKind::Cosine => cosine(ratio),
            ScheduleKind::Wsd => self.wsd(n),
        };
        self.min + coefficient * (self.max - self.min)
    }

    fn wsd(&self, n: u64) -> f64 {
        let start = self.decay_steps.saturating_sub(self.wsd_decay_steps);
        if n <= start {
            return 1.0;
        }
        let ratio = (n - start) as f64 / self.wsd_decay_steps as f64;
        match self.wsd_decay {
            WsdDecay::Linear => 1.0 - ratio,
            WsdDecay::Cosine => cosine(ratio),
            WsdDecay::Exponential => 2.0 * 0.5f64.powf(ratio) - 1.0,
            WsdDecay::MinusSqrt => 1.0 - ratio.sqrt(),
        }
    }
}

impl WeightDecay {
    /// The weight decay after `n` finished steps.
    pub fn after(&self, n: u64) -> f64 {
        if n > self.steps {
            return self.end;
        }
        let ratio = n as f64 / self.steps as f64;
        let coefficient = match self.kind {
            WeightDecayKind::Constant => return self.end,
            WeightDecayKind::Linear => ratio,
            WeightDecayKind::Cosine => cosine(1.0 - ratio),
        };
        self.start + coefficient * (self.end - self.start)
    }
}

/// Half a cosine from 1 at 0 to 0 at 1.
fn cosine(ratio: f64) -> f64 {
    0.5 * ((PI * ratio).cos() + 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn curve(kind: ScheduleKind, warmup_steps: u64, wsd_decay: WsdDecay) -> LearningRate {
        let (init, max, min) = (0.0, 1e-3, 1e-4);
        LearningRate { kind, init, max, min, warmup_steps, decay_steps: 45, wsd_decay_steps: 15, wsd_decay }
    }

    /// Values computed with Megatron's class.
    #[rstest]
    #[case::warmup_begin(ScheduleKind::Cosine, 5, WsdDecay::Linear, 0, 0.0)]
    #[case::warmup(ScheduleKind::Cosine, 5, WsdDecay::Linear, 3, 0.0006000000000000001)]
    #[case::cosine(ScheduleKind::Cosine, 5, WsdDecay::Linear, 6, 0.0009986128001799076)]
    #[case::cosine_end(ScheduleKind::Cosine, 5, WsdDecay::Linear, 45, 1e-4)]
    #[case::after_decay(ScheduleKind::Linear, 5, WsdDecay::Linear, 52, 1e-4)]
    #[case::linear(ScheduleKind::Linear, 5, WsdDecay::Linear, 7, 0.000955)]
    #[case::no_warmup(ScheduleKind::Cosine, 0, WsdDecay::Linear, 2, 0.0009956206309337066)]
    #[case::constant(ScheduleKind::Constant, 5, WsdDecay::Linear, 52, 1e-3)]
    #[case::inverse_square_root(ScheduleKind::InverseSquareRoot, 0, WsdDecay::Linear, 2, 0.0007071067811865475)]
    #[case::wsd_stable(ScheduleKind::Wsd, 5, WsdDecay::Cosine, 30, 1e-3)]
    #[case::wsd_linear(ScheduleKind::Wsd, 5, WsdDecay::Linear, 45, 1e-4)]
    #[case::wsd_exponential(ScheduleKind::Wsd, 5, WsdDecay::Exponential, 45, 1e-4)]
    fn learning_rate(
        #[case] kind: ScheduleKind,
        #[case] warmup: u64,
        #[case] wsd_decay: WsdDecay,
        #[case] n: u64,
        #[case] expected: f64,
    ) {
        let lr = curve(kind, warmup, wsd_decay).after(n);
        assert!((lr - expected).abs() <= 1e-9 * expected, "{lr} against {expected}");
    }

    #[rstest]
    #[case(WeightDecayKind::Linear, 0.01, 0.2, 1, 0.014750000000000001)]
    #[case(WeightDecayKind::Cosine, 0.0, 0.3, 1, 0.0004623999400308054)]
    #[case(WeightDecayKind::Cosine, 0.0, 0.3, 2, 0.001846748910729351)]
    #[case(WeightDecayKind::Linear, 0.01, 0.2, 52, 0.2)]
    fn weight_decay(
        #[case] kind: WeightDecayKind,
        #[case] start: f64,
        #[case] end: f64,
        #[case] n: u64,
        #[case] expected: f64,
    ) {
        let value = WeightDecay { kind, start, end, steps: 40 }.after(n);
        assert!((value - expected).abs() <= 1e-9 * expected, "{value} against {expected}");
    }

    #[test]
    fn warmup_may_outlast_the_decay() {
        let lr = LearningRate { decay_steps: 3, ..curve(ScheduleKind::Cosine, 5, WsdDecay::Linear) };
        assert_eq!((lr.after(4), lr.after(5), lr.after(6)), (8e-4, 1e-3, 1e-4));
    }

    #[test]
    fn first_step_uses_the_value_before_any_step() {
        let weight_decay = WeightDecay { kind: WeightDecayKind::Constant, start: 0.1, end: 0.1, steps: 40 };
        let schedule = Schedule { lr: curve(ScheduleKind::Cosine, 5, WsdDecay::Linear), weight_decay };
        assert_eq!(schedule.at_step(1), (0.0, 0.1));
        assert_eq!(schedule.at_step(6), (1e-3, 0.1));
    }
}
