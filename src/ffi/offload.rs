//! Layer-wise offload of the KV of one session: contexts larger than the engine's memory.
//!
//! An offload keeps the KV of a session in a store, and a ring of buffers for the layers that are
//! being computed. Loads of the next layers run while a layer is computed. With a sparse policy
//! only the blocks that it selects are loaded.
//!
//! Life cycle: kvt_offload_open, kvt_offload_put for each layer of the prompt, then for each step
//! of decode kvt_offload_begin, kvt_offload_take and _give_back for each layer, kvt_offload_put for
//! the new token; kvt_offload_close.
//!
//! ```c
//! kvt_offload_opts_t opts = KVT_OFFLOAD_OPTS_INIT;
//! opts.session = session, opts.attention = &shape, opts.dtype = KVT_DTYPE_F16;
//! opts.buffers = 3, opts.buffer_tokens = 4096;
//! opts.decode = "quest(budget=2048)", opts.decode_bytes = KVT_NUL_TERMINATED;
//! if (kvt_offload_open(&opts, &offload, &err) != KVT_OK) return fail(err);
//! kvt_sparse_context_t step = KVT_SPARSE_CONTEXT_INIT;
//! step.tokens = 65536, step.first_query = 65535;
//! if (kvt_offload_begin(offload, &step, &err) != KVT_OK) return fail(err); /* loads begin */
//! for (uint32_t layer = 0; layer < shape.layers; layer++) {
//!     kvt_offload_kv_t kv = KVT_OFFLOAD_KV_INIT;
//!     if (kvt_offload_take(offload, layer, &rows, &kv, &err) != KVT_OK) return fail(err);
//!     use(&kv); /* attention over kv.k and kv.v */
//!     if (kvt_offload_give_back(offload, layer, &err) != KVT_OK) return fail(err);
//! }
//! ```

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
use crate::ffi::memory::{
    KVT_MEMORY_DEVICE, KVT_MEMORY_HOST, kvt_dtype_t, kvt_memory_t, kvt_view_t, plane_anywhere,
};
use crate::ffi::runtime::{kvt_op_t, kvt_submit_opts_t, submit_opts};
use crate::ffi::session::{
    KVT_LEVEL_DISK, KVT_LEVEL_DURABLE, KVT_LEVEL_RAM, KVT_LEVEL_REMOTE, SessionNoun, kvt_level_t,
    kvt_session_t,
};
use crate::ffi::sparse::{Table, kvt_sparse_custom_t, made};
use crate::meta::dtype::Dtype;
use crate::offload::{BlockSelection, LentMemory, Loaded, Offload, Opts, Policies, RingPlacement};
use crate::sparse::{Shape, Sparse, registry};
use crate::store::state::Level;
use crate::store::state::session::{LayerViews, PlaneView, Tokens};

// Offloads.

/// Layer-wise KV of one session: a ring of buffers that kernels read, backed by a store. A block is
/// a chunk of the session's namespace. The last tokens of a layer, which fill no block, are its
/// tail. Sparse policies may select the blocks to load, and evict tokens.
///
/// Threading: calls on one offload run one at a time. A second call waits; inside a callback it
/// returns KVT_E_REENTRANT instead.
pub struct kvt_offload_t(());

/// Flags of an offload.
pub type kvt_offload_flags_t = u64;

/// The ring and the tails are in memory of the store's device.
pub const KVT_OFFLOAD_ON_DEVICE: kvt_offload_flags_t = 1;

