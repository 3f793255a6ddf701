//! From a recipe's `data.megatron` to the samples of its parts, as Megatron-LM's pretraining builds them.
//!
//! How many samples a part is asked for decides epochs and shuffles, and so the order. Training asks for
//! `data.megatron.train_samples`, else train.steps x train.global_batch_size. Validation asks for `train.eval_samples` per
//! look, of which there are train.steps / train.eval_every (rounded down) and one at the end; without `train.eval_samples`
//! every look takes each sample of one epoch once. A single file is read in its own order; weighted files are blended to
//! the number of samples; files without weights are read once, mixed by their numbers of samples. Source: Megatron-LM,
//! megatron/training/training.py (get_train_valid_test_num_samples) and
//! megatron/core/datasets/blended_megatron_dataset_builder.py.

use super::megatron::{Blend, Boundaries, Cache, GptConfig, IndexedDataset, Limit, Part, Source, parts};
use super::samples::{Row, Samples};
use super::{Batch, Tokenizer};
use crate::failure::{Failure, Result};
use crate::recipe::{BlendSpec, Recipe};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// One part of the data of `data.megatron`.
#[derive(Debug)]
pub(super) struct Blended {
    blend: Blend,
    limit: Limit,
    part: Part,
    files: usize,
    /// Of the part, once each.
    sequences: u64,
    tokens: u64,
    /// Of the files.
    sha256: String,
    /// Of the order of samples.
    order: String,
    /// Samples that were asked for.
    asked: Option<u64>,
    seq_length: usize,
    /// Sequences begin after the ends of documents.
    resets: bool,
}

/// The files of a recipe, each opened once.
pub(super) struct Files {
    config: GptConfig,
    cache: Cache,
    limit: Limit,
    split: String,
    surplus: f64,
    open: BTreeMap<PathBuf, Arc<IndexedDataset>>,
}

/// How many samples a part is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    Samples(u64),
    /// One epoch, every sample once, whatever the weights.
    Once,
}

impl Files {
    /// `tokenizer`: that of the recipe; none if nothing is known of the tokens but which one ends documents.
    pub fn new(recipe: &Recipe, tokenizer: Option<&Tokenizer>) -> Result<Files> {
        let given = &recipe.data.megatron;
        let end = match (given.eod, tokenizer) {
            (Some(end), _) => i64::from(end),
            (None, Some(tokenizer)) => i64::from(tokenizer.end_of_document().map_err(|failure| {
                failure.remedy("name it in data.special_tokens, or give its id as data.megatron.eod")
            })?),
            (None, None) => return Err(Failure::recipe("data.megatron.eod: no token ends documents")),
        };
        // Megatron-LM ignores a padding token that is another special token too, and has none without a tokenizer's.
        let pad = tokenizer.and_then(|tokenizer| tokenizer.special(super::tokenizer::PAD)).map(i64::from);
        let boundaries = Boundaries {
            end,
            reset_positions: recipe.data.reset_at_document_boundaries,
            reset_attention: recipe.data.reset_at_document_boundaries,
            mask_loss: given.eod_mask_loss,
        };
        Ok(Files {
            config: GptConfig {
                sequence_length: recipe.train.seq_length,
                seed: given.seed.unwrap_or(recipe.train.seed) as u32,
                pad: pad.filter(|&pad| pad != end).unwrap_or(-1),
                boundaries,
                drop_last_partial_validation: true,
            },
            cache: given.data_cache_path.as_ref().map_or(Cache::none(), Cache::at),
            limit: match tokenizer {
                None => Limit::default(),
                Some(tokenizer) => Limit {
                    vocab: Some(tokenizer.vocab_size() as i64),
                    owner: format!("data.tokenizer ({})", tokenizer.name()),
                },
            },
            split: given.split.clone(),
            surplus: given.mid_level_dataset_surplus,
            open: BTreeMap::new(),
        })
    }

    fn opened(&mut self, blend: &BlendSpec, key: &str) -> Result<Vec<Arc<IndexedDataset>>> {
        let mut opened = Vec::new();
        for prefix in &blend.prefixes {
            if !self.open.contains_key(prefix) {
                let set = IndexedDataset::open(prefix).map_err(|failure| failure.at(key))?;
                self.open.insert(prefix.clone(), Arc::new(set));
            }
            opened.extend(self.open.get(prefix).cloned());
        }
        Ok(opened)
    }

