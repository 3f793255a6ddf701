//! The typed recipe. Defaults live in `defaults.yaml`; meanings of the keys too.
//!
//! Fields are visible in the crate only and nothing here is serialised, so that the compiler's dead-code lint finds a
//! key nobody reads.

use super::megatron::Megatron;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// A whole recipe, merged, validated, immutable.
#[derive(Clone, Debug, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    pub(crate) name: String,
    pub(crate) plugins: Vec<PluginFile>,
    pub(crate) run: Run,
    pub(crate) device: Device,
    pub(crate) modules: BTreeMap<String, Module>,
    pub(crate) data: Data,
    pub(crate) train: Train,
    pub(crate) optimizer: Optimizer,
    pub(crate) schedule: Schedule,
    pub(crate) checkpoint: Checkpoint,
    pub(crate) log: Log,
    /// The text of `recipe.resolved.yaml`; not a key.
    #[serde(skip)]
    pub(super) resolved: String,
    /// Who wrote which key; not a key.
    #[serde(skip)]
    pub(super) places: super::place::Places,
}

/// An entry of `plugins`: a path, or `{path, sha256}`.
#[derive(Clone, Debug, PartialEq)]
pub struct PluginFile {
    pub(crate) path: PathBuf,
    /// Hash the file must have, 64 hexadecimal digits.
    pub(crate) sha256: Option<String>,
}

#[derive(Clone, Debug, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Run {
    pub(crate) dir: Option<PathBuf>,
}

/// What the arithmetic runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    Cpu,
}

/// An entry of `modules`.
#[derive(Clone, Debug, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Module {
    pub(crate) provider: String,
    /// The provider's own configuration, checked by the provider.
    pub(crate) config: serde_json::Map<String, serde_json::Value>,
    pub(crate) grid: Grid,
    pub(crate) freeze: bool,
    pub(crate) load: Option<PathBuf>,
    pub(crate) elastify: Option<Elastify>,
    pub(crate) teacher: Option<Teacher>,
}

/// A frozen model that a module learns from.
#[derive(Clone, Debug, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Teacher {
    /// A checkpoint, a run folder (its newest) or its checkpoints/best.
    pub(crate) load: PathBuf,
    /// `None`: the module's provider.
    #[serde(default)]
    pub(crate) provider: Option<String>,
    /// `None`: the module's config.
    #[serde(default)]
    pub(crate) config: Option<serde_json::Map<String, serde_json::Value>>,
    /// Which way round the KL divergence is.
    #[serde(default)]
    pub(crate) divergence: DivergenceKind,
    /// Logits of both models are divided by it.
    #[serde(default = "one")]
    pub(crate) temperature: f64,
    /// Factor of the divergence in the objective.
    #[serde(default = "one")]
    pub(crate) kd_loss_scale: f64,
    /// The cross entropy is reported and not minimised.
    #[serde(default = "yes")]
    pub(crate) skip_lm_loss: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum DivergenceKind {
    /// KL(teacher || student).
    #[default]
    Forward,
    /// KL(student || teacher).
    Reverse,
}

fn one() -> f64 {
    1.0
}

fn yes() -> bool {
    true
}

/// A module's process grid. Base view (tp, cp, dp, pp) with tp fastest; expert view (etp, ep, rest, pp).
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Grid {
    pub(crate) tp: usize,
    pub(crate) cp: usize,
    /// `None`: all ranks that are left.
    pub(crate) dp: Option<usize>,
    pub(crate) pp: usize,
    pub(crate) ep: usize,
    /// `None`: tp.
    pub(crate) etp: Option<usize>,
    pub(crate) offset: usize,
    pub(crate) sequence_parallel: bool,
}

#[derive(Clone, Debug, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Elastify {
    pub(crate) provider: String,
    #[serde(default)]
    pub(crate) config: serde_json::Map<String, serde_json::Value>,
}

#[derive(Clone, Debug, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Data {
    pub(crate) paths: Vec<PathBuf>,
    /// `None`: those of the format.
    pub(crate) extensions: Option<Vec<String>>,
    pub(crate) exclude: Vec<String>,
    pub(crate) tracked_only: bool,
    pub(crate) valid_fraction: f64,
    pub(crate) valid_paths: Vec<PathBuf>,
    pub(crate) ngram_order: usize,
    pub(crate) tokenizer: TokenizerSpec,
    /// Special tokens by name: their contents.
    pub(crate) special_tokens: BTreeMap<String, String>,
    pub(crate) format: Format,
    pub(crate) text_key: String,
    pub(crate) chat: Chat,
    pub(crate) packing: Packing,
    pub(crate) too_long: TooLong,
    pub(crate) reset_at_document_boundaries: bool,
    pub(crate) prefetch: usize,
    pub(crate) synthetic: Option<Synthetic>,
    pub(crate) megatron: Megatron,
}

