//! Sum, mean or maximum over the last dimension.
//!
//! Placement: rows as they come; over a spread dimension a sum or mean is a partial sum, a maximum is refused. Axis states:
//! a mean divides by the active width, which under a mask is the full one.

use super::rows::{matrix, row_stride};
use super::{HostOp, Results, Typed, arith, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::dims::Dim;
use crate::program::graph::ValueId;
use crate::program::recorder::Recorder;
use gantry_kernels::cpu::reduce::{Over, Reduce as Forward, ReduceBackward, Reduction as How};
use gantry_plugin_api::ops::{Reduce, Reduction, Scale};

pub static OPS: &[&dyn HostOp] = &[&Typed(record as fn(&mut Recorder<'_>, Reduce, &[ValueId]) -> Result<Results>)];

/// Input: x [.., C]. Output [..], one element if x has one dimension.
pub fn record(cx: &mut Recorder<'_>, attrs: Reduce, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 1..=1)?;
    let last = cx.value(inputs[0]).last().clone();
    let x = if attrs.kind == Reduction::Max { cx.summed(inputs[0])? } else { inputs[0] };
    let v = cx.value(x).clone();
    let partial = last.sharded() || v.partial;
    if partial && attrs.kind == Reduction::Max {
        return Err(cx.error(format!("cannot take the maximum over {last}: each rank holds a part of it")));
    }
    // Over a spread dimension a rank's columns are not what a mean divides by.
    let (reduction, by) = match attrs.kind {
        Reduction::Sum => (How::Sum, None),
        Reduction::Mean if last.sharded() => (How::Sum, Some(1.0 / last.size() as f64)),
        Reduction::Mean => (How::Mean, None),
        Reduction::Max => (How::Max, None),
        other => return Err(cx.error(format!("this host does not know the reduction {other:?}"))),
    };
    let (x, rows, cols, ld) = matrix(cx, x);
    let outer = v.dims[..v.dims.len().saturating_sub(1)].to_vec();
    let dims = if outer.is_empty() { vec![Dim::plain("one", 1)] } else { outer };
    let needs_grad = cx.needs_grad(&[x]);
    let y = cx.fresh("reduced", dims, v.seq, needs_grad);
    cx.g.values[y.0 as usize].partial = partial;
    let kernel = Forward { rows, cols, ld, reduction, over: Over::Cols, masked: false };
    let index = match reduction {
        How::Max => Some(cx.fresh_int("max.index", [Dim::plain("rows", rows)], false)),
        _ => None,
    };
    let int_outs: Vec<ValueId> = index.into_iter().collect();
    cx.g.emit(kernel, &[x], &[y], &[], &int_outs);
    cx.node(ReduceGrad { x, y, index, kernel }, &[y]);
    match by {
        Some(by) => arith::scale(cx, Scale { by }, &[y]),
        None => Ok(one(y)),
    }
}

struct ReduceGrad {
    x: ValueId,
    y: ValueId,
    index: Option<ValueId>,
    kernel: Forward,
}

impl Backward for ReduceGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let Some(dx) = bw.dx(self.x, false) else { return Ok(()) };
        let ld_dx = row_stride(bw, dx.value, self.kernel.cols);
        let kernel = ReduceBackward { forward: self.kernel, ld_dx, acc: dx.acc };
        let ints: Vec<ValueId> = self.index.into_iter().collect();
        // Only an l2 norm reads x and y.
        bw.emit(kernel, &[dy, dy, dy], &[dx.value], &ints, &[]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::ops::shape::unflatten;
    use crate::program::testing::{Input, OpTest, axis};
    use gantry_plugin_api::plan::Layout;

    #[test]
    fn reductions_of_whole_spread_and_unflattened_dimensions() {
        OpTest {
            axes: vec![axis("c", 6, false), axis("heads", 4, true)],
            params: vec![],
            inputs: vec![
                Input { name: "x", rows: 4, channels: Layout::axis("c", 1), spread: true },
                Input { name: "h", rows: 4, channels: Layout::axis("heads", 3), spread: false },
            ],
            ints: vec![],
            tokens: 4,
            settings: vec![],
            state_grads: false,
            labels: None,
            forward: Box::new(|cx, inputs| {
                let mut outputs = vec![];
                for kind in [Reduction::Sum, Reduction::Mean, Reduction::Max] {
                    outputs.extend(record(cx, Reduce { kind }, &[inputs[0]])?);
                    let heads = unflatten(cx, inputs[1], &["heads", "position"])?;
                    outputs.extend(record(cx, Reduce { kind }, &[heads])?);
                    if kind != Reduction::Max {
                        // Over the spread heads: a partial sum, which the test completes.
                        outputs.extend(record(cx, Reduce { kind }, &[inputs[1]])?);
                    } else if cx.cx.grid.tp > 1 {
                        let e = record(cx, Reduce { kind }, &[inputs[1]]).unwrap_err().to_string();
                        assert!(e.contains("holds a part"), "{e}");
                    }
                }
                Ok(outputs)
            }),
        }
        .check();
    }
}
