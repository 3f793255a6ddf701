//! `gantry data`, and training from what it makes: files byte for byte as Megatron-LM writes them, runs that go on in the
//! order of their samples, on any layout.

use gantry::data::megatron::IndexedDataset;
use gantry_tests::plugins::{gantry, providers, root};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn run(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(gantry())
        .current_dir(folder)
        .args(arguments)
        .env("GANTRY_ALLOW_WRITABLE_PLUGINS", "1")
        .env("NO_COLOR", "1")
        .output()
        .unwrap()
}

fn done(folder: &Path, arguments: &[&str]) -> String {
    let output = run(folder, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn refused(folder: &Path, arguments: &[&str], status: i32) -> String {
    let output = run(folder, arguments);
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stderr).unwrap()
}

fn golden(name: &str) -> PathBuf {
    root().join("tests/goldens/data_a").join(name)
}

/// The documents that Megatron-LM wrote, as lines of ids, become the bytes that it wrote.
#[test]
fn writes_the_bytes_that_megatron_wrote() {
    let folder = tempfile::tempdir().unwrap();
    for (name, dtype) in [("corpus_u16", "uint16"), ("corpus_i32", "int32")] {
        let set = IndexedDataset::open(golden(name)).unwrap();
        let mut lines = String::new();
        for document in 0..set.index().documents() {
            let sequences: Vec<_> = set.index().document(document).map(|s| set.sequence(s).unwrap()).collect();
            // A document of one sequence may be a plain list.
            let line = match sequences.as_slice() {
                [one] if document % 2 == 0 => serde_json::to_string(one),
                all => serde_json::to_string(&serde_json::json!({ "text": all })),
            };
            lines += &(line.unwrap() + "\n");
        }
        std::fs::write(folder.path().join("ids.jsonl"), lines).unwrap();
        for workers in ["1", "3"] {
            let out = format!("{name}-{workers}");
            let arguments = ["data", "build", "--tokenized", "ids.jsonl", "--dtype", dtype, "--workers", workers];
            done(folder.path(), &[arguments.as_slice(), &["--out", &out]].concat());
            for ending in ["bin", "idx"] {
                let ours = std::fs::read(folder.path().join(format!("{out}.{ending}"))).unwrap();
                assert!(ours == std::fs::read(golden(&format!("{name}.{ending}"))).unwrap(), "{out}.{ending}");
            }
        }
        done(folder.path(), &["data", "verify", &format!("{name}-1")]);
    }
}

const RECIPE: &str = "\
name: small
modules:
  lm:
    provider: dense-gpt
    config: {num_layers: 2, hidden_size: 16, num_attention_heads: 2, ffn_hidden_size: 32, vocab_size: 384}
data:
  megatron: {data_path: [0.7, sets/a, 0.3, sets/b], split: '8,2', data_cache_path: cache}
train: {steps: 12, seq_length: 24, micro_batch_size: 1, global_batch_size: 4, eval_every: 4, eval_samples: 3}
optimizer: {lr: 1.0e-2}
schedule: {kind: constant}
checkpoint: {every: 4}
log: {level: warn, tensorboard: false}
";

/// A folder with two data sets and a recipe.
fn prepared() -> tempfile::TempDir {
    providers(&["dense-gpt"]);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("r.yaml"), RECIPE).unwrap();
    for (name, texts) in [("a", 0..40), ("b", 40..60)] {
        let path = folder.path().join(format!("{name}.jsonl"));
        let lines: String = texts.map(|i| format!("{{\"text\": \"{i} {}\"}}\n", "ab ".repeat(i % 17))).collect();
        std::fs::write(&path, lines).unwrap();
        let out = format!("sets/{name}");
        let input = format!("{name}.jsonl");
        done(folder.path(), &["data", "build", &input, "--out", &out, "--tokenizer", "bytes", "--append-eod"]);
    }
    folder
}

