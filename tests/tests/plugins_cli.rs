//! The program from outside with plugins that misbehave: exit status 3, one clear line first, no backtrace.

use gantry_tests::plugins::{fixture, gantry};
use rstest::rstest;
use std::path::Path;
use std::process::{Command, Output};

fn recipe(folder: &Path, plugin: &str, provider: &str, config: &str) {
    let plugin = fixture(plugin);
    let text = format!(
        "name: t\nplugins: [{}]\nmodules:\n  lm: {{provider: {provider}, config: {config}}}\n\
         data: {{synthetic: {{vocab: 257, document_length: 64, tokens: 10000}}}}\noptimizer: {{lr: 1e-3}}\n\
         train: {{steps: 2, seq_length: 16, global_batch_size: 2}}\n",
        plugin.display()
    );
    std::fs::write(folder.join("r.yaml"), text).unwrap();
}

fn run(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(gantry());
    command.current_dir(folder).args(arguments);
    // Build folders of some systems are writable by a group.
    command.env("GANTRY_ALLOW_WRITABLE_PLUGINS", "1").env("RUST_BACKTRACE", "0").output().unwrap()
}

fn expect(output: &Output, status: i32, sentence: &str) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{stderr}");
    let first = stderr.lines().find(|l| l.starts_with("error: ")).unwrap_or_else(|| panic!("{stderr}"));
    assert!(first.contains(sentence), "{stderr}");
    assert!(!stderr.contains("stack backtrace") && !stderr.contains("thread '"), "{stderr}");
}

#[rstest]
#[case("create_panic", 3, "misbehave: panicked in create: asked to panic in create (")]
#[case("create_error", 2, "misbehave: asked to refuse")]
#[case("plan_panic", 3, "misbehave: panicked in plan: asked to panic in plan (")]
#[case("build_panic", 3, "misbehave: panicked in build: asked to panic in build (")]
#[case("forward_panic", 3, "misbehave: panicked in forward: asked to panic in forward, round 0 (")]
#[case("forward_panic_bomb", 3, "misbehave: panicked in forward: a value that is not text (")]
#[case("wrong_shape", 3, "features of x and columns of the weight: hidden 8 does not fit ffn 16")]
#[case("unknown_operator", 3, "this host has no operator number 999999")]
#[case("kept_tensor", 3, "belongs to another recording")]
#[case("other_thread", 3, "a host function was called from another thread")]
#[case("impure", 3, "misbehave: forward is not pure")]
#[case("nan_init", 3, "misbehave: parameter embedding.weight: init: std is NaN")]
#[case("nonsense", 2, "r.yaml:4:38: `modules.lm.config.how`: unknown variant `nonsense`")]
fn training_with_it_ends_with_status_and_sentence(#[case] how: &str, #[case] status: i32, #[case] sentence: &str) {
    let folder = tempfile::tempdir().unwrap();
    recipe(folder.path(), "misbehave", "misbehave", &format!("{{how: {how}}}"));
    expect(&run(folder.path(), &["train", "r.yaml"]), status, sentence);
    if how == "plan_panic" {
        expect(&run(folder.path(), &["plan", "r.yaml"]), status, sentence);
    }
}

