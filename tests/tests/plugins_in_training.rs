//! Plugins under a real team of ranks: one that misbehaves ends the run on every rank with a sentence, and an operator
//! that a plugin brings trains the same on any layout.

use gantry::failure::Failure;
use gantry::mesh::Grid;
use gantry::plugin::{PluginFile, PluginSet};
use gantry::train::team::{ElasticSpec, TeamSpec};
use gantry_tests::layouts::{Trace, batch, spec, train, worst};
use gantry_tests::plugins::fixture;
use rstest::rstest;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// A rank that waits for one that is gone waits this long.
const TIMEOUT: Duration = Duration::from_secs(90);

const TP2: Grid = Grid { tp: 2, dp: 1, pp: 1, sequence_parallel: false };
const TP2_SP: Grid = Grid { sequence_parallel: true, ..TP2 };
const DP2: Grid = Grid { dp: 2, ..Grid::SINGLE };

fn run(plugin: &str, provider: &str, config: Value, grid: Grid) -> Result<Trace, Failure> {
    let mut plugins = PluginSet::default();
    plugins.add_file(&PluginFile { allow_writable: true, ..PluginFile::new(fixture(plugin)) })?;
    let spec = TeamSpec { plugins, provider: provider.into(), config, ..spec_without_plugins(grid) };
    train(&spec, 2, 2, batch, |_| Ok(()))
}

fn spec_without_plugins(grid: Grid) -> TeamSpec {
    TeamSpec { timeout: TIMEOUT, ..spec("dense-gpt", json!({}), grid) }
}

#[rstest]
#[case("create_panic", "panicked in create: asked to panic in create (")]
#[case("plan_panic", "panicked in plan: asked to panic in plan (")]
#[case("build_panic", "panicked in build: asked to panic in build (")]
#[case("forward_panic", "panicked in forward: asked to panic in forward, round 0 (")]
#[case("region_panic", "panicked in forward: asked to panic in a region (")]
#[case("forward_error", "asked to fail in forward")]
#[case("wrong_shape", "features of x and columns of the weight: hidden 8 does not fit ffn 16")]
#[case("wrong_split", "split into 3 parts, but the last dimension has 1")]
#[case("unknown_operator", "this host has no operator number 999999")]
#[case("unknown_parameter", "99")]
#[case("kept_tensor", "belongs to another recording")]
#[case("kept_cx", "a Cx of an earlier call was used")]
#[case("foreign_tensor", "belongs to another recording (or another rank)")]
#[case("foreign_cx", "a host function was called")]
#[case("other_thread", "a host function was called from another thread")]
#[case("impure", "forward is not pure: recorded twice with the same inputs")]
#[case("endless", "does forward loop without end?")]
#[case("nan_init", "parameter embedding.weight: init: std is NaN")]
#[case("unknown_axis", "uses axis \"hiden\", which the plan does not declare")]
#[case("no_output", "delivered nothing to its output port \"logits\"")]
fn misbehaviour_ends_the_run_on_every_rank(#[case] how: &str, #[case] sentence: &str) {
    let begin = Instant::now();
    for grid in [Grid::SINGLE, TP2, DP2] {
        let e = run("misbehave", "misbehave", json!({"how": how}), grid).map(drop).unwrap_err();
        assert!(e.sentence.contains(sentence), "{grid:?}: {e}");
        assert_eq!(e.exit_status(), 3, "{e}");
    }
    assert!(begin.elapsed() < TIMEOUT, "no rank may wait for one that is gone");
}

#[rstest]
#[case("module_drop_panic")]
#[case("provider_drop_panic")]
#[case("log_from_thread")]
#[case("straggling_thread")]
#[case("sleep")]
#[case("behave")]
fn what_is_only_untidy_does_not_end_a_run(#[case] how: &str) {
    let good = run("misbehave", "misbehave", json!({"how": "behave"}), Grid::SINGLE).unwrap();
    let untidy = run("misbehave", "misbehave", json!({"how": how}), TP2).unwrap();
    let (error, name) = worst(&good, &untidy);
    assert!(error < 1e-9, "{name} differs by {error:e}");
}

#[rstest]
#[case(TP2)]
#[case(TP2_SP)]
#[case(DP2)]
fn an_operator_of_a_plugin_trains_the_same_on_any_layout(#[case] grid: Grid) {
    let config =
        |softcap: Value| json!({"layers": 2, "hidden": 8, "ffn": 12, "vocab": 32, "init_std": 0.4, "softcap": softcap});
    let tiny = |softcap, grid| run("elastic-test", "tiny", config(softcap), grid).unwrap_or_else(|e| panic!("{e}"));
    let one = tiny(json!(0.8), Grid::SINGLE);
    let (error, name) = worst(&one, &tiny(json!(0.8), grid));
    assert!(error < 1e-9, "{name} differs by {error:e} on {grid:?}");
    // The operator does something, and its weight is trained.
    let another = tiny(json!(0.5), Grid::SINGLE);
    assert!(worst(&one, &another).0 > 1e-3);
    let grad = &one.tensors["grad.softcap.weight"];
    assert!(grad.len() == 8 && grad.iter().all(|g| g.is_finite() && *g != 0.0), "{grad:?}");
}

#[test]
fn an_elastifier_of_a_plugin_sets_the_widths_of_a_run() {
    let run = |elastic: ElasticSpec, grid| {
        let mut plugins = PluginSet::default();
        plugins.add_file(&PluginFile { allow_writable: true, ..PluginFile::new(fixture("elastic-test")) })?;
        let config = json!({"layers": 2, "hidden": 8, "ffn": 12, "vocab": 32, "init_std": 0.4});
        let spec = TeamSpec { plugins, provider: "tiny".into(), config, elastic, ..spec_without_plugins(grid) };
        train(&spec, 2, 2, batch, |_| Ok(()))
    };
    let scripted = |config| ElasticSpec::Plugin { provider: "scripted".into(), config };
    let hard = json!([{"axis": "ffn", "layer": 1, "state": {"hard": {"n": 4, "gain": 1.0}}}]);
    let slice = json!([{"axis": "ffn", "layer": 1, "state": {"slice": {"n": 4}}}]);
    let full = run(ElasticSpec::Off, Grid::SINGLE).unwrap();
    let masked = run(scripted(json!({"settings": hard})), Grid::SINGLE).unwrap();
    let fixed = serde_json::from_value(hard.clone()).unwrap();
    assert_eq!(worst(&masked, &run(ElasticSpec::Fixed(fixed), Grid::SINGLE).unwrap()).0, 0.0);
    assert!(worst(&full, &masked).0 > 1e-3);
    for (config, grid) in [(&slice, Grid::SINGLE), (&slice, TP2_SP), (&hard, DP2)] {
        let (error, name) = worst(&masked, &run(scripted(json!({"settings": config})), grid).unwrap());
        assert!(error < 1e-9, "{name} differs by {error:e} on {grid:?}");
    }
    // One micro-batch full, the next narrow: neither of the runs above.
    let mixed = run(scripted(json!({"per_micro_batch": [[], hard]})), Grid::SINGLE).unwrap();
    assert!(worst(&full, &mixed).0 > 1e-3 && worst(&masked, &mixed).0 > 1e-3);
    let unknown = json!({"settings": [{"axis": "vocab", "state": {"slice": {"n": 4}}}]});
    let e = run(scripted(unknown), TP2).map(drop).unwrap_err();
    assert!(e.sentence.contains("scripted: the target has no elastic axis \"vocab\""), "{e}");
    assert_eq!(e.exit_status(), 2);
}
