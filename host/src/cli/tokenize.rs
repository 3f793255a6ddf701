//! `gantry tokenize`: what a text becomes.

use super::{args, print};
use crate::data::Tokenizer;
use crate::failure::{Failure, Result};
use crate::recipe::TokenizerSpec;
use serde_json::{Value, json};
use std::fmt::Write;
use std::io::Read;

pub(super) fn run(arguments: args::Tokenize) -> Result<()> {
    let tokenizer = Tokenizer::open(&TokenizerSpec::of(&arguments.tokenizer), &Default::default())?;
    let name = arguments.file.display();
    let mut bytes = Vec::new();
    let read = match arguments.file.as_os_str() == "-" {
        true => std::io::stdin().lock().read_to_end(&mut bytes).map(drop),
        false => std::fs::read(&arguments.file).map(|read| bytes = read),
    };
    read.map_err(|error| Failure::data(format!("cannot read {name}: {error}")))?;
    let all = String::from_utf8(bytes).map_err(|error| {
        Failure::data(format!("{name} is no UTF-8 at byte {}", error.utf8_error().valid_up_to()))
            .remedy("give a file of text")
    })?;
    let texts: Vec<String> = match arguments.jsonl {
        true => {
            let lines = all.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
            let text = |(number, line): (usize, &str)| {
                let value: Value = serde_json::from_str(line).unwrap_or_default();
                let text = value["text"].as_str().or(value.as_str()).map(str::to_string);
                text.ok_or_else(|| Failure::data(format!("{name} line {}: no JSON with a `text`", number + 1)))
            };
            lines.map(text).collect::<Result<_>>()?
        }
        false => vec![all],
    };
    let encoded = tokenizer.encode_batch(&texts)?;
    if arguments.json {
        let mut out = String::new();
        for (text, ids) in texts.iter().zip(&encoded) {
            let report =
                json!({"bytes": text.len(), "tokens": ids.len(), "ids": ids, "pieces": pieces(&tokenizer, ids)?});
            let _ = writeln!(out, "{report}");
        }
        return print(&out);
    }
    let (bytes, tokens): (usize, usize) = (texts.iter().map(String::len).sum(), encoded.iter().map(Vec::len).sum());
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "tokenizer   {}: {} tokens, sha256 {}",
        tokenizer.name(),
        tokenizer.vocab_size(),
        tokenizer.sha256()
    );
    let special: Vec<String> = tokenizer.specials().iter().map(|(name, id)| format!("{name} {id}")).collect();
    let _ =
        writeln!(out, "special     {}", if special.is_empty() { "none has a name".into() } else { special.join(", ") });
    let per_token = bytes as f64 / tokens.max(1) as f64;
    let _ = writeln!(out, "text        {bytes} bytes, {tokens} tokens ({per_token:.3} bytes per token)");
    let first: Vec<u32> = encoded.iter().flatten().copied().take(SHOWN).collect();
    let shown =
        pieces(&tokenizer, &first)?.iter().zip(&first).map(|(piece, id)| format!("{piece:?} {id}")).collect::<Vec<_>>();
    let _ = writeln!(out, "begins      {}", shown.join(" | "));
    print(&out)
}

/// Tokens shown of a text.
const SHOWN: usize = 24;

fn pieces(tokenizer: &Tokenizer, ids: &[u32]) -> Result<Vec<String>> {
    ids.iter().map(|&id| tokenizer.decode(&[id])).collect()
}
