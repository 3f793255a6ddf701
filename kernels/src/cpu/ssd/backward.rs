//! Backward pass of the scan.
//!
//! With S0 the state at a chunk's start, E the gradient of the state at its end, L_ij = exp(cum_i - cum_j) and
//! M_ij = (C_i . B_j) L_ij dt'_j for j <= i:
//!   dx_j = sum_i M_ij dy_i + exp(cum_last - cum_j) dt'_j E B_j + d dy_j,
//!   dC_i = sum_j K_ij B_j + exp(cum_i) S0^T dy_i, dB_j = sum_i K_ij C_i + exp(cum_last - cum_j) dt'_j E^T x_j,
//!   K_ij = (dy_i . x_j) L_ij dt'_j summed over the heads of the group.
//! The gradient of dt'_t a, the decay of one token, sums what crosses that token: V_ij = (dy_i . x_j) M_ij over j < t <= i,
//! exp(cum_i) dy_i . (S0 C_i) over i >= t, exp(cum_last - cum_j) dt'_j x_j . (E B_j) over j < t, and exp(cum_last) S0 . E.
//! Taken directly (column sums of V from the last row upwards) and not as differences of larger sums, it keeps its
//! digits in f32.

use super::{SsdShape, Table, share};
use crate::cpu::gemm_call::{Mat, matmul};
use crate::kernel::{Args, Cost};
use crate::kernels;
use crate::par::lane_dot;
use crate::real::Real;

/// Backward. ins: xbc [T, ld_xbc], dt [T, H], a_log [H], d [H], dt_bias [H], states [`SsdShape::states_len`], dy
/// [T, H * P], dfinal [S, H, P, N] if `has_dfinal`; outs: dxbc [T, ld_dxbc] (segments at the offsets of xbc), ddt
/// [T, H], da_log [H], dd [H], ddt_bias [H] (these three add), dinit [S, H, P, N] if `has_dinit`; ints: cu_seqlens
/// [S + 1], table [`SsdShape::table_len`].
#[derive(Clone, Debug)]
pub struct SsdBackward {
    pub shape: SsdShape,
    /// Whether the forward pass had an initial state.
    pub has_init: bool,
    pub has_dfinal: bool,
    pub has_dinit: bool,
    pub ld_dy: usize,
    pub ld_dxbc: usize,
    pub ld_ddt: usize,
    /// Add to dxbc, ddt, dinit instead of overwriting.
    pub acc_dxbc: bool,
    pub acc_ddt: bool,
    pub acc_dinit: bool,
}

kernels! {
    SsdBackward => "ssd_scan_backward", workspace;
}

/// What one chunk reads; rows begin at the chunk's first token.
struct Chunk<'a, T> {
    len: usize,
    xbc: &'a [T],
    dt: &'a [T],
    dy: &'a [T],
    segments: &'a [T],
    /// State at the chunk's start, none when it is zero.
    state: Option<&'a [T]>,
    /// Gradient of the state at the chunk's end, none when it is zero.
    dstate: Option<&'a [T]>,
}

/// What one chunk writes; partial sums of (a_log, d, dt_bias) are [3, H].
struct Grads<'a, T> {
    dxbc: &'a mut [T],
    ddt: &'a mut [T],
    partial: &'a mut [T],
}

#[derive(Clone, Copy)]
struct Params<'a, T> {
    a_log: &'a [T],
    d: &'a [T],
    dt_bias: &'a [T],
}

impl SsdBackward {
    pub fn cost(&self) -> Cost {
        let s = &self.shape;
        let (t, h, p, n) = (s.tokens as f64, s.heads as f64, s.head_dim as f64, s.state as f64);
        let (q, g) = (s.chunk as f64, s.groups as f64);
        let flops = t * (h * (4.0 * q * p + 10.0 * n * p) + 6.0 * g * q * n);
        Cost::new(flops, t * (5.0 * h * p + 4.0 * g * n + 2.0 * h))
    }

