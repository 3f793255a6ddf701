//! Special tokens by name: those of the recipe, else those that the tokenizer's files name.

use super::files::About;
use super::{END, PAD};
use crate::failure::{Failure, Result};
use std::collections::{BTreeMap, HashMap};

/// What ends documents where nobody says so.
pub(super) const GPT2_END: &str = "<|endoftext|>";
/// Names shown of those that come near.
const NEAR: usize = 3;

/// Ids by name. `named`: what the files name, by their names (`eos_token`); `wanted`: what the recipe names.
pub(super) fn resolve(
    tokenizer: &str,
    vocab: &HashMap<String, u32>,
    about: &About,
    named: &BTreeMap<String, String>,
    wanted: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, u32>> {
    let mut found = BTreeMap::new();
    let of_files = [(END, "eos_token"), (PAD, "pad_token")];
    for (name, content) in of_files.iter().filter_map(|(name, key)| Some((name, named.get(*key)?))) {
        if let Some(&id) = vocab.get(content) {
            found.insert(name.to_string(), id);
        }
    }
    if let (false, Some(&id)) = (found.contains_key(END), vocab.get(GPT2_END)) {
        found.insert(END.into(), id);
    }
    for (name, content) in wanted {
        let Some(&id) = vocab.get(content) else {
            let near = near(content, vocab, about);
            let near = if near.is_empty() { String::new() } else { format!("; near are {}", near.join(", ")) };
            return Err(Failure::recipe(format!(
                "data.special_tokens.{name} is {content:?}, which tokenizer {tokenizer} does not have{near}"
            ))
            .remedy("write the token as tokenizer.json does"));
        };
        found.insert(name.clone(), id);
    }
    Ok(found)
}

/// Tokens written much like `content`, special ones first.
fn near(content: &str, vocab: &HashMap<String, u32>, about: &About) -> Vec<String> {
    let special = about.added_tokens.iter().map(|token| (token.content.as_str(), 0.3));
    let plain = vocab.keys().map(|token| (token.as_str(), 0.7));
    let mut near: Vec<(f64, &str)> = special
        .chain(plain)
        .map(|(token, least)| (strsim::normalized_levenshtein(content, token), token, least))
        .filter(|&(likeness, _, least)| likeness >= least)
        .map(|(likeness, token, _)| (likeness, token))
        .collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    near.dedup_by_key(|(_, token)| *token);
    near.into_iter().take(NEAR).map(|(_, token)| format!("{token:?}")).collect()
}
