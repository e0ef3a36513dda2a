//! Budgets, accounts, buffers, and views of the tensors of the engine.

use std::ffi::{c_char, c_void};

use crate::base::account::Account;
use crate::base::budget::{Budget, BudgetOpts, Reclaim, TIERS, Tier};
use crate::base::callback::{Foreign, refuse_reentry};
use crate::base::checksum::checksum;
use crate::base::core::Core;
use crate::base::item::{Item, MAX_ITEMS};
use crate::base::machine::MemoryFacts;
use crate::base::memory::{AllocationRequest, Buffer, Requirement};
use crate::base::op::{Op, OpOpts, OpRef, RELEASED};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::device::{Memory, host};
use crate::fail;
use crate::ffi::abi::{
    Access, Plain, Strided, bytes, capi, check_out, encode, enter, foreign, free, insert, inspect,
    known_flags, noun, numbers, pin, pin_optional, put, read, require, text, write,
};
use crate::ffi::base::{kvt_destroy_fn, kvt_error_t, kvt_status_t};
use crate::ffi::runtime::{kvt_op_t, kvt_runtime_t, kvt_submit_opts_t, on_runtime, submit_opts};
use crate::store::handle::Store;
use crate::store::state::session::{LayerViews, PlaneView, Tokens, Views};

// Budgets.

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
    pub reclaim_requested_bytes: u64,
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
            reclaim_requested_bytes: lane.reclaim_requested_bytes,
        },
    );
    Ok(())
}

// Accounts.

/// One owner's part in a budget. Internally locked: any thread may use it.
pub struct kvt_account_t(());

/// Asked to give bytes of a tier back. Returns how many it promises to release
/// soon (0 is allowed); the release itself may come later, from any thread, and
/// matters only before `deadline_ns` (0 = none). Called on the notifier thread
/// under no lock. It must not unwind and must not wait.
pub type kvt_reclaim_fn = Option<
    unsafe extern "C" fn(user_data: *mut c_void, tier: u32, bytes: u64, deadline_ns: u64) -> u64,
>;

/// How to open an account.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
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

pub(crate) struct AccountNoun(pub(crate) Arc<Account>);

noun!(AccountNoun, kvt_account_t, 6, "account");

