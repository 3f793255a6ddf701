//! Learning from a frozen model: what is minimised, on any layout, and resumed.

use gantry::mesh::{Grid, Place};
use gantry::program::graph::{Action, Graph};
use gantry::program::ops::lm_loss::Divergence;
use gantry::train::record::{Distillation, Tamper};
use gantry::train::team::{Kind, TeacherSpec, Team, TeamSpec};
use gantry_kernels::cpu::kl::LinearKlBackward;
use gantry_tests::layouts::{Trace, batch, dense, hybrid, spec, tamper, train, worst};
use gantry_tests::runs::Runs;
use rstest::rstest;
use serde_json::Value;
use std::sync::OnceLock;

const MICRO_BATCHES: usize = 4;
const TOLERANCE: f64 = 1e-9;
const HOW: Distillation =
    Distillation { divergence: Divergence { temperature: 1.5, reverse: false }, scale: 0.7, skip_lm_loss: false };

/// A hybrid that learns from a model of another provider and another width.
fn taught(grid: Grid, distillation: Distillation) -> TeamSpec {
    let student = spec("nemotron-hybrid", hybrid(), grid);
    let mut config = dense();
    config["hidden_size"] = 12.into();
    let plugins = gantry_tests::plugins::providers(&["nemotron-hybrid", "dense-gpt"]);
    let teacher = TeacherSpec { provider: "dense-gpt".into(), config, distillation };
    TeamSpec { plugins, teacher: Some(teacher), ..student }
}

fn run(spec: &TeamSpec) -> Trace {
    train(spec, 3, MICRO_BATCHES, batch, |_| Ok(())).unwrap_or_else(|e| panic!("{e}"))
}

fn one_rank() -> &'static Trace {
    static ONE: OnceLock<Trace> = OnceLock::new();
    ONE.get_or_init(|| run(&taught(Grid::SINGLE, HOW)))
}

#[rstest]
#[case::dp2(Grid { dp: 2, ..Grid::SINGLE })]
#[case::tp2(Grid { tp: 2, ..Grid::SINGLE })]
#[case::tp2_sequence_parallel(Grid { tp: 2, sequence_parallel: true, ..Grid::SINGLE })]
#[case::pp2(Grid { pp: 2, ..Grid::SINGLE })]
#[case::tp2_pp2_dp2(Grid { tp: 2, pp: 2, dp: 2, sequence_parallel: true })]
fn layouts_agree(#[case] grid: Grid) {
    let (error, name) = worst(one_rank(), &run(&taught(grid, HOW)));
    println!("{grid:?}: largest difference {error:.1e} in {name}");
    assert!(error < TOLERANCE, "{name} differs by {error:e}");
}

fn no_gradient_on_a_rank(g: &mut Graph, place: Place) {
    if place.tp == 1 {
        let kernel = g.steps.iter().position(|step| match &step.action {
            Action::Launch { kernel, .. } => kernel.as_any().is::<LinearKlBackward>(),
            Action::Collective { .. } => false,
        });
        g.steps.remove(kernel.unwrap());
    }
}

fn lost_term(g: &mut Graph, place: Place) {
    if place.dp == 1 {
        g.losses.retain(|term| &*term.name != "kd_loss");
    }
}

fn other_scale(g: &mut Graph, place: Place) {
    if place.tp == 1 {
        for step in &mut g.steps {
            if let Action::Launch { kernel, .. } = &mut step.action
                && let Some(backward) = kernel.as_any().downcast_ref::<LinearKlBackward>()
            {
                let mut faulty = *backward;
                faulty.heads.temperature = 1.0;
                *kernel = std::sync::Arc::new(faulty);
            }
        }
    }
}

