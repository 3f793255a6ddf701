//! The tensors of one format out of those of another: each declared tensor's elements, wherever they lie.
//!
//! [`Assembly`] knows which source tensors hold a declared tensor and gives out any piece of it in blocks, so that memory
//! does not grow with tensors. [`assemble`] is strict: every tensor of the source is used once, every declared one is
//! filled once, and shapes are those of the declaration.

use super::element::{Element, convert};
use super::pieces::{Declared, Names, Piece};
use super::source::Source;
use crate::failure::{Failure, Result};
use std::collections::BTreeSet;

/// Bytes read at once.
const BLOCK: usize = 4 << 20;
/// Problems shown below the first.
const SHOWN: usize = 8;

/// A run of a declared tensor's elements in a source tensor.
#[derive(Clone, Debug)]
struct Segment {
    begin: usize,
    len: usize,
    /// Index into the assembly's tensors.
    tensor: usize,
    /// First element in the tensor.
    at: usize,
}

/// A declared tensor as it lies in the source.
#[derive(Debug)]
pub struct Assembly<'a> {
    source: &'a Source,
    tensors: Vec<(&'a str, Element)>,
    /// In logical order, without gaps.
    segments: Vec<Segment>,
}

impl Assembly<'_> {
    /// The type that holds the elements of all its tensors.
    pub fn element(&self) -> Element {
        let widest = |a: Element, b: Element| match () {
            _ if a.holds(b) => a,
            _ if b.holds(a) => b,
            _ => Element::F32,
        };
        self.tensors.iter().map(|(_, element)| *element).reduce(widest).unwrap_or(Element::F32)
    }

    /// Gives the elements of a piece as `to`, little-endian, in order, block by block. A number that is not finite is
    /// refused by its tensor's name.
    pub fn give(&self, piece: &Piece, to: Element, mut sink: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let (mut read, mut out) = (Vec::new(), Vec::new());
        for run in &piece.runs {
            let mut at = run.start;
            let mut index = self.segments.partition_point(|s| s.begin + s.len <= at);
            while at < run.end {
                let Some(segment) = self.segments.get(index) else {
                    return Err(self.source.refuse(format!("tensor {} is not covered", piece.name)));
                };
                let (name, from) = self.tensors[segment.tensor];
                let end = run.end.min(segment.begin + segment.len);
                let len = (end - at).min(BLOCK / from.bytes());
                let first = segment.at + at - segment.begin;
                read.clear();
                self.source.read(name, (first * from.bytes()) as u64, len * from.bytes(), &mut read)?;
                convert(&read, from, to, &mut out).map_err(|bad| self.not_finite(name, first + bad, to))?;
                if out.len() >= BLOCK / 4 {
                    sink(&out)?;
                    out.clear();
                }
                at += len;
                if at == segment.begin + segment.len {
                    index += 1;
                }
            }
        }
        if out.is_empty() { Ok(()) } else { sink(&out) }
    }

    fn not_finite(&self, tensor: &str, element: usize, to: Element) -> Failure {
        self.source
            .refuse(format!("element {element} of tensor {tensor} is NaN, infinite or too large for {}", to.name()))
            .remedy("convert a checkpoint from before the numbers went wrong")
    }

    /// Whether the elements of a piece are those of `other`.
    fn same(&self, piece: &Piece, other: &Assembly<'_>) -> Result<bool> {
        let blocks = piece.runs.iter().flat_map(|run| run.clone().step_by(BLOCK).map(|at| at..run.end.min(at + BLOCK)));
        for block in blocks {
            let part = Piece::whole(piece.name.clone(), vec![block.len()], block.start);
            let [mut ours, mut theirs] = [Vec::new(), Vec::new()];
            for (assembly, to) in [(self, &mut ours), (other, &mut theirs)] {
                assembly.give(&part, Element::F32, |bytes| {
                    to.extend_from_slice(bytes);
                    Ok(())
                })?;
            }
            if ours != theirs {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// What may be in a source besides the model's tensors.
pub struct Extras<'a> {
    /// Tensors that may stay unused.
    pub may_stay: &'a dyn Fn(&str) -> bool,
    /// Tensors of one value, by their names, and their shapes.
    pub constants: &'a [(String, Vec<usize>, f64)],
}

/// Finds every declared tensor in the source, or says all that does not fit.
pub fn assemble<'a>(
    source: &'a Source,
    declared: &'a [Declared],
    names: Names,
    extras: &Extras<'_>,
) -> Result<Vec<Assembly<'a>>> {
    let mut used = BTreeSet::new();
    let (mut wrong, mut missing) = (Vec::new(), Vec::new());
    let mut all = Vec::new();
    for tensor in declared {
        let found = find(source, tensor.pieces(names), true, &mut used, &mut wrong, &mut missing);
        // A parameter tied to this one may be there too, with the same numbers.
        let tied = tensor.tied(names);
        let also = find(source, tied, false, &mut used, &mut wrong, &mut missing);
        all.push((found, tied, also));
    }
    for (name, shape, _) in extras.constants {
        if let Some(found) = source.tensors().get(name) {
            used.insert(name.clone());
            if found.shape != *shape {
                wrong.push(format!("tensor {name} has shape {:?}, the model needs {shape:?}", found.shape));
            }
        }
    }
    let unused = source.tensors().keys().filter(|name| !used.contains(*name) && !(extras.may_stay)(name));
    let unused = unused.map(|name| {
        let file = source.tensors().get(name).map_or("", |found| found.file.as_str());
        format!("tensor {name} in {file} is not the model's")
    });
    let problems: Vec<String> = wrong.into_iter().chain(missing).chain(unused).collect();
    if let Some((first, rest)) = problems.split_first() {
        let mut failure = source.refuse(first.clone());
        failure.details.extend(rest.iter().take(SHOWN).cloned());
        if rest.len() > SHOWN {
            failure.details.push(format!("and {} more", rest.len() - SHOWN));
        }
        return Err(failure.remedy("the tensors are not those of the model that the config describes"));
    }
    for (name, _, value) in extras.constants {
        check_constant(source, name, *value)?;
    }
    all.into_iter()
        .map(|(found, tied, also)| {
            if let (Some(first), false) = (tied.first(), also.tensors.is_empty())
                && !found.same(first, &also)?
            {
                let why = format!("tensor {} differs from the one that it is tied to", first.name);
                return Err(source.refuse(why));
            }
            Ok(found)
        })
        .collect()
}

