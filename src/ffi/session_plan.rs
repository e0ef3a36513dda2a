//! Plans: what it takes to run a session again.

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::fail;
use crate::ffi::abi::{
    Plain, Strided, capi, check_optional_out, enter, give, known_flags, read, write,
};
use crate::ffi::error::kvt_error_t;
use crate::ffi::namespace_look::{KVT_TIER_NONE, MAX_ROWS};
use crate::ffi::session::kvt_session_t;
use crate::ffi::status::kvt_status_t;
use crate::meta::cost::Cost;
use crate::store::job_queues::LANES;
use crate::store::plan::StepKind;
use crate::store::state::plans::{Leg, PlanTerms, SessionPlan};

/// Loads and computing do not go on at the same time, but one after the other.
pub const KVT_PLAN_NO_OVERLAP: u64 = 1;
/// What is on its way into the store is not counted on.
pub const KVT_PLAN_NO_WAIT: u64 = 2;
/// `alpha_ns` and `beta_ns` are given, also when they are 0.
pub const KVT_PLAN_COST: u64 = 4;

/// Nothing is to be done: the tokens are where the engine computes, or not needed.
pub const KVT_PLAN_RESIDENT: u32 = 0;
/// Load them (kvt_session_get).
pub const KVT_PLAN_LOAD: u32 = 1;
/// Compute them.
pub const KVT_PLAN_RECOMPUTE: u32 = 2;

/// How the engine will run. Zero is the default everywhere.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_plan_terms_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_PLAN_NO_OVERLAP, KVT_PLAN_NO_WAIT, KVT_PLAN_COST.
    pub flags: u64,
    /// With KVT_PLAN_COST: nanoseconds a token and token of context. Without it plans
    /// go by kvt_namespace_prefill.
    pub alpha_ns: f64,
    /// With KVT_PLAN_COST: nanoseconds a token.
    pub beta_ns: f64,
    /// KVT_PRIORITY_* of the loads.
    pub priority: u32,
    /// Always 0.
    pub reserved: u32,
}

/// Tokens in a row with which the same is to be done. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_plan_step_t {
    /// The first one.
    pub first_token: u64,
    /// How many.
    pub tokens: u64,
    /// KVT_PLAN_RESIDENT, KVT_PLAN_LOAD or KVT_PLAN_RECOMPUTE.
    pub kind: u32,
    /// The farthest tier that something of them is loaded from, KVT_TIER_*; or
    /// KVT_TIER_NONE.
    pub tier: u32,
    /// Bytes to be loaded from memory.
    pub host_bytes: u64,
    /// Bytes to be loaded from disk.
    pub disk_bytes: u64,
    /// Bytes to be loaded from elsewhere.
    pub remote_bytes: u64,
    /// How long this takes by itself, predicted.
    pub predicted_ns: u64,
    /// Bytes to be copied from the device tier, on the device.
    pub device_bytes: u64,
}

/// What a plan comes to.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_plan_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// All tokens of the session.
    pub tokens: u64,
    /// Tokens with which nothing is to be done.
    pub resident_tokens: u64,
    /// Tokens to be loaded.
    pub load_tokens: u64,
    /// Tokens to be computed.
    pub recompute_tokens: u64,
    /// Until all is there, predicted, with what waits before it.
    pub total_ns: u64,
    /// Of that, loading alone.
    pub load_ns: u64,
    /// Of that, computing alone.
    pub compute_ns: u64,
    /// What computing all of it would take.
    pub without_ns: u64,
}

