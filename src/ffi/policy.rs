//! Eviction policies, over a table of the library or of the engine.
//!
//! A store uses policies by their names in its spec. This header gives the same policies to an
//! engine that keeps blocks itself: the policy is notified of lookups, inserts and references, and
//! chooses victims. The policy "custom" evicts by a score function of the engine
//! (kvt_policy_custom_t).
//!
//! Life cycle: kvt_policy_open, kvt_policy_record or kvt_policy_lookup and _insert,
//! kvt_policy_evict, kvt_policy_close. Times are the engine's, in nanoseconds, and never decrease.
//!
//! ```c
//! kvt_policy_opts_t opts = KVT_POLICY_OPTS_INIT;
//! opts.spec = "horizon", opts.spec_bytes = KVT_NUL_TERMINATED;
//! opts.max_objects = 1 << 20, opts.capacity_units = 50000; /* blocks of the engine's cache */
//! if (kvt_policy_open(&opts, &policy, &err) != KVT_OK) return fail(err);
//! /* A request used blocks 11, 12 and 13, of one unit each; 12 continues 11, and 13 continues 12. */
//! const uint64_t ids[] = {11, 12, 13}, units[] = {1, 1, 1};
//! if (kvt_policy_record(policy, now_ns, NULL, ids, units, 3, NULL, &err) != KVT_OK) return fail(err);
//! /* Room for two blocks is needed. */
//! kvt_policy_victim_t victims[2];
//! kvt_policy_outcome_t outcome = KVT_POLICY_OUTCOME_INIT;
//! if (kvt_policy_evict(policy, now_ns, 2, victims, 2, sizeof victims[0], &outcome, &err) != KVT_OK)
//!     return fail(err);
//! for (uint64_t i = 0; i < outcome.victims; i++) use(&victims[i].id);
//! ```

use std::ffi::{c_char, c_void};

use crate::base::callback::Foreign;
use crate::base::clock::Clock;
use crate::base::spec::nearest;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, Mutex};
use crate::fail;
use crate::ffi::abi::{
    Plain, Strided, capi, check_out, enter, foreign, free, insert, inspect, known_flags,
    no_reserved, noun, numbers, put, read, require, text, write,
};
use crate::ffi::base::{KVT_OK, kvt_destroy_fn, kvt_error_t, kvt_status_t};
use crate::meta::cost::Cost;
use crate::meta::objects::{Facts, MAX_UNITS};
use crate::meta::sessions::Stop;
use crate::policy::advice::Rules;
use crate::policy::batch::{Room, SelectOptions, Selection};
use crate::policy::columns::{Columns, MAX_ROWS};
use crate::policy::custom::{ScoredEviction, Scorer};
use crate::policy::evict::{Outcome, Victim};
use crate::policy::evictor::{
    DEFAULT_OBJECTS, Evictor, MAX_BATCH, MAX_OBJECTS, NewObject, Options, RequestContext,
};
use crate::policy::log::{Entry, MAX_ENTRIES};
use crate::policy::metrics::session_fairness;
use crate::policy::registry::ENTRIES;
use crate::policy::{Hint, custom};

// Policies.

/// An eviction policy with its table of objects. Needs no runtime.
pub struct kvt_policy_t(());

/// Flags of a policy.
pub type kvt_policy_flags_t = u64;

/// The engine can use objects behind a missing one, so objects are evicted in any order. Otherwise
/// children are evicted before their parents.
pub const KVT_POLICY_HOLES: kvt_policy_flags_t = 1;
/// `remember` = 0 means none, not the default.
pub const KVT_POLICY_ZERO_REMEMBER: kvt_policy_flags_t = 2;
/// `alpha` and `beta` are taken as they are: 0 means 0, not the default.
pub const KVT_POLICY_COST: kvt_policy_flags_t = 4;

/// Scores candidates for the policy "custom": writes one number per row to `out_scores`. The lowest
/// score is evicted first; NaN is an error. Any status but KVT_OK fails the calling function with
/// that status, without effect. Columns and scores are borrowed for the call. The function must not
/// unwind.
///
/// An eviction skips objects that were used, referenced or removed meanwhile. If too little is free
/// then, it scores again, at most 4 times in all; an error in a repetition is a shortfall.
///
/// Threading: called on the thread that evicts or selects, under no lock, so on several threads at
/// once. It may use the policy.
pub type kvt_policy_score_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        columns: *const kvt_policy_columns_t,
        now_ns: i64,
        out_scores: *mut f64,
    ) -> kvt_status_t,
>;

/// Predicts when a sequence is used next or ends: seconds from now, with a confidence of 0 to 1.
/// Returns 1, or 0 if unknown; values out of range count as unknown. Lengths are in tokens,
/// 0 = unknown. It is called
///
/// - after kvt_policy_lookup and kvt_policy_record with a session, which is `sequence`: the
///   prediction acts as a hint;
/// - in kvt_policy_select for each row without a lifetime: `sequence` is the id.
///
/// Threading and unwinding: as for kvt_policy_score_fn.
pub type kvt_policy_predict_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        sequence: u64,
        length: u64,
        max_length: u64,
        out_seconds: *mut f64,
        out_confidence: *mut f64,
    ) -> u32,
>;

/// Callback table of the policy "custom".
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_custom_t {
    pub struct_size: u64,
    pub score: kvt_policy_score_fn,
    /// Passed to score; owned by the policy once it is open.
    pub user_data: *mut c_void,
    /// Releases user_data; may be null.
    pub destroy: kvt_destroy_fn,
}

/// The engine's predictor of next uses and lifetimes.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_predictor_t {
    pub struct_size: u64,
    pub predict: kvt_policy_predict_fn,
    /// Passed to predict; owned by the policy once it is open.
    pub user_data: *mut c_void,
    /// Releases user_data; may be null.
    pub destroy: kvt_destroy_fn,
}

/// Options of kvt_policy_open.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_opts_t {
    pub struct_size: u64,
    pub flags: kvt_policy_flags_t,
    /// Such as "arc" or "qos(inner=s3fifo)"; null = "lru".
    pub spec: *const c_char,
    pub spec_bytes: u64,
    /// Most objects in the table, up to 2^28; 0 = 1048576.
    pub max_objects: u64,
    /// Capacity of the cache in units; 0 = unknown.
    pub capacity_units: u64,
    /// Evictions that the log keeps, up to 2^20; 0 = none.
    pub log_entries: u64,
    /// Evicted ids that are remembered for the re-prefill rate, up to 2^28; 0 = 1048576.
    pub remember: u64,
    /// 0 to 1e12; 0 = 1 / 53800. Recomputing n tokens after l tokens of context costs n * beta +
    /// alpha * (n * l + n * n / 2). The defaults describe a model of the 70B class.
    pub alpha: f64,
    /// 0 to 1e12; 0 = 1. See alpha.
    pub beta: f64,
    /// Score function. The spec "custom" needs it; else it may be null.
    pub custom: *const kvt_policy_custom_t,
    /// May be null.
    pub predictor: *const kvt_policy_predictor_t,
}

/// A policy that can be opened. Texts are not NUL-terminated and live as long as the library.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_info_t {
    pub struct_size: u64,
    /// Name in specs.
    pub name: *const c_char,
    pub name_bytes: u64,
    /// Description in one line.
    pub about: *const c_char,
    pub about_bytes: u64,
}

type Score =
    unsafe extern "C" fn(*mut c_void, *const kvt_policy_columns_t, i64, *mut f64) -> kvt_status_t;
type Predict = unsafe extern "C" fn(*mut c_void, u64, u64, u64, *mut f64, *mut f64) -> u32;

/// The state under the policy's lock: the evictor, and buffers that calls reuse.
pub(crate) struct State {
    pub(crate) evictor: Evictor,
    pub(crate) victims: Vec<Victim>,
    pub(crate) new_objects: Vec<NewObject>,
    pub(crate) selection: Selection,
}

pub(crate) struct PolicyNoun {
    pub(crate) state: Mutex<State>,
    pub(crate) score: Option<Arc<Foreign<Score>>>,
    pub(crate) predict: Option<Arc<Foreign<Predict>>>,
}

noun!(PolicyNoun, kvt_policy_t, 8, "policy");

impl PolicyNoun {
    /// The engine's prediction for a sequence: ns from now, and the confidence.
    pub(crate) fn predict(&self, sequence: u64, length: u64, max: u64) -> Option<(i64, f32)> {
        let predict = self.predict.as_ref()?;
        let (mut seconds, mut confidence) = (f64::NAN, f64::NAN);
        let known = predict.call(|function, user_data| {
            // SAFETY: function and data came together from the caller; the outputs are local.
            unsafe { function(user_data, sequence, length, max, &mut seconds, &mut confidence) }
        });
        let valid = known != 0 && seconds >= 0.0 && (0.0..=1.0).contains(&confidence);
        // The cast saturates.
        valid.then_some(((seconds * 1e9) as i64, confidence as f32))
    }

