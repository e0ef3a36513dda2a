"""Blocks of KV that an engine names itself."""

from __future__ import annotations

import array
import ctypes
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

from . import _abi
from ._columns import Column, Columns
from ._device import After, number_of
from ._errors import make
from ._lib import check_err, lib, u32, u64
from ._op import Op
from ._plan import ClearReport, values
from ._resource import byref, new_error
from ._runtime import PRIORITY_DEMAND, PRIORITY_PREFETCH, submit_opts
from ._view import Place, kind_of, lend

if TYPE_CHECKING:
    from ._event import Event
    from ._queue import Queue
    from ._store import Identity, Session, Store


def _invalid(text: str) -> Exception:
    return make(_abi.KVT_E_INVALID, text)


@dataclass(frozen=True)
class At:
    """Where the blocks of a call are: an address each, in the order of their names, to which
    the parts' `shifts` are added (by default parts lie one after the other). Addresses are a
    list, or an array of 64-bit unsigned integers, of memory that the processor reaches, or of
    the store's device's (`device=True`). Nothing checks them: whoever gives addresses keeps
    what is there until the op is released; `kept` is held until it is closed."""

    addresses: Column
    shifts: Optional[Sequence[int]] = None
    device: bool = False
    kept: Any = None
    #: Bytes before the first, and from the last on, that parts may be in; None: nobody knows.
    room: Optional[Tuple[int, int]] = None
    writable: bool = True


@dataclass(frozen=True)
class Each:
    """The same with a table of addresses for each part: parts that lie anywhere."""

    tables: Sequence[Column]
    device: bool = False
    kept: Any = None


class Pool:
    """An object with blocks at equal distances (a numpy array, a memoryview, a
    `kvtier.Buffer`, memory of a device): block i is `stride` bytes after block i - 1. The
    object is held as long as the pool and its ops are. Blocks never lead out of it. One that
    cannot be written (`writable=False`) is for puts."""

    def __init__(self, source: Any, stride: int, *, offset: int = 0,
                 shifts: Optional[Sequence[int]] = None, writable: bool = True) -> None:
        self._kept: List[Any] = []
        there = lend(source, writable, self._kept)
        room = there.nbytes - u64(offset)
        if stride <= 0 or room < 0:
            raise _invalid(f"blocks of {stride} bytes from {offset} on, in {there.nbytes} bytes")
        #: How many blocks there is room for.
        self.count = room // stride
        self.stride, self.shifts = stride, shifts
        self._first, self._offset, self._room = there.address + offset, offset, room
        self._writable = writable
        self._device = kind_of(there) == _abi.KVT_MEMORY_DEVICE

    def at(self, indexes: Sequence[int]) -> At:
        """Some of its blocks."""
        first, stride, count = self._first, self.stride, self.count
        low, high = (int(min(indexes)), int(max(indexes))) if len(indexes) else (0, 0)
        if len(indexes) and not 0 <= low <= high < count:
            raise _invalid(f"blocks {low} to {high} of a pool of {count}")
        addresses = array.array("Q", [first + int(i) * stride for i in indexes])
        room = (self._offset + low * stride, self._room - high * stride)
        return At(addresses, self.shifts, self._device, self._kept, room, self._writable)


_U8 = ctypes.POINTER(ctypes.c_uint8)
_U64 = ctypes.POINTER(ctypes.c_uint64)


def _names(names: Sequence[bytes]) -> Tuple[Any, List[Any]]:
    """Names for C, and what has to be kept meanwhile."""
    joined = b"".join(names)
    c = _abi.kvt_names_t(count=len(names))
    c.bytes = ctypes.cast(ctypes.c_char_p(joined), _U8)
    kept: List[Any] = [joined]
    if sum(map(len, names)) != len(joined):
        raise _invalid("names are bytes: one is a view of longer items, whose length is not its "
                       "bytes'")
    lengths = set(map(len, names))
    if len(lengths) == 1:  # the usual case, which needs no table
        c.each_bytes = lengths.pop()
    elif lengths:
        ends = array.array("Q", accumulate(map(len, names)))
        c.ends = ctypes.cast(ctypes.c_void_p(ends.buffer_info()[0]), _U64)
        kept.append(ends)
    return c, kept


