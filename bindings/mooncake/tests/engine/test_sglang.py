"""SGLang's MooncakeStore on the shim, called as by the cache controller, over a torch host pool."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, Iterator, List

import pytest
from helpers import empty_packages, imported, need

need("sglang", "0.5.23", "torch", "requests", "zmq")
empty_packages("sglang", ["sglang", "sglang.srt"])
module = imported("sglang.srt.mem_cache.storage.mooncake_store.mooncake_store")
import kvtier_mooncake  # noqa: E402
import torch  # noqa: E402

PAGES, PAGE, HEAD = 8, 4, 256


class Pool:
    """A host pool in the layout page_first: K and V of a page are one buffer each."""

    page_size = PAGE
    allocator = None
    layout = "page_first"

    def __init__(self) -> None:
        self.kv_buffer = torch.randint(0, 256, (2, PAGES, PAGE, HEAD), dtype=torch.uint8)

    def get_ksize_per_token(self) -> int:
        return HEAD

    def get_page_buffer_meta(self, indices: Any) -> Any:
        addresses: List[int] = []
        for first in indices.tolist()[::PAGE]:
            for plane in self.kv_buffer:
                addresses.append(plane[first // PAGE].data_ptr())
        return addresses, [PAGE * HEAD] * len(addresses)


def config(**extra: Any) -> Any:
    kind = module.HiCacheStorageConfig
    given = {}
    for one in dataclasses.fields(kind):
        if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
            given[one.name] = (0 if "rank" in one.name else 1 if "size" in one.name else
                               False if one.name.startswith(("is_", "enable", "should")) else None)
    given["extra_config"] = {"master_server_address": "none:1", "protocol": "tcp",
                             "global_segment_size": 64 << 20, **extra}
    given["model_name"] = "some/model"
    return kind(**given)


@pytest.fixture
def make_storage() -> Iterator[Any]:
    kvtier_mooncake.install()
    yield lambda **extra: module.MooncakeStore(config(**extra))
    kvtier_mooncake.uninstall()


@pytest.mark.parametrize("extra", [{}, {"enable_group_semantics": True}, {"tenant_id": "them"}])
def test_stored_pages_load_with_every_byte(make_storage: Any, extra: Any) -> None:
    storage, pool = make_storage(**extra), Pool()
    storage.register_mem_pool_host(pool)
    keys, indices = [f"hash{at}" for at in range(4)], torch.arange(4 * PAGE)
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys, indices) == [True] * 4
    assert storage.batch_set_v1(keys, indices) == [True] * 4
    assert storage.batch_exists([*keys, "other"]) == 4
    want = pool.kv_buffer.clone()
    pool.kv_buffer.fill_(0xEE)
    back = torch.arange(4 * PAGE, 8 * PAGE)
    assert storage.batch_get_v1(keys, back) == [True] * 4
    assert torch.equal(pool.kv_buffer[:, 4:], want[:, :4])
    assert storage.batch_get_v1(["other"], torch.arange(PAGE)) == [False]
    storage.clear()
    assert storage.batch_exists(keys) == 0
    assert storage.store.close() == 0


def test_the_embedding_store_works(make_storage: Any) -> None:
    embeddings = imported(
        "sglang.srt.mem_cache.storage.mooncake_store.mooncake_embedding_store")
    store = embeddings.MooncakeEmbeddingStore(SimpleNamespace(extra_config={
        "master_server_address": "none:1", "global_segment_size": 64 << 20}))
    tensor = torch.randn(6, 64)
    store.register_buffer(tensor)
    at = [tensor[row].data_ptr() for row in range(6)]
    assert store.batch_put(list("abc"), at[:3], [256] * 3) == [True] * 3
    assert store.batch_put_from_multi_buffers(["d"], [at[:2]], [[256, 256]]) == [True]
    assert store.batch_is_exist(list("abcdx")) == [True] * 4 + [False]
    assert store.batch_get(list("cax"), at[3:], [256] * 3) == [True, True, False]
    assert torch.equal(tensor[3], tensor[2]) and torch.equal(tensor[4], tensor[0])
    assert store.store.close() == 0


def test_the_allocator_returns_zeroed_memory(make_storage: Any) -> None:
    allocator = module.MooncakeHostTensorAllocator()
    tensor = allocator.allocate((16, 8), torch.float16)
    assert tensor.shape == (16, 8) and float(tensor.sum()) == 0
