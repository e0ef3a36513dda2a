"""kvtier as storage of SGLang's HiCache. The engine's configuration names `KvtierStorage`, or
`kvtier_sglang.linker.KvtierLinker` (backend `dynamic`). See the package's README."""

from __future__ import annotations

from . import _engine

_engine.require("storage")

from ._config import Settings  # noqa: E402
from ._storage import KvtierStorage  # noqa: E402

__all__ = ["KvtierStorage", "Settings"]
