//! Megatron-LM's data: indexed token files and the order in which its GPT data set reads them.
//!
//! `index.rs` and `indexed.rs` read a pair PREFIX.bin / PREFIX.idx through memory maps (`map.rs`), `writer.rs` writes
//! one byte for byte as Megatron-LM does. `gpt.rs` cuts samples from it by three indices (documents, samples, shuffle),
//! whose random numbers are numpy's (`random.rs`); `split.rs` parts the sequences, `sample.rs` makes tokens, labels and
//! masks, `blend.rs` mixes several data sets by weight. Indices are lists (`table.rs`) in memory or in files that
//! `cache.rs` keeps. Everything is a pure function of (files, configuration, sample number). Source of format and order:
//! Megatron-LM, megatron/core/datasets (indexed_dataset.py, gpt_dataset.py, blended_dataset.py,
//! blended_megatron_dataset_builder.py, helpers.cpp). May depend on `failure` alone (and on how hashes are written); knows
//! no recipe, no model and no rank.

mod blend;
mod cache;
mod gpt;
mod index;
mod indexed;
mod map;
mod random;
mod sample;
mod split;
mod table;
mod writer;

pub use blend::{Blend, Order, SURPLUS, Source, normalized, shares};
pub use cache::Cache;
pub use gpt::{GptConfig, GptDataset, Limit};
pub use index::{Dtype, Index};
pub use indexed::IndexedDataset;
pub use random::RandomState;
pub use sample::{Boundaries, Sample};
pub use split::{Part, parts};
pub use writer::{Encoded, Writer};

use crate::failure::{Failure, Result};

/// An empty list with room for `len` entries; an error, not an abort, where memory does not suffice.
fn room<T>(len: u64, what: &str) -> Result<Vec<T>> {
    let mut list = Vec::new();
    match usize::try_from(len).map(|len| list.try_reserve_exact(len)) {
        Ok(Ok(())) => Ok(list),
        _ => Err(Failure::data(format!("no memory for {what} of {len} entries")).remedy("ask for fewer samples")),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::path::{Path, PathBuf};

    /// The stored pairs that Megatron-LM wrote.
    pub fn golden(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens/data_a").join(name)
    }

    /// A pair of one sequence per document, in a folder that goes with the returned guard.
    pub fn written(documents: &[Vec<i64>], dtype: Dtype) -> (tempfile::TempDir, IndexedDataset) {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::create(folder.path().join("set"), dtype).unwrap();
        for document in documents {
            writer.document(&[document]).unwrap();
        }
        writer.finish().unwrap();
        let set = IndexedDataset::open(folder.path().join("set")).unwrap();
        (folder, set)
    }

    #[test]
    fn room_that_no_memory_has_is_an_error() {
        let error = room::<u64>(u64::MAX / 16, "the shuffle index").unwrap_err();
        assert_eq!(error.sentence, format!("no memory for the shuffle index of {} entries", u64::MAX / 16));
    }
}
