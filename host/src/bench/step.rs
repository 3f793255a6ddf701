//! Whole steps of a recipe by class of operator, for `gantry train --profile` and `gantry bench RECIPE`.

use super::{Ceilings, Sample};
use crate::data::{Loader, Position};
use crate::error::Result;
use crate::observe::peak_bytes;
use crate::optim::schedule::Schedule;
use crate::plugin::PluginSet;
use crate::program::profile::Profile;
use crate::recipe::{Precision, Recipe};
use crate::train::{Hyper, engine};
use serde::Serialize;
use std::fmt::Write;
use std::time::Instant;

/// Name of the time that no operator has: reading batches, waiting for other ranks, everything in between.
const HOST: &str = "(host)";

/// Where the time of profiled steps went.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Breakdown {
    pub ranks: usize,
    pub steps: u64,
    /// Of all steps, by the clock.
    pub seconds: f64,
    pub tokens_per_second: f64,
    /// Arithmetic by count of one step, over all ranks.
    pub flops_per_step: f64,
    /// Of the whole machine.
    pub ceilings: Ceilings,
    /// Arithmetic by count per second, as a part of the machine's fastest matrix product.
    pub utilisation: f64,
    /// The most expensive first.
    pub classes: Vec<ClassShare>,
}

/// A class of operators, all ranks added up.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClassShare {
    pub class: String,
    pub launches: u64,
    pub seconds: f64,
    /// Of the ranks' time.
    pub share: f64,
    /// Operations and bytes per second / 1e9 while a rank was in it.
    pub gflops: f64,
    pub gigabytes: f64,
    /// Of what a rank's part of the machine can do at best, see `ceilings.rs`.
    pub of_ceiling: f64,
}

impl Breakdown {
    /// From all `ranks`' times added up, of `steps` steps that took `seconds` by the clock and learned `tokens` tokens.
    pub fn new(
        profile: &Profile,
        ranks: usize,
        steps: u64,
        seconds: f64,
        tokens: u64,
        ceilings: Ceilings,
    ) -> Breakdown {
        let (wall, part) = (seconds * ranks as f64, ceilings.part(ranks));
        let share = |seconds: f64| if wall > 0.0 { seconds / wall } else { 0.0 };
        let mut classes: Vec<ClassShare> = profile
            .classes
            .iter()
            .map(|(&name, class)| {
                let rate = |count: f64| if class.seconds > 0.0 { count / class.seconds / 1e9 } else { 0.0 };
                ClassShare {
                    class: name.into(),
                    launches: class.launches,
                    seconds: class.seconds,
                    share: share(class.seconds),
                    gflops: rate(class.flops),
                    gigabytes: rate(class.bytes),
                    of_ceiling: part.share(class.flops, class.bytes, class.seconds),
                }
            })
            .collect();
        let rest = (wall - profile.seconds()).max(0.0);
        classes.push(ClassShare {
            class: HOST.into(),
            launches: 0,
            seconds: rest,
            share: share(rest),
            gflops: 0.0,
            gigabytes: 0.0,
            of_ceiling: 0.0,
        });
        classes.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        let flops: f64 = profile.classes.values().map(|class| class.flops).sum();
        let per_second = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        Breakdown {
            ranks,
            steps,
            seconds,
            tokens_per_second: per_second(tokens as f64),
            flops_per_step: flops / steps.max(1) as f64,
            ceilings,
            utilisation: per_second(flops) / 1e9 / ceilings.gflops,
            classes,
        }
    }

    pub fn table(&self) -> String {
        let mut text = format!(
            "{:30} {:>9} {:>9} {:>7} {:>9} {:>8} {:>11}\n",
            "class", "launches", "seconds", "share", "GFLOP/s", "GB/s", "of ceiling"
        );
        // Writing to a String cannot fail.
        for class in &self.classes {
            let _ = writeln!(
                text,
                "{:30} {:>9} {:>9.3} {:>6.1}% {:>9.1} {:>8.1} {:>10.0}%",
                class.class,
                class.launches,
                class.seconds,
                100.0 * class.share,
                class.gflops,
                class.gigabytes,
                100.0 * class.of_ceiling
            );
        }
        let Ceilings { threads, gflops, gigabytes } = self.ceilings;
        let _ = writeln!(
            text,
            "{} steps on {} ranks: {:.0} tokens/s, {:.2} GFLOP a step, {:.1} GFLOP/s = {:.0} % of the matrix product",
            self.steps,
            self.ranks,
            self.tokens_per_second,
            self.flops_per_step / 1e9,
            self.utilisation * gflops,
            100.0 * self.utilisation
        );
        let _ = writeln!(
            text,
            "ceilings of {threads} threads: matrix product {gflops:.1} GFLOP/s, copy {gigabytes:.1} GB/s"
        );
        text
    }
}

