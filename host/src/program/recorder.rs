//! Answers a provider's calls during `forward` and grows the record.

use super::backprop::Backward;
use super::dims::{AxisKey, Dim, Segment};
use super::graph::{DType, Graph, Mark, Node, Region, Seen, Space, StorageId, Value, ValueId};
use super::ops;
use super::placement::Target;
use super::states::{StateKey, States};
use crate::error::{Error, Result};
use crate::mesh::{Grid, Place};
use crate::model::ParamTable;
use crate::model::params::Stored;
use gantry_kernels::blocks::Blocks;
use gantry_plugin_api::ops::{GroupedLinear, LayerNorm, Linear, Op, RegionKind, RmsNorm, Role};
use gantry_plugin_api::plan::{ModelPlan, PortKind, RoleMask};
use gantry_plugin_api::sdk::{
    self, DimDesc, HostCalls, LogLevel, OpCall, Outputs, RegionEntry, SegmentDesc, TensorDesc, TensorRef,
};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// What a recording is made for.
#[derive(Clone)]
pub struct Context<'m> {
    pub plan: &'m ModelPlan,
    pub table: &'m ParamTable,
    pub grid: Grid,
    pub place: Place,
    pub states: &'m States,
    /// Which axes are masked at which role; none: every activation once, where it is produced.
    pub roles: Option<&'m [RoleMask]>,
    /// Record what the backward pass needs.
    pub training: bool,
    /// Parameters take no gradient (a teacher, a frozen module).
    pub frozen: bool,
    /// Tokens of a micro-batch over all tp ranks.
    pub tokens: usize,
    /// Tokens of the longest sequence there may be; costs are counted by it.
    pub longest: usize,
    /// Sequences a micro-batch may have: `cu_seqlens` has one more entry.
    pub max_seqs: usize,
    /// Seed of dropout and sampling.
    pub seed: u64,
    /// Ask for gradients of the numbers in axis states (mixture weights and gains).
    pub state_grads: bool,
    /// Token ids from this one on are padding of the vocabulary and have no probability; none: all are tokens.
    pub labels: Option<usize>,
}

/// More recorded values than any model needs: a provider that never stops.
const MAX_VALUES: usize = 2_000_000;

static GENERATION: AtomicU32 = AtomicU32::new(1);

/// A recording in progress.
pub struct Recorder<'m> {
    pub cx: Context<'m>,
    pub g: Graph,
    pub(super) placed: HashMap<(ValueId, Target), ValueId>,
    pub(super) masks: HashMap<(AxisKey, usize), ops::mask::Mask>,
    params: HashMap<usize, ValueId>,
    buffers: HashMap<usize, ValueId>,
    generation: u32,
    /// Open regions, innermost last.
    open: Vec<u32>,
    layer: Vec<Option<u16>>,
}

