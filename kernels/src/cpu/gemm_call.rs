//! The one door to the `gemm` crate: a safe matrix product on strided slices.
//!
//! `gemm` shares output tiles among threads and never splits the inner dimension between them, and its blocking
//! follows from the sizes alone, so the bits do not depend on the number of threads (tested in `gemm.rs`).
#![allow(unsafe_code)]

use crate::real::Real;
use gemm::Parallelism;

thread_local! {
    static IN_PRODUCT: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Whether this thread is inside a matrix product: the library packs operands into buffers of its own there, which an
/// allocation counter tells from tensors by this.
pub fn in_product() -> bool {
    IN_PRODUCT.get()
}

/// A matrix inside a slice: element (i, j) lies at `i * rs + j * cs`.
#[derive(Clone, Copy)]
pub struct Mat<'a, T> {
    pub data: &'a [T],
    pub rs: usize,
    pub cs: usize,
}

impl<'a, T> Mat<'a, T> {
    /// Row-major with `ld` elements between rows.
    #[inline]
    pub fn rows(data: &'a [T], ld: usize) -> Self {
        Mat { data, rs: ld, cs: 1 }
    }

    /// The transpose of a row-major matrix with `ld` elements between its rows.
    #[inline]
    pub fn cols(data: &'a [T], ld: usize) -> Self {
        Mat { data, rs: 1, cs: ld }
    }
}

/// C[m, n] = alpha * A[m, k] B[k, n], added to C when `acc`; C is row-major with `ldc` elements between rows.
///
/// `parallel` spreads large products over the current rayon pool; pass false inside a parallel loop.
#[allow(clippy::too_many_arguments)]
pub fn matmul<T: Real>(
    (m, n, k): (usize, usize, usize),
    alpha: T,
    a: Mat<'_, T>,
    b: Mat<'_, T>,
    acc: bool,
    c: &mut [T],
    ldc: usize,
    parallel: bool,
) {
    if m == 0 || n == 0 {
        return;
    }
    assert!(ldc >= n || m == 1, "gemm: rows of C overlap (ldc {ldc} < n {n})");
    assert!((m - 1) * ldc + n <= c.len(), "gemm: C[{m}, {n}] with ldc {ldc} exceeds {} elements", c.len());
    if k == 0 {
        if !acc {
            c.chunks_mut(ldc.max(n)).take(m).for_each(|row| row[..n].fill(T::ZERO));
        }
        return;
    }
    let inside = |x: &Mat<'_, T>, rows: usize, cols: usize| (rows - 1) * x.rs + (cols - 1) * x.cs < x.data.len();
    assert!(inside(&a, m, k), "gemm: A[{m}, {k}] exceeds its slice");
    assert!(inside(&b, k, n), "gemm: B[{k}, {n}] exceeds its slice");
    let parallelism = if parallel && rayon::current_num_threads() > 1 {
        Parallelism::Rayon(rayon::current_num_threads())
    } else {
        Parallelism::None
    };
    IN_PRODUCT.set(true);
    // SAFETY: the asserts above keep every element of A, B and C inside its slice, the strides are non-negative and
    // fit isize because slices do, C is borrowed mutably so it overlaps neither A nor B, its rows do not overlap one
    // another, and `T` is f32 or f64 (Real is implemented for nothing else), which gemm dispatches on.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.as_mut_ptr(),
            1,
            ldc as isize,
            acc,
            a.data.as_ptr(),
            a.cs as isize,
            a.rs as isize,
            b.data.as_ptr(),
            b.cs as isize,
            b.rs as isize,
            T::ONE,
            alpha,
            false,
            false,
            false,
            parallelism,
        );
    }
    IN_PRODUCT.set(false);
}
