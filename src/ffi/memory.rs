//! Budgets, accounts, buffers, and views of the engine's tensors.
//!
//! A budget limits the bytes of each tier for all that share it; an account is one user's part of
//! it. Bytes are reserved before they are allocated, so that a limit is never exceeded. Buffers are
//! memory of the library's, pinned or on huge pages. A view describes one plane (K or V of one
//! layer) in the engine's own memory: contiguous, strided, or in pages.
//!
//! Life cycle: kvt_budget_open, kvt_account_open, kvt_account_reserve, _commit, _release,
//! kvt_account_close, kvt_budget_close; kvt_buffer_alloc, kvt_buffer_address, kvt_buffer_free.
//! Views are plain values.
//!
//! ```c
//! /* A paged KV cache: block b of 16 tokens at pages[b], 8 heads of 128 elements of 2 bytes. */
//! kvt_view_t view = {0};
//! view.pages = pages, view.page_count = page_count, view.page_tokens = 16;
//! view.heads = 8, view.run_bytes = 128 * 2;
//! /* Pinned memory for staging, charged to a budget of 1 GiB of host memory. */
//! kvt_budget_opts_t limits = KVT_BUDGET_OPTS_INIT;
//! limits.host_bytes = 1u << 30;
//! if (kvt_budget_open(runtime, &limits, &budget, &err) != KVT_OK) return fail(err);
//! if (kvt_account_open(budget, NULL, &account, &err) != KVT_OK) return fail(err);
//! kvt_buffer_opts_t opts = KVT_BUFFER_OPTS_INIT;
//! opts.bytes = 16u << 20, opts.flags = KVT_BUFFER_TRY_PIN, opts.account = account;
//! if (kvt_buffer_alloc(runtime, &opts, &buffer, &err) != KVT_OK) return fail(err);
//! use(&view);
//! ```

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
    known_flags, length_of, noun, numbers, pin, pin_optional, put, read, require, text, write,
};
use crate::ffi::base::{kvt_destroy_fn, kvt_error_t, kvt_status_t};
use crate::ffi::runtime::{kvt_op_t, kvt_runtime_t, kvt_submit_opts_t, on_runtime, submit_opts};
use crate::store::handle::Store;
use crate::store::state::session::{LayerViews, PlaneView, Tokens, Views};

// Budgets.

/// Hard limits on the bytes in use, one for each tier.
pub struct kvt_budget_t(());

/// Tiers: device memory, host memory, local disk, remote stores, and locked host memory; a locked
/// buffer is charged in the last and in KVT_TIER_HOST. Functions of budgets and accounts take one
/// as `tier`.
pub type kvt_tier_t = u32;

pub const KVT_TIER_DEVICE: kvt_tier_t = 0;
pub const KVT_TIER_HOST: kvt_tier_t = 1;
pub const KVT_TIER_DISK: kvt_tier_t = 2;
pub const KVT_TIER_REMOTE: kvt_tier_t = 3;
pub const KVT_TIER_PINNED: kvt_tier_t = 4;

const _: () = assert!(KVT_TIER_PINNED as usize + 1 == TIERS);

/// Flags of a budget.
pub type kvt_budget_flags_t = u64;

/// Fail with KVT_E_BUDGET if the host or pinned limit exceeds the available memory. Otherwise the
/// limit is lowered to it.
pub const KVT_BUDGET_STRICT: kvt_budget_flags_t = 1;
/// Take 0 in host_bytes, pinned_bytes or reserve_bytes as 0 bytes, not as the default.
pub const KVT_BUDGET_ZERO_HOST: kvt_budget_flags_t = 2;
pub const KVT_BUDGET_ZERO_PINNED: kvt_budget_flags_t = 4;
pub const KVT_BUDGET_ZERO_RESERVE: kvt_budget_flags_t = 8;

/// Options of a budget.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_budget_opts_t {
    pub struct_size: u64,
    pub flags: kvt_budget_flags_t,
    /// Limit of the device tier; 0 = no bytes.
    pub device_bytes: u64,
    /// Limit of the host tier; 0 = half of what this process may still use, which is min(cgroup
    /// headroom, available memory) - reserve_bytes.
    pub host_bytes: u64,
    /// Limit of all disk tiers together. 0 = no limit for stores, no bytes for accounts of the
    /// caller.
    pub disk_bytes: u64,
    /// Limit of the remote tier; 0 = no bytes.
    pub remote_bytes: u64,
    /// Limit of locked memory; 0 = what this process may still lock. At most the host limit.
    pub pinned_bytes: u64,
    /// Memory left to the rest of the process; 0 = an eighth of min(cgroup headroom, available
    /// memory), at most 512 MiB.
    pub reserve_bytes: u64,
}

