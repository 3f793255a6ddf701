//! Forward pass of the scan.

use super::{Segment, SsdShape, Table, above, share};
use crate::cpu::product::{Left, Part, product, transpose};
use crate::cpu::vector::{Lanes, WithLanes, each_vector};
use crate::kernel::{Args, Cost};
use crate::kernels;
use crate::real::Real;

/// Forward. ins: xbc [T, ld_xbc], dt [T, H], a_log [H], d [H], dt_bias [H], initial state [S, H, P, N] if `has_init`;
/// outs: y [T, H * P], states [`SsdShape::states_len`], final state [S, H, P, N] if `has_final`; ints: cu_seqlens
/// [S + 1]; int_outs: table [`SsdShape::table_len`].
#[derive(Clone, Debug)]
pub struct Ssd {
    pub shape: SsdShape,
    pub ld_y: usize,
    pub has_init: bool,
    pub has_final: bool,
}

kernels! {
    Ssd => "ssd_scan", workspace;
}

impl SsdShape {
    /// Columns of the heads of group `g` gathered side by side, each token's scaled by `scale(head, token)`:
    /// out [len, heads of the group * P] from rows of `ld` elements whose head 0 begins at `off`.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn gather<T: Real>(
        &self,
        g: usize,
        len: usize,
        rows: &[T],
        ld: usize,
        off: usize,
        out: &mut [T],
        scale: impl Fn(usize, usize) -> T,
    ) {
        T::vectors(Gather { shape: self, g, len, rows, ld, off, out, scale });
    }
}

struct Gather<'a, T, F> {
    shape: &'a SsdShape,
    g: usize,
    len: usize,
    rows: &'a [T],
    ld: usize,
    off: usize,
    out: &'a mut [T],
    scale: F,
}

impl<T: Real, F: Fn(usize, usize) -> T> WithLanes<T> for Gather<'_, T, F> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes<T = T>>(self, l: L) {
        let (heads, p) = (self.shape.group_heads(self.g), self.shape.head_dim);
        for i in 0..self.len {
            for k in 0..heads {
                let h = k * self.shape.groups + self.g;
                let from = &self.rows[i * self.ld + self.off + h * p..][..p];
                let to = &mut self.out[(i * heads + k) * p..][..p];
                let s = l.splat((self.scale)(h, i));
                each_vector!(L::N, 0..p, |at, end| {
                    l.write::<FULL>(l.mul(l.read::<FULL>(from, at, end), s), to, at, end);
                });
            }
        }
    }
}

impl Ssd {
    pub fn cost(&self) -> Cost {
        let s = &self.shape;
        let (t, h, p, n) = (s.tokens as f64, s.heads as f64, s.head_dim as f64, s.state as f64);
        let (q, g) = (s.chunk as f64, s.groups as f64);
        Cost::new(t * (h * (2.0 * q * p + 4.0 * n * p) + 2.0 * g * q * n), t * (2.0 * h * p + 2.0 * g * n + h))
    }

    /// Per leaf: C B^T [Q, Q], M [Q, Q], B^T [N, Q], gathered x and C S [Q, heads of a group * P].
    fn leaf_work(&self) -> usize {
        let s = &self.shape;
        s.chunk * (2 * s.chunk + s.state + s.most_heads() * s.head_dim)
    }

    /// Segments of each chunk, one state of each sequence, the leaves' scratch.
    pub fn workspace(&self) -> usize {
        let s = &self.shape;
        s.max_chunks() * s.segment_len() + s.sequences * s.state_len() + s.max_leaves() * self.leaf_work()
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let s = &self.shape;
        s.check();
        let [xbc, dt, a_log, d, dt_bias, init @ ..] = args.ins else {
            panic!("ssd_scan: ins are xbc, dt, a_log, d, dt_bias, [initial state]")
        };
        let [y, states, last @ ..] = args.outs else { panic!("ssd_scan: outs are y, states, [final state]") };
        let table = Table::write(s, args.ints[0], args.int_outs[0]);
        let (segments, work) = args.work.split_at_mut(s.max_chunks() * s.segment_len());
        let (carry, scratch) = work.split_at_mut(s.sequences * s.state_len());
        let size = s.state_len();
        carry.fill(T::ZERO);
        if self.has_init && size > 0 {
            carry.chunks_mut(size).zip(init[0].chunks(size)).for_each(|(to, from)| s.import_state(from, to));
        }

        // What each chunk adds to the state.
        let units = [s.segment_len(), size, self.leaf_work()];
        let cut = |buf: usize, leaf: usize| units[buf] * if buf == 2 { leaf } else { table.leaf_start(leaf) };
        share(
            0..table.leaves(),
            [&mut *segments, &mut **states, &mut *scratch],
            &cut,
            &|leaf, [segments, states, work]| {
                for (i, c) in table.leaf(leaf).enumerate() {
                    let (start, len) = table.span(c);
                    let segments = &mut segments[i * s.segment_len()..][..s.segment_len()];
                    let states = &mut states[i * size..][..size];
                    crate::par::simd!(|| s.fill_segments(len, &dt[start * s.ld_dt..], a_log, dt_bias, segments));
                    if table.is_last(c) && !self.has_final {
                        states.fill(T::ZERO);
                        continue;
                    }
                    self.local_states(len, &xbc[start * s.ld_xbc..], segments, states, work);
                }
            },
        );
        let segments = &*segments;
        s.carry_pass(&table, segments, false, carry, states);
        if self.has_final && size > 0 {
            last[0].chunks_mut(size).zip(carry.chunks(size)).for_each(|(to, from)| s.export_state(from, false, to));
        }

        let states = &**states;
        let cut = |buf: usize, leaf: usize| match buf {
            0 => table.starts[table.leaf_start(leaf)] as usize * self.ld_y,
            _ => leaf * self.leaf_work(),
        };
        share(0..table.leaves(), [&mut **y, scratch], &cut, &|leaf, [y, work]| {
            let base = table.span(table.leaf_start(leaf)).0;
            for c in table.leaf(leaf) {
                let (start, len) = table.span(c);
                let state = (self.has_init || !table.is_first(c)).then(|| &states[c * size..][..size]);
                let segments = &segments[c * s.segment_len()..][..s.segment_len()];
                self.outputs(
                    len,
                    &xbc[start * s.ld_xbc..],
                    segments,
                    state,
                    d,
                    &mut y[(start - base) * self.ld_y..],
                    work,
                );
            }
        });
    }

