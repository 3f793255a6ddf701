//! The `checkpoints` folder of a run.
//!
//! `step-XXXXXXXX` folders are complete; a save in progress is `.new-...`, a checkpoint that is being replaced
//! `.old-...`. `latest` names the newest save. Whoever opens a store holds the run folder's lock.

use super::index::INDEX_FILE;
use super::writer::{cannot_write, sync_folder, write_synced};
use super::{CheckpointWriter, Meta};
use crate::failure::{Failure, Result};
use std::fs;
use std::path::{Path, PathBuf};

const LATEST: &str = "latest";
const NEW: &str = ".new-";
const OLD: &str = ".old-";

/// A folder of checkpoints.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
}

impl Store {
    /// Opens the folder, makes it if need be, and removes what torn saves left behind.
    pub fn open(root: &Path) -> Result<Store> {
        fs::create_dir_all(root).map_err(|error| cannot_write(root, &error))?;
        let store = Store { root: root.to_path_buf() };
        for name in store.names()? {
            let path = root.join(&name);
            let failed = |error: std::io::Error| cannot_write(&path, &error);
            match name.strip_prefix(OLD) {
                // Killed between the two renames of a replacement: the old one is the complete one.
                Some(step) if !root.join(step).exists() => fs::rename(&path, root.join(step)).map_err(failed)?,
                Some(_) => fs::remove_dir_all(&path).map_err(failed)?,
                None if name.starts_with(NEW) && path.is_dir() => fs::remove_dir_all(&path).map_err(failed)?,
                None if name.starts_with(NEW) => fs::remove_file(&path).map_err(failed)?,
                None => {}
            }
        }
        Ok(store)
    }

    /// A folder that another run may be writing to: read only, nothing is cleaned.
    pub fn existing(root: &Path) -> Store {
        Store { root: root.to_path_buf() }
    }

    /// The checkpoint that `latest` names; without `latest`, the one with most steps; `None` if there is none.
    pub fn latest(&self) -> Result<Option<PathBuf>> {
        let path = self.root.join(LATEST);
        let name = match fs::read_to_string(&path) {
            Ok(name) => name.trim().to_string(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(self.complete()?.last().map(|(_, name)| self.root.join(name)));
            }
            Err(error) => return Err(Failure::data(format!("cannot read {}: {error}", path.display()))),
        };
        match step_of(&name) {
            Some(_) if self.root.join(&name).is_dir() => Ok(Some(self.root.join(name))),
            _ => Err(Failure::data(format!("{} names `{name}`, which is no checkpoint here", path.display()))
                .remedy("name a checkpoint with --resume PATH, or start over with --resume none")),
        }
    }

    /// Where the checkpoint of a step is, or would be.
    pub fn path_of(&self, step: u64) -> PathBuf {
        self.root.join(name_of(step))
    }

    /// Begins a checkpoint.
    pub fn begin(&self, step: u64) -> Result<CheckpointWriter> {
        let folder = self.root.join(format!("{NEW}{}", name_of(step)));
        if folder.exists() {
            fs::remove_dir_all(&folder).map_err(|error| cannot_write(&folder, &error))?;
        }
        CheckpointWriter::create(folder)
    }

    /// Completes a checkpoint, points `latest` to it and removes older ones beyond the newest `keep_last`. Checkpoints
    /// of later steps, which a run resumed further back may still have, stay until they are replaced.
    pub fn commit(&self, mut writer: CheckpointWriter, meta: Meta, keep_last: usize) -> Result<PathBuf> {
        let step = meta.step;
        let name = name_of(step);
        let (complete, old) = (self.root.join(&name), self.root.join(format!("{OLD}{name}")));
        let new = writer.finish(meta)?;
        let rename = |from: &Path, to: &Path| fs::rename(from, to).map_err(|error| cannot_write(to, &error));
        if complete.exists() {
            rename(&complete, &old)?;
        }
        rename(new, &complete)?;
        writer.keep();
        sync_folder(&self.root)?;
        self.point_latest(step)?;
        if old.exists() {
            fs::remove_dir_all(&old).map_err(|error| cannot_write(&old, &error))?;
        }
        let older: Vec<_> = self.complete()?.into_iter().filter(|(other, _)| *other <= step).collect();
        for (_, name) in older.iter().rev().skip(keep_last.max(1)) {
            let path = self.root.join(name);
            // Renamed first, so that a half-removed one is never taken for complete.
            let old = self.root.join(format!("{NEW}removed-{name}"));
            rename(&path, &old)?;
            fs::remove_dir_all(&old).map_err(|error| cannot_write(&old, &error))?;
        }
        Ok(complete)
    }

    /// Makes the checkpoint of a step the one to resume from.
    pub fn point_latest(&self, step: u64) -> Result<()> {
        let name = name_of(step);
        let new = self.root.join(format!("{NEW}{LATEST}"));
        write_synced(&new, format!("{name}\n").as_bytes())?;
        let latest = self.root.join(LATEST);
        fs::rename(&new, &latest).map_err(|error| cannot_write(&latest, &error))?;
        sync_folder(&self.root)
    }

    /// Steps and names of complete checkpoints, fewest steps first.
    pub fn complete(&self) -> Result<Vec<(u64, String)>> {
        let mut found: Vec<_> = self.names()?.into_iter().filter_map(|name| Some((step_of(&name)?, name))).collect();
        found.retain(|(_, name)| self.root.join(name).join(INDEX_FILE).is_file());
        found.sort();
        Ok(found)
    }

    fn names(&self) -> Result<Vec<String>> {
        let unreadable = |error: std::io::Error| Failure::data(format!("cannot read {}: {error}", self.root.display()));
        let entries = fs::read_dir(&self.root).map_err(unreadable)?;
        entries.map(|entry| Ok(entry.map_err(unreadable)?.file_name().to_string_lossy().into_owned())).collect()
    }
}

fn name_of(step: u64) -> String {
    format!("step-{step:08}")
}

pub(super) fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.parse().ok()
}
