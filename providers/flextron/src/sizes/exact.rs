//! Sizes of the model that a plan declares, from the layouts of its parameters and the memory of its blocks: equal to
//! what is built at the same widths, to the unit.

use super::{Counts, Inference};
use crate::dual::{Dual, soft_max, sum};
use gantry_plugin_api::plan::{Footprint, FootprintKind, Layout, ModelPlan};
use std::collections::BTreeSet;

/// Widths of a model's axes, and which layers it keeps.
pub trait Widths {
    /// Units of axis number `axis` of the plan, on a layer where the axis's width may differ from layer to layer.
    fn units(&self, axis: usize, layer: Option<usize>) -> Dual;
    /// Probability that a layer is kept.
    fn keep(&self, layer: usize) -> Dual;
}

/// Every axis at its full width.
pub struct Full<'a>(pub &'a ModelPlan);

impl Widths for Full<'_> {
    fn units(&self, axis: usize, _layer: Option<usize>) -> Dual {
        Dual::constant(self.0.axes[axis].size as f64)
    }

    fn keep(&self, _layer: usize) -> Dual {
        Dual::constant(1.0)
    }
}

/// Counts a plan's model.
pub struct Exact<'a> {
    plan: &'a ModelPlan,
    widths: &'a dyn Widths,
}

impl<'a> Exact<'a> {
    pub fn new(plan: &'a ModelPlan, widths: &'a dyn Widths) -> Exact<'a> {
        Exact { plan, widths }
    }

    fn axis(&self, name: &str) -> Option<usize> {
        self.plan.axes.iter().position(|axis| axis.name == name)
    }

    /// Units of an axis; for one that lacks in the plan none, which the host refuses before.
    fn units(&self, name: &str, layer: Option<usize>) -> Dual {
        match self.axis(name) {
            Some(axis) => self.widths.units(axis, layer.filter(|_| self.plan.axes[axis].per_layer)),
            None => Dual::constant(0.0),
        }
    }

    /// Positions of a dimension. `group`: the axis that encloses it, whose units share those of its own axes.
    fn size(&self, layout: &Layout, layer: Option<usize>, group: Option<&str>) -> Dual {
        match layout {
            Layout::Fixed(n) => Dual::constant(*n as f64),
            Layout::Axis { axis, unit } => {
                let units = self.units(axis, layer).scale(*unit as f64);
                let grouped = self.axis(axis).and_then(|i| self.plan.axes[i].group.as_deref());
                match (group, grouped) {
                    (Some(group), Some(own)) if group == own => &units / &self.units(group, layer),
                    _ => units,
                }
            }
            Layout::Seq(parts) => sum(&parts.iter().map(|(_, part)| self.size(part, layer, group)).collect::<Vec<_>>()),
            Layout::Repeat { axis, inner } => &self.units(axis, layer) * &self.size(inner, layer, Some(axis)),
        }
    }

    fn product(&self, dims: &[Layout], layer: Option<usize>) -> Dual {
        dims.iter().fold(Dual::constant(1.0), |size, dim| &size * &self.size(dim, layer, None))
    }

    /// Units of a leading stack that one token passes through, where the axis states it.
    fn active_units(&self, dim: &Layout, layer: Option<usize>) -> Option<Dual> {
        let Layout::Axis { axis, unit } = dim else { return None };
        let active = self.plan.axes[self.axis(axis)?].active?;
        Some(self.units(axis, layer).at_most(active as f64).scale(*unit as f64))
    }

    /// The product of dimensions with a stack at the front counted by the units that one token passes through.
    fn active_product(&self, dims: &[Layout], layer: Option<usize>) -> Option<Dual> {
        let (first, rest) = dims.split_first()?;
        Some(&self.active_units(first, layer)? * &self.product(rest, layer))
    }

    fn layer(&self, block: usize) -> Option<usize> {
        self.plan.blocks.get(block).and_then(|block| block.layer)
    }

    fn kept(&self, size: Dual, layer: Option<usize>) -> Dual {
        match layer {
            Some(layer) => &size * &self.widths.keep(layer),
            None => size,
        }
    }

    fn params(&self) -> (Dual, Dual) {
        let (mut total, mut active) = (Dual::constant(0.0), Dual::constant(0.0));
        let mut tied = BTreeSet::new();
        for param in &self.plan.params {
            if param.tie.as_ref().is_some_and(|key| !tied.insert(key)) {
                continue;
            }
            let layer = self.layer(param.block);
            let all = self.kept(self.product(&param.dims, layer), layer);
            // A tensor for each unit in a checkpoint: a token passes through some of them only.
            let stacked = param.name.contains('{').then(|| self.active_product(&param.dims, layer)).flatten();
            active = &active + &stacked.map_or_else(|| all.clone(), |some| self.kept(some, layer));
            total = &total + &all;
        }
        (total, active)
    }

    /// Elements of a block's footprints of one kind.
    fn footprint(&self, block: usize, kind: FootprintKind) -> Option<Dual> {
        let layer = self.layer(block);
        let sizes: Vec<Dual> = self.plan.blocks[block]
            .memory
            .iter()
            .filter(|footprint| footprint.kind == kind)
            .map(|Footprint { dims, .. }| self.active_product(dims, layer).unwrap_or_else(|| self.product(dims, layer)))
            .collect();
        (!sizes.is_empty()).then(|| self.kept(sum(&sizes), layer))
    }

    pub fn counts(&self, at: Inference) -> Counts {
        let (total, active) = self.params();
        let of = |kind| -> Vec<Dual> {
            (0..self.plan.blocks.len()).filter_map(|block| self.footprint(block, kind)).collect()
        };
        let batch = at.batch_size as f64;
        Counts {
            total,
            active,
            kv_cache: sum(&of(FootprintKind::PerToken)).scale(batch * at.seq_length as f64),
            ssm_cache: sum(&of(FootprintKind::PerSequence)).scale(batch),
            buffer: soft_max(&of(FootprintKind::Buffer)).scale(batch * at.prefill_chunk as f64),
        }
    }
}
