//! Where the run is: a bar on a terminal, and a log line every so many steps.

use super::StepMetrics;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::time::Duration;

/// Progress of a run; copies show the same bar.
#[derive(Clone, Debug)]
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar on stderr if that is a terminal, else nothing to see.
    pub fn new() -> Progress {
        let visible = std::io::stderr().is_terminal();
        let target = if visible { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(None, target);
        if let Ok(style) = ProgressStyle::with_template("{wide_bar} {pos}/{len} {msg}") {
            bar.set_style(style);
        }
        Progress { bar }
    }

    pub fn on_terminal(&self) -> bool {
        !self.bar.is_hidden()
    }

    /// Runs `write` with the bar out of the way.
    pub fn suspend<T>(&self, write: impl FnOnce() -> T) -> T {
        self.bar.suspend(write)
    }

    /// Sets the bar's ends.
    pub fn begin(&self, finished: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(finished);
    }

    /// Shows a finished step, as a log line too if `logged`. `seconds_per_step`: mean since the start, checkpoints
    /// included.
    pub fn step(&self, metrics: &StepMetrics, total: u64, seconds_per_step: f64, logged: bool) {
        let step = metrics.step;
        let left = seconds_per_step * total.saturating_sub(step) as f64;
        let held_out = metrics.more.get("valid_loss").and_then(serde_json::Value::as_f64);
        let line = format!(
            "loss {:.4}{}  grad norm {:.3}  lr {:.2e}  {} tokens/s  {} left",
            metrics.lm_loss,
            held_out.map(|loss| format!("  held-out {loss:.4}")).unwrap_or_default(),
            metrics.grad_norm,
            metrics.lr,
            thousands(metrics.tokens_per_second),
            duration(left)
        );
        if logged {
            tracing::info!("step {step}/{total}  {line}");
        }
        self.bar.set_position(step);
        self.bar.set_message(line);
    }

    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}

impl Default for Progress {
    fn default() -> Self {
        Progress::new()
    }
}

/// A whole number with commas.
fn thousands(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Seconds as `1h02m`, `2m03s` or `4s`.
fn duration(seconds: f64) -> String {
    let seconds = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX).as_secs();
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s}s"),
        (0, m, s) => format!("{m}m{s:02}s"),
        (h, m, _) => format!("{h}h{m:02}m"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(0.4, "0s")]
    #[case(63.0, "1m03s")]
    #[case(3725.0, "1h02m")]
    fn durations(#[case] seconds: f64, #[case] text: &str) {
        assert_eq!(duration(seconds), text);
    }

    #[rstest]
    #[case(0.0, "0")]
    #[case(999.6, "1,000")]
    #[case(1234567.0, "1,234,567")]
    fn numbers(#[case] value: f64, #[case] text: &str) {
        assert_eq!(thousands(value), text);
    }
}
