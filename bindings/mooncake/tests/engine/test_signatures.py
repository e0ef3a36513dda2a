"""Checks the shim against the engines' sources: every method that they call on their Mooncake
store exists with these arguments, or is listed here."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
from pathlib import Path
from typing import Iterator, List, Set, Tuple

import pytest
from helpers import HERE  # noqa: F401: finds the packages
from kvtier_mooncake import MooncakeDistributedStore

SOURCES = {
    "lmdeploy": ("0.18.0", ["lmdeploy/pytorch/kv_connector/mooncake/store"]),
    "vllm": ("0.33.0", ["vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store",
                        "vllm/distributed/mooncake_store.py",
                        "vllm/distributed/ec_transfer/ec_connector/mooncake_store_embedding"]),
    "sglang": ("0.5.23", ["sglang/srt/mem_cache/storage/mooncake_store"]),
    "lmcache": ("0.5.6", ["lmcache/v1/storage_backend/connector/mooncakestore_connector.py",
                          "lmcache/v1/lookup_client/mooncake_lookup_client.py"]),
}

#: Methods that are not offered. SGLang's layer-wise linker uses them to load parts of objects.
NOT_OFFERED = {"batch_get_session_start", "batch_get_session_end",
               "batch_get_into_multi_buffer_ranges"}

#: Methods of the engines' own wrappers, whose variables are named `store`, too.
WRAPPERS = {"batch_set_v1", "batch_get_v1", "batch_exists", "exists", "set", "batch_set",
            "batch_get", "register_mem_pool_host", "load_state_dict"}


def called_methods(path: Path) -> Set[str]:
    """The names of attributes that are read from something named `store`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if name == "store":
                found.add(node.attr)
    return found


@pytest.mark.parametrize("package", SOURCES)
def test_every_called_method_exists(package: str) -> None:
    version, places = SOURCES[package]
    try:
        found_version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    if found_version != version:
        pytest.skip(f"{package} {found_version} is installed, but this needs {version}")
    root = Path(str(importlib.metadata.distribution(package).locate_file("")))
    names: Set[str] = set()
    for place in places:
        path = root / place
        for file in [path] if path.is_file() else path.glob("*.py"):
            names |= called_methods(file)
    ours = {name for name in dir(MooncakeDistributedStore) if not name.startswith("_")}
    assert "setup" in names
    assert names - ours - NOT_OFFERED - WRAPPERS == set()


def calls(path: Path) -> Iterator[Tuple[str, int, List[str]]]:
    """The calls of such methods: the name, the number of positional arguments, and the keywords."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        spread = any(isinstance(one, ast.Starred) for one in node.args)
        if name == "store" and not spread and all(one.arg for one in node.keywords):
            yield node.func.attr, len(node.args), [str(one.arg) for one in node.keywords]


@pytest.mark.parametrize("package", SOURCES)
def test_every_call_fits_the_signature(package: str) -> None:
    """The shim's method accepts each call as it is in the engine's source."""
    version, places = SOURCES[package]
    try:
        found_version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    if found_version != version:
        pytest.skip(f"{package} {found_version} is installed, but this needs {version}")
    root, tried = Path(str(importlib.metadata.distribution(package).locate_file(""))), set()
    for place in places:
        path = root / place
        for file in [path] if path.is_file() else path.glob("*.py"):
            if file.name.startswith("test_"):
                continue
            for method, given, by_name in calls(file):
                if method in NOT_OFFERED or method in WRAPPERS:
                    continue
                ours = inspect.signature(getattr(MooncakeDistributedStore, method))
                ours.bind(None, *[None] * given, **dict.fromkeys(by_name))  # raises TypeError
                tried.add(method)
    assert "batch_is_exist" in tried
