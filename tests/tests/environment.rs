//! Run folders and checkpoints that are not as they should be: full, read-only, in use, damaged, of another model. Each
//! ends with its exit status and one sentence, and what was there before stays.

use gantry_tests::runs::{Runs, signal};
use rstest::rstest;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The output must have this status, and one line beginning with `error: ` that contains all of `parts`.
#[track_caller]
fn refused(output: &Output, status: i32, parts: &[&str]) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(status), "{text}");
    let errors: Vec<&str> = text.lines().filter(|line| line.starts_with("error: ")).collect();
    let [error] = errors.as_slice() else { panic!("{} sentences: {text}", errors.len()) };
    for part in parts {
        assert!(error.contains(part), "no `{part}` in: {error}");
    }
    assert!(!text.contains("panicked") && !text.contains("defect"), "{text}");
}

/// Runs a shell script in the folder with mounts of its own, `$@` being the program that trains `run` for some steps.
/// None where mounting is not permitted.
fn with_mounts(runs: &Runs, mount: &str, steps: &str, after: &str) -> Option<Output> {
    let may = Command::new("unshare").args(["-rm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]).output();
    if !may.is_ok_and(|output| output.status.success()) {
        println!("no mounts of one's own here: skipped");
        return None;
    }
    let plain = runs.command(&["train", "r.yaml", "--run-dir", "run", "--steps", steps]);
    let mut command = Command::new("unshare");
    let script = format!("{mount}\n\"$@\"\nstatus=$?\n{after}\nexit $status");
    command.args(["-rm", "sh", "-c", &script, "sh"]).arg(plain.get_program()).args(plain.get_args());
    command.current_dir(runs.path()).env("GANTRY_ALLOW_WRITABLE_PLUGINS", "1");
    Some(command.output().unwrap())
}

#[test]
fn a_full_disk_ends_the_run_and_the_checkpoint_before_stays() {
    let runs = Runs::new();
    // How large a checkpoint is.
    runs.train("other", "6", &[]);
    let size =
        |path: &Path| std::fs::read_dir(path).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum::<u64>();
    let kilobytes = size(&runs.checkpoints("other").join("step-00000006")) / 1024;
    // Room for two and a half: two are kept, so the third does not fit before the first may go.
    let mount = format!("mkdir run && mount -t tmpfs -o size={}k tmpfs run", kilobytes * 5 / 2);
    let after =
        "ls -A run/checkpoints >left; cat run/checkpoints/latest >>left; cp -r run/checkpoints/step-00000012 kept";
    let Some(output) = with_mounts(&runs, &mount, "40", after) else { return };
    refused(&output, 4, &["step 18: cannot write", "run/checkpoints/.new-step-00000018/", "No space left on device"]);
    let text = stderr(&output);
    assert!(text.contains("the newest complete checkpoint is") && text.contains("step-00000012"), "{text}");
    assert!(text.contains("to do: free disk space"), "{text}");
    let left = std::fs::read_to_string(runs.path().join("left")).unwrap();
    assert_eq!(left, "latest\nstep-00000006\nstep-00000012\nstep-00000012\n");
    gantry::checkpoint::CheckpointReader::open(&runs.path().join("kept")).unwrap();
}

#[test]
fn a_file_that_may_not_grow_leaves_the_checkpoint_before() {
    let runs = Runs::new();
    runs.train("run", "6", &[]);
    let hashes = runs.hashes("run", 6);
    let plain = runs.command(&["train", "r.yaml", "--run-dir", "run", "--steps", "12"]);
    let mut command = Command::new("sh");
    command.current_dir(runs.path()).env("GANTRY_ALLOW_WRITABLE_PLUGINS", "1");
    command.args(["-c", "ulimit -f 100; exec \"$@\"", "sh"]).arg(plain.get_program()).args(plain.get_args());
    let output = command.output().unwrap();
    refused(&output, 4, &["step 12: cannot write", ".new-step-00000012/shard-00000.safetensors", "File too large"]);
    assert_eq!(runs.latest("run"), "step-00000006");
    assert_eq!(std::fs::read_dir(runs.checkpoints("run")).unwrap().count(), 2);
    assert_eq!(runs.hashes("run", 6), hashes);
    runs.train("run", "12", &[]);
}

#[test]
fn a_read_only_run_folder_is_refused_before_training() {
    let runs = Runs::new();
    runs.train("run", "1", &[]);
    let mount = "mount --bind run run && mount -o remount,bind,ro run";
    let Some(output) = with_mounts(&runs, mount, "3", "true") else { return };
    refused(&output, 4, &["cannot write", "/run/lock", "Read-only file system"]);
    assert_eq!(runs.metrics("run").len(), 1);
}

#[test]
fn a_run_folder_that_goes_away_ends_the_run() {
    let runs = Runs::new();
    let mut child = runs.train_until("run", 6);
    while !runs.checkpoints("run").join("latest").exists() {
        assert!(child.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(5));
    }
    std::fs::rename(runs.path().join("run"), runs.path().join("moved")).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(4));
    let latest = std::fs::read_to_string(runs.checkpoints("moved").join("latest")).unwrap();
    gantry::checkpoint::CheckpointReader::open(&runs.checkpoints("moved").join(latest.trim())).unwrap();
}

#[test]
fn a_file_in_place_of_the_run_folder_is_refused() {
    let runs = Runs::new();
    std::fs::write(runs.path().join("run"), "a file").unwrap();
    refused(&runs.gantry(&["train", "r.yaml", "--run-dir", "run"]), 4, &["cannot write", "/run: ", "File exists"]);
    let inside = runs.gantry(&["train", "r.yaml", "--run-dir", "run/deeper"]);
    refused(&inside, 4, &["cannot write", "/run/deeper: ", "Not a directory"]);
}

#[test]
fn a_run_folder_has_one_run_at_a_time_and_a_killed_one_does_not_block_it() {
    let runs = Runs::new();
    let mut child = runs.train_until("run", 2);
    let output = runs.gantry(&["train", "r.yaml", "--run-dir", "run"]);
    refused(&output, 4, &["/run is in use by process ", &format!(" {} on ", child.id())]);
    assert!(child.try_wait().unwrap().is_none());
    signal(&child, "-KILL");
    child.wait().unwrap();
    let last = runs.metrics("run").len() + 2;
    runs.train("run", &last.to_string(), &[]);
}

/// A run to damage or to begin from.
fn trained() -> Runs {
    let runs = Runs::new();
    runs.train("run", "2", &[]);
    runs
}

/// Changes the index of the checkpoint as a program would that writes checkpoints: its checksum is right.
fn edit(folder: &Path, change: impl FnOnce(&mut Value)) {
    let path = folder.join("index.json");
    let mut value: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut value);
    value["sha256"] = gantry::checkpoint::digest(&value).into();
    std::fs::write(path, serde_json::to_vec(&value).unwrap()).unwrap();
}

