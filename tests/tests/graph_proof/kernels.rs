//! Every CUDA launcher against the CPU kernel of the same value: strides, blocks, flags, aligned and unaligned operands.
//! Columns between a view's rows must stay as they were.

use super::{device, relative_l2};
use gantry_kernels::blocks::Blocks;
use gantry_kernels::cpu::activation::{Activation, ActivationBackward, ActivationKind};
use gantry_kernels::cpu::elementwise::{Binary, BinaryOp, Fill, Scale};
use gantry_kernels::cpu::gemm::{Gemm, LinearBackwardInput, LinearBackwardWeight, LinearForward};
use gantry_kernels::cpu::rms_norm::{RmsNorm, RmsNormBackward};
use gantry_kernels::cuda::{Device, Operands, Span};
use gantry_kernels::philox::Stream;
use gantry_kernels::{Args, Kernel};

fn normal(stream: u32, n: usize) -> Vec<f32> {
    let stream = Stream::new(11, stream, 0);
    (0..n as u64).map(|i| stream.normal(i) as f32).collect()
}

/// Runs the kernel on both, with every operand aligned and with every operand one element off, and compares all of every
/// output.
fn check(device: &Device, kernel: &dyn Kernel, ins: &[usize], outs: &[usize]) {
    let inputs: Vec<Vec<f32>> = (0..).zip(ins).map(|(i, &n)| normal(i, n)).collect();
    let before: Vec<Vec<f32>> = (50..).zip(outs).map(|(i, &n)| normal(i, n)).collect();
    let mut want = before.clone();
    {
        let ins: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
        let mut outs: Vec<&mut [f32]> = want.iter_mut().map(Vec::as_mut_slice).collect();
        let mut work = vec![f32::NAN; kernel.workspace()];
        kernel.run_f32(Args { ins: &ins, outs: &mut outs, ints: &[], int_outs: &mut [], work: &mut work });
    }
    for shift in [0, 1] {
        let place = |values: &Vec<f32>| {
            let buffer = device.alloc::<f32>(values.len() + shift).unwrap();
            buffer.write(shift, values).unwrap();
            (buffer.span(shift..shift + values.len()).unwrap(), buffer)
        };
        let (ins, _in_buffers): (Vec<Span>, Vec<_>) = inputs.iter().map(place).unzip();
        let (outs, buffers): (Vec<Span>, Vec<_>) = before.iter().map(place).unzip();
        let work = device.alloc::<f32>(kernel.workspace()).unwrap();
        work.poison().unwrap();
        let work = work.span(0..kernel.workspace()).unwrap();
        device.launch(kernel, &Operands { ins: &ins, outs: &outs, work: Some(&work), ..Default::default() }).unwrap();
        for (i, (buffer, want)) in buffers.iter().zip(&want).enumerate() {
            let got = buffer.read(shift..shift + want.len()).unwrap();
            let error = relative_l2(&got, want);
            // A single sum may cancel.
            let tolerance = if want.len() == 1 { 1e-4 } else { 3e-6 };
            assert!(error <= tolerance, "output {i} of {kernel:?}, shift {shift}: off by {error:e}");
            // What the CPU left alone must be left alone here.
            for (j, ((&got, &want), &before)) in got.iter().zip(want).zip(&before[i]).enumerate() {
                assert!(want != before || got == before, "element {j} of output {i} of {kernel:?} was touched");
            }
        }
    }
}

fn size(rows: usize, ld: usize, cols: usize) -> usize {
    (rows - 1) * ld + cols
}

/// (rows, cols, row strides): strided and odd, strided in fours, dense, one long row, wide.
const SHAPES: [(usize, usize, usize, usize); 5] =
    [(5, 7, 9, 11), (6, 64, 128, 72), (33, 20, 20, 20), (1, 5000, 6000, 5000), (70, 1000, 1000, 1004)];

#[test]
fn element_wise() {
    let Some(device) = device() else { return };
    for (rows, cols, ld_x, ld_y) in SHAPES {
        let (nx, ny) = (size(rows, ld_x, cols), size(rows, ld_y, cols));
        for acc in [false, true] {
            for op in [BinaryOp::Add, BinaryOp::Sub, BinaryOp::Mul] {
                check(&device, &Binary { op, rows, cols, ld_a: ld_x, ld_b: ld_y, ld_y, acc }, &[nx, ny], &[ny]);
            }
            for scalar in [false, true] {
                let kernel = Scale { factor: 0.7, scalar, acc, ..Scale::copy(rows, cols, ld_x, ld_y) };
                check(&device, &kernel, &[nx, 1], &[ny]);
            }
        }
        let kernel = Scale { factor: 2.5, scalar: true, in_place: true, ..Scale::copy(rows, cols, 0, ld_y) };
        check(&device, &kernel, &[1], &[ny]);
        check(&device, &Fill { rows, cols, ld: ld_y, value: -1.5 }, &[], &[ny]);
    }
}

