//! Sparse policies for engines that keep KV themselves: which keys to compute with, which to load,
//! which to evict.
//!
//! A policy sees keys as they are appended, and answers for a query. Its traits (kvt_sparse_traits)
//! say what it can do (select blocks to load, select keys to compute with, evict tokens) and which
//! inputs it needs. kvt_offload_t uses the same policies over KV that a store keeps.
//!
//! Life cycle: kvt_sparse_open, kvt_sparse_append for each layer, kvt_sparse_select or
//! kvt_sparse_index for a query, kvt_sparse_plan_eviction and _commit_eviction, kvt_sparse_close.
//! Calls on one policy run one at a time.
//!
//! ```c
//! kvt_attention_t shape = KVT_ATTENTION_INIT;
//! shape.layers = 32, shape.query_heads = 32, shape.key_heads = 8;
//! shape.key_dim = shape.value_dim = 128, shape.block_tokens = 16, shape.max_tokens = 131072;
//! kvt_sparse_opts_t opts = KVT_SPARSE_OPTS_INIT;
//! opts.attention = &shape, opts.spec = "quest(budget=2048)", opts.spec_bytes = KVT_NUL_TERMINATED;
//! if (kvt_sparse_open(&opts, &sparse, &err) != KVT_OK) return fail(err);
//! if (kvt_sparse_append(sparse, 0, 0, &rows, &err) != KVT_OK) return fail(err); /* keys of layer 0 */
//! kvt_sparse_context_t step = KVT_SPARSE_CONTEXT_INIT;
//! step.tokens = 4096, step.first_query = 4095;
//! kvt_index_t chosen = KVT_INDEX_INIT;
//! if (kvt_sparse_index(sparse, 0, &rows, NULL, &step, &chosen, &err) != KVT_OK) return fail(err);
//! use(&chosen); /* attention over these keys only: kvt_attention_args_t.select */
//! ```

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
    context_of, given, kvt_attention_t, kvt_decode_flags_t, kvt_rows_t, kvt_sparse_context_t,
    numbers_mut, shape_of, with_rows,
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

/// A sparse policy for one sequence. Calls on one policy must not overlap: a second call, also one
/// from a callback of the policy, returns KVT_E_BUSY. kvt_sparse_traits and kvt_sparse_close are
/// exempt.
pub struct kvt_sparse_t(());

/// Capabilities of a policy (caps). LOAD: selects the blocks to load. INDEX: selects the keys to
/// compute with. EVICT: evicts tokens. PREFILL: for the prompt; EVICT_PREFILL acts once the prompt
/// is computed. DECODE: for the tokens that follow.
pub type kvt_sparse_caps_t = u32;

pub const KVT_SPARSE_LOAD_PREFILL: kvt_sparse_caps_t = 1;
pub const KVT_SPARSE_LOAD_DECODE: kvt_sparse_caps_t = 2;
pub const KVT_SPARSE_INDEX_PREFILL: kvt_sparse_caps_t = 4;
pub const KVT_SPARSE_INDEX_DECODE: kvt_sparse_caps_t = 8;
pub const KVT_SPARSE_EVICT_PREFILL: kvt_sparse_caps_t = 16;
pub const KVT_SPARSE_EVICT_DECODE: kvt_sparse_caps_t = 32;

/// Inputs that a policy needs: bits.
pub type kvt_needs_t = u32;

/// Keys of new tokens: kvt_sparse_append, or by blocks kvt_sparse_add_block.
pub const KVT_NEEDS_KEYS: kvt_needs_t = 1;
/// Queries, in kvt_sparse_select and kvt_sparse_index.
pub const KVT_NEEDS_QUERIES: kvt_needs_t = 2;
/// Attention that each key received, before kvt_sparse_plan_eviction: kvt_sparse_observe.
pub const KVT_NEEDS_COLUMN_SUMS: kvt_needs_t = 4;
/// In kvt_sparse_select, the query of the layer `ahead` layers earlier, or a prediction from it.
pub const KVT_NEEDS_NEXT_QUERY: kvt_needs_t = 8;
/// A score for each candidate, before each kvt_sparse_select: kvt_sparse_add_scores.
pub const KVT_NEEDS_SCORES: kvt_needs_t = 16;
/// Values of new tokens.
pub const KVT_NEEDS_VALUES: kvt_needs_t = 32;
/// A weight for each query and head, before each kvt_sparse_select or _index:
/// kvt_sparse_add_scores.
pub const KVT_NEEDS_WEIGHTS: kvt_needs_t = 64;
/// All keys of the sequence, in kvt_sparse_index.
pub const KVT_NEEDS_ALL_KEYS: kvt_needs_t = 128;

/// Scope of an answer: one for each query head, one for each key head, or one for the layer.
pub type kvt_scope_t = u32;

pub const KVT_SCOPE_QUERY_HEAD: kvt_scope_t = 0;
pub const KVT_SCOPE_KEY_HEAD: kvt_scope_t = 1;
pub const KVT_SCOPE_LAYER: kvt_scope_t = 2;

/// Unit of an answer: it names tokens or blocks.
pub type kvt_granularity_t = u32;

pub const KVT_GRANULARITY_TOKEN: kvt_granularity_t = 0;
pub const KVT_GRANULARITY_BLOCK: kvt_granularity_t = 1;

/// Properties of a sparse policy.
pub type kvt_sparse_flags_t = u64;

/// Heads may retain different numbers of tokens.
pub const KVT_SPARSE_RAGGED: kvt_sparse_flags_t = 1;
/// Only selected blocks are loaded; without this flag all blocks are loaded.
pub const KVT_SPARSE_SELECTS: kvt_sparse_flags_t = 2;
/// The engine must rotate the keys (RoPE) to their places in the cache.
pub const KVT_SPARSE_ROTATES: kvt_sparse_flags_t = 4;

/// Traits of a policy. They suffice to serve a policy without knowing its name.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_sparse_traits_t {
    pub struct_size: u64,
    /// Calls that need another capability return KVT_E_UNSUPPORTED.
    pub caps: kvt_sparse_caps_t,
    /// Other inputs are ignored, except that kvt_sparse_add_scores rejects them.
    pub needs: kvt_needs_t,
    pub scope: kvt_scope_t,
    pub granularity: kvt_granularity_t,
    /// KVT_SPARSE_RAGGED, KVT_SPARSE_SELECTS, KVT_SPARSE_ROTATES.
    pub flags: kvt_sparse_flags_t,
    /// Number of first layers that are not restricted, 0 to all.
    pub dense_layers: u32,
    /// Last queries of a prompt whose attention kvt_sparse_observe takes; 0 = none, UINT32_MAX =
    /// all. A policy that evicts in decode also takes that of each step.
    pub sum_queries: u32,
    /// kvt_sparse_select takes the query of this many layers earlier; 0 = the layer's own query.
    pub ahead: u32,
    /// Query heads of rows of the policy's own (as `dsa` has); 0 = the model's rows.
    pub own_query_heads: u32,
    /// Key heads of these rows; all own_* fields are set, or all are 0.
    pub own_key_heads: u32,
    /// Elements of a query or key head of these rows.
    pub own_dim: u32,
}

