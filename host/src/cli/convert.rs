//! `gantry convert`: a model between checkpoints, Hugging Face folders and Megatron's names.

use super::{args, print, say};
use crate::checkpoint::{locate, read_index};
use crate::convert::{self, Format, Request};
use crate::failure::{Failure, Result};
use crate::plugin::{PluginFile, PluginSet, Search};
use crate::recipe::{Overrides, Recipe};
use serde_json::{Map, Value};
use std::path::Path;
use std::time::Instant;

pub(super) fn run(arguments: args::Convert) -> Result<()> {
    let clock = Instant::now();
    let recipe = arguments.recipe.as_deref().map(|file| Recipe::load(file, &Overrides::default())).transpose()?;
    let request = Request {
        from: arguments.from.into(),
        to: arguments.to.into(),
        source: arguments.source,
        destination: arguments.destination,
        wanted: arguments.dtype.into(),
        shard_bytes: arguments.max_shard_size,
        force: arguments.force,
        recipe,
        module: arguments.module,
        tokenizer: arguments.tokenizer,
        set: set(&arguments.set)?,
        ignore: arguments.ignore,
    };
    for (option, given, wanted) in [
        ("--recipe", request.recipe.is_some(), Format::Megatron),
        ("--ignore", !request.ignore.is_empty(), Format::HuggingFace),
    ] {
        if given && request.from != wanted {
            return Err(Failure::recipe(format!("{option} has no effect with --from {}", word(request.from))));
        }
    }
    let plugins = plugins(&request, arguments.plugin.as_deref())?;
    let report = convert::run(&request, &plugins)?;
    for note in &report.notes {
        say(&format!("note: {note}"));
    }
    let place = request.destination.display();
    let seconds = clock.elapsed().as_secs_f64();
    let megabytes = report.bytes as f64 / 1e6;
    let mut text = format!(
        "model       {}, {} parameters\nwritten     {place}: {} tensors, {megabytes:.1} MB in {seconds:.2} s\n",
        report.provider, report.parameters, report.tensors
    );
    if request.to == Format::Gantry {
        text.push_str(&format!("next        gantry eval {place}/recipe.yaml --checkpoint {place} --data TEXT\n"));
        text.push_str(&format!("            modules.NAME.load: {place} in a recipe trains on from it\n"));
    }
    print(&text)
}

fn word(format: Format) -> &'static str {
    match format {
        Format::Gantry => "gantry",
        Format::HuggingFace => "hf",
        Format::Megatron => "megatron",
    }
}

/// `--set` values as keys of the provider's config.
fn set(assignments: &[String]) -> Result<Map<String, Value>> {
    assignments
        .iter()
        .map(|assignment| {
            let (key, text) = assignment
                .split_once('=')
                .ok_or_else(|| Failure::recipe(format!("--set {assignment}: expected key=value")))?;
            let value = serde_saphyr::from_str(text).unwrap_or_else(|_| text.into());
            Ok((key.trim().to_string(), value))
        })
        .collect()
}

/// The plugins among which the model's is.
fn plugins(request: &Request, named: Option<&str>) -> Result<PluginSet> {
    let search = Search::standard(Vec::new());
    let mut set = match (request.from, &request.recipe) {
        (Format::Gantry, _) => {
            let folder = locate(&request.source)?;
            let index = read_index(&folder)?;
            let recipe = Recipe::parse(index.extra["recipe"].as_str().unwrap_or_default(), &Overrides::default());
            super::plugins(&recipe.map_err(|failure| failure.at(format!("checkpoint {}", folder.display())))?)?
        }
        (Format::Megatron, Some(recipe)) => super::plugins(recipe)?,
        (Format::Megatron, None) => {
            let beside = request.source.join("recipe.yaml");
            if beside.is_file() {
                super::plugins(&Recipe::load(&beside, &Overrides::default())?)?
            } else {
                PluginSet::default()
            }
        }
        (Format::HuggingFace, _) => PluginSet::default(),
    };
    match named {
        Some(name) => {
            let file = if Path::new(name).is_file() { PluginFile::new(name) } else { search.find(name)? };
            set.add_file(&file)?;
        }
        None if request.from == Format::HuggingFace => {
            // Which of them has such folders shows when they are asked. One that does not load may not be meant.
            for path in search.libraries() {
                if gantry_plugin_api::abi::load::read_hello(&path).is_ok()
                    && let Err(error) = set.add_file(&PluginFile::new(&path))
                {
                    say(&format!("note: {} is passed over: {error}", path.display()));
                }
            }
        }
        None => {}
    }
    Ok(set)
}
