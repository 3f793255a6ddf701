//! Training with the elastifier `flextron`: the router's gradient is the objective's slope, layouts agree, runs resume bit
//! for bit, and a checkpoint gives models of every budget.

use gantry::mesh::Grid;
use gantry::train::team::{ElasticSpec, Kind, Team, TeamSpec};
use gantry_kernels::philox::Stream;
use gantry_tests::layouts::{Trace, batch, dense, hybrid, spec, train, worst};
use gantry_tests::plugins::providers;
use gantry_tests::runs::{RECIPE, Runs};
use rstest::rstest;
use serde_json::{Value, json};
use std::sync::{Arc, OnceLock};

const MICRO_BATCHES: usize = 4;
const STEPS: u64 = 3;

/// Every axis of the models has choices; some differ from layer to layer, and layers may be dropped.
fn config(provider: &str) -> Value {
    let axes = match provider {
        "dense-gpt" => json!({
            "hidden": {"fractions": [1.0, 0.75, 0.5]}, "attention_heads": {"units": [4, 2], "per_layer": true},
            "ffn": {"units": [20, 12, 6]},
        }),
        _ => json!({
            "hidden": {"fractions": [1.0, 0.75, 0.5]}, "mamba_heads": {"units": [8, 4], "per_layer": true},
            "attention_heads": {"units": [4, 2]}, "ffn": {"units": [20, 12, 6]}, "experts": {"units": [6, 4]},
            "moe_ffn": {"units": [12, 8, 4], "per_layer": true}, "shared_ffn": {"units": [8, 4]},
        }),
    };
    json!({
        "budget_list": [0.9, 0.5, 0.7], "budget_probs": [1.0, 2.0, 1.0], "original_model_sample_prob": 0.3,
        "samples_per_budget": 2, "axes": axes, "layer_ranking": [2, 0],
        "router_inter_dim": 6, "router_std": 0.5, "lr_mult_router": 2.0,
        "linear_scaler_end": 3.0, "hard_sample_th": 0.6, "loss_alpha": 0.8, "tau_decay": 0.9,
    })
}

fn elastic(provider: &str, changes: &Value, grid: Grid) -> TeamSpec {
    let model = if provider == "dense-gpt" { dense() } else { hybrid() };
    let mut config = config(provider);
    changes.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
    TeamSpec {
        plugins: providers(&[provider, "flextron"]),
        elastic: ElasticSpec::Plugin { provider: "flextron".into(), config },
        ..spec(provider, model, grid)
    }
}

/// Tells the ranks of the run, as an engine does.
fn prepare(team: &Team<f64>) -> gantry::error::Result<()> {
    team.all(|rank| {
        rank.run = (STEPS, MICRO_BATCHES as u64);
        Ok(())
    })
    .map(drop)
}

fn run(spec: &TeamSpec) -> Trace {
    train(spec, STEPS, MICRO_BATCHES, batch, prepare).unwrap_or_else(|e| panic!("{e}"))
}

fn one_rank(provider: &str) -> &'static Trace {
    static HYBRID: OnceLock<Trace> = OnceLock::new();
    static DENSE: OnceLock<Trace> = OnceLock::new();
    let once = if provider == "dense-gpt" { &DENSE } else { &HYBRID };
    once.get_or_init(|| run(&elastic(provider, &json!({}), Grid::SINGLE)))
}

#[rstest]
#[case::dp2(Grid { dp: 2, ..Grid::SINGLE })]
#[case::tp2(Grid { tp: 2, ..Grid::SINGLE })]
#[case::tp2_sequence_parallel(Grid { tp: 2, sequence_parallel: true, ..Grid::SINGLE })]
#[case::pp2(Grid { pp: 2, ..Grid::SINGLE })]
#[case::tp2_pp2_dp2_sequence_parallel(Grid { tp: 2, pp: 2, dp: 2, sequence_parallel: true })]
fn layouts_agree(#[case] grid: Grid, #[values("nemotron-hybrid", "dense-gpt")] provider: &str) {
    let (error, name) = worst(one_rank(provider), &run(&elastic(provider, &json!({}), grid)));
    println!("{provider} on {grid:?}: largest difference {error:.1e} in {name}");
    assert!(error < 1e-9, "{name} differs by {error:e}");
}

