//! The two tables of functions.
//!
//! A table may only grow, after its `last_prefix_field`: newer fields carry `#[sabi(missing_field(option))]`, so that
//! their accessor answers `None` where the other side is older. Changing anything before it is a new major version.

use super::hello::PLUGIN_API_NAME;
use super::layout::{SEED, mix_number};
use super::types::{AbiError, Ctx, CustomRun, Object, RawCall, RawOutputs, RawRows, RawRowsMut, Reply};
use crate::sdk::TensorRef;
use abi_stable::library::RootModule;
use abi_stable::package_version_strings;
use abi_stable::sabi_types::VersionStrings;
use abi_stable::std_types::{ROption, RSlice, RStr, RString};

crate::abi_struct! {
    /// What the host offers. Everything but `log` and `par_for` needs a [`Ctx`] of the running call.
    #[sabi(kind(Prefix(prefix_ref = HostTableRef)))]
    #[sabi(missing_field(option))]
    pub struct HostTable {
        pub call: extern "C" fn(Ctx, &RawCall<'_>, &mut RawOutputs) -> Reply<()>,
        pub param: extern "C" fn(Ctx, u32) -> Reply<TensorRef>,
        pub buffer: extern "C" fn(Ctx, u32) -> Reply<TensorRef>,
        /// Path, kind, layer. True: record the region; false: it is left out.
        pub region_begin: extern "C" fn(Ctx, RStr<'_>, u32, ROption<u32>) -> Reply<bool>,
        pub region_end: extern "C" fn(Ctx) -> Reply<()>,
        pub role: extern "C" fn(Ctx, u32, TensorRef) -> Reply<TensorRef>,
        pub step_input: extern "C" fn(Ctx, RStr<'_>) -> Reply<TensorRef>,
        pub batch_input: extern "C" fn(Ctx, RStr<'_>) -> Reply<TensorRef>,
        pub output: extern "C" fn(Ctx, RStr<'_>, RSlice<'_, TensorRef>) -> Reply<()>,
        pub metric: extern "C" fn(Ctx, RStr<'_>, TensorRef) -> Reply<()>,
        /// A `TensorDesc` as JSON.
        pub describe: extern "C" fn(Ctx, TensorRef) -> Reply<RString>,
        pub unflatten: extern "C" fn(Ctx, TensorRef, RSlice<'_, RStr<'_>>) -> Reply<TensorRef>,
        /// Level, target (empty: the provider being called), message. From any thread, at any time.
        pub log: extern "C" fn(Ctx, u32, RStr<'_>, RStr<'_>),
        /// Calls the body for ranges that cover 0 .. items, each at most `grain` long, on the host's
        /// threads. From any thread, at any time.
        #[sabi(last_prefix_field)]
        pub par_for: extern "C" fn(u64, u64, ParBody) -> Reply<()>;
        grown
        /// How many values this call has recorded so far. Test-only growth.
        pub recorded: extern "C" fn(Ctx) -> Reply<u64>
    }
}

crate::abi_struct! {
    /// Body of a parallel loop.
    #[derive(Clone, Copy)]
    pub struct ParBody {
        /// `data`, begin, end.
        pub run: extern "C" fn(*const (), u64, u64) -> Reply<()>,
        pub data: *const (),
    }
}

crate::abi_struct! {
    /// What a plugin offers: its root module.
    #[sabi(kind(Prefix(prefix_ref = PluginTableRef)))]
    #[sabi(missing_field(option))]
    pub struct PluginTable {
        /// First of all, once per process: hands over the host's table.
        pub init: extern "C" fn(HostTableRef) -> Reply<()>,
        /// The providers of this plugin, JSON list of `ProviderInfo`.
        pub describe: extern "C" fn() -> Reply<RString>,
        /// Kind (number of a `ProviderKind`), name, config as JSON.
        pub create: extern "C" fn(u32, RStr<'_>, RStr<'_>) -> Reply<Object>,
        pub release: extern "C" fn(Object) -> Reply<()>,
        /// A `ModelPlan` as JSON.
        pub provider_plan: extern "C" fn(Object) -> Reply<RString>,
        /// A `Stage` as JSON to a module.
        pub provider_build: extern "C" fn(Object, RStr<'_>) -> Reply<Object>,
        pub module_forward: extern "C" fn(Object, Ctx) -> Reply<()>,
        /// A `ModelPlan` to an `ElasticPlan`, both JSON.
        pub elastifier_plan: extern "C" fn(Object, RStr<'_>) -> Reply<RString>,
        /// A `MicroBatchInfo` to a list of `AxisSetting`, both JSON.
        pub elastifier_begin: extern "C" fn(Object, RStr<'_>) -> Reply<RString>,
        /// A budget to a list of `AxisSetting` as JSON.
        pub elastifier_widths: extern "C" fn(Object, f64) -> Reply<RString>,
        /// Number of a `HookEvent`, step, JSON in, JSON out.
        pub hooks_event: extern "C" fn(Object, u32, Ctx, u64, RStr<'_>) -> Reply<RString>,
        /// Shapes of the inputs to a `CustomShapes`, both JSON.
        pub custom_shapes: extern "C" fn(Object, RStr<'_>) -> Reply<RString>,
        /// From any thread.
        pub custom_run: extern "C" fn(Object, &CustomRun<'_>) -> Reply<()>,
        /// A `Submodel` to the keys of its config that differ, both JSON.
        pub provider_submodel: extern "C" fn(Object, RStr<'_>) -> Reply<RString>,
        /// Name of a model provider, and JSON to JSON: `config.json` to a `FolderImport`, or, if the last argument is
        /// true, a config of the provider to a `FolderExport`.
        pub hugging_face: extern "C" fn(RStr<'_>, RStr<'_>, bool) -> Reply<RString>,
        /// Records the elastifier's router.
        pub elastifier_forward: extern "C" fn(Object, Ctx) -> Reply<()>,
        /// An `Occasion` to the `Values` of the router's inputs, both JSON.
        pub elastifier_inputs: extern "C" fn(Object, RStr<'_>) -> Reply<RString>,
        /// An `Occasion` and the `Values` of the router's outputs to a `Choice`, all JSON.
        #[sabi(last_prefix_field)]
        pub elastifier_choose: extern "C" fn(Object, RStr<'_>, RStr<'_>) -> Reply<RString>;
        grown
        /// One more description of the plugin, as JSON. Test-only growth.
        pub about: extern "C" fn() -> Reply<RString>
    }
}

impl RootModule for PluginTableRef {
    abi_stable::declare_root_module_statics! {PluginTableRef}
    const BASE_NAME: &'static str = PLUGIN_API_NAME;
    const NAME: &'static str = PLUGIN_API_NAME;
    const VERSION_STRINGS: VersionStrings = package_version_strings!();
}

/// Hash of everything that crosses the boundary.
pub const LAYOUT_HASH: u64 = {
    let h = mix_number(SEED, Ctx::LAYOUT);
    let h = mix_number(h, Object::LAYOUT);
    let h = mix_number(h, RawCall::LAYOUT);
    let h = mix_number(h, RawOutputs::LAYOUT);
    let h = mix_number(h, AbiError::LAYOUT);
    let h = mix_number(h, ParBody::LAYOUT);
    let h = mix_number(h, RawRows::LAYOUT);
    let h = mix_number(h, RawRowsMut::LAYOUT);
    let h = mix_number(h, CustomRun::LAYOUT);
    let h = mix_number(h, size_of::<TensorRef>() as u64);
    let h = mix_number(h, size_of::<Reply<RString>>() as u64);
    let h = mix_number(h, HostTable::LAYOUT);
    mix_number(h, PluginTable::LAYOUT)
};
