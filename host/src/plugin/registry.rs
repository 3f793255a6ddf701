//! [`PluginSet`]: the loaded plugins of a run, and the providers in them by name.
//!
//! Shared by all ranks of a process; instances made from it are not.

use super::instance::call_error;
use super::watch::watch;
use super::{ElastifierInstance, HooksInstance, ModelProvider, PluginError, PluginFile, Search, services};
use gantry_plugin_api::abi::hello::{API_MAJOR, API_MINOR};
use gantry_plugin_api::abi::host::host_table;
use gantry_plugin_api::abi::load::{self, HelloInfo};
use gantry_plugin_api::abi::plugin::{Plugin as LinkedPlugin, plugin_table};
use gantry_plugin_api::abi::tables::PluginTableRef;
use gantry_plugin_api::plan::{FolderExport, FolderImport, FolderKind, ProviderInfo, ProviderKind};
use gantry_plugin_api::sdk::Error;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};

/// A loaded plugin.
#[derive(Clone)]
pub struct Plugin {
    pub name: String,
    pub version: String,
    /// API it was built against, major and minor.
    pub api: (u32, u32),
    /// The library, or a note that there is none.
    pub path: PathBuf,
    pub providers: Vec<ProviderInfo>,
    table: PluginTableRef,
}

impl Plugin {
    /// What only a plugin of API 1.1 has to say; `None` from an older one.
    #[cfg(feature = "grown")]
    pub fn about(&self) -> Option<Result<String, PluginError>> {
        let about = self.table.about()?;
        Some(about().into_result().map(Into::into).map_err(|e| plugin_error(&self.name, Error::from(e))))
    }

    fn provider(&self, name: &str, kind: ProviderKind) -> Option<&ProviderInfo> {
        self.providers.iter().find(|p| p.name == name && p.kind == kind)
    }
}

/// The plugins of a run.
#[derive(Clone, Default)]
pub struct PluginSet {
    plugins: Vec<Plugin>,
    search: Search,
}

