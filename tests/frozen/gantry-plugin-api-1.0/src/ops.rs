//! Every host operator: stable id, version, attributes; and the roles a provider marks points of its forward with.
//!
//! Attributes cross the ABI as a size-prefixed run of little-endian fields in declaration order. A newer version of
//! an operator may only append fields; a reader fills fields that are not there with their defaults and refuses
//! bytes it does not know, so an option is never dropped silently.

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// Encoded attributes of one call.
pub type AttrBytes = SmallVec<[u8; 64]>;

/// Attributes of a host operator.
pub trait Op: Sized {
    /// Stable number of the operator.
    const ID: u32;
    const VERSION: u32;
    const NAME: &'static str;

    fn encode(&self, out: &mut AttrBytes);
    /// Reads attributes; the error names the field.
    fn decode(bytes: &[u8]) -> Result<Self, String>;
}

/// A value that can stand in attributes.
pub trait AttrField: Sized {
    fn put(&self, out: &mut AttrBytes);
    /// Takes the value off the front of `bytes`.
    fn take(bytes: &mut &[u8]) -> Option<Self>;
}

fn split<'a>(bytes: &mut &'a [u8], n: usize) -> Option<&'a [u8]> {
    let (head, tail) = bytes.split_at_checked(n)?;
    *bytes = tail;
    Some(head)
}

macro_rules! plain_fields {
    ($($t:ty),*) => {$(
        impl AttrField for $t {
            fn put(&self, out: &mut AttrBytes) {
                out.extend_from_slice(&self.to_le_bytes());
            }
            fn take(bytes: &mut &[u8]) -> Option<Self> {
                Some(<$t>::from_le_bytes(split(bytes, size_of::<$t>())?.try_into().ok()?))
            }
        }
    )*};
}
plain_fields!(u32, u64, i64, f64);

impl AttrField for bool {
    fn put(&self, out: &mut AttrBytes) {
        out.push(u8::from(*self));
    }
    fn take(bytes: &mut &[u8]) -> Option<Self> {
        match split(bytes, 1)? {
            [0] => Some(false),
            [1] => Some(true),
            _ => None,
        }
    }
}

impl AttrField for String {
    fn put(&self, out: &mut AttrBytes) {
        (self.len() as u32).put(out);
        out.extend_from_slice(self.as_bytes());
    }
    fn take(bytes: &mut &[u8]) -> Option<Self> {
        let len = u32::take(bytes)? as usize;
        String::from_utf8(split(bytes, len)?.to_vec()).ok()
    }
}

impl<T: AttrField> AttrField for Vec<T> {
    fn put(&self, out: &mut AttrBytes) {
        (self.len() as u32).put(out);
        self.iter().for_each(|item| item.put(out));
    }
    fn take(bytes: &mut &[u8]) -> Option<Self> {
        let len = u32::take(bytes)? as usize;
        (0..len).map(|_| T::take(bytes)).collect()
    }
}

/// Declares operators: attribute struct, defaults, encoding, and one table of them all.
macro_rules! operators {
    ($($(#[$doc:meta])* $ty:ident = $id:literal v $version:literal $name:literal {
        $($(#[$fdoc:meta])* $field:ident : $ft:ty = $default:expr),* $(,)?
    })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Debug, PartialEq)]
            pub struct $ty { $($(#[$fdoc])* pub $field: $ft),* }

            impl Default for $ty {
                fn default() -> Self {
                    $ty { $($field: $default),* }
                }
            }

            impl Op for $ty {
                const ID: u32 = $id;
                const VERSION: u32 = $version;
                const NAME: &'static str = $name;

                #[allow(unused_variables)]
                fn encode(&self, out: &mut AttrBytes) {
                    $(self.$field.put(out);)*
                }

                #[allow(unused_mut)]
                fn decode(mut bytes: &[u8]) -> Result<Self, String> {
                    let bytes = &mut bytes;
                    $(
                        let $field = if bytes.is_empty() {
                            $default
                        } else {
                            <$ft as AttrField>::take(bytes)
                                .ok_or_else(|| format!("operator {}: attribute {} is malformed", $name, stringify!($field)))?
                        };
                    )*
                    if !bytes.is_empty() {
                        return Err(format!(
                            "operator {} version {}: {} bytes of attributes this host does not know",
                            $name, $version, bytes.len()
                        ));
                    }
                    Ok($ty { $($field),* })
                }
            }
        )*

        /// (id, version, name) of every operator of this API.
        pub const OPERATORS: &[(u32, u32, &str)] = &[$(($id, $version, $name)),*];
    };
}

/// Pointwise functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Act {
    Identity,
    Silu,
    /// Squared ReLU.
    Relu2,
    /// GELU, tanh approximation.
    GeluTanh,
    Relu,
    /// x if x > 0 else 0.1 x.
    LeakyRelu,
}

impl AttrField for Act {
    fn put(&self, out: &mut AttrBytes) {
        (*self as u32).put(out);
    }
    fn take(bytes: &mut &[u8]) -> Option<Self> {
        const ALL: [Act; 6] = [Act::Identity, Act::Silu, Act::Relu2, Act::GeluTanh, Act::Relu, Act::LeakyRelu];
        ALL.get(u32::take(bytes)? as usize).copied()
    }
}

/// How a router turns logits into scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ScoreFn {
    Sigmoid,
    Softmax,
}