class Blocks:
    """Blocks of KV under names that an engine has made: any bytes, the same for the same
    content, such as its own hashes. A block has `parts` of so many bytes each, and is there as
    a whole or not at all. Any thread may use it.

    `identity` says what else makes KV other KV; blocks of another identity, or with other
    parts, are others. Within a store, `tenant` and `priority` (0 leaves first) say whose
    they are. For policies that go by what computing costs a block is a token.

    >>> import kvtier
    >>> with kvtier.Runtime() as runtime, kvtier.Store(runtime, "store(host=16MiB)") as store:
    ...     blocks = kvtier.Blocks(store, kvtier.Identity(model=b"m"), [4096])
    ...     pool = kvtier.Pool(bytearray(4096 * 8), 4096)
    ...     stored = blocks.put([b"a", b"b"], pool.at([0, 5])).result().value
    ...     there = [bool(one) for one in blocks.exists([b"a", b"b", b"c"])]
    ...     op = blocks.get([b"a", b"c"], pool.at([1, 2]))
    ...     op.wait(), stored, there, op.failed()
    (True, 2, [True, True, False], [1])
    """

    def __init__(self, store: "Store", identity: "Identity", parts: Sequence[int], *,
                 tenant: int = 0, priority: Optional[int] = None, name: str = "") -> None:
        from ._store import Group

        if not parts:
            raise _invalid("a block without parts")
        layers: Dict[int, List[int]] = {}
        for at, size in enumerate(parts):
            layers.setdefault(u32(size), []).append(at)
        groups = [Group(layers=of, k_bytes=size) for size, of in layers.items()]
        #: The bytes of each part.
        self.parts: Tuple[int, ...] = tuple(parts)
        self._starts, self.block_bytes = [], 0
        for size in self.parts:
            self._starts.append(self.block_bytes)
            self.block_bytes += size
        self._space = store.namespace(identity, chunk_tokens=1, groups=groups, holes=True)
        self._session: "Session" = self._space.session(name, tenant=tenant, priority=priority)
        self._runtime = store._runtime

    def keys(self, names: Sequence[bytes]) -> bytes:
        """What blocks are called in events: 32 bytes a name, one after the other."""
        c, kept = _names(names)
        keys, err = (ctypes.c_uint8 * (len(names) * _abi.KVT_KEY_BYTES))(), new_error()
        check_err(lib.kvt_namespace_block_keys(self._space._raw, byref(c), keys, byref(err)), err)
        return bytes(keys)

    def exists(self, names: Sequence[bytes]) -> bytes:
        """A byte for each: 0 where a block is not there, or not all of it; else EXISTS_WHOLE,
        and `1 << TIER_*` for each tier that has all of it. Nothing is held."""
        c, kept = _names(names)
        found, err = ctypes.create_string_buffer(len(names)), new_error()
        check_err(lib.kvt_namespace_find_blocks(
            self._space._raw, byref(c), ctypes.cast(found, _U8), byref(err)), err)
        return found.raw

    def prefix(self, names: Sequence[bytes]) -> int:
        """How many blocks from the first on are there."""
        found = self.exists(names)
        gap = found.find(0)
        return len(found) if gap < 0 else gap

    def put(self, names: Sequence[bytes], places: "At | Each", *, level: int = 0,
            queue: "Optional[Queue]" = None, tag: object = None,
            timeout: Optional[float] = None, priority: int = PRIORITY_DEMAND,
            ready: "Optional[Event]" = None, after: After = None) -> Op:
        """Stores blocks, but for those that are there already. The op has an item for each
        (`op.failed()`); its value is how many from the first on are stored. Where the blocks are
        is the library's until the release, and what is named as kept is held until the op is
        closed."""
        return self._move(lib.kvt_session_put_blocks, names, places, u32(level), False, queue,
                          tag, timeout, priority, ready, after)

    def get(self, names: Sequence[bytes], places: "At | Each", *,
            queue: "Optional[Queue]" = None, tag: object = None,
            timeout: Optional[float] = None, priority: int = PRIORITY_DEMAND,
            ready: "Optional[Event]" = None, after: After = None) -> Op:
        """Loads blocks. It ends with `NotFoundError` where some are missing: the others came, and
        `op.failed()` says which did not. Dropped, it is cancelled."""
        return self._move(lib.kvt_session_get_blocks, names, places, 0, True, queue, tag,
                          timeout, priority, ready, after)

    def prefetch(self, names: Sequence[bytes], *, queue: "Optional[Queue]" = None,
                 tag: object = None, timeout: Optional[float] = None,
                 priority: int = PRIORITY_PREFETCH) -> Op:
        """Into memory, for a get to come. Dropped, it is cancelled."""
        return self._move(lib.kvt_session_prefetch_blocks, names, None, 0, True, queue, tag,
                          timeout, priority, None, None)

    def drop(self, names: Sequence[bytes]) -> ClearReport:
        """Takes blocks away that nobody holds."""
        c, kept = _names(names)
        report, err = _abi.kvt_clear_report_t(), new_error()
        check_err(lib.kvt_session_drop_blocks(self._session._raw, byref(c), byref(report),
                                              byref(err)), err)
        return ClearReport(*values(report, ClearReport))

    def clear(self, timeout: Optional[float] = None) -> ClearReport:
        """Takes all away that nobody holds."""
        return self._space.clear(timeout)

    def _move(self, call: Any, names: Sequence[bytes], places: "Optional[At | Each]",
              level: int, cancel: bool, queue: "Optional[Queue]", tag: object,
              timeout: Optional[float], priority: int, ready: "Optional[Event]",
              after: After) -> Op:
        raw = self._session._raw
        called, _kept_names = _names(names)  # C copies them
        count = len(names)
        c = _abi.kvt_blocks_t(level=level, after=number_of(after))
        c.names = ctypes.pointer(called)
        kept: List[Any] = []
        if ready is not None:
            c.ready = ready._raw.value
        with Columns() as columns:
            if places is not None:
                if cancel and isinstance(places, At) and not places.writable:
                    raise _invalid("a get into a pool that cannot be written")
                self._fill(c, places, count, columns, kept)
            op = Op(self._runtime, queue, tag, cancel)
            op._keep(kept)
            opts, _ = submit_opts(self._runtime, op, queue, timeout, 0, priority)
            handle, err = _abi.kvt_op_p(), new_error()
            status = call(raw, byref(c), byref(opts), byref(handle), byref(err))
            if status != _abi.KVT_OK:
                op._refused()
            check_err(status, err)
        op._bind(handle.value)
        return op

    def _fill(self, c: Any, places: "At | Each", count: int, columns: Columns,
              kept: List[Any]) -> None:
        if isinstance(places, At):
            shifts = self._starts if places.shifts is None else places.shifts
            tables = [columns.take("addresses", "u64", places.addresses)] * len(self.parts)
            self._check(places, shifts)
        else:
            shifts = [0] * len(self.parts)
            tables = [columns.take(f"addresses of part {i}", "u64", one)
                      for i, one in enumerate(places.tables)]
        if len(shifts) != len(self.parts) or len(tables) != len(self.parts):
            raise _invalid(f"blocks have {len(self.parts)} parts: {len(tables)} tables, "
                           f"{len(shifts)} shifts")
        kept.append(places.kept)
        rows = (_abi.kvt_view_t * len(self.parts))()
        memory = _abi.KVT_MEMORY_DEVICE if places.device else _abi.KVT_MEMORY_HOST
        pages = ctypes.POINTER(ctypes.c_void_p)
        for row, size, shift, (table, length) in zip(rows, self.parts, shifts, tables):
            if length != count:
                raise _invalid(f"{length} addresses for {count} blocks")
            row.pages, row.page_count = ctypes.cast(table, pages), length
            row.page_tokens, row.run_bytes, row.shift_bytes = 1, size, shift
            row.memory = memory
        kept.append(rows)
        c.k, c.stride_bytes = rows, ctypes.sizeof(_abi.kvt_view_t)

    def _check(self, places: At, shifts: Sequence[int]) -> None:
        """Where it is known what is around the blocks it is still there, and no part leads out
        of it."""
        for one in places.kept if isinstance(places.kept, list) else ():
            if isinstance(one, Place):  # closed, it may be somebody else's by now
                one._check(False)
        if places.room is None:
            return
        before, behind = places.room
        for size, shift in zip(self.parts, shifts):
            if shift < -before or shift + size > behind:
                raise _invalid(f"a part of {size} bytes, {shift} bytes from its block's start, "
                               f"leads out of the pool")

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._session.closed

    def close(self) -> None:
        """Closes it; its blocks stay, and its ops go on."""
        self._session.close()
        self._space.close()

    def __enter__(self) -> "Blocks":
        self._session._raw  # noqa: B018: not when it is closed
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
