//! One rank of a model: its parameters, its programs, and what it does in a step.
//!
//! A rank runs on one thread and owns its provider's instance. Everything it needs of others goes through its groups.

use super::diagnose::Watch;
use super::importance::Importance;
use super::loads::Loads;
use super::record::{Compiled, Distillation, KD_LOSS, LOGITS_ROW, Mode, Signature, StageModel, TEACHER_HIDDEN};
use super::router::{Chosen, Router};
use super::sums::StepSums;
use crate::comm::Group;
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::model::params::Stored;
use crate::optim::update::{self, AdamConfig, Moments, StepHyper};
use crate::plugin::ElastifierInstance;
use crate::program::graph::Share;
use crate::program::profile::Profile;
use crate::program::replay::{Arena, Memory, Phase};
use crate::program::states::States;
use crate::schedule::{Turn, one_forward_one_backward};
use gantry_kernels::Element;
use gantry_plugin_api::plan::{AxisSetting, MicroBatchInfo, Occasion};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// A rank's groups.
pub struct Groups<T> {
    pub tp: Box<dyn Group<T>>,
    pub dp: Box<dyn Group<T>>,
    /// Ranks with the same tp and dp place, in stage order.
    pub pp: Box<dyn Group<T>>,
    /// Every rank of the model.
    pub world: Box<dyn Group<T>>,
}

/// Where micro-batches get their axis states from.
pub enum Elastic {
    Off,
    /// The same settings for every micro-batch.
    Fixed(Vec<AxisSetting>),
    Plugin(Box<ElastifierInstance>),
}

/// One rank's model and state.
pub struct Rank<T> {
    pub model: StageModel,
    pub groups: Groups<T>,
    pub elastic: Elastic,
    pub params: Vec<T>,
    pub grads: Vec<T>,
    pub buffers: Vec<T>,
    pub moments: Moments<T>,
    /// What clipping multiplies the gradients of the step by; NaN where they have no finite norm.
    scale: T,
    pub(super) programs: BTreeMap<Signature, Compiled>,
    /// Arenas not in use. Programs share them: between steps evaluation finds those of training idle.
    free: Vec<Arena<T>>,
    /// Parameter entries whose main gradient is a sum over tp not yet taken.
    partial: Vec<bool>,
    /// Loads of the step's routers.
    loads: Loads,
    /// Arenas ever allocated: constant after warm-up.
    arenas: usize,
    pub state_gradients: BTreeMap<String, Vec<f64>>,
    /// Values of the step that a model may ask for by name (`Cx::step_input`); set before each step.
    pub step_inputs: BTreeMap<String, f64>,
    /// Times every step of a replay while it is there.
    pub profile: Option<Profile>,
    /// Looks at everything that replays write while it is there.
    pub(super) watch: Option<Watch>,
    /// Adds up what forward passes show of each unit while it is there.
    pub(super) importance: Option<Importance>,
    /// The frozen model this one learns from.
    pub teacher: Option<Teacher<T>>,
    /// What the elastifier chooses by.
    pub router: Option<Router<T>>,
    /// The run's steps and its micro-batches of a step, where there is a run.
    pub run: (u64, u64),
    check_purity: bool,
}

/// A frozen model on the same rank, without gradients and optimizer state, and how to learn from it.
pub struct Teacher<T> {
    pub rank: Box<Rank<T>>,
    pub distillation: Distillation,
}

/// A micro-batch between its forward and its backward.
pub(super) struct Live<T> {
    pub(super) signature: Signature,
    pub(super) arena: Arena<T>,
    /// What an elastifier's router chose.
    chosen: Option<Chosen>,
}

