//! The loop over a small engine: a table of token counts, wrong on purpose where a test asks for it.

use super::*;
use crate::checkpoint::{LogicalTensor, TensorData};
use crate::recipe::Overrides;
use std::path::Path;

mod skipping;

/// One weight per token; a step moves the weights of the tokens it sees, so that order, data and learning rate show.
struct Counter {
    weights: Vec<f64>,
    /// What the weights become if the step is taken.
    next: Vec<f64>,
    micro_batches: usize,
    nan_at: Option<u64>,
    /// Sets the flag in this step, as a signal would.
    stop_at: Option<u64>,
    stop: &'static AtomicBool,
}

impl Engine for Counter {
    fn gradients(&mut self, step: u64, batch: &(dyn Fn(usize) -> Batch + Sync), hyper: Hyper) -> Result<StepReport> {
        let mut report = StepReport::default();
        self.next = self.weights.clone();
        for micro_batch in 0..self.micro_batches {
            let batch = batch(micro_batch);
            for (&token, &label) in batch.tokens.iter().zip(&batch.labels) {
                let weight = &mut self.next[token as usize];
                *weight += hyper.lr * (f64::from(label) - *weight * 0.3 - hyper.weight_decay);
                report.loss_sum += *weight;
                report.tokens += 1;
            }
        }
        report.objective = report.loss_sum / report.tokens as f64;
        report.grad_norm = if self.nan_at == Some(step) { f64::NAN } else { 1.0 };
        if self.stop_at == Some(step) {
            self.stop.store(true, Ordering::Relaxed);
        }
        Ok(report)
    }

    fn diagnose(&mut self, step: u64) -> Result<Option<Diagnosis>> {
        Ok(Some(Diagnosis { place: format!("the gradient of decoder.w, step {step}"), value: f64::NAN }))
    }

    /// The number of the update shows too.
    fn update(&mut self, hyper: Hyper) -> Result<()> {
        self.weights.clone_from(&self.next);
        self.weights[256] += hyper.lr * hyper.update as f64;
        Ok(())
    }

    fn save(&mut self, to: &mut Staging) -> Result<Value> {
        let mut data = self.weights.clone();
        if self.nan_at == Some(NAN_IN_WEIGHTS) {
            data[3] = f64::INFINITY;
        }
        let data = TensorData::F64(data);
        to.add_tensor(LogicalTensor { name: "weights".into(), shape: vec![257], data })?;
        Ok(json!({}))
    }

    fn load(&mut self, reader: &mut CheckpointReader) -> Result<()> {
        self.weights = reader.take("weights", &[257])?.data.into_f64();
        Ok(())
    }

    fn load_teacher(&mut self, _: &mut CheckpointReader) -> Result<()> {
        Ok(())
    }

    fn load_weights(&mut self, reader: &mut CheckpointReader) -> Result<()> {
        self.load(reader)
    }

    /// The mean of the weights it sees, so that the parameters show.
    fn evaluate(&mut self, _: u64, batches: Vec<Batch>) -> Result<LossSums> {
        let mut sums = LossSums::default();
        for batch in &batches {
            for (&label, &mask) in batch.labels.iter().zip(&batch.loss_mask) {
                sums.loss_sum += f64::from(mask) * self.weights[label as usize];
                sums.tokens += f64::from(mask);
            }
        }
        if self.nan_at == Some(NAN_IN_EVALUATION) {
            sums.loss_sum = f64::NAN;
        }
        Ok(sums)
    }

    fn logits(&mut self, _: Batch) -> Result<Vec<f64>> {
        Err(Failure::data("nobody asks this engine"))
    }

    fn next_logits(&mut self, _: &[i32]) -> Result<Vec<f64>> {
        Ok(self.weights.clone())
    }

    fn window(&self) -> usize {
        16
    }

    fn vocab(&self) -> Option<usize> {
        Some(self.weights.len())
    }

    fn limit_vocab(&mut self, _: usize) -> Result<()> {
        Ok(())
    }

    fn plugins(&self) -> Vec<PluginEntry> {
        Vec::new()
    }
}

