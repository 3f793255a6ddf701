//! The `config` section of a recipe. Names are Megatron's where Megatron has the setting.

use crate::pattern::LayerKind;
use gantry_plugin_api::ops::ScoreFn;
use gantry_plugin_api::schemars::{self, JsonSchema};
use gantry_plugin_api::sdk::{Error, Result};
use serde::Deserialize;

/// Sizes and options of a nemotron-hybrid model. Sizes of a kind of layer are needed only if the pattern has it.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// One symbol per layer: M Mamba-2, * attention, - MLP, E experts; | where a pipeline stage must begin.
    pub pattern: String,
    /// Channels of the residual stream.
    pub hidden_size: usize,
    pub vocab_size: usize,

    /// Query heads of attention layers.
    pub num_attention_heads: Option<usize>,
    /// Key/value heads; as many as query heads if left out.
    pub num_query_groups: Option<usize>,
    /// Channels of an attention head; hidden_size / num_attention_heads if left out.
    pub kv_channels: Option<usize>,
    #[serde(default)]
    pub position_embedding_type: PositionEmbedding,
    /// Base of the rotary frequencies.
    #[serde(default = "default::rotary_base")]
    pub rotary_base: f64,
    /// Part of a head's channels that rotary positions turn, more than 0 and at most 1.
    #[serde(default = "default::one")]
    pub rotary_percent: f64,

    /// Hidden channels of MLP layers.
    pub ffn_hidden_size: Option<usize>,
    /// Attention, MLPs and the shared expert have biases; Mamba layers and routed experts have none.
    #[serde(default)]
    pub add_bias_linear: bool,
    /// Function of MLPs and experts.
    #[serde(default)]
    pub activation: Activation,

    /// Heads of Mamba layers.
    pub mamba_num_heads: Option<usize>,
    /// Channels of a Mamba head.
    #[serde(default = "default::mamba_head_dim")]
    pub mamba_head_dim: usize,
    /// Groups of heads that share B and C, and the groups of the gated norm.
    #[serde(default = "default::mamba_num_groups")]
    pub mamba_num_groups: usize,
    /// Columns of a head's state.
    #[serde(default = "default::mamba_state_dim")]
    pub mamba_state_dim: usize,
    /// Taps of the convolution.
    #[serde(default = "default::mamba_conv_width")]
    pub mamba_conv_width: usize,
    /// Tokens of a chunk of the scan; results do not depend on it beyond rounding.
    #[serde(default = "default::mamba_chunk_size")]
    pub mamba_chunk_size: usize,
    /// Initial time steps are log-uniform between this and mamba_dt_max.
    #[serde(default = "default::mamba_dt_min")]
    pub mamba_dt_min: f64,
    #[serde(default = "default::mamba_dt_max")]
    pub mamba_dt_max: f64,
    /// Initial time steps are at least this.
    #[serde(default = "default::mamba_dt_init_floor")]
    pub mamba_dt_init_floor: f64,

    /// Time steps of the scan are at least this; 0, as in Megatron: no limit.
    #[serde(default)]
    pub mamba_dt_limit_min: f64,
    /// Added to the mean square in the gated norm; Megatron's is 1e-5 whatever layernorm_epsilon is.
    #[serde(default = "default::mamba_norm_epsilon")]
    pub mamba_norm_epsilon: f64,

    /// Experts of E layers.
    pub num_moe_experts: Option<usize>,
    /// Experts each token is sent to.
    #[serde(default = "default::moe_router_topk")]
    pub moe_router_topk: usize,
    /// Hidden channels of an expert.
    pub moe_ffn_hidden_size: Option<usize>,
    /// Hidden channels of the shared expert, which takes every token; none if left out.
    pub moe_shared_expert_intermediate_size: Option<usize>,
    #[serde(default)]
    pub moe_router_score_function: ScoreFunction,
    /// Factor on the routing probabilities.
    #[serde(default = "default::one")]
    pub moe_router_topk_scaling_factor: f64,
    /// Choose experts by score + bias, where the bias follows the load.
    #[serde(default)]
    pub moe_router_enable_expert_bias: bool,
    /// What the bias moves by per step, against the sign of the load's surplus.
    #[serde(default = "default::moe_router_bias_update_rate")]
    pub moe_router_bias_update_rate: f64,
    /// Coefficient of the loss that balances experts over the tokens of a micro-batch.
    #[serde(default)]
    pub moe_aux_loss_coeff: f64,
    /// Coefficient of the loss that balances experts over the tokens of each sequence.
    #[serde(default)]
    pub moe_seq_aux_loss_coeff: f64,
    /// Coefficient of the balancing loss against the load of the whole batch of the step before.
    #[serde(default)]
    pub moe_global_aux_loss_coeff: f64,
    /// Coefficient of the mean squared logsumexp of the router's logits.
    #[serde(default)]
    pub moe_z_loss_coeff: f64,
    /// Tokens an expert takes at most, as a multiple of the mean; no limit if left out.
    pub moe_expert_capacity_factor: Option<f64>,

    /// Added to the mean square in norms.
    #[serde(default = "default::layernorm_epsilon")]
    pub layernorm_epsilon: f64,
    /// Standard deviation of initial weights; output projections begin at this / sqrt(2 layers).
    #[serde(default = "default::init_method_std")]
    pub init_method_std: f64,
    /// The output layer uses the embedding's weight.
    #[serde(default)]
    pub share_embeddings_and_output_weights: bool,
    /// Kinds of layers whose activations are computed again in the backward pass instead of kept.
    #[serde(default)]
    pub recompute: Vec<LayerKind>,
}

