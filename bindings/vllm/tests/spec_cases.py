"""Tests of KvtierSpec's manager and worker, called as vLLM's OffloadingConnector calls them."""

from __future__ import annotations

import dataclasses
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List

import kvtier
import pytest

HOST = {"spec_name": "KvtierSpec", "spec_module_path": "kvtier_vllm.spec", "host_bytes": "64MiB"}
PAGE = 4096


def key(n: int, group: int = 0) -> bytes:
    from vllm.v1.kv_offload.base import make_offload_key

    return bytes(make_offload_key(n.to_bytes(32, "little"), group))


class Engine:
    """A worker and a manager over two tensors per group in host memory."""

    def __init__(self, create: Callable[..., Any], config: Any, groups: int = 1) -> None:
        import torch
        from vllm.v1.kv_offload import base

        self.base, self.torch, self.groups = base, torch, groups
        self.tensors = [torch.zeros((32, PAGE), dtype=torch.int8) for _ in range(2 * groups)]
        caches = base.CanonicalKVCaches(
            [base.CanonicalKVCacheTensor(one, PAGE) for one in self.tensors],
            [[base.CanonicalKVCacheRef(2 * g, PAGE), base.CanonicalKVCacheRef(2 * g + 1, 1024)]
             for g in range(groups)])
        self.worker = create(config).get_worker(caches)
        self.manager = create(config).get_manager()
        self.jobs = 0

    def place(self, keys: List[bytes], blocks: List[int]) -> Any:
        sizes = [sum(1 for one in keys if one[-1] == g) for g in range(self.groups)]
        return self.base.GPULoadStoreSpec(blocks, sizes, [0] * self.groups)

    def request(self) -> Any:
        self.jobs += 1
        context = self.base.ReqContext(req_id=f"r{self.jobs}")
        self.manager.on_new_request(context)
        return context

    def fill(self, n: int, group: int, block: int) -> None:
        for part, size in ((0, PAGE), (1, 1024)):
            rng = self.torch.Generator().manual_seed(n * 8 + group * 2 + part)
            self.tensors[2 * group + part][block, :size] = self.torch.randint(
                -128, 128, (size,), generator=rng, dtype=self.torch.int8)

    def has_bytes(self, n: int, group: int, block: int) -> bool:
        before = [self.tensors[2 * group + part][block].clone() for part in (0, 1)]
        self.fill(n, group, block)
        after = [self.tensors[2 * group + part][block] for part in (0, 1)]
        return bool((before[0] == after[0]).all() and (before[1][:1024] == after[1][:1024]).all())

    def run(self, job: int, submit: Callable[..., bool], *args: Any) -> Any:
        assert submit(job, *args)
        self.worker.wait({job})
        results = {one.job_id: one for one in self.worker.get_finished()}
        return results[job]

    def store(self, numbers: List[int]) -> int:
        context = self.request()
        keys = [key(n, g) for g in range(self.groups) for n in numbers]
        out = self.manager.prepare_store(keys, context)
        blocks = []
        for at, one in enumerate(out.keys_to_store):
            blocks.append(at)
            self.fill(int.from_bytes(one[:32], "little"), one[-1], at)
        if blocks:
            assert self.manager.lookup(out.keys_to_store[0], context).name == "HIT_PENDING"
            done = self.run(self.jobs, self.worker.submit_store,
                            self.place(out.keys_to_store, blocks), out.store_spec)
            assert done.success and done.transfer_size == len(blocks) * (PAGE + 1024)
            self.manager.complete_store(out.keys_to_store, context)
        self.manager.on_request_finished(context)
        return len(blocks)

    def lookup(self, one: bytes, context: Any) -> str:
        end = time.monotonic() + 600
        while True:
            found = str(self.manager.lookup(one, context).name)
            if found != "RETRY":
                return found
            self.manager.on_schedule_end(SimpleNamespace())
            assert time.monotonic() < end
            time.sleep(0.001)

    def load(self, numbers: List[int]) -> List[int]:
        """Loads blocks, checks their bytes, and returns the numbers of the hits."""
        context = self.request()
        found = [n for n in numbers if all(
            self.lookup(key(n, g), context) == "HIT" for g in range(self.groups))]
        keys = [key(n, g) for g in range(self.groups) for n in found]
        if keys:
            spec = self.manager.prepare_load(keys, context)
            blocks = list(range(31, 31 - len(keys), -1))
            done = self.run(self.jobs, self.worker.submit_load, spec, self.place(keys, blocks))
            assert done.success
            for one, block in zip(keys, blocks):
                assert self.has_bytes(int.from_bytes(one[:32], "little"), one[-1], block)
            self.manager.complete_load(set(keys), context)
        self.manager.on_request_finished(context)
        return found

    def close(self) -> None:
        self.manager.shutdown()
        self.worker.shutdown()


