"""What the engine's process notes in its configuration for all its workers."""

from __future__ import annotations

import os
import secrets
import tempfile
from typing import Any, Dict

from kvtier import abi
from kvtier._errors import make

from ._settings import INTERNAL, Settings, invalid, refuse_hybrid
from ._weights import fingerprint

#: The path of a socket has 107 bytes: so many are left for the folder's.
_MOST_PATH = 80

def prepare_engine(cache_config: Any, activation: Any, *, model_path: "str | None" = None,
                   dist_config: Any = None,
                   distributed_executor_backend: "str | None" = None) -> None:
    """Checks what can be checked by now, and adds where lookups go and whose KV it is."""
    transfer = cache_config.kv_transfer_config
    extra: Dict[str, Any] = transfer.kv_connector_extra_config
    settings = Settings.from_extra(extra)
    refuse_hybrid(cache_config)
    if distributed_executor_backend == "mp":
        raise make(abi.KVT_E_UNSUPPORTED, "distributed_executor_backend=\"mp\" does not bring "
                   "workers' progress together: use \"ray\" for several GPUs")
    if not settings.model and not model_path:
        raise invalid("whose KV it is: say model in kv_connector_extra_config")
    if not settings.weights and not os.path.isdir(model_path or ""):
        raise invalid(f"{model_path!r} is no folder whose weights could be read: say weights in "
                      "kv_connector_extra_config, a text that changes with them")
    extra[INTERNAL] = {
        "activation": activation,
        "pid": os.getpid(),
        # 0700, so that only this user's processes can ask.
        "folder": tempfile.mkdtemp(prefix="kvtier-lmdeploy-", dir=_temporary()),
        "secret": secrets.token_hex(16),
        "model": settings.model or os.path.basename(os.path.realpath(model_path or "")),
        "weights": settings.weights or fingerprint(model_path or ""),
        "adapters": {name: fingerprint(said) if os.path.isdir(said) else said
                     for name, said in settings.adapters.items()},
        # An adapter of which nobody said what it is, is the same in this engine alone.
        "nonce": secrets.token_hex(16),
    }


def _temporary() -> "str | None":
    """Where the folder of sockets goes: a long TMPDIR has no room for their names."""
    return "/tmp" if len(tempfile.gettempdir()) > _MOST_PATH else None
