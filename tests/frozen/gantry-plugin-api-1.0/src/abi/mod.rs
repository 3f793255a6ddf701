//! The boundary itself: everything `repr(C)`, everything `unsafe`.
//!
//! - [`layout`]: the macro that declares a struct of the boundary and feeds it into the layout hash.
//! - [`types`]: what is passed by value: handles, calls, errors.
//! - [`tables`]: the two tables of functions, one per side, as prefix types that may grow at their end.
//! - [`hello`]: the plain symbol a host reads before it trusts a library with anything.
//! - [`guard`]: panics stop here, on either side, and become errors.
//! - [`host`]: the host's half: the object a provider calls into, valid only during a call.
//! - [`custom`]: operators that a plugin brings, from the host's slices to its own and back.
//! - [`plugin`]: the provider's half, instantiated by `export_plugin!`.
//! - [`load`] (feature `host`): opens a library, reads its hello, decides, loads.
//!
//! Invariants: nothing here names an operator or a model; no `abi_stable` type appears outside this folder except in
//! derives; no function of either table unwinds; a provider never holds a reference into the host.

#![allow(unsafe_code)]

pub mod custom;
pub mod guard;
pub mod hello;
pub mod host;
pub mod layout;
#[cfg(feature = "host")]
pub mod load;
pub mod plugin;
pub mod tables;
#[cfg(feature = "host")]
mod torn;
pub mod types;

/// For the expansion of `export_plugin!` only.
#[doc(hidden)]
pub mod __private {
    pub use abi_stable::library::{CheckTypeLayout, LibHeader};
}
