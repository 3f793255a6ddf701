//! Batches of a held-out corpus: in order, every token predicted exactly once.
//!
//! With tokens t_0 .. t_{n-1} and the end-of-document token e before them, position p reads (e, t_0, .., t_{n-2})[p] and
//! is asked for t_p. Sample i is positions [i S, i S + S); positions after the last are padding: they read e, are asked
//! for e, and have weight 0. So the first token of a document is predicted after the boundary, as in training. Documents
//! that are packed for training (`data.packing`) are packed here too, by the same rule, and the samples are taken in order.

use super::packed::Packed;
use super::samples::Row;
use super::{Batch, Corpus};
use crate::failure::Result;
use crate::recipe::{Packing, Recipe};
use std::ops::Range;
use std::sync::Arc;

/// A held-out corpus cut into samples of `train.seq_length` tokens.
#[derive(Clone, Debug)]
pub struct Valid {
    corpus: Arc<Corpus>,
    seq_length: usize,
    cut: Cut,
    /// Most sequences that any sample is cut into.
    sequences_per_sample: usize,
}

#[derive(Clone, Debug)]
enum Cut {
    /// Documents end to end; `reset`: sequences begin with documents.
    Stream {
        reset: bool,
    },
    Packed(Packed),
}

impl Valid {
    pub fn new(corpus: Arc<Corpus>, recipe: &Recipe) -> Result<Valid> {
        let (data, train) = (&recipe.data, &recipe.train);
        let cut = match data.packing {
            Packing::Concat => Cut::Stream { reset: data.reset_at_document_boundaries },
            Packing::BestFit => {
                Cut::Packed(Packed::new(Arc::clone(&corpus), train.seq_length, data.too_long, train.seed)?)
            }
        };
        let mut valid = Valid { corpus, seq_length: train.seq_length, cut, sequences_per_sample: 1 };
        let most = (0..valid.samples()).map(|sample| match &valid.cut {
            Cut::Stream { reset } => 1 + valid.boundaries(sample, *reset).count(),
            Cut::Packed(packed) => super::samples::Samples::most_sequences(packed),
        });
        valid.sequences_per_sample = most.max().unwrap_or(1);
        Ok(valid)
    }

    pub fn corpus(&self) -> &Arc<Corpus> {
        &self.corpus
    }

    /// Samples, the last one of which may be padded.
    pub fn samples(&self) -> usize {
        match &self.cut {
            Cut::Stream { .. } => self.corpus.len().div_ceil(self.seq_length),
            Cut::Packed(packed) => packed.len(),
        }
    }

    /// Length of every batch's `cu_seqlens`.
    pub fn cu_seqlens_len(&self, micro_batch_size: usize) -> usize {
        micro_batch_size * self.sequences_per_sample + 1
    }

    /// Number of micro-batches of `micro_batch_size` samples.
    pub fn micro_batches(&self, micro_batch_size: usize) -> usize {
        self.samples().div_ceil(micro_batch_size)
    }

    /// All micro-batches in order.
    pub fn batches(&self, micro_batch_size: usize) -> impl ExactSizeIterator<Item = Result<Batch>> + '_ {
        (0..self.micro_batches(micro_batch_size)).map(move |index| self.batch(index, micro_batch_size))
    }

    /// Micro-batch `index`; all have the same shape, samples after the last are padding.
    pub fn batch(&self, index: usize, micro_batch_size: usize) -> Result<Batch> {
        let first = index * micro_batch_size;
        let mut batch = Batch::empty(self.seq_length, micro_batch_size, first as u64);
        for sample in 0..micro_batch_size {
            batch.row(sample, |row| {
                self.write(first + sample, row);
                Ok(())
            })?;
        }
        Ok(batch.closed(self.cu_seqlens_len(micro_batch_size)))
    }

    /// Bytes of text that the tokens asked for in micro-batch `index` stand for.
    pub fn text_bytes(&self, index: usize, micro_batch_size: usize) -> u64 {
        let samples = index * micro_batch_size..((index + 1) * micro_batch_size).min(self.samples());
        let of_sample = |sample: usize| match &self.cut {
            Cut::Stream { .. } => self.corpus.text_bytes(self.asked(sample)),
            Cut::Packed(packed) => packed.asked(sample).map(|tokens| self.corpus.text_bytes(tokens)).sum(),
        };
        samples.map(of_sample).sum()
    }

    /// Tokens that a sample of the stream asks for.
    fn asked(&self, sample: usize) -> Range<usize> {
        let begin = (sample * self.seq_length).min(self.corpus.len());
        begin..(begin + self.seq_length).min(self.corpus.len())
    }

    fn write(&self, sample: usize, row: &mut Row<'_>) {
        let end = self.corpus.end();
        match &self.cut {
            Cut::Packed(packed) if sample < packed.len() => packed.write(sample, row),
            Cut::Packed(_) => {
                row.tokens.fill(self.corpus.pad());
                row.labels.fill(self.corpus.pad());
                row.weights.fill(0.0);
            }
            Cut::Stream { reset } => {
                let asked = self.asked(sample);
                let count = asked.len();
                row.tokens.fill(end);
                row.labels.fill(end);
                row.weights.fill(0.0);
                self.corpus.read(asked.start, &mut row.labels[..count]);
                self.corpus.weights(asked.start, &mut row.weights[..count]);
                // The token before the first is the end of the document before.
                if count > 0 && asked.start > 0 {
                    self.corpus.read(asked.start - 1, &mut row.tokens[..count]);
                } else if count > 1 {
                    self.corpus.read(0, &mut row.tokens[1..count]);
                }
                row.starts.extend(self.boundaries(sample, *reset));
            }
        }
    }

    /// Positions inside a sample, more than 0, at which a sequence begins: after the end of a document, and padding.
    fn boundaries(&self, sample: usize, reset: bool) -> impl Iterator<Item = usize> + '_ {
        let (begin, tokens) = (sample * self.seq_length, self.corpus.len());
        let end = (begin + self.seq_length).min(tokens);
        // Token t is read at position t + 1.
        let starts = if reset && begin < end { self.corpus.document_starts(begin..end - 1) } else { &[] };
        let padding = (begin < tokens && tokens < begin + self.seq_length).then(|| tokens - begin);
        starts.iter().map(move |start| start + 1 - begin).chain(padding)
    }
}

