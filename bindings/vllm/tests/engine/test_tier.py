"""KvtierTier below vLLM's TieringOffloadingManager."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

import kvtier
import numpy as np
import pytest
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

ROW = 8192
END = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


def key(n: int) -> OffloadKey:
    return make_offload_key(n.to_bytes(32, "little"), 0)


def row(n: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(n).integers(0, 256, ROW, np.uint8)


class Engine:
    """The parts of vLLM's scheduler and worker that copy rows to and from the CPU tier."""

    def __init__(self, make_config: Any, chunks: int, tier: Dict[str, Any]) -> None:
        extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": chunks * ROW,
                 "secondary_tiers": [{"type": "KvtierTier", "module_path": "kvtier_vllm.tier",
                                      **tier}]}
        self.spec = OffloadingSpecFactory.create_spec(make_config(extra, page=ROW))
        self.manager: Any = self.spec.get_manager()
        self.tier: Any = self.manager.secondary_tiers[0]
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self.count = 0

    def request(self) -> ReqContext:
        self.count += 1
        context = ReqContext(req_id=f"r{self.count}")
        self.manager.on_new_request(context)
        return context

    def store(self, numbers: List[int]) -> None:
        context, keys = self.request(), [key(n) for n in numbers]
        while True:
            out = self.manager.prepare_store(keys, context)
            if out is not None:
                break
            self.step()
        for one, at in zip(out.keys_to_store, out.store_spec.chunk_ids):
            self.rows[at] = row(int.from_bytes(one[:32], "little"))
        if out.keys_to_store:
            self.manager.complete_store(out.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.step()

    def load(self, numbers: List[int], patience: float = 600.0) -> Dict[int, bool]:
        """Loads blocks, checks their bytes, and returns whether each was found."""
        context, loaded, end = self.request(), {}, time.monotonic() + patience
        pending = list(numbers)
        while pending:
            assert time.monotonic() < end
            for n in list(pending):
                found = self.manager.lookup(key(n), context)
                if found in (LookupResult.HIT_PENDING, LookupResult.RETRY):
                    continue
                pending.remove(n)
                loaded[n] = found is LookupResult.HIT
                if loaded[n]:
                    where = self.manager.prepare_load([key(n)], context)
                    assert (self.rows[where.chunk_ids[0]] == row(n)).all(), f"wrong bytes of {n}"
                    self.manager.complete_load([key(n)], context)
            self.step()
        self.manager.on_request_finished(context)
        return loaded

    def step(self) -> None:
        self.manager.on_schedule_end(END)
        time.sleep(0)

    def settle(self) -> None:
        end = time.monotonic() + 600.0
        while self.manager.has_pending_work():
            self.step()
            time.sleep(0.001)
            assert time.monotonic() < end


@pytest.fixture
def disk(tmp_path: Path) -> Dict[str, Any]:
    return {"host_bytes": "64MiB", "disk_path": str(tmp_path / "kv"), "disk_bytes": "512MiB"}


@pytest.fixture
def engine(make_config: Any, disk: Dict[str, Any]) -> Iterator[Engine]:
    made = Engine(make_config, 16, disk)
    yield made
    made.rows = None  # type: ignore[assignment]
    made.manager.shutdown()


def test_evicted_blocks_load_from_the_tier(engine: Engine) -> None:
    for first in range(0, 64, 8):
        engine.store(list(range(first, first + 8)))
    engine.settle()
    assert engine.load(list(range(8))) == {n: True for n in range(8)}
    assert engine.load([3, 40, 99]) == {3: True, 40: True, 99: False}
    stats = engine.tier.store.stats()
    assert stats["chunks"] == 64 and stats["disk_cells"] == 64


def test_blocks_survive_a_restart(make_config: Any, disk: Dict[str, Any]) -> None:
    first = Engine(make_config, 16, disk)
    first.store(list(range(16)))
    first.rows = None  # type: ignore[assignment]
    first.manager.shutdown()  # completes the running jobs
    second = Engine(make_config, 16, disk)
    assert all(second.load(list(range(16))).values())
    second.rows = None  # type: ignore[assignment]
    second.manager.shutdown()


def test_other_weights_are_a_miss(make_config: Any, disk: Dict[str, Any]) -> None:
    for weights, found in (("a", False), ("b", False), ("a", True)):
        one = Engine(make_config, 4, {**disk, "weights": weights})
        assert one.load([1]) == {1: found}
        one.store([1])
        one.settle()
        one.rows = None  # type: ignore[assignment]
        one.manager.shutdown()


def test_a_failed_load_is_reported_and_a_miss(engine: Engine) -> None:
    engine.store([1, 2, 3])
    engine.settle()
    engine.store(list(range(100, 116)))  # evicts blocks 1 to 3 from the CPU tier
    engine.settle()
    context, keys = engine.request(), [key(1), key(2), key(3)]
    assert [engine.manager.lookup(one, context) for one in keys] == [
        LookupResult.HIT_PENDING] * 3
    engine.tier._blocks.drop([bytes(key(2))])  # between the lookup and the load
    while engine.manager.lookup(key(1), context) is not LookupResult.HIT:
        engine.step()
        time.sleep(0.001)
    found = [engine.manager.lookup(one, context) for one in keys]
    assert found == [LookupResult.HIT, LookupResult.MISS, LookupResult.HIT]
    engine.manager.on_request_finished(context)


def test_checksum_mismatch_is_a_miss(make_config: Any, disk: Dict[str, Any],
                                     tmp_path: Path) -> None:
    first = Engine(make_config, 16, disk)
    first.store([1, 2])
    first.settle()
    first.rows = None  # type: ignore[assignment]
    first.manager.shutdown()
    data = row(1).tobytes()[:512]
    for file in sorted((tmp_path / "kv").glob("seg-*")):
        at = file.read_bytes().find(data)
        if at >= 0:
            with open(file, "r+b") as out:
                out.seek(at + 100)
                out.write(bytes([data[100] ^ 1]))
    second = Engine(make_config, 16, disk)
    assert second.load([1, 2]) == {1: False, 2: True}
    second.rows = None  # type: ignore[assignment]
    second.manager.shutdown()


def test_random_stores_and_loads_agree_with_a_set(engine: Engine) -> None:
    rng, stored = random.Random(7), set()
    for _ in range(120):
        some = rng.sample(range(80), rng.randint(1, 6))
        if rng.random() < 0.5:
            engine.store(some)
            stored.update(some)
        else:
            loaded = engine.load(some)
            assert not [n for n in some if loaded[n] and n not in stored]
    engine.settle()
    assert engine.load(sorted(stored)[:12]) == {n: True for n in sorted(stored)[:12]}


def test_reset_cache_drains_jobs(engine: Engine) -> None:
    engine.store(list(range(16)))
    engine.manager.reset_cache()
    engine.rows[:] = 0
    if hasattr(engine.manager, "on_reset_flushed"):  # since vLLM 0.33
        engine.manager.on_reset_flushed()
    assert all(engine.load(list(range(16))).values())


def test_threads_may_call_under_the_managers_lock(engine: Engine) -> None:
    if not hasattr(engine.manager, "lock"):
        pytest.skip("vLLM before 0.33 calls managers from one thread only")
    wrong: List[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(40):
                some = rng.sample(range(seed * 100, seed * 100 + 6), 2)
                with engine.manager.lock:
                    engine.store(some)
                with engine.manager.lock:
                    engine.load(some[:1])
        except BaseException as error:  # noqa: B036: asserted below
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def test_metrics_and_policies_are_available(engine: Engine) -> None:
    engine.store([1, 2, 3])
    engine.settle()
    stats = engine.manager.get_stats().reduce()
    assert any("kvtier_chunks" in name and value == 3 for name, value in stats.items())
    definitions = type(engine.spec).build_metric_definitions(engine.spec.extra_config)
    assert "vllm:kv_offload_kvtier_disk_used_bytes" in definitions
    engine.tier.set_policy("arc")
    assert "arc" in engine.tier.store.metrics()
    assert isinstance(engine.tier.store.evictions(kvtier.TIER_HOST), list)


def test_bad_options_are_rejected(make_config: Any, disk: Dict[str, Any]) -> None:
    for wrong, text in (({"hots_bytes": 1}, "host_bytes"), ({"policy": "nonsense"}, "nonsense"),
                        ({"level": "paper"}, "paper"), ({"host_bytes": "8 apples"}, "8GiB")):
        with pytest.raises(kvtier.Error) as failed:
            Engine(make_config, 4, {**disk, **wrong})
        assert text in str(failed.value)


