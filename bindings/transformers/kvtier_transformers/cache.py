"""`TieredCache`: a transformers cache whose KV is stored in a kvtier store."""

from __future__ import annotations

import copy
from array import array
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, Iterator, List, Optional, Tuple

import kvtier
import torch
from kvtier import LEVEL_RAM
from transformers.cache_utils import Cache

from ._errors import invalid, state, with_advice
from ._planes import Pair, Placement, Transfer, blank, from_store, to_store
from ._versions import DummyLayer
from .cache_layers import NOTHING, TieredLayer, TieredWindowLayer, capacity_for
from .cache_offload import OffloadedLayer, Ring
from .sessions import Rows, as_rows, pads_of

if TYPE_CHECKING:
    from .tiers import Tiers

LEVELS = {"ram": kvtier.LEVEL_RAM, "disk": kvtier.LEVEL_DISK, "durable": kvtier.LEVEL_DURABLE}
# Generated tokens per put: a put wakes threads, so its cost hardly depends on its size.
_STRIDE = 256
# Errors of a get that `resume` raises instead of treating the tokens as missing.
_FATAL = (kvtier.ClosedError, kvtier.ForkedError, kvtier.HandleError, kvtier.PanicError)


# Reasons in error messages.
_BYPASSED = "the model was called around the hook of Tiers(model, ...)"
_DETACHED = "this cache was detached from its store: create a new one with Tiers.cache()"


def _kind(layer: Any) -> Tuple[Any, int]:
    return type(layer), getattr(layer, "sliding_window", 0)


