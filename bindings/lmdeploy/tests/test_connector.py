"""Scheduler's and worker's side of the connector: transfers, lookups, hints, rejected input."""

from __future__ import annotations

import copy
import math
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import kvtier
import numpy as np
import pytest
import stubs
from kvtier_lmdeploy import _future, _lookup, _names, _rows
from kvtier_lmdeploy._meta import Hint, Load, Save, StepMeta, Switch
from lmdeploy.pytorch.kv_connector.base import KVConnectorOutput, KVConnectorStepInput
from stubs import Request, Tensor

HOST = {"host_bytes": 64 << 20, "lookup_async": False}
BLOCK = 16


def arrays(blocks: int = 8, *sizes: int) -> Dict[str, Any]:
    return {f"row{at}": np.random.default_rng(at).integers(0, 256, (blocks, size), dtype=np.uint8)
            for at, size in enumerate(sizes or (512, 512))}


def tensors(of: Dict[str, Any]) -> Dict[str, Any]:
    return {name: Tensor(array) for name, array in of.items()}


def names_of(count: int, first: int = 0) -> Any:
    found: List[bytes] = []
    _names.extend(found, np.arange(first, first + count * BLOCK), BLOCK, "", count)
    return tuple(found)


def work(worker: Any, meta: StepMeta, seconds: float = 600.0) -> KVConnectorOutput:
    """Runs one step of the worker, and waits until its transfers have completed."""
    together, end = KVConnectorOutput(), time.monotonic() + seconds
    worker.bind_connector_metadata(pickle.loads(pickle.dumps(meta)))
    worker.start_load_kv()
    worker.start_save_kv()
    wanted = ({one.request for one in meta.loads}, {one.number for one in meta.saves})
    while wanted != (together.finished_receiving or set(), together.completed_save_ids or set()):
        assert time.monotonic() < end
        output = worker.get_finished()
        together.finished_receiving = (together.finished_receiving or set()) | (
            output.finished_receiving or set())
        together.completed_save_ids = (together.completed_save_ids or set()) | (
            output.completed_save_ids or set())
        together.invalid_block_ids |= output.invalid_block_ids
        time.sleep(0.0005)
    worker.clear_connector_metadata()
    return together


@pytest.mark.parametrize("sizes", [(512, 512), (512, 96, 512), (1,)])
def test_saved_blocks_load_into_other_blocks(sizes: Any, closing: Callable[[Any], Any]) -> None:
    cache, rows = stubs.cache_config(HOST), arrays(8, *sizes)
    worker = closing(stubs.worker(cache, tensors(rows)))
    names, want = names_of(4), {name: array.copy() for name, array in rows.items()}
    work(worker, StepMeta(saves=(Save(0, 1, (0, 3, 5, 7), (0, 1, 2, 3), names),)))
    for array in rows.values():
        array[:] = 0xEE
    out = work(worker, StepMeta(loads=(Load(9, 2, (1, 2, 4, 6), names),)))
    assert out.invalid_block_ids == set()
    for name, array in rows.items():
        assert (array[[1, 2, 4, 6]] == want[name][[0, 3, 5, 7]]).all()
        assert (array[[0, 3, 5, 7]] == 0xEE).all()


def test_load_reports_missing_blocks(closing: Callable[[Any], Any]) -> None:
    cache, rows = stubs.cache_config(HOST), arrays()
    worker = closing(stubs.worker(cache, tensors(rows)))
    names = names_of(4)
    work(worker, StepMeta(saves=(Save(0, 1, (0, 1), (0, 1), names[:2]),)))
    out = work(worker, StepMeta(loads=(Load(9, 1, (4, 5, 6, 7), names),)))
    assert out.invalid_block_ids == {6, 7}


def test_remote_blocks_are_found_and_loaded(closing: Callable[[Any], Any], tmp_path: Any) -> None:
    extra = {"spec": f'store(host=8MiB, remote=dir(path="{tmp_path}", timeout=600000))',
             "level": "remote"}
    cache, rows = stubs.cache_config(extra), arrays()
    names = names_of(3)
    one = closing(stubs.worker(cache, tensors(rows)))
    work(one, StepMeta(saves=(Save(0, 1, (0, 3, 5), (0, 1, 2), names),)))
    want = {name: array.copy() for name, array in rows.items()}
    other = closing(stubs.worker(stubs.cache_config({**extra, "remote_lookup_s": 600.0}),
                                 tensors(rows)))
    without = closing(stubs.worker(cache, tensors(rows)))  # remote_lookup_s is 0: no remote lookup
    found = [worker._worker._handle_query({"query": "prefix"}, names)
             for worker in (without, other)]
    assert found == [0, 3]
    for array in rows.values():
        array[:] = 0xEE
    out = work(other, StepMeta(loads=(Load(9, 1, (1, 2, 4), names),)))
    assert out.invalid_block_ids == set()
    for name, array in rows.items():
        assert (array[[1, 2, 4]] == want[name][[0, 3, 5]]).all()


