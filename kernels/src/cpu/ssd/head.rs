//! The element-wise parts of one head's backward pass over one chunk; formulas in `backward`.

use super::backward::{Chunk, Head, SsdBackward};
use super::{Segment, above};
use crate::cpu::vector::{Lanes, WithLanes, each_vector};
use crate::real::Real;

/// What flows through the chunk's tokens alone, and from the state at its start.
pub(super) struct Within<'a, T> {
    pub segment: Segment<'a, T>,
    /// C B^T and dy x^T, on and below the diagonal.
    pub cb: &'a [T],
    pub v: &'a [T],
    /// K is added to.
    pub k_sum: &'a mut [T],
    /// Becomes M.
    pub m: &'a mut [T],
    /// Column sums of V below the diagonal.
    pub below: &'a mut [T],
    /// Gradient of dt' that does not come through decays: here V's diagonal over dt'.
    pub to_step: &'a mut [T],
    /// Gradient of dt' a.
    pub to_decay: &'a mut [T],
    pub start: Option<FromState<'a, T>>,
}

/// S0^T dy_i of every token, C and its gradient.
pub(super) struct FromState<'a, T> {
    pub product: &'a [T],
    pub rows: &'a [T],
    pub ld_rows: usize,
    pub grad: &'a mut [T],
    pub ld_grad: usize,
    pub n: usize,
}

impl<T: Real> FromState<'_, T> {
    /// Adds exp(cum_i) S0^T dy_i to dC_i, and returns its product with C_i.
    #[inline(always)]
    fn token<L: Lanes<T = T>>(&mut self, l: L, i: usize, decay: T) -> T {
        let product = &self.product[i * self.n..][..self.n];
        let row = &self.rows[i * self.ld_rows..][..self.n];
        let grad = &mut self.grad[i * self.ld_grad..][..self.n];
        decay * add_scaled(l, decay, product, row, grad)
    }
}

/// grad += scale product; returns product . row.
#[inline(always)]
fn add_scaled<L: Lanes>(l: L, scale: L::T, product: &[L::T], row: &[L::T], grad: &mut [L::T]) -> L::T {
    let scale = l.splat(scale);
    let mut dot = l.zero();
    each_vector!(L::N, 0..product.len(), |at, end| {
        let product = l.read::<FULL>(product, at, end);
        dot = l.mul_add(product, l.read::<FULL>(row, at, end), dot);
        l.write::<FULL>(l.mul_add(scale, product, l.read::<FULL>(grad, at, end)), grad, at, end);
    });
    l.sum(dot)
}

impl<T: Real> WithLanes<T> for Within<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes<T = T>>(mut self, l: L) {
        let segment = self.segment;
        let len = segment.dt.len();
        let below = &mut self.below[..len];
        below.fill(T::ZERO);
        let mut from_state = T::ZERO;
        for i in (0..len).rev() {
            let (cb, v) = (&self.cb[i * len..][..len], &self.v[i * len..][..len]);
            let (k_row, m) = (&mut self.k_sum[i * len..][..len], &mut self.m[i * len..][..len]);
            let mut crossing = l.zero();
            each_vector!(L::N, 0..i, |at, end| {
                let decay = segment.decay::<L, FULL>(l, i, at, end);
                let dt = l.read::<FULL>(segment.dt, at, end);
                let (cb, v) = (l.read::<FULL>(cb, at, end), l.read::<FULL>(v, at, end));
                let scaled = l.mul(decay, dt);
                l.write::<FULL>(l.mul_add(v, scaled, l.read::<FULL>(k_row, at, end)), k_row, at, end);
                l.write::<FULL>(l.mul(cb, scaled), m, at, end);
                let sum = l.mul_add(l.mul(v, cb), decay, l.read::<FULL>(below, at, end));
                l.write::<FULL>(sum, below, at, end);
                crossing = l.mul_add(sum, dt, crossing);
            });
            let dt = segment.dt[i];
            k_row[i] += v[i] * dt;
            m[i] = cb[i] * dt;
            m[above(i, len)].fill(T::ZERO);
            self.to_step[i] = v[i] * cb[i];
            if let Some(start) = &mut self.start {
                from_state += start.token(l, i, segment.start[i]);
            }
            self.to_decay[i] = l.sum(crossing) + from_state;
        }
    }
}

/// What flows through the state at the chunk's end; d's share too, whose gradient is returned.
pub(super) struct Across<'a, T> {
    pub kernel: &'a SsdBackward,
    pub chunk: &'a Chunk<'a, T>,
    pub head: Head,
    pub segment: Segment<'a, T>,
    pub d: T,
    /// E B of the head.
    pub be: &'a [T],
    /// S0 and E of the group.
    pub states: [Option<&'a [T]>; 2],
    /// E^T x of every token.
    pub to_end: &'a [T],
    /// Where the head's x and the group's B lie in a row.
    pub offsets: [usize; 2],
    pub dxbc: &'a mut [T],
    pub below: &'a [T],
    pub to_step: &'a mut [T],
    pub to_decay: &'a mut [T],
}

impl<T: Real> WithLanes<T> for Across<'_, T> {
    type Out = T;

    #[inline(always)]
    fn run<L: Lanes<T = T>>(self, l: L) -> T {
        let (kernel, chunk, head, segment) = (self.kernel, self.chunk, self.head, self.segment);
        let s = &kernel.shape;
        let (p, n) = (s.head_dim, s.state);
        let width = s.group_heads(head.g) * p;
        let [x_at, b_at] = self.offsets;
        let d = l.splat(self.d);
        let mut to_d = l.zero();
        // Of the state's gradient at the chunk's end, what passes through the decay of token i.
        let mut to_end_sum = T::ZERO;
        if let [Some(state), Some(dstate)] = self.states {
            let mut dot = l.zero();
            for n in 0..n {
                let row = (n * (width / p) + head.k) * p;
                each_vector!(L::N, row..row + p, |at, end| {
                    dot = l.mul_add(l.read::<FULL>(state, at, end), l.read::<FULL>(dstate, at, end), dot);
                });
            }
            to_end_sum = s.totals(chunk.segments)[head.h] * l.sum(dot);
        }
        for i in 0..chunk.len {
            let x = &chunk.xbc[i * s.ld_xbc + x_at..][..p];
            let dy = &chunk.dy[i * kernel.ld_dy + head.h * p..][..p];
            let row = &mut self.dxbc[i * kernel.ld_dxbc..];
            let scale = segment.end[i] * segment.dt[i];
            let wide_scale = l.splat(scale);
            let dx = &mut row[x_at..x_at + p];
            each_vector!(L::N, 0..p, |at, end| {
                let dy = l.read::<FULL>(dy, at, end);
                to_d = l.mul_add(dy, l.read::<FULL>(x, at, end), to_d);
                let mut sum = l.mul_add(d, dy, l.read::<FULL>(dx, at, end));
                if self.states[1].is_some() {
                    let be = &self.be[i * width..][..p];
                    sum = l.mul_add(wide_scale, l.read::<FULL>(be, at, end), sum);
                }
                l.write::<FULL>(sum, dx, at, end);
            });
            self.to_decay[i] += to_end_sum;
            self.to_step[i] += self.below[i];
            if self.states[1].is_some() {
                let b = &chunk.xbc[i * s.ld_xbc + b_at..][..n];
                let along = add_scaled(l, scale, &self.to_end[i * n..][..n], b, &mut row[b_at..b_at + n]);
                to_end_sum += scale * along;
                self.to_step[i] += segment.end[i] * along;
            }
        }
        l.sum(to_d)
    }
}
