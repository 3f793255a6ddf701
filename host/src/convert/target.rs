//! Where tensors go: a folder of safetensors files, or a checkpoint. Both are written beside their place, tensor by
//! tensor, and renamed when all is on disk.

use super::copy::Assembly;
use super::element::Element;
use super::pieces::Piece;
use super::source::{INDEX, SINGLE};
use crate::checkpoint::{CheckpointWriter, Coming, Meta, ShardStream, cannot_write, sync_folder, write_synced};
use crate::failure::{Failure, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Map, Value, json};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::fs;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

/// Bytes of a checkpoint's shard, where a tensor is not larger.
const CHECKPOINT_SHARD: usize = 256 << 20;

/// A tensor to write: a piece of a declared one, or a constant.
pub struct Job<'a> {
    pub piece: &'a Piece,
    pub element: Element,
    pub from: Content<'a>,
}

/// What a tensor holds.
pub enum Content<'a> {
    Of(&'a Assembly<'a>),
    Constant(f64),
}

impl Job<'_> {
    fn bytes(&self) -> usize {
        self.piece.elements() * self.element.bytes()
    }

    fn coming(&self) -> Coming {
        let (name, shape) = (self.piece.name.clone(), self.piece.shape.clone());
        Coming { name, shape, dtype: self.element.dtype() }
    }

    fn write(&self, to: &mut ShardStream, bar: &ProgressBar) -> Result<()> {
        let mut sink = |bytes: &[u8]| {
            bar.inc(bytes.len() as u64);
            to.write(bytes)
        };
        match &self.from {
            Content::Of(assembly) => assembly.give(self.piece, self.element, sink),
            Content::Constant(value) => {
                let mut bytes = Vec::new();
                for _ in 0..self.piece.elements() {
                    // Few and small: what folders hold beside parameters.
                    super::element::convert(&value.to_le_bytes(), Element::F64, self.element, &mut bytes)
                        .map_err(|_| Failure::plugin(format!("tensor {} is to be {value}", self.piece.name)))?;
                }
                sink(&bytes)
            }
        }
    }
}

/// A bar on stderr if that is a terminal.
pub fn bar(jobs: &[Job<'_>]) -> ProgressBar {
    let visible = std::io::stderr().is_terminal();
    let target = if visible { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(jobs.iter().map(|job| job.bytes() as u64).sum()), target);
    if let Ok(style) = ProgressStyle::with_template("{wide_bar} {bytes}/{total_bytes}  {eta} left") {
        bar.set_style(style);
    }
    bar
}

/// Jobs in groups of at most `most` bytes, or of one; in order.
fn shards<'j, 'a>(jobs: &'j [Job<'a>], most: usize) -> Vec<&'j [Job<'a>]> {
    let (mut all, mut begin, mut bytes) = (Vec::new(), 0, 0usize);
    for (i, job) in jobs.iter().enumerate() {
        if i > begin && bytes.saturating_add(job.bytes()) > most {
            all.push(&jobs[begin..i]);
            (begin, bytes) = (i, 0);
        }
        bytes = bytes.saturating_add(job.bytes());
    }
    all.push(&jobs[begin..]);
    all
}

