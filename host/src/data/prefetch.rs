//! Batches made ahead on a thread.
//!
//! A batch depends on nothing but its step, so that making it earlier changes no number. The thread is at most
//! `data.prefetch` steps ahead of the loop; what goes wrong on it is an error of the step that would have used the batch.

use super::{Batch, Loader};
use crate::failure::{Failure, Result};
use std::any::Any;
use std::ops::RangeInclusive;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

/// All micro-batches of a step, in order.
type Step = Vec<Batch>;
type Make = Box<dyn FnMut(u64) -> Result<Step> + Send>;

/// The batches of consecutive steps.
pub struct Prefetch {
    next: u64,
    source: Source,
}

enum Source {
    InLine(Make),
    /// The receiver is dropped first, which ends the thread.
    Ahead(Option<Receiver<Result<Step>>>, Option<JoinHandle<()>>),
}

impl Prefetch {
    /// Batches of `steps` from `loader`, up to `ahead` steps early; 0: when asked.
    pub fn new(loader: Loader, steps: RangeInclusive<u64>, ahead: usize) -> Result<Prefetch> {
        let make = move |step| (0..loader.micro_batches()).map(|i| loader.batch(step, i)).collect();
        Prefetch::of(Box::new(make), steps, ahead)
    }

    fn of(mut make: Make, steps: RangeInclusive<u64>, ahead: usize) -> Result<Prefetch> {
        let next = *steps.start();
        let Some(queue) = ahead.checked_sub(1) else {
            return Ok(Prefetch { next, source: Source::InLine(make) });
        };
        // One more waits at the entrance of the queue.
        let (send, receive) = sync_channel(queue);
        let work = move || {
            for step in steps {
                let made = make(step);
                let last = made.is_err();
                if send.send(made).is_err() || last {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("gantry-data".into()).spawn(work).map_err(|error| {
            Failure::data(format!("cannot start the thread that makes batches: {error}"))
                .remedy("raise the limit of threads or set data.prefetch to 0")
        })?;
        Ok(Prefetch { next, source: Source::Ahead(Some(receive), Some(thread)) })
    }

    /// The micro-batches of the next step.
    pub fn next_step(&mut self) -> Result<Step> {
        let step = self.next;
        self.next += 1;
        match &mut self.source {
            Source::InLine(make) => make(step),
            Source::Ahead(receive, thread) => match receive.as_ref().map(Receiver::recv) {
                Some(Ok(made)) => made,
                _ => {
                    let ended = thread.take().map(JoinHandle::join);
                    let why = match ended {
                        Some(Err(panic)) => message(panic.as_ref()),
                        _ => "it has no more batches".into(),
                    };
                    Err(Failure::data(format!("step {step}: the thread that makes batches has ended: {why}"))
                        .remedy("report this as a defect"))
                }
            },
        }
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without words".into())
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        if let Source::Ahead(receive, thread) = &mut self.source {
            drop(receive.take());
            if let Some(thread) = thread.take() {
                drop(thread.join());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::loader::tests::{corpus, loader};
    use super::*;
    use crate::data::Position;
    use rstest::rstest;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::{Duration, Instant};

    #[rstest]
    fn batches_are_those_of_the_loader(#[values(0, 1, 2, 5)] ahead: usize) {
        let root = corpus();
        let whole = loader(root.path(), &[], Position::default()).unwrap();
        let mut prefetch = Prefetch::new(whole.clone(), 4..=9, ahead).unwrap();
        for step in 4..=9 {
            let expected: Vec<_> = (0..whole.micro_batches()).map(|i| whole.batch(step, i).unwrap()).collect();
            assert_eq!(prefetch.next_step().unwrap(), expected);
        }
    }

    fn counting(made: &Arc<AtomicU64>, fail_at: u64, panic_at: u64) -> Make {
        let made = Arc::clone(made);
        Box::new(move |step| {
            made.fetch_add(1, Ordering::SeqCst);
            assert!(step != panic_at, "planted in step {step}");
            if step == fail_at { Err(Failure::data("the disk is gone")) } else { Ok(Vec::new()) }
        })
    }

    #[test]
    fn stays_as_far_ahead_as_asked_and_ends_with_its_owner() {
        let made = Arc::new(AtomicU64::new(0));
        let mut prefetch = Prefetch::of(counting(&made, 0, 0), 1..=1_000_000, 3).unwrap();
        let began = Instant::now();
        for taken in 0..4 {
            while made.load(Ordering::SeqCst) < taken + 3 {
                assert!(began.elapsed() < Duration::from_secs(20));
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(5));
            assert_eq!(made.load(Ordering::SeqCst), taken + 3);
            prefetch.next_step().unwrap();
        }
        // Waits for the thread, which else would go on to the million.
        drop(prefetch);
        assert_eq!(Arc::strong_count(&made), 1);
    }

    #[rstest]
    fn errors_come_with_the_step_that_needs_the_batch(#[values(0, 1, 2)] ahead: usize) {
        let mut prefetch = Prefetch::of(counting(&Arc::default(), 3, 0), 1..=9, ahead).unwrap();
        assert!(prefetch.next_step().is_ok() && prefetch.next_step().is_ok());
        assert_eq!(prefetch.next_step().unwrap_err().sentence, "the disk is gone");
    }

    #[test]
    fn a_panic_of_the_thread_is_an_error() {
        let mut prefetch = Prefetch::of(counting(&Arc::default(), 0, 2), 1..=9, 2).unwrap();
        prefetch.next_step().unwrap();
        let failure = prefetch.next_step().unwrap_err();
        assert_eq!(failure.sentence, "step 2: the thread that makes batches has ended: planted in step 2");
    }
}
