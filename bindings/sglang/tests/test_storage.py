"""The storage backend over small host pools: every layout, every byte."""

from __future__ import annotations

import hashlib
import logging
import math
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Dict, List

import kvtier
import numpy as np
import pytest
import torch
from kvtier_sglang import KvtierStorage
from mini import LAYOUTS, MiniPool, MovedPool, StatePool, config, names
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)


def opened(pool: MiniPool, extra: Any = None, **given: Any) -> KvtierStorage:
    backend = KvtierStorage(config(extra, **given), {})
    backend.register_mem_pool_host(pool)
    return backend


@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stored_pages_load_with_every_byte(layout: str, kinds: int) -> None:
    pool = MiniPool(layout, kinds=kinds)
    backend = opened(pool)
    pool.fill(1)
    before = {page: pool.bytes_of(page) for page in range(16)}
    keys = names(5)
    assert backend.batch_set_v1(keys, pool.slots([3, 0, 15, 7, 1])) == [True] * 5
    assert backend.batch_exists([*keys, "missing", keys[0]]) == 5
    pool.fill(2)
    others = {page: pool.bytes_of(page) for page in range(16)}
    got = backend.batch_get_v1([keys[1], "missing", keys[4], keys[2]], pool.slots([9, 10, 0, 4]))
    assert got == [True, False, True, True]
    assert [pool.bytes_of(page) for page in (9, 0, 4)] == [before[page] for page in (0, 1, 15)]
    untouched = set(range(16)) - {9, 10, 0, 4}
    assert all(pool.bytes_of(page) == others[page] for page in untouched)
    backend.close()


@pytest.mark.parametrize("make", [MovedPool, lambda: StatePool("layer_first")])
def test_pools_without_regular_addresses_are_supported(make: Any) -> None:
    pool = make()
    backend = opened(pool)
    pool.fill(3)
    before = [pool.bytes_of(page) for page in range(16)]
    keys = names(16)
    assert all(backend.batch_set_v1(keys, pool.slots(range(16))))
    pool.fill(4)
    assert all(backend.batch_get_v1(keys, pool.slots(list(reversed(range(16))))))
    assert [pool.bytes_of(15 - page) for page in range(16)] == before
    backend.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flat_pages_and_addresses_are_interchangeable(layout: str) -> None:
    pool = MiniPool(layout)
    backend = opened(pool)
    pool.fill(5)
    before = [pool.bytes_of(page) for page in range(4)]
    keys = names(4)
    assert backend.batch_set(keys[:2], [pool.get_data_page(0), pool.get_data_page(4)])
    assert all(backend.batch_set_v1(keys[2:], pool.slots([2, 3])))
    assert backend.exists(keys[0]) and not backend.exists("missing")
    pool.fill(6)
    assert all(backend.batch_get_v1(keys[:2], pool.slots([0, 1])))
    room = [pool.get_dummy_flat_data_page() for _ in range(3)]
    got = backend.batch_get([*keys[2:], "missing"], room)
    assert got[0] is room[0] and got[2] is None
    pool.set_from_flat_data_page(8, got[0])
    pool.set_from_flat_data_page(12, got[1])
    assert [pool.bytes_of(page) for page in range(4)] == before
    assert backend.get("missing", room[0]) is None
    backend.close()


def test_tag_model_layout_shape_and_ranks_separate_pages(tmp_path: Path) -> None:
    keys = names(1)
    first = MiniPool()
    backend = opened(first, {"disk_path": str(tmp_path), "disk_bytes": 1 << 30, "level": "disk",
                             "extra_backend_tag": "a"})
    assert backend.batch_set_v1(keys, first.slots([0])) == [True]
    backend.close()

    def there(pool: MiniPool, tag: str = "a", **given: Any) -> int:
        other = opened(pool, {"disk_path": str(tmp_path), "disk_bytes": 1 << 30,
                              "extra_backend_tag": tag}, **given)
        found = other.batch_exists(keys)
        other.close()
        return found

    assert there(MiniPool()) == 1
    assert there(MiniPool(), tag="b") == 0
    assert there(MiniPool(), model_name="other") == 0
    assert there(MiniPool("page_first_direct")) == 0
    assert there(MiniPool(layers=6, dim=4)) == 0
    assert there(MiniPool(), tp_size=2) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "dp0-tp0of1-pp0of1-cp0of1", "dp0-tp0of2-pp0of1-cp0of1"]


