"""Blocks of KV under names that the engine chooses."""

from __future__ import annotations

import array
import contextlib
import ctypes
import sys
import time
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple, Union

from . import _abi, _reaper
from ._columns import Column, Columns
from ._device import After, number_of
from ._errors import Error, make
from ._lib import check, check_err, deadline_after, lib, u32, u64
from ._op import Op
from ._plan import ClearReport, values
from ._policy import STOP_UNKNOWN
from ._resource import Resource, byref, new_error
from ._runtime import PRIORITY_DEMAND, PRIORITY_PREFETCH, submit_opts
from ._view import MemoryRange, export

if TYPE_CHECKING:
    from ._event import ReadyEvent
    from ._queue import Queue
    from ._store import Identity, Session, Store


def _invalid(text: str) -> Exception:
    return make(_abi.KVT_E_INVALID, text)


@dataclass(frozen=True)
class BlockAddresses:
    """The addresses of a call's blocks, one per name and in the same order.

    `shifts` are the offsets of the parts from a block's address; by default parts are
    contiguous. A call that transfers some parts takes their shifts, or those of all parts.
    Addresses are a list, or an array of 64-bit unsigned integers. They are host memory, or
    memory of the store's device (`device=True`). Nothing checks addresses: the caller keeps the
    memory valid until the op is released. The op holds `kept` until it is closed."""

    addresses: Column
    shifts: Optional[Sequence[int]] = None
    device: bool = False
    kept: Any = None
    #: Bytes before the first block, and from the last block on, that parts may use; None: unknown.
    bounds: Optional[Tuple[int, int]] = None
    writable: bool = True


@dataclass(frozen=True)
class PartAddresses:
    """Like `BlockAddresses`, with one table of addresses per transferred part, for scattered
    parts."""

    tables: Sequence[Column]
    device: bool = False
    kept: Any = None


Addresses = Union[BlockAddresses, PartAddresses]


class Pool:
    """An object with blocks at equal distances: block i is `stride` bytes after block i - 1.

    The object is a numpy array, a memoryview, a `kvtier.Buffer` or device memory. The pool and
    its ops hold it. Calls check that blocks lie inside the object. A read-only pool
    (`writable=False`) serves puts only."""

    def __init__(self, source: Any, stride: int, *, offset: int = 0,
                 shifts: Optional[Sequence[int]] = None, writable: bool = True) -> None:
        self._kept: List[Any] = []
        memory = export(source, writable, self._kept)
        room = memory.nbytes - u64(offset)
        if stride <= 0 or room < 0:
            raise _invalid(f"stride {stride} and offset {offset} make no pool in memory of "
                           f"{memory.nbytes} bytes: stride must be at least 1, offset at most "
                           "the size of the memory")
        #: How many blocks fit.
        self.count = room // stride
        self.stride, self.shifts = stride, shifts
        self._first, self._offset, self._room = memory.address + offset, offset, room
        self._writable = writable
        self._device = memory.on_device

    def at(self, indexes: Sequence[int]) -> BlockAddresses:
        """Returns the addresses of the blocks with these indexes."""
        if not isinstance(indexes, (list, tuple, range)):
            # Converts an array at once: iterating would create an array scalar per number.
            tolist = getattr(indexes, "tolist", None)
            indexes = tolist() if tolist is not None else list(indexes)
        try:
            numbers = array.array("Q", indexes)
        except (OverflowError, TypeError) as error:
            raise _invalid(f"block indexes of a pool of {self.count} must be integers from 0 on: "
                           f"{error}") from error
        high = max(numbers, default=0)
        if numbers and high >= self.count:
            raise _invalid(f"block {high} is out of range of a pool of {self.count} blocks: "
                           f"indexes must be below {self.count}")
        # Without shifts no part begins before its block, so the space before it is not needed.
        low = min(numbers, default=0) if self.shifts is not None else 0
        room = (self._offset + low * self.stride, self._room - high * self.stride)
        return BlockAddresses(_scaled(numbers, self.stride, self._first), self.shifts, self._device,
                              self._kept, room, self._writable)


