//! Depthwise causal convolution over tokens, as Mamba-2 runs it over the channels [x | B | C].
//!
//! y[t, c] = f(bias[c] + sum_k weight[c, width - 1 - k] * x[t - k, c]), f the identity or SiLU; the last tap multiplies
//! the current token. A tap that would reach before the sequence's first token contributes nothing, so packed sequences
//! behave as if each were run alone.
//!
//! Shapes: T tokens, C active channels; x, y, dy, dx are [T, C] with row strides; weight [C_parent, width] and bias
//! [C_parent] are the stored parameters, of which `channels` names the active rows.

use crate::blocks::Blocks;
use crate::kernel::{Args, Cost};
use crate::kernels;
use crate::real::Real;
use rayon::prelude::*;

/// Widest filter the kernels take.
pub const MAX_WIDTH: usize = 8;

/// The function applied to the convolution's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvActivation {
    None,
    Silu,
}

/// Forward. ins: x [T, C], weight [C_parent, width], bias [C_parent]; outs: y [T, C]; ints: cu_seqlens [n + 1].
#[derive(Clone, Debug)]
pub struct Conv1d {
    pub tokens: usize,
    /// Stored rows of the active channels, in the order of x's columns.
    pub channels: Blocks,
    /// Taps of the filter, 1 to [`MAX_WIDTH`].
    pub width: usize,
    pub activation: ConvActivation,
    pub ld_x: usize,
    pub ld_y: usize,
}

/// Backward. ins: x [T, C], weight [C_parent, width], bias [C_parent], dy [T, C]; outs: dx [T, C], dweight
/// [C_parent, width], dbias [C_parent] (both add); ints: cu_seqlens [n + 1].
#[derive(Clone, Debug)]
pub struct Conv1dBackward {
    pub tokens: usize,
    pub channels: Blocks,
    pub width: usize,
    pub activation: ConvActivation,
    pub ld_x: usize,
    pub ld_dy: usize,
    pub ld_dx: usize,
    /// Add to dx instead of overwriting it.
    pub acc_dx: bool,
}

kernels! {
    Conv1d => "conv1d", workspace;
    Conv1dBackward => "conv1d_backward", workspace;
}

/// Tokens of a block: few enough blocks that their partial sums stay small, many enough to share out.
fn block_tokens(tokens: usize) -> usize {
    tokens.div_ceil(64).max(32)
}

/// The filter with taps outermost and the bias last: [width + 1, C].
fn gather<T: Real>(channels: &Blocks, width: usize, weight: &[T], bias: &[T], taps: &mut [T]) {
    let c = channels.len();
    for (stored, dense, len) in channels.iter() {
        for i in 0..len {
            for k in 0..width {
                taps[k * c + dense + i] = weight[(stored + i) * width + k];
            }
        }
        taps[width * c + dense..][..len].copy_from_slice(&bias[stored..stored + len]);
    }
}

/// The sequence that holds token `t`, as its [start, end); empty sequences are stepped over.
fn sequence_of(cu_seqlens: &[i32], t: usize) -> (usize, usize) {
    let next = cu_seqlens.partition_point(|&start| start as usize <= t);
    let start = if next == 0 { 0 } else { cu_seqlens[next - 1] as usize };
    (start, cu_seqlens.get(next).map_or(usize::MAX, |&end| end as usize))
}

/// The convolution before its activation at one token that has `history` earlier tokens in its sequence.
#[inline(always)]
fn convolve<T: Real>(x: &[T], ld_x: usize, t: usize, history: usize, taps: &[T], width: usize, out: &mut [T]) {
    let c = out.len();
    if width == 4 && history >= 3 {
        let rows =
            [&x[(t - 3) * ld_x..][..c], &x[(t - 2) * ld_x..][..c], &x[(t - 1) * ld_x..][..c], &x[t * ld_x..][..c]];
        let w = [&taps[..c], &taps[c..2 * c], &taps[2 * c..3 * c], &taps[3 * c..4 * c]];
        let bias = &taps[4 * c..5 * c];
        for i in 0..c {
            let sum = bias[i] + w[3][i] * rows[3][i];
            out[i] = sum + w[2][i] * rows[2][i] + w[1][i] * rows[1][i] + w[0][i] * rows[0][i];
        }
        return;
    }
    out.copy_from_slice(&taps[width * c..][..c]);
    for k in 0..width.min(history + 1) {
        let row = &x[(t - k) * ld_x..][..c];
        let w = &taps[(width - 1 - k) * c..][..c];
        for i in 0..c {
            out[i] += w[i] * row[i];
        }
    }
}

impl Conv1d {
    pub fn cost(&self) -> Cost {
        let n = (self.tokens * self.channels.len()) as f64;
        Cost::new(n * (2 * self.width + 4) as f64, 2.0 * n)
    }

    pub fn workspace(&self) -> usize {
        (self.width + 1) * self.channels.len()
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let [x, weight, bias] = args.ins else { panic!("conv1d: ins are x, weight, bias") };
        let (c, width) = (self.channels.len(), self.width);
        assert!((1..=MAX_WIDTH).contains(&width), "conv1d: width {width} is not in 1..={MAX_WIDTH}");
        if c == 0 || self.tokens == 0 {
            return;
        }
        let cu_seqlens = args.ints[0];
        let taps = &mut args.work[..(width + 1) * c];
        gather(&self.channels, width, weight, bias, taps);
        let taps = &*taps;
        let used = (self.tokens - 1) * self.ld_y + c;
        let y = &mut args.outs[0][..used];
        crate::par::rows_mut(y, self.ld_y, block_tokens(self.tokens), |first, rows| {
            crate::par::simd!(|| {
                let mut sequence = (0, 0);
                for (i, row) in rows.chunks_mut(self.ld_y).enumerate() {
                    let t = first + i;
                    if t >= sequence.1 {
                        sequence = sequence_of(cu_seqlens, t);
                    }
                    let row = &mut row[..c];
                    convolve(x, self.ld_x, t, t - sequence.0, taps, width, row);
                    if self.activation == ConvActivation::Silu {
                        row.iter_mut().for_each(|v| *v *= v.vsigmoid());
                    }
                }
            });
        });
    }
}