/// Options of kvt_sparse_open. Exactly one of `spec` and `custom` is set.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_sparse_opts_t {
    pub struct_size: u64,
    /// Always 0.
    pub flags: u64,
    /// Attention shape of the model.
    pub attention: *const kvt_attention_t,
    /// Spec string, such as "minference(budget=0.2)"; see docs/reference/sparse.md.
    pub spec: *const c_char,
    pub spec_bytes: u64,
    /// Callbacks of the engine that make up a policy.
    pub custom: *const kvt_sparse_custom_t,
    /// Account that pays for the policy's state in host memory; may be null. While it cannot, calls
    /// that add input return KVT_E_BUDGET and change nothing.
    pub account: *const kvt_account_t,
}

/// Counters since the policy was opened. A fork starts at 0.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_sparse_stats_t {
    pub struct_size: u64,
    /// Bytes of state of the sequence that the policy holds now.
    pub state_bytes: u64,
    /// Answered selections (kvt_sparse_select).
    pub selections: u64,
    /// Candidates in them.
    pub candidates: u64,
    /// Candidates chosen to be loaded.
    pub chosen: u64,
    /// Candidates that need not be loaded.
    pub spared: u64,
    /// Selections that were compared with the choice of the layer's own query.
    pub audited: u64,
    /// Blocks that the own queries would have chosen.
    pub wanted: u64,
    /// Blocks of `wanted` that were chosen: found / wanted is the recall.
    pub found: u64,
}

/// A policy that kvt_sparse_open knows. Texts live as long as the library and have no NUL.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_sparse_info_t {
    pub struct_size: u64,
    /// Name in specs.
    pub name: *const c_char,
    pub name_bytes: u64,
    /// Description, one line.
    pub about: *const c_char,
    pub about_bytes: u64,
}

/// Converts traits to the C struct.
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

/// Opens a sparse policy for one sequence; close it with kvt_sparse_close.
///
/// @return KVT_E_SPEC, KVT_E_LIMIT, KVT_E_BUDGET; for a file that the spec names KVT_E_NOT_FOUND,
///         KVT_E_IO and KVT_E_CORRUPT.
#[capi]
pub unsafe extern "C" fn kvt_sparse_open(
    opts: *const kvt_sparse_opts_t,
    out: *mut *mut kvt_sparse_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let opts = read(opts)?;
    let shape = shape_of(opts.attention)?;
    crate::base::fork::check()?;
    crate::base::fork::arm()?;
    known_flags(opts.flags, 0)?;
    if opts.spec.is_null() == opts.custom.is_null() {
        let both = if opts.spec.is_null() { "null" } else { "set" };
        fail!(Invalid, "spec and custom are both {both}: set exactly one of them");
    }
    let account = pin_optional(opts.account)?.map(|account| account.0.clone());
    let (policy, callbacks) = if opts.custom.is_null() {
        (CheckedPolicy::open(text("spec", opts.spec, opts.spec_bytes)?, &shape)?, None)
    } else {
        let (policy, callbacks) = made(opts.custom, &shape)?;
        (CheckedPolicy::of(policy, &shape), Some(callbacks))
    };
    let handle = insert(SparseObject::new(PolicyState::new(policy, account)?))?;
    callbacks.iter().for_each(|callbacks| callbacks.keep());
    out.write(handle);
    Ok(())
}

/// Closes a policy. Does not wait: a running call ends first, then user data is destroyed.
#[capi]
pub unsafe extern "C" fn kvt_sparse_close(policy: *mut *mut kvt_sparse_t) -> kvt_status_t {
    free(policy, |_| Ok(()))
}

/// Copies a policy with its state, for a sequence that continues from here. The account of the
/// original pays for the copy, too.
///
/// @return KVT_E_UNSUPPORTED (a custom policy without `fork`), KVT_E_BUDGET.
#[capi]
pub unsafe extern "C" fn kvt_sparse_fork(
    policy: *const kvt_sparse_t,
    out: *mut *mut kvt_sparse_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let copy = with_policy(policy, PolicyState::fork)?;
    out.write(insert(SparseObject::new(copy))?);
    Ok(())
}

/// Reads the traits of a policy.
#[capi]
pub unsafe extern "C" fn kvt_sparse_traits(
    policy: *const kvt_sparse_t,
    out: *mut kvt_sparse_traits_t,
) -> kvt_status_t {
    check_out(out)?;
    let traits = inspect(policy)?.traits;
    write(out, &traits_for_c(&traits));
    Ok(())
}

