//! Batches of a held-out corpus: in order, every token predicted exactly once.
//!
//! With tokens t_0 .. t_{n-1} and the end-of-document token e before them, position p reads (e, t_0, .., t_{n-2})[p] and
//! is asked for t_p. Sample i is positions [i S, i S + S); positions after the last are padding: they read e, are asked
//! for e, and have weight 0. So the first token of a document is predicted after the boundary, as in training.

use super::{Batch, Corpus};
use crate::recipe::Recipe;
use std::sync::Arc;

/// A held-out corpus cut into samples of `train.seq_length` tokens.
#[derive(Clone, Debug)]
pub struct Valid {
    corpus: Arc<Corpus>,
    seq_length: usize,
    reset: bool,
    /// Most sequences that any sample is cut into.
    sequences_per_sample: usize,
}

impl Valid {
    pub fn new(corpus: Arc<Corpus>, recipe: &Recipe) -> Valid {
        let reset = recipe.data.reset_at_document_boundaries;
        let mut valid = Valid { corpus, seq_length: recipe.train.seq_length, reset, sequences_per_sample: 1 };
        let most = (0..valid.samples()).map(|sample| 1 + valid.boundaries(sample).count()).max();
        valid.sequences_per_sample = most.unwrap_or(1);
        valid
    }

    pub fn corpus(&self) -> &Arc<Corpus> {
        &self.corpus
    }

    /// Tokens that are predicted: all of the corpus.
    pub fn tokens(&self) -> usize {
        self.corpus.len()
    }

    /// Samples, the last one of which may be padded.
    pub fn samples(&self) -> usize {
        self.corpus.len().div_ceil(self.seq_length)
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
    pub fn batches(&self, micro_batch_size: usize) -> impl ExactSizeIterator<Item = Batch> + '_ {
        (0..self.micro_batches(micro_batch_size)).map(move |index| self.batch(index, micro_batch_size))
    }

    /// Micro-batch `index`; all have the same shape, samples after the last are padding.
    pub fn batch(&self, index: usize, micro_batch_size: usize) -> Batch {
        let (length, total) = (self.seq_length, micro_batch_size * self.seq_length);
        let begin = index * total;
        let (end, count) = (self.corpus.end(), self.corpus.len().saturating_sub(begin).min(total));
        let mut batch = Batch {
            tokens: vec![end; total],
            labels: vec![end; total],
            loss_mask: vec![0.0; total],
            cu_seqlens: Vec::with_capacity(self.cu_seqlens_len(micro_batch_size)),
            first_sample: (index * micro_batch_size) as u64,
            samples: micro_batch_size,
        };
        self.corpus.read(begin, &mut batch.labels[..count]);
        // The token before the first is the end of the document before.
        if begin > 0 {
            self.corpus.read(begin - 1, &mut batch.tokens[..1]);
        }
        if count > 1 {
            let (from, to) = (&batch.labels[..count - 1], &mut batch.tokens[1..count]);
            to.copy_from_slice(from);
        }
        batch.loss_mask[..count].fill(1.0);
        for sample in 0..micro_batch_size {
            batch.cu_seqlens.push((sample * length) as i32);
            let inside = self.boundaries(index * micro_batch_size + sample);
            batch.cu_seqlens.extend(inside.map(|position| (sample * length + position) as i32));
        }
        batch.cu_seqlens.resize(self.cu_seqlens_len(micro_batch_size), total as i32);
        batch
    }

    /// Positions inside a sample, more than 0, at which a sequence begins: after the end of a document, and padding.
    fn boundaries(&self, sample: usize) -> impl Iterator<Item = usize> + '_ {
        let (begin, tokens) = (sample * self.seq_length, self.corpus.len());
        let end = (begin + self.seq_length).min(tokens);
        // Token t is read at position t + 1.
        let starts = if self.reset && begin < end { self.corpus.document_starts(begin..end - 1) } else { &[] };
        let padding = (begin < tokens && tokens < begin + self.seq_length).then(|| tokens - begin);
        starts.iter().map(move |start| start + 1 - begin).chain(padding)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Tokenizer, corpus::Builder};
    use super::*;
    use crate::recipe::Overrides;
    use rstest::rstest;
    use std::path::Path;

    fn valid(documents: &[&str], seq_length: usize, reset: bool) -> Valid {
        let mut builder = Builder::bytes();
        documents
            .iter()
            .for_each(|text| builder.add_text(Path::new(text), text.as_bytes(), &Tokenizer::bytes()).unwrap());
        let text = format!(
            "name: t\nmodules: {{lm: {{provider: p}}}}\noptimizer: {{lr: 1}}\n\
             data: {{paths: [x], reset_at_document_boundaries: {reset}}}\n\
             train: {{steps: 1, seq_length: {seq_length}, global_batch_size: 1}}\n"
        );
        Valid::new(Arc::new(builder.finish()), &Recipe::parse(&text, &Overrides::default()).unwrap())
    }

    #[test]
    fn by_hand() {
        // Tokens: a b c # d # (# = 256).
        let valid = valid(&["abc", "d"], 4, true);
        assert_eq!((valid.tokens(), valid.samples(), valid.micro_batches(1)), (6, 2, 2));
        // The most sequences are in the second sample: `#`, `d`, padding.
        assert_eq!(valid.cu_seqlens_len(1), 4);
        let first = valid.batch(0, 1);
        assert_eq!(first.tokens, [256, 97, 98, 99]);
        assert_eq!(first.labels, [97, 98, 99, 256]);
        assert_eq!((first.loss_mask, first.cu_seqlens), (vec![1.0; 4], vec![0, 1, 4, 4]));
        let second = valid.batch(1, 1);
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
        let mut all = vec![0; valid.tokens()];
        valid.corpus().read(0, &mut all);
        let (mut asked, mut read, mut padded) = (Vec::new(), Vec::new(), 0);
        assert_eq!(valid.batches(micro_batch_size).len(), valid.micro_batches(micro_batch_size));
        for batch in valid.batches(micro_batch_size) {
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
