//! Indices on disk, built once and then mapped.
//!
//! A file is named by the SHA-256 of its key, a text with everything that decides its contents; the key stands in the file
//! too. It is written beside and renamed, so a file is whole or not there, and any number of processes may want the same
//! one: who comes first builds it under a lock, the others wait, and one that does not get the lock builds the same bytes.
//! No process relies on another having built anything, so machines need no folder in common. A file whose checksums are
//! wrong is built anew; a folder that cannot be written costs time, not the run.
//!
//! "GANTRYIX", version u32 = 1, length of the header u32, its CRC-32C u32, four bytes of zero, header (JSON:
//! `{key, tables: [{kind, len, crc32c}]}`), then the tables, each begun at a multiple of 8. Little-endian.

use super::map::map;
use super::table::{AnyTable, Table};
use crate::failure::{Failure, Result};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::fs::{File, TryLockError};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

const MAGIC: &[u8; 8] = b"GANTRYIX";
const VERSION: u32 = 1;
const HEADER_AT: usize = 24;
/// How long another process that builds the same file is waited for.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Where indices are kept, if anywhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cache {
    folder: Option<PathBuf>,
}

/// Why a file could not be used.
enum Unusable {
    Missing,
    Damaged(String),
}

fn aligned(at: usize) -> usize {
    at.next_multiple_of(8)
}

impl Cache {
    /// Builds everything in memory.
    pub fn none() -> Cache {
        Cache::default()
    }

    /// Keeps files in a folder, which is made.
    pub fn at(folder: impl Into<PathBuf>) -> Cache {
        Cache { folder: Some(folder.into()) }
    }

    /// The tables of a key: those of the file, else those that `build` gives.
    pub(super) fn get(&self, key: &str, build: impl FnOnce() -> Result<Vec<AnyTable>>) -> Result<Tables> {
        let Some(folder) = &self.folder else { return Ok(Tables::of(build()?)) };
        let name = crate::checkpoint::hexadecimal(&Sha256::digest(key.as_bytes()));
        let path = folder.join(format!("{}.index", &name[..32]));
        let look = || match open(&path, key) {
            Ok(tables) => Some(tables),
            Err(Unusable::Missing) => None,
            Err(Unusable::Damaged(why)) => {
                tracing::warn!("index {} is damaged ({why}); it is built anew", path.display());
                None
            }
        };
        if let Some(tables) = look() {
            return Ok(tables);
        }
        let in_memory = |error: io::Error| {
            tracing::warn!(
                "cannot keep the index {} ({error}); it is built in memory, as in every run from now on",
                path.display()
            );
        };
        let lock = folder.join(format!("{}.lock", &name[..32]));
        let held = match std::fs::create_dir_all(folder).and_then(|()| File::create(&lock)) {
            Ok(file) => file,
            Err(error) => {
                in_memory(error);
                return Ok(Tables::of(build()?));
            }
        };
        wait(&held, &path);
        // Another process may have built it meanwhile.
        if let Ok(tables) = open(&path, key) {
            return Ok(tables);
        }
        let clock = Instant::now();
        let tables = build()?;
        let written = write(folder, &path, key, &tables);
        // Who still waits for this lock finds the file.
        let _ = std::fs::remove_file(&lock);
        match written {
            Ok(bytes) => {
                let seconds = clock.elapsed().as_secs_f64();
                tracing::info!("built the index {}: {bytes} bytes in {seconds:.1} s", path.display());
                Ok(open(&path, key).unwrap_or_else(|_| Tables::of(tables)))
            }
            Err(error) => {
                in_memory(error);
                Ok(Tables::of(tables))
            }
        }
    }
}

