//! From text to a model that writes some: tokenizers, conversations and packed documents in whole runs.

use gantry::data::tokenizer::train_bpe;
use gantry::data::{Split, Valid};
use gantry::mesh::Grid;
use gantry::recipe::{Overrides, Recipe};
use gantry::train::team::Team;
use gantry_tests::layouts::{hybrid, spec};
use gantry_tests::plugins::{gantry, providers};
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Output};

const RECIPE: &str = "\
name: chat
modules:
  lm:
    provider: dense-gpt
    config: {num_layers: 2, hidden_size: 32, num_attention_heads: 2, ffn_hidden_size: 64, vocab_size: 384}
data:
  paths: [chats.jsonl]
  valid_paths: [held.jsonl]
  format: chat
  tokenizer: vocabulary
  chat: {template: chatml}
  packing: best_fit
optimizer: {lr: 1.0e-2}
schedule: {kind: constant}
train: {steps: 60, seq_length: 64, micro_batch_size: 2, global_batch_size: 4}
checkpoint: {every: 20}
";

const ANSWERS: [(&str, &str); 3] =
    [("Colour of grass?", "It is green."), ("Colour of the sky?", "Blue, mostly."), ("Colour of coal?", "Black!")];

fn conversation(i: usize) -> Value {
    let turns = (0..1 + i % 2).flat_map(|turn| {
        let (question, answer) = ANSWERS[(i + turn) % 3];
        [json!({"role": "user", "content": question}), json!({"role": "assistant", "content": answer})]
    });
    json!({"messages": turns.collect::<Vec<_>>()})
}

/// A folder with a vocabulary, conversations and the recipe.
fn folder() -> tempfile::TempDir {
    providers(&["dense-gpt"]);
    let folder = tempfile::tempdir().unwrap();
    let words = ANSWERS.iter().flat_map(|(question, answer)| [*question, *answer, *question, *answer]);
    let marks = ["<|im_start|>", "<|im_end|>"].map(String::from);
    train_bpe(words.map(Ok), 330, &marks, |_| ()).unwrap().save(&folder.path().join("vocabulary")).unwrap();
    let lines = |range: std::ops::Range<usize>| range.map(|i| format!("{}\n", conversation(i))).collect::<String>();
    std::fs::write(folder.path().join("chats.jsonl"), lines(0..40)).unwrap();
    std::fs::write(folder.path().join("held.jsonl"), lines(40..44)).unwrap();
    std::fs::write(folder.path().join("r.yaml"), RECIPE).unwrap();
    folder
}

fn run(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(gantry());
    command.current_dir(folder).args(arguments).env("GANTRY_ALLOW_WRITABLE_PLUGINS", "1");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

#[test]
fn a_model_learns_the_assistants_turns_and_answers() {
    let folder = folder();
    let said = run(folder.path(), &["train", "r.yaml"]).stderr;
    let said = String::from_utf8_lossy(&said);
    for words in ["40 documents, ", " learned)", "sequences packed into ", "% of them text"] {
        assert!(said.contains(words), "no {words:?} in {said}");
    }
    let eval = run(folder.path(), &["eval", "r.yaml", "--checkpoint", "runs/chat", "--json"]).stdout;
    let eval: Value = serde_json::from_slice(&eval).unwrap();
    // The answers that are held out, and the token that ends each turn.
    let answers = (40..44).flat_map(|i| (0..1 + i % 2).map(move |turn| ANSWERS[(i + turn) % 3].1));
    let (bytes, turns) = answers.fold((0, 0), |(bytes, turns), answer| (bytes + answer.len(), turns + 1));
    assert_eq!(eval["bytes"], bytes);
    let tokens = eval["tokens"].as_u64().unwrap();
    assert!(tokens > turns && tokens < (bytes as u64) + turns, "{tokens}");
    let (loss, per_byte) = (eval["loss"].as_f64().unwrap(), eval["loss_per_byte"].as_f64().unwrap());
    assert!(loss < 0.3, "{loss}");
    assert!((loss * tokens as f64 - per_byte * bytes as f64).abs() < 1e-9);
    assert!((eval["bits_per_byte"].as_f64().unwrap() - per_byte / std::f64::consts::LN_2).abs() < 1e-12);
    // The checkpoint holds what it needs to write.
    std::fs::remove_dir_all(folder.path().join("vocabulary")).unwrap();
    for (question, answer) in ANSWERS {
        let arguments = ["generate", "--checkpoint", "runs/chat", "--chat", "--temperature", "0", "--prompt", question];
        let output = run(folder.path(), &arguments);
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim_end(), answer);
        assert!(String::from_utf8_lossy(&output.stderr).contains("up to a stop"));
    }
}

#[test]
fn resumed_runs_on_packed_conversations_go_on_bit_by_bit() {
    let folder = folder();
    let train = |to: &str, steps: &str| run(folder.path(), &["train", "r.yaml", "--run-dir", to, "--steps", steps]);
    train("parts", "7");
    train("parts", "13");
    train("whole", "13");
    let losses = |run: &str| -> Vec<Value> {
        let text = std::fs::read_to_string(folder.path().join(run).join("metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.map(|line| json!([line["lm_loss"], line["grad_norm"], line["tokens"]])).collect()
    };
    assert_eq!(losses("parts"), losses("whole"));
    assert_eq!(losses("whole").len(), 13);
}

/// Loss of documents in samples of 24 tokens.
fn loss(team: &Team<f64>, paths: &[&Path], packing: &str) -> (f64, f64, usize) {
    let text = format!(
        "name: t\nmodules: {{lm: {{provider: p}}}}\noptimizer: {{lr: 1}}\n\
         data: {{paths: {}, packing: {packing}}}\ntrain: {{steps: 1, seq_length: 24, global_batch_size: 1}}\n",
        json!(paths)
    );
    let recipe = Recipe::parse(&text, &Overrides::default()).unwrap();
    let valid = Valid::new(Split::open(&recipe).unwrap().train, &recipe).unwrap();
    let batches: Vec<_> = valid.batches(1).map(Result::unwrap).collect();
    let samples = batches.len();
    let sums = team.evaluate(1, batches).unwrap();
    (sums.loss_sum, sums.tokens, samples)
}

/// Packing changes where documents lie, and nothing that a model makes of them: attention, convolutions and states begin
/// anew with each.
#[test]
fn packed_documents_are_as_if_alone() {
    let folder = tempfile::tempdir().unwrap();
    let texts = ["abcdefghijklmno", "pq", "rstuvwx", "yz0123", "456789", "the end", "a", "of it all!"];
    let files: Vec<_> = (0..texts.len()).map(|i| folder.path().join(format!("{i}.txt"))).collect();
    files.iter().zip(texts).for_each(|(file, text)| std::fs::write(file, text).unwrap());
    let mut config = hybrid();
    config["vocab_size"] = 258.into();
    let team = Team::<f64>::start(&spec("nemotron-hybrid", config, Grid::SINGLE)).unwrap();
    let all: Vec<&Path> = files.iter().map(|file| file.as_path()).collect();
    let (packed, tokens, samples) = loss(&team, &all, "best_fit");
    // Of each document all tokens but the first, its end included.
    assert_eq!(tokens as usize, texts.iter().map(|text| text.len()).sum::<usize>());
    assert!(samples < texts.len());
    let alone: f64 = all.iter().map(|path| loss(&team, &[path], "best_fit").0).sum();
    assert!((packed - alone).abs() < 1e-9 * alone, "{packed} {alone}");
    // End to end the first tokens are asked for too.
    assert_ne!(loss(&team, &all, "concat").1, tokens);
}
