//! Blocks: chunks that the engine names itself.

use crate::base::status::{Result, Status};
use crate::fail;
use crate::ffi::abi::{Plain, bytes, capi, enter, read, require};
use crate::ffi::clear::{check, kvt_clear_report_t, tell};
use crate::ffi::error::kvt_error_t;
use crate::ffi::event::kvt_event_t;
use crate::ffi::namespace::{Space, kvt_namespace_t};
use crate::ffi::op::{kvt_op_t, kvt_submit_opts_t};
use crate::ffi::policy_use::numbers;
use crate::ffi::session::{SessionNoun, kvt_session_t};
use crate::ffi::session_begin::{Common, How, Moved, submit};
use crate::ffi::session_move::layers_of;
use crate::ffi::status::kvt_status_t;
use crate::ffi::view::kvt_view_t;
use crate::format::keys::Key;
use crate::format::keys::block::BlockKeys;
use crate::store::state::TransferKind;
use crate::store::state::blocks::BlockMove;

/// Most names of a call.
const MAX_NAMES: usize = 1 << 22;
/// Keys that are looked for while the lock is held.
const GROUP: usize = 1024;

/// What an engine calls its blocks: any bytes, one name after the other. Equal names
/// are equal content: its own hashes, say, of all that the content depends on and the
/// namespace's identity does not say.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_names_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// The names, without gaps.
    pub bytes: *const u8,
    /// Where each ends, from `bytes` on, ascending; null = all have each_bytes bytes.
    pub ends: *const u64,
    /// Bytes of a name, 1 to 65536; 0 with ends.
    pub each_bytes: u64,
    /// How many; at most 2^22, and 65536 for a move or to locate them.
    pub count: u64,
}

/// Blocks, and where the engine has them.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_blocks_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Always 0.
    pub flags: u64,
    /// What they are called.
    pub names: *const kvt_names_t,
    /// The first layer.
    pub first_layer: u32,
    /// How many; 0 = all from the first on.
    pub layers: u32,
    /// K (or the latent, or the states) of each layer: the tokens of all blocks, in the
    /// order of their names. Pages with the tokens of a chunk each give every block its own
    /// address. Null for a prefetch.
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
    /// See kvt_transfer_t.
    pub ready: *const kvt_event_t,
    /// See kvt_transfer_t.
    pub after: u64,
}

impl Moved for kvt_blocks_t {
    const FLAGS: u64 = 0;
    const EACH: &'static str = "kvt_op_items";

    fn common(&self) -> Common {
        let kvt_blocks_t { flags, reserved, level, ready, first_layer, .. } = *self;
        let kvt_blocks_t { k, v, stride_bytes, after, .. } = *self;
        Common { flags, reserved, level, ready, first_layer, k, v, stride_bytes, after }
    }
}

/// The keys of named blocks of a namespace.
///
/// # Safety
/// `names` is valid for the size it states, and what it leads to for reads.
pub(crate) unsafe fn keys_of(ns: &Space, names: *const kvt_names_t) -> Result<Vec<Key>> {
    if names.is_null() {
        fail!(Invalid, "names is null");
    }
    // SAFETY: the caller's promise.
    let given = unsafe { read(names)? };
    if given.count > MAX_NAMES as u64 {
        fail!(Limit, "{} names; a call has at most {MAX_NAMES}", given.count);
    }
    let keys = BlockKeys::new(&ns.key);
    if given.ends.is_null() {
        let Some(all) = given.each_bytes.checked_mul(given.count) else {
            fail!(Limit, "{} names of {} bytes", given.count, given.each_bytes);
        };
        if given.each_bytes == 0 && given.count > 0 {
            fail!(Invalid, "each_bytes is 0, and ends null: how long are the names?");
        }
        // SAFETY: the caller's promise.
        let all = unsafe { bytes(given.bytes, all)? };
        return keys.all(all.chunks_exact(given.each_bytes.max(1) as usize));
    }
    if given.each_bytes != 0 {
        fail!(Invalid, "each_bytes is {} and ends is not null: one or the other", given.each_bytes);
    }
    // SAFETY: the caller's promise.
    let (ends, all) = unsafe {
        let ends = numbers(given.ends, given.count, MAX_NAMES)?;
        (ends, bytes(given.bytes, ends.last().copied().unwrap_or(0))?)
    };
    let mut made = Vec::new();
    made.try_reserve_exact(ends.len()).map_err(|_| Status::NoMem)?;
    let mut from = 0;
    for (at, &end) in ends.iter().enumerate() {
        let Some(name) = all.get(from..usize::try_from(end).unwrap_or(usize::MAX)) else {
            fail!(Invalid, "name {at} ends at {end}, behind it or before its beginning at {from}");
        };
        made.push(keys.key(name)?);
        from += name.len();
    }
    Ok(made)
}

