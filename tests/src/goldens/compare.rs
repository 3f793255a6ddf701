//! Comparison of results with a case's tensors, and the demand that every one of them was compared.

use super::case::{Case, Result};
use std::collections::BTreeSet;

/// The floating-point type a check ran in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    F32,
    F64,
}

/// Cases hold results of f64 rounded once to f32, so an f64 computation must agree far better than their tolerance.
const F64_RTOL: f64 = 1e-6;
/// Relative to the largest number of the tensor, for what cancels to almost nothing.
const F64_ATOL: f64 = 1e-8;
/// For tensors that cancel altogether: what sums of numbers about one leave of zero.
const F64_FLOOR: f64 = 1e-15;

/// A compared tensor.
#[derive(Clone, Debug)]
pub struct Compared {
    pub tensor: String,
    /// Largest |value - golden| over what is allowed there: at most 1, or the case fails.
    pub of_allowed: f64,
    /// Largest |value - golden| over the largest |golden|.
    pub relative: f64,
    /// Where, and the two numbers.
    pub at: (usize, f64, f64),
}

/// The comparisons of one case in one precision.
pub struct Check<'a> {
    pub case: &'a Case,
    precision: Precision,
    pub compared: Vec<Compared>,
    seen: BTreeSet<String>,
}

impl<'a> Check<'a> {
    pub fn new(case: &'a Case, precision: Precision) -> Check<'a> {
        Check { case, precision, compared: Vec::new(), seen: BTreeSet::new() }
    }

    /// Compares `values` with the case's tensor `name`.
    pub fn tensor(&mut self, name: &str, values: &[f64]) -> Result<()> {
        let golden = self.case.tensor(name)?;
        // Rows of very different size are compared by their own largest number where the case asks for it.
        let by_row = self.case.json["tolerance"]["note"].as_str().is_some_and(|note| note.contains("per row"));
        let row = if by_row { golden.shape.last().copied().unwrap_or(1) } else { 1 };
        self.seen.insert(name.into());
        self.numbers(name, values, &golden.data, row)
    }

    /// Compares numbers that stand elsewhere than in the case's tensors.
    pub fn numbers(&mut self, name: &str, values: &[f64], golden: &[f64], row: usize) -> Result<()> {
        if values.len() != golden.len() {
            return Err(format!("{name} has {} elements, the golden {}", values.len(), golden.len()));
        }
        let (rtol, atol) = self.case.tolerance()?;
        let largest = golden.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        let mut worst = Compared { tensor: name.into(), of_allowed: 0.0, relative: 0.0, at: (0, 0.0, 0.0) };
        for (first, (values, golden)) in values.chunks(row).zip(golden.chunks(row)).enumerate() {
            let scale = golden.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            for (i, (&value, &golden)) in values.iter().zip(golden).enumerate() {
                let error = (value - golden).abs();
                let size = scale.max(golden.abs());
                let allowed = match self.precision {
                    Precision::F32 => atol + rtol * size,
                    Precision::F64 => (atol + rtol * size).min(F64_ATOL * largest + F64_RTOL * size + F64_FLOOR),
                };
                // Equal is fine where nothing is allowed; NaN never is.
                let of_allowed = match (error == 0.0, error.is_finite()) {
                    (true, _) => 0.0,
                    (_, true) => error / allowed,
                    _ => f64::INFINITY,
                };
                if of_allowed > worst.of_allowed {
                    (worst.of_allowed, worst.at) = (of_allowed, (first * row + i, value, golden));
                }
                worst.relative = worst.relative.max(if largest > 0.0 { error / largest } else { error });
            }
        }
        self.compared.push(worst);
        Ok(())
    }

    /// Says that a tensor needs no comparison.
    pub fn passed_over(&mut self, name: &str) {
        self.seen.insert(name.into());
    }

    /// Whether a tensor was compared (or passed over).
    pub fn has_compared(&self, name: &str) -> bool {
        self.seen.contains(name)
    }

    /// An error if a result of the case was not compared, or one is off.
    pub fn finish(self) -> Result<Vec<Compared>> {
        let results = self.case.tensors.keys().filter(|name| name.starts_with("out.") || name.starts_with("grad."));
        if let Some(missed) = results.into_iter().find(|name| !self.seen.contains(*name)) {
            return Err(format!("{missed} was not compared"));
        }
        if self.compared.is_empty() {
            return Err("nothing was compared".into());
        }
        let off: Vec<String> = self.compared.iter().filter(|c| c.of_allowed > 1.0).map(Compared::text).collect();
        if off.is_empty() { Ok(self.compared) } else { Err(off.join("; ")) }
    }
}

impl Compared {
    fn text(&self) -> String {
        let (i, value, golden) = self.at;
        format!("{}[{i}] is {value}, not {golden}: {:.3} times what is allowed", self.tensor, self.of_allowed)
    }
}
