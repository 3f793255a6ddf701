//! Builds the plugins that tests load, once per test process; cargo's own lock keeps processes apart.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The product's root folder.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// The library of a fixture under `tests/plugins`.
pub fn fixture(name: &str) -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build_workspace("tests/plugins", "plugins", &[])).join(file_name(name))
}

/// Builds a workspace of plugins with the product's lock file into `target/NAME`; gives the folder of the libraries.
pub fn build_workspace(workspace: &str, name: &str, arguments: &[&str]) -> PathBuf {
    let folder = root().join(workspace);
    // The same versions as the product's, which are there already. Only if it differs, so that cargo does not start over.
    let lock = std::fs::read(root().join("Cargo.lock")).unwrap();
    let copy = folder.join("Cargo.lock");
    let stamp = root().join("target").join(name).join("Cargo.lock.from");
    if !copy.exists() || std::fs::read(&stamp).ok().as_deref() != Some(&lock) {
        std::fs::create_dir_all(stamp.parent().unwrap()).unwrap();
        std::fs::write(&copy, &lock).unwrap();
        std::fs::write(&stamp, &lock).unwrap();
    }
    let target = root().join("target").join(name);
    build(&folder.join("Cargo.toml"), &target, arguments);
    target.join(if arguments.contains(&"--release") { "release" } else { "debug" })
}

/// The providers of the product as plugins, built for this test's own profile if a `cargo test -p` has not done so.
pub fn providers(names: &[&str]) -> gantry::plugin::PluginSet {
    static BUILT: OnceLock<()> = OnceLock::new();
    BUILT.get_or_init(|| {
        build_here(&["-p", "nemotron-hybrid", "-p", "dense-gpt", "-p", "flextron"]);
    });
    let search = gantry::plugin::Search::standard(Vec::new());
    gantry::plugin::PluginSet::load(search, names.iter().copied()).unwrap_or_else(|e| panic!("{e}"))
}

/// The `gantry` program of this test's profile.
pub fn gantry() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT
        .get_or_init(|| {
            let features = if cfg!(feature = "cuda") { &[][..] } else { &["--no-default-features"] };
            build_here(&[&["-p", "gantry", "--bin", "gantry"], features].concat()).join("gantry")
        })
        .clone()
}

/// Builds packages of the product where this test was built; gives the folder of the results.
fn build_here(arguments: &[&str]) -> PathBuf {
    // A test binary lies in TARGET/PROFILE/deps.
    let binary = std::env::current_exe().expect("a test has a file");
    let profile = binary.parent().and_then(Path::parent).expect("a test binary lies in TARGET/PROFILE/deps");
    let target = profile.parent().expect("a profile lies in a target folder");
    let mut arguments = arguments.to_vec();
    if profile.ends_with("release") {
        arguments.push("--release");
    }
    build(&root().join("Cargo.toml"), target, &arguments);
    profile.to_owned()
}

fn build(manifest: &Path, target: &Path, arguments: &[&str]) {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--offline", "--quiet", "--manifest-path"]).arg(manifest);
    command.arg("--target-dir").arg(target).args(arguments);
    let output = command.output().expect("cargo runs");
    assert!(
        output.status.success(),
        "building {} failed:\n{}",
        manifest.display(),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// `my-model` is in `libmy_model.so`.
pub fn file_name(name: &str) -> String {
    gantry::plugin::find::file_name(name)
}
