//! What a declared tensor becomes in files: its pieces, by the names of each format.
//!
//! A declaration says how a tensor is cut: `{axis}` in a name makes one tensor of each unit of the leading dimension,
//! `{part}` one of each named part of the dimension that leads then. A piece is therefore a list of runs of the tensor's
//! elements in logical order. Checkpoints and Megatron have a parameter's own name, Hugging Face folders its `hf_name`.

use crate::error::{Error, Result};
use crate::model::layout::{axis_index, group_size};
use gantry_plugin_api::plan::{Axis, Layout, ModelPlan};
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    pub name: String,
    pub shape: Vec<usize>,
    /// Its elements, in order, within the declared tensor's logical order.
    pub runs: Vec<Range<usize>>,
}

impl Piece {
    /// A tensor of its own, of elements that follow each other from `first` on.
    pub fn whole(name: String, shape: Vec<usize>, first: usize) -> Piece {
        let elements: usize = shape.iter().product();
        let runs = std::iter::once(first..first + elements).collect();
        Piece { name, shape, runs }
    }

    /// Number of its elements.
    pub fn elements(&self) -> usize {
        self.runs.iter().map(Range::len).sum()
    }
}

/// A declared parameter or buffer.
#[derive(Clone, Debug)]
pub struct Declared {
    pub name: String,
    /// Elements.
    pub len: usize,
    /// State without a gradient.
    pub buffer: bool,
    /// Kept in fp32 whatever the precision.
    pub fp32: bool,
    /// In checkpoints and under Megatron's names.
    pub own: Vec<Piece>,
    /// In Hugging Face folders.
    pub folder: Vec<Piece>,
    /// The same elements under the names of parameters that are tied to this one, own and folder's.
    pub tied: [Vec<Piece>; 2],
}

/// Names of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    Own,
    Folder,
}

impl Declared {
    pub fn pieces(&self, names: Names) -> &[Piece] {
        match names {
            Names::Own => &self.own,
            Names::Folder => &self.folder,
        }
    }

    pub fn tied(&self, names: Names) -> &[Piece] {
        &self.tied[names as usize]
    }
}

/// Every tensor of a model, in the order of the plan.
pub fn declared(plan: &ModelPlan) -> Result<Vec<Declared>> {
    let mut all: Vec<Declared> = Vec::new();
    let mut ties: HashMap<&str, usize> = HashMap::new();
    for param in &plan.params {
        let at = |error: Error| error.at(format!("parameter {:?}", param.name));
        let export = param.export_shape.as_deref();
        let hf_name = param.hf_name.as_deref().unwrap_or(&param.name);
        let own = pieces(&plan.axes, &param.name, &param.dims, export).map_err(at)?;
        let folder = pieces(&plan.axes, hf_name, &param.dims, export).map_err(at)?;
        if let Some(&first) = param.tie.as_deref().and_then(|tie| ties.get(tie)) {
            all[first].tied[Names::Own as usize].extend(own);
            all[first].tied[Names::Folder as usize].extend(folder);
            continue;
        }
        if let Some(tie) = &param.tie {
            ties.insert(tie, all.len());
        }
        let len = own.iter().map(Piece::elements).sum();
        let (name, fp32) = (param.name.clone(), param.fp32);
        all.push(Declared { name, len, buffer: false, fp32, own, folder, tied: Default::default() });
    }
    for buffer in &plan.buffers {
        let at = |error: Error| error.at(format!("buffer {:?}", buffer.name));
        let hf_name = buffer.hf_name.as_deref().unwrap_or(&buffer.name);
        let own = pieces(&plan.axes, &buffer.name, &buffer.dims, None).map_err(at)?;
        let folder = pieces(&plan.axes, hf_name, &buffer.dims, None).map_err(at)?;
        let len = own.iter().map(Piece::elements).sum();
        let name = buffer.name.clone();
        all.push(Declared { name, len, buffer: true, fp32: true, own, folder, tied: Default::default() });
    }
    for names in [Names::Own, Names::Folder] {
        let mut seen = HashSet::new();
        let pieces = all.iter().flat_map(|d| d.pieces(names).iter().chain(d.tied(names)));
        if let Some(twice) = pieces.into_iter().find(|piece| !seen.insert(piece.name.as_str())) {
            return Err(Error::plugin(format!("two tensors of the plan are called {:?} in files", twice.name)));
        }
    }
    Ok(all)
}

