//! `dense-gpt`: a Llama-like decoder, the smallest complete provider. Read it from top to bottom.
//!
//! Each layer adds two branches to the residual stream x [tokens, hidden]:
//!
//! ```text
//! x = x + attention(RMSNorm(x))     rotary positions, H query heads over G <= H key/value heads
//! x = x + mlp(RMSNorm(x))           fc2(silu(gate) * up), [gate | up] = fc1
//! ```
//!
//! Tokens are flat: sequences lie back to back and the host knows their boundaries, so there is no batch dimension. The
//! host also owns what is not in this file: parallel layouts, the backward pass, the loss, the optimizer, checkpoints.

use gantry_plugin_api::ops::{self, Attention, Role, Rope};
use gantry_plugin_api::plan::{
    Axis, Block, FootprintKind, Init, Layout, ModelPlan, Param, Port, PortKind, Stage, Submodel,
};
use gantry_plugin_api::schemars::{self, JsonSchema};
use gantry_plugin_api::sdk::{Configure, Cx, Error, Module, ParamId, Provider, Result, Tensor};
use serde::Deserialize;
use serde_json::{Map, Value};

// 1. What the library offers: its name, its models, and the host operators without which it cannot run.
gantry_plugin_api::export_plugin! {
    name: "dense-gpt",
    models: { "dense-gpt" => DenseGpt },
    operators: [ops::Embedding, ops::Linear, ops::RmsNorm, ops::Rope, ops::Attention, ops::SwiGlu, ops::Add],
}

// 2. The `config` section of a recipe. Names are Megatron's; doc comments become the descriptions in the schema.

/// Sizes and options of a dense-gpt model.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    num_layers: usize,
    /// Channels of the residual stream.
    hidden_size: usize,
    /// Query heads.
    num_attention_heads: usize,
    /// Key/value heads; as many as query heads if left out.
    num_query_groups: Option<usize>,
    /// Channels of a head; hidden_size / num_attention_heads if left out.
    kv_channels: Option<usize>,
    /// Hidden channels of the MLP.
    ffn_hidden_size: usize,
    vocab_size: usize,
    /// Base of the rotary frequencies.
    #[serde(default = "rotary_base")]
    rotary_base: f64,
    /// Added to the mean square in every norm.
    #[serde(default = "layernorm_epsilon")]
    layernorm_epsilon: f64,
    /// Standard deviation of initial weights.
    #[serde(default = "init_method_std")]
    init_method_std: f64,
    /// The output layer uses the embedding's weight.
    #[serde(default)]
    share_embeddings_and_output_weights: bool,
}

fn rotary_base() -> f64 {
    10_000.0
}

fn layernorm_epsilon() -> f64 {
    1e-5
}

fn init_method_std() -> f64 {
    0.02
}

// 3. The provider: a checked config. An error names the key, the numbers that disagree, and what to change.

/// Sizes beyond every model are slips; below it products of two sizes cannot overflow.
const LARGEST: usize = 1 << 20;

/// Numbers are computed with in 32 bits.
const MOST: f64 = 1e30;
const MAX_LAYERS: usize = 10_000;
/// Channels of a head that the host's attention takes.
const MAX_HEAD_DIM: usize = 256;

/// A dense-gpt model.
pub struct DenseGpt {
    config: Config,
    groups: usize,
    head_dim: usize,
}

impl Configure for DenseGpt {
    type Config = Config;
    const SUMMARY: &'static str = "Llama-like decoder: rotary grouped-query attention, SwiGLU, RMSNorm";

