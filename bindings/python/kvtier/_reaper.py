"""Closes the handles of dropped Python objects.

A garbage collection can happen anywhere: in a callback, where closing is rejected, or while a
lock is held that a callback needs. A thread of the package therefore performs closes that may
wait, and repeats those that are busy. At exit, runtimes are closed before Python stops serving
callbacks.
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

#: The order of closing: objects close before the objects that they depend on.
(RANK_OP, RANK_SESSION, RANK_NAMESPACE, RANK_STORE, RANK_BUFFER, RANK_ACCOUNT, RANK_BUDGET,
 RANK_QUEUE, RANK_RUNTIME) = range(9)

_RETRY_S = 0.002
_EXIT_S = 5.0
_SLICE_NS = 50_000_000


class Job:
    """A handle and how to close it. It does not reference the Python object of the handle."""

    __slots__ = ("handle", "rank", "__weakref__")
    #: Whether `attempt` never waits and is allowed in callbacks.
    nonblocking = False

    def __init__(self, handle: _abi.Handle, rank: int) -> None:
        self.handle = handle
        self.rank = rank
        _live[id(self)] = self

    def done(self) -> None:
        """Called after the handle was closed."""
        _live.pop(id(self), None)

    def attempt(self) -> int:
        """Tries to close the handle, with a short wait if necessary; returns the status."""
        raise NotImplementedError


_live: Dict[int, Job] = {}
_inbox: "queue.SimpleQueue[Optional[Job]]" = queue.SimpleQueue()
_thread: Optional[threading.Thread] = None
_start_lock = threading.Lock()
_opened_in: Optional[int] = None
#: Whether this process is a fork by Python of one that had opened the library. Calls check only
#: this flag; the library itself rejects calls after a fork outside of Python.
in_child = False
#: Jobs that wait for the thread, for `flush`.
_waiting: Dict[int, Job] = {}


def arm() -> None:
    """Starts the thread and records the process. Called before the first handle is opened."""
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


def close_later(job: Job) -> None:
    """Closes the job of a dropped Python object. Safe wherever a finalizer may run."""
    if not job.handle.value or forked():
        return
    if job.nonblocking and not _callbacks.in_restricted_callback() and _try_close(job):
        return
    _waiting[id(job)] = job
    _inbox.put(job)


def _try_close(job: Job) -> bool:
    # After any other status the handle is closed; after a panic a retry could free nothing.
    retry = (_abi.KVT_E_BUSY, _abi.KVT_E_REENTRANT, _abi.KVT_E_TIMEOUT)
    try:
        if job.attempt() in retry:
            return False
    except BaseException as error:  # noqa: BLE001: a finalizer has no caller
        _callbacks.report(error)
    job.handle.value = None
    job.done()
    _waiting.pop(id(job), None)
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
        pending = [job for job in pending if not _try_close(job)]


def flush(timeout: float = 1.0) -> bool:
    """Waits until the handles of all dropped objects are closed; False after the timeout."""
    end = time.monotonic() + timeout
    while _waiting:
        if time.monotonic() > end:
            return False
        _inbox.put(None)  # makes the thread retry now
        time.sleep(0.001)
    return True


def slice_deadline() -> int:
    """Returns a deadline 50 ms away, for closes that wait."""
    return time.monotonic_ns() + _SLICE_NS


def _at_exit() -> None:
    # Threads of the library must not call into a finalized interpreter, and they end with their
    # runtimes. Buffers stay: later exit handlers, and threads, may still have views of them.
    if forked():
        return
    lib.kvt_log_set(_abi.KVT_LOG_OFF, _abi.kvt_log_fn(), None, _abi.kvt_destroy_fn(), None)
    end = time.monotonic() + _EXIT_S
    runtimes = [job for job in list(_live.values()) if job.rank == RANK_RUNTIME]
    while runtimes and time.monotonic() < end:
        runtimes = [job for job in runtimes if job.handle.value and not _try_close(job)]


atexit.register(_at_exit)