/// Instead of a step: the parameters are broken, and no loss shows it.
const NAN_IN_WEIGHTS: u64 = 0;
/// The same for held-out data.
const NAN_IN_EVALUATION: u64 = u64::MAX;

fn recipe(set: &[&str]) -> Recipe {
    let text = "name: t\nmodules: {lm: {provider: p}}\noptimizer: {lr: 1e-2}\n\
                data: {synthetic: {vocab: 257, document_length: 20, tokens: 2000}}\n\
                train: {steps: 10, seq_length: 16, micro_batch_size: 2, global_batch_size: 4}\n\
                checkpoint: {every: 3}\n";
    let set = set.iter().map(|assignment| assignment.to_string()).collect();
    Recipe::parse(text, &Overrides { environment: Vec::new(), set }).unwrap()
}

fn train(root: &Path, options: Options, nan_at: Option<u64>, stop_at: Option<u64>) -> (Result<Outcome>, Vec<f64>) {
    train_recipe(&recipe(&[]), root, options, nan_at, stop_at)
}

fn train_recipe(
    recipe: &Recipe,
    root: &Path,
    options: Options,
    nan_at: Option<u64>,
    stop_at: Option<u64>,
) -> (Result<Outcome>, Vec<f64>) {
    let stop: &'static AtomicBool = Box::leak(Box::default());
    let folder = RunFolder::open(root).unwrap();
    let start = match start(recipe, &folder, &options, crate::data::tokenizer(recipe).unwrap().as_ref()) {
        Ok(start) => start,
        Err(failure) => return (Err(failure), Vec::new()),
    };
    let mut engine = Counter { weights: vec![0.0; 257], next: Vec::new(), micro_batches: 2, nan_at, stop_at, stop };
    let outcome = run(recipe, &mut engine, &folder, start, &options, &Progress::new(), stop);
    (outcome, engine.weights)
}

/// (step, lm_loss) of every line; what depends on the clock is left out.
fn losses(root: &Path) -> Vec<(u64, f64)> {
    let text = std::fs::read_to_string(root.join("metrics.jsonl")).unwrap();
    let parse = |line: &str| {
        let value: Value = serde_json::from_str(line).unwrap();
        (value["step"].as_u64().unwrap(), value["lm_loss"].as_f64().unwrap_or(f64::NAN))
    };
    text.lines().map(parse).collect()
}

#[test]
fn resumed_run_repeats_an_uninterrupted_one() {
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (outcome, expected) = train(whole.path(), Options::default(), None, None);
    assert_eq!(outcome, Ok(Outcome::Finished));
    // Stopped by the limit, by a signal, and by a NaN that the next run does not meet.
    let limit = Options { last_step: Some(4), ..Default::default() };
    assert_eq!(train(parts.path(), limit, None, None).0, Ok(Outcome::Finished));
    assert_eq!(train(parts.path(), Options::default(), None, Some(5)).0, Ok(Outcome::Stopped));
    assert!(train(parts.path(), Options::default(), Some(8), None).0.is_err());
    let (outcome, weights) = train(parts.path(), Options::default(), None, None);
    assert_eq!(outcome, Ok(Outcome::Finished));
    assert_eq!(weights, expected);
    assert_eq!(losses(parts.path()), losses(whole.path()));
    assert_eq!(losses(whole.path()).len(), 10);
}

#[test]
fn finished_run_has_nothing_to_do() {
    let root = tempfile::tempdir().unwrap();
    let (_, weights) = train(root.path(), Options::default(), None, None);
    let before = losses(root.path());
    assert_eq!(train(root.path(), Options::default(), None, None), (Ok(Outcome::Finished), weights));
    assert_eq!(losses(root.path()), before);
}

#[test]
fn nan_ends_the_run_with_a_last_line_and_no_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let failure = train(root.path(), Options::default(), Some(6), None).0.unwrap_err();
    assert_eq!(failure.sentence, "NaN or infinity in the gradient of decoder.w, step 6");
    assert_eq!(failure.exit_status(), 5);
    let text = std::fs::read_to_string(root.path().join("metrics.jsonl")).unwrap();
    let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(last, json!({"step": 6, "stopped": "nan in the gradient of decoder.w, step 6"}));
    assert_eq!(std::fs::read_to_string(root.path().join("checkpoints/latest")).unwrap(), "step-00000003\n");
}

