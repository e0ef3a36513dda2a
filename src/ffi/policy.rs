//! Eviction policies for tables of the library or of the engine.

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
use crate::policy::evictor::{DEFAULT_OBJECTS, Evictor, MAX_BATCH, MAX_OBJECTS, New, Options, Who};
use crate::policy::log::{Entry, MAX_ENTRIES};
use crate::policy::metrics::session_fairness;
use crate::policy::registry::ENTRIES;
use crate::policy::{Hint, custom};

// Policies.

/// An eviction policy at work. Needs no runtime. Internally locked: any thread
/// may use it.
pub struct kvt_policy_t(());

/// The engine can use what lies behind a hole: objects leave in any order.
/// Without it those that continue an object leave before it.
pub const KVT_POLICY_HOLES: u64 = 1;
/// remember = 0 means nothing, not the default.
pub const KVT_POLICY_ZERO_REMEMBER: u64 = 2;
/// alpha and beta are meant as they are, also when they are 0.
pub const KVT_POLICY_COST: u64 = 4;

/// Scores candidates for the policy "custom": one number a row into
/// `out_scores`, the least leaves first, NaN is an error. Anything but KVT_OK
/// ends the call that asked, with that status and without any effect. Columns
/// and scores are borrowed for the call. Called on the thread that evicts or
/// selects, under no lock, so from several at once if several do; it may use the
/// policy. It must not unwind.
pub type kvt_policy_score_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        columns: *const kvt_policy_columns_t,
        now_ns: i64,
        out_scores: *mut f64,
    ) -> kvt_status_t,
>;

/// Says when a sequence is used next or ends: seconds from now and how sure
/// that is (0 to 1). Returns 1, or 0 when it does not know; what is no number or
/// out of range counts as that. Called as kvt_policy_score_fn is: in lookups and
/// records with a session (that is the sequence), where the answer acts as a
/// hint, and in selections for rows without a lifetime (the sequence is the id).
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

/// The callback table of the policy "custom".
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_custom_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Scores candidates.
    pub score: kvt_policy_score_fn,
    /// Handed to score; taken over on success only.
    pub user_data: *mut c_void,
    /// Releases user_data; may be null.
    pub destroy: kvt_destroy_fn,
}

/// The engine's own predictor of lifetimes.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_predictor_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Says when a sequence is used next.
    pub predict: kvt_policy_predict_fn,
    /// Handed to predict; taken over on success only.
    pub user_data: *mut c_void,
    /// Releases user_data; may be null.
    pub destroy: kvt_destroy_fn,
}

/// How to open a policy.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_opts_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_POLICY_*.
    pub flags: u64,
    /// The spec, such as "arc" or "qos(inner=s3fifo)"; null = "lru".
    pub spec: *const c_char,
    /// Length of the spec.
    pub spec_bytes: u64,
    /// Most objects at once; 0 = 1048576, at most 2^28.
    pub max_objects: u64,
    /// What fits, in units; 0 = not known.
    pub capacity_units: u64,
    /// Evictions that the log keeps; 0 = none, at most 2^20.
    pub log_entries: u64,
    /// Evicted ids that are remembered, to tell what is computed again; 0 =
    /// 1048576.
    pub remember: u64,
    /// Recompute cost of n tokens after l tokens of context: n * beta +
    /// alpha * (n * l + n * n / 2). 0 = as for a model of the 70B class.
    pub alpha: f64,
    /// See alpha.
    pub beta: f64,
    /// Scores for the spec "custom", which needs them; else may be null.
    pub custom: *const kvt_policy_custom_t,
    /// The engine's predictor; may be null.
    pub predictor: *const kvt_policy_predictor_t,
}

/// A policy that can be opened. Texts are UTF-8, not NUL-terminated, and live as
/// long as the library.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_info_t {
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

type Score =
    unsafe extern "C" fn(*mut c_void, *const kvt_policy_columns_t, i64, *mut f64) -> kvt_status_t;
type Predict = unsafe extern "C" fn(*mut c_void, u64, u64, u64, *mut f64, *mut f64) -> u32;

/// What the lock guards: the evictor, and room for the arrays of calls.
pub(crate) struct State {
    pub(crate) evictor: Evictor,
    pub(crate) victims: Vec<Victim>,
    pub(crate) news: Vec<New>,
    pub(crate) selection: Selection,
}

pub(crate) struct PolicyNoun {
    pub(crate) state: Mutex<State>,
    pub(crate) score: Option<Arc<Foreign<Score>>>,
    pub(crate) predict: Option<Arc<Foreign<Predict>>>,
}

noun!(PolicyNoun, kvt_policy_t, 8, "policy");

impl PolicyNoun {
    /// What the engine's predictor says of a sequence, in ns from now.
    pub(crate) fn predict(&self, sequence: u64, length: u64, max: u64) -> Option<(i64, f32)> {
        let predict = self.predict.as_ref()?;
        let (mut seconds, mut confidence) = (f64::NAN, f64::NAN);
        let known = predict.call(|function, user_data| {
            // SAFETY: function and data came together from the caller; the outputs
            // are local.
            unsafe { function(user_data, sequence, length, max, &mut seconds, &mut confidence) }
        });
        let sound = known != 0 && seconds >= 0.0 && (0.0..=1.0).contains(&confidence);
        // The cast saturates.
        sound.then_some(((seconds * 1e9) as i64, confidence as f32))
    }

    fn must_score(&self, spec: &str) -> Result<()> {
        let name = spec.split('(').next().unwrap_or(spec).trim();
        if name == custom::NAME && self.score.is_none() {
            fail!(Invalid, "the policy '{name}' needs a score function");
        }
        Ok(())
    }
}

/// A positive number that may be absent.
fn cost_part(value: f64, default: f64, meant: bool, name: &str) -> Result<f64> {
    match value {
        0.0 if !meant => Ok(default),
        _ if (0.0..=1e12).contains(&value) => Ok(value),
        _ => fail!(Invalid, "{name} is {value}"),
    }
}

