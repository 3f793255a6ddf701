//! What can go wrong with a GPU, in a sentence.

use std::fmt;

/// A failure of the driver, a library, a compilation, or a launch that does not fit its operands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    pub message: String,
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub fn new(message: impl Into<String>) -> Self {
        Error { message: message.into() }
    }

    /// The same error with `place` in front.
    pub fn at(mut self, place: impl fmt::Display) -> Self {
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

impl From<cudarc::driver::DriverError> for Error {
    fn from(error: cudarc::driver::DriverError) -> Self {
        let name =
            error.error_name().map(|s| s.to_string_lossy().into_owned()).unwrap_or_else(|_| format!("{error:?}"));
        let text = error.error_string().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        Error::new(format!("CUDA driver: {name} ({text})"))
    }
}

impl From<cudarc::cublaslt::result::CublasError> for Error {
    fn from(error: cudarc::cublaslt::result::CublasError) -> Self {
        Error::new(format!("cuBLASLt: {:?}", error.0))
    }
}

impl From<cudarc::nvrtc::result::NvrtcError> for Error {
    fn from(error: cudarc::nvrtc::result::NvrtcError) -> Self {
        Error::new(format!("NVRTC: {:?}", error.0))
    }
}
