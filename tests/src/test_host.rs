//! A host for boundary tests: checks handles and, roughly, widths; writes down what is recorded; computes nothing.

use gantry_plugin_api::ops::{self, OPERATORS, Op, RegionKind, Role};
use gantry_plugin_api::plan::{Layout, ModelPlan};
use gantry_plugin_api::sdk::{
    DType, DimDesc, Error, HostCalls, LogLevel, OpCall, Outputs, RegionEntry, Result, SegmentDesc, TensorDesc,
    TensorRef,
};
use std::sync::atomic::{AtomicU32, Ordering};

/// One recording.
pub struct TestHost {
    plan: ModelPlan,
    generation: u32,
    /// Size of the first and of the last dimension of each value; the first is kept for parameters only.
    sizes: Vec<[usize; 2]>,
    /// Recorded operators, regions and outputs, if `keep` is set.
    pub lines: Vec<String>,
    keep: bool,
    /// Panics at the operator with this path.
    pub panic_at: Option<String>,
    pub skip_layer: Option<u32>,
}

impl TestHost {
    pub fn new(plan: &ModelPlan) -> TestHost {
        static GENERATIONS: AtomicU32 = AtomicU32::new(1);
        let generation = GENERATIONS.fetch_add(1, Ordering::Relaxed);
        TestHost {
            plan: plan.clone(),
            generation,
            sizes: Vec::new(),
            lines: Vec::new(),
            keep: true,
            panic_at: None,
            skip_layer: None,
        }
    }

    /// Keeps no lines, for measuring.
    pub fn quiet(plan: &ModelPlan) -> TestHost {
        TestHost { keep: false, ..TestHost::new(plan) }
    }

    /// Forgets all values, as a new recording does.
    pub fn clear(&mut self) {
        self.sizes.clear();
        self.lines.clear();
    }

    fn fresh(&mut self, width: usize) -> TensorRef {
        self.fresh_param(0, width)
    }

    fn fresh_param(&mut self, rows: usize, width: usize) -> TensorRef {
        self.sizes.push([rows, width]);
        TensorRef { id: self.sizes.len() as u32 - 1, generation: self.generation }
    }

    fn width(&self, tensor: TensorRef, path: &str) -> Result<usize> {
        Ok(self.sizes(tensor, path)?[1])
    }

    fn sizes(&self, tensor: TensorRef, path: &str) -> Result<[usize; 2]> {
        if tensor.generation != self.generation {
            return Err(Error::plugin(format!("{path}: a tensor of another recording was used")));
        }
        let sizes = self.sizes.get(tensor.id as usize);
        sizes.copied().ok_or_else(|| Error::plugin(format!("{path}: there is no tensor {}", tensor.id)))
    }

    fn line(&mut self, line: impl FnOnce() -> String) {
        if self.keep {
            self.lines.push(line());
        }
    }

    fn size(&self, layout: &Layout) -> usize {
        match layout {
            Layout::Fixed(n) => *n,
            Layout::Axis { axis, unit } => self.plan.axes.iter().find(|a| a.name == *axis).map_or(0, |a| a.size * unit),
            Layout::Seq(parts) => parts.iter().map(|(_, part)| self.size(part)).sum(),
            Layout::Repeat { axis, inner } => self.size(&Layout::axis(axis, 1)) * self.size(inner),
        }
    }
}

impl HostCalls for TestHost {
    fn call(&mut self, call: OpCall<'_>, outputs: &mut Outputs) -> Result<()> {
        if self.panic_at.as_deref() == Some(call.path) {
            panic!("a bug in the host at {}", call.path);
        }
        let Some((_, _, name)) = OPERATORS.iter().find(|op| op.0 == call.op && op.1 >= call.version) else {
            let (path, op, version) = (call.path, call.op, call.version);
            return Err(Error::plugin(format!("{path}: operator {op} version {version} is not known to this host")));
        };
        let mut first = 0;
        for (i, input) in call.inputs.iter().enumerate() {
            let [rows, width] = self.sizes(*input, call.path)?;
            if i == 0 {
                first = width;
            } else if call.op == ops::Linear::ID {
                if width != first {
                    let path = call.path;
                    return Err(Error::shape(format!("{path}: x has {first} channels, the weight takes {width}")));
                }
                first = rows;
            }
        }
        self.line(|| format!("{} {name}", call.path));
        outputs.push(self.fresh(first));
        Ok(())
    }

    fn param(&mut self, index: u32) -> Result<TensorRef> {
        let Some(param) = self.plan.params.get(index as usize) else {
            let n = self.plan.params.len();
            return Err(Error::plugin(format!("parameter {index} was asked for; the plan declares {n}")));
        };
        let width = param.dims.last().map_or(1, |layout| self.size(layout));
        let rows = param.dims.first().map_or(1, |layout| self.size(layout));
        Ok(self.fresh_param(rows, width))
    }

    fn buffer(&mut self, _index: u32) -> Result<TensorRef> {
        Ok(self.fresh(1))
    }

    fn region_begin(&mut self, path: &str, _kind: RegionKind, layer: Option<u32>) -> Result<RegionEntry> {
        if layer.is_some() && layer == self.skip_layer {
            return Ok(RegionEntry::Skip);
        }
        self.line(|| format!("begin {path}"));
        Ok(RegionEntry::Enter)
    }

    fn region_end(&mut self) -> Result<()> {
        self.line(|| "end".into());
        Ok(())
    }

    fn role(&mut self, role: Role, tensor: TensorRef) -> Result<TensorRef> {
        self.width(tensor, "role")?;
        self.line(|| format!("role {role:?}"));
        Ok(tensor)
    }

    fn step_input(&mut self, _name: &str) -> Result<TensorRef> {
        Ok(self.fresh(1))
    }

    fn batch_input(&mut self, _port: &str) -> Result<TensorRef> {
        Ok(self.fresh(1))
    }

    fn output(&mut self, port: &str, tensors: &[TensorRef]) -> Result<()> {
        tensors.iter().try_for_each(|t| self.width(*t, port).map(drop))?;
        self.line(|| format!("output {port}"));
        Ok(())
    }

    fn metric(&mut self, _name: &str, tensor: TensorRef) -> Result<()> {
        self.width(tensor, "metric").map(drop)
    }

    fn describe(&mut self, tensor: TensorRef) -> Result<TensorDesc> {
        let width = self.width(tensor, "describe")?;
        let segments = vec![SegmentDesc { name: "all".into(), axis: None, units: width, unit: 1 }];
        let dim = DimDesc { name: "channels".into(), size: width, local_size: width, segments };
        Ok(TensorDesc { dtype: DType::Real, dims: vec![dim], partial: false })
    }

    fn unflatten(&mut self, tensor: TensorRef, _names: &[&str]) -> Result<TensorRef> {
        Ok(tensor)
    }

    fn log(&mut self, level: LogLevel, target: &str, message: &str) {
        self.line(|| format!("log {level:?} {target}: {message}"));
    }
}
