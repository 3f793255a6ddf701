//! `nemotron_h`, the Hugging Face folders of these models: their `config.json` and this provider's config.
//!
//! Tensors need nothing here: their names stand in the declaration. What a key means is what transformers computes with it
//! (`NemotronHConfig`, `NemotronHForCausalLM`, version 5), with one exception:
//!
//! The scan's time steps are limited to `time_step_limit`, as the code published with the models and Megatron's training do.
//! transformers up to 5.24 limits them from below to `time_step_min` instead (transformers pull request 48989), which is
//! meant for initial values. An export therefore states a `time_step_min` that limits nothing where the model has no limit.

use crate::config::{Activation, PositionEmbedding, ScoreFunction};
use crate::decoder::NemotronHybrid;
use crate::moe::single_score;
use crate::pattern::LayerKind;
use gantry_plugin_api::sdk::{FolderConfig, FolderWriter, HuggingFace, Result};
use serde_json::{Map, Value, json};

pub const FOLDERS: HuggingFace<NemotronHybrid> =
    HuggingFace { model_type: "nemotron_h", architectures: &["NemotronHForCausalLM"], read, write };

/// `time_step_min` of exports without a limit: below every time step, and a number whose logarithm transformers can take.
const NO_LIMIT: f64 = 1e-20;

/// Names of layers in `layers_block_type`, today's first.
const LAYERS: [(LayerKind, &[&str]); 4] = [
    (LayerKind::Mamba, &["linear_attention", "mamba"]),
    (LayerKind::Attention, &["full_attention", "attention"]),
    (LayerKind::Mlp, &["mlp"]),
    (LayerKind::Moe, &["moe"]),
];

const ACTIVATIONS: [(&str, Activation); 3] =
    [("relu2", Activation::SquaredRelu), ("gelu_pytorch_tanh", Activation::Gelu), ("gelu_new", Activation::Gelu)];

fn read(hf: &FolderConfig) -> Result<Map<String, Value>> {
    let pattern = pattern(hf)?;
    let has = |kind: LayerKind| pattern.contains(kind.symbol());
    let mut config = Map::new();
    let mut set = |key: &str, value: Value| drop(config.insert(key.into(), value));
    set("pattern", pattern.clone().into());
    set("hidden_size", hf.or("hidden_size", 4096usize)?.into());
    set("vocab_size", hf.or("vocab_size", 131_072usize)?.into());
    let eps = hf.or("layer_norm_epsilon", 1e-5)?;
    set("layernorm_epsilon", eps.into());
    set("init_method_std", hf.or("initializer_range", 0.02)?.into());
    set("share_embeddings_and_output_weights", hf.or("tie_word_embeddings", false)?.into());
    set("activation", activation(hf)?);

    let heads = hf.or("num_attention_heads", 32usize)?;
    let groups = hf.or("num_key_value_heads", 8usize)?;
    let head_dim = hf.or("head_dim", 128usize)?;
    hf.only("attention_head_dim", &[head_dim.into()], &format!("head_dim is {head_dim}, which is what counts"))?;
    if has(LayerKind::Attention) {
        set("num_attention_heads", heads.into());
        set("num_query_groups", groups.into());
        set("kv_channels", head_dim.into());
    }
    let ffn = hf.or("intermediate_size", 21_504usize)?;
    if has(LayerKind::Mlp) {
        set("ffn_hidden_size", ffn.into());
    }
    let mamba = mamba(hf, eps)?;
    if has(LayerKind::Mamba) {
        mamba.into_iter().for_each(|(key, value)| set(key, value));
    }
    let moe = moe(hf, has(LayerKind::Moe))?;
    if has(LayerKind::Moe) {
        moe.into_iter().for_each(|(key, value)| set(key, value));
    }
    refuse_what_is_not_there(hf)?;
    hf.carry(&[
        "_name_or_path",
        "auto_map",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "max_position_embeddings",
        "mamba_ssm_cache_dtype",
        "moe_shared_expert_overlap",
        "num_logits_to_keep",
        "output_router_logits",
        "rescale_prenorm_residual",
        "use_cache",
    ]);
    hf.skip(&[
        // The host's: types of elements, and who wrote it.
        "dtype",
        "torch_dtype",
        "transformers_version",
        // Of use to other models of the family only: heads and their channels are stated, and nothing is rotated.
        "expand",
        "mamba_expand",
        "norm_eps",
        "rms_norm_eps",
        "partial_rotary_factor",
        "rope_theta",
        "use_mamba_kernels",
        // Layers of `num_nextn_predict_layers` = 0.
        "mtp_hybrid_override_pattern",
        "mtp_layers_block_type",
    ]);
    Ok(config)
}

