"""The linker over small device pools that are in host memory."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Optional, Tuple

import kvtier
import numpy as np
import pytest
import torch
from kvtier_sglang import linker as module
from kvtier_sglang.linker import KvtierLinker
from mini import names
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
)

PAGE, PAGES, LAYERS = 4, 32, 5


class Device:
    """Device pools: K and V of five layers, and states of two layers, one per slot."""

    def __init__(self) -> None:
        self.k = [torch.zeros((PAGE * PAGES, 2, 8), dtype=torch.float16) for _ in range(LAYERS)]
        self.v = [torch.zeros((PAGE * PAGES, 2, 8), dtype=torch.float16) for _ in range(LAYERS)]
        self.states = [torch.zeros((PAGES, 24), dtype=torch.float32) for _ in range(2)]
        kv = DevicePoolEntry(
            name=PoolName.KV, indices_from_pool=PoolName.KV, device_pool=None,
            components=[[*self.k, *self.v]], page_size=PAGE, rows_are_pages=False,
            layer_mapping={layer: (layer, LAYERS + layer) for layer in range(LAYERS)})
        mamba = DevicePoolEntry(
            name=PoolName.MAMBA, indices_from_pool=PoolName.MAMBA, device_pool=None,
            components=[self.states], layer_mapping={1: 0, 3: 1}, page_size=1,
            rows_are_pages=True)
        self.group = DevicePoolGroup([kv, mamba], LAYERS, PAGE)

    def fill(self, seed: int) -> None:
        numbers = np.random.default_rng(seed)
        for one in [*self.k, *self.v, *self.states]:
            raw = one.numpy().view(np.uint8)
            raw[...] = numbers.integers(0, 256, raw.shape, dtype=np.uint8)

    def layer(self, layer: int, page: int) -> bytes:
        tokens = slice(page * PAGE, page * PAGE + PAGE)
        return b"".join(one[layer].numpy()[tokens].tobytes() for one in (self.k, self.v))

    def page(self, page: int) -> bytes:
        return b"".join(self.layer(layer, page) for layer in range(LAYERS))

    def state(self, slot: int) -> bytes:
        return b"".join(one.numpy()[slot].tobytes() for one in self.states)


def kv_transfer(keys: List[str], pages: Optional[List[int]] = None) -> PoolTransfer:
    slots = None
    if pages is not None:
        first = np.asarray(pages, np.int64)[:, None] * PAGE
        slots = torch.from_numpy((first + np.arange(PAGE)).reshape(-1))
    return PoolTransfer(PoolName.KV, device_indices=slots, keys=keys)


def mamba_transfer(keys: List[str], slots: Optional[List[int]] = None) -> PoolTransfer:
    at = None if slots is None else torch.from_numpy(np.asarray(slots, np.int64))
    return PoolTransfer(PoolName.MAMBA, device_indices=at, keys=keys,
                        hit_policy=PoolHitPolicy.TRAILING_PAGES)


@pytest.fixture
def make_linker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes linkers for a device, with the engine's parameters."""
    def make(device: Device, extra: Optional[Dict[str, Any]] = None) -> Tuple[Any, List[Any]]:
        monkeypatch.setattr(module, "resolve_hybrid_device_pool_group",
                            lambda **_: device.group)
        monkeypatch.setattr(module, "get_parallel",
                            lambda: SimpleNamespace(tp_size=1, attn_dp_rank=0))
        monkeypatch.setattr(module, "get_model", lambda: SimpleNamespace(model_path="some/model"))
        counters: List[Any] = []
        params = SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: device.group),
            req_to_token_pool=SimpleNamespace(register_layer_transfer_counter=counters.append),
            page_size=PAGE, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            attn_tp_cache_group=None, tp_cache_group=None)
        extra = {"host_bytes": 64 << 20, **(extra or {})}
        return KvtierLinker(SimpleNamespace(), params, components=set(), extra_config=extra,
                            forward_stream=None), counters
    return make


def take_results(linker: KvtierLinker, count: int) -> List[bool]:
    end = time.monotonic() + 600
    while linker.num_completed_offloads() < count:
        assert time.monotonic() < end
        time.sleep(0.001)
    return [linker.pop_completed_offload() for _ in range(count)]


