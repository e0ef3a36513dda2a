//! From positions to rows: an index for a buffer of chosen blocks, sums for the tokens that are
//! there; and how much memory kernels want at most.

use crate::attention::keys::Heads;
use crate::attention::limits::{Limits, Workspace};
use crate::attention::{ColumnSums, Decode, Prefill};
use crate::base::status::Result;
use crate::fail;
use crate::ffi::abi::{Plain, capi, check_out, known_flags, put, read, require};
use crate::ffi::attention::{kvt_attention_t, shape_of};
use crate::ffi::error::kvt_error_t;
use crate::ffi::kernel::{KVT_DECODE_SCORES, numbers_mut};
use crate::ffi::policy_use::numbers;
use crate::ffi::sparse_ask::{kvt_index_t, kvt_token_lists_t};
use crate::ffi::sparse_lists::{give_index, keep_of, keys_of};
use crate::ffi::status::kvt_status_t;
use crate::sparse::placement::positions_of;
use crate::sparse::{BlockPlacement, Index, ResidentTokens};

/// kvt_prefill_open.
pub const KVT_KERNEL_PREFILL: u32 = 0;
/// kvt_decode_open.
pub const KVT_KERNEL_DECODE: u32 = 1;
/// kvt_sums_open.
pub const KVT_KERNEL_SUMS: u32 = 2;

/// Most blocks of a buffer.
const MAX_BLOCKS: usize = 1 << 28;
/// Most sums of a call.
const MAX_SUMS: usize = 1 << 40;

/// Tokens in a buffer, in the order of their positions: some blocks of a sequence, and its
/// last tokens behind them.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_block_placement_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Which blocks, ascending: block n has the positions from n * block_tokens on.
    pub blocks: *const u32,
    /// How many.
    pub block_count: u64,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// The position of the first of the last tokens, behind all blocks.
    pub tail_first: u32,
    /// How many last tokens.
    pub tail_tokens: u32,
    /// Always 0.
    pub reserved: u32,
}

/// Tokens of a layer that are there, as policies count them.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_resident_tokens_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// The model's attention.
    pub attention: *const kvt_attention_t,
    /// What has stayed: the lists of kvt_sparse_evicted. Null = nothing was evicted.
    pub kept: *const kvt_token_lists_t,
    /// Tokens from this position on came after that; 0 without lists.
    pub since: u32,
    /// Tokens of the sequence.
    pub tokens: u32,
}

/// The largest that problems become, each of its own.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_kernel_limits_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_DECODE_*.
    pub flags: u64,
    /// Queries of a problem.
    pub queries: u32,
    /// Keys of a problem.
    pub keys: u32,
    /// Positions of a sequence.
    pub tokens: u32,
    /// Heads of queries.
    pub query_heads: u32,
    /// Numbers of a query and a key.
    pub key_dim: u32,
    /// Numbers of a value.
    pub value_dim: u32,
}

/// # Safety
/// `given` is null or valid for the size it states; its blocks can be read, and nobody writes
/// them, as long as the answer lives.
unsafe fn placed_of<'a>(given: *const kvt_block_placement_t) -> Result<BlockPlacement<'a>> {
    if given.is_null() {
        fail!(Invalid, "placed is null");
    }
    // SAFETY: the caller's promise.
    let (given, blocks) = unsafe {
        let given = read(given)?;
        (given, numbers(given.blocks, given.block_count, MAX_BLOCKS)?)
    };
    if given.reserved != 0 {
        fail!(Invalid, "reserved is {}", given.reserved);
    }
    Ok(BlockPlacement {
        blocks,
        block_tokens: given.block_tokens,
        tail_first: given.tail_first,
        tail_tokens: given.tail_tokens,
    })
}

/// # Safety
/// `given` is null or valid for the size it states.
unsafe fn heads_of(given: *const kvt_attention_t) -> Result<Heads> {
    // SAFETY: the caller's promise.
    let shape = unsafe { shape_of(given)? };
    Ok(Heads { queries: shape.query_heads, keys: shape.key_heads })
}

