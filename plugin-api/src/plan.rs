//! What a model declares about itself, once: axes, blocks, parameters, buffers, ports.
//!
//! From this declaration follow tensor-parallel slices, checkpoints, masks, physical slicing, importance permutation,
//! export and reports; nothing keeps a second list. A plan crosses the ABI as JSON, read leniently: a host ignores
//! fields it does not know and fills in defaults for fields an older provider does not write.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The whole declaration of a model, independent of any parallel layout.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelPlan {
    pub axes: Vec<Axis>,
    /// In execution order. The host cuts this list into pipeline stages.
    pub blocks: Vec<Block>,
    pub params: Vec<Param>,
    pub buffers: Vec<Buffer>,
    pub ports: Vec<Port>,
}

/// A named family of units (heads, channels, experts) that dimensions are made of.
///
/// Units are *stored* in elastic order: with a `group` axis of size G, stored unit `i` belongs to group `i % G`
/// (rank-in-group-major), so the first n units are the first n/G of every group. *Logical* order, in checkpoints and
/// exports, is group-major: unit `h` belongs to group `h / (size / G)`. Over `shard` ranks units go cyclically: stored
/// unit `i` lives on rank `i % ranks`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Axis {
    pub name: String,
    pub size: usize,
    /// The axis whose units group this one's, e.g. `kv_groups` for `attention_heads`.
    #[serde(default)]
    pub group: Option<String>,
    /// Which mesh dimension the units are spread over.
    #[serde(default)]
    pub shard: Option<Shard>,
    /// Whether an elastifier may change its width.
    #[serde(default)]
    pub elastic: bool,
    /// Whether its width may differ from layer to layer (the residual stream's may not).
    #[serde(default)]
    pub per_layer: bool,
    /// How many of its units one token passes through (the experts that a router chooses), if not all.
    #[serde(default)]
    pub active: Option<usize>,
}

/// A mesh dimension that units of an axis are spread over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Shard {
    Tp,
    Ep,
}

/// A piece of the model that stays on one pipeline stage and can be skipped as a whole if it has a `layer`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Block {
    /// Module path, e.g. `decoder.layers.3`.
    pub path: String,
    /// Kind for reports, e.g. `mamba`, `attention`, `embedding`.
    pub kind: String,
    /// Layer number from 0, for blocks on the residual stream.
    #[serde(default)]
    pub layer: Option<usize>,
    /// A pipeline stage must begin here.
    #[serde(default)]
    pub starts_stage: bool,
    /// Forward floating-point operations per token at full width, without the parameters' own 2 per weight
    /// (attention scores, scans), to balance stages.
    #[serde(default)]
    pub extra_flops_per_token: f64,
    /// What the block keeps in memory while it generates text, beside its parameters.
    #[serde(default)]
    pub memory: Vec<Footprint>,
}

/// Memory that a block needs at inference: elements as the product of dimensions.
///
/// A leading dimension over an axis with [`Axis::active`] counts those units only.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Footprint {
    pub kind: FootprintKind,
    pub dims: Vec<Layout>,
}

/// For what a [`Footprint`] is there once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FootprintKind {
    /// For each token of the context (keys and values).
    PerToken,
    /// For each sequence (the state of a scan, the last inputs of a convolution).
    PerSequence,
    /// For each token that is computed at once, while the block is at work; blocks share this memory.
    Buffer,
}

/// Structure of one dimension, in logical order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// `size` positions with no axis (kernel taps, a plain count).
    Fixed(usize),
    /// All units of an axis, each `unit` positions wide. Inside `Repeat` over the axis's group: the group's units only.
    Axis { axis: String, unit: usize },
    /// Named parts one after the other, e.g. z, x, B, C, dt.
    Seq(Vec<(String, Layout)>),
    /// `inner` once per unit of an axis, e.g. q.. k v per KV group.
    Repeat { axis: String, inner: Box<Layout> },
}

impl Layout {
    pub fn axis(axis: &str, unit: usize) -> Layout {
        Layout::Axis { axis: axis.into(), unit }
    }

    pub fn seq<'a>(parts: impl IntoIterator<Item = (&'a str, Layout)>) -> Layout {
        Layout::Seq(parts.into_iter().map(|(name, layout)| (name.into(), layout)).collect())
    }

    pub fn repeat(axis: &str, inner: Layout) -> Layout {
        Layout::Repeat { axis: axis.into(), inner: Box::new(inner) }
    }
}

