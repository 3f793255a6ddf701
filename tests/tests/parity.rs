//! One recipe, any layout, same numbers: losses, norms, gradients, parameters and expert biases over three steps in f64,
//! with gradient accumulation, packed documents, all MoE losses and expert bias.

use gantry::mesh::Grid;
use gantry_tests::layouts::{Trace, batch, dense, hybrid, spec, train, worst};
use rstest::rstest;
use serde_json::Value;
use std::sync::OnceLock;

const MICRO_BATCHES: usize = 4;
const STEPS: u64 = 3;
const TOLERANCE: f64 = 1e-9;

fn run(provider: &str, config: Value, grid: Grid) -> Trace {
    train(&spec(provider, config, grid), STEPS, MICRO_BATCHES, batch, |_| Ok(())).unwrap_or_else(|e| panic!("{e}"))
}

fn one_rank(provider: &str) -> &'static Trace {
    static HYBRID: OnceLock<Trace> = OnceLock::new();
    static DENSE: OnceLock<Trace> = OnceLock::new();
    match provider {
        "dense-gpt" => DENSE.get_or_init(|| run(provider, dense(), Grid::SINGLE)),
        _ => HYBRID.get_or_init(|| run(provider, hybrid(), Grid::SINGLE)),
    }
}

#[rstest]
#[case::dp2(Grid { dp: 2, ..Grid::SINGLE })]
#[case::tp2(Grid { tp: 2, ..Grid::SINGLE })]
#[case::tp2_sequence_parallel(Grid { tp: 2, sequence_parallel: true, ..Grid::SINGLE })]
#[case::pp2(Grid { pp: 2, ..Grid::SINGLE })]
#[case::tp2_pp2_dp2(Grid { tp: 2, pp: 2, dp: 2, sequence_parallel: false })]
#[case::tp2_pp2_dp2_sequence_parallel(Grid { tp: 2, pp: 2, dp: 2, sequence_parallel: true })]
fn layouts_agree(#[case] grid: Grid, #[values("nemotron-hybrid", "dense-gpt")] provider: &str) {
    let config = if provider == "dense-gpt" { dense() } else { hybrid() };
    let (error, name) = worst(one_rank(provider), &run(provider, config, grid));
    println!("{provider} on {grid:?}: largest difference {error:.1e} in {name}");
    assert!(error < TOLERANCE, "{name} differs by {error:e}");
}

/// A tied weight takes the gradients of both its uses.
#[rstest]
#[case::tp2(Grid { tp: 2, ..Grid::SINGLE })]
#[case::tp2_sequence_parallel(Grid { tp: 2, sequence_parallel: true, ..Grid::SINGLE })]
#[case::dp2(Grid { dp: 2, ..Grid::SINGLE })]
fn tied_embeddings_agree(#[case] grid: Grid) {
    let mut config = dense();
    config["share_embeddings_and_output_weights"] = true.into();
    let one = run("dense-gpt", config.clone(), Grid::SINGLE);
    let (error, name) = worst(&one, &run("dense-gpt", config, grid));
    assert!(error < TOLERANCE, "{name} differs by {error:e}");
}

#[test]
fn the_reference_run_is_not_trivial() {
    let trace = one_rank("nemotron-hybrid");
    let number = |name: &str| trace.numbers.iter().find(|n| n.0 == name).unwrap().1;
    assert!(number("step 1 norm") > 0.5, "clipping must be active");
    assert!(number("step 3 loss") / number("step 3 tokens") < number("step 1 loss") / number("step 1 tokens"));
    assert!((number("step 1 objective") - number("step 1 loss") / number("step 1 tokens")).abs() > 1e-3);
    let bias = trace.tensors.iter().find(|t| t.0.contains("expert_bias")).expect("a router has a bias");
    assert!(bias.1.iter().any(|&b| b != 0.0));
    for (name, grad) in trace.tensors.iter().filter(|t| t.0.starts_with("grad.")) {
        assert!(grad.iter().any(|&g| g.abs() > 1e-9), "{name} has no gradient");
    }
}
