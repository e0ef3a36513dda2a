//! Lookups: how far a sequence could go on with what a namespace has.

use crate::base::status::Result;
use crate::fail;
use crate::ffi::abi::{Plain, Strided, bytes, capi, check_out, enter, give, write};
use crate::ffi::error::kvt_error_t;
use crate::ffi::namespace::{Space, kvt_namespace_t};
use crate::ffi::policy_use::numbers;
use crate::ffi::status::kvt_status_t;
use crate::meta::chunks::WHOLE;
use crate::meta::key::Key;
use crate::meta::reuse::State;
use crate::store::state::plans::{Look, Stretch};
use crate::store::token_path::MAX_TOKENS;

/// No tier.
pub const KVT_TIER_NONE: u32 = 0xFFFF_FFFF;

/// What is needed of the tokens is not all there: the engine computes them.
pub const KVT_RANGE_MISS: u32 = 0;
/// All that is needed of them can be loaded.
pub const KVT_RANGE_HIT: u32 = 1;
/// All that is needed of them can be loaded, once what is on its way has come.
pub const KVT_RANGE_PENDING: u32 = 2;
/// Nothing is needed of them: no layer reaches back so far.
pub const KVT_RANGE_UNNEEDED: u32 = 3;

/// Every layer of the chunk is in some tier, not all in the same perhaps.
pub const KVT_EXISTS_WHOLE: u32 = 16;

const _: () = assert!(KVT_EXISTS_WHOLE == WHOLE as u32);
/// Most rows of an array that a call fills.
pub(crate) const MAX_ROWS: u64 = 1 << 24;
/// Keys that are looked for while the lock is held.
const GROUP: usize = 1024;

/// Tokens in a row of which the same can be said. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_range_t {
    /// The first one.
    pub first_token: u64,
    /// How many.
    pub tokens: u64,
    /// KVT_RANGE_*.
    pub state: u32,
    /// The farthest tier that something of them is loaded from, KVT_TIER_*; or
    /// KVT_TIER_NONE.
    pub tier: u32,
    /// Bytes that are on the device.
    pub device_bytes: u64,
    /// Bytes to be loaded from memory.
    pub host_bytes: u64,
    /// Bytes to be loaded from disk.
    pub disk_bytes: u64,
    /// Bytes to be loaded from elsewhere.
    pub remote_bytes: u64,
    /// Bytes that are on their way into the store, and in no tier yet.
    pub pending_bytes: u64,
    /// How long loading them takes by itself, predicted.
    pub load_ns: u64,
}

/// What a lookup has found in all.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_lookup_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Tokens that were asked for.
    pub tokens: u64,
    /// The longest prefix that can be gone on from now.
    pub reusable_tokens: u64,
    /// The same, once what is on its way has come.
    pub soon_tokens: u64,
    /// Bytes that are on the device.
    pub device_bytes: u64,
    /// Bytes to be loaded from memory.
    pub host_bytes: u64,
    /// Bytes to be loaded from disk.
    pub disk_bytes: u64,
    /// Bytes to be loaded from elsewhere.
    pub remote_bytes: u64,
    /// Bytes that are on their way into the store, and in no tier yet.
    pub pending_bytes: u64,
    /// How long loading all that takes, predicted, with what waits before it.
    pub load_ns: u64,
}

fn range(stretch: &Stretch) -> kvt_range_t {
    let [device_bytes, host_bytes, disk_bytes, remote_bytes] = stretch.bytes;
    kvt_range_t {
        first_token: stretch.first_token,
        tokens: stretch.tokens,
        state: match stretch.state {
            State::Miss => KVT_RANGE_MISS,
            State::Hit => KVT_RANGE_HIT,
            State::Pending => KVT_RANGE_PENDING,
            State::Unneeded => KVT_RANGE_UNNEEDED,
        },
        tier: stretch.farthest.map_or(KVT_TIER_NONE, |tier| tier as u32),
        device_bytes,
        host_bytes,
        disk_bytes,
        remote_bytes,
        pending_bytes: stretch.pending_bytes,
        load_ns: stretch.load_ns,
    }
}

fn summary(look: &Look) -> kvt_lookup_t {
    let [device_bytes, host_bytes, disk_bytes, remote_bytes] = look.bytes;
    kvt_lookup_t {
        struct_size: 0,
        tokens: look.tokens,
        reusable_tokens: look.now_tokens,
        soon_tokens: look.soon_tokens,
        device_bytes,
        host_bytes,
        disk_bytes,
        remote_bytes,
        pending_bytes: look.pending_bytes,
        load_ns: look.load_ns,
    }
}

/// Where the results of a lookup go.
pub(crate) struct Target {
    pub(crate) ranges: *mut kvt_range_t,
    pub(crate) capacity: u64,
    pub(crate) stride_bytes: u64,
    pub(crate) out_count: *mut u64,
    pub(crate) out: *mut kvt_lookup_t,
}

