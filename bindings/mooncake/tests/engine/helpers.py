"""Engines' packages as folders: what their Mooncake backends need of them, without the rest."""

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
    """Skips a module of tests without that version of an engine, or what it imports."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed", allow_module_level=True)
    if found != version:
        pytest.skip(f"{package} {found}, and these tests are for {version}",
                    allow_module_level=True)
    for name in modules:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)


def folders(package: str, names: Sequence[str]) -> None:
    """Packages whose __init__ is passed by."""
    root = Path(str(importlib.metadata.distribution(package).locate_file("")))
    for name in names:
        if name not in sys.modules:
            module = types.ModuleType(name)
            module.__path__ = [str(root.joinpath(*name.split(".")))]
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            sys.modules[name] = module


def imported(name: str) -> Any:
    """A module of an engine, or a skip with what it misses."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} does not import: {error}", allow_module_level=True)
