"""The exception classes: one for each status, all of them `Error`."""

from __future__ import annotations

import builtins
from typing import Dict, Optional, Type

from . import _abi


class Error(Exception):
    """A failed call.

    `status` is the number, `name` the constant's name, `message` the text. `offset` is a position
    in the input text, for errors about a text. `errno` is the operating system's error, if any.
    """

    status: int
    name: str
    message: str
    offset: Optional[int]
    errno: Optional[int]

    def __init__(
        self,
        message: str,
        status: int,
        name: str,
        offset: Optional[int] = None,
        errno: Optional[int] = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.name = name
        self.offset = offset
        self.errno = errno

    def __str__(self) -> str:
        return f"{self.message} [{self.name}]"

    def __reduce__(self) -> tuple[object, ...]:
        # The pickling of plain Exception would pass only the message.
        return type(self), (self.message, self.status, self.name, self.offset, self.errno)


class InvalidError(Error, ValueError):
    """An argument is out of range or has unknown flags."""


class BufferError(InvalidError, builtins.BufferError):  # noqa: A001
    """An object's memory cannot be used directly: it has gaps, is read-only, or is on a
    device."""


class HandleError(Error, ValueError):
    """A handle is stale or of another type."""


class NoMemoryError(Error, builtins.MemoryError):
    """The system is out of memory."""


class BudgetError(Error):
    """The budget of a tier does not have the bytes."""


class AgainError(Error):
    """A bounded queue or table is full: drain it, free handles, and retry."""


class BusyError(Error):
    """The object is in use by work in flight."""


class ClosedError(Error, ValueError):
    """The object is closed or closing."""


class CancelledError(Error):
    """The op was cancelled before its end."""


class TimeoutError(Error, builtins.TimeoutError):  # noqa: A001
    """The deadline passed."""


class ReentrantError(Error, RuntimeError):
    """The call is not allowed inside a callback."""


class ForkedError(Error, RuntimeError):
    """This process is a fork of the one that opened the library."""


class PanicError(Error, RuntimeError):
    """The library caught an internal defect; the object is poisoned."""


class AbiError(Error):
    """The versions of header and library do not match."""


class UnsupportedError(Error, NotImplementedError):
    """The feature is not built into this library."""


class UnavailableError(Error):
    """The feature is not available on this machine."""


class NotFoundError(Error, LookupError):
    """The object does not exist."""


class CorruptError(Error):
    """Bytes do not match their checksum: treat them as missing."""


class IoError(Error, OSError):
    """The operating system reported an error."""


class SpecError(Error, ValueError):
    """A spec string is malformed; `offset` is the position of the error."""


class LimitError(Error, ValueError):
    """A documented limit was exceeded."""


class PinQuotaError(Error, builtins.MemoryError):
    """The locked-memory quota is too small."""


class StateError(Error, RuntimeError):
    """The object is not in a state that allows this."""


class LostError(Error, ConnectionError):
    """The process that serves a shared store is gone."""


CLASSES: Dict[int, Type[Error]] = {
    _abi.KVT_E_INVALID: InvalidError,
    _abi.KVT_E_HANDLE: HandleError,
    _abi.KVT_E_NOMEM: NoMemoryError,
    _abi.KVT_E_BUDGET: BudgetError,
    _abi.KVT_E_AGAIN: AgainError,
    _abi.KVT_E_BUSY: BusyError,
    _abi.KVT_E_CLOSED: ClosedError,
    _abi.KVT_E_CANCELLED: CancelledError,
    _abi.KVT_E_TIMEOUT: TimeoutError,
    _abi.KVT_E_REENTRANT: ReentrantError,
    _abi.KVT_E_FORKED: ForkedError,
    _abi.KVT_E_PANIC: PanicError,
    _abi.KVT_E_ABI: AbiError,
    _abi.KVT_E_UNSUPPORTED: UnsupportedError,
    _abi.KVT_E_UNAVAILABLE: UnavailableError,
    _abi.KVT_E_NOT_FOUND: NotFoundError,
    _abi.KVT_E_CORRUPT: CorruptError,
    _abi.KVT_E_IO: IoError,
    _abi.KVT_E_SPEC: SpecError,
    _abi.KVT_E_LIMIT: LimitError,
    _abi.KVT_E_PIN_QUOTA: PinQuotaError,
    _abi.KVT_E_STATE: StateError,
    _abi.KVT_E_LOST: LostError,
}

NAMES: Dict[int, str] = {
    value: name
    for name, value in vars(_abi).items()
    if name == "KVT_OK" or name.startswith("KVT_E_")
}


def make(status: int, message: str, offset: Optional[int] = None,
         errno: Optional[int] = None) -> Error:
    """Returns the exception of a status; an unknown status gives a plain `Error`."""
    name = NAMES.get(status, "KVT_E_UNKNOWN")
    return CLASSES.get(status, Error)(message, status, name, offset, errno)
