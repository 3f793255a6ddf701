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
    /// Which tokens are learned; `None`: all.
    learned: Option<Bits>,
    /// Bytes of text that each token stands for, where the tokenizer cannot tell.
    lengths: Option<Vec<u32>>,
    tokenizer: Option<Tokenizer>,
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

/// One bit for each token.
#[derive(Clone, Debug, Default)]
struct Bits {
    words: Vec<u64>,
    len: usize,
}

impl Bits {
    fn push(&mut self, bit: bool) {
        if self.len.is_multiple_of(64) {
            self.words.push(0);
        }
        self.words[self.len / 64] |= u64::from(bit) << (self.len % 64);
        self.len += 1;
    }

    fn get(&self, at: usize) -> bool {
        self.words[at / 64] >> (at % 64) & 1 == 1
    }
}

/// What went into a corpus.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    pub documents: usize,
    /// Ends of documents included.
    pub tokens: usize,
    /// Tokens whose prediction is learned, where not all are.
    pub learned: Option<usize>,
    /// Of text, without the ends of documents; 0 for a made-up corpus.
    pub bytes: usize,
    /// Files left out because they hold NUL bytes or are not UTF-8.
    pub skipped_binary: usize,
    pub skipped_empty: usize,
    /// Conversations left out because nothing in them is learned.
    pub skipped_unlearned: usize,
    /// Of the documents' names and contents in order, hexadecimal: tells whether two runs see the same data.
    pub sha256: String,
}

impl Summary {
    /// Files and conversations left out.
    pub(super) fn skipped(&self) -> usize {
        self.skipped_binary + self.skipped_empty + self.skipped_unlearned
    }
}

/// A document's tokens without its end.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Encoded {
    pub ids: Vec<u32>,
    /// Bytes of text that each token stands for, where the tokenizer cannot tell.
    pub lengths: Option<Vec<u32>>,
    /// Which tokens are learned, and whether the end of the document is; `None`: all.
    pub learned: Option<(Vec<bool>, bool)>,
    /// Of text.
    pub bytes: usize,
}

/// Takes documents in order and closes them to a corpus.
pub(super) struct Builder {
    tokens: Tokens,
    starts: Vec<usize>,
    learned: Option<Bits>,
    lengths: Option<Vec<u32>>,
    tokenizer: Option<Tokenizer>,
    vocab: usize,
    end: i32,
    hash: Sha256,
    pub summary: Summary,
}

impl Builder {
    /// For documents of text as bytes.
    pub fn bytes() -> Builder {
        let tokens = Tokens::Bytes(Vec::new());
        Builder::new(tokens, END_OF_DOCUMENT as usize + 1, END_OF_DOCUMENT, Some(Tokenizer::bytes()))
    }

    /// For documents of text, of which only a part is learned if they are `masked`. `how`: what besides the texts decides
    /// the tokens.
    pub fn text(tokenizer: &Tokenizer, masked: bool, how: &str) -> Result<Builder> {
        if tokenizer.is_bytes() && !masked {
            return Ok(Builder::bytes());
        }
        let end = tokenizer.end_of_document()? as i32;
        let ids = Tokens::Ids(Vec::new());
        let mut builder = Builder::new(ids, tokenizer.vocab_size(), end, Some(tokenizer.clone()));
        builder.learned = masked.then(Bits::default);
        builder.lengths = (!tokenizer.counts_bytes()).then(Vec::new);
        builder.hash_field(tokenizer.sha256().as_bytes());
        builder.hash_field(how.as_bytes());
        Ok(builder)
    }

    /// For documents of ids below `vocab`, of which the last one ends documents.
    pub fn ids(vocab: usize) -> Builder {
        Builder::new(Tokens::Ids(Vec::new()), vocab, vocab as i32 - 1, None)
    }

    fn new(tokens: Tokens, vocab: usize, end: i32, tokenizer: Option<Tokenizer>) -> Builder {
        let (learned, lengths, hash, summary) = (None, None, Sha256::new(), Summary::default());
        Builder { tokens, starts: vec![0], learned, lengths, tokenizer, vocab, end, hash, summary }
    }

    /// Whether documents are kept as their bytes, so that nothing is to be encoded.
    pub fn keeps_bytes(&self) -> bool {
        matches!(self.tokens, Tokens::Bytes(_))
    }

    /// Adds a text of bytes and its end; what is empty or no text is counted and left out.
    pub fn add_text(&mut self, name: &Path, text: &[u8]) {
        if text.is_empty() {
            self.summary.skipped_empty += 1;
        } else if !is_text(text) {
            self.summary.skipped_binary += 1;
        } else if let Tokens::Bytes(bytes) = &mut self.tokens {
            bytes.extend_from_slice(text);
            self.starts.push(bytes.len() + self.starts.len());
            self.summary.bytes += text.len();
            self.hash_field(name.as_os_str().as_encoded_bytes());
            self.hash_field(text);
        }
    }

