//! Hugging Face folders: how a provider's config and a folder's `config.json` become each other.
//!
//! Tensors follow from the plan (`Param::hf_name`, `Buffer::hf_name`); all a provider adds is [`HuggingFace`], its two
//! functions between the configs. A key that nothing reads is refused by name, so a folder whose model is not quite the
//! provider's is never taken for it.
//!
//! ```
//! use gantry_plugin_api::sdk::{FolderConfig, FolderWriter, Result};
//! use serde_json::{Map, Value, json};
//!
//! fn read(folder: &FolderConfig) -> Result<Map<String, Value>> {
//!     folder.only("use_bias", &[json!(false)], "this model's projections have no biases")?;
//!     folder.carry(&["max_position_embeddings"]);
//!     let mut config = Map::new();
//!     config.insert("hidden".into(), folder.or("hidden_size", 4096)?.into());
//!     Ok(config)
//! }
//!
//! fn write(model: &Model, folder: &mut FolderWriter) -> Result<()> {
//!     folder.set("hidden_size", model.hidden);
//!     folder.set("use_bias", false);
//!     Ok(())
//! }
//! # struct Model { hidden: usize }
//! ```

use super::configure::{self, Configure};
use super::{Error, ErrorKind, Result};
use crate::plan::{FolderConstant, FolderExport, FolderImport, FolderKind};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;

/// How transformers writes numbers that JSON lacks: `{"__float__": "Infinity"}`. Configs that state them bare reach a
/// provider in this form too.
pub const FLOAT_TAG: &str = "__float__";

/// A provider's Hugging Face folders: [`Configure::HUGGING_FACE`].
pub struct HuggingFace<T> {
    /// `model_type` of their `config.json`.
    pub model_type: &'static str,
    /// Of which one is in `architectures`; the first is written.
    pub architectures: &'static [&'static str],
    /// The provider's config of a folder's. What is not read, allowed or carried is refused afterwards.
    pub read: fn(&FolderConfig) -> Result<Map<String, Value>>,
    /// The folder's config of a provider, or why such folders cannot hold its model.
    pub write: fn(&T, &mut FolderWriter) -> Result<()>,
}

/// A `config.json` that is being read.
#[derive(Debug)]
pub struct FolderConfig {
    values: Map<String, Value>,
    seen: RefCell<BTreeSet<String>>,
    carried: RefCell<BTreeSet<String>>,
    notes: RefCell<Vec<String>>,
}

impl FolderConfig {
    fn new(values: Map<String, Value>) -> FolderConfig {
        let seen = ["model_type", "architectures"].map(String::from).into();
        FolderConfig { values, seen: RefCell::new(seen), carried: RefCell::default(), notes: RefCell::default() }
    }

    fn value(&self, key: &str) -> Option<&Value> {
        self.seen.borrow_mut().insert(key.into());
        // A key without a value is one that is left out.
        self.values.get(key).filter(|value| !value.is_null())
    }

    /// Whether a key has a value; does not count as reading it.
    pub fn has(&self, key: &str) -> bool {
        self.values.get(key).is_some_and(|value| !value.is_null())
    }

    /// The value of a key, if it has one.
    pub fn get<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>> {
        let read = |value: &Value| serde_json::from_value(value.clone());
        self.value(key).map(read).transpose().map_err(|e| self.refuse(key, &e.to_string()))
    }

    /// The value of a key, or what it is where folders leave it out.
    pub fn or<T: DeserializeOwned>(&self, key: &str, default: T) -> Result<T> {
        Ok(self.get(key)?.unwrap_or(default))
    }

    /// The value of a key that has had several names, the newest first; all that are there must agree.
    pub fn named<T: DeserializeOwned>(&self, keys: &[&str], default: T) -> Result<T> {
        let mut found: Option<(&str, &Value)> = None;
        for key in keys {
            let Some(value) = self.value(key) else { continue };
            match found {
                Some((first, same)) if same != value => {
                    return Err(self.refuse(key, &format!("`{first}`, another name for it, is {same}")));
                }
                Some(_) => {}
                None => found = Some((key, value)),
            }
        }
        match found {
            Some((key, _)) => self.or(key, default),
            None => Ok(default),
        }
    }

    /// A number that may be infinite.
    pub fn number(&self, value: &Value) -> Option<f64> {
        value.as_f64().or_else(|| match value.get(FLOAT_TAG)?.as_str()? {
            "Infinity" => Some(f64::INFINITY),
            "-Infinity" => Some(f64::NEG_INFINITY),
            "NaN" => Some(f64::NAN),
            _ => None,
        })
    }

