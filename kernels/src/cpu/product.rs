//! Small matrix products inside one thread: tiles of the result are kept in registers, operands are read where they
//! lie. For operands that fit the cache (chunks of a scan, tiles of attention); large ones go through `gemm_call`.
//!
//! The order of every sum is that of the inner dimension, so an element's bits depend on nothing but its row and column.

use crate::cpu::vector::{Lanes, WithLanes};
use crate::real::Real;
use std::ops::Range;

/// Which part of a product there is to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    All,
    /// A is zero above its diagonal (where k > i); elements there up to the next multiple of 8 are read.
    LowerLeft,
    /// A is zero below its diagonal (where k < i); elements there down to the last multiple of 8 are read.
    UpperLeft,
    /// Of C only what is on or below the diagonal (j <= i) is wanted; more may be written.
    LowerResult,
}

/// A left operand: element (i, k) lies at `i * rs + k * cs`; one of the strides is 1.
#[derive(Clone, Copy)]
pub struct Left<'a, T> {
    data: &'a [T],
    rs: usize,
    cs: usize,
}

impl<'a, T> Left<'a, T> {
    /// Row-major with `ld` elements between rows.
    pub fn rows(data: &'a [T], ld: usize) -> Self {
        Left { data, rs: ld, cs: 1 }
    }

    /// The transpose of a row-major matrix with `ld` elements between its rows.
    pub fn cols(data: &'a [T], ld: usize) -> Self {
        Left { data, rs: 1, cs: ld }
    }
}

/// C[m, n] = A[m, k] B[k, n], added to C when `acc`; B and C are row-major.
#[allow(clippy::too_many_arguments)]
pub fn product<T: Real>(
    (m, n, k): (usize, usize, usize),
    part: Part,
    a: Left<'_, T>,
    b: &[T],
    ldb: usize,
    acc: bool,
    c: &mut [T],
    ldc: usize,
) {
    T::vectors(Product { m, n, k, part, a, b, ldb, acc, c, ldc });
}

struct Product<'a, T> {
    m: usize,
    n: usize,
    k: usize,
    part: Part,
    a: Left<'a, T>,
    b: &'a [T],
    ldb: usize,
    acc: bool,
    c: &'a mut [T],
    ldc: usize,
}

impl<T: Real> WithLanes<T> for Product<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes<T = T>>(mut self, l: L) {
        let mut j = 0;
        while j + 2 * L::N <= self.n {
            self.columns::<L, 2, true>(l, j, j + 2 * L::N);
            j += 2 * L::N;
        }
        if j + L::N <= self.n {
            self.columns::<L, 1, true>(l, j, j + L::N);
            j += L::N;
        }
        if j < self.n {
            self.columns::<L, 1, false>(l, j, self.n);
        }
    }
}

impl<T: Real> Product<'_, T> {
    /// Columns j..end of C, C vectors of them.
    #[inline(always)]
    fn columns<L: Lanes<T = T>, const C: usize, const FULL: bool>(&mut self, l: L, j: usize, end: usize) {
        let mut i = match self.part {
            // Rows whose tile ends before column j have nothing on or below the diagonal here.
            Part::LowerResult => j / 8 * 8,
            _ => 0,
        };
        if L::MANY_REGISTERS {
            while i + 8 <= self.m {
                self.tile::<L, 8, C, FULL>(l, i, j, end);
                i += 8;
            }
        }
        while i + 4 <= self.m {
            self.tile::<L, 4, C, FULL>(l, i, j, end);
            i += 4;
        }
        while i < self.m {
            self.tile::<L, 1, C, FULL>(l, i, j, end);
            i += 1;
        }
    }

    fn inner(&self, i: usize, rows: usize) -> Range<usize> {
        match self.part {
            Part::LowerLeft => 0..self.k.min(i + rows),
            Part::UpperLeft => i.min(self.k)..self.k,
            _ => 0..self.k,
        }
    }

    #[inline(always)]
    fn tile<L: Lanes<T = T>, const R: usize, const C: usize, const FULL: bool>(
        &mut self,
        l: L,
        i: usize,
        j: usize,
        end: usize,
    ) {
        let inner = self.inner(i, R);
        let mut sums = [[l.zero(); C]; R];
        if self.acc {
            for (r, sums) in sums.iter_mut().enumerate() {
                let row = (i + r) * self.ldc;
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = l.read::<FULL>(self.c, row + j + v * L::N, row + end);
                }
            }
        }
        if self.a.cs == 1 {
            let rows: [&[T]; R] =
                std::array::from_fn(|r| &self.a.data[(i + r) * self.a.rs + inner.start..][..inner.len()]);
            let count = inner.len();
            for (p, k) in inner.enumerate() {
                if p >= count {
                    break;
                }
                let b = self.right::<L, C, FULL>(l, k, j, end);
                for r in 0..R {
                    let a = l.splat(rows[r][p]);
                    for v in 0..C {
                        sums[r][v] = l.mul_add(a, b[v], sums[r][v]);
                    }
                }
            }
        } else {
            for k in inner {
                let b = self.right::<L, C, FULL>(l, k, j, end);
                let column = &self.a.data[k * self.a.cs + i..][..R];
                for r in 0..R {
                    let a = l.splat(column[r]);
                    for v in 0..C {
                        sums[r][v] = l.mul_add(a, b[v], sums[r][v]);
                    }
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            let row = (i + r) * self.ldc;
            for (v, &sum) in sums.iter().enumerate() {
                l.write::<FULL>(sum, self.c, row + j + v * L::N, row + end);
            }
        }
    }

    /// Columns j..end of row `k` of B.
    #[inline(always)]
    fn right<L: Lanes<T = T>, const C: usize, const FULL: bool>(
        &self,
        l: L,
        k: usize,
        j: usize,
        end: usize,
    ) -> [L::V; C] {
        let row = &self.b[k * self.ldb + j..k * self.ldb + end];
        let mut b = [l.zero(); C];
        for (v, b) in b.iter_mut().enumerate() {
            *b = l.read::<FULL>(row, v * L::N, end - j);
        }
        b
    }
}