/// Says of the rows of a buffer what an index says of positions; tokens that are not there are
/// left out. No token may be missing between a query and those behind it.
///
/// @param attention        The model's attention.
/// @param placement           What is in the buffer.
/// @param index            The index, of positions; null = all keys.
/// @param first            The position of the first query.
/// @param count            How many queries.
/// @param out              Start it with KVT_INDEX_INIT, and set arrays and their room.
/// @param first_query_out  Receives first_query of a problem over these rows, whose first_key
///                         is 0.
/// @param err              Explains a failure; may be null.
/// @return KVT_OK; KVT_E_TOO_SMALL with counts in `out`, KVT_E_INVALID, KVT_E_LIMIT,
///         KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state, arrays for reads of
/// their counts, those of `out` for writes of their room.
#[capi]
pub unsafe extern "C" fn kvt_index_place(
    attention: *const kvt_attention_t,
    placement: *const kvt_block_placement_t,
    index: *const kvt_index_t,
    first: u32,
    count: u32,
    out: *mut kvt_index_t,
    first_query_out: *mut u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    require(first_query_out)?;
    let (heads, placement, keys) = (heads_of(attention)?, placed_of(placement)?, keys_of(index)?);
    let mut rows = Index::default();
    let first_query = placement.index(&keys, heads, (first, count), &mut rows)?;
    give_index(&rows.keys(), out)?;
    first_query_out.write(first_query);
    Ok(())
}

/// Adds sums of attention over the rows of a buffer to sums of the tokens that are there, as
/// kvt_sparse_observe wants them: tokens that were not loaded got nothing.
///
/// @param resident        Which tokens are there.
/// @param placement       What is in the buffer.
/// @param select       The index of rows that a decode went by, whose sums are those of
///                     kvt_decode_sums; null = sums of all rows.
/// @param first_query  The row of the first query, with `select`.
/// @param queries      How many, with `select`.
/// @param sums         [query heads, rows]; or [rows] for all heads, where there is one list.
/// @param sum_count    How many numbers that are.
/// @param out          [query heads, tokens], or [tokens]. After a failure it means nothing.
/// @param out_count    How many numbers that are.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state, arrays for their
/// counts.
#[capi]
pub unsafe extern "C" fn kvt_sums_place(
    resident: *const kvt_resident_tokens_t,
    placement: *const kvt_block_placement_t,
    select: *const kvt_index_t,
    first_query: u32,
    queries: u32,
    sums: *const f32,
    sum_count: u64,
    out: *mut f32,
    out_count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    if resident.is_null() {
        fail!(Invalid, "there is null");
    }
    let given = read(resident)?;
    let heads = heads_of(given.attention)?;
    let kept = if given.kept.is_null() { None } else { Some(keep_of(given.kept)?) };
    let resident =
        ResidentTokens { kept: kept.as_ref(), from: given.since, tokens: given.tokens, heads };
    let placement = placed_of(placement)?;
    let (sums, out) = (numbers(sums, sum_count, MAX_SUMS)?, numbers_mut(out, out_count)?);
    if select.is_null() {
        let mut positions = Vec::new();
        positions_of(&placement, &mut positions)?;
        return resident.add(sums, &positions, out);
    }
    let keys = keys_of(select)?;
    resident.add_selected(sums, (&keys, first_query, queries), &placement, out)
}

/// How much memory no problem within some limits needs more of: to be lent once.
///
/// @param kernel       KVT_KERNEL_*.
/// @param limits       The largest that problems become.
/// @param memory_out   Receives numbers of a job's memory (0 but for decodes); may be null.
/// @param scratch_out  Receives numbers of scratch of each thread; may be null.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `limits` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_kernel_workspace(
    kernel: u32,
    limits: *const kvt_kernel_limits_t,
    memory_out: *mut u64,
    scratch_out: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let given = read(limits)?;
    known_flags(given.flags, KVT_DECODE_SCORES)?;
    let limits = Limits {
        queries: given.queries,
        keys: given.keys,
        tokens: given.tokens,
        query_heads: given.query_heads,
        dim: given.key_dim,
        value_dim: given.value_dim,
        keeps_scores: given.flags & KVT_DECODE_SCORES != 0,
    };
    let Workspace { memory, scratch } = match kernel {
        KVT_KERNEL_PREFILL => Prefill::workspace(&limits)?,
        KVT_KERNEL_DECODE => Decode::workspace(&limits)?,
        KVT_KERNEL_SUMS => ColumnSums::workspace(&limits)?,
        other => fail!(Invalid, "kernel {other} is none of KVT_KERNEL_*"),
    };
    for (out, value) in [(memory_out, memory), (scratch_out, scratch)] {
        put(out, value as u64);
    }
    Ok(())
}
