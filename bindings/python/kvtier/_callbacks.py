"""Callbacks: C gets a few fixed functions and a number, never a Python object.

The functions live as long as the module, so none is freed while C executes it. The number
identifies the Python callable and is forgotten when C calls destroy.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import traceback
from typing import Any, Callable, Dict, NoReturn, Optional

from . import _abi

_registry: Dict[int, Any] = {}
_numbers = itertools.count(1)
_inside = threading.local()


def register(target: Any) -> int:
    """Registers an object and returns its number, for C's user_data."""
    number = next(_numbers)
    _registry[number] = target
    return number


def find(number: int) -> Any:
    """Returns the object of a number; None after C released the number."""
    return _registry.get(number)


def forget(number: int) -> Any:
    """Releases a number and returns its object."""
    return _registry.pop(number, None)


def live() -> int:
    """Returns how many numbers C still holds."""
    return len(_registry)


def in_restricted_callback() -> bool:
    """Whether this thread is in a callback that must not call the library."""
    return getattr(_inside, "restricted", 0) > 0


class Restricted:
    """Marks a callback that must not call the library, not even to free a handle."""

    def __enter__(self) -> None:
        _inside.restricted = getattr(_inside, "restricted", 0) + 1

    def __exit__(self, *_: object) -> None:
        _inside.restricted -= 1


def _raise(error: BaseException) -> NoReturn:
    raise error


_raise_in_callback = ctypes.CFUNCTYPE(None, ctypes.py_object)(_raise)


def report(error: BaseException) -> None:
    """Passes an exception to sys.unraisablehook.

    ctypes calls the hook for an exception that leaves a callback. Python code cannot create the
    hook's argument itself.
    """
    _raise_in_callback(error)


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a user's function and reports its exception; returns None if it raised."""
    try:
        return function(*args)
    except BaseException as error:  # noqa: BLE001: no exception may cross into C
        report(error)
        return None


def call_and_keep(function: Callable[..., Any], *args: Any) -> Any:
    """Like `call`, but keeps the exception for the library call that is under way on this
    thread. The caller of that library call must end it with `take_raised`."""
    try:
        return function(*args)
    except BaseException as error:  # noqa: BLE001: no exception may cross into C
        # The views in the frames end with the callback, but the traceback stays.
        traceback.clear_frames(error.__traceback__)
        _inside.raised = error
        return None


def raised() -> Optional[BaseException]:
    """Returns the exception that `call_and_keep` kept on this thread."""
    error: Optional[BaseException] = getattr(_inside, "raised", None)
    return error


def take_raised() -> Optional[BaseException]:
    """Returns the exception that `call_and_keep` kept on this thread, and forgets it."""
    error = raised()
    _inside.raised = None
    return error


def _destroy(number: int) -> None:
    forget(number)


#: C calls this function once when it releases a number.
on_destroy = _abi.kvt_destroy_fn(_destroy)