/// The transpose of `rows` rows of `cols` elements, `ld` apart: `out` is [cols, rows], its rows `ld_out` apart.
pub fn transpose<T: Real>((rows, cols): (usize, usize), x: &[T], ld: usize, out: &mut [T], ld_out: usize) {
    const B: usize = 4;
    let (whole_rows, whole_cols) = (rows / B * B, cols / B * B);
    for i in (0..whole_rows).step_by(B) {
        for j in (0..whole_cols).step_by(B) {
            let mut block = [[T::ZERO; B]; B];
            for (r, row) in block.iter_mut().enumerate() {
                row.copy_from_slice(&x[(i + r) * ld + j..][..B]);
            }
            for c in 0..B {
                let column = [block[0][c], block[1][c], block[2][c], block[3][c]];
                out[(j + c) * ld_out + i..][..B].copy_from_slice(&column);
            }
        }
    }
    for i in 0..rows {
        let from = if i < whole_rows { whole_cols } else { 0 };
        for j in from..cols {
            out[j * ld_out + i] = x[i * ld + j];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{normal, relative_l2};

    /// All parts, sizes around those of tiles, both orders of A, with and without adding.
    #[test]
    fn agrees_with_plain_loops() {
        let sizes = [(1, 1, 1), (5, 3, 2), (8, 16, 8), (13, 37, 13), (64, 64, 64), (29, 33, 29)];
        for (m, n, k) in sizes {
            for part in [Part::All, Part::LowerLeft, Part::UpperLeft, Part::LowerResult] {
                for transposed in [false, true] {
                    for acc in [false, true] {
                        check((m, n, k), part, transposed, acc);
                    }
                }
            }
        }
    }

    fn check((m, n, k): (usize, usize, usize), part: Part, transposed: bool, acc: bool) {
        let at = |i: usize, p: usize| if transposed { p * (m + 1) + i } else { i * (k + 2) + p };
        let mut a = normal(1, (m + 1) * (k + 2) + m + k);
        for i in 0..m {
            for p in 0..k {
                if (part == Part::LowerLeft && p > i) || (part == Part::UpperLeft && p < i) {
                    a[at(i, p)] = 0.0;
                }
            }
        }
        let (b, before) = (normal(2, k * (n + 1)), normal(3, m * (n + 3)));
        let left = |a| if transposed { Left { data: a, rs: 1, cs: m + 1 } } else { Left { data: a, rs: k + 2, cs: 1 } };
        let mut c = before.clone();
        product((m, n, k), part, left(&a[..]), &b, n + 1, acc, &mut c, n + 3);
        let single = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<f32>>();
        let (a32, b32, mut c32) = (single(&a), single(&b), single(&before));
        let left32 = if transposed { Left::cols(&a32, m + 1) } else { Left::rows(&a32, k + 2) };
        product((m, n, k), part, left32, &b32, n + 1, acc, &mut c32, n + 3);
        let (mut got, mut narrow, mut want) = (vec![], vec![], vec![]);
        for i in 0..m {
            for j in (0..n).filter(|&j| part != Part::LowerResult || j <= i) {
                let start = if acc { before[i * (n + 3) + j] } else { 0.0 };
                want.push(start + (0..k).map(|p| a[at(i, p)] * b[p * (n + 1) + j]).sum::<f64>());
                got.push(c[i * (n + 3) + j]);
                narrow.push(f64::from(c32[i * (n + 3) + j]));
            }
            assert_eq!(c[i * (n + 3) + n..][..3], before[i * (n + 3) + n..][..3], "wrote beyond a row");
        }
        let what = format!("{m} {n} {k} {part:?} transposed {transposed} acc {acc}");
        assert!(relative_l2(&got, &want) < 1e-14, "{what}");
        assert!(relative_l2(&narrow, &want) < 1e-5, "{what}");
    }

    #[test]
    fn transposes() {
        for (rows, cols) in [(1, 1), (4, 4), (7, 9), (64, 32)] {
            let x = normal(1, rows * (cols + 1));
            let mut out = vec![7.0; cols * (rows + 2)];
            transpose((rows, cols), &x, cols + 1, &mut out, rows + 2);
            for j in 0..cols {
                for i in 0..rows {
                    assert_eq!(out[j * (rows + 2) + i], x[i * (cols + 1) + j]);
                }
                assert_eq!(out[j * (rows + 2) + rows..][..2], [7.0; 2]);
            }
        }
    }
}
