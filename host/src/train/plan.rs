//! What `gantry plan` tells: who holds what, how much memory and arithmetic, before anything is allocated.
//!
//! Parameters come from the model's declaration, activations and FLOPs from the recorded program of each distinct rank
//! (data-parallel replicas are alike), so the numbers are those of the run. The process's memory is that of all its ranks
//! and what `footprint.rs` counts besides; tests compare it with the peak of real runs. Not counted: an n-gram baseline
//! (`data.ngram_order`) of a high order, which is counted and gone before the first step, axis states of an elastifier, and
//! what plugins allocate themselves.

use super::engine;
use super::footprint::{self, DataNeeds, ProcessMemory};
use super::record::{Compiled, Mode, Signature, StageModel};
use super::team::{Cut, ElasticSpec, TeamSpec, stage_model};
use crate::checkpoint::Staging;
use crate::error::Result;
use crate::mesh::Place;
use crate::model::ParamTable;
use crate::optim::multipliers;
use crate::plugin::PluginSet;
use crate::program::graph::{Action, Graph};
use crate::program::replay::Program;
use crate::program::states::States;
use crate::recipe::{Precision, Recipe};
use gantry_plugin_api::plan::Stage;
use serde::Serialize;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt::Write;

/// The plan of a run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PlanReport {
    pub name: String,
    pub module: String,
    pub provider: String,
    pub precision: String,
    pub grid: GridReport,
    /// Trained numbers, tied ones once.
    pub parameters: usize,
    /// Parameters by block kind, e.g. `mamba`.
    pub parameters_by_kind: BTreeMap<String, usize>,
    /// Rows of the model's vocabulary, padding included, if it says so.
    pub vocabulary: Option<usize>,
    pub tokens_per_step: usize,
    /// Forward and backward of all ranks.
    pub flops_per_step: f64,
    /// What the numbers take for granted.
    pub assumes: Vec<String>,
    /// Of the process besides its ranks' memory.
    pub process: ProcessMemory,
    /// Peak of the process: all ranks and the above.
    pub memory_peak_bytes: usize,
    pub ranks: Vec<RankReport>,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct GridReport {
    pub ranks: usize,
    pub tp: usize,
    pub dp: usize,
    pub pp: usize,
    pub sequence_parallel: bool,
}

/// What one rank holds and does.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RankReport {
    pub rank: usize,
    pub tp: usize,
    pub dp: usize,
    pub pp: usize,
    /// Paths of the blocks of its pipeline stage.
    pub blocks: Vec<String>,
    pub parameters: usize,
    pub memory: MemoryReport,
    pub micro_batches_per_step: usize,
    /// Forward only, of one micro-batch, with the teacher's.
    pub forward_flops_per_micro_batch: f64,
    /// Forward and backward of all its micro-batches.
    pub flops_per_step: f64,
    /// Sent through tensor-parallel collectives, all micro-batches.
    pub tp_bytes_per_step: f64,
}

/// Bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryReport {
    pub parameters: usize,
    pub gradients: usize,
    pub optimizer: usize,
    pub buffers: usize,
    /// Of all micro-batches alive at once.
    pub activations: usize,
    /// Buffers of collectives and messages between ranks.
    pub communication: usize,
    /// The recorded program itself.
    pub record: usize,
    /// Of the frozen model to learn from: parameters, one forward pass, record.
    pub teacher: usize,
    pub total: usize,
}

/// Plans a recipe for `ranks` ranks (default: as many as the grid states). Reads the data, as documents that end inside
/// samples take memory; if they cannot be read, the plan says what it assumes instead.
pub fn plan(recipe: &Recipe, plugins: PluginSet, ranks: Option<usize>) -> Result<PlanReport> {
    let program = footprint::program_bytes();
    let data = footprint::data(recipe);
    report(recipe, plugins, ranks, program, data.map_err(|why| format!("as the data cannot be read: {}", why.sentence)))
}

/// As [`plan`], without a look at the data.
pub fn quick(recipe: &Recipe, plugins: PluginSet, ranks: Option<usize>) -> Result<PlanReport> {
    report(recipe, plugins, ranks, footprint::program_bytes(), Err("as the data were not read".into()))
}

