//! What changed in a store, for routers that want to know where a prefix is.

use crate::fail;
use crate::ffi::abi::{Plain, Strided, capi, enter, inspect, put, require};
use crate::ffi::error::kvt_error_t;
use crate::ffi::namespace_look::MAX_ROWS;
use crate::ffi::op::{begin_one, kvt_op_t, kvt_submit_opts_t};
use crate::ffi::status::kvt_status_t;
use crate::ffi::store::kvt_store_t;
use crate::store::events::{Event, Kind};

/// A whole chunk has come to a tier.
pub const KVT_STORE_STORED: u32 = 1;
/// A chunk is whole in a tier no more.
pub const KVT_STORE_REMOVED: u32 = 2;
/// Nothing of a namespace is left in any tier (kvt_namespace_clear).
pub const KVT_STORE_CLEARED: u32 = 3;

const _: () = assert!(KVT_STORE_STORED == Kind::Stored as u32);
const _: () = assert!(KVT_STORE_REMOVED == Kind::Removed as u32);
const _: () = assert!(KVT_STORE_CLEARED == Kind::Cleared as u32);

/// Events that are read while the lock is held.
const GROUP: usize = 32;

/// Something that changed. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_store_event_t {
    /// Its number: each has the one after that of the event before it.
    pub number: u64,
    /// When, CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// KVT_STORE_STORED, KVT_STORE_REMOVED or KVT_STORE_CLEARED. There may be others
    /// one day: pass them by.
    pub kind: u32,
    /// Which tier, KVT_TIER_*; 0 with KVT_STORE_CLEARED.
    pub tier: u32,
    /// Tokens of the chunk.
    pub tokens: u32,
    /// Which chunk of its sequence it is, from 0.
    pub position: u32,
    /// Its key.
    pub key: [u8; 32],
    /// The key before it in its sequence: the namespace's for the first.
    pub parent: [u8; 32],
    /// The namespace's key.
    pub namespace_key: [u8; 32],
}

fn outward(event: &Event) -> kvt_store_event_t {
    let Event { number, at_ns, kind, tier, tokens, position, key, parent, namespace } = *event;
    kvt_store_event_t {
        number,
        at_ns,
        kind,
        tier,
        tokens,
        position,
        key,
        parent,
        namespace_key: namespace,
    }
}

/// Reads what changed in a store, the oldest first. The store keeps the newest events
/// (`events` of its spec) for any number of readers; one that is too slow hears how
/// many it has missed, and asks kvt_namespace_lookup or _exists.
///
/// @param store         The store.
/// @param cursor        In: the number of the first event that is wanted, 0 at the
///                      start, UINT64_MAX for those to come. Out: that of the next
///                      call.
/// @param events        Receives them.
/// @param capacity      Room there, in entries, at most 2^24; 0 = only move the cursor
///                      to what is still known.
/// @param stride_bytes  sizeof(kvt_store_event_t).
/// @param out_count     How many were written.
/// @param out_missed    How many between cursor and the next call's were lost; may be
///                      null.
/// @return KVT_OK, also when there is none; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `events` is valid for `capacity` * `stride_bytes`.
#[capi]
pub unsafe extern "C" fn kvt_store_events(
    store: *const kvt_store_t,
    cursor: *mut u64,
    events: *mut kvt_store_event_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
    out_missed: *mut u64,
) -> kvt_status_t {
    require(out_count)?;
    if cursor.is_null() || !cursor.is_aligned() {
        fail!(Invalid, "the cursor is null or not aligned");
    }
    let (rows, first) = (Strided::new(events, capacity, stride_bytes, MAX_ROWS)?, cursor.read());
    let (mut at, mut written, mut missed) = (first, 0, 0);
    let store = inspect(store)?;
    let mut group = [Event::default(); GROUP];
    loop {
        let room = (rows.len() - written).min(GROUP);
        let Some(part) = group.get_mut(..room) else { break };
        let (count, lost, next) = store.store.look(|core| {
            let (count, lost) = core.events.read(at, part);
            (count, lost, core.events.next_number())
        })?;
        for (i, event) in part.iter().take(count).enumerate() {
            rows.put(written + i, &outward(event));
        }
        (written, missed) = (written + count, missed + lost);
        at = at.min(next).saturating_add(lost).saturating_add(count as u64);
        if count == 0 || written == rows.len() {
            break;
        }
    }
    cursor.write(at);
    out_count.write(written as u64);
    put(out_missed, missed);
    Ok(())
}

/// Begins an op that ends when there is an event to read: one with the number `from`, or a later
/// one. Never waits. The op's value is how many there are; more may have come when they are read.
/// Its queue is the descriptor (kvt_queue_fd) or the callback by which a reader is woken. One that
/// was woken reads all (kvt_store_events), and watches again from where that has left its cursor.
///
/// @param store   The store.
/// @param from    The number of the first event that is wanted, as kvt_store_events has left it
///                in its cursor; UINT64_MAX for the next one to come.
/// @param opts    Queue, tag, deadline; null for defaults.
/// @param op_out  Receives the op; null with a queue to be told by that alone.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_AGAIN (1,024 watches wait, as many ops are under way as may be, or the
///         queue is full), KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the op. A store that is closed ends it with KVT_E_CANCELLED.
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `opts` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_store_watch(
    store: *const kvt_store_t,
    from: u64,
    opts: *const kvt_submit_opts_t,
    op_out: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    begin_one(opts, op_out, |opts| enter(store)?.store.watch(from, opts))
}