/// Options of kvt_offload_open.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_offload_opts_t {
    pub struct_size: u64,
    /// KVT_OFFLOAD_ON_DEVICE or 0.
    pub flags: kvt_offload_flags_t,
    /// The session; it stays open until the offload is closed, even if its handle is closed first.
    pub session: *const kvt_session_t,
    /// Shape of the attention; block_tokens must be the chunk_tokens of the session's namespace.
    pub attention: *const kvt_attention_t,
    /// Elements of K and V.
    pub dtype: kvt_dtype_t,
    /// Buffers of the ring, 1 to 256. A pass loads up to buffers - 1 layers ahead.
    pub buffers: u32,
    /// Tokens of a buffer, 1 to max_tokens, rounded up to blocks; the tail has room in addition.
    pub buffer_tokens: u32,
    /// Level at which a put completes.
    pub level: kvt_level_t,
    /// Spec of the sparse policy for prefill; null = all blocks are loaded.
    pub prefill: *const c_char,
    pub prefill_bytes: u64,
    /// Spec of the sparse policy for decode; null = all blocks are loaded.
    pub decode: *const c_char,
    pub decode_bytes: u64,
    /// Audit every n-th load that leaves out blocks; 0 = none. An audit loads the keys of all
    /// blocks, and compares the selection with the attention of the layer's own queries.
    pub audit_every: u32,
    pub reserved: u32,
    /// Custom policy instead of `prefill`, or null; called by the threads that call the offload.
    pub prefill_custom: *const kvt_sparse_custom_t,
    /// Custom policy instead of `decode`, or null.
    pub decode_custom: *const kvt_sparse_custom_t,
    /// With KVT_OFFLOAD_ON_DEVICE: device address of memory that the engine lends for the ring and
    /// the tails until the offload is closed, a multiple of 256. 0 = the device allocates it.
    pub memory: u64,
    /// Bytes of `memory`, at least kvt_offload_memory_bytes.
    pub memory_bytes: u64,
}

/// An offload with its session, which stays open as long as the offload.
pub(crate) struct OffloadNoun {
    /// None while a call uses the offload, since callbacks of policies are called without a lock.
    offload: Mutex<Option<Box<Offload>>>,
    returned: Condvar,
    pub(crate) session: Pin<'static, SessionNoun>,
}

impl OffloadNoun {
    fn new(offload: Offload, session: Pin<'static, SessionNoun>) -> OffloadNoun {
        let offload = Mutex::new(Some(Box::new(offload)));
        OffloadNoun { offload, returned: Condvar::new(), session }
    }

    /// Waits until no other call uses the offload. REENTRANT = the offload is in use, and this
    /// thread runs a callback, which may be part of that use.
    fn take(&self) -> Result<Taken<'_>> {
        let mut slot = self.offload.lock();
        loop {
            if let Some(offload) = slot.take() {
                return Ok(Taken { owner: self, offload: Some(offload) });
            }
            refuse_reentry()?;
            self.returned.wait(&mut slot);
        }
    }
}

/// An offload in use by a call. Dropping it returns the offload to its owner, also after a panic.
struct Taken<'a> {
    owner: &'a OffloadNoun,
    offload: Option<Box<Offload>>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        *self.owner.offload.lock() = self.offload.take();
        self.owner.returned.notify_one();
    }
}

noun!(OffloadNoun, kvt_offload_t, 14, "offload");

/// Calls `body` with an offload, and logs an error that failed no call.
fn with_offload<R>(
    handle: *const kvt_offload_t,
    body: impl FnOnce(&mut Offload) -> Result<R>,
) -> Result<R> {
    let noun = enter(handle)?;
    let mut taken = noun.take()?;
    let Some(offload) = &mut taken.offload else { return Err(Status::Panic.into()) };
    let (result, error) = (body(offload), offload.take_error());
    drop(taken);
    if let Some(error) = error {
        log::warn!("an offload continues after an error that failed no call: {error}");
    }
    result
}

