//! Test support for operators: one description of a small program, checked three ways in f64.
//!
//! [`OpTest::check`] compares its gradients with finite differences on one rank, and its outputs, input gradients and
//! parameter gradients on two tensor-parallel ranks (threads), with and without sequence parallelism, with one rank.

use super::backprop;
use super::dims::{Dim, Segment};
use super::graph::{DType, ValueId};
use super::recorder::{Context, Recorder};
use super::replay::{Memory, Phase, Program};
use super::states::States;
use crate::comm::{Group, threads};
use crate::error::Result;
use crate::mesh::{Grid, Place};
use crate::model::ParamTable;
use crate::model::layout::resolve;
use gantry_kernels::philox::{Stream, stream_of};
use gantry_plugin_api::plan::{Axis, AxisSetting, Block, Init, Layout, ModelPlan, Param, Shard, Stage};
use std::collections::BTreeMap;
use std::time::Duration;

/// A real input [rows, channels] with gradient.
pub struct Input {
    pub name: &'static str,
    pub rows: usize,
    pub channels: Layout,
    /// Rows are spread under sequence parallelism.
    pub spread: bool,
}

type Forward = Box<dyn Fn(&mut Recorder<'_>, &[ValueId]) -> Result<Vec<ValueId>> + Sync>;

/// A small program around the operators under test.
pub struct OpTest {
    pub axes: Vec<Axis>,
    /// (name, dimensions); values are normal with deviation 0.5. `forward` gets them by `cx.param_value(index)`.
    pub params: Vec<(&'static str, Vec<Layout>)>,
    pub inputs: Vec<Input>,
    /// i32 inputs, the same on every rank. `cu_seqlens` is one of them where operators need it.
    pub ints: Vec<(&'static str, Vec<i32>)>,
    pub tokens: usize,
    /// Axis states.
    pub settings: Vec<AxisSetting>,
    /// Whether gradients of state numbers are checked too.
    pub state_grads: bool,
    /// See [`Context::labels`].
    pub labels: Option<usize>,
    /// Records the operators on the inputs' values and returns the outputs; the loss is sum(output * random).
    pub forward: Forward,
}

/// An axis spread over tp (if `tp`), elastic, one width per model.
pub fn axis(name: &str, size: usize, tp: bool) -> Axis {
    Axis {
        name: name.into(),
        size,
        group: None,
        shard: tp.then_some(Shard::Tp),
        elastic: true,
        per_layer: false,
        active: None,
    }
}

/// All results of a run by name, in storage order over all ranks: outputs `y0`.., gradients `d.<input>`, `d.<param>`.
pub type Results = BTreeMap<String, Vec<f64>>;

impl OpTest {
    pub fn plan(&self) -> ModelPlan {
        ModelPlan {
            axes: self.axes.clone(),
            blocks: vec![Block {
                path: "block".into(),
                kind: "test".into(),
                layer: Some(0),
                starts_stage: false,
                extra_flops_per_token: 0.0,
                memory: Vec::new(),
            }],
            params: self
                .params
                .iter()
                .map(|(name, dims)| Param {
                    name: (*name).into(),
                    block: 0,
                    dims: dims.clone(),
                    init: Init::Normal { std: 0.5 },
                    decay: true,
                    lr_mult: 1.0,
                    fp32: false,
                    tie: None,
                    export_shape: None,
                    hf_name: None,
                })
                .collect(),
            ..ModelPlan::default()
        }
    }

    /// Finite differences, and two ranks against one.
    pub fn check(&self) {
        self.check_gradients();
        self.check_parity();
    }

    /// Two tensor-parallel ranks, with and without sequence parallelism, against one.
    pub fn check_parity(&self) {
        let single = self.run(Grid::SINGLE);
        for sequence_parallel in [false, true] {
            let grid = Grid { tp: 2, sequence_parallel, ..Grid::SINGLE };
            let parallel = self.run(grid);
            assert_eq!(single.keys().collect::<Vec<_>>(), parallel.keys().collect::<Vec<_>>());
            for (name, one) in &single {
                let error = relative_l2(one, &parallel[name]);
                assert!(error < 1e-10, "{name} differs by {error:e} with tp 2, sequence_parallel {sequence_parallel}");
            }
        }
    }

    /// Gradients of inputs, parameters and state numbers against central differences, on up to 40 elements of each.
    pub fn check_gradients(&self) {
        self.differences(|_| true);
    }

    /// As [`OpTest::check_gradients`], of these inputs and parameters alone: others may be held fixed by the operator.
    pub fn check_gradients_of(&self, names: &[&str]) {
        self.differences(|name| names.contains(&name));
    }

    fn differences(&self, wanted: impl Fn(&str) -> bool) {
        let base = self.run(Grid::SINGLE);
        for name in base.keys().filter(|name| name.strip_prefix("d.").is_some_and(&wanted)) {
            let grad = &base[name];
            let scale = grad.iter().fold(1e-3f64, |m, g| m.max(g.abs()));
            let what = &name[2..];
            for k in 0..grad.len().min(40) {
                let i = k * grad.len() / grad.len().min(40);
                let h = 1e-5;
                let up = self.loss(&self.run_with(Grid::SINGLE, Some((what, i, h))));
                let down = self.loss(&self.run_with(Grid::SINGLE, Some((what, i, -h))));
                let numeric = (up - down) / (2.0 * h);
                assert!(
                    (numeric - grad[i]).abs() <= 2e-6 * scale,
                    "{name}[{i}] is {} but finite differences give {numeric} (scale {scale})",
                    grad[i]
                );
            }
        }
    }

    fn loss(&self, results: &Results) -> f64 {
        results
            .iter()
            .filter(|(name, _)| name.starts_with('y'))
            .map(|(name, y)| y.iter().enumerate().map(|(i, y)| y * seed(name, i)).sum::<f64>())
            .sum()
    }

    /// Runs forward and backward on the grid's tp ranks as threads.
    pub fn run(&self, grid: Grid) -> Results {
        self.run_with(grid, None)
    }

    fn run_with(&self, grid: Grid, nudge: Option<(&str, usize, f64)>) -> Results {
        let groups = threads::group::<f64>("tp", grid.tp, Duration::from_secs(20));
        let parts: Vec<Vec<(String, usize, f64)>> = std::thread::scope(|scope| {
            let ranks: Vec<_> = groups
                .into_iter()
                .map(|group| {
                    scope.spawn(move || {
                        self.rank(grid, &group, nudge).unwrap_or_else(|e| {
                            group.abort(&e.to_string());
                            panic!("{e}")
                        })
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let mut results = Results::new();
        for (name, index, value) in parts.into_iter().flatten() {
            let values = results.entry(name).or_default();
            if values.len() <= index {
                values.resize(index + 1, f64::NAN);
            }
            values[index] = value;
        }
        results
    }

    fn rank(
        &self,
        grid: Grid,
        group: &dyn Group<f64>,
        nudge: Option<(&str, usize, f64)>,
    ) -> Result<Vec<(String, usize, f64)>> {
        let plan = self.plan();
        let place = Place { tp: group.rank(), dp: 0, pp: 0 };
        let table = ParamTable::new(&plan, &Stage { begin: 0, end: 1 }, grid, place)?;
        let states = States::resolve(&plan, &self.settings)?;
        let max_seqs = self.ints.iter().find(|i| i.0 == "cu_seqlens").map_or(1, |i| i.1.len() - 1);
        let mut cx = Recorder::new(Context {
            plan: &plan,
            table: &table,
            grid,
            place,
            states: &states,
            roles: None,
            training: true,
            frozen: false,
            tokens: self.tokens,
            longest: self.tokens,
            max_seqs,
            seed: 1,
            state_grads: self.state_grads,
            labels: self.labels,
        });
        let mut inputs = Vec::new();
        for input in &self.inputs {
            let order = resolve(&plan.axes, &input.channels)?;
            let channels = cx.active(&table.dim(&order, Some(0), grid, place)?);
            let seq = input.spread && grid.sequence_parallel;
            let id = cx.fresh(input.name, [Dim::plain("tokens", input.rows), channels], seq, true);
            cx.g.pin(id);
            inputs.push(id);
        }
        for (name, values) in &self.ints {
            cx.int_input(name, values.len())?;
        }
        let region = gantry_plugin_api::sdk::HostCalls::region_begin(
            &mut cx,
            "block",
            gantry_plugin_api::ops::RegionKind::Layer,
            Some(0),
        );
        assert!(region.is_ok());
        let mut outputs = Vec::new();
        for y in (self.forward)(&mut cx, &inputs)? {
            let y = cx.summed(y)?;
            cx.g.pin(y);
            outputs.push(y);
        }
        let _ = gantry_plugin_api::sdk::HostCalls::region_end(&mut cx);
        cx.finish()?;
        let mut seeds = Vec::new();
        for &y in &outputs {
            if cx.value(y).needs_grad {
                let seed = cx.g.fresh_like(y, "seed");
                cx.g.pin(seed);
                seeds.push((y, seed));
            }
        }
        let state_inputs: Vec<(String, ValueId)> =
            cx.g.inputs
                .iter()
                .filter(|(name, _)| name.starts_with("state."))
                .map(|(name, id)| (name.clone(), *id))
                .collect();
        let state_ids: Vec<ValueId> = state_inputs.iter().map(|(_, id)| *id).collect();
        let wanted: Vec<ValueId> = inputs.iter().copied().chain(state_ids.iter().copied()).collect();
        let grads = backprop::append(&mut cx.g, &seeds, &wanted)?;
        let program = Program::bind(std::mem::take(&mut cx.g), grid.tp)?;

        let nudge_of = |name: &str, i: usize| match nudge {
            Some((what, at, by)) if what == name && at == i => by,
            _ => 0.0,
        };
        let mut arena = program.arena::<f64>();
        arena.act.fill(f64::NAN);
        for (input, &id) in self.inputs.iter().zip(&inputs) {
            let index = indices(&program, id, grid, place);
            let stream = Stream::new(9, stream_of(input.name), 0);
            for (x, i) in program.get_mut(&mut arena, id).iter_mut().zip(index) {
                *x = stream.normal(i as u64) + nudge_of(input.name, i);
            }
        }
        for (name, values) in &self.ints {
            let id = program.graph.inputs[*name];
            program.get_int_mut(&mut arena, id).copy_from_slice(values);
        }
        for (name, id) in &state_inputs {
            for (i, x) in program.get_mut(&mut arena, *id).iter_mut().enumerate() {
                *x = states.data[name][i] + nudge_of(name, i);
            }
        }
        for &(y, dy) in &seeds {
            let name = format!("y{}", outputs.iter().position(|&o| o == y).unwrap());
            let index = indices(&program, y, grid, place);
            for (x, i) in program.get_mut(&mut arena, dy).iter_mut().zip(index) {
                *x = seed(&name, i);
            }
        }
        let mut params = vec![0.0; table.param_len];
        for entry in &table.params {
            let stored = &entry.stored;
            let values = stored.initial(3);
            for ((x, value), i) in
                params[stored.offset..][..stored.len].iter_mut().zip(values).zip(stored.logical_indices())
            {
                *x = value + nudge_of(&stored.name, i);
            }
        }
        let mut main_grads = vec![0.0; table.param_len];
        let mut memory = Memory { params: &params, grads: &mut main_grads, buffers: &[], teacher: &[] };
        program.run(Phase::Forward, &mut arena, &mut memory, group)?;
        let mut results = Vec::new();
        for (n, &y) in outputs.iter().enumerate() {
            let index = indices(&program, y, grid, place);
            if program.graph.value(y).dtype == DType::Real {
                let values = rows(&program, &arena, y);
                results.extend(index.into_iter().zip(values).map(|(i, x)| (format!("y{n}"), i, x)));
            }
        }
        program.run(Phase::Backward, &mut arena, &mut memory, group)?;
        let names = self.inputs.iter().map(|i| i.name.to_string()).chain(state_inputs.iter().map(|s| s.0.clone()));
        for ((name, id), grad) in names.zip(&wanted).zip(grads) {
            let index = indices(&program, *id, grid, place);
            let values = grad.map_or_else(|| vec![0.0; index.len()], |grad| rows(&program, &arena, grad));
            results.extend(index.into_iter().zip(values).map(|(i, x)| (format!("d.{name}"), i, x)));
        }
        for (e, entry) in table.params.iter().enumerate() {
            let stored = &entry.stored;
            let grad = &mut main_grads[stored.offset..][..stored.len];
            let flag = |flags: &[bool]| flags.get(e).copied().unwrap_or(false);
            assert!(!(flag(&program.graph.partial_grads) && flag(&program.graph.full_grads)), "{}", stored.name);
            if flag(&program.graph.partial_grads) {
                group.all_reduce(grad)?;
            }
            let index = stored.logical_indices();
            results.extend(index.into_iter().zip(grad.iter()).map(|(i, x)| (format!("d.{}", stored.name), i, *x)));
        }
        Ok(results)
    }
}

/// Upstream gradient of element `i` of an output.
fn seed(name: &str, i: usize) -> f64 {
    Stream::new(5, stream_of(name), 0).normal(i as u64)
}

/// Elements of a value in row order, without the gaps between rows.
fn rows(program: &Program, arena: &super::replay::Arena<f64>, id: ValueId) -> Vec<f64> {
    let v = program.graph.value(id);
    let all = program.get(arena, id);
    (0..v.rows).flat_map(|row| all[row * v.ld..][..v.cols].to_vec()).collect()
}

/// Index of every local element among all ranks' elements, in storage order.
fn indices(program: &Program, id: ValueId, grid: Grid, place: Place) -> Vec<usize> {
    let v = program.graph.value(id);
    let dims: Vec<&Dim> = v.dims.iter().collect();
    let expand = |dim: &Dim| {
        let mut at = Vec::new();
        let mut start = 0;
        for Segment { units, unit, parts, part, .. } in dim.segs.iter().cloned() {
            for u in (part..units).step_by(parts) {
                at.extend((0..unit).map(|k| start + u * unit + k));
            }
            start += units * unit;
        }
        at
    };
    let mut all = vec![0];
    for dim in &dims {
        let (size, here) = (dim.size(), expand(dim));
        all = all.iter().flat_map(|&base| here.iter().map(move |&i| base * size + i)).collect();
    }
    if v.seq {
        let part = all.len() / grid.tp;
        all = all[place.tp * part..][..part].to_vec();
    }
    all
}

pub fn relative_l2(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let scale = norm(&mut a.iter().copied()).max(norm(&mut b.iter().copied()));
    let diff = norm(&mut a.iter().zip(b).map(|(a, b)| a - b));
    if scale == 0.0 { diff } else { diff / scale }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::ops::{arith, linear, rms_norm};
    use gantry_plugin_api::ops::RegionKind;
    use gantry_plugin_api::sdk::{HostCalls, RegionEntry};

    /// A column-parallel and a row-parallel product around a norm and a residual: every change of placement.
    fn block() -> OpTest {
        OpTest {
            axes: vec![axis("hidden", 6, false), axis("ffn", 8, true)],
            params: vec![
                ("norm", vec![Layout::axis("hidden", 1)]),
                ("fc1", vec![Layout::axis("ffn", 1), Layout::axis("hidden", 1)]),
                ("fc2", vec![Layout::axis("hidden", 1), Layout::axis("ffn", 1)]),
                ("bias", vec![Layout::axis("hidden", 1)]),
                ("gate", vec![Layout::axis("hidden", 1), Layout::axis("hidden", 1)]),
            ],
            inputs: vec![Input { name: "x", rows: 4, channels: Layout::axis("hidden", 1), spread: true }],
            ints: vec![],
            tokens: 4,
            settings: vec![],
            state_grads: false,
            labels: None,
            forward: Box::new(|cx, inputs| {
                let p = (0..5).map(|i| cx.param_value(i)).collect::<Result<Vec<_>>>()?;
                let h = rms_norm::record(cx, Default::default(), &[inputs[0], p[0]])?[0];
                let f = linear::record(cx, Default::default(), &[h, p[1]])?[0];
                let f = arith::mul(cx, Default::default(), &[f, f])?[0];
                let y = linear::record(cx, Default::default(), &[f, p[2], p[3]])?[0];
                let g = linear::record(cx, Default::default(), &[h, p[4]])?[0];
                let y = arith::add(cx, Default::default(), &[y, g])?[0];
                Ok(vec![arith::add(cx, Default::default(), &[inputs[0], y])?[0]])
            }),
        }
    }

    #[test]
    fn a_parallel_block_equals_one_rank() {
        block().check();
    }

    /// y = W x, recorded inside a region of `kind`, plus x.
    fn in_region(kind: RegionKind) -> OpTest {
        OpTest {
            axes: vec![axis("hidden", 4, false)],
            params: vec![("w", vec![Layout::axis("hidden", 1), Layout::axis("hidden", 1)])],
            inputs: vec![Input { name: "x", rows: 2, channels: Layout::axis("hidden", 1), spread: true }],
            ints: vec![],
            tokens: 2,
            settings: vec![],
            state_grads: false,
            labels: None,
            forward: Box::new(move |cx, inputs| {
                let w = cx.param_value(0)?;
                let open = cx.region_begin("inner", kind, None);
                assert_eq!(open, Ok(RegionEntry::Enter));
                let h = linear::record(cx, Default::default(), &[inputs[0], w])?[0];
                let h = arith::mul(cx, Default::default(), &[h, h])?[0];
                let close = cx.region_end();
                assert_eq!(close, Ok(()));
                Ok(vec![arith::add(cx, Default::default(), &[inputs[0], h])?[0]])
            }),
        }
    }

    #[test]
    fn a_recomputed_region_has_the_same_gradients() {
        in_region(RegionKind::Recompute).check();
        let (kept, again) = (in_region(RegionKind::Plain), in_region(RegionKind::Recompute));
        assert_eq!(kept.run(Grid::SINGLE), again.run(Grid::SINGLE));
    }

    #[test]
    fn no_gradient_leaves_a_region_without_one() {
        let results = in_region(RegionKind::NoGrad).run(Grid::SINGLE);
        assert!(results["d.w"].iter().all(|&g| g == 0.0), "{:?}", results["d.w"]);
        let seeds: Vec<f64> = (0..8).map(|i| seed("y0", i)).collect();
        assert_eq!(results["d.x"], seeds, "only the residual carries a gradient");
        assert!(in_region(RegionKind::Plain).run(Grid::SINGLE)["d.w"].iter().all(|&g| g != 0.0));
    }
}
