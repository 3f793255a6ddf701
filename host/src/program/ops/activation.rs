//! Pointwise functions and SwiGLU, each with an optional weight per row.
//!
//! Placement: rows and channels as they come (partial sums are taken first), the row weight comes to the rows of x. With
//! channels spread the gradient of the row weight is a partial sum. Axis states: none of their own; every function here is
//! zero at zero, so masked channels stay zero.

use super::row_scale::{self, row_weight};
use super::{HostOp, Results, Typed, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::dims::Dim;
use crate::program::graph::ValueId;
use crate::program::recorder::Recorder;
use gantry_kernels::cpu::activation::{Activation as Forward, ActivationBackward, ActivationKind};
use gantry_kernels::cpu::swiglu::{SwiGlu as GatedForward, SwiGluBackward};
use gantry_plugin_api::ops::{Act, Activation, RowScale, SwiGlu};

pub static OPS: &[&dyn HostOp] = &[
    &Typed(activation as fn(&mut Recorder<'_>, Activation, &[ValueId]) -> Result<Results>),
    &Typed(swiglu as fn(&mut Recorder<'_>, SwiGlu, &[ValueId]) -> Result<Results>),
];

/// The kernel's name for a function; none for the identity.
fn kind(cx: &Recorder<'_>, act: Act) -> Result<Option<ActivationKind>> {
    Ok(Some(match act {
        Act::Identity => return Ok(None),
        Act::Silu => ActivationKind::Silu,
        Act::Relu2 => ActivationKind::Relu2,
        Act::GeluTanh => ActivationKind::GeluTanh,
        Act::Relu => ActivationKind::Relu,
        Act::LeakyRelu => ActivationKind::LeakyRelu(0.1),
        other => return Err(cx.error(format!("this host does not know the function {other:?}"))),
    }))
}

/// x with its terms summed, and the row weight at its rows.
fn operands(cx: &mut Recorder<'_>, inputs: &[ValueId]) -> Result<(ValueId, Option<ValueId>)> {
    cx.arity(inputs, 1..=2)?;
    let x = cx.summed(inputs[0])?;
    let w = match inputs.get(1) {
        Some(&w) => Some(row_weight(cx, x, w)?),
        None => None,
    };
    Ok((x, w))
}

/// Inputs: x [.., channels], optional row weight [..]. Output as x.
pub fn activation(cx: &mut Recorder<'_>, attrs: Activation, inputs: &[ValueId]) -> Result<Results> {
    let (x, w) = operands(cx, inputs)?;
    let Some(kind) = kind(cx, attrs.act)? else {
        return match w {
            Some(w) => row_scale::record(cx, RowScale {}, &[x, w]),
            None => Ok(one(x)),
        };
    };
    let v = cx.value(x).clone();
    let ins: Vec<ValueId> = [x].into_iter().chain(w).collect();
    let needs_grad = cx.needs_grad(&ins);
    let y = cx.fresh("activation", v.dims.clone(), v.seq, needs_grad);
    let (ld_y, row_weight) = (cx.value(y).ld, w.is_some());
    cx.g.emit(Forward { kind, rows: v.rows, cols: v.cols, ld_x: v.ld, ld_y, row_weight }, &ins, &[y], &[], &[]);
    cx.node(ActivationGrad { kind, x, w, y }, &[y]);
    Ok(one(y))
}

struct ActivationGrad {
    kind: ActivationKind,
    x: ValueId,
    w: Option<ValueId>,
    y: ValueId,
}

impl Backward for ActivationGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let x = bw.value(self.x).clone();
        let dw = self.w.map(|w| bw.dx_or_scratch(w, x.last().sharded()));
        let dx = bw.dx_or_scratch(self.x, false);
        let kernel = ActivationBackward {
            kind: self.kind,
            rows: x.rows,
            cols: x.cols,
            ld_dy: bw.ld(dy),
            ld_x: x.ld,
            ld_dx: bw.ld(dx.value),
            row_weight: dw.is_some(),
            acc: dx.acc,
            acc_weight: dw.is_some_and(|dw| dw.acc),
        };
        let ins: Vec<ValueId> = [dy, self.x].into_iter().chain(self.w).collect();
        let outs: Vec<ValueId> = [dx.value].into_iter().chain(dw.map(|dw| dw.value)).collect();
        bw.emit(kernel, &ins, &outs, &[], &[]);
        Ok(())
    }
}

/// Inputs: x [.., gate | up], optional row weight [..]. Output [.., channels of the gate].
pub fn swiglu(cx: &mut Recorder<'_>, _: SwiGlu, inputs: &[ValueId]) -> Result<Results> {
    let (x, w) = operands(cx, inputs)?;
    let v = cx.value(x).clone();
    let [gate, up] = v.last().segs.as_slice() else {
        return Err(cx.error(format!("takes two segments [gate | up], got {}", v.last())));
    };
    let (gate, up) = (Dim::of(&gate.name, [gate.clone()]), Dim::of(&up.name, [up.clone()]));
    cx.same_dim("gate and up", &gate, &up)?;
    let cols = gate.local();
    let mut dims = v.dims.clone();
    dims.pop();
    dims.push(gate);
    let ins: Vec<ValueId> = [x].into_iter().chain(w).collect();
    let needs_grad = cx.needs_grad(&ins);
    let y = cx.fresh("swiglu", dims, v.seq, needs_grad);
    let (ld_y, row_weight) = (cx.value(y).ld, w.is_some());
    cx.g.emit(GatedForward { rows: v.rows, cols, ld_x: v.ld, ld_y, row_weight }, &ins, &[y], &[], &[]);
    cx.node(SwiGluGrad { x, w, y, cols }, &[y]);
    Ok(one(y))
}

struct SwiGluGrad {
    x: ValueId,
    w: Option<ValueId>,
    y: ValueId,
    cols: usize,
}

impl Backward for SwiGluGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let x = bw.value(self.x).clone();
        let dw = self.w.map(|w| bw.dx_or_scratch(w, x.last().sharded()));
        let dx = bw.dx_or_scratch(self.x, false);
        let kernel = SwiGluBackward {
            rows: x.rows,
            cols: self.cols,
            ld_dy: bw.ld(dy),
            ld_x: x.ld,
            ld_dx: bw.ld(dx.value),
            row_weight: dw.is_some(),
            acc: dx.acc,
            acc_weight: dw.is_some_and(|dw| dw.acc),
        };
        let ins: Vec<ValueId> = [dy, self.x].into_iter().chain(self.w).collect();
        let outs: Vec<ValueId> = [dx.value].into_iter().chain(dw.map(|dw| dw.value)).collect();
        bw.emit(kernel, &ins, &outs, &[], &[]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Grid;
    use crate::program::ops::{linear, shape};
    use crate::program::testing::{Input, OpTest, axis};
    use gantry_plugin_api::plan::{AxisSetting, AxisState, Layout};

    /// An MLP whose hidden channels are spread over tp, with the function given by `act`.
    fn mlp(act: Option<Act>, weighted: bool, settings: Vec<AxisSetting>) -> OpTest {
        let hidden = || Layout::axis("hidden", 1);
        let ffn = || Layout::axis("ffn", 1);
        let fc1 = if act.is_some() { ffn() } else { Layout::seq([("gate", ffn()), ("up", ffn())]) };
        OpTest {
            axes: vec![axis("hidden", 4, false), axis("ffn", 6, true)],
            params: vec![("fc1", vec![fc1, hidden()]), ("fc2", vec![hidden(), ffn()])],
            inputs: vec![
                Input { name: "x", rows: 4, channels: hidden(), spread: true },
                Input { name: "w", rows: 4, channels: Layout::Fixed(1), spread: true },
            ],
            ints: vec![],
            tokens: 4,
            settings,
            state_grads: false,
            labels: None,
            forward: Box::new(move |cx, inputs| {
                let (fc1, fc2) = (cx.param_value(0)?, cx.param_value(1)?);
                let h = linear::record(cx, Default::default(), &[inputs[0], fc1])?[0];
                let operands: Vec<ValueId> = [h].into_iter().chain(weighted.then_some(inputs[1])).collect();
                let h = match act {
                    Some(act) => activation(cx, Activation { act }, &operands)?[0],
                    None => swiglu(cx, SwiGlu {}, &operands)?[0],
                };
                Ok(vec![linear::record(cx, Default::default(), &[h, fc2])?[0]])
            }),
        }
    }

    #[test]
    fn every_function_over_spread_channels() {
        for act in [Act::Identity, Act::Silu, Act::Relu2, Act::GeluTanh, Act::Relu, Act::LeakyRelu] {
            for weighted in [false, true] {
                mlp(Some(act), weighted, vec![]).check();
            }
        }
    }

    #[test]
    fn swiglu_over_spread_channels_full_and_sliced() {
        for weighted in [false, true] {
            mlp(None, weighted, vec![]).check();
            let slice = AxisSetting { axis: "ffn".into(), layer: None, state: AxisState::Slice { n: 4 } };
            mlp(None, weighted, vec![slice]).check();
        }
    }

    /// Both halves of one product go through functions as views, and their gradients meet in one buffer.
    #[test]
    fn views_of_a_split() {
        let mut test = mlp(None, false, vec![]);
        test.forward = Box::new(|cx, inputs| {
            let (fc1, fc2) = (cx.param_value(0)?, cx.param_value(1)?);
            let h = linear::record(cx, Default::default(), &[inputs[0], fc1])?[0];
            let parts = shape::split(cx, Default::default(), &[h])?;
            let a = activation(cx, Activation { act: Act::Silu }, &[parts[0]])?[0];
            let b = activation(cx, Activation { act: Act::GeluTanh }, &[parts[1], inputs[1]])?[0];
            let y = linear::record(cx, Default::default(), &[a, fc2])?[0];
            Ok(vec![y, linear::record(cx, Default::default(), &[b, fc2])?[0]])
        });
        test.check();
    }

    #[test]
    fn one_segment_is_no_gate_and_up() {
        let mut test = mlp(None, false, vec![]);
        test.forward = Box::new(|cx, inputs| {
            let error = swiglu(cx, SwiGlu {}, &[inputs[0]]).unwrap_err().to_string();
            assert!(error.contains("gate | up") && error.contains("hidden 4"), "{error}");
            Ok(vec![])
        });
        test.run(Grid::SINGLE);
    }
}
