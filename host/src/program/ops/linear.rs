//! y = x W^T (+ b).
//!
//! Placement. W's output features spread: x is gathered whole, y is spread, dx is a partial sum (column parallel).
//! W's input features spread: x is spread the same way, y is a partial sum (row parallel). Neither: y is placed as x, and
//! with rows spread the gradients of W and b are partial sums. Axis states: sliced features are blocks of W's rows and
//! columns; gradients land in the same blocks.

use super::{HostOp, Results, Typed, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::dims::Dim;
use crate::program::graph::ValueId;
use crate::program::recorder::Recorder;
use gantry_kernels::blocks::Blocks;
use gantry_kernels::cpu::gemm::{LinearBackwardInput, LinearBackwardWeight, LinearForward};
use gantry_plugin_api::ops::Linear;

pub static OPS: &[&dyn HostOp] = &[&Typed(record as fn(&mut Recorder<'_>, Linear, &[ValueId]) -> Result<Results>)];

/// Inputs: x [.., in], weight [out, in], optional bias [out]. Output [.., out].
pub fn record(cx: &mut Recorder<'_>, _: Linear, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 2..=3)?;
    let (w, bias) = (inputs[1], inputs.get(2).copied());
    let weight = cx.value(w).clone();
    if weight.param.is_none() || weight.dims.len() != 2 {
        return Err(cx.error(format!("the weight must be a parameter [out, in], not {}", weight.text())));
    }
    let (out, inner) = (weight.dims[0].clone(), weight.dims[1].clone());
    let (column, row) = (out.sharded(), inner.sharded());
    let x = if column { cx.replicated(inputs[0])? } else { cx.summed(inputs[0])? };
    cx.same_dim("features of x and columns of the weight", cx.value(x).last(), &inner)?;
    let rows = Blocks::new(out.blocks());
    let cols = Blocks::new(inner.blocks());
    if let Some(b) = bias {
        let b = cx.value(b).clone();
        if b.param.is_none() || b.dims.len() != 1 {
            return Err(cx.error(format!("the bias must be a parameter [out], not {}", b.text())));
        }
        cx.same_dim("bias and rows of the weight", &b.dims[0], &out)?;
    }

    let v = cx.value(x).clone();
    let mut dims: Vec<Dim> = v.dims[..v.dims.len() - 1].to_vec();
    dims.push(out);
    let needs_grad = cx.needs_grad(inputs);
    let y = cx.fresh("linear", dims, v.seq, needs_grad);
    cx.g.values[y.0 as usize].partial = row;
    // Of the terms of a partial sum, the first rank's carries the bias.
    let adds_bias = bias.filter(|_| !row || cx.cx.place.tp == 0);
    let kernel = LinearForward {
        tokens: v.rows,
        rows: rows.clone(),
        cols: cols.clone(),
        ld_x: v.ld,
        ld_w: weight.ld,
        ld_y: cx.value(y).ld,
        bias: adds_bias.is_some(),
        acc: false,
    };
    let ins: Vec<ValueId> = [x, w].into_iter().chain(adds_bias).collect();
    cx.g.emit(kernel, &ins, &[y], &[], &[]);
    cx.node(LinearGrad { x, w, bias, adds_bias: adds_bias.is_some(), y, rows, cols, column, row }, &[y]);
    Ok(one(y))
}

struct LinearGrad {
    x: ValueId,
    w: ValueId,
    bias: Option<ValueId>,
    adds_bias: bool,
    y: ValueId,
    rows: Blocks,
    cols: Blocks,
    column: bool,
    row: bool,
}

impl Backward for LinearGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let x = bw.value(self.x).clone();
        let (ld_dy, ld_w) = (bw.ld(dy), bw.ld(self.w));
        let (rows, cols) = (&self.rows, &self.cols);
        let spread = x.seq;
        if let Some(dw) = bw.param_grad(self.w, spread)? {
            let db = match self.bias {
                Some(b) => bw.param_grad(b, spread || self.row)?.filter(|_| self.adds_bias),
                None => None,
            };
            let kernel = LinearBackwardWeight {
                tokens: x.rows,
                rows: rows.clone(),
                cols: cols.clone(),
                ld_dy,
                ld_x: x.ld,
                ld_w,
                bias: db.is_some(),
            };
            let outs: Vec<ValueId> = [dw].into_iter().chain(db).collect();
            bw.emit(kernel, &[dy, self.x], &outs, &[], &[]);
        }
        if let Some(dx) = bw.dx(self.x, self.column) {
            let kernel = LinearBackwardInput {
                tokens: x.rows,
                rows: rows.clone(),
                cols: cols.clone(),
                ld_dy,
                ld_w,
                ld_dx: bw.ld(dx.value),
                acc: dx.acc,
            };
            bw.emit(kernel, &[dy, self.w], &[dx.value], &[], &[]);
        }
        Ok(())
    }
}
