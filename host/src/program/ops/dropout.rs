//! y = x * keep / (1 - p) in training, x otherwise.
//!
//! Placement: any, partial sums included, because what is dropped depends on an element's global token and channel alone.
//! Those are counted at full width, so a slice drops the same elements as the whole. Axis states: nothing else.

use super::{HostOp, Results, Typed, one};
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::dims::{Dim, Segment};
use crate::program::graph::{Action, Graph, Value, ValueId};
use crate::program::recorder::Recorder;
use gantry_kernels::cpu::dropout::Dropout as Kernel;
use gantry_kernels::philox::stream_of;
use gantry_plugin_api::ops::Dropout;

pub static OPS: &[&dyn HostOp] = &[&Typed(record as fn(&mut Recorder<'_>, Dropout, &[ValueId]) -> Result<Results>)];

/// Input: x [tokens, channels]. Output like it.
pub fn record(cx: &mut Recorder<'_>, attrs: Dropout, inputs: &[ValueId]) -> Result<Results> {
    cx.arity(inputs, 1..=1)?;
    if !(0.0..1.0).contains(&attrs.p) {
        return Err(cx.error(format!("p must be at least 0 and below 1, not {}", attrs.p)));
    }
    let x = inputs[0];
    if attrs.p == 0.0 || !cx.cx.training {
        return Ok(one(x));
    }
    let v = cx.value(x).clone();
    if v.dims.len() != 2 || v.dims[0].sharded() {
        return Err(cx.error(format!("drops elements of [tokens, channels], not of {}", v.text())));
    }
    let ints = [cx.int_input("step", 1)?, cx.int_input("first_token", 1)?];
    let path = cx.path();
    let mask = Mask {
        p: attrs.p,
        seed: cx.cx.seed,
        stream: stream(&cx.g, &path),
        first_row: if v.seq { cx.cx.place.tp * v.rows } else { 0 },
        channels: v.last().clone(),
        ints,
    };
    let needs_grad = cx.needs_grad(&[x]);
    let y = cx.fresh("dropped", v.dims.clone(), v.seq, needs_grad);
    cx.g.values[y.0 as usize].partial = v.partial;
    mask.apply(&mut cx.g, x, y, false);
    cx.node(DropoutGrad { x, y, mask }, &[y]);
    Ok(one(y))
}

/// A stream of the call at `path`; calls of one path are told apart by their order.
fn stream(g: &Graph, path: &str) -> u32 {
    let taken = |stream: u32| {
        g.steps.iter().any(|step| match &step.action {
            Action::Launch { kernel, .. } => {
                kernel.as_any().downcast_ref::<Kernel>().is_some_and(|kernel| kernel.stream == stream)
            }
            Action::Collective { .. } => false,
        })
    };
    let candidates = (0u32..).map(|n| stream_of(&format!("dropout {path} {n}")));
    candidates.into_iter().find(|&stream| !taken(stream)).unwrap_or_default()
}

/// Which elements are dropped.
struct Mask {
    p: f64,
    seed: u64,
    stream: u32,
    /// Index of this rank's first row among the micro-batch's.
    first_row: usize,
    channels: Dim,
    ints: [ValueId; 2],
}

impl Mask {
    /// y = x * keep / (1 - p), one launch per segment of the channels.
    fn apply(&self, g: &mut Graph, x: ValueId, y: ValueId, acc: bool) {
        let full = |seg: &Segment| seg.full_units * seg.unit;
        let cols_global = self.channels.segs.iter().map(full).sum();
        let (mut col, mut first_channel) = (0, 0);
        for seg in &self.channels.segs {
            let cols = seg.local();
            let [from, to] = [x, y].map(|id| {
                let v = g.value(id).clone();
                g.push_value(Value { offset: v.offset + col, cols, ..v })
            });
            let kernel = Kernel {
                tokens: g.value(x).rows,
                cols,
                ld_x: g.value(x).ld,
                ld_y: g.value(y).ld,
                p: self.p,
                seed: self.seed,
                stream: self.stream,
                first_row: self.first_row,
                first_channel,
                cols_global,
                parts: seg.parts,
                part: seg.part,
                unit: seg.unit,
                acc,
            };
            if cols > 0 {
                g.emit(kernel, &[from], &[to], &self.ints, &[]);
            }
            col += cols;
            first_channel += full(seg);
        }
    }
}

struct DropoutGrad {
    x: ValueId,
    y: ValueId,
    mask: Mask,
}

impl Backward for DropoutGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(dy) = bw.dy(self.y) else { return Ok(()) };
        if let Some(dx) = bw.dx(self.x, false) {
            self.mask.apply(bw.g, dy, dx.value, dx.acc);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Grid;
    use crate::program::testing::{Input, OpTest, axis};
    use gantry_plugin_api::plan::{AxisSetting, AxisState, Layout};

    /// Channels of two segments spread over tp, and rows spread: the same elements everywhere.
    fn test(settings: Vec<AxisSetting>) -> OpTest {
        let channels = Layout::seq([("p", Layout::axis("heads", 3)), ("q", Layout::axis("ffn", 1))]);
        OpTest {
            axes: vec![axis("heads", 4, true), axis("ffn", 6, true), axis("hidden", 7, false)],
            params: vec![],
            inputs: vec![
                Input { name: "x", rows: 8, channels: Layout::axis("hidden", 1), spread: true },
                Input { name: "h", rows: 8, channels, spread: false },
            ],
            ints: vec![("step", vec![5]), ("first_token", vec![64])],
            tokens: 8,
            settings,
            state_grads: false,
            labels: None,
            forward: Box::new(|cx, inputs| {
                let drop = |cx: &mut Recorder<'_>, x| record(cx, Dropout { p: 0.4 }, &[x]).map(|y| y[0]);
                Ok(vec![drop(cx, inputs[0])?, drop(cx, inputs[1])?, drop(cx, inputs[0])?])
            }),
        }
    }

    #[test]
    fn the_same_elements_on_any_grid() {
        test(vec![]).check();
    }

    #[test]
    fn calls_of_one_path_drop_different_elements_and_a_slice_the_same() {
        let whole = test(vec![]).run(Grid::SINGLE);
        let dropped = |y: &[f64]| y.iter().map(|&y| y == 0.0).collect::<Vec<_>>();
        assert_ne!(dropped(&whole["y0"]), dropped(&whole["y2"]));
        let half = AxisSetting { axis: "heads".into(), layer: None, state: AxisState::Slice { n: 2 } };
        let test = test(vec![half]);
        test.check_parity();
        let slice = test.run(Grid::SINGLE);
        for (slice, whole) in slice["y1"].chunks(6 + 6).zip(whole["y1"].chunks(12 + 6)) {
            assert_eq!(dropped(&slice[..6]), dropped(&whole[..6]));
            assert_eq!(dropped(&slice[6..]), dropped(&whole[12..]));
        }
    }
}
