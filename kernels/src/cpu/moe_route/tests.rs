use super::*;
use crate::cpu::check::{Call, finite_differences, normal, relative_l2};
use rstest::rstest;

const SCORES: [Score; 3] = [Score::Sigmoid, Score::Softmax, Score::SoftmaxSelected];

fn shape(score: Score) -> RouteShape {
    let elastic = score != Score::SoftmaxSelected;
    RouteShape { tokens: 9, experts: 7, active: 6, k: 3, ld: 8, score, normalize: true, scaling: 2.5, elastic }
}

fn forward(kernel: &RouteForward, logits: &[f64], bias: &[f64], q: &[f64], mask: &[i32]) -> Call {
    let s = &kernel.shape;
    let mut ins = vec![logits.to_vec()];
    ins.extend(kernel.bias.then(|| bias.to_vec()));
    ins.extend(s.elastic.then(|| q.to_vec()));
    let n = s.tokens * s.k;
    let int_outs = vec![vec![99; n], vec![10; s.experts]];
    let mut call = Call { ins, outs: vec![vec![9.0; n]], ints: vec![mask.to_vec()], int_outs };
    call.run(kernel);
    call
}

/// Indices and probabilities of one token by sorting.
fn naive(s: &RouteShape, logits: &[f64], bias: &[f64], q: &[f64]) -> (Vec<i32>, Vec<f64>) {
    let l = &logits[..s.active];
    let total: f64 = l.iter().map(|x| x.exp()).sum();
    let score: Vec<f64> = (0..s.active)
        .map(|e| match s.score {
            Score::Sigmoid => q[e] / (1.0 + (-l[e]).exp()),
            Score::Softmax => q[e] * l[e].exp() / total,
            Score::SoftmaxSelected => l[e],
        })
        .collect();
    let mut order: Vec<usize> = (0..s.active).collect();
    order.sort_by(|&a, &b| (score[b] + bias[b] * q[b]).total_cmp(&(score[a] + bias[a] * q[a])));
    order.truncate(s.k);
    let weight = |e: usize| if s.score == Score::SoftmaxSelected { l[e].exp() } else { score[e] };
    let sum: f64 = order.iter().map(|&e| weight(e)).sum();
    let norm = if s.normalize || s.score == Score::SoftmaxSelected { sum } else { 1.0 };
    (order.iter().map(|&e| e as i32).collect(), order.iter().map(|&e| weight(e) / norm * s.scaling).collect())
}

fn weights(s: &RouteShape) -> (Vec<f64>, Vec<f64>) {
    let bias: Vec<f64> = normal(11, s.experts).iter().map(|x| 0.3 * x).collect();
    let q = if s.elastic { vec![1.0, 0.9, 0.8, 0.7, 0.3, 0.2, 0.1] } else { vec![1.0; s.experts] };
    (bias, q)
}

#[rstest]
fn chooses_and_weighs(#[values(0, 1, 2)] score: usize, #[values(true, false)] normalize: bool) {
    let s = RouteShape { normalize, ..shape(SCORES[score]) };
    let (bias, q) = weights(&s);
    let logits = normal(1, s.tokens * s.ld);
    let kernel = RouteForward { shape: s, bias: true, mask: true, capacity: None, acc_counts: true };
    let mask = [0, 0, 1, 0, 0, 0, 0, 1, 0];
    let call = forward(&kernel, &logits, &bias, &q, &mask);
    let mut counts = vec![10; s.experts];
    for t in 0..s.tokens {
        let (indices, probs) = naive(&s, &logits[t * s.ld..], &bias, &q);
        assert_eq!(call.int_outs[0][t * 3..][..3], indices, "token {t}");
        assert!(relative_l2(&call.outs[0][t * 3..][..3], &probs) < 1e-14, "token {t}");
        indices.iter().filter(|_| mask[t] == 0).for_each(|&e| counts[e as usize] += 1);
    }
    assert_eq!(call.int_outs[1], counts);
    assert!(relative_l2(&call.run_f32(&kernel)[0], &call.outs[0]) < 1e-6);
    let fresh = forward(&RouteForward { acc_counts: false, mask: false, ..kernel }, &logits, &bias, &q, &mask);
    assert_eq!(fresh.int_outs[1].iter().sum::<i32>(), 27);
    assert_eq!(fresh.int_outs[1][6], 0, "an inactive expert was chosen");
}

