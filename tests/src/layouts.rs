//! Small models on several layouts: what parity tests share.

use gantry::checkpoint::LogicalTensor;
use gantry::data::Batch;
use gantry::error::Result;
use gantry::mesh::Grid;
use gantry::optim::update::{AdamConfig, StepHyper};
use gantry::train::record::Tamper;
use gantry::train::team::{ElasticSpec, Kind, Team, TeamSpec};
use gantry_kernels::philox::Stream;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Tokens of a micro-batch in these tests.
pub const TOKENS: usize = 24;

/// A hybrid with every kind of layer, all auxiliary losses and expert bias; small and divisible by 2 everywhere.
pub fn hybrid() -> Value {
    json!({
        "pattern": "ME*-", "hidden_size": 16, "vocab_size": 32,
        "mamba_num_heads": 8, "mamba_head_dim": 4, "mamba_num_groups": 2, "mamba_state_dim": 3, "mamba_chunk_size": 4,
        "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 6, "ffn_hidden_size": 20,
        "num_moe_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 12,
        "moe_shared_expert_intermediate_size": 8, "moe_router_topk_scaling_factor": 2.5,
        "moe_aux_loss_coeff": 0.05, "moe_seq_aux_loss_coeff": 0.03, "moe_global_aux_loss_coeff": 0.04,
        "moe_z_loss_coeff": 0.01,
        "moe_router_enable_expert_bias": true, "moe_router_bias_update_rate": 0.01,
        "add_bias_linear": true, "init_method_std": 0.3,
    })
}

/// The dense example.
pub fn dense() -> Value {
    json!({
        "num_layers": 3, "hidden_size": 16, "vocab_size": 32, "num_attention_heads": 4, "num_query_groups": 2,
        "kv_channels": 6, "ffn_hidden_size": 20, "init_method_std": 0.3,
    })
}

/// A team's description with everything at its default.
pub fn spec(provider: &str, config: Value, grid: Grid) -> TeamSpec {
    let plugins = crate::plugins::providers(&[provider]);
    TeamSpec {
        plugins,
        provider: provider.into(),
        config,
        grid,
        seed: 11,
        elastic: ElasticSpec::Off,
        teacher: None,
        trains: true,
        frozen: false,
        check_purity: true,
        state_grads: false,
        timeout: Duration::from_secs(60),
        tamper: None,
    }
}

/// Micro-batch `index` of step `step`: random tokens in packed documents of uneven lengths, some positions masked.
pub fn batch(step: u64, index: usize) -> Batch {
    let stream = Stream::new(77, index as u32, step as u32);
    let token = |i: usize| (stream.uniform(i as u64) * 31.0) as i32;
    let cut = 5 + (index + step as usize) % 9;
    let t = TOKENS as i32;
    Batch {
        tokens: (0..TOKENS).map(token).collect(),
        labels: (1..=TOKENS).map(token).collect(),
        loss_mask: (0..TOKENS).map(|i| if stream.uniform(1000 + i as u64) < 0.2 { 0.0 } else { 1.0 }).collect(),
        cu_seqlens: vec![0, cut as i32, cut as i32 + 1, t, t],
        first_sample: index as u64,
        samples: 1,
    }
}

/// What a run did, in logical order: comparable between layouts.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    pub numbers: Vec<(String, f64)>,
    pub tensors: BTreeMap<String, Vec<f64>>,
}

/// Settings of Adam for these tests: clipping active, so that a wrong norm shows.
pub const ADAM: AdamConfig = AdamConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, decoupled: true, clip_grad: 0.5 };