/// Waits for the lock, or until patience ends; a file system without locks has none to wait for.
fn wait(lock: &File, path: &Path) {
    let (began, mut said) = (Instant::now(), false);
    while let Err(TryLockError::WouldBlock) = lock.try_lock() {
        if !said {
            tracing::info!("waiting for another process that builds the index {}", path.display());
            said = true;
        }
        if began.elapsed() > PATIENCE {
            tracing::warn!("another process holds the index {} for too long; building it here", path.display());
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn write(folder: &Path, path: &Path, key: &str, tables: &[AnyTable]) -> io::Result<u64> {
    let mut listed = Vec::new();
    for table in tables {
        let mut sum = 0;
        table.pieces(|bytes| {
            sum = crc32c::crc32c_append(sum, bytes);
            Ok::<(), io::Error>(())
        })?;
        listed.push(json!({"kind": table.kind(), "len": table.len(), "crc32c": sum}));
    }
    let header = json!({"key": key, "tables": listed}).to_string();
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let file = builder.prefix(".building-").tempfile_in(folder)?;
    let mut to = BufWriter::with_capacity(1 << 20, file);
    to.write_all(MAGIC)?;
    to.write_all(&VERSION.to_le_bytes())?;
    to.write_all(&(header.len() as u32).to_le_bytes())?;
    to.write_all(&crc32c::crc32c(header.as_bytes()).to_le_bytes())?;
    to.write_all(&[0; 4])?;
    to.write_all(header.as_bytes())?;
    let mut at = HEADER_AT + header.len();
    for table in tables {
        to.write_all(&[0; 8][..aligned(at) - at])?;
        at = aligned(at);
        table.pieces(|bytes| {
            at += bytes.len();
            to.write_all(bytes)
        })?;
    }
    let file = to.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(at as u64)
}

fn open(path: &Path, key: &str) -> Result<Tables, Unusable> {
    let damaged = |why: &str| Unusable::Damaged(why.into());
    if !path.exists() {
        return Err(Unusable::Missing);
    }
    let file = Arc::new(map(path).map_err(|failure| Unusable::Damaged(failure.sentence))?);
    let word = |at: usize| file.get(at..at + 4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    if file.get(..8) != Some(MAGIC.as_slice()) || word(8) != Some(VERSION) || word(20) != Some(0) {
        return Err(damaged("it does not begin as an index does"));
    }
    let (len, sum) = (word(12).unwrap_or(0) as usize, word(16));
    let header = file.get(HEADER_AT..HEADER_AT + len).ok_or_else(|| damaged("it is cut off"))?;
    if Some(crc32c::crc32c(header)) != sum {
        return Err(damaged("its header's checksum is wrong"));
    }
    let header: Value = serde_json::from_slice(header).map_err(|_| damaged("its header cannot be read"))?;
    if header["key"] != *key {
        return Err(damaged("it is that of other data"));
    }
    let (mut at, mut tables) = (HEADER_AT + len, Vec::new());
    for about in header["tables"].as_array().into_iter().flatten() {
        let kind = about["kind"].as_str().unwrap_or("");
        let size = AnyTable::size_of(kind).ok_or_else(|| damaged("it has a table of an unknown kind"))?;
        let len = about["len"].as_u64().unwrap_or(u64::MAX) as usize;
        if file.get(at..aligned(at)).is_none_or(|filling| filling.iter().any(|&byte| byte != 0)) {
            return Err(damaged("there is something between its tables"));
        }
        at = aligned(at);
        let end = len.checked_mul(size).and_then(|bytes| at.checked_add(bytes));
        let bytes = end.and_then(|end| file.get(at..end)).ok_or_else(|| damaged("it is cut off"))?;
        if about["crc32c"].as_u64() != Some(u64::from(crc32c::crc32c(bytes))) {
            return Err(damaged("the checksum of a table is wrong"));
        }
        tables.extend(AnyTable::mapped(kind, file.clone(), at, len));
        at += len * size;
    }
    if at != file.len() {
        return Err(damaged("it is longer than it says"));
    }
    Ok(Tables::of(tables))
}

/// Tables in the order in which they were built.
pub(super) struct Tables(std::vec::IntoIter<AnyTable>);

impl Tables {
    fn of(tables: Vec<AnyTable>) -> Tables {
        Tables(tables.into_iter())
    }

    /// The next table.
    pub fn next<N>(&mut self) -> Result<Table<N>>
    where
        Table<N>: TryFrom<AnyTable>,
    {
        let table = self.0.next().and_then(|any| Table::try_from(any).ok());
        table.ok_or_else(|| Failure::data("an index lacks a table").remedy("report this as a defect"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn built(times: &AtomicUsize) -> Result<Vec<AnyTable>> {
        times.fetch_add(1, Ordering::SeqCst);
        Ok(vec![vec![1u16, 2, 3].into(), vec![u64::MAX, 5].into(), vec![-1i32].into(), Vec::<u32>::new().into()])
    }

    fn contents(mut tables: Tables) -> (Vec<u16>, Vec<u64>, Vec<i32>, usize) {
        let first: Table<u16> = tables.next().unwrap();
        let second: Table<u64> = tables.next().unwrap();
        let third: Table<i32> = tables.next().unwrap();
        let fourth: Table<u32> = tables.next().unwrap();
        assert!(tables.next::<u16>().is_err());
        (first.iter().collect(), second.iter().collect(), third.iter().collect(), fourth.len())
    }

    const EXPECT: (&[u16], &[u64], &[i32], usize) = (&[1, 2, 3], &[u64::MAX, 5], &[-1], 0);

    fn check(tables: Tables) {
        let (a, b, c, d) = contents(tables);
        assert_eq!((a.as_slice(), b.as_slice(), c.as_slice(), d), EXPECT);
    }

    fn files(folder: &Path) -> Vec<PathBuf> {
        let mut all: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        all.sort();
        all
    }

    #[test]
    fn built_once_and_then_mapped() {
        let (folder, times) = (tempfile::tempdir().unwrap(), AtomicUsize::new(0));
        let cache = Cache::at(folder.path().join("deep/cache"));
        for _ in 0..3 {
            check(cache.get("k", || built(&times)).unwrap());
        }
        assert_eq!(times.load(Ordering::SeqCst), 1);
        check(cache.get("another key", || built(&times)).unwrap());
        assert_eq!(times.load(Ordering::SeqCst), 2);
        // Nothing but the two files is left.
        let left = files(&folder.path().join("deep/cache"));
        assert!(left.len() == 2 && left.iter().all(|file| file.extension().unwrap() == "index"), "{left:?}");
        check(Cache::none().get("k", || built(&times)).unwrap());
        assert_eq!(times.load(Ordering::SeqCst), 3);
    }

    /// Every byte of the file counts: whichever is changed or missing, the index is built anew and kept whole.
    #[test]
    fn damage_anywhere_is_seen_and_repaired() {
        let (folder, times) = (tempfile::tempdir().unwrap(), AtomicUsize::new(0));
        let cache = Cache::at(folder.path());
        check(cache.get("k", || built(&times)).unwrap());
        let path = files(folder.path()).remove(0);
        let whole = std::fs::read(&path).unwrap();
        let mut builds = 1;
        for at in 0..whole.len() {
            let mut spoilt = whole.clone();
            spoilt[at] ^= 0x10;
            std::fs::write(&path, &spoilt).unwrap();
            check(cache.get("k", || built(&times)).unwrap());
            builds += 1;
            assert_eq!(times.load(Ordering::SeqCst), builds, "byte {at} of {}", whole.len());
            assert_eq!(std::fs::read(&path).unwrap(), whole);
        }
        for len in [0, 7, 12, 23, 60, whole.len() - 1] {
            std::fs::write(&path, &whole[..len]).unwrap();
            check(cache.get("k", || built(&times)).unwrap());
            builds += 1;
            assert_eq!((times.load(Ordering::SeqCst), std::fs::read(&path).unwrap()), (builds, whole.clone()));
        }
        std::fs::write(&path, [whole.as_slice(), b"x"].concat()).unwrap();
        check(cache.get("k", || built(&times)).unwrap());
        assert_eq!(times.load(Ordering::SeqCst), builds + 1);
    }

    #[test]
    fn who_comes_together_builds_once() {
        let (folder, times) = (tempfile::tempdir().unwrap(), AtomicUsize::new(0));
        let cache = Cache::at(folder.path());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let slow = || {
                        std::thread::sleep(Duration::from_millis(30));
                        built(&times)
                    };
                    check(cache.get("k", slow).unwrap());
                });
            }
        });
        assert_eq!(times.load(Ordering::SeqCst), 1);
        assert_eq!(files(folder.path()).len(), 1);
    }

    #[test]
    fn a_folder_that_cannot_be_used_costs_no_run() {
        let (folder, times) = (tempfile::tempdir().unwrap(), AtomicUsize::new(0));
        std::fs::write(folder.path().join("file"), "").unwrap();
        let cache = Cache::at(folder.path().join("file/cache"));
        for _ in 0..2 {
            check(cache.get("k", || built(&times)).unwrap());
        }
        assert_eq!(times.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn an_error_while_building_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        assert!(cache.get("k", || Err(Failure::data("no"))).is_err());
        assert!(files(folder.path()).iter().all(|file| file.extension().unwrap() == "lock"));
        let times = AtomicUsize::new(0);
        check(cache.get("k", || built(&times)).unwrap());
    }
}
