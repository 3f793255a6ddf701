//! From text to Megatron-LM's indexed files: one thread reads (`input.rs`), several make tokens (`encode.rs`), the caller's
//! writes in order. What is written depends on the inputs alone, not on the number of threads; memory is bounded by the
//! parts that are under way, a few per thread, or by the largest text file. May depend on the rest of `data`; knows no
//! recipe but its tokenizer, and no command line.

mod encode;
mod input;

pub use encode::{Content, Task};
pub use input::{Inputs, texts};

use super::megatron::{Dtype, Writer};
use crate::failure::{Failure, Result};
use encode::Made;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Parts under way for each thread.
const AHEAD: usize = 4;

/// Where a build stands.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Status {
    /// Bytes of the files that were read, and of all.
    pub read: u64,
    pub total: u64,
    pub documents: u64,
    pub tokens: u64,
    /// Of text, after unpacking.
    pub text_bytes: u64,
    /// Files of folders left out because they are empty, or no text.
    pub empty: u64,
    pub binary: u64,
    pub seconds: f64,
}

impl Status {
    /// Megabytes (10^6) of text a second.
    pub fn megabytes_per_second(&self) -> f64 {
        self.text_bytes as f64 / 1e6 / self.seconds.max(1e-9)
    }

    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds.max(1e-9)
    }

    /// Seconds until all is read, at the pace so far.
    pub fn seconds_left(&self) -> f64 {
        let share = self.read as f64 / self.total.max(1) as f64;
        if share > 0.0 { self.seconds * (1.0 - share).max(0.0) / share } else { 0.0 }
    }
}

/// Where the data sets go.
#[derive(Clone, Debug)]
pub struct Output {
    pub dtype: Dtype,
    /// One for each of the task's keys.
    pub prefixes: Vec<PathBuf>,
}

/// Builds the data sets. `told` hears of the progress, at most every tenth of a second, and at the end; if `stop` is set,
/// nothing is written and nothing is returned.
pub fn build(
    inputs: &Inputs,
    task: &Task,
    output: &Output,
    workers: usize,
    stop: &AtomicBool,
    told: &mut dyn FnMut(&Status),
) -> Result<Option<Status>> {
    let writers = output.prefixes.iter().map(|prefix| Writer::create(prefix, output.dtype));
    let mut writers = writers.collect::<Result<Vec<_>>>()?;
    let workers = workers.max(1);
    let status = std::thread::scope(|scope| {
        // A place for each part under way: the reader takes one, the writer gives it back.
        let (give, places) = sync_channel::<()>(workers * AHEAD);
        let (to_workers, parts) = sync_channel(workers * AHEAD);
        let (to_writer, made) = sync_channel(workers * AHEAD);
        for _ in 0..workers * AHEAD {
            // The channel has room for all of them.
            let _ = give.send(());
        }
        let parts = Arc::new(Mutex::new(parts));
        scope.spawn(move || inputs.read(&mut |part| places.recv().is_ok() && to_workers.send(part).is_ok()));
        for _ in 0..workers {
            let (parts, to_writer) = (Arc::clone(&parts), to_writer.clone());
            scope.spawn(move || {
                // The lock is held while waiting; who waits for it would wait for a part too.
                while let Some(part) = parts.lock().ok().and_then(|parts| parts.recv().ok()) {
                    let number = part.number;
                    if to_writer.send((number, task.encode(part, output.dtype))).is_err() {
                        return;
                    }
                }
            });
        }
        drop(to_writer);
        let written = write(made, &mut writers, inputs.bytes(), stop, told, || {
            let _ = give.send(());
        });
        // Ends the reader, which else would wait for places.
        drop(give);
        written
    });
    let Some(status) = status? else { return Ok(None) };
    for writer in writers {
        writer.finish()?;
    }
    Ok(Some(status))
}

/// Takes parts as they come and writes them in order.
fn write(
    made: Receiver<(u64, Result<Made>)>,
    writers: &mut [Writer],
    total: u64,
    stop: &AtomicBool,
    told: &mut dyn FnMut(&Status),
    give_place: impl Fn(),
) -> Result<Option<Status>> {
    let (clock, mut last) = (Instant::now(), Instant::now());
    let mut status = Status { total, ..Status::default() };
    let (mut next, mut early) = (0, BTreeMap::new());
    for (number, part) in made {
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        early.insert(number, part);
        while let Some(part) = early.remove(&next) {
            let part = part?;
            for (writer, encoded) in writers.iter_mut().zip(&part.encoded) {
                writer.encoded(encoded)?;
            }
            next += 1;
            status.read += part.read;
            status.documents += part.documents;
            status.tokens += part.tokens;
            status.text_bytes += part.text_bytes;
            status.empty += part.empty;
            status.binary += part.binary;
            give_place();
        }
        if last.elapsed() > Duration::from_millis(100) {
            status.seconds = clock.elapsed().as_secs_f64();
            told(&status);
            last = Instant::now();
        }
    }
    if stop.load(Ordering::Relaxed) {
        return Ok(None);
    }
    status.seconds = clock.elapsed().as_secs_f64();
    told(&status);
    if status.documents == 0 {
        return Err(Failure::data(format!(
            "the inputs hold no document ({} files are empty, {} are no text)",
            status.empty, status.binary
        ))
        .remedy("name files with text"));
    }
    Ok(Some(status))
}

#[cfg(test)]
mod tests;