/// What the files of `data.paths` hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// A file is a document.
    Text,
    /// A line is a JSON object with a document's text.
    Jsonl,
    /// A line is a JSON object with a conversation.
    Chat,
}

/// How conversations become tokens.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Chat {
    /// `None`: the tokenizer's; else a file, or `chatml`.
    pub(crate) template: Option<String>,
    pub(crate) train_on: TrainOn,
}

/// Which tokens of a conversation are learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TrainOn {
    /// All turns of the assistant.
    Assistant,
    /// The last turn of the assistant.
    Completion,
    All,
}

/// How documents become samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// Laid end to end and cut.
    Concat,
    /// Whole, each a sequence of its own.
    BestFit,
}

/// What becomes of a document that is longer than a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TooLong {
    Split,
    Drop,
}

impl Data {
    /// Extensions of files that are taken from folders and globs.
    pub(crate) fn extensions(&self) -> Vec<String> {
        let of_format: &[&str] = match self.format {
            Format::Text => &["txt", "md"],
            Format::Jsonl | Format::Chat => &["jsonl"],
        };
        self.extensions.clone().unwrap_or_else(|| of_format.iter().map(|name| name.to_string()).collect())
    }
}

/// What turns text into tokens: `bytes`, a path, or `{vocab, merges}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerSpec {
    Bytes,
    /// A `tokenizer.json`, or a folder with one or with `vocab.json` and `merges.txt`.
    Path(PathBuf),
    /// GPT-2's files.
    Pair {
        vocab: PathBuf,
        merges: PathBuf,
    },
}

/// A made-up corpus for tests and benchmarks.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Synthetic {
    #[serde(default)]
    pub(crate) task: Task,
    /// Number of different tokens; the last one ends documents.
    pub(crate) vocab: usize,
    /// Mean tokens per document.
    pub(crate) document_length: usize,
    /// Tokens in all.
    pub(crate) tokens: usize,
}

/// What there is to learn in a made-up corpus; `data/synthetic.rs` describes each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    Uniform,
    #[default]
    Markov,
    Copy,
    Induction,
}

#[derive(Clone, Debug, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Train {
    pub(crate) steps: u64,
    pub(crate) seq_length: usize,
    pub(crate) micro_batch_size: usize,
    pub(crate) global_batch_size: usize,
    pub(crate) precision: Precision,
    pub(crate) seed: u64,
    pub(crate) log_every: u64,
    pub(crate) on_nonfinite: OnNonfinite,
    pub(crate) max_skipped_steps: u64,
    pub(crate) spike_factor: Option<f64>,
    pub(crate) spike_window: usize,
    pub(crate) eval_every: u64,
    /// `None`: all.
    pub(crate) eval_samples: Option<usize>,
    pub(crate) sample: Option<Sample>,
}

/// Text written at the end of a run.
#[derive(Clone, Debug, PartialEq, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Sample {
    pub(crate) prompt: String,
    /// Most tokens written.
    pub(crate) tokens: usize,
    /// 0: always the likeliest token.
    pub(crate) temperature: f64,
}

/// What to do with a step whose numbers are not finite or whose loss is a spike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnNonfinite {
    Stop,
    Skip,
}

/// Arithmetic of forward and backward; parameters and optimizer state are at least fp32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    Fp32,
    Fp64,
    Bf16,
}

#[derive(Clone, Debug, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Optimizer {
    pub(crate) kind: OptimizerKind,
    pub(crate) lr: f64,
    pub(crate) min_lr: f64,
    #[serde(deserialize_with = "pair")]
    #[schemars(with = "[f64; 2]")]
    pub(crate) betas: [f64; 2],
    pub(crate) eps: f64,
    pub(crate) weight_decay: f64,
    pub(crate) clip_grad: f64,
    pub(crate) multipliers: Vec<Multiplier>,
}

/// Two numbers and no more: an array by itself takes the first two of a longer list.
fn pair<'de, D: serde::Deserializer<'de>>(from: D) -> Result<[f64; 2], D::Error> {
    let list = <Vec<f64> as serde::Deserialize>::deserialize(from)?;
    list.try_into().map_err(|list: Vec<f64>| serde::de::Error::invalid_length(list.len(), &"an array of length 2"))
}

/// An entry of `optimizer.multipliers`.
#[derive(Clone, Debug, PartialEq, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Multiplier {
    /// Glob over parameter names.
    #[serde(rename = "match")]
    pub(crate) pattern: String,
    /// Multiplies the learning rate.
    #[serde(default)]
    pub(crate) lr: Option<f64>,
    /// Multiplies the weight decay.
    #[serde(default)]
    pub(crate) weight_decay: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerKind {
    Adamw,
    Adam,
}

#[derive(Clone, Debug, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Schedule {
    pub(crate) kind: ScheduleKind,
    pub(crate) warmup_steps: u64,
    pub(crate) init_lr: f64,
    pub(crate) decay_steps: Option<u64>,
    pub(crate) wsd_decay_steps: Option<u64>,
    pub(crate) wsd_decay: WsdDecay,
    pub(crate) weight_decay_kind: WeightDecayKind,
    pub(crate) weight_decay_start: Option<f64>,
    pub(crate) weight_decay_end: Option<f64>,
    pub(crate) weight_decay_steps: Option<u64>,
}

