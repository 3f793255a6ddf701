//! Writing a checkpoint: shards and index into a folder beside, everything on disk before the rename.

use super::index::{FORMAT, INDEX_FILE, VERSION, digest};
use super::shard::{self, Coming, Part, ShardStream};
use super::{FileEntry, Index, LogicalTensor, PluginEntry, TensorEntry, hexadecimal};
use crate::failure::{Failure, Result};
use safetensors::Dtype;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// A shard is written when it holds this much.
pub(super) const SHARD_BYTES: usize = 256 << 20;

/// What a checkpoint says besides its tensors.
#[derive(Clone, Debug, Default)]
pub struct Meta {
    pub step: u64,
    pub consumed_samples: u64,
    pub plugins: Vec<PluginEntry>,
    /// Held-out loss of the step, if it was taken; nats per token.
    pub valid_loss: Option<f64>,
    /// Files to lie beside the shards: (name, contents).
    pub notes: Vec<(String, String)>,
    pub extra: serde_json::Value,
}

/// Takes tensors one after the other. Holds one shard in memory. Dropped before [`super::Store::commit`], it removes
/// what it wrote.
#[derive(Debug)]
pub struct CheckpointWriter {
    folder: PathBuf,
    shard_bytes: usize,
    pending: Vec<Pending>,
    pending_bytes: usize,
    names: HashSet<String>,
    tensors: Vec<TensorEntry>,
    files: BTreeMap<String, FileEntry>,
    kept: bool,
}

#[derive(Debug)]
struct Pending {
    name: String,
    shape: Vec<usize>,
    dtype: Dtype,
    bytes: Vec<u8>,
}

impl Pending {
    fn part(&self) -> Part<'_> {
        Part { name: &self.name, shape: &self.shape, dtype: self.dtype, bytes: &self.bytes }
    }
}

impl CheckpointWriter {
    pub(super) fn create(folder: PathBuf) -> Result<CheckpointWriter> {
        fs::create_dir(&folder).map_err(|error| cannot_write(&folder, &error))?;
        Ok(CheckpointWriter {
            folder,
            shard_bytes: SHARD_BYTES,
            pending: Vec::new(),
            pending_bytes: 0,
            names: HashSet::new(),
            tensors: Vec::new(),
            files: BTreeMap::new(),
            kept: false,
        })
    }

    /// Begins a checkpoint at `path`, in no run's folder. It is there once [`CheckpointWriter::complete`] is done.
    pub fn alone(path: &Path) -> Result<CheckpointWriter> {
        let no =
            |why: &str| Failure::data(format!("{} {why}", path.display())).remedy("name a folder that is not there");
        if path.exists() {
            return Err(no("is there already"));
        }
        let Some(name) = path.file_name() else { return Err(no("is no name for a checkpoint")) };
        let parent = path.parent().unwrap_or(Path::new(""));
        fs::create_dir_all(parent).map_err(|error| cannot_write(parent, &error))?;
        let folder = parent.join(format!(".new-{}", name.to_string_lossy()));
        if folder.exists() {
            // Of a program that was killed.
            fs::remove_dir_all(&folder).map_err(|error| cannot_write(&folder, &error))?;
        }
        CheckpointWriter::create(folder)
    }

