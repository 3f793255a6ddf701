//! A baseline to judge a model's held-out loss by: an n-gram model with Witten-Bell smoothing, interpolated.
//!
//! With h the k tokens before w, h' the last k - 1 of them, c(hw) how often w follows h in the training documents, c(h)
//! their sum over w, and T(h) the number of different w:
//!
//! ```text
//! p_k(w | h) = (c(hw) + T(h) p_{k-1}(w | h')) / (c(h) + T(h)),    p_k = p_{k-1} where h was never seen
//! p_0(w)     = (c(w) + T / V) / (c + T)                           V: size of the vocabulary
//! ```
//!
//! (method C of Witten and Bell 1991 in the recursive form of Chen and Goodman 1998, section 2.6.) An n-gram of order n
//! looks at n - 1 tokens. Documents are independent: before the first token of each stand end-of-document tokens, and its
//! own end is predicted like any token.

use super::Corpus;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Cross entropy of `valid` in nats per token under an n-gram of `order` >= 1 that is counted in `train`. `vocab`: number
/// of different tokens.
pub fn held_out_loss(train: &Corpus, valid: &Corpus, order: usize, vocab: usize) -> f64 {
    let counts = Counts::of(train, order);
    let mut sum = 0.0;
    for_each_document(valid, |document| sum += counts.nats(document, valid.end(), vocab));
    sum / valid.len().max(1) as f64
}

/// Calls `f` with the tokens of each document, its end included.
fn for_each_document(corpus: &Corpus, mut f: impl FnMut(&[i32])) {
    let mut document = Vec::new();
    for range in corpus.documents() {
        document.resize(range.len(), 0);
        corpus.read(range.start, &mut document);
        f(&document);
    }
}

/// Counts of a tree of n-grams. Level k holds the sequences of k + 1 tokens; a sequence's number on its level is the
/// number of the context that it is on the next. Level 0 has the single empty context, 0.
struct Counts {
    levels: Vec<Level>,
}

#[derive(Default)]
struct Level {
    /// (context, next token) to the number of the sequence.
    sequences: HashMap<(u32, i32), u32, BuildHasherDefault<Mixing>>,
    /// Of each sequence: c(hw).
    counts: Vec<u32>,
    /// Of each context: c(h) and T(h).
    contexts: Vec<(u32, u32)>,
}

impl Level {
    /// The number of a sequence, with `seen` more occurrences.
    fn add(&mut self, context: u32, token: i32, seen: u32) -> u32 {
        let number = *self.sequences.entry((context, token)).or_insert(self.counts.len() as u32);
        if number as usize == self.counts.len() {
            self.counts.push(0);
        }
        if self.contexts.len() <= context as usize {
            self.contexts.resize(context as usize + 1, (0, 0));
        }
        let (count, (total, different)) = (&mut self.counts[number as usize], &mut self.contexts[context as usize]);
        *different += u32::from(*count == 0 && seen > 0);
        *count += seen;
        *total += seen;
        number
    }
}

impl Counts {
    fn of(corpus: &Corpus, order: usize) -> Counts {
        let mut levels: Vec<Level> = (0..order).map(|_| Level::default()).collect();
        // The contexts before a document are no events, only names for what was not seen yet.
        let mut boundary = vec![0];
        for level in &mut levels {
            let context = boundary[boundary.len() - 1];
            boundary.push(level.add(context, corpus.end(), 0));
        }
        for_each_document(corpus, |document| {
            let mut contexts = boundary.clone();
            for &token in document {
                let mut previous = 0;
                for (level, context) in levels.iter_mut().zip(&mut contexts) {
                    let number = level.add(*context, token, 1);
                    *context = std::mem::replace(&mut previous, number);
                }
            }
        });
        Counts { levels }
    }

    /// -ln p of a document's tokens, added up.
    fn nats(&self, document: &[i32], end: i32, vocab: usize) -> f64 {
        let mut boundary = vec![Some(0)];
        for level in &self.levels {
            let context = boundary[boundary.len() - 1];
            boundary.push(context.and_then(|context| level.sequences.get(&(context, end)).copied()));
        }
        let (mut contexts, mut sum) = (boundary, 0.0);
        for &token in document {
            let (mut p, mut previous) = (1.0 / vocab as f64, Some(0));
            for (level, context) in self.levels.iter().zip(&mut contexts) {
                let number = context.and_then(|context| level.sequences.get(&(context, token)).copied());
                if let Some(&(total, different)) = context.and_then(|context| level.contexts.get(context as usize)) {
                    let count = number.map_or(0, |number| level.counts[number as usize]);
                    let (total, different) = (f64::from(total), f64::from(different));
                    if total > 0.0 {
                        p = (f64::from(count) + different * p) / (total + different);
                    }
                }
                *context = std::mem::replace(&mut previous, number);
            }
            sum -= p.ln();
        }
        sum
    }
}

