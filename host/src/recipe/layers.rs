//! Reading and merging the layers of a recipe: defaults < extended files < the file < environment < `--set`.
//!
//! Every layer keeps where it came from, and files keep the place of every key, so that an error about a merged value
//! can name the place that wrote it.

use super::{Overrides, Recipe, error};
use crate::failure::{Failure, Result};
use figment::value::{Dict, Map, Tag, Value};
use figment::{Figment, Metadata, Profile, Provider};
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

pub(super) const DEFAULTS: &str = include_str!("defaults.yaml");

/// Largest recipe file; larger ones are something else.
const MAX_BYTES: usize = 1 << 20;

/// The defaults' entry that describes one element of `modules`.
pub(super) const MODULE_TEMPLATE: &str = "module";

/// Who wrote a value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Origin {
    Defaults,
    /// A file with the line and column of each key path, from 1. `path` is empty for a recipe given as text.
    File {
        path: PathBuf,
        keys: BTreeMap<String, (u64, u64)>,
    },
    Environment(String),
    Set(String),
}

struct Layer {
    origin: Origin,
    values: Dict,
}

/// Files on the way: those being read, outermost first, and all that were begun.
#[derive(Default)]
struct Reading {
    open: Vec<PathBuf>,
    seen: HashSet<PathBuf>,
}

/// All layers, weakest first.
pub(super) struct Layers {
    layers: Vec<Layer>,
    module_template: Dict,
}

impl Layers {
    pub(super) fn collect(path: &Path, overrides: &Overrides) -> Result<Layers> {
        let mut layers = Layers::defaults()?;
        layers.add_file(path, None, &mut Reading::default())?;
        layers.weakest_first();
        layers.add_overrides(overrides)?;
        Ok(layers)
    }

    pub(super) fn from_text(text: &str, overrides: &Overrides) -> Result<Layers> {
        let mut layers = Layers::defaults()?;
        layers.add_text(text, Path::new(""), &mut Reading::default())?;
        layers.weakest_first();
        layers.add_overrides(overrides)?;
        Ok(layers)
    }

    fn defaults() -> Result<Layers> {
        let mut values: Dict = serde_saphyr::from_str(DEFAULTS)
            .map_err(|error| Failure::recipe(format!("built-in defaults.yaml: {error}")))?;
        let module_template = match values.remove(MODULE_TEMPLATE) {
            Some(Value::Dict(_, template)) => template,
            _ => Dict::new(),
        };
        Ok(Layers { layers: vec![Layer { origin: Origin::Defaults, values }], module_template })
    }

    /// Turns the files, which were read strongest first, around.
    fn weakest_first(&mut self) {
        self.layers[1..].reverse();
    }

    /// Adds the file, then what it extends, strongest first. A file that is reached again is already there with all
    /// it extends, where it counts most; that it would be merged below once more changes nothing.
    fn add_file(&mut self, path: &Path, named_by: Option<String>, reading: &mut Reading) -> Result<()> {
        let unreadable = |error: std::io::Error| {
            let place = named_by.as_ref().map(|place| format!("{place}: ")).unwrap_or_default();
            Failure::recipe(format!("{place}cannot read recipe {}: {error}", path.display()))
                .remedy("name a YAML file that is there and may be read")
        };
        let identity = path.canonicalize().map_err(unreadable)?;
        if reading.open.contains(&identity) {
            let chain: Vec<_> = reading.open.iter().map(|file| file.display().to_string()).collect();
            return Err(Failure::recipe(format!("recipe {} extends itself", path.display()))
                .detail(format!("chain: {} -> {}", chain.join(" -> "), identity.display()))
                .remedy("remove one of the `extends` keys"));
        }
        if !reading.seen.insert(identity.clone()) {
            return Ok(());
        }
        let about = path.metadata().map_err(unreadable)?;
        let text = if about.is_file() { read_text(path).map_err(unreadable)? } else { Err("it is no file") };
        let text = text.map_err(|why| {
            let place = named_by.as_ref().map(|place| format!("{place}: ")).unwrap_or_default();
            Failure::recipe(format!("{place}{} is no recipe: {why}", path.display()))
                .remedy("name a YAML file, e.g. one of recipes/")
        })?;
        reading.open.push(identity);
        self.add_text(&text, path, reading)?;
        reading.open.pop();
        Ok(())
    }