impl<T: Element> Rank<T> {
    /// A rank with initial parameters, the same for every layout. `trains`: it has gradients and optimizer state, without
    /// which it computes forward passes only.
    pub fn new(
        model: StageModel,
        groups: Groups<T>,
        elastic: Elastic,
        teacher: Option<Teacher<T>>,
        check_purity: bool,
        trains: bool,
    ) -> Result<Rank<T>> {
        let len = model.table.param_len;
        let trained = if trains { len } else { 0 };
        let mut params = zeros(len, "parameters")?;
        let mut buffers = zeros(model.table.buffer_len, "buffers")?;
        let fill = |to: &mut [T], stored: &crate::model::params::Stored| {
            let values = stored.initial(model.seed);
            to[stored.offset..][..stored.len].iter_mut().zip(values).for_each(|(to, x)| *to = T::of(x));
        };
        model.table.params.iter().for_each(|entry| fill(&mut params, &entry.stored));
        model.table.buffers.iter().for_each(|entry| fill(&mut buffers, &entry.stored));
        Ok(Rank {
            grads: zeros(trained, "gradients")?,
            moments: Moments {
                exp_avg: zeros(trained, "optimizer state")?,
                exp_avg_sq: zeros(trained, "optimizer state")?,
            },
            scale: T::of(f64::NAN),
            partial: vec![false; model.table.params.len()],
            params,
            buffers,
            model,
            groups,
            elastic,
            programs: BTreeMap::new(),
            free: Vec::new(),
            loads: Loads::default(),
            arenas: 0,
            state_gradients: BTreeMap::new(),
            step_inputs: BTreeMap::new(),
            profile: None,
            watch: None,
            importance: None,
            teacher,
            router: None,
            run: (0, 0),
            check_purity,
        })
    }

    /// Bytes of the largest program's activations, and how many arenas exist.
    pub fn activation_bytes(&self) -> (usize, usize) {
        let largest = self.programs.values().map(|c| c.program.plan.act_len * T::BYTES).max();
        (largest.unwrap_or(0), self.arenas)
    }

    /// Programs recorded so far.
    pub fn programs(&self) -> usize {
        self.programs.len()
    }

    /// States of a micro-batch, and what a router chose if it was asked; `share`: of the step's tokens.
    fn states(&mut self, mode: Mode, info: &MicroBatchInfo, share: f64) -> Result<(States, Option<Chosen>)> {
        let settings = match (&mut self.elastic, &mut self.router) {
            (Elastic::Off, _) => return Ok(Default::default()),
            (Elastic::Fixed(settings), _) => settings.clone(),
            (Elastic::Plugin(elastifier), Some(router)) if mode == Mode::Train => {
                let occasion = Occasion::MicroBatch(*info);
                let (states, chosen) = router.begin(elastifier, &self.model.plan, &occasion, share)?;
                return Ok((states, Some(chosen)));
            }
            (Elastic::Plugin(elastifier), _) => elastifier.begin_micro_batch(info)?,
        };
        Ok((States::resolve(&self.model.plan, &settings)?, None))
    }

    /// Records the signature's program if this is its first sight.
    fn prepare(&mut self, signature: &Signature, states: &States) -> Result<()> {
        if self.programs.contains_key(signature) {
            return Ok(());
        }
        let (rank, tokens) = (self.groups.world.rank(), signature.tokens);
        let _record = tracing::info_span!("record", rank, tokens, mode = ?signature.mode).entered();
        let compiled = self.model.compile(signature, states, self.teacher.as_ref().and_then(Teacher::head))?;
        let plan = &compiled.program.plan;
        tracing::debug!(
            steps = compiled.program.graph.steps.len(),
            activation_bytes = plan.act_len * T::BYTES,
            without_reuse = plan.act_without_reuse * T::BYTES,
            "rank {rank} recorded a program of {tokens} tokens"
        );
        if self.check_purity {
            self.model.check_pure(signature, states)?;
        }
        for (at, &partial) in compiled.program.graph.partial_grads.iter().enumerate() {
            self.partial[at] |= partial;
        }
        self.programs.insert(signature.clone(), compiled);
        Ok(())
    }

