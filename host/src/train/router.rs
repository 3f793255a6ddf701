//! The small model by which an elastifier chooses axis states: recorded once, run for every micro-batch, trained with the
//! target.
//!
//! It is the same on every rank and runs on each by itself, so it needs no collective of its own. The gradient of its
//! outputs is that of the state numbers they became, which each pipeline stage has for its own layers: at the end of a step
//! they are summed over stages, the loss on the outputs is added, and only then does its backward pass run, for each
//! micro-batch. Parameter gradients are then summed over data-parallel ranks like any other.

use super::rank::Groups;
use super::team::ELASTIFIER;
use crate::checkpoint::CheckpointReader;
use crate::comm::Alone;
use crate::error::{Cause, Error, Result};
use crate::mesh::Grid;
use crate::model::ParamTable;
use crate::optim::update::{self, AdamConfig, Moments, StepHyper};
use crate::plugin::ElastifierInstance;
use crate::program::backprop;
use crate::program::graph::ValueId;
use crate::program::recorder::{Context, Recorder};
use crate::program::replay::{Arena, Memory, Phase, Program};
use crate::program::states::States;
use gantry_kernels::Element;
use gantry_plugin_api::plan::{Choice, ChoiceLoss, Direction, ElasticPlan, ModelPlan, Occasion, Source, Stage, Values};
use std::collections::BTreeMap;

/// An output of the router's program.
struct Output {
    name: String,
    value: ValueId,
    /// Its gradient, if it has one.
    seed: Option<ValueId>,
}

/// A micro-batch between the router's forward and backward pass.
struct Pending<T> {
    arena: Arena<T>,
    /// Gradients of the outputs, one list after the other.
    gradients: Vec<f64>,
    sources: Vec<Source>,
    /// Setting that a state input's numbers are of.
    settings: BTreeMap<String, usize>,
    loss: Option<ChoiceLoss>,
    /// Share of the step's tokens.
    share: f64,
}

/// What became of a micro-batch's choice, for reports.
#[derive(Clone, Debug, Default)]
pub(super) struct Chosen {
    pub label: Option<String>,
    pub params: Option<f64>,
    pub metrics: BTreeMap<String, f64>,
    pub loss: Option<(String, f64)>,
}

/// A router on one rank.
pub struct Router<T> {
    pub table: ParamTable,
    pub params: Vec<T>,
    pub grads: Vec<T>,
    pub moments: Moments<T>,
    /// Labels that choices may have.
    pub labels: Vec<String>,
    program: Program,
    outputs: Vec<Output>,
    free: Vec<Arena<T>>,
    pending: Vec<Pending<T>>,
}

/// The whole of a router's plan, on one rank.
pub fn table(plan: &ModelPlan) -> Result<ParamTable> {
    ParamTable::new(plan, &Stage { begin: 0, end: plan.blocks.len() }, Grid::SINGLE, Grid::SINGLE.place(0))
}

impl<T: Element> Router<T> {
    /// Records the router that `wants` declares, if it does. `trains`: it has gradients and optimizer state.
    pub fn new(
        wants: &ElasticPlan,
        elastifier: &ElastifierInstance,
        seed: u64,
        trains: bool,
    ) -> Result<Option<Router<T>>> {
        let Some(plan) = &wants.router else { return Ok(None) };
        let table = table(plan)?;
        let (program, outputs) = record(plan, &table, elastifier, seed)?;
        let mut params = vec![T::ZERO; table.param_len];
        for entry in &table.params {
            let stored = &entry.stored;
            let values = stored.initial(seed);
            params[stored.offset..][..stored.len].iter_mut().zip(values).for_each(|(to, x)| *to = T::of(x));
        }
        let trained = if trains { table.param_len } else { 0 };
        Ok(Some(Router {
            grads: vec![T::ZERO; trained],
            moments: Moments::new(trained),
            labels: wants.labels.clone(),
            params,
            table,
            program,
            outputs,
            free: Vec::new(),
            pending: Vec::new(),
        }))
    }

    /// Takes its parameters from a checkpoint.
    pub fn load(&mut self, reader: &mut CheckpointReader) -> Result<()> {
        for entry in &self.table.params {
            let stored = &entry.stored;
            let values = reader.take(&format!("{ELASTIFIER}{}", stored.name), &stored.shape())?.data.into_f64();
            let to = &mut self.params[stored.offset..][..stored.len];
            to.iter_mut().zip(stored.logical_indices()).for_each(|(to, i)| *to = T::of(values[i]));
        }
        Ok(())
    }

