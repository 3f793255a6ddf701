//! RMS normalisation in groups of channels with a SiLU gate, as Mamba-2 applies it before out_proj.
//!
//! Gate first (Megatron): u = y * silu(z), out = u * rstd * w * s. Norm before gate: out = y * rstd * w * silu(z) * s.
//! rstd of a group is 1 / sqrt(sum of squares / group_width + eps * e), of u or y respectively. The scalars e and s are
//! optional one-element operands; e carries no gradient.
//!
//! Shapes: T tokens, D active channels, G groups; y, z, out and their gradients are [T, D] with row strides, rstd is
//! [T, G] dense, weight is the stored parameter, of which `weight` names the active elements. With `group_width` the
//! parent's group size, a masked parent and its slice agree.

use crate::blocks::Blocks;
use crate::kernel::{Args, Cost};
use crate::kernels;
use crate::par::lane_dot;
use crate::real::Real;
use rayon::prelude::*;

/// Which group a channel belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouping {
    /// Channel c in group (c / head_dim) % G: heads stored rank-in-group-major.
    Interleaved { head_dim: usize },
    /// Channel c in group c / (D / G).
    Contiguous,
}

/// Sizes shared by forward and backward.
#[derive(Clone, Debug)]
pub struct GatedNormShape {
    pub tokens: usize,
    /// Stored elements of the weight that belong to the D active channels, in order.
    pub weight: Blocks,
    pub groups: usize,
    pub grouping: Grouping,
    /// Channels a group's mean divides by.
    pub group_width: usize,
    /// true: norm(y * silu(z)); false: norm(y) * silu(z).
    pub gate_first: bool,
    /// Whether the operand s is there.
    pub has_scale: bool,
}

/// Forward. ins: y [T, D], z [T, D], weight [D_parent], e [1] if `has_eps_scale`, s [1] if `has_scale`; outs: out
/// [T, D], rstd [T, G].
#[derive(Clone, Debug)]
pub struct GatedNorm {
    pub shape: GatedNormShape,
    pub eps: f64,
    /// Whether the operand e is there.
    pub has_eps_scale: bool,
    pub ld_y: usize,
    pub ld_z: usize,
    pub ld_out: usize,
}

/// Backward. ins: y, z, weight, rstd [T, G], dout [T, D], s [1] if `has_scale`; outs: dy [T, D], dz [T, D], dweight
/// [D_parent] (adds), ds [1] if `has_scale` (adds).
#[derive(Clone, Debug)]
pub struct GatedNormBackward {
    pub shape: GatedNormShape,
    pub ld_y: usize,
    pub ld_z: usize,
    pub ld_dout: usize,
    pub ld_dy: usize,
    pub ld_dz: usize,
    /// Add to dy, to dz, instead of overwriting.
    pub acc_dy: bool,
    pub acc_dz: bool,
}

kernels! {
    GatedNorm => "gated_norm", workspace;
    GatedNormBackward => "gated_norm_backward", workspace;
}

impl GatedNormShape {
    fn channels(&self) -> usize {
        self.weight.len()
    }

    /// Channels of one run: consecutive channels of one group. Run r belongs to group r % G.
    fn run(&self) -> usize {
        match self.grouping {
            Grouping::Interleaved { head_dim } => head_dim,
            Grouping::Contiguous => self.channels() / self.groups.max(1),
        }
    }

    fn check(&self) {
        let (d, run) = (self.channels(), self.run());
        assert!(
            d == 0 || (self.groups > 0 && run > 0 && d % run == 0 && self.group_width > 0),
            "gated_norm: {d} channels do not divide into {} groups ({:?}) of width {}",
            self.groups,
            self.grouping,
            self.group_width
        );
    }

    /// weight * s over the active channels.
    fn scaled_weight<T: Real>(&self, weight: &[T], s: T, out: &mut [T]) {
        for (stored, dense, len) in self.weight.iter() {
            for (o, &w) in out[dense..dense + len].iter_mut().zip(&weight[stored..stored + len]) {
                *o = w * s;
            }
        }
    }

