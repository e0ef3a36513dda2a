//! What a sparse policy answers: which blocks to load, which keys to compute with, which
//! tokens stay.

use crate::attention::Rows;
use crate::fail;
use crate::ffi::abi::{Plain, capi, check_out, require};
use crate::ffi::attention::{context_of, kvt_rows_t, kvt_sparse_context_t, with_rows};
use crate::ffi::error::kvt_error_t;
use crate::ffi::kernel::numbers_mut;
use crate::ffi::kernel_pages::given;
use crate::ffi::policy_use::numbers;
use crate::ffi::sparse::kvt_sparse_t;
use crate::ffi::sparse_lists::{give_index, give_keep, keep_of, too_small};
use crate::ffi::sparse_seat::with_seat;
use crate::ffi::status::kvt_status_t;

/// Fills what is left of an array behind the last id.
pub const KVT_SPARSE_NO_ID: u32 = 0xFFFF_FFFF;

/// All keys. No list.
pub const KVT_INDEX_DENSE: u32 = 0;
/// Two lists: keys that every query sees, and distances back from a query at which it sees a
/// key.
pub const KVT_INDEX_LINES: u32 = 1;
/// For each row of queries a list of blocks of keys.
pub const KVT_INDEX_BLOCKS: u32 = 2;
/// A list of keys that every query sees; then for each row of queries a list of ranges, each
/// two numbers: its first key, and the one behind its last.
pub const KVT_INDEX_RANGES: u32 = 3;

/// Most numbers of a list of an array.
pub(crate) const MAX_ITEMS: usize = 1 << 30;

/// How the lists of a head are meant. Heads may share lists. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_index_head_t {
    /// KVT_INDEX_*.
    pub kind: u32,
    /// The first of its lists.
    pub first: u32,
    /// How many lists it has.
    pub lists: u32,
    /// Blocks and ranges: queries of a row, counted from the first that is computed; 0 = all
    /// of them are one row.
    pub query_block: u32,
    /// Blocks: keys of a block.
    pub key_block: u32,
    /// Queries at this position and behind it see all keys, whatever lists say; UINT32_MAX =
    /// none does.
    pub dense_from: u32,
}

/// Which keys queries are computed with: by policies, or by the engine. No query sees keys
/// behind it. No head = all keys; one = for all heads; else one for each query head (an
/// engine may also say it for each head of keys). Numbers of lists ascend, each once.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_index_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// How lists are meant.
    pub heads: *mut kvt_index_head_t,
    /// Room there, when an answer is wanted.
    pub head_capacity: u64,
    /// How many there are; the number needed with KVT_E_TOO_SMALL.
    pub head_count: u64,
    /// Where each list begins in `items`, and where the last ends.
    pub starts: *mut u32,
    /// Room there.
    pub start_capacity: u64,
    /// How many there are.
    pub start_count: u64,
    /// What is in lists.
    pub items: *mut u32,
    /// Room there.
    pub item_capacity: u64,
    /// How many there are.
    pub item_count: u64,
}

/// Lists of positions of tokens, ascending: what each head of keys keeps, or each query head, or
/// one list for all. No list is an answer that all stay, and none that can be told.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_token_lists_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Where each list begins in `items`, and where the last ends: one more than there are
    /// lists.
    pub starts: *mut u32,
    /// Room there, when an answer is wanted.
    pub start_capacity: u64,
    /// How many there are; the number needed with KVT_E_TOO_SMALL.
    pub start_count: u64,
    /// The positions.
    pub items: *mut u32,
    /// Room there.
    pub item_capacity: u64,
    /// How many there are.
    pub item_count: u64,
}

