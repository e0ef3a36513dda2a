"""The location of a host pool's pages: addresses are probed once, then computed."""

from __future__ import annotations

import json
from typing import Any, List, Optional, Sequence, Tuple

import kvtier
import numpy as np
import torch

from ._config import invalid, unsupported


def buffers_of(pool: Any) -> List[torch.Tensor]:
    """The tensors of a host pool. Raises an error for device memory and for strided tensors."""
    get = getattr(pool, "get_hybrid_pool_buffer", None)
    pool_buffers = get() if get is not None else getattr(pool, "kv_buffer", None)
    tensors: List[torch.Tensor] = []
    for tensor in pool_buffers if isinstance(pool_buffers, (list, tuple)) else [pool_buffers]:
        if tensor is None:
            continue
        if tensor.device.type != "cpu":
            raise unsupported(f"the host pool is on {tensor.device}, but must be in host memory: "
                              "for device pools use the linker")
        if not tensor.is_contiguous():
            raise invalid(f"the host pool has a tensor of shape {tuple(tensor.shape)} with strides "
                          f"{tensor.stride()}: it must be contiguous, because pages are copied by "
                          "address")
        tensors.append(tensor)
    return tensors


def first_slots(indices: Any, count: int, page_tokens: int, tokens: int) -> Any:
    """The first slot of each of `count` pages. Raises an error unless the indices are whole
    pages of the pool, because another slot would mean other memory."""
    if not isinstance(indices, torch.Tensor):
        indices = torch.as_tensor(indices)
    if indices.dtype not in (torch.int64, torch.int32):
        raise invalid(f"host_indices have the type {indices.dtype}: give int64 or int32")
    slots = indices.detach().cpu().numpy().reshape(-1)
    if slots.size != count * page_tokens:
        raise invalid(f"there are {slots.size} host indices for {count} keys: each key needs the "
                      f"{page_tokens} slots of a page")
    pages = slots.reshape(count, page_tokens)
    first = pages[:, 0].astype(np.int64)
    if count == 0:
        return first
    if first.min() < 0 or first.max() > tokens - page_tokens or (first % page_tokens).any():
        raise invalid(f"host indices {first.min()} to {first.max()} are not the first slots of "
                      f"pages in a pool of {tokens} slots with {page_tokens} slots per page")
    if page_tokens > 1 and not (pages == first[:, None] + np.arange(page_tokens)).all():
        raise invalid("the host indices of a page are not consecutive: give whole pages, as the "
                      "engine's allocator returns them")
    return first


