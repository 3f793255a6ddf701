//! Batches of samples, and which samples a step has.

use super::blends::{Blended, Limited};
use super::packed::Packed;
use super::samples::{Row, Samples};
use super::stream::Stream;
use super::{Corpus, RunData, Tokenizer};
use crate::failure::{Failure, Result};
use crate::recipe::{Packing, Recipe};
use std::sync::Arc;

/// One micro-batch; T = samples x seq_length tokens, samples back to back.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Token ids [T].
    pub tokens: Vec<i32>,
    /// The token after each of `tokens` in its sequence [T]; of the last one anything, if its weight is 0.
    pub labels: Vec<i32>,
    /// Weight of each position's loss [T].
    pub loss_mask: Vec<f32>,
    /// Sequence boundaries from 0 to T, then T repeated up to a length that is the same for all batches
    /// ([`Loader::cu_seqlens_len`]).
    pub cu_seqlens: Vec<i32>,
    /// Global index of the first sample.
    pub first_sample: u64,
    pub samples: usize,
}

/// How far a run is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Finished steps.
    pub step: u64,
    /// Samples they consumed.
    pub samples: u64,
}

/// What samples are cut from.
#[derive(Clone, Debug)]
enum Source {
    Corpus(Arc<Corpus>),
    Blended(Arc<Blended>, Option<Tokenizer>),
}

/// What tells whether two runs see the same data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub sha256: String,
    /// Documents, or sequences of Megatron-LM's files.
    pub documents: u64,
    pub tokens: u64,
    /// Of Megatron-LM's files: hash of the order of samples, and the number of samples that it was made for.
    pub order: Option<(String, u64)>,
}

/// Cuts batches from a corpus or from Megatron-LM's files.
#[derive(Clone, Debug)]
pub struct Loader {
    source: Source,
    samples: Arc<dyn Samples>,
    seq_length: usize,
    micro_batch_size: usize,
    global_batch_size: usize,
    begin: Position,
}

impl Loader {
    /// A loader of the recipe's training corpus for steps after `begin`.
    pub fn new(recipe: &Recipe, begin: Position) -> Result<Loader> {
        let tokenizer = super::tokenizer(recipe)?;
        Ok(RunData::open(recipe, tokenizer.as_ref(), begin)?.loader)
    }