#[rstest]
fn the_run_is_not_trivial(#[values("nemotron-hybrid", "dense-gpt")] provider: &str) {
    let trace = one_rank(provider);
    let gates: Vec<_> = trace.tensors.iter().filter(|t| t.0.starts_with("grad.elastifier.router.")).collect();
    assert_eq!(gates.len(), 2 * (config(provider)["axes"].as_object().unwrap().len() + 1));
    for (name, grad) in gates {
        assert!(grad.iter().any(|g| g.abs() > 1e-9), "{name} has no gradient");
    }
    let labels: std::collections::BTreeSet<&str> =
        trace.numbers.iter().filter_map(|(name, _)| name.split(" of ").nth(1)).collect();
    assert!(labels.len() >= 2, "budgets drawn: {labels:?}");
}

/// The objective after the router's weights moved by `h` times a fixed random direction, and its gradient in that direction.
fn objective(team: &Team<f64>, h: f64) -> (f64, f64) {
    let results = team.all(move |rank| {
        let direction = Stream::new(5, 0, 0);
        let nudge = |x: &mut Vec<f64>, by: f64| {
            x.iter_mut().enumerate().for_each(|(i, x)| *x += by * direction.normal(i as u64));
        };
        let router = rank.router.as_mut().unwrap();
        let before = router.params.clone();
        nudge(&mut router.params, h);
        let batches: Vec<_> = (0..MICRO_BATCHES).map(|i| (i, Arc::new(batch(2, i)))).collect();
        let sums = rank.gradients(2, &batches)?;
        let router = rank.router.as_mut().unwrap();
        router.params = before;
        let slope = router.grads.iter().enumerate().map(|(i, g)| g * direction.normal(i as u64)).sum::<f64>();
        Ok((sums.objective, slope))
    });
    results.unwrap_or_else(|e| panic!("{e}"))[0]
}

#[rstest]
#[case("nemotron-hybrid", json!({}))]
#[case("nemotron-hybrid", json!({"budget_type": "mem", "budget_list": [1e-5, 2e-5, 3e-5], "normalize_router_logits": "all"}))]
#[case("nemotron-hybrid", json!({"param_budget_target": "total", "normalize_router_logits": "layer_axes"}))]
#[case("nemotron-hybrid", json!({"original_model_sample_prob": 1.0}))]
#[case("dense-gpt", json!({"layer_ranking": []}))]
fn the_gradient_of_the_router_is_the_objectives_slope(#[case] provider: &str, #[case] changes: Value) {
    // All samples soft: a hard one has the gradient of another function, by intention.
    let mut changes = changes;
    changes["hard_sample_th"] = json!(1.0);
    // Norms take the mixture's ratio for their epsilon as a constant, so the epsilon must not count.
    let mut spec = elastic(provider, &changes, Grid::SINGLE);
    spec.config["layernorm_epsilon"] = json!(1e-12);
    if provider == "nemotron-hybrid" {
        spec.config["mamba_norm_epsilon"] = json!(1e-12);
    }
    let team = Team::<f64>::start(&spec).unwrap_or_else(|e| panic!("{e}"));
    prepare(&team).unwrap();
    let (value, slope) = objective(&team, 0.0);
    let central = |h: f64| (objective(&team, h).0 - objective(&team, -h).0) / (2.0 * h);
    let numeric = (4.0 * central(1e-5) - central(2e-5)) / 3.0;
    assert!(value.is_finite() && slope.abs() > 1e-4, "objective {value}, slope {slope}");
    let error = (slope - numeric).abs() / slope.abs();
    assert!(error < 1e-6, "slope {slope}, numeric {numeric}: {error:e}");
}