/// A quick hash of the pairs above: multiplied into the high bits, which are then folded down (Fibonacci hashing).
#[derive(Default)]
struct Mixing(u64);

impl Hasher for Mixing {
    fn finish(&self) -> u64 {
        let product = self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        product ^ product >> 32
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u32(byte.into()));
    }

    fn write_u32(&mut self, word: u32) {
        self.0 = self.0.rotate_left(32) ^ u64::from(word);
    }

    fn write_i32(&mut self, word: i32) {
        self.write_u32(word as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::super::corpus::Builder;
    use super::*;
    use rstest::rstest;
    use std::path::Path;

    fn corpus(documents: &[&str]) -> Corpus {
        let mut builder = Builder::bytes();
        documents.iter().for_each(|text| builder.add_text(Path::new(""), text.as_bytes()));
        builder.finish()
    }

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-12 * b.abs(), "{a} is not {b}");
    }

    #[test]
    fn by_hand() {
        let train = corpus(&["ab"]);
        let valid = corpus(&["b"]);
        // Unigram: a, b and the end once each, three kinds.
        let one = (1.0 + 3.0 / 257.0) / 6.0;
        close(held_out_loss(&train, &valid, 1, 257), -f64::ln(one));
        // Bigram: after the boundary came a alone, after b the end alone.
        let (first, last) = ((0.0 + one) / 2.0, (1.0 + one) / 2.0);
        close(held_out_loss(&train, &valid, 2, 257), -(f64::ln(first) + f64::ln(last)) / 2.0);
        // Trigram: two boundaries were followed by a alone; boundary and b were never seen together.
        let first = (0.0 + first) / 2.0;
        close(held_out_loss(&train, &valid, 3, 257), -(f64::ln(first) + f64::ln(last)) / 2.0);
    }

    /// The definition, word for word.
    fn naive(documents: &[Vec<i32>], history: &[i32], token: i32, vocab: usize) -> f64 {
        let lower = match history {
            [] => 1.0 / vocab as f64,
            [_, rest @ ..] => naive(documents, rest, token, vocab),
        };
        let follows: Vec<i32> = documents
            .iter()
            .flat_map(|document| {
                let padded = [vec![256; history.len()], document.clone()].concat();
                let found = padded.windows(history.len() + 1).filter(|part| part.starts_with(history));
                found.map(|part| part[history.len()]).collect::<Vec<_>>()
            })
            .collect();
        let different = follows.iter().collect::<std::collections::HashSet<_>>().len() as f64;
        let count = follows.iter().filter(|&&next| next == token).count() as f64;
        if follows.is_empty() { lower } else { (count + different * lower) / (follows.len() as f64 + different) }
    }

    fn tokens(text: &str) -> Vec<i32> {
        text.bytes().map(i32::from).chain([256]).collect()
    }

    const TRAIN: [&str; 4] = ["abracadabra", "abba", "a", "barbara cadabra"];
    const VALID: [&str; 3] = ["abracadabba", "zebra", "ab"];

    #[rstest]
    fn the_definition(#[values(1, 2, 3, 4, 6)] order: usize) {
        let documents: Vec<_> = TRAIN.iter().map(|text| tokens(text)).collect();
        let (mut sum, mut count) = (0.0, 0.0);
        for document in VALID.iter().map(|text| tokens(text)) {
            let padded = [vec![256; order - 1], document].concat();
            for part in padded.windows(order) {
                sum -= naive(&documents, &part[..order - 1], part[order - 1], 257).ln();
                count += 1.0;
            }
        }
        close(held_out_loss(&corpus(&TRAIN), &corpus(&VALID), order, 257), sum / count);
    }

    #[test]
    fn probabilities_add_up_to_one() {
        let counts = Counts::of(&corpus(&TRAIN), 3);
        for before in ["", "a", "ab", "ra", "zz", "az"] {
            let prefix: Vec<i32> = before.bytes().map(i32::from).collect();
            let nats = |more: &[i32]| counts.nats(&[prefix.as_slice(), more].concat(), 256, 257);
            let sum: f64 = (0..257).map(|token| (nats(&[]) - nats(&[token])).exp()).sum();
            close(sum, 1.0);
        }
    }
}
