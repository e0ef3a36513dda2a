"""Who a model is: KV of one must never be taken for another's."""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from pathlib import Path
from typing import Any, Dict, Tuple, Union

import torch

from ._errors import invalid

# What a configuration says of its file or of a call, not of what is computed.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "use_cache", "output_attentions",
                  "output_hidden_states", "return_dict", "torch_dtype", "dtype")

_known: "weakref.WeakKeyDictionary[Any, Tuple[Any, bytes]]" = weakref.WeakKeyDictionary()


def config_digest(model: Any) -> bytes:
    """32 bytes of everything that the configuration says of the computation."""
    told: Dict[str, Any] = {"class": type(model).__name__, **model.config.to_dict()}
    for name in _NOT_THE_MODEL:
        told.pop(name, None)
    text = json.dumps(told, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


def fingerprint(model: Any) -> bytes:
    """32 bytes of the names, shapes and bytes of all weights. Computed once (about a second a
    GB), and anew when a weight was replaced or written to since."""
    state = model.state_dict()
    stamp = tuple((t.data_ptr(), t._version, t.device) for t in state.values())
    kept = _known.get(model)
    if kept is not None and kept[0] == stamp:
        return kept[1]
    total = hashlib.blake2b(digest_size=32)
    for name in sorted(state):
        tensor = state[name].detach()
        if tensor.device.type == "meta":
            raise invalid(f"the weight {name!r} has no bytes (meta device): give weights=, such "
                          "as fingerprint_files(directory)")
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        flat = tensor.cpu().contiguous().reshape(-1)
        total.update(memoryview(flat.view(torch.uint8).numpy()))
    digest = total.digest()
    _known[model] = (stamp, digest)
    return digest


def fingerprint_files(directory: "Union[str, os.PathLike[str]]") -> bytes:
    """The same of a checkpoint's files, without a model: for `weights=` where reading them is
    cheaper than all weights. Other bytes than `fingerprint`'s: use one of the two."""
    names = [path for pattern in ("*.safetensors", "*.bin", "*.pt")
             for path in Path(directory).glob(pattern)]
    if not names:
        raise invalid(f"{os.fspath(directory)!r} has no *.safetensors, *.bin or *.pt")
    total = hashlib.blake2b(digest_size=32)
    for path in sorted(names):
        total.update(f"{path.name} {path.stat().st_size}\n".encode())
        with open(path, "rb") as file:
            while piece := file.read(1 << 22):
                total.update(piece)
    return total.digest()


def adapters_of(model: Any) -> "bytes | None":
    """The names of the adapters that are switched on (their weights are among the weights)."""
    if not getattr(model, "_hf_peft_config_loaded", False):
        return None
    active = model.active_adapters()
    return ",".join([active] if isinstance(active, str) else list(active)).encode()
