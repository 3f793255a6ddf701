//! Explicit vectors for loops that the compiler does not vectorise well: many operands, long chains, register tiles.
//!
//! An operation implements [`WithLanes`] once for any [`Lanes`], and `Real::vectors` runs it with the widest the machine
//! has. Products are fused where the machine can, so the bits may differ between instruction sets, never between
//! numbers of threads.

use crate::real::Real;
use pulp::Simd;

/// Vectors of one element type on one instruction set.
pub trait Lanes: Copy + Send + Sync {
    type T: Real;
    type V: Copy;
    /// Elements of a vector.
    const N: usize;
    /// Whether there are 32 registers rather than 16.
    const MANY_REGISTERS: bool;

    fn splat(self, x: Self::T) -> Self::V;
    /// The first N elements of `x`.
    fn load(self, x: &[Self::T]) -> Self::V;
    /// To the first N elements of `x`.
    fn store(self, v: Self::V, x: &mut [Self::T]);
    /// All of `x`, at most N elements; zeros beyond.
    fn load_part(self, x: &[Self::T]) -> Self::V;
    /// As many elements as `x` has, at most N.
    fn store_part(self, v: Self::V, x: &mut [Self::T]);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// a * b + c.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// c - a * b.
    fn sub_mul(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; either where one is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// Sum of the lanes.
    fn sum(self, a: Self::V) -> Self::T;
    /// Largest lane.
    fn largest(self, a: Self::V) -> Self::T;
    /// e^x; in `f32` 0 below -87.7 and infinity above 88.4, and 2 ulp between; NaN for NaN.
    fn exp(self, x: Self::V) -> Self::V;

    #[inline(always)]
    fn zero(self) -> Self::V {
        self.splat(Self::T::ZERO)
    }

    /// 1 / (1 + e^-x).
    #[inline(always)]
    fn sigmoid(self, x: Self::V) -> Self::V {
        let one = self.splat(Self::T::ONE);
        self.div(one, self.add(one, self.exp(self.sub(self.zero(), x))))
    }

    /// N elements from `at`, or those up to `end` if fewer are left.
    #[inline(always)]
    fn read<const FULL: bool>(self, x: &[Self::T], at: usize, end: usize) -> Self::V {
        if FULL { self.load(&x[at..at + Self::N]) } else { self.load_part(&x[at..end]) }
    }

    /// The reverse of [`Self::read`].
    #[inline(always)]
    fn write<const FULL: bool>(self, v: Self::V, x: &mut [Self::T], at: usize, end: usize) {
        if FULL { self.store(v, &mut x[at..at + Self::N]) } else { self.store_part(v, &mut x[at..end]) }
    }
}

/// Runs the body for every vector of elements `$from..$to`: elements `$at..$end`, with a constant `FULL` that says
/// whether they are a whole vector's.
macro_rules! each_vector {
    ($n:expr, $range:expr, |$at:ident, $end:ident| $body:block) => {{
        let range: std::ops::Range<usize> = $range;
        let mut $at = range.start;
        while $at + $n <= range.end {
            #[allow(dead_code)]
            const FULL: bool = true;
            let $end = $at + $n;
            $body
            $at = $end;
        }
        if $at < range.end {
            #[allow(dead_code)]
            const FULL: bool = false;
            let $end = range.end;
            $body
        }
    }};
}
pub(crate) use each_vector;

/// Work that runs on any vectors.
pub trait WithLanes<T: Real> {
    type Out;
    fn run<L: Lanes<T = T>>(self, l: L) -> Self::Out;
}

/// An operation as `pulp` dispatches it.
pub struct Single<W>(pub W);
pub struct Double<W>(pub W);

impl<W: WithLanes<f32>> pulp::WithSimd for Single<W> {
    type Output = W::Out;
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> W::Out {
        self.0.run(F32(simd))
    }
}

impl<W: WithLanes<f64>> pulp::WithSimd for Double<W> {
    type Output = W::Out;
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> W::Out {
        self.0.run(F64(simd))
    }
}

#[derive(Clone, Copy)]
pub struct F32<S>(S);
#[derive(Clone, Copy)]
pub struct F64<S>(S);

macro_rules! shared {
    ($t:ty, $v:ident, $n:ident, $as:ident, $as_mut:ident, [$($op:ident => $with:ident),*], $fma:ident, $neg_fma:ident,
     $splat:ident, $part:ident, $store_part:ident, $sum:ident, $largest:ident) => {
        type T = $t;
        type V = S::$v;
        const N: usize = S::$n;
        const MANY_REGISTERS: bool = S::REGISTER_COUNT >= 32;

        #[inline(always)]
        fn splat(self, x: $t) -> S::$v {
            self.0.$splat(x)
        }
        #[inline(always)]
        fn load(self, x: &[$t]) -> S::$v {
            S::$as(&x[..S::$n]).0[0]
        }
        #[inline(always)]
        fn store(self, v: S::$v, x: &mut [$t]) {
            S::$as_mut(&mut x[..S::$n]).0[0] = v;
        }
        #[inline(always)]
        fn load_part(self, x: &[$t]) -> S::$v {
            self.0.$part(x)
        }
        #[inline(always)]
        fn store_part(self, v: S::$v, x: &mut [$t]) {
            self.0.$store_part(x, v)
        }
        $(#[inline(always)]
        fn $op(self, a: S::$v, b: S::$v) -> S::$v {
            self.0.$with(a, b)
        })*
        #[inline(always)]
        fn mul_add(self, a: S::$v, b: S::$v, c: S::$v) -> S::$v {
            self.0.$fma(a, b, c)
        }
        #[inline(always)]
        fn sub_mul(self, a: S::$v, b: S::$v, c: S::$v) -> S::$v {
            self.0.$neg_fma(a, b, c)
        }
        #[inline(always)]
        fn sum(self, a: S::$v) -> $t {
            self.0.$sum(a)
        }
        #[inline(always)]
        fn largest(self, a: S::$v) -> $t {
            self.0.$largest(a)
        }
    };
}

impl<S: Simd> Lanes for F32<S> {
    shared!(f32, f32s, F32_LANES, as_simd_f32s, as_mut_simd_f32s,
        [add => add_f32s, sub => sub_f32s, mul => mul_f32s, div => div_f32s, max => max_f32s],
        mul_add_e_f32s, negate_mul_add_e_f32s, splat_f32s, partial_load_f32s, partial_store_f32s, reduce_sum_f32s,
        reduce_max_f32s);

