//! Which of the libraries that GPUs and clusters need are there: opened by name, asked for their version.
//!
//! Opening a library runs its initialisers, so a caller that must survive a broken one asks in a process of its own.

use libloading::{Library, Symbol};
use std::ffi::{CStr, c_char, c_int};

/// A library that is opened at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runtime {
    Driver,
    Nvrtc,
    CublasLt,
    Cudnn,
    Nccl,
    Mpi,
}

impl Runtime {
    pub const ALL: [Runtime; 6] =
        [Runtime::Driver, Runtime::Nvrtc, Runtime::CublasLt, Runtime::Cudnn, Runtime::Nccl, Runtime::Mpi];

    pub fn name(self) -> &'static str {
        match self {
            Runtime::Driver => "driver",
            Runtime::Nvrtc => "nvrtc",
            Runtime::CublasLt => "cublaslt",
            Runtime::Cudnn => "cudnn",
            Runtime::Nccl => "nccl",
            Runtime::Mpi => "mpi",
        }
    }

    /// Names to open it by, the best first.
    fn files(self) -> &'static [&'static str] {
        match self {
            Runtime::Driver => &["libcuda.so.1"],
            Runtime::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12"],
            Runtime::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12"],
            Runtime::Cudnn => &["libcudnn.so.9"],
            Runtime::Nccl => &["libnccl.so.2"],
            // Open MPI, MPICH and its kin.
            Runtime::Mpi => &["libmpi.so.40", "libmpi.so.12", "libmpi.so"],
        }
    }

    /// Names a file to open instead.
    fn variable(self) -> Option<&'static str> {
        match self {
            Runtime::Nvrtc => Some("GANTRY_NVRTC"),
            Runtime::CublasLt => Some("GANTRY_CUBLASLT"),
            _ => None,
        }
    }

    /// Opens the library: the name it was found by and its version, or why not.
    pub fn probe(self) -> Result<(String, String), String> {
        let named = self.variable().and_then(|variable| std::env::var(variable).ok()).filter(|path| !path.is_empty());
        let names = named.into_iter().chain(self.files().iter().map(|name| name.to_string()));
        let mut why = String::new();
        for name in names {
            // SAFETY: these are the vendors' libraries; what their initialisers do is theirs to answer for, see above.
            match unsafe { Library::new(&name) } {
                Ok(library) => {
                    let version = self.version(&library).unwrap_or_else(|| "unknown version".into());
                    // Not closed: some of them leave threads behind.
                    std::mem::forget(library);
                    return Ok((name, version));
                }
                Err(error) if why.is_empty() => {
                    // The loader's own words are the source.
                    why = std::error::Error::source(&error).map_or_else(|| error.to_string(), |e| e.to_string());
                }
                Err(_) => {}
            }
        }
        Err(why)
    }

    fn version(self, library: &Library) -> Option<String> {
        match self {
            Runtime::Driver => {
                let n = number(library, b"cuDriverGetVersion\0")?;
                let gpus = gpus(library).unwrap_or_else(|why| format!("no GPU: {why}"));
                Some(format!("CUDA {}.{}, {gpus}", n / 1000, n % 1000 / 10))
            }
            Runtime::Nvrtc => {
                let (mut major, mut minor) = (0, 0);
                type Get = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
                // SAFETY: `nvrtcVersion` has this signature since NVRTC exists and writes two ints.
                let status = unsafe { symbol::<Get>(library, b"nvrtcVersion\0")?(&mut major, &mut minor) };
                (status == 0).then(|| format!("{major}.{minor}"))
            }
            Runtime::CublasLt => decimal(size(library, b"cublasLtGetVersion\0")?),
            Runtime::Cudnn => decimal(size(library, b"cudnnGetVersion\0")?),
            Runtime::Nccl => decimal(number(library, b"ncclGetVersion\0")? as usize),
            Runtime::Mpi => {
                // MPI_MAX_LIBRARY_VERSION_STRING is 256 (Open MPI) or 8192 (MPICH).
                let mut text = [0 as c_char; 8193];
                let mut len = 0;
                type Get = unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int;
                // SAFETY: MPI 3.0, 8.1.1: may be called before MPI_Init; writes at most the maximum and a zero.
                let status =
                    unsafe { symbol::<Get>(library, b"MPI_Get_library_version\0")?(text.as_mut_ptr(), &mut len) };
                // SAFETY: the buffer ends with a zero that the call cannot overwrite.
                let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy();
                (status == 0).then(|| text.lines().next().unwrap_or_default().trim().to_string())
            }
        }
    }
}

