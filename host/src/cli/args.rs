//! Every command and option, once: parser and help come from here.

use crate::failure::{Failure, Result};
use crate::recipe::{Overrides, Recipe};
use clap::{Args, Parser, Subcommand};
use std::path::{Path, PathBuf};

/// Trains large models whose architecture is a plugin.
#[derive(Debug, Parser)]
#[command(name = "gantry", version, disable_help_subcommand = true)]
pub(super) struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Trains a recipe's model, from the run folder's newest checkpoint if it has one.
    Train(Train),
    /// Shows who holds what: parameters, memory and FLOPs per rank. Allocates nothing, needs no GPU.
    Plan(Plan),
    /// Describes a plugin: providers, configuration, parameters, axes. A crashing plugin is reported.
    Inspect(Inspect),
    /// Measures operators, or a recipe's steps, against the machine's fastest matrix product and copy.
    Bench(Bench),
    /// Tells what this machine offers (processor, memory, GPU, libraries, plugins) and what is missing.
    Doctor(Doctor),
}

/// A recipe and what overrides it.
#[derive(Debug, Args)]
pub(super) struct RecipeArguments {
    /// Recipe file (YAML).
    recipe: PathBuf,
    /// Overrides a value, e.g. train.steps=10; later ones win.
    #[arg(long = "set", value_name = "KEY.PATH=VALUE")]
    set: Vec<String>,
}

#[derive(Debug, Args)]
pub(super) struct Train {
    #[command(flatten)]
    pub recipe: RecipeArguments,
    /// Run folder; the same as --set run.dir=DIR.
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Ends the run after N steps in all; schedules still span train.steps.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub steps: Option<u64>,
    /// Ranks, as threads of this process; default: as many as the grids need.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub ranks: Option<u32>,
    /// auto: the run folder's newest checkpoint; none: start over, earlier results are moved aside; or a checkpoint
    /// or run folder.
    #[arg(long, value_name = "auto|none|PATH", default_value = "auto")]
    pub resume: String,
    /// Prints at the end where the time went, by class of operator.
    #[arg(long)]
    pub profile: bool,
}

#[derive(Debug, Args)]
pub(super) struct Plan {
    #[command(flatten)]
    pub recipe: RecipeArguments,
    /// Ranks; default: as many as the grids need.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub ranks: Option<u32>,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(super) struct Inspect {
    /// Plugin file, or the name of a plugin to look for.
    pub plugin: String,
    /// Sets a key of the provider's configuration, e.g. hidden_size=128, to see the model it makes.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
    /// Loads the plugin into this process.
    #[arg(long, hide = true)]
    pub in_process: bool,
}

#[derive(Debug, Args)]
pub(super) struct Bench {
    /// A recipe file, or operators such as linear,ssd_scan; default: all operators.
    #[arg(value_name = "OPS|RECIPE")]
    pub what: Option<String>,
    /// Overrides a value of the recipe, e.g. train.seq_length=512; later ones win.
    #[arg(long = "set", value_name = "KEY.PATH=VALUE")]
    pub set: Vec<String>,
    /// Steps of the recipe to measure [default: 10].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub steps: Option<u32>,
    /// Ranks, as threads of this process; default: as many as the grids need.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub ranks: Option<u32>,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(super) struct Doctor {
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
    /// Opens a library in this process.
    #[arg(long, hide = true, value_name = "NAME")]
    pub library: Option<String>,
}

impl RecipeArguments {
    /// Loads the recipe; `run_dir` overrides its run folder.
    pub fn load(self, run_dir: Option<PathBuf>) -> Result<Recipe> {
        recipe(&self.recipe, self.set, run_dir)
    }
}

/// Loads a recipe with `--set` values; `run_dir` overrides its run folder.
pub(super) fn recipe(path: &Path, set: Vec<String>, run_dir: Option<PathBuf>) -> Result<Recipe> {
    let mut overrides = Overrides::from_process(set);
    if let Some(dir) = run_dir {
        let dir = dir.to_str().ok_or_else(|| Failure::recipe(format!("--run-dir {}: not UTF-8", dir.display())))?;
        // JSON is YAML: quoted, a name like `5` or `a: b` stays text.
        overrides.set.push(format!("run.dir={}", serde_json::Value::from(dir)));
    }
    Recipe::load(path, &overrides)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use rstest::rstest;

    #[test]
    fn definitions_agree() {
        Arguments::command().debug_assert();
    }

    #[rstest]
    #[case(&["gantry"])]
    #[case(&["gantry", "trian", "r.yaml"])]
    #[case(&["gantry", "train"])]
    #[case(&["gantry", "train", "r.yaml", "--steps", "0"])]
    #[case(&["gantry", "train", "r.yaml", "--ranks", "many"])]
    #[case(&["gantry", "plan", "r.yaml", "--steps", "3"])]
    fn wrong_arguments_have_status_2(#[case] arguments: &[&str]) {
        assert_eq!(Arguments::try_parse_from(arguments).unwrap_err().exit_code(), 2);
    }

    #[test]
    fn run_folder_is_text_whatever_it_looks_like() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("r.yaml");
        let text = "name: t\nmodules: {lm: {provider: p}}\ndata: {paths: [x]}\noptimizer: {lr: 1}\n\
                    train: {steps: 1, seq_length: 4, global_batch_size: 1}\n";
        std::fs::write(&file, text).unwrap();
        for name in ["5", "a: b", "[x]"] {
            let arguments = RecipeArguments { recipe: file.clone(), set: vec!["run.dir=other".into()] };
            let recipe = arguments.load(Some(name.into())).unwrap();
            assert_eq!(recipe.run_dir(), std::path::absolute(name).unwrap());
        }
    }
}
