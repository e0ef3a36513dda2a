//! Budgets and their accounts.

use std::ffi::{c_char, c_void};

use crate::base::account::Account;
use crate::base::budget::{Budget, BudgetOpts, Reclaim, TIERS, Tier};
use crate::base::callback::Foreign;
use crate::base::machine::MemoryFacts;
use crate::base::op::Op;
use crate::base::slab::Slab;
use crate::base::sync::Arc;
use crate::ffi::error::kvt_error_t;
use crate::ffi::guard::{foreign, guard, guard_err};
use crate::ffi::handle::{Access, Noun, encode, free, insert, with};
use crate::ffi::logging::kvt_destroy_fn;
use crate::ffi::op::{kvt_op_t, kvt_submit_opts_t, submit_opts};
use crate::ffi::runtime::{kvt_runtime_t, on_runtime};
use crate::ffi::slice::{require, text};
use crate::ffi::status::kvt_status_t;
use crate::ffi::structs::{Plain, Sized_, check_out, known_flags, read, write};

/// The bytes that may be used, per tier; hard at every instant. Internally
/// locked: any thread may use it.
pub struct kvt_budget_t(());

/// One owner's part in a budget. Internally locked: any thread may use it.
pub struct kvt_account_t(());

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
#[derive(Clone, Copy)]
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
    /// Limit of the disk tier; 0 = none.
    pub disk_bytes: u64,
    /// Limit of the remote tier; 0 = none.
    pub remote_bytes: u64,
    /// Limit of locked memory; 0 = the quota of this process, at most host_bytes.
    pub pinned_bytes: u64,
    /// Kept free of the memory this process may use; 0 = 512 MiB.
    pub reserve_bytes: u64,
}

/// What a budget found on this machine.
#[repr(C)]
#[derive(Clone, Copy)]
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
#[derive(Clone, Copy)]
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

/// Asked to give bytes of a tier back. Returns how many it promises to release
/// soon (0 is allowed); the release itself may come later, from any thread, and
/// matters only before `deadline_ns` (0 = none). Called on the notifier thread
/// under no lock. It must not unwind and must not wait.
pub type kvt_reclaim_fn = Option<
    unsafe extern "C" fn(user_data: *mut c_void, tier: u32, bytes: u64, deadline_ns: u64) -> u64,
>;

/// How to open an account.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvt_account_opts_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// None are defined yet: 0.
    pub flags: u64,
    /// Name in messages.
    pub name: *const c_char,
    /// Length of the name, at most 64.
    pub name_bytes: u64,
    /// Owners of low priority are asked to give back first.
    pub priority: i64,
    /// Asked to give back; null = never.
    pub reclaim: kvt_reclaim_fn,
    /// Handed to reclaim; taken over on success only.
    pub user_data: *mut c_void,
    /// Releases user_data; may be null.
    pub destroy: kvt_destroy_fn,
}

// SAFETY: integers alone; the first field is the size.
unsafe impl Plain for kvt_budget_opts_t {}
// SAFETY: as above.
unsafe impl Sized_ for kvt_budget_opts_t {}
// SAFETY: integers alone; the first field is the size.
unsafe impl Plain for kvt_budget_report_t {}
// SAFETY: as above.
unsafe impl Sized_ for kvt_budget_report_t {}
// SAFETY: integers alone; the first field is the size.
unsafe impl Plain for kvt_tier_report_t {}
// SAFETY: as above.
unsafe impl Sized_ for kvt_tier_report_t {}
// SAFETY: integers, raw pointers and nullable functions; the first field is the size.
unsafe impl Plain for kvt_account_opts_t {}
// SAFETY: as above.
unsafe impl Sized_ for kvt_account_opts_t {}

pub(crate) struct BudgetNoun(pub(crate) Arc<Budget>);

static BUDGETS: Slab<BudgetNoun> = Slab::new();

impl Noun for BudgetNoun {
    type C = kvt_budget_t;
    const TYPE: u8 = 5;
    const NAME: &'static str = "budget";
    fn table() -> &'static Slab<Self> {
        &BUDGETS
    }
}

pub(crate) struct AccountNoun(pub(crate) Arc<Account>);

static ACCOUNTS: Slab<AccountNoun> = Slab::new();

impl Noun for AccountNoun {
    type C = kvt_account_t;
    const TYPE: u8 = 6;
    const NAME: &'static str = "account";
    fn table() -> &'static Slab<Self> {
        &ACCOUNTS
    }
}

