//! Masks of units multiplied onto the segments of an activation row, and their gradients.
//!
//! A row is made of segments ([x | B | C], [q | k | v]); each is `units` units of `unit_len` columns and has its own mask
//! or none. The masks come from `mask`, or from anywhere else.

use crate::cpu::elementwise::strided_rows;
use crate::cpu::lanes;
use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;

/// Columns start..start + units * unit_len of a row; unit u covers `unit_len` of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskSegment {
    pub start: usize,
    pub units: usize,
    pub unit_len: usize,
    /// Which mask multiplies it; none copies.
    pub mask: Option<usize>,
}

impl MaskSegment {
    fn len(&self) -> usize {
        self.units * self.unit_len
    }
}

fn row_len(segments: &[MaskSegment]) -> usize {
    segments.iter().map(|s| s.start + s.len()).max().unwrap_or(0)
}

/// Writes the factor of every column of the segments.
fn expand<T: Real>(segments: &[MaskSegment], masks: &[&[T]], factors: &mut [T]) {
    for segment in segments {
        let factors = &mut factors[segment.start..segment.start + segment.len()];
        match segment.mask {
            None => factors.fill(T::ONE),
            Some(mask) => {
                for (factors, &m) in factors.chunks_mut(segment.unit_len.max(1)).zip(masks[mask]) {
                    factors.fill(m);
                }
            }
        }
    }
}

/// y[t, segment] = x[t, segment] * mask[unit]; columns outside the segments stay.
///
/// ins: x [T, C] (absent when `in_place`: y is multiplied where it lies), then the masks [units each];
/// outs: y [T, C].
#[derive(Clone, Debug)]
pub struct MaskMul {
    pub tokens: usize,
    pub segments: Vec<MaskSegment>,
    pub ld_x: usize,
    pub ld_y: usize,
    pub in_place: bool,
}

impl MaskMul {
    fn workspace(&self) -> usize {
        row_len(&self.segments)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let cols = row_len(&self.segments);
        let factors = &mut args.work[..cols];
        let masks = if self.in_place { args.ins } else { &args.ins[1..] };
        expand(&self.segments, masks, factors);
        let factors = &*factors;
        let x = if self.in_place { &[][..] } else { args.ins[0] };
        strided_rows(
            args.outs[0],
            self.tokens,
            cols,
            self.ld_y,
            #[inline(always)]
            |t, y| {
                for segment in &self.segments {
                    let range = segment.start..segment.start + segment.len();
                    let (y, m) = (&mut y[range.clone()], &factors[range.clone()]);
                    if !self.in_place {
                        let x = &x[t * self.ld_x..][range];
                        y.iter_mut().zip(x).zip(m).for_each(|((y, &x), &m)| *y = x * m);
                    } else if segment.mask.is_some() {
                        y.iter_mut().zip(m).for_each(|(y, &m)| *y *= m);
                    }
                }
            },
        );
    }

    fn cost(&self) -> Cost {
        let n = (self.tokens * self.segments.iter().map(MaskSegment::len).sum::<usize>()) as f64;
        Cost::new(n, 2.0 * n)
    }
}

/// dx = dy * mask[unit] (added to dx when `acc`), and dm[unit] += sum over t and the unit's columns of dy * x.
///
/// ins: dy [T, C] (absent when `in_place`: it lies in dx and is multiplied there), x [T, C] when any `wanted`, then the
/// masks; outs: dx [T, C], then dm [units] of each wanted mask in order. x is the forward kernel's input.
#[derive(Clone, Debug)]
pub struct MaskMulBackward {
    pub tokens: usize,
    pub segments: Vec<MaskSegment>,
    pub ld_dy: usize,
    pub ld_x: usize,
    pub ld_dx: usize,
    /// For each mask, whether its gradient is wanted.
    pub wanted: Vec<bool>,
    /// Ignored when `in_place`.
    pub acc: bool,
    pub in_place: bool,
}

impl MaskMulBackward {
    /// One row of factors, and per block of rows one row of sums.
    fn workspace(&self) -> usize {
        let sums = if self.any_wanted() { par::reduce_parts(self.tokens) } else { 0 };
        (1 + sums) * row_len(&self.segments)
    }

    fn any_wanted(&self) -> bool {
        self.wanted.contains(&true)
    }