impl AttrField for ScoreFn {
    fn put(&self, out: &mut AttrBytes) {
        (*self as u32).put(out);
    }
    fn take(bytes: &mut &[u8]) -> Option<Self> {
        [ScoreFn::Sigmoid, ScoreFn::Softmax].get(u32::take(bytes)? as usize).copied()
    }
}

/// Reductions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reduction {
    Sum,
    Mean,
    Max,
}

impl AttrField for Reduction {
    fn put(&self, out: &mut AttrBytes) {
        (*self as u32).put(out);
    }
    fn take(bytes: &mut &[u8]) -> Option<Self> {
        [Reduction::Sum, Reduction::Mean, Reduction::Max].get(u32::take(bytes)? as usize).copied()
    }
}

operators! {
    /// y [tokens, channels] = weight[ids]. Inputs: weight [vocab, channels], ids [tokens].
    Embedding = 1 v 1 "embedding" {}
    /// y = x W^T (+ b). Inputs: x [tokens, in], weight [out, in], optional bias [out].
    Linear = 2 v 1 "linear" {}
    /// y = x / sqrt(mean(x^2) + eps) * w. Inputs: x [tokens, channels], weight [channels].
    RmsNorm = 3 v 1 "rms_norm" { eps: f64 = 1e-5 }
    /// y = (x - mean) / sqrt(var + eps) * w + b, biased variance. Inputs: x, weight, bias.
    LayerNorm = 4 v 1 "layer_norm" { eps: f64 = 1e-5 }
    /// Grouped RMS norm with SiLU gate. Inputs: y, z [tokens, heads x head_dim], weight. Groups are those of the axis.
    GatedNorm = 5 v 1 "gated_norm" {
        eps: f64 = 1e-5,
        /// norm(y) * silu(z) instead of norm(y * silu(z)).
        norm_before_gate: bool = false,
    }
    /// Pointwise function. Inputs: x; optional row weight [tokens], multiplied after the function.
    Activation = 6 v 1 "activation" { act: Act = Act::Silu }
    /// silu(gate) * up. Inputs: x [tokens, gate | up]; optional row weight [tokens].
    SwiGlu = 7 v 1 "swiglu" {}
    /// Depthwise causal convolution over tokens. Inputs: x [tokens, channels], weight [channels, width], bias [channels].
    CausalConv1d = 8 v 1 "causal_conv1d" { act: Act = Act::Silu }
    /// Mamba-2 scan. Inputs: xbc [tokens, x | B | C], dt [tokens, heads], a_log, d, dt_bias [heads].
    /// Outputs: y [tokens, heads x head_dim].
    SsdScan = 9 v 1 "ssd_scan" {
        /// Tokens of a chunk; results do not depend on it beyond rounding.
        chunk: u64 = 64,
        /// Time steps, after softplus, are at least this.
        dt_min: f64 = 0.0,
    }
    /// Scaled dot-product attention. Inputs: qkv [tokens, q | k | v]. Output: [tokens, heads x head_dim].
    Attention = 10 v 1 "attention" {
        causal: bool = true,
        /// Scale of the scores; 0 means 1/sqrt(head_dim).
        scale: f64 = 0.0,
    }
    /// Rotary position embedding of the q and k segments. Inputs: qkv [tokens, q | k | v].
    Rope = 11 v 1 "rope" {
        theta: f64 = 10000.0,
        /// Channels of a head that turn; 0 means all.
        rotary_dim: u64 = 0,
        /// Pairs (2i, 2i+1) instead of (i, i + dim/2).
        interleaved: bool = false,
    }
    /// Top-k routing with auxiliary losses. Inputs: logits [tokens, experts]; optional bias buffer [experts]; last, if
    /// `global_aux_loss` is not 0, the buffer [experts] of each expert's share of the load.
    /// Outputs: probs [tokens, topk], indices i32 [tokens, topk].
    MoeRoute = 12 v 1 "moe_route" {
        topk: u64 = 1,
        score: ScoreFn = ScoreFn::Sigmoid,
        /// Divide the selected scores by their sum (+ 1e-20).
        normalize: bool = true,
        /// Factor on the probabilities.
        scaling: f64 = 1.0,
        aux_loss: f64 = 0.0,
        seq_aux_loss: f64 = 0.0,
        z_loss: f64 = 0.0,
        /// Tokens an expert takes, as a multiple of tokens * topk / experts; 0 means no limit.
        capacity_factor: f64 = 0.0,
        /// Balancing loss against the load of the whole batch of the step before, over all micro-batches and ranks:
        /// experts * sum_e share_e * mean_t score[t, e] / sum of scores.
        global_aux_loss: f64 = 0.0,
    }
    /// Sorts tokens by expert. Inputs: x [tokens, channels], probs, indices [tokens, topk], a parameter stacked over the
    /// experts (names the axis). Outputs: xs [slots, channels], row probs [slots], offsets i32 [experts + 1],
    /// slot_of i32 [tokens, topk], token_of i32 [slots].
    MoePermute = 13 v 1 "moe_permute" {}
    /// ys = xs W_e^T for the slots of each expert. Inputs: xs [slots, in], weight [experts, out, in], offsets.
    GroupedLinear = 14 v 1 "grouped_linear" {}
    /// y[t] = sum of its slots. Inputs: ys [slots, channels], slot_of, token_of.
    MoeUnpermute = 15 v 1 "moe_unpermute" {}
    /// a + b.
    Add = 16 v 1 "add" {}
    /// a * b, same shape.
    Mul = 17 v 1 "mul" {}
    /// x * by.
    Scale = 18 v 1 "scale" { by: f64 = 1.0 }
    /// The segments of the last dimension, as views.
    Split = 19 v 1 "split" {}
    /// Joins tensors along the last dimension; a view if they are neighbours of one split.
    Concat = 20 v 1 "concat" {}
    /// Columns start .. start + len of the last dimension, which must be one segment without an axis.
    Slice = 21 v 1 "slice" { start: u64 = 0, len: u64 = 0 }
    /// Rows of x [rows, channels] by index i32 [n].
    GatherRows = 22 v 1 "gather_rows" {}
    /// Softmax over the last dimension.
    Softmax = 23 v 1 "softmax" {}
    LogSoftmax = 24 v 1 "log_softmax" {}
    /// Gumbel-softmax over the last dimension. Inputs: logits, tau [1], scale [1]; optional noise like logits.
    GumbelSoftmax = 25 v 1 "gumbel_softmax" { hard: bool = false, stream: u32 = 0 }
    /// Reduction over the last dimension.
    Reduce = 26 v 1 "reduce" { kind: Reduction = Reduction::Sum }
    /// x * keep / (1 - p) in training, x otherwise.
    Dropout = 27 v 1 "dropout" { p: f64 = 0.0 }
    /// Per-token loss on given logits [tokens, classes] and labels i32 [tokens]. Output [tokens].
    CrossEntropy = 28 v 1 "cross_entropy" { label_smoothing: f64 = 0.0 }
    /// Per-token KL(teacher || student) on given logits. Inputs: student, teacher. Output [tokens].
    KlDivergence = 29 v 1 "kl_divergence" { temperature: f64 = 1.0, reverse: bool = false, topk: u64 = 0 }
    /// Per-token mean squared error over the last dimension. Inputs: a, b (no gradient). Output [tokens].
    MseLoss = 30 v 1 "mse_loss" {}
    /// Per-token 1 - cosine similarity. Inputs: a, b (no gradient). Output [tokens].
    CosineLoss = 31 v 1 "cosine_loss" {}
    /// x with each row multiplied by weight [tokens].
    RowScale = 32 v 1 "row_scale" {}
    /// An operator that a loaded plugin brings, see [`CustomOp`](crate::sdk::CustomOp).
    Custom = 33 v 1 "custom" {
        name: String = String::new(),
        /// Its attributes as JSON.
        attrs: String = "{}".into(),
    }
    /// x divided by the standard deviation of each row over the last dimension, sqrt(sum (x - mean)^2 / (n - 1)), without
    /// centring; a row without deviation stays as it is.
    StdScale = 34 v 1 "std_scale" {}
}

