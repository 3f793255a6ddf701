//! Where in a recipe the keys stand that others than the recipe's own checks refuse: providers their config, the engine
//! what the mesh or the machine cannot do.

use super::layers::{Layers, Origin};
use super::{Recipe, error};
use crate::failure::{Cause, Failure};
use std::fmt;
use std::sync::Arc;

/// The layers of a recipe after it is merged.
#[derive(Clone, Default)]
pub(crate) struct Places(Option<Arc<Layers>>);

impl Places {
    pub(super) fn new(layers: Layers) -> Places {
        Places(Some(Arc::new(layers)))
    }
}

/// Equal recipes look equal, wherever their keys came from.
impl fmt::Debug for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Places")
    }
}

impl Recipe {
    /// Where a key stands, or the nearest enclosing section: file, line and column, variable, or option.
    pub(crate) fn place(&self, key: &str) -> String {
        let layers = self.places.0.as_ref();
        layers.map(|layers| layers.section(key).unwrap_or_else(|| layers.place(key))).unwrap_or_else(|| "recipe".into())
    }

    /// A refusal of this recipe with the place of the key that it names in front: file, line and column, variable, or
    /// option. Keys of a provider's `config` become keys of the recipe.
    pub fn locate(&self, failure: Failure) -> Failure {
        let Some(layers) = self.places.0.as_ref().filter(|_| failure.cause == Cause::Recipe) else { return failure };
        let sentence = match self.of_provider(&failure.sentence, layers) {
            Some(sentence) => sentence,
            None => match self.first_key(&failure.sentence, layers) {
                Some(key) => format!("{}: {}", layers.place(&key), failure.sentence),
                None => return failure,
            },
        };
        Failure { sentence, ..failure }
    }

    /// The first word of a sentence that is a key somebody wrote, in full or without the module that it belongs to.
    fn first_key(&self, sentence: &str, layers: &Layers) -> Option<String> {
        words(sentence).filter(|word| word.contains('.')).find_map(|word| {
            let of_modules = self.modules.keys().map(|name| format!("modules.{name}.{word}"));
            std::iter::once(word.to_string()).chain(of_modules).find(|key| written(key, layers))
        })
    }

    /// A provider's sentence `NAME: config.key: why` or `NAME: why`, in the words of the recipe.
    fn of_provider(&self, sentence: &str, layers: &Layers) -> Option<String> {
        let (of_teacher, sentence) = match sentence.strip_prefix("teacher: ") {
            Some(rest) => (true, rest),
            None => (false, sentence),
        };
        let (module, provider, said) = self.modules.iter().find_map(|(name, module)| {
            let key = |part: &str| format!("modules.{name}{part}");
            let elastifier = module.elastify.as_ref().map(|e| (key(".elastify"), &e.provider));
            let teacher = module.teacher.as_ref();
            let teacher = teacher.map(|t| (key(".teacher"), t.provider.as_ref().unwrap_or(&module.provider)));
            let candidates = if of_teacher { [teacher, None] } else { [Some((key(""), &module.provider)), elastifier] };
            candidates.into_iter().flatten().find_map(|(key, provider)| {
                let rest = sentence.strip_prefix(provider.as_str())?.strip_prefix(": ")?;
                // A provider may begin with its own name once more.
                let rest = rest.strip_prefix(&format!("{provider}: ")).unwrap_or(rest);
                Some((key, provider, rest))
            })
        })?;
        let config = format!("{module}.config");
        let Some(rest) = said.strip_prefix("config").filter(|rest| rest.starts_with(['.', '[', ':'])) else {
            // The first key that it names, else the section.
            let keys = words(said).map(|word| format!("{config}.{word}"));
            let named = keys.filter(|key| written(key, layers)).map(|key| layers.place(&key)).next();
            let place = named.or_else(|| layers.section(&config)).unwrap_or_else(|| layers.place(&module));
            return Some(format!("{place}: {provider}: {said}"));
        };
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || "._[]-".contains(c))).unwrap_or(rest.len());
        let (inner, why) = rest.split_at(end);
        let inner = inner.replace('[', ".").replace(']', "");
        let key = format!("{config}{inner}");
        let why = why.strip_prefix(": ").map(|why| format!(": {why}")).unwrap_or(why.to_string());
        if let Some((unknown, hint)) = why.strip_prefix(": unknown key \"").and_then(|rest| rest.split_once('"')) {
            let key = format!("{key}.{unknown}");
            let hint = match hint.strip_prefix("; did you mean \"").and_then(|hint| hint.strip_suffix("\"?")) {
                Some(nearest) => format!("; the nearest known key is `{config}{inner}.{nearest}`"),
                None => hint.to_string(),
            };
            return Some(format!("{}: unknown key `{key}` of {provider}{hint}", layers.place(&key)));
        }
        if let Some(missing) = why.strip_prefix(": missing field `").and_then(|rest| rest.strip_suffix('`')) {
            let key = format!("{key}.{missing}");
            return Some(format!("{}: `{key}` is required by {provider} and has no value", layers.place(&key)));
        }
        Some(format!("{}: `{key}`{}", layers.place(&key), plain(&why)))
    }
}