/// The policy for a phase, from a spec or from callbacks; none = all blocks are loaded.
///
/// # Safety
/// `spec` is null or valid for its length; `custom` is null or valid for the size it states.
unsafe fn policy_of(
    phase: &str,
    spec: *const c_char,
    bytes: u64,
    custom: *const kvt_sparse_custom_t,
    shape: &Shape,
    callbacks: &mut Vec<Arc<Foreign<Table>>>,
) -> Result<Option<Box<dyn Sparse>>> {
    if !custom.is_null() {
        if !spec.is_null() {
            fail!(Invalid, "{phase} and {phase}_custom are both set: set one of them to null");
        }
        // SAFETY: the caller's promise.
        let (policy, foreign) = unsafe { made(custom, shape).map_err(|e| e.within(phase))? };
        callbacks.push(foreign);
        return Ok(Some(policy));
    }
    if spec.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let policy = unsafe { text("spec", spec, bytes) }
        .and_then(Spec::parse)
        .and_then(|spec| registry::make(&spec, shape));
    policy.map(Some).map_err(|error| error.within(phase))
}

/// The placement of the ring.
///
/// # Safety
/// Lent memory is as [`LentMemory::new`] requires.
unsafe fn placement_of(given: &kvt_offload_opts_t) -> Result<RingPlacement> {
    known_flags(given.flags, KVT_OFFLOAD_ON_DEVICE)?;
    let is_lent = given.memory != 0;
    match (given.flags & KVT_OFFLOAD_ON_DEVICE != 0, is_lent) {
        (_, false) if given.memory_bytes != 0 => {
            fail!(
                Invalid,
                "memory_bytes is {} and memory is 0: set both, or neither",
                given.memory_bytes
            );
        }
        (false, true) => fail!(
            Invalid,
            "memory is set without KVT_OFFLOAD_ON_DEVICE: set the flag, or memory to 0"
        ),
        (false, false) => Ok(RingPlacement::Host),
        (true, false) => Ok(RingPlacement::Device),
        (true, true) => {
            // SAFETY: the caller's promise.
            let lent = unsafe { LentMemory::new(given.memory, given.memory_bytes) };
            Ok(RingPlacement::Lent(lent))
        }
    }
}

/// The options of an offload, and the callbacks of custom policies, to be kept once it is open.
///
/// # Safety
/// The pointers in `given` are null or valid, and lent memory is as [`LentMemory::new`] requires.
unsafe fn options(
    given: &kvt_offload_opts_t,
    session: u32,
) -> Result<(Opts, Vec<Arc<Foreign<Table>>>)> {
    no_reserved(given.reserved)?;
    // SAFETY: the caller's promise.
    let placement = unsafe { placement_of(given)? };
    let level = match given.level {
        KVT_LEVEL_RAM => Level::Ram,
        KVT_LEVEL_DISK => Level::Disk,
        KVT_LEVEL_DURABLE => Level::Durable,
        KVT_LEVEL_REMOTE => Level::Remote,
        other => fail!(Invalid, "level {other} is unknown: pass one of KVT_LEVEL_*"),
    };
    let Some(dtype) = Dtype::from_code(given.dtype) else {
        fail!(Invalid, "dtype {} is unknown: pass one of KVT_DTYPE_*", given.dtype);
    };
    let mut callbacks = Vec::new();
    // SAFETY: the caller's promise.
    let (shape, prefill, decode) = unsafe {
        let shape = shape_of(given.attention)?;
        let (spec, bytes, custom) = (given.prefill, given.prefill_bytes, given.prefill_custom);
        let prefill = policy_of("prefill", spec, bytes, custom, &shape, &mut callbacks)?;
        let (spec, bytes, custom) = (given.decode, given.decode_bytes, given.decode_custom);
        (shape, prefill, policy_of("decode", spec, bytes, custom, &shape, &mut callbacks)?)
    };
    // SAFETY: as above; null is none.
    let recipe = unsafe {
        let of = |what, spec: *const c_char, bytes| {
            if spec.is_null() { Ok("") } else { text(what, spec, bytes) }
        };
        let prefill = of("prefill", given.prefill, given.prefill_bytes)?;
        let decode = of("decode", given.decode, given.decode_bytes)?;
        // Neither has a line break, since they are valid specs. State of a custom policy is not
        // stored: the policy may be another one when the state is loaded.
        if callbacks.is_empty() && prefill.len() + decode.len() > 0 {
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
        placement,
        level,
        policies: Policies { prefill, decode },
        recipe,
        clock: Clock::real(),
    };
    Ok((opts, callbacks))
}

/// Opens an offload for a session. The attention must match the layout of the session's namespace.
/// The store's account is charged for the ring and the tails, unless the engine lends their memory.
///
/// @return KVT_E_SPEC, KVT_E_UNSUPPORTED (a policy has no function in its phase, or the device does
///         not allocate memory), KVT_E_UNAVAILABLE (the store has no device with memory of its own,
///         or the device is lost), KVT_E_TOO_SMALL (the lent memory), KVT_E_BUDGET, KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_offload_open(
    opts: *const kvt_offload_opts_t,
    out: *mut *mut kvt_offload_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = read(opts)?;
    let session = pin(given.session, Access::Use)?;
    let (opts, callbacks) = options(&given, session.number)?;
    let store: &Arc<_> = &session.ns.store;
    let mut offload = Offload::open(store, opts)?;
    offload.audit(given.audit_every)?;
    let handle = insert(OffloadNoun::new(offload, session))?;
    callbacks.iter().for_each(|callbacks| callbacks.keep());
    out.write(handle);
    Ok(())
}

