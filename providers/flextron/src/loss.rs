//! The budget loss: how far the expected size of the model is from its budget, and how it joins the model's loss.

use crate::budget::FULL;
use crate::dual::{Dual, sum};
use std::collections::BTreeMap;

/// Relative distance from the budget that costs nothing, except at the full model.
pub const DEAD_ZONE: f64 = 0.05;
/// Weight of the distance between the router's output and the full choice, at the full model.
pub const FULL_WEIGHT: f64 = 10.0;

/// What a row of the router's output chooses between.
#[derive(Clone, Debug, PartialEq)]
pub enum Choices {
    /// Widths of an axis, largest first.
    Units(Vec<usize>),
    /// How many layers of a ranking are dropped, from none to all of them.
    Depth(Vec<usize>),
}

impl Choices {
    /// Entries of a row.
    pub fn count(&self) -> usize {
        match self {
            Choices::Units(units) => units.len(),
            Choices::Depth(ranking) => ranking.len() + 1,
        }
    }
}

/// The router's output for an axis: probabilities, a row for all layers or one for each layer that has the axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Routed {
    pub choices: Choices,
    pub rows: Vec<Vec<f64>>,
}

/// Expected widths.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Expected {
    /// Units by axis and row; empty for depth.
    pub units: Vec<Vec<Dual>>,
    /// Probability that a layer is kept, for the layers of the ranking.
    pub keep: BTreeMap<usize, Dual>,
}

impl Expected {
    /// p . choices for each row; derivatives by every entry of every row, in order.
    pub fn of(outputs: &[Routed]) -> Expected {
        let variables = variables(outputs);
        let mut expected = Expected::default();
        for (axis, routed) in outputs.iter().enumerate() {
            let rows = &variables[axis];
            match &routed.choices {
                Choices::Units(units) => expected.units.push(
                    rows.iter()
                        .map(|row| sum(&row.iter().zip(units).map(|(p, &n)| p.scale(n as f64)).collect::<Vec<_>>()))
                        .collect(),
                ),
                Choices::Depth(ranking) => {
                    expected.units.push(Vec::new());
                    // Layer k of the ranking is kept where at most k layers are dropped.
                    for (k, &layer) in ranking.iter().enumerate() {
                        expected.keep.insert(layer, sum(&rows[0][..=k]));
                    }
                }
            }
        }
        expected
    }
}

fn variables(outputs: &[Routed]) -> Vec<Vec<Vec<Dual>>> {
    let count = outputs.iter().flat_map(|routed| &routed.rows).map(Vec::len).sum();
    let mut index = 0;
    let mut next = |value: &f64| {
        index += 1;
        Dual::variable(*value, index - 1, count)
    };
    outputs.iter().map(|o| o.rows.iter().map(|row| row.iter().map(&mut next).collect()).collect()).collect()
}

/// |size / target - 1|, zero within 5 % of it. At the full model there is no such zone, and ten times the sum over axes
/// of the mean square distance to the first (full) choice is added. Derivatives as in [`Expected::of`].
pub fn budget_loss(outputs: &[Routed], budget: f64, size: &Dual, target: f64) -> Dual {
    let distance = (&size.scale(1.0 / target) - &Dual::constant(1.0)).abs();
    if budget != FULL {
        return if distance.value < DEAD_ZONE { distance.scale(0.0) } else { distance };
    }
    let to_full = variables(outputs).into_iter().map(|rows| {
        let squares: Vec<Dual> = rows
            .iter()
            .flat_map(|row| row.iter().enumerate())
            .map(|(i, p)| {
                let off = p - &Dual::constant(if i == 0 { 1.0 } else { 0.0 });
                &off * &off
            })
            .collect();
        sum(&squares).scale(1.0 / squares.len().max(1) as f64)
    });
    &distance + &sum(&to_full.collect::<Vec<_>>()).scale(FULL_WEIGHT)
}

