//! `gantry eval` and `gantry generate` on what `gantry train` left, and what a run says at its end.

use gantry_tests::plugins::{gantry, providers};
use rstest::rstest;
use serde_json::Value;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

const RECIPE: &str = "\
name: small
modules:
  lm:
    provider: nemotron-hybrid
    config:
      pattern: M*E-
      hidden_size: 32
      vocab_size: 272
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
data: {paths: [text], valid_paths: [held_out], ngram_order: 2}
optimizer: {lr: 1.0e-2}
train:
  steps: 20
  seq_length: 48
  micro_batch_size: 2
  global_batch_size: 4
  eval_every: 8
  eval_samples: 4
  sample: {prompt: 'one ', tokens: 30, temperature: 0.5}
";

/// A folder with a trained run, `runs/small`, and what the training said.
fn trained() -> &'static (tempfile::TempDir, String) {
    static TRAINED: OnceLock<(tempfile::TempDir, String)> = OnceLock::new();
    TRAINED.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("r.yaml"), RECIPE).unwrap();
        for (name, texts) in [("text", 20..60), ("held_out", 0..5)] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
            for i in texts {
                let text: String = (i..i + 30).map(|n| format!("one {n} and one {} caf\u{e9}\n", n + 1)).collect();
                std::fs::write(folder.path().join(name).join(format!("{i}.txt")), text).unwrap();
            }
        }
        let output = run(folder.path(), &["train", "r.yaml"], "");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        (folder, said)
    })
}

