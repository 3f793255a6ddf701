//! `gantry train`.

use super::args;
use crate::failure::{Failure, Result};
use crate::observe::{Progress, start_logging};
use crate::train::{self, HookSet, Options, Resume, RunFolder, engine};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

pub(super) fn run(arguments: args::Train) -> Result<()> {
    let options = Options {
        resume: Resume::from(arguments.resume.as_str()),
        last_step: arguments.steps,
        profile: arguments.profile,
    };
    let recipe = arguments.recipe.load(arguments.run_dir)?;
    let stop = stop_signals()?;
    let progress = Progress::new();
    let folder = RunFolder::open(&recipe.run_dir())?;
    start_logging(recipe.log.level, &folder.log(), &progress)?;
    let plugins = super::plugins(&recipe)?;
    let mut start = train::start(&recipe, &folder, &options)?;
    start.hooks = HookSet::create(&recipe, &plugins)?;
    let mut engine = engine::create(&recipe, plugins, arguments.ranks.map(|n| n as usize))?;
    let outcome = train::run(&recipe, engine.as_mut(), &folder, start, &options, &progress, &stop);
    progress.end();
    if outcome.is_err() {
        // Dropping the engine waits for its ranks; one that hangs must not keep the program from ending.
        std::mem::forget(engine);
    }
    outcome.map(drop)
}

/// A flag that SIGTERM and SIGINT set; a second signal ends the process at once.
fn stop_signals() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        signal_hook::flag::register_conditional_default(signal, Arc::clone(&stop))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&stop)))
            .map_err(|error| Failure::data(format!("cannot catch signal {signal}: {error}")))?;
    }
    Ok(stop)
}
