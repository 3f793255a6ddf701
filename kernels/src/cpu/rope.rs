//! Rotary position embedding (Su et al. 2021) on column segments of one operand.
//!
//! Of every head the first r = `rotary_dim` channels are rotated, pair i of r/2 by the angle t * theta^(-2i/r), where t
//! is the token's index within its sequence; the rest is left as it is. Pairs are (i, i + r/2) in the `Half`
//! convention (GPT-NeoX) and (2i, 2i + 1) in the `Interleaved` one (GPT-J). The backward rotates by the negative
//! angle: it is the same kernel with `inverse` set. Angles, sines and cosines are computed in f64.

use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;

/// Which channels of a head form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// (i, i + r/2).
    Half,
    /// (2i, 2i + 1).
    Interleaved,
}

/// `heads` heads of `head_dim` channels from column `offset`. With a `rotary_dim` of 0 a segment is only copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeSegment {
    pub offset: usize,
    pub heads: usize,
    pub head_dim: usize,
    /// r: even, at most `head_dim` and [`MAX_ROTARY_DIM`].
    pub rotary_dim: usize,
}

/// Largest rotary dimension.
pub const MAX_ROTARY_DIM: usize = 512;

/// ins: x [T, ld_x], or none to rotate `y` in place; ints: cu_seqlens; outs: y [T, ld_y], segments at the same offsets.
#[derive(Clone, Debug)]
pub struct Rope {
    pub tokens: usize,
    pub segments: Vec<RopeSegment>,
    pub theta: f64,
    pub pairs: RopePairs,
    /// Rotate by the negative angle.
    pub inverse: bool,
    pub ld_x: usize,
    pub ld_y: usize,
    /// y += instead of =; not in place.
    pub acc: bool,
}

crate::kernels! {
    Rope => "rope";
}

impl RopeSegment {
    /// Checks the sizes the kernel relies on; a message names the one that is wrong.
    pub fn check(&self) -> Result<(), String> {
        let r = self.rotary_dim;
        if !r.is_multiple_of(2) || r > self.head_dim || r > MAX_ROTARY_DIM {
            return Err(format!(
                "a rotary dimension must be even and at most the head dimension ({}) and {MAX_ROTARY_DIM}, got {r}",
                self.head_dim
            ));
        }
        Ok(())
    }

    fn width(&self) -> usize {
        self.heads * self.head_dim
    }
}

/// cos and sin of one token's angles.
struct Angles<T> {
    rotary_dim: usize,
    frequency: [f64; MAX_ROTARY_DIM / 2],
    cos: [T; MAX_ROTARY_DIM / 2],
    sin: [T; MAX_ROTARY_DIM / 2],
}

impl<T: Real> Angles<T> {
    fn new(theta: f64, rotary_dim: usize) -> Self {
        const N: usize = MAX_ROTARY_DIM / 2;
        let mut frequency = [0.0; N];
        for (i, f) in frequency.iter_mut().enumerate().take(rotary_dim / 2) {
            *f = theta.powf(-2.0 * i as f64 / rotary_dim as f64);
        }
        Angles { rotary_dim, frequency, cos: [T::ZERO; N], sin: [T::ZERO; N] }
    }

    fn at(&mut self, position: usize, inverse: bool) {
        let angles = self.cos.iter_mut().zip(&mut self.sin).zip(&self.frequency);
        for ((c, s), f) in angles.take(self.rotary_dim / 2) {
            let (sin, cos) = (position as f64 * f).sin_cos();
            *c = T::of(cos);
            *s = T::of(if inverse { -sin } else { sin });
        }
    }
}