@pytest.fixture(params=[1, 2])
def engine(request: Any, create: Any, make_config: Any) -> Iterator[Engine]:
    made = Engine(create, make_config(HOST, groups=request.param), request.param)
    yield made
    made.close()


def test_stored_blocks_load_with_their_bytes(engine: Engine) -> None:
    assert engine.store([1, 2, 3]) == 3 * engine.groups
    assert engine.store([2, 3, 4]) == engine.groups
    assert engine.load([1, 9, 4, 3]) == [1, 4, 3]
    count = 4 * engine.groups
    stored, removed = take_events(engine.manager, count)
    assert len(stored) == count and not removed
    engine.manager.reset_cache()
    assert engine.load([1, 2]) == []
    assert take_events(engine.manager, count) == ([], stored)


def take_events(manager: Any, count: int) -> Any:
    """The sorted keys that events report as stored, and as removed."""
    keys: Any = ([], [])
    end = time.monotonic() + 600
    while len(keys[0]) + len(keys[1]) < count:
        for event in manager.take_events():
            keys[event.removed].extend(event.keys)
        assert time.monotonic() < end, keys
        time.sleep(0.001)
    return sorted(keys[0]), sorted(keys[1])


def test_group_numbers_may_have_gaps(create: Any, make_config: Any) -> None:
    config = make_config(HOST)
    (group,) = config.groups
    one = Engine(create, dataclasses.replace(config, groups=(
        dataclasses.replace(group, group_id=3),)))
    context, keys = one.request(), [key(1, 3)]
    out = one.manager.prepare_store(keys, context)
    one.fill(1, 0, 7)
    place = one.base.GPULoadStoreSpec([7], [1], [0])
    assert one.run(1, one.worker.submit_store, place, out.store_spec).success
    one.manager.complete_store(keys, context)
    assert one.lookup(keys[0], context) == "HIT"
    spec = one.manager.prepare_load(keys, context)
    place = one.base.GPULoadStoreSpec([9], [1], [0])
    assert one.run(2, one.worker.submit_load, spec, place).success and one.has_bytes(1, 0, 9)
    one.close()


def test_held_blocks_cannot_be_dropped(engine: Engine) -> None:
    engine.store([1, 2])
    context, one = engine.request(), key(1)
    assert engine.lookup(one, context) == "HIT"
    spec = engine.manager.prepare_load([one], context)
    space = engine.worker._medium.blocks[0]
    assert space.drop([one]).referenced_chunks == 1
    done = engine.run(99, engine.worker.submit_load, spec, engine.place([one], [5]))
    assert done.success and engine.has_bytes(1, 0, 5)
    engine.manager.complete_load([one], context)
    assert space.drop([one]).referenced_chunks == 1  # held by the lookup's pin
    while engine.manager.has_pending_work():
        engine.manager.on_schedule_end(SimpleNamespace())
    assert space.drop([one]).removed_chunks == 1


