//! The scan against a sequential recurrence, finite differences, and itself under other chunks, packings and threads.

use super::*;
use crate::cpu::check::{Call, finite_differences, normal, relative_l2};
use crate::kernel::Kernel;
use rstest::rstest;

/// A problem in dense form, with the activations' gradients asked for.
#[derive(Clone)]
struct Problem {
    shape: SsdShape,
    cu_seqlens: Vec<i32>,
    xbc: Vec<f64>,
    dt: Vec<f64>,
    a_log: Vec<f64>,
    d: Vec<f64>,
    dt_bias: Vec<f64>,
    init: Vec<f64>,
    dy: Vec<f64>,
    dfinal: Vec<f64>,
}

/// The segments lie [C | gap | x | B], so that offsets are not in the usual order.
fn problem(
    cu_seqlens: &[i32],
    (heads, head_dim, groups, state): (usize, usize, usize, usize),
    chunk: usize,
) -> Problem {
    let tokens = *cu_seqlens.last().unwrap() as usize;
    let sequences = cu_seqlens.len() - 1;
    let (inner, bc) = (heads * head_dim, groups * state);
    let ld_xbc = inner + 2 * bc + 1;
    let shape = SsdShape {
        tokens,
        sequences,
        heads,
        head_dim,
        groups,
        state,
        chunk,
        x_off: bc + 1,
        b_off: bc + 1 + inner,
        c_off: 0,
        ld_xbc,
        ld_dt: heads + 2,
        dt_limit: None,
    };
    Problem {
        cu_seqlens: cu_seqlens.to_vec(),
        xbc: normal(1, tokens * ld_xbc),
        dt: normal(2, tokens * shape.ld_dt),
        a_log: normal(3, heads).iter().map(|v| 0.5 * v).collect(),
        d: normal(4, heads),
        dt_bias: normal(5, heads),
        init: normal(6, sequences * shape.state_len()),
        dy: normal(7, tokens * (inner + 3)),
        dfinal: normal(8, sequences * shape.state_len()),
        shape,
    }
}

/// y [T, H * P] and final state [S, H, P, N], token by token.
fn naive(p: &Problem) -> (Vec<f64>, Vec<f64>) {
    let s = &p.shape;
    let mut y = vec![0.0; s.tokens * s.heads * s.head_dim];
    let mut states = p.init.clone();
    for (q, ends) in p.cu_seqlens.windows(2).enumerate() {
        for t in ends[0] as usize..ends[1] as usize {
            let row = &p.xbc[t * s.ld_xbc..][..s.ld_xbc];
            for h in 0..s.heads {
                let g = h % s.groups;
                let mut dt = (p.dt[t * s.ld_dt + h] + p.dt_bias[h]).exp().ln_1p();
                if let Some((lo, hi)) = s.dt_limit {
                    dt = dt.clamp(lo, hi);
                }
                let decay = (-dt * p.a_log[h].exp()).exp();
                for i in 0..s.head_dim {
                    let x = row[s.x_off + h * s.head_dim + i];
                    let mut sum = p.d[h] * x;
                    for n in 0..s.state {
                        let state = &mut states[((q * s.heads + h) * s.head_dim + i) * s.state + n];
                        *state = decay * *state + dt * x * row[s.b_off + g * s.state + n];
                        sum += *state * row[s.c_off + g * s.state + n];
                    }
                    y[(t * s.heads + h) * s.head_dim + i] = sum;
                }
            }
        }
    }
    (y, states)
}

fn loss(p: &Problem) -> f64 {
    let (y, last) = naive(p);
    let inner = p.shape.heads * p.shape.head_dim;
    let dy = p.dy.chunks(inner + 3).flat_map(|row| row[..inner].to_vec());
    y.iter().zip(dy).map(|(y, d)| y * d).sum::<f64>() + last.iter().zip(&p.dfinal).map(|(y, d)| y * d).sum::<f64>()
}

fn forward_call(p: &Problem) -> (Ssd, Call) {
    let s = &p.shape;
    let ld_y = s.heads * s.head_dim + 2;
    let kernel = Ssd { shape: s.clone(), ld_y, has_init: true, has_final: true };
    let call = Call {
        ins: vec![p.xbc.clone(), p.dt.clone(), p.a_log.clone(), p.d.clone(), p.dt_bias.clone(), p.init.clone()],
        outs: vec![vec![55.0; s.tokens * ld_y - 2], vec![f64::NAN; s.states_len()], vec![f64::NAN; p.init.len()]],
        ints: vec![p.cu_seqlens.clone()],
        int_outs: vec![vec![-1; s.table_len()]],
    };
    (kernel, call)
}

