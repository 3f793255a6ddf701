//! JSON that others wrote: a key that stands twice is an error, and bare `Infinity` and `NaN`, which Python writes, become
//! the objects that transformers 5 writes for them.

use gantry_plugin_api::sdk::hugging_face::FLOAT_TAG;
use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;

/// Reads a document; the error says what and where.
pub fn parse(text: &[u8]) -> Result<Value, String> {
    let text = std::str::from_utf8(text).map_err(|error| format!("it is no UTF-8 text: {error}"))?;
    let tagged = tag_floats(text);
    let mut reader = serde_json::Deserializer::from_str(&tagged);
    let value = Once.deserialize(&mut reader).map_err(|error| error.to_string())?;
    reader.end().map_err(|error| error.to_string())?;
    Ok(value)
}

/// Replaces bare numbers that JSON lacks, outside of strings.
fn tag_floats(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let (mut rest, mut inside) = (text, false);
    while let Some(c) = rest.chars().next() {
        let bare = ["-Infinity", "Infinity", "NaN"].into_iter().find(|word| !inside && rest.starts_with(word));
        if let Some(word) = bare {
            out.push_str(&format!("{{\"{FLOAT_TAG}\": \"{word}\"}}"));
            rest = &rest[word.len()..];
            continue;
        }
        let mut taken = c.len_utf8();
        match c {
            '"' => inside = !inside,
            '\\' if inside => taken += rest[taken..].chars().next().map_or(0, char::len_utf8),
            _ => {}
        }
        out.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    out
}

/// A value whose objects have every key once.
struct Once;

impl<'de> DeserializeSeed<'de> for Once {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Once {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        Value::deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut all = Vec::new();
        while let Some(item) = items.next_element_seed(Once)? {
            all.push(item);
        }
        Ok(Value::Array(all))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut all = Map::new();
        while let Some(key) = fields.next_key::<String>()? {
            if all.contains_key(&key) {
                return Err(A::Error::custom(format_args!("key {key:?} stands twice")));
            }
            let value = fields.next_value_seed(Once)?;
            all.insert(key, value);
        }
        Ok(Value::Object(all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn bare_numbers_become_objects_outside_of_strings() {
        let text = r#"{"limit": [0.0, Infinity, -Infinity], "nan": NaN, "say": "Infinity \" NaN", "é": 1}"#;
        let tag = |word: &str| json!({"__float__": word});
        let expected = json!({"limit": [0.0, tag("Infinity"), tag("-Infinity")], "nan": tag("NaN"),
                              "say": "Infinity \" NaN", "é": 1});
        assert_eq!(parse(text.as_bytes()).unwrap(), expected);
    }

    #[test]
    fn what_is_none_is_refused() {
        assert_eq!(
            parse(br#"{"a": 1, "b": {"c": 1, "c": 2}}"#).unwrap_err(),
            "key \"c\" stands twice at line 1 column 26"
        );
        assert!(parse(b"{} {}").unwrap_err().contains("trailing characters"));
        assert!(parse(b"\xff").unwrap_err().contains("UTF-8"));
        assert!(parse(&b"[".repeat(100_000)).unwrap_err().contains("recursion limit"));
    }

    proptest! {
        #[test]
        fn text_of_any_kind_is_a_value_or_an_error(text in "[\\[\\]{}\",:0-9a-zN\\\\ ]{0,40}|\\PC{0,40}") {
            if let Ok(value) = serde_json::from_str::<Value>(&text)
                && !text.contains("NaN") && !text.contains("Infinity")
                && let Ok(ours) = parse(text.as_bytes())
            {
                prop_assert_eq!(ours, value);
            }
        }
    }
}