/// Lines of the metrics.
fn lines(root: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(root.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn broken_parameters_are_never_saved() {
    let root = tempfile::tempdir().unwrap();
    let limit = Options { last_step: Some(4), ..Default::default() };
    assert_eq!(train(root.path(), limit, None, None).0, Ok(Outcome::Finished));
    let failure = train(root.path(), Options::default(), Some(NAN_IN_WEIGHTS), None).0.unwrap_err();
    assert_eq!(failure.sentence, "step 6: NaN or infinity in weights; nothing was saved");
    assert_eq!(failure.exit_status(), 5);
    assert_eq!(std::fs::read_to_string(root.path().join("checkpoints/latest")).unwrap(), "step-00000004\n");
    let text = std::fs::read_to_string(root.path().join("metrics.jsonl")).unwrap();
    assert!(text.lines().last().unwrap().contains("\"stopped\""), "{text}");
}

#[test]
fn checkpoints_come_as_often_as_asked_and_hold_the_recipe() {
    let root = tempfile::tempdir().unwrap();
    train(root.path(), Options::default(), None, None).0.unwrap();
    let store = crate::checkpoint::Store::existing(&root.path().join("checkpoints"));
    assert_eq!(store.complete().unwrap().iter().map(|(step, _)| *step).collect::<Vec<_>>(), [9, 10]);
    let reader = CheckpointReader::open(&store.latest().unwrap().unwrap()).unwrap();
    assert_eq!(reader.index().consumed_samples, 40);
    let saved = reader.index().extra["recipe"].as_str().unwrap();
    assert_eq!(Recipe::parse(saved, &Overrides::default()).unwrap().resolved_yaml(), saved);
}

#[test]
fn another_run_continues_from_a_named_checkpoint() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (_, expected) = train(first.path(), Options::default(), None, None);
    for path in ["checkpoints/step-00000009", "checkpoints", ""] {
        let options = Options { resume: Resume::Path(first.path().join(path)), last_step: None, profile: false };
        let (outcome, weights) = train(second.path(), options, None, None);
        assert_eq!((outcome, &weights), (Ok(Outcome::Finished), &expected), "{path}");
    }
}

#[test]
fn a_module_begins_from_the_parameters_it_loads() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (_, weights) = train(first.path(), Options::default(), None, None);
    let load = format!("modules.lm.load={}", first.path().join("checkpoints/step-00000010").display());
    let recipe = recipe(&[&load, "optimizer.lr=0", "optimizer.min_lr=0"]);
    // A learning rate of 0 keeps them; the steps are counted from 1 again.
    let (outcome, kept) = train_recipe(&recipe, second.path(), Options::default(), None, None);
    assert_eq!((outcome, kept), (Ok(Outcome::Finished), weights));
    assert_eq!(losses(second.path())[0].0, 1);
}

#[test]
fn model_with_too_few_tokens_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let recipe = recipe(&["data.synthetic.vocab=300"]);
    let failure = train_recipe(&recipe, root.path(), Options::default(), None, None).0.unwrap_err();
    assert_eq!(failure.sentence, "the model's vocabulary has 257 tokens, the data has 300");
    assert_eq!(failure.exit_status(), 2);
}

fn resume(path: &Path) -> Options {
    Options { resume: Resume::Path(path.into()), ..Default::default() }
}

fn steps(root: &Path, metrics: &str) -> Vec<u64> {
    let text = std::fs::read_to_string(root.join(metrics)).unwrap();
    let step = |line: &str| serde_json::from_str::<Value>(line).unwrap()["step"].as_u64().unwrap();
    text.lines().map(step).collect()
}

fn checkpoints(root: &Path, folder: &str) -> Vec<u64> {
    let store = crate::checkpoint::Store::existing(&root.join(folder));
    store.complete().unwrap().into_iter().map(|(step, _)| step).collect()
}

