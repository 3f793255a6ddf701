//! The program from outside: exit statuses and sentences of everything that goes wrong before a plugin is in use.

use rstest::rstest;
use std::path::Path;
use std::process::{Command, Output};

const RECIPE: &str = "\
name: t
modules:
  lm: {provider: no-such-provider}
data: {paths: [text], extensions: [txt]}
optimizer: {lr: 1e-3}
train: {steps: 10, seq_length: 16, global_batch_size: 4}
";

fn gantry(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gantry")).current_dir(folder).args(arguments).output().unwrap()
}

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("r.yaml"), RECIPE).unwrap();
    folder
}

#[rstest]
#[case::no_command(&[], 2, "Usage")]
#[case::unknown_command(&["trian"], 2, "unrecognized subcommand")]
#[case::no_recipe(&["train"], 2, "<RECIPE>")]
#[case::missing_file(&["train", "none.yaml"], 2, "error: cannot read recipe none.yaml")]
#[case::unknown_key(&["train", "r.yaml", "--set", "train.stepz=1"], 2, "the nearest known key is `train.steps`")]
#[case::bad_value(&["train", "r.yaml", "--set", "train.steps=many"], 2, "`train.steps` is `many`")]
#[case::bf16(&["train", "r.yaml", "--set", "train.precision=bf16"], 2, "needs a GPU")]
#[case::plan_of_bad_recipe(&["plan", "r.yaml", "--set", "optimizer.lr=-1"], 2, "`optimizer.lr` is -1")]
#[case::provider(&["train", "r.yaml"], 3, "no-such-provider")]
#[case::inspect_nothing(&["inspect", "no-such-plugin"], 3, "no-such-plugin")]
#[case::inspect_no_library(&["inspect", "r.yaml"], 3, "r.yaml")]
#[case::run_folder(&["train", "r.yaml", "--run-dir", "r.yaml/x"], 4, "cannot write")]
fn wrong_input_has_its_status_and_sentence(#[case] arguments: &[&str], #[case] status: i32, #[case] part: &str) {
    let folder = folder();
    let output = gantry(folder.path(), arguments);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(status), "{stderr}");
    assert!(stderr.contains(part), "{stderr}");
    assert!(!stderr.contains("panicked") && !stderr.contains("defect"), "{stderr}");
}

#[test]
fn environment_overrides_the_recipe() {
    let folder = folder();
    let output = Command::new(env!("CARGO_BIN_EXE_gantry"))
        .current_dir(folder.path())
        .args(["train", "r.yaml"])
        .env("GANTRY_TRAIN__SEQ_LENGTH", "0")
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(
        stderr.starts_with("error: environment variable GANTRY_TRAIN__SEQ_LENGTH: `train.seq_length` is 0"),
        "{stderr}"
    );
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn help_and_version_are_no_errors() {
    let folder = folder();
    for arguments in [["--help"], ["--version"]] {
        assert_eq!(gantry(folder.path(), &arguments).status.code(), Some(0));
    }
}

#[test]
fn failure_is_in_the_log_of_the_run() {
    let folder = folder();
    gantry(folder.path(), &["train", "r.yaml"]);
    let log = std::fs::read_to_string(folder.path().join("runs/t/log.jsonl")).unwrap();
    assert!(log.lines().last().unwrap().contains("\"status\":3"));
    // A start that fails leaves no recipe of its own.
    assert!(!folder.path().join("runs/t/recipe.resolved.yaml").exists());
}
