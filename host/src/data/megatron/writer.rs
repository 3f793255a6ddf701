//! Writes PREFIX.bin and PREFIX.idx, byte for byte as Megatron-LM's builder does. Source: see `index.rs`.

use super::index::{Dtype, MAGIC, VERSION};
use super::indexed::{IndexedDataset, with_ending};
use crate::failure::{Failure, Result};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A data set being written. Both files are written beside their places and take them with [`Writer::finish`], so a pair
/// is whole or as it was before.
#[derive(Debug)]
pub struct Writer {
    dtype: Dtype,
    tokens: BufWriter<NamedTempFile>,
    path: PathBuf,
    index: PathBuf,
    lengths: Vec<i32>,
    bounds: Vec<i64>,
}

/// Documents as bytes, made apart from where they are written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    pub bytes: Vec<u8>,
    /// Tokens of each sequence.
    pub sequences: Vec<i32>,
    /// Sequences of each document.
    pub documents: Vec<u32>,
}

impl Encoded {
    /// Adds a document; nothing of it is added if a token does not fit the type. The error is what is wrong with it.
    pub fn document<T: Copy + Into<i64>>(&mut self, sequences: &[impl AsRef<[T]>], dtype: Dtype) -> Result<(), String> {
        let (low, high) = dtype.range();
        for tokens in sequences {
            let tokens = tokens.as_ref();
            if let Some(token) = tokens.iter().map(|&token| token.into()).find(|token| !(low..=high).contains(token)) {
                return Err(format!("token {token} does not fit {dtype} ({low} to {high})"));
            }
            if i32::try_from(tokens.len()).is_err() {
                return Err(format!("a sequence has {} tokens, over 2^31", tokens.len()));
            }
        }
        for tokens in sequences {
            let tokens = tokens.as_ref();
            self.bytes.reserve(tokens.len() * dtype.size());
            for &token in tokens {
                // The low bytes of two's complement are the value in every narrower type that holds it.
                let bytes = token.into().to_le_bytes();
                self.bytes.extend_from_slice(&bytes[..dtype.size()]);
            }
            self.sequences.push(tokens.len() as i32);
        }
        self.documents.push(sequences.len() as u32);
        Ok(())
    }
}

fn failed(path: &Path) -> impl Fn(io::Error) -> Failure + '_ {
    move |e| {
        let failure = Failure::data(format!("cannot write {}: {e}", path.display()));
        failure.remedy("choose a folder that can be written to and has room")
    }
}

/// A file beside `path` that will take its place.
fn beside(path: &Path) -> Result<NamedTempFile> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    builder.prefix(&format!(".{name}.")).tempfile_in(folder).map_err(failed(path))
}

impl Writer {
    /// Begins PREFIX.bin; what is there stays until [`Writer::finish`].
    pub fn create(prefix: impl AsRef<Path>, dtype: Dtype) -> Result<Writer> {
        let (path, index) = (with_ending(prefix.as_ref(), ".bin"), with_ending(prefix.as_ref(), ".idx"));
        let tokens = BufWriter::with_capacity(1 << 20, beside(&path)?);
        Ok(Writer { dtype, tokens, path, index, lengths: Vec::new(), bounds: vec![0] })
    }

    /// Adds a document of any number of sequences; nothing of it is written if a token does not fit the type.
    pub fn document(&mut self, sequences: &[impl AsRef<[i64]>]) -> Result<()> {
        let mut encoded = Encoded::default();
        let document = self.documents();
        encoded
            .document(sequences, self.dtype)
            .map_err(|what| Failure::data(format!("{}: document {document}: {what}", self.path.display())))?;
        self.encoded(&encoded)
    }

    /// Adds documents that were encoded in the same type.
    pub fn encoded(&mut self, more: &Encoded) -> Result<()> {
        self.tokens.write_all(&more.bytes).map_err(failed(&self.path))?;
        self.lengths.extend_from_slice(&more.sequences);
        let mut end = self.bounds[self.bounds.len() - 1];
        self.bounds.extend(more.documents.iter().map(|&sequences| {
            end += i64::from(sequences);
            end
        }));
        Ok(())
    }