/// A frozen router gets no gradient and keeps its weights; the model trains.
#[test]
fn a_frozen_router_stays() {
    let trace = run(&elastic("dense-gpt", &json!({"freeze_router": true}), Grid::SINGLE));
    let routed = |prefix: &str| -> Vec<&Vec<f64>> {
        trace.tensors.iter().filter(|t| t.0.starts_with(prefix)).map(|t| t.1).collect()
    };
    assert!(routed("grad.elastifier.").iter().all(|grad| grad.iter().all(|g| *g == 0.0)));
    let team = Team::<f64>::start(&elastic("dense-gpt", &json!({}), Grid::SINGLE)).unwrap();
    let mut begun = Trace::default();
    gantry_tests::layouts::collect(&team, Kind::Router, &mut begun).unwrap();
    for (name, values) in begun.tensors {
        assert_eq!(trace.tensors[&name], values, "{name}");
    }
}

fn recipe() -> String {
    let elastify = "
    elastify:
      provider: flextron
      config:
        budget_list: [1.0, 0.7]
        original_model_sample_prob: 0.2
        samples_per_budget: 2
        axes:
          hidden: {units: [32, 24, 16]}
          mamba_heads: {units: [4, 2]}
          moe_ffn: {fractions: [1.0, 0.5]}
          experts: {units: [4, 2]}
        layer_ranking: [3]
        router_inter_dim: 16
        lr_mult_router: 10
        hard_sample_th: 0.9
data:";
    RECIPE.replacen("\ndata:", elastify, 1)
}

/// Metrics tell of budgets; a run cut in two is the run.
#[test]
fn runs_report_budgets_and_resume_bit_for_bit() {
    let runs = Runs::of(&recipe());
    runs.train("whole", "12", &[]);
    runs.train("cut", "6", &[]);
    runs.train("cut", "12", &["--resume", "auto"]);
    assert_eq!(runs.metrics("whole"), runs.metrics("cut"));
    assert_eq!(runs.hashes("whole", 12), runs.hashes("cut", 12));
    let metrics = runs.metrics("whole");
    let mut seen = std::collections::BTreeSet::new();
    for (i, line) in metrics.iter().enumerate() {
        assert!(line["budget_loss"].as_f64().unwrap() >= 0.0, "{line}");
        assert!((line["tau"].as_f64().unwrap() - 0.9999f64.powi(i as i32)).abs() < 1e-9, "{line}");
        let scaler = 1.0 + 9.0 * i as f64 / 4999.0;
        assert!((line["scaler"].as_f64().unwrap() - scaler).abs() < 1e-9, "{line}");
        let budgets = line["budgets"].as_object().unwrap();
        let of = |key: &str| budgets.values().map(|b| b[key].as_f64().unwrap()).collect::<Vec<f64>>();
        assert_eq!(of("micro_batches").iter().sum::<f64>(), 4.0);
        assert!(of("params").iter().all(|n| *n > 0.0) && of("lm_loss").iter().all(|l| *l > 0.0));
        seen.extend(budgets.keys().cloned());
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), ["0.7", "1.0"]);

    // The trained router cuts a plain model, which needs no elastifier.
    let checkpoint = format!("whole/checkpoints/{}", runs.latest("whole"));
    let cut = runs.gantry(&["slice", "--checkpoint", &checkpoint, "--budget", "0.7", "--out", "small", "--json"]);
    assert!(cut.status.success(), "{}", String::from_utf8_lossy(&cut.stderr));
    let report: Value = serde_json::from_slice(&cut.stdout).unwrap();
    let width = report["config"]["hidden_size"].as_u64().unwrap_or(32);
    assert!([32, 24, 16].contains(&width), "{report:#}");
    let evaluated = runs.gantry(&["eval", "small/recipe.yaml", "--checkpoint", "small", "--data", "r.yaml", "--json"]);
    let message = String::from_utf8_lossy(&evaluated.stderr).into_owned();
    // Bytes of a file are tokens this vocabulary does not have; that the model loads is what counts.
    assert!(evaluated.status.success() || message.contains("vocabulary has 64 tokens"), "{message}");
}
