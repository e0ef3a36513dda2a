//! Events: the engine's word that its memory may be touched.

use crate::base::fork;
use crate::base::sync::Arc;
use crate::ffi::abi::{capi, enter, free, insert, inspect, known_flags, noun, require};
use crate::ffi::error::kvt_error_t;
use crate::ffi::status::kvt_status_t;
use crate::store::ready_event::{Ready, Word};

/// A moment that comes once: memory is ready. Moves wait for it (kvt_transfer_t.ready).
/// Internally locked: any thread may use it.
pub struct kvt_event_t(());

/// It has not come yet.
pub const KVT_EVENT_PENDING: u32 = 0;
/// It has come.
pub const KVT_EVENT_SIGNALLED: u32 = 1;

/// An event; what waits for one that goes without a word does not begin.
pub(crate) struct EventNoun(pub(crate) Arc<Ready>);

impl Drop for EventNoun {
    fn drop(&mut self) {
        self.0.take_back();
    }
}

noun!(EventNoun, kvt_event_t, 13, "event");

/// Opens an event that the program signals itself. It needs no runtime; moves of any
/// store may wait for it.
///
/// @param flags  None are defined yet: 0.
/// @param out    The event, pending; close it with kvt_event_close.
/// @param err    Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the event. Threading: any thread, also in callbacks.
/// Since 0.1.
///
/// # Safety
/// Pointers are null or valid.
#[capi]
pub unsafe extern "C" fn kvt_event_open(
    flags: u64,
    out: *mut *mut kvt_event_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    fork::check()?;
    require(out)?;
    known_flags(flags, 0)?;
    out.write(insert(EventNoun(Arc::default()))?);
    Ok(())
}

/// Signals an event: it has come, for good. Moves that wait for it begin. Never
/// waits; of one that has come already nothing changes.
///
/// @param event  The event.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// None beyond the handle.
#[capi]
pub unsafe extern "C" fn kvt_event_signal(event: *const kvt_event_t) -> kvt_status_t {
    let event = enter(event)?;
    event.0.give();
    Ok(())
}

/// Whether an event has come.
///
/// @param event      The event.
/// @param out_state  KVT_EVENT_*.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `out_state` is null or valid for a write.
#[capi]
pub unsafe extern "C" fn kvt_event_query(
    event: *const kvt_event_t,
    out_state: *mut u32,
) -> kvt_status_t {
    require(out_state)?;
    let event = inspect(event)?;
    let has_come = event.0.word() == Some(Word::Given);
    let state = if has_come { KVT_EVENT_SIGNALLED } else { KVT_EVENT_PENDING };
    out_state.write(state);
    Ok(())
}

/// Closes an event. Moves that wait for one that has not come end with
/// KVT_E_CANCELLED, and have touched nothing.
///
/// @param event  Pointer to the handle, cleared on success; null, or a null
///               handle, is fine.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `event` is null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_event_close(event: *mut *mut kvt_event_t) -> kvt_status_t {
    free(event, |_| Ok(()))
}
