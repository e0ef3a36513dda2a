"""The engine's word that its memory may be touched."""

from __future__ import annotations

import ctypes

from . import _abi, _reaper
from ._lib import check, check_err, lib
from ._resource import Resource, byref, new_error


class EventJob(_reaper.Job):
    """Closes an event."""

    __slots__ = ()
    swift = True

    def attempt(self) -> int:
        return int(lib.kvt_ready_event_close(byref(self.handle)))


class Event(Resource):
    """A moment that comes once: memory is ready. Moves that were given it (`ready=`) do
    not begin before. Closed or dropped without a `signal`, those moves end with
    `CancelledError`. Needs no runtime; any thread may use it, also in callbacks.

    >>> import kvtier
    >>> with kvtier.Event() as ready:
    ...     ready.signal()
    ...     ready.is_signalled
    True
    """

    _noun = "event"

    def __init__(self) -> None:
        handle, err = _abi.kvt_event_p(), new_error()
        check_err(lib.kvt_ready_event_open(0, byref(handle), byref(err)), err)
        self._own(EventJob(handle, _reaper.RANK_OP))

    def signal(self) -> None:
        """It has come, for good."""
        check(lib.kvt_ready_event_signal(self._raw))

    @property
    def is_signalled(self) -> bool:
        """Whether it has come."""
        state = ctypes.c_uint32()
        check(lib.kvt_ready_event_query(self._raw, byref(state)))
        return bool(state.value == _abi.KVT_READY_EVENT_SIGNALLED)

    def close(self) -> None:
        """Closes it."""
        if self.closed:
            return
        self._raw  # noqa: B018: not in a forked child
        check(lib.kvt_ready_event_close(byref(self._job.handle)))
        self._released()
