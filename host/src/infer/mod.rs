//! Text from a model: next-token logits in, text out.
//!
//! `sampling.rs` chooses a token from logits, `text.rs` turns the byte tokenizer's tokens into whole characters,
//! `generate.rs` is the loop between them. Knows logits and tokens; no recipe, rank, file or program.

mod generate;
mod sampling;
mod text;

pub use generate::{Ended, Generated, Model, Request, generate};
pub use sampling::Sampling;
