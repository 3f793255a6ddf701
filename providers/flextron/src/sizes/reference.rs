//! Sizes as Megatron-LM's `flex_budget_utils.py` counts them, for parity with it.
//!
//! Where it differs from a built model: a shared expert counts as ffn * shared for each projection, the router of
//! experts not at all, Mamba has 8 groups whatever the model says, and its convolution's state takes no memory.

use super::{Counts, Inference};
use crate::dual::{Dual, soft_max, sum};

/// Groups that the reference counts for every Mamba layer.
const MAMBA_GROUPS: f64 = 8.0;
/// Taps that it counts for every convolution.
const CONV_WIDTH: f64 = 4.0;

/// Sizes that no budget changes.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// One symbol per layer: `M`, `*` or `E`.
    pub pattern: String,
    pub mamba_head_dim: f64,
    pub mamba_state_dim: f64,
    pub query_groups: f64,
    pub kv_channels: f64,
    pub vocab: f64,
    pub tied: bool,
    pub topk: f64,
    pub shared_ffn: f64,
}

/// Widths of the axes: one number for all layers, or one for each layer of the kind that has the axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Widths {
    pub hidden: Dual,
    pub ffn: Vec<Dual>,
    pub mamba_heads: Vec<Dual>,
    pub attention_heads: Vec<Dual>,
    pub experts: Vec<Dual>,
}

fn of(widths: &[Dual], layer: usize) -> &Dual {
    if widths.len() == 1 { &widths[0] } else { &widths[layer] }
}

impl Model {
    fn count(&self, symbol: char) -> usize {
        self.pattern.chars().filter(|&c| c == symbol).count()
    }

    fn mamba(&self, hidden: &Dual, heads: &Dual) -> Dual {
        let inner = heads.scale(self.mamba_head_dim);
        let bc = Dual::constant(2.0 * MAMBA_GROUPS * self.mamba_state_dim);
        let in_proj = hidden * &sum([&inner.scale(2.0), &bc, heads]);
        let conv = (&inner + &bc).scale(1.0 + CONV_WIDTH);
        // dt_bias, A_log and D; input norm; gated norm.
        sum([&heads.scale(3.0), hidden, &in_proj, &conv, &inner, &(&inner * hidden)])
    }

    fn attention(&self, hidden: &Dual, heads: &Dual) -> Dual {
        let channels = &heads.scale(2.0) + &Dual::constant(2.0 * self.query_groups);
        hidden + &(&channels.scale(self.kv_channels) * hidden)
    }

    fn moe(&self, hidden: &Dual, ffn: &Dual, experts: &Dual) -> Dual {
        let projection = ffn * &(&(hidden * experts) + &Dual::constant(self.shared_ffn));
        hidden + &projection.scale(2.0)
    }

    /// Sizes at given widths.
    pub fn counts(&self, widths: &Widths, at: Inference) -> Counts {
        let Widths { hidden, ffn, mamba_heads, attention_heads, experts } = widths;
        let tables = if self.tied { 1.0 } else { 2.0 };
        let outside = &hidden.scale(tables * self.vocab) + hidden;
        let mamba: Vec<Dual> = (0..self.count('M')).map(|i| self.mamba(hidden, of(mamba_heads, i))).collect();
        let attention: Vec<Dual> =
            (0..self.count('*')).map(|i| self.attention(hidden, of(attention_heads, i))).collect();
        let moe = |experts: &dyn Fn(usize) -> Dual| -> Vec<Dual> {
            (0..self.count('E')).map(|i| self.moe(hidden, of(ffn, i), &experts(i))).collect()
        };
        let common = sum(mamba.iter().chain(&attention).chain([&outside]));
        let (batch, tokens) = (at.batch_size as f64, (at.batch_size * at.seq_length) as f64);
        // The number of heads cancels out of the value and not out of the gradient.
        let kv: Vec<Dual> = (0..self.count('*'))
            .map(|i| of(attention_heads, i))
            .map(|heads| (heads / &heads.detached()).scale(2.0 * tokens * self.query_groups * self.kv_channels))
            .collect();
        let ssm: Vec<Dual> = (0..self.count('M'))
            .map(|i| of(mamba_heads, i).scale(batch * self.mamba_head_dim * self.mamba_state_dim))
            .collect();
        // One width for all layers takes no gradient here.
        let hidden_of = |i| if ffn.len() == 1 { ffn[0].detached() } else { of(ffn, i).clone() };
        let buffers: Vec<Dual> =
            (0..self.count('E')).map(|i| &hidden_of(i).scale(self.topk) + &Dual::constant(self.shared_ffn)).collect();
        Counts {
            total: &common + &sum(&moe(&|i| of(experts, i).clone())),
            active: &common + &sum(&moe(&|_| Dual::constant(self.topk))),
            kv_cache: sum(&kv),
            ssm_cache: sum(&ssm),
            buffer: soft_max(&buffers).scale((at.batch_size * at.prefill_chunk) as f64),
        }
    }
}
