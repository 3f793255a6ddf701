//! What each side implements: providers, modules, elastifiers and hooks on one, the host's functions on the other.

use super::{Result, TensorDesc, TensorRef};
use crate::ops::{RegionKind, Role};
use crate::plan::{AxisSetting, Choice, ElasticPlan, MicroBatchInfo, ModelPlan, Occasion, Stage, Submodel, Values};
use crate::sdk::Cx;
use smallvec::SmallVec;

/// A model provider, one instance per rank, called from one thread.
pub trait Provider: 'static {
    /// The whole model's declaration. Pure: no device, no groups, the same on every rank.
    fn plan(&self) -> Result<ModelPlan>;
    /// The module of one pipeline stage chunk.
    fn build(&self, stage: &Stage) -> Result<Box<dyn Module>>;
    /// Keys of the config that a smaller model inside this one has other values of. With them the provider declares that
    /// model: the parameters that remain, in the same order. Without this function a model cannot be sliced.
    fn submodel_config(&self, submodel: &Submodel) -> Result<serde_json::Map<String, serde_json::Value>> {
        let _ = submodel;
        Err(super::Error::plugin("this provider does not say which config a smaller model inside its models has"))
    }
}

/// A built stage of a model.
pub trait Module: 'static {
    /// Records the forward pass: a pure function of parameters, batch inputs and step inputs. Inputs come from
    /// [`Cx::batch`], results go to [`Cx::output`].
    fn forward(&self, cx: &Cx) -> Result<()>;
}

/// Sets the states of other models' axes.
pub trait Elastifier: 'static {
    /// Looks at the target's declaration; says which roles are masked.
    fn plan(&mut self, target: &ModelPlan) -> Result<ElasticPlan>;
    /// States of every axis that is not `Full`, for one micro-batch. A pure function of `info` and declared state.
    fn begin_micro_batch(&mut self, info: &MicroBatchInfo) -> Result<Vec<AxisSetting>>;
    /// Records the program of the router that the plan declares: inputs from [`Cx::batch`] and [`Cx::step_input`],
    /// results to [`Cx::output`].
    fn forward(&self, cx: &Cx) -> Result<()> {
        let _ = cx;
        Err(super::Error::plugin("this elastifier declares a router and records none"))
    }
    /// Values of every input of the router's program. A pure function of the occasion.
    fn router_inputs(&mut self, occasion: &Occasion) -> Result<Values> {
        let _ = occasion;
        Err(super::Error::plugin("this elastifier declares a router and gives it no inputs"))
    }
    /// States, and what follows from them, by the outputs of the router's program. Asked for micro-batches of training and
    /// for budgets; other micro-batches ask [`begin_micro_batch`](Elastifier::begin_micro_batch).
    fn choose(&mut self, occasion: &Occasion, outputs: &Values) -> Result<Choice> {
        let _ = (occasion, outputs);
        Err(super::Error::plugin("this elastifier declares a router and chooses nothing"))
    }
    /// Widths (hard choices) for a budget, for evaluation and slicing, where there is no router.
    fn widths(&mut self, budget: f64) -> Result<Vec<AxisSetting>> {
        let _ = budget;
        Err(super::Error::plugin("this elastifier does not map budgets to widths"))
    }
}

/// Points of the loop outside the recorded step. Every method defaults to nothing.
pub trait Hooks: 'static {
    fn run_begin(&mut self, _cx: &Cx) -> Result<()> {
        Ok(())
    }
    fn step_begin(&mut self, _cx: &Cx, _step: u64) -> Result<()> {
        Ok(())
    }
    /// Before the optimizer, when the gradients of a step are there and finite: `loss` (what is minimised, per token), `lm_loss`,
    /// `grad_norm` and `tokens`.
    fn gradients(&mut self, _cx: &Cx, _step: u64, _report: &serde_json::Value) -> Result<()> {
        Ok(())
    }
    /// Instead of the optimizer, when a step has a NaN, an infinity or a spike: `why`, and whether the run `goes_on`.
    fn step_refused(&mut self, _cx: &Cx, _step: u64, _report: &serde_json::Value) -> Result<()> {
        Ok(())
    }
    /// After a pass over held-out data: `valid_loss` (nats per token) and what else the step's metrics say of it.
    fn evaluation(&mut self, _cx: &Cx, _step: u64, _report: &serde_json::Value) -> Result<()> {
        Ok(())
    }
    /// After the optimizer, with the step's metrics as JSON.
    fn step_end(&mut self, _cx: &Cx, _step: u64, _metrics: &serde_json::Value) -> Result<()> {
        Ok(())
    }
    /// State to be saved with a checkpoint, as JSON.
    fn save(&mut self) -> Result<serde_json::Value> {
        Ok(serde_json::Value::Null)
    }
    fn load(&mut self, _state: &serde_json::Value) -> Result<()> {
        Ok(())
    }
    fn run_end(&mut self, _cx: &Cx) -> Result<()> {
        Ok(())
    }
}