    /// Fails if the spec needs a score function and there is none.
    fn require_score(&self, spec: &str) -> Result<()> {
        let name = spec.split('(').next().unwrap_or(spec).trim();
        if name == custom::NAME && self.score.is_none() {
            fail!(
                Invalid,
                "the policy '{name}' needs a score function: set custom in kvt_policy_opts_t"
            );
        }
        Ok(())
    }
}

/// A part of the cost model; 0 = the default, unless it is `explicit`.
fn cost_part(value: f64, default: f64, explicit: bool, name: &str) -> Result<f64> {
    match value {
        0.0 if !explicit => Ok(default),
        _ if (0.0..=1e12).contains(&value) => Ok(value),
        _ => fail!(Invalid, "{name} is {value}, allowed is 0 to 1e12"),
    }
}

fn options(given: &kvt_policy_opts_t) -> Result<Options> {
    known_flags(given.flags, KVT_POLICY_HOLES | KVT_POLICY_ZERO_REMEMBER | KVT_POLICY_COST)?;
    let size = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let or = |n: u64, default: usize, zero: bool| if n == 0 && !zero { default } else { size(n) };
    let explicit = given.flags & KVT_POLICY_COST != 0;
    let defaults = Cost::default();
    if given.log_entries > MAX_ENTRIES as u64 {
        fail!(Limit, "log_entries is {}, at most {MAX_ENTRIES} is allowed", given.log_entries);
    }
    Ok(Options {
        max_objects: or(given.max_objects, DEFAULT_OBJECTS, false),
        capacity_units: given.capacity_units,
        holes: given.flags & KVT_POLICY_HOLES != 0,
        log_entries: size(given.log_entries),
        remember: or(given.remember, DEFAULT_OBJECTS, given.flags & KVT_POLICY_ZERO_REMEMBER != 0),
        cost: Cost {
            alpha: cost_part(given.alpha, defaults.alpha, explicit, "alpha")?,
            beta: cost_part(given.beta, defaults.beta, explicit, "beta")?,
        },
    })
}

/// Opens a policy.
///
/// @return KVT_E_SPEC, KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_policy_open(
    opts: *const kvt_policy_opts_t,
    out: *mut *mut kvt_policy_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = read(opts)?;
    let (given, custom, predictor) = (given, read(given.custom)?, read(given.predictor)?);
    crate::base::fork::check()?;
    crate::base::fork::arm()?;
    let options = options(&given)?;
    let spec = match text("spec", given.spec, given.spec_bytes)? {
        "" if given.spec.is_null() => "lru",
        spec => spec,
    };
    let score = foreign(custom.score, custom.user_data, custom.destroy)?;
    let predict = foreign(predictor.predict, predictor.user_data, predictor.destroy)?;
    let evictor = Evictor::open(spec, &options)?;
    let state = State {
        evictor,
        victims: Vec::new(),
        new_objects: Vec::new(),
        selection: Selection::default(),
    };
    let object =
        PolicyNoun { state: Mutex::new(state), score: score.clone(), predict: predict.clone() };
    object.require_score(spec)?;
    let handle = insert(object)?;
    score.iter().for_each(|f| f.keep());
    predict.iter().for_each(|f| f.keep());
    out.write(handle);
    Ok(())
}

/// Closes a policy. Calls in progress still finish; then the callbacks' user data is released.
#[capi]
pub unsafe extern "C" fn kvt_policy_close(policy: *mut *mut kvt_policy_t) -> kvt_status_t {
    free(policy, |_| Ok(()))
}

/// Switches to another policy. Objects keep their last use, number of uses, references, pins and
/// sessions. Learned state passes only to a policy of the same kind. The call sorts all objects;
/// other calls on the policy wait meanwhile.
///
/// @param spec  As in kvt_policy_opts_t; "custom" needs a score function given at the open.
/// @return KVT_E_SPEC, KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_policy_switch(
    policy: *const kvt_policy_t,
    spec: *const c_char,
    spec_bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let spec = text("spec", spec, spec_bytes)?;
    let policy = enter(policy)?;
    policy.require_score(spec)?;
    policy.state.lock().evictor.switch(spec)
}

/// Sets the capacity. Evicts nothing.
///
/// @param capacity_units  0 = unknown.
#[capi]
pub unsafe extern "C" fn kvt_policy_set_capacity(
    policy: *const kvt_policy_t,
    capacity_units: u64,
) -> kvt_status_t {
    let policy = enter(policy)?;
    policy.state.lock().evictor.set_capacity(capacity_units);
    Ok(())
}

/// Counts the policies that can be opened.
#[capi]
pub unsafe extern "C" fn kvt_policy_count(out_count: *mut u64) -> kvt_status_t {
    require(out_count)?;
    out_count.write(ENTRIES.len() as u64);
    Ok(())
}

/// Describes a policy that can be opened.
///
/// @param index  0 to kvt_policy_count - 1; kvt_policy_log_entry_t.policy is such an index.
/// @return KVT_E_NOT_FOUND.
#[capi]
pub unsafe extern "C" fn kvt_policy_info(index: u64, out: *mut kvt_policy_info_t) -> kvt_status_t {
    check_out(out)?;
    let found = usize::try_from(index).ok().and_then(|index| ENTRIES.get(index));
    let entry = found.ok_or_else(|| {
        let text = format!("there is no policy {index}: the last one is {}", ENTRIES.len() - 1);
        Error::new(Status::NotFound, text)
    })?;
    write(
        out,
        &kvt_policy_info_t {
            struct_size: 0,
            name: entry.name.as_ptr().cast(),
            name_bytes: entry.name.len() as u64,
            about: entry.about.as_ptr().cast(),
            about_bytes: entry.about.len() as u64,
        },
    );
    Ok(())
}

// Lookups, uses, inserts.

/// Flags of kvt_policy_context_t.
pub type kvt_context_flags_t = u64;

/// kvt_policy_context_t.session is set.
pub const KVT_CONTEXT_SESSION: kvt_context_flags_t = 1;
/// kvt_policy_context_t.priority is set, also if it is 0. Needs KVT_CONTEXT_SESSION.
pub const KVT_CONTEXT_PRIORITY: kvt_context_flags_t = 2;
/// Flags of kvt_policy_object_t.
pub type kvt_object_flags_t = u64;

/// kvt_policy_object_t.parent is set.
pub const KVT_OBJECT_HAS_PARENT: kvt_object_flags_t = 1;
/// Flags of kvt_policy_hint_t.
pub type kvt_hint_flags_t = u64;

/// The objects will not be used again.
pub const KVT_HINT_DONE: kvt_hint_flags_t = 1;
/// `confidence` = 0 means 0, not the default 1.
pub const KVT_HINT_ZERO_CONFIDENCE: kvt_hint_flags_t = 2;

/// Why a sequence stopped. TOOL_USE: it waits for a tool and continues soon. END_TURN: a person
/// reads the answer. LENGTH: it reached the limit of tokens.
pub type kvt_stop_t = u32;

pub const KVT_STOP_UNKNOWN: kvt_stop_t = 0;
pub const KVT_STOP_TOOL_USE: kvt_stop_t = 1;
pub const KVT_STOP_END_TURN: kvt_stop_t = 2;
pub const KVT_STOP_LENGTH: kvt_stop_t = 3;
pub const KVT_STOP_CANCELLED: kvt_stop_t = 4;

/// The request that a call belongs to. Every field is optional.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_context_t {
    pub struct_size: u64,
    pub flags: kvt_context_flags_t,
    /// The caller's id of a sequence; needs KVT_CONTEXT_SESSION.
    pub session: u64,
    /// Tenant of the session; must be 0 without KVT_CONTEXT_SESSION.
    pub tenant: u32,
    /// Class of the session, 0 to 255; 0 is evicted first. Without KVT_CONTEXT_PRIORITY the class
    /// stays as it is, at first 1.
    pub priority: u32,
    /// Tokens of the whole request; 0 = tokens_each for each id.
    pub length: u32,
    /// Most tokens that the sequence can have; 0 = unknown.
    pub max_length: u32,
    /// Tokens of each object of the path, of which the last may have fewer; 0 = 1.
    pub tokens_each: u32,
    pub reserved: u32,
}