impl<'m> Recorder<'m> {
    pub fn new(cx: Context<'m>) -> Recorder<'m> {
        let mut g = Graph::default();
        g.regions.push(Region { path: "".into(), kind: RegionKind::Plain, parent: None, steps: (0, 0) });
        g.calls.push("".into());
        g.operators.push("");
        Recorder {
            cx,
            g,
            placed: HashMap::new(),
            masks: HashMap::new(),
            params: HashMap::new(),
            buffers: HashMap::new(),
            generation: GENERATION.fetch_add(1, Ordering::Relaxed),
            open: vec![0],
            layer: vec![None],
        }
    }

    // Values.

    pub fn value(&self, id: ValueId) -> &Value {
        self.g.value(id)
    }

    /// A fresh value with these dimensions; the row dimensions come first, channels last. `seq`: rows are spread.
    pub fn fresh(&mut self, name: &str, dims: impl IntoIterator<Item = Dim>, seq: bool, needs_grad: bool) -> ValueId {
        self.typed(name, DType::Real, dims, seq, needs_grad)
    }

    /// As [`Recorder::fresh`], of i32.
    pub fn fresh_int(&mut self, name: &str, dims: impl IntoIterator<Item = Dim>, seq: bool) -> ValueId {
        self.typed(name, DType::I32, dims, seq, false)
    }

    fn typed(
        &mut self,
        name: &str,
        dtype: DType,
        dims: impl IntoIterator<Item = Dim>,
        seq: bool,
        needs_grad: bool,
    ) -> ValueId {
        let dims: SmallVec<[Dim; 3]> = dims.into_iter().collect();
        let (last, outer) = match dims.split_last() {
            Some((last, outer)) if !outer.is_empty() => (last.local(), outer.iter().map(Dim::local).product()),
            Some((only, _)) => (1, only.local()),
            None => (1, 1),
        };
        let parts = if seq { self.cx.grid.tp } else { 1 };
        let rows: usize = outer / parts;
        let space = if dtype == DType::I32 { Space::Int } else { Space::Act };
        let storage = self.g.storage(space, rows * last);
        self.g.push_value(Value {
            name: name.into(),
            dtype,
            dims,
            rows,
            cols: last,
            storage,
            offset: 0,
            ld: last,
            partial: false,
            seq,
            needs_grad: needs_grad && self.taping(),
            base: None,
            param: None,
        })
    }

    /// A view of columns `col ..` of `x` with `dim` as its last dimension.
    pub fn view(&mut self, name: &str, x: ValueId, col: usize, dim: Dim) -> ValueId {
        let v = self.g.value(x).clone();
        let base = v.base.map_or((x, col), |(root, first)| (root, first + col));
        let mut dims = v.dims.clone();
        dims.pop();
        let cols = dim.local();
        dims.push(dim);
        self.g.push_value(Value {
            name: name.into(),
            dims,
            cols,
            offset: v.offset + col,
            base: Some(base),
            param: None,
            ..v
        })
    }

    /// Whether operators are being taped.
    pub fn taping(&self) -> bool {
        self.cx.training && !self.open.iter().any(|&r| self.g.regions[r as usize].kind == RegionKind::NoGrad)
    }

    pub fn needs_grad(&self, ids: &[ValueId]) -> bool {
        self.taping() && ids.iter().any(|&id| self.g.value(id).needs_grad)
    }

    /// Puts an operator call on the tape.
    pub fn node(&mut self, op: impl Backward + 'static, outputs: &[ValueId]) {
        if outputs.iter().any(|&out| self.g.value(out).needs_grad) {
            let (region, call) = (self.g.region, self.g.call);
            self.g.nodes.push(Node { op: Box::new(op), outputs: outputs.iter().copied().collect(), region, call });
        }
    }

    // Structure.

    /// Layer of the innermost open layer region.
    pub fn layer(&self) -> Option<u16> {
        self.layer.last().copied().flatten()
    }

    /// The tokens dimension.
    pub fn tokens(&self) -> Dim {
        Dim::plain("tokens", self.cx.tokens)
    }

    /// Sequence boundaries, i32 [max_seqs + 1].
    pub fn cu_seqlens(&mut self) -> Result<ValueId> {
        self.int_input("cu_seqlens", self.cx.max_seqs + 1)
    }

    /// An i32 input of `len` elements that the host fills before each replay.
    pub fn int_input(&mut self, name: &str, len: usize) -> Result<ValueId> {
        self.input(name, DType::I32, len)
    }

    /// A real input of `len` elements that the host fills before each replay.
    pub fn real_input(&mut self, name: &str, len: usize) -> Result<ValueId> {
        self.input(name, DType::Real, len)
    }

    fn input(&mut self, name: &str, dtype: DType, len: usize) -> Result<ValueId> {
        if let Some(&id) = self.g.inputs.get(name) {
            let v = self.g.value(id);
            if v.rows != len || v.dtype != dtype {
                return Err(Error::plugin(format!(
                    "input {name:?} is used as {} elements here and as {} before",
                    len, v.rows
                )));
            }
            return Ok(id);
        }
        let id = self.typed(name, dtype, [Dim::plain(name, len)], false, false);
        self.g.pin(id);
        self.g.inputs.insert(name.into(), id);
        Ok(id)
    }

    /// A dimension of the model with the states of its axes applied.
    pub fn active(&self, dim: &Dim) -> Dim {
        let mut dim = dim.clone();
        for seg in &mut dim.segs {
            if let Some(StateKey::Slice { n }) = seg.axis.and_then(|axis| self.cx.states.get(axis)) {
                // Segments over the same axis have one unit per unit of the axis.
                seg.units = *n;
            }
        }
        dim
    }

    /// A parameter with its active widths.
    pub fn param_value(&mut self, plan_index: usize) -> Result<ValueId> {
        if let Some(&id) = self.params.get(&plan_index) {
            return Ok(id);
        }
        let table = self.cx.table;
        let entry = table.param(plan_index)?;
        let index = table.param_of_plan[plan_index].unwrap_or_default();
        let trains = !self.cx.frozen && self.cx.training;
        let id = self.stored_value(&entry.stored, Space::Param, Some(index), trains);
        self.params.insert(plan_index, id);
        Ok(id)
    }

    /// A non-gradient buffer with its active widths.
    pub fn buffer_value(&mut self, plan_index: usize) -> Result<ValueId> {
        if let Some(&id) = self.buffers.get(&plan_index) {
            return Ok(id);
        }
        let (index, entry) = self.cx.table.buffer(plan_index)?;
        let id = self.stored_value(&entry.stored, Space::Buffer, Some(index), false);
        self.buffers.insert(plan_index, id);
        Ok(id)
    }

    /// A parameter of the frozen model that this one learns from. Its axes are that model's: no state of this one applies.
    pub fn teacher_param(&mut self, stored: &Stored) -> ValueId {
        let mut stored = stored.clone();
        stored.dims.iter_mut().flat_map(|dim| &mut dim.segs).for_each(|seg| seg.axis = None);
        self.stored_value(&stored, Space::Teacher, None, false)
    }

    /// A real input [tokens, channels] that the host fills before each replay, all rows on every rank.
    pub fn rows_input(&mut self, name: &str, channels: Dim) -> ValueId {
        let dims = [self.tokens(), channels];
        let id = self.typed(name, DType::Real, dims, false, false);
        self.g.pin(id);
        self.g.inputs.insert(name.into(), id);
        id
    }

    fn stored_value(&mut self, stored: &Stored, space: Space, entry: Option<usize>, needs_grad: bool) -> ValueId {
        let storage = self.g.storage(space, stored.len);
        self.g.storages[storage.0 as usize].fixed = Some(stored.offset);
        let dims: SmallVec<[Dim; 3]> = stored.dims.iter().map(|dim| self.active(dim)).collect();
        let full: Vec<usize> = stored.dims.iter().map(Dim::local_full).collect();
        let (cols, outer) = match dims.split_last() {
            Some((last, outer)) if !outer.is_empty() => (last.local(), outer.iter().map(Dim::local).product()),
            Some((only, _)) => (only.local(), 1),
            None => (1, 1),
        };
        self.g.push_value(Value {
            name: stored.name.as_str().into(),
            dtype: DType::Real,
            dims,
            rows: outer,
            cols,
            storage,
            offset: 0,
            ld: full.last().copied().unwrap_or(1),
            partial: false,
            seq: false,
            needs_grad,
            base: None,
            param: entry,
        })
    }

    /// Which rows or columns of a stored parameter dimension are active.
    pub fn blocks(&self, param: ValueId, dim: usize) -> Blocks {
        Blocks::new(self.g.value(param).dims[dim].blocks())
    }

    // Errors.

    /// `message` with the place of the current call in front.
    pub fn error(&self, message: impl std::fmt::Display) -> Error {
        Error::plugin(format!("{}: {message}", self.path()))
    }

    /// Path of the current call.
    pub fn path(&self) -> String {
        let region = &self.g.regions[self.g.region as usize].path;
        let call = self.g.calls.last().map(|c| c.to_string()).unwrap_or_default();
        match (region.is_empty(), call.is_empty()) {
            (true, _) => call,
            (_, true) => region.to_string(),
            _ => format!("{region}.{call}"),
        }
    }

    /// An error unless the two dimensions agree in structure.
    pub fn same_dim(&self, what: &str, a: &Dim, b: &Dim) -> Result<()> {
        if a.same_structure(b) {
            return Ok(());
        }
        Err(self.error(format!("{what}: {a} does not fit {b}; both must be made of the same axes at the same widths")))
    }

    /// Number of inputs in a range, or an error.
    pub fn arity(&self, inputs: &[ValueId], allowed: std::ops::RangeInclusive<usize>) -> Result<()> {
        if allowed.contains(&inputs.len()) {
            return Ok(());
        }
        Err(self.error(format!("takes {} to {} inputs, got {}", allowed.start(), allowed.end(), inputs.len())))
    }

    // Handles.

    pub fn handle(&self, id: ValueId) -> TensorRef {
        TensorRef { id: id.0, generation: self.generation }
    }

    pub fn resolve(&self, tensor: TensorRef) -> Result<ValueId> {
        if tensor.generation != self.generation {
            return Err(self.error(format!(
                "tensor {} belongs to another recording (or another rank); handles end with the forward that made them",
                tensor.id
            )));
        }
        if tensor.id as usize >= self.g.values.len() {
            return Err(self.error(format!("tensor {} does not exist", tensor.id)));
        }
        Ok(ValueId(tensor.id))
    }

    /// Begins a call of the host's own, named `path` in errors and profiles.
    pub fn begin_call(&mut self, path: &str) {
        self.g.calls.push(Arc::from(path));
        self.g.operators.push("");
        self.g.call = self.g.calls.len() as u32 - 1;
    }

    /// Notes what an operator's values tell of the units they are made of; `before`: its first step.
    fn mark(&mut self, op: u32, before: usize, inputs: &[ValueId], results: &[ValueId]) {
        let (Some(&x), Some(&y)) = (inputs.first(), results.first()) else { return };
        if self.cx.training {
            return;
        }
        let after = self.g.steps.len();
        let of_axis = |dim: &Dim, per_layer: bool| {
            dim.segs.iter().any(|seg| seg.axis.is_some_and(|axis| axis.layer.is_some() == per_layer))
        };
        if [RmsNorm::ID, LayerNorm::ID].contains(&op) && of_axis(self.value(y).last(), false) {
            self.g.marks.push(Mark { at: after, value: y, seen: Seen::NormOutput });
        }
        if [Linear::ID, GroupedLinear::ID].contains(&op) && of_axis(self.value(x).last(), true) {
            self.g.marks.push(Mark { at: before, value: x, seen: Seen::ProjectionInput });
        }
        if op == GroupedLinear::ID && of_axis(self.value(y).last(), false) {
            let experts = self.value(inputs[1]).dims.first().and_then(|dim| dim.segs.first()?.axis);
            if let Some(experts) = experts {
                let seen = Seen::ExpertOutput { experts, offsets: inputs[2] };
                self.g.marks.push(Mark { at: after, value: y, seen });
            }
        }
    }

    /// Ends the recording: closes bookkeeping that spans regions.
    pub fn finish(&mut self) -> Result<()> {
        if self.open.len() != 1 {
            let path = self.g.regions[self.g.region as usize].path.clone();
            return Err(Error::plugin(format!(
                "forward ended inside region {path:?}; every region_begin needs its end"
            )));
        }
        self.g.forward_steps = self.g.steps.len();
        Ok(())
    }

    /// Storage of a value; for checks.
    pub fn storage_of(&self, id: ValueId) -> StorageId {
        self.g.value(id).storage
    }
}

impl HostCalls for Recorder<'_> {
    fn call(&mut self, call: OpCall<'_>, outputs: &mut Outputs) -> sdk::Result<()> {
        self.begin_call(call.path);
        if self.g.values.len() > MAX_VALUES {
            return Err(self
                .error(format!("forward has recorded {MAX_VALUES} values without ending; is it in an endless loop?"))
                .into());
        }
        let Some(op) = ops::find(call.op) else {
            return Err(self.error(format!("this host has no operator number {}", call.op)).into());
        };
        if call.version > op.version() {
            return Err(self
                .error(format!(
                    "operator {} version {} is newer than this host's {}",
                    op.name(),
                    call.version,
                    op.version()
                ))
                .into());
        }
        if let Some(name) = self.g.operators.last_mut() {
            *name = op.name();
        }
        let inputs = call.inputs.iter().map(|&t| self.resolve(t)).collect::<Result<SmallVec<[ValueId; 8]>>>()?;
        let before = self.g.steps.len();
        let results = op.record(self, call.attrs, &inputs).map_err(|e| {
            let shapes: Vec<String> = inputs.iter().map(|&id| self.g.value(id).text()).collect();
            e.detail(format!("operator {} on {}", op.name(), shapes.join(", ")))
        });
        match results {
            Ok(results) => {
                self.mark(call.op, before, &inputs, &results);
                outputs.extend(results.into_iter().map(|id| self.handle(id)));
                Ok(())
            }
            Err(e) => {
                let mut message = e.sentence;
                for detail in e.details {
                    message.push_str(&format!(" ({detail})"));
                }
                Err(Error::new(e.cause, message).into())
            }
        }
    }

