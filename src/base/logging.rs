//! The log callback, which is global to the process. The library logs through the `log` crate;
//! the host receives messages through the callback that it has set.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, Ordering};

use log::{Level, LevelFilter, Log, Metadata, Record};
use once_cell::sync::OnceCell;

use crate::base::status::{Error, Result, Status};
use crate::base::sync::{self, Arc};

/// Longest message; the rest is cut at a character boundary.
pub const MAX_MESSAGE_BYTES: usize = 2048;

/// Receives level, target and text of a message.
pub type Sink = Arc<dyn Fn(Level, &str, &str) + Send + Sync>;

static SINK: parking_lot::RwLock<Option<Sink>> = parking_lot::RwLock::new(None);
static INSTALLED: OnceCell<bool> = OnceCell::new();
/// Set in a Rust host that has installed its own logger. That logger receives all messages,
/// and a callback is refused.
static FOREIGN_LOGGER: AtomicBool = AtomicBool::new(false);

/// Most messages of a thread that wait for the release of its locks. Further ones are dropped, and
/// one message says so.
const MAX_DEFERRED: usize = 64;

/// A message that was logged under a lock.
struct Message {
    level: Level,
    target: String,
    text: String,
}

thread_local! {
    static HAS_DEFERRED: Cell<bool> = const { Cell::new(false) };
    static DEFERRED: RefCell<Vec<Message>> = const { RefCell::new(Vec::new()) };
}

fn defer(message: Message) {
    // try_with: destructors of other thread-locals may log.
    let _ = DEFERRED.try_with(|deferred| {
        let mut deferred = deferred.borrow_mut();
        match deferred.len() {
            0..MAX_DEFERRED => deferred.push(message),
            MAX_DEFERRED => deferred.push(Message {
                level: Level::Warn,
                target: module_path!().to_string(),
                text: format!("log messages were dropped: more than {MAX_DEFERRED} under a lock"),
            }),
            _ => {}
        }
        HAS_DEFERRED.set(true);
    });
}

/// Whether this thread has messages that wait for the release of its locks.
pub fn has_deferred() -> bool {
    HAS_DEFERRED.try_with(Cell::get).unwrap_or(false)
}

/// Delivers the messages that this thread logged under locks. It holds none now.
pub fn deliver_deferred() {
    // A panic that unwinds through a guard must not meet another one in a callback.
    if !has_deferred() || std::thread::panicking() {
        return;
    }
    HAS_DEFERRED.set(false);
    let messages = DEFERRED.try_with(RefCell::take).unwrap_or_default();
    for message in messages {
        deliver(message.level, &message.target, &message.text);
    }
}

fn deliver(level: Level, target: &str, text: &str) {
    // The sink is cloned: it runs without a lock and may set another one.
    let sink = SINK.read().clone();
    if let Some(sink) = sink {
        sink(level, target, text);
    }
}

struct Forward;

impl Log for Forward {
    fn enabled(&self, _: &Metadata) -> bool {
        true
    }

    fn log(&self, record: &Record) {
        let mut text = record.args().to_string();
        if text.len() > MAX_MESSAGE_BYTES {
            let cut = (0..=MAX_MESSAGE_BYTES).rev().find(|i| text.is_char_boundary(*i));
            text.truncate(cut.unwrap_or(0));
        }
        if sync::is_lock_held() {
            defer(Message { level: record.level(), target: record.target().to_string(), text });
        } else {
            deliver(record.level(), record.target(), &text);
        }
    }

    fn flush(&self) {}
}

/// Sets or clears the sink, and the most detailed level that reaches it.
pub fn set(sink: Option<Sink>, level: LevelFilter) -> Result<()> {
    let ours = *INSTALLED.get_or_init(|| {
        let ours = log::set_logger(&Forward).is_ok();
        FOREIGN_LOGGER.store(!ours, Ordering::Relaxed);
        ours
    });
    if !ours {
        return Err(Error::new(
            Status::State,
            "this program has installed a logger of the log crate, which receives the messages",
        ));
    }
    let mut slot = SINK.write();
    log::set_max_level(if sink.is_some() { level } else { LevelFilter::Off });
    let before = std::mem::replace(&mut *slot, sink);
    drop(slot);
    drop(before); // outside the lock: it may call the caller's destroy function
    Ok(())
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::base::sync::{Condvar, Mutex};

    /// The only test of the library's unit tests that sets the sink.
    #[test]
    fn messages_logged_under_a_lock_arrive_after_its_release() {
        static GOT: parking_lot::Mutex<Vec<(String, bool)>> = parking_lot::Mutex::new(Vec::new());
        let sink: Sink = Arc::new(|_, target: &str, text: &str| {
            if target == "deferred" || text.contains("were dropped") {
                GOT.lock().push((text.to_string(), sync::is_lock_held()));
                assert!(text != "panic", "a callback that panics");
            }
        });
        set(Some(sink), LevelFilter::Warn).expect("no other logger");
        let (outer, inner, condvar) = (Mutex::new(0), Mutex::new(0), Condvar::new());
        let guard = outer.lock();
        let other = inner.lock();
        log::warn!(target: "deferred", "one");
        drop(other);
        log::warn!(target: "deferred", "two");
        assert!(GOT.lock().is_empty());
        drop(guard);
        let texts = || GOT.lock().iter().map(|(text, _)| text.clone()).collect::<Vec<_>>();
        assert_eq!(texts(), ["one", "two"]);
        // A thread that waits under its lock delivers them first, and returns early.
        let mut guard = outer.lock();
        log::warn!(target: "deferred", "three");
        condvar.wait(&mut guard);
        assert_eq!(texts(), ["one", "two", "three"]);
        assert!(sync::is_lock_held());
        // A callback that panics leaves the count of locks as it was.
        log::warn!(target: "deferred", "panic");
        let wait = std::panic::AssertUnwindSafe(|| condvar.wait(&mut guard));
        assert!(std::panic::catch_unwind(wait).is_err() && sync::is_lock_held());
        drop(guard);
        assert!(!sync::is_lock_held());
        for _ in 0..2 * MAX_DEFERRED {
            let guard = outer.lock();
            for _ in 0..2 * MAX_DEFERRED {
                log::warn!(target: "deferred", "many");
            }
            drop(guard);
        }
        assert_eq!(texts().len(), 4 + 2 * MAX_DEFERRED * (MAX_DEFERRED + 1));
        assert!(texts().last().is_some_and(|text| text.contains("were dropped")));
        assert!(GOT.lock().iter().all(|(_, held)| !held));
        set(None, LevelFilter::Off).expect("no other logger");
    }
}
