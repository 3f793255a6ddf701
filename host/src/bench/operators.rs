//! Runs one case: records its operators with their gradients as a run does, and times every kernel.

use super::Sample;
use super::cases::Case;
use crate::comm::Alone;
use crate::error::Result;
use crate::mesh::Grid;
use crate::model::ParamTable;
use crate::model::layout::resolve;
use crate::program::backprop;
use crate::program::dims::Dim;
use crate::program::graph::{DType, ValueId};
use crate::program::profile::Profile;
use crate::program::recorder::{Context, Recorder};
use crate::program::replay::{Arena, Memory, Phase, Program};
use crate::program::states::States;
use gantry_kernels::Element;
use gantry_kernels::philox::{Stream, stream_of};
use gantry_plugin_api::plan::{Block, Init, ModelPlan, Param, Stage};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Runs of a case at least, and at most.
const RUNS: std::ops::Range<usize> = 5..200;

/// One class of kernels in one case.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    pub operator: &'static str,
    pub size: String,
    /// The kernels' name.
    pub class: &'static str,
    pub launches: u64,
    /// Of all its launches in one forward and backward pass.
    pub seconds: Sample,
    pub flops: f64,
    pub bytes: f64,
}

/// Times a case for about `time`, on the current thread pool. One entry per class of kernels, in order of name.
pub fn measure<T: Element>(case: &Case, time: Duration) -> Result<Vec<Measured>> {
    let plan = plan(case);
    let (grid, place) = (Grid::SINGLE, Grid::SINGLE.place(0));
    let table = ParamTable::new(&plan, &Stage { begin: 0, end: 1 }, grid, place)?;
    let states = States::resolve(&plan, &[])?;
    let max_seqs = case.ints.iter().find(|(name, _)| *name == "cu_seqlens").map_or(1, |(_, values)| values.len() - 1);
    let mut cx = Recorder::new(Context {
        plan: &plan,
        table: &table,
        grid,
        place,
        states: &states,
        roles: None,
        training: true,
        frozen: false,
        tokens: case.tokens,
        longest: case.tokens / max_seqs.max(1),
        max_seqs,
        seed: 1,
        state_grads: false,
        labels: None,
    });
    let mut inputs = Vec::new();
    for (rows, channels) in &case.inputs {
        let order = resolve(&plan.axes, channels)?;
        let channels = cx.active(&table.dim(&order, None, grid, place)?);
        let id = cx.fresh("x", [Dim::plain("tokens", *rows), channels], false, true);
        cx.g.pin(id);
        inputs.push(id);
    }
    for (name, values) in &case.ints {
        cx.int_input(name, values.len())?;
    }
    cx.begin_call(case.operator);
    let outputs = (case.forward)(&mut cx, &inputs)?;
    let mut seeds: Vec<(ValueId, ValueId)> = Vec::new();
    for y in outputs {
        cx.g.pin(y);
        if cx.value(y).needs_grad {
            let seed = cx.g.fresh_like(y, "seed");
            cx.g.pin(seed);
            seeds.push((y, seed));
        }
    }
    cx.finish()?;
    backprop::append(&mut cx.g, &seeds, &inputs)?;
    let program = Program::bind(std::mem::take(&mut cx.g), grid.tp)?;

    let mut arena = program.arena::<T>();
    let filled = inputs.iter().copied().chain(seeds.iter().map(|(_, seed)| *seed));
    filled.enumerate().for_each(|(n, id)| fill(&program, &mut arena, id, n));
    for (name, values) in &case.ints {
        program.get_int_mut(&mut arena, program.graph.inputs[*name]).copy_from_slice(values);
    }
    if let Some(&step) = program.graph.inputs.get("step") {
        program.get_int_mut(&mut arena, step)[0] = 1;
    }
    let mut params = vec![T::ZERO; table.param_len];
    for entry in &table.params {
        let values = entry.stored.initial(3);
        params[entry.stored.offset..][..entry.stored.len].iter_mut().zip(values).for_each(|(to, x)| *to = T::of(x));
    }
    let mut grads = vec![T::ZERO; table.param_len];
    let mut memory = Memory { params: &params, grads: &mut grads, buffers: &[], teacher: &[] };
    let mut runs: Vec<Profile> = Vec::new();
    let begun = Instant::now();
    // The first run touches memory for the first time.
    while runs.len() <= RUNS.start || (begun.elapsed() < time && runs.len() <= RUNS.end) {
        let mut profile = Profile::default();
        for phase in [Phase::Forward, Phase::Backward] {
            program.run_profiled(phase, &mut arena, &mut memory, &Alone, Some(&mut profile))?;
        }
        runs.push(profile);
    }
    let mut seconds: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for (class, sums) in runs.iter().skip(1).flat_map(|run| &run.classes) {
        seconds.entry(class).or_default().push(sums.seconds);
    }
    let classes =
        runs[0].classes.iter().filter(|(class, _)| !case.helpers.iter().any(|helper| class.starts_with(helper)));
    Ok(classes
        .map(|(&class, sums)| Measured {
            operator: case.operator,
            size: case.size.clone(),
            class,
            launches: sums.launches,
            seconds: Sample::of(seconds.remove(class).unwrap_or_default()),
            flops: sums.flops,
            bytes: sums.bytes,
        })
        .collect())
}

/// Normal numbers, as activations are.
fn fill<T: Element>(program: &Program, arena: &mut Arena<T>, id: ValueId, number: usize) {
    if program.graph.value(id).dtype == DType::Real {
        let stream = Stream::new(9, stream_of("bench"), number as u32);
        program.get_mut(arena, id).iter_mut().enumerate().for_each(|(i, x)| *x = T::of(stream.normal(i as u64)));
    }
}

fn plan(case: &Case) -> ModelPlan {
    let block = Block {
        path: "bench".into(),
        kind: "bench".into(),
        layer: None,
        starts_stage: false,
        extra_flops_per_token: 0.0,
        memory: Vec::new(),
    };
    let param = |(number, dims): (usize, &Vec<gantry_plugin_api::plan::Layout>)| Param {
        name: format!("p{number}"),
        block: 0,
        dims: dims.clone(),
        init: Init::Normal { std: 0.05 },
        decay: true,
        lr_mult: 1.0,
        fp32: false,
        tie: None,
        export_shape: None,
        hf_name: None,
    };
    ModelPlan {
        axes: case.axes.clone(),
        blocks: vec![block],
        params: case.params.iter().enumerate().map(param).collect(),
        ..ModelPlan::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::cases;
    use super::*;

    /// Every operator at a small size: all kernels have work by count and time that was measured.
    #[test]
    fn every_case_runs() {
        for case in cases::all(64, 32) {
            let measured = measure::<f32>(&case, Duration::ZERO).unwrap_or_else(|e| panic!("{}: {e}", case.operator));
            assert!(!measured.is_empty(), "{}: nothing was measured", case.operator);
            for class in &measured {
                let name = format!("{} {}", case.operator, class.class);
                assert!(class.seconds.median > 0.0 && class.seconds.count == RUNS.start, "{name}: {:?}", class.seconds);
                assert!(class.bytes > 0.0 && class.launches > 0, "{name}: {class:?}");
            }
        }
    }

    #[test]
    fn a_linear_layer_counts_its_three_products() {
        let case = cases::all(64, 32).into_iter().find(|case| case.operator == "linear").unwrap();
        let flops: f64 = measure::<f64>(&case, Duration::ZERO).unwrap().iter().map(|class| class.flops).sum();
        assert_eq!(flops, 3.0 * 2.0 * 64.0 * 32.0 * 128.0);
    }
}
