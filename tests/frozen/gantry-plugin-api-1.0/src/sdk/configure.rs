//! How a provider comes out of the `config` section of a recipe.
//!
//! The schema that describes a config to `gantry inspect` and to editors is also what unknown keys are checked against,
//! so that a misspelt key is an error that names the nearest one.

use super::hugging_face::{self, HuggingFace};
use super::{Error, Result};
use crate::plan::{ProviderInfo, ProviderKind};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// What `export_plugin!` asks of every provider, elastifier and set of hooks.
pub trait Configure: Sized + 'static {
    /// The `config` section. Derive `Deserialize` and `JsonSchema`; doc comments become descriptions.
    type Config: DeserializeOwned + JsonSchema;

    /// One line for `gantry inspect`.
    const SUMMARY: &'static str;

    /// Its Hugging Face folders, if it has any; see [`HuggingFace`].
    const HUGGING_FACE: Option<HuggingFace<Self>> = None;

    /// The provider of a config, or what is wrong with the config.
    fn new(config: Self::Config) -> Result<Self>;
}

pub(crate) fn info<T: Configure>(name: &str, kind: ProviderKind) -> ProviderInfo {
    ProviderInfo {
        name: name.into(),
        kind,
        summary: T::SUMMARY.into(),
        config_schema: schema::<T::Config>(),
        hugging_face: hugging_face::kind::<T>(),
    }
}

pub(crate) fn schema<C: JsonSchema>() -> Value {
    schemars::schema_for!(C).to_value()
}

pub(crate) fn create<T: Configure>(name: &str, config: &Value) -> Result<T> {
    T::new(parse(name, config)?).map_err(|e| e.at(name))
}

/// A config from JSON; errors name the key by its path, after `name`.
pub(crate) fn parse<C: DeserializeOwned + JsonSchema>(name: &str, config: &Value) -> Result<C> {
    // A module without a config section has an empty one.
    let empty = Value::Object(serde_json::Map::new());
    let config = if config.is_null() { &empty } else { config };
    let schema = schema::<C>();
    check_keys(&schema, &schema, config, "config").map_err(|e| e.at(name))?;
    serde_path_to_error::deserialize(config).map_err(|e| {
        let path = match e.path().to_string() {
            p if p == "." => "config".into(),
            p => format!("config.{p}"),
        };
        Error::config(format!("{name}: {path}: {}", e.into_inner()))
    })
}

/// Refuses keys the schema does not have, wherever it lists the properties of an object.
fn check_keys(root: &Value, schema: &Value, value: &Value, path: &str) -> Result<()> {
    let schema = resolve(root, schema);
    // Of alternatives one has to fit; a map or list is looked into by the first whose kind it is.
    for alternatives in ["anyOf", "oneOf", "allOf"].iter().filter_map(|k| schema.get(k)?.as_array()) {
        let fits = |s: &&Value| {
            let kind = resolve(root, s).get("type").and_then(Value::as_str);
            (value.is_object() && kind == Some("object")) || (value.is_array() && kind == Some("array"))
        };
        let mut candidates = alternatives.iter().filter(fits).map(|s| check_keys(root, s, value, path));
        if let Some(first) = candidates.next()
            && first.is_err()
            && !candidates.any(|r| r.is_ok())
        {
            return first;
        }
    }
    match value {
        Value::Object(map) => {
            let Some(known) = schema.get("properties").and_then(Value::as_object) else { return Ok(()) };
            let open = matches!(schema.get("additionalProperties"), Some(Value::Bool(true) | Value::Object(_)));
            for (key, inner) in map {
                match known.get(key) {
                    Some(property) => check_keys(root, property, inner, &format!("{path}.{key}"))?,
                    None if open => {}
                    None => {
                        let hint = nearest(key, known.keys().map(String::as_str))
                            .map(|k| format!("; did you mean \"{k}\"?"))
                            .unwrap_or_else(|| {
                                let keys: Vec<&str> = known.keys().map(String::as_str).collect();
                                format!("; known keys: {}", keys.join(", "))
                            });
                        return Err(Error::config(format!("{path}: unknown key \"{key}\"{hint}")));
                    }
                }
            }
            Ok(())
        }
        Value::Array(items) => match schema.get("items") {
            Some(item) => items
                .iter()
                .enumerate()
                .try_for_each(|(i, value)| check_keys(root, item, value, &format!("{path}[{i}]"))),
            None => Ok(()),
        },
        _ => Ok(()),
    }
}

