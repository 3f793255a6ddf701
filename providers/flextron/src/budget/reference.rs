//! Which budget a micro-batch trains in Megatron-LM's `pretrain_hybrid_flex.py`: draws of numpy's legacy `RandomState`.
//!
//! A draw is seeded by 42 + counter + micro-batches * iteration * 10, and the counter rises by one for each draw, modulo
//! the micro-batches of an iteration. It is never reset, so that the sequence is a function of all that went before; it
//! is walked from the first iteration.

use super::sampling::pick;
use super::{Budgets, FULL};

/// The reference's generator: MT19937 as numpy's `RandomState(seed)` seeds it.
struct MersenneTwister {
    state: [u32; 624],
    at: usize,
}

impl MersenneTwister {
    fn new(seed: u32) -> MersenneTwister {
        let mut state = [seed; 624];
        for i in 1..624 {
            let before = state[i - 1];
            state[i] = 1_812_433_253u32.wrapping_mul(before ^ (before >> 30)).wrapping_add(i as u32);
        }
        MersenneTwister { state, at: 624 }
    }

    fn word(&mut self) -> u32 {
        if self.at == 624 {
            for i in 0..624 {
                let y = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % 624] & 0x7fff_ffff);
                let odd = if y & 1 == 1 { 0x9908_b0df } else { 0 };
                self.state[i] = self.state[(i + 397) % 624] ^ (y >> 1) ^ odd;
            }
            self.at = 0;
        }
        let mut y = self.state[self.at];
        self.at += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    /// Uniform in [0, 1), 53 bits.
    fn uniform(&mut self) -> f64 {
        let (a, b) = (u64::from(self.word() >> 5), u64::from(self.word() >> 6));
        (a * 67_108_864 + b) as f64 / 9_007_199_254_740_992.0
    }
}

/// A drawn budget.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// The number that decides between the full model and a budget of the list.
    pub uniform: f64,
    pub budget: f64,
    /// Draws so far, modulo the micro-batches of an iteration.
    pub counter: u64,
}

/// The sequence of budgets.
#[derive(Clone, Debug)]
pub struct Sequence {
    full: f64,
    budgets: Budgets,
    micro_batches: u64,
    counter: u64,
    /// Micro-batches drawn for so far.
    drawn: u64,
    /// The budgets of the latest iteration drawn for.
    latest: Vec<f64>,
}

impl Sequence {
    /// `micro_batches`: of an iteration on one data-parallel rank, at least 1.
    pub fn new(full: f64, budgets: Budgets, micro_batches: u64) -> Sequence {
        Sequence { full, budgets, micro_batches: micro_batches.max(1), counter: 0, drawn: 0, latest: Vec::new() }
    }

    fn draw(&mut self, iteration: u64) -> f64 {
        let seed = 42 + self.counter + self.micro_batches * iteration * 10;
        self.counter = (self.counter + 1) % self.micro_batches;
        MersenneTwister::new(seed as u32).uniform()
    }

    /// The budget of the next micro-batch.
    pub fn advance(&mut self) -> Draw {
        let iteration = self.drawn / self.micro_batches;
        if self.drawn.is_multiple_of(self.micro_batches) {
            self.latest.clear();
        }
        let uniform = self.draw(iteration);
        let budget = if uniform < self.full {
            FULL
        } else {
            let u = self.draw(iteration);
            pick(&self.budgets, u)
        };
        self.drawn += 1;
        self.latest.push(budget);
        Draw { uniform, budget, counter: self.counter }
    }

    /// The budget of a micro-batch of an iteration from 0. Iterations may be asked for in any order; going back walks the
    /// sequence from its beginning.
    pub fn budget(&mut self, iteration: u64, micro_batch: u64) -> f64 {
        let wanted = iteration * self.micro_batches + micro_batch % self.micro_batches;
        let first = self.drawn - self.latest.len() as u64;
        if wanted < first {
            *self = Sequence::new(self.full, self.budgets.clone(), self.micro_batches);
        }
        while self.drawn <= wanted {
            self.advance();
        }
        let first = self.drawn - self.latest.len() as u64;
        self.latest[(wanted - first) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first output of the generator's authors' own test, and numpy's RandomState(42).uniform().
    #[test]
    fn the_generator_is_mt19937() {
        assert_eq!(MersenneTwister::new(5489).word(), 3_499_211_612);
        assert_eq!(MersenneTwister::new(42).uniform(), 0.374_540_118_847_362_5);
    }

    #[test]
    fn any_order_gives_the_same_budgets() {
        let budgets = Budgets::new(&[1.0, 0.7, 0.5], None).unwrap();
        let mut forward = Sequence::new(0.3, budgets.clone(), 4);
        let all: Vec<f64> = (0..40).map(|_| forward.advance().budget).collect();
        let mut any = Sequence::new(0.3, budgets, 4);
        for at in [7usize, 6, 39, 36, 0, 20, 3, 20] {
            assert_eq!(any.budget(at as u64 / 4, at as u64 % 4), all[at], "{at}");
        }
    }
}
