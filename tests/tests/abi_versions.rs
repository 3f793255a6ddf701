//! Plugins and hosts of different minor versions: built against the frozen API 1.0, or against one newer than the host's.
//! Run with and without `--features grown`, which makes this host's API the newer one.

use gantry::mesh::Grid;
use gantry::plugin::{PluginFile, PluginSet};
use gantry::train::team::TeamSpec;
use gantry_plugin_api::abi::hello::{API_MINOR, LAYOUT_1_0};
use gantry_plugin_api::abi::load::read_hello;
use gantry_plugin_api::abi::tables::LAYOUT_HASH;
use gantry_plugin_api::plan::{AxisSetting, AxisState, MicroBatchInfo, Stage};
use gantry_tests::layouts::{batch, hybrid, spec, train, worst};
use gantry_tests::plugins::{build_workspace, file_name, fixture};
use gantry_tests::test_host::TestHost;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A plugin built against the frozen API 1.0.
fn frozen(name: &str) -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build_workspace("tests/frozen", "frozen", &[])).join(file_name(name))
}

/// The well-behaved plugin built against API 1.1, using what is new in it.
fn newer() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let arguments = ["--package", "elastic-test", "--features", "elastic-test/grown"];
    BUILT.get_or_init(|| build_workspace("tests/plugins", "newer", &arguments)).join(file_name("elastic-test"))
}

fn load(path: &Path) -> PluginSet {
    let mut set = PluginSet::default();
    set.add_file(&PluginFile { allow_writable: true, ..PluginFile::new(path) }).unwrap();
    set
}

/// What the tiny model records in this host.
fn recorded(set: &PluginSet) -> Vec<String> {
    let provider = set.provider("tiny", &json!({"layers": 2})).unwrap();
    let plan = provider.plan().unwrap();
    let mut host = TestHost::new(&plan);
    provider.build(&Stage { begin: 0, end: plan.blocks.len() }).unwrap().forward(&mut host).unwrap();
    host.lines
}

#[test]
fn a_plugin_of_1_0_works_in_this_host() {
    let path = frozen("elastic-test");
    let hello = read_hello(&path).unwrap();
    assert_eq!((hello.api, hello.layout_hash), ((1, 0), LAYOUT_1_0));
    let (old, new) = (load(&path), load(&fixture("elastic-test")));
    assert_eq!(recorded(&old), recorded(&new));
    let setting = AxisSetting { axis: "ffn".into(), layer: None, state: AxisState::Hard { n: 4, gain: 0.5 } };
    let mut elastic = old.elastifier("scripted", &json!({"settings": [setting]})).unwrap();
    let info = MicroBatchInfo::new(1, 0, 0, 1, true);
    assert_eq!(elastic.begin_micro_batch(&info).unwrap(), [setting]);
}

#[test]
fn its_errors_and_panics_cross_as_ever() {
    let set = load(&frozen("elastic-test"));
    let e = set.provider("tiny", &json!({"layer": 2})).map(drop).unwrap_err().to_string();
    assert_eq!(e, "tiny: config: unknown key \"layer\"; did you mean \"layers\"?");
    let provider = set.provider("tiny", &json!({"layers": 2})).unwrap();
    let mut host = TestHost::new(&provider.plan().unwrap());
    host.panic_at = Some("fc1".into());
    let e = provider.build(&Stage { begin: 0, end: 4 }).unwrap().forward(&mut host).unwrap_err().to_string();
    assert!(e.starts_with("tiny: panicked in the host: a bug in the host at fc1 ("), "{e}");
}

#[test]
fn a_provider_of_the_product_built_against_1_0_loads() {
    let set = load(&frozen("nemotron-hybrid"));
    assert!(set.plugins()[0].providers.iter().any(|p| p.name == "nemotron-hybrid"));
    let e = set.provider("nemotron-hybrid", &json!({"no_such_key": 1})).map(drop).unwrap_err().to_string();
    assert!(e.contains("no_such_key"), "{e}");
}

/// Recording is all a provider does, so a run must not differ in a single bit.
#[test]
fn a_run_of_the_hybrid_built_against_1_0_is_the_run_of_today() {
    let today = spec("nemotron-hybrid", hybrid(), Grid { tp: 2, sequence_parallel: true, ..Grid::SINGLE });
    let old = TeamSpec { plugins: load(&frozen("nemotron-hybrid")), ..today.clone() };
    let [old, today] = [old, today].map(|spec| train(&spec, 1, 2, batch, |_| Ok(())).unwrap_or_else(|e| panic!("{e}")));
    assert!(!today.tensors.is_empty());
    assert_eq!(worst(&today, &old), (0.0, "nothing".into()));
}

/// Numbers of the reference, through the provider built against the frozen API. With `--features grown` the host's own
/// API is a newer one.
#[test]
fn goldens_hold_through_a_provider_built_against_1_0() {
    let plugins = load(&frozen("nemotron-hybrid"));
    let checked = gantry_tests::goldens::hybrid::check_all(&gantry_tests::goldens::folder(), &plugins);
    assert!(checked.unwrap_or_else(|e| panic!("{e}")) >= 2);
}

#[test]
fn a_plugin_newer_than_the_host_works_and_hears_what_is_missing() {
    let path = newer();
    let hello = read_hello(&path).unwrap();
    assert_eq!(hello.api, (1, 1));
    assert_eq!(hello.layout_hash == LAYOUT_HASH, cfg!(feature = "grown"));
    let lines = recorded(&load(&path));
    let said: Vec<&String> = lines.iter().filter(|l| l.starts_with("log ")).collect();
    let expect = if cfg!(feature = "grown") {
        "log Info tiny: 14 values recorded"
    } else {
        "log Info tiny: this host has no function \"recorded\"; it came with plugin API 1.1"
    };
    assert_eq!(said, [expect]);
    assert_eq!(API_MINOR, u32::from(cfg!(feature = "grown")));
}

#[cfg(feature = "grown")]
#[test]
fn a_host_that_has_grown_sees_what_an_older_plugin_lacks() {
    assert!(load(&frozen("elastic-test")).plugins()[0].about().is_none());
    let about = load(&newer()).plugins()[0].about().unwrap().unwrap();
    assert!(about.contains("elastic-test 0.1.0"), "{about}");
}

#[test]
fn a_plugin_file_is_replaced_by_a_newer_build_under_a_host_that_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(file_name("elastic-test"));
    std::fs::copy(fixture("elastic-test"), &path).unwrap();
    let before = recorded(&load(&path));
    assert_eq!(in_another_process(&path), before);
    let beside = folder.path().join("beside");
    std::fs::copy(newer(), &beside).unwrap();
    std::fs::rename(&beside, &path).unwrap();
    let after = in_another_process(&path);
    assert_eq!(after.len(), before.len() + 1, "the newer build logs a line more");
    // A process that has the older one keeps it: libraries are never unloaded.
    assert_eq!(recorded(&load(&path)), before);
}

const PLUGIN: &str = "GANTRY_TEST_PLUGIN";

/// What the tiny model of this file records in a fresh process of this same program.
fn in_another_process(path: &Path) -> Vec<String> {
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--ignored", "--exact", "child", "--nocapture"]).env(PLUGIN, path);
    let output = child.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter_map(|line| line.strip_prefix("recorded: ")).map(String::from).collect()
}

#[test]
#[ignore = "the child of another test"]
fn child() {
    let path = std::env::var_os(PLUGIN).expect("set by the parent");
    recorded(&load(Path::new(&path))).iter().for_each(|line| println!("recorded: {line}"));
}
