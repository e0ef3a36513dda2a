"""What everything that can be closed has in common."""

from __future__ import annotations

import asyncio
import ctypes
import weakref
from typing import Any, Optional, TypeVar

from . import _abi, _reaper
from ._errors import Error
from ._lib import status_error

Self = TypeVar("Self", bound="Resource")


def refuse_fork() -> None:
    """Fails in a forked child before the library, or its memory, is touched."""
    if _reaper.forked():
        raise status_error(_abi.KVT_E_FORKED)


class Resource:
    """An open handle. Close it, use it in a `with`, or let go of it."""

    _noun = "object"
    _job: Any  # a _reaper.Job, of a kind of its own for each
    _finalizer: Any  # a weakref.finalize

    def _own(self, job: _reaper.Job) -> None:
        self._job = job
        self._finalizer = weakref.finalize(self, _reaper.bury, job)
        self._finalizer.atexit = False  # the reaper knows the order

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._job.handle.value

    @property
    def _raw(self) -> Any:
        """The handle, for a call."""
        handle = self._job.handle
        if not handle.value:
            raise self._closed_error()
        if _reaper.in_child:
            refuse_fork()
        return handle

    def _closed_error(self) -> Error:
        return status_error(_abi.KVT_E_CLOSED, f"this {self._noun} is closed")

    def _released(self) -> None:
        """The handle is closed: nothing is left for the finalizer."""
        self._job.handle.value = None
        self._finalizer.detach()
        self._job.done()

    def close(self) -> Any:
        """Closes it; doing so twice is fine."""
        raise NotImplementedError

    def __reduce_ex__(self, _protocol: Any) -> Any:
        # A copy of a handle would be the same object, closed and written to twice.
        raise TypeError(f"a kvtier {self._noun} can be neither copied nor pickled: open another, "
                        "or fork() it where that is offered")

    def __enter__(self: Self) -> Self:
        self._raw  # noqa: B018: a closed one cannot be entered
        return self

    def __exit__(self, *_: object) -> Optional[bool]:
        self.close()
        return None

    def __repr__(self) -> str:
        handle = self._job.handle.value
        state = "closed" if not handle else f"{handle:#x}"
        return f"<kvtier.{type(self).__name__} {state}>"


class Closing(Resource):
    """One whose `close` may wait: `async with` and `aclose` hold no loop up meanwhile."""

    async def aclose(self) -> Any:
        """`close` by another thread. A task that is cancelled meanwhile waits for its end, too:
        only then is memory the program's again."""
        try:
            closing = asyncio.get_running_loop().run_in_executor(None, self.close)
        except RuntimeError:  # the loop ends, and lends no threads any more
            return self.close()
        cancelled: Optional[asyncio.CancelledError] = None
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return closing.result()

    async def __aenter__(self: Self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> Optional[bool]:
        await self.aclose()
        return None


def new_error() -> Any:
    """A place for a call's error, and what to pass for it."""
    return _abi.kvt_error_p()


byref = ctypes.byref
