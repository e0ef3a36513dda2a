"""Completion queues: polled, delivered by callback, or drained by an asyncio loop."""

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
_DETACH_POLL_S = 0.02
_STRIDE = ctypes.sizeof(_abi.kvt_completion_t)


class Completion(NamedTuple):
    """An entry of a queue: an op reached one or more moments."""

    #: The op; None for work that was posted without a handle.
    op: Optional[Op]
    #: The caller's object from the submit.
    tag: object
    status: int
    events: int
    bytes_done: int
    #: The result of the first item, such as a checksum.
    value: int
    items_failed: int

    @property
    def ok(self) -> bool:
        """Whether the op has no error so far."""
        return self.status == _abi.KVT_OK

    @property
    def error(self) -> Optional[Error]:
        """The op's error."""
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
    """Represents posted work, which has no handle."""

    tag: object


class QueueJob(_reaper.Job):
    """Closes a queue."""

    __slots__ = ()

    def attempt(self) -> int:
        return int(lib.kvt_queue_close(byref(self.handle), _reaper.slice_deadline(), None))


class _State:
    """State shared by the queue and its callback. The callback does not keep the queue alive."""

    def __init__(self, callback: Optional[Callable[[List[Completion]], object]]) -> None:
        self.callback = callback
        self.known: Dict[int, Union[Op, _Posted]] = {}

    def take(self, entries: Any, count: int) -> List[Completion]:
        """Converts entries from C to completions and wakes their awaiters."""
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
    """A queue of completions. The caller polls it, unless there is a `callback`. The library's
    notifier thread calls the callback with a list of completions. The callback must not wait for
    work of the same runtime.

    >>> import kvtier
    >>> with kvtier.Runtime() as runtime, runtime.queue() as queue:
    ...     with runtime.wrap(bytearray(b"kv")) as buffer:
    ...         runtime.post(kvtier.Work.checksum(buffer), queue, tag="mine")
    ...         [(done.tag, done.ok, done.bytes_done) for done in queue.wait(timeout=5)]
    [('mine', True, 2)]
    """

    _type_name = "queue"

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
        """Registers an op before its submit; returns the tag for C."""
        if isinstance(op, Op):
            self._state.known[op._serial] = op
            return op._serial
        serial = next(serials)
        self._state.known[serial] = _Posted(tag)
        return serial

    def _forget(self, serial: int) -> None:
        self._state.known.pop(serial, None)

    def poll(self, max_entries: int = _BATCH) -> List[Completion]:
        """Takes available completions, without waiting."""
        if self._loop is not None:
            self._reject_attached()
        return self._poll(max_entries)

    def _poll(self, max_entries: int) -> List[Completion]:
        # Allocating the array costs as much as the call, so it is reused.
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
        """Waits for the first completion and takes those available; empty after the timeout."""
        self._reject_attached()
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

    def _reject_attached(self) -> None:
        if self._loop is not None:
            raise status_error(_abi.KVT_E_STATE, "the queue is attached to an asyncio loop, which "
                                                 "drains it: await its ops, or call detach first")

    def fileno(self) -> int:
        """Returns a descriptor that is readable exactly while completions are pending. Do not
        read, write or close it."""
        fd = ctypes.c_int32()
        check(lib.kvt_queue_fd(self._raw, byref(fd)))
        return fd.value

    def stats(self) -> QueueStats:
        """Returns counters."""
        stats = _abi.kvt_queue_stats_t()
        check(lib.kvt_queue_stats(self._raw, byref(stats)))
        return QueueStats(stats.capacity, stats.pending, stats.reserved, stats.peak,
                          stats.posted, stats.refused)

    def attach(self, loop: Optional[asyncio.AbstractEventLoop] = None) -> "Queue":
        """Lets a loop (by default the running one) drain the queue, so that its ops can be
        awaited there. Call it in the loop's thread."""
        loop = loop or asyncio.get_running_loop()
        if self._loop is loop:
            return self
        self._reject_attached()
        fd = self.fileno()
        loop.add_reader(fd, self._drain)
        self._loop, self._loop_fd, self._thread = loop, fd, threading.get_ident()
        return self

    def detach(self) -> None:
        """Reverts `attach`. Awaited ops complete only after the queue is attached again, or
        closed."""
        loop, self._loop = self._loop, None
        if loop is None or loop.is_closed():
            return
        removed = threading.Event()
        try:
            if loop.is_running() and threading.get_ident() != self._thread:
                loop.call_soon_threadsafe(_remove_reader, loop, self._loop_fd, removed)
                # The loop must forget the descriptor before it is closed and its number is
                # reused for another file. A loop that stops does not run the call.
                while not removed.wait(_DETACH_POLL_S) and loop.is_running():
                    pass
            _remove_reader(loop, self._loop_fd, removed)
        except RuntimeError:
            if not loop.is_closed():  # a closed loop has no readers
                raise

    def _drain(self) -> None:
        if self._loop is not None and not self.closed:
            self._poll(_BATCH)

    def close(self, timeout: Optional[float] = None) -> None:
        """Closes the queue: cancels its ops and waits for their release. Raises `BusyError` after
        `timeout` seconds; then the call can be repeated."""
        if self.closed:
            return
        end = deadline_after(time.monotonic_ns(), timeout)
        self._raw  # noqa: B018: not in a forked child
        self.detach()
        err = new_error()
        status = lib.kvt_queue_close(byref(self._job.handle), end, byref(err))
        check_err(status, err)
        self._released()
        # The close discards pending completions, so awaiters are woken here.
        for found in list(self._state.known.values()):
            if isinstance(found, Op):
                found._notice_release()
        self._state.known.clear()

    async def aclose(self) -> None:
        """Like `close`, without blocking the loop."""
        self.detach()
        await super().aclose()

    async def __aenter__(self) -> "Queue":
        return self.attach()


def _remove_reader(loop: asyncio.AbstractEventLoop, fd: int, removed: threading.Event) -> None:
    if not removed.is_set():  # the descriptor's number still belongs to the queue
        loop.remove_reader(fd)
        removed.set()


def _deliver(state: _State, entries: Any, count: int) -> None:
    batch = state.take(entries, count)
    assert state.callback is not None
    state.callback(batch)


def _on_batch(number: int, batch: Any, count: int, stride: int) -> None:
    state = _callbacks.find(number)
    if state is None:
        return
    size = ctypes.sizeof(_abi.kvt_completion_t)
    if stride != size:  # a newer library has longer entries
        packed = (_abi.kvt_completion_t * count)()
        base = ctypes.addressof(batch.contents)
        for i in range(count):
            ctypes.memmove(ctypes.byref(packed, i * size), base + i * stride, min(size, stride))
        batch = packed
    _callbacks.call(_deliver, state, batch, count)


on_batch = _abi.kvt_completion_fn(_on_batch)
