"""A layer of transformers' DynamicCache with token eviction."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from kvtier import Attention, _abi
from kvtier._errors import make
from kvtier.h2o import MAX_TOKENS, Evictor
from transformers.cache_utils import DynamicLayer

from .attention_sums import rows
from .cache_layers import check_crop


class EvictingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of the resident tokens.

    Its length is that of the sequence, including evicted tokens, because transformers derives
    masks and positions from it."""

    is_croppable = False
    keys: Any
    values: Any

    def __init__(self, eviction: Any, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eviction, self.index = eviction, index
        self.evictor: Evictor | None = None
        #: The hook of the attention module has run, so the next `update` is allowed.
        self.armed = False
        #: A forward pass is running in this layer, or has failed there.
        self.busy = False

    @property
    def seen(self) -> int:
        """Columns so far: all tokens with padding, including evicted ones."""
        return 0 if self.evictor is None else self.evictor.seen

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values to the resident ones."""
        if not self.armed:
            raise make(_abi.KVT_E_STATE,
                       "this cache was filled with kvtier's eviction, which is not installed in "
                       "this model: begin a new cache, or call install_kv_eviction")
        self.armed = False
        pair: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, *args, **kwargs)
        return pair

    def get_seq_length(self) -> int:
        """Returns the length of the sequence, including evicted tokens."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the mask size for all tokens, including evicted ones. The hook narrows masks to
        resident tokens."""
        return self.seen + query_length, 0

    def open(self, query_heads: int, is_latent: bool, layers: int) -> Evictor:
        """Returns the layer's evictor; creates it after the first `update`."""
        if self.evictor is None:
            _, heads, _, dim = self.keys.shape
            value_dim = int(self.values.shape[3])
            latent = is_latent and heads == 1
            shape = Attention(layers, query_heads, heads, dim + value_dim if latent else dim,
                              dim if latent else value_dim, 16, MAX_TOKENS, latent)
            self.evictor = Evictor(shape, self.eviction.policy, self.index, self.keys.shape[0])
        return self.evictor

    def append_keys(self, evictor: Evictor, sequence: int, count: int) -> None:
        """Passes the last `count` keys of a sequence to the policy."""
        parts = [self.keys] if not evictor.shape.latent else [self.keys, self.values]
        new = torch.cat([part[sequence, :, -count:] for part in parts], -1)
        new = new[:, evictor.new_rows(sequence, count)]
        if new.shape[1]:
            evictor.append(sequence, rows(new))

    def keep(self, indices: Any) -> None:
        """Keeps only these rows, [sequences, lists, rows]."""
        kept = torch.from_numpy(indices).to(self.keys.device)
        self.keys, self.values = _take(self.keys, kept), _take(self.values, kept)

    def __deepcopy__(self, memo: dict[int, Any]) -> EvictingLayer:
        """Returns an independent layer for a copied cache, with the scores."""
        other = object.__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(self.__dict__)
        if self.keys is not None:
            other.keys, other.values = self.keys.clone(), self.values.clone()
        other.evictor = None if self.evictor is None else self.evictor.fork()
        self.eviction.add_layer(other)
        return other

    def reset(self) -> None:
        """Removes all tokens and scores."""
        super().reset()
        self.evictor, self.armed, self.busy = None, False, False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorders the sequences together with their scores."""
        super().reorder_cache(beam_idx)
        self._select(beam_idx.cpu().numpy())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence `repeats` times."""
        super().batch_repeat_interleave(repeats)
        if self.evictor is not None:
            self._select(np.repeat(np.arange(self.evictor.batch), repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps only these sequences."""
        super().batch_select_indices(indices)
        if self.evictor is not None:
            self._select(np.arange(self.evictor.batch)[indices.cpu().numpy()])

    def _select(self, sequences: Any) -> None:
        if self.evictor is not None:
            self.evictor.select(sequences)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last columns. Tokens that were evicted for them stay evicted."""
        check_crop(tokens_to_remove)
        if tokens_to_remove < 0 and self.evictor is not None:
            self.keep(self.evictor.truncate(max(self.seen + tokens_to_remove, 0)))


def _take(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    batch, heads, _, dim = tensor.shape
    if indices.shape[:2] == (1, 1):
        return tensor.index_select(2, indices[0, 0])
    return torch.gather(tensor, 2, indices[..., None].expand(batch, heads, -1, dim))
