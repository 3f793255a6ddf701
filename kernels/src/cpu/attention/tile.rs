//! Dense products of attention tiles: at most 64 rows, operands read in place, sizes that follow from the shape alone.

use crate::cpu::gemm_call::{Mat, matmul};
use crate::real::Real;

/// Tokens of a query or key tile.
pub const TILE: usize = 64;
/// Largest head dimension.
pub const MAX_HEAD_DIM: usize = 256;

/// The left operand of a product: element (i, k) lies at `data[i * row + k * col]`.
#[derive(Clone, Copy)]
pub struct Left<'a, T> {
    pub data: &'a [T],
    pub row: usize,
    pub col: usize,
}

/// c[m, n] += a[m, k] b[k, n]; rows of `b` lie `ldb`, rows of `c` `ldc` elements apart.
pub fn product<T: Real>(size: (usize, usize, usize), a: Left<'_, T>, b: &[T], ldb: usize, c: &mut [T], ldc: usize) {
    let left = Mat { data: a.data, rs: a.row, cs: a.col };
    matmul(size, T::ONE, left, Mat::rows(b, ldb), true, c, ldc, false);
}

/// Transposes `rows` rows of `width` elements, `ld` apart, to `out[width, TILE]`; missing columns are zero.
pub fn transpose<T: Real>(x: &[T], ld: usize, rows: usize, width: usize, out: &mut [T]) {
    for (d, column) in out.chunks_exact_mut(TILE).enumerate().take(width) {
        for (i, y) in column.iter_mut().enumerate() {
            *y = if i < rows { x[i * ld + d] } else { T::ZERO };
        }
    }
}