    /// A loader of a part of Megatron-LM's files for steps after `begin`.
    pub(super) fn blended(
        blended: Arc<Blended>,
        recipe: &Recipe,
        begin: Position,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Loader> {
        let train = &recipe.train;
        let left = train.steps.saturating_sub(begin.step).saturating_mul(train.global_batch_size as u64);
        let (needed, have) = (begin.samples.saturating_add(left), blended.samples());
        if needed > have {
            return Err(Failure::data(format!(
                "the run takes {needed} samples in all, and the order of data.megatron, made for {}, has {have}",
                blended.asked().unwrap_or(have)
            ))
            .remedy(format!("set data.megatron.train_samples to at least {needed}, or make train.steps smaller")));
        }
        Ok(Loader {
            samples: Arc::new(Limited::new(Arc::clone(&blended), None)),
            source: Source::Blended(blended, tokenizer.cloned()),
            seq_length: train.seq_length,
            micro_batch_size: train.micro_batch_size,
            global_batch_size: train.global_batch_size,
            begin,
        })
    }

    /// A loader of `corpus` for steps after `begin`.
    pub fn over(corpus: Arc<Corpus>, recipe: &Recipe, begin: Position) -> Result<Loader> {
        let (train, data) = (&recipe.train, &recipe.data);
        let samples: Arc<dyn Samples> = match data.packing {
            Packing::Concat => {
                let reset = data.reset_at_document_boundaries;
                Arc::new(Stream::new(Arc::clone(&corpus), train.seq_length, reset, train.seed))
            }
            Packing::BestFit => {
                let packed = Packed::new(Arc::clone(&corpus), train.seq_length, data.too_long, train.seed)?;
                tracing::info!("{}", packed.summary());
                Arc::new(packed)
            }
        };
        if samples.per_epoch() == 0 {
            let paths: Vec<_> = data.paths.iter().map(|path| path.display().to_string()).collect();
            let place =
                if paths.is_empty() { "data.synthetic".into() } else { format!("data path {}", paths.join(", ")) };
            return Err(Failure::data(format!(
                "{place} holds {} tokens, fewer than the {} of one sample",
                corpus.len(),
                train.seq_length + 1
            ))
            .remedy("give more text or a shorter train.seq_length"));
        }
        Ok(Loader {
            source: Source::Corpus(corpus),
            samples,
            seq_length: train.seq_length,
            micro_batch_size: train.micro_batch_size,
            global_batch_size: train.global_batch_size,
            begin,
        })
    }

    /// Number of different tokens, if it is known; a model's vocabulary must be at least as large.
    pub fn vocab(&self) -> Option<usize> {
        match &self.source {
            Source::Corpus(corpus) => Some(corpus.vocab()),
            Source::Blended(_, tokenizer) => tokenizer.as_ref().map(Tokenizer::vocab_size),
        }
    }

    /// What made the tokens, if it is known.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        match &self.source {
            Source::Corpus(corpus) => corpus.tokenizer(),
            Source::Blended(_, tokenizer) => tokenizer.as_ref(),
        }
    }

    /// Refuses tokens beyond a model's vocabulary when they are met, where that is not known before.
    pub fn limit_vocab(&mut self, model: Option<usize>) {
        if let Source::Blended(blended, _) = &self.source {
            self.samples = Arc::new(Limited::new(Arc::clone(blended), model));
        }
    }

    pub fn identity(&self) -> Identity {
        match &self.source {
            Source::Corpus(corpus) => {
                let about = corpus.summary();
                let (documents, tokens) = (about.documents as u64, about.tokens as u64);
                Identity { sha256: about.sha256.clone(), documents, tokens, order: None }
            }
            Source::Blended(blended, _) => Identity {
                sha256: blended.sha256().into(),
                documents: blended.sequences(),
                tokens: blended.tokens(),
                order: Some((blended.order().into(), blended.asked().unwrap_or(blended.samples()))),
            },
        }
    }

    /// Bytes in memory.
    pub fn bytes(&self) -> usize {
        match &self.source {
            Source::Corpus(corpus) => corpus.bytes(),
            Source::Blended(blended, _) => blended.bytes(),
        }
    }

    /// Where the run began.
    pub fn begin(&self) -> Position {
        self.begin
    }

    /// Micro-batches in a step, over all data-parallel ranks.
    pub fn micro_batches(&self) -> usize {
        self.global_batch_size / self.micro_batch_size
    }

    pub fn samples_per_epoch(&self) -> u64 {
        self.samples.per_epoch()
    }

    /// Length of every batch's `cu_seqlens`.
    pub fn cu_seqlens_len(&self) -> usize {
        self.micro_batch_size * self.samples.most_sequences() + 1
    }

    /// How far a run is after `step`.
    pub fn position_after(&self, step: u64) -> Position {
        let taken = step.saturating_sub(self.begin.step);
        Position { step, samples: self.begin.samples + taken * self.global_batch_size as u64 }
    }

    /// Micro-batch `micro_batch` (index within the step over all data-parallel ranks) of step `step`, counted from 1.
    pub fn batch(&self, step: u64, micro_batch: usize) -> Result<Batch> {
        let before = self.position_after(step.saturating_sub(1));
        let first_sample = before.samples + (micro_batch * self.micro_batch_size) as u64;
        let mut batch = Batch::empty(self.seq_length, self.micro_batch_size, first_sample);
        for sample in 0..self.micro_batch_size {
            batch.row(sample, |row| self.samples.fill(first_sample + sample as u64, row))?;
        }
        Ok(batch.closed(self.cu_seqlens_len()))
    }
}

/// What the samples are cut from, for the log.
impl std::fmt::Display for Loader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.source {
            Source::Corpus(corpus) => corpus.summary().fmt(f),
            Source::Blended(blended, _) => blended.fmt(f),
        }
    }
}

impl Batch {
    /// Samples of `length` tokens that are still to be written, with weights 1.
    pub(super) fn empty(length: usize, samples: usize, first_sample: u64) -> Batch {
        let total = length * samples;
        Batch {
            tokens: vec![0; total],
            labels: vec![0; total],
            loss_mask: vec![1.0; total],
            cu_seqlens: Vec::new(),
            first_sample,
            samples,
        }
    }

