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

/// Calls `f(i)` for every `i` in `0..n`, in parallel.
pub fn each(n: usize, f: impl Fn(usize) + Sync + Send) {
    if n <= 1 || rayon::current_num_threads() == 1 {
        (0..n).for_each(f);
    } else {
        (0..n).into_par_iter().for_each(f);
    }
}

/// Runs `f` with the widest vector instructions the machine has.
///
/// The closure's body is compiled once per instruction set; it must be inlined to profit, so mark helpers it calls
/// `#[inline(always)]`.
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
