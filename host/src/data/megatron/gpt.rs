//! The samples of Megatron-LM's GPT data set, in its order.
//!
//! The sequences of a part are repeated for as many epochs as the wanted samples need and shuffled: the document index
//! (a "document" here is a sequence of the file). Laid end to end they are cut every sequence_length tokens; a sample
//! reads one token more, so neighbours share one: the sample index holds where each begins. The shuffle index then says
//! which of these is sample i. If the last epoch gives fewer than 80 % of its samples, it is shuffled apart from those
//! before it, in both shuffles, so that no sequence of it comes early. All shuffles draw from one RandomState(seed).
//! Source: Megatron-LM, megatron/core/datasets/gpt_dataset.py and helpers.cpp (build_sample_idx), with
//! add_extra_token_to_sequence, which is its default and what its pretraining uses.

use super::cache::Cache;
use super::indexed::IndexedDataset;
use super::random::RandomState;
use super::room;
use super::sample::{Boundaries, Sample};
use super::split::Part;
use super::table::{AnyTable, Table};
use crate::failure::{Failure, Result};
use std::ops::Range;
use std::sync::Arc;

/// How samples are cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GptConfig {
    /// Tokens of a sample.
    pub sequence_length: usize,
    pub seed: u32,
    /// Fills up a sample that is too short; -1 where the tokenizer has none.
    pub pad: i64,
    pub boundaries: Boundaries,
    /// Leave out a last, shorter sample of the validation part; in the other parts it is always left out.
    pub drop_last_partial_validation: bool,
}

/// A part of a data set, cut into samples.
#[derive(Debug)]
pub struct GptDataset {
    set: Arc<IndexedDataset>,
    config: GptConfig,
    epochs: u64,
    key: String,
    document_index: Table<u32>,
    /// Place in `document_index` where each sample begins, and where the last one ends.
    starts: Table<u64>,
    /// Offset into the sequence there; of the very last end -1 if that sequence is empty.
    offsets: Table<i32>,
    shuffle_index: Table<u64>,
    most_sequences: u64,
}

/// What decides the indices of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Cut {
    sequences: Range<usize>,
    epochs: u64,
    /// Samples of all epochs but the last, where it is shuffled apart.
    before_last: Option<u64>,
    count: u64,
    length: u64,
    seed: u32,
}

impl Cut {
    /// For at least `samples` samples of a part; none: one epoch.
    fn new(
        set: &IndexedDataset,
        sequences: Range<usize>,
        samples: Option<u64>,
        part: Part,
        config: &GptConfig,
    ) -> Result<Cut> {
        let bad = |what: String| Failure::data(format!("{}: {what}", set.index().path().display()));
        let length = config.sequence_length as u64;
        if length == 0 || length >= i32::MAX as u64 {
            let range = i32::MAX - 1;
            return Err(Failure::recipe(format!("samples of {length} tokens are not possible; 1 to {range} are")));
        }
        if sequences.end > set.sequences() {
            let (end, all) = (sequences.end, set.sequences());
            return Err(bad(format!("sequences up to {end} were asked for, but there are {all}")));
        }
        if u32::try_from(sequences.end).is_err() {
            return Err(bad(format!("sequence {} is beyond the 2^32 that can be numbered", sequences.end)));
        }
        let per_epoch: u64 = sequences.clone().map(|s| u64::from(set.index().length(s))).sum();
        if per_epoch == 0 {
            return Err(bad(format!("the {part} part has no tokens (sequences {sequences:?})"))
                .remedy("give the part a larger share of the split, or ask no samples of it"));
        }
        let too_many = || bad(format!("{} samples of {length} tokens are too many", samples.unwrap_or(0)));
        let wanted = samples.unwrap_or(0).checked_mul(length).and_then(|n| n.checked_add(1)).ok_or_else(too_many)?;
        let epochs = if samples.is_some() { wanted.div_ceil(per_epoch) } else { 1 };
        let total = epochs.checked_mul(per_epoch).ok_or_else(too_many)?;
        let before_last = (epochs > 1).then(|| ((epochs - 1) * per_epoch - 1) / length).filter(|&before| {
            let from_last = samples.unwrap_or(0) - before;
            from_last < (0.8 * ((per_epoch - 1) / length) as f64) as u64
        });
        let keep_partial = part == Part::Valid && !config.drop_last_partial_validation;
        let count = if keep_partial { (total - 1).div_ceil(length) } else { (total - 1) / length };
        Ok(Cut { sequences, epochs, before_last, count, length, seed: config.seed })
    }