    /// Runs the program on the inputs that the elastifier gives for an occasion, and asks what it makes of the outputs.
    fn run(&mut self, elastifier: &mut ElastifierInstance, occasion: &Occasion) -> Result<(Arena<T>, Choice)> {
        let inputs = elastifier.router_inputs(occasion)?;
        let mut arena = self.free.pop().unwrap_or_else(|| self.program.arena());
        for (name, &id) in &self.program.graph.inputs {
            let values = inputs.get(name).ok_or_else(|| {
                Error::plugin(format!("the elastifier's router has an input {name:?}, which nothing gives a value"))
            })?;
            let to = self.program.get_mut(&mut arena, id);
            if to.len() != values.len() {
                return Err(Error::plugin(format!(
                    "the elastifier gives input {name:?} of its router {} numbers; it takes {}",
                    values.len(),
                    to.len()
                )));
            }
            to.iter_mut().zip(values).for_each(|(to, &x)| *to = T::of(x));
        }
        let mut memory = Memory { params: &self.params, grads: &mut self.grads, buffers: &[], teacher: &[] };
        self.program.run(Phase::Forward, &mut arena, &mut memory, &Alone)?;
        let read = |id| self.program.get(&arena, id).iter().map(|x| x.to_f64()).collect();
        if self.outputs.iter().any(|output| self.program.get(&arena, output.value).iter().any(|x| !x.is_finite())) {
            return Err(Error::new(Cause::Numerical, "the elastifier's router gives NaN or infinity")
                .remedy("lower its learning rate, or load a checkpoint from before"));
        }
        let outputs: Values = self.outputs.iter().map(|output| (output.name.clone(), read(output.value))).collect();
        let choice = elastifier.choose(occasion, &outputs)?;
        self.check(&choice)?;
        Ok((arena, choice))
    }

    /// Refuses sources and gradients outside the outputs, and labels that were not declared.
    fn check(&self, choice: &Choice) -> Result<()> {
        let outside = |what: &str, output: &str, index: usize| match self.range(output) {
            None => Some(format!("{what} output {output:?}, which its router does not have")),
            Some((_, len)) if index >= len => {
                Some(format!("{what} number {index} of output {output:?}, which has {len} numbers"))
            }
            _ => None,
        };
        let sources = choice.sources.iter().flat_map(|s| s.entries.iter().map(move |e| (&s.output, e.1)));
        let gradients = choice.loss.iter().flat_map(|loss| &loss.gradients);
        let wrong = sources
            .map(|(output, index)| outside("takes a state from", output, index))
            .chain(gradients.map(|(output, grad)| outside("gives a gradient of", output, grad.len().max(1) - 1)))
            .flatten()
            .chain(
                choice
                    .label
                    .iter()
                    .filter(|label| !self.labels.contains(label))
                    .map(|label| format!("chooses under the label {label:?}, which its plan does not list")),
            )
            .next();
        wrong.map_or(Ok(()), |what| Err(Error::plugin(format!("the elastifier {what}"))))
    }

    /// Where an output's numbers lie among all outputs' gradients: (first, length).
    fn range(&self, output: &str) -> Option<(usize, usize)> {
        let mut first = 0;
        for Output { name, value, .. } in &self.outputs {
            let len = self.program.graph.value(*value).len();
            if name == output {
                return Some((first, len));
            }
            first += len;
        }
        None
    }

    fn numbers(&self) -> usize {
        self.outputs.iter().map(|output| self.program.graph.value(output.value).len()).sum()
    }

    /// What the elastifier chooses for an occasion that is not trained on.
    pub fn settings(&mut self, elastifier: &mut ElastifierInstance, occasion: &Occasion) -> Result<Choice> {
        let (arena, choice) = self.run(elastifier, occasion)?;
        self.free.push(arena);
        Ok(choice)
    }

    /// The states of a micro-batch that is trained on, a `share` of the step's tokens. The step must [`finish`](Self::finish).
    pub(super) fn begin(
        &mut self,
        elastifier: &mut ElastifierInstance,
        target: &ModelPlan,
        occasion: &Occasion,
        share: f64,
    ) -> Result<(States, Chosen)> {
        let (arena, choice) = self.run(elastifier, occasion)?;
        let states = States::resolve(target, &choice.settings)?;
        let loss = choice.loss.as_ref().map(|loss| (loss.name.clone(), loss.value));
        let chosen = Chosen { label: choice.label, params: choice.params, metrics: choice.metrics, loss };
        self.pending.push(Pending {
            arena,
            gradients: vec![0.0; self.numbers()],
            sources: choice.sources,
            settings: states.settings.clone(),
            loss: choice.loss,
            share,
        });
        Ok((states, chosen))
    }

