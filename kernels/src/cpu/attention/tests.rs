use super::*;
use crate::cpu::check::{Call, finite_differences, normal, relative_l2};
use rstest::rstest;

const CU: [i32; 7] = [0, 1, 70, 70, 75, 140, 140];
/// Even enough that the backward pass shares out whole sequences.
const EVEN: [i32; 8] = [0, 70, 140, 140, 215, 290, 291, 291];

fn shape(causal: bool, d: usize) -> AttentionShape {
    AttentionShape {
        tokens: 140,
        longest: 140,
        q_heads: 4,
        kv_heads: 2,
        head_dim: d,
        q_off: 3,
        k_off: 4 + 4 * d,
        v_off: 5 + 6 * d,
        ld: 8 * d + 7,
        ld_o: 4 * d + 2,
        causal,
        scale: 0.6 / (d as f64).sqrt(),
    }
}

fn forward(s: AttentionShape, qkv: &[f64], cu: &[i32]) -> Call {
    let outs = vec![vec![7.0; s.tokens * s.ld_o - 1], vec![7.0; s.tokens * s.q_heads]];
    let mut call = Call { ins: vec![qkv.to_vec()], outs, ints: vec![cu.to_vec()], ..Default::default() };
    call.run(&AttentionForward { shape: s });
    call
}

fn backward(s: AttentionShape, qkv: &[f64], d_o: &[f64], cu: &[i32], acc: bool, fill: f64) -> Call {
    let saved = forward(s, qkv, cu);
    let (ld_do, ld_dqkv) = (s.q_heads * s.head_dim + 1, s.ld + 2);
    let ins = vec![qkv.to_vec(), saved.outs[0].clone(), saved.outs[1].clone(), d_o.to_vec()];
    let outs = vec![vec![fill; s.tokens * ld_dqkv - 2]];
    let mut call = Call { ins, outs, ints: vec![cu.to_vec()], ..Default::default() };
    call.run(&AttentionBackward { shape: s, ld_do, ld_dqkv, acc });
    call
}

/// o and lse by the definition, one token and head at a time.
fn naive(s: AttentionShape, qkv: &[f64], cu: &[i32]) -> (Vec<f64>, Vec<f64>) {
    let d = s.head_dim;
    let (mut o, mut lse) = (vec![0.0; s.tokens * s.q_heads * d], vec![0.0; s.tokens * s.q_heads]);
    for w in cu.windows(2) {
        for t in w[0] as usize..w[1] as usize {
            for h in 0..s.q_heads {
                let g = h % s.kv_heads;
                let last = if s.causal { t + 1 } else { w[1] as usize };
                let score = |j: usize| {
                    let dot: f64 =
                        (0..d).map(|c| qkv[t * s.ld + s.q_off + h * d + c] * qkv[j * s.ld + s.k_off + g * d + c]).sum();
                    (dot * s.scale).exp()
                };
                let weights: Vec<f64> = (w[0] as usize..last).map(score).collect();
                let sum: f64 = weights.iter().sum();
                lse[t * s.q_heads + h] = sum.ln();
                for c in 0..d {
                    let value = |j: usize| qkv[(w[0] as usize + j) * s.ld + s.v_off + g * d + c];
                    o[(t * s.q_heads + h) * d + c] = weights.iter().enumerate().map(|(j, p)| p / sum * value(j)).sum();
                }
            }
        }
    }
    (o, lse)
}

fn dense(x: &[f64], rows: usize, ld: usize, off: usize, width: usize) -> Vec<f64> {
    (0..rows).flat_map(|t| x[t * ld + off..][..width].to_vec()).collect()
}