impl Rope {
    fn cost(&self) -> Cost {
        let rotated: usize = self.segments.iter().map(|s| s.heads * s.rotary_dim).sum();
        let moved: usize = self.segments.iter().map(RopeSegment::width).sum();
        Cost::new((3 * rotated * self.tokens) as f64, (2 * moved * self.tokens) as f64)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        debug_assert!(self.segments.iter().all(|s| s.check().is_ok()));
        let ([y], [cu]) = (args.outs, args.ints) else { unreachable!("rope takes x, cu_seqlens and gives y") };
        let x = args.ins.first().copied();
        let width: usize = self.segments.iter().map(RopeSegment::width).sum();
        let block = par::block_rows(self.tokens, 4 * width);
        par::rows_mut(y, self.ld_y, block, |first, y| {
            // Segments of equal rotary dimension share their angles; in practice there is one such set.
            let mut done = 0;
            while let Some(r) = self.segments[done..].first().map(|s| s.rotary_dim) {
                let n = self.segments[done..].iter().take_while(|s| s.rotary_dim == r).count();
                self.rows(&self.segments[done..done + n], Angles::new(self.theta, r), first, x, y, cu);
                done += n;
            }
        });
    }

    fn rows<T: Real>(
        &self,
        segments: &[RopeSegment],
        mut angles: Angles<T>,
        first: usize,
        x: Option<&[T]>,
        y: &mut [T],
        cu: &[i32],
    ) {
        let mut sequence = cu.partition_point(|&s| s as usize <= first);
        for (i, y) in y.chunks_mut(self.ld_y).enumerate().take(self.tokens.saturating_sub(first)) {
            let t = first + i;
            while sequence < cu.len() && cu[sequence] as usize <= t {
                sequence += 1;
            }
            angles.at(t - cu[sequence - 1] as usize, self.inverse);
            let x = x.map(|x| &x[t * self.ld_x..]);
            for s in segments {
                let y = &mut y[s.offset..][..s.width()];
                match x {
                    Some(x) => {
                        let x = &x[s.offset..][..s.width()];
                        for (x, y) in x.chunks_exact(s.head_dim).zip(y.chunks_exact_mut(s.head_dim)) {
                            self.head(&angles, x, y);
                        }
                    }
                    None => y.chunks_exact_mut(s.head_dim).for_each(|y| self.head_in_place(&angles, y)),
                }
            }
        }
    }

    #[inline(always)]
    fn rotate<T: Real>(&self, angles: &Angles<T>, mut f: impl FnMut(usize, usize, T, T)) {
        let half = angles.rotary_dim / 2;
        let (cos, sin) = (&angles.cos[..half], &angles.sin[..half]);
        match self.pairs {
            RopePairs::Half => (0..half).for_each(|i| f(i, i + half, cos[i], sin[i])),
            RopePairs::Interleaved => (0..half).for_each(|i| f(2 * i, 2 * i + 1, cos[i], sin[i])),
        }
    }

    fn head<T: Real>(&self, angles: &Angles<T>, x: &[T], y: &mut [T]) {
        let r = angles.rotary_dim;
        if self.acc {
            self.rotate(angles, |a, b, c, s| {
                y[a] += x[a] * c - x[b] * s;
                y[b] += x[b] * c + x[a] * s;
            });
            y[r..].iter_mut().zip(&x[r..]).for_each(|(y, &x)| *y += x);
        } else {
            y.copy_from_slice(x);
            self.head_in_place(angles, y);
        }
    }

