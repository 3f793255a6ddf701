//! The training loop.
//!
//! ```text
//! open run folder          lock, clean-up of torn saves
//! open data                files -> tokens
//! engine                   plugins, plan, parameters               (made by the caller)
//! resume                   newest checkpoint -> parameters, optimizer, position                      hook: load
//!                                                                                                  hook: run_begin
//! begin                    earlier results aside, recipe.resolved.yaml, metrics cut to the checkpoint
//! for step in finished + 1 ..= last
//!                                                                                                  hook: step_begin
//!     hyper                learning rate, weight decay, number of the update
//!     batches              made ahead by a thread (`data.prefetch`)
//!     gradients            for each micro-batch: forward -> loss -> backward; sums over ranks -> norm
//!     guard                loss, norm finite? no spike (`train.spike_factor`)?
//!         no               NaN: the step is computed again to find the operator that made it
//!           stop           last line of metrics.jsonl, exit 5, nothing saved (`train.on_nonfinite: stop`)
//!           skip           the update is left out; too many in a row: as stop (`train.max_skipped_steps`)
//!                                                                                                  hook: step_refused
//!                                                                                                  hook: gradients
//!         yes: update      clip -> optimizer -> buffers
//!     held-out data        every `train.eval_every` steps and after the last one: loss without gradients
//!                                                                                                  hook: evaluation
//!     metrics              metrics.jsonl                                                           hook: step_end
//!     progress
//!     checkpoint           every `checkpoint.every` steps, after the last one, and on a stop signal    hook: save
//!                          the state is copied; a thread writes it while the loop goes on (`checkpoint.async`)
//!     stop signal?         leave, exit 0
//! wait                     until the last checkpoint is complete
//!                                                                                                  hook: run_end
//! ```
//!
//! The loop knows steps, files and signals; what a step computes is the [`Engine`]'s. It keeps no state that a
//! checkpoint does not hold, so a resumed run repeats an uninterrupted one bit by bit.

pub(crate) mod changes;
pub mod diagnose;
pub mod engine;
pub mod evaluate;
mod folder;
mod footprint;
pub mod guard;
pub mod held_out;
pub mod hooks;
pub(crate) mod importance;
mod loads;
pub mod plan;
pub mod rank;
pub mod record;
pub mod reproduction;
pub mod room;
pub mod router;
pub mod sums;
pub mod team;

pub use evaluate::LossSums;
pub use folder::{Resume, RunFolder};
pub use held_out::{Evaluation, HeldOut};
pub use hooks::HookSet;

use guard::{Diagnosis, Guard, Verdict};

use crate::bench::step::{Breakdown, ceilings};
use crate::checkpoint::{CheckpointReader, Keep, Meta, PluginEntry, Saver, Staging, locate};
use crate::data::tokenizer::{VOCAB_MULTIPLE, padded_vocab};
use crate::data::{Batch, Held, Identity, Loader, Position, Prefetch, RunData, Tokenizer};
use crate::failure::{Cause, Failure, Result};
use crate::observe::{Progress, StepMetrics, peak_bytes};
use crate::optim::schedule::Schedule;
use crate::program::profile::Profile;
use crate::recipe::Recipe;
use gantry_plugin_api::sdk::HookEvent;
use serde_json::{Map, Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// The tokenizer in a checkpoint.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// What changes from step to step besides the data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    pub lr: f64,
    pub weight_decay: f64,
    /// Number of the update from 1: of the step, but for those left out before.
    pub update: u64,
}

/// What a step did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepReport {
    /// Sum of the cross entropy over tokens, nats.
    pub loss_sum: f64,
    /// Tokens whose loss counts.
    pub tokens: u64,
    /// What was minimised, per token.
    pub objective: f64,
    /// Global L2 norm of the gradients before clipping.
    pub grad_norm: f64,
    /// Further metrics by name.
    pub metrics: Map<String, Value>,
}