/// Which of the candidates are to be loaded for a query.
///
/// @param policy           The policy.
/// @param layer            The layer.
/// @param query            [queries, query heads, key dim], of the layer `ahead` before where the
///                         traits say so; null = all candidates.
/// @param candidates       Ids of blocks, in any order, each once.
/// @param candidate_count  How many.
/// @param context          Where in the sequence that is.
/// @param ids              Receives the ids that are chosen, ascending, and KVT_SPARSE_NO_ID
///                         behind them.
/// @param capacity             How many it has room for: as many as there are candidates, or the
///                         call is refused before the policy is asked.
/// @param count_out        Receives how many are chosen; with KVT_E_TOO_SMALL how much room is
///                         needed.
/// @param err              Explains a failure; may be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED when it does not select there,
///         KVT_E_INVALID (queries that are not finite, too), KVT_E_STATE (weights are missing),
///         KVT_E_LIMIT, KVT_E_BUSY, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; structs are valid for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_sparse_select(
    policy: *const kvt_sparse_t,
    layer: u32,
    query: *const kvt_rows_t,
    candidates: *const u32,
    candidate_count: u64,
    context: *const kvt_sparse_context_t,
    ids: *mut u32,
    capacity: u64,
    count_out: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(count_out)?;
    let (context, candidates) =
        (context_of(context)?, numbers(candidates, candidate_count, MAX_ITEMS)?);
    if !ids.is_aligned() {
        fail!(Invalid, "ids is not aligned");
    }
    if capacity < candidate_count || (ids.is_null() && capacity > 0) {
        count_out.write(candidate_count);
        return Err(too_small("ids"));
    }
    let select = |query: Option<&Rows<'_>>| {
        with_seat(policy, |seat| {
            let (served, out) = (&mut seat.served, &mut seat.ids);
            served.select(layer, query, candidates, &context, out)?;
            let rest = capacity as usize - out.len();
            // SAFETY: as many as there is room for; a policy chooses no more than there
            // are candidates, as `Served` sees to.
            ids.copy_from_nonoverlapping(out.as_ptr(), out.len());
            (0..rest).for_each(|i| ids.add(out.len() + i).write(KVT_SPARSE_NO_ID));
            count_out.write(out.len() as u64);
            Ok(())
        })
    };
    with_rows("queries", query, select)
}

/// Which keys queries are computed with. With KVT_E_TOO_SMALL the answer is kept:
/// kvt_sparse_last_index has it.
///
/// @param policy   The policy.
/// @param layer    The layer.
/// @param queries  [queries, query heads, key dim].
/// @param keys     All keys of the sequence where the traits say KVT_NEEDS_ALL_KEYS; else null,
///                 or any.
/// @param context  Where in the sequence that is.
/// @param out      Start it with KVT_INDEX_INIT, and set arrays and their room.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED when it does not say that there,
///         KVT_E_INVALID (numbers that are not finite, too), KVT_E_STATE, KVT_E_LIMIT,
///         KVT_E_BUSY, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state, the arrays of `out`
/// for writes of their room.
#[capi]
pub unsafe extern "C" fn kvt_sparse_index(
    policy: *const kvt_sparse_t,
    layer: u32,
    queries: *const kvt_rows_t,
    keys: *const kvt_rows_t,
    context: *const kvt_sparse_context_t,
    out: *mut kvt_index_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    let context = context_of(context)?;
    let ask = |queries: Option<&Rows<'_>>, keys: Option<&Rows<'_>>| {
        let Some(queries) = queries else { fail!(Invalid, "queries is null") };
        with_seat(policy, |seat| {
            let (served, index) = (&mut seat.served, &mut seat.index);
            served.index(layer, queries, keys, &context, index)?;
            give_index(&index.keys(), out)
        })
    };
    with_rows("queries", queries, |queries| with_rows("keys", keys, |keys| ask(queries, keys)))
}

/// The last index that a policy answered with, again.
///
/// @param policy  The policy.
/// @param out     As in kvt_sparse_index.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_BUSY, KVT_E_TOO_NEW, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states, its arrays for writes of their room.
#[capi]
pub unsafe extern "C" fn kvt_sparse_last_index(
    policy: *const kvt_sparse_t,
    out: *mut kvt_index_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    with_seat(policy, |seat| give_index(&seat.index.keys(), out))
}

