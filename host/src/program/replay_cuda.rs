//! Executes a program on a GPU: the same record and the same memory plan, each phase captured once as a CUDA graph.
//!
//! Every operand's address is the start of its space on the device plus the planned offset; there is one allocation per
//! space. A replay is one graph launch; nothing is allocated or waited for. FP32 only, and one tensor-parallel rank.

use super::graph::{Action, Collective, Operand, Space, Step, ValueId};
use super::replay::{Phase, Program};
use crate::error::{Error, Result};
use gantry_kernels::cuda::{self, Buffer, Device, Graph, Operands, Span};
use smallvec::SmallVec;
use std::collections::BTreeSet;
use std::time::Duration;

/// A GPU that fails while it works is a lost rank.
impl From<cuda::Error> for Error {
    fn from(error: cuda::Error) -> Error {
        Error::communication(error.message)
    }
}

/// The rank's long-lived memory on its GPU; programs of the rank share it.
#[derive(Clone, Debug)]
pub struct DeviceMemory {
    pub params: Buffer<f32>,
    pub grads: Buffer<f32>,
    pub buffers: Buffer<f32>,
    /// Parameters of the model that this one learns from, if there is one.
    pub teacher: Option<Buffer<f32>>,
}

impl DeviceMemory {
    /// Zeroed memory for these numbers of elements; main gradients are laid out as the parameters.
    pub fn new(device: &Device, param_len: usize, buffer_len: usize) -> Result<DeviceMemory> {
        Ok(DeviceMemory {
            params: device.alloc(param_len)?,
            grads: device.alloc(param_len)?,
            buffers: device.alloc(buffer_len)?,
            teacher: None,
        })
    }
}

/// Names of kernels in the program that have no CUDA launcher, each once.
pub fn unsupported(program: &Program) -> Vec<&'static str> {
    let names: BTreeSet<&'static str> = program
        .graph
        .steps
        .iter()
        .filter_map(|step| match &step.action {
            Action::Launch { kernel, .. } if !cuda::supports(kernel.as_ref()) => Some(kernel.name()),
            _ => None,
        })
        .collect();
    names.into_iter().collect()
}

/// A program on a GPU, with the arenas of one live micro-batch.
pub struct CudaReplay<'p> {
    program: &'p Program,
    act: Buffer<f32>,
    int: Buffer<i32>,
    forward: Option<Graph>,
    backward: Option<Graph>,
}