    /// A part of a blend. `whole`: the files have no other part.
    fn part(&mut self, blend: &BlendSpec, key: &'static str, part: Part, asked: Asked) -> Result<Blended> {
        let files = self.opened(blend, key)?;
        let whole = key != "data.megatron.data_path";
        let split = match (whole, part) {
            (false, _) => self.split.clone(),
            (true, Part::Train) => "1".into(),
            (true, Part::Valid) => "0,1".into(),
            (true, Part::Test) => "0,0,1".into(),
        };
        let place = |failure: Failure| match failure.sentence.starts_with("the split") {
            true => failure.at("data.megatron.split"),
            false => failure,
        };
        let (mut sequences, mut tokens, mut hash) = (0, 0, Sha256::new());
        for set in &files {
            let range = parts(&split, set.sequences()).map_err(place)?[part as usize].clone().unwrap_or(0..0);
            sequences += range.len() as u64;
            tokens += range.map(|sequence| u64::from(set.index().length(sequence))).sum::<u64>();
            hash.update(set.sha256());
        }
        let source = Source { files: &files, split: &split, part, config: &self.config, cache: &self.cache };
        let blended = match (asked, &blend.weights) {
            // Weights of a single file mean nothing where every part has files of its own.
            (Asked::Samples(n), _) if files.len() == 1 && (whole || blend.weights.is_none()) => {
                Blend::single(&source, Some(n))
            }
            (Asked::Samples(n), Some(weights)) => Blend::by_weights(&source, weights, n, self.surplus),
            (Asked::Samples(n), None) => Blend::exhausting(&source, Some(n)),
            (Asked::Once, _) if files.len() == 1 => Blend::single(&source, None),
            (Asked::Once, _) => Blend::exhausting(&source, None),
        };
        let blend = blended.map_err(place)?;
        let boundaries = self.config.boundaries;
        let order = Sha256::digest(format!("{} {boundaries:?}", blend.key()));
        Ok(Blended {
            order: crate::checkpoint::hexadecimal(&order),
            sha256: crate::checkpoint::hexadecimal(&hash.finalize()),
            limit: self.limit.clone(),
            files: files.len(),
            asked: match asked {
                Asked::Samples(n) => Some(n),
                Asked::Once => None,
            },
            blend,
            part,
            sequences,
            tokens,
            seq_length: self.config.sequence_length,
            resets: boundaries.reset_attention,
        })
    }

    /// What a recipe trains on.
    pub fn training(&mut self, recipe: &Recipe) -> Result<Blended> {
        let (blend, key) = recipe.data.megatron.training();
        let samples = training_samples(recipe);
        let made = self.part(blend, key, Part::Train, Asked::Samples(samples))?;
        if made.samples() < samples {
            let have = made.samples();
            return Err(Failure::data(format!(
                "{key}: files without weights are read once, which gives {have} samples of {} tokens; the run takes \
                 {samples}",
                recipe.train.seq_length
            ))
            .remedy("give the files weights, make train.steps smaller, or name a single file, which is repeated"));
        }
        Ok(made)
    }

    /// What it holds out, if anything.
    pub fn held_out(&mut self, recipe: &Recipe, asked: Asked) -> Result<Option<Blended>> {
        let Some((blend, key)) = recipe.data.megatron.held_out() else { return Ok(None) };
        Ok(Some(self.part(blend, key, Part::Valid, asked)?))
    }
}

/// Samples that the order of training is made for.
pub(super) fn training_samples(recipe: &Recipe) -> u64 {
    let train = &recipe.train;
    let steps = train.steps.saturating_mul(train.global_batch_size as u64);
    recipe.data.megatron.train_samples.unwrap_or(steps)
}

/// Samples that validation is asked for during a run.
pub(super) fn validation_samples(recipe: &Recipe) -> Asked {
    let train = &recipe.train;
    let Some(samples) = train.eval_samples else { return Asked::Once };
    let looks = train.steps.checked_div(train.eval_every).unwrap_or(0);
    Asked::Samples((looks + 1).saturating_mul(samples as u64))
}

impl Blended {
    /// Number of samples that there are.
    pub fn samples(&self) -> u64 {
        self.blend.len() as u64
    }

    /// Samples that the order was made for; nothing: one epoch.
    pub fn asked(&self) -> Option<u64> {
        self.asked
    }

    pub fn sequences(&self) -> u64 {
        self.sequences
    }

    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// Equal for two orders if and only if sample i of one is sample i of the other, as far as both go.
    pub fn order(&self) -> &str {
        &self.order
    }

    /// Bytes of the indices in memory.
    pub fn bytes(&self) -> usize {
        self.blend.held_bytes()
    }

    /// Most pieces into which the ends of documents part a sample, if every sequence of the files is a document.
    fn pieces(&self) -> usize {
        match self.resets {
            false => 1,
            true => usize::try_from(self.blend.most_sequences()).unwrap_or(usize::MAX).min(self.seq_length),
        }
    }

