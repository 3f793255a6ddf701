//! The data of a run, whatever they come from.

use super::blends::{self, Files, Looks};
use super::{Held, Loader, Position, Split, Tokenizer, Valid, ngram};
use crate::failure::Result;
use crate::recipe::Recipe;
use std::sync::Arc;

/// What a recipe trains on and is judged by.
#[derive(Clone, Debug)]
pub struct RunData {
    pub loader: Loader,
    pub held_out: Option<Held>,
    /// Nats per token below which no model goes; known of a made-up corpus.
    pub entropy: Option<f64>,
    /// Held-out loss of the n-gram model that the recipe asks for, nats per token.
    pub ngram_loss: Option<f64>,
}

impl RunData {
    /// Opens the data for steps after `begin`; `tokenizer` is the recipe's ([`super::tokenizer()`]).
    pub fn open(recipe: &Recipe, tokenizer: Option<&Tokenizer>, begin: Position) -> Result<RunData> {
        if recipe.data.megatron.given() {
            let mut files = Files::new(recipe, tokenizer)?;
            let train = files.training(recipe)?;
            let valid = files.held_out(recipe, blends::validation_samples(recipe))?;
            return Ok(RunData {
                loader: Loader::blended(Arc::new(train), recipe, begin, tokenizer)?,
                held_out: valid.map(|valid| Held::Looks(Looks::new(valid, recipe))),
                entropy: None,
                ngram_loss: None,
            });
        }
        let Split { train, valid, entropy } = Split::with(recipe, tokenizer)?;
        let valid = valid.map(|corpus| Valid::new(corpus, recipe)).transpose()?;
        let order = recipe.data.ngram_order;
        let ngram_loss = valid
            .as_ref()
            .filter(|_| order > 0)
            .map(|valid| ngram::held_out_loss(&train, valid.corpus(), order, train.vocab()));
        let loader = Loader::over(train, recipe, begin)?;
        Ok(RunData { loader, held_out: valid.map(Held::Documents), entropy, ngram_loss })
    }

    /// What the recipe holds out, whole, for a trained model to be judged by.
    pub fn held_out(recipe: &Recipe, tokenizer: Option<&Tokenizer>) -> Result<Option<Held>> {
        if recipe.data.megatron.given() {
            let valid = Files::new(recipe, tokenizer)?.held_out(recipe, blends::Asked::Once)?;
            return Ok(valid.map(|valid| Held::Looks(Looks::new(valid, recipe))));
        }
        let valid = Split::with(recipe, tokenizer)?.valid;
        Ok(valid.map(|corpus| Valid::new(corpus, recipe)).transpose()?.map(Held::Documents))
    }

    /// Bytes in memory.
    pub fn bytes(&self) -> usize {
        self.loader.bytes() + self.held_out.as_ref().map_or(0, Held::bytes)
    }
}
