//! The state of a step, copied out of the ranks so that they can go on while it is written.
//!
//! Buffers stay allocated from one save to the next: after the first one, a save allocates no tensor. A save that is
//! waited for passes tensors through to its writer a shard at a time.

use super::shard::Part;
use super::writer::SHARD_BYTES;
use super::{CheckpointWriter, LogicalTensor, TensorData};
use crate::failure::{Failure, Result};
use safetensors::Dtype;
use std::collections::HashSet;

/// Checkpoint tensors by name, with their shapes, that lie back to back in one buffer.
pub type Parts = Vec<(String, Vec<usize>)>;

/// Copies of tensors in logical order, row-major, little-endian.
#[derive(Debug)]
pub struct Staging {
    /// Those of this save, then buffers of earlier ones.
    pieces: Vec<Piece>,
    used: usize,
    names: HashSet<String>,
    /// Takes tensors as soon as they fill a shard: a save that is waited for needs no copy of the whole state.
    pub(super) through: Option<CheckpointWriter>,
    /// Bytes that fill a shard.
    pub(super) shard_bytes: usize,
}

impl Default for Staging {
    fn default() -> Staging {
        Staging { pieces: Vec::new(), used: 0, names: HashSet::new(), through: None, shard_bytes: SHARD_BYTES }
    }
}

#[derive(Debug)]
struct Piece {
    parts: Parts,
    dtype: Dtype,
    bytes: Vec<u8>,
}

/// How an element is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementType {
    F32,
    F64,
}

impl ElementType {
    /// Of elements of 4 or 8 bytes.
    pub fn of_bytes(bytes: usize) -> ElementType {
        if bytes == 8 { ElementType::F64 } else { ElementType::F32 }
    }

    pub fn bytes(self) -> usize {
        match self {
            ElementType::F32 => 4,
            ElementType::F64 => 8,
        }
    }

    /// As safetensors calls it.
    pub fn name(self) -> &'static str {
        match self {
            ElementType::F32 => "F32",
            ElementType::F64 => "F64",
        }
    }

    fn dtype(self) -> Dtype {
        match self {
            ElementType::F32 => Dtype::F32,
            ElementType::F64 => Dtype::F64,
        }
    }
}

impl Staging {
    /// Forgets the tensors, keeps the buffers.
    pub fn clear(&mut self) {
        (self.used, self.through) = (0, None);
        self.names.clear();
    }

    /// Bytes of copies that saving a state of `bytes` needs.
    pub fn needs(bytes: usize, beside: bool) -> usize {
        if beside { bytes } else { bytes.min(SHARD_BYTES) }
    }

    /// Bytes of the buffers, of this save and earlier ones.
    pub fn capacity(&self) -> usize {
        self.pieces.iter().map(|piece| piece.bytes.capacity()).sum()
    }

    /// Adds tensors that lie back to back; `fill` is given a buffer of their size and gives it back with every element
    /// written. Names must differ from all others, and no element may be NaN or infinite: a checkpoint never holds
    /// one, so that the one before stays the newest.
    pub fn add(&mut self, parts: Parts, ty: ElementType, fill: impl FnOnce(Vec<u8>) -> Result<Vec<u8>>) -> Result<()> {
        for (name, _) in &parts {
            if !self.names.insert(name.clone()) {
                return Err(Failure::data(format!("checkpoint tensor {name} is given twice")));
            }
        }
        let elements: usize = parts.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
        let wanted = elements * ty.bytes();
        let mut bytes = match self.pieces.get_mut(self.used) {
            Some(piece) => std::mem::take(&mut piece.bytes),
            None => Vec::new(),
        };
        bytes.truncate(wanted);
        bytes.reserve_exact(wanted - bytes.len());
        bytes.resize(wanted, 0);
        let bytes = fill(bytes)?;
        let held = bytes.len() / ty.bytes();
        if held != elements {
            let (name, shape) = parts.first().map_or(("", &[][..]), |(name, shape)| (name, shape));
            return Err(Failure::data(format!(
                "checkpoint tensor {name}: shape {shape:?} holds {elements} elements, {held} are given"
            )));
        }
        if let Some(at) = first_nonfinite(&bytes, ty) {
            let mut end = 0;
            let place = parts.iter().find(|(_, shape)| {
                end += shape.iter().product::<usize>();
                at < end
            });
            let name = place.map_or("a tensor", |(name, _)| name);
            return Err(Failure::numerical(format!("NaN or infinity in {name}; nothing was saved"))
                .remedy("go on from the newest checkpoint with a lower optimizer.lr"));
        }
        let piece = Piece { parts, dtype: ty.dtype(), bytes };
        match self.pieces.get_mut(self.used) {
            Some(old) => *old = piece,
            None => self.pieces.push(piece),
        }
        self.used += 1;
        let gathered: usize = self.pieces[..self.used].iter().map(|piece| piece.bytes.len()).sum();
        if self.through.is_some() && gathered >= self.shard_bytes {
            self.pass_on()?;
        }
        Ok(())
    }