impl PluginSet {
    /// Loads every file the search lists (files, not folders), then the plugins of `names` that no loaded plugin
    /// offers a provider for.
    pub fn load<'a>(search: Search, names: impl IntoIterator<Item = &'a str>) -> Result<PluginSet, PluginError> {
        let listed: Vec<PluginFile> = search.listed.iter().filter(|f| !f.path.is_dir()).cloned().collect();
        let mut set = PluginSet { plugins: Vec::new(), search };
        for file in &listed {
            set.add_file(file)?;
        }
        for name in names {
            set.require(name)?;
        }
        Ok(set)
    }

    /// Makes sure that some plugin offers a provider called `name`, looking for a plugin of that name if not.
    pub fn require(&mut self, name: &str) -> Result<(), PluginError> {
        if self.plugins.iter().any(|p| p.providers.iter().any(|info| info.name == name)) {
            return Ok(());
        }
        let file = self.search.find(name)?;
        self.add_file(&file)?;
        match self.plugins.last() {
            Some(found) if found.name != name && !found.providers.iter().any(|info| info.name == name) => {
                Err(PluginError::Others {
                    path: found.path.clone(),
                    plugin: found.name.clone(),
                    name: name.into(),
                    has: has(&found.providers),
                })
            }
            _ => Ok(()),
        }
    }

    /// Verifies and loads one file.
    pub fn add_file(&mut self, file: &PluginFile) -> Result<(), PluginError> {
        self.search.verify(file)?;
        services::install();
        let loaded = load::load(&file.path)?;
        self.add(&file.path, loaded.hello, loaded.table)
    }

    /// Adds a plugin that is linked into this program.
    pub fn add_linked<P: LinkedPlugin>(&mut self) -> Result<(), PluginError> {
        services::install();
        let table = plugin_table::<P>();
        let hello = HelloInfo {
            name: P::NAME.into(),
            version: P::VERSION.into(),
            api: (API_MAJOR, API_MINOR),
            rustc: String::new(),
            unwinds: true,
            layout_hash: 0,
            operators: Vec::new(),
        };
        table.init()(host_table()).into_result().map_err(|e| plugin_error(P::NAME, Error::from(e)))?;
        self.add(Path::new("(linked in)"), hello, table)
    }

    fn add(&mut self, path: &Path, hello: HelloInfo, table: PluginTableRef) -> Result<(), PluginError> {
        let json = table.describe()().into_result().map_err(|e| plugin_error(&hello.name, Error::from(e)))?;
        let providers: Vec<ProviderInfo> = serde_json::from_str(&json)
            .map_err(|e| plugin_error(&hello.name, Error::plugin(format!("its description: {e}"))))?;
        for other in &self.plugins {
            if let Some(twice) = providers.iter().find(|p| other.provider(&p.name, p.kind).is_some()) {
                return Err(PluginError::Ambiguous {
                    name: twice.name.clone(),
                    first: format!("{} ({})", other.name, other.path.display()),
                    second: format!("{} ({})", hello.name, path.display()),
                });
            }
        }
        tracing::debug!(plugin = hello.name, version = hello.version, path = %path.display(), "plugin loaded");
        for operator in providers.iter().filter(|p| p.kind == ProviderKind::Operator) {
            super::custom::register(&operator.name, table);
        }
        let HelloInfo { name, version, api, .. } = hello;
        self.plugins.push(Plugin { name, version, api, path: path.into(), providers, table });
        Ok(())
    }

    pub fn plugins(&self) -> &[Plugin] {
        &self.plugins
    }

    /// Kind of the provider called `name`, if a loaded plugin has it.
    pub fn kind(&self, name: &str) -> Option<ProviderKind> {
        self.plugins.iter().flat_map(|p| &p.providers).find(|info| info.name == name).map(|info| info.kind)
    }

    /// The model provider whose Hugging Face folders have this `model_type`, and its declaration.
    pub fn folder_provider(&self, model_type: &str) -> Option<(&str, &FolderKind)> {
        self.folder_kinds().find(|(_, kind)| kind.model_type == model_type)
    }

    /// Every model provider with Hugging Face folders.
    pub fn folder_kinds(&self) -> impl Iterator<Item = (&str, &FolderKind)> {
        let models = self.plugins.iter().flat_map(|p| &p.providers).filter(|info| info.kind == ProviderKind::Model);
        models.filter_map(|info| Some((info.name.as_str(), info.hugging_face.as_ref()?)))
    }

    /// What model provider `name` makes of a folder's `config.json`.
    pub fn import_folder(&self, name: &str, config: &serde_json::Value) -> Result<FolderImport, PluginError> {
        self.folder(name, config, false)
    }

    /// What a config of model provider `name` becomes in a folder.
    pub fn export_folder(&self, name: &str, config: &serde_json::Value) -> Result<FolderExport, PluginError> {
        self.folder(name, config, true)
    }

    fn folder<T: DeserializeOwned>(
        &self,
        name: &str,
        config: &serde_json::Value,
        export: bool,
    ) -> Result<T, PluginError> {
        let call = self.table(name, ProviderKind::Model, "model")?.hugging_face();
        let config = config.to_string();
        let reply = {
            let _watch = watch(name, "hugging_face");
            call(name.into(), config.as_str().into(), export)
        };
        let json = reply.into_result().map_err(|e| call_error(name, e.into()))?;
        serde_json::from_str(&json)
            .map_err(|e| plugin_error(name, Error::plugin(format!("its config of folders: {e}"))))
    }

    /// An instance of the model provider `name` with its part of the recipe, for the calling thread.
    pub fn provider(&self, name: &str, config: &serde_json::Value) -> Result<ModelProvider, PluginError> {
        ModelProvider::create(name, self.table(name, ProviderKind::Model, "model")?, config)
    }

    /// An instance of the elastifier `name`, for the calling thread.
    pub fn elastifier(&self, name: &str, config: &serde_json::Value) -> Result<ElastifierInstance, PluginError> {
        ElastifierInstance::create(name, self.table(name, ProviderKind::Elastifier, "elastifier")?, config)
    }

    /// An instance of the hooks `name`, for the calling thread.
    pub fn hooks(&self, name: &str, config: &serde_json::Value) -> Result<HooksInstance, PluginError> {
        HooksInstance::create(name, self.table(name, ProviderKind::Hooks, "hooks")?, config)
    }

    fn table(&self, name: &str, kind: ProviderKind, word: &'static str) -> Result<PluginTableRef, PluginError> {
        if let Some(plugin) = self.plugins.iter().find(|p| p.provider(name, kind).is_some()) {
            return Ok(plugin.table);
        }
        let named = self.plugins.iter().find(|p| p.name == name || p.providers.iter().any(|i| i.name == name));
        match named {
            Some(plugin) => Err(PluginError::NoSuchProvider {
                path: plugin.path.clone(),
                plugin: plugin.name.clone(),
                kind: word,
                name: name.into(),
                has: has(&plugin.providers),
            }),
            None => Err(PluginError::NotFound {
                name: name.into(),
                file: super::find::file_name(name),
                looked: self.plugins.iter().map(|p| p.path.clone()).collect(),
            }),
        }
    }
}

fn has(providers: &[ProviderInfo]) -> String {
    let words = providers.iter().map(|p| match p.kind {
        ProviderKind::Model => format!("model {}", p.name),
        ProviderKind::Elastifier => format!("elastifier {}", p.name),
        ProviderKind::Hooks => format!("hooks {}", p.name),
        _ => format!("operator {}", p.name),
    });
    words.collect::<Vec<_>>().join(", ")
}

fn plugin_error(plugin: &str, error: Error) -> PluginError {
    PluginError::Call { provider: plugin.into(), error }
}