/// Says what blocks are called in events and files: the keys that docs/keys.md defines.
///
/// @param ns  The namespace.
/// @param names  The names.
/// @param out    Receives KVT_KEY_BYTES for each.
/// @param err    Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; structs for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_namespace_block_keys(
    ns: *const kvt_namespace_t,
    names: *const kvt_names_t,
    out: *mut u8,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let ns = enter(ns)?;
    let keys = keys_of(&ns.0, names)?;
    if !keys.is_empty() {
        require(out)?;
    }
    let each = crate::ffi::namespace::KVT_KEY_BYTES as usize;
    for (i, key) in keys.iter().enumerate() {
        std::ptr::copy_nonoverlapping(key.0.as_ptr(), out.add(i * each), each);
    }
    Ok(())
}

/// Says of blocks whether a namespace has them, and where. No use is counted, nothing
/// is held. The remote is not asked: kvt_session_locate_blocks does that, and one that was found
/// there has 1 << KVT_TIER_REMOTE alone; without KVT_EXISTS_WHOLE it is not here, but gets and
/// prefetches bring it.
///
/// @param ns  The namespace.
/// @param names  The names.
/// @param out    Receives a byte for each, as kvt_namespace_exists gives.
/// @param err    Explains a failure; may be null.
/// @return As kvt_namespace_block_keys.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// As kvt_namespace_block_keys.
#[capi]
pub unsafe extern "C" fn kvt_namespace_find_blocks(
    ns: *const kvt_namespace_t,
    names: *const kvt_names_t,
    out: *mut u8,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let ns = enter(ns)?;
    let keys = keys_of(&ns.0, names)?;
    if !keys.is_empty() {
        require(out)?;
    }
    let mut found = Vec::new();
    found.try_reserve_exact(keys.len()).map_err(|_| Status::NoMem)?;
    found.resize(keys.len(), 0);
    for (keys, found) in keys.chunks(GROUP).zip(found.chunks_mut(GROUP)) {
        ns.0.store.look(|core| core.exists(ns.0.number, keys, found))??;
    }
    // SAFETY: room for a byte a name, by the caller's promise.
    std::ptr::copy_nonoverlapping(found.as_ptr(), out, found.len());
    Ok(())
}

/// # Safety
/// As the exported functions that call it.
unsafe fn move_blocks(
    session: *const kvt_session_t,
    kind: TransferKind,
    blocks: *const kvt_blocks_t,
    opts: *const kvt_submit_opts_t,
    op_out: *mut *mut kvt_op_t,
) -> Result<()> {
    let begin = |noun: &SessionNoun, given: &kvt_blocks_t, how: &How<'_>| {
        let layers = layers_of(noun.ns.layers, given.first_layer, given.layers)?;
        // SAFETY: the caller's promise.
        let keys = unsafe { keys_of(&noun.ns, given.names)? };
        let tokens = keys.len() as u64 * u64::from(noun.ns.chunk_tokens);
        let common = given.common();
        let blocks = BlockMove {
            keys,
            first_layer: given.first_layer as usize,
            layers,
            // SAFETY: the caller's promise.
            views: unsafe { common.views(noun, kind, (layers, Some(tokens)))? },
            after: common.after(),
        };
        let (store, How { level, opts, ready, .. }) = (&noun.ns.store, how);
        store.submit_blocks(noun.number, (kind, *level), blocks, opts, *ready)
    };
    // SAFETY: the caller's promise; there is one op.
    unsafe { submit(session, kind, blocks, opts, op_out, begin) }
}

