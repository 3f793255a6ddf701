//! Structure of dimensions: which axes they are made of, how wide they are now, and what part is on this rank.

use smallvec::SmallVec;
use std::fmt;
use std::sync::Arc;

/// An axis of the model at one layer (or, for axes that are the same everywhere, at none).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AxisKey {
    /// Index into the plan's axes.
    pub axis: u16,
    pub layer: Option<u16>,
}

/// Part of a dimension: `units` units of an axis, each `unit` positions wide, spread cyclically over `parts` ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    pub name: Arc<str>,
    pub axis: Option<AxisKey>,
    /// Active units over all ranks.
    pub units: usize,
    /// Units of the full model over all ranks.
    pub full_units: usize,
    pub unit: usize,
    pub parts: usize,
    pub part: usize,
}

/// Units `part` holds of `units` dealt out cyclically over `parts`.
pub fn local_units(units: usize, parts: usize, part: usize) -> usize {
    (units + parts - 1 - part) / parts
}

impl Segment {
    pub fn plain(name: &str, size: usize) -> Segment {
        Segment { name: name.into(), axis: None, units: size, full_units: size, unit: 1, parts: 1, part: 0 }
    }
    /// Active length over all ranks.
    pub fn size(&self) -> usize {
        self.units * self.unit
    }
    pub fn local_units(&self) -> usize {
        local_units(self.units, self.parts, self.part)
    }
    /// Active length on this rank.
    pub fn local(&self) -> usize {
        self.local_units() * self.unit
    }
    /// Length on this rank at full width.
    pub fn local_full(&self) -> usize {
        local_units(self.full_units, self.parts, self.part) * self.unit
    }
    pub fn sharded(&self) -> bool {
        self.parts > 1
    }
}

/// One dimension: a name and its segments in storage order.
#[derive(Clone, Debug, PartialEq)]
pub struct Dim {
    pub name: Arc<str>,
    pub segs: SmallVec<[Segment; 1]>,
}

impl Dim {
    pub fn plain(name: &str, size: usize) -> Dim {
        Dim { name: name.into(), segs: SmallVec::from_iter([Segment::plain(name, size)]) }
    }
    pub fn of(name: &str, segs: impl IntoIterator<Item = Segment>) -> Dim {
        Dim { name: name.into(), segs: segs.into_iter().collect() }
    }
    /// Logical active size.
    pub fn size(&self) -> usize {
        self.segs.iter().map(Segment::size).sum()
    }
    pub fn local(&self) -> usize {
        self.segs.iter().map(Segment::local).sum()
    }
    pub fn local_full(&self) -> usize {
        self.segs.iter().map(Segment::local_full).sum()
    }
    /// Whether its positions are spread over tensor-parallel ranks. A dimension is spread as a whole or not at all;
    /// parameter tables check that.
    pub fn sharded(&self) -> bool {
        self.segs.iter().any(Segment::sharded)
    }
    /// (start, length) on this rank of each segment's active part inside the full-width storage.
    pub fn blocks(&self) -> Vec<(usize, usize)> {
        let mut start = 0;
        let mut blocks = Vec::with_capacity(self.segs.len());
        for seg in &self.segs {
            blocks.push((start, seg.local()));
            start += seg.local_full();
        }
        blocks
    }
    /// Same axes, widths and shards, segment by segment (names may differ).
    pub fn same_structure(&self, other: &Dim) -> bool {
        self.segs.len() == other.segs.len()
            && self
                .segs
                .iter()
                .zip(&other.segs)
                .all(|(a, b)| a.axis == b.axis && a.units == b.units && a.unit == b.unit && a.parts == b.parts)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.size())?;
        if self.sharded() {
            write!(f, " over {} ranks", self.segs[0].parts)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cyclic_shares_add_up() {
        for units in 0..20 {
            for parts in 1..5 {
                assert_eq!((0..parts).map(|p| local_units(units, parts, p)).sum::<usize>(), units);
            }
        }
        assert_eq!(local_units(5, 2, 0), 3);
        assert_eq!(local_units(5, 2, 1), 2);
    }
}
