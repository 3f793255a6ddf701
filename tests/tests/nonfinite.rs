//! NaN and infinity in a step: the operator or parameter they come from is named, on every layout; a step left out changes
//! nothing.

use gantry::data::Batch;
use gantry::mesh::Grid;
use gantry::optim::update::StepHyper;
use gantry::program::graph::{Action, Space};
use gantry::train::diagnose::Found;
use gantry::train::rank::Rank;
use gantry::train::team::{Kind, Team, TeamSpec};
use gantry_kernels::{Args, Cost, Kernel};
use gantry_tests::layouts::{ADAM, batch, dense, hybrid, spec};
use rstest::rstest;
use serde_json::json;
use std::any::Any;
use std::sync::Arc;

const ONE: Grid = Grid::SINGLE;
const TP2: Grid = Grid { tp: 2, sequence_parallel: true, ..ONE };
const DP2: Grid = Grid { dp: 2, ..ONE };
const PP2: Grid = Grid { pp: 2, ..ONE };
const ALL: Grid = Grid { tp: 2, dp: 2, pp: 2, sequence_parallel: true };

/// A rank's micro-batches of step 1, of four in all.
fn share(rank: &Rank<f32>) -> Vec<(usize, Arc<Batch>)> {
    let mine = (0..4).filter(|i| i % rank.model.grid.dp == rank.model.place.dp);
    mine.map(|i| (i, Arc::new(batch(1, i)))).collect()
}

fn team(spec: &TeamSpec) -> Team<f32> {
    Team::start(spec).unwrap_or_else(|e| panic!("{e}"))
}

/// The earliest finding of all ranks in step 1.
fn diagnose(team: &Team<f32>) -> Option<Found> {
    let found = team.all(|rank| rank.diagnose(1, &share(rank))).unwrap_or_else(|e| panic!("{e}"));
    found.into_iter().flatten().min_by_key(|found| found.order)
}

/// Gives one element of every parameter whose name contains `name` a value, on the ranks that have it.
fn plant(team: &Team<f32>, name: &'static str, value: f32) {
    let planted = team.all(move |rank| {
        let entries = rank.model.table.params.iter().filter(|p| p.stored.name.contains(name));
        let at: Vec<usize> = entries.map(|p| p.stored.offset + p.stored.len / 2).collect();
        at.iter().for_each(|&at| rank.params[at] = value);
        Ok(at.len())
    });
    assert!(planted.unwrap().into_iter().sum::<usize>() > 0, "no parameter {name}");
}

/// Memory that nobody wrote, masks and statistics must not be taken for a fault.
#[rstest]
fn a_healthy_step_has_no_finding(#[values(ONE, TP2, PP2, ALL)] grid: Grid) {
    for recompute in [json!([]), json!(["mamba", "attention", "mlp", "moe"])] {
        let mut config = hybrid();
        config["recompute"] = recompute;
        let team = team(&spec("nemotron-hybrid", config, grid));
        // A broken step before it leaves NaN all over the memory that programs share.
        let sound = team.all(|rank| Ok(rank.params.clone())).unwrap();
        plant(&team, "embedding", f32::NAN);
        team.all(|rank| rank.gradients(1, &share(rank))).unwrap();
        team.all(move |rank| {
            rank.params.clone_from(&sound[rank.groups.world.rank()]);
            Ok(())
        })
        .unwrap();
        let found = diagnose(&team).map(|found| found.place("lm", 1));
        assert_eq!(found, None, "{grid:?}");
    }
}

#[rstest]
#[case("layers.0.mixer.in_proj.weight", "layers.0", "linear")]
#[case("layers.1.mlp.router.weight", "layers.1", "linear")]
#[case("layers.1.mlp.experts.linear_fc2.weight", "layers.1", "grouped_linear")]
#[case("layers.2.self_attention.linear_qkv.weight", "layers.2", "linear")]
#[case("layers.3.mlp.linear_fc2.bias", "layers.3", "")]
#[case("layers.0.mixer.A_log", "layers.0", "")]
fn a_planted_number_is_named_by_operator_and_parameter(
    #[case] name: &'static str,
    #[case] layer: &str,
    #[case] operator: &str,
    #[values(f32::NAN, f32::INFINITY)] value: f32,
    #[values(ONE, ALL)] grid: Grid,
) {
    let team = team(&spec("nemotron-hybrid", hybrid(), grid));
    plant(&team, name, value);
    let found = diagnose(&team).expect("the step is broken");
    assert!(found.parameter.as_deref().is_some_and(|p| p.contains(name)), "{found:?}");
    assert!(found.finding.path.contains(layer) && !found.order.1, "{found:?}");
    assert!(operator.is_empty() || found.finding.operator == operator, "{found:?}");
    assert!(!found.finding.value.is_finite());
}

#[test]
fn the_place_reads_as_a_sentence() {
    let team = team(&spec("dense-gpt", dense(), Grid { pp: 3, ..ONE }));
    plant(&team, "layers.1.mlp.linear_fc1.weight", f32::NAN);
    let place = diagnose(&team).unwrap().place("lm", 17);
    assert_eq!(
        place,
        "the output of lm.decoder.layers.1.linear_fc1 (linear), from parameter \
         lm.decoder.layers.1.mlp.linear_fc1.weight, rank 1, step 17, micro-batch 0"
    );
}

