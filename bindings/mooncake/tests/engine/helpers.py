"""Imports the Mooncake backends of engines without the rest of the engines."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any, Sequence

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))


def need(package: str, version: str, *modules: str) -> None:
    """Skips a test module unless an engine has that version and its imports are installed."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed", allow_module_level=True)
    if found != version:
        pytest.skip(f"{package} {found} is installed, but these tests need {version}",
                    allow_module_level=True)
    for name in modules:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)


def empty_packages(package: str, names: Sequence[str]) -> None:
    """Makes packages importable without running their `__init__`."""
    root = Path(str(importlib.metadata.distribution(package).locate_file("")))
    for name in names:
        if name not in sys.modules:
            module = types.ModuleType(name)
            module.__path__ = [str(root.joinpath(*name.split(".")))]
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            sys.modules[name] = module


def imported(name: str) -> Any:
    """Imports a module of an engine, or skips the test module with the reason."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} does not import: {error}", allow_module_level=True)
