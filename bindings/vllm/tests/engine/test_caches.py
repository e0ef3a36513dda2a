"""Where caches are, of tensors that say they are on a GPU."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import kvtier
import pytest

torch = pytest.importorskip("torch")
from kvtier_vllm import caches  # noqa: E402


class OnGpu(torch.Tensor):  # type: ignore[misc,name-defined]
    """In host memory, but for what it says."""

    device: Any = torch.device("cuda", 1)


def test_a_cache_on_a_gpu_is_lent_as_the_storage_it_is_in() -> None:
    storage = torch.zeros(4096, dtype=torch.uint8)
    blocks = storage[1024:3072].view(8, 256).as_subclass(OnGpu)
    layer = caches.layer("layer.0", blocks, 8)
    assert (layer.offset, layer.block_bytes, layer.stride_bytes, layer.ordinal) == (
        1024, 256, 256, 1)
    place = layer.source
    assert isinstance(place, kvtier.Place) and place.on_device
    assert (place.address, place.nbytes) == (storage.data_ptr(), 4096)
    kept = weakref.ref(place._kept)
    view = layer.view([7], 16)
    assert view.pages == [7 * 256] and view.source is place
    del storage, blocks
    gc.collect()
    assert kept() is not None
    # Blocks behind the storage's end are refused, whoever has it.
    with pytest.raises(kvtier.InvalidError):
        kvtier.Pool(place, 256, offset=layer.offset).at([12])


def test_a_cache_in_host_memory_is_the_memory_itself() -> None:
    storage = torch.zeros(4096, dtype=torch.uint8)
    layer = caches.layer("layer.0", storage[1024:].view(12, 256), 12)
    assert layer.ordinal is None and not isinstance(layer.source, kvtier.Place)
    layer.source[1024] = 7
    assert storage[1024] == 7 and len(layer.source) == 4096
