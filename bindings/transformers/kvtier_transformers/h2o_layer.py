"""A layer of transformers' DynamicCache from which tokens go."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from kvtier import Attention, _abi
from kvtier._errors import make
from kvtier.h2o import MAX_TOKENS, Evictor
from transformers.cache_utils import DynamicLayer

from .attention_sums import rows


class EvictingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of the tokens that are there. Its length is that of the sequence: what
    masks and positions are made from counts tokens that went, too."""

    is_croppable = False
    keys: Any
    values: Any

    def __init__(self, eviction: Any, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eviction, self.index = eviction, index
        self.evictor: Evictor | None = None
        #: The module of its model is about to run: it knows which rows there are.
        self.armed = False
        #: It runs, or failed.
        self.busy = False

    @property
    def seen(self) -> int:
        """How many columns came so far."""
        return 0 if self.evictor is None else self.evictor.seen

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Puts keys and values behind those that are there."""
        if not self.armed:
            raise make(_abi.KVT_E_STATE,
                       "a cache from which tokens were to go, used without kvtier's eviction in "
                       "this model: begin a new cache")
        self.armed = False
        found: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, *args, **kwargs)
        return found

    def get_seq_length(self) -> int:
        """The length of the sequence, tokens that went included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are for all tokens that ever were; attention takes what is there from them."""
        return self.seen + query_length, 0

    def open(self, query_heads: int, is_latent: bool, layers: int) -> Evictor:
        """What decides for this layer; its keys are there."""
        if self.evictor is None:
            _, heads, _, dim = self.keys.shape
            value_dim = int(self.values.shape[3])
            latent = is_latent and heads == 1
            shape = Attention(layers, query_heads, heads, dim + value_dim if latent else dim,
                              dim if latent else value_dim, 16, MAX_TOKENS, latent)
            self.evictor = Evictor(shape, self.eviction.policy, self.index, self.keys.shape[0])
        return self.evictor

    def append_keys(self, evictor: Evictor, sequence: int, count: int) -> None:
        """Tells the policy the keys that came."""
        came = [self.keys] if not evictor.shape.latent else [self.keys, self.values]
        new = torch.cat([one[sequence, :, -count:] for one in came], -1)
        new = new[:, evictor.new_rows(sequence, count)]
        if new.shape[1]:
            evictor.append(sequence, rows(new))

    def keep(self, places: Any) -> None:
        """Only these rows are there, [sequences, lists, rows]."""
        found = torch.from_numpy(places).to(self.keys.device)
        self.keys, self.values = _take(self.keys, found), _take(self.values, found)

    def __deepcopy__(self, memo: dict[int, Any]) -> EvictingLayer:
        """A layer of a copied cache: of the same model, and what was counted goes with it."""
        other = object.__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(self.__dict__)
        if self.keys is not None:
            other.keys, other.values = self.keys.clone(), self.values.clone()
        other.evictor = None if self.evictor is None else self.evictor.fork()
        self.eviction.has(other)
        return other

    def reset(self) -> None:
        """Begins anew."""
        super().reset()
        self.evictor, self.armed, self.busy = None, False, False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """The sequences are these of its sequences; what was counted goes with them."""
        super().reorder_cache(beam_idx)
        self._select(beam_idx.cpu().numpy())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence is there so many times."""
        super().batch_repeat_interleave(repeats)
        if self.evictor is not None:
            self._select(np.repeat(np.arange(self.evictor.batch), repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these sequences are there."""
        super().batch_select_indices(indices)
        if self.evictor is not None:
            self._select(np.arange(self.evictor.batch)[indices.cpu().numpy()])

    def _select(self, sequences: Any) -> None:
        if self.evictor is not None:
            self.evictor.select(sequences)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last columns back. Tokens that went for them do not come back."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a number below zero, not {tokens_to_remove}")
        if tokens_to_remove < 0 and self.evictor is not None:
            self.keep(self.evictor.truncate(max(self.seen + tokens_to_remove, 0)))


def _take(rows_of: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    batch, heads, _, dim = rows_of.shape
    if places.shape[:2] == (1, 1):
        return rows_of.index_select(2, places[0, 0])
    return torch.gather(rows_of, 2, places[..., None].expand(batch, heads, -1, dim))
