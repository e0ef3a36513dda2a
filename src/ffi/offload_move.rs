//! What goes into an offload, and what comes back into its buffers.

use std::ffi::c_void;

use crate::base::op::Op;
use crate::base::status::{Error, Result, Status};
use crate::device::Memory;
use crate::fail;
use crate::ffi::abi::{
    Plain, capi, check_optional_out, check_out, encode, known_flags, put, require, write,
};
use crate::ffi::attention::{context_of, kvt_rows_t, kvt_sparse_context_t, with_rows};
use crate::ffi::error::kvt_error_t;
use crate::ffi::offload::{kvt_offload_t, with_offload};
use crate::ffi::op::{kvt_op_t, kvt_submit_opts_t, submit_opts};
use crate::ffi::policy_use::numbers;
use crate::ffi::status::kvt_status_t;
use crate::ffi::view::{KVT_MEMORY_DEVICE, KVT_MEMORY_HOST, kvt_view_t, plane_anywhere};
use crate::offload::{BlockSelection, Loaded, Offload};
use crate::store::state::session::{LayerViews, PlaneView, Tokens};

/// Of a load: these blocks were chosen by somebody else. They come as they are, no policy is
/// asked, and the tail comes behind them. A query serves audits alone.
pub const KVT_OFFLOAD_CHOSEN: u64 = 1;

/// Most blocks, or positions, of one call.
const MAX_LIST: usize = 1 << 24;

/// K and V of a layer in a buffer, row by row: those of blocks, ascending, and of the tail
/// behind them. They stay until the buffer is given back.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_offload_kv_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// K of the first row; rows lie key_heads * key_dim numbers apart, heads key_dim.
    pub k: *const c_void,
    /// V; rows lie key_heads * value_dim numbers apart. Of a latent the same as `k`.
    pub v: *const c_void,
    /// Rows.
    pub tokens: u32,
    /// Of them those of the tail.
    pub tail_tokens: u32,
    /// Blocks before it.
    pub blocks: u32,
    /// The buffer.
    pub buffer: u32,
    /// KVT_MEMORY_*: where `k` and `v` are valid.
    pub memory: u32,
    /// Always 0.
    pub reserved: u32,
}

fn kv_of(offload: &Offload, buffer: u32, loaded: Loaded) -> Result<kvt_offload_kv_t> {
    let Loaded { tokens, tail_tokens, blocks } = loaded;
    let views = offload.views(buffer)?;
    let at = |plane: &PlaneView| match plane.place {
        Tokens::At(address) if tokens > 0 => std::ptr::with_exposed_provenance(address as usize),
        _ => std::ptr::null(),
    };
    // Values of a latent are the first numbers of its keys.
    let (k, v) = (at(&views.k), at(views.v.as_ref().unwrap_or(&views.k)));
    let memory = match views.k.memory {
        Memory::Host => KVT_MEMORY_HOST,
        Memory::Device => KVT_MEMORY_DEVICE,
    };
    let (struct_size, reserved) = (0, 0);
    Ok(kvt_offload_kv_t {
        struct_size,
        k,
        v,
        tokens,
        tail_tokens,
        blocks,
        buffer,
        memory,
        reserved,
    })
}

/// Keeps K and V of tokens of a layer, which go on where those before ended. The session
/// has these tokens (kvt_session_append). Policies see the keys; then whole blocks are on
/// their way into the store, the rest is in the tail.
///
/// @param offload  The offload.
/// @param layer    The layer.
/// @param first    The position of the first: as many as the layer has.
/// @param tokens   How many.
/// @param k        K, or the latent, in host memory or in that of the store's device.
/// @param v        V; null for a latent.
/// @param opts     Queue, tag, deadline, priority of the op; null for none.
/// @param op_out   Receives an op, to be freed by you: when it is released `k` and `v` are
///                 yours again. Receives null where they are at once. May be null when the
///                 queue tells, and where fewer tokens are put than a block has.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID (tokens that do not go on, that the session does not have,
///         keys that are not finite), KVT_E_BUDGET, KVT_E_IO (the full tail cannot leave: nothing
///         was taken, and the next put tries again), KVT_E_UNAVAILABLE (memory of no device of
///         the store's, or that is lost), KVT_E_LIMIT, KVT_E_AGAIN, KVT_E_TOO_NEW,
///         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///         kvt_offload_tokens says how far it came.
///
/// Ownership: the caller owns the op. Threading: any thread; waits for a full tail to leave.
/// Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state; views lead to
/// memory that can be read, and that nobody writes, until the release.
#[capi]
pub unsafe extern "C" fn kvt_offload_put(
    offload: *const kvt_offload_t,
    layer: u32,
    first: u32,
    tokens: u32,
    k: *const kvt_view_t,
    v: *const kvt_view_t,
    opts: *const kvt_submit_opts_t,
    op_out: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    if k.is_null() {
        fail!(Invalid, "k is null: give the view of the layer's K tensor");
    }
    let plane = |name: &str, view: *const kvt_view_t| {
        let mut view = view.read_unaligned();
        if view.pages.is_null() && view.tokens == 0 {
            view.tokens = tokens;
        }
        plane_anywhere(&view).map_err(|error: Error| error.within(name))
    };
    let k = plane("K", k)?;
    let v = if v.is_null() { None } else { Some(plane("V", v)?) };
    let (opts, each) = submit_opts(opts, op_out.is_null())?;
    if each {
        fail!(Invalid, "KVT_SUBMIT_EACH has no meaning for a put");
    }
    let views = LayerViews { k, v };
    let op = with_offload(offload, |offload| {
        // Fewer tokens are no whole block: there is no op then.
        if opts.detached && opts.queue.is_none() && tokens >= offload.shape().block_tokens {
            fail!(Invalid, "neither op_out nor a queue: nobody is told when k is read");
        }
        let op = offload.put(layer, first, tokens, &views, &opts)?;
        Ok(op.map_or(std::ptr::null_mut(), |op| encode::<Op>(op.key())))
    })?;
    put(op_out, op);
    Ok(())
}

