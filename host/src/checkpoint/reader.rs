//! Reading a checkpoint: everything is checked first, then tensors are given out by name, each once.

use super::index::{FORMAT, INDEX_FILE, VERSION};
use super::{Index, LogicalTensor, TensorData, TensorEntry, hexadecimal, map};
use crate::failure::{Failure, Result};
use memmap2::Mmap;
use rayon::prelude::*;
use safetensors::SafeTensors;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

/// An open, verified checkpoint.
#[derive(Debug)]
pub struct CheckpointReader {
    folder: PathBuf,
    index: Index,
    maps: BTreeMap<String, Mmap>,
    by_name: HashMap<String, usize>,
    taken: HashSet<String>,
}

impl CheckpointReader {
    /// Opens a checkpoint folder and verifies sizes, checksums and headers of all shards.
    pub fn open(folder: &Path) -> Result<CheckpointReader> {
        let index = read_index(folder)?;
        let maps = index
            .files
            .par_iter()
            .map(|(file, entry)| Ok((file.clone(), open_shard(folder, file, entry.bytes, &entry.sha256)?)))
            .collect::<Result<BTreeMap<_, _>>>()?;
        let reader = CheckpointReader {
            folder: folder.to_path_buf(),
            by_name: index.tensors.iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect(),
            index,
            maps,
            taken: HashSet::new(),
        };
        reader.check_headers()?;
        Ok(reader)
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Name, shape and type of a tensor, if the checkpoint has it.
    pub fn entry(&self, name: &str) -> Option<&TensorEntry> {
        self.by_name.get(name).map(|&i| &self.index.tensors[i])
    }

    /// Reads a tensor that must have `shape`. Each tensor can be taken once.
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<LogicalTensor> {
        let Some(entry) = self.entry(name) else {
            return Err(self.refuse(format!("tensor {name} is missing")).remedy(
                "the model of the recipe is not the one that was saved; compare with recipe.resolved.yaml of that run",
            ));
        };
        if entry.shape != shape {
            return Err(self
                .refuse(format!("tensor {name} has shape {:?}, the model needs {shape:?}", entry.shape))
                .remedy("use the configuration of the run that wrote it"));
        }
        let tensor = self.read(entry)?;
        if !self.taken.insert(name.to_string()) {
            return Err(self.refuse(format!("tensor {name} is used twice")));
        }
        Ok(tensor)
    }

    /// Ends the reading: every tensor must have been taken, except those that `may_stay` allows.
    pub fn finish(self, may_stay: impl Fn(&str) -> bool) -> Result<()> {
        let unused = |tensor: &&TensorEntry| !self.taken.contains(&tensor.name) && !may_stay(&tensor.name);
        let names: Vec<_> = self.index.tensors.iter().filter(unused).map(|tensor| tensor.name.as_str()).collect();
        match names.split_first() {
            None => Ok(()),
            Some((first, rest)) => Err(self
                .refuse(format!("tensor {first} and {} more are not used by the model", rest.len()))
                .remedy("the model of the recipe is not the one that was saved")),
        }
    }

    fn refuse(&self, what: String) -> Failure {
        Failure::data(format!("checkpoint {}: {what}", self.folder.display()))
    }

    fn header(&self, file: &str) -> Result<SafeTensors<'_>> {
        let bytes = self.maps.get(file).ok_or_else(|| self.refuse(format!("index.json does not list file {file}")))?;
        SafeTensors::deserialize(bytes).map_err(|error| self.refuse(format!("{file} is no safetensors file: {error}")))
    }

    fn read(&self, entry: &TensorEntry) -> Result<LogicalTensor> {
        let shard = self.header(&entry.file)?;
        let view = shard
            .tensor(&entry.name)
            .map_err(|error| self.refuse(format!("{}: tensor {}: {error}", entry.file, entry.name)))?;
        let data = TensorData::from_bytes(&entry.dtype, view.data())
            .ok_or_else(|| self.refuse(format!("tensor {} has unknown type {}", entry.name, entry.dtype)))?;
        Ok(LogicalTensor { name: entry.name.clone(), shape: entry.shape.clone(), data })
    }

    /// The index and the shards must list the same tensors, once each.
    fn check_headers(&self) -> Result<()> {
        if self.by_name.len() != self.index.tensors.len() {
            return Err(self.refuse("index.json lists a tensor twice".into()));
        }
        let mut listed: HashMap<&str, usize> = HashMap::new();
        let mut shards: HashMap<&str, SafeTensors<'_>> = HashMap::new();
        for entry in &self.index.tensors {
            let file = entry.file.as_str();
            if !shards.contains_key(file) {
                shards.insert(file, self.header(file)?);
            }
            let found = shards[file]
                .tensor(&entry.name)
                .map_err(|_| self.refuse(format!("tensor {} is not in {file}", entry.name)))?;
            let dtype = found.dtype().to_string();
            if found.shape() != entry.shape || dtype != entry.dtype {
                return Err(self.refuse(format!(
                    "tensor {}: index.json says {} {:?}, {file} holds {dtype} {:?}",
                    entry.name,
                    entry.dtype,
                    entry.shape,
                    found.shape()
                )));
            }
            *listed.entry(file).or_default() += 1;
        }
        for file in self.index.files.keys() {
            let held = self.header(file)?.len();
            let listed = listed.get(file.as_str()).copied().unwrap_or(0);
            if held != listed {
                return Err(self.refuse(format!("{file} holds {held} tensors, index.json lists {listed}")));
            }
        }
        Ok(())
    }
}

fn read_index(folder: &Path) -> Result<Index> {
    let path = folder.join(INDEX_FILE);
    let refuse = |what: String| {
        Failure::data(format!("{} is no complete checkpoint: {what}", folder.display()))
            .remedy("name a folder step-XXXXXXXX under checkpoints/")
    };
    let text = std::fs::read(&path).map_err(|error| refuse(format!("cannot read {}: {error}", path.display())))?;
    let value: serde_json::Value =
        serde_json::from_slice(&text).map_err(|error| refuse(format!("{}: {error}", path.display())))?;
    if value["format"] != FORMAT {
        return Err(refuse(format!("{} was not written by Gantry", path.display())));
    }
    if value["version"] != VERSION {
        return Err(refuse(format!(
            "{} has format version {}, this program reads {VERSION}",
            path.display(),
            value["version"]
        )));
    }
    serde_json::from_value(value).map_err(|error| refuse(format!("{}: {error}", path.display())))
}

fn open_shard(folder: &Path, file: &str, bytes: u64, sha256: &str) -> Result<Mmap> {
    let refuse = |what: String| {
        Failure::data(format!("checkpoint {}: {file} {what}", folder.display()))
            .remedy("resume from an older checkpoint with --resume PATH")
    };
    if Path::new(file).file_name().is_none_or(|name| name != file) {
        return Err(refuse("is no plain file name".into()));
    }
    let path = folder.join(file);
    let found = path.metadata().map_err(|error| refuse(format!("cannot be read: {error}")))?.len();
    if found != bytes {
        return Err(refuse(format!("has {found} bytes, index.json says {bytes}")));
    }
    let map = map::map(&path).map_err(|error| refuse(format!("cannot be read: {error}")))?;
    if hexadecimal(&Sha256::digest(&map)) != sha256 {
        return Err(refuse("has a wrong checksum: its contents changed after it was written".into()));
    }
    Ok(map)
}
