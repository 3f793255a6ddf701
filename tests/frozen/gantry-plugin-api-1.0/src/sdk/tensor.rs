//! Handles to values of a recording. A provider sees logical shapes; buffers stay with the host.

use abi_stable::StableAbi;
use serde::{Deserialize, Serialize};

/// A copyable handle, checked by generation: using one after its recording ended is an error, not undefined behaviour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, StableAbi)]
#[repr(C)]
pub struct TensorRef {
    pub id: u32,
    /// Number of the recording the handle belongs to, unique over all ranks of a process.
    pub generation: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DType {
    /// The floating-point type of the run.
    Real,
    I32,
}

/// Answer to a query about a handle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorDesc {
    pub dtype: DType,
    pub dims: Vec<DimDesc>,
    /// The value is a sum over tensor-parallel ranks that has not been taken yet.
    pub partial: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DimDesc {
    pub name: String,
    /// Logical, active size.
    pub size: usize,
    /// Size on this rank.
    pub local_size: usize,
    pub segments: Vec<SegmentDesc>,
}

/// Part of a dimension: `units` units of an axis (or plain positions), each `unit` wide.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SegmentDesc {
    pub name: String,
    pub axis: Option<String>,
    pub units: usize,
    pub unit: usize,
}
