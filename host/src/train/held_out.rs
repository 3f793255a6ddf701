//! A pass over held-out documents, and what it says: during a run, at its end, and for `gantry eval`.

use super::Engine;
use super::evaluate::LossSums;
use crate::data::{Held, Pick};
use crate::error::Result;
use crate::recipe::Recipe;
use serde_json::{Map, Value, json};
use std::f64::consts::LN_2;
use std::sync::atomic::{AtomicBool, Ordering};

/// Cross entropy of held-out text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// Nats.
    pub loss_sum: f64,
    /// Tokens predicted, ends of documents included.
    pub tokens: u64,
    /// Bytes of text they stand for; 0 if they stand for none.
    pub bytes: u64,
}

impl Evaluation {
    /// Nats per token.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.tokens.max(1) as f64
    }

    /// exp of the loss per token.
    pub fn perplexity(&self) -> f64 {
        self.loss().exp()
    }

    /// Nats per byte of text. The ends of documents cost nats and are no bytes.
    pub fn loss_per_byte(&self) -> Option<f64> {
        self.per_byte(self.loss())
    }

    pub fn bits_per_byte(&self) -> Option<f64> {
        Some(self.loss_per_byte()? / LN_2)
    }

    /// A loss per token of this text as a loss per byte of it.
    fn per_byte(&self, loss: f64) -> Option<f64> {
        (self.bytes > 0).then(|| loss * self.tokens as f64 / self.bytes as f64)
    }

    /// The loss in words, beside that of another model of the same text: (name, nats per token).
    pub fn sentence(&self, other: Option<(String, f64)>) -> String {
        let shown = |loss: f64| match self.per_byte(loss) {
            Some(nats) => format!("{loss:.4} nats per token, {nats:.4} per byte ({:.3} bits)", nats / LN_2),
            None => format!("{loss:.4} nats per token"),
        };
        let other = other.map(|(name, loss)| format!("; {name}: {}", shown(loss)));
        format!("held-out loss {}{}", shown(self.loss()), other.unwrap_or_default())
    }

    /// Adds its numbers to a step's line of metrics.
    pub fn add_to(&self, metrics: &mut Map<String, Value>) {
        metrics.insert("valid_loss".into(), json!(self.loss()));
        metrics.insert("valid_perplexity".into(), json!(self.perplexity()));
        if let (Some(nats), Some(bits)) = (self.loss_per_byte(), self.bits_per_byte()) {
            metrics.insert("valid_loss_per_byte".into(), json!(nats));
            metrics.insert("valid_bits_per_byte".into(), json!(bits));
        }
    }
}

/// When to look at held-out documents, and at how many of their samples.
#[derive(Clone, Debug)]
pub struct HeldOut {
    data: Held,
    micro_batch_size: usize,
    every: u64,
    samples: Option<usize>,
}

/// Micro-batches made at a time.
const CHUNK: usize = 32;

impl HeldOut {
    pub fn new(data: Held, recipe: &Recipe) -> HeldOut {
        let train = &recipe.train;
        HeldOut { data, micro_batch_size: train.micro_batch_size, every: train.eval_every, samples: train.eval_samples }
    }

    pub fn data(&self) -> &Held {
        &self.data
    }

    /// Whether a pass follows `step`.
    pub fn due(&self, step: u64, last: u64) -> bool {
        step == last || self.every > 0 && step.is_multiple_of(self.every)
    }

    /// The pass after a step: `train.eval_samples` samples, of documents after the last step all. Nothing if `stop` is set meanwhile.
    pub fn after(
        &self,
        engine: &mut dyn Engine,
        step: u64,
        last: u64,
        stop: &AtomicBool,
    ) -> Result<Option<Evaluation>> {
        self.pass(engine, step, self.data.after(step, last, self.samples, self.micro_batch_size), stop)
    }

    /// A pass over everything that is held out.
    pub fn whole(&self, engine: &mut dyn Engine, step: u64, stop: &AtomicBool) -> Result<Option<Evaluation>> {
        self.pass(engine, step, self.data.all(self.micro_batch_size), stop)
    }

    fn pass(
        &self,
        engine: &mut dyn Engine,
        step: u64,
        picks: Vec<Pick>,
        stop: &AtomicBool,
    ) -> Result<Option<Evaluation>> {
        let size = self.micro_batch_size;
        let (mut sums, mut bytes) = (LossSums::default(), 0);
        for some in picks.chunks(CHUNK) {
            if stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            bytes += some.iter().map(|&pick| self.data.text_bytes(pick, size)).sum::<u64>();
            let batches = some.iter().map(|&pick| self.data.batch(pick, size)).collect::<Result<Vec<_>>>()?;
            sums += engine.evaluate(step, batches)?;
        }
        Ok(Some(Evaluation { loss_sum: sums.loss_sum, tokens: sums.tokens.round() as u64, bytes }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_per_token_and_byte() {
        let text = Evaluation { loss_sum: 300.0, tokens: 240, bytes: 200 };
        assert_eq!((text.loss(), text.loss_per_byte()), (1.25, Some(1.5)));
        assert_eq!(text.perplexity(), 1.25f64.exp());
        assert!((text.bits_per_byte().unwrap() - 2.164).abs() < 1e-3);
        let other = Some(("a rival".to_string(), 1.5));
        assert_eq!(
            text.sentence(other),
            "held-out loss 1.2500 nats per token, 1.5000 per byte (2.164 bits); \
             a rival: 1.5000 nats per token, 1.8000 per byte (2.597 bits)"
        );
        let ids = Evaluation { bytes: 0, ..text };
        assert_eq!((ids.loss_per_byte(), ids.bits_per_byte()), (None, None));
        assert_eq!(ids.sentence(None), "held-out loss 1.2500 nats per token");
    }
}