/// Memory of the machine, and limits of this process, as measured during the call.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_budget_report_t {
    pub struct_size: u64,
    /// RAM of the machine.
    pub total_bytes: u64,
    /// The kernel's estimate of the bytes available without swapping.
    pub available_bytes: u64,
    /// Lowest memory limit of the process's cgroup and its ancestors; UINT64_MAX = none.
    pub cgroup_limit_bytes: u64,
    /// Bytes still free below that limit; UINT64_MAX = no limit.
    pub cgroup_headroom_bytes: u64,
    /// min(cgroup_headroom_bytes, available_bytes).
    pub effective_bytes: u64,
    /// Bytes of those that the budget leaves to the rest of the process, fixed when it was opened.
    pub reserve_bytes: u64,
    /// Bytes that this process may lock in total; UINT64_MAX = unlimited.
    pub lock_quota_bytes: u64,
    /// Bytes that it has locked.
    pub locked_bytes: u64,
    /// Open accounts of the budget.
    pub accounts: u64,
    /// 1 or 2; 0 = no cgroup limit.
    pub cgroup_version: u32,
    pub reserved: u32,
}

/// Limit and counters of one tier of a budget.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_tier_report_t {
    pub struct_size: u64,
    /// Requested limit.
    pub asked_bytes: u64,
    /// Effective limit: the requested one, lowered to what the machine has.
    pub limit_bytes: u64,
    /// Reserved by accounts and not yet in use.
    pub reserved_bytes: u64,
    /// In use by accounts.
    pub committed_bytes: u64,
    /// Most bytes ever reserved and committed together.
    pub peak_bytes: u64,
    /// limit_bytes - reserved_bytes - committed_bytes, at least 0.
    pub free_bytes: u64,
    /// Reservations that failed at once.
    pub refused: u64,
    /// Reservations that wait.
    pub waiting: u64,
    /// Bytes that reclaim callbacks were asked for so far.
    pub reclaim_requested_bytes: u64,
}

pub(crate) struct BudgetNoun(pub(crate) Arc<Budget>);

noun!(BudgetNoun, kvt_budget_t, 5, "budget");

/// Opens a budget, with limits from the memory that the machine has now.
///
/// @return KVT_E_BUDGET (with KVT_BUDGET_STRICT only).
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
    let or_default =
        |bytes: u64, zero: u64| (bytes != 0 || given.flags & zero != 0).then_some(bytes);
    let opts = BudgetOpts {
        limits: [
            Some(given.device_bytes),
            or_default(given.host_bytes, KVT_BUDGET_ZERO_HOST),
            Some(given.disk_bytes),
            Some(given.remote_bytes),
            or_default(given.pinned_bytes, KVT_BUDGET_ZERO_PINNED),
        ],
        reserve_bytes: or_default(given.reserve_bytes, KVT_BUDGET_ZERO_RESERVE),
        strict: given.flags & KVT_BUDGET_STRICT != 0,
    };
    let budget = on_runtime(runtime, |core| Budget::open(core, &opts))?;
    out.write(insert(BudgetNoun(budget))?);
    Ok(())
}

/// Closes a budget. Waiting reservations end with KVT_E_CLOSED and new ones are refused. Its
/// accounts stay valid and can still release bytes until they are closed.
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

/// Sets the limit of a tier. Below the bytes in use, reservations are granted again only after
/// owners, whose reclaim callbacks are called, have released enough.
///
/// @param bytes  New limit; host and pinned limits are lowered to what the machine has.
#[capi]
pub unsafe extern "C" fn kvt_budget_resize(
    budget: *const kvt_budget_t,
    tier: kvt_tier_t,
    bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let tier = Tier::from_code(tier)?;
    let budget = enter(budget)?;
    budget.0.resize(tier, bytes)
}

/// Measures the memory that this process may use. Reads files in /proc and /sys: not for a hot
/// path.
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