const MAX_ACCOUNT_NAME_BYTES: u64 = 64;

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
#[capi]
pub unsafe extern "C" fn kvt_account_open(
    budget: *const kvt_budget_t,
    opts: *const kvt_account_opts_t,
    out: *mut *mut kvt_account_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = read(opts)?;
    known_flags(given.flags, 0)?;
    if given.name_bytes > MAX_ACCOUNT_NAME_BYTES {
        crate::fail!(Limit, "an account's name has at most {MAX_ACCOUNT_NAME_BYTES} bytes");
    }
    let Ok(priority) = i32::try_from(given.priority) else {
        crate::fail!(Invalid, "priority {} does not fit in 32 bits", given.priority);
    };
    let name = text("name", given.name, given.name_bytes)?;
    let foreign = foreign(given.reclaim, given.user_data, given.destroy)?;
    let budget = enter(budget)?;
    let account = budget.0.account(name, priority, foreign.clone().map(reclaim))?;
    let handle = insert(AccountNoun(account))?;
    foreign.iter().for_each(|f| f.keep());
    out.write(handle);
    Ok(())
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
#[capi]
pub unsafe extern "C" fn kvt_account_reserve(
    account: *const kvt_account_t,
    tier: u32,
    bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let tier = Tier::from_code(tier)?;
    let account = enter(account)?;
    account.0.reserve(tier, bytes)
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
///         KVT_E_AGAIN (at most 4096 wait), KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_CLOSED,
///         KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC. The op ends with
///         KVT_E_BUDGET when the limit shrinks below it.
///
/// Ownership: the caller owns the op. Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `opts` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_account_reserve_later(
    account: *const kvt_account_t,
    tier: u32,
    bytes: u64,
    opts: *const kvt_submit_opts_t,
    out: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let tier = Tier::from_code(tier)?;
    let (opts, each) = submit_opts(opts, out.is_null())?;
    if each {
        crate::fail!(Invalid, "KVT_SUBMIT_EACH has no meaning for a reservation");
    }
    let account = enter(account)?;
    let op = account.0.reserve_later(tier, bytes, &opts)?;
    put(out, encode::<Op>(op.key()));
    Ok(())
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
#[capi]
pub unsafe extern "C" fn kvt_account_commit(
    account: *const kvt_account_t,
    tier: u32,
    reserved_bytes: u64,
    used_bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let tier = Tier::from_code(tier)?;
    let account = enter(account)?;
    account.0.commit(tier, reserved_bytes, used_bytes)
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
#[capi]
pub unsafe extern "C" fn kvt_account_release(
    account: *const kvt_account_t,
    tier: u32,
    bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let tier = Tier::from_code(tier)?;
    let account = inspect(account)?;
    account.0.release(tier, bytes)
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
#[capi]
pub unsafe extern "C" fn kvt_account_held(
    account: *const kvt_account_t,
    tier: u32,
    out_reserved_bytes: *mut u64,
    out_used_bytes: *mut u64,
) -> kvt_status_t {
    let tier = Tier::from_code(tier)?;
    let account = inspect(account)?;
    let held = account.0.held(tier);
    if let Some(out) = out_reserved_bytes.as_mut() {
        *out = held.reserved_bytes;
    }
    if let Some(out) = out_used_bytes.as_mut() {
        *out = held.committed_bytes;
    }
    Ok(())
}

/// Closes an account. Everything must have been given back. Waits for a call of
/// its reclaimer that is under way, except inside a callback.
///
/// @param account  Pointer to the handle, cleared on success; null, or a null
///                 handle, is fine.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUSY while it holds or awaits bytes, or, inside a
///         callback, while its reclaimer is being called; KVT_E_HANDLE,
///         KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_account_close(
    account: *mut *mut kvt_account_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    free(account, |noun| noun.0.close())
}

// Buffers.

/// A range of host memory that ops may read and write. Internally locked; the
/// bytes themselves are yours, except between submitting an op on them and its
/// release: then the library's alone.
pub struct kvt_buffer_t(());

/// Lock the memory in RAM; fail when the quota does not allow it.
pub const KVT_BUFFER_PIN: u64 = 1;
/// Lock the memory in RAM if the quota allows it.
pub const KVT_BUFFER_TRY_PIN: u64 = 2;
/// Use huge pages of the reserved pool; fail when there are not enough.
pub const KVT_BUFFER_HUGETLB: u64 = 4;
/// Ask the kernel for transparent huge pages.
pub const KVT_BUFFER_TRY_HUGE: u64 = 8;
/// Make every page present before returning, on the workers in parallel.
pub const KVT_BUFFER_PREFAULT: u64 = 16;

/// Normal pages.
pub const KVT_PAGES_NORMAL: u32 = 0;
/// Pages the kernel was asked to merge into huge ones.
pub const KVT_PAGES_TRANSPARENT: u32 = 1;
/// Huge pages of the reserved pool.
pub const KVT_PAGES_HUGETLB: u32 = 2;
/// The caller's own memory.
pub const KVT_PAGES_FOREIGN: u32 = 3;

/// How to allocate a buffer.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_buffer_opts_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_BUFFER_*.
    pub flags: u64,
    /// Size.
    pub bytes: u64,
    /// Alignment, a power of two up to 1 GiB; 0 = one page.
    pub align_bytes: u64,
    /// Who pays, in KVT_TIER_HOST and, when locked, KVT_TIER_PINNED; null = nobody.
    pub account: *const kvt_account_t,
}

/// What a buffer is.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_buffer_info_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Where it starts.
    pub address: *mut c_void,
    /// Its usable size.
    pub bytes: u64,
    /// What its account pays: the size in whole pages.
    pub charged_bytes: u64,
    /// Ops submitted on it and not yet released.
    pub in_flight: u64,
    /// 1 when it is locked in RAM.
    pub pinned: u32,
    /// KVT_PAGES_*.
    pub pages: u32,
}

pub(crate) struct BufferNoun {
    pub(crate) core: Arc<Core>,
    pub(crate) buffer: Arc<Buffer>,
}

noun!(BufferNoun, kvt_buffer_t, 7, "buffer");

/// Bytes made present by one piece of work.
const PREFAULT_BYTES: u64 = 16 << 20;

/// Allocates a buffer.
///
/// @param runtime  Where it belongs.
/// @param opts     Size and kind; `bytes` must be set.
/// @param out      The buffer; free it with kvt_buffer_free.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_NOMEM, KVT_E_IO, KVT_E_LIMIT, KVT_E_BUDGET, KVT_E_PIN_QUOTA, KVT_E_UNAVAILABLE
///         (no reserved huge pages), KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC; with KVT_BUFFER_PREFAULT also
///         KVT_E_AGAIN, KVT_E_CANCELLED beside a close, and KVT_E_REENTRANT inside a
///         callback.
///
/// Ownership: the caller owns the buffer; it is not inherited by forked
/// children. Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `opts` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_buffer_alloc(
    runtime: *const kvt_runtime_t,
    opts: *const kvt_buffer_opts_t,
    out: *mut *mut kvt_buffer_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = read(opts)?;
    let wish = wish_of(&given)?;
    let noun = on_runtime(runtime, |core| {
        core.check_open()?;
        let buffer = Arc::new(Buffer::map(&wish, core.faults())?);
        if given.flags & KVT_BUFFER_PREFAULT != 0 {
            prefault(core, &buffer)?;
        }
        Ok(BufferNoun { core: core.clone(), buffer })
    })?;
    out.write(insert(noun)?);
    Ok(())
}

