//! `gantry rank`: what each unit of a trained model does on data, and the model sorted by it, most important units first.
//!
//! The sorted model computes what the old one does; its leading units are the better submodel, for `gantry slice` and for
//! elastic training.

use super::rewrite::{RECIPE, cut_one, declared, plain_recipe, whole};
use super::{args, model, print};
use crate::checkpoint::{CheckpointReader, CheckpointWriter, Meta};
use crate::data::{self, Batch, Loader, Position, Split};
use crate::failure::{Failure, Result};
use crate::mesh::Grid;
use crate::model::submodel::reordered;
use crate::recipe::{Precision, Recipe};
use crate::train::importance::{AxisRanking, Importance};
use crate::train::team::{ElasticSpec, Kind, Team, TeamSpec};
use crate::train::{changes, check_tokenizer, check_vocab, engine};
use gantry_kernels::Element;
use gantry_plugin_api::plan::ModelPlan;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use std::fmt::Write;

/// Name of the ranking that lies beside the shards.
const RANKING: &str = "ranking.json";

/// Batches a rank takes at a time.
const AT_ONCE: usize = 8;

pub(super) fn run(arguments: args::Rank) -> Result<()> {
    let recipe = arguments.recipe.load(None)?;
    let reader = model::open(&arguments.checkpoint)?;
    let tokenizer = data::tokenizer(&recipe).map_err(|failure| recipe.locate(failure))?;
    check_tokenizer(&reader, tokenizer.as_ref())?;
    let loader = Loader::over(Split::with(&recipe, tokenizer.as_ref())?.train, &recipe, Position::default())?;
    let plugins = super::plugins(&recipe)?;
    if let Some(then) = reader.index().extra["recipe"].as_str() {
        changes::compare(then, recipe.resolved_yaml(), &[])
            .map_err(|failure| failure.at(format!("checkpoint {}", reader.folder().display())))?;
    }
    let spec = engine::spec(&recipe, plugins, None)?;
    // One rank holds the whole model; layouts differ in speed only.
    let spec = TeamSpec { grid: Grid::SINGLE, elastic: ElasticSpec::Off, teacher: None, trains: false, ..spec };
    let counts = Counts { samples: arguments.samples as usize, of_layers: arguments.layer_samples as usize };
    // Refused before the work if nothing can be written there.
    let mut writer = CheckpointWriter::alone(&arguments.out)?;
    let folder = reader.folder().to_path_buf();
    let ranking = match recipe.train.precision {
        Precision::Fp64 => rank::<f64>(&spec, &loader, reader, counts)?,
        Precision::Fp32 | Precision::Bf16 => rank::<f32>(&spec, &loader, reader, counts)?,
    };
    let mut reader = CheckpointReader::open(&folder)?;
    let report = ranking.report(&recipe, &reader);
    let note = serde_json::to_string_pretty(&report).unwrap_or_default() + "\n";
    let text = plain_recipe(&reader, &spec.provider, &spec.config)?;
    let meta = Meta {
        step: reader.index().step,
        plugins: reader.index().plugins.clone(),
        notes: vec![(RECIPE.into(), text.clone()), (RANKING.into(), note)],
        extra: json!({"recipe": text, "ranked_from": report["checkpoint"]}),
        ..Meta::default()
    };
    let meta = model::with_tokenizer(&reader, meta)?;
    ranking.sort(&mut reader, &mut writer)?;
    reader.finish(engine::stays)?;
    writer.complete(&arguments.out, meta)?;
    if arguments.json {
        return print(&format!("{report:#}\n"));
    }
    print(&ranking.human(&arguments.out.display().to_string()))
}

/// Samples to look at.
#[derive(Clone, Copy)]
struct Counts {
    samples: usize,
    of_layers: usize,
}

/// What was found.
struct Ranking {
    plan: ModelPlan,
    axes: Vec<AxisRanking>,
    /// Relative squared error without each layer: (layer, error).
    layers: Vec<(usize, f64)>,
    samples: usize,
    layer_samples: usize,
}