    fn param(&mut self, index: u32) -> sdk::Result<TensorRef> {
        let id = self.param_value(index as usize)?;
        Ok(self.handle(id))
    }

    fn buffer(&mut self, index: u32) -> sdk::Result<TensorRef> {
        let id = self.buffer_value(index as usize)?;
        Ok(self.handle(id))
    }

    fn region_begin(&mut self, path: &str, kind: RegionKind, layer: Option<u32>) -> sdk::Result<RegionEntry> {
        let layer = layer.map(|l| l as u16);
        if let (RegionKind::Layer, Some(layer)) = (kind, layer)
            && let Some(StateKey::Slice { .. } | StateKey::Hard { .. }) = self.cx.states.depth(layer)
        {
            return Ok(RegionEntry::Skip);
        }
        let parent = self.g.region;
        let base = self.g.regions[parent as usize].path.clone();
        let path: Arc<str> = match (base.is_empty(), path.is_empty()) {
            (true, _) => path.into(),
            (_, true) => base,
            _ => format!("{base}.{path}").into(),
        };
        let begin = self.g.steps.len();
        self.g.regions.push(Region { path, kind, parent: Some(parent), steps: (begin, begin) });
        self.g.region = self.g.regions.len() as u32 - 1;
        self.open.push(self.g.region);
        self.layer.push(layer.or(self.layer()));
        Ok(RegionEntry::Enter)
    }