    fn build(&self, set: &IndexedDataset) -> Result<Vec<AnyTable>> {
        let Cut { ref sequences, epochs, before_last, count, length, seed } = *self;
        let mut random = RandomState::new(seed);
        let document_index = documents(sequences.clone(), epochs, before_last.is_some(), &mut random)?;
        let (starts, offsets) = cuts(set, &document_index, count, length)?;
        let mut shuffle_index = room(count, "the shuffle index")?;
        shuffle_index.extend(0..count);
        let (first, last) = shuffle_index.split_at_mut(before_last.unwrap_or(count) as usize);
        random.shuffle(first);
        random.shuffle(last);
        let most = starts.windows(2).map(|pair| pair[1] - pair[0] + 1).max().unwrap_or(1);
        Ok(vec![document_index.into(), starts.into(), offsets.into(), shuffle_index.into(), vec![most].into()])
    }
}

impl GptDataset {
    /// Cuts `sequences` of `set` into at least `samples` samples; none: one epoch. The indices come from the cache or go
    /// into it.
    pub fn new(
        set: Arc<IndexedDataset>,
        sequences: Range<usize>,
        samples: Option<u64>,
        part: Part,
        config: &GptConfig,
        cache: &Cache,
    ) -> Result<GptDataset> {
        let cut = Cut::new(&set, sequences, samples, part, config)?;
        let key = format!("gpt {cut:?} of {}", set.index().sha256());
        let mut tables = cache.get(&key, || cut.build(&set))?;
        let (document_index, starts, offsets, shuffle_index) =
            (tables.next()?, tables.next()?, tables.next()?, tables.next()?);
        let most: Table<u64> = tables.next()?;
        Ok(GptDataset {
            set,
            config: config.clone(),
            epochs: cut.epochs,
            key,
            document_index,
            starts,
            offsets,
            shuffle_index,
            most_sequences: most.get(0).unwrap_or(1),
        })
    }

    /// A text that is equal for two sets if and only if sample i of one is sample i of the other for every i both have.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The file that it reads.
    pub fn set(&self) -> &Arc<IndexedDataset> {
        &self.set
    }

    /// Most sequences of the file that a sample has tokens of.
    pub fn most_sequences(&self) -> u64 {
        self.most_sequences
    }

    /// Bytes of the indices in memory.
    pub fn held_bytes(&self) -> usize {
        let words = self.starts.held_bytes() + self.shuffle_index.held_bytes();
        words + self.document_index.held_bytes() + self.offsets.held_bytes()
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.shuffle_index.len()
    }

    pub fn is_empty(&self) -> bool {
        self.shuffle_index.is_empty()
    }

    pub fn epochs(&self) -> u64 {
        self.epochs
    }

