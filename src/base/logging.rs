//! The log callback, which is global to the process. The library logs through the `log` crate;
//! the host receives messages through the callback that it has set.

use std::sync::atomic::{AtomicBool, Ordering};

use log::{Level, LevelFilter, Log, Metadata, Record};
use once_cell::sync::OnceCell;

use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;

/// Longest message; the rest is cut at a character boundary.
pub const MAX_MESSAGE_BYTES: usize = 2048;

/// Receives level, target and text of a message.
pub type Sink = Arc<dyn Fn(Level, &str, &str) + Send + Sync>;

static SINK: parking_lot::RwLock<Option<Sink>> = parking_lot::RwLock::new(None);
static INSTALLED: OnceCell<bool> = OnceCell::new();
/// Set in a Rust host that has installed its own logger. That logger receives all messages,
/// and a callback is refused.
static FOREIGN_LOGGER: AtomicBool = AtomicBool::new(false);

struct Forward;

impl Log for Forward {
    fn enabled(&self, _: &Metadata) -> bool {
        true
    }

    fn log(&self, record: &Record) {
        // The sink is cloned: it runs without a lock and may set another one.
        let Some(sink) = SINK.read().clone() else { return };
        let mut text = record.args().to_string();
        if text.len() > MAX_MESSAGE_BYTES {
            let cut = (0..=MAX_MESSAGE_BYTES).rev().find(|i| text.is_char_boundary(*i));
            text.truncate(cut.unwrap_or(0));
        }
        sink(record.level(), record.target(), &text);
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
