//! Order of micro-batches on a pipeline stage.
//!
//! Knows counts only. The same order on every rank of a stage is what makes pipelines free of deadlock.

/// What a stage does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    Forward(usize),
    Backward(usize),
}

/// One forward, one backward: stage `stage` of `stages` runs ahead by the stages behind it, then alternates.
/// At most `stages - stage` micro-batches are live at once.
pub fn one_forward_one_backward(stage: usize, stages: usize, micro_batches: usize) -> Vec<Turn> {
    let ahead = (stages - 1 - stage).min(micro_batches);
    let mut turns: Vec<Turn> = (0..ahead).map(Turn::Forward).collect();
    for i in ahead..micro_batches {
        turns.push(Turn::Forward(i));
        turns.push(Turn::Backward(i - ahead));
    }
    turns.extend((micro_batches - ahead..micro_batches).map(Turn::Backward));
    turns
}

/// Cuts blocks into `stages` runs of nearly equal cost, each beginning where `must_begin` says so if anything does.
///
/// `costs` are per block; returns the first block of each stage, or the number of forced beginnings if it differs.
pub fn cut(costs: &[f64], must_begin: &[bool], stages: usize) -> Result<Vec<usize>, usize> {
    let forced: Vec<usize> = (0..costs.len()).filter(|&i| i == 0 || must_begin[i]).collect();
    if forced.len() > 1 {
        return if forced.len() == stages { Ok(forced) } else { Err(forced.len()) };
    }
    if stages > costs.len() {
        return Err(costs.len());
    }
    // Smallest possible largest stage, by trying every boundary: block counts are small.
    let n = costs.len();
    let sums: Vec<f64> = std::iter::once(0.0)
        .chain(costs.iter().scan(0.0, |sum, c| {
            *sum += c;
            Some(*sum)
        }))
        .collect();
    let mut best = vec![vec![(f64::INFINITY, 0usize); n + 1]; stages + 1];
    best[0][0] = (0.0, 0);
    for stage in 1..=stages {
        for end in stage..=n {
            for begin in stage - 1..end {
                let worst = best[stage - 1][begin].0.max(sums[end] - sums[begin]);
                if worst < best[stage][end].0 {
                    best[stage][end] = (worst, begin);
                }
            }
        }
    }
    let mut begins = vec![0; stages];
    let mut end = n;
    for stage in (1..=stages).rev() {
        begins[stage - 1] = best[stage][end].1;
        end = begins[stage - 1];
    }
    Ok(begins)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Turn::{Backward as B, Forward as F};

    #[test]
    fn one_stage_alternates() {
        assert_eq!(one_forward_one_backward(0, 1, 2), [F(0), B(0), F(1), B(1)]);
    }

    #[test]
    fn the_first_stage_runs_ahead() {
        assert_eq!(one_forward_one_backward(0, 2, 3), [F(0), F(1), B(0), F(2), B(1), B(2)]);
        assert_eq!(one_forward_one_backward(1, 2, 3), [F(0), B(0), F(1), B(1), F(2), B(2)]);
        assert_eq!(one_forward_one_backward(0, 3, 1), [F(0), B(0)]);
    }

    #[test]
    fn stages_balance_cost() {
        assert_eq!(cut(&[1.0, 1.0, 1.0, 1.0], &[false; 4], 2), Ok(vec![0, 2]));
        assert_eq!(cut(&[3.0, 1.0, 1.0, 1.0], &[false; 4], 2), Ok(vec![0, 1]));
        assert_eq!(cut(&[1.0; 4], &[false, true, false, false], 2), Ok(vec![0, 1]));
        assert_eq!(cut(&[1.0; 4], &[false, true, true, false], 2), Err(3));
        assert_eq!(cut(&[1.0; 2], &[false; 2], 3), Err(2));
    }
}
