//! Models from one kind of file to another: checkpoints, Hugging Face folders, and safetensors under Megatron's names.
//!
//! Everything about tensors follows from the provider's declaration: [`pieces`] says which file tensors a declared one
//! becomes in each format, [`copy`] makes the pieces of one format out of those of another, strictly. [`source`] reads
//! folders and checkpoints in blocks, [`target`] writes them beside their place. Configs are the provider's: [`folder`]
//! carries `config.json` over the plugin boundary and back. [`element`] converts numbers, [`json`] reads what others wrote.
//!
//! May know plugins, recipes, checkpoints and layouts; knows no programs, ranks or optimizers.
//!
//! *Invariant:* no name of a parameter, a key or a model type stands here.

mod copy;
mod element;
pub mod folder;
mod json;
pub mod pieces;
mod recipe;
mod source;
mod target;

pub use element::Element;
pub use source::{INDEX, SINGLE};

use crate::checkpoint::{CheckpointReader, Meta, PluginEntry, locate};
use crate::data::END_OF_DOCUMENT;
use crate::data::tokenizer;
use crate::failure::{Failure, Result};
use crate::plugin::PluginSet;
use crate::recipe::Recipe;
use copy::{Assembly, Extras, assemble};
use folder::Known;
use gantry_plugin_api::plan::ProviderKind;
use pieces::{Declared, Names, Piece, declared};
use serde_json::{Map, Value, json};
use source::Source;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use target::{Beside, Content, Job};

/// A kind of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A checkpoint.
    Gantry,
    /// A Hugging Face folder.
    HuggingFace,
    /// A folder of safetensors under Megatron's names, with a recipe.
    Megatron,
}

/// Types of elements that are asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wanted {
    /// As they are.
    #[default]
    Keep,
    Bf16,
    F32,
}

/// A conversion.
#[derive(Clone, Debug)]
pub struct Request {
    pub from: Format,
    pub to: Format,
    pub source: PathBuf,
    pub destination: PathBuf,
    pub wanted: Wanted,
    /// Bytes of a file of tensors at most, where one tensor is not larger.
    pub shard_bytes: usize,
    /// Replace what is at the destination.
    pub force: bool,
    /// Of the source, if it does not say itself what model it holds.
    pub recipe: Option<Recipe>,
    /// Name of the module, if a recipe has several models.
    pub module: Option<String>,
    /// Folder with the tokenizer's files.
    pub tokenizer: Option<PathBuf>,
    /// Keys of the provider's config that take other values than the source says.
    pub set: Map<String, Value>,
    /// Keys of `config.json` that the user says change nothing.
    pub ignore: Vec<String>,
}

/// What was done.
#[derive(Clone, Debug)]
pub struct Report {
    pub provider: String,
    /// The provider's, of the model.
    pub config: Value,
    /// Of the model.
    pub parameters: usize,
    /// Tensors written.
    pub tensors: usize,
    pub bytes: u64,
    /// Sentences for the user.
    pub notes: Vec<String>,
}

/// A model as its source describes it.
struct Model {
    provider: String,
    config: Value,
    source: Source,
    names: Names,
    known: Known,
    /// Types of a folder's elements that an earlier conversion noted.
    noted: Option<Noted>,
    /// Of the source, resolved.
    recipe: Option<String>,
    step: u64,
    /// The tokenizer as its checkpoint describes it.
    tokenizer: Value,
    /// Tensors of an elastifier may be there.
    elastic: bool,
    notes: Vec<String>,
}

/// Types of a folder's elements.
#[derive(Clone, Debug, PartialEq)]
struct Noted {
    most: Element,
    others: BTreeMap<String, Element>,
}

impl Noted {
    fn of(&self, name: &str) -> Element {
        self.others.get(name).copied().unwrap_or(self.most)
    }

    fn to_json(&self) -> Value {
        let others: Map<String, Value> =
            self.others.iter().map(|(name, element)| (name.clone(), element.name().into())).collect();
        json!({"most": self.most.name(), "others": others})
    }

    fn from_json(value: &Value) -> Option<Noted> {
        let element = |value: &Value| Element::named(value.as_str()?);
        let others = value["others"].as_object()?.iter();
        let others = others.map(|(name, value)| Some((name.clone(), element(value)?))).collect::<Option<_>>()?;
        Some(Noted { most: element(&value["most"])?, others })
    }
}

