//! Memory-mapped token files: the only unsafe code of the data.
#![allow(unsafe_code)]

use crate::failure::{Failure, Result};
use memmap2::Mmap;
use std::fs::File;
use std::path::Path;

/// Maps a file for reading.
pub(super) fn map(path: &Path) -> Result<Mmap> {
    let failed = |e: std::io::Error| {
        Failure::data(format!("cannot read {}: {e}", path.display()))
            .remedy("give the path without its ending; PREFIX.idx and PREFIX.bin must both be there")
    };
    let file = File::open(path).map_err(failed)?;
    // A folder opens but cannot be mapped, and the system's word for it says little.
    if file.metadata().map_err(failed)?.is_dir() {
        return Err(Failure::data(format!("cannot read {}: it is a folder", path.display())));
    }
    // SAFETY: the slice is undefined if another process shortens or writes the file while it is mapped. A data set is
    // written once and then only read, by Megatron-LM and here alike; its index is written last.
    unsafe { Mmap::map(&file) }.map_err(failed)
}
