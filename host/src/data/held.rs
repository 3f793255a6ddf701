//! What a model is judged by: documents of a corpus, or the validation part of Megatron-LM's files.

use super::blends::Looks;
use super::{Batch, Tokenizer, Valid};
use crate::failure::Result;
use std::fmt;

/// Held-out data.
#[derive(Clone, Debug)]
pub enum Held {
    Documents(Valid),
    Looks(Looks),
}

/// Held-out samples that make one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick {
    first: u64,
    count: usize,
}

impl Held {
    /// The micro-batches of a pass over about `samples` samples after a step. Of documents they are spread evenly, none:
    /// all; of Megatron-LM's files they are the step's, as many as the recipe says.
    pub fn after(&self, step: u64, last: u64, samples: Option<usize>, size: usize) -> Vec<Pick> {
        match self {
            Held::Documents(valid) => {
                let all = valid.micro_batches(size);
                let number = samples.filter(|_| step != last).map_or(all, |samples| samples.div_ceil(size).min(all));
                (0..number).map(|i| Pick { first: (i * all / number * size) as u64, count: size }).collect()
            }
            Held::Looks(looks) => picks(looks.after(step, last), size),
        }
    }

    /// The micro-batches of a pass over everything.
    pub fn all(&self, size: usize) -> Vec<Pick> {
        match self {
            Held::Documents(valid) => picks(0..(valid.micro_batches(size) * size) as u64, size),
            Held::Looks(looks) => picks(0..looks.blended().samples(), size),
        }
    }

    /// A micro-batch of `size` samples.
    pub fn batch(&self, pick: Pick, size: usize) -> Result<Batch> {
        match self {
            Held::Documents(valid) => valid.batch(pick.first as usize / size, size),
            Held::Looks(looks) => looks.batch(pick.first, pick.count, size),
        }
    }

    /// Bytes of text that the tokens asked for stand for; 0 if that is not known.
    pub fn text_bytes(&self, pick: Pick, size: usize) -> u64 {
        match self {
            Held::Documents(valid) => valid.text_bytes(pick.first as usize / size, size),
            Held::Looks(_) => 0,
        }
    }

    /// Refuses tokens beyond a model's vocabulary when they are met.
    pub fn limit_vocab(&mut self, model: Option<usize>) {
        if let Held::Looks(looks) = self {
            looks.limit_vocab(model);
        }
    }

    /// What made the tokens, if it is known.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        match self {
            Held::Documents(valid) => valid.corpus().tokenizer(),
            Held::Looks(_) => None,
        }
    }

    /// Documents, or sequences of Megatron-LM's files.
    pub fn documents(&self) -> u64 {
        match self {
            Held::Documents(valid) => valid.corpus().summary().documents as u64,
            Held::Looks(looks) => looks.blended().sequences(),
        }
    }

    /// Hash that tells whether two runs see the same data.
    pub fn sha256(&self) -> &str {
        match self {
            Held::Documents(valid) => &valid.corpus().summary().sha256,
            Held::Looks(looks) => looks.blended().sha256(),
        }
    }

    /// Bytes in memory.
    pub fn bytes(&self) -> usize {
        match self {
            Held::Documents(valid) => valid.corpus().bytes(),
            Held::Looks(looks) => looks.blended().bytes(),
        }
    }
}

fn picks(samples: std::ops::Range<u64>, size: usize) -> Vec<Pick> {
    let of = |first: u64| Pick { first, count: (samples.end - first).min(size as u64) as usize };
    samples.clone().step_by(size).map(of).collect()
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Held::Documents(valid) => valid.corpus().summary().fmt(f),
            Held::Looks(looks) => looks.blended().fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picks_cover_samples_once() {
        let list: Vec<_> = picks(5..12, 3).iter().map(|pick| (pick.first, pick.count)).collect();
        assert_eq!(list, [(5, 3), (8, 3), (11, 1)]);
        assert!(picks(4..4, 3).is_empty());
    }
}
