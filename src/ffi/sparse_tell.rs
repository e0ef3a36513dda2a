//! What a sparse policy is told of its sequence, and what it keeps with blocks.

use crate::attention::Rows;
use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::ffi::abi::{Strided, bytes, capi, require};
use crate::ffi::attention::{GivenRows, kvt_rows_t, with_rows};
use crate::ffi::error::kvt_error_t;
use crate::ffi::policy_use::numbers;
use crate::ffi::sparse::kvt_sparse_t;
use crate::ffi::sparse_seat::{Seat, with_seat};
use crate::ffi::status::kvt_status_t;
use crate::sparse::shape::MAX_LAYERS;

/// Most sums or scores of one call.
const MAX_NUMBERS: usize = 1 << 28;

/// Calls `body` with a policy that is paid for, and pays for what it learns.
fn tell(policy: *const kvt_sparse_t, body: impl FnOnce(&mut Seat) -> Result<()>) -> Result<()> {
    with_seat(policy, |seat| {
        seat.pay()?;
        body(seat)?;
        // It is known, paid for or not: where there was no room nothing more is learnt.
        let _ = seat.pay();
        Ok(())
    })
}

/// Calls `body` with keys, which must be there.
///
/// # Safety
/// As of [`with_rows`].
unsafe fn with_keys(
    keys: *const kvt_rows_t,
    body: impl FnOnce(&Rows<'_>) -> Result<()>,
) -> Result<()> {
    let body = |keys: Option<&Rows<'_>>| match keys {
        Some(keys) => body(keys),
        None => fail!(Invalid, "keys is null"),
    };
    // SAFETY: the caller's promise.
    unsafe { with_rows("keys", keys, body) }
}

/// Keys of tokens have been computed in a layer, with their positions in them.
///
/// @param policy  The policy.
/// @param layer   The layer.
/// @param first   The position of the first token.
/// @param keys    [tokens, key heads, key dim]; the policy's own rows, if its traits have some.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID (numbers that are not finite, too), KVT_E_STATE when tokens
///         are missing before them, KVT_E_LIMIT, KVT_E_BUDGET when what was told before is not
///         paid for, KVT_E_CLOSED when who pays was closed, KVT_E_BUSY, KVT_E_TOO_NEW,
///         KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `keys` leads to memory that can be read during the call.
#[capi]
pub unsafe extern "C" fn kvt_sparse_append(
    policy: *const kvt_sparse_t,
    layer: u32,
    first: u32,
    keys: *const kvt_rows_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let body = |keys: &Rows<'_>| tell(policy, |seat| seat.served.append(layer, first, keys));
    with_keys(keys, body)
}

/// A block of a layer is about to be moved away: to be called while its keys are still there.
/// What was appended before need not be sealed to be known.
///
/// @param policy  The policy.
/// @param layer   The layer.
/// @param id      How candidates name the block.
/// @param first   The position of its first token.
/// @param keys    The model's keys of its tokens, all or the first ones of a block.
/// @param err     Explains a failure; may be null.
/// @return As kvt_sparse_append.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// As of kvt_sparse_append.
#[capi]
pub unsafe extern "C" fn kvt_sparse_seal(
    policy: *const kvt_sparse_t,
    layer: u32,
    id: u32,
    first: u32,
    keys: *const kvt_rows_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let body = |keys: &Rows<'_>| tell(policy, |seat| seat.served.seal(layer, id, first, keys));
    with_keys(keys, body)
}

/// A block that was written token by token is complete in all layers: kvt_sparse_seal of
/// each, or on_decode_offload of an engine's own policy.
///
/// @param policy        The policy.
/// @param id            How candidates name the block.
/// @param first         The position of its first token.
/// @param keys          Its keys, a view for each layer of the model.
/// @param count         How many.
/// @param stride_bytes  sizeof(kvt_rows_t).
/// @param err           Explains a failure; may be null.
/// @return As kvt_sparse_append.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// As of kvt_sparse_append, for each of `count` entries.
#[capi]
pub unsafe extern "C" fn kvt_sparse_seal_all(
    policy: *const kvt_sparse_t,
    id: u32,
    first: u32,
    keys: *const kvt_rows_t,
    count: u64,
    stride_bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let given = Strided::new(keys.cast_mut(), count, stride_bytes, MAX_LAYERS.into())?;
    let (mut all, mut rows) = (Vec::new(), Vec::new());
    all.try_reserve_exact(given.len()).map_err(|_| Status::NoMem)?;
    rows.try_reserve_exact(given.len()).map_err(|_| Status::NoMem)?;
    for at in 0..given.len() {
        all.push(GivenRows::new("keys", &given.get(at)?)?);
    }
    for one in &all {
        rows.push(one.rows("keys")?);
    }
    tell(policy, |seat| seat.served.seal_all(id, first, &rows))
}

