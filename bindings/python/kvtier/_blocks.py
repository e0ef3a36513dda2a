"""Blocks of KV that an engine names itself."""

from __future__ import annotations

import array
import contextlib
import ctypes
import sys
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple, Union

from . import _abi, _reaper
from ._columns import Column, Columns
from ._device import After, number_of
from ._errors import Error, make
from ._lib import check, check_err, lib, u32, u64
from ._op import Op
from ._plan import ClearReport, values
from ._policy import STOP_UNKNOWN
from ._resource import Resource, byref, new_error
from ._runtime import PRIORITY_DEMAND, PRIORITY_PREFETCH, submit_opts
from ._view import Place, lend

if TYPE_CHECKING:
    from ._event import Event
    from ._queue import Queue
    from ._store import Identity, Session, Store


def _invalid(text: str) -> Exception:
    return make(_abi.KVT_E_INVALID, text)


@dataclass(frozen=True)
class At:
    """Where the blocks of a call are: an address each, in the order of their names, to which
    the parts' `shifts` are added (by default parts lie one after the other). Where a call moves
    some parts, `shifts` are of those, or of all. Addresses are a list, or an array of 64-bit
    unsigned integers, of memory that the processor reaches, or of the store's device's
    (`device=True`). Nothing checks them: whoever gives addresses keeps
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
    """The same with a table of addresses for each part that is moved: parts that lie anywhere."""

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
        self._device = there.on_device

    def at(self, indexes: Sequence[int]) -> At:
        """Some of its blocks."""
        if not isinstance(indexes, (list, tuple, range)):
            # An array's numbers, as Python has them: one by one they would be objects of its own.
            tolist = getattr(indexes, "tolist", None)
            indexes = tolist() if tolist is not None else list(indexes)
        try:
            numbers = array.array("Q", indexes)
        except (OverflowError, TypeError) as error:
            raise _invalid(f"blocks of a pool of {self.count}: {error}") from error
        high = max(numbers, default=0)
        if numbers and high >= self.count:
            raise _invalid(f"block {high} of a pool of {self.count}")
        # Without shifts no part begins before its block: nobody asks what is there.
        low = min(numbers, default=0) if self.shifts is not None else 0
        room = (self._offset + low * self.stride, self._room - high * self.stride)
        return At(_scaled(numbers, self.stride, self._first), self.shifts, self._device,
                  self._kept, room, self._writable)


def _scaled(numbers: "array.array[int]", step: int, first: int) -> "array.array[int]":
    """`first + number * step` of each, as 64 bits of one long integer each: half the time of a
    loop. None runs over into the next, for all of them are addresses of one memory."""
    order = sys.byteorder
    starts = int.from_bytes(first.to_bytes(8, order) * len(numbers), order)
    sums = int.from_bytes(numbers, order) * step + starts
    return array.array("Q", sums.to_bytes(8 * len(numbers), order))


_U8 = ctypes.POINTER(ctypes.c_uint8)
#: What stands for pointers: a cast would take longer.
_BYTES, _ENDS, _PAGES = ctypes.c_uint8 * 0, ctypes.c_uint64 * 0, ctypes.c_void_p * 0


class Names:
    """What blocks are called, made ready once for several calls: names of any bytes, or, with
    `each_bytes`, one object of bytes with all of them, each so long, one after the other. A copy,
    that nothing changes; any thread may use it.

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
                raise _invalid(f"names of {each} bytes each, in {len(joined)} bytes: {rest} are "
                               "left over")
        else:
            # C reads no more than was counted here, even if somebody changes the list meanwhile.
            joined, count, lengths = bytearray().join(names), len(names), set(map(len, names))
            each = lengths.pop() if len(lengths) == 1 else 0  # the usual case: no table
            if lengths:
                ends = array.array("Q", accumulate(map(len, names)))
                count = len(ends)
            if (ends[-1] if ends else each * count) != len(joined):
                raise _invalid("names are bytes: one is a view of longer items, whose length is "
                               "not its bytes'")
        self._c = _abi.kvt_block_names_t(count=count, each_bytes=each)
        self._c.bytes = _BYTES.from_buffer(joined)
        self._kept = (joined, ends)  # which neither move nor resize now
        if ends:
            self._c.ends = _ENDS.from_buffer(ends)

    def __len__(self) -> int:
        return int(self._c.count)

    def _those(self, marks: bytes) -> "Names":
        """Those whose byte is not 0."""
        if 0 not in marks:
            return self
        joined, ends = self._kept
        each = int(self._c.each_bytes)
        stops = ends if ends else range(each, len(joined) + each, max(each, 1))
        starts = (0, *stops)
        return Names([bytes(joined[start:stop])
                      for start, stop, one in zip(starts, stops, marks) if one])


