//! Several data sets as one: which set, and which sample of it, is sample i.
//!
//! Sample i comes from the set that lags most behind its share: largest w_d max(i, 1) - n_d, where n_d counts its
//! samples so far; of equals the first. By weights, shares are the normalised weights; without weights every sample of
//! every set is taken once, shares are the sets' lengths, and a set that is used up takes no further part. Source:
//! Megatron-LM, megatron/core/datasets/blended_dataset.py, helpers.cpp, and for how many samples each set is asked
//! blended_megatron_dataset_builder.py. The weights' sum is numpy's (pairwise), since a last bit can change the order.

use super::gpt::{GptConfig, GptDataset};
use super::indexed::IndexedDataset;
use super::room;
use super::sample::Sample;
use super::split::{Part, parts};
use crate::failure::{Failure, Result};
use std::sync::Arc;

/// Samples by which each set is asked for more than its share, relative (Megatron-LM's mid_level_dataset_surplus).
const SURPLUS: f64 = 0.005;
/// Megatron-LM numbers sets with 16 bits and a sign.
const MOST_SETS: usize = 32_766;

/// numpy's sum of float64: eight running sums, and halves summed apart beyond 128 numbers.
fn sum(x: &[f64]) -> f64 {
    match x.len() {
        ..8 => x.iter().fold(0.0, |sum, x| sum + x),
        8..=128 => {
            let (eights, rest) = x.split_at(x.len() / 8 * 8);
            let mut r = [0.0; 8];
            r.copy_from_slice(&eights[..8]);
            for eight in eights[8..].chunks_exact(8) {
                r.iter_mut().zip(eight).for_each(|(r, x)| *r += x);
            }
            let sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
            rest.iter().fold(sum, |sum, x| sum + x)
        }
        len => {
            let half = len / 2 / 8 * 8;
            sum(&x[..half]) + sum(&x[half..])
        }
    }
}

/// Weights over their sum.
pub fn normalized(weights: &[f64]) -> Result<Vec<f64>> {
    if weights.is_empty() || weights.len() > MOST_SETS {
        return Err(Failure::recipe(format!("a blend of {} data sets; 1 to {MOST_SETS} can be", weights.len())));
    }
    let total = sum(weights);
    match weights.iter().position(|&weight| !(weight > 0.0 && weight.is_finite())) {
        Some(set) => {
            let weight = weights[set];
            Err(Failure::recipe(format!("data set {set} of the blend has the weight {weight}; weights are above 0")))
        }
        None if !total.is_finite() => Err(Failure::recipe(format!("the weights of the blend sum up to {total}"))),
        None => Ok(weights.iter().map(|weight| weight / total).collect()),
    }
}

/// Samples asked of each set for a blend of `size` samples: its share rounded up, plus `surplus` of that rounded up.
/// Weights are normalised.
pub fn shares(weights: &[f64], size: u64, surplus: f64) -> Vec<u64> {
    weights.iter().map(|weight| ((size as f64 * weight).ceil() * (1.0 + surplus)).ceil() as u64).collect()
}

/// The order of a blend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// The set of each sample.
    pub dataset: Vec<u16>,
    /// The sample within its set.
    pub sample: Vec<u64>,
}

impl Order {
    fn with_room(size: u64) -> Result<Order> {
        Ok(Order { dataset: room(size, "the blend's order")?, sample: room(size, "the blend's order")? })
    }

    /// Takes the next sample from the one of `sets` that lags most.
    fn take(&mut self, shares: &[f64], taken: &mut [u64], sets: impl Iterator<Item = usize>) -> usize {
        let next = (self.dataset.len() as f64).max(1.0);
        let (mut most, mut chosen) = (f64::MIN, 0);
        for set in sets {
            let lag = shares[set] * next - taken[set] as f64;
            if lag > most {
                (most, chosen) = (lag, set);
            }
        }
        self.dataset.push(chosen as u16);
        self.sample.push(taken[chosen]);
        taken[chosen] += 1;
        chosen
    }

    /// `size` samples by weights.
    pub fn by_weights(weights: &[f64], size: u64) -> Result<Order> {
        let shares = normalized(weights)?;
        let (mut order, mut taken) = (Order::with_room(size)?, vec![0; shares.len()]);
        for _ in 0..size {
            order.take(&shares, &mut taken, 0..weights.len());
        }
        Ok(order)
    }

