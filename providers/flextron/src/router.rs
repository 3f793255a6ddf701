//! The router: a gate for each axis, from what a budget looks like to probabilities of the axis's choices.
//!
//! ```text
//! logits = W2 leaky_relu(W1 budget)          [rows, choices]; a row for all layers, or one for each
//! logits = logits / std(logits)              of each row, where asked for
//! p = softmax((scaler * logits + noise) / tau)
//! ```
//!
//! The weights are N(0, std) and have no biases. Budget, noise, tau and scaler are inputs, so that one recording serves
//! every micro-batch; without noise the largest logit wins. A hard sample is a matter of what is made of p, see
//! [`straight_through`].

use gantry_plugin_api::ops::{Act, GumbelSoftmax};
use gantry_plugin_api::plan::{Axis, Block, Init, Layout, ModelPlan, Param, Port, PortKind};
use gantry_plugin_api::sdk::{Cx, ParamId, Result, Tensor};

/// Input of the router: a budget over the list of budgets, [1, budgets].
pub const BUDGET: &str = "budget";
/// Step input: temperature.
pub const TAU: &str = "tau";
/// Step input: factor on the logits.
pub const SCALER: &str = "scaler";
/// Dimensions of a gate's output after its rows.
const CHOICES: &str = "choices";

/// One axis's part of the router.
#[derive(Clone, Debug, PartialEq)]
pub struct Gate {
    /// Name of the axis.
    pub axis: String,
    /// Rows of its output: 1, or the layers that choose for themselves.
    pub rows: usize,
    pub choices: usize,
    /// Divide each row of logits by its standard deviation; a single choice has none.
    pub normalize: bool,
}

impl Gate {
    /// Input: noise on its logits, [1, rows x choices].
    pub fn noise(&self) -> String {
        format!("noise.{}", self.axis)
    }

    /// Output: its probabilities, [1, rows x choices].
    pub fn output(&self) -> String {
        format!("p.{}", self.axis)
    }

    /// Numbers of its output.
    pub fn len(&self) -> usize {
        self.rows * self.choices
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn rows_axis(&self) -> String {
        format!("rows.{}", self.axis)
    }
}

/// The router's sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct Router {
    /// Entries of the list of budgets.
    pub budgets: usize,
    pub inter_dim: usize,
    /// Standard deviation of its initial weights.
    pub std: f64,
    /// Factor on the learning rate of its weights.
    pub lr_mult: f64,
    pub gates: Vec<Gate>,
}

/// What a gate computes.
#[derive(Clone, Copy, Debug)]
pub struct GateOutput {
    /// Before scaler and noise, [1, rows, choices].
    pub logits: Tensor,
    /// [1, rows, choices].
    pub p: Tensor,
}

impl Router {
    /// Its parameters, two for each gate in the order of the gates, and its ports.
    pub fn plan(&self) -> ModelPlan {
        let mut plan = ModelPlan::default();
        let block = plan.add_block(Block::new("router", "router"));
        plan.ports.push(Port::input(BUDGET, PortKind::Activation).channels(Layout::Fixed(self.budgets)));
        for gate in &self.gates {
            plan.axes.push(Axis::new(&gate.rows_axis(), gate.rows));
            let outputs = || Layout::axis(&gate.rows_axis(), gate.choices);
            let weights = [
                (0, [Layout::Fixed(self.inter_dim), Layout::Fixed(self.budgets)]),
                (2, [outputs(), Layout::Fixed(self.inter_dim)]),
            ];
            for (position, dims) in weights {
                let name = format!("router.gate_{}.{position}.weight", gate.axis);
                let mut param = Param::new(name, block, dims, Init::Normal { std: self.std });
                (param.decay, param.lr_mult) = (false, self.lr_mult);
                plan.add_param(param);
            }
            plan.ports.push(Port::input(&gate.noise(), PortKind::Activation).channels(outputs()));
            plan.ports.push(Port::output(&gate.output(), PortKind::Activation).channels(outputs()));
        }
        plan
    }

    /// Records every gate.
    pub fn record(&self, cx: &Cx) -> Result<Vec<GateOutput>> {
        let budget = cx.batch(BUDGET)?;
        let (tau, scaler) = (cx.step_input(TAU)?, cx.step_input(SCALER)?);
        let gates = self.gates.iter().enumerate();
        gates
            .map(|(i, gate)| {
                let path = |what: &str| format!("router.gate_{}.{what}", gate.axis);
                let h = cx.linear(&path("0"), budget, ParamId(2 * i as u32))?;
                let h = cx.activation(&path("1"), h, Act::LeakyRelu)?;
                let logits = cx.linear(&path("2"), h, ParamId(2 * i as u32 + 1))?;
                let rows = gate.rows_axis();
                let mut logits = cx.unflatten(logits, &[&rows, CHOICES])?;
                if gate.normalize && gate.choices > 1 {
                    logits = cx.std_scale(&path("std"), logits)?;
                }
                let noise = cx.unflatten(cx.batch(&gate.noise())?, &[&rows, CHOICES])?;
                let attrs = GumbelSoftmax::default();
                let p = cx.gumbel_softmax_with_noise(&path("sample"), logits, tau, scaler, noise, attrs)?;
                Ok(GateOutput { logits, p })
            })
            .collect()
    }

    /// Records every gate and delivers its output.
    pub fn forward(&self, cx: &Cx) -> Result<()> {
        let outputs = self.record(cx)?;
        self.gates.iter().zip(outputs).try_for_each(|(gate, output)| cx.output(&gate.output(), output.p))
    }
}

/// The first largest entry of a row.
pub fn arg_max(row: &[f64]) -> usize {
    row.iter().enumerate().fold(0, |best, (i, p)| if *p > row[best] { i } else { best })
}

/// The hard sample of a row: one at its largest entry. Its gradient is that of the row, as if it were the row.
pub fn straight_through(row: &[f64]) -> Vec<f64> {
    let best = arg_max(row);
    (0..row.len()).map(|i| if i == best { 1.0 } else { 0.0 }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn router() -> Router {
        let gate = |axis: &str, rows, choices| Gate { axis: axis.into(), rows, choices, normalize: false };
        Router { budgets: 3, inter_dim: 4, std: 0.1, lr_mult: 100.0, gates: vec![gate("a", 1, 2), gate("b", 5, 3)] }
    }

    #[test]
    fn the_plan_has_two_weights_a_gate_and_is_valid() {
        let plan = router().plan();
        plan.check().unwrap();
        let names: Vec<&str> = plan.params.iter().map(|p| p.name.as_str()).collect();
        assert_eq!(names[2..], ["router.gate_b.0.weight", "router.gate_b.2.weight"]);
        assert!(plan.params.iter().all(|p| !p.decay && p.lr_mult == 100.0));
    }

    #[test]
    fn a_hard_sample_is_one_at_the_largest_entry() {
        assert_eq!(straight_through(&[0.2, 0.5, 0.3]), [0.0, 1.0, 0.0]);
        assert_eq!(straight_through(&[0.4, 0.4, 0.2]), [1.0, 0.0, 0.0]);
    }
}