impl<'p> CudaReplay<'p> {
    /// Allocates the arenas and captures both phases. `tp` is the number of tensor-parallel ranks it was recorded for.
    pub fn capture(program: &'p Program, device: &Device, memory: &DeviceMemory, tp: usize) -> Result<CudaReplay<'p>> {
        if tp != 1 {
            return Err(Error::recipe(format!("grid.tp is {tp}; on a GPU a program runs on one tensor-parallel rank"))
                .remedy("set grid.tp to 1"));
        }
        let missing = unsupported(program);
        if !missing.is_empty() {
            return Err(Error::recipe(format!(
                "the model uses kernels without a CUDA version: {}",
                missing.join(", ")
            ))
            .remedy("run on the CPU"));
        }
        let act = device.alloc(program.plan.act_len)?;
        let int = device.alloc(program.plan.int_len)?;
        let spaces = Spaces { program, memory, act: &act, int: &int };
        let (forward, backward) = program.graph.steps.split_at(program.graph.forward_steps);
        let capture = |steps: &[Step]| -> Result<Option<Graph>> {
            let mut failed = None;
            let graph = device.capture(|device| {
                steps.iter().try_for_each(|step| {
                    spaces.launch(device, step).inspect_err(|_| failed = Some(program.graph.step_path(step)))
                })
            });
            graph.map_err(|e| Error::from(e).at(failed.unwrap_or_else(|| "capturing a CUDA graph".into())))
        };
        let (forward, backward) = (capture(forward)?, capture(backward)?);
        Ok(CudaReplay { program, act, int, forward, backward })
    }

    fn graph(&self, phase: Phase) -> Option<&Graph> {
        match phase {
            Phase::Forward => self.forward.as_ref(),
            Phase::Backward => self.backward.as_ref(),
        }
    }

    /// Launches one phase; returns before it has run.
    pub fn run(&self, phase: Phase) -> Result<()> {
        match self.graph(phase) {
            Some(graph) => Ok(graph.launch()?),
            None => Ok(()),
        }
    }

    /// Time on the GPU of each of `times` launches of a phase.
    pub fn time(&self, phase: Phase, times: usize) -> Result<Vec<Duration>> {
        match self.graph(phase) {
            Some(graph) => Ok(graph.time(times)?),
            None => Ok(vec![Duration::ZERO; times]),
        }
    }

    /// Nodes of a phase's graph.
    pub fn nodes(&self, phase: Phase) -> usize {
        self.graph(phase).map_or(0, Graph::nodes)
    }

    /// Sets a pinned activation, in storage order; waits until that is done.
    pub fn write(&self, id: ValueId, values: &[f32]) -> Result<()> {
        let range = self.range(id, values.len())?;
        Ok(self.act.write(range.start, values)?)
    }

    pub fn write_int(&self, id: ValueId, values: &[i32]) -> Result<()> {
        let range = self.range(id, values.len())?;
        Ok(self.int.write(range.start, values)?)
    }

    /// A pinned activation in storage order, after everything launched before.
    pub fn read(&self, id: ValueId) -> Result<Vec<f32>> {
        Ok(self.act.read(self.program.range(id))?)
    }

    pub fn read_int(&self, id: ValueId) -> Result<Vec<i32>> {
        Ok(self.int.read(self.program.range(id))?)
    }

    /// Fills the arenas with NaN: what a phase reads before it was written shows.
    pub fn poison(&self) -> Result<()> {
        self.act.poison()?;
        Ok(self.int.poison()?)
    }

    fn range(&self, id: ValueId, len: usize) -> Result<std::ops::Range<usize>> {
        let range = self.program.range(id);
        if range.len() != len {
            let value = self.program.graph.value(id);
            return Err(Error::plugin(format!("{len} elements for {} of {}", value.name, value.text())));
        }
        Ok(range)
    }
}

/// Where the spaces of a program lie on the device.
struct Spaces<'a> {
    program: &'a Program,
    memory: &'a DeviceMemory,
    act: &'a Buffer<f32>,
    int: &'a Buffer<i32>,
}

type Spans = SmallVec<[Span; 8]>;

impl Spaces<'_> {
    /// From the operand's first element to the end of its storage.
    fn span(&self, operand: &Operand) -> cuda::Result<Span> {
        let storage = &self.program.graph.storages[operand.storage.0 as usize];
        let start = self.program.plan.offsets[operand.storage.0 as usize];
        let range = start + operand.offset.min(storage.len)..start + storage.len;
        match storage.space {
            Space::Act => self.act.span(range),
            Space::Int => self.int.span(range),
            Space::Param => self.memory.params.span(range),
            Space::Grad => self.memory.grads.span(range),
            Space::Buffer => self.memory.buffers.span(range),
            Space::Teacher => match &self.memory.teacher {
                Some(teacher) => teacher.span(range),
                None => Err(cuda::Error::new("the program reads a teacher's parameters, which are not on the GPU")),
            },
        }
    }

    fn spans(&self, operands: &[Operand]) -> cuda::Result<Spans> {
        operands.iter().map(|operand| self.span(operand)).collect()
    }

    fn launch(&self, device: &Device, step: &Step) -> cuda::Result<()> {
        match &step.action {
            Action::Launch { kernel, ins, outs, ints, int_outs, work } => {
                let (ins, outs) = (self.spans(ins)?, self.spans(outs)?);
                let (ints, int_outs) = (self.spans(ints)?, self.spans(int_outs)?);
                let work = work.map(|storage| self.span(&Operand { storage, offset: 0 })).transpose()?;
                let operands =
                    Operands { ins: &ins, outs: &outs, ints: &ints, int_outs: &int_outs, work: work.as_ref() };
                device.launch(kernel.as_ref(), &operands)
            }
            // In a group of one every collective is a copy, and none where it works in place.
            Action::Collective { kind: Collective::AllReduce, src, dst, .. } if src == dst => Ok(()),
            Action::Collective { src, dst, len, .. } => device.copy(&self.span(src)?, &self.span(dst)?, *len),
        }
    }
}
