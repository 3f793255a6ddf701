//! Sums, products and scales of values of one shape.
//!
//! Placement. A sum of two partial sums stays one; otherwise partial terms are taken first, into the placement of the
//! residual stream. A product takes partial factors first. A scale keeps every placement. Axis states: none of their own;
//! zeros stay zeros.

use super::{HostOp, Results, Typed, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::graph::{Value, ValueId};
use crate::program::recorder::Recorder;
use gantry_kernels::cpu::elementwise::{Binary, BinaryOp, Scale as ScaleKernel};
use gantry_plugin_api::ops::{Add, Mul, Scale};

pub static OPS: &[&dyn HostOp] = &[
    &Typed(add as fn(&mut Recorder<'_>, Add, &[ValueId]) -> Result<Results>),
    &Typed(mul as fn(&mut Recorder<'_>, Mul, &[ValueId]) -> Result<Results>),
    &Typed(scale as fn(&mut Recorder<'_>, Scale, &[ValueId]) -> Result<Results>),
];

fn same_shape(cx: &Recorder<'_>, a: &Value, b: &Value) -> Result<()> {
    if a.dims.len() != b.dims.len() {
        return Err(cx.error(format!("shapes {} and {} differ", a.text(), b.text())));
    }
    a.dims.iter().zip(&b.dims).try_for_each(|(a, b)| cx.same_dim("operands", a, b))
}

/// y = a + b.
pub fn add(cx: &mut Recorder<'_>, _: Add, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 2..=2)?;
    let (a, b) = cx.aligned(inputs[0], inputs[1])?;
    binary(cx, BinaryOp::Add, a, b)
}

/// y = a * b.
pub fn mul(cx: &mut Recorder<'_>, _: Mul, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 2..=2)?;
    let (a, b) = (cx.summed(inputs[0])?, cx.summed(inputs[1])?);
    let (a, b) = cx.aligned(a, b)?;
    binary(cx, BinaryOp::Mul, a, b)
}

fn binary(cx: &mut Recorder<'_>, op: BinaryOp, a: ValueId, b: ValueId) -> Result<Results> {
    let (va, vb) = (cx.value(a).clone(), cx.value(b).clone());
    same_shape(cx, &va, &vb)?;
    let needs_grad = cx.needs_grad(&[a, b]);
    let y = cx.fresh("sum", va.dims.clone(), va.seq, needs_grad);
    cx.g.values[y.0 as usize].partial = va.partial;
    let product = matches!(op, BinaryOp::Mul);
    let ld_y = cx.value(y).ld;
    let kernel = Binary { op, rows: va.rows, cols: va.cols, ld_a: va.ld, ld_b: vb.ld, ld_y, acc: false };
    cx.g.emit(kernel, &[a, b], &[y], &[], &[]);
    if product {
        cx.node(MulGrad { a, b, y }, &[y]);
    } else {
        cx.node(AddGrad { a, b, y }, &[y]);
    }
    Ok(one(y))
}

struct AddGrad {
    a: ValueId,
    b: ValueId,
    y: ValueId,
}

impl Backward for AddGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        bw.pass(self.a, dy);
        bw.pass(self.b, dy);
        Ok(())
    }
}

struct MulGrad {
    a: ValueId,
    b: ValueId,
    y: ValueId,
}

impl Backward for MulGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        for (to, other) in [(self.a, self.b), (self.b, self.a)] {
            let Some(dx) = bw.dx(to, false) else { continue };
            let v = bw.value(other).clone();
            let kernel = Binary {
                op: BinaryOp::Mul,
                rows: v.rows,
                cols: v.cols,
                ld_a: bw.ld(dy),
                ld_b: v.ld,
                ld_y: bw.ld(dx.value),
                acc: dx.acc,
            };
            bw.emit(kernel, &[dy, other], &[dx.value], &[], &[]);
        }
        Ok(())
    }
}

/// y = x * by.
pub fn scale(cx: &mut Recorder<'_>, attrs: Scale, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 1..=1)?;
    let x = inputs[0];
    let v = cx.value(x).clone();
    let needs_grad = cx.needs_grad(&[x]);
    let y = cx.fresh("scaled", v.dims.clone(), v.seq, needs_grad);
    cx.g.values[y.0 as usize].partial = v.partial;
    let kernel = scaling(&v, v.ld, cx.value(y).ld, attrs.by, false);
    cx.g.emit(kernel, &[x], &[y], &[], &[]);
    cx.node(ScaleGrad { x, y, by: attrs.by }, &[y]);
    Ok(one(y))
}

fn scaling(v: &Value, ld_x: usize, ld_y: usize, factor: f64, acc: bool) -> ScaleKernel {
    ScaleKernel { rows: v.rows, cols: v.cols, ld_x, ld_y, factor, scalar: false, acc, in_place: false }
}

struct ScaleGrad {
    x: ValueId,
    y: ValueId,
    by: f64,
}

impl Backward for ScaleGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let Some(dx) = bw.dx(self.x, false) else { return Ok(()) };
        let v = bw.value(self.x).clone();
        let kernel = scaling(&v, bw.ld(dy), bw.ld(dx.value), self.by, dx.acc);
        bw.emit(kernel, &[dy], &[dx.value], &[], &[]);
        Ok(())
    }
}