/// Computes steps and owns everything they change.
pub trait Engine {
    /// Gradients of a step, final on every rank, and their norm; parameters stay as they are. `batch` gives a micro-batch
    /// by its index within the step over all data-parallel ranks.
    fn gradients(&mut self, step: u64, batch: &(dyn Fn(usize) -> Batch + Sync), hyper: Hyper) -> Result<StepReport>;
    /// Where the numbers of the step just computed first stop being finite, found by computing it again.
    fn diagnose(&mut self, step: u64) -> Result<Option<Diagnosis>>;
    /// Changes parameters, optimizer state and buffers by the gradients just computed.
    fn update(&mut self, hyper: Hyper) -> Result<()>;
    /// Copies all parameters, optimizer state and buffers; gives back what is no tensor.
    fn save(&mut self, to: &mut Staging) -> Result<Value>;
    /// Reads what [`Engine::save`] wrote.
    fn load(&mut self, reader: &mut CheckpointReader) -> Result<()>;
    /// Reads parameters and buffers only, for a run that begins from another one's.
    fn load_weights(&mut self, reader: &mut CheckpointReader) -> Result<()>;
    /// Gives the teacher its parameters and buffers.
    fn load_teacher(&mut self, reader: &mut CheckpointReader) -> Result<()>;
    /// Loss of micro-batches of one shape, without gradients; changes nothing that a step or a checkpoint sees.
    fn evaluate(&mut self, step: u64, batches: Vec<Batch>) -> Result<LossSums>;
    /// Logits [tokens, vocab] of a batch.
    fn logits(&mut self, batch: Batch) -> Result<Vec<f64>>;
    /// Logits [vocab] of the token after `context`, which is not empty and at most [`Engine::window`] long.
    fn next_logits(&mut self, context: &[i32]) -> Result<Vec<f64>>;
    /// The longest context, in tokens.
    fn window(&self) -> usize;
    /// Tokens the model knows, padding included, if it says so.
    fn vocab(&self) -> Option<usize>;
    /// Token ids from `labels` on are padding of the vocabulary: they have no probability. Before the first step.
    fn limit_vocab(&mut self, labels: usize) -> Result<()>;
    /// Times every step from now on.
    fn start_profile(&mut self) -> Result<()> {
        Ok(())
    }
    /// Ends the timing; all ranks' times added up, and the number of ranks.
    fn take_profile(&mut self) -> Result<Option<(Profile, usize)>> {
        Ok(None)
    }
    /// The plugins in use, for the checkpoint's index.
    fn plugins(&self) -> Vec<PluginEntry>;
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done.
    Finished,
    /// A stop signal came; the checkpoint is saved.
    Stopped,
}

/// Options of a run that are no part of its recipe.
#[derive(Clone, Debug, Default)]
pub struct Options {
    pub resume: Resume,
    /// Ends the run after this many steps in all; schedules still span `train.steps`.
    pub last_step: Option<u64>,
    /// Print where the time goes at the end. The first step is left out: it records.
    pub profile: bool,
}

/// Where a run begins: the data after the resumed position.
pub struct Start {
    pub loader: Loader,
    /// Held-out data, if the recipe holds any out.
    pub held_out: Option<Held>,
    /// Held-out loss of the n-gram model that the recipe asks for, nats per token.
    pub ngram_loss: Option<f64>,
    pub checkpoint: Option<CheckpointReader>,
    /// None unless the caller adds them.
    pub hooks: HookSet,
}

