"""kvtier for Hugging Face transformers: a tiered KV cache, and token eviction.

`Tiers` binds a model to a store; `Tiers.cache` makes a `TieredCache` for `generate`, which saves
and resumes sessions by their tokens. `install_kv_eviction` and its companions are imported from
`h2o` on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import _engine

_engine.require()

from ._shapes import LayerShape, shapes_of  # noqa: E402
from .cache import TieredCache  # noqa: E402
from .fingerprint import fingerprint, fingerprint_files  # noqa: E402
from .tiers import Tiers  # noqa: E402

if TYPE_CHECKING:
    from .h2o import (
        install_kv_eviction,
        register_attention,
        remove_kv_eviction,
        reset_eviction_scores,
    )

_EVICTION = ("install_kv_eviction", "remove_kv_eviction", "reset_eviction_scores",
             "register_attention")

__all__ = ["LayerShape", "TieredCache", "Tiers", "fingerprint", "fingerprint_files",
           "install_kv_eviction", "register_attention", "remove_kv_eviction",
           "reset_eviction_scores", "shapes_of"]


def __getattr__(name: str) -> Any:
    if name in _EVICTION:
        return getattr(importlib.import_module(".h2o", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
