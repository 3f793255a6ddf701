//! Which rank is who: a module's grid over its own span of ranks.
//!
//! Knows sizes only; groups with a transport behind them are `comm`'s. There is no global state and no default group.

use crate::error::{Error, Result};

/// Parallel layout of a module: tensor parallel fastest, then data, then pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grid {
    pub tp: usize,
    pub dp: usize,
    pub pp: usize,
    /// Between tensor-parallel regions, tokens are spread over the tp ranks.
    pub sequence_parallel: bool,
}

impl Grid {
    pub const SINGLE: Grid = Grid { tp: 1, dp: 1, pp: 1, sequence_parallel: false };

    pub fn ranks(&self) -> usize {
        self.tp * self.dp * self.pp
    }

    /// Place of rank `rank` of this grid.
    pub fn place(&self, rank: usize) -> Place {
        Place { tp: rank % self.tp, dp: rank / self.tp % self.dp, pp: rank / (self.tp * self.dp) }
    }

    /// Rank at `place`.
    pub fn rank(&self, place: Place) -> usize {
        place.tp + self.tp * (place.dp + self.dp * place.pp)
    }

    /// Refuses sizes that name no grid.
    pub fn check(&self) -> Result<()> {
        for (key, n) in [("tp", self.tp), ("dp", self.dp), ("pp", self.pp)] {
            if n == 0 {
                return Err(Error::recipe(format!("grid.{key} is 0; every grid dimension is at least 1")));
            }
        }
        let ranks = self.tp.checked_mul(self.dp).and_then(|n| n.checked_mul(self.pp));
        match ranks {
            Some(n) if n <= MAX_RANKS => Ok(()),
            _ => Err(Error::recipe(format!(
                "grid: tp {} x dp {} x pp {} is more than {MAX_RANKS} ranks",
                self.tp, self.dp, self.pp
            ))),
        }
    }
}

/// Ranks a module may have.
pub const MAX_RANKS: usize = 4096;

/// Coordinates of a rank in its grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    pub tp: usize,
    pub dp: usize,
    pub pp: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_and_ranks_are_inverse() {
        let grid = Grid { tp: 2, dp: 3, pp: 2, sequence_parallel: false };
        for rank in 0..grid.ranks() {
            assert_eq!(grid.rank(grid.place(rank)), rank);
        }
        assert_eq!(grid.place(1), Place { tp: 1, dp: 0, pp: 0 });
    }

    #[test]
    fn impossible_grids_are_refused() {
        let refused = |grid: Grid| grid.check().unwrap_err().sentence;
        assert!(refused(Grid { tp: 0, ..Grid::SINGLE }).contains("grid.tp is 0"));
        assert!(refused(Grid { tp: 100_000, ..Grid::SINGLE }).contains("more than 4096 ranks"));
        assert!(refused(Grid { tp: usize::MAX, pp: 2, ..Grid::SINGLE }).contains("more than 4096 ranks"));
    }
}
