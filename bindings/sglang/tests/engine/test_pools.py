"""KvtierStorage with SGLang's own factory, host pools, file backend and controller."""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List

import present  # noqa: F401, I001: skips where there is no engine
import pools
import pytest
import torch
from kvtier_sglang import KvtierStorage
from mini import config, names
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

OURS = {"backend_name": "kvtier", "module_path": "kvtier_sglang", "class_name": "KvtierStorage"}
ALL = [*(("mha", one) for one in pools.MHA), *(("mla", one) for one in pools.MLA),
       ("uneven", "page_first"), ("uneven", "page_first_direct")]
PAGES = 64


def make_pool(kind: str, layout: str) -> Any:
    if kind == "uneven":
        return pools.mha(layout, v_dim=8)
    return pools.mha(layout) if kind == "mha" else pools.mla(layout)


def make_backend(pool: Any, extra: Any = None) -> KvtierStorage:
    """Makes a backend by the engine's factory, from its configuration."""
    fields = config({**OURS, **(extra or {})})
    backend = StorageBackendFactory.create_backend("dynamic", fields, pool)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    assert isinstance(backend, KvtierStorage)
    return backend


@pytest.mark.parametrize("kind, layout", ALL)
def test_pages_of_every_layout_survive_a_restart(kind: str, layout: str, tmp_path: Path) -> None:
    pool = make_pool(kind, layout)
    extra = {"disk_path": str(tmp_path), "disk_bytes": 1 << 30, "level": "disk"}
    backend = make_backend(pool, extra)
    pools.fill(pool, 1)
    before = [pools.page_bytes(pool, page) for page in range(PAGES)]
    keys = names(PAGES)
    assert all(backend.batch_set_v1(keys, pools.slots(range(PAGES))))
    backend.close()
    again = make_backend(pool, extra)
    pools.fill(pool, 2)
    others = [pools.page_bytes(pool, page) for page in range(PAGES, 2 * PAGES)]
    assert again.batch_exists([*keys, "missing"]) == PAGES
    backwards = list(reversed(range(PAGES)))
    assert all(again.batch_get_v1(keys, pools.slots(backwards)))
    assert [pools.page_bytes(pool, page) for page in backwards] == before
    assert [pools.page_bytes(pool, page) for page in range(PAGES, 2 * PAGES)] == others
    again.close()


@pytest.mark.parametrize("kind, layout", [one for one in ALL if one[0] != "uneven"])
def test_flat_pages_and_addresses_are_interchangeable(kind: str, layout: str) -> None:
    pool = make_pool(kind, layout)
    backend = make_backend(pool)
    pools.fill(pool, 3)
    before, keys = [pools.page_bytes(pool, page) for page in range(8)], names(8)
    flat = [pool.get_data_page(page * pools.PAGE).contiguous() for page in range(4)]
    assert backend.batch_set(keys[:4], flat)
    assert all(backend.batch_set_v1(keys[4:], pools.slots(range(4, 8))))
    pools.fill(pool, 4)
    assert all(backend.batch_get_v1(keys[:4], pools.slots(range(4))))
    room = [pool.get_dummy_flat_data_page() for _ in range(4)]
    for page, one in zip(range(4, 8), backend.batch_get(keys[4:], room)):
        pool.set_from_flat_data_page(page * pools.PAGE, one)
    assert [pools.page_bytes(pool, page) for page in range(8)] == before
    backend.close()


