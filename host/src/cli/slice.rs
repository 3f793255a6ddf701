//! `gantry slice`: a smaller model inside a trained one as a checkpoint of its own, with the recipe that makes it.

use super::rewrite::{RECIPE, cut_one, declared, plain_recipe, whole};
use super::{args, model, print};
use crate::checkpoint::{CheckpointReader, CheckpointWriter, Meta};
use crate::error::Error;
use crate::failure::{Failure, Result};
use crate::model::submodel::{kept, submodel};
use crate::train::engine;
use crate::train::router::Router;
use gantry_plugin_api::plan::{AxisSetting, AxisState, ModelPlan, Occasion, Submodel};
use serde_json::{Map, Value, json};
use std::fmt::Write;

pub(super) fn run(arguments: args::Slice) -> Result<()> {
    let mut reader = model::open(&arguments.checkpoint)?;
    let recipe = model::recipe_of(&reader)?;
    let plugins = super::plugins(&recipe)?;
    let spec = engine::spec(&recipe, plugins, None)?;
    let parent = spec.plugins.provider(&spec.provider, &spec.config)?;
    let plan = parent.plan()?;

    let mut settings = match arguments.budget {
        None => Vec::new(),
        Some(budget) => widths(&mut reader, &spec, &plan, budget)?,
    };
    let setting = |axis: &str, layer, n| AxisSetting { axis: axis.into(), layer, state: AxisState::Slice { n } };
    settings.extend(arguments.width.iter().map(|width| setting(&width.axis, width.layer, width.units)));
    settings.extend(arguments.drop_layer.iter().map(|&layer| setting("depth", Some(layer), 0)));
    let submodel = submodel(&plan, &settings)?;
    let changes = parent.submodel_config(&submodel)?;
    let mut config = spec.config.clone();
    config.as_object_mut().into_iter().for_each(|config| config.extend(changes.clone()));
    let small = spec.plugins.provider(&spec.provider, &config)?.plan()?;

    let text = plain_recipe(&reader, &spec.provider, &config)?;
    let step = reader.index().step;
    let from = json!({"checkpoint": reader.folder().display().to_string(), "step": step, "submodel": submodel});
    let meta = Meta {
        step,
        plugins: reader.index().plugins.clone(),
        notes: vec![(RECIPE.into(), text.clone())],
        extra: json!({"recipe": text, "sliced_from": from}),
        ..Meta::default()
    };
    let meta = model::with_tokenizer(&reader, meta)?;
    let mut writer = CheckpointWriter::alone(&arguments.out)?;
    let kept = cut_all(&mut reader, &mut writer, &plan, &small, &submodel)?;
    let before: usize = whole(&plan)?.params.iter().map(|entry| entry.stored.len).sum();
    reader.finish(engine::stays)?;
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

/// What the elastifier of a recipe keeps for a budget; its router as it was trained.
fn widths(
    reader: &mut CheckpointReader,
    spec: &crate::train::team::TeamSpec,
    plan: &ModelPlan,
    budget: f64,
) -> Result<Vec<AxisSetting>> {
    let crate::train::team::ElasticSpec::Plugin { provider, config } = &spec.elastic else {
        return Err(Failure::recipe("--budget: the recipe of the checkpoint has no elastifier")
            .remedy("give widths with --width and --drop-layer"));
    };
    let mut elastifier = spec.plugins.elastifier(provider, config)?;
    let wants = elastifier.plan(plan)?;
    match Router::<f64>::new(&wants, &elastifier, spec.seed, false)? {
        None => Ok(elastifier.widths(budget)?),
        Some(mut router) => {
            router.load(reader)?;
            Ok(router.settings(&mut elastifier, &Occasion::Budget(budget))?.settings)
        }
    }
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
        let tensors = from.take(reader)?;
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
        to.write(writer, cut_one(tensors, &from.stored.shape(), &keep))?;
    }
    match targets.next() {
        None => Ok(after.params.iter().map(|entry| entry.stored.len).sum()),
        Some(extra) => {
            Err(Error::plugin(format!("the smaller model has a tensor {} that the larger has not", extra.name)))
        }
    }
}

fn shown(changes: &Map<String, Value>) -> String {
    changes.iter().map(|(key, value)| format!("{key}: {value}")).collect::<Vec<_>>().join(", ")
}
