//! The widths an axis may take: integers or fractions of its size, largest first.

use crate::Result;
use schemars::JsonSchema;
use serde::Deserialize;

/// How a config states the widths of an axis.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum Widths {
    /// Units.
    Units(Vec<usize>),
    /// Fractions of the axis's units, in (0, 1]; a width is floor(fraction * size).
    Fractions(Vec<f64>),
}

/// floor(fraction * size), as the reference converts fractions.
pub fn width_of(fraction: f64, size: usize) -> usize {
    (fraction * size as f64) as usize
}

/// The choices of an axis of `size` units: at least one, strictly falling, each at least one unit and a multiple of
/// `multiple` (the number of groups that the units come in).
pub fn choices(axis: &str, widths: &Widths, size: usize, multiple: usize) -> Result<Vec<usize>> {
    let chosen: Vec<usize> = match widths {
        Widths::Units(units) => units.clone(),
        Widths::Fractions(fractions) => {
            if let Some(x) = fractions.iter().find(|x| !(**x > 0.0 && **x <= 1.0)) {
                return Err(format!("axis {axis}: fraction {x} is not in (0, 1]"));
            }
            fractions.iter().map(|&x| width_of(x, size)).collect()
        }
    };
    if chosen.is_empty() {
        return Err(format!("axis {axis} has no choices; give at least its full width, {size}"));
    }
    for &n in &chosen {
        if n == 0 || n > size {
            return Err(format!("axis {axis}: a width of {n} units is not between 1 and {size}"));
        }
        if !n.is_multiple_of(multiple) {
            return Err(format!(
                "axis {axis}: {n} of {size} units do not divide into its {multiple} groups; choose multiples of {multiple}"
            ));
        }
    }
    if let Some(pair) = chosen.windows(2).find(|pair| pair[1] >= pair[0]) {
        return Err(format!(
            "axis {axis}: width {} follows {}; list widths largest first, each once",
            pair[1], pair[0]
        ));
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_round_down() {
        let widths = Widths::Fractions(vec![1.0, 0.857, 0.33]);
        assert_eq!(choices("hidden", &widths, 2688, 1), Ok(vec![2688, 2303, 887]));
    }

    #[test]
    fn mistakes_name_the_axis_and_the_numbers() {
        let check = |widths, multiple| choices("heads", &widths, 64, multiple).unwrap_err();
        assert_eq!(check(Widths::Units(vec![]), 1), "axis heads has no choices; give at least its full width, 64");
        assert_eq!(check(Widths::Units(vec![65]), 1), "axis heads: a width of 65 units is not between 1 and 64");
        assert!(check(Widths::Units(vec![64, 0]), 1).contains("0 units"));
        assert!(check(Widths::Units(vec![64, 60]), 8).contains("multiples of 8"));
        assert!(check(Widths::Units(vec![64, 64]), 8).contains("largest first, each once"));
        assert!(check(Widths::Fractions(vec![1.2]), 1).contains("1.2 is not in (0, 1]"));
        assert!(check(Widths::Fractions(vec![f64::NAN]), 1).contains("NaN"));
        assert!(check(Widths::Fractions(vec![0.001]), 1).contains("0 units"));
    }
}