/// # Safety
/// As the exported functions that call it.
pub(crate) unsafe fn answer(
    ns: *const kvt_namespace_t,
    to: &Target,
    look: impl FnOnce(&Space) -> Result<Look>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let rows = unsafe {
        if !to.out.is_null() {
            check_out(to.out)?;
        }
        Strided::new(to.ranges, to.capacity, to.stride_bytes, MAX_ROWS)?
    };
    let ns = enter(ns)?;
    let look = look(&ns.0)?;
    // SAFETY: the caller's promise.
    unsafe {
        give(&rows, to.ranges.is_null(), look.ranges.iter().map(range), to.out_count)?;
        if !to.out.is_null() {
            write(to.out, &summary(&look));
        }
    }
    Ok(())
}

/// Says how far a sequence could go on with what a namespace has, and what that
/// takes: for schedulers that choose between places. No use is counted, nothing is
/// held: what is there now may be gone at the next call.
///
/// @param ns         The namespace.
/// @param tokens        The sequence.
/// @param token_count   How many, at most 2^27.
/// @param ranges        Receives all tokens as ranges, in their order; may be null
///                      with capacity 0 to learn how many there are.
/// @param capacity      Room there, in entries, at most 2^24.
/// @param stride_bytes  sizeof(kvt_range_t).
/// @param out_count     How many ranges there are; also written with KVT_E_TOO_SMALL.
///                      May be null.
/// @param out           The sum of it; start it with KVT_LOOKUP_INIT. May be null.
/// @param err           Explains a failure; may be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_LIMIT, KVT_E_INVALID, KVT_E_NOMEM,
///         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; `out` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_namespace_lookup(
    ns: *const kvt_namespace_t,
    tokens: *const u32,
    token_count: u64,
    ranges: *mut kvt_range_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
    out: *mut kvt_lookup_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let to = Target { ranges, capacity, stride_bytes, out_count, out };
    let tokens = numbers(tokens, token_count, MAX_TOKENS)?;
    answer(ns, &to, |ns| ns.store.lookup(ns.number, tokens))
}

/// The same for a sequence whose chunks' keys are known (docs/keys.md says how they
/// are made).
///
/// @param ns         The namespace.
/// @param keys          The keys of its full chunks, KVT_KEY_BYTES each.
/// @param key_count     How many.
/// @param token_count   Tokens of the sequence: as many as the keys stand for, or
///                      some more that fill no chunk.
/// @param ranges        See kvt_namespace_lookup.
/// @param capacity      See kvt_namespace_lookup.
/// @param stride_bytes  See kvt_namespace_lookup.
/// @param out_count     See kvt_namespace_lookup.
/// @param out           See kvt_namespace_lookup.
/// @param err           Explains a failure; may be null.
/// @return As kvt_namespace_lookup.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// As kvt_namespace_lookup.
#[capi]
pub unsafe extern "C" fn kvt_namespace_lookup_keys(
    ns: *const kvt_namespace_t,
    keys: *const u8,
    key_count: u64,
    token_count: u64,
    ranges: *mut kvt_range_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
    out: *mut kvt_lookup_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let to = Target { ranges, capacity, stride_bytes, out_count, out };
    let keys = keys_of(keys, key_count)?;
    answer(ns, &to, |ns| ns.store.lookup_keys(ns.number, keys, token_count))
}

/// # Safety
/// `keys` is null with a count of 0, or valid for reads of so many keys.
unsafe fn keys_of<'a>(keys: *const u8, count: u64) -> Result<&'a [Key]> {
    if count > MAX_TOKENS as u64 {
        fail!(Limit, "{count} keys, at most {MAX_TOKENS} are allowed");
    }
    // SAFETY: the caller's promise.
    let keys = unsafe { bytes(keys, count * size_of::<Key>() as u64)? };
    Ok(Key::list(keys))
}

/// Says of chunks whether a namespace has them, and where. No use is counted, nothing
/// is held.
///
/// @param ns      The namespace.
/// @param keys       Keys of full chunks, KVT_KEY_BYTES each.
/// @param key_count  How many, at most 2^27.
/// @param out        Receives a byte for each: KVT_EXISTS_WHOLE when every layer of it
///                   is in some tier of the store, and 1 << KVT_TIER_* for each tier
///                   that has every layer. 1 << KVT_TIER_REMOTE is a hint, and never makes
///                   it whole: the remote had all of it when that was last heard of, and is
///                   not left alone now. 0 = it is not there, or layers of it are missing.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_CLOSED, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `keys` and `out` are null with a count of 0, or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_namespace_exists(
    ns: *const kvt_namespace_t,
    keys: *const u8,
    key_count: u64,
    out: *mut u8,
) -> kvt_status_t {
    let keys = keys_of(keys, key_count)?;
    if out.is_null() && !keys.is_empty() {
        fail!(Invalid, "the output pointer is null");
    }
    let ns = enter(ns)?;
    let mut found = [0; GROUP];
    for (at, keys) in keys.chunks(GROUP).enumerate() {
        ns.0.store.look(|core| core.exists(ns.0.number, keys, &mut found))??;
        // SAFETY: room for a byte a key, by the caller's promise.
        std::ptr::copy_nonoverlapping(found.as_ptr(), out.add(at * GROUP), keys.len());
    }
    Ok(())
}
