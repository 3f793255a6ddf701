//! Data: from text files to batches of tokens.
//!
//! `files.rs` finds the files (`tracked.rs` those that git tracks), `read.rs` makes documents of them by `tokenizer/` and
//! `chat/`, `synthetic.rs` makes documents up, `split.rs` parts documents into those trained on and those held out,
//! `corpus.rs` holds documents as one row of tokens. Samples (`samples.rs`) are cut from it end to end (`stream.rs`, in an
//! order that `order.rs` shuffles by a keyed permutation) or packed (`packed.rs`); `loader.rs` makes batches of them,
//! `prefetch.rs` ahead of need; `valid.rs` cuts held-out documents in order, and `ngram.rs` is a baseline for the loss on
//! them. A batch is a pure function of (recipe, files, global sample index): no state, so any rank layout and a resumed
//! run see the same numbers. `megatron/` reads and writes Megatron-LM's token files and knows its order of samples. May
//! depend on `recipe` and `failure`; knows no model and no rank.

mod blends;
pub mod build;
pub mod chat;
mod corpus;
mod files;
mod held;
mod loader;
pub mod megatron;
pub mod ngram;
mod open;
mod order;
mod packed;
mod prefetch;
mod read;
mod samples;
mod split;
mod stream;
mod synthetic;
pub mod tokenizer;
mod tracked;
mod valid;

pub use blends::Looks;
pub use corpus::{Corpus, END_OF_DOCUMENT, Summary};
pub use held::{Held, Pick};
pub use loader::{Batch, Identity, Loader, Position};
pub use open::RunData;
pub use order::Permutation;
pub use packed::{Packed, PackingSummary};
pub use prefetch::Prefetch;
pub use samples::{Row, Samples};
pub use split::{Split, tokenizer, vocab};
pub use tokenizer::Tokenizer;
pub use valid::Valid;