def test_rejected_transfers_complete_as_failed(closing: Callable[[Any], Any]) -> None:
    """A block id out of range fails its transfer; the engine goes on."""
    cache, rows = stubs.cache_config(HOST), arrays()
    worker = closing(stubs.worker(cache, tensors(rows)))
    out = work(worker, StepMeta(loads=(Load(9, 1, (7, 8), names_of(2)),),
                                saves=(Save(3, 1, (-1,), (0,), names_of(1)),)))
    assert out.invalid_block_ids == {7, 8}
    assert (worker._worker.failed_loads, worker._worker.failed_saves) == (1, 1)


class Loop:
    """The scheduler's and a worker's connector, with the engine's calls between them."""

    def __init__(self, closing: Callable[[Any], Any], **extra: Any) -> None:
        self.cache, self.rows = stubs.cache_config({**HOST, **extra}), arrays()
        self.worker = closing(stubs.worker(self.cache, tensors(self.rows)))
        self.connector = closing(stubs.scheduler(self.cache))

    def save(self, request: Request, blocks: Any) -> Any:
        meta = self.connector.build_connector_meta(KVConnectorStepInput(
            [request], (len(blocks) * BLOCK,), (tuple(blocks),), (tuple(blocks),)))
        if meta is not None:
            self.connector.update_connector_output(work(self.worker, meta))
        return meta


def test_loaded_blocks_are_not_saved_again(closing: Callable[[Any], Any]) -> None:
    loop = Loop(closing)
    connector, one = loop.connector, Request(1, range(65))
    connector.on_new_request(one)
    assert connector.get_num_new_matched_tokens(one, 0) == (0, False)
    meta = loop.save(one, range(4))
    assert [lease.logical_block_ids for lease in meta.get_save_block_leases()] == [(0, 1, 2, 3)]
    assert loop.save(one, range(4)) is None  # no new block, no transfer in progress
    connector.request_finished(one)
    two = Request(2, list(range(65)) + [3] * 20)
    assert connector.get_num_new_matched_tokens(two, 0) == (64, True)
    assert connector.get_num_new_matched_tokens(two, 16) == (48, True)  # no second lookup
    two.num_history_ids = 16
    connector.update_state_after_alloc(two, (5, 6, 7), 48)
    meta = connector.build_connector_meta(KVConnectorStepInput())
    assert [load.blocks for load in meta.loads] == [(5, 6, 7)]
    assert meta.loads[0].names == names_of(4)[1:]
    assert connector.build_connector_meta(KVConnectorStepInput()) == StepMeta()  # poll
    result = connector.update_connector_output(work(loop.worker, meta))
    assert [(one.request_id, one.success) for one in result.load_results] == [(2, True)]
    assert connector.update_connector_output(KVConnectorOutput(finished_receiving={2})
                                             ).load_results == ()
    meta = loop.save(two, range(5))
    assert [save.blocks for save in meta.saves] == [(4,)]


def test_adapters_and_media_do_not_share_kv(closing: Callable[[Any], Any]) -> None:
    loop = Loop(closing)
    loop.save(Request(1, range(33)), range(2))
    found = loop.connector.get_num_new_matched_tokens
    assert found(Request(2, range(33)), 0) == (32, True)
    assert found(Request(3, range(33), adapter="lora"), 0) == (0, False)
    assert found(Request(4, [*range(1, 34)]), 0) == (0, False)
    picture = Request(5, range(33))
    picture.history_embeddings = [object()]
    assert found(picture, 0) == (0, False) and loop.save(picture, range(2)) is None
    # With MTP a block's rows depend on the next token: the last block is recomputed.
    mtp = Request(6, range(33))
    mtp.prefix_cache.recompute_overlap.recompute_blocks = 1
    assert found(mtp, 0) == (16, True)


