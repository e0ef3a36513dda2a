"""Shapes of a model's KV cache layers, measured by a forward pass of one token."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Sequence

import torch
from kvtier import RULE_FULL, RULE_WINDOW, Group
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ._errors import unsupported
from ._versions import DummyLayer

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class LayerShape(NamedTuple):
    """Shape of a layer that caches K and V. MLA caches its latent as K, its rotated part as V."""

    #: Index in the model.
    layer: int
    #: Index in the store, which skips layers without a cache.
    number: int
    k_heads: int
    k_dim: int
    v_heads: int
    v_dim: int
    dtype: torch.dtype
    device: torch.device
    #: Tokens that it attends to, including the new one; 0: all.
    window: int

    @property
    def k_bytes(self) -> int:
        """Bytes of K of one token."""
        return self.k_heads * self.k_dim * self.dtype.itemsize

    @property
    def v_bytes(self) -> int:
        """Bytes of V of one token."""
        return self.v_heads * self.v_dim * self.dtype.itemsize


def shapes_of(model: Any) -> List[LayerShape]:
    """Returns the layers that cache KV. Runs one token through the model."""
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
                f"layer {index} of {type(model).__name__} uses the cache class "
                f"{type(layer).__name__}: TieredCache supports full and sliding-window attention, "
                "including MLA, but no states or indexers. Use the stock cache for this model")
        if not layer.is_initialized or layer.keys is None or layer.values is None:
            raise unsupported(f"layer {index} of {type(model).__name__} cached no K and V for a "
                              "text token: TieredCache supports decoder-only models. Use the "
                              "stock cache for this model")
        shapes.append(_shape(index, len(shapes), layer))
    if not shapes:
        raise unsupported(f"{type(model).__name__} caches no K and V: TieredCache needs a model "
                          "with attention layers")
    return shapes


def _shape(index: int, number: int, layer: Any) -> LayerShape:
    k, v = layer.keys, layer.values
    if k.dtype not in _DTYPES or v.dtype != k.dtype or k.ndim != 4 or v.ndim != 4:
        raise unsupported(f"layer {index} caches K as {k.dtype}{list(k.shape)} and V as "
                          f"{v.dtype}{list(v.shape)}: supported are f32, f16 and bf16 tensors of "
                          "[batch, heads, tokens, dim], K and V of one dtype")
    window = int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else 0
    return LayerShape(index, number, k.shape[1], k.shape[3], v.shape[1], v.shape[3], k.dtype,
                      k.device, window)


def groups_of(shapes: Sequence[LayerShape]) -> List[Group]:
    """Returns the layout's groups: layers with equal sizes, dtype and window."""
    groups: dict[Any, List[LayerShape]] = {}
    for shape in shapes:
        groups.setdefault((*shape[2:7], shape.window), []).append(shape)
    return [Group(layers=[s.number for s in members], k_bytes=members[0].k_bytes,
                  v_bytes=members[0].v_bytes, dtype=_DTYPES[members[0].dtype],
                  # The layout has one number of heads: set it only if K and V agree.
                  kv_heads=members[0].k_heads if members[0].k_heads == members[0].v_heads else 0,
                  rule=RULE_WINDOW if members[0].window else RULE_FULL,
                  window_tokens=members[0].window)
            for members in groups.values()]
