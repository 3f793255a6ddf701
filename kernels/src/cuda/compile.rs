//! The sources and their compilation by NVRTC to machine code for one architecture.
//!
//! Machine code rather than PTX: a driver older than the compiler runs it. Default floating-point options: IEEE
//! division and square root, denormals kept, multiply-adds contracted.

use super::error::{Error, Result};
use super::library;
use cudarc::nvrtc::{result, sys};
use std::ffi::{CStr, CString};

/// A family's source and the kernels it defines.
pub struct Source {
    /// File name, for messages.
    pub name: &'static str,
    pub text: &'static str,
    pub kernels: &'static [&'static str],
}

/// In front of every source.
const COMMON: &str = include_str!("common.cuh");

/// All sources.
pub static SOURCES: &[Source] = &[
    Source {
        name: "activation.cu",
        text: include_str!("activation.cu"),
        kernels: &[
            "activation_1",
            "activation_4",
            "activation_backward_1",
            "activation_backward_4",
            "activation_backward_weighted",
        ],
    },
    Source {
        name: "elementwise.cu",
        text: include_str!("elementwise.cu"),
        kernels: &["binary_1", "binary_4", "scale_1", "scale_4", "fill_1", "fill_4"],
    },
    Source { name: "gemm.cu", text: include_str!("gemm.cu"), kernels: &["bias_rows", "column_sums"] },
    Source {
        name: "rms_norm.cu",
        text: include_str!("rms_norm.cu"),
        kernels: &[
            "rms_norm_1",
            "rms_norm_4",
            "rms_norm_backward_1",
            "rms_norm_backward_4",
            "rms_norm_weight_parts",
            "rms_norm_weight",
            "rms_norm_scale",
        ],
    },
];

/// Machine code of a source for `arch`, e.g. `sm_90a`; a compiler's complaint is the error.
pub fn compile(source: &Source, arch: &str) -> Result<Vec<u8>> {
    library::nvrtc_present()?;
    let text = CString::new(format!("{COMMON}\n#line 1 \"{}\"\n{}", source.name, source.text))
        .map_err(|_| Error::new(format!("{} holds a NUL byte", source.name)))?;
    let program = Program(result::create_program(&text, None)?);
    let options = [format!("--gpu-architecture={arch}"), "--std=c++17".into(), "--generate-line-info".into()];
    // SAFETY: the program was created above and is destroyed when `program` is dropped.
    let compiled = unsafe { result::compile_program(program.0, &options) };
    if let Err(error) = compiled {
        // SAFETY: as above; the log is a NUL-terminated string in a buffer of its full length.
        let log = unsafe { result::get_program_log(program.0) }
            .map(|log| unsafe { CStr::from_ptr(log.as_ptr()) }.to_string_lossy().into_owned())
            .unwrap_or_default();
        return Err(Error::from(error).at(source.name).at(log.trim()));
    }
    let mut size = 0;
    // SAFETY: NVRTC writes the size of the machine code.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &mut size) }.result()?;
    let mut code = vec![0u8; size];
    // SAFETY: NVRTC writes exactly `size` bytes.
    unsafe { sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()) }.result()?;
    if code.is_empty() {
        return Err(Error::new(format!("{}: NVRTC made no machine code for {arch}", source.name)));
    }
    Ok(code)
}

struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created by `create_program`, destroyed once. A failure only leaks the compiler's memory.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}
