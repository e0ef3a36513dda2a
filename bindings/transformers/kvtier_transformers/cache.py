"""TieredCache: transformers' cache whose KV is kept by a kvtier store."""

from __future__ import annotations

import copy
from array import array
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, Iterator, List, Optional, Tuple

import kvtier
import torch
from kvtier import LEVEL_RAM
from transformers.cache_utils import Cache, DummyLayer

from ._errors import invalid, state, with_advice
from ._planes import Pair, Placed, Transfer, blank, from_store, to_store
from .cache_layers import NOTHING, TieredLayer, TieredWindowLayer, roomier
from .cache_offload import OffloadedLayer, Ring
from .sessions import Rows, as_rows, pads_of

if TYPE_CHECKING:
    from .tiers import Tiers

LEVELS = {"ram": kvtier.LEVEL_RAM, "disk": kvtier.LEVEL_DISK, "durable": kvtier.LEVEL_DURABLE}
# Generated tokens go to the store so many at a time: each put wakes threads, and costs as much
# whether it is of few tokens or of many.
_STRIDE = 256
# Errors after which nothing can be computed instead.
_FATAL = (kvtier.ClosedError, kvtier.ForkedError, kvtier.HandleError, kvtier.PanicError)


def _kind(layer: Any) -> Tuple[Any, int]:
    return type(layer), getattr(layer, "sliding_window", 0)