    /// Every sample of sets of these sizes once.
    pub fn exhausting(sizes: &[u64]) -> Result<Order> {
        let total = sizes.iter().try_fold(0u64, |sum, &size| sum.checked_add(size)).unwrap_or(u64::MAX);
        normalized(&sizes.iter().map(|&size| size as f64).collect::<Vec<_>>())?;
        let shares: Vec<f64> = sizes.iter().map(|&size| size as f64 / total as f64).collect();
        let (mut order, mut taken) = (Order::with_room(total)?, vec![0; sizes.len()]);
        let mut open: Vec<usize> = (0..sizes.len()).collect();
        while !open.is_empty() {
            let chosen = order.take(&shares, &mut taken, open.iter().copied());
            if taken[chosen] == sizes[chosen] {
                open.retain(|&set| set != chosen);
            }
        }
        Ok(order)
    }
}

/// Several data sets and the order in which they are read.
#[derive(Debug)]
pub struct Blend {
    sets: Vec<GptDataset>,
    order: Order,
}

impl Blend {
    /// An error if the order asks more of a set than it has.
    pub fn new(sets: Vec<GptDataset>, order: Order) -> Result<Blend> {
        let mut asked = vec![0u64; sets.len()];
        for (&set, &sample) in order.dataset.iter().zip(&order.sample) {
            match asked.get_mut(usize::from(set)) {
                Some(asked) => *asked = (*asked).max(sample + 1),
                None => return Err(Failure::data(format!("the blend names data set {set}, but has {}", sets.len()))),
            }
        }
        for (at, (set, asked)) in sets.iter().zip(asked).enumerate() {
            if asked > set.len() as u64 {
                let len = set.len();
                return Err(Failure::data(format!("the blend asks {asked} samples of data set {at}, which has {len}")));
            }
        }
        Ok(Blend { sets, order })
    }

    /// At least `size` samples of a part of several files, by weights.
    pub fn by_weights(
        files: &[(Arc<IndexedDataset>, f64)],
        split: &str,
        part: Part,
        size: u64,
        config: &GptConfig,
    ) -> Result<Blend> {
        let weights = normalized(&files.iter().map(|(_, weight)| *weight).collect::<Vec<_>>())?;
        let counts = shares(&weights, size, SURPLUS).into_iter().map(Some);
        let sets = cut(files.iter().map(|(set, _)| set).zip(counts), split, part, config)?;
        let size = shares(&weights, size, 0.0).iter().try_fold(0u64, |sum, &n| sum.checked_add(n)).unwrap_or(u64::MAX);
        Blend::new(sets, Order::by_weights(&weights, size)?)
    }

    /// One epoch of a part of several files: every sample once.
    pub fn exhausting(files: &[Arc<IndexedDataset>], split: &str, part: Part, config: &GptConfig) -> Result<Blend> {
        let sets = cut(files.iter().map(|set| (set, None)), split, part, config)?;
        let sizes: Vec<u64> = sets.iter().map(|set| set.len() as u64).collect();
        Blend::new(sets, Order::exhausting(&sizes)?)
    }

    pub fn sets(&self) -> &[GptDataset] {
        &self.sets
    }

    pub fn order(&self) -> &Order {
        &self.order
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.order.dataset.len()
    }

    pub fn is_empty(&self) -> bool {
        self.order.dataset.is_empty()
    }

    /// Sample i.
    pub fn sample(&self, i: usize) -> Result<Sample> {
        match (self.order.dataset.get(i), self.order.sample.get(i)) {
            (Some(&set), Some(&sample)) => self.sets[usize::from(set)].sample(sample as usize),
            _ => Err(Failure::data(format!("the blend has no sample {i}, only {}", self.len()))),
        }
    }
}