/// Meaning of a point in a provider's forward, for elastifiers. Closed within a major version of the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u32)]
#[non_exhaustive]
pub enum Role {
    /// Output of the embedding.
    Embedding = 0,
    /// Residual stream as a layer takes it, before its norm.
    MixerInput = 1,
    /// Output of a mixer's first projection (in_proj).
    InProjection = 2,
    Convolution = 3,
    /// Output of the scan or of attention, before the output projection.
    MixerCore = 4,
    /// Output of the gated norm.
    GateNorm = 5,
    /// What a layer adds to the residual stream.
    MixerOutput = 6,
    RouterLogits = 7,
    ExpertInput = 8,
    /// Hidden channels inside an expert.
    ExpertHidden = 9,
    ExpertOutput = 10,
    /// Hidden channels of a shared expert.
    SharedExpertHidden = 11,
    /// Hidden channels of an MLP, after its function.
    FfnHidden = 12,
    FinalNorm = 13,
    /// q, k and v of an attention layer. Heads are masked at [`Role::MixerCore`], where masking is exact.
    AttentionProjection = 14,
}

impl Role {
    pub const ALL: [Role; 15] = [
        Role::Embedding,
        Role::MixerInput,
        Role::InProjection,
        Role::Convolution,
        Role::MixerCore,
        Role::GateNorm,
        Role::MixerOutput,
        Role::RouterLogits,
        Role::ExpertInput,
        Role::ExpertHidden,
        Role::ExpertOutput,
        Role::SharedExpertHidden,
        Role::FfnHidden,
        Role::FinalNorm,
        Role::AttentionProjection,
    ];

