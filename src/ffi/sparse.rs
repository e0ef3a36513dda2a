//! Sparse policies alone, for engines that keep KV themselves: opening and closing, what they
//! are like, what there is to open.

use std::ffi::c_char;

use crate::base::status::{Error, Status};
use crate::fail;
use crate::ffi::abi::{
    Plain, capi, check_out, free, insert, inspect, known_flags, pin_optional, read, require, text,
    write,
};
use crate::ffi::account::kvt_account_t;
use crate::ffi::attention::{kvt_attention_t, shape_of};
use crate::ffi::error::kvt_error_t;
use crate::ffi::sparse_custom::{kvt_sparse_custom_t, made};
use crate::ffi::sparse_seat::{Seat, SparseNoun, look_at_seat, with_seat};
use crate::ffi::status::kvt_status_t;
use crate::sparse::registry::ENTRIES;
use crate::sparse::{CheckedPolicy, Granularity, Scope, Traits};

/// A sparse policy that serves one sequence. Any thread may use it, one at a time: a call
/// that comes while another is inside is refused with KVT_E_BUSY.
pub struct kvt_sparse_t(());

/// Says which blocks to load before the prompt is computed on.
pub const KVT_SPARSE_LOAD_PREFILL: u32 = 1;
/// Says which blocks to load for the next token.
pub const KVT_SPARSE_LOAD_DECODE: u32 = 2;
/// Says which keys the prompt is computed with.
pub const KVT_SPARSE_INDEX_PREFILL: u32 = 4;
/// Says which keys the next token is computed with.
pub const KVT_SPARSE_INDEX_DECODE: u32 = 8;
/// Evicts tokens when the prompt has been computed.
pub const KVT_SPARSE_EVICT_PREFILL: u32 = 16;
/// Evicts tokens while text is written.
pub const KVT_SPARSE_EVICT_DECODE: u32 = 32;

/// Has to be told keys, as they come or block by block.
pub const KVT_NEEDS_KEYS: u32 = 1;
/// Queries, when it is asked.
pub const KVT_NEEDS_QUERIES: u32 = 2;
/// What each key got of the attention: kvt_sparse_observe.
pub const KVT_NEEDS_COLUMN_SUMS: u32 = 4;
/// The query of the layer `ahead` before, when it is asked what to load.
pub const KVT_NEEDS_NEXT_QUERY: u32 = 8;
/// A score a candidate, before each selection: kvt_sparse_score.
pub const KVT_NEEDS_SCORES: u32 = 16;
/// Values, as they come.
pub const KVT_NEEDS_VALUES: u32 = 32;
/// A weight for each query and head, before each question: kvt_sparse_score.
pub const KVT_NEEDS_WEIGHTS: u32 = 64;
/// All keys of the sequence, when it is asked for an index.
pub const KVT_NEEDS_ALL_KEYS: u32 = 128;

/// Each query head has its own answer.
pub const KVT_SCOPE_QUERY_HEAD: u32 = 0;
/// Each head of keys.
pub const KVT_SCOPE_KEY_HEAD: u32 = 1;
/// All heads of a layer share one.
pub const KVT_SCOPE_LAYER: u32 = 2;

/// Answers name tokens.
pub const KVT_GRANULARITY_TOKEN: u32 = 0;
/// Answers name blocks.
pub const KVT_GRANULARITY_BLOCK: u32 = 1;

/// Heads keep different numbers of tokens.
pub const KVT_SPARSE_RAGGED: u64 = 1;
/// Loads are restricted to what it selects; without, all is loaded.
pub const KVT_SPARSE_SELECTS: u64 = 2;
/// Keys are to be turned to the places that they have in the cache.
pub const KVT_SPARSE_ROTATES: u64 = 4;

/// What a policy is like: enough to serve any without knowing its name.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_sparse_traits_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_SPARSE_* of what it can do. What it cannot do it refuses.
    pub caps: u32,
    /// KVT_NEEDS_*: what it has to be told. Being told more is fine.
    pub needs: u32,
    /// KVT_SCOPE_*: for whom an answer is.
    pub scope: u32,
    /// KVT_GRANULARITY_*: what it names.
    pub granularity: u32,
    /// KVT_SPARSE_RAGGED and others.
    pub flags: u64,
    /// So many first layers are not restricted.
    pub dense_layers: u32,
    /// Sums of attention are wanted of so many last queries; UINT32_MAX = of all, 0 = none.
    pub sum_queries: u32,
    /// Queries that it selects by are of so many layers before; 0 = the layer's own.
    pub ahead: u32,
    /// Heads of its own queries, where they are not the model's; else 0.
    pub own_query_heads: u32,
    /// Heads of its own keys, likewise.
    pub own_key_heads: u32,
    /// Numbers of a head of both.
    pub own_dim: u32,
}

