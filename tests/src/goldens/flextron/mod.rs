//! Kinds flextron_*: the elastifier `flextron` against the reference's own code.
//!
//! [`formulas`] has what needs no host, [`router`] the recorded router.

pub mod formulas;
pub mod router;

use super::case::{Case, Result};
use super::compare::Check;
use serde_json::Value;

/// The number under a key of a row.
fn number(row: &Value, key: &str) -> Result<f64> {
    row[key].as_f64().ok_or_else(|| format!("{key} is {}, not a number", row[key]))
}

fn size(row: &Value, key: &str) -> Result<usize> {
    row[key].as_u64().map(|n| n as usize).ok_or_else(|| format!("{key} is {}, not a size", row[key]))
}

fn flag(row: &Value, key: &str) -> Result<bool> {
    row[key].as_bool().ok_or_else(|| format!("{key} is {}, neither true nor false", row[key]))
}

fn text<'a>(row: &'a Value, key: &str) -> Result<&'a str> {
    row[key].as_str().ok_or_else(|| format!("{key} is {}, not a text", row[key]))
}

fn numbers(value: &Value) -> Result<Vec<f64>> {
    let list = value.as_array().ok_or_else(|| format!("{value} is no list"))?;
    list.iter().map(|x| x.as_f64().ok_or_else(|| format!("{x} is not a number"))).collect()
}

fn sizes(value: &Value) -> Result<Vec<usize>> {
    Ok(numbers(value)?.into_iter().map(|n| n as usize).collect())
}

fn rows(case: &Case) -> Result<&Vec<Value>> {
    case.json["rows"].as_array().ok_or_else(|| "the case has no rows".into())
}

/// An error if a result of any row (`case3.out.loss`) was not compared.
fn all_compared(check: &Check<'_>) -> Result<()> {
    let results = check.case.tensors.keys().filter(|name| name.contains(".out.") || name.contains(".grad."));
    match results.into_iter().find(|name| !check.has_compared(name)) {
        None => Ok(()),
        Some(missed) => Err(format!("{missed} was not compared")),
    }
}
