//! What a step minimises and what it changes besides the parameters.

use gantry::data::Batch;
use gantry::mesh::Grid;
use gantry_tests::layouts::{TOKENS, Trace, batch, dense, hybrid, spec, train, worst};
use serde_json::json;

/// Micro-batch `index` with many or few tokens that count.
fn uneven(step: u64, index: usize) -> Batch {
    let mut batch = batch(step, index);
    let counted = [5, 21, 1, 13][index];
    batch.loss_mask.iter_mut().enumerate().for_each(|(i, m)| *m = if i < counted { 1.0 } else { 0.0 });
    batch
}

/// All micro-batches as one.
fn joined(step: u64) -> Batch {
    let mut all = uneven(step, 0);
    for index in 1..4 {
        let Batch { tokens, labels, loss_mask, cu_seqlens, .. } = uneven(step, index);
        let t = (index * TOKENS) as i32;
        all.tokens.extend(tokens);
        all.labels.extend(labels);
        all.loss_mask.extend(loss_mask);
        all.cu_seqlens.extend(cu_seqlens[1..].iter().map(|&end| end + t));
    }
    all
}

/// The objective is the sum of losses over the number of tokens that count in the whole step: cut into micro-batches and
/// over data-parallel ranks or not at all, the step is the same. A mean of means would weigh 5 tokens like 21.
#[test]
fn every_token_of_a_step_weighs_the_same() {
    let run = |grid: Grid, parts: usize, batch: &dyn Fn(u64, usize) -> Batch| -> Trace {
        train(&spec("dense-gpt", dense(), grid), 2, parts, batch, |_| Ok(())).unwrap_or_else(|e| panic!("{e}"))
    };
    let one = run(Grid::SINGLE, 1, &|step, _| joined(step));
    for grid in [Grid::SINGLE, Grid { dp: 2, ..Grid::SINGLE }, Grid { pp: 3, ..Grid::SINGLE }] {
        let (error, name) = worst(&one, &run(grid, 4, &uneven));
        assert!(error < 1e-9, "{grid:?}: {name} differs by {error:e}");
    }
    let tokens = one.numbers.iter().find(|(name, _)| name == "step 1 tokens").unwrap().1;
    assert_eq!(tokens, 40.0);
}

/// A router with both an expert bias and a share of the load has them from the same counts.
#[test]
fn expert_bias_and_load_share_follow_one_load() {
    let mut config = hybrid();
    config["moe_router_bias_update_rate"] = json!(0.25);
    for grid in [Grid::SINGLE, Grid { tp: 2, sequence_parallel: true, ..Grid::SINGLE }, Grid { dp: 2, ..Grid::SINGLE }]
    {
        let trace = train(&spec("nemotron-hybrid", config.clone(), grid), 1, 4, batch, |_| Ok(())).unwrap();
        let of = |end: &str| trace.tensors.iter().find(|(name, _)| name.ends_with(end)).unwrap().1;
        let (bias, share) = (of("router.expert_bias"), of("router.load_share"));
        assert!((share.iter().sum::<f64>() - 1.0).abs() < 1e-12, "{share:?}");
        let mean = 1.0 / share.len() as f64;
        // An expert with less than its part is helped; one with exactly its part stays.
        let gap = |share: &f64| if (mean - share).abs() < 1e-12 { 0.0 } else { (mean - share).signum() };
        assert_eq!(*bias, share.iter().map(|share| 0.25 * gap(share)).collect::<Vec<_>>(), "{share:?}");
        assert!(bias.iter().any(|b| *b > 0.0) && bias.iter().any(|b| *b < 0.0), "{bias:?}");
        let load = trace.numbers.iter().find(|(name, _)| name == "step 1 load").unwrap().1;
        let largest = share.iter().copied().fold(0.0, f64::max);
        assert!((load - largest / mean).abs() < 1e-9, "{load}");
    }
}
