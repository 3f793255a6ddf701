//! Tests of the gated norm.

use super::*;
use crate::cpu::check::{Call, finite_differences, normal, relative_l2};
use rstest::rstest;

const T: usize = 37;

fn shape(grouping: Grouping, gate_first: bool) -> GatedNormShape {
    let weight = Blocks::new([(0, 8), (12, 4)]);
    GatedNormShape { tokens: T, weight, groups: 3, grouping, group_width: 5, gate_first, has_scale: true }
}

/// Straight from the definition, for the shapes above.
fn naive(k: &GatedNormShape, y: &[f64], z: &[f64], w: &[f64], eps: f64, s: f64) -> Vec<f64> {
    let d = k.weight.len();
    let w: Vec<f64> = k.weight.iter().flat_map(|(at, _, len)| w[at..at + len].to_vec()).collect();
    let group = |c: usize| match k.grouping {
        Grouping::Interleaved { head_dim } => (c / head_dim) % k.groups,
        Grouping::Contiguous => c / (d / k.groups),
    };
    let mut out = vec![0.0; y.len()];
    for t in 0..k.tokens {
        let silu = |c: usize| z[t * d + c] / (1.0 + (-z[t * d + c]).exp());
        let u = |c: usize| if k.gate_first { y[t * d + c] * silu(c) } else { y[t * d + c] };
        for c in 0..d {
            let sum: f64 = (0..d).filter(|&o| group(o) == group(c)).map(|o| u(o) * u(o)).sum();
            let n = u(c) / (sum / k.group_width as f64 + eps).sqrt() * w[c] * s;
            out[t * d + c] = if k.gate_first { n } else { n * silu(c) };
        }
    }
    out
}

fn spread(rows: &[f64], c: usize, ld: usize) -> Vec<f64> {
    let mut out = vec![55.0; (rows.len() / c - 1) * ld + c];
    rows.chunks(c).zip(out.chunks_mut(ld)).for_each(|(row, o)| o[..c].copy_from_slice(row));
    out
}

fn dense(rows: &[f64], c: usize, ld: usize) -> Vec<f64> {
    assert!(rows.chunks(ld).all(|row| row[c..].iter().all(|&v| v == 55.0)), "wrote outside its columns");
    rows.chunks(ld).flat_map(|row| row[..c].to_vec()).collect()
}

#[rstest]
fn matches_the_definition_and_finite_differences(
    #[values(Grouping::Interleaved { head_dim: 2 }, Grouping::Contiguous)] grouping: Grouping,
    #[values(true, false)] gate_first: bool,
) {
    let shape = shape(grouping, gate_first);
    let d = shape.weight.len();
    let (y, mut z) = (normal(1, T * d), normal(2, T * d));
    z[..d].fill(0.0);
    let (w, dout, e, s) = (normal(3, 20), normal(4, T * d), 0.7, 1.3);
    let eps = 1e-2;
    let forward = GatedNorm { shape: shape.clone(), eps, has_eps_scale: true, ld_y: d, ld_z: d + 1, ld_out: d + 2 };
    let mut call = Call {
        ins: vec![y.clone(), spread(&z, d, d + 1), w.clone(), vec![e], vec![s]],
        outs: vec![vec![55.0; (T - 1) * (d + 2) + d], vec![0.0; T * 3]],
        ..Call::default()
    };
    call.run(&forward);
    let out = dense(&call.outs[0], d, d + 2);
    assert!(relative_l2(&out, &naive(&shape, &y, &z, &w, eps * e, s)) < 1e-13);
    assert!(relative_l2(&out, &dense(&call.run_f32(&forward)[0], d, d + 2)) < 1e-6);

    let backward = GatedNormBackward {
        shape: shape.clone(),
        ld_y: d,
        ld_z: d + 1,
        ld_dout: d,
        ld_dy: d + 3,
        ld_dz: d + 1,
        acc_dy: true,
        acc_dz: false,
    };
    let (before, w0) = (normal(5, T * d), normal(6, 20));
    let mut back = Call {
        ins: vec![y.clone(), spread(&z, d, d + 1), w.clone(), call.outs[1].clone(), dout.clone(), vec![s]],
        outs: vec![spread(&before, d, d + 3), spread(&before, d, d + 1), w0.clone(), vec![10.0]],
        ..Call::default()
    };
    let start = back.clone();
    back.run(&backward);
    let minus = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a - b).collect::<Vec<_>>();
    let dy = minus(&dense(&back.outs[0], d, d + 3), &before);
    let dz = dense(&back.outs[1], d, d + 1);
    let loss = |y: &[f64], z: &[f64], w: &[f64], s: f64| -> f64 {
        naive(&shape, y, z, w, eps * e, s).iter().zip(&dout).map(|(o, d)| o * d).sum()
    };
    finite_differences("dy", &y, &dy, 1e-7, |y| loss(y, &z, &w, s));
    finite_differences("dz", &z, &dz, 1e-7, |z| loss(&y, z, &w, s));
    finite_differences("dweight", &w, &minus(&back.outs[2], &w0), 1e-7, |w| loss(&y, &z, w, s));
    finite_differences("ds", &[s], &[back.outs[3][0] - 10.0], 1e-7, |s| loss(&y, &z, &w, s[0]));

    let swapped = GatedNormBackward { acc_dy: false, acc_dz: true, ..backward };
    let mut other = start.clone();
    other.run(&swapped);
    assert!(relative_l2(&dense(&other.outs[0], d, d + 3), &dy) < 1e-13);
    assert!(relative_l2(&minus(&dense(&other.outs[1], d, d + 1), &before), &dz) < 1e-13);
    for (wide, narrow) in other.outs.iter().zip(start.run_f32(&swapped)) {
        assert!(relative_l2(wide, &narrow) < 1e-5);
    }
}

#[test]
fn plain_form_and_thread_counts() {
    let (tokens, d) = (500, 48);
    let shape = GatedNormShape {
        tokens,
        weight: Blocks::full(d),
        groups: 2,
        grouping: Grouping::Interleaved { head_dim: 24 },
        group_width: 24,
        gate_first: true,
        has_scale: false,
    };
    let forward = GatedNorm { shape: shape.clone(), eps: 1e-5, has_eps_scale: false, ld_y: d, ld_z: d, ld_out: d };
    let (y, z, w) = (normal(1, tokens * d), normal(2, tokens * d), normal(3, d));
    let mut call = Call {
        ins: vec![y.clone(), z.clone(), w.clone()],
        outs: vec![vec![0.0; tokens * d], vec![0.0; tokens * 2]],
        ..Call::default()
    };
    call.run(&forward);
    assert!(relative_l2(&call.outs[0], &naive(&shape, &y, &z, &w, 1e-5, 1.0)) < 1e-13);
    let backward =
        GatedNormBackward { shape, ld_y: d, ld_z: d, ld_dout: d, ld_dy: d, ld_dz: d, acc_dy: false, acc_dz: false };
    let back = Call {
        ins: vec![y, z, w, call.outs[1].clone(), normal(4, tokens * d)],
        outs: vec![vec![0.0; tokens * d], vec![0.0; tokens * d], vec![0.0; d]],
        ..Call::default()
    };
    let with = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| back.run_f32(&backward))
    };
    assert_eq!(with(1), with(2));
    let mut wide = back.clone();
    wide.run(&backward);
    for (narrow, wide) in with(1).iter().zip(&wide.outs) {
        assert!(relative_l2(narrow, wide) < 1e-5);
    }
}