/// The pattern from `layers_block_type` or `hybrid_override_pattern`.
fn pattern(hf: &FolderConfig) -> Result<String> {
    let names: Option<Vec<String>> = hf.named(&["layers_block_type", "layer_types"], None)?;
    let spelt = hf.get::<String>("hybrid_override_pattern")?;
    let listed = names.map(|names| {
        let symbol = |name: &String| {
            let kind = LAYERS.iter().find(|(_, names)| names.contains(&name.as_str()));
            kind.map(|(kind, _)| kind.symbol()).ok_or_else(|| {
                let key = if hf.has("layers_block_type") { "layers_block_type" } else { "layer_types" };
                hf.refuse(key, &format!("{name:?} is no layer that this provider has"))
            })
        };
        names.iter().map(symbol).collect::<Result<String>>()
    });
    let pattern = match (listed.transpose()?, spelt) {
        (Some(listed), Some(spelt)) if listed != spelt => {
            let why = format!("layers_block_type says {listed}");
            return Err(hf.refuse("hybrid_override_pattern", &why));
        }
        (Some(pattern), _) | (None, Some(pattern)) => pattern,
        // What transformers makes of a config that says nothing.
        (None, None) => "ME*-".into(),
    };
    let layers = pattern.chars().count();
    hf.only("num_hidden_layers", &[layers.into()], &format!("the layers that are listed are {layers}"))?;
    Ok(pattern)
}

fn activation(hf: &FolderConfig) -> Result<Value> {
    let name: String = hf.or("mlp_hidden_act", "relu2".into())?;
    match ACTIVATIONS.iter().find(|(known, _)| *known == name) {
        Some((_, Activation::Gelu)) => Ok("gelu".into()),
        Some(_) => Ok("squared_relu".into()),
        None => {
            let known = ACTIVATIONS.map(|(name, _)| name).join(", ");
            Err(hf.refuse("mlp_hidden_act", &format!("this provider has {known}")))
        }
    }
}

fn mamba(hf: &FolderConfig, eps: f64) -> Result<Vec<(&'static str, Value)>> {
    hf.only("mamba_hidden_act", &[json!("silu"), json!("swish")], "this provider's Mamba layers have silu")?;
    let bias = "this provider's convolution has a bias";
    hf.named(&["use_conv_bias", "mamba_conv_bias"], true)?;
    hf.only("use_conv_bias", &[json!(true)], bias)?;
    hf.only("mamba_conv_bias", &[json!(true)], bias)?;
    let mut found = vec![
        ("mamba_num_heads", hf.or("mamba_num_heads", 128usize)?.into()),
        ("mamba_head_dim", hf.or("mamba_head_dim", 64usize)?.into()),
        ("mamba_num_groups", hf.named(&["n_groups", "mamba_n_groups"], 8usize)?.into()),
        ("mamba_state_dim", hf.or("ssm_state_size", 128usize)?.into()),
        ("mamba_conv_width", hf.named(&["conv_kernel", "mamba_d_conv"], 4usize)?.into()),
        ("mamba_chunk_size", hf.named(&["chunk_size", "mamba_chunk_size"], 128usize)?.into()),
        ("mamba_norm_epsilon", eps.into()),
        ("mamba_dt_max", hf.named(&["time_step_max", "mamba_dt_max"], 0.1)?.into()),
        ("mamba_dt_init_floor", hf.named(&["time_step_floor", "mamba_dt_init_floor"], 1e-4)?.into()),
    ];
    let initial: f64 = hf.named(&["time_step_min", "mamba_dt_min"], 1e-3)?;
    let low = limit(hf)?;
    if initial > NO_LIMIT && initial != low {
        found.push(("mamba_dt_min", initial.into()));
        hf.note(format!(
            "time steps are limited to at least {low}, as time_step_limit says; transformers up to 5.24 limits them to \
             time_step_min = {initial} instead, which --set mamba_dt_limit_min={initial} does too"
        ));
    }
    if low > 0.0 {
        found.push(("mamba_dt_limit_min", low.into()));
    }
    Ok(found)
}