fn wish_of(given: &kvt_buffer_opts_t) -> Result<AllocationRequest> {
    let all = KVT_BUFFER_PIN
        | KVT_BUFFER_TRY_PIN
        | KVT_BUFFER_HUGETLB
        | KVT_BUFFER_TRY_HUGE
        | KVT_BUFFER_PREFAULT;
    known_flags(given.flags, all)?;
    let wish = |must: u64, soft: u64| match (given.flags & must, given.flags & soft) {
        (0, 0) => Requirement::No,
        (0, _) => Requirement::Try,
        _ => Requirement::Must,
    };
    let account = pin_optional(given.account)?.map(|noun| noun.0.clone());
    Ok(AllocationRequest {
        bytes: given.bytes,
        align_bytes: given.align_bytes,
        pin: wish(KVT_BUFFER_PIN, KVT_BUFFER_TRY_PIN),
        huge: wish(KVT_BUFFER_HUGETLB, KVT_BUFFER_TRY_HUGE),
        prefer_huge: false,
        account,
    })
}

fn prefault(core: &Arc<Core>, buffer: &Arc<Buffer>) -> Result<()> {
    refuse_reentry()?;
    let pieces = buffer.bytes().div_ceil(PREFAULT_BYTES);
    let grain = PREFAULT_BYTES.max(buffer.bytes().div_ceil(MAX_ITEMS as u64));
    let mut items = core.item_list(pieces.min(MAX_ITEMS as u64) as usize)?;
    let mut at = 0;
    while at < buffer.bytes() {
        let n = grain.min(buffer.bytes() - at);
        items.push(Item::new(host::PREFAULT, Some((buffer.clone(), at)), None, n, 0));
        at += n;
    }
    let op = core.submit(&OpOpts::default(), items, host::run)?;
    op.wait(RELEASED, 0)?;
    op.remove();
    match op.info().status.and_then(Status::from_code) {
        Some(Status::Ok) => Ok(()),
        status => Err(op.error().unwrap_or_else(|| status.unwrap_or(Status::Panic).into())),
    }
}

/// Makes memory of yours usable for ops.
///
/// @param runtime    Where it belongs.
/// @param address    Where the memory starts.
/// @param size       Its size in bytes.
/// @param user_data  Handed to destroy; taken over on success only.
/// @param destroy    Called once, when the buffer is freed and no op uses it any
///                   more; may be null.
/// @param out        The buffer; free it with kvt_buffer_free.
/// @param err        Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_CLOSED, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the memory stays yours and must outlive the buffer. Threading:
/// any thread. Since 0.1.
///
/// # Safety
/// The memory must be readable and writable until the buffer is gone.
#[capi]
pub unsafe extern "C" fn kvt_buffer_wrap(
    runtime: *const kvt_runtime_t,
    address: *mut c_void,
    size: u64,
    user_data: *mut c_void,
    destroy: kvt_destroy_fn,
    out: *mut *mut kvt_buffer_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let foreign = Arc::new(Foreign::new((), user_data, destroy));
    let noun = on_runtime(runtime, |core| {
        core.check_open()?;
        let buffer = Buffer::wrap(address.cast(), size, Box::new(foreign.clone()))?;
        Ok(BufferNoun { core: core.clone(), buffer: Arc::new(buffer) })
    })?;
    let handle = insert(noun)?;
    foreign.keep();
    out.write(handle);
    Ok(())
}

