//! Axis states at work: masks over units, ratios for norms, and what happens at a role.
//!
//! Placement: a mask keeps its operand's placement (it is linear); over a spread axis each rank holds its units' factors.
//! Gradients of mixture weights are partial sums wherever rows or units are spread, and are completed when asked for.

use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::dims::{AxisKey, Dim, Segment};
use crate::program::graph::ValueId;
use crate::program::recorder::Recorder;
use crate::program::states::{Place, StateKey, input_name};
use gantry_kernels::cpu::elementwise::{Dot, Scale};
use gantry_kernels::cpu::mask::{Axis, AxisMask, AxisMaskBackward, MaskKind};
use gantry_kernels::cpu::mask_mul::{MaskMul, MaskMulBackward, MaskSegment};
use gantry_plugin_api::ops::Role;

/// Values that a masked axis gives to operators.
#[derive(Clone, Copy, Debug)]
pub struct Mask {
    /// [local units]: factor of each unit.
    pub m: ValueId,
    /// One element: ratio for a norm's eps.
    pub e: ValueId,
    /// One element: scale of a norm's output.
    pub s: ValueId,
}

/// Roles at which exact masking masks: wherever an axis is produced by something that does not keep zeros.
const EXACT: [Role; 9] = [
    Role::Embedding,
    Role::InProjection,
    Role::Convolution,
    Role::MixerCore,
    Role::MixerOutput,
    Role::ExpertHidden,
    Role::SharedExpertHidden,
    Role::FfnHidden,
    Role::ExpertOutput,
];

/// Whether the elastifier has `axis` masked at `role`.
fn masks(cx: &Recorder<'_>, role: Role, axis: AxisKey) -> bool {
    match cx.cx.roles {
        None => EXACT.contains(&role),
        Some(table) => {
            let name = &cx.cx.table.axes[axis.axis as usize].name;
            table.iter().any(|row| row.role == role && row.axes.contains(name))
        }
    }
}

/// The state of a segment's axis if it is computed at full width under a mask.
fn masked<'a>(cx: &'a Recorder<'_>, seg: &Segment) -> Option<(AxisKey, &'a StateKey)> {
    let axis = seg.axis?;
    match cx.cx.states.get(axis)? {
        StateKey::Slice { .. } => None,
        state => Some((axis, state)),
    }
}

/// The mask of an axis for a segment's share of units.
pub fn mask(cx: &mut Recorder<'_>, axis: AxisKey, seg: &Segment) -> Result<Option<Mask>> {
    let Some((_, state)) = masked(cx, seg) else { return Ok(None) };
    let state = state.clone();
    if let Some(&mask) = cx.masks.get(&(axis, seg.parts)) {
        return Ok(Some(mask));
    }
    let (kind, choices) = match state {
        StateKey::Soft { choices } => (MaskKind::Soft, choices),
        StateKey::Hard { n, gain: false } => (MaskKind::Hard, vec![n]),
        StateKey::Hard { n, gain: true } => (MaskKind::HardGain, vec![n]),
        StateKey::Slice { .. } => return Ok(None),
    };
    let p = match kind {
        MaskKind::Hard => None,
        _ => Some(state_input(cx, &Place::Axis(axis), choices.len())?),
    };
    let kernel =
        Axis { kind, choices, size: seg.full_units, units: seg.local_units(), part: seg.part, parts: seg.parts };
    let grad = p.is_some_and(|p| cx.value(p).needs_grad);
    let units = Dim::of("units", [Segment { unit: 1, ..seg.clone() }]);
    let m = cx.fresh("mask", [units], false, grad);
    let e = cx.fresh("mask.e", [Dim::plain("one", 1)], false, false);
    let s = cx.fresh("mask.s", [Dim::plain("one", 1)], false, grad);
    let ins: Vec<ValueId> = p.into_iter().collect();
    cx.g.emit(AxisMask(kernel.clone()), &ins, &[m, e, s], &[], &[]);
    if let Some(p) = p {
        cx.node(MaskGrad { p, m, s, axis: kernel }, &[m, s]);
    }
    let mask = Mask { m, e, s };
    cx.masks.insert((axis, seg.parts), mask);
    Ok(Some(mask))
}