fn cut<'a>(
    files: impl Iterator<Item = (&'a Arc<IndexedDataset>, Option<u64>)>,
    split: &str,
    part: Part,
    config: &GptConfig,
) -> Result<Vec<GptDataset>> {
    let of = |(set, samples): (&Arc<IndexedDataset>, _)| match parts(split, set.sequences())?[part as usize].clone() {
        Some(sequences) => GptDataset::new(set.clone(), sequences, samples, part, config),
        None => Err(Failure::recipe(format!("the split {split:?} has no {part} part"))),
    };
    files.map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::super::sample::Boundaries;
    use super::super::tests::written;
    use super::super::{Dtype, IndexedDataset};
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    /// Bits of numpy 2.4.6's sums of ((7919 i) % 1000 + 1) / 997, i < n; summed in order, all but the first differ.
    #[rstest]
    #[case(3, 0x3ffc_3ea6_e694_69ca)]
    #[case(8, 0x4013_045d_76e2_78af)]
    #[case(13, 0x4016_d93a_496f_b1f1)]
    #[case(130, 0x4050_48fc_a977_e968)]
    #[case(300, 0x4062_dce2_fc26_0084)]
    fn sums_as_numpy_does(#[case] n: u64, #[case] bits: u64) {
        let weights: Vec<f64> = (0..n).map(|i| ((i * 7919) % 1000 + 1) as f64 / 997.0).collect();
        assert_eq!(sum(&weights).to_bits(), bits);
    }

    #[test]
    fn takes_from_the_set_that_lags_most_and_from_the_first_of_equals() {
        let order = Order::by_weights(&[1.0, 1.0, 2.0], 8).unwrap();
        assert_eq!(order.dataset, [2, 0, 1, 2, 0, 2, 1, 2]);
        assert_eq!(order.sample, [0, 0, 0, 1, 1, 2, 1, 3]);
        assert_eq!(shares(&[0.25, 0.75], 61, 0.0), [16, 46]);
        assert_eq!(shares(&[0.25, 0.75], 61, SURPLUS), [17, 47]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn every_sample_comes_once_and_in_order(sizes in prop::collection::vec(1..30u64, 1..6)) {
            let order = Order::exhausting(&sizes).unwrap();
            for (set, &size) in sizes.iter().enumerate() {
                let of = order.dataset.iter().zip(&order.sample).filter(|(at, _)| usize::from(**at) == set);
                prop_assert_eq!(of.map(|(_, sample)| *sample).collect::<Vec<_>>(), (0..size).collect::<Vec<_>>());
            }
        }

        /// Nowhere is a set more than the number of sets away from its share.
        #[test]
        fn shares_are_kept_all_along(weights in prop::collection::vec(0.01..1.0f64, 1..6), size in 1..200u64) {
            let (order, shares) = (Order::by_weights(&weights, size).unwrap(), normalized(&weights).unwrap());
            let mut taken = vec![0; weights.len()];
            for (i, (&set, &sample)) in order.dataset.iter().zip(&order.sample).enumerate() {
                prop_assert_eq!(taken[usize::from(set)], sample);
                taken[usize::from(set)] += 1;
                for (share, &taken) in shares.iter().zip(&taken) {
                    prop_assert!((share * (i + 1) as f64 - taken as f64).abs() <= weights.len() as f64);
                }
            }
            prop_assert_eq!(order.dataset.len() as u64, size);
        }
    }

    #[test]
    fn a_blend_that_cannot_be_is_refused() {
        let sentence = |result: Result<Order>| result.unwrap_err().sentence;
        assert_eq!(sentence(Order::by_weights(&[], 1)), "a blend of 0 data sets; 1 to 32766 can be");
        let bad = "data set 1 of the blend has the weight 0; weights are above 0";
        assert_eq!(sentence(Order::by_weights(&[1.0, 0.0], 1)), bad);
        assert_eq!(sentence(Order::exhausting(&[1, 0])), bad);
        assert!(sentence(Order::by_weights(&[1.0, f64::NAN], 1)).contains("has the weight NaN"));
        assert_eq!(sentence(Order::by_weights(&[f64::MAX, f64::MAX], 1)), "the weights of the blend sum up to inf");
    }

    #[test]
    fn a_blend_reads_its_sets_and_never_past_their_ends() {
        let (_one, a) = written(&[vec![1, 2, 3, 4, 5]], Dtype::U16);
        let (_two, b) = written(&[vec![6, 7, 8]], Dtype::U16);
        let files: [Arc<IndexedDataset>; 2] = [a.into(), b.into()];
        let boundaries = Boundaries::default();
        let config = GptConfig { sequence_length: 2, seed: 1, pad: -1, boundaries, drop_last_partial_validation: true };
        let blend = Blend::exhausting(&files, "1", Part::Train, &config).unwrap();
        let mut tokens: Vec<_> = (0..blend.len()).map(|i| blend.sample(i).unwrap().tokens).collect();
        tokens.sort();
        assert_eq!(tokens, [[1, 2], [3, 4], [6, 7]]);
        assert_eq!(blend.sample(3).unwrap_err().sentence, "the blend has no sample 3, only 3");
        let error = Blend::exhausting(&files, "1", Part::Test, &config).unwrap_err();
        assert_eq!(error.sentence, "the split \"1\" has no test part");
        let order = Order { dataset: vec![0, 1], sample: vec![0, 1] };
        let error = Blend::new(blend.sets, order).unwrap_err();
        assert_eq!(error.sentence, "the blend asks 2 samples of data set 1, which has 1");
        let order = Order { dataset: vec![2], sample: vec![0] };
        assert_eq!(Blend::new(Vec::new(), order).unwrap_err().sentence, "the blend names data set 2, but has 0");
    }
}
