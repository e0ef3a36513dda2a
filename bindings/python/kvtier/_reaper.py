"""Frees what the program let go of.

A garbage collection can happen anywhere: in a callback, where closing is
refused, or under a lock that a callback wants. So what may wait is closed by a
thread of its own, what is busy is tried again, and at exit runtimes are closed
before Python stops serving callbacks.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from typing import Dict, List, Optional

from . import _abi, _callbacks
from ._lib import lib

#: The order of closing: what stands on something else goes first.
(RANK_OP, RANK_SESSION, RANK_NAMESPACE, RANK_STORE, RANK_BUFFER, RANK_ACCOUNT, RANK_BUDGET,
 RANK_QUEUE, RANK_RUNTIME) = range(9)

_RETRY_S = 0.002
_EXIT_S = 5.0
_SLICE_NS = 50_000_000


class Job:
    """A handle and how to close it. Knows nothing of the Python object above."""

    __slots__ = ("handle", "rank", "__weakref__")
    #: Whether `attempt` never waits and is allowed in callbacks.
    swift = False

    def __init__(self, handle: _abi.Handle, rank: int) -> None:
        self.handle = handle
        self.rank = rank
        _live[id(self)] = self

    def done(self) -> None:
        """The handle is closed."""
        _live.pop(id(self), None)

    def attempt(self) -> int:
        """Closes, waiting shortly if it must; returns the status."""
        raise NotImplementedError


_live: Dict[int, Job] = {}
_inbox: "queue.SimpleQueue[Optional[Job]]" = queue.SimpleQueue()
_thread: Optional[threading.Thread] = None
_start_lock = threading.Lock()
_opened_in: Optional[int] = None
#: Whether Python forked this process off one that had opened the library. Calls look at this
#: alone: who forks behind Python's back is refused by the library.
in_child = False
#: Jobs on their way to being closed, for `flush`.
_buried: Dict[int, Job] = {}


def arm() -> None:
    """Called before the first runtime opens: starts the thread, notes the process."""
    global _thread, _opened_in
    with _start_lock:
        if _opened_in is None:
            _opened_in = os.getpid()
        if _thread is None and _opened_in == os.getpid():
            _thread = threading.Thread(target=_serve, name="kvtier-reaper", daemon=True)
            _thread.start()


def forked() -> bool:
    """Whether this process is a fork of the one that opened the library."""
    return _opened_in is not None and _opened_in != os.getpid()


def _after_fork() -> None:
    global in_child
    in_child = forked()


os.register_at_fork(after_in_child=_after_fork)


def bury(job: Job) -> None:
    """The Python object of a job is gone. Safe wherever a finalizer may run."""
    if not job.handle.value or forked():
        return
    if job.swift and not _callbacks.in_quiet_callback() and _closed(job):
        return
    _buried[id(job)] = job
    _inbox.put(job)


def _closed(job: Job) -> bool:
    # A panic leaves nothing that a retry could free; everything else that is
    # not "later" has no handle behind it any more.
    later = (_abi.KVT_E_BUSY, _abi.KVT_E_REENTRANT, _abi.KVT_E_TIMEOUT)
    try:
        if job.attempt() in later:
            return False
    except BaseException as error:  # noqa: BLE001: a finalizer has no caller
        _callbacks.report(error)
    job.handle.value = None
    job.done()
    _buried.pop(id(job), None)
    return True


def _serve() -> None:
    pending: List[Job] = []
    pause = _RETRY_S
    while True:
        try:
            job = _inbox.get(timeout=pause) if pending else _inbox.get()
            pause = _RETRY_S
            if job is not None:
                pending.append(job)
            while True:
                job = _inbox.get_nowait()
                if job is not None:
                    pending.append(job)
        except queue.Empty:
            pause = min(pause * 2, 0.1)
        job = None
        pending.sort(key=lambda job: job.rank)
        pending = [job for job in pending if not _closed(job)]


def flush(timeout: float = 1.0) -> bool:
    """Waits until all that was let go of is closed; False when time ran out."""
    end = time.monotonic() + timeout
    while _buried:
        if time.monotonic() > end:
            return False
        _inbox.put(None)  # look again now
        time.sleep(0.001)
    return True


def slice_deadline() -> int:
    """A deadline a moment away, for closes that wait."""
    return time.monotonic_ns() + _SLICE_NS


def _at_exit() -> None:
    # Threads of the library must not call into an interpreter that is gone, and
    # they end with their runtimes. Memory stays: exit handlers to come, and
    # threads, may still have views of it.
    if forked():
        return
    lib.kvt_log_set(_abi.KVT_LOG_OFF, _abi.kvt_log_fn(), None, _abi.kvt_destroy_fn(), None)
    end = time.monotonic() + _EXIT_S
    runtimes = [job for job in list(_live.values()) if job.rank == RANK_RUNTIME]
    while runtimes and time.monotonic() < end:
        runtimes = [job for job in runtimes if job.handle.value and not _closed(job)]


atexit.register(_at_exit)
