//! The host's operators as methods of [`Cx`]. Shapes and formulas stand at the attribute structs in [`ops`].
//!
//! A method takes the operator's attributes as arguments where there is one, and its attribute struct where there are
//! several. Tensors are passed by value: they are handles.

use super::cx::{Cx, Operand, Tensor};
use super::{BufferId, Error, Result};
use crate::ops::{self, Act, Reduction};

/// What a router chose: probs [tokens, topk] and expert indices i32 [tokens, topk].
#[derive(Clone, Copy, Debug)]
pub struct Routing {
    pub probs: Tensor,
    pub indices: Tensor,
}

/// Tokens sorted by expert; a slot is a (token, choice) pair.
#[derive(Clone, Copy, Debug)]
pub struct Permuted {
    /// [slots, channels].
    pub xs: Tensor,
    /// Probability of each slot, [slots].
    pub probs: Tensor,
    /// First slot of each expert, i32 [experts + 1].
    pub offsets: Tensor,
    /// i32 [tokens, topk].
    pub slot_of: Tensor,
    /// i32 [slots].
    pub token_of: Tensor,
}

impl Cx {
    fn one<O: ops::Op>(&self, path: &str, op: &O, inputs: &[Tensor]) -> Result<Tensor> {
        let [y] = self.op(path, op, inputs)?;
        Ok(y)
    }

    /// [`ops::Embedding`]: weight [vocab, channels], ids i32 [tokens] to [tokens, channels].
    pub fn embedding(&self, path: &str, weight: impl Operand, ids: Tensor) -> Result<Tensor> {
        self.one(path, &ops::Embedding {}, &[weight.resolve(self)?, ids])
    }

    /// [`ops::Linear`] without bias: x [tokens, in], weight [out, in] to [tokens, out].
    pub fn linear(&self, path: &str, x: Tensor, weight: impl Operand) -> Result<Tensor> {
        self.one(path, &ops::Linear {}, &[x, weight.resolve(self)?])
    }

    /// [`ops::Linear`] with bias [out].
    pub fn linear_bias(&self, path: &str, x: Tensor, weight: impl Operand, bias: impl Operand) -> Result<Tensor> {
        self.one(path, &ops::Linear {}, &[x, weight.resolve(self)?, bias.resolve(self)?])
    }

    /// [`ops::RmsNorm`]: x [tokens, channels], weight [channels].
    pub fn rms_norm(&self, path: &str, x: Tensor, weight: impl Operand, eps: f64) -> Result<Tensor> {
        self.one(path, &ops::RmsNorm { eps }, &[x, weight.resolve(self)?])
    }

    /// [`ops::LayerNorm`]: x [tokens, channels], weight and bias [channels].
    pub fn layer_norm(
        &self,
        path: &str,
        x: Tensor,
        weight: impl Operand,
        bias: impl Operand,
        eps: f64,
    ) -> Result<Tensor> {
        self.one(path, &ops::LayerNorm { eps }, &[x, weight.resolve(self)?, bias.resolve(self)?])
    }

    /// [`ops::GatedNorm`]: y and gate z [tokens, heads x head_dim], weight [heads x head_dim].
    pub fn gated_norm(
        &self,
        path: &str,
        y: Tensor,
        z: Tensor,
        weight: impl Operand,
        attrs: ops::GatedNorm,
    ) -> Result<Tensor> {
        self.one(path, &attrs, &[y, z, weight.resolve(self)?])
    }

    /// [`ops::Activation`]: pointwise.
    pub fn activation(&self, path: &str, x: Tensor, act: Act) -> Result<Tensor> {
        self.one(path, &ops::Activation { act }, &[x])
    }

    /// [`ops::Activation`], each row then multiplied by row_weight [tokens].
    pub fn activation_weighted(&self, path: &str, x: Tensor, row_weight: Tensor, act: Act) -> Result<Tensor> {
        self.one(path, &ops::Activation { act }, &[x, row_weight])
    }

    /// [`ops::SwiGlu`]: x [tokens, gate | up] to [tokens, channels].
    pub fn swiglu(&self, path: &str, x: Tensor) -> Result<Tensor> {
        self.one(path, &ops::SwiGlu {}, &[x])
    }

    /// [`ops::SwiGlu`], each row then multiplied by row_weight [tokens].
    pub fn swiglu_weighted(&self, path: &str, x: Tensor, row_weight: Tensor) -> Result<Tensor> {
        self.one(path, &ops::SwiGlu {}, &[x, row_weight])
    }

    /// [`ops::CausalConv1d`]: x [tokens, channels], weight [channels, width], bias [channels].
    pub fn causal_conv1d(
        &self,
        path: &str,
        x: Tensor,
        weight: impl Operand,
        bias: impl Operand,
        act: Act,
    ) -> Result<Tensor> {
        self.one(path, &ops::CausalConv1d { act }, &[x, weight.resolve(self)?, bias.resolve(self)?])
    }

