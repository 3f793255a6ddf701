//! `gantry slice`: a smaller model inside a trained one as a checkpoint of its own, with the recipe that makes it.

use super::{args, model, print};
use crate::checkpoint::{CheckpointReader, CheckpointWriter, LogicalTensor, Meta, TensorData};
use crate::error::Error;
use crate::failure::{Failure, Result};
use crate::model::entries::entries;
use crate::model::submodel::{cut, kept, submodel};
use crate::model::{ParamTable, params::Stored};
use crate::recipe::{Overrides, Recipe};
use crate::train::engine;
use gantry_plugin_api::plan::{AxisSetting, AxisState, Layout, ModelPlan, Stage, Submodel};
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// Name of the recipe that lies beside the shards.
const RECIPE: &str = "recipe.yaml";

pub(super) fn run(arguments: args::Slice) -> Result<()> {
    let mut reader = model::open(&arguments.checkpoint)?;
    let recipe = model::recipe_of(&reader)?;
    let plugins = super::plugins(&recipe)?;
    let spec = engine::spec(&recipe, plugins, None)?;
    let parent = spec.plugins.provider(&spec.provider, &spec.config)?;
    let plan = parent.plan()?;

    let mut settings = match arguments.budget {
        None => Vec::new(),
        Some(budget) => widths(&spec, &plan, budget)?,
    };
    let setting = |axis: &str, layer, n| AxisSetting { axis: axis.into(), layer, state: AxisState::Slice { n } };
    settings.extend(arguments.width.iter().map(|width| setting(&width.axis, width.layer, width.units)));
    settings.extend(arguments.drop_layer.iter().map(|&layer| setting("depth", Some(layer), 0)));
    let submodel = submodel(&plan, &settings)?;
    let changes = parent.submodel_config(&submodel)?;
    let mut config = spec.config.clone();
    config.as_object_mut().into_iter().for_each(|config| config.extend(changes.clone()));
    let small = spec.plugins.provider(&spec.provider, &config)?.plan()?;

    let text = recipe_of_slice(&reader, &spec.provider, &config)?;
    Recipe::parse(&text, &Overrides::default()).map_err(|failure| failure.at("the recipe of the smaller model"))?;
    let step = reader.index().step;
    let from = json!({"checkpoint": reader.folder().display().to_string(), "step": step, "submodel": submodel});
    let meta = Meta {
        step,
        plugins: reader.index().plugins.clone(),
        notes: vec![(RECIPE.into(), text.clone())],
        extra: json!({"recipe": text, "sliced_from": from}),
        ..Meta::default()
    };
    let mut writer = CheckpointWriter::alone(&arguments.out)?;
    let kept = cut_all(&mut reader, &mut writer, &plan, &small, &submodel)?;
    let before: usize = whole(&plan)?.params.iter().map(|entry| entry.stored.len).sum();
    reader.finish(|name| name.starts_with("optimizer."))?;
    writer.complete(&arguments.out, meta)?;

    let out = arguments.out.display().to_string();
    if arguments.json {
        let report = json!({
            "out": out, "parameters": kept, "parameters_before": before, "config": changes, "submodel": submodel,
        });
        return print(&format!("{report:#}\n"));
    }
    let mut report = String::new();
    // Writing to a String cannot fail.
    let share = 100.0 * kept as f64 / before as f64;
    let _ = writeln!(report, "parameters  {kept} of {before} ({share:.1} %)");
    let _ = writeln!(report, "config      {}", shown(&changes));
    let _ = writeln!(report, "written     {out}");
    let _ = writeln!(report, "next        gantry eval {out}/{RECIPE} --checkpoint {out}");
    print(&report)
}

/// What the elastifier of a recipe keeps for a budget.
fn widths(spec: &crate::train::team::TeamSpec, plan: &ModelPlan, budget: f64) -> Result<Vec<AxisSetting>> {
    let crate::train::team::ElasticSpec::Plugin { provider, config } = &spec.elastic else {
        return Err(Failure::recipe("--budget: the recipe of the checkpoint has no elastifier")
            .remedy("give widths with --width and --drop-layer"));
    };
    let mut elastifier = spec.plugins.elastifier(provider, config)?;
    elastifier.plan(plan)?;
    Ok(elastifier.widths(budget)?)
}