/// Shape of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    Constant,
    Linear,
    Cosine,
    InverseSquareRoot,
    /// Warm-up, stable, decay.
    Wsd,
}

/// Shape of the last phase of warm-up-stable-decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WsdDecay {
    Linear,
    Cosine,
    Exponential,
    MinusSqrt,
}

/// Shape of the weight decay over the steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WeightDecayKind {
    Constant,
    Linear,
    Cosine,
}

#[derive(Clone, Debug, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Checkpoint {
    pub(crate) every: u64,
    /// `async`: the loop goes on while a checkpoint is written.
    #[serde(rename = "async")]
    pub(crate) beside: bool,
    pub(crate) keep_last: usize,
    pub(crate) keep_every: Option<u64>,
    pub(crate) keep_best: bool,
}

#[derive(Clone, Debug, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Log {
    pub(crate) level: LogLevel,
    pub(crate) tensorboard: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl TokenizerSpec {
    /// From a word of a command line or a recipe: `bytes`, or a path.
    pub fn of(text: &str) -> TokenizerSpec {
        if text == "bytes" { TokenizerSpec::Bytes } else { TokenizerSpec::Path(text.into()) }
    }

    /// The paths in it.
    pub(crate) fn paths(&mut self) -> Vec<&mut PathBuf> {
        match self {
            TokenizerSpec::Bytes => Vec::new(),
            TokenizerSpec::Path(path) => vec![path],
            TokenizerSpec::Pair { vocab, merges } => vec![vocab, merges],
        }
    }

    /// As a recipe writes it.
    pub(crate) fn to_value(&self) -> serde_json::Value {
        match self {
            TokenizerSpec::Bytes => "bytes".into(),
            TokenizerSpec::Path(path) => path.display().to_string().into(),
            TokenizerSpec::Pair { vocab, merges } => serde_json::json!({
                "vocab": vocab.display().to_string(),
                "merges": merges.display().to_string(),
            }),
        }
    }
}

impl schemars::JsonSchema for TokenizerSpec {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "TokenizerSpec".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "anyOf": [
                {"type": "string", "description": "bytes, a tokenizer.json, or a folder with one"},
                {
                    "type": "object",
                    "properties": {"vocab": {"type": "string"}, "merges": {"type": "string"}},
                    "required": ["vocab", "merges"],
                    "additionalProperties": false
                }
            ]
        })
    }
}

impl<'de> Deserialize<'de> for TokenizerSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        impl<'de> Visitor<'de> for Either {
            type Value = TokenizerSpec;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes, a path or {vocab, merges}")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<TokenizerSpec, E> {
                Ok(TokenizerSpec::of(text))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TokenizerSpec, A::Error> {
                let (mut vocab, mut merges) = (None, None);
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        "vocab" => vocab = Some(map.next_value::<PathBuf>()?),
                        "merges" => merges = Some(map.next_value::<PathBuf>()?),
                        other => return Err(A::Error::unknown_field(other, &["vocab", "merges"])),
                    }
                }
                Ok(TokenizerSpec::Pair {
                    vocab: vocab.ok_or_else(|| A::Error::missing_field("vocab"))?,
                    merges: merges.ok_or_else(|| A::Error::missing_field("merges"))?,
                })
            }
        }

        deserializer.deserialize_any(Either)
    }
}

impl schemars::JsonSchema for PluginFile {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "PluginFile".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "anyOf": [
                {"type": "string", "description": "a file or folder"},
                {
                    "type": "object",
                    "properties": {
                        "path": {"type": "string"},
                        "sha256": {
                            "type": ["string", "null"],
                            "pattern": "^[0-9a-fA-F]{64}$",
                            "description": "hash the file must have"
                        }
                    },
                    "required": ["path"],
                    "additionalProperties": false
                }
            ]
        })
    }
}

impl<'de> Deserialize<'de> for PluginFile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        impl<'de> Visitor<'de> for Either {
            type Value = PluginFile;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a path or {path, sha256}")
            }

            fn visit_str<E: serde::de::Error>(self, path: &str) -> Result<PluginFile, E> {
                Ok(PluginFile { path: path.into(), sha256: None })
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<PluginFile, A::Error> {
                let (mut path, mut sha256) = (None, None);
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        "path" => path = Some(map.next_value::<PathBuf>()?),
                        "sha256" => sha256 = map.next_value::<Option<String>>()?,
                        other => return Err(A::Error::unknown_field(other, &["path", "sha256"])),
                    }
                }
                Ok(PluginFile { path: path.ok_or_else(|| A::Error::missing_field("path"))?, sha256 })
            }
        }

        deserializer.deserialize_any(Either)
    }
}