/// Reads the counters of a policy.
#[capi]
pub unsafe extern "C" fn kvt_sparse_stats(
    policy: *const kvt_sparse_t,
    out: *mut kvt_sparse_stats_t,
) -> kvt_status_t {
    check_out(out)?;
    let (stats, state_bytes) =
        inspect_policy(policy, |state| Ok((state.policy.stats(), state.policy.state_bytes())))?;
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

/// Counts the policies that kvt_sparse_open knows by name.
#[capi]
pub unsafe extern "C" fn kvt_sparse_count(out_count: *mut u64) -> kvt_status_t {
    require(out_count)?;
    out_count.write(ENTRIES.len() as u64);
    Ok(())
}

/// Describes a policy that kvt_sparse_open knows by name.
///
/// @param index  0 to kvt_sparse_count - 1.
/// @return KVT_E_NOT_FOUND (the index is too large).
#[capi]
pub unsafe extern "C" fn kvt_sparse_info(index: u64, out: *mut kvt_sparse_info_t) -> kvt_status_t {
    check_out(out)?;
    let found = usize::try_from(index).ok().and_then(|index| ENTRIES.get(index));
    let entry = found.ok_or_else(|| {
        let count = ENTRIES.len();
        Error::new(Status::NotFound, format!("index is {index}, it must be below {count}"))
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

/// A policy with its last answers, and the account that pays for its state.
pub(crate) struct PolicyState {
    pub(crate) policy: CheckedPolicy,
    pub(crate) index: Index,
    pub(crate) retained: RetainedTokens,
    pub(crate) ids: Vec<u32>,
    account: Option<Arc<Account>>,
    charged_bytes: u64,
}

impl PolicyState {
    pub(crate) fn new(
        policy: CheckedPolicy,
        account: Option<Arc<Account>>,
    ) -> Result<Box<PolicyState>> {
        let (index, retained, ids) = (Index::default(), RetainedTokens::default(), Vec::new());
        let state = PolicyState { policy, index, retained, ids, account, charged_bytes: 0 };
        let mut state = Box::new(state);
        state.charge()?;
        Ok(state)
    }

    /// Charges the account for the current state. Called before the policy gets more input: the
    /// last input is part of the state even if the account could not pay for it.
    pub(crate) fn charge(&mut self) -> Result<()> {
        let Some(account) = &self.account else { return Ok(()) };
        let now = self.policy.state_bytes();
        if now < self.charged_bytes {
            account.give_back(Tier::Host, self.charged_bytes - now);
        } else if let Err(error) = account.take(Tier::Host, now - self.charged_bytes) {
            return Err(error.within("state of the sparse policy"));
        }
        self.charged_bytes = now;
        Ok(())
    }

    /// A copy that the same account pays for.
    pub(crate) fn fork(&mut self) -> Result<Box<PolicyState>> {
        PolicyState::new(self.policy.fork()?, self.account.clone())
    }
}

impl Drop for PolicyState {
    fn drop(&mut self) {
        if let Some(account) = &self.account {
            account.give_back(Tier::Host, self.charged_bytes);
        }
    }
}

/// The object behind a handle. A call takes the state out while it uses the policy: callbacks of a
/// custom policy are called with no lock held.
pub(crate) struct SparseObject {
    state: Mutex<Option<Box<PolicyState>>>,
    /// A copy of the traits, which callbacks of the policy can read during a call.
    pub(crate) traits: Traits,
}

impl SparseObject {
    pub(crate) fn new(state: Box<PolicyState>) -> SparseObject {
        let traits = *state.policy.traits();
        SparseObject { state: Mutex::new(Some(state)), traits }
    }

    /// Calls `body` with exclusive use of the policy. Fails with `Busy` during another call.
    fn take<R>(&self, body: impl FnOnce(&mut PolicyState) -> Result<R>) -> Result<R> {
        let Some(state) = self.state.lock().take() else {
            fail!(Busy, "another call uses the policy: calls on one policy must not overlap");
        };
        let mut taken = TakenState { object: self, state: Some(state) };
        match &mut taken.state {
            Some(state) => body(state),
            None => Err(Status::State.into()),
        }
    }
}

/// Puts the state back when dropped, also after a panic: then the policy can still be inspected
/// and closed.
struct TakenState<'a> {
    object: &'a SparseObject,
    state: Option<Box<PolicyState>>,
}

impl Drop for TakenState<'_> {
    fn drop(&mut self) {
        *self.object.state.lock() = self.state.take();
    }
}

noun!(SparseObject, kvt_sparse_t, 15, "sparse policy");

/// Calls `body` with exclusive use of the policy of a handle.
pub(crate) fn with_policy<R>(
    handle: *const kvt_sparse_t,
    body: impl FnOnce(&mut PolicyState) -> Result<R>,
) -> Result<R> {
    enter(handle)?.take(body)
}

/// As [`with_policy`], for calls that only read: also allowed for a policy in which a panic was
/// caught.
pub(crate) fn inspect_policy<R>(
    handle: *const kvt_sparse_t,
    body: impl FnOnce(&mut PolicyState) -> Result<R>,
) -> Result<R> {
    inspect(handle)?.take(body)
}

// Notifications.

/// Most sums or scores in one call.
const MAX_NUMBERS: usize = 1 << 28;

/// Passes input to a policy through `body`. Fails, before that, if the account cannot pay for the
/// state so far.
fn notify(
    policy: *const kvt_sparse_t,
    body: impl FnOnce(&mut PolicyState) -> Result<()>,
) -> Result<()> {
    with_policy(policy, |state| {
        state.charge()?;
        body(state)?;
        // The input is part of the state whether or not the account can pay for it. If it cannot,
        // the next call fails.
        let _ = state.charge();
        Ok(())
    })
}

/// Calls `body` with keys. Fails if `keys` is null.
///
/// # Safety
/// As [`with_rows`].
unsafe fn with_keys(
    keys: *const kvt_rows_t,
    body: impl FnOnce(&Rows<'_>) -> Result<()>,
) -> Result<()> {
    let body = |keys: Option<&Rows<'_>>| match keys {
        Some(keys) => body(keys),
        None => fail!(Invalid, "keys is null: pass the keys of the tokens"),
    };
    // SAFETY: the caller's promise.
    unsafe { with_rows("keys", keys, body) }
}

/// Adds the keys of new tokens of a layer. Their positions are already encoded (RoPE is applied).
///
/// @param first  Position of the first token.
/// @param keys   [tokens, key heads, key dim], or rows of the policy's own if its traits have some.
///               Elements must be finite.
/// @return KVT_E_STATE (tokens before `first` are missing), KVT_E_LIMIT, KVT_E_BUDGET,
///         KVT_E_UNSUPPORTED (dtype), KVT_E_UNAVAILABLE (not in host memory).
#[capi]
pub unsafe extern "C" fn kvt_sparse_append(
    policy: *const kvt_sparse_t,
    layer: u32,
    first: u32,
    keys: *const kvt_rows_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let body = |keys: &Rows<'_>| notify(policy, |state| state.policy.append(layer, first, keys));
    with_keys(keys, body)
}

/// Registers a block of a layer as a candidate. Call it before the block is moved away, while its
/// keys can be read. Appended tokens are known to the policy without it.
///
/// @param id     Id of the block in kvt_sparse_select.
/// @param first  Position of its first token.
/// @param keys   The model's keys of its tokens, all, or the first ones.
/// @return As kvt_sparse_append.
#[capi]
pub unsafe extern "C" fn kvt_sparse_add_block(
    policy: *const kvt_sparse_t,
    layer: u32,
    id: u32,
    first: u32,
    keys: *const kvt_rows_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let body = |keys: &Rows<'_>| notify(policy, |state| state.policy.seal(layer, id, first, keys));
    with_keys(keys, body)
}

/// Registers a block that decode has completed in all layers: kvt_sparse_add_block for each layer,
/// or one call of on_decode_offload of a custom policy.
///
/// @param keys  An entry for each layer of the model.
/// @return As kvt_sparse_append.
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
    for layer in 0..given.len() {
        all.push(GivenRows::new("keys", &given.get(layer)?)?);
    }
    for keys in &all {
        rows.push(keys.rows("keys")?);
    }
    notify(policy, |state| state.policy.seal_all(id, first, &rows))
}

/// Adds the attention that each resident token of a layer received from some queries: the result of
/// kvt_column_sums_open or kvt_decode_sums.
///
/// @param queries    Number of queries: the last ones of a prompt, or those of a decode step.
/// @param sums       [query heads, tokens], or [tokens] for all heads; finite, at least 0.
/// @param sum_count  At most 2^28.
/// @param tokens     Resident tokens of a list; sums are in their order.
/// @return KVT_E_LIMIT, KVT_E_BUDGET.
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
    notify(policy, |state| state.policy.observe(layer, queries, sums, tokens))
}

/// Passes what the engine computed for the next kvt_sparse_select or kvt_sparse_index of a layer: a
/// score for each candidate (KVT_NEEDS_SCORES), or weights [queries, query heads]
/// (KVT_NEEDS_WEIGHTS).
///
/// @param score_count  At most 2^28.
/// @return KVT_E_UNSUPPORTED (the policy needs neither), KVT_E_LIMIT, KVT_E_BUDGET.
#[capi]
pub unsafe extern "C" fn kvt_sparse_add_scores(
    policy: *const kvt_sparse_t,
    layer: u32,
    scores: *const f32,
    score_count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let scores = numbers(scores, score_count, MAX_NUMBERS)?;
    notify(policy, |state| state.policy.score(layer, scores))
}

