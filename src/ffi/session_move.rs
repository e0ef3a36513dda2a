//! Moves: the KV of a session from the engine's tensors into the store, and back.

use crate::base::status::{Result, Status};
use crate::fail;
use crate::ffi::abi::{Plain, capi};
use crate::ffi::error::kvt_error_t;
use crate::ffi::event::kvt_event_t;
use crate::ffi::op::{kvt_op_t, kvt_submit_opts_t};
use crate::ffi::policy_use::numbers;
use crate::ffi::session::{SessionNoun, kvt_session_t};
use crate::ffi::session_begin::{Common, How, Moved, submit};
use crate::ffi::status::kvt_status_t;
use crate::ffi::view::kvt_view_t;
use crate::store::state::transfer::MAX_MOVE_CHUNKS;
use crate::store::state::{CellRange, Level, TO_THE_END, TransferKind, Wanted};

/// An op for each layer: ops_out then receives one per layer of the move, and the
/// tag of layer i of the move is the given one plus i. The move is given up once all
/// of them were cancelled.
pub const KVT_TRANSFER_EACH_LAYER: u64 = 1;
/// Of a get or a prefetch: only what going on after its last token needs. Of layers with a
/// window that is the chunks that have one of the window's last tokens, of layers with a
/// state the last chunk; their other cells are left alone, and are no misses. So a segment
/// of a plan can be got as it is planned. Views describe all tokens of the move.
pub const KVT_TRANSFER_REUSE: u64 = 2;

/// A put has ended when the cells are in memory.
pub const KVT_LEVEL_RAM: u32 = 0;
/// A put has ended when the cells are written to disk.
pub const KVT_LEVEL_DISK: u32 = 1;
/// A put has ended when the cells survive the end of the machine.
pub const KVT_LEVEL_DURABLE: u32 = 2;
/// A put has ended when the store's remote has said that it has the full chunks of which all
/// layers are there; what does not fill one, or misses layers that are still to come, is in
/// memory then. KVT_E_AGAIN where layers have left memory: they cannot be sent from elsewhere.
pub const KVT_LEVEL_REMOTE: u32 = 3;

/// A transfer of a session: tokens by layers, and where the engine has them.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_transfer_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_TRANSFER_*.
    pub flags: u64,
    /// The first token, a multiple of a chunk's tokens.
    pub first_token: u64,
    /// How many; up to a multiple, or to the end of the session. 0 = to the end that it has
    /// when this is submitted: views say then how many tokens they have.
    pub tokens: u64,
    /// The first layer.
    pub first_layer: u32,
    /// How many; 0 = all from the first on.
    pub layers: u32,
    /// K (or the latent, or the states) of each layer; null for a prefetch.
    pub k: *const kvt_view_t,
    /// V of each layer; null when the layout has none in these layers. A layer
    /// without V has an entry that is all zero.
    pub v: *const kvt_view_t,
    /// sizeof(kvt_view_t).
    pub stride_bytes: u64,
    /// KVT_LEVEL_*, for puts alone.
    pub level: u32,
    /// Always 0.
    pub reserved: u32,
    /// Nothing of the move is begun before this event has come: sources are complete
    /// then, targets in use by nobody. Null = now. The handle may be closed once it was
    /// signalled. Prefetch before, if what comes from disk is to come meanwhile.
    pub ready: *const kvt_event_t,
    /// Of a get or a prefetch: the chunks that are wanted, 0 = the one of first_token,
    /// ascending; copied. Views have their tokens one after the other, and no others. Null =
    /// all. What a sparse policy selects is got so.
    pub chunks: *const u32,
    /// How many.
    pub chunk_count: u64,
    /// An event of the store's device (kvt_device_copy, kvt_device_launch, kvt_device_import_event,
    /// kvt_device_create_event); 0 = none. No copy between the tensors and the store runs before it
    /// has come: they are put behind it on the device, and no thread waits. What they need from
    /// disk comes meanwhile. It stays yours, several moves may name it, and it is not to be
    /// released before the last of their ops was. One that fails, or is released before it was
    /// seen to come, fails the move with that: tensors are as they were where nothing came.
    /// With `ready` both have to come. Not for prefetches.
    pub after: u64,
}

