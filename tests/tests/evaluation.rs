//! Evaluation and logits beside training: the same numbers in every layout, nothing that training sees, no memory of their
//! own.

use gantry::data::Batch;
use gantry::mesh::Grid;
use gantry::optim::update::StepHyper;
use gantry::train::evaluate::LossSums;
use gantry::train::team::{Kind, Team};
use gantry_tests::layouts::{ADAM, TOKENS, Trace, batch, collect, dense, hybrid, spec, worst};
use rstest::rstest;
use std::sync::Arc;

const MICRO_BATCHES: usize = 4;

fn team(provider: &str, grid: Grid) -> Team<f64> {
    let config = if provider == "dense-gpt" { dense() } else { hybrid() };
    Team::start(&spec(provider, config, grid)).unwrap_or_else(|e| panic!("{e}"))
}

/// Three steps; before and after each of them whatever `beside` does. Returns everything training leaves.
fn train(team: &Team<f64>, beside: impl Fn(&Team<f64>)) -> Trace {
    let mut trace = Trace::default();
    for step in 1..=3 {
        beside(team);
        let batches: Arc<Vec<_>> = Arc::new((0..MICRO_BATCHES).map(|i| (i, Arc::new(batch(step, i)))).collect());
        let dp = team.grid.dp;
        let sums = team.all(move |rank| {
            let mine: Vec<_> = batches.iter().filter(|(i, _)| i % dp == rank.model.place.dp).cloned().collect();
            rank.gradients(step, &mine)
        });
        let sums = &sums.unwrap()[0];
        let norm =
            team.all(move |rank| rank.update(&ADAM, StepHyper { lr: 0.02, weight_decay: 0.1, step })).unwrap()[0];
        for (name, value) in [("loss", sums.loss), ("objective", sums.objective), ("norm", norm)] {
            trace.numbers.push((format!("step {step} {name}"), value));
        }
        beside(team);
    }
    for kind in [Kind::Params, Kind::Buffers, Kind::ExpAvg, Kind::ExpAvgSq] {
        collect(team, kind, &mut trace).unwrap();
    }
    trace
}

fn held_out(n: usize) -> Vec<Batch> {
    (0..n).map(|i| batch(99, i)).collect()
}

#[rstest]
#[case::one(Grid::SINGLE)]
#[case::tp2_sequence_parallel(Grid { tp: 2, sequence_parallel: true, ..Grid::SINGLE })]
#[case::dp2(Grid { dp: 2, ..Grid::SINGLE })]
#[case::pp2(Grid { pp: 2, ..Grid::SINGLE })]
fn training_does_not_see_evaluations(#[case] grid: Grid) {
    let without = train(&team("nemotron-hybrid", grid), |_| ());
    let beside = |team: &Team<f64>| {
        team.evaluate(5, held_out(3)).unwrap();
        team.next_logits(&[1, 2, 3], 8).unwrap();
    };
    let team = team("nemotron-hybrid", grid);
    let with = train(&team, beside);
    assert_eq!(worst(&with, &without).0, 0.0, "bit-identical");
    // One program each for training, evaluation and logits, and no more arenas than training alone has.
    let ranks = team.all(|rank| Ok((rank.model.place.dp, rank.programs(), rank.activation_bytes().1))).unwrap();
    for (dp, programs, arenas) in ranks {
        assert_eq!(programs, if dp == 0 { 3 } else { 2 });
        assert!(arenas <= grid.pp, "{arenas} arenas");
    }
}

#[rstest]
#[case::tp2(Grid { tp: 2, ..Grid::SINGLE })]
#[case::tp2_sequence_parallel(Grid { tp: 2, sequence_parallel: true, ..Grid::SINGLE })]
#[case::dp2(Grid { dp: 2, ..Grid::SINGLE })]
#[case::pp2(Grid { pp: 2, ..Grid::SINGLE })]
#[case::tp2_pp2_dp2(Grid { tp: 2, pp: 2, dp: 2, sequence_parallel: true })]
fn layouts_agree(#[case] grid: Grid, #[values("nemotron-hybrid", "dense-gpt")] provider: &str) {
    // An uneven share for two replicas, and more than a rank takes at a time.
    let number = 2 * gantry::train::evaluate::AT_ONCE + 3;
    let context: Vec<i32> = batch(7, 0).tokens[..11].to_vec();
    let numbers = |grid| {
        let team = team(provider, grid);
        (team.evaluate(1, held_out(number)).unwrap(), team.next_logits(&context, 16).unwrap())
    };
    let ((one, one_logits), (sums, logits)) = (numbers(Grid::SINGLE), numbers(grid));
    let masked: f64 = held_out(number).iter().flat_map(|b| &b.loss_mask).map(|&m| f64::from(m)).sum();
    assert_eq!((one.tokens, sums.tokens), (masked, masked));
    assert!((one.loss_sum - sums.loss_sum).abs() < 1e-9 * one.loss_sum, "{one:?} {sums:?}");
    assert_eq!((one_logits.len(), logits.len()), (32, 32));
    for (id, (a, b)) in one_logits.iter().zip(&logits).enumerate() {
        assert!((a - b).abs() < 1e-9, "token {id}: {a} {b}");
    }
}

