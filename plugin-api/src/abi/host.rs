//! The host's half of a call: from the `extern "C"` table back to `&mut dyn HostCalls`.
//!
//! A [`HostObject`] is leaked, one per rank and provider, so a handle to it is valid for ever; what it points to is
//! there only while the host is inside [`HostObject::visit`]. A handle used after its visit, from another thread or
//! from inside a host function gets an error.

use super::guard::{catch, install_quiet_hook, protect};
use super::tables::{HostTable, HostTableRef, ParBody};
use super::types::{Ctx, MAX_OUTPUTS, RawCall, RawOutputs, Reply};
use crate::ops::{RegionKind, Role};
use crate::sdk::{Cx, Error, ErrorKind, HostCalls, LogLevel, OpCall, Outputs, RegionEntry, Result, TensorRef};
use abi_stable::prefix_type::WithMetadata;
use abi_stable::std_types::{RErr, ROk, ROption, RSlice, RStr, RString};
use smallvec::SmallVec;
use std::cell::{RefCell, UnsafeCell};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

/// Values one visit may record before it is taken for a loop without end; large models record some thousands.
const VALUE_LIMIT: u64 = 1 << 16;

/// What a provider's calls go to. See the module's page.
pub struct HostObject {
    name: String,
    /// Token of the thread inside `visit`; 0: none.
    thread: AtomicUsize,
    /// Number of the running or last visit, unique in the process.
    visit: AtomicU64,
    /// Touched only by the thread whose token is in `thread`.
    state: UnsafeCell<State>,
}

struct State {
    /// Taken out while a host function runs.
    calls: Option<NonNull<dyn HostCalls>>,
    recorded: u64,
    /// A failure after which the recording is worthless even if the provider goes on.
    failure: Option<Error>,
}

// SAFETY: `state` is read and written only by the thread that won the exchange on `thread` in `visit`, until it resets it.
unsafe impl Sync for HostObject {}

/// A number of the calling thread, unique among living threads.
fn thread_token() -> usize {
    thread_local!(static TOKEN: u8 = const { 0 });
    TOKEN.with(|t| std::ptr::from_ref(t) as usize)
}

impl HostObject {
    /// A new object under the name of the provider it is for, never freed.
    pub fn leak(name: impl Into<String>) -> &'static HostObject {
        install_quiet_hook();
        let state = State { calls: None, recorded: 0, failure: None };
        Box::leak(Box::new(HostObject {
            name: name.into(),
            thread: AtomicUsize::new(0),
            visit: AtomicU64::new(0),
            state: UnsafeCell::new(state),
        }))
    }

    /// Runs `f`, during which handles made from the given [`Ctx`] reach `calls`.
    pub fn visit<R>(&'static self, calls: &mut dyn HostCalls, f: impl FnOnce(Ctx) -> Result<R>) -> Result<R> {
        static VISITS: AtomicU64 = AtomicU64::new(1);
        if self.thread.compare_exchange(0, thread_token(), Ordering::Acquire, Ordering::Relaxed).is_err() {
            return Err(Error::plugin(format!("{} is already being called", self.name)));
        }
        let _leave = Leave(self);
        let visit = VISITS.fetch_add(1, Ordering::Relaxed);
        self.visit.store(visit, Ordering::Relaxed);
        // SAFETY: only the lifetime changes; the pointer is dropped by `Leave` before the borrow ends.
        let calls: NonNull<dyn HostCalls> =
            unsafe { std::mem::transmute::<NonNull<dyn HostCalls + '_>, NonNull<dyn HostCalls>>(NonNull::from(calls)) };
        // SAFETY: this thread holds `thread`.
        unsafe { *self.state.get() = State { calls: Some(calls), recorded: 0, failure: None } };
        let result = f(Ctx { object: std::ptr::from_ref(self).cast(), visit });
        // SAFETY: as above, and no host function is running any more.
        match unsafe { (*self.state.get()).failure.take() } {
            Some(failure) => Err(failure),
            None => result,
        }
    }

    /// The object of a handle, if the handle may be used here and now.
    fn of(ctx: Ctx) -> Result<&'static HostObject> {
        // SAFETY: a non-null `object` was made by `visit`; objects are never freed.
        let Some(object) = (unsafe { ctx.object.cast::<HostObject>().as_ref() }) else {
            return Err(Error::plugin("a host function was called outside of forward"));
        };
        match object.thread.load(Ordering::Relaxed) {
            0 => Err(Error::plugin(format!("{}: a host function was called outside of forward", object.name))),
            t if t != thread_token() => Err(Error::plugin(format!(
                "{}: a host function was called from another thread, or with another rank's handle; only the thread \
                 that entered forward may record",
                object.name
            ))),
            _ if object.visit.load(Ordering::Relaxed) != ctx.visit => Err(Error::plugin(format!(
                "{}: a Cx of an earlier call was used; use the one this call was given",
                object.name
            ))),
            _ => Ok(object),
        }
    }

    /// Runs `f` on the host's functions.
    fn with<R>(ctx: Ctx, f: impl FnOnce(&mut dyn HostCalls, &mut Meter) -> Result<R>) -> Result<R> {
        let object = HostObject::of(ctx)?;
        // SAFETY: `of` has seen that this thread is the one inside `visit`; the reference ends before `f` runs.
        let (pointer, mut meter) = unsafe {
            let state = &mut *object.state.get();
            (state.calls.take(), Meter { recorded: state.recorded })
        };
        let Some(mut pointer) = pointer else {
            return Err(Error::plugin(format!("{}: a host function was called from inside another", object.name)));
        };
        // SAFETY: `visit` borrows the pointee mutably until it returns, and taking the pointer out keeps it unique.
        let result = catch("the host", || f(unsafe { pointer.as_mut() }, &mut meter));
        // SAFETY: still the same thread, and `f` is over.
        let state = unsafe { &mut *object.state.get() };
        state.calls = Some(pointer);
        state.recorded = meter.recorded;
        if let Err(e) = &result
            && (e.kind == ErrorKind::Panic || meter.recorded > VALUE_LIMIT)
            && state.failure.is_none()
        {
            state.failure = Some(e.clone());
        }
        result
    }
}

