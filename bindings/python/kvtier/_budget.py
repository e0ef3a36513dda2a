"""Budgets: the most bytes that may be used in each tier, and the accounts that use them."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional

from . import _abi, _callbacks, _reaper
from ._lib import check, check_err, lib, text_pointer, u32, u64
from ._op import Op
from ._resource import Resource, byref, new_error

if TYPE_CHECKING:
    from ._queue import Queue
    from ._runtime import Runtime

TIER_DEVICE = _abi.KVT_TIER_DEVICE
TIER_HOST = _abi.KVT_TIER_HOST
TIER_DISK = _abi.KVT_TIER_DISK
TIER_REMOTE = _abi.KVT_TIER_REMOTE
TIER_PINNED = _abi.KVT_TIER_PINNED
_TIERS = (TIER_DEVICE, TIER_HOST, TIER_DISK, TIER_REMOTE, TIER_PINNED)

#: Called with a tier, the bytes to reclaim and the seconds left (None: no deadline). Returns how
#: many bytes it will release soon.
Reclaimer = Callable[[int, int, Optional[float]], Optional[int]]

_NO_LIMIT = 2**64 - 1


class BudgetReport(NamedTuple):
    """The memory limits that a budget found on this machine; None: no limit."""

    total_bytes: int
    available_bytes: int
    cgroup_limit_bytes: Optional[int]
    cgroup_headroom_bytes: Optional[int]
    effective_bytes: int
    reserve_bytes: int
    lock_quota_bytes: Optional[int]
    locked_bytes: int
    accounts: int
    cgroup_version: int


class TierReport(NamedTuple):
    """Counters of one tier."""

    asked_bytes: int
    limit_bytes: int
    reserved_bytes: int
    committed_bytes: int
    peak_bytes: int
    free_bytes: int
    refused: int
    waiting: int
    reclaim_requested_bytes: int


class AccountBytes(NamedTuple):
    """The bytes that an account has in a tier."""

    reserved_bytes: int
    used_bytes: int


class BudgetJob(_reaper.Job):
    """Closes a budget."""

    __slots__ = ()

    def attempt(self) -> int:
        return int(lib.kvt_budget_close(byref(self.handle), None))


class AccountJob(_reaper.Job):
    """Closes a dropped account and releases its own bytes, which no caller can release any more.
    Its buffers release their bytes themselves."""

    __slots__ = ()

    def __init__(self, handle: _abi.kvt_account_p) -> None:
        super().__init__(handle, _reaper.RANK_ACCOUNT)

    def attempt(self) -> int:
        status = int(lib.kvt_account_close(byref(self.handle), None))
        if status != _abi.KVT_E_BUSY:
            return status
        for tier in _TIERS:
            reserved, used = ctypes.c_uint64(), ctypes.c_uint64()
            if lib.kvt_account_held(self.handle, tier, byref(reserved), byref(used)):
                continue
            if reserved.value:
                lib.kvt_account_commit(self.handle, tier, reserved.value, 0, None)
            if used.value:
                lib.kvt_account_release(self.handle, tier, used.value, None)
        return int(lib.kvt_account_close(byref(self.handle), None))


def _limit(value: Optional[int]) -> Optional[int]:
    return None if value == _NO_LIMIT else value


class Budget(Resource):
    """Limits in bytes per tier, hard at every instant. None selects the library's default:

    - host tier: half of the memory that this process may still use
    - locked memory: its quota
    - reserve: an eighth of the memory that this process may use, at most 512 MiB

    >>> import kvtier
    >>> with kvtier.Runtime() as runtime, runtime.budget(host_bytes=1 << 20) as budget:
    ...     with budget.account("cache") as account:
    ...         account.reserve(kvtier.TIER_HOST, 1 << 19)
    ...         free = budget.tier(kvtier.TIER_HOST).free_bytes
    ...         account.commit(kvtier.TIER_HOST, 1 << 19, 0)      # given back, unused
    >>> free
    524288
    """

    _type_name = "budget"

    def __init__(self, runtime: "Runtime", *, device_bytes: int = 0,
                 host_bytes: Optional[int] = None, disk_bytes: int = 0, remote_bytes: int = 0,
                 pinned_bytes: Optional[int] = None, reserve_bytes: Optional[int] = None,
                 strict: bool = False) -> None:
        self._runtime = runtime
        opts = _abi.kvt_budget_opts_t(
            device_bytes=u64(device_bytes), host_bytes=u64(host_bytes or 0),
            disk_bytes=u64(disk_bytes), remote_bytes=u64(remote_bytes),
            pinned_bytes=u64(pinned_bytes or 0), reserve_bytes=u64(reserve_bytes or 0),
        )
        opts.flags = (
            (_abi.KVT_BUDGET_STRICT if strict else 0)
            | (_abi.KVT_BUDGET_ZERO_HOST if host_bytes == 0 else 0)
            | (_abi.KVT_BUDGET_ZERO_PINNED if pinned_bytes == 0 else 0)
            | (_abi.KVT_BUDGET_ZERO_RESERVE if reserve_bytes == 0 else 0)
        )
        handle, err = _abi.kvt_budget_p(), new_error()
        check_err(lib.kvt_budget_open(runtime._raw, byref(opts), byref(handle), byref(err)), err)
        self._own(BudgetJob(handle, _reaper.RANK_BUDGET))

    def account(self, name: str = "", *, priority: int = 0,
                reclaim: Optional[Reclaimer] = None) -> "Account":
        """Opens an account."""
        return Account(self, name, priority=priority, reclaim=reclaim)

    def resize(self, tier: int, nbytes: int) -> None:
        """Changes a tier's limit."""
        err = new_error()
        check_err(lib.kvt_budget_resize(self._raw, u32(tier), u64(nbytes), byref(err)), err)

    def report(self) -> BudgetReport:
        """Measures now what this process may use."""
        r = _abi.kvt_budget_report_t()
        check(lib.kvt_budget_report(self._raw, byref(r)))
        return BudgetReport(r.total_bytes, r.available_bytes, _limit(r.cgroup_limit_bytes),
                            _limit(r.cgroup_headroom_bytes), r.effective_bytes, r.reserve_bytes,
                            _limit(r.lock_quota_bytes), r.locked_bytes, r.accounts,
                            r.cgroup_version)

    def tier(self, tier: int) -> TierReport:
        """Returns the counters of a tier."""
        r = _abi.kvt_tier_report_t()
        check(lib.kvt_budget_tier(self._raw, u32(tier), byref(r)))
        return TierReport(r.asked_bytes, r.limit_bytes, r.reserved_bytes, r.committed_bytes,
                          r.peak_bytes, r.free_bytes, r.refused, r.waiting,
                          r.reclaim_requested_bytes)

    def close(self) -> None:
        """Closes the budget. Waiting reservations end with `ClosedError`; accounts stay open and
        can still release bytes."""
        if self.closed:
            return
        self._raw  # noqa: B018: not in a forked child
        err = new_error()
        check_err(lib.kvt_budget_close(byref(self._job.handle), byref(err)), err)
        self._released()


