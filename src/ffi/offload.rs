//! Layer-wise offload of one session.

use std::ffi::{c_char, c_void};

use crate::attention::Rows;
use crate::base::callback::{Foreign, refuse_reentry};
use crate::base::clock::Clock;
use crate::base::op::Op;
use crate::base::slab::Pin;
use crate::base::spec::Spec;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, Condvar, Mutex};
use crate::device::{Event, Memory};
use crate::fail;
use crate::ffi::abi::{
    Access, Plain, capi, check_optional_out, check_out, encode, enter, free, insert, known_flags,
    no_reserved, noun, numbers, pin, put, read, require, text, write,
};
use crate::ffi::attention::{
    context_of, kvt_attention_t, kvt_rows_t, kvt_sparse_context_t, shape_of, with_rows,
};
use crate::ffi::base::{kvt_error_t, kvt_status_t};
use crate::ffi::memory::{KVT_MEMORY_DEVICE, KVT_MEMORY_HOST, kvt_view_t, plane_anywhere};
use crate::ffi::runtime::{kvt_op_t, kvt_submit_opts_t, submit_opts};
use crate::ffi::session::{
    KVT_LEVEL_DISK, KVT_LEVEL_DURABLE, KVT_LEVEL_RAM, KVT_LEVEL_REMOTE, SessionNoun, kvt_session_t,
};
use crate::ffi::sparse::{Table, kvt_sparse_custom_t, made};
use crate::meta::dtype::Dtype;
use crate::offload::{BlockSelection, LentMemory, Loaded, Offload, Opts, Policies, RingPlacement};
use crate::sparse::{Shape, Sparse, registry};
use crate::store::state::Level;
use crate::store::state::session::{LayerViews, PlaneView, Tokens};

// Offloads.

/// A session's KV, layer by layer: a ring of buffers that kernels read, the store behind it,
/// and sparse policies that say which blocks have to come. Calls on one come one at a time: a
/// second one waits for the first, or is KVT_E_REENTRANT in a callback.
pub struct kvt_offload_t(());

/// What an offload is opened with.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_offload_opts_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_OFFLOAD_ON_DEVICE or 0.
    pub flags: u64,
    /// The session; kept, and not to be closed for another meanwhile.
    pub session: *const kvt_session_t,
    /// The model's attention; a block is a chunk of the session's namespace.
    pub attention: *const kvt_attention_t,
    /// KVT_DTYPE_*: what K and V are.
    pub dtype: u32,
    /// Buffers of the ring, 1 to 256; also how many layers are loaded ahead.
    pub buffers: u32,
    /// Tokens of a buffer, rounded up to blocks.
    pub buffer_tokens: u32,
    /// KVT_LEVEL_*: when a put has ended.
    pub level: u32,
    /// Spec of the sparse policy for prompts; null = everything is loaded.
    pub prefill: *const c_char,
    /// Length of that.
    pub prefill_bytes: u64,
    /// Spec of the sparse policy for text that is written; null = everything is loaded.
    pub decode: *const c_char,
    /// Length of that.
    pub decode_bytes: u64,
    /// Every so many-th load that leaves blocks out is audited: its blocks are compared with
    /// those that the layer's own queries look at most, for which the keys of all are loaded.
    /// 0 = none; 1 = each.
    pub audit_every: u32,
    /// Always 0.
    pub reserved: u32,
    /// A policy of the engine's own instead of `prefill`; else null. It is called by the
    /// threads that call the offload.
    pub prefill_custom: *const kvt_sparse_custom_t,
    /// The same instead of `decode`.
    pub decode_custom: *const kvt_sparse_custom_t,
    /// With KVT_OFFLOAD_ON_DEVICE: memory of the store's device that the engine lends for the
    /// ring and the tails, a multiple of 256, until the offload is closed. 0 = the device gives
    /// it.
    pub memory: u64,
    /// How long that is: at least what kvt_offload_memory_bytes says.
    pub memory_bytes: u64,
}

/// The ring and the tails are in memory of the store's device: buffers have device addresses.
pub const KVT_OFFLOAD_ON_DEVICE: u64 = 1;

/// An offload, and the session that it is for: that stays as long.
pub(crate) struct OffloadNoun {
    /// Taken out while a call uses it: policies by callbacks are called under no lock.
    offload: Mutex<Option<Box<Offload>>>,
    back: Condvar,
    pub(crate) session: Pin<'static, SessionNoun>,
}

