//! Samples of documents laid end to end: sample i of an epoch is tokens [i S, i S + S] of the corpus (S inputs, each with
//! its successor as label), the samples of an epoch in the order of a keyed permutation.

use super::samples::{Row, Samples};
use super::{Corpus, Permutation};
use crate::failure::Result;
use gantry_kernels::philox::stream_of;
use std::sync::Arc;

/// A corpus cut into samples of `length` tokens.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    corpus: Arc<Corpus>,
    length: usize,
    /// Sequences begin with documents, not only with samples.
    reset: bool,
    seed: u64,
    per_epoch: u64,
    most_sequences: usize,
}

impl Stream {
    pub fn new(corpus: Arc<Corpus>, length: usize, reset: bool, seed: u64) -> Stream {
        let samples = corpus.len().saturating_sub(1) / length;
        let pieces = |sample: usize| 1 + corpus.document_starts(sample * length + 1..(sample + 1) * length).len();
        let most = if reset { (0..samples).map(pieces).max().unwrap_or(1) } else { 1 };
        Stream { corpus, length, reset, seed, per_epoch: samples as u64, most_sequences: most }
    }
}

/// Which of `per_epoch` samples a run's `number` means.
pub(super) fn place(number: u64, per_epoch: u64, seed: u64) -> usize {
    let (epoch, index) = (number / per_epoch, number % per_epoch);
    Permutation::new(per_epoch, seed, stream_of("data.order"), epoch as u32).at(index) as usize
}

impl Samples for Stream {
    fn per_epoch(&self) -> u64 {
        self.per_epoch
    }

    fn most_sequences(&self) -> usize {
        self.most_sequences
    }

    fn fill(&self, number: u64, row: &mut Row<'_>) -> Result<()> {
        let begin = place(number, self.per_epoch, self.seed) * self.length;
        self.corpus.read(begin, row.tokens);
        self.corpus.read(begin + 1, row.labels);
        self.corpus.weights(begin + 1, row.weights);
        if self.reset {
            let starts = self.corpus.document_starts(begin + 1..begin + self.length);
            row.starts.extend(starts.iter().map(|start| start - begin));
        }
        Ok(())
    }
}