def test_offloaded_pages_load_layer_by_layer(make_linker: Any) -> None:
    device = Device()
    linker, counters = make_linker(device)
    assert counters == [linker.layer_done_counter]
    device.fill(1)
    before, state = [device.page(page) for page in range(PAGES)], device.state(7)
    layers = [[device.layer(layer, page) for layer in range(LAYERS)] for page in range(4)]
    keys = names(4)
    transfers = [kv_transfer(keys, [0, 1, 2, 3]), mamba_transfer(keys[2:3], [7])]
    assert linker.offload(transfers, "a session")
    assert take_results(linker, 1) == [True] and linker.num_completed_offloads() == 0
    wanted = [kv_transfer([*keys, "missing"]), mamba_transfer(keys[:1])]
    assert linker.lookup("r", wanted) == [3]
    assert linker.lookup("r", [kv_transfer(keys)]) == []
    device.fill(2)
    others = [device.page(page) for page in range(PAGES)]
    assert linker.start_layer_wise_loading() == -1
    assert linker.load("r", [kv_transfer(keys[:3], [9, 20, 5]), mamba_transfer(keys[2:3], [1])])
    assert linker.load("s", [kv_transfer(keys[3:], [30])])
    assert linker.load("t", [kv_transfer(keys[3:], [31])]) and linker.cancel_queued_load("t")
    assert not linker.cancel_queued_load("t")
    with pytest.raises(kvtier.StateError, match="queued already"):
        linker.load("r", [kv_transfer(keys[:1], [9])])
    index = linker.start_layer_wise_loading()
    linker.layer_done_counter.set_consumer(index)
    for layer in range(LAYERS):
        linker.layer_done_counter.wait_until(layer)
        for page, was in ((9, 0), (20, 1), (5, 2), (30, 3)):
            assert device.layer(layer, page) == layers[was][layer]
    assert linker.finish_layer_wise_loading(index)
    assert device.state(1) == state
    assert [device.page(page) for page in (9, 20, 5, 30)] == before[:4]
    assert all(device.page(page) == others[page] for page in range(PAGES)
               if page not in (9, 20, 5, 30))
    linker.close()


def test_pages_of_other_hosts_are_found_at_the_remote(make_linker: Any, tmp_path: Path) -> None:
    extra = {"spec": f'store(remote=dir(path="{tmp_path}", timeout=600000))', "level": "remote"}
    patient = {**extra, "linker_remote_lookup_s": 600.0}
    one, other, keys = Device(), Device(), names(4)
    one.fill(1)
    other.fill(2)
    linker, _ = make_linker(one, extra)
    assert linker.offload([kv_transfer(keys, [0, 1, 2, 3]), mamba_transfer(keys[2:3], [7])])
    assert take_results(linker, 1) == [True]
    unasked, _ = make_linker(other, extra)
    wanted = [kv_transfer([*keys, "missing"]), mamba_transfer(keys[:1])]
    assert unasked.lookup("r", wanted) == []
    second, _ = make_linker(other, patient)
    assert second.lookup("r", wanted) == [3]
    assert second.load("r", [kv_transfer(keys[:3], [9, 20, 5]), mamba_transfer(keys[2:3], [1])])
    assert second.finish_layer_wise_loading(second.start_layer_wise_loading())
    assert [other.page(page) for page in (9, 20, 5)] == [one.page(page) for page in (0, 1, 2)]
    assert other.state(1) == one.state(7)
    for each in (linker, unasked, second):
        each.close()


