//! A plugin linked into the test brings one operator per placement.

use super::*;
use crate::mesh::Grid;
use crate::plugin::PluginSet;
use crate::program::ops::{arith, linear};
use crate::program::testing::{Input, OpTest, axis};
use gantry_plugin_api::abi::hello::NeededOperator;
use gantry_plugin_api::abi::plugin::{Entry, Plugin};
use gantry_plugin_api::plan::Layout;
use gantry_plugin_api::schemars::{self, JsonSchema};
use gantry_plugin_api::sdk::Result as ApiResult;
use gantry_plugin_api::sdk::custom::{self, CustomOp, Forward, Shapes};
use serde::{Deserialize, Serialize};

struct TestPlugin;

impl Plugin for TestPlugin {
    const NAME: &'static str = "custom-tests";
    const VERSION: &'static str = "0";
    const OPERATORS: &'static [NeededOperator] = &[];
    const ENTRIES: &'static [Entry] = &[Entry::operator::<Gate>(), Entry::operator::<CumSum>()];
}

#[derive(Serialize, Deserialize, JsonSchema)]
struct GateAttrs {
    power: i32,
    #[serde(default)]
    fail: bool,
}

/// y = x^power * w, and z = sum over the channels of x; Placement::Rows.
struct Gate;

impl CustomOp for Gate {
    type Attrs = GateAttrs;
    const NAME: &'static str = "custom-tests.gate";
    const SUMMARY: &'static str = "";
    const PLACEMENT: Placement = Placement::Rows;

    fn shapes(_: &GateAttrs, inputs: &[Shape]) -> ApiResult<Shapes> {
        if inputs.len() != 2 || inputs[0].cols != inputs[1].cols {
            return Err(sdk::Error::shape(format!("x and w do not fit: {inputs:?}")));
        }
        Ok(Shapes {
            outputs: vec![ResultShape::Like(0), ResultShape::Rows { of: 0, cols: 1 }],
            saved: vec![ResultShape::Like(0)],
            forward_work: 3,
            backward_work: inputs[0].cols,
        })
    }

    fn forward<T: Number>(attrs: &GateAttrs, call: &mut Forward<'_, T>) -> ApiResult<()> {
        assert_eq!(call.work.len(), 3);
        if attrs.fail {
            panic!("asked to panic");
        }
        let (x, w) = (call.inputs[0], call.inputs[1].row(0));
        call.saved[0].par_rows(1, |i, row| {
            row.iter_mut().zip(x.row(i)).for_each(|(s, x)| *s = T::from_f64(x.to_f64().powi(attrs.power)));
        })?;
        for i in 0..x.rows {
            let powers: Vec<T> = call.saved[0].row(i).to_vec();
            call.outputs[0].row(i).iter_mut().zip(&powers).zip(w).for_each(|((y, p), w)| *y = *p * *w);
            call.outputs[1].row(i)[0] = T::from_f64(x.row(i).iter().map(|x| x.to_f64()).sum());
        }
        Ok(())
    }

    fn backward<T: Number>(attrs: &GateAttrs, call: &mut custom::Backward<'_, T>) -> ApiResult<()> {
        let (x, w) = (call.inputs[0], call.inputs[1].row(0));
        call.work.fill(T::default());
        for i in 0..x.rows {
            let (dy, dz, powers) = (call.output_grads[0].row(i), call.output_grads[1].row(i)[0], call.saved[0].row(i));
            for c in 0..x.cols {
                call.work[c] += dy[c] * powers[c];
                let slope = f64::from(attrs.power) * x.row(i)[c].to_f64().powi(attrs.power - 1);
                call.input_grads[0].row(i)[c] = dy[c] * w[c] * T::from_f64(slope) + dz;
            }
        }
        call.input_grads[1].row(0).copy_from_slice(call.work);
        Ok(())
    }
}

#[derive(Serialize, Deserialize, JsonSchema)]
struct NoAttrs {}

/// y[t] = x[0] + .. + x[t]: mixes rows, Placement::Alone.
struct CumSum;

impl CustomOp for CumSum {
    type Attrs = NoAttrs;
    const NAME: &'static str = "custom-tests.cumsum";
    const SUMMARY: &'static str = "";

    fn shapes(_: &NoAttrs, _: &[Shape]) -> ApiResult<Shapes> {
        Ok(Shapes { outputs: vec![ResultShape::Like(0)], ..Shapes::default() })
    }

    fn forward<T: Number>(_: &NoAttrs, call: &mut Forward<'_, T>) -> ApiResult<()> {
        for i in 0..call.inputs[0].rows {
            let before =
                if i == 0 { vec![T::default(); call.inputs[0].cols] } else { call.outputs[0].row(i - 1).to_vec() };
            let x = call.inputs[0].row(i);
            call.outputs[0].row(i).iter_mut().zip(before).zip(x).for_each(|((y, b), x)| *y = b + *x);
        }
        Ok(())
    }
}

fn custom<O: CustomOp>(attrs: &O::Attrs) -> Custom {
    Custom { name: O::NAME.into(), attrs: serde_json::to_string(attrs).unwrap() }
}

