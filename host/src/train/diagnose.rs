//! Where the numbers of a step first stop being finite: the step is computed once more with a look at everything written.
//!
//! Every rank runs the same turns as in the step itself, so that nobody waits; the earliest finding of all is the origin,
//! the others are what became of it. Only a step that went wrong pays for this.

use super::rank::Rank;
use crate::data::Batch;
use crate::error::Result;
use crate::program::diagnose::Finding;
use crate::program::replay::Phase;
use gantry_kernels::Element;
use std::sync::Arc;

/// A finding's place in a step, in the order in which numbers depend on each other: micro-batch, backward after forward,
/// stages in the order of the pass, step of the program, rank.
pub type Order = (u64, bool, usize, usize, usize);

/// What a rank notes while a step is computed again.
#[derive(Clone, Debug)]
pub(super) struct Watch {
    rank: usize,
    stage: usize,
    stages: usize,
    first: Option<(Order, Finding)>,
}

impl Watch {
    /// Notes what a phase of a micro-batch found.
    pub(super) fn note(&mut self, micro_batch: u64, found: Option<Finding>) {
        let Some(found) = found else { return };
        let backward = found.phase == Phase::Backward;
        let stage = if backward { self.stages - self.stage } else { self.stage };
        let order = (micro_batch, backward, stage, found.at, self.rank);
        if self.first.as_ref().is_none_or(|(first, _)| order < *first) {
            self.first = Some((order, found));
        }
    }
}

/// The origin as one rank sees it.
#[derive(Clone, Debug)]
pub struct Found {
    pub order: Order,
    pub finding: Finding,
    /// The parameter whose gradient it is in, if it is in one.
    pub gradient: Option<String>,
    /// A parameter that is not finite itself and that the operator reads.
    pub parameter: Option<String>,
}

impl Found {
    /// The place in words.
    pub fn place(&self, module: &str, step: u64) -> String {
        let Finding { path, operator, phase, .. } = &self.finding;
        let call = format!("{module}.{path} ({operator})");
        let what = match (&self.gradient, phase) {
            (Some(name), _) => format!("the gradient of {module}.{name}, in the backward pass of {call}"),
            (None, Phase::Forward) => format!("the output of {call}"),
            (None, Phase::Backward) => format!("the backward pass of {call}"),
        };
        let from = self.parameter.as_ref().map(|name| format!(", from parameter {module}.{name}")).unwrap_or_default();
        let (micro_batch, .., rank) = self.order;
        format!("{what}{from}, rank {rank}, step {step}, micro-batch {micro_batch}")
    }
}

impl<T: Element> Rank<T> {
    /// Computes a step once more and finds where its numbers first stop being finite on this rank. Changes nothing but the
    /// gradients, which are the same afterwards. `batches`: as for [`Rank::gradients`].
    pub fn diagnose(&mut self, step: u64, batches: &[(usize, Arc<Batch>)]) -> Result<Option<Found>> {
        let (rank, stage, stages) = (self.groups.world.rank(), self.model.place.pp, self.model.grid.pp);
        self.watch = Some(Watch { rank, stage, stages, first: None });
        let done = self.gradients(step, batches);
        let first = self.watch.take().and_then(|watch| watch.first);
        done?;
        let name = |element: usize| {
            let mut entries = self.model.table.params.iter().map(|entry| &entry.stored);
            entries.find(|s| (s.offset..s.offset + s.len).contains(&element)).map(|s| s.name.clone())
        };
        Ok(first.map(|(order, finding)| Found {
            order,
            gradient: finding.gradient.and_then(name),
            parameter: finding.parameter.and_then(name),
            finding,
        }))
    }
}