fn report(
    recipe: &Recipe,
    plugins: PluginSet,
    ranks: Option<usize>,
    program: usize,
    data: Result<DataNeeds, String>,
) -> Result<PlanReport> {
    let spec = engine::spec(recipe, plugins, ranks)?;
    spec.grid.check()?;
    let student = Cut::of(&spec, &spec.provider, &spec.config)?;
    let plan = &student.plan;
    multipliers::resolve(plan, &recipe.optimizer.multipliers)?;
    let teacher = student.of_teacher(&spec)?;
    let sequences = data.as_ref().map_or(recipe.train.micro_batch_size, |data| data.sequences);
    let mut assumes = vec![match &data {
        Ok(_) => format!("micro-batches of up to {sequences} sequences, the most that the data's documents make"),
        Err(why) => format!("one sequence per sample and no corpus in memory, {why}"),
    }];
    if !matches!(spec.elastic, ElasticSpec::Off) {
        assumes.push("full widths: what the elastifier adds is not counted".into());
    }
    let mut distinct: BTreeMap<(usize, usize), RankReport> = BTreeMap::new();
    let mut reports = Vec::new();
    for rank in 0..spec.grid.ranks() {
        let place = spec.grid.place(rank);
        let report = match distinct.entry((place.pp, place.tp)) {
            Entry::Occupied(alike) => alike.get().clone(),
            Entry::Vacant(new) => {
                new.insert(rank_report(recipe, &spec, &student, teacher.as_ref(), place, sequences)?).clone()
            }
        };
        reports.push(RankReport { rank, dp: place.dp, ..report });
    }
    let whole = Stage { begin: 0, end: plan.blocks.len() };
    let single = crate::mesh::Grid::SINGLE;
    let table = ParamTable::new(plan, &whole, single, single.place(0))?;
    let mut by_kind: BTreeMap<String, usize> = BTreeMap::new();
    for entry in &table.params {
        *by_kind.entry(plan.blocks[plan.params[entry.plan].block].kind.clone()).or_default() += entry.stored.len;
    }
    let largest = table.params.iter().map(|entry| {
        let shape = entry.stored.shape();
        shape[shape.len().saturating_sub(2)..].iter().product()
    });
    let process = ProcessMemory {
        program,
        data: data.as_ref().map_or_else(|_| footprint::batches_unread(recipe), |data| data.bytes),
        checkpoint: checkpoint_bytes(recipe, &table),
        workers: footprint::workers(spec.grid.ranks(), largest.max().unwrap_or(0), element_bytes(recipe)),
    };
    Ok(PlanReport {
        name: recipe.name.clone(),
        module: recipe.modules.keys().next().cloned().unwrap_or_default(),
        provider: spec.provider.clone(),
        precision: precision(recipe).into(),
        grid: GridReport {
            ranks: spec.grid.ranks(),
            tp: spec.grid.tp,
            dp: spec.grid.dp,
            pp: spec.grid.pp,
            sequence_parallel: spec.grid.sequence_parallel,
        },
        parameters: by_kind.values().sum(),
        parameters_by_kind: by_kind,
        vocabulary: super::team::vocab(&student.plan),
        tokens_per_step: recipe.train.global_batch_size * recipe.train.seq_length,
        flops_per_step: reports.iter().map(|rank| rank.flops_per_step).sum(),
        assumes,
        process,
        memory_peak_bytes: process.total() + reports.iter().map(|rank| rank.memory.total).sum::<usize>(),
        ranks: reports,
    })
}

/// Bytes of copies that a save needs: parameters, two moments of each, and buffers.
fn checkpoint_bytes(recipe: &Recipe, whole: &ParamTable) -> usize {
    let params: usize = whole.params.iter().map(|entry| entry.stored.len).sum();
    let buffers: usize = whole.buffers.iter().map(|entry| entry.stored.len).sum();
    Staging::needs((3 * params + buffers) * element_bytes(recipe), recipe.checkpoint.beside)
}

fn element_bytes(recipe: &Recipe) -> usize {
    match recipe.train.precision {
        Precision::Fp64 => 8,
        Precision::Fp32 | Precision::Bf16 => 4,
    }
}

fn precision(recipe: &Recipe) -> &'static str {
    match recipe.train.precision {
        Precision::Fp32 => "fp32",
        Precision::Fp64 => "fp64",
        Precision::Bf16 => "bf16",
    }
}

