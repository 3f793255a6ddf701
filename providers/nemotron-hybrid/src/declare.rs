//! The plan under construction: the parameters of one block after the other.

use gantry_plugin_api::plan::{Axis, Block, Buffer, Init, Layout, ModelPlan, Param};
use gantry_plugin_api::sdk::{BufferId, Cx, ParamId, Result, Tensor};

/// The axis that the residual stream's channels are units of.
pub const HIDDEN: &str = "hidden";

/// Layout of the residual stream's channels.
pub fn hidden() -> Layout {
    Layout::axis(HIDDEN, 1)
}

/// A plan to which layers add themselves.
pub struct Declaration {
    pub plan: ModelPlan,
    /// Initial values of weights.
    pub normal: Init,
    /// Initial values of projections onto the residual stream, smaller the more of them add up.
    pub scaled: Init,
    /// Whether projections have biases.
    pub bias: bool,
}

impl Declaration {
    /// `layers` is the number of layers of the whole model.
    pub fn new(init_method_std: f64, layers: usize, bias: bool) -> Declaration {
        Declaration {
            bias,
            plan: ModelPlan::default(),
            normal: Init::Normal { std: init_method_std },
            scaled: Init::Normal { std: init_method_std / (2.0 * layers as f64).sqrt() },
        }
    }

    pub fn axes(&mut self, axes: impl IntoIterator<Item = Axis>) {
        self.plan.axes.extend(axes);
    }

    /// Begins a block; what is declared from here on belongs to it. Names begin with its path; Hugging Face names with
    /// `hf_path`.
    pub fn block(&mut self, block: Block, hf_path: impl Into<String>) -> BlockDeclaration<'_> {
        let path = block.path.clone();
        self.block_with_names(block, path, hf_path.into())
    }

    /// As [`Declaration::block`], with names that begin with `path`; with nothing if it is empty.
    pub fn block_with_names(&mut self, block: Block, path: String, hf_path: String) -> BlockDeclaration<'_> {
        let block = self.plan.add_block(block);
        BlockDeclaration { declaration: self, block, path, hf_path }
    }
}

/// A block under construction.
pub struct BlockDeclaration<'a> {
    pub declaration: &'a mut Declaration,
    block: usize,
    path: String,
    hf_path: String,
}

impl BlockDeclaration<'_> {
    pub fn normal(&self) -> Init {
        self.declaration.normal
    }

    pub fn scaled(&self) -> Init {
        self.declaration.scaled
    }

    /// A parameter called PATH.name, HF_PATH.hf_name in Hugging Face folders.
    pub fn param(&mut self, name: &str, hf_name: &str, dims: impl IntoIterator<Item = Layout>, init: Init) -> ParamId {
        self.param_with(name, hf_name, dims, init, |param| param)
    }

    /// As [`BlockDeclaration::param`], with further properties.
    pub fn param_with(
        &mut self,
        name: &str,
        hf_name: &str,
        dims: impl IntoIterator<Item = Layout>,
        init: Init,
        properties: impl FnOnce(Param) -> Param,
    ) -> ParamId {
        let param = Param::new(join(&self.path, name), self.block, dims, init).hf(join(&self.hf_path, hf_name));
        self.declaration.plan.add_param(properties(param))
    }

    /// A projection called PATH.name, with a bias if the model's have one; `dims` are [out, in].
    pub fn linear(&mut self, name: &str, hf_name: &str, dims: [Layout; 2], init: Init) -> Linear {
        let of = |part: &str| (format!("{name}.{part}"), format!("{hf_name}.{part}"));
        let out = dims[0].clone();
        let (weight_name, weight_hf_name) = of("weight");
        let weight = self.param(&weight_name, &weight_hf_name, dims, init);
        let bias = self.declaration.bias.then(|| {
            let (name, hf_name) = of("bias");
            self.param(&name, &hf_name, [out], Init::Zeros)
        });
        Linear { weight, bias }
    }

    /// The weight of an RMS norm over the residual stream.
    pub fn norm(&mut self, name: &str, hf_name: &str) -> ParamId {
        self.param(name, hf_name, [hidden()], Init::Ones)
    }

    pub fn buffer(
        &mut self,
        name: &str,
        hf_name: &str,
        dims: impl IntoIterator<Item = Layout>,
        init: Init,
        properties: impl FnOnce(Buffer) -> Buffer,
    ) -> BufferId {
        let buffer = Buffer::new(join(&self.path, name), self.block, dims, init).hf(join(&self.hf_path, hf_name));
        self.declaration.plan.add_buffer(properties(buffer))
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.into() } else { format!("{path}.{name}") }
}

/// A projection.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    weight: ParamId,
    bias: Option<ParamId>,
}

impl Linear {
    /// x [tokens, in] to [tokens, out].
    pub fn apply(&self, cx: &Cx, path: &str, x: Tensor) -> Result<Tensor> {
        match self.bias {
            Some(bias) => cx.linear_bias(path, x, self.weight, bias),
            None => cx.linear(path, x, self.weight),
        }
    }
}