/// Reads the limit and counters of one tier.
#[capi]
pub unsafe extern "C" fn kvt_budget_tier(
    budget: *const kvt_budget_t,
    tier: kvt_tier_t,
    out: *mut kvt_tier_report_t,
) -> kvt_status_t {
    let tier = Tier::from_code(tier)?;
    check_out(out)?;
    let budget = inspect(budget)?;
    let usage = budget.0.usage(tier);
    let used = usage.reserved_bytes + usage.committed_bytes;
    write(
        out,
        &kvt_tier_report_t {
            struct_size: 0,
            asked_bytes: usage.asked_bytes,
            limit_bytes: usage.limit_bytes,
            reserved_bytes: usage.reserved_bytes,
            committed_bytes: usage.committed_bytes,
            peak_bytes: usage.peak_bytes,
            free_bytes: usage.limit_bytes.saturating_sub(used),
            refused: usage.refused,
            waiting: usage.waiting,
            reclaim_requested_bytes: usage.reclaim_requested_bytes,
        },
    );
    Ok(())
}

// Accounts.

/// One owner's part of a budget: the bytes that it has reserved and committed.
pub struct kvt_account_t(());

/// Asks an owner to release up to `bytes` of a tier. Returns the bytes that it promises to release,
/// 0 if none. The release may follow later, from any thread. A promise counts until `deadline_ns`
/// (0 = none). Called on the notifier thread, with no lock held; it must not unwind and must not
/// wait.
pub type kvt_reclaim_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        tier: kvt_tier_t,
        bytes: u64,
        deadline_ns: u64,
    ) -> u64,
>;

/// Options of an account.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_account_opts_t {
    pub struct_size: u64,
    /// 0: no flags are defined.
    pub flags: u64,
    /// Name in messages, at most 64 bytes; null = none.
    pub name: *const c_char,
    pub name_bytes: u64,
    /// -2^31 to 2^31 - 1. Owners of low priority are asked to release bytes first.
    pub priority: i64,
    /// Called when other owners need bytes; null = never.
    pub reclaim: kvt_reclaim_fn,
    /// Passed to reclaim, and to destroy at the end; taken over only on success.
    pub user_data: *mut c_void,
    /// May be null.
    pub destroy: kvt_destroy_fn,
}

pub(crate) struct AccountNoun(pub(crate) Arc<Account>);

noun!(AccountNoun, kvt_account_t, 6, "account");

const MAX_ACCOUNT_NAME_BYTES: u64 = 64;

/// Opens an account in a budget.
///
/// @return KVT_E_LIMIT (1024 accounts of the budget are open, or the name is too long).
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
    let Ok(priority) = i32::try_from(given.priority) else {
        fail!(
            Invalid,
            "priority {} does not fit in 32 bits: pass -2^31 to 2^31 - 1",
            given.priority
        );
    };
    let name_bytes = length_of("name", given.name, given.name_bytes)?;
    if name_bytes > MAX_ACCOUNT_NAME_BYTES {
        fail!(
            Limit,
            "the name of an account has at most {MAX_ACCOUNT_NAME_BYTES} bytes, not {name_bytes}"
        );
    }
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

/// Reserves bytes at once, or fails. Does not overtake reservations that wait.
///
/// @return KVT_E_BUDGET (the bytes do not fit, or reservations wait).
#[capi]
pub unsafe extern "C" fn kvt_account_reserve(
    account: *const kvt_account_t,
    tier: kvt_tier_t,
    bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let tier = Tier::from_code(tier)?;
    let account = enter(account)?;
    account.0.reserve(tier, bytes)
}

/// Reserves bytes as soon as they are free. Reservations of a tier are granted in their order,
/// while the reclaim callbacks of owners are called. The op ends with KVT_OK when the bytes are
/// reserved, with KVT_E_BUDGET when a new limit makes that impossible.
///
/// @param out  May be null if opts names a queue.
/// @return KVT_E_BUDGET (more than the limit of the tier), KVT_E_AGAIN (4096 reservations of the
///         budget wait, or the queue or the runtime is full), KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_account_reserve_later(
    account: *const kvt_account_t,
    tier: kvt_tier_t,
    bytes: u64,
    opts: *const kvt_submit_opts_t,
    out: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let tier = Tier::from_code(tier)?;
    let (opts, each) = submit_opts(opts, out.is_null())?;
    if each {
        fail!(Invalid, "KVT_SUBMIT_EACH is set, and a reservation is one op: clear the flag");
    }
    let account = enter(account)?;
    let op = account.0.reserve_later(tier, bytes, &opts)?;
    put(out, encode::<Op>(op.key()));
    Ok(())
}

