//! What the machine can do: the fastest matrix product and the fastest copy, measured on the cores it has.
//!
//! A class of operators is judged by the roofline: with F operations and B bytes it cannot take less than
//! max(F / products, B / copies). Its share of the ceiling is that time over the time it took. Data that stay in the caches
//! can exceed the copy's ceiling, which is that of memory.

use gantry_kernels::cpu::gemm::Gemm;
use gantry_kernels::{Args, Element};
use rayon::prelude::*;
use serde::Serialize;
use std::time::{Duration, Instant};

/// Bytes of either buffer of the copy: more than caches hold.
const COPY_BYTES: usize = 64 << 20;
/// Rows and columns of the matrices: the faster size counts.
const SIDES: [usize; 2] = [384, 1024];
/// How long each is measured.
const TIME: Duration = Duration::from_millis(300);

/// Ceilings of some cores together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ceilings {
    pub threads: usize,
    /// Matrix product of the run's type, operations per second / 1e9.
    pub gflops: f64,
    /// Bytes read plus bytes written per second / 1e9.
    pub gigabytes: f64,
}

impl Ceilings {
    /// Measures all cores, on a thread pool of its own.
    pub fn measure<T: Element>() -> Ceilings {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        match rayon::ThreadPoolBuilder::new().num_threads(threads).build() {
            Ok(pool) => pool.install(|| Ceilings { threads, gflops: products::<T>(), gigabytes: copies() }),
            // Without further threads this one is all there is.
            Err(_) => Ceilings { threads: 1, gflops: products::<T>(), gigabytes: copies() },
        }
    }

    /// The higher of either measurement: what else the machine did can only have lowered one.
    pub fn or(self, other: Ceilings) -> Ceilings {
        Ceilings {
            threads: self.threads,
            gflops: self.gflops.max(other.gflops),
            gigabytes: self.gigabytes.max(other.gigabytes),
        }
    }

    /// What one of `parts` equal parts of the machine can do.
    pub fn part(self, parts: usize) -> Ceilings {
        let n = parts.max(1) as f64;
        Ceilings {
            threads: (self.threads / parts.max(1)).max(1),
            gflops: self.gflops / n,
            gigabytes: self.gigabytes / n,
        }
    }

    /// Share of the ceiling: the least time `flops` and `bytes` can take, over `seconds`.
    pub fn share(&self, flops: f64, bytes: f64, seconds: f64) -> f64 {
        let least = (flops / self.gflops).max(bytes / self.gigabytes) / 1e9;
        if seconds > 0.0 { least / seconds } else { 0.0 }
    }
}

/// Least seconds of a call.
fn fastest(mut call: impl FnMut()) -> f64 {
    let begun = Instant::now();
    let mut least = f64::INFINITY;
    let mut calls = 0;
    while calls < 3 || begun.elapsed() < TIME {
        let clock = Instant::now();
        call();
        // The first call touches memory for the first time.
        if calls > 0 {
            least = least.min(clock.elapsed().as_secs_f64());
        }
        calls += 1;
    }
    least.max(1e-9)
}

fn products<T: Element>() -> f64 {
    SIDES.into_iter().map(product::<T>).fold(0.0, f64::max)
}

fn product<T: Element>(side: usize) -> f64 {
    let n = side * side;
    let (a, b, mut c) = (vec![T::of(0.5); n], vec![T::of(0.25); n], vec![T::ZERO; n]);
    let gemm = Gemm {
        m: side,
        n: side,
        k: side,
        ta: false,
        tb: true,
        lda: side,
        ldb: side,
        ldc: side,
        alpha: 1.0,
        acc: false,
    };
    let seconds = fastest(|| {
        let (ins, outs): (&[&[T]], &mut [&mut [T]]) = (&[&a, &b], &mut [&mut c]);
        T::launch(&gemm, Args { ins, outs, ints: &[], int_outs: &mut [], work: &mut [] });
    });
    2.0 * (side as f64).powi(3) / seconds / 1e9
}

fn copies() -> f64 {
    let (from, mut to) = (vec![1u64; COPY_BYTES / 8], vec![0u64; COPY_BYTES / 8]);
    let block = (from.len() / rayon::current_num_threads() / 4).max(1);
    let seconds = fastest(|| {
        to.par_chunks_mut(block).zip(from.par_chunks(block)).for_each(|(to, from)| to.copy_from_slice(from));
        std::hint::black_box(&mut to);
    });
    2.0 * COPY_BYTES as f64 / seconds / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearer_ceiling_counts() {
        let all = Ceilings { threads: 4, gflops: 100.0, gigabytes: 10.0 };
        assert_eq!(all.share(50e9, 1e9, 1.0), 0.5);
        assert_eq!(all.share(50e9, 8e9, 1.0), 0.8);
        assert_eq!(all.part(2), Ceilings { threads: 2, gflops: 50.0, gigabytes: 5.0 });
    }

    /// Any machine that builds this multiplies faster in f32 than in f64, and copies faster than a disk.
    #[test]
    fn measured_ceilings_are_plausible() {
        let (single, double) = (Ceilings::measure::<f32>(), Ceilings::measure::<f64>());
        assert!(single.gflops > double.gflops, "{single:?} {double:?}");
        assert!(single.gigabytes > 0.5 && single.gigabytes < 5000.0, "{single:?}");
    }
}
