//! Sparse policies of the engine's own: a table of callbacks that stands where a named policy
//! does.

use std::ffi::c_void;

use crate::base::callback::Foreign;
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::fail;
use crate::ffi::abi::{Plain, known_flags, read};
use crate::ffi::attention::{kvt_rows_t, kvt_sparse_context_t};
use crate::ffi::logging::kvt_destroy_fn;
use crate::ffi::sparse::{
    KVT_GRANULARITY_BLOCK, KVT_GRANULARITY_TOKEN, KVT_SCOPE_KEY_HEAD, KVT_SCOPE_LAYER,
    KVT_SCOPE_QUERY_HEAD, KVT_SPARSE_RAGGED, KVT_SPARSE_ROTATES, KVT_SPARSE_SELECTS,
    kvt_sparse_traits_t,
};
use crate::ffi::sparse_ask::{kvt_index_t, kvt_token_lists_t};
use crate::ffi::sparse_called::Called;
use crate::ffi::status::kvt_status_t;
use crate::sparse::{Granularity, OwnRows, Scope, Shape, Sparse, Traits, caps};

/// A block of a layer is about to be moved away; `keys` are its `keys->view.tokens` valid
/// tokens. All callbacks: anything but KVT_OK ends the call that led here, with that status.
/// What they are handed is borrowed for the call. They must not unwind, and calls on the same
/// policy from inside are refused with KVT_E_BUSY, on the same offload with KVT_E_REENTRANT.
pub type kvt_on_prefill_offload_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        block: u32,
        layer: u32,
        first: u32,
        keys: *const kvt_rows_t,
    ) -> kvt_status_t,
>;

/// A block that was written token by token is complete: `keys` are those of all layers, each
/// `keys->struct_size` bytes behind the one before.
pub type kvt_on_decode_offload_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        block: u32,
        first: u32,
        keys: *const kvt_rows_t,
        layers: u32,
    ) -> kvt_status_t,
>;

/// Chooses among blocks, for `query`: writes ids, each a candidate and each once, to `ids`,
/// which has room for all of them, and their number to `count_out`. Any order.
pub type kvt_select_blocks_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        layer: u32,
        query: *const kvt_rows_t,
        candidates: *const u32,
        candidate_count: u64,
        context: *const kvt_sparse_context_t,
        ids: *mut u32,
        count_out: *mut u64,
    ) -> kvt_status_t,
>;

/// Says which keys queries are computed with: points the arrays of `out` at memory of its own,
/// which stays until the next call, and sets their counts. `keys` is null where there are none.
pub type kvt_sparse_index_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        layer: u32,
        queries: *const kvt_rows_t,
        keys: *const kvt_rows_t,
        context: *const kvt_sparse_context_t,
        out: *mut kvt_index_t,
    ) -> kvt_status_t,
>;

/// Is told what each key got of the attention of `queries` queries: `count` numbers, for
/// `tokens` tokens that are kept.
pub type kvt_sparse_observe_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        layer: u32,
        queries: u32,
        sums: *const f32,
        count: u64,
        tokens: u32,
    ) -> kvt_status_t,
>;

/// Says which tokens of a layer stay, as an index is said; counts left at 0 = all stay.
pub type kvt_sparse_evict_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        layer: u32,
        context: *const kvt_sparse_context_t,
        out: *mut kvt_token_lists_t,
    ) -> kvt_status_t,
>;

/// Is told that the sequence has so many tokens now; 0 = it begins anew.
pub type kvt_sparse_truncate_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, tokens: u32) -> kvt_status_t>;

/// Computes the attention of a prompt instead of the library's kernel, for
/// kvt_sparse_prefill_attention: writes [queries, query heads, value dim] to `out`, and
/// [queries, query heads] to `lse` where that is not null. KVT_E_UNSUPPORTED leaves it to the
/// library's kernel, by the index.
pub type kvt_sparse_attention_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        layer: u32,
        queries: *const kvt_rows_t,
        keys: *const kvt_rows_t,
        values: *const kvt_rows_t,
        context: *const kvt_sparse_context_t,
        out: *mut f32,
        lse: *mut f32,
    ) -> kvt_status_t,