/// Commits reserved bytes: used_bytes are in use from now on, the rest of reserved_bytes is free
/// again.
///
/// @param reserved_bytes  At most what the account has reserved in the tier.
/// @param used_bytes      At most reserved_bytes; 0 ends the reservation.
#[capi]
pub unsafe extern "C" fn kvt_account_commit(
    account: *const kvt_account_t,
    tier: kvt_tier_t,
    reserved_bytes: u64,
    used_bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let tier = Tier::from_code(tier)?;
    let account = enter(account)?;
    account.0.commit(tier, reserved_bytes, used_bytes)
}

/// Releases bytes in use.
///
/// @param bytes  At most what the account has committed in the tier.
#[capi]
pub unsafe extern "C" fn kvt_account_release(
    account: *const kvt_account_t,
    tier: kvt_tier_t,
    bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let tier = Tier::from_code(tier)?;
    let account = inspect(account)?;
    account.0.release(tier, bytes)
}

/// Reads the bytes of a tier that an account holds.
///
/// @param out_reserved_bytes  Reserved and not yet in use; may be null.
/// @param out_used_bytes      Committed; may be null.
#[capi]
pub unsafe extern "C" fn kvt_account_held(
    account: *const kvt_account_t,
    tier: kvt_tier_t,
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

/// Closes an account that has released all its bytes. Waits for a running call of its reclaim
/// callback, except inside a callback.
///
/// @return KVT_E_BUSY (the account holds bytes, a reservation waits, or, inside a callback, its
///         reclaim callback is running).
#[capi]
pub unsafe extern "C" fn kvt_account_close(
    account: *mut *mut kvt_account_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    free(account, |noun| noun.0.close())
}

// Buffers.

/// A range of host memory that ops read and write. Its bytes belong to the library from the
/// submission of such an op until the release of that op, otherwise to the caller.
pub struct kvt_buffer_t(());

/// Flags of a buffer.
pub type kvt_buffer_flags_t = u64;

/// Lock the memory in RAM, or fail.
pub const KVT_BUFFER_PIN: kvt_buffer_flags_t = 1;
/// Lock the memory in RAM if the lock quota and the account allow it.
pub const KVT_BUFFER_TRY_PIN: kvt_buffer_flags_t = 2;
/// Use reserved huge pages of 2 MiB, or fail.
pub const KVT_BUFFER_HUGETLB: kvt_buffer_flags_t = 4;
/// Ask the kernel for transparent huge pages.
pub const KVT_BUFFER_TRY_HUGE: kvt_buffer_flags_t = 8;
/// Make all pages present before the call returns, in parallel on the workers. Not in a callback.
pub const KVT_BUFFER_PREFAULT: kvt_buffer_flags_t = 16;

/// Kinds of pages: normal, transparent huge pages (the kernel was asked for them), reserved huge
/// pages, the caller's memory.
pub type kvt_pages_t = u32;

pub const KVT_PAGES_NORMAL: kvt_pages_t = 0;
pub const KVT_PAGES_TRANSPARENT: kvt_pages_t = 1;
pub const KVT_PAGES_HUGETLB: kvt_pages_t = 2;
pub const KVT_PAGES_FOREIGN: kvt_pages_t = 3;

/// Options of kvt_buffer_alloc.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_buffer_opts_t {
    pub struct_size: u64,
    pub flags: kvt_buffer_flags_t,
    /// 1 to 2^46.
    pub bytes: u64,
    /// A power of two up to 1 GiB, with KVT_BUFFER_HUGETLB up to 2 MiB; 0 = one page.
    pub align_bytes: u64,
    /// Charged in KVT_TIER_HOST and, for locked memory, KVT_TIER_PINNED; null = no account.
    pub account: *const kvt_account_t,
}

/// Properties of a buffer.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_buffer_info_t {
    pub struct_size: u64,
    pub address: *mut c_void,
    /// Usable size.
    pub bytes: u64,
    /// Charged to its account: the size in whole pages; 0 for the caller's memory.
    pub charged_bytes: u64,
    /// Uses by ops that are not released, one for each item that reads or writes the buffer.
    pub in_flight: u64,
    /// 1 = locked in RAM.
    pub pinned: u32,
    pub pages: kvt_pages_t,
}