    /// Sequences of the file in the order in which they are laid end to end.
    pub fn document_index(&self) -> impl Iterator<Item = u32> + '_ {
        self.document_index.iter()
    }

    /// Begin of each sample and end of the last: (place in the document index, offset into the sequence there).
    pub fn sample_index(&self) -> impl Iterator<Item = (u64, i32)> + '_ {
        self.starts.iter().zip(self.offsets.iter())
    }

    /// Which entry of the sample index is sample i.
    pub fn shuffle_index(&self) -> impl Iterator<Item = u64> + '_ {
        self.shuffle_index.iter()
    }

    /// The text of sample i [sequence_length + 1], filled up with padding.
    pub fn text(&self, i: usize) -> Result<Vec<i64>> {
        self.text_below(i, &Limit::default())
    }

    /// As [`GptDataset::text`]; a token beyond the limit is refused with its place.
    fn text_below(&self, i: usize, limit: &Limit) -> Result<Vec<i64>> {
        let place = |at: usize| Some((self.starts.get(at)? as usize, self.offsets.get(at)?));
        let whole = self.shuffle_index.get(i).and_then(|at| Some((place(at as usize)?, place(at as usize + 1)?)));
        let Some(((first, offset), (last, end))) = whole else {
            let (path, len) = (self.set.index().path().display(), self.len());
            return Err(Failure::data(format!("{path}: there is no sample {i}, only {len}")));
        };
        let mut text = Vec::with_capacity(self.config.sequence_length + 1);
        for place in first..=last {
            let sequence = self.document_index.get(place).map_or(usize::MAX, |sequence| sequence as usize);
            let begin = if place == first { offset as usize } else { 0 };
            let end = match place == last {
                true => (end + 1) as usize,
                false if sequence < self.set.sequences() => self.set.index().length(sequence) as usize,
                false => 0,
            };
            let before = text.len();
            self.set.read(sequence, begin, end.saturating_sub(begin), &mut text)?;
            if let Some((at, &token)) = text[before..].iter().enumerate().find(|&(_, &token)| !self.fits(token, limit))
            {
                return Err(limit.refusal(&self.set, token, sequence, begin + at));
            }
        }
        text.resize(self.config.sequence_length + 1, self.config.pad);
        Ok(text)
    }

    fn fits(&self, token: i64, limit: &Limit) -> bool {
        token == self.config.pad || (0..limit.vocab.unwrap_or(i64::MAX)).contains(&token)
    }

    /// Sample i, whose tokens must be within the limit.
    pub fn sample_below(&self, i: usize, limit: &Limit) -> Result<Sample> {
        let made = Sample::new(&self.text_below(i, limit)?, self.config.pad, &self.config.boundaries);
        made.map_err(|e| e.at(format!("{}, sample {i}", self.set.index().path().display())))
    }

    /// Sample i.
    pub fn sample(&self, i: usize) -> Result<Sample> {
        self.sample_below(i, &Limit::default())
    }
}

/// The vocabulary that tokens must be of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limit {
    /// Tokens are below this; none: any are taken.
    pub vocab: Option<i64>,
    /// Whose vocabulary it is, e.g. "the model".
    pub owner: String,
}

impl Limit {
    fn refusal(&self, set: &IndexedDataset, token: i64, sequence: usize, place: usize) -> Failure {
        let size = set.index().dtype().size() as u64;
        let byte = set.index().pointer(sequence) + place as u64 * size;
        let what = match self.vocab {
            Some(vocab) if token >= 0 => format!("{} has a vocabulary of {vocab}", self.owner),
            _ => "tokens are numbers from 0".to_string(),
        };
        Failure::data(format!(
            "{}: token {token} at place {place} of sequence {sequence} (byte {byte}); {what}",
            set.path().display()
        ))
        .remedy("train with the vocabulary that the data set was made with, or make it again")
    }
}

/// The document index: the sequences once per epoch, shuffled over all epochs, or over all but the last and the last.
fn documents(sequences: Range<usize>, epochs: u64, last_apart: bool, random: &mut RandomState) -> Result<Vec<u32>> {
    let each = sequences.len() as u64;
    let mut list = room(epochs.saturating_mul(each), "the document index")?;
    for _ in 0..epochs {
        list.extend(sequences.clone().map(|sequence| sequence as u32));
    }
    let first = if last_apart { (epochs - 1) * each } else { epochs * each };
    let (first, last) = list.split_at_mut(first as usize);
    random.shuffle(first);
    random.shuffle(last);
    Ok(list)
}

/// The sample index: places and offsets where `count` samples of `length` tokens begin, and where the last one ends.
fn cuts(set: &IndexedDataset, documents: &[u32], count: u64, length: u64) -> Result<(Vec<u64>, Vec<i32>)> {
    let what = "the sample index";
    let (mut starts, mut offsets) = (room(count.saturating_add(1), what)?, room(count.saturating_add(1), what)?);
    let (mut place, mut offset) = (0, 0i64);
    starts.push(0);
    offsets.push(0);
    for _ in 0..count {
        let mut missing = length as i64 + 1;
        loop {
            let whole = i64::from(set.index().length(documents[place] as usize));
            let left = whole - offset;
            if left >= missing {
                // The next sample begins with the last token of this one.
                offset += missing - 1;
                break;
            }
            missing -= left;
            if place + 1 == documents.len() {
                // A last sample that is kept although it is short.
                offset = whole - 1;
                break;
            }
            (place, offset) = (place + 1, 0);
        }
        starts.push(place as u64);
        offsets.push(offset as i32);
    }
    Ok((starts, offsets))
}

#[cfg(test)]
mod tests;