fn test(forward: impl Fn(&mut Recorder<'_>, &[ValueId]) -> Result<Vec<ValueId>> + Sync + 'static) -> OpTest {
    PluginSet::default().add_linked::<TestPlugin>().unwrap();
    OpTest {
        axes: vec![axis("hidden", 6, false), axis("ffn", 4, true)],
        params: vec![
            ("w", vec![Layout::axis("hidden", 1)]),
            ("fc1", vec![Layout::axis("ffn", 1), Layout::axis("hidden", 1)]),
            ("fc2", vec![Layout::axis("hidden", 1), Layout::axis("ffn", 1)]),
        ],
        inputs: vec![Input { name: "x", rows: 4, channels: Layout::axis("hidden", 1), spread: true }],
        ints: vec![],
        tokens: 4,
        settings: vec![],
        state_grads: false,
        labels: None,
        forward: Box::new(forward),
    }
}

fn gate() -> Custom {
    custom::<Gate>(&GateAttrs { power: 3, fail: false })
}

/// Rows spread and whole, a partial sum as input, an input used twice, an output nothing depends on.
#[test]
fn rows_are_placed_as_they_come() {
    test(|cx, inputs| {
        let (w, fc1, fc2) = (cx.param_value(0)?, cx.param_value(1)?, cx.param_value(2)?);
        let both = record(cx, gate(), &[inputs[0], w])?;
        let h = linear::record(cx, Default::default(), &[both[0], fc1])?[0];
        let h = linear::record(cx, Default::default(), &[h, fc2])?[0];
        let y = record(cx, gate(), &[h, w])?[0];
        let y = arith::add(cx, Default::default(), &[y, inputs[0]])?[0];
        Ok(vec![y, both[1]])
    })
    .check();
}

#[test]
fn an_operator_without_placement_is_refused_under_tensor_parallelism() {
    let sum = test(|cx, inputs| {
        let result = record(cx, custom::<CumSum>(&NoAttrs {}), inputs);
        if cx.cx.grid.tp == 1 {
            return Ok(result?.to_vec());
        }
        let e = result.unwrap_err().to_string();
        assert!(e.contains("custom-tests.cumsum declares no placement") && e.contains("grid.tp = 2"), "{e}");
        Ok(vec![])
    });
    sum.run(Grid { tp: 2, ..Grid::SINGLE });
}

#[test]
fn spread_columns_are_refused() {
    let wide = test(|cx, inputs| {
        let fc1 = cx.param_value(1)?;
        let h = linear::record(cx, Default::default(), &[inputs[0], fc1])?[0];
        let e = record(cx, gate(), &[h, h]).unwrap_err().to_string();
        assert!(e.contains("cannot work on spread columns"), "{e}");
        Ok(vec![])
    });
    wide.run(Grid { tp: 2, ..Grid::SINGLE });
}

#[test]
fn errors_of_the_operator_name_it() {
    test(|cx, inputs| {
        let fc2 = cx.param_value(2)?;
        let e = record(cx, gate(), &[inputs[0], fc2]).unwrap_err().to_string();
        assert!(e.contains("custom-tests.gate: x and w do not fit"), "{e}");
        let unknown = Custom { name: "custom-tests.nothing".into(), attrs: "{}".into() };
        let e = record(cx, unknown, inputs).unwrap_err().to_string();
        assert!(e.contains("no loaded plugin has a custom operator \"custom-tests.nothing\""), "{e}");
        let misspelt = Custom { attrs: r#"{"powre": 3}"#.into(), ..gate() };
        let e = record(cx, misspelt, inputs).unwrap_err().to_string();
        assert!(e.contains("unknown key \"powre\"; did you mean \"power\"?"), "{e}");
        Ok(vec![])
    })
    .run(Grid::SINGLE);
}

/// The error of one launch on a 1 x 1 value.
fn failure(op: Custom, backward: bool) -> String {
    PluginSet::default().add_linked::<TestPlugin>().unwrap();
    let one: Sizes = SmallVec::from_iter([Size { rows: 1, cols: 1, ld: 1 }]);
    let both: Sizes = SmallVec::from_iter([one[0], one[0]]);
    let kernel = CustomKernel {
        op: Arc::new(crate::plugin::custom::instance(&op.name, &op.attrs).unwrap()),
        ins: both,
        saved_in: SmallVec::new(),
        grads_in: SmallVec::new(),
        outs: one,
        saved_out: SmallVec::new(),
        work: 3,
        backward,
    };
    let (mut y, mut work) = ([0.0f64], [0.0; 3]);
    let args = Args { ins: &[&[1.0], &[2.0]], outs: &mut [&mut y], ints: &[], int_outs: &mut [], work: &mut work };
    kernel.run_f64(args);
    let first = take_failure().expect("a failure").to_string();
    assert!(take_failure().is_none());
    first
}

#[test]
fn a_failure_while_running_is_kept_for_the_replay() {
    let e = failure(custom::<Gate>(&GateAttrs { power: 3, fail: true }), false);
    assert!(e.starts_with("custom operator custom-tests.gate: panicked in forward: asked to panic ("), "{e}");
    let e = failure(custom::<CumSum>(&NoAttrs {}), true);
    assert_eq!(e, "custom operator custom-tests.cumsum: it has no backward");
}

#[test]
#[should_panic]
fn a_failure_while_running_ends_the_replay() {
    test(|cx, inputs| {
        let w = cx.param_value(0)?;
        Ok(record(cx, custom::<Gate>(&GateAttrs { power: 3, fail: true }), &[inputs[0], w])?[..1].to_vec())
    })
    .run(Grid::SINGLE);
}