#[test]
fn ties_take_the_lower_index() {
    let s = RouteShape { tokens: 1, elastic: false, active: 7, ..shape(Score::Sigmoid) };
    let kernel = RouteForward { shape: s, bias: false, mask: false, capacity: None, acc_counts: false };
    let call = forward(&kernel, &[0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0], &[], &[], &[]);
    assert_eq!(call.int_outs[0], [1, 3, 5]);
    let call = forward(&kernel, &[f64::NAN; 7], &[], &[], &[]);
    assert_eq!(call.int_outs[0], [0, 1, 2], "indices stay valid whatever the logits");
}

#[test]
fn capacity_keeps_the_largest_probabilities() {
    let s = RouteShape { tokens: 5, experts: 3, active: 3, k: 1, ld: 3, ..shape(Score::Sigmoid) };
    let s = RouteShape { elastic: false, normalize: false, scaling: 1.0, ..s };
    let mut logits = vec![-9.0; 15];
    for (t, l) in [1.0, 3.0, 2.0, 3.0, 2.0].into_iter().enumerate() {
        logits[t * 3 + 1] = l;
    }
    let route = |capacity| {
        let kernel = RouteForward { shape: s, bias: false, mask: false, capacity: Some(capacity), acc_counts: false };
        let call = forward(&kernel, &logits, &[], &[], &[]);
        let kept: Vec<bool> = call.outs[0].iter().map(|p| *p > 0.0).collect();
        assert_eq!(kept, call.int_outs[0].iter().map(|i| *i == 1).collect::<Vec<_>>());
        (call.int_outs[0].clone(), call.int_outs[1].clone())
    };
    assert_eq!(route(3), (vec![-2, 1, 1, 1, -2], vec![0, 3, 0]));
    assert_eq!(route(1), (vec![-2, 1, -2, -2, -2], vec![0, 1, 0]));
    assert_eq!(route(0), (vec![-2; 5], vec![0; 3]));
    assert_eq!(route(9), (vec![1; 5], vec![0, 5, 0]));
}

#[rstest]
fn backward_is_the_derivative(
    #[values(0, 1, 2)] score: usize,
    #[values(true, false)] normalize: bool,
    #[values(None, Some(3))] capacity: Option<usize>,
) {
    let s = RouteShape { normalize, ..shape(SCORES[score]) };
    let (bias, q) = weights(&s);
    let (logits, up) = (normal(1, s.tokens * s.ld), normal(2, s.tokens * s.k));
    let kernel = RouteForward { shape: s, bias: true, mask: false, capacity, acc_counts: false };
    let call = forward(&kernel, &logits, &bias, &q, &[]);
    assert_eq!(call.int_outs[0].iter().any(|i| *i < 0), capacity.is_some());
    let mut ins = vec![logits.clone(), up.clone()];
    ins.extend(s.elastic.then(|| q.clone()));
    let mut back = Call { ins, ints: vec![call.int_outs[0].clone()], ..Default::default() };
    back.outs = vec![vec![0.5; s.tokens * 9 - 2], vec![2.0; s.experts]];
    let kernel_b = RouteBackward { shape: s, ld_d: 9, acc: false };
    let mut added = back.clone();
    back.run(&kernel_b);
    added.run(&RouteBackward { acc: true, ..kernel_b.clone() });
    let mut grad = vec![0.0; logits.len()];
    for t in 0..s.tokens {
        grad[t * s.ld..][..s.experts].copy_from_slice(&back.outs[0][t * 9..][..s.experts]);
        for e in 0..s.experts {
            assert!((added.outs[0][t * 9 + e] - back.outs[0][t * 9 + e] - 0.5).abs() < 1e-14);
        }
    }
    assert_eq!(back.outs[0][7], 0.5, "wrote beside its columns");
    let loss = |logits: &[f64], q: &[f64]| -> f64 {
        forward(&kernel, logits, &bias, q, &[]).outs[0].iter().zip(&up).map(|(p, u)| p * u).sum()
    };
    finite_differences("dlogits", &logits, &grad, 1e-7, |x| loss(x, &q));
    if s.elastic {
        let d_q: Vec<f64> = back.outs[1].iter().map(|d| d - 2.0).collect();
        finite_differences("dq", &q, &d_q, 1e-7, |x| loss(&logits, x));
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let s = RouteShape { tokens: 2000, ..shape(Score::Softmax) };
    let (bias, q) = weights(&s);
    let (logits, up) = (normal(1, s.tokens * s.ld), normal(2, s.tokens * s.k));
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let kernel = RouteForward { shape: s, bias: true, mask: false, capacity: Some(900), acc_counts: false };
            let call = forward(&kernel, &logits, &bias, &q, &[]);
            let ins = vec![logits.clone(), up.clone(), q.clone()];
            let mut back = Call { ins, ints: vec![call.int_outs[0].clone()], ..Default::default() };
            back.outs = vec![vec![0.0; s.tokens * 8], vec![0.0; s.experts]];
            back.run(&RouteBackward { shape: s, ld_d: 8, acc: false });
            let shape = losses(Score::Sigmoid, false);
            let shape = RouterLossShape { tokens: 2000, ..shape };
            let stats = stats(shape, &logits, &[0, 2000], &[]);
            (call.outs.clone(), call.int_outs.clone(), back.outs, stats)
        })
    };
    assert_eq!(on(1), on(3));
}

