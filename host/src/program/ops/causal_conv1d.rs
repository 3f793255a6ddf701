//! y[t, c] = f(bias[c] + sum_k weight[c, width - 1 - k] x[t - k, c]): depthwise, causal, within each sequence.
//!
//! Placement: all rows on every rank; channels as they come, so nothing is a partial sum. Axis states: sliced channels are
//! blocks of the parameters' rows; a masked channel's result is f of its bias and is masked after the operator.

use super::heads::vector_param;
use super::{HostOp, Results, Typed, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::graph::ValueId;
use crate::program::recorder::Recorder;
use gantry_kernels::blocks::Blocks;
use gantry_kernels::cpu::conv1d::{Conv1d, Conv1dBackward, ConvActivation, MAX_WIDTH};
use gantry_plugin_api::ops::{Act, CausalConv1d};

pub static OPS: &[&dyn HostOp] =
    &[&Typed(record as fn(&mut Recorder<'_>, CausalConv1d, &[ValueId]) -> Result<Results>)];

/// Inputs: x [tokens, channels], weight [channels, width], bias [channels]. Output [tokens, channels].
pub fn record(cx: &mut Recorder<'_>, attrs: CausalConv1d, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 3..=3)?;
    let (w, bias) = (inputs[1], inputs[2]);
    let activation = match attrs.act {
        Act::Identity => ConvActivation::None,
        Act::Silu => ConvActivation::Silu,
        other => return Err(cx.error(format!("act is {other:?}; a convolution takes identity or silu"))),
    };
    let x = cx.replicated(inputs[0])?;
    let v = cx.value(x).clone();
    let channels = v.last().clone();
    let weight = cx.value(w).clone();
    if weight.param.is_none() || weight.dims.len() != 2 || weight.dims[1].sharded() {
        return Err(cx.error(format!("the weight must be a parameter [channels, width], not {}", weight.text())));
    }
    let width = weight.dims[1].size();
    if !(1..=MAX_WIDTH).contains(&width) || weight.ld != width {
        return Err(
            cx.error(format!("the weight {} is {width} taps wide; 1 to {MAX_WIDTH} are possible", weight.text()))
        );
    }
    cx.same_dim("channels of x and rows of the weight", &channels, &weight.dims[0])?;
    vector_param(cx, "the bias", bias, &channels)?;

    let cu_seqlens = cx.cu_seqlens()?;
    let rows = cx.blocks(w, 0);
    let needs_grad = cx.needs_grad(&[x, w, bias]);
    let y = cx.fresh("causal_conv1d", v.dims.clone(), false, needs_grad);
    let ld_y = cx.value(y).ld;
    let kernel = Conv1d { tokens: v.rows, channels: rows.clone(), width, activation, ld_x: v.ld, ld_y };
    cx.g.emit(kernel, &[x, w, bias], &[y], &[cu_seqlens], &[]);
    cx.node(ConvGrad { x, w, bias, y, cu_seqlens, rows, width, activation }, &[y]);
    Ok(one(y))
}

struct ConvGrad {
    x: ValueId,
    w: ValueId,
    bias: ValueId,
    y: ValueId,
    cu_seqlens: ValueId,
    rows: Blocks,
    width: usize,
    activation: ConvActivation,
}

impl Backward for ConvGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let dw = bw.param_grad_or_scratch(self.w, false)?;
        let db = bw.param_grad_or_scratch(self.bias, false)?;
        let dx = bw.dx_or_scratch(self.x, false);
        let x = bw.value(self.x);
        let kernel = Conv1dBackward {
            tokens: x.rows,
            channels: self.rows.clone(),
            width: self.width,
            activation: self.activation,
            ld_x: x.ld,
            ld_dy: bw.ld(dy),
            ld_dx: bw.ld(dx.value),
            acc_dx: dx.acc,
        };
        bw.emit(kernel, &[self.x, self.w, self.bias, dy], &[dx.value, dw, db], &[self.cu_seqlens], &[]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Grid;
    use crate::program::ops::shape;
    use crate::program::testing::{Input, OpTest, axis};
    use gantry_plugin_api::plan::{AxisSetting, AxisState, Layout};
    use rstest::rstest;

    const CU_SEQLENS: [i32; 7] = [0, 1, 3, 3, 8, 12, 12];

    fn channels(spread: bool, act: Act, settings: Vec<AxisSetting>) -> OpTest {
        let parts = || Layout::seq([("x", Layout::axis("heads", 3)), ("B", Layout::axis("groups", 2))]);
        OpTest {
            axes: vec![axis("heads", 4, spread), axis("groups", 2, spread)],
            params: vec![("weight", vec![parts(), Layout::Fixed(4)]), ("bias", vec![parts()])],
            inputs: vec![Input {
                name: "zx",
                rows: 12,
                channels: Layout::seq([
                    ("z", Layout::axis("heads", 1)),
                    ("x", Layout::axis("heads", 3)),
                    ("B", Layout::axis("groups", 2)),
                ]),
                spread: !spread,
            }],
            ints: vec![("cu_seqlens", CU_SEQLENS.to_vec())],
            tokens: 12,
            settings,
            state_grads: false,
            labels: None,
            forward: Box::new(move |cx, inputs| {
                let parts = shape::split(cx, Default::default(), inputs)?;
                let x = shape::concat(cx, Default::default(), &parts[1..])?[0];
                let (w, b) = (cx.param_value(0)?, cx.param_value(1)?);
                let y = record(cx, CausalConv1d { act }, &[x, w, b])?[0];
                Ok(vec![y, parts[0]])
            }),
        }
    }

    #[rstest]
    fn gradients_and_parity(#[values(true, false)] spread: bool, #[values(Act::Silu, Act::Identity)] act: Act) {
        channels(spread, act, vec![]).check();
    }

    #[test]
    fn a_slice_uses_a_prefix_of_each_segment() {
        let n = AxisSetting { axis: "heads".into(), layer: None, state: AxisState::Slice { n: 2 } };
        channels(true, Act::Silu, vec![n]).check();
    }

    #[test]
    fn other_functions_are_refused() {
        let mut test = channels(true, Act::Silu, vec![]);
        test.forward = Box::new(|cx, inputs| {
            let (w, b) = (cx.param_value(0)?, cx.param_value(1)?);
            let error = record(cx, CausalConv1d { act: Act::Relu }, &[inputs[0], w, b]).unwrap_err().to_string();
            assert!(error.contains("takes identity or silu"), "{error}");
            let error = record(cx, CausalConv1d::default(), &[inputs[0], w, b]).unwrap_err().to_string();
            assert!(error.contains("must be made of the same axes"), "{error}");
            Ok(vec![inputs[0]])
        });
        test.run(Grid::SINGLE);
    }
}