impl OffloadNoun {
    pub(crate) fn new(offload: Offload, session: Pin<'static, SessionNoun>) -> OffloadNoun {
        OffloadNoun { offload: Mutex::new(Some(Box::new(offload))), back: Condvar::new(), session }
    }

    /// Waits until nobody else uses it. A callback does not: it may be inside of that use.
    fn take(&self) -> Result<Taken<'_>> {
        let mut inside = self.offload.lock();
        loop {
            if let Some(offload) = inside.take() {
                return Ok(Taken { of: self, offload: Some(offload) });
            }
            refuse_reentry()?;
            self.back.wait(&mut inside);
        }
    }
}

/// An offload that goes back when this is dropped, also by a panic.
struct Taken<'a> {
    of: &'a OffloadNoun,
    offload: Option<Box<Offload>>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        *self.of.offload.lock() = self.offload.take();
        self.of.back.notify_one();
    }
}

noun!(OffloadNoun, kvt_offload_t, 14, "offload");

/// Calls `body` with an offload.
pub(crate) fn with_offload<R>(
    handle: *const kvt_offload_t,
    body: impl FnOnce(&mut Offload) -> Result<R>,
) -> Result<R> {
    let noun = enter(handle)?;
    let mut taken = noun.take()?;
    let Some(offload) = &mut taken.offload else { return Err(Status::Panic.into()) };
    let (result, note) = (body(offload), offload.take_error());
    drop(taken);
    if let Some(note) = note {
        log::warn!("an offload went on without {note}");
    }
    result
}

/// # Safety
/// `spec` is null or valid for its length.
unsafe fn policy_of(
    when: &str,
    spec: *const c_char,
    bytes: u64,
    custom: *const kvt_sparse_custom_t,
    shape: &Shape,
    taken: &mut Vec<Arc<Foreign<Table>>>,
) -> Result<Option<Box<dyn Sparse>>> {
    if !custom.is_null() {
        if !spec.is_null() {
            fail!(Invalid, "{when}: a spec and a policy of the engine's own");
        }
        // SAFETY: the caller's promise.
        let (policy, foreign) = unsafe { made(custom, shape).map_err(|e| e.within(when))? };
        taken.push(foreign);
        return Ok(Some(policy));
    }
    if spec.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let made = unsafe { text("spec", spec, bytes) }
        .and_then(Spec::parse)
        .and_then(|spec| registry::make(&spec, shape));
    made.map(Some).map_err(|error| error.within(when))
}

/// Where the ring is to be.
///
/// # Safety
/// Memory that is lent is what [`LentMemory::new`] says.
unsafe fn home_of(given: &kvt_offload_opts_t) -> Result<RingPlacement> {
    known_flags(given.flags, KVT_OFFLOAD_ON_DEVICE)?;
    let is_lent = given.memory != 0;
    match (given.flags & KVT_OFFLOAD_ON_DEVICE != 0, is_lent) {
        (_, false) if given.memory_bytes != 0 => {
            fail!(Invalid, "memory_bytes is {}, and memory is 0", given.memory_bytes);
        }
        (false, true) => fail!(Invalid, "memory is lent without KVT_OFFLOAD_ON_DEVICE"),
        (false, false) => Ok(RingPlacement::Host),
        (true, false) => Ok(RingPlacement::Device),
        (true, true) => {
            // SAFETY: the caller's promise.
            let lent = unsafe { LentMemory::new(given.memory, given.memory_bytes) };
            Ok(RingPlacement::Lent(lent))
        }
    }
}

