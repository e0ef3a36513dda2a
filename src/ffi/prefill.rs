//! What computing costs in a namespace: observed, or said.

use crate::ffi::abi::{Plain, capi, check_out, enter, inspect, read, write};
use crate::ffi::error::kvt_error_t;
use crate::ffi::namespace::kvt_namespace_t;
use crate::ffi::status::kvt_status_t;
use crate::meta::cost::Cost;

/// What computing costs: n tokens after l tokens of context take
/// n * beta_ns + alpha_ns * (n * l + n * n / 2).
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_prefill_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Nanoseconds a token and token of context.
    pub alpha_ns: f64,
    /// Nanoseconds a token.
    pub beta_ns: f64,
    /// Out: how often kvt_namespace_observe_prefill told something.
    pub observed: u64,
    /// Out: 1 when the cost was fixed.
    pub fixed: u32,
    /// Always 0.
    pub reserved: u32,
}

/// Tells what the engine took to compute tokens: plans go by what was observed.
///
/// @param ns           The namespace.
/// @param context_tokens  Tokens before the first one that was computed.
/// @param tokens          How many were computed, at least 1.
/// @param duration_ns              How long that took, 1 to an hour.
/// @param err             Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_namespace_observe_prefill(
    ns: *const kvt_namespace_t,
    context_tokens: u64,
    tokens: u64,
    duration_ns: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let noun = enter(ns)?;
    let ns = &noun.0;
    ns.store.with(|core| core.observe_prefill(ns.number, context_tokens, tokens, duration_ns))
}

/// Fixes what computing costs, whatever is observed.
///
/// @param ns  The namespace.
/// @param cost   alpha_ns and beta_ns of it, 0 to 1e15 each, are read; null = go by
///               what is observed again.
/// @param err    Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_CLOSED, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `cost` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_namespace_fix_prefill(
    ns: *const kvt_namespace_t,
    cost: *const kvt_prefill_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let cost = match cost.is_null() {
        true => None,
        false => {
            let given = read(cost)?;
            Some(Cost { alpha: given.alpha_ns, beta: given.beta_ns })
        }
    };
    let noun = enter(ns)?;
    let ns = &noun.0;
    ns.store.with(|core| core.fix_prefill(ns.number, cost))
}

/// What computing costs, as plans see it now.
///
/// @param ns  The namespace.
/// @param out    Filled in; start it with KVT_PREFILL_INIT.
/// @return KVT_OK; KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_namespace_prefill(
    ns: *const kvt_namespace_t,
    out: *mut kvt_prefill_t,
) -> kvt_status_t {
    check_out(out)?;
    let ns = inspect(ns)?;
    let prefill = ns.0.store.look(|core| core.prefill(ns.0.number))?;
    let Cost { alpha, beta } = prefill.cost();
    write(
        out,
        &kvt_prefill_t {
            struct_size: 0,
            alpha_ns: alpha,
            beta_ns: beta,
            observed: prefill.observed(),
            fixed: u32::from(prefill.is_fixed()),
            reserved: 0,
        },
    );
    Ok(())
}