    pub(super) fn forward(
        &mut self,
        mode: Mode,
        batch: &Batch,
        info: &MicroBatchInfo,
        tokens_of_step: f64,
    ) -> Result<Live<T>> {
        let learned = match &mut self.teacher {
            Some(teacher) if mode == Mode::Train => {
                Some(teacher.forward(batch, info, &self.step_inputs, &mut self.profile)?)
            }
            _ => None,
        };
        let tokens = batch.loss_mask.iter().map(|&m| f64::from(m)).sum::<f64>();
        let (states, chosen) = self.states(mode, info, tokens / tokens_of_step)?;
        let signature = Signature {
            mode,
            tokens: batch.tokens.len(),
            longest: batch.tokens.len() / batch.samples.max(1),
            max_seqs: batch.cu_seqlens.len().saturating_sub(1),
            states: states.keys.clone(),
        };
        self.prepare(&signature, &states)?;
        let missing = || Error::plugin("a program vanished");
        let compiled = self.programs.get(&signature).ok_or_else(missing)?;
        let program = &compiled.program;
        let mut arena = match self.free.pop() {
            Some(arena) => arena,
            None => {
                self.arenas += 1;
                Arena { act: Vec::new(), int: Vec::new() }
            }
        };
        grow(&mut arena.act, program.plan.act_len, "activations")?;
        grow(&mut arena.int, program.plan.int_len, "indices")?;
        if self.watch.is_some() {
            // What a kernel leaves as it was must not look like what it wrote.
            arena.act.fill(T::ZERO);
        }
        for (name, &id) in &program.graph.inputs {
            match name.as_str() {
                "tokens" => program.get_int_mut(&mut arena, id).copy_from_slice(&batch.tokens),
                "labels" => program.get_int_mut(&mut arena, id).copy_from_slice(&batch.labels),
                "cu_seqlens" => program.get_int_mut(&mut arena, id).copy_from_slice(&batch.cu_seqlens),
                "step" => program.get_int_mut(&mut arena, id)[0] = info.step as i32,
                "first_token" => {
                    let per_sample = batch.tokens.len() / batch.samples.max(1);
                    program.get_int_mut(&mut arena, id)[0] = (batch.first_sample * per_sample as u64) as i32;
                }
                "loss_mask" => {
                    let mask = program.get_mut(&mut arena, id);
                    mask.iter_mut().zip(&batch.loss_mask).for_each(|(to, &m)| *to = T::of(f64::from(m)));
                }
                // The context whose next token is asked for is the first sequence.
                LOGITS_ROW => program.get_int_mut(&mut arena, id)[0] = batch.cu_seqlens.get(1).map_or(0, |end| end - 1),
                "loss_scale" => program.get_mut(&mut arena, id)[0] = T::of(1.0 / tokens_of_step),
                "kd_scale" => {
                    let scale = self.teacher.as_ref().map_or(0.0, |teacher| teacher.distillation.scale);
                    program.get_mut(&mut arena, id)[0] = T::of(scale / tokens_of_step);
                }
                TEACHER_HIDDEN => {
                    if let (Some(teacher), Some(learned)) = (&self.teacher, &learned) {
                        program.get_mut(&mut arena, id).copy_from_slice(teacher.hidden(learned)?);
                    }
                }
                "sample" => program.get_int_mut(&mut arena, id)[0] = batch.first_sample as i32,
                "aux_scale" => program.get_mut(&mut arena, id)[0] = T::of(tokens / tokens_of_step),
                name => {
                    if let Some(&value) = self.step_inputs.get(name) {
                        program.get_mut(&mut arena, id)[0] = T::of(value);
                    } else if let Some(data) = states.data.get(name) {
                        let to = program.get_mut(&mut arena, id);
                        to.iter_mut().zip(data).for_each(|(to, &x)| *to = T::of(x));
                    } else if compiled.received.is_none_or(|(received, _)| received != id) {
                        return Err(Error::plugin(format!(
                            "the model asks for input {name:?}, which nothing provides"
                        )));
                    }
                }
            }
        }
        if let (Some(teacher), Some(learned)) = (&mut self.teacher, learned) {
            teacher.rank.give_back(learned);
        }
        if let Some((id, _)) = compiled.received {
            self.groups.pp.recv(self.groups.pp.rank() - 1, program.get_mut(&mut arena, id))?;
        }
        let teacher = self.teacher.as_ref().map_or(&[][..], |teacher| &teacher.rank.params);
        let mut memory = Memory { params: &self.params, grads: &mut self.grads, buffers: &self.buffers, teacher };
        let (tp, profile) = (self.groups.tp.as_ref(), self.profile.as_mut());
        match (&mut self.watch, &mut self.importance) {
            (None, None) => program.run_profiled(Phase::Forward, &mut arena, &mut memory, tp, profile)?,
            (None, Some(importance)) => {
                program
                    .run_observed(&mut arena, &mut memory, tp, |arena, mark| importance.see(program, arena, mark))?;
            }
            (Some(watch), _) => {
                watch.note(info.micro_batch, program.run_checked(Phase::Forward, &mut arena, &mut memory, tp)?);
            }
        }
        if let Some((id, _)) = compiled.sent {
            self.groups.pp.send(self.groups.pp.rank() + 1, program.get(&arena, id))?;
        }
        Ok(Live { signature, arena, chosen })
    }