/// What a recipe's steps take.
#[derive(Clone, Debug, Serialize)]
pub struct StepBench {
    pub recipe: String,
    pub step_seconds: Sample,
    pub tokens_per_second: Sample,
    pub memory_peak_bytes: u64,
    pub breakdown: Breakdown,
}

/// Ceilings for a recipe's type of number.
pub fn ceilings(recipe: &Recipe) -> Ceilings {
    match recipe.train.precision {
        Precision::Fp64 => Ceilings::measure::<f64>(),
        Precision::Fp32 | Precision::Bf16 => Ceilings::measure::<f32>(),
    }
}

/// Runs `steps` steps of a recipe after one that records, from its first parameters. Writes nothing.
pub fn measure(recipe: &Recipe, plugins: PluginSet, ranks: Option<usize>, steps: u64) -> Result<StepBench> {
    let loader = Loader::new(recipe, Position::default())?;
    let mut engine = engine::create(recipe, plugins, ranks)?;
    let schedule = Schedule::new(recipe);
    let (mut seconds, mut rates, mut all) = (Vec::new(), Vec::new(), 0);
    for step in 1..=steps + 1 {
        if step == 2 {
            engine.start_profile()?;
        }
        let (lr, weight_decay) = schedule.at_step(step);
        let clock = Instant::now();
        let hyper = Hyper { lr, weight_decay, update: step };
        let batches = (0..loader.micro_batches()).map(|i| loader.batch(step, i)).collect::<Result<Vec<_>>>()?;
        let report = engine.gradients(step, &|i| batches[i].clone(), hyper)?;
        engine.update(hyper)?;
        let taken = clock.elapsed().as_secs_f64();
        if step > 1 {
            all += report.tokens;
            rates.push(report.tokens as f64 / taken);
            seconds.push(taken);
        }
    }
    let wall = seconds.iter().sum();
    let memory_peak_bytes = peak_bytes();
    let (profile, ranks) = engine.take_profile()?.unwrap_or_default();
    // Twice, as other programs may be busy; only now, as the buffers of the copy would be the peak of memory.
    let ceilings = ceilings(recipe).or(ceilings(recipe));
    Ok(StepBench {
        recipe: recipe.name.clone(),
        step_seconds: Sample::of(seconds),
        tokens_per_second: Sample::of(rates),
        memory_peak_bytes,
        breakdown: Breakdown::new(&profile, ranks, steps, wall, all, ceilings),
    })
}

impl StepBench {
    pub fn human(&self) -> String {
        format!(
            "{}: step {:.2} ms +- {:.0} %, {:.0} tokens/s (median of {}), peak memory {:.1} MiB\n\n{}",
            self.recipe,
            1e3 * self.step_seconds.median,
            50.0 * self.step_seconds.spread,
            self.tokens_per_second.median,
            self.step_seconds.count,
            self.memory_peak_bytes as f64 / f64::from(1 << 20),
            self.breakdown.table()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gantry_kernels::Cost;
    use std::time::Duration;

    #[test]
    fn rates_and_shares_add_up() {
        let mut profile = Profile::default();
        for _ in 0..4 {
            profile.add("gemm", Duration::from_millis(500), Cost::new(3e9, 1e9), 4);
        }
        let ceilings = Ceilings { threads: 2, gflops: 24.0, gigabytes: 20.0 };
        let all = Breakdown::new(&profile, 2, 2, 2.0, 1000, ceilings);
        let gemm = ClassShare {
            class: "gemm".into(),
            launches: 4,
            seconds: 2.0,
            share: 0.5,
            gflops: 6.0,
            gigabytes: 8.0,
            // Of one rank's 12 GFLOP/s and 10 GB/s.
            of_ceiling: 0.8,
        };
        assert_eq!(all.classes.iter().find(|class| class.class == "gemm"), Some(&gemm));
        assert!((all.classes.iter().map(|class| class.share).sum::<f64>() - 1.0).abs() < 1e-12);
        assert_eq!((all.tokens_per_second, all.flops_per_step, all.utilisation), (500.0, 6e9, 0.25));
        let table = all.table();
        let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert!(lines.contains(&vec!["gemm", "4", "2.000", "50.0%", "6.0", "8.0", "80%"]), "{table}");
        assert!(lines.contains(&vec!["(host)", "0", "2.000", "50.0%", "0.0", "0.0", "0%"]), "{table}");
    }
}
