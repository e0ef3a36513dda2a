"""The location of KV caches, with tensors that claim to be on a GPU."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import kvtier
import pytest

torch = pytest.importorskip("torch")
from kvtier_vllm import caches  # noqa: E402


class FakeGpuTensor(torch.Tensor):  # type: ignore[misc,name-defined]
    """A tensor in host memory whose `device` names a GPU."""

    device: Any = torch.device("cuda", 1)


def test_a_cache_on_a_gpu_is_described_by_its_storage() -> None:
    storage = torch.zeros(4096, dtype=torch.uint8)
    blocks = storage[1024:3072].view(8, 256).as_subclass(FakeGpuTensor)
    layer = caches.layer("layer.0", blocks, 8)
    assert (layer.offset, layer.block_bytes, layer.stride_bytes, layer.ordinal) == (
        1024, 256, 256, 1)
    source = layer.source
    assert isinstance(source, kvtier.MemoryRange) and source.on_device
    assert (source.address, source.nbytes) == (storage.data_ptr(), 4096)
    kept = weakref.ref(source._kept)
    view = layer.view([7], 16)
    assert view.pages == [7 * 256] and view.source is source
    del storage, blocks
    gc.collect()
    assert kept() is not None
    # Blocks beyond the end of the storage are rejected.
    with pytest.raises(kvtier.InvalidError):
        kvtier.Pool(source, 256, offset=layer.offset).at([12])


def test_a_cache_in_host_memory_is_used_directly() -> None:
    storage = torch.zeros(4096, dtype=torch.uint8)
    layer = caches.layer("layer.0", storage[1024:].view(12, 256), 12)
    assert layer.ordinal is None and not isinstance(layer.source, kvtier.MemoryRange)
    layer.source[1024] = 7
    assert storage[1024] == 7 and len(layer.source) == 4096
