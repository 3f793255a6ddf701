//! Smaller models inside a model: which widths they have, and which elements of its tensors they keep.
//!
//! A submodel keeps the first units of each axis in elastic order: of an axis with groups, as many of every group. In
//! logical order, in which checkpoints are, what is kept stays in ascending order, so that a submodel's tensors are plain
//! cuts.

use super::layout::{group_size, resolve};
use crate::error::{Error, Result};
use gantry_plugin_api::plan::{Axis, AxisSetting, AxisState, Layout, ModelPlan, Submodel};
use std::collections::{BTreeMap, BTreeSet};

/// Name of the axis whose units are the layers themselves.
const DEPTH: &str = "depth";

/// The submodel that hard settings describe; later settings win. Refuses what the plan does not have.
pub fn submodel(plan: &ModelPlan, settings: &[AxisSetting]) -> Result<Submodel> {
    let layers: Vec<usize> = plan.blocks.iter().filter_map(|block| block.layer).collect();
    let mut dropped = BTreeSet::new();
    let mut widths: BTreeMap<(usize, Option<usize>), usize> = BTreeMap::new();
    for setting in settings {
        let AxisSetting { axis: name, layer, state } = setting;
        if let Some(layer) = layer.filter(|layer| !layers.contains(layer)) {
            return Err(Error::recipe(format!("{name} on layer {layer}: the model has {} layers", layers.len())));
        }
        let on: Vec<usize> = layer.map_or_else(|| layers.clone(), |layer| vec![layer]);
        let depth = name == DEPTH;
        let (size, axis) = if depth {
            (1, None)
        } else {
            let elastic = || plan.axes.iter().filter(|a| a.elastic).map(|a| a.name.as_str()).collect::<Vec<_>>();
            let axis = plan.axes.iter().position(|a| a.name == *name && a.elastic).ok_or_else(|| {
                Error::recipe(format!("the model has no elastic axis {name:?}; it has {}", elastic().join(", ")))
            })?;
            (plan.axes[axis].size, Some(axis))
        };
        let n = match state {
            AxisState::Full => size,
            AxisState::Slice { n } | AxisState::Hard { n, .. } => *n,
            _ => return Err(Error::recipe(format!("{name}: a submodel has one width, not a mixture"))),
        };
        let Some(axis) = axis else {
            match n {
                0 => dropped.extend(on),
                _ => dropped.retain(|layer| !on.contains(layer)),
            }
            continue;
        };
        let groups = group_size(&plan.axes, axis)?;
        if n == 0 || n > size || !n.is_multiple_of(groups) {
            let of = if groups > 1 { format!("a multiple of its {groups} groups ") } else { String::new() };
            return Err(Error::recipe(format!(
                "axis {name} cannot keep {n} units; choose {of}from {groups} to {size}"
            )));
        }
        if plan.axes[axis].per_layer {
            widths.extend(on.into_iter().map(|layer| ((axis, Some(layer)), n)));
        } else if layer.is_some() {
            return Err(Error::recipe(format!("axis {name} has one width on all layers; leave out the layer")));
        } else {
            widths.insert((axis, None), n);
        }
    }
    let mut submodel = Submodel { dropped_layers: dropped.into_iter().collect(), ..Submodel::default() };
    for (index, axis) in plan.axes.iter().enumerate().filter(|(_, axis)| axis.elastic) {
        let width = |layer| widths.get(&(index, layer)).copied().unwrap_or(axis.size);
        let on: Vec<usize> = layers_with(plan, &axis.name).into_iter().filter(|l| submodel.keeps_layer(*l)).collect();
        let own: BTreeMap<usize, usize> = on.iter().map(|&layer| (layer, width(Some(layer)))).collect();
        let different: BTreeSet<usize> = own.values().copied().collect();
        match (axis.per_layer, different.len()) {
            (false, _) => drop(submodel.widths.insert(axis.name.clone(), width(None))),
            (true, 0) => {}
            (true, 1) => submodel.widths.extend(different.first().map(|&n| (axis.name.clone(), n))),
            (true, _) => drop(submodel.layer_widths.insert(axis.name.clone(), own)),
        }
    }
    Ok(submodel)
}

