//! Kinds rmsnorm, layernorm, gated_rmsnorm.

use super::case::{Case, Result};
use super::compare::Check;
use super::graph::{Graph, provider};
use gantry_kernels::Element;
use gantry_plugin_api::ops::GatedNorm;
use gantry_plugin_api::plan::{Axis, Layout};
use gantry_plugin_api::sdk::ParamId;

/// Rows and channels of in.x.
fn sizes(case: &Case) -> Result<(usize, usize)> {
    let x = case.tensor("in.x")?;
    let channels = x.shape.last().copied().unwrap_or(1);
    Ok((x.data.len() / channels, channels))
}

/// rmsnorm, layernorm: x, weight (and bias), y.
pub fn norm<T: Element>(check: &mut Check<'_>) -> Result<()> {
    let case = check.case;
    let (tokens, channels) = sizes(case)?;
    let eps = case.number("eps")?;
    let layout = || Layout::axis("channels", 1);
    let mut graph = Graph {
        axes: vec![Axis::new("channels", channels)],
        params: vec![("w.weight", vec![layout()], case.data("w.weight")?)],
        inputs: vec![("x", layout(), case.data("in.x")?)],
        seeds: vec![("out.y", case.data("in.dy")?)],
        tokens,
        ..Graph::default()
    };
    let bias = case.has("w.bias");
    if bias {
        graph.params.push(("w.bias", vec![layout()], case.data("w.bias")?));
    }
    let results = graph.run::<T>(&|cx| {
        provider(cx, |cx| {
            let x = cx.batch("x")?;
            let y = match bias {
                true => cx.layer_norm("norm", x, ParamId(0), ParamId(1), eps)?,
                false => cx.rms_norm("norm", x, ParamId(0), eps)?,
            };
            Ok(vec![("out.y", y, None)])
        })
    })?;
    results.iter().try_for_each(|(name, values)| check.tensor(name, values))
}

/// gated_rmsnorm: groups of group_size channels, as heads of one channel in groups.
pub fn gated<T: Element>(check: &mut Check<'_>) -> Result<()> {
    let case = check.case;
    let (tokens, channels) = sizes(case)?;
    let norm_before_gate = case.json["config"]["norm_before_gate"].as_bool().unwrap_or(false);
    let attrs = GatedNorm { eps: case.number("eps")?, norm_before_gate };
    let heads = || Layout::axis("heads", 1);
    let graph = Graph {
        axes: vec![
            Axis::new("groups", channels / case.size("group_size")?),
            Axis::new("heads", channels).grouped_by("groups"),
        ],
        params: vec![("w.weight", vec![heads()], case.data("w.weight")?)],
        inputs: vec![("x", heads(), case.data("in.x")?), ("z", heads(), case.data("in.z")?)],
        seeds: vec![("out.y", case.data("in.dy")?)],
        tokens,
        ..Graph::default()
    };
    let results = graph.run::<T>(&|cx| {
        provider(cx, |cx| {
            let (x, z) = (cx.batch("x")?, cx.batch("z")?);
            Ok(vec![("out.y", cx.gated_norm("norm", x, z, ParamId(0), attrs.clone())?, Some(heads()))])
        })
    })?;
    results.iter().try_for_each(|(name, values)| check.tensor(name, values))
}
