//! A pair PREFIX.idx and PREFIX.bin: sequences of tokens, read through memory maps.
//!
//! Opening walks the index once and refuses a pair that does not fit together; reading then needs no checks of the
//! file. Source of the format: see `index.rs`.

use super::index::{Dtype, Index};
use super::map::map;
use crate::failure::{Failure, Result};
use memmap2::Mmap;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// Sequences of tokens on disk.
#[derive(Debug)]
pub struct IndexedDataset {
    index: Index,
    path: PathBuf,
    tokens: Mmap,
}

/// PREFIX with `.idx` or `.bin` appended (a prefix may itself hold dots).
pub(super) fn with_ending(prefix: &Path, ending: &str) -> PathBuf {
    let mut name = prefix.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

impl IndexedDataset {
    /// Opens PREFIX.idx and PREFIX.bin.
    pub fn open(prefix: impl AsRef<Path>) -> Result<IndexedDataset> {
        let index = Index::open(&with_ending(prefix.as_ref(), ".idx"))?;
        let path = with_ending(prefix.as_ref(), ".bin");
        let tokens = map(&path)?;
        let set = IndexedDataset { index, path, tokens };
        set.check_lengths()?;
        Ok(set)
    }

    fn check_lengths(&self) -> Result<()> {
        let (index, size, whole) = (&self.index, self.index.dtype().size() as u64, self.tokens.len() as u64);
        let bad = |what: String| {
            Failure::data(format!("{}: {what}", index.path().display()))
                .remedy(format!("the index and {} do not belong together; write both again", self.path.display()))
        };
        let mut end = 0u64;
        for sequence in 0..index.sequences() {
            let (length, pointer) = (index.raw_length(sequence), index.pointer(sequence));
            let Ok(length) = u64::try_from(length) else {
                return Err(bad(format!("sequence {sequence} has the length {length}")));
            };
            if pointer.checked_add(length * size).is_none_or(|end| end > whole) {
                return Err(bad(format!(
                    "sequence {sequence} of {length} tokens begins at byte {pointer}, beyond the {whole} bytes of the tokens"
                )));
            }
            if pointer != end {
                return Err(bad(format!(
                    "sequence {sequence} begins at byte {pointer}, but the lengths before it add up to {end} bytes"
                )));
            }
            end += length * size;
        }
        if end != whole {
            return Err(bad(format!("the lengths add up to {end} bytes, but the tokens take {whole}")));
        }
        Ok(())
    }

    pub fn index(&self) -> &Index {
        &self.index
    }

    /// The file of the tokens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tokens as the file has them.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.tokens
    }

    /// Number of tokens.
    pub fn tokens(&self) -> u64 {
        self.tokens.len() as u64 / self.index.dtype().size() as u64
    }

    /// Hash that tells whether two runs see the same data: of the index, and of the tokens as far as 64 blocks spread over
    /// the file show them (a file of up to 4 MiB: all of it), hexadecimal.
    pub fn sha256(&self) -> String {
        const BLOCKS: usize = 64;
        const BLOCK: usize = 1 << 16;
        let (mut hash, len) = (Sha256::new(), self.tokens.len());
        hash.update(self.index.sha256());
        hash.update((len as u64).to_le_bytes());
        match len <= BLOCKS * BLOCK {
            true => hash.update(&self.tokens[..]),
            false => (0..BLOCKS).for_each(|i| {
                let at = ((len - BLOCK) as u128 * i as u128 / (BLOCKS - 1) as u128) as usize;
                hash.update(&self.tokens[at..at + BLOCK]);
            }),
        }
        crate::checkpoint::hexadecimal(&hash.finalize())
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.index.sequences()
    }

    /// Appends tokens `offset .. offset + len` of a sequence to `to`; an error if that is not all inside the sequence.
    pub fn read(&self, sequence: usize, offset: usize, len: usize, to: &mut Vec<i64>) -> Result<()> {
        let bad = |what: String| Err(Failure::data(format!("{}: {what}", self.path.display())));
        if sequence >= self.sequences() {
            return bad(format!("there is no sequence {sequence}, only {}", self.sequences()));
        }
        let length = self.index.length(sequence) as usize;
        if offset.checked_add(len).is_none_or(|end| end > length) {
            return bad(format!("sequence {sequence} has {length} tokens; {len} from {offset} on were asked for"));
        }
        let size = self.index.dtype().size();
        let bytes = &self.tokens[self.index.pointer(sequence) as usize + offset * size..][..len * size];
        match self.index.dtype() {
            Dtype::U8 => to.extend(bytes.iter().map(|&b| i64::from(b))),
            Dtype::I8 => to.extend(bytes.iter().map(|&b| i64::from(b as i8))),
            Dtype::I16 => extend(to, bytes, |b| i64::from(i16::from_le_bytes(b))),
            Dtype::U16 => extend(to, bytes, |b| i64::from(u16::from_le_bytes(b))),
            Dtype::I32 => extend(to, bytes, |b| i64::from(i32::from_le_bytes(b))),
            Dtype::I64 => extend(to, bytes, i64::from_le_bytes),
        }
        Ok(())
    }

    /// All tokens of a sequence.
    pub fn sequence(&self, sequence: usize) -> Result<Vec<i64>> {
        let mut tokens = Vec::new();
        let len = if sequence < self.sequences() { self.index.length(sequence) as usize } else { 0 };
        self.read(sequence, 0, len, &mut tokens)?;
        Ok(tokens)
    }
}