def _scaled(numbers: "array.array[int]", step: int, first: int) -> "array.array[int]":
    """Computes `first + number * step` for all numbers at once, in one long integer with 64 bits
    per number. This takes half the time of a loop. No sum overflows into the next one, because
    all of them are addresses of one memory."""
    order = sys.byteorder
    starts = int.from_bytes(first.to_bytes(8, order) * len(numbers), order)
    sums = int.from_bytes(numbers, order) * step + starts
    return array.array("Q", sums.to_bytes(8 * len(numbers), order))


_U8 = ctypes.POINTER(ctypes.c_uint8)
#: Empty arrays that serve as pointers: a cast would take longer.
_BYTES, _ENDS, _PAGES = ctypes.c_uint8 * 0, ctypes.c_uint64 * 0, ctypes.c_void_p * 0


class Names:
    """Names of blocks, prepared once for several calls.

    Names are any bytes. With `each_bytes`, all names are in one bytes object, contiguous and of
    that length. The names are copied and immutable; any thread may use them.

    >>> import kvtier
    >>> len(kvtier.Names([b"a", b"longer"])), len(kvtier.Names(b"abcdef", each_bytes=2))
    (2, 3)
    """

    __slots__ = ("_c", "_kept")

    def __init__(self, names: Union[Sequence[bytes], Any], each_bytes: int = 0) -> None:
        ends: "array.array[int]" = array.array("Q")
        if each_bytes:
            whole: Any = names
            joined, each = bytearray(memoryview(whole)), u64(each_bytes)
            count, rest = divmod(len(joined), each)
            if rest:
                raise _invalid(f"{len(joined)} bytes are no whole number of names of {each} "
                               f"bytes: {rest} bytes are left over; each_bytes must divide the "
                               "length")
        else:
            # C reads no more than is counted here, even if another thread changes the list.
            joined, count, lengths = bytearray().join(names), len(names), set(map(len, names))
            each = lengths.pop() if len(lengths) == 1 else 0  # the usual case: no table
            if lengths:
                ends = array.array("Q", accumulate(map(len, names)))
                count = len(ends)
            if (ends[-1] if ends else each * count) != len(joined):
                raise _invalid("a name is a memoryview of items longer than one byte: pass bytes, "
                               "or cast it with .cast('B')")
        self._c = _abi.kvt_block_names_t(count=count, each_bytes=each)
        self._c.bytes = _BYTES.from_buffer(joined)
        self._kept = (joined, ends)  # neither moves nor resizes from now on
        if ends:
            self._c.ends = _ENDS.from_buffer(ends)

    def __len__(self) -> int:
        return int(self._c.count)

    def _marked(self, marks: bytes) -> "Names":
        """Returns the names whose byte in `marks` is not 0."""
        if 0 not in marks:
            return self
        joined, ends = self._kept
        each = int(self._c.each_bytes)
        stops = ends if ends else range(each, len(joined) + each, max(each, 1))
        starts = (0, *stops)
        return Names([bytes(joined[start:stop])
                      for start, stop, mark in zip(starts, stops, marks) if mark])


def _as_names(names: "Sequence[bytes] | Names") -> Names:
    return names if isinstance(names, Names) else Names(names)


