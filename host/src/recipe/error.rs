//! Words for a recipe that does not fit the schema: one sentence with place, key, value and the nearest known key.

use super::layers::Layers;
use crate::failure::Failure;
use figment::error::{Actual, Kind};
use strsim::normalized_damerau_levenshtein as similarity;

/// How much a key of another section counts against one of the same section.
const OTHER_SECTION: f64 = 0.8;

pub(super) fn explain(error: figment::Error, layers: &Layers) -> Failure {
    let path = error.path.join(".");
    // An error about a key's name comes with the name at the end of the path where figment read the key itself.
    let at = |name: &str| match error.path.last() {
        Some(last) if last != name => format!("{path}.{name}"),
        Some(_) => path.clone(),
        None => name.to_string(),
    };
    match error.kind {
        Kind::UnknownField(name, known) => unknown(&at(&name), layers, known),
        Kind::MissingField(name) => required(&at(&name), layers),
        Kind::InvalidType(Actual::Unit, _) if path != "modules" => required(&path, layers),
        Kind::InvalidType(actual, expected) | Kind::InvalidValue(actual, expected) => Failure::recipe(format!(
            "{}: `{path}` is {}, expected {}",
            layers.place(&path),
            words(&actual),
            wanted(&expected)
        )),
        Kind::UnknownVariant(name, known) => {
            let nearest = known.iter().max_by(|a, b| similarity(&name, a).total_cmp(&similarity(&name, b)));
            let hint = nearest.map(|nearest| format!("; the nearest is `{nearest}`")).unwrap_or_default();
            Failure::recipe(format!(
                "{}: `{path}` is `{name}`, expected one of {}{hint}",
                layers.place(&path),
                known.join(", ")
            ))
        }
        Kind::InvalidLength(found, expected) => {
            Failure::recipe(format!("{}: `{path}` has {found} elements, expected {expected}", layers.place(&path)))
        }
        other => {
            let value = if path.is_empty() { String::new() } else { format!("`{path}`: ") };
            Failure::recipe(format!("{}: {value}{other}", layers.place(&path)))
        }
    }
}

/// `known`: the keys that may stand in its place, where defaults.yaml does not state them.
pub(super) fn unknown(key: &str, layers: &Layers, known: &[&str]) -> Failure {
    let section = key.rsplit_once('.').map(|(section, _)| format!("{section}.")).unwrap_or_default();
    let all = match known {
        [] => layers.known_keys(),
        known => known.iter().rev().map(|name| format!("{section}{name}")).collect(),
    };
    Failure::recipe(format!(
        "{}: unknown key `{key}`; the nearest known key is `{}`",
        layers.place(key),
        nearest_key(key, &all)
    ))
}

fn required(key: &str, layers: &Layers) -> Failure {
    Failure::recipe(format!("{}: `{key}` is required and has no value", layers.place(key)))
        .remedy(format!("state it in the recipe or with --set {key}=VALUE"))
}

fn words(actual: &Actual) -> String {
    match actual {
        Actual::Str(text) => format!("`{text}`"),
        Actual::Unit => "empty".into(),
        Actual::Map => "a mapping".into(),
        Actual::Seq => "a list".into(),
        Actual::Bool(value) => format!("`{value}`"),
        Actual::Unsigned(value) => format!("`{value}`"),
        Actual::Signed(value) => format!("`{value}`"),
        Actual::Float(value) => format!("`{value}`"),
        other => other.to_string(),
    }
}

/// Rust's type names in the user's words.
pub(super) fn wanted(expected: &str) -> &str {
    match expected {
        "u64" | "usize" => "a whole number from 0",
        "f64" => "a number",
        "a string" | "path string" => "text",
        other if other.starts_with("struct ") || other == "a map" => "a mapping",
        "a sequence" => "a list",
        other => other,
    }
}

/// The known key most like `key`, with the module's own name in it.
fn nearest_key(key: &str, known: &[String]) -> String {
    let parts: Vec<&str> = key.split('.').collect();
    let module = (parts[0] == "modules").then(|| parts.get(1).copied()).flatten();
    let concrete = |pattern: &str| pattern.replace('*', module.unwrap_or("NAME"));
    let split =
        |path: &str| path.rsplit_once('.').map_or((String::new(), path.to_string()), |(s, n)| (s.into(), n.into()));
    let (section, name) = split(key);
    let score = |candidate: &String| {
        let (other_section, other_name) = split(&concrete(candidate));
        let whole = if other_section == section { 1.0 } else { OTHER_SECTION };
        whole * similarity(&name, &other_name)
    };
    let best = known.iter().max_by(|a, b| score(a).total_cmp(&score(b)));
    best.map(|best| concrete(best)).unwrap_or_default()
}
