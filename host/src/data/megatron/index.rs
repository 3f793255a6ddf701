//! PREFIX.idx: where each sequence lies in PREFIX.bin.
//!
//! Little-endian, packed without gaps (so nothing after the header is aligned):
//! magic "MMIDIDX\0\0" (9 bytes), version u64 = 1, element type u8, sequences S u64, document bounds D u64,
//! lengths i32 [S] in elements, pointers i64 [S] in bytes, document bounds i64 [D] (first 0, last S; document d is the
//! sequences bounds[d] .. bounds[d + 1]), and for multimodal data a mode i8 [S], which is passed over.
//! Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py.

use super::map::map;
use crate::failure::{Failure, Result};
use memmap2::Mmap;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

pub(super) const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
pub(super) const VERSION: u64 = 1;
/// Bytes before the lengths.
const HEADER: usize = 34;

/// How tokens are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    U8,
    I8,
    I16,
    I32,
    I64,
    U16,
}

impl Dtype {
    /// The type of a code in the index; none for floating-point types and unknown codes.
    pub fn of_code(code: u8) -> Option<Dtype> {
        Some(match code {
            1 => Dtype::U8,
            2 => Dtype::I8,
            3 => Dtype::I16,
            4 => Dtype::I32,
            5 => Dtype::I64,
            8 => Dtype::U16,
            _ => return None,
        })
    }

