"""Without KVTIER_ENGINES=1 the engine and torch are stubs; with it these tests run on the real
ones, and tests/engine is added."""

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
def engine_is_no_garbage() -> None:
    """What the engine's import has made takes a second to go through, after each test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every handle is given up after a test."""
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
