//! A shard on its way to disk: a safetensors file streamed from the tensors' own bytes, hashed as it goes.

use super::writer::cannot_write;
use super::{FileEntry, TensorEntry, hexadecimal};
use crate::failure::{Failure, Result};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Write;
use std::path::Path;

/// Bytes hashed and written at once: small enough to be in the cache for the second of the two.
const PIECE: usize = 1 << 20;

/// A tensor that goes into a shard.
#[derive(Clone, Debug)]
pub(super) struct Part<'a> {
    pub name: &'a str,
    pub shape: &'a [usize],
    pub dtype: Dtype,
    /// Little-endian elements, row-major.
    pub bytes: &'a [u8],
}

/// Writes the shard `folder/file` and waits until it is on disk. Entries come in the order of `parts`.
pub(super) fn write(folder: &Path, file: &str, parts: &[Part<'_>]) -> Result<(FileEntry, Vec<TensorEntry>)> {
    let path = folder.join(file);
    let invalid = |error: &dyn std::fmt::Display| Failure::data(format!("cannot write {}: {error}", path.display()));
    // Wider elements first: every tensor begins at a multiple of its element's size.
    let mut order: Vec<&Part<'_>> = parts.iter().collect();
    order.sort_by_key(|part| std::cmp::Reverse(part.dtype));
    let mut end = 0;
    let infos = order.iter().map(|part| {
        let begin = end;
        end += part.bytes.len();
        let info = TensorInfo { dtype: part.dtype, shape: part.shape.to_vec(), data_offsets: (begin, end) };
        (part.name.to_string(), info)
    });
    let metadata = Metadata::new(None, infos.collect()).map_err(|error| invalid(&error))?;
    let mut header = serde_json::to_vec(&metadata).map_err(|error| invalid(&error))?;
    header.resize(header.len().next_multiple_of(size_of::<u64>()), b' ');
    let length = (header.len() as u64).to_le_bytes();
    let mut hash = Sha256::new();
    let mut bytes = 0u64;
    let mut write = || -> std::io::Result<()> {
        let mut to = File::create(&path)?;
        let pieces = [&length[..], &header].into_iter().chain(order.iter().flat_map(|part| part.bytes.chunks(PIECE)));
        for piece in pieces {
            hash.update(piece);
            to.write_all(piece)?;
            bytes += piece.len() as u64;
        }
        to.sync_all()
    };
    write().map_err(|error| cannot_write(&path, &error))?;
    let entry = FileEntry { bytes, sha256: hexadecimal(&hash.finalize()) };
    let tensors = parts.iter().map(|part| TensorEntry {
        name: part.name.into(),
        shape: part.shape.to_vec(),
        dtype: part.dtype.to_string(),
        file: file.into(),
    });
    Ok((entry, tensors.collect()))
}
