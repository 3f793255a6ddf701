//! What a folder's git repository tracks.
//!
//! Asked of `git` itself, which knows every form of an index (linked work trees, split and sparse ones). Only the index
//! is read: no hook, file-system monitor or setting of the machine takes part.

use crate::failure::{Failure, Result};
use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Variables by which git would look at another repository than the folder's, as inside a hook.
const ELSEWHERE: [&str; 4] = ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"];

/// Paths below `folder` that are tracked, relative to it.
pub(super) fn files(folder: &Path) -> Result<HashSet<PathBuf>> {
    listed(folder, OsStr::new("git"))
}

fn listed(folder: &Path, git: &OsStr) -> Result<HashSet<PathBuf>> {
    let remedy = "set data.tracked_only to false, or name a folder of a git repository in data.paths";
    let mut command = Command::new(git);
    command.arg("-C").arg(folder).args(["-c", "core.fsmonitor=false", "ls-files", "-z", "--cached"]);
    for name in ELSEWHERE {
        command.env_remove(name);
    }
    let output = command.output().map_err(|error| {
        Failure::data(format!("data.tracked_only: cannot run git in {}: {error}", folder.display()))
            .remedy("install git, or set data.tracked_only to false")
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let failure = Failure::data(format!("data.tracked_only: git does not say what {} tracks", folder.display()));
        return Err(said.lines().take(3).fold(failure, |failure, line| failure.detail(line.trim())).remedy(remedy));
    }
    let paths = output.stdout.split(|&byte| byte == 0).filter(|path| !path.is_empty());
    Ok(paths.map(|path| PathBuf::from(OsStr::from_bytes(path))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn git(folder: &Path, arguments: &[&str]) {
        let mut command = Command::new("git");
        for name in ELSEWHERE {
            command.env_remove(name);
        }
        let status = command.arg("-C").arg(folder).args(arguments).status().unwrap();
        assert!(status.success(), "git {arguments:?}");
    }

    #[test]
    fn only_what_the_index_lists() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("in")).unwrap();
        let names = ["a.txt", "in/with space.txt", "in/\u{fc}.txt", "untracked.txt", "in/untracked.txt"];
        names.iter().for_each(|name| std::fs::write(root.path().join(name), "x").unwrap());
        git(root.path(), &["init", "--quiet"]);
        git(root.path(), &["add", "a.txt", "in/with space.txt", "in/\u{fc}.txt"]);
        let paths = |names: &[&str]| names.iter().map(PathBuf::from).collect::<HashSet<_>>();
        assert_eq!(files(root.path()).unwrap(), paths(&names[..3]));
        // Below a folder, relative to it.
        assert_eq!(files(&root.path().join("in")).unwrap(), paths(&["with space.txt", "\u{fc}.txt"]));
    }

    #[test]
    fn folder_without_a_repository_and_machine_without_git_are_refused_with_a_remedy() {
        let root = tempfile::tempdir().unwrap();
        let failure = files(root.path()).unwrap_err();
        let sentence = format!("data.tracked_only: git does not say what {} tracks", root.path().display());
        assert_eq!((failure.sentence, failure.cause as u8), (sentence, 4));
        assert!(failure.details[0].contains("not a git repository"), "{:?}", failure.details);
        assert!(failure.remedy.unwrap().contains("data.tracked_only to false"));
        let failure = listed(root.path(), OsStr::new("/nowhere/git")).unwrap_err();
        assert!(failure.sentence.contains("cannot run git in"), "{}", failure.sentence);
        assert!(failure.remedy.unwrap().starts_with("install git"));
    }
}