class TieredCache(Cache):
    """The KV of one batch, for `model.generate(..., past_key_values=cache)`.

    Create it with `Tiers.cache`. `resume(ids)` loads the stored prefix of a prompt. Generation puts
    full chunks into the store; `save()` waits until they are stored. Only one thread at a time may
    use a cache."""

    layers: List[Any]

    def __init__(self, tiers: "Tiers", *, resident_layers: Optional[int] = None) -> None:
        if resident_layers is not None and resident_layers < 1:
            raise invalid(f"resident_layers is {resident_layers}: use 2 or more (1 works, but "
                          "waits for each layer)")
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
        #: Gets of a `resume`: row, first token, transfer.
        self._gets: List[Tuple[int, int, Transfer]] = []
        self._counts = {"resumed_tokens": 0, "put_tokens": 0, "failed_puts": 0}
        self._restart()

    def _restart(self) -> None:
        self._length = 0
        self._due = self._stride
        #: Tokens of each row, without padding, that were put into the store.
        self._put_tokens: List[int] = []
        for layer in self._windows():
            layer.unstored = 0 if self.tiers is not None else NOTHING

    def _windows(self) -> Iterator[TieredWindowLayer]:
        return (layer for layer in self.layers if isinstance(layer, TieredWindowLayer))

    # --- forward passes ----------------------------------------------------------------------

    def on_forward(self, ids: Any, kwargs: Dict[str, Any], training: bool = False) -> None:
        """Records a forward pass before it runs; called by the hook of `Tiers`."""
        rows = self._rows
        if training:
            rows.reject("the model is in training mode: call model.eval()")
        elif torch.is_autocast_enabled(self._shapes[0].device.type):
            rows.reject("autocast is on: KV differs from that of the model's own dtype")
        if self.tiers is None:
            return
        if ids is not None and ids.shape[-1] > 1 and not rows.unknown and self.tiers.changed:
            rows.reject(self.tiers.changed)
        rows.record(ids, kwargs)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int,
               *args: Any, **kwargs: Any) -> Pair:
        try:
            pair: Pair = self.layers[layer_idx].update(key_states, value_states)
            if layer_idx == self._last:
                tokens = key_states.shape[2]
                self._length += tokens
                if self._length >= self._due or tokens >= self._chunk:  # store prompts at once
                    self._write_behind()
        except kvtier.Error as error:
            raise with_advice(error) from error
        return pair

    def _write_behind(self) -> None:
        """Puts full chunks into the store without waiting."""
        self._due = (self._length // self._stride + 1) * self._stride
        rows = self._rows
        if self.tiers is None:
            return
        if not rows.unknown and rows.recorded != self._length:
            rows.unknown = _BYPASSED
        if not rows.unknown:
            rows.unknown = self._unusable_kv()
            rows.rejected = bool(rows.unknown)
        if not rows.append_recorded():
            for layer in self._windows():
                layer.unstored = NOTHING
            return
        self._put_tokens = self._put_tokens or [0] * len(rows.pads)
        for row in range(len(rows.pads)):
            full = rows.token_count(row) // self._chunk * self._chunk
            if full > self._put_tokens[row]:
                self._put(row, self._put_tokens[row], full, LEVEL_RAM)
                self._counts["put_tokens"] += full - self._put_tokens[row]
                self._put_tokens[row] = full
        self._reap(2 * len(rows.pads))
        unstored = min(pad + put for pad, put in zip(rows.pads, self._put_tokens))
        for layer in self._windows():
            layer.unstored = unstored
            layer.shrink()

    def _unusable_kv(self) -> str:
        """Says why the KV itself cannot be stored; "" if it can."""
        for shape in self._shapes:
            layer = self.layers[shape.layer]
            if isinstance(layer, OffloadedLayer):
                continue
            if layer.replaced:
                return "the KV of a layer was replaced by the caller"
            k, v = layer.pair
            if (k.dtype, v.dtype, k.shape[1::2], v.shape[1::2]) != (
                    shape.dtype, shape.dtype, (shape.k_heads, shape.k_dim),
                    (shape.v_heads, shape.v_dim)):
                return (f"the KV of layer {shape.layer} is {k.dtype}{list(k.shape)}, unlike when "
                        "Tiers was created (autocast?)")
        return ""

    def _runs(self, key: Callable[[Any], Any]) -> Iterator[Tuple[int, List[Any]]]:
        """Yields runs of adjacent layers with equal `key(layer)`, each with the number of its first
        layer in the store. Layers with the key None are skipped."""
        run: List[Any] = []
        previous, first = None, 0
        for shape in self._shapes:
            layer = self.layers[shape.layer]
            current = key(layer)
            if current != previous and run:
                yield first, run
                run = []
            if current is not None:
                first = first if run else shape.number
                run.append(layer)
            previous = current
        if run:
            yield first, run

    def _put(self, row: int, begin: int, end: int, level: int, split: bool = False) -> None:
        """Puts a row's tokens from the layers in torch memory. `split` puts window layers
        separately, because they may have only their last tokens."""
        pad, session = self._rows.pads[row], self._rows.sessions[row]

        def key(layer: Any) -> Optional[bool]:
            resident = isinstance(layer, (TieredLayer, TieredWindowLayer))
            return (split and isinstance(layer, TieredWindowLayer)) if resident else None

        for number, layers in self._runs(key):
            first = max([begin] + [layer.first - pad for layer in layers])
            first = -(-first // self._chunk) * self._chunk
            if first >= end:
                continue
            placed: List[Placement] = [(*layer.pair, pad + first - layer.first) for layer in layers]
            self._puts.append(self._submit(lambda: to_store(
                session, placed, row, self._gpu, first_layer=number, first_token=first,
                tokens=end - first, level=level)))

    def _submit(self, make: Callable[[], Transfer]) -> Transfer:
        try:
            return make()
        except kvtier.AgainError:  # too many ops are in progress: wait for those of this cache
            self._reap(0)
            for _, _, transfer in self._gets:
                transfer.wait_released()
            if self._ring is not None:
                self._ring.wait_released()
            return make()

    def _reap(self, most: int) -> List[Any]:
        """Removes completed puts, and waits until at most `most` remain. Returns their errors."""
        errors = []
        while self._puts and (len(self._puts) > most or self._puts[0].done):
            # Remove a put only after the wait: if that is interrupted, it still reads the buffers.
            error = self._puts[0].wait()[1]
            self._puts.popleft()
            if error is not None:
                self._counts["failed_puts"] += 1
                errors.append(error)
        return errors

    def settle(self) -> None:
        """Waits until all puts have completed."""
        self._reap(0)
        if self._ring is not None:
            self._ring.settle()

    # --- sessions ----------------------------------------------------------------------------

    def resume(self, tokens: Any, attention_mask: Any = None, *, plan: bool = False) -> int:
        """Loads the stored prefix of a prompt; `tokens` as passed to `generate`.

        Returns the number of tokens (slots, including left padding) that need not be computed. At
        least the last token remains, because its logits are needed. Missing and damaged chunks
        remain too. All rows resume at the same slot. Padded rows resume only in models without
        sliding windows, and not with `resident_layers`. With `plan`, `Session.plan` limits the load
        to tokens that load sooner than the model computes them."""
        if self._length:
            raise state(f"resume() needs an empty cache, and this one has {self._length} tokens: "
                        "call reset(), or create a new cache")
        if self.tiers is None:
            raise state(_DETACHED)
        if self.tiers.changed:
            raise state(f"{self.tiers.changed}: create a new Tiers")
        ids = as_rows(tokens)
        pads = pads_of(attention_mask, len(ids), len(ids[0]))
        if any(pads) and (self._ring is not None or any(shape.window for shape in self._shapes)):
            return 0
        bound, resumed = len(ids[0]) - 1, 0
        try:
            if plan and (end := self._resumable(ids, pads, bound)) > max(pads):
                bound = self._worth_loading(ids, pads, end)
            while (end := self._resumable(ids, pads, bound)) > max(pads):
                bound = self._load(ids, pads, end)
                if bound == end:
                    self._counts["resumed_tokens"] += end * len(ids)
                    resumed = end
                    break
        except kvtier.Error as error:
            raise with_advice(error) from error
        finally:
            if not resumed:  # also after an exception: keep no partly loaded tokens
                self.reset()
        return resumed

    def _resumable(self, ids: List[List[int]], pads: List[int], bound: int) -> int:
        """Returns the slot up to which all rows can resume, at most `bound`."""
        assert self.tiers is not None
        while bound > max(pads):
            ends = []
            for row, pad in zip(ids, pads):
                # Include the chunk that contains the bound: its surplus is truncated.
                upto = -(-(bound - pad) // self._chunk) * self._chunk
                found = self.tiers.namespace.lookup(row[pad:pad + upto])
                ends.append(pad + found.reusable_tokens)
            if min(ends) >= bound:
                return bound
            bound = min(ends)
        return 0

    def _worth_loading(self, ids: List[List[int]], pads: List[int], end: int) -> int:
        """Returns the slot, at most `end`, up to which the plans of all rows load."""
        assert self.tiers is not None
        worth = end
        for row, pad in zip(ids, pads):
            tokens = -(-(end - pad) // self._chunk) * self._chunk
            with self.tiers.namespace.session(tenant=self.tiers.tenant) as session:
                session.append(array("I", row[pad:pad + tokens]))
                # The model computes only after the load is complete.
                for step in session.plan(overlap=False).steps:
                    if step.kind == kvtier.PLAN_RECOMPUTE:
                        worth = min(worth, pad + step.first_token)
        return worth

    def _load(self, ids: List[List[int]], pads: List[int], end: int) -> int:
        """Loads `end` slots. Returns `end`, or after a failure the number of valid slots."""
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
                        return self._after_failure(pads[0] + tokens, end, error)
                continue
            window = _kind(layers[0])[1]
            first = max(0, end - window + 1) // chunk * chunk if window else 0
            for at, layer in enumerate(layers):
                shape = self._shapes[number + at]
                slots = capacity_for(max(reach, len(ids[0])) - first)
                layer.fill(*blank(shape, len(ids), slots, any(pads)), first, end)
            for row, (pad, n) in enumerate(zip(pads, upto)):
                placed: List[Placement] = [(*layer.pair, pad) for layer in layers]
                self._gets.append((row, first, self._submit(lambda: from_store(
                    rows.sessions[row], placed, row, self._gpu, first_layer=number,
                    first_token=first, tokens=n - first))))
        good, failed = end, None
        for row, first, transfer in self._finished_gets():
            tokens, error = transfer.wait()
            if error is not None:
                good, failed = min(good, pads[row] + (first + tokens) // chunk * chunk), error
        if failed is not None:
            return self._after_failure(good, end, failed)
        rows.truncate(end)
        self._length = end
        self._due = (end // self._stride + 1) * self._stride
        self._put_tokens = [(end - pad) // chunk * chunk for pad in pads]
        for window_layer in self._windows():
            window_layer.unstored = min(self._put_tokens)
        return end

    def _finished_gets(self) -> List[Tuple[int, int, Transfer]]:
        """Waits for the gets and removes them. An interrupted wait removes none."""
        for _, _, transfer in self._gets:
            transfer.wait_released()
        gets, self._gets = self._gets, []
        return gets

    def _after_failure(self, good: int, end: int, error: kvtier.Error) -> int:
        """Returns the slots with which to try again, or raises a fatal error."""
        if isinstance(error, _FATAL):
            raise error
        return min(good, end - 1)

    def save(self, tokens: Any = None, attention_mask: Any = None, *,
             level: Optional[str] = None) -> List[int]:
        """Waits until all full chunks are stored at `level`: "ram", "disk" or "durable". The
        default is "durable" if the store has a disk, else "ram".

        Returns for each row the number of tokens that a `resume` finds; the rest is less than a
        chunk. Pass `tokens`, with the mask of padded rows, if the hook could not record them, as
        with inputs_embeds. Otherwise they are compared with the recorded tokens."""
        if self.tiers is None:
            raise state(_DETACHED)
        if level is not None and level not in LEVELS:
            raise invalid(f"level {level!r} is unknown: use one of {', '.join(LEVELS)}")
        try:
            wanted = self.tiers.level if level is None else LEVELS[level]
            self._identify_tokens(tokens, attention_mask)
            return self._store(wanted)
        except kvtier.Error as error:
            raise with_advice(error) from error

    def _identify_tokens(self, tokens: Any, mask: Any) -> None:
        """Ensures that the rows' tokens are known, from the hook or from `tokens`."""
        rows = self._rows
        if any(getattr(layer, "replaced", False) for layer in self.layers):
            raise state("the KV of a layer was replaced by the caller (evicted, for example), so "
                        "it is not stored: use a new cache to store KV")
        unusable = self._unusable_kv() if self._length else ""
        if unusable:
            raise state(f"{unusable}: it cannot be stored")
        recorded = (not rows.unknown and rows.recorded == self._length
                    and rows.append_recorded())
        if rows.rejected:
            raise state(f"{rows.unknown}: the KV does not depend on its tokens only, so it is not "
                        "stored")
        if tokens is None:
            if not recorded:
                raise state("the tokens of this cache are unknown, because "
                            f"{rows.unknown or _BYPASSED}: pass tokens=")
            return
        ids = [row[:self._length] for row in as_rows(tokens)]
        if len(ids[0]) < self._length:
            raise invalid(f"tokens has {len(ids[0])} tokens: pass all {self._length} of the cache")
        if not recorded:
            if self._ring is not None:
                raise state("the tokens of this cache are unknown, because "
                            f"{rows.unknown or _BYPASSED}: with resident_layers= the hook must "
                            "record them from the start")
            rows.assign(ids, pads_of(mask, len(ids), self._length))
            self._put_tokens = [0] * len(ids)
            return
        self._compare(ids)

    def _compare(self, ids: List[List[int]]) -> None:
        """Raises unless these are the recorded tokens."""
        rows = self._rows
        if len(ids) != len(rows.pads):
            raise invalid(f"tokens has {len(ids)} rows: the cache has {len(rows.pads)}")
        for number, (row, pad) in enumerate(zip(ids, rows.pads)):
            if not rows.starts_with(number, row[pad:]):
                raise invalid(f"row {number} of tokens differs from the model's input_ids: pass "
                              "the tokens that the model received, or omit tokens=")

    def _store(self, level: int) -> List[int]:
        rows = self._rows
        self.settle()
        kept = [rows.token_count(row) // self._chunk * self._chunk
                for row in range(len(rows.pads))]
        for row, full in enumerate(kept):
            if full:
                self._put(row, 0, full, level, split=True)
        self._put_tokens = list(kept)
        for error in self._reap(0):
            raise error
        if self._ring is not None and kept and min(kept):
            for layer in self._ring.layers:
                layer.save(min(kept), level)
        return kept

    # --- other operations of transformers' caches ----------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        self.settle()  # a put may still read slots that are written next
        super().crop(tokens_to_remove)
        self._length = max(0, self._length - abs(tokens_to_remove))
        if self._ring is not None:
            self._ring.truncate(self._length)
        self._rows.truncate(self._length)
        self._due = (self._length // self._stride + 1) * self._stride
        self._put_tokens = [min(put, self._rows.token_count(row) // self._chunk * self._chunk)
                      for row, put in enumerate(self._put_tokens)]
        for layer in self._windows():
            if layer.unstored != NOTHING:
                layer.unstored = min((pad + put for pad, put
                                      in zip(self._rows.pads, self._put_tokens)), default=0)

    def _select(self, rows: torch.Tensor) -> None:
        if rows.dtype == torch.bool:
            rows = rows.nonzero().reshape(-1)
        if self._ring is not None:
            self._ring.settle()
            self._ring.truncate(0)
        self._rows.select(rows)
        if self._put_tokens:
            self._put_tokens = [self._put_tokens[row] for row in rows.tolist()]
        for shape in self._shapes:
            self.layers[shape.layer].select(rows)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        first = self.layers[self._last]
        keys = first.tail.keys if isinstance(first, OffloadedLayer) else first.keys
        if keys is not None:
            self._select(torch.arange(keys.shape[0]).repeat_interleave(repeats))

    def __deepcopy__(self, memo: Dict[int, Any]) -> "TieredCache":
        """Returns an independent cache with the same tokens."""
        if self._ring is not None:
            raise state("a cache with resident_layers= cannot be copied, because its KV is in the "
                        "store: save() this cache, and resume() another one")
        self.settle()
        other = object.__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(self.__dict__)
        other.layers = copy.deepcopy(self.layers, memo)
        other._puts, other._gets, other._counts = deque(), [], dict(self._counts)
        other._put_tokens = list(self._put_tokens)
        if self.tiers is not None:
            other._rows = self._rows.fork()
        return other

    def reset(self) -> None:
        try:
            self._cancel_gets()  # gets write to buffers that are freed below
            if self._ring is not None:
                self._ring.settle()
                self._ring.truncate(0)
        except BaseException:
            if self._ring is not None:
                self._ring.abandon()
            raise
        finally:  # does not wait, so the cache is empty even after a second Ctrl-C
            super().reset()  # type: ignore[no-untyped-call]
            self._restart()
            self._rows.clear()

    def _cancel_gets(self) -> None:
        """Cancels the gets of a failed `resume`, and waits for them."""
        for _, _, transfer in self._gets:
            transfer.op.cancel()
        for _, _, transfer in self._finished_gets():
            transfer.wait()

    def hint(self, **fields: Any) -> None:
        """Passes a hint about these sessions to the policies, as `kvtier.Session.hint` does.

        Examples: `hint(stop=kvtier.STOP_TOOL_USE)`, `hint(done=True)`."""
        self._rows.append_recorded()
        for session in self._rows.sessions:
            session.hint(**fields)

    def detach(self) -> None:
        """Continues without the store: nothing more is stored. Not with `resident_layers`."""
        if self._ring is not None and self._length:
            raise state("a cache with resident_layers= cannot be detached, because its KV is in "
                        "the store: keep the store open until you are done with the cache")
        self.tiers = None
        for layer in self._windows():
            layer.unstored = NOTHING

    @property
    def unknown(self) -> str:
        """Why generation stores nothing of this cache; "" if it does."""
        return self._rows.unknown

    def stats(self) -> Dict[str, int]:
        """Returns counters: tokens resumed and put, failed puts, layers fetched from the store."""
        counts = dict(self._counts)
        if self._ring is not None:
            counts["fetched_layers"] = self._ring.fetches
            counts["failed_puts"] += self._ring.failed_puts
        return counts