class TieredCache(Cache):
    """The KV of one batch, for `model.generate(..., past_key_values=cache)`; `Tiers.cache` makes
    it. `resume(ids)` brings what the store has of a prompt, full chunks are stored while tokens
    are generated, `save()` waits until they are kept. One thread at a time may use it."""

    layers: List[Any]

    def __init__(self, tiers: "Tiers", *, resident_layers: Optional[int] = None) -> None:
        if resident_layers is not None and resident_layers < 1:
            raise invalid(f"resident_layers={resident_layers}: 2 or more (1 waits for each layer)")
        self.tiers: "Optional[Tiers]" = tiers
        self._rows = Rows(tiers.namespace, tiers.tenant)
        self._chunk = tiers.chunk_tokens
        self._stride = self._chunk * max(1, _STRIDE // self._chunk)
        self._shapes = list(tiers.shapes)
        self._gpu = tiers.gpu
        self._ring = None
        if resident_layers is not None:
            self._ring = Ring(self._rows, self._chunk, resident_layers, tiers.gpu)
        layers: List[Any] = [DummyLayer()  # type: ignore[no-untyped-call]
                             for _ in range(self._shapes[-1].layer + 1)]
        for shape in self._shapes:
            if shape.window:
                layers[shape.layer] = TieredWindowLayer(shape.window)
            elif self._ring is not None:
                layers[shape.layer] = OffloadedLayer(shape, self._ring)
            else:
                layers[shape.layer] = TieredLayer()
        super().__init__(layers=layers)
        self._last = self._shapes[-1].layer
        self._puts: Deque[Transfer] = deque()
        #: Gets of a `resume`: the row and the first token of each.
        self._gets: List[Tuple[int, int, Transfer]] = []
        self._counts = {"resumed_tokens": 0, "put_tokens": 0, "failed_puts": 0}
        self._restart()

    def _restart(self) -> None:
        self._length = 0
        self._due = self._stride
        #: Own tokens of each row that were given to the store.
        self._sent: List[int] = []
        for layer in self._windows():
            layer.unstored = 0 if self.tiers is not None else NOTHING

    def _windows(self) -> Iterator[TieredWindowLayer]:
        return (layer for layer in self.layers if isinstance(layer, TieredWindowLayer))

    # --- what a forward pass does ------------------------------------------------------------

    def before(self, ids: Any, kwargs: Dict[str, Any], training: bool = False) -> None:
        """The model is about to run with this cache."""
        rows = self._rows
        if training:
            rows.bar("the model is in training mode: call model.eval()")
        elif torch.is_autocast_enabled(self._shapes[0].device.type):
            rows.bar("autocast is on: KV is other than that of the model's own dtype")
        if self.tiers is None:
            return
        if ids is not None and ids.shape[-1] > 1 and not rows.blind and self.tiers.changed:
            rows.bar(self.tiers.changed)
        rows.note(ids, kwargs)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int,
               *args: Any, **kwargs: Any) -> Pair:
        try:
            pair: Pair = self.layers[layer_idx].update(key_states, value_states)
            if layer_idx == self._last:
                tokens = key_states.shape[2]
                self._length += tokens
                if self._length >= self._due or tokens >= self._chunk:  # prompts at once
                    self._write_behind()
        except kvtier.Error as error:
            raise with_advice(error) from error
        return pair

    def _write_behind(self) -> None:
        """Chunks have become full: gives them to the store, and does not wait."""
        self._due = (self._length // self._stride + 1) * self._stride
        rows = self._rows
        if self.tiers is None:
            return
        if not rows.blind and rows.noted != self._length:
            rows.blind = "the model was called around Tiers(model, ...)"
        if not rows.blind:
            rows.blind = self._strange()
            rows.barred = bool(rows.blind)
        if not rows.name():
            for layer in self._windows():
                layer.unstored = NOTHING
            return
        self._sent = self._sent or [0] * len(rows.pads)
        for row in range(len(rows.pads)):
            full = rows.own(row) // self._chunk * self._chunk
            if full > self._sent[row]:
                self._send(row, self._sent[row], full, LEVEL_RAM)
                self._counts["put_tokens"] += full - self._sent[row]
                self._sent[row] = full
        self._reap(2 * len(rows.pads))
        unstored = min(pad + sent for pad, sent in zip(rows.pads, self._sent))
        for layer in self._windows():
            layer.unstored = unstored
            layer.slim()

    def _strange(self) -> str:
        """What is wrong with the KV itself; "" where nothing is."""
        for shape in self._shapes:
            layer = self.layers[shape.layer]
            if isinstance(layer, OffloadedLayer):
                continue
            if layer.replaced:
                return "KV of a layer was replaced from outside"
            k, v = layer.pair
            if (k.dtype, v.dtype, k.shape[1::2], v.shape[1::2]) != (
                    shape.dtype, shape.dtype, (shape.k_heads, shape.k_dim),
                    (shape.v_heads, shape.v_dim)):
                return (f"KV of layer {shape.layer} is {k.dtype}{list(k.shape)}, not as it was "
                        "when Tiers was made (autocast?)")
        return ""

    def _runs(self, wanted: Callable[[Any], Any]) -> Iterator[Tuple[int, List[Any]]]:
        """Layers in a row of which the same is to be done, and the number of the first in the
        store. `wanted` says what; None: nothing."""
        run: List[Any] = []
        what, first = None, 0
        for shape in self._shapes:
            layer = self.layers[shape.layer]
            this = wanted(layer)
            if this != what and run:
                yield first, run
                run = []
            if this is not None:
                first = first if run else shape.number
                run.append(layer)
            what = this
        if run:
            yield first, run

    def _send(self, row: int, begin: int, end: int, level: int, apart: bool = False) -> None:
        """Puts a row's tokens, from those layers that rest in torch memory. `apart`: from
        windows only what they still have."""
        pad, session = self._rows.pads[row], self._rows.sessions[row]

        def kind(layer: Any) -> Optional[bool]:
            resident = isinstance(layer, (TieredLayer, TieredWindowLayer))
            return (apart and isinstance(layer, TieredWindowLayer)) if resident else None

        for number, layers in self._runs(kind):
            first = max([begin] + [layer.first - pad for layer in layers])
            first = -(-first // self._chunk) * self._chunk
            if first >= end:
                continue
            placed: List[Placed] = [(*layer.pair, pad + first - layer.first) for layer in layers]
            self._puts.append(self._submit(lambda: to_store(
                session, placed, row, self._gpu, first_layer=number, first_token=first,
                tokens=end - first, level=level)))

    def _submit(self, make: Callable[[], Transfer]) -> Transfer:
        try:
            return make()
        except kvtier.AgainError:  # as much is under way as may be
            self._reap(0)
            for _, _, transfer in self._gets:
                transfer.rest()
            if self._ring is not None:
                self._ring.wait()
            return make()

    def _reap(self, most: int) -> List[Any]:
        """Ends puts that are done, and waits while more than `most` are not; their errors."""
        errors = []
        while self._puts and (len(self._puts) > most or self._puts[0].done):
            # It is known until it has ended, should waiting be broken off: it reads the buffers.
            error = self._puts[0].wait()[1]
            self._puts.popleft()
            if error is not None:
                self._counts["failed_puts"] += 1
                errors.append(error)
        return errors

    def settle(self) -> None:
        """Waits until the store has copied all that it was given."""
        self._reap(0)
        if self._ring is not None:
            self._ring.settle()

    # --- sessions ----------------------------------------------------------------------------

    def resume(self, tokens: Any, attention_mask: Any = None, *, plan: bool = False) -> int:
        """Brings what the store has of a prompt: `tokens` as given to `generate`. Returns how
        many tokens (slots, with the padding on the left) need not be computed: never all, since
        the last one's logits are wanted. What is missing or damaged is not taken: it is computed.
        All rows resume at the same place. Padded rows resume only in models without windows,
        and not with `resident_layers`. With `plan` only that comes which is loaded sooner than
        it is computed, by `Session.plan`."""
        if self._length:
            raise state("resume() needs a cache without tokens: take a new one, or reset()")
        if self.tiers is None:
            raise state("this cache was detached from its store")
        if self.tiers.changed:
            raise state(f"{self.tiers.changed}: make a new one")
        ids = as_rows(tokens)
        pads = pads_of(attention_mask, len(ids), len(ids[0]))
        if any(pads) and (self._ring is not None or any(shape.window for shape in self._shapes)):
            return 0
        bound, resumed = len(ids[0]) - 1, 0
        try:
            if plan and (end := self._reach(ids, pads, bound)) > max(pads):
                bound = self._worth(ids, pads, end)
            while (end := self._reach(ids, pads, bound)) > max(pads):
                bound = self._load(ids, pads, end)
                if bound == end:
                    self._counts["resumed_tokens"] += end * len(ids)
                    resumed = end
                    break
        except kvtier.Error as error:
            raise with_advice(error) from error
        finally:
            if not resumed:  # whatever came between: no token counts that was not loaded
                self.reset()
        return resumed

    def _reach(self, ids: List[List[int]], pads: List[int], bound: int) -> int:
        """How far all rows could go on, at most up to `bound` slots."""
        assert self.tiers is not None
        while bound > max(pads):
            ends = []
            for row, pad in zip(ids, pads):
                # A chunk that ends behind the bound is good, too: what is too much is cut off.
                upto = -(-(bound - pad) // self._chunk) * self._chunk
                found = self.tiers.namespace.lookup(row[pad:pad + upto])
                ends.append(pad + found.reusable_tokens)
            if min(ends) >= bound:
                return bound
            bound = min(ends)
        return 0

    def _worth(self, ids: List[List[int]], pads: List[int], end: int) -> int:
        """Of so many slots, up to where plans of all rows load them."""
        assert self.tiers is not None
        worth = end
        for row, pad in zip(ids, pads):
            tokens = -(-(end - pad) // self._chunk) * self._chunk
            with self.tiers.namespace.session(tenant=self.tiers.tenant) as session:
                session.append(array("I", row[pad:pad + tokens]))
                # Nothing is computed before all has come.
                for segment in session.plan(overlap=False).steps:
                    if segment.kind == kvtier.PLAN_RECOMPUTE:
                        worth = min(worth, pad + segment.first_token)
        return worth

    def _load(self, ids: List[List[int]], pads: List[int], end: int) -> int:
        """Loads so many slots; `end`, or how many are good where that failed."""
        self.reset()
        rows, chunk = self._rows, self._chunk
        upto = [-(-(end - pad) // chunk) * chunk for pad in pads]
        reach = max(pad + n for pad, n in zip(pads, upto))
        rows.assign([row[:reach] for row in ids], pads)
        for number, layers in self._runs(_kind):
            if isinstance(layers[0], OffloadedLayer):
                for layer in layers:
                    tokens, error = layer.begin(rows.sessions, upto[0], end)
                    if error is not None:
                        return self._short(pads[0] + tokens, end, error)
                continue
            window = _kind(layers[0])[1]
            first = max(0, end - window + 1) // chunk * chunk if window else 0
            for at, layer in enumerate(layers):
                shape = self._shapes[number + at]
                room = roomier(max(reach, len(ids[0])) - first)
                layer.fill(*blank(shape, len(ids), room, any(pads)), first, end)
            for row, (pad, n) in enumerate(zip(pads, upto)):
                placed: List[Placed] = [(*layer.pair, pad) for layer in layers]
                self._gets.append((row, first, self._submit(lambda: from_store(
                    rows.sessions[row], placed, row, self._gpu, first_layer=number,
                    first_token=first, tokens=n - first))))
        good, failed = end, None
        for row, first, transfer in self._arrived():
            tokens, error = transfer.wait()
            if error is not None:
                good, failed = min(good, pads[row] + (first + tokens) // chunk * chunk), error
        if failed is not None:
            return self._short(good, end, failed)
        rows.cut(end)
        self._length = end
        self._due = (end // self._stride + 1) * self._stride
        self._sent = [(end - pad) // chunk * chunk for pad in pads]
        for window_layer in self._windows():
            window_layer.unstored = min(self._sent)
        return end

    def _arrived(self) -> List[Tuple[int, int, Transfer]]:
        """The gets, once they have ended; where waiting is broken off they are known still."""
        for _, _, transfer in self._gets:
            transfer.rest()
        gets, self._gets = self._gets, []
        return gets

    def _short(self, good: int, end: int, error: kvtier.Error) -> int:
        if isinstance(error, _FATAL):
            raise error
        return min(good, end - 1)

    def save(self, tokens: Any = None, attention_mask: Any = None, *,
             level: Optional[str] = None) -> List[int]:
        """Waits until all full chunks are kept: "durable" where the store has a disk, else "ram".
        Returns the tokens of each row that a `resume` will find; the rest, less than a chunk, is
        computed then. `tokens` (and the mask of padded ones) are needed where the hook could not
        see them, as with inputs_embeds; what they are is checked where it could."""
        if self.tiers is None:
            raise state("this cache was detached from its store")
        if level is not None and level not in LEVELS:
            raise invalid(f"level {level!r} is none of {', '.join(LEVELS)}")
        try:
            wanted = self.tiers.level if level is None else LEVELS[level]
            self._name(tokens, attention_mask)
            return self._keep(wanted)
        except kvtier.Error as error:
            raise with_advice(error) from error

    def _name(self, tokens: Any, mask: Any) -> None:
        """Makes sure that the rows' tokens are known."""
        rows = self._rows
        if any(getattr(layer, "replaced", False) for layer in self.layers):
            raise state("KV of a layer was replaced from outside (evicted, for example): such KV "
                        "is its cache's own and is not stored")
        strange = self._strange() if self._length else ""
        if strange:
            raise state(f"{strange}: it cannot be stored")
        seen = not rows.blind and rows.noted == self._length and rows.name()
        if rows.barred:
            raise state(f"{rows.blind}: this KV is not that of its tokens alone, and is not stored")
        if tokens is None:
            if not seen:
                why = rows.blind or "the model was called around Tiers(model, ...)"
                raise state(f"which tokens these are is not known, for {why}: give tokens=")
            return
        ids = [row[:self._length] for row in as_rows(tokens)]
        if len(ids[0]) < self._length:
            raise invalid(f"{len(ids[0])} tokens for a cache of {self._length}")
        if not seen:
            if self._ring is not None:
                raise state("with resident_layers= tokens have to be known from the start")
            rows.assign(ids, pads_of(mask, len(ids), self._length))
            self._sent = [0] * len(ids)
            return
        self._compare(ids)

    def _compare(self, ids: List[List[int]]) -> None:
        """Fails unless these are the tokens that were seen."""
        rows = self._rows
        if len(ids) != len(rows.pads):
            raise invalid(f"{len(ids)} rows of tokens for {len(rows.pads)} of the cache")
        for number, (row, pad) in enumerate(zip(ids, rows.pads)):
            if not rows.has(number, row[pad:]):
                raise invalid(f"row {number}: these are not the tokens that the model was given")

    def _keep(self, level: int) -> List[int]:
        rows = self._rows
        self.settle()
        kept = [rows.own(row) // self._chunk * self._chunk for row in range(len(rows.pads))]
        for row, full in enumerate(kept):
            if full:
                self._send(row, 0, full, level, apart=True)
        self._sent = list(kept)
        for error in self._reap(0):
            raise error
        if self._ring is not None and kept and min(kept):
            for layer in self._ring.layers:
                layer.save(min(kept), level)
        return kept

    # --- what else is done with a cache --------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        self.settle()  # a put may be reading what is written next
        super().crop(tokens_to_remove)
        self._length = max(0, self._length - abs(tokens_to_remove))
        if self._ring is not None:
            self._ring.cut(self._length)
        self._rows.cut(self._length)
        self._due = (self._length // self._stride + 1) * self._stride
        self._sent = [min(sent, self._rows.own(row) // self._chunk * self._chunk)
                      for row, sent in enumerate(self._sent)]
        for layer in self._windows():
            if layer.unstored != NOTHING:
                layer.unstored = min((pad + sent for pad, sent
                                      in zip(self._rows.pads, self._sent)), default=0)

    def _pick(self, rows: torch.Tensor) -> None:
        if rows.dtype == torch.bool:
            rows = rows.nonzero().reshape(-1)
        if self._ring is not None:
            self._ring.settle()
            self._ring.cut(0)
        self._rows.pick(rows)
        if self._sent:
            self._sent = [self._sent[row] for row in rows.tolist()]
        for shape in self._shapes:
            self.layers[shape.layer].pick(rows)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._pick(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._pick(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        first = self.layers[self._last]
        keys = first.tail.keys if isinstance(first, OffloadedLayer) else first.keys
        if keys is not None:
            self._pick(torch.arange(keys.shape[0]).repeat_interleave(repeats))

    def __deepcopy__(self, memo: Dict[int, Any]) -> "TieredCache":
        """A cache with the same tokens that goes its own way."""
        if self._ring is not None:
            raise state("with resident_layers= the KV is in the store: save() this cache, and "
                        "resume() another one")
        self.settle()
        other = object.__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(self.__dict__)
        other.layers = copy.deepcopy(self.layers, memo)
        other._puts, other._gets, other._counts = deque(), [], dict(self._counts)
        other._sent = list(self._sent)
        if self.tiers is not None:
            other._rows = self._rows.fork()
        return other

    def reset(self) -> None:
        try:
            self._end_gets()  # they write to buffers that go
            if self._ring is not None:
                self._ring.settle()
                self._ring.cut(0)
        except BaseException:
            if self._ring is not None:
                self._ring.forget()
            raise
        finally:  # a second Ctrl-C, too, leaves no tokens: nothing here waits
            super().reset()  # type: ignore[no-untyped-call]
            self._restart()
            self._rows.clear()

    def _end_gets(self) -> None:
        """Nobody wants what a `resume` that failed has under way."""
        for _, _, transfer in self._gets:
            transfer.op.cancel()
        for _, _, transfer in self._arrived():
            transfer.wait()

    def hint(self, **what: Any) -> None:
        """Tells the policies what is known of these sessions: as `kvtier.Session.hint`, for
        example `hint(stop=kvtier.STOP_TOOL_USE)` or `hint(done=True)`."""
        self._rows.name()
        for session in self._rows.sessions:
            session.hint(**what)

    def detach(self) -> None:
        """Goes on without the store: nothing more is stored. Not with `resident_layers`."""
        if self._ring is not None and self._length:
            raise state("with resident_layers= the KV is in the store: it cannot be left")
        self.tiers = None
        for layer in self._windows():
            layer.unstored = NOTHING

    @property
    def unknown(self) -> str:
        """Why nothing of this cache is stored while it generates; "" when it is."""
        return self._rows.blind

    def stats(self) -> Dict[str, int]:
        """What this cache has done: tokens resumed and put, puts that failed, layers fetched."""
        counts = dict(self._counts)
        if self._ring is not None:
            counts["fetched_layers"] = self._ring.fetches
            counts["failed_puts"] += self._ring.failed_puts
        return counts