/// Converts; nothing is at the destination before all of it is.
pub fn run(request: &Request, plugins: &PluginSet) -> Result<Report> {
    let mut model = open(request, plugins)?;
    model.config.as_object_mut().into_iter().for_each(|config| config.extend(request.set.clone()));
    let plan = plugins.provider(&model.provider, &model.config)?.plan()?;
    let all = declared(&plan)?;
    let to_folder = request.to == Format::HuggingFace;
    let export = match (to_folder, request.from) {
        (true, _) | (_, Format::HuggingFace) => Some(plugins.export_folder(&model.provider, &model.config)?),
        _ => None,
    };
    let constants: Vec<(String, Vec<usize>, f64)> = export
        .iter()
        .flat_map(|export| export.constants.iter().map(|c| (c.name.clone(), c.shape.clone(), c.value)))
        .collect();
    let from_folder = request.from == Format::HuggingFace;
    let elastic = model.elastic;
    let may_stay = |name: &str| !from_folder && (name.starts_with("optimizer.") || elastic);
    let extras = Extras { may_stay: &may_stay, constants: if from_folder { &constants } else { &[] } };
    let assemblies = assemble(&model.source, &all, model.names, &extras)?;
    let mut notes: Vec<String> = model.notes.iter().cloned().chain(dropped(&model, &all)).collect();

    let names = if to_folder { Names::Folder } else { Names::Own };
    let choice = Choice { wanted: request.wanted, noted: model.noted.as_ref(), to: request.to };
    let mut jobs = jobs(&all, &assemblies, names, &choice);
    let fixed: Vec<(Piece, f64)> = constants
        .iter()
        .filter(|_| to_folder)
        .map(|(name, shape, value)| (Piece::whole(name.clone(), shape.clone(), 0), *value))
        .collect();
    jobs.extend(fixed.iter().map(|(piece, value)| Job {
        piece,
        element: Element::F32,
        from: Content::Constant(*value),
    }));

    let beside = Beside::begin(&request.destination, &request.source, request.force)?;
    let tensors = jobs.len();
    let bytes = jobs.iter().map(|job| (job.piece.elements() * job.element.bytes()) as u64).sum();
    let bar = target::bar(&jobs);
    match request.to {
        Format::Gantry => to_checkpoint(request, plugins, &model, &assemblies, &all, &jobs, beside.path(), &bar)?,
        _ => {
            std::fs::create_dir(beside.path())
                .map_err(|error| crate::checkpoint::cannot_write(beside.path(), &error))?;
            target::folder(beside.path(), &jobs, request.shard_bytes, &bar)?;
        }
    }
    bar.finish_and_clear();
    match (request.to, &export) {
        (Format::HuggingFace, Some(export)) => {
            let most = most(&jobs).torch();
            notes.extend(export.notes.iter().cloned());
            let kind = plugins.folder_kinds().find(|(name, _)| *name == model.provider);
            let (_, kind) = kind.ok_or_else(|| Failure::plugin(format!("{} has no folders", model.provider)))?;
            notes.extend(folder::write(beside.path(), kind, export, &model.known, most)?);
            put_tokenizer(request, &model, beside.path(), &mut notes)?;
        }
        (Format::Megatron, _) => {
            let text = recipe::text(request, plugins, &model)?;
            crate::checkpoint::write_synced(&beside.path().join(recipe::FILE), text.as_bytes())?;
        }
        _ => {}
    }
    let parameters = all.iter().filter(|tensor| !tensor.buffer).map(|tensor| tensor.len).sum();
    let (provider, config) = (model.provider.clone(), model.config.clone());
    drop(jobs);
    beside.complete()?;
    Ok(Report { provider, config, parameters, tensors, bytes, notes })
}

fn open(request: &Request, plugins: &PluginSet) -> Result<Model> {
    let path = request.source.as_path();
    match request.from {
        Format::HuggingFace => {
            let config = folder::read(path, plugins, &request.ignore)?;
            let notes = config.import.notes.iter().map(|note| format!("{}: {note}", folder::CONFIG)).collect();
            let known = Known { carried: config.import.carried, generation: config.generation, ..Known::default() };
            Ok(Model {
                provider: config.provider,
                config: Value::Object(config.import.config),
                source: Source::folder(path)?,
                names: Names::Folder,
                known,
                noted: None,
                recipe: None,
                step: 0,
                tokenizer: Value::Null,
                elastic: false,
                notes,
            })
        }
        Format::Gantry => {
            let reader = CheckpointReader::open(&locate(path)?)?;
            let text = reader.index().extra["recipe"].as_str().unwrap_or_default().to_string();
            let parsed = Recipe::parse(&text, &Default::default())
                .map_err(|failure| failure.at(format!("checkpoint {}", reader.folder().display())))?;
            let note = &reader.index().extra["hugging_face"];
            let carried = note["config"].as_object().cloned().unwrap_or_default();
            let generation = note["generation_config"].is_object().then(|| note["generation_config"].clone());
            let noted = Noted::from_json(&note["types"]);
            let step = reader.index().step;
            let tokenizer = &reader.index().extra["tokenizer"];
            let (tokens, end) = (&tokenizer["vocab_size"], &tokenizer["special_tokens"][tokenizer::END]);
            let (tokens, end, state) = (tokens.as_u64().map(|n| n as usize), end.as_u64(), tokenizer.clone());
            let known = Known { carried, generation, tokens, end, ..Known::default() };
            let imported = note.is_object();
            let mut model = of_recipe(request, plugins, &parsed, Source::checkpoint(&reader)?, known, noted, step)?;
            model.tokenizer = state;
            // The recipe of an import says nothing of tokens unless it names a tokenizer.
            model.known.bytes &= !imported;
            if model.known.bytes {
                model.known.tokens.get_or_insert(END_OF_DOCUMENT as usize + 1);
                model.known.end.get_or_insert(END_OF_DOCUMENT as u64);
            }
            Ok(model)
        }
        Format::Megatron => {
            let beside = path.join(recipe::FILE);
            let recipe = match &request.recipe {
                Some(recipe) => recipe.clone(),
                None if beside.is_file() => Recipe::load(&beside, &Default::default())?,
                None => {
                    return Err(Failure::recipe("tensors under Megatron's names do not say what model they are of")
                        .remedy("name a recipe whose module is the model with --recipe"));
                }
            };
            of_recipe(request, plugins, &recipe, Source::folder(path)?, Known::default(), None, 0)
        }
    }
}

