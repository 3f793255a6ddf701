//! The JSON schema of recipes, by which editors complete keys, show their meaning and mark mistakes.
//!
//! Types come from the structs of `schema.rs`, defaults and meanings from `defaults.yaml`, and what may stand under
//! `config` from the providers' own schemas. A recipe need not state a key that has no default, as a file it extends or an
//! option may; so only parts that are given whole (an entry of a list, say) have required keys.

use super::layers::{DEFAULTS, MODULE_TEMPLATE};
use super::{Module, Recipe};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// The schema (draft 2020-12), with `providers`: (name, schema of its config).
pub fn json_schema(providers: &[(String, Value)]) -> Value {
    let mut schema = plain(schemars::schema_for!(Recipe).to_value());
    let defaults: Value = serde_saphyr::from_str(DEFAULTS).unwrap_or_default();
    let meanings = meanings();
    describe(&mut schema, &defaults, "", &meanings);
    let mut module = plain(schemars::schema_for!(Module).to_value());
    describe(&mut module, &defaults[MODULE_TEMPLATE], &format!("{MODULE_TEMPLATE}."), &meanings);
    let mut definitions = Map::new();
    let mut cases = Vec::new();
    for (name, config) in providers {
        let mut config = config.clone();
        // References into a provider's schema stay in it.
        let base = format!("#/$defs/{name}");
        rebase(&mut config, &base);
        if let Some(config) = config.as_object_mut() {
            config.remove("$schema");
        }
        definitions.insert(name.clone(), config);
        cases.push(json!({
            "if": {"properties": {"provider": {"const": name}}, "required": ["provider"]},
            "then": {"properties": {"config": {"$ref": base}}}
        }));
    }
    if !cases.is_empty() {
        module["allOf"] = cases.into();
        module["properties"]["provider"]["examples"] = providers.iter().map(|(name, _)| name.clone()).collect();
    }
    schema["properties"]["modules"]["additionalProperties"] = module;
    schema["properties"]["extends"] = json!({
        "description": "files whose values this one begins from, relative to it; later ones win",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]
    });
    schema["title"] = "Gantry recipe".into();
    schema["description"] = "Everything about a run; docs/recipes.md explains it.".into();
    schema["$defs"] = definitions.into();
    schema
}

/// A key of the reference.
#[derive(Clone, Debug, PartialEq)]
pub struct Key {
    /// Dotted path; `modules.NAME` stands for any module.
    pub path: String,
    /// In words.
    pub kind: String,
    /// As YAML; `null` where there is none.
    pub default: String,
}

/// Every key of a recipe in the order of `defaults.yaml`.
pub fn reference() -> Vec<Key> {
    let schema = json_schema(&[]);
    let mut keys = Vec::new();
    for (path, _) in lines() {
        let (mut at, mut shown) = (&schema, path.clone());
        let parts = match path.strip_prefix(MODULE_TEMPLATE).filter(|rest| rest.is_empty() || rest.starts_with('.')) {
            Some(rest) => {
                at = &schema["properties"]["modules"]["additionalProperties"];
                shown = format!("modules.NAME{rest}");
                rest.trim_start_matches('.')
            }
            None => path.as_str(),
        };
        for part in parts.split('.').filter(|part| !part.is_empty()) {
            at = &at["properties"][part];
        }
        // A section is the keys below it.
        if at["properties"].is_object() {
            continue;
        }
        let default = at.get("default").map(Value::to_string).unwrap_or_default();
        keys.push(Key { path: shown, kind: kind(at), default });
    }
    keys
}

/// A schema's type in words.
fn kind(schema: &Value) -> String {
    if let Some(choices) = choices(schema) {
        return choices.join(" \\| ");
    }
    let types: Vec<&str> = match &schema["type"] {
        Value::String(name) => vec![name],
        Value::Array(names) => names.iter().filter_map(Value::as_str).filter(|name| *name != "null").collect(),
        _ => schema["anyOf"].as_array().into_iter().flatten().filter_map(|s| s["type"].as_str()).collect(),
    };
    let words = types.iter().map(|name| match *name {
        "integer" => "whole number",
        "string" => "text",
        "boolean" => "true \\| false",
        "array" => "list",
        "object" => "mapping",
        other => other,
    });
    words.filter(|word| *word != "null").collect::<Vec<_>>().join(" or ")
}

/// The names of an enumeration.
fn choices(schema: &Value) -> Option<Vec<String>> {
    if let Some(names) = schema["enum"].as_array() {
        return Some(names.iter().filter_map(Value::as_str).map(str::to_string).collect());
    }
    let variants = schema["oneOf"].as_array()?;
    let names = variants.iter().flat_map(|variant| match &variant["const"] {
        Value::String(name) => vec![name.clone()],
        _ => choices(variant).unwrap_or_default(),
    });
    Some(names.collect())
}

/// The same schema with every reference into `$defs` replaced by what it means.
fn plain(mut schema: Value) -> Value {
    let definitions = schema.as_object_mut().and_then(|schema| schema.remove("$defs")).unwrap_or_default();
    fn replace(schema: &mut Value, definitions: &Value) {
        if let Some(name) = schema.get("$ref").and_then(Value::as_str).and_then(|r| r.strip_prefix("#/$defs/")) {
            let mut meaning = definitions[name].clone();
            // What stands beside a reference says more about this use.
            if let (Some(meaning), Some(beside)) = (meaning.as_object_mut(), schema.as_object()) {
                let beside = beside.iter().filter(|(key, _)| *key != "$ref");
                meaning.extend(beside.map(|(key, value)| (key.clone(), value.clone())));
            }
            *schema = meaning;
        }
        match schema {
            Value::Object(map) => map.values_mut().for_each(|inner| replace(inner, definitions)),
            Value::Array(list) => list.iter_mut().for_each(|inner| replace(inner, definitions)),
            _ => {}
        }
    }
    replace(&mut schema, &definitions);
    schema
}

