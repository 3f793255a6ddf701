//! y = (x - mean) / sqrt(var + eps) * w + b, with the biased variance.
//!
//! Placement: rows as they come (partial sums are taken first); the normed dimension must not be spread; with rows spread
//! the gradients of w and b are partial sums. Axis states: a slice norms its own width; a hard choice norms the kept
//! channels only and gives zeros for the others, which is exactly the norm of the slice. A mean over channels that are
//! partly kept has no such meaning, so soft states and gains are refused.

use super::{HostOp, Results, Typed, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::dims::Dim;
use crate::program::graph::ValueId;
use crate::program::recorder::Recorder;
use crate::program::states::StateKey;
use gantry_kernels::cpu::layer_norm::{LayerNorm as Forward, LayerNormBackward};
use gantry_plugin_api::ops::LayerNorm;

pub static OPS: &[&dyn HostOp] = &[&Typed(record as fn(&mut Recorder<'_>, LayerNorm, &[ValueId]) -> Result<Results>)];

/// Inputs: x [.., channels], weight [channels], bias [channels].
pub fn record(cx: &mut Recorder<'_>, attrs: LayerNorm, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 3..=3)?;
    let (x, w, b) = (cx.summed(inputs[0])?, inputs[1], inputs[2]);
    let v = cx.value(x).clone();
    let channels = v.last().clone();
    if channels.sharded() {
        return Err(cx.error(format!("cannot norm over {channels}: each rank holds a part; norm before the split")));
    }
    for (what, param) in [("channels of x and the weight", w), ("channels of x and the bias", b)] {
        let value = cx.value(param);
        if value.param.is_none() || value.dims.len() != 1 {
            return Err(cx.error(format!("weight and bias must be parameters [channels], not {}", value.text())));
        }
        cx.same_dim(what, &channels, value.last())?;
        if !cx.blocks(param, 0).is_dense() {
            return Err(cx.error(format!("cannot norm over slices of several segments of {channels}")));
        }
    }
    let active = active(cx, &channels)?;
    let needs_grad = cx.needs_grad(&[x, w, b]);
    let y = cx.fresh("layer_norm", v.dims.clone(), v.seq, needs_grad);
    let mean = cx.fresh("mean", [Dim::plain("rows", v.rows)], false, false);
    let rstd = cx.fresh("rstd", [Dim::plain("rows", v.rows)], false, false);
    let ld_y = cx.value(y).ld;
    let kernel = Forward { tokens: v.rows, cols: v.cols, active, eps: attrs.eps, ld_x: v.ld, ld_y };
    cx.g.emit(kernel, &[x, w, b], &[y, mean, rstd], &[], &[]);
    cx.node(LayerNormGrad { x, w, b, y, mean, rstd, active }, &[y]);
    Ok(one(y))
}

/// Leading channels that count.
fn active(cx: &Recorder<'_>, channels: &Dim) -> Result<usize> {
    let mut masked = channels.segs.iter().filter_map(|seg| {
        let state = cx.cx.states.get(seg.axis?)?;
        (!matches!(state, StateKey::Slice { .. })).then_some((seg, state))
    });
    match (masked.next(), channels.segs.len()) {
        (None, _) => Ok(channels.local()),
        (Some((seg, StateKey::Hard { n, gain: false })), 1) => Ok(n * seg.unit),
        (Some((seg, state)), 1) => Err(cx.error(format!(
            "layer norm over {} takes full, sliced or hard states without gain, not {state:?}",
            seg.name
        ))),
        (Some((seg, _)), _) => {
            Err(cx.error(format!("cannot norm over several segments of which {} is masked", seg.name)))
        }
    }
}

struct LayerNormGrad {
    x: ValueId,
    w: ValueId,
    b: ValueId,
    y: ValueId,
    mean: ValueId,
    rstd: ValueId,
    active: usize,
}

impl Backward for LayerNormGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let x = bw.value(self.x).clone();
        let dw = bw.param_grad_or_scratch(self.w, x.seq)?;
        let db = bw.param_grad_or_scratch(self.b, x.seq)?;
        let dx = bw.dx_or_scratch(self.x, false);
        let kernel = LayerNormBackward {
            tokens: x.rows,
            cols: x.cols,
            active: self.active,
            ld_dy: bw.ld(dy),
            ld_x: x.ld,
            ld_dx: bw.ld(dx.value),
            acc: dx.acc,
        };
        bw.emit(kernel, &[dy, self.x, self.mean, self.rstd, self.w], &[dx.value, dw, db], &[], &[]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Grid;
    use crate::program::ops::arith;
    use crate::program::testing::{Input, OpTest, axis};
    use gantry_plugin_api::plan::{AxisSetting, AxisState, Layout};

    fn state(state: AxisState) -> Vec<AxisSetting> {
        vec![AxisSetting { axis: "hidden".into(), layer: None, state }]
    }

    /// A norm with a residual around it, so that the gradient of x adds up.
    fn test(settings: Vec<AxisSetting>) -> OpTest {
        OpTest {
            axes: vec![axis("hidden", 6, false)],
            params: vec![("weight", vec![Layout::axis("hidden", 1)]), ("bias", vec![Layout::axis("hidden", 1)])],
            inputs: vec![Input { name: "x", rows: 4, channels: Layout::axis("hidden", 1), spread: true }],
            ints: vec![],
            tokens: 4,
            settings,
            state_grads: false,
            labels: None,
            forward: Box::new(|cx, inputs| {
                let (w, b) = (cx.param_value(0)?, cx.param_value(1)?);
                let y = record(cx, LayerNorm { eps: 0.1 }, &[inputs[0], w, b])?[0];
                Ok(vec![arith::add(cx, Default::default(), &[inputs[0], y])?[0], y])
            }),
        }
    }

    #[test]
    fn full_hard_and_sliced() {
        test(vec![]).check();
        test(state(AxisState::Hard { n: 4, gain: 1.0 })).check();
        test(state(AxisState::Slice { n: 4 })).check();
    }

    #[test]
    fn hard_gives_the_slice_and_zeros() {
        let mut hard = test(state(AxisState::Hard { n: 4, gain: 1.0 }));
        hard.forward = Box::new(|cx, inputs| {
            let (w, b) = (cx.param_value(0)?, cx.param_value(1)?);
            Ok(vec![record(cx, LayerNorm { eps: 0.1 }, &[inputs[0], w, b])?[0]])
        });
        let hard = hard.run(Grid::SINGLE);
        assert!((0..24).all(|i| (hard["y0"][i] == 0.0) == (i % 6 >= 4)));
        assert!((0..24).all(|i| (hard["d.x"][i] == 0.0) == (i % 6 >= 4)));
        assert!((0..6).all(|i| (hard["d.bias"][i] == 0.0) == (i >= 4)));
    }

    #[test]
    fn soft_is_refused() {
        let soft = AxisState::Soft { choices: vec![3, 6], p: vec![0.4, 0.6] };
        let mut test = test(state(soft));
        test.forward = Box::new(|cx, inputs| {
            let (w, b) = (cx.param_value(0)?, cx.param_value(1)?);
            let error = record(cx, LayerNorm { eps: 0.1 }, &[inputs[0], w, b]).unwrap_err().to_string();
            assert!(error.contains("layer norm over hidden"), "{error}");
            Ok(vec![])
        });
        test.run(Grid::SINGLE);
    }
}
