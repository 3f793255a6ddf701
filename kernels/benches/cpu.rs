//! Times CPU kernels in f32 at the sizes of a small hybrid decoder: the least of many runs, on one thread.
//!
//!   cargo bench -p gantry-kernels --bench cpu -- [part of a kernel's name] [threads]
//!
//! GB/s counts what the kernel states as its cost (each operand read and written once), as profiles do.

use gantry_kernels::cpu::activation::{Activation, ActivationBackward, ActivationKind};
use gantry_kernels::cpu::attention::{AttentionBackward, AttentionForward, AttentionShape};
use gantry_kernels::cpu::conv1d::{Conv1d, Conv1dBackward, ConvActivation};
use gantry_kernels::cpu::elementwise::{Binary, BinaryOp, Scale};
use gantry_kernels::cpu::embedding::{Embedding, EmbeddingBackward};
use gantry_kernels::cpu::gated_norm::{GatedNorm, GatedNormBackward, GatedNormShape, Grouping};
use gantry_kernels::cpu::moe_permute::{PermuteShape, Unpermute, UnpermuteBackward};
use gantry_kernels::cpu::optimizer::{Adam, Decay};
use gantry_kernels::cpu::rms_norm::{RmsNorm, RmsNormBackward};
use gantry_kernels::cpu::ssd::{Ssd, SsdBackward, SsdShape};
use gantry_kernels::philox::Stream;
use gantry_kernels::{Args, Blocks, Kernel};
use std::time::Instant;

/// Seconds spent on one kernel.
const BUDGET: f64 = 0.4;

struct Bench {
    filter: String,
}

impl Bench {
    fn time(
        &self,
        what: &str,
        kernel: &dyn Kernel,
        ins: &[&[f32]],
        outs: &mut [Vec<f32>],
        ints: &[&[i32]],
        int_outs: &mut [Vec<i32>],
    ) {
        let name = format!("{} {what}", kernel.name());
        if !name.contains(&self.filter) {
            return;
        }
        let mut work = vec![0.0f32; kernel.workspace()];
        let (mut least, mut runs) = (f64::INFINITY, 0);
        let begin = Instant::now();
        while begin.elapsed().as_secs_f64() < BUDGET || runs < 5 {
            let mut outs: Vec<&mut [f32]> = outs.iter_mut().map(Vec::as_mut_slice).collect();
            let mut int_outs: Vec<&mut [i32]> = int_outs.iter_mut().map(Vec::as_mut_slice).collect();
            let start = Instant::now();
            kernel.run_f32(Args { ins, outs: &mut outs, ints, int_outs: &mut int_outs, work: &mut work });
            least = least.min(start.elapsed().as_secs_f64());
            runs += 1;
        }
        let cost = kernel.cost();
        println!(
            "{name:<40} {:>9.1} us {:>7.1} GFLOP/s {:>7.1} GB/s",
            least * 1e6,
            cost.flops / least * 1e-9,
            cost.elements * 4.0 / least * 1e-9
        );
    }
}

fn normal(stream: u32, n: usize) -> Vec<f32> {
    let stream = Stream::new(1, stream, 0);
    (0..n as u64).map(|i| stream.normal(i) as f32).collect()
}

fn zeros(n: usize) -> Vec<f32> {
    vec![0.0; n]
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let threads = words.iter().find_map(|w| w.parse().ok()).unwrap_or(1);
    let filter = words.into_iter().find(|w| w.parse::<usize>().is_err()).unwrap_or_default();
    let bench = Bench { filter };
    let Ok(pool) = rayon::ThreadPoolBuilder::new().num_threads(threads).build() else {
        eprintln!("no pool of {threads} threads");
        return;
    };
    pool.install(|| {
        for (tokens, hidden) in [(1024, 128), (2048, 256)] {
            let cu: Vec<i32> = (0..=tokens / 256).map(|s| (s * 256) as i32).collect();
            mixer(&bench, tokens, hidden, &cu);
            block(&bench, tokens, hidden, &cu);
            rows(&bench, tokens, hidden);
        }
    });
}