/// All files below a folder with their contents, but for the lock.
fn contents(root: &Path) -> Vec<(std::path::PathBuf, Vec<u8>)> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(root).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(contents(&path));
        } else if !path.ends_with("lock") {
            files.push((path.clone(), std::fs::read(&path).unwrap()));
        }
    }
    files.sort();
    files
}

#[test]
fn rewound_run_keeps_the_other_branch_aside_and_is_followed() {
    let root = tempfile::tempdir().unwrap();
    train(root.path(), Options::default(), None, None).0.unwrap();
    let before = losses(root.path());
    // Rewound from 10 to 9, and broken before it saves anything: the stopped line belongs to the new branch.
    let nine = root.path().join("checkpoints/step-00000009");
    assert!(train(root.path(), resume(&nine), Some(10), None).0.is_err());
    assert_eq!(checkpoints(root.path(), "checkpoints"), [9]);
    assert_eq!(checkpoints(root.path(), "checkpoints.1"), [10]);
    assert_eq!(steps(root.path(), "metrics.jsonl.1"), [10]);
    assert!(root.path().join("recipe.resolved.yaml.1").is_file());
    // A plain start goes on from the new branch, without a gap and without the stopped line.
    let recipe = recipe(&["optimizer.min_lr=5e-3"]);
    train_recipe(&recipe, root.path(), Options::default(), None, None).0.unwrap();
    let after = losses(root.path());
    assert_eq!(after.iter().map(|line| line.0).collect::<Vec<_>>(), (1..=10).collect::<Vec<_>>());
    assert_eq!(after[..9], before[..9]);
    assert!(after[9].1.is_finite());
    assert_eq!(checkpoints(root.path(), "checkpoints"), [9, 10]);
    assert!(!root.path().join("metrics.jsonl.2").exists());
}

#[test]
fn rewinding_that_was_killed_half_way_is_completed_by_the_next_start() {
    let root = tempfile::tempdir().unwrap();
    train(root.path(), Options::default(), None, None).0.unwrap();
    std::fs::write(root.path().join("checkpoints/latest"), "step-00000009\n").unwrap();
    assert!(train(root.path(), Options::default(), Some(10), None).0.is_err());
    assert_eq!(checkpoints(root.path(), "checkpoints.1"), [10]);
    assert_eq!(steps(root.path(), "metrics.jsonl.1"), [10]);
}

#[test]
fn results_of_another_run_are_moved_aside_before_a_named_checkpoint_takes_the_folder() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    train(first.path(), Options::default(), None, None).0.unwrap();
    train_recipe(&recipe(&["train.seed=9"]), second.path(), Options::default(), None, None).0.unwrap();
    let text = |name: &str| std::fs::read(second.path().join(name)).unwrap();
    let (metrics, shard) = (text("metrics.jsonl"), text("checkpoints/step-00000010/shard-00000.safetensors"));
    let nine = first.path().join("checkpoints/step-00000009");
    train(second.path(), resume(&nine), None, None).0.unwrap();
    assert_eq!(text("metrics.jsonl.1"), metrics);
    assert_eq!(text("checkpoints.1/step-00000010/shard-00000.safetensors"), shard);
    assert!(String::from_utf8(text("recipe.resolved.yaml.1")).unwrap().contains("seed: 9"));
    assert_eq!(steps(second.path(), "metrics.jsonl"), [10]);
    assert_eq!(checkpoints(second.path(), "checkpoints"), [10]);
}

#[test]
fn start_that_fails_changes_nothing() {
    let root = tempfile::tempdir().unwrap();
    train(root.path(), Options::default(), None, None).0.unwrap();
    let before = contents(root.path());
    let nine = root.path().join("checkpoints/step-00000009");
    let none = || Options { resume: Resume::None, ..Default::default() };
    let missing = format!("modules.lm.load={}", root.path().join("nothing").display());
    for (set, options) in [
        ("data.synthetic.vocab=300", none()),
        ("data.synthetic.vocab=300", resume(&nine)),
        ("data.synthetic.vocab=300", Options::default()),
        (missing.as_str(), none()),
    ] {
        assert!(train_recipe(&recipe(&[set]), root.path(), options, None, None).0.is_err(), "{set}");
        assert_eq!(contents(root.path()), before, "{set}");
    }
    train(root.path(), none(), None, None).0.unwrap();
    assert_eq!(checkpoints(root.path(), "checkpoints.1"), [9, 10]);
    assert_eq!(steps(root.path(), "metrics.jsonl"), (1..=10).collect::<Vec<_>>());
}

