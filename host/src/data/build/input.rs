//! Files to parts of about a megabyte, in order: whole text files, or runs of lines.

use crate::data::files::{self, Filter};
use crate::failure::{Failure, Result};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a part, more or less.
const PART: usize = 1 << 20;
/// Files of a part.
const FILES: usize = 256;

/// What to read.
#[derive(Clone, Debug)]
pub struct Inputs {
    files: Vec<Input>,
    bytes: u64,
}

#[derive(Clone, Debug)]
struct Input {
    path: Arc<Path>,
    /// A line is a document.
    lines: bool,
    /// Named itself, not found in a folder: it must be text.
    named: bool,
    size: u64,
}

/// Some of the input.
pub struct Part {
    /// From 0.
    pub number: u64,
    /// Bytes of files read for it.
    pub read: u64,
    pub pieces: Vec<Piece>,
    /// What went wrong after these.
    pub failed: Option<Failure>,
}

pub enum Piece {
    Text {
        file: Arc<Path>,
        named: bool,
        bytes: Vec<u8>,
    },
    /// Whole lines, the first of which has this number in the file.
    Lines {
        file: Arc<Path>,
        first: usize,
        bytes: Vec<u8>,
    },
}

impl Inputs {
    /// Files, folders and globs. Files that end in .jsonl, .ndjson or .json hold a document a line; with `lines` all do.
    pub fn find(paths: &[PathBuf], extensions: &[String], lines: bool) -> Result<Inputs> {
        let filter = Filter { key: "INPUT", extensions, exclude: &[], tracked_only: false };
        let mut files = Vec::new();
        for found in files::find(paths, &filter)? {
            let size = found.path.metadata().map_err(|error| unreadable(&found.path, &error))?.len();
            let lines = lines || is_lines(&found.path);
            let named = paths.contains(&found.path);
            files.push(Input { path: found.path.into(), lines, named, size });
        }
        if files.is_empty() {
            let list: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
            return Err(Failure::data(format!("no files in {}", list.join(", ")))
                .remedy("name files, or folders that hold some with the given extensions"));
        }
        Ok(Inputs { bytes: files.iter().map(|file| file.size).sum(), files })
    }

    /// Bytes of all files as they are on disk.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn files(&self) -> usize {
        self.files.len()
    }

    /// Gives the parts in order until `take` refuses one.
    pub fn read(&self, take: &mut dyn FnMut(Part) -> bool) {
        let mut cutter = Cutter { take, number: 0, read: 0, size: 0, pieces: Vec::new(), open: true };
        for file in &self.files {
            if let Err(failure) = cutter.file(file) {
                cutter.send(Some(failure));
                return;
            }
            if !cutter.open {
                return;
            }
        }
        if !cutter.pieces.is_empty() || cutter.read > 0 {
            cutter.send(None);
        }
    }
}

fn ending(path: &Path) -> Option<&str> {
    path.extension().and_then(|ending| ending.to_str())
}

fn packed(path: &Path) -> bool {
    matches!(ending(path), Some("gz" | "zst"))
}

fn is_lines(path: &Path) -> bool {
    let plain = if packed(path) { path.with_extension("") } else { path.to_path_buf() };
    matches!(ending(&plain), Some("jsonl" | "ndjson" | "json"))
}

fn unreadable(path: &Path, error: &std::io::Error) -> Failure {
    Failure::data(format!("cannot read {}: {error}", path.display()))
        .remedy("make the file readable, or leave it out of the inputs")
}

/// Counts what is read of a file.
struct Counted<R>(R, Arc<AtomicU64>);

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        let read = self.0.read(to)?;
        self.1.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// The text of a file, unpacked, and the counter of what was read of it.
fn open(path: &Path) -> std::io::Result<(Box<dyn Read>, Arc<AtomicU64>)> {
    let count = Arc::new(AtomicU64::new(0));
    let file = Counted(File::open(path)?, Arc::clone(&count));
    let text: Box<dyn Read> = match ending(path) {
        Some("gz") => Box::new(flate2::read::MultiGzDecoder::new(BufReader::with_capacity(1 << 17, file))),
        Some("zst") => Box::new(Frames { source: BufReader::with_capacity(1 << 17, file), frame: None }),
        _ => Box::new(file),
    };
    Ok((text, count))
}