    fn new(config: Config) -> Result<DenseGpt> {
        let sizes = [
            ("num_layers", config.num_layers),
            ("hidden_size", config.hidden_size),
            ("num_attention_heads", config.num_attention_heads),
            ("num_query_groups", config.num_query_groups.unwrap_or(1)),
            ("kv_channels", config.kv_channels.unwrap_or(1)),
            ("ffn_hidden_size", config.ffn_hidden_size),
            ("vocab_size", config.vocab_size),
        ];
        if let Some((key, size)) = sizes.iter().find(|(_, size)| !(1..=LARGEST).contains(size)) {
            return Err(Error::config(format!("config.{key} is {size}; it must lie between 1 and {LARGEST}")));
        }
        if config.num_layers > MAX_LAYERS {
            let n = config.num_layers;
            return Err(Error::config(format!("config.num_layers is {n}; it must be at most {MAX_LAYERS}")));
        }
        let numbers = [
            ("rotary_base", config.rotary_base, f64::MIN_POSITIVE),
            ("layernorm_epsilon", config.layernorm_epsilon, f64::MIN_POSITIVE),
            ("init_method_std", config.init_method_std, 0.0),
        ];
        // NaN is in no range.
        if let Some((key, number, least)) = numbers.iter().find(|(_, number, least)| !(*least..=MOST).contains(number))
        {
            let least = if *least > 0.0 { "more than 0" } else { "at least 0" };
            let number = if *number > MOST { format!("{number:e}") } else { number.to_string() };
            return Err(Error::config(format!("config.{key} is {number}; it must be {least} and at most {MOST:e}")));
        }
        let (hidden, heads) = (config.hidden_size, config.num_attention_heads);
        let groups = config.num_query_groups.unwrap_or(heads);
        if heads % groups != 0 {
            return Err(Error::config(format!(
                "config.num_query_groups = {groups} does not divide num_attention_heads = {heads}; \
                 choose a number of groups that does"
            )));
        }
        if config.kv_channels.is_none() && hidden % heads != 0 {
            return Err(Error::config(format!(
                "config.num_attention_heads = {heads} does not divide hidden_size = {hidden}; \
                 choose another number of heads or set kv_channels, the size of a head"
            )));
        }
        let head_dim = config.kv_channels.unwrap_or(hidden / heads);
        if head_dim > MAX_HEAD_DIM {
            let from = match config.kv_channels {
                Some(_) => String::new(),
                None => format!(" (hidden_size = {hidden} / num_attention_heads = {heads})"),
            };
            return Err(Error::config(format!(
                "config.kv_channels is {head_dim}{from}; attention takes heads of at most {MAX_HEAD_DIM} channels"
            )));
        }
        if !head_dim.is_multiple_of(2) {
            return Err(Error::config(format!(
                "config.kv_channels is {head_dim}; rotary positions turn pairs of channels, so it must be even"
            )));
        }
        Ok(DenseGpt { config, groups, head_dim })
    }
}

// 4. The declaration: everything the host must know about the model's parameters, said once. The ids that come back are
// what `forward` names the parameters by.

/// Blocks in the order they run: the embedding, the layers, the output.
struct Blocks {
    embedding: ParamId,
    layers: Vec<Layer>,
    final_norm: ParamId,
    output: ParamId,
}

/// Parameters of one layer.
#[derive(Clone, Copy)]
struct Layer {
    attention_norm: ParamId,
    qkv: ParamId,
    proj: ParamId,
    mlp_norm: ParamId,
    fc1: ParamId,
    fc2: ParamId,
}

