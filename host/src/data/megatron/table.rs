//! Lists of numbers that lie in memory or in a mapped file: the indices of a data set, which may have billions of entries.

use memmap2::Mmap;
use std::sync::Arc;

/// A number as a file holds it: little-endian.
pub trait Number: Copy + Send + Sync + std::fmt::Debug {
    /// Bytes.
    const SIZE: usize;
    /// Of so many bytes.
    fn of(bytes: &[u8]) -> Self;
    fn put(self, to: &mut Vec<u8>);
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl Number for $number {
            const SIZE: usize = size_of::<$number>();
            fn of(bytes: &[u8]) -> Self {
                let mut word = [0; size_of::<$number>()];
                word.copy_from_slice(bytes);
                <$number>::from_le_bytes(word)
            }
            fn put(self, to: &mut Vec<u8>) {
                to.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}
numbers!(u16, u32, u64, i32);

/// A list of numbers.
#[derive(Clone, Debug)]
pub enum Table<N> {
    Held(Vec<N>),
    /// `len` numbers from byte `at` on, which the maker has checked to be there.
    Mapped {
        file: Arc<Mmap>,
        at: usize,
        len: usize,
    },
}

impl<N: Number> Table<N> {
    pub fn len(&self) -> usize {
        match self {
            Table::Held(list) => list.len(),
            Table::Mapped { len, .. } => *len,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes it holds in memory; those of a mapped file are the system's to keep or drop.
    pub fn held_bytes(&self) -> usize {
        match self {
            Table::Held(list) => list.capacity() * size_of::<N>(),
            Table::Mapped { .. } => 0,
        }
    }

    pub fn get(&self, i: usize) -> Option<N> {
        match self {
            Table::Held(list) => list.get(i).copied(),
            Table::Mapped { file, at, len } if i < *len => Some(N::of(&file[at + i * N::SIZE..][..N::SIZE])),
            Table::Mapped { .. } => None,
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = N> + '_ {
        (0..self.len()).filter_map(|i| self.get(i))
    }
}

/// A list of any of the types.
#[derive(Clone, Debug)]
pub enum AnyTable {
    U16(Table<u16>),
    U32(Table<u32>),
    U64(Table<u64>),
    I32(Table<i32>),
}

macro_rules! each {
    ($any:expr, $table:ident => $do:expr) => {
        match $any {
            AnyTable::U16($table) => $do,
            AnyTable::U32($table) => $do,
            AnyTable::U64($table) => $do,
            AnyTable::I32($table) => $do,
        }
    };
}

impl AnyTable {
    pub fn kind(&self) -> &'static str {
        match self {
            AnyTable::U16(_) => "u16",
            AnyTable::U32(_) => "u32",
            AnyTable::U64(_) => "u64",
            AnyTable::I32(_) => "i32",
        }
    }

    /// Bytes of a number of a kind.
    pub fn size_of(kind: &str) -> Option<usize> {
        Some(match kind {
            "u16" => 2,
            "u32" | "i32" => 4,
            "u64" => 8,
            _ => return None,
        })
    }

    /// A list in a file.
    pub fn mapped(kind: &str, file: Arc<Mmap>, at: usize, len: usize) -> Option<AnyTable> {
        Some(match kind {
            "u16" => AnyTable::U16(Table::Mapped { file, at, len }),
            "u32" => AnyTable::U32(Table::Mapped { file, at, len }),
            "u64" => AnyTable::U64(Table::Mapped { file, at, len }),
            "i32" => AnyTable::I32(Table::Mapped { file, at, len }),
            _ => return None,
        })
    }

    pub fn len(&self) -> usize {
        each!(self, table => table.len())
    }

    /// Gives the list's bytes in pieces.
    pub fn pieces<E>(&self, mut take: impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        const PIECE: usize = 1 << 16;
        let mut bytes = Vec::with_capacity(8 * PIECE);
        each!(self, table => {
            let mut from = 0;
            while from < table.len() {
                let to = (from + PIECE).min(table.len());
                bytes.clear();
                (from..to).filter_map(|i| table.get(i)).for_each(|number| number.put(&mut bytes));
                take(&bytes)?;
                from = to;
            }
        });
        Ok(())
    }
}

macro_rules! conversions {
    ($($variant:ident $number:ty),*) => {$(
        impl From<Vec<$number>> for AnyTable {
            fn from(list: Vec<$number>) -> AnyTable {
                AnyTable::$variant(Table::Held(list))
            }
        }
        impl TryFrom<AnyTable> for Table<$number> {
            type Error = &'static str;
            fn try_from(any: AnyTable) -> Result<Table<$number>, &'static str> {
                match any {
                    AnyTable::$variant(table) => Ok(table),
                    other => Err(other.kind()),
                }
            }
        }
    )*};
}
conversions!(U16 u16, U32 u32, U64 u64, I32 i32);