    /// Adds a finished forward's numbers to the sums.
    fn collect(&mut self, live: &Live<T>, batch: &Batch, tokens_of_step: f64, sums: &mut StepSums) {
        let Some(Compiled { program, loss, .. }) = self.programs.get(&live.signature) else { return };
        let one = |id| program.get(&live.arena, id)[0].to_f64();
        let first_tp = self.model.place.tp == 0;
        let tokens = batch.loss_mask.iter().map(|&m| f64::from(m)).sum::<f64>();
        if let Some(id) = *loss
            && first_tp
        {
            let loss = one(id);
            sums.loss += loss;
            sums.tokens += tokens;
            if let Some(chosen) = &live.chosen {
                sums.chose(chosen, loss, tokens, tokens_of_step);
            }
        }
        for term in &program.graph.losses {
            let weight = match term.share {
                Share::Sum(factor) => factor,
                Share::Mean => tokens,
            } / tokens_of_step;
            let value = one(term.value) * weight;
            if first_tp {
                sums.objective += value;
                if let Some(chosen) = live.chosen.as_ref().filter(|_| *term.name == *KD_LOSS) {
                    sums.of(chosen).kd_loss = Some(sums.of(chosen).kd_loss.unwrap_or(0.0) + one(term.value));
                }
                if Some(term.value) != *loss {
                    *sums.terms.entry(term.name.to_string()).or_default() += value;
                }
            }
        }
        for (name, id) in &program.graph.metrics {
            if first_tp {
                *sums.metrics.entry(name.clone()).or_default() += one(*id);
            }
        }
        for load in &program.graph.loads {
            self.loads.add(load, program.get_int(&live.arena, load.counts));
        }
    }

    /// `index`: of the micro-batch within the step, `nth`: on this rank.
    fn backward(&mut self, index: usize, nth: usize, live: &mut Live<T>) -> Result<()> {
        let Some(compiled) = self.programs.get(&live.signature) else { return Ok(()) };
        let Compiled { program, received, sent, state_grads, .. } = compiled;
        if let Some((_, Some(grad))) = *sent {
            self.groups.pp.recv(self.groups.pp.rank() + 1, program.get_mut(&mut live.arena, grad))?;
        }
        let teacher = self.teacher.as_ref().map_or(&[][..], |teacher| &teacher.rank.params);
        let mut memory = Memory { params: &self.params, grads: &mut self.grads, buffers: &self.buffers, teacher };
        let (tp, profile) = (self.groups.tp.as_ref(), self.profile.as_mut());
        match &mut self.watch {
            None => program.run_profiled(Phase::Backward, &mut live.arena, &mut memory, tp, profile)?,
            Some(watch) => {
                watch.note(index as u64, program.run_checked(Phase::Backward, &mut live.arena, &mut memory, tp)?);
            }
        }
        if let Some((_, Some(grad))) = *received {
            self.groups.pp.send(self.groups.pp.rank() - 1, program.get(&live.arena, grad))?;
        }
        for (name, id) in state_grads {
            let grad = program.get(&live.arena, *id).iter().map(|x| x.to_f64());
            let grad: Vec<f64> = grad.collect();
            if let Some(router) = &mut self.router {
                router.add(nth, name, &grad);
            }
            let sum = self.state_gradients.entry(name.clone()).or_default();
            sum.resize(program.graph.value(*id).len(), 0.0);
            sum.iter_mut().zip(grad).for_each(|(sum, x)| *sum += x);
        }
        Ok(())
    }

