"""Fails tests that leave handles or callbacks of the library open. The `conftest.py` of each
binding imports `no_handles_left` and `pytest_runtest_makereport` from here."""

from __future__ import annotations

import gc
import time
from typing import Any, Callable, Iterator, List

import pytest

SECONDS = 600.0
_FAILED = pytest.StashKey[bool]()
#: Handles and callbacks that earlier tests have left, and that were reported.
_reported: List[Any] = []
_reported_callbacks = 0
#: Called when a test has left handles, so that the next tests do not use them.
on_left: List[Callable[[], None]] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: Any, call: Any) -> None:
    """Notes that a test has failed: what it leaves is of no interest, and may never end."""
    if call.excinfo is not None:
        item.stash[_FAILED] = True


def _left() -> List[Any]:
    from kvtier import _reaper

    return [job for job in list(_reaper._live.values())
            if job.handle.value and job not in _reported]


def check(node: Any) -> None:
    """Waits until a test has no handles and no callbacks, since a callback's thread holds its batch
    until the callback returns. Does not wait after a failed test."""
    global _reported_callbacks
    from kvtier import _callbacks, _reaper

    end, failed = time.monotonic() + SECONDS, node.stash.get(_FAILED, False)
    while True:
        gc.collect()
        assert failed or _reaper.flush(SECONDS)
        left, callbacks = _left(), _callbacks.live()
        _reported_callbacks = min(_reported_callbacks, callbacks)
        if not left and callbacks == _reported_callbacks:
            return
        if failed or time.monotonic() > end:
            break
        time.sleep(0.001)
    # Report them for this test only, not for the tests that follow.
    text = f"left open: {left} and {callbacks - _reported_callbacks} callbacks"
    _reported.extend(left)
    _reported_callbacks = callbacks
    for forget in on_left:
        forget()
    assert failed, text


@pytest.fixture(autouse=True)
def no_handles_left(request: Any) -> Iterator[None]:
    """Fails a test that leaves handles or callbacks of the library open."""
    yield
    check(request.node)
