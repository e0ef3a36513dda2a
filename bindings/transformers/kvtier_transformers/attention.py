"""Adapters for attention classes, and observation of their attention.

With eager attention `forward` returns probabilities. With sdpa it does not: models look up an
attention function by the name in their configuration. While eviction is installed this name is
`SDPA`, whose function records queries and keys and calls the function of "sdpa".
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import torch
from kvtier import _abi
from kvtier._errors import make
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

#: Name of the attention function that observes sdpa.
SDPA = "kvtier_sdpa"

#: The attention module that runs in this thread, with its pass.
_current = threading.local()


@dataclasses.dataclass(frozen=True)
class AttentionAdapter:
    """Describes an attention class. See porting.md."""

    #: Whether the cache has one row for all heads: a compressed latent, and a rotated key.
    latent: bool = False
    #: Whether the class looks up its attention function in transformers' table (needed for sdpa).
    interface: bool = True
    #: Index of the probabilities in the result of `forward`.
    weights: int = 1
    #: Keyword that makes `forward` return probabilities; None: it always returns them.
    weights_keyword: str | None = None
    #: Keywords of `forward` for the cache and the mask.
    caches: tuple[str, ...] = ("past_key_values", "past_key_value")
    mask: str = "attention_mask"

    def query_heads(self, module: Any) -> int:
        """Returns the number of query heads."""
        heads = getattr(module, "num_heads", None)
        return int(module.config.num_attention_heads if heads is None else heads)

    def key_heads(self, module: Any) -> int:
        """Returns the number of key heads."""
        heads = getattr(module.config, "num_key_value_heads", None)
        return self.query_heads(module) if heads is None else int(heads)


_PLAIN = AttentionAdapter()
#: Supported classes of transformers by name. Tests compare each of them with a reference.
_KNOWN = {
    "DeepseekV3Attention": AttentionAdapter(latent=True),
    **{name + "Attention": _PLAIN for name in (
        "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Gemma",
        "Gemma2", "Gemma3")},
}
_registered: dict[type, AttentionAdapter] = {}


def register_attention(cls: type, adapter: AttentionAdapter = _PLAIN) -> None:
    """Registers an adapter for an attention class and its subclasses."""
    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        raise make(_abi.KVT_E_INVALID, f"{cls!r} is not a class of modules: pass a subclass of "
                   "torch.nn.Module")
    _registered[cls] = adapter


def adapter_of(module: torch.nn.Module) -> AttentionAdapter | None:
    """Returns the adapter of an attention module, or None if its class is unknown."""
    for cls in type(module).__mro__:
        if cls in _registered:
            return _registered[cls]
        if cls.__module__.startswith("transformers.models.") and cls.__name__ in _KNOWN:
            return _KNOWN[cls.__name__]
    return None


def enter(module: torch.nn.Module, frame: Any) -> None:
    """Marks a module as running in this thread."""
    _current.running = (module, frame)


def leave(module: torch.nn.Module) -> Any:
    """Marks a module as done, and returns the frame passed to `enter`."""
    running, frame = getattr(_current, "running", (None, None))
    _current.running = (None, None)
    return frame if running is module else None


def _observed_sdpa(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor,
                  value: torch.Tensor, attention_mask: torch.Tensor | None,
                  scaling: float | None = None, **kwargs: Any) -> Any:
    running, frame = getattr(_current, "running", (None, None))
    if running is module and frame is not None:
        frame.record(query, key, scaling)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, query, key, value, attention_mask, scaling=scaling, **kwargs)


AttentionInterface.register(SDPA, _observed_sdpa)
AttentionMaskInterface.register(SDPA, sdpa_mask)


def visible(mask: torch.Tensor) -> torch.Tensor:
    """Returns the visible entries of a boolean or additive mask."""
    if mask.dtype == torch.bool:
        return mask
    return mask > torch.finfo(mask.dtype).min / 2


def real_columns(mask: torch.Tensor | None, batch: int, count: int,
                 seen: int) -> torch.Tensor | None:
    """Returns which new columns are not padding, [sequences, columns]; None: all.

    Padding is recognised by the diagonal: it does not attend to itself."""
    if mask is None:
        return None
    if mask.dim() != 4 or mask.shape[-1] != seen + count or mask.shape[-2] != count:
        raise make(_abi.KVT_E_INVALID,
                   f"the mask has shape {list(mask.shape)}: for {count} tokens after {seen} it "
                   f"must be [batch, heads, {count}, {seen + count}]. Masks count all tokens of "
                   "the sequence, including evicted ones")
    diagonal = torch.diagonal(mask[:, 0], offset=seen, dim1=-2, dim2=-1)
    return visible(diagonal).expand(batch, count).cpu()


def narrow(mask: torch.Tensor | None, evictor: Any, count: int, query_heads: int,
           device: torch.device) -> torch.Tensor | None:
    """Narrows a mask for all columns to the resident ones and the `count` new ones."""
    if evictor.whole or (mask is None and not evictor.padded):
        return mask
    ids = torch.from_numpy(evictor.ids).to(device)
    batch, lists, _ = ids.shape
    new = torch.ones((batch, lists, count), dtype=torch.bool, device=device)
    valid = torch.cat([ids >= 0, new], 2)
    columns = torch.from_numpy(evictor.columns).to(device).clamp(min=0)
    new_columns = torch.arange(evictor.seen, evictor.seen + count, device=device)
    columns = torch.cat([columns, new_columns.expand(batch, lists, count)], 2)
    if lists > 1:
        group = query_heads // lists
        valid, columns = (one.repeat_interleave(group, 1) for one in (valid, columns))
    if mask is None:
        if count > 1:
            raise make(_abi.KVT_E_STATE, f"{count} tokens after cached ones need a mask, and none "
                       "was passed: pass attention_mask, or one token at a time")
        return valid[:, :, None]
    mask = mask.to(device)
    heads = max(mask.shape[1], columns.shape[1])
    shape = batch, heads, count, columns.shape[2]
    found = torch.gather(mask.expand(batch, heads, count, mask.shape[3]), 3,
                         columns[:, :, None].expand(shape))
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return found.masked_fill(~valid[:, :, None], hidden)
