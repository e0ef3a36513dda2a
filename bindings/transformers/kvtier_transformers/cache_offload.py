"""Offloaded cache layers: their KV is in the store, and is loaded shortly before its use."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Sequence, Tuple

import kvtier
import torch
from kvtier import LEVEL_RAM, Session
from transformers.cache_utils import CacheLayerMixin

from ._errors import state, with_advice
from ._planes import Gpu, Pair, Transfer, blank, from_store, to_store
from ._shapes import LayerShape
from .cache_layers import TieredLayer, capacity_for, check_crop
from .sessions import Rows


class Slot:
    """Buffers that one layer owns for a while."""

    def __init__(self) -> None:
        self.owner: Optional["OffloadedLayer"] = None
        self.pair: Optional[Pair] = None
        #: Valid tokens in the buffers.
        self.filled = 0
        #: Valid tokens once `gets` have completed.
        self.expected = 0
        #: Gets that write the buffers.
        self.gets: List[Transfer] = []
        #: Puts that read the buffers.
        self.puts: List[Transfer] = []
        #: Time of the last use, for LRU.
        self.used = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit into the buffers."""
        return 0 if self.pair is None else self.pair[0].shape[2]

    def wait_gets(self) -> List[Tuple[int, Any]]:
        """Waits for the gets, and returns their results. An interrupted wait keeps them."""
        results = [get.wait() for get in self.gets]
        self.gets = []
        return results

    def wait_puts(self) -> List[Any]:
        """Waits for the puts, and returns an error or None for each."""
        errors = [put.wait()[1] for put in self.puts]
        self.puts = []
        return errors

    def invalidate(self) -> None:
        """Waits for transfers, then discards the contents and the owner."""
        self.wait_puts()
        self.wait_gets()
        self.filled, self.owner = 0, None


class Ring:
    """Memory of the offloaded mode: `resident_layers` slots for each shape and device, and the
    tokens of all layers that are not in the store yet."""

    def __init__(self, rows: Rows, chunk: int, resident_layers: int,
                 gpu: Optional[Gpu] = None) -> None:
        self.rows, self.chunk, self.gpu = rows, chunk, gpu
        self.layers: List["OffloadedLayer"] = []
        self.fetches = 0
        self.failed_puts = 0
        self._each = resident_layers
        self._slots: Dict[Any, List[Slot]] = {}
        self._putting: Deque["OffloadedLayer"] = deque()
        self._clock = 0

    def slot(self, layer: "OffloadedLayer", current: Optional["OffloadedLayer"]) -> Slot:
        """Returns the layer's slot, or else the least recently used one."""
        slots = self._slots.setdefault(layer.shape[2:8], [Slot() for _ in range(self._each)])
        self._clock += 1
        for slot in slots:
            if slot.owner is layer:
                slot.used = self._clock
                return slot
        slot = min((s for s in slots if current is None or s.owner is not current),
                   key=lambda s: s.used)
        slot.invalidate()
        slot.owner, slot.used = layer, self._clock
        return slot

    def prefetch(self, layer: "OffloadedLayer") -> None:
        """Starts to load the layers after `layer`."""
        at = self.layers.index(layer)
        for step in range(1, min(self._each, len(self.layers))):
            after = self.layers[(at + step) % len(self.layers)]
            after.fetch(current=layer)

    def transfers_of(self, layer: "OffloadedLayer") -> List[Transfer]:
        """Returns the transfers in progress that use the layer's slot."""
        return [transfer for slot in self._all() if slot.owner is layer
                for transfer in [*slot.gets, *slot.puts]]

    def put_started(self, layer: "OffloadedLayer") -> None:
        """Counts a put of the layer, and waits while more than `resident_layers` are in
        progress."""
        self._putting.append(layer)
        self._settle(self._each)

    def settle(self) -> None:
        """Waits for all puts."""
        self._settle(0)
        for slot in self._all():
            slot.wait_puts()

    def _settle(self, most: int) -> None:
        while len(self._putting) > most:
            self._putting[0].settle()
            self._putting.popleft()

    def _all(self) -> Iterator[Slot]:
        return (slot for slots in self._slots.values() for slot in slots)

    def abandon(self) -> None:
        """Discards all slots without waiting. Transfers in progress keep their buffers."""
        self._putting.clear()
        self._slots.clear()

    def submit(self, make: Callable[[], Transfer], untracked: Sequence[Transfer]) -> Transfer:
        """Submits a transfer. If too many ops are in progress, waits for those of this cache and
        for `untracked`, which no slot or layer has yet."""
        try:
            return make()
        except kvtier.AgainError:
            for transfer in untracked:
                transfer.wait_released()
            self.wait_released()
            return make()

    def wait_released(self) -> None:
        """Waits for all transfers in progress; their results are read later."""
        for layer in self.layers:
            layer.wait_released()

    def truncate(self, end: int) -> None:
        """Discards tokens after `end` in all slots."""
        for slot in self._all():
            if slot.gets or end == 0:
                slot.invalidate()
            slot.filled = min(slot.filled, end)


