//! Tells the program which commit it is built from: `GANTRY_GIT_COMMIT`, or the repository's in a release build.
//!
//! Debug builds do not ask the repository: every commit would build the whole crate anew.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=GANTRY_GIT_COMMIT");
    println!("cargo:rerun-if-changed=build.rs");
    let release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let commit = std::env::var("GANTRY_GIT_COMMIT").ok().or_else(|| release.then(of_repository).flatten());
    println!("cargo:rustc-env=GANTRY_COMMIT={}", commit.unwrap_or_default());
}

/// The commit of the repository this file is in, with `-dirty` if its sources have changes.
fn of_repository() -> Option<String> {
    // A commit moves one of these; a change of the sources makes the script run too.
    for file in ["HEAD", "logs/HEAD"] {
        println!("cargo:rerun-if-changed={}", git(&["rev-parse", "--path-format=absolute", "--git-path", file])?);
    }
    let sources = ["src", "../kernels/src", "../plugin-api/src", "../Cargo.lock"];
    sources.iter().for_each(|path| println!("cargo:rerun-if-changed={path}"));
    let changes = git(&[&["status", "--porcelain", "--"], &sources[..]].concat())?;
    let commit = git(&["rev-parse", "HEAD"])?;
    Some(if changes.is_empty() { commit } else { format!("{commit}-dirty") })
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_string())
}
