//! What plugins get from the host outside of a recording: its log and its threads.

use gantry_plugin_api::abi::host::{Services, set_services};
use gantry_plugin_api::sdk::LogLevel;
use rayon::prelude::*;

/// Offers the services to all plugins of the process. Called before the first one is loaded.
pub(super) fn install() {
    set_services(Services { log: log_event, par_for });
}

/// A plugin's message as an event of the host's log. `tracing` wants targets at compile time, so the target is
/// `plugin` and the plugin's name is a field.
pub fn log_event(level: LogLevel, plugin: &str, message: &str) {
    match level {
        LogLevel::Error => tracing::error!(target: "plugin", plugin, "{message}"),
        LogLevel::Warn => tracing::warn!(target: "plugin", plugin, "{message}"),
        LogLevel::Info => tracing::info!(target: "plugin", plugin, "{message}"),
        LogLevel::Debug => tracing::debug!(target: "plugin", plugin, "{message}"),
        _ => tracing::trace!(target: "plugin", plugin, "{message}"),
    }
}

fn par_for(items: u64, grain: u64, body: &(dyn Fn(u64, u64) + Sync)) {
    let grain = grain.max(1);
    (0..items.div_ceil(grain)).into_par_iter().for_each(|i| body(i * grain, ((i + 1) * grain).min(items)));
}