    /// As in `vmath`, with 2^n as one factor: n = round(x / ln 2), and MAGIC leaves n + 127 in the low bits.
    #[inline(always)]
    fn exp(self, x: S::f32s) -> S::f32s {
        const MAGIC: f32 = 12_582_912.0 + 127.0;
        let s = self.0;
        let c = |x: f32| s.splat_f32s(x);
        // The ends are where n + 127 is 0 and 255, at which the factor is 0 and infinity. Vector instructions take the
        // second operand where one is NaN, plain code the other.
        let (x, kept) = (s.min_f32s(c(88.7), s.max_f32s(c(-88.0), x)), x);
        let x = if S::IS_SCALAR { s.select_f32s(s.equal_f32s(kept, kept), x, kept) } else { x };
        let t = s.mul_add_e_f32s(x, c(std::f32::consts::LOG2_E), c(MAGIC));
        let n = s.sub_f32s(t, c(MAGIC));
        let r = s.negate_mul_add_e_f32s(n, c(0.693_359_4), x);
        let r = s.negate_mul_add_e_f32s(n, c(-2.121_944_4e-4), r);
        let p = s.mul_add_e_f32s(c(0.001_381_446_7), r, c(0.008_368_78));
        let p = s.mul_add_e_f32s(p, r, c(0.041_668_394));
        let p = s.mul_add_e_f32s(p, r, c(0.166_665_2));
        let p = s.mul_add_e_f32s(p, r, c(0.499_999_93));
        let p = s.mul_add_e_f32s(p, r, c(1.0));
        let p = s.mul_add_e_f32s(p, r, c(1.0));
        let power = s.wrapping_dyn_shl_u32s(s.transmute_u32s_f32s(t), s.splat_u32s(23));
        s.mul_f32s(p, s.transmute_f32s_u32s(power))
    }
}

impl<S: Simd> Lanes for F64<S> {
    shared!(f64, f64s, F64_LANES, as_simd_f64s, as_mut_simd_f64s,
        [add => add_f64s, sub => sub_f64s, mul => mul_f64s, div => div_f64s, max => max_f64s],
        mul_add_e_f64s, negate_mul_add_e_f64s, splat_f64s, partial_load_f64s, partial_store_f64s, reduce_sum_f64s,
        reduce_max_f64s);

