"""Runs SGLang's HiCache on a processor. Its copies between device pools and host pools
are CUDA kernels, and it registers host memory with CUDA. The functions below copy the same
bytes. SGLang allows a linker only for models whose kernels need a GPU; `install` allows it for
Llama, with SGLang's own description of such a pool. Everything else is SGLang's own."""

from __future__ import annotations

import ctypes
from typing import Any, Iterator, Sequence, Tuple

import torch

_init: Any = None


def _rows(table: Any, indices: Any, size: int) -> Iterator[Tuple[int, Any]]:
    """The rows of each layer, whose addresses are in `table`, as bytes."""
    count = int(indices.max()) + 1 if len(indices) else 0
    for layer, address in enumerate(table.tolist()):
        memory = (ctypes.c_uint8 * (count * size)).from_address(address)
        yield layer, torch.frombuffer(memory, dtype=torch.uint8).view(count, size)


def _raw(tensor: Any, item_size: int) -> Any:
    """A page-first tensor as bytes: slots, layers, bytes of a row."""
    return tensor.view(torch.uint8).view(tensor.shape[0], -1, item_size)


def transfer_kv_per_layer_mla(
    src: Any, dst: Any, src_indices: Any, dst_indices: Any, item_size: int = 0
) -> None:
    dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer(
    src_k: Any,
    dst_k: Any,
    src_v: Any,
    dst_v: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
) -> None:
    transfer_kv_per_layer_mla(src_k, dst_k, src_indices, dst_indices)
    transfer_kv_per_layer_mla(src_v, dst_v, src_indices, dst_indices)


def transfer_kv_per_layer_mla_pf_lf(
    src: Any,
    dst: Any,
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    dst[dst_indices] = src[src_indices, layer_id]


def transfer_kv_per_layer_pf_lf(
    src_k: Any,
    dst_k: Any,
    src_v: Any,
    dst_v: Any,
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    dst_k[dst_indices] = src_k[src_indices, layer_id]
    dst_v[dst_indices] = src_v[src_indices, layer_id]


def transfer_kv_per_layer_ph_lf(
    src_k: Any,
    dst_k: Any,
    src_v: Any,
    dst_v: Any,
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
) -> None:
    page, slot = src_indices // page_size, src_indices % page_size
    dst_k[dst_indices] = src_k[page, :, slot, layer_id]
    dst_v[dst_indices] = src_v[page, :, slot, layer_id]


def transfer_kv_all_layer_mla(
    src_layers: Any,
    dst_layers: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    num_layers: int,
) -> None:
    for (_, src), (_, dst) in zip(
        _rows(src_layers, src_indices, item_size), _rows(dst_layers, dst_indices, item_size)
    ):
        dst[dst_indices] = src[src_indices]


def transfer_kv_all_layer(
    src_k_layers: Any,
    dst_k_layers: Any,
    src_v_layers: Any,
    dst_v_layers: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    num_layers: int,
) -> None:
    transfer_kv_all_layer_mla(
        src_k_layers, dst_k_layers, src_indices, dst_indices, item_size, num_layers
    )
    transfer_kv_all_layer_mla(
        src_v_layers, dst_v_layers, src_indices, dst_indices, item_size, num_layers
    )


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Any,
    dst: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    for layer, src in _rows(src_layers, src_indices, item_size):
        _raw(dst, item_size)[dst_indices, layer] = src[src_indices]


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Any,
    dst_k: Any,
    src_v_layers: Any,
    dst_v: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    for table, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(
            table, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
        )


def transfer_kv_all_layer_lf_ph(
    src_k_layers: Any,
    dst_k: Any,
    src_v_layers: Any,
    dst_v: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
) -> None:
    page, slot = dst_indices // page_size, dst_indices % page_size
    for table, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer, src in _rows(table, src_indices, item_size):
            dst[page, :, slot, layer] = src.view(dst.dtype).view(-1, head_num, dst.shape[-1])[
                src_indices
            ]


def transfer_kv_direct(
    src_layers: Sequence[Any],
    dst_layers: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    page_size: int,
) -> None:
    for src, dst in zip(src_layers, dst_layers):
        dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    for src, dst in zip(src_ptrs, dst_ptrs):
        dst[dst_indices] = src[src_indices // page_size, layer_id, src_indices % page_size]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    page_size: int,
) -> None:
    layers = len(src_ptrs) // len(dst_ptrs)
    for at, src in enumerate(src_ptrs):
        dst_ptrs[at // layers][dst_indices // page_size, at % layers, dst_indices % page_size] = (
            src[src_indices]
        )


def _unpinned(pool: Any, *, pin_memory: bool, **given: Any) -> None:
    """The constructor of a host pool, which neither pins memory nor registers it with CUDA."""
    _init(pool, pin_memory=False, **given)


def _linker_pools(self: Any, *, kvcache: Any, params: Any, page_size: int) -> Any:
    """The device pools of a model with one kind of attention, for a linker."""
    from sglang.srt.mem_cache.hybrid_cache import linker_pool_assembler as assembler

    layers = {layer: layer for layer in range(kvcache.layer_num)}
    entry = assembler._mha_device_pool_entry(assembler.PoolName.KV, kvcache, layers, page_size)
    return assembler.DevicePoolGroup([entry], kvcache.layer_num, page_size)


def install() -> None:
    """Gives SGLang's host pools these functions, and its linkers these models."""
    from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
    from sglang.srt.mem_cache.pool_host import base, mha, mla

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # of 10 GiB, that a small machine does not have free
    hybrid_pool_assembler._PlainKvStrategy.build_direct_linker_pool_group = _linker_pools
    global _init
    _init, base.HostKVCache.__init__ = base.HostKVCache.__init__, _unpinned
    for module in (mha, mla):
        for name, function in globals().items():
            if name.startswith("transfer_kv_"):
                setattr(module, name, function)
