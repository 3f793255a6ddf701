//! A small model and the smallest elastifier: its states are data in the recipe. And hooks that count.

mod operator;

use gantry_plugin_api::ops::{Act, Role};
use gantry_plugin_api::plan::{
    Axis, AxisSetting, Block, Direction, ElasticPlan, Init, Layout, MicroBatchInfo, ModelPlan, Param, Port, PortKind,
    Stage, Submodel,
};
use gantry_plugin_api::sdk::{Configure, Cx, Elastifier, Error, Hooks, Module, ParamId, Provider, Result};
use operator::{Attrs, SoftCap};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

gantry_plugin_api::export_plugin! {
    name: "elastic-test",
    models: { "tiny" => Tiny },
    elastifiers: { "scripted" => Scripted },
    hooks: { "counting" => Counting },
    custom_ops: [SoftCap],
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
    #[serde(default = "small")]
    init_std: f64,
    /// Bounds the residual stream at its end, by an operator of this plugin.
    #[serde(default)]
    softcap: Option<f64>,
}

fn small() -> f64 {
    0.02
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
    /// Bound and weight of the custom operator before the final norm.
    cap: Option<(f64, ParamId)>,
}

impl Tiny {
    fn declare(&self) -> (ModelPlan, Ids) {
        let c = &self.0;
        let mut plan = ModelPlan::default();
        plan.axes.push(Axis::new("hidden", c.hidden).elastic());
        plan.axes.push(Axis::new("ffn", c.ffn).tensor_parallel().elastic_per_layer());
        plan.axes.push(Axis::new("vocab", c.vocab).tensor_parallel());
        let [hidden, ffn, vocab] = ["hidden", "ffn", "vocab"].map(|axis| Layout::axis(axis, 1));
        let normal = Init::Normal { std: c.init_std };
        let b = plan.add_block(Block::new("embedding", "embedding"));
        let embedding = plan.add_param(Param::new("embedding.weight", b, [vocab, hidden.clone()], normal));
        let layers = (0..c.layers)
            .map(|i| {
                let path = format!("layers.{i}");
                let b = plan.add_block(Block::new(path.clone(), "mlp").layer(i));
                let mut add =
                    |name, dims: Vec<Layout>, init| plan.add_param(Param::new(format!("{path}.{name}"), b, dims, init));
                Layer {
                    norm: add("norm.weight", vec![hidden.clone()], Init::Ones),
                    fc1: add("fc1.weight", vec![ffn.clone(), hidden.clone()], normal),
                    fc2: add("fc2.weight", vec![hidden.clone(), ffn.clone()], normal),
                }
            })
            .collect();
        let b = plan.add_block(Block::new("final", "output"));
        let final_norm = plan.add_param(Param::new("final_norm.weight", b, [hidden.clone()], Init::Ones));
        let cap = c.softcap.map(|cap| {
            let weight = Param::new("softcap.weight", b, [hidden], Init::Uniform { low: 0.5, high: 1.5 });
            (cap, plan.add_param(weight))
        });
        plan.ports.push(Port {
            name: "tokens".into(),
            direction: Direction::Input,
            kind: PortKind::TokenIds,
            channels: None,
        });
        plan.ports.push(Port {
            name: "logits".into(),
            direction: Direction::Output,
            kind: PortKind::LanguageModel,
            channels: None,
        });
        (plan, Ids { embedding, layers, final_norm, cap })
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

    fn submodel_config(&self, submodel: &Submodel) -> Result<Map<String, Value>> {
        let sizes = [
            ("layers", self.0.layers - submodel.dropped_layers.len()),
            ("hidden", submodel.width("hidden", self.0.hidden)?),
            ("ffn", submodel.width("ffn", self.0.ffn)?),
        ];
        Ok(sizes.into_iter().map(|(key, size)| (key.into(), size.into())).collect())
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
        if let Some((cap, weight)) = self.0.cap {
            x = cx.custom::<SoftCap>("softcap", &Attrs { cap }, &[x, cx.param(weight)?])?[0];
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
    /// What else this process was told, in order.
    events: Vec<String>,
}

impl Configure for Counting {
    type Config = CountingConfig;
    const SUMMARY: &'static str = "counts steps";
    fn new(_: CountingConfig) -> Result<Counting> {
        Ok(Counting { steps: 0, last_loss: 0.0, events: Vec::new() })
    }
}

impl Hooks for Counting {
    fn step_end(&mut self, cx: &Cx, step: u64, metrics: &Value) -> Result<()> {
        self.steps += 1;
        self.last_loss = metrics["lm_loss"].as_f64().ok_or_else(|| Error::plugin("no lm_loss in the metrics"))?;
        cx.info(format_args!("step {step} seen"));
        Ok(())
    }

    fn gradients(&mut self, _: &Cx, step: u64, report: &Value) -> Result<()> {
        let finite = ["loss", "lm_loss", "grad_norm", "tokens"].iter().all(|key| report[*key].is_number());
        self.events.push(format!("gradients {step}{}", if finite { "" } else { " without numbers" }));
        Ok(())
    }

    fn step_refused(&mut self, cx: &Cx, step: u64, report: &Value) -> Result<()> {
        cx.info(format_args!("step {step} refused, goes on: {}", report["goes_on"]));
        Ok(())
    }

    fn evaluation(&mut self, _: &Cx, step: u64, report: &Value) -> Result<()> {
        let loss = report["valid_loss"].as_f64().is_some_and(|loss| loss > 0.0);
        self.events.push(format!("evaluation {step}{}", if loss { "" } else { " without a loss" }));
        Ok(())
    }

    fn save(&mut self) -> Result<Value> {
        Ok(json!({"steps": self.steps, "last_loss": self.last_loss, "events": self.events}))
    }

    fn load(&mut self, state: &Value) -> Result<()> {
        let steps = state["steps"].as_u64();
        self.steps =
            steps.ok_or_else(|| Error::new(gantry_plugin_api::sdk::ErrorKind::Data, "no steps in the state"))?;
        Ok(())
    }
}