def test_pages_survive_a_restart(tmp_path: Path) -> None:
    extra = {"spec": "store(host=64MiB)", "disk_path": str(tmp_path), "disk_bytes": 1 << 30}
    pool, keys = MiniPool(pages=64), names(64)
    pool.fill(7)
    before = [pool.bytes_of(page) for page in range(64)]
    backend = opened(pool, extra)
    assert all(backend.batch_set_v1(keys, pool.slots(range(64))))
    backend.close()
    again = opened(pool, extra)
    pool.fill(8)
    assert again.batch_exists(keys) == 64
    assert all(again.batch_get_v1(keys, pool.slots(range(64))))
    assert [pool.bytes_of(page) for page in range(64)] == before
    again.clear()
    assert again.batch_exists(keys) == 0
    again.close()


def test_full_memory_evicts_some_pages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvtier_sglang")
    pool = MiniPool(pages=4096, page_size=8, dim=64)
    pool.fill(9)
    backend = opened(pool, {"host_bytes": 33 << 20, "policy": "lru", "log_evictions": True})
    keys = names(4096)
    for at in range(0, 4096, 128):
        backend.batch_set_v1(keys[at:at + 128], pool.slots(range(at, at + 128)))
    assert {one.policy for one in backend.evictions()} == {"lru"}
    last = max(one.number for one in backend.evictions())
    backend.set_policy("s3fifo")
    other = names(1024, "other ")
    for at in range(0, 1024, 128):
        backend.batch_set_v1(other[at:at + 128], pool.slots(range(at, at + 128)))
    since = [one for one in backend.evictions(most=4096) if one.number > last]
    assert since and {one.policy for one in since} == {"s3fifo"}
    stored = [backend.exists(key) for key in keys]
    before = [pool.bytes_of(page) for page in range(4096)]
    pool.fill(10)
    got = backend.batch_get_v1(keys, pool.slots(range(4096)))
    assert 0 < sum(stored) < 4096 and got == stored
    assert all(pool.bytes_of(page) == before[page] for page in range(4096) if got[page])
    assert backend.evictions() and "kvtier" in backend.metrics()
    assert backend.stats()["dropped_chunks"] > 0 and backend.tenants()[0].tenant == 0
    stats = backend.get_stats()
    assert sum(stats.backup_pgs) >= sum(stored) and sum(stats.prefetch_pgs) == sum(stored)
    assert len(stats.prefetch_pgs) == len(stats.prefetch_bandwidth)
    assert backend.get_stats().backup_pgs == []
    messages = [one.getMessage() for one in caplog.records if "evicted from" in one.getMessage()]
    assert messages and len(set(messages)) == len(messages)  # each eviction is logged once
    backend.close()


def count_after_eviction(extra: Dict[str, Any], store_with_hint: Any) -> List[int]:
    """How many of the 40 pages of each of two batches with hints are still stored after 60 more
    pages were stored."""
    pool = MiniPool(pages=128, layers=8, dim=32)  # 8 KiB a page
    backend = opened(pool, {"host_bytes": 1 << 20, "policy": "predictive", **extra})
    batches = [names(40, "first "), names(40, "second ")]
    for at, keys in enumerate(batches):
        store_with_hint(backend, at, keys, pool.slots(range(40)))
    for keys in (names(20, "x "), names(20, "y "), names(20, "z ")):
        assert all(backend.batch_set_v1(keys, pool.slots(range(20))))
    found = [sum(map(backend.exists, keys)) for keys in batches]
    backend.close()
    return found


HINTS = [{"next_use_s": 3600}, {"next_use_s": 60, "stop": "tool_use"}]


def hint_in_set_v1(backend: KvtierStorage, at: int, keys: List[str], slots: Any,
                   given: Any = None) -> None:
    given = {"kvtier": HINTS[at] if given is None else given}
    assert all(backend.batch_set_v1(keys, slots, HiCacheStorageExtraInfo(extra_info=given)))