/// Frees a buffer.
///
/// @param buffer  Pointer to the handle, cleared on success; null, or a null
///                handle, is fine.
/// @return KVT_OK; KVT_E_BUSY while an op uses it; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `buffer` is null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_buffer_free(buffer: *mut *mut kvt_buffer_t) -> kvt_status_t {
    free(buffer, |noun| match noun.buffer.retire() {
        true => Ok(()),
        false if noun.buffer.is_retired() => Err(Status::Handle.into()),
        false => Err(Status::Busy.into()),
    })
}

/// Where a buffer's bytes are.
///
/// @param buffer       The buffer.
/// @param out_address  Where it starts; may be null.
/// @param out_bytes    Its usable size; may be null.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Ownership: the address is borrowed until the buffer is freed. Threading: any
/// thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for writes.
#[capi]
pub unsafe extern "C" fn kvt_buffer_address(
    buffer: *const kvt_buffer_t,
    out_address: *mut *mut c_void,
    out_bytes: *mut u64,
) -> kvt_status_t {
    let buffer = inspect(buffer)?;
    if let Some(out) = out_address.as_mut() {
        *out = buffer.buffer.address().cast();
    }
    if let Some(out) = out_bytes.as_mut() {
        *out = buffer.buffer.bytes();
    }
    Ok(())
}

/// What a buffer is.
///
/// @param buffer  The buffer.
/// @param out     Filled in; start it with KVT_BUFFER_INFO_INIT.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_buffer_info(
    buffer: *const kvt_buffer_t,
    out: *mut kvt_buffer_info_t,
) -> kvt_status_t {
    check_out(out)?;
    let buffer = inspect(buffer)?;
    write(
        out,
        &kvt_buffer_info_t {
            struct_size: 0,
            address: buffer.buffer.address().cast(),
            bytes: buffer.buffer.bytes(),
            charged_bytes: buffer.buffer.charged_bytes(),
            in_flight: buffer.buffer.in_flight(),
            pinned: u32::from(buffer.buffer.is_pinned()),
            pages: buffer.buffer.pages() as u32,
        },
    );
    Ok(())
}

// Work on host memory.

/// Copy the source to the target; they may overlap.
pub const KVT_ITEM_COPY: u32 = 1;
/// Report the checksum of the source as it was read.
pub const KVT_ITEM_CHECKSUM: u32 = 2;
/// Compare that checksum with `expect`: KVT_E_CORRUPT if it differs (a copy
/// asked for along with it has been made all the same).
pub const KVT_ITEM_VERIFY: u32 = 4;
/// Make the target's pages present; contents stay. Alone only.
pub const KVT_ITEM_PREFAULT: u32 = 8;

const _: () = assert!(KVT_ITEM_COPY == host::COPY && KVT_ITEM_CHECKSUM == host::CHECKSUM);
const _: () = assert!(KVT_ITEM_VERIFY == host::VERIFY && KVT_ITEM_PREFAULT == host::PREFAULT);

/// One piece of work on up to two buffers.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_buffer_item_t {
    /// KVT_ITEM_* bits.
    pub kind: u32,
    /// None are defined yet: 0.
    pub flags: u32,
    /// The target; null for work that only reads.
    pub dst: *const kvt_buffer_t,
    /// Where in the target.
    pub dst_offset: u64,
    /// The source; null for KVT_ITEM_PREFAULT.
    pub src: *const kvt_buffer_t,
    /// Where in the source.
    pub src_offset: u64,
    /// How much.
    pub bytes: u64,
    /// The checksum to compare with, for KVT_ITEM_VERIFY.
    pub expect: u64,
    /// Your own word, with KVT_SUBMIT_EACH.
    pub tag: u64,
}

