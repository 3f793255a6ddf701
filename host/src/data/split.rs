//! From a recipe to the corpora it trains on and is judged by.
//!
//! A document is held out by its name, the path below the folder it was found under (for a made-up corpus: its number):
//! it is in the valid corpus if the first 53 bits of the name's SHA-256, as a fraction of 2^53, are below
//! `data.valid_fraction`. (Of a file of lines each line is a document, whose name is the line itself.) So the choice depends on neither seed nor machine, and no other file moves a document.

use super::corpus::{Builder, Corpus};
use super::files::{self, Filter, Found};
use super::read::Reader;
use super::{Tokenizer, synthetic};
use crate::failure::{Failure, Result};
use crate::recipe::{Data, Recipe, TokenizerSpec};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The corpora of a run, which share no document.
#[derive(Clone, Debug)]
pub struct Split {
    pub train: Arc<Corpus>,
    /// Held-out documents, if the recipe holds any out.
    pub valid: Option<Arc<Corpus>>,
    /// Nats per token below which no model goes; known of a made-up corpus.
    pub entropy: Option<f64>,
}

/// The tokenizer of a recipe's text; none where the data are made up.
pub fn tokenizer(recipe: &Recipe) -> Result<Option<Tokenizer>> {
    let data = &recipe.data;
    // Of tokens that come with no tokenizer nothing is known but which one ends documents.
    let unnamed = data.megatron.given() && data.megatron.eod.is_some() && data.tokenizer == TokenizerSpec::Bytes;
    if data.synthetic.is_some() || unnamed {
        return Ok(None);
    }
    Tokenizer::open(&data.tokenizer, &data.special_tokens).map(Some)
}

/// Number of different tokens of a recipe's data.
pub fn vocab(recipe: &Recipe, tokenizer: Option<&Tokenizer>) -> Option<usize> {
    let made_up = recipe.data.synthetic.as_ref().map(|about| about.vocab);
    made_up.or(tokenizer.map(Tokenizer::vocab_size))
}

impl Split {
    /// Reads the recipe's files, or makes its synthetic corpus.
    pub fn open(recipe: &Recipe) -> Result<Split> {
        Split::with(recipe, tokenizer(recipe)?.as_ref())
    }

    /// As [`Split::open`], with the recipe's tokenizer.
    pub fn with(recipe: &Recipe, tokenizer: Option<&Tokenizer>) -> Result<Split> {
        Split::of(&recipe.data, recipe.train.seed, tokenizer)
    }

    pub(super) fn of(data: &Data, seed: u64, tokenizer: Option<&Tokenizer>) -> Result<Split> {
        let (train, valid) = match &data.synthetic {
            Some(about) => {
                let (mut train, mut valid) = (Builder::ids(about.vocab), Builder::ids(about.vocab));
                synthetic::documents(about, seed, |number, document| {
                    let name = number.to_string();
                    let held = held_out(name.as_bytes(), data.valid_fraction);
                    if held { &mut valid } else { &mut train }.add_ids(&name, document);
                });
                (train, valid)
            }
            None => match tokenizer {
                Some(tokenizer) => from_files(data, tokenizer)?,
                None => from_files(data, &Tokenizer::bytes())?,
            },
        };
        check(data, &train, &valid)?;
        let held = data.valid_fraction > 0.0 || !data.valid_paths.is_empty();
        Ok(Split {
            train: Arc::new(train.finish()),
            valid: held.then(|| Arc::new(valid.finish())),
            entropy: data.synthetic.as_ref().map(synthetic::entropy),
        })
    }
}

/// Whether the document of this name is among the held-out share.
pub(super) fn held_out(name: &[u8], fraction: f64) -> bool {
    let hash = Sha256::digest(name);
    let first = hash.iter().take(8).fold(0u64, |word, &byte| word << 8 | u64::from(byte));
    ((first >> 11) as f64) < fraction * (1u64 << 53) as f64
}

fn from_files(data: &Data, tokenizer: &Tokenizer) -> Result<(Builder, Builder)> {
    let extensions = data.extensions();
    let filter = |key| Filter { key, extensions: &extensions, exclude: &data.exclude, tracked_only: data.tracked_only };
    let found = files::find(&data.paths, &filter("data.paths"))?;
    let named = files::find(&data.valid_paths, &filter("data.valid_paths"))?;
    let also_valid: std::collections::HashSet<&Path> = named.iter().map(|file| file.identity.as_path()).collect();
    let kept: Vec<_> = found.iter().filter(|file| !also_valid.contains(file.identity.as_path())).collect();
    let size = |file: &Found| file.path.metadata().map_or(0, |about| about.len());
    let all = kept.iter().map(|file| size(file)).chain(named.iter().map(size)).sum();
    let mut reader = Reader::new(data, tokenizer, all)?;
    for file in kept {
        reader.file(file, false)?;
    }
    for file in &named {
        reader.file(file, true)?;
    }
    reader.finish()
}

