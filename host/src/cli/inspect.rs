//! `gantry inspect`: what a plugin offers.
//!
//! The plugin is loaded by a child process, so that one that crashes is reported. Parameters, axes and blocks depend on
//! the configuration; they are shown for the defaults, changed by `--set`, where the provider accepts that.

use super::{args, print};
use crate::failure::{Cause, Failure, Result};
use crate::plugin::{PluginFile, PluginSet, Search, inspect::Inspection};
use gantry_plugin_api::plan::{Layout, ModelPlan, ProviderKind};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// What the child tells its parent, and `--json` prints.
#[derive(Serialize, Deserialize)]
pub(super) struct Report {
    #[serde(flatten)]
    pub(super) plugin: Inspection,
    path: String,
    /// Of each model provider.
    pub(super) models: BTreeMap<String, Model>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Model {
    Plan(Box<ModelPlan>),
    /// Why there is no plan with this configuration.
    Refused(String),
}

pub(super) fn run(arguments: args::Inspect) -> Result<()> {
    let report = if arguments.in_process {
        let search = Search::standard(Vec::new());
        describe(&file(&arguments.plugin, &search)?, &search, &config(&arguments.set)?)?
    } else {
        ask(&arguments.plugin, &arguments.set)?
    };
    if arguments.json || arguments.in_process {
        let text = serde_json::to_string_pretty(&report).map_err(|error| Failure::plugin(error.to_string()))?;
        return print(&format!("{text}\n"));
    }
    print(&human(&report))
}

/// What a second process says of the plugin with this file or name.
pub(super) fn ask(plugin: &str, set: &[String]) -> Result<Report> {
    ask_child(&file(plugin, &Search::standard(Vec::new()))?, set)
}

fn file(plugin: &str, search: &Search) -> Result<PluginFile> {
    let named_file = Path::new(plugin);
    if named_file.is_file() { Ok(PluginFile::new(named_file)) } else { search.find(plugin).map_err(Failure::from) }
}

/// `--set` values as a provider's configuration.
fn config(assignments: &[String]) -> Result<Value> {
    let mut config = Map::new();
    for assignment in assignments {
        let Some((key, text)) = assignment.split_once('=') else {
            return Err(Failure::recipe(format!("--set {assignment}: expected key=value")));
        };
        let value = serde_saphyr::from_str(text).unwrap_or_else(|_| text.into());
        config.insert(key.trim().into(), value);
    }
    Ok(Value::Object(config))
}

fn describe(file: &PluginFile, search: &Search, config: &Value) -> Result<Report> {
    let plugin = crate::plugin::inspect::inspect(file, search)?;
    let mut set = PluginSet::default();
    set.add_file(&PluginFile { allow_writable: true, ..file.clone() })?;
    let given = config.as_object().is_some_and(|config| !config.is_empty());
    let models = plugin
        .providers
        .iter()
        .filter(|provider| provider.kind == ProviderKind::Model)
        .map(|provider| {
            let plan = set.provider(&provider.name, config).and_then(|instance| instance.plan());
            let model = match plan {
                Ok(plan) => Model::Plan(Box::new(plan)),
                // Without a word from the user the defaults may name no model; what the user sets must.
                Err(error) if given => return Err(Failure::from(error)),
                Err(error) => Model::Refused(error.to_string()),
            };
            Ok((provider.name.clone(), model))
        })
        .collect::<Result<_>>()?;
    Ok(Report { plugin, path: file.path.display().to_string(), models })
}

/// Has a second process of this program load the plugin.
pub(super) fn ask_child(file: &PluginFile, set: &[String]) -> Result<Report> {
    let path = file.path.display();
    let crashed = |what: String| Failure::plugin(format!("plugin {path} could not be inspected: {what}"));
    let program = std::env::current_exe().map_err(|error| crashed(error.to_string()))?;
    let mut command = Command::new(program);
    command.arg("inspect").arg(&file.path).arg("--in-process");
    command.args(set.iter().map(|assignment| format!("--set={assignment}")));
    let output = command.stdin(Stdio::null()).output().map_err(|error| crashed(error.to_string()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        // What the child says about a plugin in so many words is the answer.
        let causes = [Cause::Recipe, Cause::Plugin, Cause::Data, Cause::Numerical, Cause::Communication];
        let cause = causes.into_iter().find(|cause| output.status.code() == Some(*cause as i32));
        if let (Some(sentence), Some(cause)) = (said.strip_prefix("error: "), cause) {
            let mut lines = sentence.lines().map(|line| line.trim().to_string());
            let mut failure = Failure::new(cause, lines.next().unwrap_or_default());
            failure.details = lines.collect();
            return Err(failure);
        }
        let mut failure = crashed(format!("the process that loaded it ended with {}", output.status));
        failure.details.extend(said.lines().map(str::to_string));
        return Err(failure.remedy("the plugin is at fault: report this to its author"));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| crashed(format!("it wrote to stdout: {error}")))
}

fn human(report: &Report) -> String {
    let mut text = String::new();
    let plugin = &report.plugin;
    // Writing to a String cannot fail.
    let _ = writeln!(text, "plugin {} {} (API {}, {})", plugin.name, plugin.version, plugin.api, plugin.rustc);
    let _ = writeln!(text, "file   {}", report.path);
    let _ = writeln!(text, "needs  {}", plugin.operators.join(", "));
    for provider in &plugin.providers {
        let kind = format!("{:?}", provider.kind).to_lowercase();
        let _ = writeln!(text, "\n{kind} {}: {}", provider.name, provider.summary);
        schema(&mut text, &provider.config_schema);
        match report.models.get(&provider.name) {
            Some(Model::Plan(plan)) => model(&mut text, plan),
            Some(Model::Refused(why)) => {
                let _ = writeln!(text, "  no model with this configuration: {why}");
            }
            None => {}
        }
    }
    text
}

/// The keys of a configuration: name, type or choices, default, meaning.
fn schema(text: &mut String, schema: &Value) {
    let required: Vec<&str> = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let rows: Vec<[String; 4]> = schema["properties"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(key, about)| {
            let default = match about.get("default") {
                Some(default) => format!("default {default}"),
                None if required.contains(&key.as_str()) => "required".into(),
                None => String::new(),
            };
            let meaning = about["description"].as_str().unwrap_or("").lines().next().unwrap_or("");
            [key.clone(), kind(about, &schema["$defs"]), default, meaning.into()]
        })
        .collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths = [width(0), width(1), width(2)];
    for [key, kind, default, meaning] in &rows {
        let [w0, w1, w2] = widths;
        let line = format!("  {key:w0$}  {kind:w1$}  {default:w2$}  {meaning}");
        let _ = writeln!(text, "{}", line.trim_end());
    }
}

/// What a value may be, in a word or as its choices.
fn kind(about: &Value, definitions: &Value) -> String {
    let list = |values: &[Value], between: &str, word: &dyn Fn(&Value) -> String| {
        values.iter().map(word).collect::<Vec<_>>().join(between)
    };
    let literal = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_string);
    if let Some(name) = about["$ref"].as_str().and_then(|path| path.strip_prefix("#/$defs/")) {
        return kind(&definitions[name], definitions);
    }
    if let Some(choices) = about["enum"].as_array() {
        return list(choices, "|", &literal);
    }
    if let Some(choices) = about["oneOf"].as_array().or(about["anyOf"].as_array()) {
        return list(choices, "|", &|choice| match choice.get("const") {
            Some(value) => literal(value),
            None => kind(choice, definitions),
        });
    }
    match &about["type"] {
        Value::String(name) if name == "array" => format!("list of {}", kind(&about["items"], definitions)),
        Value::Array(kinds) => list(kinds, "|", &literal),
        name => name.as_str().unwrap_or("any").to_string(),
    }
}

fn model(text: &mut String, plan: &ModelPlan) {
    let sizes: BTreeMap<&str, usize> = plan.axes.iter().map(|axis| (axis.name.as_str(), axis.size)).collect();
    let _ = writeln!(text, "  axes");
    for axis in &plan.axes {
        let group = axis.group.as_ref().map(|group| format!(" in {group}")).unwrap_or_default();
        let elastic = if axis.elastic { ", elastic" } else { "" };
        let _ = writeln!(text, "    {:26} {}{group}{elastic}", axis.name, axis.size);
    }
    let _ = writeln!(text, "  blocks");
    for block in &plan.blocks {
        let _ = writeln!(text, "    {:26} {}", block.path, block.kind);
    }
    let _ = writeln!(text, "  parameters");
    let mut total = 0;
    for param in &plan.params {
        let shape: Vec<usize> = param.dims.iter().map(|dim| width(dim, &sizes, plan)).collect();
        total += shape.iter().product::<usize>();
        let _ = writeln!(text, "    {:58} {shape:?}", param.name);
    }
    let _ = writeln!(text, "    {total} in all");
}

/// Positions of a dimension.
fn width(layout: &Layout, sizes: &BTreeMap<&str, usize>, plan: &ModelPlan) -> usize {
    let size = |axis: &str| sizes.get(axis).copied().unwrap_or(0);
    match layout {
        Layout::Fixed(n) => *n,
        Layout::Axis { axis, unit } => size(axis) * unit,
        Layout::Seq(parts) => parts.iter().map(|(_, part)| width(part, sizes, plan)).sum(),
        Layout::Repeat { axis, inner } => {
            // Inside, an axis grouped by this one has its group's units only.
            let mut inside = sizes.clone();
            for grouped in plan.axes.iter().filter(|grouped| grouped.group.as_deref() == Some(axis)) {
                inside.insert(&grouped.name, grouped.size / size(axis).max(1));
            }
            size(axis) * width(inner, &inside, plan)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn keys_show_choices_defaults_and_meaning() {
        let mut text = String::new();
        let about = json!({
            "required": ["size"],
            "$defs": {
                "Shape": {"oneOf": [{"const": "a", "description": "x"}, {"const": "b"}]},
                "Plain": {"enum": ["c", "d"], "type": "string"},
            },
            "properties": {
                "list": {"type": "array", "items": {"$ref": "#/$defs/Plain"}},
                "maybe": {"type": ["number", "null"], "default": 0.5},
                "shape": {"$ref": "#/$defs/Shape", "description": "What it looks like.\nMore."},
                "size": {"type": "integer"},
            },
        });
        schema(&mut text, &about);
        let expected = [
            "  list   list of c|d",
            "  maybe  number|null  default 0.5",
            "  shape  a|b                       What it looks like.",
            "  size   integer      required",
        ];
        assert_eq!(text.lines().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn an_axis_inside_a_repeat_counts_its_group_only() {
        let axis = |name: &str, size, group: Option<&str>| gantry_plugin_api::plan::Axis {
            name: name.into(),
            size,
            group: group.map(str::to_string),
            shard: None,
            elastic: false,
            per_layer: false,
            active: None,
        };
        let plan =
            ModelPlan { axes: vec![axis("heads", 6, Some("groups")), axis("groups", 2, None)], ..Default::default() };
        let sizes = plan.axes.iter().map(|axis| (axis.name.as_str(), axis.size)).collect();
        let qkv = Layout::seq([("q", Layout::axis("heads", 4)), ("k", Layout::Fixed(4)), ("v", Layout::Fixed(4))]);
        // Per group: 3 heads of 4, k and v of 4 each.
        assert_eq!(width(&Layout::repeat("groups", qkv), &sizes, &plan), 2 * (3 * 4 + 4 + 4));
    }
}
