"""KvtierTier, called as vLLM's tiering manager calls it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List

import kvtier
import numpy as np
import pytest

ROW = 4096 * 3


def key(n: int) -> bytes:
    return n.to_bytes(32, "little") + bytes(4)


class Harness:
    """A tier over rows of host memory, with calls as the manager makes them."""

    def __init__(self, make_config: Any, rows: int = 32, row: int = ROW,
                 **options: Any) -> None:
        from kvtier_vllm.tier import KvtierTier
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self.context, self.transfer = ReqContext("r"), TransferJob
        self.rows = np.zeros((rows, row), np.uint8)
        spec = SimpleNamespace(config=make_config({}), kv_events_config=SimpleNamespace(
            enable_kv_cache_events=True))
        self.view = memoryview(self.rows.view(np.int8))
        self.tier = KvtierTier(spec, self.view, "KvtierTier", **options)
        self.jobs = 0
        self.tier.on_new_request(self.context)

    def submit(self, numbers: List[int], chunks: List[int], load: bool) -> int:
        self.jobs += 1
        job = self.transfer(self.jobs, [key(n) for n in numbers], np.array(chunks, np.int32), load,
                            self.context)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self.jobs

    def result(self, job: int) -> Any:
        end = time.monotonic() + 600
        while True:
            for one in self.tier.get_finished_jobs():
                assert one.job_id == job
                return one
            assert time.monotonic() < end
            time.sleep(0.001)

    def events(self, keys: int) -> List[Any]:
        """Takes events until they have so many keys."""
        events, end = [], time.monotonic() + 600  # type: List[Any], float
        while sum(len(event.keys) for event in events) < keys:
            events += self.tier.take_events()
            assert time.monotonic() < end, events
            time.sleep(0.001)
        return events

    def fill(self, numbers: List[int]) -> None:
        for at, n in enumerate(numbers):
            self.rows[at] = np.random.default_rng(n).integers(0, 256, self.rows.shape[1])

    def name(self, n: int) -> str:
        return str(self.tier.lookup(key(n), self.context).name)

    def close(self) -> None:
        self.tier.shutdown()
        self.view.release()  # as the CPU tier does next; fails if the tier still uses the memory


@pytest.fixture(params=["memory", "disk"])
def options(request: Any, tmp_path: Path) -> Dict[str, Any]:
    disk = {"disk_path": str(tmp_path / "kv"), "disk_bytes": "256MiB"}
    return {"host_bytes": "64MiB", **(disk if request.param == "disk" else {})}


@pytest.fixture
def tier(make_config: Any, options: Dict[str, Any]) -> Iterator[Harness]:
    made = Harness(make_config, **options)
    yield made
    made.close()


def test_stored_rows_load_into_any_rows(tier: Harness) -> None:
    numbers = list(range(10))
    tier.fill(numbers)
    before = tier.rows[:10].copy()
    done = tier.result(tier.submit(numbers, numbers, False))
    assert done.success and done.transfer_bytes == 10 * ROW
    assert [tier.name(n) for n in (3, 11)] == ["HIT", "MISS"]
    tier.rows[:] = 0
    done = tier.result(tier.submit(numbers, [31 - n for n in numbers], True))
    assert done.success and (tier.rows[31:21:-1] == before).all() and not tier.rows[:22].any()


def test_a_partial_load_names_the_loaded_keys(tier: Harness) -> None:
    tier.fill([1, 2])
    tier.result(tier.submit([1, 2], [0, 1], False))
    before = tier.rows[:2].copy()
    tier.rows[:] = 7
    done = tier.result(tier.submit([1, 50, 2], [4, 5, 6], True))
    assert not done.success and set(done.successful_keys) == {key(1), key(2)}
    assert (tier.rows[[4, 6]] == before).all() and (tier.rows[5] == 7).all()
    done = tier.result(tier.submit([51], [4], True))
    assert not done.success and done.successful_keys is None
    tier.result(tier.submit([51], [0], False))
    assert tier.name(51) == "MISS"  # stays a miss for the request whose load failed
    tier.tier.on_request_finished(tier.context)
    assert tier.name(51) == "HIT"


def lookup(tier: Harness, n: int) -> str:
    """Looks up as the scheduler does: again in later steps, until the remote has answered."""
    end = time.monotonic() + 600
    while (found := tier.name(n)) == "RETRY":
        tier.tier.on_schedule_end(None)
        assert time.monotonic() < end
        time.sleep(0.001)
    return found


def test_blocks_of_other_engines_are_found_at_the_remote(make_config: Any, tmp_path: Path) -> None:
    shared = f'store(host=64MiB, remote=dir(path="{tmp_path}", timeout=600000))'
    one = Harness(make_config, spec=shared, level="remote")
    one.fill([1, 2, 3])
    before = one.rows[:3].copy()
    assert one.result(one.submit([1, 2, 3], [0, 1, 2], False)).success
    assert [one.name(n) for n in (1, 3)] == ["HIT", "HIT"]  # local hits need no remote lookup
    one.close()
    other = Harness(make_config, spec=shared, level="remote", remote_lookup_s=60)
    # One remote lookup at the end of the step has all keys of the prompt.
    assert [other.name(n) for n in (1, 2, 9)] == ["RETRY"] * 3
    remote_lookups = other.tier._remote_lookups
    assert len(remote_lookups._unsent) == 1 and not remote_lookups._sent
    assert [lookup(other, n) for n in (1, 2, 9)] == ["HIT", "HIT", "MISS"]
    assert not remote_lookups._batch_of and not remote_lookups.is_pending
    assert other.result(other.submit([2, 1], [5, 6], True)).success
    assert (other.rows[[6, 5]] == before[:2]).all()
    # A miss stays a miss for its request.
    assert other.name(9) == "MISS"
    # The request ends before the answer, which is dropped.
    assert other.name(3) == "RETRY"
    other.tier.on_schedule_end(None)
    other.tier.on_request_finished(other.context)
    end = time.monotonic() + 600
    while remote_lookups.is_pending:
        other.tier.on_schedule_end(None)
        assert time.monotonic() < end
    assert not remote_lookups._batch_of and not remote_lookups._answered_keys
    assert other.name(9) == "MISS"  # the request is not tracked
    other.close()
    alone = Harness(make_config, spec=shared, remote_lookup_s=0)
    assert alone.name(1) == "MISS"
    alone.close()


def test_shutdown_cancels_remote_lookups(make_config: Any, tmp_path: Path) -> None:
    one = Harness(make_config, spec=f'store(remote=dir(path="{tmp_path}", timeout=600000))')
    assert one.name(1) == "RETRY"
    one.tier.on_schedule_end(None)
    assert one.name(2) == "RETRY"
    one.close()


def test_finished_requests_leave_no_state(tier: Harness) -> None:
    job = tier.submit([50], [4], True)
    tier.tier.on_request_finished(tier.context)  # jobs may end later than their request
    assert not tier.result(job).success and not tier.tier._failed
    assert not tier.result(tier.submit([51], [-1], True)).success and not tier.tier._failed


def test_a_large_row_is_split_into_parts(make_config: Any) -> None:
    one = Harness(make_config, rows=3, row=(9 << 20) + 64, host_bytes="128MiB")
    one.fill([1])
    before = one.rows[0].copy()
    assert one.result(one.submit([1], [0], False)).success
    assert one.result(one.submit([1], [2], True)).success
    assert (one.rows[2] == before).all()
    one.close()


def test_drain_and_shutdown_wait_for_running_jobs(make_config: Any,
                                                  options: Dict[str, Any]) -> None:
    one = Harness(make_config, **options)
    one.fill(list(range(32)))
    jobs = [one.submit([first + n for n in range(32)], list(range(32)), False)
            for first in range(0, 320, 32)]
    one.tier.drain_jobs()
    one.rows[:] = 0  # no job reads the rows after drain_jobs
    assert {done.job_id for done in one.tier.get_finished_jobs()} == set(jobs)
    one.fill(list(range(32)))
    one.submit([1000 + n for n in range(32)], list(range(32)), False)
    one.close()
    with pytest.raises(kvtier.ClosedError):
        one.submit([1], [0], False)
    one.tier.shutdown()
    if "disk_path" in options:
        again = Harness(make_config, **options)
        assert again.name(1000) == "HIT" and again.name(1031) == "HIT"
        again.close()


def test_draining_never_overflows_the_queue(tier: Harness) -> None:
    tier.fill([1])
    for turn in range(1500):  # more jobs than the queue's capacity
        tier.submit([turn % 3], [0], False)
        tier.tier.drain_jobs()
        assert [one.success for one in tier.tier.get_finished_jobs()] == [True]


def test_a_rejected_job_is_reported_as_failed(tier: Harness) -> None:
    assert not tier.result(tier.submit([1], [32], False)).success  # there are 32 rows
    assert not tier.result(tier.submit([1], [-1], True)).success
    assert tier.name(1) == "MISS"


def test_tenants_events_and_metrics_are_reported(make_config: Any, options: Dict[str, Any]) -> None:
    one = Harness(make_config, enable_kv_events=True, locality="LOCAL", log_evictions=8, **options)
    one.context.kv_transfer_params = {"kvtier": {"tenant": 9, "priority": 1}}
    one.fill([1, 2])
    one.result(one.submit([1, 2], [0, 1], False))
    events = one.events(2)
    assert [one_key for event in events for one_key in event.keys] == [key(1), key(2)]
    assert all(not event.removed and event.locality.name == "LOCAL"
               and event.ownership == "KvtierTier" for event in events)
    assert list(one.tier.take_events()) == []
    assert 9 in [tenant.tenant for tenant in one.tier.store.tenants()]
    names = one.tier.build_metric_definitions({})
    stats = one.tier.get_stats()
    assert not stats.is_empty() and len(names) >= len(stats.data)
    one.tier.set_policy("s3fifo")
    one.tier.on_schedule_end(None)
    one.close()
    assert one.tier.get_stats() is None


def test_what_is_evicted_is_reported_as_removed(make_config: Any) -> None:
    """The store has room for a part of the rows; what the events leave is what it has."""
    one = Harness(make_config, row=1 << 20, host_bytes="8MiB", policy="lru", enable_kv_events=True)
    for n in range(24):
        one.result(one.submit([n], [n], False))
    left, end = set(), time.monotonic() + 600  # type: Any, float
    found = set()  # type: Any
    while not left or left != found:
        for event in one.tier.take_events():
            (left.difference_update if event.removed else left.update)(event.keys)
        found = {key(n) for n in range(24) if one.name(n) == "HIT"}
        assert time.monotonic() < end, (left, found)
    assert 0 < len(left) < 24
    one.tier.drain_jobs()  # as vLLM calls it when its caches are reset
    assert {one_key for event in one.events(len(left)) for one_key in event.keys
            if event.removed} == left
    newest = 23
    one.result(one.submit([newest], [0], True))
    assert [event.keys for event in one.events(1)] == [[key(newest)]]
    one.close()


def test_evictions_are_logged_and_thrashing_lowers_the_advice(
        make_config: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvtier_vllm")
    one = Harness(make_config, row=1 << 20, host_bytes="36MiB", policy="lru", log_evictions=64)
    one.result(one.submit([0], [0], False))
    assert not one.tier._advisor.observes  # nothing is recorded before the first advice
    assert one.tier.advice(8).batch == 8
    policy = one.tier._advisor._policy
    policy.set_advice(shrink_above=0.1, window=8, patience=1)
    for turn in range(14):  # three times the store's capacity
        numbers = list(range(1 + 32 * (turn % 3), 33 + 32 * (turn % 3)))
        for n in numbers:
            one.name(n)
        one.tier.on_schedule_end(None)
        one.result(one.submit(numbers, list(range(32)), False))
    one.tier.on_schedule_end(None)
    assert one.tier.advice(8).batch == 4
    messages = [record.getMessage() for record in caplog.records
                if "evicted from memory" in record.getMessage()]
    assert messages and len(set(messages)) == len(messages)
    one.tier.set_policy("arc")
    assert policy.spec.startswith("arc")
    one.close()
    with pytest.raises(kvtier.ClosedError):
        one.tier.advice(8)


@pytest.mark.parametrize("given, policy", [
    ({}, "horizon"), ({"spec": "store(policy=arc)"}, "arc"), ({"policy": "lru"}, "lru"),
    ({"spec": "store(policy=arc)", "policy": "lru"}, "lru")])
def test_advice_uses_the_policy_of_the_store(make_config: Any, given: Dict[str, str],
                                             policy: str) -> None:
    one = Harness(make_config, row=1 << 20, host_bytes="36MiB", **given)
    assert one.tier.advice(8).batch == 8
    assert one.tier._advisor._policy.stats()["name"] == policy
    one.close()


@pytest.mark.parametrize("name", ["hints", "enable_kv_events"])
def test_a_text_is_no_boolean(make_config: Any, name: str) -> None:
    with pytest.raises(kvtier.InvalidError, match=f"{name}='false'"):
        Harness(make_config, host_bytes="36MiB", **{name: "false"})


def count_after_eviction(make_config: Any, late: bool, first: Dict[str, Any],
                         second: Dict[str, Any], **options: Any) -> List[int]:
    """How many of the 40 chunks of each of two requests with hints are still stored after 60
    more chunks were stored."""
    one = Harness(make_config, row=4096, host_bytes="512KiB", policy="predictive", **options)
    requests = [type(one.context)(name, {"kvtier": params})
                for name, params in (("first", first), ("second", second))]
    for context, begin in zip(requests, (0, 40)):
        one.context = context
        one.tier.on_new_request(context)
        jobs = [one.submit(list(range(at, at + 20)), list(range(20)), False)
                for at in (begin, begin + 20)]
        if late:
            one.tier.on_request_finished(context)
        one.tier.drain_jobs()
        assert {done.job_id for done in one.tier.get_finished_jobs()} == set(jobs)
        if not late:
            one.tier.on_request_finished(context)
    assert not one.tier._hint_keys
    one.context = type(one.context)("more")
    one.tier.on_new_request(one.context)
    for begin in range(100, 160, 20):
        one.result(one.submit(list(range(begin, begin + 20)), list(range(20)), False))
    found = [one.name(n) == "HIT" for n in range(80)]
    one.close()
    return [sum(found[:40]), sum(found[40:])]


@pytest.mark.parametrize("late", [False, True])
def test_a_hint_changes_the_victims(make_config: Any, late: bool) -> None:
    first, second = count_after_eviction(make_config, late, {"done": True}, {})
    assert first < 20 and second == 40
    soon, away = {"next_use_s": 60}, {"next_use_s": 3600}
    first, second = count_after_eviction(make_config, late, away, soon)
    assert first < second
    first, second = count_after_eviction(make_config, late, soon, away)
    assert first > second
    disabled = count_after_eviction(make_config, late, soon, away, hints=False)
    assert disabled == count_after_eviction(make_config, late, {}, {})


@pytest.mark.parametrize("late", [False, True])
def test_kept_chunks_are_no_victims(make_config: Any, late: bool) -> None:
    first, second = count_after_eviction(make_config, late, {"keep_s": 3600}, {})
    assert first == 40 and second < 40


def test_more_owners_than_are_open_store_all_the_same(make_config: Any) -> None:
    from kvtier_vllm import tier

    one = Harness(make_config, row=4096, host_bytes="8MiB")
    owners = tier._MAX_OWNERS + 10
    for n in range(owners):
        one.context = type(one.context)(f"r{n}", {"kvtier": {"tenant": n, "ttl_s": 3600}})
        one.tier.on_new_request(one.context)
        one.result(one.submit([n], [0], False))
        one.tier.on_request_finished(one.context)
    assert len(one.tier._blocks_by_owner) == tier._MAX_OWNERS
    assert all(one.name(n) == "HIT" for n in range(owners))
    assert {row.tenant for row in one.tier.store.tenants()} >= set(range(1, owners))
    one.close()


def test_loaded_chunks_get_the_hint_too(make_config: Any) -> None:
    one = Harness(make_config, row=4096, host_bytes="512KiB", policy="predictive")
    one.result(one.submit(list(range(30)), list(range(30)), False))
    one.context = type(one.context)("said")
    one.context.kv_transfer_params = {"kvtier": {"done": True}}
    one.tier.on_new_request(one.context)
    assert one.name(0) == "HIT" and list(one.tier._hint_keys["said"]) == [key(0)]
    one.result(one.submit([1, 2], [0, 1], True))
    one.tier.on_request_finished(one.context)
    assert not one.tier._hint_keys
    one.tier.shutdown()
    one.tier.on_request_finished(one.context)
    one.close()


def test_tiers_of_one_directory_share_a_store(make_config: Any, tmp_path: Path) -> None:
    disk = {"host_bytes": "64MiB", "disk_path": str(tmp_path / "kv"), "disk_bytes": "256MiB"}
    one, two = Harness(make_config, **disk), Harness(make_config, **disk)
    one.fill([1])
    one.result(one.submit([1], [0], False))
    assert two.name(1) == "HIT"
    with pytest.raises(kvtier.InvalidError, match="other options"):
        Harness(make_config, **{**disk, "host_bytes": "32MiB"})
    one.close()
    two.close()


def test_memory_with_gaps_or_read_only_is_rejected(make_config: Any) -> None:
    from kvtier_vllm.tier import KvtierTier

    spec = SimpleNamespace(config=make_config({}))
    wide = np.zeros((4, 200), np.int8)
    frozen = np.zeros((4, 100), np.int8)
    frozen.flags.writeable = False
    for rows in (wide[:, :100], frozen):
        with pytest.raises(kvtier.InvalidError, match="without gaps"):
            KvtierTier(spec, memoryview(rows), "KvtierTier")


SCRIPT = """
import sys
sys.path[:0] = {paths!r}
import test_tier
from vllm.v1.kv_offload import config as c

def make_config(extra):
    return c.OffloadingConfig(
        (), 1, False, {{}}, "e", c.OffloadingModelConfig("t", "b"), c.OffloadingCacheConfig(16, 1),
        c.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False))

one = test_tier.Harness(make_config, host_bytes="64MiB", **{options!r})
one.fill(list(range(32)))
for first in range(0, 640, 32):
    one.submit([first + n for n in range(32)], list(range(32)), False)
"""


def test_the_interpreter_exits_with_open_handles(tmp_path: Path) -> None:
    here = Path(__file__).resolve().parent
    disk = {"disk_path": str(tmp_path / "kv"), "disk_bytes": "256MiB"}
    paths = [str(here / "stubs"), str(here), str(here.parent)]
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(paths=paths, options=disk)],
                          timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
