//! Host operators, one file per operator or close family: shape rule, placement rule, axis-state rule, forward, backward.
//!
//! An operator is found by the stable number its attributes carry (`gantry_plugin_api::ops`). `record` checks shapes,
//! brings its inputs into the placement it needs, appends kernels, and puts its backward rule on the tape. Values say
//! where they are: `seq` rows spread over tp, `partial` a sum not yet taken, dimensions spread by their segments.

pub mod activation;
pub mod arith;
pub mod attention;
pub mod causal_conv1d;
pub mod custom;
pub mod dropout;
pub mod embedding;
pub mod gated_norm;
pub mod gather_rows;
pub mod grouped_linear;
mod heads;
pub mod layer_norm;
pub mod linear;
pub mod lm_loss;
pub mod mask;
pub mod moe_permute;
pub mod moe_route;
pub mod reduce;
pub mod rms_norm;
pub mod rope;
pub mod row_scale;
pub mod rows;
pub mod shape;
pub mod softmax;
pub mod ssd_scan;
pub mod std_scale;
pub mod token_losses;

use super::graph::ValueId;
use super::recorder::Recorder;
use crate::error::Result;
use gantry_plugin_api::ops::Op;
use smallvec::SmallVec;

/// Results of a call, in order.
pub type Results = SmallVec<[ValueId; 8]>;

/// An operator of this host.
pub trait HostOp: Sync {
    fn id(&self) -> u32;
    fn version(&self) -> u32;
    fn name(&self) -> &'static str;
    /// Records one call.
    fn record(&self, cx: &mut Recorder<'_>, attrs: &[u8], inputs: &[ValueId]) -> Result<Results>;
}

/// An operator from its attribute type and a recording function.
pub struct Typed<A: Op>(pub fn(&mut Recorder<'_>, A, &[ValueId]) -> Result<Results>);

impl<A: Op> HostOp for Typed<A> {
    fn id(&self) -> u32 {
        A::ID
    }
    fn version(&self) -> u32 {
        A::VERSION
    }
    fn name(&self) -> &'static str {
        A::NAME
    }
    fn record(&self, cx: &mut Recorder<'_>, attrs: &[u8], inputs: &[ValueId]) -> Result<Results> {
        let attrs = A::decode(attrs).map_err(|e| cx.error(e))?;
        (self.0)(cx, attrs, inputs)
    }
}

/// Every operator, in the order of their files.
static OPERATORS: &[&[&dyn HostOp]] = &[
    activation::OPS,
    arith::OPS,
    attention::OPS,
    causal_conv1d::OPS,
    custom::OPS,
    dropout::OPS,
    embedding::OPS,
    gated_norm::OPS,
    gather_rows::OPS,
    grouped_linear::OPS,
    layer_norm::OPS,
    linear::OPS,
    moe_permute::OPS,
    moe_route::OPS,
    reduce::OPS,
    rms_norm::OPS,
    rope::OPS,
    row_scale::OPS,
    shape::OPS,
    softmax::OPS,
    ssd_scan::OPS,
    std_scale::OPS,
    token_losses::OPS,
];

/// The operator with this stable number.
pub fn find(id: u32) -> Option<&'static dyn HostOp> {
    OPERATORS.iter().flat_map(|ops| ops.iter()).copied().find(|op| op.id() == id)
}

/// One result.
pub fn one(id: ValueId) -> Results {
    SmallVec::from_iter([id])
}