    /// Writes what has gathered for the writer that everything passes through to.
    pub(super) fn pass_on(&mut self) -> Result<()> {
        let Some(mut writer) = self.through.take() else { return Ok(()) };
        self.write(&mut writer)?;
        (self.through, self.used) = (Some(writer), 0);
        Ok(())
    }

    /// Adds a tensor that is at hand.
    pub fn add_tensor(&mut self, tensor: LogicalTensor) -> Result<()> {
        let ty = match tensor.data {
            TensorData::F32(_) => ElementType::F32,
            TensorData::F64(_) => ElementType::F64,
        };
        self.add(vec![(tensor.name, tensor.shape)], ty, |_| Ok(tensor.data.to_bytes()))
    }

    /// Hands everything to a checkpoint, in the order it was added.
    pub(super) fn write(&self, writer: &mut CheckpointWriter) -> Result<()> {
        writer.write_parts(self.pieces[..self.used].iter().flat_map(|piece| {
            let width = piece.dtype.bitsize() / 8;
            let mut begin = 0;
            piece.parts.iter().map(move |(name, shape)| {
                let end = begin + shape.iter().product::<usize>() * width;
                let bytes = piece.bytes.get(begin..end).unwrap_or_default();
                begin = end;
                Part { name, shape, dtype: piece.dtype, bytes }
            })
        }))
    }
}

/// The first element that is NaN or infinite: those with all bits of the exponent set.
fn first_nonfinite(bytes: &[u8], ty: ElementType) -> Option<usize> {
    // Block by block, so that the test for nothing found is a loop without a branch.
    const BLOCK: usize = 4096;
    let width = ty.bytes();
    bytes.chunks(BLOCK).enumerate().find_map(|(block, bytes)| {
        let bad = match ty {
            ElementType::F32 => {
                let broken = |b: &[u8; 4]| u32::from_le_bytes(*b) & 0x7f80_0000 == 0x7f80_0000;
                let chunks = bytes.as_chunks::<4>().0;
                chunks.iter().fold(false, |any, b| any | broken(b)).then(|| chunks.iter().position(broken))
            }
            ElementType::F64 => {
                const EXPONENT: u64 = 0x7ff0_0000_0000_0000;
                let broken = |b: &[u8; 8]| u64::from_le_bytes(*b) & EXPONENT == EXPONENT;
                let chunks = bytes.as_chunks::<8>().0;
                chunks.iter().fold(false, |any, b| any | broken(b)).then(|| chunks.iter().position(broken))
            }
        };
        bad.flatten().map(|at| block * BLOCK / width + at)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(names: &[&str], len: usize) -> Parts {
        names.iter().map(|name| (name.to_string(), vec![len])).collect()
    }

    #[test]
    fn buffers_are_used_again() {
        let mut staging = Staging::default();
        for round in 0..3 {
            staging.clear();
            staging.add(parts(&["a", "b"], 1000), ElementType::F32, Ok).unwrap();
            staging.add(parts(&["c"], 10 - round), ElementType::F64, Ok).unwrap();
            assert_eq!(staging.capacity(), 8000 + 80);
        }
    }

    #[test]
    fn a_number_that_is_none_is_named() {
        for (at, name) in [(0, "a"), (1999, "a"), (2000, "b"), (3999, "b")] {
            for bad in [f32::NAN, f32::NEG_INFINITY] {
                let fill = |mut bytes: Vec<u8>| {
                    bytes[4 * at..4 * at + 4].copy_from_slice(&bad.to_le_bytes());
                    Ok(bytes)
                };
                let failure = Staging::default().add(parts(&["a", "b"], 2000), ElementType::F32, fill).unwrap_err();
                assert_eq!(failure.sentence, format!("NaN or infinity in {name}; nothing was saved"));
                assert_eq!(failure.exit_status(), 5);
            }
        }
        let largest = |mut bytes: Vec<u8>| {
            bytes[..8].copy_from_slice(&f64::MAX.to_le_bytes());
            Ok(bytes)
        };
        Staging::default().add(parts(&["a"], 2000), ElementType::F64, largest).unwrap();
    }

    #[test]
    fn what_could_not_be_read_is_refused() {
        let mut staging = Staging::default();
        let failure = staging.add(parts(&["a"], 2), ElementType::F32, |_| Ok(vec![0; 12])).unwrap_err();
        assert_eq!(failure.sentence, "checkpoint tensor a: shape [2] holds 2 elements, 3 are given");
        staging.clear();
        staging.add(parts(&["a"], 2), ElementType::F32, Ok).unwrap();
        let failure = staging.add(parts(&["a"], 2), ElementType::F32, Ok).unwrap_err();
        assert_eq!(failure.sentence, "checkpoint tensor a is given twice");
    }
}