/// `: invalid type: string "x", expected usize` as ` is "x", expected a whole number from 0`.
fn plain(why: &str) -> String {
    let wrong = why.strip_prefix(": invalid type: ").or_else(|| why.strip_prefix(": invalid value: "));
    let Some((value, expected)) = wrong.and_then(|wrong| wrong.split_once(", expected ")) else {
        return why.to_string();
    };
    let kinds = ["string ", "integer ", "floating point ", "boolean "];
    let value = kinds.iter().find_map(|kind| value.strip_prefix(kind)).unwrap_or(match value {
        "map" => "a mapping",
        "sequence" => "a list",
        "null" | "unit value" => "empty",
        other => other,
    });
    format!(" is {value}, expected {}", error::wanted(expected))
}

/// Words of a sentence that could be keys.
fn words(sentence: &str) -> impl Iterator<Item = &str> {
    let words = sentence.split(|c: char| !(c.is_ascii_alphanumeric() || "._-".contains(c)));
    words.map(|word| word.trim_matches('.')).filter(|word| !word.is_empty())
}

/// Whether somebody wrote a key, other than the defaults.
fn written(key: &str, layers: &Layers) -> bool {
    !matches!(layers.origin_of(key), None | Some(Origin::Defaults))
}

#[cfg(test)]
mod tests {
    use super::super::{Overrides, Recipe};
    use super::*;
    use rstest::rstest;

    const TEXT: &str = "\
name: t
modules:
  lm:
    provider: dense
    config:
      size: wide
      stages: [{kind: a}, {kind: b}]
    grid: {cp: 2}
data: {paths: [x]}
optimizer: {lr: 1}
train: {steps: 1, seq_length: 4, global_batch_size: 3}
";

    #[rstest]
    #[case(
        "dense: config: unknown key \"sise\"; did you mean \"size\"?",
        "recipe:5:5: unknown key `modules.lm.config.sise` of dense; the nearest known key is `modules.lm.config.size`"
    )]
    #[case(
        "dense: config.stages[1]: unknown key \"kind\"; known keys: name",
        "recipe:7:28: unknown key `modules.lm.config.stages.1.kind` of dense; known keys: name"
    )]
    #[case(
        "dense: config.size: invalid type: string \"wide\", expected usize",
        "recipe:6:7: `modules.lm.config.size` is \"wide\", expected a whole number from 0"
    )]
    #[case(
        "dense: config.size: invalid type: floating point `1.5`, expected usize",
        "recipe:6:7: `modules.lm.config.size` is `1.5`, expected a whole number from 0"
    )]
    #[case(
        "dense: dense: config.size is 0; it must be more",
        "recipe:6:7: `modules.lm.config.size` is 0; it must be more"
    )]
    #[case(
        "dense: config: missing field `layers`",
        "recipe:5:5: `modules.lm.config.layers` is required by dense and has no value"
    )]
    #[case(
        "dense: config.depth is 0; it must be more",
        "--set modules.lm.config.depth=0: `modules.lm.config.depth` is 0; it must be more"
    )]
    #[case(
        "dense: config.width is 0; it must be more",
        "environment variable GANTRY_MODULES__LM__CONFIG__WIDTH: `modules.lm.config.width` is 0; it must be more"
    )]
    #[case("dense: heads do not divide sizes", "recipe:5:5: dense: heads do not divide sizes")]
    #[case("dense: the size and depth disagree", "recipe:6:7: dense: the size and depth disagree")]
    #[case(
        "modules.lm.grid.cp is 2; this version supports 1 only",
        "recipe:8:12: modules.lm.grid.cp is 2; this version supports 1 only"
    )]
    #[case("axis heads: grid.cp = 2 does not divide it", "recipe:8:12: axis heads: grid.cp = 2 does not divide it")]
    #[case("nothing of any key", "nothing of any key")]
    fn refusals_of_others_name_the_place(#[case] said: &str, #[case] expected: &str) {
        let overrides = Overrides {
            environment: vec![("GANTRY_MODULES__LM__CONFIG__WIDTH".into(), "0".into())],
            set: vec!["modules.lm.config.depth=0".into()],
        };
        let recipe = Recipe::parse(TEXT, &overrides).unwrap();
        assert_eq!(recipe.locate(Failure::recipe(said)).sentence, expected);
        // What is no fault of the recipe stays as it is.
        assert_eq!(recipe.locate(Failure::data(said)).sentence, said);
    }
}
