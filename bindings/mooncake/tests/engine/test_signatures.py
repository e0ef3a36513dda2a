"""Every method that the engines' sources call on their Mooncake store is one of the shim's, or is
listed here with what happens without it."""

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

#: SGLang's layer-wise linker loads parts of objects into a GPU.
NOT_OFFERED = {"batch_get_session_start", "batch_get_session_end",
               "batch_get_into_multi_buffer_ranges"}

#: Methods of wrappers around it that have the same name for it, `store`.
WRAPPERS = {"batch_set_v1", "batch_get_v1", "batch_exists", "exists", "set", "batch_set",
            "batch_get", "register_mem_pool_host", "load_state_dict"}


def called(path: Path) -> Set[str]:
    """Names of methods that are called on something called store."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if name == "store":
                found.add(node.attr)
    return found


@pytest.mark.parametrize("package", SOURCES)
def test_methods(package: str) -> None:
    version, places = SOURCES[package]
    try:
        there = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    if there != version:
        pytest.skip(f"{package} {there}, and this is for {version}")
    root = Path(str(importlib.metadata.distribution(package).locate_file("")))
    names: Set[str] = set()
    for place in places:
        path = root / place
        for file in [path] if path.is_file() else path.glob("*.py"):
            names |= called(file)
    ours = {name for name in dir(MooncakeDistributedStore) if not name.startswith("_")}
    assert "setup" in names
    assert names - ours - NOT_OFFERED - WRAPPERS == set()


def calls(path: Path) -> Iterator[Tuple[str, int, List[str]]]:
    """Calls of such methods: the name, how many arguments by position, and those by name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        spread = any(isinstance(one, ast.Starred) for one in node.args)
        if name == "store" and not spread and all(one.arg for one in node.keywords):
            yield node.func.attr, len(node.args), [str(one.arg) for one in node.keywords]


@pytest.mark.parametrize("package", SOURCES)
def test_arguments(package: str) -> None:
    """Each call as it stands in the engine's source is one that the shim's method takes."""
    version, places = SOURCES[package]
    try:
        there = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    if there != version:
        pytest.skip(f"{package} {there}, and this is for {version}")
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
                ours.bind(None, *[None] * given, **dict.fromkeys(by_name))  # else a TypeError
                tried.add(method)
    assert "batch_is_exist" in tried
