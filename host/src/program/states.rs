//! States of elastic axes as a program sees them: what is fixed in the record, and what is data.
//!
//! The kind of a state and its widths are part of a program's signature; mixture weights and gains are inputs, so that
//! one program serves every micro-batch with the same widths.

use super::dims::AxisKey;
use crate::error::{Error, Result};
use gantry_plugin_api::plan::{Axis, AxisSetting, AxisState, ModelPlan};
use std::collections::BTreeMap;

/// Name of the axis whose units are the layers themselves.
pub const DEPTH: &str = "depth";

/// The recorded part of an axis state.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StateKey {
    Soft { choices: Vec<usize> },
    Hard { n: usize, gain: bool },
    Slice { n: usize },
}

/// Where a state applies.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    Axis(AxisKey),
    Depth(u16),
}

/// The states of a micro-batch: recorded keys, and the numbers they take as inputs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct States {
    pub keys: BTreeMap<Place, StateKey>,
    pub data: BTreeMap<String, Vec<f64>>,
    /// Of which setting an input's numbers are.
    pub settings: BTreeMap<String, usize>,
}

/// Input name of a state's numbers.
pub fn input_name(place: &Place) -> String {
    match place {
        Place::Axis(AxisKey { axis, layer: None }) => format!("state.{axis}"),
        Place::Axis(AxisKey { axis, layer: Some(layer) }) => format!("state.{axis}.{layer}"),
        Place::Depth(layer) => format!("state.depth.{layer}"),
    }
}

impl States {
    /// Checks an elastifier's settings against the plan and resolves them.
    pub fn resolve(plan: &ModelPlan, settings: &[AxisSetting]) -> Result<States> {
        let mut states = States::default();
        let layers: Vec<usize> = plan.blocks.iter().filter_map(|block| block.layer).collect();
        for (number, setting) in settings.iter().enumerate() {
            let (places, size) = places(plan, &layers, setting)?;
            let (key, data) = key(setting, size)?;
            for place in places {
                match &key {
                    None => {
                        states.keys.remove(&place);
                    }
                    Some(key) => {
                        if let Some(data) = &data {
                            states.data.insert(input_name(&place), data.clone());
                            states.settings.insert(input_name(&place), number);
                        }
                        states.keys.insert(place, key.clone());
                    }
                }
            }
        }
        Ok(states)
    }

    pub fn get(&self, key: AxisKey) -> Option<&StateKey> {
        self.keys.get(&Place::Axis(key))
    }

    pub fn depth(&self, layer: u16) -> Option<&StateKey> {
        self.keys.get(&Place::Depth(layer))
    }
}

/// Places a setting covers, and the size of its axis.
fn places(plan: &ModelPlan, layers: &[usize], setting: &AxisSetting) -> Result<(Vec<Place>, usize)> {
    let AxisSetting { axis: name, layer, .. } = setting;
    if let Some(layer) = layer
        && !layers.contains(layer)
    {
        return Err(Error::plugin(format!(
            "the elastifier sets axis {name:?} on layer {layer}, but the model has {} layers",
            layers.len()
        )));
    }
    let on: Vec<usize> = layer.map_or_else(|| layers.to_vec(), |layer| vec![layer]);
    if name == DEPTH {
        return Ok((on.into_iter().map(|layer| Place::Depth(layer as u16)).collect(), 1));
    }
    let Some(index) = plan.axes.iter().position(|axis| &axis.name == name) else {
        let elastic: Vec<&str> = plan.axes.iter().filter(|a| a.elastic).map(|a| a.name.as_str()).collect();
        return Err(Error::plugin(format!(
            "the elastifier sets axis {name:?}, which the model does not have; its elastic axes are {}",
            elastic.join(", ")
        )));
    };
    let Axis { elastic, per_layer, size, .. } = plan.axes[index];
    if !elastic {
        return Err(Error::plugin(format!(
            "the elastifier sets axis {name:?}, which the model does not declare elastic"
        )));
    }
    let key = |layer| Place::Axis(AxisKey { axis: index as u16, layer });
    if per_layer {
        Ok((on.into_iter().map(|layer| key(Some(layer as u16))).collect(), size))
    } else if layer.is_some() {
        Err(Error::plugin(format!(
            "axis {name:?} has one width for all layers, but the elastifier sets it on one layer"
        )))
    } else {
        Ok((vec![key(None)], size))
    }
}

/// The recorded key of a setting (none for `Full`) and its numbers.
fn key(setting: &AxisSetting, size: usize) -> Result<(Option<StateKey>, Option<Vec<f64>>)> {
    let depth = setting.axis == DEPTH;
    let bad = |n: usize| {
        Error::plugin(format!(
            "the elastifier sets axis {:?} to {n} units; it has {size} and needs at least one",
            setting.axis
        ))
    };
    let check = |n: usize| if n > size || (n == 0 && !depth) { Err(bad(n)) } else { Ok(()) };
    match &setting.state {
        AxisState::Full => Ok((None, None)),
        AxisState::Slice { n } | AxisState::Hard { n, .. } if depth => {
            check(*n)?;
            Ok((if *n == 1 { None } else { Some(StateKey::Slice { n: 0 }) }, None))
        }
        AxisState::Slice { n } => {
            check(*n)?;
            Ok((Some(StateKey::Slice { n: *n }), None))
        }
        AxisState::Hard { n, gain } => {
            check(*n)?;
            if *gain == 1.0 {
                Ok((Some(StateKey::Hard { n: *n, gain: false }), None))
            } else {
                Ok((Some(StateKey::Hard { n: *n, gain: true }), Some(vec![*gain])))
            }
        }
        AxisState::Soft { choices, p } => {
            choices.iter().try_for_each(|&n| check(n))?;
            if choices.len() != p.len() || choices.is_empty() {
                return Err(Error::plugin(format!(
                    "the elastifier gives axis {:?} {} choices with {} weights",
                    setting.axis,
                    choices.len(),
                    p.len()
                )));
            }
            Ok((Some(StateKey::Soft { choices: choices.clone() }), Some(p.clone())))
        }
        other => Err(Error::plugin(format!("this host does not know the axis state {other:?}"))),
    }
}
