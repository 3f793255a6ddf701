//! From a kernel value to its launcher, and what launchers share: checked operands, grids, arguments.

use super::device::Device;
use super::error::{Error, Result};
use super::memory::Span;
use super::{activation, elementwise, gemm, rms_norm};
use crate::blocks::Blocks;
use crate::cpu;
use crate::kernel::Kernel;
use cudarc::driver::{DeviceRepr, LaunchConfig, PushKernelArg};

/// The operands of one launch on the device, in the order of [`crate::kernel::Args`].
#[derive(Clone, Copy, Default)]
pub struct Operands<'a> {
    pub ins: &'a [Span],
    pub outs: &'a [Span],
    pub ints: &'a [Span],
    pub int_outs: &'a [Span],
    /// Scratch of [`Kernel::workspace`] elements.
    pub work: Option<&'a Span>,
}

/// One line per kernel type that runs on the GPU.
macro_rules! launchers {
    ($($ty:path => $launch:path;)*) => {
        /// Whether the kernel has a CUDA launcher.
        pub fn supports(kernel: &dyn Kernel) -> bool {
            $(kernel.as_any().is::<$ty>())||*
        }

        pub(super) fn launch(device: &Device, kernel: &dyn Kernel, operands: &Operands<'_>) -> Result<()> {
            let cx = Launch { device, operands };
            $(if let Some(kernel) = kernel.as_any().downcast_ref::<$ty>() {
                return $launch(kernel, &cx);
            })*
            Err(Error::new("has no CUDA kernel yet"))
        }
    };
}

launchers! {
    cpu::activation::Activation => activation::forward;
    cpu::activation::ActivationBackward => activation::backward;
    cpu::elementwise::Binary => elementwise::binary;
    cpu::elementwise::Fill => elementwise::fill;
    cpu::elementwise::Scale => elementwise::scale;
    cpu::gemm::Gemm => gemm::gemm;
    cpu::gemm::LinearBackwardInput => gemm::linear_backward_input;
    cpu::gemm::LinearBackwardWeight => gemm::linear_backward_weight;
    cpu::gemm::LinearForward => gemm::linear_forward;
    cpu::rms_norm::RmsNorm => rms_norm::forward;
    cpu::rms_norm::RmsNormBackward => rms_norm::backward;
}

/// A launch in the making.
pub(super) struct Launch<'a> {
    pub device: &'a Device,
    operands: &'a Operands<'a>,
}

/// A matrix operand: where it is and how far its rows lie apart.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub ptr: u64,
    pub ld: usize,
}

/// An argument of a CUDA kernel: `idx`, `float`, pointer or `Blocks` there.
#[derive(Clone, Copy)]
pub(super) enum Arg<'a> {
    Int(i64),
    Real(f32),
    Ptr(u64),
    Blocks(&'a DeviceBlocks),
}

impl From<usize> for Arg<'_> {
    fn from(x: usize) -> Self {
        Arg::Int(x as i64)
    }
}
impl From<bool> for Arg<'_> {
    fn from(x: bool) -> Self {
        Arg::Int(i64::from(x))
    }
}
impl From<f64> for Arg<'_> {
    fn from(x: f64) -> Self {
        Arg::Real(x as f32)
    }
}
impl From<u64> for Arg<'_> {
    fn from(ptr: u64) -> Self {
        Arg::Ptr(ptr)
    }
}
/// No pointer: null.
impl From<Option<u64>> for Arg<'_> {
    fn from(ptr: Option<u64>) -> Self {
        Arg::Ptr(ptr.unwrap_or(0))
    }
}
impl<'a> From<&'a DeviceBlocks> for Arg<'a> {
    fn from(blocks: &'a DeviceBlocks) -> Self {
        Arg::Blocks(blocks)
    }
}

/// Arguments in order.
macro_rules! args {
    ($($arg:expr),* $(,)?) => { &[$($crate::cuda::launch::Arg::from($arg)),*] };
}
pub(super) use args;

/// As `MAX_BLOCKS` in `common.cuh`.
const MAX_BLOCKS: usize = 16;

/// [`Blocks`] by value, laid out as in `common.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct DeviceBlocks {
    n: i64,
    start: [i64; MAX_BLOCKS],
    at: [i64; MAX_BLOCKS],
    len: [i64; MAX_BLOCKS],
}

// SAFETY: plain integers in C layout, the same struct on the device.
unsafe impl DeviceRepr for DeviceBlocks {}

