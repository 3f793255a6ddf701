//! Errors that cross the boundary: a kind and one readable sentence.

use std::fmt;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, for exit statuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The provider or the call into the host is at fault.
    Plugin = 0,
    /// The recipe's config for this provider is wrong.
    Config = 1,
    /// Shapes, axes or placements do not fit.
    Shape = 2,
    /// The other side panicked; the panic was stopped at the boundary.
    Panic = 3,
    /// A checkpoint or data problem.
    Data = 4,
    /// A communication fault between ranks.
    Communication = 6,
}

impl ErrorKind {
    pub fn from_u32(n: u32) -> ErrorKind {
        match n {
            1 => ErrorKind::Config,
            2 => ErrorKind::Shape,
            3 => ErrorKind::Panic,
            4 => ErrorKind::Data,
            6 => ErrorKind::Communication,
            _ => ErrorKind::Plugin,
        }
    }
}

/// An error with enough context to act on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    pub kind: ErrorKind,
    pub message: String,
}

impl Error {
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error { kind, message: message.into() }
    }

    pub fn config(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Config, message)
    }

    pub fn shape(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Shape, message)
    }

    pub fn plugin(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Plugin, message)
    }

    /// The same error with `place` in front of its message.
    pub fn at(mut self, place: impl fmt::Display) -> Error {
        self.message = format!("{place}: {}", self.message);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}
