//! Several data sets as one: which set, and which sample of it, is sample i.
//!
//! Sample i comes from the set that lags most behind its share: largest w_d max(i, 1) - n_d, where n_d counts its
//! samples so far; of equals the first. By weights, shares are the normalised weights; without weights every sample of
//! every set is taken once, shares are the sets' lengths, and a set that is used up takes no further part. Source:
//! Megatron-LM, megatron/core/datasets/blended_dataset.py, helpers.cpp, and for how many samples each set is asked
//! blended_megatron_dataset_builder.py. The weights' sum is numpy's (pairwise), since a last bit can change the order.

use super::cache::Cache;
use super::gpt::{GptConfig, GptDataset, Limit};
use super::indexed::IndexedDataset;
use super::room;
use super::sample::Sample;
use super::split::{Part, parts};
use super::table::{AnyTable, Table};
use crate::failure::{Failure, Result};
use std::sync::Arc;

/// Samples by which each set is asked for more than its share, relative: Megatron-LM's default of
/// mid_level_dataset_surplus.
pub const SURPLUS: f64 = 0.005;
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

/// Several data sets and the order in which they are read; or one, read in its own order.
#[derive(Debug)]
pub struct Blend {
    sets: Vec<GptDataset>,
    order: Option<(Table<u16>, Table<u64>)>,
    key: String,
}

/// How several data sets are mixed.
#[derive(Clone, Debug, PartialEq)]
enum Mix {
    Weights(Vec<f64>, u64),
    Exhausting(Vec<u64>),
}

impl Mix {
    fn order(&self) -> Result<Order> {
        match self {
            Mix::Weights(weights, size) => Order::by_weights(weights, *size),
            Mix::Exhausting(sizes) => Order::exhausting(sizes),
        }
    }

    /// Without the number of samples, which decides where the order ends but not how it goes.
    fn key(&self) -> String {
        match self {
            Mix::Weights(weights, _) => {
                format!("weights {:x?}", weights.iter().map(|w| w.to_bits()).collect::<Vec<_>>())
            }
            Mix::Exhausting(sizes) => format!("exhausting {sizes:?}"),
        }
    }

    fn whole_key(&self) -> String {
        match self {
            Mix::Weights(_, size) => format!("blend of {size} by {}", self.key()),
            Mix::Exhausting(_) => format!("blend {}", self.key()),
        }
    }
}

/// Files, which share of each, and how they are cut.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    pub files: &'a [Arc<IndexedDataset>],
    pub split: &'a str,
    pub part: Part,
    pub config: &'a GptConfig,
    pub cache: &'a Cache,
}

impl Source<'_> {
    fn cut(&self, samples: impl Iterator<Item = Option<u64>>) -> Result<Vec<GptDataset>> {
        let Source { split, part, config, cache, .. } = *self;
        let of = |(set, samples): (&Arc<IndexedDataset>, _)| match parts(split, set.sequences())?[part as usize].clone()
        {
            Some(sequences) => GptDataset::new(set.clone(), sequences, samples, part, config, cache),
            None => Err(Failure::recipe(format!("the split {split:?} has no {part} part"))),
        };
        self.files.iter().zip(samples).map(of).collect()
    }
}

impl Blend {
    fn mixed(sets: Vec<GptDataset>, mix: &Mix, cache: &Cache) -> Result<Blend> {
        let mut tables = cache.get(&mix.whole_key(), || {
            let order = mix.order()?;
            let mut asked = vec![0u64; sets.len()];
            for (&set, &sample) in order.dataset.iter().zip(&order.sample) {
                asked[usize::from(set)] = sample + 1;
            }
            Ok(vec![AnyTable::from(order.dataset), order.sample.into(), asked.into()])
        })?;
        let order = (tables.next()?, tables.next()?);
        let asked: Table<u64> = tables.next()?;
        for (at, (set, asked)) in sets.iter().zip(asked.iter()).enumerate() {
            if asked > set.len() as u64 {
                let len = set.len();
                return Err(Failure::data(format!("the blend asks {asked} samples of data set {at}, which has {len}"))
                    .remedy("raise data.megatron.mid_level_dataset_surplus"));
            }
        }
        let keys: Vec<&str> = sets.iter().map(GptDataset::key).collect();
        let key = format!("{} of {}", mix.key(), keys.join("; "));
        Ok(Blend { sets, order: Some(order), key })
    }