/// An object to insert.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_object_t {
    /// The caller's id.
    pub id: u64,
    /// Id of the object that this one continues; needs KVT_OBJECT_HAS_PARENT. It may be inserted
    /// later.
    pub parent: u64,
    /// Size, 1 to 2^32 - 1.
    pub units: u64,
    pub flags: kvt_object_flags_t,
    /// Expected time of the next use, by the clock of now_ns; 0 = unknown.
    pub next_use_ns: i64,
    /// Recompute cost; 0 = computed from context and tokens.
    pub cost: f64,
    /// Tokens before the object.
    pub context: u32,
    /// Tokens in the object.
    pub tokens: u32,
    /// Layer of a cell, up to 65535.
    pub layer: u32,
    /// Layers of the model, up to 65535; 0 = the object has all layers.
    pub layers: u32,
    /// Index of the chunk in its sequence.
    pub chunk: u32,
    /// Chunks of that sequence.
    pub chunks: u32,
}

/// Expectations of the engine about future uses of objects.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_hint_t {
    pub struct_size: u64,
    pub flags: kvt_hint_flags_t,
    /// Expected time of the next use, by the clock of now_ns; 0 = unknown.
    pub next_use_ns: i64,
    /// Confidence of next_use_ns, 0 to 1; 0 = 1, unless KVT_HINT_ZERO_CONFIDENCE is set.
    pub confidence: f64,
    /// Why the request that used the objects stopped.
    pub stop: kvt_stop_t,
    pub reserved: u32,
}

/// # Safety
/// As [`numbers`].
pub(crate) unsafe fn ids<'a>(data: *const u64, count: u64) -> Result<&'a [u64]> {
    // SAFETY: the caller's promise.
    unsafe { numbers(data, count, MAX_BATCH) }
}

/// # Safety
/// `context` is null or valid for the size it states.
pub(crate) unsafe fn context(context: *const kvt_policy_context_t) -> Result<RequestContext> {
    // SAFETY: the caller's promise.
    let given = unsafe { read(context)? };
    known_flags(given.flags, KVT_CONTEXT_SESSION | KVT_CONTEXT_PRIORITY)?;
    no_reserved(given.reserved)?;
    let Ok(priority) = u8::try_from(given.priority) else {
        fail!(Invalid, "priority is {}, allowed is 0 to 255", given.priority);
    };
    if given.flags & KVT_CONTEXT_SESSION == 0 && given.tenant != 0 {
        fail!(
            Invalid,
            "tenant {} is given without a session: set session and KVT_CONTEXT_SESSION",
            given.tenant
        );
    }
    if given.flags & (KVT_CONTEXT_SESSION | KVT_CONTEXT_PRIORITY) == KVT_CONTEXT_PRIORITY {
        fail!(
            Invalid,
            "priority {priority} is given without a session: set session and KVT_CONTEXT_SESSION"
        );
    }
    Ok(RequestContext {
        session: (given.flags & KVT_CONTEXT_SESSION != 0).then_some(given.session),
        tenant: given.tenant,
        priority: (given.flags & KVT_CONTEXT_PRIORITY != 0).then_some(priority),
        length: given.length,
        max_length: given.max_length,
        tokens_each: given.tokens_each,
    })
}

/// Checks sizes of objects.
pub(crate) fn check_sizes(units: &[u64]) -> Result<()> {
    match units.iter().position(|units| !(1..=MAX_UNITS).contains(units)) {
        Some(at) => {
            let size = units.get(at).copied().unwrap_or_default();
            fail!(Invalid, "units[{at}] is {size}, allowed is 1 to {MAX_UNITS}")
        }
        None => Ok(()),
    }
}

impl PolicyNoun {
    /// Passes the engine's prediction for the call's session to the policy, as a hint.
    fn hint_predicted(&self, context: &RequestContext, ids: &[u64]) -> Result<()> {
        let Some(session) = context.session else { return Ok(()) };
        let (length, max_length) = (u64::from(context.length), u64::from(context.max_length));
        if let Some((ahead_ns, confidence)) = self.predict(session, length, max_length) {
            let evictor = &mut self.state.lock().evictor;
            let now = evictor.now_ns();
            let next_use = Some((now.saturating_add(ahead_ns), confidence));
            evictor.hint(now, context, ids, &Hint { next_use, ..Hint::default() })?;
        }
        Ok(())
    }
}

/// Looks up a path of objects and counts the lookup. Touches the hits, the last one first, so that
/// no object is older than its children. Objects behind a missing one are hits only with
/// KVT_POLICY_HOLES.
///
/// @param now_ns       The caller's monotonic clock, -2^62 to 2^62 - 1; it must not go back.
///                     0 = CLOCK_MONOTONIC. Use one clock per policy.
/// @param context      May be null.
/// @param ids          The path, from its start.
/// @param count        At most 2^24.
/// @param out_found    `count` bytes: 1 for a hit, else 0; may be null.
/// @param out_leading  Number of hits before the first miss; may be null.
/// @return KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_policy_lookup(
    policy: *const kvt_policy_t,
    now_ns: i64,
    context: *const kvt_policy_context_t,
    ids: *const u64,
    count: u64,
    out_found: *mut u8,
    out_leading: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let (context, ids) = (self::context(context)?, self::ids(ids, count)?);
    let found = match out_found.is_null() {
        true => &mut [][..],
        // SAFETY: not null, and valid for `count` bytes by the caller's promise.
        false => std::slice::from_raw_parts_mut(out_found, ids.len()),
    };
    let policy = enter(policy)?;
    let leading = policy.state.lock().evictor.lookup(now_ns, &context, ids, found)?;
    policy.hint_predicted(&context, ids)?;
    put(out_leading, leading as u64);
    Ok(())
}

/// Touches objects, the last one first, without counting a lookup. Skips ids that are not in the
/// table.
///
/// @param now_ns       See kvt_policy_lookup, also for context and count.
/// @param out_touched  Number of objects touched; may be null.
/// @return KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_policy_touch(
    policy: *const kvt_policy_t,
    now_ns: i64,
    context: *const kvt_policy_context_t,
    ids: *const u64,
    count: u64,
    out_touched: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let (context, ids) = (self::context(context)?, self::ids(ids, count)?);
    let policy = enter(policy)?;
    let touched = policy.state.lock().evictor.touch(now_ns, &context, ids)?;
    put(out_touched, touched as u64);
    Ok(())
}

/// Records a use of objects: touches those in the table and inserts the others, all or none. For
/// engines that keep their own tables: kvt_policy_select prefers recorded uses to columns.
///
/// @param now_ns     See kvt_policy_lookup, also for context and count.
/// @param units      Sizes of new objects, 1 to 2^32 - 1; null = 1 each.
/// @param out_added  Number of objects inserted; may be null.
/// @return KVT_E_LIMIT (also: the table is full).
#[capi]
pub unsafe extern "C" fn kvt_policy_record(
    policy: *const kvt_policy_t,
    now_ns: i64,
    context: *const kvt_policy_context_t,
    ids: *const u64,
    units: *const u64,
    count: u64,
    out_added: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let units_count = if units.is_null() { 0 } else { count };
    let (context, ids, units) =
        (self::context(context)?, self::ids(ids, count)?, self::ids(units, units_count)?);
    check_sizes(units)?;
    let policy = enter(policy)?;
    let added = policy.state.lock().evictor.record(now_ns, &context, ids, units)?;
    policy.hint_predicted(&context, ids)?;
    put(out_added, added as u64);
    Ok(())
}

fn new_object(row: &kvt_policy_object_t) -> Result<NewObject> {
    known_flags(row.flags, KVT_OBJECT_HAS_PARENT)?;
    let id = row.id;
    if !(1..=MAX_UNITS).contains(&row.units) {
        fail!(Invalid, "object {id} has {} units, allowed is 1 to {MAX_UNITS}", row.units);
    }
    let (Ok(layer), Ok(layers)) = (u16::try_from(row.layer), u16::try_from(row.layers)) else {
        fail!(
            Limit,
            "object {id} is in layer {} of {}, at most {} is allowed for both",
            row.layer,
            row.layers,
            u16::MAX
        );
    };
    if !(0.0..=f64::from(f32::MAX)).contains(&row.cost) {
        fail!(Invalid, "object {id} has a cost of {}, allowed is 0 to {:e}", row.cost, f32::MAX);
    }
    let facts = Facts {
        context: row.context,
        tokens: row.tokens,
        layer,
        layers,
        chunk: row.chunk,
        chunks: row.chunks,
        cost: row.cost as f32,
        next_use_ns: row.next_use_ns,
    };
    let parent = (row.flags & KVT_OBJECT_HAS_PARENT != 0).then_some(row.parent);
    Ok(NewObject { id, parent, units: row.units, facts })
}