fn options(given: &kvt_policy_opts_t) -> Result<Options> {
    known_flags(given.flags, KVT_POLICY_HOLES | KVT_POLICY_ZERO_REMEMBER | KVT_POLICY_COST)?;
    let size = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let or = |n: u64, default: usize, zero: bool| if n == 0 && !zero { default } else { size(n) };
    let meant = given.flags & KVT_POLICY_COST != 0;
    let usual = Cost::default();
    if given.log_entries > crate::policy::log::MAX_ENTRIES as u64 {
        fail!(Limit, "a log of {} entries is too long", given.log_entries);
    }
    Ok(Options {
        max_objects: or(given.max_objects, DEFAULT_OBJECTS, false),
        capacity_units: given.capacity_units,
        holes: given.flags & KVT_POLICY_HOLES != 0,
        log_entries: size(given.log_entries),
        remember: or(given.remember, DEFAULT_OBJECTS, given.flags & KVT_POLICY_ZERO_REMEMBER != 0),
        cost: Cost {
            alpha: cost_part(given.alpha, usual.alpha, meant, "alpha")?,
            beta: cost_part(given.beta, usual.beta, meant, "beta")?,
        },
    })
}

/// Opens a policy.
///
/// @param opts  What and how large; null for an lru with defaults.
/// @param out   The policy; close it with kvt_policy_close.
/// @param err   Explains a failure, with the offset in the spec and the nearest
///              name that exists; may be null.
/// @return KVT_OK; KVT_E_SPEC, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW,
///         KVT_E_NOMEM, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the policy. Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state.
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
    let state =
        State { evictor, victims: Vec::new(), news: Vec::new(), selection: Selection::default() };
    let noun =
        PolicyNoun { state: Mutex::new(state), score: score.clone(), predict: predict.clone() };
    noun.must_score(spec)?;
    let handle = insert(noun)?;
    score.iter().for_each(|f| f.keep());
    predict.iter().for_each(|f| f.keep());
    out.write(handle);
    Ok(())
}

/// Closes a policy. Calls that are inside it end first; its callbacks' user data
/// is released after them.
///
/// @param policy  Pointer to the handle, cleared on success; null, or a null
///                handle, is fine.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `policy` is null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_policy_close(policy: *mut *mut kvt_policy_t) -> kvt_status_t {
    free(policy, |_| Ok(()))
}

/// Goes on with another policy. Objects stay, in their order; what carries over
/// from the old policy does (times, counts, references, pins, sessions).
///
/// @param policy      The policy.
/// @param spec        The new spec, UTF-8.
/// @param spec_bytes  Its length.
/// @param err         Explains a failure; may be null.
/// @return KVT_OK; KVT_E_SPEC, KVT_E_INVALID ("custom" without a score function),
///         KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread; others wait while it sorts all objects. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_policy_switch(
    policy: *const kvt_policy_t,
    spec: *const c_char,
    spec_bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let spec = text("spec", spec, spec_bytes)?;
    let policy = enter(policy)?;
    policy.must_score(spec)?;
    policy.state.lock().evictor.switch(spec)
}

/// Changes what fits; nothing is evicted by that.
///
/// @param policy          The policy.
/// @param capacity_units  What fits, in units; 0 = not known.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// None beyond a handle.
#[capi]
pub unsafe extern "C" fn kvt_policy_set_capacity(
    policy: *const kvt_policy_t,
    capacity_units: u64,
) -> kvt_status_t {
    let policy = enter(policy)?;
    policy.state.lock().evictor.set_capacity(capacity_units);
    Ok(())
}

/// How many policies can be opened.
///
/// @param out_count  The number.
/// @return KVT_OK; KVT_E_INVALID.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out_count` is null or valid for writes.
#[capi]
pub unsafe extern "C" fn kvt_policy_count(out_count: *mut u64) -> kvt_status_t {
    require(out_count)?;
    out_count.write(ENTRIES.len() as u64);
    Ok(())
}

/// A policy that can be opened, by its place in the list: the number that the
/// log gives for it.
///
/// @param index  0 to kvt_policy_count - 1.
/// @param out    Filled in; start it with KVT_POLICY_INFO_INIT.
/// @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_policy_info(index: u64, out: *mut kvt_policy_info_t) -> kvt_status_t {
    check_out(out)?;
    let found = usize::try_from(index).ok().and_then(|index| ENTRIES.get(index));
    let entry = found.ok_or_else(|| {
        Error::new(Status::NotFound, format!("there are {} policies", ENTRIES.len()))
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

// Lookups, uses, insertions.

/// `session` is given.
pub const KVT_CONTEXT_SESSION: u64 = 1;
/// `priority` is given, also when it is 0.
pub const KVT_CONTEXT_PRIORITY: u64 = 2;
/// `parent` is given.
pub const KVT_OBJECT_HAS_PARENT: u64 = 1;
/// It will not be used again.
pub const KVT_HINT_DONE: u64 = 1;
/// `confidence` is meant as it is; without this flag it is 1.
pub const KVT_HINT_ZERO_CONFIDENCE: u64 = 2;

/// Why a sequence stopped: not said.
pub const KVT_STOP_UNKNOWN: u32 = 0;
/// It waits for a tool and goes on soon.
pub const KVT_STOP_TOOL_USE: u32 = 1;
/// The turn ended; a person reads it.
pub const KVT_STOP_END_TURN: u32 = 2;
/// The length limit was reached.
pub const KVT_STOP_LENGTH: u32 = 3;
/// It was cancelled.
pub const KVT_STOP_CANCELLED: u32 = 4;

/// Who asks. All of it is optional.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_context_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_CONTEXT_*.
    pub flags: u64,
    /// The session: the caller's number for a sequence.
    pub session: u64,
    /// Its tenant. Kept with the session: without KVT_CONTEXT_SESSION it must be 0.
    pub tenant: u32,
    /// Its class, at most 255: 0 leaves first; without KVT_CONTEXT_PRIORITY as before,
    /// at first 1. KVT_CONTEXT_PRIORITY needs KVT_CONTEXT_SESSION too.
    pub priority: u32,
    /// Tokens of the whole request; 0 = tokens_each for each id.
    pub length: u32,
    /// Tokens it can have; 0 = unknown.
    pub max_length: u32,
    /// Tokens of one object of its path, the last may have fewer; 0 = 1.
    pub tokens_each: u32,
    /// Always 0.
    pub reserved: u32,
}

/// An object to be inserted. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_object_t {
    /// The caller's number for it.
    pub id: u64,
    /// The object that it continues, with KVT_OBJECT_HAS_PARENT; one that is not there
    /// counts as none.
    pub parent: u64,
    /// Its size, 1 to 2^32 - 1.
    pub units: u64,
    /// KVT_ROW_*.
    pub flags: u64,
    /// When it is used next, as the caller expects; 0 = unknown.
    pub next_use_ns: i64,
    /// Recompute cost; 0 = from the tokens.
    pub cost: f64,
    /// Tokens before it.
    pub context: u32,
    /// Tokens in it.
    pub tokens: u32,
    /// Its layer, when objects are cells.
    pub layer: u32,
    /// Layers of the model; 0 = an object has all.
    pub layers: u32,
    /// Which chunk of its sequence it is.
    pub chunk: u32,
    /// Chunks of that sequence.
    pub chunks: u32,
}

