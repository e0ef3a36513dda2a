"""Where the pages of a host pool are: addresses once, then arithmetic."""

from __future__ import annotations

import json
from typing import Any, List, Optional, Sequence, Tuple

import kvtier
import numpy as np
import torch

from ._config import invalid, unsupported


def buffers_of(pool: Any) -> List[torch.Tensor]:
    """The tensors of a pool; refused unless the processor can reach all of them as they lie."""
    get = getattr(pool, "get_hybrid_pool_buffer", None)
    given = get() if get is not None else getattr(pool, "kv_buffer", None)
    found: List[torch.Tensor] = []
    for one in given if isinstance(given, (list, tuple)) else [given]:
        if one is None:
            continue
        if one.device.type != "cpu":
            raise unsupported(f"a host pool on {one.device}: HiCache's host pools are in host "
                              "memory; the linker takes device pools")
        if not one.is_contiguous():
            raise invalid(f"a host pool with a strided tensor {tuple(one.shape)}, strides "
                          f"{one.stride()}: its pages cannot be taken by address")
        found.append(one)
    return found


def firsts(indices: Any, count: int, page_tokens: int, tokens: int) -> Any:
    """The first slot of each of `count` pages; refused unless all of them are whole pages of
    the pool. A wrong one would be somebody else's memory."""
    if not isinstance(indices, torch.Tensor):
        indices = torch.as_tensor(indices)
    if indices.dtype not in (torch.int64, torch.int32):
        raise invalid(f"host_indices of {indices.dtype}: slots are int64")
    slots = indices.detach().cpu().numpy().reshape(-1)
    if slots.size != count * page_tokens:
        raise invalid(f"{slots.size} host indices for {count} pages of {page_tokens} slots")
    pages = slots.reshape(count, page_tokens)
    first = pages[:, 0].astype(np.int64)
    if count == 0:
        return first
    if first.min() < 0 or first.max() > tokens - page_tokens or (first % page_tokens).any():
        raise invalid(f"host indices {first.min()} to {first.max()}: not pages of a pool with "
                      f"{tokens} slots in pages of {page_tokens}")
    if page_tokens > 1 and not (pages == first[:, None] + np.arange(page_tokens)).all():
        raise invalid("host indices of a page that do not follow each other: kvtier takes whole "
                      "pages, as the engine's allocator gives them out")
    return first


class Pages:
    """Pages whose bytes are taken where they are. A page has the same parts everywhere: in a
    page-first layout one for K and one for V (or one for both), in layer_first one a layer."""

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
        """What a page has."""
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
        # K and V of a layer alternate there; in the engine's flat pages all of K comes first,
        # and pages that were stored flat are to be found here, and the other way round.
        pairs = (getattr(self.pool, "layout", "") == "layer_first" and count == 2 * layers)
        order = ([*range(0, count, 2), *range(1, count, 2)] if pairs else list(range(count)))
        first = np.array(addresses, np.uint64)[order]
        return first, order, [sizes[i] for i in order]

    def _find_step(self) -> Optional[Any]:
        """How far apart pages are in each part, or None where they are not even."""
        if self._pages < 2:
            return np.zeros(len(self.parts), np.uint64)
        def at(page: int) -> Any:
            return np.array(self._meta(page)[0], np.uint64)[self._order]
        step = at(1) - self._first
        last = self._pages - 1
        return step if (at(last) == self._first + step * np.uint64(last)).all() else None

    def places(self, first: Any) -> Any:
        """Where pages are that start at these slots."""
        pages = (first // self.page_tokens).astype(np.uint64)
        if self._step is None:
            return self._asked(first)
        if (self._step == self._step[0]).all():
            lowest = self._first.min()
            shifts = [int(one - lowest) for one in self._first]
            return kvtier.At(lowest + pages * self._step[0], shifts, kept=self.kept)
        tables = [begin + pages * step for begin, step in zip(self._first, self._step)]
        return kvtier.Each(tables, kept=self.kept)

    def _asked(self, first: Any) -> Any:
        """Pools that move their pages about (shared backings) are asked each time."""
        slots = torch.from_numpy((first[:, None] + np.arange(self.page_tokens)).reshape(-1))
        addresses, _ = self.pool.get_page_buffer_meta(slots)
        table = np.array(addresses, np.uint64).reshape(len(first), len(self.parts))
        return kvtier.Each([np.ascontiguousarray(table[:, i]) for i in self._order],
                           kept=self.kept)

    def take(self, first: Any) -> Any:
        """Where pages are read from, for a put."""
        return self.places(first)

    def room(self, first: Any) -> Tuple[Any, Any]:
        """Where pages are written to, for a get, and what `arrived` wants back."""
        return self.places(first), None

    def arrived(self, first: Any, held: Any, good: Sequence[bool]) -> None:
        """Pages have come: they are where they belong already."""


class FlatPages(Pages):
    """Pages of pools whose layout has no addresses for them (state pools in layer_first): they
    are gathered by the pool's own functions, which is a copy more."""

    def __init__(self, pool: Any, name: str) -> None:
        self.pool, self.page_tokens = pool, int(getattr(pool, "page_size", 1) or 1)
        self.tokens = int(pool.size)
        self.kept = buffers_of(pool)
        example = pool.get_dummy_flat_data_page()
        self._dtype, self._numbers = example.dtype, example.numel()
        self.parts = [example.numel() * example.element_size()]
        self.recipe = _recipe(pool, name, self.parts, "flat")

    def take(self, first: Any) -> Any:
        pages = [self.pool.get_data_page(int(slot), flat=True).contiguous() for slot in first]
        return kvtier.At([page.data_ptr() for page in pages], kept=pages)

    def room(self, first: Any) -> Tuple[Any, Any]:
        room = torch.empty((len(first), self._numbers), dtype=self._dtype)
        each = room.data_ptr() + np.arange(len(first), dtype=np.uint64) * np.uint64(self.parts[0])
        return kvtier.At(each, kept=room), room

    def arrived(self, first: Any, held: Any, good: Sequence[bool]) -> None:
        for slot, page, came in zip(first, held, good):
            if came:
                self.pool.set_from_flat_data_page(int(slot), page)


def pages_of(pool: Any, name: str) -> Pages:
    """The pages of a pool, by address where its layout has one for them."""
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
            f"pool {name!r} ({type(pool).__name__}, layout {getattr(pool, 'layout', '?')}) has "
            f"neither addresses ({reason}) nor flat pages ({error}): start the engine with "
            "--hicache-mem-layout page_first") from error


def _recipe(pool: Any, name: str, parts: Sequence[int], how: str) -> bytes:
    """What makes a page of so many bytes another page: the order of the numbers in it."""
    said = {"pool": str(name), "class": type(pool).__name__, "how": how, "parts": list(parts)}
    for field in ("layout", "dtype", "page_size", "layer_num", "start_layer", "end_layer",
                  "head_num", "head_dim", "v_head_dim", "kv_cache_dim", "storage_format_tag"):
        value = getattr(pool, field, None)
        if value is not None and not callable(value):
            said[field] = str(value)
    return json.dumps(said, sort_keys=True).encode()