const MAX_ACCOUNT_NAME_BYTES: u64 = 64;

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
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvt_budget_open(
    runtime: *const kvt_runtime_t,
    opts: *const kvt_budget_opts_t,
    out: *mut *mut kvt_budget_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let body = || {
        // SAFETY: the caller's promise.
        let given = unsafe {
            require(out)?;
            read(opts)?
        };
        let all = KVT_BUDGET_STRICT
            | KVT_BUDGET_ZERO_HOST
            | KVT_BUDGET_ZERO_PINNED
            | KVT_BUDGET_ZERO_RESERVE;
        known_flags(given.flags, all)?;
        let meant =
            |bytes: u64, zero: u64| (bytes != 0 || given.flags & zero != 0).then_some(bytes);
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
        let handle = insert(BudgetNoun(budget))?;
        // SAFETY: not null, and the caller's promise.
        unsafe { out.write(handle) };
        Ok(())
    };
    // SAFETY: the caller's promise about `err`.
    unsafe { guard_err(err, body) }
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
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvt_budget_close(
    budget: *mut *mut kvt_budget_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let close = |noun: &crate::base::slab::Pin<'static, BudgetNoun>| {
        noun.0.close();
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { guard_err(err, || free::<BudgetNoun>(budget, close)) }
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
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvt_budget_resize(
    budget: *const kvt_budget_t,
    tier: u32,
    bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let body = || {
        let tier = Tier::from_code(tier)?;
        with::<BudgetNoun, ()>(budget, Access::Use, |noun| noun.0.resize(tier, bytes))
    };
    // SAFETY: the caller's promise about `err`.
    unsafe { guard_err(err, body) }
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
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvt_budget_report(
    budget: *const kvt_budget_t,
    out: *mut kvt_budget_report_t,
) -> kvt_status_t {
    guard(|| {
        // SAFETY: the caller's promise.
        unsafe { check_out(out)? };
        with::<BudgetNoun, ()>(budget, Access::Salvage, |noun| {
            let facts = MemoryFacts::probe();
            let cgroup = facts.cgroup;
            let filled = kvt_budget_report_t {
                struct_size: 0,
                total_bytes: facts.total_bytes,
                available_bytes: facts.available_bytes,
                cgroup_limit_bytes: cgroup.map_or(u64::MAX, |c| c.limit_bytes),
                cgroup_headroom_bytes: cgroup.map_or(u64::MAX, |c| c.headroom_bytes()),
                effective_bytes: facts.effective_bytes(),
                reserve_bytes: noun.0.reserve_bytes(),
                lock_quota_bytes: facts.lock_limit_bytes.unwrap_or(u64::MAX),
                locked_bytes: facts.locked_bytes,
                accounts: noun.0.accounts() as u64,
                cgroup_version: cgroup.map_or(0, |c| c.version),
                reserved: 0,
            };
            // SAFETY: checked above.
            unsafe { write(out, &filled) };
            Ok(())
        })
    })
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
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvt_budget_tier(
    budget: *const kvt_budget_t,
    tier: u32,
    out: *mut kvt_tier_report_t,
) -> kvt_status_t {
    guard(|| {
        let tier = Tier::from_code(tier)?;
        // SAFETY: the caller's promise.
        unsafe { check_out(out)? };
        with::<BudgetNoun, ()>(budget, Access::Salvage, |noun| {
            let lane = noun.0.lane(tier);
            let used = lane.reserved_bytes + lane.committed_bytes;
            let filled = kvt_tier_report_t {
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
            };
            // SAFETY: checked above.
            unsafe { write(out, &filled) };
            Ok(())
        })
    })
}

/// Opens an account in a budget.
///
/// @param budget  The budget.
/// @param opts    Name, priority and reclaimer; null for none.
/// @param out     The account; close it with kvt_account_close.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the account. Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `opts` is valid for the size it states.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvt_account_open(
    budget: *const kvt_budget_t,
    opts: *const kvt_account_opts_t,
    out: *mut *mut kvt_account_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let body = || {
        // SAFETY: the caller's promise.
        let given = unsafe {
            require(out)?;
            read(opts)?
        };
        known_flags(given.flags, 0)?;
        if given.name_bytes > MAX_ACCOUNT_NAME_BYTES {
            crate::fail!(Limit, "an account's name has at most {MAX_ACCOUNT_NAME_BYTES} bytes");
        }
        let Ok(priority) = i32::try_from(given.priority) else {
            crate::fail!(Invalid, "priority {} does not fit in 32 bits", given.priority);
        };
        // SAFETY: the caller's promise.
        let name = unsafe { text(given.name, given.name_bytes)? };
        let foreign = foreign(given.reclaim, given.user_data, given.destroy)?;
        let account = with::<BudgetNoun, _>(budget, Access::Use, |noun| {
            noun.0.account(name, priority, foreign.clone().map(reclaim))
        })?;
        let handle = insert(AccountNoun(account))?;
        foreign.iter().for_each(|f| f.keep());
        // SAFETY: not null, and the caller's promise.
        unsafe { out.write(handle) };
        Ok(())
    };
    // SAFETY: the caller's promise about `err`.
    unsafe { guard_err(err, body) }
}

type Call = unsafe extern "C" fn(*mut c_void, u32, u64, u64) -> u64;

fn reclaim(foreign: Arc<Foreign<Call>>) -> Reclaim {
    Box::new(move |tier, bytes, deadline_ns| {
        foreign.call(|function, user_data| {
            // SAFETY: function and data came together from the caller.
            unsafe { function(user_data, tier as u32, bytes, deadline_ns) }
        })
    })
}

/// Reserves bytes now, or fails. Never waits and never passes those who wait.
///
/// @param account  The account.
/// @param tier     KVT_TIER_*.
/// @param bytes    How many.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUDGET when they do not fit; KVT_E_INVALID,
///         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvt_account_reserve(
    account: *const kvt_account_t,
    tier: u32,
    bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let body = || {
        let tier = Tier::from_code(tier)?;
        with::<AccountNoun, ()>(account, Access::Use, |noun| noun.0.reserve(tier, bytes))
    };
    // SAFETY: the caller's promise about `err`.
    unsafe { guard_err(err, body) }
}

/// Reserves bytes when they can be had: first come, first served, and owners
/// with a reclaimer are asked to give back. The op ends with KVT_OK when the
/// bytes are reserved.
///
/// @param account  The account.
/// @param tier     KVT_TIER_*.
/// @param bytes    How many.
/// @param opts     Queue, tag, deadline; null for none.
/// @param out      The op; null when a queue tells of it.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK when submitted; KVT_E_BUDGET when they can never fit;
///         KVT_E_AGAIN, KVT_E_INVALID, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Ownership: the caller owns the op. Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `opts` is valid for the size it states.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvt_account_reserve_later(
    account: *const kvt_account_t,
    tier: u32,
    bytes: u64,
    opts: *const kvt_submit_opts_t,
    out: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let body = || {
        let tier = Tier::from_code(tier)?;
        // SAFETY: the caller's promise.
        let (opts, each) = unsafe { submit_opts(opts, out.is_null())? };
        if each {
            crate::fail!(Invalid, "KVT_SUBMIT_EACH has no meaning for a reservation");
        }
        let op = with::<AccountNoun, _>(account, Access::Use, |noun| {
            noun.0.reserve_later(tier, bytes, &opts)
        })?;
        if !out.is_null() {
            // SAFETY: not null, and the caller's promise.
            unsafe { out.write(encode::<Op>(op.key())) };
        }
        Ok(())
    };
    // SAFETY: the caller's promise about `err`.
    unsafe { guard_err(err, body) }
}

/// Turns reserved bytes into used ones; the difference is free again.
///
/// @param account         The account.
/// @param tier            KVT_TIER_*.
/// @param reserved_bytes  How many of the reserved bytes this settles.
/// @param used_bytes      How many of those are used; 0 gives all back.
/// @param err             Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID when fewer are reserved; KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvt_account_commit(
    account: *const kvt_account_t,
    tier: u32,
    reserved_bytes: u64,
    used_bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let body = || {
        let tier = Tier::from_code(tier)?;
        with::<AccountNoun, ()>(account, Access::Use, |noun| {
            noun.0.commit(tier, reserved_bytes, used_bytes)
        })
    };
    // SAFETY: the caller's promise about `err`.
    unsafe { guard_err(err, body) }
}

