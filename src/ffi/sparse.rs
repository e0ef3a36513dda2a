//! Sparse policies for engines that keep KV themselves.

use std::ffi::{c_char, c_void};

use crate::attention::keys::{Head, Heads, Keys, Kind};
use crate::attention::limits::{Limits, Workspace};
use crate::attention::{ColumnSums, Decode, Prefill, Rows, Scales};
use crate::base::account::Account;
use crate::base::budget::Tier;
use crate::base::callback::Foreign;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, Mutex};
use crate::fail;
use crate::ffi::abi::{
    Plain, Strided, bytes, capi, check_out, enter, free, insert, inspect, known_flags, no_reserved,
    noun, numbers, pin_optional, put, read, require, text, write,
};
use crate::ffi::attention::{
    GivenRows, KVT_DECODE_SCORES, KVT_SCALES_CHANNEL, KVT_SCALES_NONE, KVT_SCALES_TOKEN,
    context_of, given, kvt_attention_t, kvt_rows_t, kvt_sparse_context_t, numbers_mut, shape_of,
    with_rows,
};
use crate::ffi::base::{kvt_destroy_fn, kvt_error_t, kvt_status_t};
use crate::ffi::memory::{KVT_MEMORY_HOST, kvt_account_t, kvt_view_t};
use crate::meta::view::Place;
use crate::sparse::lists::Lists;
use crate::sparse::placement::positions_of;
use crate::sparse::registry::ENTRIES;
use crate::sparse::shape::{MAX_HEADS, MAX_LAYERS};
use crate::sparse::{
    BlockPlacement, CheckedPolicy, Context, Granularity, Index, OwnRows, ResidentTokens,
    RetainedTokens, Scope, Shape, Sparse, Stats, Traits, caps,
};

// Sparse policies.

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
/// A score a candidate, before each selection: kvt_sparse_add_scores.
pub const KVT_NEEDS_SCORES: u32 = 16;
/// Values, as they come.
pub const KVT_NEEDS_VALUES: u32 = 32;
/// A weight for each query and head, before each question: kvt_sparse_add_scores.
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

// Exclusive use of a policy.

/// A policy with its last answers, and who pays for it.
pub(crate) struct Seat {
    pub(crate) served: CheckedPolicy,
    pub(crate) index: Index,
    pub(crate) keep: RetainedTokens,
    pub(crate) ids: Vec<u32>,
    account: Option<Arc<Account>>,
    paid_bytes: u64,
}

impl Seat {
    pub(crate) fn new(served: CheckedPolicy, account: Option<Arc<Account>>) -> Result<Box<Seat>> {
        let (index, keep) = (Index::default(), RetainedTokens::default());
        let seat = Seat { served, index, keep, ids: Vec::new(), account, paid_bytes: 0 };
        let mut seat = Box::new(seat);
        seat.pay()?;
        Ok(seat)
    }

    /// Pays for what the policy keeps now. Asked before it is told more: what it was told
    /// last is known, and may have been more than there was room for.
    pub(crate) fn pay(&mut self) -> Result<()> {
        let Some(account) = &self.account else { return Ok(()) };
        let now = self.served.state_bytes();
        if now < self.paid_bytes {
            account.give_back(Tier::Host, self.paid_bytes - now);
        } else if let Err(error) = account.take(Tier::Host, now - self.paid_bytes) {
            return Err(error.within("what the policy knows of the sequence"));
        }
        self.paid_bytes = now;
        Ok(())
    }

    /// A copy, for which the same account pays.
    pub(crate) fn fork(&mut self) -> Result<Box<Seat>> {
        Seat::new(self.served.fork()?, self.account.clone())
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some(account) = &self.account {
            account.give_back(Tier::Host, self.paid_bytes);
        }
    }
}

/// Taken out while a call uses it: a policy by callbacks is called under no lock.
pub(crate) struct SparseNoun {
    seat: Mutex<Option<Box<Seat>>>,
    /// What it is like, which callbacks of its own may ask.
    pub(crate) traits: Traits,
}

