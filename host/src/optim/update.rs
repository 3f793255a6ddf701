//! One optimizer step over a rank's flat parameters: finalised gradients, global norm, clip, Adam; and buffers that
//! follow the load of experts.
//!
//! Knows parameter tables and groups; knows no programs. Formulas: `gantry_kernels::cpu::optimizer` and `moe_route`.

use crate::comm::Group;
use crate::error::Result;
use crate::model::ParamTable;
use gantry_kernels::cpu::moe_route::ExpertBiasUpdate;
use gantry_kernels::cpu::optimizer::{Adam, ClipCoefficient, Decay, SquaredNorm};
use gantry_kernels::{Args, Cost, Element, Kernel};

/// Settings of Adam that do not change during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamConfig {
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    /// Decay goes into the update (AdamW) instead of the gradient.
    pub decoupled: bool,
    /// Global gradient norm above which gradients are scaled down; 0 means never.
    pub clip_grad: f64,
}

/// First and second moments, laid out as the parameters.
pub struct Moments<T> {
    pub exp_avg: Vec<T>,
    pub exp_avg_sq: Vec<T>,
}

impl<T: Element> Moments<T> {
    pub fn new(len: usize) -> Moments<T> {
        Moments { exp_avg: vec![T::ZERO; len], exp_avg_sq: vec![T::ZERO; len] }
    }
}

fn launch<'a, T: Element>(kernel: &dyn Kernel, ins: &'a [&'a [T]], outs: &'a mut [&'a mut [T]]) {
    T::launch(kernel, Args { ins, outs, ints: &[], int_outs: &mut [], work: &mut [] });
}

/// Takes the sums over ranks that gradients still need: terms over tp (`partial[entry]`), then all over dp.
pub fn finalise<T: Element>(
    table: &ParamTable,
    partial: &[bool],
    grads: &mut [T],
    tp: &dyn Group<T>,
    dp: &dyn Group<T>,
) -> Result<()> {
    if tp.size() > 1 {
        for (entry, _) in table.params.iter().zip(partial).filter(|&(_, &partial)| partial) {
            let range = entry.stored.offset..entry.stored.offset + entry.stored.len;
            tp.all_reduce(&mut grads[range])?;
        }
    }
    if dp.size() > 1 {
        dp.all_reduce(grads)?;
    }
    Ok(())
}

/// Sum of squares of this rank's share of the gradients; parameters that every tp rank holds count on the first only.
pub fn square<T: Element>(table: &ParamTable, grads: &[T], tp_rank: usize) -> f64 {
    let mut sum = 0.0;
    for entry in &table.params {
        let stored = &entry.stored;
        if stored.sharded() || tp_rank == 0 {
            let mut one = [T::ZERO];
            launch(&SquaredNorm { n: stored.len }, &[&grads[stored.offset..][..stored.len]], &mut [&mut one]);
            sum += one[0].to_f64();
        }
    }
    sum
}

/// Learning rate and weight decay of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepHyper {
    pub lr: f64,
    pub weight_decay: f64,
    /// Counted from 1, for the bias correction.
    pub step: u64,
}

/// What gradients of global square sum `square` are multiplied by, and their norm before that. If the norm is not finite
/// the factor is NaN, at which [`apply`] changes nothing.
pub fn clip<T: Element>(config: &AdamConfig, square: f64) -> (T, f64) {
    let (mut scale, mut norm) = ([T::ZERO], [T::ZERO]);
    let clip = ClipCoefficient { max_norm: config.clip_grad };
    launch(&clip, &[&[T::of(square)], &[T::ONE]], &mut [&mut scale, &mut norm]);
    (scale[0], norm[0].to_f64())
}

/// Updates every parameter with its gradient times `scale`. Returns the work by count.
pub fn apply<T: Element>(
    config: &AdamConfig,
    hyper: StepHyper,
    table: &ParamTable,
    scale: T,
    grads: &[T],
    params: &mut [T],
    moments: &mut Moments<T>,
) -> Cost {
    let hyper = [T::of(hyper.lr), T::of(hyper.weight_decay), T::of(hyper.step as f64)];
    let mut total = Cost::default();
    for entry in &table.params {
        let range = entry.stored.offset..entry.stored.offset + entry.stored.len;
        let adam = Adam {
            n: entry.stored.len,
            beta1: config.beta1,
            beta2: config.beta2,
            eps: config.eps,
            decay: if config.decoupled { Decay::Decoupled } else { Decay::L2 },
            lr_mult: entry.lr_mult,
            wd_mult: entry.wd_mult,
        };
        let cost = Kernel::cost(&adam);
        total = Cost::new(total.flops + cost.flops, total.elements + cost.elements);
        launch(
            &adam,
            &[&grads[range.clone()], &hyper, &[scale]],
            &mut [&mut params[range.clone()], &mut moments.exp_avg[range.clone()], &mut moments.exp_avg_sq[range]],
        );
    }
    total
}

/// Updates an expert bias by the step's counts of assignments to each expert.
pub fn expert_bias<T: Element>(rate: f64, counts: &[i32], bias: &mut [T]) {
    let kernel = ExpertBiasUpdate { active: counts.len(), rate };
    T::launch(&kernel, Args { ins: &[], outs: &mut [bias], ints: &[counts], int_outs: &mut [], work: &mut [] });
}