/// Gives used bytes back.
///
/// @param account  The account.
/// @param tier     KVT_TIER_*.
/// @param bytes    How many.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID when fewer are used; KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvt_account_release(
    account: *const kvt_account_t,
    tier: u32,
    bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let body = || {
        let tier = Tier::from_code(tier)?;
        with::<AccountNoun, ()>(account, Access::Salvage, |noun| noun.0.release(tier, bytes))
    };
    // SAFETY: the caller's promise about `err`.
    unsafe { guard_err(err, body) }
}

/// What an account holds of a tier.
///
/// @param account             The account.
/// @param tier                KVT_TIER_*.
/// @param out_reserved_bytes  Promised to it; may be null.
/// @param out_used_bytes      In use by it; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvt_account_held(
    account: *const kvt_account_t,
    tier: u32,
    out_reserved_bytes: *mut u64,
    out_used_bytes: *mut u64,
) -> kvt_status_t {
    guard(|| {
        let tier = Tier::from_code(tier)?;
        with::<AccountNoun, ()>(account, Access::Salvage, |noun| {
            let held = noun.0.held(tier);
            // SAFETY: null or valid, by the caller's promise.
            unsafe {
                if let Some(out) = out_reserved_bytes.as_mut() {
                    *out = held.reserved_bytes;
                }
                if let Some(out) = out_used_bytes.as_mut() {
                    *out = held.committed_bytes;
                }
            }
            Ok(())
        })
    })
}

/// Closes an account. Everything must have been given back.
///
/// @param account  Pointer to the handle, cleared on success; null, or a null
///                 handle, is fine.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUSY while it holds or awaits bytes; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvt_account_close(
    account: *mut *mut kvt_account_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    // SAFETY: the caller's promise.
    unsafe { guard_err(err, || free::<AccountNoun>(account, |noun| noun.0.close())) }
}
