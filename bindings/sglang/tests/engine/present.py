"""Skips the tests in this folder without KVTIER_ENGINES=1 and the tested version of SGLang."""

from __future__ import annotations

import importlib
import os

import pytest
from kvtier_sglang._engine import ENGINE


def missing() -> str:
    """The reason why the tests cannot run; empty if they can."""
    if os.environ.get("KVTIER_ENGINES") != "1":
        return "KVTIER_ENGINES is not 1"
    for name in ("sglang.srt.mem_cache.storage.backend_factory",
                 "sglang.srt.mem_cache.pool_host.mha", "sglang.srt.managers.cache_controller"):
        try:
            importlib.import_module(name)
        except Exception as error:
            return f"SGLang does not import: {error}"
    found = importlib.import_module("sglang.version").__version__
    return "" if ENGINE.is_tested(found) else (
        f"SGLang {found} is installed, but {' or '.join(ENGINE.tested)} is needed")


if missing():
    pytest.skip(missing(), allow_module_level=True)
