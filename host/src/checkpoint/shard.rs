//! A safetensors file on its way to disk: its header first, then the tensors' bytes as they come, hashed as they go.

use super::writer::cannot_write;
use super::{FileEntry, TensorEntry, hexadecimal};
use crate::failure::{Failure, Result};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

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

/// A tensor of a file whose bytes are still to come.
#[derive(Clone, Debug)]
pub struct Coming {
    pub name: String,
    pub shape: Vec<usize>,
    pub dtype: Dtype,
}

/// A safetensors file that takes the bytes of its tensors one after the other.
#[derive(Debug)]
pub struct ShardStream {
    path: PathBuf,
    file: File,
    hash: Option<Sha256>,
    bytes: u64,
    /// Bytes still to come.
    left: u64,
}

impl ShardStream {
    /// Begins the file with its header. `tensors` are in the order in which their bytes will come; wider elements must come
    /// first, so that every tensor begins at a multiple of its element's size. `hashed`: [`ShardStream::finish`] gives the
    /// checksum.
    pub fn begin(
        path: PathBuf,
        tensors: &[Coming],
        metadata: Option<HashMap<String, String>>,
        hashed: bool,
    ) -> Result<ShardStream> {
        let invalid =
            |error: &dyn std::fmt::Display| Failure::data(format!("cannot write {}: {error}", path.display()));
        let mut end = 0;
        let infos = tensors.iter().map(|tensor| {
            let begin = end;
            end += tensor.shape.iter().product::<usize>() * tensor.dtype.bitsize() / 8;
            let info = TensorInfo { dtype: tensor.dtype, shape: tensor.shape.clone(), data_offsets: (begin, end) };
            (tensor.name.clone(), info)
        });
        let metadata = Metadata::new(metadata, infos.collect()).map_err(|error| invalid(&error))?;
        let mut header = serde_json::to_vec(&metadata).map_err(|error| invalid(&error))?;
        header.resize(header.len().next_multiple_of(size_of::<u64>()), b' ');
        let length = (header.len() as u64).to_le_bytes();
        let file = File::create(&path).map_err(|error| cannot_write(&path, &error))?;
        let hash = hashed.then(Sha256::new);
        let mut stream = ShardStream { path, file, hash, bytes: 0, left: (8 + header.len() + end) as u64 };
        stream.write(&length)?;
        stream.write(&header)?;
        Ok(stream)
    }

    /// Takes the next bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        for piece in bytes.chunks(PIECE) {
            if let Some(hash) = &mut self.hash {
                hash.update(piece);
            }
            self.file.write_all(piece).map_err(|error| cannot_write(&self.path, &error))?;
        }
        self.bytes += bytes.len() as u64;
        self.left = self.left.checked_sub(bytes.len() as u64).ok_or_else(|| self.miscounted())?;
        Ok(())
    }

    fn miscounted(&self) -> Failure {
        Failure::data(format!("cannot write {}: it got other bytes than its header says", self.path.display()))
    }

    /// Waits until the file is on disk.
    pub fn finish(self) -> Result<FileEntry> {
        if self.left != 0 {
            return Err(self.miscounted());
        }
        self.file.sync_all().map_err(|error| cannot_write(&self.path, &error))?;
        let sha256 = self.hash.map(|hash| hexadecimal(&hash.finalize())).unwrap_or_default();
        Ok(FileEntry { bytes: self.bytes, sha256 })
    }
}

/// Writes the shard `folder/file` and waits until it is on disk. Entries come in the order of `parts`.
pub(super) fn write(folder: &Path, file: &str, parts: &[Part<'_>]) -> Result<(FileEntry, Vec<TensorEntry>)> {
    let mut order: Vec<&Part<'_>> = parts.iter().collect();
    order.sort_by_key(|part| std::cmp::Reverse(part.dtype));
    let coming = |part: &&Part<'_>| Coming { name: part.name.into(), shape: part.shape.to_vec(), dtype: part.dtype };
    let coming: Vec<Coming> = order.iter().map(coming).collect();
    let mut stream = ShardStream::begin(folder.join(file), &coming, None, true)?;
    order.iter().try_for_each(|part| stream.write(part.bytes))?;
    let tensors = parts.iter().map(|part| TensorEntry {
        name: part.name.into(),
        shape: part.shape.to_vec(),
        dtype: part.dtype.to_string(),
        file: file.into(),
    });
    Ok((stream.finish()?, tensors.collect()))
}