    /// Has sample `sample` written and adds its sequences.
    pub(super) fn row(&mut self, sample: usize, write: impl FnOnce(&mut Row<'_>) -> Result<()>) -> Result<()> {
        let length = self.tokens.len() / self.samples;
        let (begin, here) = (sample * length, sample * length..(sample + 1) * length);
        let mut starts = Vec::new();
        write(&mut Row {
            tokens: &mut self.tokens[here.clone()],
            labels: &mut self.labels[here.clone()],
            weights: &mut self.loss_mask[here],
            starts: &mut starts,
        })?;
        self.cu_seqlens.push(begin as i32);
        self.cu_seqlens.extend(starts.into_iter().map(|start| (begin + start) as i32));
        Ok(())
    }

    /// The batch with `cu_seqlens` ended and filled up to `len` entries, or as often twice as many sequences as are needed:
    /// what ends documents may stand inside those of Megatron-LM's files too.
    pub(super) fn closed(mut self, mut len: usize) -> Batch {
        while len <= self.cu_seqlens.len() {
            len = 2 * len.saturating_sub(1) + 1;
        }
        self.cu_seqlens.resize(len, self.tokens.len() as i32);
        self
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::split::tests::folder;
    use super::*;
    use crate::recipe::Overrides;
    use std::collections::BTreeSet;
    use std::path::Path;

    pub fn loader(root: &Path, set: &[&str], begin: Position) -> Result<Loader> {
        let text = format!(
            "name: t\nmodules: {{lm: {{provider: p}}}}\ndata: {{paths: [{}]}}\noptimizer: {{lr: 1}}\n\
             train: {{steps: 1, seq_length: 4, micro_batch_size: 2, global_batch_size: 4}}\n",
            root.display()
        );
        let overrides = Overrides { set: set.iter().map(|s| s.to_string()).collect(), ..Default::default() };
        Loader::new(&Recipe::parse(&text, &overrides).unwrap(), begin)
    }

    /// 8 documents, 41 tokens: 10 samples of 4.
    pub fn corpus() -> tempfile::TempDir {
        folder(&[
            ("a.txt", b"abcdefgh"),
            ("b.txt", b"i"),
            ("c.txt", b"j"),
            ("d.txt", b"klmnopqrs"),
            ("e.txt", b"tuvw"),
            ("f.txt", b"xyz0"),
            ("g.txt", b"1234"),
            ("h.txt", b"56"),
        ])
    }

    #[test]
    fn labels_follow_tokens_and_boundaries_follow_documents() {
        let root = corpus();
        let loader = loader(root.path(), &[], Position::default()).unwrap();
        assert_eq!((loader.samples_per_epoch(), loader.micro_batches()), (10, 2));
        // Sample 2 is "[end] i [end] j [end]..." cut to 4: starts inside make 1 + 2 pieces, two samples and the end.
        assert_eq!(loader.cu_seqlens_len(), 2 * 3 + 1);
        for (step, micro_batch) in [(1, 0), (1, 1), (2, 0), (7, 1)] {
            let batch = loader.batch(step, micro_batch).unwrap();
            assert_eq!(batch.first_sample, (step - 1) * 4 + micro_batch as u64 * 2);
            assert_eq!((batch.tokens.len(), batch.labels.len(), batch.loss_mask.len()), (8, 8, 8));
            assert_eq!(batch.cu_seqlens.len(), loader.cu_seqlens_len());
            assert!(batch.cu_seqlens.is_sorted());
            assert_eq!((batch.cu_seqlens[0], *batch.cu_seqlens.last().unwrap()), (0, 8));
            for i in [0, 1, 2, 4, 5, 6] {
                assert_eq!(batch.labels[i], batch.tokens[i + 1]);
                // A sequence starts exactly after the end of a document.
                assert_eq!(batch.cu_seqlens.contains(&(i as i32 + 1)), batch.tokens[i] == 256);
            }
            assert!(batch.cu_seqlens.contains(&4));
        }
    }

    #[test]
    fn without_reset_samples_are_whole() {
        let root = corpus();
        let loader = loader(root.path(), &["data.reset_at_document_boundaries=false"], Position::default()).unwrap();
        assert_eq!(loader.batch(1, 0).unwrap().cu_seqlens, [0, 4, 8]);
    }

    #[test]
    fn an_epoch_sees_every_sample_once_and_the_next_in_another_order() {
        let root = corpus();
        let loader = loader(root.path(), &[], Position::default()).unwrap();
        let samples: Vec<Vec<i32>> = (0..10)
            .flat_map(|i| {
                loader
                    .batch(1 + i / 2, (i % 2) as usize)
                    .unwrap()
                    .tokens
                    .chunks(4)
                    .map(<[i32]>::to_vec)
                    .collect::<Vec<_>>()
            })
            .collect();
        let (first, second) = samples.split_at(10);
        assert_eq!(first.iter().collect::<BTreeSet<_>>().len(), 10);
        assert_eq!(first.iter().collect::<BTreeSet<_>>(), second.iter().collect());
        assert_ne!(first, second);
    }

    #[test]
    fn resumed_loader_goes_on_where_the_first_stopped() {
        let root = corpus();
        let whole = loader(root.path(), &[], Position::default()).unwrap();
        let resumed = loader(root.path(), &[], whole.position_after(3)).unwrap();
        assert_eq!(whole.position_after(3), Position { step: 3, samples: 12 });
        assert_eq!(whole.batch(4, 1), resumed.batch(4, 1));
        // With another batch size the samples go on without a gap.
        let wider = loader(root.path(), &["train.global_batch_size=8"], whole.position_after(3)).unwrap();
        assert_eq!(wider.batch(4, 0), whole.batch(4, 0));
        assert_eq!(wider.batch(5, 0).unwrap().first_sample, 20);
    }

    #[test]
    fn too_few_tokens_is_refused() {
        let root = folder(&[("a.txt", b"abc")]);
        let failure = loader(root.path(), &[], Position::default()).unwrap_err();
        let sentence = format!("data path {} holds 4 tokens, fewer than the 5 of one sample", root.path().display());
        assert_eq!((failure.sentence, failure.cause), (sentence, crate::failure::Cause::Data));
    }
}