/// # Safety
/// Its pointers are null or valid.
pub(crate) unsafe fn options(
    given: &kvt_offload_opts_t,
    session: u32,
) -> Result<(Opts, Vec<Arc<Foreign<Table>>>)> {
    no_reserved(given.reserved)?;
    // SAFETY: the caller's promise.
    let home = unsafe { home_of(given)? };
    let level = match given.level {
        KVT_LEVEL_RAM => Level::Ram,
        KVT_LEVEL_DISK => Level::Disk,
        KVT_LEVEL_DURABLE => Level::Durable,
        KVT_LEVEL_REMOTE => Level::Remote,
        other => fail!(Invalid, "level {other} is none of KVT_LEVEL_*"),
    };
    let Some(dtype) = Dtype::from_code(given.dtype) else {
        fail!(Invalid, "dtype {} is none of KVT_DTYPE_*", given.dtype);
    };
    let mut taken = Vec::new();
    // SAFETY: the caller's promise.
    let (shape, prefill, decode) = unsafe {
        let shape = shape_of(given.attention)?;
        let (spec, bytes, custom) = (given.prefill, given.prefill_bytes, given.prefill_custom);
        let prefill = policy_of("prefill", spec, bytes, custom, &shape, &mut taken)?;
        let (spec, bytes, custom) = (given.decode, given.decode_bytes, given.decode_custom);
        (shape, prefill, policy_of("decode", spec, bytes, custom, &shape, &mut taken)?)
    };
    // SAFETY: as above; null is none.
    let recipe = unsafe {
        let of = |what, spec: *const c_char, bytes| {
            if spec.is_null() { Ok("") } else { text(what, spec, bytes) }
        };
        let prefill = of("prefill", given.prefill, given.prefill_bytes)?;
        let decode = of("decode", given.decode, given.decode_bytes)?;
        // Neither has a line break: they are sound specs. Of a policy of the engine's own nobody
        // knows whether it is the same another time.
        if taken.is_empty() && prefill.len() + decode.len() > 0 {
            format!("{prefill}\n{decode}")
        } else {
            String::new()
        }
    };
    let opts = Opts {
        session,
        shape,
        dtype,
        buffers: given.buffers,
        buffer_tokens: given.buffer_tokens,
        placement: home,
        level,
        policies: Policies { prefill, decode },
        recipe,
        clock: Clock::real(),
    };
    Ok((opts, taken))
}

/// Opens an offload for a session. The ring is in host memory, or with KVT_OFFLOAD_ON_DEVICE in
/// memory of the store's device; the store's account pays for it, unless the engine lends it.
///
/// @param opts  What it is for.
/// @param out   The offload; close it with kvt_offload_close.
/// @param err   Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID when the attention is not that of the session's namespace,
///         KVT_E_SPEC, KVT_E_UNSUPPORTED (a policy that does nothing there, a device that gives
///         out no memory), KVT_E_UNAVAILABLE (the store has no device with memory, or it is
///         lost), KVT_E_TOO_SMALL (memory that is lent), KVT_E_BUDGET, KVT_E_LIMIT,
///         KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the offload. Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state. Memory that is lent
/// is the offload's alone.
#[capi]
pub unsafe extern "C" fn kvt_offload_open(
    opts: *const kvt_offload_opts_t,
    out: *mut *mut kvt_offload_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = read(opts)?;
    let session = pin(given.session, Access::Use)?;
    let (opts, taken) = options(&given, session.number)?;
    let store: &Arc<_> = &session.ns.store;
    let mut offload = Offload::open(store, opts)?;
    offload.audit(given.audit_every)?;
    let handle = insert(OffloadNoun::new(offload, session))?;
    taken.iter().for_each(|taken| taken.keep());
    out.write(handle);
    Ok(())
}

/// Closes an offload and clears the handle. Loads and puts of its own are given up; it waits
/// for their end. What the store has stays there. On a device no kernel reads buffers any more.
///
/// @param offload  The handle; null, or a handle that is null, is fine.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `offload` is null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_offload_close(offload: *mut *mut kvt_offload_t) -> kvt_status_t {
    free(offload, |_| Ok(()))
}

/// How many tokens of a layer it has.
///
/// @param offload     The offload.
/// @param layer       The layer.
/// @param out_stored  Receives those that are in the store, in whole blocks.
/// @param out_tail    Receives those behind them, which fill no block yet; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for writes.
#[capi]
pub unsafe extern "C" fn kvt_offload_tokens(
    offload: *const kvt_offload_t,
    layer: u32,
    out_stored: *mut u32,
    out_tail: *mut u32,
) -> kvt_status_t {
    require(out_stored)?;
    let (stored, tail) = with_offload(offload, |offload| offload.tokens(layer))?;
    out_stored.write(stored);
    put(out_tail, tail);
    Ok(())
}