    fn region_end(&mut self) -> sdk::Result<()> {
        if self.open.len() < 2 {
            return Err(self.error("region_end without region_begin").into());
        }
        let end = self.g.steps.len();
        if let Some(region) = self.open.pop() {
            let region = &mut self.g.regions[region as usize];
            region.steps.1 = end;
            if region.kind == RegionKind::NoGrad {
                // What was made here takes no gradient and must not stand in for values that do.
                self.placed.clear();
                self.masks.clear();
            }
        }
        self.layer.pop();
        self.g.region = self.open.last().copied().unwrap_or(0);
        Ok(())
    }

    fn role(&mut self, role: Role, tensor: TensorRef) -> sdk::Result<TensorRef> {
        let x = self.resolve(tensor)?;
        if self.cx.states.keys.is_empty() {
            return Ok(tensor);
        }
        self.begin_call("role");
        let y = ops::mask::at_role(self, role, x)?;
        Ok(self.handle(y))
    }

    fn step_input(&mut self, name: &str) -> sdk::Result<TensorRef> {
        let id = self.real_input(name, 1)?;
        Ok(self.handle(id))
    }

    fn batch_input(&mut self, port: &str) -> sdk::Result<TensorRef> {
        let Some(decl) = self.cx.plan.ports.iter().find(|p| p.name == port) else {
            let known: Vec<&str> = self.cx.plan.ports.iter().map(|p| p.name.as_str()).collect();
            return Err(self.error(format!("no input port {port:?}; the plan declares {}", known.join(", "))).into());
        };
        let id = match decl.kind {
            PortKind::TokenIds => {
                let tokens = self.cx.tokens;
                let id = self.int_input(port, tokens)?;
                self.g.values[id.0 as usize].dims = [Dim::plain("tokens", tokens)].into_iter().collect();
                id
            }
            PortKind::CuSeqlens => self.cu_seqlens()?,
            PortKind::Activation => self.activation_input(port)?,
            _ => return Err(self.error(format!("port {port:?} is not an input")).into()),
        };
        Ok(self.handle(id))
    }

