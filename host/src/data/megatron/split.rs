//! Training, validation and test parts of a data set, from a text such as "969, 30, 1".
//!
//! The numbers are normalised and summed up; bound x of n sequences is x n, rounded half to even. A part whose bounds
//! coincide before rounding does not exist; one that rounding leaves without sequences does, and is empty. Source:
//! Megatron-LM, megatron/core/datasets/blended_megatron_dataset_config.py and ..._builder.py.

use crate::failure::{Failure, Result};
use std::fmt;
use std::ops::Range;

/// Which part of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Train,
    Valid,
    Test,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Part::Train => "training",
            Part::Valid => "validation",
            Part::Test => "test",
        })
    }
}

/// The sequences of each part [train, valid, test] of a set of `sequences`.
pub fn parts(split: &str, sequences: usize) -> Result<[Option<Range<usize>>; 3]> {
    let bad = |what: &str| {
        Failure::recipe(format!("the split {split:?} {what}"))
            .remedy("give up to three numbers for training, validation and test, such as \"969, 30, 1\"")
    };
    let mut share = [0.0f64; 3];
    for (at, text) in split.split(',').enumerate() {
        let place = share.get_mut(at).ok_or_else(|| bad("has more than three numbers"))?;
        *place =
            text.trim().parse().map_err(|_| bad(&format!("has the part {:?}, which is no number", text.trim())))?;
        if !(place.is_finite() && *place >= 0.0) {
            return Err(bad(&format!("has the part {place}, which is not a share")));
        }
    }
    let sum: f64 = share[0] + share[1] + share[2];
    if !(sum > 0.0 && sum.is_finite()) {
        return Err(bad(&format!("sums up to {sum}")));
    }
    let mut from = 0.0;
    Ok(share.map(|share| {
        let to = from + share / sum;
        let bound = |x: f64| ((x * sequences as f64).round_ties_even() as usize).min(sequences);
        let part = (to > from).then(|| bound(from)..bound(to));
        from = to;
        part
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("969, 30, 1", 1000, [Some(0..969), Some(969..999), Some(999..1000)])]
    #[case("80,15,5", 53, [Some(0..42), Some(42..50), Some(50..53)])]
    #[case("99,1,0", 1000, [Some(0..990), Some(990..1000), None])]
    #[case("1", 7, [Some(0..7), None, None])]
    #[case("0.5,.5", 5, [Some(0..2), Some(2..5), None])] // 2.5 rounds to even
    #[case("1,1", 3, [Some(0..2), Some(2..3), None])] // so does 1.5
    #[case("0,1,0", 3, [None, Some(0..3), None])]
    #[case("999,1,1", 10, [Some(0..10), Some(10..10), Some(10..10)])]
    fn parts_by_share(#[case] split: &str, #[case] sequences: usize, #[case] expect: [Option<Range<usize>>; 3]) {
        assert_eq!(parts(split, sequences).unwrap(), expect);
    }

    #[rstest]
    #[case("", "the split \"\" has the part \"\", which is no number")]
    #[case("1,x,1", "the split \"1,x,1\" has the part \"x\", which is no number")]
    #[case("1,-1", "the split \"1,-1\" has the part -1, which is not a share")]
    #[case("NaN", "the split \"NaN\" has the part NaN, which is not a share")]
    #[case("0,0,0", "the split \"0,0,0\" sums up to 0")]
    #[case("1,1,1,1", "the split \"1,1,1,1\" has more than three numbers")]
    fn refuses_other_texts(#[case] split: &str, #[case] sentence: &str) {
        let error = parts(split, 10).unwrap_err();
        assert_eq!((error.sentence.as_str(), error.exit_status()), (sentence, 2));
    }
}
