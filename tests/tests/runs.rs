//! Whole runs of the program with a real provider: stopped and killed runs go on bit by bit, in any layout; a NaN ends
//! a run; the plan and the description agree with what was trained.

use gantry_tests::plugins::fixture;
use gantry_tests::runs::{Runs, signal};
use rstest::rstest;
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn stopped_and_killed_runs_go_on_bit_by_bit() {
    let runs = Runs::new();
    // Ended by its limit, by a stop signal between checkpoints, and killed.
    runs.train("parts", "4", &[]);
    let mut child = runs.train_until("parts", 9);
    signal(&child, "-TERM");
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let stopped = runs.metrics("parts").len();
    let log = std::fs::read_to_string(runs.path().join("parts/log.jsonl")).unwrap();
    let words = format!("step-{stopped:08}; the same command goes on from there");
    assert!(log.contains(&words), "no {words:?} in the log");
    assert_eq!(runs.latest("parts"), format!("step-{stopped:08}"));
    let mut child = runs.train_until("parts", stopped + 8);
    signal(&child, "-KILL");
    assert_eq!(child.wait().unwrap().code(), None);
    let last = runs.metrics("parts").len() + 9;
    runs.train("parts", &last.to_string(), &[]);
    runs.train("whole", &last.to_string(), &[]);
    let (whole, parts) = (runs.metrics("whole"), runs.metrics("parts"));
    assert_eq!(whole.len(), last);
    assert_eq!(whole, parts);
    assert_eq!(runs.hashes("whole", last as u64), runs.hashes("parts", last as u64));
    // It is training that is repeated: the loss falls from chance, ln 64 = 4.16.
    let loss = |line: &Value| line["lm_loss"].as_f64().unwrap();
    let (begin, end) = (loss(&whole[0]), loss(&whole[last - 1]));
    assert!((begin - 4.16).abs() < 0.2 && end < begin - 0.3, "{begin} to {end}");
}

