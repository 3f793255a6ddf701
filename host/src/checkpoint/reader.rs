//! Reading a checkpoint: everything is checked first, then tensors are given out by name, each once.

use super::index::{FORMAT, INDEX_FILE, VERSION, digest};
use super::store::step_of;
use super::{ElementType, Index, LogicalTensor, Store, TensorData, TensorEntry, hexadecimal, map};
use crate::failure::{Failure, Result};
use memmap2::Mmap;
use rayon::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::Metadata;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Problems shown below the first.
const SHOWN: usize = 8;

/// An open, verified checkpoint.
#[derive(Debug)]
pub struct CheckpointReader {
    folder: PathBuf,
    index: Index,
    maps: BTreeMap<String, Mmap>,
    by_name: HashMap<String, Place>,
    taken: HashSet<String>,
}

/// Where a tensor is.
#[derive(Debug)]
struct Place {
    /// Index into the index's list.
    entry: usize,
    /// Bytes of its shard.
    bytes: Range<usize>,
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
        for (file, entry) in &index.notes {
            open_shard(folder, file, entry.bytes, &entry.sha256)?;
        }
        let (folder, by_name, taken) = (folder.to_path_buf(), HashMap::new(), HashSet::new());
        let mut reader = CheckpointReader { folder, index, maps, by_name, taken };
        reader.by_name = reader.check_headers()?;
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
        self.by_name.get(name).map(|place| &self.index.tensors[place.entry])
    }

    /// Whether there is a tensor of such a name.
    pub fn holds(&self, wanted: impl Fn(&str) -> bool) -> bool {
        self.index.tensors.iter().any(|tensor| wanted(&tensor.name))
    }

    /// Checks, before anything is read, that the checkpoint has what a model takes and nothing else: names, shapes, and the
    /// element type unless it may be converted. Tensors that `may_stay` allows need not be taken.
    pub fn expect(
        &self,
        wanted: &[(String, Vec<usize>)],
        ty: Option<ElementType>,
        may_stay: impl Fn(&str) -> bool,
    ) -> Result<()> {
        let (mut wrong, mut missing) = (Vec::new(), Vec::new());
        for (name, shape) in wanted {
            let Some(entry) = self.entry(name) else {
                missing.push(format!("tensor {name} is missing"));
                continue;
            };
            let needed = ty.map_or(entry.dtype.as_str(), |ty| ty.name());
            if &entry.shape != shape {
                wrong.push(format!("tensor {name} has shape {:?}, the model needs {shape:?}", entry.shape));
            } else if entry.dtype != needed {
                wrong.push(format!("tensor {name} has type {}, the model needs {needed}", entry.dtype));
            }
        }
        let types_only =
            !wrong.is_empty() && missing.is_empty() && wrong.iter().all(|what| what.contains(" has type "));
        let names: HashSet<&str> = wanted.iter().map(|(name, _)| name.as_str()).collect();
        let unused = |tensor: &&TensorEntry| !names.contains(tensor.name.as_str()) && !may_stay(&tensor.name);
        let unused = self.index.tensors.iter().filter(unused);
        let unused = unused.map(|tensor| format!("tensor {} is not used by the model", tensor.name));
        let problems: Vec<String> = wrong.into_iter().chain(missing).chain(unused).collect();
        let Some((first, rest)) = problems.split_first() else { return Ok(()) };
        let mut failure = self.refuse(first.clone());
        for line in rest.iter().take(SHOWN) {
            failure = failure.detail(line);
        }
        if rest.len() > SHOWN {
            failure = failure.detail(format!("and {} more", rest.len() - SHOWN));
        }
        Err(failure.remedy(if types_only {
            "set train.precision as in the run that wrote it (fp32: F32, fp64: F64), or begin a new run from the \
             parameters with modules.NAME.load, which converts them"
        } else {
            "the model of the recipe is not the one that was saved; compare with recipe.resolved.yaml of that run"
        }))
    }

    /// First byte of a tensor in its shard, and how many there are. Does not count as taking it.
    pub fn bytes_of(&self, name: &str) -> Option<(u64, u64)> {
        let place = self.by_name.get(name)?;
        Some((place.bytes.start as u64, place.bytes.len() as u64))
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

    /// The name of the run that wrote it, if its recipe says so.
    pub fn run_name(&self) -> Option<String> {
        let recipe: serde_json::Value = serde_saphyr::from_str(self.index.extra["recipe"].as_str()?).ok()?;
        Some(recipe["name"].as_str()?.to_string())
    }

    fn refuse(&self, what: String) -> Failure {
        Failure::data(format!("checkpoint {}: {what}", self.folder.display()))
    }

    fn bytes(&self, file: &str) -> Result<&[u8]> {
        let map = self.maps.get(file).ok_or_else(|| self.refuse(format!("index.json does not list file {file}")))?;
        Ok(map)
    }

    fn read(&self, entry: &TensorEntry) -> Result<LogicalTensor> {
        let bytes = self.by_name.get(&entry.name).and_then(|place| {
            let shard = self.maps.get(&entry.file)?;
            shard.get(place.bytes.clone())
        });
        let data = TensorData::from_bytes(&entry.dtype, bytes.unwrap_or_default())
            .ok_or_else(|| self.refuse(format!("tensor {} has unknown type {}", entry.name, entry.dtype)))?;
        Ok(LogicalTensor { name: entry.name.clone(), shape: entry.shape.clone(), data })
    }

    /// Finds every tensor of the index. The index and the shards must list the same ones, once each.
    fn check_headers(&self) -> Result<HashMap<String, Place>> {
        let mut headers: BTreeMap<&str, (usize, Metadata)> = BTreeMap::new();
        for file in self.maps.keys() {
            let (header_bytes, header) = SafeTensors::read_metadata(self.bytes(file)?)
                .map_err(|error| self.refuse(format!("{file} is no safetensors file: {error}")))?;
            // The header follows its length, 8 bytes.
            headers.insert(file, (8 + header_bytes, header));
        }
        let mut places = HashMap::new();
        let mut listed: HashMap<&str, usize> = HashMap::new();
        for (index, entry) in self.index.tensors.iter().enumerate() {
            let (name, file) = (&entry.name, entry.file.as_str());
            self.bytes(file)?;
            let found = headers.get(file).and_then(|(begin, header)| Some((begin, header.info(name)?)));
            let Some((begin, found)) = found else {
                return Err(self.refuse(format!("tensor {name} is not in {file}")));
            };
            let dtype = found.dtype.to_string();
            if found.shape != entry.shape || dtype != entry.dtype {
                return Err(self.refuse(format!(
                    "tensor {name}: index.json says {} {:?}, {file} holds {dtype} {:?}",
                    entry.dtype, entry.shape, found.shape
                )));
            }
            let bytes = begin + found.data_offsets.0..begin + found.data_offsets.1;
            if places.insert(name.clone(), Place { entry: index, bytes }).is_some() {
                return Err(self.refuse(format!("index.json lists tensor {name} twice")));
            }
            *listed.entry(file).or_default() += 1;
        }
        for (file, (_, header)) in &headers {
            let (held, listed) = (header.tensors().len(), listed.get(file).copied().unwrap_or(0));
            if held != listed {
                return Err(self.refuse(format!("{file} holds {held} tensors, index.json lists {listed}")));
            }
        }
        Ok(places)
    }
}

