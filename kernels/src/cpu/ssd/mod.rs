//! Mamba-2 state space scan (SSD, Dao and Gu 2024, "Transformers are SSMs"), in chunked matrix form.
//!
//! Per head h with group g = h % G and a = -exp(a_log[h]):
//! dt'_t = softplus(dt_t + dt_bias[h]) (optionally clamped), S_t = exp(dt'_t a) S_{t-1} + dt'_t x_t B_t^T,
//! y_t = S_t C_t + d[h] x_t. S starts each sequence as its initial state, or zero.
//!
//! A sequence is cut into chunks of Q tokens (the last one shorter); chunks never cross a sequence boundary. With
//! cum_i the sum of dt' a from the chunk's first token to token i, both included, a chunk that starts in state S0 gives
//!   y_i = sum_{j<=i} (C_i . B_j) exp(cum_i - cum_j) dt'_j x_j + exp(cum_i) S0 C_i + d x_i,
//!   S_end = exp(cum_last) S0 + sum_j exp(cum_last - cum_j) dt'_j x_j B_j^T,
//! so the work is matrix products within chunks and one pass over the chunks' states between them. Decays are
//! exponentials of differences <= 0 of cum, which is summed in f64 and kept as two numbers (high part and remainder):
//! neither long chunks nor strong decays lose digits, and nothing over- or underflows on the way.
//!
//! Shapes: T tokens, S sequences, H heads, P head dim, G groups, N state. xbc is one operand [T, ld_xbc] with column
//! segments x [H * P] at x_off, B [G * N] at b_off, C [G * N] at c_off; dt [T, H] raw; a_log, d, dt_bias [H] are
//! prefixes of the stored parameters; initial and final states are [S, H, P, N].
//!
//! Saved for the backward pass: the states at the chunks' starts ([`SsdShape::states_len`] elements, layout
//! [chunk, group, N, head in group, P]) and the chunk table ([`SsdShape::table_len`] integers).

mod backward;
mod forward;
mod head;
#[cfg(test)]
mod tests;

pub use backward::SsdBackward;
pub use forward::Ssd;

use crate::cpu::vector::Lanes;
use crate::real::Real;
use std::ops::Range;

/// Sizes shared by forward and backward.
#[derive(Clone, Debug)]
pub struct SsdShape {
    pub tokens: usize,
    /// Length of cu_seqlens less one; empty sequences count.
    pub sequences: usize,
    pub heads: usize,
    pub head_dim: usize,
    pub groups: usize,
    pub state: usize,
    /// Tokens of a chunk, 64 to 128 for speed; results do not depend on it beyond rounding.
    pub chunk: usize,
    pub x_off: usize,
    pub b_off: usize,
    pub c_off: usize,
    pub ld_xbc: usize,
    pub ld_dt: usize,
    /// Bounds that dt' is clamped to; the gradient is zero outside.
    pub dt_limit: Option<(f64, f64)>,
}

/// Most pieces the chunks are shared out in; each has its own scratch.
const MAX_LEAVES: usize = 64;

impl SsdShape {
    /// Upper bound of the number of chunks for any cu_seqlens of this length: with S' = min(S, T) sequences that are not
    /// empty, S' + (T - S') / Q.
    pub fn max_chunks(&self) -> usize {
        let sequences = self.sequences.min(self.tokens);
        sequences + (self.tokens - sequences) / self.chunk
    }

    /// Elements of one state of all heads, H * N * P.
    pub fn state_len(&self) -> usize {
        self.heads * self.state * self.head_dim
    }

    /// Elements of the saved chunk states.
    pub fn states_len(&self) -> usize {
        self.max_chunks() * self.state_len()
    }

    /// Integers of the chunk table: the count, each chunk's first token and one past the last, each chunk's sequence.
    pub fn table_len(&self) -> usize {
        2 * self.max_chunks() + 2
    }