/// Truncates the sequence to its first `tokens` tokens.
#[capi]
pub unsafe extern "C" fn kvt_sparse_truncate(
    policy: *const kvt_sparse_t,
    tokens: u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_policy(policy, |state| {
        state.policy.truncate(tokens)?;
        // The state did not grow: giving bytes back cannot fail.
        let _ = state.charge();
        Ok(())
    })
}

/// Starts a new, empty sequence.
#[capi]
pub unsafe extern "C" fn kvt_sparse_reset(policy: *const kvt_sparse_t) -> kvt_status_t {
    with_policy(policy, |state| {
        state.policy.reset();
        // As in kvt_sparse_truncate.
        let _ = state.charge();
        Ok(())
    })
}

/// Saves the policy's state of a block, to be stored with the block and restored by
/// kvt_sparse_load.
///
/// @param data       Null = only the size is wanted.
/// @param out_count  Receives the number of bytes; 0 = the policy saves nothing with blocks.
/// @return KVT_E_TOO_SMALL, KVT_E_NOT_FOUND (an unknown block).
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
    with_policy(policy, |state| state.policy.save(layer, id, &mut saved))?;
    out_count.write(saved.len() as u64);
    if data.is_null() {
        return Ok(());
    }
    if saved.len() as u64 > capacity {
        let text = format!(
            "the saved state has {} bytes, capacity is {capacity}: retry with a larger buffer",
            saved.len()
        );
        return Err(Error::new(Status::TooSmall, text));
    }
    data.copy_from_nonoverlapping(saved.as_ptr(), saved.len());
    Ok(())
}

/// Restores the state that kvt_sparse_save saved for a block. The bytes are validated.
///
/// @param id     Id of the block from now on.
/// @param first  Position of its first token.
/// @return KVT_E_CORRUPT, KVT_E_UNSUPPORTED (the policy saves nothing with blocks), KVT_E_STATE
///         (tokens before `first` are missing), KVT_E_LIMIT, KVT_E_BUDGET.
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
    notify(policy, |state| state.policy.load(layer, id, first, saved))
}

// Lists of tokens and blocks.

/// Whether an array of the caller has room for a list.
fn fits<T, U>(from: &[T], to: *mut U, capacity: u64) -> bool {
    from.is_empty() || (!to.is_null() && to.is_aligned() && from.len() as u64 <= capacity)
}

/// Copies a list to an array of the caller.
///
/// # Safety
/// The list [`fits`], and `to` is valid for writes of its capacity.
unsafe fn copy_to<T: Copy, U: Copy>(from: &[T], to: *mut U) {
    const { assert!(size_of::<T>() == size_of::<U>() && align_of::<T>() == align_of::<U>()) };
    if !from.is_empty() {
        // SAFETY: long enough by the caller's promise, and of the same size; our list and the
        // caller's array do not overlap.
        unsafe { to.cast::<T>().copy_from_nonoverlapping(from.as_ptr(), from.len()) };
    }
}

/// The error for an output array that is too short, after the required counts were written.
pub(crate) fn too_small(what: &str) -> Error {
    let text =
        format!("the output is too short for {what}: retry with the counts that were written");
    Error::new(Status::TooSmall, text)
}

/// Writes an index to a struct of the caller. If its arrays are too short, only counts are written.
///
/// # Safety
/// `out` passed `check_out`; its arrays are valid for their capacities.
pub(crate) unsafe fn write_index(index: &Keys<'_>, out: *mut kvt_index_t) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let mut to = read(out.cast_const())?;
        let (heads, starts, items) = (index.heads, index.starts, index.items);
        to.head_count = heads.len() as u64;
        to.start_count = starts.len() as u64;
        to.item_count = items.len() as u64;
        write(out, &to);
        if !(fits(heads, to.heads, to.head_capacity)
            && fits(starts, to.starts, to.start_capacity)
            && fits(items, to.items, to.item_capacity))
        {
            return Err(too_small("the index"));
        }
        copy_to(heads, to.heads);
        copy_to(starts, to.starts);
        copy_to(items, to.items);
        Ok(())
    }
}

/// Writes lists of retained tokens to a struct of the caller, as [`write_index`] does.
///
/// # Safety
/// As [`write_index`].
pub(crate) unsafe fn write_retained(lists: &Lists, out: *mut kvt_token_lists_t) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let mut to = read(out.cast_const())?;
        let Lists { starts, items } = lists;
        to.start_count = starts.len() as u64;
        to.item_count = items.len() as u64;
        write(out, &to);
        if !(fits(starts, to.starts, to.start_capacity) && fits(items, to.items, to.item_capacity))
        {
            return Err(too_small("the lists of retained tokens"));
        }
        copy_to(starts, to.starts);
        copy_to(items, to.items);
        Ok(())
    }
}

/// The heads of an index of the caller. Kinds are checked before they become a Rust enum.
///
/// # Safety
/// As [`numbers`].
unsafe fn index_heads_of<'a>(given: &kvt_index_t) -> Result<&'a [Head]> {
    // SAFETY: the caller's promise.
    let heads = unsafe { numbers(given.heads.cast_const(), given.head_count, MAX_HEADS as usize)? };
    let is_unknown = |head: &&kvt_index_head_t| head.kind > Kind::Ranges as u32;
    if let Some(head) = heads.iter().find(is_unknown) {
        fail!(Invalid, "kind of a head is {}: it must be one of KVT_INDEX_*, 0 to 3", head.kind);
    }
    const { assert!(size_of::<Head>() == size_of::<kvt_index_head_t>()) };
    // SAFETY: both structs have the same six numbers in the same order, and every kind is valid.
    Ok(unsafe { std::slice::from_raw_parts(heads.as_ptr().cast(), heads.len()) })
}

/// The index of a caller, in the form of kernels, which check its contents. Null = all keys.
///
/// # Safety
/// `given` is null or valid for the size it states; its arrays can be read for their counts,
/// and no thread writes them, as long as the result lives.
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

/// A copy of the caller's lists of retained tokens.
///
/// # Safety
/// `given` is valid for the size it states, its arrays for reads of their counts.
pub(crate) unsafe fn retained_of(given: *const kvt_token_lists_t) -> Result<RetainedTokens> {
    // SAFETY: the caller's promise.
    let (starts, items) = unsafe {
        let given = read(given)?;
        let starts = numbers(given.starts.cast_const(), given.start_count, MAX_ITEMS)?;
        (starts, numbers(given.items.cast_const(), given.item_count, MAX_ITEMS)?)
    };
    let is_end = starts.last().map_or(items.is_empty(), |&end| end as usize == items.len());
    if starts.first().is_some_and(|&first| first != 0) || !is_end || !starts.is_sorted() {
        let count = items.len();
        fail!(Invalid, "starts of token lists must ascend from 0 to item_count, which is {count}");
    }
    let mut retained = RetainedTokens::default();
    let Lists { starts: own_starts, items: own_items } = &mut retained.heads;
    own_starts.try_reserve_exact(starts.len()).map_err(|_| Status::NoMem)?;
    own_items.try_reserve_exact(items.len()).map_err(|_| Status::NoMem)?;
    own_starts.extend_from_slice(starts);
    own_items.extend_from_slice(items);
    Ok(retained)
}

