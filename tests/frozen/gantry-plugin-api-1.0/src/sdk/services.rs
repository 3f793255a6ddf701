//! What the host does for a plugin outside of any call: its log and its threads.

use super::{LogLevel, Result};
use crate::abi;
use std::fmt;

/// Writes to the host's log under the plugin's name, from any thread; lost if no host has loaded the plugin.
pub fn log(level: LogLevel, message: impl fmt::Display) {
    abi::plugin::log(level, &message.to_string());
}

/// Calls `body(begin, end)` for ranges that cover 0 .. items, each at most `grain` long, on the host's threads. A
/// panic in a body is an error here.
pub fn par_for(items: u64, grain: u64, body: impl Fn(u64, u64) + Sync) -> Result<()> {
    let table = abi::plugin::host().map_or_else(abi::host::host_table, |(table, _)| table);
    abi::plugin::par_for(table, items, grain, &body)
}
