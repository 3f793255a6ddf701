//! The run folder: lock, resolved recipe, checkpoints, metrics and log.

use crate::checkpoint::Store;
use crate::failure::{Failure, Result};
use crate::recipe::Recipe;
use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Which checkpoint a run begins from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Resume {
    /// The run folder's newest, if it has one.
    #[default]
    Auto,
    /// None: earlier checkpoints and metrics are moved aside.
    None,
    /// This one: a checkpoint folder, or a run folder's newest.
    Path(PathBuf),
}

/// `auto`, `none` or a path.
impl From<&str> for Resume {
    fn from(text: &str) -> Resume {
        match text {
            "auto" => Resume::Auto,
            "none" => Resume::None,
            path => Resume::Path(path.into()),
        }
    }
}

/// An open run folder, locked against other processes until dropped.
#[derive(Debug)]
pub struct RunFolder {
    root: PathBuf,
    store: Store,
    _lock: File,
}

impl RunFolder {
    /// Makes the folder if need be, locks it, cleans up, and writes `recipe.resolved.yaml`.
    pub fn open(root: &Path, recipe: &Recipe, resume: &Resume) -> Result<RunFolder> {
        fs::create_dir_all(root).map_err(|error| cannot(root, &error))?;
        let lock = lock(root)?;
        if *resume == Resume::None {
            set_aside(root)?;
        }
        let store = Store::open(&root.join("checkpoints"))?;
        let resolved = root.join("recipe.resolved.yaml");
        fs::write(&resolved, recipe.resolved_yaml()).map_err(|error| cannot(&resolved, &error))?;
        Ok(RunFolder { root: root.to_path_buf(), store, _lock: lock })
    }

    pub fn store(&self) -> &Store {
        &self.store
    }

    pub fn metrics(&self) -> PathBuf {
        self.root.join("metrics.jsonl")
    }

    pub fn log(&self) -> PathBuf {
        self.root.join("log.jsonl")
    }

    /// The checkpoint folder to resume from.
    pub fn checkpoint(&self, resume: &Resume) -> Result<Option<PathBuf>> {
        match resume {
            Resume::None => Ok(None),
            Resume::Auto => self.store.latest(),
            Resume::Path(path) => {
                let runs = [path.join("checkpoints"), path.clone()];
                match runs.iter().find(|folder| folder.join("latest").is_file()) {
                    // Opened by another run perhaps: read `latest` only, clean nothing.
                    Some(folder) => Store::existing(folder).latest(),
                    None => Ok(Some(path.clone())),
                }
            }
        }
    }
}

fn cannot(path: &Path, error: &std::io::Error) -> Failure {
    Failure::data(format!("cannot write {}: {error}", path.display()))
        .remedy("choose a run folder you may write with --run-dir")
}

/// Locks `root/lock`; the lock goes with the process, however it ends.
fn lock(root: &Path) -> Result<File> {
    let path = root.join("lock");
    let mut file = File::options()
        .create(true)
        .read(true)
        .write(true)
        .truncate(false)
        .open(&path)
        .map_err(|error| cannot(&path, &error))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let holder = fs::read_to_string(&path).unwrap_or_default();
            let holder = holder.trim();
            let by = if holder.is_empty() { "another process".into() } else { format!("process {holder}") };
            return Err(Failure::data(format!("run folder {} is in use by {by}", root.display()))
                .remedy("wait for it, stop it, or choose another folder with --run-dir"));
        }
        Err(TryLockError::Error(error)) => return Err(cannot(&path, &error)),
    }
    // The number is for the message above only; failing to write it does no harm.
    let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
    Ok(file)
}

/// Moves checkpoints and metrics of an earlier run to the first free `NAME.1`, `NAME.2`, ...
fn set_aside(root: &Path) -> Result<()> {
    for name in ["checkpoints", "metrics.jsonl"] {
        let path = root.join(name);
        if path.exists() {
            let free = (1u32..).map(|i| root.join(format!("{name}.{i}"))).find(|path| !path.exists());
            let free = free.unwrap_or_else(|| root.join(format!("{name}.old")));
            fs::rename(&path, &free).map_err(|error| cannot(&free, &error))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::Overrides;

    fn recipe() -> Recipe {
        let text = "name: t\nmodules: {lm: {provider: p}}\ndata: {paths: [x]}\noptimizer: {lr: 1}\n\
                    train: {steps: 1, seq_length: 4, global_batch_size: 1}\n";
        Recipe::parse(text, &Overrides::default()).unwrap()
    }

    #[test]
    fn folder_is_locked_while_open() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("run");
        let first = RunFolder::open(&path, &recipe(), &Resume::Auto).unwrap();
        let failure = RunFolder::open(&path, &recipe(), &Resume::Auto).unwrap_err();
        let sentence = format!("run folder {} is in use by process {}", path.display(), std::process::id());
        assert_eq!((failure.sentence, failure.cause as u8), (sentence, 4));
        drop(first);
        RunFolder::open(&path, &recipe(), &Resume::Auto).unwrap();
        assert!(path.join("recipe.resolved.yaml").is_file());
    }

    #[test]
    fn starting_over_loses_nothing() {
        let root = tempfile::tempdir().unwrap();
        for run in ["one", "two"] {
            RunFolder::open(root.path(), &recipe(), &Resume::None).unwrap();
            fs::write(root.path().join("metrics.jsonl"), run).unwrap();
        }
        RunFolder::open(root.path(), &recipe(), &Resume::None).unwrap();
        assert!(!root.path().join("metrics.jsonl").exists());
        assert_eq!(fs::read_to_string(root.path().join("metrics.jsonl.1")).unwrap(), "one");
        assert_eq!(fs::read_to_string(root.path().join("metrics.jsonl.2")).unwrap(), "two");
    }

    #[test]
    fn unwritable_folder_is_named() {
        let failure = RunFolder::open(Path::new("/proc/run"), &recipe(), &Resume::Auto).unwrap_err();
        assert!(failure.sentence.starts_with("cannot write /proc/run: "), "{failure}");
        assert_eq!(failure.exit_status(), 4);
    }
}
