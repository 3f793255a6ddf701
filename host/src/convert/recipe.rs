//! The recipe that goes with converted tensors: what makes the model, and a beginning of the rest.

use super::{Format, Model, Request, folder};
use crate::failure::{Failure, Result};
use crate::plugin::PluginSet;
use crate::recipe::{Overrides, Recipe, TokenizerSpec};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// Its name, beside the tensors.
pub const FILE: &str = "recipe.yaml";
/// Where a checkpoint keeps the files of an imported tokenizer.
pub const TOKENIZER: &str = "tokenizer";

/// Sequences of a beginning are not longer than this.
const SEQ_LENGTH: usize = 2048;

/// Whether the recipe's tokens are bytes of text.
pub fn bytes(recipe: &Recipe) -> bool {
    recipe.data.synthetic.is_none() && recipe.data.tokenizer == TokenizerSpec::Bytes
}

/// The folder of the tokenizer of the source's recipe.
pub fn tokenizer(model: &Model) -> Option<PathBuf> {
    let recipe = Recipe::parse(model.recipe.as_deref()?, &Overrides::default()).ok()?;
    match recipe.data.tokenizer {
        TokenizerSpec::Path(path) if path.is_dir() => Some(path),
        TokenizerSpec::Path(path) => path.parent().map(Path::to_path_buf),
        TokenizerSpec::Pair { vocab, .. } => vocab.parent().map(Path::to_path_buf),
        TokenizerSpec::Bytes => None,
    }
}

/// The tokenizer's file that a checkpoint holds, if it does: its name and what is in it.
pub fn tokenizer_file(model: &Model) -> Result<Option<(String, String)>> {
    const NAME: &str = "tokenizer.json";
    let path = model.source.path().join(NAME);
    if !path.is_file() {
        return Ok(None);
    }
    let text = std::fs::read_to_string(&path);
    let text = text.map_err(|error| Failure::data(format!("cannot read {}: {error}", path.display())))?;
    Ok(Some((NAME.into(), text)))
}

/// The recipe of the destination: the source's with the model's config, or one to begin with.
pub fn text(request: &Request, plugins: &PluginSet, model: &Model) -> Result<String> {
    let bad = |error: &dyn std::fmt::Display| Failure::data(format!("cannot write {FILE}: {error}"));
    let tree = match &model.recipe {
        Some(text) => {
            let mut tree: Value = serde_saphyr::from_str(text).map_err(|error| bad(&error))?;
            for module in tree["modules"].as_object_mut().into_iter().flat_map(Map::values_mut) {
                // Weights alone: nothing widens, teaches or loads.
                for key in ["elastify", "teacher", "load"] {
                    module[key] = Value::Null;
                }
                if module["provider"] == model.provider.as_str() {
                    module["config"] = model.config.clone();
                }
            }
            tree
        }
        None => beginning(request, plugins, model),
    };
    let text = serde_saphyr::to_string(&tree).map_err(|error| bad(&error))?;
    let from = request.source.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let head = match model.recipe {
        Some(_) => format!("# The recipe of the source ({from}).\n"),
        None => format!(
            "# Converted from {from}. `modules` makes the model; the rest is a beginning: name your text in data.paths.\n#\n\
             # To train on from these weights, in a recipe of your own: modules.lm as here, with load: and this folder.\n"
        ),
    };
    Ok(format!("{head}{text}"))
}

fn beginning(request: &Request, plugins: &PluginSet, model: &Model) -> Value {
    let name = request.destination.file_name().unwrap_or_default().to_string_lossy();
    let name: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' }).collect();
    let longest = model.known.carried.get("max_position_embeddings").and_then(Value::as_u64);
    let seq_length = longest.map_or(SEQ_LENGTH, |n| SEQ_LENGTH.min(n as usize)).max(1);
    let mut tree = json!({
        "name": if name.is_empty() { "converted".into() } else { name },
        "modules": {"lm": {"provider": model.provider, "config": model.config}},
        "data": {"paths": ["text"]},
        "train": {"steps": 1000, "seq_length": seq_length, "micro_batch_size": 1, "global_batch_size": 8},
        "optimizer": {"lr": 1e-5},
    });
    let tokenizer = request.tokenizer.as_deref().unwrap_or(&request.source);
    if request.to == Format::Gantry && folder::has_tokenizer(tokenizer) {
        let place = request.destination.join(TOKENIZER);
        tree["data"]["tokenizer"] = std::path::absolute(&place).unwrap_or(place).display().to_string().into();
    }
    // A plugin that is not found by its name.
    let usual = crate::plugin::Search::standard(Vec::new());
    let own = plugins.plugins().iter().find(|plugin| plugin.providers.iter().any(|p| p.name == model.provider));
    if let Some(plugin) = own.filter(|_| usual.find(&model.provider).is_err()) {
        let path = std::path::absolute(&plugin.path).unwrap_or_else(|_| plugin.path.clone());
        tree["plugins"] = json!([path.display().to_string()]);
    }
    tree
}

/// The same recipe with all defaults.
pub fn resolved(text: &str) -> Result<String> {
    let recipe = Recipe::parse(text, &Overrides::default()).map_err(|failure| failure.at(format!("the new {FILE}")))?;
    Ok(recipe.resolved_yaml().to_string())
}

/// SHA-256 of a file; nothing if it cannot be read.
pub fn file_hash(path: &Path) -> String {
    std::fs::read(path).map(|bytes| crate::checkpoint::hexadecimal(&Sha256::digest(bytes))).unwrap_or_default()
}