/// The C struct of lists of retained tokens. It borrows the lists.
pub(crate) fn retained_for_c(retained: &RetainedTokens) -> kvt_token_lists_t {
    let Lists { starts, items } = &retained.heads;
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

/// Fills the entries of `ids` after the last chosen id (kvt_sparse_select).
pub const KVT_SPARSE_NO_ID: u32 = 0xFFFF_FFFF;

/// Forms of a selection of keys.
pub type kvt_index_kind_t = u32;

/// All keys; no list.
pub const KVT_INDEX_DENSE: kvt_index_kind_t = 0;
/// Two lists: keys that every query sees, and distances back from a query at which it sees a key.
pub const KVT_INDEX_LINES: kvt_index_kind_t = 1;
/// A list of blocks of keys for each row of queries.
pub const KVT_INDEX_BLOCKS: kvt_index_kind_t = 2;
/// A list of keys that every query sees, then a list of ranges for each row of queries. A range is
/// two items: its first key, and the key after its last.
pub const KVT_INDEX_RANGES: kvt_index_kind_t = 3;

/// Most entries of an array of an index, of token lists, or of candidates.
pub(crate) const MAX_ITEMS: usize = 1 << 30;

/// How the lists of a head are read. Heads may share lists.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_index_head_t {
    pub kind: kvt_index_kind_t,
    /// Index of its first list.
    pub first: u32,
    /// Number of its lists.
    pub lists: u32,
    /// Blocks and ranges: queries in a row, counted from the first computed query; 0 = all queries
    /// are one row.
    pub query_block: u32,
    /// Blocks: keys in a block.
    pub key_block: u32,
    /// Queries from this position on see all keys; UINT32_MAX = no query does, 0 = all do.
    pub dense_from: u32,
}

/// Keys that queries are computed with, chosen by a policy or by the engine. A query never sees
/// keys after its own position. Items of a list ascend strictly. Capacities are for outputs.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_index_t {
    pub struct_size: u64,
    /// How lists are read. 0 heads = all keys; 1 = all heads share it; otherwise one for each query
    /// head, or one for each key head.
    pub heads: *mut kvt_index_head_t,
    pub head_capacity: u64,
    pub head_count: u64,
    /// Start of each list in `items`, then the end of the last list.
    pub starts: *mut u32,
    pub start_capacity: u64,
    pub start_count: u64,
    /// Contents of all lists.
    pub items: *mut u32,
    pub item_capacity: u64,
    pub item_count: u64,
}

/// Retained tokens: ascending positions, one list for each key head, for each query head, or one
/// for all heads. In an answer, no list = all tokens stay. An argument has at least one list.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_token_lists_t {
    pub struct_size: u64,
    /// Start of each list in `items`, then the end of the last: the number of lists plus 1.
    pub starts: *mut u32,
    pub start_capacity: u64,
    pub start_count: u64,
    /// Positions of tokens.
    pub items: *mut u32,
    pub item_capacity: u64,
    pub item_count: u64,
}

/// Selects the candidates to load for a query.
///
/// @param query       [queries, query heads, key dim], of the layer `ahead` (traits) layers
///                    earlier; null = policies that select by queries choose all candidates.
/// @param candidates  Ids of blocks, in any order, each once.
/// @param ids         Receives the chosen ids, ascending, then KVT_SPARSE_NO_ID to its end.
/// @param capacity    At least candidate_count; with less the policy is not called.
/// @return KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED (no KVT_SPARSE_LOAD_* for this phase), KVT_E_STATE
///         (weights or keys are missing), KVT_E_LIMIT, KVT_E_UNAVAILABLE (not in host memory).
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
        fail!(Invalid, "ids is not aligned: its address must be a multiple of 4");
    }
    if capacity < candidate_count || (ids.is_null() && capacity > 0) {
        out_count.write(candidate_count);
        return Err(too_small("an id of each candidate"));
    }
    let select = |query: Option<&Rows<'_>>| {
        with_policy(policy, |state| {
            let (policy, chosen) = (&mut state.policy, &mut state.ids);
            policy.select(layer, query, candidates, &context, chosen)?;
            let rest = capacity as usize - chosen.len();
            // SAFETY: the ids fit: `CheckedPolicy` rejects more of them than there are
            // candidates, and `capacity` is at least that.
            ids.copy_from_nonoverlapping(chosen.as_ptr(), chosen.len());
            (0..rest).for_each(|i| ids.add(chosen.len() + i).write(KVT_SPARSE_NO_ID));
            out_count.write(chosen.len() as u64);
            Ok(())
        })
    };
    with_rows("queries", query, select)
}

/// Selects the keys that queries are computed with. After KVT_E_TOO_SMALL, kvt_sparse_last_index
/// returns the same answer.
///
/// @param queries  [queries, query heads, key dim].
/// @param keys     All keys of the sequence with KVT_NEEDS_ALL_KEYS; otherwise may be null.
/// @param out      Set its arrays and their capacities.
/// @return KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED (no KVT_SPARSE_INDEX_* for this phase), KVT_E_STATE
///         (weights or keys are missing), KVT_E_LIMIT, KVT_E_UNAVAILABLE (not in host memory).
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
    let select = |queries: Option<&Rows<'_>>, keys: Option<&Rows<'_>>| {
        let queries = given("queries", queries)?;
        with_policy(policy, |state| {
            let (policy, index) = (&mut state.policy, &mut state.index);
            policy.index(layer, queries, keys, &context, index)?;
            write_index(&index.keys(), out)
        })
    };
    with_rows("queries", queries, |queries| with_rows("keys", keys, |keys| select(queries, keys)))
}

/// Reads the last index of the policy again.
///
/// @param out  See kvt_sparse_index.
/// @return KVT_E_TOO_SMALL.
#[capi]
pub unsafe extern "C" fn kvt_sparse_last_index(
    policy: *const kvt_sparse_t,
    out: *mut kvt_index_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    with_policy(policy, |state| write_index(&state.index.keys(), out))
}

/// Computes the attention of a prompt, or of a part of one, on the calling thread. It uses the
/// policy's index and the library's kernel, or sparse_prefill_attention of a custom policy. A
/// policy without KVT_SPARSE_INDEX_PREFILL sees all keys. For several threads use kvt_sparse_index
/// and kvt_prefill_open.
///
/// @param queries  [queries, query heads, key dim]: the last tokens of the sequence.
/// @param keys     All keys of the sequence.
/// @param values   All values; with latent attention, the first elements of the keys.
/// @param context  is_prefill must be 1.
/// @param out      Receives [queries, query heads, value dim].
/// @param lse      Receives [queries, query heads] log-sum-exps; may be null.
/// @return KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED (a policy with rows of its own), KVT_E_STATE,
///         KVT_E_LIMIT, KVT_E_UNAVAILABLE (not in host memory).
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
                with_policy(policy, |state| {
                    state.policy.attend(layer, rows, &context, out, lse, &mut state.index)
                })
            })
        })
    })
}

