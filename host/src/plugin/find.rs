//! Where a plugin's file is looked for, and what is checked before it is opened.
//!
//! Places, in order: the recipe's `plugins` (files or folders), `GANTRY_PLUGIN_PATH`, the folder of the host binary,
//! the folder above it (test binaries live in `deps/`), the user data folder. The file of plugin `my-model` is
//! `libmy_model.so` (on Linux).

use super::PluginError;
use sha2::{Digest, Sha256};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Folders to look for plugins in, separated like `PATH`.
pub const PLUGIN_PATH: &str = "GANTRY_PLUGIN_PATH";
/// Set to 1: load plugin files that others may write to.
pub const ALLOW_WRITABLE: &str = "GANTRY_ALLOW_WRITABLE_PLUGINS";

/// A file to load, or a folder of plugins, with conditions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PluginFile {
    pub path: PathBuf,
    /// Hex sha256 the file must have.
    pub sha256: Option<String>,
    /// Load it even if others may write to it.
    pub allow_writable: bool,
}

impl PluginFile {
    pub fn new(path: impl Into<PathBuf>) -> PluginFile {
        PluginFile { path: path.into(), sha256: None, allow_writable: false }
    }
}

/// The places to look in.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// The recipe's `plugins`; relative paths are relative to the working folder.
    pub listed: Vec<PluginFile>,
    /// Further folders, in order.
    pub folders: Vec<PathBuf>,
    /// Load files that others may write to.
    pub allow_writable: bool,
}

impl Search {
    /// The listed plugins, then this process's usual places.
    pub fn standard(listed: Vec<PluginFile>) -> Search {
        let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty());
        let mut folders: Vec<PathBuf> =
            var(PLUGIN_PATH).map(|paths: OsString| std::env::split_paths(&paths).collect()).unwrap_or_default();
        if let Some(folder) = std::env::current_exe().ok().as_deref().and_then(Path::parent) {
            folders.push(folder.into());
            if folder.ends_with("deps") {
                folders.extend(folder.parent().map(PathBuf::from));
            }
        }
        let data = var("XDG_DATA_HOME").map(PathBuf::from);
        let data = data.or_else(|| Some(PathBuf::from(var("HOME")?).join(".local/share")));
        folders.extend(data.map(|d| d.join("gantry/plugins")));
        Search { listed, folders, allow_writable: var(ALLOW_WRITABLE).is_some_and(|v| v == "1") }
    }

    /// The file of the plugin called `name`.
    pub fn find(&self, name: &str) -> Result<PluginFile, PluginError> {
        let file = file_name(name);
        let mut looked = Vec::new();
        for listed in &self.listed {
            let path = if listed.path.is_dir() { listed.path.join(&file) } else { listed.path.clone() };
            if path.file_name().is_some_and(|f| f.to_str() == Some(&file)) && path.is_file() {
                return Ok(PluginFile { path, ..listed.clone() });
            }
            looked.push(path);
        }
        for folder in &self.folders {
            let path = folder.join(&file);
            if path.is_file() {
                return Ok(PluginFile::new(path));
            }
            looked.push(path);
        }
        Err(PluginError::NotFound { name: name.into(), file, looked })
    }

    /// Every shared library of the folders; of files of one name the first, which is the one that [`Search::find`] finds.
    pub fn libraries(&self) -> Vec<PathBuf> {
        let mut all: Vec<PathBuf> = Vec::new();
        for folder in &self.folders {
            for path in libraries(folder) {
                if !all.iter().any(|other| other.file_name() == path.file_name()) {
                    all.push(path);
                }
            }
        }
        all
    }

    /// Checks a file's permissions and checksum, without opening it as a library.
    pub fn verify(&self, file: &PluginFile) -> Result<(), PluginError> {
        let path = &file.path;
        let read = |cause| PluginError::Read { path: path.clone(), cause };
        if !(self.allow_writable || file.allow_writable) {
            // Whoever may write to the folder can put another file in the place of this one.
            let full = path.canonicalize().map_err(read)?;
            for place in [Some(path.as_path()), full.parent()].into_iter().flatten() {
                if let Some(mode) = check_writable(place).map_err(read)? {
                    return Err(PluginError::Writable { path: place.into(), mode });
                }
            }
            if let Some(owner) = foreign_owner(path).map_err(read)? {
                return Err(PluginError::Foreign { path: path.clone(), owner });
            }
        }
        if let Some(pinned) = &file.sha256 {
            let actual: String =
                Sha256::digest(std::fs::read(path).map_err(read)?).iter().map(|b| format!("{b:02x}")).collect();
            if !actual.eq_ignore_ascii_case(pinned.trim()) {
                return Err(PluginError::Checksum { path: path.clone(), actual, pinned: pinned.clone() });
            }
        }
        Ok(())
    }
}