def test_a_hit_is_held_until_its_load(engine: Engine) -> None:
    """A store of another request may end at any time, and cause evictions."""
    engine.store([1, 2])
    context, one = engine.request(), key(1)
    assert engine.lookup(one, context) == "HIT"
    assert engine.worker._medium.blocks[0].drop([one]).referenced_chunks == 1
    engine.manager.on_schedule_end(SimpleNamespace())
    assert engine.lookup(one, context) == "HIT"
    spec = engine.manager.prepare_load([one], context)
    done = engine.run(99, engine.worker.submit_load, spec, engine.place([one], [5]))
    assert done.success and engine.has_bytes(1, 0, 5)
    engine.manager.complete_load([one], context)


def test_stores_prepared_before_a_reset_are_not_found(engine: Engine) -> None:
    """vLLM submits a store to the worker one step after it was prepared."""
    context = engine.request()
    keys = [key(1, group) for group in range(engine.groups)]
    out = engine.manager.prepare_store(keys, context)
    for group in range(engine.groups):
        engine.fill(1, group, group)
    engine.manager.reset_cache()
    done = engine.run(1, engine.worker.submit_store,
                      engine.place(out.keys_to_store, list(range(engine.groups))), out.store_spec)
    assert done.success and engine.load([1]) == []
    assert engine.store([1]) == engine.groups and engine.load([1]) == [1]


def test_blocks_of_other_engines_are_found_at_the_remote(create: Any, make_config: Any,
                                                         tmp_path: Path) -> None:
    of = {**HOST, "spec": f'store(remote=dir(path="{tmp_path}", timeout=600000))',
          "level": "remote", "remote_lookup_s": 60}
    first = Engine(create, make_config(of))
    first.store([1, 2, 3])
    first.close()
    second = Engine(create, make_config(of))
    context = second.request()
    # A block that only the remote has is stored locally, too, because the remote may lose it.
    assert second.lookup(key(3), context) == "HIT"
    assert second.load([1, 9, 2]) == [1, 2]
    assert second.store([2, 4]) == 1  # block 2 is local by now
    second.manager.on_request_finished(context)
    second.manager.on_schedule_end(SimpleNamespace())
    end = time.monotonic() + 600
    while second.manager.has_pending_work():
        second.manager.on_schedule_end(SimpleNamespace())
        assert time.monotonic() < end
    second.close()


def test_finished_requests_leave_no_state(create: Any, make_config: Any,
                                          tmp_path: Path) -> None:
    disk = {**HOST, "disk_path": str(tmp_path / "kv"), "disk_bytes": "256MiB", "level": "disk"}
    first = Engine(create, make_config(disk))
    first.store([1, 2, 3])
    first.close()
    second = Engine(create, make_config(disk))
    context = second.request()
    assert second.manager.lookup(key(1), context).name == "RETRY"
    second.manager.on_schedule_end(SimpleNamespace())
    second.manager.on_request_finished(context)  # aborted
    end = time.monotonic() + 600
    while second.manager.has_pending_work():
        second.manager.on_schedule_end(SimpleNamespace())
        assert time.monotonic() < end
    manager = second.manager
    assert not (manager._fetching or manager._fetches or manager._pinned or manager._failed)
    second.close()


def test_the_worker_may_shut_down_before_the_manager(create: Any, make_config: Any) -> None:
    """vLLM's engine core shuts down in this order, while requests may be underway."""
    one = Engine(create, make_config(HOST))
    one.store([1, 2])
    context = one.request()
    assert one.lookup(key(1), context) == "HIT" and one.lookup(key(2), context) == "HIT"
    one.manager.prepare_load([key(1)], context)
    one.worker.shutdown()
    one.manager.shutdown()


