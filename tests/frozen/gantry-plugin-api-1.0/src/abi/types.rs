//! Values that cross the boundary.

use crate::sdk::{Error, ErrorKind, TensorRef};
use abi_stable::std_types::{RResult, RSlice, RStr, RString};

/// Most outputs of one operator call.
pub const MAX_OUTPUTS: usize = 16;

crate::abi_struct! {
    /// Names a host object and the visit (one call into the provider) a handle was given out for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Ctx {
        /// A [`HostObject`](super::host::HostObject), opaque to the provider; null outside of any call.
        pub object: *const (),
        pub visit: u64,
    }
}

impl Ctx {
    /// No call is going on.
    pub const NONE: Ctx = Ctx { object: core::ptr::null(), visit: 0 };
}

crate::abi_struct! {
    /// A provider's object, opaque to the host: made by the plugin's table, released by it, called from one thread.
    #[derive(Clone, Copy, Debug)]
    pub struct Object {
        pub ptr: *mut (),
    }
}

crate::abi_struct! {
    /// One call of a host operator.
    #[derive(Clone, Copy)]
    pub struct RawCall<'a> {
        pub op: u32,
        pub version: u32,
        pub path: RStr<'a>,
        pub attrs: RSlice<'a, u8>,
        pub inputs: RSlice<'a, TensorRef>,
    }
}

crate::abi_struct! {
    /// Room for the outputs of a call, on the caller's stack.
    #[derive(Clone, Copy)]
    pub struct RawOutputs {
        pub len: u32,
        pub items: [TensorRef; MAX_OUTPUTS],
    }
}

impl RawOutputs {
    pub const EMPTY: RawOutputs =
        RawOutputs { len: 0, items: [TensorRef { id: u32::MAX, generation: 0 }; MAX_OUTPUTS] };
}

crate::abi_struct! {
    /// An error: the number of an [`ErrorKind`] and one sentence.
    #[derive(Clone, Debug)]
    pub struct AbiError {
        pub kind: u32,
        pub message: RString,
    }
}

crate::abi_struct! {
    /// Rows of f32 or f64 to be read.
    #[derive(Clone, Copy)]
    pub struct RawRows {
        pub ptr: *const (),
        /// Elements from the first of the first row to the last of the last.
        pub len: usize,
        pub rows: usize,
        pub cols: usize,
        /// Elements between the beginnings of two rows.
        pub ld: usize,
    }
}

crate::abi_struct! {
    /// Rows of f32 or f64 to be written.
    #[derive(Clone, Copy)]
    pub struct RawRowsMut {
        pub ptr: *mut (),
        pub len: usize,
        pub rows: usize,
        pub cols: usize,
        pub ld: usize,
    }
}

crate::abi_struct! {
    /// One forward or backward of a custom operator.
    #[derive(Clone, Copy)]
    pub struct CustomRun<'a> {
        pub backward: bool,
        /// Elements are f64.
        pub wide: bool,
        pub inputs: RSlice<'a, RawRows>,
        /// Backward only.
        pub saved: RSlice<'a, RawRows>,
        /// Backward only.
        pub output_grads: RSlice<'a, RawRows>,
        /// Outputs of a forward; gradients of the inputs of a backward.
        pub outputs: RSlice<'a, RawRowsMut>,
        /// Forward only.
        pub saved_out: RSlice<'a, RawRowsMut>,
        /// One row, or none.
        pub work: RawRowsMut,
    }
}

/// What every function that can fail gives back.
pub type Reply<T> = RResult<T, AbiError>;

impl From<Error> for AbiError {
    fn from(e: Error) -> AbiError {
        AbiError { kind: e.kind as u32, message: e.message.into() }
    }
}

impl From<AbiError> for Error {
    fn from(e: AbiError) -> Error {
        Error::new(ErrorKind::from_u32(e.kind), e.message.as_str())
    }
}
