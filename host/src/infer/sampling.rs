//! The choice of a token.
//!
//! p_i proportional to exp(x_i / temperature) over the logits x; kept are the `top_k` likeliest tokens, and of those the
//! fewest whose probabilities reach `top_p` (Holtzman et al. 2020), the likeliest first. Ties go to the lower token. The
//! number that decides is a function of (seed, position) alone.

use gantry_kernels::philox::{Stream, stream_of};

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0: always the likeliest token.
    pub temperature: f64,
    /// Tokens to choose among; `None`: all.
    pub top_k: Option<usize>,
    /// Probability they must reach together; 1: all.
    pub top_p: f64,
    pub seed: u64,
}

impl Sampling {
    /// The token at `position` of a text, from its logits [vocab]. `None` if no logit is a finite number.
    pub fn choose(&self, logits: &[f64], position: u64) -> Option<usize> {
        let mut order: Vec<usize> = (0..logits.len()).filter(|&i| logits[i].is_finite()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        let first = *order.first()?;
        if self.temperature == 0.0 {
            return Some(first);
        }
        order.truncate(self.top_k.unwrap_or(usize::MAX).max(1));
        let mut weights: Vec<f64> =
            order.iter().map(|&i| ((logits[i] - logits[first]) / self.temperature).exp()).collect();
        let all: f64 = weights.iter().sum();
        let mut sum = 0.0;
        let reached = weights.iter().position(|weight| {
            sum += weight;
            sum >= self.top_p * all
        });
        weights.truncate(reached.map_or(weights.len(), |last| last + 1));
        let kept: f64 = weights.iter().sum();
        let mut left = Stream::new(self.seed, stream_of("infer.sample"), 0).uniform(position) * kept;
        let chosen = weights.iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        // Rounding may leave a remainder after the last.
        Some(order[chosen.unwrap_or(weights.len() - 1)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const PLAIN: Sampling = Sampling { temperature: 1.0, top_k: None, top_p: 1.0, seed: 7 };
    const DRAWS: u64 = 20_000;

    /// Shares of the tokens over many positions.
    fn shares(sampling: Sampling, logits: &[f64]) -> Vec<f64> {
        let mut shares = vec![0.0; logits.len()];
        (0..DRAWS).for_each(|i| shares[sampling.choose(logits, i).unwrap()] += 1.0 / DRAWS as f64);
        shares
    }

    #[rstest]
    #[case::plain(PLAIN, [0.1, 0.4, 0.2, 0.3])]
    #[case::colder(Sampling { temperature: 0.5, ..PLAIN }, [1.0 / 30.0, 16.0 / 30.0, 4.0 / 30.0, 9.0 / 30.0])]
    #[case::greedy(Sampling { temperature: 0.0, ..PLAIN }, [0.0, 1.0, 0.0, 0.0])]
    #[case::top_2(Sampling { top_k: Some(2), ..PLAIN }, [0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0])]
    #[case::top_1(Sampling { top_k: Some(1), ..PLAIN }, [0.0, 1.0, 0.0, 0.0])]
    #[case::top_p(Sampling { top_p: 0.75, ..PLAIN }, [0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0])]
    #[case::top_p_of_top_k(Sampling { top_k: Some(3), top_p: 0.5, ..PLAIN }, [0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0])]
    #[case::top_p_nothing(Sampling { top_p: 0.0, ..PLAIN }, [0.0, 1.0, 0.0, 0.0])]
    fn shares_are_the_probabilities(#[case] sampling: Sampling, #[case] expected: [f64; 4]) {
        // A shift of all logits changes nothing.
        let logits = [0.1f64, 0.4, 0.2, 0.3].map(|p| p.ln() + 5.0);
        for (share, p) in shares(sampling, &logits).into_iter().zip(expected) {
            assert!((share - p).abs() < 0.015 && (p > 0.0 || share == 0.0), "{share} {p}");
        }
    }

    #[test]
    fn seed_and_position_decide() {
        let logits = [0.0; 50];
        let text = |seed| (0..40).map(|i| Sampling { seed, ..PLAIN }.choose(&logits, i).unwrap()).collect::<Vec<_>>();
        assert_eq!(text(1), text(1));
        assert_ne!(text(1), text(2));
        assert!((1..40).any(|i| text(1)[i] != text(1)[0]));
    }

    #[test]
    fn ties_go_to_the_lower_token_and_what_is_no_number_is_never_chosen() {
        let greedy = Sampling { temperature: 0.0, ..PLAIN };
        assert_eq!(greedy.choose(&[1.0, 3.0, 3.0], 0), Some(1));
        assert_eq!(greedy.choose(&[f64::NAN, 1.0, f64::INFINITY, f64::NEG_INFINITY], 0), Some(1));
        assert!((0..50).all(|i| PLAIN.choose(&[f64::NAN, 1.0, f64::NEG_INFINITY], i) == Some(1)));
        assert_eq!(PLAIN.choose(&[f64::NAN], 0), None);
        assert_eq!(PLAIN.choose(&[], 0), None);
    }
}