#[rstest]
fn forward_is_the_definition(#[values(true, false)] causal: bool, #[values(1, 6, 16, 33)] d: usize) {
    let s = shape(causal, d);
    let qkv = normal(1, s.tokens * s.ld);
    let call = forward(s, &qkv, &CU);
    let (o, lse) = naive(s, &qkv, &CU);
    assert!(relative_l2(&dense(&call.outs[0], s.tokens, s.ld_o, 0, 4 * d), &o) < 1e-13);
    assert!(relative_l2(&call.outs[1], &lse) < 1e-13);
    for t in 0..s.tokens - 1 {
        assert_eq!(call.outs[0][t * s.ld_o + 4 * d..][..2], [7.0; 2], "wrote beside its columns");
    }
    let narrow = call.run_f32(&AttentionForward { shape: s });
    assert!(relative_l2(&dense(&narrow[0], s.tokens, s.ld_o, 0, 4 * d), &o) < 1e-6);
}

#[test]
fn large_scores_stay_finite() {
    let mut s = shape(true, 16);
    s.scale = 300.0;
    let qkv = normal(1, s.tokens * s.ld);
    let o = forward(s, &qkv, &CU).run_f32(&AttentionForward { shape: s });
    assert!(o.iter().flatten().all(|x| x.is_finite()));
}

#[rstest]
fn backward_is_the_derivative(#[values(true, false)] causal: bool) {
    let d = 3;
    let cu = [0, 1, 1, 7, 10, 10];
    let s = AttentionShape { tokens: 10, ..shape(causal, d) };
    let qkv = normal(2, s.tokens * s.ld);
    let d_o = normal(3, s.tokens * (4 * d + 1));
    let grad = backward(s, &qkv, &d_o, &cu, false, 9.0);
    let ld = s.ld + 2;
    let mut dense_grad = vec![0.0; qkv.len()];
    for t in 0..s.tokens {
        for (off, width) in [(s.q_off, 4 * d), (s.k_off, 2 * d), (s.v_off, 2 * d)] {
            dense_grad[t * s.ld + off..][..width].copy_from_slice(&grad.outs[0][t * ld + off..][..width]);
        }
        assert_eq!(grad.outs[0][t * ld..][..3], [9.0; 3], "wrote beside its columns");
    }
    finite_differences("dqkv", &qkv, &dense_grad, 1e-7, |x| {
        let o = forward(s, x, &cu).outs[0].clone();
        let o = dense(&o, s.tokens, s.ld_o, 0, 4 * d);
        let w = dense(&d_o, s.tokens, 4 * d + 1, 0, 4 * d);
        o.iter().zip(&w).map(|(a, b)| a * b).sum()
    });
}

