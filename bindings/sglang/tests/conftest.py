"""Replaces SGLang and torch by stubs, unless KVTIER_ENGINES=1. With KVTIER_ENGINES=1 the tests use
the installed ones, and tests/engine runs, too."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Iterator

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent))
if os.environ.get("KVTIER_ENGINES") != "1":
    sys.path.insert(0, str(HERE / "stubs"))

sys.path.append(str(HERE.parents[1] / "python" / "tests"))  # handles.py
from handles import no_handles_left, pytest_runtest_makereport  # noqa: E402, F401


@pytest.fixture(autouse=True, scope="session")
def freeze_engine_objects() -> None:
    """Excludes the engine's objects from garbage collection, which would take a second per test."""
    gc.collect()
    gc.freeze()
