//! Every way to misbehave that a host must survive, by name: `config: {how: plan_panic}`.

mod elastic;
mod hooks;

use gantry_plugin_api::ops::{self, Act};
use gantry_plugin_api::plan::{Axis, Block, Direction, Init, Layout, ModelPlan, Param, Port, PortKind, Stage};
use gantry_plugin_api::sdk::{Configure, Cx, Error, LogLevel, Module, ParamId, Provider, Result, Tensor, log};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use std::borrow::Cow;
use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

gantry_plugin_api::export_plugin! {
    name: "misbehave",
    models: { "misbehave" => Misbehave },
    elastifiers: { "misbehave-elastic" => elastic::Elastic },
    hooks: { "misbehave-hooks" => hooks::Misbehaving },
    operators: [ops::Embedding, ops::RmsNorm, ops::Linear, ops::Scale, ops::Add, ops::Activation],
}

/// What to do wrong.
#[derive(Clone, Copy, PartialEq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum How {
    /// Nothing: a well-behaved model.
    Behave,
    CreatePanic,
    PlanPanic,
    BuildPanic,
    ForwardPanic,
    /// A panic whose payload is no text and panics itself when dropped.
    ForwardPanicBomb,
    /// A panic inside an open region.
    RegionPanic,
    ModuleDropPanic,
    ProviderDropPanic,
    CreateError,
    PlanError,
    ForwardError,
    /// Multiplies by a weight that does not fit.
    WrongShape,
    /// Splits into a number of parts that is not there.
    WrongSplit,
    UnknownOperator,
    UnknownParameter,
    /// Uses in the second forward a tensor of the first.
    KeptTensor,
    /// Uses in the second forward the Cx of the first.
    KeptCx,
    /// Uses a tensor, or the Cx, of whichever instance came first in the process.
    ForeignTensor,
    ForeignCx,
    OtherThread,
    /// A second thread goes on using the Cx after forward has returned.
    StragglingThread,
    /// Records one operator more each time.
    Impure,
    Sleep,
    LogFromThread,
    /// Records without end, stopping at the first error.
    Endless,
    /// Records on after errors for a million calls and then says all is well.
    EndlessDeaf,
    NanInit,
    DuplicateParameter,
    UnknownAxis,
    NoOutput,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    how: How,
}

/// Set: describing this plugin panics.
const DESCRIBE_PANIC: &str = "GANTRY_TEST_DESCRIBE_PANIC";

impl JsonSchema for Config {
    fn schema_name() -> Cow<'static, str> {
        "Config".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        if std::env::var_os(DESCRIBE_PANIC).is_some() {
            panic!("asked to panic in describe");
        }
        let how = generator.subschema_for::<How>();
        json_schema!({ "type": "object", "properties": { "how": how }, "required": ["how"] })
    }
}

/// The model.
pub struct Misbehave {
    how: How,
}

impl Configure for Misbehave {
    type Config = Config;
    const SUMMARY: &'static str = "misbehaves by name";
    fn new(config: Config) -> Result<Misbehave> {
        match config.how {
            How::CreatePanic => panic!("asked to panic in create"),
            How::CreateError => Err(Error::config("asked to refuse")),
            how => Ok(Misbehave { how }),
        }
    }
}

impl Drop for Misbehave {
    fn drop(&mut self) {
        if self.how == How::ProviderDropPanic {
            panic!("asked to panic in drop");
        }
    }
}

fn param(name: &str, block: usize, dims: Vec<Layout>, init: Init) -> Param {
    let name = name.into();
    Param {
        name,
        block,
        dims,
        init,
        decay: true,
        lr_mult: 1.0,
        fp32: false,
        tie: None,
        export_shape: None,
        hf_name: None,
    }
}

impl Provider for Misbehave {
    fn plan(&self) -> Result<ModelPlan> {
        let axis = |name: &str, size| Axis {
            name: name.into(),
            size,
            group: None,
            shard: None,
            elastic: false,
            per_layer: false,
            active: None,
        };
        let [hidden, ffn, vocab] = ["hidden", "ffn", "vocab"].map(|a| Layout::axis(a, 1));
        let init = Init::Normal { std: if self.how == How::NanInit { f64::NAN } else { 0.02 } };
        let mut plan =
            ModelPlan { axes: vec![axis("hidden", 8), axis("ffn", 16), axis("vocab", 272)], ..Default::default() };
        let block = |path: &str, layer| Block {
            path: path.into(),
            kind: "test".into(),
            layer,
            starts_stage: false,
            extra_flops_per_token: 0.0,
            memory: Vec::new(),
        };
        plan.add_block(block("embedding", None));
        plan.add_block(block("layers.0", Some(0)));
        plan.add_param(param("embedding.weight", 0, vec![vocab, hidden.clone()], init));
        plan.add_param(param("norm.weight", 1, vec![hidden.clone()], Init::Ones));
        plan.add_param(param("fc.weight", 1, vec![hidden.clone(), hidden.clone()], init));
        plan.add_param(param("wide.weight", 1, vec![hidden, ffn], init));
        let port = |name: &str, direction, kind| Port { name: name.into(), direction, kind, channels: None };
        plan.ports.push(port("tokens", Direction::Input, PortKind::TokenIds));
        plan.ports.push(port("logits", Direction::Output, PortKind::LanguageModel));
        match self.how {
            How::PlanPanic => panic!("asked to panic in plan"),
            How::PlanError => return Err(Error::plugin("asked to fail in plan")),
            How::DuplicateParameter => plan.params[2].name = "norm.weight".into(),
            How::UnknownAxis => plan.params[1].dims = vec![Layout::axis("hiden", 1)],
            _ => {}
        }
        Ok(plan)
    }