    fn max_leaves(&self) -> usize {
        self.max_chunks().min(MAX_LEAVES)
    }

    /// Heads of group `g`.
    fn group_heads(&self, g: usize) -> usize {
        (self.heads + self.groups - 1 - g) / self.groups
    }

    /// Most heads a group has.
    fn most_heads(&self) -> usize {
        self.heads.div_ceil(self.groups)
    }

    /// Where group `g` begins inside a state of all heads; inside, element (n, k, p) of head k * G + g lies at
    /// (n * group_heads + k) * P + p.
    fn group_offset(&self, g: usize) -> usize {
        (g * (self.heads / self.groups) + g.min(self.heads % self.groups)) * self.state * self.head_dim
    }

    fn check(&self) {
        assert!(
            self.chunk > 0 && self.groups > 0,
            "ssd_scan: chunk {} and groups {} must be positive",
            self.chunk,
            self.groups
        );
    }

    /// Elements of one chunk's segments: dt', cum (high part), cum (remainder), decay from the chunk's start and to its
    /// end of each head, [H, 5, Q], and each head's decay over the whole chunk, [H].
    fn segment_len(&self) -> usize {
        (5 * self.chunk + 1) * self.heads
    }

    /// Each head's decay over the whole chunk.
    #[inline(always)]
    fn totals<'a, T>(&self, segments: &'a [T]) -> &'a [T] {
        &segments[5 * self.chunk * self.heads..][..self.heads]
    }

    /// Fills one chunk's segments from `dt`, whose first row is the chunk's first token.
    #[inline(always)]
    fn fill_segments<T: Real>(&self, len: usize, dt: &[T], a_log: &[T], dt_bias: &[T], segments: &mut [T]) {
        let limit = self.dt_limit.map(|(lo, hi)| (T::of(lo), T::of(hi)));
        for h in 0..self.heads {
            let segment = &mut segments[5 * h * self.chunk..][..5 * self.chunk];
            let mut parts = segment.chunks_exact_mut(self.chunk).map(|part| &mut part[..len]);
            let [Some(steps), Some(high), Some(low), Some(start), Some(end)] = std::array::from_fn(|_| parts.next())
            else {
                return;
            };
            for (i, step) in steps.iter_mut().enumerate() {
                *step = dt[i * self.ld_dt + h] + dt_bias[h];
            }
            for step in &mut *steps {
                *step = step.vsoftplus();
            }
            if let Some((lo, hi)) = limit {
                for step in &mut *steps {
                    *step = step.max(lo).min(hi);
                }
            }
            let a = -a_log[h].to_f64().exp();
            let mut sum = 0.0f64;
            for i in 0..len {
                sum += steps[i].to_f64() * a;
                high[i] = T::of(sum);
                low[i] = T::of(sum - high[i].to_f64());
            }
            let (last_high, last_low) = (high[len - 1], low[len - 1]);
            for ((start, &high), &low) in start.iter_mut().zip(&*high).zip(&*low) {
                *start = (high + low).vexp();
            }
            for ((end, &high), &low) in end.iter_mut().zip(&*high).zip(&*low) {
                *end = ((last_high - high) + (last_low - low)).vexp();
            }
            segments[5 * self.chunk * self.heads + h] = T::of(sum.exp());
        }
    }

    /// One head's segment of a chunk.
    #[inline(always)]
    fn segment<'a, T>(&self, h: usize, len: usize, segments: &'a [T]) -> Segment<'a, T> {
        let part = |i: usize| &segments[(5 * h + i) * self.chunk..][..len];
        Segment { dt: part(0), high: part(1), low: part(2), start: part(3), end: part(4) }
    }

    /// [H, P, N] of one sequence into the layout of the saved states.
    fn import_state<T: Real>(&self, from: &[T], to: &mut [T]) {
        self.each_state_element(|outer, inner| to[inner] = from[outer]);
    }

    /// The reverse of [`Self::import_state`].
    fn export_state<T: Real>(&self, from: &[T], acc: bool, to: &mut [T]) {
        self.each_state_element(|outer, inner| to[outer] = if acc { to[outer] + from[inner] } else { from[inner] });
    }

    fn each_state_element(&self, mut f: impl FnMut(usize, usize)) {
        for g in 0..self.groups {
            let (heads, offset) = (self.group_heads(g), self.group_offset(g));
            for k in 0..heads {
                for p in 0..self.head_dim {
                    for n in 0..self.state {
                        let outer = ((k * self.groups + g) * self.head_dim + p) * self.state + n;
                        f(outer, offset + (n * heads + k) * self.head_dim + p);
                    }
                }
            }
        }
    }

    /// One step of the pass over chunks: `state` takes what `carry` is, and `carry` becomes decay * carry + state.
    fn carry_step<T: Real>(&self, totals: &[T], carry: &mut [T], state: &mut [T]) {
        // Rows (group, n) of the state; element by element, so their sharing out changes nothing.
        let rows = self.groups * self.state;
        let blocks = (carry.len() / (32 * 1024)).clamp(1, rows);
        let offset = |row: usize| match row / self.state {
            g if g == self.groups => self.state_len(),
            g => self.group_offset(g) + row % self.state * self.group_heads(g) * self.head_dim,
        };
        let cut = |_: usize, block: usize| offset(block * rows / blocks);
        share(0..blocks, [carry, state], &cut, &|block, [carry, state]| {
            crate::par::simd!(|| {
                let mut at = 0;
                for row in block * rows / blocks..(block + 1) * rows / blocks {
                    let g = row / self.state;
                    for k in 0..self.group_heads(g) {
                        let decay = totals[k * self.groups + g];
                        let carry = &mut carry[at..at + self.head_dim];
                        for (c, s) in carry.iter_mut().zip(&mut state[at..at + self.head_dim]) {
                            let next = decay * *c + *s;
                            *s = *c;
                            *c = next;
                        }
                        at += self.head_dim;
                    }
                }
            });
        });
    }

    /// Runs [`Self::carry_step`] over every sequence's chunks, in order or in reverse; `carry` is [S, H * N * P].
    fn carry_pass<T: Real>(&self, table: &Table<'_>, segments: &[T], reverse: bool, carry: &mut [T], states: &mut [T]) {
        let size = self.state_len();
        if size == 0 || self.sequences == 0 {
            return;
        }
        let cut = |buf: usize, s: usize| if buf == 0 { s * size } else { table.first_of(s) * size };
        share(0..self.sequences, [carry, states], &cut, &|s, [carry, states]| {
            let first = table.first_of(s);
            let count = table.first_of(s + 1) - first;
            for i in 0..count {
                let i = if reverse { count - 1 - i } else { i };
                let totals = self.totals(&segments[(first + i) * self.segment_len()..]);
                self.carry_step(totals, carry, &mut states[i * size..][..size]);
            }
        });
    }
}

