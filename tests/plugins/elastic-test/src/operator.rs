//! A custom operator: y = cap tanh(x w / cap), w one factor per channel.

use gantry_plugin_api::sdk::custom::{Backward, CustomOp, Forward, Number, Placement, ResultShape, Shape, Shapes};
use gantry_plugin_api::sdk::{Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Attributes.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Attrs {
    pub cap: f64,
}

/// Inputs: x [tokens, channels], w [1, channels] (a parameter).
pub struct SoftCap;

impl CustomOp for SoftCap {
    type Attrs = Attrs;
    const NAME: &'static str = "elastic-test.softcap";
    const SUMMARY: &'static str = "bounds values smoothly";
    const PLACEMENT: Placement = Placement::Rows;

    fn shapes(attrs: &Attrs, inputs: &[Shape]) -> Result<Shapes> {
        let [x, w] = inputs else { return Err(Error::shape("takes x and w")) };
        if (w.rows, w.cols) != (1, x.cols) {
            return Err(Error::shape(format!("w is {} x {}, x has {} channels", w.rows, w.cols, x.cols)));
        }
        if attrs.cap <= 0.0 {
            return Err(Error::config("cap must be positive"));
        }
        Ok(Shapes { outputs: vec![ResultShape::Like(0)], saved: vec![ResultShape::Like(0)], ..Shapes::default() })
    }

    fn forward<T: Number>(attrs: &Attrs, call: &mut Forward<'_, T>) -> Result<()> {
        let (x, w) = (call.inputs[0], call.inputs[1].row(0));
        let bounded = |x: T, w: T| (x.to_f64() * w.to_f64() / attrs.cap).tanh();
        let fill = |scale: f64| {
            move |i: usize, row: &mut [T]| {
                for ((y, x), w) in row.iter_mut().zip(x.row(i)).zip(w) {
                    *y = T::from_f64(scale * bounded(*x, *w));
                }
            }
        };
        call.outputs[0].par_rows(16, fill(attrs.cap))?;
        call.saved[0].par_rows(16, fill(1.0))
    }

    fn backward<T: Number>(_: &Attrs, call: &mut Backward<'_, T>) -> Result<()> {
        let (x, w, tanh, dy) = (call.inputs[0], call.inputs[1].row(0), call.saved[0], call.output_grads[0]);
        let inner = |i: usize, c: usize| {
            let t = tanh.row(i)[c].to_f64();
            dy.row(i)[c].to_f64() * (1.0 - t * t)
        };
        let [dx, dw] = call.input_grads.as_mut_slice() else { return Err(Error::shape("two gradients")) };
        dx.par_rows(16, |i, row| {
            row.iter_mut().enumerate().for_each(|(c, dx)| *dx = T::from_f64(inner(i, c) * w[c].to_f64()));
        })?;
        let rows = x.rows;
        dw.par_rows(1, |_, row| {
            for (c, dw) in row.iter_mut().enumerate() {
                *dw = T::from_f64((0..rows).map(|i| inner(i, c) * x.row(i)[c].to_f64()).sum());
            }
        })
    }
}
