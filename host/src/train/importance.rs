//! How much each unit of an axis does, seen in forward passes over data.
//!
//! - Units of an axis that is the same on all layers (channels of the residual stream): mean |x| of what norms give, over
//!   all of them.
//! - Channels of one layer: mean |x| of what the next projection takes.
//! - Heads: mean L2 norm of what the head gives to the next projection.
//! - Experts: sum of the L2 norms of what an expert gives for its tokens, routing probability included, over all tokens.
//! - Layers: mean square of the difference in the logits that leaving the layer out makes, over the mean square of the logits.
//!
//! The first four follow Minitron (Muralidharan et al. 2024, arXiv 2407.14679), which ranks by what activations are, the
//! last Nemotron Elastic (Taghibakhshi et al. 2025, arXiv 2511.16664). Units are compared within their group.

use super::rank::{Elastic, Rank};
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::model::layout::group_size;
use crate::program::dims::AxisKey;
use crate::program::graph::{Mark, Seen, Value};
use crate::program::replay::{Arena, Program};
use gantry_kernels::Element;
use gantry_plugin_api::plan::{AxisSetting, AxisState, ModelPlan};
use std::collections::BTreeMap;

/// Sums for every unit of every axis seen, in elastic order.
#[derive(Clone, Debug, Default)]
pub struct Importance {
    units: BTreeMap<AxisKey, Sums>,
    tokens: f64,
}

#[derive(Clone, Debug, Default)]
struct Sums {
    units: Vec<f64>,
    /// Rows they are over; none for experts, whose sums are over the tokens that came to them.
    rows: f64,
}

/// Units of one axis, on one layer or on all.
#[derive(Clone, Debug, PartialEq)]
pub struct AxisRanking {
    /// Index into the plan's axes.
    pub axis: usize,
    pub layer: Option<usize>,
    /// Of each unit in elastic order.
    pub importance: Vec<f64>,
    /// Unit that takes each place, the most important of each group first.
    pub order: Vec<usize>,
}

impl Importance {
    /// Adds what a mark shows.
    pub(super) fn see<T: Element>(&mut self, program: &Program, arena: &Arena<T>, mark: &Mark) {
        let value = program.graph.value(mark.value);
        let data = program.get(arena, mark.value);
        match mark.seen {
            Seen::NormOutput => self.add_units(value, data, |axis| axis.layer.is_none()),
            Seen::ProjectionInput => self.add_units(value, data, |axis| axis.layer.is_some()),
            Seen::ExpertOutput { experts, offsets } => {
                let offsets = program.get_int(arena, offsets);
                let sums = &mut self.units.entry(experts).or_default().units;
                sums.resize(offsets.len() - 1, 0.0);
                for (sum, slots) in sums.iter_mut().zip(offsets.windows(2)) {
                    for slot in slots[0] as usize..slots[1] as usize {
                        *sum += norm(&data[slot * value.ld..][..value.cols]);
                    }
                }
            }
        }
    }

    fn add_units<T: Element>(&mut self, value: &Value, data: &[T], wanted: impl Fn(AxisKey) -> bool) {
        let mut start = 0;
        for seg in &value.last().segs {
            if let Some(axis) = seg.axis.filter(|&axis| wanted(axis)) {
                let Sums { units: sums, rows } = self.units.entry(axis).or_default();
                sums.resize(seg.units, 0.0);
                *rows += value.rows as f64;
                for row in 0..value.rows {
                    let row = &data[row * value.ld + start..][..seg.size()];
                    sums.iter_mut().zip(row.chunks_exact(seg.unit)).for_each(|(sum, unit)| *sum += norm(unit));
                }
            }
            start += seg.size();
        }
    }

    /// Means per row, for experts per token, and the order that follows.
    pub fn rankings(&self, plan: &ModelPlan) -> Result<Vec<AxisRanking>> {
        let elastic = self.units.iter().filter(|(key, _)| plan.axes[key.axis as usize].elastic);
        elastic
            .map(|(key, sums)| {
                let axis = key.axis as usize;
                let rows = if sums.rows > 0.0 { sums.rows } else { self.tokens.max(1.0) };
                let importance: Vec<f64> = sums.units.iter().map(|sum| sum / rows).collect();
                let order = order(&importance, group_size(&plan.axes, axis)?);
                Ok(AxisRanking { axis, layer: key.layer.map(usize::from), importance, order })
            })
            .collect()
    }
}

/// L2 norm; of one number its magnitude.
fn norm<T: Element>(x: &[T]) -> f64 {
    match x {
        [one] => one.to_f64().abs(),
        many => many.iter().map(|x| x.to_f64() * x.to_f64()).sum::<f64>().sqrt(),
    }
}

/// Units by falling importance within their group; unit i is of group i mod `groups`. Equal ones keep their order.
fn order(importance: &[f64], groups: usize) -> Vec<usize> {
    let mut order = vec![0; importance.len()];
    for group in 0..groups {
        let mut units: Vec<usize> = (group..importance.len()).step_by(groups).collect();
        units.sort_by(|&a, &b| importance[b].total_cmp(&importance[a]));
        units.into_iter().enumerate().for_each(|(rank, unit)| order[rank * groups + group] = unit);
    }
    order
}

impl<T: Element> Rank<T> {
    /// Sums over the tokens of batches; the rank holds the whole model.
    pub fn calibrate(&mut self, batches: &[Batch], so_far: Importance) -> Result<Importance> {
        self.importance = Some(so_far);
        let done = batches.iter().try_for_each(|batch| self.hidden_pass(batch));
        let mut importance = self.importance.take().unwrap_or_default();
        importance.tokens += batches.iter().map(|batch| batch.tokens.len() as f64).sum::<f64>();
        done.map(|()| importance)
    }

    /// Sums over batches of the squared difference that leaving out each layer makes in the logits, and of the squared
    /// logits: ([layers], whole).
    pub fn layer_errors(&mut self, batches: &[Batch], layers: &[usize]) -> Result<(Vec<f64>, f64)> {
        let (mut errors, mut whole) = (vec![0.0; layers.len()], 0.0);
        for batch in batches {
            let full = self.logits_without(batch, None)?;
            whole += full.iter().map(|x| x * x).sum::<f64>();
            for (error, &layer) in errors.iter_mut().zip(layers) {
                let other = self.logits_without(batch, Some(layer))?;
                *error += full.iter().zip(&other).map(|(a, b)| (a - b) * (a - b)).sum::<f64>();
            }
        }
        Ok((errors, whole))
    }

    fn logits_without(&mut self, batch: &Batch, layer: Option<usize>) -> Result<Vec<f64>> {
        let skip = |layer| AxisSetting { axis: "depth".into(), layer: Some(layer), state: AxisState::Slice { n: 0 } };
        self.elastic = Elastic::Fixed(layer.map(skip).into_iter().collect());
        let logits = self.logits(batch);
        self.elastic = Elastic::Off;
        logits?.ok_or_else(|| Error::plugin("the model gives no logits on this rank"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_important_of_each_group_come_first() {
        // Units 0 2 4 are of group 0, 1 3 5 of group 1.
        assert_eq!(order(&[1.0, 9.0, 3.0, 2.0, 2.0, 5.0], 2), [2, 1, 4, 5, 0, 3]);
        assert_eq!(order(&[1.0, 1.0, 2.0], 1), [2, 0, 1]);
    }

    #[test]
    fn one_number_counts_by_magnitude_and_many_by_their_norm() {
        assert_eq!((norm(&[-2.0_f32]), norm(&[3.0_f64, -4.0])), (2.0, 5.0));
    }
}
