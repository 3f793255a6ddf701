//! Data: from text files to batches of tokens.
//!
//! `files.rs` finds the files, `corpus.rs` holds documents as one row of tokens, `order.rs` shuffles samples by a
//! keyed permutation, `loader.rs` cuts batches. A batch is a pure function of (recipe, files, global sample index):
//! no state, so any rank layout and a resumed run see the same numbers. May depend on `recipe` and `failure`; knows no
//! model and no rank.

mod corpus;
mod files;
mod loader;
mod order;

pub use corpus::{Corpus, END_OF_DOCUMENT, Summary};
pub use loader::{Batch, Loader, Position};
pub use order::Permutation;
