//! A masked parent and a slice of it are one model: same logits, same gradients, whatever is narrowed.
//!
//! Random choices over every axis of both providers, per layer where the axis allows it. A choice whose routing differs
//! because two scores tie to rounding is dropped and counted.

use gantry::data::Batch;
use gantry::mesh::Grid;
use gantry::model::ParamTable;
use gantry::train::rank::Elastic;
use gantry::train::sums::StepSums;
use gantry::train::team::{Kind, Team};
use gantry_kernels::philox::Stream;
use gantry_plugin_api::plan::{AxisSetting, AxisState, ModelPlan, Stage};
use gantry_tests::layouts::{Trace, batch, collect, dense, hybrid, relative_l2, spec};
use rstest::rstest;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

const COMBINATIONS: u64 = 100;
const TOLERANCE: f64 = 1e-10;

/// Smallest and step of the widths an axis may take: groups must divide heads, and experts must be enough for top-k.
fn widths(plan: &ModelPlan, axis: usize) -> Vec<usize> {
    let axis = &plan.axes[axis];
    let groups = axis.group.as_ref().map_or(1, |g| plan.axes.iter().find(|a| &a.name == g).unwrap().size);
    let least = if axis.name == "experts" { 2 } else { 1 };
    (least..=axis.size).filter(|n| n % groups == 0).collect()
}

/// Random widths: each axis (on each layer, if it may differ) is left alone or narrowed; each layer may be left out.
fn choose(plan: &ModelPlan, combination: u64) -> Vec<(String, Option<usize>, usize)> {
    let random = Stream::new(99, 0, combination as u32);
    let mut draws = 0;
    let mut draw = |n: usize| {
        draws += 1;
        ((random.uniform(draws) * n as f64) as usize).min(n - 1)
    };
    let layers: Vec<usize> = plan.blocks.iter().filter_map(|b| b.layer).collect();
    let mut chosen = Vec::new();
    for (index, axis) in plan.axes.iter().enumerate().filter(|(_, a)| a.elastic) {
        let widths = widths(plan, index);
        let places: Vec<Option<usize>> =
            if axis.per_layer { layers.iter().map(|&l| Some(l)).collect() } else { vec![None] };
        for layer in places {
            if draw(3) > 0 {
                chosen.push((axis.name.clone(), layer, widths[draw(widths.len())]));
            }
        }
    }
    for &layer in &layers {
        if draw(6) == 0 {
            chosen.push(("depth".into(), Some(layer), 0));
        }
    }
    chosen
}

fn settings(chosen: &[(String, Option<usize>, usize)], hard: bool) -> Vec<AxisSetting> {
    chosen
        .iter()
        .map(|(axis, layer, n)| AxisSetting {
            axis: axis.clone(),
            layer: *layer,
            state: if hard { AxisState::Hard { n: *n, gain: 1.0 } } else { AxisState::Slice { n: *n } },
        })
        .collect()
}

struct Outcome {
    logits: Vec<f64>,
    sums: StepSums,
    gradients: BTreeMap<String, Vec<f64>>,
}

fn run(team: &Team<f64>, settings: Vec<AxisSetting>, batch: &Arc<Batch>) -> Outcome {
    let batch = batch.clone();
    let mut results = team
        .all(move |rank| {
            rank.elastic = Elastic::Fixed(settings.clone());
            let sums = rank.gradients(1, &[(0, batch.clone())])?;
            let logits = rank.logits(&batch)?.unwrap_or_default();
            Ok((sums, logits))
        })
        .unwrap_or_else(|e| panic!("{e}"));
    let mut trace = Trace::default();
    collect(team, Kind::Grads, &mut trace).unwrap();
    let (sums, logits) = results.swap_remove(0);
    Outcome { logits, sums, gradients: trace.tensors }
}

/// Largest error over logits and gradients, with its name. Gradients are compared with the largest of the tensor's kind
/// in mind: a tensor that takes none on both sides agrees.
fn worst(a: &Outcome, b: &Outcome) -> (f64, String) {
    let mut worst = (relative_l2(&a.logits, &b.logits), "logits".to_string());
    for (name, grad) in &a.gradients {
        let error = relative_l2(grad, &b.gradients[name]);
        if error > worst.0 {
            worst = (error, name.clone());
        }
    }
    worst
}

