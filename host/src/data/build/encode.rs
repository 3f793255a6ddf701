//! A part of the input to tokens.

use super::input::{Part, Piece};
use crate::data::Tokenizer;
use crate::data::megatron::{Dtype, Encoded};
use crate::failure::{Failure, Result};
use serde_json::Value;
use std::path::Path;

/// What documents are.
#[derive(Clone, Debug)]
pub enum Content {
    /// Text, or lists of texts, each of which becomes a sequence.
    Text(Tokenizer),
    /// Token ids: lists, or lists of lists, each of which becomes a sequence.
    Ids,
}

/// How documents become sequences of tokens.
#[derive(Clone, Debug)]
pub struct Task {
    pub content: Content,
    /// Of a line's object: each is a data set of its own. A line that is no object is the document itself.
    pub keys: Vec<String>,
    /// Ends every document that is not empty.
    pub end: Option<u32>,
}

/// What became of a part.
#[derive(Debug, Default)]
pub(super) struct Made {
    /// One for each key.
    pub encoded: Vec<Encoded>,
    pub read: u64,
    pub documents: u64,
    pub tokens: u64,
    pub text_bytes: u64,
    pub empty: u64,
    pub binary: u64,
}

type Sequences = Vec<Vec<u32>>;

/// A refusal with the place.
fn at(file: &Path, line: Option<usize>, what: &str) -> Failure {
    let place = match line {
        Some(line) => format!("{}:{line}", file.display()),
        None => file.display().to_string(),
    };
    Failure::data(format!("{place}: {what}"))
}

impl Task {
    pub(super) fn encode(&self, part: Part, dtype: Dtype) -> Result<Made> {
        let mut made = Made { encoded: vec![Encoded::default(); self.keys.len()], read: part.read, ..Made::default() };
        for piece in part.pieces {
            match piece {
                Piece::Text { file, named, bytes } => self.text_file(&file, named, bytes, dtype, &mut made)?,
                Piece::Lines { file, first, bytes } => {
                    for (line, text) in (first..).zip(lines(&bytes)) {
                        if text.iter().any(|byte| !byte.is_ascii_whitespace()) {
                            self.line(&file, line, text, dtype, &mut made)?;
                        }
                    }
                }
            }
        }
        match part.failed {
            Some(failure) => Err(failure),
            None => Ok(made),
        }
    }

    fn text_file(&self, file: &Path, named: bool, bytes: Vec<u8>, dtype: Dtype, made: &mut Made) -> Result<()> {
        if bytes.is_empty() && !named {
            made.empty += 1;
            return Ok(());
        }
        let text = match String::from_utf8(bytes) {
            Ok(text) if named || !text.contains('\0') => text,
            Ok(_) => {
                made.binary += 1;
                return Ok(());
            }
            Err(_) if !named => {
                made.binary += 1;
                return Ok(());
            }
            Err(error) => {
                let byte = error.utf8_error().valid_up_to();
                return Err(at(file, None, &format!("not UTF-8 from byte {byte} on"))
                    .remedy("convert the file to UTF-8, or leave it out"));
            }
        };
        made.text_bytes += text.len() as u64;
        let sequences = match &self.content {
            Content::Text(tokenizer) => vec![tokenizer.encode(&text).map_err(|e| e.at(file.display()))?],
            Content::Ids => return Err(at(file, None, "token ids come in lines of JSON")),
        };
        self.add(0, sequences, dtype, made).map_err(|what| at(file, None, &what))?;
        made.documents += 1;
        Ok(())
    }