>;

/// Is told that these tokens of a layer are all there is now.
pub type kvt_sparse_evicted_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        layer: u32,
        kept: *const kvt_token_lists_t,
    ) -> kvt_status_t,
>;

/// Makes user data for a copy, which goes on from here with the same functions.
pub type kvt_sparse_fork_fn = Option<
    unsafe extern "C" fn(user_data: *mut c_void, copy_out: *mut *mut c_void) -> kvt_status_t,
>;

/// A sparse policy of the engine's own. What its traits say it can do needs the function for
/// it; all others may be null. It is called by the thread that calls the policy or the offload,
/// by one at a time.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_sparse_custom_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// What it is like.
    pub traits: *const kvt_sparse_traits_t,
    /// Before a block of a prompt is moved away.
    pub on_prefill_offload: kvt_on_prefill_offload_fn,
    /// When a block of text is complete in all layers. Null: on_prefill_offload, layer by
    /// layer.
    pub on_decode_offload: kvt_on_decode_offload_fn,
    /// KVT_SPARSE_LOAD_*.
    pub select_blocks: kvt_select_blocks_fn,
    /// KVT_SPARSE_INDEX_*.
    pub index: kvt_sparse_index_fn,
    /// KVT_SPARSE_INDEX_PREFILL, too: the kernel itself.
    pub sparse_prefill_attention: kvt_sparse_attention_fn,
    /// KVT_NEEDS_COLUMN_SUMS.
    pub observe: kvt_sparse_observe_fn,
    /// KVT_SPARSE_EVICT_*.
    pub evict: kvt_sparse_evict_fn,
    /// After tokens have gone.
    pub evicted: kvt_sparse_evicted_fn,
    /// When tokens are taken back.
    pub truncate: kvt_sparse_truncate_fn,
    /// For sequences that are forked.
    pub fork: kvt_sparse_fork_fn,
    /// Handed to all of them; taken over on success only.
    pub user_data: *mut c_void,
    /// Releases user_data, and that of each copy; may be null.
    pub destroy: kvt_destroy_fn,
}

/// The functions of a policy of the engine's own.
#[derive(Clone, Copy)]
pub(crate) struct Table {
    pub(crate) on_prefill_offload: kvt_on_prefill_offload_fn,
    pub(crate) on_decode_offload: kvt_on_decode_offload_fn,
    pub(crate) select_blocks: kvt_select_blocks_fn,
    pub(crate) index: kvt_sparse_index_fn,
    pub(crate) attention: kvt_sparse_attention_fn,
    pub(crate) observe: kvt_sparse_observe_fn,
    pub(crate) evict: kvt_sparse_evict_fn,
    pub(crate) evicted: kvt_sparse_evicted_fn,
    pub(crate) truncate: kvt_sparse_truncate_fn,
    pub(crate) fork: kvt_sparse_fork_fn,
    pub(crate) destroy: kvt_destroy_fn,
}