class Blocks:
    """Blocks of KV under names that the engine chooses, such as its own hashes.

    Equal content must have equal names. `parts` are the bytes of each part of a block. A block
    can be used when all its parts are stored. Any thread may use this object.

    Blocks with another `identity`, or with other parts, are different blocks. `tenant` and
    `priority` (0 is evicted first) classify the blocks within a store; for `ttl`, see
    `Namespace.session`. Policies that use the
    cost of computation count a block as one token.

    >>> import kvtier
    >>> with kvtier.Runtime() as runtime, kvtier.Store(runtime, "store(host=16MiB)") as store:
    ...     blocks = kvtier.Blocks(store, kvtier.Identity(model=b"m"), [4096])
    ...     pool = kvtier.Pool(bytearray(4096 * 8), 4096)
    ...     stored = blocks.put([b"a", b"b"], pool.at([0, 5])).result().value
    ...     existing = [bool(byte) for byte in blocks.exists([b"a", b"b", b"c"])]
    ...     op = blocks.get([b"a", b"c"], pool.at([1, 2]))
    ...     op.wait(), stored, existing, op.failed()
    (True, 2, [True, True, False], [1])
    """

    def __init__(self, store: "Store", identity: "Identity", parts: Sequence[int], *,
                 tenant: int = 0, priority: Optional[int] = None, name: str = "",
                 ttl: Optional[float] = None) -> None:
        from ._store import Group

        if not parts:
            raise _invalid("parts is empty: a block has at least one part")
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
        self._namespace = store.namespace(identity, chunk_tokens=1, groups=groups, holes=True)
        self._session: "Session" = self._namespace.session(name, tenant=tenant, priority=priority,
                                                           ttl=ttl)
        self._runtime = store._runtime
        #: Whether the store reads from a remote, so that a remote lookup is possible.
        self.has_remote = bool(store.remote_stats()["read_circuit"])

    def keys(self, names: "Sequence[bytes] | Names") -> bytes:
        """Returns the keys of blocks in store events: 32 bytes per name, contiguous."""
        prepared, err = _as_names(names), new_error()
        keys = (ctypes.c_uint8 * (len(prepared) * _abi.KVT_KEY_BYTES))()
        check_err(lib.kvt_namespace_block_keys(self._namespace._raw, byref(prepared._c), keys,
                                               byref(err)), err)
        return bytes(keys)

    def exists(self, names: "Sequence[bytes] | Names",
               remote_timeout: Optional[float] = None) -> bytes:
        """Returns a byte per name: 0 if the block is missing or incomplete.

        Otherwise the byte is EXISTS_WHOLE, with `1 << TIER_*` for each tier that has all of the
        block. A block that `remote_lookup` found at the remote has `1 << TIER_REMOTE` without
        EXISTS_WHOLE; a get fetches it. With `remote_timeout`, in seconds, a store with a remote
        first performs a remote lookup of at most that time. The call references nothing."""
        prepared, err = _as_names(names), new_error()
        if remote_timeout and self.has_remote and len(prepared):
            # Without a timely answer the blocks count as missing, as after a failed lookup.
            with contextlib.suppress(Error), self.remote_lookup(
                    prepared, timeout=remote_timeout) as op:
                op.wait()
        found = ctypes.create_string_buffer(len(prepared))
        check_err(lib.kvt_namespace_blocks_exist(
            self._namespace._raw, byref(prepared._c), ctypes.cast(found, _U8), byref(err)), err)
        return found.raw

    def prefix(self, names: "Sequence[bytes] | Names",
               remote_timeout: Optional[float] = None) -> int:
        """Returns how many leading blocks exist, as `exists` defines it."""
        found = self.exists(names, remote_timeout)
        gap = found.find(0)
        return len(found) if gap < 0 else gap

    def remote_lookup(self, names: "Sequence[bytes] | Names", *, queue: "Optional[Queue]" = None,
                      tag: object = None, timeout: Optional[float] = None,
                      priority: int = PRIORITY_DEMAND) -> Op:
        """Looks blocks up in the store and at the remote, so that a get or prefetch can use them.

        The op ends with `NotFoundError` if some blocks are in neither, as far as is known.
        `op.failed()` lists them, and the op's value is the number of leading usable blocks. With
        a `timeout` the answers until then count. A dropped op is cancelled."""
        prepared = _as_names(names)
        return self._session._submit(lib.kvt_session_remote_lookup_blocks, prepared._c, [prepared],
                                     True, queue, tag, timeout, priority)

    def put(self, names: "Sequence[bytes] | Names", addresses: "Addresses", *, level: int = 0,
            queue: "Optional[Queue]" = None, tag: object = None,
            timeout: Optional[float] = None, priority: int = PRIORITY_DEMAND,
            ready: "Optional[ReadyEvent]" = None, after: After = None, first_part: int = 0,
            parts: Optional[int] = None) -> Op:
        """Stores blocks that the store does not have yet.

        The op has an item per block (`op.failed()`); its value is the number of leading stored
        blocks. The library owns the memory of the blocks until the release. The op holds the
        `kept` of `addresses` until it is closed. With `first_part` and `parts` the call stores only
        these parts; a block exists once all its parts are stored."""
        return self._transfer(lib.kvt_session_put_blocks, names, addresses, u32(level), False,
                              queue, tag, timeout, priority, ready, after, first_part, parts)

    def get(self, names: "Sequence[bytes] | Names", addresses: "Addresses", *,
            queue: "Optional[Queue]" = None, tag: object = None,
            timeout: Optional[float] = None, priority: int = PRIORITY_DEMAND,
            ready: "Optional[ReadyEvent]" = None, after: After = None, first_part: int = 0,
            parts: Optional[int] = None) -> Op:
        """Loads blocks. The op ends with `NotFoundError` if some are missing; the others are
        loaded, and `op.failed()` lists the missing ones. A dropped op is cancelled. With
        `first_part` and `parts` the call transfers only these parts, such as one layer's."""
        return self._transfer(lib.kvt_session_get_blocks, names, addresses, 0, True, queue, tag,
                              timeout, priority, ready, after, first_part, parts)

    def prefetch(self, names: "Sequence[bytes] | Names", *, queue: "Optional[Queue]" = None,
                 tag: object = None, timeout: Optional[float] = None,
                 priority: int = PRIORITY_PREFETCH, first_part: int = 0,
                 parts: Optional[int] = None) -> Op:
        """Brings blocks to host memory before a get of the same parts. A dropped op is
        cancelled."""
        return self._transfer(lib.kvt_session_prefetch_blocks, names, None, 0, True, queue, tag,
                              timeout, priority, None, None, first_part, parts)

    def drop(self, names: "Sequence[bytes] | Names") -> ClearReport:
        """Removes unreferenced blocks from every tier of the store."""
        prepared, report, err = _as_names(names), _abi.kvt_clear_report_t(), new_error()
        check_err(lib.kvt_session_drop_blocks(self._session._raw, byref(prepared._c),
                                              byref(report), byref(err)), err)
        return ClearReport(*values(report, ClearReport))

    def hold(self, names: "Sequence[bytes] | Names") -> "Hold":
        """Protects existing blocks from eviction until the `Hold` is closed or dropped. They may
        still be demoted to disk and promoted again. Each hold of a block counts."""
        raw, prepared, err = self._session._raw, _as_names(names), new_error()
        found = ctypes.create_string_buffer(len(prepared))
        check_err(lib.kvt_session_hold_blocks(raw, byref(prepared._c), ctypes.cast(found, _U8),
                                              byref(err)), err)
        return Hold(raw, found.raw, prepared._marked(found.raw))

    def hint(self, names: "Sequence[bytes] | Names", *, stop: int = STOP_UNKNOWN,
             next_use_ns: int = 0, confidence: float = 1.0, done: bool = False) -> None:
        """Gives the policies a hint about blocks, as `Session.hint` does for a session. Missing
        blocks are skipped. `next_use_ns` is a time on the clock of `Runtime.now_ns`, not a
        duration."""
        flags = _abi.KVT_HINT_ZERO_CONFIDENCE | (_abi.KVT_HINT_DONE if done else 0)
        hint = _abi.kvt_policy_hint_t(flags=flags, stop=u32(stop), confidence=confidence,
                                      next_use_ns=u64(next_use_ns, 63))
        raw, prepared, err = self._session._raw, _as_names(names), new_error()
        check_err(lib.kvt_session_hint_blocks(raw, byref(prepared._c), byref(hint), byref(err)),
                  err)

    def pin(self, names: "Sequence[bytes] | Names", *, priority: int = 0, timeout: float) -> None:
        """Pins blocks for `timeout` seconds, as `Session.pin` does. Missing blocks are skipped."""
        raw, prepared, err = self._session._raw, _as_names(names), new_error()
        until = deadline_after(time.monotonic_ns(), timeout)
        check_err(lib.kvt_session_pin_blocks(raw, byref(prepared._c), u32(priority), until,
                                             byref(err)), err)

    def clear(self, timeout: Optional[float] = None) -> ClearReport:
        """Removes all unreferenced blocks."""
        return self._namespace.clear(timeout)

    def _transfer(self, call: Any, names: "Sequence[bytes] | Names",
                  addresses: "Optional[Addresses]", level: int, cancel: bool,
                  queue: "Optional[Queue]", tag: object, timeout: Optional[float],
                  priority: int, ready: "Optional[ReadyEvent]", after: After, first_part: int,
                  parts: Optional[int]) -> Op:
        raw = self._session._raw
        selected = self._part_range(first_part, parts)
        prepared = _as_names(names)  # C copies them
        kept: List[Any] = []
        c = _abi.kvt_blocks_t(level=level, after=number_of(after, kept),
                              first_layer=selected.start, layers=len(selected))
        c.names = ctypes.pointer(prepared._c)
        if ready is not None:
            c.ready = ready._raw.value
        with Columns() as columns:
            if addresses is not None:
                if cancel and isinstance(addresses, BlockAddresses) and not addresses.writable:
                    raise _invalid("get needs writable memory: this pool has writable=False")
                self._fill(c, addresses, len(prepared), selected, columns, kept)
            op = Op(self._runtime, queue, tag, cancel)
            op._keep(kept)
            opts, _ = submit_opts(self._runtime, op, queue, timeout, 0, priority)
            handle, err = _abi.kvt_op_p(), new_error()
            status = call(raw, byref(c), byref(opts), byref(handle), byref(err))
            if status != _abi.KVT_OK:
                op._submit_failed()
            check_err(status, err)
        op._bind(handle.value)
        return op

    def _part_range(self, first: int, count: Optional[int]) -> range:
        """Returns the range of parts of a call, by default all from `first` on."""
        left = len(self.parts) - u32(first)
        if not 0 < (left if count is None else u32(count)) <= left:
            raise _invalid(f"first_part={first}, parts={count} is outside of a block of "
                           f"{len(self.parts)} parts: first_part must be below "
                           f"{len(self.parts)}, parts at least 1, or None for all that follow")
        return range(first, first + (left if count is None else count))

    def _fill(self, c: Any, addresses: "Addresses", count: int, selected: range, columns: Columns,
              kept: List[Any]) -> None:
        sizes = self.parts[selected.start:selected.stop]
        if isinstance(addresses, BlockAddresses):
            shifts = self._starts if addresses.shifts is None else addresses.shifts
            if len(shifts) == len(self.parts):
                shifts = shifts[selected.start:selected.stop]
            tables = [columns.take("addresses", "u64", addresses.addresses)] * len(sizes)
            self._check(addresses, sizes, shifts)
        else:
            shifts = [0] * len(sizes)
            tables = [columns.take(f"addresses of part {part}", "u64", table)
                      for part, table in enumerate(addresses.tables, selected.start)]
        if len(shifts) != len(sizes) or len(tables) != len(sizes):
            raise _invalid(f"{len(tables)} address tables and {len(shifts)} shifts for "
                           f"{len(sizes)} of {len(self.parts)} parts: give one of each per "
                           "transferred part")
        kept.append(addresses.kept)
        rows = (_abi.kvt_view_t * len(sizes))()
        memory = _abi.KVT_MEMORY_DEVICE if addresses.device else _abi.KVT_MEMORY_HOST
        for row, size, shift, (table, length) in zip(rows, sizes, shifts, tables):
            if length != count:
                raise _invalid(f"{length} addresses for {count} blocks: give one per block")
            row.pages = _PAGES.from_address(ctypes.addressof(table))
            row.page_count = length
            row.page_tokens, row.run_bytes, row.shift_bytes = 1, size, shift
            row.memory = memory
        kept.append(rows)
        c.k, c.stride_bytes = rows, ctypes.sizeof(_abi.kvt_view_t)

    def _check(self, addresses: BlockAddresses, sizes: Sequence[int],
               shifts: Sequence[int]) -> None:
        """Checks that a pool's memory is still open, and that every part lies inside it."""
        for kept in addresses.kept if isinstance(addresses.kept, list) else ():
            if isinstance(kept, MemoryRange):  # closed memory may have another owner by now
                kept._check(False)
        if addresses.bounds is None:
            return
        before, behind = addresses.bounds
        for size, shift in zip(sizes, shifts):
            if shift < -before or shift + size > behind:
                raise _invalid(f"a part of {size} bytes at shift {shift} lies outside of the "
                               f"pool: shifts must be at least {-before}, a part's end at most "
                               f"{behind}")

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._session.closed

    def close(self) -> None:
        """Closes this object. The blocks stay in the store, and ops continue."""
        self._session.close()
        self._namespace.close()

    def __enter__(self) -> "Blocks":
        self._session._raw  # noqa: B018: not when it is closed
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HoldJob(_reaper.Job):
    """Releases held blocks."""

    __slots__ = ("_claim",)
    nonblocking = True

    def __init__(self, session: Any, names: Names) -> None:
        # A copy of the handle: the session may close first, which releases all holds.
        super().__init__(type(session)(session.value), _reaper.RANK_OP)
        # The thread that takes this entry releases the hold. A second release would end another
        # hold. The entry has the session, because a thread that sees the hold closed clears the
        # handle.
        self._claim = [(type(session)(session.value), names)]

    def release_once(self) -> Optional[int]:
        """Releases the hold and returns the status; None if another thread does or did so."""
        try:
            session, names = self._claim.pop()
        except IndexError:
            return None
        status = int(lib.kvt_session_release_blocks(session, byref(names._c), None))
        if status in (_abi.KVT_E_CLOSED, _abi.KVT_E_HANDLE):  # the closed session holds nothing
            return _abi.KVT_OK
        if status != _abi.KVT_OK:
            self._claim.append((session, names))
        return status

    def attempt(self) -> int:
        status = self.release_once()
        return _abi.KVT_OK if status is None else status