/// What the engine says of the future of objects.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_hint_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_HINT_*.
    pub flags: u64,
    /// When they are used next, by the clock of now_ns; 0 = not said.
    pub next_use_ns: i64,
    /// How sure that is, 0 to 1.
    pub confidence: f64,
    /// KVT_STOP_*: why the request that used them stopped.
    pub stop: u32,
    /// Always 0.
    pub reserved: u32,
}

/// # Safety
/// As [`numbers`].
pub(crate) unsafe fn ids<'a>(data: *const u64, count: u64) -> Result<&'a [u64]> {
    // SAFETY: the caller's promise.
    unsafe { numbers(data, count, MAX_BATCH) }
}

/// # Safety
/// `who` is null or valid for the size it states.
pub(crate) unsafe fn context(context: *const kvt_policy_context_t) -> Result<Who> {
    // SAFETY: the caller's promise.
    let given = unsafe { read(context)? };
    known_flags(given.flags, KVT_CONTEXT_SESSION | KVT_CONTEXT_PRIORITY)?;
    no_reserved(given.reserved)?;
    let Ok(priority) = u8::try_from(given.priority) else {
        fail!(Invalid, "priority {} is above 255", given.priority);
    };
    if given.flags & KVT_CONTEXT_SESSION == 0 && given.tenant != 0 {
        fail!(Invalid, "tenant {} without a session: it is kept with that", given.tenant);
    }
    if given.flags & (KVT_CONTEXT_SESSION | KVT_CONTEXT_PRIORITY) == KVT_CONTEXT_PRIORITY {
        fail!(Invalid, "priority {priority} without a session: it is kept with that");
    }
    Ok(Who {
        session: (given.flags & KVT_CONTEXT_SESSION != 0).then_some(given.session),
        tenant: given.tenant,
        priority: (given.flags & KVT_CONTEXT_PRIORITY != 0).then_some(priority),
        length: given.length,
        max_length: given.max_length,
        tokens_each: given.tokens_each,
    })
}

pub(crate) fn sizes(units: &[u64]) -> Result<()> {
    match units.iter().position(|units| !(1..=MAX_UNITS).contains(units)) {
        Some(at) => fail!(Invalid, "size {at} is 0 or above {MAX_UNITS}"),
        None => Ok(()),
    }
}

impl PolicyNoun {
    /// After a call for a session: what the engine's predictor says of it.
    fn foresee(&self, context: &Who, ids: &[u64]) -> Result<()> {
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

/// Looks up a path of objects, first to last, and counts it in the statistics.
/// Found ones are touched, the last first, so that none is older than what
/// continues it. Where holes are allowed, objects behind one are found too.
///
/// @param policy       The policy.
/// @param now_ns       The caller's clock, which must not go back; 0 = the
///                     library's (CLOCK_MONOTONIC).
/// @param context          Who asks; may be null.
/// @param ids          The path.
/// @param count        How many, at most 2^24.
/// @param out_found    1 or 0 for each id; may be null.
/// @param out_leading  How many from the start on are there; may be null.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID (also a clock that went back), KVT_E_LIMIT,
///         KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
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
        // SAFETY: not null, with room for `count` bytes, by the caller's promise.
        false => std::slice::from_raw_parts_mut(out_found, ids.len()),
    };
    let policy = enter(policy)?;
    let leading = policy.state.lock().evictor.lookup(now_ns, &context, ids, found)?;
    policy.foresee(&context, ids)?;
    put(out_leading, leading as u64);
    Ok(())
}

/// Touches objects, the last first, without counting a lookup. Those that are
/// not there are passed over.
///
/// @param policy       The policy.
/// @param now_ns       See kvt_policy_lookup.
/// @param context          Who uses them; may be null.
/// @param ids          The objects.
/// @param count        How many.
/// @param out_touched  How many were there; may be null.
/// @param err          Explains a failure; may be null.
/// @return As kvt_policy_lookup.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
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