fn config(provider: &str) -> Value {
    if provider == "dense-gpt" { dense() } else { hybrid() }
}

#[rstest]
fn hard_masks_equal_slices(#[values("nemotron-hybrid", "dense-gpt")] provider: &str) {
    let team = Team::<f64>::start(&spec(provider, config(provider), Grid::SINGLE)).unwrap_or_else(|e| panic!("{e}"));
    // Nothing begins at zero or one, so that a mask that is missing shows on biases and scales too.
    team.all(|rank| {
        rank.params.iter_mut().enumerate().for_each(|(i, p)| *p += 0.02 * ((i % 7) as f64 - 3.0));
        Ok(())
    })
    .unwrap();
    let (mut largest, mut ties) = (0.0f64, 0);
    for combination in 0..COMBINATIONS {
        let chosen = choose(&team.plan, combination);
        let data = Arc::new(batch(combination, 0));
        let hard = run(&team, settings(&chosen, true), &data);
        let slice = run(&team, settings(&chosen, false), &data);
        if hard.sums.load_max_over_mean != slice.sums.load_max_over_mean && chosen.iter().all(|c| c.0 != "experts") {
            ties += 1;
            continue;
        }
        let (error, name) = worst(&hard, &slice);
        largest = largest.max(error);
        assert!(error < TOLERANCE, "combination {combination} {chosen:?}: {name} differs by {error:e}");
    }
    println!("{provider}: {COMBINATIONS} combinations, largest error {largest:.1e}, {ties} dropped for routing ties");
    assert!(ties <= 5, "{ties} combinations were dropped");
}

/// A slice state computes what a model built at the small sizes computes with the cut parameters.
#[rstest]
#[case("nemotron-hybrid", json!({
    "hidden_size": 10, "mamba_num_heads": 4, "num_attention_heads": 2, "ffn_hidden_size": 7, "num_moe_experts": 4,
    "moe_ffn_hidden_size": 5, "moe_shared_expert_intermediate_size": 3,
}))]
#[case("dense-gpt", json!({"hidden_size": 10, "num_attention_heads": 2, "ffn_hidden_size": 7}))]
fn slices_equal_small_models(#[case] provider: &str, #[case] sizes: Value) {
    let parent = Team::<f64>::start(&spec(provider, config(provider), Grid::SINGLE)).unwrap();
    let mut small_config = config(provider);
    for (key, value) in sizes.as_object().unwrap() {
        small_config[key] = value.clone();
    }
    let small = Team::<f64>::start(&spec(provider, small_config, Grid::SINGLE)).unwrap();
    let mut chosen = Vec::new();
    for (large, narrow) in parent.plan.axes.iter().zip(&small.plan.axes) {
        assert_eq!(large.name, narrow.name);
        if large.size != narrow.size {
            let layers = parent.plan.blocks.iter().filter_map(|b| b.layer.map(Some));
            let places: Vec<Option<usize>> = if large.per_layer { layers.collect() } else { vec![None] };
            chosen.extend(places.into_iter().map(|layer| (large.name.clone(), layer, narrow.size)));
        }
    }
    assert!(chosen.len() >= 3, "the sizes narrow axes: {chosen:?}");
    copy_cut(&parent, &small);
    let data = Arc::new(batch(3, 0));
    let sliced = run(&parent, settings(&chosen, false), &data);
    let built = run(&small, Vec::new(), &data);
    let error = relative_l2(&sliced.logits, &built.logits);
    assert!(error < TOLERANCE, "logits differ by {error:e}");
    let hard = run(&parent, settings(&chosen, true), &data);
    let error = relative_l2(&hard.logits, &built.logits);
    assert!(error < TOLERANCE, "masked logits differ by {error:e}");
    let norm = |o: &Outcome| o.gradients.values().flatten().map(|g| g * g).sum::<f64>().sqrt();
    assert!((norm(&sliced) / norm(&built) - 1.0).abs() < TOLERANCE, "gradient norms differ");
}