def test_allocation_must_match_the_lookup(closing: Callable[[Any], Any]) -> None:
    loop = Loop(closing)
    loop.save(Request(1, range(65)), range(4))
    request = Request(2, range(65))
    with pytest.raises(ValueError, match="0 tokens|None tokens"):
        loop.connector.update_state_after_alloc(request, (1,), 16)
    assert loop.connector.get_num_new_matched_tokens(request, 0)[0] == 64
    with pytest.raises(ValueError, match="were found"):
        loop.connector.update_state_after_alloc(request, (1, 2, 3, 4, 5), 80)
    assert loop.connector.get_num_new_matched_tokens(request, 0)[0] == 64
    loop.connector.update_state_after_alloc(request, (), 0)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_producers_only_save_and_consumers_only_load(
        role: str, closing: Callable[[Any], Any]) -> None:
    loop = Loop(closing)
    loop.save(Request(1, range(33)), range(2))
    loop.cache.kv_transfer_config.kv_role = role
    one = closing(stubs.scheduler(loop.cache))
    request = Request(2, range(33))
    assert one.get_num_new_matched_tokens(request, 0)[0] == (0 if "producer" in role else 32)
    step = KVConnectorStepInput([Request(3, range(90, 130))], (32,), ((0, 1),), ((0, 1),))
    assert bool(one.build_connector_meta(step)) == ("producer" in role)


def test_policy_changes_and_hints_reach_the_worker(closing: Callable[[Any], Any]) -> None:
    loop = Loop(closing, policy="horizon")
    request = Request(1, range(33), session_id=42)
    loop.save(request, range(2))
    loop.connector.set_policy("host", "lru")
    loop.connector.request_finished(request)
    meta = loop.connector.build_connector_meta(KVConnectorStepInput())
    hint = Hint(kvtier.STOP_CANCELLED, names_of(2))
    assert meta == StepMeta(switches=(Switch(kvtier.TIER_HOST, "lru"),), hints=(hint,))
    work(loop.worker, meta)
    assert loop.connector.build_connector_meta(KVConnectorStepInput()) is None
    assert not loop.connector._scheduler_side()._requests
    # A policy that the worker's store rejects is only logged.
    work(loop.worker, StepMeta(switches=(Switch(kvtier.TIER_DISK, "lru"),)))


def ended(seq_id: int, answer: Any, first: int = 0) -> Request:
    """A request of two blocks whose last tokens, `answer`, are generated."""
    tokens = list(range(first, first + 2 * BLOCK + 1))
    request = Request(seq_id, [*tokens, *answer])
    request.num_new_tokens = len(answer)
    return request


@pytest.mark.parametrize("answer,stop", [
    ([5, 2], "end_turn"), ([5] * 8, "length"), ([5] * 7 + [2], "end_turn"), ([5], "cancelled"),
    ([], "cancelled")])
def test_stop_reason_follows_from_tokens(answer: Any, stop: str) -> None:
    assert _future.stop_of(ended(1, answer)) == stop
    nothing = ended(1, [])
    nothing.sampling_param.max_new_tokens = 0
    assert _future.stop_of(nothing) == "length"


def test_hint_is_sent_after_the_save_completes(closing: Callable[[Any], Any]) -> None:
    loop = Loop(closing, lifetimes={"end_turn": 30, "cancelled": "never"})
    side, request = loop.connector._scheduler_side(), ended(1, [5, 2])
    meta = loop.connector.build_connector_meta(KVConnectorStepInput(
        [request], (2 * BLOCK,), ((0, 1),), ((0, 1),)))
    loop.connector.request_finished(request)
    assert loop.connector.build_connector_meta(KVConnectorStepInput()) == StepMeta()
    loop.connector.update_connector_output(work(loop.worker, meta))
    meta = loop.connector.build_connector_meta(KVConnectorStepInput())
    assert meta == StepMeta(hints=(Hint(kvtier.STOP_END_TURN, names_of(2), 30.0),))
    work(loop.worker, meta)
    assert not side._deferred_hints and not side._requests
    # A cancelled request sends no hint for blocks that it found: others may share them.
    again = ended(2, [5])
    assert loop.connector.get_num_new_matched_tokens(again, 0) == (2 * BLOCK, True)
    loop.connector.request_finished(again)
    assert loop.connector.build_connector_meta(KVConnectorStepInput()) is None
    off = Loop(closing, hints=False)
    loop.connector.request_finished(request)
    off.save(request, range(2))
    off.connector.request_finished(request)
    assert off.connector.build_connector_meta(KVConnectorStepInput()) is None


