//! What a batch is cut from.

use std::fmt::Debug;

/// Samples of one length, each a pure function of its number.
pub trait Samples: Debug + Send + Sync {
    /// Samples after which the data begin anew.
    fn per_epoch(&self) -> u64;

    /// Most sequences that any sample is cut into, padding included.
    fn most_sequences(&self) -> usize;

    /// Writes the sample of a run's `number`.
    fn fill(&self, number: u64, row: &mut Row<'_>) -> crate::failure::Result<()>;
}

/// One sample of a batch; S tokens.
pub struct Row<'a> {
    /// Token ids [S].
    pub tokens: &'a mut [i32],
    /// The token after each of them in its sequence [S].
    pub labels: &'a mut [i32],
    /// Weight of each position's loss [S]; 1 unless it is written.
    pub weights: &'a mut [f32],
    /// Where sequences begin inside the sample, increasing, above 0 and below S; nothing unless it is written.
    pub starts: &'a mut Vec<usize>,
}