/// Gradients over many tiles, by the closed form on dense matrices of one head.
#[rstest]
fn backward_over_tiles(
    #[values(true, false)] causal: bool,
    #[values(5, 16)] d: usize,
    #[values(&CU[..], &EVEN[..])] cu: &[i32],
) {
    let s = AttentionShape { tokens: cu[cu.len() - 1] as usize, ..shape(causal, d) };
    let qkv = normal(2, s.tokens * s.ld);
    let d_o = normal(3, s.tokens * (4 * d + 1));
    let added = backward(s, &qkv, &d_o, cu, true, 0.5);
    let fresh = backward(s, &qkv, &d_o, cu, false, 0.0);
    let ld = s.ld + 2;
    let mut expect = vec![0.0; s.tokens * ld - 2];
    let (_, lse) = naive(s, &qkv, cu);
    let seq = |t: usize| cu.windows(2).position(|w| (w[0]..w[1]).contains(&(t as i32)));
    for h in 0..s.q_heads {
        let g = h % s.kv_heads;
        let (q, k, v) = (s.q_off + h * d, s.k_off + g * d, s.v_off + g * d);
        let dot = |i: usize, a: usize, j: usize, b: usize| -> f64 {
            (0..d).map(|c| qkv[i * s.ld + a + c] * qkv[j * s.ld + b + c]).sum()
        };
        for i in 0..s.tokens {
            let seen: Vec<usize> = (0..s.tokens).filter(|&j| seq(i) == seq(j) && (!causal || j <= i)).collect();
            let p: Vec<f64> = seen.iter().map(|&j| (dot(i, q, j, k) * s.scale - lse[i * 4 + h]).exp()).collect();
            let up = &d_o[i * (4 * d + 1) + h * d..][..d];
            let dp: Vec<f64> = seen.iter().map(|&j| (0..d).map(|c| up[c] * qkv[j * s.ld + v + c]).sum()).collect();
            let delta: f64 = p.iter().zip(&dp).map(|(a, b)| a * b).sum();
            for (n, &j) in seen.iter().enumerate() {
                let ds = p[n] * (dp[n] - delta) * s.scale;
                for c in 0..d {
                    expect[i * ld + q + c] += ds * qkv[j * s.ld + k + c];
                    expect[j * ld + k + c] += ds * qkv[i * s.ld + q + c];
                    expect[j * ld + v + c] += p[n] * up[c];
                }
            }
        }
    }
    for (off, width) in [(s.q_off, 4 * d), (s.k_off, 2 * d), (s.v_off, 2 * d)] {
        let want = dense(&expect, s.tokens, ld, off, width);
        assert!(relative_l2(&dense(&fresh.outs[0], s.tokens, ld, off, width), &want) < 1e-12);
        let shifted: Vec<f64> = want.iter().map(|x| x + 0.5).collect();
        assert!(relative_l2(&dense(&added.outs[0], s.tokens, ld, off, width), &shifted) < 1e-12);
    }
    let kernel = AttentionBackward { shape: s, ld_do: 4 * d + 1, ld_dqkv: ld, acc: false };
    let narrow = fresh.run_f32(&kernel);
    let want = dense(&expect, s.tokens, ld, s.k_off, 2 * d);
    assert!(relative_l2(&dense(&narrow[0], s.tokens, ld, s.k_off, 2 * d), &want) < 2e-6);
}

#[test]
fn packed_is_alone() {
    let s = shape(true, 16);
    let (qkv, d_o) = (normal(4, s.tokens * s.ld), normal(5, s.tokens * 65));
    let (packed, grads) = (forward(s, &qkv, &CU), backward(s, &qkv, &d_o, &CU, false, 0.0));
    for w in CU.windows(2).filter(|w| w[0] < w[1]) {
        let (a, b) = (w[0] as usize, w[1] as usize);
        let alone = AttentionShape { tokens: b - a, ..s };
        let cu = [0, (b - a) as i32];
        let one = forward(alone, &qkv[a * s.ld..b * s.ld], &cu);
        let got = dense(&packed.outs[0][a * s.ld_o..], b - a, s.ld_o, 0, 64);
        assert!(relative_l2(&got, &dense(&one.outs[0], b - a, s.ld_o, 0, 64)) < 1e-14);
        let one = backward(alone, &qkv[a * s.ld..b * s.ld], &d_o[a * 65..b * 65], &cu, false, 0.0);
        let ld = s.ld + 2;
        let got = dense(&grads.outs[0][a * ld..], b - a, ld, s.k_off, 32);
        assert!(relative_l2(&got, &dense(&one.outs[0], b - a, ld, s.k_off, 32)) < 1e-13);
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    for cu in [&CU[..], &EVEN] {
        let s = AttentionShape { tokens: cu[cu.len() - 1] as usize, ..shape(true, 16) };
        let (qkv, d_o) = (normal(4, s.tokens * s.ld), normal(5, s.tokens * 65));
        let on = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| (forward(s, &qkv, cu).outs, backward(s, &qkv, &d_o, cu, false, 0.0).outs))
        };
        assert_eq!(on(1), on(3));
    }
}

#[test]
fn sizes_are_checked() {
    assert!(shape(true, 257).check().is_err());
    assert!(AttentionShape { kv_heads: 3, ..shape(true, 8) }.check().is_err());
    assert!(shape(true, 256).check().is_ok());
}