fn extend<const N: usize>(to: &mut Vec<i64>, bytes: &[u8], value: impl Fn([u8; N]) -> i64) {
    to.extend(bytes.chunks_exact(N).map(|chunk| {
        let mut word = [0; N];
        word.copy_from_slice(chunk);
        value(word)
    }));
}

#[cfg(test)]
mod tests {
    use super::super::tests::written;
    use super::*;
    use rstest::rstest;
    use std::fs;

    /// Three sequences of 3, 1 and 2 tokens, 16 bits each; documents of one sequence. Index: header 34, lengths at 34,
    /// pointers at 46, bounds at 70, end at 102. Tokens: 12 bytes.
    fn pair() -> (tempfile::TempDir, PathBuf) {
        let (folder, set) = written(&[vec![1, 2, 3], vec![4], vec![5, 65_535]], Dtype::U16);
        assert_eq!((set.sequences(), set.index().documents(), set.index().document(2)), (3, 3, 2..3));
        assert_eq!(set.sequence(2).unwrap(), [5, 65_535]);
        let prefix = folder.path().join("set");
        (folder, prefix)
    }

    fn refusal(index: impl Fn(&mut Vec<u8>), tokens: impl Fn(&mut Vec<u8>)) -> String {
        let (folder, prefix) = pair();
        for (ending, change) in [(".idx", &index as &dyn Fn(&mut Vec<u8>)), (".bin", &tokens)] {
            let path = with_ending(&prefix, ending);
            let mut bytes = fs::read(&path).unwrap();
            change(&mut bytes);
            fs::write(path, bytes).unwrap();
        }
        let error = IndexedDataset::open(&prefix).unwrap_err();
        assert_eq!(error.exit_status(), 4);
        error.sentence.replace(&folder.path().display().to_string(), "DIR")
    }

    fn put(at: usize, with: &'static [u8]) -> impl Fn(&mut Vec<u8>) {
        move |bytes| bytes[at..at + with.len()].copy_from_slice(with)
    }

    fn cut(len: usize) -> impl Fn(&mut Vec<u8>) {
        move |bytes| bytes.truncate(len)
    }

