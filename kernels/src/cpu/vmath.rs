//! Transcendental functions that the compiler can vectorise.
//!
//! `f32`: branch-free polynomials of plain multiplications and additions, so the same bits come out on every
//! instruction set; inside `par::simd!` a loop over them becomes vector code. `f64`: the standard library.
//!
//! Sources: argument reduction of exp after Cody and Waite; tanh's split at 0.625 and log1p(u) = 2 atanh(u / (2 + u))
//! are textbook identities. The polynomial coefficients are minimax fits of relative error (Remez), about 3e-9 each.

/// Elementary functions of a [`crate::Real`]; call them inside `par::simd!` loops.
pub trait VMath: Sized {
    /// e^x. Error at most 2 ulp in `f32`; 0 and infinity at the ends, NaN for NaN.
    fn vexp(self) -> Self;
    /// tanh x.
    fn vtanh(self) -> Self;
    /// 1 / (1 + e^-x).
    fn vsigmoid(self) -> Self;
    /// ln(1 + e^x), without overflow.
    fn vsoftplus(self) -> Self;
}

/// x + MAGIC rounds x to the nearest integer and leaves that integer in the low bits of the sum (1.5 * 2^23).
const MAGIC: f32 = 12_582_912.0;
const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 = HI + LO; HI has few bits, so that n * HI is exact for every n in range.
const LN2_HI: f32 = 0.693_359_4;
const LN2_LO: f32 = -2.121_944_4e-4;

#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    // Below -104 the result rounds to zero, above 89 it is infinite. Comparisons that are false for NaN keep it.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let t = x * LOG2_E + MAGIC;
    let n = t - MAGIC;
    let i = (t.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32);
    let r = (x - n * LN2_HI) - n * LN2_LO;
    let p = 0.001_381_446_7_f32;
    let p = p * r + 0.008_368_78;
    let p = p * r + 0.041_668_394;
    let p = p * r + 0.166_665_2;
    let p = p * r + 0.499_999_93;
    let y = (p * r) * r + r + 1.0;
    // 2^n in two factors: n reaches -150 and 128, which one factor cannot hold.
    let half = i >> 1;
    y * pow2(half) * pow2(i.wrapping_sub(half))
}

