//! Mamba-2 scan over each sequence: S_t = exp(dt_t a) S_{t-1} + dt_t x_t B_t^T, y_t = S_t C_t + d x_t, with
//! dt = max(softplus(raw dt + dt_bias), dt_min) and a = -exp(a_log) per head.
//!
//! Placement: all rows on every rank; heads and their groups spread alike, so each rank scans its own heads and nothing is
//! a partial sum. Axis states: heads are a prefix of the stored ones, whatever their state; a masked head has x = 0 and so
//! y = 0. The groups keep their full number.

use super::heads::{apart, heads_of, local_groups, settle, vector_param};
use super::{HostOp, Results, Typed, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::dims::{Dim, Segment};
use crate::program::graph::ValueId;
use crate::program::recorder::Recorder;
use gantry_kernels::cpu::ssd::{Ssd, SsdBackward, SsdShape};
use gantry_plugin_api::ops::SsdScan;

pub static OPS: &[&dyn HostOp] = &[&Typed(record as fn(&mut Recorder<'_>, SsdScan, &[ValueId]) -> Result<Results>)];

/// Inputs: xbc [tokens, x | B | C] with x over heads x head_dim and B, C over groups x state; dt [tokens, heads]; a_log,
/// d, dt_bias [heads]. Output [tokens, heads x head_dim].
pub fn record(cx: &mut Recorder<'_>, attrs: SsdScan, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 5..=5)?;
    let (xbc, dt) = (cx.replicated(inputs[0])?, cx.replicated(inputs[1])?);
    let params = [inputs[2], inputs[3], inputs[4]];
    let (v, steps) = (cx.value(xbc).clone(), cx.value(dt).clone());
    let [x, b, c] = v.last().segs.as_slice() else {
        return Err(cx.error(format!("xbc must have the segments x, B and C, not {}", v.text())));
    };
    let heads = heads_of(cx, "dt", steps.last())?;
    if (x.axis, x.units, x.parts) != (heads.axis, heads.units, heads.parts) || heads.unit != 1 {
        return Err(cx.error(format!("x of {} and dt {} must be over the same heads", v.text(), steps.text())));
    }
    if steps.rows != v.rows {
        return Err(cx.error(format!("{} and {} have different tokens", v.text(), steps.text())));
    }
    let groups = local_groups(cx, heads)?;
    let state = state_size(cx, groups * heads.parts, heads, b, c)?;
    for (what, param) in ["a_log", "d", "dt_bias"].into_iter().zip(params) {
        vector_param(cx, what, param, steps.last())?;
    }
    if attrs.chunk == 0 {
        return Err(cx.error("chunk is 0; a chunk has at least one token"));
    }
    if !(attrs.dt_min.is_finite() && attrs.dt_min >= 0.0) {
        return Err(cx.error(format!("dt_min is {}; it must be a number from 0", attrs.dt_min)));
    }

    let cu_seqlens = cx.cu_seqlens()?;
    let shape = SsdShape {
        tokens: v.rows,
        sequences: cx.cx.max_seqs,
        heads: heads.local_units(),
        head_dim: x.unit,
        groups,
        state,
        chunk: usize::try_from(attrs.chunk).unwrap_or(usize::MAX).min(v.rows.max(1)),
        x_off: 0,
        b_off: x.local(),
        c_off: x.local() + b.local(),
        ld_xbc: v.ld,
        ld_dt: steps.ld,
        // Softplus is never below 0.
        dt_limit: (attrs.dt_min > 0.0).then_some((attrs.dt_min, f64::INFINITY)),
    };
    let mut dims: Vec<Dim> = v.dims[..v.dims.len() - 1].to_vec();
    dims.push(Dim::of(&x.name, [x.clone()]));
    let needs_grad = cx.needs_grad(&[xbc, dt, params[0], params[1], params[2]]);
    let y = cx.fresh("ssd_scan", dims, false, needs_grad);
    let states = cx.fresh(
        "ssd_scan.states",
        [Dim::plain("chunks", shape.max_chunks()), Dim::plain("state", shape.state_len())],
        false,
        false,
    );
    let table = cx.fresh_int("ssd_scan.chunks", [Dim::plain("table", shape.table_len())], false);
    let kernel = Ssd { shape: shape.clone(), ld_y: cx.value(y).ld, has_init: false, has_final: false };
    cx.g.emit(kernel, &[xbc, dt, params[0], params[1], params[2]], &[y, states], &[cu_seqlens], &[table]);
    cx.node(SsdGrad { xbc, dt, params, y, states, cu_seqlens, table, shape }, &[y]);
    Ok(one(y))
}

/// Elements of the state per group and channel, from the B and C segments.
fn state_size(cx: &Recorder<'_>, groups: usize, heads: &Segment, b: &Segment, c: &Segment) -> Result<usize> {
    let of = |seg: &Segment| match seg.axis {
        Some(_) => (seg.full_units, seg.units, seg.parts, seg.unit),
        None => (1, 1, seg.parts, seg.size()),
    };
    let (b, c) = (of(b), of(c));
    if b != c || b.0 != groups || b.1 != groups || b.2 != heads.parts {
        return Err(cx.error(format!(
            "B has {} of {} groups of {} and C {} of {} of {}; the heads are in {groups} groups, and all are spread alike",
            b.1, b.0, b.3, c.1, c.0, c.3
        )));
    }
    Ok(b.3)
}

struct SsdGrad {
    xbc: ValueId,
    dt: ValueId,
    /// a_log, d, dt_bias.
    params: [ValueId; 3],
    y: ValueId,
    states: ValueId,
    cu_seqlens: ValueId,
    table: ValueId,
    shape: SsdShape,
}

impl Backward for SsdGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let [a_log, d, dt_bias] = self.params;
        let mut outs = [dy; 3];
        for (out, param) in outs.iter_mut().zip(self.params) {
            *out = bw.param_grad_or_scratch(param, false)?;
        }
        let dxbc = bw.dx_or_scratch(self.xbc, false);
        let target = bw.dx_or_scratch(self.dt, false);
        let ddt = apart(bw, dxbc, target);
        let kernel = SsdBackward {
            shape: self.shape.clone(),
            has_init: false,
            has_dfinal: false,
            has_dinit: false,
            ld_dy: bw.ld(dy),
            ld_dxbc: bw.ld(dxbc.value),
            ld_ddt: bw.ld(ddt.value),
            acc_dxbc: dxbc.acc,
            acc_ddt: ddt.acc,
            acc_dinit: false,
        };
        let ins = [self.xbc, self.dt, a_log, d, dt_bias, self.states, dy];
        let outs = [dxbc.value, ddt.value, outs[0], outs[1], outs[2]];
        bw.emit(kernel, &ins, &outs, &[self.cu_seqlens, self.table], &[]);
        settle(bw, ddt, target);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Grid;
    use crate::program::ops::{causal_conv1d, gated_norm, linear, mask, shape};
    use crate::program::testing::{Input, OpTest, axis, relative_l2};
    use gantry_plugin_api::ops::{GatedNorm, Role};
    use gantry_plugin_api::plan::{Axis, AxisSetting, AxisState, Layout};
    use rstest::rstest;

    const CU_SEQLENS: [i32; 6] = [0, 1, 3, 3, 12, 12];

    fn axes(groups: usize, tp: bool) -> Vec<Axis> {
        let heads = Axis { group: Some("groups".into()), ..axis("heads", 8, tp) };
        vec![heads, Axis { elastic: false, ..axis("groups", groups, tp) }, axis("hidden", 6, false)]
    }

    fn xbc() -> [(&'static str, Layout); 3] {
        [("x", Layout::axis("heads", 2)), ("B", Layout::axis("groups", 3)), ("C", Layout::axis("groups", 3))]
    }

    fn scan(groups: usize, tp: bool, settings: Vec<AxisSetting>, one_tensor: bool) -> OpTest {
        let heads = || vec![Layout::axis("heads", 1)];
        let input = |name, channels| Input { name, rows: 12, channels, spread: !tp };
        let dt = ("dt", Layout::axis("heads", 1));
        let inputs = if one_tensor {
            vec![input("xbcdt", Layout::seq(xbc().into_iter().chain([dt])))]
        } else {
            vec![input("xbc", Layout::seq(xbc())), input("dt", dt.1)]
        };
        OpTest {
            axes: axes(groups, tp),
            params: vec![("a_log", heads()), ("d", heads()), ("dt_bias", heads())],
            inputs,
            ints: vec![("cu_seqlens", CU_SEQLENS.to_vec())],
            tokens: 12,
            settings,
            state_grads: false,
            labels: None,
            forward: Box::new(move |cx, inputs| {
                let p = (0..3).map(|i| cx.param_value(i)).collect::<Result<Vec<_>>>()?;
                let (xbc, dt) = if one_tensor {
                    let parts = shape::split(cx, Default::default(), inputs)?;
                    (shape::concat(cx, Default::default(), &parts[..3])?[0], parts[3])
                } else {
                    (inputs[0], inputs[1])
                };
                Ok(vec![record(cx, SsdScan { chunk: 4, dt_min: 0.3 }, &[xbc, dt, p[0], p[1], p[2]])?[0]])
            }),
        }
    }

    #[rstest]
    fn gradients_and_parity(
        #[values(2, 4)] groups: usize,
        #[values(true, false)] tp: bool,
        #[values(true, false)] one_tensor: bool,
    ) {
        scan(groups, tp, vec![], one_tensor).check();
    }

    fn heads_at(state: AxisState) -> Vec<AxisSetting> {
        vec![AxisSetting { axis: "heads".into(), layer: None, state }]
    }

    #[test]
    fn a_slice_scans_the_first_heads_of_every_group() {
        scan(2, true, heads_at(AxisState::Slice { n: 4 }), false).check();
    }

    #[test]
    fn a_group_is_not_cut() {
        let mut test = scan(1, true, vec![], false);
        test.axes[1].shard = None;
        test.inputs[0].channels = Layout::axis("heads", 2);
        test.forward = Box::new(|cx, inputs| {
            let dim = cx.value(inputs[0]).last().clone();
            let error = local_groups(cx, &dim.segs[0]).unwrap_err().to_string();
            assert!(error.contains("grid.tp must divide the number of groups"), "{error}");
            Ok(vec![inputs[0]])
        });
        test.run(Grid { tp: 2, ..Grid::SINGLE });
    }

    #[test]
    fn tensors_over_other_heads_are_refused() {
        let mut test = scan(2, true, vec![], false);
        test.forward = Box::new(|cx, inputs| {
            let p = (0..3).map(|i| cx.param_value(i)).collect::<Result<Vec<_>>>()?;
            let mut refuse = |attrs: SsdScan, inputs: [ValueId; 2], expected: &str| {
                let error = record(cx, attrs, &[inputs[0], inputs[1], p[0], p[1], p[2]]).unwrap_err().to_string();
                assert!(error.contains(expected), "{error}");
            };
            refuse(SsdScan::default(), [inputs[1], inputs[1]], "segments x, B and C");
            refuse(SsdScan::default(), [inputs[0], inputs[0]], "one segment of heads");
            refuse(SsdScan { chunk: 0, ..SsdScan::default() }, [inputs[0], inputs[1]], "chunk is 0");
            refuse(SsdScan { dt_min: f64::NAN, ..SsdScan::default() }, [inputs[0], inputs[1]], "dt_min is NaN");
            Ok(vec![inputs[0]])
        });
        test.run(Grid::SINGLE);
    }

    /// A whole mixer with every point marked where an elastifier may mask.
    fn mixer(settings: Vec<AxisSetting>, state_grads: bool) -> OpTest {
        let heads = || vec![Layout::axis("heads", 1)];
        let conv = || Layout::seq(xbc());
        let z = ("z", Layout::axis("heads", 2));
        let dt = ("dt", Layout::axis("heads", 1));
        let hidden = || Layout::axis("hidden", 1);
        let in_proj = Layout::seq([z].into_iter().chain(xbc()).chain([dt]));
        OpTest {
            axes: axes(2, true),
            params: vec![
                ("in_proj", vec![in_proj, hidden()]),
                ("conv.weight", vec![conv(), Layout::Fixed(4)]),
                ("conv.bias", vec![conv()]),
                ("a_log", heads()),
                ("d", heads()),
                ("dt_bias", heads()),
                ("norm", vec![Layout::axis("heads", 2)]),
                ("out_proj", vec![hidden(), Layout::axis("heads", 2)]),
            ],
            inputs: vec![Input { name: "h", rows: 12, channels: hidden(), spread: true }],
            ints: vec![("cu_seqlens", CU_SEQLENS.to_vec())],
            tokens: 12,
            settings,
            state_grads,
            labels: None,
            forward: Box::new(|cx, inputs| {
                let p = (0..8).map(|i| cx.param_value(i)).collect::<Result<Vec<_>>>()?;
                let h = linear::record(cx, Default::default(), &[inputs[0], p[0]])?[0];
                let h = mask::at_role(cx, Role::InProjection, h)?;
                let parts = shape::split(cx, Default::default(), &[h])?;
                let xbc = shape::concat(cx, Default::default(), &parts[1..4])?[0];
                let xbc = causal_conv1d::record(cx, Default::default(), &[xbc, p[1], p[2]])?[0];
                let xbc = mask::at_role(cx, Role::Convolution, xbc)?;
                let y = record(cx, SsdScan { chunk: 4, ..SsdScan::default() }, &[xbc, parts[4], p[3], p[4], p[5]])?[0];
                let y = mask::at_role(cx, Role::MixerCore, y)?;
                // e, the ratio of eps, has no gradient: with a small eps finite differences do not see it.
                let norm = GatedNorm { eps: 1e-12, ..Default::default() };
                let y = gated_norm::record(cx, norm, &[y, parts[0], p[6]])?[0];
                let y = mask::at_role(cx, Role::GateNorm, y)?;
                Ok(vec![linear::record(cx, Default::default(), &[y, p[7]])?[0]])
            }),
        }
    }

    #[rstest]
    #[case(vec![], false)]
    #[case(heads_at(AxisState::Slice { n: 4 }), false)]
    #[case(heads_at(AxisState::Hard { n: 4, gain: 0.7 }), true)]
    #[case(heads_at(AxisState::Soft { choices: vec![8, 4, 2], p: vec![0.5, 0.3, 0.2] }), true)]
    fn a_mixer_in_every_state(#[case] settings: Vec<AxisSetting>, #[case] state_grads: bool) {
        mixer(settings, state_grads).check();
    }

    #[test]
    fn a_masked_mixer_is_its_slice() {
        let masked = mixer(heads_at(AxisState::Hard { n: 4, gain: 1.0 }), false).run(Grid::SINGLE);
        let sliced = mixer(heads_at(AxisState::Slice { n: 4 }), false).run(Grid::SINGLE);
        assert_eq!(masked.keys().collect::<Vec<_>>(), sliced.keys().collect::<Vec<_>>());
        for (name, value) in &masked {
            let error = relative_l2(value, &sliced[name]);
            assert!(error < 1e-12, "{name} differs by {error:e}");
        }
    }
}
