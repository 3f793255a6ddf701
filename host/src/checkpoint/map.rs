//! Memory-mapped shards: the only unsafe code of checkpoints.
#![allow(unsafe_code)]

use memmap2::Mmap;
use std::fs::File;
use std::io;
use std::path::Path;

/// Maps a file for reading.
pub(super) fn map(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: the slice is undefined if another process shortens or writes the file while it is mapped. Shards of a
    // complete checkpoint are never written again, only removed as a whole, which keeps a mapping valid.
    unsafe { Mmap::map(&file) }
}
