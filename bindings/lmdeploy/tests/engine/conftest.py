"""Fixtures for tests with the real lmdeploy: its paging scheduler and connector interface, on CPU.

`import lmdeploy` needs a server's dependencies, but the tested parts need only torch, pydantic and
psutil. Stand-ins for the root packages let these parts import alone.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any, Dict

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE.parents[1], HERE.parents[2] / "mooncake", HERE):
    sys.path.insert(0, str(folder))

VERSION = "0.18.0"

#: Packages to import without their `__init__`, and modules to replace by a few names.
_FOLDERS = ("lmdeploy", "lmdeploy.vl", "lmdeploy.pytorch.engine")
_MODULES: Dict[str, Dict[str, Any]] = {
    "lmdeploy.tokenizer": {"Tokenizer": object},
    "lmdeploy.pytorch.engine.model_agent": {"BatchedOutputs": object},
}


def _missing() -> str:
    for name in ("torch", "numpy", "pydantic", "psutil", "transformers"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    try:
        found = importlib.metadata.version("lmdeploy")
    except importlib.metadata.PackageNotFoundError:
        return "lmdeploy is not installed"
    return "" if found == VERSION else f"lmdeploy {found} is installed; these tests need {VERSION}"


def stand_in() -> None:
    """Registers the stand-ins in `sys.modules`."""
    root = Path(str(importlib.metadata.distribution("lmdeploy").locate_file("lmdeploy")))
    for name in _FOLDERS:
        module = types.ModuleType(name)
        module.__path__ = [str(root.parent.joinpath(*name.split(".")))]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
    for name, values in _MODULES.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        sys.modules[name] = module


REASON = _missing()
if not REASON and "lmdeploy" not in sys.modules:
    stand_in()


def pytest_collection_modifyitems(items: Any) -> None:
    if REASON:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=REASON))