/// Closes an offload. Cancels its loads and its puts of full tails, and waits for their end. Blocks
/// in the store stay. Kernels must not read its buffers any more.
#[capi]
pub unsafe extern "C" fn kvt_offload_close(offload: *mut *mut kvt_offload_t) -> kvt_status_t {
    free(offload, |_| Ok(()))
}

/// Reads the number of tokens of a layer.
///
/// @param out_stored  Receives the tokens that were put into the store, in whole blocks.
/// @param out_tail    Receives the tokens of the tail, which follow; may be null.
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

/// Drops the tokens from position `tokens` on, in all layers. Call it before kvt_session_truncate.
/// Loads in progress are cancelled. If the new end divides a block, the call loads the first tokens
/// of that block from the store, and waits for them. After a failure no layer is truncated: call it
/// again, for example with a multiple of block_tokens, which loads nothing.
///
/// @return KVT_E_NOT_FOUND (a divided block is not in the store any more), KVT_E_IO,
///         KVT_E_UNAVAILABLE.
#[capi]
pub unsafe extern "C" fn kvt_offload_truncate(
    offload: *const kvt_offload_t,
    tokens: u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_offload(offload, |offload| offload.truncate(tokens))
}

/// Resumes from tokens that the store has, for example from another session or an earlier process.
/// Call it before the first put; the session must have these tokens. Stored policy state of the
/// blocks is loaded. For blocks without it, the call loads the keys and passes them to policies.
///
/// @param tokens  A multiple of block_tokens, at most max_tokens.
/// @return KVT_E_BUSY (the offload has tokens), KVT_E_NOT_FOUND (keys that a policy needs are not
///         in the store), KVT_E_IO, KVT_E_AGAIN.
#[capi]
pub unsafe extern "C" fn kvt_offload_resume(
    offload: *const kvt_offload_t,
    tokens: u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_offload(offload, |offload| offload.resume(tokens))
}

// Statistics of offloads.