    /// Adds all documents of a set of the same type.
    pub fn append(&mut self, set: &IndexedDataset) -> Result<()> {
        let index = set.index();
        if index.dtype() != self.dtype {
            let (path, theirs, ours) = (index.path().display(), index.dtype(), self.dtype);
            return Err(Failure::data(format!("{path} has tokens of type {theirs}, the sets before it {ours}"))
                .remedy("make the sets with one type of token"));
        }
        if index.modes() {
            return Err(Failure::data(format!(
                "{} is multimodal data, which cannot be merged",
                index.path().display()
            )));
        }
        self.tokens.write_all(set.bytes()).map_err(failed(&self.path))?;
        self.lengths.extend((0..index.sequences()).map(|sequence| index.raw_length(sequence)));
        let before = self.bounds[self.bounds.len() - 1];
        self.bounds.extend((0..index.documents()).map(|document| before + index.document(document).end as i64));
        Ok(())
    }

    /// Documents so far.
    pub fn documents(&self) -> usize {
        self.bounds.len() - 1
    }

    /// Writes the index; then both files take their places, which never hold a pair that does not belong together.
    pub fn finish(self) -> Result<()> {
        let mut to = BufWriter::with_capacity(1 << 20, beside(&self.index)?);
        self.write_index(&mut to).map_err(failed(&self.index))?;
        let whole = |file: BufWriter<NamedTempFile>| -> io::Result<NamedTempFile> {
            let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
            file.as_file().sync_all()?;
            Ok(file)
        };
        let index = whole(to).map_err(failed(&self.index))?;
        let tokens = whole(self.tokens).map_err(failed(&self.path))?;
        // Without an index there is no data set: if all ends here, none is there.
        match std::fs::remove_file(&self.index) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(&self.index)(e)),
            _ => {}
        }
        tokens.persist(&self.path).map_err(|e| failed(&self.path)(e.error))?;
        index.persist(&self.index).map_err(|e| failed(&self.index)(e.error))?;
        Ok(())
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
        assert!(error.sentence.contains(&format!("document 1: token {token} does not fit {dtype} (")), "{error}");
        writer.finish().unwrap();
        let set = IndexedDataset::open(folder.path().join("a")).unwrap();
        assert_eq!((set.sequences(), set.sequence(0).unwrap()), (1, vec![7]));
    }

    #[test]
    fn one_broken_off_leaves_what_was_there() {
        assert_eq!(written(&[], Dtype::U16).1.sequences(), 0);
        let (folder, _) = written(&[vec![1]], Dtype::U16);
        let prefix = folder.path().join("set");
        let mut writer = Writer::create(&prefix, Dtype::U16).unwrap();
        writer.document(&[[5i64, 6]]).unwrap();
        drop(writer);
        assert_eq!(IndexedDataset::open(&prefix).unwrap().sequence(0).unwrap(), [1]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        let mut writer = Writer::create(&prefix, Dtype::I32).unwrap();
        writer.document(&[[5i64, 6]]).unwrap();
        writer.finish().unwrap();
        assert_eq!(IndexedDataset::open(&prefix).unwrap().sequence(0).unwrap(), [5, 6]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        assert!(
            Writer::create(folder.path().join("none/set"), Dtype::U16).unwrap_err().sentence.contains("none/set.bin")
        );
    }

    #[test]
    fn sets_are_appended_document_by_document() {
        let (_one, a) = written(&[vec![1, 2], vec![], vec![3]], Dtype::U16);
        let (_two, b) = written(&[vec![4, 5, 6]], Dtype::U16);
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::create(folder.path().join("ab"), Dtype::U16).unwrap();
        writer.append(&a).unwrap();
        writer.append(&b).unwrap();
        let (_three, other) = written(&[vec![4]], Dtype::I32);
        let error = writer.append(&other).unwrap_err();
        assert!(error.sentence.ends_with("has tokens of type int32, the sets before it uint16"), "{error}");
        writer.finish().unwrap();
        let (_whole, all) = written(&[vec![1, 2], vec![], vec![3], vec![4, 5, 6]], Dtype::U16);
        for ending in [".bin", ".idx"] {
            let merged = fs::read(folder.path().join(format!("ab{ending}"))).unwrap();
            assert_eq!(merged, fs::read(with_ending(&_whole.path().join("set"), ending)).unwrap());
        }
        drop(all);
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
