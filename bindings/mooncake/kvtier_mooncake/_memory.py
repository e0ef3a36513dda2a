"""Which memory may be read and written: what was registered, and nothing else."""

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

#: What `_Spans` says of an address that is in none.
NOWHERE = -1


def mapped(address: int, size: int) -> bool:
    """Whether the processor can read and write all of it, as the kernel's table has it.
    Memory of a GPU is not in there, or has no rights."""
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
    """Intervals of one kind of memory that do not touch each other, in order."""

    def __init__(self, regions: List[Tuple[int, int]]) -> None:
        self.starts: List[int] = []
        self.ends: List[int] = []
        for start, end in sorted(regions):
            if self.ends and start <= self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end)
            else:
                self.starts.append(start)
                self.ends.append(end)

    def hold(self, low: int, high: int) -> bool:
        """Whether one of them has all of that."""
        at = bisect_right(self.starts, low) - 1
        return at >= 0 and high <= self.ends[at]


class Regions:
    """The registered buffers of one store. Any thread may use it. What is taken out of it may be
    freed then: moves that may have found it there are waited for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._moves: Set[int] = set()
        self._begun = 0
        self._of: Dict[int, Tuple[int, int]] = {}
        self._spans = (_Spans([]), _Spans([]))

    def add(self, address: int, size: int, kind: int) -> None:
        """Registers; at an address that is there already the larger size counts."""
        with self._lock:
            before = self._of.get(address)
            if before is not None and before[1] == kind:
                size = max(size, before[0])
            self._of[address] = (size, kind)
            self._build()

    def remove(self, address: int) -> bool:
        """False where none was registered there."""
        with self._lock:
            if self._of.pop(address, None) is None:
                return False
            self._build()
            self._wait()
            return True

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._of.clear()
            self._build()
            self._wait()

    def begin(self) -> int:
        """A move looks for its buffers; `end` it when it has let go of them."""
        with self._lock:
            self._begun += 1
            self._moves.add(self._begun)
            return self._begun

    def end(self, move: int) -> None:
        """See `begin`."""
        with self._lock:
            self._moves.discard(move)
            self._ended.notify_all()

    def _wait(self) -> None:
        before = set(self._moves)  # later ones do not find what was taken out
        while before & self._moves:
            self._ended.wait()

    def _build(self) -> None:
        self._spans = tuple(
            _Spans([(at, at + size) for at, (size, one) in self._of.items() if one == kind])
            for kind in (HOST, DEVICE))  # type: ignore[assignment]

    def kind(self, address: int, size: int) -> int:
        """HOST, DEVICE, or NOWHERE."""
        for kind, spans in enumerate(self._spans):
            if spans.hold(address, address + size):
                return kind
        return NOWHERE

    def columns(self, lows: List[int], ends: List[int]) -> int:
        """The same for parts that lie between two addresses each, when all of them are in
        buffers of one kind, and those without a gap; else NOWHERE, and each is looked at."""
        for kind, spans in enumerate(self._spans):
            if all(spans.hold(low, end) for low, end in zip(lows, ends)):
                return kind
        return NOWHERE


class Fragments:
    """Where the parts of some objects are: a table of addresses for each part, as C wants
    them, and which objects of the call they are."""

    __slots__ = ("device", "refused", "tables", "which")

    def __init__(self, tables: "Sequence[Table]", device: bool, which: Sequence[int],
                 refused: Sequence[int]) -> None:
        self.tables, self.device = tables, device
        self.which, self.refused = which, refused


def check(regions: Regions, rows: Sequence[Sequence[int]], shape: Tuple[int, ...],
          which: Sequence[int]) -> List[Fragments]:
    """Objects by the kind of their memory: usually all of one. `which` are their indexes in
    the call; what leads out of the registered buffers is refused. Rows are as long as the
    shape."""
    try:
        flat = np.fromiter(chain.from_iterable(rows), np.uint64, len(rows) * len(shape))
    except (OverflowError, TypeError, ValueError):  # what is no address is in no buffer
        return _sorted_out(regions, rows, shape, which)
    table = flat.reshape(len(rows), len(shape))
    lows = table.min(axis=0).tolist()
    ends = [high + size for high, size in zip(table.max(axis=0).tolist(), shape)]
    kind = regions.columns(lows, ends)
    if kind == NOWHERE:
        return _sorted_out(regions, rows, shape, which)
    return [Fragments(list(np.ascontiguousarray(table.T)), kind == DEVICE, which, [])]


def _sorted_out(regions: Regions, rows: Sequence[Sequence[int]], shape: Tuple[int, ...],
                which: Sequence[int]) -> List[Fragments]:
    found: Tuple[List[int], List[int]] = ([], [])
    refused: List[int] = []
    for at, row in enumerate(rows):
        kind = _kind_of(regions, row, shape)
        (found[kind] if kind is not None else refused).append(at)
    groups = []
    for kind, chosen in enumerate(found):
        if chosen:
            table = np.array([rows[at] for at in chosen], dtype=np.uint64)
            groups.append(Fragments(list(np.ascontiguousarray(table.T)), kind == DEVICE,
                                    [which[at] for at in chosen], []))
    return [*groups, Fragments([], False, [], [which[at] for at in refused])]


def _kind_of(regions: Regions, row: Sequence[int], shape: Tuple[int, ...]) -> Optional[int]:
    """The kind of memory of all of an object; None where there is none, or two."""
    try:
        kinds = {regions.kind(int(one), size) for one, size in zip(row, shape)}
    except (TypeError, ValueError):
        return None
    return kinds.pop() if len(kinds) == 1 and NOWHERE not in kinds else None


def bytes_at(address: int, size: int) -> memoryview:
    """Host memory of a registered buffer."""
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


class MooncakeHostMemAllocator:
    """Memory for an engine's pools: plain pages, mapped in one piece."""

    def __init__(self) -> None:
        self._maps: Dict[int, mmap.mmap] = {}

    def alloc(self, size: int) -> int:
        """The address of so many bytes of zeros; 0 where there is no memory."""
        try:
            memory = mmap.mmap(-1, size)
        except (OSError, ValueError, OverflowError):
            return 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._maps[address] = memory
        return address

    def free(self, address: int, size: int = 0) -> int:
        """Gives it back; nothing may use it any more."""
        memory = self._maps.pop(address, None)
        if memory is None:
            return -600
        try:
            memory.close()
        except BufferError:  # a view of it is left, and it goes with that
            pass
        return 0