    /// Completes a checkpoint that was begun with [`CheckpointWriter::alone`].
    pub fn complete(mut self, path: &Path, meta: Meta) -> Result<()> {
        let folder = self.finish(meta)?;
        fs::rename(folder, path).map_err(|error| cannot_write(path, &error))?;
        self.keep();
        match path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            Some(parent) => sync_folder(parent),
            None => sync_folder(Path::new(".")),
        }
    }

    #[cfg(test)]
    pub(super) fn with_shard_bytes(mut self, shard_bytes: usize) -> CheckpointWriter {
        self.shard_bytes = shard_bytes;
        self
    }

    /// Adds a tensor. Names must differ and the shape must hold the elements; a checkpoint never holds a NaN or an infinity,
    /// so that the one before stays the newest.
    pub fn add(&mut self, tensor: LogicalTensor) -> Result<()> {
        let elements: usize = tensor.shape.iter().product();
        if elements != tensor.data.len() {
            return Err(Failure::data(format!(
                "checkpoint tensor {}: shape {:?} holds {elements} elements, {} are given",
                tensor.name,
                tensor.shape,
                tensor.data.len()
            )));
        }
        if !self.names.insert(tensor.name.clone()) {
            return Err(Failure::data(format!("checkpoint tensor {} is given twice", tensor.name)));
        }
        if !tensor.data.is_finite() {
            return Err(Failure::numerical(format!("NaN or infinity in {}; nothing was saved", tensor.name))
                .remedy("go on from the newest checkpoint with a lower optimizer.lr"));
        }
        let bytes = tensor.data.to_bytes();
        if !self.pending.is_empty() && self.pending_bytes + bytes.len() > self.shard_bytes {
            self.write_pending()?;
        }
        let dtype = match tensor.data.dtype() {
            "F64" => Dtype::F64,
            _ => Dtype::F32,
        };
        self.pending_bytes += bytes.len();
        self.pending.push(Pending { name: tensor.name, shape: tensor.shape, dtype, bytes });
        Ok(())
    }

    /// Writes a shard whose tensors come from elsewhere as bytes, little-endian: `fill` is given each one's place in the
    /// list, wider elements first, and where its bytes go. NaN and infinity are for the caller to refuse.
    pub fn stream_shard(
        &mut self,
        tensors: &[Coming],
        mut fill: impl FnMut(usize, &mut ShardStream) -> Result<()>,
    ) -> Result<()> {
        for Coming { name, .. } in tensors {
            if !self.names.insert(name.clone()) {
                return Err(Failure::data(format!("checkpoint tensor {name} is given twice")));
            }
        }
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order.sort_by_key(|&i| std::cmp::Reverse(tensors[i].dtype));
        let coming: Vec<Coming> = order.iter().map(|&i| tensors[i].clone()).collect();
        let file = format!("shard-{:05}.safetensors", self.files.len());
        let mut stream = ShardStream::begin(self.folder.join(&file), &coming, None, true)?;
        order.into_iter().try_for_each(|i| fill(i, &mut stream))?;
        self.files.insert(file.clone(), stream.finish()?);
        self.tensors.extend(tensors.iter().map(|tensor| TensorEntry {
            name: tensor.name.clone(),
            shape: tensor.shape.clone(),
            dtype: tensor.dtype.to_string(),
            file: file.clone(),
        }));
        Ok(())
    }

    /// Adds every tensor of an iterator, which may gather them one at a time.
    pub fn add_all(&mut self, tensors: impl IntoIterator<Item = Result<LogicalTensor>>) -> Result<()> {
        tensors.into_iter().try_for_each(|tensor| self.add(tensor?))
    }

    /// Writes tensors that are at hand, without a copy of them.
    pub(super) fn write_parts<'a>(&mut self, parts: impl Iterator<Item = Part<'a>>) -> Result<()> {
        let (mut shard, mut bytes) = (Vec::new(), 0);
        for part in parts {
            if !shard.is_empty() && bytes + part.bytes.len() > self.shard_bytes {
                self.write_shard(&std::mem::take(&mut shard))?;
                bytes = 0;
            }
            bytes += part.bytes.len();
            shard.push(part);
        }
        if shard.is_empty() { Ok(()) } else { self.write_shard(&shard) }
    }

    fn write_shard(&mut self, parts: &[Part<'_>]) -> Result<()> {
        let file = format!("shard-{:05}.safetensors", self.files.len());
        let (entry, tensors) = shard::write(&self.folder, &file, parts)?;
        self.files.insert(file, entry);
        self.tensors.extend(tensors);
        Ok(())
    }

    fn write_pending(&mut self) -> Result<()> {
        let pending = std::mem::take(&mut self.pending);
        self.pending_bytes = 0;
        self.write_shard(&pending.iter().map(Pending::part).collect::<Vec<_>>())
    }

    /// Writes the rest and the index; afterwards all of the folder is on disk.
    pub(super) fn finish(&mut self, meta: Meta) -> Result<&Path> {
        if !self.pending.is_empty() {
            self.write_pending()?;
        }
        let mut notes = BTreeMap::new();
        for (name, text) in meta.notes {
            write_synced(&self.folder.join(&name), text.as_bytes())?;
            let sha256 = hexadecimal(&Sha256::digest(&text));
            notes.insert(name, FileEntry { bytes: text.len() as u64, sha256 });
        }
        let mut index = Index {
            format: FORMAT.into(),
            version: VERSION,
            step: meta.step,
            consumed_samples: meta.consumed_samples,
            files: std::mem::take(&mut self.files),
            notes,
            tensors: std::mem::take(&mut self.tensors),
            plugins: meta.plugins,
            valid_loss: meta.valid_loss.filter(|loss| loss.is_finite()),
            extra: meta.extra,
            sha256: String::new(),
        };
        let path = self.folder.join(INDEX_FILE);
        let invalid = |error| Failure::data(format!("cannot write {}: {error}", path.display()));
        let text = serde_json::to_vec(&index).map_err(invalid)?;
        index.sha256 = digest(&serde_json::from_slice(&text).map_err(invalid)?);
        let text = serde_json::to_vec_pretty(&index).map_err(invalid)?;
        write_synced(&path, &text)?;
        sync_folder(&self.folder)?;
        Ok(&self.folder)
    }

    /// The folder has been renamed: nothing to remove.
    pub(super) fn keep(&mut self) {
        self.kept = true;
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        if !self.kept {
            // If this fails too, the next start cleans up.
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

pub(crate) fn cannot_write(path: &Path, error: &std::io::Error) -> Failure {
    Failure::data(format!("cannot write {}: {error}", path.display()))
        .remedy("free disk space or choose another run folder with --run-dir")
}

/// Writes a file and waits until it is on disk.
pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|error| cannot_write(path, &error))
}

/// Waits until a folder's entries are on disk.
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|file| file.sync_all()).map_err(|error| cannot_write(folder, &error))
}
