"""Fixtures for tests with the real lmdeploy: its paging scheduler and connector interface, on CPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import kvtier
import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE.parents[1], HERE.parents[2] / "mooncake", HERE):
    sys.path.insert(0, str(folder))

import standin  # noqa: E402
from kvtier_lmdeploy import _engine  # noqa: E402


def _missing() -> str:
    for name in ("torch", "numpy", "pydantic", "psutil", "transformers"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    try:
        _engine.check_version()
    except kvtier.Error as error:
        return str(error)
    return ""


REASON = _missing()
if not REASON and "lmdeploy" not in sys.modules:
    standin.stand_in()


def pytest_collection_modifyitems(items: Any) -> None:
    if REASON:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=REASON))
