//! TensorBoard event files: every number of a line of metrics as a scalar.
//!
//! An event file is a sequence of records. A record is the length of its data (u64), the masked CRC-32C of these eight
//! bytes (u32), the data, and the masked CRC-32C of the data (u32), all little-endian; masked means rotated right by 15 bits
//! plus 0xa282ead8, so that a checksum of data that holds checksums stays good (TensorFlow, core/lib/hash/crc32c.h and
//! core/lib/io/record_writer.h). The data is a protocol-buffer message `Event` (core/util/event.proto), of which these
//! fields are used:
//!
//! ```text
//! Event       wall_time 1 double | step 2 int64 | file_version 3 string | summary 5 Summary | session_log 7 SessionLog
//! Summary     value 1 repeated Value
//! Value       tag 1 string | simple_value 2 float
//! SessionLog  status 1 enum (START = 1)
//! ```
//!
//! A run that goes on from a checkpoint begins a new file with a SessionLog START at its first step, on which readers
//! forget what earlier files hold of that step and later ones. Every event is one write: what a killed process was writing
//! is a torn last record, at which readers stop.

use crate::failure::{Failure, Result};
use serde_json::Value;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// What names of event files begin with; readers go by it.
const PREFIX: &str = "events.out.tfevents.";
/// Ends of keys of metrics that tell how fast a run is rather than how well it learns.
const PERFORMANCE: [&str; 4] = ["tokens", "seconds", "per_second", "bytes"];

/// Writes one event file.
#[derive(Debug)]
pub struct EventWriter {
    path: PathBuf,
    file: File,
}

impl EventWriter {
    /// Begins a file in `folder`. `finished_steps`: later steps that earlier files of the folder hold are void.
    pub fn begin(folder: &Path, finished_steps: u64) -> Result<EventWriter> {
        let cannot = |path: &Path, error: std::io::Error| {
            Failure::data(format!("cannot write {}: {error}", path.display()))
                .remedy("make room, choose another run folder with --run-dir, or set log.tensorboard to false")
        };
        fs::create_dir_all(folder).map_err(|error| cannot(folder, error))?;
        let newest = fs::read_dir(folder)
            .map_err(|error| cannot(folder, error))?
            .filter_map(|entry| begun(entry.ok()?.file_name().to_str()?))
            .max();
        // Readers take files by name: this one is the last even if the clock was set back.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let begun = newest.map_or(now, |newest| now.max(newest + 1));
        let path = folder.join(format!("{PREFIX}{begun:010}.gantry.{}", std::process::id()));
        let file =
            OpenOptions::new().create_new(true).append(true).open(&path).map_err(|error| cannot(&path, error))?;
        let mut writer = EventWriter { path, file };
        let mut version = event(0);
        string(&mut version, 3, "brain.Event:2");
        writer.record(&version)?;
        if newest.is_some() {
            let mut start = event(finished_steps + 1);
            bytes(&mut start, 7, &[1 << 3, 1]);
            writer.record(&start)?;
        }
        Ok(writer)
    }

    /// Writes the numbers of a line of `metrics.jsonl`, under the tags of [`scalars`].
    pub fn write(&mut self, line: &Value) -> Result<()> {
        let Some(step) = line["step"].as_u64() else { return Ok(()) };
        let scalars = scalars(line);
        if scalars.is_empty() {
            return Ok(());
        }
        let mut summary = Vec::new();
        for (tag, number) in scalars {
            let mut value = Vec::new();
            string(&mut value, 1, &tag);
            value.push(2 << 3 | 5);
            value.extend((number as f32).to_le_bytes());
            bytes(&mut summary, 1, &value);
        }
        let mut event = event(step);
        bytes(&mut event, 5, &summary);
        self.record(&event)
    }

    fn record(&mut self, data: &[u8]) -> Result<()> {
        self.file
            .write_all(&frame(data))
            .map_err(|error| Failure::data(format!("cannot write {}: {error}", self.path.display())))
    }
}

/// Tag and value of every number of a line of metrics, whatever it is nested in: `train/NAME`, `perf/NAME` for what
/// tells speed and memory, `valid/NAME` for `valid_NAME` and what an object `valid` holds, and the path for other objects,
/// e.g. `budgets/0.697/lm_loss`.
pub fn scalars(line: &Value) -> Vec<(String, f64)> {
    let mut all = Vec::new();
    for (key, value) in line.as_object().into_iter().flatten().filter(|(key, _)| *key != "step") {
        let tag = match key.strip_prefix("valid_") {
            Some(name) => format!("valid/{name}"),
            None if value.is_object() => key.clone(),
            None if PERFORMANCE.iter().any(|end| key.ends_with(end)) => format!("perf/{key}"),
            None => format!("train/{key}"),
        };
        gather(tag, value, &mut all);
    }
    all
}

