//! The run folder: lock, resolved recipe, checkpoints, metrics and log.
//!
//! Opening takes the lock and removes what torn saves left; results of earlier runs are touched by
//! [`RunFolder::begin`] alone, when everything else about the new run has been checked. Nothing is thrown away there:
//! what does not belong to the run that begins goes to `checkpoints.N`, `metrics.jsonl.N`, `tensorboard.N`,
//! `recipe.resolved.yaml.N` and `reproduction.json.N`, N the first number that is free for all of them.

use super::reproduction;
use crate::bench::step::Breakdown;
use crate::checkpoint::{self, CHECKPOINTS, Store};
use crate::failure::{Failure, Result};
use crate::observe::{EventWriter, MetricsWriter, RestOfMetrics};
use crate::recipe::Recipe;
use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

const METRICS: &str = "metrics.jsonl";
const TENSORBOARD: &str = "tensorboard";
const RESOLVED: &str = "recipe.resolved.yaml";

/// Which checkpoint a run begins from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Resume {
    /// The run folder's newest, if it has one.
    #[default]
    Auto,
    /// None: earlier checkpoints and metrics are moved aside.
    None,
    /// This one: a checkpoint folder, a run folder's newest, or what its `checkpoints/best` names.
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
    /// Makes the folder if need be, locks it and cleans up after torn saves.
    pub fn open(root: &Path) -> Result<RunFolder> {
        fs::create_dir_all(root).map_err(|error| cannot(root, &error))?;
        let lock = lock(root)?;
        let store = Store::open(&root.join(CHECKPOINTS))?;
        Ok(RunFolder { root: root.to_path_buf(), store, _lock: lock })
    }

    /// Makes the folder this run's, which begins after `checkpoint` (its folder and step), or anew: moves aside what
    /// is not before it, writes `recipe.resolved.yaml` and opens the metrics.
    pub fn begin(&self, recipe: &Recipe, resume: &Resume, checkpoint: Option<(&Path, u64)>) -> Result<MetricsWriter> {
        let step = checkpoint.map_or(0, |(_, step)| step);
        let own = checkpoint.is_some_and(|(folder, step)| self.owns(folder, step));
        // What a killed run wrote after its newest checkpoint is no result: it is written again.
        let rewound =
            *resume != Resume::Auto || self.store.complete()?.last().is_some_and(|(newest, _)| *newest > step);
        if rewound && own {
            self.rewind(step)?;
        } else if rewound {
            self.set_aside()?;
        }
        let resolved = self.root.join(RESOLVED);
        fs::write(&resolved, recipe.resolved_yaml()).map_err(|error| cannot(&resolved, &error))?;
        let metrics = MetricsWriter::open(&self.metrics(), step)?;
        if !recipe.log.tensorboard {
            return Ok(metrics);
        }
        Ok(metrics.with_events(EventWriter::begin(&self.root.join(TENSORBOARD), step)?))
    }

    /// Whether a checkpoint is one of this folder's.
    pub fn owns(&self, checkpoint: &Path, step: u64) -> bool {
        let same = |a: &Path, b: &Path| a.canonicalize().ok().is_some_and(|a| b.canonicalize().is_ok_and(|b| a == b));
        same(checkpoint, &self.store.path_of(step))
    }

    /// Moves checkpoints and metrics of later steps aside. In an order that a killed program leaves something from
    /// which the next start does the rest: as long as there are later checkpoints, it does.
    fn rewind(&self, step: u64) -> Result<()> {
        let later: Vec<_> = self.store.complete()?.into_iter().filter(|(other, _)| *other > step).collect();
        let metrics = RestOfMetrics::read(&self.metrics(), step)?;
        // First: whatever happens below, the next plain start follows this run.
        self.store.point_latest(step)?;
        if later.is_empty() && metrics.is_empty() {
            return Ok(());
        }
        let number = self.free_number();
        let aside = |name: &str| self.root.join(format!("{name}.{number}"));
        for name in [RESOLVED, reproduction::FILE].into_iter().filter(|name| self.root.join(name).exists()) {
            fs::copy(self.root.join(name), aside(name)).map_err(|error| cannot(&aside(name), &error))?;
        }
        if !metrics.is_empty() {
            metrics.move_to(&aside(METRICS))?;
        }
        if !later.is_empty() {
            fs::create_dir(aside(CHECKPOINTS)).map_err(|error| cannot(&aside(CHECKPOINTS), &error))?;
        }
        for (_, name) in later {
            let to = aside(CHECKPOINTS).join(&name);
            fs::rename(self.root.join(CHECKPOINTS).join(&name), &to).map_err(|error| cannot(&to, &error))?;
        }
        // The best one may be among them.
        if self.store.has_best() {
            self.store.refresh_best(step)?;
        }
        tracing::info!(
            "results after step {step} are moved aside to {}",
            self.root.join(format!("*.{number}")).display()
        );
        Ok(())
    }

    /// Moves all results of earlier runs aside.
    fn set_aside(&self) -> Result<()> {
        let empty = fs::read_dir(self.root.join(CHECKPOINTS)).is_ok_and(|mut entries| entries.next().is_none());
        if empty && self.metrics().metadata().map_or(0, |about| about.len()) == 0 {
            return Ok(());
        }
        let number = self.free_number();
        // Checkpoints last: a plain start after a killed one cuts the metrics where there are none.
        for name in [METRICS, TENSORBOARD, RESOLVED, reproduction::FILE, CHECKPOINTS]
            .into_iter()
            .filter(|name| self.root.join(name).exists())
        {
            let to = self.root.join(format!("{name}.{number}"));
            fs::rename(self.root.join(name), &to).map_err(|error| cannot(&to, &error))?;
        }
        let checkpoints = self.root.join(CHECKPOINTS);
        fs::create_dir_all(&checkpoints).map_err(|error| cannot(&checkpoints, &error))?;
        tracing::info!("earlier results are moved aside to {}", self.root.join(format!("*.{number}")).display());
        Ok(())
    }

    /// The first number no results are set aside under.
    fn free_number(&self) -> u64 {
        let taken = |number: &u64| {
            [CHECKPOINTS, METRICS, TENSORBOARD, RESOLVED, reproduction::FILE]
                .iter()
                .any(|name| self.root.join(format!("{name}.{number}")).exists())
        };
        (1..).find(|number| !taken(number)).unwrap_or(u64::MAX)
    }

    /// Writes `reproduction.json`.
    pub fn describe(&self, text: &str) -> Result<()> {
        let path = self.root.join(reproduction::FILE);
        fs::write(&path, text).map_err(|error| cannot(&path, &error))
    }

    pub fn store(&self) -> &Store {
        &self.store
    }

    pub fn metrics(&self) -> PathBuf {
        self.root.join(METRICS)
    }

    /// Writes `profile.json`.
    pub fn write_profile(&self, breakdown: &Breakdown) -> Result<()> {
        let path = self.root.join("profile.json");
        let text = serde_json::to_string_pretty(breakdown).unwrap_or_default();
        fs::write(&path, text + "\n").map_err(|error| cannot(&path, &error))
    }

    pub fn log(&self) -> PathBuf {
        self.root.join("log.jsonl")
    }

    /// The checkpoint folder to resume from.
    pub fn checkpoint(&self, resume: &Resume) -> Result<Option<PathBuf>> {
        match resume {
            Resume::None => Ok(None),
            Resume::Auto => self.store.latest(),
            Resume::Path(path) => checkpoint::locate(path).map(Some),
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
            let by = match holder.split_once(' ') {
                Some((pid, host)) => format!("process {pid} on {host}"),
                None => "another process".into(),
            };
            return Err(Failure::data(format!("run folder {} is in use by {by}", root.display()))
                .remedy("wait for it, stop it, or choose another folder with --run-dir"));
        }
        Err(TryLockError::Error(error)) => return Err(cannot(&path, &error)),
    }
    // This is for the message above only; failing to write it does no harm.
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = if host.trim().is_empty() { "this machine" } else { host.trim() };
    let _ = file.set_len(0).and_then(|()| writeln!(file, "{} {host}", std::process::id()));
    Ok(file)
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

    fn begin(root: &Path, resume: &Resume) {
        RunFolder::open(root).unwrap().begin(&recipe(), resume, None).unwrap();
    }

    #[test]
    fn folder_is_locked_while_open() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("run");
        let first = RunFolder::open(&path).unwrap();
        let failure = RunFolder::open(&path).unwrap_err();
        let sentence = format!("run folder {} is in use by process {} on ", path.display(), std::process::id());
        assert!(failure.sentence.starts_with(&sentence) && failure.sentence.len() > sentence.len(), "{failure}");
        assert_eq!(failure.exit_status(), 4);
        drop(first);
        begin(&path, &Resume::Auto);
        assert!(path.join("recipe.resolved.yaml").is_file());
    }

    #[test]
    fn starting_over_loses_nothing() {
        let root = tempfile::tempdir().unwrap();
        for run in ["one", "two"] {
            begin(root.path(), &Resume::None);
            fs::write(root.path().join("metrics.jsonl"), run).unwrap();
            fs::write(root.path().join("recipe.resolved.yaml"), format!("recipe {run}")).unwrap();
        }
        begin(root.path(), &Resume::None);
        assert_eq!(fs::read_to_string(root.path().join("metrics.jsonl")).unwrap(), "");
        for (number, run) in [(1, "one"), (2, "two")] {
            let read = |name: &str| fs::read_to_string(root.path().join(format!("{name}.{number}"))).unwrap();
            assert_eq!(
                (read("metrics.jsonl"), read("recipe.resolved.yaml")),
                (run.to_string(), format!("recipe {run}"))
            );
        }
    }

    #[test]
    fn opening_changes_no_results() {
        let root = tempfile::tempdir().unwrap();
        for name in ["metrics.jsonl", "recipe.resolved.yaml"] {
            fs::write(root.path().join(name), "earlier").unwrap();
        }
        drop(RunFolder::open(root.path()).unwrap());
        for name in ["metrics.jsonl", "recipe.resolved.yaml"] {
            assert_eq!(fs::read_to_string(root.path().join(name)).unwrap(), "earlier");
        }
    }

    #[test]
    fn unwritable_folder_is_named() {
        let failure = RunFolder::open(Path::new("/proc/run")).unwrap_err();
        assert!(failure.sentence.starts_with("cannot write /proc/run: "), "{failure}");
        assert_eq!(failure.exit_status(), 4);
    }
}
