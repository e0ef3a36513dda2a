"""What each layer of a model keeps for a token, learned from one forward pass of one token."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Sequence

import torch
from kvtier import RULE_FULL, RULE_WINDOW, Group
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from ._errors import unsupported

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class LayerShape(NamedTuple):
    """A layer that keeps K and V. MLA keeps its latent as K, its rotated part as V."""

    #: In the model.
    layer: int
    #: In the store: layers that keep nothing are left out.
    number: int
    k_heads: int
    k_dim: int
    v_heads: int
    v_dim: int
    dtype: torch.dtype
    device: torch.device
    #: How many tokens it sees, the new one with them; 0 = all.
    window: int

    @property
    def k_bytes(self) -> int:
        """K of a token."""
        return self.k_heads * self.k_dim * self.dtype.itemsize

    @property
    def v_bytes(self) -> int:
        """V of a token."""
        return self.v_heads * self.v_dim * self.dtype.itemsize


def shapes_of(model: Any) -> List[LayerShape]:
    """The layers that keep something. Runs one token through the model."""
    cache = DynamicCache(config=model.config)
    device = model.get_input_embeddings().weight.device
    ids = torch.zeros((1, 1), dtype=torch.long, device=device)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    shapes: List[LayerShape] = []
    layers: List[Any] = cache.layers
    for index, layer in enumerate(layers):
        if isinstance(layer, DummyLayer):
            continue
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise unsupported(
                f"layer {index} of {type(model).__name__} is kept by a {type(layer).__name__}: "
                "TieredCache has full and sliding-window attention (MLA too), no states or "
                "indexers; use the stock cache for this model")
        if not layer.is_initialized or layer.keys is None or layer.values is None:
            raise unsupported(f"layer {index} of {type(model).__name__} got no K and V from a "
                              "token of text: TieredCache has decoder-only models")
        shapes.append(_shape(index, len(shapes), layer))
    if not shapes:
        raise unsupported(f"{type(model).__name__} keeps no K and V")
    return shapes


def _shape(index: int, number: int, layer: Any) -> LayerShape:
    k, v = layer.keys, layer.values
    if k.dtype not in _DTYPES or v.dtype != k.dtype or k.ndim != 4 or v.ndim != 4:
        raise unsupported(f"layer {index} keeps K as {k.dtype}{list(k.shape)} and V as "
                          f"{v.dtype}{list(v.shape)}: f32, f16 and bf16 [batch, heads, tokens, "
                          "dim] can be kept")
    window = int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else 0
    return LayerShape(index, number, k.shape[1], k.shape[3], v.shape[1], v.shape[3], k.dtype,
                      k.device, window)


def groups_of(shapes: Sequence[LayerShape]) -> List[Group]:
    """The layout of a namespace: layers that keep the same, and need the same."""
    alike: dict[Any, List[LayerShape]] = {}
    for shape in shapes:
        alike.setdefault((*shape[2:7], shape.window), []).append(shape)
    return [Group(layers=[s.number for s in members], k_bytes=members[0].k_bytes,
                  v_bytes=members[0].v_bytes, dtype=_DTYPES[members[0].dtype],
                  # Heads are said where K and V are divided alike.
                  kv_heads=members[0].k_heads if members[0].k_heads == members[0].v_heads else 0,
                  rule=RULE_WINDOW if members[0].window else RULE_FULL,
                  window_tokens=members[0].window)
            for members in alike.values()]
