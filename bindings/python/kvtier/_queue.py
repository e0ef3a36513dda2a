"""Completion queues: polled, called back, or served by an asyncio loop."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Union

from . import _abi, _callbacks, _reaper
from ._errors import Error
from ._lib import check, check_err, deadline_after, lib, status_error, u64
from ._op import RELEASED, Op, serials
from ._resource import Closing, byref, new_error

if TYPE_CHECKING:
    from ._runtime import Runtime

_BATCH = 256
_SLICE_NS = 200_000_000
_LEAVE_S = 0.02
_STRIDE = ctypes.sizeof(_abi.kvt_completion_t)


class Completion(NamedTuple):
    """One thing that happened to an op."""

    #: The op; None when it was posted without one.
    op: Optional[Op]
    #: The object given when it was submitted.
    tag: object
    status: int
    events: int
    bytes_done: int
    #: What the first item computed, such as a checksum.
    value: int
    items_failed: int

    @property
    def ok(self) -> bool:
        """Whether the op succeeded (so far)."""
        return self.status == _abi.KVT_OK

    @property
    def error(self) -> Optional[Error]:
        """Its error."""
        return None if self.ok else status_error(self.status)


class QueueStats(NamedTuple):
    """Counters of a queue."""

    capacity: int
    pending: int
    reserved: int
    peak: int
    posted: int
    refused: int


class _Posted(NamedTuple):
    """Stands for an op without a handle."""

    tag: object


class QueueJob(_reaper.Job):
    """Closes a queue."""

    __slots__ = ()

    def attempt(self) -> int:
        return int(lib.kvt_queue_close(byref(self.handle), _reaper.slice_deadline(), None))


class _State:
    """What the callback and the queue share; the callback keeps no queue alive."""

    def __init__(self, callback: Optional[Callable[[List[Completion]], object]]) -> None:
        self.callback = callback
        self.known: Dict[int, Union[Op, _Posted]] = {}

    def take(self, entries: Any, count: int) -> List[Completion]:
        """Turns C's entries into completions and wakes who awaits them."""
        return [self._take(entries[i]) for i in range(count)]

    def _take(self, entry: Any) -> Completion:
        last = bool(entry.events & RELEASED)
        found = self.known.pop(entry.tag, None) if last else self.known.get(entry.tag)
        op = found if isinstance(found, Op) else None
        if op is not None:
            op._bind(entry.op.value)
            if last:
                op._notice_release()
        return Completion(op, found.tag if found is not None else None, entry.status,
                          entry.events, entry.bytes_done, entry.value, entry.items_failed)


