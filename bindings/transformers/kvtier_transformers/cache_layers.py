"""Cache layers in torch memory, with buffers that grow in steps and are written in place."""

from __future__ import annotations

from typing import Any, Optional

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ._planes import Pair, empty

_STEP = 256
#: Up to this size of K or V, concatenating costs less than writing in place, because a call of
#: torch costs more than the copy.
_SMALL_BYTES = 64 << 10
#: Value of `unstored` of a layer whose tokens need not be stored.
NOTHING = 1 << 62


def capacity_for(tokens: int) -> int:
    """Returns the slots to allocate for `tokens`, with spare slots so that growing is rare."""
    return -(-(tokens + max(_STEP, tokens // 4)) // 64) * 64


def check_crop(tokens_to_remove: int) -> None:
    """Raises for a positive number: transformers counts the tokens to remove below zero."""
    if tokens_to_remove > 0:
        raise ValueError(f"crop({tokens_to_remove}) is not supported: pass a negative number, -n "
                         "removes the last n tokens")


class TieredLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer with full attention. `keys` and `values` are views of its buffers."""

    def __init__(self, **_kwargs: Any) -> None:
        self._k: Optional[torch.Tensor] = None
        self._v: Optional[torch.Tensor] = None
        #: Slots of the buffers.
        self._capacity = 0
        self._end = 0
        #: Up to this many tokens, updates concatenate.
        self._small_tokens = 0
        #: Whether the caller replaced the tensors.
        self.replaced = False
        super().__init__()  # type: ignore[no-untyped-call]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        each = max(t.shape[0] * t.shape[1] * t.shape[3] for t in (key_states, value_states))
        self._small_tokens = _SMALL_BYTES // max(1, each * key_states.element_size())
        self.is_initialized = True

    @property
    def keys(self) -> Optional[torch.Tensor]:
        """K of all cached tokens."""
        return None if self._k is None else self._k.narrow(2, 0, self._end)

    @keys.setter
    def keys(self, tensor: Optional[torch.Tensor]) -> None:
        self._k = None if tensor is None else tensor.contiguous()
        self._end = self._capacity = 0 if tensor is None else tensor.shape[2]
        self.replaced = tensor is not None

    @property
    def values(self) -> Optional[torch.Tensor]:
        """V of all cached tokens."""
        if self._v is None:
            return None
        return self._v.narrow(2, 0, min(self._end, self._v.shape[2]))

    @values.setter
    def values(self, tensor: Optional[torch.Tensor]) -> None:
        self._v = None if tensor is None else tensor.contiguous()
        if tensor is not None:
            self.replaced = True
            self._capacity = min(self._capacity, tensor.shape[2])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> Pair:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = key_states.shape[2]
        begin, end = self._end, self._end + tokens
        # Writing in place would break gradients.
        if end <= self._small_tokens or key_states.requires_grad or value_states.requires_grad:
            return self._join(key_states, value_states, end)
        if end > self._capacity:
            self._grow(key_states, value_states, end)
        assert self._k is not None and self._v is not None
        self._k.narrow(2, begin, tokens).copy_(key_states)
        self._v.narrow(2, begin, tokens).copy_(value_states)
        self._end = end
        return self._k.narrow(2, 0, end), self._v.narrow(2, 0, end)

    def _join(self, key_states: torch.Tensor, value_states: torch.Tensor, end: int) -> Pair:
        """Concatenates into new buffers without spare slots."""
        k, v = self._k, self._v
        if k is None or v is None:
            k, v = key_states[:, :, :0], value_states[:, :, :0]
        elif self._capacity != self._end:
            k, v = k.narrow(2, 0, self._end), v.narrow(2, 0, self._end)
        self._k = k = torch.cat((k, key_states), 2).contiguous()
        self._v = v = torch.cat((v, value_states), 2).contiguous()
        self._end = self._capacity = end
        return k, v

    def _grow(self, k: torch.Tensor, v: torch.Tensor, end: int) -> None:
        capacity = capacity_for(end)
        old = (self._k, self._v)
        self._k, self._v = empty(k, capacity), empty(v, capacity)
        for before, after in zip(old, (self._k, self._v)):
            if before is not None and self._end:
                after.narrow(2, 0, self._end).copy_(before.narrow(2, 0, self._end))
        self._capacity = capacity

    def get_seq_length(self) -> int:
        return self._end

    def reset(self) -> None:
        self._k = self._v = None
        self._capacity = self._end = 0
        self.replaced = self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        check_crop(tokens_to_remove)
        self._end = max(0, self._end + tokens_to_remove)

    def select(self, rows: torch.Tensor) -> None:
        """Selects rows into a new buffer, because a put may still read the old one."""
        if self._k is None or self._v is None:
            return
        rows = rows.to(self._k.device)
        used = self._end
        k, v = (b.narrow(2, 0, used).index_select(0, rows) for b in (self._k, self._v))
        self._k, self._v = empty(k, self._capacity), empty(v, self._capacity)
        self._k.narrow(2, 0, used).copy_(k)
        self._v.narrow(2, 0, used).copy_(v)

    # --- for TieredCache -------------------------------------------------------------------

    @property
    def first(self) -> int:
        """Index of the first cached token."""
        return 0

    @property
    def pair(self) -> Pair:
        """The buffers; token `first` is in slot 0."""
        assert self._k is not None and self._v is not None
        return self._k, self._v

    def fill(self, k: torch.Tensor, v: torch.Tensor, first: int, end: int) -> None:
        """Adopts buffers that contain the tokens up to `end`."""
        self.lazy_initialization(k, v)
        self._k, self._v = k, v
        self._capacity, self._end = k.shape[2], end


class TieredWindowLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """A layer that attends to the last `sliding_window` tokens.

    Its buffers contain these, tokens that are not stored yet, and tokens that `crop` may need."""

    def __init__(self, sliding_window: int, **_kwargs: Any) -> None:
        self._k: Optional[torch.Tensor] = None
        self._v: Optional[torch.Tensor] = None
        self._capacity = 0
        self._first = 0
        #: Index of the first token that is not in a stored chunk.
        self.unstored = NOTHING
        #: With `record_past`: index of the first token that `crop` may remove.
        self._recorded = 0
        self.replaced = False
        super().__init__(sliding_window)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._sliding_window_tensor = self._sliding_window_tensor.to(self.device)
        self.is_initialized = True

    @property
    def _visible(self) -> int:
        return max(self._first, self.cumulative_length - self.sliding_window + 1)

    @property
    def keys(self) -> Optional[torch.Tensor]:
        """K of the tokens that the next token attends to."""
        return None if self._k is None else self._slice(self._k, self._visible)

    @keys.setter
    def keys(self, tensor: Optional[torch.Tensor]) -> None:
        if tensor is not None:
            self.replaced = True
            self._first = self.cumulative_length - tensor.shape[2]
            self._capacity = tensor.shape[2]
        self._k = None if tensor is None else tensor.contiguous()

    @property
    def values(self) -> Optional[torch.Tensor]:
        """V of the tokens that the next token attends to."""
        return None if self._v is None else self._slice(self._v, self._visible)

    @values.setter
    def values(self, tensor: Optional[torch.Tensor]) -> None:
        self._v = None if tensor is None else tensor.contiguous()
        self.replaced = self.replaced or tensor is not None

    def _slice(self, buffer: torch.Tensor, start: int) -> torch.Tensor:
        return buffer.narrow(2, start - self._first, self.cumulative_length - start)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> Pair:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens, start = key_states.shape[2], self._visible
        slot = self.cumulative_length - self._first
        if key_states.requires_grad or value_states.requires_grad:
            return self._join(key_states, value_states, start)
        if slot + tokens > self._capacity:
            self._compact(key_states, value_states, tokens)
            slot = self.cumulative_length - self._first
        assert self._k is not None and self._v is not None
        self._k.narrow(2, slot, tokens).copy_(key_states)
        self._v.narrow(2, slot, tokens).copy_(value_states)
        self.cumulative_length += tokens
        return self._slice(self._k, start), self._slice(self._v, start)

    def _join(self, key_states: torch.Tensor, value_states: torch.Tensor, start: int) -> Pair:
        """Concatenates into new buffers, because writing in place would break gradients."""
        joined = []
        for buffer, new in ((self._k, key_states), (self._v, value_states)):
            old = None if buffer is None else self._slice(buffer, self._first)
            joined.append(new.contiguous() if old is None else torch.cat([old, new], dim=2))
        self._k, self._v = joined
        self._capacity = self._k.shape[2]
        self.cumulative_length += key_states.shape[2]
        return self._slice(self._k, start), self._slice(self._v, start)

    def _needed(self) -> int:
        """Returns the index of the first token that must stay in the buffers."""
        keep = min(self._visible, self.unstored)
        if self.record_past:
            keep = min(keep, self._recorded - self.sliding_window + 1)
        return max(keep, self._first)

    def _compact(self, k: torch.Tensor, v: torch.Tensor, tokens: int) -> None:
        """Copies the needed tokens to new buffers, because a put may still read the old ones."""
        keep = self._needed()
        used = self.cumulative_length - keep
        old, self._capacity = (self._k, self._v), capacity_for(used + tokens)
        self._k, self._v = empty(k, self._capacity), empty(v, self._capacity)
        for before, after in zip(old, (self._k, self._v)):
            if before is not None and used:
                after.narrow(2, 0, used).copy_(before.narrow(2, keep - self._first, used))
        self._first = keep

    def shrink(self) -> None:
        """Frees the memory that a long prompt needed."""
        if (self._k is None or self._v is None
                or self._capacity <= 4 * capacity_for(self.sliding_window)):
            return
        if self.cumulative_length - self._needed() <= self.sliding_window + _STEP:
            self._compact(self._k, self._v, 1)

    def reset(self) -> None:
        self._k = self._v = None
        self._capacity = self._first = self._recorded = self.cumulative_length = 0
        self.unstored = NOTHING
        self.replaced = self.is_initialized = False

    def activate_past_recording(self) -> None:
        if not self.record_past:
            self.record_past, self._recorded = True, self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        is_full = self.cumulative_length >= self.sliding_window
        if is_full and not self.record_past:
            raise RuntimeError(f"crop({tokens_to_remove}) is not possible: the window is full, and "
                               "tokens before it were not kept. Call activate_past_recording() on "
                               "the cache before you generate")
        check_crop(tokens_to_remove)
        length = max(0, self.cumulative_length - abs(tokens_to_remove))
        if length and max(0, length - self.sliding_window + 1) < self._first:
            raise RuntimeError(f"crop({tokens_to_remove}) is not possible: only "
                               f"{self.cumulative_length - self._recorded} tokens were recorded "
                               "since the last crop. Remove at most these")
        self.cumulative_length = self._recorded = length

    def select(self, rows: torch.Tensor) -> None:
        """Selects rows into a new buffer, because a put may still read the old one."""
        if self._k is None or self._v is None:
            return
        rows = rows.to(self._k.device)
        k, v = (self._slice(b, self._first).index_select(0, rows) for b in (self._k, self._v))
        self._k, self._v = empty(k, self._capacity), empty(v, self._capacity)
        self._k.narrow(2, 0, k.shape[2]).copy_(k)
        self._v.narrow(2, 0, v.shape[2]).copy_(v)

    # --- for TieredCache -------------------------------------------------------------------

    @property
    def first(self) -> int:
        """Index of the first token in the buffers."""
        return self._first

    @property
    def pair(self) -> Pair:
        """The buffers; token `first` is in slot 0."""
        assert self._k is not None and self._v is not None
        return self._k, self._v

    def fill(self, k: torch.Tensor, v: torch.Tensor, first: int, end: int) -> None:
        """Adopts buffers that contain the tokens from `first` up to `end`."""
        self.lazy_initialization(k, v)
        self._k, self._v, self._capacity = k, v, k.shape[2]
        self._first, self.cumulative_length, self._recorded = first, end, end
