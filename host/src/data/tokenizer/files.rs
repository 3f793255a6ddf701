//! The files of a tokenizer: found, read, judged.
//!
//! The hash is that of the file or files that decide the tokens (`tokenizer.json`, or `vocab.json` and `merges.txt`);
//! what lies beside them (`tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja`) names tokens and
//! templates only.

use crate::failure::{Failure, Result, guarded};
use crate::recipe::TokenizerSpec;
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use tokenizers::models::bpe::{BPE, Merges};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

/// Larger files are no tokenizers.
const MOST_BYTES: u64 = 1 << 30;
/// Larger ids are a mistake in the file: the largest vocabularies there are have less than a million tokens.
const MOST_IDS: usize = 1 << 24;

/// What was found of a tokenizer.
pub(super) struct Found {
    pub name: String,
    /// `tokenizer.json`; of a pair, what describes it.
    pub json: String,
    pub about: About,
    /// Special tokens that the files name, by the files' names.
    pub named: BTreeMap<String, String>,
    pub sha256: String,
    pub chat_template: Option<String>,
    /// From `vocab.json` and `merges.txt`.
    pub pair: bool,
}

/// What this program itself has to know about a `tokenizer.json`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct About {
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    decoder: Option<Value>,
    model: AboutModel,
    pub added_tokens: Vec<Added>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct AboutModel {
    dropout: Option<f64>,
}

/// An entry of `added_tokens`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Added {
    pub id: u64,
    pub content: String,
    pub special: bool,
    lstrip: bool,
    rstrip: bool,
    single_word: bool,
}

impl About {
    /// The steps of a part: of a sequence all, else the part itself.
    fn steps(part: &Option<Value>) -> Vec<&Value> {
        let Some(part) = part.as_ref().filter(|part| !part.is_null()) else { return Vec::new() };
        let inner = ["pretokenizers", "normalizers", "decoders"].iter().find_map(|key| part[key].as_array());
        inner.map_or_else(|| vec![part], |steps| steps.iter().collect())
    }

    /// Whether tokens are decoded as GPT-2's characters for bytes.
    pub fn byte_level(&self) -> bool {
        let steps = About::steps(&self.decoder);
        steps.len() == 1 && steps[0]["type"] == "ByteLevel"
    }

    /// Whether the bytes of the tokens of a text are those of the text.
    pub fn exact(&self) -> bool {
        let steps = About::steps(&self.pre_tokenizer);
        let level = steps.iter().filter(|step| step["type"] == "ByteLevel");
        self.byte_level()
            && About::steps(&self.normalizer).is_empty()
            && level.clone().count() == 1
            && level.clone().all(|step| step["add_prefix_space"] == false)
            && steps.iter().all(|step| step["type"] == "ByteLevel" || keeps(step))
            && self.added_tokens.iter().all(|token| !token.lstrip && !token.rstrip)
    }

    /// Whether a text may be cut after a line's end and before what is no space: words, numbers and signs never reach from
    /// one line into the next, as in the patterns of GPT-2 and those after it.
    pub fn cuts(&self) -> bool {
        let steps = About::steps(&self.pre_tokenizer);
        let parts = |step: &&Value| {
            step["type"] == "ByteLevel" && step["use_regex"] != false
                || step["type"] == "Split" && step["pattern"]["Regex"].as_str().is_some_and(super::long::splits_lines)
        };
        self.exact()
            && steps.iter().any(parts)
            && self.added_tokens.iter().all(|token| !token.content.contains(['\n', '\r']) && !token.single_word)
    }
}

/// Whether a step of a pre-tokenizer leaves every character where it is.
fn keeps(step: &Value) -> bool {
    match step["type"].as_str() {
        Some("Split" | "Punctuation") => step["behavior"] != "Removed",
        Some("Digits" | "UnicodeScripts") => true,
        _ => false,
    }
}

/// Hash of named contents.
pub(super) fn hash(files: &[(&str, &[u8])]) -> String {
    let mut hash = Sha256::new();
    for field in files.iter().flat_map(|(name, content)| [name.as_bytes(), content]) {
        hash.update((field.len() as u64).to_le_bytes());
        hash.update(field);
    }
    crate::checkpoint::hexadecimal(&hash.finalize())
}

/// Refusal of a tokenizer's files.
pub(super) fn broken(name: &str, what: &str) -> Failure {
    let first = what.lines().next().unwrap_or("no reason given");
    Failure::data(format!("tokenizer {name}: {first}")).remedy("correct the file, or name another in data.tokenizer")
}

