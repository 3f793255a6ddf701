//! The boundary between the Gantry host and its model providers.
//!
//! [`abi`] holds the `repr(C)` types that cross it and nothing else may; [`sdk`] is the safe face that a provider is
//! written against; [`ops`] names every host operator with its attributes; [`plan`] is what a model declares about
//! itself: axes, blocks, parameters, ports. Depends on no other Gantry crate.

pub mod abi;
pub mod ops;
pub mod plan;
pub mod sdk;

/// For `#[derive(JsonSchema)]` on configs, so that a provider needs no dependency of its own.
pub use schemars;
