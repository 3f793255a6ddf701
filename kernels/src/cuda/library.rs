//! Finds the CUDA libraries before their first use, because the bindings panic where one is missing.
//!
//! A library is looked for where its environment variable points (`GANTRY_NVRTC`, `GANTRY_CUBLASLT`: path of the shared
//! library), then where the dynamic linker looks, then in a toolkit at `CUDA_HOME`, `CUDA_PATH` or `/usr/local/cuda`.
//! What was opened by path stays loaded, and the bindings then find it by its name. So does NVRTC its built-ins, which
//! lie beside it where nothing else looks.

use super::error::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

struct Library {
    /// As in messages.
    name: &'static str,
    /// File name without version.
    file: &'static str,
    /// Major versions it may carry.
    versions: &'static [u32],
    /// Beginning of the file names of libraries beside it that it opens by name.
    companion: Option<&'static str>,
    variable: Option<&'static str>,
    /// Whether the bindings find it.
    present: fn() -> bool,
    remedy: &'static str,
}

static DRIVER: Library = Library {
    name: "the CUDA driver",
    file: "libcuda.so",
    versions: &[1],
    companion: None,
    variable: None,
    // SAFETY: only opens the vendor's library, whose initialisers may run in any program.
    present: || unsafe { cudarc::driver::sys::is_culib_present() },
    remedy: "install the NVIDIA driver, or run on the CPU",
};

static NVRTC: Library = Library {
    name: "NVRTC, the CUDA run-time compiler",
    file: "libnvrtc.so",
    versions: &[13, 12],
    companion: Some("libnvrtc-builtins.so"),
    variable: Some("GANTRY_NVRTC"),
    // SAFETY: as above.
    present: || unsafe { cudarc::nvrtc::sys::is_culib_present() },
    remedy: "install the CUDA toolkit or the Python package nvidia-cuda-nvrtc and set GANTRY_NVRTC to its libnvrtc.so.13",
};

static CUBLASLT: Library = Library {
    name: "cuBLASLt",
    file: "libcublasLt.so",
    versions: &[13, 12],
    companion: None,
    variable: Some("GANTRY_CUBLASLT"),
    // SAFETY: as above.
    present: || unsafe { cudarc::cublaslt::sys::is_culib_present() },
    remedy: "install the CUDA toolkit or the Python package nvidia-cublas and set GANTRY_CUBLASLT to its libcublasLt.so.13",
};

impl Library {
    fn find(&self) -> Result<()> {
        if let Some(path) = self.variable.and_then(std::env::var_os) {
            self.open(Path::new(&path)).map_err(|e| {
                // The linker's own words are the error's source.
                let why = std::error::Error::source(&e).map_or_else(|| e.to_string(), |source| source.to_string());
                let (path, variable) = (path.to_string_lossy(), self.variable.unwrap_or_default());
                Error::new(format!("cannot open {} at {path}, which {variable} names: {why}", self.name))
            })?;
        }
        if (self.present)() {
            return Ok(());
        }
        let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
        for home in homes.chain([PathBuf::from("/usr/local/cuda")]) {
            for version in self.versions {
                let path = home.join("lib64").join(format!("{}.{version}", self.file));
                if self.open(&path).is_ok() && (self.present)() {
                    return Ok(());
                }
            }
        }
        Err(Error::new(format!("cannot find {} ({}); {}", self.name, self.file, self.remedy)))
    }

    /// Opens the library at `path`, its companions first.
    fn open(&self, path: &Path) -> Result<(), libloading::Error> {
        if let (Some(companion), Some(Ok(entries))) = (self.companion, path.parent().map(std::fs::read_dir)) {
            for entry in entries.flatten() {
                if entry.file_name().to_string_lossy().starts_with(companion) {
                    // One that cannot be opened is missed by NVRTC, which says so.
                    let _ = keep(&entry.path());
                }
            }
        }
        keep(path)
    }
}

/// Opens a library and keeps it for the life of the process.
fn keep(path: &Path) -> Result<(), libloading::Error> {
    // SAFETY: running the initialisers of a library that the user or the CUDA toolkit names is what is asked for.
    let library = unsafe { libloading::Library::new(path) }?;
    std::mem::forget(library);
    Ok(())
}

/// Ok if the driver, NVRTC and cuBLASLt can be opened.
pub fn present() -> Result<()> {
    static FOUND: OnceLock<Result<()>> = OnceLock::new();
    FOUND
        .get_or_init(|| {
            DRIVER.find()?;
            nvrtc_present()?;
            CUBLASLT.find()
        })
        .clone()
}

/// Ok if NVRTC can be opened: enough to compile, without a GPU.
pub fn nvrtc_present() -> Result<()> {
    static FOUND: OnceLock<Result<()>> = OnceLock::new();
    FOUND.get_or_init(|| NVRTC.find()).clone()
}