/// Submits work on buffers: one op for all items, or, with KVT_SUBMIT_EACH, one
/// per item. All or nothing; never waits. Items of one op run in any order and
/// on several workers, so they must not write what another reads.
///
/// @param runtime       Who does it.
/// @param opts          Queue, tag, deadline, priority; null for none.
/// @param items         The work; copied, so yours again when this returns.
/// @param count         How many items, 1 to 65536.
/// @param stride_bytes  sizeof(kvt_buffer_item_t).
/// @param out_ops       Receives the op (`count` ops with KVT_SUBMIT_EACH), to be
///                      freed by you; null when the queue alone tells of the end.
/// @param err           Explains a failure; may be null.
/// @return KVT_OK when submitted; KVT_E_AGAIN when the queue or the runtime is
///         full; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the ops; the buffers' bytes are the library's
/// until the release. Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `items` is valid for `count` * `stride_bytes`, `out_ops` null or valid for the
/// handles it receives, `opts` for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_buffer_submit(
    runtime: *const kvt_runtime_t,
    opts: *const kvt_submit_opts_t,
    items: *const kvt_buffer_item_t,
    count: u64,
    stride_bytes: u64,
    out_ops: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let max = MAX_ITEMS as u64;
    let given = Strided::new(items.cast_mut(), count, stride_bytes, max)?;
    let (opts, each) = submit_opts(opts, out_ops.is_null())?;
    let (given, opts, each) = (given, opts, each);
    if given.len() == 0 {
        fail!(Invalid, "there is nothing to do: count is 0");
    }
    on_runtime(runtime, |core| {
        let mut list = core.item_list(given.len())?;
        for i in 0..given.len() {
            let item = given.get(i).and_then(|item| item_of(&item));
            list.push(item.map_err(|e: Error| e.within(&format!("item {i}")))?);
        }
        let hand_out = |i: usize, op: &OpRef| {
            if !out_ops.is_null() {
                // SAFETY: the caller has room for `count` handles, or for one.
                out_ops.add(i).write(encode::<Op>(op.key()));
            }
        };
        if each {
            let tag_of = |i| given.get(i).map_or(0, |item: kvt_buffer_item_t| item.tag);
            return core.submit_each(&opts, list, tag_of, host::run, hand_out);
        }
        hand_out(0, &core.submit(&opts, list, host::run)?);
        Ok(())
    })
}

fn item_of(given: &kvt_buffer_item_t) -> Result<Item> {
    if given.flags != 0 {
        fail!(Invalid, "unknown flags {:#x}", given.flags);
    }
    let (wants_dst, wants_src) = host::needs(given.kind)?;
    let dst = side("target", wants_dst, given.dst, given.dst_offset, given.bytes)?;
    let src = side("source", wants_src, given.src, given.src_offset, given.bytes)?;
    let freed = |side: &Option<(Arc<Buffer>, u64)>| side.as_ref().is_some_and(|b| b.0.is_retired());
    let (target, source) = (dst.clone(), src.clone());
    let item = Item::new(given.kind, dst, src, given.bytes, given.expect);
    // Entered now: a free that came first is seen here, a later one finds it busy.
    if freed(&target) || freed(&source) {
        fail!(Handle, "a buffer was freed meanwhile");
    }
    Ok(item)
}

fn side(
    name: &str,
    wanted: bool,
    handle: *const kvt_buffer_t,
    offset: u64,
    bytes: u64,
) -> Result<Option<(Arc<Buffer>, u64)>> {
    if !wanted {
        if !handle.is_null() {
            fail!(Invalid, "this kind of work has no {name}");
        }
        return Ok(None);
    }
    let noun = pin(handle, Access::Use).map_err(|e| e.within(name))?;
    if noun.buffer.range(offset, bytes).is_none() {
        let has = noun.buffer.bytes();
        fail!(Invalid, "{bytes} bytes at {offset} leave the {name} of {has} bytes");
    }
    Ok(Some((noun.buffer.clone(), offset)))
}

/// The checksum of bytes, as ops compute it: XXH3-64 of every 4096 bytes, then
/// XXH3-64 of those sums as little-endian numbers.
///
/// @param data       The bytes.
/// @param size       How many.
/// @param out_value  The checksum.
/// @return KVT_OK; KVT_E_INVALID.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `data` is null with a size of 0, or valid for reads; `out_value` for a write.
#[capi]
pub unsafe extern "C" fn kvt_checksum(
    data: *const c_void,
    size: u64,
    out_value: *mut u64,
) -> kvt_status_t {
    require(out_value)?;
    out_value.write(checksum(bytes(data.cast(), size)?));
    Ok(())
}

