//! Kind flextron_router: the recorded router with given noise, its probabilities and the gradients of its weights.

use super::super::case::Result;
use super::super::compare::Check;
use super::super::graph::{Graph, Output};
use super::{all_compared, flag, number, numbers, rows, size, sizes, text};
use flextron::budget::Budgets;
use flextron::router::{Gate, Router, SCALER, TAU, straight_through};
use flextron::schedule::{scaler, tau};
use gantry::program::recorder::Recorder;
use gantry_kernels::Element;
use gantry_plugin_api::abi::host::with_cx;
use gantry_plugin_api::ops::Scale;
use gantry_plugin_api::plan::PortKind;
use serde_json::Value;

/// An axis as the reference names it in cases, in weights, the layers it may differ on, and whether its logits are ever
/// divided by their deviation.
struct Axis {
    name: &'static str,
    gate: &'static str,
    symbol: char,
    per_layer: Option<&'static str>,
}

const AXES: [Axis; 5] = [
    Axis { name: "mamba", gate: "gate_mamba", symbol: 'M', per_layer: Some("hm") },
    Axis { name: "mlp", gate: "gate_mlp", symbol: 'E', per_layer: Some("hf") },
    Axis { name: "moe_expert", gate: "gate_moe_expert", symbol: 'E', per_layer: Some("he") },
    Axis { name: "emb", gate: "gate_emb", symbol: ' ', per_layer: None },
    Axis { name: "skip", gate: "gate_skip_layer", symbol: ' ', per_layer: None },
];

/// Names outlive the program that is made of them.
fn lasting(name: String) -> &'static str {
    Box::leak(name.into_boxed_str())
}

fn gate(axis: &Axis, row: &Value, pattern: &str) -> Result<Gate> {
    let choices = match axis.name {
        "skip" => sizes(&row["layer_ranking_list"])?.len() + 1,
        name => sizes(&row["int_lists"][name])?.len(),
    };
    let rows = match axis.per_layer {
        Some(key) if flag(row, key)? => pattern.chars().filter(|&c| c == axis.symbol).count(),
        _ => 1,
    };
    let normalize = flag(row, "norm")? && axis.per_layer.is_some();
    Ok(Gate { axis: axis.name.into(), rows, choices, normalize })
}

pub fn router<T: Element>(check: &mut Check<'_>) -> Result<()> {
    let pattern = text(&check.case.json, "hybrid_layer_pattern")?;
    for row in rows(check.case)? {
        one::<T>(check, row, pattern)?;
    }
    all_compared(check)
}

fn one<T: Element>(check: &mut Check<'_>, row: &Value, pattern: &str) -> Result<()> {
    let case = check.case;
    let name = |part: &str| format!("case{}.{part}", row["case"]);
    let budgets = Budgets::new(&numbers(&row["budgets"])?, None)?;
    let vector = budgets.one_hot(number(row, "budget")?, true);
    check.numbers(&name("budget_vector"), &vector, &numbers(&row["budget_vector"])?, 1)?;
    let iteration = size(row, "it")? as u64;
    let tau = tau(number(row, "tau_init")?, number(row, "tau_decay")?, iteration);
    let scale = scaler(number(row, "s0")?, number(row, "s1")?, iteration, size(row, "train_iters")? as u64);
    check.numbers(&name("tau"), &[tau], &[number(row, "tau")?], 1)?;
    check.numbers(&name("scale"), &[scale], &[number(row, "scale")?], 1)?;

    let present: Vec<&Axis> = AXES.iter().filter(|axis| case.has(&name(&format!("in.noise.{}", axis.name)))).collect();
    let gates = present.iter().map(|axis| gate(axis, row, pattern)).collect::<Result<Vec<Gate>>>()?;
    let router = Router { budgets: budgets.list.len(), inter_dim: size(row, "dim")?, std: 0.1, lr_mult: 1.0, gates };
    let plan = router.plan();
    let mut params = Vec::new();
    let weights = present.iter().flat_map(|axis| [(axis, 0), (axis, 2)]);
    for ((axis, position), param) in weights.clone().zip(&plan.params) {
        let values = case.data(&name(&format!("w.{}.{position}.weight", axis.gate)))?;
        params.push((lasting(param.name.clone()), param.dims.clone(), values));
    }
    let mut inputs = Vec::new();
    for port in plan.ports.iter().filter(|port| port.kind == PortKind::Activation) {
        let Some(channels) = port.channels.clone() else { continue };
        let values = match port.name.strip_prefix("noise.") {
            Some(axis) => case.data(&name(&format!("in.noise.{axis}")))?,
            None if port.name == "budget" => vector.clone(),
            None => continue,
        };
        inputs.push((lasting(port.name.clone()), channels, values));
    }
    let mut seeds = Vec::new();
    for axis in &present {
        seeds.push((axis.name, case.data(&name(&format!("in.dy.{}", axis.name)))?));
    }
    let graph = Graph {
        axes: plan.axes.clone(),
        params,
        inputs,
        scalars: vec![(TAU, tau), (SCALER, scale)],
        tokens: 1,
        seeds,
        ..Graph::default()
    };
    let forward = |cx: &mut Recorder<'_>| {
        let outputs = with_cx(cx, |cx| {
            let mut outputs = Vec::new();
            for (axis, output) in present.iter().zip(router.record(cx)?) {
                outputs.push((axis.name.to_string(), output.p));
                let [scaled] = cx.op("scaled", &Scale { by: scale }, &[output.logits])?;
                outputs.push((format!("logits.{}", axis.name), scaled));
            }
            Ok(outputs)
        });
        let outputs = outputs.map_err(|e| e.to_string())?.into_iter();
        let resolved = outputs.map(|(name, tensor)| Ok(Output { name, id: cx.resolve(tensor)?, channels: None }));
        resolved.collect::<gantry::error::Result<Vec<Output>>>().map_err(|e| e.to_string())
    };
    let results = graph.run::<T>(&forward)?;
    for (axis, gate) in present.iter().zip(&router.gates) {
        let p = &results[axis.name];
        let p: Vec<f64> = match flag(row, "hard")? {
            true => p.chunks(gate.choices).flat_map(straight_through).collect(),
            false => p.clone(),
        };
        check.tensor(&name(&format!("out.probs.{}", axis.name)), &p)?;
        let logits = format!("logits.{}", axis.name);
        check.tensor(&name(&format!("out.{logits}")), &results[&logits])?;
    }
    for ((axis, position), param) in weights.zip(&plan.params) {
        let grad = &results[&format!("grad.{}", param.name)];
        check.tensor(&name(&format!("grad.w.{}.{position}.weight", axis.gate)), grad)?;
    }
    Ok(())
}