    fn add_text(&mut self, text: &str, path: &Path, reading: &mut Reading) -> Result<()> {
        let syntax = |error: serde_saphyr::Error| {
            let line = error.location().map(|at| format!(":{}:{}", at.line(), at.column())).unwrap_or_default();
            let full = error.without_snippet().to_string();
            // The parser's advice to its own caller and its copy of the location are left out.
            let message = full.lines().next().unwrap_or("");
            let message = message.split(", set ").next().and_then(|m| m.split(" at line ").next()).unwrap_or(message);
            Failure::recipe(format!("{}{line}: bad YAML: {}", name_of(path), plain_words(message)))
        };
        if text.trim().is_empty() {
            return Err(Failure::recipe(format!("recipe {} is empty", name_of(path)))
                .remedy("state at least name, modules, data, train and optimizer"));
        }
        let mut values: Dict = serde_saphyr::from_str(text).map_err(syntax)?;
        let mut keys = BTreeMap::new();
        serde_saphyr::with_deserializer_from_str(text, |de| KeyPlaces { path: "", keys: &mut keys }.deserialize(de))
            .map_err(syntax)?;
        let origin = Origin::File { path: path.to_path_buf(), keys };
        let extended = parents(values.remove("extends"), &origin)?;
        let place = origin.describe("extends");
        self.layers.push(Layer { origin, values });
        for extended in extended.into_iter().rev() {
            self.add_file(&path.parent().unwrap_or(Path::new("")).join(extended), Some(place.clone()), reading)?;
        }
        Ok(())
    }

    fn add_overrides(&mut self, overrides: &Overrides) -> Result<()> {
        for (name, text) in &overrides.environment {
            let Some(key) = name.strip_prefix("GANTRY_") else { continue };
            if !key.contains("__") {
                self.refuse_single_underscores(name, key)?;
                continue;
            }
            let key = key.to_lowercase().replace("__", ".");
            if text.contains(char::REPLACEMENT_CHARACTER) {
                return Err(Failure::recipe(format!("environment variable {name}: its value is not UTF-8")));
            }
            self.add_value(&key, text, Origin::Environment(name.clone()))?;
        }
        for assignment in &overrides.set {
            let Some((key, text)) = assignment.split_once('=') else {
                return Err(Failure::recipe(format!("--set {assignment}: expected key.path=value")));
            };
            self.add_value(key.trim(), text, Origin::Set(assignment.clone()))?;
        }
        Ok(())
    }

    /// Refuses a variable that would be a key's if its sections were set off by two underscores.
    fn refuse_single_underscores(&self, name: &str, key: &str) -> Result<()> {
        let key = key.to_lowercase();
        let known = self.known_keys();
        let meant = known.iter().find(|known| known.contains('.') && known.replace('.', "_") == key);
        meant.map_or(Ok(()), |meant| {
            let right = format!("GANTRY_{}", meant.replace('.', "__").to_uppercase());
            Err(Failure::recipe(format!("environment variable {name} sets nothing: `{meant}` is written {right}"))
                .remedy(format!("rename the variable to {right}, or unset it")))
        })
    }

    fn add_value(&mut self, key: &str, text: &str, origin: Origin) -> Result<()> {
        if key.split('.').any(str::is_empty) {
            return Err(Failure::recipe(format!("{}: empty part in key `{key}`", origin.describe(key))));
        }
        let value: Value = match serde_saphyr::from_str(text) {
            Ok(value) => value,
            Err(error) if error.to_string().contains(NON_FINITE.0) => {
                return Err(Failure::recipe(format!("{}: {}", origin.describe(key), NON_FINITE.1)));
            }
            // What is no YAML on its own, e.g. a pattern that begins with `*`, is a plain string.
            Err(_) => Value::from(text),
        };
        match figment::util::nest(key, value) {
            Value::Dict(_, values) => self.layers.push(Layer { origin, values }),
            _ => return Err(Failure::recipe(format!("{}: empty key", origin.describe(key)))),
        }
        Ok(())
    }

