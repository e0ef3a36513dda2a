"""Layers whose KV rests in the store: fetched before they are used, the next ones meanwhile."""

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
from .cache_layers import TieredLayer, roomier
from .sessions import Rows


class Slot:
    """Buffers that one layer has for a while."""

    def __init__(self) -> None:
        self.owner: Optional["OffloadedLayer"] = None
        self.pair: Optional[Pair] = None
        #: Tokens that are there.
        self.filled = 0
        #: Tokens that will be there once the transfers have come.
        self.coming = 0
        self.transfers: List[Transfer] = []
        #: Puts that read it.
        self.readers: List[Transfer] = []
        self.used = 0

    @property
    def room(self) -> int:
        """Tokens that it has room for."""
        return 0 if self.pair is None else self.pair[0].shape[2]

    def land(self) -> List[Tuple[int, Any]]:
        """Waits for the transfers; what became of each. Where that is broken off they are still
        the slot's."""
        came = [transfer.wait() for transfer in self.transfers]
        self.transfers = []
        return came

    def read(self) -> List[Any]:
        """Waits for who reads it; their errors, or None."""
        errors = [transfer.wait()[1] for transfer in self.readers]
        self.readers = []
        return errors

    def drop(self) -> None:
        """Takes nothing of it for true any more. What is on its way still lands there."""
        self.read()
        self.land()
        self.filled, self.owner = 0, None


class Ring:
    """The memory of the offloaded mode: as many layers as `resident_layers` says, for each
    shape and device, and what of all layers is not in the store yet."""

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
        """The layer's buffers: those it has, or those that were not used for longest."""
        slots = self._slots.setdefault(layer.shape[2:8], [Slot() for _ in range(self._each)])
        self._clock += 1
        for slot in slots:
            if slot.owner is layer:
                slot.used = self._clock
                return slot
        slot = min((s for s in slots if current is None or s.owner is not current),
                   key=lambda s: s.used)
        slot.drop()
        slot.owner, slot.used = layer, self._clock
        return slot

    def ahead(self, layer: "OffloadedLayer") -> None:
        """Has the next layers fetched."""
        at = self.layers.index(layer)
        for step in range(1, min(self._each, len(self.layers))):
            after = self.layers[(at + step) % len(self.layers)]
            after.fetch(current=layer)

    def transfers_of(self, layer: "OffloadedLayer") -> List[Transfer]:
        """What is on its way to the layer's buffers, or from them."""
        return [transfer for slot in self._all() if slot.owner is layer
                for transfer in [*slot.transfers, *slot.readers]]

    def put(self, layer: "OffloadedLayer") -> None:
        """A put of the layer was begun: as many as the ring has layers may be under way."""
        self._putting.append(layer)
        self._settle(self._each)

    def settle(self) -> None:
        """Waits for all that reads the buffers."""
        self._settle(0)
        for slot in self._all():
            slot.read()

    def _settle(self, most: int) -> None:
        while len(self._putting) > most:
            self._putting[0].settle()
            self._putting.popleft()

    def _all(self) -> Iterator[Slot]:
        return (slot for slots in self._slots.values() for slot in slots)

    def forget(self) -> None:
        """Nothing counts any more, without waiting: what is under way goes on in buffers that it
        has to itself from now on."""
        self._putting.clear()
        self._slots.clear()

    def submit(self, make: Callable[[], Transfer], mine: Sequence[Transfer]) -> Transfer:
        """A move; where as many are under way as may be, once those of this cache have come.
        `mine`: those that nobody else knows yet."""
        try:
            return make()
        except kvtier.AgainError:
            for transfer in mine:
                transfer.rest()
            self.wait()
            return make()

    def wait(self) -> None:
        """Waits for what is under way, and leaves it to others to see what became of it."""
        for layer in self.layers:
            layer.wait()

    def cut(self, end: int) -> None:
        """What the buffers have behind `end` does not count any more."""
        for slot in self._all():
            if slot.transfers or end == 0:
                slot.drop()
            slot.filled = min(slot.filled, end)


def _fixed() -> Exception:
    return state("with resident_layers= the KV is in the store and cannot be replaced: use a cache "
                 "without it")


class OffloadedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer that sees all tokens and has the full chunks of them in the store; the rest, and
    what could not be stored, in torch memory (`tail`)."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, shape: LayerShape, ring: Ring) -> None:
        self.shape, self._ring = shape, ring
        ring.layers.append(self)
        self.tail = TieredLayer()
        #: Tokens that the store has, a multiple of a chunk's.
        self.base = 0
        self._sent = 0
        self._end = 0
        self._puts: List[Tuple[Transfer, int]] = []
        self.is_initialized = False

    @property
    def keys(self) -> Optional[torch.Tensor]:
        """K of all tokens, fetched for this: good until other layers need the memory."""
        return None if self._end == 0 else self.whole()[0]

    @keys.setter
    def keys(self, _tensor: object) -> None:
        raise _fixed()

    @property
    def values(self) -> Optional[torch.Tensor]:
        """V of all tokens, likewise."""
        return None if self._end == 0 else self.whole()[1]

    @values.setter
    def values(self, _tensor: object) -> None:
        raise _fixed()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> Pair:
        tokens = key_states.shape[2]
        self._check(key_states, value_states, tokens)
        self.is_initialized = True
        if self._puts and all(transfer.done for transfer, _ in self._puts):
            self.settle()
        slot = self._landed(key_states.shape[0], self._end + tokens)
        assert slot.pair is not None
        begin, self._end = self._end, self._end + tokens
        for buffer, new in zip(slot.pair, (key_states, value_states)):
            buffer.narrow(2, begin, tokens).copy_(new)
        slot.filled = self._end
        self.tail.update(key_states, value_states)
        self._store()
        self._ring.ahead(self)
        k, v = slot.pair
        return k.narrow(2, 0, self._end), v.narrow(2, 0, self._end)

    def _check(self, key_states: torch.Tensor, value_states: torch.Tensor, tokens: int) -> None:
        rows = self._ring.rows
        if {key_states.dtype, value_states.dtype} != {self.shape.dtype}:
            raise state(f"KV of layer {self.shape.layer} is {key_states.dtype} and "
                        f"{value_states.dtype}, and was {self.shape.dtype} when Tiers was made: "
                        "no autocast with resident_layers=")
        if key_states.requires_grad:
            raise state("the offloaded mode has no gradients: use torch.no_grad() or "
                        "inference_mode(), or a cache without resident_layers=")
        if not rows.blind and rows.noted > self._end + tokens:
            raise state(f"layer {self.shape.layer} has {self._end} tokens of {rows.noted - tokens}:"
                        " a forward pass failed in the middle; resume() a new cache")
        if rows.blind or rows.noted < self._end + tokens:
            why = rows.blind or "the model was called around Tiers(model, ...)"
            raise state(f"the offloaded mode has to know the tokens, and {why}: use a cache "
                        "without resident_layers= for this")

    # --- fetching --------------------------------------------------------------------------

    def fetch(self, current: "Optional[OffloadedLayer]" = None) -> Slot:
        """Begins to bring what the store has; the layer `current` keeps its buffers."""
        slot = self._ring.slot(self, current)
        rows = self._ring.rows.sessions
        if slot.transfers or slot.filled >= self.base or not rows:
            return slot
        if slot.pair is None or slot.room < self._end + 1 or slot.pair[0].shape[0] != len(rows):
            slot.pair, slot.filled = blank(self.shape, len(rows), roomier(self._end + 1)), 0
        begin = slot.filled // self._ring.chunk * self._ring.chunk
        slot.coming = slot.filled  # more, once the gets of all rows are on their way
        self._gets(rows, slot.pair, begin, begin, self.base, slot.transfers)
        slot.coming = self.base
        self._ring.fetches += 1
        return slot

    def _gets(self, rows: Sequence[Session], pair: Pair, slot: int, begin: int, end: int,
              came: List[Transfer]) -> List[Transfer]:
        """Adds a get of each row to `came`: those before one that fails are known there."""
        for row, session in enumerate(rows):
            came.append(self._ring.submit(partial(
                from_store, session, [(*pair, slot)], row, self._ring.gpu,
                first_layer=self.shape.number, first_token=begin, tokens=end - begin), came))
        return came

    def _landed(self, batch: int, room: int) -> Slot:
        """The buffers with all tokens, and room for more."""
        slot = self.fetch()
        while slot.transfers:  # and once more, where a put has ended meanwhile
            for came in slot.land():
                self._must(*came)
            slot.filled = max(slot.filled, slot.coming)
            slot = self.fetch()
        if slot.pair is None or slot.room < room or slot.pair[0].shape[0] != batch:
            before, slot.pair = slot.pair, blank(self.shape, batch, roomier(room))
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

    def _must(self, _tokens: int, error: Any) -> None:
        if isinstance(error, kvtier.ClosedError):
            raise error
        if error is not None:
            raise state(f"KV of layer {self.shape.layer} did not come back ({error}): resume() a "
                        "new cache and go on from there; a store with disk= and enough host= "
                        "loses nothing but to damage") from error

    def whole(self) -> Pair:
        """All tokens."""
        slot = self._landed(len(self._ring.rows.sessions) or self.tail.pair[0].shape[0], self._end)
        assert slot.pair is not None
        k, v = slot.pair
        return k.narrow(2, 0, self._end), v.narrow(2, 0, self._end)

    # --- storing ---------------------------------------------------------------------------

    def _store(self) -> None:
        """Puts the chunks that have become full."""
        full = self._end // self._ring.chunk * self._ring.chunk
        if full <= self._sent:
            return
        rows = self._ring.rows
        if not rows.name() or any(rows.pads):
            why = rows.blind or "its rows are padded"
            raise state(f"the offloaded mode cannot keep this batch, for {why}: use a cache "
                        "without resident_layers=")
        for row, session in enumerate(rows.sessions):
            placed = (*self.tail.pair, self._sent - self.base)
            transfer = self._ring.submit(partial(
                to_store, session, [placed], row, self._ring.gpu,
                first_layer=self.shape.number, first_token=self._sent,
                tokens=full - self._sent, level=LEVEL_RAM), ())
            self._puts.append((transfer, full))
        self._sent = full
        self._ring.put(self)

    def settle(self) -> None:
        """Waits for the puts; what is stored leaves torch memory, what is not stays. Where that is
        broken off it is as before, and is done again."""
        if not self._puts:
            return
        full = self._puts[-1][1]
        if not all([transfer.wait()[1] is None for transfer, _ in self._puts]):
            self._ring.failed_puts += 1
            self._sent, self._puts = self.base, []
            return
        gone, left = full - self.base, self._end - full
        old, tail = self.tail.pair, TieredLayer()
        batch = old[0].shape[0]
        fresh = blank(self.shape, batch, -(-(left + 1) // self._ring.chunk) * self._ring.chunk)
        for before, after in zip(old, fresh):
            after.narrow(2, 0, left).copy_(before.narrow(2, gone, left))
        tail.fill(*fresh, 0, left)
        self.tail, self.base, self._puts = tail, full, []

    def wait(self) -> None:
        """Waits for what is under way, and leaves it to others to see what became of it."""
        for transfer, _ in self._puts:
            transfer.rest()
        for transfer in self._ring.transfers_of(self):
            transfer.rest()

    def save(self, tokens: int, level: int) -> None:
        """Has the store keep full chunks at a level; all of it passes by once more."""
        self.whole()
        slot = self._landed(len(self._ring.rows.sessions), self._end)
        assert slot.pair is not None
        slot.read()  # of a save that was broken off
        for row, session in enumerate(self._ring.rows.sessions):
            slot.readers.append(self._ring.submit(partial(
                to_store, session, [(*slot.pair, 0)], row, self._ring.gpu,
                first_layer=self.shape.number, first_token=0, tokens=tokens, level=level), ()))
        for error in slot.read():
            if error is not None:
                raise with_advice(error)

    # --- what else a cache asks ------------------------------------------------------------

    def begin(self, sessions: Sequence[Session], loaded: int, end: int) -> Tuple[int, Any]:
        """Begins with `end` tokens that the store has, reading all of them: what is damaged is
        found now. How many came, and an error."""
        slot = self._ring.slot(self, None)
        slot.pair, slot.filled = blank(self.shape, len(sessions), roomier(loaded)), 0
        slot.coming = 0
        self._gets(sessions, slot.pair, 0, 0, loaded, slot.transfers)
        came = slot.land()
        worst = min(came, key=lambda one: one[0])
        if worst[1] is not None:
            slot.drop()
            return worst
        chunk = self._ring.chunk
        self.base = self._sent = end // chunk * chunk
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
        # Puts under way read buffers that nobody writes to any more: they hold them.
        self._puts, self.tail = [], TieredLayer()
        self.base = self._sent = self._end = 0
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): a negative number says how many tokens go")
        end = max(0, self._end + tokens_to_remove)
        chunk = self._ring.chunk
        if end < self.base:  # what is left of a chunk that was stored comes back
            base, sessions = end // chunk * chunk, self._ring.rows.sessions
            back = blank(self.shape, len(sessions), chunk)
            if end > base:
                for transfer in self._gets(sessions, back, 0, base, base + chunk, []):
                    self._must(*transfer.wait())
            self.tail = TieredLayer()
            self.tail.fill(*back, 0, end - base)
            self.base = self._sent = base
        else:
            self.tail.crop(end - self._end)
        self._end = end

    def pick(self, rows: torch.Tensor) -> None:
        """Goes on with these rows; what the store has is theirs by their sessions."""
        self.tail.pick(rows)
