//! From files to corpora: read in order, encoded side by side, put together in order.
//!
//! With `data.format: text` a file is a document; with `jsonl` a line is one, and with `chat` a conversation. Lines are
//! held out by a hash of themselves, files by that of their names.

use super::chat::{Chat, Line, Template};
use super::corpus::{Builder, Encoded, is_text};
use super::files::Found;
use super::split::held_out;
use super::tokenizer::Tokenizer;
use crate::failure::{Failure, Result};
use crate::recipe::{Data, Format};
use rayon::prelude::*;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

/// Bytes that are encoded at a time.
const AT_ONCE: usize = 32 << 20;
/// Longest line of a file of lines.
const MOST_LINE: u64 = 1 << 30;
/// Between two lines of progress.
const EVERY: Duration = Duration::from_secs(5);

/// A document to be encoded.
struct Pending {
    name: Vec<u8>,
    /// The file's or line's bytes.
    source: Vec<u8>,
    /// In a file of lines, where: for messages.
    place: Option<(std::path::PathBuf, usize)>,
    valid: bool,
}

/// Takes files in and gives the documents trained on and those held out.
pub(super) struct Reader<'a> {
    data: &'a Data,
    chat: Option<Chat>,
    tokenizer: &'a Tokenizer,
    train: Builder,
    valid: Builder,
    pending: Vec<Pending>,
    bytes: usize,
    /// Bytes done, of all files together.
    progress: (u64, u64),
    began: Instant,
    said: Instant,
}