fn dense(rows: &[f64], c: usize, ld: usize) -> Vec<f64> {
    rows.chunks(ld).flat_map(|row| row[..c].to_vec()).collect()
}

fn forward(p: &Problem) -> (Vec<f64>, Vec<f64>, Call) {
    let (kernel, mut call) = forward_call(p);
    call.run(&kernel);
    let inner = p.shape.heads * p.shape.head_dim;
    assert!(call.outs[0].chunks(inner + 2).all(|row| row[inner..].iter().all(|&v| v == 55.0)), "columns of others");
    (dense(&call.outs[0], inner, inner + 2), call.outs[2].clone(), call)
}

/// The backward kernel and its operands, gradients starting from zero; outs: dxbc, ddt, da_log, dd, ddt_bias, dinit.
fn backward_call(p: &Problem) -> (SsdBackward, Call) {
    let s = &p.shape;
    let (_, _, saved) = forward(p);
    let kernel = SsdBackward {
        shape: s.clone(),
        has_init: true,
        has_dfinal: true,
        has_dinit: true,
        ld_dy: s.heads * s.head_dim + 3,
        ld_dxbc: s.ld_xbc,
        ld_ddt: s.ld_dt,
        acc_dxbc: false,
        acc_ddt: false,
        acc_dinit: false,
    };
    let mut ins = saved.ins[..5].to_vec();
    ins.extend([saved.outs[1].clone(), p.dy.clone(), p.dfinal.clone()]);
    let zeros = |n: usize| vec![0.0; n];
    let call = Call {
        ins,
        outs: vec![
            zeros(p.xbc.len()),
            zeros(p.dt.len()),
            zeros(s.heads),
            zeros(s.heads),
            zeros(s.heads),
            zeros(p.init.len()),
        ],
        ints: vec![p.cu_seqlens.clone(), saved.int_outs[0].clone()],
        int_outs: vec![],
    };
    (kernel, call)
}

fn check_gradients(p: &Problem, tol: f64) {
    let (kernel, mut call) = backward_call(p);
    call.run(&kernel);
    let vary = |name: &str, x: &[f64], grad: &[f64], set: fn(&mut Problem, &[f64])| {
        finite_differences(name, x, grad, tol, |x| {
            let mut q = p.clone();
            set(&mut q, x);
            loss(&q)
        });
    };
    vary("dxbc", &p.xbc, &call.outs[0], |q, x| q.xbc = x.to_vec());
    vary("ddt", &p.dt, &call.outs[1], |q, x| q.dt = x.to_vec());
    vary("da_log", &p.a_log, &call.outs[2], |q, x| q.a_log = x.to_vec());
    vary("dd", &p.d, &call.outs[3], |q, x| q.d = x.to_vec());
    vary("ddt_bias", &p.dt_bias, &call.outs[4], |q, x| q.dt_bias = x.to_vec());
    vary("dinit", &p.init, &call.outs[5], |q, x| q.init = x.to_vec());
}

/// Lengths 1, 2, chunk - 1, chunk, chunk + 1, empty ones in the middle and at the end.
const RAGGED: [i32; 9] = [0, 1, 3, 10, 18, 18, 27, 27, 27];

#[rstest]
#[case((6, 3, 2, 5))]
#[case((5, 2, 3, 4))]
#[case((1, 4, 2, 3))]
#[case((4, 17, 1, 2))]
fn matches_the_recurrence(#[case] dims: (usize, usize, usize, usize), #[values(1, 5, 8, 64)] chunk: usize) {
    let p = problem(&RAGGED, dims, chunk);
    let (y, last, call) = forward(&p);
    let (y0, last0) = naive(&p);
    assert!(relative_l2(&y, &y0) < 1e-12 && relative_l2(&last, &last0) < 1e-12);
    let (kernel, _) = forward_call(&p);
    let narrow = call.run_f32(&kernel);
    let inner = dims.0 * dims.1;
    assert!(relative_l2(&dense(&narrow[0], inner, inner + 2), &y) < 2e-6 && relative_l2(&narrow[2], &last) < 2e-6);
}

#[rstest]
fn gradients_match_finite_differences(
    #[values((4, 3, 2, 3), (5, 2, 3, 2), (1, 2, 2, 2))] dims: (usize, usize, usize, usize),
) {
    check_gradients(&problem(&RAGGED, dims, 8), 1e-7);
}