    /// sum_j exp(cum_last - cum_j) dt'_j B_j x_j^T of every group, [N, heads * P].
    fn local_states<T: Real>(&self, len: usize, xbc: &[T], segments: &[T], states: &mut [T], work: &mut [T]) {
        let s = &self.shape;
        for g in 0..s.groups {
            let width = s.group_heads(g) * s.head_dim;
            let x = &mut work[..len * width];
            s.gather(g, len, xbc, s.ld_xbc, s.x_off, x, |h, i| {
                let segment = s.segment(h, len, segments);
                segment.end[i] * segment.dt[i]
            });
            let b = Left::cols(&xbc[s.b_off + g * s.state..], s.ld_xbc);
            let to = &mut states[s.group_offset(g)..];
            product((s.state, width, len), Part::All, b, x, width, false, to, width);
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn outputs<T: Real>(
        &self,
        len: usize,
        xbc: &[T],
        segments: &[T],
        state: Option<&[T]>,
        d: &[T],
        y: &mut [T],
        work: &mut [T],
    ) {
        let s = &self.shape;
        let p = s.head_dim;
        let (cb, work) = work.split_at_mut(s.chunk * s.chunk);
        let (m, work) = work.split_at_mut(s.chunk * s.chunk);
        let (transposed, cs) = work.split_at_mut(s.chunk * s.state);
        for g in 0..s.groups {
            let heads = s.group_heads(g);
            let width = heads * p;
            transpose((len, s.state), &xbc[s.b_off + g * s.state..], s.ld_xbc, transposed, len);
            let c = Left::rows(&xbc[s.c_off + g * s.state..], s.ld_xbc);
            product((len, len, s.state), Part::LowerResult, c, transposed, len, false, cb, len);
            if let Some(state) = state {
                product((len, width, s.state), Part::All, c, &state[s.group_offset(g)..], width, false, cs, width);
            }
            for k in 0..heads {
                let h = k * s.groups + g;
                let x = &xbc[s.x_off + h * p..];
                let y = &mut y[h * p..];
                let segment = s.segment(h, len, segments);
                let cs = state.is_some().then(|| &cs[k * p..]);
                let (ld_x, ld_y) = (s.ld_xbc, self.ld_y);
                T::vectors(Mixing { p, cb, segment, m, d: d[h], x, ld_x, cs, ld_cs: width, y, ld_y });
                product((len, p, len), Part::LowerLeft, Left::rows(m, len), x, ld_x, true, y, ld_y);
            }
        }
    }
}

/// Of one head and chunk: M_ij = (C_i . B_j) exp(cum_i - cum_j) dt'_j for j <= i, zero above; and y_i without what
/// comes through M.
struct Mixing<'a, T> {
    p: usize,
    cb: &'a [T],
    segment: Segment<'a, T>,
    m: &'a mut [T],
    d: T,
    x: &'a [T],
    ld_x: usize,
    /// C_i S0 of the head, none when the state is zero.
    cs: Option<&'a [T]>,
    ld_cs: usize,
    y: &'a mut [T],
    ld_y: usize,
}

impl<T: Real> WithLanes<T> for Mixing<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes<T = T>>(self, l: L) {
        let (p, segment) = (self.p, self.segment);
        let len = segment.dt.len();
        let d = l.splat(self.d);
        for i in 0..len {
            let (cb, m) = (&self.cb[i * len..][..len], &mut self.m[i * len..][..len]);
            each_vector!(L::N, 0..i, |at, end| {
                let decay = segment.decay::<L, FULL>(l, i, at, end);
                let scaled = l.mul(l.read::<FULL>(cb, at, end), l.read::<FULL>(segment.dt, at, end));
                l.write::<FULL>(l.mul(scaled, decay), m, at, end);
            });
            m[i] = cb[i] * segment.dt[i];
            m[above(i, len)].fill(T::ZERO);
            let (x, y) = (&self.x[i * self.ld_x..][..p], &mut self.y[i * self.ld_y..][..p]);
            let start = l.splat(segment.start[i]);
            each_vector!(L::N, 0..p, |at, end| {
                let mut sum = l.mul(d, l.read::<FULL>(x, at, end));
                if let Some(cs) = self.cs {
                    sum = l.mul_add(start, l.read::<FULL>(&cs[i * self.ld_cs..], at, end), sum);
                }
                l.write::<FULL>(sum, y, at, end);
            });
        }
    }
}