class Queue(Closing):
    """Where completions arrive. Polled, unless `callback` is given; that is
    called with a list of completions on the library's notifier thread, and
    must not wait for work of the same runtime.

    >>> import kvtier
    >>> with kvtier.Runtime() as runtime, runtime.queue() as queue:
    ...     with runtime.wrap(bytearray(b"kv")) as buffer:
    ...         runtime.post(kvtier.Work.checksum(buffer), queue, tag="mine")
    ...         [(done.tag, done.ok, done.bytes_done) for done in queue.wait(timeout=5)]
    [('mine', True, 2)]
    """

    _noun = "queue"

    def __init__(self, runtime: "Runtime", capacity: int = 0,
                 callback: Optional[Callable[[List[Completion]], object]] = None) -> None:
        self._runtime = runtime
        self._state = _State(callback)
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._loop_fd = -1
        self._thread = 0
        self._spare: List[Any] = []
        opts = _abi.kvt_queue_opts_t(capacity=u64(capacity))
        number = 0
        if callback is not None:
            number = _callbacks.register(self._state)
            opts.callback, opts.destroy, opts.user_data = (
                on_batch, _callbacks.on_destroy, number)
        handle, err = _abi.kvt_queue_p(), new_error()
        status = lib.kvt_queue_open(runtime._raw, byref(opts), byref(handle), byref(err))
        if status != _abi.KVT_OK and number:
            _callbacks.forget(number)
        check_err(status, err)
        self._own(QueueJob(handle, _reaper.RANK_QUEUE))

    def _expect(self, op: Union[Op, object], tag: object = None) -> int:
        """Notes an op about to be submitted; returns the tag C is given."""
        if isinstance(op, Op):
            self._state.known[op._serial] = op
            return op._serial
        serial = next(serials)
        self._state.known[serial] = _Posted(tag)
        return serial

    def _forget(self, serial: int) -> None:
        self._state.known.pop(serial, None)

    def poll(self, max_entries: int = _BATCH) -> List[Completion]:
        """Takes what is there, without waiting."""
        if self._loop is not None:
            self._refuse_attached()
        return self._poll(max_entries)

    def _poll(self, max_entries: int) -> List[Completion]:
        # Room for a batch costs as much as the call: it is used again.
        try:
            room = self._spare.pop() if max_entries == _BATCH else self._room(max_entries)
        except IndexError:
            room = self._room(_BATCH)
        got = ctypes.c_uint64()
        check(lib.kvt_queue_poll(self._raw, room, max_entries, _STRIDE, byref(got)))
        found = self._state.take(room, got.value) if got.value else []
        if max_entries == _BATCH:
            self._spare.append(room)
        return found

    def _room(self, entries: int) -> Any:
        return (_abi.kvt_completion_t * entries)()

    def wait(self, timeout: Optional[float] = None,
             max_entries: int = _BATCH) -> List[Completion]:
        """Takes completions, waiting for the first; empty when time ran out."""
        self._refuse_attached()
        room, got = self._room(max_entries), ctypes.c_uint64()
        end = deadline_after(time.monotonic_ns(), timeout)
        while True:
            now = time.monotonic_ns()
            until = now + _SLICE_NS if end == 0 else min(now + _SLICE_NS, end)
            status = lib.kvt_queue_wait(self._raw, until, room, max_entries, _STRIDE, byref(got))
            if status == _abi.KVT_OK:
                return self._state.take(room, got.value)
            if status != _abi.KVT_E_TIMEOUT:
                check(status)
            if end and time.monotonic_ns() >= end:
                return []

    def _refuse_attached(self) -> None:
        if self._loop is not None:
            raise status_error(_abi.KVT_E_STATE, "an attached queue is drained by its loop")

    def fileno(self) -> int:
        """A descriptor that is readable exactly while completions wait. Do not
        read, write or close it."""
        fd = ctypes.c_int32()
        check(lib.kvt_queue_fd(self._raw, byref(fd)))
        return fd.value

    def stats(self) -> QueueStats:
        """Counters."""
        stats = _abi.kvt_queue_stats_t()
        check(lib.kvt_queue_stats(self._raw, byref(stats)))
        return QueueStats(stats.capacity, stats.pending, stats.reserved, stats.peak,
                          stats.posted, stats.refused)

    def attach(self, loop: Optional[asyncio.AbstractEventLoop] = None) -> "Queue":
        """Lets a loop (by default the running one) drain the queue, so that
        ops submitted with it can be awaited there. Call it in the loop's thread."""
        loop = loop or asyncio.get_running_loop()
        if self._loop is loop:
            return self
        self._refuse_attached()
        fd = self.fileno()
        loop.add_reader(fd, self._drain)
        self._loop, self._loop_fd, self._thread = loop, fd, threading.get_ident()
        return self

    def detach(self) -> None:
        """Ends `attach`. Ops still awaited are heard of only when it is attached
        again, or closed."""
        loop, self._loop = self._loop, None
        if loop is None or loop.is_closed():
            return
        gone = threading.Event()
        try:
            if loop.is_running() and threading.get_ident() != self._thread:
                loop.call_soon_threadsafe(_leave, loop, self._loop_fd, gone)
                # The descriptor must leave the loop before it is closed and its
                # number is given to another file. A loop that stops hears of nothing.
                while not gone.wait(_LEAVE_S) and loop.is_running():
                    pass
            _leave(loop, self._loop_fd, gone)
        except RuntimeError:
            if not loop.is_closed():  # which has let go of all
                raise

    def _drain(self) -> None:
        if self._loop is not None and not self.closed:
            self._poll(_BATCH)

    def close(self, timeout: Optional[float] = None) -> None:
        """Closes it: cancels the ops that report to it and waits for their
        release; `BusyError` when time runs out, and then it can be tried again."""
        if self.closed:
            return
        end = deadline_after(time.monotonic_ns(), timeout)
        self._raw  # noqa: B018: not in a forked child
        self.detach()
        err = new_error()
        status = lib.kvt_queue_close(byref(self._job.handle), end, byref(err))
        check_err(status, err)
        self._released()
        # Completions nobody took are gone; those who await them are told here.
        for found in list(self._state.known.values()):
            if isinstance(found, Op):
                found._notice_release()
        self._state.known.clear()

    async def aclose(self) -> None:
        """`close` without holding the loop up."""
        self.detach()
        await super().aclose()

    async def __aenter__(self) -> "Queue":
        return self.attach()


def _leave(loop: asyncio.AbstractEventLoop, fd: int, gone: threading.Event) -> None:
    if not gone.is_set():  # the number is still the queue's
        loop.remove_reader(fd)
        gone.set()


def _deliver(state: _State, entries: Any, count: int) -> None:
    batch = state.take(entries, count)
    assert state.callback is not None
    state.callback(batch)


def _on_batch(number: int, batch: Any, count: int, stride: int) -> None:
    state = _callbacks.find(number)
    if state is None:
        return
    size = ctypes.sizeof(_abi.kvt_completion_t)
    if stride != size:  # a newer library: its entries lie further apart
        packed = (_abi.kvt_completion_t * count)()
        base = ctypes.addressof(batch.contents)
        for i in range(count):
            ctypes.memmove(ctypes.byref(packed, i * size), base + i * stride, min(size, stride))
        batch = packed
    _callbacks.call(_deliver, state, batch, count)


on_batch = _abi.kvt_completion_fn(_on_batch)
