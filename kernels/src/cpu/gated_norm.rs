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
use crate::cpu::vector::{Lanes, WithLanes, each_vector};
use crate::kernel::{Args, Cost};
use crate::kernels;
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
        crate::par::rows_pair_mut((out, self.ld_out), (rstd, block * groups), block, |first, out, rstd| {
            T::vectors(Forward { kernel: self, first, y, z, weight_s, eps, inverse, run, out, rstd });
        });
    }
}

/// A block of the forward pass: tokens from `first`, whose rows of out and rstd are given.
struct Forward<'a, T> {
    kernel: &'a GatedNorm,
    first: usize,
    y: &'a [T],
    z: &'a [T],
    weight_s: &'a [T],
    eps: T,
    inverse: T,
    run: usize,
    out: &'a mut [T],
    rstd: &'a mut [T],
}

impl<T: Real> WithLanes<T> for Forward<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes<T = T>>(self, l: L) {
        let (kernel, shape, run) = (self.kernel, &self.kernel.shape, self.run);
        let (d, groups) = (shape.channels(), shape.groups);
        let rows = self.out.chunks_mut(kernel.ld_out).zip(self.rstd.chunks_mut(groups));
        for (i, (out, rstd)) in rows.enumerate() {
            let out = &mut out[..d];
            let y = &self.y[(self.first + i) * kernel.ld_y..][..d];
            let z = &self.z[(self.first + i) * kernel.ld_z..][..d];
            for (g, rstd) in rstd.iter_mut().enumerate() {
                let mut squares = l.zero();
                for from in (g * run..d).step_by(groups * run) {
                    each_vector!(L::N, from..from + run, |at, end| {
                        let mut u = l.read::<FULL>(y, at, end);
                        if shape.gate_first {
                            let z = l.read::<FULL>(z, at, end);
                            u = l.mul(u, l.mul(z, l.sigmoid(z)));
                            l.write::<FULL>(u, out, at, end);
                        }
                        squares = l.mul_add(u, u, squares);
                    });
                }
                *rstd = T::ONE / (l.sum(squares) * self.inverse + self.eps).sqrt();
                let scale = l.splat(*rstd);
                for from in (g * run..d).step_by(groups * run) {
                    each_vector!(L::N, from..from + run, |at, end| {
                        let w = l.mul(scale, l.read::<FULL>(self.weight_s, at, end));
                        let u = if shape.gate_first {
                            l.read::<FULL>(out, at, end)
                        } else {
                            let z = l.read::<FULL>(z, at, end);
                            l.mul(l.read::<FULL>(y, at, end), l.mul(z, l.sigmoid(z)))
                        };
                        l.write::<FULL>(l.mul(u, w), out, at, end);
                    });
                }
            }
        }
    }
}

impl GatedNormBackward {
    pub fn cost(&self) -> Cost {
        let n = (self.shape.tokens * self.shape.channels()) as f64;
        Cost::new(24.0 * n, 5.0 * n)
    }

    /// Per block: partial dweight / s [D], sigmoid(z) of one token [D].
    fn block_work(&self) -> usize {
        2 * self.shape.channels()
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
                let (sums, gate) = work.split_at_mut(d);
                sums.fill(T::ZERO);
                let first = i * block;
                T::vectors(Backward { kernel: self, first, y, z, rstd, dout, weight_s, dy, dz, sums, gate });
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
}

/// A block of the backward pass: tokens from `first`, whose rows of dy and dz are given, its sums for dweight, and room
/// for one token's sigmoid(z).
struct Backward<'a, T> {
    kernel: &'a GatedNormBackward,
    first: usize,
    y: &'a [T],
    z: &'a [T],
    rstd: &'a [T],
    dout: &'a [T],
    weight_s: &'a [T],
    dy: &'a mut [T],
    dz: &'a mut [T],
    sums: &'a mut [T],
    gate: &'a mut [T],
}

impl<T: Real> WithLanes<T> for Backward<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes<T = T>>(self, l: L) {
        let (kernel, shape) = (self.kernel, &self.kernel.shape);
        let (d, groups, run) = (shape.channels(), shape.groups, shape.run());
        let inverse = T::of(1.0 / shape.group_width as f64);
        let (w, sums, gate) = (&self.weight_s[..d], &mut self.sums[..d], &mut self.gate[..d]);
        let one = l.splat(T::ONE);
        for (i, (dy, dz)) in self.dy.chunks_mut(kernel.ld_dy).zip(self.dz.chunks_mut(kernel.ld_dz)).enumerate() {
            let t = self.first + i;
            let y = &self.y[t * kernel.ld_y..][..d];
            let z = &self.z[t * kernel.ld_z..][..d];
            let dout = &self.dout[t * kernel.ld_dout..][..d];
            let (dy, dz) = (&mut dy[..d], &mut dz[..d]);
            for g in 0..groups {
                // Sum of n * dn over the group, n the normalised value and dn its gradient: both gate orders have the
                // same product y * silu(z) * dout * w * s in it.
                let mut product = l.zero();
                for from in (g * run..d).step_by(groups * run) {
                    each_vector!(L::N, from..from + run, |at, end| {
                        let z = l.read::<FULL>(z, at, end);
                        let s = l.sigmoid(z);
                        l.write::<FULL>(s, gate, at, end);
                        let upstream = l.mul(l.read::<FULL>(dout, at, end), l.read::<FULL>(w, at, end));
                        let u = l.mul(l.read::<FULL>(y, at, end), l.mul(z, s));
                        product = l.mul_add(u, upstream, product);
                    });
                }
                let rstd = self.rstd[t * groups + g];
                let mean = l.splat(l.sum(product) * rstd * inverse);
                let rstd = l.splat(rstd);
                for from in (g * run..d).step_by(groups * run) {
                    each_vector!(L::N, from..from + run, |at, end| {
                        let (y, z) = (l.read::<FULL>(y, at, end), l.read::<FULL>(z, at, end));
                        let (dout, s) = (l.read::<FULL>(dout, at, end), l.read::<FULL>(gate, at, end));
                        let silu = l.mul(z, s);
                        let slope = l.mul(s, l.mul_add(z, l.sub(one, s), one));
                        let upstream = l.mul(dout, l.read::<FULL>(w, at, end));
                        let scaled = l.mul(y, rstd);
                        let normal = l.mul(scaled, silu);
                        let sum = l.mul_add(dout, normal, l.read::<FULL>(sums, at, end));
                        l.write::<FULL>(sum, sums, at, end);
                        let (mut to_y, mut to_z) = if shape.gate_first {
                            let du = l.mul(rstd, l.sub_mul(normal, mean, upstream));
                            (l.mul(du, silu), l.mul(l.mul(du, y), slope))
                        } else {
                            let dn = l.sub_mul(scaled, mean, l.mul(upstream, silu));
                            (l.mul(rstd, dn), l.mul(l.mul(upstream, scaled), slope))
                        };
                        if kernel.acc_dy {
                            to_y = l.add(l.read::<FULL>(dy, at, end), to_y);
                        }
                        if kernel.acc_dz {
                            to_z = l.add(l.read::<FULL>(dz, at, end), to_z);
                        }
                        l.write::<FULL>(to_y, dy, at, end);
                        l.write::<FULL>(to_z, dz, at, end);
                    });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
