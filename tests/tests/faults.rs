//! A parity test counts only if it catches a fault: each of these plants one and asks the comparison to see it.

use gantry::comm::Alone;
use gantry::data::Batch;
use gantry::error::Result;
use gantry::mesh::{Grid, Place};
use gantry::program::graph::{Action, Collective, Graph};
use gantry::train::record::Tamper;
use gantry::train::team::Team;
use gantry_kernels::cpu::mask_mul::MaskMul;
use gantry_plugin_api::plan::{AxisSetting, AxisState};
use gantry_tests::layouts::{Trace, batch, hybrid, spec, tamper, train, worst};
use rstest::rstest;
use std::sync::{Arc, OnceLock};

const MICRO_BATCHES: usize = 4;
/// Parity holds to 1e-9; a fault must be far above it.
const SEEN: f64 = 1e-6;

type Data = fn(u64, usize) -> Batch;
type Prepare = fn(&Team<f64>) -> Result<()>;

fn run(grid: Grid, fault: Option<Tamper>, data: Data, prepare: Prepare) -> Result<Trace> {
    let spec = gantry::train::team::TeamSpec { tamper: fault, ..spec("nemotron-hybrid", hybrid(), grid) };
    train(&spec, 2, MICRO_BATCHES, data, prepare)
}

fn truth() -> &'static Trace {
    static TRUTH: OnceLock<Trace> = OnceLock::new();
    TRUTH.get_or_init(|| run(Grid::SINGLE, None, batch, |_| Ok(())).unwrap_or_else(|e| panic!("{e}")))
}

/// Numbers of the steps that are collectives of a kind, in the forward or the backward pass.
fn collectives(g: &Graph, kind: Collective, backward: bool) -> Vec<usize> {
    let of = |i: &usize| matches!(&g.steps[*i].action, Action::Collective { kind: k, .. } if *k == kind);
    (0..g.steps.len()).filter(|i| (*i >= g.forward_steps) == backward).filter(of).collect()
}

/// Makes collective `i` keep this rank's own term: what forgetting the reduction does.
fn drop_all_reduce(g: &mut Graph, i: usize) {
    if let Action::Collective { len, .. } = &mut g.steps[i].action {
        *len = 0;
    }
}

const TP2: Grid = Grid { tp: 2, dp: 1, pp: 1, sequence_parallel: false };
const TP2_SP: Grid = Grid { sequence_parallel: true, ..TP2 };
const DP2: Grid = Grid { dp: 2, ..Grid::SINGLE };
const PP2: Grid = Grid { pp: 2, ..Grid::SINGLE };

fn nothing(_: &mut Graph, _: Place) {}

fn forward_reduction(g: &mut Graph, _: Place) {
    let first = collectives(g, Collective::AllReduce, false)[0];
    drop_all_reduce(g, first);
}

fn backward_reduction(g: &mut Graph, _: Place) {
    let all = collectives(g, Collective::AllReduce, true);
    drop_all_reduce(g, all[all.len() / 2]);
}

fn norm_gradient_reduction(g: &mut Graph, _: Place) {
    g.partial_grads.iter_mut().for_each(|partial| *partial = false);
}

fn twice_reduced(g: &mut Graph, _: Place) {
    let full = g.full_grads.clone();
    g.partial_grads.resize(full.len(), false);
    g.partial_grads.iter_mut().zip(full).for_each(|(partial, full)| *partial |= full);
}

fn lost_auxiliary_loss(g: &mut Graph, place: Place) {
    if place.dp == 1 {
        g.losses.retain(|term| &*term.name == "lm_loss");
    }
}

fn reversed_scatter(g: &mut Graph, _: Place) {
    // The rank's part is taken from the wrong end: swapped group order.
    for i in collectives(g, Collective::ReduceScatter, false).into_iter().take(1) {
        if let Action::Collective { src, len, .. } = &mut g.steps[i].action {
            src.offset += *len / 2;
            *len -= *len / 2;
        }
    }
}

fn swapped_heads(g: &mut Graph, place: Place) {
    if place.tp == 1 {
        let a_log = g.values.iter().position(|v| v.name.ends_with("A_log")).map(|i| g.values[i].storage);
        let d = g.values.iter().position(|v| v.name.ends_with("mixer.D")).map(|i| g.values[i].storage);
        if let (Some(a), Some(d)) = (a_log, d) {
            let (fa, fd) = (g.storages[a.0 as usize].fixed, g.storages[d.0 as usize].fixed);
            g.storages[a.0 as usize].fixed = fd;
            g.storages[d.0 as usize].fixed = fa;
        }
    }
}

fn counted_padding(step: u64, index: usize) -> Batch {
    let mut batch = batch(step, index);
    if index == 1 {
        batch.loss_mask.fill(1.0);
    }
    batch
}

