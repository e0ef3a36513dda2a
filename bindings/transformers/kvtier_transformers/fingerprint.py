"""Identity of a model: digests of its configuration, weights and adapters.

Models with different digests never share KV.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Dict, Union

import torch

from ._errors import invalid

# Configuration entries that do not affect the computed KV.
_IGNORED = ("_name_or_path", "transformers_version", "use_cache", "output_attentions",
            "output_hidden_states", "return_dict", "torch_dtype", "dtype")


def config_digest(model: Any) -> bytes:
    """Returns a 32-byte digest of the model's class and configuration."""
    config: Dict[str, Any] = {"class": type(model).__name__, **model.config.to_dict()}
    for name in _IGNORED:
        config.pop(name, None)
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


def fingerprint(model: Any) -> bytes:
    """Returns a 32-byte digest of names, shapes and bytes of all weights and buffers.

    Takes about one second per GB. Each call reads everything, because torch does not report writes
    through a weight's `data`. To reuse the digest, pass it as `Tiers(weights=...)`."""
    state = {**dict(model.named_buffers()), **model.state_dict()}
    total = hashlib.blake2b(digest_size=32)
    for name in sorted(state):
        tensor = state[name]
        if not isinstance(tensor, torch.Tensor):
            raise invalid(f"the weight {name!r} is a {type(tensor).__name__}, not a tensor: pass "
                          "weights=, such as fingerprint_files(directory)")
        if tensor.device.type == "meta":
            raise invalid(f"the weight {name!r} has no bytes (meta device): pass weights=, such "
                          "as fingerprint_files(directory)")
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        try:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            total.update(flat.view(torch.uint8).numpy().data)
        except (RuntimeError, TypeError, NotImplementedError) as error:  # packed, for example
            raise invalid(f"the bytes of weight {name!r} ({type(tensor).__name__}) cannot be "
                          f"read ({error}): pass weights=, such as "
                          "fingerprint_files(directory)") from error
    return total.digest()


def versions_of(model: Any) -> int:
    """Returns a number that changes when weights are written to, except through `data`."""
    return sum(0 if weight.is_inference() else weight._version for weight in model.parameters())


def fingerprint_files(directory: "Union[str, os.PathLike[str]]") -> bytes:
    """Returns a 32-byte digest of a checkpoint's files, for `Tiers(weights=...)`.

    It needs no model. The digest differs from that of `fingerprint`: use one of the two."""
    names = [path for pattern in ("*.safetensors", "*.bin", "*.pt")
             for path in Path(directory).glob(pattern)]
    if not names:
        raise invalid(f"{os.fspath(directory)!r} contains no *.safetensors, *.bin or *.pt: pass "
                      "the directory of a checkpoint")
    total = hashlib.blake2b(digest_size=32)
    for path in sorted(names):
        total.update(f"{path.name} {path.stat().st_size}\n".encode())
        with open(path, "rb") as file:
            while piece := file.read(1 << 22):
                total.update(piece)
    return total.digest()


def adapters_of(model: Any) -> "bytes | None":
    """Returns a digest of the adapter state of all modules, or None without adapters.

    It covers which adapters of peft layers are active, merged or disabled, and their scaling. The
    adapters' weights are among the model's weights."""
    states = []
    for name, module in model.named_modules():
        disabled = getattr(module, "disable_adapters", None)
        if isinstance(disabled, bool):
            states.append([name, disabled] + [str(getattr(module, field, None)) for field in
                                              ("active_adapters", "merged_adapters", "scaling")])
    if not states:
        return None
    return hashlib.blake2b(json.dumps(states).encode(), digest_size=32).digest()