    /// Merges all layers; entries of `modules` begin from the template.
    pub(super) fn merge(&self) -> Result<Dict> {
        let failed = |error: figment::Error| Failure::recipe(format!("recipe: {error}"));
        let mut merged = Dict::new();
        for layer in &self.layers {
            drop_foreign_configs(&mut merged, &layer.values);
            let figment = Figment::new().merge(Tree(&merged)).merge(Tree(&layer.values));
            merged = figment.extract().map_err(failed)?;
        }
        if let Some(Value::Dict(_, modules)) = merged.get_mut("modules") {
            for module in modules.values_mut() {
                if let Value::Dict(_, entry) = module {
                    *entry = Figment::new()
                        .merge(Tree(&self.module_template))
                        .merge(Tree(entry))
                        .extract()
                        .map_err(failed)?;
                }
            }
        }
        Ok(merged)
    }

    /// The merged tree as a typed recipe.
    pub(super) fn extract(&self, merged: &Dict) -> Result<Recipe> {
        // A misspelt key first: what it should have been is then missing.
        if let Some(key) = self.unknown_key(merged) {
            return Err(error::unknown(&key, self, &[]));
        }
        Value::Dict(Tag::Default, merged.clone()).deserialize().map_err(|error| error::explain(error, self))
    }

    /// The first key of the merged tree that defaults.yaml has not, as far as it states what there is.
    fn unknown_key(&self, merged: &Dict) -> Option<String> {
        fn within(values: &Dict, known: &Dict, prefix: &str) -> Option<String> {
            values.iter().find_map(|(name, value)| match (known.get(name), value) {
                (None, _) => Some(format!("{prefix}{name}")),
                // An empty mapping is one of free keys.
                (Some(Value::Dict(_, known)), Value::Dict(_, values)) if !known.is_empty() => {
                    within(values, known, &format!("{prefix}{name}."))
                }
                _ => None,
            })
        }
        let modules = match merged.get("modules") {
            Some(Value::Dict(_, modules)) => Some(modules),
            _ => None,
        };
        within(merged, &self.layers[0].values, "").or_else(|| {
            modules.into_iter().flatten().find_map(|(name, module)| match module {
                Value::Dict(_, module) => within(module, &self.module_template, &format!("modules.{name}.")),
                _ => None,
            })
        })
    }

    /// Who last wrote `key` (dotted path).
    pub(super) fn origin_of(&self, key: &str) -> Option<&Origin> {
        self.layers.iter().rev().find(|layer| find(&layer.values, key).is_some()).map(|layer| &layer.origin)
    }

    /// The place that wrote `key`, or, where none did, the nearest enclosing section (of a file, if one has it), for the
    /// head of a sentence.
    pub(super) fn place(&self, key: &str) -> String {
        if let Some(origin) = self.origin_of(key).filter(|origin| **origin != Origin::Defaults) {
            return origin.describe(key);
        }
        let enclosing = std::iter::successors(key.rsplit_once('.'), |(outer, _)| outer.rsplit_once('.'));
        enclosing.filter_map(|(outer, _)| self.section(outer)).next().unwrap_or_else(|| self.main_file())
    }

    /// Where a section stands: in a file, if one has it, as overrides write single keys into it.
    pub(super) fn section(&self, key: &str) -> Option<String> {
        let writers = self.layers.iter().rev().filter(|layer| find(&layer.values, key).is_some());
        let mut writers = writers.map(|layer| &layer.origin).filter(|origin| **origin != Origin::Defaults);
        let strongest = writers.next()?;
        let file = std::iter::once(strongest).chain(writers).find(|origin| matches!(origin, Origin::File { .. }));
        Some(file.unwrap_or(strongest).describe(key))
    }

    /// The recipe itself: the strongest file.
    fn main_file(&self) -> String {
        let file = self.layers.iter().rev().find_map(|layer| match &layer.origin {
            Origin::File { path, .. } => Some(name_of(path)),
            _ => None,
        });
        file.unwrap_or_else(|| "recipe".into())
    }

    /// Every key path that defaults.yaml knows; `modules.*` stands for any module's name.
    pub(super) fn known_keys(&self) -> Vec<String> {
        let mut keys = vec!["extends".to_string()];
        flatten(&self.layers[0].values, "", &mut keys);
        flatten(&self.module_template, "modules.*.", &mut keys);
        keys
    }
}

