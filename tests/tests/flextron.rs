//! The elastifier `flextron` on this project's models.

use flextron::dual::Dual;
use flextron::sizes::exact::{Exact, Full, Widths};
use flextron::sizes::{Counts, Inference};
use gantry::mesh::Grid;
use gantry::model::ParamTable;
use gantry_plugin_api::plan::{ModelPlan, Stage};
use gantry_tests::layouts::{dense, hybrid};
use gantry_tests::plugins::providers;
use rstest::rstest;
use serde_json::{Value, json};
use std::collections::BTreeMap;

fn plan(provider: &str, config: &Value) -> ModelPlan {
    let plugins = providers(&[provider]);
    plugins.provider(provider, config).unwrap().plan().unwrap()
}

fn with(mut config: Value, changes: &Value) -> Value {
    changes.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
    config
}

/// Elements of every parameter that a model of this plan allocates.
fn allocated(plan: &ModelPlan) -> usize {
    let stage = Stage { begin: 0, end: plan.blocks.len() };
    let table = ParamTable::new(plan, &stage, Grid::SINGLE, Grid::SINGLE.place(0)).unwrap();
    table.params.iter().map(|entry| entry.stored.len).sum()
}

/// Widths by axis name, full where there is none.
struct Named<'a>(&'a ModelPlan, BTreeMap<&'static str, f64>);

impl Widths for Named<'_> {
    fn units(&self, axis: usize, _layer: Option<usize>) -> Dual {
        let axis = &self.0.axes[axis];
        Dual::constant(self.1.get(axis.name.as_str()).copied().unwrap_or(axis.size as f64))
    }

    fn keep(&self, layer: usize) -> Dual {
        // Layer 1 is left out where depth is narrowed.
        Dual::constant(if layer == 1 && self.1.contains_key("depth") { 0.0 } else { 1.0 })
    }
}

fn full(plan: &ModelPlan) -> Counts {
    Exact::new(plan, &Full(plan)).counts(Inference::default())
}

/// The formula counts what the host allocates for the same model, and at narrow widths what it does for a narrow model.
#[rstest]
#[case("nemotron-hybrid", json!({
    "hidden_size": 10, "mamba_num_heads": 4, "num_attention_heads": 2, "ffn_hidden_size": 7, "num_moe_experts": 4,
    "moe_ffn_hidden_size": 5, "moe_shared_expert_intermediate_size": 3,
}), &[("hidden", 10.0), ("mamba_heads", 4.0), ("attention_heads", 2.0), ("ffn", 7.0), ("experts", 4.0),
      ("moe_ffn", 5.0), ("shared_ffn", 3.0)])]
#[case("dense-gpt", json!({"hidden_size": 10, "num_attention_heads": 2, "ffn_hidden_size": 7}),
       &[("hidden", 10.0), ("attention_heads", 2.0), ("ffn", 7.0)])]
#[case("dense-gpt", json!({"share_embeddings_and_output_weights": true}), &[])]
fn exact_sizes_are_those_of_built_models(
    #[case] provider: &str,
    #[case] small: Value,
    #[case] widths: &[(&'static str, f64)],
) {
    let base = if provider == "dense-gpt" { dense() } else { hybrid() };
    let small = plan(provider, &with(base.clone(), &small));
    assert_eq!(full(&small).total.value, allocated(&small) as f64);
    if !widths.is_empty() {
        let parent = plan(provider, &base);
        let narrowed = Named(&parent, widths.iter().copied().collect());
        let counts = Exact::new(&parent, &narrowed).counts(Inference::default());
        assert_eq!(counts, full(&small));
        assert!(counts.total.value < full(&parent).total.value);
    }
}

#[test]
fn exact_sizes_leave_out_dropped_layers() {
    let parent = plan("nemotron-hybrid", &hybrid());
    let shallow = Named(&parent, [("depth", 0.0)].into_iter().collect());
    let counts = Exact::new(&parent, &shallow).counts(Inference::default());
    let of_layer = |i: usize| -> f64 {
        let mut alone = parent.clone();
        alone.params.retain(|p| parent.blocks[p.block].layer == Some(i));
        full(&alone).total.value
    };
    assert_eq!(counts.total.value, full(&parent).total.value - of_layer(1));
}

/// Nemotron 3 Nano: 31.58 billion parameters, of which a token passes through 3.58.
#[test]
fn exact_sizes_of_a_published_model() {
    let config = json!({
        "pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "hidden_size": 2688, "vocab_size": 131072,
        "num_attention_heads": 32, "num_query_groups": 2, "kv_channels": 128,
        "mamba_num_heads": 64, "mamba_head_dim": 64, "mamba_num_groups": 8, "mamba_state_dim": 128,
        "num_moe_experts": 128, "moe_router_topk": 6, "moe_ffn_hidden_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
    });
    let counts = full(&plan("nemotron-hybrid", &config));
    let billions = |x: &Dual| (x.value / 1e7).round() / 100.0;
    assert_eq!((billions(&counts.total), billions(&counts.active)), (31.58, 3.58), "{counts:?}");
    // Keys and values of 6 attention layers, states of 23 Mamba layers and the last 3 inputs of their convolutions.
    assert_eq!(counts.kv_cache.value, 131_072.0 * 6.0 * 2.0 * 2.0 * 128.0);
    assert_eq!(counts.ssm_cache.value, 23.0 * (64.0 * 64.0 * 128.0 + 3.0 * (64.0 * 64.0 + 2.0 * 8.0 * 128.0)));
    // 23 expert layers of one size: 6 experts and the shared one.
    assert!((counts.buffer.value / (16_384.0 * (6.0 * 1856.0 + 3712.0)) - 1.0).abs() < 1e-12);
}