    fn output(&mut self, port: &str, tensors: &[TensorRef]) -> sdk::Result<()> {
        let Some(decl) = self.cx.plan.ports.iter().find(|p| p.name == port) else {
            return Err(self.error(format!("no output port {port:?} in the plan")).into());
        };
        let wants = if decl.kind == PortKind::LanguageModel { 2 } else { 1 };
        if tensors.len() != wants {
            return Err(self
                .error(format!("output port {port:?} takes {wants} tensors, got {}", tensors.len()))
                .into());
        }
        let ids = tensors.iter().map(|&t| self.resolve(t)).collect::<Result<SmallVec<[ValueId; 2]>>>()?;
        if self.g.outputs.insert(port.into(), ids).is_some() {
            return Err(self.error(format!("output port {port:?} was delivered twice")).into());
        }
        Ok(())
    }

    fn metric(&mut self, name: &str, tensor: TensorRef) -> sdk::Result<()> {
        let id = self.resolve(tensor)?;
        if self.g.value(id).len() != 1 {
            return Err(self
                .error(format!("metric {name:?} must have one element, not {}", self.g.value(id).text()))
                .into());
        }
        self.g.pin(id);
        self.g.metrics.push((name.into(), id));
        Ok(())
    }

    fn describe(&mut self, tensor: TensorRef) -> sdk::Result<TensorDesc> {
        let id = self.resolve(tensor)?;
        let v = self.g.value(id);
        let segment = |seg: &Segment| SegmentDesc {
            name: seg.name.to_string(),
            axis: seg.axis.map(|key| self.cx.table.axes[key.axis as usize].name.clone()),
            units: seg.units,
            unit: seg.unit,
        };
        let dims = v
            .dims
            .iter()
            .map(|dim| DimDesc {
                name: dim.name.to_string(),
                size: dim.size(),
                local_size: dim.local(),
                segments: dim.segs.iter().map(segment).collect(),
            })
            .collect();
        Ok(TensorDesc { dtype: v.dtype, dims, partial: v.partial })
    }

