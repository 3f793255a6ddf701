//! Every option of the providers: the gradient of the objective that the engine gives is the objective's slope, and the
//! options that must not change numbers do not.

use gantry::data::Batch;
use gantry::mesh::Grid;
use gantry::train::team::{Kind, Team};
use gantry_kernels::philox::Stream;
use gantry_plugin_api::plan::{Layout, ModelPlan};
use gantry_tests::layouts::{Trace, batch, collect, dense, hybrid, spec, worst};
use gantry_tests::plugins::providers;
use rstest::rstest;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// The parity models with some keys changed; null removes one.
fn with(mut config: Value, changes: &Value) -> Value {
    for (key, value) in changes.as_object().unwrap() {
        if value.is_null() {
            config.as_object_mut().unwrap().remove(key);
        } else {
            config[key] = value.clone();
        }
    }
    config
}

fn model(provider: &str, changes: &Value) -> Value {
    with(if provider == "dense-gpt" { dense() } else { hybrid() }, changes)
}

fn start(provider: &str, changes: &Value) -> Team<f64> {
    Team::start(&spec(provider, model(provider, changes), Grid::SINGLE)).unwrap_or_else(|e| panic!("{e}"))
}

/// The objective after parameters moved by `h` times a fixed random direction, and its gradient in that direction there.
fn objective(team: &Team<f64>, batch: &Arc<Batch>, h: f64) -> (f64, f64) {
    let batch = batch.clone();
    let results = team.all(move |rank| {
        let direction = Stream::new(5, 0, 0);
        let before = rank.params.clone();
        rank.params.iter_mut().enumerate().for_each(|(i, p)| *p += h * direction.normal(i as u64));
        let sums = rank.gradients(1, &[(0, batch.clone())])?;
        rank.params = before;
        let slope = rank.grads.iter().enumerate().map(|(i, g)| g * direction.normal(i as u64)).sum::<f64>();
        Ok((sums.objective, slope))
    });
    results.unwrap_or_else(|e| panic!("{e}"))[0]
}

#[rstest]
#[case("dense-gpt", json!({}))]
#[case("dense-gpt", json!({"num_query_groups": null, "kv_channels": null}))]
#[case("dense-gpt", json!({"share_embeddings_and_output_weights": true, "rotary_base": 500.0}))]
#[case("nemotron-hybrid", json!({}))]
#[case("nemotron-hybrid", json!({"activation": "swiglu"}))]
#[case("nemotron-hybrid", json!({"activation": "gelu"}))]
#[case("nemotron-hybrid", json!({"add_bias_linear": true}))]
#[case("nemotron-hybrid", json!({"moe_global_aux_loss_coeff": 0.3}))]
#[case("nemotron-hybrid", json!({"position_embedding_type": "rope"}))]
#[case("nemotron-hybrid", json!({"position_embedding_type": "rope", "rotary_percent": 0.34, "kv_channels": 12}))]
#[case("nemotron-hybrid", json!({"share_embeddings_and_output_weights": true}))]
#[case("nemotron-hybrid", json!({"moe_router_score_function": "softmax"}))]
#[case("nemotron-hybrid", json!({"moe_router_topk": 1, "moe_router_enable_expert_bias": false}))]
#[case("nemotron-hybrid", json!({"moe_expert_capacity_factor": 0.8}))]
#[case("nemotron-hybrid", json!({"moe_shared_expert_intermediate_size": null, "moe_router_topk": 3}))]
#[case("nemotron-hybrid", json!({"mamba_num_groups": 4, "mamba_conv_width": 3, "mamba_chunk_size": 7}))]
#[case("nemotron-hybrid", json!({"mamba_dt_limit_min": 0.02, "mamba_norm_epsilon": 0.3}))]
#[case("nemotron-hybrid", json!({"pattern": "MM", "num_moe_experts": null, "ffn_hidden_size": null}))]
#[case("nemotron-hybrid", json!({"pattern": "-*-", "mamba_num_heads": null}))]
#[case("nemotron-hybrid", json!({"pattern": "EE", "layernorm_epsilon": 0.01}))]
fn the_gradient_is_the_objectives_slope(#[case] provider: &str, #[case] changes: Value) {
    let team = start(provider, &changes);
    let batch = Arc::new(batch(1, 0));
    let (value, slope) = objective(&team, &batch, 0.0);
    // Richardson's extrapolation of central differences.
    let central = |h: f64| (objective(&team, &batch, h).0 - objective(&team, &batch, -h).0) / (2.0 * h);
    let numeric = (4.0 * central(1e-5) - central(2e-5)) / 3.0;
    assert!(value.is_finite() && slope.abs() > 1e-3, "objective {value}, slope {slope}");
    let error = (numeric - slope).abs() / slope.abs().max(1.0);
    assert!(error < 1e-7, "{provider} {changes}: slope {slope}, differences give {numeric}");

    // Every parameter of the model takes part. A bias of convolution or an unchosen expert may get little, but not none.
    let mut trace = Trace::default();
    objective(&team, &batch, 0.0);
    collect(&team, Kind::Grads, &mut trace).unwrap_or_else(|e| panic!("{e}"));
    let idle = |name: &str| name.contains("experts.linear");
    for (name, grad) in trace.tensors.iter().filter(|(name, _)| !idle(name)) {
        assert!(grad.iter().any(|g| *g != 0.0), "{name} gets no gradient");
    }
}

