"""Operations: what was submitted, how far it is, how it ended."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any, Generator, List, NamedTuple, Optional, Sequence

from . import _abi, _reaper
from ._errors import Error
from ._lib import check, deadline_after, lib, status_error, take_error
from ._resource import Resource, byref, new_error

if TYPE_CHECKING:
    from ._queue import Queue
    from ._runtime import Runtime

#: Moments of an op.
ISSUED = _abi.KVT_OP_ISSUED
RESOLVED = _abi.KVT_OP_RESOLVED
RELEASED = _abi.KVT_OP_RELEASED

# C is waited in for so long at a time, so that Ctrl-C is heard.
_SLICE_NS = 200_000_000

serials = itertools.count(1)
_bind_lock = threading.Lock()


class OpInfo(NamedTuple):
    """How far an op is."""

    state: int
    status: int
    items: int
    items_done: int
    items_failed: int
    bytes_done: int
    value: int = 0

    @property
    def resolved(self) -> bool:
        """The result is known."""
        return bool(self.state & RESOLVED)

    @property
    def released(self) -> bool:
        """The memory is the program's again."""
        return bool(self.state & RELEASED)


class ItemOutcome(NamedTuple):
    """How one item of an op went."""

    value: int
    status: int
    done: bool


class Result(NamedTuple):
    """What an op that succeeded brought: the first item's value (a checksum,
    or 0; of a move of a session its tokens) and the bytes that were handled."""

    value: int
    bytes_done: int


class OpJob(_reaper.Job):
    """Frees an op. Work underway is let finish: its memory is the library's."""

    __slots__ = ("cancel", "kept")
    swift = True

    def __init__(self, handle: _abi.kvt_op_p, cancel: bool) -> None:
        super().__init__(handle, _reaper.RANK_OP)
        self.cancel = cancel
        self.kept: Sequence[Any] = ()

    def done(self) -> None:
        self.kept = ()
        super().done()

    def attempt(self) -> int:
        if self.cancel:
            lib.kvt_op_cancel(self.handle)
        return int(lib.kvt_op_free(byref(self.handle)))