    fn line(&self, file: &Path, line: usize, text: &[u8], dtype: Dtype, made: &mut Made) -> Result<()> {
        let remedy = match self.content {
            Content::Text(_) => "a line is an object such as {\"text\": \"...\"}; --json-keys names its keys",
            Content::Ids => "a line is a list of token ids, or an object such as {\"text\": [1, 2]}",
        };
        let refuse = |what: String| at(file, Some(line), &what).remedy(remedy);
        let value: Value = serde_json::from_slice(text).map_err(|error| refuse(unparsable(&error)))?;
        made.text_bytes += text.len() as u64;
        for (set, key) in self.keys.iter().enumerate() {
            let content = match &value {
                Value::Object(fields) => fields.get(key).ok_or_else(|| refuse(format!("there is no key `{key}`")))?,
                Value::Array(_) if matches!(self.content, Content::Ids) && self.keys.len() == 1 => &value,
                other => return Err(refuse(format!("{} where an object is expected", kind(other)))),
            };
            let sequences = match &self.content {
                Content::Text(tokenizer) => texts_of(content, key)
                    .map_err(&refuse)?
                    .into_iter()
                    .map(|text| {
                        tokenizer.encode(text).map_err(|failure| failure.at(format!("{}:{line}", file.display())))
                    })
                    .collect::<Result<Sequences>>()?,
                Content::Ids => ids_of(content, key).map_err(&refuse)?,
            };
            self.add(set, sequences, dtype, made).map_err(refuse)?;
        }
        made.documents += 1;
        Ok(())
    }

    /// Adds a document; sequences without tokens are left out, as Megatron-LM's preprocessing leaves them.
    fn add(&self, set: usize, mut sequences: Sequences, dtype: Dtype, made: &mut Made) -> Result<(), String> {
        sequences.retain(|sequence| !sequence.is_empty());
        if let (Some(end), Some(last)) = (self.end, sequences.last_mut()) {
            last.push(end);
        }
        made.tokens += sequences.iter().map(|sequence| sequence.len() as u64).sum::<u64>();
        made.encoded[set].document::<u32>(&sequences, dtype)
    }
}

fn lines(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.strip_suffix(b"\n").unwrap_or(bytes).split(|&byte| byte == b'\n')
}

/// The words of the parser without its line, which is always 1.
fn unparsable(error: &serde_json::Error) -> String {
    let words = error.to_string();
    let words = words.split(" at line ").next().unwrap_or(&words);
    format!("no JSON from column {} on: {words}", error.column())
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A text, or the texts of a list.
fn texts_of<'a>(content: &'a Value, key: &str) -> Result<Vec<&'a str>, String> {
    let wrong = |value: &Value| format!("`{key}` is {}, expected a text or a list of texts", kind(value));
    match content {
        Value::String(text) => Ok(vec![text]),
        Value::Array(list) => {
            list.iter().map(|text| text.as_str().ok_or_else(|| format!("in a list, {}", wrong(text)))).collect()
        }
        other => Err(wrong(other)),
    }
}

fn ids_of(content: &Value, key: &str) -> Result<Sequences, String> {
    let Value::Array(list) = content else {
        return Err(format!("`{key}` is {}, expected a list of token ids", kind(content)));
    };
    let id = |value: &Value| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|&id| id <= i32::MAX as u32);
        id.ok_or_else(|| format!("{value} is no token id"))
    };
    match list.first() {
        Some(Value::Array(_)) => {
            let sequence = |value: &Value| match value {
                Value::Array(ids) => ids.iter().map(id).collect(),
                other => Err(format!("{} among lists of token ids", kind(other))),
            };
            list.iter().map(sequence).collect()
        }
        _ => Ok(vec![list.iter().map(id).collect::<Result<_, _>>()?]),
    }
}

/// Texts of a piece, each with what may be wrong with it.
pub(super) fn texts(piece: Piece, key: &str, take: &mut dyn FnMut(Result<String>)) {
    match piece {
        Piece::Text { file, named, bytes } => match String::from_utf8(bytes) {
            Ok(text) if named || !text.contains('\0') => take(Ok(text)),
            Err(error) if named => {
                let byte = error.utf8_error().valid_up_to();
                take(Err(at(&file, None, &format!("not UTF-8 from byte {byte} on"))));
            }
            _ => {}
        },
        Piece::Lines { file, first, bytes } => {
            for (line, text) in (first..).zip(lines(&bytes)) {
                if text.iter().all(u8::is_ascii_whitespace) {
                    continue;
                }
                let found = serde_json::from_slice::<Value>(text).map_err(|error| unparsable(&error));
                let found = found.and_then(|value| match &value[key] {
                    Value::Null => Err(format!("there is no key `{key}`")),
                    content => Ok(texts_of(content, key)?.into_iter().map(str::to_string).collect::<Vec<_>>()),
                });
                match found {
                    Ok(texts) => texts.into_iter().for_each(|text| take(Ok(text))),
                    Err(what) => take(Err(at(&file, Some(line), &what))),
                }
            }
        }
    }
}
