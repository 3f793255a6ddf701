//! `gantry data build`.

use super::args::{Build, DtypeName};
use super::{file, make_room, thousands};
use crate::cli::{print, say};
use crate::data::build::{Content, Inputs, Output, Status, Task, build};
use crate::data::megatron::Dtype;
use crate::failure::{Failure, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Between lines where stderr is no terminal.
const PAUSE: Duration = Duration::from_secs(10);

/// One line that says how far it is: redrawn on a terminal, else a new one now and then.
pub struct Line {
    bar: ProgressBar,
    terminal: bool,
    last: Mutex<Instant>,
}

impl Line {
    pub fn new() -> Line {
        let terminal = std::io::stderr().is_terminal();
        let target = if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(None, target);
        if let Ok(style) = ProgressStyle::with_template("{msg}") {
            bar.set_style(style);
        }
        Line { bar, terminal, last: Mutex::new(Instant::now()) }
    }

    /// Shows a text; `now`: whatever was shown when.
    pub fn say(&self, text: &str, now: bool) {
        if self.terminal {
            return self.bar.set_message(text.to_string());
        }
        let Ok(mut last) = self.last.lock() else { return };
        if now || last.elapsed() >= PAUSE {
            *last = Instant::now();
            say(text);
        }
    }

    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}

/// Notes a signal that asks to stop, and which one.
struct Stop {
    flag: Arc<AtomicBool>,
    signal: Arc<AtomicI32>,
}

impl Stop {
    fn catch() -> Result<Stop> {
        let stop = Stop { flag: Arc::default(), signal: Arc::default() };
        let mut coming = signal_hook::iterator::Signals::new([SIGTERM, SIGINT, SIGHUP])
            .map_err(|error| Failure::data(format!("cannot catch signals: {error}")))?;
        let (flag, signal) = (Arc::clone(&stop.flag), Arc::clone(&stop.signal));
        std::thread::spawn(move || {
            for caught in coming.forever() {
                signal.store(caught, Ordering::SeqCst);
                flag.store(true, Ordering::SeqCst);
            }
        });
        Ok(stop)
    }
}

pub(super) fn run(arguments: Build) -> Result<()> {
    let tokenizer = arguments.tokenizer.as_deref().map(super::tokenizer).transpose()?;
    let vocab = tokenizer.as_ref().map(|tokenizer| tokenizer.vocab_size() as u64);
    let end = match (arguments.eod, arguments.append_eod, &tokenizer) {
        (Some(end), ..) => Some(end),
        (None, false, _) => None,
        (None, true, Some(tokenizer)) => Some(tokenizer.end_of_document()?),
        (None, true, None) => {
            return Err(Failure::recipe("--append-eod needs --tokenizer, which knows the token")
                .remedy("give --eod ID instead"));
        }
    };
    let dtype = match arguments.dtype {
        DtypeName::Auto => vocab.map_or(Dtype::I32, Dtype::for_vocabulary),
        DtypeName::Uint8 => Dtype::U8,
        DtypeName::Int8 => Dtype::I8,
        DtypeName::Int16 => Dtype::I16,
        DtypeName::Uint16 => Dtype::U16,
        DtypeName::Int32 => Dtype::I32,
        DtypeName::Int64 => Dtype::I64,
    };
    let content = match (arguments.tokenized, tokenizer) {
        (false, Some(tokenizer)) => Content::Text(tokenizer),
        _ => Content::Ids,
    };
    let prefixes: Vec<PathBuf> = match arguments.json_keys.as_slice() {
        [_] => vec![arguments.out.clone()],
        keys => keys.iter().map(|key| file(&arguments.out, &format!("_{key}"))).collect(),
    };
    for prefix in &prefixes {
        make_room(prefix, arguments.overwrite)?;
    }
    let inputs = Inputs::find(&arguments.inputs, &arguments.extensions, arguments.tokenized)?;
    let workers = arguments.workers.map(|n| n as usize);
    let workers = workers.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let task = Task { content, keys: arguments.json_keys, end };
    let output = Output { dtype, prefixes };
    let (stop, line) = (Stop::catch()?, Line::new());
    let done = build(&inputs, &task, &output, workers, &stop.flag, &mut |status| line.say(&shown(status), false));
    line.end();
    match done? {
        None => {
            say("stopped by a signal; nothing was written");
            // Ends the process as the signal would have.
            let _ = signal_hook::low_level::emulate_default_handler(stop.signal.load(Ordering::SeqCst));
            Err(Failure::data("stopped by a signal"))
        }
        Some(status) => print(&report(&output, &status)),
    }
}

fn shown(status: &Status) -> String {
    format!(
        "{:.0} %  {:.1} MB of text  {:.1} MB/s  {} tokens/s  {:.0} s left",
        100.0 * status.read as f64 / status.total.max(1) as f64,
        status.text_bytes as f64 / 1e6,
        status.megabytes_per_second(),
        thousands(status.tokens_per_second() as u64),
        status.seconds_left()
    )
}

fn report(output: &Output, status: &Status) -> String {
    let mut text = String::new();
    for prefix in &output.prefixes {
        text += &format!("{}.bin, {}.idx ({})\n", prefix.display(), prefix.display(), output.dtype);
    }
    text += &format!(
        "{} documents, {} tokens from {:.1} MB in {:.1} s: {:.1} MB/s, {} tokens/s\n",
        thousands(status.documents),
        thousands(status.tokens),
        status.text_bytes as f64 / 1e6,
        status.seconds,
        status.megabytes_per_second(),
        thousands(status.tokens_per_second() as u64)
    );
    if status.empty + status.binary > 0 {
        text += &format!("left out: {} empty files, {} that are no UTF-8 text\n", status.empty, status.binary);
    }
    text
}