/// Trains `steps` steps of `micro_batches` micro-batches; records losses, norms, the first step's gradients, and the
/// parameters and buffers at the end. `prepare` may change the ranks first.
pub fn train(
    spec: &TeamSpec,
    steps: u64,
    micro_batches: usize,
    batch: impl Fn(u64, usize) -> Batch,
    prepare: impl Fn(&Team<f64>) -> Result<()>,
) -> Result<Trace> {
    let team = Team::<f64>::start(spec)?;
    prepare(&team)?;
    let mut trace = Trace::default();
    for step in 1..=steps {
        let batches: Arc<Vec<(usize, Arc<Batch>)>> =
            Arc::new((0..micro_batches).map(|i| (i, Arc::new(batch(step, i)))).collect());
        let dp = team.grid.dp;
        let results = team.all(move |rank| {
            let mine: Vec<_> = batches.iter().filter(|(i, _)| i % dp == rank.model.place.dp).cloned().collect();
            rank.gradients(step, &mine)
        })?;
        if step == 1 {
            collect(&team, Kind::Grads, &mut trace)?;
            collect(&team, Kind::RouterGrads, &mut trace)?;
        }
        let norms = team.all(move |rank| rank.update(&ADAM, StepHyper { lr: 0.02, weight_decay: 0.1, step }))?;
        let sums = &results[0];
        for (name, value) in [
            ("loss", sums.loss),
            ("tokens", sums.tokens),
            ("objective", sums.objective),
            ("load", sums.load_max_over_mean.unwrap_or(0.0)),
            ("norm", norms[0]),
        ] {
            trace.numbers.push((format!("step {step} {name}"), value));
        }
        for (label, sums) in &sums.labels {
            let numbers =
                [("micro_batches", sums.micro_batches), ("loss", sums.loss), ("choice_loss", sums.choice_loss)];
            let numbers = numbers.map(|(what, x)| (format!("step {step} {what} of {label}"), x));
            trace.numbers.extend(numbers);
        }
    }
    collect(&team, Kind::Params, &mut trace)?;
    collect(&team, Kind::Router, &mut trace)?;
    collect(&team, Kind::Buffers, &mut trace)?;
    Ok(trace)
}

/// Adds every tensor of a kind to a trace.
pub fn collect(team: &Team<f64>, kind: Kind, trace: &mut Trace) -> Result<()> {
    for tensors in team.gather(kind) {
        for LogicalTensor { name, data, .. } in tensors? {
            trace.tensors.insert(format!("{}{name}", kind.prefix()), data.into_f64());
        }
    }
    Ok(())
}

/// ||a - b|| / max(||a||, ||b||).
pub fn relative_l2(a: &[f64], b: &[f64]) -> f64 {
    if a.len() != b.len() {
        return f64::INFINITY;
    }
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let scale = norm(&mut a.iter().copied()).max(norm(&mut b.iter().copied()));
    let diff = norm(&mut a.iter().zip(b).map(|(a, b)| a - b));
    if scale == 0.0 || diff.is_nan() { if diff == 0.0 { 0.0 } else { f64::INFINITY } } else { diff / scale }
}

/// The largest disagreement of two traces, with its name; a gradient's error is relative to the largest of its kind, so
/// that rounding of a vanishing one does not count.
pub fn worst(a: &Trace, b: &Trace) -> (f64, String) {
    let mut worst = (0.0, String::from("nothing"));
    let mut see = |error: f64, name: &str| {
        if error > worst.0 || error.is_nan() {
            worst = (if error.is_nan() { f64::INFINITY } else { error }, name.into());
        }
    };
    for ((name, x), (other, y)) in a.numbers.iter().zip(&b.numbers) {
        assert_eq!(name, other);
        see((x - y).abs() / x.abs().max(y.abs()).max(1e-3), name);
    }
    let keys = |t: &Trace| t.tensors.keys().cloned().collect::<Vec<_>>();
    if keys(a) != keys(b) {
        return (f64::INFINITY, "the sets of tensors".into());
    }
    for (name, x) in &a.tensors {
        see(relative_l2(x, &b.tensors[name]), name);
    }
    worst
}

/// A tampering of one rank's records.
pub fn tamper(
    f: impl Fn(&mut gantry::program::graph::Graph, gantry::mesh::Place) + Send + Sync + 'static,
) -> Option<Tamper> {
    Some(Arc::new(f))
}
