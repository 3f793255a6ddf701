//! Splits, joins and names of the last dimension. None moves data unless parts that are not neighbours are joined.
//!
//! Placement: any; views have their base's. Axis states: segments keep their axes, so widths follow by themselves.

use super::{HostOp, Results, Typed, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward, copy};
use crate::program::dims::{Dim, Segment};
use crate::program::graph::{Value, ValueId};
use crate::program::recorder::Recorder;
use gantry_plugin_api::ops::{Concat, Slice, Split};

pub static OPS: &[&dyn HostOp] = &[
    &Typed(split as fn(&mut Recorder<'_>, Split, &[ValueId]) -> Result<Results>),
    &Typed(concat as fn(&mut Recorder<'_>, Concat, &[ValueId]) -> Result<Results>),
    &Typed(slice as fn(&mut Recorder<'_>, Slice, &[ValueId]) -> Result<Results>),
];

/// One view per segment of the last dimension.
pub fn split(cx: &mut Recorder<'_>, _: Split, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 1..=1)?;
    let x = inputs[0];
    let segs = cx.value(x).last().segs.clone();
    let mut col = 0;
    let mut views = Results::new();
    for seg in segs {
        let local = seg.local();
        let name = seg.name.clone();
        views.push(cx.view(&name, x, col, Dim::of(&name, [seg])));
        col += local;
    }
    Ok(views)
}

/// Whether `b` begins where `a` ends in the same rows.
fn neighbours(a: &Value, b: &Value) -> bool {
    a.storage == b.storage
        && a.offset + a.cols == b.offset
        && (a.ld, a.rows, a.partial, a.seq) == (b.ld, b.rows, b.partial, b.seq)
        && a.base.map(|(root, _)| root) == b.base.map(|(root, _)| root)
        && a.base.is_some()
}

/// The inputs side by side.
pub fn concat(cx: &mut Recorder<'_>, _: Concat, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 1..=64)?;
    let values: Vec<Value> = inputs.iter().map(|&id| cx.value(id).clone()).collect();
    let segs: Vec<Segment> = values.iter().flat_map(|v| v.last().segs.clone()).collect();
    let name = values.iter().map(|v| v.last().name.to_string()).collect::<Vec<_>>().join("|");
    let dim = Dim::of(&name, segs);
    if values.windows(2).all(|pair| neighbours(&pair[0], &pair[1])) {
        return Ok(one(cx.view(&name, inputs[0], 0, dim)));
    }
    if let Some(bad) = values.iter().find(|v| v.rows != values[0].rows || v.seq != values[0].seq) {
        return Err(cx.error(format!("rows of {} and {} differ", values[0].text(), bad.text())));
    }
    let mut parts = Vec::new();
    for &id in inputs {
        parts.push(cx.summed(id)?);
    }
    let v = cx.value(parts[0]).clone();
    let mut dims = v.dims.clone();
    dims.pop();
    dims.push(dim);
    let needs_grad = cx.needs_grad(&parts);
    let y = cx.fresh(&name, dims, v.seq, needs_grad);
    let mut col = 0;
    for &part in &parts {
        let window = window(cx, y, part, col);
        copy(&mut cx.g, part, window, false);
        col += cx.value(part).cols;
    }
    cx.node(ConcatGrad { parts, y }, &[y]);
    Ok(one(y))
}

fn window(cx: &mut Recorder<'_>, y: ValueId, like: ValueId, col: usize) -> ValueId {
    let dim = cx.value(like).last().clone();
    cx.view("part", y, col, dim)
}

struct ConcatGrad {
    parts: Vec<ValueId>,
    y: ValueId,
}

impl Backward for ConcatGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let mut col = 0;
        for &part in &self.parts {
            let cols = bw.value(part).cols;
            if let Some(dx) = bw.dx(part, false) {
                let from = bw.columns(dy, col, cols);
                bw.copy(from, dx.value, dx.acc);
            }
            col += cols;
        }
        Ok(())
    }
}

/// Columns of a dimension without axes, as a view.
pub fn slice(cx: &mut Recorder<'_>, attrs: Slice, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 1..=1)?;
    let (start, len) = (attrs.start as usize, attrs.len as usize);
    let last = cx.value(inputs[0]).last().clone();
    let [Segment { axis: None, .. }] = last.segs.as_slice() else {
        return Err(cx.error(format!("{last} is made of axes; split it by segment instead of by numbers")));
    };
    if len == 0 || start + len > last.size() {
        return Err(cx.error(format!("columns {start}..{} are outside {last}", start + len)));
    }
    Ok(one(cx.view(&last.name, inputs[0], start, Dim::plain(&last.name, len))))
}

/// The same data with its last dimension named as two: units of its axis, and positions of a unit.
pub fn unflatten(cx: &mut Recorder<'_>, x: ValueId, names: &[&str]) -> Result<ValueId> {
    let last = cx.value(x).last().clone();
    let ([units, positions], [seg]) = (names, last.segs.as_slice()) else {
        return Err(cx.error(format!("unflatten takes two names and one segment, got {} and {last}", names.len())));
    };
    let axis = seg.axis.map(|key| cx.cx.table.axes[key.axis as usize].name.as_str());
    if axis != Some(*units) {
        return Err(cx.error(format!("the last dimension is over {}, not {units:?}", axis.unwrap_or("no axis"))));
    }
    let (mut outer, unit) = (seg.clone(), seg.unit);
    outer.unit = 1;
    let v = cx.value(x).clone();
    let mut dims = v.dims.clone();
    dims.pop();
    dims.push(Dim::of(units, [outer]));
    dims.push(Dim::plain(positions, unit));
    let base = v.base.or(Some((x, 0)));
    // Still stored as rows of all units: the names change, the memory does not.
    Ok(cx.g.push_value(Value { dims, base, ..v }))
}
