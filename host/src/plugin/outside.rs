//! The host as hooks see it: outside of a recording there is a log and nothing to record.

use super::services::log_event;
use gantry_plugin_api::ops::{RegionKind, Role};
use gantry_plugin_api::sdk::{Error, HostCalls, LogLevel, OpCall, Outputs, RegionEntry, Result, TensorDesc, TensorRef};

/// Answers every recording call with an error that says where one is.
pub struct OutsideRecording<'a> {
    /// The plugin that is called, for its log lines.
    pub plugin: &'a str,
}

fn outside<T>(what: &str) -> Result<T> {
    Err(Error::plugin(format!("{what} was called from a hook; operators are recorded in forward only")))
}

impl HostCalls for OutsideRecording<'_> {
    fn call(&mut self, call: OpCall<'_>, _: &mut Outputs) -> Result<()> {
        outside(&format!("operator {:?}", call.path))
    }
    fn param(&mut self, _: u32) -> Result<TensorRef> {
        outside("param")
    }
    fn buffer(&mut self, _: u32) -> Result<TensorRef> {
        outside("buffer")
    }
    fn region_begin(&mut self, _: &str, _: RegionKind, _: Option<u32>) -> Result<RegionEntry> {
        outside("region_begin")
    }
    fn region_end(&mut self) -> Result<()> {
        outside("region_end")
    }
    fn role(&mut self, _: Role, _: TensorRef) -> Result<TensorRef> {
        outside("role")
    }
    fn step_input(&mut self, _: &str) -> Result<TensorRef> {
        outside("step_input")
    }
    fn batch_input(&mut self, _: &str) -> Result<TensorRef> {
        outside("batch")
    }
    fn output(&mut self, _: &str, _: &[TensorRef]) -> Result<()> {
        outside("output")
    }
    fn metric(&mut self, _: &str, _: TensorRef) -> Result<()> {
        outside("metric")
    }
    fn describe(&mut self, _: TensorRef) -> Result<TensorDesc> {
        outside("describe")
    }
    fn unflatten(&mut self, _: TensorRef, _: &[&str]) -> Result<TensorRef> {
        outside("unflatten")
    }
    fn log(&mut self, level: LogLevel, _: &str, message: &str) {
        log_event(level, self.plugin, message);
    }
}
