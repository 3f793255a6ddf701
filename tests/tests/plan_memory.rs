//! The memory that `gantry plan` tells is within a tenth of the peak of a real run, checkpoints included.

use gantry_tests::plugins::{gantry, providers};
use rstest::rstest;
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// A hidden size of 512 and everything that goes with it.
const WIDE: [&str; 7] = [
    "modules.lm.config.hidden_size=512",
    "modules.lm.config.num_attention_heads=16",
    "modules.lm.config.ffn_hidden_size=2048",
    "modules.lm.config.mamba_num_heads=32",
    "modules.lm.config.moe_ffn_hidden_size=512",
    "modules.lm.config.moe_shared_expert_intermediate_size=512",
    "train.global_batch_size=4",
];

fn output(arguments: &[&str], recipe: &str, set: &[&str]) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut command = Command::new(gantry());
    command.current_dir(root).env("GANTRY_ALLOW_WRITABLE_PLUGINS", "1");
    command.args(&arguments[..1]).arg(recipe).args(&arguments[1..]);
    // Saves, and nothing that only takes time.
    let quick = [
        "checkpoint.every=2",
        "data.valid_fraction=0",
        "data.ngram_order=0",
        "train.eval_every=0",
        "train.sample=null",
    ];
    command.args(quick.iter().flat_map(|assignment| ["--set", assignment]));
    command.args(set.iter().flat_map(|assignment| ["--set", assignment]));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn check(recipe: &str, set: &[&str]) {
    let plan: Value = serde_json::from_str(&output(&["plan", "--json"], recipe, set)).unwrap();
    let planned = plan["memory_peak_bytes"].as_f64().unwrap();
    let parts: f64 = plan["ranks"].as_array().unwrap().iter().map(|r| r["memory"]["total"].as_f64().unwrap()).sum();
    let rest: f64 = plan["process"].as_object().unwrap().values().map(|bytes| bytes.as_f64().unwrap()).sum();
    assert_eq!(planned, parts + rest);

    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().to_str().unwrap();
    output(&["train", "--run-dir", run, "--steps", "4"], recipe, set);
    let metrics = std::fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap();
    let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    let peak = last["memory_peak_bytes"].as_f64().unwrap();
    let mib = f64::from(1 << 20);
    println!("planned {:.1} MiB, peak {:.1} MiB: {:+.1} %", planned / mib, peak / mib, 100.0 * (planned / peak - 1.0));
    assert!((planned / peak - 1.0).abs() < 0.1, "planned {planned}, peak {peak}: {plan:#}");
}

#[rstest]
#[case::quickstart("recipes/cpu/quickstart.yaml", &[])]
#[case::dense("recipes/cpu/dense.yaml", &[])]
#[case::wide("recipes/cpu/quickstart.yaml", &WIDE)]
#[case::layout(
    "recipes/cpu/quickstart.yaml",
    &["modules.lm.grid.tp=2", "modules.lm.grid.pp=2", "modules.lm.grid.dp=2"]
)]
#[cfg(target_os = "linux")]
fn the_plan_tells_the_peak(#[case] recipe: &str, #[case] set: &[&str]) {
    providers(&["nemotron-hybrid", "dense-gpt"]);
    check(recipe, set);
}

#[test]
#[cfg(target_os = "linux")]
fn the_plan_tells_the_peak_with_a_teacher() {
    providers(&["nemotron-hybrid"]);
    let parent = tempfile::tempdir().unwrap();
    let recipe = "recipes/cpu/quickstart.yaml";
    output(&["train", "--run-dir", parent.path().to_str().unwrap(), "--steps", "1"], recipe, &WIDE);
    let teacher = format!("modules.lm.teacher={{load: {}}}", parent.path().display());
    check(recipe, &[&WIDE[..], &[&teacher]].concat());
}
