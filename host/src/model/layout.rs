//! From a declared layout (logical order) to storage: flat segments and the permutation between the two orders.
//!
//! Storage keeps every leaf of a layout as one contiguous segment over all units of its axis, in elastic order: unit i
//! of an axis grouped by an axis of size G is unit i / G of group i % G. So `[q.. k v]` repeated per KV group is stored as
//! `[q | k | v]`, and the first n units of a segment are the first n / G of every group.

use crate::error::{Error, Result};
use gantry_plugin_api::plan::{Axis, Layout};

/// A contiguous segment of a stored dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf {
    pub name: String,
    /// Index into the plan's axes, or none for plain positions.
    pub axis: Option<usize>,
    pub units: usize,
    pub unit: usize,
}

/// The segments of a dimension, and for each stored position (full width, all ranks) its logical position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredDim {
    pub leaves: Vec<Leaf>,
    pub logical_of: Vec<u32>,
}

/// Index of the axis called `name`.
pub fn axis_index(axes: &[Axis], name: &str) -> Result<usize> {
    axes.iter().position(|axis| axis.name == name).ok_or_else(|| {
        let known: Vec<&str> = axes.iter().map(|axis| axis.name.as_str()).collect();
        Error::plugin(format!("the plan has no axis {name:?}; it declares {}", known.join(", ")))
    })
}

/// Size of the axis that groups `axis`, 1 if none does.
pub fn group_size(axes: &[Axis], axis: usize) -> Result<usize> {
    let this = &axes[axis];
    let groups = match &this.group {
        None => 1,
        Some(name) => axes[axis_index(axes, name)?].size,
    };
    if groups == 0 || !this.size.is_multiple_of(groups) {
        return Err(Error::plugin(format!(
            "axis {:?} has {} units, which its group axis of {groups} does not divide",
            this.name, this.size
        )));
    }
    Ok(groups)
}

/// A leaf in logical order: where its positions lie.
struct Run {
    leaf: usize,
    stored_unit: usize,
    unit: usize,
}

struct Walk<'a> {
    axes: &'a [Axis],
    leaves: Vec<Leaf>,
    runs: Vec<Run>,
}

impl Walk<'_> {
    /// Appends the leaves of `layout` (first time only) and its runs in logical order. `outer` is the unit of the
    /// enclosing `Repeat` axis; `next` is the leaf number to begin with. Returns the next free leaf number.
    fn visit(&mut self, layout: &Layout, name: &str, outer: Option<(usize, usize)>, next: usize) -> Result<usize> {
        match layout {
            Layout::Fixed(size) => {
                let (axis, units) = match outer {
                    None => (None, *size),
                    Some((axis, _)) => (Some(axis), self.axes[axis].size),
                };
                let unit = if outer.is_some() { *size } else { 1 };
                self.leaf(next, name, axis, units, unit)?;
                match outer {
                    None => self.runs.extend((0..*size).map(|i| Run { leaf: next, stored_unit: i, unit: 1 })),
                    Some((_, repeat)) => self.runs.push(Run { leaf: next, stored_unit: repeat, unit }),
                }
                Ok(next + 1)
            }
            Layout::Axis { axis, unit } => {
                let index = axis_index(self.axes, axis)?;
                let size = self.axes[index].size;
                let groups = group_size(self.axes, index)?;
                let per_group = size / groups;
                self.leaf(next, name, Some(index), size, *unit)?;
                let of_groups = match outer {
                    None => 0..groups,
                    Some((outer_axis, repeat)) => {
                        if self.axes[index].group.as_deref() != Some(self.axes[outer_axis].name.as_str()) {
                            return Err(Error::plugin(format!(
                                "axis {axis:?} stands inside a repetition over {:?}, which is not its group axis",
                                self.axes[outer_axis].name
                            )));
                        }
                        repeat..repeat + 1
                    }
                };
                for group in of_groups {
                    let ranks = (0..per_group).map(|rank| rank * groups + group);
                    self.runs.extend(ranks.map(|stored_unit| Run { leaf: next, stored_unit, unit: *unit }));
                }
                Ok(next + 1)
            }
            Layout::Seq(parts) => {
                let mut next = next;
                for (part, layout) in parts {
                    next = self.visit(layout, part, outer, next)?;
                }
                Ok(next)
            }
            Layout::Repeat { axis, inner } => {
                if outer.is_some() {
                    return Err(Error::plugin(format!("repetition over {axis:?} stands inside another repetition")));
                }
                let index = axis_index(self.axes, axis)?;
                let mut end = next;
                for repeat in 0..self.axes[index].size {
                    end = self.visit(inner, name, Some((index, repeat)), next)?;
                }
                Ok(end)
            }
        }
    }

    /// Notes a leaf on its first visit.
    fn leaf(&mut self, index: usize, name: &str, axis: Option<usize>, units: usize, unit: usize) -> Result<()> {
        if index == self.leaves.len() {
            let before: usize = self.leaves.iter().map(|leaf| leaf.units * leaf.unit).sum();
            match units.checked_mul(unit) {
                Some(n) if n <= MAX_POSITIONS - before.min(MAX_POSITIONS) => {}
                _ => {
                    return Err(Error::recipe(format!(
                        "a dimension with {units} x {unit} positions is larger than any this version can hold \
                         ({MAX_POSITIONS}); make the model's sizes smaller"
                    )));
                }
            }
            self.leaves.push(Leaf { name: name.into(), axis, units, unit });
        }
        Ok(())
    }
}