class Hold(Resource):
    """Blocks that are protected from eviction: see `Blocks.hold`. Closing the hold, or the
    `Blocks` object, releases them. Several holds may cover one block.

    >>> import kvtier
    >>> with kvtier.Runtime() as runtime, kvtier.Store(runtime, "store(host=16MiB)") as store:
    ...     blocks = kvtier.Blocks(store, kvtier.Identity(model=b"m"), [4096])
    ...     stored = blocks.put([b"a"], kvtier.Pool(bytearray(4096), 4096).at([0])).result()
    ...     with blocks.hold([b"a", b"b"]) as hold:
    ...         [bool(byte) for byte in hold.held], blocks.drop([b"a"]).referenced_chunks
    ...     blocks.drop([b"a"]).removed_chunks
    ([True, False], 1)
    1
    """

    _type_name = "hold"

    def __init__(self, session: Any, held: bytes, names: Names) -> None:
        #: A byte per given name, as `Blocks.exists` returns it; 0: not held.
        self.held = held
        self._own(HoldJob(session, names))

    def close(self) -> None:
        """Releases the blocks. A second call has no effect."""
        if self.closed:
            return
        self._raw  # noqa: B018: not in a forked child
        status = self._job.release_once()
        if status is None:  # another thread closes this hold and marks it closed
            return
        check(status)
        self._released()
