//! Plugins: find, verify, load, call.
//!
//! - [`find`]: where a plugin's file is looked for, and what is checked before it is opened.
//! - [`registry`]: [`PluginSet`], the loaded plugins of a run, and the providers in them by name.
//! - [`instance`]: a provider, module, elastifier or set of hooks as safe Rust: one per rank, used on one thread.
//! - [`custom`]: the operators that loaded plugins bring.
//! - [`purity`]: records a forward twice and compares.
//! - [`watch`]: says so when a call into a plugin does not come back.
//! - [`services`]: what plugins get from the host outside of a recording: log and threads.
//! - [`inspect`]: a plugin's description.
//!
//! May depend on `gantry_plugin_api` and, of the host, on `failure` only. Invariant: nothing here knows a model; a plugin can
//! end a run only with an error that names it.

pub mod custom;
pub mod error;
pub mod find;
pub mod inspect;
pub mod instance;
pub mod outside;
pub mod purity;
pub mod registry;
pub mod services;
pub mod watch;

pub use error::PluginError;
pub use find::{PluginFile, Search};
pub use instance::{ElastifierInstance, HooksInstance, ModelProvider, ModelStage};
pub use purity::check_pure;
pub use registry::PluginSet;
pub use services::log_event;