/// Opens the checkpoint to resume from, if any, and the data; `tokenizer` is that of the recipe, if its data are text.
pub fn start(recipe: &Recipe, folder: &RunFolder, options: &Options, tokenizer: Option<&Tokenizer>) -> Result<Start> {
    let checkpoint = folder.checkpoint(&options.resume)?.map(|path| CheckpointReader::open(&path)).transpose()?;
    let begin = checkpoint.as_ref().map_or(Position::default(), |reader| Position {
        step: reader.index().step,
        samples: reader.index().consumed_samples,
    });
    if let Some(reader) = &checkpoint {
        check_tokenizer(reader, tokenizer)?;
    }
    let RunData { loader, held_out, entropy, ngram_loss } = RunData::open(recipe, tokenizer, begin)?;
    tracing::info!("training data: {loader}");
    if let Some(entropy) = entropy {
        tracing::info!("entropy of the made-up data: {entropy:.4} nats per token; no model's loss stays below it");
    }
    if let Some(held_out) = &held_out {
        tracing::info!("held-out data: {held_out}");
    }
    if let Some(loss) = ngram_loss {
        let order = recipe.data.ngram_order;
        tracing::info!("held-out loss of an n-gram model of order {order} (Witten-Bell): {loss:.4} nats per token");
    }
    if let Some(reader) = &checkpoint {
        check_data(reader, &loader.identity())?;
    }
    Ok(Start { loader, held_out, ngram_loss, checkpoint, hooks: HookSet::default() })
}

