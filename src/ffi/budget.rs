//! Budgets.

use crate::base::budget::{Budget, BudgetOpts, TIERS, Tier};
use crate::base::machine::MemoryFacts;
use crate::base::sync::Arc;
use crate::ffi::abi::{
    Plain, capi, check_out, enter, free, insert, inspect, known_flags, noun, read, require, write,
};
use crate::ffi::error::kvt_error_t;
use crate::ffi::runtime::{kvt_runtime_t, on_runtime};
use crate::ffi::status::kvt_status_t;

/// The bytes that may be used, per tier; hard at every instant. Internally
/// locked: any thread may use it.
pub struct kvt_budget_t(());

/// Memory of the accelerator.
pub const KVT_TIER_DEVICE: u32 = 0;
/// RAM.
pub const KVT_TIER_HOST: u32 = 1;
/// Local files.
pub const KVT_TIER_DISK: u32 = 2;
/// A store elsewhere.
pub const KVT_TIER_REMOTE: u32 = 3;
/// RAM that is locked; counted beside KVT_TIER_HOST.
pub const KVT_TIER_PINNED: u32 = 4;

const _: () = assert!(KVT_TIER_PINNED as usize + 1 == TIERS);

/// Fail when the host or pinned limit is above what the machine has, instead of
/// cutting it to that.
pub const KVT_BUDGET_STRICT: u64 = 1;
/// host_bytes = 0 means none, not the default.
pub const KVT_BUDGET_ZERO_HOST: u64 = 2;
/// pinned_bytes = 0 means none, not the default.
pub const KVT_BUDGET_ZERO_PINNED: u64 = 4;
/// reserve_bytes = 0 means none, not the default.
pub const KVT_BUDGET_ZERO_RESERVE: u64 = 8;

/// How to open a budget.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_budget_opts_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_BUDGET_*.
    pub flags: u64,
    /// Limit of the device tier; 0 = none.
    pub device_bytes: u64,
    /// Limit of the host tier; 0 = half of what this process may still use:
    /// min(cgroup headroom, available memory) less the reserve.
    pub host_bytes: u64,
    /// Limit of what stores keep on disk, all together: the bytes of their disk tiers; 0 = no
    /// limit.
    pub disk_bytes: u64,
    /// Limit of the remote tier; 0 = none.
    pub remote_bytes: u64,
    /// Limit of locked memory; 0 = the quota of this process, at most host_bytes.
    pub pinned_bytes: u64,
    /// Kept free of the memory this process may use; 0 = an eighth of it, at most 512 MiB.
    pub reserve_bytes: u64,
}

/// What a budget found on this machine.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_budget_report_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// RAM of the machine.
    pub total_bytes: u64,
    /// What the kernel could give without swapping, now.
    pub available_bytes: u64,
    /// The tightest cgroup limit; UINT64_MAX when there is none.
    pub cgroup_limit_bytes: u64,
    /// What is left under it now; UINT64_MAX when there is none.
    pub cgroup_headroom_bytes: u64,
    /// min(cgroup headroom, available), now.
    pub effective_bytes: u64,
    /// Kept free of that.
    pub reserve_bytes: u64,
    /// What this process may lock in all; UINT64_MAX when unlimited.
    pub lock_quota_bytes: u64,
    /// What it has locked now.
    pub locked_bytes: u64,
    /// Accounts that are open.
    pub accounts: u64,
    /// 1 or 2; 0 when there is no limit.
    pub cgroup_version: u32,
    /// Always 0.
    pub reserved: u32,
}

/// Counters of one tier of a budget.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_tier_report_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// The limit that was asked for.
    pub asked_bytes: u64,
    /// The limit that holds.
    pub limit_bytes: u64,
    /// Promised to accounts.
    pub reserved_bytes: u64,
    /// In use by accounts.
    pub committed_bytes: u64,
    /// Most ever promised and in use together.
    pub peak_bytes: u64,
    /// What can be reserved now.
    pub free_bytes: u64,
    /// Reservations that failed.
    pub refused: u64,
    /// Reservations that wait.
    pub waiting: u64,
    /// Bytes owners were asked to give back so far.
    pub reclaim_asked_bytes: u64,
}

pub(crate) struct BudgetNoun(pub(crate) Arc<Budget>);

noun!(BudgetNoun, kvt_budget_t, 5, "budget");

