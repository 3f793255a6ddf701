//! Recipes: one YAML file (and what it extends) says everything about a run.
//!
//! `defaults.yaml` states every key once, with its default and meaning; `layers.rs` reads and merges the layers and
//! knows which file, line, variable or option a key came from; `schema.rs` holds the typed, immutable result;
//! `validate.rs` checks what types cannot; `megatron.rs` is the section `data.megatron`; `error.rs` words the refusals, `place.rs` finds the keys that others
//! refuse, and `editor.rs` tells editors what there is. May depend on nothing but `failure`;
//! knows no model, mesh or device.

pub mod editor;
mod error;
mod layers;
mod megatron;
mod place;
mod schema;
mod validate;

pub(crate) use megatron::BlendSpec;
pub use schema::*;

use crate::failure::{Failure, Result};
use layers::{Layers, Origin};
use std::path::{Path, PathBuf};

/// Where overriding values come from, besides the files.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// Environment variables (name, value); only names `GANTRY_SECTION__KEY` count.
    pub environment: Vec<(String, String)>,
    /// `key.path=value`, as given to `--set`, later ones win.
    pub set: Vec<String>,
}

impl Overrides {
    /// The process's environment and the given `--set` values.
    pub fn from_process(set: Vec<String>) -> Overrides {
        // A value that is not UTF-8 keeps replacement characters, by which the layers refuse it if it is one of theirs.
        let environment = std::env::vars_os()
            .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
            .collect();
        Overrides { environment, set }
    }
}

impl Recipe {
    /// Reads, merges and validates a recipe. Relative paths in it become absolute.
    pub fn load(path: &Path, overrides: &Overrides) -> Result<Recipe> {
        Recipe::from_layers(Layers::collect(path, overrides)?)
    }

    /// As [`Recipe::load`], from text; relative paths are relative to the working folder.
    pub fn parse(text: &str, overrides: &Overrides) -> Result<Recipe> {
        Recipe::from_layers(Layers::from_text(text, overrides)?)
    }

    fn from_layers(layers: Layers) -> Result<Recipe> {
        let merged = layers.merge()?;
        let mut recipe = layers.extract(&merged)?;
        recipe.make_paths_absolute(&layers)?;
        validate::check(&recipe, &layers)?;
        recipe.resolved = layers::to_yaml(&merged, &recipe)?;
        recipe.places = place::Places::new(layers);
        Ok(recipe)
    }

    /// The whole recipe with defaults, as it was merged: what `recipe.resolved.yaml` holds. Loads to the same recipe.
    pub fn resolved_yaml(&self) -> &str {
        &self.resolved
    }

    /// States a grid's data-parallel size that was left open, in the resolved recipe too.
    pub fn state_dp(&mut self, module: &str, dp: usize) -> Result<()> {
        let failed =
            |error: &dyn std::fmt::Display| Failure::recipe(format!("cannot write the resolved recipe: {error}"));
        let Some(entry) = self.modules.get_mut(module) else { return Ok(()) };
        let mut tree: serde_json::Value = serde_saphyr::from_str(&self.resolved).map_err(|error| failed(&error))?;
        tree["modules"][module]["grid"]["dp"] = dp.into();
        entry.grid.dp = Some(dp);
        self.resolved = serde_saphyr::to_string(&tree).map_err(|error| failed(&error))?;
        Ok(())
    }

    /// The run folder: `run.dir`, or `runs/NAME` under the working folder.
    pub fn run_dir(&self) -> PathBuf {
        self.run.dir.clone().unwrap_or_else(|| Path::new("runs").join(&self.name))
    }

    fn make_paths_absolute(&mut self, layers: &Layers) -> Result<()> {
        let absolute = |key: &str, path: &mut PathBuf| -> Result<()> {
            let base = match layers.origin_of(key) {
                Some(Origin::File { path, .. }) => path.parent().unwrap_or(Path::new("")).to_path_buf(),
                _ => PathBuf::new(),
            };
            let joined = base.join(&*path);
            *path = std::path::absolute(&joined)
                .map_err(|error| Failure::recipe(format!("`{key}`: bad path {}: {error}", joined.display())))?;
            Ok(())
        };
        for plugin in &mut self.plugins {
            absolute("plugins", &mut plugin.path)?;
        }
        for path in &mut self.data.paths {
            absolute("data.paths", path)?;
        }
        for path in &mut self.data.valid_paths {
            absolute("data.valid_paths", path)?;
        }
        if let Some(name) = self.data.chat.template.as_mut().filter(|name| *name != "chatml") {
            let mut path = PathBuf::from(&*name);
            absolute("data.chat.template", &mut path)?;
            *name = path.display().to_string();
        }
        for path in self.data.tokenizer.paths() {
            absolute("data.tokenizer", path)?;
        }
        for (key, path) in self.data.megatron.paths() {
            absolute(key, path)?;
        }
        for (name, module) in &mut self.modules {
            if let Some(path) = &mut module.load {
                absolute(&format!("modules.{name}.load"), path)?;
            }
            if let Some(teacher) = &mut module.teacher {
                absolute(&format!("modules.{name}.teacher.load"), &mut teacher.load)?;
            }
        }
        // The run folder is where the user stands, not where the recipe lies.
        if let Some(dir) = &mut self.run.dir {
            *dir = std::path::absolute(&*dir)
                .map_err(|error| Failure::recipe(format!("`run.dir`: bad path {}: {error}", dir.display())))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