/// The methods of [`Hooks`], as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[non_exhaustive]
pub enum HookEvent {
    RunBegin = 0,
    StepBegin = 1,
    StepEnd = 2,
    Save = 3,
    Load = 4,
    RunEnd = 5,
    Gradients = 6,
    StepRefused = 7,
    Evaluation = 8,
}

impl HookEvent {
    const ALL: [HookEvent; 9] = [
        HookEvent::RunBegin,
        HookEvent::StepBegin,
        HookEvent::StepEnd,
        HookEvent::Save,
        HookEvent::Load,
        HookEvent::RunEnd,
        HookEvent::Gradients,
        HookEvent::StepRefused,
        HookEvent::Evaluation,
    ];

    pub fn from_u32(n: u32) -> Option<HookEvent> {
        HookEvent::ALL.get(n as usize).copied()
    }

    /// Name of the method.
    pub fn name(self) -> &'static str {
        match self {
            HookEvent::RunBegin => "run_begin",
            HookEvent::StepBegin => "step_begin",
            HookEvent::StepEnd => "step_end",
            HookEvent::Save => "save",
            HookEvent::Load => "load",
            HookEvent::RunEnd => "run_end",
            HookEvent::Gradients => "gradients",
            HookEvent::StepRefused => "step_refused",
            HookEvent::Evaluation => "evaluation",
        }
    }
}

/// Handles an operator gives back.
pub type Outputs = SmallVec<[TensorRef; 8]>;

/// One call of a host operator.
#[derive(Clone, Copy, Debug)]
pub struct OpCall<'a> {
    pub op: u32,
    pub version: u32,
    /// Name of this call in the provider's words, relative to the open regions, e.g. `mixer.in_proj`.
    pub path: &'a str,
    pub attrs: &'a [u8],
    pub inputs: &'a [TensorRef],
}

/// Whether the provider is to record a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionEntry {
    Enter,
    /// The region is left out (a skipped layer); `region_end` must not be called.
    Skip,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
#[non_exhaustive]
pub enum LogLevel {
    Error = 0,
    Warn = 1,
    Info = 2,
    Debug = 3,
    Trace = 4,
}

impl LogLevel {
    /// Levels this host does not know are traces.
    pub fn from_u32(n: u32) -> LogLevel {
        [LogLevel::Error, LogLevel::Warn, LogLevel::Info, LogLevel::Debug]
            .get(n as usize)
            .copied()
            .unwrap_or(LogLevel::Trace)
    }
}

/// The host's dozen functions, as safe Rust. The host implements this; `abi` carries it across.
pub trait HostCalls {
    /// Records an operator.
    fn call(&mut self, call: OpCall<'_>, outputs: &mut Outputs) -> Result<()>;
    /// A parameter or buffer of the plan by its index in `params` (`buffer`: in `buffers`).
    fn param(&mut self, index: u32) -> Result<TensorRef>;
    fn buffer(&mut self, index: u32) -> Result<TensorRef>;
    /// Opens a region. `layer` is the layer number for `RegionKind::Layer`.
    fn region_begin(&mut self, path: &str, kind: RegionKind, layer: Option<u32>) -> Result<RegionEntry>;
    fn region_end(&mut self) -> Result<()>;
    /// Marks a point of the forward; what comes back replaces the tensor.
    fn role(&mut self, role: Role, tensor: TensorRef) -> Result<TensorRef>;
    /// A value that changes per step: a device tensor of one element.
    fn step_input(&mut self, name: &str) -> Result<TensorRef>;
    /// An input port's tensor.
    fn batch_input(&mut self, port: &str) -> Result<TensorRef>;
    /// Delivers an output port: [hidden, output weight] for a language model, [activation] otherwise.
    fn output(&mut self, port: &str, tensors: &[TensorRef]) -> Result<()>;
    /// Reports a one-element tensor under a name in the step's metrics.
    fn metric(&mut self, name: &str, tensor: TensorRef) -> Result<()>;
    fn describe(&mut self, tensor: TensorRef) -> Result<TensorDesc>;
    /// Merges or splits the last dimensions by axis names without moving data: ["mamba_heads", "head_dim"].
    fn unflatten(&mut self, tensor: TensorRef, names: &[&str]) -> Result<TensorRef>;
    fn log(&mut self, level: LogLevel, target: &str, message: &str);
}
