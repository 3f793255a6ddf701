//! What can go wrong with a plugin, and with which exit status it ends the process.

use crate::failure::{Cause, Failure};
use gantry_plugin_api::abi::load::LoadError;
use gantry_plugin_api::sdk::{Error, ErrorKind};
use std::path::PathBuf;

/// An error about or from a plugin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PluginError {
    #[error("no plugin for \"{name}\": {file} is in none of the {} places looked at", .looked.len())]
    NotFound { name: String, file: String, looked: Vec<PathBuf> },

    /// Of the file, or of the folder that it lies in.
    #[error("{}: others than its owner may write to this plugin or its folder (mode {mode:03o})", .path.display())]
    Writable { path: PathBuf, mode: u32 },

    #[error("{}: this plugin belongs to user {owner}, who is neither root nor the one running this", .path.display())]
    Foreign { path: PathBuf, owner: u32 },

    #[error("{}: sha256 is {actual}, the recipe pins {pinned}", .path.display())]
    Checksum { path: PathBuf, actual: String, pinned: String },

    #[error("{}: {cause}", .path.display())]
    Read { path: PathBuf, cause: std::io::Error },

    #[error(transparent)]
    Load(#[from] LoadError),

    #[error("{}: plugin {plugin} has no {kind} \"{name}\"; it has: {has}", .path.display())]
    NoSuchProvider { path: PathBuf, plugin: String, kind: &'static str, name: String, has: String },

    #[error("{}: plugin {plugin} has no \"{name}\", which its file name promises; it has: {has}", .path.display())]
    Others { path: PathBuf, plugin: String, name: String, has: String },

    #[error("\"{name}\" is offered by both plugin {first} and plugin {second}; list only one of them in the recipe")]
    Ambiguous { name: String, first: String, second: String },

    /// What a provider, or the host on a provider's behalf, said in a call.
    #[error("{provider}: {error}")]
    Call { provider: String, error: Error },
}

impl PluginError {
    /// Why the process ends: exit status 3, but 2 where the recipe's config is at fault, 4 for data and 6 for
    /// communication.
    pub fn cause(&self) -> Cause {
        match self {
            PluginError::Call { error, .. } => match error.kind {
                ErrorKind::Config => Cause::Recipe,
                ErrorKind::Data => Cause::Data,
                ErrorKind::Communication => Cause::Communication,
                _ => Cause::Plugin,
            },
            _ => Cause::Plugin,
        }
    }
}

impl From<PluginError> for Failure {
    fn from(e: PluginError) -> Failure {
        let mut failure = Failure::new(e.cause(), e.to_string());
        match &e {
            PluginError::NotFound { looked, .. } => {
                failure.details.extend(looked.iter().map(|p| p.display().to_string()));
                failure.remedy(format!(
                    "build the plugin, and name its file or folder under `plugins` or in {}",
                    super::find::PLUGIN_PATH
                ))
            }
            PluginError::Writable { path, .. } => failure.remedy(format!(
                "chmod go-w {}, or set {}=1 to load it as it is",
                path.display(),
                super::find::ALLOW_WRITABLE
            )),
            PluginError::Foreign { path, .. } => failure.remedy(format!(
                "chown {} or copy it, or set {}=1 to load it as it is",
                path.display(),
                super::find::ALLOW_WRITABLE
            )),
            PluginError::Checksum { .. } => {
                failure.remedy("install the pinned file, or change the sha256 in the recipe if the new one is meant")
            }
            _ => failure,
        }
    }
}