def hint_in_set_v2(backend: KvtierStorage, at: int, keys: List[str], slots: Any) -> None:
    transfer = PoolTransfer(PoolName.KV, slots, keys=keys)
    info = HiCacheStorageExtraInfo(extra_info={"kvtier": HINTS[at]})
    assert all(backend.batch_set_v2([transfer], info)[PoolName.KV])


def hint_in_get(backend: KvtierStorage, at: int, keys: List[str], slots: Any) -> None:
    assert all(backend.batch_set_v1(keys, slots, HiCacheStorageExtraInfo(prefix_keys=keys)))
    info = HiCacheStorageExtraInfo(extra_info={"kvtier": HINTS[at]})
    assert all(backend.batch_get_v1(keys, slots, info))


def hint_by_call(backend: KvtierStorage, at: int, keys: List[str], slots: Any) -> None:
    assert all(backend.batch_set_v1(keys, slots))
    backend.hint([*keys, "missing"], **HINTS[at])


@pytest.mark.parametrize("store_with_hint", [hint_in_set_v1, hint_in_set_v2, hint_in_get,
                                             hint_by_call])
def test_a_hint_changes_the_victims(store_with_hint: Any) -> None:
    first, second = count_after_eviction({}, store_with_hint)
    assert first < second == 40
    swapped = lambda backend, at, *rest: store_with_hint(backend, 1 - at, *rest)  # noqa: E731
    first, second = count_after_eviction({}, swapped)
    assert 40 == first > second
    disabled = count_after_eviction({"hints": False}, store_with_hint)
    assert disabled == count_after_eviction({"hints": False}, swapped)


def test_kept_pages_are_pinned() -> None:
    pool = MiniPool()
    backend = opened(pool)
    hint_in_set_v1(backend, 0, names(2), pool.slots([0, 1]), {"keep_s": 3600})
    assert backend.stats()["pins"] == 2
    backend.hint(names(2), keep_s=7200)
    with pytest.raises(kvtier.InvalidError, match="keep_s"):
        backend.hint(names(2), keep_s=0)
    backend.close()


def test_malformed_hints_do_not_fail_a_transfer(caplog: pytest.LogCaptureFixture) -> None:
    pool = MiniPool()
    backend = opened(pool)
    for given in (3, {"stop": "x"}, {"stop": []}, {"next_use_s": "soon"}, {"next_use_s": -1},
                  {"done": "false"}, {"done": 0},
                  *({"next_use_s": one} for one in (math.inf, math.nan, 10**400))):
        caplog.clear()
        hint_in_set_v1(backend, 0, names(2), pool.slots([0, 1]), given)
        assert "are ignored" in caplog.text
    caplog.clear()
    hint_in_set_v1(backend, 0, names(2), pool.slots([0, 1]), {})
    assert not caplog.text
    with pytest.raises(kvtier.InvalidError, match="stop"):
        backend.hint(names(1), stop="never")
    with pytest.raises(kvtier.InvalidError, match="next_use_s"):
        backend.hint(names(1), next_use_s=-1)
    with pytest.raises(kvtier.InvalidError, match="without quotes"):
        backend.hint(names(1), done="false")
    backend.close()
    with pytest.raises(kvtier.ClosedError):
        backend.hint(names(1), done=True)


def test_thrashing_lowers_the_advice() -> None:
    pool = MiniPool()
    unregistered = KvtierStorage(config(), {})
    assert unregistered.advice(8) is None
    unregistered.close()
    backend = opened(pool, {"policy": "lru"})
    assert backend._advisor._policy is None  # nothing is recorded before the first advice
    assert backend.advice(8).batch == 8
    advisor = backend._advisor
    advisor._policy.set_advice(shrink_above=0.1, window=8, patience=1)
    advisor._policy.set_capacity(16)
    advisor._capacity = 16
    for turn in range(12):  # three prompts, but room for one
        keys = names(16, f"{turn % 3} ")
        backend.batch_exists_v2(keys)
        assert all(backend.batch_set_v1(keys, pool.slots(range(16))))
    assert backend.advice(8).batch == 4
    backend.set_policy("arc")
    assert advisor._policy.spec.startswith("arc")
    advisor._policy.close()  # an error in the advisor's policy disables advice only
    assert backend.batch_exists(names(1)) == 0
    assert backend.advice(8) is None
    backend.close()
    with pytest.raises(kvtier.ClosedError):
        backend.advice(8)


