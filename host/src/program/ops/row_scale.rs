//! y = x with each row multiplied by its weight, and what all operators with a row weight share.
//!
//! Placement: linear in x, so a partial sum stays one; the weight comes to the rows of x. With channels spread or x a
//! partial sum, the gradient of the weight is a partial sum. Axis states: none of its own; zeros stay zeros.

use super::{HostOp, Results, Typed, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::graph::{DType, ValueId};
use crate::program::recorder::Recorder;
use gantry_kernels::cpu::elementwise::{RowDot, RowScale as Forward};
use gantry_plugin_api::ops::RowScale;

pub static OPS: &[&dyn HostOp] = &[&Typed(record as fn(&mut Recorder<'_>, RowScale, &[ValueId]) -> Result<Results>)];

/// The weight placed as the rows of x are; an error unless it is one number per row.
pub fn row_weight(cx: &mut Recorder<'_>, x: ValueId, weight: ValueId) -> Result<ValueId> {
    let weight = if cx.value(x).seq { cx.stream(weight)? } else { cx.replicated(weight)? };
    let (v, w) = (cx.value(x), cx.value(weight));
    if w.dtype != DType::Real || w.rows != v.rows || w.cols != 1 || w.seq != v.seq || !w.contiguous() {
        return Err(cx.error(format!("the row weight must be one number per row of {}, not {}", v.text(), w.text())));
    }
    Ok(weight)
}

/// Inputs: x [.., channels], weight [..]. Output as x.
pub fn record(cx: &mut Recorder<'_>, _: RowScale, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 2..=2)?;
    let x = inputs[0];
    let w = row_weight(cx, x, inputs[1])?;
    let v = cx.value(x).clone();
    let needs_grad = cx.needs_grad(&[x, w]);
    let y = cx.fresh("row_scale", v.dims.clone(), v.seq, needs_grad);
    cx.g.values[y.0 as usize].partial = v.partial;
    let kernel = Forward { rows: v.rows, cols: v.cols, ld_x: v.ld, ld_y: cx.value(y).ld, acc: false };
    cx.g.emit(kernel, &[x, w], &[y], &[], &[]);
    cx.node(RowScaleGrad { x, w, y }, &[y]);
    Ok(one(y))
}

struct RowScaleGrad {
    x: ValueId,
    w: ValueId,
    y: ValueId,
}

impl Backward for RowScaleGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let x = bw.value(self.x).clone();
        let ld_dy = bw.ld(dy);
        if let Some(dw) = bw.dx(self.w, x.partial || x.last().sharded()) {
            let kernel = RowDot { rows: x.rows, cols: x.cols, ld_dy, ld_x: x.ld, acc: dw.acc };
            bw.emit(kernel, &[dy, self.x], &[dw.value], &[], &[]);
        }
        if let Some(dx) = bw.dx(self.x, false) {
            let kernel = Forward { rows: x.rows, cols: x.cols, ld_x: ld_dy, ld_y: bw.ld(dx.value), acc: dx.acc };
            bw.emit(kernel, &[dy, self.w], &[dx.value], &[], &[]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Grid;
    use crate::program::ops::{arith, linear};
    use crate::program::testing::{Input, OpTest, axis};
    use gantry_plugin_api::plan::Layout;

    type Forward = fn(&mut Recorder<'_>, &[ValueId]) -> Result<Vec<ValueId>>;

    fn test(forward: Forward) -> OpTest {
        OpTest {
            axes: vec![axis("hidden", 6, false), axis("ffn", 4, true)],
            params: vec![
                ("fc1", vec![Layout::axis("ffn", 1), Layout::axis("hidden", 1)]),
                ("fc2", vec![Layout::axis("hidden", 1), Layout::axis("ffn", 1)]),
            ],
            inputs: vec![
                Input { name: "x", rows: 4, channels: Layout::axis("hidden", 1), spread: true },
                Input { name: "w", rows: 4, channels: Layout::Fixed(1), spread: true },
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
    fn rows_as_they_come() {
        test(|cx, inputs| {
            let y = record(cx, RowScale {}, inputs)?[0];
            Ok(vec![y, arith::add(cx, Default::default(), &[inputs[0], y])?[0]])
        })
        .check();
    }

    /// Scaled while channels are spread, and scaled again as a partial sum.
    #[test]
    fn spread_channels_and_partial_sums() {
        test(|cx, inputs| {
            let (fc1, fc2) = (cx.param_value(0)?, cx.param_value(1)?);
            let h = linear::record(cx, Default::default(), &[inputs[0], fc1])?[0];
            let h = record(cx, RowScale {}, &[h, inputs[1]])?[0];
            let y = linear::record(cx, Default::default(), &[h, fc2])?[0];
            assert_eq!(cx.value(y).partial, cx.cx.grid.tp > 1);
            Ok(vec![record(cx, RowScale {}, &[y, inputs[1]])?[0]])
        })
        .check();
    }

    #[test]
    fn a_weight_of_another_shape_is_refused() {
        test(|cx, inputs| {
            let error = record(cx, RowScale {}, &[inputs[0], inputs[0]]).unwrap_err().to_string();
            assert!(error.contains("one number per row") && error.contains("hidden 6"), "{error}");
            Ok(vec![])
        })
        .run(Grid::SINGLE);
    }
}
