"""Tiered KV cache for lmdeploy's PyTorch engine.

Call `activate()`, or start with `python -m kvtier_lmdeploy -m lmdeploy serve ...`. An engine with
`KVTransferConfig("KvtierConnector", "kv_both", {...})` then keeps its KV in host memory and on
disk. This module imports neither lmdeploy nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._activate import CONNECTOR, activate, activated, deactivate
from ._settings import Settings

if TYPE_CHECKING:
    from ._connector import KvtierConnector

__all__ = ["CONNECTOR", "KvtierConnector", "Settings", "activate", "activated",
           "deactivate"]


def __getattr__(name: str) -> Any:
    # Imported on first use: the class derives from a class of lmdeploy.
    if name == "KvtierConnector":
        from ._connector import KvtierConnector

        return KvtierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
