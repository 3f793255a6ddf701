//! `metrics.jsonl`: one JSON object per step; TensorBoard gets the same numbers.

use super::tensorboard::EventWriter;
use crate::failure::{Failure, Result};
use serde::Serialize;
use serde_json::{Map, Value};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// A line of `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepMetrics {
    /// From 1.
    pub step: u64,
    /// Cross entropy, nats per token. Like the next two it is left out of a line where it is no number: the step was skipped.
    #[serde(skip_serializing_if = "is_none")]
    pub lm_loss: f64,
    /// What was minimised, per token.
    #[serde(skip_serializing_if = "is_none")]
    pub loss: f64,
    /// Global L2 norm before clipping.
    #[serde(skip_serializing_if = "is_none")]
    pub grad_norm: f64,
    pub lr: f64,
    /// Tokens of this step.
    pub tokens: u64,
    pub tokens_per_second: f64,
    /// Without checkpoints.
    pub step_seconds: f64,
    /// Of these, waiting for batches.
    pub data_seconds: f64,
    pub memory_peak_bytes: u64,
    /// What the model reports besides, by name.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

/// Whether a number has no JSON.
fn is_none(number: &f64) -> bool {
    !number.is_finite()
}

impl StepMetrics {
    /// The line as a value, as hooks get it.
    pub fn json(&self) -> Value {
        serde_json::to_value(self).unwrap_or_default()
    }
}

/// Appends lines to `metrics.jsonl`.
#[derive(Debug)]
pub struct MetricsWriter {
    path: PathBuf,
    file: File,
    events: Option<EventWriter>,
}

impl MetricsWriter {
    /// Opens the file, keeping lines of steps up to `finished_steps` only: what a killed run wrote after its newest
    /// checkpoint is written again.
    pub fn open(path: &Path, finished_steps: u64) -> Result<MetricsWriter> {
        let rest = RestOfMetrics::read(path, finished_steps)?;
        if let Some(last) = rest.last_kept().filter(|&last| last < finished_steps) {
            tracing::warn!("{} has no lines of steps {} to {finished_steps}", path.display(), last + 1);
        }
        rest.drop_lines()?;
        let cannot = |error: std::io::Error| Failure::data(format!("cannot write {}: {error}", path.display()));
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(cannot)?;
        Ok(MetricsWriter { path: path.to_path_buf(), file, events: None })
    }

    /// Writes every line's numbers as TensorBoard's scalars too.
    pub fn with_events(mut self, events: EventWriter) -> MetricsWriter {
        self.events = Some(events);
        self
    }

    /// Writes a step's line.
    pub fn write(&mut self, metrics: &StepMetrics) -> Result<()> {
        let line = serde_json::to_string(metrics).map_err(|error| self.cannot(&error))?;
        self.line(&line)?;
        match &mut self.events {
            Some(events) => events.write(&metrics.json()),
            None => Ok(()),
        }
    }

    /// Writes the last line of a run that was stopped in `step`, e.g. why: `nan in loss`.
    pub fn stopped(&mut self, step: u64, why: &str) -> Result<()> {
        self.line(&serde_json::json!({"step": step, "stopped": why}).to_string())
    }

    fn line(&mut self, text: &str) -> Result<()> {
        // One write, so that a killed process leaves a torn line at most at the end.
        self.file.write_all(format!("{text}\n").as_bytes()).map_err(|error| self.cannot(&error))
    }

    fn cannot(&self, error: &dyn std::fmt::Display) -> Failure {
        Failure::data(format!("cannot write {}: {error}", self.path.display()))
    }
}

/// Lines of `metrics.jsonl` of steps after a checkpoint, and torn ones.
#[derive(Debug)]
pub struct RestOfMetrics {
    path: PathBuf,
    kept: Vec<u8>,
    rest: Vec<u8>,
}

impl RestOfMetrics {
    /// Reads a file, which need not be there.
    pub fn read(path: &Path, finished_steps: u64) -> Result<RestOfMetrics> {
        let old = match std::fs::read(path) {
            Ok(old) => old,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => {
                return Err(Failure::data(format!("cannot read {}: {error}", path.display()))
                    .remedy("move it away, or choose another run folder with --run-dir"));
            }
        };
        let (mut kept, mut rest) = (Vec::new(), Vec::new());
        for line in old.split_inclusive(|&byte| byte == b'\n') {
            if keep(line, finished_steps) { kept.extend_from_slice(line) } else { rest.extend_from_slice(line) }
        }
        Ok(RestOfMetrics { path: path.to_path_buf(), kept, rest })
    }

    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Step of the last line that stays.
    fn last_kept(&self) -> Option<u64> {
        let last = self.kept.split(|&byte| byte == b'\n').rfind(|line| !line.is_empty())?;
        serde_json::from_slice::<Value>(last).ok()?["step"].as_u64()
    }