@pytest.mark.parametrize("extra, policy", [({}, "horizon"), ({"spec": "store(policy=arc)"}, "arc"),
                                           ({"policy": "lru"}, "lru")])
def test_advice_uses_the_policy_of_the_store(extra: Dict[str, str], policy: str) -> None:
    backend = opened(MiniPool(), extra)
    assert backend.advice(8).batch == 8
    assert backend._advisor._policy.stats()["name"] == policy
    backend.close()


def brute_force(kv: List[bool], transfers: List[PoolTransfer], pools: Dict[str, List[bool]]
                ) -> List[int]:
    """All prefixes that every pool can serve, found by trying each length."""
    def usable(pages: int) -> bool:
        for one in transfers:
            there, window = pools[one.name], pages
            if one.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(one.keys or ()))
            if not all(there[max(0, pages - window):pages]):
                return False
        return True

    run = kv.index(False) if False in kv else len(kv)
    return [pages for pages in range(1, run + 1) if usable(pages)]


def test_prefixes_of_several_pools_match_brute_force() -> None:
    kv, state, window = MiniPool(pages=12), StatePool("layer_first", pages=12), MiniPool(
        "layer_first", pages=12, kinds=1)
    numbers, keys = random.Random(11), names(12)
    for _ in range(40):
        backend = opened(kv)
        backend.register_mem_host_pool_v2(kv, PoolName.KV)
        backend.register_mem_host_pool_v2(state, PoolName.MAMBA)
        backend.register_mem_host_pool_v2(window, PoolName.SWA)
        backend.on_host_pools_registered()
        there: Dict[str, List[bool]] = {}
        for name, pool, odds in (("kv", kv, 0.9), ("mamba", state, 0.5), ("swa", window, 0.8)):
            there[name] = [numbers.random() < odds for _ in range(12)]
            stored = [i for i in range(12) if there[name][i]]
            sent = PoolTransfer(PoolName(name), pool.slots(stored), None,
                                [keys[i] for i in stored])
            assert backend.batch_set_v2([sent]) == {name: [True] * len(stored)}
        wanted = [
            PoolTransfer(PoolName.MAMBA, keys=keys[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES),
            PoolTransfer(PoolName.SWA, keys=keys[:3], hit_policy=numbers.choice(
                [PoolHitPolicy.TRAILING_PAGES, PoolHitPolicy.ALL_PAGES]))]
        result = backend.batch_exists_v2(keys, wanted)
        usable = brute_force(there["kv"], wanted, there)
        assert result.restorable_prefix_pages == usable
        assert result.kv_hit_pages == max(usable, default=0)
        backend.close()


def test_several_pools_transfer_in_one_call() -> None:
    kv, state = MiniPool(), StatePool("layer_first", pages=16)
    backend = opened(kv)
    backend.register_mem_host_pool_v2(state, PoolName.MAMBA)
    kv.fill(12), state.fill(13)
    before, keys = state.bytes_of(5), names(4)
    backend.batch_set_v2([PoolTransfer(PoolName.KV, kv.slots([0, 1]), None, keys[:2]),
                          PoolTransfer(PoolName.MAMBA, state.slots([5]), None, keys[1:2])])
    state.fill(14)
    got = backend.batch_get_v2([PoolTransfer(PoolName.KV, kv.slots([2, 3, 4]), None, keys[:3]),
                                PoolTransfer(PoolName.MAMBA, state.slots([1, 2]), None, keys[:2])])
    assert got == {"kv": [True, True, False], "mamba": [False, True]}
    assert state.bytes_of(2) == before
    assert backend.batch_get_v2([PoolTransfer(PoolName.KV)]) == {"kv": []}
    with pytest.raises(kvtier.UnsupportedError, match="block_groups"):
        backend.batch_exists_v2(keys, [PoolTransfer(PoolName.MAMBA,
                                                    hit_policy=PoolHitPolicy.BLOCK_GROUPS)])
    with pytest.raises(kvtier.InvalidError, match="'swa' is not registered"):
        backend.batch_exists_v2(keys, [PoolTransfer(PoolName.SWA)])
    backend.close()


def test_a_pool_without_buffers_only_allocates_slots() -> None:
    anchor, side = MiniPool(), MiniPool("layer_first", kinds=1)
    anchor.kv_buffer = None
    backend = opened(anchor)
    backend.register_mem_host_pool_v2(side, PoolName.SWA)
    keys = names(3)
    assert backend.batch_set_v1(keys, anchor.slots([0, 1, 2])) == [True] * 3
    backend.batch_set_v2([PoolTransfer(PoolName.SWA, side.slots([0, 1]), None, keys[:2])])
    found = backend.batch_exists_v2(keys, [PoolTransfer(PoolName.SWA)])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (2, {"kv": 3, "swa": 2})
    backend.close()


def test_malformed_calls_are_rejected() -> None:
    pool = MiniPool()
    backend = KvtierStorage(config(), {})
    with pytest.raises(kvtier.StateError, match="register_mem_pool_host"):
        backend.batch_exists(names(1))
    backend.register_mem_pool_host(pool)
    keys, good = names(2), pool.slots([0, 1])
    assert backend.batch_set_v1([], pool.slots([])) == []
    assert backend.batch_set([], []) and backend.batch_get([], []) == []
    assert backend.batch_exists([]) == 0
    bad = {
        "float": torch.as_tensor([0.0] * 8, dtype=torch.float32), "too few": good[:7],
        "outside": pool.slots([0, 16]), "before": pool.slots([0, -1]),
        "not a page": torch.from_numpy(good.numpy() + 1),
        "scattered": torch.as_tensor([0, 1, 3, 2, 4, 5, 6, 7], dtype=torch.int64),
    }
    for indices in bad.values():
        with pytest.raises(kvtier.InvalidError):
            backend.batch_get_v1(keys, indices)
        with pytest.raises(kvtier.InvalidError):
            backend.batch_set_v2([PoolTransfer(PoolName.KV, indices, None, keys)])
    page = pool.get_dummy_flat_data_page()
    strided = torch.zeros((page.numel(), 2), dtype=torch.float16)[:, 0]
    for values in ([page], [page, None], [page, strided], [page, page[1:]],
                   [page, torch.zeros((4,), dtype=torch.float16)], [page, b"bytes"]):
        with pytest.raises(kvtier.InvalidError):
            backend.batch_set(keys, values)
        with pytest.raises(kvtier.InvalidError):
            backend.batch_get(keys, values)
    backend.close()
    with pytest.raises(kvtier.ClosedError):
        backend.batch_get_v1(keys, good)
    with pytest.raises(kvtier.ClosedError):
        backend.exists(keys[0])
    backend.close()


def test_unsupported_pools_are_rejected() -> None:
    pool = MiniPool("page_first")
    pool.kv_buffer = pool.kv_buffer.transpose(0, 1)
    backend = KvtierStorage(config(), {})
    with pytest.raises(kvtier.InvalidError, match="strides"):
        backend.register_mem_pool_host(pool)

    class NoPages(MiniPool):
        def get_page_buffer_meta(self, indices: Any) -> Any:
            raise ValueError("no addresses")

        def get_dummy_flat_data_page(self) -> Any:
            raise NotImplementedError("no pages")

    with pytest.raises(kvtier.UnsupportedError, match="hicache-mem-layout page_first"):
        backend.register_mem_pool_host(NoPages())
    backend.close()


@pytest.mark.parametrize("extra, text", [
    ({"host_byte": 1}, "did you mean 'host_bytes'"), ({"host_bytes": "8GiB"}, "of type int"),
    ({"log_evictions": 1}, "of type bool"), ({"host_bytes": True}, "of type int"),
    ({"level": "tape"}, "ram, disk, durable"), ({"policy": "lro"}, "lru"),
    ({"spec": "store(hoost=1)"}, "host"),
])
def test_bad_settings_are_rejected(extra: Dict[str, Any], text: str) -> None:
    with pytest.raises(kvtier.Error, match=text):
        KvtierStorage(config(extra), {})


def test_each_rank_has_its_own_directory(tmp_path: Path) -> None:
    disk = f'store(host=64MiB, disk=disk(path="{tmp_path}/PLACE", bytes=1GiB))'
    one = {"spec": disk.replace("PLACE", "one")}
    with pytest.raises(kvtier.InvalidError, match="several ranks"):
        KvtierStorage(config(one, tp_size=2), {})
    alone = KvtierStorage(config(one), {})
    with pytest.raises(kvtier.BusyError, match="disk_path of its own"):
        KvtierStorage(config(one), {})
    alone.close()
    each = {"spec": disk.replace("PLACE", "{rank}")}
    ranks = [KvtierStorage(config(each, tp_rank=rank, tp_size=2), {}) for rank in range(2)]
    for rank in ranks:
        rank.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "dp0-tp0of2-pp0of1-cp0of1", "dp0-tp1of2-pp0of1-cp0of1", "one"]


