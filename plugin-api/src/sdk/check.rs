//! What can be said of a declaration without a host: indices, names and numbers that cannot be right.
//!
//! Both sides check: the provider's side before numbers become JSON, which has no NaN; the host's side because it
//! trusts no plan it is given.

use super::{Error, Result};
use crate::plan::{AxisSetting, AxisState, Choice, Init, Layout, ModelPlan, Values};
use std::collections::HashSet;

impl ModelPlan {
    /// Refuses a plan that names blocks or axes it does not have, says a name twice, or carries a number that is not
    /// finite.
    pub fn check(&self) -> Result<()> {
        let axes: HashSet<&str> = self.axes.iter().map(|a| a.name.as_str()).collect();
        unique("axis", self.axes.iter().map(|a| a.name.as_str()))?;
        unique("parameter", self.params.iter().map(|p| p.name.as_str()))?;
        unique("buffer", self.buffers.iter().map(|b| b.name.as_str()))?;
        unique("port", self.ports.iter().map(|p| p.name.as_str()))?;
        for axis in &self.axes {
            let place = || format!("axis {}", axis.name);
            if let Some(active) = axis.active.filter(|n| *n == 0 || *n > axis.size) {
                let (place, size) = (place(), axis.size);
                return Err(Error::shape(format!("{place}: a token passes through {active} of its {size} units")));
            }
            if let Some(group) = &axis.group {
                let Some(group) = self.axes.iter().find(|a| a.name == *group) else {
                    return Err(Error::shape(format!("{}: is grouped by \"{group}\", which is no axis", place())));
                };
                if group.size == 0 || axis.size % group.size != 0 {
                    return Err(Error::shape(format!(
                        "{}: {} units cannot be divided over the {} units of {}",
                        place(),
                        axis.size,
                        group.size,
                        group.name
                    )));
                }
            }
        }
        for block in &self.blocks {
            let place = format!("block {}", block.path);
            finite(&place, "extra_flops_per_token", block.extra_flops_per_token)?;
            let dims = block.memory.iter().flat_map(|footprint| &footprint.dims);
            dims.into_iter().try_for_each(|layout| check_layout(&place, layout, &axes))?;
        }
        for p in &self.params {
            let place = format!("parameter {}", p.name);
            self.check_tensor(&place, p.block, &p.dims, p.init, &axes)?;
            finite(&place, "lr_mult", p.lr_mult)?;
        }
        for b in &self.buffers {
            self.check_tensor(&format!("buffer {}", b.name), b.block, &b.dims, b.init, &axes)?;
        }
        for port in &self.ports {
            if let Some(layout) = &port.channels {
                check_layout(&format!("port {}", port.name), layout, &axes)?;
            }
        }
        Ok(())
    }

    fn check_tensor(&self, place: &str, block: usize, dims: &[Layout], init: Init, axes: &HashSet<&str>) -> Result<()> {
        if block >= self.blocks.len() {
            let n = self.blocks.len();
            return Err(Error::shape(format!("{place}: belongs to block {block}, but the plan has {n} blocks")));
        }
        dims.iter().try_for_each(|layout| check_layout(place, layout, axes))?;
        let numbers: &[(&str, f64)] = &match init {
            Init::Zeros | Init::Ones => vec![],
            Init::Constant(value) => vec![("constant", value)],
            Init::Normal { std } => vec![("std", std)],
            Init::Uniform { low, high } | Init::LogUniform { low, high } => vec![("low", low), ("high", high)],
            Init::InverseSoftplus { low, high, floor } => vec![("low", low), ("high", high), ("floor", floor)],
        };
        numbers.iter().try_for_each(|(name, value)| finite(&format!("{place}: init"), name, *value))
    }
}

fn check_layout(place: &str, layout: &Layout, axes: &HashSet<&str>) -> Result<()> {
    let known = |axis: &str| {
        if axes.contains(axis) {
            return Ok(());
        }
        Err(Error::shape(format!("{place}: uses axis \"{axis}\", which the plan does not declare")))
    };
    match layout {
        Layout::Fixed(_) => Ok(()),
        Layout::Axis { axis, .. } => known(axis),
        Layout::Seq(parts) => parts.iter().try_for_each(|(_, part)| check_layout(place, part, axes)),
        Layout::Repeat { axis, inner } => {
            known(axis)?;
            check_layout(place, inner, axes)
        }
    }
}