impl DeviceBlocks {
    pub fn new(blocks: &Blocks) -> Result<Self> {
        if blocks.0.len() > MAX_BLOCKS {
            let n = blocks.0.len();
            return Err(Error::new(format!("uses {n} blocks of a parameter; the CUDA kernels take {MAX_BLOCKS}")));
        }
        let mut out = DeviceBlocks {
            n: blocks.0.len() as i64,
            start: [0; MAX_BLOCKS],
            at: [0; MAX_BLOCKS],
            len: [0; MAX_BLOCKS],
        };
        for (i, (start, at, len)) in blocks.iter().enumerate() {
            (out.start[i], out.at[i], out.len[i]) = (start as i64, at as i64, len as i64);
        }
        Ok(out)
    }
}

impl Launch<'_> {
    /// Address of input `i`, which must have `len` elements.
    pub fn input(&self, i: usize, len: usize) -> Result<u64> {
        inside("input", i, self.operands.ins.get(i), len)
    }

    pub fn output(&self, i: usize, len: usize) -> Result<u64> {
        inside("output", i, self.operands.outs.get(i), len)
    }

    /// Input `i` as rows `ld` apart.
    pub fn input_rows(&self, i: usize, rows: usize, cols: usize, ld: usize) -> Result<Matrix> {
        Ok(Matrix { ptr: self.input(i, extent(rows, cols, ld)?)?, ld })
    }

    pub fn output_rows(&self, i: usize, rows: usize, cols: usize, ld: usize) -> Result<Matrix> {
        Ok(Matrix { ptr: self.output(i, extent(rows, cols, ld)?)?, ld })
    }

    /// Address of the scratch, which must have `len` elements.
    pub fn work(&self, len: usize) -> Result<u64> {
        inside("scratch", 0, self.operands.work, len)
    }

    /// Launches the compiled kernel `name`. Nothing is launched on an empty grid.
    pub fn run(&self, name: &str, grid: (usize, usize), block: (u32, u32), args: &[Arg<'_>]) -> Result<()> {
        if grid.0 == 0 || grid.1 == 0 {
            return Ok(());
        }
        let function = self.device.function(name)?;
        let mut builder = self.device.stream().launch_builder(function);
        for arg in args {
            match arg {
                Arg::Int(x) => builder.arg(x),
                Arg::Real(x) => builder.arg(x),
                Arg::Ptr(x) => builder.arg(x),
                Arg::Blocks(x) => builder.arg(*x),
            };
        }
        let dim = |n: usize, most: u32| u32::try_from(n).unwrap_or(u32::MAX).min(most);
        let config = LaunchConfig {
            grid_dim: (dim(grid.0, 0x7fff_ffff), dim(grid.1, 0xffff), 1),
            block_dim: (block.0, block.1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: the launchers of this module give each kernel the arguments it declares in order (64-bit integers,
        // floats, addresses, Blocks), with addresses whose extent was checked against live spans; spans outlive the
        // launch because freeing waits for the stream, and a captured graph keeps them.
        unsafe { builder.launch(config) }.map_err(|e| Error::from(e).at(name))?;
        Ok(())
    }
}

fn inside(what: &str, i: usize, span: Option<&Span>, len: usize) -> Result<u64> {
    match span {
        Some(span) if len <= span.len => Ok(span.ptr),
        Some(span) => Err(Error::new(format!("{what} {i} has {} elements, {len} are needed", span.len))),
        None => Err(Error::new(format!("{what} {i} is missing"))),
    }
}

/// Elements from the first to the last of `rows` rows `ld` apart.
pub(super) fn extent(rows: usize, cols: usize, ld: usize) -> Result<usize> {
    if rows == 0 || cols == 0 {
        return Ok(0);
    }
    if ld < cols && rows > 1 {
        return Err(Error::new(format!("rows of {cols} elements overlap: they lie {ld} apart")));
    }
    Ok((rows - 1) * ld + cols)
}

/// Whether every operand can be read four elements at a time.
pub(super) fn fours(cols: usize, operands: &[Matrix]) -> bool {
    cols.is_multiple_of(4) && operands.iter().all(|m| m.ptr.is_multiple_of(16) && m.ld.is_multiple_of(4))
}

/// Whether blocks of a stored parameter at `ptr` can be read four elements at a time.
pub(super) fn fours_in_blocks(blocks: &Blocks, ptr: u64) -> bool {
    ptr.is_multiple_of(16) && blocks.iter().all(|(start, at, len)| [start, at, len].iter().all(|x| x.is_multiple_of(4)))
}

/// Threads of a block that takes a whole row of `cols` elements, `vec` at a time.
pub(super) fn row_threads(cols: usize, vec: usize) -> u32 {
    (cols.div_ceil(vec).div_ceil(4).next_multiple_of(32)).clamp(64, 1024) as u32
}