def _not_replaceable() -> Exception:
    return state("the KV of a cache with resident_layers= is in the store and cannot be replaced: "
                 "use a cache without resident_layers=")


class OffloadedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer with full attention whose full chunks are in the store. The rest, and chunks that
    could not be stored, are in torch memory (`tail`)."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, shape: LayerShape, ring: Ring) -> None:
        self.shape, self._ring = shape, ring
        ring.layers.append(self)
        self.tail = TieredLayer()
        #: Tokens in the store, a multiple of a chunk. The tail starts here.
        self.base = 0
        #: Tokens that were put, of which puts may be in progress.
        self._put_tokens = 0
        self._end = 0
        self._puts: List[Tuple[Transfer, int]] = []
        self.is_initialized = False

    @property
    def keys(self) -> Optional[torch.Tensor]:
        """K of all tokens, loaded on access; valid until other layers need the memory."""
        return None if self._end == 0 else self.whole()[0]

    @keys.setter
    def keys(self, _tensor: object) -> None:
        raise _not_replaceable()

    @property
    def values(self) -> Optional[torch.Tensor]:
        """V of all tokens, loaded on access; valid until other layers need the memory."""
        return None if self._end == 0 else self.whole()[1]

    @values.setter
    def values(self, _tensor: object) -> None:
        raise _not_replaceable()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> Pair:
        tokens = key_states.shape[2]
        self._check(key_states, value_states, tokens)
        self.is_initialized = True
        if self._puts and all(transfer.done for transfer, _ in self._puts):
            self.settle()
        slot = self._loaded(key_states.shape[0], self._end + tokens)
        assert slot.pair is not None
        begin, self._end = self._end, self._end + tokens
        for buffer, new in zip(slot.pair, (key_states, value_states)):
            buffer.narrow(2, begin, tokens).copy_(new)
        slot.filled = self._end
        self.tail.update(key_states, value_states)
        self._store()
        self._ring.prefetch(self)
        k, v = slot.pair
        return k.narrow(2, 0, self._end), v.narrow(2, 0, self._end)

    def _check(self, key_states: torch.Tensor, value_states: torch.Tensor, tokens: int) -> None:
        rows = self._ring.rows
        if {key_states.dtype, value_states.dtype} != {self.shape.dtype}:
            raise state(f"the KV of layer {self.shape.layer} is {key_states.dtype} and "
                        f"{value_states.dtype}, but was {self.shape.dtype} when Tiers was created: "
                        "do not use autocast with resident_layers=")
        if key_states.requires_grad:
            raise state("the offloaded mode does not support gradients: use torch.no_grad() or "
                        "inference_mode(), or a cache without resident_layers=")
        if not rows.unknown and rows.recorded > self._end + tokens:
            raise state(f"layer {self.shape.layer} has {self._end} of {rows.recorded - tokens} "
                        "tokens, because a forward pass failed midway: resume() a new cache")
        if rows.unknown or rows.recorded < self._end + tokens:
            why = rows.unknown or "the model was called around the hook of Tiers(model, ...)"
            raise state(f"the offloaded mode must know the tokens, but {why}: use a cache without "
                        "resident_layers=")

    # --- loading ---------------------------------------------------------------------------

    def fetch(self, current: "Optional[OffloadedLayer]" = None) -> Slot:
        """Starts to load the stored tokens. `current` is a layer that keeps its slot."""
        slot = self._ring.slot(self, current)
        rows = self._ring.rows.sessions
        if slot.gets or slot.filled >= self.base or not rows:
            return slot
        if (slot.pair is None or slot.capacity < self._end + 1
                or slot.pair[0].shape[0] != len(rows)):
            slot.pair, slot.filled = blank(self.shape, len(rows), capacity_for(self._end + 1)), 0
        begin = slot.filled // self._ring.chunk * self._ring.chunk
        slot.expected = slot.filled  # raised below, once the gets of all rows are submitted
        self._get_rows(rows, slot.pair, begin, begin, self.base, slot.gets)
        slot.expected = self.base
        self._ring.fetches += 1
        return slot

    def _get_rows(self, rows: Sequence[Session], pair: Pair, slot: int, begin: int, end: int,
                  gets: List[Transfer]) -> List[Transfer]:
        """Submits a get for each row, and appends it to `gets` at once: if a later one fails, the
        earlier ones are known there."""
        for row, session in enumerate(rows):
            gets.append(self._ring.submit(partial(
                from_store, session, [(*pair, slot)], row, self._ring.gpu,
                first_layer=self.shape.number, first_token=begin, tokens=end - begin), gets))
        return gets

    def _loaded(self, batch: int, capacity: int) -> Slot:
        """Returns the layer's slot with all tokens loaded, and with at least `capacity` tokens of
        space."""
        slot = self.fetch()
        while slot.gets:  # repeat: a put may complete meanwhile and raise `base`
            for result in slot.wait_gets():
                self._raise_for(*result)
            slot.filled = max(slot.filled, slot.expected)
            slot = self.fetch()
        if slot.pair is None or slot.capacity < capacity or slot.pair[0].shape[0] != batch:
            before, slot.pair = slot.pair, blank(self.shape, batch, capacity_for(capacity))
            if before is not None and slot.filled:
                for old, new in zip(before, slot.pair):
                    new.narrow(2, 0, slot.filled).copy_(old.narrow(2, 0, slot.filled))
        if slot.filled < self._end:
            rest = self._end - slot.filled
            for buffer, tail in zip(slot.pair, self.tail.pair):
                part = tail.narrow(2, slot.filled - self.base, rest)
                buffer.narrow(2, slot.filled, rest).copy_(part)
            slot.filled = self._end
        return slot

    def _raise_for(self, _tokens: int, error: Any) -> None:
        if isinstance(error, kvtier.ClosedError):
            raise error
        if error is not None:
            raise state(f"the KV of layer {self.shape.layer} could not be loaded ({error}): "
                        "resume() a new cache. Use a store with enough host= or with disk=, which "
                        "loses only damaged KV") from error

    def whole(self) -> Pair:
        """Returns K and V of all tokens."""
        slot = self._loaded(len(self._ring.rows.sessions) or self.tail.pair[0].shape[0], self._end)
        assert slot.pair is not None
        k, v = slot.pair
        return k.narrow(2, 0, self._end), v.narrow(2, 0, self._end)

    # --- storing ---------------------------------------------------------------------------

    def _store(self) -> None:
        """Puts new full chunks into the store."""
        full = self._end // self._ring.chunk * self._ring.chunk
        if full <= self._put_tokens:
            return
        rows = self._ring.rows
        if not rows.append_recorded() or any(rows.pads):
            why = rows.unknown or "its rows are padded"
            raise state(f"the offloaded mode cannot store this batch, because {why}: use a cache "
                        "without resident_layers=")
        for row, session in enumerate(rows.sessions):
            placed = (*self.tail.pair, self._put_tokens - self.base)
            transfer = self._ring.submit(partial(
                to_store, session, [placed], row, self._ring.gpu,
                first_layer=self.shape.number, first_token=self._put_tokens,
                tokens=full - self._put_tokens, level=LEVEL_RAM), ())
            self._puts.append((transfer, full))
        self._put_tokens = full
        self._ring.put_started(self)

    def settle(self) -> None:
        """Waits for the puts. Stored chunks are removed from torch memory; if a put failed, all
        stay and are put again. An interrupted call changes nothing and can be repeated."""
        if not self._puts:
            return
        full = self._puts[-1][1]
        if not all([transfer.wait()[1] is None for transfer, _ in self._puts]):
            self._ring.failed_puts += 1
            self._put_tokens, self._puts = self.base, []
            return
        stored, remaining = full - self.base, self._end - full
        old, tail = self.tail.pair, TieredLayer()
        batch = old[0].shape[0]
        fresh = blank(self.shape, batch,
                      -(-(remaining + 1) // self._ring.chunk) * self._ring.chunk)
        for before, after in zip(old, fresh):
            after.narrow(2, 0, remaining).copy_(before.narrow(2, stored, remaining))
        tail.fill(*fresh, 0, remaining)
        self.tail, self.base, self._puts = tail, full, []

    def wait_released(self) -> None:
        """Waits for all transfers of the layer in progress; their results are read later."""
        for transfer, _ in self._puts:
            transfer.wait_released()
        for transfer in self._ring.transfers_of(self):
            transfer.wait_released()

    def save(self, tokens: int, level: int) -> None:
        """Stores the first `tokens` tokens at `level`. It loads and puts all of them again."""
        self.whole()
        slot = self._loaded(len(self._ring.rows.sessions), self._end)
        assert slot.pair is not None
        slot.wait_puts()  # of an interrupted save
        for row, session in enumerate(self._ring.rows.sessions):
            slot.puts.append(self._ring.submit(partial(
                to_store, session, [(*slot.pair, 0)], row, self._ring.gpu,
                first_layer=self.shape.number, first_token=0, tokens=tokens, level=level), ()))
        for error in slot.wait_puts():
            if error is not None:
                raise with_advice(error)

    # --- other operations ------------------------------------------------------------------

    def begin(self, sessions: Sequence[Session], loaded: int, end: int) -> Tuple[int, Any]:
        """Starts with the `end` stored tokens of a resumed prompt. Returns the tokens loaded for
        all rows, and an error or None.

        Loads all tokens now, so that damage is found before the model runs."""
        slot = self._ring.slot(self, None)
        slot.pair, slot.filled = blank(self.shape, len(sessions), capacity_for(loaded)), 0
        slot.expected = 0
        self._get_rows(sessions, slot.pair, 0, 0, loaded, slot.gets)
        worst = min(slot.wait_gets(), key=lambda result: result[0])
        if worst[1] is not None:
            slot.invalidate()
            return worst
        chunk = self._ring.chunk
        self.base = self._put_tokens = end // chunk * chunk
        rest = blank(self.shape, len(sessions), chunk)
        for buffer, tail in zip(slot.pair, rest):
            tail.narrow(2, 0, end - self.base).copy_(buffer.narrow(2, self.base, end - self.base))
        self.tail = TieredLayer()
        self.tail.fill(*rest, 0, end - self.base)
        self._end, slot.filled, self.is_initialized = end, end, True
        return worst

    def get_mask_sizes(self, query_length: int) -> Tuple[int, int]:
        return self._end + query_length, 0

    def get_seq_length(self) -> int:
        return self._end

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        # Puts in progress keep their buffers, which are no longer written to.
        self._puts, self.tail = [], TieredLayer()
        self.base = self._put_tokens = self._end = 0
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        check_crop(tokens_to_remove)
        end = max(0, self._end + tokens_to_remove)
        chunk = self._ring.chunk
        if end < self.base:  # load the rest of the stored chunk that is cropped
            base, sessions = end // chunk * chunk, self._ring.rows.sessions
            rest = blank(self.shape, len(sessions), chunk)
            if end > base:
                for get in self._get_rows(sessions, rest, 0, base, base + chunk, []):
                    self._raise_for(*get.wait())
            self.tail = TieredLayer()
            self.tail.fill(*rest, 0, end - base)
            self.base = self._put_tokens = base
        else:
            self.tail.crop(end - self._end)
        self._end = end

    def select(self, rows: torch.Tensor) -> None:
        """Selects rows of the tail. Stored chunks follow from the rows' sessions."""
        self.tail.select(rows)
