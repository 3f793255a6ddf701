//! Small dense products for attention tiles: at most 64 rows and columns, operands read in place.
//!
//! Every element of a result is one sum over k in ascending order, so a tile's size, the instruction set's register
//! blocking and the number of threads do not change which numbers are added in which order.

use crate::par::simd;
use crate::real::Real;

/// Tokens of a query or key tile.
pub const TILE: usize = 64;
/// Columns of a register block.
const NR: usize = 16;
/// Largest inner length of [`product`]: the head dimension or a tile.
pub const MAX_K: usize = 256;

/// The left operand of a product: element (i, k) lies at `data[i * row + k * col]`.
#[derive(Clone, Copy)]
pub struct Left<'a, T> {
    pub data: &'a [T],
    pub row: usize,
    pub col: usize,
}

/// c[m, n] += a[m, k] b[k, n]; rows of `b` lie `ldb`, rows of `c` `ldc` elements apart; k at most [`MAX_K`].
#[inline(never)]
pub fn product<T: Real>(
    (m, n, k): (usize, usize, usize),
    a: Left<'_, T>,
    b: &[T],
    ldb: usize,
    c: &mut [T],
    ldc: usize,
) {
    // Eight accumulator rows need the 32 registers of AVX-512; six fit the 16 of AVX2.
    if wide_registers() {
        simd(
            #[inline(always)]
            || body::<T, 8>((m, n, k), a, b, ldb, c, ldc),
        )
    } else {
        simd(
            #[inline(always)]
            || body::<T, 6>((m, n, k), a, b, ldb, c, ldc),
        )
    }
}

#[cfg(target_arch = "x86_64")]
fn wide_registers() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
}

#[cfg(not(target_arch = "x86_64"))]
fn wide_registers() -> bool {
    true
}

#[inline(always)]
fn body<T: Real, const MR: usize>(
    (m, n, k): (usize, usize, usize),
    a: Left<'_, T>,
    b: &[T],
    ldb: usize,
    c: &mut [T],
    ldc: usize,
) {
    let mut panel = [[T::ZERO; MR]; MAX_K];
    let panel = &mut panel[..k];
    let mut i0 = 0;
    while i0 < m {
        let rows = MR.min(m - i0);
        for (p, row) in panel.iter_mut().enumerate() {
            for (i, x) in row.iter_mut().enumerate() {
                *x = if i < rows { a.data[(i0 + i) * a.row + p * a.col] } else { T::ZERO };
            }
        }
        let mut j0 = 0;
        while j0 < n {
            let cols = NR.min(n - j0);
            let mut acc = [[T::ZERO; NR]; MR];
            if cols == NR {
                for (p, left) in panel.iter().enumerate() {
                    let Some(right) = b[p * ldb + j0..].first_chunk::<NR>() else { break };
                    multiply_add(&mut acc, left, right);
                }
            } else {
                for (p, left) in panel.iter().enumerate() {
                    let mut right = [T::ZERO; NR];
                    right[..cols].copy_from_slice(&b[p * ldb + j0..][..cols]);
                    multiply_add(&mut acc, left, &right);
                }
            }
            for (i, sums) in acc.iter().enumerate().take(rows) {
                let out = &mut c[(i0 + i) * ldc + j0..][..cols];
                for (y, &s) in out.iter_mut().zip(sums) {
                    *y += s;
                }
            }
            j0 += NR;
        }
        i0 += MR;
    }
}

#[inline(always)]
fn multiply_add<T: Real, const MR: usize>(acc: &mut [[T; NR]; MR], left: &[T; MR], right: &[T; NR]) {
    for i in 0..MR {
        for j in 0..NR {
            acc[i][j] = left[i].mul_add(right[j], acc[i][j]);
        }
    }
}

/// Transposes `rows` rows of `width` elements, `ld` apart, to `out[width, TILE]`; missing columns are zero.
pub fn transpose<T: Real>(x: &[T], ld: usize, rows: usize, width: usize, out: &mut [T]) {
    for (d, column) in out.chunks_exact_mut(TILE).enumerate().take(width) {
        for (i, y) in column.iter_mut().enumerate() {
            *y = if i < rows { x[i * ld + d] } else { T::ZERO };
        }
    }
}
