//! Schedules, choices, sampling of budgets, sizes, budget loss and the assembly of losses.

use super::super::case::Result;
use super::super::compare::Check;
use super::{all_compared, flag, number, numbers, rows, size, sizes, text};
use flextron::budget::Budgets;
use flextron::budget::reference::Sequence;
use flextron::choices::width_of;
use flextron::dual::Dual;
use flextron::loss::{Assembly, Choices, Expected, Routed, budget_loss};
use flextron::schedule;
use flextron::sizes::reference::{Model, Widths};
use flextron::sizes::{Bytes, Counts, Inference, MemoryProfile, Target};
use serde_json::Value;

/// Kind flextron_schedules. Its Gumbel seeds are torch's generator's, which nothing here repeats: cases with noise give it.
pub fn schedules(check: &mut Check<'_>) -> Result<()> {
    let json = &check.case.json;
    let list = |key: &str| json[key].as_array().ok_or_else(|| format!("the case has no {key}"));
    for (i, row) in list("tau")?.iter().enumerate() {
        let (init, decay) = (number(row, "tau_init")?, number(row, "tau_decay")?);
        let values: Vec<f64> =
            numbers(&row["iterations"])?.iter().map(|&n| schedule::tau(init, decay, n as u64)).collect();
        check.numbers(&format!("tau[{i}]"), &values, &numbers(&row["tau"])?, 1)?;
    }
    for (i, row) in list("linear_scaler")?.iter().enumerate() {
        let (start, end, steps) = (number(row, "start")?, number(row, "end")?, size(row, "steps")? as u64);
        let values: Vec<f64> = (0..steps).map(|n| schedule::scaler(start, end, n, steps)).collect();
        check.numbers(&format!("linear_scaler[{i}]"), &values, &numbers(&row["values"])?, 1)?;
    }
    let (before, after) = {
        let sorting = &json["sort_budget_list_descending"];
        (&sorting["before"], &sorting["after"])
    };
    let budgets = Budgets::new(&numbers(&before["budget_list"])?, Some(&numbers(&before["budget_probs"])?))?;
    check.numbers("budget_list", &budgets.list, &numbers(&after["budget_list"])?, 1)?;
    // Ours are normalised at once.
    let probs = numbers(&after["budget_probs"])?;
    let total: f64 = probs.iter().sum();
    let probs: Vec<f64> = probs.iter().map(|p| p / total).collect();
    check.numbers("budget_probs", &budgets.probs, &probs, 1)?;
    let conversion = &json["per_list_to_int_list"];
    let dims = conversion["dims"].as_object().ok_or("per_list_to_int_list has no dims")?;
    for axis in dims.keys() {
        let of = size(&conversion["dims"], axis)?;
        let widths: Vec<f64> =
            numbers(&conversion["per"][axis])?.iter().map(|&fraction| width_of(fraction, of) as f64).collect();
        check.numbers(&format!("ints.{axis}"), &widths, &numbers(&conversion["ints"][axis])?, 1)?;
    }
    Ok(())
}

/// Kind flextron_budget_choice: which budget each micro-batch trains in the reference.
pub fn budget_choice(check: &mut Check<'_>) -> Result<()> {
    for (i, row) in rows(check.case)?.iter().enumerate() {
        let config = &row["config"];
        let probs = if config["probs"].is_null() { None } else { Some(numbers(&config["probs"])?) };
        let budgets = Budgets::new(&numbers(&config["budgets"])?, probs.as_deref())?;
        let micro_batches = size(row, "grad_accumulation_steps")? as u64;
        let mut walk = Sequence::new(number(config, "p_full")?, budgets, micro_batches);
        let mut asked = walk.clone();
        let sequence = row["sequence"].as_array().ok_or("a row has no sequence")?;
        let golden = |key: &str| sequence.iter().map(|draw| number(draw, key)).collect::<Result<Vec<f64>>>();
        let draws: Vec<_> = sequence.iter().map(|_| walk.advance()).collect();
        let of = |f: fn(&flextron::budget::reference::Draw) -> f64| draws.iter().map(f).collect::<Vec<f64>>();
        check.numbers(&format!("uniform[{i}]"), &of(|d| d.uniform), &golden("uniform")?, 1)?;
        check.numbers(&format!("budget[{i}]"), &of(|d| d.budget), &golden("budget")?, 1)?;
        check.numbers(&format!("counter[{i}]"), &of(|d| d.counter as f64), &golden("counter_after")?, 1)?;
        // Asked by iteration and micro-batch, backwards.
        let mut by_number = Vec::new();
        for draw in sequence.iter().rev() {
            by_number.push(asked.budget(size(draw, "iteration")? as u64, size(draw, "microbatch")? as u64));
        }
        by_number.reverse();
        check.numbers(&format!("budget by number[{i}]"), &by_number, &golden("budget")?, 1)?;
    }
    Ok(())
}

