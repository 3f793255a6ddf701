//! What a recipe may say, and the sentence for everything it may not.

use super::*;
use crate::failure::Cause;
use rstest::rstest;

const GOOD: &str = "\
name: tiny
modules:
  lm:
    provider: nemotron-hybrid
    config: {pattern: M*E-ME, hidden_size: 128}
data:
  paths: [text]
train:
  steps: 10
  seq_length: 64
  global_batch_size: 8
optimizer:
  lr: 1e-3
";

fn set(assignments: &[&str]) -> Overrides {
    Overrides { environment: Vec::new(), set: assignments.iter().map(|text| text.to_string()).collect() }
}

#[test]
fn defaults_fill_what_a_recipe_leaves_out() {
    let recipe = Recipe::parse(GOOD, &Overrides::default()).unwrap();
    assert_eq!(recipe.name, "tiny");
    assert_eq!((recipe.train.micro_batch_size, recipe.train.precision), (1, Precision::Fp32));
    assert_eq!((recipe.optimizer.lr, recipe.optimizer.betas), (1e-3, [0.9, 0.95]));
    let module = &recipe.modules["lm"];
    assert_eq!((module.grid.tp, module.grid.dp, module.freeze), (1, None, false));
    assert_eq!(module.config["pattern"], "M*E-ME");
    assert_eq!(recipe.run_dir(), Path::new("runs/tiny"));
}

#[test]
fn later_layers_win() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    std::fs::create_dir(folder.path().join("base")).unwrap();
    file("base/base.yaml", GOOD);
    file(
        "run.yaml",
        "extends: base/base.yaml\ntrain: {steps: 20, seed: 1}\nmodules: {lm: {config: {hidden_size: 64}}}\n",
    );
    let overrides = Overrides {
        environment: vec![
            ("GANTRY_TRAIN__SEED".into(), "2".into()),
            ("GANTRY_TRAIN__LOG_EVERY".into(), "3".into()),
            ("GANTRY_PLUGIN_PATH".into(), "/elsewhere".into()),
        ],
        set: vec!["train.log_every=4".into(), "modules.lm.config.pattern=*M".into(), "data.exclude=[a, b]".into()],
    };
    let recipe = Recipe::load(&folder.path().join("run.yaml"), &overrides).unwrap();
    assert_eq!((recipe.train.steps, recipe.train.seed, recipe.train.log_every), (20, 2, 4));
    assert_eq!(recipe.modules["lm"].config["hidden_size"], 64);
    assert_eq!(recipe.modules["lm"].config["pattern"], "*M");
    assert_eq!(recipe.data.exclude, ["a", "b"]);
    // The path is relative to the file that states it.
    assert_eq!(recipe.data.paths, [folder.path().join("base/text")]);
}

#[test]
fn another_provider_does_not_inherit_the_config_of_the_old_one() {
    let other = set(&["modules.lm={provider: dense-gpt, config: {num_layers: 2}}", "modules.lm.config.hidden_size=8"]);
    let config = &Recipe::parse(GOOD, &other).unwrap().modules["lm"].config;
    assert_eq!(serde_json::json!(config), serde_json::json!({"num_layers": 2, "hidden_size": 8}));
    // Naming the same one again changes nothing.
    let same = set(&["modules.lm.provider=nemotron-hybrid"]);
    assert_eq!(Recipe::parse(GOOD, &same).unwrap().modules["lm"].config["hidden_size"], 128);
}

#[test]
fn resolved_recipe_loads_to_the_same() {
    let more = set(&[
        "plugins=[a.so, {path: b.so}]",
        "run.dir=out",
        "data.valid_paths=[b]",
        "optimizer.eps=1e-8",
        "modules.lm.config.x=*E-",
    ]);
    let recipe = Recipe::parse(GOOD, &more).unwrap();
    let again = Recipe::parse(recipe.resolved_yaml(), &Overrides::default()).unwrap();
    assert_eq!(format!("{recipe:?}"), format!("{again:?}"));
    assert!(again.run_dir().is_absolute());
    assert!(recipe.resolved_yaml().contains("micro_batch_size: 1"));
}