fn gradients(provider: &str, changes: &Value) -> Trace {
    let team = start(provider, changes);
    let mut trace = Trace::default();
    let (value, _) = objective(&team, &Arc::new(batch(1, 0)), 0.0);
    trace.numbers.push(("objective".into(), value));
    collect(&team, Kind::Grads, &mut trace).unwrap_or_else(|e| panic!("{e}"));
    trace
}

#[test]
fn computing_again_changes_no_bit() {
    let kept = gradients("nemotron-hybrid", &json!({}));
    for kinds in [json!(["mamba"]), json!(["moe"]), json!(["mamba", "attention", "mlp", "moe"])] {
        let again = gradients("nemotron-hybrid", &json!({"recompute": kinds}));
        assert_eq!(kept.numbers, again.numbers, "{kinds}");
        let (error, name) = worst(&kept, &again);
        assert!(error == 0.0, "{kinds}: {name} differs by {error:e}");
    }
}

#[test]
fn chunks_of_the_scan_change_only_rounding() {
    let small = gradients("nemotron-hybrid", &json!({"mamba_chunk_size": 3}));
    let (error, name) = worst(&small, &gradients("nemotron-hybrid", &json!({"mamba_chunk_size": 64})));
    assert!(error < 1e-11, "{name} differs by {error:e}");
}

#[test]
fn a_wrong_config_is_an_error_that_names_the_key() {
    let plugins = providers(&["nemotron-hybrid", "dense-gpt"]);
    let message = |provider: &str, changes: Value| {
        let error = plugins.provider(provider, &model(provider, &changes)).err();
        error.unwrap_or_else(|| panic!("{changes} was accepted")).to_string()
    };
    let e = message("nemotron-hybrid", json!({"mamba_num_head": 8}));
    assert!(e.contains("unknown key \"mamba_num_head\"; did you mean \"mamba_num_heads\"?"), "{e}");
    let e = message("nemotron-hybrid", json!({"activation": "swish"}));
    assert!(e.contains("config.activation") && e.contains("swiglu"), "{e}");
    let e = message("nemotron-hybrid", json!({"pattern": "ME/M"}));
    assert!(e.contains("symbol 3") && e.contains("multi-token prediction"), "{e}");
    let e = message("dense-gpt", json!({"num_query_groups": 3}));
    assert!(e.contains("num_query_groups = 3 does not divide num_attention_heads = 4"), "{e}");
    let e = message("dense-gpt", json!({"hidden_size": null}));
    assert!(e.contains("hidden_size"), "{e}");
}

