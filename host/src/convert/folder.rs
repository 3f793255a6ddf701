//! What lies beside the tensors of a Hugging Face folder: `config.json`, `generation_config.json` and the tokenizer.

use super::source::{read_json, refuse};
use crate::checkpoint::{cannot_write, write_synced};
use crate::data::END_OF_DOCUMENT;
use crate::failure::{Failure, Result};
use crate::plugin::PluginSet;
use gantry_plugin_api::plan::{FolderExport, FolderImport};
use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;

pub const CONFIG: &str = "config.json";
pub const GENERATION: &str = "generation_config.json";

/// Keys of tokens in both files.
const TOKENS: [&str; 3] = ["bos_token_id", "eos_token_id", "pad_token_id"];

/// Files that make up a tokenizer, in folders of models.
const TOKENIZER: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
];

/// What the bytes' tokenizer calls the end of a document.
const END: &str = "<|endoftext|>";

/// A folder's config, read.
#[derive(Debug)]
pub struct Config {
    pub provider: String,
    pub import: FolderImport,
    /// `generation_config.json`, if there is one.
    pub generation: Option<Value>,
}

/// Reads the config of a folder for the provider that it is for. Keys of `ignore` are left out first.
pub fn read(folder: &Path, plugins: &PluginSet, ignore: &[String]) -> Result<Config> {
    let path = folder.join(CONFIG);
    let mut value = read_json(&path).map_err(|failure| match path.is_file() {
        true => failure,
        false => failure.remedy("name a folder that save_pretrained of transformers wrote"),
    })?;
    let fields = value.as_object_mut().ok_or_else(|| refuse(&path, "it is no JSON object".into()))?;
    for key in ignore {
        if fields.remove(key).is_none() {
            return Err(Failure::recipe(format!("--ignore {key}: {} has no such key", path.display())));
        }
    }
    let model_type = fields.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let Some((provider, kind)) = plugins.folder_provider(model_type) else {
        let known: Vec<String> =
            plugins.folder_kinds().map(|(name, kind)| format!("{} ({name})", kind.model_type)).collect();
        let known = if known.is_empty() { "none".into() } else { known.join(", ") };
        return Err(refuse(&path, format!("`model_type` is {model_type:?}, which no plugin declares; known: {known}"))
            .remedy("name the plugin that has such models with --plugin"));
    };
    let stated = fields.get("architectures").and_then(Value::as_array);
    let fits = |name: &Value| kind.architectures.iter().any(|known| name == known);
    if stated.is_some_and(|names| !names.is_empty() && !names.iter().any(fits)) {
        let (stated, known) = (&fields["architectures"], kind.architectures.join(", "));
        return Err(refuse(&path, format!("`architectures` is {stated}; {provider} has {known}")));
    }
    let provider = provider.to_string();
    let import = plugins.import_folder(&provider, &value).map_err(|error| {
        let failure = Failure::from(error).at(path.display());
        failure.remedy("the provider cannot hold this model; a key that changes nothing is left out with --ignore KEY")
    })?;
    let generation = folder.join(GENERATION);
    let generation = generation.is_file().then(|| read_json(&generation)).transpose()?;
    Ok(Config { provider, import, generation })
}

/// What an export says besides what the provider does.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// Keys that change nothing of what the model computes, from the folder that it came from.
    pub carried: Map<String, Value>,
    pub generation: Option<Value>,
    /// Tokens are bytes.
    pub bytes: bool,
    /// Tokens of the tokenizer it was trained with; what the vocabulary has beyond them is padding.
    pub tokens: Option<usize>,
    /// The token that ends documents.
    pub end: Option<u64>,
    /// Tokens of a sequence in training.
    pub seq_length: Option<usize>,
}

/// Most tokens of padding that a generation config lists.
const MOST_PADDING: usize = 4096;

