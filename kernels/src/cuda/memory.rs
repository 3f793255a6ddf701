//! Device memory: allocations that live as long as anything points into them, and windows on them.

use super::error::{Error, Result};
use cudarc::driver::{CudaContext, CudaStream, result};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

/// Four-byte element types that live on the device.
pub trait Word: Copy + Default + Send + Sync + 'static {}
impl Word for f32 {}
impl Word for i32 {}

/// Bytes of every element.
pub(super) const BYTES: usize = 4;

/// One allocation; freed when the last buffer, span or graph lets go of it.
pub(super) struct Allocation {
    ptr: u64,
    bytes: usize,
    stream: Arc<CudaStream>,
}

impl Allocation {
    /// Zeroed memory.
    pub fn new(stream: &Arc<CudaStream>, bytes: usize) -> Result<Arc<Self>> {
        let context = stream.context();
        context.bind_to_thread()?;
        // Never empty, so that every allocation has an address of its own.
        let bytes = bytes.max(BYTES);
        // SAFETY: the context is current; the memory is freed once, when the allocation is dropped.
        let ptr = unsafe { result::malloc_sync(bytes) }.map_err(|e| {
            let (free, total) = context.mem_get_info().unwrap_or_default();
            Error::from(e).at(format!("allocating {bytes} bytes on the GPU ({free} of {total} free)"))
        })?;
        let allocation = Arc::new(Allocation { ptr, bytes, stream: stream.clone() });
        // SAFETY: the whole of a live allocation.
        unsafe { result::memset_d8_async(ptr, 0, bytes, stream.cu_stream()) }?;
        Ok(allocation)
    }

    pub fn ptr(&self) -> u64 {
        self.ptr
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn context(&self) -> &Arc<CudaContext> {
        self.stream.context()
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // Launches may still be under way. Errors are kept by the context: nothing can be returned from here.
        let context = self.context();
        context.record_err(context.bind_to_thread());
        context.record_err(self.stream.synchronize());
        // SAFETY: allocated by `new`, freed once, and no launch of the stream is under way.
        context.record_err(unsafe { result::free_sync(self.ptr) });
    }
}

/// A typed array on the device. Clones share the memory.
#[derive(Clone)]
pub struct Buffer<T> {
    memory: Arc<Allocation>,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Word> Buffer<T> {
    pub(super) fn new(stream: &Arc<CudaStream>, len: usize) -> Result<Self> {
        Ok(Buffer { memory: Allocation::new(stream, len * BYTES)?, len, element: PhantomData })
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A window on elements `range`.
    pub fn span(&self, range: Range<usize>) -> Result<Span> {
        self.check(&range)?;
        Ok(Span { ptr: self.memory.ptr + (range.start * BYTES) as u64, len: range.len(), memory: self.memory.clone() })
    }

    /// Copies `values` to elements `at ..`; waits until that is done.
    pub fn write(&self, at: usize, values: &[T]) -> Result<()> {
        self.check(&(at..at + values.len()))?;
        self.memory.context().bind_to_thread()?;
        let stream = &self.memory.stream;
        // SAFETY: the range lies inside the allocation, and `values` lives until the stream has been waited for.
        unsafe { result::memcpy_htod_async(self.memory.ptr + (at * BYTES) as u64, values, stream.cu_stream()) }?;
        Ok(stream.synchronize()?)
    }

    /// Elements `range` after everything launched before.
    pub fn read(&self, range: Range<usize>) -> Result<Vec<T>> {
        self.check(&range)?;
        let mut values = vec![T::default(); range.len()];
        self.memory.context().bind_to_thread()?;
        let (ptr, stream) = (self.memory.ptr + (range.start * BYTES) as u64, &self.memory.stream);
        // SAFETY: the range lies inside the allocation, and `values` lives until the stream has been waited for.
        unsafe { result::memcpy_dtoh_async(&mut values, ptr, stream.cu_stream()) }?;
        stream.synchronize()?;
        Ok(values)
    }

    /// Sets every byte to 0xff, which is NaN in f32: a result that is not written shows.
    pub fn poison(&self) -> Result<()> {
        self.memory.context().bind_to_thread()?;
        // SAFETY: the whole of a live allocation.
        Ok(unsafe {
            result::memset_d8_async(self.memory.ptr, 0xff, self.memory.bytes, self.memory.stream.cu_stream())
        }?)
    }

    fn check(&self, range: &Range<usize>) -> Result<()> {
        if range.start <= range.end && range.end <= self.len {
            return Ok(());
        }
        Err(Error::new(format!("elements {range:?} of a device buffer of {} elements", self.len)))
    }
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({:#x}, {} elements)", self.memory.ptr, self.len)
    }
}

/// A window on device memory, which it keeps alive.
#[derive(Clone)]
pub struct Span {
    pub(super) ptr: u64,
    pub(super) len: usize,
    pub(super) memory: Arc<Allocation>,
}

impl Span {
    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Span({:#x}, {} elements)", self.ptr, self.len)
    }
}
