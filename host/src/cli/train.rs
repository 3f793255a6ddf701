//! `gantry train`.

use super::args;
use crate::failure::{Failure, Result};
use crate::observe::{Progress, start_logging};
use crate::train::{self, HookSet, Options, Resume, RunFolder, engine};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
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
    let recipe = arguments.recipe.load(arguments.run_dir)?;
    let signals = StopSignals::catch()?;
    let progress = Progress::new();
    let folder = RunFolder::open(&recipe.run_dir())?;
    start_logging(recipe.log.level, &folder.log(), &progress)?;
    let plugins = super::plugins(&recipe)?;
    let mut start = train::start(&recipe, &folder, &options)?;
    start.hooks = HookSet::create(&recipe, &plugins).map_err(|failure| recipe.locate(failure))?;
    let mut engine = engine::create(&recipe, plugins, arguments.ranks.map(|n| n as usize))
        .map_err(|failure| recipe.locate(failure))?;
    signals.loop_begins()?;
    let outcome = train::run(&recipe, engine.as_mut(), &folder, start, &options, &progress, &signals.stop);
    progress.end();
    if outcome.is_err() {
        // Dropping the engine waits for its ranks; one that hangs must not keep the program from ending.
        std::mem::forget(engine);
    }
    outcome.map(drop)
}

/// SIGTERM, SIGINT and SIGHUP: end the process at once while there is nothing to save; later ask the loop to stop, and
/// end the process at once the second time.
struct StopSignals {
    stop: Arc<AtomicBool>,
    at_once: Arc<AtomicBool>,
    caught: Vec<i32>,
}

impl StopSignals {
    fn catch() -> Result<StopSignals> {
        let (stop, at_once) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(true)));
        let mut caught = vec![SIGTERM, SIGINT];
        if !ignored(SIGHUP) {
            caught.push(SIGHUP);
        }
        for &signal in &caught {
            // They run in this order.
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&at_once))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&stop)))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&at_once)))
                .map_err(|error| cannot_catch(signal, &error))?;
        }
        if cfg!(target_os = "linux") {
            // Caught and forgotten: the write that met the limit fails and says so.
            signal_hook::flag::register(SIGXFSZ, Arc::default()).map_err(|error| cannot_catch(SIGXFSZ, &error))?;
        }
        Ok(StopSignals { stop, at_once, caught })
    }

    /// From now on the first signal lets the loop save.
    fn loop_begins(&self) -> Result<()> {
        let mut signals =
            signal_hook::iterator::Signals::new(&self.caught).map_err(|error| cannot_catch(SIGTERM, &error))?;
        self.at_once.store(false, Ordering::Relaxed);
        std::thread::spawn(move || {
            if signals.forever().next().is_some() {
                tracing::info!("a signal came: saving after this step; a second one ends the program at once");
            }
        });
        Ok(())
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