fn leaking_documents(step: u64, index: usize) -> Batch {
    let mut batch = batch(step, index);
    if index == 2 {
        let end = batch.cu_seqlens[batch.cu_seqlens.len() - 1];
        batch.cu_seqlens[1..].fill(end);
    }
    batch
}

fn no_data_parallel_reduction(team: &Team<f64>) -> Result<()> {
    team.all(|rank| {
        rank.groups.dp = Box::new(Alone);
        Ok(())
    })
    .map(drop)
}

fn one_gradient_scaled(team: &Team<f64>) -> Result<()> {
    team.all(|rank| {
        if rank.model.place.pp == 1 {
            rank.params.iter_mut().take(8).for_each(|p| *p *= 1.001);
        }
        Ok(())
    })
    .map(drop)
}

fn stale_bias(team: &Team<f64>) -> Result<()> {
    team.all(|rank| {
        rank.buffers.iter_mut().for_each(|b| *b += 0.01);
        Ok(())
    })
    .map(drop)
}

fn clean(_: &Team<f64>) -> Result<()> {
    Ok(())
}

#[rstest]
#[case::dropped_reduction_forward(TP2, forward_reduction, batch, clean)]
#[case::dropped_reduction_backward(TP2, backward_reduction, batch, clean)]
#[case::dropped_reduction_of_norm_gradients(TP2_SP, norm_gradient_reduction, batch, clean)]
#[case::doubled_reduction(TP2_SP, twice_reduced, batch, clean)]
#[case::swapped_heads(TP2, swapped_heads, batch, clean)]
#[case::swapped_rows_of_a_scatter(TP2_SP, reversed_scatter, batch, clean)]
#[case::auxiliary_loss_lost_on_a_rank(DP2, lost_auxiliary_loss, batch, clean)]
#[case::double_counted_padding(DP2, nothing, counted_padding, clean)]
#[case::documents_that_leak(DP2, nothing, leaking_documents, clean)]
#[case::no_reduction_over_data_parallel_ranks(DP2, nothing, batch, no_data_parallel_reduction)]
#[case::wrong_scale_on_a_stage(PP2, nothing, batch, one_gradient_scaled)]
#[case::stale_expert_bias(DP2, nothing, batch, stale_bias)]
fn planted_faults_are_seen(
    #[case] grid: Grid,
    #[case] fault: fn(&mut Graph, Place),
    #[case] data: Data,
    #[case] prepare: Prepare,
) {
    let clean_run = run(grid, None, batch, clean).unwrap_or_else(|e| panic!("{e}"));
    assert!(worst(truth(), &clean_run).0 < 1e-9, "without the fault the runs agree");
    match run(grid, tamper(fault), data, prepare) {
        Err(e) => println!("seen as an error: {}", e.sentence),
        Ok(trace) => {
            let (error, name) = worst(truth(), &trace);
            println!("seen in {name}: {error:.1e}");
            assert!(error > SEEN, "the fault went unseen: largest difference {error:e} in {name}");
        }
    }
}

/// A channel that the mask forgets shows in the comparison of masked and sliced models.
#[test]
fn an_unmasked_channel_is_seen() {
    let settings = |hard: bool| {
        ["hidden", "ffn", "mamba_heads"]
            .map(|axis| AxisSetting {
                axis: axis.into(),
                layer: None,
                state: if hard { AxisState::Hard { n: 8, gain: 1.0 } } else { AxisState::Slice { n: 8 } },
            })
            .into_iter()
            .filter(|s| s.axis != "mamba_heads")
            .collect::<Vec<_>>()
    };
    let forget: fn(&mut Graph, Place) = |g, _| {
        let masked = g.steps.iter_mut().find_map(|step| match &mut step.action {
            Action::Launch { kernel, .. } if kernel.as_any().is::<MaskMul>() => Some(kernel),
            _ => None,
        });
        if let Some(kernel) = masked
            && let Some(mul) = kernel.as_any().downcast_ref::<MaskMul>()
        {
            let mut segments = mul.segments.clone();
            segments.iter_mut().for_each(|s| s.mask = None);
            *kernel = Arc::new(MaskMul { segments, ..mul.clone() });
        }
    };
    let logits = |settings: Vec<AxisSetting>, fault: Option<Tamper>| {
        let spec = gantry::train::team::TeamSpec { tamper: fault, ..spec("nemotron-hybrid", hybrid(), Grid::SINGLE) };
        let team = Team::<f64>::start(&spec).unwrap();
        team.all(move |rank| {
            rank.elastic = gantry::train::rank::Elastic::Fixed(settings.clone());
            rank.logits(&batch(1, 0))
        })
        .unwrap()
        .remove(0)
        .unwrap()
    };
    let sliced = logits(settings(false), None);
    let masked = logits(settings(true), None);
    assert!(gantry_tests::layouts::relative_l2(&sliced, &masked) < 1e-10);
    let faulty = logits(settings(true), tamper(forget));
    assert!(gantry_tests::layouts::relative_l2(&sliced, &faulty) > SEEN);
}