fn model(config: &Value, tied: bool) -> Result<Model> {
    Ok(Model {
        pattern: text(config, "pattern")?.into(),
        mamba_head_dim: number(config, "m_dim")?,
        mamba_state_dim: number(config, "m_state")?,
        query_groups: number(config, "kv")?,
        kv_channels: number(config, "kvc")?,
        vocab: number(config, "vocab")?,
        tied,
        topk: number(config, "topk")?,
        shared_ffn: number(config, "shared")?,
    })
}

/// A width as the case writes it: a number, or a list with a number or a list of one number for each layer.
fn width(config: &Value, key: &str) -> Result<Vec<Dual>> {
    let value = &config[key];
    let one = |x: &Value| match x.as_array() {
        Some(list) if list.len() == 1 => {
            number(&Value::Object([("x".into(), list[0].clone())].into_iter().collect()), "x")
        }
        _ => x.as_f64().ok_or_else(|| format!("{key} holds {x}, not a number")),
    };
    let values = match value.as_array() {
        Some(list) => list.iter().map(one).collect::<Result<Vec<f64>>>()?,
        None => vec![one(value)?],
    };
    Ok(values.into_iter().map(Dual::constant).collect())
}

fn widths(config: &Value) -> Result<Widths> {
    Ok(Widths {
        hidden: width(config, "hidden")?.swap_remove(0),
        ffn: width(config, "ffn")?,
        mamba_heads: width(config, "m_heads")?,
        attention_heads: width(config, "heads")?,
        experts: width(config, "experts")?,
    })
}

fn target(name: &str) -> Result<Target> {
    match name {
        "active" => Ok(Target::Active),
        "total" => Ok(Target::Total),
        other => Err(format!("unknown target {other}")),
    }
}

/// Kind flextron_sizes: the reference's formulas for parameters, caches, buffers and memory.
pub fn formula_sizes(check: &mut Check<'_>) -> Result<()> {
    let profiles = check.case.json["profiles"].as_object().ok_or("the case has no profiles")?;
    for (i, row) in rows(check.case)?.iter().enumerate() {
        let config = &row["config"];
        let at = Inference {
            seq_length: size(row, "mem_infer_seq_len")? as u64,
            batch_size: size(row, "mem_batch_size")? as u64,
            prefill_chunk: size(row, "prefill_chunk_size")? as u64,
        };
        let counts = model(config, flag(row, "tied_vocab")?)?.counts(&widths(config)?, at);
        let values = [
            ("params_all", &counts.total),
            ("params_active", &counts.active),
            ("kv_cache_elements", &counts.kv_cache),
            ("mamba_ssm_cache_elements", &counts.ssm_cache),
            ("max_buffer_elements", &counts.buffer),
        ];
        for (key, value) in values {
            check.numbers(&format!("{key}[{i}]"), &[value.value], &[number(row, key)?], 1)?;
        }
        for (name, profile) in profiles {
            let bytes = Bytes {
                params: number(profile, "bpe_params")?,
                kv_cache: number(profile, "bpe_kv_cache")?,
                ssm_cache: number(profile, "bpe_ssm_cache")?,
                buffer: number(profile, "bpe_max_buffer")?,
            };
            // Names that are ours too mean the same here.
            let ours = MemoryProfile { profile: Some(name.clone()), ..MemoryProfile::default() }.bytes();
            if ours.as_ref().is_ok_and(|ours| *ours != bytes) {
                return Err(format!("profile {name} is {ours:?} here and {bytes:?} in the case"));
            }
            let gib = counts.gib(&bytes, target(text(profile, "param_budget_target")?)?);
            check.numbers(&format!("memory.{name}[{i}]"), &[gib.value], &[number(&row["memory_gib"], name)?], 1)?;
        }
    }
    Ok(())
}

