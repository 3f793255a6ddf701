//! Whether a library file is whole. The dynamic linker maps what the headers promise; a file that was cut short then
//! kills the process with a bus error instead of being refused.
//!
//! Reads the ELF header and the program headers (64 bits, little-endian; System V ABI, chapters 4 and 5). Other formats
//! are left to the linker.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

const PT_LOAD: u32 = 1;

/// `Some((bytes there, bytes promised))` for an ELF file that ends before its last segment or its section table.
pub(super) fn torn(path: &Path) -> std::io::Result<Option<(u64, u64)>> {
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut header = [0; 64];
    if len < 64 {
        return Ok(None);
    }
    file.read_exact(&mut header)?;
    if header[..6] != *b"\x7fELF\x02\x01" {
        return Ok(None);
    }
    let (segments, sections) = (u64_at(&header, 32), u64_at(&header, 40));
    let [segment_size, segment_count, section_size, section_count] = [54, 56, 58, 60].map(|at| u16_at(&header, at));
    let mut end = sections.saturating_add(u64::from(section_size) * u64::from(section_count));
    let table = u64::from(segment_size) * u64::from(segment_count);
    end = end.max(segments.saturating_add(table));
    if segments.saturating_add(table) <= len && segment_size >= 56 {
        let mut bytes = vec![0; table as usize];
        file.seek(SeekFrom::Start(segments))?;
        file.read_exact(&mut bytes)?;
        for segment in bytes.chunks_exact(usize::from(segment_size)) {
            if u32_at(segment, 0) == PT_LOAD {
                end = end.max(u64_at(segment, 8).saturating_add(u64_at(segment, 32)));
            }
        }
    }
    Ok((end > len).then_some((len, end)))
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(all(test, target_os = "linux", target_pointer_width = "64"))]
mod tests {
    use super::*;

    #[test]
    fn this_program_is_whole_and_any_shorter_piece_of_it_is_torn() {
        let whole = std::env::current_exe().unwrap();
        assert_eq!(torn(&whole).unwrap(), None);
        let bytes = std::fs::read(&whole).unwrap();
        let piece = std::env::temp_dir().join(format!("gantry-torn-{}", std::process::id()));
        for len in [64, 2000, bytes.len() / 2, bytes.len() - 1] {
            std::fs::write(&piece, &bytes[..len]).unwrap();
            let (there, promised) = torn(&piece).unwrap().expect("torn");
            assert!(there == len as u64 && promised as usize <= bytes.len() && promised > there);
        }
        std::fs::write(&piece, b"#!/bin/sh").unwrap();
        assert_eq!(torn(&piece).unwrap(), None);
        std::fs::remove_file(&piece).unwrap();
    }
}
