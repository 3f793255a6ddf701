//! Parallel loops whose result does not depend on the number of threads.
//!
//! Work is cut into blocks whose size follows from the problem alone; a reduction adds the blocks' partial
//! results in order. So the same inputs give the same bits on any machine width.

use rayon::prelude::*;

/// Rows of a block when a row costs `work` element operations: enough to pay for a task, never zero.
pub fn block_rows(rows: usize, work: usize) -> usize {
    const GRAIN: usize = 16 * 1024;
    (GRAIN / work.max(1)).clamp(1, rows.max(1))
}

/// Calls `f(first_row, rows)` for blocks of rows of `out`, whose rows lie `ld` elements apart.
///
/// The last row may be shorter than `ld`.
pub fn rows_mut<T: Send>(out: &mut [T], ld: usize, block: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    if rayon::current_num_threads() == 1 || out.len() <= ld * block {
        for (i, chunk) in out.chunks_mut(ld * block).enumerate() {
            f(i * block, chunk);
        }
        return;
    }
    out.par_chunks_mut(ld * block).enumerate().for_each(|(i, chunk)| f(i * block, chunk));
}

/// Rows of a block when a sum over `rows` rows is cut into at most [`MAX_PARTS`] partial sums.
pub fn reduce_rows(rows: usize) -> usize {
    rows.div_ceil(MAX_PARTS).max(16)
}

/// Number of partial sums for `rows` rows: blocks of [`reduce_rows`] rows.
pub fn reduce_parts(rows: usize) -> usize {
    rows.div_ceil(reduce_rows(rows))
}

/// Most partial sums a reduction over rows makes.
pub const MAX_PARTS: usize = 64;

/// As [`rows_mut`] for two arrays: block i of `a` (rows `lda` apart) goes with chunk i of `b`, `b_chunk` elements long.
pub fn rows_pair_mut<T: Send, U: Send>(
    (a, lda): (&mut [T], usize),
    (b, b_chunk): (&mut [U], usize),
    block: usize,
    f: impl Fn(usize, &mut [T], &mut [U]) + Sync,
) {
    let (lda, b_chunk) = (lda.max(1), b_chunk.max(1));
    if rayon::current_num_threads() == 1 || a.len() <= lda * block {
        for (i, (a, b)) in a.chunks_mut(lda * block).zip(b.chunks_mut(b_chunk)).enumerate() {
            f(i * block, a, b);
        }
        return;
    }
    a.par_chunks_mut(lda * block).zip(b.par_chunks_mut(b_chunk)).enumerate().for_each(|(i, (a, b))| f(i * block, a, b));
}

/// Calls `f(i)` for every `i` in `0..n`, in parallel.
pub fn each(n: usize, f: impl Fn(usize) + Sync + Send) {
    if n <= 1 || rayon::current_num_threads() == 1 {
        (0..n).for_each(f);
    } else {
        (0..n).into_par_iter().for_each(f);
    }
}

/// Dot product in 16 running sums, so that it vectorises inside [`simd`]; the longer one's rest is left out.
#[inline(always)]
pub fn lane_dot<T: crate::Real>(a: &[T], b: &[T]) -> T {
    const LANES: usize = 16;
    let n = a.len().min(b.len());
    let (a, b) = (&a[..n], &b[..n]);
    let mut lanes = [T::ZERO; LANES];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let mut rest = T::ZERO;
    for (&x, &y) in a.remainder().iter().zip(b.remainder()) {
        rest += x * y;
    }
    for (x, y) in a.zip(b) {
        for ((lane, &x), &y) in lanes.iter_mut().zip(x).zip(y) {
            *lane += x * y;
        }
    }
    rest + lanes.into_iter().sum()
}

/// Runs a closure with the widest vector instructions the machine has: `par::simd!(|| body)`.
///
/// The body is compiled once per instruction set, which takes that it is inlined there: the macro marks the closure so,
/// and helpers it calls must be `#[inline(always)]` too, or they run as plain code.
macro_rules! simd_inlined {
    (|| $body:expr) => {
        $crate::par::simd(
            #[inline(always)]
            || $body,
        )
    };
}
pub(crate) use simd_inlined as simd;

/// What the macro of the same name calls; a closure given directly must be marked `#[inline(always)]` by hand.
#[inline(always)]
pub fn simd<R>(f: impl FnOnce() -> R) -> R {
    struct Run<F>(F);
    impl<R, F: FnOnce() -> R> pulp::NullaryFnOnce for Run<F> {
        type Output = R;
        #[inline(always)]
        fn call(self) -> R {
            (self.0)()
        }
    }
    pulp::Arch::new().dispatch(Run(f))
}
