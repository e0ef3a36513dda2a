//! The log sink: the one thing that is global. Inside, code uses the `log`
//! crate; outside, the host hears it through a callback it has set.

use std::sync::atomic::{AtomicBool, Ordering};

use log::{Level, LevelFilter, Log, Metadata, Record};
use once_cell::sync::OnceCell;

use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;

/// Longest message that is passed on; the rest is cut at a character boundary.
pub const MAX_MESSAGE_BYTES: usize = 2048;

/// Where messages go.
pub type Sink = Arc<dyn Fn(Level, &str, &str) + Send + Sync>;

static SINK: parking_lot::RwLock<Option<Sink>> = parking_lot::RwLock::new(None);
static INSTALLED: OnceCell<bool> = OnceCell::new();
/// Set when the process is a Rust host that has its own logger: then its logger
/// receives everything and the sink is refused.
static FOREIGN_LOGGER: AtomicBool = AtomicBool::new(false);

struct Forward;

impl Log for Forward {
    fn enabled(&self, _: &Metadata) -> bool {
        true
    }

    fn log(&self, record: &Record) {
        // The sink is cloned out: it runs under no lock and may set another one.
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

/// Sets or clears the sink and the most detailed level that reaches it.
pub fn set(sink: Option<Sink>, level: LevelFilter) -> Result<()> {
    let ours = *INSTALLED.get_or_init(|| {
        let ours = log::set_logger(&Forward).is_ok();
        FOREIGN_LOGGER.store(!ours, Ordering::Relaxed);
        ours
    });
    if !ours {
        return Err(Error::new(
            Status::State,
            "this program has installed a logger of the log crate; messages go there",
        ));
    }
    let mut slot = SINK.write();
    log::set_max_level(if sink.is_some() { level } else { LevelFilter::Off });
    let before = std::mem::replace(&mut *slot, sink);
    drop(slot);
    drop(before); // outside the lock: it may run the caller's destroy
    Ok(())
}