/// What one head's decays over one chunk are made of.
#[derive(Clone, Copy)]
struct Segment<'a, T> {
    dt: &'a [T],
    high: &'a [T],
    low: &'a [T],
    /// exp(cum_i): decay from the chunk's start.
    start: &'a [T],
    /// exp(cum_last - cum_i): decay to the chunk's end.
    end: &'a [T],
}

impl<T: Real> Segment<'_, T> {
    /// exp(cum_i - cum_j) for the tokens j in at..end, all of them before i.
    #[inline(always)]
    fn decay<L: Lanes<T = T>, const FULL: bool>(&self, l: L, i: usize, at: usize, end: usize) -> L::V {
        let high = l.sub(l.splat(self.high[i]), l.read::<FULL>(self.high, at, end));
        let low = l.sub(l.splat(self.low[i]), l.read::<FULL>(self.low, at, end));
        l.exp(l.add(high, low))
    }
}

/// Elements of row `i` of a triangular factor, above its diagonal, that a product reads: they must be zero.
#[inline(always)]
fn above(i: usize, len: usize) -> Range<usize> {
    i + 1..len.min(i / 8 * 8 + 8)
}

/// The chunks of all sequences, in token order.
struct Table<'a> {
    /// First token of each chunk, then one past the last token.
    starts: &'a [i32],
    sequence: &'a [i32],
}

