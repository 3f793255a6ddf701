//! Which files make up the corpus.
//!
//! An entry of `data.paths` is a file (taken as it is), a folder (walked) or a glob (walked from its fixed part).
//! Folders respect `.gitignore` files in and above them, skip hidden entries and do not follow links; machine-wide git
//! settings do not count, so that two machines see the same files. With `data.tracked_only`, of these only files that git
//! tracks. Order: entries as listed, within one by path. A file reached twice counts once.

use super::tracked;
use crate::failure::{Failure, Result};
use ignore::WalkBuilder;
use ignore::gitignore::{Gitignore, GitignoreBuilder};
use std::collections::HashSet;
use std::path::{Component, Path, PathBuf};

/// What is taken from folders and globs.
pub(super) struct Filter<'a> {
    /// The recipe's key that lists the paths, for messages.
    pub key: &'static str,
    /// Extensions of names; empty: all.
    pub extensions: &'a [String],
    /// Globs (in .gitignore's syntax) of what is left out.
    pub exclude: &'a [String],
    /// Only files that git tracks.
    pub tracked_only: bool,
}

/// A file of the corpus.
#[derive(Debug)]
pub(super) struct Found {
    pub path: PathBuf,
    /// The path below the folder it was found under; of a file that was named itself, the file's name.
    pub name: PathBuf,
    /// The path without links: equal for one file reached twice.
    pub identity: PathBuf,
}

/// Finds the files of `paths`.
pub(super) fn find(paths: &[PathBuf], filter: &Filter) -> Result<Vec<Found>> {
    let (mut files, mut seen) = (Vec::new(), HashSet::new());
    let (key, what) = (filter.key, if filter.key == "data.paths" { "data path" } else { filter.key });
    for path in paths {
        let (root, found) = match path.metadata() {
            Ok(about) if about.is_dir() => (path.clone(), walk(path, None, filter)?),
            Ok(about) if about.is_file() => (path.parent().unwrap_or(Path::new("")).to_path_buf(), vec![path.clone()]),
            // A pipe or a device may never end.
            Ok(_) => {
                return Err(Failure::data(format!("{what} {} is neither a file nor a folder", path.display()))
                    .remedy(format!("correct {key}")));
            }
            Err(_) if is_glob(path) => {
                let (root, pattern) = split_glob(path);
                if !root.is_dir() {
                    return Err(Failure::data(format!("{what} {}: no folder {}", path.display(), root.display()))
                        .remedy(format!("correct {key}")));
                }
                let found = walk(&root, Some(&pattern), filter)?;
                (root, found)
            }
            Err(error) => {
                return Err(Failure::data(format!("cannot read {what} {}: {error}", path.display()))
                    .remedy(format!("correct {key} or create the files")));
            }
        };
        for path in found {
            let identity = path.canonicalize().unwrap_or_else(|_| path.clone());
            if seen.insert(identity.clone()) {
                let name = path.strip_prefix(&root).unwrap_or(&path).to_path_buf();
                files.push(Found { path, name, identity });
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

fn walk(root: &Path, glob: Option<&str>, filter: &Filter) -> Result<Vec<PathBuf>> {
    let Filter { key, extensions, exclude, tracked_only } = *filter;
    let excluded = matcher(root, exclude.iter().cloned(), "data.exclude")?;
    let wanted = matcher(root, glob.iter().map(|glob| format!("/{glob}")), key)?;
    let tracked = if tracked_only { Some(tracked::files(root)?) } else { None };
    let known = |path: &Path| match &tracked {
        Some(files) => path.strip_prefix(root).is_ok_and(|path| files.contains(path)),
        None => true,
    };
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
            Failure::data(format!("cannot walk {}: {error}", root.display()))
                .remedy("make the folder readable or add it to data.exclude")
        })?;
        let path = entry.path();
        let named = extensions.is_empty()
            || path.extension().is_some_and(|found| extensions.iter().any(|known| *known == *found.to_string_lossy()));
        let chosen = glob.is_none() || wanted.matched(path, false).is_ignore();
        if entry.file_type().is_some_and(|kind| kind.is_file()) && named && chosen && known(path) {
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

    const ALL: Filter = Filter { key: "data.paths", extensions: &[], exclude: &[], tracked_only: false };

    #[test]
    fn names_are_relative_to_where_a_file_was_found() {
        let root = tree(&["a/b/x.rs", "a/y.rs", "z.rs"]);
        let names = |path: &str| -> Vec<_> {
            let found = find(&[root.path().join(path)], &ALL).unwrap();
            found.into_iter().map(|file| file.name.display().to_string()).collect()
        };
        assert_eq!(names("a"), ["b/x.rs", "y.rs"]);
        assert_eq!(names("a/*/x.rs"), ["b/x.rs"]);
        assert_eq!(names("a/b/x.rs"), ["x.rs"]);
    }

    #[test]
    fn only_tracked_files_of_folders_and_globs() {
        let root = tree(&["a/x.rs", "a/new.rs", "z.rs", "new.rs"]);
        let git = |arguments: &[&str]| {
            let status = std::process::Command::new("git").arg("-C").arg(root.path()).args(arguments).status();
            assert!(status.unwrap().success());
        };
        git(&["init", "--quiet"]);
        git(&["add", "a/x.rs", "z.rs"]);
        let names = |path: &str| -> Vec<_> {
            let found = find(&[root.path().join(path)], &Filter { tracked_only: true, ..ALL }).unwrap();
            found.into_iter().map(|file| file.name.display().to_string()).collect()
        };
        assert_eq!(names(""), ["a/x.rs", "z.rs"]);
        assert_eq!(names("a"), ["x.rs"]);
        assert_eq!(names("*.rs"), ["z.rs"]);
        // What is named itself is wanted.
        assert_eq!(names("new.rs"), ["new.rs"]);
        // A tracked file that is gone is not missed.
        std::fs::remove_file(root.path().join("z.rs")).unwrap();
        assert_eq!(names(""), ["a/x.rs"]);
    }

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
        let (extensions, exclude) = (strings(extensions), strings(exclude));
        let found = find(&paths, &Filter { extensions: &extensions, exclude: &exclude, ..ALL }).unwrap();
        let found: Vec<_> =
            found.iter().map(|file| file.path.strip_prefix(root.path()).unwrap().to_str().unwrap()).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn missing_path_is_named() {
        let failure = find(&["/nowhere/at/all".into()], &ALL).unwrap_err();
        assert!(failure.sentence.starts_with("cannot read data path /nowhere/at/all: "));
        assert_eq!(failure.exit_status(), 4);
        let failure = find(&["/nowhere/at/*.rs".into()], &ALL).unwrap_err();
        assert_eq!(failure.sentence, "data path /nowhere/at/*.rs: no folder /nowhere/at");
    }

    #[test]
    fn pipe_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let pipe = root.path().join("a.txt");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let failure = find(std::slice::from_ref(&pipe), &ALL).unwrap_err();
        assert_eq!(failure.sentence, format!("data path {} is neither a file nor a folder", pipe.display()));
        assert_eq!(failure.exit_status(), 4);
    }
}