class Account(Resource):
    """One owner's part of a budget: see `Budget`. The library calls `reclaim` when another
    account needs bytes."""

    _type_name = "account"

    def __init__(self, budget: Budget, name: str = "", *, priority: int = 0,
                 reclaim: Optional[Reclaimer] = None) -> None:
        self._budget = budget
        text = name.encode()
        opts = _abi.kvt_account_opts_t(priority=priority, name_bytes=len(text))
        opts.name = text_pointer(text, empty_is_none=True)
        number = 0
        if reclaim is not None:
            number = _callbacks.register(reclaim)
            opts.reclaim, opts.destroy, opts.user_data = (
                on_reclaim, _callbacks.on_destroy, number)
        handle, err = _abi.kvt_account_p(), new_error()
        status = lib.kvt_account_open(budget._raw, byref(opts), byref(handle), byref(err))
        if status != _abi.KVT_OK and number:
            _callbacks.forget(number)
        check_err(status, err)
        self._own(AccountJob(handle))

    def reserve(self, tier: int, nbytes: int) -> None:
        """Reserves bytes now; raises `BudgetError` if they do not fit."""
        err = new_error()
        check_err(lib.kvt_account_reserve(self._raw, u32(tier), u64(nbytes), byref(err)), err)

    def reserve_later(self, tier: int, nbytes: int, *, queue: "Optional[Queue]" = None,
                      tag: object = None, timeout: Optional[float] = None) -> Op:
        """Reserves bytes as soon as they are free, first come, first served. The op succeeds
        when they are reserved. A dropped op is cancelled."""
        from ._runtime import submit_opts

        runtime, raw = self._budget._runtime, self._raw
        tier, nbytes = u32(tier), u64(nbytes)
        op = Op(runtime, queue, tag, True)
        opts, _ = submit_opts(runtime, op, queue, timeout, 0, 0)
        handle, err = _abi.kvt_op_p(), new_error()
        status = lib.kvt_account_reserve_later(raw, tier, nbytes, byref(opts),
                                               byref(handle), byref(err))
        if status != _abi.KVT_OK:
            op._submit_failed()
        check_err(status, err)
        op._bind(handle.value)
        return op

    def commit(self, tier: int, reserved_bytes: int, used_bytes: int) -> None:
        """Turns reserved bytes into used ones and frees the difference."""
        err = new_error()
        check_err(lib.kvt_account_commit(self._raw, u32(tier), u64(reserved_bytes),
                                         u64(used_bytes), byref(err)), err)

    def release(self, tier: int, nbytes: int) -> None:
        """Releases used bytes."""
        err = new_error()
        check_err(lib.kvt_account_release(self._raw, u32(tier), u64(nbytes), byref(err)), err)

    def held(self, tier: int) -> AccountBytes:
        """Returns the account's bytes in a tier."""
        reserved, used = ctypes.c_uint64(), ctypes.c_uint64()
        check(lib.kvt_account_held(self._raw, u32(tier), byref(reserved), byref(used)))
        return AccountBytes(reserved.value, used.value)

    def close(self) -> None:
        """Closes the account; raises `BusyError` while it has or awaits bytes."""
        if self.closed:
            return
        self._raw  # noqa: B018: not in a forked child
        err = new_error()
        check_err(lib.kvt_account_close(byref(self._job.handle), byref(err)), err)
        self._released()


def _call_reclaimer(reclaim: Reclaimer, tier: int, nbytes: int, deadline_ns: int) -> int:
    left = (deadline_ns - time.monotonic_ns()) / 1e9 if deadline_ns else None
    return min(max(0, int(reclaim(tier, nbytes, left) or 0)), _NO_LIMIT)


def _on_reclaim(number: int, tier: int, nbytes: int, deadline_ns: int) -> int:
    reclaim: Any = _callbacks.find(number)
    if reclaim is None:
        return 0
    return _callbacks.call(_call_reclaimer, reclaim, tier, nbytes, deadline_ns) or 0


on_reclaim = _abi.kvt_reclaim_fn(_on_reclaim)
