//! `gantry rank`: sorting a model changes nothing but the order of its units, and puts the important ones first.

use gantry::checkpoint::{CheckpointReader, CheckpointWriter, LogicalTensor, Meta, TensorData};
use gantry::mesh::Grid;
use gantry::train::team::{Kind, Team, TeamSpec};
use gantry_tests::layouts::{batch, relative_l2, spec};
use gantry_tests::plugins::providers;
use gantry_tests::runs::{RECIPE, Runs};
use serde_json::Value;
use std::path::Path;
use std::sync::OnceLock;

/// A model trained for a while in `run`, sorted in `sorted`, in f64.
fn ranked() -> &'static Runs {
    static RUNS: OnceLock<Runs> = OnceLock::new();
    RUNS.get_or_init(|| {
        let recipe =
            RECIPE.replace("pattern: M*E-", "pattern: ME*-").replace("seq_length", "precision: fp64, seq_length");
        let runs = Runs::of(&recipe);
        runs.train("run", "40", &["--set", "checkpoint.every=0"]);
        rank(&runs, "run", "sorted");
        runs
    })
}

fn rank(runs: &Runs, from: &str, to: &str) -> Value {
    let output = runs.gantry(&["rank", "r.yaml", "--checkpoint", from, "--out", to, "--samples", "40", "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let note = std::fs::read_to_string(runs.path().join(to).join("ranking.json")).unwrap();
    assert_eq!(report, serde_json::from_str::<Value>(&note).unwrap());
    report
}

fn logits(folder: &Path) -> Vec<f64> {
    let mut reader = CheckpointReader::open(folder).unwrap();
    let recipe: Value = serde_saphyr::from_str(reader.index().extra["recipe"].as_str().unwrap()).unwrap();
    let spec = spec("nemotron-hybrid", recipe["modules"]["lm"]["config"].clone(), Grid::SINGLE);
    let team = Team::<f64>::start(&TeamSpec { plugins: providers(&["nemotron-hybrid"]), ..spec }).unwrap();
    team.load(&mut reader, &[Kind::Params, Kind::Buffers], None, |name| name.starts_with("optimizer.")).unwrap();
    team.all(|rank| rank.logits(&batch(3, 0))).unwrap().remove(0).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

#[test]
fn sorting_keeps_the_function() {
    let runs = ranked();
    let (before, after) = (runs.checkpoints("run").join("step-00000040"), runs.path().join("sorted"));
    let error = relative_l2(&logits(&before), &logits(&after));
    assert!(error < 1e-12, "logits differ by {error:e}");
    // It is another order all the same.
    let name = "decoder.layers.3.mlp.linear_fc1.weight";
    let weight = |folder: &Path| CheckpointReader::open(folder).unwrap().take(name, &[64, 32]).unwrap().data.into_f64();
    assert!(relative_l2(&weight(&before), &weight(&after)) > 0.1);
}

#[test]
fn a_sorted_model_is_in_order() {
    let runs = ranked();
    let again = rank(runs, "sorted", "again");
    let axes = again["axes"].as_array().unwrap();
    let names: Vec<&str> = axes.iter().map(|axis| axis["axis"].as_str().unwrap()).collect();
    assert_eq!(names, ["hidden", "mamba_heads", "attention_heads", "ffn", "experts", "moe_ffn"]);
    for axis in axes {
        let order = numbers(&axis["order"]);
        assert!(order.iter().enumerate().all(|(place, unit)| place as f64 == *unit), "{axis}");
        assert!(numbers(&axis["importance"]).iter().all(|&x| x > 0.0), "{axis}");
    }
    let first =
        serde_json::from_str::<Value>(&std::fs::read_to_string(runs.path().join("sorted/ranking.json")).unwrap())
            .unwrap();
    // Layers stay where they are, and the same units have the same importance.
    assert_eq!(first["layer_ranking"], again["layer_ranking"]);
    for (before, after) in first["axes"].as_array().unwrap().iter().zip(axes) {
        let (mut a, mut b) = (numbers(&before["importance"]), numbers(&after["importance"]));
        a.sort_by(f64::total_cmp);
        b.sort_by(f64::total_cmp);
        assert!(relative_l2(&a, &b) < 1e-9, "{before} {after}");
    }
    // Each of the layers matters, and differently.
    let errors: Vec<f64> =
        first["layers"].as_array().unwrap().iter().map(|l| l["relative_mse"].as_f64().unwrap()).collect();
    assert!(errors.len() == 4 && errors.iter().all(|&e| e > 0.0));
}

/// Hidden channels that do nothing come last, wherever they were, and go without a trace.
#[test]
fn channels_that_do_nothing_come_last() {
    let runs = ranked();
    let (ffn, moe_ffn) = ([3, 4, 17, 40, 41, 63], [0, 5, 9]);
    let mut reader = CheckpointReader::open(&runs.checkpoints("run").join("step-00000040")).unwrap();
    let index = reader.index().clone();
    let out = runs.path().join("idle");
    let mut writer = CheckpointWriter::alone(&out).unwrap();
    for entry in index.tensors.iter().filter(|entry| !entry.name.starts_with("optimizer.")) {
        let tensor = reader.take(&entry.name, &entry.shape).unwrap();
        let mut values = tensor.data.into_f64();
        // Rows of the first projections.
        let idle = match entry.name.as_str() {
            "decoder.layers.3.mlp.linear_fc1.weight" => &ffn[..],
            name if name.starts_with("decoder.layers.1.mlp.experts.linear_fc1.weight") => &moe_ffn[..],
            _ => &[],
        };
        idle.iter().for_each(|row| values[row * 32..][..32].fill(0.0));
        let (name, shape) = (entry.name.clone(), entry.shape.clone());
        writer.add(LogicalTensor { name, shape, data: TensorData::F64(values) }).unwrap();
    }
    writer.complete(&out, Meta { step: 40, extra: index.extra, ..Meta::default() }).unwrap();

    let report = rank(runs, "idle", "idle-sorted");
    let last = |axis: &str, n: usize| {
        let found = report["axes"].as_array().unwrap().iter().find(|a| a["axis"] == axis).unwrap();
        let order = numbers(&found["order"]);
        let mut last: Vec<usize> = order[order.len() - n..].iter().map(|&unit| unit as usize).collect();
        last.sort_unstable();
        last
    };
    assert_eq!((last("ffn", 6), last("moe_ffn", 3)), (ffn.to_vec(), moe_ffn.to_vec()));
    let slice = ["slice", "--checkpoint", "idle-sorted", "--out", "busy", "--width", "ffn=58", "--width", "moe_ffn=13"];
    assert!(runs.gantry(&slice).status.success());
    let error = relative_l2(&logits(&out), &logits(&runs.path().join("busy")));
    assert!(error < 1e-12, "logits differ by {error:e}");
}

#[test]
fn what_cannot_be_ranked_is_refused() {
    let runs = ranked();
    let refused = |more: &[&str], status: i32, words: &str| {
        let output = runs.gantry(&[&["rank", "r.yaml", "--checkpoint", "run", "--out", "refused"], more].concat());
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(status), "{text}");
        assert!(text.contains(words), "{text}");
        assert!(!runs.path().join("refused").exists());
    };
    refused(&["--set", "modules.lm.config.ffn_hidden_size=32"], 4, "the model is not the checkpoint's");
    refused(&["--set", "data.synthetic.vocab=65"], 2, "the model's vocabulary has 64 tokens, the data has 65");
    refused(&["--samples", "0"], 2, "0");
}