/// The frames of a Zstandard file, one after the other.
struct Frames<R: BufRead> {
    source: R,
    frame: Option<ruzstd::decoding::FrameDecoder>,
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        use ruzstd::decoding::BlockDecodingStrategy;
        let broken = |error: &dyn std::fmt::Display| std::io::Error::other(format!("Zstandard: {error}"));
        loop {
            let Some(frame) = &mut self.frame else {
                if self.source.fill_buf()?.is_empty() {
                    return Ok(0);
                }
                let mut frame = ruzstd::decoding::FrameDecoder::new();
                frame.init(&mut self.source).map_err(|error| broken(&error))?;
                self.frame = Some(frame);
                continue;
            };
            while frame.can_collect() < to.len() && !frame.is_finished() {
                let missing = to.len() - frame.can_collect();
                frame
                    .decode_blocks(&mut self.source, BlockDecodingStrategy::UptoBytes(missing))
                    .map_err(|error| broken(&error))?;
            }
            let read = frame.read(to)?;
            if read > 0 || to.is_empty() {
                return Ok(read);
            }
            self.frame = None;
        }
    }
}

struct Cutter<'a> {
    take: &'a mut dyn FnMut(Part) -> bool,
    number: u64,
    read: u64,
    size: usize,
    pieces: Vec<Piece>,
    open: bool,
}

impl Cutter<'_> {
    fn send(&mut self, failed: Option<Failure>) {
        let part = Part {
            number: self.number,
            read: std::mem::take(&mut self.read),
            pieces: std::mem::take(&mut self.pieces),
            failed,
        };
        self.number += 1;
        self.size = 0;
        self.open = (self.take)(part);
    }

    fn add(&mut self, piece: Piece, size: usize) {
        self.size += size;
        self.pieces.push(piece);
        if self.size >= PART || self.pieces.len() >= FILES {
            self.send(None);
        }
    }

    fn file(&mut self, input: &Input) -> Result<()> {
        let failed = |error: std::io::Error| unreadable(&input.path, &error);
        let (mut text, count) = open(&input.path).map_err(failed)?;
        if !input.lines {
            let mut bytes = Vec::with_capacity(if packed(&input.path) { 0 } else { input.size as usize });
            text.read_to_end(&mut bytes).map_err(failed)?;
            self.read += count.load(Ordering::Relaxed);
            let size = bytes.len();
            self.add(Piece::Text { file: input.path.clone(), named: input.named, bytes }, size);
            return Ok(());
        }
        let mut lines = BufReader::with_capacity(1 << 18, text);
        let (mut first, mut counted) = (1, 0);
        while self.open {
            let (mut bytes, mut number) = (Vec::with_capacity(PART + (PART >> 3)), 0);
            let result = loop {
                match lines.read_until(b'\n', &mut bytes) {
                    Ok(0) => break Ok(true),
                    Ok(_) => number += 1,
                    Err(error) => break Err(failed(error)),
                }
                if bytes.len() >= PART {
                    break Ok(false);
                }
            };
            let now = count.load(Ordering::Relaxed);
            self.read += now - counted;
            counted = now;
            let size = bytes.len();
            if size > 0 {
                self.add(Piece::Lines { file: input.path.clone(), first, bytes }, size);
            }
            first += number;
            match result {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(failure) => return Err(failure),
            }
        }
        Ok(())
    }
}

/// The texts of the inputs, one after the other, for a vocabulary to be made of; `key` names the text of a line.
pub fn texts<'a>(inputs: &'a Inputs, key: &'a str) -> impl Iterator<Item = Result<String>> + Send + 'a {
    let (send, receive) = std::sync::mpsc::sync_channel(4);
    let inputs = inputs.clone();
    // Ends when the receiver is dropped.
    std::thread::spawn(move || inputs.read(&mut |part| send.send(part).is_ok()));
    receive.into_iter().flat_map(move |part| {
        let mut texts = Vec::new();
        for piece in part.pieces {
            super::encode::texts(piece, key, &mut |text| texts.push(text));
        }
        texts.extend(part.failed.map(Err));
        texts
    })
}
