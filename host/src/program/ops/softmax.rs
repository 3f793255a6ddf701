//! Softmax, log-softmax and Gumbel-softmax over the last dimension.
//!
//! Placement: rows as they come (partial sums are taken first); the last dimension must be whole. Gumbel-softmax has all rows
//! on every rank, so that every rank has the same sample. Axis states: a sliced dimension is normalised over the slice; under
//! a mask the operator sees the masked values.

use super::rows::{dense, matrix, packed, row_stride, whole_channels};
use super::{HostOp, Results, Typed, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::dims::Dim;
use crate::program::graph::ValueId;
use crate::program::recorder::Recorder;
use gantry_kernels::cpu::gumbel::{GumbelNoise, GumbelSoftmax as Gumbel, GumbelSoftmaxBackward};
use gantry_kernels::cpu::softmax::{Softmax as Forward, SoftmaxBackward};
use gantry_plugin_api::ops::{GumbelSoftmax, LogSoftmax, Softmax};

pub static OPS: &[&dyn HostOp] = &[
    &Typed(softmax as fn(&mut Recorder<'_>, Softmax, &[ValueId]) -> Result<Results>),
    &Typed(log_softmax as fn(&mut Recorder<'_>, LogSoftmax, &[ValueId]) -> Result<Results>),
    &Typed(gumbel_softmax as fn(&mut Recorder<'_>, GumbelSoftmax, &[ValueId]) -> Result<Results>),
];

/// Input: x [.., C]. Output like it.
pub fn softmax(cx: &mut Recorder<'_>, _: Softmax, inputs: &[ValueId]) -> Result<Results> {
    normalised(cx, inputs, false)
}

/// Input: x [.., C]. Output like it.
pub fn log_softmax(cx: &mut Recorder<'_>, _: LogSoftmax, inputs: &[ValueId]) -> Result<Results> {
    normalised(cx, inputs, true)
}

fn normalised(cx: &mut Recorder<'_>, inputs: &[ValueId], log: bool) -> Result<Results> {
    cx.arity(inputs, 1..=1)?;
    let x = cx.summed(inputs[0])?;
    let v = cx.value(x).clone();
    whole_channels(cx, v.last(), "softmax")?;
    let (x, rows, cols, ld_x) = matrix(cx, x);
    let needs_grad = cx.needs_grad(&[x]);
    let y = cx.fresh("softmax", v.dims.clone(), v.seq, needs_grad);
    cx.g.emit(Forward { rows, cols, ld_x, ld_y: cols, log }, &[x], &[y], &[], &[]);
    cx.node(SoftmaxGrad { x, y, rows, cols, log }, &[y]);
    Ok(one(y))
}

struct SoftmaxGrad {
    x: ValueId,
    y: ValueId,
    rows: usize,
    cols: usize,
    log: bool,
}

impl Backward for SoftmaxGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let Some(dx) = bw.dx(self.x, false) else { return Ok(()) };
        let kernel = SoftmaxBackward {
            rows: self.rows,
            cols: self.cols,
            ld_y: self.cols,
            ld_dy: row_stride(bw, dy, self.cols),
            ld_dx: row_stride(bw, dx.value, self.cols),
            log: self.log,
            acc: dx.acc,
        };
        bw.emit(kernel, &[self.y, dy], &[dx.value], &[], &[]);
        Ok(())
    }
}

/// Inputs: logits [.., C], tau and scale of one element, optional noise like the logits. Output like the logits. Without
/// noise given it is drawn at (seed, stream, input `step`, input `sample`, position).
pub fn gumbel_softmax(cx: &mut Recorder<'_>, attrs: GumbelSoftmax, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 3..=4)?;
    let (tau, scale) = (inputs[1], inputs[2]);
    for (what, id) in [("tau", tau), ("scale", scale)] {
        let v = cx.value(id);
        if v.len() != 1 || v.partial {
            return Err(cx.error(format!("{what} must have one element, not {}", v.text())));
        }
    }
    let logits = cx.replicated(inputs[0])?;
    let logits = dense(cx, logits);
    let v = cx.value(logits).clone();
    whole_channels(cx, v.last(), "Gumbel-softmax")?;
    let (logits, rows, cols, _) = matrix(cx, logits);
    let mut ins = vec![logits, tau, scale];
    let mut ints = vec![];
    let noise = match inputs.get(3) {
        Some(&noise) => {
            let noise = cx.replicated(noise)?;
            let noise = cx.contiguous(noise);
            if cx.value(noise).shape() != v.shape() {
                return Err(cx.error(format!("noise {} and logits {} differ", cx.value(noise).text(), v.text())));
            }
            ins.push(noise);
            GumbelNoise::Given
        }
        None => {
            ints = vec![cx.int_input("step", 1)?, cx.int_input("sample", 1)?];
            GumbelNoise::Drawn { seed: cx.cx.seed, stream: attrs.stream }
        }
    };
    let needs_grad = cx.needs_grad(&[logits]);
    let y = cx.fresh("gumbel", v.dims.clone(), false, needs_grad);
    let p = cx.fresh("gumbel.p", v.dims.clone(), false, false);
    let choice = cx.fresh_int("gumbel.choice", [Dim::plain("rows", rows)], false);
    cx.g.emit(Gumbel { rows, cols, hard: attrs.hard, noise }, &ins, &[y, p], &ints, &[choice]);
    cx.node(GumbelGrad { logits, tau, scale, p, y, rows, cols }, &[y]);
    Ok(one(y))
}

struct GumbelGrad {
    logits: ValueId,
    tau: ValueId,
    scale: ValueId,
    p: ValueId,
    y: ValueId,
    rows: usize,
    cols: usize,
}

impl Backward for GumbelGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        let Some(dx) = bw.dx(self.logits, false) else { return Ok(()) };
        let dy = packed(bw, dy);
        // The kernel writes rows back to back; the logits are, but their gradient may be a window.
        let out = if bw.value(dx.value).contiguous() { dx.value } else { bw.g.fresh_like(dx.value, "grad") };
        let direct = out == dx.value;
        let kernel = GumbelSoftmaxBackward { rows: self.rows, cols: self.cols, acc: direct && dx.acc };
        bw.emit(kernel, &[self.p, dy, self.tau, self.scale], &[out], &[], &[]);
        if !direct {
            bw.copy(out, dx.value, dx.acc);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Grid;
    use crate::program::ops::shape::{slice, unflatten};
    use crate::program::testing::{Input, OpTest, axis, relative_l2};
    use gantry_kernels::cpu::elementwise::Fill;
    use gantry_plugin_api::ops::Slice;
    use gantry_plugin_api::plan::Layout;

    fn test(forward: impl Fn(&mut Recorder<'_>, &[ValueId]) -> Result<Vec<ValueId>> + Sync + 'static) -> OpTest {
        OpTest {
            axes: vec![axis("c", 10, false), axis("heads", 4, true)],
            params: vec![],
            inputs: vec![
                Input { name: "x", rows: 4, channels: Layout::axis("c", 1), spread: true },
                Input { name: "h", rows: 4, channels: Layout::axis("heads", 3), spread: false },
            ],
            ints: vec![("step", vec![3]), ("sample", vec![2])],
            tokens: 4,
            settings: vec![],
            state_grads: false,
            labels: None,
            forward: Box::new(forward),
        }
    }

    /// Columns of x as a plain view whose rows are farther apart than its columns.
    fn plain(cx: &mut Recorder<'_>, x: ValueId) -> Result<ValueId> {
        let dim = Dim::plain("classes", cx.value(x).cols);
        let whole = cx.view("plain", x, 0, dim);
        Ok(slice(cx, Slice { start: 2, len: 5 }, &[whole])?[0])
    }

    #[test]
    fn softmax_of_rows_views_and_unflattened_units() {
        test(|cx, inputs| {
            let view = plain(cx, inputs[0])?;
            let heads = unflatten(cx, inputs[1], &["heads", "position"])?;
            let mut outputs = vec![softmax(cx, Softmax {}, &[inputs[0]])?[0]];
            outputs.push(log_softmax(cx, LogSoftmax {}, &[view])?[0]);
            outputs.push(softmax(cx, Softmax {}, &[heads])?[0]);
            Ok(outputs)
        })
        .check();
    }

    fn constant(cx: &mut Recorder<'_>, value: f64) -> ValueId {
        let id = cx.fresh("constant", [Dim::plain("one", 1)], false, false);
        cx.g.emit(Fill { rows: 1, cols: 1, ld: 1, value }, &[], &[id], &[], &[]);
        id
    }

    fn sample(cx: &mut Recorder<'_>, x: ValueId, hard: bool, stream: u32) -> Result<ValueId> {
        let (tau, scale) = (constant(cx, 0.6), constant(cx, 1.5));
        Ok(gumbel_softmax(cx, GumbelSoftmax { hard, stream }, &[x, tau, scale])?[0])
    }

    #[test]
    fn gumbel_softmax_draws_alike_on_any_grid() {
        test(|cx, inputs| {
            let view = plain(cx, inputs[0])?;
            Ok(vec![sample(cx, view, false, 1)?, sample(cx, inputs[0], false, 2)?])
        })
        .check();
    }

    #[test]
    fn a_hard_sample_is_one_hot_with_the_soft_gradient() {
        // Both outputs are `y0`, so they get the same upstream gradient.
        let run = |hard| test(move |cx, inputs| Ok(vec![sample(cx, inputs[0], hard, 2)?])).run(Grid::SINGLE);
        let (soft, hard) = (run(false), run(true));
        assert_eq!(soft["d.x"], hard["d.x"]);
        for (soft, hard) in soft["y0"].chunks(10).zip(hard["y0"].chunks(10)) {
            let best = (0..10).max_by(|&a, &b| soft[a].total_cmp(&soft[b])).unwrap();
            assert!(hard.iter().enumerate().all(|(c, &y)| y == if c == best { 1.0 } else { 0.0 }));
        }
    }

    #[test]
    fn noise_can_be_given() {
        let given = test(|cx, inputs| {
            let noise =
                cx.g.push_value(crate::program::graph::Value { needs_grad: false, ..cx.value(inputs[0]).clone() });
            let (tau, scale) = (constant(cx, 0.5), constant(cx, 1.0));
            Ok(vec![gumbel_softmax(cx, GumbelSoftmax::default(), &[inputs[0], tau, scale, noise])?[0]])
        });
        given.check_parity();
        let given = given.run(Grid::SINGLE);
        // (x + x) / 0.5 without noise is 4 x.
        let plain = test(|cx, inputs| {
            let x = crate::program::ops::arith::scale(cx, gantry_plugin_api::ops::Scale { by: 4.0 }, &[inputs[0]])?[0];
            softmax(cx, Softmax {}, &[x]).map(|y| y.to_vec())
        });
        assert!(relative_l2(&given["y0"], &plain.run(Grid::SINGLE)["y0"]) < 1e-12);
    }
}
