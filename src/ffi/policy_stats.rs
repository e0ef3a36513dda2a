//! What a policy counts and logs.

use std::ffi::c_char;

use crate::base::spec::nearest;
use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::ffi::abi::{Plain, Strided, capi, check_out, enter, inspect, put, require, text, write};
use crate::ffi::error::kvt_error_t;
use crate::ffi::policy::kvt_policy_t;
use crate::ffi::status::kvt_status_t;
use crate::policy::evictor::Evictor;
use crate::policy::log::{Entry, MAX_ENTRIES};
use crate::policy::metrics::session_fairness;

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
