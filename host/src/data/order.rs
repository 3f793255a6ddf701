//! A shuffle without a table: a keyed permutation of 0..n.
//!
//! Four-round Feistel network (Luby and Rackoff 1988) over the smallest even number of bits that holds n, walked until
//! the value is below n (cycle walking, Black and Rogaway 2002: fewer than four steps on average). Round functions are
//! Philox words, so the order depends only on (seed, stream, epoch).

use gantry_kernels::philox::Stream;

const ROUNDS: u64 = 4;

/// A permutation of `0..n`.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    n: u64,
    half_bits: u32,
    rounds: Stream,
}

impl Permutation {
    /// A permutation of `0..n`, n >= 1, different for every (seed, stream, epoch).
    pub fn new(n: u64, seed: u64, stream: u32, epoch: u32) -> Permutation {
        let bits = u64::BITS - n.saturating_sub(1).leading_zeros();
        Permutation { n, half_bits: bits.div_ceil(2).max(1), rounds: Stream::new(seed, stream, epoch) }
    }

    /// Where `index` < n goes.
    pub fn at(&self, index: u64) -> u64 {
        let mut value = index;
        loop {
            value = self.encrypt(value);
            if value < self.n {
                return value;
            }
        }
    }

    fn encrypt(&self, value: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..ROUNDS {
            let [word, ..] = self.rounds.words(right << 2 | round);
            (left, right) = (right, left ^ (u64::from(word) & mask));
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    fn every_value_once(#[values(1, 2, 3, 7, 64, 65, 1000)] n: u64) {
        let permutation = Permutation::new(n, 9, 1, 0);
        let mut values: Vec<u64> = (0..n).map(|i| permutation.at(i)).collect();
        values.sort_unstable();
        assert_eq!(values, (0..n).collect::<Vec<_>>());
    }

    #[test]
    fn key_changes_the_order_and_neighbours_part() {
        let order = |seed, epoch| -> Vec<u64> {
            let permutation = Permutation::new(1000, seed, 1, epoch);
            (0..1000).map(|i| permutation.at(i)).collect()
        };
        let first = order(1, 0);
        for other in [order(2, 0), order(1, 1)] {
            let same = first.iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!(same < 10, "{same} of 1000 places kept");
        }
        // A uniform permutation has a mean distance of a third of n between neighbours.
        let distance: u64 = first.windows(2).map(|pair| pair[0].abs_diff(pair[1])).sum();
        assert!((280..390).contains(&(distance / 999)), "{}", distance / 999);
    }
}
