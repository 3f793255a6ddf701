//! Kind hybrid_tiny_hf: a Hugging Face folder through `gantry convert`'s own code into a checkpoint, and from there into the
//! real engine on one rank. Every `config*.json` of the folder is a spelling of the same model.

use super::case::Result;
use super::compare::Check;
use super::hybrid::{batch, outputs, spec, text};
use crate::plugins::providers;
use gantry::checkpoint::CheckpointReader;
use gantry::convert::{self, Format, Request, Wanted, pieces::declared};
use gantry::plugin::PluginSet;
use gantry::train::team::{Kind, Team};
use gantry_kernels::Element;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A conversion with nothing special about it.
pub fn request(from: Format, to: Format, source: &Path, destination: &Path) -> Request {
    Request {
        from,
        to,
        source: source.into(),
        destination: destination.into(),
        wanted: Wanted::Keep,
        shard_bytes: 5 << 30,
        force: false,
        recipe: None,
        module: None,
        tokenizer: None,
        set: Default::default(),
        ignore: Vec::new(),
    }
}

/// A copy of a folder whose config is the file `config` of it.
pub fn with_config(folder: &Path, config: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("a temporary folder");
    for entry in std::fs::read_dir(folder).expect("the folder can be read") {
        let path = entry.expect("the folder can be read").path();
        let name = path.file_name().unwrap_or_default();
        if !name.to_string_lossy().starts_with("config") {
            std::fs::copy(&path, copy.path().join(name)).expect("a file is copied");
        }
    }
    std::fs::copy(config, copy.path().join("config.json")).expect("the config is copied");
    copy
}

/// Every spelling of a folder's config.
pub fn configs(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_config = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with("config") && name.ends_with(".json")
    };
    let mut all: Vec<PathBuf> = entries.filter(is_config).collect();
    all.sort();
    all
}

pub fn hugging_face<T: Element>(check: &mut Check<'_>) -> Result<()> {
    let folder = check.case.json["hf_dir"].as_str().ok_or("the case names no hf_dir")?;
    let folder = check.case.folder.join(folder);
    let plugins = providers(&["nemotron-hybrid"]);
    let configs = configs(&folder);
    if configs.is_empty() {
        return Err(format!("{} holds no config", folder.display()));
    }
    for config in configs {
        with::<T>(check, &folder, &config, &plugins).map_err(|e| format!("{}: {e}", config.display()))?;
    }
    Ok(())
}

fn with<T: Element>(check: &mut Check<'_>, folder: &Path, config: &Path, plugins: &PluginSet) -> Result<()> {
    let copy = with_config(folder, config);
    let checkpoint = copy.path().join("checkpoint");
    let request = request(Format::HuggingFace, Format::Gantry, copy.path(), &checkpoint);
    let converted = convert::run(&request, plugins).map_err(text)?;
    let mut reader = CheckpointReader::open(&checkpoint).map_err(text)?;
    let team = Team::<T>::start(&spec(converted.config, plugins.clone())).map_err(text)?;
    for kind in [Kind::Params, Kind::Buffers] {
        for (index, tensors) in team.entries(kind).map_err(text)?.into_iter().enumerate() {
            let mut values = Vec::new();
            for (name, shape) in &tensors {
                values.extend(reader.take(name, shape).map_err(text)?.data.into_f64());
            }
            if !tensors.is_empty() {
                team.scatter(kind, index, values).map_err(text)?;
            }
        }
    }
    reader.finish(|_| false).map_err(text)?;

    let batch = batch(check.case)?;
    outputs(check, &team, &batch)?;
    let count: f64 = batch.loss_mask.iter().map(|&m| f64::from(m)).sum();
    let micro_batches = [(0, Arc::new(batch))];
    let sums = team.all(move |rank| rank.gradients(1, &micro_batches)).map_err(text)?;
    check.tensor("out.loss", &[sums[0].loss / count])?;
    // Gradients under the folder's names: pieces of the declared tensors', as the weights are.
    let declared = declared(&team.plan).map_err(text)?;
    let mut declared = declared.iter().filter(|tensor| !tensor.buffer);
    for tensors in team.gather(Kind::Grads) {
        let values: Vec<f64> = tensors.map_err(text)?.into_iter().flat_map(|tensor| tensor.data.into_f64()).collect();
        let tensor = declared.next().filter(|tensor| tensor.len == values.len()).ok_or("gradients of another model")?;
        for piece in &tensor.folder {
            let cut: Vec<f64> = piece.runs.iter().flat_map(|run| values[run.clone()].to_vec()).collect();
            check.tensor(&format!("grad.{}", piece.name), &cut)?;
        }
    }
    Ok(())
}
