//! Top-k routing of tokens to experts, with auxiliary losses on the logits.
//!
//! Placement: rows as they come (partial sums are taken first); the experts dimension must not be spread. Gathered rows
//! are needed only where tokens of all ranks decide together: under a capacity limit, and for losses per sequence. Sums
//! over tokens of the losses are all-reduced where rows are spread.
//!
//! Axis states of the experts: a slice has fewer columns; a hard mask lets only the first n be chosen (and multiplies the
//! logits by its gain); a soft mask weighs scores and bias by its m before the choice. Losses count the experts that can
//! be chosen, and see the logits without a soft mask.

use super::mask::{self, mask_segments};
use super::{HostOp, Results, Typed};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::dims::{Dim, Segment};
use crate::program::graph::{Collective, Load, LossTerm, Share, Value, ValueId};
use crate::program::recorder::Recorder;
use crate::program::states::StateKey;
use gantry_kernels::cpu::elementwise::Scale;
use gantry_kernels::cpu::moe_route::{
    RouteBackward, RouteForward, RouteShape, RouterLoss, RouterLossBackward, RouterLossShape, RouterStats, Score,
};
use gantry_plugin_api::ops::{MoeRoute, ScoreFn};

pub static OPS: &[&dyn HostOp] = &[&Typed(record as fn(&mut Recorder<'_>, MoeRoute, &[ValueId]) -> Result<Results>)];

/// Inputs: logits [tokens, experts]; optional bias buffer [experts]; buffer of shares [experts] for the global loss. Outputs: probs [tokens, topk], indices i32
/// [tokens, topk], negative where an assignment was dropped.
pub fn record(cx: &mut Recorder<'_>, attrs: MoeRoute, inputs: &[ValueId]) -> Result<Results> {
    let global = attrs.global_aux_loss != 0.0;
    cx.arity(inputs, 1 + usize::from(global)..=2 + usize::from(global))?;
    let (share, inputs) = match inputs.split_last() {
        Some((&share, rest)) if global => (Some(share), rest),
        _ => (None, inputs),
    };
    let x = if attrs.capacity_factor > 0.0 { cx.replicated(inputs[0])? } else { cx.summed(inputs[0])? };
    let bias = inputs.get(1).copied();
    let last = cx.value(x).last().clone();
    let [experts] = last.segs.as_slice() else {
        return Err(cx.error(format!("logits must have one dimension of experts, not {last}")));
    };
    if experts.sharded() {
        return Err(cx.error(format!("{last}: every rank needs the logits of all experts")));
    }
    for (what, buffer) in [("the bias", bias), ("the share of the load", share)] {
        let Some(buffer) = buffer else { continue };
        let b = cx.value(buffer);
        if b.len() != last.local() || !b.contiguous() {
            return Err(cx.error(format!("{what} must be [{last}], not {}", b.text())));
        }
        cx.same_dim("a router's buffer and its logits", b.last(), &last)?;
    }
    let state = experts.axis.and_then(|axis| cx.cx.states.get(axis)).cloned();
    let (x, active, q) = match state {
        Some(StateKey::Hard { n, gain }) => {
            let x = if gain { mask_segments(cx, x, |_, _| true)? } else { x };
            (x, n, None)
        }
        Some(StateKey::Soft { .. }) => (x, experts.local(), soft_mask(cx, experts)?),
        _ => (x, experts.local(), None),
    };
    let results = choose(cx, &attrs, x, [bias, share], active, q)?;
    let coefficients = [attrs.aux_loss, attrs.seq_aux_loss, attrs.z_loss];
    if cx.needs_grad(&[x]) && coefficients.iter().any(|c| *c != 0.0) {
        auxiliary_loss(cx, &attrs, x, active, coefficients, None)?;
    }
    if cx.needs_grad(&[x]) && global {
        auxiliary_loss(cx, &attrs, x, active, [attrs.global_aux_loss, 0.0, 0.0], share)?;
    }
    Ok(results)
}

fn soft_mask(cx: &mut Recorder<'_>, experts: &Segment) -> Result<Option<ValueId>> {
    match experts.axis {
        Some(axis) => Ok(mask::mask(cx, axis, experts)?.map(|mask| mask.m)),
        None => Ok(None),
    }
}

fn score(cx: &Recorder<'_>, attrs: &MoeRoute) -> Result<Score> {
    match attrs.score {
        ScoreFn::Sigmoid => Ok(Score::Sigmoid),
        ScoreFn::Softmax => Ok(Score::Softmax),
        other => Err(cx.error(format!("this host does not know the score function {other:?}"))),
    }
}

fn choose(
    cx: &mut Recorder<'_>,
    attrs: &MoeRoute,
    x: ValueId,
    [bias, share]: [Option<ValueId>; 2],
    active: usize,
    q: Option<ValueId>,
) -> Result<Results> {
    let v = cx.value(x).clone();
    let k = attrs.topk as usize;
    // Scores divided by the sum of the selected are a softmax over the selected, which needs no other logit.
    let score = match score(cx, attrs)? {
        Score::Softmax if attrs.normalize && bias.is_none() && q.is_none() => Score::SoftmaxSelected,
        score => score,
    };
    let shape = RouteShape {
        tokens: v.rows,
        experts: v.cols,
        active,
        k,
        ld: v.ld,
        score,
        normalize: attrs.normalize,
        scaling: attrs.scaling,
        elastic: q.is_some(),
    };
    shape.check().map_err(|e| cx.error(e))?;
    let capacity = (attrs.capacity_factor > 0.0)
        .then(|| ((v.rows * k) as f64 / active as f64 * attrs.capacity_factor).ceil() as usize);
    let dims = || v.dims[..v.dims.len() - 1].iter().cloned().chain([Dim::plain("topk", k)]);
    let needs_grad = cx.needs_grad(&[x]) || q.is_some_and(|q| cx.needs_grad(&[q]));
    let probs = cx.fresh("probs", dims(), v.seq, needs_grad);
    let indices = cx.fresh_int("indices", dims(), v.seq);
    let counts = cx.fresh_int("counts", [v.last().clone()], false);
    let kernel = RouteForward { shape, bias: bias.is_some(), mask: false, capacity, acc_counts: false };
    let ins: Vec<ValueId> = [x].into_iter().chain(bias).chain(q).collect();
    cx.g.emit(kernel, &ins, &[probs], &[], &[indices, counts]);
    cx.node(RouteGrad { x, q, probs, indices, shape }, &[probs]);
    if cx.needs_grad(&[x]) {
        cx.g.pin(counts);
        let entry = |buffer: Option<ValueId>| buffer.and_then(|buffer| cx.value(buffer).param);
        let router = cx.g.call_path().into();
        let load = Load { router, buffer: entry(bias), share: entry(share), counts, seq: v.seq };
        cx.g.loads.push(load);
    }
    Ok(Results::from_iter([probs, indices]))
}

struct RouteGrad {
    x: ValueId,
    q: Option<ValueId>,
    probs: ValueId,
    indices: ValueId,
    shape: RouteShape,
}

impl Backward for RouteGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.probs) else { return Ok(()) };
        let spread = bw.value(self.x).seq;
        let dq = self.q.map(|q| bw.dx_adding_or_scratch(q, spread));
        let dx = bw.dx_or_scratch(self.x, false);
        let kernel = RouteBackward { shape: self.shape, ld_d: bw.ld(dx.value), acc: dx.acc };
        let ins: Vec<ValueId> = [self.x, dy].into_iter().chain(self.q).collect();
        let outs: Vec<ValueId> = [dx.value].into_iter().chain(dq).collect();
        bw.emit(kernel, &ins, &outs, &[self.indices], &[]);
        Ok(())
    }
}

