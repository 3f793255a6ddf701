//! Tracing set-up: human lines on stderr, JSON in the run folder.

use super::Progress;
use crate::failure::{Failure, Result};
use crate::recipe::LogLevel;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Mutex;
use tracing_subscriber::filter::{FilterFn, LevelFilter};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::time::Uptime;
use tracing_subscriber::prelude::*;

/// Target of events that are already on stderr in another form and belong to the log file only.
pub const FAILURE_TARGET: &str = "gantry::failure";

/// Starts logging for the rest of the process: to stderr around the progress line, and, appended, to `file`.
pub fn start_logging(level: LogLevel, file: &Path, progress: &Progress) -> Result<()> {
    let cannot = |error: &dyn std::fmt::Display| Failure::data(format!("cannot write {}: {error}", file.display()));
    let log = OpenOptions::new().create(true).append(true).open(file).map_err(|error| cannot(&error))?;
    let level = match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    // A line that cannot be written is lost: saying so on a terminal that is gone would end the run.
    let human = tracing_subscriber::fmt::layer()
        .with_writer(Stderr(progress.clone()))
        .with_ansi(progress.on_terminal())
        .with_target(false)
        .with_timer(Uptime::default())
        .log_internal_errors(false)
        .with_filter(FilterFn::new(|event| event.target() != FAILURE_TARGET));
    let json = tracing_subscriber::fmt::layer()
        .json()
        .flatten_event(true)
        .with_writer(Mutex::new(log))
        .log_internal_errors(false);
    // A second run in one process (a test) goes on with the first one's subscriber.
    let _ = tracing_subscriber::registry().with(level).with(human).with(json).try_init();
    Ok(())
}

/// Standard error, with the progress line out of the way while a line is written.
struct Stderr(Progress);

impl<'a> MakeWriter<'a> for Stderr {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line(&self.0)
    }
}

struct Line<'a>(&'a Progress);

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.suspend(|| io::stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}
