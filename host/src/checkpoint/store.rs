//! The `checkpoints` folder of a run.
//!
//! `step-XXXXXXXX` folders are complete; a save in progress is `.new-...`, a checkpoint that is being replaced
//! `.old-...`. `latest` names the newest save, `best` the one with the lowest held-out loss where [`Keep`] asks for it.
//! Whoever opens a store holds the run folder's lock.
//!
//! Nothing is removed before what replaces it is complete, and what `latest` or `best` names is never removed.

use super::index::INDEX_FILE;
use super::writer::{cannot_write, sync_folder, write_synced};
use super::{CheckpointWriter, Meta};
use crate::failure::{Failure, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// Name of a run's folder of checkpoints.
pub const CHECKPOINTS: &str = "checkpoints";
const LATEST: &str = "latest";
const BEST: &str = "best";
const NEW: &str = ".new-";
const OLD: &str = ".old-";

/// Which complete checkpoints stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// The newest, at least one.
    pub last: usize,
    /// Those of steps that are multiples of this, for good.
    pub every: Option<u64>,
    /// The one with the lowest held-out loss, under the name `best`; of equal ones the first.
    pub best: bool,
}

impl Keep {
    /// The newest `last` only.
    pub fn newest(last: usize) -> Keep {
        Keep { last, every: None, best: false }
    }
}