/// A trained tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Param {
    /// Full name, Megatron's where Megatron has the tensor. `{axis}` in it means that checkpoints hold one tensor per
    /// unit of the leading dimension's axis, e.g. `...experts.linear_fc1.weight{experts}`.
    pub name: String,
    /// Index into [`ModelPlan::blocks`].
    pub block: usize,
    /// Dimensions, outermost first; a linear weight is [out, in].
    pub dims: Vec<Layout>,
    pub init: Init,
    /// Whether weight decay applies.
    #[serde(default = "yes")]
    pub decay: bool,
    #[serde(default = "one")]
    pub lr_mult: f64,
    /// Kept in fp32 whatever the training precision (A_log, D, dt_bias).
    #[serde(default)]
    pub fp32: bool,
    /// Parameters with the same key are one tensor, e.g. tied embeddings.
    #[serde(default)]
    pub tie: Option<String>,
    /// Shape in checkpoints where it has extra unit dimensions, e.g. conv1d weights [channels, 1, width].
    #[serde(default)]
    pub export_shape: Option<Vec<usize>>,
    /// Name in Hugging Face folders, if it differs; `{axis}` as in `name`. `{part}` means that each named part of the
    /// leading dimension is a tensor there, all units of a repetition one after the other, e.g. `mixer.{part}_proj.weight`.
    #[serde(default)]
    pub hf_name: Option<String>,
}

fn yes() -> bool {
    true
}

fn one() -> f64 {
    1.0
}

/// How a parameter or buffer begins. Random numbers are keyed by (seed, name, logical element index).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Init {
    Zeros,
    Ones,
    Constant(f64),
    Normal {
        std: f64,
    },
    Uniform {
        low: f64,
        high: f64,
    },
    /// ln of a uniform number: Mamba's A_log.
    LogUniform {
        low: f64,
        high: f64,
    },
    /// softplus^-1(dt), dt log-uniform in [low, high] and at least `floor`: Mamba's dt_bias.
    InverseSoftplus {
        low: f64,
        high: f64,
        floor: f64,
    },
}

/// State without a gradient, e.g. the expert bias of a router.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Buffer {
    pub name: String,
    pub block: usize,
    pub dims: Vec<Layout>,
    pub init: Init,
    /// What the host does with it once per optimizer step.
    #[serde(default)]
    pub update: BufferUpdate,
    /// Name in Hugging Face folders, if it differs.
    #[serde(default)]
    pub hf_name: Option<String>,
}

/// Update of a buffer after each optimizer step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BufferUpdate {
    #[default]
    None,
    /// bias += rate * sign(mean load - load), loads summed over all micro-batches and data-parallel ranks.
    ExpertBias { rate: f64 },
    /// Each expert's share of the step's load, summed as for `ExpertBias`.
    LoadShare,
}

/// An input or output of the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Port {
    pub name: String,
    pub direction: Direction,
    pub kind: PortKind,
    /// Channel dimension, where it has one.
    #[serde(default)]
    pub channels: Option<Layout>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    Input,
    Output,
}

/// What a port carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PortKind {
    /// Token ids, i32 [tokens].
    TokenIds,
    /// Sequence boundaries, i32 [sequences + 1].
    CuSeqlens,
    /// Activations, real [tokens, channels].
    Activation,
    /// The lazy pair (hidden [tokens, hidden], output weight [vocab, hidden]); the host computes logits and losses.
    LanguageModel,
}

/// A provider as `describe` lists it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProviderInfo {
    pub name: String,
    pub kind: ProviderKind,
    pub summary: String,
    /// JSON schema of the provider's `config`.
    #[serde(default)]
    pub config_schema: serde_json::Value,
    /// The Hugging Face folders it reads and writes, if any.
    #[serde(default)]
    pub hugging_face: Option<FolderKind>,
}

/// Which Hugging Face folders are a provider's: what their `config.json` says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FolderKind {
    pub model_type: String,
    /// Those that may be read; the first is written.
    pub architectures: Vec<String>,
}

/// What a provider makes of a `config.json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FolderImport {
    /// The provider's config.
    pub config: serde_json::Map<String, serde_json::Value>,
    /// Keys that change nothing of what the model computes, as they were: kept for an export.
    pub carried: serde_json::Map<String, serde_json::Value>,
    /// What a user should know, a sentence each.
    pub notes: Vec<String>,
}

/// What a provider's config becomes in a Hugging Face folder.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FolderExport {
    /// `config.json` without what the host knows itself: model type, architectures, element type, token ids.
    pub config: serde_json::Map<String, serde_json::Value>,
    /// Tensors that such folders hold and that are the same in all models of this config.
    pub constants: Vec<FolderConstant>,
    /// What a user should know, a sentence each.
    pub notes: Vec<String>,
}

/// A tensor of one repeated value in a Hugging Face folder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FolderConstant {
    pub name: String,
    pub shape: Vec<usize>,
    pub value: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ProviderKind {
    Model,
    Elastifier,
    Hooks,
    /// A custom operator; `config` is its attributes.
    Operator,
}

/// Part of a model that one pipeline stage chunk builds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    /// First block, index into [`ModelPlan::blocks`].
    pub begin: usize,
    /// One past the last block.
    pub end: usize,
}

/// The state an elastifier gives one axis for one micro-batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum AxisState {
    Full,
    /// Mixture of prefixes: mask m = sum_c p_c [unit < choice_c]. `choices` largest first; `p` sums to 1.
    Soft {
        choices: Vec<usize>,
        p: Vec<f64>,
    },
    /// The first `n` units, masked in the full-size computation; the mask is multiplied by `gain`.
    Hard {
        n: usize,
        gain: f64,
    },
    /// The first `n` units, computed at their real size.
    Slice {
        n: usize,
    },
}