#[rstest]
#[case("trian:\n  steps: 3\n", "recipe:14:1: unknown key `trian`; the nearest known key is `train`")]
#[case(
    "checkpoint:\n  evry: 3\n",
    "recipe:15:3: unknown key `checkpoint.evry`; the nearest known key is `checkpoint.every`"
)]
#[case("seq_length: 3\n", "recipe:14:1: unknown key `seq_length`; the nearest known key is `train.seq_length`")]
#[case(
    "log: {level: dbug}\n",
    "recipe:14:7: `log.level` is `dbug`, expected one of error, warn, info, debug, trace; the nearest is `debug`"
)]
#[case("run: 5\n", "recipe:14:1: `run` is `5`, expected a mapping")]
#[case("train: {}\n", "recipe:14:1: bad YAML: the key `train` stands here a second time")]
fn bad_text_is_refused_with_its_line(#[case] more: &str, #[case] sentence: &str) {
    let failure = Recipe::parse(&format!("{GOOD}{more}"), &Overrides::default()).unwrap_err();
    assert_eq!((failure.sentence.as_str(), failure.exit_status()), (sentence, 2));
}

#[rstest]
#[case("train.steps=many", "`train.steps` is `many`, expected a whole number from 0")]
#[case("train.steps=-1", "`train.steps` is `-1`, expected a whole number from 0")]
#[case("train.steps=0", "`train.steps` is 0, expected at least 1")]
#[case("train.stepz=1", "unknown key `train.stepz`; the nearest known key is `train.steps`")]
#[case("modules.lm.grid.tpp=1", "unknown key `modules.lm.grid.tpp`; the nearest known key is `modules.lm.grid.tp`")]
#[case("modules.lm.grid.tp=0", "`modules.lm.grid.tp` is 0, expected at least 1")]
#[case("train.precision=bf16", "`train.precision: bf16` needs a GPU and `device` is cpu")]
#[case("train.micro_batch_size=3", "no multiple of `train.micro_batch_size` (3)")]
#[case("modules.lm.grid.dp=3", "no multiple of `train.micro_batch_size` (1) times `modules.lm.grid.dp` (3)")]
#[case("optimizer.betas=[0.9]", "`optimizer.betas` has 1 elements, expected an array of length 2")]
#[case("optimizer.betas=[0.9, 0.95, 0.99]", "`optimizer.betas` has 3 elements, expected an array of length 2")]
#[case("modules.lm.config={a: .nan}", "NaN and infinity are no values of a recipe")]
#[case("optimizer.betas=[0.9, 1.0]", "`optimizer.betas` is 1, expected 0 to less than 1")]
#[case("optimizer.lr=-1", "`optimizer.lr` is -1, expected at least 0")]
#[case("optimizer.eps=0", "`optimizer.eps` is 0, expected more than 0")]
#[case("optimizer.multipliers=[{match: '[a', lr: 1}]", "`optimizer.multipliers.0.match` is `[a`, which is no glob")]
#[case(
    "optimizer.multipliers=[{match: a, lr: 2}, {match: b}]",
    "`optimizer.multipliers.1` (match: b) states neither `lr` nor `weight_decay`"
)]
#[case("optimizer.multipliers=[{match: a, lr: -1}]", "`optimizer.multipliers.0.lr` is -1, expected at least 0")]
#[case("optimizer.multipliers=[{lr: 1}]", "`optimizer.multipliers.0.match` is required and has no value")]
#[case("optimizer.multipliers=[{match: a, wd: 1}]", "unknown key `optimizer.multipliers.0.wd`")]
#[case("train.on_nonfinite=ignore", "`train.on_nonfinite` is `ignore`, expected one of stop, skip")]
#[case("train.max_skipped_steps=0", "`train.max_skipped_steps` is 0, expected at least 1")]
#[case("train.spike_factor=1", "`train.spike_factor` is 1, expected more than 1")]
#[case("train.spike_window=0", "`train.spike_window` is 0, expected at least 1")]
#[case("train.spike_window=100000", "`train.spike_window` is 100000, expected at most 65536")]
#[case("train.global_batch_size=1000000000000", "`train.global_batch_size` is 1000000000000, expected at most")]
#[case("train.micro_batch_size=18446744073709551615", "`train.micro_batch_size` is 18446744073709551615, expected at")]
#[case("train.seq_length=18446744073709551615", "`train.seq_length` is 18446744073709551615, expected at most")]
#[case(
    "data={paths: [], synthetic: {vocab: 9, document_length: 5, tokens: 1000000000000}}",
    "`data.synthetic.tokens` is 1000000000000, expected at most 2147483648"
)]
#[case(
    "data={paths: [], synthetic: {task: copy, vocab: 2, document_length: 5, tokens: 9}}",
    "`data.synthetic.vocab` is 2, expected 3 to 2147483647"
)]
#[case(
    "data={paths: [], synthetic: {task: copi, vocab: 9, document_length: 5, tokens: 9}}",
    "`data.synthetic.task` is `copi`, expected one of uniform, markov, copy, induction; the nearest is `copy`"
)]
#[case("data.exclude=['[']", "`data.exclude` has `[`, which is no glob")]
#[case("data.extensions=[.txt]", "extensions are written without the dot: `txt`")]
#[case("schedule={kind: wsd, wsd_decay_steps: 0}", "`schedule.wsd_decay_steps` is 0, expected at least 1")]
#[case("optimizer.lr=.nan", "NaN and infinity are no values of a recipe")]
#[case("optimizer.lr=null", "`optimizer.lr` is required and has no value")]
#[case("optimizer.min_lr=1", "`optimizer.min_lr` is 1, expected 0 to 0.001")]
#[case(
    "schedule={warmup_steps: 9, decay_steps: 9}",
    "`schedule.warmup_steps` (9) is not below `schedule.decay_steps` (9)"
)]
#[case("schedule.kind=wsd", "`schedule.wsd_decay_steps` is required with `schedule.kind: wsd`")]
#[case("schedule.wsd_decay_steps=3", "`schedule.wsd_decay_steps` has no effect without `schedule.kind: wsd`")]
#[case("schedule.weight_decay_start=0", "`schedule.weight_decay_start` has no effect")]
#[case(
    "data.synthetic={vocab: 9, document_length: 5, tokens: 9}",
    "`data.synthetic` and `data.paths` exclude each other"
)]
#[case("train.eval_every=5", "`train.eval_every` has no effect without `data.valid_fraction` or `data.valid_paths`")]
#[case("train.eval_samples=0", "`train.eval_samples` is 0, expected at least 1")]
#[case("train.sample={prompt: a, tokens: 0, temperature: 1}", "`train.sample.tokens` is 0, expected at least 1")]
#[case("train.sample={prompt: a, tokens: 5, temperature: -1}", "`train.sample.temperature` is -1, expected at least 0")]
#[case("train.sample={prompt: a}", "`train.sample.tokens` is required and has no value")]
#[case("train.sample={prompt: a, token: 5}", "unknown key `train.sample.token`")]
#[case("data.paths=[]", "none of `data.paths`, `data.synthetic` and `data.megatron.data_path` is given")]
#[case("data.valid_fraction=1", "`data.valid_fraction` is 1, expected 0 to less than 1")]
#[case("data.valid_fraction=-0.1", "`data.valid_fraction` is -0.1, expected 0 to less than 1")]
#[case("data={valid_fraction: 0.1, valid_paths: [x]}", "`data.valid_fraction` and `data.valid_paths` exclude each")]
#[case(
    "data={paths: [], synthetic: {vocab: 9, document_length: 5, tokens: 9}, valid_paths: [x]}",
    "`data.synthetic` and `data.valid_paths` exclude each other"
)]
#[case(
    "data={paths: [], synthetic: {vocab: 9, document_length: 5, tokens: 9}, tracked_only: true}",
    "`data.tracked_only` has no effect with `data.synthetic`"
)]
#[case("data.ngram_order=3", "`data.ngram_order` has no effect without `data.valid_fraction` or `data.valid_paths`")]
#[case("data={ngram_order: 17, valid_fraction: 0.1}", "`data.ngram_order` is 17, expected at most 16")]
#[case("data.prefetch=1000000", "`data.prefetch` is 1000000, expected at most 1024")]
#[case("checkpoint.keep_last=0", "`checkpoint.keep_last` is 0, expected at least 1")]
#[case("checkpoint.keep_every=0", "`checkpoint.keep_every` is 0, expected at least 1")]
#[case("checkpoint.keep_every=150", "`checkpoint.keep_every` is 150, expected a multiple of `checkpoint.every` (100)")]
#[case("checkpoint.async=later", "`checkpoint.async`")]
#[case("checkpoint.keep_best=3", "`checkpoint.keep_best`")]
#[case("checkpoint.keep_best=true", "expected a multiple of `train.eval_every` (0)")]
#[case("name=a/b", "`name` is `a/b`")]
#[case("plugins=[{path: x, sha256: ab}]", "`plugins.0.sha256` is `ab`, expected 64 hexadecimal digits")]
#[case("plugins=[{file: x}]", "unknown key `plugins.0.file`; the nearest known key is `plugins.0.path`")]
#[case("train", "expected key.path=value")]
#[case("train..steps=1", "empty part in key `train..steps`")]
fn bad_override_is_refused_by_name(#[case] assignment: &str, #[case] part: &str) {
    let failure = Recipe::parse(GOOD, &set(&[assignment])).unwrap_err();
    assert!(failure.sentence.contains(part), "{} does not contain {part}", failure.sentence);
    // Disagreements of two values name the place of one of them, which may be the file.
    let named = failure.sentence.starts_with("--set");
    assert!(named || failure.sentence.starts_with("recipe:"), "{}", failure.sentence);
    assert_eq!(failure.cause, Cause::Recipe);
}