    fn head_in_place<T: Real>(&self, angles: &Angles<T>, y: &mut [T]) {
        self.rotate(angles, |a, b, c, s| {
            let (u, v) = (y[a], y[b]);
            y[a] = u * c - v * s;
            y[b] = v * c + u * s;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, normal, relative_l2};
    use rstest::rstest;

    const CU: [i32; 6] = [0, 1, 1, 8, 11, 11];
    const LD: usize = 32;

    fn rope(pairs: RopePairs) -> Rope {
        let segments = vec![
            RopeSegment { offset: 1, heads: 2, head_dim: 8, rotary_dim: 6 },
            RopeSegment { offset: 18, heads: 1, head_dim: 8, rotary_dim: 6 },
            RopeSegment { offset: 27, heads: 2, head_dim: 2, rotary_dim: 0 },
        ];
        Rope { tokens: 11, segments, theta: 100.0, pairs, inverse: false, ld_x: LD, ld_y: LD, acc: false }
    }

    fn run(kernel: &Rope, x: &[f64], fill: f64) -> Vec<f64> {
        let outs = vec![vec![fill; kernel.tokens * kernel.ld_y - 1]];
        let mut call = Call { ins: vec![x.to_vec()], outs, ints: vec![CU.to_vec()], ..Default::default() };
        call.run(kernel).outs[0].clone()
    }

    #[rstest]
    fn rotates_pairs_by_position(#[values(RopePairs::Half, RopePairs::Interleaved)] pairs: RopePairs) {
        let x = normal(1, 11 * LD);
        let y = run(&rope(pairs), &x, 7.0);
        let mut expect = vec![7.0; 11 * LD - 1];
        let positions = [0, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2];
        for (t, position) in positions.into_iter().enumerate() {
            for head in [1, 9, 18] {
                let at = t * LD + head;
                expect[at + 6..at + 8].copy_from_slice(&x[at + 6..at + 8]);
                for i in 0..3 {
                    let (a, b) = if pairs == RopePairs::Half { (i, i + 3) } else { (2 * i, 2 * i + 1) };
                    let angle = f64::from(position) * 100f64.powf(-(i as f64) / 3.0);
                    expect[at + a] = x[at + a] * angle.cos() - x[at + b] * angle.sin();
                    expect[at + b] = x[at + a] * angle.sin() + x[at + b] * angle.cos();
                }
            }
            expect[t * LD + 27..t * LD + 31].copy_from_slice(&x[t * LD + 27..t * LD + 31]);
        }
        assert!(relative_l2(&y, &expect) < 1e-15);
        let mut in_place = Call { outs: vec![x.clone()], ints: vec![CU.to_vec()], ..Default::default() };
        in_place.run(&rope(pairs));
        for t in 0..11 {
            assert_eq!(in_place.outs[0][t * LD + 1..t * LD + 17], y[t * LD + 1..t * LD + 17]);
            assert_eq!(in_place.outs[0][t * LD + 17], x[t * LD + 17], "wrote beside its segments");
        }
        let call =
            Call { ins: vec![x], outs: vec![vec![7.0; 11 * LD - 1]], ints: vec![CU.to_vec()], ..Default::default() };
        assert!(relative_l2(&call.run_f32(&rope(pairs))[0], &expect) < 1e-7);
    }

    /// A rotation's transpose is its inverse: <rope x, g> = <x, rope^-1 g>, and the inverse adds when told.
    #[rstest]
    fn inverse_is_the_backward(#[values(RopePairs::Half, RopePairs::Interleaved)] pairs: RopePairs) {
        let (x, g) = (normal(1, 11 * LD), normal(2, 11 * LD));
        let y = run(&rope(pairs), &x, 0.0);
        let back = Rope { inverse: true, ..rope(pairs) };
        let dx = run(&back, &g, 0.0);
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        assert!((dot(&y, &g) - dot(&dx, &x)).abs() < 1e-12);
        let round = run(&Rope { ld_x: LD, ..back.clone() }, &[y.clone(), vec![0.0]].concat(), 0.0);
        for t in 0..11 {
            assert!(relative_l2(&round[t * LD + 1..t * LD + 17], &x[t * LD + 1..t * LD + 17]) < 1e-14);
        }
        let added = run(&Rope { acc: true, ..back }, &g, 0.25);
        for (a, d) in added[1..17].iter().zip(&dx[1..17]) {
            assert!((a - d - 0.25).abs() < 1e-14);
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads() {
        let kernel = Rope { tokens: 3000, ..rope(RopePairs::Half) };
        let x = normal(3, 3000 * LD);
        let on = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let ints = vec![vec![0, 1000, 3000]];
            let mut call = Call { ins: vec![x.clone()], outs: vec![vec![0.0; 3000 * LD]], ints, ..Default::default() };
            pool.install(|| call.run(&kernel).outs.clone())
        };
        let one = on(1);
        assert_eq!(one, on(3));
        assert!(one[0][2999 * LD + 1] != x[2999 * LD + 1]);
    }

    #[test]
    fn sizes_are_checked() {
        let s = RopeSegment { offset: 0, heads: 1, head_dim: 8, rotary_dim: 8 };
        assert!(s.check().is_ok());
        assert!(RopeSegment { rotary_dim: 3, ..s }.check().is_err());
        assert!(RopeSegment { rotary_dim: 10, ..s }.check().is_err());
    }
}