/// Positions of a layout.
fn size(plan: &ModelPlan, layout: &Layout) -> usize {
    let units = |axis: &str| plan.axes.iter().find(|a| a.name == axis).map_or(0, |a| a.size);
    match layout {
        Layout::Fixed(n) => *n,
        Layout::Axis { axis, unit } => units(axis) * unit,
        Layout::Seq(parts) => parts.iter().map(|(_, part)| size(plan, part)).sum(),
        Layout::Repeat { .. } => parts(plan, layout).iter().map(|(_, size)| size).sum(),
    }
}

/// Named parts of a layout with their positions over the whole model.
fn parts(plan: &ModelPlan, layout: &Layout) -> Vec<(String, usize)> {
    match layout {
        Layout::Seq(parts) => parts.iter().map(|(name, part)| (name.clone(), size(plan, part))).collect(),
        Layout::Repeat { axis, inner } => {
            let repeats = size(plan, &Layout::axis(axis, 1));
            let Layout::Seq(parts) = inner.as_ref() else { return Vec::new() };
            let all = |part: &Layout| if let Layout::Fixed(n) = part { n * repeats } else { size(plan, part) };
            parts.iter().map(|(name, part)| (name.clone(), all(part))).collect()
        }
        _ => Vec::new(),
    }
}

/// The tensors that a plan says its Hugging Face folder holds.
fn hugging_face_tensors(plan: &ModelPlan) -> BTreeMap<String, Vec<usize>> {
    let params = plan.params.iter().map(|p| (p.hf_name.clone(), &p.dims, p.export_shape.clone()));
    let buffers = plan.buffers.iter().map(|b| (b.hf_name.clone(), &b.dims, None));
    let mut tensors = BTreeMap::new();
    for (name, dims, export) in params.chain(buffers) {
        let name = name.expect("every tensor has a name there");
        let sizes: Vec<usize> = export.unwrap_or_else(|| dims.iter().map(|d| size(plan, d)).collect());
        if name.contains("{part}") {
            for (part, rows) in parts(plan, &dims[0]) {
                tensors.insert(name.replace("{part}", &part), [&[rows], &sizes[1..]].concat());
            }
        } else if name.contains("{experts}") {
            for expert in 0..sizes[0] {
                tensors.insert(name.replace("{experts}", &expert.to_string()), sizes[1..].to_vec());
            }
        } else {
            tensors.insert(name, sizes);
        }
    }
    tensors
}

#[test]
fn hugging_face_names_and_shapes_are_those_of_a_real_folder() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/hf_nemotron_h_tiny");
    let text = std::fs::read_to_string(folder.join("config.published_style.json")).unwrap();
    let hf: Value = serde_json::from_str(&text.replace("Infinity", "1e9")).unwrap();
    let config = json!({
        "pattern": hf["hybrid_override_pattern"], "hidden_size": hf["hidden_size"], "vocab_size": hf["vocab_size"],
        "num_attention_heads": hf["num_attention_heads"], "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": hf["head_dim"], "ffn_hidden_size": hf["intermediate_size"],
        "mamba_num_heads": hf["mamba_num_heads"], "mamba_head_dim": hf["mamba_head_dim"],
        "mamba_num_groups": hf["n_groups"], "mamba_state_dim": hf["ssm_state_size"],
        "num_moe_experts": hf["n_routed_experts"], "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": hf["moe_shared_expert_intermediate_size"],
        "moe_router_topk": hf["num_experts_per_tok"], "moe_router_enable_expert_bias": true,
    });
    let plan = providers(&["nemotron-hybrid"]).provider("nemotron-hybrid", &config).unwrap().plan().unwrap();
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let real: BTreeMap<String, Vec<usize>> =
        file.tensors().into_iter().map(|(name, view)| (name, view.shape().to_vec())).collect();
    assert_eq!(hugging_face_tensors(&plan), real);
}
