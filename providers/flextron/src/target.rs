//! What the elastifier routes of a model: its axes with their choices, the layers that may be dropped, and the model's
//! size at any of them.

use crate::Result;
use crate::choices::choices;
use crate::config::{Config, Normalize};
use crate::dual::Dual;
use crate::loss::{Choices, Expected, Routed};
use crate::router::{Gate, arg_max};
use crate::sizes::Counts;
use crate::sizes::exact::{Exact, Full, Widths};
use gantry_plugin_api::plan::{AxisSetting, AxisState, Layout, ModelPlan, Source};
use std::collections::BTreeSet;

/// Name of the axis whose units are the layers.
const DEPTH: &str = "depth";

/// A routed axis: one gate of the router.
#[derive(Clone, Debug)]
pub struct RoutedAxis {
    pub gate: Gate,
    pub choices: Choices,
    /// Index of the axis in the plan; none for depth.
    axis: Option<usize>,
    /// Layers that choose for themselves, a row of the gate's output for each; none if all choose alike.
    layers: Option<Vec<usize>>,
}

/// A model and what is routed of it.
#[derive(Clone, Debug)]
pub struct Target {
    plan: ModelPlan,
    pub axes: Vec<RoutedAxis>,
}

impl Target {
    pub fn new(plan: &ModelPlan, config: &Config) -> Result<Target> {
        let normalize = |per_layer: bool| match config.normalize_router_logits {
            Normalize::None => false,
            Normalize::LayerAxes => per_layer,
            Normalize::All => true,
        };
        let mut axes = Vec::new();
        for (name, wanted) in &config.axes {
            let index = plan.axes.iter().position(|axis| &axis.name == name && axis.elastic).ok_or_else(|| {
                let elastic: Vec<&str> = plan.axes.iter().filter(|a| a.elastic).map(|a| a.name.as_str()).collect();
                format!("config.axes.{name}: the model has no such elastic axis; it has {}", elastic.join(", "))
            })?;
            let axis = &plan.axes[index];
            if wanted.per_layer && !axis.per_layer {
                return Err(format!("config.axes.{name}.per_layer: the axis has one width for all layers"));
            }
            let group = axis.group.as_ref().and_then(|g| plan.axes.iter().find(|a| &a.name == g));
            let units = choices(name, &wanted.widths(name)?, axis.size, group.map_or(1, |g| g.size))
                .map_err(|e| format!("config.axes: {e}"))?;
            if let (Some(active), Some(&least)) = (axis.active, units.last())
                && least < active
            {
                return Err(format!(
                    "config.axes.{name}: a width of {least} units is below the {active} that each token passes through"
                ));
            }
            let layers = wanted.per_layer.then(|| layers_of(plan, name));
            let gate = Gate {
                axis: name.clone(),
                rows: layers.as_ref().map_or(1, Vec::len),
                choices: units.len(),
                normalize: normalize(axis.per_layer),
            };
            axes.push(RoutedAxis { gate, choices: Choices::Units(units), axis: Some(index), layers });
        }
        if !config.layer_ranking.is_empty() {
            let ranking = config.layer_ranking.clone();
            check_ranking(plan, &ranking)?;
            let gate = Gate { axis: DEPTH.into(), rows: 1, choices: ranking.len() + 1, normalize: normalize(false) };
            axes.push(RoutedAxis { gate, choices: Choices::Depth(ranking), axis: None, layers: None });
        }
        Ok(Target { plan: plan.clone(), axes })
    }

    /// The router's outputs with their choices, in the order of the axes; `of` gives a gate's numbers.
    pub fn routed(&self, of: impl Fn(&Gate) -> Result<Vec<f64>>) -> Result<Vec<Routed>> {
        self.axes
            .iter()
            .map(|axis| {
                let numbers = of(&axis.gate)?;
                if numbers.len() != axis.gate.len() {
                    let (wants, has) = (axis.gate.len(), numbers.len());
                    return Err(format!("the router's output for {} has {has} numbers, not {wants}", axis.gate.axis));
                }
                let rows = numbers.chunks(axis.gate.choices).map(<[f64]>::to_vec).collect();
                Ok(Routed { choices: axis.choices.clone(), rows })
            })
            .collect()
    }