/// Inserts objects, all or none. An id that is in the table is an error.
///
/// @param now_ns  See kvt_policy_lookup, also for context and count.
/// @param rows    Parents before children: the first row counts as used last.
/// @return KVT_E_LIMIT (also: the table is full; evict first).
#[capi]
pub unsafe extern "C" fn kvt_policy_insert(
    policy: *const kvt_policy_t,
    now_ns: i64,
    context: *const kvt_policy_context_t,
    rows: *const kvt_policy_object_t,
    count: u64,
    stride_bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let context = self::context(context)?;
    let rows = Strided::new(rows.cast_mut(), count, stride_bytes, MAX_BATCH as u64)?;
    let policy = enter(policy)?;
    let mut state = policy.state.lock();
    let State { evictor, new_objects, .. } = &mut *state;
    new_objects.clear();
    if new_objects.try_reserve(rows.len()).is_err() {
        fail!(NoMem, "no memory for a batch of {} objects", rows.len());
    }
    for at in 0..rows.len() {
        new_objects.push(new_object(&rows.get(at)?)?);
    }
    evictor.insert(now_ns, &context, new_objects)
}

// Removals, references, pins, hints.

/// Calls `body` with the evictor and the call's ids.
///
/// # Safety
/// `data` is null or valid for reads of `count` numbers.
unsafe fn with_ids(
    policy: *const kvt_policy_t,
    data: *const u64,
    count: u64,
    body: impl FnOnce(&mut Evictor, &[u64]) -> Result<()>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let ids = unsafe { ids(data, count)? };
    body(&mut enter(policy)?.state.lock().evictor, ids)
}

/// Removes objects that their owner gave up, with their references and pins; all or none. It does
/// not count as an eviction. Children must be removed with their parents.
///
/// @param now_ns  See kvt_policy_lookup, also for count.
/// @param ids     Each once.
/// @return KVT_E_NOT_FOUND, KVT_E_STATE (a child would stay), KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_policy_remove(
    policy: *const kvt_policy_t,
    now_ns: i64,
    ids: *const u64,
    count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_ids(policy, ids, count, |evictor, ids| evictor.remove(now_ns, ids))
}

/// Reports that the objects chosen by kvt_policy_select were freed: removes them as evicted, all or
/// none. Statistics, log, advice and ghosts then know of them. Children must be evicted with their
/// parents. An id that is not in the table counts as 1 unit and is remembered, but not logged.
///
/// @param now_ns  See kvt_policy_lookup, also for count.
/// @param ids     Each once.
/// @return KVT_E_STATE (a child would stay), KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_policy_report_evicted(
    policy: *const kvt_policy_t,
    now_ns: i64,
    ids: *const u64,
    count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_ids(policy, ids, count, |evictor, ids| evictor.evicted(now_ns, ids))
}

/// Changes the sizes of objects, all or none.
///
/// @param units  New sizes, 1 to 2^32 - 1.
/// @param count  At most 2^24.
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT.
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
        check_sizes(units)?;
        evictor.resize(ids, units)
    };
    with_ids(policy, ids, count, resize)
}

/// Adds a reference to each object, all or none. A referenced object is never evicted.
///
/// @param ids    An id that occurs twice gets two references.
/// @param count  At most 2^24.
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_policy_acquire(
    policy: *const kvt_policy_t,
    ids: *const u64,
    count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_ids(policy, ids, count, |evictor, ids| evictor.acquire(ids))
}

/// Removes a reference from each object, all or none.
///
/// @param count  At most 2^24.
/// @return KVT_E_NOT_FOUND, KVT_E_STATE (an object has no reference), KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_policy_release(
    policy: *const kvt_policy_t,
    ids: *const u64,
    count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_ids(policy, ids, count, |evictor, ids| evictor.release(ids))
}

/// Pins objects, all or none. A pinned object is never evicted. Pins are not counted: one
/// kvt_policy_unpin ends any number.
///
/// @param count  At most 2^24.
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_policy_pin(
    policy: *const kvt_policy_t,
    ids: *const u64,
    count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_ids(policy, ids, count, |evictor, ids| evictor.pin(ids, true))
}

/// Unpins objects, all or none. An object that is not pinned is no error.
///
/// @param count  At most 2^24.
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_policy_unpin(
    policy: *const kvt_policy_t,
    ids: *const u64,
    count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_ids(policy, ids, count, |evictor, ids| evictor.pin(ids, false))
}

/// # Safety
/// `hint` is null or valid for the size it states.
pub(crate) unsafe fn hint(hint: *const kvt_policy_hint_t) -> Result<Hint> {
    // SAFETY: the caller's promise.
    let given = unsafe { read(hint)? };
    known_flags(given.flags, KVT_HINT_DONE | KVT_HINT_ZERO_CONFIDENCE)?;
    no_reserved(given.reserved)?;
    let Some(stop) = Stop::from_code(u64::from(given.stop)) else {
        fail!(Invalid, "stop is {}, allowed is 0 to {KVT_STOP_CANCELLED}: KVT_STOP_*", given.stop);
    };
    let is_default = given.flags & KVT_HINT_ZERO_CONFIDENCE == 0 && given.confidence == 0.0;
    let confidence = if is_default { 1.0 } else { given.confidence };
    if !(0.0..=1.0).contains(&confidence) {
        fail!(Invalid, "confidence is {confidence}, allowed is 0 to 1");
    }
    Ok(Hint {
        stop: (stop != Stop::Unknown).then_some(stop),
        next_use: (given.next_use_ns != 0).then_some((given.next_use_ns, confidence as f32)),
        done: given.flags & KVT_HINT_DONE != 0,
    })
}

/// Passes the engine's hint about objects to the policy, usually about the path of a finished
/// request. Skips ids that are not in the table.
///
/// @param now_ns     See kvt_policy_lookup, also for context and count.
/// @param out_known  Number of ids in the table; may be null.
/// @return KVT_E_LIMIT.
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
    let hint_all = |evictor: &mut Evictor, ids: &[u64]| {
        let (context, hint) = (self::context(context)?, self::hint(hint)?);
        let known = evictor.hint(now_ns, &context, ids, &hint)?;
        put(out_known, known as u64);
        Ok(())
    };
    with_ids(policy, ids, count, hint_all)
}

// Eviction from the policy's own table.

/// An evicted object.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_victim_t {
    pub id: u64,
    /// Units that it frees.
    pub units: u64,
}

/// The result of an eviction.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_outcome_t {
    pub struct_size: u64,
    /// Number of victims.
    pub victims: u64,
    /// Units that the victims free.
    pub freed_units: u64,
    /// Units missing to the number required.
    pub shortfall_units: u64,
    /// Time of the decision; 0 = not measured (1 eviction in 16 is, no preview).
    pub decision_ns: u64,
    /// Policy that decided, maybe not the one opened. The text lives as long as the library.
    pub decided_by: *const c_char,
    pub decided_by_bytes: u64,
}

/// The caller's score function as a scorer.
struct CallerScores<'a>(&'a PolicyNoun);

impl Scorer for CallerScores<'_> {
    fn score(&mut self, view: &Columns, now: i64, out: &mut [f64]) -> Result<()> {
        let Some(score) = &self.0.score else {
            fail!(
                Invalid,
                "the policy 'custom' needs a score function: set custom in kvt_policy_opts_t"
            );
        };
        let columns = columns_for_c(view);
        let status = score.call(|function, user_data| {
            // SAFETY: function and data came together from the caller; columns and scores have as
            // many entries as the columns say.
            unsafe { function(user_data, &columns, now, out.as_mut_ptr()) }
        });
        match status {
            KVT_OK => Ok(()),
            code => {
                let status = Status::from_code(code).unwrap_or(Status::Invalid);
                Err(Error::new(status, format!("the score function returned status {code}")))
            }
        }
    }
}

impl PolicyNoun {
    /// Scores candidates with the caller's function. No lock may be held.
    pub(crate) fn score_rows(&self, view: &Columns, now_ns: i64) -> Result<Vec<f64>> {
        let now = match now_ns {
            0 => i64::try_from(Clock::real().now_ns()).unwrap_or(i64::MAX),
            now => now,
        };
        custom::score(&mut CallerScores(self), view, now)
    }
}

/// Most calls of the score function for one eviction: objects may change during each.
const ROUNDS: u32 = 4;

/// Evicts in the order of the policy; the victims are in `state.victims`.
fn evict_by_policy(state: &mut State, now_ns: i64, request: &ScoredEviction) -> Result<Outcome> {
    let State { evictor, victims, .. } = state;
    reserve_victims(victims, request.most.min(evictor.objects().len()))?;
    match request.report_only {
        true => evictor.preview_most(now_ns, request.required, request.most, victims),
        false => evictor.evict_most(now_ns, request.required, request.most, victims),
    }
}