/// Takes back what came behind `tokens` tokens, in all layers. To be called before
/// kvt_session_truncate: where a block is cut, its first tokens come back from the store.
/// Loads under way are given up, as by kvt_offload_release. After a failure no layer is cut: cut
/// again, there or at a multiple of a block, which brings nothing back.
///
/// @param offload  The offload.
/// @param tokens   How many are left.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_NOT_FOUND when a block that is cut is not in the store any more,
///         KVT_E_NOMEM, KVT_E_IO, KVT_E_UNAVAILABLE, KVT_E_CLOSED, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread; waits. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_offload_truncate(
    offload: *const kvt_offload_t,
    tokens: u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_offload(offload, |offload| offload.truncate(tokens))
}

/// Goes on from tokens that are in the store already, from another session or an earlier
/// life: whole blocks. Only before anything was put; the session has these tokens. What
/// policies knew of the blocks comes back as far as it was kept with them; of others they are
/// told the keys, which are loaded for that.
///
/// @param offload  The offload.
/// @param tokens   How many, a multiple of a block's.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUSY when it has tokens already, KVT_E_NOT_FOUND when keys that
///         policies have to see are not in the store, KVT_E_INVALID, KVT_E_IO, KVT_E_AGAIN,
///         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread; waits. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_offload_resume(
    offload: *const kvt_offload_t,
    tokens: u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_offload(offload, |offload| offload.resume(tokens))
}

// Statistics of offloads.

/// What an offload has done, and who waited for what.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_offload_stats_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Loads of a layer.
    pub loads: u64,
    /// Of them, those that a policy has cut.
    pub selections: u64,
    /// Blocks that could have been loaded.
    pub candidates: u64,
    /// Blocks that were.
    pub loaded_blocks: u64,
    /// Bytes of them.
    pub loaded_bytes: u64,
    /// Bytes that were not loaded, since a policy did not want them.
    pub saved_bytes: u64,
    /// Loads that failed.
    pub failed_loads: u64,
    /// Blocks that were put into the store.
    pub put_blocks: u64,
    /// Bytes of them.
    pub put_bytes: u64,
    /// Bytes that were copied to or from tails, the last tokens, which fill no block.
    pub tail_bytes: u64,
    /// Tokens that policies evicted: heads times tokens, where heads have lists of their own.
    pub evicted_tokens: u64,
    /// What policies know of the sequence, in bytes.
    pub policy_bytes: u64,
    /// Waits for blocks to come.
    pub load_waits: u64,
    /// How long those took, in nanoseconds.
    pub load_wait_ns: u64,
    /// Waits for a full tail to leave.
    pub tail_waits: u64,
    /// How long those took, in nanoseconds.
    pub tail_wait_ns: u64,
    /// Waits for blocks that kvt_offload_truncate divides.
    pub cut_waits: u64,
    /// How long those took, in nanoseconds.
    pub cut_wait_ns: u64,
    /// Selections of a policy that took any time.
    pub select_waits: u64,
    /// How long those took, in nanoseconds.
    pub select_wait_ns: u64,
    /// Loads that were audited.
    pub audited: u64,
    /// Blocks that their layers' own queries looked at most, as many of each load as came.
    pub wanted: u64,
    /// Of those, blocks that came: found / wanted is the recall of selections.
    pub found: u64,
    /// Which part of the attention to blocks went to those that came, in millionths: the sum
    /// over what was audited.
    pub found_ppm: u64,
    /// Bytes of keys that came from device memory to host memory, for policies to see.
    pub key_bytes: u64,
}

/// What an offload has done since it was opened.
///
/// @param offload  The offload.
/// @param out      Receives it.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_offload_stats(
    offload: *const kvt_offload_t,
    out: *mut kvt_offload_stats_t,
) -> kvt_status_t {
    check_out(out)?;
    let stats = with_offload(offload, |offload| Ok(offload.stats()))?;
    write(
        out,
        &kvt_offload_stats_t {
            struct_size: 0,
            loads: stats.loads,
            selections: stats.selections,
            candidates: stats.candidates,
            loaded_blocks: stats.loaded_blocks,
            loaded_bytes: stats.loaded_bytes,
            saved_bytes: stats.saved_bytes,
            failed_loads: stats.failed_loads,
            put_blocks: stats.put_blocks,
            put_bytes: stats.put_bytes,
            tail_bytes: stats.tail_bytes,
            evicted_tokens: stats.evicted_tokens,
            policy_bytes: stats.policy_bytes,
            load_waits: stats.load_waits.count,
            load_wait_ns: stats.load_waits.ns,
            tail_waits: stats.tail_waits.count,
            tail_wait_ns: stats.tail_waits.ns,
            cut_waits: stats.cut_waits.count,
            cut_wait_ns: stats.cut_waits.ns,
            select_waits: stats.select_waits.count,
            select_wait_ns: stats.select_waits.ns,
            audited: stats.audited,
            wanted: stats.wanted,
            found: stats.found,
            found_ppm: stats.found_ppm,
            key_bytes: stats.key_bytes,
        },
    );
    Ok(())
}

