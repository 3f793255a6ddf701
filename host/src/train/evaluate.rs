//! Forward passes beside training: loss sums and logits.
//!
//! They read parameters and buffers and write nothing that a step reads: training after them is bit-identical to training
//! without. Their programs are recorded once like any other, without dropout (recording knows that it does not train), and
//! run in the arenas of training, which are idle between steps.

use super::rank::{Rank, info};
use super::record::Mode;
use super::team::Team;
use crate::data::Batch;
use crate::error::{Error, Result};
use gantry_kernels::Element;
use std::sync::Arc;

/// Cross entropy of held-out tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossSums {
    /// Nats.
    pub loss_sum: f64,
    /// Tokens whose loss counts.
    pub tokens: f64,
}

impl std::ops::AddAssign for LossSums {
    fn add_assign(&mut self, more: LossSums) {
        self.loss_sum += more.loss_sum;
        self.tokens += more.tokens;
    }
}

/// Logits of this rank's share of the vocabulary: (logical token ids, logits).
type Share = (Vec<u32>, Vec<f64>);

impl<T: Element> Rank<T> {
    /// Loss of this rank's micro-batches, (index over all dp ranks, batch), summed over all ranks.
    pub fn evaluate(&mut self, step: u64, batches: &[(usize, Arc<Batch>)]) -> Result<LossSums> {
        let mut sums = LossSums::default();
        // A profile tells of steps.
        let profile = self.profile.take();
        for (index, batch) in batches {
            let live = self.forward(Mode::Loss, batch, &info(step, *index, batch, false), 1.0)?;
            let compiled = self.programs.get(&live.signature);
            if let Some((compiled, id)) = compiled.and_then(|compiled| Some((compiled, compiled.loss?)))
                && self.model.place.tp == 0
            {
                sums.loss_sum += compiled.program.get(&live.arena, id)[0].to_f64();
                sums.tokens += batch.loss_mask.iter().map(|&m| f64::from(m)).sum::<f64>();
            }
            self.give_back(live);
        }
        self.profile = profile;
        let mut numbers = [sums.loss_sum, sums.tokens];
        self.groups.world.all_reduce_f64(&mut numbers)?;
        Ok(LossSums { loss_sum: numbers[0], tokens: numbers[1] })
    }

    /// Token ids from `labels` on are padding of the vocabulary: from now on they have no probability. Before the first
    /// program is recorded.
    pub fn limit_vocab(&mut self, labels: usize) -> Result<()> {
        if !self.programs.is_empty() {
            return Err(Error::recipe("the vocabulary is stated before the first step".to_string()));
        }
        self.model.labels = Some(labels);
        match &mut self.teacher {
            Some(teacher) => teacher.rank.limit_vocab(labels),
            None => Ok(()),
        }
    }

    /// Logits [tokens, vocab] of this rank's share of the vocabulary; nothing on other stages than the last.
    pub fn logits(&mut self, batch: &Batch) -> Result<Option<Vec<f64>>> {
        Ok(self.logits_of(Mode::Logits, batch)?.map(|(_, logits)| logits))
    }

    /// Logits [vocab] after the batch's first sequence.
    fn next_logits(&mut self, batch: &Batch) -> Result<Option<Share>> {
        self.logits_of(Mode::NextToken, batch)
    }

    /// A forward pass up to the output weight, for whoever observes it.
    pub(super) fn hidden_pass(&mut self, batch: &Batch) -> Result<()> {
        let live = self.forward(Mode::Hidden, batch, &info(0, 0, batch, false), 1.0)?;
        self.give_back(live);
        Ok(())
    }