class Pages:
    """Pages that are copied in place, by address. All pages have the same parts: one for K and
    one for V (or one for both) in a page-first layout, one per layer in layer_first."""

    def __init__(self, pool: Any, name: str) -> None:
        self.pool, self.page_tokens = pool, int(getattr(pool, "page_size", 1) or 1)
        self.tokens = int(pool.size)
        self.kept = buffers_of(pool)
        self._pages = self.tokens // self.page_tokens
        first, self._order, self.parts = self._probe()
        self._first = first
        self._step: Optional[Any] = None
        if getattr(pool, "shared_allocation_domain", None) is None:
            self._step = self._find_step()
        self.recipe = _recipe(pool, name, self.parts, "direct")

    @property
    def page_bytes(self) -> int:
        """The bytes of a page."""
        return sum(self.parts)

    def _meta(self, page: int) -> Tuple[List[int], List[int]]:
        start = page * self.page_tokens
        slots = torch.arange(start, start + self.page_tokens, dtype=torch.int64)
        addresses, sizes = self.pool.get_page_buffer_meta(slots)
        return list(addresses), [int(size) for size in sizes]

    def _probe(self) -> Tuple[Any, List[int], List[int]]:
        addresses, sizes = self._meta(0)
        count = len(addresses)
        layers = int(getattr(self.pool, "layer_num", 0) or 0)
        # In layer_first, K and V of a layer alternate. The engine's flat pages have all of K
        # first. Both orders must agree, so that pages stored in one form load in the other.
        pairs = (getattr(self.pool, "layout", "") == "layer_first" and count == 2 * layers)
        order = ([*range(0, count, 2), *range(1, count, 2)] if pairs else list(range(count)))
        first = np.array(addresses, np.uint64)[order]
        return first, order, [sizes[i] for i in order]

    def _find_step(self) -> Optional[Any]:
        """The distance between pages in each part; None if the distances are not equal."""
        if self._pages < 2:
            return np.zeros(len(self.parts), np.uint64)
        def at(page: int) -> Any:
            return np.array(self._meta(page)[0], np.uint64)[self._order]
        step = at(1) - self._first
        last = self._pages - 1
        return step if (at(last) == self._first + step * np.uint64(last)).all() else None

    def places(self, first: Any) -> Any:
        """The addresses of the pages that begin at these slots."""
        pages = (first // self.page_tokens).astype(np.uint64)
        if self._step is None:
            return self._places_from_pool(first)
        if (self._step == self._step[0]).all():
            lowest = self._first.min()
            shifts = [int(one - lowest) for one in self._first]
            return kvtier.BlockAddresses(lowest + pages * self._step[0], shifts, kept=self.kept)
        tables = [begin + pages * step for begin, step in zip(self._first, self._step)]
        return kvtier.PartAddresses(tables, kept=self.kept)

    def _places_from_pool(self, first: Any) -> Any:
        """The same from the pool itself: pools with shared backings move their pages."""
        slots = torch.from_numpy((first[:, None] + np.arange(self.page_tokens)).reshape(-1))
        addresses, _ = self.pool.get_page_buffer_meta(slots)
        table = np.array(addresses, np.uint64).reshape(len(first), len(self.parts))
        return kvtier.PartAddresses([np.ascontiguousarray(table[:, i]) for i in self._order],
                                    kept=self.kept)

    def source(self, first: Any) -> Any:
        """The memory that a put reads pages from."""
        return self.places(first)

    def destination(self, first: Any) -> Tuple[Any, Any]:
        """The memory that a get writes pages to, and a buffer to pass to `finish_read`."""
        return self.places(first), None

    def finish_read(self, first: Any, buffer: Any, ok: Sequence[bool]) -> None:
        """Completes a get. `ok` says which pages were loaded. Nothing to do: they are in place."""


class FlatPages(Pages):
    """Pages of pools whose layout has no addresses (state pools in layer_first). The pool's own
    functions gather and scatter them, at the cost of another copy."""

    def __init__(self, pool: Any, name: str) -> None:
        self.pool, self.page_tokens = pool, int(getattr(pool, "page_size", 1) or 1)
        self.tokens = int(pool.size)
        self.kept = buffers_of(pool)
        example = pool.get_dummy_flat_data_page()
        self._dtype, self._numbers = example.dtype, example.numel()
        self.parts = [example.numel() * example.element_size()]
        self.recipe = _recipe(pool, name, self.parts, "flat")

    def source(self, first: Any) -> Any:
        pages = [self.pool.get_data_page(int(slot), flat=True).contiguous() for slot in first]
        return kvtier.BlockAddresses([page.data_ptr() for page in pages], kept=pages)

    def destination(self, first: Any) -> Tuple[Any, Any]:
        buffer = torch.empty((len(first), self._numbers), dtype=self._dtype)
        offsets = np.arange(len(first), dtype=np.uint64) * np.uint64(self.parts[0])
        return kvtier.BlockAddresses(buffer.data_ptr() + offsets, kept=buffer), buffer

    def finish_read(self, first: Any, buffer: Any, ok: Sequence[bool]) -> None:
        for slot, page, loaded in zip(first, buffer, ok):
            if loaded:
                self.pool.set_from_flat_data_page(int(slot), page)


def pages_of(pool: Any, name: str) -> Pages:
    """The pages of a pool, by address if its layout has addresses."""
    try:
        return Pages(pool, name)
    except (ValueError, NotImplementedError, AssertionError, AttributeError) as error:
        if isinstance(error, kvtier.Error):
            raise
        reason = error
    try:
        return FlatPages(pool, name)
    except (ValueError, NotImplementedError, AttributeError) as error:
        if isinstance(error, kvtier.Error):
            raise
        raise unsupported(
            f"pool {name!r} ({type(pool).__name__}, layout {getattr(pool, 'layout', '?')}) offers "
            f"neither page addresses ({reason}) nor flat pages ({error}): start the engine with "
            "--hicache-mem-layout page_first") from error


def _recipe(pool: Any, name: str, parts: Sequence[int], how: str) -> bytes:
    """The pool's part of the identity: everything that decides the order of a page's bytes."""
    description = {"pool": str(name), "class": type(pool).__name__, "how": how,
                   "parts": list(parts)}
    for field in ("layout", "dtype", "page_size", "layer_num", "start_layer", "end_layer",
                  "head_num", "head_dim", "v_head_dim", "kv_cache_dim", "storage_format_tag"):
        value = getattr(pool, field, None)
        if value is not None and not callable(value):
            description[field] = str(value)
    return json.dumps(description, sort_keys=True).encode()
