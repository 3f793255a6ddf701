//! Depthwise causal convolution over tokens, as Mamba-2 runs it over the channels [x | B | C].
//!
//! y[t, c] = f(bias[c] + sum_k weight[c, width - 1 - k] * x[t - k, c]), f the identity or SiLU; the last tap multiplies
//! the current token. A tap that would reach before the sequence's first token contributes nothing, so packed sequences
//! behave as if each were run alone.
//!
//! Shapes: T tokens, C active channels; x, y, dy, dx are [T, C] with row strides; weight [C_parent, width] and bias
//! [C_parent] are the stored parameters, of which `channels` names the active rows.

use crate::blocks::Blocks;
use crate::cpu::vector::{Lanes, WithLanes};
use crate::kernel::{Args, Cost};
use crate::kernels;
use crate::real::Real;
use std::ops::Range;

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
    tokens.div_ceil(64).max(64)
}

/// Taps that loops are compiled for.
const NARROW: usize = 4;

/// Taps of the loops that run filters of `width`; those beyond the width are zero.
fn padded(width: usize) -> usize {
    if width <= NARROW { NARROW } else { MAX_WIDTH }
}

/// The filter with taps outermost, the last tap last, and then the bias: [padded + 1, C].
fn gather<T: Real>(channels: &Blocks, width: usize, weight: &[T], bias: &[T], taps: &mut [T]) {
    let (c, padded) = (channels.len(), padded(width));
    let first = padded - width;
    taps[..first * c].fill(T::ZERO);
    for (stored, dense, len) in channels.iter() {
        for k in 0..width {
            let taps = &mut taps[(first + k) * c + dense..][..len];
            for (tap, w) in taps.iter_mut().zip(weight[stored * width..].chunks_exact(width)) {
                *tap = w[k];
            }
        }
        taps[padded * c + dense..][..len].copy_from_slice(&bias[stored..stored + len]);
    }
}

/// The sequence that holds token `t`, as its [start, end); empty sequences are stepped over.
fn sequence_of(cu_seqlens: &[i32], t: usize) -> (usize, usize) {
    let next = cu_seqlens.partition_point(|&start| start as usize <= t);
    let start = if next == 0 { 0 } else { cu_seqlens[next - 1] as usize };
    (start, cu_seqlens.get(next).map_or(usize::MAX, |&end| end as usize))
}

/// Calls `f(start, end, lo..hi)` for every sequence that has tokens among `tokens`: lo..hi are those.
#[inline(always)]
fn each_sequence(cu_seqlens: &[i32], tokens: Range<usize>, mut f: impl FnMut(usize, usize, Range<usize>)) {
    let mut lo = tokens.start;
    while lo < tokens.end {
        let (start, end) = sequence_of(cu_seqlens, lo);
        let hi = end.min(tokens.end);
        f(start, end, lo..hi);
        lo = hi;
    }
}

/// What the loops over one strip of channels read of x and the filter: channels at..end, at most one vector of them.
#[derive(Clone, Copy)]
struct Strip<'a, T> {
    x: &'a [T],
    ld_x: usize,
    taps: &'a [T],
    channels: usize,
    at: usize,
    end: usize,
}

/// A strip's filter and the rows of x that it lies on.
struct Filter<V, const W: usize> {
    taps: [V; W],
    bias: V,
    /// Row t - k of x, the current token's first.
    rows: [V; W],
}

impl<T: Real> Strip<'_, T> {
    /// The filter before token `first` of a sequence that begins at token `start`.
    #[inline(always)]
    fn filter<L: Lanes<T = T>, const W: usize, const FULL: bool>(
        self,
        l: L,
        start: usize,
        first: usize,
    ) -> Filter<L::V, W> {
        let tap = |k: usize| l.read::<FULL>(self.taps, k * self.channels + self.at, k * self.channels + self.end);
        let mut taps = [l.zero(); W];
        let mut rows = [l.zero(); W];
        for k in 0..W {
            taps[k] = tap(k);
            if first - start > k {
                rows[k] = self.row::<L, FULL>(l, first - 1 - k);
            }
        }
        Filter { taps, bias: tap(W), rows }
    }

    #[inline(always)]
    fn row<L: Lanes<T = T>, const FULL: bool>(self, l: L, t: usize) -> L::V {
        l.read::<FULL>(self.x, t * self.ld_x + self.at, t * self.ld_x + self.end)
    }
}

impl<V: Copy, const W: usize> Filter<V, W> {
    /// Moves to the next token, whose row is `row`; the convolution there, before its activation.
    #[inline(always)]
    fn step<L: Lanes<V = V>>(&mut self, l: L, row: V) -> V {
        for k in (1..W).rev() {
            self.rows[k] = self.rows[k - 1];
        }
        self.rows[0] = row;
        let mut sum = self.bias;
        for k in 0..W {
            sum = l.mul_add(self.taps[W - 1 - k], self.rows[k], sum);
        }
        sum
    }
}

