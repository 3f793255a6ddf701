//! Which files make up the corpus.
//!
//! An entry of `data.paths` is a file (taken as it is), a folder (walked) or a glob (walked from its fixed part).
//! Folders respect `.gitignore` files in and above them, skip hidden entries and do not follow links; machine-wide git
//! settings do not count, so that two machines see the same files. Order: entries as listed, within one by path. A
//! file reached twice counts once.

use crate::failure::{Failure, Result};
use ignore::WalkBuilder;
use ignore::gitignore::{Gitignore, GitignoreBuilder};
use std::collections::HashSet;
use std::path::{Component, Path, PathBuf};

/// Finds the files of `paths`, taking from folders and globs only names with one of `extensions` (all if empty) that
/// match none of the globs in `exclude` (in .gitignore's syntax).
pub(super) fn find(paths: &[PathBuf], extensions: &[String], exclude: &[String]) -> Result<Vec<PathBuf>> {
    let (mut files, mut seen) = (Vec::new(), HashSet::new());
    for path in paths {
        let found = match path.metadata() {
            Ok(about) if about.is_dir() => walk(path, None, extensions, exclude)?,
            Ok(about) if about.is_file() => vec![path.clone()],
            // A pipe or a device may never end.
            Ok(_) => {
                return Err(Failure::data(format!("data path {} is neither a file nor a folder", path.display()))
                    .remedy("correct data.paths"));
            }
            Err(_) if is_glob(path) => {
                let (root, pattern) = split_glob(path);
                if !root.is_dir() {
                    return Err(Failure::data(format!("data path {}: no folder {}", path.display(), root.display()))
                        .remedy("correct data.paths"));
                }
                walk(&root, Some(&pattern), extensions, exclude)?
            }
            Err(error) => {
                return Err(Failure::data(format!("cannot read data path {}: {error}", path.display()))
                    .remedy("correct data.paths or create the files"));
            }
        };
        for file in found {
            let identity = file.canonicalize().unwrap_or_else(|_| file.clone());
            if seen.insert(identity) {
                files.push(file);
            }
        }
    }
    Ok(files)
}

fn is_glob(path: &Path) -> bool {
    path.to_string_lossy().contains(['*', '?', '[', '{'])
}

/// The longest prefix without glob characters, and the rest.
fn split_glob(path: &Path) -> (PathBuf, String) {
    let (mut root, mut rest) = (PathBuf::new(), PathBuf::new());
    for component in path.components() {
        let fixed = rest.as_os_str().is_empty() && !is_glob(Path::new(&component));
        match component {
            Component::Normal(_) if !fixed => rest.push(component),
            _ => root.push(component),
        }
    }
    (root, rest.to_string_lossy().into_owned())
}

fn matcher(root: &Path, globs: impl Iterator<Item = String>, key: &str) -> Result<Gitignore> {
    let bad = |error: ignore::Error| Failure::recipe(format!("`{key}`: bad glob: {error}"));
    let mut builder = GitignoreBuilder::new(root);
    for glob in globs {
        builder.add_line(None, &glob).map_err(bad)?;
    }
    builder.build().map_err(bad)
}

fn walk(root: &Path, glob: Option<&str>, extensions: &[String], exclude: &[String]) -> Result<Vec<PathBuf>> {
    let excluded = matcher(root, exclude.iter().cloned(), "data.exclude")?;
    let wanted = matcher(root, glob.iter().map(|glob| format!("/{glob}")), "data.paths")?;
    let skip = excluded.clone();
    let entries = WalkBuilder::new(root)
        .require_git(false)
        .git_global(false)
        .git_exclude(false)
        .ignore(false)
        .filter_entry(move |entry| {
            let folder = entry.file_type().is_some_and(|kind| kind.is_dir());
            entry.depth() == 0 || !skip.matched(entry.path(), folder).is_ignore()
        })
        .build();
    let mut files = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|error| {
            Failure::data(format!("cannot walk data path {}: {error}", root.display()))
                .remedy("make the folder readable or add it to data.exclude")
        })?;
        let path = entry.path();
        let named = extensions.is_empty()
            || path.extension().is_some_and(|found| extensions.iter().any(|known| *known == *found.to_string_lossy()));
        let chosen = glob.is_none() || wanted.matched(path, false).is_ignore();
        if entry.file_type().is_some_and(|kind| kind.is_file()) && named && chosen {
            files.push(entry.into_path());
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn tree(files: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for file in files {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "x").unwrap();
        }
        root
    }

    fn strings(list: &[&str]) -> Vec<String> {
        list.iter().map(|text| text.to_string()).collect()
    }

    #[rstest]
    #[case::folder(&[""], &["rs"], &[], &["a/x.rs", "b/y.rs", "z.rs"])]
    #[case::all_extensions(&["a"], &[], &[], &["a/n.txt", "a/x.rs"])]
    #[case::exclude_folder(&[""], &["rs"], &["/a"], &["b/y.rs", "z.rs"])]
    #[case::exclude_name(&[""], &["rs"], &["x.*"], &["b/y.rs", "z.rs"])]
    #[case::glob_one_level(&["*/*.rs"], &[], &[], &["a/x.rs", "b/y.rs"])]
    #[case::glob_any_level(&["**/*.rs"], &[], &[], &["a/x.rs", "b/y.rs", "z.rs"])]
    #[case::order_of_entries_and_once(&["z.rs", ""], &["rs"], &[], &["z.rs", "a/x.rs", "b/y.rs"])]
    #[case::named_file_in_ignored_folder(&["out/o.rs"], &["txt"], &[], &["out/o.rs"])]
    fn finds(#[case] paths: &[&str], #[case] extensions: &[&str], #[case] exclude: &[&str], #[case] expected: &[&str]) {
        let root = tree(&["a/x.rs", "a/n.txt", "b/y.rs", "z.rs", "out/o.rs", ".hidden/h.rs"]);
        std::fs::write(root.path().join(".gitignore"), "/out\n").unwrap();
        let paths: Vec<_> = paths.iter().map(|path| root.path().join(path)).collect();
        let found = find(&paths, &strings(extensions), &strings(exclude)).unwrap();
        let found: Vec<_> =
            found.iter().map(|path| path.strip_prefix(root.path()).unwrap().to_str().unwrap()).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn missing_path_is_named() {
        let failure = find(&["/nowhere/at/all".into()], &[], &[]).unwrap_err();
        assert!(failure.sentence.starts_with("cannot read data path /nowhere/at/all: "));
        assert_eq!(failure.exit_status(), 4);
        let failure = find(&["/nowhere/at/*.rs".into()], &[], &[]).unwrap_err();
        assert_eq!(failure.sentence, "data path /nowhere/at/*.rs: no folder /nowhere/at");
    }

    #[test]
    fn pipe_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let pipe = root.path().join("a.txt");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let failure = find(std::slice::from_ref(&pipe), &[], &[]).unwrap_err();
        assert_eq!(failure.sentence, format!("data path {} is neither a file nor a folder", pipe.display()));
        assert_eq!(failure.exit_status(), 4);
    }
}