    fn wants(&self, segment: &MaskSegment) -> bool {
        segment.mask.is_some_and(|mask| self.wanted[mask])
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let cols = row_len(&self.segments);
        let (dy, ins) = if self.in_place { (&[][..], args.ins) } else { (args.ins[0], &args.ins[1..]) };
        let (x, masks) = if self.any_wanted() { (ins[0], &ins[1..]) } else { (&[][..], ins) };
        let (factors, sums) = args.work[..self.workspace()].split_at_mut(cols);
        expand(&self.segments, masks, factors);
        let factors = &*factors;
        if self.tokens == 0 || cols == 0 {
            return;
        }
        let [dx, dm @ ..] = args.outs else { panic!("mask_mul_backward takes outputs") };
        let dx = &mut dx[..(self.tokens - 1) * self.ld_dx + cols];
        let dy_row = |t: usize| if self.in_place { dy } else { &dy[t * self.ld_dy..][..cols] };
        if !self.any_wanted() {
            strided_rows(
                dx,
                self.tokens,
                cols,
                self.ld_dx,
                #[inline(always)]
                |t, dx| self.row(dx, dy_row(t), factors),
            );
            return;
        }
        let block = par::reduce_rows(self.tokens);
        par::rows_pair_mut((dx, self.ld_dx), (&mut *sums, cols), block, |first, dx, sums| {
            par::simd!(|| {
                sums.fill(T::ZERO);
                for (i, dx) in dx.chunks_mut(self.ld_dx).enumerate() {
                    let t = first + i;
                    let (dx, dy, x) = (&mut dx[..cols], dy_row(t), &x[t * self.ld_x..][..cols]);
                    for segment in self.segments.iter().filter(|s| self.wants(s)) {
                        let range = segment.start..segment.start + segment.len();
                        let dy = if self.in_place { &dx[range.clone()] } else { &dy[range.clone()] };
                        let products = dy.iter().zip(&x[range.clone()]);
                        sums[range].iter_mut().zip(products).for_each(|(sum, (&dy, &x))| *sum += dy * x);
                    }
                    self.row(dx, dy, factors);
                }
            });
        });
        let (total, parts) = sums.split_at_mut(cols);
        for part in parts.chunks(cols) {
            total.iter_mut().zip(part).for_each(|(total, &part)| *total += part);
        }
        for segment in self.segments.iter().filter(|s| self.wants(s)) {
            let mask = segment.mask.unwrap_or(0);
            let dm = &mut dm[self.wanted[..mask].iter().filter(|&&wanted| wanted).count()];
            let total = &total[segment.start..segment.start + segment.len()];
            for (dm, total) in dm.iter_mut().zip(total.chunks(segment.unit_len.max(1))) {
                *dm += lanes::sum1(total, |x| x);
            }
        }
    }

    /// dx of one row.
    #[inline(always)]
    fn row<T: Real>(&self, dx: &mut [T], dy: &[T], factors: &[T]) {
        for segment in &self.segments {
            let range = segment.start..segment.start + segment.len();
            let (dx, m) = (&mut dx[range.clone()], &factors[range.clone()]);
            if self.in_place {
                if segment.mask.is_some() {
                    dx.iter_mut().zip(m).for_each(|(dx, &m)| *dx *= m);
                }
                continue;
            }
            let products = dy[range].iter().zip(m);
            if self.acc {
                dx.iter_mut().zip(products).for_each(|(dx, (&dy, &m))| *dx += dy * m);
            } else {
                dx.iter_mut().zip(products).for_each(|(dx, (&dy, &m))| *dx = dy * m);
            }
        }
    }

    fn cost(&self) -> Cost {
        let n = (self.tokens * self.segments.iter().map(MaskSegment::len).sum::<usize>()) as f64;
        if self.any_wanted() { Cost::new(3.0 * n, 3.0 * n) } else { Cost::new(n, 2.0 * n) }
    }
}