impl Conv1d {
    pub fn cost(&self) -> Cost {
        let n = (self.tokens * self.channels.len()) as f64;
        Cost::new(n * (2 * self.width + 4) as f64, 2.0 * n)
    }

    pub fn workspace(&self) -> usize {
        (padded(self.width) + 1) * self.channels.len()
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let [x, weight, bias] = args.ins else { panic!("conv1d: ins are x, weight, bias") };
        let (c, width) = (self.channels.len(), self.width);
        assert!((1..=MAX_WIDTH).contains(&width), "conv1d: width {width} is not in 1..={MAX_WIDTH}");
        if c == 0 || self.tokens == 0 {
            return;
        }
        let cu_seqlens = args.ints[0];
        let taps = &mut args.work[..self.workspace()];
        gather(&self.channels, width, weight, bias, taps);
        let taps = &*taps;
        let y = &mut args.outs[0][..(self.tokens - 1) * self.ld_y + c];
        crate::par::rows_mut(y, self.ld_y, block_tokens(self.tokens), |first, y| {
            let block = Forward { kernel: self, first, x, taps, cu_seqlens, y };
            match padded(width) {
                NARROW => T::vectors(Narrow(block)),
                _ => T::vectors(Wide(block)),
            }
        });
    }
}

/// Work on a block of tokens with filters of [`NARROW`] taps, or of [`MAX_WIDTH`].
struct Narrow<B>(B);
struct Wide<B>(B);

trait Block<T: Real> {
    fn strips<L: Lanes<T = T>, const W: usize>(self, l: L);
}

impl<T: Real, B: Block<T>> WithLanes<T> for Narrow<B> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes<T = T>>(self, l: L) {
        self.0.strips::<L, NARROW>(l);
    }
}

impl<T: Real, B: Block<T>> WithLanes<T> for Wide<B> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes<T = T>>(self, l: L) {
        self.0.strips::<L, MAX_WIDTH>(l);
    }
}

/// A block of the forward pass: tokens from `first`, whose rows of y begin `y`.
struct Forward<'a, T> {
    kernel: &'a Conv1d,
    first: usize,
    x: &'a [T],
    taps: &'a [T],
    cu_seqlens: &'a [i32],
    y: &'a mut [T],
}

impl<T: Real> Block<T> for Forward<'_, T> {
    #[inline(always)]
    fn strips<L: Lanes<T = T>, const W: usize>(mut self, l: L) {
        let (kernel, x, taps) = (self.kernel, self.x, self.taps);
        let channels = kernel.channels.len();
        let tokens = self.first..self.first + self.y.len().div_ceil(kernel.ld_y);
        each_sequence(self.cu_seqlens, tokens, |start, _, tokens| {
            for at in (0..channels).step_by(L::N) {
                let end = channels.min(at + L::N);
                let strip = Strip { x, ld_x: kernel.ld_x, taps, channels, at, end };
                if end - at == L::N {
                    self.strip::<L, W, true>(l, strip, start, tokens.clone());
                } else {
                    self.strip::<L, W, false>(l, strip, start, tokens.clone());
                }
            }
        });
    }
}

impl<T: Real> Forward<'_, T> {
    #[inline(always)]
    fn strip<L: Lanes<T = T>, const W: usize, const FULL: bool>(
        &mut self,
        l: L,
        strip: Strip<'_, T>,
        start: usize,
        tokens: Range<usize>,
    ) {
        let mut filter = strip.filter::<L, W, FULL>(l, start, tokens.start);
        let silu = self.kernel.activation == ConvActivation::Silu;
        for t in tokens {
            let mut sum = filter.step(l, strip.row::<L, FULL>(l, t));
            if silu {
                sum = l.mul(sum, l.sigmoid(sum));
            }
            let row = (t - self.first) * self.kernel.ld_y;
            l.write::<FULL>(sum, self.y, row + strip.at, row + strip.end);
        }
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

    /// The filter, or one block's sums of its gradient: [padded + 1, C].
    fn filter_len(&self) -> usize {
        (padded(self.width) + 1) * self.channels.len()
    }

    pub fn workspace(&self) -> usize {
        (1 + self.blocks()) * self.filter_len()
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
        let (taps, sums) = args.work.split_at_mut(self.filter_len());
        gather(&self.channels, width, weight, bias, taps);
        let taps = &*taps;
        let block = block_tokens(self.tokens);
        let sums = &mut sums[..self.blocks() * self.filter_len()];
        let dx = &mut dx[..(self.tokens - 1) * self.ld_dx + c];
        crate::par::rows_pair_mut((dx, self.ld_dx), (&mut *sums, self.filter_len()), block, |first, dx, sums| {
            sums.fill(T::ZERO);
            let block = Backward { kernel: self, first, x, dy, taps, cu_seqlens, dx, sums };
            match padded(width) {
                NARROW => T::vectors(Narrow(block)),
                _ => T::vectors(Wide(block)),
            }
        });
        let (total, more) = sums.split_at_mut(self.filter_len());
        crate::par::simd!(|| {
            for sums in more.chunks(self.filter_len()) {
                for (total, &sum) in total.iter_mut().zip(sums) {
                    *total += sum;
                }
            }
        });
        let first = padded(width) - width;
        for (stored, dense, len) in self.channels.iter() {
            for i in 0..len {
                for k in 0..width {
                    dweight[(stored + i) * width + k] += total[(first + k) * c + dense + i];
                }
                dbias[stored + i] += total[padded(width) * c + dense + i];
            }
        }
    }
}