impl SparseNoun {
    pub(crate) fn new(seat: Box<Seat>) -> SparseNoun {
        let traits = *seat.served.traits();
        SparseNoun { seat: Mutex::new(Some(seat)), traits }
    }

    /// Calls `body` with the policy, which nobody else has meanwhile.
    fn take<R>(&self, body: impl FnOnce(&mut Seat) -> Result<R>) -> Result<R> {
        let Some(seat) = self.seat.lock().take() else {
            fail!(Busy, "another call is inside of the policy");
        };
        let mut taken = Taken { noun: self, seat: Some(seat) };
        match &mut taken.seat {
            Some(seat) => body(seat),
            None => Err(Status::State.into()),
        }
    }
}

/// Puts a policy back when it is dropped: after a panic, too, so that it can be looked at, and
/// is closed as usual.
struct Taken<'a> {
    noun: &'a SparseNoun,
    seat: Option<Box<Seat>>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        *self.noun.seat.lock() = self.seat.take();
    }
}

noun!(SparseNoun, kvt_sparse_t, 15, "sparse policy");

/// Calls `body` with a policy that nobody else uses meanwhile.
pub(crate) fn with_seat<R>(
    handle: *const kvt_sparse_t,
    body: impl FnOnce(&mut Seat) -> Result<R>,
) -> Result<R> {
    enter(handle)?.take(body)
}

/// The same for what only looks: allowed of a policy in which a defect was caught, too.
pub(crate) fn look_at_seat<R>(
    handle: *const kvt_sparse_t,
    body: impl FnOnce(&mut Seat) -> Result<R>,
) -> Result<R> {
    inspect(handle)?.take(body)
}

// Notifications.

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
pub unsafe extern "C" fn kvt_sparse_add_block(
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

/// A block that was written token by token is complete in all layers: kvt_sparse_add_block of
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

/// What each key got of the attention of some queries: a kernel's sums (kvt_column_sums_open,
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
pub unsafe extern "C" fn kvt_sparse_add_scores(
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
/// @param out_count  Receives how many there are, also when there is no room; 0 = the policy
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
    out_count: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out_count)?;
    let mut saved = Vec::new();
    with_seat(policy, |seat| seat.served.save(layer, id, &mut saved))?;
    out_count.write(saved.len() as u64);
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

// Lists of tokens and blocks.

/// Whether a list of ours has room somewhere.
fn fits<T, U>(from: &[T], to: *mut U, capacity: u64) -> bool {
    from.is_empty() || (!to.is_null() && to.is_aligned() && from.len() as u64 <= capacity)
}

/// Copies a list of ours.
///
/// # Safety
/// It [`fits`], and `to` is valid for writes of its room.
unsafe fn give<T: Copy, U: Copy>(from: &[T], to: *mut U) {
    const { assert!(size_of::<T>() == size_of::<U>() && align_of::<T>() == align_of::<U>()) };
    if !from.is_empty() {
        // SAFETY: long enough by the caller's promise, and of the same size; ours is not theirs.
        unsafe { to.cast::<T>().copy_from_nonoverlapping(from.as_ptr(), from.len()) };
    }
}

/// An error for arrays that are too short.
pub(crate) fn too_small(what: &str) -> Error {
    Error::new(Status::TooSmall, format!("{what} are too short: the struct says what is needed"))
}

/// Gives an index out. With too little room only counts are written.
///
/// # Safety
/// `out` passed `check_out`; its arrays are valid for their room.
pub(crate) unsafe fn give_index(index: &Keys<'_>, out: *mut kvt_index_t) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let mut given = read(out.cast_const())?;
        let (heads, starts, items) = (index.heads, index.starts, index.items);
        given.head_count = heads.len() as u64;
        given.start_count = starts.len() as u64;
        given.item_count = items.len() as u64;
        write(out, &given);
        if !(fits(heads, given.heads, given.head_capacity)
            && fits(starts, given.starts, given.start_capacity)
            && fits(items, given.items, given.item_capacity))
        {
            return Err(too_small("the arrays of the index"));
        }
        give(heads, given.heads);
        give(starts, given.starts);
        give(items, given.items);
        Ok(())
    }
}

