//! One GPU as one rank uses it: its stream, its compiled kernels, its matrix products, its graphs.

use super::blas::Blas;
use super::compile::{SOURCES, compile};
use super::error::{Error, Result};
use super::launch::{self, Operands};
use super::memory::{Allocation, BYTES, Buffer, Span, Word};
use super::{ARCH, library};
use crate::kernel::Kernel;
use cudarc::driver::{CudaContext, CudaFunction, CudaGraph, CudaStream, result, sys};
use cudarc::nvrtc::Ptx;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// An opened GPU. Clones share everything.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    functions: BTreeMap<&'static str, CudaFunction>,
    compile_time: Duration,
    blas: Blas,
    stream: Arc<CudaStream>,
    context: Arc<CudaContext>,
    /// While capturing: the memory that the graph will point into.
    captured: Mutex<Option<Vec<Arc<Allocation>>>>,
}

impl Device {
    /// Opens GPU `ordinal` and compiles the kernels for it.
    pub fn open(ordinal: usize) -> Result<Device> {
        library::present()?;
        let context = CudaContext::new(ordinal).map_err(|e| Error::from(e).at(format!("opening GPU {ordinal}")))?;
        let (major, minor) = context.compute_capability()?;
        if (major, minor) != (9, 0) {
            return Err(Error::new(format!(
                "GPU {ordinal} ({}) has compute capability {major}.{minor}; the kernels are for 9.0 (H100, H200)",
                context.name()?
            )));
        }
        // SAFETY: all work of this context goes through one stream, so events between streams order nothing; inside a
        // captured graph they would even be errors.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream()?;
        let start = Instant::now();
        let mut functions = BTreeMap::new();
        for source in SOURCES {
            let module = context.load_module(Ptx::from_binary(compile(source, ARCH)?)).map_err(Error::from);
            let module = module.map_err(|e| e.at(source.name))?;
            for &name in source.kernels {
                let function = module.load_function(name).map_err(|e| Error::from(e).at(name))?;
                functions.insert(name, function);
            }
        }
        let compile_time = start.elapsed();
        let blas = Blas::new(&stream)?;
        Ok(Device(Arc::new(Inner { functions, compile_time, blas, stream, context, captured: Mutex::new(None) })))
    }

    /// As the driver names it.
    pub fn name(&self) -> Result<String> {
        Ok(self.0.context.name()?)
    }

    /// (free, total) bytes.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.0.context.bind_to_thread()?;
        Ok(self.0.context.mem_get_info()?)
    }

    /// Kernels compiled and loaded, and how long that took.
    pub fn compiled(&self) -> (usize, Duration) {
        (self.0.functions.len(), self.0.compile_time)
    }

    /// Version of cuBLASLt, e.g. 130100.
    pub fn blas_version(&self) -> usize {
        self.0.blas.version()
    }

    /// Zeroed memory for `len` elements.
    pub fn alloc<T: Word>(&self, len: usize) -> Result<Buffer<T>> {
        Buffer::new(&self.0.stream, len)
    }

    /// Launches a kernel. Returns before it has run; operands too small for it are an error.
    pub fn launch(&self, kernel: &dyn Kernel, operands: &Operands<'_>) -> Result<()> {
        if let Some(captured) = &mut *self.captured() {
            captured.extend(operands.spans().map(|span| span.memory.clone()));
        }
        launch::launch(self, kernel, operands).map_err(|e| e.at(kernel.name()))
    }

    /// Copies the first `len` elements of `src` to `dst`, which do not overlap. Returns before that is done.
    pub fn copy(&self, src: &Span, dst: &Span, len: usize) -> Result<()> {
        if len > src.len || len > dst.len {
            return Err(Error::new(format!("copy of {len} elements from {} to {}", src.len, dst.len)));
        }
        if let Some(captured) = &mut *self.captured() {
            captured.extend([src.memory.clone(), dst.memory.clone()]);
        }
        self.0.context.bind_to_thread()?;
        // SAFETY: both ranges lie inside live allocations, whose freeing waits for this stream.
        Ok(unsafe { result::memcpy_dtod_async(dst.ptr, src.ptr, len * BYTES, self.0.stream.cu_stream()) }?)
    }

    /// Waits for everything launched, and reports a fault of any of it.
    pub fn synchronize(&self) -> Result<()> {
        self.0.stream.synchronize()?;
        Ok(self.0.context.check_err()?)
    }

    /// Records what `record` launches as a graph instead of running it. None if it launches nothing.
    pub fn capture(&self, record: impl FnOnce(&Device) -> Result<()>) -> Result<Option<Graph>> {
        if self.captured().is_some() {
            return Err(Error::new("a graph is captured inside another"));
        }
        self.synchronize()?;
        self.0.stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        *self.captured() = Some(Vec::new());
        let recorded = record(self);
        let memory = self.captured().take().unwrap_or_default();
        // Ended in any case: a stream left in capture takes no other work.
        let graph = self.0.stream.end_capture(sys::CUgraphInstantiate_flags(0));
        recorded?;
        let Some(graph) = graph? else { return Ok(None) };
        let mut nodes = 0;
        // SAFETY: without an array the call only counts the nodes of a live graph.
        unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &mut nodes) }.result()?;
        graph.upload()?;
        Ok((nodes > 0).then(|| Graph { graph, nodes, device: self.clone(), _memory: memory }))
    }

    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.0.stream
    }

    pub(super) fn blas(&self) -> &Blas {
        &self.0.blas
    }

    pub(super) fn function(&self, name: &str) -> Result<&CudaFunction> {
        self.0.functions.get(name).ok_or_else(|| Error::new(format!("no CUDA kernel {name:?} was compiled")))
    }

    fn captured(&self) -> std::sync::MutexGuard<'_, Option<Vec<Arc<Allocation>>>> {
        self.0.captured.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A captured run of launches. Keeps the memory it works on.
pub struct Graph {
    graph: CudaGraph,
    nodes: usize,
    device: Device,
    _memory: Vec<Arc<Allocation>>,
}

impl Graph {
    /// Kernel launches and copies in it.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Launches the whole graph; returns before it has run.
    pub fn launch(&self) -> Result<()> {
        Ok(self.graph.launch()?)
    }

    /// Time on the GPU of each of `times` launches, by events around them.
    pub fn time(&self, times: usize) -> Result<Vec<Duration>> {
        let (context, stream) = (&self.device.0.context, &self.device.0.stream);
        let event = || context.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
        let mut durations = Vec::with_capacity(times);
        for _ in 0..times {
            let (begin, end) = (event()?, event()?);
            begin.record(stream)?;
            self.launch()?;
            end.record(stream)?;
            end.synchronize()?;
            durations.push(Duration::from_secs_f64(f64::from(begin.elapsed_ms(&end)?) * 1e-3));
        }
        Ok(durations)
    }
}

impl Operands<'_> {
    fn spans(&self) -> impl Iterator<Item = &Span> {
        self.ins.iter().chain(self.outs).chain(self.ints).chain(self.int_outs).chain(self.work)
    }
}