/// Convolution, scan and gated norm of a Mamba-2 layer.
fn mixer(bench: &Bench, tokens: usize, hidden: usize, cu: &[i32]) {
    let what = format!("{tokens}x{hidden}");
    let (heads, head_dim, groups, state, chunk) = (hidden / 16, 32, 2, 32, 64);
    let inner = heads * head_dim;
    let conv = inner + 2 * groups * state;
    let wide = inner + conv + heads;
    let projected = normal(1, tokens * wide);
    let (weight, bias, grad) = (normal(2, conv * 4), normal(3, conv), normal(4, tokens * conv));
    let channels = Blocks::full(conv);
    let activation = ConvActivation::Silu;
    let kernel = Conv1d { tokens, channels: channels.clone(), width: 4, activation, ld_x: wide, ld_y: conv };
    let x = &projected[inner..];
    bench.time(&what, &kernel, &[x, &weight, &bias], &mut [zeros(tokens * conv)], &[cu], &mut []);
    let kernel =
        Conv1dBackward { tokens, channels, width: 4, activation, ld_x: wide, ld_dy: conv, ld_dx: wide, acc_dx: false };
    let mut outs = [zeros(tokens * wide), zeros(conv * 4), zeros(conv)];
    bench.time(&what, &kernel, &[x, &weight, &bias, &grad], &mut outs, &[cu], &mut []);

    let shape = SsdShape {
        tokens,
        sequences: cu.len() - 1,
        heads,
        head_dim,
        groups,
        state,
        chunk,
        x_off: 0,
        b_off: inner,
        c_off: inner + groups * state,
        ld_xbc: conv,
        ld_dt: wide,
        dt_limit: None,
    };
    let dt = &projected[inner + conv..];
    let (a_log, d, dt_bias) = (normal(5, heads), normal(6, heads), normal(7, heads));
    let xbc = normal(8, tokens * conv);
    let kernel = Ssd { shape: shape.clone(), ld_y: inner, has_init: false, has_final: false };
    let mut outs = [zeros(tokens * inner), zeros(shape.states_len())];
    let mut table = [vec![0; shape.table_len()]];
    // Needed by the backward pass whatever is timed.
    {
        let mut work = zeros(kernel.workspace());
        let [y, states] = &mut outs;
        let ins: [&[f32]; 5] = [&xbc, dt, &a_log, &d, &dt_bias];
        let (outs, ints) = (&mut [&mut y[..], &mut states[..]], &[cu]);
        kernel.run_f32(Args { ins: &ins, outs, ints, int_outs: &mut [&mut table[0]], work: &mut work });
    }
    bench.time(&what, &kernel, &[&xbc, dt, &a_log, &d, &dt_bias], &mut outs, &[cu], &mut table);
    let kernel = SsdBackward {
        shape,
        has_init: false,
        has_dfinal: false,
        has_dinit: false,
        ld_dy: inner,
        ld_dxbc: conv,
        ld_ddt: wide,
        acc_dxbc: false,
        acc_ddt: false,
        acc_dinit: false,
    };
    let dy = normal(9, tokens * inner);
    let [y, states] = &outs;
    let ins: [&[f32]; 7] = [&xbc, dt, &a_log, &d, &dt_bias, states, &dy];
    let mut back = [zeros(tokens * conv), zeros(tokens * wide), zeros(heads), zeros(heads), zeros(heads)];
    bench.time(&what, &kernel, &ins, &mut back, &[cu, &table[0]], &mut []);

    let shape = GatedNormShape {
        tokens,
        weight: Blocks::full(inner),
        groups,
        grouping: Grouping::Interleaved { head_dim },
        group_width: inner / groups,
        gate_first: true,
        has_scale: false,
    };
    let w = normal(10, inner);
    let kernel =
        GatedNorm { shape: shape.clone(), eps: 1e-5, has_eps_scale: false, ld_y: inner, ld_z: wide, ld_out: inner };
    let mut outs = [zeros(tokens * inner), zeros(tokens * groups)];
    bench.time(&what, &kernel, &[y, &projected, &w], &mut outs, &[], &mut []);
    let kernel = GatedNormBackward {
        shape,
        ld_y: inner,
        ld_z: wide,
        ld_dout: inner,
        ld_dy: inner,
        ld_dz: wide,
        acc_dy: false,
        acc_dz: false,
    };
    let rstd = vec![0.5; tokens * groups];
    let mut outs = [zeros(tokens * inner), zeros(tokens * wide), zeros(inner)];
    bench.time(&what, &kernel, &[y, &projected, &w, &rstd, &dy], &mut outs, &[], &mut []);
}