def test_a_layer_loads_only_its_own_buffers(make_linker: Any,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    linker, _ = make_linker(device)
    device.fill(1)
    layers = [device.layer(layer, 0) for layer in range(LAYERS)]
    keys, blocks = names(1), linker._pools[PoolName.KV].blocks
    assert linker.offload([kv_transfer(keys, [0])])
    assert take_results(linker, 1) == [True]
    device.fill(2)
    get, gets = blocks.get, []
    before = [device.layer(layer, 9) for layer in range(LAYERS)]

    def alone(called: Any, places: Any, **given: Any) -> kvtier.Op:
        op = get(called, places, **given)
        op.wait()
        gets.append((given["first_part"], given["parts"], len(places.tables), id(called)))
        loaded = len(gets)
        now = [device.layer(layer, 9) for layer in range(LAYERS)]
        assert now == layers[:loaded] + before[loaded:]
        return op

    monkeypatch.setattr(blocks, "get", alone)
    assert linker.load("r", [kv_transfer(keys, [9])])
    assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    # The names were converted once for all layers.
    assert gets == [(2 * layer, 2, 2, gets[0][3]) for layer in range(LAYERS)]
    linker.close()


def test_a_load_of_missing_pages_fails(make_linker: Any) -> None:
    device = Device()
    linker, _ = make_linker(device)
    keys = names(2)
    assert linker.offload([kv_transfer(keys[:1], [0])])
    assert take_results(linker, 1) == [True]
    assert linker.load("r", [kv_transfer(keys, [1, 2])])
    assert not linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    assert linker.load("r", [kv_transfer(keys[:1], [PAGES])])
    assert not linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    assert linker.offload([kv_transfer(keys[1:], [PAGES])])
    assert take_results(linker, 1) == [False]
    assert linker.load("r", [kv_transfer(keys[:1], [3])])
    assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    assert not linker.load("r", []) and not linker.offload([kv_transfer([], [])])
    linker.close()


def test_close_finishes_transfers_and_pages_survive_a_restart(make_linker: Any,
                                                              tmp_path: Path) -> None:
    device = Device()
    extra = {"disk_path": str(tmp_path), "disk_bytes": 1 << 30, "level": "disk"}
    linker, _ = make_linker(device, extra)
    device.fill(3)
    before, keys = [device.page(page) for page in range(PAGES)], names(PAGES)
    for page in range(PAGES):
        assert linker.offload([kv_transfer(keys[page:page + 1], [page])])
    linker.close()
    with pytest.raises(kvtier.ClosedError):
        linker.load("r", [kv_transfer(keys, list(range(PAGES)))])
    linker.close()
    again, _ = make_linker(device, extra)
    device.fill(4)
    assert again.load("r", [kv_transfer(keys, list(range(PAGES)))])
    index = again.start_layer_wise_loading()
    assert again.finish_layer_wise_loading(index)
    assert [device.page(page) for page in range(PAGES)] == before
    assert again.offload([kv_transfer(keys, list(range(PAGES)))])
    again.reset()
    assert again.num_completed_offloads() == 0
    assert again.load("r", [kv_transfer(keys, list(range(PAGES)))])
    assert again.start_layer_wise_loading() == 0
    again.set_policy("lru")
    assert again.stats()["chunks"] >= PAGES and "kvtier" in again.metrics()
    again.close()


def test_a_hint_is_one_call_per_pool(make_linker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    linker, _ = make_linker(Device())
    calls: List[Any] = []
    hint = kvtier.Blocks.hint
    monkeypatch.setattr(kvtier.Blocks, "hint", lambda self, called, **given: (
        calls.append((len(called), given)), hint(self, called, **given)))
    linker.hint(names(20), stop="tool_use", done=True)
    given = {"stop": kvtier.STOP_TOOL_USE, "next_use_ns": 0, "done": True}
    assert calls == [(20, given)] * 2
    with pytest.raises(kvtier.InvalidError, match="stop"):
        linker.hint(names(1), stop="never")
    linker.close()
    with pytest.raises(kvtier.ClosedError):
        linker.hint(names(1))


def test_evictions_are_logged_and_thrashing_lowers_the_advice(
        make_linker: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvtier_sglang")
    device = Device()
    extra = {"host_bytes": 33 << 20, "policy": "lru", "log_evictions": True}
    linker, _ = make_linker(device, extra)
    assert linker.advice(8).batch == 8
    advisor = linker._advisor
    advisor._policy.set_advice(shrink_above=0.1, window=8, patience=1)
    advisor._policy.set_capacity(PAGES)
    advisor._capacity = PAGES
    for turn in range(12):  # three prompts, but room for one
        keys = names(PAGES, f"{turn % 3} ")
        linker.lookup("r", [kv_transfer(keys), mamba_transfer(keys[-1:])])
        assert linker.offload([kv_transfer(keys, list(range(PAGES)))])
        assert take_results(linker, 1) == [True]
    assert linker.advice(8).batch == 4
    for turn in range(400):
        assert linker.offload([kv_transfer(names(PAGES, f"{turn} more"), list(range(PAGES)))])
        assert take_results(linker, 1) == [True]
        if "evicted from host" in caplog.text:
            break
    assert linker.evictions() and linker.tenants()[0].tenant == 0
    last = max(one.number for one in linker.evictions())
    linker.set_policy("s3fifo")
    assert advisor._policy.spec.startswith("s3fifo")
    for turn in range(400):
        assert linker.offload([kv_transfer(names(PAGES, f"{turn} after"), list(range(PAGES)))])
        assert take_results(linker, 1) == [True]
        since = [one.policy for one in linker.evictions() if one.number > last]
        if since:
            break
    assert set(since) == {"s3fifo"}
    linker.close()
    messages = [one.getMessage() for one in caplog.records if "evicted from" in one.getMessage()]
    assert messages and len(set(messages)) == len(messages)
    with pytest.raises(kvtier.ClosedError):
        linker.advice(8)


def test_advice_uses_the_policy_of_the_store(make_linker: Any) -> None:
    linker, _ = make_linker(Device(), {"spec": "store(policy=arc)"})
    assert linker.advice(8).batch == 8
    assert linker._advisor._policy.stats()["name"] == "arc"
    linker.close()