/// A kernel that adds an infinity to what it writes last.
#[derive(Debug)]
struct Spoiled(Arc<dyn Kernel>);

impl Kernel for Spoiled {
    fn name(&self) -> &'static str {
        self.0.name()
    }
    fn cost(&self) -> Cost {
        self.0.cost()
    }
    fn workspace(&self) -> usize {
        self.0.workspace()
    }
    fn run_f32(&self, args: Args<'_, f32>) {
        let Args { ins, outs, ints, int_outs, work } = args;
        let mut lent: Vec<&mut [f32]> = outs.iter_mut().map(|out| &mut **out).collect();
        let mut int_lent: Vec<&mut [i32]> = int_outs.iter_mut().map(|out| &mut **out).collect();
        self.0.run_f32(Args { ins, outs: &mut lent, ints, int_outs: &mut int_lent, work });
        if let Some(out) = outs.last_mut() {
            out[0] = f32::INFINITY;
        }
    }
    fn run_f64(&self, args: Args<'_, f64>) {
        self.0.run_f64(args)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Forward is sound, one backward kernel is not: the loss shows nothing, the norm does.
#[rstest]
fn a_broken_gradient_names_its_parameter(#[values(ONE, TP2, DP2, PP2)] grid: Grid) {
    let mut spec = spec("dense-gpt", dense(), grid);
    spec.tamper = Some(Arc::new(|graph, _| {
        let forward = graph.forward_steps;
        let path = |graph: &gantry::program::graph::Graph, at: usize| graph.step_path(&graph.steps[at]);
        let at = (forward..graph.steps.len()).find(|&at| {
            path(graph, at).contains("layers.2.linear_fc2")
                && matches!(&graph.steps[at].action, Action::Launch { outs, .. }
                    if outs.last().is_some_and(|o| graph.storages[o.storage.0 as usize].space == Space::Grad))
        });
        // Other stages do not have the layer.
        if let Some(at) = at
            && let Action::Launch { kernel, .. } = &mut graph.steps[at].action
        {
            *kernel = Arc::new(Spoiled(kernel.clone()));
        }
    }));
    let team = team(&spec);
    let reports = team.all(|rank| Ok((rank.gradients(1, &share(rank))?, rank.grad_norm(&ADAM)?))).unwrap();
    assert!(
        reports.iter().all(|(sums, norm)| sums.loss.is_finite() && sums.objective.is_finite() && !norm.is_finite())
    );
    let found = diagnose(&team).expect("a gradient is infinite");
    let name = "decoder.layers.2.mlp.linear_fc2.weight";
    assert_eq!(found.gradient.as_deref(), Some(name));
    assert!(
        found.place("lm", 1).starts_with(&format!("the gradient of lm.{name}, in the backward pass of lm.decoder"))
    );
    assert_eq!(found.finding.value, f64::INFINITY);
    // Only the parameter planted on is named, whatever the norm says of the others.
    let names = team.all(|rank| Ok(rank.nonfinite_gradient())).unwrap();
    assert!(names.iter().flatten().all(|(broken, _)| broken == name), "{names:?}");
}

/// Every bit of a team's state, rank by rank.
fn bits(team: &Team<f32>) -> Vec<Vec<u32>> {
    let of = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    let all = move |rank: &mut Rank<f32>| {
        let Rank { params, buffers, moments, .. } = rank;
        Ok([&*params, buffers, &moments.exp_avg, &moments.exp_avg_sq].into_iter().flat_map(|x| of(x)).collect())
    };
    team.all(all).unwrap()
}

/// An update by gradients that are not finite changes no bit, and neither does computing a step without updating.
#[rstest]
fn a_step_left_out_leaves_every_bit(#[values(ONE, ALL)] grid: Grid) {
    let team = team(&spec("nemotron-hybrid", hybrid(), grid));
    let step = |number: u64| StepHyper { lr: 0.02, weight_decay: 0.1, step: number };
    team.all(move |rank| {
        rank.gradients(1, &share(rank))?;
        rank.update(&ADAM, step(1))
    })
    .unwrap();
    let moved = bits(&team);
    assert!(team.gather(Kind::Buffers).flat_map(Result::unwrap).any(|t| t.data.into_f64().iter().any(|&x| x != 0.0)));
    team.all(|rank| Ok((rank.gradients(1, &share(rank))?, rank.grad_norm(&ADAM)?))).unwrap();
    diagnose(&team);
    assert_eq!(bits(&team), moved, "computing a step changes nothing");
    plant(&team, "layers.3.mlp.linear_fc1.weight", f32::NAN);
    let planted = bits(&team);
    let norms = team.all(move |rank| {
        rank.gradients(1, &share(rank))?;
        rank.update(&ADAM, step(2))
    });
    assert!(norms.unwrap().iter().all(|norm| !norm.is_finite()));
    assert_eq!(bits(&team), planted, "an update without a finite norm changes nothing");
}