    fn build(&self, _: &Stage) -> Result<Box<dyn Module>> {
        if self.how == How::BuildPanic {
            panic!("asked to panic in build");
        }
        Ok(Box::new(Built { how: self.how, kept: Cell::new(None), rounds: Cell::new(0) }))
    }
}

struct Built {
    how: How,
    kept: Cell<Option<(Cx, Tensor)>>,
    rounds: Cell<u32>,
}

/// A Cx where no Cx may be.
struct Smuggled(Cx, Tensor);
// SAFETY: none; this is the misbehaviour.
unsafe impl Send for Smuggled {}

static FIRST: Mutex<Option<Smuggled>> = Mutex::new(None);

/// Calls a straggling thread made after its forward was over, and how many of them the host answered with an error.
static LATE: AtomicU64 = AtomicU64::new(0);

struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("asked to panic while a panic is being looked at");
    }
}

const EMBEDDING: ParamId = ParamId(0);
const NORM: ParamId = ParamId(1);
const FC: ParamId = ParamId(2);
const WIDE: ParamId = ParamId(3);

impl Module for Built {
    fn forward(&self, cx: &Cx) -> Result<()> {
        let round = self.rounds.replace(self.rounds.get() + 1);
        let mut x = cx.embedding("embedding", EMBEDDING, cx.batch("tokens")?)?;
        if let Some((old_cx, old)) = self.kept.replace(Some((*cx, x))) {
            match self.how {
                How::KeptTensor => x = cx.scale("kept", old, 2.0)?,
                How::KeptCx => x = old_cx.scale("kept", x, 2.0)?,
                _ => {}
            }
        }
        match self.how {
            How::ForwardPanic => panic!("asked to panic in forward, round {round}"),
            How::ForwardPanicBomb => std::panic::panic_any(Bomb),
            How::RegionPanic => cx.region("inner", |_| -> Result<()> { panic!("asked to panic in a region") })?,
            How::ForwardError => return Err(Error::plugin("asked to fail in forward")),
            How::WrongShape => x = cx.linear("wide", x, WIDE)?,
            How::WrongSplit => [x, _, _] = cx.split("parts", x)?,
            How::UnknownOperator => [x] = cx.op("new", &NewOperator, &[x])?,
            How::UnknownParameter => x = cx.linear("missing", x, ParamId(99))?,
            How::ForeignTensor | How::ForeignCx => {
                let mut first = FIRST.lock().map_err(|e| Error::plugin(e.to_string()))?;
                match first.as_ref() {
                    None => *first = Some(Smuggled(*cx, x)),
                    Some(Smuggled(_, tensor)) if self.how == How::ForeignTensor => x = cx.add("foreign", x, *tensor)?,
                    Some(Smuggled(other, _)) => x = other.scale("foreign", x, 2.0)?,
                }
            }
            How::OtherThread => {
                let smuggled = Smuggled(*cx, x);
                let threaded = std::thread::spawn(move || {
                    let Smuggled(cx, x) = { smuggled };
                    cx.scale("threaded", x, 2.0)
                });
                x = threaded.join().map_err(|_| Error::plugin("thread lost"))??;
            }
            How::StragglingThread => {
                let smuggled = Smuggled(*cx, x);
                std::thread::spawn(move || {
                    let Smuggled(cx, x) = { smuggled };
                    for _ in 0..200 {
                        LATE.fetch_add(u64::from(cx.scale("late", x, 2.0).is_err()), Ordering::Relaxed);
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    log(LogLevel::Info, format!("{} of 200 late calls refused", LATE.load(Ordering::Relaxed)));
                });
            }
            How::Impure => {
                for _ in 0..round {
                    x = cx.activation("again", x, Act::Silu)?;
                }
            }
            How::Sleep => std::thread::sleep(Duration::from_millis(300)),
            How::LogFromThread => {
                let threads: Vec<_> = (0..4)
                    .map(|i| std::thread::spawn(move || log(LogLevel::Info, format!("from thread {i}"))))
                    .collect();
                threads.into_iter().try_for_each(|t| t.join()).map_err(|_| Error::plugin("thread lost"))?;
            }
            How::Endless => loop {
                x = cx.scale("endless", x, 1.0)?;
            },
            How::EndlessDeaf => {
                for _ in 0..1_000_000 {
                    x = cx.scale("endless", x, 1.0).unwrap_or(x);
                }
            }
            How::NoOutput => return Ok(()),
            _ => {}
        }
        let h = cx.linear("fc", cx.rms_norm("norm", x, NORM, 1e-5)?, FC)?;
        cx.output_language_model("logits", cx.add("residual", x, h)?, EMBEDDING)
    }
}

impl Drop for Built {
    fn drop(&mut self) {
        if self.how == How::ModuleDropPanic {
            panic!("asked to panic in drop");
        }
    }
}

/// An operator no host has.
struct NewOperator;

impl ops::Op for NewOperator {
    const ID: u32 = 999_999;
    const VERSION: u32 = 1;
    const NAME: &'static str = "from_the_future";
    fn encode(&self, _: &mut ops::AttrBytes) {}
    fn decode(_: &[u8]) -> Result<Self, String> {
        Ok(NewOperator)
    }
}
