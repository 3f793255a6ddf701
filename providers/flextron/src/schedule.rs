//! Temperature and logit scale of the router over training.

/// Temperature of the Gumbel softmax at an iteration from 0: tau_init * tau_decay^iteration.
pub fn tau(init: f64, decay: f64, iteration: u64) -> f64 {
    init * decay.powf(iteration as f64)
}

/// Factor on the router's logits at an iteration from 0: a straight line from `start` at iteration 0 to `end` at the last
/// of `iterations`, and `end` after it.
pub fn scaler(start: f64, end: f64, iteration: u64, iterations: u64) -> f64 {
    match iterations {
        0 | 1 => start,
        n => start + (end - start) * (iteration.min(n - 1) as f64 / (n - 1) as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_begin_and_end_where_they_are_told_to() {
        assert_eq!((tau(2.0, 0.95, 0), tau(2.0, 0.95, 1)), (2.0, 1.9));
        assert_eq!((scaler(1.0, 10.0, 0, 7), scaler(1.0, 10.0, 6, 7), scaler(1.0, 10.0, 9, 7)), (1.0, 10.0, 10.0));
        assert_eq!(scaler(1.0, 10.0, 0, 1), 1.0);
    }
}
