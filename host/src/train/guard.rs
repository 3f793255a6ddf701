//! What happens to a step before it may change the parameters: NaN, infinity and loss spikes.
//!
//! A step whose loss or gradient norm is not finite, or whose loss is a spike, is either the end of the run or left out
//! (`train.on_nonfinite`). A spike is a loss above `train.spike_factor` times the mean loss of the last
//! `train.spike_window` steps that were taken; until there are that many, nothing is one. Against a mean that follows the
//! run, a factor means the same early and late. (Megatron-LM compares with the largest loss of the first 100 samples,
//! which that of an untrained model is, so that a late spike has to be worse than no training at all.)
//!
//! A step that is left out changes no parameter, moment or buffer, and Adam's bias correction does not count it; data and
//! schedules go on. The state below is part of checkpoints.

use super::StepReport;
use crate::error::{Error, Result};
use crate::recipe::{OnNonfinite, Recipe};
use serde_json::{Value, json};
use std::collections::VecDeque;

/// Where a number that is not finite comes from.
#[derive(Clone, Debug, PartialEq)]
pub struct Diagnosis {
    pub place: String,
    /// The number itself.
    pub value: f64,
}

/// What is to be done with a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    Apply,
    /// Leave it out, and why.
    Skip(String),
    /// End the run: why, for the metrics, and the failure.
    Stop(String, Error),
}

/// The judge of a run's steps.
#[derive(Clone, Debug)]
pub struct Guard {
    on_nonfinite: OnNonfinite,
    /// Steps in a row that may be left out.
    most: u64,
    factor: Option<f64>,
    window: usize,
    /// Steps left out so far.
    skipped: u64,
    /// Of these, those after the last one that was taken.
    in_a_row: u64,
    /// Losses of the last steps taken, oldest first.
    losses: VecDeque<f64>,
}

impl Guard {
    pub fn new(recipe: &Recipe) -> Guard {
        let train = &recipe.train;
        Guard {
            on_nonfinite: train.on_nonfinite,
            most: train.max_skipped_steps,
            factor: train.spike_factor,
            window: train.spike_window,
            skipped: 0,
            in_a_row: 0,
            losses: VecDeque::with_capacity(train.spike_window + 1),
        }
    }

    /// The number of the update that a step makes if it is taken.
    pub fn update(&self, step: u64) -> u64 {
        step - self.skipped
    }

    /// Steps left out so far, where steps may be left out.
    pub fn skipped(&self) -> Option<u64> {
        (self.on_nonfinite == OnNonfinite::Skip).then_some(self.skipped)
    }

    /// Judges a step by its report, before its update. `diagnose` looks for the origin of a NaN.
    pub fn judge(
        &mut self,
        step: u64,
        report: &StepReport,
        diagnose: impl FnOnce() -> Result<Option<Diagnosis>>,
    ) -> Result<Verdict> {
        let loss = report.loss_sum / report.tokens.max(1) as f64;
        let (why, failure) = if let Some(number) = nonfinite(report) {
            let diagnosis = diagnose()?;
            let place = diagnosis.as_ref().map_or(format!("the {number}, step {step}"), |found| found.place.clone());
            let mut failure = Error::numerical(format!("NaN or infinity in {place}"));
            if let Some(Diagnosis { value, .. }) = diagnosis {
                failure = failure.detail(format!("the first such number is {value}"));
            }
            (format!("nan in {place}"), failure)
        } else if let Some((mean, factor)) = self.spike(loss) {
            let sentence = format!(
                "loss spike in step {step}: {loss:.4} nats per token are {:.2} times the mean of the last {} steps, \
                 {mean:.4}; train.spike_factor is {factor}",
                loss / mean,
                self.window
            );
            (sentence.clone(), Error::numerical(sentence))
        } else {
            self.in_a_row = 0;
            if self.factor.is_some() && report.tokens > 0 {
                self.losses.push_back(loss);
                while self.losses.len() > self.window {
                    self.losses.pop_front();
                }
            }
            return Ok(Verdict::Apply);
        };
        let lower = "lower optimizer.lr or lengthen schedule.warmup_steps";
        match self.on_nonfinite {
            OnNonfinite::Skip if self.in_a_row < self.most => {
                self.in_a_row += 1;
                self.skipped += 1;
                Ok(Verdict::Skip(why))
            }
            OnNonfinite::Skip => {
                let limit = format!("{} steps in a row were left out before (train.max_skipped_steps)", self.in_a_row);
                Ok(Verdict::Stop(
                    why,
                    failure.detail(limit).remedy(format!("go on from the newest checkpoint: {lower}")),
                ))
            }
            OnNonfinite::Stop => {
                let remedy = format!(
                    "go on from the newest checkpoint: {lower}, or leave such steps out with train.on_nonfinite: skip"
                );
                Ok(Verdict::Stop(why, failure.remedy(remedy)))
            }
        }
    }

    /// The mean that a loss is a spike against, and the factor.
    fn spike(&self, loss: f64) -> Option<(f64, f64)> {
        let factor = self.factor.filter(|_| self.losses.len() >= self.window)?;
        let mean = self.losses.iter().rev().take(self.window).sum::<f64>() / self.window as f64;
        (mean > 0.0 && loss > factor * mean).then_some((mean, factor))
    }

    /// For a checkpoint. Losses are written as their bits: decimals are not read back exactly.
    pub fn save(&self) -> Value {
        let losses: Vec<u64> = self.losses.iter().map(|loss| loss.to_bits()).collect();
        json!({"skipped": self.skipped, "in_a_row": self.in_a_row, "loss_bits": losses})
    }

