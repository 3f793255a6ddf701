//! Memory of a run besides the tensors of its ranks, for the plan: what is counted, and what stands in constants here.
//!
//! Counted from the recorded programs: buffers of collectives between ranks, and the records themselves. Counted from the
//! data, which the plan reads as the run does: the corpora and the batches made ahead. Measured: the program's code,
//! libraries and start-up, which are in the process that plans too. Constants: what one worker thread holds.

use crate::data::{self, Batch, Position, RunData};
use crate::error::Result;
use crate::mesh::{Grid, Place};
use crate::model::ParamTable;
use crate::observe::resident_bytes;
use crate::program::graph::{Action, Collective};
use crate::program::replay::Program;
use crate::recipe::Recipe;
use serde::Serialize;

/// Buffers of one thread's matrix products and its stack, as far as it is used. The library packs a block of the left factor
/// for the second-level cache.
const PER_WORKER: usize = 3 << 19;
/// Most that a matrix product packs of its right factor: a part of the last-level cache.
const MOST_PACKED: usize = 8 << 20;
/// Code that training touches and planning does not: the kernels.
const KERNEL_CODE: usize = 3 << 20;
/// Of one step of a record, with its operands, names and bound ranges, and of one value.
const PER_STEP: usize = 2048;
const PER_VALUE: usize = 512;

/// Bytes of the process that belong to no rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ProcessMemory {
    /// Code, libraries, plugins and start-up.
    pub program: usize,
    /// Corpora and batches made ahead.
    pub data: usize,
    /// Copies of the state while a checkpoint is written.
    pub checkpoint: usize,
    /// Buffers of the kernels' threads.
    pub workers: usize,
}

impl ProcessMemory {
    pub fn total(&self) -> usize {
        self.program + self.data + self.checkpoint + self.workers
    }
}

/// What this process holds before anything of a run is there.
pub fn program_bytes() -> usize {
    resident_bytes() as usize + KERNEL_CODE
}

/// What the data need, and how many sequences a micro-batch may be cut into.
pub struct DataNeeds {
    pub bytes: usize,
    pub sequences: usize,
}

/// Reads the data as a run does.
pub fn data(recipe: &Recipe) -> Result<DataNeeds> {
    let tokenizer = data::tokenizer(recipe)?;
    let run = RunData::open(recipe, tokenizer.as_ref(), Position::default())?;
    let (corpora, loader) = (run.bytes(), run.loader);
    let Batch { tokens, labels, loss_mask, cu_seqlens, .. } = loader.batch(1, 0)?;
    let batch = 4 * (tokens.len() + labels.len() + loss_mask.len() + cu_seqlens.len());
    Ok(DataNeeds { bytes: corpora + batches(recipe, batch), sequences: loader.cu_seqlens_len() - 1 })
}

/// Bytes of the batches of a run, by those of one micro-batch.
fn batches(recipe: &Recipe, batch: usize) -> usize {
    // Those made ahead, those being made, and those of the step.
    let steps = recipe.data.prefetch.saturating_add(2);
    let micro_batches = recipe.train.global_batch_size / recipe.train.micro_batch_size;
    steps.saturating_mul(micro_batches).saturating_mul(batch)
}

/// Bytes of the batches of a run whose data are not read: one sequence per sample.
pub fn batches_unread(recipe: &Recipe) -> usize {
    let samples = recipe.train.micro_batch_size;
    let batch = samples.saturating_mul(recipe.train.seq_length).saturating_mul(3).saturating_add(samples + 1);
    batches(recipe, batch.saturating_mul(4))
}

/// Threads' buffers, for ranks that share the machine's cores. `largest`: elements of the largest matrix of the model.
pub fn workers(ranks: usize, largest: usize, element: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = (cores / ranks).max(1);
    ranks * (threads * PER_WORKER + (largest * element).min(MOST_PACKED))
}

/// Bytes of a rank's record.
pub fn record(program: &Program) -> usize {
    program.graph.steps.len() * PER_STEP + program.graph.values.len() * PER_VALUE
}

/// Bytes of a rank's buffers in groups of threads: what it last gave, and sums under way. `sent`: elements that go to the
/// next stage, and come back as a gradient, for each of `alive` micro-batches.
pub fn collectives(
    program: &Program,
    table: &ParamTable,
    grid: Grid,
    place: Place,
    element: usize,
    sent: usize,
) -> usize {
    let (mut given, mut sum) = (0, 0);
    for step in &program.graph.steps {
        if let Action::Collective { kind, len, .. } = &step.action {
            match kind {
                Collective::AllReduce => (given, sum) = (given.max(*len), sum.max(*len)),
                Collective::ReduceScatter => given = given.max(len * grid.tp),
                Collective::AllGather => given = given.max(*len),
                Collective::AllGatherInt => {}
            }
        }
    }
    if grid.tp > 1 {
        for (entry, _) in table.params.iter().zip(&program.graph.partial_grads).filter(|(_, partial)| **partial) {
            (given, sum) = (given.max(entry.stored.len), sum.max(entry.stored.len));
        }
    }
    let replicas = if grid.dp > 1 { 2 * table.param_len } else { 0 };
    // A message under way and one to be used again, forward and backward.
    let messages = if place.pp + 1 < grid.pp { 4 * sent } else { 0 };
    (given + sum + replicas + messages) * element
}