/// A block of the backward pass: tokens from `first`, whose rows of dx begin `dx`, and its own sums.
struct Backward<'a, T> {
    kernel: &'a Conv1dBackward,
    first: usize,
    x: &'a [T],
    dy: &'a [T],
    taps: &'a [T],
    cu_seqlens: &'a [i32],
    dx: &'a mut [T],
    sums: &'a mut [T],
}

impl<T: Real> Block<T> for Backward<'_, T> {
    #[inline(always)]
    fn strips<L: Lanes<T = T>, const W: usize>(mut self, l: L) {
        let (kernel, x, taps) = (self.kernel, self.x, self.taps);
        let channels = kernel.channels.len();
        let tokens = self.first..self.first + self.dx.len().div_ceil(kernel.ld_dx);
        each_sequence(self.cu_seqlens, tokens, |start, stop, tokens| {
            let stop = stop.min(kernel.tokens);
            for at in (0..channels).step_by(L::N) {
                let end = channels.min(at + L::N);
                let strip = Strip { x, ld_x: kernel.ld_x, taps, channels, at, end };
                if end - at == L::N {
                    self.strip::<L, W, true>(l, strip, start..stop, tokens.clone());
                } else {
                    self.strip::<L, W, false>(l, strip, start..stop, tokens.clone());
                }
            }
        });
    }
}

impl<T: Real> Backward<'_, T> {
    /// The block's tokens of one sequence. dx of a token is written when the last token that it reaches is known: up to
    /// W - 1 tokens beyond the block are convolved again.
    #[inline(always)]
    fn strip<L: Lanes<T = T>, const W: usize, const FULL: bool>(
        &mut self,
        l: L,
        strip: Strip<'_, T>,
        sequence: Range<usize>,
        tokens: Range<usize>,
    ) {
        let kernel = self.kernel;
        let silu = kernel.activation == ConvActivation::Silu;
        let (at, end, c) = (strip.at, strip.end, strip.channels);
        let one = l.splat(T::ONE);
        let mut filter = strip.filter::<L, W, FULL>(l, sequence.start, tokens.start);
        let mut sums = [l.zero(); W];
        for (k, sum) in sums.iter_mut().enumerate() {
            *sum = l.read::<FULL>(self.sums, k * c + at, k * c + end);
        }
        let mut bias_sum = l.read::<FULL>(self.sums, W * c + at, W * c + end);
        // Gradients before the activation at tokens t - k.
        let mut grads = [l.zero(); W];
        for t in tokens.start..tokens.end + W - 1 {
            for k in (1..W).rev() {
                grads[k] = grads[k - 1];
            }
            grads[0] = l.zero();
            if t < sequence.end {
                let sum = filter.step(l, strip.row::<L, FULL>(l, t));
                let dy = l.read::<FULL>(self.dy, t * kernel.ld_dy + at, t * kernel.ld_dy + end);
                grads[0] = if silu {
                    let s = l.sigmoid(sum);
                    l.mul(l.mul(dy, s), l.mul_add(sum, l.sub(one, s), one))
                } else {
                    dy
                };
                if t < tokens.end {
                    for k in 0..W {
                        sums[W - 1 - k] = l.mul_add(grads[0], filter.rows[k], sums[W - 1 - k]);
                    }
                    bias_sum = l.add(bias_sum, grads[0]);
                }
            }
            if t + 1 >= tokens.start + W {
                let row = (t + 1 - W - self.first) * kernel.ld_dx;
                let mut dx = if kernel.acc_dx { l.read::<FULL>(self.dx, row + at, row + end) } else { l.zero() };
                for (&tap, &grad) in filter.taps.iter().zip(&grads) {
                    dx = l.mul_add(tap, grad, dx);
                }
                l.write::<FULL>(dx, self.dx, row + at, row + end);
            }
        }
        for (k, &sum) in sums.iter().enumerate() {
            l.write::<FULL>(sum, self.sums, k * c + at, k * c + end);
        }
        l.write::<FULL>(bias_sum, self.sums, W * c + at, W * c + end);
    }
}

#[cfg(test)]
mod tests;