    /// Per leaf: C B^T, K, M and dy x^T [Q, Q]; x, dy, S0 C and E B of a group's heads [Q, heads * P]; four rows [Q].
    fn leaf_work(&self) -> usize {
        let s = &self.shape;
        s.chunk * (4 * s.chunk + 4 * s.most_heads() * s.head_dim + 4)
    }

    fn work_parts(&self) -> [usize; 5] {
        let s = &self.shape;
        [
            s.max_chunks() * s.segment_len(),
            s.sequences * s.state_len(),
            s.states_len(),
            s.max_chunks() * 3 * s.heads,
            s.max_leaves() * self.leaf_work(),
        ]
    }

    /// Segments and parameter sums of each chunk, gradients of the states, the leaves' scratch.
    pub fn workspace(&self) -> usize {
        self.work_parts().iter().sum()
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let s = &self.shape;
        s.check();
        let [xbc, dt, a_log, d, dt_bias, states, dy, dfinal @ ..] = args.ins else {
            panic!("ssd_scan_backward: ins are xbc, dt, a_log, d, dt_bias, states, dy, [dfinal]")
        };
        let [dxbc, ddt, da_log, dd, ddt_bias, dinit @ ..] = args.outs else {
            panic!("ssd_scan_backward: outs are dxbc, ddt, da_log, dd, ddt_bias, [dinit]")
        };
        let table = Table::read(s, args.ints[1]);
        let params = Params { a_log, d, dt_bias };
        let size = s.state_len();
        let [n_segments, n_carry, n_states, n_partial, _] = self.work_parts();
        let (segments, work) = args.work.split_at_mut(n_segments);
        let (carry, work) = work.split_at_mut(n_carry);
        let (dstates, work) = work.split_at_mut(n_states);
        let (partials, scratch) = work.split_at_mut(n_partial);
        carry.fill(T::ZERO);
        if self.has_dfinal && size > 0 {
            carry.chunks_mut(size).zip(dfinal[0].chunks(size)).for_each(|(to, from)| s.import_state(from, to));
        }

        // Each chunk's own gradient of the state it starts in; the reverse pass turns these into E.
        let units = [s.segment_len(), size, self.leaf_work()];
        let cut = |buf: usize, leaf: usize| units[buf] * if buf == 2 { leaf } else { table.leaf_start(leaf) };
        let bufs = [&mut *segments, &mut *dstates, &mut *scratch];
        share(0..table.leaves(), bufs, &cut, &|leaf, [segments, dstates, work]| {
            for (i, c) in table.leaf(leaf).enumerate() {
                let (start, len) = table.span(c);
                let segments = &mut segments[i * s.segment_len()..][..s.segment_len()];
                let dstates = &mut dstates[i * size..][..size];
                crate::par::simd!(|| s.fill_segments(len, &dt[start * s.ld_dt..], a_log, dt_bias, segments));
                if table.is_first(c) && !self.has_dinit {
                    dstates.fill(T::ZERO);
                    continue;
                }
                self.local_dstates(len, &xbc[start * s.ld_xbc..], &dy[start * self.ld_dy..], segments, dstates, work);
            }
        });
        let segments = &*segments;
        s.carry_pass(&table, segments, true, carry, dstates);
        if self.has_dinit && size > 0 {
            let rows = dinit[0].chunks_mut(size).zip(carry.chunks(size));
            rows.for_each(|(to, from)| s.export_state(from, self.acc_dinit, to));
        }

        let dstates = &*dstates;
        let cut = |buf: usize, leaf: usize| {
            let chunk = table.leaf_start(leaf);
            match buf {
                0 => table.starts[chunk] as usize * self.ld_dxbc,
                1 => table.starts[chunk] as usize * self.ld_ddt,
                2 => chunk * 3 * s.heads,
                _ => leaf * self.leaf_work(),
            }
        };
        let bufs = [&mut **dxbc, &mut **ddt, &mut *partials, scratch];
        share(0..table.leaves(), bufs, &cut, &|leaf, [dxbc, ddt, partials, work]| {
            let base = table.span(table.leaf_start(leaf)).0;
            for (i, c) in table.leaf(leaf).enumerate() {
                let (start, len) = table.span(c);
                let chunk = Chunk {
                    len,
                    xbc: &xbc[start * s.ld_xbc..],
                    dt: &dt[start * s.ld_dt..],
                    dy: &dy[start * self.ld_dy..],
                    segments: &segments[c * s.segment_len()..][..s.segment_len()],
                    state: (self.has_init || !table.is_first(c)).then(|| &states[c * size..][..size]),
                    dstate: (self.has_dfinal || !table.is_last(c)).then(|| &dstates[c * size..][..size]),
                };
                let grads = Grads {
                    dxbc: &mut dxbc[(start - base) * self.ld_dxbc..],
                    ddt: &mut ddt[(start - base) * self.ld_ddt..],
                    partial: &mut partials[i * 3 * s.heads..][..3 * s.heads],
                };
                self.chunk(&chunk, grads, params, work);
            }
        });
        for partial in partials.chunks(3 * s.heads.max(1)).take(table.count()) {
            for h in 0..s.heads {
                da_log[h] += partial[h];
                dd[h] += partial[s.heads + h];
                ddt_bias[h] += partial[2 * s.heads + h];
            }
        }
    }