/// How the budget loss joins the model's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Assembly {
    /// Factor on the budget loss.
    pub alpha: f64,
    /// A budget loss that is not above zero counts -beta times.
    pub beta: f64,
    /// The router does not learn: no budget loss.
    pub freeze_router: bool,
}

impl Assembly {
    /// Factor by which a budget loss enters a micro-batch's summed loss of `tokens` unmasked tokens.
    pub fn factor(&self, budget_loss: f64, tokens: f64) -> f64 {
        match self.freeze_router {
            true => 0.0,
            false => self.alpha * tokens * if budget_loss > 0.0 { 1.0 } else { -self.beta },
        }
    }

    /// The sum that a micro-batch minimises: the model's summed loss (cross entropy, or the divergence from a teacher,
    /// beside which the cross entropy is reported only), and the budget loss for each token.
    pub fn total(&self, model_loss: f64, budget_loss: f64, tokens: f64) -> f64 {
        model_loss + budget_loss * self.factor(budget_loss, tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outputs(p: [f64; 3], depth: [f64; 3]) -> Vec<Routed> {
        vec![
            Routed { choices: Choices::Units(vec![8, 6, 4]), rows: vec![p.to_vec()] },
            Routed { choices: Choices::Depth(vec![3, 1]), rows: vec![depth.to_vec()] },
        ]
    }

    /// 10 for each unit and 5 for each of layers 1 and 3.
    fn size(outputs: &[Routed]) -> Dual {
        let expected = Expected::of(outputs);
        let layers = sum(expected.keep.values()).scale(5.0);
        &expected.units[0][0].scale(10.0) + &layers
    }

    #[test]
    fn expected_widths_and_kept_layers() {
        let expected = Expected::of(&outputs([0.5, 0.25, 0.25], [0.6, 0.3, 0.1]));
        assert_eq!(expected.units[0][0].value, 6.5);
        let keep: Vec<(usize, f64)> = expected.keep.iter().map(|(l, k)| (*l, k.value)).collect();
        // Layer 3 is dropped first: kept with the probability that none is dropped.
        assert_eq!(keep, [(1, 0.6 + 0.3), (3, 0.6)]);
    }

    #[test]
    fn the_loss_is_the_distance_with_a_dead_zone() {
        let outputs = outputs([0.5, 0.25, 0.25], [0.6, 0.3, 0.1]);
        let size = size(&outputs);
        assert_eq!(size.value, 72.5);
        let loss = |budget, target| budget_loss(&outputs, budget, &size, target);
        assert!((loss(0.5, 50.0).value - 0.45).abs() < 1e-12);
        assert!((loss(0.5, 50.0).by(0) - 80.0 / 50.0).abs() < 1e-12, "80 units of size for p of the first choice");
        assert!((loss(0.9, 90.0).by(0) + 80.0 / 90.0).abs() < 1e-12, "the other way below the target");
        assert_eq!((loss(0.7, 70.0).value, loss(0.7, 70.0).by(0)), (0.0, 0.0));
        let squares = (0.25 + 0.0625 + 0.0625) / 3.0 + (0.16 + 0.09 + 0.01) / 3.0;
        assert!((loss(1.0, 72.5).value - 10.0 * squares).abs() < 1e-12);
        assert!((loss(1.0, 90.0).value - 10.0 * squares - (1.0 - 72.5 / 90.0)).abs() < 1e-12);
    }

    #[test]
    fn a_loss_that_is_not_positive_counts_beta_times() {
        let assembly = Assembly { alpha: 0.5, beta: 2.0, freeze_router: false };
        assert_eq!(assembly.total(3.0, 0.25, 8.0), 4.0);
        assert_eq!(assembly.total(3.0, -0.25, 8.0), 5.0);
        assert_eq!(Assembly { freeze_router: true, ..assembly }.total(3.0, 0.25, 8.0), 3.0);
    }
}