    fn unflatten(&mut self, tensor: TensorRef, names: &[&str]) -> sdk::Result<TensorRef> {
        let id = self.resolve(tensor)?;
        let y = ops::shape::unflatten(self, id, names)?;
        Ok(self.handle(y))
    }

    fn log(&mut self, level: LogLevel, target: &str, message: &str) {
        let path = self.path();
        match level {
            LogLevel::Error => tracing::error!(plugin = target, path, "{message}"),
            LogLevel::Warn => tracing::warn!(plugin = target, path, "{message}"),
            LogLevel::Info => tracing::info!(plugin = target, path, "{message}"),
            LogLevel::Debug => tracing::debug!(plugin = target, path, "{message}"),
            _ => tracing::trace!(plugin = target, path, "{message}"),
        }
    }
}

impl Recorder<'_> {
    /// The activation that arrives at a port: from the previous pipeline stage, or from another module.
    fn activation_input(&mut self, port: &str) -> Result<ValueId> {
        if let Some(&id) = self.g.inputs.get(port) {
            return Ok(id);
        }
        let decl = self.cx.plan.ports.iter().find(|p| p.name == port);
        let Some(layout) = decl.and_then(|p| p.channels.as_ref()) else {
            return Err(self.error(format!("activation port {port:?} declares no channels")));
        };
        let order = crate::model::layout::resolve(&self.cx.table.axes, layout)?;
        let channels = self.cx.table.dim(&order, None, self.cx.grid, self.cx.place)?;
        let channels = self.active(&channels);
        let seq = self.cx.grid.sequence_parallel && self.cx.grid.tp > 1;
        let tokens = self.tokens();
        let id = self.fresh(port, [tokens, channels], seq, true);
        self.g.pin(id);
        self.g.inputs.insert(port.into(), id);
        Ok(id)
    }
}