impl DenseGpt {
    fn declare(&self) -> (ModelPlan, Blocks) {
        let Config { num_layers, num_attention_heads: heads, hidden_size, ffn_hidden_size, vocab_size, .. } =
            self.config;
        // Axes give dimensions their meaning. From `tensor_parallel` follows how parameters are cut over ranks, from
        // `elastic` that the model can be trained at several widths at once. The host stores heads so that the first n
        // of all groups come first; checkpoints keep the order declared below.
        let axes = vec![
            Axis::new("hidden", hidden_size).elastic(),
            Axis::new("kv_groups", self.groups).tensor_parallel(),
            Axis::new("attention_heads", heads).grouped_by("kv_groups").tensor_parallel().elastic_per_layer(),
            Axis::new("ffn", ffn_hidden_size).tensor_parallel().elastic_per_layer(),
            Axis::new("vocab", vocab_size).tensor_parallel(),
        ];
        let mut plan = ModelPlan { axes, ..ModelPlan::default() };
        let hidden = || Layout::axis("hidden", 1);
        let vocab = || Layout::axis("vocab", 1);
        let ffn = || Layout::axis("ffn", 1);
        let queries = || Layout::axis("attention_heads", self.head_dim);
        // Rows of linear_qkv, once per key/value head: its query heads, the key head, the value head.
        let head = || Layout::Fixed(self.head_dim);
        let qkv = || Layout::repeat("kv_groups", Layout::seq([("q", queries()), ("k", head()), ("v", head())]));
        let gate_up = || Layout::seq([("gate", ffn()), ("up", ffn())]);
        let kv = || Layout::repeat("kv_groups", Layout::seq([("k", head()), ("v", head())]));

        // Projections onto the residual stream begin smaller the more of them add up: std / sqrt(2 layers).
        let std = self.config.init_method_std;
        let normal = Init::Normal { std };
        let scaled = Init::Normal { std: std / (2.0 * num_layers as f64).sqrt() };

        // Linear weights are [out, in]. `hf` is the tensor's name in Hugging Face folders, where q, k, v, gate and up
        // are tensors of their own: `{part}` stands for each.
        let tied = self.config.share_embeddings_and_output_weights;
        let tie = |param: Param| if tied { param.tied("word_embeddings") } else { param };
        let block = plan.add_block(Block::new("embedding", "embedding"));
        let weight = Param::new("embedding.word_embeddings.weight", block, [vocab(), hidden()], normal);
        let embedding = plan.add_param(tie(weight.hf("model.embed_tokens.weight")));

        let layers = (0..num_layers)
            .map(|i| {
                let block = Block::new(format!("decoder.layers.{i}"), "decoder").layer(i);
                // What it needs while it generates text, beside its parameters: keys and values of each token so far,
                // and hidden channels of the tokens at work.
                let block = block.keeps(FootprintKind::PerToken, [kv()]).keeps(FootprintKind::Buffer, [gate_up()]);
                let block = plan.add_block(block);
                let mut param = |name: &str, hf_name: &str, dims: Vec<Layout>, init| {
                    let param = Param::new(format!("decoder.layers.{i}.{name}"), block, dims, init);
                    plan.add_param(param.hf(format!("model.layers.{i}.{hf_name}")))
                };
                let attention_norm = "self_attention.linear_qkv.layer_norm_weight";
                Layer {
                    attention_norm: param(attention_norm, "input_layernorm.weight", vec![hidden()], Init::Ones),
                    qkv: param(
                        "self_attention.linear_qkv.weight",
                        "self_attn.{part}_proj.weight",
                        vec![qkv(), hidden()],
                        normal,
                    ),
                    proj: param(
                        "self_attention.linear_proj.weight",
                        "self_attn.o_proj.weight",
                        vec![hidden(), queries()],
                        scaled,
                    ),
                    mlp_norm: param(
                        "mlp.linear_fc1.layer_norm_weight",
                        "post_attention_layernorm.weight",
                        vec![hidden()],
                        Init::Ones,
                    ),
                    fc1: param("mlp.linear_fc1.weight", "mlp.{part}_proj.weight", vec![gate_up(), hidden()], normal),
                    fc2: param("mlp.linear_fc2.weight", "mlp.down_proj.weight", vec![hidden(), ffn()], scaled),
                }
            })
            .collect();

        let block = plan.add_block(Block::new("output", "output"));
        let weight = Param::new("decoder.final_layernorm.weight", block, [hidden()], Init::Ones);
        let final_norm = plan.add_param(weight.hf("model.norm.weight"));
        let weight = Param::new("output_layer.weight", block, [vocab(), hidden()], normal);
        let output = plan.add_param(tie(weight.hf("lm_head.weight")));

        // What goes in and out. A pipeline stage that does not begin (end) the model takes (delivers) the residual
        // stream instead of tokens (logits).
        plan.ports = vec![
            Port::input("tokens", PortKind::TokenIds),
            Port::input("cu_seqlens", PortKind::CuSeqlens),
            Port::input("hidden", PortKind::Activation).channels(hidden()),
            Port::output("hidden_out", PortKind::Activation).channels(hidden()),
            Port::output("lm", PortKind::LanguageModel),
        ];
        (plan, Blocks { embedding, layers, final_norm, output })
    }
}

