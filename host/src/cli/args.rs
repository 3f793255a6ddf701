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
    /// Shows who holds what: parameters, memory and FLOPs per rank. Reads the data, allocates nothing else.
    Plan(Plan),
    /// Gives a trained model's loss on held-out data.
    Eval(Eval),
    /// Writes text with a trained model, as it comes.
    Generate(Generate),
    /// Ranks heads, channels, experts and layers by importance, and sorts a trained model by it.
    Rank(Rank),
    /// Converts a model between checkpoints, Hugging Face folders and safetensors under Megatron's names.
    Convert(Convert),
    /// Cuts a smaller model out of a trained one: a checkpoint with its own recipe.
    Slice(Slice),
    /// Describes a plugin: providers, configuration, parameters, axes. A crashing plugin is reported.
    Inspect(Inspect),
    /// Shows which tokens a text becomes.
    Tokenize(Tokenize),
    /// Prints the JSON schema of recipes, for editors.
    Schema(Schema),
    /// Makes, shows, checks and joins data sets of tokens (Megatron-LM's .bin and .idx), and makes vocabularies.
    Data(super::data::args::Data),
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
    /// Tells at the end where the time went, by class of operator, and writes profile.json.
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
pub(super) struct Eval {
    #[command(flatten)]
    pub recipe: RecipeArguments,
    /// Checkpoint folder, or a run folder: its newest.
    #[arg(long, value_name = "DIR")]
    pub checkpoint: PathBuf,
    /// Text to evaluate on instead of what the recipe holds out: a file, a folder or a glob.
    #[arg(long, value_name = "PATH")]
    pub data: Option<PathBuf>,
    /// Writes tokens and logits of the first micro-batch to a safetensors file, to compare with other programs.
    #[arg(long, value_name = "FILE")]
    pub logits: Option<PathBuf>,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(super) struct Generate {
    /// Checkpoint folder, or a run folder: its newest.
    #[arg(long, value_name = "DIR")]
    pub checkpoint: PathBuf,
    /// What the text begins with; - reads it from standard input; empty: the beginning of a document.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: String,
    /// The prompt is a question in a conversation, for models trained on these.
    #[arg(long)]
    pub chat: bool,
    /// Most tokens to write.
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub tokens: usize,
    /// 0: always the likeliest token; 1: as likely as the model says.
    #[arg(long, value_name = "T", default_value_t = 0.8, value_parser = at_least_zero)]
    pub temperature: f64,
    /// Chooses among the K likeliest tokens only.
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..))]
    pub top_k: Option<u32>,
    /// Chooses among the likeliest tokens that reach probability P together.
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = probability)]
    pub top_p: f64,
    /// The same seed gives the same text.
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub seed: u64,
    /// Ends the text before this; may be given several times.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
}

fn at_least_zero(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "expected a number from 0".into())
}

fn probability(text: &str) -> Result<f64, String> {
    at_least_zero(text).ok().filter(|&p| p <= 1.0).ok_or_else(|| "expected a number from 0 to 1".into())
}

#[derive(Debug, Args)]
pub(super) struct Rank {
    #[command(flatten)]
    pub recipe: RecipeArguments,
    /// Checkpoint folder, or a run folder: its newest.
    #[arg(long, value_name = "DIR")]
    pub checkpoint: PathBuf,
    /// Where the sorted model goes, ranking.json beside it; a folder that is not there yet.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Training samples of the recipe's data to look at.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub samples: u32,
    /// Of these, samples that the model is run on without each of its layers in turn; 0: layers are not ranked.
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub layer_samples: u32,
    /// Prints the ranking as JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(super) struct Convert {
    /// What the source is.
    #[arg(long, value_name = "FORMAT")]
    pub from: Format,
    /// What the destination is to be.
    #[arg(long, value_name = "FORMAT")]
    pub to: Format,
    /// Checkpoint or run folder, Hugging Face folder, or folder with safetensors.
    #[arg(value_name = "SRC")]
    pub source: PathBuf,
    /// A folder that is not there yet.
    #[arg(value_name = "DST")]
    pub destination: PathBuf,
    /// Type of the written elements; a checkpoint's is always fp32.
    #[arg(long, value_name = "TYPE", default_value = "keep")]
    pub dtype: ElementType,
    /// Splits tensors over files of at most this size.
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = size)]
    pub max_shard_size: usize,
    /// Replaces a model that is at DST.
    #[arg(long)]
    pub force: bool,
    /// Recipe of the model, for --from megatron; default: SRC/recipe.yaml.
    #[arg(long, value_name = "RECIPE")]
    pub recipe: Option<PathBuf>,
    /// Module of the recipe, if it has several models.
    #[arg(long, value_name = "NAME")]
    pub module: Option<String>,
    /// Folder with the tokenizer's files, if they do not lie with the source.
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Sets a key of the provider's config, e.g. recompute=[moe]; may be given several times.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Leaves out a key of config.json that changes nothing; may be given several times.
    #[arg(long, value_name = "KEY")]
    pub ignore: Vec<String>,
    /// Plugin file or name whose model it is; default: all that are found.
    #[arg(long, value_name = "PLUGIN")]
    pub plugin: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Format {
    Hf,
    Gantry,
    Megatron,
}