fn rank_report(
    recipe: &Recipe,
    spec: &TeamSpec,
    student: &Cut,
    teacher: Option<&Cut>,
    place: Place,
    sequences: usize,
) -> Result<RankReport> {
    let train = &recipe.train;
    let bytes = element_bytes(recipe);
    let model = stage_model(spec, &spec.provider, &spec.config, student.clone(), place)?;
    let states = States::default();
    let signature = Signature {
        mode: Mode::Train,
        tokens: train.micro_batch_size * train.seq_length,
        longest: train.seq_length,
        max_seqs: sequences,
        states: states.keys.clone(),
    };
    let teacher = match (teacher, &spec.teacher) {
        (Some(cut), Some(teacher)) => {
            let model = stage_model(spec, &teacher.provider, &teacher.config, cut.clone(), place)?;
            let model = StageModel { frozen: true, ..model };
            let compiled = model.compile(&Signature { mode: Mode::Hidden, ..signature.clone() }, &states, None)?;
            Some((model, compiled, teacher.distillation))
        }
        _ => None,
    };
    let head = teacher.as_ref().and_then(|(model, compiled, how)| {
        let entry = &model.table.params[compiled.head?];
        Some((&entry.stored, *how))
    });
    let compiled = model.compile(&signature, &states, head)?;
    let sent = compiled.sent.map_or(0, |(id, _)| compiled.program.graph.value(id).len());
    let program = compiled.program;
    let micro_batches = train.global_batch_size / train.micro_batch_size / spec.grid.dp;
    let alive = (spec.grid.pp - place.pp).min(micro_batches);
    let table = &model.table;
    let arena = |program: &Program| program.plan.act_len * bytes + program.plan.int_len * size_of::<i32>();
    let activations = alive * arena(&program);
    let mut memory = MemoryReport {
        parameters: table.param_len * bytes,
        gradients: table.param_len * bytes,
        optimizer: 2 * table.param_len * bytes,
        buffers: table.buffer_len * bytes,
        activations,
        communication: footprint::collectives(&program, table, spec.grid, place, bytes, sent),
        record: footprint::record(&program),
        teacher: teacher.as_ref().map_or(0, |(StageModel { table, .. }, Compiled { program, .. }, _)| {
            (table.param_len + table.buffer_len) * bytes + arena(program) + footprint::record(program)
        }),
        total: 0,
    };
    memory.total = memory.parameters
        + memory.gradients
        + memory.optimizer
        + memory.buffers
        + memory.activations
        + memory.communication
        + memory.record
        + memory.teacher;
    let taught = teacher.as_ref().map_or(0.0, |(_, compiled, _)| flops(&compiled.program.graph, true));
    let (forward, backward) = (flops(&program.graph, true) + taught, flops(&program.graph, false));
    Ok(RankReport {
        rank: 0,
        tp: place.tp,
        dp: place.dp,
        pp: place.pp,
        blocks: model.plan.blocks[model.stage.begin..model.stage.end].iter().map(|block| block.path.clone()).collect(),
        parameters: table.params.iter().map(|entry| entry.stored.len).sum(),
        memory,
        micro_batches_per_step: micro_batches,
        forward_flops_per_micro_batch: forward,
        flops_per_step: (forward + backward) * micro_batches as f64,
        tp_bytes_per_step: (collective_elements(&program.graph) * bytes * micro_batches) as f64,
    })
}

/// Floating-point operations of the forward or the backward steps.
fn flops(graph: &Graph, forward: bool) -> f64 {
    let (ahead, back) = graph.steps.split_at(graph.forward_steps.min(graph.steps.len()));
    let steps = if forward { ahead } else { back };
    let cost = |action: &Action| match action {
        Action::Launch { kernel, .. } => kernel.cost().flops,
        Action::Collective { .. } => 0.0,
    };
    steps.iter().map(|step| cost(&step.action)).sum()
}

fn collective_elements(graph: &Graph) -> usize {
    let len = |action: &Action| match action {
        Action::Launch { .. } => 0,
        Action::Collective { len, .. } => *len,
    };
    graph.steps.iter().map(|step| len(&step.action)).sum()
}