/// Follows `$ref`s into the definitions of `root`.
fn resolve<'a>(root: &'a Value, mut schema: &'a Value) -> &'a Value {
    // Definitions do not refer to themselves without an object in between; the bound is for foreign schemas.
    for _ in 0..16 {
        let target = schema.get("$ref").and_then(Value::as_str).and_then(|r| r.strip_prefix('#'));
        match target.and_then(|t| root.pointer(t)) {
            Some(next) => schema = next,
            None => break,
        }
    }
    schema
}

/// The known key closest to `key`, if it is close enough to be meant.
fn nearest<'a>(key: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let limit = key.chars().count().max(3) / 3 + 1;
    known.map(|k| (edit_distance(key, k), k)).filter(|(d, _)| *d <= limit).min().map(|(_, k)| k)
}

/// Least number of inserted, deleted or replaced characters that make `a` into `b` (Levenshtein).
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let replace = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = replace.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use serde_json::json;

    #[derive(Debug, Deserialize, JsonSchema)]
    struct Config {
        layers: usize,
        #[serde(default)]
        moe: Option<Moe>,
        #[serde(default)]
        stages: Vec<Moe>,
    }

    #[derive(Debug, Deserialize, JsonSchema)]
    #[serde(default)]
    #[derive(Default)]
    struct Moe {
        experts: usize,
        aux_loss: f64,
    }

    #[derive(Debug)]
    struct Model(Config);

    impl Configure for Model {
        type Config = Config;
        const SUMMARY: &'static str = "a test";
        fn new(config: Config) -> Result<Model> {
            if config.layers == 0 { Err(Error::config("layers must be positive")) } else { Ok(Model(config)) }
        }
    }

    fn message(config: Value) -> String {
        let e = create::<Model>("m", &config).unwrap_err();
        assert_eq!(e.kind, crate::sdk::ErrorKind::Config);
        e.message
    }

    #[test]
    fn a_good_config_makes_a_provider() {
        let m = create::<Model>("m", &json!({"layers": 2, "moe": {"experts": 8}, "stages": [{"aux_loss": 0.1}]}));
        let Config { layers, moe, stages } = m.unwrap().0;
        assert_eq!((layers, moe.unwrap().experts, stages[0].aux_loss), (2, 8, 0.1));
    }

    #[test]
    fn unknown_keys_name_the_nearest_at_any_depth() {
        assert_eq!(message(json!({"layer": 2})), "m: config: unknown key \"layer\"; did you mean \"layers\"?");
        assert_eq!(
            message(json!({"layers": 2, "moe": {"expert": 2}})),
            "m: config.moe: unknown key \"expert\"; did you mean \"experts\"?"
        );
        assert_eq!(
            message(json!({"layers": 2, "stages": [{}, {"auxloss": 2}]})),
            "m: config.stages[1]: unknown key \"auxloss\"; did you mean \"aux_loss\"?"
        );
        assert!(message(json!({"layers": 2, "zzzzzzz": 1})).contains("known keys: layers, moe, stages"));
    }

    #[test]
    fn wrong_types_name_the_path() {
        assert!(
            message(json!({"layers": 1, "moe": {"experts": "x"}})).starts_with("m: config.moe.experts: invalid type")
        );
        assert!(message(json!({})).starts_with("m: config: missing field `layers`"));
        assert_eq!(message(json!({"layers": 0})), "m: layers must be positive");
    }
}