    /// sum_i exp(cum_i) C_i dy_i^T of every group, [N, heads * P].
    fn local_dstates<T: Real>(
        &self,
        len: usize,
        xbc: &[T],
        dy: &[T],
        segments: &[T],
        dstates: &mut [T],
        work: &mut [T],
    ) {
        let s = &self.shape;
        for g in 0..s.groups {
            let width = s.group_heads(g) * s.head_dim;
            let scaled = &mut work[..len * width];
            crate::par::simd!(|| {
                s.gather(g, len, dy, self.ld_dy, 0, scaled, |h, i| s.segment(h, len, segments).since_start(i));
            });
            let c = Mat::cols(&xbc[s.c_off + g * s.state..], s.ld_xbc);
            let to = &mut dstates[s.group_offset(g)..];
            matmul((s.state, width, len), T::ONE, c, Mat::rows(scaled, width), false, to, width, false);
        }
    }

    fn chunk<T: Real>(&self, chunk: &Chunk<'_, T>, mut grads: Grads<'_, T>, params: Params<'_, T>, work: &mut [T]) {
        let s = &self.shape;
        let len = chunk.len;
        let square = s.chunk * s.chunk;
        let wide = s.chunk * s.most_heads() * s.head_dim;
        let (cb, work) = work.split_at_mut(square);
        let (k_sum, work) = work.split_at_mut(square);
        let (x, work) = work.split_at_mut(wide);
        let (dy, work) = work.split_at_mut(wide);
        let (cs, work) = work.split_at_mut(wide);
        let (be, work) = work.split_at_mut(wide);
        for g in 0..s.groups {
            let heads = s.group_heads(g);
            let width = heads * s.head_dim;
            let (b_at, c_at) = (s.b_off + g * s.state, s.c_off + g * s.state);
            let b = Mat::rows(&chunk.xbc[b_at..], s.ld_xbc);
            let c = Mat::rows(&chunk.xbc[c_at..], s.ld_xbc);
            let state = chunk.state.map(|state| &state[s.group_offset(g)..][..s.state * width]);
            let dstate = chunk.dstate.map(|state| &state[s.group_offset(g)..][..s.state * width]);
            matmul((len, len, s.state), T::ONE, c, Mat::cols(b.data, s.ld_xbc), false, cb, len, false);
            k_sum[..len * len].fill(T::ZERO);
            crate::par::simd!(|| {
                s.gather(g, len, chunk.xbc, s.ld_xbc, s.x_off, x, |_, _| T::ONE);
                s.gather(g, len, chunk.dy, self.ld_dy, 0, dy, |_, _| T::ONE);
            });
            for (state, left, product) in [(state, c, &mut *cs), (dstate, b, &mut *be)] {
                match state {
                    Some(m) => {
                        matmul((len, width, s.state), T::ONE, left, Mat::rows(m, width), false, product, width, false);
                    }
                    None => product[..len * width].fill(T::ZERO),
                }
            }
            for k in 0..heads {
                let h = k * s.groups + g;
                let decayed = match (state, dstate) {
                    (Some(a), Some(b)) => crate::par::simd!(|| self.state_dot(heads, k, a, b)),
                    _ => T::ZERO,
                };
                let head = Head { g, k, h, decayed };
                self.head(chunk, &mut grads, params, head, [cb, x, dy, cs, be], k_sum, work);
            }
            crate::par::simd!(|| {
                for i in 0..len {
                    for k in 0..heads {
                        let segment = s.segment(k * s.groups + g, len, chunk.segments);
                        let (to_x, to_dy) = (segment.until_end(i) * segment.dt[i], segment.since_start(i));
                        let at = i * width + k * s.head_dim;
                        x[at..at + s.head_dim].iter_mut().for_each(|v| *v *= to_x);
                        dy[at..at + s.head_dim].iter_mut().for_each(|v| *v *= to_dy);
                    }
                }
            });
            let (ld, dxbc) = (self.ld_dxbc, &mut *grads.dxbc);
            let (dc, acc) = (&mut dxbc[c_at..], self.acc_dxbc);
            matmul((len, s.state, len), T::ONE, Mat::rows(k_sum, len), b, acc, dc, ld, false);
            if let Some(m) = state {
                matmul((len, s.state, width), T::ONE, Mat::rows(dy, width), Mat::cols(m, width), true, dc, ld, false);
            }
            let db = &mut dxbc[b_at..];
            matmul((len, s.state, len), T::ONE, Mat::cols(k_sum, len), c, acc, db, ld, false);
            if let Some(m) = dstate {
                matmul((len, s.state, width), T::ONE, Mat::rows(x, width), Mat::cols(m, width), true, db, ld, false);
            }
        }
    }

