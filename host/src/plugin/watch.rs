//! Says so when a call into a plugin does not come back: a plugin cannot be interrupted, but it can be named.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Milliseconds after which a call is reported, and again each time it has doubled.
static PATIENCE_MS: AtomicU64 = AtomicU64::new(30_000);

/// Sets how long a call may take before it is reported.
pub fn set_patience(patience: Duration) {
    PATIENCE_MS.store((patience.as_millis() as u64).max(1), Ordering::Relaxed);
}

struct Running {
    id: u64,
    provider: String,
    what: &'static str,
    since: Instant,
    next_report: Duration,
}

static RUNNING: Mutex<Vec<Running>> = Mutex::new(Vec::new());

fn running() -> MutexGuard<'static, Vec<Running>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A call in progress; over when dropped.
pub(super) struct Watch(u64);

/// Calls into plugins so far, in this process.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// Calls into plugins so far, in this process: constant while recorded programs are replayed.
pub fn calls() -> u64 {
    CALLS.load(Ordering::Relaxed)
}

/// Watches a call of `what` in `provider`.
pub(super) fn watch(provider: &str, what: &'static str) -> Watch {
    static THREAD: OnceLock<()> = OnceLock::new();
    THREAD.get_or_init(|| {
        // Without the thread calls are simply not watched.
        let _ = std::thread::Builder::new().name("plugin-watch".into()).spawn(look_around);
    });
    let id = CALLS.fetch_add(1, Ordering::Relaxed);
    let next_report = Duration::from_millis(PATIENCE_MS.load(Ordering::Relaxed));
    running().push(Running { id, provider: provider.into(), what, since: Instant::now(), next_report });
    Watch(id)
}

impl Drop for Watch {
    fn drop(&mut self) {
        running().retain(|r| r.id != self.0);
    }
}

fn look_around() {
    loop {
        let patience = PATIENCE_MS.load(Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis((patience / 4).clamp(5, 1000)));
        for r in running().iter_mut() {
            let taken = r.since.elapsed();
            if taken >= r.next_report {
                r.next_report = taken * 2;
                tracing::warn!(
                    target: "plugin",
                    plugin = r.provider,
                    "{} has been in {} for {:.1} s and has not come back",
                    r.provider,
                    r.what,
                    taken.as_secs_f64()
                );
            }
        }
    }
}