fn shard(folder: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let path = folder.join("shard-00000.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    change(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

#[rstest]
#[case::flipped_byte(|folder: &Path| shard(folder, |bytes| bytes[40_000] ^= 4), "shard-00000.safetensors has a wrong checksum")]
#[case::truncated(|folder: &Path| shard(folder, |bytes| bytes.truncate(1000)), "shard-00000.safetensors has 1000 bytes, index.json says ")]
#[case::empty(|folder: &Path| shard(folder, Vec::clear), "shard-00000.safetensors has 0 bytes")]
#[case::no_shard(|folder: &Path| std::fs::remove_file(folder.join("shard-00000.safetensors")).unwrap(), "shard-00000.safetensors cannot be read")]
#[case::note_changed(|folder: &Path| std::fs::write(folder.join("reproduction.json"), "{}").unwrap(), "reproduction.json has 2 bytes")]
#[case::index_no_json(|folder: &Path| std::fs::write(folder.join("index.json"), "not json").unwrap(), "is damaged: ")]
#[case::index_gone(|folder: &Path| std::fs::remove_file(folder.join("index.json")).unwrap(), "is damaged: cannot read")]
#[case::newer_format(|folder: &Path| edit(folder, |index| index["version"] = 3.into()), "has format version 3, this program reads 2")]
#[case::other_program(|folder: &Path| edit(folder, |index| index["format"] = "weights".into()), "was not written by Gantry")]
fn a_damaged_checkpoint_is_refused(#[case] plant: fn(&Path), #[case] part: &str) {
    let runs = trained();
    plant(&runs.checkpoints("run").join("step-00000002"));
    let output = runs.gantry(&["train", "r.yaml", "--run-dir", "run"]);
    refused(&output, 4, &["step-00000002", part]);
    assert!(stderr(&output).contains("\n  to do: "), "{}", stderr(&output));
    assert_eq!(runs.metrics("run").len(), 2);
}

/// What a model takes that is not what the checkpoint has, by way of `modules.NAME.load`, and as a changed resumption.
#[rstest]
#[case::wrong_shape(&["modules.lm.config.ffn_hidden_size=48"], "has shape [64, 32], the model needs [48, 32]")]
#[case::missing_tensor(&["modules.lm.config.pattern=M*E-M"], " is missing")]
#[case::extra_tensor(&["modules.lm.config.pattern=M*E"], " is not used by the model")]
fn a_checkpoint_of_another_model_is_refused(#[case] set: &[&str], #[case] part: &str) {
    let runs = trained();
    let mut arguments = vec!["train", "r.yaml", "--run-dir", "new", "--steps", "1", "--set", "modules.lm.load=run"];
    arguments.extend(set.iter().flat_map(|assignment| ["--set", assignment]));
    let output = runs.gantry(&arguments);
    refused(&output, 4, &["modules.lm.load: checkpoint ", "/run/checkpoints/step-00000002: tensor ", part]);
    assert!(!runs.path().join("new/metrics.jsonl").exists());
}

#[test]
fn another_precision_is_named_and_only_loading_converts() {
    let runs = trained();
    let double = ["--set", "train.precision=fp64"];
    let output = runs.gantry(&[&["train", "r.yaml", "--run-dir", "run", "--steps", "4"], &double[..]].concat());
    refused(&output, 4, &["step-00000002: tensor ", " has type F32, the model needs F64"]);
    assert!(stderr(&output).contains("to do: set train.precision as in the run that wrote it"));
    runs.train("new", "1", &[&double[..], &["--set", "modules.lm.load=run"]].concat());
}

#[test]
fn another_run_is_taken_over_and_named() {
    let runs = trained();
    runs.train("whole", "5", &[]);
    for path in ["run", "run/checkpoints", "run/checkpoints/latest", "run/checkpoints/step-00000002"] {
        let output = runs.gantry(&["train", "r.yaml", "--run-dir", "new", "--steps", "5", "--resume", path]);
        let text = stderr(&output);
        assert!(output.status.success(), "{text}");
        let said = "step-00000002: step 2 of run small, with its optimizer state and after its 8 samples";
        assert!(text.contains(said), "{text}");
        assert_eq!(runs.hashes("new", 5), runs.hashes("whole", 5));
        assert_eq!(runs.metrics("new"), runs.metrics("whole")[2..]);
    }
}

#[test]
fn frozen_parameters_stay_what_they_were() {
    let runs = trained();
    runs.train("frozen", "3", &["--set", "modules.lm.load=run", "--set", "modules.lm.freeze=true"]);
    let parameters = |run: &str, step: u64| {
        let folder = runs.checkpoints(run).join(format!("step-{step:08}"));
        let mut reader = gantry::checkpoint::CheckpointReader::open(&folder).unwrap();
        let names: Vec<_> = reader.index().tensors.iter().map(|t| (t.name.clone(), t.shape.clone())).collect();
        let wanted = names.iter().filter(|(name, _)| !name.starts_with("optimizer."));
        wanted.map(|(name, shape)| reader.take(name, shape).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(parameters("frozen", 3), parameters("run", 2));
}

#[test]
fn a_run_that_does_not_fit_into_memory_is_refused_before_it_takes_any() {
    let runs = Runs::new();
    let sizes = ["hidden_size=65536", "ffn_hidden_size=1048576"];
    let set: Vec<String> = sizes.iter().map(|size| format!("modules.lm.config.{size}")).collect();
    let mut arguments = vec!["train", "r.yaml", "--run-dir", "run"];
    arguments.extend(set.iter().flat_map(|assignment| ["--set", assignment]));
    let began = Instant::now();
    let mut child = runs.command(&arguments).stderr(Stdio::piped()).spawn().unwrap();
    let mut peak = 0;
    while child.try_wait().unwrap().is_none() {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("0 kB").trim();
        peak = peak.max(line.trim_end_matches("kB").trim().parse::<u64>().unwrap());
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    refused(&output, 2, &["the run needs ", "iB of memory, ", " are available on this machine"]);
    assert!(stderr(&output).contains("\n  optimizer state: ") && stderr(&output).contains("to do: make the model"));
    assert!(peak < 2 << 20, "{peak} kB taken in {:?}", began.elapsed());
}

#[test]
fn the_resolved_recipe_repeats_the_run_bit_by_bit() {
    let runs = Runs::new();
    let mut command = runs.command(&["train", "r.yaml", "--run-dir", "a", "--steps", "7", "--ranks", "2"]);
    command.args(["--set", "optimizer.lr=3e-3", "--set", "schedule.warmup_steps=2"]);
    assert!(command.env("GANTRY_TRAIN__SEED", "77").output().unwrap().status.success());
    runs.train("default", "7", &[]);
    // Neither the options nor the variable.
    let again = runs.gantry(&["train", "a/recipe.resolved.yaml", "--run-dir", "b", "--steps", "7"]);
    assert!(again.status.success(), "{}", stderr(&again));
    assert_eq!(runs.metrics("a"), runs.metrics("b"));
    assert_eq!(runs.hashes("a", 7), runs.hashes("b", 7));
    assert_ne!(runs.hashes("a", 7), runs.hashes("default", 7));

    let read =
        |path: &str| -> Value { serde_json::from_slice(&std::fs::read(runs.path().join(path)).unwrap()).unwrap() };
    let about = read("a/reproduction.json");
    assert_eq!(about, read("a/checkpoints/step-00000007/reproduction.json"));
    let recipe = std::fs::read_to_string(runs.path().join("a/recipe.resolved.yaml")).unwrap();
    assert_eq!(about["recipe"], recipe.as_str());
    assert!(recipe.contains("dp: 2"), "{recipe}");
    assert_eq!(about["environment"]["GANTRY_TRAIN__SEED"], "77");
    assert!(about["environment"].as_object().unwrap().keys().all(|name| name.starts_with("GANTRY_")));
    let command: Vec<&str> = about["command"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
    assert_eq!(command[1..5], ["train", "r.yaml", "--run-dir", "a"]);
    let plugin = &about["plugins"][0];
    assert_eq!(plugin["name"], "nemotron-hybrid");
    assert!(Path::new(plugin["path"].as_str().unwrap()).is_file());
    assert_eq!(plugin["sha256"].as_str().unwrap().len(), 64);
    assert_eq!(about["data"]["sha256"].as_str().unwrap().len(), 64);
    assert_eq!(about["gantry"]["version"], env!("CARGO_PKG_VERSION"));
    for key in ["cpu", "cores", "memory_bytes", "kernel", "simd"] {
        assert!(!about["machine"][key].is_null(), "{about}");
    }
    assert_eq!(about["resumed"], Value::Null);
    runs.train("a", "8", &[]);
    assert_eq!(read("a/reproduction.json")["resumed"]["step"], 7);
}