/// Empties the list of victims and reserves memory for `most`.
fn reserve_victims(victims: &mut Vec<Victim>, most: usize) -> Result<()> {
    victims.clear();
    if victims.try_reserve(most).is_err() {
        fail!(NoMem, "no memory for a list of {most} victims");
    }
    Ok(())
}

/// Evicts by the caller's scores: takes a snapshot, scores it without the lock, and evicts the
/// objects that have not changed since. Repeats this while too little is free.
fn evict_custom(
    policy: &PolicyNoun,
    now_ns: i64,
    request: &ScoredEviction,
    out: &Strided<kvt_policy_victim_t>,
) -> Result<(Outcome, usize)> {
    policy.state.lock().evictor.check_time(now_ns)?;
    if request.required == 0 {
        return Ok((Outcome::default(), 0));
    }
    let (mut total, mut count) = (Outcome::default(), 0);
    for _ in 0..ROUNDS {
        let required = request.required - total.freed_units;
        let rest = ScoredEviction { required, most: request.most - count, ..*request };
        let (outcome, found) = match evict_round(policy, now_ns, &rest, out, count) {
            // Earlier rounds evicted objects: they must be reported.
            Err(_) if count > 0 => break,
            round => round?,
        };
        count += found;
        let freed_units = total.freed_units + outcome.freed_units;
        let decision_ns = total.decision_ns + outcome.decision_ns;
        total = Outcome { freed_units, decision_ns, ..outcome };
        if outcome.shortfall_units == 0
            || request.report_only
            || count == request.most
            || found == 0
        {
            break;
        }
    }
    Ok((total, count))
}

/// One round. Writes its victims to `out` from index `from` on; returns their number, too.
fn evict_round(
    policy: &PolicyNoun,
    now_ns: i64,
    request: &ScoredEviction,
    out: &Strided<kvt_policy_victim_t>,
    from: usize,
) -> Result<(Outcome, usize)> {
    let snapshot = policy.state.lock().evictor.snapshot()?;
    // The score function is not called without candidates.
    let scores = match snapshot.len() {
        0 => Vec::new(),
        _ => policy.score_rows(&snapshot.view(), now_ns)?,
    };
    let mut state = policy.state.lock();
    let State { evictor, victims, .. } = &mut *state;
    reserve_victims(victims, request.most.min(snapshot.len()))?;
    let outcome = evictor.evict_by_scores(now_ns, &snapshot, &scores, request, victims)?;
    write_victims(victims, out, from);
    Ok((outcome, victims.len()))
}

fn write_victims(victims: &[Victim], out: &Strided<kvt_policy_victim_t>, from: usize) {
    for (i, victim) in victims.iter().enumerate() {
        out.put(from + i, &kvt_policy_victim_t { id: victim.id, units: victim.units });
    }
}

fn evict(
    policy: &PolicyNoun,
    now_ns: i64,
    request: &ScoredEviction,
    out: &Strided<kvt_policy_victim_t>,
) -> Result<kvt_policy_outcome_t> {
    let mut state = policy.state.lock();
    let (outcome, count) = if state.evictor.name() == custom::NAME {
        drop(state);
        evict_custom(policy, now_ns, request, out)?
    } else {
        let outcome = evict_by_policy(&mut state, now_ns, request)?;
        write_victims(&state.victims, out, 0);
        (outcome, state.victims.len())
    };
    Ok(kvt_policy_outcome_t {
        struct_size: 0,
        victims: count as u64,
        freed_units: outcome.freed_units,
        shortfall_units: outcome.shortfall_units,
        decision_ns: outcome.decision_ns,
        decided_by: outcome.decided_by.as_ptr().cast(),
        decided_by_bytes: outcome.decided_by.len() as u64,
    })
}

/// Evicts objects until `required_units` are free. Removes the victims from the table; the caller
/// frees their memory. No victim is superfluous. If there are too few candidates, or `capacity` is
/// too small, the rest is a shortfall and no error.
///
/// @param now_ns          See kvt_policy_lookup.
/// @param required_units  0 evicts nothing.
/// @param victims         Receives the victims in the order of eviction.
/// @param capacity        Most victims, up to 2^28.
/// @return KVT_E_LIMIT, any status of the score function.
#[capi]
pub unsafe extern "C" fn kvt_policy_evict(
    policy: *const kvt_policy_t,
    now_ns: i64,
    required_units: u64,
    victims: *mut kvt_policy_victim_t,
    capacity: u64,
    stride_bytes: u64,
    out: *mut kvt_policy_outcome_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    let victims = Strided::new(victims, capacity, stride_bytes, MAX_OBJECTS as u64)?;
    let request =
        ScoredEviction { required: required_units, most: victims.len(), report_only: false };
    write(out, &evict(&*enter(policy)?, now_ns, &request, &victims)?);
    Ok(())
}

/// Reports the victims that kvt_policy_evict would choose, and evicts nothing. A policy that
/// learns, or that moves objects while it searches (such as arc and sieve), may choose others the
/// next time. Parameters and statuses are those of kvt_policy_evict.
#[capi]
pub unsafe extern "C" fn kvt_policy_preview(
    policy: *const kvt_policy_t,
    now_ns: i64,
    required_units: u64,
    victims: *mut kvt_policy_victim_t,
    capacity: u64,
    stride_bytes: u64,
    out: *mut kvt_policy_outcome_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    let victims = Strided::new(victims, capacity, stride_bytes, MAX_OBJECTS as u64)?;
    let request =
        ScoredEviction { required: required_units, most: victims.len(), report_only: true };
    write(out, &evict(&*enter(policy)?, now_ns, &request, &victims)?);
    Ok(())
}

// Selection from the engine's table.

/// Flags of kvt_policy_select.
pub type kvt_select_flags_t = u64;

/// The last victim may give up a tail of its blocks and keep the others.
pub const KVT_SELECT_TAIL: kvt_select_flags_t = 1;

/// Candidates as columns: one array per property, with `rows` entries each. A null array means that
/// every row has the default. Arrays are aligned as C requires.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_columns_t {
    pub struct_size: u64,
    /// Number of candidates, up to 2^28.
    pub rows: u64,
    /// Required; each id once.
    pub ids: *const u64,
    /// Blocks of the candidate, up to 2^32 - 1; default: those listed in block_ids, else 1.
    pub blocks: *const u64,
    /// Time of creation; default 0.
    pub created_ns: *const i64,
    /// Time of the last use; default: created_ns.
    pub last_access_ns: *const i64,
    /// Number of uses; default 1.
    pub count: *const u64,
    /// Class, 0 is evicted first; default 1.
    pub priority: *const u8,
    /// Not 0: never chosen.
    pub pinned: *const u8,
    /// Time until the next use or the end; below 0 = unknown, the default.
    pub lifetime_ns: *const i64,
    /// Confidence of lifetime_ns, 0 to 1; default 1.
    pub confidence: *const f32,
    /// Tokens of the candidate; default 0.
    pub length: *const u64,
    /// Most tokens that the candidate can have; 0 = unknown, the default.
    pub max_length: *const u64,
    /// Holders; above 1 the candidate is shared and never chosen; default 1.
    pub refs: *const u32,
    /// Default 0.
    pub tenant: *const u32,
    /// Recompute cost; 0, the default = computed from context and tokens.
    pub cost: *const f64,
    /// Tokens before the candidate; default 0.
    pub context: *const u64,
    /// Tokens in the candidate; default: length.
    pub tokens: *const u64,
    /// Layer of a cell; default 0.
    pub layer: *const u32,
    /// Layers of the model, for cells; default 0.
    pub layers: *const u32,
    /// Index of the chunk in its sequence; default 0.
    pub chunk: *const u32,
    /// Chunks of that sequence; default 0.
    pub chunks: *const u32,
    /// rows + 1 entries: start of each row's blocks in block_ids, and the end of the last. Null:
    /// blocks are only counted.
    pub block_offsets: *const u64,
    /// Blocks of all rows, those of a row in the order of its tokens. A block that several rows
    /// list is shared: it counts once, and is free when all its holders are evicted.
    pub block_ids: *const u64,
    /// Holders of each entry of block_ids, including those that are no rows; 0, the default = the
    /// rows that list it.
    pub block_refs: *const u32,
    /// Entries of block_ids and of block_refs, up to 2^28.
    pub block_entries: u64,
}

/// A chosen candidate.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_pick_t {
    /// Index of its row.
    pub row: u64,
    pub id: u64,
    /// Blocks that it frees.
    pub freed_blocks: u64,
    /// Leading blocks that it keeps; 0 = it is evicted.
    pub kept_blocks: u64,
    /// Index in the selection's block_ids of the first block that it frees.
    pub first_block: u64,
}

