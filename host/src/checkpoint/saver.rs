//! Saves that go on beside the training.
//!
//! The loop is held while the state of its step is copied into [`Staging`]; a thread writes the copy, waits until it is on
//! disk, completes the checkpoint and removes old ones. One save is under way at a time: the next waits for it, and so
//! does whoever drops the saver, so that no way out of the loop abandons a checkpoint.

use super::{Keep, Meta, Staging, Store};
use crate::failure::{Failure, Result};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Writes a run's checkpoints.
#[derive(Debug)]
pub struct Saver {
    store: Store,
    keep: Keep,
    /// Whether the loop goes on while a checkpoint is written.
    beside: bool,
    /// None while it is being written.
    staging: Option<Staging>,
    under_way: Option<UnderWay>,
}

#[derive(Debug)]
struct UnderWay {
    step: u64,
    thread: JoinHandle<(Staging, Result<PathBuf>)>,
    /// The loop has begun to wait for it.
    awaited: Arc<AtomicBool>,
}

impl Saver {
    /// `beside`: the loop goes on while a checkpoint is written; if not, every save is waited for.
    pub fn new(store: Store, keep: Keep, beside: bool) -> Saver {
        Saver { store, keep, beside, staging: Some(Staging::default()), under_way: None }
    }

    /// Saves what `stage` copies, once the save before is done. Gives the time the caller was held; what goes wrong with
    /// the writing is told by the next [`Saver::poll`], save or [`Saver::wait`].
    pub fn save(&mut self, step: u64, stage: impl FnOnce(&mut Staging) -> Result<Meta>) -> Result<Duration> {
        let clock = Instant::now();
        self.wait()?;
        let mut staging = self.staging.take().unwrap_or_default();
        staging.clear();
        if !self.beside {
            let saved = self.save_now(step, &mut staging, stage);
            staging.clear();
            self.staging = Some(staging);
            let path = saved.map_err(|failure| self.explain(step, failure))?;
            tracing::info!("saved {} in {:.2} s", path.display(), clock.elapsed().as_secs_f64());
            return Ok(clock.elapsed());
        }
        let meta = match stage(&mut staging) {
            Ok(meta) => meta,
            Err(failure) => {
                self.staging = Some(staging);
                return Err(self.explain(step, failure));
            }
        };
        let copied = clock.elapsed();
        let awaited = Arc::new(AtomicBool::new(false));
        let (store, keep, seen) = (self.store.clone(), self.keep, Arc::clone(&awaited));
        let thread = std::thread::Builder::new()
            .name("checkpoint".into())
            .spawn(move || {
                let result = write(&store, keep, &staging, meta);
                if let Ok(path) = &result {
                    let (path, seconds) = (path.display(), clock.elapsed().as_secs_f64());
                    if seen.load(Ordering::Relaxed) {
                        tracing::info!("saved {path} in {seconds:.2} s");
                    } else {
                        let copied = copied.as_secs_f64();
                        tracing::info!("saved {path} in {seconds:.2} s (training went on after {copied:.3} s)");
                    }
                }
                (staging, result)
            })
            .map_err(|error| Failure::data(format!("step {step}: cannot start the thread that saves: {error}")))?;
        self.under_way = Some(UnderWay { step, thread, awaited });
        Ok(clock.elapsed())
    }

    /// Copies and writes a shard at a time.
    fn save_now(
        &self,
        step: u64,
        staging: &mut Staging,
        stage: impl FnOnce(&mut Staging) -> Result<Meta>,
    ) -> Result<PathBuf> {
        staging.through = Some(self.store.begin(step)?);
        let meta = stage(staging)?;
        staging.pass_on()?;
        match staging.through.take() {
            Some(writer) => self.store.commit(writer, meta, self.keep),
            None => Err(Failure::data("the checkpoint's writer is gone")),
        }
    }

    /// A failure to save with what it leaves.
    fn explain(&self, step: u64, failure: Failure) -> Failure {
        let failure = failure.at(format!("step {step}"));
        match self.store.latest() {
            Ok(Some(path)) => failure.detail(format!("the newest complete checkpoint is {}", path.display())),
            _ => failure.detail("no checkpoint is complete yet"),
        }
    }

    /// Tells what went wrong with a save that has ended; waits for nothing.
    pub fn poll(&mut self) -> Result<()> {
        match &self.under_way {
            Some(save) if save.thread.is_finished() => self.wait(),
            _ => Ok(()),
        }
    }

    /// Waits for the save under way, if there is one, and tells what went wrong with it.
    pub fn wait(&mut self) -> Result<()> {
        let Some(UnderWay { step, thread, awaited }) = self.under_way.take() else { return Ok(()) };
        awaited.store(true, Ordering::Relaxed);
        let (staging, result) = thread.join().unwrap_or_else(|_| {
            let why = "the thread that saves panicked; the checkpoint is not complete";
            (Staging::default(), Err(Failure::data(why)))
        });
        self.staging = Some(staging);
        result.map(drop).map_err(|failure| self.explain(step, failure))
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        if let Err(failure) = self.wait() {
            tracing::error!("{failure}");
        }
    }
}