/// The pieces that `name` cuts a tensor of `dims` into.
fn pieces(axes: &[Axis], name: &str, dims: &[Layout], export: Option<&[usize]>) -> Result<Vec<Piece>> {
    let sizes = dims.iter().map(|dim| size(axes, dim, false)).collect::<Result<Vec<usize>>>()?;
    let elements = product(&sizes)?;
    // (name so far, first element, remaining dimensions)
    let mut units = vec![(name.to_string(), 0)];
    let mut rest = 0;
    if let Some(axis) = placeholder(name)? {
        let unit_of = |layout: &Layout| matches!(layout, Layout::Axis { axis: a, unit: 1 } if *a == axis);
        if !dims.first().is_some_and(unit_of) {
            return Err(Error::plugin(format!(
                "{name:?} is a name for each unit of {axis:?}, which is not what leads"
            )));
        }
        let one = elements / sizes[0].max(1);
        let of = |unit: usize| (name.replacen(&format!("{{{axis}}}"), &unit.to_string(), 1), unit * one);
        (units, rest) = ((0..sizes[0]).map(of).collect(), 1);
    }
    let whole = product(&sizes[rest..])?;
    let mut all = Vec::new();
    for (name, first) in units {
        if !name.contains("{part}") {
            let shape = match export.filter(|_| rest == 0) {
                Some(export) if product(export)? != whole => {
                    return Err(Error::plugin(format!(
                        "its shape in files {export:?} has not the elements of {sizes:?}"
                    )));
                }
                Some(export) => export.to_vec(),
                None => sizes[rest..].to_vec(),
            };
            all.push(Piece::whole(name, shape, first));
            continue;
        }
        let parts = dims.get(rest).map(|layout| parts(axes, layout)).transpose()?.flatten();
        let parts = parts.ok_or_else(|| Error::plugin(format!("{name:?} is a name for parts, but none has a name")))?;
        let row = whole / sizes[rest].max(1);
        for (part, ranges) in parts {
            let runs: Vec<_> = ranges.iter().map(|r| first + r.start * row..first + r.end * row).collect();
            let mut shape = sizes[rest..].to_vec();
            shape[0] = ranges.iter().map(Range::len).sum();
            all.push(Piece { name: name.replace("{part}", &part), shape, runs: joined(runs) });
        }
    }
    Ok(all)
}

fn product(sizes: &[usize]) -> Result<usize> {
    let product = sizes.iter().try_fold(1usize, |n, size| n.checked_mul(*size));
    product.ok_or_else(|| Error::recipe(format!("a tensor of shape {sizes:?} is larger than any memory")))
}

/// Runs that follow each other as one.
fn joined(runs: Vec<Range<usize>>) -> Vec<Range<usize>> {
    let mut all: Vec<Range<usize>> = Vec::new();
    for run in runs {
        match all.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => all.push(run),
        }
    }
    all
}

/// The axis that a name stands for each unit of.
fn placeholder(name: &str) -> Result<Option<String>> {
    let mut axis = None;
    let mut rest = name;
    while let Some(open) = rest.find('{') {
        let Some(close) = rest[open..].find('}') else {
            return Err(Error::plugin(format!("the name {name:?} has a {{ without its }}")));
        };
        let word = &rest[open + 1..open + close];
        if word != "part" && axis.replace(word.to_string()).is_some() {
            return Err(Error::plugin(format!("the name {name:?} names more than one axis")));
        }
        rest = &rest[open + close + 1..];
    }
    Ok(axis)
}