/// Gives lists of what is kept out, in the same manner.
///
/// # Safety
/// As of [`give_index`].
pub(crate) unsafe fn give_keep(lists: &Lists, out: *mut kvt_token_lists_t) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let mut given = read(out.cast_const())?;
        let Lists { starts, items } = lists;
        given.start_count = starts.len() as u64;
        given.item_count = items.len() as u64;
        write(out, &given);
        if !(fits(starts, given.starts, given.start_capacity)
            && fits(items, given.items, given.item_capacity))
        {
            return Err(too_small("the lists of what is kept"));
        }
        give(starts, given.starts);
        give(items, given.items);
        Ok(())
    }
}

/// The heads of an index from outside: kinds are checked before they are ours.
///
/// # Safety
/// As of [`numbers`].
unsafe fn index_heads_of<'a>(given: &kvt_index_t) -> Result<&'a [Head]> {
    // SAFETY: the caller's promise.
    let heads = unsafe { numbers(given.heads.cast_const(), given.head_count, MAX_HEADS as usize)? };
    if let Some(head) = heads.iter().find(|head| head.kind > Kind::Ranges as u32) {
        fail!(Invalid, "a head of kind {}, which is none of KVT_INDEX_*", head.kind);
    }
    const { assert!(size_of::<Head>() == size_of::<kvt_index_head_t>()) };
    // SAFETY: the same six numbers in the same order, and every kind is one.
    Ok(unsafe { std::slice::from_raw_parts(heads.as_ptr().cast(), heads.len()) })
}

/// An index from outside, as kernels take it; they check what is in it. Null = all keys.
///
/// # Safety
/// `given` is null or valid for the size it states; its arrays can be read for their counts,
/// and nobody writes them, as long as the answer lives.
pub(crate) unsafe fn keys_of<'a>(given: *const kvt_index_t) -> Result<Keys<'a>> {
    if given.is_null() {
        return Ok(Keys::DENSE);
    }
    // SAFETY: the caller's promise.
    unsafe {
        let given = read(given)?;
        Ok(Keys {
            heads: index_heads_of(&given)?,
            starts: numbers(given.starts.cast_const(), given.start_count, MAX_ITEMS)?,
            items: numbers(given.items.cast_const(), given.item_count, MAX_ITEMS)?,
        })
    }
}

/// Lists of what is kept from outside, in memory of our own.
///
/// # Safety
/// `given` is valid for the size it states, its arrays for reads of their counts.
pub(crate) unsafe fn keep_of(given: *const kvt_token_lists_t) -> Result<RetainedTokens> {
    // SAFETY: the caller's promise.
    let (starts, items) = unsafe {
        let given = read(given)?;
        let starts = numbers(given.starts.cast_const(), given.start_count, MAX_ITEMS)?;
        (starts, numbers(given.items.cast_const(), given.item_count, MAX_ITEMS)?)
    };
    let is_end = starts.last().map_or(items.is_empty(), |&end| end as usize == items.len());
    if starts.first().is_some_and(|&first| first != 0) || !is_end || !starts.is_sorted() {
        fail!(Invalid, "starts of lists do not lead through all items");
    }
    let mut keep = RetainedTokens::default();
    let Lists { starts: ours, items: all } = &mut keep.heads;
    if ours.try_reserve_exact(starts.len()).and(all.try_reserve_exact(items.len())).is_err() {
        return Err(Status::NoMem.into());
    }
    ours.extend_from_slice(starts);
    all.extend_from_slice(items);
    Ok(keep)
}

