//! Recorded programs: a provider's forward pass as data, with its backward pass and memory plan.
//!
//! A [`recorder::Recorder`] answers a provider's calls, applying each operator's shape, placement and axis-state rule
//! ([`ops`]), and grows a [`graph::Graph`]: values on storages, kernel launches and collectives in order, and a tape.
//! [`backprop`] walks the tape and appends the backward pass; [`memory`] gives every storage its place in one arena;
//! [`replay`] executes the result without the provider, [`diagnose`] looks at every number on the way, `replay_cuda` replays
//! on a GPU. Nothing here knows a model, a recipe
//! or an optimizer.
//!
//! Invariant: recording has no side effect but the graph, so a program can be recorded anywhere and compared as text.

pub mod backprop;
pub mod diagnose;
pub mod dims;
pub mod graph;
pub mod memory;
pub mod ops;
pub mod placement;
pub mod profile;
pub mod recorder;
pub mod replay;
#[cfg(feature = "cuda")]
pub mod replay_cuda;
pub mod states;

#[cfg(test)]
pub(crate) mod testing;
