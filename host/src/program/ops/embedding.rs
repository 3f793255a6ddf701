//! y = weight[ids].
//!
//! Placement. Vocabulary spread: every rank looks up all tokens and gives zeros for the rows of others, so y is a partial
//! sum, which the residual stream takes as it likes. Not spread: y is placed as the ids, and with rows spread the gradient
//! of the weight is a partial sum. Axis states: a sliced hidden axis is a prefix of the weight's columns; masks are applied
//! at the embedding's role.

use super::{HostOp, Results, Typed, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::graph::{DType, ValueId};
use crate::program::recorder::Recorder;
use gantry_kernels::blocks::Blocks;
use gantry_kernels::cpu::embedding::{Embedding as Forward, EmbeddingBackward};
use gantry_plugin_api::ops::Embedding;

pub static OPS: &[&dyn HostOp] = &[&Typed(record as fn(&mut Recorder<'_>, Embedding, &[ValueId]) -> Result<Results>)];

/// Inputs: weight [vocab, channels], ids i32 [tokens]. Output [tokens, channels].
pub fn record(cx: &mut Recorder<'_>, _: Embedding, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 2..=2)?;
    let w = inputs[0];
    let weight = cx.value(w).clone();
    if weight.param.is_none() || weight.dims.len() != 2 {
        return Err(cx.error(format!("the weight must be a parameter [vocab, channels], not {}", weight.text())));
    }
    let (vocab, channels) = (weight.dims[0].clone(), weight.dims[1].clone());
    let [rows] = vocab.segs.as_slice() else {
        return Err(cx.error(format!("the rows of the weight must be one axis of tokens, not {vocab}")));
    };
    if channels.sharded() {
        return Err(cx.error(format!("channels of an embedding cannot be spread, as {channels} is")));
    }
    let ids = if vocab.sharded() { cx.replicated(inputs[1])? } else { inputs[1] };
    let v = cx.value(ids).clone();
    if v.dtype != DType::I32 || v.cols != 1 || !v.contiguous() {
        return Err(cx.error(format!("ids must be i32 [tokens], not {:?} {}", v.dtype, v.text())));
    }
    let mut dims = v.dims.clone();
    dims.push(channels);
    let needs_grad = cx.needs_grad(&[w]);
    let y = cx.fresh("embedding", dims, v.seq, needs_grad);
    cx.g.values[y.0 as usize].partial = vocab.sharded();
    let (vocab, part, parts) = (vocab.size(), rows.part, rows.parts);
    let cols = cx.blocks(w, 1);
    let kernel =
        Forward { tokens: v.rows, vocab, part, parts, cols: cols.clone(), ld_w: weight.ld, ld_y: cx.value(y).ld };
    cx.g.emit(kernel, &[w], &[y], &[ids], &[]);
    cx.node(EmbeddingGrad { w, ids, y, cols, vocab, part, parts }, &[y]);
    Ok(one(y))
}

struct EmbeddingGrad {
    w: ValueId,
    ids: ValueId,
    y: ValueId,
    cols: Blocks,
    vocab: usize,
    part: usize,
    parts: usize,
}

impl Backward for EmbeddingGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let ids = bw.value(self.ids).clone();
        let Some(dw) = bw.param_grad(self.w, ids.seq)? else { return Ok(()) };
        let kernel = EmbeddingBackward {
            tokens: ids.rows,
            vocab: self.vocab,
            part: self.part,
            parts: self.parts,
            cols: self.cols.clone(),
            ld_dy: bw.ld(dy),
            ld_w: bw.ld(dw),
        };
        bw.emit(kernel, &[dy], &[dw], &[self.ids], &[]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::ops::{linear, rms_norm};
    use crate::program::testing::{OpTest, axis};
    use gantry_plugin_api::plan::{AxisSetting, AxisState, Layout};

    /// An embedding and a norm and a product on the residual stream.
    fn test(tp_vocab: bool, settings: Vec<AxisSetting>) -> OpTest {
        OpTest {
            axes: vec![axis("hidden", 6, false), axis("vocab", 8, tp_vocab)],
            params: vec![
                ("embedding", vec![Layout::axis("vocab", 1), Layout::axis("hidden", 1)]),
                ("norm", vec![Layout::axis("hidden", 1)]),
                ("out", vec![Layout::axis("hidden", 1), Layout::axis("hidden", 1)]),
            ],
            inputs: vec![],
            ints: vec![("ids", vec![3, 0, 6, 3, 2, 5, 1, 7])],
            tokens: 8,
            settings,
            state_grads: false,
            labels: None,
            forward: Box::new(|cx, _| {
                let p = (0..3).map(|i| cx.param_value(i)).collect::<Result<Vec<_>>>()?;
                let ids = cx.int_input("ids", 8)?;
                let x = record(cx, Embedding {}, &[p[0], ids])?[0];
                let x = cx.stream(x)?;
                let h = rms_norm::record(cx, Default::default(), &[x, p[1]])?[0];
                Ok(vec![linear::record(cx, Default::default(), &[h, p[2]])?[0]])
            }),
        }
    }

    #[test]
    fn spread_and_whole_vocabularies() {
        test(true, vec![]).check();
        test(false, vec![]).check();
    }

    #[test]
    fn a_slice_uses_a_prefix_of_the_columns() {
        let settings = vec![AxisSetting { axis: "hidden".into(), layer: None, state: AxisState::Slice { n: 4 } }];
        test(true, settings).check();
    }

    #[test]
    fn real_ids_are_refused() {
        let mut test = test(true, vec![]);
        test.forward = Box::new(|cx, _| {
            let w = cx.param_value(0)?;
            let ids = cx.real_input("ids", 8)?;
            let error = record(cx, Embedding {}, &[w, ids]).unwrap_err().to_string();
            assert!(error.contains("i32"), "{error}");
            Ok(vec![])
        });
        test.ints.clear();
        test.run(crate::mesh::Grid::SINGLE);
    }
}