@pytest.mark.parametrize("hints", [False, True])
def test_hint_changes_the_victims(closing: Callable[[Any], Any], hints: bool) -> None:
    """Blocks of cancelled requests are evicted before older blocks of completed ones."""
    loop = Loop(closing, host_bytes=512 << 10, policy="predictive", hints=hints,
                lifetimes={"cancelled": "never"})
    requests = [ended(n, [5, 2] if n < 20 else [5], 1000 * n) for n in range(40)]
    for request in requests:
        loop.save(request, range(2))
        loop.connector.request_finished(request)
    meta = loop.connector.build_connector_meta(KVConnectorStepInput())
    if meta is not None:
        work(loop.worker, meta)
    for n in range(100, 125):
        loop.save(ended(n, [5, 2], 1000 * n), range(2))
    resident = [sum(map(bool, loop.worker._worker._blocks.exists(names_of(2, 1000 * n))))
                for n in range(40)]
    assert (sum(resident[:20]) > sum(resident[20:])) == hints, resident


@pytest.mark.parametrize("lifetimes", [{"stop": 1}, {"length": -1}, {"length": True},
                                       {"length": "x"}, [1]])
def test_wrong_lifetimes_are_rejected(lifetimes: Any) -> None:
    with pytest.raises(kvtier.InvalidError, match="lifetimes"):
        stubs.scheduler(stubs.cache_config({**HOST, "lifetimes": lifetimes}))


def advised(connector: Any, batch: int) -> Any:
    """Returns advice; waits until the workers have reported their capacity."""
    end = time.monotonic() + 600
    while (found := connector.advice(batch)) is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    return found


def test_advice_shrinks_the_batch_on_thrashing(closing: Callable[[Any], Any]) -> None:
    loop = Loop(closing)
    advisor = loop.connector._scheduler_side()._advisor
    assert advised(loop.connector, 8).batch == 8
    advisor._policy.set_advice(shrink_above=0.1, window=8, patience=1)
    advisor._capacity = 8
    advisor._policy.set_capacity(8)
    for turn in range(12):
        names = names_of(8, 1000 * (turn % 3))
        advisor.looked_up(names)
        advisor.stored(names)
    assert loop.connector.advice(8).batch == 4
    assert advisor._policy.stats()["units"] <= 8
    # A failure inside the advisor ends advice only; saves go on.
    advisor._policy.close()
    loop.save(Request(9, range(33)), range(2))
    assert loop.connector.advice(8) is None
    without = closing(stubs.scheduler(stubs.cache_config({**HOST, "advice": False})))
    assert without.advice(8) is None


def test_advice_follows_set_policy(closing: Callable[[Any], Any]) -> None:
    loop = Loop(closing, policy="lru")
    policy = loop.connector._scheduler_side()._advisor._policy
    loop.connector.set_policy("disk", "s3fifo")
    assert policy.spec.startswith("lru")
    loop.connector.set_policy("host", "arc")
    assert policy.spec.startswith("arc")


@pytest.mark.parametrize("extra, policy", [({}, "horizon"), ({"policy": "lru"}, "lru"),
                                           ({"spec": "store(policy=arc)"}, "arc")])
def test_advice_uses_the_policy_of_the_store(closing: Callable[[Any], Any],
                                             extra: Dict[str, str], policy: str) -> None:
    loop = Loop(closing, **extra)
    assert advised(loop.connector, 8).batch == 8
    assert loop.connector._scheduler_side()._advisor._policy.stats()["name"] == policy


@pytest.mark.parametrize("capacity_known", [False, True])
def test_advice_after_shutdown_is_closed(closing: Callable[[Any], Any],
                                         capacity_known: bool) -> None:
    loop = Loop(closing)
    if capacity_known:
        advised(loop.connector, 8)
    loop.connector.shutdown()
    with pytest.raises(kvtier.ClosedError):
        loop.connector.advice(8)


