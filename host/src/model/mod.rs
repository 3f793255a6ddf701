//! A model as the host holds it: parameters with their structure, storage order and shards.
//!
//! Depends on plans (`plugin-api`) and dimensions (`program::dims`); knows no operators and no optimizer.

pub mod entries;
pub mod layout;
pub mod params;
pub mod submodel;

pub use params::{BufferEntry, ParamEntry, ParamTable};