    /// Mixtures of the choices, with the outputs that their weights are.
    pub fn mixtures(&self, outputs: &[Routed]) -> (Vec<AxisSetting>, Vec<Source>) {
        let (mut settings, mut sources) = (Vec::new(), Vec::new());
        for (axis, routed) in self.axes.iter().zip(outputs) {
            let name = || axis.gate.axis.clone();
            let mut put = |layer, state, entries| {
                sources.push(Source { setting: settings.len(), output: axis.gate.output(), entries });
                settings.push(AxisSetting { axis: name(), layer, state });
            };
            match &routed.choices {
                Choices::Units(units) => {
                    for (row, p) in routed.rows.iter().enumerate() {
                        let state = AxisState::Soft { choices: units.clone(), p: p.clone() };
                        let entries = (0..units.len()).map(|i| (i, row * units.len() + i)).collect();
                        put(axis.layers.as_ref().map(|layers| layers[row]), state, entries);
                    }
                }
                Choices::Depth(ranking) => {
                    for (k, &layer) in ranking.iter().enumerate() {
                        // Kept where at most k layers are dropped.
                        let keep: f64 = routed.rows[0][..=k].iter().sum();
                        let state = AxisState::Soft { choices: vec![1, 0], p: vec![keep, 1.0 - keep] };
                        put(Some(layer), state, (0..=k).map(|i| (0, i)).collect());
                    }
                }
            }
        }
        (settings, sources)
    }

    /// The likeliest choices, at their real size.
    pub fn slices(&self, outputs: &[Routed]) -> Vec<AxisSetting> {
        let mut settings = Vec::new();
        for (axis, routed) in self.axes.iter().zip(outputs) {
            for (row, p) in routed.rows.iter().enumerate() {
                let best = arg_max(p);
                let mut put = |layer, n| {
                    settings.push(AxisSetting { axis: axis.gate.axis.clone(), layer, state: AxisState::Slice { n } });
                };
                match &routed.choices {
                    Choices::Units(units) => put(axis.layers.as_ref().map(|layers| layers[row]), units[best]),
                    Choices::Depth(ranking) => ranking[..best].iter().for_each(|&layer| put(Some(layer), 0)),
                }
            }
        }
        settings
    }

    /// Sizes of the full model.
    pub fn full(&self, at: crate::sizes::Inference) -> Counts {
        Exact::new(&self.plan, &Full(&self.plan)).counts(at)
    }

    /// Sizes at expected widths, with derivatives by the outputs.
    pub fn expected(&self, outputs: &[Routed], at: crate::sizes::Inference) -> Counts {
        let widths = Routes { target: self, expected: Expected::of(outputs) };
        Exact::new(&self.plan, &widths).counts(at)
    }
}

/// Expected widths of a target's axes.
struct Routes<'a> {
    target: &'a Target,
    expected: Expected,
}

impl Widths for Routes<'_> {
    fn units(&self, axis: usize, layer: Option<usize>) -> Dual {
        let Some(at) = self.target.axes.iter().position(|routed| routed.axis == Some(axis)) else {
            return Dual::constant(self.target.plan.axes[axis].size as f64);
        };
        let rows = &self.expected.units[at];
        let row = match (&self.target.axes[at].layers, layer) {
            (Some(layers), Some(layer)) => layers.iter().position(|l| *l == layer),
            _ => Some(0),
        };
        // A layer without the axis has nothing of it.
        row.map_or_else(|| Dual::constant(0.0), |row| rows[row].clone())
    }

    fn keep(&self, layer: usize) -> Dual {
        self.expected.keep.get(&layer).cloned().unwrap_or_else(|| Dual::constant(1.0))
    }
}

fn check_ranking(plan: &ModelPlan, ranking: &[usize]) -> Result<()> {
    let layers: BTreeSet<usize> = plan.blocks.iter().filter_map(|block| block.layer).collect();
    let mut seen = BTreeSet::new();
    for layer in ranking {
        if !layers.contains(layer) {
            return Err(format!("config.layer_ranking holds {layer}, but the model has {} layers", layers.len()));
        }
        if !seen.insert(layer) {
            return Err(format!("config.layer_ranking holds layer {layer} twice"));
        }
    }
    if ranking.len() == layers.len() {
        return Err(format!("config.layer_ranking holds all {} layers; at least one must stay", layers.len()));
    }
    Ok(())
}

/// Layers with a parameter over an axis.
fn layers_of(plan: &ModelPlan, axis: &str) -> Vec<usize> {
    let blocks = plan.params.iter().filter(|p| p.dims.iter().any(|dim| mentions(dim, axis))).map(|p| p.block);
    let layers: BTreeSet<usize> = blocks.filter_map(|block| plan.blocks.get(block)?.layer).collect();
    layers.into_iter().collect()
}

