//! Activations, optionally times a weight per row (a router's weight of an expert's token); the gated one is in `swiglu`.
//!
//! y[t, c] = act(x[t, c]) w[t]. Backward recomputes from x; nothing is saved. Loops are `for` loops: the closure of a
//! `for_each` with so much inside is not inlined, and then not vectorised.
//!
//! Kinds: squared ReLU (So et al. 2021, "Primer"), GELU in its tanh form (Hendrycks and Gimpel 2016), SiLU, ReLU, leaky
//! ReLU. At zero ReLU's derivative is 0 and leaky ReLU's is the slope.

use super::elementwise::strided_rows;
use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;

/// Activation function.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ActivationKind {
    /// max(x, 0)^2
    Relu2,
    /// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
    GeluTanh,
    /// x sigmoid(x)
    Silu,
    Relu,
    /// x for x > 0, slope * x else
    LeakyRelu(f64),
}

/// A function and its derivative; zero-sized so that loops over it are compiled per function.
pub(super) trait Function<T>: Sync {
    fn value(&self, x: T) -> T;
    /// (value, derivative)
    fn both(&self, x: T) -> (T, T);
}

struct Relu2;
struct GeluTanh;
pub(super) struct Silu;
struct Leaky<T>(T);

#[inline(always)]
fn positive<T: Real>(x: T) -> T {
    if x < T::ZERO { T::ZERO } else { x }
}

impl<T: Real> Function<T> for Relu2 {
    #[inline(always)]
    fn value(&self, x: T) -> T {
        let x = positive(x);
        x * x
    }
    #[inline(always)]
    fn both(&self, x: T) -> (T, T) {
        let x = positive(x);
        (x * x, x + x)
    }
}

impl<T: Real> Function<T> for GeluTanh {
    #[inline(always)]
    fn value(&self, x: T) -> T {
        self.both(x).0
    }
    #[inline(always)]
    fn both(&self, x: T) -> (T, T) {
        let (a, b) = (T::of(0.797_884_560_802_865_4), T::of(0.044_715));
        let half = T::of(0.5);
        let square = x * x;
        let t = (a * (x + b * square * x)).vtanh();
        let inner = a * (T::ONE + T::of(3.0) * b * square);
        (half * x * (T::ONE + t), half * (T::ONE + t) + half * x * (T::ONE - t * t) * inner)
    }
}

impl<T: Real> Function<T> for Silu {
    #[inline(always)]
    fn value(&self, x: T) -> T {
        x * x.vsigmoid()
    }
    #[inline(always)]
    fn both(&self, x: T) -> (T, T) {
        let s = x.vsigmoid();
        (x * s, s * (T::ONE + x * (T::ONE - s)))
    }
}

impl<T: Real> Function<T> for Leaky<T> {
    #[inline(always)]
    fn value(&self, x: T) -> T {
        self.both(x).0
    }
    #[inline(always)]
    fn both(&self, x: T) -> (T, T) {
        let slope = if x > T::ZERO { T::ONE } else { self.0 };
        (x * slope, slope)
    }
}

/// Calls `$run` with the function of `$kind`.
macro_rules! dispatch {
    ($kind:expr, |$f:ident| $run:expr) => {
        match $kind {
            ActivationKind::Relu2 => {
                let $f = Relu2;
                $run
            }
            ActivationKind::GeluTanh => {
                let $f = GeluTanh;
                $run
            }
            ActivationKind::Silu => {
                let $f = Silu;
                $run
            }
            ActivationKind::Relu => {
                let $f = Leaky(T::ZERO);
                $run
            }
            ActivationKind::LeakyRelu(slope) => {
                let $f = Leaky(T::of(slope));
                $run
            }
        }
    };
}

/// y = act(x) w.
///
/// ins: x [T, C], then w [T] when `row_weight`; outs: y [T, C].
#[derive(Clone, Debug)]
pub struct Activation {
    pub kind: ActivationKind,
    pub rows: usize,
    pub cols: usize,
    pub ld_x: usize,
    pub ld_y: usize,
    pub row_weight: bool,
}

impl Activation {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        dispatch!(self.kind, |f| self.apply(args, f))
    }

    fn apply<T: Real>(&self, args: Args<'_, T>, f: impl Function<T>) {
        let x = args.ins[0];
        let weight = self.row_weight.then(|| args.ins[1]);
        strided_rows(
            args.outs[0],
            self.rows,
            self.cols,
            self.ld_y,
            #[inline(always)]
            |t, y| {
                let x = &x[t * self.ld_x..][..self.cols];
                match weight {
                    None => {
                        for (y, &x) in y.iter_mut().zip(x) {
                            *y = f.value(x);
                        }
                    }
                    Some(weight) => {
                        let w = weight[t];
                        for (y, &x) in y.iter_mut().zip(x) {
                            *y = f.value(x) * w;
                        }
                    }
                }
            },
        );
    }

    fn cost(&self) -> Cost {
        let n = (self.rows * self.cols) as f64;
        Cost::new(8.0 * n, 2.0 * n)
    }
}

