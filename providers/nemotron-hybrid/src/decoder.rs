//! The model as a whole: embedding, layers, output; its plan, and the module of a pipeline stage.
//!
//! Block 0 is the embedding, blocks 1 ..= L are the layers, block L + 1 is the final norm with the output layer.

use crate::attention::{self, Attention};
use crate::config::{Config, positive, within};
use crate::declare::{Declaration, HIDDEN, hidden};
use crate::hugging_face;
use crate::mamba::{self, Mamba};
use crate::mlp::{self, Mlp};
use crate::moe::{self, Moe};
use crate::pattern::{self, LayerKind, PatternLayer, parse};
use gantry_plugin_api::ops::Role;
use gantry_plugin_api::plan::{Axis, Block, Layout, ModelPlan, Param, Port, PortKind, Stage, Submodel};
use gantry_plugin_api::sdk::{Configure, Cx, Error, HuggingFace, Module, ParamId, Provider, Result, Tensor};
use serde_json::{Map, Value};

/// A nemotron-hybrid model: its pattern and the sizes of the kinds of layers it has.
#[derive(Debug)]
pub struct NemotronHybrid {
    config: Config,
    layers: Vec<PatternLayer>,
    mamba: Option<mamba::Sizes>,
    attention: Option<attention::Sizes>,
    mlp: Option<mlp::Sizes>,
    moe: Option<moe::Sizes>,
}

impl Configure for NemotronHybrid {
    type Config = Config;
    const SUMMARY: &'static str = "decoder of Mamba-2, attention, MLP and expert layers by pattern";
    const HUGGING_FACE: Option<HuggingFace<NemotronHybrid>> = Some(hugging_face::FOLDERS);

    fn new(config: Config) -> Result<NemotronHybrid> {
        positive(config.hidden_size, "hidden_size")?;
        positive(config.vocab_size, "vocab_size")?;
        within(config.init_method_std, "init_method_std", 0.0..=f64::MAX)?;
        within(config.layernorm_epsilon, "layernorm_epsilon", f64::MIN_POSITIVE..=1.0)?;
        let layers = parse(&config.pattern)?;
        let has = |kind: LayerKind| layers.iter().any(|layer| layer.kind == kind);
        Ok(NemotronHybrid {
            mamba: has(LayerKind::Mamba).then(|| mamba::Sizes::new(&config)).transpose()?,
            attention: has(LayerKind::Attention).then(|| attention::Sizes::new(&config)).transpose()?,
            mlp: has(LayerKind::Mlp).then(|| mlp::Sizes::new(&config)).transpose()?,
            moe: has(LayerKind::Moe).then(|| moe::Sizes::new(&config)).transpose()?,
            layers,
            config,
        })
    }
}

/// Parameters of every block.
#[derive(Clone, Debug)]
struct Blocks {
    embedding: ParamId,
    layers: Vec<Layer>,
    final_norm: ParamId,
    output: ParamId,
}

/// Parameters of a layer.
#[derive(Clone, Debug)]
enum Layer {
    Mamba(Mamba),
    Attention(Attention),
    Mlp { norm: ParamId, mlp: Mlp },
    Moe(Moe),
}

impl NemotronHybrid {
    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn layers(&self) -> &[PatternLayer] {
        &self.layers
    }

    /// Sizes of attention layers, if it has any.
    pub fn attention(&self) -> Option<&attention::Sizes> {
        self.attention.as_ref()
    }

