//! Replays a program with a look at everything that is written: where do numbers stop being finite?
//!
//! Runs only when a step has gone wrong, on the same inputs: a replay is deterministic, so it goes wrong in the same place.

use super::graph::{Action, Operand, Space, StorageId, ValueId};
use super::replay::{Arena, Memory, Phase, Program};
use crate::comm::Group;
use crate::error::Result;
use gantry_kernels::Element;
use std::collections::BTreeSet;

/// The first number of a phase that is not finite.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// Step of the program.
    pub at: usize,
    /// Path of the operator call, and the operator.
    pub path: String,
    pub operator: &'static str,
    pub phase: Phase,
    /// The number.
    pub value: f64,
    /// It stands in the main gradients, at this element.
    pub gradient: Option<usize>,
    /// First element of a parameter that the step reads and that itself is not finite.
    pub parameter: Option<usize>,
}

impl Program {
    /// As [`Program::run`], until the end, with the first finding. The arena begins the forward phase without NaN and
    /// infinity: where kernels leave gaps, all there is must be what this replay wrote.
    pub fn run_checked<T: Element>(
        &self,
        phase: Phase,
        arena: &mut Arena<T>,
        memory: &mut Memory<'_, T>,
        tp: &dyn Group<T>,
    ) -> Result<Option<Finding>> {
        let read = self.read();
        let mut found = None;
        for i in self.steps_of(phase) {
            self.run_step(i, arena, memory, tp)?;
            if found.is_none() {
                found = self.look(i, phase, &read, arena, memory);
            }
        }
        Ok(found)
    }

    /// Storages somebody reads. What nobody does is scratch, and no cause of anything.
    fn read(&self) -> BTreeSet<StorageId> {
        let steps = self.graph.steps.iter().flat_map(|step| match &step.action {
            Action::Launch { ins, .. } => ins.iter().map(|o| o.storage).collect::<Vec<_>>(),
            Action::Collective { src, .. } => vec![src.storage],
        });
        let pinned =
            (0u32..).zip(&self.graph.storages).filter(|(_, storage)| storage.pinned).map(|(i, _)| StorageId(i));
        steps.chain(pinned).collect()
    }

    fn look<T: Element>(
        &self,
        at: usize,
        phase: Phase,
        read: &BTreeSet<StorageId>,
        arena: &Arena<T>,
        memory: &Memory<'_, T>,
    ) -> Option<Finding> {
        let step = &self.graph.steps[at];
        let (value, gradient) = match &step.action {
            Action::Launch { outs, .. } => outs.iter().zip(&step.writes).find_map(|(operand, &value)| {
                let grads = self.space(operand) == Space::Grad;
                if !grads && !read.contains(&operand.storage) {
                    return None;
                }
                let all = if grads { &*memory.grads } else { &arena.act };
                let (element, value) = self.first_in_window(operand, value, all)?;
                Some((value, grads.then_some(element)))
            })?,
            Action::Collective { .. } => {
                let received = &arena.act[self.received(at)?];
                (received.iter().find(|x| !x.is_finite())?.to_f64(), None)
            }
        };
        let (path, operator) = (self.graph.step_path(step), self.graph.step_operator(step));
        let parameter = match &step.action {
            Action::Launch { ins, .. } => ins.iter().filter(|o| self.space(o) == Space::Param).find_map(|operand| {
                let start = self.plan.offsets[operand.storage.0 as usize];
                let len = self.graph.storages[operand.storage.0 as usize].len;
                memory.params[start..start + len].iter().position(|x| !x.is_finite()).map(|i| start + i)
            }),
            Action::Collective { .. } => None,
        };
        Some(Finding { at, path, operator, phase, value, gradient, parameter })
    }

    fn space(&self, operand: &Operand) -> Space {
        self.graph.storages[operand.storage.0 as usize].space
    }

    /// The first element of an output that is not finite. Between the rows of a column window lies what others wrote.
    fn first_in_window<T: Element>(&self, operand: &Operand, value: ValueId, all: &[T]) -> Option<(usize, f64)> {
        let value = self.graph.value(value);
        let begin = self.plan.offsets[operand.storage.0 as usize];
        let end = (begin + self.graph.storages[operand.storage.0 as usize].len).min(all.len());
        (0..value.rows).find_map(|row| {
            let start = (begin + operand.offset + row * value.ld).min(end);
            let row = &all[start..(start + value.cols).min(end)];
            row.iter().position(|x| !x.is_finite()).map(|i| (start + i, row[i].to_f64()))
        })
    }
}
