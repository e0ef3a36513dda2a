"""What the engine's process notes in its configuration for all its workers."""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from typing import Any, Dict, List

from kvtier import abi
from kvtier._errors import make

from ._settings import INTERNAL, Settings, invalid, refuse_hybrid

#: Of each file of weights so much goes into the fingerprint: its beginning, which says what is
#: in it, and pieces at equal distances.
HEAD_BYTES, PIECES, PIECE_BYTES = 1 << 16, 64, 4096

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


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
    if INTERNAL in extra:
        return  # an engine that goes to sleep and comes back has told its workers before
    if not settings.model and not model_path:
        raise invalid("whose KV is it: say model in kv_connector_extra_config")
    extra[INTERNAL] = {
        "activation": activation,
        "pid": os.getpid(),
        # 0700, so that only this user's processes can ask.
        "folder": tempfile.mkdtemp(prefix="kvtier-lmdeploy-"),
        "secret": secrets.token_hex(16),
        "model": settings.model or os.path.basename(os.path.realpath(model_path or "")),
        "weights": settings.weights or fingerprint(model_path or ""),
    }


def fingerprint(model_path: str) -> str:
    """A digest of a model's configuration and of pieces of its weights. Weights that differ in
    few places only are told apart by `weights` in the configuration. Of a name that is no folder
    it is the name."""
    digest = hashlib.sha256()
    if not os.path.isdir(model_path):
        digest.update(b"name\0" + model_path.encode())
        return digest.hexdigest()
    names: List[str] = sorted(
        name for name in os.listdir(model_path)
        if name == "config.json" or name.endswith(_WEIGHTS))
    for name in names:
        path = os.path.join(model_path, name)
        size = os.path.getsize(path)
        digest.update(f"{name}\0{size}\0".encode())
        with open(path, "rb") as file:
            digest.update(file.read(HEAD_BYTES))
            for piece in range(PIECES if size > HEAD_BYTES else 0):
                file.seek(size * piece // PIECES)
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()