/// Adds defaults and meanings of the keys under `prefix`, and takes back that keys are required.
fn describe(schema: &mut Value, defaults: &Value, prefix: &str, meanings: &BTreeMap<String, String>) {
    let Some(schema) = schema.as_object_mut() else { return };
    schema.remove("required");
    let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) else { return };
    for (name, property) in properties {
        let key = format!("{prefix}{name}");
        let default = &defaults[name];
        if property["properties"].is_object() {
            describe(property, default, &format!("{key}."), meanings);
            continue;
        }
        let Some(property) = property.as_object_mut() else { continue };
        if !default.is_null() {
            property.insert("default".into(), default.clone());
        }
        if let Some(meaning) = meanings.get(&key) {
            property.insert("description".into(), meaning.clone().into());
        }
    }
}

/// Puts `base` in front of references to the schema's own definitions.
fn rebase(schema: &mut Value, base: &str) {
    match schema {
        Value::Object(map) => {
            for (key, inner) in map {
                match inner {
                    Value::String(target) if key == "$ref" && target.starts_with('#') => {
                        *target = format!("{base}{}", &target[1..]);
                    }
                    inner => rebase(inner, base),
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|inner| rebase(inner, base)),
        _ => {}
    }
}

/// The comment behind each key of `defaults.yaml`, with the lines that go on with it.
fn meanings() -> BTreeMap<String, String> {
    lines().into_iter().filter(|(_, meaning)| !meaning.is_empty()).collect()
}

/// Keys of `defaults.yaml` in order, with their comments.
fn lines() -> Vec<(String, String)> {
    let mut keys: Vec<(String, String)> = Vec::new();
    let mut open: Vec<(usize, String)> = Vec::new();
    for line in DEFAULTS.lines() {
        let indent = line.len() - line.trim_start().len();
        let (code, comment) = match line.find('#') {
            Some(at) => (line[..at].trim(), line[at + 1..].trim()),
            None => (line.trim(), ""),
        };
        match code.split_once(':') {
            Some((name, _)) => {
                open.retain(|(outer, _)| *outer < indent);
                open.push((indent, name.to_string()));
                let path = open.iter().map(|(_, name)| name.as_str()).collect::<Vec<_>>().join(".");
                keys.push((path, comment.to_string()));
            }
            // Far to the right: the comment above goes on. Else it is about what follows.
            None if indent > 8 && !comment.is_empty() => {
                if let Some((_, meaning)) = keys.last_mut() {
                    *meaning = format!("{meaning} {comment}");
                }
            }
            None => {}
        }
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_types_defaults_and_meanings() {
        let schema =
            json_schema(&[("p".into(), json!({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {}}}))]);
        let every = &schema["properties"]["checkpoint"]["properties"]["every"];
        assert_eq!((every["type"].as_str(), &every["default"]), (Some("integer"), &json!(100)));
        assert!(every["description"].as_str().unwrap().starts_with("steps between checkpoints"));
        assert_eq!(schema["properties"]["train"]["additionalProperties"], false);
        assert!(schema["properties"]["train"].get("required").is_none());
        let module = &schema["properties"]["modules"]["additionalProperties"];
        assert_eq!(module["properties"]["grid"]["properties"]["tp"]["default"], 1);
        assert_eq!(module["allOf"][0]["then"]["properties"]["config"]["$ref"], "#/$defs/p");
        assert_eq!(schema["$defs"]["p"]["properties"]["a"]["$ref"], "#/$defs/p/$defs/A");
        let text = schema.to_string();
        assert!(!text.contains("\"#/$defs/Grid\"") && !text.contains("resolved") && !text.contains("places"));
    }

    /// Every key that has a default is in the structs and the other way round, so that the schema is of one piece.
    #[test]
    fn defaults_and_structs_have_the_same_keys() {
        fn paths(schema: &Value, prefix: &str, out: &mut Vec<String>) {
            for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
                out.push(format!("{prefix}{name}"));
                paths(inner, &format!("{prefix}{name}."), out);
            }
        }
        let schema = json_schema(&[]);
        let mut of_structs = Vec::new();
        paths(&schema, "", &mut of_structs);
        of_structs.retain(|key| key != "extends");
        of_structs.push(MODULE_TEMPLATE.into());
        paths(
            &schema["properties"]["modules"]["additionalProperties"],
            &format!("{MODULE_TEMPLATE}."),
            &mut of_structs,
        );
        let mut of_defaults: Vec<_> = lines().into_iter().map(|(path, _)| path).collect();
        of_structs.sort();
        of_defaults.sort();
        assert_eq!(of_structs, of_defaults);
    }

    #[test]
    fn reference_says_what_a_key_takes() {
        let keys = reference();
        let find = |path: &str| keys.iter().find(|key| key.path == path).cloned().unwrap();
        assert_eq!(
            (find("log.level").kind.as_str(), find("log.level").default.as_str()),
            ("error \\| warn \\| info \\| debug \\| trace", "\"info\"")
        );
        assert_eq!(find("modules.NAME.grid.tp").kind, "whole number");
        assert_eq!(find("plugins").kind, "list");
        assert_eq!(find("run.dir").kind, "text");
        assert!(keys.iter().all(|key| !key.kind.is_empty()), "{keys:?}");
    }
}
