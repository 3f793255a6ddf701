//! Custom operators of the loaded plugins, by name, for the whole process: a recording names them by text.

use gantry_plugin_api::abi::custom::CustomInstance;
use gantry_plugin_api::abi::tables::PluginTableRef;
use gantry_plugin_api::sdk::{Error, Result};
use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

static OPERATORS: RwLock<BTreeMap<String, PluginTableRef>> = RwLock::new(BTreeMap::new());

/// Makes an operator known; the plugin loaded last has the name.
pub(super) fn register(name: &str, table: PluginTableRef) {
    OPERATORS.write().unwrap_or_else(PoisonError::into_inner).insert(name.into(), table);
}

/// The operator `name` with its attributes, given as JSON.
pub fn instance(name: &str, attrs: &str) -> Result<CustomInstance> {
    let operators = OPERATORS.read().unwrap_or_else(PoisonError::into_inner);
    let Some(table) = operators.get(name) else {
        let known: Vec<&str> = operators.keys().map(String::as_str).collect();
        let known = if known.is_empty() { "none".into() } else { known.join(", ") };
        return Err(Error::plugin(format!(
            "no loaded plugin has a custom operator \"{name}\" (known: {known}); list its plugin in the recipe"
        )));
    };
    CustomInstance::new(name, *table, attrs)
}
