//! The provider's half: the table of a plugin, instantiated by `export_plugin!` for the marker type it declares.
//!
//! Every entry catches panics. An [`Object`] points to a boxed [`Held`], so one release function serves all kinds.

use super::custom::Bound;
use super::guard::{catch, install_quiet_hook, protect};
use super::hello::NeededOperator;
use super::tables::{HostTableRef, ParBody, PluginTable, PluginTableRef};
use super::types::{Ctx, CustomRun, Object, Reply};
use crate::plan::{
    AxisSetting, MicroBatchInfo, ModelPlan, Occasion, ProviderInfo, ProviderKind, Stage, Submodel, Values,
};
use crate::sdk::hugging_face;
use crate::sdk::{
    Configure, CustomOp, Cx, Elastifier, Error, HookEvent, Hooks, Module, Provider, Result, check_choice,
    check_settings, check_values, configure,
};
use abi_stable::library::{__call_root_module_loader, RootModuleResult};
use abi_stable::prefix_type::WithMetadata;
use abi_stable::std_types::{RStr, RString};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::OnceLock;

/// What `export_plugin!` declares.
pub trait Plugin: 'static {
    const NAME: &'static str;
    const VERSION: &'static str;
    const OPERATORS: &'static [NeededOperator];
    const ENTRIES: &'static [Entry];
}

/// One provider of a plugin.
pub struct Entry {
    name: &'static str,
    kind: ProviderKind,
    info: fn(&str, ProviderKind) -> ProviderInfo,
    create: fn(&str, &serde_json::Value) -> Result<Held>,
    /// `config.json` to the provider's config, and (true) back.
    folder: fn(&str, serde_json::Value, bool) -> Result<RString>,
}

fn no_folders(name: &str, _: serde_json::Value, _: bool) -> Result<RString> {
    Err(hugging_face::none(name))
}

fn folders<T: Configure>(name: &str, config: serde_json::Value, export: bool) -> Result<RString> {
    if export {
        json_out(&hugging_face::export::<T>(name, &config)?)
    } else {
        json_out(&hugging_face::import::<T>(name, config)?)
    }
}

impl Entry {
    pub const fn model<T: Configure + Provider>(name: &'static str) -> Entry {
        Entry {
            name,
            kind: ProviderKind::Model,
            info: configure::info::<T>,
            create: |name, config| Ok(Held::Provider(Box::new(configure::create::<T>(name, config)?))),
            folder: folders::<T>,
        }
    }

    pub const fn elastifier<T: Configure + Elastifier>(name: &'static str) -> Entry {
        Entry {
            name,
            kind: ProviderKind::Elastifier,
            info: configure::info::<T>,
            create: |name, config| Ok(Held::Elastifier(RefCell::new(Box::new(configure::create::<T>(name, config)?)))),
            folder: no_folders,
        }
    }

    pub const fn operator<T: CustomOp>() -> Entry {
        Entry {
            name: T::NAME,
            kind: ProviderKind::Operator,
            info: |name, kind| ProviderInfo {
                name: name.into(),
                kind,
                summary: T::SUMMARY.into(),
                config_schema: configure::schema::<T::Attrs>(),
                hugging_face: None,
            },
            create: |_, attrs| Ok(Held::Operator(super::custom::bind::<T>(attrs)?)),
            folder: no_folders,
        }
    }

    pub const fn hooks<T: Configure + Hooks>(name: &'static str) -> Entry {
        Entry {
            name,
            kind: ProviderKind::Hooks,
            info: configure::info::<T>,
            create: |name, config| Ok(Held::Hooks(RefCell::new(Box::new(configure::create::<T>(name, config)?)))),
            folder: no_folders,
        }
    }
}

/// What an [`Object`] points to.
pub(super) enum Held {
    Provider(Box<dyn Provider>),
    Module(Box<dyn Module>),
    Elastifier(RefCell<Box<dyn Elastifier>>),
    Hooks(RefCell<Box<dyn Hooks>>),
    Operator(Box<dyn Bound>),
}

impl Held {
    fn into_object(self) -> Object {
        Object { ptr: Box::into_raw(Box::new(self)).cast() }
    }