// Views of tensors.

/// The processor reaches it.
pub const KVT_MEMORY_HOST: u32 = 0;
/// Only the device does.
pub const KVT_MEMORY_DEVICE: u32 = 1;

/// Most pages of a view.
const MAX_PAGES: usize = 1 << 24;
/// Tables that are looked through for one that was copied already.
const RECENT_TABLES: usize = 4;

/// Where the engine has one plane (K or V) of one layer, from the first token of
/// a move on: the bytes of a head and token lie together, tokens and heads each at
/// equal distances. Either at one address, or in pages. Stands in arrays only. All
/// zero = there is no such plane.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_view_t {
    /// Where the first token is; null with pages.
    pub address: *mut c_void,
    /// Where each page starts; null with an address.
    pub pages: *const *mut c_void,
    /// How many pages.
    pub page_count: u64,
    /// Added to the address of each page: one table serves K, V and all layers.
    pub shift_bytes: i64,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Tokens of the view (of a layer with a state: chunks); 0 = as many as the move
    /// says, or as the pages hold. A move to the end of a session says none.
    pub tokens: u32,
    /// Heads of a token; 0 = 1.
    pub heads: u32,
    /// KVT_MEMORY_*.
    pub memory: u32,
    /// Bytes of a head and token. All heads together have what the layout says.
    pub run_bytes: u64,
    /// From a token to the next; 0 = heads * run_bytes.
    pub token_stride_bytes: u64,
    /// From a head to the next; 0 = run_bytes.
    pub head_stride_bytes: u64,
}

/// Tables of pages that were copied, by where the caller has them.
type Tables = Vec<(*const *mut c_void, u64, Arc<Vec<u64>>)>;

/// # Safety
/// `view`'s pages are null or valid for reads.
unsafe fn place_of(view: &kvt_view_t, tables: &mut Tables) -> Result<Tokens> {
    if view.pages.is_null() {
        if view.page_count != 0 || view.page_tokens != 0 || view.shift_bytes != 0 {
            fail!(Invalid, "a view has page_count, page_tokens or shift_bytes without pages");
        }
        return Ok(Tokens::At(view.address.addr() as u64));
    }
    if !view.address.is_null() {
        fail!(Invalid, "a view has both an address and pages");
    }
    let same = |t: &&(*const *mut c_void, u64, _)| t.0 == view.pages && t.1 == view.page_count;
    let known = tables.iter().rev().take(RECENT_TABLES).find(same);
    let addresses = match known {
        Some((_, _, table)) => table.clone(),
        None => {
            // SAFETY: the caller's promise.
            let pages = unsafe { numbers(view.pages, view.page_count, MAX_PAGES)? };
            let mut table = Vec::new();
            table.try_reserve_exact(pages.len()).map_err(|_| Status::NoMem)?;
            table.extend(pages.iter().map(|page| page.addr() as u64));
            let table = Arc::new(table);
            tables.push((view.pages, view.page_count, table.clone()));
            table
        }
    };
    Ok(Tokens::Pages { addresses, page_tokens: view.page_tokens, shift_bytes: view.shift_bytes })
}

/// A plane as its view says; `None` = there is none.
///
/// # Safety
/// As [`place_of`].
unsafe fn plane_of(
    view: &kvt_view_t,
    moved: Option<u64>,
    tables: &mut Tables,
) -> Result<Option<PlaneView>> {
    if view.address.is_null() && view.pages.is_null() {
        if view.run_bytes != 0 {
            fail!(Invalid, "a view has neither an address nor pages");
        }
        return Ok(None);
    }
    let heads = view.heads.max(1);
    let or = |given: u64, usual: u64| if given == 0 { usual } else { given };
    let has = match (view.pages.is_null(), moved) {
        (false, _) => view.page_count.saturating_mul(u64::from(view.page_tokens)),
        (true, Some(moved)) => moved,
        (true, None) if view.tokens == 0 => fail!(
            Invalid,
            "the move goes to the end of a session that may grow until then, and the view does \
             not say how much fits: say tokens in the move or in the view"
        ),
        (true, None) => 0,
    };
    // More than a move can have is as good as all.
    let all = u32::try_from(has).unwrap_or(u32::MAX);
    Ok(Some(PlaneView {
        // SAFETY: the caller's promise.
        place: unsafe { place_of(view, tables)? },
        tokens: if view.tokens == 0 { all } else { view.tokens },
        heads,
        run_bytes: view.run_bytes,
        token_stride_bytes: or(
            view.token_stride_bytes,
            view.run_bytes.saturating_mul(u64::from(heads)),
        ),
        head_stride_bytes: or(view.head_stride_bytes, view.run_bytes),
        memory: memory_of(view.memory)?,
    }))
}