fn find<'a>(
    source: &'a Source,
    pieces: &'a [Piece],
    needed: bool,
    used: &mut BTreeSet<String>,
    wrong: &mut Vec<String>,
    missing: &mut Vec<String>,
) -> Assembly<'a> {
    let mut assembly = Assembly { source, tensors: Vec::new(), segments: Vec::new() };
    for piece in pieces {
        let name = piece.name.as_str();
        let Some(found) = source.tensors().get(name) else {
            if needed {
                missing.push(format!("tensor {name} is missing"));
            }
            continue;
        };
        used.insert(name.into());
        let Some(element) = found.element() else {
            wrong.push(format!(
                "tensor {name} in {} has type {}; F32, BF16, F16 or F64 can be read",
                found.file, found.dtype
            ));
            continue;
        };
        if found.shape != piece.shape || found.bytes != (piece.elements() * element.bytes()) as u64 {
            let (file, shape, needs) = (&found.file, &found.shape, &piece.shape);
            wrong.push(format!("tensor {name} in {file} has shape {shape:?}, the model needs {needs:?}"));
            continue;
        }
        let mut at = 0;
        for run in &piece.runs {
            assembly.segments.push(Segment { begin: run.start, len: run.len(), tensor: assembly.tensors.len(), at });
            at += run.len();
        }
        assembly.tensors.push((name, element));
    }
    assembly.segments.sort_by_key(|segment| segment.begin);
    assembly
}

fn check_constant(source: &Source, name: &str, value: f64) -> Result<()> {
    let Some(found) = source.tensors().get(name) else { return Ok(()) };
    let whole = Piece::whole(name.into(), found.shape.clone(), 0);
    let element = found.element().unwrap_or(Element::F32);
    let segments = vec![Segment { begin: 0, len: whole.elements(), tensor: 0, at: 0 }];
    let assembly = Assembly { source, tensors: vec![(name, element)], segments };
    let mut holds = true;
    assembly.give(&whole, Element::F32, |bytes| {
        holds &= bytes.as_chunks().0.iter().all(|b| f64::from(f32::from_le_bytes(*b)) == value);
        Ok(())
    })?;
    if holds { Ok(()) } else { Err(source.refuse(format!("tensor {name} must be {value} everywhere in this model"))) }
}
