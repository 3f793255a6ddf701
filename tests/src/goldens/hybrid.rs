//! Kind hybrid_tiny_megatron: the nemotron-hybrid provider, loaded as a plugin, in the real engine on one rank.

use super::case::{self, Case, Result};
use super::compare::{Check, Precision};
use crate::plugins::providers;
use gantry::data::Batch;
use gantry::mesh::Grid;
use gantry::plugin::PluginSet;
use gantry::train::team::{ElasticSpec, Kind, Team, TeamSpec};
use gantry_kernels::Element;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub(super) fn text(e: impl std::fmt::Display) -> String {
    e.to_string()
}

/// The provider's config for a case's.
fn config(case: &Case) -> Value {
    let c = &case.json["config"];
    let mut config = json!({
        "pattern": c["pattern"], "hidden_size": c["hidden"], "vocab_size": c["vocab"],
        "num_attention_heads": c["heads"], "num_query_groups": c["kv_heads"], "kv_channels": c["head_dim"],
        "ffn_hidden_size": c["ffn"],
        "mamba_num_heads": c["m_heads"], "mamba_head_dim": c["m_head_dim"], "mamba_num_groups": c["m_groups"],
        "mamba_state_dim": c["m_state"],
        "num_moe_experts": c["experts"], "moe_router_topk": c["topk"], "moe_ffn_hidden_size": c["moe_ffn"],
        "moe_shared_expert_intermediate_size": c["shared_ffn"], "moe_router_topk_scaling_factor": c["scaling"],
        "moe_router_enable_expert_bias": case.tensors.keys().any(|name| name.ends_with(".expert_bias")),
    });
    // A case without layers of a kind states no sizes of it.
    if let Some(config) = config.as_object_mut() {
        config.retain(|_, value| !value.is_null());
    }
    config
}

pub(super) fn spec(config: Value, plugins: PluginSet) -> TeamSpec {
    TeamSpec {
        plugins,
        provider: "nemotron-hybrid".into(),
        config,
        grid: Grid::SINGLE,
        seed: 1,
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

/// Gives every parameter and buffer its values by name; a missing or differently shaped one is an error.
fn load<T: Element>(team: &Team<T>, case: &Case) -> Result<()> {
    let mut unused: Vec<&String> = case.tensors.keys().filter(|name| name.starts_with("w.")).collect();
    for kind in [Kind::Params, Kind::Buffers] {
        for (index, tensors) in team.entries(kind).map_err(text)?.into_iter().enumerate() {
            let mut values = Vec::new();
            for (name, shape) in tensors {
                let name = format!("w.{name}");
                let tensor = case.tensor(&name)?;
                if tensor.shape != shape {
                    return Err(format!("{name} is {shape:?} in the model and {:?} in the case", tensor.shape));
                }
                values.extend_from_slice(&tensor.data);
                unused.retain(|n| **n != name);
            }
            team.scatter(kind, index, values).map_err(text)?;
        }
    }
    match unused.first() {
        None => Ok(()),
        Some(name) => Err(format!("the model has no tensor {name}")),
    }
}

/// A case against today's provider.
pub fn megatron<T: Element>(check: &mut Check<'_>) -> Result<()> {
    megatron_with::<T>(check, providers(&["nemotron-hybrid"]))
}

/// Every hybrid case of a folder against the provider in `plugins`, in f32; gives their number.
pub fn check_all(folder: &Path, plugins: &PluginSet) -> Result<usize> {
    let mut checked = 0;
    for name in case::list(folder)? {
        let case = Case::read(folder, &name)?;
        if case.kind == "hybrid_tiny_megatron" {
            let mut check = Check::new(&case, Precision::F32);
            megatron_with::<f32>(&mut check, plugins.clone())?;
            check.finish().map_err(|e| format!("{name}: {e}"))?;
            checked += 1;
        }
    }
    Ok(checked)
}

fn megatron_with<T: Element>(check: &mut Check<'_>, plugins: PluginSet) -> Result<()> {
    let case = check.case;
    let team = Team::<T>::start(&spec(config(case), plugins)).map_err(text)?;
    load(&team, case)?;
    let batch = batch(case)?;
    outputs(check, &team, &batch)?;

    // The engine minimises the mean over unmasked tokens, the case the sum.
    let count: f64 = batch.loss_mask.iter().map(|&m| f64::from(m)).sum();
    let micro_batches = [(0, Arc::new(batch))];
    let sums = team.all(move |rank| rank.gradients(1, &micro_batches)).map_err(text)?;
    check.tensor("out.loss_sum", &[sums[0].loss])?;
    for tensors in team.gather(Kind::Grads) {
        for tensor in tensors.map_err(text)? {
            let values: Vec<f64> = tensor.data.into_f64().iter().map(|g| g * count).collect();
            check.tensor(&format!("grad.w.{}", tensor.name), &values)?;
        }
    }
    Ok(())
}

/// The inputs of a case.
pub(super) fn batch(case: &Case) -> Result<Batch> {
    let (batch, seq) = (case.size("batch")?, case.size("seq")?);
    Ok(Batch {
        tokens: case.ints("in.input_ids")?,
        labels: case.ints("in.labels")?,
        loss_mask: case.data("in.loss_mask")?.iter().map(|&m| m as f32).collect(),
        cu_seqlens: case.cu_seqlens(batch, seq)?,
        first_sample: 0,
        samples: batch,
    })
}

/// Logits and the loss of every token.
pub(super) fn outputs<T: Element>(check: &mut Check<'_>, team: &Team<T>, whole: &Batch) -> Result<()> {
    let input = whole.clone();
    let logits = team.all(move |rank| rank.logits(&input)).map_err(text)?;
    let logits = logits.into_iter().next().flatten().ok_or("the rank gave no logits")?;
    check.tensor("out.logits", &logits)?;

    // The loss of one token is the masked sum with the mask on that token alone.
    let tokens = whole.tokens.len();
    let alone: Arc<Vec<(usize, Arc<Batch>)>> = Arc::new(
        (0..tokens)
            .map(|t| {
                let loss_mask = (0..tokens).map(|i| if i == t { 1.0 } else { 0.0 }).collect();
                (0, Arc::new(Batch { loss_mask, ..whole.clone() }))
            })
            .collect(),
    );
    let losses = team.all(move |rank| {
        alone.iter().map(|one| rank.evaluate(1, std::slice::from_ref(one)).map(|sums| sums.loss_sum)).collect()
    });
    let losses: Vec<Vec<f64>> = losses.map_err(text)?;
    check.tensor("out.cross_entropy", &losses[0])
}
