//! Text to tokens and back.
//!
//! A [`Tokenizer`] is opened once from what `data.tokenizer` names and then shared: bytes, a `tokenizer.json` as Hugging
//! Face's programs write it, a folder that holds one, or GPT-2's `vocab.json` and `merges.txt`. `files.rs` reads and
//! judges the files, `special.rs` finds the tokens that mean something, `pieces.rs` knows the bytes of text that each
//! token stands for, `stream.rs` decodes tokens that come one at a time, `long.rs` cuts long texts where that changes no
//! token, `train.rs` makes a vocabulary. What is computed is the crate `tokenizers`' work; here it is asked in a way that
//! cannot panic, and nothing in a file that would make ids random or shorten a text is taken over. May depend on
//! `recipe` (what a tokenizer is named by) and `failure`; knows no corpus and no model.

mod files;
mod long;
mod pieces;
mod special;
mod stream;
mod train;

pub use stream::Stream;
pub use train::{Trained, train_bpe};

use crate::failure::{Failure, Result, guarded};
use crate::recipe::TokenizerSpec;
use pieces::Pieces;
use rayon::prelude::*;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Byte tokenizer: token ids 0 to 255 are bytes, this one ends a document.
pub const END_OF_DOCUMENT: u32 = 256;
/// Name of the special token that ends a document.
pub const END: &str = "end_of_document";
/// Name of the special token that fills up a sample.
pub const PAD: &str = "pad";
/// Name of the special token that stands for an image.
pub const IMAGE: &str = "image";
/// A model's vocabulary is padded to a multiple of this, whatever the layout, so that checkpoints fit every layout.
pub const VOCAB_MULTIPLE: usize = 128;

/// Text to tokens and back. Cheap to clone; shared by threads.
#[derive(Clone)]
pub struct Tokenizer(Arc<Inner>);

struct Inner {
    /// What messages call it.
    name: String,
    kind: Kind,
    vocab_size: usize,
    special: BTreeMap<String, u32>,
    /// Contents of special tokens by the names of the tokenizer's files, e.g. `bos_token`.
    named: BTreeMap<String, String>,
    sha256: String,
    chat_template: Option<String>,
}

enum Kind {
    Bytes,
    Model(Box<Model>),
}

struct Model {
    tokenizer: tokenizers::Tokenizer,
    pieces: Pieces,
    /// Tokens are bytes of the text as it is, so that their lengths add up to the text's.
    exact: bool,
    /// Long texts can be cut before an encoding.
    cuts: bool,
    /// The text of a `tokenizer.json`.
    json: String,
    /// Contents of special tokens.
    marks: Vec<String>,
}

/// Special tokens of a recipe: name to content.
pub type SpecialTokens = BTreeMap<String, String>;

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokenizer({}, {} tokens)", self.0.name, self.0.vocab_size)
    }
}

/// Equal if they give the same tokens.
impl PartialEq for Tokenizer {
    fn eq(&self, other: &Tokenizer) -> bool {
        self.0.sha256 == other.0.sha256 && self.0.special == other.0.special
    }
}

impl Tokenizer {
    /// Bytes; 256 ends a document.
    pub fn bytes() -> Tokenizer {
        Tokenizer(Arc::new(Inner {
            name: "bytes".into(),
            kind: Kind::Bytes,
            vocab_size: END_OF_DOCUMENT as usize + 1,
            special: BTreeMap::from([(END.to_string(), END_OF_DOCUMENT)]),
            named: BTreeMap::new(),
            sha256: files::hash(&[("bytes", b"")]),
            chat_template: None,
        }))
    }

    /// Opens what a recipe names, with its special tokens (name to content).
    ///
    /// Errors: a file that is missing or no tokenizer (status 4), a special token that is not there (status 2).
    pub fn open(spec: &TokenizerSpec, special: &SpecialTokens) -> Result<Tokenizer> {
        let Some(found) = files::read(spec)? else {
            let bytes = Tokenizer::bytes();
            return match special.keys().next() {
                None => Ok(bytes),
                Some(name) => Err(Failure::recipe(format!(
                    "data.special_tokens.{name} has no effect with data.tokenizer bytes, whose one special token ends documents"
                ))
                .remedy("take it out, or name a tokenizer with special tokens")),
            };
        };
        Tokenizer::of(found, special)
    }

