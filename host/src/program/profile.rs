//! Where the time of replays goes: seconds, arithmetic and traffic per class of kernel.

use gantry_kernels::Cost;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

/// Sums of one class of kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Class {
    pub launches: u64,
    pub seconds: f64,
    /// Floating-point operations by count.
    pub flops: f64,
    /// Bytes read and written once each, by count.
    pub bytes: f64,
}

/// Sums per class, by name: kernels by their own, collectives by kind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Profile {
    pub classes: BTreeMap<&'static str, Class>,
}

impl Profile {
    /// Adds one launch. `element`: bytes of an element of the run's type.
    pub fn add(&mut self, class: &'static str, time: Duration, cost: Cost, element: usize) {
        let sums = self.classes.entry(class).or_default();
        sums.launches += 1;
        sums.seconds += time.as_secs_f64();
        sums.flops += cost.flops;
        sums.bytes += cost.elements * element as f64;
    }

    /// Adds another profile, of another rank or program.
    pub fn merge(&mut self, other: &Profile) {
        for (&class, sums) in &other.classes {
            let to = self.classes.entry(class).or_default();
            to.launches += sums.launches;
            to.seconds += sums.seconds;
            to.flops += sums.flops;
            to.bytes += sums.bytes;
        }
    }

    pub fn seconds(&self) -> f64 {
        self.classes.values().map(|class| class.seconds).sum()
    }

    /// A table, the most expensive class first. `wall`: seconds of the steps that were profiled; what no class has is the
    /// host's own.
    pub fn table(&self, wall: f64) -> String {
        let mut rows: Vec<(&str, Class)> = self.classes.iter().map(|(&name, &class)| (name, class)).collect();
        rows.push(("(host)", Class { seconds: (wall - self.seconds()).max(0.0), ..Class::default() }));
        rows.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
        let mut table = format!(
            "{:28} {:>9} {:>9} {:>7} {:>9} {:>8}\n",
            "class", "launches", "seconds", "share", "GFLOP/s", "GB/s"
        );
        for (name, Class { launches, seconds, flops, bytes }) in rows {
            let rate = |count: f64| if seconds > 0.0 { count / seconds / 1e9 } else { 0.0 };
            let share = 100.0 * seconds / wall.max(f64::MIN_POSITIVE);
            let _ = writeln!(
                table,
                "{name:28} {launches:>9} {seconds:>9.3} {share:>6.1}% {:>9.1} {:>8.1}",
                rate(flops),
                rate(bytes)
            );
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_shares_add_up() {
        let mut profile = Profile::default();
        for _ in 0..2 {
            profile.add("gemm", Duration::from_millis(500), Cost::new(3e9, 1e9), 4);
        }
        let mut all = profile.clone();
        all.merge(&profile);
        assert_eq!(all.classes["gemm"], Class { launches: 4, seconds: 2.0, flops: 12e9, bytes: 16e9 });
        let table = profile.table(4.0);
        let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["(host)", "0", "3.000", "75.0%", "0.0", "0.0"]);
        assert_eq!(lines[2], ["gemm", "2", "1.000", "25.0%", "6.0", "8.0"]);
    }
}
