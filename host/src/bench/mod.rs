//! Measurements: what the machine can do, and how near operators and whole steps come to it.
//!
//! `ceilings.rs` measures the machine, `operators.rs` runs the small programs that `cases.rs` describes, `step.rs` the steps
//! of a recipe. Knows programs, engines and recipes; a run depends on it for `--profile` alone.

pub mod cases;
pub mod ceilings;
pub mod operators;
pub mod step;

pub use ceilings::Ceilings;

use serde::Serialize;

/// Several measurements of one thing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Sample {
    pub median: f64,
    /// Distance from the first to the third quartile, as a part of the median.
    pub spread: f64,
    pub count: usize,
}

impl Sample {
    /// Of at least one value.
    pub fn of(mut values: Vec<f64>) -> Sample {
        values.sort_by(f64::total_cmp);
        let at = |part: f64| {
            let place = part * values.len().saturating_sub(1) as f64;
            let (low, high) = (place.floor() as usize, place.ceil() as usize);
            match (values.get(low), values.get(high)) {
                (Some(&a), Some(&b)) => a + (b - a) * place.fract(),
                _ => 0.0,
            }
        };
        let median = at(0.5);
        let spread = if median > 0.0 { (at(0.75) - at(0.25)) / median } else { 0.0 };
        Sample { median, spread, count: values.len() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles() {
        assert_eq!(Sample::of(vec![4.0, 1.0, 3.0, 2.0, 5.0]), Sample { median: 3.0, spread: 2.0 / 3.0, count: 5 });
        assert_eq!(Sample::of(vec![1.0, 2.0]).median, 1.5);
        assert_eq!(Sample::of(vec![7.0]), Sample { median: 7.0, spread: 0.0, count: 1 });
    }
}