    /// What a checkpoint says about it beside its `tokenizer.json`.
    pub fn state(&self) -> Value {
        let Inner { name, vocab_size, special, named, sha256, chat_template, .. } = self.0.as_ref();
        json!({
            "name": name,
            "vocab_size": vocab_size,
            "special_tokens": special,
            "named_tokens": named,
            "sha256": sha256,
            "chat_template": chat_template,
        })
    }

    /// The tokenizer of a checkpoint: what [`Tokenizer::state`] gave, and its `tokenizer.json`, which bytes have none of.
    pub fn restore(state: &Value, json: Option<String>) -> Result<Tokenizer> {
        let broken = |what: String| Failure::data(format!("the checkpoint's tokenizer: {what}"));
        let state: State = State::deserialize(state).map_err(|error| broken(error.to_string()))?;
        let Some(json) = json else {
            let bytes = Tokenizer::bytes();
            let same = bytes.sha256() == state.sha256;
            return if same { Ok(bytes) } else { Err(broken("its tokenizer.json is missing".into())) };
        };
        let mut tokenizer = Tokenizer::of(files::Found::of_json(&state.name, json)?, &SpecialTokens::new())?;
        if let Some(id) = state.special_tokens.values().find(|&&id| id as usize >= tokenizer.vocab_size()) {
            return Err(broken(format!("special token {id} is none of {}", tokenizer.vocab_size())));
        }
        if let Some(inner) = Arc::get_mut(&mut tokenizer.0) {
            (inner.special, inner.sha256) = (state.special_tokens, state.sha256);
            (inner.named, inner.chat_template) = (state.named_tokens, state.chat_template);
        }
        Ok(tokenizer)
    }

    fn of(found: files::Found, special: &SpecialTokens) -> Result<Tokenizer> {
        let files::Found { name, json, about, named, sha256, chat_template, pair } = found;
        let tokenizer = files::build(&name, &json, pair, &named)?;
        let vocab = guarded(|| tokenizer.get_vocab(true)).map_err(|what| files::broken(&name, &what))?;
        let vocab_size = files::vocab_size(&name, &vocab)?;
        let special = special::resolve(&name, &vocab, &about, &named, special)?;
        let pieces = Pieces::new(&vocab, vocab_size, &about, &special);
        let marks = about.added_tokens.iter().filter(|token| token.special).map(|token| token.content.clone());
        let marks = marks.chain(special.values().filter_map(|&id| tokenizer.id_to_token(id))).collect();
        let json = if pair { files::written(&name, &tokenizer)? } else { json };
        let kind =
            Kind::Model(Box::new(Model { exact: about.exact(), cuts: about.cuts(), tokenizer, pieces, json, marks }));
        Ok(Tokenizer(Arc::new(Inner { name, kind, vocab_size, special, named, sha256, chat_template })))
    }

    /// What messages call it: `bytes` or a path.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The largest id plus one. A model's vocabulary must be at least as large.
    pub fn vocab_size(&self) -> usize {
        self.0.vocab_size
    }

    /// Hash of the files that decide the tokens, hexadecimal: two tokenizers with one hash give the same ids.
    pub fn sha256(&self) -> &str {
        &self.0.sha256
    }

    pub fn is_bytes(&self) -> bool {
        matches!(self.0.kind, Kind::Bytes)
    }

    /// The text of its `tokenizer.json`; bytes have none.
    pub fn json(&self) -> Option<&str> {
        match &self.0.kind {
            Kind::Bytes => None,
            Kind::Model(model) => Some(&model.json),
        }
    }

    /// The Jinja template of conversations that comes with its files.
    pub fn chat_template(&self) -> Option<&str> {
        self.0.chat_template.as_deref()
    }

    /// The id of a special token by its name, e.g. [`END`].
    pub fn special(&self, name: &str) -> Option<u32> {
        self.0.special.get(name).copied()
    }

    /// Contents of special tokens by the names of the tokenizer's files, e.g. `bos_token`.
    pub fn named(&self) -> &BTreeMap<String, String> {
        &self.0.named
    }

