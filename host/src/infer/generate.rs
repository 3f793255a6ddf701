//! Text from a prompt, one token after another.

use super::Sampling;
use super::text::Stops;
use crate::data::tokenizer::Stream;
use crate::error::{Error, Result};
use std::time::Instant;

/// What to write.
#[derive(Clone, Debug)]
pub struct Request {
    /// Tokens the text begins with; they are not repeated.
    pub prompt: Vec<u32>,
    /// Most tokens to write.
    pub tokens: usize,
    pub sampling: Sampling,
    /// Strings that end the text and are not shown.
    pub stop: Vec<String>,
}

/// A model as this module sees it.
pub struct Model<'a> {
    /// Logits [vocab] of the token after a context, which is not empty and at most `window` long.
    pub next_logits: &'a mut dyn FnMut(&[i32]) -> Result<Vec<f64>>,
    /// The longest context, in tokens: that of training.
    pub window: usize,
    /// The token that ends a document and stands before a text without a prompt.
    pub end: u32,
    /// Tokens there are; ids from this one on mean nothing and are never chosen.
    pub tokens: usize,
    /// Decodes what is chosen.
    pub stream: Stream,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// As many tokens as asked for.
    Length,
    /// The model ended the document.
    Document,
    /// One of the stop strings came.
    Stop,
    /// Nobody reads on.
    Reader,
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Generated {
    /// Tokens, the end of the document and those of a stop string included.
    pub tokens: usize,
    pub seconds: f64,
    pub ended: Ended,
    /// The model saw only the end of a text longer than it was trained for.
    pub slid: bool,
}

/// Writes a text. Gives it to `show` as it comes, which says whether to go on.
pub fn generate(
    mut model: Model<'_>,
    request: &Request,
    mut show: impl FnMut(&str) -> Result<bool>,
) -> Result<Generated> {
    let clock = Instant::now();
    let mut text: Vec<i32> = request.prompt.iter().map(|&id| id as i32).collect();
    if text.is_empty() {
        text.push(model.end as i32);
    }
    let window = model.window.max(1);
    let mut stops = Stops::new(&request.stop);
    let (mut ended, mut tokens, mut slid) = (Ended::Length, 0, false);
    while tokens < request.tokens && ended == Ended::Length {
        slid |= text.len() > window;
        let mut logits = (model.next_logits)(&text[text.len().saturating_sub(window)..])?;
        logits.truncate(model.tokens);
        // The position in the text, so that a text goes on alike from a longer prompt.
        let token = request.sampling.choose(&logits, text.len() as u64);
        let token = token.ok_or_else(|| Error::numerical("the model's logits are NaN or infinite".to_string()))? as u32;
        tokens += 1;
        text.push(token as i32);
        if token == model.end {
            ended = Ended::Document;
            continue;
        }
        let (shown, stopped) = stops.push(&model.stream.push(token));
        if !shown.is_empty() && !show(&shown)? {
            ended = Ended::Reader;
        } else if stopped {
            ended = Ended::Stop;
        }
    }
    if matches!(ended, Ended::Length | Ended::Document) {
        let (mut rest, stopped) = stops.push(&model.stream.end());
        if !stopped {
            rest.push_str(&stops.end());
        }
        if !rest.is_empty() {
            show(&rest)?;
        }
    }
    Ok(Generated { tokens, seconds: clock.elapsed().as_secs_f64(), ended, slid })
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: u32 = 256;

    fn bytes(next_logits: &mut dyn FnMut(&[i32]) -> Result<Vec<f64>>, window: usize) -> Model<'_> {
        Model { next_logits, window, end: END, tokens: 257, stream: crate::data::Tokenizer::bytes().stream() }
    }

    fn request(prompt: &str, tokens: usize, stop: &[&str]) -> Request {
        let sampling = Sampling { temperature: 0.0, top_k: None, top_p: 1.0, seed: 1 };
        Request {
            prompt: prompt.bytes().map(u32::from).collect(),
            tokens,
            sampling,
            stop: stop.iter().map(|s| s.to_string()).collect(),
        }
    }

    /// Writes with a model that recites `text` and then ends the document; what was shown, and the contexts it saw.
    fn write(text: &str, request: &Request) -> (String, Generated, Vec<Vec<i32>>) {
        let (mut shown, mut seen) = (String::new(), Vec::new());
        let mut next_logits = |context: &[i32]| {
            let next = text.as_bytes().get(seen.len()).map_or(END, |&byte| u32::from(byte));
            seen.push(context.to_vec());
            let mut logits = vec![0.0; 300];
            logits[next as usize] = 50.0;
            // A token that means nothing must not be chosen, however likely.
            logits[270] = 100.0;
            Ok(logits)
        };
        let generated = generate(bytes(&mut next_logits, 6), request, |more| {
            shown.push_str(more);
            Ok(true)
        });
        (shown, generated.unwrap(), seen)
    }

    #[test]
    fn text_comes_until_the_document_ends() {
        let (text, generated, seen) = write("caf\u{e9}", &request("a ", 50, &[]));
        assert_eq!(text, "caf\u{e9}");
        assert_eq!((generated.tokens, generated.ended), (6, Ended::Document));
        assert_eq!(seen[0], [97, 32]);
        assert_eq!(seen[2], [97, 32, 99, 97]);
    }

    #[test]
    fn text_without_a_prompt_begins_a_document() {
        assert_eq!(write("x", &request("", 3, &[])).2[0], [END as i32]);
    }

    #[test]
    fn length_cuts_a_character_into_a_replacement() {
        let (text, generated, _) = write("caf\u{e9}", &request("a", 4, &[]));
        assert_eq!((text.as_str(), generated.ended), ("caf\u{fffd}", Ended::Length));
    }

    #[test]
    fn stop_ends_the_text_and_is_not_shown() {
        let (text, generated, _) = write("one; two", &request("a", 50, &["; "]));
        assert_eq!((text.as_str(), generated.ended, generated.tokens), ("one", Ended::Stop, 5));
        // What only began like a stop is shown in the end.
        assert_eq!(write("one;", &request("a", 50, &["; "])).0, "one;");
    }

    #[test]
    fn long_text_slides_and_says_so() {
        let (_, generated, seen) = write("defgh", &request("abc", 3, &[]));
        assert!(!generated.slid && seen[2].len() == 5);
        let (_, generated, seen) = write("defgh", &request("abc", 5, &[]));
        assert!(generated.slid);
        assert_eq!(seen[4], "bcdefg".bytes().map(i32::from).collect::<Vec<_>>());
    }

    #[test]
    fn reader_that_left_ends_it() {
        let mut next_logits = |_: &[i32]| Ok(vec![1.0; 100]);
        let generated = generate(bytes(&mut next_logits, 9), &request("a", 50, &[]), |_| Ok(false)).unwrap();
        assert_eq!((generated.tokens, generated.ended), (1, Ended::Reader));
    }

    #[test]
    fn broken_model_is_a_numerical_failure() {
        let mut next_logits = |_: &[i32]| Ok(vec![f64::NAN; 300]);
        let failure = generate(bytes(&mut next_logits, 9), &request("a", 5, &[]), |_| Ok(true)).unwrap_err();
        assert_eq!(failure.exit_status(), 5);
    }
}
