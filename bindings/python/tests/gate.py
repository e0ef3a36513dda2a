"""A gate: memory that a worker cannot read before the test opens the gate.

An op whose first item reads the gate begins and then blocks. The worker faults on the page, and
the fault handler waits for the test. The op therefore runs as long as the test needs, on a machine
of any speed.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import threading
import time
from typing import Any, Callable, List

import kvtier
from kvtier import Work

#: A longer wait is a hang. No test asserts a shorter time.
HANG_S = 600.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_NONE, _READ_WRITE = 0, 3
_SA_SIGINFO = 4
_ADDRESS_AT = 16  # si_addr in siginfo_t, on 64-bit Linux
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """`struct sigaction` of 64-bit Linux."""
    _fields_ = [("handler", ctypes.c_void_p), ("mask", ctypes.c_uint8 * 128),
                ("flags", ctypes.c_int), ("restorer", ctypes.c_void_p)]


def until(holds: Callable[[], Any]) -> None:
    """Waits until `holds` returns true."""
    end = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < end, f"the condition was not true within {HANG_S} s"
        time.sleep(0.0005)


def until_issued(op: kvtier.Op) -> None:
    until(lambda: op.info().state & kvtier.ISSUED)


def released(op: kvtier.Op) -> bool:
    return op.info().released


class Gate:
    """Closed until `open`. The event `entered` is set once a worker blocks at the gate."""

    _closed: List["Gate"] = []

    def __init__(self, runtime: kvtier.Runtime) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.entered, self._opened = threading.Event(), threading.Event()
        self.buffer = runtime.wrap(self._memory)
        self._protect(_NONE)
        self._closed.append(self)

    def _protect(self, how: int) -> None:
        assert _libc.mprotect(self._first, mmap.PAGESIZE, how) == 0

    @property
    def work(self) -> Work:
        """An item of work that blocks at the gate."""
        return Work.checksum(self.buffer)

    def until_entered(self) -> None:
        assert self.entered.wait(HANG_S)

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        """Opens the gate, and releases its memory."""
        self.open()
        self.buffer.close()
        self._closed.remove(self)
        self._protect(_READ_WRITE)

    def __enter__(self) -> "Gate":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _fault(number: int, info: int, context: int) -> None:
    """Runs in the worker that reads the page. The fault is synchronous, and the worker holds no
    lock while it reads a buffer, so the handler may run Python like a callback."""
    at = ctypes.c_uint64.from_address(info + _ADDRESS_AT).value
    for gate in list(Gate._closed):
        if gate._first <= at < gate._first + mmap.PAGESIZE:
            gate.entered.set()
            gate._opened.wait(HANG_S)
            gate._protect(_READ_WRITE)
            return
    _libc.sigaction(number, ctypes.byref(_before), None)  # any other fault ends the program


_handler = _Handler(_fault)
_before = _Action()


class handled:
    """Handles the faults of gates inside the `with` block."""

    def __enter__(self) -> None:
        action = _Action(handler=ctypes.cast(_handler, ctypes.c_void_p), flags=_SA_SIGINFO)
        assert _libc.sigaction(signal.SIGSEGV, ctypes.byref(action), ctypes.byref(_before)) == 0

    def __exit__(self, *_: Any) -> None:
        assert _libc.sigaction(signal.SIGSEGV, ctypes.byref(_before), None) == 0
