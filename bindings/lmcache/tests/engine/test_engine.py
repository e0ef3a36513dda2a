"""LMCache's engine with the plugin: tokens are stored, looked up and retrieved, on the CPU. KV is
copied by a connector of this test, because LMCache's own connectors need a GPU."""

from __future__ import annotations

from typing import Any, Iterator, List

import pytest
import torch
from lmcache.utils import mock_up_broadcast_fn, mock_up_broadcast_object_fn
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.token_database import ChunkedTokenDatabase
from sites import config, metadata

TOKENS = list(range(1000, 1100))  # six chunks of 16, and 4 tokens


class Caches(GPUConnectorInterface):
    """The KV of a sequence in one tensor, as the engine's paged caches would hold it."""

    def __init__(self) -> None:
        self.kv = torch.zeros(2, 4, len(TOKENS), 128, dtype=torch.bfloat16)

    def fill(self) -> torch.Tensor:
        self.kv.copy_(torch.randn(self.kv.shape, generator=torch.Generator().manual_seed(1)))
        return self.kv.clone()

    def to_gpu(self, memory_obj: Any, start: int, end: int, **_: Any) -> None:
        self.kv[:, :, start:end] = memory_obj.tensor

    def from_gpu(self, memory_obj: Any, start: int, end: int, **_: Any) -> None:
        memory_obj.tensor.copy_(self.kv[:, :, start:end])

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **_: Any) -> None:
        for obj, start, end in zip(memory_objs, starts, ends):
            self.from_gpu(obj, start, end)

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None,
                       **_: Any) -> None:
        for obj, start, end in zip(memory_objs, starts, ends):
            self.to_gpu(obj, start, end)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, 4, num_tokens, 128])


class Engine:
    """LMCache's engine and the caches that it fills."""

    def __init__(self, path: Any, **engine: Any) -> None:
        self.caches, meta = Caches(), metadata()
        given = config(path, engine)
        self.engine = LMCacheEngine(given, meta, ChunkedTokenDatabase(given, meta), self.caches,
                                    mock_up_broadcast_fn, mock_up_broadcast_object_fn)
        self.engine.post_init()
        self.backend = self.engine.storage_manager.storage_backends["kvtier"]

    @property
    def used_bytes(self) -> int:
        allocator = self.engine.storage_manager.allocator_backend.memory_allocator.pin_allocator
        return int(allocator.total_allocated_size)


@pytest.fixture
def engines() -> Iterator[Any]:
    made: List[Engine] = []

    def make(*args: Any, **more: Any) -> Engine:
        made.append(Engine(*args, **more))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


@pytest.mark.parametrize("unfull", [False, True])
def test_a_restarted_engine_retrieves_the_kv(engines: Any, tmp_path: Any, unfull: bool) -> None:
    stored = 100 if unfull else 96
    one = engines(tmp_path, save_unfull_chunk=unfull)
    expected = one.caches.fill()
    assert one.engine.lookup(TOKENS) == 0
    one.engine.store(TOKENS)
    one.backend._puts.drain()
    assert one.used_bytes == 0
    one.engine.close()

    two = engines(tmp_path, save_unfull_chunk=unfull)
    assert two.engine.lookup(TOKENS, lookup_id="request", pin=True) == stored
    mask = two.engine.retrieve(TOKENS, req_id="request")
    two.engine.lookup_unpin("request")
    assert int(mask.sum()) == stored
    assert torch.equal(two.caches.kv[:, :, :stored], expected[:, :, :stored])
    assert not two.caches.kv[:, :, stored:].any()
    assert two.used_bytes == 0 and two.engine.lookup(TOKENS[:40]) == 32


def test_a_lost_chunk_ends_the_retrieved_prefix(engines: Any, tmp_path: Any) -> None:
    one = engines(tmp_path)
    expected = one.caches.fill()
    one.engine.store(TOKENS)
    one.backend._puts.drain()
    keys = [key for _, _, key in one.engine.token_database.process_tokens(TOKENS)]
    assert one.engine.lookup(TOKENS, lookup_id="request", pin=True) == 96
    assert one.backend.remove(keys[3])
    one.caches.kv.zero_()
    mask = one.engine.retrieve(TOKENS, req_id="request")
    one.engine.lookup_unpin("request")
    assert int(mask.sum()) == 48 and one.used_bytes == 0
    assert torch.equal(one.caches.kv[:, :, :48], expected[:, :, :48])
    assert one.engine.lookup(TOKENS) == 48


def test_the_engine_clears_the_store(engines: Any, tmp_path: Any) -> None:
    one = engines(tmp_path)
    one.caches.fill()
    one.engine.store(TOKENS)
    one.backend._puts.drain()
    assert one.engine.clear(TOKENS[:32], locations=["kvtier"]) == 2
    assert one.engine.lookup(TOKENS) == 0
    assert one.engine.clear(locations=["kvtier"]) == 64
