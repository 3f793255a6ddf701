//! A plugin's description. The command line asks a child process for it, so that a crashing constructor is reported, not
//! suffered.

use super::{PluginError, PluginFile, PluginSet, Search};
use gantry_plugin_api::plan::ProviderInfo;
use serde::{Deserialize, Serialize};

/// What a plugin says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Inspection {
    pub name: String,
    pub version: String,
    /// Plugin API it was built against, e.g. `1.0`.
    pub api: String,
    /// Compiler that built it.
    pub rustc: String,
    /// Names of the operators it cannot do without.
    pub operators: Vec<String>,
    pub providers: Vec<ProviderInfo>,
}

/// Loads the plugin into this process and describes it.
pub fn inspect(file: &PluginFile, search: &Search) -> Result<Inspection, PluginError> {
    search.verify(file)?;
    let hello = gantry_plugin_api::abi::load::read_hello(&file.path)?;
    let mut set = PluginSet::default();
    // Verified above, under the conditions of this search.
    set.add_file(&PluginFile { allow_writable: true, ..file.clone() })?;
    let providers = set.plugins().iter().flat_map(|p| p.providers.clone()).collect();
    Ok(Inspection {
        name: hello.name,
        version: hello.version,
        api: format!("{}.{}", hello.api.0, hello.api.1),
        rustc: hello.rustc,
        operators: hello.operators.into_iter().map(|op| op.2).collect(),
        providers,
    })
}