    fn logits_of(&mut self, mode: Mode, batch: &Batch) -> Result<Option<Share>> {
        let live = self.forward(mode, batch, &info(0, 0, batch, false), 1.0)?;
        let share = self.programs.get(&live.signature).and_then(|compiled| {
            let ids = self.model.table.params[compiled.head?].stored.logical_positions(0);
            let logits = compiled.program.get(&live.arena, compiled.logits?).iter().map(|x| x.to_f64());
            // Padding of the vocabulary has no probability.
            let of = |(i, logit)| {
                let label = *ids.get(i % ids.len().max(1))? as usize;
                Some(if self.model.labels.is_some_and(|labels| label >= labels) { f64::NEG_INFINITY } else { logit })
            };
            let logits = logits.enumerate().filter_map(of).collect();
            Some((ids, logits))
        });
        self.give_back(live);
        Ok(share)
    }
}

/// Micro-batches a data-parallel rank takes at a time: so few that the first stage of a pipeline, which waits for nobody,
/// does not run far ahead of the last.
pub const AT_ONCE: usize = 8;

impl<T: Element> Team<T> {
    /// Loss over micro-batches of one shape. Changes nothing that training sees.
    pub fn evaluate(&self, step: u64, batches: Vec<Batch>) -> Result<LossSums> {
        let mut batches = batches.into_iter().enumerate().map(|(i, batch)| (i, Arc::new(batch)));
        let (dp, mut sums) = (self.grid.dp, LossSums::default());
        loop {
            let some: Arc<Vec<_>> = Arc::new(batches.by_ref().take(AT_ONCE * dp).collect());
            if some.is_empty() {
                return Ok(sums);
            }
            let results = self.all(move |rank| {
                let mine: Vec<_> = some.iter().filter(|(i, _)| i % dp == rank.model.place.dp).cloned().collect();
                rank.evaluate(step, &mine)
            })?;
            sums += results[0];
        }
    }

    /// Logits [tokens, vocab] of a batch, in logical order.
    pub fn logits(&self, batch: Batch) -> Result<Vec<f64>> {
        let tokens = batch.tokens.len();
        let batch = Arc::new(batch);
        // Replicas would compute the same.
        let shares = self
            .all(move |rank| if rank.model.place.dp == 0 { rank.logits_of(Mode::Logits, &batch) } else { Ok(None) })?;
        let vocab = shares.iter().flatten().flat_map(|(ids, _)| ids).max().map_or(0, |&id| id as usize + 1);
        let mut logits = vec![f64::NAN; tokens * vocab];
        for (ids, values) in shares.into_iter().flatten() {
            for (row, values) in logits.chunks_mut(vocab).zip(values.chunks(ids.len())) {
                ids.iter().zip(values).for_each(|(&id, &value)| row[id as usize] = value);
            }
        }
        Ok(logits)
    }

    /// Logits [vocab] of the token after `context`, in logical order. `padded`: the tokens the program is recorded for, at
    /// least those of the context; what follows the context is a sequence of its own, which it does not see.
    pub fn next_logits(&self, context: &[i32], padded: usize) -> Result<Vec<f64>> {
        if context.is_empty() || padded < context.len() {
            return Err(Error::recipe(format!("logits after {} tokens of {padded}", context.len())));
        }
        let mut tokens = context.to_vec();
        tokens.resize(padded, context[0]);
        let batch = Arc::new(Batch {
            labels: vec![0; padded],
            loss_mask: vec![0.0; padded],
            cu_seqlens: vec![0, context.len() as i32, padded as i32],
            tokens,
            first_sample: 0,
            samples: 1,
        });
        // Replicas would compute the same.
        let shares =
            self.all(move |rank| if rank.model.place.dp == 0 { rank.next_logits(&batch) } else { Ok(None) })?;
        let vocab = shares.iter().flatten().flat_map(|(ids, _)| ids).max().map_or(0, |&id| id as usize + 1);
        let mut logits = vec![f64::NAN; vocab];
        for (ids, values) in shares.into_iter().flatten() {
            ids.into_iter().zip(values).for_each(|(id, value)| logits[id as usize] = value);
        }
        Ok(logits)
    }
}