/// Writes [`SINGLE`], or shards of at most `most` bytes with [`INDEX`]. Returns the names of the files.
pub fn folder(folder: &Path, jobs: &[Job<'_>], most: usize, bar: &ProgressBar) -> Result<Vec<String>> {
    let shards = shards(jobs, most);
    let total = shards.len();
    let (mut files, mut places) = (Vec::new(), Map::new());
    for (number, jobs) in shards.into_iter().enumerate() {
        let name = match total {
            1 => SINGLE.to_string(),
            _ => format!("model-{:05}-of-{total:05}.safetensors", number + 1),
        };
        let mut order: Vec<&Job<'_>> = jobs.iter().collect();
        order.sort_by_key(|job| Reverse(job.element.bytes()));
        let coming: Vec<Coming> = order.iter().map(|job| job.coming()).collect();
        // Readers ask for the framework that wrote the file.
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        let mut stream = ShardStream::begin(folder.join(&name), &coming, Some(metadata), false)?;
        order.iter().try_for_each(|job| job.write(&mut stream, bar))?;
        stream.finish()?;
        places.extend(jobs.iter().map(|job| (job.piece.name.clone(), Value::from(name.as_str()))));
        files.push(name);
    }
    if total > 1 {
        let size: usize = jobs.iter().map(Job::bytes).sum();
        let index = json!({"metadata": {"total_size": size}, "weight_map": places});
        write_synced(&folder.join(INDEX), format!("{index:#}\n").as_bytes())?;
        files.push(INDEX.into());
    }
    Ok(files)
}

/// Writes a checkpoint at `path`.
pub fn checkpoint(path: &Path, jobs: &[Job<'_>], meta: Meta, bar: &ProgressBar) -> Result<()> {
    let mut writer = CheckpointWriter::alone(path)?;
    for jobs in shards(jobs, CHECKPOINT_SHARD) {
        let coming: Vec<Coming> = jobs.iter().map(Job::coming).collect();
        writer.stream_shard(&coming, |i, stream| jobs[i].write(stream, bar))?;
    }
    writer.complete(path, meta)
}

/// A folder in the making, beside its place.
pub struct Beside {
    place: PathBuf,
    new: PathBuf,
    done: bool,
}

impl Beside {
    /// `force`: what is at `place` may go.
    pub fn begin(place: &Path, source: &Path, force: bool) -> Result<Beside> {
        let refuse = |what: &str| Failure::data(format!("{} {what}", place.display()));
        let Some(name) = place.file_name() else { return Err(refuse("is no name for a folder")) };
        let empty = |path: &Path| fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
        if place.symlink_metadata().is_ok() && !empty(place) {
            if !force {
                return Err(refuse("is there already").remedy("name another folder, or replace it with --force"));
            }
            if !place.is_dir() {
                return Err(refuse("is no folder").remedy("remove it, or name another folder"));
            }
            if let (Ok(place), Ok(source)) = (place.canonicalize(), source.canonicalize())
                && source.starts_with(&place)
            {
                return Err(refuse("holds the source").remedy("name another folder"));
            }
            let ours = ["config.json", "index.json", SINGLE, INDEX].iter().any(|file| place.join(file).is_file());
            if !ours {
                return Err(refuse("holds no model, so that --force does not replace it").remedy("name another folder"));
            }
        }
        let parent = match place.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        fs::create_dir_all(parent).map_err(|error| cannot_write(parent, &error))?;
        let new = parent.join(format!(".converting-{}", name.to_string_lossy()));
        // Of a program that was killed.
        remove(&new)?;
        Ok(Beside { place: place.into(), new, done: false })
    }

    /// Where to write.
    pub fn path(&self) -> &Path {
        &self.new
    }

    /// Moves the folder to its place.
    pub fn complete(mut self) -> Result<()> {
        let parent = self.new.parent().unwrap_or(Path::new("."));
        sync_folder(&self.new)?;
        let rename = |from: &Path, to: &Path| fs::rename(from, to).map_err(|error| cannot_write(to, &error));
        let old = self
            .new
            .with_file_name(format!(".replaced-{}", self.place.file_name().unwrap_or_default().to_string_lossy()));
        remove(&old)?;
        let replaces = self.place.exists();
        if replaces {
            rename(&self.place, &old)?;
        }
        if let Err(failure) = rename(&self.new, &self.place) {
            if replaces {
                let _ = fs::rename(&old, &self.place);
            }
            return Err(failure);
        }
        self.done = true;
        sync_folder(parent)?;
        remove(&old)
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        if !self.done {
            // If this fails too, the next conversion to this place cleans up.
            let _ = fs::remove_dir_all(&self.new);
        }
    }
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(cannot_write(path, &error)),
        _ => Ok(()),
    }
}