/// The index of a checkpoint folder; nothing of its shards is looked at.
pub fn read_index(folder: &Path) -> Result<Index> {
    let path = folder.join(INDEX_FILE);
    let refuse = |what: String| {
        Failure::data(format!("{} is no complete checkpoint: {what}", folder.display()))
            .remedy("name a folder step-XXXXXXXX under checkpoints/")
    };
    let damaged = |what: String| {
        Failure::data(format!("checkpoint {} is damaged: {what}", folder.display())).remedy(go_back(folder))
    };
    let text = std::fs::read(&path).map_err(|error| {
        let what = format!("cannot read {}: {error}", path.display());
        if step_in_name(folder).is_some() && folder.is_dir() { damaged(what) } else { refuse(what) }
    })?;
    let value: serde_json::Value =
        serde_json::from_slice(&text).map_err(|error| damaged(format!("{}: {error}", path.display())))?;
    if value["format"] != FORMAT {
        return Err(refuse(format!("{} was not written by Gantry", path.display())));
    }
    if value["version"] != VERSION {
        return Err(Failure::data(format!(
            "checkpoint {} has format version {}, this program reads {VERSION}",
            folder.display(),
            value["version"]
        ))
        .remedy("use the program that wrote it"));
    }
    let sha256 = digest(&value);
    let index: Index =
        serde_json::from_value(value).map_err(|error| damaged(format!("{}: {error}", path.display())))?;
    if index.sha256 != sha256 {
        return Err(damaged("index.json has a wrong checksum: its contents changed after it was written".into()));
    }
    // A folder of another name holds what its index says.
    match step_in_name(folder) {
        Some(step) if step != index.step => Err(Failure::data(format!(
            "checkpoint {} is of step {}, not of the step in its name",
            folder.display(),
            index.step
        ))
        .remedy("give the folder its name back")),
        _ => Ok(index),
    }
}

fn step_in_name(folder: &Path) -> Option<u64> {
    step_of(folder.file_name()?.to_str()?)
}

/// What to do about a damaged checkpoint: the one before it, if there is one.
fn go_back(folder: &Path) -> String {
    let older = folder.parent().zip(step_in_name(folder)).and_then(|(checkpoints, step)| {
        let store = Store::existing(checkpoints);
        store.complete().ok()?.into_iter().rev().find(|(other, _)| *other < step).map(|(other, _)| store.path_of(other))
    });
    match older {
        Some(path) => format!("resume from the one before it: --resume {}", path.display()),
        None => "name another checkpoint with --resume PATH, or start over with --resume none".into(),
    }
}

/// SHA-256 of a file in hexadecimal digits.
fn digest_of(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let (mut hash, mut block) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut block)? {
            0 => return Ok(hexadecimal(&hash.finalize())),
            n => hash.update(&block[..n]),
        }
    }
}

fn open_shard(folder: &Path, file: &str, bytes: u64, sha256: &str) -> Result<Mmap> {
    let refuse =
        |what: String| Failure::data(format!("checkpoint {}: {file} {what}", folder.display())).remedy(go_back(folder));
    if Path::new(file).file_name().is_none_or(|name| name != file) {
        return Err(refuse("is no plain file name".into()));
    }
    let path = folder.join(file);
    let found = path.metadata().map_err(|error| refuse(format!("cannot be read: {error}")))?.len();
    if found != bytes {
        return Err(refuse(format!("has {found} bytes, index.json says {bytes}")));
    }
    // Read, not mapped: what is only checked takes no memory.
    let digest = digest_of(&path).map_err(|error| refuse(format!("cannot be read: {error}")))?;
    if digest != sha256 {
        return Err(refuse("has a wrong checksum: its contents changed after it was written".into()));
    }
    map::map(&path).map_err(|error| refuse(format!("cannot be read: {error}")))
}
