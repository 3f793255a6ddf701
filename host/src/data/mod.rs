//! Data: from text files to batches of tokens.
//!
//! `files.rs` finds the files (`tracked.rs` those that git tracks), `synthetic.rs` makes documents up, `split.rs` parts
//! documents into those trained on and those held out, `corpus.rs` holds documents as one row of tokens. For training,
//! `order.rs` shuffles samples by a keyed permutation and `loader.rs` cuts batches, made ahead by `prefetch.rs`;
//! `valid.rs` cuts held-out documents in order, and `ngram.rs` is a baseline for the loss on them. A batch is a pure
//! function of (recipe, files, global sample index): no state, so any rank layout and a resumed run see the same
//! numbers. `megatron/` reads and writes Megatron-LM's token files and knows its order of samples. May depend on
//! `recipe` and `failure`; knows no model and no rank.

mod corpus;
mod files;
mod loader;
pub mod megatron;
pub mod ngram;
mod order;
mod prefetch;
mod split;
mod synthetic;
pub mod tokenizer;
mod tracked;
mod valid;

pub use corpus::{Corpus, END_OF_DOCUMENT, Summary};
pub use loader::{Batch, Loader, Position};
pub use order::Permutation;
pub use prefetch::Prefetch;
pub use split::Split;
pub use tokenizer::Tokenizer;
pub use valid::Valid;
