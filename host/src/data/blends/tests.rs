//! Against the data sets that the samples come from, whose own order the goldens hold against Megatron-LM's.

use super::super::megatron::tests::{golden, written};
use super::super::megatron::{Dtype, GptDataset, SURPLUS};
use super::super::{Held, Loader, Position, RunData};
use super::*;
use crate::recipe::Overrides;
use rstest::rstest;
use std::path::Path;

fn recipe(megatron: &str, set: &[&str]) -> Recipe {
    let text = format!(
        "name: t\nmodules: {{lm: {{provider: p}}}}\noptimizer: {{lr: 1}}\n\
         train: {{steps: 15, seq_length: 32, micro_batch_size: 2, global_batch_size: 4}}\n\
         data: {{megatron: {{{megatron}, eod: 0, split: '80,15,5'}}}}\n"
    );
    let overrides = Overrides { set: set.iter().map(|s| s.to_string()).collect(), ..Default::default() };
    Recipe::parse(&text, &overrides).unwrap()
}

fn one() -> String {
    format!("data_path: {}", std::path::absolute(golden("corpus_u16")).unwrap().display())
}

fn two(weights: [&str; 2]) -> String {
    let path = |name| std::path::absolute(golden(name)).unwrap().display().to_string();
    let list = [weights[0].into(), path("corpus_u16"), weights[1].into(), path("corpus_i32")];
    format!("data_path: [{}]", list.into_iter().filter(|part: &String| !part.is_empty()).collect::<Vec<_>>().join(", "))
}

fn open(recipe: &Recipe, begin: Position) -> Result<RunData> {
    let tokenizer = super::super::tokenizer(recipe)?;
    RunData::open(recipe, tokenizer.as_ref(), begin)
}

fn config(reset: bool) -> GptConfig {
    let boundaries = Boundaries { end: 0, reset_positions: reset, reset_attention: reset, mask_loss: false };
    GptConfig { sequence_length: 32, seed: 1234, pad: -1, boundaries, drop_last_partial_validation: true }
}

/// Sample i of the run is sample i of the data set, in whatever step and micro-batch it comes.
#[rstest]
fn a_step_takes_the_next_samples_of_the_set(#[values(true, false)] reset: bool) {
    let recipe = recipe(&one(), &[&format!("data.reset_at_document_boundaries={reset}")]);
    let run = open(&recipe, Position::default()).unwrap();
    let file = Arc::new(IndexedDataset::open(golden("corpus_u16")).unwrap());
    let range = parts("80,15,5", file.sequences()).unwrap()[0].clone().unwrap();
    let set = GptDataset::new(file, range, Some(60), Part::Train, &config(reset), &Cache::none()).unwrap();
    let mut pieces = 0;
    for i in 0..60 {
        let (step, within) = (i / 4 + 1, i % 4);
        let batch = run.loader.batch(step as u64, within / 2).unwrap();
        let at = within % 2 * 32;
        let sample = set.sample(i).unwrap();
        assert_eq!(batch.tokens[at..at + 32], sample.tokens);
        assert_eq!(batch.labels[at..at + 32], sample.labels);
        assert_eq!(batch.loss_mask[at..at + 32], sample.loss_mask);
        let inside = batch.cu_seqlens.iter().map(|&place| place - at as i32).filter(|place| (0..32).contains(place));
        assert_eq!(inside.collect::<Vec<_>>(), sample.cu_seqlens[..sample.cu_seqlens.len() - 1]);
        pieces += sample.cu_seqlens.len() - 2;
    }
    assert_eq!(pieces > 0, reset);
    assert!(run.loader.batch(16, 0).is_ok() == (set.len() >= 62));
}

#[test]
fn resumed_runs_and_other_batch_sizes_go_on_in_the_order() {
    let whole = open(&recipe(&one(), &[]), Position::default()).unwrap().loader;
    let begin = whole.position_after(7);
    let resumed = open(&recipe(&one(), &[]), begin).unwrap().loader;
    assert_eq!(whole.batch(8, 1).unwrap(), resumed.batch(8, 1).unwrap());
    assert_eq!(whole.identity(), resumed.identity());
    // Steps of other sizes take the same samples.
    let set = ["train.global_batch_size=6", "train.steps=10", "data.megatron.train_samples=60"];
    let wide = open(&recipe(&one(), &set), Position::default()).unwrap().loader;
    assert_eq!(wide.batch(2, 1).unwrap(), whole.batch(3, 0).unwrap());
    // More than the order has are refused before the first step.
    let set = ["train.steps=1000", "data.megatron.train_samples=60"];
    let failure = open(&recipe(&one(), &set), Position::default()).unwrap_err();
    let said = "the run takes 4000 samples in all, and the order of data.megatron, made for 60, has 83";
    assert_eq!((failure.sentence.as_str(), failure.exit_status()), (said, 4));
}