/// The reference's names of the routed axes, in the order of [`expected_widths`].
const AXES: [&str; 4] = ["mamba", "emb", "mlp", "moe_expert"];

/// Expected widths as the reference's formulas take them: with layer skipping, one for each layer of a kind.
fn expected_widths(expected: &Expected, pattern: &str, heads: f64) -> Widths {
    let layers = |symbol: char| -> Vec<usize> {
        pattern.chars().enumerate().filter(|(_, c)| *c == symbol).map(|(layer, _)| layer).collect()
    };
    let of = |rows: &[Dual], symbol: char| -> Vec<Dual> {
        if expected.keep.is_empty() {
            return rows.to_vec();
        }
        let keep = |layer| expected.keep.get(&layer).cloned().unwrap_or_else(|| Dual::constant(1.0));
        let row = |i: usize| if rows.len() == 1 { &rows[0] } else { &rows[i] };
        layers(symbol).into_iter().enumerate().map(|(i, layer)| row(i) * &keep(layer)).collect()
    };
    let [mamba, emb, mlp, experts] = [0, 1, 2, 3].map(|i| expected.units[i].as_slice());
    Widths {
        hidden: emb[0].clone(),
        ffn: of(mlp, 'E'),
        mamba_heads: of(mamba, 'M'),
        attention_heads: of(&[Dual::constant(heads)], '*'),
        experts: of(experts, 'E'),
    }
}

/// Kind flextron_budget_loss: its value and its gradient by the router's probabilities.
pub fn loss(check: &mut Check<'_>) -> Result<()> {
    let case = check.case;
    let config = &case.json["config"];
    let (model, full) = (model(config, false)?, widths(config)?);
    for row in rows(case)? {
        let name = |part: &str| format!("case{}.{part}", row["case"]);
        let mut outputs = Vec::new();
        for axis in AXES {
            let tensor = case.tensor(&name(&format!("in.router_{axis}")))?;
            let choices = sizes(&case.json["int_lists"][axis])?;
            let rows = tensor.data.chunks(choices.len()).map(<[f64]>::to_vec).collect();
            outputs.push(Routed { choices: Choices::Units(choices), rows });
        }
        if flag(row, "skip")? {
            let p = case.data(&name("in.router_skip"))?;
            outputs.push(Routed { choices: Choices::Depth(sizes(&row["layer_ranking_list"])?), rows: vec![p] });
        }
        let at = Inference {
            seq_length: size(row, "seq")? as u64,
            batch_size: size(row, "bs")? as u64,
            prefill_chunk: size(row, "chunk")? as u64,
        };
        let bytes =
            MemoryProfile { profile: Some(text(row, "profile")?.into()), ..MemoryProfile::default() }.bytes()?;
        let (target, budget) = (target(text(row, "target")?)?, number(row, "budget_item")?);
        let expected = Expected::of(&outputs);
        let counts = model.counts(&expected_widths(&expected, &model.pattern, number(config, "heads")?), at);
        let whole = model.counts(&full, at);
        let (size, aim) = match text(row, "type")? {
            "param" => (counts.params(target).clone(), budget * whole.params(target).value),
            "mem" => (counts.gib(&bytes, target), budget),
            other => return Err(format!("unknown budget type {other}")),
        };
        check_full(check, row, &whole, &bytes, target)?;
        let loss = budget_loss(&outputs, budget, &size, aim);
        check.tensor(&name("out.loss"), &[loss.value])?;
        check.numbers(&name("loss"), &[loss.value], &[number(row, "loss")?], 1)?;
        let mut index = 0;
        for (axis, routed) in AXES.iter().chain(&["skip"]).zip(&outputs) {
            let count = routed.rows.iter().map(Vec::len).sum::<usize>();
            let grad: Vec<f64> = (index..index + count).map(|i| loss.by(i)).collect();
            check.tensor(&name(&format!("grad.router_{axis}")), &grad)?;
            index += count;
        }
    }
    all_compared(check)
}

