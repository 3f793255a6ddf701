//! Made-up corpora, of which it is known how well a model can do.
//!
//! Document d of a corpus is a pure function of (seed, d): its length, then its words, each drawn by its position. With
//! V = `vocab` tokens, W = V - 1 words (the last token ends documents) and D = `document_length`:
//!
//! ```text
//! task       a document                                                     nats of a document, on average
//! uniform    n words, each any of the W                                     ln 2D + E[n] ln W
//! markov     n words; after word x comes (5 x + 1) mod W with               ln 2D + P(n > 0) ln W + E[max(n - 1, 0)] h,
//!            probability 3/4, else any of the W                             h = - q ln q - (1 - q) ln(1 / 4W), q = 3/4 + 1/4W
//! copy       m words of the first W - 1, word W - 1, the same m again       ln M + E[m] ln(W - 1)
//! induction  m pairs: a key (the first K = W / 2 words) and its value       ln M + E[m] ln K + E[distinct keys] ln(W - K)
//!            (the others), which a document draws once for each key
//! ```
//!
//! n is uniform on 0 .. 2D - 1, m on 1 .. M with M = max(D - 3, 1) for copy and max(D - 2, 1) for induction, so that
//! documents have D tokens on average. Divided by the mean length, that is the entropy rate in nats per token: no model
//! does better, and one that sees whole documents can do as well. (The last document is cut to the corpus's length.)

use crate::recipe::{Synthetic, Task};
use gantry_kernels::philox::{Stream, stream_of};

/// Calls `add` with each document's number and words, until there are `tokens` with the ends.
pub(super) fn documents(about: &Synthetic, seed: u64, mut add: impl FnMut(usize, &[i32])) {
    let (mut tokens, mut number, mut words) = (0, 0, Vec::new());
    while tokens < about.tokens {
        words.clear();
        document(about, seed, number, &mut words);
        words.truncate(about.tokens - tokens - 1);
        add(number as usize, &words);
        number += 1;
        tokens += words.len() + 1;
    }
}

/// A number below `n` from 32 random bits; off from uniform by n / 2^32 at most.
fn below(n: usize, bits: u32) -> usize {
    ((u64::from(bits) * n as u64) >> 32) as usize
}

/// What a document is made with.
struct Draws(Stream);

impl Draws {
    /// The document's length, uniform on `1..=most`.
    fn length(&self, most: usize) -> usize {
        1 + below(most, self.0.words(0)[0])
    }

    /// Two random words of a place in the document.
    fn at(&self, place: usize) -> [u32; 2] {
        let [first, second, ..] = self.0.words(1 + place as u64);
        [first, second]
    }
}

fn document(about: &Synthetic, seed: u64, number: u32, out: &mut Vec<i32>) {
    let draws = Draws(Stream::new(seed, stream_of("data.synthetic"), number));
    let (words, length) = (about.vocab - 1, about.document_length);
    match about.task {
        Task::Uniform => out.extend((0..draws.length(2 * length) - 1).map(|i| below(words, draws.at(i)[0]) as i32)),
        Task::Markov => {
            for i in 0..draws.length(2 * length) - 1 {
                let [jump, fresh] = draws.at(i);
                let next = match out.last() {
                    Some(&last) if jump % 4 != 0 => (5 * last as usize + 1) % words,
                    _ => below(words, fresh),
                };
                out.push(next as i32);
            }
        }
        Task::Copy => {
            let half = draws.length(copy_lengths(length));
            out.extend((0..half).map(|i| below(words - 1, draws.at(i)[0]) as i32));
            out.push(words as i32 - 1);
            out.extend_from_within(..half);
        }
        Task::Induction => {
            let (pairs, keys) = (draws.length(induction_lengths(length)), words / 2);
            for i in 0..pairs {
                let key = below(keys, draws.at(i)[0]);
                // Places from 2^32 on belong to the keys.
                let value = keys + below(words - keys, draws.at((1 << 32) + key)[0]);
                out.extend([key as i32, value as i32]);
            }
        }
    }
}

fn copy_lengths(document_length: usize) -> usize {
    document_length.saturating_sub(3).max(1)
}

fn induction_lengths(document_length: usize) -> usize {
    document_length.saturating_sub(2).max(1)
}

/// Entropy of the corpus in nats per token: the loss below which no model goes.
pub(super) fn entropy(about: &Synthetic) -> f64 {
    let (words, length) = ((about.vocab - 1) as f64, about.document_length as f64);
    // Mean of 0 .. 2D - 1, and of 1 .. M.
    let n = (2.0 * length - 1.0) / 2.0;
    let mean = |most: usize| (most as f64 + 1.0) / 2.0;
    let (nats, tokens) = match about.task {
        Task::Uniform => ((2.0 * length).ln() + n * words.ln(), n + 1.0),
        Task::Markov => {
            let (q, other) = (0.75 + 0.25 / words, 0.25 / words);
            let kernel = -q * q.ln() - (words - 1.0) * other * other.ln();
            let begun = 1.0 - 1.0 / (2.0 * length);
            ((2.0 * length).ln() + begun * words.ln() + (n - begun) * kernel, n + 1.0)
        }
        Task::Copy => {
            let most = copy_lengths(about.document_length);
            ((most as f64).ln() + mean(most) * (words - 1.0).ln(), 2.0 * mean(most) + 2.0)
        }
        Task::Induction => {
            let most = induction_lengths(about.document_length);
            let keys = ((about.vocab - 1) / 2) as f64;
            // E[distinct of m] = K (1 - r^m), r = 1 - 1/K; the mean over m of r^m is a geometric sum.
            let r = 1.0 - 1.0 / keys;
            let powers: f64 = (1..=most)
                .scan(1.0, |power, _| {
                    Some({
                        *power *= r;
                        *power
                    })
                })
                .sum();
            let distinct = keys * (1.0 - powers / most as f64);
            let nats = (most as f64).ln() + mean(most) * keys.ln() + distinct * (words - keys).ln();
            (nats, 2.0 * mean(most) + 1.0)
        }
    };
    nats / tokens
}