/// The numbers of a state, filled in by the host before each replay.
fn state_input(cx: &mut Recorder<'_>, place: &Place, len: usize) -> Result<ValueId> {
    let id = cx.real_input(&input_name(place), len)?;
    cx.g.values[id.0 as usize].needs_grad = cx.cx.training && cx.cx.state_grads;
    Ok(id)
}

struct MaskGrad {
    p: ValueId,
    m: ValueId,
    s: ValueId,
    axis: Axis,
}

impl Backward for MaskGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let spread = self.axis.parts > 1;
        // The mask's units may be spread while the scale is whole, so each gets its own step.
        if let Some(dm) = bw.dy(self.m) {
            let dp = bw.dx_adding_or_scratch(self.p, spread);
            bw.emit(AxisMaskBackward { axis: self.axis.clone(), mask: true, scale: false }, &[dm], &[dp], &[], &[]);
        }
        if let Some(ds) = bw.dy(self.s) {
            let dp = bw.dx_adding_or_scratch(self.p, false);
            bw.emit(AxisMaskBackward { axis: self.axis.clone(), mask: false, scale: true }, &[ds], &[dp], &[], &[]);
        }
        Ok(())
    }
}

/// For a norm over `channels`: the ratio and scale of its masked axis, if it has one.
pub fn norm_mask(cx: &mut Recorder<'_>, channels: &Dim) -> Result<Option<Mask>> {
    match channels.segs.as_slice() {
        [seg] => match seg.axis {
            Some(axis) => mask(cx, axis, seg),
            None => Ok(None),
        },
        segs => match segs.iter().find(|seg| masked(cx, seg).is_some()) {
            None => Ok(None),
            Some(seg) => Err(cx.error(format!("cannot norm over several segments of which {} is masked", seg.name))),
        },
    }
}

/// What a marked point of the forward becomes: masked, scaled by a soft depth, or itself.
pub fn at_role(cx: &mut Recorder<'_>, role: Role, x: ValueId) -> Result<ValueId> {
    let x = mask_segments(cx, x, |cx, axis| masks(cx, role, axis))?;
    match (role, cx.layer()) {
        (Role::MixerOutput, Some(layer)) if matches!(cx.cx.states.depth(layer), Some(StateKey::Soft { .. })) => {
            keep_probability(cx, x, layer)
        }
        _ => Ok(x),
    }
}

