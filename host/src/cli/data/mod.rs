//! `gantry data`: data sets of tokens, made, looked at, checked and joined.

pub(super) mod args;
mod build;
mod look;

use super::print;
use crate::data::Tokenizer;
use crate::data::build::{Inputs, texts};
use crate::data::megatron::{IndexedDataset, Writer};
use crate::data::tokenizer::{SpecialTokens, train_bpe};
use crate::failure::{Failure, Result};
use crate::recipe::TokenizerSpec;
use args::Command;
use std::path::{Path, PathBuf};

pub(super) fn run(arguments: args::Data) -> Result<()> {
    match arguments.command {
        Command::Build(arguments) => build::run(arguments),
        Command::Inspect(arguments) => look::inspect(arguments),
        Command::Verify(arguments) => look::verify(arguments),
        Command::Merge(arguments) => merge(arguments),
        Command::TrainTokenizer(arguments) => train_tokenizer(arguments),
    }
}

fn tokenizer(spec: &str) -> Result<Tokenizer> {
    Tokenizer::open(&TokenizerSpec::of(spec), &SpecialTokens::new())
}

/// PREFIX with an ending.
fn file(prefix: &Path, ending: &str) -> PathBuf {
    let mut name = prefix.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// Refuses to write over a data set, and makes the folder.
fn make_room(prefix: &Path, overwrite: bool) -> Result<()> {
    if prefix.as_os_str().is_empty() || prefix.as_os_str().to_string_lossy().ends_with('/') {
        return Err(Failure::recipe(format!("{} is no prefix of files", prefix.display()))
            .remedy("give a path such as DIR/NAME, which becomes DIR/NAME.bin and DIR/NAME.idx"));
    }
    for ending in [".idx", ".bin"] {
        let path = file(prefix, ending);
        if path.exists() && !overwrite {
            return Err(Failure::data(format!("{} is there already", path.display()))
                .remedy("give another name, or --overwrite"));
        }
    }
    make_folder(prefix.parent())
}

fn make_folder(folder: Option<&Path>) -> Result<()> {
    let Some(folder) = folder.filter(|folder| !folder.as_os_str().is_empty()) else { return Ok(()) };
    std::fs::create_dir_all(folder)
        .map_err(|error| Failure::data(format!("cannot make the folder {}: {error}", folder.display())))
}

/// A number with commas.
fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn merge(arguments: args::Merge) -> Result<()> {
    make_room(&arguments.out, arguments.overwrite)?;
    let (mut writer, mut tokens, mut sequences) = (None, 0, 0);
    for prefix in &arguments.prefixes {
        let set = IndexedDataset::open(prefix)?;
        let writer = match &mut writer {
            Some(writer) => writer,
            none => none.insert(Writer::create(&arguments.out, set.index().dtype())?),
        };
        writer.append(&set)?;
        tokens += set.tokens();
        sequences += set.sequences() as u64;
    }
    let Some(writer) = writer else { return Err(Failure::recipe("no data sets to merge")) };
    let documents = writer.documents() as u64;
    writer.finish()?;
    print(&format!(
        "{}: {} documents, {} sequences, {} tokens of {} data sets\n",
        arguments.out.display(),
        thousands(documents),
        thousands(sequences),
        thousands(tokens),
        arguments.prefixes.len()
    ))
}

fn train_tokenizer(arguments: args::TrainTokenizer) -> Result<()> {
    let path = arguments.out.join("tokenizer.json");
    if path.exists() && !arguments.overwrite {
        return Err(
            Failure::data(format!("{} is there already", path.display())).remedy("give another folder, or --overwrite")
        );
    }
    let inputs = Inputs::find(&arguments.inputs, &arguments.extensions, false)?;
    let clock = std::time::Instant::now();
    let progress = build::Line::new();
    let bytes = std::sync::atomic::AtomicU64::new(0);
    let taken = |more: usize| {
        let bytes = bytes.fetch_add(more as u64, std::sync::atomic::Ordering::Relaxed) + more as u64;
        let (megabytes, seconds) = (bytes as f64 / 1e6, clock.elapsed().as_secs_f64());
        match more {
            0 => progress.say(&format!("merging the pairs of {megabytes:.1} MB"), true),
            _ => progress.say(&format!("{megabytes:.1} MB read  {:.1} MB/s", megabytes / seconds.max(1e-9)), false),
        }
    };
    let trained = train_bpe(texts(&inputs, &arguments.json_key), arguments.vocab_size, &arguments.special, taken)?;
    trained.save(&arguments.out)?;
    progress.end();
    let megabytes = bytes.into_inner() as f64 / 1e6;
    if trained.tokens < arguments.vocab_size {
        super::say(&format!("warning: the text has pairs for {} tokens only", trained.tokens));
    }
    print(&format!(
        "{}: {} tokens from {megabytes:.1} MB in {} files, {:.1} s\n",
        arguments.out.display(),
        thousands(trained.tokens as u64),
        thousands(inputs.files() as u64),
        clock.elapsed().as_secs_f64()
    ))
}