/// Shared libraries of a folder, in order of name.
pub fn libraries(folder: &Path) -> Vec<PathBuf> {
    let is_library = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        path.is_file() && name.starts_with(std::env::consts::DLL_PREFIX) && name.ends_with(std::env::consts::DLL_SUFFIX)
    };
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let mut all: Vec<_> = entries.filter(is_library).collect();
    all.sort();
    all
}

/// `my-model` is in `libmy_model.so`.
pub fn file_name(name: &str) -> String {
    format!("{}{}{}", std::env::consts::DLL_PREFIX, name.replace('-', "_"), std::env::consts::DLL_SUFFIX)
}

/// The permission bits if others than the owner may write. A group that is the owner's own, as many systems make one
/// per user, does not count.
#[cfg(unix)]
fn check_writable(path: &Path) -> std::io::Result<Option<u32>> {
    use std::os::unix::fs::MetadataExt;
    let meta = std::fs::metadata(path)?;
    let mode = meta.mode() & 0o777;
    // In a folder with the sticky bit, as /tmp, only its owner replaces a file.
    if meta.is_dir() && meta.mode() & 0o1000 != 0 {
        return Ok(None);
    }
    let group = mode & 0o020 != 0 && (meta.gid() != meta.uid() || meta.gid() == 0);
    Ok((group || mode & 0o002 != 0).then_some(mode))
}

/// The owner if it is neither root nor the user this process runs as.
#[cfg(unix)]
fn foreign_owner(path: &Path) -> std::io::Result<Option<u32>> {
    use std::os::unix::fs::MetadataExt;
    let owner = std::fs::metadata(path)?.uid();
    // Real, effective, saved and file-system user; where the system does not say, any owner will do.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let effective = users.and_then(|users| users.split_whitespace().nth(1)?.parse::<u32>().ok());
    Ok((owner != 0 && effective.is_some_and(|user| user != owner)).then_some(owner))
}

#[cfg(not(unix))]
fn foreign_owner(_: &Path) -> std::io::Result<Option<u32>> {
    Ok(None)
}

#[cfg(not(unix))]
fn check_writable(path: &Path) -> std::io::Result<Option<u32>> {
    std::fs::metadata(path)?;
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::{Cause, Failure};

    fn touch(path: &Path) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, b"x").unwrap();
    }

    #[test]
    fn the_first_place_wins_and_a_miss_lists_them_all() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        let search = Search {
            listed: vec![PluginFile::new(dir.path().join("other.so"))],
            folders: vec![a.clone(), b.clone()],
            allow_writable: false,
        };
        let file = file_name("my-model");
        let text = Failure::from(search.find("my-model").unwrap_err()).to_string();
        for place in [&a, &b] {
            assert!(text.contains(place.join(&file).to_str().unwrap()), "{text}");
        }
        assert!(text.contains("other.so"), "{text}");
        touch(&b.join(&file));
        assert_eq!(search.find("my-model").unwrap().path, b.join(&file));
        touch(&a.join(&file));
        assert_eq!(search.find("my-model").unwrap().path, a.join(&file));
        let listed = dir.path().join("c").join(&file);
        touch(&listed);
        let pinned = PluginFile { sha256: Some("00".into()), ..PluginFile::new(dir.path().join("c")) };
        let search = Search { listed: vec![pinned], ..search };
        let found = search.find("my-model").unwrap();
        assert_eq!((found.path.as_path(), found.sha256.as_deref()), (listed.as_path(), Some("00")));
    }

    #[test]
    fn a_wrong_checksum_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        touch(&path);
        let sha = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881";
        let file = PluginFile { sha256: Some(sha.to_uppercase()), ..PluginFile::new(&path) };
        Search::default().verify(&file).unwrap();
        std::fs::write(&path, b"y").unwrap();
        let e = Search::default().verify(&file).unwrap_err();
        assert!(matches!(e, PluginError::Checksum { .. }) && e.cause() == Cause::Plugin, "{e}");
    }

    #[cfg(unix)]
    #[test]
    fn a_file_others_may_write_to_is_refused_unless_allowed() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        touch(&path);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o757)).unwrap();
        let file = PluginFile::new(&path);
        let e = Failure::from(Search::default().verify(&file).unwrap_err()).to_string();
        assert!(e.contains("mode 757") && e.contains("chmod go-w"), "{e}");
        Search::default().verify(&PluginFile { allow_writable: true, ..file.clone() }).unwrap();
        Search { allow_writable: true, ..Search::default() }.verify(&file).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        Search::default().verify(&file).unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        let e = Failure::from(Search::default().verify(&file).unwrap_err()).to_string();
        assert!(e.contains("mode 777") && e.contains(&format!("chmod go-w {}", dir.path().display())), "{e}");
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        // Only root can give a file away.
        if std::os::unix::fs::chown(&path, Some(65534), None).is_ok() {
            let e = Failure::from(Search::default().verify(&file).unwrap_err()).to_string();
            assert!(e.contains("belongs to user 65534"), "{e}");
        }
    }
}