/// The model of a recipe.
fn of_recipe(
    request: &Request,
    plugins: &PluginSet,
    parsed: &Recipe,
    source: Source,
    mut known: Known,
    noted: Option<Noted>,
    step: u64,
) -> Result<Model> {
    let models: Vec<&String> = parsed
        .modules
        .iter()
        .filter(|(_, module)| plugins.kind(&module.provider) == Some(ProviderKind::Model))
        .map(|(name, _)| name)
        .collect();
    let name = match (&request.module, models.as_slice()) {
        (Some(name), models) if models.contains(&name) => name,
        (Some(name), _) => return Err(Failure::recipe(format!("--module {name}: the recipe has no such model"))),
        (None, [one]) => one,
        (None, models) => {
            let names: Vec<&str> = models.iter().map(|name| name.as_str()).collect();
            return Err(Failure::recipe(format!("the recipe has {} models: {}", names.len(), names.join(", ")))
                .remedy("name one of them with --module"));
        }
    };
    let module = &parsed.modules[name];
    known.seq_length = Some(parsed.train.seq_length);
    known.bytes = recipe::bytes(parsed);
    Ok(Model {
        provider: module.provider.clone(),
        config: Value::Object(module.config.clone()),
        source,
        names: Names::Own,
        known,
        noted,
        recipe: Some(parsed.resolved_yaml().to_string()),
        step,
        tokenizer: Value::Null,
        elastic: module.elastify.is_some(),
        notes: Vec::new(),
    })
}

/// Says what of a checkpoint is no part of the model.
fn dropped(model: &Model, all: &[Declared]) -> Vec<String> {
    let own: std::collections::BTreeSet<&str> = all
        .iter()
        .flat_map(|tensor| tensor.pieces(model.names).iter().chain(tensor.tied(model.names)))
        .map(|piece| piece.name.as_str())
        .collect();
    let rest = model.source.tensors().keys().filter(|name| !own.contains(name.as_str()));
    let (optimizer, others): (Vec<&String>, Vec<&String>) = rest.partition(|name| name.starts_with("optimizer."));
    let mut notes = Vec::new();
    if !optimizer.is_empty() {
        notes.push(format!("{} tensors of optimizer state are left out", optimizer.len()));
    }
    if let (true, Some(first)) = (model.elastic, others.first()) {
        notes.push(format!("{} tensors of the elastifier are left out ({first}, ...)", others.len()));
    }
    notes
}

/// How types of elements are chosen.
struct Choice<'a> {
    wanted: Wanted,
    noted: Option<&'a Noted>,
    to: Format,
}

impl Choice<'_> {
    fn element(&self, tensor: &Declared, piece: &Piece, from: Element) -> Element {
        if self.to == Format::Gantry {
            // What is trained on is fp32 whatever it was, or fp64.
            return if from == Element::F64 { Element::F64 } else { Element::F32 };
        }
        let noted = self.noted.filter(|_| self.to == Format::HuggingFace);
        match (self.wanted, noted) {
            (Wanted::F32, _) => Element::F32,
            (Wanted::Keep, Some(noted)) => noted.of(&piece.name),
            (Wanted::Keep, None) => from,
            (Wanted::Bf16, Some(noted)) if noted.most == Element::Bf16 => noted.of(&piece.name),
            // State of training, and what is fp32 whatever the precision.
            (Wanted::Bf16, _) if tensor.fp32 => Element::F32,
            (Wanted::Bf16, _) => Element::Bf16,
        }
    }
}

