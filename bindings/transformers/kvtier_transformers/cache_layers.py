"""Layers that rest in torch memory: buffers that grow in steps, written in place once they are
not small."""

from __future__ import annotations

from typing import Any, Optional

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ._planes import Pair, empty

_STEP = 256
#: While K or V of all tokens are no more than this, joining costs less than writing in place: a
#: call of torch's costs more than such a copy.
_BRIEF_BYTES = 64 << 10
#: Slots from here on are not waited for: no chunk of theirs is to be stored.
NOTHING = 1 << 62


def roomier(tokens: int) -> int:
    """Slots for so many tokens and some to come: growing costs a copy of all, seldom."""
    return -(-(tokens + max(_STEP, tokens // 4)) // 64) * 64


class TieredLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer that sees all tokens. `keys` and `values` are views of its buffers."""

    def __init__(self, **_kwargs: Any) -> None:
        self._k: Optional[torch.Tensor] = None
        self._v: Optional[torch.Tensor] = None
        self._room = 0
        self._end = 0
        #: Up to so many tokens are joined.
        self._brief = 0
        #: Somebody has put other tensors in its place.
        self.replaced = False
        super().__init__()  # type: ignore[no-untyped-call]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        each = max(t.shape[0] * t.shape[1] * t.shape[3] for t in (key_states, value_states))
        self._brief = _BRIEF_BYTES // max(1, each * key_states.element_size())
        self.is_initialized = True

    @property
    def keys(self) -> Optional[torch.Tensor]:
        """K of the tokens that are there."""
        return None if self._k is None else self._k.narrow(2, 0, self._end)

    @keys.setter
    def keys(self, tensor: Optional[torch.Tensor]) -> None:
        self._k = None if tensor is None else tensor.contiguous()
        self._end = self._room = 0 if tensor is None else tensor.shape[2]
        self.replaced = tensor is not None

    @property
    def values(self) -> Optional[torch.Tensor]:
        """V of the tokens that are there."""
        if self._v is None:
            return None
        return self._v.narrow(2, 0, min(self._end, self._v.shape[2]))

    @values.setter
    def values(self, tensor: Optional[torch.Tensor]) -> None:
        self._v = None if tensor is None else tensor.contiguous()
        if tensor is not None:
            self.replaced = True
            self._room = min(self._room, tensor.shape[2])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> Pair:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = key_states.shape[2]
        begin, end = self._end, self._end + tokens
        # With gradients, too: writing in place would break them.
        if end <= self._brief or key_states.requires_grad or value_states.requires_grad:
            return self._join(key_states, value_states, end)
        if end > self._room:
            self._grow(key_states, value_states, end)
        assert self._k is not None and self._v is not None
        self._k.narrow(2, begin, tokens).copy_(key_states)
        self._v.narrow(2, begin, tokens).copy_(value_states)
        self._end = end
        return self._k.narrow(2, 0, end), self._v.narrow(2, 0, end)

    def _join(self, key_states: torch.Tensor, value_states: torch.Tensor, end: int) -> Pair:
        """New buffers without room."""
        k, v = self._k, self._v
        if k is None or v is None:
            k, v = key_states[:, :, :0], value_states[:, :, :0]
        elif self._room != self._end:
            k, v = k.narrow(2, 0, self._end), v.narrow(2, 0, self._end)
        self._k = k = torch.cat((k, key_states), 2).contiguous()
        self._v = v = torch.cat((v, value_states), 2).contiguous()
        self._end = self._room = end
        return k, v

    def _grow(self, k: torch.Tensor, v: torch.Tensor, end: int) -> None:
        room = roomier(end)
        old = (self._k, self._v)
        self._k, self._v = empty(k, room), empty(v, room)
        for before, after in zip(old, (self._k, self._v)):
            if before is not None and self._end:
                after.narrow(2, 0, self._end).copy_(before.narrow(2, 0, self._end))
        self._room = room

    def get_seq_length(self) -> int:
        return self._end

    def reset(self) -> None:
        self._k = self._v = None
        self._room = self._end = 0
        self.replaced = self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): a negative number says how many tokens go")
        self._end = max(0, self._end + tokens_to_remove)

    def pick(self, rows: torch.Tensor) -> None:
        """Goes on with these rows, in a new buffer: the old one may be read by a put."""
        if self._k is None or self._v is None:
            return
        rows = rows.to(self._k.device)
        used = self._end
        k, v = (b.narrow(2, 0, used).index_select(0, rows) for b in (self._k, self._v))
        self._k, self._v = empty(k, self._room), empty(v, self._room)
        self._k.narrow(2, 0, used).copy_(k)
        self._v.narrow(2, 0, used).copy_(v)

    # --- what the cache asks ---------------------------------------------------------------

    @property
    def first(self) -> int:
        """The first token that is there."""
        return 0

    @property
    def pair(self) -> Pair:
        """The buffers; token `first` is in slot 0."""
        assert self._k is not None and self._v is not None
        return self._k, self._v

    def fill(self, k: torch.Tensor, v: torch.Tensor, first: int, end: int) -> None:
        """Begins with buffers that have the tokens up to `end`."""
        self.lazy_initialization(k, v)
        self._k, self._v = k, v
        self._room, self._end = k.shape[2], end


class TieredWindowLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """A layer that sees the last `sliding_window` tokens. Its buffers have those, and what is
    still to be stored or may be taken back."""

    def __init__(self, sliding_window: int, **_kwargs: Any) -> None:
        self._k: Optional[torch.Tensor] = None
        self._v: Optional[torch.Tensor] = None
        self._room = 0
        self._first = 0
        #: The first token of which no chunk was stored.
        self.unstored = NOTHING
        #: With `record_past`: tokens from here on may be taken back.
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
        """K of what the next token will see."""
        return None if self._k is None else self._seen(self._k, self._visible)

    @keys.setter
    def keys(self, tensor: Optional[torch.Tensor]) -> None:
        if tensor is not None:
            self.replaced = True
            self._first = self.cumulative_length - tensor.shape[2]
            self._room = tensor.shape[2]
        self._k = None if tensor is None else tensor.contiguous()

    @property
    def values(self) -> Optional[torch.Tensor]:
        """V of what the next token will see."""
        return None if self._v is None else self._seen(self._v, self._visible)

    @values.setter
    def values(self, tensor: Optional[torch.Tensor]) -> None:
        self._v = None if tensor is None else tensor.contiguous()
        self.replaced = self.replaced or tensor is not None

    def _seen(self, buffer: torch.Tensor, start: int) -> torch.Tensor:
        return buffer.narrow(2, start - self._first, self.cumulative_length - start)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> Pair:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens, start = key_states.shape[2], self._visible
        slot = self.cumulative_length - self._first
        if key_states.requires_grad or value_states.requires_grad:
            return self._join(key_states, value_states, start)
        if slot + tokens > self._room:
            self._compact(key_states, value_states, tokens)
            slot = self.cumulative_length - self._first
        assert self._k is not None and self._v is not None
        self._k.narrow(2, slot, tokens).copy_(key_states)
        self._v.narrow(2, slot, tokens).copy_(value_states)
        self.cumulative_length += tokens
        return self._seen(self._k, start), self._seen(self._v, start)

    def _join(self, key_states: torch.Tensor, value_states: torch.Tensor, start: int) -> Pair:
        """With gradients: writing in place would break them."""
        joined = []
        for buffer, new in ((self._k, key_states), (self._v, value_states)):
            old = None if buffer is None else self._seen(buffer, self._first)
            joined.append(new.contiguous() if old is None else torch.cat([old, new], dim=2))
        self._k, self._v = joined
        self._room = self._k.shape[2]
        self.cumulative_length += key_states.shape[2]
        return self._seen(self._k, start), self._seen(self._v, start)

    def _needed(self) -> int:
        """The first token that has to stay."""
        keep = min(self._visible, self.unstored)
        if self.record_past:
            keep = min(keep, self._recorded - self.sliding_window + 1)
        return max(keep, self._first)

    def _compact(self, k: torch.Tensor, v: torch.Tensor, tokens: int) -> None:
        """New buffers with what has to stay: a put may be reading the old ones."""
        keep = self._needed()
        used = self.cumulative_length - keep
        old, self._room = (self._k, self._v), roomier(used + tokens)
        self._k, self._v = empty(k, self._room), empty(v, self._room)
        for before, after in zip(old, (self._k, self._v)):
            if before is not None and used:
                after.narrow(2, 0, used).copy_(before.narrow(2, keep - self._first, used))
        self._first = keep

    def slim(self) -> None:
        """Gives back what a long prompt has taken."""
        if self._k is None or self._v is None or self._room <= 4 * roomier(self.sliding_window):
            return
        if self.cumulative_length - self._needed() <= self.sliding_window + _STEP:
            self._compact(self._k, self._v, 1)

    def reset(self) -> None:
        self._k = self._v = None
        self._room = self._first = self._recorded = self.cumulative_length = 0
        self.unstored = NOTHING
        self.replaced = self.is_initialized = False

    def activate_past_recording(self) -> None:
        if not self.record_past:
            self.record_past, self._recorded = True, self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        gone = abs(tokens_to_remove)
        beyond = self.cumulative_length >= self.sliding_window
        if beyond and not self.record_past:
            raise RuntimeError("crop: the window is full and what left it was not kept; call "
                               "activate_past_recording() on the cache before generating")
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): a negative number says how many tokens go")
        left = max(0, self.cumulative_length - gone)
        if left and max(0, left - self.sliding_window + 1) < self._first:
            raise RuntimeError(f"crop({tokens_to_remove}): only "
                               f"{self.cumulative_length - self._recorded} tokens were recorded "
                               "since the last crop")
        self.cumulative_length = self._recorded = left

    def pick(self, rows: torch.Tensor) -> None:
        """Goes on with these rows, in a new buffer: the old one may be read by a put."""
        if self._k is None or self._v is None:
            return
        rows = rows.to(self._k.device)
        k, v = (self._seen(b, self._first).index_select(0, rows) for b in (self._k, self._v))
        self._k, self._v = empty(k, self._room), empty(v, self._room)
        self._k.narrow(2, 0, k.shape[2]).copy_(k)
        self._v.narrow(2, 0, v.shape[2]).copy_(v)

    # --- what the cache asks ---------------------------------------------------------------

    @property
    def first(self) -> int:
        """The first token that is there."""
        return self._first

    @property
    def pair(self) -> Pair:
        """The buffers; token `first` is in slot 0."""
        assert self._k is not None and self._v is not None
        return self._k, self._v

    def fill(self, k: torch.Tensor, v: torch.Tensor, first: int, end: int) -> None:
        """Begins with buffers that have the tokens from `first` up to `end`."""
        self.lazy_initialization(k, v)
        self._k, self._v, self._room = k, v, k.shape[2]
        self._first, self.cumulative_length, self._recorded = first, end, end
