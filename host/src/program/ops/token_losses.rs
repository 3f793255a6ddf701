//! Losses of each token on given values: cross entropy and KL divergence of logits, distances of hidden states.
//!
//! Placement: rows as they come; the last dimension must be whole (a vocabulary that is spread has its loss fused in
//! [`super::lm_loss`]). The reference operand of a distance or divergence takes no gradient. Axis states: sliced widths are
//! the widths there are.

use super::rows::{only_rows, rows_of, whole_channels};
use super::{HostOp, Results, Typed, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward, scratch};
use crate::program::dims::Dim;
use crate::program::graph::{Graph, Value, ValueId};
use crate::program::recorder::Recorder;
use gantry_kernels::cpu::cross_entropy::{CeFromLogits, CeFromLogitsBackward};
use gantry_kernels::cpu::elementwise::Fill;
use gantry_kernels::cpu::kl::{
    HiddenDistance, HiddenLoss, HiddenLossBackward, KL_SAVED, KlFromLogits, KlFromLogitsBackward,
};
use gantry_plugin_api::ops::{CosineLoss, CrossEntropy, KlDivergence, MseLoss};

pub static OPS: &[&dyn HostOp] = &[
    &Typed(cross_entropy as fn(&mut Recorder<'_>, CrossEntropy, &[ValueId]) -> Result<Results>),
    &Typed(kl_divergence as fn(&mut Recorder<'_>, KlDivergence, &[ValueId]) -> Result<Results>),
    &Typed(mse_loss as fn(&mut Recorder<'_>, MseLoss, &[ValueId]) -> Result<Results>),
    &Typed(cosine_loss as fn(&mut Recorder<'_>, CosineLoss, &[ValueId]) -> Result<Results>),
];

/// Inputs: logits [tokens, classes], labels i32 [tokens]. Output [tokens].
pub fn cross_entropy(cx: &mut Recorder<'_>, attrs: CrossEntropy, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 2..=2)?;
    let logits = cx.summed(inputs[0])?;
    let v = cx.value(logits).clone();
    if v.dims.len() != 2 {
        return Err(cx.error(format!("logits must be [tokens, classes], not {}", v.text())));
    }
    whole_channels(cx, v.last(), "cross entropy")?;
    let labels = rows_of(cx, inputs[1], logits)?;
    only_rows(cx, "labels", labels, v.rows)?;
    let y = per_token(cx, &v, &[logits]);
    let lse = scratch(&mut cx.g, "lse", v.rows, 1);
    let (mask, total, count) = unmasked(&mut cx.g, v.rows);
    let kernel = CeFromLogits { tokens: v.rows, vocab: v.cols, ld: v.ld, smoothing: attrs.label_smoothing };
    cx.g.emit(kernel, &[logits, mask], &[lse, y, total, count], &[labels], &[]);
    cx.node(CeGrad { logits, labels, lse, y, kernel }, &[y]);
    Ok(one(y))
}

struct CeGrad {
    logits: ValueId,
    labels: ValueId,
    lse: ValueId,
    y: ValueId,
    kernel: CeFromLogits,
}

impl Backward for CeGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let Some(dx) = bw.dx(self.logits, false) else { return Ok(()) };
        let CeFromLogits { tokens, vocab, ld, smoothing } = self.kernel;
        let kernel = CeFromLogitsBackward { tokens, vocab, ld, ld_d: bw.ld(dx.value), smoothing, acc: dx.acc };
        let scale = ones(bw.g, 1);
        bw.emit(kernel, &[self.logits, self.lse, dy, scale], &[dx.value], &[self.labels], &[]);
        Ok(())
    }
}

/// Inputs: student logits, teacher logits [tokens, classes]. Output [tokens].
pub fn kl_divergence(cx: &mut Recorder<'_>, attrs: KlDivergence, inputs: &[ValueId]) -> Result<Results> {
    if attrs.temperature.partial_cmp(&0.0) != Some(std::cmp::Ordering::Greater) {
        return Err(cx.error(format!("the temperature must be above 0, not {}", attrs.temperature)));
    }
    let (student, teacher) = operands(cx, inputs, "KL divergence")?;
    let (s, t) = (cx.value(student).clone(), cx.value(teacher).clone());
    let kernel = KlFromLogits {
        tokens: s.rows,
        vocab: s.cols,
        ld_s: s.ld,
        ld_t: t.ld,
        temperature: attrs.temperature,
        reverse: attrs.reverse,
        top_k: (attrs.topk > 0).then_some((attrs.topk as usize).min(s.cols)),
    };
    let y = per_token(cx, &s, &[student]);
    let saved = scratch(&mut cx.g, "kl_saved", s.rows, KL_SAVED);
    let index = kernel.top_k.map(|k| cx.fresh_int("top_k", [Dim::plain("tokens", s.rows), Dim::plain("k", k)], false));
    let index: Vec<ValueId> = index.into_iter().collect();
    let (mask, total, count) = unmasked(&mut cx.g, s.rows);
    cx.g.emit(kernel, &[student, teacher, mask], &[saved, y, total, count], &[], &index);
    cx.node(KlGrad { student, teacher, saved, index, y, kernel }, &[y]);
    Ok(one(y))
}

struct KlGrad {
    student: ValueId,
    teacher: ValueId,
    saved: ValueId,
    index: Vec<ValueId>,
    y: ValueId,
    kernel: KlFromLogits,
}

impl Backward for KlGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let Some(dx) = bw.dx(self.student, false) else { return Ok(()) };
        let kernel = KlFromLogitsBackward { forward: self.kernel, ld_d: bw.ld(dx.value), acc: dx.acc };
        let scale = ones(bw.g, 1);
        bw.emit(kernel, &[self.student, self.teacher, self.saved, dy, scale], &[dx.value], &self.index, &[]);
        Ok(())
    }
}

/// Inputs: a, b [tokens, channels]. Output [tokens].
pub fn mse_loss(cx: &mut Recorder<'_>, _: MseLoss, inputs: &[ValueId]) -> Result<Results> {
    distance(cx, inputs, HiddenDistance::MeanSquared)
}

/// Inputs: a, b [tokens, channels]. Output [tokens].
pub fn cosine_loss(cx: &mut Recorder<'_>, _: CosineLoss, inputs: &[ValueId]) -> Result<Results> {
    distance(cx, inputs, HiddenDistance::Cosine)
}

fn distance(cx: &mut Recorder<'_>, inputs: &[ValueId], distance: HiddenDistance) -> Result<Results> {
    let (a, b) = operands(cx, inputs, "distance")?;
    let (s, t) = (cx.value(a).clone(), cx.value(b).clone());
    let kernel = HiddenLoss { tokens: s.rows, hidden: s.cols, ld_s: s.ld, ld_t: t.ld, distance };
    let y = per_token(cx, &s, &[a]);
    let (mask, total, count) = unmasked(&mut cx.g, s.rows);
    cx.g.emit(kernel, &[a, b, mask], &[y, total, count], &[], &[]);
    cx.node(DistanceGrad { a, b, y, kernel }, &[y]);
    Ok(one(y))
}

struct DistanceGrad {
    a: ValueId,
    b: ValueId,
    y: ValueId,
    kernel: HiddenLoss,
}

impl Backward for DistanceGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let Some(dx) = bw.dx(self.a, false) else { return Ok(()) };
        let kernel = HiddenLossBackward { forward: self.kernel, ld_d: bw.ld(dx.value), acc: dx.acc };
        let scale = ones(bw.g, 1);
        bw.emit(kernel, &[self.a, self.b, dy, scale], &[dx.value], &[], &[]);
        Ok(())
    }
}

/// Two operands of one shape, whole channels, rows alike.
fn operands(cx: &mut Recorder<'_>, inputs: &[ValueId], doing: &str) -> Result<(ValueId, ValueId)> {
    cx.arity(inputs, 2..=2)?;
    let (a, b) = (cx.summed(inputs[0])?, cx.summed(inputs[1])?);
    let (a, b) = cx.aligned(a, b)?;
    let (va, vb) = (cx.value(a).clone(), cx.value(b).clone());
    if va.dims.len() != 2 || va.shape() != vb.shape() {
        return Err(cx.error(format!(
            "operands {} and {} must have one shape [tokens, channels]",
            va.text(),
            vb.text()
        )));
    }
    whole_channels(cx, va.last(), doing)?;
    whole_channels(cx, vb.last(), doing)?;
    Ok((a, b))
}

/// The output [tokens] of a loss over the rows of `v`.
fn per_token(cx: &mut Recorder<'_>, v: &Value, inputs: &[ValueId]) -> ValueId {
    let needs_grad = cx.needs_grad(inputs);
    cx.fresh("token_loss", v.dims[..v.dims.len().saturating_sub(1)].to_vec(), v.seq, needs_grad)
}

/// What the kernels need for a masked sum that nobody asked for: a mask of ones, and places for sum and count.
fn unmasked(g: &mut Graph, rows: usize) -> (ValueId, ValueId, ValueId) {
    (ones(g, rows), scratch(g, "total", 1, 1), scratch(g, "count", 1, 1))
}

fn ones(g: &mut Graph, n: usize) -> ValueId {
    let ones = scratch(g, "ones", n, 1);
    g.emit(Fill { rows: n, cols: 1, ld: 1, value: 1.0 }, &[], &[ones], &[], &[]);
    ones
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::ops::shape::slice;
    use crate::program::testing::{Input, OpTest, axis};
    use gantry_plugin_api::ops::Slice;
    use gantry_plugin_api::plan::Layout;

    fn test(forward: impl Fn(&mut Recorder<'_>, &[ValueId]) -> Result<Vec<ValueId>> + Sync + 'static) -> OpTest {
        let input = |name, spread| Input { name, rows: 4, channels: Layout::axis("classes", 1), spread };
        OpTest {
            axes: vec![axis("classes", 9, false)],
            params: vec![],
            // Placed differently, so that operands have to be brought together.
            inputs: vec![input("a", true), input("b", false)],
            ints: vec![("labels", vec![3, 0, 8, 5])],
            tokens: 4,
            settings: vec![],
            state_grads: false,
            labels: None,
            forward: Box::new(forward),
        }
    }

    fn window(cx: &mut Recorder<'_>, x: ValueId) -> Result<ValueId> {
        let whole = cx.view("plain", x, 0, Dim::plain("classes", 9));
        Ok(slice(cx, Slice { start: 1, len: 6 }, &[whole])?[0])
    }

    #[test]
    fn cross_entropy_of_given_logits() {
        test(|cx, inputs| {
            let labels = cx.int_input("labels", 4)?;
            let mut outputs = vec![cross_entropy(cx, CrossEntropy::default(), &[inputs[0], labels])?[0]];
            outputs.push(cross_entropy(cx, CrossEntropy { label_smoothing: 0.2 }, &[inputs[1], labels])?[0]);
            Ok(outputs)
        })
        .check();
    }

    /// `b` gets no gradient: its differences are not looked at, its gradient is zero.
    #[test]
    fn divergences_and_distances() {
        let kl =
            |attrs: KlDivergence| move |cx: &mut Recorder<'_>, ab: &[ValueId]| kl_divergence(cx, attrs.clone(), ab);
        type Loss = Box<dyn Fn(&mut Recorder<'_>, &[ValueId]) -> Result<Results> + Sync>;
        let losses: Vec<Loss> = vec![
            Box::new(kl(KlDivergence::default())),
            Box::new(kl(KlDivergence { temperature: 2.0, reverse: true, topk: 0 })),
            Box::new(kl(KlDivergence { temperature: 1.5, reverse: false, topk: 3 })),
            Box::new(|cx, ab| mse_loss(cx, MseLoss {}, ab)),
            Box::new(|cx, ab| cosine_loss(cx, CosineLoss {}, ab)),
        ];
        for loss in losses {
            let test = test(move |cx, inputs| {
                let mut outputs = loss(cx, inputs)?.to_vec();
                let windows = [window(cx, inputs[0])?, window(cx, inputs[1])?];
                outputs.extend(loss(cx, &windows)?);
                Ok(outputs)
            });
            test.check_parity();
            test.check_gradients_of(&["a"]);
            assert!(test.run(crate::mesh::Grid::SINGLE)["d.b"].iter().all(|&d| d == 0.0));
        }
    }
}