pub(crate) struct BufferNoun {
    pub(crate) core: Arc<Core>,
    pub(crate) buffer: Arc<Buffer>,
}

noun!(BufferNoun, kvt_buffer_t, 7, "buffer");

/// Smallest number of bytes that one item prefaults.
const PREFAULT_BYTES: u64 = 16 << 20;

/// Allocates a buffer. Forked children do not inherit its memory.
///
/// @param opts  Its `bytes` must be set.
/// @return KVT_E_IO, KVT_E_LIMIT, KVT_E_BUDGET, KVT_E_PIN_QUOTA, KVT_E_UNAVAILABLE (too few
///         reserved huge pages are free); with KVT_BUFFER_PREFAULT also KVT_E_AGAIN and
///         KVT_E_CANCELLED (the runtime closes).
#[capi]
pub unsafe extern "C" fn kvt_buffer_alloc(
    runtime: *const kvt_runtime_t,
    opts: *const kvt_buffer_opts_t,
    out: *mut *mut kvt_buffer_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = read(opts)?;
    let request = allocation_request(&given)?;
    let noun = on_runtime(runtime, |core| {
        core.check_open()?;
        let buffer = Arc::new(Buffer::map(&request, core.faults())?);
        if given.flags & KVT_BUFFER_PREFAULT != 0 {
            prefault(core, &buffer)?;
        }
        Ok(BufferNoun { core: core.clone(), buffer })
    })?;
    out.write(insert(noun)?);
    Ok(())
}

fn allocation_request(given: &kvt_buffer_opts_t) -> Result<AllocationRequest> {
    let all = KVT_BUFFER_PIN
        | KVT_BUFFER_TRY_PIN
        | KVT_BUFFER_HUGETLB
        | KVT_BUFFER_TRY_HUGE
        | KVT_BUFFER_PREFAULT;
    known_flags(given.flags, all)?;
    let requirement = |must: u64, soft: u64| match (given.flags & must, given.flags & soft) {
        (0, 0) => Requirement::No,
        (0, _) => Requirement::Try,
        _ => Requirement::Must,
    };
    let account = pin_optional(given.account)?.map(|noun| noun.0.clone());
    Ok(AllocationRequest {
        bytes: given.bytes,
        align_bytes: given.align_bytes,
        pin: requirement(KVT_BUFFER_PIN, KVT_BUFFER_TRY_PIN),
        huge: requirement(KVT_BUFFER_HUGETLB, KVT_BUFFER_TRY_HUGE),
        prefer_huge: false,
        account,
    })
}

fn prefault(core: &Arc<Core>, buffer: &Arc<Buffer>) -> Result<()> {
    refuse_reentry()?;
    let count = buffer.bytes().div_ceil(PREFAULT_BYTES).min(MAX_ITEMS as u64);
    let item_bytes = PREFAULT_BYTES.max(buffer.bytes().div_ceil(MAX_ITEMS as u64));
    let mut items = core.item_list(count as usize)?;
    let mut offset = 0;
    while offset < buffer.bytes() {
        let n = item_bytes.min(buffer.bytes() - offset);
        items.push(Item::new(host::PREFAULT, Some((buffer.clone(), offset)), None, n, 0));
        offset += n;
    }
    let op = core.submit(&OpOpts::default(), items, host::run)?;
    op.wait(RELEASED, 0)?;
    op.remove();
    match op.info().status.and_then(Status::from_code) {
        Some(Status::Ok) => Ok(()),
        status => Err(op.error().unwrap_or_else(|| status.unwrap_or(Status::Panic).into())),
    }
}

/// Makes a buffer of memory that belongs to the caller. It must stay valid until the buffer is
/// freed.
///
/// @param size       1 to 2^46 bytes.
/// @param user_data  Passed to destroy; taken over only on success.
/// @param destroy    Called once, when the buffer is freed and no op uses it; may be null.
/// @return KVT_E_LIMIT.
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
/// @return KVT_E_BUSY (an op uses it).
#[capi]
pub unsafe extern "C" fn kvt_buffer_free(buffer: *mut *mut kvt_buffer_t) -> kvt_status_t {
    free(buffer, |noun| match noun.buffer.retire() {
        true => Ok(()),
        false if noun.buffer.is_retired() => Err(Status::Handle.into()),
        false => Err(Status::Busy.into()),
    })
}

/// Reads the address and the usable size of a buffer. Both hold until it is freed.
///
/// @param out_address  May be null.
/// @param out_bytes    May be null.
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