    #[rstest]
    #[case(&put(0, b"X"), "DIR/set.idx: not an index of Megatron-LM: it does not begin with MMIDIDX")]
    #[case(&put(8, b"X"), "DIR/set.idx: not an index of Megatron-LM: it does not begin with MMIDIDX")]
    #[case(&cut(0), "DIR/set.idx: the index is cut off: 0 bytes, and its header alone has 34")]
    #[case(&cut(33), "DIR/set.idx: the index is cut off: 33 bytes, and its header alone has 34")]
    #[case(&cut(101), "DIR/set.idx: the index is cut off: the index says 3 sequences and 4 document bounds, which take 102 bytes, but it has 101")]
    #[case(&|b: &mut Vec<u8>| b.push(0), "DIR/set.idx: the index says 3 sequences and 4 document bounds, which take 102 bytes, but it has 103")]
    #[case(&put(18, &[255; 8]), "DIR/set.idx: the index is cut off: the index says 18446744073709551615 sequences and 4 document bounds, which take 221360928884514619446 bytes, but it has 102")]
    #[case(&put(9, &[2]), "DIR/set.idx: the index has version 2; only version 1 is known")]
    #[case(&put(17, &[9]), "DIR/set.idx: the index has the unknown element type 9 (known: 1 to 5 and 8)")]
    #[case(&put(17, &[0]), "DIR/set.idx: the index has the unknown element type 0 (known: 1 to 5 and 8)")]
    #[case(&put(17, &[7]), "DIR/set.idx: the index says floating-point elements (code 7), not tokens")]
    #[case(&put(70, &[1]), "DIR/set.idx: the first document begins at sequence 1, not 0")]
    #[case(&put(86, &[0]), "DIR/set.idx: document bound 2 is 0, less than the one before it, 1")]
    #[case(&put(94, &[4]), "DIR/set.idx: the last document ends at sequence 4, but there are 3")]
    #[case(&put(94, &[255; 8]), "DIR/set.idx: the last document ends at sequence 18446744073709551615, but there are 3")]
    #[case(&put(38, &[255; 4]), "DIR/set.idx: sequence 1 has the length -1")]
    #[case(&put(62, &[12]), "DIR/set.idx: sequence 2 of 2 tokens begins at byte 12, beyond the 12 bytes of the tokens")]
    #[case(&put(62, &[255; 8]), "DIR/set.idx: sequence 2 of 2 tokens begins at byte 18446744073709551615, beyond the 12 bytes of the tokens")]
    #[case(&put(54, &[4]), "DIR/set.idx: sequence 1 begins at byte 4, but the lengths before it add up to 6 bytes")]
    #[case(&put(42, &[1]), "DIR/set.idx: the lengths add up to 10 bytes, but the tokens take 12")]
    fn refuses_a_broken_index(#[case] change: &dyn Fn(&mut Vec<u8>), #[case] sentence: &str) {
        assert_eq!(refusal(change, |_| ()), sentence);
    }

    #[test]
    fn refuses_tokens_that_do_not_fit_the_index() {
        let short = "DIR/set.idx: sequence 2 of 2 tokens begins at byte 8, beyond the 11 bytes of the tokens";
        assert_eq!(refusal(|_| (), cut(11)), short);
        let long = "DIR/set.idx: the lengths add up to 12 bytes, but the tokens take 13";
        assert_eq!(refusal(|_| (), |bytes| bytes.push(0)), long);
    }

    #[test]
    fn an_index_without_bounds_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.idx");
        fs::write(&path, [b"MMIDIDX\0\0".as_slice(), &[1, 0, 0, 0, 0, 0, 0, 0, 4], &[0; 16]].concat()).unwrap();
        assert!(Index::open(&path).unwrap_err().sentence.ends_with("a.idx: the index has no document bounds"));
    }

    #[rstest]
    #[case(".bin")]
    #[case(".idx")]
    fn a_missing_file_is_named(#[case] ending: &str) {
        let (_folder, prefix) = pair();
        let path = with_ending(&prefix, ending);
        fs::remove_file(&path).unwrap();
        let error = IndexedDataset::open(&prefix).unwrap_err();
        assert!(error.sentence.starts_with(&format!("cannot read {}: ", path.display())), "{error}");
        fs::create_dir(&path).unwrap();
        let error = IndexedDataset::open(&prefix).unwrap_err();
        assert_eq!(error.sentence, format!("cannot read {}: it is a folder", path.display()));
    }

    #[test]
    fn modes_of_multimodal_data_are_passed_over() {
        let (_folder, prefix) = pair();
        let path = with_ending(&prefix, ".idx");
        let mut bytes = fs::read(&path).unwrap();
        bytes.extend([1, 0, 1]);
        fs::write(path, bytes).unwrap();
        assert_eq!(IndexedDataset::open(&prefix).unwrap().sequence(0).unwrap(), [1, 2, 3]);
    }

    #[test]
    fn reading_past_a_sequence_is_an_error() {
        let (_folder, prefix) = pair();
        let set = IndexedDataset::open(&prefix).unwrap();
        let mut to = Vec::new();
        set.read(0, 1, 2, &mut to).unwrap();
        assert_eq!(to, [2, 3]);
        let error = set.read(0, 2, 2, &mut to).unwrap_err();
        assert!(error.sentence.ends_with("sequence 0 has 3 tokens; 2 from 2 on were asked for"), "{error}");
        assert!(set.read(0, usize::MAX, 2, &mut to).is_err());
        let error = set.sequence(3).unwrap_err();
        assert!(error.sentence.ends_with("there is no sequence 3, only 3"), "{error}");
    }
}