/// Evaluation is the forward pass of training, and logits are those whose cross entropy it sums.
#[rstest]
fn numbers_are_those_of_training(#[values("nemotron-hybrid", "dense-gpt")] provider: &str) {
    let team = team(provider, Grid::SINGLE);
    let mut whole = batch(3, 1);
    whole.cu_seqlens = vec![0, TOKENS as i32, TOKENS as i32];
    let LossSums { loss_sum, tokens } = team.evaluate(1, vec![whole.clone()]).unwrap();
    let trained = Arc::new(vec![(0, Arc::new(whole.clone()))]);
    let sums = team.all(move |rank| rank.gradients(1, &trained)).unwrap().remove(0);
    assert!((sums.loss - loss_sum).abs() < 1e-12 * loss_sum, "{} {loss_sum}", sums.loss);
    assert_eq!(sums.tokens, tokens);
    // Whatever length the program has, and whatever stands behind the context.
    let mut sum = 0.0;
    for end in 1..=TOKENS {
        let logits = team.next_logits(&whole.tokens[..end], end.next_multiple_of(8)).unwrap();
        let longer = team.next_logits(&whole.tokens[..end], 32).unwrap();
        assert!(logits.iter().zip(&longer).all(|(a, b)| (a - b).abs() < 1e-12));
        let normaliser = logits.iter().map(|x| x.exp()).sum::<f64>().ln();
        sum += f64::from(whole.loss_mask[end - 1]) * (normaliser - logits[whole.labels[end - 1] as usize]);
    }
    assert!((sum - loss_sum).abs() < 1e-9 * sum, "{sum} {loss_sum}");
    let programs = team.all(|rank| Ok(rank.programs())).unwrap()[0];
    assert_eq!(programs, 2 + 4, "contexts of 8, 16, 24 and 32 tokens");
}

/// Tokens there are, of the 32 rows of a padded vocabulary.
const REAL: usize = 27;

/// Losses and norms of three steps, an evaluation and next-token logits.
fn padded(vocab_size: usize, limit: Option<usize>, grid: Grid) -> (Vec<f64>, Vec<f64>) {
    let config = json_with(dense(), "vocab_size", vocab_size);
    let team = Team::<f64>::start(&spec("dense-gpt", config, grid)).unwrap_or_else(|e| panic!("{e}"));
    if let Some(limit) = limit {
        team.all(move |rank| rank.limit_vocab(limit)).unwrap();
    }
    let known = |mut batch: Batch| {
        let clamp = |ids: &mut Vec<i32>| ids.iter_mut().for_each(|id| *id = (*id).min(REAL as i32 - 1));
        clamp(&mut batch.tokens);
        clamp(&mut batch.labels);
        batch
    };
    let mut numbers = Vec::new();
    for step in 1..=3 {
        let batches = Arc::new(vec![(0, Arc::new(known(batch(step, 0))))]);
        let sums = team.all(move |rank| rank.gradients(step, &batches)).unwrap();
        let hyper = StepHyper { lr: 0.02, weight_decay: 0.1, step };
        numbers.extend([sums[0].loss, team.all(move |rank| rank.update(&ADAM, hyper)).unwrap()[0]]);
    }
    numbers.push(team.evaluate(9, held_out(2).into_iter().map(known).collect()).unwrap().loss_sum);
    (numbers, team.next_logits(&[1, 2, 3], 8).unwrap())
}

fn json_with(mut config: serde_json::Value, key: &str, value: usize) -> serde_json::Value {
    config[key] = value.into();
    config
}

#[rstest]
#[case::one(Grid::SINGLE)]
#[case::tp2(Grid { tp: 2, ..Grid::SINGLE })]
#[case::tp2_sequence_parallel(Grid { tp: 2, sequence_parallel: true, ..Grid::SINGLE })]
#[case::pp2(Grid { pp: 2, ..Grid::SINGLE })]
fn a_padded_vocabulary_changes_nothing(#[case] grid: Grid) {
    let (expected, logits) = padded(REAL, None, Grid::SINGLE);
    let (numbers, padded_logits) = padded(32, Some(REAL), grid);
    let close = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-9 * b.abs().max(1.0));
    assert!(close(&numbers, &expected), "{numbers:?}\n{expected:?}");
    assert_eq!((logits.len(), padded_logits.len()), (REAL, 32));
    assert!(close(&padded_logits[..REAL], &logits));
    assert!(padded_logits[REAL..].iter().all(|&logit| logit == f64::NEG_INFINITY));
    // The padding would change all of it.
    assert!(!close(&padded(32, None, grid).0, &expected));
}
