//! Panics of the library's code: caught without output and turned into their text.
//!
//! Rust's default hook prints to standard error, which belongs to the host. The library's hook
//! records the text of a panic inside the library for [`catch`], and passes every other panic
//! to the previous hook.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};

use once_cell::sync::OnceCell;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static TEXT: RefCell<String> = const { RefCell::new(String::new()) };
}

static HOOK: OnceCell<()> = OnceCell::new();

/// Installs the hook, once for the process. The model checker has a hook of its own.
fn install_hook() {
    if cfg!(feature = "shuttle") {
        return;
    }
    HOOK.get_or_init(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let ours = DEPTH.try_with(|d| d.get() > 0).unwrap_or(false);
            if !ours {
                return before(info);
            }
            let text = info.to_string();
            let _ = TEXT.try_with(|t| t.try_borrow_mut().map(|mut t| *t = text));
        }));
    });
}

/// Runs `body` and returns the text of a panic inside it.
#[inline]
pub fn catch<R>(body: impl FnOnce() -> R) -> Result<R, String> {
    install_hook();
    DEPTH.with(|d| d.set(d.get() + 1));
    let result = catch_unwind(AssertUnwindSafe(body));
    DEPTH.with(|d| d.set(d.get() - 1));
    result.map_err(take_text)
}

/// Whether this thread unwinds from a panic now.
#[inline]
pub fn unwinding() -> bool {
    std::thread::panicking()
}

#[cold]
fn take_text(payload: Box<dyn std::any::Any + Send>) -> String {
    // Dropping any other payload would run unknown code that may panic again.
    if !payload.is::<String>() && !payload.is::<&'static str>() {
        std::mem::forget(payload);
    }
    TEXT.with(|t| std::mem::take(&mut *t.borrow_mut()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn catch_returns_the_text_of_a_panic() {
        let error = catch(|| panic!("planted {}", 7)).err();
        assert!(error.is_some_and(|text| text.contains("planted 7")));
        assert_eq!(catch(|| 3), Ok(3));
    }
}
