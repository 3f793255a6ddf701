//! A library like any other: nothing in it is for Gantry.

/// Something to export.
#[unsafe(no_mangle)]
pub extern "C" fn answer() -> u32 {
    42
}
