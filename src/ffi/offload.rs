//! Layer-wise offload: what one is opened with, what it has done.

use std::ffi::c_char;

use crate::base::callback::{Foreign, refuse_reentry};
use crate::base::clock::Clock;
use crate::base::slab::Pin;
use crate::base::spec::Spec;
use crate::base::status::{Result, Status};
use crate::base::sync::{Arc, Condvar, Mutex};
use crate::fail;
use crate::ffi::abi::{
    Access, Plain, capi, enter, free, insert, known_flags, noun, pin, put, read, require, text,
};
use crate::ffi::attention::{kvt_attention_t, shape_of};
use crate::ffi::error::kvt_error_t;
use crate::ffi::session::{SessionNoun, kvt_session_t};
use crate::ffi::session_move::{
    KVT_LEVEL_DISK, KVT_LEVEL_DURABLE, KVT_LEVEL_RAM, KVT_LEVEL_REMOTE,
};
use crate::ffi::sparse_custom::{Table, kvt_sparse_custom_t, made};
use crate::ffi::status::kvt_status_t;
use crate::meta::dtype::Dtype;
use crate::offload::{LentMemory, Offload, Opts, Policies, RingPlacement};
use crate::sparse::{Shape, Sparse, registry};
use crate::store::state::Level;

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
    if given.reserved != 0 {
        fail!(Invalid, "reserved is {}", given.reserved);
    }
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
/// @param stored_out  Receives those that are in the store, in whole blocks.
/// @param tail_out    Receives those behind them, which fill no block yet; may be null.
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
    stored_out: *mut u32,
    tail_out: *mut u32,
) -> kvt_status_t {
    require(stored_out)?;
    let (stored, tail) = with_offload(offload, |offload| offload.tokens(layer))?;
    stored_out.write(stored);
    put(tail_out, tail);
    Ok(())
}

/// Takes back what came behind `tokens` tokens, in all layers. To be called before
/// kvt_session_truncate: where a block is cut, its first tokens come back from the store.
/// Loads under way are given up, as by kvt_offload_done. After a failure no layer is cut: cut
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