const CU: [i32; 6] = [0, 1, 90, 90, 150, 150];
const COEFFICIENTS: [f64; 3] = [0.7, 0.4, 0.2];

fn losses(score: Score, per_sequence: bool) -> RouterLossShape {
    let sequences = per_sequence.then_some(5);
    RouterLossShape {
        tokens: 150,
        experts: 6,
        active: 5,
        k: 2,
        ld: 7,
        score,
        sequences,
        mean_length: false,
        mask: false,
    }
}

fn stats(s: RouterLossShape, logits: &[f64], cu: &[i32], mask: &[i32]) -> Vec<f64> {
    let outs = vec![vec![9.0; s.groups() * s.width()]];
    let mut call =
        Call { ins: vec![logits.to_vec()], ints: vec![cu.to_vec(), mask.to_vec()], outs, ..Default::default() };
    call.run(&RouterStats { shape: s }).outs[0].clone()
}

fn loss_of(s: RouterLossShape, stats: &[f64]) -> Vec<Vec<f64>> {
    let mut call = Call { ins: vec![stats.to_vec()], outs: vec![vec![0.0], vec![0.0; 3]], ..Default::default() };
    call.run(&RouterLoss { shape: s, coefficients: COEFFICIENTS }).outs.clone()
}

fn masked(s: RouterLossShape, on: bool) -> (RouterLossShape, Vec<i32>) {
    (RouterLossShape { mask: on, ..s }, (0..150).map(|t| i32::from(on && t % 4 == 2)).collect())
}

/// Balance of the tokens `keep` by the formula, and the sum of logsumexp^2.
fn balance(s: &RouterLossShape, logits: &[f64], keep: &[usize]) -> (f64, f64) {
    let (mut n_sum, mut r_sum, mut z) = (vec![0.0; s.active], vec![0.0; s.active], 0.0);
    for &t in keep {
        let l = &logits[t * s.ld..][..s.active];
        let raw: Vec<f64> =
            l.iter().map(|x| if s.score == Score::Sigmoid { 1.0 / (1.0 + (-x).exp()) } else { x.exp() }).collect();
        let total: f64 = raw.iter().sum();
        let mut order: Vec<usize> = (0..s.active).collect();
        order.sort_by(|&a, &b| raw[b].total_cmp(&raw[a]));
        order[..s.k].iter().for_each(|&e| r_sum[e] += 1.0);
        (0..s.active).for_each(|e| n_sum[e] += raw[e] / total);
        z += l.iter().map(|x| x.exp()).sum::<f64>().ln().powi(2);
    }
    let t = keep.len() as f64;
    let sum: f64 = n_sum.iter().zip(&r_sum).map(|(n, r)| n * r).sum();
    (s.active as f64 / (s.k as f64 * t * t) * sum, z)
}

#[rstest]
fn losses_are_the_formulas(
    #[values(0, 1)] score: usize,
    #[values(true, false)] mask_on: bool,
    #[values(true, false)] mean_length: bool,
) {
    let (s, mask) = masked(losses(SCORES[score], true), mask_on);
    let s = RouterLossShape { mean_length, ..s };
    let logits = normal(5, s.tokens * s.ld);
    let got = loss_of(s, &stats(s, &logits, &CU, &mask));
    let kept = |a: i32, b: i32| (a as usize..b as usize).filter(|&t| mask[t] == 0).collect::<Vec<_>>();
    let all = kept(0, 150);
    let (aux, z) = balance(&s, &logits, &all);
    let groups: Vec<Vec<usize>> = CU.windows(2).map(|w| kept(w[0], w[1])).filter(|g| !g.is_empty()).collect();
    let mean = all.len() as f64 / groups.len() as f64;
    let weight = |g: &[usize]| if mean_length { (g.len() as f64 / mean).powi(2) } else { 1.0 };
    let seq = groups.iter().map(|g| weight(g) * balance(&s, &logits, g).0).sum::<f64>() / groups.len() as f64;
    let expect = [aux, seq, z / all.len() as f64];
    assert!(relative_l2(&got[1], &expect) < 1e-13, "{:?} {expect:?}", got[1]);
    let total: f64 = expect.iter().zip(COEFFICIENTS).map(|(a, b)| a * b).sum();
    assert!((got[0][0] - total).abs() < 1e-12);
    let whole = RouterLossShape { sequences: None, ..s };
    let one = loss_of(whole, &stats(whole, &logits, &[0, 150], &mask));
    assert!(relative_l2(&one[1], &[aux, aux, expect[2]]) < 1e-13);
}