impl Origin {
    /// `file:line:column` of the key or of what encloses it, the variable or the option.
    pub(super) fn describe(&self, key: &str) -> String {
        match self {
            Origin::Defaults => "defaults".into(),
            Origin::File { path, keys } => {
                let enclosing = std::iter::successors(Some(key), |key| Some(key.rsplit_once('.')?.0));
                match enclosing.filter_map(|key| keys.get(key)).next() {
                    Some((line, column)) => format!("{}:{line}:{column}", name_of(path)),
                    None => name_of(path),
                }
            }
            Origin::Environment(name) => format!("environment variable {name}"),
            Origin::Set(assignment) => format!("--set {assignment}"),
        }
    }
}

/// The parser's refusal of NaN and infinity, and ours.
const NON_FINITE: (&str, &str) = ("non-finite float", "NaN and infinity are no values of a recipe");

/// The parser's refusals in the user's words.
fn plain_words(message: &str) -> String {
    let known = [
        ("multiple YAML documents", "the file holds several YAML documents (`---`), expected one"),
        ("budget breached", "the file is too large or its aliases multiply beyond reason"),
        ("recursive references", "an alias (`*name`) stands inside the value that it repeats"),
        ("expected mapping start", "expected keys with values (`name: ...`) at the outermost level"),
        ("tabs disallowed", "a tab in the indentation, expected spaces"),
        NON_FINITE,
    ];
    if let Some(key) = message.strip_prefix("duplicate mapping key: ") {
        return format!("the key `{key}` stands here a second time");
    }
    known.iter().find(|(theirs, _)| message.contains(theirs)).map_or(message, |(_, ours)| ours).to_string()
}

/// A file's text, or why it is none that a recipe could be.
fn read_text(path: &Path) -> std::io::Result<Result<String, &'static str>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > MAX_BYTES {
        return Ok(Err("it is larger than 1 MiB"));
    }
    Ok(String::from_utf8(bytes).map_err(|_| "it is not UTF-8 text"))
}

fn name_of(path: &Path) -> String {
    if path.as_os_str().is_empty() { "recipe".into() } else { path.display().to_string() }
}

fn find<'a>(dict: &'a Dict, key: &str) -> Option<&'a Value> {
    let (first, rest) = key.split_once('.').map_or((key, None), |(first, rest)| (first, Some(rest)));
    let value = dict.get(first)?;
    match (rest, value) {
        (None, value) => Some(value),
        (Some(rest), Value::Dict(_, inner)) => find(inner, rest),
        // An element of a list is where the list is.
        (Some(_), Value::Array(..)) => Some(value),
        (Some(_), _) => None,
    }
}

/// A layer that names another provider for a module, or another elastifier, does not inherit the old one's config.
fn drop_foreign_configs(merged: &mut Dict, layer: &Dict) {
    let (Some(Value::Dict(_, old)), Some(Value::Dict(_, new))) = (merged.get_mut("modules"), layer.get("modules"))
    else {
        return;
    };
    let drop_config = |old: &mut Dict, new: &Dict| {
        let names = (old.get("provider").and_then(Value::as_str), new.get("provider").and_then(Value::as_str));
        if matches!(names, (Some(old), Some(new)) if old != new) {
            old.remove("config");
        }
    };
    for (name, new) in new {
        let (Some(Value::Dict(_, old)), Value::Dict(_, new)) = (old.get_mut(name), new) else { continue };
        drop_config(old, new);
        if let (Some(Value::Dict(_, old)), Some(Value::Dict(_, new))) = (old.get_mut("elastify"), new.get("elastify")) {
            drop_config(old, new);
        }
    }
}

fn flatten(dict: &Dict, prefix: &str, keys: &mut Vec<String>) {
    for (name, value) in dict {
        keys.push(format!("{prefix}{name}"));
        if let Value::Dict(_, inner) = value {
            flatten(inner, &format!("{prefix}{name}."), keys);
        }
    }
}

