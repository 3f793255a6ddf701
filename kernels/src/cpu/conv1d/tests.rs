//! Tests of the convolution.

use super::*;
use crate::cpu::check::{Call, finite_differences, normal, relative_l2};
use rstest::rstest;

const WIDTH: usize = 4;

struct Case {
    tokens: usize,
    channels: Blocks,
    stored: usize,
    width: usize,
    activation: ConvActivation,
    cu_seqlens: Vec<i32>,
}

/// Straight from the definition.
fn naive(case: &Case, x: &[f64], w: &[f64], b: &[f64]) -> Vec<f64> {
    let c = case.channels.len();
    let mut y = vec![0.0; case.tokens * c];
    for s in case.cu_seqlens.windows(2) {
        for t in s[0]..s[1] {
            for (stored, dense, len) in case.channels.iter() {
                for i in 0..len {
                    let mut sum = b[stored + i];
                    for k in 0..case.width as i32 {
                        if t - k >= s[0] {
                            let tap = w[(stored + i) * case.width + case.width - 1 - k as usize];
                            sum += tap * x[(t - k) as usize * c + dense + i];
                        }
                    }
                    y[t as usize * c + dense + i] = match case.activation {
                        ConvActivation::None => sum,
                        ConvActivation::Silu => sum / (1.0 + (-sum).exp()),
                    };
                }
            }
        }
    }
    y
}

fn spread(rows: &[f64], c: usize, ld: usize) -> Vec<f64> {
    let n = rows.len() / c;
    let mut out = vec![f64::NAN; (n - 1) * ld + c];
    rows.chunks(c).zip(out.chunks_mut(ld)).for_each(|(row, o)| o[..c].copy_from_slice(row));
    out
}

fn dense(rows: &[f64], c: usize, ld: usize) -> Vec<f64> {
    rows.chunks(ld).flat_map(|row| row[..c].to_vec()).collect()
}

fn cases(width: usize, activation: ConvActivation) -> Case {
    // More than a vector of either type, and some left.
    let channels = Blocks::new([(0, 2), (4, 1), (6, 18)]);
    // Lengths 5, 1, 0, 2, 67 and two empty ones at the end; more tokens than a block.
    Case { tokens: 75, channels, stored: 24, width, activation, cu_seqlens: vec![0, 5, 6, 6, 8, 75, 75, 75] }
}

fn run(case: &Case, x: &[f64], w: &[f64], b: &[f64]) -> (Vec<f64>, Conv1d, Call) {
    let c = case.channels.len();
    let kernel = Conv1d {
        tokens: case.tokens,
        channels: case.channels.clone(),
        width: case.width,
        activation: case.activation,
        ld_x: c + 2,
        ld_y: c + 1,
    };
    let mut call = Call {
        ins: vec![spread(x, c, c + 2), w.to_vec(), b.to_vec()],
        outs: vec![vec![77.0; (case.tokens - 1) * (c + 1) + c]],
        ints: vec![case.cu_seqlens.clone()],
        int_outs: vec![],
    };
    call.run(&kernel);
    assert!(call.outs[0].chunks(c + 1).all(|row| row.len() == c || row[c] == 77.0), "wrote outside its columns");
    (dense(&call.outs[0], c, c + 1), kernel, call)
}

#[rstest]
fn matches_the_definition_and_finite_differences(
    #[values(1, 2, 3, 4, 8)] width: usize,
    #[values(ConvActivation::None, ConvActivation::Silu)] activation: ConvActivation,
) {
    let case = cases(width, activation);
    let c = case.channels.len();
    let x = normal(1, case.tokens * c);
    let w = normal(2, case.stored * width);
    let b = normal(3, case.stored);
    let dy = normal(4, case.tokens * c);
    let (y, kernel, call) = run(&case, &x, &w, &b);
    assert!(relative_l2(&y, &naive(&case, &x, &w, &b)) < 1e-13);
    let narrow = dense(&call.run_f32(&kernel)[0], c, c + 1);
    assert!(relative_l2(&y, &narrow) < 1e-6);

    let backward = Conv1dBackward {
        tokens: case.tokens,
        channels: case.channels.clone(),
        width,
        activation,
        ld_x: c,
        ld_dy: c + 1,
        ld_dx: c + 3,
        acc_dx: true,
    };
    let before = normal(5, case.tokens * c);
    let (w0, b0) = (normal(6, w.len()), normal(7, b.len()));
    let mut call = Call {
        ins: vec![x.clone(), w.clone(), b.clone(), spread(&dy, c, c + 1)],
        outs: vec![spread(&before, c, c + 3), w0.clone(), b0.clone()],
        ints: vec![case.cu_seqlens.clone()],
        int_outs: vec![],
    };
    let start = call.clone();
    call.run(&backward);
    let minus = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a - b).collect::<Vec<_>>();
    let dx = minus(&dense(&call.outs[0], c, c + 3), &before);
    let (dw, db) = (minus(&call.outs[1], &w0), minus(&call.outs[2], &b0));
    let loss =
        |x: &[f64], w: &[f64], b: &[f64]| -> f64 { naive(&case, x, w, b).iter().zip(&dy).map(|(y, d)| y * d).sum() };
    finite_differences("dx", &x, &dx, 1e-7, |x| loss(x, &w, &b));
    finite_differences("dweight", &w, &dw, 1e-7, |w| loss(&x, w, &b));
    finite_differences("dbias", &b, &db, 1e-7, |b| loss(&x, &w, b));

    let overwrite = Conv1dBackward { acc_dx: false, ..backward.clone() };
    let mut call = start.clone();
    call.run(&overwrite);
    assert!(relative_l2(&dense(&call.outs[0], c, c + 3), &dx) < 1e-13);
    for (wide, narrow) in call.outs.iter().zip(start.run_f32(&overwrite)).skip(1) {
        assert!(relative_l2(wide, &narrow) < 1e-5);
    }
}

#[test]
fn threads_do_not_change_the_bits() {
    let (tokens, c) = (700, 24);
    let kernel = Conv1dBackward {
        tokens,
        channels: Blocks::full(c),
        width: WIDTH,
        activation: ConvActivation::Silu,
        ld_x: c,
        ld_dy: c,
        ld_dx: c,
        acc_dx: false,
    };
    let call = Call {
        ins: vec![normal(1, tokens * c), normal(2, c * WIDTH), normal(3, c), normal(4, tokens * c)],
        outs: vec![vec![0.0; tokens * c], vec![0.0; c * WIDTH], vec![0.0; c]],
        ints: vec![vec![0, 300, 700]],
        int_outs: vec![],
    };
    let with = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| call.run_f32(&kernel))
    };
    assert_eq!(with(1), with(2));
    assert_eq!(with(1), with(3));
}
