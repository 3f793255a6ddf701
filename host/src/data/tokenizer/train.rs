//! A byte-level BPE vocabulary from text (Sennrich et al. 2016, over bytes as GPT-2 has it).
//!
//! Words are parted by GPT-2's pattern; all 256 bytes are tokens, so that no text loses any. Merges are the most frequent
//! pairs in turn; of pairs as frequent the one whose tokens came first. The same texts give the same file, whatever the
//! number of threads.

use super::special::GPT2_END;
use crate::failure::{Failure, Result, guarded};
use std::path::Path;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

/// A vocabulary that was made.
#[derive(Clone, Debug)]
pub struct Trained {
    /// The text of `tokenizer.json`.
    pub json: String,
    /// The text of `tokenizer_config.json`: which token ends a document.
    pub config: String,
    /// Tokens, the special ones included; fewer than asked for if the text has no more pairs.
    pub tokens: usize,
}

impl Trained {
    /// Writes both files to a folder, which is made.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(folder)?;
            std::fs::write(folder.join("tokenizer.json"), &self.json)?;
            std::fs::write(folder.join("tokenizer_config.json"), &self.config)
        };
        write().map_err(|error| {
            Failure::data(format!("cannot write a tokenizer to {}: {error}", folder.display()))
                .remedy("choose a folder that can be written to")
        })
    }
}

/// Makes a vocabulary of at most `vocab_size` tokens from texts. `special`: contents of special tokens besides
/// `<|endoftext|>`, which comes first. `progress` is told the bytes of each text that is taken in, and 0 before merging.
///
/// Errors: a vocabulary too small for the bytes and special tokens (status 2), no text (status 4).
pub fn train_bpe<S: AsRef<str> + Send>(
    texts: impl Iterator<Item = Result<S>> + Send,
    vocab_size: usize,
    special: &[String],
    progress: impl Fn(usize) + Send + Sync,
) -> Result<Trained> {
    let mut specials = vec![GPT2_END.to_string()];
    specials.extend(special.iter().filter(|content| *content != GPT2_END).cloned());
    let least = 256 + specials.len();
    if vocab_size < least {
        return Err(Failure::recipe(format!(
            "a vocabulary of {vocab_size} tokens is too small: {least} are the bytes and special tokens"
        ))
        .remedy(format!("ask for more than {least} tokens")));
    }
    let trainer = BpeTrainer::builder()
        .vocab_size(vocab_size)
        .min_frequency(2)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(specials.iter().map(|content| AddedToken::from(content.as_str(), true)).collect())
        .build();
    // The trainer's iterator cannot fail; what does ends it and is said afterwards.
    let (mut failed, mut bytes) = (None, 0usize);
    let lines = texts.map_while(|text| match text {
        Ok(text) => {
            progress(text.as_ref().len());
            bytes += text.as_ref().len();
            Some(text)
        }
        Err(failure) => {
            failed = Some(failure);
            None
        }
    });
    let made = guarded(|| {
        let mut tokenizer = Tokenizer::new(BPE::default());
        tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
        tokenizer.with_decoder(Some(ByteLevel::default()));
        tokenizer.train(&mut TrainerWrapper::from(trainer), lines)?;
        let json = tokenizer.to_string(true)?;
        Ok::<_, tokenizers::Error>((json, tokenizer.get_vocab_size(true)))
    });
    if let Some(failure) = failed {
        return Err(failure);
    }
    if bytes == 0 {
        return Err(Failure::data("there is no text to make a vocabulary from").remedy("name files with text"));
    }
    let broken = |what: String| Failure::data(format!("cannot make a vocabulary: {what}"));
    let (json, tokens) = made.map_err(broken)?.map_err(|error| broken(error.to_string()))?;
    let config = serde_json::json!({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": GPT2_END});
    Ok(Trained { json, config: format!("{config:#}\n"), tokens })
}
