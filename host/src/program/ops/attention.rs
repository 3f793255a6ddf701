//! Scaled dot product attention on q, k and v side by side.
//!
//! Placement: tokens are needed whole (rows are gathered); heads may be spread, query heads and key/value heads alike, and
//! with units dealt out cyclically a rank's query heads use its own key/value heads. Axis states: a slice of the heads is
//! a shorter segment and must keep as many query heads in every group.

use super::{HostOp, Results, Typed, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::dims::{Dim, Segment};
use crate::program::graph::{Value, ValueId};
use crate::program::recorder::Recorder;
use gantry_kernels::cpu::attention::{AttentionBackward, AttentionForward, AttentionShape};
use gantry_plugin_api::ops::Attention;

pub static OPS: &[&dyn HostOp] = &[&Typed(record as fn(&mut Recorder<'_>, Attention, &[ValueId]) -> Result<Results>)];

/// The segments q, k and v of a value's last dimension, checked against one another.
pub(super) fn heads<'v>(cx: &Recorder<'_>, v: &'v Value) -> Result<[&'v Segment; 3]> {
    let [q, k, value] = v.last().segs.as_slice() else {
        return Err(cx.error(format!("needs segments q, k and v, got {} of {}", v.last().segs.len(), v.text())));
    };
    if q.unit != k.unit || k.unit != value.unit || k.units != value.units {
        return Err(cx.error(format!(
            "q has {} heads of {} channels, k {} of {}, v {} of {}; heads must be of one size, and k and v equally many",
            q.units, q.unit, k.units, k.unit, value.units, value.unit
        )));
    }
    if k.units == 0 || !q.units.is_multiple_of(k.units) {
        return Err(cx.error(format!(
            "{} query heads do not share {} key/value heads evenly; keep a multiple of them",
            q.units, k.units
        )));
    }
    if q.parts != k.parts || k.parts != value.parts || !k.units.is_multiple_of(k.parts) {
        return Err(cx.error(format!(
            "query heads are spread over {} ranks and {} key/value heads over {}; both must be spread alike and evenly \
             (grid.tp must divide the number of key/value heads)",
            q.parts, k.units, k.parts
        )));
    }
    let group = |seg: &Segment| seg.axis.and_then(|key| cx.cx.table.axes[key.axis as usize].group.clone());
    let name = |seg: &Segment| seg.axis.map(|key| cx.cx.table.axes[key.axis as usize].name.clone());
    if q.units != k.units && k.units > 1 && (group(q).is_none() || group(q) != name(k)) {
        return Err(cx.error(
            "query heads outnumber key/value heads, so the axis of q must name the axis of k as its group".to_string(),
        ));
    }
    Ok([q, k, value])
}

/// Inputs: qkv [tokens, q | k | v]. Output [tokens, q heads].
pub fn record(cx: &mut Recorder<'_>, attrs: Attention, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 1..=1)?;
    let x = cx.replicated(inputs[0])?;
    let v = cx.value(x).clone();
    let [q, k, _] = heads(cx, &v)?;
    if v.rows != cx.cx.tokens {
        return Err(cx.error(format!("{} rows are not the {} tokens that cu_seqlens divides", v.rows, cx.cx.tokens)));
    }
    let (q_heads, kv_heads, head_dim) = (q.local_units(), k.local_units(), q.unit);
    let dims: Vec<Dim> = v.dims[..v.dims.len() - 1].iter().cloned().chain([Dim::of(&q.name, [q.clone()])]).collect();
    let needs_grad = cx.needs_grad(&[x]);
    let y = cx.fresh("attention", dims, false, needs_grad);
    let lse = cx.fresh("lse", [Dim::plain("rows", v.rows), Dim::plain("heads", q_heads)], false, false);
    let shape = AttentionShape {
        tokens: v.rows,
        longest: cx.cx.longest.min(v.rows),
        q_heads,
        kv_heads,
        head_dim,
        q_off: 0,
        k_off: q_heads * head_dim,
        v_off: (q_heads + kv_heads) * head_dim,
        ld: v.ld,
        ld_o: cx.value(y).ld,
        causal: attrs.causal,
        scale: if attrs.scale == 0.0 { 1.0 / (head_dim as f64).sqrt() } else { attrs.scale },
    };
    shape.check().map_err(|e| cx.error(e))?;
    let cu_seqlens = cx.cu_seqlens()?;
    cx.g.emit(AttentionForward { shape }, &[x], &[y, lse], &[cu_seqlens], &[]);
    cx.node(AttentionGrad { x, y, lse, cu_seqlens, shape }, &[y]);
    Ok(one(y))
}

struct AttentionGrad {
    x: ValueId,
    y: ValueId,
    lse: ValueId,
    cu_seqlens: ValueId,
    shape: AttentionShape,
}

impl Backward for AttentionGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let Some(dx) = bw.dx(self.x, false) else { return Ok(()) };
        let kernel = AttentionBackward { shape: self.shape, ld_do: bw.ld(dy), ld_dqkv: bw.ld(dx.value), acc: dx.acc };
        bw.emit(kernel, &[self.x, self.y, self.lse, dy], &[dx.value], &[self.cu_seqlens], &[]);
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::program::ops::{linear, mask, rope};
    use crate::program::testing::{Input, OpTest, axis};
    use gantry_plugin_api::ops::{Role, Rope};
    use gantry_plugin_api::plan::{Axis, AxisSetting, AxisState, Layout};
    use rstest::rstest;

    /// Projection, optional rotation, attention and output projection; 8 query heads of 4 in 2 groups.
    fn block(causal: bool, rotate: Option<Rope>, settings: Vec<AxisSetting>) -> OpTest {
        let heads = Axis { group: Some("kv".into()), ..axis("heads", 8, true) };
        let qkv = || {
            Layout::seq([("q", Layout::axis("heads", 4)), ("k", Layout::axis("kv", 4)), ("v", Layout::axis("kv", 4))])
        };
        OpTest {
            axes: vec![axis("hidden", 6, false), heads, axis("kv", 2, true)],
            params: vec![
                ("qkv", vec![qkv(), Layout::axis("hidden", 1)]),
                ("out", vec![Layout::axis("hidden", 1), Layout::axis("heads", 4)]),
            ],
            inputs: vec![Input { name: "x", rows: 12, channels: Layout::axis("hidden", 1), spread: true }],
            ints: vec![("cu_seqlens", vec![0, 1, 1, 8, 12, 12])],
            tokens: 12,
            settings,
            state_grads: true,
            labels: None,
            forward: Box::new(move |cx, inputs| {
                let (w, out) = (cx.param_value(0)?, cx.param_value(1)?);
                let mut x = linear::record(cx, Default::default(), &[inputs[0], w])?[0];
                if let Some(rotate) = &rotate {
                    x = rope::record(cx, rotate.clone(), &[x])?[0];
                }
                let y = record(cx, Attention { causal, scale: 0.0 }, &[x])?[0];
                let y = mask::at_role(cx, Role::MixerCore, y)?;
                Ok(vec![linear::record(cx, Default::default(), &[y, out])?[0]])
            }),
        }
    }

    pub(in crate::program::ops) fn rotated(rope: Rope) -> OpTest {
        block(true, Some(rope), vec![])
    }

    fn heads(state: AxisState) -> Vec<AxisSetting> {
        vec![AxisSetting { axis: "heads".into(), layer: None, state }]
    }

    #[rstest]
    fn heads_spread_over_ranks(#[values(true, false)] causal: bool) {
        block(causal, None, vec![]).check();
    }

    #[rstest]
    #[case(AxisState::Slice { n: 4 })]
    #[case(AxisState::Hard { n: 4, gain: 1.0 })]
    #[case(AxisState::Soft { choices: vec![8, 4, 2], p: vec![0.5, 0.3, 0.2] })]
    fn elastic_heads(#[case] state: AxisState) {
        block(true, None, heads(state)).check();
    }

    #[test]
    fn a_mask_of_heads_equals_their_slice() {
        let run = |state| block(true, None, heads(state)).run(crate::mesh::Grid::SINGLE);
        let (hard, slice) = (run(AxisState::Hard { n: 4, gain: 1.0 }), run(AxisState::Slice { n: 4 }));
        assert!(crate::program::testing::relative_l2(&hard["y0"], &slice["y0"]) < 1e-13);
        assert!(crate::program::testing::relative_l2(&hard["d.x"], &slice["d.x"]) < 1e-13);
    }

    #[test]
    fn uneven_slices_are_refused() {
        let slice = || heads(AxisState::Slice { n: 3 });
        let refused = std::panic::catch_unwind(|| block(true, None, slice()).run(crate::mesh::Grid::SINGLE));
        assert!(refused.is_err());
    }
}
