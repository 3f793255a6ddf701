//! `gantry data inspect` and `gantry data verify`.

use super::args::{Inspect, Verify};
use super::thousands;
use crate::cli::print;
use crate::data::megatron::IndexedDataset;
use crate::failure::{Failure, Result};
use serde_json::{Value, json};
use std::fmt::Write;

/// Tokens of a document that are shown.
const SHOWN: usize = 32;
/// Places that are named.
const PLACES: usize = 10;

/// Lengths of documents at shares of all of them.
const QUANTILES: [(&str, f64); 7] =
    [("min", 0.0), ("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0)];

fn quantiles(lengths: &mut [u64]) -> Vec<(&'static str, u64)> {
    lengths.sort_unstable();
    let at = |share: f64| lengths.get((share * (lengths.len().max(1) - 1) as f64).round() as usize).copied();
    QUANTILES.iter().map(|&(name, share)| (name, at(share).unwrap_or(0))).collect()
}

pub(super) fn inspect(arguments: Inspect) -> Result<()> {
    let set = IndexedDataset::open(&arguments.prefix)?;
    let tokenizer = arguments.tokenizer.as_deref().map(super::tokenizer).transpose()?;
    let index = set.index();
    let length = |document| index.document(document).map(|s| u64::from(index.length(s))).sum::<u64>();
    let mut lengths: Vec<u64> = (0..index.documents()).map(length).collect();
    let quantiles = quantiles(&mut lengths);
    let mean = set.tokens() as f64 / index.documents().max(1) as f64;
    let mut first = Vec::new();
    for document in 0..index.documents().min(arguments.documents) {
        let mut tokens = Vec::new();
        for sequence in index.document(document) {
            let some = (index.length(sequence) as usize).min(SHOWN - tokens.len());
            set.read(sequence, 0, some, &mut tokens)?;
        }
        let text = match &tokenizer {
            Some(tokenizer) => {
                let ids: Vec<u32> = tokens.iter().filter_map(|&token| u32::try_from(token).ok()).collect();
                Some(tokenizer.decode(&ids)?)
            }
            None => None,
        };
        first.push((document, length(document), index.document(document).len(), tokens, text));
    }
    if arguments.json {
        let shown = first.iter().map(|(document, tokens, sequences, ids, text)| {
            json!({"document": document, "tokens": tokens, "sequences": sequences, "first": ids, "text": text})
        });
        let report = json!({
            "prefix": arguments.prefix.display().to_string(),
            "dtype": index.dtype().name(),
            "documents": index.documents(),
            "sequences": index.sequences(),
            "tokens": set.tokens(),
            "mean_document_length": mean,
            "document_length": quantiles.iter().map(|&(name, length)| (name, length)).collect::<std::collections::BTreeMap<_, _>>(),
            "multimodal": index.modes(),
            "sha256": set.sha256(),
            "first_documents": shown.collect::<Vec<Value>>(),
        });
        return print(&format!("{report:#}\n"));
    }
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(text, "data set    {}", arguments.prefix.display());
    let _ = writeln!(text, "documents   {}", thousands(index.documents() as u64));
    let _ = writeln!(text, "sequences   {}", thousands(index.sequences() as u64));
    let _ = writeln!(text, "tokens      {} of type {}", thousands(set.tokens()), index.dtype());
    let list: Vec<_> = quantiles.iter().map(|(name, length)| format!("{name} {length}")).collect();
    let _ = writeln!(text, "lengths     mean {mean:.1}, {} tokens a document", list.join(", "));
    let _ = writeln!(text, "sha256      {}", set.sha256());
    for (document, tokens, sequences, ids, decoded) in first {
        let more = if tokens as usize > ids.len() { " ..." } else { "" };
        let parts = if sequences == 1 { String::new() } else { format!(" in {sequences} sequences") };
        let list: Vec<_> = ids.iter().map(i64::to_string).collect();
        let _ = writeln!(text, "document {document}: {tokens} tokens{parts}: {}{more}", list.join(" "));
        if let Some(decoded) = decoded {
            let _ = writeln!(text, "    {decoded:?}{more}");
        }
    }
    print(&text)
}

pub(super) fn verify(arguments: Verify) -> Result<()> {
    // Opening checks the index whole, and that it fits the tokens.
    let set = IndexedDataset::open(&arguments.prefix)?;
    let tokenizer = arguments.tokenizer.as_deref().map(super::tokenizer).transpose()?;
    let known = tokenizer.as_ref().map(|tokenizer| tokenizer.vocab_size() as i64);
    let limit = arguments.vocab_size.map(i64::from).or(known).unwrap_or(i64::from(i32::MAX) + 1);
    let (index, size) = (set.index(), set.index().dtype().size() as u64);
    let (mut bad, mut places, mut most, mut empty, mut tokens) = (0u64, Vec::new(), -1, 0u64, Vec::new());
    for document in 0..index.documents() {
        for sequence in index.document(document) {
            tokens.clear();
            set.read(sequence, 0, index.length(sequence) as usize, &mut tokens)?;
            empty += u64::from(tokens.is_empty());
            for (at, &token) in tokens.iter().enumerate() {
                most = most.max(token);
                if (0..limit).contains(&token) {
                    continue;
                }
                bad += 1;
                if places.len() < PLACES {
                    let byte = index.pointer(sequence) + at as u64 * size;
                    places.push(format!(
                        "token {token} at place {at} of sequence {sequence}, document {document} (byte {byte})"
                    ));
                }
            }
        }
    }
    if bad > 0 {
        let failure = Failure::data(format!(
            "{}: {} tokens are not among 0 to {}",
            set.path().display(),
            thousands(bad),
            limit - 1
        ));
        let failure = places.into_iter().fold(failure, Failure::detail);
        return Err(failure.remedy("the data set was made with another vocabulary, or is damaged; make it again"));
    }
    print(&format!(
        "{}: whole; {} documents, {} sequences ({} empty), {} tokens of type {}, the largest {most}\n",
        arguments.prefix.display(),
        thousands(index.documents() as u64),
        thousands(index.sequences() as u64),
        thousands(empty),
        thousands(set.tokens()),
        index.dtype()
    ))
}
