//! Masks over the units of an elastic axis (channels, heads, groups, experts): built from choice probabilities, and
//! multiplied onto activations.
//!
//! An axis of size S offers prefix choices; M_c keeps units u < choice_c, and r_c = choice_c / S.
//! - soft: m = sum_c p_c M_c; e = sum_c p_c r_c; s = sum_c p_c sqrt(r_c)
//! - hard: one choice n: m = gain M_n; e = n / S; s = gain sqrt(n / S), where gain (1 unless given) carries the gradient
//!
//! e scales a norm's eps and s its output (see `rms_norm`); e carries no gradient. A rank holds the units
//! u = local * parts + part of a cyclic shard.

use crate::cpu::elementwise::strided_rows;
use crate::cpu::lanes;
use crate::kernel::{Args, Cost};
use crate::par;
use crate::real::Real;

/// How a mask follows from its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskKind {
    /// The input holds one probability per choice.
    Soft,
    /// The single choice, without input.
    Hard,
    /// The single choice times the input, one element.
    HardGain,
}

/// Which units an axis keeps.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    pub kind: MaskKind,
    /// Units kept by each choice; exactly one unless the kind is soft.
    pub choices: Vec<usize>,
    /// S: units of the whole axis.
    pub size: usize,
    /// Units on this rank.
    pub units: usize,
    pub part: usize,
    pub parts: usize,
}

impl Axis {
    fn ratio(&self, choice: usize) -> f64 {
        choice as f64 / self.size as f64
    }

    /// Local units below a choice of the whole axis.
    fn local(&self, choice: usize) -> usize {
        (choice.saturating_sub(self.part)).div_ceil(self.parts).min(self.units)
    }

    /// (choice, its weight) for the probabilities or the gain in `ins`.
    fn weighted<'a, T: Real>(&'a self, ins: &'a [&'a [T]]) -> impl Iterator<Item = (usize, T)> + 'a {
        let weight = move |c: usize| if self.kind == MaskKind::Hard { T::ONE } else { ins[0][c] };
        self.choices.iter().enumerate().map(move |(c, &choice)| (choice, weight(c)))
    }
}

/// Builds m, e and s.
///
/// ins: p [choices] (soft), gain [1] (hard with gain) or none; outs: m [units], e [1], s [1].
#[derive(Clone, Debug)]
pub struct AxisMask(pub Axis);

impl AxisMask {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let [m, e, s] = args.outs else { panic!("axis_mask takes 3 outputs") };
        let axis = &self.0;
        m[..axis.units].fill(T::ZERO);
        (e[0], s[0]) = (T::ZERO, T::ZERO);
        for (choice, p) in axis.weighted(args.ins) {
            m[..axis.local(choice)].iter_mut().for_each(|m| *m += p);
            e[0] += T::of(axis.ratio(choice)) * if axis.kind == MaskKind::Soft { p } else { T::ONE };
            s[0] += T::of(axis.ratio(choice).sqrt()) * p;
        }
    }

    fn cost(&self) -> Cost {
        Cost::new((self.0.units * self.0.choices.len()) as f64, self.0.units as f64)
    }
}

/// dp_c += sum_u dm[u] [u < choice_c] + ds sqrt(r_c); for a hard mask the same is the gradient of its gain.
///
/// ins: dm [units] when `mask`, ds [1] when `scale`; outs: dp [choices] or dgain [1].
#[derive(Clone, Debug)]
pub struct AxisMaskBackward {
    pub axis: Axis,
    /// Whether dm is given.
    pub mask: bool,
    /// Whether ds is given.
    pub scale: bool,
}

impl AxisMaskBackward {
    fn run<T: Real>(&self, args: Args<'_, T>) {
        let dp = &mut *args.outs[0];
        for (dp, &choice) in dp.iter_mut().zip(&self.axis.choices) {
            if self.mask {
                *dp += lanes::sum1(&args.ins[0][..self.axis.local(choice)], |dm| dm);
            }
            if self.scale {
                *dp += args.ins[usize::from(self.mask)][0] * T::of(self.axis.ratio(choice).sqrt());
            }
        }
    }