fn losses(folder: &Path, run: &str) -> Vec<(f64, Option<f64>)> {
    let text = std::fs::read_to_string(folder.join(run).join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.map(|line| (line["lm_loss"].as_f64().unwrap(), line["valid_loss"].as_f64())).collect()
}

#[test]
fn runs_go_on_in_the_order_of_their_samples_on_any_layout() {
    let folder = prepared();
    let here = folder.path();
    done(here, &["train", "r.yaml", "--run-dir", "whole"]);
    let whole = losses(here, "whole");
    assert_eq!(whole.len(), 12);
    assert_eq!(whole.iter().filter(|(_, valid)| valid.is_some()).count(), 3);
    assert!(whole[11].0 < 0.8 * whole[0].0, "{whole:?}");
    // In two parts, on an index that lies in the folder already.
    done(here, &["train", "r.yaml", "--run-dir", "parts", "--steps", "5"]);
    done(here, &["train", "r.yaml", "--run-dir", "parts"]);
    let parts = losses(here, "parts");
    assert_eq!(
        parts.iter().map(|line| line.0).collect::<Vec<_>>(),
        whole.iter().map(|line| line.0).collect::<Vec<_>>()
    );
    for more in [&["modules.lm.grid.dp=2"][..], &["modules.lm.grid.tp=2"], &["modules.lm.grid.pp=2"]] {
        let name = more[0].replace('=', "-");
        let set: Vec<&str> = more.iter().flat_map(|set| ["--set", *set]).collect();
        done(here, &[&["train", "r.yaml", "--run-dir", &name], set.as_slice(), &["--ranks", "2"]].concat());
        for ((ours, valid), (one, one_valid)) in losses(here, &name).iter().zip(&whole) {
            assert!((ours - one).abs() < 1e-4, "{more:?}: {ours} {one}");
            assert!((valid.unwrap_or(0.0) - one_valid.unwrap_or(0.0)).abs() < 1e-4);
        }
    }
    let report: Value =
        serde_json::from_str(&done(here, &["eval", "r.yaml", "--checkpoint", "whole", "--json"])).unwrap();
    assert!(report["loss"].as_f64().unwrap().is_finite() && report["tokens"].as_u64().unwrap().is_multiple_of(24));
    assert!(done(here, &["plan", "r.yaml"]).contains("parameters"));
}

#[test]
fn another_number_of_samples_is_the_same_order_or_refused() {
    let folder = prepared();
    let here = folder.path();
    done(here, &["train", "r.yaml", "--run-dir", "run", "--steps", "4"]);
    // Ten times the steps need more epochs, which are shuffled together.
    let said = refused(here, &["train", "r.yaml", "--run-dir", "run", "--set", "train.steps=120"], 4);
    assert!(said.contains("the order of its samples was made for 48 samples, and that for 480 is another"), "{said}");
    assert!(said.contains("set data.megatron.train_samples to 48"), "{said}");
    // Fewer steps keep the order if it is stated for how many samples it is.
    let set = ["--set", "train.steps=6", "--set", "data.megatron.train_samples=48"];
    done(here, &[&["train", "r.yaml", "--run-dir", "run"], set.as_slice()].concat());
    done(here, &["train", "r.yaml", "--run-dir", "other", "--steps", "6"]);
    let plain = |name| losses(here, name).iter().map(|line| line.0).collect::<Vec<_>>();
    assert_eq!(plain("run"), plain("other"));
}

/// Processes that start together build one index, and each its own run.
#[test]
fn processes_share_an_index() {
    let folder = prepared();
    let started: Vec<_> = (0..4)
        .map(|i| {
            let name = format!("run{i}");
            Command::new(gantry())
                .current_dir(folder.path())
                .args(["train", "r.yaml", "--run-dir", &name, "--steps", "2"])
                .env("GANTRY_ALLOW_WRITABLE_PLUGINS", "1")
                .spawn()
                .unwrap()
        })
        .collect();
    for mut child in started {
        assert!(child.wait().unwrap().success());
    }
    let first = losses(folder.path(), "run0");
    assert!((1..4).all(|i| losses(folder.path(), &format!("run{i}")) == first));
    let mut left: Vec<_> = std::fs::read_dir(folder.path().join("cache")).unwrap().map(|e| e.unwrap().path()).collect();
    left.sort();
    assert!(left.len() == 6 && left.iter().all(|file| file.extension().unwrap() == "index"), "{left:?}");
    // Damage is seen and repaired, and changes no number.
    let mut bytes = std::fs::read(&left[0]).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&left[0], bytes).unwrap();
    let said = run(folder.path(), &["train", "r.yaml", "--run-dir", "again", "--steps", "2"]);
    let said = String::from_utf8(said.stderr).unwrap();
    assert!(said.contains("is damaged (the checksum of a table is wrong); it is built anew"), "{said}");
    assert_eq!(losses(folder.path(), "again"), first);
}