/// Reads what a recipe names; nothing for bytes.
pub(super) fn read(spec: &TokenizerSpec) -> Result<Option<Found>> {
    match spec {
        TokenizerSpec::Bytes => Ok(None),
        TokenizerSpec::Pair { vocab, merges } => pair(vocab, merges, &vocab.display().to_string()).map(Some),
        TokenizerSpec::Path(path) if path.is_dir() => {
            let [json, vocab, merges] = ["tokenizer.json", "vocab.json", "merges.txt"].map(|name| path.join(name));
            match (json.exists(), vocab.exists() && merges.exists()) {
                (true, _) => file(&json, &path.display().to_string()).map(Some),
                (false, true) => pair(&vocab, &merges, &path.display().to_string()).map(Some),
                (false, false) => Err(Failure::data(format!(
                    "tokenizer {}: the folder has neither tokenizer.json nor vocab.json with merges.txt",
                    path.display()
                ))
                .remedy("name another folder or file in data.tokenizer")),
            }
        }
        TokenizerSpec::Path(path) => file(path, &path.display().to_string()).map(Some),
    }
}

fn file(path: &Path, name: &str) -> Result<Found> {
    let mut found = Found::of_json(name, text(path)?)?;
    found.beside(path.parent().unwrap_or(Path::new("")))?;
    Ok(found)
}

fn pair(vocab: &Path, merges: &Path, name: &str) -> Result<Found> {
    let (vocab_text, merges_text) = (text(vocab)?, text(merges)?);
    let about = About {
        pre_tokenizer: Some(serde_json::json!({"type": "ByteLevel", "add_prefix_space": false})),
        decoder: Some(serde_json::json!({"type": "ByteLevel"})),
        ..About::default()
    };
    let sha256 = hash(&[("vocab.json", vocab_text.as_bytes()), ("merges.txt", merges_text.as_bytes())]);
    let json = serde_json::json!({"vocab": vocab_text, "merges": merges_text}).to_string();
    let (named, chat_template) = (BTreeMap::new(), None);
    let mut found = Found { name: name.into(), json, about, named, sha256, chat_template, pair: true };
    found.beside(vocab.parent().unwrap_or(Path::new("")))?;
    Ok(found)
}

fn text(path: &Path) -> Result<String> {
    let cannot = |why: String| {
        Failure::data(format!("cannot read tokenizer {}: {why}", path.display()))
            .remedy("correct data.tokenizer: bytes, a tokenizer.json, a folder with one, or {vocab, merges}")
    };
    let about = path.metadata().map_err(|error| cannot(error.to_string()))?;
    if !about.is_file() {
        return Err(cannot("it is no file".into()));
    }
    if about.len() > MOST_BYTES {
        return Err(cannot(format!("{} bytes are more than any tokenizer has", about.len())));
    }
    let bytes = std::fs::read(path).map_err(|error| cannot(error.to_string()))?;
    String::from_utf8(bytes).map_err(|error| cannot(format!("no UTF-8 at byte {}", error.utf8_error().valid_up_to())))
}

impl Found {
    /// Of the text of a `tokenizer.json` alone.
    pub fn of_json(name: &str, json: String) -> Result<Found> {
        let about: About =
            serde_json::from_str(&json).map_err(|error| broken(name, &format!("no tokenizer.json: {error}")))?;
        if about.model.dropout.is_some_and(|dropout| dropout != 0.0) {
            return Err(broken(name, "model.dropout would make tokens random").remedy("set model.dropout to null"));
        }
        let sha256 = hash(&[("tokenizer.json", json.as_bytes())]);
        let (named, chat_template) = (BTreeMap::new(), None);
        Ok(Found { name: name.into(), json, about, named, sha256, chat_template, pair: false })
    }

    /// Adds what the files beside say.
    fn beside(&mut self, folder: &Path) -> Result<()> {
        for name in ["special_tokens_map.json", "tokenizer_config.json"] {
            let path = folder.join(name);
            if !path.is_file() {
                continue;
            }
            let config: Value = serde_json::from_str(&text(&path)?)
                .map_err(|error| broken(&path.display().to_string(), &format!("no JSON: {error}")))?;
            for (key, value) in config.as_object().into_iter().flatten() {
                let content = value.as_str().or_else(|| value["content"].as_str());
                if let (true, Some(content)) = (key.ends_with("_token"), content) {
                    self.named.insert(key.clone(), content.into());
                }
            }
            if let Some(template) = template(&config["chat_template"]) {
                self.chat_template = Some(template);
            }
        }
        let path: PathBuf = folder.join("chat_template.jinja");
        if path.is_file() {
            self.chat_template = Some(text(&path)?);
        }
        Ok(())
    }
}