impl Conv1dBackward {
    pub fn cost(&self) -> Cost {
        let n = (self.tokens * self.channels.len()) as f64;
        Cost::new(n * (6 * self.width + 8) as f64, 3.0 * n)
    }

    fn blocks(&self) -> usize {
        self.tokens.div_ceil(block_tokens(self.tokens))
    }

    /// Per block: partial sums of the parameter gradients [width + 1, C] and the last `width` rows of d(pre) [width, C].
    fn block_work(&self) -> usize {
        (2 * self.width + 1) * self.channels.len()
    }

    pub fn workspace(&self) -> usize {
        (self.width + 1) * self.channels.len() + self.blocks() * self.block_work()
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let [x, weight, bias, dy] = args.ins else { panic!("conv1d_backward: ins are x, weight, bias, dy") };
        let [dx, dweight, dbias] = args.outs else { panic!("conv1d_backward: outs are dx, dweight, dbias") };
        let (c, width) = (self.channels.len(), self.width);
        assert!((1..=MAX_WIDTH).contains(&width), "conv1d: width {width} is not in 1..={MAX_WIDTH}");
        if c == 0 || self.tokens == 0 {
            return;
        }
        let cu_seqlens = args.ints[0];
        let (taps, work) = args.work.split_at_mut((width + 1) * c);
        gather(&self.channels, width, weight, bias, taps);
        let taps = &*taps;
        let block = block_tokens(self.tokens);
        let work = &mut work[..self.blocks() * self.block_work()];
        let dx = &mut dx[..(self.tokens - 1) * self.ld_dx + c];
        dx.par_chunks_mut(block * self.ld_dx)
            .zip(work.par_chunks_mut(self.block_work()))
            .enumerate()
            .for_each(|(i, (dx, work))| crate::par::simd!(|| self.block(i * block, dx, work, x, dy, taps, cu_seqlens)));
        for partial in work.chunks(self.block_work()) {
            for (stored, dense, len) in self.channels.iter() {
                for i in 0..len {
                    for k in 0..width {
                        dweight[(stored + i) * width + k] += partial[k * c + dense + i];
                    }
                    dbias[stored + i] += partial[width * c + dense + i];
                }
            }
        }
    }

    /// Tokens `first..` of one block: d(pre) is kept for `width` tokens at a time, so that dx of a token is written as
    /// soon as the last token it reaches is known.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    fn block<T: Real>(
        &self,
        first: usize,
        dx: &mut [T],
        work: &mut [T],
        x: &[T],
        dy: &[T],
        taps: &[T],
        cu_seqlens: &[i32],
    ) {
        let (c, width) = (self.channels.len(), self.width);
        let (partial, ring) = work.split_at_mut((width + 1) * c);
        partial.fill(T::ZERO);
        let count = dx.len().div_ceil(self.ld_dx);
        let mut reading = (0, 0);
        let mut writing = (0, 0);
        for t in first..first + count + width - 1 {
            if t < self.tokens {
                if t >= reading.1 {
                    reading = sequence_of(cu_seqlens, t);
                }
                let history = t - reading.0;
                let slot = &mut ring[(t % width) * c..][..c];
                let dy = &dy[t * self.ld_dy..][..c];
                if self.activation == ConvActivation::Silu {
                    convolve(x, self.ld_x, t, history, taps, width, slot);
                    for (v, &dy) in slot.iter_mut().zip(dy) {
                        let s = v.vsigmoid();
                        *v = dy * s * (T::ONE + *v * (T::ONE - s));
                    }
                } else {
                    slot.copy_from_slice(dy);
                }
                if t < first + count {
                    for k in 0..width.min(history + 1) {
                        let row = &x[(t - k) * self.ld_x..][..c];
                        let sum = &mut partial[(width - 1 - k) * c..][..c];
                        for i in 0..c {
                            sum[i] += slot[i] * row[i];
                        }
                    }
                    let sum = &mut partial[width * c..][..c];
                    for i in 0..c {
                        sum[i] += slot[i];
                    }
                }
            }
            if t + 1 < first + width {
                continue;
            }
            let u = t + 1 - width;
            if u >= writing.1 {
                writing = sequence_of(cu_seqlens, u);
            }
            let row = &mut dx[(u - first) * self.ld_dx..][..c];
            if !self.acc_dx {
                row.fill(T::ZERO);
            }
            let end = writing.1.min(self.tokens);
            for k in 0..width.min(end - u) {
                let w = &taps[(width - 1 - k) * c..][..c];
                let dpre = &ring[((u + k) % width) * c..][..c];
                for i in 0..c {
                    row[i] += w[i] * dpre[i];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
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
        let channels = Blocks::new([(0, 2), (4, 1), (6, 2)]);
        // Lengths 5, 1, 0, 2, 37 and two empty ones at the end; more tokens than a block.
        Case { tokens: 45, channels, stored: 9, width, activation, cu_seqlens: vec![0, 5, 6, 6, 8, 45, 45, 45] }
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
        let loss = |x: &[f64], w: &[f64], b: &[f64]| -> f64 {
            naive(&case, x, w, b).iter().zip(&dy).map(|(y, d)| y * d).sum()
        };
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
}