    /// At least `samples` samples of the only file in its own order; none: one epoch.
    pub fn single(source: &Source, samples: Option<u64>) -> Result<Blend> {
        let sets = source.cut([samples].into_iter())?;
        let key = sets.iter().map(GptDataset::key).collect::<Vec<_>>().join("; ");
        Ok(Blend { sets, order: None, key })
    }

    /// At least `size` samples by weights, each set cut for `surplus` (relative) more than its share.
    pub fn by_weights(source: &Source, weights: &[f64], size: u64, surplus: f64) -> Result<Blend> {
        let weights = normalized(weights)?;
        let sets = source.cut(shares(&weights, size, surplus).into_iter().map(Some))?;
        let size = shares(&weights, size, 0.0).iter().try_fold(0u64, |sum, &n| sum.checked_add(n)).unwrap_or(u64::MAX);
        Blend::mixed(sets, &Mix::Weights(weights, size), source.cache)
    }

    /// One epoch: every sample of every set once; or of them `most`, each set by its number of samples.
    pub fn exhausting(source: &Source, most: Option<u64>) -> Result<Blend> {
        let sets = source.cut(source.files.iter().map(|_| None))?;
        if let Some(empty) = sets.iter().find(|set| set.is_empty()) {
            let (path, part) = (empty.set().path().display(), source.part);
            return Err(Failure::data(format!("{path}: the {part} part has fewer tokens than a sample"))
                .remedy("leave the file out of the blend, or make the samples shorter"));
        }
        let sizes: Vec<u64> = sets.iter().map(|set| set.len() as u64).collect();
        let mix = match most {
            None => Mix::Exhausting(sizes),
            // Weights are normalised where the order is made, and once, as a last bit can change it.
            Some(most) => Mix::Weights(sizes.iter().map(|&size| size as f64).collect(), most.min(sizes.iter().sum())),
        };
        Blend::mixed(sets, &mix, source.cache)
    }

    pub fn sets(&self) -> &[GptDataset] {
        &self.sets
    }

    /// The set of each sample and the sample within it; of a single set nothing.
    pub fn order(&self) -> Option<&(Table<u16>, Table<u64>)> {
        self.order.as_ref()
    }

    /// A text that is equal for two blends if and only if sample i of one is sample i of the other for every i both have.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Most sequences of a file that a sample has tokens of.
    pub fn most_sequences(&self) -> u64 {
        self.sets.iter().map(GptDataset::most_sequences).max().unwrap_or(1)
    }

    /// Bytes of the indices in memory.
    pub fn held_bytes(&self) -> usize {
        let order = self.order.as_ref().map_or(0, |(sets, samples)| sets.held_bytes() + samples.held_bytes());
        order + self.sets.iter().map(GptDataset::held_bytes).sum::<usize>()
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        match &self.order {
            Some((sets, _)) => sets.len(),
            None => self.sets.iter().map(GptDataset::len).sum(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sample i.
    pub fn sample(&self, i: usize) -> Result<Sample> {
        self.sample_below(i, &Limit::default())
    }

    /// Sample i, whose tokens must be within the limit.
    pub fn sample_below(&self, i: usize, limit: &Limit) -> Result<Sample> {
        let place = match &self.order {
            Some((sets, samples)) => sets.get(i).zip(samples.get(i)),
            None => Some((0, i as u64)),
        };
        match place.and_then(|(set, sample)| Some((self.sets.get(usize::from(set))?, sample))) {
            Some((set, sample)) => set.sample_below(sample as usize, limit),
            None => Err(Failure::data(format!("the blend has no sample {i}, only {}", self.len()))),
        }
    }
}

#[cfg(test)]
mod tests;
