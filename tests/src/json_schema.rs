//! What an editor would mark in a document with a JSON schema (draft 2020-12): as much of it as our schemas use. The
//! crates that know all of it bring dozens of others. A keyword that is not known here is a failure, so that nothing of a
//! schema goes unchecked.

use serde_json::Value;

/// The places in `value` that do not fit `schema`, with what is wrong.
pub fn mistakes(schema: &Value, value: &Value) -> Vec<String> {
    Check { root: schema }.at(schema, value, "")
}

struct Check<'a> {
    root: &'a Value,
}

impl Check<'_> {
    fn at(&self, schema: &Value, value: &Value, place: &str) -> Vec<String> {
        let keywords = match schema {
            Value::Bool(true) => return Vec::new(),
            Value::Object(keywords) => keywords,
            other => panic!("{place}: no schema: {other}"),
        };
        let mut wrong = Vec::new();
        let mut no = |why: String| wrong.push(format!("{place}: {why}"));
        let mut inner = Vec::new();
        for (keyword, rule) in keywords {
            match keyword.as_str() {
                "type" => {
                    let kinds = rule.as_array().cloned().unwrap_or_else(|| vec![rule.clone()]);
                    if !kinds.iter().any(|kind| is_of(value, kind.as_str().unwrap())) {
                        no(format!("{value} is no {rule}"));
                    }
                }
                "const" if value != rule => no(format!("{value} is not {rule}")),
                "enum" if !rule.as_array().unwrap().contains(value) => no(format!("{value} is none of {rule}")),
                "minimum" if value.as_f64().is_some_and(|v| v < rule.as_f64().unwrap()) => {
                    no(format!("{value} is less than {rule}"));
                }
                "maximum" if value.as_f64().is_some_and(|v| v > rule.as_f64().unwrap()) => {
                    no(format!("{value} is more than {rule}"));
                }
                "minItems" if value.as_array().is_some_and(|v| (v.len() as u64) < rule.as_u64().unwrap()) => {
                    no(format!("fewer than {rule} elements"));
                }
                "maxItems" if value.as_array().is_some_and(|v| (v.len() as u64) > rule.as_u64().unwrap()) => {
                    no(format!("more than {rule} elements"));
                }
                "required" if value.is_object() => {
                    let names = rule.as_array().unwrap().iter().map(|name| name.as_str().unwrap());
                    names.filter(|name| value.get(name).is_none()).for_each(|name| no(format!("no {name}")));
                }
                "properties" => {
                    for (name, value) in value.as_object().into_iter().flatten() {
                        let known = rule.get(name);
                        inner.extend(known.map(|rule| self.at(rule, value, &format!("{place}/{name}"))));
                    }
                }
                "additionalProperties" => {
                    let known = keywords.get("properties").and_then(Value::as_object);
                    for (name, value) in value.as_object().into_iter().flatten() {
                        if known.is_some_and(|known| known.contains_key(name)) {
                            continue;
                        }
                        match rule {
                            Value::Bool(false) => no(format!("unknown key {name}")),
                            rule => inner.push(self.at(rule, value, &format!("{place}/{name}"))),
                        }
                    }
                }
                "items" => {
                    let items = value.as_array().into_iter().flatten().enumerate();
                    inner.extend(items.map(|(i, value)| self.at(rule, value, &format!("{place}/{i}"))));
                }
                "$ref" => {
                    let target = rule.as_str().and_then(|target| target.strip_prefix('#')).unwrap();
                    let target = self.root.pointer(target).unwrap_or_else(|| panic!("{rule} leads nowhere"));
                    inner.push(self.at(target, value, place));
                }
                "allOf" => inner.extend(rule.as_array().unwrap().iter().map(|rule| self.at(rule, value, place))),
                "anyOf" | "oneOf" => {
                    let rules = rule.as_array().unwrap().iter();
                    let fit = rules.filter(|rule| self.at(rule, value, place).is_empty()).count();
                    if fit == 0 || (keyword == "oneOf" && fit > 1) {
                        no(format!("{value} fits {fit} of {rule}"));
                    }
                }
                "if" => {
                    let then = keywords.get("then").expect("an `if` has a `then`");
                    if self.at(rule, value, place).is_empty() {
                        inner.push(self.at(then, value, place));
                    }
                }
                // Fulfilled, part of another keyword, or for people.
                "const" | "enum" | "minimum" | "maximum" | "minItems" | "maxItems" | "required" | "then" => {}
                "$schema" | "$defs" | "title" | "description" | "default" | "examples" | "format" => {}
                // Of hashes alone, which no shipped recipe has.
                "pattern" => {}
                other => panic!("{place}: keyword {other} is not known here"),
            }
        }
        wrong.extend(inner.into_iter().flatten());
        wrong
    }
}

fn is_of(value: &Value, kind: &str) -> bool {
    match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64() || value.as_f64().is_some_and(|v| v.fract() == 0.0),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("no type {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    #[rstest]
    #[case(json!({"type": "integer", "minimum": 0}), json!(3), json!(-1))]
    #[case(json!({"type": ["string", "null"]}), json!(null), json!(1))]
    #[case(json!({"enum": ["a", "b"]}), json!("b"), json!("c"))]
    #[case(json!({"properties": {"a": {"type": "number"}}, "additionalProperties": false}), json!({"a": 1}), json!({"b": 1}))]
    #[case(json!({"additionalProperties": {"type": "number"}}), json!({"a": 1}), json!({"a": "x"}))]
    #[case(json!({"required": ["a"]}), json!({"a": 1}), json!({}))]
    #[case(json!({"items": {"type": "number"}, "maxItems": 1}), json!([1]), json!(["x"]))]
    #[case(json!({"anyOf": [{"type": "number"}, {"type": "null"}]}), json!(1), json!("x"))]
    #[case(json!({"$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}), json!(1), json!(2))]
    #[case(json!({"if": {"type": "number"}, "then": {"minimum": 1}}), json!("x"), json!(0))]
    fn one_fits_and_the_other_does_not(#[case] schema: Value, #[case] good: Value, #[case] bad: Value) {
        assert_eq!(mistakes(&schema, &good), Vec::<String>::new());
        assert_eq!(mistakes(&schema, &bad).len(), 1);
    }
}