// Offloads on devices.

/// How much memory the ring and the tails of an offload take that is opened so: what an engine
/// has to lend. Nothing is opened.
///
/// @param opts       What it would be opened with; `memory` is not looked at.
/// @param out_bytes  Receives how much.
/// @param err        Explains a failure; may be null.
/// @return KVT_OK; what kvt_offload_open refuses of `opts`.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_offload_memory_bytes(
    opts: *const kvt_offload_opts_t,
    out_bytes: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out_bytes)?;
    let mut given = read(opts)?;
    (given.memory, given.memory_bytes) = (0, 0);
    let session = pin(given.session, Access::Use)?;
    // SAFETY: the caller's promise; policies of the engine's are not kept.
    let (opts, _) = options(&given, session.number)?;
    let bytes = Offload::memory_bytes(&session.ns.store, &opts)?;
    out_bytes.write(bytes);
    Ok(())
}

/// What an offload copies from now on waits for an event of the store's device: that kernels
/// have read buffers which are given back, that what is put was computed. To be called before
/// kvt_offload_put, and before the kvt_offload_release or kvt_offload_give_back of a buffer that
/// kernels may still read. Only the newest event counts: one that comes behind all that has to
/// be waited for.
///
/// @param offload  The offload.
/// @param event    An event of the device that the store was opened with; 0 = none.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_HANDLE when it is none of that device (or the offload's handle). What
///         the event's batch failed with: the one before still counts. KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Ownership: the event stays yours. Release it after another one or 0 was given, or the
/// offload was closed, and once the puts and loads that were begun until then have ended. What
/// waits for an event that fails, fails. Threading: any thread. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_offload_set_ready_event(
    offload: *const kvt_offload_t,
    event: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let event = (event != 0).then_some(Event(event));
    with_offload(offload, |offload| offload.after(event))
}

// Input and loads.