    /// An error unless the key is left out or has one of these values.
    pub fn only(&self, key: &str, allowed: &[Value], why: &str) -> Result<()> {
        let equal = |a: &Value, b: &Value| a == b || a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| a == b);
        match self.value(key) {
            Some(value) if !allowed.iter().any(|one| equal(one, value)) => Err(self.refuse(key, why)),
            _ => Ok(()),
        }
    }

    /// Keys that change nothing of what the model computes. They are kept for an export.
    pub fn carry(&self, keys: &[&str]) {
        self.seen.borrow_mut().extend(keys.iter().map(|key| key.to_string()));
        self.carried.borrow_mut().extend(keys.iter().map(|key| key.to_string()));
    }

    /// Keys that mean nothing for this model.
    pub fn skip(&self, keys: &[&str]) {
        self.seen.borrow_mut().extend(keys.iter().map(|key| key.to_string()));
    }

    /// Says something to the user, in a sentence.
    pub fn note(&self, sentence: impl Into<String>) {
        self.notes.borrow_mut().push(sentence.into());
    }

    /// The error that a key's value cannot be taken.
    pub fn refuse(&self, key: &str, why: &str) -> Error {
        let value = self.values.get(key).unwrap_or(&Value::Null);
        Error::new(ErrorKind::Data, format!("`{key}` is {value}; {why}"))
    }

    fn finish(self, config: Map<String, Value>) -> Result<FolderImport> {
        let (seen, carried) = (self.seen.take(), self.carried.take());
        let unknown: Vec<&String> = self.values.keys().filter(|key| !seen.contains(*key)).collect();
        if let Some(first) = unknown.first() {
            let more = match unknown.len() {
                1 => String::new(),
                n => format!(" ({} keys in all are not: {})", n, join(&unknown)),
            };
            return Err(self.refuse(first, &format!("the key is not known{more}")));
        }
        let carried =
            self.values.into_iter().filter(|(key, value)| carried.contains(key) && !value.is_null()).collect();
        Ok(FolderImport { config, carried, notes: self.notes.into_inner() })
    }
}

fn join(keys: &[&String]) -> String {
    keys.iter().map(|key| key.as_str()).collect::<Vec<_>>().join(", ")
}

/// A `config.json` that is being written.
#[derive(Debug, Default)]
pub struct FolderWriter(FolderExport);

impl FolderWriter {
    pub fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.0.config.insert(key.into(), value.into());
    }

    /// A tensor that such folders hold though the model has no parameter of it: the same value everywhere.
    pub fn constant(&mut self, name: impl Into<String>, shape: &[usize], value: f64) {
        self.0.constants.push(FolderConstant { name: name.into(), shape: shape.to_vec(), value });
    }

    /// Says something to the user, in a sentence.
    pub fn note(&mut self, sentence: impl Into<String>) {
        self.0.notes.push(sentence.into());
    }

    /// An error unless the provider's key has the one value that such folders can hold.
    pub fn only(&self, key: &str, holds: bool, why: &str) -> Result<()> {
        if holds { Ok(()) } else { Err(Error::new(ErrorKind::Data, format!("config.{key}: {why}"))) }
    }
}

pub(crate) fn kind<T: Configure>() -> Option<FolderKind> {
    T::HUGGING_FACE.map(|folders| FolderKind {
        model_type: folders.model_type.into(),
        architectures: folders.architectures.iter().map(|name| name.to_string()).collect(),
    })
}

pub(crate) fn none(name: &str) -> Error {
    Error::new(ErrorKind::Data, format!("{name}: this provider declares no Hugging Face folders"))
}

pub(crate) fn import<T: Configure>(name: &str, config: Value) -> Result<FolderImport> {
    let folders = T::HUGGING_FACE.ok_or_else(|| none(name))?;
    let Value::Object(values) = config else {
        return Err(Error::new(ErrorKind::Data, "it is no JSON object"));
    };
    let folder = FolderConfig::new(values);
    let config = (folders.read)(&folder)?;
    let import = folder.finish(config)?;
    // Whatever it makes, the provider must take.
    configure::create::<T>(name, &Value::Object(import.config.clone()))?;
    Ok(import)
}

pub(crate) fn export<T: Configure>(name: &str, config: &Value) -> Result<FolderExport> {
    let folders = T::HUGGING_FACE.ok_or_else(|| none(name))?;
    let model = configure::create::<T>(name, config)?;
    let mut folder = FolderWriter::default();
    (folders.write)(&model, &mut folder)?;
    Ok(folder.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn folder(config: Value) -> FolderConfig {
        FolderConfig::new(config.as_object().unwrap().clone())
    }

    #[test]
    fn keys_are_read_carried_or_refused_by_name() {
        let config = json!({"model_type": "m", "size": 4, "eps": 1, "old": 7, "bos": 1, "nothing": null});
        let f = folder(config);
        assert_eq!(f.or("size", 9).unwrap(), 4);
        assert_eq!(f.or("other", 9).unwrap(), 9);
        assert_eq!(f.or("eps", 0.5).unwrap(), 1.0);
        assert_eq!(f.named(&["new", "old"], 1).unwrap(), 7);
        assert_eq!(f.get::<usize>("nothing").unwrap(), None);
        f.carry(&["bos", "eos"]);
        let import = f.finish(Map::new()).unwrap();
        assert_eq!(Value::Object(import.carried), json!({"bos": 1}));

        let e = folder(json!({"mtp": 2})).finish(Map::new()).unwrap_err();
        assert_eq!((e.kind, e.message.as_str()), (ErrorKind::Data, "`mtp` is 2; the key is not known"));
        let e = folder(json!({"size": "x"})).or("size", 1usize).unwrap_err().message;
        assert!(e.starts_with("`size` is \"x\"; invalid type"), "{e}");
        let e = folder(json!({"a": 1, "b": 2})).named(&["a", "b"], 1).unwrap_err().message;
        assert_eq!(e, "`b` is 2; `a`, another name for it, is 1");
    }

    #[test]
    fn one_value_only() {
        let f = folder(json!({"bias": true, "dropout": 0, "limit": {"__float__": "Infinity"}}));
        assert_eq!(f.only("bias", &[json!(false)], "no biases").unwrap_err().message, "`bias` is true; no biases");
        f.only("dropout", &[json!(0.0)], "no dropout").unwrap();
        f.only("gone", &[], "").unwrap();
        assert_eq!(f.number(&json!({"__float__": "Infinity"})), Some(f64::INFINITY));
        assert_eq!(f.number(&json!("Infinity")), None);
    }
}