def _ready(names: "Sequence[bytes] | Names") -> Names:
    return names if isinstance(names, Names) else Names(names)


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
        #: Whether the store reads from a remote, so that it can be asked.
        self.has_remote = bool(store.remote_stats()["read_circuit"])

    def keys(self, names: "Sequence[bytes] | Names") -> bytes:
        """What blocks are called in events: 32 bytes a name, one after the other."""
        called, err = _ready(names), new_error()
        keys = (ctypes.c_uint8 * (len(called) * _abi.KVT_KEY_BYTES))()
        check_err(lib.kvt_namespace_block_keys(self._space._raw, byref(called._c), keys,
                                               byref(err)), err)
        return bytes(keys)

    def exists(self, names: "Sequence[bytes] | Names", ask: Optional[float] = None) -> bytes:
        """A byte for each: 0 where a block is not there, or not all of it; else EXISTS_WHOLE,
        and `1 << TIER_*` for each tier that has all of it. One that `locate` found at the remote
        has `1 << TIER_REMOTE` without EXISTS_WHOLE: a get brings it. With `ask` a store that has
        a remote asks it first, and waits so many seconds at most. Nothing is held."""
        called, err = _ready(names), new_error()
        if ask and self.has_remote and len(called):
            # What it does not say in time, or refuses to be asked, is not there.
            with contextlib.suppress(Error), self.locate(called, timeout=ask) as op:
                op.wait()
        found = ctypes.create_string_buffer(len(called))
        check_err(lib.kvt_namespace_blocks_exist(
            self._space._raw, byref(called._c), ctypes.cast(found, _U8), byref(err)), err)
        return found.raw

    def prefix(self, names: "Sequence[bytes] | Names", ask: Optional[float] = None) -> int:
        """How many blocks from the first on `exists` says are there."""
        found = self.exists(names, ask)
        gap = found.find(0)
        return len(found) if gap < 0 else gap

    def locate(self, names: "Sequence[bytes] | Names", *, queue: "Optional[Queue]" = None,
               tag: object = None, timeout: Optional[float] = None,
               priority: int = PRIORITY_DEMAND) -> Op:
        """Finds out which blocks are here or at the remote; those come with a get or a prefetch.
        It ends with `NotFoundError` where some are in neither as far as is known: `op.failed()`
        says which, and its value is how many from the first on can be used. With a `timeout` what
        was heard until then counts. Dropped, it is cancelled."""
        called = _ready(names)
        return self._session._one(lib.kvt_session_remote_lookup_blocks, called._c, [called], True, queue,
                                  tag, timeout, priority)

    def put(self, names: "Sequence[bytes] | Names", places: "At | Each", *, level: int = 0,
            queue: "Optional[Queue]" = None, tag: object = None,
            timeout: Optional[float] = None, priority: int = PRIORITY_DEMAND,
            ready: "Optional[Event]" = None, after: After = None, first_part: int = 0,
            parts: Optional[int] = None) -> Op:
        """Stores blocks, but for those that are there already. The op has an item for each
        (`op.failed()`); its value is how many from the first on are stored. Where the blocks are
        is the library's until the release, and what is named as kept is held until the op is
        closed. Of blocks that come a few parts at a time, `parts` of them from `first_part` on
        are stored: a block is there when all its parts are."""
        return self._move(lib.kvt_session_put_blocks, names, places, u32(level), False, queue,
                          tag, timeout, priority, ready, after, first_part, parts)

    def get(self, names: "Sequence[bytes] | Names", places: "At | Each", *,
            queue: "Optional[Queue]" = None, tag: object = None,
            timeout: Optional[float] = None, priority: int = PRIORITY_DEMAND,
            ready: "Optional[Event]" = None, after: After = None, first_part: int = 0,
            parts: Optional[int] = None) -> Op:
        """Loads blocks. It ends with `NotFoundError` where some are missing: the others came, and
        `op.failed()` says which did not. Dropped, it is cancelled. With `first_part` and `parts`
        nothing but those parts is read and written, such as a layer's."""
        return self._move(lib.kvt_session_get_blocks, names, places, 0, True, queue, tag,
                          timeout, priority, ready, after, first_part, parts)

    def prefetch(self, names: "Sequence[bytes] | Names", *, queue: "Optional[Queue]" = None,
                 tag: object = None, timeout: Optional[float] = None,
                 priority: int = PRIORITY_PREFETCH, first_part: int = 0,
                 parts: Optional[int] = None) -> Op:
        """Into memory, for a get to come (of the same parts). Dropped, it is cancelled."""
        return self._move(lib.kvt_session_prefetch_blocks, names, None, 0, True, queue, tag,
                          timeout, priority, None, None, first_part, parts)

    def drop(self, names: "Sequence[bytes] | Names") -> ClearReport:
        """Takes blocks away that nobody holds."""
        called, report, err = _ready(names), _abi.kvt_clear_report_t(), new_error()
        check_err(lib.kvt_session_drop_blocks(self._session._raw, byref(called._c), byref(report),
                                              byref(err)), err)
        return ClearReport(*values(report, ClearReport))

    def hold(self, names: "Sequence[bytes] | Names") -> "Hold":
        """Keeps those that are there from leaving until the `Hold` is closed, or let go of.
        They may go from memory to disk and back. Several holds of a block count each."""
        raw, called, err = self._session._raw, _ready(names), new_error()
        found = ctypes.create_string_buffer(len(called))
        check_err(lib.kvt_session_hold_blocks(raw, byref(called._c), ctypes.cast(found, _U8),
                                              byref(err)), err)
        return Hold(raw, found.raw, called._those(found.raw))

    def hint(self, names: "Sequence[bytes] | Names", *, stop: int = STOP_UNKNOWN, next_use_ns: int = 0,
             confidence: float = 1.0, done: bool = False) -> None:
        """Tells the policies what is known of the future of blocks, as `Session.hint` does of
        a session's. Those that are not there are passed over. `next_use_ns` is a moment of
        `Runtime.now_ns`, not a duration."""
        flags = _abi.KVT_HINT_ZERO_CONFIDENCE | (_abi.KVT_HINT_DONE if done else 0)
        told = _abi.kvt_policy_hint_t(flags=flags, stop=u32(stop), confidence=confidence,
                                      next_use_ns=u64(next_use_ns, 63))
        raw, called, err = self._session._raw, _ready(names), new_error()
        check_err(lib.kvt_session_hint_blocks(raw, byref(called._c), byref(told), byref(err)), err)

    def clear(self, timeout: Optional[float] = None) -> ClearReport:
        """Takes all away that nobody holds."""
        return self._space.clear(timeout)

    def _move(self, call: Any, names: "Sequence[bytes] | Names", places: "Optional[At | Each]",
              level: int, cancel: bool, queue: "Optional[Queue]", tag: object,
              timeout: Optional[float], priority: int, ready: "Optional[Event]",
              after: After, first_part: int, parts: Optional[int]) -> Op:
        raw = self._session._raw
        some = self._some(first_part, parts)
        called = _ready(names)  # C copies them
        kept: List[Any] = []
        c = _abi.kvt_blocks_t(level=level, after=number_of(after, kept), first_layer=some.start,
                              layers=len(some))
        c.names = ctypes.pointer(called._c)
        if ready is not None:
            c.ready = ready._raw.value
        with Columns() as columns:
            if places is not None:
                if cancel and isinstance(places, At) and not places.writable:
                    raise _invalid("a get into a pool that cannot be written")
                self._fill(c, places, len(called), some, columns, kept)
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

    def _some(self, first: int, count: Optional[int]) -> range:
        """Parts from one on, by default all."""
        left = len(self.parts) - u32(first)
        if not 0 < (left if count is None else u32(count)) <= left:
            raise _invalid(f"{'no' if count is None else count} parts from {first} on, of blocks "
                           f"with {len(self.parts)}: say first_part from 0 on, and parts from 1 on "
                           "or None for all that follow")
        return range(first, first + (left if count is None else count))

    def _fill(self, c: Any, places: "At | Each", count: int, some: range, columns: Columns,
              kept: List[Any]) -> None:
        sizes = self.parts[some.start:some.stop]
        if isinstance(places, At):
            shifts = self._starts if places.shifts is None else places.shifts
            if len(shifts) == len(self.parts):
                shifts = shifts[some.start:some.stop]
            tables = [columns.take("addresses", "u64", places.addresses)] * len(sizes)
            self._check(places, sizes, shifts)
        else:
            shifts = [0] * len(sizes)
            tables = [columns.take(f"addresses of part {i}", "u64", one)
                      for i, one in enumerate(places.tables, some.start)]
        if len(shifts) != len(sizes) or len(tables) != len(sizes):
            raise _invalid(f"{len(sizes)} of a block's {len(self.parts)} parts: {len(tables)} "
                           f"tables, {len(shifts)} shifts")
        kept.append(places.kept)
        rows = (_abi.kvt_view_t * len(sizes))()
        memory = _abi.KVT_MEMORY_DEVICE if places.device else _abi.KVT_MEMORY_HOST
        for row, size, shift, (table, length) in zip(rows, sizes, shifts, tables):
            if length != count:
                raise _invalid(f"{length} addresses for {count} blocks")
            row.pages = _PAGES.from_address(ctypes.addressof(table))
            row.page_count = length
            row.page_tokens, row.run_bytes, row.shift_bytes = 1, size, shift
            row.memory = memory
        kept.append(rows)
        c.k, c.stride_bytes = rows, ctypes.sizeof(_abi.kvt_view_t)

    def _check(self, places: At, sizes: Sequence[int], shifts: Sequence[int]) -> None:
        """Where it is known what is around the blocks it is still there, and no part leads out
        of it."""
        for one in places.kept if isinstance(places.kept, list) else ():
            if isinstance(one, Place):  # closed, it may be somebody else's by now
                one._check(False)
        if places.room is None:
            return
        before, behind = places.room
        for size, shift in zip(sizes, shifts):
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