/// Runs the loop until the last step or until `stop` is set.
pub fn run(
    recipe: &Recipe,
    engine: &mut dyn Engine,
    folder: &RunFolder,
    start: Start,
    options: &Options,
    progress: &Progress,
    stop: &AtomicBool,
) -> Result<Outcome> {
    let Start { mut loader, mut held_out, ngram_loss, checkpoint, mut hooks } = start;
    loader.limit_vocab(engine.vocab());
    held_out.iter_mut().for_each(|held_out| held_out.limit_vocab(engine.vocab()));
    let held_out = held_out.map(|held_out| HeldOut::new(held_out, recipe));
    let begin = loader.begin();
    let mut guard = Guard::new(recipe);
    let at =
        |failure: Failure, reader: &CheckpointReader| failure.at(format!("checkpoint {}", reader.folder().display()));
    let _run = tracing::info_span!("run", recipe = recipe.name).entered();
    if let Some(reader) = &checkpoint {
        let Some(then) = reader.index().extra["recipe"].as_str() else {
            return Err(at(Failure::data("no recipe is in index.json"), reader));
        };
        if let Some(line) =
            changes::compare(then, recipe.resolved_yaml(), &hooks.modules()).map_err(|e| at(e, reader))?
        {
            tracing::warn!("{line}");
        }
    }
    if let Some(tokens) = loader.vocab() {
        check_vocab(engine.vocab(), tokens)?;
        engine.limit_vocab(tokens)?;
    }
    let resumed = match checkpoint {
        Some(mut reader) => {
            let _load = tracing::info_span!("load").entered();
            engine.load(&mut reader)?;
            hooks.load(&reader.index().extra["hooks"])?;
            guard.load(&reader.index().extra["guard"]).map_err(|e| at(e, &reader))?;
            let (path, mut from) = (reader.folder().to_path_buf(), reader.folder().display().to_string());
            if !folder.owns(&path, begin.step) {
                let samples = reader.index().consumed_samples;
                from = format!("{}, with its optimizer state and after its {samples} samples", origin(&reader));
            }
            reader.finish(|_| false)?;
            Some((path, from))
        }
        None => {
            load_weights(recipe, engine)?;
            None
        }
    };
    load_teachers(recipe, engine)?;
    hooks.run_begin()?;
    // Nothing can be wrong with the start any more; only now the run folder changes.
    let mut metrics =
        folder.begin(recipe, &options.resume, resumed.as_ref().map(|(path, _)| (path.as_path(), begin.step)))?;
    let described = reproduction::describe(
        recipe,
        &loader.identity(),
        loader.tokenizer(),
        &engine.plugins(),
        resumed.as_ref().map(|(path, _)| (path.as_path(), begin.step)),
    )?;
    folder.describe(&described)?;
    if let Some((_, from)) = resumed {
        tracing::info!("resumed from {from}");
    }
    let mut saver = saver(recipe, folder, begin.step)?;
    let schedule = Schedule::new(recipe);
    let last = options.last_step.unwrap_or(recipe.train.steps);
    let started = Instant::now();
    progress.begin(begin.step, last);
    if begin.step >= last {
        tracing::info!("nothing to do: {} of {last} steps are done", begin.step);
    }
    // Steps, seconds and tokens.
    let mut profiled = (0, 0.0, 0);
    let mut evaluation = None;
    let mut batches = Prefetch::new(loader.clone(), begin.step + 1..=last, recipe.data.prefetch)?;
    for step in begin.step + 1..=last {
        let _step = tracing::info_span!("step", step).entered();
        hooks.step_begin(step)?;
        let (lr, weight_decay) = schedule.at_step(step);
        let clock = Instant::now();
        let step_batches = batches.next_step()?;
        let data_seconds = clock.elapsed().as_secs_f64();
        let hyper = Hyper { lr, weight_decay, update: guard.update(step) };
        let report = engine.gradients(step, &|i| step_batches[i].clone(), hyper)?;
        let left_out = match guard.judge(step, &report, || engine.diagnose(step))? {
            Verdict::Apply => {
                hooks.report(HookEvent::Gradients, step, || {
                    let lm_loss = report.loss_sum / report.tokens.max(1) as f64;
                    let (loss, norm) = (report.objective, report.grad_norm);
                    json!({"loss": loss, "lm_loss": lm_loss, "grad_norm": norm, "tokens": report.tokens})
                })?;
                engine.update(hyper)?;
                None
            }
            Verdict::Skip(why) => {
                tracing::warn!("step {step} is left out: {why}");
                hooks.report(HookEvent::StepRefused, step, || json!({"why": why, "goes_on": true}))?;
                Some(why)
            }
            Verdict::Stop(why, failure) => {
                metrics.stopped(step, &why)?;
                hooks.report(HookEvent::StepRefused, step, || json!({"why": why, "goes_on": false}))?;
                return Err(failure.detail(format!("learning rate {lr:e}, gradient norm {}", report.grad_norm)));
            }
        };
        let seconds = clock.elapsed().as_secs_f64();
        match (options.profile, step == begin.step + 1) {
            (true, true) => engine.start_profile()?,
            (true, false) => {
                profiled = (profiled.0 + 1, profiled.1 + seconds, profiled.2 + report.tokens);
            }
            _ => {}
        }
        let mut line = step_metrics(step, lr, (seconds, data_seconds), report);
        line.more.extend(guard.skipped().map(|count| ("skipped_steps".into(), json!(count))));
        line.more.extend(left_out.map(|why| ("skipped".into(), json!(why))));
        evaluation = match held_out.as_ref().filter(|held_out| held_out.due(step, last)) {
            Some(held_out) => held_out.after(engine, step, last, stop)?,
            None => None,
        };
        if let Some(evaluation) = &evaluation {
            if !evaluation.loss_sum.is_finite() {
                metrics.stopped(step, "nan in the held-out loss")?;
                return Err(Failure::numerical(format!("step {step}: NaN or infinity in the held-out loss")));
            }
            let mut told = serde_json::Map::new();
            evaluation.add_to(&mut told);
            hooks.report(HookEvent::Evaluation, step, || Value::Object(told.clone()))?;
            line.more.extend(told);
        }
        metrics.write(&line)?;
        hooks.report(HookEvent::StepEnd, step, || line.json())?;
        let per_step = started.elapsed().as_secs_f64() / (step - begin.step) as f64;
        let logged = step.is_multiple_of(recipe.train.log_every)
            || step == begin.step + 1
            || step == last
            || evaluation.is_some();
        progress.step(&line, last, per_step, logged);
        let stopping = stop.load(Ordering::Relaxed);
        let due = recipe.checkpoint.every > 0 && step.is_multiple_of(recipe.checkpoint.every);
        if due || stopping || step == last {
            let _save = tracing::info_span!("save").entered();
            let valid_loss = evaluation.as_ref().map(Evaluation::loss);
            let saved = saver.save(step, |staging| {
                let state = engine.save(staging)?;
                let mut notes = vec![(reproduction::FILE.into(), described.clone())];
                let json = loader.tokenizer().and_then(Tokenizer::json);
                notes.extend(json.map(|json| (TOKENIZER_FILE.into(), json.to_string())));
                Ok(Meta { valid_loss, notes, ..meta(recipe, engine, &mut hooks, &guard, &loader, step, state)? })
            });
            if let Err(e) = saved.as_ref().map_err(|e| (e.cause, &e.sentence))
                && e.0 == Cause::Numerical
            {
                metrics.stopped(step, &format!("nan in {}", e.1))?;
            }
            saved?;
        }
        saver.poll()?;
        if stopping {
            saver.wait()?;
            progress.end();
            hooks.run_end()?;
            let saved = folder.store().path_of(step);
            tracing::info!(
                "stopped by a signal after step {step}; saved {}; the same command goes on from there",
                saved.display()
            );
            return Ok(Outcome::Stopped);
        }
    }
    saver.wait()?;
    progress.end();
    hooks.run_end()?;
    if let Some((profile, ranks)) = engine.take_profile()? {
        let (steps, seconds, tokens) = profiled;
        let breakdown = Breakdown::new(&profile, ranks, steps, seconds, tokens, ceilings(recipe));
        tracing::info!("where the time went, all ranks added up:\n{}", breakdown.table());
        folder.write_profile(&breakdown)?;
    }
    if let Some(evaluation) = &evaluation {
        let baseline = ngram_loss.map(|loss| (format!("an n-gram model of order {}", recipe.data.ngram_order), loss));
        tracing::info!("{}", evaluation.sentence(baseline));
    }
    Ok(Outcome::Finished)
}

