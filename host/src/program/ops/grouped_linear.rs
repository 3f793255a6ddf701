//! ys = xs W_e^T for the slots of each expert.
//!
//! Placement: as a linear layer, per expert: W's output features spread make ys spread and dxs a partial sum, its input
//! features spread make ys a partial sum. Slots are never spread. Axis states: sliced experts are a prefix of the stacked
//! weight, sliced features blocks of its rows and columns.

use super::{HostOp, Results, Typed, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::dims::Dim;
use crate::program::graph::{DType, ValueId};
use crate::program::recorder::Recorder;
use gantry_kernels::cpu::grouped_gemm::{
    GroupedLinearBackwardInput, GroupedLinearBackwardWeight, GroupedLinearForward, GroupedShape,
};
use gantry_plugin_api::ops::GroupedLinear;

pub static OPS: &[&dyn HostOp] =
    &[&Typed(record as fn(&mut Recorder<'_>, GroupedLinear, &[ValueId]) -> Result<Results>)];

/// Inputs: xs [slots, in], weight [experts, out, in], offsets i32 [experts + 1]. Output [slots, out].
pub fn record(cx: &mut Recorder<'_>, _: GroupedLinear, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 3..=3)?;
    let (w, offsets) = (inputs[1], inputs[2]);
    let weight = cx.value(w).clone();
    let [experts, out, inner] = weight.dims.as_slice() else {
        return Err(cx.error(format!("the weight must be a parameter [experts, out, in], not {}", weight.text())));
    };
    if weight.param.is_none() {
        return Err(cx.error(format!("the weight must be a parameter [experts, out, in], not {}", weight.text())));
    }
    if experts.sharded() {
        return Err(cx.error(format!("{experts}: experts cannot be spread here; spread their hidden channels instead")));
    }
    let o = cx.value(offsets);
    if o.dtype != DType::I32 || o.len() != experts.local() + 1 {
        return Err(cx.error(format!("offsets {} do not fit {experts}: one more entry is needed", o.text())));
    }
    let (column, row) = (out.sharded(), inner.sharded());
    let x = cx.replicated(inputs[0])?;
    let v = cx.value(x).clone();
    cx.same_dim("features of xs and columns of the weight", v.last(), inner)?;
    let needs_grad = cx.needs_grad(&[x, w]);
    let dims: Vec<Dim> = v.dims[..v.dims.len() - 1].iter().chain([out]).cloned().collect();
    let y = cx.fresh("grouped_linear", dims, false, needs_grad);
    cx.g.values[y.0 as usize].partial = row;
    let shape = GroupedShape {
        slots: v.rows,
        experts: experts.local(),
        rows: cx.blocks(w, 1),
        cols: cx.blocks(w, 2),
        ld_w: weight.ld,
        ld_expert: out.local_full() * weight.ld,
    };
    let kernel = GroupedLinearForward { shape: shape.clone(), ld_x: v.ld, ld_y: cx.value(y).ld, acc: false };
    cx.g.emit(kernel, &[x, w], &[y], &[offsets], &[]);
    cx.node(GroupedLinearGrad { x, w, offsets, y, shape, column }, &[y]);
    Ok(one(y))
}

struct GroupedLinearGrad {
    x: ValueId,
    w: ValueId,
    offsets: ValueId,
    y: ValueId,
    shape: GroupedShape,
    column: bool,
}

impl Backward for GroupedLinearGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let ld_dy = bw.ld(dy);
        if let Some(dw) = bw.param_grad(self.w, false)? {
            let kernel = GroupedLinearBackwardWeight { shape: self.shape.clone(), ld_dy, ld_x: bw.ld(self.x) };
            bw.emit(kernel, &[dy, self.x], &[dw], &[self.offsets], &[]);
        }
        if let Some(dx) = bw.dx(self.x, self.column) {
            let ld_dx = bw.ld(dx.value);
            let kernel = GroupedLinearBackwardInput { shape: self.shape.clone(), ld_dy, ld_dx, acc: dx.acc };
            bw.emit(kernel, &[dy, self.w], &[dx.value], &[self.offsets], &[]);
        }
        Ok(())
    }
}
