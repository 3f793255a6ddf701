//! `gantry generate`: text from a trained model, on stdout as it comes; what there is to say about it on stderr.

use super::{args, model, print, say};
use crate::data::END_OF_DOCUMENT;
use crate::failure::{Failure, Result};
use crate::infer::{self, Ended, Generated, Request, Sampling};
use crate::recipe::{Recipe, TokenizerSpec};
use crate::train::Engine;
use std::io::{ErrorKind, Read, Write};

pub(super) fn run(arguments: args::Generate) -> Result<()> {
    let prompt = match arguments.prompt.as_str() {
        "-" => read_prompt()?,
        text => text.as_bytes().to_vec(),
    };
    let reader = model::open(&arguments.checkpoint)?;
    let recipe = model::recipe_of(&reader)?;
    let request = Request {
        prompt,
        tokens: arguments.tokens,
        sampling: Sampling {
            temperature: arguments.temperature,
            top_k: arguments.top_k.map(|k| k as usize),
            top_p: arguments.top_p,
            seed: arguments.seed,
        },
        stop: arguments.stop,
    };
    // Before the model is made: nothing that was made up can be written.
    end_of_document(&recipe)?;
    let mut model = model::load(&recipe, reader)?;
    let generated = write(&recipe, model.engine.as_mut(), &request, stream)?;
    print("\n")?;
    say(&about(&generated, model.engine.window()));
    Ok(())
}

/// Writes text with the recipe's model.
pub(super) fn write(
    recipe: &Recipe,
    engine: &mut dyn Engine,
    request: &Request,
    show: impl FnMut(&str) -> Result<bool>,
) -> Result<Generated> {
    let (window, end) = (engine.window(), end_of_document(recipe)?);
    let mut next_logits = |context: &[i32]| engine.next_logits(context);
    infer::generate(infer::Model { next_logits: &mut next_logits, window, end }, request, show)
}

fn end_of_document(recipe: &Recipe) -> Result<i32> {
    if recipe.data.synthetic.is_some() {
        return Err(Failure::recipe("the model was trained on data.synthetic, whose tokens stand for no text"));
    }
    match recipe.data.tokenizer {
        TokenizerSpec::Bytes => Ok(END_OF_DOCUMENT),
        _ => Err(Failure::recipe("only data.tokenizer bytes can write yet")),
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