def test_equal_kv_on_all_ranks_needs_mla_copies() -> None:
    with pytest.raises(kvtier.UnsupportedError, match="mla_copies"):
        KvtierStorage(config(is_mla_model=True, tp_size=2), {})
    rank_config = config({"mla_copies": True}, is_mla_model=True, tp_rank=1, tp_size=2)
    assert not rank_config.is_storage_writer
    KvtierStorage(rank_config, {}).close()
    assert rank_config.is_storage_writer
    with pytest.raises(kvtier.UnsupportedError, match="tp_lcm_size"):
        KvtierStorage(config(should_split_heads=True), {})


def test_ranks_of_older_versions_cannot_copy_equal_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 0.5.23 the controller decides which rank writes before it creates the storage."""
    monkeypatch.delattr(HiCacheStorageConfig, "is_storage_writer")
    with pytest.raises(kvtier.UnsupportedError, match="0.5.23 or newer"):
        KvtierStorage(config({"mla_copies": True}, is_mla_model=True, tp_rank=1, tp_size=2), {})


def test_close_while_threads_read_and_write(tmp_path: Path) -> None:
    """As in the engine: one thread reads, one writes, and then the backend is detached."""
    extra = {"disk_path": str(tmp_path), "disk_bytes": 1 << 30, "level": "disk"}
    pool = MiniPool(pages=512)
    pool.fill(15)
    before = [pool.bytes_of(page) for page in range(512)]
    backend, keys = opened(pool, extra), names(256)
    stored: List[bool] = [False] * 256
    wrong: List[object] = []

    def write() -> None:
        try:
            for at in range(0, 256, 8):
                stored[at:at + 8] = backend.batch_set_v1(keys[at:at + 8],
                                                         pool.slots(range(at, at + 8)))
        except kvtier.ClosedError:
            pass
        except BaseException as error:
            wrong.append(error)

    def read() -> None:
        try:
            while True:
                count = backend.batch_exists(keys)
                got = backend.batch_get_v1(keys[:count], pool.slots(range(256, 256 + count)))
                bad = [i for i in range(count) if got[i] and pool.bytes_of(256 + i) != before[i]]
                if bad:
                    wrong.append(bad)
        except kvtier.ClosedError:
            pass
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=one) for one in (write, read)]
    for thread in threads:
        thread.start()
    while sum(stored) < 64 and threads[0].is_alive():
        time.sleep(0.0005)
    backend.close()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()
    assert not wrong
    again = opened(pool, extra)
    pool.fill(16)
    kept = [i for i in range(256) if stored[i]]
    got = again.batch_get_v1([keys[i] for i in kept], pool.slots(kept))
    assert all(got) and all(pool.bytes_of(i) == before[i] for i in kept)
    again.close()


def test_the_interpreter_exits_with_an_open_backend(tmp_path: Path) -> None:
    program = f"""
