//! Advice for schedulers, from what a policy sees.

use crate::base::status::Result;
use crate::fail;
use crate::ffi::abi::{Plain, capi, check_out, enter, known_flags, read, write};
use crate::ffi::error::kvt_error_t;
use crate::ffi::policy::kvt_policy_t;
use crate::ffi::status::kvt_status_t;
use crate::policy::advice::Rules;

/// shrink_above = 0 is meant, not the default.
pub const KVT_ADVICE_ZERO_SHRINK: u64 = 1;
/// grow_below = 0 is meant, not the default.
pub const KVT_ADVICE_ZERO_GROW: u64 = 2;

/// What advice goes by.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_rules_t {
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

fn rules(given: &kvt_policy_rules_t) -> Result<Rules> {
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
    given: *const kvt_policy_rules_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let rules = rules(&read(given)?)?;
    let policy = enter(policy)?;
    policy.state.lock().evictor.advice.set_rules(rules);
    Ok(())
}
