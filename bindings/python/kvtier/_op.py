"""Ops: submitted operations, their progress and their results."""

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

#: The moments of an op.
ISSUED = _abi.KVT_OP_ISSUED
RESOLVED = _abi.KVT_OP_RESOLVED
RELEASED = _abi.KVT_OP_RELEASED

# The longest single wait inside C, so that Python can handle Ctrl-C in between.
_SLICE_NS = 200_000_000

serials = itertools.count(1)
_bind_lock = threading.Lock()


class OpInfo(NamedTuple):
    """The state and progress of an op."""

    state: int
    status: int
    items: int
    items_done: int
    items_failed: int
    bytes_done: int
    value: int = 0

    @property
    def resolved(self) -> bool:
        """Whether the result is known."""
        return bool(self.state & RESOLVED)

    @property
    def released(self) -> bool:
        """Whether the caller owns the memory again."""
        return bool(self.state & RELEASED)


class ItemOutcome(NamedTuple):
    """The outcome of one item of an op."""

    value: int
    status: int
    done: bool


class Result(NamedTuple):
    """The result of a successful op: the first item's value and the processed bytes. The value is
    a checksum or 0; for a session's transfer it is the number of tokens."""

    value: int
    bytes_done: int


class OpJob(_reaper.Job):
    """Frees an op. Work in flight finishes first, because the library owns its memory."""

    __slots__ = ("cancel", "kept")
    nonblocking = True

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
    """A submitted operation. It completes exactly once: *resolved* when its result is known,
    *released* when the library no longer touches the caller's memory.

    Wait for it with `wait` or `result`, or `await` it if its queue is attached to the running
    loop.

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

    _type_name = "op"

    def __init__(self, runtime: "Runtime", queue: "Optional[Queue]", tag: object,
                 cancel_when_dropped: bool) -> None:
        self._runtime = runtime
        self._queue = queue
        self._serial = next(serials)
        #: The caller's object from the submit.
        self.tag = tag
        self._bound = False
        self._known_released = False
        self._waiters: List["asyncio.Future[None]"] = []
        self._own(OpJob(_abi.kvt_op_p(), cancel_when_dropped))

    def _bind(self, handle: Optional[int]) -> None:
        # A callback may see the op, and even free it, before its submit returns. Only the first
        # call with the handle sets it.
        with _bind_lock:
            if handle and not self._bound:
                self._bound = True
                self._job.handle.value = handle

    def _keep(self, kept: Sequence[Any]) -> None:
        """Keeps objects until the op is freed, even if this Python object is dropped."""
        job = self._job
        assert isinstance(job, OpJob)
        job.kept = kept

    def _submit_failed(self) -> None:
        """Cleans up after a submit that created no op, so that nothing uses the kept objects.

        The finalizer cannot do this: after an exception between the call and `_bind`, C still
        uses the objects."""
        if self._queue is not None:
            self._queue._forget(self._serial)
        self._job.done()

    def info(self) -> OpInfo:
        """Returns state and progress, without waiting."""
        info = _abi.kvt_op_info_t()
        check(lib.kvt_op_info(self._raw, byref(info)))
        return OpInfo(info.state, info.status, info.items, info.items_done,
                      info.items_failed, info.bytes_done, info.value)

    def wait(self, timeout: Optional[float] = None, moments: int = RELEASED) -> bool:
        """Waits for moments, by default the release; returns False after the timeout."""
        end = deadline_after(time.monotonic_ns(), timeout)
        while True:
            now = time.monotonic_ns()
            until = now + _SLICE_NS if end == 0 else min(now + _SLICE_NS, end)
            status = lib.kvt_op_wait(self._raw, moments, until)
            if status == _abi.KVT_OK:
                if moments & RELEASED:
                    self._known_released = True
                return True
            if status != _abi.KVT_E_TIMEOUT:
                check(status)
            if end and time.monotonic_ns() >= end:
                return False

    def result(self, timeout: Optional[float] = None) -> Result:
        """Waits for the release; returns the result, or raises the op's error."""
        if not self.wait(timeout):
            raise status_error(_abi.KVT_E_TIMEOUT, f"the op was not released within {timeout} s: "
                                                   "wait again, or cancel it")
        return self._outcome()

    def _outcome(self) -> Result:
        info = self.info()
        error = self._error_of(info)
        if error:
            raise error
        return Result(info.value, info.bytes_done)

    def error(self) -> Optional[Error]:
        """Returns the op's error; None if it succeeded or is not resolved."""
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
        """Returns the outcomes of items, also while the op runs."""
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
        """Returns the indexes of items that failed or are not done."""
        info = self.info()
        if info.items_done == info.items and info.items_failed == 0:
            return []
        return [at for at, item in enumerate(self.items(0, info.items))
                if item.status != _abi.KVT_OK or not item.done]

    def cancel(self) -> None:
        """Requests cancellation. The library owns the memory until the release."""
        check(lib.kvt_op_cancel(self._raw))

    def close(self) -> None:
        """Frees the op; raises `BusyError` before its release."""
        if self.closed:
            return
        self._raw  # noqa: B018: not in a forked child
        check(lib.kvt_op_free(byref(self._job.handle)))
        self._released()

    def __exit__(self, *_: object) -> None:
        # After the block no code uses the result, and the caller may use the memory.
        if not self.closed:
            if not self._known_released:
                self.cancel()
                self.wait()
            self.close()

    def _notice_release(self) -> None:
        self._known_released = True
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
        while not self._known_released:
            waiter: "asyncio.Future[None]" = loop.create_future()
            self._waiters.append(waiter)
            if self._known_released:  # another thread noticed the release in between
                break
            try:
                await waiter
            except asyncio.CancelledError as error:
                # The library owns the memory until the release. A cancelled task therefore waits
                # for the release, which the cancellation of the op accelerates.
                cancelled = error
                self.cancel()
        if cancelled is not None:
            raise cancelled

    def __await__(self) -> Generator[Any, None, Result]:
        if not (self._known_released or self.info().released):
            yield from self._wait_released().__await__()
        return self._outcome()


def _finish(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