#[test]
fn files_reached_on_many_ways_are_read_once_and_count_where_they_stand_last() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    // 2^40 ways down.
    for i in 0..40 {
        file(&format!("d{i}.yaml"), &format!("extends: [d{0}.yaml, d{0}.yaml]\n", i + 1));
    }
    file("d40.yaml", GOOD);
    let recipe = Recipe::load(&folder.path().join("d0.yaml"), &Overrides::default()).unwrap();
    assert_eq!(recipe.name, "tiny");
    // base, left, base, right: base stands last before right, so it wins over left.
    file("left.yaml", "extends: d40.yaml\nname: left\ntrain: {seed: 5, log_every: 5}\n");
    file("right.yaml", "extends: d40.yaml\ntrain: {log_every: 6}\n");
    file("both.yaml", "extends: [left.yaml, right.yaml]\n");
    let recipe = Recipe::load(&folder.path().join("both.yaml"), &Overrides::default()).unwrap();
    assert_eq!((recipe.name.as_str(), recipe.train.seed, recipe.train.log_every), ("tiny", 5, 6));
}

#[rstest]
#[case("a: 1\n---\nb: 2\n", "several YAML documents")]
#[case("a: &x [*x]\n", "an alias (`*name`) stands inside the value that it repeats")]
fn yaml_that_is_no_recipe_is_refused_in_plain_words(#[case] text: &str, #[case] words: &str) {
    let failure = Recipe::parse(text, &Overrides::default()).unwrap_err();
    assert!(failure.sentence.contains(words), "{failure}");
}