    /// What an elastifier hears of a micro-batch of training.
    fn info(&self, step: u64, index: usize, batch: &Batch) -> MicroBatchInfo {
        let (steps, micro_batches) = self.run;
        MicroBatchInfo { steps, micro_batches, seed: self.model.seed, ..info(step, index, batch, true) }
    }

    /// What this rank does from now on, for the log.
    fn span(&self, micro_batch: usize, direction: &'static str) -> tracing::span::EnteredSpan {
        tracing::debug_span!("micro_batch", rank = self.groups.world.rank(), micro_batch, direction).entered()
    }

    pub(super) fn give_back(&mut self, live: Live<T>) {
        self.free.push(live.arena);
    }

    /// Forward and backward of this rank's micro-batches of a step into the main gradients, which begin at zero; then the
    /// sums over ranks that gradients and reports need. `batches`: (index within the step over all dp ranks, batch).
    pub fn gradients(&mut self, step: u64, batches: &[(usize, Arc<Batch>)]) -> Result<StepSums> {
        self.grads.fill(T::ZERO);
        self.state_gradients.clear();
        self.loads.clear();
        self.router.iter_mut().for_each(Router::clear);
        let mut count = [batches.iter().flat_map(|b| &b.1.loss_mask).map(|&m| f64::from(m)).sum::<f64>()];
        self.groups.dp.all_reduce_f64(&mut count)?;
        let tokens = count[0].max(1.0);
        let mut sums = StepSums::default();
        let mut live: VecDeque<Live<T>> = VecDeque::new();
        let (stage, stages) = (self.model.place.pp, self.model.grid.pp);
        for turn in one_forward_one_backward(stage, stages, batches.len()) {
            match turn {
                Turn::Forward(i) => {
                    let (index, batch) = &batches[i];
                    let _span = self.span(*index, "forward");
                    let info = self.info(step, *index, batch);
                    let micro_batch = self.forward(Mode::Train, batch, &info, tokens)?;
                    self.collect(&micro_batch, batch, tokens, &mut sums);
                    live.push_back(micro_batch);
                }
                // Micro-batches come back in the order they went.
                Turn::Backward(i) => {
                    if let Some(mut micro_batch) = live.pop_front() {
                        let _span = self.span(batches[i].0, "backward");
                        self.backward(batches[i].0, i, &mut micro_batch)?;
                        self.give_back(micro_batch);
                    }
                }
            }
        }
        let (tp, dp) = (self.groups.tp.as_ref(), self.groups.dp.as_ref());
        update::finalise(&self.model.table, &self.partial, &mut self.grads, tp, dp)?;
        self.loads.all_reduce(tp, dp)?;
        if let Some(router) = &mut self.router {
            router.finish(&self.groups)?;
        }
        self.reduce(sums)
    }

    /// Sums reports over ranks: the terms of every stage, once per tp group.
    fn reduce(&mut self, sums: StepSums) -> Result<StepSums> {
        let here = self.model.place.tp == 0 && self.model.place.dp == 0;
        let ratios: Vec<f64> = self.loads.max_over_mean().filter(|_| here).collect();
        let labels = self.router.as_ref().map_or(&[][..], |router| &router.labels);
        sums.reduced(&ratios, labels, self.groups.world.as_ref())
    }

    /// Norm of the gradients over all ranks before clipping, and what clipping multiplies them by.
    pub fn grad_norm(&mut self, config: &AdamConfig) -> Result<f64> {
        let mut square = [update::square(&self.model.table, &self.grads, self.model.place.tp)];
        if let Some(router) = self.router.as_ref().filter(|_| self.model.place.tp == 0 && self.model.place.pp == 0) {
            square[0] += router.square();
        }
        self.groups.tp.all_reduce_f64(&mut square)?;
        self.groups.pp.all_reduce_f64(&mut square)?;
        let (scale, norm) = update::clip(config, square[0]);
        self.scale = scale;
        Ok(norm)
    }