/// Layers with a parameter that is made of an axis.
fn layers_with(plan: &ModelPlan, axis: &str) -> Vec<usize> {
    fn has(layout: &Layout, wanted: &str) -> bool {
        match layout {
            Layout::Fixed(_) => false,
            Layout::Axis { axis, .. } => axis == wanted,
            Layout::Seq(parts) => parts.iter().any(|(_, layout)| has(layout, wanted)),
            Layout::Repeat { axis, inner } => axis == wanted || has(inner, wanted),
        }
    }
    let params = plan.params.iter().filter(|param| param.dims.iter().any(|dim| has(dim, axis)));
    let layers: BTreeSet<usize> = params.filter_map(|param| plan.blocks.get(param.block)?.layer).collect();
    layers.into_iter().collect()
}

/// Logical positions of a dimension on `layer` that a submodel keeps, ascending.
pub fn kept(axes: &[Axis], submodel: &Submodel, layer: Option<usize>, dim: &Layout) -> Result<Vec<u32>> {
    let order = resolve(axes, dim)?;
    let mut positions = Vec::new();
    let mut start = 0;
    for leaf in &order.leaves {
        let units = match leaf.axis {
            None => leaf.units,
            Some(index) => {
                let name = &axes[index].name;
                let here = layer.and_then(|layer| submodel.layer_widths.get(name)?.get(&layer).copied());
                here.or_else(|| submodel.widths.get(name).copied()).unwrap_or(leaf.units)
            }
        };
        positions.extend_from_slice(&order.logical_of[start..start + units * leaf.unit]);
        start += leaf.units * leaf.unit;
    }
    positions.sort_unstable();
    Ok(positions)
}

/// For each logical position of a dimension the position that takes its place when units of an axis are put in another
/// order: `order(axis, layer)` says which unit, in elastic order, comes to each place; none leaves an axis as it is.
pub fn reordered(
    axes: &[Axis],
    layer: Option<usize>,
    dim: &Layout,
    order: impl Fn(usize, Option<usize>) -> Option<Vec<usize>>,
) -> Result<Vec<u32>> {
    let stored = resolve(axes, dim)?;
    let mut from: Vec<u32> = (0..stored.logical_of.len() as u32).collect();
    let mut start = 0;
    for leaf in &stored.leaves {
        let of_axis = leaf.axis.and_then(|axis| {
            let layer = if axes[axis].per_layer { layer } else { None };
            order(axis, layer)
        });
        for (place, unit) in of_axis.into_iter().flatten().enumerate() {
            for i in 0..leaf.unit {
                let at = |unit: usize| stored.logical_of[start + unit * leaf.unit + i];
                from[at(place) as usize] = at(unit);
            }
        }
        start += leaf.units * leaf.unit;
    }
    Ok(from)
}