    /// Moves the lines to the file `to`: they are there before they go here.
    pub fn move_to(self, to: &Path) -> Result<()> {
        let written = File::create(to).and_then(|mut file| {
            file.write_all(&self.rest)?;
            file.sync_all()
        });
        written.map_err(|error| Failure::data(format!("cannot write {}: {error}", to.display())))?;
        self.drop_lines()
    }

    fn drop_lines(self) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let new = self.path.with_extension("jsonl.new");
        std::fs::write(&new, &self.kept)
            .and_then(|()| std::fs::rename(&new, &self.path))
            .map_err(|error| Failure::data(format!("cannot write {}: {error}", self.path.display())))
    }
}

/// Whether a line is whole and of a step that is finished.
fn keep(line: &[u8], finished_steps: u64) -> bool {
    let whole = line.ends_with(b"\n");
    let step = serde_json::from_slice::<Value>(line).ok().and_then(|value| value["step"].as_u64());
    whole && step.is_some_and(|step| step <= finished_steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(step: u64) -> StepMetrics {
        let mut more = Map::new();
        more.insert("moe_aux_loss".into(), 0.25.into());
        StepMetrics {
            step,
            lm_loss: 5.5,
            loss: 5.75,
            grad_norm: 1.0,
            lr: 1e-3,
            tokens: 2048,
            tokens_per_second: 4096.0,
            step_seconds: 0.5,
            data_seconds: 0.1,
            memory_peak_bytes: 1 << 20,
            more,
        }
    }

    #[test]
    fn line_has_the_contract_keys_as_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        MetricsWriter::open(&path, 0).unwrap().write(&metrics(1)).unwrap();
        let line: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let keys = [
            "step",
            "lm_loss",
            "loss",
            "grad_norm",
            "lr",
            "tokens",
            "tokens_per_second",
            "step_seconds",
            "data_seconds",
            "memory_peak_bytes",
            "moe_aux_loss",
        ];
        assert_eq!(line.as_object().unwrap().len(), keys.len());
        assert!(keys.iter().all(|key| line[key].is_number()));
    }

    #[test]
    fn a_number_that_is_none_is_left_out() {
        let line = StepMetrics { lm_loss: f64::NAN, grad_norm: f64::INFINITY, ..metrics(1) }.json();
        assert_eq!((line.get("lm_loss"), line.get("grad_norm")), (None, None));
        assert_eq!(line["loss"], 5.75);
    }

    #[test]
    fn the_last_line_that_stays_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        assert_eq!(RestOfMetrics::read(&path, 5).unwrap().last_kept(), None);
        std::fs::write(&path, "{\"step\":1}\n{\"step\":2}\n{\"step\":7}\n{\"st").unwrap();
        assert_eq!(RestOfMetrics::read(&path, 5).unwrap().last_kept(), Some(2));
    }

    #[test]
    fn resumed_run_rewrites_what_lies_after_the_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::open(&path, 0).unwrap();
        for step in 1..=3 {
            writer.write(&metrics(step)).unwrap();
        }
        writer.stopped(4, "nan in loss").unwrap();
        writer.file.write_all(b"{\"step\": 2, \"lm").unwrap();
        drop(writer);
        let mut writer = MetricsWriter::open(&path, 2).unwrap();
        writer.write(&metrics(3)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let steps: Vec<u64> =
            text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["step"].as_u64().unwrap()).collect();
        assert_eq!(steps, [1, 2, 3]);
        assert!(!text.contains("stopped"));
    }

    #[test]
    fn unwritable_file_is_named() {
        let failure = MetricsWriter::open(Path::new("/nowhere/metrics.jsonl"), 0).unwrap_err();
        assert!(failure.sentence.starts_with("cannot write /nowhere/metrics.jsonl: "));
        assert_eq!(failure.exit_status(), 4);
    }
}
