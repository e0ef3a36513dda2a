"""SGLang's own host pools, without a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.pool_host.mha import (
    AsymmetricMHATokenToKVPoolHost,
    MHATokenToKVPoolHost,
)
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

LAYERS, HEADS, DIM, PAGE, TOKENS = 3, 2, 16, 4, 256
MHA = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA = ("layer_first", "page_first", "page_first_direct")
SIZES = {"host_to_device_ratio": 2.0, "host_size": 0, "page_size": PAGE, "pin_memory": False,
         "device_capacity_tokens": TOKENS, "start_layer": 0, "end_layer": LAYERS}


def _table(tensors: Any) -> torch.Tensor:
    return torch.tensor([one.data_ptr() for one in tensors], dtype=torch.uint64)


def mha(layout: str, v_dim: int = DIM, *, layers: int = LAYERS, dim: int = DIM,
        page: int = PAGE, tokens: int = TOKENS) -> Any:
    """A pool for K and V, with room for twice the tokens and one page."""
    v_dim = v_dim if dim == DIM else dim
    k = tuple(torch.zeros((tokens, HEADS, dim), dtype=torch.bfloat16) for _ in range(layers))
    v = tuple(torch.zeros((tokens, HEADS, v_dim), dtype=torch.bfloat16) for _ in range(layers))
    info = MHABufferInfo(
        buffers=KVBuffers(k=k, v=v, k_data_ptrs=_table(k), v_data_ptrs=_table(v),
                          layout=KVBufferLayout.NHD),
        page_size=page, head_num=HEADS, head_dim=dim, v_head_dim=v_dim, dtype=torch.bfloat16,
        device=torch.device("cpu"))
    made = MHATokenToKVPoolHost if v_dim == dim else AsymmetricMHATokenToKVPoolHost
    return made(info, layout=layout, **{**SIZES, "page_size": page, "end_layer": layers,
                                        "device_capacity_tokens": tokens})


def mla(layout: str) -> Any:
    """A pool for MLA's latents of three layers."""
    rows = tuple(torch.zeros((TOKENS, 1, 24), dtype=torch.bfloat16) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=rows, data_ptrs=_table(rows), layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS, page_size=PAGE, kv_lora_rank=16, qk_rope_head_dim=8,
        kv_cache_dim=24, dtype=torch.bfloat16, device=torch.device("cpu"))
    return MLATokenToKVPoolHost(info, layout=layout, target_layer_num=LAYERS, **SIZES)


def fill(pool: Any, seed: int) -> None:
    """Fills a pool with random bytes."""
    numbers = np.random.default_rng(seed)
    for one in buffers(pool):
        raw = one.view(torch.uint8).numpy()
        raw[...] = numbers.integers(0, 256, raw.shape, dtype=np.uint8)


def buffers(pool: Any) -> Any:
    """The tensors of a pool."""
    return [pool.k_buffer, pool.v_buffer] if isinstance(
        pool, AsymmetricMHATokenToKVPoolHost) else [pool.kv_buffer]


def page_bytes(pool: Any, page: int) -> bytes:
    """The bytes of a page, read by the pool's own function if it has one."""
    try:
        flat = pool.get_data_page(page * PAGE).contiguous()
    except NotImplementedError:
        sides = []
        for one in buffers(pool):
            direct = pool.layout == "page_first_direct"
            at = slice(page, page + 1) if direct else slice(page * PAGE, page * PAGE + PAGE)
            sides.append(one[at].contiguous().view(torch.uint8).numpy().tobytes())
        return b"".join(sides)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def slots(pages: Any) -> torch.Tensor:
    """The slots of pages, as the pool's allocator returns them."""
    first = torch.tensor(list(pages), dtype=torch.int64)[:, None] * PAGE
    return (first + torch.arange(PAGE)).reshape(-1)
