//! Rows by index, one-hot and arg max: the operators that take or give i32.
//!
//! A negative index means "no row": gathered it reads as zeros, scattered it is skipped. Gradients overwrite unless
//! `acc`. Scattering runs in parallel over blocks of destination rows, each in the order of the source rows, so the sums
//! do not depend on the number of threads.

use super::reduce::first_max;
use super::softmax::{put, row, span};
use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;

/// y[i, :] = x[index[i], :].
///
/// ins: x [any number of rows, cols]; ints: index [rows]; outs: y [rows, cols].
/// The gradient is [`ScatterAddRows`].
#[derive(Clone, Copy, Debug)]
pub struct GatherRows {
    pub rows: usize,
    pub cols: usize,
    pub ld_x: usize,
    pub ld_y: usize,
    pub acc: bool,
}

/// dx[j, :] = sum over i with index[i] = j of dy[i, :].
///
/// ins: dy [rows, cols]; ints: index [rows]; outs: dx [rows_x, cols].
#[derive(Clone, Copy, Debug)]
pub struct ScatterAddRows {
    pub rows: usize,
    pub rows_x: usize,
    pub cols: usize,
    pub ld_dy: usize,
    pub ld_dx: usize,
    pub acc: bool,
}

/// y = base with row index[i] replaced by x[i, :]; the last i wins where indices repeat.
///
/// ins: x [rows, cols], base [rows_y, cols]; ints: index [rows]; outs: y [rows_y, cols].
/// Gradients: dx by [`GatherRows`] on dy (for distinct indices), dbase by [`ZeroRows`] on dy.
#[derive(Clone, Copy, Debug)]
pub struct ScatterRows {
    pub rows: usize,
    pub rows_y: usize,
    pub cols: usize,
    pub ld_x: usize,
    pub ld_base: usize,
    pub ld_y: usize,
}

/// y = x with the rows index[i] set to zero.
///
/// ins: x [rows_y, cols]; ints: index [rows]; outs: y [rows_y, cols].
#[derive(Clone, Copy, Debug)]
pub struct ZeroRows {
    pub rows: usize,
    pub rows_y: usize,
    pub cols: usize,
    pub ld_x: usize,
    pub ld_y: usize,
    pub acc: bool,
}

/// y[i, c] = 1 if c = index[i] else 0; an index outside [0, cols) gives zeros.
///
/// ints: index [rows]; outs: y [rows, cols].
#[derive(Clone, Copy, Debug)]
pub struct OneHot {
    pub rows: usize,
    pub cols: usize,
    pub ld_y: usize,
}

/// index[i] = the first c with the largest x[i, c].
///
/// ins: x [rows, cols]; int_outs: index [rows].
#[derive(Clone, Copy, Debug)]
pub struct ArgMax {
    pub rows: usize,
    pub cols: usize,
    pub ld_x: usize,
}

/// segment[t] = the sequence token t belongs to.
///
/// ints: cu_seqlens [n + 1]; int_outs: segment [tokens].
#[derive(Clone, Copy, Debug)]
pub struct SegmentFromCuSeqlens {
    pub tokens: usize,
}

crate::kernels! {
    GatherRows => "gather_rows";
    ScatterAddRows => "scatter_add_rows";
    ScatterRows => "scatter_rows";
    ZeroRows => "zero_rows";
    OneHot => "one_hot";
    ArgMax => "arg_max";
    SegmentFromCuSeqlens => "segment_from_cu_seqlens";
}

impl GatherRows {
    fn cost(&self) -> Cost {
        Cost::new(0.0, (2 * self.rows * self.cols) as f64)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (x, index) = (args.ins[0], args.ints[0]);
        let out = &mut args.outs[0][..span(self.rows, self.ld_y, self.cols)];
        par::rows_mut(out, self.ld_y, par::block_rows(self.rows, self.cols), |first, block| {
            for (i, y) in block.chunks_mut(self.ld_y).enumerate() {
                let y = &mut y[..self.cols];
                match usize::try_from(index[first + i]) {
                    Ok(j) => y.iter_mut().zip(row(x, j, self.ld_x, self.cols)).for_each(|(y, &x)| put(y, x, self.acc)),
                    Err(_) if self.acc => {}
                    Err(_) => y.fill(T::ZERO),
                }
            }
        });
    }
}

