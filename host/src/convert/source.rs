//! Tensors of a folder of safetensors files or of a checkpoint, read in pieces: nothing is held in memory but headers.
//!
//! What a folder claims is checked before anything is read: that index and files list the same tensors, once each, and that
//! every tensor lies inside its file.

use super::element::Element;
use super::json;
use crate::checkpoint::CheckpointReader;
use crate::failure::{Failure, Result};
use safetensors::tensor::Metadata;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// A model's tensors in one file.
pub const SINGLE: &str = "model.safetensors";
/// The list of the files that hold a model's tensors.
pub const INDEX: &str = "model.safetensors.index.json";

/// Headers larger than this are refused, as the format's own libraries do.
const MAX_HEADER: u64 = 100_000_000;
/// Indices and configs larger than this are none.
const MAX_JSON: u64 = 256 << 20;

/// A tensor that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// safetensors' name of the type of its elements.
    pub dtype: String,
    pub shape: Vec<usize>,
    /// Name of its file.
    pub file: String,
    /// First byte in the file.
    begin: u64,
    pub bytes: u64,
}

impl Found {
    pub fn element(&self) -> Option<Element> {
        Element::named(&self.dtype)
    }
}

/// Where tensors come from.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    tensors: BTreeMap<String, Found>,
    files: BTreeMap<String, File>,
}

impl Source {
    /// A folder with [`SINGLE`] or [`INDEX`], or a file of its own.
    pub fn folder(path: &Path) -> Result<Source> {
        let mut files = BTreeMap::new();
        let mut tensors = BTreeMap::new();
        let mut add = |folder: &Path, name: &str, listed: Option<&BTreeMap<String, String>>| -> Result<()> {
            let (file, found) = header(&folder.join(name), name)?;
            for (tensor, found) in found {
                if listed.is_some_and(|listed| listed.get(&tensor).is_none_or(|file| file != name)) {
                    return Err(refuse(
                        path,
                        format!("{name} holds tensor {tensor}, which {INDEX} does not place there"),
                    ));
                }
                tensors.insert(tensor, found);
            }
            files.insert(name.to_string(), file);
            Ok(())
        };
        if path.is_file() {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            add(path.parent().unwrap_or(Path::new("")), &name, None)?;
        } else if path.join(SINGLE).exists() {
            add(path, SINGLE, None)?;
        } else if path.join(INDEX).exists() {
            let listed = index(path)?;
            let names: BTreeSet<&String> = listed.values().collect();
            if let Some(name) = names.iter().find(|name| !path.join(name.as_str()).is_file()) {
                return Err(refuse(path, format!("{INDEX} names {name}, which is not there")));
            }
            names.into_iter().try_for_each(|name| add(path, name, Some(&listed)))?;
            if let Some((tensor, file)) = listed.iter().find(|(tensor, _)| !tensors.contains_key(*tensor)) {
                return Err(refuse(path, format!("{INDEX} lists tensor {tensor}, which is not in {file}")));
            }
        } else {
            return Err(if path.is_dir() {
                refuse(path, format!("there is neither {SINGLE} nor {INDEX}"))
                    .remedy("save the weights as safetensors: save_pretrained of transformers does")
            } else {
                refuse(path, "there is no such folder".into())
            });
        }
        Ok(Source { path: path.into(), tensors, files })
    }