    /// Adds the tokens of a document and its end. `source`: what they were made from.
    pub fn add(&mut self, name: &[u8], source: &[u8], document: Encoded) {
        let Encoded { ids: new, lengths, learned, bytes } = document;
        let (flags, learns_end) = learned.unwrap_or_else(|| (vec![true; new.len()], true));
        let count = flags.iter().filter(|&&flag| flag).count() + usize::from(learns_end);
        if new.is_empty() {
            self.summary.skipped_empty += 1;
            return;
        }
        if count == 0 {
            self.summary.skipped_unlearned += 1;
            return;
        }
        let Tokens::Ids(ids) = &mut self.tokens else { return };
        ids.extend(new.iter().map(|&id| id as i32));
        ids.push(self.end);
        self.starts.push(ids.len());
        if let Some(bits) = &mut self.learned {
            flags.into_iter().chain([learns_end]).for_each(|flag| bits.push(flag));
            *self.summary.learned.get_or_insert(0) += count;
        }
        if let Some(all) = &mut self.lengths {
            all.extend(lengths.unwrap_or_else(|| vec![0; new.len()]));
            all.push(0);
        }
        self.summary.bytes += bytes;
        self.hash_field(name);
        self.hash_field(source);
    }

    /// Adds a document of made-up ids and its end.
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
        let Builder { mut tokens, starts, learned, lengths, tokenizer, vocab, end, hash, mut summary } = self;
        match &mut tokens {
            Tokens::Bytes(bytes) => bytes.shrink_to_fit(),
            Tokens::Ids(ids) => ids.shrink_to_fit(),
        }
        summary.sha256 = crate::checkpoint::hexadecimal(&hash.finalize());
        summary.documents = starts.len() - 1;
        summary.tokens = starts[starts.len() - 1];
        Corpus { tokens, starts, learned, lengths, tokenizer, vocab, end, summary }
    }
}

/// Whether a file's bytes are text.
pub(super) fn is_text(bytes: &[u8]) -> bool {
    !bytes.contains(&0) && std::str::from_utf8(bytes).is_ok()
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
        let learned = self.learned.as_ref().map_or(0, |bits| size_of_val(bits.words.as_slice()));
        let lengths = self.lengths.as_ref().map_or(0, |lengths| size_of_val(lengths.as_slice()));
        tokens + size_of_val(self.starts.as_slice()) + learned + lengths
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What made the tokens; none for a made-up corpus.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// Number of different token ids; a model's vocabulary must be at least as large.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// The token that ends every document.
    pub fn end(&self) -> i32 {
        self.end
    }

    /// The token that fills up samples.
    pub fn pad(&self) -> i32 {
        let pad = self.tokenizer.as_ref().and_then(|tokenizer| tokenizer.special(super::tokenizer::PAD));
        pad.map_or(self.end, |id| id as i32)
    }

    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// Where each document lies, its end included.
    pub fn documents(&self) -> impl ExactSizeIterator<Item = Range<usize>> + '_ {
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

    /// Weights of the losses of tokens `begin .. begin + out.len()`: 1 where the token is learned, else 0.
    pub fn weights(&self, begin: usize, out: &mut [f32]) {
        match &self.learned {
            None => out.fill(1.0),
            Some(bits) => (begin..).zip(out).for_each(|(at, weight)| *weight = f32::from(u8::from(bits.get(at)))),
        }
    }

    /// Whether token `at` is learned.
    pub fn learned(&self, at: usize) -> bool {
        self.learned.as_ref().is_none_or(|bits| bits.get(at))
    }

    /// Bytes of text that the learned tokens among `tokens` stand for. The ends of documents stand for none.
    pub fn text_bytes(&self, tokens: Range<usize>) -> u64 {
        let Some(tokenizer) = &self.tokenizer else { return 0 };
        let ends = |tokens: &Range<usize>| {
            self.starts[1..].partition_point(|&s| s <= tokens.end)
                - self.starts[1..].partition_point(|&s| s <= tokens.start)
        };
        match (&self.tokens, &self.lengths) {
            (Tokens::Bytes(_), _) => (tokens.len() - ends(&tokens)) as u64,
            (Tokens::Ids(_), Some(lengths)) => {
                tokens.filter(|&at| self.learned(at)).map(|at| u64::from(lengths[at])).sum()
            }
            (Tokens::Ids(ids), None) => {
                let learned = tokens.filter(|&at| self.learned(at));
                learned.map(|at| tokenizer.token_bytes(ids[at] as u32) as u64).sum()
            }
        }
    }
}

/// Documents and tokens, the bytes of text, and the beginning of the hash, for the log.
impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} documents, {} tokens", self.documents, self.tokens)?;
        if let Some(learned) = self.learned {
            write!(f, " ({learned} learned)")?;
        }
        if self.bytes > 0 {
            write!(f, " ({} bytes of text)", self.bytes)?;
        }
        if self.skipped_unlearned > 0 {
            write!(f, ", {} conversations left out of which nothing is learned", self.skipped_unlearned)?;
        }
        write!(f, ", sha256 {}", self.sha256)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn corpus(files: &[(&str, &[u8])]) -> Corpus {
        let mut builder = Builder::bytes();
        files.iter().for_each(|(name, text)| builder.add_text(Path::new(name), text));
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