/// What `time_step_limit` limits time steps to from below; it must not limit them from above.
fn limit(hf: &FolderConfig) -> Result<f64> {
    let key = if hf.has("time_step_limit") { "time_step_limit" } else { "mamba_dt_limit" };
    let limits: Value = hf.named(&["time_step_limit", "mamba_dt_limit"], Value::Null)?;
    if limits.is_null() {
        return Ok(0.0);
    }
    let numbers = limits.as_array().map(|limits| limits.iter().map(|x| hf.number(x)).collect::<Option<Vec<_>>>());
    match numbers.flatten().as_deref() {
        Some([low, high]) if (0.0..f64::INFINITY).contains(low) && *high == f64::INFINITY => Ok(*low),
        Some([_, high]) if high.is_finite() => {
            Err(hf.refuse(key, "this provider does not limit time steps from above; the second must be Infinity"))
        }
        _ => Err(hf.refuse(key, "expected two numbers, the first from 0 and the second Infinity")),
    }
}

fn moe(hf: &FolderConfig, any: bool) -> Result<Vec<(&'static str, Value)>> {
    let topk = hf.or("num_experts_per_tok", 2usize)?;
    let normalized = hf.or("norm_topk_prob", true)?;
    let found = vec![
        ("num_moe_experts", hf.named(&["n_routed_experts", "num_local_experts"], 8usize)?.into()),
        ("moe_router_topk", topk.into()),
        ("moe_ffn_hidden_size", hf.or("moe_intermediate_size", 7688usize)?.into()),
        ("moe_shared_expert_intermediate_size", hf.or("moe_shared_expert_intermediate_size", 7688usize)?.into()),
        ("moe_router_topk_scaling_factor", hf.or("routed_scaling_factor", 1.0)?.into()),
        // Such folders always hold one, if only of zeros.
        ("moe_router_enable_expert_bias", true.into()),
    ];
    if !any {
        hf.skip(&["n_shared_experts", "moe_latent_size", "n_group", "topk_group"]);
        return Ok(found);
    }
    hf.only("n_shared_experts", &[json!(1)], "this provider has one shared expert")?;
    hf.only("moe_latent_size", &[], "this provider has no latent experts")?;
    for key in ["n_group", "topk_group"] {
        hf.only(key, &[json!(1)], "this provider does not choose among groups of experts")?;
    }
    if normalized == single_score(topk) {
        let why = if normalized {
            "this provider does not normalise the score of a single expert (num_experts_per_tok = 1)"
        } else {
            "this provider normalises the scores of the chosen experts"
        };
        return Err(hf.refuse("norm_topk_prob", why));
    }
    Ok(found)
}

fn refuse_what_is_not_there(hf: &FolderConfig) -> Result<()> {
    let no = [json!(false)];
    hf.only("use_bias", &no, "this provider's Mamba projections have no biases")?;
    hf.only("mamba_proj_bias", &no, "this provider's Mamba projections have no biases")?;
    hf.only("mlp_bias", &no, "biases of MLPs alone are not there in this provider")?;
    hf.only("attention_bias", &no, "transformers gives attention no biases whatever this says")?;
    hf.only("residual_in_fp32", &no, "this provider's residual stream has the type of the other activations")?;
    hf.only("attention_dropout", &[json!(0)], "this provider has no dropout")?;
    hf.only("hidden_dropout", &[json!(0)], "this provider has no dropout")?;
    hf.only("sliding_window", &[], "this provider's attention sees the whole sequence")?;
    hf.only("num_nextn_predict_layers", &[json!(0)], "this provider has no multi-token prediction")
}