/// The recipe of the checkpoint for the smaller model: alone, and without what the parent was trained by.
fn recipe_of_slice(reader: &CheckpointReader, provider: &str, config: &Value) -> Result<String> {
    let bad = |error: &dyn std::fmt::Display| Failure::data(format!("the recipe of the checkpoint: {error}"));
    let text = reader.index().extra["recipe"].as_str().unwrap_or_default();
    let mut tree: Value = serde_saphyr::from_str(text).map_err(|error| bad(&error))?;
    for module in tree["modules"].as_object_mut().into_iter().flat_map(Map::values_mut) {
        if module["provider"] == provider {
            module["config"] = config.clone();
            for key in ["elastify", "teacher", "load"] {
                module[key] = Value::Null;
            }
        }
    }
    serde_saphyr::to_string(&tree).map_err(|error| bad(&error))
}

/// Every parameter of a plan on one rank.
fn whole(plan: &ModelPlan) -> Result<ParamTable> {
    let grid = crate::mesh::Grid::SINGLE;
    ParamTable::new(plan, &Stage { begin: 0, end: plan.blocks.len() }, grid, grid.place(0))
}

/// A declared tensor: what it is called and made of, and where it belongs.
struct Declared<'a> {
    name: &'a str,
    block: usize,
    dims: &'a [Layout],
    export: Option<&'a [usize]>,
    stored: &'a Stored,
}

/// Parameters, tied ones once, then buffers.
fn declared<'a>(plan: &'a ModelPlan, table: &'a ParamTable) -> Vec<Declared<'a>> {
    let params = table.params.iter().map(|entry| {
        let param = &plan.params[entry.plan];
        let export = param.export_shape.as_deref();
        Declared { name: &param.name, block: param.block, dims: &param.dims, export, stored: &entry.stored }
    });
    let buffers = table.buffers.iter().map(|entry| {
        let buffer = &plan.buffers[entry.plan];
        Declared { name: &buffer.name, block: buffer.block, dims: &buffer.dims, export: None, stored: &entry.stored }
    });
    params.chain(buffers).collect()
}

/// Writes what remains of every tensor under its name in the smaller model. Returns the number of its parameters.
fn cut_all(
    reader: &mut CheckpointReader,
    writer: &mut CheckpointWriter,
    plan: &ModelPlan,
    small: &ModelPlan,
    submodel: &Submodel,
) -> Result<usize> {
    let (before, after) = (whole(plan)?, whole(small)?);
    let mut targets = declared(small, &after).into_iter();
    for from in declared(plan, &before) {
        let layer = plan.blocks[from.block].layer;
        let parts = entries(from.name, &from.stored.shape(), from.export);
        let tensors: Vec<LogicalTensor> =
            parts.iter().map(|(name, shape)| reader.take(name, shape)).collect::<Result<_>>()?;
        if layer.is_some_and(|layer| !submodel.keeps_layer(layer)) {
            continue;
        }
        let keep = from.dims.iter().map(|dim| kept(&plan.axes, submodel, layer, dim)).collect::<Result<Vec<_>>>()?;
        let shape: Vec<usize> = keep.iter().map(Vec::len).collect();
        let to = targets.next().filter(|to| to.stored.shape() == shape).ok_or_else(|| {
            Error::plugin(format!(
                "the provider's config for the smaller model makes another one: {} should keep {shape:?}",
                from.name
            ))
        })?;
        let values = cut_one(tensors, &from.stored.shape(), &keep);
        let parts = entries(to.name, &shape, to.export);
        let one = values.len() / parts.len().max(1);
        for (i, (name, shape)) in parts.into_iter().enumerate() {
            let data = match &values {
                TensorData::F32(x) => TensorData::F32(x[i * one..][..one].to_vec()),
                TensorData::F64(x) => TensorData::F64(x[i * one..][..one].to_vec()),
            };
            writer.add(LogicalTensor { name, shape, data })?;
        }
    }
    match targets.next() {
        None => Ok(after.params.iter().map(|entry| entry.stored.len).sum()),
        Some(extra) => {
            Err(Error::plugin(format!("the smaller model has a tensor {} that the larger has not", extra.name)))
        }
    }
}

/// The kept elements of a declared tensor that lies in a checkpoint as `parts`, one after the other.
fn cut_one(parts: Vec<LogicalTensor>, shape: &[usize], keep: &[Vec<u32>]) -> TensorData {
    if parts.iter().all(|part| matches!(part.data, TensorData::F32(_))) {
        let values: Vec<f32> = parts.into_iter().flat_map(|part| part.data.into_f32()).collect();
        TensorData::F32(cut(&values, shape, keep))
    } else {
        let values: Vec<f64> = parts.into_iter().flat_map(|part| part.data.into_f64()).collect();
        TensorData::F64(cut(&values, shape, keep))
    }
}

fn shown(changes: &Map<String, Value>) -> String {
    changes.iter().map(|(key, value)| format!("{key}: {value}")).collect::<Vec<_>>().join(", ")
}