/// Notes a use of objects ("update access"): those that are there are touched,
/// the others inserted; all or none. For engines that keep their own tables and
/// choose by kvt_policy_select: recorded uses win over columns.
///
/// @param policy     The policy.
/// @param now_ns     See kvt_policy_lookup.
/// @param context        Who uses them; may be null.
/// @param ids        The objects.
/// @param units      Sizes of those that are new; null = 1 each.
/// @param count      How many.
/// @param out_added  How many were new; may be null.
/// @param err        Explains a failure; may be null.
/// @return As kvt_policy_lookup; KVT_E_LIMIT when the table is full.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
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
    let units_there = if units.is_null() { 0 } else { count };
    let (context, ids, units) =
        (self::context(context)?, self::ids(ids, count)?, self::ids(units, units_there)?);
    sizes(units)?;
    let policy = enter(policy)?;
    let added = policy.state.lock().evictor.record(now_ns, &context, ids, units)?;
    policy.foresee(&context, ids)?;
    put(out_added, added as u64);
    Ok(())
}

fn new_row(row: &kvt_policy_object_t) -> Result<New> {
    known_flags(row.flags, KVT_OBJECT_HAS_PARENT)?;
    let id = row.id;
    if !(1..=MAX_UNITS).contains(&row.units) {
        fail!(Invalid, "object {id} has a size of {}, allowed is 1 to {MAX_UNITS}", row.units);
    }
    let (Ok(layer), Ok(layers)) = (u16::try_from(row.layer), u16::try_from(row.layers)) else {
        fail!(Limit, "object {id} is in layer {} of {}", row.layer, row.layers);
    };
    if !(0.0..=f64::from(f32::MAX)).contains(&row.cost) {
        fail!(Invalid, "object {id} has a cost of {}", row.cost);
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
    Ok(New { id, parent, units: row.units, facts })
}

/// Inserts objects, all or none.
///
/// @param policy        The policy.
/// @param now_ns        See kvt_policy_lookup.
/// @param context           Who brought them; may be null.
/// @param rows          The objects; a parent stands before what continues it.
/// @param count         How many.
/// @param stride_bytes  sizeof(kvt_policy_object_t).
/// @param err           Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID (an id that is there, a size of 0, a clock that
///         went back), KVT_E_LIMIT (the table is full: evict), KVT_E_TOO_NEW,
///         KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
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
    let State { evictor, news, .. } = &mut *state;
    news.clear();
    if news.try_reserve(rows.len()).is_err() {
        fail!(NoMem, "no memory for {} rows", rows.len());
    }
    for at in 0..rows.len() {
        news.push(new_row(&rows.get(at)?)?);
    }
    evictor.insert(now_ns, &context, news)
}

// Removals, references, pins, hints.

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
pub unsafe extern "C" fn kvt_policy_report_evicted(
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
    known_flags(given.flags, KVT_HINT_DONE | KVT_HINT_ZERO_CONFIDENCE)?;
    let stop = match Stop::from_code(u64::from(given.stop)) {
        Some(stop) if given.reserved == 0 => stop,
        _ => fail!(Invalid, "stop is {}, reserved is {}", given.stop, given.reserved),
    };
    let sure = given.flags & KVT_HINT_ZERO_CONFIDENCE == 0 && given.confidence == 0.0;
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

// Eviction from the policy's own table.

/// One that leaves. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_victim_t {
    /// Who.
    pub id: u64,
    /// What it frees.
    pub units: u64,
}

/// What an eviction came to. The text lives as long as the library.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_outcome_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// How many leave.
    pub victims: u64,
    /// What they free.
    pub freed_units: u64,
    /// What is missing to what was asked.
    pub shortfall_units: u64,
    /// How long it took to choose; 0 = not timed (one in 16 is).
    pub decision_ns: u64,
    /// The policy that decided, which may be another than the one that was opened.
    pub decided_by: *const c_char,
    /// Length of that name.
    pub decided_by_bytes: u64,
}

/// The caller's score function as a scorer.
struct CallerScores<'a>(&'a PolicyNoun);

impl Scorer for CallerScores<'_> {
    fn score(&mut self, view: &Columns, now: i64, out: &mut [f64]) -> Result<()> {
        let Some(score) = &self.0.score else {
            fail!(Invalid, "the policy 'custom' needs a score function");
        };
        let columns = columns_for_c(view);
        let status = score.call(|function, user_data| {
            // SAFETY: function and data came together from the caller; columns and
            // scores have as many entries as the columns say.
            unsafe { function(user_data, &columns, now, out.as_mut_ptr()) }
        });
        match status {
            KVT_OK => Ok(()),
            code => {
                let status = Status::from_code(code).unwrap_or(Status::Invalid);
                Err(Error::new(status, format!("the score function gave status {code}")))
            }
        }
    }
}

impl PolicyNoun {
    /// Scores candidates by the caller's function. No lock is held.
    pub(crate) fn score_rows(&self, view: &Columns, now_ns: i64) -> Result<Vec<f64>> {
        let now = match now_ns {
            0 => i64::try_from(Clock::real().now_ns()).unwrap_or(i64::MAX),
            now => now,
        };
        custom::score(&mut CallerScores(self), view, now)
    }
}

/// How often a custom policy is asked again because objects changed meanwhile.
const ROUNDS: u32 = 4;

/// Leaves the victims in `state.victims`.
fn evict_now(state: &mut State, now_ns: i64, ask: &ScoredEviction) -> Result<Outcome> {
    let State { evictor, victims, .. } = state;
    make_room(victims, ask.most.min(evictor.objects().len()))?;
    match ask.keep {
        true => evictor.preview_most(now_ns, ask.required, ask.most, victims),
        false => evictor.evict_most(now_ns, ask.required, ask.most, victims),
    }
}

fn make_room(victims: &mut Vec<Victim>, most: usize) -> Result<()> {
    victims.clear();
    if victims.try_reserve(most).is_err() {
        fail!(NoMem, "no memory to note {most} victims");
    }
    Ok(())
}

