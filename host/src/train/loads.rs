//! Loads of the experts of a step, router by router: summed over micro-batches and ranks, reported, and followed by buffers.

use crate::comm::Group;
use crate::error::Result;
use crate::model::ParamTable;
use crate::optim::update;
use crate::program::graph::Load;
use gantry_kernels::Element;
use gantry_plugin_api::plan::BufferUpdate;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A router over all programs: by the buffer that its load moves, or by the path of its call if it moves none.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Buffer(usize),
    Path(Arc<str>),
}

/// What a router did in a step.
#[derive(Debug, Default)]
struct Router {
    /// Buffer entries that follow the load.
    buffers: [Option<usize>; 2],
    /// The counts cover this rank's rows only and are summed over tp.
    seq: bool,
    /// Assignments to each expert; nothing if the router was not there.
    sums: Vec<f64>,
    /// The same for the kernel.
    counts: Vec<i32>,
}

/// The routers of a rank's stage.
#[derive(Debug, Default)]
pub(super) struct Loads(BTreeMap<Key, Router>);

impl Loads {
    /// Begins a step.
    pub(super) fn clear(&mut self) {
        self.0.values_mut().for_each(|router| router.sums.clear());
    }

    /// Adds a micro-batch's counts of assignments to each expert.
    pub(super) fn add(&mut self, load: &Load, counts: &[i32]) {
        let key = match load.buffer.or(load.share) {
            Some(buffer) => Key::Buffer(buffer),
            None => Key::Path(load.router.clone()),
        };
        let router = self.0.entry(key).or_default();
        (router.buffers, router.seq) = ([load.buffer, load.share], load.seq);
        if router.sums.len() < counts.len() {
            router.sums.resize(counts.len(), 0.0);
        }
        router.sums.iter_mut().zip(counts).for_each(|(sum, &n)| *sum += f64::from(n));
    }

    /// Sums over ranks.
    pub(super) fn all_reduce<T: Element>(&mut self, tp: &dyn Group<T>, dp: &dyn Group<T>) -> Result<()> {
        for router in self.0.values_mut().filter(|router| !router.sums.is_empty()) {
            if router.seq {
                tp.all_reduce_f64(&mut router.sums)?;
            }
            dp.all_reduce_f64(&mut router.sums)?;
        }
        Ok(())
    }

    /// The largest expert's load over the mean load, of every router that was there.
    pub(super) fn max_over_mean(&self) -> impl Iterator<Item = f64> {
        self.0.values().filter_map(|router| {
            let mean = router.sums.iter().sum::<f64>() / router.sums.len().max(1) as f64;
            (mean > 0.0).then(|| router.sums.iter().copied().fold(0.0, f64::max) / mean)
        })
    }

    /// Moves the buffers that follow the load of the experts that were there.
    pub(super) fn update<T: Element>(&mut self, table: &ParamTable, buffers: &mut [T]) {
        for Router { buffers: follow, sums, counts, .. } in self.0.values_mut() {
            let total = sums.iter().sum::<f64>();
            for entry in follow.iter().flatten().map(|&index| &table.buffers[index]) {
                let buffer = &mut buffers[entry.stored.offset..][..entry.stored.len];
                match entry.update {
                    BufferUpdate::ExpertBias { rate } => {
                        counts.clear();
                        counts.extend(sums.iter().map(|&sum| sum as i32));
                        update::expert_bias(rate, counts, buffer);
                    }
                    BufferUpdate::LoadShare if total > 0.0 => {
                        buffer.iter_mut().zip(sums.iter()).for_each(|(to, load)| *to = T::of(load / total));
                    }
                    _ => {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::graph::ValueId;

    fn load(router: &str, buffer: Option<usize>, share: Option<usize>) -> Load {
        Load { router: router.into(), buffer, share, counts: ValueId(0), seq: false }
    }

    #[test]
    fn a_router_with_two_buffers_weighs_once() {
        let mut loads = Loads::default();
        for _ in 0..2 {
            loads.clear();
            loads.add(&load("a", Some(0), Some(1)), &[3, 1]);
            loads.add(&load("a", Some(0), Some(1)), &[3, 1, 2]);
            loads.add(&load("b", None, None), &[1, 1]);
            loads.add(&load("c", None, None), &[0, 4]);
        }
        // Loads 6, 2, 2; 1, 1; 0, 4.
        let ratios: Vec<f64> = loads.max_over_mean().collect();
        assert_eq!(ratios, [6.0 / (10.0 / 3.0), 1.0, 2.0]);
        // Of the next step only what is there counts.
        loads.clear();
        loads.add(&load("b", None, None), &[2, 6]);
        assert_eq!(loads.max_over_mean().collect::<Vec<_>>(), [1.5]);
    }
}
