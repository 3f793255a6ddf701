//! Numbers that carry their derivatives by a list of variables (forward mode): formulas are written once.

use std::ops::{Add, Div, Mul, Sub};

/// A value and its derivative by each variable; none for a constant.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Dual {
    pub value: f64,
    /// Empty for a constant.
    pub grad: Vec<f64>,
}

impl Dual {
    pub fn constant(value: f64) -> Dual {
        Dual { value, grad: Vec::new() }
    }

    /// Variable number `index` of `count`.
    pub fn variable(value: f64, index: usize, count: usize) -> Dual {
        let mut grad = vec![0.0; count];
        grad[index] = 1.0;
        Dual { value, grad }
    }

    /// Its derivative by variable `index`.
    pub fn by(&self, index: usize) -> f64 {
        self.grad.get(index).copied().unwrap_or(0.0)
    }

    /// The same value as a constant.
    pub fn detached(&self) -> Dual {
        Dual::constant(self.value)
    }

    /// `value` with derivative `slope` times this one's.
    fn chain(&self, value: f64, slope: f64) -> Dual {
        Dual { value, grad: self.grad.iter().map(|g| g * slope).collect() }
    }

    pub fn scale(&self, by: f64) -> Dual {
        self.chain(self.value * by, by)
    }

    pub fn abs(&self) -> Dual {
        let sign = if self.value == 0.0 { 0.0 } else { self.value.signum() };
        self.chain(self.value.abs(), sign)
    }

    pub fn exp(&self) -> Dual {
        let value = self.value.exp();
        self.chain(value, value)
    }

    /// The smaller of this and `limit`.
    pub fn at_most(&self, limit: f64) -> Dual {
        if self.value <= limit { self.clone() } else { Dual::constant(limit) }
    }

    fn zip(&self, other: &Dual, value: f64, a: f64, b: f64) -> Dual {
        let n = self.grad.len().max(other.grad.len());
        Dual { value, grad: (0..n).map(|i| a * self.by(i) + b * other.by(i)).collect() }
    }
}

impl From<f64> for Dual {
    fn from(value: f64) -> Dual {
        Dual::constant(value)
    }
}

impl Add for &Dual {
    type Output = Dual;
    fn add(self, other: &Dual) -> Dual {
        self.zip(other, self.value + other.value, 1.0, 1.0)
    }
}

impl Sub for &Dual {
    type Output = Dual;
    fn sub(self, other: &Dual) -> Dual {
        self.zip(other, self.value - other.value, 1.0, -1.0)
    }
}

impl Mul for &Dual {
    type Output = Dual;
    fn mul(self, other: &Dual) -> Dual {
        self.zip(other, self.value * other.value, other.value, self.value)
    }
}

impl Div for &Dual {
    type Output = Dual;
    fn div(self, other: &Dual) -> Dual {
        let value = self.value / other.value;
        self.zip(other, value, 1.0 / other.value, -value / other.value)
    }
}

/// Sum of numbers.
pub fn sum<'a>(terms: impl IntoIterator<Item = &'a Dual>) -> Dual {
    terms.into_iter().fold(Dual::constant(0.0), |sum, x| &sum + x)
}

/// Sum of x weighted by softmax(x): a maximum with a gradient everywhere. 0 of no numbers.
pub fn soft_max(x: &[Dual]) -> Dual {
    let largest = x.iter().fold(f64::NEG_INFINITY, |m, x| m.max(x.value));
    if x.is_empty() {
        return Dual::constant(0.0);
    }
    let weights: Vec<Dual> = x.iter().map(|x| (x - &Dual::constant(largest)).exp()).collect();
    let weighted: Vec<Dual> = x.iter().zip(&weights).map(|(x, w)| x * w).collect();
    &sum(&weighted) / &sum(&weights)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derivatives_equal_finite_differences() {
        let f = |x: f64, y: f64, count: usize| {
            let of = |value, i| if count == 0 { Dual::constant(value) } else { Dual::variable(value, i, count) };
            let (x, y) = (of(x, 0), of(y, 1));
            let product = &(&x * &y) - &x.exp();
            let max = soft_max(&[x.clone(), y.scale(0.3), &x + &y]);
            &(&product.abs() / &y) + &(&max * &x.at_most(9.0))
        };
        let (x, y, h) = (0.7, 1.9, 1e-6);
        let exact = f(x, y, 2);
        let by_x = (f(x + h, y, 0).value - f(x - h, y, 0).value) / (2.0 * h);
        let by_y = (f(x, y + h, 0).value - f(x, y - h, 0).value) / (2.0 * h);
        assert!((exact.by(0) - by_x).abs() < 1e-8 && (exact.by(1) - by_y).abs() < 1e-8, "{exact:?} {by_x} {by_y}");
    }

    #[test]
    fn constants_have_no_derivative() {
        let x = Dual::variable(3.0, 0, 1);
        assert_eq!((x.detached().by(0), x.at_most(2.0).by(0), (&x - &x).abs().by(0)), (0.0, 0.0, 0.0));
    }
}
