//! The safe face of the boundary: what a provider author writes against.
//!
//! Life cycle of a provider: the host reads the hello of the library, calls `describe`, creates one instance per rank
//! from the recipe's config, asks it for its [`plan`](Provider::plan) (anywhere, no device), has it
//! [`build`](Provider::build) one [`Module`] per pipeline stage chunk, and calls [`Module::forward`] once per new
//! signature of shapes and axis states. `forward` records; the host executes.

mod error;
mod tensor;
mod traits;

pub use error::{Error, ErrorKind, Result};
pub use tensor::{DType, DimDesc, SegmentDesc, TensorDesc, TensorRef};
pub use traits::{Elastifier, Hooks, HostCalls, LogLevel, Module, OpCall, Outputs, Provider, RegionEntry};
