//! Policies: who leaves first, among objects of the library's table or of the
//! engine's own. Opening, closing, and what there is to open.

use std::ffi::{c_char, c_void};

use crate::base::callback::Foreign;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, Mutex};
use crate::fail;
use crate::ffi::abi::{
    Plain, capi, check_out, enter, foreign, free, insert, known_flags, noun, read, require, text,
    write,
};
use crate::ffi::error::kvt_error_t;
use crate::ffi::logging::kvt_destroy_fn;
use crate::ffi::policy_select::kvt_policy_columns_t;
use crate::ffi::status::kvt_status_t;
use crate::meta::cost::Cost;
use crate::policy::batch::Selection;
use crate::policy::custom;
use crate::policy::evict::Victim;
use crate::policy::evictor::{DEFAULT_OBJECTS, Evictor, New, Options};
use crate::policy::registry::ENTRIES;

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
