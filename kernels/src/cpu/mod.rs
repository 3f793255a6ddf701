//! CPU kernels, one file per operator family; forward and backward together.
//!
//! Shapes: T tokens (all sequences of a micro-batch back to back, boundaries in `cu_seqlens`), C channels, H heads,
//! P head dim, G groups, N state, E experts, K experts per token, V vocabulary.

pub mod activation;
pub mod attention;
pub mod conv1d;
pub mod cross_entropy;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod gated_norm;
pub mod gemm;
pub mod gemm_call;
pub mod grouped_gemm;
pub mod gumbel;
pub mod indexing;
pub mod kl;
pub mod lanes;
pub mod layer_norm;
pub mod mask;
pub mod mask_mul;
pub mod moe_permute;
pub mod moe_route;
pub mod optimizer;
pub mod product;
pub mod reduce;
pub mod rms_norm;
pub mod rope;
pub mod softmax;
pub mod ssd;
pub mod swiglu;
pub mod vector;
pub mod vmath;

#[cfg(test)]
pub(crate) mod check;