class Op(Resource):
    """A submitted operation. It completes exactly once: *resolved* when its
    result is known, *released* when the library lets go of the memory.

    Wait for it with `wait` or `result`, or `await` it where its queue is
    attached to the running loop.

    >>> import asyncio, kvtier
    >>> async def main(runtime, work):
    ...     with runtime.queue() as queue:
    ...         queue.attach()                         # to the loop that runs
    ...         return (await runtime.submit(work, queue=queue)).bytes_done
    >>> with kvtier.Runtime() as runtime, runtime.buffer(8192) as buffer:
    ...     work = kvtier.Work.prefault(buffer)
    ...     runtime.submit(work).result().bytes_done, asyncio.run(main(runtime, work))
    (8192, 8192)
    """

    _noun = "op"

    def __init__(self, runtime: "Runtime", queue: "Optional[Queue]", tag: object,
                 cancel_when_dropped: bool) -> None:
        self._runtime = runtime
        self._queue = queue
        self._serial = next(serials)
        #: The program's own object, given when it was submitted.
        self.tag = tag
        self._bound = False
        self._gone = False  # it is known to be released
        self._waiters: List["asyncio.Future[None]"] = []
        self._own(OpJob(_abi.kvt_op_p(), cancel_when_dropped))

    def _bind(self, handle: Optional[int]) -> None:
        # A callback may see the op, and even free it, before the submit that
        # made it returns: only the first to know the handle sets it.
        with _bind_lock:
            if handle and not self._bound:
                self._bound = True
                self._job.handle.value = handle

    def _keep(self, kept: Sequence[Any]) -> None:
        """Memory that must stay until the op is freed, whatever becomes of this object."""
        job = self._job
        assert isinstance(job, OpJob)
        job.kept = kept

    def _refused(self) -> None:
        """C made no op: nobody uses what was kept for it. (Not the finalizer's to say: where an
        exception came between the call and `_bind`, C still does.)"""
        if self._queue is not None:
            self._queue._forget(self._serial)
        self._job.done()

    def info(self) -> OpInfo:
        """How far it is, without waiting."""
        info = _abi.kvt_op_info_t()
        check(lib.kvt_op_info(self._raw, byref(info)))
        return OpInfo(info.state, info.status, info.items, info.items_done,
                      info.items_failed, info.bytes_done, info.value)

    def wait(self, timeout: Optional[float] = None, moments: int = RELEASED) -> bool:
        """Waits for moments (by default the release); False when time ran out."""
        end = deadline_after(time.monotonic_ns(), timeout)
        while True:
            now = time.monotonic_ns()
            until = now + _SLICE_NS if end == 0 else min(now + _SLICE_NS, end)
            status = lib.kvt_op_wait(self._raw, moments, until)
            if status == _abi.KVT_OK:
                if moments & RELEASED:
                    self._gone = True
                return True
            if status != _abi.KVT_E_TIMEOUT:
                check(status)
            if end and time.monotonic_ns() >= end:
                return False

    def result(self, timeout: Optional[float] = None) -> Result:
        """Waits for the release; what it brought, or its error."""
        if not self.wait(timeout):
            raise status_error(_abi.KVT_E_TIMEOUT, "the op is not done yet")
        return self._outcome()

    def _outcome(self) -> Result:
        info = self.info()
        error = self._error_of(info)
        if error:
            raise error
        return Result(info.value, info.bytes_done)

    def error(self) -> Optional[Error]:
        """Its error; None when it succeeded or is not resolved."""
        info = self.info()
        return self._error_of(info) if info.resolved else None

    def _error_of(self, info: OpInfo) -> Optional[Error]:
        if info.status == _abi.KVT_OK:
            return None
        err = new_error()
        if lib.kvt_op_error(self._raw, byref(err)) == _abi.KVT_OK:
            return take_error(info.status, err)
        return status_error(info.status)

    def items(self, first: int = 0, count: Optional[int] = None) -> List[ItemOutcome]:
        """How its items went; also while it runs."""
        if count is None:
            count = max(0, self.info().items - first)
        if count == 0:
            return []
        room = (_abi.kvt_op_item_t * count)()
        got = ctypes.c_uint64()
        stride = ctypes.sizeof(_abi.kvt_op_item_t)
        check(lib.kvt_op_items(self._raw, first, room, count, stride, byref(got)))
        return [ItemOutcome(i.value, i.status, bool(i.done)) for i in room[: got.value]]

    def failed(self) -> List[int]:
        """Which items did not go well, or are not done; empty when all is well."""
        info = self.info()
        if info.items_done == info.items and info.items_failed == 0:
            return []
        return [at for at, item in enumerate(self.items(0, info.items))
                if item.status != _abi.KVT_OK or not item.done]

    def cancel(self) -> None:
        """Asks it to end. Its memory is still the library's until the release."""
        check(lib.kvt_op_cancel(self._raw))

    def close(self) -> None:
        """Frees it; `BusyError` before the release."""
        if self.closed:
            return
        self._raw  # noqa: B018: not in a forked child
        check(lib.kvt_op_free(byref(self._job.handle)))
        self._released()

    def __exit__(self, *_: object) -> None:
        # Leaving the block means nobody wants it any more; the memory must be
        # free to use afterwards.
        if not self.closed:
            if not self._gone:
                self.cancel()
                self.wait()
            self.close()

    def _notice_release(self) -> None:
        self._gone = True
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            loop = waiter.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_finish, waiter)

    async def _wait_released(self) -> None:
        queue = self._queue
        loop = asyncio.get_running_loop()
        if queue is None or queue._loop is not loop:
            raise RuntimeError("to await an op, submit it with a queue that is attached "
                               "to the running loop: queue.attach()")
        cancelled: Optional[asyncio.CancelledError] = None
        while not self._gone:
            waiter: "asyncio.Future[None]" = loop.create_future()
            self._waiters.append(waiter)
            if self._gone:  # told by another thread in between
                break
            try:
                await waiter
            except asyncio.CancelledError as error:
                # The memory is the library's until the release, so a cancelled
                # task still waits for that; the cancel makes it come soon.
                cancelled = error
                self.cancel()
        if cancelled is not None:
            raise cancelled

    def __await__(self) -> Generator[Any, None, Result]:
        if not (self._gone or self.info().released):
            yield from self._wait_released().__await__()
        return self._outcome()


def _finish(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