/// How to open a sparse policy.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_sparse_opts_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Always 0.
    pub flags: u64,
    /// The model's attention.
    pub attention: *const kvt_attention_t,
    /// The spec, such as "minference(budget=0.2)"; null with `custom`.
    pub spec: *const c_char,
    /// Length of the spec.
    pub spec_bytes: u64,
    /// A policy of the engine's own instead; else null.
    pub custom: *const kvt_sparse_custom_t,
    /// Pays for what the policy keeps, in host memory; may be null.
    pub account: *const kvt_account_t,
}

/// What a policy has chosen since it was opened.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_sparse_stats_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// What it keeps of the sequence now, in bytes.
    pub state_bytes: u64,
    /// Selections that were asked for and answered.
    pub selections: u64,
    /// Candidates that they named.
    pub candidates: u64,
    /// Of those, blocks that are to be loaded.
    pub chosen: u64,
    /// Of those, blocks that need not be.
    pub spared: u64,
    /// Selections that were compared with what the layer's own query would have chosen.
    pub audited: u64,
    /// Blocks that own queries would have chosen.
    pub wanted: u64,
    /// Of those, blocks that were chosen: found / wanted is the recall.
    pub found: u64,
}

/// A sparse policy that can be opened. Texts are UTF-8, not NUL-terminated, and live as long
/// as the library.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_sparse_info_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Its name in specs.
    pub name: *const c_char,
    /// Length of the name.
    pub name_bytes: u64,
    /// What it does, in a line.
    pub about: *const c_char,
    /// Length of that line.
    pub about_bytes: u64,
}

/// Traits as C has them.
pub(crate) fn traits_for_c(traits: &Traits) -> kvt_sparse_traits_t {
    let flag = |is: bool, flag: u64| if is { flag } else { 0 };
    let own = traits.rows.map_or((0, 0, 0), |own| (own.query_heads, own.key_heads, own.dim));
    kvt_sparse_traits_t {
        struct_size: 0,
        caps: traits.caps,
        needs: traits.needs,
        scope: match traits.scope {
            Scope::QueryHead => KVT_SCOPE_QUERY_HEAD,
            Scope::KeyHead => KVT_SCOPE_KEY_HEAD,
            Scope::Layer => KVT_SCOPE_LAYER,
        },
        granularity: match traits.granularity {
            Granularity::Token => KVT_GRANULARITY_TOKEN,
            Granularity::Block => KVT_GRANULARITY_BLOCK,
        },
        flags: flag(traits.is_ragged, KVT_SPARSE_RAGGED)
            | flag(traits.requires_block_selection, KVT_SPARSE_SELECTS)
            | flag(traits.rotates, KVT_SPARSE_ROTATES),
        dense_layers: traits.dense_layers,
        sum_queries: traits.sum_queries,
        ahead: traits.ahead,
        own_query_heads: own.0,
        own_key_heads: own.1,
        own_dim: own.2,
    }
}

/// Opens a sparse policy for one sequence of a model.
///
/// @param opts  Which, and for what.
/// @param out   The policy; close it with kvt_sparse_close.
/// @param err   Explains a failure, with the offset in the spec and the nearest name that
///              exists; may be null.
/// @return KVT_OK; KVT_E_SPEC, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_BUDGET, KVT_E_CLOSED,
///         KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the policy. Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_sparse_open(
    opts: *const kvt_sparse_opts_t,
    out: *mut *mut kvt_sparse_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = read(opts)?;
    let (given, shape) = (given, shape_of(given.attention)?);
    crate::base::fork::check()?;
    crate::base::fork::arm()?;
    known_flags(given.flags, 0)?;
    if given.spec.is_null() == given.custom.is_null() {
        fail!(Invalid, "a spec or a policy of the engine's own, one of both");
    }
    let account = pin_optional(given.account)?.map(|account| account.0.clone());
    let (served, taken) = if given.custom.is_null() {
        (CheckedPolicy::open(text("spec", given.spec, given.spec_bytes)?, &shape)?, None)
    } else {
        let (policy, taken) = made(given.custom, &shape)?;
        (CheckedPolicy::of(policy, &shape), Some(taken))
    };
    let handle = insert(SparseNoun::new(Seat::new(served, account)?))?;
    taken.iter().for_each(|taken| taken.keep());
    out.write(handle);
    Ok(())
}

