"""Ready events: an engine signals that the library may access its memory."""

from __future__ import annotations

import ctypes

from . import _abi, _reaper
from ._lib import check, check_err, lib
from ._resource import Resource, byref, new_error


class EventJob(_reaper.Job):
    """Closes an event."""

    __slots__ = ()
    nonblocking = True

    def attempt(self) -> int:
        return int(lib.kvt_ready_event_close(byref(self.handle)))


class ReadyEvent(Resource):
    """A ready event, signalled once: a transfer with `ready=event` begins after the signal.

    If the event is closed or dropped without a signal, its transfers end with `CancelledError`.
    An event needs no runtime. Any thread may use it, also in callbacks.

    >>> import kvtier
    >>> with kvtier.ReadyEvent() as ready:
    ...     ready.signal()
    ...     ready.is_signalled
    True
    """

    _type_name = "event"

    def __init__(self) -> None:
        handle, err = _abi.kvt_ready_event_p(), new_error()
        check_err(lib.kvt_ready_event_open(0, byref(handle), byref(err)), err)
        self._own(EventJob(handle, _reaper.RANK_OP))

    def signal(self) -> None:
        """Signals the event; it stays signalled."""
        check(lib.kvt_ready_event_signal(self._raw))

    @property
    def is_signalled(self) -> bool:
        """Whether the event was signalled."""
        state = ctypes.c_uint32()
        check(lib.kvt_ready_event_query(self._raw, byref(state)))
        return bool(state.value == _abi.KVT_READY_EVENT_SIGNALLED)

    def close(self) -> None:
        """Closes the event."""
        if self.closed:
            return
        self._raw  # noqa: B018: not in a forked child
        check(lib.kvt_ready_event_close(byref(self._job.handle)))
        self._released()