/// Puts the auxiliary losses of one router on the objective and their values among the metrics. With a `share` of the load
/// given, the first is against it instead of against this micro-batch's own top-k.
fn auxiliary_loss(
    cx: &mut Recorder<'_>,
    attrs: &MoeRoute,
    x: ValueId,
    active: usize,
    coefficients: [f64; 3],
    share: Option<ValueId>,
) -> Result<()> {
    let per_sequence = coefficients[1] != 0.0;
    let x = if per_sequence { cx.replicated(x)? } else { x };
    let v = cx.value(x).clone();
    if per_sequence && v.rows != cx.cx.tokens {
        return Err(cx.error(format!("{} rows are not the {} tokens that cu_seqlens divides", v.rows, cx.cx.tokens)));
    }
    let shape = RouterLossShape {
        tokens: v.rows,
        experts: v.cols,
        active,
        k: attrs.topk as usize,
        ld: v.ld,
        score: score(cx, attrs)?,
        sequences: per_sequence.then_some(cx.cx.max_seqs),
        mean_length: false,
        mask: false,
    };
    let cu_seqlens = cx.cu_seqlens()?;
    let one = |name| [Dim::plain(name, 1)];
    let stats = cx.fresh(
        "router_stats",
        [Dim::plain("groups", shape.groups()), Dim::plain("sums", shape.width())],
        false,
        false,
    );
    cx.g.emit(RouterStats { shape }, &[x], &[stats], &[cu_seqlens], &[]);
    if v.seq {
        cx.g.emit_collective(Collective::AllReduce, stats, stats, shape.groups() * shape.width());
    }
    if let Some(share) = share {
        // The sums of the top-k indicator, columns experts .. 2 experts of the only group: share of all assignments.
        let all = cx.value(stats).clone();
        let counts = cx.g.push_value(Value { offset: shape.experts, cols: shape.experts, ..all });
        let assignments = (shape.k * cx.cx.tokens) as f64;
        let (rows, cols) = (1, shape.experts);
        let kernel = Scale {
            rows,
            cols,
            ld_x: cols,
            ld_y: cols,
            factor: assignments,
            scalar: false,
            acc: false,
            in_place: false,
        };
        cx.g.emit(kernel, &[share], &[counts], &[], &[]);
    }
    let loss = cx.fresh("aux_loss", one("loss"), false, true);
    let metrics = cx.fresh("router_metrics", [Dim::plain("metrics", 3)], false, false);
    cx.g.emit(RouterLoss { shape, coefficients }, &[stats], &[loss, metrics], &[], &[]);
    let seed = cx.real_input("aux_scale", 1)?;
    cx.node(LossGrad { x, stats, loss, cu_seqlens, shape, coefficients }, &[loss]);
    cx.g.pin(loss);
    cx.g.pin(metrics);
    cx.g.losses.push(LossTerm { name: "moe_aux_loss".into(), value: loss, share: Share::Mean, seed });
    let first = if share.is_some() { "global_load_balancing_loss" } else { "load_balancing_loss" };
    let names = [first, "seq_load_balancing_loss", "z_loss"];
    for (i, (name, coefficient)) in names.into_iter().zip(coefficients).enumerate() {
        if coefficient != 0.0 {
            let all = cx.value(metrics).clone();
            let value = Value { name: name.into(), dims: one(name).into_iter().collect(), rows: 1, offset: i, ..all };
            let value = cx.g.push_value(value);
            let name = format!("{}.{name}", cx.path());
            cx.g.metrics.push((name, value));
        }
    }
    Ok(())
}

struct LossGrad {
    x: ValueId,
    stats: ValueId,
    loss: ValueId,
    cu_seqlens: ValueId,
    shape: RouterLossShape,
    coefficients: [f64; 3],
}

impl Backward for LossGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dloss) = bw.dy(self.loss) else { return Ok(()) };
        let Some(dx) = bw.dx(self.x, false) else { return Ok(()) };
        let (shape, coefficients) = (self.shape, self.coefficients);
        let kernel = RouterLossBackward { shape, coefficients, ld_d: bw.ld(dx.value), acc: dx.acc };
        bw.emit(kernel, &[self.x, self.stats, dloss], &[dx.value], &[self.cu_seqlens], &[]);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