impl Moved for kvt_transfer_t {
    const FLAGS: u64 = KVT_TRANSFER_EACH_LAYER | KVT_TRANSFER_REUSE;
    const EACH: &'static str = "KVT_TRANSFER_EACH_LAYER";

    fn common(&self) -> Common {
        let kvt_transfer_t { flags, reserved, level, ready, first_layer, .. } = *self;
        let kvt_transfer_t { k, v, stride_bytes, after, .. } = *self;
        Common { flags, reserved, level, ready, first_layer, k, v, stride_bytes, after }
    }
}

pub(crate) fn level_of(level: u32, kind: TransferKind) -> Result<Level> {
    match level {
        KVT_LEVEL_RAM => Ok(Level::Ram),
        _ if kind != TransferKind::Put => fail!(Invalid, "level is for puts alone"),
        KVT_LEVEL_DISK => Ok(Level::Disk),
        KVT_LEVEL_DURABLE => Ok(Level::Durable),
        KVT_LEVEL_REMOTE => Ok(Level::Remote),
        other => fail!(Invalid, "level {other} is none of KVT_LEVEL_*"),
    }
}

/// # Safety
/// `chunks` of `given` is null or valid for reads.
unsafe fn wanted_of(given: &kvt_transfer_t, kind: TransferKind) -> Result<Wanted> {
    let needed = given.flags & KVT_TRANSFER_REUSE != 0;
    if needed && kind == TransferKind::Put {
        fail!(Invalid, "KVT_TRANSFER_REUSE has no meaning for a put");
    }
    // SAFETY: the caller's promise.
    let chunks = unsafe { numbers(given.chunks, given.chunk_count, MAX_MOVE_CHUNKS)? };
    if !given.chunks.is_null() && chunks.is_empty() {
        fail!(Invalid, "chunk_count is 0 and chunks is not null: a move of nothing");
    }
    match (chunks.is_empty(), needed) {
        (true, true) => Ok(Wanted::Needed),
        (true, false) => Ok(Wanted::All),
        (false, true) => fail!(Invalid, "KVT_TRANSFER_REUSE and chunks: one or the other"),
        (false, false) if kind == TransferKind::Put => fail!(Invalid, "chunks are for gets alone"),
        (false, false) => {
            let mut wanted = Vec::new();
            wanted.try_reserve_exact(chunks.len()).map_err(|_| Status::NoMem)?;
            wanted.extend_from_slice(chunks);
            Ok(Wanted::Chunks(wanted))
        }
    }
}

/// The layers of a move, with what 0 stands for.
pub(crate) fn layers_of(all: usize, first: u32, given: u32) -> Result<usize> {
    let left = all.saturating_sub(first as usize);
    let layers = if given == 0 { left } else { given as usize };
    if layers == 0 || layers > left {
        fail!(Invalid, "{given} layers from {first} on, of a model with {all}");
    }
    Ok(layers)
}

/// # Safety
/// As the exported functions that call it.
unsafe fn move_rectangle(
    session: *const kvt_session_t,
    kind: TransferKind,
    transfer: *const kvt_transfer_t,
    opts: *const kvt_submit_opts_t,
    ops_out: *mut *mut kvt_op_t,
) -> Result<()> {
    let begin = |noun: &SessionNoun, given: &kvt_transfer_t, how: &How<'_>| {
        // SAFETY: the caller's promise.
        let wanted = unsafe { wanted_of(given, kind)? };
        let layers = layers_of(noun.ns.layers, given.first_layer, given.layers)?;
        if given.tokens == TO_THE_END {
            fail!(Invalid, "{} tokens: no session has so many", given.tokens);
        }
        let tokens = (given.tokens != 0).then_some(given.tokens);
        let common = given.common();
        let transfer = CellRange {
            first_token: given.first_token,
            tokens: tokens.unwrap_or(TO_THE_END),
            first_layer: given.first_layer as usize,
            layers,
            by_layer: given.flags & KVT_TRANSFER_EACH_LAYER != 0,
            wanted,
            // SAFETY: the caller's promise.
            views: unsafe { common.views(noun, kind, (layers, tokens))? },
            after: common.after(),
        };
        let (store, How { level, opts, ready, .. }) = (&noun.ns.store, how);
        store.submit_after(noun.number, kind, *level, transfer, opts, *ready)
    };
    // SAFETY: the caller's promise; he has room for one op, or one a layer.
    unsafe { submit(session, kind, transfer, opts, ops_out, begin) }
}

