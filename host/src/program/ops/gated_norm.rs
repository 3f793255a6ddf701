//! RMS norm with a SiLU gate, in the groups of the heads: norm(y * silu(z)) * w, or norm(y) * silu(z) * w.
//!
//! Placement: rows as they come (partial sums are taken first); heads may be spread as long as no group is cut; with rows
//! spread the gradient of w is a partial sum. Axis states: over masked heads the mean still divides by the group's full
//! width, eps becomes eps * e and the result is scaled by s, which for a hard choice is exactly the norm of the slice
//! because every group loses its share of heads; over sliced heads the width is the slice's.

use super::heads::{apart, heads_of, local_groups, settle, vector_param};
use super::mask::norm_mask;
use super::{HostOp, Results, Typed, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::dims::Dim;
use crate::program::graph::ValueId;
use crate::program::recorder::Recorder;
use gantry_kernels::cpu::gated_norm::{GatedNorm as Forward, GatedNormBackward, GatedNormShape, Grouping};
use gantry_plugin_api::ops::GatedNorm;

pub static OPS: &[&dyn HostOp] = &[&Typed(record as fn(&mut Recorder<'_>, GatedNorm, &[ValueId]) -> Result<Results>)];

/// Inputs: y, z [tokens, heads x head_dim], weight [heads x head_dim]. Output like y.
pub fn record(cx: &mut Recorder<'_>, attrs: GatedNorm, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 3..=3)?;
    let (y, z) = (cx.summed(inputs[0])?, cx.summed(inputs[1])?);
    let (y, z) = cx.aligned(y, z)?;
    let w = inputs[2];
    let (v, gate) = (cx.value(y).clone(), cx.value(z).clone());
    cx.same_dim("channels of y and of the gate", v.last(), gate.last())?;
    if v.rows != gate.rows {
        return Err(cx.error(format!("{} and {} have different tokens", v.text(), gate.text())));
    }
    vector_param(cx, "the weight", w, v.last())?;
    let heads = heads_of(cx, "y", v.last())?;
    let groups = local_groups(cx, heads)?;
    let all = groups * heads.parts;
    if !heads.units.is_multiple_of(all) {
        return Err(cx.error(format!(
            "{} heads in {all} groups: the groups would differ in width; keep a multiple of {all} heads",
            heads.units
        )));
    }
    let group_width = heads.units / all * heads.unit;
    let mask = norm_mask(cx, v.last())?;
    let shape = GatedNormShape {
        tokens: v.rows,
        weight: cx.blocks(w, 0),
        groups,
        grouping: Grouping::Interleaved { head_dim: heads.unit },
        group_width,
        gate_first: !attrs.norm_before_gate,
        has_scale: mask.is_some(),
    };
    let needs_grad = cx.needs_grad(&[y, z, w]) || mask.is_some_and(|m| cx.needs_grad(&[m.s]));
    let out = cx.fresh("gated_norm", v.dims.clone(), v.seq, needs_grad);
    let rstd = cx.fresh("rstd", [Dim::plain("rows", v.rows), Dim::plain("groups", groups)], false, false);
    let kernel = Forward {
        shape: shape.clone(),
        eps: attrs.eps,
        has_eps_scale: mask.is_some(),
        ld_y: v.ld,
        ld_z: gate.ld,
        ld_out: cx.value(out).ld,
    };
    let mut ins = vec![y, z, w];
    ins.extend(mask.iter().flat_map(|m| [m.e, m.s]));
    cx.g.emit(kernel, &ins, &[out, rstd], &[], &[]);
    let partial_scale = v.seq || heads.sharded();
    cx.node(GatedNormGrad { y, z, w, out, rstd, s: mask.map(|m| m.s), partial_scale, shape }, &[out]);
    Ok(one(out))
}

struct GatedNormGrad {
    y: ValueId,
    z: ValueId,
    w: ValueId,
    out: ValueId,
    rstd: ValueId,
    s: Option<ValueId>,
    /// The gradient of s is this rank's term of a sum: it sees its own rows or heads.
    partial_scale: bool,
    shape: GatedNormShape,
}

impl Backward for GatedNormGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dout) = bw.dy(self.out) else { return Ok(()) };
        let seq = bw.value(self.y).seq;
        let dw = bw.param_grad_or_scratch(self.w, seq)?;
        let ds = self.s.map(|s| bw.dx_adding_or_scratch(s, self.partial_scale));
        let dy = bw.dx_or_scratch(self.y, false);
        let target = bw.dx_or_scratch(self.z, false);
        let dz = apart(bw, dy, target);
        let kernel = GatedNormBackward {
            shape: self.shape.clone(),
            ld_y: bw.ld(self.y),
            ld_z: bw.ld(self.z),
            ld_dout: bw.ld(dout),
            ld_dy: bw.ld(dy.value),
            ld_dz: bw.ld(dz.value),
            acc_dy: dy.acc,
            acc_dz: dz.acc,
        };
        let ins: Vec<ValueId> = [self.y, self.z, self.w, self.rstd, dout].into_iter().chain(self.s).collect();
        let outs: Vec<ValueId> = [dy.value, dz.value, dw].into_iter().chain(ds).collect();
        bw.emit(kernel, &ins, &outs, &[], &[]);
        settle(bw, dz, target);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Grid;
    use crate::program::ops::shape;
    use crate::program::testing::{Input, OpTest, axis};
    use gantry_plugin_api::plan::{Axis, AxisSetting, AxisState, Layout};
    use rstest::rstest;

    #[derive(Clone, Copy, PartialEq)]
    enum Inputs {
        Two,
        /// Views of one tensor.
        Views,
        /// The gate is y itself.
        Same,
    }

    fn norm(attrs: GatedNorm, tp: bool, state: Option<AxisState>, given: Inputs) -> OpTest {
        let heads = || Layout::axis("heads", 2);
        let input = |name, channels| Input { name, rows: 4, channels, spread: !tp };
        OpTest {
            axes: vec![
                Axis { group: Some("groups".into()), ..axis("heads", 8, tp) },
                Axis { elastic: false, ..axis("groups", 2, tp) },
            ],
            params: vec![("weight", vec![heads()])],
            inputs: match given {
                Inputs::Two => vec![input("y", heads()), input("z", heads())],
                Inputs::Views => vec![input("yz", Layout::seq([("z", heads()), ("y", heads())]))],
                Inputs::Same => vec![input("y", heads())],
            },
            ints: vec![],
            tokens: 4,
            state_grads: state.is_some(),
            labels: None,
            settings: state.map(|state| AxisSetting { axis: "heads".into(), layer: None, state }).into_iter().collect(),
            forward: Box::new(move |cx, inputs| {
                let w = cx.param_value(0)?;
                let (y, z) = match given {
                    Inputs::Two => (inputs[0], inputs[1]),
                    Inputs::Same => (inputs[0], inputs[0]),
                    Inputs::Views => {
                        let parts = shape::split(cx, Default::default(), inputs)?;
                        (parts[1], parts[0])
                    }
                };
                Ok(vec![record(cx, attrs.clone(), &[y, z, w])?[0]])
            }),
        }
    }

    #[rstest]
    fn gradients_and_parity(
        #[values(true, false)] tp: bool,
        #[values(true, false)] norm_before_gate: bool,
        #[values(Inputs::Two, Inputs::Views, Inputs::Same)] given: Inputs,
    ) {
        norm(GatedNorm { eps: 0.1, norm_before_gate }, tp, None, given).check();
    }

    #[rstest]
    #[case(AxisState::Slice { n: 4 })]
    #[case(AxisState::Hard { n: 4, gain: 0.7 })]
    #[case(AxisState::Soft { choices: vec![8, 6, 2], p: vec![0.5, 0.3, 0.2] })]
    fn states(#[case] state: AxisState, #[values(true, false)] tp: bool) {
        norm(GatedNorm { eps: 0.1, norm_before_gate: false }, tp, Some(state), Inputs::Two).check_parity();
    }

    #[test]
    fn groups_of_different_width_are_refused() {
        let mut test = norm(GatedNorm::default(), false, Some(AxisState::Slice { n: 5 }), Inputs::Two);
        test.forward = Box::new(|cx, inputs| {
            let w = cx.param_value(0)?;
            let error = record(cx, GatedNorm::default(), &[inputs[0], inputs[1], w]).unwrap_err().to_string();
            assert!(error.contains("keep a multiple of 2 heads"), "{error}");
            Ok(vec![inputs[0]])
        });
        test.run(Grid::SINGLE);
    }
}
