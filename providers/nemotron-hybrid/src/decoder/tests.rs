//! What can be tested without a host: the declaration and the config's errors.

use super::*;
use serde_json::{Value, json};

fn config(change: &[(&str, Value)]) -> Config {
    let mut config = json!({
        "pattern": "ME|*-", "hidden_size": 32, "vocab_size": 96,
        "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8, "ffn_hidden_size": 20,
        "mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 6,
        "num_moe_experts": 8, "moe_ffn_hidden_size": 20, "moe_shared_expert_intermediate_size": 24,
        "moe_router_enable_expert_bias": true
    });
    for (key, value) in change {
        if value.is_null() {
            config.as_object_mut().unwrap().remove(*key);
        } else {
            config[key] = value.clone();
        }
    }
    serde_json::from_value(config).unwrap()
}

fn plan(change: &[(&str, Value)]) -> ModelPlan {
    let plan = NemotronHybrid::new(config(change)).unwrap().plan().unwrap();
    plan.check().unwrap();
    plan
}

fn message(change: &[(&str, Value)]) -> String {
    NemotronHybrid::new(config(change)).unwrap_err().message
}

#[test]
fn every_layer_declares_megatrons_names() {
    let plan = plan(&[]);
    let names: Vec<&str> = plan.params.iter().map(|p| p.name.as_str()).collect();
    let expect = [
        "embedding.word_embeddings.weight",
        "decoder.layers.0.mixer.in_proj.layer_norm_weight",
        "decoder.layers.0.mixer.in_proj.weight",
        "decoder.layers.0.mixer.conv1d_weight",
        "decoder.layers.0.mixer.conv1d_bias",
        "decoder.layers.0.mixer.dt_bias",
        "decoder.layers.0.mixer.A_log",
        "decoder.layers.0.mixer.D",
        "decoder.layers.0.mixer.norm.weight",
        "decoder.layers.0.mixer.out_proj.weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "decoder.layers.1.mlp.router.weight",
        "decoder.layers.1.mlp.experts.linear_fc1.weight{experts}",
        "decoder.layers.1.mlp.experts.linear_fc2.weight{experts}",
        "decoder.layers.1.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.1.mlp.shared_experts.linear_fc2.weight",
        "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.2.self_attention.linear_qkv.weight",
        "decoder.layers.2.self_attention.linear_proj.weight",
        "decoder.layers.3.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.3.mlp.linear_fc1.weight",
        "decoder.layers.3.mlp.linear_fc2.weight",
        "decoder.final_norm.weight",
        "output_layer.weight",
    ];
    assert_eq!(names, expect);
    assert_eq!(plan.buffers[0].name, "decoder.layers.1.mlp.router.expert_bias");
    assert_eq!(plan.params[17].hf_name.as_deref(), Some("backbone.layers.2.mixer.{part}_proj.weight"));
    assert_eq!(plan.params[23].hf_name.as_deref(), Some("lm_head.weight"));
    let blocks: Vec<(&str, Option<usize>, bool)> =
        plan.blocks.iter().map(|b| (b.kind.as_str(), b.layer, b.starts_stage)).collect();
    let expect = [
        ("embedding", None, false),
        ("mamba", Some(0), false),
        ("moe", Some(1), false),
        ("attention", Some(2), true),
        ("mlp", Some(3), false),
        ("output", None, false),
    ];
    assert_eq!(blocks, expect);
}

#[test]
fn small_one_dimensional_and_state_parameters_take_no_decay() {
    let plan = plan(&[]);
    let decayed: Vec<&str> = plan.params.iter().filter(|p| !p.decay).map(|p| p.name.as_str()).collect();
    assert!(decayed.iter().any(|n| n.ends_with("A_log")) && decayed.iter().any(|n| n.ends_with("conv1d_bias")));
    assert!(!decayed.iter().any(|n| n.ends_with("conv1d_weight") || n.ends_with("weight{experts}")));
    assert!(plan.params.iter().filter(|p| p.fp32).count() == 3);
}

#[test]
fn a_pattern_needs_the_sizes_of_its_own_layers_only() {
    let attention_only = [("pattern", json!("**")), ("mamba_num_heads", Value::Null), ("num_moe_experts", Value::Null)];
    assert_eq!(plan(&attention_only).axes.len(), 4);
    let e = message(&[("mamba_num_heads", Value::Null)]);
    assert!(e.contains("config.mamba_num_heads is missing") && e.contains("'M' layers (mamba)"), "{e}");
}

#[test]
fn swiglu_doubles_the_rows_of_fc1() {
    let plan = plan(&[("activation", json!("swiglu"))]);
    let fc1 = plan.params.iter().find(|p| p.name.ends_with("3.mlp.linear_fc1.weight")).unwrap();
    assert!(matches!(&fc1.dims[0], Layout::Seq(parts) if parts[0].0 == "gate" && parts[1].0 == "up"));
    assert_eq!(fc1.hf_name.as_deref(), Some("backbone.layers.3.mixer.{part}_proj.weight"));
}

#[test]
fn errors_name_the_key_both_numbers_and_the_remedy() {
    let e = message(&[("mamba_num_groups", json!(3))]);
    assert_eq!(e, "config.mamba_num_groups = 3 does not divide mamba_num_heads = 8; change one of them");
    let e = message(&[("moe_router_topk", json!(9))]);
    assert!(e.contains("moe_router_topk = 9 is more than num_moe_experts = 8; lower it"), "{e}");
    let e = message(&[("kv_channels", Value::Null), ("num_attention_heads", json!(6))]);
    assert!(e.contains("num_attention_heads = 6 does not divide hidden_size = 32; set kv_channels"), "{e}");
    let e = message(&[("position_embedding_type", json!("rope")), ("rotary_percent", json!(0.4))]);
    assert!(e.contains("rotary_percent = 0.4 of a head's 8 channels are 3"), "{e}");
    let e = message(&[("moe_aux_loss_coeff", json!(-0.01))]);
    assert_eq!(e, "config.moe_aux_loss_coeff is -0.01; it must be at least 0");
    let e = message(&[("mamba_dt_min", json!(1.0))]);
    assert!(e.contains("mamba_dt_min = 1 is more than mamba_dt_max = 0.1"), "{e}");
    let optional = ["num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size", "mamba_num_heads"];
    let sizes = ["hidden_size", "vocab_size", "mamba_head_dim", "mamba_state_dim", "num_moe_experts"];
    for key in optional.into_iter().chain(sizes).chain(["moe_ffn_hidden_size", "mamba_chunk_size"]) {
        let e = message(&[(key, json!(u64::MAX))]);
        assert_eq!(e, format!("config.{key} is {}; it must lie between 1 and 16777216", u64::MAX));
    }
    assert!(message(&[("mamba_conv_width", json!(100))]).contains("mamba_conv_width is 100; it must be at most 8"));
    assert!(message(&[("kv_channels", json!(512))]).contains("kv_channels is 512; attention takes heads of at most"));
    let e = message(&[("position_embedding_type", json!("rope")), ("rotary_base", json!(-5))]);
    assert_eq!(e, "config.rotary_base is -5; it must be more than 0");
    let e = message(&[("layernorm_epsilon", json!(0))]);
    assert_eq!(e, "config.layernorm_epsilon is 0; it must be more than 0 and at most 1");
    assert!(message(&[("hidden_size", json!(0))]).contains("config.hidden_size is 0"));
    assert!(message(&[("pattern", json!("M/M"))]).contains("multi-token prediction"));
}
