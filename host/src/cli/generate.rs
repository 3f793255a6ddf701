//! `gantry generate`: text from a trained model, on stdout as it comes; what there is to say about it on stderr.

use super::{args, model, print, say};
use crate::checkpoint::CheckpointReader;
use crate::data::Tokenizer;
use crate::data::chat::Template;
use crate::failure::{Failure, Result};
use crate::infer::{self, Ended, Generated, Request, Sampling};
use crate::recipe::Recipe;
use crate::train::Engine;
use std::io::{ErrorKind, Read, Write};

pub(super) fn run(arguments: args::Generate) -> Result<()> {
    let prompt = match arguments.prompt.as_str() {
        "-" => read_prompt()?,
        text => text.as_bytes().to_vec(),
    };
    let reader = model::open(&arguments.checkpoint)?;
    let recipe = model::recipe_of(&reader)?;
    // Before the model is made: nothing that was made up can be written.
    let tokenizer = tokenizer_of(&reader, &recipe)?;
    let (mut stop, mut text) = (arguments.stop, String::new());
    let prompt = match (arguments.chat, std::str::from_utf8(&prompt)) {
        (true, Ok(question)) => {
            let template = template_of(&recipe, &tokenizer)?;
            stop.extend(template.closing(&tokenizer));
            text = template.ask(question, &tokenizer)?;
            tokenizer.encode(&text)?
        }
        (false, Ok(prompt)) => tokenizer.encode(prompt)?,
        (false, Err(_)) if tokenizer.is_bytes() => prompt.iter().map(|&byte| u32::from(byte)).collect(),
        (_, Err(error)) => {
            return Err(Failure::recipe(format!("the prompt is no UTF-8 at byte {}", error.valid_up_to())));
        }
    };
    tracing::debug!("prompt: {text:?}");
    let request = Request {
        prompt,
        tokens: arguments.tokens,
        sampling: Sampling {
            temperature: arguments.temperature,
            top_k: arguments.top_k.map(|k| k as usize),
            top_p: arguments.top_p,
            seed: arguments.seed,
        },
        stop,
    };
    let mut model = model::load(&recipe, reader)?;
    model.engine.limit_vocab(tokenizer.vocab_size())?;
    let generated = write(&tokenizer, model.engine.as_mut(), &request, stream)?;
    print("\n")?;
    say(&about(&generated, model.engine.window()));
    Ok(())
}

/// Writes text with a model of the tokenizer's tokens.
pub(super) fn write(
    tokenizer: &Tokenizer,
    engine: &mut dyn Engine,
    request: &Request,
    show: impl FnMut(&str) -> Result<bool>,
) -> Result<Generated> {
    let (window, end) = (engine.window(), tokenizer.end_of_document()?);
    let mut next_logits = |context: &[i32]| engine.next_logits(context);
    let next_logits = &mut next_logits;
    let (tokens, stream) = (tokenizer.vocab_size(), tokenizer.stream());
    infer::generate(infer::Model { next_logits, window, end, tokens, stream }, request, show)
}

/// The tokenizer that a checkpoint's model was trained with: the checkpoint's own, else the one that its recipe names.
fn tokenizer_of(reader: &CheckpointReader, recipe: &Recipe) -> Result<Tokenizer> {
    let state = &reader.index().extra["tokenizer"];
    if !state.is_null() {
        return Tokenizer::restore(state, model::tokenizer_json(reader)?)
            .map_err(|failure| failure.at(reader.folder().display()));
    }
    crate::data::tokenizer(recipe)?
        .ok_or_else(|| Failure::recipe("the model was trained on data.synthetic, whose tokens stand for no text"))
}

/// The template of conversations: the recipe's, else the tokenizer's.
fn template_of(recipe: &Recipe, tokenizer: &Tokenizer) -> Result<Template> {
    match (&recipe.data.chat.template, tokenizer.chat_template()) {
        (Some(name), _) => Template::open(name),
        (None, Some(source)) => Template::new(&format!("of tokenizer {}", tokenizer.name()), source),
        (None, None) => Err(Failure::recipe("--chat needs a template of conversations, and the tokenizer has none")
            .remedy("train with data.chat.template, or leave --chat out")),
    }
}

fn read_prompt() -> Result<Vec<u8>> {
    let mut prompt = Vec::new();
    let read = std::io::stdin().lock().read_to_end(&mut prompt);
    read.map_err(|error| Failure::data(format!("cannot read the prompt from standard input: {error}")))?;
    Ok(prompt)
}

/// Shows text at once; a reader that has seen enough (`| head`) ends the writing.
fn stream(text: &str) -> Result<bool> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::data(format!("cannot write to stdout: {error}"))),
    }
}

fn about(generated: &Generated, window: usize) -> String {
    let Generated { tokens, seconds, ended, slid } = *generated;
    let why = match ended {
        Ended::Length => "",
        Ended::Document => ", up to the end of the document",
        Ended::Stop => ", up to a stop",
        Ended::Reader => ", until nobody read on",
    };
    let rate = tokens as f64 / seconds.max(f64::MIN_POSITIVE);
    let mut text = format!("{tokens} tokens in {seconds:.2} s ({rate:.0} tokens/s){why}");
    if slid {
        text.push_str(&format!(
            "; the text is longer than the {window} tokens the model was trained on at a time, it saw the last {window} only"
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happened_is_said() {
        let all = Generated { tokens: 50, seconds: 0.25, ended: Ended::Length, slid: false };
        assert_eq!(about(&all, 64), "50 tokens in 0.25 s (200 tokens/s)");
        let text = about(&Generated { ended: Ended::Document, slid: true, ..all }, 64);
        assert!(text.contains("up to the end of the document; the text is longer than the 64 tokens"), "{text}");
    }
}
