"""Who a model is: KV of one must never be taken for another's."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Dict, Union

import torch

from ._errors import invalid

# What a configuration says of its file or of a call, not of what is computed.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "use_cache", "output_attentions",
                  "output_hidden_states", "return_dict", "torch_dtype", "dtype")


def config_digest(model: Any) -> bytes:
    """32 bytes of everything that the configuration says of the computation."""
    told: Dict[str, Any] = {"class": type(model).__name__, **model.config.to_dict()}
    for name in _NOT_THE_MODEL:
        told.pop(name, None)
    text = json.dumps(told, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


def fingerprint(model: Any) -> bytes:
    """32 bytes of the names, shapes and bytes of all weights, and of buffers that no checkpoint
    has. About a second a GB, each time: nothing tells that a weight was written to through its
    `data`. Give it to `Tiers(weights=)` where it is needed more than once."""
    state = {**dict(model.named_buffers()), **model.state_dict()}
    total = hashlib.blake2b(digest_size=32)
    for name in sorted(state):
        tensor = state[name]
        if not isinstance(tensor, torch.Tensor):
            raise invalid(f"the weight {name!r} is a {type(tensor).__name__}: give weights=")
        if tensor.device.type == "meta":
            raise invalid(f"the weight {name!r} has no bytes (meta device): give weights=, such "
                          "as fingerprint_files(directory)")
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        try:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            total.update(flat.view(torch.uint8).numpy().data)
        except (RuntimeError, TypeError, NotImplementedError) as error:  # packed, for example
            raise invalid(f"the bytes of weight {name!r} ({type(tensor).__name__}) cannot be "
                          f"read ({error}): give weights=, such as "
                          "fingerprint_files(directory)") from error
    return total.digest()


def versions_of(model: Any) -> int:
    """A number that another one follows when weights are written to (not through `data`)."""
    return sum(0 if weight.is_inference() else weight._version for weight in model.parameters())


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
    """Which adapters each module uses, how strongly, and whether they are switched on or merged
    (their weights are among the weights); for layers as peft makes them."""
    told = []
    for name, module in model.named_modules():
        off = getattr(module, "disable_adapters", None)
        if isinstance(off, bool):
            told.append([name, off] + [str(getattr(module, what, None)) for what in
                                       ("active_adapters", "merged_adapters", "scaling")])
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=32).digest() if told else None