impl Provider for DenseGpt {
    fn plan(&self) -> Result<ModelPlan> {
        Ok(self.declare().0)
    }

    fn build(&self, stage: &Stage) -> Result<Box<dyn Module>> {
        let (_, blocks) = self.declare();
        Ok(Box::new(Decoder { config: self.config.clone(), blocks, stage: stage.clone() }))
    }

    // What the config of a smaller model inside this one says: its widths, and what followed from the old ones.
    fn submodel_config(&self, submodel: &Submodel) -> Result<Map<String, Value>> {
        let c = &self.config;
        let sizes = [
            ("num_layers", c.num_layers - submodel.dropped_layers.len()),
            ("hidden_size", submodel.width("hidden", c.hidden_size)?),
            ("num_attention_heads", submodel.width("attention_heads", c.num_attention_heads)?),
            ("num_query_groups", self.groups),
            ("kv_channels", self.head_dim),
            ("ffn_hidden_size", submodel.width("ffn", c.ffn_hidden_size)?),
        ];
        Ok(sizes.into_iter().map(|(key, size)| (key.into(), size.into())).collect())
    }
}

// 5. The forward pass: records host operators on handles. `role` tells elastifiers where they are; without one it does
// nothing. Names of calls ("linear_qkv") appear in errors and profiles.

/// The blocks of one pipeline stage.
struct Decoder {
    config: Config,
    blocks: Blocks,
    stage: Stage,
}

impl Module for Decoder {
    fn forward(&self, cx: &Cx) -> Result<()> {
        let Decoder { blocks, stage, .. } = self;
        let last = blocks.layers.len() + 1;
        let mut x = if stage.begin == 0 {
            let x = cx.embedding("embedding", blocks.embedding, cx.batch("tokens")?)?;
            cx.role(Role::Embedding, x)?
        } else {
            cx.batch("hidden")?
        };
        for block in stage.begin.max(1)..stage.end.min(last) {
            let i = block - 1;
            x = cx.layer(&format!("decoder.layers.{i}"), i, x, |cx, x| self.layer(cx, &blocks.layers[i], x))?;
        }
        if stage.end <= last {
            return cx.output("hidden_out", x);
        }
        let h = cx.rms_norm("final_layernorm", x, blocks.final_norm, self.config.layernorm_epsilon)?;
        cx.output_language_model("lm", cx.role(Role::FinalNorm, h)?, blocks.output)
    }
}

impl Decoder {
    /// x [tokens, hidden] to [tokens, hidden].
    fn layer(&self, cx: &Cx, layer: &Layer, x: Tensor) -> Result<Tensor> {
        let Config { layernorm_epsilon: eps, rotary_base: theta, .. } = self.config;

        let h = cx.rms_norm("input_layernorm", cx.role(Role::MixerInput, x)?, layer.attention_norm, eps)?;
        let qkv = cx.linear("linear_qkv", h, layer.qkv)?;
        let qkv = cx.role(Role::AttentionProjection, qkv)?;
        let qkv = cx.rope("rope", qkv, Rope { theta, ..Rope::default() })?;
        let heads = cx.role(Role::MixerCore, cx.attention("attention", qkv, Attention::default())?)?;
        let branch = cx.role(Role::MixerOutput, cx.linear("linear_proj", heads, layer.proj)?)?;
        let x = cx.add("attention_residual", x, branch)?;

        let h = cx.rms_norm("pre_mlp_layernorm", cx.role(Role::MixerInput, x)?, layer.mlp_norm, eps)?;
        let h = cx.swiglu("swiglu", cx.linear("linear_fc1", h, layer.fc1)?)?;
        let h = cx.role(Role::FfnHidden, h)?;
        let branch = cx.role(Role::MixerOutput, cx.linear("linear_fc2", h, layer.fc2)?)?;
        cx.add("mlp_residual", x, branch)
    }
}

