//! The host's error under its short name, and its passage over the plugin boundary.

pub use crate::failure::{Cause, Failure as Error, Result};
use gantry_plugin_api::sdk::{self, ErrorKind};

impl From<sdk::Error> for Error {
    fn from(error: sdk::Error) -> Error {
        let cause = match error.kind {
            ErrorKind::Config => Cause::Recipe,
            ErrorKind::Data => Cause::Data,
            ErrorKind::Communication => Cause::Communication,
            _ => Cause::Plugin,
        };
        Error::new(cause, error.message)
    }
}

impl From<Error> for sdk::Error {
    fn from(error: Error) -> sdk::Error {
        let kind = match error.cause {
            Cause::Recipe => ErrorKind::Config,
            Cause::Data => ErrorKind::Data,
            Cause::Communication => ErrorKind::Communication,
            Cause::Plugin | Cause::Numerical => ErrorKind::Plugin,
        };
        sdk::Error::new(kind, error.sentence)
    }
}