    fn cost(&self) -> Cost {
        Cost::new((self.axis.units * self.axis.choices.len()) as f64, self.axis.units as f64)
    }
}

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
    AxisMask => "axis_mask";
    AxisMaskBackward => "axis_mask_backward";
    MaskMul => "mask_mul", workspace;
    MaskMulBackward => "mask_mul_backward", workspace;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, finite_differences, normal, relative_l2};

    fn axis(kind: MaskKind, part: usize, parts: usize) -> Axis {
        let choices = if kind == MaskKind::Soft { vec![3, 6, 10] } else { vec![6] };
        Axis { kind, choices, size: 10, units: (10 + parts - 1 - part) / parts, part, parts }
    }

    fn build(axis: &Axis, p: &[f64]) -> Call {
        let ins = if axis.kind == MaskKind::Hard { vec![] } else { vec![p.to_vec()] };
        let outs = vec![vec![9.0; axis.units], vec![9.0], vec![9.0]];
        let mut call = Call { ins, outs, ..Default::default() };
        call.run(&AxisMask(axis.clone()));
        call
    }

    #[test]
    fn masks_of_every_kind_and_shard() {
        let p = [0.2, 0.5, 0.3];
        for parts in [1, 2, 3, 4] {
            for part in 0..parts {
                let unit = |local: usize| local * parts + part;
                let soft = build(&axis(MaskKind::Soft, part, parts), &p);
                for (local, &m) in soft.outs[0].iter().enumerate() {
                    let want = [(3, 0.2), (6, 0.5), (10, 0.3)].iter().filter(|c| unit(local) < c.0).map(|c| c.1);
                    assert!((m - want.sum::<f64>()).abs() < 1e-15);
                }
                assert!((soft.outs[1][0] - (0.2 * 0.3 + 0.5 * 0.6 + 0.3)).abs() < 1e-15);
                let s = 0.2 * 0.3f64.sqrt() + 0.5 * 0.6f64.sqrt() + 0.3;
                assert!((soft.outs[2][0] - s).abs() < 1e-15);
                for (kind, gain) in [(MaskKind::Hard, 1.0), (MaskKind::HardGain, 0.7)] {
                    let hard = build(&axis(kind, part, parts), &[0.7]);
                    for (local, &m) in hard.outs[0].iter().enumerate() {
                        assert_eq!(m, if unit(local) < 6 { gain } else { 0.0 });
                    }
                    assert_eq!(hard.outs[1][0], 0.6);
                    assert!((hard.outs[2][0] - gain * 0.6f64.sqrt()).abs() < 1e-15);
                }
            }
        }
    }

    #[test]
    fn probability_and_gain_gradients() {
        for (kind, p) in [(MaskKind::Soft, vec![0.2, 0.5, 0.3]), (MaskKind::HardGain, vec![0.7])] {
            for (mask, scale) in [(true, true), (true, false), (false, true)] {
                let axis = axis(kind, 1, 2);
                let (dm, ds) = (normal(1, axis.units), 0.4);
                let loss = |p: &[f64]| {
                    let built = build(&axis, p);
                    let along_m: f64 = built.outs[0].iter().zip(&dm).map(|(m, d)| m * d).sum();
                    f64::from(mask) * along_m + f64::from(scale) * built.outs[2][0] * ds
                };
                let mut ins = vec![];
                ins.extend(mask.then(|| dm.clone()));
                ins.extend(scale.then(|| vec![ds]));
                let mut back = Call { ins, outs: vec![vec![0.0; p.len()]], ..Default::default() };
                let kernel = AxisMaskBackward { axis: axis.clone(), mask, scale };
                back.run(&kernel);
                finite_differences("dp", &p, &back.outs[0], 1e-8, loss);
                let once = back.outs[0].clone();
                back.run(&kernel);
                assert!(back.outs[0].iter().zip(&once).all(|(twice, once)| (twice - 2.0 * once).abs() < 1e-12));
            }
        }
    }

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