/// The elements of a row-major tensor of `shape` at the `kept` positions of each dimension.
pub fn cut<E: Copy>(values: &[E], shape: &[usize], kept: &[Vec<u32>]) -> Vec<E> {
    let Some((last, outer)) = kept.split_last() else { return values.to_vec() };
    let row_len = shape.last().copied().unwrap_or(1);
    let mut rows = vec![0_usize];
    for (positions, size) in outer.iter().zip(shape) {
        rows = rows.iter().flat_map(|row| positions.iter().map(move |&p| row * size + p as usize)).collect();
    }
    let mut out = Vec::with_capacity(rows.len() * last.len());
    rows.iter().for_each(|row| out.extend(last.iter().map(|&p| values[row * row_len + p as usize])));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use gantry_plugin_api::plan::{Block, Init, Param};

    fn plan() -> ModelPlan {
        let mut plan = ModelPlan {
            axes: vec![
                Axis::new("hidden", 4).elastic(),
                Axis::new("groups", 2),
                Axis::new("heads", 6).grouped_by("groups").elastic_per_layer(),
                Axis::new("ffn", 5).elastic_per_layer(),
            ],
            ..ModelPlan::default()
        };
        let mut layer = |i: usize, axis: &str| {
            let block = plan.add_block(Block::new(format!("layers.{i}"), "layer").layer(i));
            let dims = [Layout::axis(axis, 1), Layout::axis("hidden", 1)];
            plan.add_param(Param::new(format!("layers.{i}.weight"), block, dims, Init::Zeros));
        };
        [(0, "ffn"), (1, "heads"), (2, "ffn")].into_iter().for_each(|(i, axis)| layer(i, axis));
        plan
    }

    fn slice(axis: &str, layer: Option<usize>, n: usize) -> AxisSetting {
        AxisSetting { axis: axis.into(), layer, state: AxisState::Slice { n } }
    }

    #[test]
    fn widths_that_agree_on_all_layers_are_one() {
        let sub = submodel(&plan(), &[slice("ffn", None, 3), slice("heads", Some(1), 4), slice("hidden", None, 2)]);
        let sub = sub.unwrap();
        assert_eq!(sub.widths, BTreeMap::from([("ffn".into(), 3), ("heads".into(), 4), ("hidden".into(), 2)]));
        assert!(sub.layer_widths.is_empty() && sub.dropped_layers.is_empty());
        // A layer that goes has no say.
        let sub = submodel(&plan(), &[slice("ffn", Some(0), 3), slice("depth", Some(2), 0)]).unwrap();
        assert_eq!((sub.widths["ffn"], sub.dropped_layers), (3, vec![2]));
    }

    #[test]
    fn widths_that_differ_are_told_by_layer() {
        let sub = submodel(&plan(), &[slice("ffn", Some(0), 3)]).unwrap();
        assert_eq!(sub.layer_widths["ffn"], BTreeMap::from([(0, 3), (2, 5)]));
        let message = sub.width("ffn", 5).unwrap_err().message;
        assert!(message.contains("axis ffn keeps 3 on layer 0, 5 on layer 2"), "{message}");
    }

    #[test]
    fn what_the_model_has_not_is_refused() {
        for (setting, part) in [
            (slice("width", None, 1), "no elastic axis \"width\"; it has hidden, heads, ffn"),
            (slice("groups", None, 1), "no elastic axis \"groups\""),
            (slice("heads", None, 3), "cannot keep 3 units; choose a multiple of its 2 groups from 2 to 6"),
            (slice("ffn", None, 0), "cannot keep 0 units; choose from 1 to 5"),
            (slice("ffn", None, 6), "cannot keep 6 units"),
            (slice("ffn", Some(3), 2), "ffn on layer 3: the model has 3 layers"),
            (slice("hidden", Some(1), 2), "has one width on all layers"),
        ] {
            let message = submodel(&plan(), &[setting]).unwrap_err().sentence;
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn grouped_units_go_from_every_group() {
        let plan = plan();
        let sub = submodel(&plan, &[slice("heads", None, 4)]).unwrap();
        // Heads 0 1 2 | 3 4 5: the first two of each group.
        assert_eq!(kept(&plan.axes, &sub, Some(1), &Layout::axis("heads", 1)).unwrap(), [0, 1, 3, 4]);
        let qkv = Layout::repeat(
            "groups",
            Layout::seq([("q", Layout::axis("heads", 1)), ("k", Layout::Fixed(1)), ("v", Layout::Fixed(1))]),
        );
        assert_eq!(kept(&plan.axes, &sub, Some(1), &qkv).unwrap(), [0, 1, 3, 4, 5, 6, 8, 9]);
    }

    #[test]
    fn units_change_places_within_their_group() {
        let plan = plan();
        // Elastic order of heads 0 1 2 | 3 4 5 is 0 3 1 4 2 5; in the first group the last head comes first.
        let heads = |axis: usize, layer: Option<usize>| (axis == 2 && layer == Some(1)).then(|| vec![4, 1, 0, 3, 2, 5]);
        let dim = Layout::axis("heads", 1);
        assert_eq!(reordered(&plan.axes, Some(1), &dim, heads).unwrap(), [2, 0, 1, 3, 4, 5]);
        assert_eq!(reordered(&plan.axes, Some(0), &dim, heads).unwrap(), [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn a_cut_keeps_order() {
        let values: Vec<usize> = (0..2 * 3 * 4).collect();
        assert_eq!(cut(&values, &[2, 3, 4], &[vec![1], vec![0, 2], vec![1, 3]]), [13, 15, 21, 23]);
        assert_eq!(cut(&values, &[24], &[vec![5, 7]]), [5, 7]);
    }
}