/// Positions of a layout in logical order; `inside`: within a repetition over its axes' group.
fn size(axes: &[Axis], layout: &Layout, inside: bool) -> Result<usize> {
    let too_large = || Error::recipe("a dimension is larger than any memory");
    match layout {
        Layout::Fixed(n) => Ok(*n),
        Layout::Axis { axis, unit } => {
            let index = axis_index(axes, axis)?;
            let groups = if inside { group_size(axes, index)? } else { 1 };
            (axes[index].size / groups).checked_mul(*unit).ok_or_else(too_large)
        }
        Layout::Seq(parts) => {
            parts.iter().try_fold(0usize, |n, (_, part)| n.checked_add(size(axes, part, inside)?).ok_or_else(too_large))
        }
        Layout::Repeat { axis, inner } => {
            axes[axis_index(axes, axis)?].size.checked_mul(size(axes, inner, true)?).ok_or_else(too_large)
        }
    }
}

/// Positions of the named parts of a layout, those of all repetitions together.
#[allow(clippy::type_complexity)]
fn parts(axes: &[Axis], layout: &Layout) -> Result<Option<Vec<(String, Vec<Range<usize>>)>>> {
    let (parts, repeats, inside) = match layout {
        Layout::Seq(parts) => (parts, 1, false),
        Layout::Repeat { axis, inner } => match inner.as_ref() {
            Layout::Seq(parts) => (parts, axes[axis_index(axes, axis)?].size, true),
            _ => return Ok(None),
        },
        _ => return Ok(None),
    };
    let sizes = parts.iter().map(|(_, part)| size(axes, part, inside)).collect::<Result<Vec<usize>>>()?;
    let stride: usize = sizes.iter().sum();
    let mut begin = 0;
    let mut all = Vec::new();
    for ((name, _), size) in parts.iter().zip(sizes) {
        let ranges = (0..repeats).map(|i| i * stride + begin..i * stride + begin + size).collect();
        all.push((name.clone(), ranges));
        begin += size;
    }
    Ok(Some(all))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axes() -> Vec<Axis> {
        vec![
            Axis::new("groups", 2),
            Axis::new("heads", 4).grouped_by("groups"),
            Axis::new("experts", 3),
            Axis::new("ffn", 5),
            Axis::new("hidden", 2),
        ]
    }

    fn cut(name: &str, dims: &[Layout]) -> Vec<Piece> {
        pieces(&axes(), name, dims, None).unwrap()
    }

    #[test]
    fn parts_of_repetitions_lie_together() {
        let qkv = Layout::repeat(
            "groups",
            Layout::seq([("q", Layout::axis("heads", 1)), ("k", Layout::Fixed(1)), ("v", Layout::Fixed(1))]),
        );
        let pieces = cut("{part}_proj", &[qkv, Layout::axis("hidden", 1)]);
        // Rows: q0 q1 k0 v0 q2 q3 k1 v1, of two elements.
        assert_eq!(pieces[0], Piece { name: "q_proj".into(), shape: vec![4, 2], runs: vec![0..4, 8..12] });
        assert_eq!(pieces[2], Piece { name: "v_proj".into(), shape: vec![2, 2], runs: vec![6..8, 14..16] });
    }

    #[test]
    fn units_and_parts_cut_twice() {
        let gated = Layout::seq([("gate", Layout::axis("ffn", 1)), ("up", Layout::axis("ffn", 1))]);
        let pieces = cut("e.{experts}.{part}", &[Layout::axis("experts", 1), gated, Layout::axis("hidden", 1)]);
        assert_eq!(pieces.len(), 6);
        assert_eq!(pieces[3], Piece::whole("e.1.up".into(), vec![5, 2], 30));
        let whole = cut("w{experts}", &[Layout::axis("experts", 1), Layout::Fixed(4)]);
        assert_eq!(whole[2], Piece::whole("w2".into(), vec![4], 8));
    }

    #[test]
    fn names_that_cannot_be_are_refused() {
        let e = |name: &str, dims: &[Layout]| pieces(&axes(), name, dims, None).unwrap_err().sentence;
        assert!(e("{part}", &[Layout::Fixed(2)]).contains("none has a name"));
        assert!(e("a{ffn}", &[Layout::axis("experts", 1)]).contains("not what leads"));
        assert!(e("a{ffn", &[Layout::Fixed(2)]).contains("without its }"));
        assert!(e("{a}{b}", &[Layout::Fixed(2)]).contains("more than one axis"));
        assert!(pieces(&axes(), "a", &[Layout::Fixed(6)], Some(&[2, 4])).unwrap_err().sentence.contains("[2, 4]"));
    }
}