/// Refuses corpora without text.
fn check(data: &Data, train: &Builder, valid: &Builder) -> Result<()> {
    let list = |paths: &[PathBuf]| paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
    let place = match &data.synthetic {
        Some(_) => "data.synthetic".to_string(),
        None => format!("data path {}", list(&data.paths)),
    };
    let (kept, held) = (train.documents(), valid.documents());
    let fraction = data.valid_fraction;
    let (empty, builder) = match (kept + held, data.valid_paths.is_empty()) {
        (0, true) => (place, [train, valid]),
        (_, true) if fraction > 0.0 && (kept == 0 || held == 0) => {
            let part = if held == 0 { "none" } else { "all" };
            return Err(Failure::data(format!(
                "data.valid_fraction {fraction} holds out {part} of the {} documents in {place}",
                kept + held
            ))
            .remedy("change data.valid_fraction, give more files, or name the held-out ones in data.valid_paths"));
        }
        (_, false) if held == 0 => (format!("data.valid_paths {}", list(&data.valid_paths)), [valid, valid]),
        (_, false) if kept == 0 && train.summary.skipped() == 0 => {
            return Err(Failure::data(format!(
                "data.valid_paths {} leaves no text to train on in {place}",
                list(&data.valid_paths)
            ))
            .remedy("hold out fewer files or give more in data.paths"));
        }
        (_, false) if kept == 0 => (place, [train, train]),
        _ => return Ok(()),
    };
    let both = |part: fn(&Builder) -> usize| match std::ptr::eq(builder[0], builder[1]) {
        true => part(builder[0]),
        false => part(builder[0]) + part(builder[1]),
    };
    let (none, binary) = (both(|b| b.summary.skipped_empty), both(|b| b.summary.skipped_binary));
    Err(Failure::data(format!("no text in {empty}"))
        .detail(looked_at(none, binary, both(|b| b.summary.skipped_unlearned)))
        .detail(format!(
            "extensions: {:?}; exclude: {:?}{}",
            data.extensions(),
            data.exclude,
            if data.tracked_only { "; only files that git tracks" } else { "" }
        ))
        .remedy("correct data.paths, data.extensions or data.exclude"))
}

