"""Budgets and accounts: hard limits, waiting reservations, reclaim."""

from __future__ import annotations

import gc
import threading
from typing import Any, List, Optional

import kvtier
import pytest
from gate import HANG_S, until
from kvtier import TIER_DISK, TIER_HOST, _reaper

MIB = 1 << 20


def test_limits_are_hard(runtime: kvtier.Runtime) -> None:
    with runtime.budget(host_bytes=10 * MIB, disk_bytes=MIB) as budget:
        with budget.account("first") as first, budget.account("second") as second:
            first.reserve(TIER_HOST, 6 * MIB)
            with pytest.raises(kvtier.BudgetError):
                second.reserve(TIER_HOST, 5 * MIB)
            first.commit(TIER_HOST, 6 * MIB, 2 * MIB)
            assert first.held(TIER_HOST) == (0, 2 * MIB)
            second.reserve(TIER_HOST, 8 * MIB)
            tier = budget.tier(TIER_HOST)
            assert (tier.limit_bytes, tier.free_bytes, tier.refused) == (10 * MIB, 0, 1)
            with pytest.raises(kvtier.BusyError):
                first.close()
            first.release(TIER_HOST, 2 * MIB)
            second.commit(TIER_HOST, 8 * MIB, 0)
            second.reserve(TIER_DISK, MIB)
            second.commit(TIER_DISK, MIB, 0)
        report = budget.report()
        assert report.total_bytes > 0 and report.accounts == 0


def test_a_limit_of_zero_forbids_and_none_is_the_default(runtime: kvtier.Runtime) -> None:
    with runtime.budget(host_bytes=0) as none, runtime.budget() as default:
        assert none.tier(TIER_HOST).limit_bytes == 0
        assert default.tier(TIER_HOST).limit_bytes > 0
        with none.account() as account, pytest.raises(kvtier.BudgetError):
            account.reserve(TIER_HOST, 1)
    with pytest.raises(kvtier.BudgetError):
        runtime.budget(host_bytes=1 << 60, strict=True)


