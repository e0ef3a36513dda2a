"""Small host pools with the engine's layouts, page numbers and byte order."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

LAYERS, HEADS, DIM, TOKENS = 3, 2, 8, 4
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


class MiniPool:
    """A pool of KV pages with 2 kinds of planes (K and V) or 1 (MLA's latent)."""

    def __init__(self, layout: str = "page_first", pages: int = 16, kinds: int = 2,
                 layers: int = LAYERS, page_size: int = TOKENS, dim: int = DIM) -> None:
        self.layout, self.page_size, self.size = layout, page_size, pages * page_size
        self.layer_num, self.head_num, self.head_dim = layers, HEADS, dim
        self.start_layer, self.end_layer = 0, layers
        self.dtype, self.kinds = torch.float16, kinds
        each = (HEADS, dim)
        shapes = {
            "layer_first": (layers, self.size, *each),
            "page_first": (self.size, layers, *each),
            "page_first_direct": (pages, layers, page_size, *each),
            "page_head": (pages, HEADS, page_size, layers, dim),
        }
        self.kv_buffer = torch.zeros((kinds, *shapes[layout]), dtype=self.dtype)

    def kind(self, at: int) -> Any:
        """The array of K or of V."""
        return self.kv_buffer.numpy()[at]

    def page(self, page: int) -> List[np.ndarray]:
        """A page's memory: K before V; in layer_first all layers of K before those of V."""
        tokens = slice(page * self.page_size, (page + 1) * self.page_size)
        found: List[np.ndarray] = []
        for at in range(self.kinds):
            array = self.kind(at)
            if self.layout == "layer_first":
                found += [array[layer, tokens] for layer in range(self.layer_num)]
            else:
                found.append(array[tokens] if self.layout == "page_first" else array[page])
        return found

    def get_page_buffer_meta(self, indices: Any) -> Tuple[List[int], List[int]]:
        """Addresses and sizes in the engine's order, which alternates K and V in layer_first."""
        slots, found = indices.tolist(), []
        for slot in slots[::self.page_size]:
            parts = self.page(slot // self.page_size)
            if self.layout == "layer_first" and self.kinds == 2:
                half = self.layer_num
                parts = [one for pair in zip(parts[:half], parts[half:]) for one in pair]
            found += parts
        return [part.ctypes.data for part in found], [part.nbytes for part in found]

    def get_dummy_flat_data_page(self) -> Any:
        return torch.zeros((sum(part.size for part in self.page(0)),), dtype=self.dtype)

    def get_data_page(self, index: int, flat: bool = True) -> Any:
        parts = self.page(int(index) // self.page_size)
        return torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts]))

    def set_from_flat_data_page(self, index: int, data_page: Any) -> None:
        given, at = data_page.numpy().reshape(-1), 0
        for part in self.page(int(index) // self.page_size):
            part[...] = given[at:at + part.size].reshape(part.shape)
            at += part.size

    def slots(self, pages: Sequence[int]) -> Any:
        """The slots of pages, as the engine allocates them."""
        first = np.asarray(pages, np.int64)[:, None] * self.page_size
        return torch.from_numpy((first + np.arange(self.page_size)).reshape(-1))

    def fill(self, seed: int) -> None:
        """Fills the pool with random bytes."""
        raw = self.kv_buffer.numpy().view(np.uint8)
        raw[...] = np.random.default_rng(seed).integers(0, 256, raw.shape, dtype=np.uint8)

    def bytes_of(self, page: int) -> bytes:
        """The bytes of a page."""
        return b"".join(part.tobytes() for part in self.page(page))


class StatePool(MiniPool):
    """A pool whose layout has no addresses, as state pools in layer_first."""

    def get_page_buffer_meta(self, indices: Any) -> Tuple[List[int], List[int]]:
        raise ValueError("states have addresses in page_first alone")


class MovedPool(MiniPool):
    """A pool that places pages in another order than their numbers."""

    shared_allocation_domain = object()

    def page(self, page: int) -> List[np.ndarray]:
        return super().page((page * 5 + 3) % (self.size // self.page_size))


def config(extra: Optional[Dict[str, Any]] = None, **given: Any) -> HiCacheStorageConfig:
    """The engine's configuration of a rank."""
    fields: Dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": True,
        "is_page_first_layout": True, "model_name": "some/model",
        "extra_config": {"host_bytes": 64 << 20, "interface_v1": 1, **(extra or {})},
    }
    fields.update(given)
    return HiCacheStorageConfig(**fields)


def names(count: int, prefix: str = "") -> List[str]:
    """Page hashes of 64 hexadecimal digits, as the engine has them."""
    return [f"{prefix}{i:x}".encode().hex().zfill(64) for i in range(count)]