#[test]
fn a_run_whose_terminal_goes_saves_unless_it_was_told_to_stay() {
    let runs = Runs::new();
    let mut child = runs.train_until("run", 3);
    signal(&child, "-HUP");
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(runs.latest("run"), format!("step-{:08}", runs.metrics("run").len()));
    // As nohup starts it.
    let plain = runs.command(&["train", "r.yaml", "--run-dir", "stays", "--steps", "5000"]);
    let mut command = Command::new("sh");
    command.current_dir(runs.path()).env("GANTRY_ALLOW_WRITABLE_PLUGINS", "1").stderr(Stdio::null());
    command.args(["-c", "trap '' HUP; exec \"$@\"", "sh"]).arg(plain.get_program()).args(plain.get_args());
    let mut child = command.spawn().unwrap();
    let steps = || runs.metrics("stays").len();
    let wait_for = |count: usize| {
        let began = Instant::now();
        while steps() < count {
            assert!(began.elapsed() < Duration::from_secs(120), "no step {count} after two minutes");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    wait_for(2);
    signal(&child, "-HUP");
    wait_for(steps() + 5);
    assert!(child.try_wait().unwrap().is_none());
    signal(&child, "-TERM");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_file_that_may_not_grow_ends_a_run_with_status_4() {
    let runs = Runs::new();
    let plain = runs.command(&["train", "r.yaml", "--run-dir", "run", "--steps", "2"]);
    let mut command = Command::new("sh");
    command.current_dir(runs.path()).env("GANTRY_ALLOW_WRITABLE_PLUGINS", "1");
    command.args(["-c", "ulimit -f 20; exec \"$@\"", "sh"]).arg(plain.get_program()).args(plain.get_args());
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(4), "{stderr}");
    assert!(stderr.contains("cannot write") && stderr.contains("shard-00000.safetensors"), "{stderr}");
}

#[test]
fn a_signal_before_the_first_step_ends_the_program_at_once() {
    use std::os::unix::process::ExitStatusExt;
    let runs = Runs::new();
    // A corpus that takes far longer to make than the program gets.
    let corpus = "data.synthetic={vocab: 64, document_length: 40, tokens: 400000000}";
    let arguments = ["train", "r.yaml", "--run-dir", "run", "--set", corpus];
    let mut child = runs.command(&arguments).stderr(Stdio::piped()).spawn().unwrap();
    // The log is opened after signals are caught.
    let log = runs.path().join("run/log.jsonl");
    while !log.exists() {
        assert!(child.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(2));
    }
    signal(&child, "-TERM");
    let began = Instant::now();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(15));
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(stderr.contains("SIGTERM: ended before the first step"), "{stderr}");
    assert!(began.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_checkpoint_of_one_layout_goes_on_in_another() {
    let runs = Runs::new();
    runs.train("whole", "10", &["--set", "train.precision=fp64"]);
    runs.train("parts", "6", &["--set", "train.precision=fp64"]);
    let layout = ["modules.lm.grid.tp=2", "modules.lm.grid.pp=2", "modules.lm.grid.sequence_parallel=true"];
    let set: Vec<&str> = layout.iter().flat_map(|assignment| ["--set", assignment]).collect();
    runs.train("parts", "10", &[&set[..], &["--ranks", "8", "--set", "train.precision=fp64"]].concat());
    for (whole, parts) in runs.metrics("whole").iter().zip(runs.metrics("parts")) {
        for key in ["lm_loss", "loss", "grad_norm"] {
            let (a, b) = (whole[key].as_f64().unwrap(), parts[key].as_f64().unwrap());
            assert!((a - b).abs() <= 1e-9 * a.abs(), "{key} of step {}: {a} against {b}", whole["step"]);
        }
    }
}

#[test]
fn nan_ends_a_run_with_status_5_and_says_where() {
    let runs = Runs::new();
    let wild = ["--set", "optimizer.lr=1e30", "--set", "schedule.warmup_steps=0", "--set", "optimizer.clip_grad=0"];
    let output = runs.gantry(&[&["train", "r.yaml", "--run-dir", "wild"], &wild[..]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(5), "{stderr}");
    let last = runs.metrics("wild").pop().unwrap();
    let stopped = last["stopped"].as_str().unwrap();
    assert!(stopped.starts_with("nan in ") && stopped.contains("lm.decoder.layers."), "{last}");
    assert!(stderr.contains(&format!("NaN or infinity in {}", &stopped["nan in ".len()..])), "{stderr}");
    assert!(stderr.contains("the first such number is "), "{stderr}");
    assert!(!runs.path().join("wild/checkpoints/latest").exists());
    // What is broken for good stays broken: the steps allowed are left out, then the run ends.
    let skip = ["--set", "train.on_nonfinite=skip", "--set", "train.max_skipped_steps=2"];
    let output = runs.gantry(&[&["train", "r.yaml", "--run-dir", "skips"], &wild[..], &skip[..]].concat());
    assert_eq!(output.status.code(), Some(5));
    let lines = runs.metrics("skips");
    let [.., a, b, end] = lines.as_slice() else { panic!("{lines:?}") };
    assert_eq!((&a["skipped_steps"], &b["skipped_steps"], b.get("lm_loss")), (&json!(1), &json!(2), None));
    assert!(b["skipped"].as_str().unwrap().starts_with("nan in ") && end["stopped"].is_string(), "{b} {end}");
    assert_eq!(lines.iter().filter(|line| line.get("skipped").is_some()).count(), 2);
}

/// With a loss that only wavers and a factor close to one every second step or so is a spike: what is left out leaves the checkpoint as it was, and a run in
/// parts leaves out the same steps as a whole one.
#[test]
fn spikes_are_left_out_and_resumed_runs_agree_on_them() {
    let runs = Runs::new();
    let guard = ["train.on_nonfinite=skip", "train.spike_factor=1.0003", "train.spike_window=3"];
    let more = [
        "optimizer.lr=1e-5",
        "optimizer.multipliers=[{match: '*norm*', lr: 0.5}]",
        "checkpoint.every=1",
        "checkpoint.keep_last=50",
    ];
    let set: Vec<&str> = guard.iter().chain(&more).flat_map(|assignment| ["--set", assignment]).collect();
    runs.train("whole", "16", &set);
    for steps in ["3", "7", "8", "16"] {
        runs.train("parts", steps, &set);
    }
    let whole = runs.metrics("whole");
    assert_eq!(whole, runs.metrics("parts"));
    assert_eq!(runs.hashes("whole", 16), runs.hashes("parts", 16));
    let mut counts = [0, 0];
    for line in &whole[1..] {
        let (step, skipped) = (line["step"].as_u64().unwrap(), line.get("skipped").is_some());
        let same = runs.hashes("whole", step - 1) == runs.hashes("whole", step);
        assert_eq!(same, skipped, "{line}");
        assert!(!skipped || line["skipped"].as_str().unwrap().starts_with("loss spike in step"), "{line}");
        counts[usize::from(skipped)] += 1;
    }
    assert!(counts[0] > 3 && counts[1] > 1, "{counts:?} steps taken and left out");
    assert_eq!(whole[15]["skipped_steps"], counts[1]);
}

#[test]
fn a_second_signal_ends_the_program_at_once_and_says_so() {
    use std::os::unix::process::ExitStatusExt;
    let runs = Runs::new();
    runs.train("run", "6", &[]);
    // Steps that take far longer than the program gets.
    let slow = ["--set", "train.global_batch_size=20000"];
    let arguments = [&["train", "r.yaml", "--run-dir", "run"], &slow[..]].concat();
    let mut child = runs.command(&arguments).stderr(Stdio::piped()).spawn().unwrap();
    let log = runs.path().join("run/log.jsonl");
    let wait_for = |text: &str| {
        let began = Instant::now();
        while !std::fs::read_to_string(&log).unwrap_or_default().contains(text) {
            assert!(began.elapsed() < Duration::from_secs(60), "no {text:?} in the log");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    wait_for("resumed from");
    signal(&child, "-TERM");
    wait_for("SIGTERM: saving after this step");
    signal(&child, "-INT");
    let began = Instant::now();
    assert_eq!(child.wait().unwrap().signal(), Some(2));
    assert!(began.elapsed() < Duration::from_secs(5));
    let mut stderr = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut stderr).unwrap();
    assert!(stderr.contains("SIGINT again: ended at once; every checkpoint that was saved is complete"), "{stderr}");
    runs.train("run", "8", &[]);
    assert_eq!(runs.metrics("run").len(), 8);
}

#[test]
fn a_torn_checkpoint_is_refused_by_name() {
    let runs = Runs::new();
    runs.train("torn", "2", &[]);
    let shard = runs.path().join("torn/checkpoints/step-00000002/shard-00000.safetensors");
    let bytes = std::fs::read(&shard).unwrap();
    std::fs::write(&shard, &bytes[..bytes.len() / 2]).unwrap();
    let output = runs.gantry(&["train", "r.yaml", "--run-dir", "torn"]);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(4), "{stderr}");
    assert!(stderr.contains("step-00000002: shard-00000.safetensors has "), "{stderr}");
}

/// A vocabulary for bytes, which is looked at before the data.
const BYTES: &str = "modules.lm.config.vocab_size=384";

#[rstest]
#[case::no_data(&["data.paths=[nowhere]", BYTES], 4, "cannot read data path")]
#[case::no_text(&["data.paths=[.]", "data.extensions=[txt]", BYTES], 4, "no text in data path")]
#[case::little_text(&["data.paths=[.]", "data.extensions=[yaml]", "train.seq_length=9999", BYTES], 4, "fewer than the 10000 of")]
#[case::small_vocabulary(&["data.paths=[.]", "data.extensions=[yaml]"], 2, "vocabulary has 64 tokens, the data has 257")]
#[case::provider_key(&["modules.lm.config.hiden_size=3"], 2, "hiden_size")]
#[case::bad_split(&["modules.lm.grid.tp=3"], 2, "grid.tp = 3 does not divide")]
#[case::multiplier(
    &["optimizer.multipliers=[{match: '*.mlp.linear_fc9.*', lr: 2}]"],
    2,
    "no parameter matches `*.mlp.linear_fc9.*`; the nearest is `decoder.layers."
)]
#[case::load(&["modules.lm.load=r.yaml"], 4, "is no complete checkpoint")]
fn wrong_input_has_its_status_and_sentence(#[case] set: &[&str], #[case] status: i32, #[case] part: &str) {
    let runs = Runs::new();
    let mut arguments = vec!["train", "r.yaml", "--run-dir", "run", "--steps", "1"];
    if set.iter().any(|assignment| assignment.starts_with("data.paths")) {
        arguments.extend(["--set", "data.synthetic=null"]);
    }
    arguments.extend(set.iter().flat_map(|assignment| ["--set", assignment]));
    let output = runs.gantry(&arguments);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{stderr}");
    assert!(stderr.lines().any(|line| line.starts_with("error: ")) && stderr.contains(part), "{stderr}");
    assert!(!stderr.contains("panicked") && !stderr.contains("defect"), "{stderr}");
}

#[test]
fn the_plan_counts_what_the_run_saves() {
    let runs = Runs::new();
    runs.train("run", "1", &[]);
    let index = std::fs::read(runs.path().join("run/checkpoints/step-00000001/index.json")).unwrap();
    let index: Value = serde_json::from_slice(&index).unwrap();
    let elements =
        |tensor: &Value| -> u64 { tensor["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).product() };
    let moments = |tensor: &&Value| tensor["name"].as_str().unwrap().starts_with("optimizer.exp_avg.");
    let saved: u64 = index["tensors"].as_array().unwrap().iter().filter(moments).map(elements).sum();
    let output = runs.gantry(&["plan", "r.yaml", "--json", "--set", "modules.lm.grid.tp=2", "--ranks", "4"]);
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(plan["parameters"].as_u64(), Some(saved));
    let ranks = plan["ranks"].as_array().unwrap();
    let places: Vec<_> =
        ranks.iter().map(|rank| (rank["tp"].as_u64().unwrap(), rank["dp"].as_u64().unwrap())).collect();
    assert_eq!(places, [(0, 0), (1, 0), (0, 1), (1, 1)]);
    // Two halves: more than the whole by what both hold, less than twice the whole.
    let halves = ranks[0]["parameters"].as_u64().unwrap() + ranks[1]["parameters"].as_u64().unwrap();
    assert!(saved < halves && halves < saved * 3 / 2, "{halves} for {saved}");
    for rank in ranks {
        let memory = &rank["memory"];
        let parts = ["parameters", "gradients", "optimizer", "buffers", "activations", "communication", "record"];
        let sum: u64 = parts.iter().map(|part| memory[part].as_u64().unwrap()).sum();
        assert_eq!(memory["total"].as_u64(), Some(sum));
        assert!(
            rank["flops_per_step"].as_f64().unwrap() > 2.0 * rank["forward_flops_per_micro_batch"].as_f64().unwrap()
        );
    }
}

#[test]
fn inspect_describes_good_and_bad_plugins() {
    let runs = Runs::new();
    let sizes = ["pattern=M", "hidden_size=32", "vocab_size=64", "mamba_num_heads=4", "mamba_num_groups=2"];
    let set: Vec<String> = sizes.iter().map(|size| format!("--set={size}")).collect();
    let arguments: Vec<&str> =
        ["inspect", "nemotron-hybrid", "--json"].into_iter().chain(set.iter().map(String::as_str)).collect();
    let report: Value = serde_json::from_slice(&runs.gantry(&arguments).stdout).unwrap();
    assert_eq!(report["providers"][0]["name"], "nemotron-hybrid");
    let params = report["models"]["nemotron-hybrid"]["plan"]["params"].as_array().unwrap();
    assert!(params.iter().any(|param| param["name"] == "decoder.layers.0.mixer.in_proj.weight"));

    let misbehaving = fixture("misbehave");
    let path = misbehaving.to_str().unwrap();
    let output = runs.gantry(&["inspect", path, "--json", "--set", "how=plan_panic"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    assert!(stderr.contains("panicked in plan"), "{stderr}");
    // What the user sets must name a model.
    let output = runs.gantry(&["inspect", "nemotron-hybrid", "--set", "foo=1"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(output.stdout.is_empty() && stderr.contains("unknown key \"foo\""), "{stderr}");
}

#[test]
fn a_module_begins_from_a_checkpoint_it_names() {
    let runs = Runs::new();
    runs.train("first", "12", &[]);
    let load = format!("modules.lm.load={}", Path::new("first/checkpoints/step-00000012").display());
    runs.train("second", "1", &["--set", &load]);
    let (first, second) = (runs.metrics("first"), runs.metrics("second"));
    let loss = |line: &Value| line["lm_loss"].as_f64().unwrap();
    assert_eq!(second[0]["step"], 1);
    assert!(loss(&second[0]) < loss(&first[5]), "{} is no continuation of {}", loss(&second[0]), loss(&first[11]));
}
