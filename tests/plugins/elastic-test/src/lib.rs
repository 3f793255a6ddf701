//! A small model and the smallest elastifier: its states are data in the recipe. And hooks that count.

mod operator;

use gantry_plugin_api::ops::{Act, Role};
use gantry_plugin_api::plan::{
    Axis, AxisSetting, Block, Direction, ElasticPlan, Init, Layout, MicroBatchInfo, ModelPlan, Param, Port, PortKind,
    Stage,
};
use gantry_plugin_api::sdk::{
    Configure, Cx, Elastifier, Error, Hooks, Module, ParamId, Provider, Result,
};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

gantry_plugin_api::export_plugin! {
    name: "elastic-test",
    models: { "tiny" => Tiny },
    elastifiers: { "scripted" => Scripted },
    hooks: { "counting" => Counting },
    custom_ops: [operator::SoftCap],
}

/// Sizes of the model.
#[derive(Clone, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TinyConfig {
    layers: usize,
    #[serde(default = "eight")]
    hidden: usize,
    #[serde(default = "eight")]
    ffn: usize,
    #[serde(default = "eight")]
    vocab: usize,
}

fn eight() -> usize {
    8
}

/// Embedding, MLP layers, output.
pub struct Tiny(TinyConfig);

impl Configure for Tiny {
    type Config = TinyConfig;
    const SUMMARY: &'static str = "a stack of MLPs";
    fn new(config: TinyConfig) -> Result<Tiny> {
        match config.layers {
            0 => Err(Error::config("config.layers is 0; it must be at least 1")),
            _ => Ok(Tiny(config)),
        }
    }
}

/// Parameters of a layer.
#[derive(Clone, Copy)]
struct Layer {
    norm: ParamId,
    fc1: ParamId,
    fc2: ParamId,
}

struct Ids {
    embedding: ParamId,
    layers: Vec<Layer>,
    final_norm: ParamId,
}

fn param(name: String, block: usize, dims: Vec<Layout>, init: Init) -> Param {
    let decay = dims.len() > 1;
    Param { name, block, dims, init, decay, lr_mult: 1.0, fp32: false, tie: None, export_shape: None, hf_name: None }
}

impl Tiny {
    fn declare(&self) -> (ModelPlan, Ids) {
        let c = &self.0;
        let mut plan = ModelPlan::default();
        for (name, size, per_layer) in [("hidden", c.hidden, false), ("ffn", c.ffn, true), ("vocab", c.vocab, false)] {
            let elastic = name != "vocab";
            plan.axes.push(Axis { name: name.into(), size, group: None, shard: None, elastic, per_layer });
        }
        let [hidden, ffn, vocab] = ["hidden", "ffn", "vocab"].map(|axis| Layout::axis(axis, 1));
        let normal = Init::Normal { std: 0.02 };
        let block = |path: String, kind: &str, layer| Block {
            path,
            kind: kind.into(),
            layer,
            starts_stage: false,
            extra_flops_per_token: 0.0,
        };
        let b = plan.add_block(block("embedding".into(), "embedding", None));
        let embedding =
            plan.add_param(param("embedding.weight".into(), b, vec![vocab, hidden.clone()], normal));
        let layers = (0..c.layers)
            .map(|i| {
                let path = format!("layers.{i}");
                let b = plan.add_block(block(path.clone(), "mlp", Some(i)));
                let mut add = |name: &str, dims, init| plan.add_param(param(format!("{path}.{name}"), b, dims, init));
                Layer {
                    norm: add("norm.weight", vec![hidden.clone()], Init::Ones),
                    fc1: add("fc1.weight", vec![ffn.clone(), hidden.clone()], normal),
                    fc2: add("fc2.weight", vec![hidden.clone(), ffn.clone()], normal),
                }
            })
            .collect();
        let b = plan.add_block(block("final".into(), "output", None));
        let final_norm = plan.add_param(param("final_norm.weight".into(), b, vec![hidden], Init::Ones));
        let port = |name: &str, direction, kind| Port { name: name.into(), direction, kind, channels: None };
        plan.ports.push(port("tokens", Direction::Input, PortKind::TokenIds));
        plan.ports.push(port("logits", Direction::Output, PortKind::LanguageModel));
        (plan, Ids { embedding, layers, final_norm })
    }
}

impl Provider for Tiny {
    fn plan(&self) -> Result<ModelPlan> {
        Ok(self.declare().0)
    }

    fn build(&self, stage: &Stage) -> Result<Box<dyn Module>> {
        let (plan, ids) = self.declare();
        if (stage.begin, stage.end) != (0, plan.blocks.len()) {
            return Err(Error::plugin("tiny is built whole"));
        }
        Ok(Box::new(Built(ids)))
    }
}