#[cfg(test)]
mod tests {
    use super::super::corpus::Builder;
    use super::super::{Corpus, ngram};
    use super::*;
    use rstest::rstest;
    use std::collections::HashMap;

    const ALL: [Task; 4] = [Task::Uniform, Task::Markov, Task::Copy, Task::Induction];

    fn about(task: Task, vocab: usize, document_length: usize, tokens: usize) -> Synthetic {
        Synthetic { task, vocab, document_length, tokens }
    }

    fn corpus(about: &Synthetic, seed: u64) -> Corpus {
        let mut builder = Builder::ids(about.vocab);
        documents(about, seed, |number, words| builder.add_ids(&number.to_string(), words));
        builder.finish()
    }

    fn all_tokens(corpus: &Corpus) -> Vec<i32> {
        let mut tokens = vec![0; corpus.len()];
        corpus.read(0, &mut tokens);
        tokens
    }

    #[test]
    fn a_document_is_a_function_of_seed_and_number() {
        for task in ALL {
            let about = about(task, 33, 50, 10_000);
            let tokens = all_tokens(&corpus(&about, 1));
            assert_eq!(tokens.len(), 10_000);
            assert_eq!(tokens, all_tokens(&corpus(&about, 1)));
            assert_ne!(tokens, all_tokens(&corpus(&about, 2)));
            assert!(tokens.iter().all(|token| (0..33).contains(token)));
            let ends = tokens.iter().filter(|&&token| token == 32).count();
            assert!((150..260).contains(&ends), "{task:?}: {ends}");
            // A longer corpus begins with the shorter one's documents.
            let longer = all_tokens(&corpus(&Synthetic { tokens: 20_000, ..about }, 1));
            assert_eq!(longer[..9_000], tokens[..9_000]);
        }
    }

    /// -ln p of a document by its definition, its length included. Knows nothing of [`entropy`].
    fn nats(task: Task, vocab: usize, length: usize, words: &[i32]) -> f64 {
        let w = vocab as f64 - 1.0;
        match task {
            Task::Uniform => (2.0 * length as f64).ln() + words.len() as f64 * w.ln(),
            Task::Markov => {
                let step = |pair: &[i32]| {
                    let chained = (5 * pair[0] as usize + 1) % (vocab - 1) == pair[1] as usize;
                    -(if chained { 0.75 + 0.25 / w } else { 0.25 / w }).ln()
                };
                let first = if words.is_empty() { 0.0 } else { w.ln() };
                (2.0 * length as f64).ln() + first + words.windows(2).map(step).sum::<f64>()
            }
            Task::Copy => {
                let half = words.len() / 2;
                assert_eq!(words[half], vocab as i32 - 2);
                assert_eq!(words[..half], words[half + 1..]);
                assert!(words[..half].iter().all(|&word| word < vocab as i32 - 2));
                (length as f64 - 3.0).ln() + half as f64 * (w - 1.0).ln()
            }
            Task::Induction => {
                let keys = (vocab - 1) / 2;
                let mut values = HashMap::new();
                for pair in words.chunks(2) {
                    assert!((pair[0] as usize) < keys && (keys..vocab - 1).contains(&(pair[1] as usize)));
                    assert_eq!(*values.entry(pair[0]).or_insert(pair[1]), pair[1]);
                }
                let pairs = words.len() as f64 / 2.0;
                (length as f64 - 2.0).ln() + pairs * (keys as f64).ln() + values.len() as f64 * (w - keys as f64).ln()
            }
        }
    }

    #[rstest]
    fn entropy_is_what_an_ideal_model_loses(
        #[values(Task::Uniform, Task::Markov, Task::Copy, Task::Induction)] task: Task,
        #[values((9, 12), (33, 40), (257, 100))] (vocab, length): (usize, usize),
    ) {
        let about = about(task, vocab, length, 400_000);
        let (mut sum, mut tokens) = (0.0, 0);
        documents(&about, 5, |_, words| {
            // The last one is cut.
            if tokens < 399_000 {
                sum += nats(task, vocab, length, words);
                tokens += words.len() + 1;
            }
        });
        let (found, expected) = (sum / tokens as f64, entropy(&about));
        assert!((found / expected - 1.0).abs() < 0.01, "{found} nats per token, expected {expected}");
    }

    /// A bigram learns the chain down to its entropy (and a little above it: it does not know a document's length, and
    /// has to count); it learns nothing of copies.
    #[test]
    fn a_bigram_learns_the_chain_and_no_copies() {
        let bigram = |task| {
            let about = about(task, 33, 200, 300_000);
            let loss = ngram::held_out_loss(&corpus(&about, 1), &corpus(&about, 2), 2, 33);
            (loss, entropy(&about))
        };
        let (loss, floor) = bigram(Task::Markov);
        assert!(loss > floor && loss < floor * 1.03, "{loss} nats, entropy {floor}");
        let (loss, floor) = bigram(Task::Copy);
        assert!(loss > 1.8 * floor, "{loss} nats, entropy {floor}");
    }
}