impl<'a> Table<'a> {
    /// Writes the table of `cu_seqlens` into `out` ([`SsdShape::table_len`] integers).
    fn write(shape: &SsdShape, cu_seqlens: &[i32], out: &'a mut [i32]) -> Self {
        let max = shape.max_chunks();
        let mut count = 0;
        for (s, ends) in cu_seqlens.windows(2).enumerate() {
            for start in (ends[0]..ends[1]).step_by(shape.chunk) {
                out[1 + count] = start;
                out[2 + max + count] = s as i32;
                count += 1;
            }
        }
        out[0] = count as i32;
        out[1 + count] = cu_seqlens.last().copied().unwrap_or(0);
        Table::read(shape, out)
    }

    fn read(shape: &SsdShape, table: &'a [i32]) -> Self {
        let count = table[0] as usize;
        Table { starts: &table[1..count + 2], sequence: &table[2 + shape.max_chunks()..][..count] }
    }

    fn count(&self) -> usize {
        self.sequence.len()
    }

    /// First token and length of chunk `c`.
    #[inline(always)]
    fn span(&self, c: usize) -> (usize, usize) {
        let start = self.starts[c] as usize;
        (start, self.starts[c + 1] as usize - start)
    }

    /// First chunk of sequence `s`, or where it would be.
    fn first_of(&self, s: usize) -> usize {
        self.sequence.partition_point(|&q| (q as usize) < s)
    }

    fn is_first(&self, c: usize) -> bool {
        c == 0 || self.sequence[c - 1] != self.sequence[c]
    }

    fn is_last(&self, c: usize) -> bool {
        c + 1 == self.count() || self.sequence[c + 1] != self.sequence[c]
    }

    fn leaves(&self) -> usize {
        self.count().min(MAX_LEAVES)
    }

    /// Chunks of leaf `l`.
    fn leaf(&self, l: usize) -> Range<usize> {
        l * self.count() / self.leaves()..(l + 1) * self.count() / self.leaves()
    }

    /// First chunk of leaf `l`, the count for one past the last.
    fn leaf_start(&self, l: usize) -> usize {
        l * self.count() / self.leaves()
    }
}

/// Calls `f(i, parts)` for every i in `range`, in parallel, where the parts of i are the elements of each buffer from
/// `cut(buffer, i)` to `cut(buffer, i + 1)`, less what lies beyond its end. `bufs` begin at `range`'s first cut.
fn share<T: Real, const K: usize>(
    range: Range<usize>,
    bufs: [&mut [T]; K],
    cut: &(impl Fn(usize, usize) -> usize + Sync),
    f: &(impl Fn(usize, [&mut [T]; K]) + Sync),
) {
    match range.len() {
        0 => {}
        1 => f(range.start, bufs),
        n => {
            let mid = range.start + n / 2;
            let mut index = 0;
            let parts = bufs.map(|buf| {
                let at = cut(index, mid) - cut(index, range.start);
                index += 1;
                buf.split_at_mut(at.min(buf.len()))
            });
            let mut right: [&mut [T]; K] = std::array::from_fn(|_| Default::default());
            let mut slots = right.iter_mut();
            let left = parts.map(|(l, r)| {
                if let Some(slot) = slots.next() {
                    *slot = r;
                }
                l
            });
            rayon::join(|| share(range.start..mid, left, cut, f), || share(mid..range.end, right, cut, f));
        }
    }
}
