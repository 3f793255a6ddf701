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

use super::head::{Across, FromState, Within};
use super::{SsdShape, Table, share};
use crate::cpu::product::{Left, Part, product, transpose};
use crate::kernel::{Args, Cost};
use crate::kernels;
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
pub(super) struct Chunk<'a, T> {
    pub(super) len: usize,
    pub(super) xbc: &'a [T],
    dt: &'a [T],
    pub(super) dy: &'a [T],
    pub(super) segments: &'a [T],
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

    /// Per leaf: C B^T, K, M and dy x^T [Q, Q]; E B of a group's heads [Q, heads * P]; B^T [N, Q] and a head's x^T [P, Q];
    /// a head's S0 dy and E x [Q, N] and the transpose of a state [P, N]; four rows [Q].
    fn leaf_work(&self) -> usize {
        let s = &self.shape;
        s.chunk * (4 * s.chunk + (s.most_heads() + 1) * s.head_dim + 3 * s.state + 4) + s.head_dim * s.state
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
            s.gather(g, len, dy, self.ld_dy, 0, scaled, |h, i| s.segment(h, len, segments).start[i]);
            let c = Left::cols(&xbc[s.c_off + g * s.state..], s.ld_xbc);
            let to = &mut dstates[s.group_offset(g)..];
            product((s.state, width, len), Part::All, c, scaled, width, false, to, width);
        }
    }

    fn chunk<T: Real>(&self, chunk: &Chunk<'_, T>, mut grads: Grads<'_, T>, params: Params<'_, T>, work: &mut [T]) {
        let s = &self.shape;
        let (len, n) = (chunk.len, s.state);
        let square = s.chunk * s.chunk;
        let (cb, work) = work.split_at_mut(square);
        let (k_sum, work) = work.split_at_mut(square);
        let (be, work) = work.split_at_mut(s.chunk * s.most_heads() * s.head_dim);
        let (transposed, work) = work.split_at_mut(s.chunk * n);
        for g in 0..s.groups {
            let heads = s.group_heads(g);
            let width = heads * s.head_dim;
            let (b_at, c_at) = (s.b_off + g * n, s.c_off + g * n);
            let (b, c) = (&chunk.xbc[b_at..], &chunk.xbc[c_at..]);
            let state = chunk.state.map(|state| &state[s.group_offset(g)..][..n * width]);
            let dstate = chunk.dstate.map(|state| &state[s.group_offset(g)..][..n * width]);
            transpose((len, n), b, s.ld_xbc, transposed, len);
            product((len, len, n), Part::LowerResult, Left::rows(c, s.ld_xbc), transposed, len, false, cb, len);
            k_sum[..len * len].fill(T::ZERO);
            if let Some(dstate) = dstate {
                product((len, width, n), Part::All, Left::rows(b, s.ld_xbc), dstate, width, false, be, width);
            }
            if !self.acc_dxbc {
                for row in grads.dxbc.chunks_mut(self.ld_dxbc).take(len) {
                    row[b_at..b_at + n].fill(T::ZERO);
                    row[c_at..c_at + n].fill(T::ZERO);
                }
            }
            for k in 0..heads {
                let head = Head { g, k, h: k * s.groups + g };
                self.head(chunk, &mut grads, params, head, [cb, be], [state, dstate], k_sum, work);
            }
            let ld = self.ld_dxbc;
            let dc = &mut grads.dxbc[c_at..];
            product((len, n, len), Part::LowerLeft, Left::rows(k_sum, len), b, s.ld_xbc, true, dc, ld);
            let db = &mut grads.dxbc[b_at..];
            product((len, n, len), Part::UpperLeft, Left::cols(k_sum, len), c, s.ld_xbc, true, db, ld);
        }
    }

    /// Everything of one head but its part in dB and dC through K, which is added to `k_sum`. `products` are C B^T and
    /// the group's E B, `states` the group's S0 and E.
    #[allow(clippy::too_many_arguments)]
    fn head<T: Real>(
        &self,
        chunk: &Chunk<'_, T>,
        grads: &mut Grads<'_, T>,
        params: Params<'_, T>,
        head: Head,
        [cb, be]: [&[T]; 2],
        states: [Option<&[T]>; 2],
        k_sum: &mut [T],
        work: &mut [T],
    ) {
        let s = &self.shape;
        let (len, p, n) = (chunk.len, s.head_dim, s.state);
        let width = s.group_heads(head.g) * p;
        let at = head.k * p;
        let segment = s.segment(head.h, len, chunk.segments);
        let (m, work) = work.split_at_mut(s.chunk * s.chunk);
        let (v, work) = work.split_at_mut(s.chunk * s.chunk);
        let (transposed, work) = work.split_at_mut(s.chunk * p);
        let (from_start, work) = work.split_at_mut(s.chunk * n);
        let (to_end, work) = work.split_at_mut(s.chunk * n);
        let (transposed_state, work) = work.split_at_mut(p * n);
        let mut rows = work.chunks_mut(s.chunk).map(|row| &mut row[..len]);
        let [Some(to_decay), Some(below), Some(to_step), Some(slope)] = std::array::from_fn(|_| rows.next()) else {
            return;
        };
        let x = &chunk.xbc[s.x_off + head.h * p..];
        let dy = &chunk.dy[head.h * p..];
        let (x_rows, dy_rows) = (Left::rows(x, s.ld_xbc), Left::rows(dy, self.ld_dy));
        transpose((len, p), x, s.ld_xbc, transposed, len);
        product((len, len, p), Part::LowerResult, dy_rows, transposed, len, false, v, len);
        for (state, left, out) in [(states[0], dy_rows, &mut *from_start), (states[1], x_rows, &mut *to_end)] {
            if let Some(state) = state {
                transpose((n, p), &state[at..], width, transposed_state, n);
                product((len, n, p), Part::All, left, transposed_state, n, false, out, n);
            }
        }

        let (b_at, c_at) = (s.b_off + head.g * n, s.c_off + head.g * n);
        let ld = self.ld_dxbc;
        T::vectors(Within {
            segment,
            cb,
            v,
            k_sum,
            m,
            below,
            to_step,
            to_decay,
            start: states[0].map(|_| FromState {
                product: from_start,
                rows: &chunk.xbc[c_at..],
                ld_rows: s.ld_xbc,
                grad: &mut grads.dxbc[c_at..],
                ld_grad: ld,
                n,
            }),
        });
        let dx = &mut grads.dxbc[s.x_off + head.h * p..];
        product((len, p, len), Part::UpperLeft, Left::cols(m, len), dy, self.ld_dy, self.acc_dxbc, dx, ld);
        let to_d = T::vectors(Across {
            kernel: self,
            chunk,
            head,
            segment,
            d: params.d[head.h],
            be: &be[at..],
            states,
            to_end,
            offsets: [s.x_off + head.h * p, b_at],
            dxbc: grads.dxbc,
            below,
            to_step,
            to_decay,
        });

        let a = -params.a_log[head.h].to_f64().exp();
        let (mut to_a, mut to_bias) = (0.0f64, 0.0f64);
        for (i, raw) in slope.iter_mut().enumerate() {
            *raw = chunk.dt[i * s.ld_dt + head.h] + params.dt_bias[head.h];
        }
        crate::par::simd!(|| {
            for raw in &mut *slope {
                let inside = match s.dt_limit {
                    None => true,
                    Some((lo, hi)) => {
                        let step = raw.vsoftplus();
                        step >= T::of(lo) && step <= T::of(hi)
                    }
                };
                *raw = if inside { raw.vsigmoid() } else { T::ZERO };
            }
        });
        for i in 0..len {
            to_a += to_decay[i].to_f64() * segment.dt[i].to_f64();
            let grad = (to_step[i].to_f64() + a * to_decay[i].to_f64()) * slope[i].to_f64();
            to_bias += grad;
            let ddt = &mut grads.ddt[i * self.ld_ddt + head.h];
            *ddt = if self.acc_ddt { *ddt + T::of(grad) } else { T::of(grad) };
        }
        grads.partial[head.h] = T::of(to_a * a);
        grads.partial[s.heads + head.h] = to_d;
        grads.partial[2 * s.heads + head.h] = T::of(to_bias);
    }
}

/// One head: its group, its place in the group, its stored index.
#[derive(Clone, Copy)]
pub(super) struct Head {
    pub(super) g: usize,
    pub(super) k: usize,
    pub(super) h: usize,
}
