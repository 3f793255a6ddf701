//! Writes down which compiler built this copy of the API, for the hello of a plugin.

use std::process::Command;

fn main() {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let version = Command::new(rustc)
        .arg("--version")
        .output()
        .ok()
        .and_then(|out| String::from_utf8(out.stdout).ok())
        .unwrap_or_else(|| "unknown compiler".into());
    println!("cargo::rustc-env=GANTRY_RUSTC={}", version.trim());
    println!("cargo::rerun-if-changed=build.rs");
}