/// Opens a budget.
///
/// @param runtime  Where it belongs.
/// @param opts     Limits; null for defaults.
/// @param out      The budget; close it with kvt_budget_close.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUDGET (strict alone), KVT_E_INVALID, KVT_E_TOO_NEW,
///         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the budget. Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `opts` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_budget_open(
    runtime: *const kvt_runtime_t,
    opts: *const kvt_budget_opts_t,
    out: *mut *mut kvt_budget_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = read(opts)?;
    let all =
        KVT_BUDGET_STRICT | KVT_BUDGET_ZERO_HOST | KVT_BUDGET_ZERO_PINNED | KVT_BUDGET_ZERO_RESERVE;
    known_flags(given.flags, all)?;
    let meant = |bytes: u64, zero: u64| (bytes != 0 || given.flags & zero != 0).then_some(bytes);
    let opts = BudgetOpts {
        limits: [
            Some(given.device_bytes),
            meant(given.host_bytes, KVT_BUDGET_ZERO_HOST),
            Some(given.disk_bytes),
            Some(given.remote_bytes),
            meant(given.pinned_bytes, KVT_BUDGET_ZERO_PINNED),
        ],
        reserve_bytes: meant(given.reserve_bytes, KVT_BUDGET_ZERO_RESERVE),
        strict: given.flags & KVT_BUDGET_STRICT != 0,
    };
    let budget = on_runtime(runtime, |core| Budget::open(core, &opts))?;
    out.write(insert(BudgetNoun(budget))?);
    Ok(())
}

/// Closes a budget: reservations that wait end with KVT_E_CLOSED, nothing more
/// is granted. Accounts stay until they are closed and can still give back.
///
/// @param budget  Pointer to the handle, cleared on success; null, or a null
///                handle, is fine.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_budget_close(
    budget: *mut *mut kvt_budget_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let close = |noun: &crate::base::slab::Pin<'static, BudgetNoun>| {
        noun.0.close();
        Ok(())
    };
    free(budget, close)
}

/// Changes a tier's limit. Below what is in use: nothing more is granted until
/// the owners, who are asked to, have given back.
///
/// @param budget  The budget.
/// @param tier    KVT_TIER_*.
/// @param bytes   The new limit; host and pinned are cut to what the machine has.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_budget_resize(
    budget: *const kvt_budget_t,
    tier: u32,
    bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let tier = Tier::from_code(tier)?;
    let budget = enter(budget)?;
    budget.0.resize(tier, bytes)
}

/// What this process may use, measured now.
///
/// @param budget  The budget.
/// @param out     Filled in; start it with KVT_BUDGET_REPORT_INIT.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread; reads files, so not in a hot path. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_budget_report(
    budget: *const kvt_budget_t,
    out: *mut kvt_budget_report_t,
) -> kvt_status_t {
    check_out(out)?;
    let budget = inspect(budget)?;
    let facts = MemoryFacts::probe();
    let cgroup = facts.cgroup;
    write(
        out,
        &kvt_budget_report_t {
            struct_size: 0,
            total_bytes: facts.total_bytes,
            available_bytes: facts.available_bytes,
            cgroup_limit_bytes: cgroup.map_or(u64::MAX, |c| c.limit_bytes),
            cgroup_headroom_bytes: cgroup.map_or(u64::MAX, |c| c.headroom_bytes()),
            effective_bytes: facts.effective_bytes(),
            reserve_bytes: budget.0.reserve_bytes(),
            lock_quota_bytes: facts.lock_limit_bytes.unwrap_or(u64::MAX),
            locked_bytes: facts.locked_bytes,
            accounts: budget.0.accounts() as u64,
            cgroup_version: cgroup.map_or(0, |c| c.version),
            reserved: 0,
        },
    );
    Ok(())
}

/// Counters of one tier.
///
/// @param budget  The budget.
/// @param tier    KVT_TIER_*.
/// @param out     Filled in; start it with KVT_TIER_REPORT_INIT.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_budget_tier(
    budget: *const kvt_budget_t,
    tier: u32,
    out: *mut kvt_tier_report_t,
) -> kvt_status_t {
    let tier = Tier::from_code(tier)?;
    check_out(out)?;
    let budget = inspect(budget)?;
    let lane = budget.0.usage(tier);
    let used = lane.reserved_bytes + lane.committed_bytes;
    write(
        out,
        &kvt_tier_report_t {
            struct_size: 0,
            asked_bytes: lane.asked_bytes,
            limit_bytes: lane.limit_bytes,
            reserved_bytes: lane.reserved_bytes,
            committed_bytes: lane.committed_bytes,
            peak_bytes: lane.peak_bytes,
            free_bytes: lane.limit_bytes.saturating_sub(used),
            refused: lane.refused,
            waiting: lane.waiting,
            reclaim_asked_bytes: lane.reclaim_asked_bytes,
        },
    );
    Ok(())
}