fn gather(tag: String, value: &Value, all: &mut Vec<(String, f64)>) {
    match value {
        Value::Number(number) => all.extend(number.as_f64().map(|number| (tag, number))),
        Value::Object(parts) => parts.iter().for_each(|(key, part)| gather(format!("{tag}/{key}"), part, all)),
        _ => {}
    }
}

/// When the event file of a name was begun, seconds since 1970.
fn begun(name: &str) -> Option<u64> {
    name.strip_prefix(PREFIX)?.split('.').next()?.parse().ok()
}

/// An event of this moment.
fn event(step: u64) -> Vec<u8> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    let mut event = vec![1 << 3 | 1];
    event.extend(now.to_le_bytes());
    event.push(2 << 3);
    varint(&mut event, step);
    event
}

/// A field of bytes: a string or a message.
fn bytes(to: &mut Vec<u8>, field: u8, data: &[u8]) {
    to.push(field << 3 | 2);
    varint(to, data.len() as u64);
    to.extend(data);
}

fn string(to: &mut Vec<u8>, field: u8, text: &str) {
    bytes(to, field, text.as_bytes());
}

/// Seven bits a byte, the lowest first.
fn varint(to: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        to.push(n as u8 | 0x80);
        n >>= 7;
    }
    to.push(n as u8);
}

/// A record around its data.
fn frame(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend(length);
    record.extend(masked_crc(&length).to_le_bytes());
    record.extend(data);
    record.extend(masked_crc(data).to_le_bytes());
    record
}

fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The data of every whole record; checks the sums.
    fn records(mut file: &[u8]) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        while file.len() >= 16 {
            let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
            let data = &file[12..12 + length];
            assert_eq!(file[..length + 16], frame(data), "record {}", all.len());
            all.push(data.to_vec());
            file = &file[length + 16..];
        }
        assert!(file.is_empty());
        all
    }

    fn files(folder: &Path) -> Vec<Vec<Vec<u8>>> {
        let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths.iter().map(|path| records(&fs::read(path).unwrap())).collect()
    }

    #[test]
    fn sums_are_those_of_the_standard() {
        // RFC 3720, B.4: CRC-32C of 32 zero bytes.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(masked_crc(&[0; 32]), 0x8a91_36aa_u32.rotate_right(15).wrapping_add(0xa282_ead8));
    }

    #[test]
    fn a_line_becomes_an_event() {
        let folder = tempfile::tempdir().unwrap();
        EventWriter::begin(folder.path(), 0).unwrap().write(&json!({"step": 300, "lm_loss": 0.5})).unwrap();
        let files = files(folder.path());
        assert_eq!((files.len(), files[0].len()), (1, 2));
        assert_eq!(files[0][0][11..], *b"\x1a\x0dbrain.Event:2", "first the version");
        let event = &files[0][1];
        assert_eq!(event[9..12], [0x10, 0xac, 0x02], "step 300 as a varint");
        let value = [b"\x0a\x0dtrain/lm_loss\x15".as_slice(), &0.5f32.to_le_bytes()].concat();
        let summary = [&[0x2a, 22, 0x0a, 20], value.as_slice()].concat();
        assert_eq!(event[12..], summary);
    }

    #[test]
    fn a_resumed_run_voids_what_is_beyond_its_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        for (finished, steps) in [(0, 1..=3), (2, 3..=4)] {
            let mut writer = EventWriter::begin(folder.path(), finished).unwrap();
            steps.for_each(|step| writer.write(&json!({"step": step, "loss": 1})).unwrap());
        }
        let files = files(folder.path());
        assert_eq!(files.iter().map(Vec::len).collect::<Vec<_>>(), [4, 4]);
        assert_eq!(files[1][1][9..], [0x10, 3, 0x3a, 2, 0x08, 1], "START at step 3");
    }

    #[test]
    fn tags_say_what_a_number_is_of() {
        let line = json!({"step": 7, "lm_loss": 1.0, "valid_loss": 2.0, "valid": {"code": {"loss": 3.0}}, "stopped": "nan",
            "tokens": 4, "budgets": {"0.697": {"lm_loss": 5.0}}});
        let mut tags = scalars(&line);
        tags.sort_by(|a, b| a.1.total_cmp(&b.1));
        let tags: Vec<&str> = tags.iter().map(|(tag, _)| tag.as_str()).collect();
        assert_eq!(tags, ["train/lm_loss", "valid/loss", "valid/code/loss", "perf/tokens", "budgets/0.697/lm_loss"]);
    }

    #[test]
    fn a_folder_that_cannot_be_is_named() {
        let failure = EventWriter::begin(Path::new("/dev/null/tensorboard"), 0).unwrap_err();
        assert!(failure.sentence.starts_with("cannot write /dev/null/tensorboard: "), "{failure}");
        assert_eq!(failure.exit_status(), 4);
    }
}
