//! How a policy's objects are held: taken away, resized, referenced, pinned,
//! hinted at.

use crate::base::status::Result;
use crate::fail;
use crate::ffi::abi::{capi, enter, known_flags, put, read};
use crate::ffi::error::kvt_error_t;
use crate::ffi::policy::kvt_policy_t;
use crate::ffi::policy_use::{
    KVT_HINT_CONFIDENCE, KVT_HINT_DONE, context, ids, kvt_policy_context_t, kvt_policy_hint_t,
    sizes,
};
use crate::ffi::status::kvt_status_t;
use crate::meta::sessions::Stop;
use crate::policy::Hint;
use crate::policy::evictor::Evictor;

/// Runs `body` on the evictor with the ids of a call.
///
/// # Safety
/// `data` is null or valid for reads of `count` numbers.
unsafe fn on_ids(
    policy: *const kvt_policy_t,
    data: *const u64,
    count: u64,
    body: impl FnOnce(&mut Evictor, &[u64]) -> Result<()>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let ids = unsafe { ids(data, count)? };
    body(&mut enter(policy)?.state.lock().evictor, ids)
}

/// Takes objects away that their owner gave up, pinned or not; all or none. It
/// is no eviction. What continues one of them must go with it. References and pins
/// of an object go with it: a later release of it is KVT_E_NOT_FOUND, and an object
/// inserted under its id has none.
///
/// @param policy  The policy.
/// @param now_ns  See kvt_policy_lookup.
/// @param ids     The objects, each once.
/// @param count   How many.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_STATE when others continue one,
///         KVT_E_INVALID, KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_policy_remove(
    policy: *const kvt_policy_t,
    now_ns: i64,
    ids: *const u64,
    count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    on_ids(policy, ids, count, |evictor, ids| evictor.remove(now_ns, ids))
}

/// Says that the objects which kvt_policy_select named were freed: they leave
/// the table as evicted, so that the log, the re-prefill rate, advice and what
/// policies remember of the evicted learn of it; all or none. What continues one of
/// them must go with it. Ids that are not in the table are remembered as well.
///
/// @param policy  The policy.
/// @param now_ns  See kvt_policy_lookup.
/// @param ids     The objects, each once.
/// @param count   How many.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_STATE when others continue one, KVT_E_INVALID,
///         KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_policy_evicted(
    policy: *const kvt_policy_t,
    now_ns: i64,
    ids: *const u64,
    count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    on_ids(policy, ids, count, |evictor, ids| evictor.evicted(now_ns, ids))
}

/// Changes sizes; all or none.
///
/// @param policy  The policy.
/// @param ids     The objects.
/// @param units   Their new sizes, 1 to 2^32 - 1.
/// @param count   How many.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_policy_resize(
    policy: *const kvt_policy_t,
    ids: *const u64,
    units: *const u64,
    count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let resize = |evictor: &mut Evictor, ids: &[u64]| {
        let units = self::ids(units, count)?;
        sizes(units)?;
        evictor.resize(ids, units)
    };
    on_ids(policy, ids, count, resize)
}

/// Takes a reference to each of some objects; all or none. A referenced object
/// never leaves.
///
/// @param policy  The policy.
/// @param ids     The objects; one that is there twice gets two references.
/// @param count   How many.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_policy_acquire(
    policy: *const kvt_policy_t,
    ids: *const u64,
    count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    on_ids(policy, ids, count, |evictor, ids| evictor.acquire(ids))
}

/// Gives a reference to each of some objects back; all or none.
///
/// @param policy  The policy.
/// @param ids     The objects.
/// @param count   How many.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_STATE when one has no reference,
///         KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_policy_release(
    policy: *const kvt_policy_t,
    ids: *const u64,
    count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    on_ids(policy, ids, count, |evictor, ids| evictor.release(ids))
}

/// Pins objects, which never leave then; all or none. Pins do not count: one
/// kvt_policy_unpin ends any number.
///
/// @param policy  The policy.
/// @param ids     The objects.
/// @param count   How many.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_policy_pin(
    policy: *const kvt_policy_t,
    ids: *const u64,
    count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    on_ids(policy, ids, count, |evictor, ids| evictor.pin(ids, true))
}

/// Unpins objects; all or none. One that is not pinned stays so.
///
/// @param policy  The policy.
/// @param ids     The objects.
/// @param count   How many.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_policy_unpin(
    policy: *const kvt_policy_t,
    ids: *const u64,
    count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    on_ids(policy, ids, count, |evictor, ids| evictor.pin(ids, false))
}

/// # Safety
/// `hint` is null or valid for the size it states.
pub(crate) unsafe fn hint(hint: *const kvt_policy_hint_t) -> Result<Hint> {
    // SAFETY: the caller's promise.
    let given = unsafe { read(hint)? };
    known_flags(given.flags, KVT_HINT_DONE | KVT_HINT_CONFIDENCE)?;
    let stop = match Stop::from_code(u64::from(given.stop)) {
        Some(stop) if given.reserved == 0 => stop,
        _ => fail!(Invalid, "stop is {}, reserved is {}", given.stop, given.reserved),
    };
    let sure = given.flags & KVT_HINT_CONFIDENCE == 0 && given.confidence == 0.0;
    let confidence = if sure { 1.0 } else { given.confidence };
    if !(0.0..=1.0).contains(&confidence) {
        fail!(Invalid, "confidence is {confidence}, not 0 to 1");
    }
    Ok(Hint {
        stop: (stop != Stop::Unknown).then_some(stop),
        next_use: (given.next_use_ns != 0).then_some((given.next_use_ns, confidence as f32)),
        done: given.flags & KVT_HINT_DONE != 0,
    })
}

/// Tells what the engine knows of the future of objects, usually of the path of
/// a request that ended. Those that are not there are passed over.
///
/// @param policy     The policy.
/// @param now_ns     See kvt_policy_lookup.
/// @param context        Whose they are; may be null.
/// @param ids        The objects.
/// @param count      How many.
/// @param hint       The hint.
/// @param out_known  How many were there; may be null.
/// @param err        Explains a failure; may be null.
/// @return As kvt_policy_lookup.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_policy_hint(
    policy: *const kvt_policy_t,
    now_ns: i64,
    context: *const kvt_policy_context_t,
    ids: *const u64,
    count: u64,
    hint: *const kvt_policy_hint_t,
    out_known: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let tell = |evictor: &mut Evictor, ids: &[u64]| {
        let (context, hint) = (self::context(context)?, self::hint(hint)?);
        let known = evictor.hint(now_ns, &context, ids, &hint)?;
        put(out_known, known as u64);
        Ok(())
    };
    on_ids(policy, ids, count, tell)
}