/// Begins to load blocks of a layer into a buffer, which must be free. kvt_offload_blocks says
/// which come, from now on; how many tokens that are with the tail, kvt_offload_wait.
///
/// @param offload      The offload.
/// @param buffer       Which buffer of the ring.
/// @param layer        The layer.
/// @param blocks       Only of these, ascending, and without the tail: a prompt in parts
///                     goes through earlier blocks so. Null = all there are, and the tail.
/// @param block_count  How many.
/// @param flags        KVT_OFFLOAD_CHOSEN or 0. With it `blocks` is not null unless there is
///                     none: then the tail comes alone.
/// @param query        The layer's queries, [tokens, query heads, key dim], for which a
///                     policy selects; null = all blocks come.
/// @param context      Where in the sequence that is.
/// @param count_out    Receives how many blocks come; may be null.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUSY when the buffer is in use, KVT_E_LIMIT when it is too short for
///         the blocks, KVT_E_INVALID, KVT_E_AGAIN, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state; the query's view
/// leads to memory that can be read during the call.
#[capi]
pub unsafe extern "C" fn kvt_offload_load(
    offload: *const kvt_offload_t,
    buffer: u32,
    layer: u32,
    blocks: *const u32,
    block_count: u64,
    flags: u64,
    query: *const kvt_rows_t,
    context: *const kvt_sparse_context_t,
    count_out: *mut u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    known_flags(flags, KVT_OFFLOAD_CHOSEN)?;
    let (context, ids) = (context_of(context)?, numbers(blocks, block_count, MAX_LIST)?);
    let which = match flags & KVT_OFFLOAD_CHOSEN {
        0 if blocks.is_null() => BlockSelection::All,
        0 => BlockSelection::Blocks(ids),
        _ => BlockSelection::Chosen(ids),
    };
    let load = |query: Option<&crate::attention::Rows<'_>>| {
        with_offload(offload, |offload| offload.load(buffer, layer, which, query, &context))
    };
    let count = with_rows("queries", query, load)?;
    put(count_out, count);
    Ok(())
}

/// Waits until what is loaded into a buffer is there; the tail is then behind it, as it is
/// now.
///
/// @param offload  The offload.
/// @param buffer   The buffer.
/// @param out      Receives where K and V are; may be null.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_NOT_FOUND when a block is not in the store any more, KVT_E_STATE when
///         nothing is loaded, or a full tail became a block meanwhile: load again. KVT_E_IO,
///         KVT_E_CORRUPT, KVT_E_INVALID, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///         After a failure the buffer is free.
///
/// Threading: any thread; waits. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_offload_wait(
    offload: *const kvt_offload_t,
    buffer: u32,
    out: *mut kvt_offload_kv_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_optional_out(out)?;
    let kv = with_offload(offload, |offload| {
        let loaded = offload.wait(buffer)?;
        kv_of(offload, buffer, loaded)
    })?;
    write(out, &kv);
    Ok(())
}

/// The engine has computed with a buffer, and does not read it any more. A load under way
/// is given up.
///
/// @param offload  The offload.
/// @param buffer   The buffer.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_offload_done(
    offload: *const kvt_offload_t,
    buffer: u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_offload(offload, |offload| offload.done(buffer))
}

