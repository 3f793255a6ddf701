//! Text from a model: next-token logits in, text out.
//!
//! `sampling.rs` chooses a token from logits, `text.rs` ends a text before a stop, `generate.rs` is the loop between them.
//! Knows logits, tokens and how a tokenizer decodes them one by one; no recipe, rank, file or program.

mod generate;
mod sampling;
mod text;

pub use generate::{Ended, Generated, Model, Request, generate};
pub use sampling::Sampling;