/// The result of a selection. Set the fields marked "In" before the call.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_selection_t {
    pub struct_size: u64,
    /// In: receives the chosen candidates in the order of eviction.
    pub victims: *mut kvt_policy_pick_t,
    /// In: entries of `victims`; as many as rows are always enough.
    pub victim_capacity: u64,
    /// In: sizeof(kvt_policy_pick_t).
    pub stride_bytes: u64,
    /// In: receives the freed blocks by victim, if the columns list blocks; may be null.
    pub block_ids: *mut u64,
    /// In: entries of `block_ids`.
    pub block_capacity: u64,
    /// Victims chosen; with KVT_E_TOO_SMALL the capacity needed.
    pub victim_count: u64,
    /// Blocks in block_ids; with KVT_E_TOO_SMALL the capacity needed.
    pub block_count: u64,
    pub freed_blocks: u64,
    /// Blocks missing to the number required.
    pub shortfall_blocks: u64,
    /// Time of the decision.
    pub decision_ns: u64,
    /// Policy that decided, maybe not the one opened. The text lives as long as the library.
    pub decided_by: *const c_char,
    pub decided_by_bytes: u64,
}

/// A column; null = absent.
///
/// # Safety
/// `data` is null or valid for reads of `rows` numbers.
unsafe fn column<'a, T>(data: *const T, rows: u64) -> Result<&'a [T]> {
    // SAFETY: the caller's promise.
    unsafe { numbers(data, if data.is_null() { 0 } else { rows }, MAX_ROWS + 1) }
}

/// # Safety
/// Every column is null or valid for reads of `rows` numbers; the block arrays, of the numbers that
/// the struct states.
unsafe fn columns<'a>(c: &kvt_policy_columns_t) -> Result<Columns<'a>> {
    let rows = c.rows;
    if c.block_offsets.is_null() && c.block_entries != 0 {
        fail!(
            Invalid,
            "block_entries is {} and block_offsets is null: pass both or neither",
            c.block_entries
        );
    }
    // SAFETY: the caller's promise.
    unsafe {
        Ok(Columns {
            ids: numbers(c.ids, rows, MAX_ROWS)?,
            blocks: column(c.blocks, rows)?,
            created_ns: column(c.created_ns, rows)?,
            last_access_ns: column(c.last_access_ns, rows)?,
            count: column(c.count, rows)?,
            priority: column(c.priority, rows)?,
            pinned: column(c.pinned, rows)?,
            lifetime_ns: column(c.lifetime_ns, rows)?,
            confidence: column(c.confidence, rows)?,
            length: column(c.length, rows)?,
            max_length: column(c.max_length, rows)?,
            refs: column(c.refs, rows)?,
            tenant: column(c.tenant, rows)?,
            cost: column(c.cost, rows)?,
            context: column(c.context, rows)?,
            tokens: column(c.tokens, rows)?,
            layer: column(c.layer, rows)?,
            layers: column(c.layers, rows)?,
            chunk: column(c.chunk, rows)?,
            chunks: column(c.chunks, rows)?,
            block_offsets: column(c.block_offsets, rows.saturating_add(1))?,
            block_ids: numbers(c.block_ids, c.block_entries, MAX_ROWS)?,
            block_refs: column(c.block_refs, c.block_entries)?,
        })
    }
}

/// Columns for a score function.
pub(crate) fn columns_for_c(columns: &Columns) -> kvt_policy_columns_t {
    fn at<T>(column: &[T]) -> *const T {
        if column.is_empty() { std::ptr::null() } else { column.as_ptr() }
    }
    kvt_policy_columns_t {
        struct_size: size_of::<kvt_policy_columns_t>() as u64,
        rows: columns.rows() as u64,
        ids: at(columns.ids),
        blocks: at(columns.blocks),
        created_ns: at(columns.created_ns),
        last_access_ns: at(columns.last_access_ns),
        count: at(columns.count),
        priority: at(columns.priority),
        pinned: at(columns.pinned),
        lifetime_ns: at(columns.lifetime_ns),
        confidence: at(columns.confidence),
        length: at(columns.length),
        max_length: at(columns.max_length),
        refs: at(columns.refs),
        tenant: at(columns.tenant),
        cost: at(columns.cost),
        context: at(columns.context),
        tokens: at(columns.tokens),
        layer: at(columns.layer),
        layers: at(columns.layers),
        chunk: at(columns.chunk),
        chunks: at(columns.chunks),
        block_offsets: at(columns.block_offsets),
        block_ids: at(columns.block_ids),
        block_refs: at(columns.block_refs),
        block_entries: columns.block_ids.len() as u64,
    }
}

/// Fills the columns of lifetimes and confidences: rows without a lifetime get a predicted one.
fn predict_lifetimes(
    policy: &PolicyNoun,
    columns: &Columns,
    lifetimes: &mut Vec<i64>,
    confidences: &mut Vec<f32>,
) -> Result<()> {
    let rows = columns.rows();
    if lifetimes.try_reserve(rows).is_err() || confidences.try_reserve(rows).is_err() {
        fail!(NoMem, "no memory for the lifetimes of {rows} candidates");
    }
    for (row, &id) in columns.ids.iter().enumerate() {
        let known = (columns.lifetime_ns(row), columns.confidence(row));
        let predicted = match known.0 {
            ..0 => policy.predict(id, columns.length(row), columns.max_length(row)),
            _ => None,
        };
        let (lifetime, confidence) = predicted.unwrap_or(known);
        lifetimes.push(lifetime);
        confidences.push(confidence);
    }
    Ok(())
}

/// Selects and writes the result to the caller's arrays, if it fits.
fn select(
    policy: &PolicyNoun,
    now_ns: i64,
    columns: &Columns,
    required: u64,
    options: &SelectOptions,
    out: &mut kvt_policy_selection_t,
    picks: &Strided<kvt_policy_pick_t>,
) -> Result<()> {
    let (mut lifetimes, mut confidences) = (Vec::new(), Vec::new());
    let mut columns = *columns;
    if policy.predict.is_some() {
        columns.validate()?;
        predict_lifetimes(policy, &columns, &mut lifetimes, &mut confidences)?;
        columns.lifetime_ns = &lifetimes;
        columns.confidence = &confidences;
    }
    let (mut last, mut count, mut scores, mut by) = (Vec::new(), Vec::new(), Vec::new(), None);
    let mut state = policy.state.lock();
    if state.evictor.name() == custom::NAME && columns.rows() > 0 {
        state.evictor.recorded(&columns, &mut last, &mut count)?;
        drop(state);
        columns.last_access_ns = &last;
        columns.count = &count;
        scores = policy.score_rows(&columns, now_ns)?;
        by = Some(custom::NAME);
        state = policy.state.lock();
    }
    let State { evictor, selection, .. } = &mut *state;
    let done = evictor.select_by(now_ns, &columns, &scores, required, options, selection);
    if done.as_ref().err().is_none_or(|error| error.status() == Status::TooSmall) {
        out.victim_count = selection.victims.len() as u64;
        out.block_count = selection.block_ids.len() as u64;
    }
    done?;
    write_selection(selection, by, out, picks);
    Ok(())
}

/// Writes a selection to the caller's arrays. `by` replaces the name of the policy that decided.
fn write_selection(
    selection: &Selection,
    by: Option<&'static str>,
    out: &mut kvt_policy_selection_t,
    picks: &Strided<kvt_policy_pick_t>,
) {
    let blocks = if out.block_ids.is_null() { 0 } else { selection.block_ids.len() };
    for (i, pick) in selection.victims.iter().enumerate() {
        let pick = kvt_policy_pick_t {
            row: pick.row as u64,
            id: pick.id,
            freed_blocks: pick.freed_blocks,
            kept_blocks: pick.kept_blocks,
            first_block: pick.first_block as u64,
        };
        picks.put(i, &pick);
    }
    if blocks > 0 {
        // SAFETY: not null, and valid for `block_capacity` >= `blocks` numbers.
        unsafe {
            std::ptr::copy_nonoverlapping(selection.block_ids.as_ptr(), out.block_ids, blocks);
        }
    }
    let decided_by = by.unwrap_or(selection.decided_by);
    out.freed_blocks = selection.freed_blocks;
    out.shortfall_blocks = selection.shortfall_blocks;
    out.decision_ns = selection.decision_ns;
    out.decided_by = decided_by.as_ptr().cast();
    out.decided_by_bytes = decided_by.len() as u64;
}

