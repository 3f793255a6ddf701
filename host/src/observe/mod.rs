//! Observation: what a run tells while it runs.
//!
//! `logging.rs` sends tracing events to stderr and RUN/log.jsonl, `metrics.rs` writes RUN/metrics.jsonl, `progress.rs`
//! shows where the run is, `memory.rs` reads the peak memory, `machine.rs` says
//! what the machine is and has left, `tensorboard.rs` writes event files. Knows no model; nothing here changes the numbers of a run.

mod logging;
mod machine;
mod memory;
mod metrics;
mod progress;
mod tensorboard;

pub use logging::{FAILURE_TARGET, start_logging};
pub use machine::{Machine, available_bytes};
pub use memory::{peak_bytes, resident_bytes};
pub use metrics::{MetricsWriter, RestOfMetrics, StepMetrics};
pub use progress::Progress;
pub use tensorboard::EventWriter;