// 6. What can be tested without a host: the declaration and the config's errors.
#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn config(change: &[(&str, Value)]) -> Config {
        let mut config = json!({
            "num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "num_query_groups": 2,
            "ffn_hidden_size": 96, "vocab_size": 100
        });
        for (key, value) in change {
            config[key] = value.clone();
        }
        serde_json::from_value(config).unwrap()
    }

    #[test]
    fn the_declaration_holds_together() {
        for tied in [false, true] {
            let model = DenseGpt::new(config(&[("share_embeddings_and_output_weights", tied.into())])).unwrap();
            let plan = model.plan().unwrap();
            plan.check().unwrap();
            assert_eq!(plan.blocks.len(), 4);
            assert_eq!(plan.params.len(), 2 * 6 + 3);
            assert_eq!(plan.params.iter().filter(|p| p.tie.is_some()).count(), if tied { 2 } else { 0 });
        }
    }

    #[test]
    fn errors_name_the_key_and_both_numbers() {
        let message = |change: &[(&str, Value)]| DenseGpt::new(config(change)).err().unwrap().message;
        let e = message(&[("num_query_groups", json!(3))]);
        assert!(e.contains("num_query_groups = 3") && e.contains("num_attention_heads = 8"), "{e}");
        let e = message(&[("num_attention_heads", json!(6))]);
        assert!(e.contains("num_attention_heads = 6") && e.contains("hidden_size = 64"), "{e}");
        let e = message(&[("kv_channels", json!(7))]);
        assert!(e.contains("kv_channels is 7"), "{e}");
        assert!(message(&[("num_layers", json!(0))]).contains("num_layers is 0"));
    }

    #[test]
    fn numbers_that_cannot_be_are_refused() {
        let message = |change: &[(&str, Value)]| DenseGpt::new(config(change)).err().unwrap().message;
        for key in ["hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "vocab_size"] {
            let e = message(&[(key, json!(u64::MAX))]);
            assert!(e.contains(&format!("config.{key} is {}; it must lie between 1 and", u64::MAX)), "{e}");
        }
        let e = message(&[("num_layers", json!(1_000_000))]);
        assert!(e.contains("num_layers is 1000000; it must be at most 10000"), "{e}");
        let e = message(&[("hidden_size", json!(8000))]);
        assert!(e.contains("kv_channels is 1000 (hidden_size = 8000 / num_attention_heads = 8)"), "{e}");
        assert!(message(&[("rotary_base", json!(0))]).contains("rotary_base is 0; it must be more than 0"));
        assert!(message(&[("layernorm_epsilon", json!(0))]).contains("layernorm_epsilon is 0; it must be more than"));
        assert!(message(&[("init_method_std", json!(-1))]).contains("init_method_std is -1; it must be at least 0"));
        let e = message(&[("init_method_std", json!(1e308))]);
        assert!(e.contains("config.init_method_std is 1e308; it must be at least 0 and at most 1e30"), "{e}");
        // JSON has no NaN and no infinity, but a config may come from elsewhere.
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let e = DenseGpt::new(Config { rotary_base: bad, ..config(&[]) }).err().unwrap().message;
            assert!(e.to_lowercase().starts_with(&format!("config.rotary_base is {bad}").to_lowercase()), "{e}");
        }
    }
}