fn rank<T: Element>(spec: &TeamSpec, loader: &Loader, mut reader: CheckpointReader, counts: Counts) -> Result<Ranking> {
    let team = Team::<T>::start(spec)?;
    let mut loader = loader.clone();
    loader.limit_vocab(team.vocab());
    if let Some(vocab) = loader.vocab() {
        check_vocab(team.vocab(), vocab)?;
        team.all(move |rank| rank.limit_vocab(vocab))?;
    }
    team.load(&mut reader, &[Kind::Params, Kind::Buffers], None, |name| name.starts_with("optimizer."))?;
    let plan = team.plan.clone();
    let layers: Vec<usize> = plan.blocks.iter().filter_map(|block| block.layer).collect();

    let of_step = loader.micro_batches();
    let first = loader.batch(1, 0)?;
    let all = counts.samples.min(loader.samples_per_epoch() as usize).div_ceil(first.samples);
    let some = if counts.of_layers == 0 { 0 } else { counts.of_layers.div_ceil(first.samples).min(all) };
    let batch = |i: usize| loader.batch(1 + (i / of_step) as u64, i % of_step);
    let chunks = |n: usize| (0..n).step_by(AT_ONCE).map(move |i| i..(i + AT_ONCE).min(n));

    let bar = bar((all + some * (layers.len() + 1)) as u64);
    let mut importance = Importance::default();
    for range in chunks(all) {
        let (batches, so_far): (Vec<Batch>, _) = (range.clone().map(batch).collect::<Result<_>>()?, importance);
        importance = one(team.all(move |rank| rank.calibrate(&batches, so_far.clone()))?)?;
        bar.inc(range.len() as u64);
    }
    let (mut errors, mut squares) = (vec![0.0; layers.len()], 0.0);
    for range in (0..some).map(|i| i..i + 1) {
        let (batches, of): (Vec<Batch>, _) = (range.map(batch).collect::<Result<_>>()?, layers.clone());
        let (more, square) = one(team.all(move |rank| rank.layer_errors(&batches, &of))?)?;
        errors.iter_mut().zip(more).for_each(|(sum, x)| *sum += x);
        squares += square;
        bar.inc(layers.len() as u64 + 1);
    }
    bar.finish_and_clear();
    let finite = errors.iter().chain([&squares]).all(|x| x.is_finite());
    let axes = importance.rankings(&plan)?;
    if !finite || axes.iter().any(|axis| axis.importance.iter().any(|x| !x.is_finite())) {
        return Err(Failure::numerical("the model gives NaN or infinity on this data; it cannot be ranked"));
    }
    let layers = if some == 0 {
        Vec::new()
    } else {
        layers.into_iter().zip(errors.into_iter().map(|error| error / squares.max(f64::MIN_POSITIVE))).collect()
    };
    let samples = all * first.samples;
    Ok(Ranking { plan, axes, layers, samples, layer_samples: some * first.samples })
}

/// The answer of the only rank.
fn one<R>(mut results: Vec<R>) -> Result<R> {
    results.pop().ok_or_else(|| Failure::communication("no rank answered"))
}

fn bar(len: u64) -> ProgressBar {
    let bar = ProgressBar::new(len);
    if let Ok(style) = ProgressStyle::with_template("ranking {wide_bar} {pos}/{len} passes, {eta} left") {
        bar.set_style(style);
    }
    bar
}

impl Ranking {
    /// Layers in the order in which they can go.
    fn drop_order(&self) -> Vec<usize> {
        let mut layers = self.layers.clone();
        layers.sort_by(|a, b| a.1.total_cmp(&b.1));
        layers.into_iter().map(|(layer, _)| layer).collect()
    }

    fn report(&self, recipe: &Recipe, reader: &CheckpointReader) -> Value {
        let axes: Vec<Value> = self
            .axes
            .iter()
            .map(|axis| {
                json!({
                    "axis": self.plan.axes[axis.axis].name, "layer": axis.layer, "importance": axis.importance,
                    "order": axis.order,
                })
            })
            .collect();
        let errors: Vec<Value> =
            self.layers.iter().map(|(layer, error)| json!({"layer": layer, "relative_mse": error})).collect();
        json!({
            "checkpoint": reader.folder().display().to_string(),
            "step": reader.index().step,
            "recipe": recipe.name,
            "samples": self.samples,
            "layer_samples": self.layer_samples,
            "axes": axes,
            "layers": errors,
            "layer_ranking": self.drop_order(),
        })
    }

    /// Writes every tensor with its units in their new order.
    fn sort(&self, reader: &mut CheckpointReader, writer: &mut CheckpointWriter) -> Result<()> {
        let table = whole(&self.plan)?;
        let order = |axis: usize, layer: Option<usize>| {
            let found = self.axes.iter().find(|ranking| (ranking.axis, ranking.layer) == (axis, layer))?;
            Some(found.order.clone())
        };
        for tensor in declared(&self.plan, &table) {
            let layer = self.plan.blocks[tensor.block].layer;
            let from = tensor.dims.iter().map(|dim| reordered(&self.plan.axes, layer, dim, order));
            let from = from.collect::<Result<Vec<_>>>()?;
            let parts = tensor.take(reader)?;
            tensor.write(writer, cut_one(parts, &tensor.stored.shape(), &from))?;
        }
        Ok(())
    }

    fn human(&self, out: &str) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = writeln!(text, "samples     {} ({} without each layer)", self.samples, self.layer_samples);
        for ranking in &self.axes {
            let name = &self.plan.axes[ranking.axis].name;
            let place = ranking.layer.map_or(String::new(), |layer| format!(" of layer {layer}"));
            let (most, least) = (spread(&ranking.importance, f64::max), spread(&ranking.importance, f64::min));
            let units = ranking.importance.len();
            let _ = writeln!(text, "axis        {name}{place}: {units} units, importance {least:.3e} to {most:.3e}");
        }
        for layer in self.drop_order() {
            let error = self.layers.iter().find(|(l, _)| *l == layer).map_or(0.0, |(_, error)| *error);
            let kind =
                self.plan.blocks.iter().find(|block| block.layer == Some(layer)).map(|block| block.kind.as_str());
            let _ = writeln!(text, "layer       {layer} ({}): error {error:.3e} without it", kind.unwrap_or_default());
        }
        let _ = writeln!(text, "written     {out}, the ranking in {out}/{RANKING}");
        text
    }
}

fn spread(values: &[f64], pick: fn(f64, f64) -> f64) -> f64 {
    values.iter().copied().reduce(pick).unwrap_or(0.0)
}
