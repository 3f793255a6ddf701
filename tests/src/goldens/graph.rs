//! A small recorded program around host operators: inputs, parameters, sequence boundaries, outputs with their gradients,
//! all in logical order, on one rank.

use super::case::Result;
use gantry::comm::Alone;
use gantry::mesh::Grid;
use gantry::model::ParamTable;
use gantry::model::layout::resolve;
use gantry::program::backprop;
use gantry::program::graph::{DType, ValueId};
use gantry::program::recorder::{Context, Recorder};
use gantry::program::replay::{Arena, Memory, Phase, Program};
use gantry::program::states::States;
use gantry_kernels::Element;
use gantry_plugin_api::abi::host::with_cx;
use gantry_plugin_api::plan::{Axis, Block, Buffer, Init, Layout, ModelPlan, Param, Port, PortKind, Stage};
use gantry_plugin_api::sdk::{self, Cx, Tensor};
use std::collections::BTreeMap;

/// A result of the forward pass.
#[derive(Clone, Debug)]
pub struct Output {
    pub name: String,
    pub id: ValueId,
    /// Structure of its last dimension, where that is stored in another order than the logical one.
    pub channels: Option<Layout>,
}

/// The program.
#[derive(Default)]
pub struct Graph {
    pub axes: Vec<Axis>,
    /// (name, dimensions, values); `forward` gets them by number.
    pub params: Vec<(&'static str, Vec<Layout>, Vec<f64>)>,
    pub buffers: Vec<(&'static str, Vec<Layout>, Vec<f64>)>,
    /// (port, channels, values [tokens, channels]) with gradient.
    pub inputs: Vec<(&'static str, Layout, Vec<f64>)>,
    /// (port, values [tokens]).
    pub ids: Vec<(&'static str, Vec<i32>)>,
    /// Values of inputs that operators ask the host for.
    pub scalars: Vec<(&'static str, f64)>,
    /// Real inputs of the host's own [tokens].
    pub rows: Vec<(&'static str, Vec<f64>)>,
    pub tokens: usize,
    pub cu_seqlens: Vec<i32>,
    /// Gradients of outputs.
    pub seeds: Vec<(&'static str, Vec<f64>)>,
}

/// Results by name: outputs, losses `loss.NAME`, metrics `metric.NAME`, gradients `grad.NAME` of inputs and parameters.
pub type Results = BTreeMap<String, Vec<f64>>;

/// Says on what the outputs depend; runs in every recording.
pub type Forward<'a> = &'a dyn Fn(&mut Recorder<'_>) -> Result<Vec<Output>>;

/// A forward written as a provider writes it: (name, tensor, channels) of each output.
pub fn provider(
    cx: &mut Recorder<'_>,
    f: impl FnOnce(&Cx) -> sdk::Result<Vec<(&'static str, Tensor, Option<Layout>)>>,
) -> Result<Vec<Output>> {
    let outputs = with_cx(cx, f).map_err(|e| e.to_string())?;
    outputs
        .into_iter()
        .map(|(name, tensor, channels)| {
            let id = cx.resolve(tensor).map_err(|e| e.to_string())?;
            Ok(Output { name: name.into(), id, channels })
        })
        .collect()
}

impl Graph {
    fn plan(&self) -> ModelPlan {
        let zeros = Init::Zeros;
        let activation = |(name, channels, _): &(&str, Layout, Vec<f64>)| {
            Port::input(name, PortKind::Activation).channels(channels.clone())
        };
        ModelPlan {
            axes: self.axes.clone(),
            blocks: vec![Block::new("case", "test").layer(0)],
            params: self.params.iter().map(|(name, dims, _)| Param::new(*name, 0, dims.clone(), zeros)).collect(),
            buffers: self.buffers.iter().map(|(name, dims, _)| Buffer::new(*name, 0, dims.clone(), zeros)).collect(),
            ports: (self.inputs.iter().map(activation))
                .chain(self.ids.iter().map(|(name, _)| Port::input(name, PortKind::TokenIds)))
                .collect(),
        }
    }

    /// Records, runs forward and backward in `T`.
    pub fn run<T: Element>(&self, forward: Forward<'_>) -> Result<Results> {
        let plan = self.plan();
        let stage = Stage { begin: 0, end: 1 };
        let place = Grid::SINGLE.place(0);
        let table = ParamTable::new(&plan, &stage, Grid::SINGLE, place).map_err(text)?;
        let states = States::default();
        let mut cx = Recorder::new(Context {
            plan: &plan,
            table: &table,
            grid: Grid::SINGLE,
            place,
            states: &states,
            roles: None,
            training: true,
            frozen: false,
            tokens: self.tokens,
            longest: self.tokens,
            max_seqs: self.cu_seqlens.len().saturating_sub(1).max(1),
            seed: 1,
            state_grads: false,
            labels: None,
        });
        let outputs = forward(&mut cx)?;
        cx.finish().map_err(text)?;
        let mut seeds = Vec::new();
        for output in &outputs {
            cx.g.pin(output.id);
            if let Some((_, dy)) = self.seeds.iter().find(|(name, _)| *name == output.name) {
                let seed = cx.g.fresh_like(output.id, "seed");
                cx.g.pin(seed);
                seeds.push((output, seed, dy));
            }
        }
        let inputs: Vec<Option<ValueId>> =
            self.inputs.iter().map(|(name, ..)| cx.g.inputs.get(*name).copied()).collect();
        let wanted: Vec<ValueId> = inputs.iter().flatten().copied().collect();
        let pairs: Vec<(ValueId, ValueId)> = seeds.iter().map(|(output, seed, _)| (output.id, *seed)).collect();
        let grads = backprop::append(&mut cx.g, &pairs, &wanted).map_err(text)?;
        let program = Program::bind(std::mem::take(&mut cx.g), 1).map_err(text)?;

        let mut arena = program.arena::<T>();
        // What nothing writes must not look like a result.
        arena.act.fill(T::of(f64::NAN));
        self.fill_inputs(&program, &mut arena)?;
        for ((_, channels, values), id) in self.inputs.iter().zip(&inputs) {
            if let Some(id) = id {
                let order = self.order(Some(channels), program.graph.value(*id).cols)?;
                scatter(program.get_mut(&mut arena, *id), values, &order, program.graph.value(*id).ld)?;
            }
        }
        for (output, seed, dy) in &seeds {
            let order = self.order(output.channels.as_ref(), program.graph.value(*seed).cols)?;
            scatter(program.get_mut(&mut arena, *seed), dy, &order, program.graph.value(*seed).ld)?;
        }
        let mut params = vec![T::ZERO; table.param_len];
        for (entry, (name, _, values)) in table.params.iter().zip(&self.params) {
            let indices = entry.stored.logical_indices();
            if indices.len() != values.len() {
                return Err(format!("parameter {name} has {} elements, given {}", indices.len(), values.len()));
            }
            let to = &mut params[entry.stored.offset..];
            to.iter_mut().zip(indices).for_each(|(to, i)| *to = T::of(values[i]));
        }
        let mut buffers = vec![T::ZERO; table.buffer_len];
        for (entry, (_, _, values)) in table.buffers.iter().zip(&self.buffers) {
            let to = &mut buffers[entry.stored.offset..];
            to.iter_mut().zip(entry.stored.logical_indices()).for_each(|(to, i)| *to = T::of(values[i]));
        }
        let mut main_grads = vec![T::ZERO; table.param_len];
        let mut memory = Memory { params: &params, grads: &mut main_grads, buffers: &buffers, teacher: &[] };
        program.run(Phase::Forward, &mut arena, &mut memory, &Alone).map_err(text)?;

        let mut results = Results::new();
        for output in &outputs {
            let value = program.graph.value(output.id);
            let values = if value.dtype == DType::I32 {
                program.get_int(&arena, output.id).iter().map(|&x| f64::from(x)).collect()
            } else {
                let order = self.order(output.channels.as_ref(), value.cols)?;
                gather(program.get(&arena, output.id), &order, value.rows, value.ld)
            };
            results.insert(output.name.clone(), values);
        }
        for term in &program.graph.losses {
            results.insert(format!("loss.{}", term.name), vec![program.get(&arena, term.value)[0].to_f64()]);
        }
        for (name, id) in &program.graph.metrics {
            results.insert(format!("metric.{name}"), vec![program.get(&arena, *id)[0].to_f64()]);
        }
        for load in &program.graph.loads {
            let counts = program.get_int(&arena, load.counts).iter().map(|&n| f64::from(n)).collect();
            results.insert("load".into(), counts);
        }
        program.run(Phase::Backward, &mut arena, &mut memory, &Alone).map_err(text)?;
        let mut grads = grads.into_iter();
        for ((name, channels, values), id) in self.inputs.iter().zip(&inputs) {
            let grad = match id.and_then(|_| grads.next().flatten()) {
                Some(id) => {
                    let value = program.graph.value(id);
                    let order = self.order(Some(channels), value.cols)?;
                    gather(program.get(&arena, id), &order, value.rows, value.ld)
                }
                None => vec![0.0; values.len()],
            };
            results.insert(format!("grad.{name}"), grad);
        }
        for (entry, (name, ..)) in table.params.iter().zip(&self.params) {
            let mut grad = vec![f64::NAN; entry.stored.len];
            let from = &main_grads[entry.stored.offset..];
            entry.stored.logical_indices().zip(from).for_each(|(i, x)| grad[i] = x.to_f64());
            results.insert(format!("grad.{name}"), grad);
        }
        Ok(results)
    }

    fn fill_inputs<T: Element>(&self, program: &Program, arena: &mut Arena<T>) -> Result<()> {
        for (name, &id) in &program.graph.inputs {
            let name = name.as_str();
            let ids = self.ids.iter().find(|(n, _)| *n == name).map(|(_, ids)| ids);
            let rows = self.rows.iter().find(|(n, _)| *n == name).map(|(_, rows)| rows);
            let scalar = self.scalars.iter().find(|(n, _)| *n == name).map(|(_, x)| *x);
            if name == "cu_seqlens" {
                program.get_int_mut(arena, id).copy_from_slice(&self.cu_seqlens);
            } else if let Some(ids) = ids {
                program.get_int_mut(arena, id).copy_from_slice(ids);
            } else if let Some(rows) = rows {
                program.get_mut(arena, id).iter_mut().zip(rows).for_each(|(to, &x)| *to = T::of(x));
            } else if let Some(x) = scalar {
                match program.graph.value(id).dtype {
                    DType::I32 => program.get_int_mut(arena, id).fill(x as i32),
                    _ => program.get_mut(arena, id).fill(T::of(x)),
                }
            } else if !self.inputs.iter().any(|(n, ..)| *n == name) {
                return Err(format!("an operator asks for input {name:?}, which the check does not give"));
            }
        }
        Ok(())
    }

    /// Logical position of each stored column.
    fn order(&self, channels: Option<&Layout>, cols: usize) -> Result<Vec<u32>> {
        match channels {
            Some(layout) => Ok(resolve(&self.axes, layout).map_err(text)?.logical_of),
            None => Ok((0..cols as u32).collect()),
        }
    }
}

fn text(e: impl std::fmt::Display) -> String {
    e.to_string()
}

/// Logical rows to stored rows `ld` apart.
fn scatter<T: Element>(to: &mut [T], values: &[f64], order: &[u32], ld: usize) -> Result<()> {
    let rows = values.len() / order.len();
    if rows * order.len() != values.len() || to.len() < rows.saturating_sub(1) * ld + order.len() {
        return Err(format!("{} values do not fit into rows of {}", values.len(), order.len()));
    }
    for (t, row) in values.chunks(order.len()).enumerate() {
        to[t * ld..].iter_mut().zip(order).for_each(|(to, &i)| *to = T::of(row[i as usize]));
    }
    Ok(())
}

/// Stored rows to logical rows.
fn gather<T: Element>(from: &[T], order: &[u32], rows: usize, ld: usize) -> Vec<f64> {
    let mut values = vec![f64::NAN; rows * order.len()];
    for (t, row) in values.chunks_mut(order.len()).enumerate() {
        from[t * ld..].iter().zip(order).for_each(|(x, &i)| row[i as usize] = x.to_f64());
    }
    values
}