#[rstest]
fn loss_gradient_is_the_derivative(
    #[values(0, 1, 2)] score: usize,
    #[values(true, false)] per_sequence: bool,
    #[values(true, false)] mask_on: bool,
) {
    let (s, mask) = masked(losses(SCORES[score], per_sequence), mask_on);
    let s = RouterLossShape { mean_length: score == 1, ..s };
    let logits = normal(5, s.tokens * s.ld);
    let sums = stats(s, &logits, &CU, &mask);
    let back = |acc: bool| {
        let ins = vec![logits.clone(), sums.clone(), vec![-30.0]];
        let outs = vec![vec![0.5; s.tokens * 8 - 2]];
        let mut call = Call { ins, ints: vec![CU.to_vec(), mask.clone()], outs, ..Default::default() };
        call.run(&RouterLossBackward { shape: s, coefficients: COEFFICIENTS, ld_d: 8, acc }).outs[0].clone()
    };
    let (fresh, added) = (back(false), back(true));
    let mut grad = vec![0.0; logits.len()];
    for t in 0..s.tokens {
        grad[t * s.ld..][..s.experts].copy_from_slice(&fresh[t * 8..][..s.experts]);
        (0..s.experts).for_each(|e| assert!((added[t * 8 + e] - fresh[t * 8 + e] - 0.5).abs() < 1e-13));
    }
    assert_eq!(fresh[6], 0.5, "wrote beside its columns");
    finite_differences("dlogits", &logits, &grad, 1e-6, |x| -30.0 * loss_of(s, &stats(s, x, &CU, &mask))[0][0]);
}

#[test]
fn statistics_of_a_sequence_are_those_alone() {
    let s = losses(Score::Sigmoid, true);
    let logits = normal(5, s.tokens * s.ld);
    let packed = stats(s, &logits, &CU, &[]);
    for (g, w) in CU.windows(2).enumerate() {
        let alone = RouterLossShape { tokens: (w[1] - w[0]) as usize, sequences: Some(1), ..s };
        let one = stats(alone, &logits[w[0] as usize * s.ld..], &[0, w[1] - w[0]], &[]);
        assert_eq!(packed[g * s.width()..][..s.width()], one);
    }
    let none = RouterLossShape { tokens: 0, sequences: None, ..s };
    assert_eq!(loss_of(none, &stats(none, &[], &[0], &[])), [vec![0.0], vec![0.0; 3]]);
}

#[test]
fn bias_moves_towards_the_mean_load() {
    let counts = vec![vec![4, 0, 2, 2, 50]];
    let mut call = Call { ints: counts, outs: vec![vec![0.5, 0.0, -0.25, 1.0, 1.0]], ..Default::default() };
    call.run(&ExpertBiasUpdate { active: 4, rate: 0.125 });
    assert_eq!(call.outs[0], [0.375, 0.125, -0.25, 1.0, 1.0]);
    let mut call = Call { ins: vec![vec![1.0, 3.0]], outs: vec![vec![0.0, 0.0]], ..Default::default() };
    assert_eq!(call.run(&ExpertBiasUpdate { active: 2, rate: 1.0 }).outs[0], [1.0, -1.0]);
}

#[test]
fn sizes_are_checked() {
    assert!(shape(Score::Sigmoid).check().is_ok());
    assert!(RouteShape { active: 2, ..shape(Score::Sigmoid) }.check().is_err());
    assert!(RouteShape { active: 8, ..shape(Score::Sigmoid) }.check().is_err());
    assert!(RouteShape { elastic: true, ..shape(Score::SoftmaxSelected) }.check().is_err());
}
