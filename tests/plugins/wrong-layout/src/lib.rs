//! A plugin whose hello is right but whose table has two functions swapped and one of another type.

use abi_stable::StableAbi;
use abi_stable::library::{CheckTypeLayout, LibHeader, RootModule, RootModuleResult};
use abi_stable::prefix_type::WithMetadata;
use abi_stable::sabi_types::VersionStrings;
use gantry_plugin_api::abi::hello::{Hello, PLUGIN_API_NAME, PanicStrategy};

/// Begins unlike the host's table.
#[repr(C)]
#[derive(StableAbi)]
#[sabi(kind(Prefix(prefix_ref = WrongTableRef)))]
pub struct WrongTable {
    pub describe: extern "C" fn() -> u64,
    #[sabi(last_prefix_field)]
    pub init: extern "C" fn(u32) -> u32,
}

impl RootModule for WrongTableRef {
    abi_stable::declare_root_module_statics! {WrongTableRef}
    const BASE_NAME: &'static str = PLUGIN_API_NAME;
    const NAME: &'static str = PLUGIN_API_NAME;
    const VERSION_STRINGS: VersionStrings = VersionStrings::new("1.0.0");
}

extern "C" fn describe() -> u64 {
    std::process::abort()
}

extern "C" fn init(_: u32) -> u32 {
    std::process::abort()
}

struct Table;

impl Table {
    abi_stable::staticref!(const VALUE: WithMetadata<WrongTable> = WithMetadata::new(WrongTable { describe, init }));
}

extern "C" fn module() -> RootModuleResult {
    abi_stable::library::__call_root_module_loader(|| WrongTableRef(Table::VALUE.as_prefix()))
}

#[unsafe(export_name = "gantry_hello")]
static HELLO: Hello = {
    let mut hello = Hello::new("wrong-layout", env!("CARGO_PKG_VERSION"), PanicStrategy::Unwind, &[]);
    hello.layout_hash = !hello.layout_hash;
    hello
};

#[unsafe(export_name = "gantry_root_module")]
static ROOT_MODULE: LibHeader = {
    // SAFETY: the header is typed with the table its constructor makes.
    unsafe { LibHeader::from_constructor::<WrongTableRef>(module, CheckTypeLayout::Yes) }
};
