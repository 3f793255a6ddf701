//! Made-up corpora for tests and benchmarks.

use crate::recipe::Synthetic;
use gantry_kernels::philox::{Stream, stream_of};

/// A Markov chain: with probability 3/4 the next token is 5 x + 1 modulo vocab - 1, else uniform. Document lengths
/// are uniform around the mean. A model can learn it down to about 0.56 + ln(vocab) / 4 nats per token. `add` gets each
/// document's number and tokens.
pub(super) fn documents(synthetic: &Synthetic, seed: u64, mut add: impl FnMut(usize, &[i32])) {
    let draws = Stream::new(seed, stream_of("data.synthetic"), 0);
    let words = synthetic.vocab - 1;
    let (mut begin, mut number, mut document) = (0, 0, Vec::new());
    while begin < synthetic.tokens {
        let length = 1 + draws.words(2 * begin as u64 + 1)[0] as usize % (2 * synthetic.document_length);
        let length = length.min(synthetic.tokens - begin);
        document.clear();
        for i in 0..length - 1 {
            let [jump, fresh, ..] = draws.words(2 * (begin + i) as u64);
            let next = match document.last() {
                Some(&last) if jump % 4 != 0 => (5 * last as usize + 1) % words,
                _ => fresh as usize % words,
            };
            document.push(next as i32);
        }
        add(number, &document);
        number += 1;
        begin += length;
    }
}

/// All documents as one corpus.
#[cfg(test)]
pub(super) fn corpus(synthetic: &Synthetic, seed: u64) -> super::Corpus {
    let mut builder = super::corpus::Builder::ids(synthetic.vocab);
    documents(synthetic, seed, |number, document| builder.add_ids(&number.to_string(), document));
    builder.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn synthetic_corpus_is_deterministic_and_mostly_a_chain() {
        let about = Synthetic { vocab: 33, document_length: 50, tokens: 10_000 };
        let read = |seed| {
            let corpus = corpus(&about, seed);
            let mut tokens = vec![0; corpus.len()];
            corpus.read(0, &mut tokens);
            tokens
        };
        let tokens = read(1);
        assert_eq!(tokens.len(), 10_000);
        assert_eq!(tokens, read(1));
        assert_ne!(tokens, read(2));
        assert!(tokens.iter().all(|token| (0..33).contains(token)));
        let chained = tokens.windows(2).filter(|pair| pair[1] == (5 * pair[0] + 1) % 32).count();
        assert!((7_000..8_200).contains(&chained), "{chained}");
        let ends = tokens.iter().filter(|&&token| token == 32).count();
        assert!((150..260).contains(&ends), "{ends}");
    }
}
