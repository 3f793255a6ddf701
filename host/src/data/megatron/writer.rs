//! Writes PREFIX.bin and PREFIX.idx, byte for byte as Megatron-LM's builder does. Source: see `index.rs`.

use super::index::{Dtype, MAGIC, VERSION};
use super::indexed::with_ending;
use crate::failure::{Failure, Result};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// A data set being written. Tokens go to disk at once; the index comes with [`Writer::finish`], so a pair that was
/// broken off has none and cannot be opened.
#[derive(Debug)]
pub struct Writer {
    dtype: Dtype,
    tokens: BufWriter<File>,
    path: PathBuf,
    index: PathBuf,
    lengths: Vec<i32>,
    bounds: Vec<i64>,
}

fn failed(path: &Path) -> impl Fn(io::Error) -> Failure + '_ {
    move |e| Failure::data(format!("cannot write {}: {e}", path.display()))
}

impl Writer {
    /// Creates PREFIX.bin and removes a PREFIX.idx of old.
    pub fn create(prefix: impl AsRef<Path>, dtype: Dtype) -> Result<Writer> {
        let (path, index) = (with_ending(prefix.as_ref(), ".bin"), with_ending(prefix.as_ref(), ".idx"));
        match std::fs::remove_file(&index) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(&index)(e)),
            _ => {}
        }
        let tokens = BufWriter::new(File::create(&path).map_err(failed(&path))?);
        Ok(Writer { dtype, tokens, path, index, lengths: Vec::new(), bounds: vec![0] })
    }

    /// Adds a document of any number of sequences; nothing of it is written if a token does not fit the type.
    pub fn document(&mut self, sequences: &[impl AsRef<[i64]>]) -> Result<()> {
        let (low, high) = self.dtype.range();
        let document = self.bounds.len() - 1;
        for tokens in sequences {
            let tokens = tokens.as_ref();
            if let Some(token) = tokens.iter().find(|&&token| token < low || token > high) {
                return Err(Failure::data(format!(
                    "{}: token {token} of document {document} does not fit {:?} ({low} to {high})",
                    self.path.display(),
                    self.dtype
                )));
            }
            if i32::try_from(tokens.len()).is_err() {
                let (len, path) = (tokens.len(), self.path.display());
                return Err(Failure::data(format!(
                    "{path}: document {document} has a sequence of {len} tokens, over 2^31"
                )));
            }
        }
        for tokens in sequences {
            let tokens = tokens.as_ref();
            for token in tokens {
                // The low bytes of two's complement are the value in every narrower type that holds it.
                let bytes = token.to_le_bytes();
                self.tokens.write_all(&bytes[..self.dtype.size()]).map_err(failed(&self.path))?;
            }
            self.lengths.push(tokens.len() as i32);
        }
        self.bounds.push(self.lengths.len() as i64);
        Ok(())
    }

    /// Writes the index.
    pub fn finish(mut self) -> Result<()> {
        self.tokens.flush().map_err(failed(&self.path))?;
        let file = File::create(&self.index).map_err(failed(&self.index))?;
        self.write_index(BufWriter::new(file)).map_err(failed(&self.index))
    }

    fn write_index(&self, mut to: impl Write) -> io::Result<()> {
        to.write_all(MAGIC)?;
        to.write_all(&VERSION.to_le_bytes())?;
        to.write_all(&[self.dtype.code()])?;
        to.write_all(&(self.lengths.len() as u64).to_le_bytes())?;
        to.write_all(&(self.bounds.len() as u64).to_le_bytes())?;
        for length in &self.lengths {
            to.write_all(&length.to_le_bytes())?;
        }
        let mut pointer = 0i64;
        for &length in &self.lengths {
            to.write_all(&pointer.to_le_bytes())?;
            pointer += i64::from(length) * self.dtype.size() as i64;
        }
        for bound in &self.bounds {
            to.write_all(&bound.to_le_bytes())?;
        }
        to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{golden, written};
    use super::super::{Dtype, IndexedDataset};
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;
    use std::fs;

    #[rstest]
    #[case("corpus_u16", Dtype::U16)]
    #[case("corpus_i32", Dtype::I32)]
    fn writes_the_bytes_megatron_wrote(#[case] name: &str, #[case] dtype: Dtype) {
        let set = IndexedDataset::open(golden(name)).unwrap();
        assert_eq!(set.index().dtype(), dtype);
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::create(folder.path().join("again.v1"), dtype).unwrap();
        for document in 0..set.index().documents() {
            let sequences: Vec<_> = set.index().document(document).map(|s| set.sequence(s).unwrap()).collect();
            writer.document(&sequences).unwrap();
        }
        writer.finish().unwrap();
        for ending in [".bin", ".idx"] {
            let stored = fs::read(golden(&format!("{name}{ending}"))).unwrap();
            assert!(fs::read(folder.path().join(format!("again.v1{ending}"))).unwrap() == stored, "{ending}");
        }
    }

    #[rstest]
    #[case(Dtype::U8, 256)]
    #[case(Dtype::I8, -129)]
    #[case(Dtype::I16, 32_768)]
    #[case(Dtype::I32, 1 << 31)]
    #[case(Dtype::U16, -1)]
    fn a_token_that_does_not_fit_is_refused_and_leaves_no_trace(#[case] dtype: Dtype, #[case] token: i64) {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::create(folder.path().join("a"), dtype).unwrap();
        writer.document(&[[7i64]]).unwrap();
        let error = writer.document(&[vec![1], vec![2, token]]).unwrap_err();
        assert!(error.sentence.contains(&format!("token {token} of document 1 does not fit {dtype:?} (")), "{error}");
        writer.finish().unwrap();
        let set = IndexedDataset::open(folder.path().join("a")).unwrap();
        assert_eq!((set.sequences(), set.sequence(0).unwrap()), (1, vec![7]));
    }

    #[test]
    fn a_set_without_documents_can_be_read_and_one_broken_off_cannot() {
        assert_eq!(written(&[], Dtype::U16).1.sequences(), 0);
        let (folder, _) = written(&[vec![1]], Dtype::U16);
        drop(Writer::create(folder.path().join("set"), Dtype::U16).unwrap());
        assert!(IndexedDataset::open(folder.path().join("set")).unwrap_err().sentence.contains("set.idx"));
        assert!(
            Writer::create(folder.path().join("none/set"), Dtype::U16).unwrap_err().sentence.contains("none/set.bin")
        );
    }

    fn documents() -> impl Strategy<Value = (Dtype, Vec<Vec<Vec<i64>>>)> {
        let dtypes = [Dtype::U8, Dtype::I8, Dtype::I16, Dtype::I32, Dtype::I64, Dtype::U16];
        prop::sample::select(dtypes.to_vec()).prop_flat_map(|dtype| {
            let (low, high) = dtype.range();
            let sequence = prop::collection::vec(prop_oneof![Just(low), Just(high), low..=high], 0..9);
            (Just(dtype), prop::collection::vec(prop::collection::vec(sequence, 0..4), 0..6))
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn what_was_written_is_read((dtype, documents) in documents()) {
            let folder = tempfile::tempdir().unwrap();
            let mut writer = Writer::create(folder.path().join("a"), dtype).unwrap();
            for document in &documents {
                writer.document(document).unwrap();
            }
            writer.finish().unwrap();
            let set = IndexedDataset::open(folder.path().join("a")).unwrap();
            prop_assert_eq!(set.index().dtype(), dtype);
            prop_assert_eq!(set.index().documents(), documents.len());
            for (at, document) in documents.iter().enumerate() {
                let read: Vec<_> = set.index().document(at).map(|s| set.sequence(s).unwrap()).collect();
                prop_assert_eq!(&read, document);
            }
        }
    }
}