fn run(folder: &Path, arguments: &[&str], input: &str) -> Output {
    // The program looks for plugins beside itself.
    providers(&["nemotron-hybrid"]);
    let mut command = Command::new(gantry());
    command.current_dir(folder).args(arguments);
    // Build folders of some systems are writable by a group.
    command.env("GANTRY_ALLOW_WRITABLE_PLUGINS", "1");
    let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = pipes.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// What a command writes to stdout; fails the test if the program does.
fn ask(arguments: &[&str]) -> String {
    ask_with(arguments, "")
}

fn ask_with(arguments: &[&str], input: &str) -> String {
    let output = run(trained().0.path(), arguments, input);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn generate(more: &[&str]) -> String {
    ask(&[&["generate", "--checkpoint", "runs/small", "--tokens", "40"], more].concat())
}

fn eval(more: &[&str]) -> Value {
    let report = ask(&[&["eval", "r.yaml", "--checkpoint", "runs/small", "--json"], more].concat());
    serde_json::from_str(&report).unwrap_or_else(|e| panic!("{e}: {report}"))
}

fn metrics() -> Vec<Value> {
    let text = std::fs::read_to_string(trained().0.path().join("runs/small/metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn run_ends_with_what_it_is_worth_and_where_to_look() {
    let (folder, said) = trained();
    let text = |part: &str| said.find(part).unwrap_or_else(|| panic!("no {part:?} in\n{said}"));
    let places = [
        text("held-out loss "),
        text(" nats per token, "),
        text(" per byte ("),
        text("; an n-gram model of order 2: "),
        text("30 tokens by the model at temperature 0.5 ("),
        text("tokens/s):\none "),
        text("results are in runs/small; what to do with them:"),
        text("generate --checkpoint runs/small --prompt 'The '"),
        text("eval runs/small/recipe.resolved.yaml --checkpoint runs/small"),
    ];
    assert!(places.is_sorted(), "{said}");
    let steps: Vec<u64> =
        metrics().iter().filter(|m| m["valid_loss"].is_f64()).map(|m| m["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [8, 16, 20]);
    // The commands it names work as they stand.
    let shell = |line: &str| {
        let mut command = Command::new("sh");
        command.current_dir(folder.path()).env("GANTRY_ALLOW_WRITABLE_PLUGINS", "1").args(["-c", line]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    };
    for word in ["  write ", "  evaluate "] {
        let line = said.lines().find_map(|line| line.strip_prefix(word)).unwrap();
        shell(line);
    }
}

/// The run's last look at the held-out documents, whatever layout looks again.
#[rstest]
#[case::one(&[], 1e-9)]
#[case::tp2(&["--set", "modules.lm.grid.tp=2"], 1e-5)]
#[case::pp2(&["--set", "modules.lm.grid.pp=2"], 1e-5)]
#[case::dp2(&["--set", "modules.lm.grid.dp=2"], 1e-5)]
#[case::other_batches(&["--set", "train.micro_batch_size=1"], 1e-5)]
fn evaluation_repeats_the_last_one_of_the_run(#[case] more: &[&str], #[case] tolerance: f64) {
    let report = eval(more);
    let last = metrics().pop().unwrap();
    for (key, metric) in
        [("loss", "valid_loss"), ("perplexity", "valid_perplexity"), ("bits_per_byte", "valid_bits_per_byte")]
    {
        let (now, then) = (report[key].as_f64().unwrap(), last[metric].as_f64().unwrap());
        assert!((now - then).abs() <= tolerance * then, "{key}: {now} {then}");
    }
    assert_eq!(report["step"], 20);
    // Every byte of five documents, and their ends.
    let bytes: usize = (0..5)
        .map(|i| std::fs::metadata(trained().0.path().join(format!("held_out/{i}.txt"))).unwrap().len() as usize)
        .sum();
    assert_eq!((report["bytes"].as_u64(), report["tokens"].as_u64()), (Some(bytes as u64), Some(bytes as u64 + 5)));
    let (per_byte, loss) = (report["loss_per_byte"].as_f64().unwrap(), report["loss"].as_f64().unwrap());
    assert!((per_byte - loss * (bytes + 5) as f64 / bytes as f64).abs() < 1e-9);
}

#[test]
fn other_data_gives_another_loss_and_hash() {
    let (held_out, text) = (eval(&[]), eval(&["--data", "text/20.txt"]));
    assert_eq!(text["documents"], 1);
    assert_ne!(text["data_sha256"], held_out["data_sha256"]);
    assert_ne!(text["loss"], held_out["loss"]);
    let again = eval(&["--data", "held_out"]);
    assert_eq!((&again["data_sha256"], &again["loss"]), (&held_out["data_sha256"], &held_out["loss"]));
    let human = ask(&["eval", "r.yaml", "--checkpoint", "runs/small"]);
    assert!(human.contains(&format!("{:.4} nats per token", held_out["loss"].as_f64().unwrap())), "{human}");
}

#[test]
fn same_seed_same_text() {
    let text = generate(&["--prompt", "one ", "--seed", "5"]);
    assert!(text.len() > 1 && text.ends_with('\n'));
    assert_eq!(generate(&["--prompt", "one ", "--seed", "5"]), text);
    assert_ne!(generate(&["--prompt", "one ", "--seed", "6"]), text);
    let newest = "runs/small/checkpoints/step-00000020";
    let named = ask(&["generate", "--checkpoint", newest, "--tokens", "40", "--prompt", "one ", "--seed", "5"]);
    assert_eq!(named, text);
    let piped =
        ask_with(&["generate", "--checkpoint", "runs/small", "--tokens", "40", "--prompt", "-", "--seed", "5"], "one ");
    assert_eq!(piped, text);
}

/// A longer prompt goes on as the text did: the context is the text so far and nothing else.
#[test]
fn likeliest_text_goes_on_from_its_own_beginning() {
    let all = generate(&["--prompt", "one 2", "--temperature", "0"]);
    assert_eq!(generate(&["--prompt", "one 2", "--temperature", "0", "--seed", "9"]), all);
    assert_eq!(generate(&["--prompt", "one 2", "--temperature", "3", "--top-k", "1"]), all);
    assert_eq!(generate(&["--prompt", "one 2", "--temperature", "3", "--top-p", "0"]), all);
    let begin: String = all.chars().take(10).collect();
    let rest = generate(&["--prompt", &format!("one 2{begin}"), "--temperature", "0"]);
    assert!(format!("{begin}{rest}").starts_with(all.trim_end_matches('\n')), "{all:?} {rest:?}");
    // A stop is not shown.
    let stop: String = all.chars().skip(4).take(3).collect();
    let stopped = generate(&["--prompt", "one 2", "--temperature", "0", "--stop", &stop]);
    assert_eq!(stopped, format!("{}\n", all.split(&stop).next().unwrap()));
}

#[test]
fn what_it_did_is_said_on_stderr() {
    let output =
        run(trained().0.path(), &["generate", "--checkpoint", "runs/small", "--tokens", "70", "--prompt", ""], "");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains(" tokens/s)"), "{said}");
    assert!(said.contains("longer than the 48 tokens") || said.contains("end of the document"), "{said}");
}

#[rstest]
#[case(&["generate", "--checkpoint", "nowhere", "--prompt", "a"], 4, "nowhere")]
#[case(&["eval", "r.yaml", "--checkpoint", "runs"], 4, "runs")]
#[case(&["eval", "r.yaml", "--checkpoint", "runs/small", "--set", "modules.lm.config.rotary_base=500"], 4,
       "the model is not the checkpoint's: modules.lm.config.rotary_base (not set, now 500)")]
#[case(&["eval", "r.yaml", "--checkpoint", "runs/small", "--data", "nothing"], 4, "nothing")]
#[case(&["eval", "none.yaml", "--checkpoint", "runs/small"], 2, "none.yaml: the recipe holds no data out")]
#[case(&["generate", "--checkpoint", "runs/small", "--prompt", "a", "--top-p", "2"], 2, "expected a number from 0 to 1")]
fn what_cannot_be_is_refused(#[case] arguments: &[&str], #[case] status: i32, #[case] sentence: &str) {
    let folder = trained().0.path();
    let none = RECIPE
        .replace("valid_paths: [held_out], ngram_order: 2", "valid_paths: []")
        .replace("eval_every: 8", "eval_every: 0");
    std::fs::write(folder.join("none.yaml"), none).unwrap();
    let output = run(folder, arguments, "");
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(status), "{said}");
    assert!(said.starts_with("error: ") && said.contains(sentence), "{said}");
}
