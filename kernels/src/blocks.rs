//! Which rows or columns of a stored parameter a kernel uses.

/// Ordered (start, length) ranges of a stored dimension; the activation side lists them densely, back to back.
///
/// A full dimension is one block. A slice of a segmented dimension ([x | B | C]) is one prefix per segment.
#[derive(Clone, Debug, PartialEq)]
pub struct Blocks(pub Vec<(usize, usize)>);

impl Blocks {
    /// Blocks in the order given; empty ones are dropped and neighbours that touch become one.
    pub fn new(blocks: impl IntoIterator<Item = (usize, usize)>) -> Self {
        let mut merged: Vec<(usize, usize)> = Vec::new();
        for (start, len) in blocks {
            match merged.last_mut() {
                _ if len == 0 => {}
                Some(last) if last.0 + last.1 == start => last.1 += len,
                _ => merged.push((start, len)),
            }
        }
        Blocks(merged)
    }

    /// The first `n` rows or columns.
    pub fn full(n: usize) -> Self {
        Blocks::new([(0, n)])
    }

    /// Rows or columns used in all.
    pub fn len(&self) -> usize {
        self.0.iter().map(|b| b.1).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|b| b.1 == 0)
    }

    /// Whether the used part is a plain prefix, so that stored and dense indices agree.
    pub fn is_dense(&self) -> bool {
        match self.0.as_slice() {
            [] => true,
            [(start, _)] => *start == 0,
            _ => false,
        }
    }

    /// One past the largest stored index used.
    pub fn end(&self) -> usize {
        self.0.iter().map(|b| b.0 + b.1).max().unwrap_or(0)
    }

    /// (stored start, dense start, length) of each block.
    pub fn iter(&self) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
        self.0.iter().scan(0, |dense, &(start, len)| {
            let at = *dense;
            *dense += len;
            Some((start, at, len))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_merge() {
        let b = Blocks::new([(0, 3), (3, 2), (5, 0), (8, 4)]);
        assert_eq!(b.0, vec![(0, 5), (8, 4)]);
        assert_eq!((b.len(), b.end(), b.is_dense()), (9, 12, false));
        assert_eq!(b.iter().collect::<Vec<_>>(), vec![(0, 0, 5), (8, 5, 4)]);
        assert!(Blocks::full(7).is_dense() && Blocks::full(0).is_empty());
        assert!(!Blocks::new([(1, 2)]).is_dense());
    }
}