/// Chooses the tokens of a layer that stay, if some are to be evicted. Nothing is evicted before
/// kvt_sparse_commit_eviction; the call may be repeated. After KVT_E_TOO_SMALL,
/// kvt_sparse_last_retained returns the same answer.
///
/// @param out          Set its arrays and their capacities. Counts are 0 if all tokens stay.
/// @param out_evicted  Receives 1 if tokens are to be evicted, else 0.
/// @return KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED (no KVT_SPARSE_EVICT_* for this phase), KVT_E_STATE
///         (sums are missing), KVT_E_LIMIT.
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
    with_policy(policy, |state| {
        let (policy, retained) = (&mut state.policy, &mut state.retained);
        retained.clear();
        let evicts = policy.evict(layer, &context, retained)?;
        if !evicts {
            retained.clear();
        }
        write_retained(&retained.heads, out)?;
        out_evicted.write(u32::from(evicts));
        Ok(())
    })
}

/// Reads the last lists of kvt_sparse_plan_eviction again; none if all tokens stayed.
///
/// @param out  See kvt_sparse_plan_eviction.
/// @return KVT_E_TOO_SMALL.
#[capi]
pub unsafe extern "C" fn kvt_sparse_last_retained(
    policy: *const kvt_sparse_t,
    out: *mut kvt_token_lists_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    with_policy(policy, |state| write_retained(&state.retained.heads, out))
}

/// Confirms an eviction: only the tokens in `kept` are left in the layer.
///
/// @param kept  Some of the resident tokens: an answer of kvt_sparse_plan_eviction, of this policy
///              or another one of the sequence, to which the engine may have added tokens.
/// @return KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_sparse_commit_eviction(
    policy: *const kvt_sparse_t,
    layer: u32,
    kept: *const kvt_token_lists_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    if kept.is_null() {
        fail!(Invalid, "kept is null: pass the lists of the tokens that are left");
    }
    let kept = retained_of(kept)?;
    with_policy(policy, |state| {
        state.policy.evicted(layer, &kept)?;
        // As in kvt_sparse_truncate.
        let _ = state.charge();
        Ok(())
    })
}

// Custom policies: callbacks of the engine.

/// Called before a block of a layer is moved away. `block` is its id as a candidate, `first` the
/// position of its first token; `keys` has its `keys->view.tokens` valid tokens.
pub type kvt_on_prefill_offload_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        block: u32,
        layer: u32,
        first: u32,
        keys: *const kvt_rows_t,
    ) -> kvt_status_t,
>;

/// Called when a block that was written token by token is complete. `keys` has an entry for each
/// layer, `keys->struct_size` bytes apart.
pub type kvt_on_decode_offload_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        block: u32,
        first: u32,
        keys: *const kvt_rows_t,
        layers: u32,
    ) -> kvt_status_t,
>;

/// Selects blocks for `query`. Writes at most candidate_count ids to `ids`, in any order, each a
/// candidate and each once, and their number to `out_count`. `query` may be null.
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

/// Selects the keys that queries are computed with. Points the arrays of `out` at memory of its
/// own, valid until the next call, and sets their counts; counts left at 0 = all keys. `keys` may
/// be null.
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

/// Takes the attention that each of `tokens` resident tokens received from `queries` queries:
/// `count` sums. See kvt_sparse_observe.
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

/// Chooses the tokens of a layer that stay. Fills `out` as kvt_sparse_index_fn does; counts left at
/// 0 = all tokens stay.
pub type kvt_sparse_evict_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        layer: u32,
        context: *const kvt_sparse_context_t,
        out: *mut kvt_token_lists_t,
    ) -> kvt_status_t,
>;

/// Truncates the sequence to `tokens` tokens; 0 = a new sequence starts.
pub type kvt_sparse_truncate_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, tokens: u32) -> kvt_status_t>;

/// Computes the attention of a prompt for kvt_sparse_prefill_attention. Writes [queries, query
/// heads, value dim] to `out`, and [queries, query heads] to `lse` unless it is null.
/// KVT_E_UNSUPPORTED = the library's kernel computes it, by the index.
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

/// Called after an eviction: only the tokens in `kept` are left in the layer.
pub type kvt_sparse_evicted_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        layer: u32,
        kept: *const kvt_token_lists_t,
    ) -> kvt_status_t,
>;

/// Creates the user data of a copy, which continues from the same state with the same callbacks.
pub type kvt_sparse_fork_fn = Option<
    unsafe extern "C" fn(user_data: *mut c_void, copy_out: *mut *mut c_void) -> kvt_status_t,
>;

/// A custom policy: callbacks of the engine. They may be null unless the traits require them. They
/// run on the thread that calls the policy or the offload, one at a time, and must not unwind.
/// Arguments are borrowed for the call. A status other than KVT_OK fails the engine's call with
/// that status. From a callback, calls on the same policy return KVT_E_BUSY, on the same offload
/// KVT_E_REENTRANT.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_sparse_custom_t {
    pub struct_size: u64,
    /// caps is 1 to 63.
    pub traits: *const kvt_sparse_traits_t,
    pub on_prefill_offload: kvt_on_prefill_offload_fn,
    /// Null = on_prefill_offload is called for each layer.
    pub on_decode_offload: kvt_on_decode_offload_fn,
    /// Required for KVT_SPARSE_LOAD_* and KVT_SPARSE_SELECTS.
    pub select_blocks: kvt_select_blocks_fn,
    /// Required for KVT_SPARSE_INDEX_*; for KVT_SPARSE_INDEX_PREFILL, sparse_prefill_attention
    /// alone is enough.
    pub index: kvt_sparse_index_fn,
    pub sparse_prefill_attention: kvt_sparse_attention_fn,
    /// For KVT_NEEDS_COLUMN_SUMS.
    pub observe: kvt_sparse_observe_fn,
    /// Required for KVT_SPARSE_EVICT_*.
    pub evict: kvt_sparse_evict_fn,
    pub evicted: kvt_sparse_evicted_fn,
    pub truncate: kvt_sparse_truncate_fn,
    /// Null = the policy cannot be forked.
    pub fork: kvt_sparse_fork_fn,
    /// Passed to all callbacks. The library owns it once the policy or the offload is open.
    pub user_data: *mut c_void,
    /// Destroys user_data, and that of each copy; may be null.
    pub destroy: kvt_destroy_fn,
}

/// The callbacks of a custom policy.
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

