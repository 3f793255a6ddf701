//! Operators that plugins bring: the host records, places and replays them; the plugin computes on the host's buffers.
//!
//! Placement, as the operator declares it. `alone` (the default): an error with tp > 1. `rows`: rows as they come, partial
//! sums taken first, no spread columns; with rows spread, gradients of parameters are partial sums. Axis states: a
//! parameter narrowed by a slice is an error, since the operator knows full widths only; masks act at roles, as ever.

use super::{HostOp, Results, Typed};
use crate::error::{Error, Result};
use crate::program::backprop::{Backprop, Backward, copy};
use crate::program::dims::Dim;
use crate::program::graph::ValueId;
use crate::program::recorder::Recorder;
use gantry_kernels::{Args, Cost, Kernel, Real};
use gantry_plugin_api::abi::custom::{CustomInstance, CustomShapes, In, Out};
use gantry_plugin_api::ops::Custom;
use gantry_plugin_api::sdk;
use gantry_plugin_api::sdk::custom::{Number, Placement, ResultShape, Shape};
use smallvec::SmallVec;
use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;

pub static OPS: &[&dyn HostOp] = &[&Typed(record as fn(&mut Recorder<'_>, Custom, &[ValueId]) -> Result<Results>)];

thread_local! {
    static FAILURE: RefCell<Option<sdk::Error>> = const { RefCell::new(None) };
}

/// What the last launch on this thread failed with: kernels have no result, plugins have errors.
pub fn take_failure() -> Option<Error> {
    FAILURE.with(|slot| slot.borrow_mut().take()).map(Error::from)
}

/// Inputs and outputs as the operator's shapes say.
pub fn record(cx: &mut Recorder<'_>, attrs: Custom, inputs: &[ValueId]) -> Result<Results> {
    let op = crate::plugin::custom::instance(&attrs.name, &attrs.attrs).map_err(|e| cx.error(e))?;
    let mut ins: SmallVec<[ValueId; 8]> = SmallVec::new();
    for &id in inputs {
        ins.push(cx.summed(id)?);
    }
    let shapes: Vec<Shape> = ins.iter().map(|&id| shape_of(cx, id)).collect();
    let CustomShapes { placement, shapes: results } =
        op.shapes(&shapes).map_err(|e| cx.error(format_args!("{}: {e}", attrs.name)))?;
    check_placement(cx, &attrs.name, placement, &mut ins)?;

    let needs_grad = cx.needs_grad(&ins);
    let outputs = fresh(cx, &attrs.name, &results.outputs, &ins, needs_grad)?;
    let saved = fresh(cx, &attrs.name, &results.saved, &ins, false)?;
    let op = Arc::new(op);
    let forward = CustomKernel {
        op: Arc::clone(&op),
        ins: sizes(cx, &ins),
        saved_in: SmallVec::new(),
        grads_in: SmallVec::new(),
        outs: sizes(cx, &outputs),
        saved_out: sizes(cx, &saved),
        work: results.forward_work,
        backward: false,
    };
    let outs: Vec<ValueId> = outputs.iter().chain(&saved).copied().collect();
    cx.g.emit(forward, &ins, &outs, &[], &[]);
    let grad = CustomGrad { op, ins, outputs: outputs.clone(), saved, work: results.backward_work };
    cx.node(grad, &outputs);
    Ok(outputs)
}

fn shape_of(cx: &Recorder<'_>, id: ValueId) -> Shape {
    let v = cx.value(id);
    Shape { rows: v.rows, cols: v.cols }
}

fn check_placement(cx: &mut Recorder<'_>, name: &str, placement: Placement, ins: &mut [ValueId]) -> Result<()> {
    if placement != Placement::Rows && cx.cx.grid.tp > 1 {
        return Err(cx.error(format!(
            "custom operator {name} declares no placement, so it cannot run with grid.tp = {}; let it declare \
             Placement::Rows if each row of its result depends on the same row of its inputs only",
            cx.cx.grid.tp
        )));
    }
    for id in ins.iter() {
        let v = cx.value(*id);
        if v.dtype != gantry_plugin_api::sdk::DType::Real {
            return Err(cx.error(format!("custom operator {name} takes real values, not indices {}", v.text())));
        }
        if v.dims.iter().any(Dim::sharded) {
            return Err(cx.error(format!("custom operator {name} cannot work on spread columns, {}", v.text())));
        }
        let narrowed = v.dims.iter().flat_map(|d| &d.segs).any(|s| s.units != s.full_units);
        if v.param.is_some() && narrowed {
            return Err(cx.error(format!("custom operator {name} knows parameters at full width only, {}", v.text())));
        }
    }
    // Activations of one call have to agree on who has which rows.
    if ins.iter().any(|&id| cx.value(id).seq) {
        for id in ins.iter_mut() {
            if cx.value(*id).param.is_none() {
                *id = cx.stream(*id)?;
            }
        }
    }
    Ok(())
}

fn fresh(
    cx: &mut Recorder<'_>,
    name: &str,
    shapes: &[ResultShape],
    ins: &[ValueId],
    needs_grad: bool,
) -> Result<Results> {
    shapes
        .iter()
        .map(|shape| {
            let (input, cols) = match *shape {
                ResultShape::Like(i) => (i, None),
                ResultShape::Rows { of, cols } => (of, Some(cols)),
                _ => return Err(cx.error(format!("custom operator {name} tells a shape this host does not know"))),
            };
            let Some(&like) = ins.get(input) else {
                let n = ins.len();
                return Err(cx.error(format!("custom operator {name} refers to input {input}, it got {n}")));
            };
            let v = cx.value(like).clone();
            let mut dims = v.dims.clone();
            if let (Some(cols), Some(last)) = (cols, dims.last_mut()) {
                *last = Dim::plain("channels", cols);
            }
            Ok(cx.fresh(name, dims, v.seq, needs_grad))
        })
        .collect()
}

/// Rows, columns and row stride of an operand.
#[derive(Clone, Copy, Debug)]
struct Size {
    rows: usize,
    cols: usize,
    ld: usize,
}

type Sizes = SmallVec<[Size; 4]>;

fn sizes(cx: &Recorder<'_>, ids: &[ValueId]) -> Sizes {
    ids.iter().map(|&id| size(cx.value(id))).collect()
}

fn size(v: &crate::program::graph::Value) -> Size {
    Size { rows: v.rows, cols: v.cols, ld: v.ld }
}

struct CustomGrad {
    op: Arc<CustomInstance>,
    ins: SmallVec<[ValueId; 8]>,
    outputs: Results,
    saved: Results,
    work: usize,
}

impl Backward for CustomGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let mut dys: SmallVec<[ValueId; 8]> = SmallVec::new();
        for &y in &self.outputs {
            let dy = match bw.dy(y) {
                Some(dy) => dy,
                // Nothing depends on this output: zeros.
                None => {
                    let zero = bw.g.fresh_like(y, "zero");
                    let v = bw.value(zero);
                    let fill =
                        gantry_kernels::cpu::elementwise::Fill { rows: v.rows, cols: v.cols, ld: v.ld, value: 0.0 };
                    bw.emit(fill, &[], &[zero], &[], &[]);
                    zero
                }
            };
            dys.push(dy);
        }
        // The operator overwrites; what has to be added to is added to afterwards.
        let grads: SmallVec<[ValueId; 8]> = self.ins.iter().map(|&x| bw.g.fresh_like(x, "custom grad")).collect();
        let sizes = |bw: &Backprop<'_>, ids: &[ValueId]| ids.iter().map(|&id| size(bw.value(id))).collect::<Sizes>();
        let kernel = CustomKernel {
            op: Arc::clone(&self.op),
            ins: sizes(bw, &self.ins),
            saved_in: sizes(bw, &self.saved),
            grads_in: sizes(bw, &dys),
            outs: sizes(bw, &grads),
            saved_out: SmallVec::new(),
            work: self.work,
            backward: true,
        };
        let ins: Vec<ValueId> = self.ins.iter().chain(&self.saved).chain(&dys).copied().collect();
        bw.emit(kernel, &ins, &grads, &[], &[]);
        let spread = self.outputs.iter().any(|&y| bw.value(y).seq);
        for (&x, &grad) in self.ins.iter().zip(&grads) {
            if bw.value(x).param.is_some() {
                if let Some(main) = bw.param_grad(x, spread)? {
                    copy(bw.g, grad, main, true);
                }
            } else if let Some(out) = bw.dx(x, false) {
                copy(bw.g, grad, out.value, out.acc);
            }
        }
        Ok(())
    }
}

/// One launch: forward takes inputs and gives outputs and saved values; backward takes inputs, saved values and gradients
/// of the outputs, and gives gradients of the inputs.
#[derive(Debug)]
struct CustomKernel {
    op: Arc<CustomInstance>,
    ins: Sizes,
    saved_in: Sizes,
    grads_in: Sizes,
    outs: Sizes,
    saved_out: Sizes,
    work: usize,
    backward: bool,
}

impl CustomKernel {
    fn run<T: Real + Number>(&self, args: Args<'_, T>) {
        let (ins, rest) = args.ins.split_at(self.ins.len());
        let (saved, grads) = rest.split_at(self.saved_in.len());
        let mut outs: SmallVec<[Out<'_, T>; 8]> = args
            .outs
            .iter_mut()
            .zip(self.outs.iter().chain(&self.saved_out))
            .map(|(data, s)| Out { data, rows: s.rows, cols: s.cols, ld: s.ld })
            .collect();
        let (outs, saved_out) = outs.split_at_mut(self.outs.len());
        let result = if self.backward {
            let (ins, saved, grads) = (read(ins, &self.ins), read(saved, &self.saved_in), read(grads, &self.grads_in));
            self.op.backward(&ins, &saved, &grads, outs, args.work)
        } else {
            self.op.forward(&read(ins, &self.ins), outs, saved_out, args.work)
        };
        if let Err(e) = result {
            FAILURE.with(|slot| *slot.borrow_mut() = Some(e));
        }
    }
}

fn read<'a, T>(slices: &[&'a [T]], sizes: &[Size]) -> SmallVec<[In<'a, T>; 8]> {
    slices.iter().zip(sizes).map(|(data, s)| In { data, rows: s.rows, cols: s.cols, ld: s.ld }).collect()
}

impl Kernel for CustomKernel {
    fn name(&self) -> &'static str {
        "custom"
    }
    /// Reads and writes of the operands; what the plugin computes in between is its own secret.
    fn cost(&self) -> Cost {
        let all = self.ins.iter().chain(&self.saved_in).chain(&self.grads_in).chain(&self.outs).chain(&self.saved_out);
        Cost::new(0.0, all.map(|s| (s.rows * s.cols) as f64).sum())
    }
    fn workspace(&self) -> usize {
        self.work
    }
    fn run_f32(&self, args: Args<'_, f32>) {
        self.run(args)
    }
    fn run_f64(&self, args: Args<'_, f64>) {
        self.run(args)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests;
