"""Replaces SGLang and torch by stubs, unless KVTIER_ENGINES=1. With KVTIER_ENGINES=1 the tests use
the installed ones, and tests/engine runs, too."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import Iterator

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent))
if os.environ.get("KVTIER_ENGINES") != "1":
    sys.path.insert(0, str(HERE / "stubs"))

from kvtier import _callbacks, _reaper  # noqa: E402


@pytest.fixture(autouse=True, scope="session")
def freeze_engine_objects() -> None:
    """Excludes the engine's objects from garbage collection, which would take a second per test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_handles_left() -> Iterator[None]:
    """Fails a test that leaves handles of the library open."""
    yield
    end = time.monotonic() + 600.0
    while True:
        gc.collect()
        assert _reaper.flush(600.0)
        left = [job for job in list(_reaper._live.values()) if job.handle.value]
        if not left and _callbacks.live() == 0:
            return
        assert time.monotonic() < end, (left, _callbacks.live())
        time.sleep(0.001)
