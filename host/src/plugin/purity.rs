//! Records a forward twice and compares: a forward that depends on anything but its inputs would make replayed records
//! wrong without a word.

use super::{ModelStage, PluginError};
use gantry_plugin_api::ops::{OPERATORS, RegionKind, Role};
use gantry_plugin_api::sdk::{Error, HostCalls, LogLevel, OpCall, Outputs, RegionEntry, Result, TensorDesc, TensorRef};
use std::collections::HashMap;

/// Records `stage` into `first` and `second`, which must answer alike, and compares what was asked of them.
pub fn check_pure(
    name: &str,
    stage: &ModelStage,
    first: &mut dyn HostCalls,
    second: &mut dyn HostCalls,
) -> Result<(), PluginError> {
    let lines = |host: &mut dyn HostCalls| {
        let mut trace = Trace::new(host);
        stage.forward(&mut trace)?;
        Ok::<_, PluginError>(trace.lines)
    };
    let (first, second) = (lines(first)?, lines(second)?);
    let Some(at) = (0..first.len().max(second.len())).find(|&i| first.get(i) != second.get(i)) else { return Ok(()) };
    let show = |lines: &[String]| lines.get(at).cloned().unwrap_or_else(|| "nothing more".into());
    Err(PluginError::Call {
        provider: name.into(),
        error: Error::plugin(format!(
            "forward is not pure: recorded twice with the same inputs, call {at} was first {} and then {}; it may depend \
             on nothing but parameters, batch and step inputs",
            show(&first),
            show(&second)
        )),
    })
}

/// Passes calls on and writes each down with its tensors numbered by first appearance.
struct Trace<'a> {
    inner: &'a mut dyn HostCalls,
    lines: Vec<String>,
    seen: HashMap<TensorRef, usize>,
}

impl<'a> Trace<'a> {
    fn new(inner: &'a mut dyn HostCalls) -> Trace<'a> {
        Trace { inner, lines: Vec::new(), seen: HashMap::new() }
    }

    fn number(&mut self, tensor: TensorRef) -> usize {
        let next = self.seen.len();
        *self.seen.entry(tensor).or_insert(next)
    }

    fn numbers(&mut self, tensors: &[TensorRef]) -> Vec<usize> {
        tensors.iter().map(|t| self.number(*t)).collect()
    }
}

impl HostCalls for Trace<'_> {
    fn call(&mut self, call: OpCall<'_>, outputs: &mut Outputs) -> Result<()> {
        let inputs = self.numbers(call.inputs);
        let name = OPERATORS.iter().find(|op| op.0 == call.op).map_or("unknown operator", |op| op.2);
        self.lines.push(format!("\"{}\" = {name}{inputs:?} {:02x?}", call.path, call.attrs));
        self.inner.call(call, outputs)?;
        outputs.iter().for_each(|t| {
            self.number(*t);
        });
        Ok(())
    }

    fn param(&mut self, index: u32) -> Result<TensorRef> {
        self.lines.push(format!("parameter {index}"));
        self.inner.param(index)
    }

    fn buffer(&mut self, index: u32) -> Result<TensorRef> {
        self.lines.push(format!("buffer {index}"));
        self.inner.buffer(index)
    }

    fn region_begin(&mut self, path: &str, kind: RegionKind, layer: Option<u32>) -> Result<RegionEntry> {
        self.lines.push(format!("begin \"{path}\" {kind:?} {layer:?}"));
        self.inner.region_begin(path, kind, layer)
    }

    fn region_end(&mut self) -> Result<()> {
        self.lines.push("end".into());
        self.inner.region_end()
    }

    fn role(&mut self, role: Role, tensor: TensorRef) -> Result<TensorRef> {
        let n = self.number(tensor);
        self.lines.push(format!("role {role:?}[{n}]"));
        self.inner.role(role, tensor)
    }

    fn step_input(&mut self, name: &str) -> Result<TensorRef> {
        self.lines.push(format!("step input \"{name}\""));
        self.inner.step_input(name)
    }

    fn batch_input(&mut self, port: &str) -> Result<TensorRef> {
        self.lines.push(format!("input \"{port}\""));
        self.inner.batch_input(port)
    }

    fn output(&mut self, port: &str, tensors: &[TensorRef]) -> Result<()> {
        let numbers = self.numbers(tensors);
        self.lines.push(format!("output \"{port}\" = {numbers:?}"));
        self.inner.output(port, tensors)
    }

    fn metric(&mut self, name: &str, tensor: TensorRef) -> Result<()> {
        let n = self.number(tensor);
        self.lines.push(format!("metric \"{name}\" = [{n}]"));
        self.inner.metric(name, tensor)
    }

    fn describe(&mut self, tensor: TensorRef) -> Result<TensorDesc> {
        self.inner.describe(tensor)
    }

    fn unflatten(&mut self, tensor: TensorRef, names: &[&str]) -> Result<TensorRef> {
        let n = self.number(tensor);
        self.lines.push(format!("unflatten[{n}] {names:?}"));
        self.inner.unflatten(tensor, names)
    }

    fn log(&mut self, level: LogLevel, target: &str, message: &str) {
        self.inner.log(level, target, message);
    }
}
