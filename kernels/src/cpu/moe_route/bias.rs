//! Update of the selection bias that balances expert loads without a loss (Wang et al. 2024).

use crate::kernel::{Args, Cost};
use crate::real::Real;

/// bias_e += rate * sign(mean load - load_e) over the first `active` experts, sign(0) = 0; the others keep their bias.
///
/// Loads are counts of assignments, summed over micro-batches and data parallel ranks.
/// ints: counts [E], or without ints, ins: counts [E]; outs: bias [E], updated in place.
#[derive(Clone, Debug)]
pub struct ExpertBiasUpdate {
    pub active: usize,
    pub rate: f64,
}

crate::kernels! {
    ExpertBiasUpdate => "expert_bias_update";
}

impl ExpertBiasUpdate {
    fn cost(&self) -> Cost {
        Cost::new(3.0 * self.active as f64, 2.0 * self.active as f64)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let load = |e: usize| match (args.ints, args.ins) {
            ([counts, ..], _) => f64::from(counts[e]),
            (_, [counts, ..]) => counts[e].to_f64(),
            _ => unreachable!("expert_bias_update takes counts"),
        };
        let [bias] = args.outs else { unreachable!("expert_bias_update gives bias") };
        let total: f64 = (0..self.active).map(load).sum();
        for (e, bias) in bias[..self.active].iter_mut().enumerate() {
            // Multiplied out, so that a load equal to the mean is found exactly.
            let gap = total - load(e) * self.active as f64;
            if gap != 0.0 {
                *bias += T::of(self.rate * gap.signum());
            }
        }
    }
}