    /// Takes what [`Guard::save`] gave; a checkpoint from before there was a guard has nothing.
    pub fn load(&mut self, state: &Value) -> Result<()> {
        if state.is_null() {
            return Ok(());
        }
        let read = || {
            let losses = state["loss_bits"].as_array()?.iter().map(|bits| Some(f64::from_bits(bits.as_u64()?)));
            Some((state["skipped"].as_u64()?, state["in_a_row"].as_u64()?, losses.collect::<Option<VecDeque<f64>>>()?))
        };
        let (skipped, in_a_row, losses) = read().ok_or_else(|| Error::data("`guard` in index.json cannot be read"))?;
        (self.skipped, self.in_a_row) = (skipped, in_a_row);
        self.losses.clear();
        if self.factor.is_some() {
            // A window made shorter sees the newest.
            self.losses.extend(losses.iter().skip(losses.len().saturating_sub(self.window)));
        }
        Ok(())
    }
}

/// Which number of a report is none.
fn nonfinite(report: &StepReport) -> Option<&'static str> {
    let numbers =
        [("loss", report.loss_sum), ("minimised loss", report.objective), ("gradient norm", report.grad_norm)];
    numbers.into_iter().find(|(_, value)| !value.is_finite()).map(|(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard(on_nonfinite: OnNonfinite, factor: Option<f64>) -> Guard {
        Guard { on_nonfinite, most: 2, factor, window: 3, skipped: 0, in_a_row: 0, losses: VecDeque::new() }
    }

    fn report(loss: f64) -> StepReport {
        StepReport { loss_sum: loss * 10.0, tokens: 10, objective: loss, grad_norm: 1.0, ..StepReport::default() }
    }

    fn judge(guard: &mut Guard, step: u64, loss: f64) -> Verdict {
        guard.judge(step, &report(loss), || Ok(None)).unwrap()
    }

    #[test]
    fn a_spike_is_measured_against_the_last_steps_taken() {
        let mut guard = guard(OnNonfinite::Skip, Some(1.5));
        // Before the window is full nothing is a spike.
        for (step, loss) in [(1, 9.0), (2, 2.0), (3, 1.0), (4, 3.0)] {
            assert_eq!(judge(&mut guard, step, loss), Verdict::Apply);
        }
        // The mean of 2, 1 and 3 is 2.
        let Verdict::Skip(why) = judge(&mut guard, 5, 3.1) else { panic!("3.1 is above 1.5 x 2") };
        assert!(why.contains("3.1000 nats per token are 1.55 times the mean of the last 3 steps, 2.0000"), "{why}");
        assert_eq!(judge(&mut guard, 6, 3.0), Verdict::Apply);
        // Now 1, 3 and 3: the one left out is no part of it.
        assert!(matches!(judge(&mut guard, 7, 3.51), Verdict::Skip(_)));
        assert_eq!((guard.skipped(), guard.update(8)), (Some(2), 6));
    }

    #[test]
    fn as_many_steps_in_a_row_as_allowed_are_left_out() {
        let mut guard = guard(OnNonfinite::Skip, None);
        for step in [1, 2, 4, 5] {
            assert!(matches!(judge(&mut guard, step, f64::NAN), Verdict::Skip(_)), "{step}");
            if step == 2 {
                assert_eq!(judge(&mut guard, 3, 1.0), Verdict::Apply);
            }
        }
        let Verdict::Stop(why, failure) = judge(&mut guard, 6, f64::INFINITY) else { panic!("the third in a row") };
        assert_eq!(why, "nan in the loss, step 6");
        assert!(failure.details.iter().any(|d| d.starts_with("2 steps in a row")), "{failure}");
        assert_eq!(failure.exit_status(), 5);
    }

    #[test]
    fn spikes_end_a_run_where_nothing_is_left_out() {
        let mut guard = guard(OnNonfinite::Stop, Some(2.0));
        (1..=3).for_each(|step| assert_eq!(judge(&mut guard, step, 1.0), Verdict::Apply));
        let Verdict::Stop(why, failure) = judge(&mut guard, 4, 2.5) else { panic!("2.5 is a spike") };
        assert!(why.starts_with("loss spike in step 4: 2.5000") && failure.sentence == why, "{why}");
        assert_eq!(guard.skipped(), None);
    }

    #[test]
    fn a_broken_gradient_is_diagnosed_and_a_spike_is_not() {
        let mut guard = guard(OnNonfinite::Stop, None);
        let broken = StepReport { grad_norm: f64::INFINITY, ..report(1.0) };
        let diagnosis = Diagnosis { place: "the gradient of lm.w".into(), value: f64::NEG_INFINITY };
        let verdict = guard.judge(7, &broken, || Ok(Some(diagnosis))).unwrap();
        let Verdict::Stop(why, failure) = verdict else { panic!("not finite") };
        assert_eq!(why, "nan in the gradient of lm.w");
        assert!(failure.to_string().contains("the first such number is -inf"), "{failure}");
    }

    #[test]
    fn state_survives_a_checkpoint_bit_by_bit() {
        let mut guard = guard(OnNonfinite::Skip, Some(1.5));
        for (step, loss) in [(1, 0.1), (2, 1.0 / 3.0), (3, 2.0f64.ln()), (4, f64::NAN)] {
            judge(&mut guard, step, loss);
        }
        let text = guard.save().to_string();
        let mut again = self::guard(OnNonfinite::Skip, Some(1.5));
        again.load(&serde_json::from_str(&text).unwrap()).unwrap();
        assert_eq!(format!("{again:?}"), format!("{guard:?}"));
        assert!(again.load(&json!({"skipped": "x"})).is_err());
        again.load(&Value::Null).unwrap();
    }
}
