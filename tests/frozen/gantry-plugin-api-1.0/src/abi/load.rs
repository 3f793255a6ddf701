//! Opening a plugin: read the hello, decide, load. Refusals are one sentence that says what to do.
//!
//! Libraries are never unloaded: thread-local destructors of a library's standard library make that unsound.

use super::guard::catch;
use super::hello::{
    API_MAJOR, API_MINOR, Hello, KNOWN_LAYOUTS, MAGIC, NeededOperator, PanicStrategy, SYMBOL, StaticStr,
};
use super::host::host_table;
use super::tables::{LAYOUT_HASH, PluginTableRef};
use super::torn::torn;
use crate::sdk::Error;
use abi_stable::library::{AbiHeaderRef, LibraryError};
use std::fmt;
use std::path::{Path, PathBuf};

/// A loaded plugin: its table is callable for the rest of the process.
#[derive(Clone)]
pub struct LoadedPlugin {
    pub path: PathBuf,
    pub hello: HelloInfo,
    pub table: PluginTableRef,
}

impl fmt::Debug for LoadedPlugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedPlugin").field("path", &self.path).field("hello", &self.hello).finish_non_exhaustive()
    }
}

/// The hello of a library, copied out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HelloInfo {
    pub name: String,
    pub version: String,
    /// API the plugin was built against.
    pub api: (u32, u32),
    pub rustc: String,
    pub unwinds: bool,
    pub layout_hash: u64,
    /// Operators the plugin cannot do without: id, version, name.
    pub operators: Vec<(u32, u32, String)>,
}

/// Why a library was not loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadError {
    /// The file cannot be opened as a shared library.
    Open { path: PathBuf, cause: String },
    /// It is a shared library without a hello.
    NotAPlugin { path: PathBuf },
    /// Built against another major version of the API.
    Major { path: PathBuf, name: String, plugin: (u32, u32) },
    /// Built with `panic = "abort"`.
    PanicAbort { path: PathBuf, name: String },
    /// Needs an operator this host lacks, or a newer version of one.
    Operator { path: PathBuf, name: String, operator: String, needed: u32, here: Option<u32>, api: (u32, u32) },
    /// The layouts of the two sides differ.
    Layout { path: PathBuf, name: String, difference: String },
    /// The plugin's own initialisation failed.
    Init { path: PathBuf, name: String, cause: String },
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadError::Open { path, cause } => write!(f, "{}: cannot be opened as a library: {cause}", path.display()),
            LoadError::NotAPlugin { path } => write!(
                f,
                "{}: is a library but not a Gantry plugin (it has no {SYMBOL}); a plugin is a cdylib that calls \
                 export_plugin!",
                path.display()
            ),
            LoadError::Major { path, name, plugin } => write!(
                f,
                "{}: plugin {name} was built for plugin API {}.{}, this host speaks {API_MAJOR}.{API_MINOR}; rebuild \
                 it against gantry-plugin-api {API_MAJOR}",
                path.display(),
                plugin.0,
                plugin.1
            ),
            LoadError::PanicAbort { path, name } => write!(
                f,
                "{}: plugin {name} was built with panic = \"abort\", so its first panic would end the run; remove that \
                 from its profile and rebuild",
                path.display()
            ),
            LoadError::Operator { path, name, operator, needed, here, api } => {
                write!(f, "{}: plugin {name} needs operator {operator} version {needed}, ", path.display())?;
                match here {
                    Some(version) => write!(f, "this host has version {version}")?,
                    None => write!(f, "which this host does not have")?,
                }
                write!(
                    f,
                    "; the plugin was built for API {}.{}, use a host of at least that version (this one is \
                     {API_MAJOR}.{API_MINOR})",
                    api.0, api.1
                )
            }
            LoadError::Layout { path, name, difference } => write!(
                f,
                "{}: plugin {name} disagrees with this host about the layout of the boundary: {difference}; rebuild it \
                 against gantry-plugin-api {API_MAJOR}.{API_MINOR}",
                path.display()
            ),
            LoadError::Init { path, name, cause } => {
                write!(f, "{}: plugin {name} could not be initialised: {cause}", path.display())
            }
        }
    }
}

impl std::error::Error for LoadError {}

/// Reads the hello of the library at `path` without running code of a provider.
pub fn read_hello(path: &Path) -> Result<HelloInfo, LoadError> {
    hello_of(path, open(path)?)
}

/// Loads the plugin at `path`; loading the same file again gives the same table.
pub fn load(path: &Path) -> Result<LoadedPlugin, LoadError> {
    super::guard::install_quiet_hook();
    let library = open(path)?;
    let hello = hello_of(path, library)?;
    accept(path, &hello, crate::ops::OPERATORS)?;
    let not_a_plugin = || LoadError::NotAPlugin { path: path.into() };
    // SAFETY: a library with our hello exports this symbol as a `LibHeader`, which begins with an `AbiHeader`; the
    // header checks its own magic before anything behind it is read.
    let header = unsafe { library.get::<AbiHeaderRef>(b"gantry_root_module\0") }.map_err(|_| not_a_plugin())?;
    // SAFETY: a symbol's address is the address of the static, which is what `AbiHeaderRef` wraps.
    let header: AbiHeaderRef =
        unsafe { std::mem::transmute::<*const (), AbiHeaderRef>(header.into_raw().as_raw_ptr().cast()) };
    let layout = |e: LibraryError| LoadError::Layout {
        path: path.into(),
        name: hello.name.clone(),
        difference: first_difference(&e.to_string()),
    };
    let known = hello.layout_hash == LAYOUT_HASH
        || KNOWN_LAYOUTS.iter().any(|(minor, hash)| (*minor, *hash) == (hello.api.1, hello.layout_hash));
    let table = catch("loading", || {
        let load = || {
            let header = header.upgrade()?;
            if known {
                // SAFETY: the layout is ours, or a prefix of ours that a released version had.
                unsafe { header.init_root_module_with_unchecked_layout::<PluginTableRef>() }
            } else {
                header.init_root_module::<PluginTableRef>()
            }
        };
        Ok(load())
    })
    .map_err(|e| init_error(path, &hello, e))?
    .map_err(layout)?;
    table.init()(host_table()).into_result().map_err(|e| init_error(path, &hello, Error::from(e)))?;
    Ok(LoadedPlugin { path: path.into(), hello, table })
}