    /// [`ops::SsdScan`]: xbc [tokens, x | B | C], dt [tokens, heads], a_log, d, dt_bias [heads] to
    /// [tokens, heads x head_dim].
    #[allow(clippy::too_many_arguments)]
    pub fn ssd_scan(
        &self,
        path: &str,
        xbc: Tensor,
        dt: Tensor,
        a_log: impl Operand,
        d: impl Operand,
        dt_bias: impl Operand,
        attrs: ops::SsdScan,
    ) -> Result<Tensor> {
        self.one(path, &attrs, &[xbc, dt, a_log.resolve(self)?, d.resolve(self)?, dt_bias.resolve(self)?])
    }

    /// [`ops::Attention`]: qkv [tokens, q | k | v] to [tokens, heads x head_dim].
    pub fn attention(&self, path: &str, qkv: Tensor, attrs: ops::Attention) -> Result<Tensor> {
        self.one(path, &attrs, &[qkv])
    }

    /// [`ops::Rope`]: qkv [tokens, q | k | v] with q and k turned.
    pub fn rope(&self, path: &str, qkv: Tensor, attrs: ops::Rope) -> Result<Tensor> {
        self.one(path, &attrs, &[qkv])
    }

    /// [`ops::MoeRoute`] without expert bias: logits [tokens, experts].
    pub fn moe_route(&self, path: &str, logits: Tensor, attrs: ops::MoeRoute) -> Result<Routing> {
        let [probs, indices] = self.op(path, &attrs, &[logits])?;
        Ok(Routing { probs, indices })
    }

    /// [`ops::MoeRoute`] with an expert bias [experts] that shifts the choice but not the probabilities.
    pub fn moe_route_biased(
        &self,
        path: &str,
        logits: Tensor,
        bias: impl Operand,
        attrs: ops::MoeRoute,
    ) -> Result<Routing> {
        let [probs, indices] = self.op(path, &attrs, &[logits, bias.resolve(self)?])?;
        Ok(Routing { probs, indices })
    }

    /// [`ops::MoeRoute`] with a balancing loss over the whole batch: `share` [experts] is a buffer that follows each
    /// expert's share of the load.
    pub fn moe_route_balanced(
        &self,
        path: &str,
        logits: Tensor,
        bias: Option<BufferId>,
        share: impl Operand,
        attrs: ops::MoeRoute,
    ) -> Result<Routing> {
        let share = share.resolve(self)?;
        let [probs, indices] = match bias {
            Some(bias) => self.op(path, &attrs, &[logits, bias.resolve(self)?, share])?,
            None => self.op(path, &attrs, &[logits, share])?,
        };
        Ok(Routing { probs, indices })
    }

    /// [`ops::MoePermute`]: sorts x [tokens, channels] by expert. `stacked` is a parameter stacked over the experts; it
    /// names the axis.
    pub fn moe_permute(&self, path: &str, x: Tensor, routing: Routing, stacked: impl Operand) -> Result<Permuted> {
        let inputs = [x, routing.probs, routing.indices, stacked.resolve(self)?];
        let [xs, probs, offsets, slot_of, token_of] = self.op(path, &ops::MoePermute {}, &inputs)?;
        Ok(Permuted { xs, probs, offsets, slot_of, token_of })
    }

    /// [`ops::GroupedLinear`]: xs [slots, in], weight [experts, out, in] to [slots, out].
    pub fn grouped_linear(&self, path: &str, xs: Tensor, weight: impl Operand, offsets: Tensor) -> Result<Tensor> {
        self.one(path, &ops::GroupedLinear {}, &[xs, weight.resolve(self)?, offsets])
    }

    /// [`ops::MoeUnpermute`]: ys [slots, channels] summed back to [tokens, channels].
    pub fn moe_unpermute(&self, path: &str, ys: Tensor, order: &Permuted) -> Result<Tensor> {
        self.one(path, &ops::MoeUnpermute {}, &[ys, order.slot_of, order.token_of])
    }

    /// a + b.
    pub fn add(&self, path: &str, a: impl Operand, b: impl Operand) -> Result<Tensor> {
        self.one(path, &ops::Add {}, &[a.resolve(self)?, b.resolve(self)?])
    }

    /// a * b, elementwise.
    pub fn mul(&self, path: &str, a: impl Operand, b: impl Operand) -> Result<Tensor> {
        self.one(path, &ops::Mul {}, &[a.resolve(self)?, b.resolve(self)?])
    }

    /// x * by.
    pub fn scale(&self, path: &str, x: Tensor, by: f64) -> Result<Tensor> {
        self.one(path, &ops::Scale { by }, &[x])
    }