/// RMS norm and attention.
fn block(bench: &Bench, tokens: usize, hidden: usize, cu: &[i32]) {
    let what = format!("{tokens}x{hidden}");
    let (x, dy, w) = (normal(1, tokens * hidden), normal(2, tokens * hidden), normal(3, hidden));
    let weight = Blocks::full(hidden);
    let kernel = RmsNorm {
        tokens,
        weight: weight.clone(),
        width: hidden,
        eps: 1e-5,
        ld_x: hidden,
        ld_y: hidden,
        eps_ratio: false,
        scale: false,
    };
    bench.time(&what, &kernel, &[&x, &w], &mut [zeros(tokens * hidden), zeros(tokens)], &[], &mut []);
    for acc in [false, true] {
        let kernel = RmsNormBackward {
            tokens,
            weight: weight.clone(),
            width: hidden,
            ld_dy: hidden,
            ld_x: hidden,
            ld_dx: hidden,
            scale: false,
            acc,
        };
        let rstd = vec![0.5; tokens];
        // A kernel that adds starts from what lies there: scaled down, so that many runs stay finite.
        let dy: Vec<f32> = dy.iter().map(|v| v * 1e-3).collect();
        let mut outs = [zeros(tokens * hidden), zeros(hidden)];
        let what = if acc { format!("{what} acc") } else { what.clone() };
        bench.time(&what, &kernel, &[&dy, &x, &rstd, &w], &mut outs, &[], &mut []);
    }
    let (q_heads, kv_heads, head_dim) = (hidden / 32, 2, 32);
    let ld = (q_heads + 2 * kv_heads) * head_dim;
    let shape = AttentionShape {
        tokens,
        longest: cu.windows(2).map(|s| (s[1] - s[0]) as usize).max().unwrap_or(0),
        q_heads,
        kv_heads,
        head_dim,
        q_off: 0,
        k_off: q_heads * head_dim,
        v_off: (q_heads + kv_heads) * head_dim,
        ld,
        ld_o: q_heads * head_dim,
        causal: true,
        scale: 0.18,
    };
    let qkv = normal(4, tokens * ld);
    let mut outs = [zeros(tokens * q_heads * head_dim), zeros(tokens * q_heads)];
    {
        let kernel = AttentionForward { shape };
        let mut work = zeros(kernel.workspace());
        let [o, lse] = &mut outs;
        let outs = &mut [&mut o[..], &mut lse[..]];
        kernel.run_f32(Args { ins: &[&qkv], outs, ints: &[cu], int_outs: &mut [], work: &mut work });
        bench.time(&what, &kernel, &[&qkv], &mut [o.clone(), lse.clone()], &[cu], &mut []);
    }
    let kernel = AttentionBackward { shape, ld_do: q_heads * head_dim, ld_dqkv: ld, acc: false };
    let [o, lse] = &outs;
    let d_o = normal(5, o.len());
    bench.time(&what, &kernel, &[&qkv, o, lse, &d_o], &mut [zeros(tokens * ld)], &[cu], &mut []);
}

