"""The base classes of objects with a handle that can be closed."""

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
    """Raises `ForkedError` in a forked child, before it touches the library or its memory."""
    if _reaper.forked():
        raise status_error(_abi.KVT_E_FORKED)


class Resource:
    """An open handle. It is closed by `close`, by the end of a `with` block, or when it is
    dropped."""

    _type_name = "object"
    _job: Any  # an instance of a subclass of _reaper.Job
    _finalizer: Any  # a weakref.finalize

    def _own(self, job: _reaper.Job) -> None:
        self._job = job
        self._finalizer = weakref.finalize(self, _reaper.close_later, job)
        self._finalizer.atexit = False  # the reaper closes in the right order at exit

    @property
    def closed(self) -> bool:
        """Whether the object was closed."""
        return not self._job.handle.value

    @property
    def _raw(self) -> Any:
        """The handle for a call; raises if it is closed, or in a forked child."""
        handle = self._job.handle
        if not handle.value:
            raise self._closed_error()
        if _reaper.in_child:
            refuse_fork()
        return handle

    def _closed_error(self) -> Error:
        return status_error(_abi.KVT_E_CLOSED, f"this {self._type_name} is closed")

    def _released(self) -> None:
        """Marks the handle as closed, and detaches the finalizer."""
        self._job.handle.value = None
        self._finalizer.detach()
        self._job.done()

    def close(self) -> Any:
        """Closes the object. A second call has no effect."""
        raise NotImplementedError

    def __reduce_ex__(self, _protocol: Any) -> Any:
        # A copy would share the handle: both would close it.
        raise TypeError(f"a kvtier {self._type_name} can be neither copied nor pickled: open another "
                        "one, or call fork() if it has this method")

    def __enter__(self: Self) -> Self:
        self._raw  # noqa: B018: raises if closed
        return self

    def __exit__(self, *_: object) -> Optional[bool]:
        self.close()
        return None

    def __repr__(self) -> str:
        handle = self._job.handle.value
        state = "closed" if not handle else f"{handle:#x}"
        return f"<kvtier.{type(self).__name__} {state}>"


class Closing(Resource):
    """An object whose `close` may wait. `async with` and `aclose` do not block the loop."""

    async def aclose(self) -> Any:
        """Calls `close` on another thread. A cancelled task still waits for the end of the close:
        only then does the caller own its memory again."""
        try:
            closing = asyncio.get_running_loop().run_in_executor(None, self.close)
        except RuntimeError:  # the loop's executor is shut down
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
    """Returns an empty error handle, for the error of a call."""
    return _abi.kvt_error_p()


byref = ctypes.byref