/// Counters since the offload was opened. Fields named ..._waits count waits that took time, and
/// the ..._wait_ns after them sum up their durations.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_offload_stats_t {
    pub struct_size: u64,
    /// Loads of a layer.
    pub loads: u64,
    /// Loads for which a policy selected blocks.
    pub selections: u64,
    /// Blocks that loads could choose from.
    pub candidates: u64,
    pub loaded_blocks: u64,
    pub loaded_bytes: u64,
    /// Bytes of candidates that were not loaded, because they were not selected.
    pub saved_bytes: u64,
    pub failed_loads: u64,
    /// Blocks that were put into the store.
    pub put_blocks: u64,
    pub put_bytes: u64,
    /// Bytes that were copied to or from tails.
    pub tail_bytes: u64,
    /// Tokens that policies evicted, counted once for each list of retained tokens.
    pub evicted_tokens: u64,
    /// Bytes of the policies' state of the sequence, at present.
    pub policy_bytes: u64,
    /// Waits for loads.
    pub load_waits: u64,
    pub load_wait_ns: u64,
    /// Waits for puts of full tails.
    pub tail_waits: u64,
    pub tail_wait_ns: u64,
    /// Waits for blocks that kvt_offload_truncate divides.
    pub cut_waits: u64,
    pub cut_wait_ns: u64,
    /// Selections by policies.
    pub select_waits: u64,
    pub select_wait_ns: u64,
    /// Loads that were audited.
    pub audited: u64,
    /// Blocks with the most attention in audited loads, as many for each load as it loaded.
    pub wanted: u64,
    /// Wanted blocks that were loaded: found / wanted is the recall of selections.
    pub found: u64,
    /// Share of the attention to blocks that went to loaded ones, in millionths; sum over audits.
    pub found_ppm: u64,
    /// Bytes of keys that were copied from device to host memory for policies.
    pub key_bytes: u64,
}

/// Reads the counters of an offload.
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

/// Computes the bytes of the ring and the tails of an offload with these options, for an engine
/// that lends this memory. Opens nothing.
///
/// @param opts  `memory` and `memory_bytes` are ignored.
/// @return As kvt_offload_open, for errors in `opts`.
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
    // SAFETY: the caller's promise; the callbacks of custom policies are not kept.
    let (opts, _) = options(&given, session.number)?;
    let bytes = Offload::memory_bytes(&session.ns.store, &opts)?;
    out_bytes.write(bytes);
    Ok(())
}

/// Sets the ready event of copies that begin from now on, between the engine's tensors, the buffers
/// and the store. Call it before kvt_offload_put, with an event after the kernels that compute K
/// and V. Call it before kvt_offload_release and kvt_offload_give_back, with an event after the
/// kernels that read the buffer. Only the newest event counts: it must come after all work that
/// copies have to wait for. Copies fail if their event fails.
///
/// The event stays the caller's. Release it once two things have happened: another event or 0 was
/// set, or the offload was closed; and all puts and loads that began before have ended.
///
/// @param event  Event of the store's device; 0 = none.
/// @return The status of the event, if it has failed. After a failure the previous event still
///         counts.
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

/// Flags of kvt_offload_load.
pub type kvt_offload_load_flags_t = u64;

/// The caller has chosen the blocks. They are loaded without a policy, and the tail follows them. A
/// query is used for audits only.
pub const KVT_OFFLOAD_LOAD_CHOSEN: kvt_offload_load_flags_t = 1;

/// Most blocks or positions in one call.
const MAX_LIST: usize = 1 << 24;

/// Rows of K and V of a layer in a buffer: blocks in ascending order, then the tail. They are valid
/// until the buffer is given back.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_offload_kv_t {
    pub struct_size: u64,
    /// K of the first row; a row has key_heads * key_dim elements. Null if there are no rows.
    pub k: *const c_void,
    /// V of the first row; a row has key_heads * value_dim elements. Equals `k` for a latent.
    pub v: *const c_void,
    /// Rows, including those of the tail.
    pub tokens: u32,
    pub tail_tokens: u32,
    /// Blocks before the tail.
    pub blocks: u32,
    /// Index of the buffer in the ring.
    pub buffer: u32,
    /// Address space of `k` and `v`.
    pub memory: kvt_memory_t,
    pub reserved: u32,
}

