//! `gantry bench`: operators, or a recipe's step, against what the machine can do.

use super::{args, print};
use crate::bench::{Ceilings, cases, operators, step};
use crate::failure::{Failure, Result};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

/// How long a case is measured.
const TIME: Duration = Duration::from_millis(300);
/// Steps of a recipe.
const STEPS: u32 = 10;

pub(super) fn run(arguments: args::Bench) -> Result<()> {
    let what = arguments.what.as_deref().unwrap_or_default();
    let is_recipe = Path::new(what).is_file() || [".yaml", ".yml"].iter().any(|end| what.ends_with(end));
    if is_recipe {
        let recipe = args::recipe(Path::new(what), arguments.set, None)?;
        let plugins = super::plugins(&recipe)?;
        let ranks = arguments.ranks.map(|n| n as usize);
        let measured = step::measure(&recipe, plugins, ranks, u64::from(arguments.steps.unwrap_or(STEPS)))?;
        return if arguments.json { print_json(&json!(measured)) } else { print(&measured.human()) };
    }
    let given = [
        ("--set", !arguments.set.is_empty()),
        ("--steps", arguments.steps.is_some()),
        ("--ranks", arguments.ranks.is_some()),
    ];
    if let Some((option, _)) = given.into_iter().find(|(_, given)| *given) {
        return Err(Failure::recipe(format!("{option} has no effect without a recipe")));
    }
    let wanted: Vec<&str> = what.split(',').filter(|name| !name.is_empty()).collect();
    let known: Vec<&str> = cases::all(64, 32).iter().map(|case| case.operator).collect();
    if let Some(unknown) = wanted.iter().find(|name| !known.contains(name)) {
        return Err(Failure::recipe(format!("no operator is called {unknown:?}, and no recipe file"))
            .detail(format!("operators: {}", known.join(", "))));
    }
    let ceilings = Ceilings::measure::<f32>();
    let mut measured = Vec::new();
    for (tokens, hidden) in cases::SIZES {
        for case in cases::all(tokens, hidden) {
            if wanted.is_empty() || wanted.contains(&case.operator) {
                measured.extend(operators::measure::<f32>(&case, TIME)?);
            }
        }
    }
    // The sizes of an operator stand together.
    measured.sort_by_key(|m| (known.iter().position(|name| *name == m.operator), m.class));
    // Once more: other programs may have been busy the first time.
    let ceilings = ceilings.or(Ceilings::measure::<f32>());
    if arguments.json {
        let rows: Vec<Value> = measured
            .iter()
            .map(|m| {
                let mut row = json!(m);
                row["of_ceiling"] = ceilings.share(m.flops, m.bytes, m.seconds.median).into();
                row
            })
            .collect();
        return print_json(&json!({"ceilings": ceilings, "operators": rows}));
    }
    print(&human(&ceilings, &measured))
}

fn print_json(value: &Value) -> Result<()> {
    print(&format!("{value:#}\n"))
}

fn human(ceilings: &Ceilings, measured: &[operators::Measured]) -> String {
    let mut text = format!(
        "ceilings of {} threads, f32: matrix product {:.1} GFLOP/s, copy {:.1} GB/s\n\n",
        ceilings.threads, ceilings.gflops, ceilings.gigabytes
    );
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "{:30} {:>14} {:>10} {:>6} {:>6} {:>9} {:>8} {:>11}",
        "kernel", "size", "median ms", "+- %", "count", "GFLOP/s", "GB/s", "of ceiling"
    );
    for m in measured {
        let seconds = m.seconds.median.max(f64::MIN_POSITIVE);
        let _ = writeln!(
            text,
            "{:30} {:>14} {:>10.3} {:>6.0} {:>6} {:>9.1} {:>8.1} {:>10.0}%",
            m.class,
            m.size,
            1e3 * seconds,
            50.0 * m.seconds.spread,
            m.seconds.count,
            m.flops / seconds / 1e9,
            m.bytes / seconds / 1e9,
            100.0 * ceilings.share(m.flops, m.bytes, seconds)
        );
    }
    text
}
