//! The CUDA sources compile for Hopper, on machines without a GPU too.
//!
//! Needs NVRTC alone: a CUDA toolkit, or the Python package nvidia-cuda-nvrtc with GANTRY_NVRTC set to its
//! libnvrtc.so.13. Without it the tests say so and pass, unless GANTRY_REQUIRE_NVRTC=1.
#![cfg(feature = "cuda")]

use gantry_kernels::cuda::{ARCH, SOURCES, Source, compile, nvrtc_present};
use std::collections::BTreeSet;

fn compiler_is_missing() -> bool {
    let Err(error) = nvrtc_present() else { return false };
    let required = std::env::var("GANTRY_REQUIRE_NVRTC").is_ok_and(|v| v == "1");
    assert!(!required, "GANTRY_REQUIRE_NVRTC=1, but {error}");
    println!("skipped: {error}");
    true
}

#[test]
fn every_source_compiles_and_defines_its_kernels() {
    if compiler_is_missing() {
        return;
    }
    for source in SOURCES {
        let code = compile(source, ARCH).unwrap_or_else(|e| panic!("{e}"));
        for kernel in source.kernels {
            let section = format!("\0.text.{kernel}\0");
            let found = code.windows(section.len()).any(|bytes| bytes == section.as_bytes());
            assert!(found, "{} defines no kernel {kernel}", source.name);
        }
        println!("{}: {} kernels, {} bytes for {ARCH}", source.name, source.kernels.len(), code.len());
    }
}

#[test]
fn a_mistake_is_reported_with_file_and_line() {
    if compiler_is_missing() {
        return;
    }
    let broken =
        Source { name: "broken.cu", text: "\nextern \"C\" __global__ void f() { undeclared = 1; }", kernels: &[] };
    let error = compile(&broken, ARCH).err().map(|e| e.to_string()).unwrap_or_default();
    assert!(error.contains("broken.cu(2)") && error.contains("undeclared"), "{error}");
}

/// Needs no compiler: every kernel in a source is listed, once over all sources.
#[test]
fn every_kernel_is_listed_once() {
    let mut names = BTreeSet::new();
    for source in SOURCES {
        let defined = source.text.split("extern \"C\" __global__ void ").skip(1);
        let defined: BTreeSet<&str> = defined.filter_map(|rest| rest.split('(').next()).collect();
        assert_eq!(defined, source.kernels.iter().copied().collect(), "{}", source.name);
        assert!(source.kernels.iter().all(|kernel| names.insert(*kernel)), "{} repeats a name", source.name);
    }
}
