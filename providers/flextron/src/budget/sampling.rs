//! Which budget a group of samples trains: a pure function of (seed, step, group), the same on every layout.

use super::{Budgets, FULL};
use crate::random::{Purpose, uniform};

/// With probability `full` the full model, else a budget of the list.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    pub seed: u64,
    pub full: f64,
    pub budgets: Budgets,
}

impl Sampling {
    /// The budget of a group of consecutive samples. `group`: number of its first sample over the whole run, divided by
    /// the samples of a group.
    pub fn budget(&self, step: u64, group: u64) -> f64 {
        let draw = |purpose| uniform(self.seed, purpose, 0, step as u32, group);
        if draw(Purpose::FullModel) < self.full { FULL } else { pick(&self.budgets, draw(Purpose::Budget)) }
    }
}

/// The budget at a uniform number: the first whose summed probabilities lie above it.
pub fn pick(budgets: &Budgets, u: f64) -> f64 {
    let mut sums: Vec<f64> = budgets
        .probs
        .iter()
        .scan(0.0, |sum, p| {
            *sum += p;
            Some(*sum)
        })
        .collect();
    let total = sums.last().copied().unwrap_or(1.0);
    sums.iter_mut().for_each(|sum| *sum /= total);
    let at = sums.iter().position(|&sum| u < sum).unwrap_or(sums.len() - 1);
    budgets.list[at]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_come_as_often_as_they_should_and_repeat() {
        let budgets = Budgets::new(&[0.7, 0.5, 0.9], Some(&[1.0, 2.0, 1.0])).unwrap();
        let sampling = Sampling { seed: 5, full: 0.25, budgets };
        let n = 40_000;
        let drawn: Vec<f64> = (0..n).map(|i| sampling.budget(i / 8, i)).collect();
        for (budget, share) in [(1.0, 0.25), (0.9, 0.1875), (0.7, 0.1875), (0.5, 0.375)] {
            let count = drawn.iter().filter(|b| **b == budget).count() as f64;
            let error = (share * (1.0 - share) * n as f64).sqrt();
            assert!((count - share * n as f64).abs() < 4.0 * error, "{budget}: {count}");
        }
        assert_eq!(drawn, (0..n).map(|i| sampling.budget(i / 8, i)).collect::<Vec<f64>>());
        let other = Sampling { seed: 6, ..sampling };
        assert_ne!(drawn, (0..n).map(|i| other.budget(i / 8, i)).collect::<Vec<f64>>());
    }
}