/// Attention of a prompt, or of a part of one, as a policy wants it, on this thread: its index
/// and the kernel, or the function of an engine's own policy. With a policy that does not say
/// what a prompt is computed with all keys are. Engines with more threads ask kvt_sparse_index,
/// and open a job.
///
/// @param policy     The policy.
/// @param layer      The layer.
/// @param queries    [queries, query heads, key dim], the last of the sequence.
/// @param keys       All keys of the sequence.
/// @param values     All values; of a latent the first numbers of the keys.
/// @param context    Where in the sequence that is.
/// @param out        Receives [queries, query heads, value dim].
/// @param out_count  How many numbers it has room for.
/// @param lse        Receives [queries, query heads] log-sum-exps; may be null.
/// @param lse_count  How many it has room for.
/// @param err        Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED (a policy with rows of its
///         own), KVT_E_UNAVAILABLE, KVT_E_LIMIT, KVT_E_STATE, KVT_E_BUSY, KVT_E_TOO_NEW,
///         KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Arrays are valid for their counts, structs for the size they state, and views lead to
/// memory that can be read during the call.
#[capi]
pub unsafe extern "C" fn kvt_sparse_prefill_attention(
    policy: *const kvt_sparse_t,
    layer: u32,
    queries: *const kvt_rows_t,
    keys: *const kvt_rows_t,
    values: *const kvt_rows_t,
    context: *const kvt_sparse_context_t,
    out: *mut f32,
    out_count: u64,
    lse: *mut f32,
    lse_count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let context = context_of(context)?;
    let (out, logs) = (numbers_mut(out, out_count)?, numbers_mut(lse, lse_count)?);
    let lse = if lse.is_null() { None } else { Some(logs) };
    with_rows("queries", queries, |queries| {
        with_rows("keys", keys, |keys| {
            with_rows("values", values, |values| {
                let rows =
                    (given("queries", queries)?, given("keys", keys)?, given("values", values)?);
                with_seat(policy, |seat| {
                    seat.served.attend(layer, rows, &context, out, lse, &mut seat.index)
                })
            })
        })
    })
}

/// Which tokens of a layer stay, if some have to go. Nothing has gone until it is told with
/// kvt_sparse_evicted: to ask again is fine. With KVT_E_TOO_SMALL the answer is kept:
/// kvt_sparse_last_kept has it.
///
/// @param policy       The policy.
/// @param layer        The layer.
/// @param context      Where in the sequence that is.
/// @param out          Start it with KVT_TOKEN_LISTS_INIT, and set arrays and their room. Counts are 0
///                     where all stay.
/// @param evicted_out  Receives 1 when some have to go, else 0.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED when it does not evict there, KVT_E_STATE
///         when sums are missing, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_BUSY, KVT_E_TOO_NEW,
///         KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state, the arrays of `out`
/// for writes of their room.
#[capi]
pub unsafe extern "C" fn kvt_sparse_evict(
    policy: *const kvt_sparse_t,
    layer: u32,
    context: *const kvt_sparse_context_t,
    out: *mut kvt_token_lists_t,
    evicted_out: *mut u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    require(evicted_out)?;
    let context = context_of(context)?;
    with_seat(policy, |seat| {
        let (served, keep) = (&mut seat.served, &mut seat.keep);
        keep.clear();
        let goes = served.evict(layer, &context, keep)?;
        if !goes {
            keep.clear();
        }
        give_keep(&keep.heads, out)?;
        evicted_out.write(u32::from(goes));
        Ok(())
    })
}

/// The last lists that a policy answered with, again; none where all stayed.
///
/// @param policy  The policy.
/// @param out     As in kvt_sparse_evict.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_BUSY, KVT_E_TOO_NEW, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states, its arrays for writes of their room.
#[capi]
pub unsafe extern "C" fn kvt_sparse_last_kept(
    policy: *const kvt_sparse_t,
    out: *mut kvt_token_lists_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    with_seat(policy, |seat| give_keep(&seat.keep.heads, out))
}

/// What was kept of a layer is all there is now: an answer of kvt_sparse_evict, of this policy
/// or another of the sequence, to which the engine may have added tokens that must stay.
///
/// @param policy  The policy.
/// @param layer   The layer.
/// @param kept    The lists; any part of what is there.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_BUSY, KVT_E_TOO_NEW, KVT_E_NOMEM,
///         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `kept` is null or valid for the size it states, its arrays for reads of their counts.
#[capi]
pub unsafe extern "C" fn kvt_sparse_evicted(
    policy: *const kvt_sparse_t,
    layer: u32,
    kept: *const kvt_token_lists_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    if kept.is_null() {
        fail!(Invalid, "kept is null");
    }
    let keep = keep_of(kept)?;
    with_seat(policy, |seat| {
        seat.served.evicted(layer, &keep)?;
        // What became less is given back; that cannot fail.
        let _ = seat.pay();
        Ok(())
    })
}
