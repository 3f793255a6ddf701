//! `index.json` of a checkpoint.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Tells a checkpoint from any other folder.
pub(super) const FORMAT: &str = "gantry-checkpoint";

/// Grows by one when an older reader could misread a checkpoint.
pub(super) const VERSION: u32 = 1;

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
    /// In the order they were written.
    pub tensors: Vec<TensorEntry>,
    /// Providers that declared the model.
    pub plugins: Vec<PluginEntry>,
    /// State that is no tensor.
    pub extra: serde_json::Value,
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
    /// Of the plugin's file, 64 hexadecimal digits.
    pub sha256: String,
}
