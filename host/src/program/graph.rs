//! The record itself: values on storages, steps in order, and the tape for the backward pass.

use super::dims::{AxisKey, Dim};
use gantry_kernels::Kernel;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::Arc;

pub use gantry_plugin_api::sdk::DType;

/// A value of the record: a window on a storage with logical structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

/// A buffer: what liveness and the memory plan are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StorageId(pub u32);

/// Where a storage lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// Arena of real activations of one micro-batch.
    Act,
    /// Arena of i32 values of one micro-batch.
    Int,
    /// The rank's flat parameters.
    Param,
    /// The rank's flat main gradients, laid out as the parameters.
    Grad,
    /// The rank's flat non-gradient buffers.
    Buffer,
    /// The rank's flat parameters of another, frozen model that this one learns from.
    Teacher,
}

/// A buffer and, for parameters, gradients and non-gradient buffers, its fixed place.
#[derive(Clone, Debug)]
pub struct Storage {
    pub space: Space,
    /// Elements.
    pub len: usize,
    /// First element in the space; arenas get theirs from the memory plan.
    pub fixed: Option<usize>,
    /// Kept for the whole program: inputs, and results the host reads afterwards.
    pub pinned: bool,
}

/// A window on a storage with logical structure. In memory it is `rows` rows of `cols` elements, `ld` apart.
#[derive(Clone, Debug)]
pub struct Value {
    /// Path in the provider's words, for messages.
    pub name: Arc<str>,
    pub dtype: DType,
    /// Logical dimensions at their active widths, outermost first.
    pub dims: SmallVec<[Dim; 3]>,
    /// Rows on this rank: the product of all dimensions but the last.
    pub rows: usize,
    /// Length of the last dimension on this rank.
    pub cols: usize,
    pub storage: StorageId,
    pub offset: usize,
    pub ld: usize,
    /// The logical value is the sum over tensor-parallel ranks.
    pub partial: bool,
    /// Rows are spread over tensor-parallel ranks in contiguous parts (sequence parallelism).
    pub seq: bool,
    pub needs_grad: bool,
    /// For a view: the value it is a column window of, and its first column there.
    pub base: Option<(ValueId, usize)>,
    /// For a parameter: its entry in the parameter table.
    pub param: Option<usize>,
}

impl Value {
    /// Logical shape.
    pub fn shape(&self) -> Vec<usize> {
        self.dims.iter().map(Dim::size).collect()
    }
    /// The last dimension.
    pub fn last(&self) -> &Dim {
        static EMPTY: std::sync::OnceLock<Dim> = std::sync::OnceLock::new();
        self.dims.last().unwrap_or_else(|| EMPTY.get_or_init(|| Dim::plain("", 1)))
    }
    pub fn contiguous(&self) -> bool {
        self.ld == self.cols || self.rows <= 1
    }
    /// Elements on this rank.
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Shape for messages, e.g. `[tokens 64, hidden 128]`.
    pub fn text(&self) -> String {
        let dims: Vec<String> = self.dims.iter().map(Dim::to_string).collect();
        let place = match (self.partial, self.seq) {
            (true, _) => ", partial sum",
            (_, true) => ", tokens spread",
            _ => "",
        };
        format!("[{}]{place}", dims.join(", "))
    }
}

/// Operand of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Operand {
    pub storage: StorageId,
    pub offset: usize,
}

pub type Operands = SmallVec<[Operand; 6]>;

/// Communication over the tensor-parallel group, on contiguous rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Sum in place.
    AllReduce,
    /// [len] of every rank, in rank order.
    AllGather,
    /// Sum of [ranks x len], of which this rank keeps its part.
    ReduceScatter,
    /// All-gather of i32.
    AllGatherInt,
}

impl Collective {
    /// Name in profiles and errors.
    pub fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all_reduce",
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::AllGatherInt => "all_gather_int",
        }
    }
}

/// What a step does.
#[expect(clippy::large_enum_variant, reason = "nearly every step is a launch")]
#[derive(Clone, Debug)]
pub enum Action {
    Launch {
        kernel: Arc<dyn Kernel>,
        ins: Operands,
        outs: Operands,
        ints: Operands,
        int_outs: Operands,
        work: Option<StorageId>,
    },
    Collective {
        kind: Collective,
        src: Operand,
        dst: Operand,
        len: usize,
    },
}

