"""Callbacks: C gets a few fixed functions and a number, never a Python object.

The functions live as long as the module, so that none is freed while C is in
it; the number finds the Python callable and is forgotten when C calls destroy.
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
    """A number for C's user_data."""
    number = next(_numbers)
    _registry[number] = target
    return number


def find(number: int) -> Any:
    """What a number stands for; None when C has given it up."""
    return _registry.get(number)


def forget(number: int) -> Any:
    """Gives a number up."""
    return _registry.pop(number, None)


def live() -> int:
    """How many numbers C still holds."""
    return len(_registry)


def in_quiet_callback() -> bool:
    """Whether this thread is in a callback that must not call the library."""
    return getattr(_inside, "quiet", 0) > 0


class Quiet:
    """Marks a callback that must not call the library, not even to free."""

    def __enter__(self) -> None:
        _inside.quiet = getattr(_inside, "quiet", 0) + 1

    def __exit__(self, *_: object) -> None:
        _inside.quiet -= 1


def _raise(error: BaseException) -> NoReturn:
    raise error


_raise_in_callback = ctypes.CFUNCTYPE(None, ctypes.py_object)(_raise)


def report(error: BaseException) -> None:
    """Hands an exception to sys.unraisablehook.

    ctypes does that with what leaves a callback; the type of the hook's
    argument cannot be made from Python.
    """
    _raise_in_callback(error)


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a user's function; no exception leaves. None when it raised."""
    try:
        return function(*args)
    except BaseException as error:  # noqa: BLE001: nothing may cross into C
        report(error)
        return None


def call_and_keep(function: Callable[..., Any], *args: Any) -> Any:
    """Like `call`, but what was raised is kept for the call that is under way on
    this thread, which must end by `take_raised`."""
    try:
        return function(*args)
    except BaseException as error:  # noqa: BLE001: nothing may cross into C
        # What they looked at ends with the callback, the traceback does not.
        traceback.clear_frames(error.__traceback__)
        _inside.raised = error
        return None


def raised() -> Optional[BaseException]:
    """What `call_and_keep` keeps on this thread."""
    error: Optional[BaseException] = getattr(_inside, "raised", None)
    return error


def take_raised() -> Optional[BaseException]:
    """What `call_and_keep` kept on this thread, once."""
    error = raised()
    _inside.raised = None
    return error


def _destroy(number: int) -> None:
    forget(number)


#: C calls it once when it has given a number up.
on_destroy = _abi.kvt_destroy_fn(_destroy)