    fn declare(&self) -> Result<(ModelPlan, Blocks)> {
        let mut d = Declaration::new(self.config.init_method_std, self.layers.len(), self.config.add_bias_linear);
        d.axes([Axis::new(HIDDEN, self.config.hidden_size).elastic()]);
        d.axes([Axis::new("vocab", self.config.vocab_size).tensor_parallel()]);
        d.axes(self.mamba.iter().flat_map(|sizes| sizes.axes()));
        d.axes(self.attention.iter().flat_map(|sizes| sizes.axes()));
        d.axes(self.mlp.iter().flat_map(|sizes| sizes.axes()));
        d.axes(self.moe.iter().flat_map(|sizes| sizes.axes()));

        let normal = d.normal;
        let tied = self.config.share_embeddings_and_output_weights;
        let tie = |param: Param| if tied { param.tied("word_embeddings") } else { param };
        let vocab = || [Layout::axis("vocab", 1), hidden()];
        // Looking up a row is no arithmetic, so the block's own weights count for nothing.
        let weights = (self.config.vocab_size * self.config.hidden_size) as f64;
        let embedding = Block::new("embedding", "embedding").extra_flops(-2.0 * weights);
        let embedding = d.block(embedding, "backbone").param_with(
            "word_embeddings.weight",
            "embeddings.weight",
            vocab(),
            normal,
            tie,
        );
        let layers = self.layers.iter().enumerate();
        let layers = layers.map(|(i, layer)| self.declare_layer(&mut d, i, *layer)).collect::<Result<_>>()?;
        let mut output = d.block_with_names(Block::new("output_layer", "output"), String::new(), String::new());
        let final_norm = output.norm("decoder.final_norm.weight", "backbone.norm_f.weight");
        let output = output.param_with("output_layer.weight", "lm_head.weight", vocab(), normal, tie);

        let mut plan = d.plan;
        plan.ports = vec![
            Port::input("tokens", PortKind::TokenIds),
            Port::input("cu_seqlens", PortKind::CuSeqlens),
            Port::input("hidden", PortKind::Activation).channels(hidden()),
            Port::output("hidden_out", PortKind::Activation).channels(hidden()),
            Port::output("lm", PortKind::LanguageModel),
        ];
        Ok((plan, Blocks { embedding, layers, final_norm, output }))
    }

    fn declare_layer(&self, d: &mut Declaration, i: usize, layer: PatternLayer) -> Result<Layer> {
        let block = Block { starts_stage: layer.starts_stage, ..Block::new(path(i), layer.kind.name()).layer(i) };
        let hf_path = format!("backbone.layers.{i}");
        // `new` made the sizes of every kind that the pattern has.
        let missing = || Error::plugin(format!("{}: no sizes for {} layers", path(i), layer.kind.name()));
        Ok(match layer.kind {
            LayerKind::Mamba => {
                let sizes = self.mamba.as_ref().ok_or_else(missing)?;
                Layer::Mamba(sizes.declare(&mut d.block(sizes.block(block), hf_path)))
            }
            LayerKind::Attention => {
                let sizes = self.attention.as_ref().ok_or_else(missing)?;
                Layer::Attention(sizes.declare(&mut d.block(sizes.block(block), hf_path)))
            }
            LayerKind::Mlp => {
                let sizes = self.mlp.as_ref().ok_or_else(missing)?;
                let (norm, mlp) = sizes.declare(&mut d.block(sizes.block(block), hf_path));
                Layer::Mlp { norm, mlp }
            }
            LayerKind::Moe => {
                let sizes = self.moe.as_ref().ok_or_else(missing)?;
                Layer::Moe(sizes.declare(&mut d.block(sizes.block(block), hf_path)))
            }
        })
    }
}

fn path(layer: usize) -> String {
    format!("decoder.layers.{layer}")
}

impl Provider for NemotronHybrid {
    fn plan(&self) -> Result<ModelPlan> {
        Ok(self.declare()?.0)
    }

    fn build(&self, stage: &Stage) -> Result<Box<dyn Module>> {
        let (_, blocks) = self.declare()?;
        let recompute = self.layers.iter().map(|layer| self.config.recompute.contains(&layer.kind)).collect();
        Ok(Box::new(Decoder { blocks, recompute, eps: self.config.layernorm_epsilon, stage: stage.clone() }))
    }