/// Reads the properties of a buffer.
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

/// Work of an item: one or more bits.
pub type kvt_item_work_t = u32;

/// Copy the source to the target; the ranges may overlap.
pub const KVT_ITEM_COPY: kvt_item_work_t = 1;
/// Report the checksum of the source, as it was read, as the value of the item.
pub const KVT_ITEM_CHECKSUM: kvt_item_work_t = 2;
/// Compare that checksum with `expect`; KVT_E_CORRUPT if they differ. A copy by the same item is
/// made all the same.
pub const KVT_ITEM_VERIFY: kvt_item_work_t = 4;
/// Make the target's pages present and keep their contents. Not combined with other bits.
pub const KVT_ITEM_PREFAULT: kvt_item_work_t = 8;

const _: () = assert!(KVT_ITEM_COPY == host::COPY && KVT_ITEM_CHECKSUM == host::CHECKSUM);
const _: () = assert!(KVT_ITEM_VERIFY == host::VERIFY && KVT_ITEM_PREFAULT == host::PREFAULT);

/// One item of kvt_buffer_submit: work on up to two buffers.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_buffer_item_t {
    pub kind: kvt_item_work_t,
    /// 0: no flags are defined.
    pub flags: u32,
    /// Target; null unless `kind` has KVT_ITEM_COPY or KVT_ITEM_PREFAULT.
    pub dst: *const kvt_buffer_t,
    pub dst_offset: u64,
    /// Source; null with KVT_ITEM_PREFAULT.
    pub src: *const kvt_buffer_t,
    pub src_offset: u64,
    pub bytes: u64,
    /// Expected checksum, with KVT_ITEM_VERIFY.
    pub expect: u64,
    /// Tag of the item's op, with KVT_SUBMIT_EACH.
    pub tag: u64,
}

/// Submits work on buffers: all items or none, as one op or, with KVT_SUBMIT_EACH, as one op each.
/// Never waits. Items of an op run in any order and in parallel, so an item must not write what
/// another one reads or writes.
///
/// @param count    1 to 65536.
/// @param out_ops  Receives one op, or `count` ops with KVT_SUBMIT_EACH; may be null if opts names
///                 a queue.
/// @return KVT_E_AGAIN (the queue or the runtime is full), KVT_E_LIMIT.
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
    if given.len() == 0 {
        fail!(Invalid, "count is 0: pass 1 to {MAX_ITEMS} items");
    }
    on_runtime(runtime, |core| {
        let mut list = core.item_list(given.len())?;
        for i in 0..given.len() {
            let item = given.get(i).and_then(|item| item_of(&item));
            list.push(item.map_err(|e: Error| e.within(&format!("item {i}")))?);
        }
        let write_op = |i: usize, op: &OpRef| {
            if !out_ops.is_null() {
                // SAFETY: the caller has room for `count` handles, or for one.
                out_ops.add(i).write(encode::<Op>(op.key()));
            }
        };
        if each {
            let tag_of = |i| given.get(i).map_or(0, |item: kvt_buffer_item_t| item.tag);
            return core.submit_each(&opts, list, tag_of, host::run, write_op);
        }
        write_op(0, &core.submit(&opts, list, host::run)?);
        Ok(())
    })
}

fn item_of(given: &kvt_buffer_item_t) -> Result<Item> {
    if given.flags != 0 {
        fail!(Invalid, "flags of an item are {:#x}: none are defined, pass 0", given.flags);
    }
    let (wants_dst, wants_src) = host::needs(given.kind)?;
    let (kind, bytes) = (given.kind, given.bytes);
    let dst = range_of("target", kind, wants_dst, (given.dst, given.dst_offset), bytes)?;
    let src = range_of("source", kind, wants_src, (given.src, given.src_offset), bytes)?;
    let is_freed = |range: &Option<(Arc<Buffer>, u64)>| {
        range.as_ref().is_some_and(|(buffer, _)| buffer.is_retired())
    };
    let (target, source) = (dst.clone(), src.clone());
    let item = Item::new(kind, dst, src, bytes, given.expect);
    // The item counts as a use from here on: an earlier free is seen below, a later one is refused
    // with KVT_E_BUSY.
    if is_freed(&target) || is_freed(&source) {
        fail!(Handle, "a buffer was freed during the submission");
    }
    Ok(item)
}

