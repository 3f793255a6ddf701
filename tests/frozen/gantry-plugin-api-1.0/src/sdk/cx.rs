//! [`Cx`]: what a forward is given. A small copyable handle; everything goes through the host's table.

use super::{Error, LogLevel, Result, TensorDesc, TensorRef};
use crate::abi::tables::HostTableRef;
use crate::abi::types::{Ctx, RawCall, RawOutputs, Reply};
use crate::ops::{AttrBytes, Op, RegionKind, Role};
use crate::plan::{Block, Buffer, ModelPlan, Param};
use abi_stable::std_types::{RNone, ROption, RSlice, RSome, RStr};
use smallvec::SmallVec;
use std::fmt;

/// A value of the recording.
pub type Tensor = TensorRef;

/// A parameter by its place in [`ModelPlan::params`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ParamId(pub u32);

/// A buffer by its place in [`ModelPlan::buffers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferId(pub u32);

impl ModelPlan {
    /// Appends a block; gives its index.
    pub fn add_block(&mut self, block: Block) -> usize {
        self.blocks.push(block);
        self.blocks.len() - 1
    }

    /// Appends a parameter.
    pub fn add_param(&mut self, param: Param) -> ParamId {
        self.params.push(param);
        ParamId(self.params.len() as u32 - 1)
    }

    /// Appends a buffer.
    pub fn add_buffer(&mut self, buffer: Buffer) -> BufferId {
        self.buffers.push(buffer);
        BufferId(self.buffers.len() as u32 - 1)
    }
}

/// What an operator takes as an operand: a tensor of the recording, a parameter or a buffer.
pub trait Operand {
    fn resolve(self, cx: &Cx) -> Result<Tensor>;
}

impl Operand for Tensor {
    fn resolve(self, _cx: &Cx) -> Result<Tensor> {
        Ok(self)
    }
}

impl Operand for ParamId {
    fn resolve(self, cx: &Cx) -> Result<Tensor> {
        cx.param(self)
    }
}

impl Operand for BufferId {
    fn resolve(self, cx: &Cx) -> Result<Tensor> {
        cx.buffer(self)
    }
}

/// The recording in progress. Valid only during the call it was passed to; using it later is an error.
///
/// Operators are methods, in [`operators`](super::operators). Each takes first its name in the model's words, relative
/// to the open regions, e.g. `mixer.in_proj`, under which errors, profiles and logs show it.
#[derive(Clone, Copy)]
pub struct Cx {
    ctx: Ctx,
    table: HostTableRef,
}

impl fmt::Debug for Cx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cx").field(&self.ctx.visit).finish()
    }
}

fn done<T>(reply: Reply<T>) -> Result<T> {
    reply.into_result().map_err(Error::from)
}

impl Cx {
    pub(crate) fn new(ctx: Ctx, table: HostTableRef) -> Cx {
        Cx { ctx, table }
    }

    /// Records any operator with exactly `N` outputs.
    pub fn op<O: Op, const N: usize>(&self, path: &str, op: &O, inputs: &[Tensor]) -> Result<[Tensor; N]> {
        let outputs = self.raw_call(path, op, inputs)?;
        outputs.items.get(..outputs.len as usize).and_then(|o| o.try_into().ok()).ok_or_else(|| {
            Error::shape(format!("{path}: {} gives {} tensors, {N} were asked for", O::NAME, outputs.len))
        })
    }

    /// Records any operator with any number of outputs.
    pub fn op_many<O: Op>(&self, path: &str, op: &O, inputs: &[Tensor]) -> Result<super::Outputs> {
        let outputs = self.raw_call(path, op, inputs)?;
        Ok(outputs.items.iter().take(outputs.len as usize).copied().collect())
    }

    fn raw_call<O: Op>(&self, path: &str, op: &O, inputs: &[Tensor]) -> Result<RawOutputs> {
        let mut attrs = AttrBytes::new();
        op.encode(&mut attrs);
        let call = RawCall {
            op: O::ID,
            version: O::VERSION,
            path: RStr::from_str(path),
            attrs: RSlice::from_slice(&attrs),
            inputs: RSlice::from_slice(inputs),
        };
        let mut outputs = RawOutputs::EMPTY;
        done(self.table.call()(self.ctx, &call, &mut outputs))?;
        Ok(outputs)
    }

    /// A parameter as a tensor of this recording.
    pub fn param(&self, id: ParamId) -> Result<Tensor> {
        done(self.table.param()(self.ctx, id.0))
    }

    /// A buffer as a tensor of this recording.
    pub fn buffer(&self, id: BufferId) -> Result<Tensor> {
        done(self.table.buffer()(self.ctx, id.0))
    }

    /// Names what `f` records. `f`'s errors pass through; the region is closed in any case.
    pub fn region<R>(&self, path: &str, f: impl FnOnce(&Cx) -> Result<R>) -> Result<R> {
        self.entered(path, RegionKind::Plain, f)
    }

    /// Activations inside are not kept for the backward pass but computed again.
    pub fn recompute<R>(&self, path: &str, f: impl FnOnce(&Cx) -> Result<R>) -> Result<R> {
        self.entered(path, RegionKind::Recompute, f)
    }

    /// No gradient flows out of it.
    pub fn no_grad<R>(&self, path: &str, f: impl FnOnce(&Cx) -> Result<R>) -> Result<R> {
        self.entered(path, RegionKind::NoGrad, f)
    }

