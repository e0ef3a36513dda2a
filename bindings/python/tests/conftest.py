"""Fixtures: a runtime that must be closed with nothing left behind."""

from __future__ import annotations

import gc
import sys
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
    """One worker that takes 30 ms for each item."""
    with kvtier.Runtime(workers=1, faults="faults(worker=at(stall=30ms))") as runtime:
        yield runtime


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every handle and every callback number is given up after a test."""
    yield
    gc.collect()
    assert _reaper.flush(5.0)
    gc.collect()
    left = [job for job in list(_reaper._live.values()) if job.handle.value]
    assert not left, left
    assert _callbacks.live() == 0


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[List[Any]]:
    """What went to sys.unraisablehook, as exceptions."""
    seen: List[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: seen.append(info.exc_value))
    yield seen
    seen.clear()  # their tracebacks hold what the test let go of