/// Snapshot, unlock, score, lock, look again, evict; and once more for what
/// changed meanwhile.
fn evict_custom(
    noun: &PolicyNoun,
    now_ns: i64,
    ask: &ScoredEviction,
    out: &Strided<kvt_policy_victim_t>,
) -> Result<(Outcome, usize)> {
    noun.state.lock().evictor.check_time(now_ns)?;
    let (mut whole, mut count) = (Outcome::default(), 0);
    for _ in 0..ROUNDS {
        let required = ask.required - whole.freed_units;
        let left = ScoredEviction { required, most: ask.most - count, ..*ask };
        let (one, found) = match evict_round(noun, now_ns, &left, out, count) {
            // What earlier rounds evicted is gone: it must be told.
            Err(_) if count > 0 => break,
            round => round?,
        };
        count += found;
        let freed_units = whole.freed_units + one.freed_units;
        let decision_ns = whole.decision_ns + one.decision_ns;
        whole = Outcome { freed_units, decision_ns, ..one };
        if one.shortfall_units == 0 || ask.keep || count == ask.most || found == 0 {
            break;
        }
    }
    Ok((whole, count))
}

/// One round; its victims are put behind `from` others.
fn evict_round(
    noun: &PolicyNoun,
    now_ns: i64,
    ask: &ScoredEviction,
    out: &Strided<kvt_policy_victim_t>,
    from: usize,
) -> Result<(Outcome, usize)> {
    let snapshot = noun.state.lock().evictor.snapshot()?;
    // A scorer is never asked about nobody.
    let scores = match snapshot.len() {
        0 => Vec::new(),
        _ => noun.score_rows(&snapshot.view(), now_ns)?,
    };
    let mut state = noun.state.lock();
    let State { evictor, victims, .. } = &mut *state;
    make_room(victims, ask.most.min(snapshot.len()))?;
    let one = evictor.evict_by_scores(now_ns, &snapshot, &scores, ask, victims)?;
    give_victims(victims, out, from);
    Ok((one, victims.len()))
}

fn give_victims(victims: &[Victim], out: &Strided<kvt_policy_victim_t>, from: usize) {
    for (i, victim) in victims.iter().enumerate() {
        out.put(from + i, &kvt_policy_victim_t { id: victim.id, units: victim.units });
    }
}

fn evict(
    noun: &PolicyNoun,
    now_ns: i64,
    ask: &ScoredEviction,
    out: &Strided<kvt_policy_victim_t>,
) -> Result<kvt_policy_outcome_t> {
    let mut state = noun.state.lock();
    let (outcome, count) = if state.evictor.name() == custom::NAME {
        drop(state);
        evict_custom(noun, now_ns, ask, out)?
    } else {
        let outcome = evict_now(&mut state, now_ns, ask)?;
        give_victims(&state.victims, out, 0);
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

/// Evicts until enough is free: the victims are gone from the table, and what
/// they held is the caller's to free. None leaves without which it would be
/// enough. Too few that may leave, or too little room for them, is a shortfall
/// and no error.
///
/// @param policy          The policy.
/// @param now_ns          See kvt_policy_lookup.
/// @param required_units  What must be free; 0 frees nothing.
/// @param victims         Receives who leaves, in the order of leaving.
/// @param capacity        Room there: the most that leave, at most 2^28.
/// @param stride_bytes    sizeof(kvt_policy_victim_t).
/// @param out             What it came to; start it with KVT_POLICY_OUTCOME_INIT.
/// @param err             Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID (also a clock that went back, a score that is no
///         number), KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC; what a custom policy's score function gives.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; `out` for the size it states.
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
    let ask = ScoredEviction { required: required_units, most: victims.len(), keep: false };
    write(out, &evict(&*enter(policy)?, now_ns, &ask, &victims)?);
    Ok(())
}

/// Says who would leave now, without anything leaving. A policy that moves objects
/// while it searches (arc's kin, queues with a hand), or that learns, may choose others
/// when it is asked again.
///
/// @param policy          The policy.
/// @param now_ns          See kvt_policy_lookup.
/// @param required_units  What must be free.
/// @param victims         Receives who would leave, in the order of leaving.
/// @param capacity        Room there.
/// @param stride_bytes    sizeof(kvt_policy_victim_t).
/// @param out             What it came to; start it with KVT_POLICY_OUTCOME_INIT.
/// @param err             Explains a failure; may be null.
/// @return As kvt_policy_evict.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; `out` for the size it states.
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
    let ask = ScoredEviction { required: required_units, most: victims.len(), keep: true };
    write(out, &evict(&*enter(policy)?, now_ns, &ask, &victims)?);
    Ok(())
}

// Selection among candidates of the engine.

/// The last victim may give a tail of its blocks and keep the rest.
pub const KVT_SELECT_TAIL: u64 = 1;

/// Candidates as columns: one array a fact, each with `rows` entries. Null = the
/// default holds for every row. Arrays are aligned as C has them.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_columns_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// How many candidates there are, at most 2^28.
    pub rows: u64,
    /// Who; required.
    pub ids: *const u64,
    /// Blocks that each holds; default 1.
    pub blocks: *const u64,
    /// When it was made; default 0.
    pub created_ns: *const i64,
    /// When it was used last; default: when it was made.
    pub last_access_ns: *const i64,
    /// How often it was used; default 1.
    pub count: *const u64,
    /// Its class, 0 leaves first; default 1.
    pub priority: *const u8,
    /// Not 0: stays.
    pub pinned: *const u8,
    /// Time until its next use or its end, below 0 = unknown; default unknown.
    pub lifetime_ns: *const i64,
    /// How sure that is, 0 to 1; default 1.
    pub confidence: *const f32,
    /// Tokens it has; default 0.
    pub length: *const u64,
    /// Tokens it can have; default unknown.
    pub max_length: *const u64,
    /// Who holds it: above 1 it is shared and stays; default 1.
    pub refs: *const u32,
    /// Whose it is; default 0.
    pub tenant: *const u32,
    /// Recompute cost; default: from context and tokens.
    pub cost: *const f64,
    /// Tokens before it; default 0.
    pub context: *const u64,
    /// Tokens in it; default: its length.
    pub tokens: *const u64,
    /// Its layer; default 0.
    pub layer: *const u32,
    /// Layers of the model, for candidates that are cells; default 0.
    pub layers: *const u32,
    /// Which chunk of its sequence it is; default 0.
    pub chunk: *const u32,
    /// Chunks of its sequence; default 0.
    pub chunks: *const u32,
    /// Where the blocks of each row start in `block_ids`, and the end of the last:
    /// rows + 1 entries. Null: blocks are only counted.
    pub block_offsets: *const u64,
    /// The blocks of all rows, each row's in the order of its tokens. One that
    /// several rows list is shared: it counts once, and is free when all who hold
    /// it have left.
    pub block_ids: *const u64,
    /// Who holds each of `block_ids`, in all; 0, and null: the rows that list it.
    pub block_refs: *const u32,
    /// Entries of block_ids, and of block_refs.
    pub block_entries: u64,
}