/// Positions a dimension may have: far beyond any model, and few enough to lay out at once.
const MAX_POSITIONS: usize = 1 << 26;

/// Resolves one dimension of a parameter or port.
pub fn resolve(axes: &[Axis], layout: &Layout) -> Result<StoredDim> {
    let mut walk = Walk { axes, leaves: Vec::new(), runs: Vec::new() };
    let name = match layout {
        Layout::Axis { axis, .. } | Layout::Repeat { axis, .. } => axis.as_str(),
        _ => "",
    };
    walk.visit(layout, name, None, 0)?;
    let starts: Vec<usize> = walk
        .leaves
        .iter()
        .scan(0, |start, leaf| Some(std::mem::replace(start, *start + leaf.units * leaf.unit)))
        .collect();
    let size: usize = walk.leaves.iter().map(|leaf| leaf.units * leaf.unit).sum();
    let mut logical_of = vec![u32::MAX; size];
    let mut logical = 0u32;
    for run in &walk.runs {
        let first = starts[run.leaf] + run.stored_unit * run.unit;
        for stored in &mut logical_of[first..first + run.unit] {
            *stored = logical;
            logical += 1;
        }
    }
    debug_assert!(logical_of.iter().all(|&l| l != u32::MAX));
    Ok(StoredDim { leaves: walk.leaves, logical_of })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(name: &str, size: usize, group: Option<&str>) -> Axis {
        Axis {
            name: name.into(),
            size,
            group: group.map(Into::into),
            shard: None,
            elastic: true,
            per_layer: true,
            active: None,
        }
    }

    fn axes() -> Vec<Axis> {
        vec![axis("heads", 4, Some("groups")), axis("groups", 2, None)]
    }

    #[test]
    fn heads_are_stored_rank_in_group_major() {
        let dim = resolve(&axes(), &Layout::axis("heads", 2)).unwrap();
        // Logical heads 0 1 | 2 3 are stored 0 2 1 3.
        assert_eq!(dim.logical_of, [0, 1, 4, 5, 2, 3, 6, 7]);
    }

    #[test]
    fn qkv_per_group_is_stored_as_three_segments() {
        let qkv = Layout::repeat(
            "groups",
            Layout::seq([("q", Layout::axis("heads", 1)), ("k", Layout::Fixed(1)), ("v", Layout::Fixed(1))]),
        );
        let dim = resolve(&axes(), &qkv).unwrap();
        // Logical rows: q0 q1 k0 v0 q2 q3 k1 v1.
        assert_eq!(dim.logical_of, [0, 4, 1, 5, 2, 6, 3, 7]);
        let names: Vec<&str> = dim.leaves.iter().map(|leaf| leaf.name.as_str()).collect();
        assert_eq!(names, ["q", "k", "v"]);
        assert_eq!(dim.leaves[1], Leaf { name: "k".into(), axis: Some(1), units: 2, unit: 1 });
    }

    #[test]
    fn impossible_dimensions_are_refused_before_they_are_laid_out() {
        for size in [1 << 27, usize::MAX] {
            let axes = vec![axis("ffn", size, None)];
            let error = resolve(&axes, &Layout::axis("ffn", 2)).unwrap_err();
            assert!(error.sentence.contains("larger than any"), "{error}");
        }
    }

    #[test]
    fn a_foreign_axis_inside_a_repetition_is_refused() {
        let mut axes = axes();
        axes.push(axis("ffn", 3, None));
        let error = resolve(&axes, &Layout::repeat("groups", Layout::axis("ffn", 1))).unwrap_err();
        assert!(error.sentence.contains("ffn"), "{error}");
    }
}