/// Traits from outside.
fn traits_of(given: &kvt_sparse_traits_t, shape: &Shape, seals_together: bool) -> Result<Traits> {
    known_flags(given.flags, KVT_SPARSE_RAGGED | KVT_SPARSE_SELECTS | KVT_SPARSE_ROTATES)?;
    if given.caps == 0 || given.caps >= 64 || given.needs >= 256 {
        fail!(Invalid, "traits: caps {} and needs {}", given.caps, given.needs);
    }
    if given.dense_layers > shape.layers || given.ahead >= shape.layers {
        let (dense, ahead) = (given.dense_layers, given.ahead);
        fail!(Invalid, "traits: {dense} dense layers, {ahead} ahead, of {} layers", shape.layers);
    }
    let own = (given.own_query_heads, given.own_key_heads, given.own_dim);
    let rows = match own {
        (0, 0, 0) => None,
        (query_heads, key_heads, dim) if query_heads > 0 && key_heads > 0 && dim > 0 => {
            Some(OwnRows { query_heads, key_heads, dim })
        }
        _ => fail!(Invalid, "traits: rows of its own have heads and numbers, or none of them"),
    };
    Ok(Traits {
        caps: given.caps,
        needs: given.needs,
        scope: match given.scope {
            KVT_SCOPE_QUERY_HEAD => Scope::QueryHead,
            KVT_SCOPE_KEY_HEAD => Scope::KeyHead,
            KVT_SCOPE_LAYER => Scope::Layer,
            other => fail!(Invalid, "traits: scope {other} is none of KVT_SCOPE_*"),
        },
        granularity: match given.granularity {
            KVT_GRANULARITY_TOKEN => Granularity::Token,
            KVT_GRANULARITY_BLOCK => Granularity::Block,
            other => fail!(Invalid, "traits: granularity {other} is none of KVT_GRANULARITY_*"),
        },
        is_ragged: given.flags & KVT_SPARSE_RAGGED != 0,
        requires_block_selection: given.flags & KVT_SPARSE_SELECTS != 0,
        rotates: given.flags & KVT_SPARSE_ROTATES != 0,
        dense_layers: given.dense_layers,
        sum_queries: given.sum_queries,
        ahead: given.ahead,
        seals_together,
        rows,
    })
}

/// Whether what is promised has a function.
fn check_table(traits: &Traits, table: &Table) -> Result<()> {
    let promised = [
        (caps::LOAD_PREFILL | caps::LOAD_DECODE, table.select_blocks.is_some(), "select_blocks"),
        (caps::INDEX_DECODE, table.index.is_some(), "index"),
        (
            caps::INDEX_PREFILL,
            table.index.is_some() || table.attention.is_some(),
            "index or sparse_prefill_attention",
        ),
        (caps::EVICT_PREFILL | caps::EVICT_DECODE, table.evict.is_some(), "evict"),
    ];
    for (caps, is_there, what) in promised {
        if traits.caps & caps != 0 && !is_there {
            fail!(Invalid, "caps {} need {what}", traits.caps & caps);
        }
    }
    if traits.requires_block_selection && table.select_blocks.is_none() {
        fail!(Invalid, "KVT_SPARSE_SELECTS needs select_blocks");
    }
    Ok(())
}

/// A policy, and what is to be kept once it is in place.
pub(crate) type Made = (Box<dyn Sparse>, Arc<Foreign<Table>>);

/// The policy that a table describes.
///
/// # Safety
/// `given` is null or valid for the size it states; the functions may be called with the user
/// data, by any thread, until destroy.
pub(crate) unsafe fn made(given: *const kvt_sparse_custom_t, shape: &Shape) -> Result<Made> {
    // SAFETY: the caller's promise.
    let (given, traits) = unsafe {
        let given = read(given)?;
        if given.traits.is_null() {
            fail!(Invalid, "traits is null");
        }
        let together = given.on_decode_offload.is_some();
        (given, traits_of(&read(given.traits)?, shape, together)?)
    };
    let table = Table {
        on_prefill_offload: given.on_prefill_offload,
        on_decode_offload: given.on_decode_offload,
        select_blocks: given.select_blocks,
        index: given.index,
        attention: given.sparse_prefill_attention,
        observe: given.observe,
        evict: given.evict,
        evicted: given.evicted,
        truncate: given.truncate,
        fork: given.fork,
        destroy: given.destroy,
    };
    check_table(&traits, &table)?;
    let foreign = Arc::new(Foreign::new(table, given.user_data, given.destroy));
    Ok((Box::new(Called::new(foreign.clone(), traits, shape)), foreign))
}
