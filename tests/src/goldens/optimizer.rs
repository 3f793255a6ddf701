//! Kinds adam and lr_wd_schedule.

use super::case::{Result, Tensor};
use super::compare::Check;
use gantry::mesh::Grid;
use gantry::model::ParamTable;
use gantry::optim::schedule::{LearningRate, WeightDecay};
use gantry::optim::update::{AdamConfig, Moments, StepHyper, apply, clip, square};
use gantry::recipe::{ScheduleKind, WeightDecayKind, WsdDecay};
use gantry_kernels::Element;
use gantry_plugin_api::plan::{Block, Init, Layout, ModelPlan, Param, Stage};
use serde_json::Value;

/// adam: twelve steps of gradients; parameters and moments after each.
pub fn adam<T: Element>(check: &mut Check<'_>) -> Result<()> {
    let case = check.case;
    let names: Vec<String> =
        case.tensors.keys().filter_map(|name| name.strip_prefix("in.param.")).map(String::from).collect();
    let multiplier = |table: &str, name: &str| case.json[table][name].as_f64().ok_or(format!("no {table} of {name}"));
    let mut plan = ModelPlan { blocks: vec![Block::new("case", "test")], ..ModelPlan::default() };
    for name in &names {
        let Tensor { shape, .. } = case.tensor(&format!("in.param.{name}"))?;
        let mut param = Param::new(name, 0, shape.iter().map(|&n| Layout::Fixed(n)), Init::Zeros);
        param.lr_mult = multiplier("lr_mult", name)?;
        plan.params.push(param);
    }
    let table = ParamTable::new(&plan, &Stage { begin: 0, end: 1 }, Grid::SINGLE, Grid::SINGLE.place(0));
    let table = table.map_err(|e| e.to_string())?;
    for (entry, name) in table.params.iter().zip(&names) {
        if entry.wd_mult != multiplier("wd_mult", name)? {
            return Err(format!("weight decay of {name} is multiplied by {}", entry.wd_mult));
        }
    }
    let fill = |flat: &mut [T], tensor: &dyn Fn(&str) -> String| -> Result<()> {
        for (entry, name) in table.params.iter().zip(&names) {
            let values = &case.tensor(&tensor(name))?.data;
            flat[entry.stored.offset..].iter_mut().zip(values).for_each(|(to, &x)| *to = T::of(x));
        }
        Ok(())
    };
    let config = AdamConfig {
        beta1: case.number("beta1")?,
        beta2: case.number("beta2")?,
        eps: case.number("eps")?,
        decoupled: case.flag("decoupled")?,
        clip_grad: case.number("clip")?,
    };
    let mut params = vec![T::ZERO; table.param_len];
    fill(&mut params, &|name| format!("in.param.{name}"))?;
    let mut grads = vec![T::ZERO; table.param_len];
    let mut moments = Moments::new(table.param_len);
    let steps = case.json["steps"].as_array().ok_or("the case lists no steps")?;
    let mut norms = Vec::new();
    for row in steps {
        let number = row["step"].as_u64().ok_or("a step has no number")?;
        fill(&mut grads, &|name| format!("in.grad.{name}.step{number}"))?;
        let lr = row["lr"].as_f64().ok_or("a step has no lr")?;
        let hyper = StepHyper { lr, weight_decay: case.number("wd")?, step: number };
        let sum = square(&table, &grads, 0);
        let (scale, norm) = clip(&config, sum);
        apply(&config, hyper, &table, scale, &grads, &mut params, &mut moments);
        norms.push(norm);
        for (what, flat) in [("param", &params), ("exp_avg", &moments.exp_avg), ("exp_avg_sq", &moments.exp_avg_sq)] {
            for (entry, name) in table.params.iter().zip(&names) {
                let values: Vec<f64> =
                    flat[entry.stored.offset..][..entry.stored.len].iter().map(|x| x.to_f64()).collect();
                // Cases state the results of some of the steps.
                let golden = format!("out.{what}.{name}.step{number}");
                if case.has(&golden) {
                    check.tensor(&golden, &values)?;
                }
            }
        }
    }
    let golden: Vec<f64> = steps.iter().filter_map(|row| row["grad_norm"].as_f64()).collect();
    check.numbers("grad_norm", &norms, &golden, 1)
}

