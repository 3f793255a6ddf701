//! The safe face of the boundary: what a provider author writes against.
//!
//! Life cycle of a provider: the host reads the hello of the library, calls `describe`, creates one instance per rank
//! from the recipe's config ([`Configure`]), asks it for its [`plan`](Provider::plan) (anywhere, no device), has it
//! [`build`](Provider::build) one [`Module`] per pipeline stage chunk, and calls [`Module::forward`] once per new
//! signature of shapes and axis states. `forward` records; the host executes.

mod check;
pub mod configure;
pub mod custom;
pub mod cx;
mod declare;
mod error;
pub mod hugging_face;
pub mod operators;
pub mod services;
mod tensor;
mod traits;

pub use check::{check_choice, check_settings, check_values};
pub use configure::Configure;
pub use custom::{CustomOp, Number};
pub use cx::{BufferId, Cx, Operand, ParamId, Tensor};
pub use error::{Error, ErrorKind, Result};
pub use hugging_face::{FolderConfig, FolderWriter, HuggingFace};
pub use operators::{Permuted, Routing};
pub use services::{log, par_for};
pub use tensor::{DType, DimDesc, SegmentDesc, TensorDesc, TensorRef};
pub use traits::{Elastifier, HookEvent, Hooks, HostCalls, LogLevel, Module, OpCall, Outputs, Provider, RegionEntry};