#[cfg(test)]
mod tests {
    use super::super::corpus::Builder;
    use super::*;
    use crate::recipe::Overrides;
    use rstest::rstest;
    use std::path::Path;

    fn valid(documents: &[&str], seq_length: usize, reset: bool) -> Valid {
        let mut builder = Builder::bytes();
        documents.iter().for_each(|text| builder.add_text(Path::new(text), text.as_bytes()));
        let text = format!(
            "name: t\nmodules: {{lm: {{provider: p}}}}\noptimizer: {{lr: 1}}\n\
             data: {{paths: [x], reset_at_document_boundaries: {reset}}}\n\
             train: {{steps: 1, seq_length: {seq_length}, global_batch_size: 1}}\n"
        );
        Valid::new(Arc::new(builder.finish()), &Recipe::parse(&text, &Overrides::default()).unwrap()).unwrap()
    }

    #[test]
    fn by_hand() {
        // Tokens: a b c # d # (# = 256).
        let valid = valid(&["abc", "d"], 4, true);
        assert_eq!((valid.corpus().len(), valid.samples(), valid.micro_batches(1)), (6, 2, 2));
        // The most sequences are in the second sample: `#`, `d`, padding.
        assert_eq!(valid.cu_seqlens_len(1), 4);
        let first = valid.batch(0, 1).unwrap();
        assert_eq!(first.tokens, [256, 97, 98, 99]);
        assert_eq!(first.labels, [97, 98, 99, 256]);
        assert_eq!((first.loss_mask, first.cu_seqlens), (vec![1.0; 4], vec![0, 1, 4, 4]));
        let second = valid.batch(1, 1).unwrap();
        assert_eq!(second.tokens, [256, 100, 256, 256]);
        assert_eq!(second.labels, [100, 256, 256, 256]);
        assert_eq!((second.loss_mask, second.cu_seqlens), (vec![1.0, 1.0, 0.0, 0.0], vec![0, 1, 2, 4]));
    }

    #[rstest]
    fn every_token_is_asked_for_once(
        #[values(1, 3, 4, 7, 50)] seq_length: usize,
        #[values(1, 2, 5)] micro_batch_size: usize,
        #[values(true, false)] reset: bool,
    ) {
        let valid = valid(&["abcdefgh", "i", "j", "klmnop", "q"], seq_length, reset);
        let mut all = vec![0; valid.corpus().len()];
        valid.corpus().read(0, &mut all);
        let (mut asked, mut read, mut padded) = (Vec::new(), Vec::new(), 0);
        assert_eq!(valid.batches(micro_batch_size).len(), valid.micro_batches(micro_batch_size));
        for batch in valid.batches(micro_batch_size).map(Result::unwrap) {
            let total = micro_batch_size * seq_length;
            assert_eq!((batch.tokens.len(), batch.labels.len(), batch.loss_mask.len()), (total, total, total));
            assert_eq!(batch.cu_seqlens.len(), valid.cu_seqlens_len(micro_batch_size));
            assert!(batch.cu_seqlens.is_sorted());
            assert_eq!((batch.cu_seqlens[0], *batch.cu_seqlens.last().unwrap()), (0, total as i32));
            assert_eq!(batch.first_sample as usize * seq_length, asked.len() + padded);
            for i in 0..total {
                let begins = batch.cu_seqlens.contains(&(i as i32));
                if batch.loss_mask[i] == 1.0 {
                    assert_eq!(padded, 0);
                    asked.push(batch.labels[i]);
                    read.push(batch.tokens[i]);
                    // A sequence begins with each sample and, if asked, after the end of each document.
                    let after_end = read.len() > 1 && read[read.len() - 2] == 256;
                    assert_eq!(begins, i % seq_length == 0 || reset && after_end, "position {i}");
                } else {
                    padded += 1;
                    assert!(begins || i % seq_length != 0);
                }
            }
        }
        assert_eq!(asked, all);
        assert_eq!(read[0], 256);
        assert_eq!(read[1..], all[..all.len() - 1]);
        assert!(padded < micro_batch_size * seq_length);
    }
}
