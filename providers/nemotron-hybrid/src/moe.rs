//! `E`: a mixture of experts beside a shared expert.
//!
//! A router scores every expert for every token (sigmoid or softmax of its logits), chooses the top k by score + bias,
//! and weighs them by their scores alone, normalised over the chosen ones. Each expert is an MLP whose hidden channels
//! are multiplied by the token's weight, so that fc2 adds up what is already weighted. The bias follows the load
//! (Wang et al. 2024, "Auxiliary-loss-free load balancing"); auxiliary losses are the host's, by the router's attributes.

use crate::config::{Activation, Config, needed, positive, within};
use crate::declare::{BlockDeclaration, hidden};
use crate::mlp::Mlp;
use crate::pattern::LayerKind;
use gantry_plugin_api::ops::{MoeRoute, Role};
use gantry_plugin_api::plan::{Axis, Block, BufferUpdate, FootprintKind, Init, Layout};
use gantry_plugin_api::sdk::{BufferId, Cx, Error, ParamId, Result, Tensor};

/// Whether the score of the chosen expert is its weight as it is: normalised, that of a single one would always be 1.
pub fn single_score(topk: usize) -> bool {
    topk == 1
}

/// Sizes and routing of expert layers.
#[derive(Clone, Debug)]
pub struct Sizes {
    hidden: usize,
    pub experts: usize,
    pub ffn: usize,
    pub shared_ffn: Option<usize>,
    activation: Activation,
    route: MoeRoute,
    /// Update rate of the expert bias, if there is one.
    bias_rate: Option<f64>,
}

impl Sizes {
    pub fn new(config: &Config) -> Result<Sizes> {
        let experts = needed(config.num_moe_experts, "num_moe_experts", LayerKind::Moe)?;
        let topk = positive(config.moe_router_topk, "moe_router_topk")?;
        if topk > experts {
            return Err(Error::config(format!(
                "config.moe_router_topk = {topk} is more than num_moe_experts = {experts}; lower it"
            )));
        }
        let coefficient = |value, key| within(value, key, 0.0..=f64::MAX);
        let capacity_factor = match config.moe_expert_capacity_factor {
            Some(factor) => within(factor, "moe_expert_capacity_factor", f64::MIN_POSITIVE..=f64::MAX)?,
            None => 0.0,
        };
        let rate = config.moe_router_bias_update_rate;
        let rate = within(rate, "moe_router_bias_update_rate", 0.0..=f64::MAX)?;
        let shared_ffn = config.moe_shared_expert_intermediate_size;
        Ok(Sizes {
            hidden: config.hidden_size,
            experts,
            ffn: needed(config.moe_ffn_hidden_size, "moe_ffn_hidden_size", LayerKind::Moe)?,
            shared_ffn: shared_ffn.map(|n| positive(n, "moe_shared_expert_intermediate_size")).transpose()?,
            activation: config.activation,
            route: MoeRoute {
                topk: topk as u64,
                score: config.moe_router_score_function.into(),
                normalize: !single_score(topk),
                scaling: config.moe_router_topk_scaling_factor,
                aux_loss: coefficient(config.moe_aux_loss_coeff, "moe_aux_loss_coeff")?,
                seq_aux_loss: coefficient(config.moe_seq_aux_loss_coeff, "moe_seq_aux_loss_coeff")?,
                z_loss: coefficient(config.moe_z_loss_coeff, "moe_z_loss_coeff")?,
                capacity_factor,
                global_aux_loss: coefficient(config.moe_global_aux_loss_coeff, "moe_global_aux_loss_coeff")?,
            },
            bias_rate: config.moe_router_enable_expert_bias.then_some(rate),
        })
    }

    pub fn axes(&self) -> Vec<Axis> {
        let mut axes = vec![
            Axis::new("experts", self.experts).elastic_per_layer().active(self.route.topk as usize),
            Axis::new("moe_ffn", self.ffn).tensor_parallel().elastic_per_layer(),
        ];
        axes.extend(self.shared_ffn.map(|n| Axis::new("shared_ffn", n).tensor_parallel().elastic_per_layer()));
        axes
    }

    /// A token passes through topk of the experts only, so the others' weights count for nothing.
    pub fn block(&self, block: Block) -> Block {
        let projections = if self.activation == Activation::Swiglu { 3 } else { 2 };
        let idle = self.experts as f64 - self.route.topk as f64;
        let channels = |axis| move || Layout::axis(axis, 1);
        let mut buffers = vec![vec![Layout::axis("experts", 1), self.activation.rows(channels("moe_ffn"))]];
        buffers.extend(self.shared_ffn.map(|_| vec![self.activation.rows(channels("shared_ffn"))]));
        let block = block.extra_flops(-2.0 * idle * (projections * self.ffn * self.hidden) as f64);
        buffers.into_iter().fold(block, |block, dims| block.keeps(FootprintKind::Buffer, dims))
    }