/// Refuses a model whose vocabulary has not all of the data's `tokens`.
pub(crate) fn check_vocab(model: Option<usize>, tokens: usize) -> Result<()> {
    match model {
        Some(size) if size < tokens => Err(Failure::recipe(format!(
            "the model's vocabulary has {size} tokens, the data has {tokens}"
        ))
        .remedy(format!(
            "set the vocabulary size in the module's config to {}, the next multiple of {VOCAB_MULTIPLE}; what is \
                 more than {tokens} has no probability",
            padded_vocab(tokens)
        ))),
        _ => Ok(()),
    }
}

/// Warns if the data are others than the checkpoint's. Refuses an order of samples that differs only because it is made for
/// another number of them: the run would go on with samples it has seen, which nobody wants.
fn check_data(reader: &CheckpointReader, now: &Identity) -> Result<()> {
    let then = &reader.index().extra["data"];
    let (same_files, then_order) = (then["sha256"] == *now.sha256, then["order"].as_str());
    if let (Some(old), Some(old_samples), Some((new, samples))) = (then_order, then["samples"].as_u64(), &now.order)
        && old != new
        && same_files
        && old_samples != *samples
    {
        return Err(Failure::data(format!(
            "checkpoint {}: the order of its samples was made for {old_samples} samples, and that for {samples} is another",
            reader.folder().display()
        ))
        .remedy(format!(
            "set data.megatron.train_samples to {old_samples}, which keeps the order, or begin a new run from the \
             parameters with modules.NAME.load"
        )));
    }
    if !same_files || then_order != now.order.as_ref().map(|(order, _)| order.as_str()) {
        tracing::warn!("the data is not what the checkpoint was trained on: samples repeat or go missing");
    }
    Ok(())
}

/// Refuses a checkpoint whose model was trained on the tokens of another tokenizer.
pub(crate) fn check_tokenizer(reader: &CheckpointReader, now: Option<&Tokenizer>) -> Result<()> {
    let then = &reader.index().extra["tokenizer"];
    let (Some(hash), Some(now)) = (then["sha256"].as_str(), now) else { return Ok(()) };
    if hash == now.sha256() {
        return Ok(());
    }
    let name = then["name"].as_str().unwrap_or("another");
    Err(Failure::data(format!(
        "checkpoint {}: its model was trained with the tokenizer {name} (sha256 {}), not with {} (sha256 {})",
        reader.folder().display(),
        hash.get(..12).unwrap_or(hash),
        now.name(),
        now.sha256().get(..12).unwrap_or_default()
    ))
    .remedy(
        "name the tokenizer that the model was trained with in data.tokenizer; the checkpoint holds its tokenizer.json",
    ))
}

