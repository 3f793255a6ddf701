//! SwiGLU (Shazeer 2020): one operand holds [gate | up]; y = silu(gate) up, optionally times a weight per row.
//!
//! Backward recomputes from x; nothing is saved.

use super::activation::{Function, LANES, Rows, Silu, total};
use super::elementwise::strided_rows;
use crate::kernel::{Args, Cost};
use crate::real::Real;

/// y = silu(gate) up w.
///
/// ins: x [T, 2C] = [gate | up], then w [T] when `row_weight`; outs: y [T, C].
#[derive(Clone, Debug)]
pub struct SwiGlu {
    pub rows: usize,
    /// C.
    pub cols: usize,
    pub ld_x: usize,
    pub ld_y: usize,
    pub row_weight: bool,
}

impl SwiGlu {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let x = args.ins[0];
        let weight = self.row_weight.then(|| args.ins[1]);
        strided_rows(
            args.outs[0],
            self.rows,
            self.cols,
            self.ld_y,
            #[inline(always)]
            |t, y| {
                let (gate, up) = x[t * self.ld_x..][..2 * self.cols].split_at(self.cols);
                let w = weight.map_or(T::ONE, |w| w[t]);
                for ((y, &gate), &up) in y.iter_mut().zip(gate).zip(up) {
                    *y = Silu.value(gate) * up * w;
                }
            },
        );
    }

    fn cost(&self) -> Cost {
        let n = (self.rows * self.cols) as f64;
        Cost::new(8.0 * n, 3.0 * n)
    }
}

/// dgate = dy w up silu'(gate), dup = dy w silu(gate), added to dx when `acc`;
/// dw[t] = sum_c dy silu(gate) up, added to dw when `acc_weight`.
///
/// ins: dy [T, C], x [T, 2C], then w [T] when `row_weight`; outs: dx [T, 2C], then dw [T] when `row_weight`.
#[derive(Clone, Debug)]
pub struct SwiGluBackward {
    pub rows: usize,
    /// C.
    pub cols: usize,
    pub ld_dy: usize,
    pub ld_x: usize,
    pub ld_dx: usize,
    pub row_weight: bool,
    pub acc: bool,
    pub acc_weight: bool,
}

impl SwiGluBackward {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let (dy, x, cols) = (args.ins[0], args.ins[1], self.cols);
        if self.row_weight {
            let [dx, dw] = args.outs else { panic!("swiglu_backward takes 2 outputs") };
            let weight = args.ins[2];
            let rows = Rows { rows: self.rows, cols: 2 * cols, ld: self.ld_dx, acc: self.acc_weight };
            rows.with_weight(
                dx,
                dw,
                #[inline(always)]
                |t, dx| self.row(dx, &dy[t * self.ld_dy..][..cols], &x[t * self.ld_x..][..2 * cols], weight[t]),
            );
        } else {
            strided_rows(
                args.outs[0],
                self.rows,
                2 * cols,
                self.ld_dx,
                #[inline(always)]
                |t, dx| {
                    self.row(dx, &dy[t * self.ld_dy..][..cols], &x[t * self.ld_x..][..2 * cols], T::ONE);
                },
            );
        }
    }

    /// One row; returns sum_c dy silu(gate) up.
    #[inline(always)]
    fn row<T: Real>(&self, dx: &mut [T], dy: &[T], x: &[T], w: T) -> T {
        let (gate, up) = x.split_at(self.cols);
        let (dgate, dup) = dx.split_at_mut(self.cols);
        let mut sums = [T::ZERO; LANES];
        let chunks = dgate.chunks_mut(LANES).zip(dup.chunks_mut(LANES)).zip(dy.chunks(LANES));
        for (((dgate, dup), dy), (gate, up)) in chunks.zip(gate.chunks(LANES).zip(up.chunks(LANES))) {
            let outs = dgate.iter_mut().zip(dup).zip(&mut sums);
            for (((dgate, dup), sum), ((&dy, &gate), &up)) in outs.zip(dy.iter().zip(gate).zip(up)) {
                let (value, slope) = Silu.both(gate);
                let (old_gate, old_up) = if self.acc { (*dgate, *dup) } else { (T::ZERO, T::ZERO) };
                let dyw = dy * w;
                *dgate = old_gate + dyw * up * slope;
                *dup = old_up + dyw * value;
                *sum += dy * value * up;
            }
        }
        total(sums)
    }

    fn cost(&self) -> Cost {
        let n = (self.rows * self.cols) as f64;
        Cost::new(14.0 * n, if self.acc { 7.0 } else { 5.0 } * n)
    }
}

crate::kernels! {
    SwiGlu => "swiglu";
    SwiGluBackward => "swiglu_backward";
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::activation::tests::{COLS, LD, ROWS, check};
    use crate::cpu::check::Call;

    #[test]
    fn swiglu_gradients() {
        let (rows, cols) = (ROWS, COLS);
        check(
            2 * cols,
            |row_weight| Box::new(SwiGlu { rows, cols, ld_x: LD, ld_y: LD, row_weight }),
            |row_weight, acc| {
                Box::new(SwiGluBackward {
                    rows,
                    cols,
                    ld_dy: LD,
                    ld_x: LD,
                    ld_dx: LD,
                    row_weight,
                    acc,
                    acc_weight: acc,
                })
            },
        );
    }

    #[test]
    fn swiglu_known_value() {
        let kernel = SwiGlu { rows: 1, cols: 1, ld_x: 2, ld_y: 1, row_weight: true };
        let mut call = Call { ins: vec![vec![2.0, 3.0], vec![0.5]], outs: vec![vec![0.0]], ..Default::default() };
        call.run(&kernel);
        assert!((call.outs[0][0] - 1.761_594_155_955_764_7 * 1.5).abs() < 1e-14);
    }
}