/// dx = dy w act'(x), added to dx when `acc`; dw[t] = sum_c dy act(x), added to dw when `acc_weight`.
///
/// ins: dy [T, C], x [T, C], then w [T] when `row_weight`; outs: dx [T, C], then dw [T] when `row_weight`.
#[derive(Clone, Debug)]
pub struct ActivationBackward {
    pub kind: ActivationKind,
    pub rows: usize,
    pub cols: usize,
    pub ld_dy: usize,
    pub ld_x: usize,
    pub ld_dx: usize,
    pub row_weight: bool,
    pub acc: bool,
    pub acc_weight: bool,
}

impl ActivationBackward {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        dispatch!(self.kind, |f| self.apply(args, f))
    }

    fn apply<T: Real>(&self, args: Args<'_, T>, f: impl Function<T>) {
        let (dy, x, cols) = (args.ins[0], args.ins[1], self.cols);
        let row = Rows { rows: self.rows, cols, ld: self.ld_dx, acc: self.acc_weight };
        if self.row_weight {
            let [dx, dw] = args.outs else { panic!("activation_backward takes 2 outputs") };
            let weight = args.ins[2];
            row.with_weight(
                dx,
                dw,
                #[inline(always)]
                |t, dx| {
                    let (dy, x, w) = (&dy[t * self.ld_dy..][..cols], &x[t * self.ld_x..][..cols], weight[t]);
                    let mut sums = [T::ZERO; LANES];
                    for ((dx, dy), x) in dx.chunks_mut(LANES).zip(dy.chunks(LANES)).zip(x.chunks(LANES)) {
                        for (((dx, sum), &dy), &x) in dx.iter_mut().zip(&mut sums).zip(dy).zip(x) {
                            let (value, slope) = f.both(x);
                            let old = if self.acc { *dx } else { T::ZERO };
                            *dx = old + dy * w * slope;
                            *sum += dy * value;
                        }
                    }
                    total(sums)
                },
            );
        } else {
            strided_rows(
                args.outs[0],
                self.rows,
                cols,
                self.ld_dx,
                #[inline(always)]
                |t, dx| {
                    let (dy, x) = (&dy[t * self.ld_dy..][..cols], &x[t * self.ld_x..][..cols]);
                    for ((dx, &dy), &x) in dx.iter_mut().zip(dy).zip(x) {
                        let old = if self.acc { *dx } else { T::ZERO };
                        *dx = old + dy * f.both(x).1;
                    }
                },
            );
        }
    }

    fn cost(&self) -> Cost {
        let n = (self.rows * self.cols) as f64;
        Cost::new(10.0 * n, if self.acc { 4.0 } else { 3.0 } * n)
    }
}

pub(super) const LANES: usize = 32;

/// Sum of the lanes as a tree.
#[inline(always)]
pub(super) fn total<T: Real>(lanes: [T; LANES]) -> T {
    super::lanes::sum1(&lanes, |x| x)
}

/// Rows of dx together with their element of dw.
pub(super) struct Rows {
    pub rows: usize,
    pub cols: usize,
    pub ld: usize,
    /// Whether dw is added to.
    pub acc: bool,
}

impl Rows {
    /// Calls `f(row, dx row)` and stores what it returns in dw.
    #[inline(always)]
    pub fn with_weight<T: Real>(&self, dx: &mut [T], dw: &mut [T], f: impl Fn(usize, &mut [T]) -> T + Sync) {
        if self.rows == 0 || self.cols == 0 {
            if !self.acc {
                dw[..self.rows].fill(T::ZERO);
            }
            return;
        }
        let dx = &mut dx[..(self.rows - 1) * self.ld + self.cols];
        let block = par::block_rows(self.rows, self.cols);
        par::rows_pair_mut((dx, self.ld), (&mut dw[..self.rows], block), block, |first, dx, dw| {
            par::simd!(|| {
                for (i, (dx, dw)) in dx.chunks_mut(self.ld).zip(dw).enumerate() {
                    let sum = f(first + i, &mut dx[..self.cols]);
                    *dw = if self.acc { *dw + sum } else { sum };
                }
            });
        });
    }
}

