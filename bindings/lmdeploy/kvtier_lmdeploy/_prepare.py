"""Prepares the engine's configuration for its workers: lookup sockets, identity, secret."""

from __future__ import annotations

import os
import secrets
import tempfile
from typing import Any, Dict

from kvtier import abi
from kvtier._errors import make

from ._settings import INTERNAL, Settings, invalid, refuse_hybrid
from ._weights import fingerprint

#: Most bytes of the temporary folder's path: a socket's path holds 107.
_MAX_TMPDIR_BYTES = 80


def prepare_engine(cache_config: Any, activation: Any, *, model_path: "str | None" = None,
                   dist_config: Any = None,
                   distributed_executor_backend: "str | None" = None) -> None:
    """Checks the configuration, then adds the lookup folder and the identity of the KV to it."""
    transfer = cache_config.kv_transfer_config
    extra: Dict[str, Any] = transfer.kv_connector_extra_config
    settings = Settings.from_extra(extra)
    refuse_hybrid(cache_config)
    if distributed_executor_backend == "mp":
        raise make(abi.KVT_E_UNSUPPORTED, "distributed_executor_backend \"mp\" does not aggregate "
                   "the workers' connector output: use \"ray\" for several GPUs")
    if not settings.model and not model_path:
        raise invalid("the model's name is unknown: set model in kv_connector_extra_config")
    if not settings.weights and not os.path.isdir(model_path or ""):
        raise invalid(f"{model_path!r} is not a folder, so its weights cannot be digested: set "
                      "weights in kv_connector_extra_config to a text that changes with them")
    extra[INTERNAL] = {
        "activation": activation,
        "pid": os.getpid(),
        # mkdtemp sets mode 0700: only this user's processes can connect.
        "folder": tempfile.mkdtemp(prefix="kvtier-lmdeploy-", dir=_temporary()),
        "secret": secrets.token_hex(16),
        "model": settings.model or os.path.basename(os.path.realpath(model_path or "")),
        "weights": settings.weights or fingerprint(model_path or ""),
        "adapters": {name: fingerprint(source) if os.path.isdir(source) else source
                     for name, source in settings.adapters.items()},
        # Part of the names of blocks under undescribed adapters: only this engine finds them.
        "nonce": secrets.token_hex(16),
    }


def _temporary() -> "str | None":
    """Returns the parent folder for sockets: /tmp where TMPDIR is too long for a socket's path."""
    return "/tmp" if len(tempfile.gettempdir()) > _MAX_TMPDIR_BYTES else None
