//! A trained model for commands that do not train.

use crate::checkpoint::{self, CheckpointReader, Meta};
use crate::failure::{Failure, Result};
use crate::recipe::{Overrides, Recipe};
use crate::train::engine::stays;
use crate::train::{Engine, TOKENIZER_FILE, changes, engine};
use gantry_plugin_api::plan::ProviderKind;
use std::path::{Path, PathBuf};

/// A model with a checkpoint's parameters.
pub(super) struct Model {
    pub engine: Box<dyn Engine>,
    /// Where the parameters come from, and the steps they were trained for.
    pub checkpoint: PathBuf,
    pub step: u64,
}

/// Opens the checkpoint a path stands for: a checkpoint folder, or a run folder's newest.
pub(super) fn open(path: &Path) -> Result<CheckpointReader> {
    CheckpointReader::open(&checkpoint::locate(path)?)
}

/// The text of a checkpoint's `tokenizer.json`, if it has one.
pub(super) fn tokenizer_json(reader: &CheckpointReader) -> Result<Option<String>> {
    if !reader.index().notes.contains_key(TOKENIZER_FILE) {
        return Ok(None);
    }
    let path = reader.folder().join(TOKENIZER_FILE);
    let text = std::fs::read_to_string(&path);
    text.map(Some).map_err(|error| Failure::data(format!("cannot read {}: {error}", path.display())))
}

/// What a new checkpoint says, with the tokenizer of the one that it is made from.
pub(super) fn with_tokenizer(reader: &CheckpointReader, mut meta: Meta) -> Result<Meta> {
    meta.extra["tokenizer"] = reader.index().extra["tokenizer"].clone();
    meta.notes.extend(tokenizer_json(reader)?.map(|json| (TOKENIZER_FILE.into(), json)));
    Ok(meta)
}

/// The recipe a checkpoint was trained by, for one rank of each pipeline stage: layouts differ in speed only. `dp`, `tp`
/// and what depends on them count for nothing here.
pub(super) fn recipe_of(reader: &CheckpointReader) -> Result<Recipe> {
    let at = |failure: Failure| failure.at(format!("checkpoint {}", reader.folder().display()));
    let text = reader.index().extra["recipe"].as_str();
    let text = text.ok_or_else(|| at(Failure::data("no recipe is in index.json")))?;
    let saved = Recipe::parse(text, &Overrides::default()).map_err(at)?;
    let one = saved.modules.keys().flat_map(|module| {
        ["tp=1", "dp=1", "etp=null", "sequence_parallel=false"].map(|set| format!("modules.{module}.grid.{set}"))
    });
    Recipe::parse(text, &Overrides { environment: Vec::new(), set: one.collect() }).map_err(at)
}

/// Makes the recipe's model with the checkpoint's parameters. Refuses those of another model.
pub(super) fn load(recipe: &Recipe, mut reader: CheckpointReader) -> Result<Model> {
    let plugins = super::plugins(recipe)?;
    let is_hook = |provider: &str| plugins.kind(provider) == Some(ProviderKind::Hooks);
    let hooks: Vec<&str> =
        recipe.modules.iter().filter(|(_, module)| is_hook(&module.provider)).map(|(name, _)| name.as_str()).collect();
    if let Some(then) = reader.index().extra["recipe"].as_str() {
        changes::compare(then, recipe.resolved_yaml(), &hooks)
            .map_err(|failure| failure.at(format!("checkpoint {}", reader.folder().display())))?;
    }
    let mut engine = engine::create_forward(recipe, plugins)?;
    engine.load_weights(&mut reader)?;
    let (checkpoint, step) = (reader.folder().to_path_buf(), reader.index().step);
    reader.finish(stays)?;
    Ok(Model { engine, checkpoint, step })
}
