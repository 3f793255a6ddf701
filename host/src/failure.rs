//! What a user sees when something goes wrong: one sentence, details under it, what to do last, and the exit status.
//!
//! Every error that leaves a module on its way to the command line is turned into a [`Failure`] where the context is
//! known; the command line only prints it. Nothing here knows any other module.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Why the program ends, as its exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Wrong arguments or a wrong recipe.
    Recipe = 2,
    /// A plugin could not be found, loaded or used.
    Plugin = 3,
    /// Data, a checkpoint or a run folder could not be read or written.
    Data = 4,
    /// NaN or infinity in a loss, a gradient or a parameter.
    Numerical = 5,
    /// A rank or a collective was lost.
    Communication = 6,
}

/// An error with everything needed to act on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub cause: Cause,
    /// One sentence without a full stop, naming what and where.
    pub sentence: String,
    /// Further lines.
    pub details: Vec<String>,
    /// What to change, printed last.
    pub remedy: Option<String>,
}

/// Result of anything that can end a run.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    pub fn new(cause: Cause, sentence: impl Into<String>) -> Failure {
        Failure { cause, sentence: sentence.into(), details: Vec::new(), remedy: None }
    }

    pub fn recipe(sentence: impl Into<String>) -> Failure {
        Failure::new(Cause::Recipe, sentence)
    }

    pub fn plugin(sentence: impl Into<String>) -> Failure {
        Failure::new(Cause::Plugin, sentence)
    }

    pub fn data(sentence: impl Into<String>) -> Failure {
        Failure::new(Cause::Data, sentence)
    }

    pub fn numerical(sentence: impl Into<String>) -> Failure {
        Failure::new(Cause::Numerical, sentence)
    }

    pub fn communication(sentence: impl Into<String>) -> Failure {
        Failure::new(Cause::Communication, sentence)
    }

    /// Adds a line under the sentence.
    pub fn detail(mut self, line: impl Into<String>) -> Failure {
        self.details.push(line.into());
        self
    }

    /// The same failure with `place` in front of its sentence.
    pub fn at(mut self, place: impl fmt::Display) -> Failure {
        self.sentence = format!("{place}: {}", self.sentence);
        self
    }

    /// Sets the last line: what to do.
    pub fn remedy(mut self, line: impl Into<String>) -> Failure {
        self.remedy = Some(line.into());
        self
    }

    pub fn exit_status(&self) -> u8 {
        self.cause as u8
    }
}

/// The sentence first, indented details, the remedy last.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.sentence)?;
        for line in &self.details {
            write!(f, "\n  {line}")?;
        }
        match &self.remedy {
            Some(line) => write!(f, "\n  to do: {line}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Failure {}

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Runs code of a library that may panic on what a file holds; the panic's words are the error.
pub fn guarded<T>(ask: impl FnOnce() -> T) -> Result<T, String> {
    let before = GUARDED.replace(true);
    let done = catch_unwind(AssertUnwindSafe(ask));
    GUARDED.set(before);
    done.map_err(|panic| panic_words(panic.as_ref()))
}

/// Whether a panic of this thread is caught by [`guarded`] and said by its caller.
pub fn is_guarded() -> bool {
    GUARDED.get()
}

fn panic_words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without words".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guarded_panic_is_an_error() {
        assert_eq!(guarded(|| 5), Ok(5));
        let asked = guarded(|| {
            assert!(is_guarded());
            panic!("planted {}", 1)
        });
        assert_eq!(asked, Err::<(), _>("planted 1".into()));
        assert!(!is_guarded());
    }

    #[test]
    fn prints_sentence_details_and_remedy_in_order() {
        let failure = Failure::data("cannot read x").detail("permission denied").remedy("chmod +r x");
        assert_eq!(failure.to_string(), "cannot read x\n  permission denied\n  to do: chmod +r x");
        assert_eq!(failure.exit_status(), 4);
    }
}