fn kv_of(offload: &Offload, buffer: u32, loaded: Loaded) -> Result<kvt_offload_kv_t> {
    let Loaded { tokens, tail_tokens, blocks } = loaded;
    let views = offload.views(buffer)?;
    let at = |plane: &PlaneView| match plane.place {
        Tokens::At(address) if tokens > 0 => std::ptr::with_exposed_provenance(address as usize),
        _ => std::ptr::null(),
    };
    // The values of a latent are the first elements of its keys.
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

/// Puts K and V of the next `tokens` tokens of a layer. The session must have these tokens
/// (kvt_session_append). Policies see the keys, which must be finite. Then whole blocks are put
/// into the store, and the rest is copied to the tail. The call waits for the put of a full tail.
/// After a failure kvt_offload_tokens says how many tokens were taken.
///
/// @param first   Position of the first token: the number of tokens that the layer has.
/// @param k       K, or the latent, in host memory or in memory of the store's device.
/// @param v       V; null for a latent.
/// @param opts    Options of the op; KVT_SUBMIT_EACH is not accepted.
/// @param out_op  Receives an op, which the caller frees; its release ends the use of `k` and `v`.
///                Receives null if their use has ended already. May be null with a queue, or if
///                `tokens` is less than block_tokens.
/// @return KVT_E_BUDGET, KVT_E_IO (a full tail could not be put; the next put tries again),
///         KVT_E_UNAVAILABLE (the memory belongs to no device of the store, or the device is lost),
///         KVT_E_LIMIT, KVT_E_AGAIN.
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
        fail!(Invalid, "KVT_SUBMIT_EACH is set, and a put is at most one op: clear it");
    }
    let views = LayerViews { k, v };
    let op = with_offload(offload, |offload| {
        // A put of fewer tokens has no whole block, and so no op.
        if opts.detached && opts.queue.is_none() && tokens >= offload.shape().block_tokens {
            fail!(Invalid, "out_op is null and there is no queue: pass one of them");
        }
        let op = offload.put(layer, first, tokens, &views, &opts)?;
        Ok(op.map_or(std::ptr::null_mut(), |op| encode::<Op>(op.key())))
    })?;
    put(out_op, op);
    Ok(())
}

/// Begins to load blocks of a layer into a free buffer. From then on kvt_offload_blocks lists them;
/// kvt_offload_wait waits for them. Blocks without retained tokens are left out.
///
/// @param blocks     Candidates, ascending, and without the tail: for a prompt that is computed in
///                   parts. Null = all blocks, and the tail.
/// @param flags      KVT_OFFLOAD_LOAD_CHOSEN or 0. With it, null `blocks` load the tail alone.
/// @param query      Queries of the layer, [tokens, query heads, key dim], by which the policy
///                   selects; null = all candidates are loaded.
/// @param out_count  Receives the number of blocks; may be null.
/// @return KVT_E_BUSY (the buffer is in use), KVT_E_LIMIT (the blocks do not fit into a buffer),
///         KVT_E_AGAIN.
#[capi]
pub unsafe extern "C" fn kvt_offload_load(
    offload: *const kvt_offload_t,
    buffer: u32,
    layer: u32,
    blocks: *const u32,
    block_count: u64,
    flags: kvt_offload_load_flags_t,
    query: *const kvt_rows_t,
    context: *const kvt_sparse_context_t,
    out_count: *mut u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    known_flags(flags, KVT_OFFLOAD_LOAD_CHOSEN)?;
    let (context, ids) = (context_of(context)?, numbers(blocks, block_count, MAX_LIST)?);
    let selection = match flags & KVT_OFFLOAD_LOAD_CHOSEN {
        0 if blocks.is_null() => BlockSelection::All,
        0 => BlockSelection::Blocks(ids),
        _ => BlockSelection::Chosen(ids),
    };
    let load = |query: Option<&Rows<'_>>| {
        with_offload(offload, |offload| offload.load(buffer, layer, selection, query, &context))
    };
    let count = with_rows("queries", query, load)?;
    put(out_count, count);
    Ok(())
}

