//! `index.json` of a checkpoint.

use super::hexadecimal;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// Tells a checkpoint from any other folder.
pub(super) const FORMAT: &str = "gantry-checkpoint";

/// Grows by one when an older reader could misread a checkpoint.
pub(super) const VERSION: u32 = 2;

pub(super) const INDEX_FILE: &str = "index.json";

/// What a checkpoint holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Index {
    pub format: String,
    pub version: u32,
    /// Finished steps.
    pub step: u64,
    /// Samples they consumed.
    pub consumed_samples: u64,
    /// Shards by file name.
    pub files: BTreeMap<String, FileEntry>,
    /// Files for the reader of the folder, by name; no part of the state.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub notes: BTreeMap<String, FileEntry>,
    /// In the order they were written.
    pub tensors: Vec<TensorEntry>,
    /// Providers that declared the model.
    pub plugins: Vec<PluginEntry>,
    /// Held-out loss of the step, if it was taken; nats per token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub valid_loss: Option<f64>,
    /// State that is no tensor.
    pub extra: Value,
    /// Of the rest of the index, as [`digest`] computes it.
    pub sha256: String,
}

/// SHA-256 of an index without its field `sha256`: of its JSON without spaces, sorted keys and
/// a comma after every item, 64 hexadecimal digits.
///
/// The value must have been read from text: numbers count as they are read, which may differ from those written in the
/// last bit.
pub fn digest(index: &Value) -> String {
    let mut text = String::new();
    let fields = index.as_object().into_iter().flatten().filter(|(key, _)| *key != "sha256");
    canonical_object(fields, &mut text);
    hexadecimal(&Sha256::digest(&text))
}

fn canonical(value: &Value, text: &mut String) {
    match value {
        Value::Object(fields) => canonical_object(fields.iter(), text),
        Value::Array(items) => {
            text.push('[');
            for item in items {
                canonical(item, text);
                text.push(',');
            }
            text.push(']');
        }
        scalar => text.push_str(&scalar.to_string()),
    }
}

fn canonical_object<'a>(fields: impl Iterator<Item = (&'a String, &'a Value)>, text: &mut String) {
    let mut fields: Vec<_> = fields.collect();
    fields.sort_by_key(|(key, _)| *key);
    text.push('{');
    for (key, value) in fields {
        text.push_str(&Value::from(key.as_str()).to_string());
        text.push(':');
        canonical(value, text);
        text.push(',');
    }
    text.push('}');
}

/// A shard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileEntry {
    pub bytes: u64,
    /// 64 hexadecimal digits.
    pub sha256: String,
}

/// A tensor and the shard it is in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorEntry {
    pub name: String,
    pub shape: Vec<usize>,
    /// safetensors' name: F32 or F64.
    pub dtype: String,
    pub file: String,
}

/// A plugin the run used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluginEntry {
    pub name: String,
    pub version: String,
    /// Where it was loaded from.
    #[serde(default)]
    pub path: String,
    /// Of the plugin's file, 64 hexadecimal digits.
    pub sha256: String,
}
