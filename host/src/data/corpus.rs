//! A corpus in memory: all documents back to back, each closed by an end-of-document token.

use super::Tokenizer;
use crate::failure::Result;
use sha2::{Digest, Sha256};
use std::ops::Range;
use std::path::Path;

/// The byte tokenizer's end of a document.
pub const END_OF_DOCUMENT: i32 = super::tokenizer::END_OF_DOCUMENT as i32;

/// Documents as one row of tokens.
#[derive(Clone, Debug)]
pub struct Corpus {
    tokens: Tokens,
    /// First token of each document, in order, then the number of tokens.
    starts: Vec<usize>,
    vocab: usize,
    /// The token that ends documents.
    end: i32,
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
    /// Ends of documents included.
    pub tokens: usize,
    /// Of text, without the ends of documents; 0 for a made-up corpus.
    pub bytes: usize,
    /// Files left out because they hold NUL bytes or are not UTF-8.
    pub skipped_binary: usize,
    pub skipped_empty: usize,
    /// Of the documents' names and contents in order, hexadecimal: tells whether two runs see the same data.
    pub sha256: String,
}

/// Takes documents in order and closes them to a corpus.
pub(super) struct Builder {
    tokens: Tokens,
    starts: Vec<usize>,
    vocab: usize,
    end: i32,
    hash: Sha256,
    pub summary: Summary,
}

impl Builder {
    /// For documents of text as bytes.
    pub fn bytes() -> Builder {
        Builder::new(Tokens::Bytes(Vec::new()), END_OF_DOCUMENT as usize + 1, END_OF_DOCUMENT)
    }

    /// For documents of text.
    pub fn text(tokenizer: &Tokenizer) -> Result<Builder> {
        if tokenizer.is_bytes() {
            return Ok(Builder::bytes());
        }
        let end = tokenizer.end_of_document()? as i32;
        let mut builder = Builder::new(Tokens::Ids(Vec::new()), tokenizer.vocab_size(), end);
        builder.hash_field(tokenizer.sha256().as_bytes());
        Ok(builder)
    }

    /// For documents of ids below `vocab`, of which the last one ends documents.
    pub fn ids(vocab: usize) -> Builder {
        Builder::new(Tokens::Ids(Vec::new()), vocab, vocab as i32 - 1)
    }

    fn new(tokens: Tokens, vocab: usize, end: i32) -> Builder {
        Builder { tokens, starts: vec![0], vocab, end, hash: Sha256::new(), summary: Summary::default() }
    }

    /// Adds a file: what is empty or no text is counted and left out.
    pub fn add_text(&mut self, name: &Path, text: &[u8], tokenizer: &Tokenizer) -> Result<()> {
        if text.is_empty() {
            self.summary.skipped_empty += 1;
            return Ok(());
        }
        let Some(words) = std::str::from_utf8(text).ok().filter(|words| !words.contains('\0')) else {
            self.summary.skipped_binary += 1;
            return Ok(());
        };
        match &mut self.tokens {
            Tokens::Bytes(bytes) => {
                bytes.extend_from_slice(text);
                self.starts.push(bytes.len() + self.starts.len());
            }
            Tokens::Ids(ids) => {
                ids.extend(tokenizer.encode(words)?.into_iter().map(|id| id as i32));
                ids.push(self.end);
                self.starts.push(ids.len());
            }
        }
        self.summary.bytes += text.len();
        self.hash_field(name.as_os_str().as_encoded_bytes());
        self.hash_field(text);
        Ok(())
    }

    /// Adds a document of ids and its end.
    pub fn add_ids(&mut self, name: &str, document: &[i32]) {
        if let Tokens::Ids(ids) = &mut self.tokens {
            ids.extend_from_slice(document);
            ids.push(self.end);
            self.starts.push(ids.len());
            self.hash_field(name.as_bytes());
            self.hash_field(&document.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>());
        }
    }

