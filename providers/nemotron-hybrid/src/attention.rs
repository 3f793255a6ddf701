//! `*`: grouped-query attention, causal within each sequence; no positions unless rotary ones are asked for.

use crate::config::{Config, PositionEmbedding, divides, needed, positive, within};
use crate::declare::{BlockDeclaration, Linear, hidden};
use crate::pattern::LayerKind;
use gantry_plugin_api::ops::{self, Role, Rope};
use gantry_plugin_api::plan::{Axis, Block, FootprintKind, Layout};
use gantry_plugin_api::sdk::{Cx, Error, ParamId, Result, Tensor};

/// Channels of a head that the host's attention takes.
const MAX_HEAD_DIM: usize = 256;

/// Sizes of attention layers.
#[derive(Clone, Debug)]
pub struct Sizes {
    pub heads: usize,
    pub groups: usize,
    pub head_dim: usize,
    rope: Option<Rope>,
}

impl Sizes {
    pub fn new(config: &Config) -> Result<Sizes> {
        let heads = needed(config.num_attention_heads, "num_attention_heads", LayerKind::Attention)?;
        let groups = positive(config.num_query_groups.unwrap_or(heads), "num_query_groups")?;
        divides(("num_query_groups", groups), ("num_attention_heads", heads))?;
        if config.kv_channels.is_none() && !config.hidden_size.is_multiple_of(heads) {
            return Err(Error::config(format!(
                "config.num_attention_heads = {heads} does not divide hidden_size = {}; \
                 set kv_channels, the channels of a head",
                config.hidden_size
            )));
        }
        let head_dim = positive(config.kv_channels.unwrap_or(config.hidden_size / heads), "kv_channels")?;
        if head_dim > MAX_HEAD_DIM {
            let from = match config.kv_channels {
                Some(_) => String::new(),
                None => format!(" (hidden_size = {} / num_attention_heads = {heads})", config.hidden_size),
            };
            return Err(Error::config(format!(
                "config.kv_channels is {head_dim}{from}; attention takes heads of at most {MAX_HEAD_DIM} channels"
            )));
        }
        let rope = match config.position_embedding_type {
            PositionEmbedding::None => None,
            PositionEmbedding::Rope => Some(rope(config, head_dim)?),
        };
        Ok(Sizes { heads, groups, head_dim, rope })
    }

    pub fn axes(&self) -> [Axis; 2] {
        [
            Axis::new("kv_groups", self.groups).tensor_parallel(),
            Axis::new("attention_heads", self.heads).grouped_by("kv_groups").tensor_parallel().elastic_per_layer(),
        ]
    }

    /// Keys and values of the tokens so far.
    pub fn block(&self, block: Block) -> Block {
        let head = || Layout::Fixed(self.head_dim);
        let kv = Layout::repeat("kv_groups", Layout::seq([("k", head()), ("v", head())]));
        block.keeps(FootprintKind::PerToken, [kv])
    }

    pub fn declare(&self, b: &mut BlockDeclaration<'_>) -> Attention {
        let queries = || Layout::axis("attention_heads", self.head_dim);
        let head = || Layout::Fixed(self.head_dim);
        let qkv = Layout::repeat("kv_groups", Layout::seq([("q", queries()), ("k", head()), ("v", head())]));
        let (normal, scaled) = (b.normal(), b.scaled());
        Attention {
            norm: b.norm("self_attention.linear_qkv.layer_norm_weight", "norm.weight"),
            qkv: b.linear("self_attention.linear_qkv", "mixer.{part}_proj", [qkv, hidden()], normal),
            proj: b.linear("self_attention.linear_proj", "mixer.o_proj", [hidden(), queries()], scaled),
            rope: self.rope.clone(),
        }
    }
}

fn rope(config: &Config, head_dim: usize) -> Result<Rope> {
    let percent = within(config.rotary_percent, "rotary_percent", f64::MIN_POSITIVE..=1.0)?;
    let turned = (head_dim as f64 * percent) as usize;
    if turned == 0 || !turned.is_multiple_of(2) {
        return Err(Error::config(format!(
            "config.rotary_percent = {percent} of a head's {head_dim} channels are {turned}; rotary positions turn \
             pairs of channels, so choose a part that is even"
        )));
    }
    let theta = within(config.rotary_base, "rotary_base", f64::MIN_POSITIVE..=f64::MAX)?;
    Ok(Rope { theta, rotary_dim: turned as u64, ..Rope::default() })
}

/// Parameters of an attention layer.
#[derive(Clone, Debug)]
pub struct Attention {
    norm: ParamId,
    qkv: Linear,
    proj: Linear,
    rope: Option<Rope>,
}

impl Attention {
    /// What the layer adds to the residual stream: x [tokens, hidden] to [tokens, hidden].
    pub fn forward(&self, cx: &Cx, x: Tensor, eps: f64) -> Result<Tensor> {
        let h = cx.rms_norm("self_attention.linear_qkv.norm", x, self.norm, eps)?;
        let qkv = self.qkv.apply(cx, "self_attention.linear_qkv", h)?;
        let mut qkv = cx.role(Role::AttentionProjection, qkv)?;
        if let Some(rope) = &self.rope {
            qkv = cx.rope("self_attention.rope", qkv, rope.clone())?;
        }
        let heads = cx.attention("self_attention.core_attention", qkv, ops::Attention::default())?;
        self.proj.apply(cx, "self_attention.linear_proj", cx.role(Role::MixerCore, heads)?)
    }
}
