//! Whole runs of the program in a folder of their own.

use crate::plugins::{gantry, providers};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A hybrid model of every kind of layer, small enough for some hundred steps a second.
pub const RECIPE: &str = "\
name: small
modules:
  lm:
    provider: nemotron-hybrid
    config:
      pattern: M*E-
      hidden_size: 32
      vocab_size: 64
      num_attention_heads: 4
      num_query_groups: 2
      kv_channels: 8
      ffn_hidden_size: 64
      mamba_num_heads: 4
      mamba_head_dim: 8
      mamba_num_groups: 2
      mamba_state_dim: 8
      mamba_chunk_size: 16
      num_moe_experts: 4
      moe_ffn_hidden_size: 16
      moe_router_enable_expert_bias: true
      moe_aux_loss_coeff: 1.0e-3
data: {synthetic: {vocab: 64, document_length: 40, tokens: 20000}}
optimizer: {lr: 1.0e-2}
schedule: {warmup_steps: 3}
train: {steps: 5000, seq_length: 48, micro_batch_size: 1, global_batch_size: 4}
checkpoint: {every: 6}
";

/// A folder with the recipe `r.yaml` and the runs made from it.
pub struct Runs {
    folder: tempfile::TempDir,
}

impl Default for Runs {
    fn default() -> Runs {
        Runs::new()
    }
}

impl Runs {
    /// With [`RECIPE`].
    pub fn new() -> Runs {
        Runs::of(RECIPE)
    }

    /// With a recipe of one's own.
    pub fn of(recipe: &str) -> Runs {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("r.yaml"), recipe).unwrap();
        Runs { folder }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Checkpoints of a run.
    pub fn checkpoints(&self, run: &str) -> PathBuf {
        self.path().join(run).join("checkpoints")
    }

    /// The program with arguments, in the folder.
    pub fn command(&self, arguments: &[&str]) -> Command {
        // The program looks for plugins beside itself.
        providers(&["nemotron-hybrid"]);
        let mut command = Command::new(gantry());
        command.current_dir(self.folder.path()).args(arguments);
        // Build folders of some systems are writable by a group.
        command.env("GANTRY_ALLOW_WRITABLE_PLUGINS", "1");
        command
    }

    /// Runs the program to its end.
    pub fn gantry(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Trains into `run` up to `steps`; fails the test if the program does.
    pub fn train(&self, run: &str, steps: &str, more: &[&str]) {
        let output = self.gantry(&[&["train", "r.yaml", "--run-dir", run, "--steps", steps], more].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// Starts training and waits until `lines` steps are in the metrics.
    pub fn train_until(&self, run: &str, lines: usize) -> Child {
        let mut child = self.command(&["train", "r.yaml", "--run-dir", run]).stderr(Stdio::null()).spawn().unwrap();
        let began = Instant::now();
        while self.metrics(run).len() < lines {
            assert!(child.try_wait().unwrap().is_none(), "the run ended before step {lines}");
            assert!(began.elapsed() < Duration::from_secs(120), "no step {lines} after two minutes");
            std::thread::sleep(Duration::from_millis(5));
        }
        child
    }

    /// Whole lines of the metrics, without what depends on the clock and the machine.
    pub fn metrics(&self, run: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.folder.path().join(run).join("metrics.jsonl")).unwrap_or_default();
        let mut lines: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        for line in lines.iter_mut().filter_map(Value::as_object_mut) {
            let clock = ["step_seconds", "data_seconds", "tokens_per_second", "memory_peak_bytes"];
            clock.iter().for_each(|key| drop(line.remove(*key)));
        }
        lines
    }

    /// Hashes of the shards of a step's checkpoint, as its index states them.
    pub fn hashes(&self, run: &str, step: u64) -> Value {
        let path = self.checkpoints(run).join(format!("step-{step:08}/index.json"));
        let index: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        assert!(index["tensors"].as_array().unwrap().len() > 20);
        index["files"].clone()
    }

    /// The name of a run's newest checkpoint.
    pub fn latest(&self, run: &str) -> String {
        std::fs::read_to_string(self.checkpoints(run).join("latest")).unwrap().trim().into()
    }
}

/// Sends a signal by its name, e.g. `-TERM`.
pub fn signal(child: &Child, name: &str) {
    let status = Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}