    /// Writes sample i, whose tokens must be within the limit.
    fn write(&self, i: u64, limit: &Limit, row: &mut Row<'_>) -> Result<()> {
        let at = usize::try_from(i).unwrap_or(usize::MAX);
        if at >= self.blend.len() {
            let (have, part) = (self.samples(), self.part);
            return Err(Failure::data(format!(
                "the order of the {part} part has {have} samples, and sample {i} is asked for"
            ))
            .remedy("make train.steps or data.megatron.train_samples larger"));
        }
        let sample = self.blend.sample_below(at, limit)?;
        row.tokens.copy_from_slice(&sample.tokens);
        row.labels.copy_from_slice(&sample.labels);
        row.weights.copy_from_slice(&sample.loss_mask);
        let inside = sample.cu_seqlens.iter().filter(|&&at| at > 0 && (at as usize) < sample.tokens.len());
        row.starts.extend(inside.map(|&at| at as usize));
        Ok(())
    }
}

/// A part whose tokens are checked against a model's vocabulary.
#[derive(Clone, Debug)]
pub(super) struct Limited {
    pub blended: Arc<Blended>,
    limit: Limit,
}

impl Limited {
    /// `model`: its vocabulary, if it is known.
    pub fn new(blended: Arc<Blended>, model: Option<usize>) -> Limited {
        let limit = match (model, blended.limit.vocab) {
            (Some(model), tokenizer) if tokenizer.is_none_or(|known| model as i64 <= known) => {
                Limit { vocab: Some(model as i64), owner: "the model".into() }
            }
            _ => blended.limit.clone(),
        };
        Limited { blended, limit }
    }
}

impl Samples for Limited {
    fn per_epoch(&self) -> u64 {
        self.blended.samples()
    }

    fn most_sequences(&self) -> usize {
        self.blended.pieces()
    }

    fn fill(&self, number: u64, row: &mut Row<'_>) -> Result<()> {
        self.blended.write(number, &self.limit, row)
    }
}

/// Held-out samples, looked at in turn.
#[derive(Clone, Debug)]
pub struct Looks {
    samples: Limited,
    seq_length: usize,
    /// Samples of a look; none: all.
    each: Option<u64>,
    every: u64,
}

impl Looks {
    pub(super) fn new(blended: Blended, recipe: &Recipe) -> Looks {
        Looks {
            each: blended.asked.and(recipe.train.eval_samples).map(|samples| samples as u64),
            samples: Limited::new(Arc::new(blended), None),
            seq_length: recipe.train.seq_length,
            every: recipe.train.eval_every,
        }
    }

    pub(super) fn limit_vocab(&mut self, model: Option<usize>) {
        self.samples = Limited::new(Arc::clone(&self.samples.blended), model);
    }

    pub(super) fn blended(&self) -> &Blended {
        &self.samples.blended
    }

    /// Samples after a step: those that no look before had, or all.
    pub(super) fn after(&self, step: u64, last: u64) -> std::ops::Range<u64> {
        let Some(each) = self.each else { return 0..self.samples.per_epoch() };
        // The look at the end comes after those of the steps before it.
        let before = match step == last {
            true => step.checked_div(self.every).unwrap_or(0),
            false => (step / self.every.max(1)).saturating_sub(1),
        };
        let begin = before.saturating_mul(each);
        begin..begin.saturating_add(each)
    }

    /// Samples `from .. from + count` in a micro-batch of `size`; the rest of it is padding.
    pub(super) fn batch(&self, from: u64, count: usize, size: usize) -> Result<Batch> {
        let mut batch = Batch::empty(self.seq_length, size, from);
        for at in 0..size {
            batch.row(at, |row| match at < count {
                true => self.samples.fill(from + at as u64, row),
                false => {
                    row.weights.fill(0.0);
                    Ok(())
                }
            })?;
        }
        Ok(batch.closed(size * self.samples.most_sequences() + 1))
    }
}

/// Files, sequences, tokens, samples, and the hash, for the log.
impl fmt::Display for Blended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Blended { files, sequences, tokens, sha256, .. } = self;
        let epochs: Vec<String> = self.blend.sets().iter().map(|set| set.epochs().to_string()).collect();
        let epochs = if epochs.len() > 8 { format!("{} and more", epochs[..8].join(", ")) } else { epochs.join(", ") };
        write!(f, "{sequences} sequences, {tokens} tokens in {files} files")?;
        write!(f, ", {} samples (epochs: {epochs}), sha256 {sha256}", self.samples())
    }
}

#[cfg(test)]
mod tests;