class HoldJob(_reaper.Job):
    """Lets blocks go."""

    __slots__ = ("_claim",)
    swift = True

    def __init__(self, session: Any, names: Names) -> None:
        # A handle of its own: the session may be closed before, and has let all go then.
        super().__init__(type(session)(session.value), _reaper.RANK_OP)
        # Whoever takes this lets go. Done twice, it would take what others hold. The session is
        # in it as well: the handle is cleared by whoever sees this closed.
        self._claim = [(type(session)(session.value), names)]

    def let_go(self) -> Optional[int]:
        """The status; None where another thread is at it, or was."""
        try:
            session, names = self._claim.pop()
        except IndexError:
            return None
        status = int(lib.kvt_session_release_blocks(session, byref(names._c), None))
        if status in (_abi.KVT_E_CLOSED, _abi.KVT_E_HANDLE):  # nobody holds anything any more
            return _abi.KVT_OK
        if status != _abi.KVT_OK:
            self._claim.append((session, names))
        return status

    def attempt(self) -> int:
        status = self.let_go()
        return _abi.KVT_OK if status is None else status


class Hold(Resource):
    """Blocks that do not leave: see `Blocks.hold`. Closing it lets go of what it has held, and
    so does closing the blocks. Blocks may be held more than once.

    >>> import kvtier
    >>> with kvtier.Runtime() as runtime, kvtier.Store(runtime, "store(host=16MiB)") as store:
    ...     blocks = kvtier.Blocks(store, kvtier.Identity(model=b"m"), [4096])
    ...     stored = blocks.put([b"a"], kvtier.Pool(bytearray(4096), 4096).at([0])).result()
    ...     with blocks.hold([b"a", b"b"]) as hold:
    ...         [bool(one) for one in hold.held], blocks.drop([b"a"]).referenced_chunks
    ...     blocks.drop([b"a"]).removed_chunks
    ([True, False], 1)
    1
    """

    _noun = "hold"

    def __init__(self, session: Any, held: bytes, names: Names) -> None:
        #: A byte for each name that was given, as `Blocks.exists` has it; 0: not held.
        self.held = held
        self._own(HoldJob(session, names))

    def close(self) -> None:
        """Lets go; doing so twice is fine."""
        if self.closed:
            return
        self._raw  # noqa: B018: not in a forked child
        status = self._job.let_go()
        if status is None:  # another thread closes it: it is for that one to say so
            return
        check(status)
        self._released()