#[test]
fn clamped_steps_have_no_gradient() {
    let mut p = problem(&[0, 9, 14], (3, 2, 1, 2), 4);
    p.shape.dt_limit = Some((0.5, 1.5));
    let clamped = p.dt.iter().filter(|&&v| !(0.5..=1.5).contains(&v.exp().ln_1p())).count();
    assert!(clamped > 5);
    let (y, last, _) = forward(&p);
    let (y0, last0) = naive(&p);
    assert!(relative_l2(&y, &y0) < 1e-12 && relative_l2(&last, &last0) < 1e-12);
    check_gradients(&p, 1e-7);
}

#[test]
fn optional_states_and_accumulation() {
    let mut p = problem(&RAGGED, (4, 3, 2, 3), 8);
    p.init.fill(0.0);
    p.dfinal.fill(0.0);
    let (y, _, full) = forward(&p);
    let (kernel, _) = forward_call(&p);
    let mut bare = full.clone();
    bare.ins.truncate(5);
    bare.outs.truncate(2);
    bare.run(&Ssd { has_init: false, has_final: false, ..kernel });
    assert!(relative_l2(&dense(&bare.outs[0], 12, 14), &y) < 1e-14);

    let (kernel, start) = backward_call(&p);
    let mut full = start.clone();
    full.run(&kernel);
    let mut bare = start.clone();
    bare.ins[5] = bare_states(&p);
    bare.ins.truncate(7);
    bare.outs.truncate(5);
    bare.outs.iter_mut().for_each(|v| v.fill(3.0));
    bare.run(&SsdBackward {
        has_init: false,
        has_dfinal: false,
        has_dinit: false,
        acc_dxbc: true,
        acc_ddt: true,
        ..kernel.clone()
    });
    for (bare, full) in bare.outs.iter().zip(&full.outs) {
        let bare: Vec<f64> = bare.iter().map(|v| v - 3.0).collect();
        assert!(relative_l2(&bare, full) < 1e-13);
    }
    let mut added = start;
    added.outs[5].fill(2.0);
    added.run(&SsdBackward { acc_dinit: true, ..kernel });
    assert!(added.outs[5].iter().zip(&full.outs[5]).all(|(a, f)| (a - 2.0 - f).abs() < 1e-12));
    let gap = p.shape.x_off - 1;
    assert!(full.outs[0].chunks(p.shape.ld_xbc).all(|row| row[gap] == 0.0), "wrote between the segments");
}

/// Chunk states saved by a forward pass without initial and final state.
fn bare_states(p: &Problem) -> Vec<f64> {
    let (kernel, mut call) = forward_call(p);
    call.ins.truncate(5);
    call.outs.truncate(2);
    call.run(&Ssd { has_init: false, has_final: false, ..kernel });
    call.outs[1].clone()
}

#[test]
fn packed_equals_alone() {
    let p = problem(&[0, 13, 14, 30, 63], (4, 8, 2, 6), 16);
    let (y, last, _) = forward(&p);
    let (kernel, mut call) = backward_call(&p);
    call.run(&kernel);
    let size = p.shape.state_len();
    for (q, ends) in p.cu_seqlens.windows(2).enumerate() {
        let (from, to) = (ends[0] as usize, ends[1] as usize);
        let rows = |v: &[f64], ld: usize| v[from * ld..to * ld].to_vec();
        let mut one = p.clone();
        one.shape.tokens = to - from;
        one.shape.sequences = 1;
        one.cu_seqlens = vec![0, ends[1] - ends[0]];
        one.xbc = rows(&p.xbc, p.shape.ld_xbc);
        one.dt = rows(&p.dt, p.shape.ld_dt);
        one.dy = rows(&p.dy, 35);
        one.init = p.init[q * size..][..size].to_vec();
        one.dfinal = p.dfinal[q * size..][..size].to_vec();
        let (y1, last1, _) = forward(&one);
        assert_eq!(y1, rows(&y, 32));
        assert_eq!(last1, last[q * size..][..size]);
        let (kernel, mut alone) = backward_call(&one);
        alone.run(&kernel);
        assert_eq!(alone.outs[0], rows(&call.outs[0], p.shape.ld_xbc));
        assert_eq!(alone.outs[1], rows(&call.outs[1], p.shape.ld_dt));
        assert_eq!(alone.outs[5], call.outs[5][q * size..][..size]);
    }
}