/// State of one axis, on one layer or on all. On the axis `depth`, whose unit is the layer itself, `Hard`/`Slice` with
/// `n` = 0 skips the layer, and `Soft` with choices [1, 0] multiplies its residual branch by p[0].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct AxisSetting {
    pub axis: String,
    #[serde(default)]
    pub layer: Option<usize>,
    pub state: AxisState,
}

/// A smaller model inside a model: how many units its axes keep, the first in elastic order, and which layers go.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Submodel {
    /// Units of axes that are narrowed, on every layer alike.
    pub widths: BTreeMap<String, usize>,
    /// Units by layer, of axes that do not keep the same number on all layers that remain.
    pub layer_widths: BTreeMap<String, BTreeMap<usize, usize>>,
    /// In ascending order.
    pub dropped_layers: Vec<usize>,
}

impl Submodel {
    /// Units that `axis` keeps of `full`, for a config that has one number for all layers.
    pub fn width(&self, axis: &str, full: usize) -> crate::sdk::Result<usize> {
        if let Some(layers) = self.layer_widths.get(axis) {
            let some: Vec<String> = layers.iter().take(4).map(|(layer, n)| format!("{n} on layer {layer}")).collect();
            return Err(crate::sdk::Error::config(format!(
                "axis {axis} keeps {}, but a config of this model has one width for all layers",
                some.join(", ")
            )));
        }
        Ok(self.widths.get(axis).copied().unwrap_or(full))
    }

    /// Whether a layer remains.
    pub fn keeps_layer(&self, layer: usize) -> bool {
        !self.dropped_layers.contains(&layer)
    }
}

/// What an elastifier wants of a target model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ElasticPlan {
    /// Which axes are masked at which role; `None`: every activation once, where it is produced (exact masking).
    pub roles: Option<Vec<RoleMask>>,
    /// A small model that is trained with the target and decides the states: its parameters, and ports for its inputs and
    /// outputs. It is the same on every rank, sees one row of each input, and has no axes that are spread or elastic. With
    /// it, the host runs what [`Elastifier::forward`](crate::sdk::Elastifier::forward) records and asks
    /// [`Elastifier::choose`](crate::sdk::Elastifier::choose).
    pub router: Option<ModelPlan>,
    /// Every [`Choice::label`] there may be.
    pub labels: Vec<String>,
}

/// For what an elastifier's router runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Occasion {
    /// A micro-batch of training.
    MicroBatch(MicroBatchInfo),
    /// Widths to evaluate or to cut: nothing random.
    Budget(f64),
}

/// Numbers by name: inputs or outputs of a router.
pub type Values = BTreeMap<String, Vec<f64>>;

/// What an elastifier makes of its router's outputs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Choice {
    pub settings: Vec<AxisSetting>,
    /// Which outputs the numbers of the settings are made of; gradients flow along them, and only along them.
    pub sources: Vec<Source>,
    /// Loss per token that is added to the model's.
    pub loss: Option<ChoiceLoss>,
    /// Under which of [`ElasticPlan::labels`] the micro-batch is reported.
    pub label: Option<String>,
    /// Parameters of the model that was chosen, reported with the label.
    pub params: Option<f64>,
    /// Further numbers of the step's metrics: means over its micro-batches.
    pub metrics: BTreeMap<String, f64>,
}

/// Number `entry` of a setting (of a mixture's weights; 0 of a gain) grows as output number `index` does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Source {
    /// Index into [`Choice::settings`].
    pub setting: usize,
    pub output: String,
    /// Pairs of (entry, index).
    pub entries: Vec<(usize, usize)>,
}

/// A loss of a router's outputs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChoiceLoss {
    /// Its name in metrics.
    pub name: String,
    pub value: f64,
    /// Its derivative by each output that it depends on.
    pub gradients: Values,
}

/// At `role`, mask the listed axes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoleMask {
    pub role: crate::ops::Role,
    pub axes: Vec<String>,
}

/// What an elastifier knows of the micro-batch it sets states for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MicroBatchInfo {
    pub step: u64,
    /// Index within the step over all data-parallel ranks.
    pub micro_batch: u64,
    /// Global index of the first sample.
    pub first_sample: u64,
    pub samples: u64,
    pub training: bool,
    /// Steps of the whole run; 0 where there is no run.
    #[serde(default)]
    pub steps: u64,
    /// Micro-batches of a step over all data-parallel ranks.
    #[serde(default)]
    pub micro_batches: u64,
    /// Seed of the run.
    #[serde(default)]
    pub seed: u64,
}

impl MicroBatchInfo {
    /// A micro-batch of a run nothing more is known of.
    pub fn new(step: u64, micro_batch: u64, first_sample: u64, samples: u64, training: bool) -> MicroBatchInfo {
        MicroBatchInfo { step, micro_batch, first_sample, samples, training, steps: 0, micro_batches: 0, seed: 0 }
    }
}