/// Writes `config.json` and `generation_config.json`. `dtype`: of most elements, as `config.json` calls it. Returns what
/// there is to say about the vocabulary.
pub fn write(
    folder: &Path,
    kind: &gantry_plugin_api::plan::FolderKind,
    export: &FolderExport,
    known: &Known,
    dtype: &str,
) -> Result<Option<String>> {
    let mut config = Map::new();
    config.insert("architectures".into(), json!([kind.architectures.first()]));
    config.insert("model_type".into(), kind.model_type.as_str().into());
    config.insert("torch_dtype".into(), dtype.into());
    if let Some(length) = known.seq_length {
        config.insert("max_position_embeddings".into(), length.into());
    }
    if let Some(end) = known.end {
        TOKENS.iter().for_each(|key| drop(config.insert(key.to_string(), end.into())));
    }
    config.extend(known.carried.clone());
    config.extend(export.config.clone());
    let mut generation = known.generation.clone().unwrap_or_else(|| {
        let tokens = TOKENS.iter().filter_map(|key| Some((key.to_string(), config.get(*key)?.clone())));
        Value::Object(tokens.collect())
    });
    // Training gave what is beyond the tokenizer no probability; there the logits are noise.
    let vocab = config.get("vocab_size").and_then(Value::as_u64).unwrap_or_default() as usize;
    let padding = known.tokens.map_or(0..0, |tokens| tokens..vocab);
    let note = (!padding.is_empty()).then(|| {
        let (first, last) = (padding.start, padding.end - 1);
        format!("tokens {first} to {last} are padding of the vocabulary, which have logits without a meaning")
    });
    if !padding.is_empty() && padding.len() <= MOST_PADDING {
        generation["suppress_tokens"] = padding.collect();
    }
    write_json(&folder.join(CONFIG), &Value::Object(config))?;
    write_json(&folder.join(GENERATION), &generation)?;
    Ok(note)
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    write_synced(path, format!("{value:#}\n").as_bytes())
}

/// Whether a folder has what makes a tokenizer.
pub fn has_tokenizer(folder: &Path) -> bool {
    let is = |file: &str| folder.join(file).is_file();
    is("tokenizer.json") || is("tokenizer.model") || (is("vocab.json") && is("merges.txt"))
}

/// Copies a tokenizer's files. Returns their names.
pub fn copy_tokenizer(from: &Path, to: &Path) -> Result<Vec<&'static str>> {
    let mut copied = Vec::new();
    for file in TOKENIZER {
        if !from.join(file).is_file() {
            continue;
        }
        fs::create_dir_all(to).map_err(|error| cannot_write(to, &error))?;
        let (from, to) = (from.join(file), to.join(file));
        let bytes =
            fs::read(&from).map_err(|error| Failure::data(format!("cannot read {}: {error}", from.display())))?;
        write_synced(&to, &bytes)?;
        copied.push(file);
    }
    Ok(copied)
}

/// Writes the tokenizer of models whose tokens are bytes: token = byte, then the end of a document. Vocabularies of models
/// may be rounded up; the rest stays without text.
pub fn write_bytes_tokenizer(folder: &Path) -> Result<()> {
    // Byte-level models spell a byte as a character that can be printed: itself where it can, else the next of those
    // from 256 on.
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 256u32;
    let mut vocab = Map::new();
    for byte in 0..=u8::MAX {
        let mut code = u32::from(byte);
        if !printable(byte) {
            code = next;
            next += 1;
        }
        let character = char::from_u32(code).unwrap_or('?');
        vocab.insert(character.to_string(), byte.into());
    }
    vocab.insert(END.into(), END_OF_DOCUMENT.into());
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let end = json!({
        "id": END_OF_DOCUMENT, "content": END, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [end], "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [],
        },
    });
    write_json(&folder.join("tokenizer.json"), &tokenizer)?;
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END, "pad_token": END,
        "clean_up_tokenization_spaces": false,
    });
    write_json(&folder.join("tokenizer_config.json"), &config)
}
