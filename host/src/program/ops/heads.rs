//! What operators over grouped heads share.

use crate::error::Result;
use crate::model::layout::group_size;
use crate::program::backprop::{Backprop, GradOut};
use crate::program::dims::{Dim, Segment};
use crate::program::graph::ValueId;
use crate::program::recorder::Recorder;

/// The one segment of a dimension of heads (units of an axis).
pub fn heads_of<'a>(cx: &Recorder<'_>, what: &str, dim: &'a Dim) -> Result<&'a Segment> {
    match dim.segs.as_slice() {
        [seg] if seg.axis.is_some() => Ok(seg),
        _ => Err(cx.error(format!("{what} must be one segment of heads, not {dim}"))),
    }
}

/// Groups of `heads` on this rank. Groups are spread as their heads are, so that no group is cut: stored head i of group
/// i % G and its group lie on rank i % ranks, and among this rank's heads head j belongs to its group j % (G / ranks).
pub fn local_groups(cx: &Recorder<'_>, heads: &Segment) -> Result<usize> {
    let groups = match heads.axis {
        Some(key) => group_size(&cx.cx.table.axes, key.axis as usize)?,
        None => 1,
    };
    if !groups.is_multiple_of(heads.parts) {
        return Err(cx.error(format!(
            "{} heads in {groups} groups cannot be spread over {} ranks: a group would be cut; \
             grid.tp must divide the number of groups",
            heads.full_units, heads.parts
        )));
    }
    Ok(groups / heads.parts)
}

/// The gradients of `b`'s value in memory of their own: where `a` and `b` are views of one tensor, their gradients are
/// windows on one storage, which no kernel may have as two outputs. Give the result to [`settle`] after the kernel.
pub fn apart(bw: &mut Backprop<'_>, a: GradOut, b: GradOut) -> GradOut {
    if bw.value(a.value).storage != bw.value(b.value).storage {
        return b;
    }
    GradOut { value: bw.g.fresh_like(b.value, "grad"), acc: false }
}

/// Moves what a kernel wrote to `written` to where it belongs.
pub fn settle(bw: &mut Backprop<'_>, written: GradOut, target: GradOut) {
    if written.value != target.value {
        bw.copy(written.value, target.value, target.acc);
    }
}

/// An error unless `param` is a parameter of one dimension with the structure of `dim`.
pub fn vector_param(cx: &Recorder<'_>, what: &str, param: ValueId, dim: &Dim) -> Result<()> {
    let v = cx.value(param);
    if v.param.is_none() || v.dims.len() != 1 {
        return Err(cx.error(format!("{what} must be a parameter [{}], not {}", dim.name, v.text())));
    }
    cx.same_dim(what, &v.dims[0], dim)
}
