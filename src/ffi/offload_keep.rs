//! Which tokens of an offload's layers policies leave.

use crate::attention::Rows;
use crate::base::status::Result;
use crate::fail;
use crate::ffi::abi::{capi, put, require};
use crate::ffi::attention::{context_of, kvt_rows_t, kvt_sparse_context_t, with_rows};
use crate::ffi::error::kvt_error_t;
use crate::ffi::offload::{kvt_offload_t, with_offload};
use crate::ffi::offload_move::fill;
use crate::ffi::policy_use::numbers;
use crate::ffi::status::kvt_status_t;

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
/// blocks of which nothing is left are not loaded any more, and kvt_offload_kept says which
/// tokens of the others kernels are to see.
///
/// @param offload      The offload.
/// @param layer        The layer.
/// @param context      Where in the sequence that is.
/// @param evicted_out  Receives 1 when some went, else 0; may be null.
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
    evicted_out: *mut u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let context = context_of(context)?;
    let went = with_offload(offload, |offload| offload.evict(layer, &context))?;
    put(evicted_out, u32::from(went));
    Ok(())
}

/// Which tokens of a layer are left.
///
/// @param offload    The offload.
/// @param layer      The layer.
/// @param head       Of which list: there are `heads_out` of them, one for each head of keys
///                   (or of queries), or one for all.
/// @param positions  Receives positions, ascending; null = only counts are wanted.
/// @param capacity       How many it has room for.
/// @param count_out  Receives how many there are, also when there is no room for them.
/// @param heads_out  Receives how many lists there are; 0 = all tokens are left. May be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `positions` is null or valid for writes of `room` numbers, the others for a write.
#[capi]
pub unsafe extern "C" fn kvt_offload_kept(
    offload: *const kvt_offload_t,
    layer: u32,
    head: u32,
    positions: *mut u32,
    capacity: u64,
    count_out: *mut u64,
    heads_out: *mut u32,
) -> kvt_status_t {
    require(count_out)?;
    with_offload(offload, |offload| -> Result<()> {
        let kept = offload.retained(layer)?;
        let heads = kept.as_ref().map_or(0, |kept| kept.lists() as u32);
        if head >= heads.max(1) {
            fail!(Invalid, "list {head} of {heads}");
        }
        put(heads_out, heads);
        let (count, list) = match &kept {
            Some(kept) => (kept.count(head as usize), Some(kept.positions(head as usize))),
            None => (0, None),
        };
        fill(count, list.into_iter().flatten(), positions, capacity, count_out)
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