/// A candidate that was chosen. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_pick_t {
    /// Its row.
    pub row: u64,
    /// Who.
    pub id: u64,
    /// Blocks that are free by it.
    pub freed_blocks: u64,
    /// Of its blocks it keeps so many, the first ones; 0 = it leaves.
    pub kept_blocks: u64,
    /// Where its freed blocks start in the selection's block_ids.
    pub first_block: u64,
}

/// What was chosen: the caller's arrays, and what the library says. Start it with
/// KVT_POLICY_SELECTION_INIT and set the arrays.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_selection_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// In: receives who was chosen, in the order of leaving.
    pub victims: *mut kvt_policy_pick_t,
    /// In: room there; as many as there are rows is always enough.
    pub victim_capacity: u64,
    /// In: sizeof(kvt_policy_pick_t).
    pub stride_bytes: u64,
    /// In: receives the blocks that are free, by victim, where the columns list
    /// blocks; may be null.
    pub block_ids: *mut u64,
    /// In: room there.
    pub block_capacity: u64,
    /// How many were chosen; the number needed with KVT_E_TOO_SMALL.
    pub victim_count: u64,
    /// How many block_ids there are; the number needed with KVT_E_TOO_SMALL.
    pub block_count: u64,
    /// How many blocks are free.
    pub freed_blocks: u64,
    /// What is missing to what was asked.
    pub shortfall_blocks: u64,
    /// How long it took to choose.
    pub decision_ns: u64,
    /// The policy that decided, which may be another than the one that was
    /// opened. The text lives as long as the library.
    pub decided_by: *const c_char,
    /// Length of that name.
    pub decided_by_bytes: u64,
}

/// A column; null is an absent one.
///
/// # Safety
/// `data` is null or valid for reads of `rows` numbers.
unsafe fn column<'a, T>(data: *const T, rows: u64) -> Result<&'a [T]> {
    // SAFETY: the caller's promise.
    unsafe { numbers(data, if data.is_null() { 0 } else { rows }, MAX_ROWS + 1) }
}