fn write(store: &Store, keep: Keep, staging: &Staging, meta: Meta) -> Result<PathBuf> {
    let mut writer = store.begin(meta.step)?;
    staging.write(&mut writer)?;
    store.commit(writer, meta, keep)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{CheckpointReader, ElementType, LogicalTensor, TensorData};
    use std::fs;
    use std::path::Path;

    fn saver(root: &Path, beside: bool) -> Saver {
        Saver::new(Store::open(root).unwrap(), Keep::newest(2), beside)
    }

    /// Stages a tensor of `len` elements, all of them the step's number.
    fn stage(step: u64, len: usize) -> impl FnOnce(&mut Staging) -> Result<Meta> {
        move |staging| {
            let data = TensorData::F32(vec![step as f32; len]);
            staging.add_tensor(LogicalTensor { name: "w".into(), shape: vec![len], data })?;
            Ok(Meta { step, ..Meta::default() })
        }
    }

    fn read(root: &Path, step: u64, len: usize) -> Vec<f64> {
        let mut reader = CheckpointReader::open(&root.join(format!("step-{step:08}"))).unwrap();
        reader.take("w", &[len]).unwrap().data.into_f64()
    }

    const LARGE: usize = 24 << 20;

    #[test]
    fn the_caller_goes_on_while_the_copy_is_written_and_the_next_save_waits() {
        let root = tempfile::tempdir().unwrap();
        let mut saver = saver(root.path(), true);
        saver.save(1, stage(1, LARGE)).unwrap();
        assert!(!saver.under_way.as_ref().unwrap().thread.is_finished());
        assert!(!root.path().join("latest").exists());
        saver.save(2, stage(2, 3)).unwrap();
        assert_eq!(fs::read_to_string(root.path().join("latest")).unwrap(), "step-00000001\n");
        drop(saver);
        assert_eq!(fs::read_to_string(root.path().join("latest")).unwrap(), "step-00000002\n");
        assert!(read(root.path(), 1, LARGE).iter().all(|&x| x == 1.0));
        assert_eq!(read(root.path(), 2, 3), [2.0; 3]);
    }

    #[test]
    fn a_save_that_is_waited_for_writes_the_same_without_copies() {
        let root = tempfile::tempdir().unwrap();
        for beside in [true, false] {
            let mut saver = saver(&root.path().join(beside.to_string()), beside);
            let parts = |name: &str, len: usize| vec![(name.to_string(), vec![len])];
            saver.staging.as_mut().unwrap().shard_bytes = 7000;
            saver
                .save(1, |staging| {
                    for i in 0..9 {
                        staging.add(parts(&format!("w{i}"), 250), ElementType::F32, Ok)?;
                    }
                    Ok(Meta { step: 1, ..Meta::default() })
                })
                .unwrap();
            saver.wait().unwrap();
            let held = saver.staging.as_ref().unwrap().capacity();
            assert_eq!(held, if beside { 9000 } else { 7000 }, "{beside}");
        }
        let index = |beside: &str| {
            let reader = CheckpointReader::open(&root.path().join(beside).join("step-00000001")).unwrap();
            reader.index().tensors.iter().map(|tensor| tensor.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(index("true").len(), 9);
        assert_eq!(index("true"), index("false"));
    }

    #[test]
    fn a_failed_write_is_told_once_and_leaves_what_was_there() {
        for beside in [true, false] {
            let root = tempfile::tempdir().unwrap();
            let checkpoints = root.path().join("checkpoints");
            let mut saver = saver(&checkpoints, beside);
            saver.save(1, stage(1, 3)).unwrap();
            saver.wait().unwrap();
            let aside = root.path().join("aside");
            fs::rename(&checkpoints, &aside).unwrap();
            let failure = saver.save(2, stage(2, 3)).and_then(|_| saver.wait()).unwrap_err();
            let begin = format!("step 2: cannot write {}", checkpoints.join(".new-step-00000002").display());
            assert!(failure.sentence.starts_with(&begin), "{failure}");
            assert_eq!(failure.exit_status(), 4);
            fs::rename(&aside, &checkpoints).unwrap();
            assert_eq!(read(&checkpoints, 1, 3), [1.0; 3]);
            // It is over: nothing is told twice, and the next save works.
            saver.poll().unwrap();
            saver.save(3, stage(3, 3)).unwrap();
            saver.wait().unwrap();
            assert_eq!(read(&checkpoints, 3, 3), [3.0; 3]);
        }
    }

    #[test]
    fn what_cannot_be_copied_is_not_saved() {
        for beside in [true, false] {
            let root = tempfile::tempdir().unwrap();
            let mut saver = saver(root.path(), beside);
            let failure = saver.save(4, |_| Err(Failure::numerical("NaN or infinity in w"))).unwrap_err();
            assert_eq!(failure.sentence, "step 4: NaN or infinity in w");
            assert_eq!(failure.details, ["no checkpoint is complete yet"]);
            assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
        }
    }
}
