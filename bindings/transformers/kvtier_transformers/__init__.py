"""kvtier for Hugging Face transformers: a cache in tiers, sessions that are saved and resumed by
their tokens, and eviction of tokens.

`Tiers` binds a model to a store, once; `Tiers.cache` makes a `TieredCache` for `generate`.
`install_kv_eviction` and what belongs to it come with `h2o`, when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvtier._needs import Needs

Needs("kvtier_transformers", "transformers 5.23 or newer, before 6",
      'torch "transformers>=5.23,<6"', ("torch", "transformers")).check()

from . import _version  # noqa: E402, F401: refuses other transformers before anything else fails
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
