"""Fixtures: runtimes, a gate, and checks that a test leaves no handle and no callback."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any, Iterator, List

import gate as gates
import kvtier
import pytest
from gate import HANG_S, Gate, until
from kvtier import _callbacks, _reaper

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # generate.py and build_wheel.py


@pytest.fixture
def runtime() -> Iterator[kvtier.Runtime]:
    with kvtier.Runtime(workers=2, name="pytest") as runtime:
        yield runtime


@pytest.fixture
def single() -> Iterator[kvtier.Runtime]:
    """A runtime with one worker, so that work at a gate blocks all other work."""
    with kvtier.Runtime(workers=1) as runtime:
        yield runtime


@pytest.fixture
def gate(single: kvtier.Runtime) -> Iterator[Gate]:
    """A closed gate; its work belongs to the runtime `single`."""
    with gates.handled(), Gate(single) as gate:
        yield gate


def no_ops_left(runtime: kvtier.Runtime) -> None:
    """Waits until the runtime has no ops. A worker counts an op briefly after its completion."""
    until(lambda: not (runtime.stats().ops_open or runtime.stats().ops_live))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Checks that a test releases every handle and callback number. It waits, because a callback's
    thread holds its batch until the callback returns."""
    yield
    end = time.monotonic() + HANG_S
    while True:
        gc.collect()
        assert _reaper.flush(HANG_S)
        left = [job for job in list(_reaper._live.values()) if job.handle.value]
        if not left and _callbacks.live() == 0:
            return
        assert time.monotonic() < end, (left, _callbacks.live())
        time.sleep(0.001)


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[List[Any]]:
    """Collects the exceptions that go to sys.unraisablehook."""
    seen: List[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: seen.append(info.exc_value))
    yield seen
    seen.clear()  # tracebacks keep objects that the test has dropped
