//! y[i] = x[index[i]]; a negative index gives zeros.
//!
//! Placement: all rows of x and of the index on every rank; channels may be spread. Axis states: a parameter's sliced rows
//! and channels must be prefixes.

use super::rows::only_rows;
use super::{HostOp, Results, Typed, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward, GradOut};
use crate::program::dims::Dim;
use crate::program::graph::{DType, ValueId};
use crate::program::recorder::Recorder;
use gantry_kernels::cpu::indexing::{GatherRows as Forward, ScatterAddRows};
use gantry_plugin_api::ops::GatherRows;

pub static OPS: &[&dyn HostOp] = &[&Typed(record as fn(&mut Recorder<'_>, GatherRows, &[ValueId]) -> Result<Results>)];

/// Inputs: x [rows, channels], index i32 [n]. Output [n, channels].
pub fn record(cx: &mut Recorder<'_>, _: GatherRows, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 2..=2)?;
    let (x, index) = (cx.replicated(inputs[0])?, cx.replicated(inputs[1])?);
    let (v, i) = (cx.value(x).clone(), cx.value(index).clone());
    let [rows, channels] = v.dims.as_slice() else {
        return Err(cx.error(format!("gathers rows of [rows, channels], not of {}", v.text())));
    };
    if i.dtype != DType::I32 || v.dtype != DType::Real {
        return Err(cx.error("takes real rows and an i32 index".to_string()));
    }
    only_rows(cx, "the index", index, i.rows)?;
    let stored = |dim: &Dim| gantry_kernels::blocks::Blocks::new(dim.blocks()).is_dense();
    if rows.sharded() || v.param.is_some() && !(stored(rows) && stored(channels)) {
        return Err(
            cx.error(format!("cannot gather rows of {}: its rows or channels are not a whole prefix", v.text()))
        );
    }
    let needs_grad = cx.needs_grad(&[x]);
    let y = cx.fresh("gathered", [i.dims[0].clone(), channels.clone()], false, needs_grad);
    let kernel = Forward { rows: i.rows, cols: v.cols, ld_x: v.ld, ld_y: cx.value(y).ld, acc: false };
    cx.g.emit(kernel, &[x], &[y], &[index], &[]);
    cx.node(GatherGrad { x, index, y }, &[y]);
    Ok(one(y))
}

struct GatherGrad {
    x: ValueId,
    index: ValueId,
    y: ValueId,
}

impl Backward for GatherGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let x = bw.value(self.x).clone();
        let dx = match x.param {
            Some(_) => bw.param_grad(self.x, false)?.map(|value| GradOut { value, acc: true }),
            None => bw.dx(self.x, false),
        };
        let Some(dx) = dx else { return Ok(()) };
        let kernel = ScatterAddRows {
            rows: bw.value(self.index).rows,
            rows_x: x.rows,
            cols: x.cols,
            ld_dy: bw.ld(dy),
            ld_dx: bw.ld(dx.value),
            acc: dx.acc,
        };
        bw.emit(kernel, &[dy], &[dx.value], &[self.index], &[]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::testing::{Input, OpTest, axis};
    use gantry_plugin_api::plan::{AxisSetting, AxisState, Layout};

    #[test]
    fn rows_of_activations_and_parameters() {
        for settings in [vec![], vec![AxisSetting { axis: "c".into(), layer: None, state: AxisState::Slice { n: 2 } }]]
        {
            OpTest {
                axes: vec![axis("c", 4, true), axis("hidden", 3, false), axis("positions", 5, false)],
                params: vec![("table", vec![Layout::axis("positions", 1), Layout::axis("c", 1)])],
                inputs: vec![Input { name: "x", rows: 4, channels: Layout::axis("hidden", 1), spread: true }],
                ints: vec![("index", vec![2, -1, 0, 2, 3, 1])],
                tokens: 4,
                settings,
                state_grads: false,
                labels: None,
                forward: Box::new(|cx, inputs| {
                    let index = cx.int_input("index", 6)?;
                    let table = cx.param_value(0)?;
                    // Twice each, so that gradients add.
                    let mut outputs = vec![];
                    for x in [inputs[0], table, inputs[0], table] {
                        outputs.extend(record(cx, GatherRows {}, &[x, index])?);
                    }
                    Ok(outputs)
                }),
            }
            .check();
        }
    }
}
