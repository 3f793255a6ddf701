//! What the micro-batches of a step add up to, on one rank and then over all of them.

use super::router::Chosen;
use crate::comm::Group;
use crate::error::Result;
use gantry_kernels::Element;
use std::collections::BTreeMap;

/// Sums over the micro-batches of a step, over all ranks once reduced.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepSums {
    /// Cross entropy over unmasked tokens, nats.
    pub loss: f64,
    pub tokens: f64,
    /// Every term of the objective, already weighted, per token.
    pub objective: f64,
    /// Terms other than the cross entropy, weighted, by name.
    pub terms: BTreeMap<String, f64>,
    /// One-element metrics of providers and operators: sums over micro-batches.
    pub metrics: BTreeMap<String, f64>,
    /// Mean over routers of the largest expert's load over the mean load.
    pub load_max_over_mean: Option<f64>,
    /// By the label that an elastifier gave micro-batches.
    pub labels: BTreeMap<String, LabelSums>,
}

/// Sums over the micro-batches of one label.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LabelSums {
    pub micro_batches: f64,
    pub tokens: f64,
    /// Cross entropy over unmasked tokens, nats.
    pub loss: f64,
    /// Divergence from a teacher over unmasked tokens, if there is one.
    pub kd_loss: Option<f64>,
    /// Loss of the router's outputs, per token.
    pub choice_loss: f64,
    /// Parameters of the chosen models.
    pub params: f64,
}

/// Numbers of [`LabelSums`] as they are reduced.
const NUMBERS: usize = 7;

impl LabelSums {
    fn numbers(&self) -> [f64; NUMBERS] {
        let distilled = if self.kd_loss.is_some() { 1.0 } else { 0.0 };
        let kd_loss = self.kd_loss.unwrap_or(0.0);
        [self.micro_batches, self.tokens, self.loss, distilled, kd_loss, self.choice_loss, self.params]
    }

    fn from(numbers: &[f64]) -> LabelSums {
        LabelSums {
            micro_batches: numbers[0],
            tokens: numbers[1],
            loss: numbers[2],
            kd_loss: (numbers[3] > 0.0).then_some(numbers[4]),
            choice_loss: numbers[5],
            params: numbers[6],
        }
    }
}

impl StepSums {
    /// The sums of a choice's label; without a label they go nowhere.
    pub(super) fn of(&mut self, chosen: &Chosen) -> &mut LabelSums {
        self.labels.entry(chosen.label.clone().unwrap_or_default()).or_default()
    }

    /// Adds what a router chose for a micro-batch with this summed cross entropy.
    pub(super) fn chose(&mut self, chosen: &Chosen, loss: f64, tokens: f64, tokens_of_step: f64) {
        let of_label = self.of(chosen);
        of_label.micro_batches += 1.0;
        of_label.tokens += tokens;
        of_label.loss += loss;
        of_label.params += chosen.params.unwrap_or(0.0);
        if let Some((name, value)) = &chosen.loss {
            of_label.choice_loss += value;
            let weighted = value * tokens / tokens_of_step;
            self.objective += weighted;
            *self.terms.entry(name.clone()).or_default() += weighted;
        }
        for (name, value) in &chosen.metrics {
            *self.metrics.entry(name.clone()).or_default() += value;
        }
    }

    /// Sums over all ranks: this rank's share, `ratios` of its routers of experts, and what each of `labels` did.
    pub(super) fn reduced<T: Element>(
        mut self,
        ratios: &[f64],
        labels: &[String],
        world: &dyn Group<T>,
    ) -> Result<StepSums> {
        let mut numbers = vec![self.loss, self.tokens, self.objective, ratios.iter().sum::<f64>(), ratios.len() as f64];
        let begin = numbers.len();
        for label in labels {
            numbers.extend(self.labels.get(label).copied().unwrap_or_default().numbers());
        }
        world.all_reduce_f64(&mut numbers)?;
        (self.loss, self.tokens, self.objective) = (numbers[0], numbers[1], numbers[2]);
        self.load_max_over_mean = (numbers[4] > 0.0).then(|| numbers[3] / numbers[4]);
        let sums = labels.iter().cloned().zip(numbers[begin..].chunks(NUMBERS).map(LabelSums::from));
        self.labels = sums.filter(|(_, sums)| sums.micro_batches > 0.0).collect();
        Ok(self)
    }
}