crate::kernels! {
    MaskMul => "mask_mul", workspace;
    MaskMulBackward => "mask_mul_backward", workspace;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, finite_differences, normal, relative_l2};

    const TOKENS: usize = 35;
    const LD: usize = 12;

    /// [3 units of 2 | copied 2 | 2 units of 1], masks 1, none, 0; column 8 onwards of other operands.
    fn segments() -> Vec<MaskSegment> {
        vec![
            MaskSegment { start: 0, units: 3, unit_len: 2, mask: Some(1) },
            MaskSegment { start: 6, units: 2, unit_len: 1, mask: None },
            MaskSegment { start: 8, units: 2, unit_len: 1, mask: Some(0) },
        ]
    }

    /// Factor of column c, if it belongs to a segment.
    fn factor(c: usize, m: &[Vec<f64>]) -> Option<f64> {
        match c {
            0..6 => Some(m[1][c / 2]),
            6..8 => Some(1.0),
            8..10 => Some(m[0][c - 8]),
            _ => None,
        }
    }

    #[test]
    fn multiplies_units() {
        let (x, m) = (normal(1, TOKENS * LD), [normal(2, 2), normal(3, 3)]);
        for in_place in [false, true] {
            let kernel = MaskMul { tokens: TOKENS, segments: segments(), ld_x: LD, ld_y: LD, in_place };
            let mut call = Call { outs: vec![x.clone()], ..Default::default() };
            if !in_place {
                call.ins.push(x.clone());
                call.outs[0].fill(9.0);
            }
            call.ins.extend(m.clone());
            let old = call.outs[0].clone();
            let single = call.run_f32(&kernel);
            call.run(&kernel);
            for (i, &y) in call.outs[0].iter().enumerate() {
                let want = factor(i % LD, &m).map_or(old[i], |m| x[i] * m);
                assert!((y - want).abs() < 1e-14);
            }
            assert!(relative_l2(&single[0], &call.outs[0]) < 1e-6);
        }
    }

    #[test]
    fn gradients() {
        let (x, g, m) = (normal(1, TOKENS * LD), normal(4, TOKENS * LD), [normal(2, 2), normal(3, 3)]);
        let forward = MaskMul { tokens: TOKENS, segments: segments(), ld_x: LD, ld_y: LD, in_place: false };
        let loss = |x: &[f64], m0: &[f64], m1: &[f64]| {
            let mut call = Call {
                ins: vec![x.into(), m0.into(), m1.into()],
                outs: vec![vec![0.0; TOKENS * LD]],
                ..Default::default()
            };
            call.run(&forward);
            call.outs[0].iter().zip(&g).map(|(y, g)| y * g).sum::<f64>()
        };
        for wanted in [[false, false], [true, false], [false, true], [true, true]] {
            for in_place in [false, true] {
                let any = wanted.contains(&true);
                let kernel = MaskMulBackward {
                    tokens: TOKENS,
                    segments: segments(),
                    ld_dy: LD,
                    ld_x: LD,
                    ld_dx: LD,
                    wanted: wanted.to_vec(),
                    acc: false,
                    in_place,
                };
                let mut back = Call::default();
                back.ins.extend((!in_place).then(|| g.clone()));
                back.ins.extend(any.then(|| x.clone()));
                back.ins.extend(m.clone());
                back.outs.push(if in_place { g.clone() } else { vec![0.0; TOKENS * LD] });
                back.outs.extend(wanted.iter().zip(&m).filter(|w| *w.0).map(|w| vec![0.0; w.1.len()]));
                let single = back.run_f32(&kernel);
                let fresh = back.clone();
                back.run(&kernel);
                if in_place {
                    for (i, dx) in back.outs[0].iter().enumerate() {
                        assert!((dx - factor(i % LD, &m).unwrap_or(1.0) * g[i]).abs() < 1e-14);
                    }
                } else {
                    finite_differences("dx", &x, &back.outs[0], 1e-7, |x| loss(x, &m[0], &m[1]));
                }
                let mut at = 1;
                if wanted[0] {
                    finite_differences("dm0", &m[0], &back.outs[at], 1e-7, |m0| loss(&x, m0, &m[1]));
                    at += 1;
                }
                if wanted[1] {
                    finite_differences("dm1", &m[1], &back.outs[at], 1e-7, |m1| loss(&x, &m[0], m1));
                }
                for (single, double) in single.iter().zip(&back.outs) {
                    assert!(relative_l2(single, double) < 1e-5);
                }
                if !in_place {
                    let mut twice = fresh;
                    twice.outs = back.outs.clone();
                    twice.run(&MaskMulBackward { acc: true, ..kernel });
                    for (twice, once) in twice.outs.iter().flatten().zip(back.outs.iter().flatten()) {
                        assert!((twice - 2.0 * once).abs() < 1e-12);
                    }
                }
            }
        }
    }

    #[test]
    fn no_tokens() {
        let kernel = MaskMulBackward {
            tokens: 0,
            segments: segments(),
            ld_dy: LD,
            ld_x: LD,
            ld_dx: LD,
            wanted: vec![true, true],
            acc: false,
            in_place: false,
        };
        let mut back = Call {
            ins: vec![vec![], vec![], normal(2, 2), normal(3, 3)],
            outs: vec![vec![], vec![1.0; 2], vec![1.0; 3]],
            ..Default::default()
        };
        back.run(&kernel);
        assert!(back.outs[1] == [1.0; 2] && back.outs[2] == [1.0; 3]);
    }
}
