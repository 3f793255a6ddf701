//! Checkpoints: complete or absent, in logical order, independent of any rank layout.
//!
//! A checkpoint is a folder `step-00000100` with safetensors shards and `index.json` (step, consumed samples, every
//! tensor's name, shape, type and shard, every shard's size and SHA-256, plugins, extra state as JSON). `store.rs` is
//! the `checkpoints` folder of a run: clean-up of torn saves, `latest`, `best`, what is kept. `staging.rs` holds a copy of
//! a step's state, which `saver.rs` writes while the training goes on. `writer.rs` (with `shard.rs`) writes beside and
//! renames when all is on disk; `reader.rs` checks everything before it gives out a tensor, each of them once.
//!
//! Tensors are plain owned values in the order of the model's declaration, never the order some rank stores them in.
//! Names: a parameter's own name; `optimizer.exp_avg.NAME` and `optimizer.exp_avg_sq.NAME` for its optimizer state; a
//! buffer's own name. May depend on `failure` only.

mod index;
mod map;
mod reader;
mod saver;
mod shard;
mod staging;
mod store;
mod tensor;
mod writer;

pub use index::{FileEntry, Index, PluginEntry, TensorEntry, digest};
pub use reader::{CheckpointReader, read_index};
pub use saver::Saver;
pub use shard::{Coming, ShardStream};
pub use staging::{ElementType, Parts, Staging};
pub use store::{CHECKPOINTS, Keep, Store, locate};
pub use tensor::{LogicalTensor, TensorData};
pub use writer::{CheckpointWriter, Meta};
pub(crate) use writer::{cannot_write, sync_folder, write_synced};

/// Lower-case hexadecimal digits of `bytes`.
pub fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;