/// A template, or of several named ones the default.
fn template(value: &Value) -> Option<String> {
    let named = || {
        let list = value.as_array()?;
        list.iter().find(|entry| entry["name"] == "default").or(list.first())?["template"].as_str()
    };
    value.as_str().or_else(named).map(str::to_string)
}

/// The tokenizer of a file's text.
pub(super) fn build(name: &str, json: &str, pair: bool, named: &BTreeMap<String, String>) -> Result<Tokenizer> {
    if pair {
        return build_pair(name, json, named);
    }
    let made = guarded(|| json.parse::<Tokenizer>()).map_err(|what| broken(name, &what))?;
    let mut tokenizer = made.map_err(|error| broken(name, &error.to_string()))?;
    // A text is taken whole, and none is filled up.
    tokenizer.with_truncation(None).map_err(|error| broken(name, &error.to_string()))?;
    tokenizer.with_padding(None);
    Ok(tokenizer)
}

#[derive(Deserialize)]
struct Pair {
    vocab: String,
    merges: String,
}

fn build_pair(name: &str, json: &str, named: &BTreeMap<String, String>) -> Result<Tokenizer> {
    let bad = |what: String| broken(name, &what);
    let Pair { vocab, merges } = serde_json::from_str(json).map_err(|error| bad(error.to_string()))?;
    let vocab: HashMap<String, u32> =
        serde_json::from_str(&vocab).map_err(|error| bad(format!("vocab.json is no table of ids: {error}")))?;
    let mut pairs: Merges = Vec::new();
    for (number, line) in merges.lines().enumerate() {
        if line.starts_with("#version") || line.is_empty() {
            continue;
        }
        let place = || format!("merges.txt line {}", number + 1);
        let (left, right) = line
            .split_once(' ')
            .filter(|(_, right)| !right.contains(' '))
            .ok_or_else(|| bad(format!("{}: expected two tokens with a space between, not `{line}`", place())))?;
        let unknown = [left.to_string(), right.to_string(), format!("{left}{right}")];
        if let Some(token) = unknown.iter().find(|token| !vocab.contains_key(*token)) {
            return Err(bad(format!("{}: `{token}` is not in vocab.json", place())));
        }
        pairs.push((left.into(), right.into()));
    }
    let specials: Vec<AddedToken> = named
        .values()
        .map(String::as_str)
        .chain([super::special::GPT2_END])
        .filter(|content| vocab.contains_key(*content))
        .map(|content| AddedToken::from(content, true))
        .collect();
    let made = guarded(|| {
        let model = BPE::builder()
            .vocab_and_merges(vocab.into_iter().collect::<tokenizers::models::bpe::Vocab>(), pairs)
            .build()?;
        let mut tokenizer = Tokenizer::new(model);
        tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
        tokenizer.with_decoder(Some(ByteLevel::default()));
        tokenizer.add_special_tokens(specials)?;
        Ok::<_, tokenizers::Error>(tokenizer)
    });
    made.map_err(&bad)?.map_err(|error| bad(error.to_string()))
}

/// A tokenizer as the text of a `tokenizer.json`.
pub(super) fn written(name: &str, tokenizer: &Tokenizer) -> Result<String> {
    let made = guarded(|| tokenizer.to_string(false)).map_err(|what| broken(name, &what))?;
    made.map_err(|error| broken(name, &error.to_string()))
}

/// The largest id plus one; refuses vocabularies without tokens and with ids that no model has.
pub(super) fn vocab_size(name: &str, vocab: &HashMap<String, u32>) -> Result<usize> {
    match vocab.iter().max_by_key(|(content, id)| (**id, *content)) {
        None => Err(broken(name, "the vocabulary is empty")),
        Some((content, &id)) if id as usize >= MOST_IDS => {
            Err(broken(name, &format!("token {content:?} has the id {id}; ids to {} are possible", MOST_IDS - 1)))
        }
        Some((_, &id)) => Ok(id as usize + 1),
    }
}