/// A folder of checkpoints.
#[derive(Clone, Debug)]
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
        match self.named_by(LATEST)? {
            Some(step) => Ok(Some(self.path_of(step))),
            None => Ok(self.complete()?.last().map(|(_, name)| self.root.join(name))),
        }
    }

    /// The checkpoint that `best` names, if there is one.
    pub fn best(&self) -> Result<Option<PathBuf>> {
        Ok(self.named_by(BEST)?.map(|step| self.path_of(step)))
    }

    /// Whether there is a file `best`, whatever it names.
    pub fn has_best(&self) -> bool {
        self.root.join(BEST).exists()
    }

    /// The step of the checkpoint that the file `pointer` names, if there is one.
    fn named_by(&self, pointer: &str) -> Result<Option<u64>> {
        let path = self.root.join(pointer);
        let name = match fs::read_to_string(&path) {
            Ok(name) => name.trim().to_string(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Failure::data(format!("cannot read {}: {error}", path.display()))),
        };
        match step_of(&name) {
            Some(step) if self.root.join(&name).is_dir() => Ok(Some(step)),
            _ => Err(Failure::data(format!("{} names `{name}`, which is no checkpoint here", path.display())).remedy(
                "name a checkpoint folder itself; for training with --resume PATH, or start over with --resume none",
            )),
        }
    }

    /// Where the checkpoint of a step is, or would be.
    pub fn path_of(&self, step: u64) -> PathBuf {
        self.root.join(name_of(step))
    }

    /// Begins a checkpoint. Refuses to take the place of a folder that is none.
    pub fn begin(&self, step: u64) -> Result<CheckpointWriter> {
        let place = self.path_of(step);
        if place.exists() && !place.join(INDEX_FILE).exists() {
            return Err(Failure::data(format!(
                "{} is where the checkpoint of step {step} belongs and holds no checkpoint ({INDEX_FILE} is missing)",
                place.display()
            ))
            .remedy("move it away"));
        }
        let folder = self.root.join(format!("{NEW}{}", name_of(step)));
        if folder.exists() {
            fs::remove_dir_all(&folder).map_err(|error| cannot_write(&folder, &error))?;
        }
        CheckpointWriter::create(folder)
    }

    /// Completes a checkpoint, points `latest` to it, and `best` if it is that, and removes older ones that `keep` does not
    /// name. Checkpoints of later steps, which a run resumed further back may still have, stay until they are replaced.
    pub fn commit(&self, mut writer: CheckpointWriter, meta: Meta, keep: Keep) -> Result<PathBuf> {
        let (step, score) = (meta.step, meta.valid_loss);
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
        if keep.best && self.is_best(step, score)? {
            self.point(BEST, step)?;
        }
        if old.exists() {
            fs::remove_dir_all(&old).map_err(|error| cannot_write(&old, &error))?;
        }
        let best = self.named_by(BEST)?;
        let older: Vec<_> = self.complete()?.into_iter().filter(|(other, _)| *other <= step).collect();
        for (other, name) in older.iter().rev().skip(keep.last.max(1)) {
            let for_good = keep.every.is_some_and(|every| other.is_multiple_of(every));
            if for_good || best == Some(*other) {
                continue;
            }
            let path = self.root.join(name);
            // Renamed first, so that a half-removed one is never taken for complete.
            let old = self.root.join(format!("{NEW}removed-{name}"));
            rename(&path, &old)?;
            fs::remove_dir_all(&old).map_err(|error| cannot_write(&old, &error))?;
        }
        Ok(complete)
    }

    /// Whether a checkpoint with this score is better than the one that `best` names.
    fn is_best(&self, step: u64, score: Option<f64>) -> Result<bool> {
        let Some(score) = score else { return Ok(false) };
        Ok(match self.named_by(BEST)? {
            // Saved again: the score of before is gone.
            Some(best) if best == step => {
                self.refresh_best(step)?;
                false
            }
            Some(best) => self.score_of(best).is_none_or(|best| score < best),
            None => true,
        })
    }

    /// Points `best` to the complete checkpoint with the lowest held-out loss among those of at most `step` steps; removes
    /// it if none has one. For the beginning of a run: a killed one may have completed a checkpoint without doing so.
    pub fn refresh_best(&self, step: u64) -> Result<()> {
        let steps = self.complete()?.into_iter().map(|(other, _)| other).filter(|other| *other <= step);
        let scored = steps.filter_map(|other| Some((self.score_of(other)?, other)));
        let path = self.root.join(BEST);
        match scored.min_by(|(a, _), (b, _)| a.total_cmp(b)) {
            Some((_, best)) => self.point(BEST, best),
            None if path.exists() => fs::remove_file(&path).map_err(|error| cannot_write(&path, &error)),
            None => Ok(()),
        }
    }

    /// Held-out loss of a checkpoint, if its index can be read and says so. Nothing is verified: whoever loads it does.
    fn score_of(&self, step: u64) -> Option<f64> {
        let text = fs::read(self.path_of(step).join(INDEX_FILE)).ok()?;
        serde_json::from_slice::<Score>(&text).ok()?.valid_loss
    }

    /// Makes the checkpoint of a step the one to resume from.
    pub fn point_latest(&self, step: u64) -> Result<()> {
        self.point(LATEST, step)
    }

    fn point(&self, pointer: &str, step: u64) -> Result<()> {
        let new = self.root.join(format!("{NEW}{pointer}"));
        write_synced(&new, format!("{}\n", name_of(step)).as_bytes())?;
        let path = self.root.join(pointer);
        fs::rename(&new, &path).map_err(|error| cannot_write(&path, &error))?;
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

/// The checkpoint a path stands for: a checkpoint folder itself; the newest of a run folder or of its `checkpoints`; or
/// what a file `latest` or `best` names. Read only, so that another run may be writing there.
pub fn locate(path: &Path) -> Result<PathBuf> {
    let pointer = path.file_name().and_then(|name| name.to_str()).filter(|name| [LATEST, BEST].contains(name));
    if let (Some(pointer), Some(root), true) = (pointer, path.parent(), path.is_file()) {
        let store = Store::existing(root);
        return Ok(store.named_by(pointer)?.map_or_else(|| path.to_path_buf(), |step| store.path_of(step)));
    }
    let runs = [path.join(CHECKPOINTS), path.to_path_buf()];
    match runs.iter().find(|folder| folder.join(LATEST).is_file()) {
        Some(folder) => Ok(Store::existing(folder).latest()?.unwrap_or_else(|| path.to_path_buf())),
        None => Ok(path.to_path_buf()),
    }
}

/// The one field of an index that [`Store::refresh_best`] needs.
#[derive(serde::Deserialize)]
struct Score {
    valid_loss: Option<f64>,
}

fn name_of(step: u64) -> String {
    format!("step-{step:08}")
}

pub(super) fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.parse().ok()
}