/// Chooses candidates that free `required_blocks`, in the policy's order. No victim is superfluous.
/// Ids break ties, so the order of the rows does not matter. The call evicts nothing: the caller
/// frees the victims and reports them with kvt_policy_report_evicted.
///
/// - Uses recorded for an id (such as by kvt_policy_record) take precedence over its columns.
/// - The table keeps an object's context, tokens, layer, layers, chunk, chunks and cost from the
///   columns, for policies that use them.
/// - Pinned and shared rows are never chosen, nor rows whose object in the table is pinned,
///   referenced or the parent of another object.
///
/// @param now_ns           See kvt_policy_lookup.
/// @param required_blocks  0 chooses nothing. If it cannot be reached, every candidate that may be
///                         evicted is chosen, and the rest is a shortfall.
/// @param flags            KVT_SELECT_*.
/// @param selection        With KVT_E_TOO_SMALL only its counts are written.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT, any status of the score function.
#[capi]
pub unsafe extern "C" fn kvt_policy_select(
    policy: *const kvt_policy_t,
    now_ns: i64,
    candidates: *const kvt_policy_columns_t,
    required_blocks: u64,
    flags: kvt_select_flags_t,
    selection: *mut kvt_policy_selection_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    known_flags(flags, KVT_SELECT_TAIL)?;
    check_out(selection)?;
    let (columns, mut out) = (columns(&read(candidates)?)?, read(selection.cast_const())?);
    let capacity = out.victim_capacity.min(columns.rows() as u64);
    let picks = Strided::new(out.victims, capacity, out.stride_bytes, MAX_ROWS as u64)?;
    let blocks = match out.block_ids.is_null() {
        true => usize::MAX,
        false => usize::try_from(out.block_capacity).unwrap_or(usize::MAX),
    };
    let options = SelectOptions {
        allow_tail: flags & KVT_SELECT_TAIL != 0,
        room: Some(Room { victims: picks.len(), blocks }),
    };
    let done = enter(policy).and_then(|policy| {
        select(&policy, now_ns, &columns, required_blocks, &options, &mut out, &picks)
    });
    if done.as_ref().err().is_none_or(|error| error.status() == Status::TooSmall) {
        write(selection, &out);
    }
    done
}

// Statistics and the eviction log.

/// Statistics of a policy since it was opened. Without lookups, ratios and rates are 0 and Jain's
/// indices 1.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_stats_t {
    pub struct_size: u64,
    /// Objects in the table.
    pub objects: u64,
    pub max_objects: u64,
    /// Sum of the objects' sizes.
    pub units: u64,
    /// 0 = unknown.
    pub capacity_units: u64,
    /// Known sessions.
    pub sessions: u64,
    /// Tenants counted separately, up to 1024; the others count as one.
    pub tenants: u64,
    /// Lookups.
    pub requests: u64,
    /// Objects looked up, in all lookups.
    pub references: u64,
    /// References that found a usable object.
    pub hits: u64,
    /// References to objects that were evicted before and are missing: to be recomputed.
    pub evicted_references: u64,
    /// Tokens looked up.
    pub tokens: u64,
    /// Tokens found.
    pub hit_tokens: u64,
    /// Recompute cost of the tokens looked up.
    pub cost: f64,
    /// Recompute cost of the tokens found.
    pub hit_cost: f64,
    /// Objects inserted.
    pub inserts: u64,
    /// Objects evicted.
    pub evictions: u64,
    /// Units evicted.
    pub evicted_units: u64,
    /// Evictions and selections called.
    pub decisions: u64,
    /// Decisions that freed less than required.
    pub shortfalls: u64,
    /// Decisions that were timed: every selection, 1 eviction in 16 (by "custom": every one).
    pub decisions_timed: u64,
    /// Times of these decisions: median, 99th percentile, maximum, mean.
    pub decision_p50_ns: u64,
    pub decision_p99_ns: u64,
    pub decision_max_ns: u64,
    pub decision_mean_ns: u64,
    /// hits / references.
    pub hit_ratio: f64,
    /// hit_tokens / tokens.
    pub token_hit_ratio: f64,
    /// hit_cost / cost.
    pub cost_hit_ratio: f64,
    /// evicted_references / references.
    pub re_prefill_rate: f64,
    /// Jain's index, over sessions, of the tokens found per token that an unbounded cache would
    /// have found: 1 if all are equal, 1/n if one of n has everything.
    pub jain_sessions: f64,
    /// The same over tenants.
    pub jain_tenants: f64,
    /// Metadata bytes per object of a full table.
    pub bytes_per_object: f64,
    /// Number of the next eviction in the log.
    pub next_log_number: u64,
    /// Name of the policy; lives as long as the library.
    pub name: *const c_char,
    pub name_bytes: u64,
}

/// An eviction in the log.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_log_entry_t {
    /// Counts evictions from 1; a gap means that entries were overwritten.
    pub number: u64,
    /// Time of the eviction, by the caller's clock.
    pub at_ns: i64,
    pub id: u64,
    /// Valid if has_session is not 0.
    pub session: u64,
    /// Time of the last use, as far as the policy knows it.
    pub stamp_ns: i64,
    /// Score in the policy's order; the lowest is evicted first.
    pub score: f64,
    /// Units freed.
    pub units: u32,
    /// Uses since the object was inserted.
    pub hits: u32,
    /// The policy's queue that the object was in.
    pub queue: u32,
    pub has_session: u32,
    /// Index of the policy that decided, for kvt_policy_info.
    pub policy: u32,
    pub reserved: u32,
}

fn stats(evictor: &Evictor) -> kvt_policy_stats_t {
    let (objects, metrics) = (evictor.objects(), &evictor.metrics);
    let (counts, decision, name) = (&metrics.counts, &metrics.decision, evictor.name());
    kvt_policy_stats_t {
        struct_size: 0,
        objects: objects.len() as u64,
        max_objects: objects.limit() as u64,
        units: objects.units(),
        capacity_units: evictor.options().capacity_units,
        sessions: objects.sessions.known().count() as u64,
        tenants: metrics.tenants() as u64,
        requests: counts.requests,
        references: counts.references,
        hits: counts.hits,
        evicted_references: counts.evicted_references,
        tokens: counts.tokens,
        hit_tokens: counts.hit_tokens,
        cost: counts.cost,
        hit_cost: counts.hit_cost,
        inserts: counts.inserts,
        evictions: counts.evictions,
        evicted_units: counts.evicted_units,
        decisions: counts.decisions,
        shortfalls: counts.shortfalls,
        decisions_timed: decision.total(),
        decision_p50_ns: decision.quantile_ns(0.5),
        decision_p99_ns: decision.quantile_ns(0.99),
        decision_max_ns: decision.max_ns(),
        decision_mean_ns: decision.mean_ns(),
        hit_ratio: counts.hit_ratio(),
        token_hit_ratio: counts.token_hit_ratio(),
        cost_hit_ratio: counts.cost_hit_ratio(),
        re_prefill_rate: counts.re_prefill_rate(),
        jain_sessions: session_fairness(&objects.sessions),
        jain_tenants: metrics.tenant_fairness(),
        bytes_per_object: objects.bytes_per_object(),
        next_log_number: evictor.log.next_number(),
        name: name.as_ptr().cast(),
        name_bytes: name.len() as u64,
    }
}

/// Reads a policy's statistics. Visits every session, so keep it out of hot paths.
#[capi]
pub unsafe extern "C" fn kvt_policy_stats(
    policy: *const kvt_policy_t,
    out: *mut kvt_policy_stats_t,
) -> kvt_status_t {
    check_out(out)?;
    let policy = inspect(policy)?;
    write(out, &stats(&policy.state.lock().evictor));
    Ok(())
}

/// Writes the policy's spec in canonical form, not NUL-terminated.
///
/// @param out_bytes  Length of the spec; may be null.
/// @return KVT_E_TOO_SMALL.
#[capi]
pub unsafe extern "C" fn kvt_policy_spec(
    policy: *const kvt_policy_t,
    out: *mut c_char,
    out_capacity: u64,
    out_bytes: *mut u64,
) -> kvt_status_t {
    if out.is_null() && out_capacity > 0 {
        fail!(
            Invalid,
            "out is null and out_capacity is {out_capacity}: 0 asks for the length alone"
        );
    }
    let policy = inspect(policy)?;
    let spec = policy.state.lock().evictor.spec().to_string();
    put(out_bytes, spec.len() as u64);
    if out.is_null() {
        return Ok(());
    }
    if out_capacity < spec.len() as u64 {
        return Err(Status::TooSmall.into());
    }
    // SAFETY: not null, and valid for `out_capacity` bytes, which are enough.
    std::ptr::copy_nonoverlapping(spec.as_ptr(), out.cast(), spec.len());
    Ok(())
}