    /// A checkpoint, all of whose checksums are right.
    pub fn checkpoint(reader: &CheckpointReader) -> Result<Source> {
        let folder = reader.folder();
        let tensors = reader.index().tensors.iter().map(|entry| {
            let (begin, bytes) = reader.bytes_of(&entry.name).unwrap_or_default();
            let (dtype, shape, file) = (entry.dtype.clone(), entry.shape.clone(), entry.file.clone());
            (entry.name.clone(), Found { dtype, shape, file, begin, bytes })
        });
        let tensors = tensors.collect();
        let open = |name: &String| {
            let path = folder.join(name);
            let file = File::open(&path);
            Ok((name.clone(), file.map_err(|error| refuse(&path, format!("it cannot be read: {error}")))?))
        };
        let files = reader.index().files.keys().map(open).collect::<Result<_>>()?;
        Ok(Source { path: folder.into(), tensors, files })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn tensors(&self) -> &BTreeMap<String, Found> {
        &self.tensors
    }

    /// Appends `len` bytes of a tensor, from byte `begin` of it on.
    pub fn read(&self, name: &str, begin: u64, len: usize, to: &mut Vec<u8>) -> Result<()> {
        let gone = || self.refuse(format!("tensor {name} cannot be read"));
        let found = self.tensors.get(name).ok_or_else(gone)?;
        let old = to.len();
        let mut file = self.files.get(&found.file).ok_or_else(gone)?;
        to.resize(old + len, 0);
        let read = file.seek(SeekFrom::Start(found.begin + begin)).and_then(|_| file.read_exact(&mut to[old..]));
        read.map_err(|error| self.refuse(format!("tensor {name} in {} cannot be read: {error}", found.file)))?;
        Ok(())
    }

    /// A failure about what is there.
    pub fn refuse(&self, what: String) -> Failure {
        refuse(&self.path, what)
    }
}

pub(super) fn refuse(path: &Path, what: String) -> Failure {
    Failure::data(format!("{}: {what}", path.display()))
}

/// A small text file, as JSON.
pub(super) fn read_json(path: &Path) -> Result<Value> {
    let read = || -> std::io::Result<Vec<u8>> {
        let file = File::open(path)?;
        let mut text = Vec::new();
        file.take(MAX_JSON + 1).read_to_end(&mut text)?;
        Ok(text)
    };
    let text = read().map_err(|error| Failure::data(format!("cannot read {}: {error}", path.display())))?;
    if text.len() as u64 > MAX_JSON {
        return Err(refuse(path, format!("it is larger than {} MiB", MAX_JSON >> 20)));
    }
    json::parse(&text).map_err(|error| refuse(path, error))
}

/// File of every tensor, by the index.
fn index(folder: &Path) -> Result<BTreeMap<String, String>> {
    let path = folder.join(INDEX);
    let value = read_json(&path)?;
    let map = value["weight_map"].as_object().filter(|map| !map.is_empty());
    let map = map.ok_or_else(|| refuse(&path, "`weight_map` lists no tensors".into()))?;
    let one = |(tensor, file): (&String, &Value)| {
        let name = file.as_str().ok_or_else(|| refuse(&path, format!("the file of tensor {tensor} is {file}")))?;
        // Nothing outside of the folder.
        let plain = Path::new(name).file_name().is_some_and(|last| last == name) && !name.contains(['\\', '\0']);
        if !plain {
            return Err(refuse(&path, format!("the file of tensor {tensor} is {name:?}, no plain file name")));
        }
        Ok((tensor.clone(), name.to_string()))
    };
    map.iter().map(one).collect()
}

/// The tensors of a safetensors file by its header.
fn header(path: &Path, name: &str) -> Result<(File, BTreeMap<String, Found>)> {
    let no = |what: String| Failure::data(format!("{} is no safetensors file: {what}", path.display()));
    let cannot = |error: std::io::Error| Failure::data(format!("cannot read {}: {error}", path.display()));
    let mut file = File::open(path).map_err(cannot)?;
    let meta = file.metadata().map_err(cannot)?;
    if !meta.is_file() {
        return Err(no("it is no file".into()));
    }
    let size = meta.len();
    let mut length = [0; 8];
    if size < length.len() as u64 {
        return Err(no(format!("it has {size} bytes")));
    }
    file.read_exact(&mut length).map_err(cannot)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER || length > size - 8 {
        return Err(no(format!("its header should have {length} bytes, the file has {size}")));
    }
    let mut text = vec![0; length as usize];
    file.read_exact(&mut text).map_err(cannot)?;
    json::parse(&text).map_err(|error| no(format!("its header: {error}")))?;
    let metadata: Metadata = serde_json::from_slice(&text).map_err(|error| no(format!("its header: {error}")))?;
    let begin = 8 + length;
    let held = size - begin;
    let mut tensors = BTreeMap::new();
    let mut end = 0;
    for (tensor, info) in metadata.tensors() {
        let (first, last) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
        end = end.max(last);
        let found = Found {
            dtype: info.dtype.to_string(),
            shape: info.shape.clone(),
            file: name.into(),
            begin: begin + first,
            bytes: last.saturating_sub(first),
        };
        tensors.insert(tensor, found);
    }
    if end != held {
        return Err(no(format!("its header describes {end} bytes of tensors, {held} follow")));
    }
    Ok((file, tensors))
}