/// Gives the small model the leading units of the parent's parameters.
fn copy_cut(parent: &Team<f64>, small: &Team<f64>) {
    let table = |plan: &ModelPlan| {
        let stage = Stage { begin: 0, end: plan.blocks.len() };
        ParamTable::new(plan, &stage, Grid::SINGLE, Grid::SINGLE.place(0)).unwrap()
    };
    let (from, to) = (table(&parent.plan), table(&small.plan));
    let values: Vec<Vec<f64>> = parent.all(|rank| Ok(rank.params.clone())).unwrap();
    for (large, narrow) in from.params.iter().zip(&to.params) {
        // Positions of the leading units in the parent's storage, dimension by dimension.
        let mut at = vec![0usize];
        for (large_dim, narrow_dim) in large.stored.dims.iter().zip(&narrow.stored.dims) {
            let mut here = Vec::new();
            let mut start = 0;
            for (l, n) in large_dim.segs.iter().zip(&narrow_dim.segs) {
                here.extend(start..start + n.size());
                start += l.size();
            }
            at = at.iter().flat_map(|&base| here.iter().map(move |&i| base * start + i)).collect();
        }
        let stored: Vec<f64> = at.iter().map(|&i| values[0][large.stored.offset + i]).collect();
        let mut logical = vec![0.0; stored.len()];
        narrow.stored.logical_indices().zip(&stored).for_each(|(i, &x)| logical[i] = x);
        small.scatter(Kind::Params, narrow.plan, logical).unwrap();
    }
}

/// Axis states mean the same on every layout.
#[rstest]
fn states_hold_on_spread_ranks(
    #[values("nemotron-hybrid", "dense-gpt")] provider: &str,
    #[values(false, true)] sequence_parallel: bool,
) {
    let grid = Grid { tp: 2, sequence_parallel, ..Grid::SINGLE };
    let one = Team::<f64>::start(&spec(provider, config(provider), Grid::SINGLE)).unwrap();
    let two = Team::<f64>::start(&spec(provider, config(provider), grid)).unwrap();
    for combination in 0..12 {
        let mut chosen = choose(&one.plan, combination);
        // Halves of the widths on each rank: every rank keeps at least one unit.
        chosen.retain(|c| c.2 != 1);
        let data = Arc::new(batch(combination, 0));
        for hard in [true, false] {
            let (a, b) = (run(&one, settings(&chosen, hard), &data), run(&two, settings(&chosen, hard), &data));
            let loss = (a.sums.objective - b.sums.objective).abs() / a.sums.objective.abs();
            assert!(loss < TOLERANCE, "combination {combination} {chosen:?}, hard {hard}: objective by {loss:e}");
            for (name, grad) in &a.gradients {
                let error = relative_l2(grad, &b.gradients[name]);
                assert!(error < 1e-9, "combination {combination} {chosen:?}, hard {hard}: {name} by {error:e}");
            }
        }
    }
}

/// A mixture with all its weight on one choice is that choice.
#[rstest]
fn a_certain_mixture_is_a_hard_choice(#[values("nemotron-hybrid", "dense-gpt")] provider: &str) {
    let team = Team::<f64>::start(&spec(provider, config(provider), Grid::SINGLE)).unwrap();
    for combination in 0..12 {
        let chosen: Vec<_> = choose(&team.plan, combination).into_iter().filter(|c| c.0 != "depth").collect();
        let soft = chosen
            .iter()
            .map(|(axis, layer, n)| {
                let size = team.plan.axes.iter().find(|a| &a.name == axis).unwrap().size;
                let state = AxisState::Soft { choices: vec![size, *n], p: vec![0.0, 1.0] };
                AxisSetting { axis: axis.clone(), layer: *layer, state }
            })
            .collect();
        let data = Arc::new(batch(combination, 0));
        let (hard, soft) = (run(&team, settings(&chosen, true), &data), run(&team, soft, &data));
        let error = relative_l2(&hard.logits, &soft.logits);
        assert!(error < TOLERANCE, "combination {combination} {chosen:?}: logits differ by {error:e}");
    }
}