    fn block_tokens(&self) -> usize {
        self.tokens.div_ceil(64).max(16)
    }
}

impl GatedNorm {
    pub fn cost(&self) -> Cost {
        let n = (self.shape.tokens * self.shape.channels()) as f64;
        Cost::new(10.0 * n, 3.0 * n)
    }

    pub fn workspace(&self) -> usize {
        self.shape.channels()
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let shape = &self.shape;
        shape.check();
        let (d, groups, run) = (shape.channels(), shape.groups, shape.run());
        if d == 0 || shape.tokens == 0 {
            return;
        }
        let [out, rstd] = args.outs else { panic!("gated_norm: outs are out, rstd") };
        let (y, z, weight) = (args.ins[0], args.ins[1], args.ins[2]);
        let e = if self.has_eps_scale { args.ins[3][0] } else { T::ONE };
        let s = if shape.has_scale { args.ins[3 + usize::from(self.has_eps_scale)][0] } else { T::ONE };
        let weight_s = &mut args.work[..d];
        shape.scaled_weight(weight, s, weight_s);
        let weight_s = &*weight_s;
        let eps = T::of(self.eps) * e;
        let inverse = T::of(1.0 / shape.group_width as f64);
        let block = shape.block_tokens();
        let out = &mut out[..(shape.tokens - 1) * self.ld_out + d];
        let rstd = &mut rstd[..shape.tokens * groups];
        let rows = |first: usize, out: &mut [T], rstd: &mut [T]| {
            for (i, (out, rstd)) in out.chunks_mut(self.ld_out).zip(rstd.chunks_mut(groups)).enumerate() {
                let out = &mut out[..d];
                let y = &y[(first + i) * self.ld_y..][..d];
                let z = &z[(first + i) * self.ld_z..][..d];
                if shape.gate_first {
                    for c in 0..d {
                        out[c] = y[c] * (z[c] * z[c].vsigmoid());
                    }
                } else {
                    out.copy_from_slice(y);
                }
                rstd.fill(T::ZERO);
                for (r, part) in out.chunks(run).enumerate() {
                    rstd[r % groups] += lane_dot(part, part);
                }
                rstd.iter_mut().for_each(|v| *v = T::ONE / (*v * inverse + eps).sqrt());
                for (r, (part, w)) in out.chunks_mut(run).zip(weight_s.chunks(run)).enumerate() {
                    let scale = rstd[r % groups];
                    for (o, &w) in part.iter_mut().zip(w) {
                        *o *= scale * w;
                    }
                }
                if !shape.gate_first {
                    for c in 0..d {
                        out[c] *= z[c] * z[c].vsigmoid();
                    }
                }
            }
        };
        out.par_chunks_mut(block * self.ld_out)
            .zip(rstd.par_chunks_mut(block * groups))
            .enumerate()
            .for_each(|(i, (out, rstd))| crate::par::simd!(|| rows(i * block, out, rstd)));
    }
}

impl GatedNormBackward {
    pub fn cost(&self) -> Cost {
        let n = (self.shape.tokens * self.shape.channels()) as f64;
        Cost::new(24.0 * n, 5.0 * n)
    }

    /// Per block: partial dweight / s [D], sigmoid(z) and a product of one token [D] each, means
    /// of one token [G].
    fn block_work(&self) -> usize {
        3 * self.shape.channels() + self.shape.groups
    }

    fn blocks(&self) -> usize {
        self.shape.tokens.div_ceil(self.shape.block_tokens())
    }