#[rstest]
#[case::no_gradient_on_a_rank(Grid { tp: 2, ..Grid::SINGLE }, no_gradient_on_a_rank)]
#[case::lost_term(Grid { dp: 2, ..Grid::SINGLE }, lost_term)]
#[case::other_temperature(Grid { tp: 2, ..Grid::SINGLE }, other_scale)]
fn planted_faults_are_seen(#[case] grid: Grid, #[case] fault: fn(&mut Graph, Place)) {
    let tampered: Option<Tamper> = tamper(fault);
    let (error, name) = worst(one_rank(), &run(&TeamSpec { tamper: tampered, ..taught(grid, HOW) }));
    assert!(error > 1e-6, "the fault went unseen: largest difference {error:e} in {name}");
}

/// Sums of a step over one micro-batch, and the largest gradient.
fn step(spec: &TeamSpec) -> (gantry::train::sums::StepSums, f64) {
    let team = Team::<f64>::start(spec).unwrap();
    let sums = team.all(|rank| rank.gradients(1, &[(0, std::sync::Arc::new(batch(1, 0)))])).unwrap().remove(0);
    let tensors = team.gather(Kind::Grads).flat_map(Result::unwrap);
    let largest = tensors.flat_map(|tensor| tensor.data.into_f64()).fold(0.0, |max: f64, g| max.max(g.abs()));
    (sums, largest)
}

#[test]
fn nothing_is_to_be_learnt_from_oneself() {
    let own = |skip_lm_loss| {
        let student = spec("dense-gpt", dense(), Grid::SINGLE);
        let distillation = Distillation { skip_lm_loss, ..HOW };
        let teacher = TeacherSpec { provider: "dense-gpt".into(), config: dense(), distillation };
        step(&TeamSpec { teacher: Some(teacher), ..student })
    };
    let (sums, largest) = own(true);
    assert!(sums.terms["kd_loss"].abs() < 1e-12 && largest < 1e-12, "{sums:?} {largest}");
    // The cross entropy is reported all the same, and minimised only if it is not skipped.
    assert!(sums.loss > 1.0 && sums.objective.abs() < 1e-12);
    let (sums, largest) = own(false);
    assert!((sums.objective - sums.loss / sums.tokens).abs() < 1e-12 && largest > 1e-3);
}

#[test]
fn the_objective_is_the_weighted_sum() {
    let (plain, _) = step(&spec("nemotron-hybrid", hybrid(), Grid::SINGLE));
    let (both, _) = step(&taught(Grid::SINGLE, HOW));
    let (twice, _) = step(&taught(Grid::SINGLE, Distillation { scale: 1.4, ..HOW }));
    let kd = both.terms["kd_loss"];
    assert!(kd > 1e-3 && (twice.terms["kd_loss"] - 2.0 * kd).abs() < 1e-12);
    assert!((both.objective - plain.objective - kd).abs() < 1e-12);
    assert_eq!(both.loss, plain.loss);
}

/// Trains a parent, then a student of it; the student's run ends the same when it is resumed, and learns.
#[test]
fn a_student_run_resumes_bit_for_bit_and_comes_nearer_to_its_teacher() {
    let runs = Runs::new();
    runs.train("parent", "40", &["--set", "train.steps=40"]);
    let student = ["--set", "modules.lm.teacher={load: parent}", "--set", "train.seed=5", "--set", "train.steps=40"];
    runs.train("whole", "40", &student);
    runs.train("parts", "18", &student);
    runs.train("parts", "40", &student);
    assert_eq!(runs.hashes("whole", 40), runs.hashes("parts", 40));
    let metrics = runs.metrics("whole");
    assert_eq!(metrics, runs.metrics("parts"));
    let kd = |line: &Value| line["kd_loss"].as_f64().unwrap();
    assert!(kd(&metrics[39]) < 0.5 * kd(&metrics[0]), "{} {}", metrics[0], metrics[39]);
    // With the divergence alone to be minimised, the objective is it and the auxiliary losses.
    let last = &metrics[39];
    let rest = last["loss"].as_f64().unwrap() - kd(last) - last["moe_aux_loss"].as_f64().unwrap();
    assert!(rest.abs() < 1e-6, "{last}");
}
