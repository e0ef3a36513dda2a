"""kvtier under SGLang's HiCache: `KvtierStorage` is named in the engine's configuration
(backend `dynamic`), and so is `kvtier_sglang.linker.KvtierLinker`. See the README beside it."""

from __future__ import annotations

from . import _engine

_engine.NEEDS.check()

from ._config import Settings  # noqa: E402
from ._storage import KvtierStorage  # noqa: E402

__all__ = ["KvtierStorage", "Settings"]