/// Reads the traits of a custom policy.
fn traits_of(given: &kvt_sparse_traits_t, shape: &Shape, seals_together: bool) -> Result<Traits> {
    known_flags(given.flags, KVT_SPARSE_RAGGED | KVT_SPARSE_SELECTS | KVT_SPARSE_ROTATES)?;
    if given.caps == 0 || given.caps >= 64 {
        fail!(Invalid, "traits.caps is {}, it must be 1 to 63", given.caps);
    }
    if given.needs >= 256 {
        fail!(Invalid, "traits.needs is {}, it must be 0 to 255", given.needs);
    }
    let layers = shape.layers;
    if given.dense_layers > layers {
        fail!(Invalid, "traits.dense_layers is {}, it must be 0 to {layers}", given.dense_layers);
    }
    if given.ahead >= layers {
        fail!(Invalid, "traits.ahead is {}, it must be below {layers}, the layers", given.ahead);
    }
    let own = (given.own_query_heads, given.own_key_heads, given.own_dim);
    let rows = match own {
        (0, 0, 0) => None,
        (query_heads, key_heads, dim) if query_heads > 0 && key_heads > 0 && dim > 0 => {
            Some(OwnRows { query_heads, key_heads, dim })
        }
        (query_heads, key_heads, dim) => fail!(
            Invalid,
            "traits.own_query_heads is {query_heads}, own_key_heads {key_heads}, own_dim {dim}: \
             set all of them, or none"
        ),
    };
    Ok(Traits {
        caps: given.caps,
        needs: given.needs,
        scope: match given.scope {
            KVT_SCOPE_QUERY_HEAD => Scope::QueryHead,
            KVT_SCOPE_KEY_HEAD => Scope::KeyHead,
            KVT_SCOPE_LAYER => Scope::Layer,
            other => fail!(Invalid, "traits.scope is {other}, it must be one of KVT_SCOPE_*"),
        },
        granularity: match given.granularity {
            KVT_GRANULARITY_TOKEN => Granularity::Token,
            KVT_GRANULARITY_BLOCK => Granularity::Block,
            other => {
                fail!(Invalid, "traits.granularity is {other}, use one of KVT_GRANULARITY_*")
            }
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

/// Checks that each capability has its callback.
fn check_table(traits: &Traits, table: &Table) -> Result<()> {
    let required = [
        (caps::LOAD_PREFILL | caps::LOAD_DECODE, table.select_blocks.is_some(), "select_blocks"),
        (caps::INDEX_DECODE, table.index.is_some(), "index"),
        (
            caps::INDEX_PREFILL,
            table.index.is_some() || table.attention.is_some(),
            "index or sparse_prefill_attention",
        ),
        (caps::EVICT_PREFILL | caps::EVICT_DECODE, table.evict.is_some(), "evict"),
    ];
    for (caps, is_set, callback) in required {
        let caps = traits.caps & caps;
        if caps != 0 && !is_set {
            fail!(
                Invalid,
                "traits.caps has {caps}, which requires the callback {callback}: set it"
            );
        }
    }
    if traits.requires_block_selection && table.select_blocks.is_none() {
        fail!(
            Invalid,
            "traits.flags has KVT_SPARSE_SELECTS, which requires the callback select_blocks: set it"
        );
    }
    Ok(())
}

/// A custom policy and its callbacks. [`Foreign::keep`] takes the user data over.
pub(crate) type CustomPolicy = (Box<dyn Sparse>, Arc<Foreign<Table>>);

/// Makes a policy of the caller's callbacks.
///
/// # Safety
/// `given` is null or valid for the size it states; the functions may be called with the user
/// data, by any thread, until destroy.
pub(crate) unsafe fn made(
    given: *const kvt_sparse_custom_t,
    shape: &Shape,
) -> Result<CustomPolicy> {
    // SAFETY: the caller's promise.
    let (given, traits) = unsafe {
        let given = read(given)?;
        if given.traits.is_null() {
            fail!(Invalid, "traits of the custom policy is null: point it to its traits");
        }
        let seals_together = given.on_decode_offload.is_some();
        (given, traits_of(&read(given.traits)?, shape, seals_together)?)
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
    Ok((Box::new(CallbackPolicy::new(foreign.clone(), traits, shape)), foreign))
}

// Calls of the callbacks.

/// Converts rows to the C struct, which borrows from the same memory.
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

/// A pointer to a value, or null.
fn nullable<T>(value: Option<&T>) -> *const T {
    value.map_or(std::ptr::null(), |value| value)
}

/// The result of a callback, from its status. An unknown status is `Invalid`.
fn result(callback: &str, status: kvt_status_t) -> Result<()> {
    match Status::from_code(status) {
        Some(Status::Ok) => Ok(()),
        known => {
            let text = format!("callback {callback} of the custom policy returned {status}");
            Err(Error::new(known.unwrap_or(Status::Invalid), text))
        }
    }
}

/// Whether a callback computed the result. KVT_E_UNSUPPORTED = the library is to compute it.
fn computed(callback: &str, status: kvt_status_t) -> Result<bool> {
    if status == Status::Unsupported.code() {
        return Ok(false);
    }
    result(callback, status).map(|()| true)
}

/// A policy that calls back into the engine.
pub(crate) struct CallbackPolicy {
    foreign: Arc<Foreign<Table>>,
    traits: Traits,
    layers: u32,
    heads: Heads,
    stats: Stats,
}

impl CallbackPolicy {
    pub(crate) fn new(
        foreign: Arc<Foreign<Table>>,
        traits: Traits,
        shape: &Shape,
    ) -> CallbackPolicy {
        let heads = Heads { queries: shape.query_heads, keys: shape.key_heads };
        CallbackPolicy { foreign, traits, layers: shape.layers, heads, stats: Stats::default() }
    }

    /// Calls `body` with the callbacks and the user data.
    fn call<R>(&self, body: impl FnOnce(&Table, *mut c_void) -> R) -> R {
        self.foreign.call(|table, user_data| body(&table, user_data))
    }
}

impl Sparse for CallbackPolicy {
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
                    nullable(query.as_ref()),
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
            let most = candidates.len();
            fail!(Invalid, "callback select_blocks set out_count to {count}, the limit is {most}");
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
                let keys = nullable(keys.as_ref());
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
        // SAFETY: the callback guarantees that its arrays stay valid until its next call.
        let keys = unsafe { keys_of(&raw const answer)? };
        keys.check(self.heads, context.first_query, tokens)
            .map_err(|error| error.within("index of the custom policy"))?;
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
        // SAFETY: the callback guarantees that its arrays stay valid until its next call.
        *out = unsafe { retained_of(&raw const answer)? };
        Ok(true)
    }

    fn evicted(&mut self, layer: u32, kept: &RetainedTokens) -> Result<()> {
        let kept = retained_for_c(kept);
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
            log::warn!("a custom sparse policy failed to reset and may hold stale state: {error}");
        }
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        let mut copy = std::ptr::null_mut();
        let table = self.call(|table, user_data| {
            let Some(fork) = table.fork else {
                fail!(
                    Unsupported,
                    "the custom policy has no callback fork: set it to fork policies"
                );
            };
            // SAFETY: function and data came together; the output is local.
            result("fork", unsafe { fork(user_data, &raw mut copy) }).map(|()| *table)
        })?;
        let foreign = Arc::new(Foreign::new(table, copy, table.destroy));
        foreign.keep();
        let stats = Stats::default();
        let (traits, layers, heads) = (self.traits, self.layers, self.heads);
        Ok(Box::new(CallbackPolicy { foreign, traits, layers, heads, stats }))
    }
}

/// Checks that chosen ids are candidates, each once. `chosen` is sorted.
fn check_chosen(candidates: &[u32], chosen: &[u32]) -> Result<()> {
    let mut copy = Vec::new();
    let mut sorted = candidates;
    if !candidates.is_sorted() {
        copy.try_reserve_exact(candidates.len()).map_err(|_| Status::NoMem)?;
        copy.extend_from_slice(candidates);
        copy.sort_unstable();
        sorted = &copy;
    }
    if !chosen.is_sorted_by(|a, b| a < b) {
        fail!(Invalid, "callback select_blocks chose a block twice: write each id once");
    }
    if let Some(id) = chosen.iter().find(|id| sorted.binary_search(id).is_err()) {
        fail!(Invalid, "callback select_blocks chose block {id}, which is not a candidate");
    }
    Ok(())
}

// Placement in buffers, and memory of kernels.

/// Kernel of kvt_prefill_open, of kvt_decode_open, of kvt_column_sums_open.
pub type kvt_attention_kernel_t = u32;

pub const KVT_KERNEL_PREFILL: kvt_attention_kernel_t = 0;
pub const KVT_KERNEL_DECODE: kvt_attention_kernel_t = 1;
pub const KVT_KERNEL_SUMS: kvt_attention_kernel_t = 2;

/// Most blocks in a buffer.
const MAX_BLOCKS: usize = 1 << 28;
/// Most sums in one call of kvt_column_sums_place.
const MAX_SUMS: usize = 1 << 40;

/// Tokens in a buffer, in the order of their positions: full blocks of a sequence, then its tail.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_block_placement_t {
    pub struct_size: u64,
    /// Blocks, ascending: block n starts at position n * block_tokens.
    pub blocks: *const u32,
    /// At most 2^28.
    pub block_count: u64,
    /// Tokens of a block, at least 1.
    pub block_tokens: u32,
    /// Position of the first token of the tail, after all blocks.
    pub tail_first: u32,
    /// Tokens of the tail.
    pub tail_tokens: u32,
    pub reserved: u32,
}

/// Resident tokens of a layer, in the order in which kvt_sparse_observe counts them.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_resident_tokens_t {
    pub struct_size: u64,
    /// Attention shape of the model.
    pub attention: *const kvt_attention_t,
    /// Lists of the last kvt_sparse_commit_eviction; null = nothing was evicted.
    pub kept: *const kvt_token_lists_t,
    /// Tokens from this position on came after it and are all resident; 0 without `kept`.
    pub since: u32,
    /// Tokens of the sequence.
    pub tokens: u32,
}

/// Largest sizes of problems, independent of each other. Each is at least 1.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_kernel_limits_t {
    pub struct_size: u64,
    pub flags: kvt_decode_flags_t,
    /// Queries of a problem, at most `tokens`.
    pub queries: u32,
    /// Keys of a problem, at most 2^30.
    pub keys: u32,
    /// Positions of a sequence, at most 2^30.
    pub tokens: u32,
    pub query_heads: u32,
    /// Elements of a query or key head, at most 2,048.
    pub key_dim: u32,
    /// Elements of a value head, at most 2,048.
    pub value_dim: u32,
}