fn mentions(layout: &Layout, name: &str) -> bool {
    match layout {
        Layout::Fixed(_) => false,
        Layout::Axis { axis, .. } => axis == name,
        Layout::Seq(parts) => parts.iter().any(|(_, part)| mentions(part, name)),
        Layout::Repeat { axis, inner } => axis == name || mentions(inner, name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gantry_plugin_api::plan::{Axis, Block, Init, Param};
    use gantry_plugin_api::sdk::Configure;
    use serde_json::{Value, json};

    /// Two layers over a residual stream of 8; the second has experts.
    fn plan() -> ModelPlan {
        let mut plan = ModelPlan {
            axes: vec![
                Axis::new("hidden", 8).elastic(),
                Axis::new("groups", 2),
                Axis::new("heads", 4).grouped_by("groups").elastic_per_layer(),
                Axis::new("experts", 6).elastic_per_layer().active(2),
            ],
            ..ModelPlan::default()
        };
        for (layer, axis) in ["heads", "experts"].into_iter().enumerate() {
            let block = plan.add_block(Block::new(format!("layer{layer}"), "test").layer(layer));
            let dims = [Layout::axis(axis, 1), Layout::axis("hidden", 1)];
            plan.add_param(Param::new(format!("w{layer}"), block, dims, Init::Zeros));
        }
        plan
    }

    fn target(axes: Value, ranking: &[usize]) -> Result<Target> {
        let config = json!({"budget_list": [0.5], "axes": axes, "layer_ranking": ranking});
        let config: Config = serde_json::from_value(config).map_err(|e| e.to_string())?;
        crate::elastifier::Flextron::new(config.clone()).map_err(|e| e.message)?;
        Target::new(&plan(), &config)
    }

    #[test]
    fn layers_choose_for_themselves_where_they_have_the_axis() {
        let target =
            target(json!({"experts": {"units": [6, 4], "per_layer": true}, "hidden": {"units": [8, 4]}}), &[0]);
        let target = target.unwrap();
        let gates: Vec<(&str, usize, usize)> =
            target.axes.iter().map(|a| (a.gate.axis.as_str(), a.gate.rows, a.gate.choices)).collect();
        assert_eq!(gates, [("experts", 1, 2), ("hidden", 1, 2), ("depth", 1, 2)]);
        let outputs = target.routed(|gate| Ok([0.25, 0.75].repeat(gate.rows))).unwrap();
        let (settings, sources) = target.mixtures(&outputs);
        assert_eq!(settings[0].layer, Some(1));
        let keep = AxisState::Soft { choices: vec![1, 0], p: vec![0.25, 0.75] };
        assert_eq!((&settings[2].state, settings[2].layer), (&keep, Some(0)));
        assert_eq!(sources[2].entries, [(0, 0)]);
        let slices = target.slices(&outputs);
        assert_eq!(
            slices.iter().map(|s| &s.state).collect::<Vec<_>>(),
            [&AxisState::Slice { n: 4 }, &AxisState::Slice { n: 4 }, &AxisState::Slice { n: 0 },]
        );
        // Layer 0, kept with probability 0.25: 4 heads x 5 channels; layer 1: 4.5 experts x 5 channels.
        let counts = target.expected(&outputs, Default::default());
        assert_eq!(counts.total.value, 0.25 * 20.0 + 4.5 * 5.0);
    }

    #[test]
    fn mistakes_name_the_key_and_the_numbers() {
        let wrong = |axes: Value, ranking: &[usize]| target(axes, ranking).map(drop).unwrap_err();
        assert!(
            wrong(json!({"head": {"units": [4]}}), &[]).contains("no such elastic axis; it has hidden, heads, experts")
        );
        assert!(wrong(json!({"groups": {"units": [2]}}), &[]).contains("no such elastic axis"));
        assert!(wrong(json!({"heads": {"units": [4, 3]}}), &[]).contains("choose multiples of 2"));
        assert!(wrong(json!({"experts": {"units": [6, 1]}}), &[]).contains("1 units is below the 2"));
        assert!(wrong(json!({"hidden": {"units": [8], "per_layer": true}}), &[]).contains("one width for all layers"));
        assert!(wrong(json!({"hidden": {}}), &[]).contains("either units or fractions"));
        assert!(wrong(json!({}), &[]).contains("name at least one axis"));
        assert!(wrong(json!({}), &[5]).contains("holds 5, but the model has 2 layers"));
        assert!(wrong(json!({}), &[1, 1]).contains("layer 1 twice"));
        assert!(wrong(json!({}), &[1, 0]).contains("at least one must stay"));
    }
}