    pub(super) fn of<'a>(object: Object) -> Result<&'a Held> {
        // SAFETY: the host hands back only what `into_object` gave it, and not after `release`.
        unsafe { object.ptr.cast::<Held>().as_ref() }.ok_or_else(|| Error::plugin("the host passed a null object"))
    }
}

fn wrong_kind<T>(wanted: &str) -> Result<T> {
    Err(Error::plugin(format!("the host called a function of {wanted} on another kind of object")))
}

pub(super) fn json_in<T: serde::de::DeserializeOwned>(what: &str, text: RStr<'_>) -> Result<T> {
    serde_json::from_str(text.as_str()).map_err(|e| Error::plugin(format!("{what} from the host: {e}")))
}

pub(super) fn json_out<T: serde::Serialize>(value: &T) -> Result<RString> {
    serde_json::to_string(value).map(RString::from).map_err(|e| Error::plugin(e.to_string()))
}

/// The host's table as `init` got it, and the plugin's name, for what needs no call in progress.
static HOST: OnceLock<(HostTableRef, &'static str)> = OnceLock::new();

/// The host's table and the name of this plugin; `None` before a host has loaded it.
pub fn host() -> Option<(HostTableRef, &'static str)> {
    HOST.get().copied()
}

struct Functions<P>(PhantomData<P>);

impl<P: Plugin> Functions<P> {
    extern "C" fn init(table: HostTableRef) -> Reply<()> {
        protect("init", || {
            install_quiet_hook();
            let _ = HOST.set((table, P::NAME));
            Ok(())
        })
    }

    extern "C" fn describe() -> Reply<RString> {
        protect("describe", || {
            let infos: Vec<ProviderInfo> = P::ENTRIES.iter().map(|e| (e.info)(e.name, e.kind)).collect();
            json_out(&infos)
        })
    }

    extern "C" fn create(kind: u32, name: RStr<'_>, config: RStr<'_>) -> Reply<Object> {
        protect("create", || {
            let entry = Self::entry(kind, name)?;
            let config: serde_json::Value = json_in("config", config)?;
            Ok((entry.create)(entry.name, &config)?.into_object())
        })
    }

    extern "C" fn hugging_face(name: RStr<'_>, config: RStr<'_>, export: bool) -> Reply<RString> {
        protect("hugging_face", || {
            let entry = Self::entry(ProviderKind::Model as u32, name)?;
            (entry.folder)(entry.name, json_in("config", config)?, export)
        })
    }

    fn entry(kind: u32, name: RStr<'_>) -> Result<&'static Entry> {
        let entry = P::ENTRIES.iter().find(|e| e.kind as u32 == kind && e.name == name.as_str());
        entry.ok_or_else(|| {
            let names: Vec<&str> = P::ENTRIES.iter().map(|e| e.name).collect();
            Error::plugin(format!("plugin {} has no such provider \"{name}\"; it has: {}", P::NAME, names.join(", ")))
        })
    }

    const TABLE: PluginTable = PluginTable {
        init: Self::init,
        describe: Self::describe,
        create: Self::create,
        release,
        provider_plan,
        provider_build,
        module_forward,
        elastifier_plan,
        elastifier_begin,
        elastifier_widths,
        hooks_event,
        custom_shapes,
        custom_run,
        provider_submodel,
        hugging_face: Self::hugging_face,
        elastifier_forward,
        elastifier_inputs,
        elastifier_choose,
        #[cfg(feature = "grown")]
        about: Self::about,
    };

    #[cfg(feature = "grown")]
    extern "C" fn about() -> Reply<RString> {
        protect("about", || json_out(&format!("{} {}", P::NAME, P::VERSION)))
    }

    abi_stable::staticref!(const VALUE: WithMetadata<PluginTable> = WithMetadata::new(Self::TABLE));
}

/// The table of a plugin linked into this program: what a library's root module is, without a library.
pub fn plugin_table<P: Plugin>() -> PluginTableRef {
    PluginTableRef(Functions::<P>::VALUE.as_prefix())
}

/// Constructor of the root module that `export_plugin!` names in the library's header.
pub extern "C" fn erased_module<P: Plugin>() -> RootModuleResult {
    __call_root_module_loader(plugin_table::<P>)
}

extern "C" fn release(object: Object) -> Reply<()> {
    protect("drop", || {
        if !object.ptr.is_null() {
            // SAFETY: made by `into_object`; the host gives each object back once.
            drop(unsafe { Box::from_raw(object.ptr.cast::<Held>()) });
        }
        Ok(())
    })
}

extern "C" fn provider_plan(object: Object) -> Reply<RString> {
    protect("plan", || match Held::of(object)? {
        Held::Provider(p) => {
            let plan = p.plan()?;
            plan.check()?;
            json_out(&plan)
        }
        _ => wrong_kind("a model provider"),
    })
}

extern "C" fn provider_build(object: Object, stage: RStr<'_>) -> Reply<Object> {
    protect("build", || match Held::of(object)? {
        Held::Provider(p) => Ok(Held::Module(p.build(&json_in::<Stage>("stage", stage)?)?).into_object()),
        _ => wrong_kind("a model provider"),
    })
}

extern "C" fn provider_submodel(object: Object, submodel: RStr<'_>) -> Reply<RString> {
    protect("submodel_config", || match Held::of(object)? {
        Held::Provider(p) => json_out(&p.submodel_config(&json_in::<Submodel>("submodel", submodel)?)?),
        _ => wrong_kind("a model provider"),
    })
}

extern "C" fn module_forward(object: Object, ctx: Ctx) -> Reply<()> {
    protect("forward", || match Held::of(object)? {
        Held::Module(m) => m.forward(&cx(ctx)?),
        _ => wrong_kind("a module"),
    })
}

fn cx(ctx: Ctx) -> Result<Cx> {
    let (table, _) = host().ok_or_else(|| Error::plugin("the host called before init"))?;
    Ok(Cx::new(ctx, table))
}

fn settings_out(settings: &[AxisSetting]) -> Result<RString> {
    check_settings(settings)?;
    json_out(&settings)
}

fn with_elastifier(
    what: &str,
    object: Object,
    f: impl FnOnce(&mut dyn Elastifier) -> Result<RString>,
) -> Reply<RString> {
    protect(what, || match Held::of(object)? {
        // A panic inside leaves the cell usable: the guard is released on the way out.
        Held::Elastifier(e) => match e.try_borrow_mut() {
            Ok(mut e) => f(e.as_mut()),
            Err(_) => Err(Error::plugin("the elastifier is already being called")),
        },
        _ => wrong_kind("an elastifier"),
    })
}

extern "C" fn elastifier_plan(object: Object, target: RStr<'_>) -> Reply<RString> {
    with_elastifier("plan", object, |e| json_out(&e.plan(&json_in::<ModelPlan>("target plan", target)?)?))
}

extern "C" fn elastifier_begin(object: Object, info: RStr<'_>) -> Reply<RString> {
    with_elastifier("begin_micro_batch", object, |e| {
        settings_out(&e.begin_micro_batch(&json_in::<MicroBatchInfo>("micro-batch", info)?)?)
    })
}

extern "C" fn elastifier_forward(object: Object, ctx: Ctx) -> Reply<()> {
    protect("forward", || match Held::of(object)? {
        Held::Elastifier(e) => match e.try_borrow() {
            Ok(e) => e.forward(&cx(ctx)?),
            Err(_) => Err(Error::plugin("the elastifier is already being called")),
        },
        _ => wrong_kind("an elastifier"),
    })
}

extern "C" fn elastifier_inputs(object: Object, occasion: RStr<'_>) -> Reply<RString> {
    with_elastifier("router_inputs", object, |e| {
        let inputs = e.router_inputs(&json_in::<Occasion>("occasion", occasion)?)?;
        check_values("router_inputs", &inputs)?;
        json_out(&inputs)
    })
}

extern "C" fn elastifier_choose(object: Object, occasion: RStr<'_>, outputs: RStr<'_>) -> Reply<RString> {
    with_elastifier("choose", object, |e| {
        let occasion = json_in::<Occasion>("occasion", occasion)?;
        let choice = e.choose(&occasion, &json_in::<Values>("outputs", outputs)?)?;
        check_choice(&choice)?;
        json_out(&choice)
    })
}

extern "C" fn elastifier_widths(object: Object, budget: f64) -> Reply<RString> {
    with_elastifier("widths", object, |e| settings_out(&e.widths(budget)?))
}

extern "C" fn hooks_event(object: Object, event: u32, ctx: Ctx, step: u64, json: RStr<'_>) -> Reply<RString> {
    let event = HookEvent::from_u32(event);
    protect(event.map_or("a hook", HookEvent::name), || {
        let Held::Hooks(hooks) = Held::of(object)? else { return wrong_kind("hooks") };
        let Ok(mut hooks) = hooks.try_borrow_mut() else {
            return Err(Error::plugin("the hooks are already being called"));
        };
        // An event this plugin is too old to know is nothing to it.
        let Some(event) = event else { return Ok(RString::new()) };
        match event {
            HookEvent::RunBegin => hooks.run_begin(&cx(ctx)?)?,
            HookEvent::StepBegin => hooks.step_begin(&cx(ctx)?, step)?,
            HookEvent::StepEnd => hooks.step_end(&cx(ctx)?, step, &json_in("metrics", json)?)?,
            HookEvent::Save => return json_out(&hooks.save()?),
            HookEvent::Load => hooks.load(&json_in("state", json)?)?,
            HookEvent::RunEnd => hooks.run_end(&cx(ctx)?)?,
            HookEvent::Gradients => hooks.gradients(&cx(ctx)?, step, &json_in("report", json)?)?,
            HookEvent::StepRefused => hooks.step_refused(&cx(ctx)?, step, &json_in("report", json)?)?,
            HookEvent::Evaluation => hooks.evaluation(&cx(ctx)?, step, &json_in("report", json)?)?,
        }
        Ok(RString::new())
    })
}

extern "C" fn custom_shapes(object: Object, inputs: RStr<'_>) -> Reply<RString> {
    protect("shapes", || super::custom::shapes(object, inputs))
}

extern "C" fn custom_run(object: Object, call: &CustomRun<'_>) -> Reply<()> {
    protect(if call.backward { "backward" } else { "forward" }, || super::custom::run(object, call))
}

/// Carries a parallel loop across: `body` runs on the host's threads.
pub fn par_for<F: Fn(u64, u64) + Sync>(table: HostTableRef, items: u64, grain: u64, body: &F) -> Result<()> {
    extern "C" fn run<F: Fn(u64, u64) + Sync>(data: *const (), begin: u64, end: u64) -> Reply<()> {
        protect("par_for", || {
            // SAFETY: `data` is the closure below, which outlives the loop; `F` is `Sync`.
            let body = unsafe { &*data.cast::<F>() };
            body(begin, end);
            Ok(())
        })
    }
    let body = ParBody { run: run::<F>, data: std::ptr::from_ref(body).cast() };
    table.par_for()(items, grain, body).into_result().map_err(Error::from)
}

/// A message to the host's log outside of any call; lost if no host has loaded this plugin.
pub fn log(level: crate::sdk::LogLevel, message: &str) {
    if let Some((table, name)) = host() {
        let _ = catch("log", || {
            table.log()(Ctx::NONE, level as u32, name.into(), message.into());
            Ok(())
        });
    }
}

/// Declares the providers of a plugin and everything a host looks for in the library.
///
/// ```
/// use gantry_plugin_api::plan::{Axis, Block, Direction, Init, Layout, ModelPlan, Param, Port, PortKind, Stage};
/// use gantry_plugin_api::schemars::{self, JsonSchema};
/// use gantry_plugin_api::sdk::{Configure, Cx, Module, ParamId, Provider, Result};
///
/// gantry_plugin_api::export_plugin! {
///     name: "bigram",
///     models: { "bigram" => Bigram },
/// }
///
/// #[derive(serde::Deserialize, JsonSchema)]
/// pub struct Config {
///     /// Channels of the residual stream.
///     hidden: usize,
///     vocab: usize,
/// }
///
/// /// The next token from the last one alone.
/// pub struct Bigram(Config);
///
/// impl Configure for Bigram {
///     type Config = Config;
///     const SUMMARY: &'static str = "an embedding and its transpose";
///     fn new(config: Config) -> Result<Bigram> {
///         Ok(Bigram(config))
///     }
/// }
///
/// impl Provider for Bigram {
///     fn plan(&self) -> Result<ModelPlan> {
///         let mut plan = ModelPlan::default();
///         plan.axes = vec![Axis::new("hidden", self.0.hidden), Axis::new("vocab", self.0.vocab)];
///         let block = plan.add_block(Block::new("embedding", "embedding"));
///         let dims = [Layout::axis("vocab", 1), Layout::axis("hidden", 1)];
///         plan.add_param(Param::new("embedding.weight", block, dims, Init::Normal { std: 0.02 }));
///         let port = |name: &str, direction, kind| Port { name: name.into(), direction, kind, channels: None };
///         plan.ports.push(port("tokens", Direction::Input, PortKind::TokenIds));
///         plan.ports.push(port("logits", Direction::Output, PortKind::LanguageModel));
///         Ok(plan)
///     }
///     fn build(&self, _: &Stage) -> Result<Box<dyn Module>> {
///         Ok(Box::new(Built { embedding: ParamId(0) }))
///     }
/// }
///
/// struct Built {
///     embedding: ParamId,
/// }
///
/// impl Module for Built {
///     fn forward(&self, cx: &Cx) -> Result<()> {
///         let x = cx.embedding("embedding", self.embedding, cx.batch("tokens")?)?;
///         cx.output_language_model("logits", x, self.embedding)
///     }
/// }
/// ```
///
/// Sections, in this order; all but `name` may be left out:
///
/// - `version: "1.2.3"`, the crate's by default.
/// - `models`, `elastifiers`, `hooks`: name => type, in braces.
/// - `custom_ops: [MyOperator]`, types that implement [`CustomOp`].
/// - `operators: [ops::Linear, ops::RmsNorm]`, what the plugin cannot do without; every operator of API 1.0 by default.
#[macro_export]
macro_rules! export_plugin {
    (
        name: $name:expr
        $(, version: $version:expr)?
        $(, models: { $($model:expr => $model_ty:ty),* $(,)? })?
        $(, elastifiers: { $($elastifier:expr => $elastifier_ty:ty),* $(,)? })?
        $(, hooks: { $($hooks:expr => $hooks_ty:ty),* $(,)? })?
        $(, custom_ops: [ $($custom:ty),* $(,)? ])?
        $(, operators: [ $($op:ty),* $(,)? ])?
        $(,)?
    ) => {
        /// The plugin as a type, for loading it without a library in tests.
        pub struct GantryPlugin;

        impl $crate::abi::plugin::Plugin for GantryPlugin {
            const NAME: &'static str = $name;
            const VERSION: &'static str = $crate::__first!($($version,)? env!("CARGO_PKG_VERSION"));
            const OPERATORS: &'static [$crate::abi::hello::NeededOperator] = $crate::__first!(
                $(&[$($crate::abi::hello::needs::<$op>()),*],)?
                &$crate::abi::hello::DEFAULT_NEEDS
            );
            const ENTRIES: &'static [$crate::abi::plugin::Entry] = &[
                $($($crate::abi::plugin::Entry::model::<$model_ty>($model),)*)?
                $($($crate::abi::plugin::Entry::elastifier::<$elastifier_ty>($elastifier),)*)?
                $($($crate::abi::plugin::Entry::hooks::<$hooks_ty>($hooks),)*)?
                $($($crate::abi::plugin::Entry::operator::<$custom>(),)*)?
            ];
        }

        #[allow(unsafe_code)]
        const _: () = {
            use $crate::abi::{__private, hello, plugin, plugin::Plugin, tables};

            #[unsafe(export_name = "gantry_hello")]
            static HELLO: hello::Hello = hello::Hello::new(
                GantryPlugin::NAME,
                GantryPlugin::VERSION,
                if cfg!(panic = "abort") { hello::PanicStrategy::Abort } else { hello::PanicStrategy::Unwind },
                GantryPlugin::OPERATORS,
            );

            #[unsafe(export_name = "gantry_root_module")]
            static ROOT_MODULE: __private::LibHeader = {
                // SAFETY: `erased_module` constructs the table this header is typed with.
                unsafe {
                    __private::LibHeader::from_constructor::<tables::PluginTableRef>(
                        plugin::erased_module::<GantryPlugin>,
                        __private::CheckTypeLayout::Yes,
                    )
                }
            };
        };
    };
}

/// The first of its arguments.
#[doc(hidden)]
#[macro_export]
macro_rules! __first {
    ($first:expr $(, $rest:expr)*) => {
        $first
    };
}
