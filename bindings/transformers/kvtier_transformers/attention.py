"""What is known of attention classes, and how their attention is watched.

Under eager attention `forward` returns probabilities. Under sdpa there are none: models look an
attention function up by the name in their configuration, and while eviction is installed this
is `SDPA`, which calls what stands behind "sdpa" and takes note of queries and keys.
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

#: The name under which sdpa is watched.
SDPA = "kvtier_sdpa"

#: What the attention module that runs in a thread is waiting for.
_current = threading.local()


@dataclasses.dataclass(frozen=True)
class AttentionAdapter:
    """How an attention class is used. See porting.md."""

    #: The cache has one row for all heads (a compressed latent, and a key with positions).
    latent: bool = False
    #: It looks its attention function up in transformers' table: sdpa can be watched.
    interface: bool = True
    #: Where in what `forward` returns the probabilities are.
    weights: int = 1
    #: A keyword that has to be true for it to return them; None = it always does.
    asks: str | None = None
    #: What `forward` calls its cache, and its mask.
    caches: tuple[str, ...] = ("past_key_values", "past_key_value")
    mask: str = "attention_mask"

    def query_heads(self, module: Any) -> int:
        """How many heads queries have."""
        heads = getattr(module, "num_heads", None)
        return int(module.config.num_attention_heads if heads is None else heads)

    def key_heads(self, module: Any) -> int:
        """How many heads keys have."""
        heads = getattr(module.config, "num_key_value_heads", None)
        return self.query_heads(module) if heads is None else int(heads)


_PLAIN = AttentionAdapter()
#: Classes of transformers, by their names: those that tests compare with a reference.
_KNOWN = {
    "DeepseekV3Attention": AttentionAdapter(latent=True),
    **{name + "Attention": _PLAIN for name in (
        "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Gemma",
        "Gemma2", "Gemma3")},
}
_registered: dict[type, AttentionAdapter] = {}


def register_attention(cls: type, adapter: AttentionAdapter = _PLAIN) -> None:
    """Says how an attention class is used, and classes derived from it."""
    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        raise make(_abi.KVT_E_INVALID, f"{cls!r} is no class of modules")
    _registered[cls] = adapter


def adapter_of(module: torch.nn.Module) -> AttentionAdapter | None:
    """How a module is used, if it is attention that is known."""
    for cls in type(module).__mro__:
        if cls in _registered:
            return _registered[cls]
        if cls.__module__.startswith("transformers.models.") and cls.__name__ in _KNOWN:
            return _KNOWN[cls.__name__]
    return None


def enter(module: torch.nn.Module, frame: Any) -> None:
    """A module is about to run in this thread."""
    _current.of = (module, frame)


def leave(module: torch.nn.Module) -> Any:
    """It has run: what was known of it."""
    found, frame = getattr(_current, "of", (None, None))
    _current.of = (None, None)
    return frame if found is module else None


def _watched_sdpa(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor,
                  value: torch.Tensor, attention_mask: torch.Tensor | None,
                  scaling: float | None = None, **kwargs: Any) -> Any:
    found, frame = getattr(_current, "of", (None, None))
    if found is module and frame is not None:
        frame.saw(query, key, scaling)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, query, key, value, attention_mask, scaling=scaling, **kwargs)


AttentionInterface.register(SDPA, _watched_sdpa)
AttentionMaskInterface.register(SDPA, sdpa_mask)


def visible(mask: torch.Tensor) -> torch.Tensor:
    """What a mask shows: it is of booleans, or is added."""
    if mask.dtype == torch.bool:
        return mask
    return mask > torch.finfo(mask.dtype).min / 2


def real_columns(mask: torch.Tensor | None, batch: int, count: int,
                 seen: int) -> torch.Tensor | None:
    """Which of the columns that come are no padding, [sequences, columns], None = all: a token
    that is none sees itself."""
    if mask is None:
        return None
    if mask.dim() != 4 or mask.shape[-1] != seen + count or mask.shape[-2] != count:
        raise make(_abi.KVT_E_INVALID,
                   f"a mask of {list(mask.shape)} for {count} tokens behind {seen}: masks count "
                   "all tokens that there ever were, also those that went")
    own = torch.diagonal(mask[:, 0], offset=seen, dim1=-2, dim2=-1)
    return visible(own).expand(batch, count).cpu()


def narrow(mask: torch.Tensor | None, evictor: Any, count: int, query_heads: int,
           device: torch.device) -> torch.Tensor | None:
    """Of a mask for all columns that ever were, those that are there, and the `count` that
    come."""
    if evictor.whole or (mask is None and not evictor.padded):
        return mask
    ids = torch.from_numpy(evictor.ids).to(device)
    batch, lists, _ = ids.shape
    new = torch.ones((batch, lists, count), dtype=torch.bool, device=device)
    there = torch.cat([ids >= 0, new], 2)
    columns = torch.from_numpy(evictor.columns).to(device).clamp(min=0)
    come = torch.arange(evictor.seen, evictor.seen + count, device=device)
    columns = torch.cat([columns, come.expand(batch, lists, count)], 2)
    if lists > 1:
        group = query_heads // lists
        there, columns = (one.repeat_interleave(group, 1) for one in (there, columns))
    if mask is None:
        if count > 1:
            raise make(_abi.KVT_E_STATE, f"{count} tokens behind others, and no mask for them")
        return there[:, :, None]
    mask = mask.to(device)
    heads = max(mask.shape[1], columns.shape[1])
    shape = batch, heads, count, columns.shape[2]
    found = torch.gather(mask.expand(batch, heads, count, mask.shape[3]), 3,
                         columns[:, :, None].expand(shape))
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return found.masked_fill(~there[:, :, None], hidden)