    pub fn from_u32(n: u32) -> Option<Role> {
        Role::ALL.get(n as usize).copied()
    }
}

/// Kind of a region of a forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum RegionKind {
    /// Names operators in errors and profiles.
    Plain = 0,
    /// A layer that may be skipped as a whole.
    Layer = 1,
    /// Activations inside are not kept but computed again in the backward pass.
    Recompute = 2,
    /// No gradient flows out of it.
    NoGrad = 3,
}

impl RegionKind {
    pub fn from_u32(n: u32) -> Option<RegionKind> {
        [RegionKind::Plain, RegionKind::Layer, RegionKind::Recompute, RegionKind::NoGrad].get(n as usize).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_survive_the_trip() {
        let op = MoeRoute { topk: 6, score: ScoreFn::Softmax, z_loss: 1e-3, ..MoeRoute::default() };
        let mut bytes = AttrBytes::new();
        op.encode(&mut bytes);
        assert_eq!(MoeRoute::decode(&bytes), Ok(op));
    }

    #[test]
    fn an_older_writer_gets_defaults_and_a_newer_one_is_refused() {
        let mut bytes = AttrBytes::new();
        7u64.put(&mut bytes);
        assert_eq!(MoeRoute::decode(&bytes), Ok(MoeRoute { topk: 7, ..MoeRoute::default() }));
        let mut bytes = AttrBytes::new();
        RmsNorm::default().encode(&mut bytes);
        bytes.push(1);
        assert!(RmsNorm::decode(&bytes).unwrap_err().contains("rms_norm"));
    }

    #[test]
    fn ids_are_unique() {
        let mut ids: Vec<u32> = OPERATORS.iter().map(|op| op.0).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), OPERATORS.len());
    }
}
