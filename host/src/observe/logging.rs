//! Tracing set-up: human lines on stderr, JSON in the run folder.
//!
//! A line of log.jsonl has `timestamp`, `level`, `target`, `message`, the event's own fields, `spans`: what was going on,
//! from the outside in, and `span`: the innermost. Spans are `run` (recipe), `step` (step), `record` (rank, tokens), `load` and `save`; at level debug
//! also `micro_batch` (rank, micro_batch, direction) and `plugin_call` (plugin, call), and every span's end is a line with its
//! `time.busy`. Lines with target `plugin` are a plugin's own: `plugin` is its name.

use super::Progress;
use crate::failure::{Failure, Result};
use crate::recipe::LogLevel;
use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::{FilterFn, LevelFilter};
use tracing_subscriber::fmt::format::{FmtSpan, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::prelude::*;
use tracing_subscriber::registry::LookupSpan;

/// Target of events that are already on stderr in another form and belong to the log file only.
pub const FAILURE_TARGET: &str = "gantry::failure";

/// Starts logging for the rest of the process: to stderr around the progress line, and, appended, to `file`.
pub fn start_logging(level: LogLevel, file: &Path, progress: &Progress) -> Result<()> {
    let cannot = |error: &dyn std::fmt::Display| Failure::data(format!("cannot write {}: {error}", file.display()));
    let log = OpenOptions::new().create(true).append(true).open(file).map_err(|error| cannot(&error))?;
    let subscriber = subscriber(level, Stderr(progress.clone()), progress.on_terminal(), Mutex::new(log));
    // A second run in one process (a test) goes on with the first one's subscriber.
    let _ = subscriber.try_init();
    Ok(())
}

/// What turns events into lines for people (`human`) and into JSON (`log`).
fn subscriber<H, L>(level: LogLevel, human: H, colours: bool, log: L) -> impl Subscriber + Send + Sync
where
    H: for<'w> MakeWriter<'w> + Send + Sync + 'static,
    L: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let (level, ends) = match level {
        LogLevel::Error => (LevelFilter::ERROR, FmtSpan::NONE),
        LogLevel::Warn => (LevelFilter::WARN, FmtSpan::NONE),
        LogLevel::Info => (LevelFilter::INFO, FmtSpan::NONE),
        LogLevel::Debug => (LevelFilter::DEBUG, FmtSpan::CLOSE),
        LogLevel::Trace => (LevelFilter::TRACE, FmtSpan::CLOSE),
    };
    // A line that cannot be written is lost: saying so on a terminal that is gone would end the run.
    let human = tracing_subscriber::fmt::layer()
        .with_writer(human)
        .with_ansi(colours)
        .event_format(HumanLine(Instant::now()))
        .log_internal_errors(false)
        .with_filter(FilterFn::new(|event| event.target() != FAILURE_TARGET));
    let json = tracing_subscriber::fmt::layer()
        .json()
        .flatten_event(true)
        .with_span_events(ends)
        .with_writer(log)
        .log_internal_errors(false);
    tracing_subscriber::registry().with(level).with(human).with(json)
}

/// `  12.3s  INFO message field=value`: seconds since this was made. Spans are for the log file.
struct HumanLine(Instant);

impl<S, N> FormatEvent<S, N> for HumanLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, cx: &FmtContext<'_, S, N>, mut to: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let level = *event.metadata().level();
        write!(to, "{:>6.1}s ", self.0.elapsed().as_secs_f64())?;
        if to.has_ansi_escapes() {
            let colour = match level {
                Level::ERROR => 31,
                Level::WARN => 33,
                Level::INFO => 32,
                Level::DEBUG => 34,
                Level::TRACE => 35,
            };
            write!(to, "\x1b[{colour}m{level:>5}\x1b[0m ")?;
        } else {
            write!(to, "{level:>5} ")?;
        }
        cx.format_fields(to.by_ref(), event)?;
        writeln!(to)
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::sync::{Arc, MutexGuard};

    #[derive(Clone, Default)]
    struct Memory(Arc<Mutex<Vec<u8>>>);

    impl Memory {
        fn lines(&self) -> Vec<String> {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap().lines().map(str::to_string).collect()
        }
    }

    struct Locked<'a>(MutexGuard<'a, Vec<u8>>);

    impl Write for Locked<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl<'a> MakeWriter<'a> for Memory {
        type Writer = Locked<'a>;

        fn make_writer(&'a self) -> Locked<'a> {
            Locked(self.0.lock().unwrap())
        }
    }

    /// What is said at a level, for people and as JSON.
    fn said(level: LogLevel, say: impl FnOnce()) -> (Vec<String>, Vec<Value>) {
        let (human, json) = (Memory::default(), Memory::default());
        tracing::subscriber::with_default(subscriber(level, human.clone(), false, json.clone()), say);
        (human.lines(), json.lines().iter().map(|line| serde_json::from_str(line).unwrap()).collect())
    }

    fn a_step() {
        let _run = tracing::info_span!("run", recipe = "t").entered();
        let _step = tracing::info_span!("step", step = 3).entered();
        let call = tracing::debug_span!("plugin_call", plugin = "dense-gpt", call = "forward").entered();
        crate::plugin::services::log_event(gantry_plugin_api::sdk::LogLevel::Warn, "dense-gpt", "odd size");
        drop(call);
        tracing::debug!("detail");
        tracing::error!(target: FAILURE_TARGET, "said elsewhere");
    }

    #[test]
    fn lines_for_people_are_short_and_json_says_where() {
        let (human, json) = said(LogLevel::Info, a_step);
        assert_eq!(human, ["   0.0s  WARN odd size plugin=\"dense-gpt\""]);
        assert_eq!(json.len(), 2);
        let line = &json[0];
        assert_eq!(
            (&line["level"], &line["target"], &line["plugin"], &line["message"]),
            (&"WARN".into(), &"plugin".into(), &"dense-gpt".into(), &"odd size".into())
        );
        assert!(line["timestamp"].is_string());
        let spans = serde_json::json!([{"name": "run", "recipe": "t"}, {"name": "step", "step": 3}]);
        assert_eq!(line["spans"], spans);
        assert_eq!(json[1]["message"], "said elsewhere");
    }

    #[test]
    fn debug_tells_calls_and_how_long_spans_took() {
        let (human, json) = said(LogLevel::Debug, a_step);
        assert_eq!(human.len(), 2, "{human:?}");
        assert_eq!(json[0]["spans"][2]["call"], "forward");
        let ends: Vec<&Value> = json.iter().filter(|line| line["message"] == "close").collect();
        let names: Vec<&Value> = ends.iter().map(|end| &end["span"]["name"]).collect();
        assert_eq!(names, ["plugin_call", "step", "run"], "{json:?}");
        assert!(ends.iter().all(|end| end["time.busy"].is_string()));
    }

    #[test]
    fn only_what_a_level_asks_for_is_written() {
        let (human, json) = said(LogLevel::Error, a_step);
        assert_eq!((human.len(), json.len()), (0, 1));
    }
}