/// Stores the KV of a transfer: from the engine's tensors into memory, and down
/// from there as the spec says. Cells that are there already are not stored again.
/// Never waits.
///
/// The op's value (kvt_completion_t, kvt_op_info_t) is how many tokens from the
/// first on were stored without a gap; bytes_done is what was copied. It ends with
/// KVT_E_BUDGET when memory could not be had, or KVT_E_IO when the disk failed; the
/// other cells are stored all the same.
///
/// @param session    The session; closing it does not end its moves.
/// @param transfer  What, and where it is; copied, tables of pages too.
/// @param opts       Queue, tag, deadline, priority; null for none.
/// @param ops_out    Receives the op (one per layer with KVT_TRANSFER_EACH_LAYER), to
///                   be freed by you; null when the queue alone tells of the end.
/// @param err        Explains a failure; may be null.
/// @return KVT_OK when submitted; KVT_E_AGAIN when the queue, the runtime or the
///         store is full; KVT_E_INVALID, KVT_E_UNAVAILABLE (a level that needs a disk,
///         memory that no device reaches, an event of a device to a store without one),
///         KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE (also: `after`
///         is no event of the store's device), KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the ops; the tensors are the library's until the
/// release. Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state; views lead
/// to memory that can be read until the release.
#[capi]
pub unsafe extern "C" fn kvt_session_put(
    session: *const kvt_session_t,
    transfer: *const kvt_transfer_t,
    opts: *const kvt_submit_opts_t,
    ops_out: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    move_rectangle(session, TransferKind::Put, transfer, opts, ops_out)
}

/// Loads the KV of a transfer into the engine's tensors, from whatever tier has
/// it. Never waits.
///
/// The op's value is how many tokens from the first on came without a gap. It ends
/// with KVT_E_NOT_FOUND when something was missing: the other cells came, and
/// the tensors are as they were where nothing came. A deadline turns what is late
/// into a miss.
///
/// @param session    See kvt_session_put.
/// @param transfer  See kvt_session_put.
/// @param opts       See kvt_session_put.
/// @param ops_out    See kvt_session_put.
/// @param err        Explains a failure; may be null.
/// @return As kvt_session_put.
///
/// Ownership: as kvt_session_put. Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// As kvt_session_put; views lead to memory that can be written.
#[capi]
pub unsafe extern "C" fn kvt_session_get(
    session: *const kvt_session_t,
    transfer: *const kvt_transfer_t,
    opts: *const kvt_submit_opts_t,
    ops_out: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    move_rectangle(session, TransferKind::Get, transfer, opts, ops_out)
}

/// Brings the KV of a transfer into memory, for a get to come. Never waits. The
/// op's value and result are those of a get.
///
/// @param session    See kvt_session_put.
/// @param transfer  What; without views.
/// @param opts       See kvt_session_put; KVT_PRIORITY_PREFETCH is what it is for.
/// @param ops_out    See kvt_session_put.
/// @param err        Explains a failure; may be null.
/// @return As kvt_session_put.
///
/// Ownership: the caller owns the ops. Threading: any thread, also in callbacks.
/// Since 0.1.
///
/// # Safety
/// As kvt_session_put.
#[capi]
pub unsafe extern "C" fn kvt_session_prefetch(
    session: *const kvt_session_t,
    transfer: *const kvt_transfer_t,
    opts: *const kvt_submit_opts_t,
    ops_out: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    move_rectangle(session, TransferKind::Prefetch, transfer, opts, ops_out)
}
