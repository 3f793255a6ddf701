//! `-`: an MLP, fc2(f(fc1 x)); and the function f, which experts share.

use crate::config::{Activation, Config, needed};
use crate::declare::{BlockDeclaration, Linear, hidden};
use crate::pattern::LayerKind;
use gantry_plugin_api::ops::{Act, Role};
use gantry_plugin_api::plan::{Axis, Block, FootprintKind, Layout};
use gantry_plugin_api::sdk::{Cx, ParamId, Result, Tensor};

impl Activation {
    /// Rows of fc1 for hidden channels of this layout.
    pub fn rows(self, channels: impl Fn() -> Layout) -> Layout {
        match self {
            Activation::SquaredRelu | Activation::Gelu => channels(),
            Activation::Swiglu => Layout::seq([("gate", channels()), ("up", channels())]),
        }
    }

    /// f(x), each row then multiplied by `row_weight` [rows] if there is one.
    pub fn apply(self, cx: &Cx, path: &str, x: Tensor, row_weight: Option<Tensor>) -> Result<Tensor> {
        let act = match self {
            Activation::SquaredRelu => Act::Relu2,
            Activation::Gelu => Act::GeluTanh,
            Activation::Swiglu => {
                return match row_weight {
                    Some(weight) => cx.swiglu_weighted(path, x, weight),
                    None => cx.swiglu(path, x),
                };
            }
        };
        match row_weight {
            Some(weight) => cx.activation_weighted(path, x, weight, act),
            None => cx.activation(path, x, act),
        }
    }
}

/// Sizes of MLP layers.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub ffn: usize,
    activation: Activation,
}

impl Sizes {
    pub fn new(config: &Config) -> Result<Sizes> {
        let ffn = needed(config.ffn_hidden_size, "ffn_hidden_size", LayerKind::Mlp)?;
        Ok(Sizes { ffn, activation: config.activation })
    }

    pub fn axes(&self) -> [Axis; 1] {
        [Axis::new("ffn", self.ffn).tensor_parallel().elastic_per_layer()]
    }

    pub fn block(&self, block: Block) -> Block {
        block.keeps(FootprintKind::Buffer, [self.activation.rows(|| Layout::axis("ffn", 1))])
    }

    pub fn declare(&self, b: &mut BlockDeclaration<'_>) -> (ParamId, Mlp) {
        let norm = b.norm("mlp.linear_fc1.layer_norm_weight", "norm.weight");
        (norm, Mlp::declare(b, ["mlp", "mixer"], "ffn", self.activation, Role::FfnHidden))
    }
}

/// Parameters of two projections with a function between them.
#[derive(Clone, Copy, Debug)]
pub struct Mlp {
    fc1: Linear,
    fc2: Linear,
    activation: Activation,
    role: Role,
}

impl Mlp {
    /// Declares them under `path` and `hf_path` with hidden channels made of `axis`.
    pub fn declare(
        b: &mut BlockDeclaration<'_>,
        [path, hf_path]: [&str; 2],
        axis: &str,
        activation: Activation,
        role: Role,
    ) -> Mlp {
        let channels = || Layout::axis(axis, 1);
        let (normal, scaled) = (b.normal(), b.scaled());
        let up = match activation {
            Activation::Swiglu => "{part}_proj",
            Activation::SquaredRelu | Activation::Gelu => "up_proj",
        };
        Mlp {
            fc1: b.linear(
                &format!("{path}.linear_fc1"),
                &format!("{hf_path}.{up}"),
                [activation.rows(channels), hidden()],
                normal,
            ),
            fc2: b.linear(
                &format!("{path}.linear_fc2"),
                &format!("{hf_path}.down_proj"),
                [hidden(), channels()],
                scaled,
            ),
            activation,
            role,
        }
    }

    /// h [tokens, hidden] to [tokens, hidden]; calls are named under `path`.
    pub fn forward(&self, cx: &Cx, path: &str, h: Tensor) -> Result<Tensor> {
        let h = self.fc1.apply(cx, &format!("{path}.linear_fc1"), h)?;
        let h = self.activation.apply(cx, &format!("{path}.activation"), h, None)?;
        self.fc2.apply(cx, &format!("{path}.linear_fc2"), cx.role(self.role, h)?)
    }
}