/// A gauge of the policy; the error names the nearest one, or all.
fn gauge(evictor: &Evictor, name: &str) -> Result<f64> {
    let (mut known, mut found) = (Vec::new(), None);
    evictor.policy().gauges(evictor.objects(), &mut |gauge, value| {
        known.push(gauge);
        if gauge == name {
            found = Some(value);
        }
    });
    found.ok_or_else(|| {
        let suggestion = match nearest(name, &known) {
            Some(suggestion) => format!("did you mean '{suggestion}'?"),
            None if known.is_empty() => "it has none".to_string(),
            None => format!("it has: {}", known.join(", ")),
        };
        let text = format!("'{}' has no gauge '{name}'; {suggestion}", evictor.name());
        Error::new(Status::NotFound, text)
    })
}

/// Reads a gauge: a number particular to the policy, such as "arc_p" of arc.
///
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_policy_gauge(
    policy: *const kvt_policy_t,
    name: *const c_char,
    name_bytes: u64,
    out_value: *mut f64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out_value)?;
    let name = text("name", name, name_bytes)?;
    let policy = enter(policy)?;
    let value = gauge(&policy.state.lock().evictor, name)?;
    out_value.write(value);
    Ok(())
}

/// Reads a gauge by its index, to list them all. kvt_policy_switch changes the list.
///
/// @param out_name        Not NUL-terminated; lives as long as the library. May be null.
/// @param out_name_bytes  May be null.
/// @param out_value       May be null.
/// @return KVT_E_NOT_FOUND (`index` is past the last gauge).
#[capi]
pub unsafe extern "C" fn kvt_policy_gauge_at(
    policy: *const kvt_policy_t,
    index: u64,
    out_name: *mut *const c_char,
    out_name_bytes: *mut u64,
    out_value: *mut f64,
) -> kvt_status_t {
    let (mut at, mut found) = (0, None);
    let policy = enter(policy)?;
    let evictor = &policy.state.lock().evictor;
    evictor.policy().gauges(evictor.objects(), &mut |name, value| {
        if at == index {
            found = Some((name, value));
        }
        at += 1;
    });
    let Some((name, value)) = found else { return Err(Status::NotFound.into()) };
    put(out_name, name.as_ptr().cast());
    put(out_name_bytes, name.len() as u64);
    put(out_value, value);
    Ok(())
}

pub(crate) fn log_entry(entry: &Entry) -> kvt_policy_log_entry_t {
    let Entry { number, at_ns, id, session, stamp_ns, score, .. } = *entry;
    let Entry { units, hits, queue, has_session, policy, reserved, .. } = *entry;
    kvt_policy_log_entry_t {
        number,
        at_ns,
        id,
        session,
        stamp_ns,
        score,
        units,
        hits,
        queue,
        has_session,
        policy,
        reserved,
    }
}

/// Reads the log of evictions, oldest first.
///
/// @param from_number  First entry wanted, such as the last one read plus 1. Overwritten entries
///                     are left out.
/// @param capacity     Up to 2^21. More entries are no error: read on from the last one.
/// @param out_count    Entries written.
/// @return KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_policy_log(
    policy: *const kvt_policy_t,
    from_number: u64,
    entries: *mut kvt_policy_log_entry_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
) -> kvt_status_t {
    require(out_count)?;
    let out = Strided::new(entries, capacity, stride_bytes, 2 * MAX_ENTRIES as u64)?;
    let policy = inspect(policy)?;
    let state = policy.state.lock();
    let mut count = 0;
    for entry in state.evictor.log.since(from_number).take(out.len()) {
        out.put(count, &log_entry(entry));
        count += 1;
    }
    out_count.write(count as u64);
    Ok(())
}

// Advice.

/// Flags of kvt_policy_advice_rules_t.
pub type kvt_advice_flags_t = u64;

/// `shrink_above` = 0 means 0, not the default.
pub const KVT_ADVICE_ZERO_SHRINK: kvt_advice_flags_t = 1;
/// `grow_below` = 0 means 0, not the default.
pub const KVT_ADVICE_ZERO_GROW: kvt_advice_flags_t = 2;

/// Rules of the advice.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_advice_rules_t {
    pub struct_size: u64,
    pub flags: kvt_advice_flags_t,
    /// Re-prefill rate of a window above which batches are halved, 0 to 1; 0 = 0.3.
    pub shrink_above: f64,
    /// Evictions in a window below which batches are doubled; 0 = 10.
    pub grow_below: u64,
    /// Smallest batch; 0 = 1.
    pub min_batch: u64,
    /// Largest batch; 0 = 128.
    pub max_batch: u64,
    /// Lookups in a window; 0 = 100.
    pub window: u64,
    /// Consecutive windows that must agree; 0 = 2.
    pub patience: u64,
}

/// Advice for a scheduler.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_advice_t {
    pub struct_size: u64,
    /// Batch size to run next.
    pub batch: u64,
    /// Re-prefill rate of the last full window.
    pub re_prefill_rate: f64,
    /// Evictions in that window.
    pub evictions: u64,
}

/// Advises a scheduler on its batch size: half if too much is recomputed, double if hardly anything
/// is evicted. Consecutive windows of lookups must agree first (kvt_policy_advice_rules_t). A
/// change is advised once.
///
/// @param batch  The current batch size.
#[capi]
pub unsafe extern "C" fn kvt_policy_advise(
    policy: *const kvt_policy_t,
    batch: u64,
    out: *mut kvt_policy_advice_t,
) -> kvt_status_t {
    check_out(out)?;
    let policy = enter(policy)?;
    let advised = policy.state.lock().evictor.advice.advise(batch);
    write(
        out,
        &kvt_policy_advice_t {
            struct_size: 0,
            batch: advised.batch,
            re_prefill_rate: advised.re_prefill_rate,
            evictions: advised.evictions,
        },
    );
    Ok(())
}

fn rules(given: &kvt_policy_advice_rules_t) -> Result<Rules> {
    known_flags(given.flags, KVT_ADVICE_ZERO_SHRINK | KVT_ADVICE_ZERO_GROW)?;
    let defaults = Rules::default();
    let or = |n: u64, default: u64| if n == 0 { default } else { n };
    let shrink = given.shrink_above != 0.0 || given.flags & KVT_ADVICE_ZERO_SHRINK != 0;
    let rules = Rules {
        shrink_above: if shrink { given.shrink_above } else { defaults.shrink_above },
        grow_below: match given.flags & KVT_ADVICE_ZERO_GROW {
            0 => or(given.grow_below, defaults.grow_below),
            _ => given.grow_below,
        },
        min_batch: or(given.min_batch, defaults.min_batch),
        max_batch: or(given.max_batch, defaults.max_batch),
        window: or(given.window, defaults.window),
        patience: u32::try_from(or(given.patience, defaults.patience.into())).unwrap_or(u32::MAX),
    };
    if !(0.0..=1.0).contains(&rules.shrink_above) {
        fail!(Invalid, "shrink_above is {}, allowed is 0 to 1", rules.shrink_above);
    }
    if rules.min_batch > rules.max_batch {
        let Rules { min_batch, max_batch, .. } = rules;
        fail!(
            Invalid,
            "min_batch is {min_batch}, allowed is up to max_batch, which is {max_batch}"
        );
    }
    Ok(rules)
}

/// Replaces the rules of kvt_policy_advise. Windows before the call no longer count.
#[capi]
pub unsafe extern "C" fn kvt_policy_set_advice(
    policy: *const kvt_policy_t,
    given: *const kvt_policy_advice_rules_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let rules = rules(&read(given)?)?;
    let policy = enter(policy)?;
    policy.state.lock().evictor.advice.set_rules(rules);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenant_and_priority_need_a_session() {
        let given = |flags, tenant, priority| {
            let context = kvt_policy_context_t {
                struct_size: size_of::<kvt_policy_context_t>() as u64,
                flags,
                session: 7,
                tenant,
                priority,
                length: 64,
                max_length: 0,
                tokens_each: 16,
                reserved: 0,
            };
            // SAFETY: a whole struct.
            unsafe { self::context(&context) }
        };
        let session_and_priority = KVT_CONTEXT_SESSION | KVT_CONTEXT_PRIORITY;
        let expected = (Some(7), 5, Some(2));
        let fields = |context: RequestContext| (context.session, context.tenant, context.priority);
        assert_eq!(given(session_and_priority, 5, 2).map(fields).ok(), Some(expected));
        assert!(given(KVT_CONTEXT_SESSION, 5, 2).is_ok_and(|context| context.priority.is_none()));
        assert!(
            given(0, 0, 2).is_ok_and(|context| context.session.is_none() && context.length == 64)
        );
        for (flags, tenant, word) in [(0, 5, "tenant 5"), (KVT_CONTEXT_PRIORITY, 0, "priority 2")] {
            let error = given(flags, tenant, 2).err().map(|error| error.to_string());
            assert!(error.as_ref().is_some_and(|text| text.contains(word)), "{error:?}");
        }
    }
}
