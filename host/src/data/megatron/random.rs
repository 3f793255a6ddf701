//! numpy's `RandomState(seed).shuffle`: the Mersenne Twister MT19937 and a bounded draw by masking and rejection.
//!
//! Sources: Matsumoto and Nishimura, ACM TOMACS 8 (1998), for the generator and the 2002 seeding (multiplier
//! 1812433253); numpy's legacy generator, frozen since 1.16, for the draws: a number in 0 ..= max is a raw draw under
//! the smallest mask 2^k - 1 >= max, drawn again while it exceeds max; of 32 bits if max fits, else of 64, high half
//! first.

const N: usize = 624;
const M: usize = 397;

/// numpy's `RandomState`, as far as shuffling one axis needs it.
#[derive(Clone)]
pub struct RandomState {
    state: [u32; N],
    next: usize,
}

impl RandomState {
    /// The generator numpy makes of an integer seed.
    pub fn new(seed: u32) -> RandomState {
        let mut state = [seed; N];
        for i in 1..N {
            let before = state[i - 1];
            state[i] = 1_812_433_253u32.wrapping_mul(before ^ (before >> 30)).wrapping_add(i as u32);
        }
        RandomState { state, next: N }
    }

    fn renew(&mut self) {
        for i in 0..N {
            let y = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % N] & 0x7fff_ffff);
            let twist = if y & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + M) % N] ^ (y >> 1) ^ twist;
        }
        self.next = 0;
    }

    /// The next 32 random bits.
    pub fn bits(&mut self) -> u32 {
        if self.next == N {
            self.renew();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    /// A number in 0 ..= max.
    pub fn up_to(&mut self, max: u64) -> u64 {
        if max == 0 {
            return 0;
        }
        let mask = u64::MAX >> max.leading_zeros();
        loop {
            let draw = match u32::try_from(max) {
                Ok(_) => u64::from(self.bits()),
                Err(_) => u64::from(self.bits()) << 32 | u64::from(self.bits()),
            };
            if draw & mask <= max {
                return draw & mask;
            }
        }
    }

    /// Shuffles from the last element down, each with one at or before it.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for i in (1..list.len()).rev() {
            list.swap(i, self.up_to(i as u64) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shuffled(random: &mut RandomState, len: u64) -> Vec<u64> {
        let mut list: Vec<u64> = (0..len).collect();
        random.shuffle(&mut list);
        list
    }

    /// Numbers of numpy 2.4.6: `r = RandomState(seed); a = arange(n); r.shuffle(a)`.
    #[test]
    fn shuffles_as_numpy_does() {
        let first = shuffled(&mut RandomState::new(1234), 20);
        assert_eq!(first, [3, 13, 2, 16, 14, 5, 4, 0, 8, 18, 17, 11, 10, 9, 7, 1, 19, 12, 6, 15]);
        assert_eq!(shuffled(&mut RandomState::new(0), 10), [2, 8, 4, 9, 1, 6, 7, 3, 0, 5]);
        let mut random = RandomState::new(u32::MAX);
        assert_eq!(shuffled(&mut random, 10), [6, 9, 5, 1, 8, 0, 7, 4, 2, 3]);
        // Many renewals of the state, and the stream goes on.
        let long = shuffled(&mut random, 70_000);
        assert_eq!(long[..6], [62734, 46887, 2219, 61390, 34704, 51250]);
        assert_eq!(long[69_997..], [52763, 14443, 22258]);
        assert_eq!(long[12_345], 46914);
        let sum: u64 = long.iter().zip(0..).map(|(a, i)| a * i).sum();
        assert_eq!(sum, 85_782_505_197_450);
    }

    /// The generator's published test: the ten thousandth output of seed 5489 (also C++'s std::mt19937).
    #[test]
    fn is_the_mersenne_twister() {
        let mut random = RandomState::new(5489);
        let last = (0..10_000).map(|_| random.bits()).last();
        assert_eq!(last, Some(4_123_659_995));
    }

    #[test]
    fn draws_of_more_than_32_bits_stay_within_and_reach_high() {
        let (mut random, max) = (RandomState::new(3), (1u64 << 33) + 5);
        let draws: Vec<u64> = (0..1000).map(|_| random.up_to(max)).collect();
        assert!(draws.iter().all(|&draw| draw <= max));
        assert!(draws.iter().any(|&draw| draw > u64::from(u32::MAX)));
        assert_eq!(random.up_to(0), 0);
    }
}