fn write(model: &NemotronHybrid, hf: &mut FolderWriter) -> Result<()> {
    let (config, layers) = (model.config(), model.layers());
    let has = |kind: LayerKind| layers.iter().any(|layer| layer.kind == kind);
    let pattern: String = layers.iter().map(|layer| layer.kind.symbol()).collect();
    hf.only("add_bias_linear", !config.add_bias_linear, "nemotron_h has no biases in attention")?;
    // The spelling that every version reads.
    hf.set("hybrid_override_pattern", pattern);
    hf.set("num_hidden_layers", layers.len());
    hf.set("hidden_size", config.hidden_size);
    hf.set("vocab_size", config.vocab_size);
    hf.set("layer_norm_epsilon", config.layernorm_epsilon);
    hf.set("initializer_range", config.init_method_std);
    hf.set("tie_word_embeddings", config.share_embeddings_and_output_weights);
    for key in ["use_bias", "attention_bias", "mlp_bias", "mamba_proj_bias", "residual_in_fp32"] {
        hf.set(key, false);
    }
    let feeds_forward = has(LayerKind::Mlp) || has(LayerKind::Moe);
    let name = ACTIVATIONS.iter().find(|(_, activation)| *activation == config.activation);
    match name {
        Some((name, _)) => hf.set("mlp_hidden_act", *name),
        None => hf.only("activation", !feeds_forward, "nemotron_h has no gated MLPs; it takes squared_relu or gelu")?,
    }
    if let Some(ffn) = config.ffn_hidden_size {
        hf.set("intermediate_size", ffn);
    }
    if let Some(sizes) = model.attention() {
        let none = config.position_embedding_type == PositionEmbedding::None;
        hf.only(
            "position_embedding_type",
            none,
            "attention of nemotron_h knows no positions; only none can be written",
        )?;
        hf.set("num_attention_heads", sizes.heads);
        hf.set("num_key_value_heads", sizes.groups);
        hf.set("head_dim", sizes.head_dim);
    }
    if let (true, Some(heads)) = (has(LayerKind::Mamba), config.mamba_num_heads) {
        write_mamba(model, heads, hf)?;
    }
    if has(LayerKind::Moe) {
        write_moe(model, hf)?;
    }
    Ok(())
}

fn write_mamba(model: &NemotronHybrid, heads: usize, hf: &mut FolderWriter) -> Result<()> {
    let config = model.config();
    let eps = (config.mamba_norm_epsilon, config.layernorm_epsilon);
    let why = format!("nemotron_h has one epsilon; it is {}, layernorm_epsilon {}", eps.0, eps.1);
    hf.only("mamba_norm_epsilon", eps.0 == eps.1, &why)?;
    hf.set("mamba_num_heads", heads);
    hf.set("mamba_head_dim", config.mamba_head_dim);
    hf.set("n_groups", config.mamba_num_groups);
    hf.set("ssm_state_size", config.mamba_state_dim);
    hf.set("conv_kernel", config.mamba_conv_width);
    hf.set("chunk_size", config.mamba_chunk_size);
    hf.set("mamba_hidden_act", "silu");
    hf.set("use_conv_bias", true);
    hf.set("time_step_max", config.mamba_dt_max);
    hf.set("time_step_floor", config.mamba_dt_init_floor);
    let low = config.mamba_dt_limit_min;
    // Without limits this is what every reader takes it to be.
    if low > 0.0 {
        hf.set("time_step_limit", json!([low, {"__float__": "Infinity"}]));
        hf.set("time_step_min", low);
    } else {
        hf.set("time_step_min", NO_LIMIT);
    }
    Ok(())
}

fn write_moe(model: &NemotronHybrid, hf: &mut FolderWriter) -> Result<()> {
    let config = model.config();
    let sigmoid = config.moe_router_score_function == ScoreFunction::Sigmoid;
    hf.only("moe_router_score_function", sigmoid, "experts of nemotron_h are scored by sigmoid")?;
    let dropless = config.moe_expert_capacity_factor.is_none();
    hf.only("moe_expert_capacity_factor", dropless, "experts of nemotron_h take every token")?;
    let shared = config.moe_shared_expert_intermediate_size;
    hf.only("moe_shared_expert_intermediate_size", shared.is_some(), "nemotron_h always has a shared expert")?;
    hf.set("moe_shared_expert_intermediate_size", shared);
    hf.set("n_shared_experts", 1);
    hf.set("n_routed_experts", config.num_moe_experts);
    hf.set("num_experts_per_tok", config.moe_router_topk);
    hf.set("moe_intermediate_size", config.moe_ffn_hidden_size);
    hf.set("routed_scaling_factor", config.moe_router_topk_scaling_factor);
    hf.set("norm_topk_prob", !single_score(config.moe_router_topk));
    hf.set("n_group", 1);
    hf.set("topk_group", 1);
    if let (false, Some(experts)) = (config.moe_router_enable_expert_bias, config.num_moe_experts) {
        for (i, _) in model.layers().iter().enumerate().filter(|(_, layer)| layer.kind == LayerKind::Moe) {
            hf.constant(format!("backbone.layers.{i}.mixer.gate.e_score_correction_bias"), &[experts], 0.0);
        }
    }
    Ok(())
}