#[rstest]
#[case("behave")]
#[case("module_drop_panic")]
#[case("straggling_thread")]
fn what_is_only_untidy_trains(#[case] how: &str) {
    let folder = tempfile::tempdir().unwrap();
    recipe(folder.path(), "misbehave", "misbehave", &format!("{{how: {how}}}"));
    let output = run(folder.path(), &["train", "r.yaml"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert_eq!(stderr.contains("asked to panic in drop"), how == "module_drop_panic", "{stderr}");
    let metrics = std::fs::read_to_string(folder.path().join("runs/t/metrics.jsonl")).unwrap();
    assert_eq!(metrics.lines().count(), 2);
}

#[rstest]
#[case("not-a-plugin", "is a library but not a Gantry plugin")]
#[case("wrong-layout", "disagrees with this host about the layout of the boundary")]
fn a_file_that_is_no_plugin_ends_training_and_inspection(#[case] plugin: &str, #[case] sentence: &str) {
    let folder = tempfile::tempdir().unwrap();
    recipe(folder.path(), plugin, "anything", "{}");
    expect(&run(folder.path(), &["train", "r.yaml"]), 3, sentence);
    expect(&run(folder.path(), &["inspect", fixture(plugin).to_str().unwrap()]), 3, sentence);
}

#[test]
fn a_panic_while_describing_is_reported_by_inspection() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(gantry());
    command.current_dir(folder.path()).arg("inspect").arg(fixture("misbehave"));
    command.env("GANTRY_ALLOW_WRITABLE_PLUGINS", "1").env("RUST_BACKTRACE", "0");
    let output = command.env("GANTRY_TEST_DESCRIBE_PANIC", "1").output().unwrap();
    expect(&output, 3, "misbehave: panicked in describe: asked to panic in describe (");
}

#[test]
fn a_plugin_brings_its_operator_into_a_run() {
    let folder = tempfile::tempdir().unwrap();
    recipe(folder.path(), "elastic-test", "tiny", "{layers: 2, vocab: 272, softcap: 0.8}");
    let output = run(folder.path(), &["train", "r.yaml"]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    recipe(folder.path(), "elastic-test", "tiny", "{layers: 2, vocab: 272, softcap: -1.0}");
    let output = run(folder.path(), &["train", "r.yaml", "--resume", "none", "--run-dir", "other"]);
    expect(&output, 3, "elastic-test.softcap: cap must be positive");
}

/// Hooks see every step, and what they keep outlives the process.
#[test]
fn hooks_run_beside_the_model_and_resume() {
    let folder = tempfile::tempdir().unwrap();
    recipe(folder.path(), "elastic-test", "tiny", "{layers: 2, vocab: 257}");
    let path = folder.path().join("r.yaml");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("data:", "  watch: {provider: counting, config: {}}\ndata:")).unwrap();
    let steps = |n: &str| {
        let output = run(folder.path(), &["train", "r.yaml", "--steps", n, "--run-dir", "run"]);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let index = folder.path().join(format!("run/checkpoints/step-0000000{n}/index.json"));
        let index: serde_json::Value = serde_json::from_slice(&std::fs::read(index).unwrap()).unwrap();
        let watch = &index["extra"]["hooks"]["watch"];
        let events = watch["events"].as_array().unwrap().iter().map(|event| event.as_str().unwrap().to_string());
        (watch["steps"].as_u64().unwrap(), events.collect::<Vec<_>>())
    };
    let (count, events) = steps("2");
    assert_eq!((count, events.join(", ").as_str()), (2, "gradients 1, gradients 2"));
    let (count, events) = steps("5");
    assert_eq!(
        (count, events.join(", ").as_str()),
        (5, "gradients 3, gradients 4, gradients 5"),
        "the count of the first two steps came back from the checkpoint"
    );
    let log = std::fs::read_to_string(folder.path().join("run/log.jsonl")).unwrap();
    assert!(log.contains("step 4 seen"), "{log}");
}

/// Hooks hear of a step that is not applied before the run stops, and of held-out data.
#[test]
fn hooks_hear_of_refused_steps_and_of_evaluations() {
    let folder = tempfile::tempdir().unwrap();
    recipe(folder.path(), "elastic-test", "tiny", "{layers: 2, vocab: 257}");
    let path = folder.path().join("r.yaml");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("data:", "  watch: {provider: counting, config: {}}\ndata:")).unwrap();
    let broken = ["--set", "optimizer.lr=1.0e+30", "--steps", "9", "--run-dir", "a"];
    let output = run(folder.path(), &[&["train", "r.yaml"], &broken[..]].concat());
    assert_eq!(output.status.code(), Some(5), "{}", String::from_utf8_lossy(&output.stderr));
    let log = std::fs::read_to_string(folder.path().join("a/log.jsonl")).unwrap();
    assert!(log.contains("refused, goes on: false"), "{log}");

    let held = ["--set", "data.valid_fraction=0.2", "--set", "train.eval_every=1", "--steps", "1", "--run-dir", "b"];
    let output = run(folder.path(), &[&["train", "r.yaml"], &held[..]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let index = folder.path().join("b/checkpoints/step-00000001/index.json");
    let index: serde_json::Value = serde_json::from_slice(&std::fs::read(index).unwrap()).unwrap();
    assert_eq!(index["extra"]["hooks"]["watch"]["events"], serde_json::json!(["gradients 1", "evaluation 1"]));
}