/// What decides the order, and what does not.
#[test]
fn the_identity_of_an_order() {
    let identity = |set: &[&str]| open(&recipe(&one(), set), Position::default()).unwrap().loader.identity();
    let order = |set: &[&str]| identity(set).order.unwrap().0;
    let first = identity(&[]);
    assert_eq!(first.order.as_ref().unwrap().1, 60);
    // Two epochs either way.
    assert_eq!(order(&["train.steps=13"]), order(&[]));
    // One epoch.
    assert_ne!(order(&["train.steps=5"]), order(&[]));
    assert_eq!(order(&["train.steps=5", "data.megatron.train_samples=60"]), order(&[]));
    for other in ["train.seed=5", "data.megatron.seed=5", "train.seq_length=16", "data.megatron.split='90,5,5'"] {
        assert_ne!(order(&[other]), order(&[]), "{other}");
        assert_eq!(identity(&[other]).sha256, first.sha256);
    }
    assert_eq!(order(&["train.seed=5", "data.megatron.seed=1234"]), order(&[]));
}

#[test]
fn blends_are_asked_as_megatron_asks_them() {
    let weighted = open(&recipe(&two(["0.7", "0.3"]), &[]), Position::default()).unwrap().loader;
    let files = ["corpus_u16", "corpus_i32"].map(|name| Arc::new(IndexedDataset::open(golden(name)).unwrap()));
    let (config, cache) = (config(true), Cache::none());
    let source = Source { files: &files, split: "80,15,5", part: Part::Train, config: &config, cache: &cache };
    let blend = Blend::by_weights(&source, &[0.7, 0.3], 60, SURPLUS).unwrap();
    for step in 1..=15 {
        let batch = weighted.batch(step, 0).unwrap();
        assert_eq!(batch.tokens[..32], blend.sample(4 * (step as usize - 1)).unwrap().tokens);
    }
    // Without weights each file is read once: too little for the run, and said so.
    let failure = open(&recipe(&two(["", ""]), &["train.steps=50"]), Position::default()).unwrap_err();
    assert!(failure.sentence.contains("files without weights are read once, which gives 65 samples"), "{failure}");
    let few = open(&recipe(&two(["", ""]), &["train.steps=10"]), Position::default()).unwrap().loader;
    let blend = Blend::exhausting(&source, Some(40)).unwrap();
    assert_eq!(few.batch(10, 1).unwrap().tokens[32..], blend.sample(39).unwrap().tokens);
}

#[test]
fn validation_takes_the_next_samples_with_every_look() {
    let set = ["train.eval_every=5", "train.eval_samples=3"];
    let recipe = recipe(&one(), &set);
    let run = open(&recipe, Position::default()).unwrap();
    let Some(Held::Looks(looks)) = &run.held_out else { panic!("no held-out data") };
    // Looks after steps 5, 10 and 15, and Megatron-LM's at the end.
    assert_eq!(validation_samples(&recipe), Asked::Samples(12));
    assert_eq!([looks.after(5, 15), looks.after(10, 15), looks.after(15, 15)], [0..3, 3..6, 9..12]);
    assert_eq!(looks.after(7, 7), 3..6);
    let file = Arc::new(IndexedDataset::open(golden("corpus_u16")).unwrap());
    let range = parts("80,15,5", file.sequences()).unwrap()[1].clone().unwrap();
    let set = GptDataset::new(file, range, Some(12), Part::Valid, &config(true), &Cache::none()).unwrap();
    let held = run.held_out.as_ref().unwrap();
    let picks = held.after(10, 15, Some(3), 2);
    let batches: Vec<_> = picks.iter().map(|&pick| held.batch(pick, 2).unwrap()).collect();
    assert_eq!(batches.len(), 2);
    assert_eq!(batches[0].tokens, [set.sample(3).unwrap().tokens, set.sample(4).unwrap().tokens].concat());
    assert_eq!(batches[1].tokens[..32], set.sample(5).unwrap().tokens);
    // The second half of the last one is padding.
    assert_eq!(batches[1].loss_mask[32..], [0.0; 32]);
    assert_eq!((batches[0].cu_seqlens.len(), batches[0].tokens.len()), (batches[1].cu_seqlens.len(), 64));
}