/// A function of a library, if it has it.
///
/// # Safety
/// `F` must be the function's type.
unsafe fn symbol<'a, F>(library: &'a Library, name: &[u8]) -> Option<Symbol<'a, F>> {
    // SAFETY: passed on.
    unsafe { library.get(name) }.ok()
}

/// What a function `int f(int *)` writes.
fn number(library: &Library, name: &[u8]) -> Option<c_int> {
    let mut n = 0;
    type Get = unsafe extern "C" fn(*mut c_int) -> c_int;
    // SAFETY: called with the names of the driver's and NCCL's functions of this signature alone.
    let status = unsafe { symbol::<Get>(library, name)?(&mut n) };
    (status == 0).then_some(n)
}

/// What a function `size_t f(void)` returns.
fn size(library: &Library, name: &[u8]) -> Option<usize> {
    type Get = unsafe extern "C" fn() -> usize;
    // SAFETY: called with the names of cuBLASLt's and cuDNN's functions of this signature alone.
    Some(unsafe { symbol::<Get>(library, name)?() })
}

/// 130102 is 13.1.2, and 91200 (as well as NCCL's 22703) 9.12.0 (2.27.3).
fn decimal(n: usize) -> Option<String> {
    Some(format!("{}.{}.{}", n / 10_000, n / 100 % 100, n % 100))
}

/// The GPUs a driver sees: name and memory of each.
fn gpus(driver: &Library) -> Result<String, String> {
    type Init = unsafe extern "C" fn(u32) -> c_int;
    type Count = unsafe extern "C" fn(*mut c_int) -> c_int;
    type Name = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
    type Memory = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
    let ok = |what: &str, status: Option<c_int>| match status {
        Some(0) => Ok(()),
        Some(100) => Err("the driver sees none".to_string()),
        Some(code) => Err(format!("{what} failed with CUDA error {code}")),
        None => Err(format!("the driver has no {what}")),
    };
    // SAFETY: the driver API's documented signatures; a device of an index below the count is that index.
    unsafe {
        ok("cuInit", symbol::<Init>(driver, b"cuInit\0").map(|f| f(0)))?;
        let mut count = 0;
        ok("cuDeviceGetCount", symbol::<Count>(driver, b"cuDeviceGetCount\0").map(|f| f(&mut count)))?;
        let mut all = Vec::new();
        for device in 0..count {
            let (mut name, mut bytes) = ([0 as c_char; 256], 0);
            let get = symbol::<Name>(driver, b"cuDeviceGetName\0");
            ok("cuDeviceGetName", get.map(|f| f(name.as_mut_ptr(), 255, device)))?;
            let get = symbol::<Memory>(driver, b"cuDeviceTotalMem_v2\0");
            ok("cuDeviceTotalMem", get.map(|f| f(&mut bytes, device)))?;
            let name = CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned();
            all.push(format!("{name} ({} GiB)", bytes >> 30));
        }
        if all.is_empty() { Err("the driver sees none".into()) } else { Ok(all.join(", ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_numbers() {
        assert_eq!(decimal(130_102).as_deref(), Some("13.1.2"));
        assert_eq!(decimal(22_703).as_deref(), Some("2.27.3"));
    }

    /// With or without a GPU every library has an answer: a name and a version, or a reason.
    #[test]
    fn every_library_answers() {
        for runtime in Runtime::ALL {
            match runtime.probe() {
                Ok((name, version)) => assert!(!name.is_empty() && !version.is_empty()),
                Err(why) => assert!(why.contains("lib"), "{}: {why}", runtime.name()),
            }
        }
    }
}
