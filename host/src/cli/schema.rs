//! `gantry schema`.

use super::{args, inspect, print};
use crate::failure::{Failure, Result};
use crate::recipe::editor::json_schema;

pub(super) fn run(arguments: args::Schema) -> Result<()> {
    let mut providers = Vec::new();
    for plugin in &arguments.plugins {
        let described = inspect::ask(plugin, &[])?.plugin.providers;
        providers.extend(described.into_iter().map(|provider| (provider.name, provider.config_schema)));
    }
    let text = serde_json::to_string_pretty(&json_schema(&providers));
    print(&format!("{}\n", text.map_err(|error| Failure::recipe(error.to_string()))?))
}
