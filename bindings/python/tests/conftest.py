"""Fixtures: runtimes, a gate, and checks that a test leaves no handle and no callback."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Iterator, List

import gate as gates
import kvtier
import pytest
from gate import Gate, until
from handles import no_handles_left, pytest_runtest_makereport  # noqa: F401

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


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[List[Any]]:
    """Collects the exceptions that go to sys.unraisablehook."""
    seen: List[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: seen.append(info.exc_value))
    yield seen
    seen.clear()  # tracebacks keep objects that the test has dropped