@pytest.mark.parametrize("seed", range(6))
def test_random_calls_agree_with_the_file_backend(seed: int, tmp_path: Path) -> None:
    """Random calls to both backends, on two pools that must stay equal."""
    kind, layout = [
        ("mha", "layer_first"), ("mha", "page_first"), ("mla", "page_first_direct"),
        ("mha", "page_head"), ("mla", "layer_first"), ("mha", "page_first_direct")][seed]
    numbers = random.Random(seed)
    each: List[Any] = []
    for make in (make_backend, lambda pool: HiCacheFile(config({}), str(tmp_path))):
        pool, side = make_pool(kind, layout), make_pool("mla", "page_first")
        pools.fill(pool, seed), pools.fill(side, seed + 100)
        backend = make(pool)
        backend.register_mem_pool_host(pool)
        backend.register_mem_host_pool_v2(pool, PoolName.KV)
        backend.register_mem_host_pool_v2(side, PoolName.SWA)
        each.append((backend, pool, side))
    keys = names(24, str(seed))
    for _ in range(120):
        some, what = numbers.sample(keys, numbers.randint(1, 10)), numbers.randrange(8)
        pages = numbers.sample(range(PAGES), len(some))
        name = numbers.choice([PoolName.KV, PoolName.SWA])
        policy = numbers.choice([PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES])
        window, flip = numbers.randint(1, 3), numbers.randrange(1 << 30)
        answers = []
        for backend, pool, side in each:
            transfer = PoolTransfer(name, pools.slots(pages), None, some)
            if what == 0:
                answer: Any = backend.batch_set_v2([transfer])
            elif what == 1:
                answer = backend.batch_get_v2([transfer])
            elif what == 2:
                there = backend.batch_exists_v2(keys, [PoolTransfer(
                    PoolName.SWA, keys=keys[:window], hit_policy=policy)])
                answer = (there.kv_hit_pages, dict(there.extra_pool_hit_pages),
                          there.restorable_prefix_pages)
            elif what == 3:
                answer = backend.batch_exists(some)
            elif what == 4:
                answer = backend.batch_set(
                    some, [pool.get_data_page(page * pools.PAGE).contiguous() for page in pages])
            elif what == 5:
                room = [pool.get_dummy_flat_data_page() for _ in some]
                answer = [None if one is None else one.view(torch.uint8).numpy().tobytes()
                          for one in backend.batch_get(some, room)]
            elif what == 6:
                answer = [backend.exists(key) for key in some]
            elif flip % 4 == 0:
                answer = backend.clear() and None
            else:
                answer = None
                pools.fill(pool, flip), pools.fill(side, flip + 1)
            answers.append(answer)
        assert answers[0] == answers[1]
        for at in (1, 2):
            assert all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other
                       in zip(pools.buffers(each[0][at]), pools.buffers(each[1][at])))
    each[0][0].close()


class Device:
    """The parts of a device pool that the controller uses."""

    device, layer_num = "cpu", pools.LAYERS

    def register_layer_transfer_counter(self, counter: object) -> None:
        """Does nothing: there is no forward pass."""


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the engine's controller for a pool, with the controller's threads."""
    rank = SimpleNamespace(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1,
                           attn_dcp_rank=0)
    monkeypatch.setattr(cache_controller, "get_parallel", lambda: rank)
    monkeypatch.setattr(cache_controller, "is_dp_attention_enabled", lambda: False)
    monkeypatch.setattr(cache_controller.HiCacheController, "_create_sync_groups", lambda _: [])

    def make(pool: Any, extra: Dict[str, Any]) -> Any:
        return cache_controller.HiCacheController(
            SimpleNamespace(get_kvcache=Device), pool, pools.PAGE, None, None,
            io_backend="direct", storage_backend="dynamic", model_name="some/model",
            prefetch_threshold=pools.PAGE,
            storage_backend_extra_config={**OURS, "host_bytes": 64 << 20, **extra})
    return make


@pytest.mark.skipif("KVTIER_NO_SGLANG_HASH" in os.environ,
                    reason="SGLang cannot compile its page hash here")
@pytest.mark.parametrize("interface", [0, 1])
@pytest.mark.parametrize("kind, layout", [("mha", "page_first"), ("mla", "layer_first")])
def test_the_controllers_threads_write_and_prefetch(kind: str, layout: str, interface: int,
                                                    controller: Any, tmp_path: Path) -> None:
    pool = make_pool(kind, layout)
    extra = {"interface_v1": interface, "disk_path": str(tmp_path), "disk_bytes": 1 << 30}
    engine = controller(pool, extra)
    pools.fill(pool, 5)
    tokens = list(range(PAGES * pools.PAGE))
    before = [pools.page_bytes(pool, page) for page in range(PAGES)]
    hashes = cache_controller.get_storage_hash_str(tokens, None, page_size=pools.PAGE)
    assert len(hashes) == PAGES
    engine.write_storage(pools.slots(range(PAGES)), tokens, hashes)
    done = engine.ack_backup_queue.get(timeout=600)
    assert done.completed_tokens == len(tokens)
    engine.detach_storage_backend()
    engine.attach_storage_backend(
        "dynamic", pools.PAGE, "some/model", {**OURS, "host_bytes": 64 << 20, **extra})
    pools.fill(pool, 6)
    operation = cache_controller.PrefetchOperation("r", tokens)
    engine.prefetch_queue.put(operation)
    found = engine.prefetch_hit_queue.get(timeout=600)
    assert found.storage_hit_count == len(tokens) and found.hash_value == hashes
    backwards = list(reversed(range(PAGES)))
    operation.host_indices = pools.slots(backwards)
    engine.prefetch_buffer.put(operation)
    while not (ack := engine.ack_prefetch_queue.get(timeout=600)).completed_req:
        read = ack.completed_tokens
    assert read == len(tokens)
    assert [pools.page_bytes(pool, page) for page in backwards] == before
    engine.detach_storage_backend()