def test_buffers_are_charged_to_their_account(runtime: kvtier.Runtime) -> None:
    with runtime.budget(host_bytes=MIB) as budget:
        account = budget.account("buffers")
        buffer = runtime.buffer(MIB // 2, account=account)
        assert account.held(TIER_HOST).used_bytes == MIB // 2
        with pytest.raises(kvtier.BudgetError):
            runtime.buffer(MIB, account=account)
        view = buffer.view()
        buffer.close()
        assert account.held(TIER_HOST).used_bytes == MIB // 2, "a view keeps the memory"
        del view
        assert account.held(TIER_HOST).used_bytes == 0
        account.close()
        with pytest.raises(kvtier.ClosedError):
            runtime.buffer(4096, account=account)


def test_reservations_wait_in_order(runtime: kvtier.Runtime) -> None:
    with runtime.budget(host_bytes=MIB) as budget:
        with budget.account("has") as has, budget.account("wants") as wants:
            has.reserve(TIER_HOST, MIB)
            op = wants.reserve_later(TIER_HOST, MIB // 2)
            late = wants.reserve_later(TIER_HOST, MIB, timeout=0.01)
            assert not op.wait(0.01)
            with pytest.raises(kvtier.TimeoutError):
                late.result(HANG_S)
            has.commit(TIER_HOST, MIB, 0)
            op.result(HANG_S)
            assert wants.held(TIER_HOST).reserved_bytes == MIB // 2
            wants.commit(TIER_HOST, MIB // 2, 0)
            with pytest.raises(kvtier.BudgetError):
                wants.reserve_later(TIER_HOST, 2 * MIB)


def test_a_dropped_reservation_is_cancelled(runtime: kvtier.Runtime) -> None:
    with runtime.budget(host_bytes=MIB) as budget:
        with budget.account("has") as has, budget.account("wants") as wants:
            has.reserve(TIER_HOST, MIB)
            wants.reserve_later(TIER_HOST, MIB)
            assert _reaper.flush(HANG_S)
            assert budget.tier(TIER_HOST).waiting == 0
            has.commit(TIER_HOST, MIB, 0)
            assert wants.held(TIER_HOST) == (0, 0)


def test_the_reclaimer_releases_bytes_for_another_account(runtime: kvtier.Runtime) -> None:
    asked: List[Any] = []

    def reclaim(tier: int, nbytes: int, left: Optional[float]) -> int:
        asked.append((tier, nbytes, left, threading.current_thread() is threading.main_thread()))
        cache.release(tier, nbytes)
        return nbytes

    with runtime.budget(host_bytes=MIB) as budget:
        cache = budget.account("cache", priority=-1, reclaim=reclaim)
        with budget.account("wants") as wants:
            cache.reserve(TIER_HOST, MIB)
            cache.commit(TIER_HOST, MIB, MIB)
            wants.reserve_later(TIER_HOST, MIB // 4, timeout=HANG_S).result()
            assert asked and sum(a[1] for a in asked) >= MIB // 4
            assert all(a[0] == TIER_HOST and not a[3] for a in asked)
            assert asked[0][2] is None or 0 < asked[0][2] <= HANG_S
            wants.commit(TIER_HOST, MIB // 4, 0)
        cache.release(TIER_HOST, cache.held(TIER_HOST).used_bytes)
        cache.close()


@pytest.mark.parametrize("answer", [None, -5, 2**80, "raise"])
def test_an_invalid_answer_of_a_reclaimer_is_tolerated(
    runtime: kvtier.Runtime, unraisable: List[Any], answer: Any
) -> None:
    asked = threading.Event()

    def reclaim(tier: int, nbytes: int, left: Optional[float]) -> Any:
        asked.set()
        if answer == "raise":
            raise RuntimeError("not mine")
        return answer

    with runtime.budget(host_bytes=MIB) as budget:
        with budget.account("odd", reclaim=reclaim) as odd, budget.account("wants") as wants:
            odd.reserve(TIER_HOST, MIB)
            odd.commit(TIER_HOST, MIB, MIB)
            timeout = 0.05
            while not asked.is_set():  # repeats if the deadline passed before the reclaim
                with pytest.raises(kvtier.TimeoutError):
                    wants.reserve_later(TIER_HOST, MIB, timeout=timeout).result(HANG_S)
                timeout *= 2
            odd.release(TIER_HOST, MIB)
        # After the close the callback has returned, and its exception has been reported.
        if answer == "raise":
            until(lambda: unraisable)
    assert [str(e) for e in unraisable][:1] == (["not mine"] if answer == "raise" else [])


def test_closing_a_budget_ends_waiting_reservations(runtime: kvtier.Runtime) -> None:
    budget = runtime.budget(host_bytes=MIB)
    with budget.account("has") as has, budget.account("wants") as wants:
        has.reserve(TIER_HOST, MIB)
        op = wants.reserve_later(TIER_HOST, MIB)
        budget.close()
        with pytest.raises(kvtier.ClosedError):
            op.result(HANG_S)
        has.commit(TIER_HOST, MIB, 0)
    with pytest.raises(kvtier.ClosedError, match="this budget is closed"):
        budget.account()


def test_a_dropped_account_releases_its_bytes(runtime: kvtier.Runtime) -> None:
    with runtime.budget(host_bytes=MIB) as budget:
        account = budget.account("forgetful")
        account.reserve(TIER_HOST, MIB)
        account.commit(TIER_HOST, MIB // 2, MIB // 2)
        del account
        gc.collect()
        assert _reaper.flush(HANG_S)
        assert budget.tier(TIER_HOST).free_bytes == MIB


def test_resize_changes_the_limit_of_a_tier(runtime: kvtier.Runtime) -> None:
    with runtime.budget(host_bytes=MIB) as budget:
        budget.resize(TIER_HOST, 2 * MIB)
        assert budget.tier(TIER_HOST).limit_bytes == 2 * MIB
        for tier in (99, -1, 2**32):
            with pytest.raises(kvtier.InvalidError):
                budget.resize(tier, 1)