/// Closes a policy and clears the handle. It does not wait: a call that is inside ends first,
/// and user data of the engine's is released after it.
///
/// @param policy  The handle; null, or a handle that is null, is fine.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `policy` is null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_sparse_close(policy: *mut *mut kvt_sparse_t) -> kvt_status_t {
    free(policy, |_| Ok(()))
}

/// Opens a copy for a sequence that goes on from here. The same account pays.
///
/// @param policy  The policy.
/// @param out     The copy; close it with kvt_sparse_close.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_UNSUPPORTED (a policy of the engine's own that cannot), KVT_E_BUSY,
///         KVT_E_BUDGET, KVT_E_CLOSED (who pays was), KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Ownership: the caller owns the copy. Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid.
#[capi]
pub unsafe extern "C" fn kvt_sparse_fork(
    policy: *const kvt_sparse_t,
    out: *mut *mut kvt_sparse_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let copy = with_seat(policy, Seat::fork)?;
    out.write(insert(SparseNoun::new(copy))?);
    Ok(())
}

/// What a policy is like.
///
/// @param policy  The policy.
/// @param out     Filled in; start it with KVT_SPARSE_TRAITS_INIT.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks of the policy. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_sparse_traits(
    policy: *const kvt_sparse_t,
    out: *mut kvt_sparse_traits_t,
) -> kvt_status_t {
    check_out(out)?;
    let policy = inspect(policy)?;
    let traits = policy.traits;
    write(out, &traits_for_c(&traits));
    Ok(())
}

/// What a policy has chosen, and what it keeps.
///
/// @param policy  The policy.
/// @param out     Filled in; start it with KVT_SPARSE_STATS_INIT.
/// @return KVT_OK; KVT_E_BUSY, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_sparse_stats(
    policy: *const kvt_sparse_t,
    out: *mut kvt_sparse_stats_t,
) -> kvt_status_t {
    check_out(out)?;
    let (stats, state_bytes) =
        look_at_seat(policy, |seat| Ok((seat.served.stats(), seat.served.state_bytes())))?;
    write(
        out,
        &kvt_sparse_stats_t {
            struct_size: 0,
            state_bytes,
            selections: stats.selections,
            candidates: stats.candidates,
            chosen: stats.chosen,
            spared: stats.spared,
            audited: stats.audited,
            wanted: stats.wanted,
            found: stats.found,
        },
    );
    Ok(())
}

/// How many sparse policies can be opened by name.
///
/// @param out_count  The number.
/// @return KVT_OK; KVT_E_INVALID.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out_count` is null or valid for writes.
#[capi]
pub unsafe extern "C" fn kvt_sparse_count(out_count: *mut u64) -> kvt_status_t {
    require(out_count)?;
    out_count.write(ENTRIES.len() as u64);
    Ok(())
}

/// A sparse policy that can be opened, by its place in the list.
///
/// @param index  0 to kvt_sparse_count - 1.
/// @param out    Filled in; start it with KVT_SPARSE_INFO_INIT.
/// @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_sparse_info(index: u64, out: *mut kvt_sparse_info_t) -> kvt_status_t {
    check_out(out)?;
    let found = usize::try_from(index).ok().and_then(|index| ENTRIES.get(index));
    let entry = found.ok_or_else(|| {
        Error::new(Status::NotFound, format!("there are {} sparse policies", ENTRIES.len()))
    })?;
    write(
        out,
        &kvt_sparse_info_t {
            struct_size: 0,
            name: entry.name.as_ptr().cast(),
            name_bytes: entry.name.len() as u64,
            about: entry.about.as_ptr().cast(),
            about_bytes: entry.about.len() as u64,
        },
    );
    Ok(())
}