/// The placement of a caller.
///
/// # Safety
/// `given` is null or valid for the size it states; its blocks can be read, and no thread writes
/// them, as long as the result lives.
unsafe fn placement_of<'a>(given: *const kvt_block_placement_t) -> Result<BlockPlacement<'a>> {
    if given.is_null() {
        fail!(Invalid, "placement is null: describe the tokens of the buffer");
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

/// The head counts of a model.
///
/// # Safety
/// `given` is null or valid for the size it states.
unsafe fn heads_of(given: *const kvt_attention_t) -> Result<Heads> {
    // SAFETY: the caller's promise.
    let shape = unsafe { shape_of(given)? };
    Ok(Heads { queries: shape.query_heads, keys: shape.key_heads })
}

/// Translates an index of positions into an index of the rows of a buffer. Tokens that are not in
/// the buffer are left out. No token may be missing between the first query and the last token of
/// the buffer.
///
/// @param index            Index of positions; null = all keys.
/// @param first            Position of the first query.
/// @param count            Number of queries.
/// @param out              Set its arrays and their capacities.
/// @param out_first_query  Receives first_query of a problem over these rows, whose first_key is 0.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT.
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
    let (heads, placement, keys) =
        (heads_of(attention)?, placement_of(placement)?, keys_of(index)?);
    let mut rows = Index::default();
    let first_query = placement.index(&keys, heads, (first, count), &mut rows)?;
    write_index(&rows.keys(), out)?;
    out_first_query.write(first_query);
    Ok(())
}

/// Adds sums of attention over the rows of a buffer to sums over the resident tokens, as
/// kvt_sparse_observe takes them. Tokens that are not in the buffer get nothing.
///
/// @param select       Index of rows of the decode whose kvt_decode_sums are passed; null = `sums`
///                     are of all rows.
/// @param first_query  With `select`: row of the first query.
/// @param queries      With `select`: number of queries.
/// @param sums         [query heads, rows]; [rows] for all heads if they share one list; with
///                     `select` [query heads, sum_keys].
/// @param out          [query heads, tokens], or [tokens]; undefined after a failure.
/// @return KVT_E_LIMIT.
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
        fail!(Invalid, "resident is null: describe the resident tokens");
    }
    let given = read(resident)?;
    let heads = heads_of(given.attention)?;
    let kept = if given.kept.is_null() { None } else { Some(retained_of(given.kept)?) };
    let resident =
        ResidentTokens { retained: kept.as_ref(), from: given.since, tokens: given.tokens, heads };
    let placement = placement_of(placement)?;
    let (sums, out) = (numbers(sums, sum_count, MAX_SUMS)?, numbers_mut(out, out_count)?);
    if select.is_null() {
        let mut positions = Vec::new();
        positions_of(&placement, &mut positions)?;
        return resident.add(sums, &positions, out);
    }
    let keys = keys_of(select)?;
    resident.add_selected(sums, (&keys, first_query, queries), &placement, out)
}

/// Computes how much memory suffices for every problem within some limits, to be allocated once.
///
/// @param kernel       KVT_KERNEL_*.
/// @param out_memory   Receives the floats of `memory` of kvt_decode_open, 0 for other kernels; may
///                     be null.
/// @param out_scratch  Receives the floats of scratch of each thread; may be null.
/// @return KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_kernel_workspace(
    kernel: kvt_attention_kernel_t,
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
        other => fail!(Invalid, "kernel is {other}, it must be one of KVT_KERNEL_*"),
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
    fn a_policy_that_panicked_can_be_inspected_and_closed_only() {
        let policy = CheckedPolicy::open("full", &SHAPE).expect("sound");
        let state = PolicyState::new(policy, None).expect("free");
        let mut handle = insert(SparseObject::new(state)).expect("room");
        let caught = catch(|| with_policy(handle, |_| -> Result<()> { panic!("on purpose") }));
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
    fn a_nested_call_is_busy_and_leaves_the_policy_usable() {
        let policy = CheckedPolicy::open("full", &SHAPE).expect("sound");
        let state = PolicyState::new(policy, None).expect("free");
        let mut handle = insert(SparseObject::new(state)).expect("room");
        let inner = with_policy(handle, |_| Ok(with_policy(handle, |_| Ok(())))).expect("alone");
        assert_eq!(inner.expect_err("inside").status(), Status::Busy);
        with_policy(handle, |_| Ok(())).expect("alone again");
        // SAFETY: a valid pointer.
        assert_eq!(unsafe { kvt_sparse_close(&raw mut handle) }, Status::Ok.code());
    }
}