    fn submodel_config(&self, submodel: &Submodel) -> Result<Map<String, Value>> {
        let mut changes = Map::new();
        let mut layers: Vec<PatternLayer> = Vec::new();
        let mut starts_stage = false;
        for (at, layer) in self.layers.iter().enumerate() {
            // Where the layer that began a stage goes, the next one does.
            starts_stage |= layer.starts_stage;
            if submodel.keeps_layer(at) {
                layers.push(PatternLayer { starts_stage, ..*layer });
                starts_stage = false;
            }
        }
        changes.insert("pattern".into(), pattern::text(&layers).into());
        let mut set = |key: &str, size: usize| drop(changes.insert(key.into(), size.into()));
        set("hidden_size", submodel.width(HIDDEN, self.config.hidden_size)?);
        if let Some(sizes) = &self.mamba {
            set("mamba_num_heads", submodel.width("mamba_heads", sizes.heads)?);
        }
        if let Some(sizes) = &self.attention {
            set("num_attention_heads", submodel.width("attention_heads", sizes.heads)?);
            // Said, as they may have followed from what changes.
            set("num_query_groups", sizes.groups);
            set("kv_channels", sizes.head_dim);
        }
        if let Some(sizes) = &self.mlp {
            set("ffn_hidden_size", submodel.width("ffn", sizes.ffn)?);
        }
        if let Some(sizes) = &self.moe {
            set("num_moe_experts", submodel.width("experts", sizes.experts)?);
            set("moe_ffn_hidden_size", submodel.width("moe_ffn", sizes.ffn)?);
            if let Some(shared) = sizes.shared_ffn {
                set("moe_shared_expert_intermediate_size", submodel.width("shared_ffn", shared)?);
            }
        }
        Ok(changes)
    }
}

/// The blocks of one pipeline stage.
#[derive(Debug)]
struct Decoder {
    blocks: Blocks,
    /// Layers whose activations are computed again.
    recompute: Vec<bool>,
    eps: f64,
    stage: Stage,
}

impl Module for Decoder {
    fn forward(&self, cx: &Cx) -> Result<()> {
        let Decoder { blocks, stage, .. } = self;
        let last = blocks.layers.len() + 1;
        let mut x = if stage.begin == 0 {
            let x = cx.embedding("embedding.word_embeddings", blocks.embedding, cx.batch("tokens")?)?;
            cx.role(Role::Embedding, x)?
        } else {
            cx.batch("hidden")?
        };
        for block in stage.begin.max(1)..stage.end.min(last) {
            let i = block - 1;
            x = cx.layer(&path(i), i, x, |cx, x| self.layer(cx, i, x))?;
        }
        if stage.end <= last {
            return cx.output("hidden_out", x);
        }
        let h = cx.rms_norm("decoder.final_norm", x, blocks.final_norm, self.eps)?;
        cx.output_language_model("lm", cx.role(Role::FinalNorm, h)?, blocks.output)
    }
}

impl Decoder {
    /// x + mixer(norm(x)).
    fn layer(&self, cx: &Cx, i: usize, x: Tensor) -> Result<Tensor> {
        let u = cx.role(Role::MixerInput, x)?;
        let branch =
            if self.recompute[i] { cx.recompute("", |cx| self.branch(cx, i, u))? } else { self.branch(cx, i, u)? };
        cx.add("residual", x, cx.role(Role::MixerOutput, branch)?)
    }

    fn branch(&self, cx: &Cx, i: usize, u: Tensor) -> Result<Tensor> {
        match &self.blocks.layers[i] {
            Layer::Mamba(mamba) => mamba.forward(cx, u, self.eps),
            Layer::Attention(attention) => attention.forward(cx, u, self.eps),
            Layer::Mlp { norm, mlp } => mlp.forward(cx, "mlp", cx.rms_norm("mlp.norm", u, *norm, self.eps)?),
            Layer::Moe(moe) => moe.forward(cx, u, self.eps),
        }
    }
}

#[cfg(test)]
mod tests;