/// The buffer and offset of one side of an item; `None` if its kind does not use that side.
fn range_of(
    name: &str,
    kind: u32,
    is_used: bool,
    (handle, offset): (*const kvt_buffer_t, u64),
    bytes: u64,
) -> Result<Option<(Arc<Buffer>, u64)>> {
    if !is_used {
        if !handle.is_null() {
            fail!(Invalid, "kind {kind:#x} uses no {name}: pass a null handle for it");
        }
        return Ok(None);
    }
    let noun = pin(handle, Access::Use).map_err(|e| e.within(name))?;
    if noun.buffer.range(offset, bytes).is_none() {
        let size = noun.buffer.bytes();
        fail!(Invalid, "{bytes} bytes at offset {offset} exceed the {name} of {size} bytes");
    }
    Ok(Some((noun.buffer.clone(), offset)))
}

/// Computes the checksum of bytes as ops do: XXH3-64 (seed 0) of every 4096-byte block, the last
/// one as short as it is, then XXH3-64 of these sums as little-endian numbers.
///
/// @param data  May be null if size is 0.
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

/// Element types. BYTES: opaque to the library. F32, F16: IEEE 754. BF16: the upper half of an F32.
/// F8_E4M3, F8_E5M2: 8 bits with 4 or 5 of exponent. I8: signed. I4: 4 bits, two to a byte.
pub type kvt_dtype_t = u32;

pub const KVT_DTYPE_BYTES: kvt_dtype_t = 0;
pub const KVT_DTYPE_F32: kvt_dtype_t = 1;
pub const KVT_DTYPE_F16: kvt_dtype_t = 2;
pub const KVT_DTYPE_BF16: kvt_dtype_t = 3;
pub const KVT_DTYPE_F8_E4M3: kvt_dtype_t = 4;
pub const KVT_DTYPE_F8_E5M2: kvt_dtype_t = 5;
pub const KVT_DTYPE_I8: kvt_dtype_t = 6;
pub const KVT_DTYPE_I4: kvt_dtype_t = 7;

/// Address spaces.
pub type kvt_memory_t = u32;

/// Memory that the processor can access.
pub const KVT_MEMORY_HOST: kvt_memory_t = 0;
/// Memory that only the device can access.
pub const KVT_MEMORY_DEVICE: kvt_memory_t = 1;

/// Most pages of one view.
const MAX_PAGES: usize = 1 << 24;
/// Page tables, the newest first, that are searched for one that was copied already.
const RECENT_TABLES: usize = 4;

/// One plane (K or V) of one layer in the engine's memory, from the first token of a transfer on.
/// The bytes of one head of a token are contiguous; tokens and heads have constant strides. The
/// tokens are at one address or in pages. All zero = no such plane. Stands in arrays and in other
/// structs.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_view_t {
    /// Address of the first token; null with pages.
    pub address: *mut c_void,
    /// Address of each page; null with an address.
    pub pages: *const *mut c_void,
    /// At most 2^24.
    pub page_count: u64,
    /// Added to the address of each page: one page table serves K, V and all layers.
    pub shift_bytes: i64,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Tokens of the view (chunks, for a layer with a state); 0 = as many as the transfer has or,
    /// with pages, as the pages hold. With an address it must be set where no transfer gives a
    /// number: in kvt_rows_t, in kvt_copy_t, and for a transfer to the end of a session.
    pub tokens: u32,
    /// Heads of a token; 0 = 1.
    pub heads: u32,
    pub memory: kvt_memory_t,
    /// Bytes of one head of a token; heads * run_bytes must be what the layout says.
    pub run_bytes: u64,
    /// Bytes from a token to the next; 0 = heads * run_bytes.
    pub token_stride_bytes: u64,
    /// Bytes from a head to the next; 0 = run_bytes.
    pub head_stride_bytes: u64,
}

/// Copied page tables, by address and length of the caller's array.
type PageTables = Vec<(*const *mut c_void, u64, Arc<Vec<u64>>)>;

