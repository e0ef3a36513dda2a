"""Imports parts of lmdeploy where its other requirements are not installed.

`import lmdeploy` needs a server's dependencies, but the tested parts need only torch, pydantic and
psutil. Stand-ins for the root packages let these parts import alone.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import sys
import types
from pathlib import Path
from typing import Any, Dict

#: Packages to import without their `__init__`, and modules to replace by a few names.
_FOLDERS = ("lmdeploy", "lmdeploy.vl", "lmdeploy.pytorch.engine")
_MODULES: Dict[str, Dict[str, Any]] = {
    "lmdeploy.tokenizer": {"Tokenizer": object},
    "lmdeploy.pytorch.engine.model_agent": {"BatchedOutputs": object},
}


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
