//! Panics stop at the boundary and become errors of kind [`ErrorKind::Panic`].
//!
//! A library has its own copy of the standard library and therefore its own panic hook: each side installs the quiet
//! hook here once. It prints nothing for a panic that will be caught at the boundary (unless `RUST_BACKTRACE` asks),
//! but keeps message and place for the error; panics elsewhere go to the hook that was there before.

use super::types::Reply;
use crate::sdk::{Error, ErrorKind, Result};
use abi_stable::std_types::{RErr, ROk};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static LAST_PLACE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Installs the quiet hook, once per copy of the standard library.
pub fn install_quiet_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = panic::take_hook();
        let verbose = std::env::var_os("RUST_BACKTRACE").is_some_and(|v| v != "0");
        panic::set_hook(Box::new(move |info| {
            // A thread that is being torn down has no cells left; then the earlier hook speaks.
            let caught = DEPTH.try_with(|d| d.get() > 0).unwrap_or(false);
            if caught {
                let place = info.location().map(|l| format!("{}:{}", l.file(), l.line()));
                let _ = LAST_PLACE.try_with(|last| *last.borrow_mut() = place);
            }
            if !caught || verbose {
                before(info);
            }
        }));
    });
}

struct Depth;

impl Depth {
    fn enter() -> Depth {
        DEPTH.with(|d| d.set(d.get() + 1));
        Depth
    }
}

impl Drop for Depth {
    fn drop(&mut self) {
        DEPTH.with(|d| d.set(d.get() - 1));
    }
}

/// Runs `f`; a panic in it becomes an error that names `what`.
pub fn catch<T>(what: &str, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let _depth = Depth::enter();
    // The state behind `f` is not looked at again after a panic: the recording or the object it belongs to is given up.
    match panic::catch_unwind(AssertUnwindSafe(f)) {
        Ok(result) => result,
        Err(payload) => {
            let place = LAST_PLACE.with(|last| last.borrow_mut().take());
            let message = message_of(payload);
            let place = place.map(|p| format!(" ({p})")).unwrap_or_default();
            Err(Error::new(ErrorKind::Panic, format!("panicked in {what}: {message}{place}")))
        }
    }
}

/// [`catch`] with the result as it crosses the boundary.
pub fn protect<T>(what: &str, f: impl FnOnce() -> Result<T>) -> Reply<T> {
    match catch(what, f) {
        Ok(value) => ROk(value),
        Err(e) => RErr(e.into()),
    }
}

fn message_of(payload: Box<dyn Any + Send>) -> String {
    let text = if let Some(s) = payload.downcast_ref::<&str>() {
        (*s).to_owned()
    } else if let Some(s) = payload.downcast_ref::<String>() {
        s.clone()
    } else {
        "a value that is not text".to_owned()
    };
    // Dropping a foreign payload may itself panic, outside of any net.
    std::mem::forget(payload);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error_with_message_and_place() {
        install_quiet_hook();
        let e = catch::<()>("forward", || panic!("no such layer: {}", 7)).unwrap_err();
        assert_eq!(e.kind, ErrorKind::Panic);
        assert!(e.message.starts_with("panicked in forward: no such layer: 7 ("), "{e}");
        assert!(e.message.contains("guard.rs:"), "{e}");
    }

    #[test]
    fn a_payload_that_panics_when_dropped_does_not_get_out() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("again");
            }
        }
        install_quiet_hook();
        let e = catch::<()>("release", || panic::panic_any(Bomb)).unwrap_err();
        assert!(e.message.contains("not text"), "{e}");
    }
}