#[test]
fn another_model_does_not_go_on_from_a_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    train(root.path(), Options::default(), None, None).0.unwrap();
    let before = contents(root.path());
    let other = recipe(&["modules.lm.config.rotary_base=500", "train.steps=12"]);
    let failure = train_recipe(&other, root.path(), Options::default(), None, None).0.unwrap_err();
    let change = "the model is not the checkpoint's: modules.lm.config.rotary_base (not set, now 500)";
    assert!(failure.sentence.ends_with(change), "{failure}");
    assert_eq!(failure.exit_status(), 4);
    assert_eq!(contents(root.path()), before);
    // What is no part of the model may change.
    let other = recipe(&["train.seed=3", "train.steps=12"]);
    assert_eq!(train_recipe(&other, root.path(), Options::default(), None, None).0, Ok(Outcome::Finished));
    assert_eq!(losses(root.path()).len(), 12);
}

/// The held-out loss of every step that has one.
fn held_out_losses(root: &Path) -> Vec<(u64, f64)> {
    let text = std::fs::read_to_string(root.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter_map(|line| Some((line["step"].as_u64()?, line["valid_loss"].as_f64()?))).collect()
}

#[test]
fn held_out_data_is_looked_at_when_asked_and_after_the_last_step() {
    let roots = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let held = "data.valid_fraction=0.2";
    let (outcome, weights) = train_recipe(&recipe(&[held]), roots[0].path(), Options::default(), None, None);
    assert_eq!(outcome, Ok(Outcome::Finished));
    let often = recipe(&[held, "train.eval_every=4"]);
    let (_, same) = train_recipe(&often, roots[1].path(), Options::default(), None, None);
    assert_eq!(same, weights);
    assert_eq!(losses(roots[1].path()), losses(roots[0].path()));
    let last = held_out_losses(roots[0].path());
    let all = held_out_losses(roots[1].path());
    assert_eq!(all.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [4, 8, 10]);
    assert_eq!(all[2..], last);
    // A pass over part of the samples sees other tokens, except after the last step.
    let some = recipe(&[held, "train.eval_every=4", "train.eval_samples=3"]);
    train_recipe(&some, roots[2].path(), Options::default(), None, None).0.unwrap();
    let part = held_out_losses(roots[2].path());
    assert!(part[0].1 != all[0].1 && part[1].1 != all[1].1);
    assert_eq!(part[2], all[2]);
}

#[test]
fn held_out_loss_is_the_mean_over_all_held_out_tokens() {
    let root = tempfile::tempdir().unwrap();
    let recipe = recipe(&["data.valid_fraction=0.2"]);
    let (_, weights) = train_recipe(&recipe, root.path(), Options::default(), None, None);
    let corpus = crate::data::Split::open(&recipe).unwrap().valid.unwrap();
    let mut tokens = vec![0; corpus.len()];
    corpus.read(0, &mut tokens);
    let mean = tokens.iter().map(|&token| weights[token as usize]).sum::<f64>() / tokens.len() as f64;
    let loss = held_out_losses(root.path())[0].1;
    assert!((loss - mean).abs() < 1e-12 * mean.abs(), "{loss} {mean}");
    let text = std::fs::read_to_string(root.path().join("metrics.jsonl")).unwrap();
    let line: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    let perplexity = line["valid_perplexity"].as_f64().unwrap();
    assert!((perplexity - loss.exp()).abs() < 1e-12 * perplexity, "{perplexity} {loss}");
    // Made-up tokens stand for no bytes.
    assert!(line.get("valid_bits_per_byte").is_none());
}

#[test]
fn held_out_loss_that_is_no_number_ends_the_run() {
    let root = tempfile::tempdir().unwrap();
    let recipe = recipe(&["data.valid_fraction=0.2", "train.eval_every=2"]);
    let failure = train_recipe(&recipe, root.path(), Options::default(), Some(NAN_IN_EVALUATION), None).0.unwrap_err();
    assert_eq!(failure.sentence, "step 2: NaN or infinity in the held-out loss");
    assert_eq!(failure.exit_status(), 5);
    assert_eq!(steps(root.path(), "metrics.jsonl"), [1, 2]);
}

#[test]
fn stopped_run_does_not_wait_for_held_out_data() {
    let root = tempfile::tempdir().unwrap();
    let recipe = recipe(&["data.valid_fraction=0.2", "train.eval_every=2"]);
    let outcome = train_recipe(&recipe, root.path(), Options::default(), None, Some(4)).0;
    assert_eq!(outcome, Ok(Outcome::Stopped));
    assert_eq!(held_out_losses(root.path()).iter().map(|(step, _)| *step).collect::<Vec<_>>(), [2]);
}

#[test]
fn a_save_that_cannot_be_written_ends_the_run_and_leaves_the_one_before() {
    for beside in ["true", "false"] {
        let root = tempfile::tempdir().unwrap();
        let beside = format!("checkpoint.async={beside}");
        let recipe = recipe(&[&beside]);
        let limit = Options { last_step: Some(4), ..Default::default() };
        train_recipe(&recipe, root.path(), limit, None, None).0.unwrap();
        // What the save of step 6 wants to write is in the way.
        let folder = RunFolder::open(root.path()).unwrap();
        let blocker = root.path().join("checkpoints/.new-step-00000006");
        let start =
            start(&recipe, &folder, &Options::default(), crate::data::tokenizer(&recipe).unwrap().as_ref()).unwrap();
        std::fs::write(&blocker, "a file").unwrap();
        let stop: &'static AtomicBool = Box::leak(Box::default());
        let mut engine =
            Counter { weights: vec![0.0; 257], next: Vec::new(), micro_batches: 2, nan_at: None, stop_at: None, stop };
        let progress = Progress::new();
        let failure = run(&recipe, &mut engine, &folder, start, &Options::default(), &progress, stop).unwrap_err();
        assert!(failure.sentence.starts_with(&format!("step 6: cannot write {}", blocker.display())), "{failure}");
        assert_eq!(failure.exit_status(), 4);
        assert!(failure.details[0].ends_with("checkpoints/step-00000004"), "{failure}");
        assert_eq!(std::fs::read_to_string(root.path().join("checkpoints/latest")).unwrap(), "step-00000004\n");
        drop(folder);
        // The next start cleans up and goes on.
        assert_eq!(train_recipe(&recipe, root.path(), Options::default(), None, None).0, Ok(Outcome::Finished));
    }
}

#[test]
fn the_checkpoint_with_the_lowest_held_out_loss_is_kept() {
    let root = tempfile::tempdir().unwrap();
    let set = ["data.valid_fraction=0.2", "train.eval_every=1", "checkpoint.every=1", "checkpoint.keep_best=true"];
    // Weights grow with every step, and the held-out loss is a mean of weights: the first is the best.
    let recipe = recipe(&[&set[..], &["checkpoint.keep_last=1"]].concat());
    train_recipe(&recipe, root.path(), Options::default(), None, None).0.unwrap();
    let losses = held_out_losses(root.path());
    let best = losses.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    assert!(best.0 < 10, "the last step is the best: {losses:?}");
    let store = crate::checkpoint::Store::existing(&root.path().join("checkpoints"));
    let path = store.best().unwrap().unwrap();
    assert_eq!(path, store.path_of(best.0));
    assert_eq!(CheckpointReader::open(&path).unwrap().index().valid_loss, Some(best.1));
    assert_eq!(checkpoints(root.path(), "checkpoints"), [best.0, 10]);
    // Going on from it is going back: it stays the best.
    let named = resume(&root.path().join("checkpoints/best"));
    train_recipe(&recipe, root.path(), Options { last_step: Some(best.0), ..named }, None, None).0.unwrap();
    assert_eq!(store.best().unwrap(), Some(path));
    assert_eq!(checkpoints(root.path(), "checkpoints"), [best.0]);
}