/// Lists of what is kept as C has them; borrowed as they are.
pub(crate) fn keep_for_c(keep: &RetainedTokens) -> kvt_token_lists_t {
    let Lists { starts, items } = &keep.heads;
    kvt_token_lists_t {
        struct_size: size_of::<kvt_token_lists_t>() as u64,
        starts: starts.as_ptr().cast_mut(),
        start_capacity: 0,
        start_count: starts.len() as u64,
        items: items.as_ptr().cast_mut(),
        item_capacity: 0,
        item_count: items.len() as u64,
    }
}

// Selections.

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
/// @param out_count        Receives how many are chosen; with KVT_E_TOO_SMALL how much room is
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
    out_count: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out_count)?;
    let (context, candidates) =
        (context_of(context)?, numbers(candidates, candidate_count, MAX_ITEMS)?);
    if !ids.is_aligned() {
        fail!(Invalid, "ids is not aligned");
    }
    if capacity < candidate_count || (ids.is_null() && capacity > 0) {
        out_count.write(candidate_count);
        return Err(too_small("ids"));
    }
    let select = |query: Option<&Rows<'_>>| {
        with_seat(policy, |seat| {
            let (served, out) = (&mut seat.served, &mut seat.ids);
            served.select(layer, query, candidates, &context, out)?;
            let rest = capacity as usize - out.len();
            // SAFETY: as many as there is room for; a policy chooses no more than there
            // are candidates, as `CheckedPolicy` sees to.
            ids.copy_from_nonoverlapping(out.as_ptr(), out.len());
            (0..rest).for_each(|i| ids.add(out.len() + i).write(KVT_SPARSE_NO_ID));
            out_count.write(out.len() as u64);
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
/// kvt_sparse_commit_eviction: to ask again is fine. With KVT_E_TOO_SMALL the answer is kept:
/// kvt_sparse_last_retained has it.
///
/// @param policy       The policy.
/// @param layer        The layer.
/// @param context      Where in the sequence that is.
/// @param out          Start it with KVT_TOKEN_LISTS_INIT, and set arrays and their room. Counts are 0
///                     where all stay.
/// @param out_evicted  Receives 1 when some have to go, else 0.
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
pub unsafe extern "C" fn kvt_sparse_plan_eviction(
    policy: *const kvt_sparse_t,
    layer: u32,
    context: *const kvt_sparse_context_t,
    out: *mut kvt_token_lists_t,
    out_evicted: *mut u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    require(out_evicted)?;
    let context = context_of(context)?;
    with_seat(policy, |seat| {
        let (served, keep) = (&mut seat.served, &mut seat.keep);
        keep.clear();
        let goes = served.evict(layer, &context, keep)?;
        if !goes {
            keep.clear();
        }
        give_keep(&keep.heads, out)?;
        out_evicted.write(u32::from(goes));
        Ok(())
    })
}

/// The last lists that a policy answered with, again; none where all stayed.
///
/// @param policy  The policy.
/// @param out     As in kvt_sparse_plan_eviction.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_BUSY, KVT_E_TOO_NEW, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states, its arrays for writes of their room.
#[capi]
pub unsafe extern "C" fn kvt_sparse_last_retained(
    policy: *const kvt_sparse_t,
    out: *mut kvt_token_lists_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    with_seat(policy, |seat| give_keep(&seat.keep.heads, out))
}

/// What was kept of a layer is all there is now: an answer of kvt_sparse_plan_eviction, of this policy
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
pub unsafe extern "C" fn kvt_sparse_commit_eviction(
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

// Policies of the engine: a table of callbacks.

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
/// which has room for all of them, and their number to `out_count`. Any order.
pub type kvt_select_blocks_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        layer: u32,
        query: *const kvt_rows_t,
        candidates: *const u32,
        candidate_count: u64,
        context: *const kvt_sparse_context_t,
        ids: *mut u32,
        out_count: *mut u64,
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

// Calls of the table.

/// Rows as C has them; borrowed as the rows are.
fn rows_for_c(rows: &Rows<'_>) -> kvt_rows_t {
    let view = rows.view();
    let mut out = kvt_rows_t {
        struct_size: size_of::<kvt_rows_t>() as u64,
        view: kvt_view_t {
            tokens: view.tokens,
            heads: view.heads,
            memory: KVT_MEMORY_HOST,
            run_bytes: view.run_bytes,
            token_stride_bytes: view.token_stride_bytes,
            head_stride_bytes: view.head_stride_bytes,
            ..<kvt_view_t as Plain>::zeroed()
        },
        dtype: rows.dtype().code(),
        ..<kvt_rows_t as Plain>::zeroed()
    };
    match view.place {
        Place::At(address) => {
            out.view.address = std::ptr::with_exposed_provenance_mut(address as usize);
        }
        Place::Pages { addresses, page_tokens, shift_bytes } => {
            // Pointers have 64 bits wherever this library is built.
            out.view.pages = addresses.as_ptr().cast::<*mut c_void>();
            out.view.page_count = addresses.len() as u64;
            (out.view.page_tokens, out.view.shift_bytes) = (page_tokens, shift_bytes);
        }
    }
    let (scaling, scales) = match rows.scales() {
        Scales::None => (KVT_SCALES_NONE, &[][..]),
        Scales::Token(scales) => (KVT_SCALES_TOKEN, scales),
        Scales::Channel(scales) => (KVT_SCALES_CHANNEL, scales),
    };
    if !scales.is_empty() {
        (out.scaling, out.scales) = (scaling, scales.as_ptr());
        out.scale_count = scales.len() as u64;
    }
    out
}

fn context_for_c(context: &Context) -> kvt_sparse_context_t {
    kvt_sparse_context_t {
        struct_size: size_of::<kvt_sparse_context_t>() as u64,
        is_prefill: u32::from(context.is_prefill),
        part: context.part,
        parts: context.parts,
        first_query: context.first_query,
        tokens: context.tokens,
        reserved: 0,
    }
}

/// A pointer to something that may not be there.
fn maybe<T>(of: Option<&T>) -> *const T {
    of.map_or(std::ptr::null(), |of| of)
}

/// What a callback came to.
fn result(what: &str, status: kvt_status_t) -> Result<()> {
    match Status::from_code(status) {
        Some(Status::Ok) => Ok(()),
        known => {
            let text = format!("{what} of the engine's policy returned {status}");
            Err(Error::new(known.unwrap_or(Status::Invalid), text))
        }
    }
}

/// Whether a callback did it; KVT_E_UNSUPPORTED = it leaves it to the library.
fn computed(what: &str, status: kvt_status_t) -> Result<bool> {
    if status == Status::Unsupported.code() {
        return Ok(false);
    }
    result(what, status).map(|()| true)
}

/// A policy by callbacks.
pub(crate) struct Called {
    foreign: Arc<Foreign<Table>>,
    traits: Traits,
    layers: u32,
    heads: Heads,
    stats: Stats,
}

impl Called {
    pub(crate) fn new(foreign: Arc<Foreign<Table>>, traits: Traits, shape: &Shape) -> Called {
        let heads = Heads { queries: shape.query_heads, keys: shape.key_heads };
        Called { foreign, traits, layers: shape.layers, heads, stats: Stats::default() }
    }

    /// Calls `body` with the table and the user data.
    fn call<R>(&self, body: impl FnOnce(&Table, *mut c_void) -> R) -> R {
        self.foreign.call(|table, user_data| body(&table, user_data))
    }
}

impl Sparse for Called {
    fn traits(&self) -> Traits {
        self.traits
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    fn seal(&mut self, layer: u32, id: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        let keys = rows_for_c(keys);
        self.call(|table, user_data| match table.on_prefill_offload {
            // SAFETY: function and data came together; keys are borrowed for the call.
            Some(hook) => result("on_prefill_offload", unsafe {
                hook(user_data, id, layer, first, &raw const keys)
            }),
            None => Ok(()),
        })
    }

    fn seal_all(&mut self, id: u32, first: u32, keys: &[Rows<'_>]) -> Result<()> {
        if self.call(|table, _| table.on_decode_offload.is_none()) {
            let each = |(layer, keys)| self.seal(layer, id, first, keys);
            return (0..).zip(keys).try_for_each(each);
        }
        let mut all: Vec<kvt_rows_t> = Vec::new();
        all.try_reserve_exact(keys.len()).map_err(|_| Status::NoMem)?;
        all.extend(keys.iter().map(rows_for_c));
        self.call(|table, user_data| match table.on_decode_offload {
            // SAFETY: function and data came together; the list is borrowed for the call.
            Some(hook) => result("on_decode_offload", unsafe {
                hook(user_data, id, first, all.as_ptr(), self.layers)
            }),
            None => Ok(()),
        })
    }

    fn observe(&mut self, layer: u32, queries: u32, sums: &[f32], tokens: u32) -> Result<()> {
        let count = sums.len() as u64;
        self.call(|table, user_data| match table.observe {
            // SAFETY: function and data came together; sums are borrowed for the call.
            Some(observe) => result("observe", unsafe {
                observe(user_data, layer, queries, sums.as_ptr(), count, tokens)
            }),
            None => Ok(()),
        })
    }

    fn select(
        &mut self,
        layer: u32,
        query: Option<&Rows<'_>>,
        candidates: &[u32],
        context: &Context,
        out: &mut Vec<u32>,
    ) -> Result<()> {
        out.clear();
        out.try_reserve(candidates.len()).map_err(|_| Status::NoMem)?;
        out.resize(candidates.len(), 0);
        let (query, context) = (query.map(rows_for_c), context_for_c(context));
        let mut count = 0;
        self.call(|table, user_data| match table.select_blocks {
            // SAFETY: function and data came together; `out` has room for all candidates.
            Some(select) => result("select_blocks", unsafe {
                select(
                    user_data,
                    layer,
                    maybe(query.as_ref()),
                    candidates.as_ptr(),
                    candidates.len() as u64,
                    &raw const context,
                    out.as_mut_ptr(),
                    &raw mut count,
                )
            }),
            None => Err(Status::Unsupported.into()),
        })?;
        if count > candidates.len() as u64 {
            fail!(Invalid, "select_blocks chose {count} of {} candidates", candidates.len());
        }
        out.truncate(count as usize);
        out.sort_unstable();
        check_chosen(candidates, out)?;
        self.stats.count(candidates.len(), out.len());
        Ok(())
    }

    fn index(
        &mut self,
        layer: u32,
        queries: &Rows<'_>,
        keys: Option<&Rows<'_>>,
        context: &Context,
        out: &mut Index,
    ) -> Result<()> {
        out.set_dense();
        let (tokens, context) = (queries.tokens(), context_for_c(context));
        let (queries, keys) = (rows_for_c(queries), keys.map(rows_for_c));
        let mut answer = kvt_index_t::zeroed();
        answer.struct_size = size_of::<kvt_index_t>() as u64;
        self.call(|table, user_data| match table.index {
            // SAFETY: function and data came together; all is borrowed for the call.
            Some(index) => result("index", unsafe {
                let keys = maybe(keys.as_ref());
                index(
                    user_data,
                    layer,
                    &raw const queries,
                    keys,
                    &raw const context,
                    &raw mut answer,
                )
            }),
            None => Err(Status::Unsupported.into()),
        })?;
        // SAFETY: the function says that its arrays are there until it is called again.
        let keys = unsafe { keys_of(&raw const answer)? };
        keys.check(self.heads, context.first_query, tokens)
            .map_err(|error| error.within("index of the engine's policy"))?;
        out.copy(&keys)
    }

    fn attend(
        &mut self,
        layer: u32,
        (queries, keys, values): (&Rows<'_>, &Rows<'_>, &Rows<'_>),
        context: &Context,
        out: &mut [f32],
        lse: Option<&mut [f32]>,
    ) -> Result<bool> {
        let (queries, context) = (rows_for_c(queries), context_for_c(context));
        let (keys, values) = (rows_for_c(keys), rows_for_c(values));
        let lse = lse.map_or(std::ptr::null_mut(), |lse| lse.as_mut_ptr());
        self.call(|table, user_data| match table.attention {
            // SAFETY: function and data came together; memory is as long as the header says.
            // What it does not compute itself is computed by its index.
            Some(attend) => computed("sparse_prefill_attention", unsafe {
                attend(
                    user_data,
                    layer,
                    &raw const queries,
                    &raw const keys,
                    &raw const values,
                    &raw const context,
                    out.as_mut_ptr(),
                    lse,
                )
            }),
            None => Ok(false),
        })
    }

    fn evict(&mut self, layer: u32, context: &Context, out: &mut RetainedTokens) -> Result<bool> {
        out.clear();
        let context = context_for_c(context);
        let mut answer = kvt_token_lists_t::zeroed();
        answer.struct_size = size_of::<kvt_token_lists_t>() as u64;
        self.call(|table, user_data| match table.evict {
            // SAFETY: function and data came together; all is borrowed for the call.
            Some(evict) => result("evict", unsafe {
                evict(user_data, layer, &raw const context, &raw mut answer)
            }),
            None => Err(Status::Unsupported.into()),
        })?;
        if answer.start_count == 0 {
            return Ok(false);
        }
        // SAFETY: the function says that its arrays are there until it is called again.
        *out = unsafe { keep_of(&raw const answer)? };
        Ok(true)
    }

    fn evicted(&mut self, layer: u32, kept: &RetainedTokens) -> Result<()> {
        let kept = keep_for_c(kept);
        self.call(|table, user_data| match table.evicted {
            // SAFETY: function and data came together; lists are borrowed for the call.
            Some(hook) => result("evicted", unsafe { hook(user_data, layer, &raw const kept) }),
            None => Ok(()),
        })
    }

    fn truncate(&mut self, tokens: u32) -> Result<()> {
        self.call(|table, user_data| match table.truncate {
            // SAFETY: function and data came together.
            Some(truncate) => result("truncate", unsafe { truncate(user_data, tokens) }),
            None => Ok(()),
        })
    }

    fn reset(&mut self) {
        self.stats = Stats::default();
        if let Err(error) = self.truncate(0) {
            log::warn!("a policy was not reset: {error}");
        }
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        let mut copy = std::ptr::null_mut();
        let table = self.call(|table, user_data| {
            let Some(fork) = table.fork else {
                fail!(Unsupported, "this policy of the engine's has no fork");
            };
            // SAFETY: function and data came together; the output is local.
            result("fork", unsafe { fork(user_data, &raw mut copy) }).map(|()| *table)
        })?;
        let foreign = Arc::new(Foreign::new(table, copy, table.destroy));
        foreign.keep();
        let stats = Stats::default();
        let (traits, layers, heads) = (self.traits, self.layers, self.heads);
        Ok(Box::new(Called { foreign, traits, layers, heads, stats }))
    }
}

/// Whether what was chosen are candidates, each once; it is sorted.
fn check_chosen(candidates: &[u32], chosen: &[u32]) -> Result<()> {
    let mut sorted = Vec::new();
    let mut among = candidates;
    if !candidates.is_sorted() {
        sorted.try_reserve_exact(candidates.len()).map_err(|_| Status::NoMem)?;
        sorted.extend_from_slice(candidates);
        sorted.sort_unstable();
        among = &sorted;
    }
    if !chosen.is_sorted_by(|a, b| a < b) {
        fail!(Invalid, "select_blocks chose a block twice");
    }
    if let Some(id) = chosen.iter().find(|id| among.binary_search(id).is_err()) {
        fail!(Invalid, "select_blocks chose {id}, which is no candidate");
    }
    Ok(())
}

// Rows of policies.

/// kvt_prefill_open.
pub const KVT_KERNEL_PREFILL: u32 = 0;
/// kvt_decode_open.
pub const KVT_KERNEL_DECODE: u32 = 1;
/// kvt_column_sums_open.
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
    /// What has stayed: the lists of kvt_sparse_commit_eviction. Null = nothing was evicted.
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
    no_reserved(given.reserved)?;
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
/// @param out_first_query  Receives first_query of a problem over these rows, whose first_key
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
    out_first_query: *mut u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    require(out_first_query)?;
    let (heads, placement, keys) = (heads_of(attention)?, placed_of(placement)?, keys_of(index)?);
    let mut rows = Index::default();
    let first_query = placement.index(&keys, heads, (first, count), &mut rows)?;
    give_index(&rows.keys(), out)?;
    out_first_query.write(first_query);
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
pub unsafe extern "C" fn kvt_column_sums_place(
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
/// @param out_memory   Receives numbers of a job's memory (0 but for decodes); may be null.
/// @param out_scratch  Receives numbers of scratch of each thread; may be null.
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
    out_memory: *mut u64,
    out_scratch: *mut u64,
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
    for (out, value) in [(out_memory, memory), (out_scratch, scratch)] {
        put(out, value as u64);
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::expect_used, clippy::panic)]
mod tests {
    use std::ptr::null_mut;

    use super::*;
    use crate::base::panic::catch;
    use crate::ffi::abi::Plain;
    use crate::ffi::abi::insert;
    use crate::ffi::sparse::kvt_sparse_reset;
    use crate::ffi::sparse::{
        kvt_sparse_close, kvt_sparse_fork, kvt_sparse_stats, kvt_sparse_stats_t,
    };
    use crate::sparse::{Kind, Shape};

    const SHAPE: Shape = Shape {
        layers: 1,
        query_heads: 1,
        key_heads: 1,
        key_dim: 4,
        value_dim: 4,
        scale: 0.0,
        kind: Kind::Split,
        block_tokens: 16,
        max_tokens: 64,
    };

    #[test]
    fn a_policy_in_which_a_defect_was_caught_is_looked_at_and_closed() {
        let seat =
            Seat::new(CheckedPolicy::open("full", &SHAPE).expect("sound"), None).expect("free");
        let mut handle = insert(SparseNoun::new(seat)).expect("room");
        let caught = catch(|| with_seat(handle, |_| -> Result<()> { panic!("on purpose") }));
        assert!(caught.is_err());
        let mut stats = kvt_sparse_stats_t::zeroed();
        stats.struct_size = size_of::<kvt_sparse_stats_t>() as u64;
        let mut copy = null_mut();
        // SAFETY: valid pointers.
        unsafe {
            assert_eq!(kvt_sparse_stats(handle, &raw mut stats), Status::Ok.code());
            assert_eq!(kvt_sparse_fork(handle, &raw mut copy, null_mut()), Status::Panic.code());
            assert_eq!(kvt_sparse_reset(handle), Status::Panic.code());
            assert_eq!(kvt_sparse_close(&raw mut handle), Status::Ok.code());
        }
        assert!(handle.is_null() && copy.is_null());
    }

    #[test]
    fn a_call_inside_of_another_is_refused_and_the_policy_is_there_afterwards() {
        let seat =
            Seat::new(CheckedPolicy::open("full", &SHAPE).expect("sound"), None).expect("free");
        let mut handle = insert(SparseNoun::new(seat)).expect("room");
        let inner = with_seat(handle, |_| Ok(with_seat(handle, |_| Ok(())))).expect("alone");
        assert_eq!(inner.expect_err("inside").status(), Status::Busy);
        with_seat(handle, |_| Ok(())).expect("alone again");
        // SAFETY: a valid pointer.
        assert_eq!(unsafe { kvt_sparse_close(&raw mut handle) }, Status::Ok.code());
    }
}