    /// Forgets what a step that did not end left.
    pub(super) fn clear(&mut self) {
        self.grads.fill(T::ZERO);
        let left = std::mem::take(&mut self.pending);
        self.free.extend(left.into_iter().map(|pending| pending.arena));
    }

    /// Adds the gradient of a state's numbers, of the `nth` micro-batch of the step.
    pub(super) fn add(&mut self, nth: usize, state: &str, grad: &[f64]) {
        let Some(pending) = self.pending.get(nth) else { return };
        let Some(&setting) = pending.settings.get(state) else { return };
        let mut adds = Vec::new();
        for source in pending.sources.iter().filter(|source| source.setting == setting) {
            let Some((first, _)) = self.range(&source.output) else { continue };
            adds.extend(source.entries.iter().map(|&(entry, index)| (first + index, grad[entry])));
        }
        let gradients = &mut self.pending[nth].gradients;
        adds.into_iter().for_each(|(at, grad)| gradients[at] += grad);
    }

    /// The backward passes of the step's micro-batches, and the sums over ranks that their gradients need.
    pub(super) fn finish(&mut self, groups: &Groups<T>) -> Result<()> {
        let mut pending = std::mem::take(&mut self.pending);
        let mut gradients: Vec<f64> = pending.iter().flat_map(|pending| pending.gradients.iter().copied()).collect();
        groups.pp.all_reduce_f64(&mut gradients)?;
        let numbers = self.numbers();
        for (pending, gradients) in pending.iter_mut().zip(gradients.chunks_mut(numbers.max(1))) {
            for (output, grad) in pending.loss.iter().flat_map(|loss| &loss.gradients) {
                if let Some((first, _)) = self.range(output) {
                    let to = &mut gradients[first..][..grad.len()];
                    to.iter_mut().zip(grad).for_each(|(to, g)| *to += pending.share * g);
                }
            }
            let mut first = 0;
            for output in &self.outputs {
                let len = self.program.graph.value(output.value).len();
                if let Some(seed) = output.seed {
                    let to = self.program.get_mut(&mut pending.arena, seed);
                    to.iter_mut().zip(&gradients[first..][..len]).for_each(|(to, &g)| *to = T::of(g));
                }
                first += len;
            }
            let mut memory = Memory { params: &self.params, grads: &mut self.grads, buffers: &[], teacher: &[] };
            self.program.run(Phase::Backward, &mut pending.arena, &mut memory, &Alone)?;
        }
        self.free.extend(pending.into_iter().map(|pending| pending.arena));
        if groups.dp.size() > 1 {
            groups.dp.all_reduce(&mut self.grads)?;
        }
        Ok(())
    }

    /// Sum of squares of its gradients, which every rank has.
    pub(super) fn square(&self) -> f64 {
        update::square(&self.table, &self.grads, 0)
    }

    pub(super) fn apply(&mut self, config: &AdamConfig, hyper: StepHyper, scale: T) {
        update::apply(config, hyper, &self.table, scale, &self.grads, &mut self.params, &mut self.moments);
    }
}

/// The router's program, and its outputs in the order of the plan's ports.
fn record(
    plan: &ModelPlan,
    table: &ParamTable,
    elastifier: &ElastifierInstance,
    seed: u64,
) -> Result<(Program, Vec<Output>)> {
    let states = States::default();
    let mut cx = Recorder::new(Context {
        plan,
        table,
        grid: Grid::SINGLE,
        place: Grid::SINGLE.place(0),
        states: &states,
        roles: None,
        training: true,
        frozen: false,
        tokens: 1,
        longest: 1,
        max_seqs: 1,
        seed,
        state_grads: false,
        labels: None,
    });
    elastifier.forward(&mut cx)?;
    cx.finish()?;
    let (mut outputs, mut seeds) = (Vec::new(), Vec::new());
    for port in plan.ports.iter().filter(|port| port.direction == Direction::Output) {
        let Some(&value) = cx.g.outputs.get(&port.name).and_then(|ids| ids.first()) else {
            return Err(Error::plugin(format!("the elastifier's router delivered nothing to output {:?}", port.name)));
        };
        let value = cx.contiguous(value);
        cx.g.pin(value);
        let seed = cx.value(value).needs_grad.then(|| {
            let seed = cx.g.fresh_like(value, "seed");
            cx.g.pin(seed);
            seeds.push((value, seed));
            seed
        });
        outputs.push(Output { name: port.name.clone(), value, seed });
    }
    backprop::append(&mut cx.g, &seeds, &[])?;
    let program = Program::bind(std::mem::take(&mut cx.g), 1)?;
    Ok((program, outputs))
}