#[test]
fn sets_are_shown_checked_and_joined() {
    let folder = prepared();
    let here = folder.path();
    let arguments = ["data", "inspect", "sets/a", "--json", "--documents", "1", "--tokenizer", "bytes"];
    let shown: Value = serde_json::from_str(&done(here, &arguments)).unwrap();
    assert_eq!((shown["documents"].as_u64(), shown["dtype"].as_str()), (Some(40), Some("uint16")));
    assert_eq!(shown["document_length"]["max"].as_u64(), Some(3 + 16 * 3 + 1));
    assert_eq!(shown["first_documents"][0]["first"], serde_json::json!([48, 32, 256]));
    assert_eq!(shown["first_documents"][0]["text"], "0 ");
    let human = done(here, &["data", "inspect", "sets/b"]);
    assert!(human.contains("documents   20") && human.contains("of type uint16"), "{human}");
    // Joined as if they had been made together.
    done(here, &["data", "merge", "sets/ab", "sets/a", "sets/b"]);
    let together = ["data", "build", "a.jsonl", "b.jsonl", "--out", "sets/together", "--tokenizer", "bytes"];
    done(here, &[together.as_slice(), &["--append-eod"]].concat());
    for ending in ["bin", "idx"] {
        let read = |name: &str| std::fs::read(here.join(format!("sets/{name}.{ending}"))).unwrap();
        assert!(read("ab") == read("together"));
    }
    assert!(refused(here, &["data", "merge", "sets/ab", "sets/a"], 4).contains("sets/ab.idx is there already"));
    let said = refused(here, &["data", "verify", "sets/ab", "--vocab-size", "256"], 4);
    assert!(said.contains("60 tokens are not among 0 to 255"), "{said}");
    assert!(said.contains("token 256 at place 2 of sequence 0, document 0 (byte 4)"), "{said}");
    assert!(done(here, &["data", "verify", "sets/ab"]).contains("whole; 60 documents"));
    let mut tokens = std::fs::read(here.join("sets/ab.bin")).unwrap();
    tokens.pop();
    std::fs::write(here.join("sets/ab.bin"), tokens).unwrap();
    assert!(refused(here, &["data", "verify", "sets/ab"], 4).contains("beyond the"));
}

#[test]
fn a_vocabulary_is_made_used_and_trained_on() {
    let folder = prepared();
    let here = folder.path();
    done(here, &["data", "train-tokenizer", "a.jsonl", "b.jsonl", "--vocab-size", "300", "--out", "bpe"]);
    assert!(
        refused(here, &["data", "train-tokenizer", "a.jsonl", "--vocab-size", "300", "--out", "bpe"], 4)
            .contains("bpe/tokenizer.json is there already")
    );
    let build = ["data", "build", "a.jsonl", "--tokenizer", "bpe", "--append-eod"];
    done(here, &[build.as_slice(), &["--out", "sets/bpe"]].concat());
    let set = ["--set", "data.megatron.data_path=sets/bpe", "--set", "data.tokenizer=bpe"];
    done(here, &[&["train", "r.yaml", "--run-dir", "bpe-run"], set.as_slice()].concat());
    // What the run learnt is written with the vocabulary that it names.
    let write = |seed: &str| done(here, &["generate", "--checkpoint", "bpe-run", "--prompt", "3", "--seed", seed]);
    assert_eq!(write("1"), write("1"));
    assert_ne!(write("1"), write("2"));
    // The bytes' end of a document is none of these files'.
    let bytes = ["--set", "data.megatron.data_path=sets/bpe", "--set", "train.eval_every=0"];
    let said = refused(here, &[&["train", "r.yaml", "--run-dir", "wrong"], bytes.as_slice()].concat(), 4);
    assert!(said.contains("data.tokenizer (bytes) has a vocabulary of 257"), "{said}");
}
