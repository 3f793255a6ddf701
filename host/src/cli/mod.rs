//! The command line: arguments in, exit status out.
//!
//! One file per command. Every command ends in a [`Failure`] or not; only this file prints failures and turns them
//! into exit statuses: 0 done, 2 usage or recipe, 3 plugin, 4 data or checkpoint, 5 numerical, 6 communication, and 1
//! for a defect of Gantry itself. May depend on everything; nothing depends on it.

mod args;
mod bench;
mod convert;
mod data;
mod doctor;
mod eval;
mod generate;
mod inspect;
mod model;
mod plan;
mod rank;
mod rewrite;
mod schema;
mod slice;
mod summary;
mod tokenize;
mod train;

use crate::failure::{Failure, Result};
use crate::observe::FAILURE_TARGET;
use crate::plugin::{PluginFile, PluginSet, Search};
use crate::recipe::Recipe;
use args::{Arguments, Command};
use clap::Parser;
use std::io::{ErrorKind, Write};
use std::panic::PanicHookInfo;
use std::process::ExitCode;

/// Exit status of a panic that nothing turned into a failure.
const DEFECT: u8 = 1;

/// Runs the program.
pub fn main() -> ExitCode {
    std::panic::set_hook(Box::new(report_panic));
    // Wrong arguments end here with status 2, --help and --version with 0.
    let arguments = Arguments::parse();
    match std::panic::catch_unwind(|| run(arguments)) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(failure)) => {
            tracing::error!(target: FAILURE_TARGET, status = failure.exit_status(), "{failure}");
            say(&format!("error: {failure}"));
            ExitCode::from(failure.exit_status())
        }
        Err(_) => ExitCode::from(DEFECT),
    }
}

fn run(arguments: Arguments) -> Result<()> {
    match arguments.command {
        Command::Train(arguments) => train::run(arguments),
        Command::Plan(arguments) => plan::run(arguments),
        Command::Eval(arguments) => eval::run(arguments),
        Command::Generate(arguments) => generate::run(arguments),
        Command::Rank(arguments) => rank::run(arguments),
        Command::Convert(arguments) => convert::run(arguments),
        Command::Slice(arguments) => slice::run(arguments),
        Command::Inspect(arguments) => inspect::run(arguments),
        Command::Tokenize(arguments) => tokenize::run(arguments),
        Command::Schema(arguments) => schema::run(arguments),
        Command::Bench(arguments) => bench::run(arguments),
        Command::Data(arguments) => data::run(arguments),
        Command::Doctor(arguments) => doctor::run(arguments),
    }
}

/// The plugins a recipe lists, and those its modules need.
fn plugins(recipe: &Recipe) -> Result<PluginSet> {
    if let Some(gone) = recipe.plugins.iter().find(|file| !file.path.exists()) {
        return Err(Failure::plugin(format!("the recipe lists plugin {}, which does not exist", gone.path.display()))
            .remedy("correct `plugins`, or build the plugin"));
    }
    let listed = recipe.plugins.iter().map(|file| PluginFile {
        path: file.path.clone(),
        sha256: file.sha256.clone(),
        allow_writable: false,
    });
    let modules = recipe.modules.values();
    let names = modules.flat_map(|module| {
        let elastifier = module.elastify.as_ref().map(|e| &e.provider);
        [Some(&module.provider), elastifier, module.teacher.as_ref().and_then(|t| t.provider.as_ref())]
    });
    Ok(PluginSet::load(Search::standard(listed.collect()), names.flatten().map(String::as_str))?)
}

/// One line instead of a backtrace, which RUST_BACKTRACE=1 adds; nothing of a panic that becomes a failure.
fn report_panic(info: &PanicHookInfo<'_>) {
    if crate::failure::is_guarded() {
        return;
    }
    let payload = info.payload();
    let text = payload.downcast_ref::<&str>().copied().or(payload.downcast_ref::<String>().map(String::as_str));
    let message = text.and_then(|text| text.lines().next()).unwrap_or("no message");
    let place = info.location().map(|at| format!(" ({}:{})", at.file(), at.line())).unwrap_or_default();
    tracing::error!(target: FAILURE_TARGET, "panic: {message}{place}");
    say(&format!("error: defect in gantry: {message}{place}"));
    if std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0") {
        say(&std::backtrace::Backtrace::force_capture().to_string());
    }
}

/// A line on stderr; a closed stderr is no reason to fail.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Text on stdout. A reader that has seen enough (`| head`) is no failure.
fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::data(format!("cannot write to stdout: {error}")))
        }
        _ => Ok(()),
    }
}