def test_log_evictions_logs_each_eviction_once(
        closing: Callable[[Any], Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvtier.lmdeploy")

    def logged_evictions(log_evictions: bool) -> List[str]:
        caplog.clear()
        cache = stubs.cache_config({"host_bytes": 36 << 20, "policy": "lru",
                                    "log_evictions": log_evictions})
        worker = closing(stubs.worker(cache, tensors(arrays(8, 1 << 20))))
        for turn in range(12):  # more than twice as much as fits
            work(worker, StepMeta(saves=(Save(turn, 1, tuple(range(8)), tuple(range(8)),
                                              names_of(8, 1000 * turn)),)))
        worker.get_finished()
        if log_evictions:
            connector = closing(stubs.scheduler(cache))
            assert len(connector.evictions("host", 4)[0]) == 4
        return [one.getMessage() for one in caplog.records
                if one.getMessage().startswith("evicted from host")]

    logged = logged_evictions(True)
    assert logged and len(set(logged)) == len(logged)
    assert logged_evictions(False) == []


def test_level_without_its_tier_is_rejected() -> None:
    cache = stubs.cache_config({**HOST, "level": "durable"})
    with pytest.raises(kvtier.InvalidError, match="no disk"):
        stubs.worker(cache, tensors(arrays()))


def test_drain_forgets_loads_in_progress(closing: Callable[[Any], Any]) -> None:
    loop = Loop(closing, sleep_keeps_weights=True)
    loop.save(Request(1, range(65)), range(4))
    request = Request(2, range(65))
    loop.connector.get_num_new_matched_tokens(request, 0)
    loop.connector.update_state_after_alloc(request, (4, 5, 6, 7), 64)
    assert loop.connector.build_connector_meta(KVConnectorStepInput()) is not None
    loop.connector.finish_transfers_after_worker_drain()
    assert loop.connector.build_connector_meta(KVConnectorStepInput()) is None
    assert loop.connector.get_num_new_matched_tokens(Request(3, range(65)), 0) == (64, True)


@pytest.mark.parametrize("how", ["sleep", "sleep that keeps weights", "weights"])
def test_kv_that_lmdeploy_finds_after_it_was_destroyed_is_not_saved(
        how: str, closing: Callable[[Any], Any]) -> None:
    """lmdeploy keeps the index of its prefix cache when a sleep destroys the KV."""
    loop = Loop(closing, sleep_keeps_weights="keeps" in how)

    def saved(number: int, tokens: Any, blocks: int, reused: int = 0) -> int:
        """The blocks that are saved of a request that begins with `reused` blocks."""
        request = Request(number, tokens)
        loop.connector.on_new_request(request)
        loop.connector.get_num_new_matched_tokens(request, reused * BLOCK)
        request.num_history_ids = reused * BLOCK
        meta = loop.save(request, range(blocks))
        loop.connector.request_finished(request)
        return sum(len(save.blocks) for save in meta.saves) if meta is not None else 0

    text, other = list(range(100, 165)), list(range(500, 565))
    assert saved(1, text, 4) == 4
    if how == "weights":
        loop.connector.set_weights("2")
    else:
        loop.connector.finish_transfers_after_worker_drain()
    assert saved(2, text, 4, reused=2) == 0, "garbage"
    assert saved(3, text[:32] + other, 6, reused=2) == 0, "computed from garbage"
    assert saved(4, other, 4) == 4
    assert saved(5, other + [7] * 32, 6, reused=4) == 2, "computed since then"
    # One block, which lmdeploy computes again: it still has the old one.
    assert saved(6, text[:16], 1) == 1
    assert saved(7, text, 4, reused=1) == 0


@pytest.mark.parametrize("extra, words", [
    ({}, "store has no size"), ({"host_bytes": -1}, "finite number"),
    ({"host_bytes": "8GiB"}, "finite number"), ({"hots": 1}, "unknown names hots"),
    ({"host_bytes": 1 << 26, "level": "gone"}, "one of ram"),
    ({"host_bytes": math.inf}, "finite number"), ({**HOST, "drain_s": math.nan}, "finite number"),
    ({**HOST, "sleep_keeps_weights": "false"}, "without quotes"),
    ({**HOST, "lookup_async": "no"}, "without quotes"), ({**HOST, "hints": 1}, "without quotes"),
    ({"spec": 7}, "must be a string"), ({**HOST, "salt": None}, "must be a string"),
    ({"spec": "store(disk=disk(path=\"x\", bytes=1GiB))"}, ""),
])
def test_wrong_settings_are_rejected(extra: Any, words: str) -> None:
    if words:
        with pytest.raises(kvtier.InvalidError, match=words):
            stubs.cache_config(extra)
        return
    cache = stubs.cache_config(extra)
    with pytest.raises(kvtier.InvalidError, match="{rank}"):
        stubs.worker(cache, tensors(arrays()), tp_size=2)


@pytest.mark.parametrize("more, words", [
    ({"states_shapes": [((1,), "f")]}, "states"), ({"window_size": 4096}, "windows"),
    ({"num_cpu_blocks": 4}, "num_cpu_blocks=0")])
def test_hybrid_models_are_rejected(more: Any, words: str) -> None:
    with pytest.raises(kvtier.UnsupportedError, match=words):
        stubs.cache_config(HOST, **more)
    cache = stubs.cache_config(HOST)
    for name, value in more.items():  # known only after the preparation
        setattr(cache, name, value)
    with pytest.raises(kvtier.UnsupportedError, match=words):
        stubs.scheduler(cache)


def test_unsupported_caches_are_rejected() -> None:
    good = np.zeros((8, 512), np.uint8)
    cases = [
        ({"a": Tensor(np.zeros((8, 1024), np.uint8)[:, ::2])}, "not contiguous"),
        ({"a": Tensor(good.astype(np.float64))}, "float64"),
        ({"a": Tensor(good, dtype="torch.complex64")}, "complex64"),
        ({"a": Tensor(good, device="npu")}, "npu"),
        ({"a": Tensor(good), "b": Tensor(good, device="cuda")}, "on one device"),
        ({"a": Tensor(np.zeros((7, 3), np.uint8))}, "21 bytes.*into 8 blocks"),
        ({"a": good}, "must be a tensor"), ({"a": [good]}, "must be a tensor"),
        ({}, "no cache tensors"),
    ]
    for caches, words in cases:
        with pytest.raises(kvtier.Error, match=words):
            _rows.read(caches, 8)
    assert _rows.read({"a": [Tensor(good), Tensor(good)]}, 8).parts == [512, 512]


def test_missing_gpu_is_reported(closing: Callable[[Any], Any]) -> None:
    """A cache in CUDA memory needs CUDA: without it the worker fails to open."""
    cache = stubs.cache_config(HOST)
    with pytest.raises(kvtier.Error) as caught:
        stubs.worker(cache, {"a": Tensor(np.zeros((8, 512), np.uint8), device="cuda")})
    assert caught.value.name in ("KVT_E_UNAVAILABLE", "KVT_E_UNSUPPORTED")


def test_calls_on_the_wrong_side_or_in_the_wrong_order(closing: Callable[[Any], Any]) -> None:
    loop = Loop(closing)
    with pytest.raises(kvtier.StateError):
        loop.connector.get_finished()
    with pytest.raises(kvtier.StateError):
        loop.worker.advice(1)
    with pytest.raises(kvtier.InvalidError, match="registered already"):
        loop.worker.register_kv_caches(tensors(loop.rows))
    unprepared = stubs.Cache(stubs.Transfer(kv_connector_extra_config=dict(HOST)))
    with pytest.raises(kvtier.StateError, match="activate"):
        stubs.scheduler(unprepared)
    loop.worker.shutdown()
    with pytest.raises(kvtier.InvalidError, match="after the shutdown"):
        work(loop.worker, StepMeta(loads=(Load(1, 1, (0,), names_of(1)),)))


def test_workers_have_separate_directories(tmp_path: Path,
                                           closing: Callable[[Any], Any]) -> None:
    folder = tmp_path / "made" / "here"
    disk = {**HOST, "disk_path": str(folder), "disk_bytes": 256 << 20}
    for rank in range(2):
        closing(stubs.worker(stubs.cache_config(disk), tensors(arrays()), global_rank=rank,
                             tp_rank=rank, tp_size=2))
    assert sorted(one.name for one in folder.iterdir()) == ["rank-0", "rank-1"]
    assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(kvtier.BusyError):
        stubs.worker(stubs.cache_config(disk), tensors(arrays()))


WORKER = """
import pickle, sys
import stubs, numpy as np
cache, blocks = pickle.load(sys.stdin.buffer)
from test_connector import StepMeta, Save, names_of, tensors, arrays, work
worker = stubs.worker(cache, tensors(arrays()), global_rank=1, tp_rank=1, tp_size=2)
work(worker, StepMeta(saves=(Save(0, 1, tuple(range(blocks)), (0,), names_of(blocks)),)))
print("ready", flush=True)
sys.stdin.buffer.read()
worker.shutdown()
"""


def test_worker_in_another_process_answers_lookups(closing: Callable[[Any], Any]) -> None:
    """The pickled configuration activates the worker's process, which answers over a socket."""
    cache = stubs.cache_config({**HOST, "lookup_async": True, "lookup_timeout_s": 600.0})
    here = closing(stubs.worker(cache, tensors(arrays()), tp_size=2))
    work(here, StepMeta(saves=(Save(0, 1, (0, 1, 2, 3), (0,), names_of(4)),)))
    connector = closing(stubs.scheduler(cache, tp_size=2))
    # lmdeploy need not be installed: the child uses its stand-in.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).parent), *sys.path])}
    child = subprocess.Popen([sys.executable, "-c", WORKER], env=env, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE)
    try:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(pickle.dumps((cache, 3)))
        child.stdin.flush()
        assert child.stdout.readline() == b"ready\n"
        request, end = Request(1, range(65)), time.monotonic() + 600
        while (found := connector.get_num_new_matched_tokens(request, 0))[0] is None:
            assert time.monotonic() < end
            time.sleep(0.001)
        assert found == (48, True)
        assert [one["rank"] for one in connector.stats()] == [0, 1]
        folder = Path(cache.kv_transfer_config.kv_connector_extra_config["kvtier_engine"]["folder"])
        assert folder.stat().st_mode & 0o777 == 0o700
        # A client without the secret is rejected; other clients are not affected.
        from multiprocessing import AuthenticationError
        from multiprocessing.connection import Client

        with pytest.raises((AuthenticationError, EOFError, OSError)):
            Client(str(folder / "rank-1"), "AF_UNIX", authkey=b"guess")
        assert connector.stats()[1] is not None
        child.stdin.close()
        assert child.wait(600) == 0
        # One worker has ended, so no block counts as present on all workers.
        assert connector._scheduler_side().lookups._prefix(list(names_of(4))) == 0
    finally:
        child.kill()
        child.wait()


def test_lookups_can_be_pending_cancelled_and_closed() -> None:
    gate = threading.Event()
    engine = {"folder": "here", "pid": os.getpid(), "secret": "s"}

    def handler(query: Any, names: Any) -> int:
        gate.wait(600)
        return len(names)

    service = _lookup.LookupServer(engine, 0, handler)
    lookups = _lookup.LookupClient(engine, [0], 1.0, True)
    names = list(names_of(3))
    assert lookups.prefix(1, names) is None and lookups.pending(1)
    assert lookups.prefix(2, names) is None and lookups.prefix(1, names) is None
    lookups.cancel(2)
    assert not lookups.pending(2)
    gate.set()
    end = time.monotonic() + 600
    while lookups.pending(1):
        assert time.monotonic() < end
        time.sleep(0.001)
    assert lookups.prefix(1, names) == 3 and not lookups._pending
    lookups.prefix(3, names)
    lookups.close()
    assert lookups.prefix(4, names) == 0
    service.close()


def test_failing_handler_counts_as_no_blocks(caplog: pytest.LogCaptureFixture) -> None:
    engine = {"folder": "there", "pid": os.getpid(), "secret": "s"}

    def handler(query: Any, names: Any) -> int:
        raise RuntimeError("no")

    service = _lookup.LookupServer(engine, 0, handler)
    lookups = _lookup.LookupClient(engine, [0], 1.0, None)
    assert lookups.prefix(1, list(names_of(3))) == 0
    assert "did not answer" in caplog.text
    lookups.close()
    service.close()


def test_prepared_configuration_can_be_copied(closing: Callable[[Any], Any]) -> None:
    cache = stubs.cache_config(HOST)
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        closing(stubs.scheduler(copied))


def test_names_depend_on_all_tokens_before() -> None:
    grown: List[bytes] = []
    for blocks in (1, 3, 3, 4):
        _names.extend(grown, np.arange(64), BLOCK, "", blocks)
    assert tuple(grown) == names_of(4) and len(set(grown)) == 4
    other: List[bytes] = []
    _names.extend(other, list(range(64)), BLOCK, "", 4)
    assert other == grown
    _names.extend(swapped := [], np.r_[np.arange(16, 32), np.arange(16)], BLOCK, "", 2)
    assert not set(swapped) & set(grown)
    with pytest.raises(ValueError):
        _names.extend(list(grown), np.arange(64), BLOCK, "", 5)
