"""KV of lmdeploy's PyTorch engine in kvtier's tiers.

`activate()`, or `python -m kvtier_lmdeploy -m lmdeploy serve ...`; then an engine with
`KVTransferConfig("KvtierConnector", "kv_both", {...})` keeps its KV in memory and on disk. This
module imports neither lmdeploy nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._activate import CONNECTOR, SUPPORTED, activate, activated, deactivate
from ._settings import Settings

if TYPE_CHECKING:
    from ._connector import KvtierConnector

__all__ = ["CONNECTOR", "SUPPORTED", "KvtierConnector", "Settings", "activate", "activated",
           "deactivate"]


def __getattr__(name: str) -> Any:
    # It is a subclass of a class of lmdeploy's.
    if name == "KvtierConnector":
        from ._connector import KvtierConnector

        return KvtierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