    #[inline(always)]
    fn exp(self, x: S::f64s) -> S::f64s {
        let mut x = x;
        for x in pulp::bytemuck::cast_slice_mut::<S::f64s, f64>(std::slice::from_mut(&mut x)) {
            *x = x.exp();
        }
        x
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// exp and sigmoid of every element.
    struct Both<'a, T>(&'a [T], &'a mut [T], &'a mut [T]);

    impl<T: Real> WithLanes<T> for Both<'_, T> {
        type Out = ();
        #[inline(always)]
        fn run<L: Lanes<T = T>>(self, l: L) {
            for ((x, e), s) in self.0.chunks(L::N).zip(self.1.chunks_mut(L::N)).zip(self.2.chunks_mut(L::N)) {
                let v = l.load_part(x);
                l.store_part(l.exp(v), e);
                l.store_part(l.sigmoid(v), s);
            }
        }
    }

    fn everywhere(x: &[f32], check: impl Fn(&[f32], &[f32])) {
        let (mut e, mut s) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        f32::vectors(Both(x, &mut e, &mut s));
        check(&e, &s);
        Both(x, &mut e, &mut s).run(F32(pulp::Scalar));
        check(&e, &s);
    }

    #[test]
    fn exp_and_sigmoid_are_accurate() {
        let n = 100_003;
        let x: Vec<f32> = (0..n).map(|i| -87.0 + 175.0 * i as f32 / n as f32).collect();
        everywhere(&x, |e, s| {
            let ulp = |got: f32, exact: f64| {
                let near = exact as f32;
                let unit = f64::from(f32::from_bits(near.to_bits() + 1)) - f64::from(near);
                (f64::from(got) - exact).abs() / unit
            };
            for ((&x, &e), &s) in x.iter().zip(e).zip(s) {
                assert!(ulp(e, f64::from(x).exp()) <= 2.0, "exp({x}) = {e}");
                assert!(ulp(s, 1.0 / (1.0 + (-f64::from(x)).exp())) <= 3.0, "sigmoid({x}) = {s}");
            }
        });
    }

    #[test]
    fn ends_are_sane() {
        let inf = f32::INFINITY;
        let x = [-inf, -1e30, -88.5, 0.0, 89.0, 1e30, inf, f32::NAN, -f32::NAN];
        everywhere(&x, |e, s| {
            assert_eq!(e[..7], [0.0, 0.0, 0.0, 1.0, inf, inf, inf]);
            assert_eq!(s[..7], [0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]);
            assert!(e[7..].iter().chain(&s[7..]).all(|v| v.is_nan()));
        });
    }

    #[test]
    fn parts_and_sums() {
        struct Sum<'a>(&'a [f64]);
        impl WithLanes<f64> for Sum<'_> {
            type Out = (f64, f64);
            #[inline(always)]
            fn run<L: Lanes<T = f64>>(self, l: L) -> (f64, f64) {
                let parts = || self.0.chunks(L::N).map(|x| l.load_part(x));
                let sum = parts().fold(l.zero(), |a, v| l.add(a, v));
                (l.sum(sum), l.largest(parts().fold(l.zero(), |a, v| l.max(a, v))))
            }
        }
        let x: Vec<f64> = (1..=11).map(f64::from).collect();
        assert_eq!(f64::vectors(Sum(&x)), (66.0, 11.0));
    }
}
