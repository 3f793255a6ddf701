//! A corpus in memory: all documents back to back, each closed by an end-of-document token.

use super::files;
use crate::failure::{Failure, Result};
use crate::recipe::{Data, Synthetic, Tokenizer};
use gantry_kernels::philox::{Stream, stream_of};
use sha2::{Digest, Sha256};
use std::ops::Range;

/// Byte tokenizer: token ids 0 to 255 are bytes, this one ends a document.
pub const END_OF_DOCUMENT: i32 = 256;

/// Documents as one row of tokens.
#[derive(Clone, Debug)]
pub struct Corpus {
    tokens: Tokens,
    /// First token of each document, in order, then the number of tokens.
    starts: Vec<usize>,
    vocab: usize,
    summary: Summary,
}

#[derive(Clone, Debug)]
enum Tokens {
    /// The documents' bytes without their ends, which `starts` implies.
    Bytes(Vec<u8>),
    Ids(Vec<i32>),
}

/// What went into a corpus.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    pub documents: usize,
    pub tokens: usize,
    /// Files left out because they hold NUL bytes or are not UTF-8.
    pub skipped_binary: usize,
    pub skipped_empty: usize,
    /// Of documents and their order, hexadecimal: tells whether a resumed run sees the same data.
    pub sha256: String,
}

impl Corpus {
    /// Reads the recipe's files, or makes its synthetic corpus.
    pub(crate) fn open(data: &Data, seed: u64) -> Result<Corpus> {
        match &data.synthetic {
            Some(synthetic) => Ok(Corpus::synthetic(synthetic, seed)),
            None => Corpus::from_files(data),
        }
    }

    fn from_files(data: &Data) -> Result<Corpus> {
        let files = files::find(&data.paths, &data.extensions, &data.exclude)?;
        let mut summary = Summary::default();
        let (mut bytes, mut starts) = (Vec::new(), vec![0]);
        for file in &files {
            let text = std::fs::read(file).map_err(|error| {
                Failure::data(format!("cannot read data file {}: {error}", file.display()))
                    .remedy("make the file readable or add it to data.exclude")
            })?;
            if text.is_empty() {
                summary.skipped_empty += 1;
            } else if text.contains(&0) || std::str::from_utf8(&text).is_err() {
                summary.skipped_binary += 1;
            } else {
                bytes.extend_from_slice(&text);
                starts.push(bytes.len() + starts.len());
            }
        }
        if starts.len() == 1 {
            let paths: Vec<_> = data.paths.iter().map(|path| path.display().to_string()).collect();
            return Err(Failure::data(format!("no text in data path {}", paths.join(", ")))
                .detail(format!(
                    "{} files looked at: {} empty, {} binary or not UTF-8",
                    files.len(),
                    summary.skipped_empty,
                    summary.skipped_binary
                ))
                .detail(format!("extensions: {:?}; exclude: {:?}", data.extensions, data.exclude))
                .remedy("correct data.paths, data.extensions or data.exclude"));
        }
        let vocab = match data.tokenizer {
            Tokenizer::Bytes => END_OF_DOCUMENT as usize + 1,
        };
        Ok(Corpus::new(Tokens::Bytes(bytes), starts, vocab, summary))
    }

    /// A Markov chain: with probability 3/4 the next token is 5 x + 1 modulo vocab - 1, else uniform. Document lengths
    /// are uniform around the mean. A model can learn it down to about 0.56 + ln(vocab) / 4 nats per token.
    fn synthetic(synthetic: &Synthetic, seed: u64) -> Corpus {
        let draws = Stream::new(seed, stream_of("data.synthetic"), 0);
        let words = synthetic.vocab - 1;
        let mut tokens: Vec<i32> = Vec::with_capacity(synthetic.tokens);
        let mut starts = vec![0];
        while tokens.len() < synthetic.tokens {
            let length = 1 + draws.words(2 * tokens.len() as u64 + 1)[0] as usize % (2 * synthetic.document_length);
            let length = length.min(synthetic.tokens - tokens.len());
            for i in 0..length - 1 {
                let [jump, fresh, ..] = draws.words(2 * tokens.len() as u64);
                let next = match tokens.last() {
                    Some(&last) if i > 0 && jump % 4 != 0 => (5 * last as usize + 1) % words,
                    _ => fresh as usize % words,
                };
                tokens.push(next as i32);
            }
            tokens.push(words as i32);
            starts.push(tokens.len());
        }
        Corpus::new(Tokens::Ids(tokens), starts, synthetic.vocab, Summary::default())
    }

