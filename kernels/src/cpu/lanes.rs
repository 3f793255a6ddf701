//! Sums over slices in a fixed order that vectorises: element i goes to lane i % LANES, lanes are added as a tree.
//!
//! The order depends on nothing but the length, so the bits are the same on every instruction set (as long as the
//! mapped function uses no fused operation). Call these inside `par::simd!`.

use crate::real::Real;

const LANES: usize = 32;

#[inline(always)]
fn tree<T: Real>(mut lanes: [T; LANES]) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Sum of f(a_i); `f` may widen, as in f32 to f64.
#[inline(always)]
pub fn sum1<A: Real, T: Real>(a: &[A], f: impl Fn(A) -> T) -> T {
    let (chunks, rest) = a.as_chunks::<LANES>();
    let mut acc = [T::ZERO; LANES];
    for a in chunks {
        for l in 0..LANES {
            acc[l] += f(a[l]);
        }
    }
    for (acc, &a) in acc.iter_mut().zip(rest) {
        *acc += f(a);
    }
    tree(acc)
}

/// Sum of f(a_i, b_i) over the shorter length.
#[inline(always)]
pub fn sum2<A: Real, T: Real>(a: &[A], b: &[A], f: impl Fn(A, A) -> T) -> T {
    let n = a.len().min(b.len());
    let (a, a_rest) = a[..n].as_chunks::<LANES>();
    let (b, b_rest) = b[..n].as_chunks::<LANES>();
    let mut acc = [T::ZERO; LANES];
    for (a, b) in a.iter().zip(b) {
        for l in 0..LANES {
            acc[l] += f(a[l], b[l]);
        }
    }
    for (acc, (&a, &b)) in acc.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *acc += f(a, b);
    }
    tree(acc)
}

/// Sum of f(a_i, b_i, c_i) over the shortest length.
#[inline(always)]
pub fn sum3<A: Real, T: Real>(a: &[A], b: &[A], c: &[A], f: impl Fn(A, A, A) -> T) -> T {
    let n = a.len().min(b.len()).min(c.len());
    let (a, a_rest) = a[..n].as_chunks::<LANES>();
    let (b, b_rest) = b[..n].as_chunks::<LANES>();
    let (c, c_rest) = c[..n].as_chunks::<LANES>();
    let mut acc = [T::ZERO; LANES];
    for ((a, b), c) in a.iter().zip(b).zip(c) {
        for l in 0..LANES {
            acc[l] += f(a[l], b[l], c[l]);
        }
    }
    for (acc, ((&a, &b), &c)) in acc.iter_mut().zip(a_rest.iter().zip(b_rest).zip(c_rest)) {
        *acc += f(a, b, c);
    }
    tree(acc)
}

/// Sum of a_i b_i.
#[inline(always)]
pub fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    sum2(a, b, |a, b| a * b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::normal;

    #[test]
    fn sums_agree_with_plain_loops() {
        for n in [0, 1, 31, 32, 33, 100] {
            let (a, b, c) = (normal(1, n), normal(2, n), normal(3, n));
            let plain = |f: &dyn Fn(usize) -> f64| (0..n).map(f).sum::<f64>();
            assert!((sum1(&a, |a| a) - plain(&|i| a[i])).abs() < 1e-12);
            assert!((dot(&a, &b) - plain(&|i| a[i] * b[i])).abs() < 1e-12);
            assert!((sum3(&a, &b, &c, |a, b, c| a * b * c) - plain(&|i| a[i] * b[i] * c[i])).abs() < 1e-12);
        }
    }
}