/// Refuses states whose numbers are not finite or whose choices and probabilities do not pair up.
pub fn check_settings(settings: &[AxisSetting]) -> Result<()> {
    for setting in settings {
        let place = match setting.layer {
            Some(layer) => format!("state of axis {} on layer {layer}", setting.axis),
            None => format!("state of axis {}", setting.axis),
        };
        match &setting.state {
            AxisState::Soft { choices, p } => {
                if choices.len() != p.len() || choices.is_empty() {
                    let (c, p) = (choices.len(), p.len());
                    return Err(Error::shape(format!("{place}: {c} choices with {p} probabilities")));
                }
                p.iter().try_for_each(|p| finite(&place, "p", *p))?;
            }
            AxisState::Hard { gain, .. } => finite(&place, "gain", *gain)?,
            AxisState::Full | AxisState::Slice { .. } => {}
        }
    }
    Ok(())
}

/// Refuses numbers that are not finite, which JSON does not have.
pub fn check_values(what: &str, values: &Values) -> Result<()> {
    let place = |name: &String| format!("{what}: {name}");
    values.iter().try_for_each(|(name, list)| list.iter().try_for_each(|x| finite(&place(name), "a value", *x)))
}

/// Refuses a choice with numbers that are not finite, or with sources of settings it does not have.
pub fn check_choice(choice: &Choice) -> Result<()> {
    check_settings(&choice.settings)?;
    if let Some(loss) = &choice.loss {
        finite(&loss.name, "the loss", loss.value)?;
        check_values(&loss.name, &loss.gradients)?;
    }
    choice.params.iter().try_for_each(|x| finite("choice", "params", *x))?;
    choice.metrics.iter().try_for_each(|(name, x)| finite("choice", name, *x))?;
    for source in &choice.sources {
        let numbers = match choice.settings.get(source.setting).map(|setting| &setting.state) {
            Some(AxisState::Soft { p, .. }) => p.len(),
            Some(AxisState::Hard { .. }) => 1,
            _ => 0,
        };
        if let Some((entry, _)) = source.entries.iter().find(|(entry, _)| *entry >= numbers) {
            let setting = source.setting;
            return Err(Error::shape(format!(
                "choice: number {entry} of setting {setting} comes from {}, but the setting has {numbers} numbers",
                source.output
            )));
        }
    }
    Ok(())
}

fn finite(place: &str, what: &str, value: f64) -> Result<()> {
    if value.is_finite() {
        return Ok(());
    }
    Err(Error::plugin(format!("{place}: {what} is {value}; it must be a finite number")))
}

fn unique<'a>(what: &str, names: impl Iterator<Item = &'a str>) -> Result<()> {
    let mut seen = HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(Error::plugin(format!("{what} \"{name}\" is declared twice")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Axis, Block, Param};
    use serde_json::{from_value, json};

    fn plan() -> ModelPlan {
        let axis: Axis = from_value(json!({"name": "hidden", "size": 8})).unwrap();
        let block: Block = from_value(json!({"path": "b", "kind": "k"})).unwrap();
        let param = json!({"name": "w", "block": 0, "dims": [{"axis": {"axis": "hidden", "unit": 1}}], "init": "ones"});
        let param: Param = from_value(param).unwrap();
        ModelPlan { axes: vec![axis], blocks: vec![block], params: vec![param], ..ModelPlan::default() }
    }

    fn message(change: impl FnOnce(&mut ModelPlan)) -> String {
        let mut plan = plan();
        change(&mut plan);
        plan.check().unwrap_err().message
    }

    #[test]
    fn what_cannot_be_right_is_named() {
        plan().check().unwrap();
        let nan = message(|p| p.params[0].init = Init::Normal { std: f64::NAN });
        assert_eq!(nan, "parameter w: init: std is NaN; it must be a finite number");
        assert!(message(|p| p.params[0].block = 1).contains("block 1, but the plan has 1 blocks"));
        assert!(message(|p| p.params[0].dims[0] = Layout::axis("hiden", 1)).contains("axis \"hiden\""));
        assert!(message(|p| p.params.push(p.params[0].clone())).contains("\"w\" is declared twice"));
        assert!(message(|p| p.axes[0].group = Some("g".into())).contains("\"g\", which is no axis"));
        let soft = AxisState::Soft { choices: vec![8, 4], p: vec![1.0] };
        let soft = [AxisSetting { axis: "hidden".into(), layer: Some(2), state: soft }];
        assert!(check_settings(&soft).unwrap_err().message.contains("on layer 2: 2 choices with 1 probabilities"));
    }
}