/// One entry of the record.
#[derive(Clone, Debug)]
pub struct Step {
    pub action: Action,
    /// What it writes, in the order of the action's real outputs; their storages may be others while a region is computed
    /// again.
    pub writes: SmallVec<[ValueId; 4]>,
    /// Region it was recorded in.
    pub region: u32,
    /// The operator call it belongs to, index into `Graph::calls`.
    pub call: u32,
}

/// Names a run of steps in errors and profiles.
#[derive(Clone, Debug, PartialEq)]
pub struct Region {
    pub path: Arc<str>,
    pub kind: gantry_plugin_api::ops::RegionKind,
    pub parent: Option<u32>,
    /// First and one past last forward step.
    pub steps: (usize, usize),
}

/// An operator call that has a gradient.
pub struct Node {
    pub op: Box<dyn super::backprop::Backward>,
    pub outputs: SmallVec<[ValueId; 4]>,
    pub region: u32,
    pub call: u32,
}

/// How the value of a loss term becomes its part of the objective, which is per token of the step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Share {
    /// A sum over the micro-batch's tokens, times a factor.
    Sum(f64),
    /// A mean over the micro-batch's tokens.
    Mean,
}

/// A term of the objective.
#[derive(Clone, Debug)]
pub struct LossTerm {
    pub name: Arc<str>,
    /// One element, of this micro-batch.
    pub value: ValueId,
    pub share: Share,
    /// One-element step input that its gradient begins with.
    pub seed: ValueId,
}

/// What an observer of a forward pass can see: a value as it is before a step runs. Recorded where nothing is trained.
#[derive(Clone, Debug)]
pub struct Mark {
    /// Step before which the value is there.
    pub at: usize,
    pub value: ValueId,
    pub seen: Seen,
}

/// What a marked value is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Seen {
    /// What a norm over a whole dimension gives.
    NormOutput,
    /// What a projection takes.
    ProjectionInput,
    /// What the last projection of experts gives: the slots of each `experts` unit from `offsets` (i32 [experts + 1]).
    ExpertOutput { experts: AxisKey, offsets: ValueId },
}

/// Tokens per expert of one micro-batch and router.
#[derive(Clone, Debug)]
pub struct Load {
    /// Path of the router's call.
    pub router: Arc<str>,
    /// Buffer entry the counts belong to, if the router has a bias.
    pub buffer: Option<usize>,
    /// Buffer entry that follows each expert's share, if the router has one.
    pub share: Option<usize>,
    /// i32 [experts].
    pub counts: ValueId,
    /// Counts cover this rank's tokens only and are summed over tp.
    pub seq: bool,
}

/// The record of one signature on one rank.
#[derive(Default)]
pub struct Graph {
    pub values: Vec<Value>,
    pub storages: Vec<Storage>,
    pub steps: Vec<Step>,
    /// Number of forward steps; the rest is the backward pass.
    pub forward_steps: usize,
    pub nodes: Vec<Node>,
    pub regions: Vec<Region>,
    /// Paths of operator calls.
    pub calls: Vec<Arc<str>>,
    /// Names of the calls' operators; nothing for what the host records by itself.
    pub operators: Vec<&'static str>,
    /// Inputs by name: batch inputs and step inputs.
    pub inputs: BTreeMap<String, ValueId>,
    pub outputs: BTreeMap<String, SmallVec<[ValueId; 2]>>,
    pub losses: Vec<LossTerm>,
    /// One-element values reported per step.
    pub metrics: Vec<(String, ValueId)>,
    pub loads: Vec<Load>,
    pub marks: Vec<Mark>,
    /// Parameter entries whose main gradient is a sum over tp ranks not yet taken.
    pub partial_grads: Vec<bool>,
    /// Parameter entries that got a complete gradient contribution.
    pub full_grads: Vec<bool>,
    pub(super) region: u32,
    pub(super) call: u32,
    /// Storages that stand for others while a region is computed again.
    pub(super) remap: BTreeMap<StorageId, StorageId>,
}

impl Graph {
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    pub fn storage(&mut self, space: Space, len: usize) -> StorageId {
        self.storages.push(Storage { space, len, fixed: None, pinned: false });
        StorageId(self.storages.len() as u32 - 1)
    }

