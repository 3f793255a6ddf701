//! `reproduction.json`: everything that says how a run came about, in the run folder and in each of its checkpoints.
//!
//! `gantry train RUN_DIR/recipe.resolved.yaml --run-dir OTHER` with the same plugins and data on the same kind of machine
//! repeats the run bit by bit; this file is what to compare when it does not.

use crate::checkpoint::PluginEntry;
use crate::data::{Identity, Tokenizer};
use crate::failure::{Failure, Result};
use crate::observe::Machine;
use crate::recipe::Recipe;
use serde_json::{Map, Value, json};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

/// Name of the file.
pub const FILE: &str = "reproduction.json";

/// The text of the file for a run that begins now, after `resumed`: (checkpoint folder, its step).
pub(super) fn describe(
    recipe: &Recipe,
    data: &Identity,
    tokenizer: Option<&Tokenizer>,
    plugins: &[PluginEntry],
    resumed: Option<(&std::path::Path, u64)>,
) -> Result<String> {
    let commit = Some(env!("GANTRY_COMMIT")).filter(|commit| !commit.is_empty());
    let text = |text: &std::ffi::OsString| text.to_string_lossy().into_owned();
    let command: Vec<String> = std::env::args_os().map(|argument| text(&argument)).collect();
    let environment: Map<String, Value> = std::env::vars_os()
        .map(|(name, value)| (text(&name), Value::from(text(&value))))
        .filter(|(name, _)| name.starts_with("GANTRY_"))
        .collect();
    let folder = std::env::current_dir().map(|folder| folder.display().to_string()).ok();
    let build = if cfg!(debug_assertions) { "debug" } else { "release" };
    let value = json!({
        "gantry": {"version": env!("CARGO_PKG_VERSION"), "commit": commit, "build": build},
        "started": now(),
        "command": command,
        "folder": folder,
        "environment": environment,
        "resumed": resumed.map(|(folder, step)| json!({"checkpoint": folder, "step": step})),
        "recipe": recipe.resolved_yaml(),
        "data": self::data(data),
        "tokenizer": tokenizer.map(|tokenizer| {
            json!({"name": tokenizer.name(), "vocab_size": tokenizer.vocab_size(), "sha256": tokenizer.sha256()})
        }),
        "plugins": plugins,
        "machine": Machine::this(),
    });
    serde_json::to_string_pretty(&value).map_err(|error| Failure::data(format!("cannot describe the run: {error}")))
}

/// The data in JSON.
pub(super) fn data(data: &Identity) -> Value {
    let mut value = json!({"sha256": data.sha256, "documents": data.documents, "tokens": data.tokens});
    if let Some((order, samples)) = &data.order {
        value["order"] = order.as_str().into();
        value["samples"] = (*samples).into();
    }
    value
}

/// Date and time in UTC as RFC 3339 writes them.
fn now() -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut text));
    text
}

#[cfg(test)]
mod tests {
    #[test]
    fn now_is_a_date_and_a_time() {
        let now = super::now();
        assert!(now.starts_with("20") && now.contains('T') && now.ends_with('Z'), "{now}");
    }
}