/// Begins from the parameters of a module's `load`.
fn load_weights(recipe: &Recipe, engine: &mut dyn Engine) -> Result<()> {
    for (name, path) in recipe.modules.iter().filter_map(|(name, module)| Some((name, module.load.as_ref()?))) {
        let from = parameters_of(path, |reader| engine.load_weights(reader))
            .map_err(|failure| failure.at(format!("modules.{name}.load")))?;
        tracing::info!("modules.{name}: parameters of {from}");
    }
    Ok(())
}

/// Gives a module's teacher its parameters, however the run begins: they are in no checkpoint of it.
fn load_teachers(recipe: &Recipe, engine: &mut dyn Engine) -> Result<()> {
    for (name, teacher) in recipe.modules.iter().filter_map(|(name, module)| Some((name, module.teacher.as_ref()?))) {
        let from = parameters_of(&teacher.load, |reader| engine.load_teacher(reader))
            .map_err(|failure| failure.at(format!("modules.{name}.teacher.load")))?;
        tracing::info!("modules.{name}: learns from {from}");
    }
    Ok(())
}

/// Loads the parameters of a checkpoint; says which it is.
fn parameters_of(path: &std::path::Path, load: impl FnOnce(&mut CheckpointReader) -> Result<()>) -> Result<String> {
    let mut reader = CheckpointReader::open(&locate(path)?)?;
    load(&mut reader)?;
    let from = origin(&reader);
    reader.finish(engine::stays)?;
    Ok(from)
}

/// A checkpoint in words.
fn origin(reader: &CheckpointReader) -> String {
    let run = reader.run_name().map(|name| format!(" of run {name}")).unwrap_or_default();
    format!("{}: step {}{run}", reader.folder().display(), reader.index().step)
}

fn step_metrics(step: u64, lr: f64, (seconds, data_seconds): (f64, f64), report: StepReport) -> StepMetrics {
    StepMetrics {
        step,
        lm_loss: report.loss_sum / report.tokens.max(1) as f64,
        loss: report.objective,
        grad_norm: report.grad_norm,
        lr,
        tokens: report.tokens,
        tokens_per_second: report.tokens as f64 / seconds.max(f64::MIN_POSITIVE),
        step_seconds: seconds,
        data_seconds,
        memory_peak_bytes: peak_bytes(),
        // A number that is none is left out, as it has no JSON.
        more: report.metrics.into_iter().filter(|(_, value)| !value.is_null()).collect(),
    }
}

/// What writes the checkpoints of a run that begins after step `begin`.
fn saver(recipe: &Recipe, folder: &RunFolder, begin: u64) -> Result<Saver> {
    let checkpoint = &recipe.checkpoint;
    let keep = Keep { last: checkpoint.keep_last, every: checkpoint.keep_every, best: checkpoint.keep_best };
    if keep.best {
        folder.store().refresh_best(begin)?;
    }
    Ok(Saver::new(folder.store().clone(), keep, checkpoint.beside))
}

/// What a checkpoint says besides its tensors; `state` is the engine's.
fn meta(
    recipe: &Recipe,
    engine: &dyn Engine,
    hooks: &mut HookSet,
    guard: &Guard,
    loader: &Loader,
    step: u64,
    state: Value,
) -> Result<Meta> {
    Ok(Meta {
        step,
        consumed_samples: loader.position_after(step).samples,
        plugins: engine.plugins(),
        valid_loss: None,
        notes: Vec::new(),
        extra: json!({
            "engine": state,
            "hooks": hooks.save()?,
            "guard": guard.save(),
            "data": reproduction::data(&loader.identity()),
            "tokenizer": loader.tokenizer().map(Tokenizer::state),
            "recipe": recipe.resolved_yaml(),
        }),
    })
}

#[cfg(test)]
mod tests;