/// Stores blocks that the engine has named: from its tensors into memory, and down from
/// there as the spec says. Those that are there already are not stored again. Never waits.
///
/// A block is a chunk of the namespace's layout that continues no other one: it comes and
/// goes by itself. Sessions of the namespace share blocks as they share chunks; tokens have
/// nothing to do with it. The session says who asks: its tenant, priority and turn. Whoever
/// keeps KV by tokens uses kvt_session_put.
///
/// The op has an item for each block (kvt_op_items), in their order, with the status of
/// that block. Its own status is KVT_OK when all are well, else that of one of them: a miss
/// only where nothing else went wrong. Its value is how many tokens from the first on were
/// stored without a gap.
///
/// @param session  The session; closing it does not end its moves.
/// @param blocks   What, and where it is; copied, names and tables of pages too.
/// @param opts     Queue, tag, deadline, priority; null for none.
/// @param op_out   Receives the op, to be freed by you; null when the queue alone tells of
///                 the end.
/// @param err      Explains a failure; may be null.
/// @return As kvt_session_put.
///
/// Ownership: the caller owns the op; the tensors are the library's until the release.
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state; views lead
/// to memory that can be read until the release.
#[capi]
pub unsafe extern "C" fn kvt_session_put_blocks(
    session: *const kvt_session_t,
    blocks: *const kvt_blocks_t,
    opts: *const kvt_submit_opts_t,
    op_out: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    move_blocks(session, TransferKind::Put, blocks, opts, op_out)
}

/// Loads blocks into the engine's tensors, from whatever tier has them; from the remote those that
/// were located there (kvt_session_locate_blocks). Never waits.
///
/// The op ends with KVT_E_NOT_FOUND where some are missing: the others came. Its items say
/// which; the tensors of one that did not come may have been written in part.
///
/// @param session  See kvt_session_put_blocks.
/// @param blocks   See kvt_session_put_blocks.
/// @param opts     See kvt_session_put_blocks.
/// @param op_out   See kvt_session_put_blocks.
/// @param err      Explains a failure; may be null.
/// @return As kvt_session_put.
///
/// Ownership: as kvt_session_put_blocks. Threading: any thread, also in callbacks.
/// Since 0.1.
///
/// # Safety
/// As kvt_session_put_blocks; views lead to memory that can be written.
#[capi]
pub unsafe extern "C" fn kvt_session_get_blocks(
    session: *const kvt_session_t,
    blocks: *const kvt_blocks_t,
    opts: *const kvt_submit_opts_t,
    op_out: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    move_blocks(session, TransferKind::Get, blocks, opts, op_out)
}

/// Brings blocks into memory, for a get to come. Never waits. The op's items are as those
/// of a get.
///
/// @param session  See kvt_session_put_blocks.
/// @param blocks   What; without views.
/// @param opts     See kvt_session_put_blocks; KVT_PRIORITY_PREFETCH is what it is for.
/// @param op_out   See kvt_session_put_blocks.
/// @param err      Explains a failure; may be null.
/// @return As kvt_session_put.
///
/// Ownership: the caller owns the op. Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// As kvt_session_put_blocks.
#[capi]
pub unsafe extern "C" fn kvt_session_prefetch_blocks(
    session: *const kvt_session_t,
    blocks: *const kvt_blocks_t,
    opts: *const kvt_submit_opts_t,
    op_out: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    move_blocks(session, TransferKind::Prefetch, blocks, opts, op_out)
}

/// Takes blocks away that nobody holds: out of all tiers. Those that moves or sessions hold
/// (kvt_session_hold_blocks) stay and are counted. Never waits: after a crash what was on disk
/// may be there again, as after any eviction.
///
/// @param session  The session.
/// @param names    The names, at most 65536; those that are not there are passed over.
/// @param out      What stays, in counts; start it with KVT_CLEAR_REPORT_INIT. May be null.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_session_drop_blocks(
    session: *const kvt_session_t,
    names: *const kvt_names_t,
    out: *mut kvt_clear_report_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check(out)?;
    let session = enter(session)?;
    let keys = keys_of(&session.ns, names)?;
    let cleared = session.ns.store.with(|core| core.drop_blocks(session.number, &keys))?;
    tell(out, &cleared);
    Ok(())
}