    /// Fields are hashed with their lengths, so that moving a byte from one to the next shows.
    fn hash_field(&mut self, field: &[u8]) {
        self.hash.update((field.len() as u64).to_le_bytes());
        self.hash.update(field);
    }

    pub fn documents(&self) -> usize {
        self.starts.len() - 1
    }

    pub fn finish(self) -> Corpus {
        let Builder { mut tokens, starts, vocab, end, hash, mut summary } = self;
        match &mut tokens {
            Tokens::Bytes(bytes) => bytes.shrink_to_fit(),
            Tokens::Ids(ids) => ids.shrink_to_fit(),
        }
        summary.sha256 = crate::checkpoint::hexadecimal(&hash.finalize());
        summary.documents = starts.len() - 1;
        summary.tokens = starts[starts.len() - 1];
        Corpus { tokens, starts, vocab, end, summary }
    }
}

impl Corpus {
    /// Number of tokens, ends of documents included.
    pub fn len(&self) -> usize {
        self.summary.tokens
    }

    /// Bytes it holds in memory.
    pub fn bytes(&self) -> usize {
        let tokens = match &self.tokens {
            Tokens::Bytes(bytes) => bytes.len(),
            Tokens::Ids(ids) => size_of_val(ids.as_slice()),
        };
        tokens + size_of_val(self.starts.as_slice())
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of different token ids; a model's vocabulary must be at least as large.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// The token that ends every document.
    pub fn end(&self) -> i32 {
        self.end
    }

    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// Where each document lies, its end included.
    pub fn documents(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.starts.windows(2).map(|pair| pair[0]..pair[1])
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

/// Documents and tokens, the bytes of text, and the beginning of the hash, for the log.
impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} documents, {} tokens", self.documents, self.tokens)?;
        if self.bytes > 0 {
            write!(f, " ({} bytes of text)", self.bytes)?;
        }
        write!(f, ", sha256 {}", self.sha256)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn corpus(files: &[(&str, &[u8])]) -> Corpus {
        let mut builder = Builder::bytes();
        files.iter().for_each(|(name, text)| builder.add_text(Path::new(name), text, &Tokenizer::bytes()).unwrap());
        builder.finish()
    }

    #[test]
    fn documents_are_closed_and_back_to_back() {
        let corpus = corpus(&[("a", b"ab\n"), ("b", b"cd"), ("c", b""), ("d", b"\xff\xfe"), ("e", b"f"), ("g", b"\0")]);
        let mut tokens = vec![0; corpus.len()];
        corpus.read(0, &mut tokens);
        assert_eq!(tokens, [97, 98, 10, 256, 99, 100, 256, 102, 256]);
        assert_eq!(corpus.document_starts(0..9), [0, 4, 7]);
        assert_eq!(corpus.document_starts(1..7), [4]);
        let summary = corpus.summary();
        assert_eq!((summary.documents, summary.tokens, summary.bytes), (3, 9, 6));
        assert_eq!((summary.skipped_binary, summary.skipped_empty), (2, 1));
        for begin in 0..9 {
            let mut part = vec![0; 9 - begin];
            corpus.read(begin, &mut part);
            assert_eq!(part, tokens[begin..]);
        }
    }

    #[test]
    fn hash_sees_names_contents_order_and_where_documents_end() {
        let hash = |files: &[(&str, &[u8])]| corpus(files).summary().sha256.clone();
        let first = hash(&[("a", b"ab"), ("b", b"c")]);
        assert_eq!(first, hash(&[("a", b"ab"), ("empty", b""), ("b", b"c")]));
        for other in [
            hash(&[("a", b"a"), ("b", b"bc")]),
            hash(&[("a", b"ab"), ("c", b"c")]),
            hash(&[("b", b"c"), ("a", b"ab")]),
            hash(&[("a", b"ab"), ("b", b"d")]),
            hash(&[("aa", b"b"), ("b", b"c")]),
        ] {
            assert_ne!(first, other);
        }
    }
}
