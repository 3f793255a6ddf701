//! What a host reads before anything else of a library: one plain `repr(C)` symbol, `gantry_hello`.
//!
//! Its layout is fixed for all time; later versions may append fields and say so in `struct_size`.

use super::tables::LAYOUT_HASH;

/// Major version of the API: providers and hosts of different majors do not work together.
pub const API_MAJOR: u32 = 1;
/// Minor version: counts additions.
pub const API_MINOR: u32 = if cfg!(feature = "grown") { 1 } else { 0 };
/// Operators 1 ..= this number are those of API 1.0, which every host has.
pub const OPERATORS_OF_1_0: usize = 33;

/// Layout hashes of released minor versions of this major version, oldest first. A plugin of one of them is read
/// through prefix accessors without abi_stable's check.
pub const KNOWN_LAYOUTS: &[(u32, u64)] = &[(0, LAYOUT_1_0)];
/// Layout hash of API 1.0.
pub const LAYOUT_1_0: u64 = 0x0146_cb66_ce82_4411;

/// First bytes of the hello.
pub const MAGIC: [u8; 16] = *b"GANTRY PLUGIN 1\n";
/// Symbol name of the hello.
pub const SYMBOL: &str = "gantry_hello";
/// Name of the root module, for abi_stable.
pub const PLUGIN_API_NAME: &str = "gantry_plugin";

/// A string that lives as long as the library.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct StaticStr {
    pub ptr: *const u8,
    pub len: usize,
}

impl StaticStr {
    pub const fn new(s: &'static str) -> StaticStr {
        StaticStr { ptr: s.as_ptr(), len: s.len() }
    }
}

/// An operator a plugin needs, with the version it was built for.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct NeededOperator {
    pub id: u32,
    pub version: u32,
    pub name: StaticStr,
}

/// How the plugin's code ends panics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum PanicStrategy {
    Unwind = 0,
    Abort = 1,
}

/// The hello.
#[repr(C)]
pub struct Hello {
    pub magic: [u8; 16],
    /// Bytes of this struct.
    pub struct_size: u32,
    pub api_major: u32,
    pub api_minor: u32,
    /// Number of a [`PanicStrategy`].
    pub panic_strategy: u32,
    pub layout_hash: u64,
    pub rustc: StaticStr,
    pub name: StaticStr,
    pub version: StaticStr,
    pub operators: *const NeededOperator,
    pub operators_len: usize,
}

// SAFETY: all pointers are to immutable statics of the library, which is never unloaded.
unsafe impl Sync for Hello {}
// SAFETY: as above.
unsafe impl Sync for NeededOperator {}

impl Hello {
    /// The hello of a plugin built against this copy of the API.
    pub const fn new(
        name: &'static str,
        version: &'static str,
        panic_strategy: PanicStrategy,
        operators: &'static [NeededOperator],
    ) -> Hello {
        Hello {
            magic: MAGIC,
            struct_size: size_of::<Hello>() as u32,
            api_major: API_MAJOR,
            api_minor: API_MINOR,
            panic_strategy: panic_strategy as u32,
            layout_hash: LAYOUT_HASH,
            rustc: StaticStr::new(env!("GANTRY_RUSTC")),
            name: StaticStr::new(name),
            version: StaticStr::new(version),
            operators: operators.as_ptr(),
            operators_len: operators.len(),
        }
    }
}

/// The need for one operator, as this copy of the API knows it.
pub const fn needs<O: crate::ops::Op>() -> NeededOperator {
    NeededOperator { id: O::ID, version: O::VERSION, name: StaticStr::new(O::NAME) }
}

/// Every operator of API 1.0: what a plugin needs that does not say.
pub const DEFAULT_NEEDS: [NeededOperator; OPERATORS_OF_1_0] = {
    let mut list = [NeededOperator { id: 0, version: 0, name: StaticStr::new("") }; OPERATORS_OF_1_0];
    let mut i = 0;
    while i < OPERATORS_OF_1_0 {
        let (id, version, name) = crate::ops::OPERATORS[i];
        list[i] = NeededOperator { id, version, name: StaticStr::new(name) };
        i += 1;
    }
    list
};

#[cfg(test)]
mod tests {
    use super::*;

    /// A change of the boundary shows here. Between releases: write the new number down. After a release: only growth
    /// at the end of a table is allowed, under a new minor version and a new line in `KNOWN_LAYOUTS`.
    #[test]
    fn the_layout_is_the_one_written_down() {
        let written = KNOWN_LAYOUTS.iter().find(|(minor, _)| *minor == API_MINOR);
        match written {
            Some((_, hash)) => assert_eq!(LAYOUT_HASH, *hash, "layout hash is {LAYOUT_HASH:#018x}"),
            None => assert!(KNOWN_LAYOUTS.iter().all(|(_, hash)| *hash != LAYOUT_HASH)),
        }
    }

    #[test]
    fn operators_of_1_0_come_first() {
        assert!(crate::ops::OPERATORS.iter().take(OPERATORS_OF_1_0).zip(1..).all(|(op, id)| op.0 == id));
    }
}