/// The files of an `extends` value: a string or a list of strings, weakest first.
fn parents(value: Option<Value>, origin: &Origin) -> Result<Vec<String>> {
    let wrong =
        || Failure::recipe(format!("{}: `extends` must be a file or a list of files", origin.describe("extends")));
    match value {
        None | Some(Value::Empty(..)) => Ok(Vec::new()),
        Some(Value::String(_, file)) => Ok(vec![file]),
        Some(Value::Array(_, files)) => {
            files.into_iter().map(|file| file.into_string().ok_or_else(wrong)).collect::<Result<Vec<_>>>()
        }
        Some(_) => Err(wrong()),
    }
}

/// `recipe.resolved.yaml`: the merged tree with the absolute paths of `recipe`.
pub(super) fn to_yaml(merged: &Dict, recipe: &Recipe) -> Result<String> {
    let failed = |error: &dyn fmt::Display| Failure::recipe(format!("cannot write the resolved recipe: {error}"));
    let mut tree = serde_json::to_value(merged).map_err(|error| failed(&error))?;
    let list = |paths: &[PathBuf]| paths.iter().map(|path| path.display().to_string()).collect::<serde_json::Value>();
    tree["data"]["paths"] = list(&recipe.data.paths);
    tree["data"]["valid_paths"] = list(&recipe.data.valid_paths);
    tree["data"]["tokenizer"] = recipe.data.tokenizer.to_value();
    tree["data"]["chat"]["template"] = recipe.data.chat.template.clone().into();
    recipe.data.megatron.resolve(&mut tree["data"]["megatron"]);
    tree["run"]["dir"] = recipe.run.dir.as_ref().map(|dir| dir.display().to_string()).into();
    for (entry, plugin) in tree["plugins"].as_array_mut().into_iter().flatten().zip(&recipe.plugins) {
        let path: serde_json::Value = plugin.path.display().to_string().into();
        match entry {
            serde_json::Value::Object(entry) => drop(entry.insert("path".into(), path)),
            entry => *entry = path,
        }
    }
    for (name, module) in &recipe.modules {
        tree["modules"][name]["load"] = module.load.as_ref().map(|path| path.display().to_string()).into();
    }
    serde_saphyr::to_string(&tree).map_err(|error| failed(&error))
}

/// A tree of values as a figment provider.
struct Tree<'a>(&'a Dict);

impl Provider for Tree<'_> {
    fn metadata(&self) -> Metadata {
        Metadata::named("recipe layer")
    }

    fn data(&self) -> std::result::Result<Map<Profile, Dict>, figment::Error> {
        Ok(Profile::Default.collect(self.0.clone()))
    }
}

/// Walks a YAML document and notes the place of every key. Elements of lists count as keys `0`, `1`, ...
struct KeyPlaces<'a> {
    path: &'a str,
    keys: &'a mut BTreeMap<String, (u64, u64)>,
}

impl KeyPlaces<'_> {
    fn inner(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_string() } else { format!("{}.{name}", self.path) }
    }
}

impl<'de> DeserializeSeed<'de> for KeyPlaces<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

macro_rules! ignore_scalars {
    ($($visit:ident: $type:ty),*) => {
        $(fn $visit<E>(self, _: $type) -> std::result::Result<(), E> { Ok(()) })*
    };
}

impl<'de> Visitor<'de> for KeyPlaces<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<(), A::Error> {
        while let Some(key) = map.next_key::<serde_saphyr::Spanned<String>>()? {
            let path = self.inner(&key.value);
            self.keys.insert(path.clone(), (key.referenced.line(), key.referenced.column()));
            map.next_value_seed(KeyPlaces { path: &path, keys: self.keys })?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<(), A::Error> {
        for index in 0.. {
            let path = self.inner(&index.to_string());
            if seq.next_element_seed(KeyPlaces { path: &path, keys: self.keys })?.is_none() {
                break;
            }
        }
        Ok(())
    }

    ignore_scalars!(visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_i128: i128, visit_u128: u128,
        visit_f64: f64, visit_str: &str, visit_bytes: &[u8]);

    fn visit_unit<E>(self) -> std::result::Result<(), E> {
        Ok(())
    }

    fn visit_none<E>(self) -> std::result::Result<(), E> {
        Ok(())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}