import sys, threading
sys.path[:0] = {[str(path) for path in sys.path[:4]]!r}
from mini import MiniPool, config, names
from kvtier_sglang import KvtierStorage
pool = MiniPool(pages=64)
backend = KvtierStorage(config({{"disk_path": {str(tmp_path)!r}, "disk_bytes": 1 << 30,
                                "level": "durable"}}), {{}})
backend.register_mem_pool_host(pool)
assert all(backend.batch_set_v1(names(64), pool.slots(range(64))))
def on():
    while True:
        backend.batch_get_v1(names(64), pool.slots(range(64)))
threading.Thread(target=on, daemon=True).start()
print("stored")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0 and done.stdout == "stored\n", done.stderr
    again = opened(MiniPool(pages=64), {"disk_path": str(tmp_path), "disk_bytes": 1 << 30})
    assert again.batch_exists(names(64)) == 64
    again.close()


def test_a_directory_in_use_by_another_process_is_rejected(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path[:0] = {[str(path) for path in sys.path[:4]]!r}
from mini import config
from kvtier_sglang import KvtierStorage
KvtierStorage(config({{"disk_path": {str(tmp_path)!r}, "disk_bytes": 1 << 30}},
                     tp_size=2, tp_rank=int(sys.argv[1])), {{}}).close()
"""
    first = KvtierStorage(config({"disk_path": str(tmp_path), "disk_bytes": 1 << 30},
                                 tp_size=2), {})
    codes = {}
    for rank in ("0", "1"):
        done = subprocess.run([sys.executable, "-c", program, rank], capture_output=True,
                              text=True, timeout=600)
        codes[rank] = done.returncode
        if rank == "0":
            assert "BusyError" in done.stderr and "disk_path of its own" in done.stderr
    assert codes == {"0": 1, "1": 0}
    first.close()


def test_a_garbage_collected_backend_closes_itself() -> None:
    pool = MiniPool()
    backend = opened(pool)
    backend.batch_set_v1(names(1), pool.slots([0]))
    del backend
    assert np.all(pool.kv_buffer.numpy().view(np.uint8) == 0)


def test_pages_of_other_hosts_are_found_at_the_remote(tmp_path: Path) -> None:
    extra = {"spec": f'store(remote=dir(path="{tmp_path}", timeout=600000))', "level": "remote",
             "remote_lookup_s": 600.0}
    one, other = MiniPool(), MiniPool()
    backend, second = opened(one, extra), opened(other, extra)
    one.fill(1)
    other.fill(2)
    keys = names(5)
    assert second.batch_exists(keys) == 0
    assert backend.batch_set_v1(keys, one.slots([3, 0, 15, 7, 1])) == [True] * 5
    third = opened(other, extra)
    assert third.batch_exists([*keys, "missing"]) == 5
    assert third.batch_get_v1(keys[:3], other.slots([4, 5, 6])) == [True] * 3
    assert [other.bytes_of(page) for page in (4, 5, 6)] == [one.bytes_of(p) for p in (3, 0, 15)]
    unasked = opened(other, {**extra, "remote_lookup_s": 0.0})
    assert unasked.batch_exists(keys) == 0
    for one_of in (backend, second, third, unasked):
        one_of.close()


def test_kv_events_name_pages_as_the_engine_does(tmp_path: Path) -> None:
    """A subscriber decodes the events of stored, demoted and evicted pages, and of the end."""
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
    msgspec = pytest.importorskip("msgspec", reason="msgspec is not installed")
    endpoint = f"ipc://{tmp_path}/events"
    pool = MiniPool()
    backend = opened(pool, {"events": endpoint, "events_replay": f"ipc://{tmp_path}/replay"})
    keys = [hashlib.sha256(bytes([n])).hexdigest() for n in range(4)]
    expected = {int.from_bytes(bytes.fromhex(key[:16]), "big", signed=True) for key in keys}
    assert all(backend.batch_set_v1(keys, pool.slots(range(4))))
    stored: Any = set()
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{tmp_path}/replay")
        end = time.monotonic() + 600
        while stored != expected:
            assert time.monotonic() < end, stored
            socket.send_multipart((b"", bytes(8)))
            stored, payload = set(), b"first"
            while payload:
                assert socket.poll(600_000)
                payload = socket.recv_multipart()[-1]
                for event in msgspec.msgpack.decode(payload)[1] if payload else ():
                    if event["type"] == "BlockStored":
                        assert event["medium"] == "CPU_PINNED"
                        assert event["block_size"] == pool.page_size
                        stored.update(event["block_hashes"])
    backend.close()


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://*:99999"])
def test_a_malformed_event_endpoint_is_a_warning(endpoint: str,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    pool = MiniPool()
    backend = opened(pool, {"events": endpoint})
    assert "no KV events are published" in caplog.text and endpoint in caplog.text
    assert all(backend.batch_set_v1(names(2), pool.slots([0, 1])))
    backend.close()
