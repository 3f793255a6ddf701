//! Token rows sorted by expert, and back.
//!
//! Placement: every rank sorts all tokens (rows, probabilities and indices are gathered), so slots are never spread;
//! channels may be. Behind expert layers that are spread over their hidden channels the gradients of rows and
//! probabilities are partial sums; they are carried back to the tokens as such and summed there, where rows are K times
//! fewer. Unpermuting keeps a partial sum partial. Axis states: the number of experts is that of the weight's first
//! dimension, sliced or not.

use super::{HostOp, Results, Typed, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::dims::Dim;
use crate::program::graph::{DType, ValueId};
use crate::program::recorder::Recorder;
use gantry_kernels::cpu::moe_permute::{Permute, PermuteProbsBackward, PermuteShape, Unpermute, UnpermuteBackward};
use gantry_plugin_api::ops::{MoePermute, MoeUnpermute};

pub static OPS: &[&dyn HostOp] = &[
    &Typed(permute as fn(&mut Recorder<'_>, MoePermute, &[ValueId]) -> Result<Results>),
    &Typed(unpermute as fn(&mut Recorder<'_>, MoeUnpermute, &[ValueId]) -> Result<Results>),
];

/// Inputs: x [tokens, channels], probs [tokens, topk], indices i32 [tokens, topk], a parameter [experts, ..].
/// Outputs: xs [slots, channels], row probs [slots], offsets i32 [experts + 1], slot_of i32 [tokens, topk],
/// token_of i32 [slots].
pub fn permute(cx: &mut Recorder<'_>, _: MoePermute, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 4..=4)?;
    let (x, probs, indices) = (cx.replicated(inputs[0])?, cx.replicated(inputs[1])?, cx.replicated(inputs[2])?);
    let (v, p, i) = (cx.value(x).clone(), cx.value(probs).clone(), cx.value(indices).clone());
    if p.rows != v.rows || (i.rows, i.cols) != (p.rows, p.cols) || i.dtype != DType::I32 {
        return Err(cx.error(format!(
            "x {}, probabilities {} and indices {} must have the same tokens and choices",
            v.text(),
            p.text(),
            i.text()
        )));
    }
    if !p.contiguous() || !i.contiguous() {
        return Err(cx.error("probabilities and indices must be as the router made them, not views"));
    }
    let weight = cx.value(inputs[3]).clone();
    let Some(experts) = weight.dims.first().filter(|_| weight.param.is_some()) else {
        return Err(cx.error(format!("the last input must be a parameter [experts, ..], not {}", weight.text())));
    };
    if experts.sharded() {
        return Err(cx.error(format!("{experts}: experts cannot be spread here; spread their hidden channels instead")));
    }
    let experts = experts.local();
    let slots = || Dim::plain("slots", v.rows * p.cols);
    let (wants_x, wants_probs) = (cx.needs_grad(&[x]), cx.needs_grad(&[probs]));
    let xs = cx.fresh("permuted", [slots(), v.last().clone()], false, wants_x);
    let row_probs = cx.fresh("row_probs", [slots()], false, wants_probs);
    let offsets = cx.fresh_int("offsets", [Dim::plain("experts", experts + 1)], false);
    let slot_of = cx.fresh_int("slot_of", i.dims.clone(), false);
    let token_of = cx.fresh_int("token_of", [slots()], false);
    let shape =
        PermuteShape { tokens: v.rows, k: p.cols, experts, channels: v.cols, ld: v.ld, ld_slots: cx.value(xs).ld };
    cx.g.emit(Permute { shape }, &[x, probs], &[xs, row_probs], &[indices], &[offsets, slot_of, token_of]);
    cx.node(PermuteGrad { x, probs, xs, row_probs, slot_of, shape }, &[xs, row_probs]);
    Ok(Results::from_iter([xs, row_probs, offsets, slot_of, token_of]))
}

struct PermuteGrad {
    x: ValueId,
    probs: ValueId,
    xs: ValueId,
    row_probs: ValueId,
    slot_of: ValueId,
    shape: PermuteShape,
}

impl Backward for PermuteGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let (full, partial) = bw.dy_parts(self.xs);
        for (dxs, partial) in [(full, false), (partial, true)] {
            let Some(dxs) = dxs else { continue };
            let Some(dx) = bw.dx(self.x, partial) else { continue };
            let shape = PermuteShape { ld: bw.ld(dx.value), ld_slots: bw.ld(dxs), ..self.shape };
            bw.emit(Unpermute { shape, acc: dx.acc }, &[dxs], &[dx.value], &[self.slot_of], &[]);
        }
        let (full, partial) = bw.dy_parts(self.row_probs);
        for (d, partial) in [(full, false), (partial, true)] {
            let Some(d) = d else { continue };
            let Some(dp) = bw.dx(self.probs, partial) else { continue };
            let kernel = PermuteProbsBackward { shape: self.shape, acc: dp.acc };
            bw.emit(kernel, &[d], &[dp.value], &[self.slot_of], &[]);
        }
        Ok(())
    }
}

/// Inputs: ys [slots, channels], slot_of i32 [tokens, topk], token_of i32 [slots]. Output [tokens, channels].
pub fn unpermute(cx: &mut Recorder<'_>, _: MoeUnpermute, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 3..=3)?;
    let (ys, slot_of, token_of) = (inputs[0], inputs[1], inputs[2]);
    let (v, s, t) = (cx.value(ys).clone(), cx.value(slot_of).clone(), cx.value(token_of).clone());
    if s.dtype != DType::I32 || t.dtype != DType::I32 || s.len() != v.rows || t.len() != v.rows {
        return Err(cx.error(format!(
            "ys {}, slot_of {} and token_of {} must be of the same permutation",
            v.text(),
            s.text(),
            t.text()
        )));
    }
    let needs_grad = cx.needs_grad(&[ys]);
    let y = cx.fresh("unpermuted", [s.dims[0].clone(), v.last().clone()], false, needs_grad);
    cx.g.values[y.0 as usize].partial = v.partial;
    let shape = PermuteShape {
        tokens: s.rows,
        k: s.cols,
        // Not read on the way back.
        experts: 0,
        channels: v.cols,
        ld: cx.value(y).ld,
        ld_slots: v.ld,
    };
    cx.g.emit(Unpermute { shape, acc: false }, &[ys], &[y], &[slot_of], &[]);
    cx.node(UnpermuteGrad { ys, y, token_of, shape }, &[y]);
    Ok(one(y))
}

struct UnpermuteGrad {
    ys: ValueId,
    y: ValueId,
    token_of: ValueId,
    shape: PermuteShape,
}

impl Backward for UnpermuteGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let Some(dys) = bw.dx(self.ys, false) else { return Ok(()) };
        let shape = PermuteShape { ld: bw.ld(dy), ld_slots: bw.ld(dys.value), ..self.shape };
        bw.emit(UnpermuteBackward { shape, acc: dys.acc }, &[dy], &[dys.value], &[self.token_of], &[]);
        Ok(())
    }
}