/// Waits for the load of a buffer, and appends the layer's tail as it is now. After a failure the
/// buffer is free.
///
/// @param out  May be null.
/// @return KVT_E_NOT_FOUND (a block is not in the store any more), KVT_E_STATE (nothing is loaded,
///         or a full tail became a block meanwhile: load again), KVT_E_IO, KVT_E_CORRUPT.
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

/// Frees a buffer that the engine does not read any more; a load in progress is cancelled. If
/// kernels may still read the buffer, call kvt_offload_set_ready_event before.
#[capi]
pub unsafe extern "C" fn kvt_offload_release(
    offload: *const kvt_offload_t,
    buffer: u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_offload(offload, |offload| offload.done(buffer))
}

/// Begins a pass over all layers in order, and frees all buffers. Layers whose blocks no policy
/// selects by query are loaded ahead, as far as buffers are free. A policy that selects by the
/// query of an earlier layer (`predict`) loads the next layer ahead.
#[capi]
pub unsafe extern "C" fn kvt_offload_begin(
    offload: *const kvt_offload_t,
    context: *const kvt_sparse_context_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let context = context_of(context)?;
    with_offload(offload, |offload| offload.begin(&context))
}

/// Waits for the next layer of a pass: its blocks, and its tail with all tokens that were put. The
/// engine may read the buffer until kvt_offload_give_back.
///
/// @param layer  0, 1, ... in this order.
/// @param query  As in kvt_offload_load.
/// @return As kvt_offload_load and kvt_offload_wait. KVT_E_STATE also means that no pass has begun,
///         that it is another layer's turn, or that the layer before was not given back.
#[capi]
pub unsafe extern "C" fn kvt_offload_take(
    offload: *const kvt_offload_t,
    layer: u32,
    query: *const kvt_rows_t,
    out: *mut kvt_offload_kv_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    let take = |query: Option<&Rows<'_>>| {
        with_offload(offload, |offload| {
            let (buffer, loaded) = offload.take(layer, query)?;
            kv_of(offload, buffer, loaded)
        })
    };
    write(out, &with_rows("queries", query, take)?);
    Ok(())
}

/// Gives back the layer that was taken, and loads a later layer into its buffer.
///
/// @return KVT_E_STATE (the layer is not taken).
#[capi]
pub unsafe extern "C" fn kvt_offload_give_back(
    offload: *const kvt_offload_t,
    layer: u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_offload(offload, |offload| offload.give_back(layer))
}

/// Lists the blocks of a buffer, ascending. Block i starts at position i * block_tokens.
///
/// @return KVT_E_TOO_SMALL.
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
        write_list(all.len(), all.iter().copied(), blocks, capacity, out_count)
    })
}

/// Finds the rows of a buffer that hold tokens at given positions: turns an index of positions into
/// one for kernels that read the buffer. Positions that are not in the buffer are skipped.
///
/// @param positions  Positions in the sequence, ascending, without repetition.
/// @param count      Up to 16777216.
/// @param rows       Receives the rows, ascending; room for `count`. May be `positions`.
/// @return KVT_E_LIMIT.
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
        fail!(Invalid, "positions are not ascending: sort them, and remove repetitions");
    }
    let mut found = Vec::new();
    with_offload(offload, |offload| offload.rows_of(buffer, positions, &mut found))?;
    require(rows)?;
    write_list(found.len(), found.iter().copied(), rows, count, out_count)
}

/// Writes `count` numbers to the caller's array if all fit, and `count` in any case. A null array
/// asks for the count alone.
///
/// # Safety
/// `to` is null or valid for writes of `capacity` numbers; `out_count` is null or valid for a
/// write.
unsafe fn write_list(
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
        let text = format!("the list has {count} entries, capacity is {capacity}: pass more");
        return Err(Error::new(Status::TooSmall, text));
    }
    for (at, number) in from.into_iter().take(count).enumerate() {
        // SAFETY: not null, below `capacity`, and the caller's promise.
        unsafe { to.add(at).write(number) };
    }
    Ok(())
}

// Retained tokens.