    /// The segments of the last dimension, in order, as views; as many as the declaration has, or an error that lists
    /// them.
    pub fn split<const N: usize>(&self, path: &str, x: Tensor) -> Result<[Tensor; N]> {
        let parts = self.op_many(path, &ops::Split {}, &[x])?;
        parts.as_slice().try_into().map_err(|_| {
            let names = self.describe(x).ok().and_then(|mut d| d.dims.pop());
            let names = names.map(|d| d.segments.into_iter().map(|s| s.name).collect::<Vec<_>>().join(", "));
            let names = names.map(|n| format!(" ({n})")).unwrap_or_default();
            Error::shape(format!("{path}: split into {N} parts, but the last dimension has {}{names}", parts.len()))
        })
    }

    /// Joins tensors along the last dimension; a view if they are neighbours of one split.
    pub fn concat(&self, path: &str, parts: &[Tensor]) -> Result<Tensor> {
        self.one(path, &ops::Concat {}, parts)
    }

    /// Columns start .. start + len of the last dimension.
    pub fn slice(&self, path: &str, x: Tensor, start: usize, len: usize) -> Result<Tensor> {
        self.one(path, &ops::Slice { start: start as u64, len: len as u64 }, &[x])
    }

    /// Rows of x [rows, channels] by index i32 [n].
    pub fn gather_rows(&self, path: &str, x: impl Operand, index: Tensor) -> Result<Tensor> {
        self.one(path, &ops::GatherRows {}, &[x.resolve(self)?, index])
    }

    /// Softmax over the last dimension.
    pub fn softmax(&self, path: &str, x: Tensor) -> Result<Tensor> {
        self.one(path, &ops::Softmax {}, &[x])
    }

    /// Logarithm of the softmax over the last dimension.
    pub fn log_softmax(&self, path: &str, x: Tensor) -> Result<Tensor> {
        self.one(path, &ops::LogSoftmax {}, &[x])
    }

    /// [`ops::GumbelSoftmax`] with the host's noise of stream `attrs.stream`; tau and scale have one element.
    pub fn gumbel_softmax(
        &self,
        path: &str,
        logits: Tensor,
        tau: Tensor,
        scale: Tensor,
        attrs: ops::GumbelSoftmax,
    ) -> Result<Tensor> {
        self.one(path, &attrs, &[logits, tau, scale])
    }

    /// [`ops::GumbelSoftmax`] with given noise, shaped like the logits.
    pub fn gumbel_softmax_with_noise(
        &self,
        path: &str,
        logits: Tensor,
        tau: Tensor,
        scale: Tensor,
        noise: Tensor,
        attrs: ops::GumbelSoftmax,
    ) -> Result<Tensor> {
        self.one(path, &attrs, &[logits, tau, scale, noise])
    }

    /// Reduction over the last dimension.
    pub fn reduce(&self, path: &str, x: Tensor, kind: Reduction) -> Result<Tensor> {
        self.one(path, &ops::Reduce { kind }, &[x])
    }

    /// [`ops::Dropout`] with probability `p`.
    pub fn dropout(&self, path: &str, x: Tensor, p: f64) -> Result<Tensor> {
        self.one(path, &ops::Dropout { p }, &[x])
    }

    /// Loss of each token, [tokens]: logits [tokens, classes], labels i32 [tokens].
    pub fn cross_entropy(&self, path: &str, logits: Tensor, labels: Tensor, label_smoothing: f64) -> Result<Tensor> {
        self.one(path, &ops::CrossEntropy { label_smoothing }, &[logits, labels])
    }

    /// [`ops::KlDivergence`] of each token, [tokens].
    pub fn kl_divergence(
        &self,
        path: &str,
        student: Tensor,
        teacher: Tensor,
        attrs: ops::KlDivergence,
    ) -> Result<Tensor> {
        self.one(path, &attrs, &[student, teacher])
    }

    /// Mean squared error of each token over the last dimension, [tokens]; no gradient into b.
    pub fn mse_loss(&self, path: &str, a: Tensor, b: Tensor) -> Result<Tensor> {
        self.one(path, &ops::MseLoss {}, &[a, b])
    }

    /// 1 - cosine similarity of each token, [tokens]; no gradient into b.
    pub fn cosine_loss(&self, path: &str, a: Tensor, b: Tensor) -> Result<Tensor> {
        self.one(path, &ops::CosineLoss {}, &[a, b])
    }

    /// x divided by the standard deviation of each row over the last dimension.
    pub fn std_scale(&self, path: &str, x: Tensor) -> Result<Tensor> {
        self.one(path, &ops::StdScale {}, &[x])
    }

    /// Each row of x multiplied by weight [tokens].
    pub fn row_scale(&self, path: &str, x: Tensor, weight: Tensor) -> Result<Tensor> {
        self.one(path, &ops::RowScale {}, &[x, weight])
    }
}
