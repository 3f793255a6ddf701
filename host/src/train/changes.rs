//! What a recipe changes about the run it resumes: the checkpoint holds the recipe it was written under.
//!
//! A changed model is refused, as another one would go on from the parameters; everything else is said in one line.
//! Keys are compared by value as dotted paths into the resolved recipes; a key without a value counts as not set.

use crate::failure::{Failure, Result};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Keys, or the first part of keys, that say how long a run lasts, where it is and what it tells.
const SILENT: [&str; 12] = [
    "name",
    "run",
    // Its hash is compared.
    "data.tokenizer",
    "data.prefetch",
    "data.ngram_order",
    "train.steps",
    "train.log_every",
    "train.eval_every",
    "train.eval_samples",
    "train.sample",
    "checkpoint",
    "log",
];

/// Keys, or the first part of keys, that change what is trained rather than how fast it learns.
const WEIGHTY: [&str; 6] =
    ["data", "train.seed", "train.seq_length", "train.global_batch_size", "train.precision", "optimizer.kind"];

/// Compares recipes (resolved YAML), then and now. Gives the line to warn with, if any; refuses a changed
/// configuration of a module, unless it is one of `hooks`, which are no part of the model.
pub(crate) fn compare(then: &str, now: &str, hooks: &[&str]) -> Result<Option<String>> {
    let [then, now] = [leaves(then)?, leaves(now)?];
    let (mut model, mut weighty, mut other) = (Vec::new(), Vec::new(), Vec::new());
    for key in then.keys().chain(now.keys()).collect::<BTreeSet<_>>() {
        let (old, new) = (then.get(key), now.get(key));
        if same(old, new) || SILENT.iter().any(|part| within(key, part)) {
            continue;
        }
        let change = format!("{key} ({}, now {})", shown(old), shown(new));
        match key.strip_prefix("modules.").and_then(|rest| rest.split_once('.')) {
            Some((module, _)) if hooks.contains(&module) => other.push(change),
            Some((_, "load")) => {
                other.push(format!("{change}, without effect: the run goes on from its own parameters"));
            }
            Some((_, rest)) if within(rest, "config") => model.push(change),
            Some((_, rest)) if ["provider", "elastify", "teacher"].iter().any(|part| within(rest, part)) => {
                weighty.push(change);
            }
            None if WEIGHTY.iter().any(|part| within(key, part)) => weighty.push(change),
            _ => other.push(change),
        }
    }
    if !model.is_empty() {
        return Err(Failure::data(format!("the model is not the checkpoint's: {}", model.join(", "))).remedy(
            "give these keys their values back, or begin a new run from the parameters with modules.NAME.load",
        ));
    }
    let mut parts = Vec::new();
    if !weighty.is_empty() {
        parts.push(format!("the run is no longer the one that was saved: {}", weighty.join(", ")));
    }
    if !other.is_empty() {
        parts.push(format!("changed since the checkpoint: {}", other.join(", ")));
    }
    Ok((!parts.is_empty()).then(|| parts.join("; ")))
}

/// Whether a dotted key is `part` or below it.
fn within(key: &str, part: &str) -> bool {
    key.strip_prefix(part).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn same(old: Option<&Value>, new: Option<&Value>) -> bool {
    match (old, new) {
        // 10000 and 1e4 are one number; two whole numbers are compared exactly.
        (Some(Value::Number(a)), Some(Value::Number(b))) if a.is_f64() != b.is_f64() => a.as_f64() == b.as_f64(),
        _ => old == new,
    }
}

fn shown(value: Option<&Value>) -> String {
    value.map_or("not set".into(), Value::to_string)
}

fn leaves(recipe: &str) -> Result<BTreeMap<String, Value>> {
    let tree: Value = serde_saphyr::from_str(recipe)
        .map_err(|error| Failure::data(format!("the checkpoint's recipe cannot be read: {error}")))?;
    let mut leaves = BTreeMap::new();
    collect(String::new(), tree, &mut leaves);
    Ok(leaves)
}

fn collect(key: String, value: Value, leaves: &mut BTreeMap<String, Value>) {
    match value {
        Value::Null => {}
        Value::Object(fields) => {
            for (name, value) in fields {
                let key = if key.is_empty() { name } else { format!("{key}.{name}") };
                collect(key, value, leaves);
            }
        }
        leaf => drop(leaves.insert(key, leaf)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const THEN: &str = "name: a\nmodules:\n  lm: {provider: p, config: {layers: 2, base: 10000, deep: {x: 1}}}\n  \
                        watch: {provider: h, config: {often: 1}}\ndata: {paths: [/a]}\noptimizer: {kind: adam, lr: 1}\n\
                        train: {steps: 5, seed: 1, micro_batch_size: 2}\nlog: {level: info}\n";

    #[rstest]
    #[case::nothing("name: a", "name: a", None)]
    #[case::length("steps: 5", "steps: 9", None)]
    #[case::logging("level: info", "level: debug", None)]
    #[case::looking("steps: 5", "steps: 5, eval_every: 3, sample: {tokens: 5}", None)]
    #[case::same_number("base: 10000", "base: 1.0e4", None)]
    #[case::not_set("layers: 2", "layers: 2, more: null", None)]
    #[case::rate("lr: 1", "lr: 2", Some("changed since the checkpoint: optimizer.lr (1, now 2)"))]
    #[case::load(
        "provider: p",
        "provider: p, load: /a",
        Some(
            "changed since the checkpoint: modules.lm.load (not set, now \"/a\"), without effect: the run goes on from its \
         own parameters"
        )
    )]
    #[case::hook("often: 1", "often: 2", Some("changed since the checkpoint: modules.watch.config.often (1, now 2)"))]
    #[case::data(
        "[/a]",
        "[/b]",
        Some("the run is no longer the one that was saved: data.paths ([\"/a\"], now [\"/b\"])")
    )]
    #[case::both(
        "seed: 1, micro_batch_size: 2",
        "seed: 3, micro_batch_size: 4",
        Some(
            "the run is no longer the one that was saved: train.seed (1, now 3); changed since the checkpoint: \
         train.micro_batch_size (2, now 4)"
        )
    )]
    fn changes_are_said_in_one_line(#[case] from: &str, #[case] to: &str, #[case] line: Option<&str>) {
        assert!(THEN.contains(from));
        assert_eq!(compare(THEN, &THEN.replacen(from, to, 1), &["watch"]).unwrap().as_deref(), line);
    }

    #[rstest]
    #[case::value("base: 10000", "base: 500", "modules.lm.config.base (10000, now 500)")]
    #[case::below("x: 1", "x: 2", "modules.lm.config.deep.x (1, now 2)")]
    #[case::new("layers: 2", "layers: 2, heads: 4", "modules.lm.config.heads (not set, now 4)")]
    #[case::gone("layers: 2, ", "", "modules.lm.config.layers (2, now not set)")]
    fn another_model_is_refused(#[case] from: &str, #[case] to: &str, #[case] change: &str) {
        let failure = compare(THEN, &THEN.replacen(from, to, 1), &["watch"]).unwrap_err();
        assert_eq!(failure.sentence, format!("the model is not the checkpoint's: {change}"));
        assert_eq!(failure.exit_status(), 4);
    }
}