/// How attention knows positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PositionEmbedding {
    #[default]
    None,
    Rope,
}

/// Function between the two projections of an MLP or expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// max(x, 0)^2
    #[default]
    SquaredRelu,
    /// GELU, tanh approximation
    Gelu,
    /// silu(gate) * up
    Swiglu,
}

/// How router logits become scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScoreFunction {
    #[default]
    Sigmoid,
    Softmax,
}

impl From<ScoreFunction> for ScoreFn {
    fn from(f: ScoreFunction) -> ScoreFn {
        match f {
            ScoreFunction::Sigmoid => ScoreFn::Sigmoid,
            ScoreFunction::Softmax => ScoreFn::Softmax,
        }
    }
}

mod default {
    pub fn one() -> f64 {
        1.0
    }
    pub fn rotary_base() -> f64 {
        10_000.0
    }
    pub fn mamba_head_dim() -> usize {
        64
    }
    pub fn mamba_num_groups() -> usize {
        8
    }
    pub fn mamba_state_dim() -> usize {
        128
    }
    pub fn mamba_conv_width() -> usize {
        4
    }
    pub fn mamba_chunk_size() -> usize {
        128
    }
    pub fn mamba_dt_min() -> f64 {
        1e-3
    }
    pub fn mamba_dt_max() -> f64 {
        0.1
    }
    pub fn mamba_dt_init_floor() -> f64 {
        1e-4
    }
    pub fn mamba_norm_epsilon() -> f64 {
        1e-5
    }
    pub fn moe_router_topk() -> usize {
        2
    }
    pub fn moe_router_bias_update_rate() -> f64 {
        1e-3
    }
    pub fn layernorm_epsilon() -> f64 {
        1e-5
    }
    pub fn init_method_std() -> f64 {
        0.02
    }
}

/// A size that layers of `kind` cannot do without.
pub fn needed(size: Option<usize>, key: &str, kind: LayerKind) -> Result<usize> {
    match size {
        Some(size) => positive(size, key),
        None => Err(Error::config(format!(
            "config.{key} is missing; the pattern has {:?} layers ({}), which need it",
            kind.symbol(),
            kind.name()
        ))),
    }
}

/// Largest size of anything: beyond every model, and small enough that products of two sizes are numbers.
const LARGEST: usize = 1 << 24;

/// An error unless the size is one.
pub fn positive(size: usize, key: &str) -> Result<usize> {
    if (1..=LARGEST).contains(&size) {
        return Ok(size);
    }
    Err(Error::config(format!("config.{key} is {size}; it must lie between 1 and {LARGEST}")))
}

/// An error if the size is more than the host's kernels take.
pub fn at_most(size: usize, key: &str, most: usize) -> Result<usize> {
    if size <= most {
        return Ok(size);
    }
    Err(Error::config(format!("config.{key} is {size}; it must be at most {most}")))
}

/// An error unless `parts` divides `whole`.
pub fn divides((part_key, parts): (&str, usize), (key, whole): (&str, usize)) -> Result<()> {
    if whole.is_multiple_of(parts) {
        return Ok(());
    }
    Err(Error::config(format!("config.{part_key} = {parts} does not divide {key} = {whole}; change one of them")))
}

/// An error unless the number is in the range.
pub fn within(value: f64, key: &str, range: std::ops::RangeInclusive<f64>) -> Result<f64> {
    if range.contains(&value) {
        return Ok(value);
    }
    let (low, high) = (*range.start(), *range.end());
    let low = if low == f64::MIN_POSITIVE { "more than 0".into() } else { format!("at least {low}") };
    let high = if high == f64::MAX { String::new() } else { format!(" and at most {high}") };
    Err(Error::config(format!("config.{key} is {value}; it must be {low}{high}")))
}