/// Destination rows of one task of a scatter: every task reads the whole index, so there are few.
fn destination_block(rows: usize, cols: usize) -> usize {
    par::block_rows(rows, cols).max(rows.div_ceil(32)).max(1)
}

/// Calls `f(j - first, i)` for every i, in order, whose index j lies in the `n` rows from `first`.
#[inline(always)]
fn each_in(index: &[i32], first: usize, n: usize, mut f: impl FnMut(usize, usize)) {
    for (i, &j) in index.iter().enumerate() {
        if let Some(j) = usize::try_from(j).ok().and_then(|j| j.checked_sub(first)).filter(|&j| j < n) {
            f(j, i);
        }
    }
}

impl ScatterAddRows {
    fn cost(&self) -> Cost {
        let n = (self.rows * self.cols) as f64;
        Cost::new(n, n + (self.rows_x * self.cols) as f64)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (dy, index) = (args.ins[0], &args.ints[0][..self.rows]);
        let out = &mut args.outs[0][..span(self.rows_x, self.ld_dx, self.cols)];
        par::rows_mut(out, self.ld_dx, destination_block(self.rows_x, self.cols), |first, block| {
            if !self.acc {
                block.chunks_mut(self.ld_dx).for_each(|dx| dx[..self.cols].fill(T::ZERO));
            }
            each_in(index, first, block.len().div_ceil(self.ld_dx), |j, i| {
                let dx = &mut block[j * self.ld_dx..][..self.cols];
                dx.iter_mut().zip(row(dy, i, self.ld_dy, self.cols)).for_each(|(dx, &dy)| *dx += dy);
            });
        });
    }
}

impl ScatterRows {
    fn cost(&self) -> Cost {
        Cost::new(0.0, ((self.rows + 2 * self.rows_y) * self.cols) as f64)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (x, base) = (args.ins[0], args.ins[1]);
        let index = &args.ints[0][..self.rows];
        let out = &mut args.outs[0][..span(self.rows_y, self.ld_y, self.cols)];
        par::rows_mut(out, self.ld_y, destination_block(self.rows_y, self.cols), |first, block| {
            for (i, y) in block.chunks_mut(self.ld_y).enumerate() {
                y[..self.cols].copy_from_slice(row(base, first + i, self.ld_base, self.cols));
            }
            each_in(index, first, block.len().div_ceil(self.ld_y), |j, i| {
                block[j * self.ld_y..][..self.cols].copy_from_slice(row(x, i, self.ld_x, self.cols));
            });
        });
    }
}

impl ZeroRows {
    fn cost(&self) -> Cost {
        Cost::new(0.0, (2 * self.rows_y * self.cols) as f64)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let x = args.ins[0];
        let index = &args.ints[0][..self.rows];
        let out = &mut args.outs[0][..span(self.rows_y, self.ld_y, self.cols)];
        par::rows_mut(out, self.ld_y, 64, |first, block| {
            let mut zeroed = [false; 64];
            each_in(index, first, block.len().div_ceil(self.ld_y), |j, _| zeroed[j] = true);
            for (i, y) in block.chunks_mut(self.ld_y).enumerate() {
                let y = &mut y[..self.cols];
                if !zeroed[i] {
                    let x = row(x, first + i, self.ld_x, self.cols);
                    y.iter_mut().zip(x).for_each(|(y, &x)| put(y, x, self.acc));
                } else if !self.acc {
                    y.fill(T::ZERO);
                }
            }
        });
    }
}

impl OneHot {
    fn cost(&self) -> Cost {
        Cost::new(0.0, (self.rows * self.cols) as f64)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let index = args.ints[0];
        for (y, &c) in args.outs[0][..span(self.rows, self.ld_y, self.cols)].chunks_mut(self.ld_y).zip(index) {
            let y = &mut y[..self.cols];
            y.fill(T::ZERO);
            if let Some(y) = usize::try_from(c).ok().and_then(|c| y.get_mut(c)) {
                *y = T::ONE;
            }
        }
    }
}