@pytest.mark.parametrize("disk", [False, True])
def test_prepared_loads_survive_eviction(create: Any, make_config: Any, tmp_path: Path,
                                         disk: bool) -> None:
    """Other stores do not evict prepared blocks. Blocks are free again after their load."""
    below = {"disk_path": str(tmp_path / "kv"), "disk_bytes": "256MiB"} if disk else {}
    one = Engine(create, make_config({**HOST, "host_bytes": "1MiB", **below}))
    one.store([1, 2, 3])
    context = one.request()
    assert [one.lookup(key(n), context) for n in (1, 2, 3)] == ["HIT"] * 3
    spec = one.manager.prepare_load([key(n) for n in (1, 2, 3)], context)
    for turn in range(30):
        one.store(list(range(100 + 20 * turn, 120 + 20 * turn)))
        one.manager.on_schedule_end(SimpleNamespace())
    blocks = one.manager._medium.blocks[0]
    assert all(blocks.exists([key(n) for n in (1, 2, 3)])) and not one.manager._pins
    assert blocks.drop([key(1)]).referenced_chunks == 1
    done = one.run(9, one.worker.submit_load, spec, one.place(spec.keys, [4, 5, 6]))
    assert done.success and all(one.has_bytes(n, 0, at) for n, at in ((1, 4), (2, 5), (3, 6)))
    one.manager.complete_load(spec.keys, context)
    assert not one.manager._holds
    if not disk:  # with a disk, a write-back may still reference the chunk
        assert blocks.drop([key(1)]).removed_chunks == 1
    one.close()


def test_a_failed_load_is_reported(engine: Engine) -> None:
    spec_of = engine.manager.prepare_load([key(77)], engine.request())
    done = engine.run(5, engine.worker.submit_load, spec_of, engine.place([key(77)], [3]))
    assert not done.success


def test_malformed_jobs_are_rejected(engine: Engine) -> None:
    engine.store([1])
    spec = engine.manager.prepare_load([key(1)], engine.request())
    with pytest.raises(kvtier.InvalidError, match="blocks"):
        engine.worker.submit_load(1, spec, engine.place([key(1)], [32]))
    with pytest.raises(kvtier.InvalidError, match="keys"):
        engine.worker.submit_load(2, spec, engine.place([key(1), key(2)], [1, 2]))
    spec.token = "another"
    with pytest.raises(kvtier.StateError, match="another process"):
        engine.worker.submit_load(3, spec, engine.place([key(1)], [1]))


def test_blocks_survive_a_restart(create: Any, make_config: Any, tmp_path: Path) -> None:
    disk = {**HOST, "disk_path": str(tmp_path / "kv"), "disk_bytes": "256MiB", "level": "disk"}
    first = Engine(create, make_config(disk))
    first.store(list(range(20)))
    first.close()
    second = Engine(create, make_config(disk))
    assert second.load(list(range(20))) == list(range(20))
    assert second.manager.store.stats()["disk_hit_cells"] > 0 or (
        second.manager.store.stats()["host_cells"] > 0)
    second.close()


def test_random_stores_and_loads_agree_with_a_set(engine: Engine) -> None:
    rng, stored = random.Random(5), set()
    for _ in range(60):
        some = rng.sample(range(40), rng.randint(1, 6))
        if rng.random() < 0.5:
            engine.store(some)
            stored.update(some)
        else:
            assert set(engine.load(some)) == stored & set(some)


def test_unsupported_configurations_are_rejected(create: Any, make_config: Any) -> None:
    with pytest.raises(kvtier.UnsupportedError, match="TieringOffloadingSpec"):
        create(make_config(HOST, world=2))
    with pytest.raises(kvtier.UnsupportedError, match="block_size"):
        create(make_config(HOST, blocks_per_chunk=2))
    with pytest.raises(kvtier.InvalidError, match="host_bytes"):
        create(make_config({**HOST, "host_byte": 1}))
    with pytest.raises(kvtier.UnsupportedError, match="distributed-executor-backend uni"):
        create(make_config(HOST)).get_manager()
    options: Dict[str, Any] = {**HOST, "policy": "nonsense"}
    with pytest.raises(kvtier.SpecError):
        Engine(create, make_config(options))