#[test]
fn files_of_their_own_for_every_part() {
    let path = |name| std::path::absolute(golden(name)).unwrap().display().to_string();
    let text = format!("train_data_path: {}, valid_data_path: [1, {}]", path("corpus_u16"), path("corpus_i32"));
    let recipe = recipe(&text, &[]);
    let run = open(&recipe, Position::default()).unwrap();
    let sequences = |name| IndexedDataset::open(golden(name)).unwrap().sequences() as u64;
    assert_eq!(run.loader.identity().documents, sequences("corpus_u16"));
    assert_eq!(run.held_out.unwrap().documents(), sequences("corpus_i32"));
}

#[test]
fn tokens_beyond_a_vocabulary_are_named_with_their_place() {
    let (folder, _) = written(&[vec![5, 6, 7, 300, 8, 0], vec![1; 40]], Dtype::U16);
    let prefix = folder.path().join("set");
    let given = format!("data_path: {}", prefix.display());
    let recipe = recipe(&given, &["data.megatron.split='1'", "train.seq_length=4", "train.steps=3"]);
    let mut loader = open(&recipe, Position::default()).unwrap().loader;
    let first_error =
        |loader: &Loader| (1..=3).flat_map(|step| [0, 1].map(|i| loader.batch(step, i))).find_map(Result::err);
    assert_eq!(first_error(&loader), None);
    loader.limit_vocab(Some(300));
    let said = "set.bin: token 300 at place 3 of sequence 0 (byte 6); the model has a vocabulary of 300";
    assert!(first_error(&loader).unwrap().sentence.ends_with(said));
    loader.limit_vocab(Some(301));
    assert_eq!(first_error(&loader), None);
    // Tokens of files are those of the tokenizer, which here are bytes.
    let named = Recipe::parse(&recipe.resolved_yaml().replace("eod: 0", "eod: null"), &Overrides::default()).unwrap();
    let loader = open(&named, Position::default()).unwrap().loader;
    let said = "token 300 at place 3 of sequence 0 (byte 6); data.tokenizer (bytes) has a vocabulary of 257";
    assert!(first_error(&loader).unwrap().sentence.ends_with(said));
}

#[rstest]
#[case("1,x", 2, "data.megatron.split: the split \"1,x\" has the part \"x\", which is no number")]
#[case("0,1,0", 2, "data.megatron.split: the split \"0,1,0\" has no training part")]
#[case("1,1,10000", 4, "set.idx: the training part has no tokens (sequences 0..0)")]
fn splits_that_leave_nothing_are_refused(#[case] split: &str, #[case] status: u8, #[case] sentence: &str) {
    let (folder, _) = written(&[vec![1, 2, 3], vec![4, 5]], Dtype::U16);
    let given = format!("data_path: {}", folder.path().join("set").display());
    let failure = open(&recipe(&given, &[&format!("data.megatron.split='{split}'")]), Position::default()).unwrap_err();
    assert!(failure.sentence.ends_with(sentence), "{failure}");
    assert_eq!(failure.exit_status(), status);
}

/// What ends documents may stand inside the sequences of a file.
#[test]
fn more_documents_than_the_index_knows_of_are_parted_too() {
    let (folder, _) = written(&[[1, 0].repeat(60)], Dtype::U16);
    let given = format!("data_path: {}", folder.path().join("set").display());
    let recipe = recipe(&given, &["data.megatron.split='1'", "train.steps=1", "train.seq_length=8"]);
    let loader = open(&recipe, Position::default()).unwrap().loader;
    assert_eq!(loader.cu_seqlens_len(), 3);
    let batch = loader.batch(1, 0).unwrap();
    assert!(batch.cu_seqlens.len() > 8 && batch.cu_seqlens.is_sorted());
    let ends: Vec<i32> = (0..16).filter(|&i| batch.tokens[i] == 0 && i % 8 != 7).map(|i| i as i32 + 1).collect();
    assert!(ends.iter().all(|end| batch.cu_seqlens.contains(end)));
    assert_eq!((batch.cu_seqlens[0], *batch.cu_seqlens.last().unwrap()), (0, 16));
}

#[test]
fn a_kept_index_gives_the_same_batches() {
    let folder = tempfile::tempdir().unwrap();
    let kept = format!("data.megatron.data_cache_path={}", Path::new(folder.path()).join("cache").display());
    let plain = open(&recipe(&two(["0.7", "0.3"]), &[]), Position::default()).unwrap().loader;
    for _ in 0..2 {
        let run = open(&recipe(&two(["0.7", "0.3"]), &[&kept]), Position::default()).unwrap();
        for step in 1..=15 {
            assert_eq!(run.loader.batch(step, 1).unwrap(), plain.batch(step, 1).unwrap());
        }
        assert_eq!((run.loader.identity(), run.bytes()), (plain.identity(), 0));
    }
    // Two files of two parts, and an order for each part.
    assert_eq!(std::fs::read_dir(folder.path().join("cache")).unwrap().count(), 6);
}