/// What works element by element or row by row.
fn rows(bench: &Bench, tokens: usize, hidden: usize) {
    let what = format!("{tokens}x{hidden}");
    let ffn = 4 * hidden;
    let (x, dy) = (normal(1, tokens * ffn), normal(2, tokens * ffn));
    let kind = ActivationKind::Relu2;
    let kernel = Activation { kind, rows: tokens, cols: ffn, ld_x: ffn, ld_y: ffn, row_weight: false };
    bench.time(&what, &kernel, &[&x], &mut [zeros(tokens * ffn)], &[], &mut []);
    let kernel = ActivationBackward {
        kind,
        rows: tokens,
        cols: ffn,
        ld_dy: ffn,
        ld_x: ffn,
        ld_dx: ffn,
        row_weight: false,
        acc: false,
        acc_weight: false,
    };
    bench.time(&what, &kernel, &[&dy, &x], &mut [zeros(tokens * ffn)], &[], &mut []);
    // An expert's tokens, each with its router's weight.
    let (slots, weight) = (2 * tokens, normal(3, 2 * tokens));
    let weighted = format!("{what} weighted");
    let kernel = Activation { kind, rows: slots, cols: hidden, ld_x: hidden, ld_y: hidden, row_weight: true };
    bench.time(&weighted, &kernel, &[&x, &weight], &mut [zeros(slots * hidden)], &[], &mut []);
    let kernel = ActivationBackward {
        kind,
        rows: slots,
        cols: hidden,
        ld_dy: hidden,
        ld_x: hidden,
        ld_dx: hidden,
        row_weight: true,
        acc: false,
        acc_weight: false,
    };
    let mut outs = [zeros(slots * hidden), zeros(slots)];
    bench.time(&weighted, &kernel, &[&dy, &x, &weight], &mut outs, &[], &mut []);

    let kernel =
        Binary { op: BinaryOp::Add, rows: tokens, cols: hidden, ld_a: hidden, ld_b: hidden, ld_y: hidden, acc: false };
    bench.time(&what, &kernel, &[&x, &dy], &mut [zeros(tokens * hidden)], &[], &mut []);
    let kernel = Scale::add_in_place(tokens, hidden, hidden, hidden);
    bench.time(&what, &kernel, &[&x], &mut [zeros(tokens * hidden)], &[], &mut []);

    let shape = PermuteShape { tokens, k: 2, experts: 8, channels: hidden, ld: hidden, ld_slots: hidden };
    let slot: Vec<i32> = (0..slots as i32).map(|i| (i * 397) % slots as i32).collect();
    let source: Vec<i32> = slot.iter().map(|s| s / 2).collect();
    bench.time(&what, &Unpermute { shape, acc: false }, &[&x], &mut [zeros(tokens * hidden)], &[&slot], &mut []);
    let kernel = UnpermuteBackward { shape, acc: false };
    bench.time(&what, &kernel, &[&dy], &mut [zeros(slots * hidden)], &[&source], &mut []);

    // Bytes of text: few ids, some of them frequent.
    let vocab = 272;
    let stream = Stream::new(1, 9, 0);
    let ids: Vec<i32> = (0..tokens as u64).map(|i| (97.0 + 12.0 * stream.normal(i)).clamp(0.0, 255.0) as i32).collect();
    let cols = Blocks::full(hidden);
    let kernel = Embedding { tokens, vocab, part: 0, parts: 1, cols: cols.clone(), ld_w: hidden, ld_y: hidden };
    bench.time(&what, &kernel, &[&x[..vocab * hidden]], &mut [zeros(tokens * hidden)], &[&ids], &mut []);
    let kernel = EmbeddingBackward { tokens, vocab, part: 0, parts: 1, cols, ld_dy: hidden, ld_w: hidden };
    bench.time(&what, &kernel, &[&dy], &mut [zeros(vocab * hidden)], &[&ids], &mut []);

    let n = 40 * hidden * hidden;
    let (beta1, beta2, eps, decay) = (0.9, 0.95, 1e-8, Decay::Decoupled);
    let kernel = Adam { n, beta1, beta2, eps, decay, lr_mult: 1.0, wd_mult: 1.0 };
    let grad = normal(4, n);
    let mut outs = [zeros(n), zeros(n), zeros(n)];
    bench.time(&what, &kernel, &[&grad, &[1e-4, 0.1, 5.0], &[1.0]], &mut outs, &[], &mut []);
}