    pub fn code(self) -> u8 {
        match self {
            Dtype::U8 => 1,
            Dtype::I8 => 2,
            Dtype::I16 => 3,
            Dtype::I32 => 4,
            Dtype::I64 => 5,
            Dtype::U16 => 8,
        }
    }

    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Dtype::U8 | Dtype::I8 => 1,
            Dtype::I16 | Dtype::U16 => 2,
            Dtype::I32 => 4,
            Dtype::I64 => 8,
        }
    }

    /// The type Megatron-LM takes for a vocabulary of `size` tokens.
    pub fn for_vocabulary(size: u64) -> Dtype {
        if size < 65_500 { Dtype::U16 } else { Dtype::I32 }
    }

    /// The type of a name of numpy's.
    pub fn of_name(name: &str) -> Option<Dtype> {
        [Dtype::U8, Dtype::I8, Dtype::I16, Dtype::I32, Dtype::I64, Dtype::U16].into_iter().find(|d| d.name() == name)
    }

    /// As numpy names it.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::U8 => "uint8",
            Dtype::I8 => "int8",
            Dtype::I16 => "int16",
            Dtype::I32 => "int32",
            Dtype::I64 => "int64",
            Dtype::U16 => "uint16",
        }
    }

    /// The smallest and the largest value.
    pub fn range(self) -> (i64, i64) {
        match self {
            Dtype::U8 => (0, i64::from(u8::MAX)),
            Dtype::I8 => (i64::from(i8::MIN), i64::from(i8::MAX)),
            Dtype::I16 => (i64::from(i16::MIN), i64::from(i16::MAX)),
            Dtype::I32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
            Dtype::I64 => (i64::MIN, i64::MAX),
            Dtype::U16 => (0, i64::from(u16::MAX)),
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A mapped, checked index.
#[derive(Debug)]
pub struct Index {
    path: PathBuf,
    bytes: Mmap,
    dtype: Dtype,
    sequences: usize,
    bounds: usize,
    sha256: OnceLock<String>,
}

/// The eight bytes at `at`; the caller has checked that they are there.
fn word(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
}

impl Index {
    /// Maps `path` and checks everything that does not need the tokens.
    pub fn open(path: &Path) -> Result<Index> {
        let bad = |what: String| Failure::data(format!("{}: {what}", path.display()));
        let bytes = map(path)?;
        let len = bytes.len();
        if !bytes.starts_with(&MAGIC[..len.min(MAGIC.len())]) {
            let error = bad("not an index of Megatron-LM: it does not begin with MMIDIDX".into());
            return Err(error.remedy("write the data set again with Megatron-LM's preprocessing, or correct the path"));
        }
        if len < HEADER {
            return Err(bad(format!("the index is cut off: {len} bytes, and its header alone has {HEADER}")));
        }
        match word(&bytes, 9) {
            VERSION => {}
            other => return Err(bad(format!("the index has version {other}; only version {VERSION} is known"))),
        }
        let dtype = match (bytes[17], Dtype::of_code(bytes[17])) {
            (_, Some(dtype)) => dtype,
            (code @ (6 | 7), _) => {
                return Err(bad(format!("the index says floating-point elements (code {code}), not tokens")));
            }
            (code, _) => {
                return Err(bad(format!("the index has the unknown element type {code} (known: 1 to 5 and 8)")));
            }
        };
        let (sequences, bounds) = (word(&bytes, 18), word(&bytes, 26));
        let said = format!("the index says {sequences} sequences and {bounds} document bounds");
        // In 128 bits: counts of a broken file must not wrap into a size that fits.
        let whole = HEADER as u128 + 12 * u128::from(sequences) + 8 * u128::from(bounds);
        if (len as u128) < whole {
            return Err(bad(format!("the index is cut off: {said}, which take {whole} bytes, but it has {len}")));
        }
        // One byte a sequence more: the modes of multimodal data.
        if len as u128 != whole && len as u128 != whole + u128::from(sequences) {
            return Err(bad(format!("{said}, which take {whole} bytes, but it has {len}")));
        }
        let index = Index {
            path: path.into(),
            bytes,
            dtype,
            sequences: sequences as usize,
            bounds: bounds as usize,
            sha256: OnceLock::new(),
        };
        index.check_bounds()?;
        Ok(index)
    }

    fn check_bounds(&self) -> Result<()> {
        let bad = |what: String| Failure::data(format!("{}: {what}", self.path.display()));
        if self.bounds == 0 {
            return Err(bad("the index has no document bounds".into()));
        }
        let mut before = 0;
        for at in 0..self.bounds {
            let bound = self.bound(at);
            if at == 0 && bound != 0 {
                return Err(bad(format!("the first document begins at sequence {bound}, not 0")));
            }
            if bound < before {
                return Err(bad(format!("document bound {at} is {bound}, less than the one before it, {before}")));
            }
            before = bound;
        }
        if before != self.sequences as u64 {
            return Err(bad(format!("the last document ends at sequence {before}, but there are {}", self.sequences)));
        }
        Ok(())
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Hash of the file, hexadecimal; computed when it is first asked for.
    pub fn sha256(&self) -> &str {
        self.sha256.get_or_init(|| crate::checkpoint::hexadecimal(&Sha256::digest(&self.bytes[..])))
    }

    /// Whether it says modes of multimodal data.
    pub fn modes(&self) -> bool {
        self.sequences > 0 && self.bytes.len() != HEADER + 12 * self.sequences + 8 * self.bounds
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.sequences
    }

    /// Number of documents.
    pub fn documents(&self) -> usize {
        self.bounds - 1
    }

    /// The sequences of a document.
    pub fn document(&self, document: usize) -> std::ops::Range<usize> {
        self.bound(document) as usize..self.bound(document + 1) as usize
    }

    /// Negative numbers of a broken file become huge ones, which the checks refuse.
    fn bound(&self, at: usize) -> u64 {
        word(&self.bytes, HEADER + 12 * self.sequences + 8 * at)
    }

    /// Length of a sequence in tokens, as it stands.
    pub(super) fn raw_length(&self, sequence: usize) -> i32 {
        let at = HEADER + 4 * sequence;
        i32::from_le_bytes([self.bytes[at], self.bytes[at + 1], self.bytes[at + 2], self.bytes[at + 3]])
    }

    /// Length of a sequence in tokens.
    pub fn length(&self, sequence: usize) -> u32 {
        self.raw_length(sequence) as u32
    }

    /// Where a sequence begins in PREFIX.bin, in bytes.
    pub fn pointer(&self, sequence: usize) -> u64 {
        word(&self.bytes, HEADER + 4 * self.sequences + 8 * sequence)
    }
}