    pub fn workspace(&self) -> usize {
        self.shape.channels() + self.blocks() * self.block_work()
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let shape = &self.shape;
        shape.check();
        let d = shape.channels();
        if d == 0 || shape.tokens == 0 {
            return;
        }
        let [y, z, weight, rstd, dout, ..] = args.ins else {
            panic!("gated_norm_backward: ins are y, z, weight, rstd, dout, [s]")
        };
        let s = if shape.has_scale { args.ins[5][0] } else { T::ONE };
        let (weight_s, work) = args.work.split_at_mut(d);
        shape.scaled_weight(weight, s, weight_s);
        let weight_s = &*weight_s;
        let work = &mut work[..self.blocks() * self.block_work()];
        let block = shape.block_tokens();
        let [dy, dz, dweight, rest @ ..] = args.outs else {
            panic!("gated_norm_backward: outs are dy, dz, dweight, [ds]")
        };
        let dy = &mut dy[..(shape.tokens - 1) * self.ld_dy + d];
        let dz = &mut dz[..(shape.tokens - 1) * self.ld_dz + d];
        dy.par_chunks_mut(block * self.ld_dy)
            .zip(dz.par_chunks_mut(block * self.ld_dz))
            .zip(work.par_chunks_mut(self.block_work()))
            .enumerate()
            .for_each(|(i, ((dy, dz), work))| {
                crate::par::simd!(|| self.block(i * block, dy, dz, work, [y, z, rstd, dout], weight_s));
            });
        // Partial sums in block order; d(out)/ds of a channel is its dweight / s times the weight.
        let (total, work) = work.split_at_mut(self.block_work());
        for partial in work.chunks(self.block_work()) {
            total[..d].iter_mut().zip(partial).for_each(|(t, &p)| *t += p);
        }
        let mut ds = T::ZERO;
        for (stored, dense, len) in shape.weight.iter() {
            for i in 0..len {
                dweight[stored + i] += s * total[dense + i];
                ds += weight[stored + i] * total[dense + i];
            }
        }
        if shape.has_scale {
            rest[0][0] += ds;
        }
    }

