"""Finds and loads the shared library, and converts statuses to exceptions."""

from __future__ import annotations

import ctypes
import math
import operator
import os
from pathlib import Path
from typing import Any, List, Optional

from . import _abi
from ._errors import Error, make

NO_OFFSET = 2**64 - 1
NO_DEADLINE = 0


def _candidates() -> List[str]:
    named = os.environ.get("KVTIER_LIBRARY")
    if named:
        return [named]  # no fallback: a named library must be the one that is used
    packaged = Path(__file__).parent / "lib" / "libkvtier.so"
    if packaged.exists():
        return [str(packaged)]
    major, minor = _abi.KVT_VERSION_MAJOR, _abi.KVT_VERSION_MINOR
    version = f"{major}.{minor}" if major == 0 else f"{major}"
    return [f"libkvtier.so.{version}", "libkvtier.so"]


def _load() -> ctypes.CDLL:
    reasons = []
    for name in _candidates():
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
            continue
        try:
            _abi.bind(library)
        except AttributeError as error:
            raise make(_abi.KVT_E_ABI, f"{name} lacks a function of this package's header: "
                                       f"{error}; install the library of the same version"
                       ) from error
        return library
    tried = "; ".join(reasons)
    raise ImportError("the kvtier library was not found; set KVTIER_LIBRARY to its path. Tried: "
                      f"{tried}")


lib = _load()


def quick(name: str) -> Any:
    """Returns a function for frequent calls, whose pointer arguments are not type-checked. The
    check takes a third of such a call."""
    function = lib[name]
    restype, argtypes = _abi.FUNCTIONS[name]
    function.restype = restype
    function.argtypes = tuple(
        ctypes.c_void_p if issubclass(kind, (ctypes._Pointer, ctypes.c_void_p)) else kind
        for kind in argtypes)
    return function


def take_error(status: int, err: _abi.kvt_error_p) -> Error:
    """Returns the exception of a failed call; frees the C error."""
    if not err.value:
        text = lib.kvt_status_str(status).decode("utf-8", "replace")
        return make(status, text)
    info = _abi.kvt_error_info_t()
    try:
        if lib.kvt_error_info(err, ctypes.byref(info)) != _abi.KVT_OK:
            return make(status, lib.kvt_status_str(status).decode("utf-8", "replace"))
        text = ctypes.string_at(info.message, info.message_bytes).decode("utf-8", "replace")
        offset: Optional[int] = None if info.offset == NO_OFFSET else int(info.offset)
        return make(status, text, offset, info.os_errno or None)
    finally:
        lib.kvt_error_free(ctypes.byref(err))


def check(status: int) -> None:
    """Raises the exception of a failed status."""
    if status != _abi.KVT_OK:
        raise take_error(status, _abi.kvt_error_p())


def check_err(status: int, err: _abi.kvt_error_p) -> None:
    """Like `check`, with the message of the call's own error."""
    if status != _abi.KVT_OK:
        raise take_error(status, err)


def status_error(status: int, message: Optional[str] = None) -> Error:
    """Returns the exception of a status, by default with the library's text for it."""
    return make(status, message or lib.kvt_status_str(status).decode("utf-8", "replace"))


def deadline_after(now_ns: int, timeout: Optional[float]) -> int:
    """Returns a deadline `timeout` seconds after `now_ns`; None and infinity give no deadline."""
    if timeout is None:
        return NO_DEADLINE
    if math.isnan(timeout):
        raise ValueError("timeout is NaN: give seconds, or None for no deadline")
    if timeout == math.inf:
        return NO_DEADLINE
    # At least 1: 0 would mean no deadline.
    return max(1, min(now_ns + max(0, int(timeout * 1e9)), 2**64 - 1))


def u64(value: int, bits: int = 64) -> int:
    """Returns an integer for C, checked against its range. ctypes would truncate it silently."""
    number = operator.index(value)
    if not 0 <= number < 1 << bits:
        raise make(_abi.KVT_E_INVALID, f"{number} is out of range: it must be an unsigned "
                                       f"{bits}-bit integer")
    return number


def u32(value: int) -> int:
    """Like `u64`, with 32 bits."""
    return u64(value, 32)


def text_pointer(data: bytes, empty_is_none: bool = False) -> Any:
    """Returns bytes for a struct field, which keeps them alive. The library rejects a text that
    is present but empty."""
    if empty_is_none and not data:
        return None
    return ctypes.cast(ctypes.c_char_p(data), ctypes.POINTER(ctypes.c_char))


def _check_abi() -> None:
    err = _abi.kvt_error_p()
    check_err(lib.kvt_abi_check(_abi.KVT_HEADER_VERSION, ctypes.byref(err)), err)


_check_abi()
