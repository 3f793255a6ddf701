//! `gantry train`.

use super::{args, summary};
use crate::data;
use crate::failure::{Failure, Result};
use crate::observe::{FAILURE_TARGET, Progress, available_bytes, start_logging};
use crate::train::plan;
use crate::train::{self, HookSet, Options, Outcome, Resume, RunFolder, engine, room};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::signal_name;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A file outgrew the limit of the process. No constant of signal-hook; the number is that of Linux on x86 and ARM.
const SIGXFSZ: i32 = 25;

pub(super) fn run(arguments: args::Train) -> Result<()> {
    let options = Options {
        resume: Resume::from(arguments.resume.as_str()),
        last_step: arguments.steps,
        profile: arguments.profile,
    };
    let mut recipe = arguments.recipe.load(arguments.run_dir)?;
    let signals = StopSignals::catch()?;
    let progress = Progress::new();
    let folder = RunFolder::open(&recipe.run_dir())?;
    start_logging(recipe.log.level, &folder.log(), &progress)?;
    let plugins = super::plugins(&recipe)?;
    let ranks = arguments.ranks.map(|n| n as usize);
    engine::state_grid(&mut recipe, &plugins, ranks).map_err(|failure| recipe.locate(failure))?;
    let planned = plan::quick(&recipe, plugins.clone(), ranks).map_err(|failure| recipe.locate(failure))?;
    if let Some(available) = available_bytes() {
        room::check(&planned, available)?;
    }
    let tokenizer = data::tokenizer(&recipe).map_err(|failure| recipe.locate(failure))?;
    // Before the data are read, which may take long.
    if let Some(tokens) = data::vocab(&recipe, tokenizer.as_ref()) {
        train::check_vocab(planned.vocabulary, tokens)?;
    }
    let mut start = train::start(&recipe, &folder, &options, tokenizer.as_ref())?;
    start.hooks = HookSet::create(&recipe, &plugins).map_err(|failure| recipe.locate(failure))?;
    let mut engine = engine::create(&recipe, plugins, ranks)?;
    signals.loop_begins();
    let outcome = train::run(&recipe, engine.as_mut(), &folder, start, &options, &progress, &signals.stop);
    progress.end();
    let outcome = outcome.and_then(|outcome| {
        if outcome == Outcome::Finished {
            summary::sample(&recipe, tokenizer.as_ref(), engine.as_mut(), &signals.stop)?;
            summary::next(&recipe);
        }
        Ok(())
    });
    if outcome.is_err() {
        // Dropping the engine waits for its ranks; one that hangs must not keep the program from ending.
        std::mem::forget(engine);
    }
    outcome
}

/// SIGTERM, SIGINT and SIGHUP: while there is nothing to save they end the process at once; later the first asks the loop to
/// stop, which saves, and the second ends the process at once. However it ends, it says so, and a checkpoint is complete
/// or absent.
struct StopSignals {
    stop: Arc<AtomicBool>,
    begun: Arc<AtomicBool>,
}

impl StopSignals {
    fn catch() -> Result<StopSignals> {
        let signals = StopSignals { stop: Arc::default(), begun: Arc::default() };
        let mut caught = vec![SIGTERM, SIGINT];
        if !ignored(SIGHUP) {
            caught.push(SIGHUP);
        }
        let mut coming = Signals::new(&caught).map_err(|error| cannot_catch(SIGTERM, &error))?;
        if cfg!(target_os = "linux") {
            // Caught and forgotten: the write that met the limit fails and says so.
            signal_hook::flag::register(SIGXFSZ, Arc::default()).map_err(|error| cannot_catch(SIGXFSZ, &error))?;
        }
        let (stop, begun) = (Arc::clone(&signals.stop), Arc::clone(&signals.begun));
        std::thread::spawn(move || {
            for signal in coming.forever() {
                let name = signal_name(signal).unwrap_or("a signal");
                if begun.load(Ordering::SeqCst) && !stop.swap(true, Ordering::SeqCst) {
                    tracing::info!("{name}: saving after this step; a second signal ends the program at once");
                    continue;
                }
                let line = match begun.load(Ordering::SeqCst) {
                    true => format!("{name} again: ended at once; every checkpoint that was saved is complete"),
                    false => format!("{name}: ended before the first step"),
                };
                tracing::warn!(target: FAILURE_TARGET, "{line}");
                super::say(&line);
                // As if nobody had caught it, so that the status is that of the signal.
                let _ = signal_hook::low_level::emulate_default_handler(signal);
            }
        });
        Ok(signals)
    }

    /// From now on the first signal lets the loop save.
    fn loop_begins(&self) {
        self.begun.store(true, Ordering::SeqCst);
    }
}

fn cannot_catch(signal: i32, error: &std::io::Error) -> Failure {
    Failure::data(format!("cannot catch signal {signal}: {error}"))
}

/// Whether whoever started the program had it ignore a signal, as nohup does with SIGHUP. Known on Linux only.
fn ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}