struct Built(Ids);

impl Module for Built {
    fn forward(&self, cx: &Cx) -> Result<()> {
        let mut x = cx.embedding("embedding", self.0.embedding, cx.batch("tokens")?)?;
        x = cx.role(Role::Embedding, x)?;
        for (i, layer) in self.0.layers.iter().enumerate() {
            x = cx.layer("layer", i, x, |cx, x| {
                let h = cx.rms_norm("norm", cx.role(Role::MixerInput, x)?, layer.norm, 1e-5)?;
                let h = cx.activation("act", cx.linear("fc1", h, layer.fc1)?, Act::Relu2)?;
                let h = cx.linear("fc2", cx.role(Role::FfnHidden, h)?, layer.fc2)?;
                cx.add("residual", x, cx.role(Role::MixerOutput, h)?)
            })?;
        }
        let h = cx.rms_norm("final_norm", x, self.0.final_norm, 1e-5)?;
        #[cfg(feature = "grown")]
        match cx.recorded() {
            Ok(values) => cx.info(format_args!("{values} values recorded")),
            Err(e) => cx.info(e),
        }
        cx.output_language_model("logits", h, self.0.embedding)
    }
}

/// States as data.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ScriptedConfig {
    /// States of every micro-batch.
    settings: Vec<AxisSetting>,
    /// Instead: states of micro-batch i are entry i modulo the length.
    per_micro_batch: Vec<Vec<AxisSetting>>,
    /// States for `widths`, by budget.
    widths: Vec<Budget>,
}

/// One line of the table of widths.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    budget: f64,
    settings: Vec<AxisSetting>,
}

/// An elastifier that says what its recipe says.
pub struct Scripted(ScriptedConfig);

impl Configure for Scripted {
    type Config = ScriptedConfig;
    const SUMMARY: &'static str = "axis states from the recipe";
    fn new(config: ScriptedConfig) -> Result<Scripted> {
        if !config.settings.is_empty() && !config.per_micro_batch.is_empty() {
            return Err(Error::config("give settings or per_micro_batch, not both"));
        }
        Ok(Scripted(config))
    }
}

impl Elastifier for Scripted {
    fn plan(&mut self, target: &ModelPlan) -> Result<ElasticPlan> {
        let widths = self.0.widths.iter().flat_map(|w| &w.settings);
        for setting in self.0.settings.iter().chain(self.0.per_micro_batch.iter().flatten()).chain(widths) {
            // Layers are no units of a declared axis.
            let known = setting.axis == "depth" || target.axes.iter().any(|a| a.name == setting.axis && a.elastic);
            if !known {
                return Err(Error::config(format!("the target has no elastic axis \"{}\"", setting.axis)));
            }
        }
        Ok(ElasticPlan::default())
    }

    fn begin_micro_batch(&mut self, info: &MicroBatchInfo) -> Result<Vec<AxisSetting>> {
        let list = &self.0.per_micro_batch;
        match list.len() {
            0 => Ok(self.0.settings.clone()),
            n => Ok(list[info.micro_batch as usize % n].clone()),
        }
    }

    fn widths(&mut self, budget: f64) -> Result<Vec<AxisSetting>> {
        let found = self.0.widths.iter().find(|w| w.budget == budget);
        found.map(|w| w.settings.clone()).ok_or_else(|| Error::config(format!("no widths for budget {budget}")))
    }
}

/// Nothing to configure.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CountingConfig {}

/// Counts what it sees.
pub struct Counting {
    steps: u64,
    last_loss: f64,
}

impl Configure for Counting {
    type Config = CountingConfig;
    const SUMMARY: &'static str = "counts steps";
    fn new(_: CountingConfig) -> Result<Counting> {
        Ok(Counting { steps: 0, last_loss: 0.0 })
    }
}

impl Hooks for Counting {
    fn step_end(&mut self, cx: &Cx, step: u64, metrics: &Value) -> Result<()> {
        self.steps += 1;
        self.last_loss = metrics["lm_loss"].as_f64().ok_or_else(|| Error::plugin("no lm_loss in the metrics"))?;
        cx.info(format_args!("step {step} seen"));
        Ok(())
    }

    fn save(&mut self) -> Result<Value> {
        Ok(json!({"steps": self.steps, "last_loss": self.last_loss}))
    }

    fn load(&mut self, state: &Value) -> Result<()> {
        let steps = state["steps"].as_u64();
        self.steps = steps.ok_or_else(|| Error::new(gantry_plugin_api::sdk::ErrorKind::Data, "no steps in the state"))?;
        Ok(())
    }
}