/// 2^n for n in -126..=127.
#[inline(always)]
fn pow2(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// ln(1 + u) for u in [0, 1].
#[inline(always)]
fn ln_1p_unit(u: f32) -> f32 {
    let s = u / (2.0 + u);
    let z = s * s;
    let p = 0.140_122_3_f32;
    let p = p * z + 0.139_995_7;
    let p = p * z + 0.200_108_5;
    let p = p * z + 0.333_332_06;
    let s2 = s + s;
    s2 + s2 * z * p
}

impl VMath for f32 {
    #[inline(always)]
    fn vexp(self) -> f32 {
        exp_f32(self)
    }

    #[inline(always)]
    fn vtanh(self) -> f32 {
        let a = self.abs();
        let z = self * self;
        let p = -0.005_717_045_4_f32;
        let p = p * z + 0.020_650_588;
        let p = p * z - 0.053_743_497;
        let p = p * z + 0.133_314_91;
        let p = p * z - 0.333_332_84;
        let small = self + self * z * p;
        let large = (1.0 - 2.0 / (exp_f32(a + a) + 1.0)).copysign(self);
        if a < 0.625 { small } else { large }
    }

    #[inline(always)]
    fn vsigmoid(self) -> f32 {
        1.0 / (1.0 + exp_f32(-self))
    }

    #[inline(always)]
    fn vsoftplus(self) -> f32 {
        // The comparison keeps NaN, which f32::max would drop.
        let positive = if self < 0.0 { 0.0 } else { self };
        positive + ln_1p_unit(exp_f32(-self.abs()))
    }
}

impl VMath for f64 {
    #[inline(always)]
    fn vexp(self) -> f64 {
        self.exp()
    }

    #[inline(always)]
    fn vtanh(self) -> f64 {
        self.tanh()
    }

    #[inline(always)]
    fn vsigmoid(self) -> f64 {
        1.0 / (1.0 + (-self).exp())
    }

    #[inline(always)]
    fn vsoftplus(self) -> f64 {
        let positive = if self < 0.0 { 0.0 } else { self };
        positive + (-self.abs()).exp().ln_1p()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::par::simd;

    /// Largest error of `f` against `reference` in units in the last place of the exact result, over [lo, hi].
    fn worst_ulp(lo: f64, hi: f64, f: impl Fn(f32) -> f32, reference: impl Fn(f64) -> f64) -> f64 {
        let n = 400_000;
        let mut worst = 0.0f64;
        for i in 0..=n {
            let x = (lo + (hi - lo) * f64::from(i) / f64::from(n)) as f32;
            let exact = reference(f64::from(x));
            let near = (exact as f32).abs();
            let ulp = f64::from(f32::from_bits(near.to_bits() + 1)) - f64::from(near);
            worst = worst.max((f64::from(f(x)) - exact).abs() / ulp);
        }
        worst
    }

    #[test]
    fn f32_errors_are_small() {
        let exp = worst_ulp(-103.9, 88.72, VMath::vexp, f64::exp);
        let tanh = worst_ulp(-12.0, 12.0, VMath::vtanh, f64::tanh).max(worst_ulp(-0.7, 0.7, VMath::vtanh, f64::tanh));
        let sigmoid = worst_ulp(-80.0, 80.0, VMath::vsigmoid, |x| 1.0 / (1.0 + (-x).exp()));
        let softplus = worst_ulp(-80.0, 80.0, VMath::vsoftplus, |x| x.max(0.0) + (-x.abs()).exp().ln_1p());
        println!("ulp: exp {exp} tanh {tanh} sigmoid {sigmoid} softplus {softplus}");
        assert!(exp <= 2.0, "exp {exp} ulp");
        assert!(tanh <= 2.0, "tanh {tanh} ulp");
        assert!(sigmoid <= 3.0, "sigmoid {sigmoid} ulp");
        assert!(softplus <= 3.0, "softplus {softplus} ulp");
    }

    #[test]
    fn ends_are_sane() {
        assert_eq!(f32::NEG_INFINITY.vexp(), 0.0);
        assert_eq!((-1e30f32).vexp(), 0.0);
        assert_eq!(f32::INFINITY.vexp(), f32::INFINITY);
        assert_eq!(89.0f32.vexp(), f32::INFINITY);
        assert_eq!(0.0f32.vexp(), 1.0);
        assert!(f32::NAN.vexp().is_nan() && f32::NAN.vtanh().is_nan());
        assert!(f32::NAN.vsigmoid().is_nan() && f32::NAN.vsoftplus().is_nan());
        assert_eq!(f32::NEG_INFINITY.vsigmoid(), 0.0);
        assert_eq!(f32::INFINITY.vsigmoid(), 1.0);
        assert_eq!(f32::INFINITY.vtanh(), 1.0);
        assert_eq!(f32::NEG_INFINITY.vtanh(), -1.0);
        assert_eq!(1e30f32.vsoftplus(), 1e30);
        assert_eq!(f32::NEG_INFINITY.vsoftplus(), 0.0);
    }

    #[test]
    fn vector_code_gives_the_scalar_bits() {
        let x: Vec<f32> = (0..1003).map(|i| (i as f32 - 500.0) * 0.21).collect();
        let mut y = vec![[0.0f32; 4]; x.len()];
        simd!(|| {
            for (y, &x) in y.iter_mut().zip(&x) {
                *y = [x.vexp(), x.vtanh(), x.vsigmoid(), x.vsoftplus()];
            }
        });
        for (y, &x) in y.iter().zip(&x) {
            assert_eq!(*y, [x.vexp(), x.vtanh(), x.vsigmoid(), x.vsoftplus()]);
        }
    }
}