/// The addresses of a view.
///
/// # Safety
/// `view`'s pages are null or valid for reads.
unsafe fn tokens_of(view: &kvt_view_t, tables: &mut PageTables) -> Result<Tokens> {
    if view.pages.is_null() {
        if view.page_count != 0 || view.page_tokens != 0 || view.shift_bytes != 0 {
            fail!(
                Invalid,
                "pages is null, and page_count, page_tokens or shift_bytes is not 0: pass the \
                 pages, or 0 in these fields"
            );
        }
        return Ok(Tokens::At(view.address.addr() as u64));
    }
    if !view.address.is_null() {
        fail!(Invalid, "address and pages are both set: pass one of them, and null for the other");
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

/// The plane of a view; `None` if the view is empty. `transfer_tokens` is the number of tokens of
/// the transfer; `None` = to the end of a session.
///
/// # Safety
/// As [`tokens_of`].
unsafe fn plane_of(
    view: &kvt_view_t,
    transfer_tokens: Option<u64>,
    tables: &mut PageTables,
) -> Result<Option<PlaneView>> {
    if view.address.is_null() && view.pages.is_null() {
        if view.run_bytes != 0 {
            fail!(
                Invalid,
                "address and pages are both null, and run_bytes is {}: pass one of them, or a view \
                 that is all zero",
                view.run_bytes
            );
        }
        return Ok(None);
    }
    let heads = view.heads.max(1);
    let or = |given: u64, default: u64| if given == 0 { default } else { given };
    let capacity = match (view.pages.is_null(), transfer_tokens) {
        (false, _) => view.page_count.saturating_mul(u64::from(view.page_tokens)),
        (true, Some(tokens)) => tokens,
        (true, None) if view.tokens == 0 => fail!(
            Invalid,
            "the transfer goes to the end of the session, and neither it nor the view has a number \
             of tokens: set tokens in one of them"
        ),
        (true, None) => 0,
    };
    // No transfer has more than u32::MAX tokens.
    let all = u32::try_from(capacity).unwrap_or(u32::MAX);
    Ok(Some(PlaneView {
        // SAFETY: the caller's promise.
        place: unsafe { tokens_of(view, tables)? },
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

/// The kind of memory that a code names.
pub(crate) fn memory_of(code: u32) -> Result<Memory> {
    match code {
        KVT_MEMORY_HOST => Ok(Memory::Host),
        KVT_MEMORY_DEVICE => Ok(Memory::Device),
        other => {
            fail!(Invalid, "memory {other} is unknown: pass KVT_MEMORY_HOST or KVT_MEMORY_DEVICE")
        }
    }
}

/// The plane of a view in host memory that has its own number of tokens.
///
/// # Safety
/// As [`tokens_of`].
pub(crate) unsafe fn plane_alone(view: &kvt_view_t) -> Result<PlaneView> {
    // SAFETY: the caller's promise.
    let plane = unsafe { plane_anywhere(view)? };
    if plane.memory != Memory::Host {
        fail!(
            Unavailable,
            "the view is in device memory, and the processor reads it: pass a view of host memory"
        );
    }
    Ok(plane)
}

/// The plane of a view in any memory that has its own number of tokens.
///
/// # Safety
/// As [`tokens_of`].
pub(crate) unsafe fn plane_anywhere(view: &kvt_view_t) -> Result<PlaneView> {
    if view.tokens == 0 && view.pages.is_null() {
        fail!(Invalid, "tokens is 0: a view at an address needs its number of tokens here");
    }
    // SAFETY: the caller's promise.
    match unsafe { plane_of(view, Some(view.tokens.into()), &mut PageTables::new())? } {
        Some(plane) => Ok(plane),
        None => fail!(Invalid, "the view is empty: set its address or its pages"),
    }
}

/// The views of a transfer; `tokens` is its number of tokens, `None` = to the end of a session.
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
        fail!(Invalid, "k is null: pass the views of the engine's K tensors, one for each layer");
    }
    let mut tables = PageTables::new();
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
            fail!(
                Invalid,
                "the view of K of layer {} is empty: set its address or its pages",
                first_layer as usize + i
            );
        };
        let v = if v_rows.len() > 0 { plane("V", v_rows.get(i))? } else { None };
        views.push(LayerViews { k, v });
    }
    Ok(Views::from(views))
}

/// Fails if a view is in device memory that the store's device cannot access.
pub(crate) fn check_memory(store: &Store, views: &Views, first_layer: u32) -> Result<()> {
    let Some((name, at)) = views.on_device().filter(|_| !store.reaches_device()) else {
        return Ok(());
    };
    fail!(
        Unavailable,
        "{name} of layer {} is in device memory, and the store has no device that can access it: \
         open the store with one, or pass views of host memory",
        first_layer as usize + at
    );
}