fn check_full(check: &mut Check<'_>, row: &Value, whole: &Counts, bytes: &Bytes, target: Target) -> Result<()> {
    let case = &row["case"];
    let values = [
        ("all_param", whole.total.value),
        ("active_param", whole.active.value),
        ("total_memory_gib", whole.gib(bytes, target).value),
    ];
    values
        .into_iter()
        .try_for_each(|(key, value)| check.numbers(&format!("case{case}.{key}"), &[value], &[number(row, key)?], 1))
}

/// Kind flextron_loss_assembly: how cross entropy, divergence from a teacher and budget loss add up.
pub fn assembly(check: &mut Check<'_>) -> Result<()> {
    let masked = |row: &Value, key: &str, mask: &[f64]| -> Result<f64> {
        let lines = row[key].as_array().ok_or_else(|| format!("{key} is no list"))?;
        let values = lines.iter().map(numbers).collect::<Result<Vec<_>>>()?.concat();
        Ok(values.iter().zip(mask).map(|(x, m)| x * m).sum())
    };
    let flat = |value: &Value| -> Result<Vec<f64>> {
        let lines = value.as_array().ok_or("no list")?;
        Ok(lines.iter().map(numbers).collect::<Result<Vec<_>>>()?.concat())
    };
    for (i, row) in rows(check.case)?.iter().enumerate() {
        let mask = flat(&row["loss_mask"])?;
        let tokens: f64 = mask.iter().sum();
        let assembly = Assembly {
            alpha: number(row, "loss_alpha")?,
            beta: number(row, "router_beta")?,
            freeze_router: flag(row, "freeze_router")?,
        };
        let budget = number(row, "param_loss")?;
        let cross_entropy = masked(row, "losses", &mask)?;
        let model_loss = if flag(row, "kd")? { masked(row, "kd_losses", &mask)? } else { cross_entropy };
        let term = assembly.total(0.0, budget, tokens);
        let report = |key: &str| numbers(&row["report"][key]).map(|pair| pair[0]);
        let values = [
            ("total", assembly.total(model_loss, budget, tokens), number(row, "total")?),
            ("tokens", tokens, number(row, "num_tokens")?),
            ("lm loss", cross_entropy, report("lm loss")?),
            ("param loss item", term, report("param loss item")?),
            ("grad_param_loss", assembly.factor(budget, tokens), number(row, "grad_param_loss")?),
        ];
        for (key, value, golden) in values {
            check.numbers(&format!("{key}[{i}]"), &[value], &[golden], 1)?;
        }
    }
    // The reference's own loss function, used where its distillation package is missing.
    for (i, row) in check.case.json["plain_script_rows"].as_array().into_iter().flatten().enumerate() {
        let mask = flat(&row["loss_mask"])?;
        let tokens: f64 = mask.iter().sum();
        let (alpha, beta) = (number(row, "loss_alpha")?, number(row, "router_beta")?);
        let assembly = Assembly { alpha, beta, freeze_router: false };
        let term = assembly.total(0.0, number(row, "param_loss")?, tokens);
        let total = masked(row, "losses", &mask)? + term;
        check.numbers(&format!("plain total[{i}]"), &[total], &[number(row, "total")?], 1)?;
    }
    Ok(())
}