fn looked_at(empty: usize, binary: usize, unlearned: usize) -> String {
    match unlearned {
        0 => format!("{} files looked at: {empty} empty, {binary} binary or not UTF-8", empty + binary),
        _ => format!("{unlearned} conversations of which nothing is learned (data.chat.train_on), {empty} empty"),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::recipe::{Chat, Format, Packing, Synthetic, Task, TokenizerSpec, TooLong, TrainOn};
    use rstest::rstest;

    pub fn data(paths: &[&Path]) -> Data {
        Data {
            paths: paths.iter().map(|path| path.to_path_buf()).collect(),
            extensions: Some(vec!["txt".into()]),
            exclude: Vec::new(),
            tracked_only: false,
            valid_fraction: 0.0,
            valid_paths: Vec::new(),
            ngram_order: 0,
            prefetch: 0,
            tokenizer: TokenizerSpec::Bytes,
            special_tokens: Default::default(),
            format: Format::Text,
            text_key: "text".into(),
            chat: Chat { template: None, train_on: TrainOn::Assistant },
            packing: Packing::Concat,
            too_long: TooLong::Split,
            reset_at_document_boundaries: true,
            megatron: Default::default(),
            synthetic: None,
        }
    }

    pub fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    /// 200 documents, each of which holds its own name.
    fn many() -> tempfile::TempDir {
        let names: Vec<String> = (0..200).map(|i| format!("{}/{i}.txt", i % 7)).collect();
        folder(&names.iter().map(|name| (name.as_str(), name.as_bytes())).collect::<Vec<_>>())
    }

    fn documents(corpus: &Corpus) -> Vec<String> {
        let mut tokens = vec![0; corpus.len()];
        corpus.read(0, &mut tokens);
        let text = |document: &[i32]| document.iter().map(|&token| char::from(token as u8)).collect();
        tokens.split(|&token| token == corpus.end()).map(text).filter(|text: &String| !text.is_empty()).collect()
    }

    #[test]
    fn a_share_is_held_out_by_name_alone() {
        let root = many();
        let mut data = data(&[root.path()]);
        data.valid_fraction = 0.25;
        let split = |data: &Data, seed| {
            let split = Split::of(data, seed, None).unwrap();
            (documents(&split.train), documents(split.valid.as_ref().unwrap()))
        };
        let (train, valid) = split(&data, 1);
        assert_eq!(train.len() + valid.len(), 200);
        assert!((35..65).contains(&valid.len()), "{} of 200 held out", valid.len());
        assert!(valid.iter().all(|document| !train.contains(document)));
        // The rule, once by hand: sha256("1/1.txt") begins with the byte that `held` states.
        let first = |name: &str| Sha256::digest(name)[0];
        assert!(valid.iter().all(|name| first(name) < 64) && train.iter().all(|name| first(name) >= 64));
        // Neither the seed nor where the folder lies nor further files move a document.
        assert_eq!(split(&data, 2), (train.clone(), valid.clone()));
        std::fs::write(root.path().join("new.txt"), "new.txt").unwrap();
        let (more_train, more_valid) = split(&data, 1);
        assert!(train.iter().all(|document| more_train.contains(document)));
        assert!(valid.iter().all(|document| more_valid.contains(document)));
        // A larger share holds out the same ones and more.
        data.valid_fraction = 0.5;
        let (_, wider) = split(&data, 1);
        assert!(valid.iter().all(|document| wider.contains(document)) && wider.len() > valid.len());
    }

    #[test]
    fn named_files_are_held_out_wherever_they_lie() {
        let root = folder(&[("a.txt", b"a"), ("in/b.txt", b"b"), ("in/c.txt", b"c"), ("in/no.rs", b"r")]);
        let outside = folder(&[("d.txt", b"d")]);
        let mut data = data(&[root.path()]);
        data.valid_paths = vec![outside.path().join("d.txt"), root.path().join("in")];
        let split = Split::of(&data, 0, None).unwrap();
        assert_eq!(documents(&split.train), ["a"]);
        assert_eq!(documents(&split.valid.unwrap()), ["d", "b", "c"]);
        // Without held-out files there is no valid corpus.
        data.valid_paths.clear();
        let split = Split::of(&data, 0, None).unwrap();
        assert_eq!(documents(&split.train), ["a", "b", "c"]);
        assert!(split.valid.is_none());
    }

    #[test]
    fn made_up_documents_are_held_out_by_number() {
        let synthetic = Synthetic { task: Task::Copy, vocab: 33, document_length: 20, tokens: 20_000 };
        let mut data = Data { synthetic: Some(synthetic), ..data(&[]) };
        let whole = Split::of(&data, 3, None).unwrap().train;
        data.valid_fraction = 0.1;
        let split = Split::of(&data, 3, None).unwrap();
        let valid = split.valid.unwrap();
        assert_eq!(split.train.len() + valid.len(), whole.len());
        assert!((1_000..3_000).contains(&valid.len()), "{}", valid.len());
        assert_ne!(split.train.summary().sha256, whole.summary().sha256);
    }

    #[rstest]
    #[case(&[("a.rs", b"x" as &[u8])], 0.0)]
    #[case(&[("a.txt", b"" as &[u8]), ("b.txt", b"\0")], 0.0)]
    #[case(&[("a.txt", b"" as &[u8]), ("b.txt", b"\0")], 0.5)]
    fn corpus_without_text_is_refused(#[case] files: &[(&str, &[u8])], #[case] fraction: f64) {
        let root = folder(files);
        let data = Data { valid_fraction: fraction, ..data(&[root.path()]) };
        let failure = Split::of(&data, 0, None).unwrap_err();
        assert_eq!(failure.sentence, format!("no text in data path {}", root.path().display()));
        assert_eq!(failure.exit_status(), 4);
        assert!(failure.remedy.is_some());
        let looked = files.iter().filter(|(name, _)| name.ends_with("txt")).count();
        assert!(failure.details[0].starts_with(&format!("{looked} files looked at")), "{}", failure.details[0]);
    }

    #[rstest]
    #[case(1e-9, &[], "data.valid_fraction 0.000000001 holds out none of the 2 documents in data path ROOT")]
    #[case(0.999_999_999, &[], "data.valid_fraction 0.999999999 holds out all of the 2 documents in data path ROOT")]
    #[case(0.0, &["empty.txt"], "no text in data.valid_paths ROOT/empty.txt")]
    #[case(0.0, &["a.txt", "b.txt", "empty.txt"], "data.valid_paths ROOT/a.txt, ROOT/b.txt, ROOT/empty.txt leaves no text to train on in data path ROOT")]
    #[case(0.0, &["a.txt", "b.txt"], "no text in data path ROOT")]
    #[case(0.0, &["none.txt"], "cannot read data.valid_paths ROOT/none.txt: No such file or directory (os error 2)")]
    fn split_without_either_part_is_refused(#[case] fraction: f64, #[case] valid: &[&str], #[case] sentence: &str) {
        let root = folder(&[("a.txt", b"a"), ("b.txt", b"b"), ("empty.txt", b"")]);
        let mut data = Data { valid_fraction: fraction, ..data(&[root.path()]) };
        data.valid_paths = valid.iter().map(|name| root.path().join(name)).collect();
        let failure = Split::of(&data, 0, None).unwrap_err();
        let shown = failure.sentence.replace(&root.path().display().to_string(), "ROOT");
        assert_eq!((shown.as_str(), failure.exit_status()), (sentence, 4));
        assert!(failure.remedy.is_some());
    }
}
