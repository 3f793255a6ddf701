//! Where the time of replays goes: seconds, arithmetic and traffic per class of kernel.

use gantry_kernels::Cost;
use std::collections::BTreeMap;
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_add_up() {
        let mut profile = Profile::default();
        for _ in 0..2 {
            profile.add("gemm", Duration::from_millis(500), Cost::new(3e9, 1e9), 4);
        }
        let mut all = profile.clone();
        all.merge(&profile);
        assert_eq!(all.classes["gemm"], Class { launches: 4, seconds: 2.0, flops: 12e9, bytes: 16e9 });
        assert_eq!(all.seconds(), 2.0);
    }
}
