//! What a raw operator is: a plain value that names its sizes and runs on slices.
//!
//! A kernel never allocates tensors, never knows who calls it, and states its cost. The same value is
//! launched on CPU (here) and on CUDA (`cuda/`), so a recorded list of kernels is device-neutral.

use crate::real::Real;
use std::any::Any;
use std::fmt::Debug;

/// Work a kernel does, by count: for profiles and benchmarks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Floating-point operations (a multiply-add counts two).
    pub flops: f64,
    /// Elements of real type read and written once each; times the element size gives bytes.
    pub elements: f64,
}

impl Cost {
    pub fn new(flops: f64, elements: f64) -> Self {
        Cost { flops, elements }
    }
}

/// The operands of one launch, in the order the kernel's documentation lists them.
///
/// Each slice begins at the operand's first element; rows lie `ld` elements apart where the kernel has a
/// row stride. Two `outs` never share storage; an `in` never overlaps an `out`.
pub struct Args<'a, T> {
    pub ins: &'a [&'a [T]],
    pub outs: &'a mut [&'a mut [T]],
    pub ints: &'a [&'a [i32]],
    pub int_outs: &'a mut [&'a mut [i32]],
    /// Scratch of [`Kernel::workspace`] elements with unspecified contents.
    pub work: &'a mut [T],
}

/// A raw operator with its sizes bound.
///
/// Gradient convention: outputs overwrite, unless a field named `acc*` says that they add to what is
/// there; gradients of parameters always add (they are main gradients).
pub trait Kernel: Debug + Send + Sync + 'static {
    /// Name of the kernel's class, as profiles print it, e.g. `gemm`.
    fn name(&self) -> &'static str;
    fn cost(&self) -> Cost;
    /// Elements of scratch needed by [`Args::work`].
    fn workspace(&self) -> usize {
        0
    }
    fn run_f32(&self, args: Args<'_, f32>);
    fn run_f64(&self, args: Args<'_, f64>);
    fn as_any(&self) -> &dyn Any;
}

/// Dispatch from a buffer's element type to the matching entry of a kernel.
pub trait Element: Real {
    fn launch(kernel: &dyn Kernel, args: Args<'_, Self>);
}

impl Element for f32 {
    fn launch(kernel: &dyn Kernel, args: Args<'_, f32>) {
        kernel.run_f32(args)
    }
}

impl Element for f64 {
    fn launch(kernel: &dyn Kernel, args: Args<'_, f64>) {
        kernel.run_f64(args)
    }
}

/// Implements [`Kernel`] for types with `fn run<T: Real>(&self, args: Args<'_, T>)`, `fn cost(&self) -> Cost` and
/// optionally (second form) `fn workspace(&self) -> usize`.
#[macro_export]
macro_rules! kernels {
    ($($ty:ty => $name:literal $(, $work:ident)?;)*) => {$(
        impl $crate::kernel::Kernel for $ty {
            fn name(&self) -> &'static str {
                $name
            }
            fn cost(&self) -> $crate::kernel::Cost {
                <$ty>::cost(self)
            }
            $(fn workspace(&self) -> usize {
                <$ty>::$work(self)
            })?
            fn run_f32(&self, args: $crate::kernel::Args<'_, f32>) {
                self.run(args)
            }
            fn run_f64(&self, args: $crate::kernel::Args<'_, f64>) {
                self.run(args)
            }
            fn as_any(&self) -> &dyn ::std::any::Any {
                self
            }
        }
    )*};
}