/// # Safety
/// Every column is null or valid for as many rows as are stated.
unsafe fn columns<'a>(c: &kvt_policy_columns_t) -> Result<Columns<'a>> {
    let rows = c.rows;
    if c.block_offsets.is_null() && c.block_entries != 0 {
        fail!(Invalid, "block_ids without block_offsets");
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

/// Columns as a score function sees them.
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

/// Rows without a lifetime get the one that the engine's predictor says.
fn foresee(
    noun: &PolicyNoun,
    columns: &Columns,
    lifetimes: &mut Vec<i64>,
    sure: &mut Vec<f32>,
) -> Result<()> {
    let rows = columns.rows();
    if lifetimes.try_reserve(rows).is_err() || sure.try_reserve(rows).is_err() {
        fail!(NoMem, "no memory for the lifetimes of {rows} candidates");
    }
    for (row, &id) in columns.ids.iter().enumerate() {
        let known = (columns.lifetime_ns(row), columns.confidence(row));
        let told = match known.0 {
            ..0 => noun.predict(id, columns.length(row), columns.max_length(row)),
            _ => None,
        };
        let (lifetime, confidence) = told.unwrap_or(known);
        lifetimes.push(lifetime);
        sure.push(confidence);
    }
    Ok(())
}

/// Leaves the answer in `state.selection`, and looks whether it fits.
fn select(
    noun: &PolicyNoun,
    now_ns: i64,
    columns: &Columns,
    required: u64,
    options: &SelectOptions,
    out: &mut kvt_policy_selection_t,
    picks: &Strided<kvt_policy_pick_t>,
) -> Result<()> {
    let (mut lifetimes, mut sure) = (Vec::new(), Vec::new());
    let mut columns = *columns;
    if noun.predict.is_some() {
        columns.validate()?;
        foresee(noun, &columns, &mut lifetimes, &mut sure)?;
        columns.lifetime_ns = &lifetimes;
        columns.confidence = &sure;
    }
    let (mut last, mut count, mut scores, mut by) = (Vec::new(), Vec::new(), Vec::new(), None);
    let mut state = noun.state.lock();
    if state.evictor.name() == custom::NAME && columns.rows() > 0 {
        state.evictor.recorded(&columns, &mut last, &mut count)?;
        drop(state);
        columns.last_access_ns = &last;
        columns.count = &count;
        scores = noun.score_rows(&columns, now_ns)?;
        by = Some(custom::NAME);
        state = noun.state.lock();
    }
    let State { evictor, selection, .. } = &mut *state;
    let done = evictor.select_by(now_ns, &columns, &scores, required, options, selection);
    if done.as_ref().err().is_none_or(|error| error.status() == Status::TooSmall) {
        out.victim_count = selection.victims.len() as u64;
        out.block_count = selection.block_ids.len() as u64;
    }
    done?;
    tell(selection, by, out, picks);
    Ok(())
}

fn tell(
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
        // SAFETY: not null, with room for `block_capacity` >= `blocks` numbers.
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

/// Chooses candidates that free enough blocks, in the policy's order, the least
/// first, and none without which it would be enough. Uses that were recorded of
/// an id (kvt_policy_record and the like) win over its columns; what these say of
/// its context, tokens, layer, layers, chunk, chunks and cost is noted of the
/// object in the table, for policies that want to know. Rows that are pinned
/// or shared are never chosen, nor are those whose object in the table is
/// referenced, pinned or continued by another. Nothing is evicted: the caller
/// frees what was chosen, and removes it from the table where it is in one. The
/// order of the rows does not matter.
///
/// @param policy           The policy.
/// @param now_ns           See kvt_policy_lookup.
/// @param candidates       The columns.
/// @param required_blocks  What must be free; 0 frees nothing. When it cannot be,
///                         everything that may leave is chosen and the shortfall
///                         told.
/// @param flags            KVT_SELECT_*.
/// @param selection        Filled in. When its arrays are too small nothing but
///                         the counts is, with KVT_E_TOO_SMALL.
/// @param err              Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID (an id that is there twice, a confidence or cost
///         that is no number, a clock that went back), KVT_E_TOO_SMALL,
///         KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC; what a custom policy's score function gives.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; structs for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_policy_select(
    policy: *const kvt_policy_t,
    now_ns: i64,
    candidates: *const kvt_policy_columns_t,
    required_blocks: u64,
    flags: u64,
    selection: *mut kvt_policy_selection_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    known_flags(flags, KVT_SELECT_TAIL)?;
    check_out(selection)?;
    let (columns, mut out) = (columns(&read(candidates)?)?, read(selection.cast_const())?);
    let room = out.victim_capacity.min(columns.rows() as u64);
    let picks = Strided::new(out.victims, room, out.stride_bytes, MAX_ROWS as u64)?;
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

// Statistics and the log of evictions.

/// What a policy has counted.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_stats_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Objects in the table.
    pub objects: u64,
    /// Most there can be.
    pub max_objects: u64,
    /// The sum of their sizes.
    pub units: u64,
    /// What fits; 0 = not known.
    pub capacity_units: u64,
    /// Sessions that are known.
    pub sessions: u64,
    /// Tenants that are told apart.
    pub tenants: u64,
    /// Lookups.
    pub requests: u64,
    /// Objects that they asked for.
    pub references: u64,
    /// Of those, found and usable.
    pub hits: u64,
    /// Of those, evicted before and not there: to be computed again.
    pub evicted_references: u64,
    /// Tokens asked for.
    pub tokens: u64,
    /// Tokens found.
    pub hit_tokens: u64,
    /// Recompute cost of what was asked for.
    pub cost: f64,
    /// Recompute cost of what was found.
    pub hit_cost: f64,
    /// Objects inserted.
    pub inserts: u64,
    /// Objects evicted.
    pub evictions: u64,
    /// Units they had.
    pub evicted_units: u64,
    /// Calls that asked for victims, selections included.
    pub decisions: u64,
    /// Calls that freed less than asked.
    pub shortfalls: u64,
    /// Decisions that were timed: every selection, one eviction in 16.
    pub decisions_timed: u64,
    /// Half of those took no longer.
    pub decision_p50_ns: u64,
    /// 99 of 100 took no longer.
    pub decision_p99_ns: u64,
    /// The longest.
    pub decision_max_ns: u64,
    /// The mean.
    pub decision_mean_ns: u64,
    /// hits / references; this and the ratios below are 0 of nothing.
    pub hit_ratio: f64,
    /// hit_tokens / tokens.
    pub token_hit_ratio: f64,
    /// hit_cost / cost.
    pub cost_hit_ratio: f64,
    /// evicted_references / references.
    pub re_prefill_rate: f64,
    /// Jain's index over sessions of tokens found in parts of those that an unbounded
    /// cache would have found: 1 when all fare alike, 1/n when one has everything.
    pub jain_sessions: f64,
    /// The same over tenants.
    pub jain_tenants: f64,
    /// Metadata of the table for each object when it is full.
    pub bytes_per_object: f64,
    /// The number that the next eviction has in the log.
    pub next_log_number: u64,
    /// The policy's name. The text lives as long as the library.
    pub name: *const c_char,
    /// Length of that name.
    pub name_bytes: u64,
}

/// An eviction in the log. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_log_entry_t {
    /// Counts evictions from 1; a gap means that entries were overwritten.
    pub number: u64,
    /// When, by the caller's clock.
    pub at_ns: i64,
    /// Who.
    pub id: u64,
    /// Its session; meaningful when `has_session` is not 0.
    pub session: u64,
    /// When it was used last, as far as the policy noted.
    pub stamp_ns: i64,
    /// Why: what counted in the policy's order, the less the earlier.
    pub score: f64,
    /// What was freed.
    pub units: u32,
    /// Uses since it was inserted.
    pub hits: u32,
    /// Which of the policy's queues it came from.
    pub queue: u32,
    /// Not 0: `session` is known.
    pub has_session: u32,
    /// The policy that decided: its index for kvt_policy_info.
    pub policy: u32,
    /// Always 0.
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

/// What a policy has counted since it was opened.
///
/// @param policy  The policy.
/// @param out     Filled in; start it with KVT_POLICY_STATS_INIT.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread; looks at every session, so not in a hot path. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
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

/// The spec of a policy, in canonical form.
///
/// @param policy        The policy.
/// @param out           Receives it, not NUL-terminated; may be null with
///                      out_capacity 0 to learn the size.
/// @param out_capacity  Room at `out`.
/// @param out_bytes     Its length; also written with KVT_E_TOO_SMALL. May be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_policy_spec(
    policy: *const kvt_policy_t,
    out: *mut c_char,
    out_capacity: u64,
    out_bytes: *mut u64,
) -> kvt_status_t {
    if out.is_null() && out_capacity > 0 {
        fail!(Invalid, "the output pointer is null and its capacity {out_capacity}");
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
    // SAFETY: room for `out_capacity` bytes, which is enough.
    std::ptr::copy_nonoverlapping(spec.as_ptr(), out.cast(), spec.len());
    Ok(())
}

fn gauge(evictor: &Evictor, name: &str) -> Result<f64> {
    let (mut known, mut found) = (Vec::new(), None);
    evictor.policy().gauges(evictor.objects(), &mut |gauge, value| {
        known.push(gauge);
        if gauge == name {
            found = Some(value);
        }
    });
    found.ok_or_else(|| {
        let near = match nearest(name, &known) {
            Some(near) => format!("did you mean '{near}'?"),
            None => format!("it has: {}", known.join(", ")),
        };
        let text = format!("'{}' has no gauge '{name}'; {near}", evictor.name());
        Error::new(Status::NotFound, text)
    })
}

/// A number of the policy's own, such as arc's "arc_p".
///
/// @param policy      The policy.
/// @param name        Which, UTF-8.
/// @param name_bytes  Length of the name.
/// @param out_value   The number.
/// @param err         Names what there is; may be null.
/// @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
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

/// The numbers of a policy's own one after the other, such as all that an exporter
/// shows. Another policy (kvt_policy_switch) has others.
///
/// @param policy          The policy.
/// @param index           Which, from 0.
/// @param out_name        Its name, UTF-8, not terminated; lives as long as the
///                        library. May be null.
/// @param out_name_bytes  Length of the name; may be null.
/// @param out_value       The number; may be null.
/// @return KVT_OK; KVT_E_NOT_FOUND past the last, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for writes.
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

/// Reads the log of evictions, the oldest first.
///
/// @param policy        The policy.
/// @param from_number   The first that is wanted, such as the last one read plus
///                      1; those that were overwritten are missing.
/// @param entries       Receives them.
/// @param capacity      Room there.
/// @param stride_bytes  sizeof(kvt_policy_log_entry_t).
/// @param out_count     How many were written.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
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
    let room = Strided::new(entries, capacity, stride_bytes, 2 * MAX_ENTRIES as u64)?;
    let policy = inspect(policy)?;
    let state = policy.state.lock();
    let mut count = 0;
    for entry in state.evictor.log.since(from_number).take(room.len()) {
        room.put(count, &log_entry(entry));
        count += 1;
    }
    out_count.write(count as u64);
    Ok(())
}

// Advice.

/// shrink_above = 0 is meant, not the default.
pub const KVT_ADVICE_ZERO_SHRINK: u64 = 1;
/// grow_below = 0 is meant, not the default.
pub const KVT_ADVICE_ZERO_GROW: u64 = 2;

/// What advice goes by.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_advice_rules_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_ADVICE_*.
    pub flags: u64,
    /// Above this share of references computed again, batches are halved; 0 = 0.3.
    pub shrink_above: f64,
    /// Below this many evictions in a window, batches are doubled; 0 = 10.
    pub grow_below: u64,
    /// Smallest batch; 0 = 1.
    pub min_batch: u64,
    /// Largest batch; 0 = 128.
    pub max_batch: u64,
    /// Lookups that make a window; 0 = 100.
    pub window: u64,
    /// Windows in a row that must agree; 0 = 2.
    pub patience: u64,
}

