//! `nemotron-hybrid`: decoders whose layers are Mamba-2, attention, MLP or mixture of experts, in the order of a pattern.
//!
//! Each layer is x + mixer(RMSNorm(x)) on the residual stream x [tokens, hidden]; then a final RMSNorm and the output
//! layer. One file per kind of layer holds its sizes, its declaration and its forward pass:
//!
//! - [`mamba`]: `M`, Mamba-2 (Dao and Gu 2024, "Transformers are SSMs")
//! - [`attention`]: `*`, grouped-query attention
//! - [`mlp`]: `-`, and the shared expert
//! - [`moe`]: `E`, mixture of experts
//!
//! around them [`config`] (the recipe's section), [`pattern`] (the layers), [`declare`] (the plan under construction) and
//! [`decoder`] (the model as a whole). Parameter names are Megatron's, Hugging Face names those of `nemotron_h`, whose
//! `config.json` [`hugging_face`] reads and writes.

mod attention;
mod config;
mod declare;
mod decoder;
mod hugging_face;
mod mamba;
mod mlp;
mod moe;
mod pattern;

use gantry_plugin_api::ops;

gantry_plugin_api::export_plugin! {
    name: "nemotron-hybrid",
    models: { "nemotron-hybrid" => decoder::NemotronHybrid },
    operators: [
        ops::Embedding, ops::Linear, ops::RmsNorm, ops::GatedNorm, ops::Activation, ops::SwiGlu, ops::CausalConv1d,
        ops::SsdScan, ops::Attention, ops::Rope, ops::MoeRoute, ops::MoePermute, ops::GroupedLinear,
        ops::MoeUnpermute, ops::Add, ops::Split, ops::Concat,
    ],
}