crate::kernels! {
    Activation => "activation";
    ActivationBackward => "activation_backward";
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::cpu::check::{Call, finite_differences, normal, relative_l2};
    use rstest::rstest;

    pub const ROWS: usize = 3;
    pub const COLS: usize = 37;
    pub const LD: usize = 80;

    fn used(cols: usize) -> impl Fn(&usize) -> bool {
        move |i| i % LD < cols
    }

    #[rstest]
    #[case(ActivationKind::Relu2, 2.0, 4.0, -1.0, 0.0)]
    #[case(ActivationKind::GeluTanh, 1.0, 0.841_191_990_608_276_8, -2.0, -0.045_402_305_912_225_92)]
    #[case(ActivationKind::Silu, 2.0, 1.761_594_155_955_764_7, -1.0, -0.268_941_421_369_995_1)]
    #[case(ActivationKind::Relu, 2.0, 2.0, -1.0, 0.0)]
    #[case(ActivationKind::LeakyRelu(0.25), 2.0, 2.0, -4.0, -1.0)]
    fn known_values(
        #[case] kind: ActivationKind,
        #[case] a: f64,
        #[case] at_a: f64,
        #[case] b: f64,
        #[case] at_b: f64,
    ) {
        let kernel = Activation { kind, rows: 1, cols: 2, ld_x: 2, ld_y: 2, row_weight: false };
        let mut call = Call { ins: vec![vec![a, b]], outs: vec![vec![0.0; 2]], ..Default::default() };
        call.run(&kernel);
        assert!((call.outs[0][0] - at_a).abs() < 1e-14 && (call.outs[0][1] - at_b).abs() < 1e-14, "{:?}", call.outs);
    }

    /// Gradients of a forward and backward pair; `forward` and `backward` get (row_weight, acc).
    pub fn check(
        x_cols: usize,
        forward: impl Fn(bool) -> Box<dyn crate::Kernel>,
        backward: impl Fn(bool, bool) -> Box<dyn crate::Kernel>,
    ) {
        let (x, w, g) = (normal(1, ROWS * LD), normal(2, ROWS), normal(3, ROWS * LD));
        for weighted in [false, true] {
            let run = |x: &[f64], w: &[f64]| {
                let mut call =
                    Call { ins: vec![x.into(), w.into()], outs: vec![vec![5.0; ROWS * LD]], ..Default::default() };
                let single = call.run_f32(&*forward(weighted));
                call.run(&*forward(weighted));
                assert!(relative_l2(&single[0], &call.outs[0]) < 1e-6);
                assert!((0..ROWS * LD).all(|i| used(COLS)(&i) || call.outs[0][i] == 5.0), "columns of others stay");
                (0..ROWS * LD).filter(used(COLS)).map(|i| call.outs[0][i] * g[i]).sum::<f64>()
            };
            let back = Call {
                ins: vec![g.clone(), x.clone(), w.clone()],
                outs: vec![vec![0.0; ROWS * LD], vec![0.0; ROWS]],
                ..Default::default()
            };
            let mut once = back.clone();
            once.run(&*backward(weighted, false));
            finite_differences("dx", &x, &once.outs[0], 1e-7, |x| run(x, &w));
            if weighted {
                finite_differences("dw", &w, &once.outs[1], 1e-7, |w| run(&x, w));
            }
            let single = back.run_f32(&*backward(weighted, false));
            assert!(relative_l2(&single[0], &once.outs[0]) < 1e-6);
            assert!(relative_l2(&single[1], &once.outs[1]) < 1e-5);
            let mut twice = once.clone();
            twice.run(&*backward(weighted, true));
            for (i, (twice, once)) in twice.outs.iter().flatten().zip(once.outs.iter().flatten()).enumerate() {
                let used = i >= ROWS * LD || used(x_cols)(&i);
                assert!((twice - if used { 2.0 * once } else { *once }).abs() < 1e-12);
            }
        }
    }

    #[rstest]
    fn gradients(
        #[values(
            ActivationKind::Relu2,
            ActivationKind::GeluTanh,
            ActivationKind::Silu,
            ActivationKind::Relu,
            ActivationKind::LeakyRelu(0.1)
        )]
        kind: ActivationKind,
    ) {
        let (rows, cols) = (ROWS, COLS);
        check(
            cols,
            |row_weight| Box::new(Activation { kind, rows, cols, ld_x: LD, ld_y: LD, row_weight }),
            |row_weight, acc| {
                Box::new(ActivationBackward {
                    kind,
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
    fn no_rows() {
        let kernel = ActivationBackward {
            kind: ActivationKind::Silu,
            rows: 0,
            cols: 4,
            ld_dy: 4,
            ld_x: 4,
            ld_dx: 4,
            row_weight: true,
            acc: false,
            acc_weight: false,
        };
        Call { ins: vec![vec![]; 3], outs: vec![vec![]; 2], ..Default::default() }.run(&kernel);
    }
}