/// Counts recorded values.
struct Meter {
    recorded: u64,
}

impl Meter {
    fn count(&mut self, values: usize, path: &str) -> Result<()> {
        self.recorded += values as u64;
        if self.recorded > VALUE_LIMIT {
            return Err(Error::plugin(format!(
                "more than {VALUE_LIMIT} values recorded, at \"{path}\": does forward loop without end?"
            )));
        }
        Ok(())
    }
}

struct Leave(&'static HostObject);

impl Drop for Leave {
    fn drop(&mut self) {
        // SAFETY: this thread still holds `thread`.
        unsafe { (*self.0.state.get()).calls = None };
        self.0.thread.store(0, Ordering::Release);
    }
}

/// Runs `f` with a [`Cx`] straight over `calls`, through the same table a library would use: for tests, and for
/// forwards that live in the host.
pub fn with_cx<R>(calls: &mut dyn HostCalls, f: impl FnOnce(&Cx) -> Result<R>) -> Result<R> {
    thread_local!(static SPARE: RefCell<Vec<&'static HostObject>> = const { RefCell::new(Vec::new()) });
    let object = SPARE.with(|s| s.borrow_mut().pop()).unwrap_or_else(|| HostObject::leak("host"));
    let result = object.visit(calls, |ctx| f(&Cx::new(ctx, host_table())));
    SPARE.with(|s| s.borrow_mut().push(object));
    result
}

/// What works from any thread and outside of any call.
#[derive(Clone, Copy)]
pub struct Services {
    /// Level, target, message.
    pub log: fn(LogLevel, &str, &str),
    /// Items, grain, body(begin, end).
    pub par_for: fn(u64, u64, &(dyn Fn(u64, u64) + Sync)),
}

static SERVICES: OnceLock<Services> = OnceLock::new();

/// Sets the process's services; the first call counts. Without it logs are dropped and loops run on the caller.
pub fn set_services(services: Services) {
    let _ = SERVICES.set(services);
}

fn services() -> Services {
    fn log(_: LogLevel, _: &str, _: &str) {}
    fn par_for(items: u64, grain: u64, body: &(dyn Fn(u64, u64) + Sync)) {
        let grain = grain.max(1);
        (0..items.div_ceil(grain)).for_each(|i| body(i * grain, ((i + 1) * grain).min(items)));
    }
    SERVICES.get().copied().unwrap_or(Services { log, par_for })
}

extern "C" fn call(ctx: Ctx, raw: &RawCall<'_>, out: &mut RawOutputs) -> Reply<()> {
    reply(HostObject::with(ctx, |host, meter| {
        let call = OpCall {
            op: raw.op,
            version: raw.version,
            path: raw.path.as_str(),
            attrs: raw.attrs.as_slice(),
            inputs: raw.inputs.as_slice(),
        };
        let mut outputs = Outputs::new();
        host.call(call, &mut outputs)?;
        meter.count(outputs.len(), call.path)?;
        let Some(room) = out.items.get_mut(..outputs.len()) else {
            let n = outputs.len();
            return Err(Error::plugin(format!("\"{}\" gives {n} tensors, at most {MAX_OUTPUTS} fit", call.path)));
        };
        room.copy_from_slice(&outputs);
        out.len = outputs.len() as u32;
        Ok(())
    }))
}

extern "C" fn param(ctx: Ctx, index: u32) -> Reply<TensorRef> {
    reply(HostObject::with(ctx, |host, _| host.param(index)))
}

extern "C" fn buffer(ctx: Ctx, index: u32) -> Reply<TensorRef> {
    reply(HostObject::with(ctx, |host, _| host.buffer(index)))
}

extern "C" fn region_begin(ctx: Ctx, path: RStr<'_>, kind: u32, layer: ROption<u32>) -> Reply<bool> {
    reply(HostObject::with(ctx, |host, meter| {
        let kind = RegionKind::from_u32(kind).ok_or_else(|| {
            Error::plugin(format!("region \"{path}\" is of kind {kind}, which this host does not know"))
        })?;
        meter.count(1, &path)?;
        Ok(host.region_begin(&path, kind, layer.into_option())? == RegionEntry::Enter)
    }))
}

extern "C" fn region_end(ctx: Ctx) -> Reply<()> {
    reply(HostObject::with(ctx, |host, _| host.region_end()))
}

extern "C" fn role(ctx: Ctx, role: u32, tensor: TensorRef) -> Reply<TensorRef> {
    reply(HostObject::with(ctx, |host, _| {
        let role = Role::from_u32(role)
            .ok_or_else(|| Error::plugin(format!("role number {role} is not known to this host")))?;
        host.role(role, tensor)
    }))
}

extern "C" fn step_input(ctx: Ctx, name: RStr<'_>) -> Reply<TensorRef> {
    reply(HostObject::with(ctx, |host, _| host.step_input(&name)))
}

extern "C" fn batch_input(ctx: Ctx, port: RStr<'_>) -> Reply<TensorRef> {
    reply(HostObject::with(ctx, |host, _| host.batch_input(&port)))
}

extern "C" fn output(ctx: Ctx, port: RStr<'_>, tensors: RSlice<'_, TensorRef>) -> Reply<()> {
    reply(HostObject::with(ctx, |host, _| host.output(&port, &tensors)))
}

extern "C" fn metric(ctx: Ctx, name: RStr<'_>, tensor: TensorRef) -> Reply<()> {
    reply(HostObject::with(ctx, |host, _| host.metric(&name, tensor)))
}

extern "C" fn describe(ctx: Ctx, tensor: TensorRef) -> Reply<RString> {
    reply(HostObject::with(ctx, |host, _| {
        let desc = host.describe(tensor)?;
        let json = serde_json::to_string(&desc).map_err(|e| Error::plugin(e.to_string()))?;
        Ok(json.into())
    }))
}

extern "C" fn unflatten(ctx: Ctx, tensor: TensorRef, names: RSlice<'_, RStr<'_>>) -> Reply<TensorRef> {
    reply(HostObject::with(ctx, |host, _| {
        let names: SmallVec<[&str; 8]> = names.iter().map(RStr::as_str).collect();
        host.unflatten(tensor, &names)
    }))
}

extern "C" fn log(ctx: Ctx, level: u32, target: RStr<'_>, message: RStr<'_>) {
    let level = LogLevel::from_u32(level);
    // A panic in a subscriber has nowhere to go.
    let _ = catch("log", || {
        // SAFETY: a non-null object was made by `visit`; objects are never freed.
        let object = unsafe { ctx.object.cast::<HostObject>().as_ref() };
        let target = match object {
            Some(object) if target.is_empty() => object.name.as_str(),
            _ => target.as_str(),
        };
        let here = HostObject::with(ctx, |host, _| {
            host.log(level, target, &message);
            Ok(())
        });
        if here.is_err() {
            (services().log)(level, target, &message);
        }
        Ok(())
    });
}

struct Shared(ParBody);
// SAFETY: the SDK's `par_for` only passes a pointer to a `Fn + Sync` closure that outlives the loop.
unsafe impl Sync for Shared {}

impl Shared {
    fn run(&self, begin: u64, end: u64) -> Reply<()> {
        (self.0.run)(self.0.data, begin, end)
    }
}

extern "C" fn par_for(items: u64, grain: u64, body: ParBody) -> Reply<()> {
    protect("par_for", || {
        let body = Shared(body);
        let failure = Mutex::new(None);
        (services().par_for)(items, grain.max(1), &|begin, end| {
            if let RErr(e) = body.run(begin, end)
                && let Ok(mut first) = failure.lock()
            {
                first.get_or_insert(Error::from(e));
            }
        });
        match failure.into_inner() {
            Ok(Some(e)) => Err(e),
            _ => Ok(()),
        }
    })
}

#[cfg(feature = "grown")]
extern "C" fn recorded(ctx: Ctx) -> Reply<u64> {
    reply(HostObject::with(ctx, |_, meter| Ok(meter.recorded)))
}

fn reply<T>(result: Result<T>) -> Reply<T> {
    match result {
        Ok(value) => ROk(value),
        Err(e) => RErr(e.into()),
    }
}

struct Table;

impl Table {
    abi_stable::staticref!(const VALUE: WithMetadata<HostTable> = WithMetadata::new(HostTable {
        call,
        param,
        buffer,
        region_begin,
        region_end,
        role,
        step_input,
        batch_input,
        output,
        metric,
        describe,
        unflatten,
        log,
        par_for,
        #[cfg(feature = "grown")]
        recorded,
    }));
}

/// The host's table.
pub fn host_table() -> HostTableRef {
    HostTableRef(Table::VALUE.as_prefix())
}