/// x times the masks of its last dimension's axes that `wanted` picks.
pub fn mask_segments(
    cx: &mut Recorder<'_>,
    x: ValueId,
    wanted: impl Fn(&Recorder<'_>, AxisKey) -> bool,
) -> Result<ValueId> {
    let v = cx.value(x).clone();
    let mut masks_used: Vec<(AxisKey, ValueId)> = Vec::new();
    let mut segments = Vec::new();
    let mut start = 0;
    for seg in &v.last().segs {
        let mut index = None;
        if let Some(axis) = seg.axis
            && wanted(cx, axis)
            && let Some(mask) = mask(cx, axis, seg)?
        {
            index = Some(masks_used.iter().position(|&(used, _)| used == axis).unwrap_or_else(|| {
                masks_used.push((axis, mask.m));
                masks_used.len() - 1
            }));
        }
        segments.push(MaskSegment { start, units: seg.local_units(), unit_len: seg.unit, mask: index });
        start += seg.local();
    }
    if masks_used.is_empty() {
        return Ok(x);
    }
    let masks: Vec<ValueId> = masks_used.into_iter().map(|(_, m)| m).collect();
    let grads: Vec<ValueId> = masks.iter().copied().chain([x]).collect();
    let needs_grad = cx.needs_grad(&grads);
    let y = cx.fresh("masked", v.dims.clone(), v.seq, needs_grad);
    cx.g.values[y.0 as usize].partial = v.partial;
    let ld_y = cx.value(y).ld;
    let kernel = MaskMul { tokens: v.rows, segments: segments.clone(), ld_x: v.ld, ld_y, in_place: false };
    let ins: Vec<ValueId> = [x].into_iter().chain(masks.iter().copied()).collect();
    cx.g.emit(kernel, &ins, &[y], &[], &[]);
    cx.node(MaskMulGrad { x, masks, y, segments }, &[y]);
    Ok(y)
}

struct MaskMulGrad {
    x: ValueId,
    masks: Vec<ValueId>,
    y: ValueId,
    segments: Vec<MaskSegment>,
}

impl Backward for MaskMulGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let x = bw.value(self.x).clone();
        let wanted: Vec<bool> = self.masks.iter().map(|&m| bw.value(m).needs_grad).collect();
        let spread = x.seq || x.partial;
        let dms: Vec<ValueId> = self
            .masks
            .iter()
            .zip(&wanted)
            .filter(|&(_, &wanted)| wanted)
            .map(|(&m, _)| bw.dx_adding_or_scratch(m, spread))
            .collect();
        let dx = bw.dx_or_scratch(self.x, false);
        let any = wanted.contains(&true);
        let kernel = MaskMulBackward {
            tokens: x.rows,
            segments: self.segments.clone(),
            ld_dy: bw.ld(dy),
            ld_x: x.ld,
            ld_dx: bw.ld(dx.value),
            wanted,
            acc: dx.acc,
            in_place: false,
        };
        let mut ins = vec![dy];
        if any {
            ins.push(self.x);
        }
        ins.extend(&self.masks);
        let outs: Vec<ValueId> = [dx.value].into_iter().chain(dms).collect();
        bw.emit(kernel, &ins, &outs, &[], &[]);
        Ok(())
    }
}

/// x times the probability that its layer is kept.
fn keep_probability(cx: &mut Recorder<'_>, x: ValueId, layer: u16) -> Result<ValueId> {
    let place = Place::Depth(layer);
    let len = match cx.cx.states.depth(layer) {
        Some(StateKey::Soft { choices }) => choices.len(),
        _ => return Ok(x),
    };
    let p = state_input(cx, &place, len)?;
    let v = cx.value(x).clone();
    let needs_grad = cx.needs_grad(&[x, p]);
    let y = cx.fresh("kept", v.dims.clone(), v.seq, needs_grad);
    cx.g.values[y.0 as usize].partial = v.partial;
    let ld_y = cx.value(y).ld;
    cx.g.emit(scalar_scale(&v, v.ld, ld_y, false), &[x, p], &[y], &[], &[]);
    cx.node(KeepGrad { x, p, y }, &[y]);
    Ok(y)
}

/// A scale by the first element of a tensor.
fn scalar_scale(v: &crate::program::graph::Value, ld_x: usize, ld_y: usize, acc: bool) -> Scale {
    Scale { rows: v.rows, cols: v.cols, ld_x, ld_y, factor: 1.0, scalar: true, acc, in_place: false }
}

struct KeepGrad {
    x: ValueId,
    p: ValueId,
    y: ValueId,
}

impl Backward for KeepGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let x = bw.value(self.x).clone();
        if bw.value(self.p).needs_grad {
            let dp = bw.dx_adding_or_scratch(self.p, x.seq || x.partial);
            let kernel = Dot { rows: x.rows, cols: x.cols, ld_a: bw.ld(dy), ld_b: x.ld, factor: 1.0 };
            bw.emit(kernel, &[dy, self.x], &[dp], &[], &[]);
        }
        if let Some(dx) = bw.dx(self.x, false) {
            let kernel = scalar_scale(&x, bw.ld(dy), bw.ld(dx.value), dx.acc);
            bw.emit(kernel, &[dy, self.p], &[dx.value], &[], &[]);
        }
        Ok(())
    }
}