impl From<Format> for crate::convert::Format {
    fn from(format: Format) -> Self {
        match format {
            Format::Hf => Self::HuggingFace,
            Format::Gantry => Self::Gantry,
            Format::Megatron => Self::Megatron,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum ElementType {
    Keep,
    Bf16,
    Fp32,
}

impl From<ElementType> for crate::convert::Wanted {
    fn from(ty: ElementType) -> Self {
        match ty {
            ElementType::Keep => Self::Keep,
            ElementType::Bf16 => Self::Bf16,
            ElementType::Fp32 => Self::F32,
        }
    }
}

/// Bytes, as `5GB`, `200MB` or `500000`; GiB, MiB and KiB are powers of 1024.
fn size(text: &str) -> Result<usize, String> {
    let wrong = || "expected a size such as 5GB, 200MB or 1GiB".to_string();
    let units = [
        ("GiB", 1u64 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
        ("GB", 1_000_000_000),
        ("MB", 1_000_000),
        ("KB", 1000),
    ];
    let (number, unit) =
        units.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit))).unwrap_or((text, 1));
    let bytes = number.trim().parse::<u64>().ok().and_then(|n| n.checked_mul(unit)).filter(|bytes| *bytes > 0);
    bytes.and_then(|bytes| usize::try_from(bytes).ok()).ok_or_else(wrong)
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("submodel").required(true).multiple(true).args(["budget", "width", "drop_layer"]))]
pub(super) struct Slice {
    /// Checkpoint folder, or a run folder: its newest.
    #[arg(long, value_name = "DIR")]
    pub checkpoint: PathBuf,
    /// Where the smaller model goes; a folder that is not there yet.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Asks the elastifier of the checkpoint's recipe for widths; --width and --drop-layer change them.
    #[arg(long, value_name = "B", value_parser = at_least_zero)]
    pub budget: Option<f64>,
    /// Units an axis keeps, e.g. ffn=512, or ffn@3=512 on layer 3 alone; may be given several times.
    #[arg(long, value_name = "AXIS[@LAYER]=N", value_parser = width)]
    pub width: Vec<Width>,
    /// A layer that goes, counted from 0; may be given several times.
    #[arg(long, value_name = "LAYER")]
    pub drop_layer: Vec<usize>,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

/// A value of `--width`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Width {
    pub axis: String,
    pub layer: Option<usize>,
    pub units: usize,
}

fn width(text: &str) -> Result<Width, String> {
    let wrong = || "expected AXIS=N or AXIS@LAYER=N, e.g. ffn=512".to_string();
    let (axis, units) = text.split_once('=').ok_or_else(wrong)?;
    let (axis, layer) = match axis.split_once('@') {
        None => (axis, None),
        Some((axis, layer)) => (axis, Some(layer.parse().map_err(|_| wrong())?)),
    };
    Ok(Width { axis: axis.into(), layer, units: units.parse().map_err(|_| wrong())? })
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
pub(super) struct Tokenize {
    /// As data.tokenizer takes it: bytes, a tokenizer.json, or a folder with one or with vocab.json and merges.txt.
    pub tokenizer: String,
    /// A file of text; - reads it from standard input.
    pub file: PathBuf,
    /// Each line of the file is JSON with a `text` of its own.
    #[arg(long)]
    pub jsonl: bool,
    /// Prints JSON, a line for each text: bytes, tokens, ids and pieces.
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

#[derive(Debug, Args)]
pub(super) struct Schema {
    /// Plugin files, or names of plugins to look for, whose configs are part of the schema.
    pub plugins: Vec<String>,
}

impl RecipeArguments {
    /// The recipe's file.
    pub fn file(&self) -> &std::path::Path {
        &self.recipe
    }

    /// With values that win over those of `--set`.
    pub fn and_set(mut self, assignments: impl IntoIterator<Item = String>) -> RecipeArguments {
        self.set.extend(assignments);
        self
    }

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

    /// Every command's help fits a screen and says what each argument is for.
    #[test]
    fn help_is_one_screen_and_complete() {
        let mut program = Arguments::command();
        let commands =
            std::iter::once(program.clone()).chain(program.get_subcommands_mut().map(|command| command.clone()));
        for mut command in commands {
            let help = command.render_help().to_string();
            assert!(help.lines().count() <= 40, "{help}");
            let silent =
                command.get_arguments().find(|argument| argument.get_help().is_none() && !argument.is_hide_set());
            assert!(silent.is_none(), "{} has an argument without help: {silent:?}", command.get_name());
            assert!(command.get_about().is_some(), "{}", command.get_name());
        }
    }

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
    #[case(&["gantry", "eval", "r.yaml"])]
    #[case(&["gantry", "eval", "--checkpoint", "c"])]
    #[case(&["gantry", "generate", "--checkpoint", "c"])]
    #[case(&["gantry", "convert", "--from", "hf", "a", "b"])]
    #[case(&["gantry", "convert", "--from", "hf", "--to", "onnx", "a", "b"])]
    #[case(&["gantry", "convert", "--from", "hf", "--to", "gantry", "a", "b", "--max-shard-size", "0"])]
    #[case(&["gantry", "convert", "--from", "hf", "--to", "gantry", "a", "b", "--max-shard-size", "big"])]
    #[case(&["gantry", "slice", "--checkpoint", "c", "--out", "d"])]
    #[case(&["gantry", "slice", "--checkpoint", "c", "--out", "d", "--width", "ffn"])]
    #[case(&["gantry", "slice", "--checkpoint", "c", "--out", "d", "--width", "ffn@x=3"])]
    #[case(&["gantry", "slice", "--checkpoint", "c", "--width", "ffn=3"])]
    #[case(&["gantry", "generate", "--checkpoint", "c", "--prompt", "a", "--top-k", "0"])]
    #[case(&["gantry", "generate", "--checkpoint", "c", "--prompt", "a", "--top-p", "1.5"])]
    #[case(&["gantry", "generate", "--checkpoint", "c", "--prompt", "a", "--temperature", "-1"])]
    #[case(&["gantry", "generate", "--checkpoint", "c", "--prompt", "a", "--temperature", "NaN"])]
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
