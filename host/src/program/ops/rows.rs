//! Rows of side inputs (labels, masks, indices) that go with the rows of an activation.

use crate::error::Result;
use crate::program::backprop::{Backprop, Backward, copy};
use crate::program::dims::Dim;
use crate::program::graph::{Value, ValueId};
use crate::program::recorder::Recorder;

/// `side` [rows] as the rows of `like` are: all of them, or this rank's part where they are spread.
pub fn rows_of(cx: &mut Recorder<'_>, side: ValueId, like: ValueId) -> Result<ValueId> {
    let (s, x) = (cx.value(side).clone(), cx.value(like).clone());
    if s.seq == x.seq {
        return Ok(side);
    }
    if s.seq {
        return cx.replicated(side);
    }
    let offset = s.offset + cx.cx.place.tp * x.rows * s.ld;
    Ok(cx.g.push_value(Value { offset, rows: x.rows, seq: true, base: None, needs_grad: false, ..s }))
}

/// An error unless `side` is [rows].
pub fn only_rows(cx: &Recorder<'_>, what: &str, side: ValueId, rows: usize) -> Result<()> {
    let v = cx.value(side);
    if v.rows == rows && v.cols == 1 && v.contiguous() {
        return Ok(());
    }
    Err(cx.error(format!("{what} {} must be one number for each of {rows} rows", v.text())))
}

/// An error unless the whole of the last dimension is here.
pub fn whole_channels(cx: &Recorder<'_>, dim: &Dim, doing: &str) -> Result<()> {
    if dim.sharded() {
        return Err(cx.error(format!("cannot take a {doing} over {dim}: each rank holds a part of it")));
    }
    Ok(())
}

/// (value, rows, columns, row stride) for a kernel over the last dimension of `x`.
///
/// Memory need not have that dimension as its columns: a value of one dimension is one row, and an unflattened one keeps
/// the rows it had. Such values are brought back to back, which they nearly always are.
pub fn matrix(cx: &mut Recorder<'_>, x: ValueId) -> (ValueId, usize, usize, usize) {
    let v = cx.value(x).clone();
    let cols = v.last().local();
    if v.dims.len() > 1 && cols == v.cols {
        return (x, v.rows, cols, v.ld);
    }
    (dense(cx, x), v.len() / cols.max(1), cols, cols)
}

/// Row stride of a gradient for a kernel with `cols` columns, see [`matrix`].
pub fn row_stride(bw: &Backprop<'_>, grad: ValueId, cols: usize) -> usize {
    let v = bw.value(grad);
    if v.cols == cols { v.ld } else { cols }
}

/// Rows back to back, with a gradient.
pub fn dense(cx: &mut Recorder<'_>, x: ValueId) -> ValueId {
    let packed = cx.contiguous(x);
    if packed != x {
        let needs_grad = cx.needs_grad(&[x]);
        cx.g.values[packed.0 as usize].needs_grad = needs_grad;
        cx.node(Packed { x, packed }, &[packed]);
    }
    packed
}

struct Packed {
    x: ValueId,
    packed: ValueId,
}

impl Backward for Packed {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        if let Some(dy) = bw.dy(self.packed) {
            bw.pass(self.x, dy);
        }
        Ok(())
    }
}

/// The same gradient with rows back to back.
pub fn packed(bw: &mut Backprop<'_>, dy: ValueId) -> ValueId {
    if bw.value(dy).contiguous() {
        return dy;
    }
    let packed = bw.g.fresh_like(dy, "contiguous");
    copy(bw.g, dy, packed, false);
    packed
}
