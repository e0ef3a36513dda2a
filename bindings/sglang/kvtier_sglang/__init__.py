"""kvtier under SGLang's HiCache: `KvtierStorage` is named in the engine's configuration
(backend `dynamic`), and so is `kvtier_sglang.linker.KvtierLinker`. See the README beside it."""

from __future__ import annotations

from ._config import Settings
from ._storage import KvtierStorage

__all__ = ["KvtierStorage", "Settings"]