    /// Sum of the products of two states' elements, of head `k` of a group.
    #[inline(always)]
    fn state_dot<T: Real>(&self, heads: usize, k: usize, a: &[T], b: &[T]) -> T {
        let p = self.shape.head_dim;
        let mut sum = T::ZERO;
        for n in 0..self.shape.state {
            let at = (n * heads + k) * p;
            let (a, b) = (&a[at..at + p], &b[at..at + p]);
            sum += lane_dot(a, b);
        }
        sum
    }

    /// Everything of one head but its part in dB and dC through the states. `products` are C B^T and the group's x, dy,
    /// S0 C and E B.
    #[allow(clippy::too_many_arguments)]
    fn head<T: Real>(
        &self,
        chunk: &Chunk<'_, T>,
        grads: &mut Grads<'_, T>,
        params: Params<'_, T>,
        head: Head<T>,
        [cb, x, dy, cs, be]: [&[T]; 5],
        k_sum: &mut [T],
        work: &mut [T],
    ) {
        let s = &self.shape;
        let (len, p) = (chunk.len, s.head_dim);
        let width = s.group_heads(head.g) * p;
        let at = head.k * p;
        let segment = s.segment(head.h, len, chunk.segments);
        let (m, work) = work.split_at_mut(s.chunk * s.chunk);
        let (v, work) = work.split_at_mut(s.chunk * s.chunk);
        let (to_decay, work) = work.split_at_mut(s.chunk);
        let (below, work) = work.split_at_mut(s.chunk);
        let (to_step, decay) = work.split_at_mut(s.chunk);
        matmul((len, len, p), T::ONE, Mat::rows(&dy[at..], width), Mat::cols(&x[at..], width), false, v, len, false);

        let mut to_d = T::ZERO;
        crate::par::simd!(|| {
            // v becomes (dy_i . x_j)(C_i . B_j) L_ij, below its column sums over the rows from i on.
            below[..len].fill(T::ZERO);
            let mut from_state = T::ZERO;
            for i in (0..len).rev() {
                let (dt, high, low) = (&segment.dt[..=i], &segment.high[..=i], &segment.low[..=i]);
                let (h, l) = (high[i], low[i]);
                let row = &mut v[i * len..][..=i];
                let (cb, k_row) = (&cb[i * len..][..=i], &mut k_sum[i * len..][..=i]);
                let (m, unused) = m[i * len..][..len].split_at_mut(i + 1);
                let decay = &mut decay[..=i];
                for j in 0..decay.len() {
                    decay[j] = ((h - high[j]) + (l - low[j])).vexp();
                }
                for j in 0..row.len() {
                    let scaled = decay[j] * dt[j];
                    k_row[j] += row[j] * scaled;
                    m[j] = cb[j] * scaled;
                    row[j] *= cb[j] * decay[j];
                }
                unused.fill(T::ZERO);
                for (sum, &v) in below[..i].iter_mut().zip(&*row) {
                    *sum += v;
                }
                to_step[i] = row[i];
                let (dy, cs) = (&dy[i * width + at..][..p], &cs[i * width + at..][..p]);
                from_state += segment.since_start(i) * lane_dot(dy, cs);
                to_decay[i] = lane_dot(&below[..i], dt) + from_state;
            }
        });
        let dx = &mut grads.dxbc[s.x_off + head.h * p..];
        let dy_rows = Mat::rows(&dy[at..], width);
        matmul((len, p, len), T::ONE, Mat::cols(m, len), dy_rows, self.acc_dxbc, dx, self.ld_dxbc, false);
        crate::par::simd!(|| {
            // Of the state's gradient at the chunk's end, what passes through the decay of token i.
            let mut to_end_sum = s.totals(chunk.segments)[head.h] * head.decayed;
            for i in 0..len {
                let (dy, be) = (&dy[i * width + at..][..p], &be[i * width + at..][..p]);
                let (x, dx) = (&x[i * width + at..][..p], &mut dx[i * self.ld_dxbc..][..p]);
                let to_end = segment.until_end(i);
                let scale = to_end * segment.dt[i];
                for j in 0..p {
                    dx[j] += scale * be[j] + params.d[head.h] * dy[j];
                }
                to_d += lane_dot(dy, x);
                let ended = to_end * lane_dot(x, be);
                to_decay[i] += to_end_sum;
                to_end_sum += segment.dt[i] * ended;
                to_step[i] += below[i] + ended;
            }
        });

        let a = -params.a_log[head.h].to_f64().exp();
        let (mut to_a, mut to_bias) = (0.0f64, 0.0f64);
        for i in 0..len {
            to_a += to_decay[i].to_f64() * segment.dt[i].to_f64();
            let raw = chunk.dt[i * s.ld_dt + head.h] + params.dt_bias[head.h];
            let inside = s.dt_limit.is_none_or(|(lo, hi)| {
                let step = raw.vsoftplus();
                step >= T::of(lo) && step <= T::of(hi)
            });
            let slope = if inside { raw.vsigmoid().to_f64() } else { 0.0 };
            let grad = (to_step[i].to_f64() + a * to_decay[i].to_f64()) * slope;
            to_bias += grad;
            let ddt = &mut grads.ddt[i * self.ld_ddt + head.h];
            *ddt = if self.acc_ddt { *ddt + T::of(grad) } else { T::of(grad) };
        }
        grads.partial[head.h] = T::of(to_a * a);
        grads.partial[s.heads + head.h] = to_d;
        grads.partial[2 * s.heads + head.h] = T::of(to_bias);
    }
}

/// One head: its group, its place in the group, its stored index, and the sum of S0 * E over its state.
#[derive(Clone, Copy)]
struct Head<T> {
    g: usize,
    k: usize,
    h: usize,
    decayed: T,
}