#[test]
fn strong_decay_stays_exact() {
    // exp(dt' a) down to e^-200 a token: products of decays underflow within a few tokens, their ratios are 0 / 0.
    let mut p = problem(&[0, 150], (4, 3, 2, 4), 64);
    p.a_log = vec![3.0, 0.0, 4.0, -3.0];
    p.dt.iter_mut().for_each(|v| *v = 2.0 * *v + 1.0);
    let (y, last, call) = forward(&p);
    let (y0, last0) = naive(&p);
    assert!(relative_l2(&y, &y0) < 1e-12 && relative_l2(&last, &last0) < 1e-12);
    let (kernel, _) = forward_call(&p);
    let narrow = call.run_f32(&kernel);
    assert!(relative_l2(&dense(&narrow[0], 12, 14), &y0) < 1e-6);
    let (kernel, mut call) = backward_call(&p);
    let narrow = call.run_f32(&kernel);
    call.run(&kernel);
    for (i, (wide, narrow)) in call.outs.iter().zip(&narrow).enumerate() {
        let error = relative_l2(wide, narrow);
        assert!(error < 1e-5, "gradient {i}: {error}");
    }
    check_gradients(&p, 2e-6);
}

#[test]
fn chunk_and_threads_do_not_matter() {
    let cu_seqlens = [0, 100, 101, 400];
    // States large enough that a step between chunks is shared out.
    let p = problem(&cu_seqlens, (10, 64, 3, 128), 32);
    let mut other = p.clone();
    other.shape.chunk = 100;
    let grads = |p: &Problem| {
        let (kernel, mut call) = backward_call(p);
        call.run(&kernel);
        call.outs
    };
    for (a, b) in grads(&p).iter().zip(&grads(&other)) {
        assert!(relative_l2(a, b) < 1e-11);
    }
    let with = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let (kernel, call) = forward_call(&p);
            let mut out = call.run_f32(&kernel);
            // Chunks that the lengths leave unused keep what was there.
            out[1].retain(|v| !v.is_nan());
            let (kernel, call) = backward_call(&p);
            (out, call.run_f32(&kernel))
        })
    };
    assert_eq!(with(1), with(2));
}

/// Prints the time of both passes at a training shape; run it with --release --ignored --nocapture.
#[test]
#[ignore = "a measurement"]
fn time_a_training_shape() {
    let cu_seqlens: Vec<i32> = (0..=8).map(|i| 256 * i).collect();
    for chunk in [32, 64, 128] {
        let p = problem(&cu_seqlens, (16, 32, 2, 64), chunk);
        let (mut kernel, mut call) = forward_call(&p);
        (kernel.has_init, kernel.has_final) = (false, false);
        call.ins.truncate(5);
        call.outs.truncate(2);
        let forward = time(&kernel, &call);
        let (mut kernel, mut call) = backward_call(&p);
        (kernel.has_init, kernel.has_dfinal, kernel.has_dinit) = (false, false, false);
        call.ins.truncate(7);
        call.outs.truncate(5);
        println!("chunk {chunk}: forward {forward:.2} ms, backward {:.2} ms", time(&kernel, &call));
    }
}

/// Best of a few runs in f32, in milliseconds.
fn time(kernel: &dyn Kernel, call: &Call) -> f64 {
    let narrow = |v: &Vec<f64>| v.iter().map(|&x| x as f32).collect::<Vec<f32>>();
    let ins: Vec<Vec<f32>> = call.ins.iter().map(narrow).collect();
    let mut outs: Vec<Vec<f32>> = call.outs.iter().map(narrow).collect();
    let mut int_outs = call.int_outs.clone();
    let mut work = vec![0.0f32; kernel.workspace()];
    let mut best = f64::INFINITY;
    for _ in 0..20 {
        let start = std::time::Instant::now();
        kernel.run_f32(crate::Args {
            ins: &ins.iter().map(Vec::as_slice).collect::<Vec<_>>(),
            outs: &mut outs.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>(),
            ints: &call.ints.iter().map(Vec::as_slice).collect::<Vec<_>>(),
            int_outs: &mut int_outs.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>(),
            work: &mut work,
        });
        best = best.min(start.elapsed().as_secs_f64() * 1e3);
    }
    best
}

#[test]
fn the_bound_of_chunks_is_reached_and_holds() {
    let p = problem(&[0, 1, 2, 11, 11], (1, 1, 1, 1), 4);
    let (_, _, call) = forward(&p);
    assert_eq!((call.int_outs[0][0], p.shape.max_chunks()), (5, 5));
    let p = problem(&[0, 0, 1, 1, 2], (1, 1, 1, 1), 64);
    let (_, _, call) = forward(&p);
    assert_eq!((call.int_outs[0][0], p.shape.max_chunks()), (2, 2));
}