    /// Layer number `layer`, from the residual stream `x` to the residual stream; a layer the host leaves out passes
    /// `x` on unchanged.
    pub fn layer(
        &self,
        path: &str,
        layer: usize,
        x: Tensor,
        f: impl FnOnce(&Cx, Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let layer = u32::try_from(layer).map_err(|_| Error::plugin(format!("{path}: layer number {layer}")))?;
        match self.begin(path, RegionKind::Layer, RSome(layer))? {
            Some(region) => region.close(f(self, x)),
            None => Ok(x),
        }
    }

    fn entered<R>(&self, path: &str, kind: RegionKind, f: impl FnOnce(&Cx) -> Result<R>) -> Result<R> {
        match self.begin(path, kind, RNone)? {
            Some(region) => region.close(f(self)),
            None => Err(Error::plugin(format!("{path}: the host leaves out a region that is not a layer"))),
        }
    }

    fn begin(&self, path: &str, kind: RegionKind, layer: ROption<u32>) -> Result<Option<OpenRegion>> {
        let entered = done(self.table.region_begin()(self.ctx, path.into(), kind as u32, layer))?;
        Ok(entered.then(|| OpenRegion { cx: *self, open: true }))
    }

    /// Marks a point of the forward for elastifiers; go on with what comes back.
    pub fn role(&self, role: Role, x: Tensor) -> Result<Tensor> {
        done(self.table.role()(self.ctx, role as u32, x))
    }

    /// A value that changes from step to step, as a tensor of one element.
    pub fn step_input(&self, name: &str) -> Result<Tensor> {
        done(self.table.step_input()(self.ctx, name.into()))
    }

    /// The tensor of an input port.
    pub fn batch(&self, port: &str) -> Result<Tensor> {
        done(self.table.batch_input()(self.ctx, port.into()))
    }

    /// Delivers an output port of activations.
    pub fn output(&self, port: &str, x: Tensor) -> Result<()> {
        done(self.table.output()(self.ctx, port.into(), RSlice::from_slice(&[x])))
    }

    /// Delivers an output port of kind `LanguageModel`: hidden [tokens, hidden] and the output weight [vocab, hidden].
    /// The host computes logits and losses.
    pub fn output_language_model(&self, port: &str, hidden: Tensor, weight: impl Operand) -> Result<()> {
        let pair = [hidden, weight.resolve(self)?];
        done(self.table.output()(self.ctx, port.into(), RSlice::from_slice(&pair)))
    }

    /// Reports a tensor of one element under `name` in the step's metrics.
    pub fn metric(&self, name: &str, x: Tensor) -> Result<()> {
        done(self.table.metric()(self.ctx, name.into(), x))
    }

    /// Type, names and sizes of a tensor. Not for the hot path of a forward: it crosses as JSON.
    pub fn describe(&self, x: Tensor) -> Result<TensorDesc> {
        let json = done(self.table.describe()(self.ctx, x))?;
        serde_json::from_str(&json).map_err(|e| Error::plugin(format!("description from the host: {e}")))
    }

    /// Splits the last dimension by names without moving data, e.g. `["mamba_heads", "head_dim"]`.
    pub fn unflatten(&self, x: Tensor, names: &[&str]) -> Result<Tensor> {
        let names: SmallVec<[RStr<'_>; 8]> = names.iter().map(|n| RStr::from_str(n)).collect();
        done(self.table.unflatten()(self.ctx, x, RSlice::from_slice(&names)))
    }

    /// Writes to the host's log under this provider's name.
    pub fn log(&self, level: LogLevel, message: impl fmt::Display) {
        let mut text = String::new();
        // A message that cannot be formatted is logged as far as it got.
        let _ = fmt::Write::write_fmt(&mut text, format_args!("{message}"));
        self.table.log()(self.ctx, level as u32, RStr::from_str(""), RStr::from_str(&text));
    }

    pub fn warn(&self, message: impl fmt::Display) {
        self.log(LogLevel::Warn, message);
    }

    pub fn info(&self, message: impl fmt::Display) {
        self.log(LogLevel::Info, message);
    }

    pub fn debug(&self, message: impl fmt::Display) {
        self.log(LogLevel::Debug, message);
    }

    /// How many values this call has recorded; an error on a host of API 1.0.
    #[cfg(feature = "grown")]
    pub fn recorded(&self) -> Result<u64> {
        match self.table.recorded() {
            Some(recorded) => done(recorded(self.ctx)),
            None => Err(Error::plugin("this host has no function \"recorded\"; it came with plugin API 1.1")),
        }
    }
}

/// Closes a region however its body ends.
struct OpenRegion {
    cx: Cx,
    open: bool,
}

impl OpenRegion {
    fn end(&mut self) -> Result<()> {
        self.open = false;
        done(self.cx.table.region_end()(self.cx.ctx))
    }

    /// The body's error comes before one of closing.
    fn close<R>(mut self, body: Result<R>) -> Result<R> {
        let ended = self.end();
        let value = body?;
        ended?;
        Ok(value)
    }
}

impl Drop for OpenRegion {
    fn drop(&mut self) {
        if self.open {
            // The body panicked; that is the error to report.
            let _ = self.end();
        }
    }
}