#[test]
fn variable_that_is_not_utf8_is_refused() {
    let overrides = Overrides { environment: vec![("GANTRY_TRAIN__STEPS".into(), "\u{fffd}".into())], set: Vec::new() };
    let failure = Recipe::parse(GOOD, &overrides).unwrap_err();
    assert_eq!(failure.sentence, "environment variable GANTRY_TRAIN__STEPS: its value is not UTF-8");
    let ours = Overrides { environment: vec![("OTHER".into(), "\u{fffd}".into())], set: Vec::new() };
    Recipe::parse(GOOD, &ours).unwrap();
}

#[rstest]
#[case("GANTRY_TRAIN_STEPS", Some("GANTRY_TRAIN__STEPS"))]
#[case("GANTRY_OPTIMIZER_MIN_LR", Some("GANTRY_OPTIMIZER__MIN_LR"))]
#[case("GANTRY_PLUGIN_PATH", None)]
#[case("GANTRY_RUN", None)]
fn a_variable_with_single_underscores_is_not_passed_over(#[case] name: &str, #[case] right: Option<&str>) {
    let overrides = Overrides { environment: vec![(name.into(), "1".into())], set: Vec::new() };
    let failure = Recipe::parse(GOOD, &overrides).err().map(|failure| failure.sentence);
    match right {
        None => assert_eq!(failure, None),
        Some(right) => assert!(failure.unwrap().ends_with(&format!("is written {right}"))),
    }
}