    fn new(tokens: Tokens, starts: Vec<usize>, vocab: usize, mut summary: Summary) -> Corpus {
        let mut hash = Sha256::new();
        match &tokens {
            Tokens::Bytes(bytes) => hash.update(bytes),
            Tokens::Ids(ids) => ids.iter().for_each(|id| hash.update(id.to_le_bytes())),
        }
        starts.iter().for_each(|start| hash.update((*start as u64).to_le_bytes()));
        summary.sha256 = crate::checkpoint::hexadecimal(&hash.finalize());
        summary.documents = starts.len() - 1;
        summary.tokens = starts[starts.len() - 1];
        Corpus { tokens, starts, vocab, summary }
    }

    /// Number of tokens, ends of documents included.
    pub fn len(&self) -> usize {
        self.summary.tokens
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of different token ids; a model's vocabulary must be at least as large.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// First tokens of documents inside `range`.
    pub fn document_starts(&self, range: Range<usize>) -> &[usize] {
        let starts = &self.starts[..self.starts.len() - 1];
        &starts[starts.partition_point(|&s| s < range.start)..starts.partition_point(|&s| s < range.end)]
    }

    /// Copies tokens `begin .. begin + out.len()`, which must exist.
    pub fn read(&self, begin: usize, out: &mut [i32]) {
        match &self.tokens {
            Tokens::Ids(ids) => out.copy_from_slice(&ids[begin..begin + out.len()]),
            Tokens::Bytes(bytes) => {
                let mut document = self.starts.partition_point(|&start| start <= begin) - 1;
                for (position, token) in (begin..).zip(out) {
                    // Every document before this one has an end that is not stored.
                    let ended = position + 1 == self.starts[document + 1];
                    *token = if ended { END_OF_DOCUMENT } else { i32::from(bytes[position - document]) };
                    document += usize::from(ended);
                }
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use rstest::rstest;
    use std::path::Path;

    pub fn data(paths: &[&Path]) -> Data {
        Data {
            paths: paths.iter().map(|path| path.to_path_buf()).collect(),
            extensions: vec!["txt".into()],
            exclude: Vec::new(),
            tokenizer: Tokenizer::Bytes,
            reset_at_document_boundaries: true,
            synthetic: None,
        }
    }

    pub fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(root.path().join(name), text).unwrap();
        }
        root
    }

    #[test]
    fn documents_are_closed_and_back_to_back() {
        let root =
            folder(&[("b.txt", b"cd"), ("a.txt", b"ab\n"), ("c.txt", b""), ("d.txt", b"\xff\xfe"), ("e.txt", b"f")]);
        let corpus = Corpus::open(&data(&[root.path()]), 0).unwrap();
        let mut tokens = vec![0; corpus.len()];
        corpus.read(0, &mut tokens);
        assert_eq!(tokens, [97, 98, 10, 256, 99, 100, 256, 102, 256]);
        assert_eq!(corpus.document_starts(0..9), [0, 4, 7]);
        assert_eq!(corpus.document_starts(1..7), [4]);
        let summary = corpus.summary();
        assert_eq!((summary.documents, summary.skipped_binary, summary.skipped_empty), (3, 1, 1));
        for begin in 0..9 {
            let mut part = vec![0; 9 - begin];
            corpus.read(begin, &mut part);
            assert_eq!(part, tokens[begin..]);
        }
    }

    #[test]
    fn hash_sees_where_documents_end() {
        let hash = |files: &[(&str, &[u8])]| {
            let root = folder(files);
            Corpus::open(&data(&[root.path()]), 0).unwrap().summary().sha256.clone()
        };
        assert_ne!(hash(&[("a.txt", b"ab"), ("b.txt", b"c")]), hash(&[("a.txt", b"a"), ("b.txt", b"bc")]));
    }

    #[rstest]
    #[case(&[("a.rs", b"x" as &[u8])])]
    #[case(&[("a.txt", b"" as &[u8]), ("b.txt", b"\0")])]
    fn corpus_without_text_is_refused(#[case] files: &[(&str, &[u8])]) {
        let root = folder(files);
        let failure = Corpus::open(&data(&[root.path()]), 0).unwrap_err();
        assert_eq!(failure.sentence, format!("no text in data path {}", root.path().display()));
        assert_eq!(failure.exit_status(), 4);
        assert!(failure.remedy.is_some());
    }

    #[test]
    fn synthetic_corpus_is_deterministic_and_mostly_a_chain() {
        let about = Synthetic { vocab: 33, document_length: 50, tokens: 10_000 };
        let read = |seed| {
            let corpus = Corpus::synthetic(&about, seed);
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