fn terms_of(given: &kvt_plan_terms_t) -> Result<PlanTerms> {
    known_flags(given.flags, KVT_PLAN_NO_OVERLAP | KVT_PLAN_NO_WAIT | KVT_PLAN_COST)?;
    let is_set = |flag: u64| given.flags & flag != 0;
    if given.reserved != 0 {
        fail!(Invalid, "reserved is {}", given.reserved);
    }
    if given.priority as usize >= LANES {
        fail!(Invalid, "priority {} is none of 0 to {}", given.priority, LANES - 1);
    }
    let (alpha, beta) = (given.alpha_ns, given.beta_ns);
    let cost = match is_set(KVT_PLAN_COST) {
        true => Some(Cost { alpha, beta }),
        false if alpha != 0.0 || beta != 0.0 => fail!(Invalid, "a cost without KVT_PLAN_COST"),
        false => None,
    };
    let sound = |x: f64| x.is_finite() && (0.0..=1e15).contains(&x);
    if !sound(alpha) || !sound(beta) {
        fail!(Invalid, "a cost of {alpha} and {beta} ns is not 0 to 1e15");
    }
    Ok(PlanTerms {
        overlap: !is_set(KVT_PLAN_NO_OVERLAP),
        wait: !is_set(KVT_PLAN_NO_WAIT),
        lane: given.priority as usize,
        cost,
    })
}

fn step(leg: &Leg) -> kvt_plan_step_t {
    let [host_bytes, disk_bytes, remote_bytes, device_bytes] = leg.bytes;
    let from = [
        (remote_bytes, Tier::Remote),
        (disk_bytes, Tier::Disk),
        (host_bytes, Tier::Host),
        (device_bytes, Tier::Device),
    ];
    let farthest = from.into_iter().find(|&(bytes, _)| bytes > 0);
    kvt_plan_step_t {
        first_token: leg.first_token,
        tokens: leg.tokens,
        kind: match leg.kind {
            StepKind::Resident => KVT_PLAN_RESIDENT,
            StepKind::Load => KVT_PLAN_LOAD,
            StepKind::Recompute => KVT_PLAN_RECOMPUTE,
        },
        tier: farthest.map_or(KVT_TIER_NONE, |(_, tier)| tier as u32),
        host_bytes,
        disk_bytes,
        remote_bytes,
        predicted_ns: leg.ns as u64,
        device_bytes,
    }
}

fn summary(plan: &SessionPlan) -> kvt_plan_t {
    let tokens = |kind: Option<StepKind>| -> u64 {
        let legs = plan.legs.iter().filter(|leg| kind.is_none_or(|kind| leg.kind == kind));
        legs.map(|leg| leg.tokens).sum()
    };
    kvt_plan_t {
        struct_size: 0,
        tokens: tokens(None),
        resident_tokens: tokens(Some(StepKind::Resident)),
        load_tokens: tokens(Some(StepKind::Load)),
        recompute_tokens: tokens(Some(StepKind::Recompute)),
        total_ns: plan.total_ns as u64,
        load_ns: plan.load_ns as u64,
        compute_ns: plan.compute_ns as u64,
        without_ns: plan.without_ns as u64,
    }
}

/// The cheapest way to have the KV of all tokens of a session: what is loaded, what is
/// computed, from what is where, what waits before it, and what both take. No use is
/// counted, nothing is held beyond what the session holds.
///
/// Without KVT_NAMESPACE_HOLES everything before the first token to be computed is
/// loaded or resident, and all behind it is computed.
///
/// @param session       The session.
/// @param terms         How the engine will run; null for defaults.
/// @param steps      Receives all tokens as steps, in their order; may be null
///                      with capacity 0 to learn how many there are.
/// @param capacity      Room there, in entries, at most 2^24.
/// @param stride_bytes  sizeof(kvt_plan_step_t).
/// @param out_count     How many steps there are; also written with
///                      KVT_E_TOO_SMALL. May be null.
/// @param out           The sum of it; start it with KVT_PLAN_INIT. May be null.
/// @param err           Explains a failure; may be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW,
///         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; structs are valid for the size they
/// state.
#[capi]
pub unsafe extern "C" fn kvt_session_plan(
    session: *const kvt_session_t,
    terms: *const kvt_plan_terms_t,
    steps: *mut kvt_plan_step_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
    out: *mut kvt_plan_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_optional_out(out)?;
    let terms = terms_of(&read(terms)?)?;
    let (terms, rows) = (terms, Strided::new(steps, capacity, stride_bytes, MAX_ROWS)?);
    let session = enter(session)?;
    let plan = session.ns.store.with(|core| core.plan(session.number, &terms).cloned())?;
    give(&rows, steps.is_null(), plan.legs.iter().map(step), out_count)?;
    write(out, &summary(&plan));
    Ok(())
}