/// Where memory is said to be.
pub(crate) fn memory_of(code: u32) -> Result<Memory> {
    match code {
        KVT_MEMORY_HOST => Ok(Memory::Host),
        KVT_MEMORY_DEVICE => Ok(Memory::Device),
        other => fail!(Invalid, "memory {other} is none of KVT_MEMORY_*"),
    }
}

/// A plane of a view that says itself how many tokens it has.
///
/// # Safety
/// As [`place_of`].
pub(crate) unsafe fn plane_alone(view: &kvt_view_t) -> Result<PlaneView> {
    // SAFETY: the caller's promise.
    let plane = unsafe { plane_anywhere(view)? };
    if plane.memory != Memory::Host {
        fail!(Unavailable, "a view of device memory, and it is the processor that reads it");
    }
    Ok(plane)
}

/// A view that says all of itself, in whatever memory.
///
/// # Safety
/// As [`place_of`].
pub(crate) unsafe fn plane_anywhere(view: &kvt_view_t) -> Result<PlaneView> {
    if view.tokens == 0 && view.pages.is_null() {
        fail!(Invalid, "a view without pages says here how many tokens it has");
    }
    // SAFETY: the caller's promise.
    match unsafe { plane_of(view, Some(view.tokens.into()), &mut Tables::new())? } {
        Some(plane) => Ok(plane),
        None => fail!(Invalid, "the view is empty"),
    }
}

/// The views of a move of so many tokens; none = to the end of a session.
///
/// # Safety
/// The arrays of K and V are null or valid for reads of `layers` views.
pub(crate) unsafe fn views_of(
    (k, v, stride_bytes): (*const kvt_view_t, *const kvt_view_t, u64),
    first_layer: u32,
    layers: usize,
    tokens: Option<u64>,
) -> Result<Views> {
    // SAFETY: the caller's promise; none without a pointer.
    let rows = |data: *const kvt_view_t| unsafe {
        let count = if data.is_null() { 0 } else { layers as u64 };
        Strided::new(data.cast_mut(), count, stride_bytes, layers as u64)
    };
    let (k_rows, v_rows) = (rows(k)?, rows(v)?);
    if k_rows.len() == 0 {
        fail!(Invalid, "k is null: give the views of the engine's K tensors, one for each layer");
    }
    let mut tables = Tables::new();
    let mut views = Vec::new();
    views.try_reserve_exact(layers).map_err(|_| Status::NoMem)?;
    for i in 0..layers {
        // SAFETY: the caller's promise.
        let mut plane = |name: &str, row: Result<kvt_view_t>| unsafe {
            let at = u64::from(first_layer) + i as u64;
            row.and_then(|row| plane_of(&row, tokens, &mut tables))
                .map_err(|e: Error| e.within(&format!("{name} of layer {at}")))
        };
        let Some(k) = plane("K", k_rows.get(i))? else {
            fail!(Invalid, "the view of K of layer {} is empty", first_layer as usize + i);
        };
        let v = if v_rows.len() > 0 { plane("V", v_rows.get(i))? } else { None };
        views.push(LayerViews { k, v });
    }
    Ok(Views(views))
}

/// Device memory needs a device that reaches it.
pub(crate) fn check_memory(store: &Store, views: &Views, first_layer: u32) -> Result<()> {
    let Some((name, at)) = views.on_device().filter(|_| !store.reaches_device()) else {
        return Ok(());
    };
    fail!(
        Unavailable,
        "{name} of layer {} is in device memory, and the store was opened with no device that \
         reaches it",
        first_layer as usize + at
    );
}
