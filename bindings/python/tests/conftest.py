"""Fixtures: a runtime that must be closed with nothing left behind."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any, Iterator, List

import kvtier
import pytest
from kvtier import _callbacks, _reaper

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # generate.py and build_wheel.py


@pytest.fixture
def runtime() -> Iterator[kvtier.Runtime]:
    with kvtier.Runtime(workers=2, name="pytest") as runtime:
        yield runtime


@pytest.fixture
def slow() -> Iterator[kvtier.Runtime]:
    """One worker that takes 80 ms for each item."""
    with kvtier.Runtime(workers=1, faults="faults(worker=at(stall=80ms))") as runtime:
        yield runtime


def no_ops_left(runtime: kvtier.Runtime) -> None:
    """Whoever ended an op counts it for a moment after it was told."""
    end = time.monotonic() + 10.0
    while runtime.stats().ops_open or runtime.stats().ops_live:
        assert time.monotonic() < end, runtime.stats()
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every handle and every callback number is given up after a test. Soon, not
    at once: a callback's thread holds its batch until it has returned."""
    yield
    end = time.monotonic() + 10.0
    while True:
        gc.collect()
        assert _reaper.flush(5.0)
        left = [job for job in list(_reaper._live.values()) if job.handle.value]
        if not left and _callbacks.live() == 0:
            return
        assert time.monotonic() < end, (left, _callbacks.live())
        time.sleep(0.001)


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[List[Any]]:
    """What went to sys.unraisablehook, as exceptions."""
    seen: List[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: seen.append(info.exc_value))
    yield seen
    seen.clear()  # their tracebacks hold what the test let go of
