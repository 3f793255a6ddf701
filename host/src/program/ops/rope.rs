//! Rotary position embedding of the q and k segments; v is carried along.
//!
//! Placement: a token's position is its index in its sequence, so tokens are needed whole (rows are gathered); heads may
//! be spread. Axis states: none of its own.

use super::attention::heads;
use super::{HostOp, Results, Typed, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::graph::ValueId;
use crate::program::recorder::Recorder;
use gantry_kernels::cpu::rope::{Rope as Kernel, RopePairs, RopeSegment};
use gantry_plugin_api::ops::Rope;

pub static OPS: &[&dyn HostOp] = &[&Typed(record as fn(&mut Recorder<'_>, Rope, &[ValueId]) -> Result<Results>)];

/// Inputs: qkv [tokens, q | k | v]. Output: the same, rotated.
pub fn record(cx: &mut Recorder<'_>, attrs: Rope, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 1..=1)?;
    let x = cx.replicated(inputs[0])?;
    let v = cx.value(x).clone();
    let qkv = heads(cx, &v)?;
    if v.rows != cx.cx.tokens {
        return Err(cx.error(format!("{} rows are not the {} tokens that cu_seqlens divides", v.rows, cx.cx.tokens)));
    }
    let turns = [true, true, false];
    let mut offset = 0;
    let mut segments = Vec::new();
    for (seg, turns) in qkv.into_iter().zip(turns) {
        let rotary_dim = match (turns, attrs.rotary_dim as usize) {
            (false, _) => 0,
            (true, 0) => seg.unit,
            (true, r) => r,
        };
        let segment = RopeSegment { offset, heads: seg.local_units(), head_dim: seg.unit, rotary_dim };
        segment.check().map_err(|e| cx.error(e))?;
        segments.push(segment);
        offset += seg.local();
    }
    let needs_grad = cx.needs_grad(&[x]);
    let y = cx.fresh("rope", v.dims.clone(), false, needs_grad);
    let kernel = Kernel {
        tokens: v.rows,
        segments,
        theta: attrs.theta,
        pairs: if attrs.interleaved { RopePairs::Interleaved } else { RopePairs::Half },
        inverse: false,
        ld_x: v.ld,
        ld_y: cx.value(y).ld,
        acc: false,
    };
    let cu_seqlens = cx.cu_seqlens()?;
    cx.g.emit(kernel.clone(), &[x], &[y], &[cu_seqlens], &[]);
    cx.node(RopeGrad { x, y, cu_seqlens, kernel }, &[y]);
    Ok(one(y))
}

struct RopeGrad {
    x: ValueId,
    y: ValueId,
    cu_seqlens: ValueId,
    kernel: Kernel,
}

impl Backward for RopeGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let Some(dx) = bw.dx(self.x, false) else { return Ok(()) };
        let kernel =
            Kernel { inverse: true, ld_x: bw.ld(dy), ld_y: bw.ld(dx.value), acc: dx.acc, ..self.kernel.clone() };
        bw.emit(kernel, &[dy], &[dx.value], &[self.cu_seqlens], &[]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::ops::attention::tests::rotated;
    use rstest::rstest;

    #[rstest]
    fn before_attention(#[values(true, false)] interleaved: bool, #[values(0, 2)] rotary_dim: u64) {
        rotated(Rope { theta: 50.0, rotary_dim, interleaved }).check();
    }

    #[test]
    fn it_changes_the_result() {
        let run = |theta| rotated(Rope { theta, rotary_dim: 0, interleaved: false }).run(crate::mesh::Grid::SINGLE);
        assert_ne!(run(50.0)["y0"], run(60.0)["y0"]);
    }
}