/// What a scheduler is advised.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_advice_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// The batch to run.
    pub batch: u64,
    /// Re-prefill rate of the last full window.
    pub re_prefill_rate: f64,
    /// Evictions in it.
    pub evictions: u64,
}

/// Advises a scheduler how large a batch to run: half when too much is computed
/// again, twice as much when hardly anything is evicted, judged by windows of
/// lookups that must agree. A change is advised once.
///
/// @param policy  The policy.
/// @param batch   The batch that runs.
/// @param out     Filled in; start it with KVT_POLICY_ADVICE_INIT.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
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
    let usual = Rules::default();
    let or = |n: u64, default: u64| if n == 0 { default } else { n };
    let shrink = given.shrink_above != 0.0 || given.flags & KVT_ADVICE_ZERO_SHRINK != 0;
    let rules = Rules {
        shrink_above: if shrink { given.shrink_above } else { usual.shrink_above },
        grow_below: match given.flags & KVT_ADVICE_ZERO_GROW {
            0 => or(given.grow_below, usual.grow_below),
            _ => given.grow_below,
        },
        min_batch: or(given.min_batch, usual.min_batch),
        max_batch: or(given.max_batch, usual.max_batch),
        window: or(given.window, usual.window),
        patience: u32::try_from(or(given.patience, usual.patience.into())).unwrap_or(u32::MAX),
    };
    if !(0.0..=1.0).contains(&rules.shrink_above) {
        fail!(Invalid, "shrink_above is {}, not 0 to 1", rules.shrink_above);
    }
    if rules.min_batch > rules.max_batch {
        fail!(Invalid, "min_batch is {}, max_batch {}", rules.min_batch, rules.max_batch);
    }
    Ok(rules)
}

/// Changes what advice goes by, from the next window on.
///
/// @param policy  The policy.
/// @param given   The rules; null for the defaults.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `given` is null or valid for the size it states; `err` null or valid.
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
    fn what_is_kept_with_a_session_is_refused_without_one() {
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
        let both = KVT_CONTEXT_SESSION | KVT_CONTEXT_PRIORITY;
        let whole = (Some(7), 5, Some(2));
        let told = |context: Who| (context.session, context.tenant, context.priority);
        assert_eq!(given(both, 5, 2).map(told).ok(), Some(whole));
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