fn jobs<'a>(all: &'a [Declared], assemblies: &'a [Assembly<'a>], names: Names, choice: &Choice<'_>) -> Vec<Job<'a>> {
    all.iter()
        .zip(assemblies)
        .flat_map(|(tensor, assembly)| {
            // Folders hold tied parameters under all their names; checkpoints and Megatron under the first.
            let tied: &[Piece] = if names == Names::Folder { tensor.tied(names) } else { &[] };
            let pieces = tensor.pieces(names).iter().chain(tied);
            pieces.map(|piece| {
                let element = choice.element(tensor, piece, assembly.element());
                Job { piece, element, from: Content::Of(assembly) }
            })
        })
        .collect()
}

/// The type of most elements.
fn most(jobs: &[Job<'_>]) -> Element {
    let count = |element: Element| {
        jobs.iter().filter(|job| job.element == element).map(|job| job.piece.elements()).sum::<usize>()
    };
    Element::ALL.into_iter().max_by_key(|element| count(*element)).unwrap_or(Element::F32)
}

#[allow(clippy::too_many_arguments)]
fn to_checkpoint(
    request: &Request,
    plugins: &PluginSet,
    model: &Model,
    assemblies: &[Assembly<'_>],
    all: &[Declared],
    jobs: &[Job<'_>],
    path: &Path,
    bar: &indicatif::ProgressBar,
) -> Result<()> {
    let text = recipe::text(request, plugins, model)?;
    let resolved = recipe::resolved(&text)?;
    let mut extra = json!({"recipe": resolved});
    if request.from == Format::HuggingFace {
        let types = types(&model.source, all, assemblies);
        extra["hugging_face"] = json!({
            "config": model.known.carried, "generation_config": model.known.generation, "types": types.to_json(),
        });
    }
    let plugins = plugins.plugins().iter().filter(|plugin| plugin.providers.iter().any(|p| p.name == model.provider));
    let plugins = plugins.map(|plugin| PluginEntry {
        name: plugin.name.clone(),
        version: plugin.version.clone(),
        path: plugin.path.display().to_string(),
        sha256: recipe::file_hash(&plugin.path),
    });
    let mut notes = vec![(recipe::FILE.to_string(), text)];
    if !model.tokenizer.is_null() {
        extra["tokenizer"] = model.tokenizer.clone();
        notes.extend(recipe::tokenizer_file(model)?);
    }
    let meta = Meta { step: model.step, plugins: plugins.collect(), notes, extra, ..Meta::default() };
    target::checkpoint(path, jobs, meta, bar)?;
    let from = request.tokenizer.as_deref().unwrap_or(&request.source);
    folder::copy_tokenizer(from, &path.join(recipe::TOKENIZER)).map(drop)
}

/// The types of a folder's elements.
fn types(source: &Source, all: &[Declared], assemblies: &[Assembly<'_>]) -> Noted {
    let mut counts: BTreeMap<&'static str, (Element, usize)> = BTreeMap::new();
    let mut found = BTreeMap::new();
    for (tensor, assembly) in all.iter().zip(assemblies) {
        for piece in tensor.folder.iter().chain(tensor.tied(Names::Folder)) {
            let element = source.tensors().get(&piece.name).and_then(|found| found.element());
            let element = element.unwrap_or(assembly.element());
            counts.entry(element.name()).or_insert((element, 0)).1 += piece.elements();
            found.insert(piece.name.clone(), element);
        }
    }
    let most = counts.values().max_by_key(|(_, count)| *count).map_or(Element::F32, |(element, _)| *element);
    Noted { most, others: found.into_iter().filter(|(_, element)| *element != most).collect() }
}

/// Puts the tokenizer beside an export: the one that is named, the source's, or that of bytes.
fn put_tokenizer(request: &Request, model: &Model, to: &Path, notes: &mut Vec<String>) -> Result<()> {
    if let Some(named) = &request.tokenizer {
        if folder::copy_tokenizer(named, to)?.is_empty() {
            return Err(Failure::data(format!("--tokenizer {}: no tokenizer's files are there", named.display())));
        }
        return Ok(());
    }
    let places = [
        Some(request.source.clone()),
        Some(model.source.path().to_path_buf()),
        Some(model.source.path().join(recipe::TOKENIZER)),
        recipe::tokenizer(model),
    ];
    for place in places.into_iter().flatten() {
        if folder::has_tokenizer(&place) {
            return folder::copy_tokenizer(&place, to).map(drop);
        }
    }
    if model.known.bytes {
        return folder::write_bytes_tokenizer(to);
    }
    notes.push("no tokenizer is known; name the folder of its files with --tokenizer".into());
    Ok(())
}