    /// Updates parameters and buffers by the clipped gradients of the step; [`Rank::grad_norm`] comes first. If the norm
    /// is not finite nothing changes.
    pub fn apply(&mut self, config: &AdamConfig, hyper: StepHyper) {
        if !self.scale.is_finite() {
            return;
        }
        let clock = Instant::now();
        if let Some(router) = &mut self.router {
            router.apply(config, hyper, self.scale);
        }
        // A frozen model keeps its values: weight decay would change them without a gradient.
        if self.model.frozen {
            return;
        }
        let (table, scale) = (&self.model.table, self.scale);
        let cost = update::apply(config, hyper, table, scale, &self.grads, &mut self.params, &mut self.moments);
        if let Some(profile) = &mut self.profile {
            profile.add("optimizer", clock.elapsed(), cost, T::BYTES);
        }
        self.loads.update(&self.model.table, &mut self.buffers);
    }

    /// Clips, updates parameters and buffers. Returns the gradient norm; if it is not finite nothing has changed.
    pub fn update(&mut self, config: &AdamConfig, hyper: StepHyper) -> Result<f64> {
        let norm = self.grad_norm(config)?;
        self.apply(config, hyper);
        Ok(norm)
    }

    /// The first parameter whose gradient is not finite, and the first such number in it.
    pub fn nonfinite_gradient(&self) -> Option<(String, f64)> {
        self.model.table.params.iter().map(|entry| &entry.stored).find_map(|stored| {
            let grad = &self.grads[stored.offset..][..stored.len];
            grad.iter().find(|x| !x.is_finite()).map(|x| (stored.name.clone(), x.to_f64()))
        })
    }
}

impl<T: Element> Teacher<T> {
    /// The forward pass of a micro-batch with the step inputs of the student, timed in its profile.
    fn forward(
        &mut self,
        batch: &Batch,
        info: &MicroBatchInfo,
        step_inputs: &BTreeMap<String, f64>,
        profile: &mut Option<Profile>,
    ) -> Result<Live<T>> {
        for (name, &value) in step_inputs {
            match self.rank.step_inputs.get_mut(name) {
                Some(input) => *input = value,
                None => drop(self.rank.step_inputs.insert(name.clone(), value)),
            }
        }
        std::mem::swap(&mut self.rank.profile, profile);
        let info = MicroBatchInfo { training: false, ..*info };
        let live = self.rank.forward(Mode::Hidden, batch, &info, 1.0);
        std::mem::swap(&mut self.rank.profile, profile);
        live
    }

    /// The output weight and how to learn from it, on the last stage, once a forward pass was recorded.
    fn head(&self) -> Option<(&Stored, Distillation)> {
        let entry = self.rank.programs.values().find_map(|compiled| compiled.head)?;
        Some((&self.rank.model.table.params[entry].stored, self.distillation))
    }

    /// What a forward pass gave, [tokens, hidden]; on the last stage.
    fn hidden<'a>(&self, live: &'a Live<T>) -> Result<&'a [T]> {
        let compiled = self.rank.programs.get(&live.signature);
        let hidden = compiled.and_then(|compiled| Some(compiled.program.get(&live.arena, compiled.hidden?)));
        hidden.ok_or_else(|| Error::plugin("the teacher's forward pass left no hidden states"))
    }
}

/// `len` zeros, or an error that says how much memory they need.
fn zeros<E: Copy + Default>(len: usize, what: &str) -> Result<Vec<E>> {
    let mut zeros = Vec::new();
    grow(&mut zeros, len, what)?;
    Ok(zeros)
}

/// Makes a buffer at least `len` long.
fn grow<E: Copy + Default>(buffer: &mut Vec<E>, len: usize, what: &str) -> Result<()> {
    if buffer.len() >= len {
        return Ok(());
    }
    // What it holds is of no use any more: the old memory goes before the new one comes.
    *buffer = Vec::new();
    buffer.try_reserve_exact(len).map_err(|_| {
        let gib = (len * size_of::<E>()) as f64 / f64::from(1 << 30);
        Error::recipe(format!("{what} of one rank need {gib:.1} GiB of memory, which this machine does not give"))
            .remedy("make the model or train.micro_batch_size smaller, or spread it over more ranks")
    })?;
    buffer.resize(len, E::default());
    Ok(())
}

pub(super) fn info(step: u64, index: usize, batch: &Batch, training: bool) -> MicroBatchInfo {
    MicroBatchInfo::new(step, index as u64, batch.first_sample, batch.samples as u64, training)
}