    #[inline(always)]
    fn block<T: Real>(
        &self,
        first: usize,
        dy: &mut [T],
        dz: &mut [T],
        work: &mut [T],
        [y, z, rstd, dout]: [&[T]; 4],
        weight_s: &[T],
    ) {
        let shape = &self.shape;
        let (d, groups, run) = (shape.channels(), shape.groups, shape.run());
        let inverse = T::of(1.0 / shape.group_width as f64);
        let (partial, work) = work.split_at_mut(d);
        let (gate, work) = work.split_at_mut(d);
        let (product, mean) = work.split_at_mut(d);
        partial.fill(T::ZERO);
        for (i, (dy, dz)) in dy.chunks_mut(self.ld_dy).zip(dz.chunks_mut(self.ld_dz)).enumerate() {
            let t = first + i;
            let y = &y[t * self.ld_y..][..d];
            let z = &z[t * self.ld_z..][..d];
            let dout = &dout[t * self.ld_dout..][..d];
            let rstd = &rstd[t * groups..][..groups];
            for (g, &z) in gate.iter_mut().zip(z) {
                *g = z.vsigmoid();
            }
            // mean of n * dn over the group, n the normalised value and dn its gradient: both gate orders have the
            // same product y * silu(z) * dout * w * s in it.
            mean.fill(T::ZERO);
            for c in 0..d {
                product[c] = y[c] * (z[c] * gate[c]) * dout[c];
            }
            for (r, (product, w)) in product.chunks(run).zip(weight_s.chunks(run)).enumerate() {
                mean[r % groups] += lane_dot(product, w);
            }
            mean.iter_mut().zip(rstd).for_each(|(m, &rstd)| *m *= rstd * inverse);
            for r in 0..d / run {
                let at = r * run;
                let (rstd, mean) = (rstd[r % groups], mean[r % groups]);
                let (y, z, dout) = (&y[at..at + run], &z[at..at + run], &dout[at..at + run]);
                let (gate, w) = (&gate[at..at + run], &weight_s[at..at + run]);
                let (dy, dz, partial) = (&mut dy[at..at + run], &mut dz[at..at + run], &mut partial[at..at + run]);
                for c in 0..run {
                    let silu = z[c] * gate[c];
                    let slope = gate[c] * (T::ONE + z[c] * (T::ONE - gate[c]));
                    let upstream = dout[c] * w[c];
                    let scaled = y[c] * rstd;
                    partial[c] += dout[c] * scaled * silu;
                    let (to_y, to_z) = if shape.gate_first {
                        let du = rstd * (upstream - scaled * silu * mean);
                        (du * silu, du * y[c] * slope)
                    } else {
                        (rstd * (upstream * silu - scaled * mean), upstream * scaled * slope)
                    };
                    dy[c] = if self.acc_dy { dy[c] + to_y } else { to_y };
                    dz[c] = if self.acc_dz { dz[c] + to_z } else { to_z };
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

    const T: usize = 37;

    fn shape(grouping: Grouping, gate_first: bool) -> GatedNormShape {
        let weight = Blocks::new([(0, 8), (12, 4)]);
        GatedNormShape { tokens: T, weight, groups: 3, grouping, group_width: 5, gate_first, has_scale: true }
    }

    /// Straight from the definition, for the shapes above.
    fn naive(k: &GatedNormShape, y: &[f64], z: &[f64], w: &[f64], eps: f64, s: f64) -> Vec<f64> {
        let d = k.weight.len();
        let w: Vec<f64> = k.weight.iter().flat_map(|(at, _, len)| w[at..at + len].to_vec()).collect();
        let group = |c: usize| match k.grouping {
            Grouping::Interleaved { head_dim } => (c / head_dim) % k.groups,
            Grouping::Contiguous => c / (d / k.groups),
        };
        let mut out = vec![0.0; y.len()];
        for t in 0..k.tokens {
            let silu = |c: usize| z[t * d + c] / (1.0 + (-z[t * d + c]).exp());
            let u = |c: usize| if k.gate_first { y[t * d + c] * silu(c) } else { y[t * d + c] };
            for c in 0..d {
                let sum: f64 = (0..d).filter(|&o| group(o) == group(c)).map(|o| u(o) * u(o)).sum();
                let n = u(c) / (sum / k.group_width as f64 + eps).sqrt() * w[c] * s;
                out[t * d + c] = if k.gate_first { n } else { n * silu(c) };
            }
        }
        out
    }

    fn spread(rows: &[f64], c: usize, ld: usize) -> Vec<f64> {
        let mut out = vec![55.0; (rows.len() / c - 1) * ld + c];
        rows.chunks(c).zip(out.chunks_mut(ld)).for_each(|(row, o)| o[..c].copy_from_slice(row));
        out
    }

    fn dense(rows: &[f64], c: usize, ld: usize) -> Vec<f64> {
        assert!(rows.chunks(ld).all(|row| row[c..].iter().all(|&v| v == 55.0)), "wrote outside its columns");
        rows.chunks(ld).flat_map(|row| row[..c].to_vec()).collect()
    }

    #[rstest]
    fn matches_the_definition_and_finite_differences(
        #[values(Grouping::Interleaved { head_dim: 2 }, Grouping::Contiguous)] grouping: Grouping,
        #[values(true, false)] gate_first: bool,
    ) {
        let shape = shape(grouping, gate_first);
        let d = shape.weight.len();
        let (y, mut z) = (normal(1, T * d), normal(2, T * d));
        z[..d].fill(0.0);
        let (w, dout, e, s) = (normal(3, 20), normal(4, T * d), 0.7, 1.3);
        let eps = 1e-2;
        let forward = GatedNorm { shape: shape.clone(), eps, has_eps_scale: true, ld_y: d, ld_z: d + 1, ld_out: d + 2 };
        let mut call = Call {
            ins: vec![y.clone(), spread(&z, d, d + 1), w.clone(), vec![e], vec![s]],
            outs: vec![vec![55.0; (T - 1) * (d + 2) + d], vec![0.0; T * 3]],
            ..Call::default()
        };
        call.run(&forward);
        let out = dense(&call.outs[0], d, d + 2);
        assert!(relative_l2(&out, &naive(&shape, &y, &z, &w, eps * e, s)) < 1e-13);
        assert!(relative_l2(&out, &dense(&call.run_f32(&forward)[0], d, d + 2)) < 1e-6);

        let backward = GatedNormBackward {
            shape: shape.clone(),
            ld_y: d,
            ld_z: d + 1,
            ld_dout: d,
            ld_dy: d + 3,
            ld_dz: d + 1,
            acc_dy: true,
            acc_dz: false,
        };
        let (before, w0) = (normal(5, T * d), normal(6, 20));
        let mut back = Call {
            ins: vec![y.clone(), spread(&z, d, d + 1), w.clone(), call.outs[1].clone(), dout.clone(), vec![s]],
            outs: vec![spread(&before, d, d + 3), spread(&before, d, d + 1), w0.clone(), vec![10.0]],
            ..Call::default()
        };
        let start = back.clone();
        back.run(&backward);
        let minus = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a - b).collect::<Vec<_>>();
        let dy = minus(&dense(&back.outs[0], d, d + 3), &before);
        let dz = dense(&back.outs[1], d, d + 1);
        let loss = |y: &[f64], z: &[f64], w: &[f64], s: f64| -> f64 {
            naive(&shape, y, z, w, eps * e, s).iter().zip(&dout).map(|(o, d)| o * d).sum()
        };
        finite_differences("dy", &y, &dy, 1e-7, |y| loss(y, &z, &w, s));
        finite_differences("dz", &z, &dz, 1e-7, |z| loss(&y, z, &w, s));
        finite_differences("dweight", &w, &minus(&back.outs[2], &w0), 1e-7, |w| loss(&y, &z, w, s));
        finite_differences("ds", &[s], &[back.outs[3][0] - 10.0], 1e-7, |s| loss(&y, &z, &w, s[0]));

        let swapped = GatedNormBackward { acc_dy: false, acc_dz: true, ..backward };
        let mut other = start.clone();
        other.run(&swapped);
        assert!(relative_l2(&dense(&other.outs[0], d, d + 3), &dy) < 1e-13);
        assert!(relative_l2(&minus(&dense(&other.outs[1], d, d + 1), &before), &dz) < 1e-13);
        for (wide, narrow) in other.outs.iter().zip(start.run_f32(&swapped)) {
            assert!(relative_l2(wide, &narrow) < 1e-5);
        }
    }

    #[test]
    fn plain_form_and_thread_counts() {
        let (tokens, d) = (500, 48);
        let shape = GatedNormShape {
            tokens,
            weight: Blocks::full(d),
            groups: 2,
            grouping: Grouping::Interleaved { head_dim: 24 },
            group_width: 24,
            gate_first: true,
            has_scale: false,
        };
        let forward = GatedNorm { shape: shape.clone(), eps: 1e-5, has_eps_scale: false, ld_y: d, ld_z: d, ld_out: d };
        let (y, z, w) = (normal(1, tokens * d), normal(2, tokens * d), normal(3, d));
        let mut call = Call {
            ins: vec![y.clone(), z.clone(), w.clone()],
            outs: vec![vec![0.0; tokens * d], vec![0.0; tokens * 2]],
            ..Call::default()
        };
        call.run(&forward);
        assert!(relative_l2(&call.outs[0], &naive(&shape, &y, &z, &w, 1e-5, 1.0)) < 1e-13);
        let backward =
            GatedNormBackward { shape, ld_y: d, ld_z: d, ld_dout: d, ld_dy: d, ld_dz: d, acc_dy: false, acc_dz: false };
        let back = Call {
            ins: vec![y, z, w, call.outs[1].clone(), normal(4, tokens * d)],
            outs: vec![vec![0.0; tokens * d], vec![0.0; tokens * d], vec![0.0; d]],
            ..Call::default()
        };
        let with = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| back.run_f32(&backward))
        };
        assert_eq!(with(1), with(2));
    }
}