impl ArgMax {
    fn cost(&self) -> Cost {
        let n = (self.rows * self.cols) as f64;
        Cost::new(n, n)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let x = args.ins[0];
        let out = &mut args.int_outs[0][..self.rows];
        par::rows_mut(out, 1, par::block_rows(self.rows, self.cols), |first, index| {
            par::simd!(|| {
                for (i, index) in index.iter_mut().enumerate() {
                    *index = first_max(row(x, first + i, self.ld_x, self.cols)) as i32;
                }
            })
        });
    }
}

impl SegmentFromCuSeqlens {
    fn cost(&self) -> Cost {
        Cost::new(0.0, self.tokens as f64)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let segment = &mut args.int_outs[0][..self.tokens];
        for (s, ends) in args.ints[0].windows(2).enumerate() {
            segment[ends[0] as usize..ends[1] as usize].fill(s as i32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, finite_differences, normal};
    use rstest::rstest;

    const C: usize = 3;
    const LD: usize = 5;
    const INDEX: [i32; 6] = [4, 0, -1, 4, 2, 4];
    const ROWS_X: usize = 7;

    fn stride(x: &[f64]) -> Vec<f64> {
        x.chunks(C).flat_map(|x| x.iter().copied().chain([f64::NAN, f64::NAN])).collect()
    }

    fn dense(x: &[f64], minus: f64) -> Vec<f64> {
        x.chunks(LD).flat_map(|x| x[..C].iter().map(move |x| x - minus)).collect()
    }

    fn run(kernel: &dyn crate::Kernel, ins: Vec<Vec<f64>>, rows: usize, index: &[i32], before: f64) -> Vec<f64> {
        let mut call =
            Call { ins, outs: vec![vec![before; span(rows, LD, C)]], ints: vec![index.to_vec()], ..Call::default() };
        let out = call.run(kernel).outs[0].clone();
        assert!(out.chunks(LD).all(|y| y[C..].iter().all(|y| y.to_bits() == before.to_bits())), "wrote a gap");
        out
    }

    #[rstest]
    fn gather_and_its_gradient(#[values(false, true)] acc: bool) {
        let before = if acc { 1.0 } else { f64::NAN };
        let gather = GatherRows { rows: 6, cols: C, ld_x: LD, ld_y: LD, acc };
        let x = normal(1, ROWS_X * C);
        let f = |x: &[f64]| dense(&run(&gather, vec![stride(x)], 6, &INDEX, before), if acc { 1.0 } else { 0.0 });
        for (y, j) in f(&x).chunks(C).zip(INDEX) {
            for (c, y) in y.iter().enumerate() {
                let expected = if j < 0 { 0.0 } else { x[j as usize * C + c] };
                assert!((y - expected).abs() < 1e-15);
            }
        }
        let dy = normal(2, 6 * C);
        let scatter = ScatterAddRows { rows: 6, rows_x: ROWS_X, cols: C, ld_dy: LD, ld_dx: LD, acc };
        let dx = dense(&run(&scatter, vec![stride(&dy)], ROWS_X, &INDEX, before), if acc { 1.0 } else { 0.0 });
        finite_differences("dx", &x, &dx, 1e-8, |x| f(x).iter().zip(&dy).map(|(y, g)| y * g).sum());
    }

    /// Many rows, so that several blocks of destinations run; the sums come out as in source order.
    #[test]
    fn scatter_add_in_blocks() {
        let (rows, rows_x, cols) = (5000, 900, 64);
        let index: Vec<i32> = (0..rows as i32).map(|i| (i * 7919) % 901 - 1).collect();
        assert!(destination_block(rows_x, cols) < rows_x);
        let dy = normal(3, rows * cols);
        let mut expected = vec![0.0; rows_x * cols];
        for (dy, &j) in dy.chunks(cols).zip(&index) {
            if j >= 0 {
                expected[j as usize * cols..][..cols].iter_mut().zip(dy).for_each(|(x, dy)| *x += dy);
            }
        }
        let mut call =
            Call { ins: vec![dy], outs: vec![vec![f64::NAN; rows_x * cols]], ints: vec![index], ..Call::default() };
        call.run(&ScatterAddRows { rows, rows_x, cols, ld_dy: cols, ld_dx: cols, acc: false });
        assert_eq!(call.outs[0], expected);
    }

    #[test]
    fn scatter_rows_and_its_gradients() {
        let index = [3, -1, 0, 6];
        let (x, base, dy) = (normal(4, 4 * C), normal(5, ROWS_X * C), normal(6, ROWS_X * C));
        let scatter = ScatterRows { rows: 4, rows_y: ROWS_X, cols: C, ld_x: LD, ld_base: LD, ld_y: LD };
        let f = |x: &[f64], base: &[f64]| {
            dense(&run(&scatter, vec![stride(x), stride(base)], ROWS_X, &index, f64::NAN), 0.0)
        };
        let y = f(&x, &base);
        assert_eq!(y[3 * C..4 * C], x[..C]);
        assert_eq!(y[C..3 * C], base[C..3 * C]);
        let dot = |y: Vec<f64>| y.iter().zip(&dy).map(|(y, g)| y * g).sum();
        let gather = GatherRows { rows: 4, cols: C, ld_x: LD, ld_y: LD, acc: false };
        let dx = dense(&run(&gather, vec![stride(&dy)], 4, &index, f64::NAN), 0.0);
        finite_differences("dx", &x, &dx, 1e-8, |x| dot(f(x, &base)));
        for acc in [false, true] {
            let zero = ZeroRows { rows: 4, rows_y: ROWS_X, cols: C, ld_x: LD, ld_y: LD, acc };
            let before = if acc { 1.0 } else { f64::NAN };
            let dbase = dense(&run(&zero, vec![stride(&dy)], ROWS_X, &index, before), if acc { 1.0 } else { 0.0 });
            finite_differences("dbase", &base, &dbase, 1e-8, |base| dot(f(&x, base)));
        }
    }

    #[test]
    fn zero_rows_in_blocks() {
        let (rows, cols) = (200, 2);
        let index: Vec<i32> = (0..rows as i32).step_by(3).collect();
        let mut call = Call {
            ins: vec![vec![1.0; rows * cols]],
            outs: vec![vec![f64::NAN; rows * cols]],
            ints: vec![index.clone()],
            ..Call::default()
        };
        call.run(&ZeroRows { rows: index.len(), rows_y: rows, cols, ld_x: cols, ld_y: cols, acc: false });
        for (r, y) in call.outs[0].chunks(cols).enumerate() {
            assert_eq!(y, [if r % 3 == 0 { 0.0 } else { 1.0 }; 2]);
        }
    }

    #[test]
    fn one_hot_and_arg_max() {
        let y = run(&OneHot { rows: 4, cols: C, ld_y: LD }, vec![], 4, &[2, -1, 0, 3], f64::NAN);
        assert_eq!(dense(&y, 0.0), [0., 0., 1., 0., 0., 0., 1., 0., 0., 0., 0., 0.]);
        let mut call =
            Call { ins: vec![vec![1.0, 5.0, 5.0, -1.0, -3.0, -2.0]], int_outs: vec![vec![9; 2]], ..Call::default() };
        call.run(&ArgMax { rows: 2, cols: 3, ld_x: 3 });
        assert_eq!(call.int_outs[0], [1, 0]);
    }

    /// A sequence of length 1, an empty one in the middle, and trailing empty ones.
    #[test]
    fn segments() {
        let mut call = Call { ints: vec![vec![0, 3, 3, 4, 6, 6, 6]], int_outs: vec![vec![-1; 6]], ..Call::default() };
        call.run(&SegmentFromCuSeqlens { tokens: 6 });
        assert_eq!(call.int_outs[0], [0, 0, 0, 2, 3, 3]);
    }
}
