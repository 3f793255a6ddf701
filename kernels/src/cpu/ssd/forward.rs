//! Forward pass of the scan.

use super::{Segment, SsdShape, Table, share};
use crate::cpu::gemm_call::{Mat, matmul};
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

/// Rows of a lower triangular factor that are multiplied together.
const TRIANGLE: usize = 64;

/// C (+)= A B for a lower triangular A [n, n] (zero above its diagonal), skipping most of the zeros.
#[inline]
pub(super) fn lower_times<T: Real>(n: usize, cols: usize, a: &[T], b: Mat<'_, T>, acc: bool, c: &mut [T], ldc: usize) {
    for i in (0..n).step_by(TRIANGLE) {
        let rows = TRIANGLE.min(n - i);
        matmul((rows, cols, i + rows), T::ONE, Mat::rows(&a[i * n..], n), b, acc, &mut c[i * ldc..], ldc, false);
    }
}

impl SsdShape {
    /// Columns of the heads of group `g` gathered side by side, each token's scaled by `scale(head, token)`:
    /// out [len, heads of the group * P] from rows of `ld` elements whose head 0 begins at `off`.
    #[inline(always)]
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
        let (heads, p) = (self.group_heads(g), self.head_dim);
        for i in 0..len {
            for k in 0..heads {
                let h = k * self.groups + g;
                let from = &rows[i * ld + off + h * p..][..p];
                let to = &mut out[(i * heads + k) * p..][..p];
                let s = scale(h, i);
                for (t, &f) in to.iter_mut().zip(from) {
                    *t = f * s;
                }
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

    /// Per leaf: C B^T [Q, Q], M [Q, Q], gathered x and C S [Q, heads of a group * P].
    fn leaf_work(&self) -> usize {
        let s = &self.shape;
        2 * s.chunk * s.chunk + s.chunk * s.most_heads() * s.head_dim
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
            crate::par::simd!(|| {
                s.gather(g, len, xbc, s.ld_xbc, s.x_off, x, |h, i| {
                    let segment = s.segment(h, len, segments);
                    segment.until_end(i) * segment.dt[i]
                });
            });
            let b = Mat::cols(&xbc[s.b_off + g * s.state..], s.ld_xbc);
            let to = &mut states[s.group_offset(g)..];
            matmul((s.state, width, len), T::ONE, b, Mat::rows(x, width), false, to, width, false);
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
        let (m, cs) = work.split_at_mut(s.chunk * s.chunk);
        for g in 0..s.groups {
            let heads = s.group_heads(g);
            let width = heads * p;
            let b = Mat::cols(&xbc[s.b_off + g * s.state..], s.ld_xbc);
            let c = Mat::rows(&xbc[s.c_off + g * s.state..], s.ld_xbc);
            matmul((len, len, s.state), T::ONE, c, b, false, cb, len, false);
            if let Some(state) = state {
                let state = Mat::rows(&state[s.group_offset(g)..], width);
                matmul((len, width, s.state), T::ONE, c, state, false, cs, width, false);
            }
            for k in 0..heads {
                let h = k * s.groups + g;
                let segment = s.segment(h, len, segments);
                crate::par::simd!(|| {
                    mixing(len, cb, segment, m);
                    for i in 0..len {
                        let x = &xbc[i * s.ld_xbc + s.x_off + h * p..][..p];
                        let y = &mut y[i * self.ld_y + h * p..][..p];
                        if state.is_some() {
                            let (decay, cs) = (segment.since_start(i), &cs[i * width + k * p..][..p]);
                            for j in 0..p {
                                y[j] = d[h] * x[j] + decay * cs[j];
                            }
                        } else {
                            for j in 0..p {
                                y[j] = d[h] * x[j];
                            }
                        }
                    }
                });
                let x = Mat::rows(&xbc[s.x_off + h * p..], s.ld_xbc);
                lower_times(len, p, m, x, true, &mut y[h * p..], self.ld_y);
            }
        }
    }
}

/// M_ij = (C_i . B_j) exp(cum_i - cum_j) dt'_j for j <= i, zero above.
#[inline(always)]
fn mixing<T: Real>(len: usize, cb: &[T], segment: Segment<'_, T>, m: &mut [T]) {
    for i in 0..len {
        let (used, unused) = m[i * len..][..len].split_at_mut(i + 1);
        let cb = &cb[i * len..][..=i];
        let (dt, high, low) = (&segment.dt[..=i], &segment.high[..=i], &segment.low[..=i]);
        let (h, l) = (high[i], low[i]);
        for j in 0..used.len() {
            used[j] = cb[j] * ((h - high[j]) + (l - low[j])).vexp() * dt[j];
        }
        unused.fill(T::ZERO);
    }
}