/// Most sums or scores in one call.
const MAX_SUMS: usize = 1 << 28;

/// Passes the attention that queries gave to each key to the policies that need it (h2o, tova,
/// snapkv and similar ones).
///
/// @param queries    Number of queries that the sums are over.
/// @param sums       A row for each query head, or one row for all of them. A row has one sum for
///                   each retained token, in their order; finite, and not negative.
/// @param sum_count  Up to 268435456.
/// @param tokens     Number of retained tokens.
/// @return KVT_E_LIMIT.
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

/// Lets the policy evict tokens of a layer, if it has to. No data is moved or dropped: blocks
/// without retained tokens are not loaded any more, and kvt_offload_retained lists the tokens that
/// kernels may use.
///
/// @param out_evicted  Receives 1 if tokens were evicted, else 0; may be null.
/// @return KVT_E_UNSUPPORTED (both policies evict).
#[capi]
pub unsafe extern "C" fn kvt_offload_evict(
    offload: *const kvt_offload_t,
    layer: u32,
    context: *const kvt_sparse_context_t,
    out_evicted: *mut u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let context = context_of(context)?;
    let has_evicted = with_offload(offload, |offload| offload.evict(layer, &context))?;
    put(out_evicted, u32::from(has_evicted));
    Ok(())
}

/// Lists the positions of the retained tokens of a layer, ascending.
///
/// @param head       Index of the list, below `out_heads`; 0 if there are no lists.
/// @param out_heads  Receives the number of lists: one for each key head or query head, one for
///                   all, or 0 = all tokens are retained (then `out_count` is 0). May be null.
/// @return KVT_E_TOO_SMALL.
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
        let lists = heads.max(1);
        if head >= lists {
            fail!(Invalid, "head is {head}: pass the index of a list, below {lists}");
        }
        put(out_heads, heads);
        let (count, list) = match &kept {
            Some(kept) => (kept.count(head as usize), Some(kept.positions(head as usize))),
            None => (0, None),
        };
        write_list(count, list.into_iter().flatten(), positions, capacity, out_count)
    })
}

/// Passes rows of keys to a policy with rows of its own (dsa: the keys of its indexer). Call it
/// before the kvt_offload_put of these tokens, which passes the model's keys to all other policies.
///
/// @param first  Position of the first token.
/// @return KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_offload_append_keys(
    offload: *const kvt_offload_t,
    layer: u32,
    first: u32,
    keys: *const kvt_rows_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let append = |keys: Option<&Rows<'_>>| match keys {
        Some(keys) => with_offload(offload, |offload| offload.append_keys(layer, first, keys)),
        None => fail!(Invalid, "keys is null: pass the rows of the tokens"),
    };
    with_rows("keys", keys, append)
}

/// Passes scores that the engine computed to a policy, for the next load of a layer: one for each
/// block that can be loaded (external), or a weight for each query and head (dsa).
///
/// @param is_prefill  1 = to the policy for prefill, 0 = to the one for decode.
/// @return KVT_E_UNSUPPORTED (the policy accepts no scores), KVT_E_LIMIT.
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
        fail!(Invalid, "is_prefill is {is_prefill}: pass 1 for prefill, or 0 for decode");
    }
    let scores = numbers(scores, score_count, MAX_SUMS)?;
    with_offload(offload, |offload| offload.score(layer, is_prefill == 1, scores))
}

// Forks.

/// Opens another offload for a session that was forked from the offload's (kvt_session_fork). Both
/// share the blocks in the store. Tails, lists of retained tokens and policies are copied. The fork
/// has an empty ring of its own, for which the store's account is charged; lent memory is not
/// reused. Its counters start at zero. The call waits for the put of a full tail.
///
/// @param session  Must have the tokens that the layers of the offload have, and may have more.
/// @return KVT_E_UNSUPPORTED (a custom policy without `fork`), KVT_E_BUDGET, KVT_E_LIMIT,
///         KVT_E_AGAIN.
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
