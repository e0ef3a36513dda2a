//! Accounts: one owner's part in a budget.

use std::ffi::{c_char, c_void};

use crate::base::account::Account;
use crate::base::budget::{Reclaim, Tier};
use crate::base::callback::Foreign;
use crate::base::op::Op;
use crate::base::sync::Arc;
use crate::ffi::abi::{
    Plain, capi, encode, enter, foreign, free, insert, inspect, known_flags, noun, put, read,
    require, text,
};
use crate::ffi::budget::kvt_budget_t;
use crate::ffi::error::kvt_error_t;
use crate::ffi::logging::kvt_destroy_fn;
use crate::ffi::op::{kvt_op_t, kvt_submit_opts_t, submit_opts};
use crate::ffi::status::kvt_status_t;

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