/// lr_wd_schedule: rates after n finished steps, which are always f64.
pub fn schedule(check: &mut Check<'_>) -> Result<()> {
    let cases = check.case.json["cases"].as_array().ok_or("the case lists no cases")?;
    for (index, case) in cases.iter().enumerate() {
        let groups = case["param_groups"].as_array().ok_or("a case has no param_groups")?;
        for (at, group) in groups.iter().enumerate() {
            curves(check, index, at, case, group).map_err(|e| format!("cases[{index}], group {at}: {e}"))?;
        }
    }
    Ok(())
}

/// Compares the curves of one parameter group.
fn curves(check: &mut Check<'_>, index: usize, at: usize, case: &Value, group: &Value) -> Result<()> {
    let args = &case["args"];
    // A group's own settings come before those of all.
    let of = |key: &str| {
        let value = group.get(key).or_else(|| args.get(key)).and_then(Value::as_f64);
        value.ok_or_else(|| format!("no {key}"))
    };
    let steps = |key: &str| of(key).map(|n| n as u64);
    let text = |key: &str| args[key].as_str().ok_or_else(|| format!("no {key}"));
    let kind = match text("lr_decay_style")? {
        "constant" => ScheduleKind::Constant,
        "linear" => ScheduleKind::Linear,
        "cosine" => ScheduleKind::Cosine,
        "inverse-square-root" => ScheduleKind::InverseSquareRoot,
        "WSD" => ScheduleKind::Wsd,
        other => return Err(format!("lr_decay_style {other:?} is not known")),
    };
    let (wsd_decay, wsd_decay_steps) = match kind {
        ScheduleKind::Wsd => {
            let decay = match text("lr_wsd_decay_style")? {
                "linear" => WsdDecay::Linear,
                "cosine" => WsdDecay::Cosine,
                "exponential" => WsdDecay::Exponential,
                "minus_sqrt" => WsdDecay::MinusSqrt,
                other => return Err(format!("lr_wsd_decay_style {other:?} is not known")),
            };
            (decay, steps("wsd_decay_steps")?)
        }
        _ => (WsdDecay::Linear, 0),
    };
    let lr = LearningRate {
        kind,
        init: of("init_lr")?,
        max: of("max_lr")?,
        min: of("min_lr")?,
        warmup_steps: steps("lr_warmup_steps")?,
        decay_steps: steps("lr_decay_steps")?,
        wsd_decay_steps,
        wsd_decay,
    };
    let weight_decay = WeightDecay {
        kind: match text("wd_incr_style")? {
            "constant" => WeightDecayKind::Constant,
            "linear" => WeightDecayKind::Linear,
            "cosine" => WeightDecayKind::Cosine,
            other => return Err(format!("wd_incr_style {other:?} is not known")),
        },
        start: of("start_wd")?,
        end: of("end_wd")?,
        steps: steps("wd_incr_steps")?,
    };
    let wd_mult = group["wd_mult"].as_f64().unwrap_or(1.0);
    let rows = case["values"].as_array().ok_or("no values")?;
    let mut golden = Vec::new();
    let mut values = Vec::new();
    for row in rows {
        let n = row[0].as_u64().ok_or("a row has no number of steps")?;
        let number = |column: usize| row[column][at].as_f64().ok_or("a row lacks a group");
        golden.extend([number(1)?, number(2)?]);
        values.extend([lr.after(n), wd_mult * weight_decay.after(n)]);
    }
    check.numbers(&format!("cases[{index}] group {at}"), &values, &golden, 1)
}