    pub fn push_value(&mut self, value: Value) -> ValueId {
        self.values.push(value);
        ValueId(self.values.len() as u32 - 1)
    }

    /// Keeps the value's storage for the whole program.
    pub fn pin(&mut self, value: ValueId) {
        let storage = self.value(value).storage;
        self.storages[storage.0 as usize].pinned = true;
    }

    fn operand(&self, id: ValueId) -> Operand {
        let value = self.value(id);
        let storage = self.remap.get(&value.storage).copied().unwrap_or(value.storage);
        Operand { storage, offset: value.offset }
    }

    /// Appends a kernel launch.
    pub fn emit(
        &mut self,
        kernel: impl Kernel,
        ins: &[ValueId],
        outs: &[ValueId],
        ints: &[ValueId],
        int_outs: &[ValueId],
    ) {
        let work = match kernel.workspace() {
            0 => None,
            len => Some(self.storage(Space::Act, len)),
        };
        let operands = |ids: &[ValueId]| ids.iter().map(|&id| self.operand(id)).collect::<Operands>();
        let action = Action::Launch {
            ins: operands(ins),
            outs: operands(outs),
            ints: operands(ints),
            int_outs: operands(int_outs),
            work,
            kernel: Arc::new(kernel),
        };
        self.push_step(action, outs);
    }

    /// Appends a collective over contiguous values; `len` is the number of elements of one rank's part (of the whole for
    /// an all-reduce).
    pub fn emit_collective(&mut self, kind: Collective, src: ValueId, dst: ValueId, len: usize) {
        let (src, dst) = (self.operand(src), self.operand(dst));
        self.push_step(Action::Collective { kind, src, dst, len }, &[]);
    }

    fn push_step(&mut self, action: Action, writes: &[ValueId]) {
        self.steps.push(Step { action, writes: writes.into(), region: self.region, call: self.call });
    }

    /// A fresh contiguous value on this rank with the dimensions and placement of `like`.
    pub fn fresh_like(&mut self, like: ValueId, name: &str) -> ValueId {
        let mut value = self.value(like).clone();
        let space = if value.dtype == DType::I32 { Space::Int } else { Space::Act };
        value.storage = self.storage(space, value.rows * value.cols);
        value.offset = 0;
        value.ld = value.cols;
        value.base = None;
        value.param = None;
        value.needs_grad = false;
        value.name = name.into();
        self.push_value(value)
    }

    /// Path of a step for messages: region and operator call.
    pub fn step_path(&self, step: &Step) -> String {
        self.path(step.region, step.call)
    }

    /// Name of the operator a step belongs to, or else of its kernel.
    pub fn step_operator(&self, step: &Step) -> &'static str {
        match (self.operators.get(step.call as usize), &step.action) {
            (Some(&name), _) if !name.is_empty() => name,
            (_, Action::Launch { kernel, .. }) => kernel.name(),
            (_, Action::Collective { kind, .. }) => kind.name(),
        }
    }

    /// Path of the operator call being recorded.
    pub(super) fn call_path(&self) -> String {
        self.path(self.region, self.call)
    }

    fn path(&self, region: u32, call: u32) -> String {
        let region = self.regions.get(region as usize).map(|r| r.path.to_string()).unwrap_or_default();
        let call = self.calls.get(call as usize).map(|c| c.to_string()).unwrap_or_default();
        if region.is_empty() { call } else { format!("{region}.{call}") }
    }

    /// The record as text, one step a line: what the purity check compares.
    pub fn text(&self) -> String {
        use std::fmt::Write;
        let mut text = String::new();
        for step in &self.steps {
            let path = self.step_path(step);
            let _ = match &step.action {
                Action::Launch { kernel, ins, outs, ints, int_outs, .. } => writeln!(
                    text,
                    "{path}: {kernel:?} {} <- {} / {} <- {}",
                    join(outs),
                    join(ins),
                    join(int_outs),
                    join(ints)
                ),
                Action::Collective { kind, src, dst, len } => {
                    writeln!(text, "{path}: {kind:?} {} <- {} len {len}", join(&[*dst]), join(&[*src]))
                }
            };
        }
        text
    }
}

fn join(operands: &[Operand]) -> String {
    operands.iter().map(|o| format!("s{}+{}", o.storage.0, o.offset)).collect::<Vec<_>>().join(" ")
}
