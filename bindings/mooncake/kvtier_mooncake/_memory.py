"""The registered buffers: the only memory that transfers may read and write."""

from __future__ import annotations

import ctypes
import mmap
import threading
from bisect import bisect_right
from itertools import chain
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Set, Tuple

import numpy as np

if TYPE_CHECKING:
    Table = np.ndarray[Any, np.dtype[np.uint64]]

#: Kinds of memory.
HOST, DEVICE = 0, 1

#: The kind of memory that is in no registered buffer.
NOWHERE = -1


def mapped(address: int, size: int) -> bool:
    """Whether the process can read and write the whole range, according to /proc/self/maps.
    Memory of a GPU is not listed there, or has no rights."""
    end, at = address + size, address
    with open("/proc/self/maps", encoding="ascii", errors="replace") as table:
        for line in table:
            words = line.split(None, 2)
            low, high = (int(text, 16) for text in words[0].split("-"))
            if high <= at:
                continue
            if low > at or not words[1].startswith("rw"):
                return False
            at = high
            if at >= end:
                return True
    return False


class _Spans:
    """Disjoint intervals of one kind of memory, in order of address."""

    def __init__(self, regions: List[Tuple[int, int]]) -> None:
        self.starts: List[int] = []
        self.ends: List[int] = []
        for start, end in sorted(regions):
            if self.ends and start <= self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end)
            else:
                self.starts.append(start)
                self.ends.append(end)

    def contains(self, low: int, high: int) -> bool:
        """Whether one interval contains the range."""
        at = bisect_right(self.starts, low) - 1
        return at >= 0 and high <= self.ends[at]


class Regions:
    """The registered buffers of one store. Any thread may use it. A removed buffer may be freed,
    because removing it waits for the transfers that may have found it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._transfers: Set[int] = set()
        self._begun = 0
        self._buffers: Dict[int, Tuple[int, int]] = {}
        self._spans = (_Spans([]), _Spans([]))

    def add(self, address: int, size: int, kind: int) -> None:
        """Registers a buffer. At an address that is registered already, the larger size counts."""
        with self._lock:
            previous = self._buffers.get(address)
            if previous is not None and previous[1] == kind:
                size = max(size, previous[0])
            self._buffers[address] = (size, kind)
            self._build()

    def remove(self, address: int) -> bool:
        """Removes a buffer. Returns False if none is registered at the address."""
        with self._lock:
            if self._buffers.pop(address, None) is None:
                return False
            self._build()
            self._wait()
            return True

    def clear(self) -> None:
        """Removes all buffers."""
        with self._lock:
            self._buffers.clear()
            self._build()
            self._wait()

    def begin(self) -> int:
        """Begins a transfer, before it looks up buffers. Returns the number to pass to `end`."""
        with self._lock:
            self._begun += 1
            self._transfers.add(self._begun)
            return self._begun

    def end(self, transfer: int) -> None:
        """Ends a transfer, which does not use buffers any more."""
        with self._lock:
            self._transfers.discard(transfer)
            self._ended.notify_all()

    def _wait(self) -> None:
        before = set(self._transfers)  # later transfers cannot find a removed buffer
        while before & self._transfers:
            self._ended.wait()

    def _build(self) -> None:
        self._spans = tuple(
            _Spans([(at, at + size) for at, (size, of_kind) in self._buffers.items()
                    if of_kind == kind])
            for kind in (HOST, DEVICE))  # type: ignore[assignment]

    def kind(self, address: int, size: int) -> int:
        """The kind of memory of a range: HOST, DEVICE, or NOWHERE."""
        for kind, spans in enumerate(self._spans):
            if spans.contains(address, address + size):
                return kind
        return NOWHERE

    def kind_of_columns(self, lows: List[int], ends: List[int]) -> int:
        """The kind of memory of several ranges, if all are in contiguous buffers of one kind.
        Otherwise NOWHERE, and the caller checks each address by itself."""
        for kind, spans in enumerate(self._spans):
            if all(spans.contains(low, end) for low, end in zip(lows, ends)):
                return kind
        return NOWHERE


class Fragments:
    """The memory of some objects of a call: a table of addresses for each part, as the C
    interface needs it, and the indexes of the objects in the call."""

    __slots__ = ("device", "indexes", "rejected", "tables")

    def __init__(self, tables: "Sequence[Table]", device: bool, indexes: Sequence[int],
                 rejected: Sequence[int]) -> None:
        self.tables, self.device = tables, device
        self.indexes, self.rejected = indexes, rejected


def resolve(regions: Regions, rows: Sequence[Sequence[int]], shape: Tuple[int, ...],
            indexes: Sequence[int]) -> List[Fragments]:
    """Groups objects by the kind of their memory, usually into one group. `indexes` are the
    objects' indexes in the call, and each row has the length of the shape. Objects outside of
    the registered buffers are rejected."""
    try:
        flat = np.fromiter(chain.from_iterable(rows), np.uint64, len(rows) * len(shape))
    except (OverflowError, TypeError, ValueError):  # some are no addresses
        return _check_each(regions, rows, shape, indexes)
    table = flat.reshape(len(rows), len(shape))
    lows = table.min(axis=0).tolist()
    ends = [high + size for high, size in zip(table.max(axis=0).tolist(), shape)]
    kind = regions.kind_of_columns(lows, ends)
    if kind == NOWHERE:
        return _check_each(regions, rows, shape, indexes)
    return [Fragments(list(np.ascontiguousarray(table.T)), kind == DEVICE, indexes, [])]


def _check_each(regions: Regions, rows: Sequence[Sequence[int]], shape: Tuple[int, ...],
                indexes: Sequence[int]) -> List[Fragments]:
    found: Tuple[List[int], List[int]] = ([], [])
    rejected: List[int] = []
    for at, row in enumerate(rows):
        kind = _kind_of(regions, row, shape)
        (found[kind] if kind is not None else rejected).append(at)
    groups = []
    for kind, chosen in enumerate(found):
        if chosen:
            table = np.array([rows[at] for at in chosen], dtype=np.uint64)
            groups.append(Fragments(list(np.ascontiguousarray(table.T)), kind == DEVICE,
                                    [indexes[at] for at in chosen], []))
    return [*groups, Fragments([], False, [], [indexes[at] for at in rejected])]


def _kind_of(regions: Regions, row: Sequence[int], shape: Tuple[int, ...]) -> Optional[int]:
    """The kind of memory of an object; None if it is unregistered, or of two kinds."""
    try:
        kinds = {regions.kind(int(one), size) for one, size in zip(row, shape)}
    except (TypeError, ValueError):
        return None
    return kinds.pop() if len(kinds) == 1 and NOWHERE not in kinds else None


def bytes_at(address: int, size: int) -> memoryview:
    """A view of host memory in a registered buffer."""
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


class MooncakeHostMemAllocator:
    """Allocates host memory for an engine's pools, with mmap."""

    def __init__(self) -> None:
        self._maps: Dict[int, mmap.mmap] = {}

    def alloc(self, size: int) -> int:
        """The address of `size` zeroed bytes; 0 if there is not enough memory."""
        try:
            memory = mmap.mmap(-1, size)
        except (OSError, ValueError, OverflowError):
            return 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._maps[address] = memory
        return address

    def free(self, address: int, size: int = 0) -> int:
        """Frees memory, which nothing may use any more: 0, or -600 for an unknown address."""
        memory = self._maps.pop(address, None)
        if memory is None:
            return -600
        try:
            memory.close()
        except BufferError:  # a view still exists, and frees the memory when it ends
            pass
        return 0
