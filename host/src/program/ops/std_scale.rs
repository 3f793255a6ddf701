//! Division of each row of the last dimension by its standard deviation.
//!
//! Placement: rows as they come (partial sums are taken first); the last dimension must be whole. Axis states: a sliced
//! dimension has the deviation of the slice; under a mask the operator would take the zeros for numbers, so a masked
//! dimension is refused.

use super::rows::{matrix, row_stride, whole_channels};
use super::{HostOp, Results, Typed, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::dims::Dim;
use crate::program::graph::ValueId;
use crate::program::recorder::Recorder;
use crate::program::states::StateKey;
use gantry_kernels::cpu::reduce::{StdScale as Forward, StdScaleBackward};
use gantry_plugin_api::ops::StdScale;

pub static OPS: &[&dyn HostOp] = &[&Typed(record as fn(&mut Recorder<'_>, StdScale, &[ValueId]) -> Result<Results>)];

/// Input: x [.., C]. Output like it: x / sqrt(sum_c (x - mean)^2 / (C - 1)); rows without deviation as they are.
pub fn record(cx: &mut Recorder<'_>, _: StdScale, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 1..=1)?;
    let x = cx.summed(inputs[0])?;
    let v = cx.value(x).clone();
    whole_channels(cx, v.last(), "standard deviation")?;
    let state = |axis| cx.cx.states.get(axis);
    let masked = |axis| matches!(state(axis), Some(StateKey::Soft { .. } | StateKey::Hard { .. }));
    if let Some(seg) = v.last().segs.iter().find(|seg| seg.axis.is_some_and(masked)) {
        return Err(cx.error(format!("cannot take a standard deviation over {}, which is masked", seg.name)));
    }
    let (x, rows, cols, ld_x) = matrix(cx, x);
    let needs_grad = cx.needs_grad(&[x]);
    let y = cx.fresh("std_scale", v.dims.clone(), v.seq, needs_grad);
    let sigma = cx.fresh("std_scale.sigma", [Dim::plain("rows", rows)], false, false);
    cx.g.emit(Forward { rows, cols, ld_x, ld_y: cols }, &[x], &[y, sigma], &[], &[]);
    cx.node(Grad { x, y, sigma, rows, cols }, &[y]);
    Ok(one(y))
}

struct Grad {
    x: ValueId,
    y: ValueId,
    sigma: ValueId,
    rows: usize,
    cols: usize,
}

impl Backward for Grad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let Some(dx) = bw.dx(self.x, false) else { return Ok(()) };
        let kernel = StdScaleBackward {
            rows: self.rows,
            cols: self.cols,
            ld_y: self.cols,
            ld_dy: row_stride(bw, dy, self.cols),
            ld_dx: row_stride(bw, dx.value, self.cols),
            acc: dx.acc,
        };
        bw.emit(kernel, &[self.y, self.sigma, dy], &[dx.value], &[], &[]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Grid;
    use crate::program::ops::linear;
    use crate::program::ops::shape::{slice, unflatten};
    use crate::program::testing::{Input, OpTest, axis};
    use gantry_plugin_api::ops::{Linear, Slice};
    use gantry_plugin_api::plan::{AxisSetting, AxisState, Layout};

    fn test(forward: impl Fn(&mut Recorder<'_>, &[ValueId]) -> Result<Vec<ValueId>> + Sync + 'static) -> OpTest {
        OpTest {
            axes: vec![axis("c", 10, false), axis("heads", 4, true)],
            params: vec![("w", vec![Layout::axis("c", 1), Layout::axis("heads", 3)])],
            inputs: vec![
                Input { name: "x", rows: 4, channels: Layout::axis("c", 1), spread: true },
                Input { name: "h", rows: 4, channels: Layout::axis("heads", 3), spread: false },
            ],
            ints: vec![],
            tokens: 4,
            settings: vec![],
            state_grads: false,
            labels: None,
            forward: Box::new(forward),
        }
    }

    #[test]
    fn rows_views_and_unflattened_units() {
        test(|cx, inputs| {
            let dim = Dim::plain("classes", cx.value(inputs[0]).cols);
            let whole = cx.view("plain", inputs[0], 0, dim);
            let view = slice(cx, Slice { start: 2, len: 5 }, &[whole])?[0];
            let heads = unflatten(cx, inputs[1], &["heads", "position"])?;
            [inputs[0], view, heads].into_iter().map(|x| Ok(record(cx, StdScale {}, &[x])?[0])).collect()
        })
        .check();
    }

    /// What a projection over spread heads leaves is a sum over ranks that has not been taken.
    #[test]
    fn partial_sums_are_taken_first() {
        test(|cx, inputs| {
            let w = cx.param_value(0)?;
            let x = linear::record(cx, Linear {}, &[inputs[1], w])?[0];
            Ok(vec![record(cx, StdScale {}, &[x])?[0]])
        })
        .check();
    }

    #[test]
    fn a_slice_has_its_own_deviation_and_a_mask_is_refused() {
        let with = |state| OpTest {
            settings: vec![AxisSetting { axis: "c".into(), layer: None, state }],
            ..test(|cx, inputs| Ok(vec![record(cx, StdScale {}, &[inputs[0]])?[0]]))
        };
        with(AxisState::Slice { n: 6 }).check();
        let masked = with(AxisState::Hard { n: 6, gain: 1.0 });
        let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| masked.run(Grid::SINGLE)));
        assert!(refused.is_err(), "a masked dimension must be refused");
    }
}