    pub fn declare(&self, b: &mut BlockDeclaration<'_>) -> Moe {
        let experts = || Layout::axis("experts", 1);
        let channels = || Layout::axis("moe_ffn", 1);
        let (normal, scaled) = (b.normal(), b.scaled());
        let up = match self.activation {
            Activation::Swiglu => "mixer.experts.{experts}.{part}_proj.weight",
            Activation::SquaredRelu | Activation::Gelu => "mixer.experts.{experts}.up_proj.weight",
        };
        Moe {
            norm: b.norm("pre_mlp_layernorm.weight", "norm.weight"),
            router: b.param("mlp.router.weight", "mixer.gate.weight", [experts(), hidden()], normal),
            bias: self.bias_rate.map(|rate| {
                b.buffer(
                    "mlp.router.expert_bias",
                    "mixer.gate.e_score_correction_bias",
                    [experts()],
                    Init::Zeros,
                    |buffer| buffer.updated_by(BufferUpdate::ExpertBias { rate }),
                )
            }),
            share: (self.route.global_aux_loss != 0.0).then(|| {
                let even = Init::Constant(1.0 / self.experts as f64);
                let name = "mlp.router.load_share";
                b.buffer(name, name, [experts()], even, |buffer| buffer.updated_by(BufferUpdate::LoadShare))
            }),
            fc1: b.param(
                "mlp.experts.linear_fc1.weight{experts}",
                up,
                [experts(), self.activation.rows(channels), hidden()],
                normal,
            ),
            fc2: b.param(
                "mlp.experts.linear_fc2.weight{experts}",
                "mixer.experts.{experts}.down_proj.weight",
                [experts(), hidden(), channels()],
                scaled,
            ),
            shared: self.shared_ffn.map(|_| {
                let paths = ["mlp.shared_experts", "mixer.shared_experts"];
                Mlp::declare(b, paths, "shared_ffn", self.activation, Role::SharedExpertHidden)
            }),
            activation: self.activation,
            route: self.route.clone(),
        }
    }
}

/// Parameters of an expert layer.
#[derive(Clone, Debug)]
pub struct Moe {
    norm: ParamId,
    router: ParamId,
    bias: Option<BufferId>,
    /// Share of the load of each expert, for the global balancing loss.
    share: Option<BufferId>,
    fc1: ParamId,
    fc2: ParamId,
    shared: Option<Mlp>,
    activation: Activation,
    route: MoeRoute,
}

impl Moe {
    /// What the layer adds to the residual stream: x [tokens, hidden] to [tokens, hidden].
    pub fn forward(&self, cx: &Cx, x: Tensor, eps: f64) -> Result<Tensor> {
        let h = cx.rms_norm("pre_mlp_layernorm", x, self.norm, eps)?;
        let routed = self.experts(cx, h)?;
        match &self.shared {
            Some(shared) => cx.add("mlp.sum", routed, shared.forward(cx, "mlp.shared_experts", h)?),
            None => Ok(routed),
        }
    }

    fn experts(&self, cx: &Cx, h: Tensor) -> Result<Tensor> {
        let logits = cx.role(Role::RouterLogits, cx.linear("mlp.router", h, self.router)?)?;
        let routing = match (self.share, self.bias) {
            (Some(share), bias) => cx.moe_route_balanced("mlp.router.topk", logits, bias, share, self.route.clone())?,
            (None, Some(bias)) => cx.moe_route_biased("mlp.router.topk", logits, bias, self.route.clone())?,
            (None, None) => cx.moe_route("mlp.router.topk", logits, self.route.clone())?,
        };
        let h = cx.role(Role::ExpertInput, h)?;
        let slots = cx.moe_permute("mlp.permute", h, routing, self.fc1)?;
        let h = cx.grouped_linear("mlp.experts.linear_fc1", slots.xs, self.fc1, slots.offsets)?;
        let h = cx.role(Role::ExpertHidden, h)?;
        let h = self.activation.apply(cx, "mlp.experts.activation", h, Some(slots.probs))?;
        let y = cx.grouped_linear("mlp.experts.linear_fc2", h, self.fc2, slots.offsets)?;
        cx.moe_unpermute("mlp.unpermute", y, &slots)
    }
}