impl<'a> Reader<'a> {
    /// `all`: bytes of all files, for progress.
    pub fn new(data: &'a Data, tokenizer: &'a Tokenizer, all: u64) -> Result<Reader<'a>> {
        let chat = match data.format {
            Format::Chat => {
                let template = match (&data.chat.template, tokenizer.chat_template()) {
                    (Some(name), _) => Some(Template::open(name)?),
                    (None, Some(source)) => Some(Template::new(&format!("of tokenizer {}", tokenizer.name()), source)?),
                    (None, None) => None,
                };
                Some((Chat::new(template, data.chat.train_on, tokenizer.clone()), how(data, tokenizer)))
            }
            _ => None,
        };
        let how = chat.as_ref().map_or(String::new(), |(_, how)| how.clone());
        let builder = || Builder::text(tokenizer, chat.is_some(), &how);
        let now = Instant::now();
        Ok(Reader {
            data,
            tokenizer,
            train: builder()?,
            valid: builder()?,
            chat: chat.map(|(chat, _)| chat),
            pending: Vec::new(),
            bytes: 0,
            progress: (0, all),
            began: now,
            said: now,
        })
    }

    /// Takes a file in. `valid`: all of it is held out.
    pub fn file(&mut self, file: &Found, valid: bool) -> Result<()> {
        let name = file.name.as_os_str().as_encoded_bytes();
        let cannot = |error: std::io::Error| {
            Failure::data(format!("cannot read data file {}: {error}", file.path.display()))
                .remedy("make the file readable or add it to data.exclude")
        };
        if self.data.format == Format::Text {
            let source = std::fs::read(&file.path).map_err(cannot)?;
            let valid = valid || held_out(name, self.data.valid_fraction);
            let builder = if valid { &mut self.valid } else { &mut self.train };
            if builder.keeps_bytes() || source.is_empty() || !is_text(&source) {
                builder.add_text(&file.name, &source);
                return Ok(());
            }
            return self.take(Pending { name: name.to_vec(), source, place: None, valid });
        }
        let mut lines = BufReader::with_capacity(1 << 20, File::open(&file.path).map_err(cannot)?);
        for number in 1.. {
            let mut line = Vec::new();
            let read = std::io::Read::take(&mut lines, MOST_LINE).read_until(b'\n', &mut line).map_err(cannot)?;
            if read == 0 {
                break;
            }
            if read as u64 == MOST_LINE {
                return Err(Failure::data(format!(
                    "{} line {number} has more than {MOST_LINE} bytes",
                    file.path.display()
                ))
                .remedy("shorten the line or leave it out"));
            }
            let line = line.trim_ascii();
            if line.is_empty() {
                continue;
            }
            let valid = valid || held_out(line, self.data.valid_fraction);
            let place = Some((file.path.clone(), number));
            self.take(Pending { name: name.to_vec(), source: line.to_vec(), place, valid })?;
        }
        Ok(())
    }

    fn take(&mut self, pending: Pending) -> Result<()> {
        self.bytes += pending.source.len();
        self.pending.push(pending);
        if self.bytes >= AT_ONCE { self.encode() } else { Ok(()) }
    }

    /// Encodes what was taken in.
    fn encode(&mut self) -> Result<()> {
        let pending = std::mem::take(&mut self.pending);
        let encoded: Vec<Result<Document>> = pending.par_iter().map(|one| self.encoded(one)).collect();
        // Of several broken documents the first is named, however many threads there are.
        for (one, document) in pending.into_iter().zip(encoded) {
            let document = document?;
            let builder = if one.valid { &mut self.valid } else { &mut self.train };
            match document {
                Document::Bytes(text) => builder.add_text(std::path::Path::new("line"), text.as_bytes()),
                Document::Tokens(document) => builder.add(&one.name, &one.source, document),
            }
        }
        self.progress.0 += std::mem::take(&mut self.bytes) as u64;
        let (done, all) = self.progress;
        if self.said.elapsed() > EVERY {
            let (mega, seconds) = (1e-6 * done as f64, self.began.elapsed().as_secs_f64());
            tracing::info!("text to tokens: {mega:.0} of {:.0} MB, {:.1} MB/s", 1e-6 * all as f64, mega / seconds);
            self.said = Instant::now();
        }
        Ok(())
    }

    fn encoded(&self, one: &Pending) -> Result<Document> {
        let at = |what: String| match &one.place {
            Some((path, line)) => Failure::data(format!("{} line {line}: {what}", path.display()))
                .remedy("correct the line or take it out"),
            None => Failure::data(what),
        };
        let text = std::str::from_utf8(&one.source)
            .map_err(|error| at(format!("no UTF-8 at byte {} of the line", error.valid_up_to())))?;
        let placed = |failure: Failure| match &one.place {
            Some((path, line)) => failure.at(format!("{} line {line}", path.display())),
            None => failure.at(String::from_utf8_lossy(&one.name)),
        };
        let document = match (self.data.format, &self.chat) {
            (Format::Chat, Some(chat)) => {
                let line = Line::parse(text).map_err(at)?;
                if chat.lacks_template(&line) {
                    let tokenizer = self.tokenizer.name();
                    let failure =
                        Failure::recipe(format!("messages need a template, and tokenizer {tokenizer} has none"));
                    return Err(placed(failure.remedy("set data.chat.template to a file or to chatml")));
                }
                let rendered = chat.render(&line).map_err(at)?;
                return chat.encode(&rendered).map(Document::Tokens).map_err(placed);
            }
            (Format::Jsonl, _) => Line::document(text, &self.data.text_key).map_err(at)?,
            _ => return self.tokens(text).map_err(placed),
        };
        self.tokens(&document).map_err(placed)
    }

    fn tokens(&self, text: &str) -> Result<Document> {
        if self.train.keeps_bytes() {
            return Ok(Document::Bytes(text.to_string()));
        }
        if self.tokenizer.counts_bytes() {
            let ids = self.tokenizer.encode_batch(&[text])?.pop().unwrap_or_default();
            return Ok(Document::Tokens(Encoded { ids, bytes: text.len(), ..Encoded::default() }));
        }
        let (ids, lengths) = self.tokenizer.encode_lengths(text)?;
        Ok(Document::Tokens(Encoded { ids, lengths: Some(lengths), learned: None, bytes: text.len() }))
    }

    /// The documents trained on and those held out.
    pub fn finish(mut self) -> Result<(Builder, Builder)> {
        self.encode()?;
        Ok((self.train, self.valid))
    }
}

enum Document {
    /// Kept as bytes.
    Bytes(String),
    Tokens(Encoded),
}

/// What besides the lines decides the tokens of conversations.
fn how(data: &Data, tokenizer: &Tokenizer) -> String {
    let template = match &data.chat.template {
        Some(name) => Template::open(name).map(|template| template.source().to_string()).unwrap_or_default(),
        None => tokenizer.chat_template().unwrap_or_default().to_string(),
    };
    format!("{:?} {template}", data.chat.train_on)
}