/// Of a load: these blocks were chosen by somebody else. They come as they are, no policy is
/// asked, and the tail comes behind them. A query serves audits alone.
pub const KVT_OFFLOAD_LOAD_CHOSEN: u64 = 1;

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
/// @param out_op   Receives an op, to be freed by you: when it is released `k` and `v` are
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
    out_op: *mut *mut kvt_op_t,
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
    let (opts, each) = submit_opts(opts, out_op.is_null())?;
    if each {
        fail!(Invalid, "KVT_SUBMIT_EACH has no meaning for a put");
    }
    let views = LayerViews { k, v };
    let op = with_offload(offload, |offload| {
        // Fewer tokens are no whole block: there is no op then.
        if opts.detached && opts.queue.is_none() && tokens >= offload.shape().block_tokens {
            fail!(Invalid, "neither out_op nor a queue: nobody is told when k is read");
        }
        let op = offload.put(layer, first, tokens, &views, &opts)?;
        Ok(op.map_or(std::ptr::null_mut(), |op| encode::<Op>(op.key())))
    })?;
    put(out_op, op);
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
/// @param flags        KVT_OFFLOAD_LOAD_CHOSEN or 0. With it `blocks` is not null unless there is
///                     none: then the tail comes alone.
/// @param query        The layer's queries, [tokens, query heads, key dim], for which a
///                     policy selects; null = all blocks come.
/// @param context      Where in the sequence that is.
/// @param out_count    Receives how many blocks come; may be null.
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
    out_count: *mut u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    known_flags(flags, KVT_OFFLOAD_LOAD_CHOSEN)?;
    let (context, ids) = (context_of(context)?, numbers(blocks, block_count, MAX_LIST)?);
    let which = match flags & KVT_OFFLOAD_LOAD_CHOSEN {
        0 if blocks.is_null() => BlockSelection::All,
        0 => BlockSelection::Blocks(ids),
        _ => BlockSelection::Chosen(ids),
    };
    let load = |query: Option<&crate::attention::Rows<'_>>| {
        with_offload(offload, |offload| offload.load(buffer, layer, which, query, &context))
    };
    let count = with_rows("queries", query, load)?;
    put(out_count, count);
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
pub unsafe extern "C" fn kvt_offload_release(
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
/// @param out_count  Receives how many there are, also when there is no room for them.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `blocks` is null or valid for writes of `room` numbers, `out_count` for a write.
#[capi]
pub unsafe extern "C" fn kvt_offload_blocks(
    offload: *const kvt_offload_t,
    buffer: u32,
    blocks: *mut u32,
    capacity: u64,
    out_count: *mut u64,
) -> kvt_status_t {
    with_offload(offload, |offload| {
        let all = offload.blocks(buffer)?;
        fill(all.len(), all.iter().copied(), blocks, capacity, out_count)
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
/// @param out_count  Receives how many there are.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `positions` is valid for reads, `rows` for writes of `count` numbers, `out_count` is null or
/// valid for a write.
#[capi]
pub unsafe extern "C" fn kvt_offload_rows(
    offload: *const kvt_offload_t,
    buffer: u32,
    positions: *const u32,
    count: u64,
    rows: *mut u32,
    out_count: *mut u64,
) -> kvt_status_t {
    let positions = numbers(positions, count, MAX_LIST)?;
    if !positions.is_sorted_by(|a, b| a < b) {
        fail!(Invalid, "positions ascend, each once");
    }
    let mut found = Vec::new();
    with_offload(offload, |offload| offload.rows_of(buffer, positions, &mut found))?;
    require(rows)?;
    fill(found.len(), found.iter().copied(), rows, count, out_count)
}

/// Writes so many numbers to a caller's array if all of them fit, and how many there are in
/// any case.
///
/// # Safety
/// `to` is null or valid for writes of `room` numbers, `out_count` is null or valid for a write.
pub(crate) unsafe fn fill(
    count: usize,
    from: impl IntoIterator<Item = u32>,
    to: *mut u32,
    capacity: u64,
    out_count: *mut u64,
) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { put(out_count, count as u64) };
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

// Kept tokens.

/// Most sums of one call.
const MAX_SUMS: usize = 1 << 28;

/// What each key got of the attention of some queries: policies that want to know it are
/// told (h2o, tova, snapkv and those like it).
///
/// @param offload    The offload.
/// @param layer      The layer.
/// @param queries    Of how many queries.
/// @param sums       For each query head (or one row for all of them) a number for each token
///                   that is kept, in their order.
/// @param sum_count  How many numbers that are.
/// @param tokens     How many tokens are kept.
/// @param err        Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID (numbers below zero or not finite, wrong counts), KVT_E_LIMIT,
///         KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `sums` is valid for reads of `sum_count` numbers.
#[capi]
pub unsafe extern "C" fn kvt_offload_observe(
    offload: *const kvt_offload_t,
    layer: u32,
    queries: u32,
    sums: *const f32,
    sum_count: u64,
    tokens: u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let sums = numbers(sums, sum_count, MAX_SUMS)?;
    with_offload(offload, |offload| offload.observe(layer, queries, sums, tokens))
}

/// Has policies evict tokens of a layer, if some have to go. Nothing is moved in the store:
/// blocks of which nothing is left are not loaded any more, and kvt_offload_retained says which
/// tokens of the others kernels are to see.
///
/// @param offload      The offload.
/// @param layer        The layer.
/// @param context      Where in the sequence that is.
/// @param out_evicted  Receives 1 when some went, else 0; may be null.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_UNSUPPORTED when both policies evict, KVT_E_INVALID, KVT_E_TOO_NEW,
///         KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `context` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_offload_evict(
    offload: *const kvt_offload_t,
    layer: u32,
    context: *const kvt_sparse_context_t,
    out_evicted: *mut u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let context = context_of(context)?;
    let went = with_offload(offload, |offload| offload.evict(layer, &context))?;
    put(out_evicted, u32::from(went));
    Ok(())
}

/// Which tokens of a layer are left.
///
/// @param offload    The offload.
/// @param layer      The layer.
/// @param head       Of which list: there are `out_heads` of them, one for each head of keys
///                   (or of queries), or one for all.
/// @param positions  Receives positions, ascending; null = only counts are wanted.
/// @param capacity       How many it has room for.
/// @param out_count  Receives how many there are, also when there is no room for them.
/// @param out_heads  Receives how many lists there are; 0 = all tokens are left. May be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `positions` is null or valid for writes of `room` numbers, the others for a write.
#[capi]
pub unsafe extern "C" fn kvt_offload_retained(
    offload: *const kvt_offload_t,
    layer: u32,
    head: u32,
    positions: *mut u32,
    capacity: u64,
    out_count: *mut u64,
    out_heads: *mut u32,
) -> kvt_status_t {
    require(out_count)?;
    with_offload(offload, |offload| -> Result<()> {
        let kept = offload.retained(layer)?;
        let heads = kept.as_ref().map_or(0, |kept| kept.lists() as u32);
        if head >= heads.max(1) {
            fail!(Invalid, "list {head} of {heads}");
        }
        put(out_heads, heads);
        let (count, list) = match &kept {
            Some(kept) => (kept.count(head as usize), Some(kept.positions(head as usize))),
            None => (0, None),
        };
        fill(count, list.into_iter().flatten(), positions, capacity, out_count)
    })
}

/// Tells a policy of rows of its own (dsa: what its indexer keeps of each token): kvt_offload_put
/// tells all others of the model's keys.
///
/// @param offload  The offload.
/// @param layer    The layer.
/// @param first    The position of the first token.
/// @param keys     The rows.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `keys` is valid for the size it states, and its view leads to
/// memory that can be read during the call.
#[capi]
pub unsafe extern "C" fn kvt_offload_append_keys(
    offload: *const kvt_offload_t,
    layer: u32,
    first: u32,
    keys: *const kvt_rows_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let tell = |keys: Option<&Rows<'_>>| match keys {
        Some(keys) => with_offload(offload, |offload| offload.append_keys(layer, first, keys)),
        None => fail!(Invalid, "keys is null"),
    };
    with_rows("keys", keys, tell)
}

/// Gives a policy numbers of the engine's for the next load of a layer: a score for each
/// block that can be loaded (external), or a weight for each query and head (dsa).
///
/// @param offload      The offload.
/// @param layer        The layer.
/// @param is_prefill   1 = for the policy for prompts, 0 = for text that is written.
/// @param scores       The numbers.
/// @param score_count  How many.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_UNSUPPORTED when the policy wants none, KVT_E_INVALID, KVT_E_LIMIT,
///         KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `scores` is valid for reads of `score_count` numbers.
#[capi]
pub unsafe extern "C" fn kvt_offload_score(
    offload: *const kvt_offload_t,
    layer: u32,
    is_prefill: u32,
    scores: *const f32,
    score_count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    if is_prefill > 1 {
        fail!(Invalid, "is_prefill is {is_prefill}");
    }
    let scores = numbers(scores, score_count, MAX_SUMS)?;
    with_offload(offload, |offload| offload.score(layer, is_prefill == 1, scores))
}

// Forks.

/// Opens another offload for a session that was forked from an offload's (kvt_session_fork):
/// it has the same tokens. The blocks in the store are those of both, the tails are copied,
/// and so are the lists of tokens that are left; policies go on from what they know. It has a
/// ring of its own, with nothing in it, which the store's account pays for, and counts from
/// zero. A full tail leaves first.
///
/// @param offload  The offload, which stays as it is.
/// @param session  The new session; it has the tokens that the offload's layers have, and may
///                 have more.
/// @param out      The new offload; close it with kvt_offload_close.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID when the session is the offload's own, another store's or
///         namespace's, or has other tokens; KVT_E_BUDGET, KVT_E_LIMIT, KVT_E_AGAIN,
///         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the new offload. Threading: any thread; waits for a full tail to
/// leave. Since 0.1.
///
/// # Safety
/// Pointers are null or valid.
#[capi]
pub unsafe extern "C" fn kvt_offload_fork(
    offload: *const kvt_offload_t,
    session: *const kvt_session_t,
    out: *mut *mut kvt_offload_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let session = pin(session, Access::Use)?;
    let other = with_offload(offload, |offload| offload.fork(&session.ns.store, session.number))?;
    out.write(insert(OffloadNoun::new(other, session))?);
    Ok(())
}
