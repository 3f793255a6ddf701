//! Budgets: the list that a run trains, and what the router sees of one.
//!
//! [`sampling`] chooses a budget for each group of samples; [`reference`] chooses as the reference does.

pub mod reference;
pub mod sampling;

use crate::Result;

/// The full model.
pub const FULL: f64 = 1.0;

/// Budgets, largest first, with the probabilities that they are drawn with.
#[derive(Clone, Debug, PartialEq)]
pub struct Budgets {
    pub list: Vec<f64>,
    /// Sums to 1.
    pub probs: Vec<f64>,
}

impl Budgets {
    /// Sorts budgets with their weights; equal weights if none are given.
    pub fn new(list: &[f64], weights: Option<&[f64]>) -> Result<Budgets> {
        if list.is_empty() {
            return Err("budget_list is empty; give at least one budget".into());
        }
        if let Some(budget) = list.iter().find(|b| !(b.is_finite() && **b > 0.0)) {
            return Err(format!("budget_list holds {budget}; a budget is a number above 0"));
        }
        let equal = vec![1.0; list.len()];
        let weights = weights.unwrap_or(&equal);
        if weights.len() != list.len() {
            return Err(format!(
                "budget_probs has {} entries and budget_list {}; give one for each budget",
                weights.len(),
                list.len()
            ));
        }
        if let Some(weight) = weights.iter().find(|w| !(w.is_finite() && **w >= 0.0)) {
            return Err(format!("budget_probs holds {weight}; weights are numbers of at least 0"));
        }
        let total: f64 = weights.iter().sum();
        if total <= 0.0 {
            return Err("budget_probs are all 0; at least one budget must be drawn".into());
        }
        let mut pairs: Vec<(f64, f64)> = list.iter().copied().zip(weights.iter().copied()).collect();
        pairs.sort_by(|a, b| b.0.total_cmp(&a.0));
        if let Some(twice) = pairs.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(format!("budget_list holds {} twice", twice[0].0));
        }
        Ok(Budgets { list: pairs.iter().map(|p| p.0).collect(), probs: pairs.iter().map(|p| p.1 / total).collect() })
    }

    /// What the router sees of a budget, [budgets]: the one-hot of an entry of the list; between two entries a mixture of
    /// their one-hots by distance; the full model stands for the largest entry where the list does not hold it. Outside
    /// the list the nearest entry, or, if `extrapolate`, the line through the two nearest ones continued, as the
    /// reference does.
    pub fn one_hot(&self, budget: f64, extrapolate: bool) -> Vec<f64> {
        let list = &self.list;
        let mut vector = vec![0.0; list.len()];
        let last = list.len() - 1;
        if let Some(at) = list.iter().position(|&b| b == budget) {
            vector[at] = 1.0;
        } else if budget == FULL || last == 0 || (budget > list[0] && !extrapolate) {
            vector[0] = 1.0;
        } else if budget < list[last] && !extrapolate {
            vector[last] = 1.0;
        } else {
            // The pair around it, or the outermost pair.
            let low = list.iter().position(|&b| b < budget).unwrap_or(last).clamp(1, last);
            let weight = (budget - list[low]) / (list[low - 1] - list[low]);
            (vector[low - 1], vector[low]) = (weight, 1.0 - weight);
        }
        vector
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: &[f64], b: &[f64]) -> bool {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12)
    }

    #[test]
    fn budgets_between_entries_blend_and_outside_clamp() {
        let budgets = Budgets::new(&[0.5, 1.0, 0.75], None).unwrap();
        assert_eq!(budgets.list, [1.0, 0.75, 0.5]);
        assert!(close(&budgets.one_hot(0.75, false), &[0.0, 1.0, 0.0]));
        assert!(close(&budgets.one_hot(0.8, false), &[0.2, 0.8, 0.0]));
        assert!(close(&budgets.one_hot(0.55, false), &[0.0, 0.2, 0.8]));
        assert!(close(&budgets.one_hot(0.3, false), &[0.0, 0.0, 1.0]));
        assert!(close(&budgets.one_hot(1.5, false), &[1.0, 0.0, 0.0]));
        assert!(close(&budgets.one_hot(0.25, true), &[0.0, -1.0, 2.0]));
        assert!(close(&budgets.one_hot(1.25, true), &[2.0, -1.0, 0.0]));
    }

    #[test]
    fn the_full_model_is_the_largest_budget_where_the_list_lacks_it() {
        let budgets = Budgets::new(&[0.9, 0.7], Some(&[1.0, 3.0])).unwrap();
        assert_eq!((budgets.one_hot(1.0, true), budgets.probs), (vec![1.0, 0.0], vec![0.25, 0.75]));
        assert_eq!(Budgets::new(&[0.5], None).unwrap().one_hot(0.7, true), [1.0]);
    }

    #[test]
    fn mistakes_are_named() {
        let check = |list: &[f64], weights: Option<&[f64]>| Budgets::new(list, weights).unwrap_err();
        assert!(check(&[], None).contains("empty"));
        assert!(check(&[0.0], None).contains("above 0"));
        assert!(check(&[0.5, 0.5], None).contains("0.5 twice"));
        assert!(check(&[0.5], Some(&[1.0, 1.0])).contains("2 entries and budget_list 1"));
        assert!(check(&[0.5], Some(&[-1.0])).contains("at least 0"));
        assert!(check(&[0.5], Some(&[0.0])).contains("all 0"));
    }
}
