//! Conversations: lines of JSON to text, and which of it is learned.
//!
//! A line holds `messages` (or ShareGPT's `conversations`), `prompt` and `completion`, or `text`; `line.rs` reads it.
//! Messages become text by a Jinja template (`template.rs`). What the assistant wrote is found in that text: by the
//! template's own `{% generation %}` marks, else by rendering the conversation up to each of its turns, whose text must be
//! how the whole begins. A token is learned if it begins in such a stretch.

mod line;
mod template;

pub(super) use line::Line;
pub use template::Template;

use super::corpus::Encoded;
use super::tokenizer::Tokenizer;
use crate::failure::Result;
use crate::recipe::TrainOn;
use line::Message;
use std::ops::Range;

/// Text, and the stretches of it that are learned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Rendered {
    pub text: String,
    pub learned: Vec<Range<usize>>,
    /// The end of the document is learned too.
    pub learns_end: bool,
}

impl Rendered {
    /// A text that is learned from a byte on, its end included.
    fn learned_from(begin: usize, text: String) -> Rendered {
        let learned = std::iter::once(begin..text.len()).collect();
        Rendered { text, learned, learns_end: true }
    }
}

/// Turns lines into tokens.
pub(super) struct Chat {
    template: Option<Template>,
    train_on: TrainOn,
    tokenizer: Tokenizer,
}

impl Chat {
    /// `template`: what renders messages; none if there is none.
    pub fn new(template: Option<Template>, train_on: TrainOn, tokenizer: Tokenizer) -> Chat {
        Chat { template, train_on, tokenizer }
    }

    /// Whether there is nothing to render a line with.
    pub fn lacks_template(&self, line: &Line) -> bool {
        self.template.is_none() && matches!(line, Line::Messages { .. })
    }

    /// A line's text. What is wrong with it in words.
    pub fn render(&self, line: &Line) -> Result<Rendered, String> {
        match line {
            Line::Text(text) => Ok(Rendered::learned_from(0, text.clone())),
            Line::Completion { prompt, completion } => {
                let text = format!("{prompt}{completion}");
                let begin = if self.train_on == TrainOn::All { 0 } else { prompt.len() };
                Ok(Rendered::learned_from(begin, text))
            }
            Line::Messages { messages, prompt, more } => {
                let template = self.template.as_ref().ok_or(
                    "messages need a template: the tokenizer has none; set data.chat.template to a file or to chatml",
                )?;
                self.messages(template, messages, *prompt, more)
            }
        }
    }

    /// `prompt`: messages of these that are asked, never learned but with `all`.
    fn messages(
        &self,
        template: &Template,
        messages: &[Message],
        prompt: usize,
        more: &[(String, minijinja::Value)],
    ) -> Result<Rendered, String> {
        let render = |upto: usize, ask: bool| template.render(&messages[..upto], more, ask, &self.tokenizer);
        let (text, marked) = render(messages.len(), false)?;
        if self.train_on == TrainOn::All {
            return Ok(Rendered::learned_from(0, text));
        }
        let turns = || messages.iter().enumerate().skip(prompt).filter(|(_, message)| message.role == "assistant");
        let wanted: Vec<usize> = match self.train_on {
            TrainOn::Completion => turns().next_back().map(|(i, _)| i).into_iter().collect(),
            _ => turns().map(|(i, _)| i).collect(),
        };
        let learned = match template.marks() {
            true => {
                // As many stretches as turns of the assistant, in their order.
                let all: Vec<usize> = (0..messages.len()).filter(|&i| messages[i].role == "assistant").collect();
                if all.len() != marked.len() {
                    return Err(format!(
                        "the template marks {} stretches as generated, but the assistant has {} turns",
                        marked.len(),
                        all.len()
                    ));
                }
                let of_turns = all.into_iter().zip(marked);
                of_turns.filter(|(turn, _)| wanted.contains(turn)).map(|(_, stretch)| stretch).collect()
            }
            false => {
                let mut stretches = Vec::new();
                for turn in wanted {
                    let begins = [true, false].into_iter().find_map(|ask| {
                        let before = if turn == 0 && !ask { String::new() } else { render(turn, ask).ok()?.0 };
                        text.starts_with(&before).then_some(before.len())
                    });
                    let ends = if turn + 1 == messages.len() { text.clone() } else { render(turn + 1, false)?.0 };
                    match begins.filter(|&begin| begin <= ends.len() && text.starts_with(&ends)) {
                        Some(begin) => stretches.push(begin..self.trimmed(&text[..ends.len()]).max(begin)),
                        None => {
                            return Err(format!(
                                "the template writes the text up to message {} otherwise when more follows, so that its tokens cannot be \
                                 told; mark them in the template with {{% generation %}}, or set data.chat.train_on to all",
                                turn + 1
                            ));
                        }
                    }
                }
                stretches
            }
        };
        let learns_end = learned
            .last()
            .is_some_and(|last: &Range<usize>| last.end == text.len() && !self.tokenizer.ends_with_special(&text));
        Ok(Rendered { text, learned, learns_end })
    }

    /// Where a turn ends: spaces after a special token, such as the line's end after that of the turn, are no part of it.
    fn trimmed(&self, text: &str) -> usize {
        let end = text.trim_end();
        if self.tokenizer.ends_with_special(end) { end.len() } else { text.len() }
    }

    /// A line's tokens.
    pub fn encode(&self, rendered: &Rendered) -> Result<Encoded> {
        let Rendered { text, learned, learns_end } = rendered;
        let places = self.tokenizer.encode_places(text)?;
        let inside = |at: usize| learned.iter().any(|stretch| stretch.contains(&at));
        let flags = places.iter().map(|(_, place)| inside(place.start)).collect();
        let lengths = (!self.tokenizer.counts_bytes()).then(|| super::tokenizer::lengths(&places, text.len()));
        let ids = places.into_iter().map(|(id, _)| id).collect();
        Ok(Encoded { ids, lengths, learned: Some((flags, *learns_end)), bytes: text.len() })
    }
}

#[cfg(test)]
mod tests;
