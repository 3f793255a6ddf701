//! y = x / sqrt(mean(x^2) + eps) * w.
//!
//! Placement: rows as they come (partial sums are taken first); the normed dimension must not be spread; with rows spread
//! the gradient of w is a partial sum. Axis states: over a masked axis the mean still divides by the full width, eps becomes
//! eps * e and y is scaled by s, which for a hard choice is exactly the norm of the slice; over a sliced axis the width is
//! the slice's.

use super::mask::norm_mask;
use super::{HostOp, Results, Typed, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::dims::Dim;
use crate::program::graph::ValueId;
use crate::program::recorder::Recorder;
use gantry_kernels::blocks::Blocks;
use gantry_kernels::cpu::rms_norm::{RmsNorm as Forward, RmsNormBackward};
use gantry_plugin_api::ops::RmsNorm;

pub static OPS: &[&dyn HostOp] = &[&Typed(record as fn(&mut Recorder<'_>, RmsNorm, &[ValueId]) -> Result<Results>)];

/// Inputs: x [.., channels], weight [channels].
pub fn record(cx: &mut Recorder<'_>, attrs: RmsNorm, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 2..=2)?;
    let (x, w) = (cx.summed(inputs[0])?, inputs[1]);
    let v = cx.value(x).clone();
    let channels = v.last().clone();
    if channels.sharded() {
        return Err(cx.error(format!(
            "cannot norm over {channels}: each rank holds a part; norm before the split or use a gated norm with groups"
        )));
    }
    cx.same_dim("channels of x and the weight", &channels, cx.value(w).last())?;
    let mask = norm_mask(cx, &channels)?;
    let needs_grad = cx.needs_grad(&[x, w]);
    let y = cx.fresh("rms_norm", v.dims.clone(), v.seq, needs_grad);
    let rstd = cx.fresh("rstd", [Dim::plain("rows", v.rows)], false, false);
    let weight = cx.blocks(w, 0);
    let kernel = Forward {
        tokens: v.rows,
        weight: weight.clone(),
        width: channels.size(),
        eps: attrs.eps,
        ld_x: v.ld,
        ld_y: cx.value(y).ld,
        eps_ratio: mask.is_some(),
        scale: mask.is_some(),
    };
    let mut ins = vec![x, w];
    ins.extend(mask.iter().flat_map(|m| [m.e, m.s]));
    cx.g.emit(kernel, &ins, &[y, rstd], &[], &[]);
    cx.node(RmsNormGrad { x, w, y, rstd, s: mask.map(|m| m.s), weight, width: channels.size() }, &[y]);
    Ok(one(y))
}

struct RmsNormGrad {
    x: ValueId,
    w: ValueId,
    y: ValueId,
    rstd: ValueId,
    s: Option<ValueId>,
    weight: Blocks,
    width: usize,
}

impl Backward for RmsNormGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let x = bw.value(self.x).clone();
        let dw = bw.param_grad_or_scratch(self.w, x.seq)?;
        let ds = match self.s {
            Some(s) => Some(bw.dx_adding_or_scratch(s, x.seq)),
            None => None,
        };
        let dx = bw.dx_or_scratch(self.x, false);
        let kernel = RmsNormBackward {
            tokens: x.rows,
            weight: self.weight.clone(),
            width: self.width,
            ld_dy: bw.ld(dy),
            ld_x: x.ld,
            ld_dx: bw.ld(dx.value),
            scale: self.s.is_some(),
            acc: dx.acc,
        };
        let ins: Vec<ValueId> = [dy, self.x, self.rstd, self.w].into_iter().chain(self.s).collect();
        let outs: Vec<ValueId> = [dx.value, dw].into_iter().chain(ds).collect();
        bw.emit(kernel, &ins, &outs, &[], &[]);
        Ok(())
    }
}