impl PlanReport {
    /// The report as text.
    pub fn human(&self) -> String {
        let mut text = String::new();
        let grid = &self.grid;
        let parallel = if grid.sequence_parallel { ", sequence parallel" } else { "" };
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "recipe      {}: module {} of {}, {}",
            self.name, self.module, self.provider, self.precision
        );
        let _ = writeln!(
            text,
            "mesh        {} ranks: tp {} x dp {} x pp {}{parallel}",
            grid.ranks, grid.tp, grid.dp, grid.pp
        );
        let kinds: Vec<_> = self.parameters_by_kind.iter().map(|(kind, n)| format!("{kind} {}", count(*n))).collect();
        let _ = writeln!(text, "parameters  {} ({})", count(self.parameters), kinds.join(", "));
        let per_token = self.flops_per_step / self.tokens_per_step as f64;
        let _ = writeln!(
            text,
            "a step      {} tokens, {:.3} TFLOP forward and backward ({:.2} MFLOP per token)",
            self.tokens_per_step,
            self.flops_per_step / 1e12,
            per_token / 1e6
        );
        let process = &self.process;
        let _ = writeln!(
            text,
            "memory      {} at the peak: ranks {}, program {}, data {}, copies for a checkpoint {}, threads {}",
            size(self.memory_peak_bytes),
            size(self.memory_peak_bytes - process.total()),
            size(process.program),
            size(process.data),
            size(process.checkpoint),
            size(process.workers)
        );
        for assumption in &self.assumes {
            let _ = writeln!(text, "assumes     {assumption}");
        }
        let _ = writeln!(text);
        let _ = writeln!(
            text,
            "{:>4} {:>3} {:>3} {:>3} {:>11} {:>10} {:>10} {:>10} {:>11} {:>10} {:>10} {:>12}  blocks",
            "rank",
            "tp",
            "dp",
            "pp",
            "parameters",
            "weights",
            "gradients",
            "optimizer",
            "activations",
            "other",
            "total",
            "GFLOP/step"
        );
        for rank in &self.ranks {
            let memory = &rank.memory;
            let blocks = match rank.blocks.as_slice() {
                [] => "none".into(),
                [one] => one.clone(),
                [first, .., last] => format!("{first} .. {last}"),
            };
            let _ = writeln!(
                text,
                "{:>4} {:>3} {:>3} {:>3} {:>11} {:>10} {:>10} {:>10} {:>11} {:>10} {:>10} {:>12.2}  {blocks}",
                rank.rank,
                rank.tp,
                rank.dp,
                rank.pp,
                count(rank.parameters),
                size(memory.parameters + memory.buffers),
                size(memory.gradients),
                size(memory.optimizer),
                size(memory.activations),
                size(memory.communication + memory.record + memory.teacher),
                size(memory.total),
                rank.flops_per_step / 1e9
            );
        }
        text
    }
}

/// A count with a decimal unit.
fn count(n: usize) -> String {
    match n {
        0..10_000 => n.to_string(),
        10_000..10_000_000 => format!("{:.1} k", n as f64 / 1e3),
        10_000_000..10_000_000_000 => format!("{:.1} M", n as f64 / 1e6),
        _ => format!("{:.1} G", n as f64 / 1e9),
    }
}

/// Bytes with a binary unit.
pub(super) fn size(bytes: usize) -> String {
    let bytes = bytes as f64;
    match bytes {
        b if b < 1024.0 => format!("{b} B"),
        b if b < 1024.0 * 1024.0 => format!("{:.1} KiB", b / 1024.0),
        b if b < 1024.0 * 1024.0 * 1024.0 => format!("{:.1} MiB", b / 1024.0 / 1024.0),
        b => format!("{:.2} GiB", b / 1024.0 / 1024.0 / 1024.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(9_999, "9999")]
    #[case(1_234_567, "1234.6 k")]
    #[case(12_345_678_901, "12.3 G")]
    fn counts(#[case] n: usize, #[case] text: &str) {
        assert_eq!(count(n), text);
    }

    #[rstest]
    #[case(1000, "1000 B")]
    #[case(1536, "1.5 KiB")]
    #[case(3 << 30, "3.00 GiB")]
    fn sizes(#[case] bytes: usize, #[case] text: &str) {
        assert_eq!(size(bytes), text);
    }
}