/// Begins a pass over all layers in their order. Layers of which nobody selects blocks by a
/// query are loaded ahead, as many as there are buffers; where the policy is `predict`, the
/// next layer is, by the query of the one before.
///
/// @param offload  The offload; what it has loaded is given up.
/// @param context  Where in the sequence that is.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `context` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_offload_begin(
    offload: *const kvt_offload_t,
    context: *const kvt_sparse_context_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let context = context_of(context)?;
    with_offload(offload, |offload| offload.begin(&context))
}

/// Takes the next layer of a pass: its blocks are there, and its tail with all that was put.
///
/// @param offload  The offload.
/// @param layer    The layer: 0, 1, ... in this order.
/// @param query    Its queries; null = all blocks come.
/// @param out      Receives where K and V are, and in which buffer.
/// @param err      Explains a failure; may be null.
/// @return As kvt_offload_load and kvt_offload_wait; KVT_E_STATE when no pass has begun, or
///         it is another layer's turn.
///
/// Threading: any thread; waits. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state; the query's view
/// leads to memory that can be read during the call.
#[capi]
pub unsafe extern "C" fn kvt_offload_take(
    offload: *const kvt_offload_t,
    layer: u32,
    query: *const kvt_rows_t,
    out: *mut kvt_offload_kv_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    let take = |query: Option<&crate::attention::Rows<'_>>| {
        with_offload(offload, |offload| {
            let (buffer, loaded) = offload.take(layer, query)?;
            kv_of(offload, buffer, loaded)
        })
    };
    write(out, &with_rows("queries", query, take)?);
    Ok(())
}

/// Gives the layer back that was taken: its buffer is used for one that is loaded ahead.
///
/// @param offload  The offload.
/// @param layer    The layer.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_STATE when it was not taken, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_offload_give_back(
    offload: *const kvt_offload_t,
    layer: u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_offload(offload, |offload| offload.give_back(layer))
}

/// The blocks of a buffer, ascending; block i has the tokens from i * block_tokens on.
///
/// @param offload    The offload.
/// @param buffer     The buffer.
/// @param blocks     Receives them; null = only the count is wanted.
/// @param capacity       How many it has room for.
/// @param count_out  Receives how many there are, also when there is no room for them.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `blocks` is null or valid for writes of `room` numbers, `count_out` for a write.
#[capi]
pub unsafe extern "C" fn kvt_offload_blocks(
    offload: *const kvt_offload_t,
    buffer: u32,
    blocks: *mut u32,
    capacity: u64,
    count_out: *mut u64,
) -> kvt_status_t {
    with_offload(offload, |offload| {
        let all = offload.blocks(buffer)?;
        fill(all.len(), all.iter().copied(), blocks, capacity, count_out)
    })
}

/// Which rows of a buffer have tokens at these positions: what an index of positions is for
/// kernels that read the buffer. Positions that are not in it are left out.
///
/// @param offload    The offload.
/// @param buffer     The buffer.
/// @param positions  Positions in the sequence, ascending.
/// @param count      How many.
/// @param rows       Receives the rows, ascending; room for `count`. May be `positions`.
/// @param count_out  Receives how many there are.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `positions` is valid for reads, `rows` for writes of `count` numbers, `count_out` is null or
/// valid for a write.
#[capi]
pub unsafe extern "C" fn kvt_offload_rows(
    offload: *const kvt_offload_t,
    buffer: u32,
    positions: *const u32,
    count: u64,
    rows: *mut u32,
    count_out: *mut u64,
) -> kvt_status_t {
    let positions = numbers(positions, count, MAX_LIST)?;
    if !positions.is_sorted_by(|a, b| a < b) {
        fail!(Invalid, "positions ascend, each once");
    }
    let mut found = Vec::new();
    with_offload(offload, |offload| offload.rows_of(buffer, positions, &mut found))?;
    require(rows)?;
    fill(found.len(), found.iter().copied(), rows, count, count_out)
}

/// Writes so many numbers to a caller's array if all of them fit, and how many there are in
/// any case.
///
/// # Safety
/// `to` is null or valid for writes of `room` numbers, `count_out` is null or valid for a write.
pub(crate) unsafe fn fill(
    count: usize,
    from: impl IntoIterator<Item = u32>,
    to: *mut u32,
    capacity: u64,
    count_out: *mut u64,
) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { put(count_out, count as u64) };
    if to.is_null() {
        return Ok(());
    }
    if count as u64 > capacity {
        let text = format!("{count} numbers, and room for {capacity}");
        return Err(Error::new(Status::TooSmall, text));
    }
    for (at, number) in from.into_iter().take(count).enumerate() {
        // SAFETY: not null, below `room`, and the caller's promise.
        unsafe { to.add(at).write(number) };
    }
    Ok(())
}