#[test]
fn misspelt_variable_is_named() {
    let overrides = Overrides { environment: vec![("GANTRY_TRAIN__STEPZ".into(), "1".into())], set: Vec::new() };
    let failure = Recipe::parse(GOOD, &overrides).unwrap_err();
    assert!(failure.sentence.starts_with("environment variable GANTRY_TRAIN__STEPZ: unknown key `train.stepz`"));
}

/// The misspelt key is named, not the one that is missing for it.
#[test]
fn misspelt_required_key_is_named() {
    let failure = Recipe::parse(&GOOD.replace("  steps: 10", "  stepz: 10"), &Overrides::default()).unwrap_err();
    assert_eq!(failure.sentence, "recipe:9:3: unknown key `train.stepz`; the nearest known key is `train.steps`");
}

#[test]
fn missing_key_names_file_and_remedy() {
    let failure = Recipe::parse(&GOOD.replace("  lr: 1e-3", "  eps: 1e-9"), &Overrides::default()).unwrap_err();
    assert_eq!(failure.sentence, "recipe:12:1: `optimizer.lr` is required and has no value");
    assert!(failure.remedy.unwrap().contains("--set optimizer.lr=VALUE"));
}

/// A file, a folder or a device that is no recipe: refused in one sentence, quickly.
#[rstest]
#[case::huge("x".repeat(1 << 21).into_bytes(), "it is larger than 1 MiB")]
#[case::binary(b"name: \xff\n".to_vec(), "it is not UTF-8 text")]
fn file_that_is_no_recipe_is_refused(#[case] bytes: Vec<u8>, #[case] why: &str) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("r.yaml");
    std::fs::write(&file, bytes).unwrap();
    let failure = Recipe::load(&file, &Overrides::default()).unwrap_err();
    assert_eq!(failure.sentence, format!("{} is no recipe: {why}", file.display()));
    std::fs::write(folder.path().join("top.yaml"), "name: a\nextends: r.yaml\n").unwrap();
    let failure = Recipe::load(&folder.path().join("top.yaml"), &Overrides::default()).unwrap_err();
    assert!(failure.sentence.contains("top.yaml:2:1: ") && failure.sentence.ends_with(why), "{failure}");
    for path in [folder.path(), Path::new("/dev/zero"), Path::new("/dev/null")] {
        let failure = Recipe::load(path, &Overrides::default()).unwrap_err();
        assert_eq!(failure.sentence, format!("{} is no recipe: it is no file", path.display()));
        assert_eq!((failure.exit_status(), failure.details.len()), (2, 0));
    }
}

#[test]
fn cycle_of_extended_files_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a.yaml"), "extends: b.yaml\nname: a\n").unwrap();
    std::fs::write(folder.path().join("b.yaml"), "extends: [a.yaml]\nname: b\n").unwrap();
    let failure = Recipe::load(&folder.path().join("a.yaml"), &Overrides::default()).unwrap_err();
    assert!(failure.sentence.ends_with("a.yaml extends itself"), "{}", failure.sentence);
    assert!(failure.details[0].contains("b.yaml -> "));
}

#[test]
fn missing_file_is_named_with_who_extends_it() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a.yaml"), "name: a\nextends: none.yaml\n").unwrap();
    let failure = Recipe::load(&folder.path().join("a.yaml"), &Overrides::default()).unwrap_err();
    assert!(failure.sentence.contains("a.yaml:2:1: cannot read recipe") && failure.sentence.contains("none.yaml"));
    assert_eq!(failure.exit_status(), 2);
}