/// What each key got of the attention of some queries: a kernel's sums (kvt_sums_open,
/// kvt_decode_sums).
///
/// @param policy     The policy.
/// @param layer      The layer.
/// @param queries    Of how many queries: the last ones of a prompt, or those of a step.
/// @param sums       For each query head, or one row for all of them, a number for each token
///                   that is kept, in their order.
/// @param sum_count  How many numbers that are.
/// @param tokens     How many tokens are kept.
/// @param err        Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID (numbers below zero or not finite, wrong counts), KVT_E_LIMIT,
///         KVT_E_BUDGET, KVT_E_CLOSED, KVT_E_BUSY, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `sums` is valid for reads of `sum_count` numbers.
#[capi]
pub unsafe extern "C" fn kvt_sparse_observe(
    policy: *const kvt_sparse_t,
    layer: u32,
    queries: u32,
    sums: *const f32,
    sum_count: u64,
    tokens: u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let sums = numbers(sums, sum_count, MAX_NUMBERS)?;
    tell(policy, |seat| seat.served.observe(layer, queries, sums, tokens))
}

/// Gives numbers of the engine's for the next question about a layer: a score a candidate
/// (KVT_NEEDS_SCORES), or a weight for each query and head, heads innermost
/// (KVT_NEEDS_WEIGHTS).
///
/// @param policy       The policy.
/// @param layer        The layer.
/// @param scores       The numbers.
/// @param score_count  How many.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_UNSUPPORTED when it wants none, KVT_E_INVALID, KVT_E_LIMIT,
///         KVT_E_BUDGET, KVT_E_CLOSED, KVT_E_BUSY, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `scores` is valid for reads of `score_count` numbers.
#[capi]
pub unsafe extern "C" fn kvt_sparse_score(
    policy: *const kvt_sparse_t,
    layer: u32,
    scores: *const f32,
    score_count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let scores = numbers(scores, score_count, MAX_NUMBERS)?;
    tell(policy, |seat| seat.served.score(layer, scores))
}

/// The sequence has so many tokens now: what came behind them is taken back.
///
/// @param policy  The policy.
/// @param tokens  How many are left.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUSY, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_sparse_truncate(
    policy: *const kvt_sparse_t,
    tokens: u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_seat(policy, |seat| {
        seat.served.truncate(tokens)?;
        // What became less can be given back; that cannot fail.
        let _ = seat.pay();
        Ok(())
    })
}

/// The sequence begins anew.
///
/// @param policy  The policy.
/// @return KVT_OK; KVT_E_BUSY, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// None beyond a handle.
#[capi]
pub unsafe extern "C" fn kvt_sparse_reset(policy: *const kvt_sparse_t) -> kvt_status_t {
    with_seat(policy, |seat| {
        seat.served.reset();
        // As above.
        let _ = seat.pay();
        Ok(())
    })
}

/// What a policy knows of a block: to be kept beside it, so that it can be told again where
/// the block comes back.
///
/// @param policy     The policy.
/// @param layer      The layer.
/// @param id         The block, as it was sealed.
/// @param data       Receives the bytes; null = only their number is wanted.
/// @param capacity       How many it has room for.
/// @param count_out  Receives how many there are, also when there is no room; 0 = the policy
///                   keeps nothing with blocks.
/// @param err        Explains a failure; may be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_NOT_FOUND (a block that is not known), KVT_E_INVALID,
///         KVT_E_BUSY, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `data` is null or valid for writes of `room` bytes, the others for a write.
#[capi]
pub unsafe extern "C" fn kvt_sparse_save(
    policy: *const kvt_sparse_t,
    layer: u32,
    id: u32,
    data: *mut u8,
    capacity: u64,
    count_out: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(count_out)?;
    let mut saved = Vec::new();
    with_seat(policy, |seat| seat.served.save(layer, id, &mut saved))?;
    count_out.write(saved.len() as u64);
    if data.is_null() {
        return Ok(());
    }
    if saved.len() as u64 > capacity {
        let text = format!("{} bytes, and room for {capacity}", saved.len());
        return Err(Error::new(Status::TooSmall, text));
    }
    data.copy_from_nonoverlapping(saved.as_ptr(), saved.len());
    Ok(())
}

/// What was saved of a block, which came back. The bytes may be anyone's: they are checked.
///
/// @param policy  The policy.
/// @param layer   The layer.
/// @param id      How candidates name the block from now on.
/// @param first   The position of its first token.
/// @param data    What kvt_sparse_save gave.
/// @param count   How many bytes.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_CORRUPT, KVT_E_TOO_NEW, KVT_E_UNSUPPORTED when the policy keeps
///         nothing with blocks, KVT_E_STATE, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_BUDGET,
///         KVT_E_CLOSED, KVT_E_BUSY, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `data` is valid for reads of `count` bytes.
#[capi]
pub unsafe extern "C" fn kvt_sparse_load(
    policy: *const kvt_sparse_t,
    layer: u32,
    id: u32,
    first: u32,
    data: *const u8,
    count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let saved = bytes(data, count)?;
    tell(policy, |seat| seat.served.load(layer, id, first, saved))
}