fn init_error(path: &Path, hello: &HelloInfo, e: Error) -> LoadError {
    LoadError::Init { path: path.into(), name: hello.name.clone(), cause: e.message }
}

fn open(path: &Path) -> Result<&'static libloading::Library, LoadError> {
    let failed = |cause: String| LoadError::Open { path: path.into(), cause };
    // `dlopen` looks elsewhere for a bare name; a path it takes as it is.
    let full = path.canonicalize().map_err(|e| failed(e.to_string()))?;
    if let Some((there, promised)) = torn(&full).map_err(|e| failed(e.to_string()))? {
        return Err(failed(format!(
            "the file is cut short: {there} of {promised} bytes are there; build or copy it again"
        )));
    }
    // SAFETY: runs the library's initialisers. Rust libraries have none but those of std; others are the user's choice,
    // and `inspect` opens unknown files in a child process.
    let library = unsafe { libloading::Library::new(&full) }.map_err(|e| {
        // The loader's own words are the error's source, e.g. "invalid ELF header".
        let text = std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string);
        // The message repeats the path.
        let cause = text.strip_prefix(&format!("{}: ", full.display())).unwrap_or(&text);
        failed(format!("{cause}; give a readable file that was built as a cdylib for this kind of machine"))
    })?;
    Ok(Box::leak(Box::new(library)))
}

fn hello_of(path: &Path, library: &'static libloading::Library) -> Result<HelloInfo, LoadError> {
    let not_a_plugin = || LoadError::NotAPlugin { path: path.into() };
    // SAFETY: the magic is compared before anything else is believed about the symbol; a data symbol has at least the
    // 16 bytes in the mapped segment it lies in or it is no hello of ours.
    let symbol = unsafe { library.get::<*const Hello>(SYMBOL.as_bytes()) }.map_err(|_| not_a_plugin())?;
    // SAFETY: the address of the static.
    let pointer: *const Hello = unsafe { symbol.into_raw() }.as_raw_ptr().cast();
    // SAFETY: see above; `read_unaligned` asks nothing of the address.
    let magic = unsafe { pointer.cast::<[u8; 16]>().read_unaligned() };
    if magic != MAGIC || !pointer.is_aligned() {
        return Err(not_a_plugin());
    }
    // SAFETY: the magic fixes the meaning of the fields read here for all versions.
    let hello = unsafe { &*pointer };
    if (hello.struct_size as usize) < size_of::<Hello>() {
        return Err(not_a_plugin());
    }
    // SAFETY: the pointers of a hello are to statics of its library, which stays.
    let text = |s: StaticStr| unsafe {
        let bytes = if s.ptr.is_null() { &[][..] } else { std::slice::from_raw_parts(s.ptr, s.len) };
        String::from_utf8_lossy(bytes).into_owned()
    };
    let operators: &[NeededOperator] = if hello.operators.is_null() {
        &[]
    } else {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(hello.operators, hello.operators_len) }
    };
    Ok(HelloInfo {
        name: text(hello.name),
        version: text(hello.version),
        api: (hello.api_major, hello.api_minor),
        rustc: text(hello.rustc),
        unwinds: hello.panic_strategy == PanicStrategy::Unwind as u32,
        layout_hash: hello.layout_hash,
        operators: operators.iter().map(|op| (op.id, op.version, text(op.name))).collect(),
    })
}

/// Whether a library with this hello may be loaded into a host that has `operators`.
pub fn accept(path: &Path, hello: &HelloInfo, operators: &[(u32, u32, &str)]) -> Result<(), LoadError> {
    let (path, name) = (path.to_owned(), hello.name.clone());
    if hello.api.0 != API_MAJOR {
        return Err(LoadError::Major { path, name, plugin: hello.api });
    }
    if !hello.unwinds {
        return Err(LoadError::PanicAbort { path, name });
    }
    for (id, needed, operator) in &hello.operators {
        let here = operators.iter().find(|op| op.0 == *id).map(|op| op.1);
        if here.is_none_or(|here| here < *needed) {
            let operator = operator.clone();
            return Err(LoadError::Operator { path, name, operator, needed: *needed, here, api: hello.api });
        }
    }
    Ok(())
}

/// The first thing an abi_stable report complains of, in one line.
fn first_difference(report: &str) -> String {
    let lines: Vec<&str> = report.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    let error = lines.iter().position(|l| l.contains("error:") || l.starts_with("Error"));
    let from = error.unwrap_or(0);
    let text = lines[from.min(lines.len())..].iter().take(8).copied().collect::<Vec<_>>().join(" ");
    let text = if text.is_empty() { "unknown difference".to_owned() } else { text };
    match text.char_indices().nth(300) {
        Some((cut, _)) => format!("{} ...", &text[..cut]),
        None => text,
    }
}