#[test]
fn activations() {
    use ActivationKind::{GeluTanh, LeakyRelu, Relu, Relu2, Silu};
    let Some(device) = device() else { return };
    for (rows, cols, ld_x, ld_y) in SHAPES {
        let (nx, ny) = (size(rows, ld_x, cols), size(rows, ld_y, cols));
        for kind in [Relu2, GeluTanh, Silu, Relu, LeakyRelu(0.1)] {
            for row_weight in [false, true] {
                check(&device, &Activation { kind, rows, cols, ld_x, ld_y, row_weight }, &[nx, rows], &[ny]);
                for acc in [false, true] {
                    let kernel = ActivationBackward {
                        kind,
                        rows,
                        cols,
                        ld_dy: ld_y,
                        ld_x,
                        ld_dx: ld_x,
                        row_weight,
                        acc,
                        acc_weight: acc,
                    };
                    check(&device, &kernel, &[ny, nx, rows], &[nx, rows]);
                }
            }
        }
    }
}

#[test]
fn norms() {
    let Some(device) = device() else { return };
    let weights = [
        Blocks::full(7),
        Blocks::new([(0, 4), (6, 3)]),
        Blocks::full(64),
        Blocks::new([(0, 32), (48, 16)]),
        Blocks::full(5000),
    ];
    for weight in weights {
        let (cols, stored) = (weight.len(), weight.end());
        for (tokens, ld) in [(1, cols), (37, cols + 4), (300, cols)] {
            let n = size(tokens, ld, cols);
            for scale in [false, true] {
                let kernel = RmsNorm {
                    tokens,
                    weight: weight.clone(),
                    width: cols + 1,
                    // Small: e, a random number here, may be negative.
                    eps: 1e-3,
                    ld_x: ld,
                    ld_y: ld,
                    eps_ratio: scale,
                    scale,
                };
                check(&device, &kernel, &[n, stored, 1, 1], &[n, tokens]);
                for acc in [false, true] {
                    let kernel = RmsNormBackward {
                        tokens,
                        weight: weight.clone(),
                        width: cols + 1,
                        ld_dy: ld,
                        ld_x: ld,
                        ld_dx: ld,
                        scale,
                        acc,
                    };
                    let outs = [n, stored, 1];
                    check(&device, &kernel, &[n, n, tokens, stored, 1], &outs[..2 + usize::from(scale)]);
                }
            }
        }
    }
}

#[test]
fn products() {
    let Some(device) = device() else { return };
    for (m, n, k) in [(5, 7, 3), (64, 48, 32), (1, 129, 257), (200, 1, 33), (130, 70, 0)] {
        for case in 0..8 {
            let (ta, tb, acc) = (case & 1 > 0, case & 2 > 0, case & 4 > 0);
            let ((a_rows, a_cols), (b_rows, b_cols)) =
                (if ta { (k, m) } else { (m, k) }, if tb { (n, k) } else { (k, n) });
            let (lda, ldb, ldc) = (a_cols + 2, b_cols + 1, n + 3);
            let kernel = Gemm { m, n, k, ta, tb, lda, ldb, ldc, alpha: 0.5, acc };
            check(&device, &kernel, &[a_rows * lda, b_rows * ldb], &[m * ldc]);
        }
    }
    let cases = [
        (Blocks::full(24), Blocks::full(40)),
        (Blocks::new([(0, 2), (3, 2)]), Blocks::new([(1, 3), (6, 1)])),
        (Blocks::new([(0, 16), (32, 16), (80, 8)]), Blocks::new([(0, 20), (24, 12)])),
    ];
    for (rows, cols) in cases {
        let (ld_w, tokens) = (cols.end() + 3, 77);
        let (ld_x, ld_y) = (cols.len() + 5, rows.len() + 4);
        let (nx, ny, nw) = (tokens * ld_x, tokens * ld_y, rows.end() * ld_w);
        for acc in [false, true] {
            for bias in [false, true] {
                let (rows, cols) = (rows.clone(), cols.clone());
                let nb = rows.end();
                let kernel =
                    LinearForward { tokens, rows: rows.clone(), cols: cols.clone(), ld_x, ld_w, ld_y, bias, acc };
                check(&device, &kernel, &[nx, nw, nb], &[ny]);
                let kernel = LinearBackwardWeight { tokens, rows, cols, ld_dy: ld_y, ld_x, ld_w, bias };
                check(&device, &kernel, &[ny, nx], &[nw, nb]);
            }
            let (rows, cols) = (rows.clone(), cols.clone());
            check(
                &device,
                &LinearBackwardInput { tokens, rows, cols, ld_dy: ld_y, ld_w, ld_dx: ld_x, acc },
                &[ny, nw],
                &[nx],
            );
        }
    }
}

/// A launch that would leave its operands is refused before it runs.
#[test]
fn operands_too_small_are_refused() {
    let Some(device) = device() else { return };
    let (x, y) = (device.alloc::<f32>(99).unwrap(), device.alloc::<f32>(100).unwrap());
    let (x, y) = ([x.span(0..99).unwrap()], [y.span(0..100).unwrap()]);
    let kernel = Scale::copy(10, 10, 10, 10);
    let error = device.launch(&kernel, &Operands { ins: &x, outs: &y, ..Default::default() }).unwrap_err();
    assert_eq!(error.to_string(), "scale: input 0 has 99 elements, 100 are needed");
    let error = device.launch(&kernel, &Operands { ins: &y, ..Default::default() }).unwrap_err();
    assert_eq!(error.to_string(), "scale: output 0 is missing");
    device.synchronize().unwrap();
}