    /// Whether a text ends in a special token.
    pub(super) fn ends_with_special(&self, text: &str) -> bool {
        match &self.0.kind {
            Kind::Bytes => false,
            Kind::Model(model) => model.marks.iter().any(|content| text.ends_with(content.as_str())),
        }
    }

    /// All special tokens that have a name.
    pub fn specials(&self) -> &BTreeMap<String, u32> {
        &self.0.special
    }

    /// The id of a special token that must be there.
    pub fn require(&self, name: &str) -> Result<u32> {
        self.special(name).ok_or_else(|| {
            let known: Vec<&str> = self.0.special.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "none".into() } else { known.join(", ") };
            Failure::recipe(format!("tokenizer {} has no special token {name}; it has {known}", self.0.name))
                .remedy(format!("name its content in data.special_tokens, e.g. {{{name}: \"<|endoftext|>\"}}"))
        })
    }

    /// The token that ends a document.
    pub fn end_of_document(&self) -> Result<u32> {
        self.require(END)
    }

    /// The id of a token by its content, as `tokenizer.json` writes it.
    pub fn id(&self, content: &str) -> Option<u32> {
        match &self.0.kind {
            Kind::Bytes => None,
            Kind::Model(model) => model.tokenizer.token_to_id(content),
        }
    }

    /// A token's content as `tokenizer.json` writes it.
    pub fn content(&self, id: u32) -> Option<String> {
        match &self.0.kind {
            Kind::Bytes => None,
            Kind::Model(model) => model.tokenizer.id_to_token(id),
        }
    }

    /// Tokens of a text, without any that mark its beginning or end. What is written like a special token becomes one.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &self.0.kind {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::Model(model) => {
                self.check_spaces(text)?;
                let mut ids = Vec::with_capacity(text.len() / 3);
                for part in long::parts(text, model.cuts) {
                    let encoding = self.guarded(|| model.tokenizer.encode_fast(part, false))?;
                    ids.extend_from_slice(encoding.get_ids());
                }
                if model.exact {
                    self.check_bytes(text, &ids, &model.pieces)?;
                }
                Ok(ids)
            }
        }
    }

    /// Tokens of texts, computed side by side on the current rayon pool; of a long text the parts are.
    pub fn encode_batch<S: AsRef<str> + Sync>(&self, texts: &[S]) -> Result<Vec<Vec<u32>>> {
        let cuts = matches!(&self.0.kind, Kind::Model(model) if model.cuts);
        let all = texts.par_iter().map(|text| {
            let parts: Vec<&str> = long::parts(text.as_ref(), cuts).collect();
            let encoded = parts.par_iter().map(|part| self.encode(part)).collect::<Result<Vec<_>>>();
            encoded.map(|parts| {
                parts
                    .into_iter()
                    .reduce(|mut all, part| {
                        all.extend(part);
                        all
                    })
                    .unwrap_or_default()
            })
        });
        all.collect()
    }

    /// Tokens of a text, each with the bytes of the text where it lies; characters are whole.
    pub fn encode_places(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>> {
        match &self.0.kind {
            Kind::Bytes => Ok(text.bytes().enumerate().map(|(at, byte)| (u32::from(byte), at..at + 1)).collect()),
            Kind::Model(model) => {
                self.check_spaces(text)?;
                let mut places = Vec::with_capacity(text.len() / 3);
                for part in long::parts(text, model.cuts) {
                    let begin = part.as_ptr() as usize - text.as_ptr() as usize;
                    let encoding = self.guarded(|| model.tokenizer.encode(part, false))?;
                    let offsets = encoding.get_offsets().iter().map(|&(from, to)| begin + from..begin + to);
                    places.extend(encoding.get_ids().iter().copied().zip(offsets));
                }
                Ok(places)
            }
        }
    }

    /// Tokens of a text, and the bytes that each of them stands for, which add up to those of the text. A character that
    /// several tokens make counts for the last of them where tokens are no bytes.
    pub fn encode_lengths(&self, text: &str) -> Result<(Vec<u32>, Vec<u32>)> {
        if self.counts_bytes() {
            let ids = self.encode(text)?;
            let lengths = ids.iter().map(|&id| self.piece(id).len() as u32).collect();
            return Ok((ids, lengths));
        }
        let places = self.encode_places(text)?;
        let lengths = lengths(&places, text.len());
        Ok((places.into_iter().map(|(id, _)| id).collect(), lengths))
    }

    /// Text of tokens, special ones included. What is no UTF-8 becomes U+FFFD; ids that are no tokens are left out.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        match &self.0.kind {
            Kind::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Kind::Model(model) => self.guarded(|| model.tokenizer.decode(ids, false)),
        }
    }

    /// Decodes tokens that come one at a time.
    pub fn stream(&self) -> Stream {
        Stream::new(self.clone())
    }

    /// Bytes of text that a token stands for; 0 for special ones and ids that are no tokens. Exact where tokens are bytes
    /// ([`Tokenizer::counts_bytes`]), else the bytes of what the token is decoded to.
    pub fn token_bytes(&self, id: u32) -> usize {
        match &self.0.kind {
            Kind::Bytes => usize::from(id < END_OF_DOCUMENT),
            Kind::Model(model) => model.pieces.text_bytes(id),
        }
    }

    /// Whether [`Tokenizer::token_bytes`] of a text's tokens add up to the bytes of the text.
    pub fn counts_bytes(&self) -> bool {
        match &self.0.kind {
            Kind::Bytes => true,
            Kind::Model(model) => model.exact,
        }
    }

    /// The bytes a token is decoded to, if tokens are bytes.
    fn piece(&self, id: u32) -> &[u8] {
        match &self.0.kind {
            Kind::Bytes => &[],
            Kind::Model(model) => model.pieces.bytes(id),
        }
    }

    /// A text whose bytes the vocabulary lacks would lose them without a word.
    fn check_bytes(&self, text: &str, ids: &[u32], pieces: &Pieces) -> Result<()> {
        let decoded: usize = ids.iter().map(|&id| pieces.bytes(id).len()).sum();
        if decoded == text.len() {
            return Ok(());
        }
        let missing = text.bytes().find(|&byte| !pieces.knows(byte));
        let what = match missing {
            Some(byte) => format!("has no token for the byte 0x{byte:02x}"),
            None => "loses a part of the text".into(),
        };
        Err(Failure::data(format!("tokenizer {} {what}", self.0.name))
            .remedy("use a vocabulary that has all 256 bytes"))
    }

    fn check_spaces(&self, text: &str) -> Result<()> {
        match long::too_many_spaces(text) {
            None => Ok(()),
            Some(run) => {
                Err(Failure::data(format!("a text has {run} spaces in a row, too many for a tokenizer's patterns"))
                    .remedy("take the file or line out, or shorten the run"))
            }
        }
    }

    fn guarded<T>(&self, ask: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
        let said = guarded(ask).and_then(|made| made.map_err(|error| error.to_string()));
        said.map_err(|what| files::broken(&self.0.name, &what))
    }
}

/// What a checkpoint says about a tokenizer.
#[derive(Deserialize)]
struct State {
    name: String,
    special_tokens: BTreeMap<String, u32>,
    #[serde(default)]
    named_tokens: BTreeMap<String, String>,
    sha256: String,
    #[serde(default)]
    chat_template: Option<String>,
}

/// Bytes that tokens at these places of a text stand for: each from the end of those before it to its own.
pub(super) fn lengths(places: &[(u32, Range<usize>)], text: usize) -> Vec<u32> {
    let (mut lengths, mut done) = (Vec::with_capacity(places.len()), 0);
    for (_, place) in places {
        lengths.push(place.end.saturating_sub(done) as u32);
        done = done.max(place.end);
    }
    // What no token covers at the end, such as spaces that are dropped, goes with the last one.
    if let Some(last) = lengths.last_mut() {
        *last += text.saturating_sub(done) as u32;
    }
    lengths
}

/// The number that a model's vocabulary is padded to for so many tokens.
pub fn padded_vocab(tokens: usize) -> usize {
    tokens.next_multiple_of(VOCAB_MULTIPLE)
}

#[cfg(test)]
pub(in crate::data) mod tests;
