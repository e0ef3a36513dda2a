"""Scheduler's side of the connector: decides which blocks to load and save, tracks completion."""

from __future__ import annotations

import json
import logging
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

from kvtier import TIER_HOST, Advice, Advisor, abi
from kvtier._errors import make
from lmdeploy.pytorch.kv_connector.base import KVConnectorResult, KVLoadResult

from . import _future, _names, _versions
from ._lookup import LookupClient
from ._meta import Hint, Load, Save, StepMeta, Switch
from ._capacity import INITIAL_BLOCKS, StoreCapacity
from ._settings import Settings

log = logging.getLogger("kvtier.lmdeploy")
#: Most names of blocks that are known to be valid in the engine's own prefix cache.
_MAX_VALID = 1 << 18


@dataclass
class _Request:
    """State of one request."""

    #: What its KV depends on besides tokens: weights and adapter (`SchedulerSide._variant`).
    variant: str = ""
    #: Names of its full blocks, as far as they were needed.
    names: List[bytes] = field(default_factory=list)
    #: Length in tokens of the prefix that a lookup found; None without a result in use.
    found_tokens: Optional[int] = None
    #: Index of the next block to save.
    next_save: int = 0
    #: Index of the first block that this request saved; earlier blocks may be shared.
    first_saved: Optional[int] = None
    #: Numbers of its saves in progress.
    saving: Set[int] = field(default_factory=set)
    load: Optional[Load] = None
    #: Index of the load's first block.
    load_start: int = 0
    #: A load failed: the request computes its prefix.
    failed: bool = False
    #: The weights changed during the request, so its KV is of both; or it began with KV that a
    #: sleep or other weights have made invalid.
    stale: bool = False
    #: Whether it has computed.
    started: bool = False


class SchedulerSide:
    """The connector's state of one engine. Only the engine's loop uses it, except `lookups`."""

    def __init__(self, cache_config: Any, settings: Settings, engine: Dict[str, Any],
                 lookups: LookupClient) -> None:
        transfer = cache_config.kv_transfer_config
        self._loads_kv, self._saves_kv = transfer.is_kv_consumer, transfer.is_kv_producer
        self._block_tokens = int(cache_config.block_size)
        self.lookups = lookups
        self._advisor = Advisor(settings.policy, capacity_blocks=INITIAL_BLOCKS, logger=log) if (
            settings.advice) else None
        self._capacity = StoreCapacity(lookups)
        self._requests: Dict[int, _Request] = {}
        self._pending: Dict[int, Load] = {}
        self._loading: Dict[int, Load] = {}
        self._saves: Dict[int, Save] = {}
        self._next_save = 0
        self._bad_blocks: Set[int] = set()
        self._switches: List[Switch] = []
        self._hints: List[Hint] = []
        #: Hints of ended requests, each with the saves that must complete before it is sent.
        self._deferred_hints: List[Tuple[Set[int], Hint]] = []
        self._sends_hints, self._lifetimes = settings.hints, settings.lifetimes
        self._adapters, self._nonce = dict(engine["adapters"]), str(engine["nonce"])
        self._keeps_weights, self._weights = settings.sleep_keeps_weights, ""
        #: lmdeploy (0.18) keeps the index of its prefix cache when a sleep destroys the KV, and
        #: when the weights change. These blocks were computed or loaded since then; None: all
        #: blocks are valid.
        self._valid: "Optional[OrderedDict[bytes, None]]" = None

    # Lookups and loads.

    def match(self, request: Any, computed: int) -> Tuple[Optional[int], bool]:
        """Returns how many tokens after the computed ones can be loaded (None: lookup pending),
        and whether they load asynchronously."""
        if not self._loads_kv or _has_media(request):
            return 0, False
        number, each = int(request.seq_id), self._block_tokens
        limit, overlap = self._loadable(request)
        state = self._state_of(request)
        if (limit < each or computed >= limit - overlap or state.failed
                or self._has_stale_kv(request)):
            return 0, False
        if state.found_tokens is not None:
            if state.found_tokens > computed:  # the engine had no free blocks at the first call
                return state.found_tokens - computed, True
            state.found_tokens = None
        names = self._block_names(request, state, limit // each)
        found = self.lookups.prefix(number, names)
        if found is None:
            return None, False
        if self._advisor is not None:
            self._advisor.looked_up(_names.numbers(names))
        tokens = max(0, found * each - overlap)
        if tokens <= computed:
            # Fewer than it has saved: the store evicted or rejected blocks, so save them again.
            state.next_save = tokens // each
            return 0, False
        state.found_tokens = tokens
        return tokens - computed, True

    def _loadable(self, request: Any) -> Tuple[int, int]:
        """The tokens of a request that may be looked up, and how many of them are computed again:
        with MTP a block's rows also depend on the next token."""
        limit = request.clamp_prefix_cache_match_step(_versions.candidate_step(request))
        overlap = max(0, request.prefix_cache.recompute_overlap.recompute_blocks)
        return limit // self._block_tokens * self._block_tokens, overlap * self._block_tokens

    def blocks_allocated(self, request: Any, blocks: Sequence[int], tokens: int) -> None:
        """Queues a load into the `blocks` that the engine allocated for found `tokens`."""
        if tokens <= 0:
            return
        number, each = int(request.seq_id), self._block_tokens
        state = self._state_of(request)
        found, state.found_tokens = state.found_tokens, None
        start = int(request.num_history_ids) // each
        end = start + len(blocks)
        if found is None or tokens != len(blocks) * each or end * each > found:
            raise ValueError(f"request {number} has {len(blocks)} blocks for {tokens} tokens from "
                             f"block {start} on, but {found} tokens were found")
        if state.load is not None:
            raise RuntimeError(f"request {number} has a load in progress already")
        state.load = Load(number, int(request.session_id), tuple(map(int, blocks)),
                          tuple(state.names[start:end]))
        state.load_start = start
        self._pending[number] = state.load

    # Steps.

    def step(self, given: Any) -> Optional[StepMeta]:
        """Returns the workers' metadata of this step; None if there is no work and no transfer in
        progress."""
        saves = self._new_saves(given)
        switches, self._switches = tuple(self._switches), []
        hints, self._hints = tuple(self._hints), []
        if not (saves or switches or hints or self._pending or self._loading or self._saves):
            return None
        loads = tuple(self._pending.values())
        self._loading.update(self._pending)
        self._pending.clear()
        for save in saves:
            self._saves[save.number] = save
        return StepMeta(loads, saves, switches, hints)

    def _new_saves(self, given: Any) -> Tuple[Save, ...]:
        lengths = given.connector_token_lens
        if not self._saves_kv or not lengths:
            return ()
        made = []
        rows = (given.running, lengths, given.connector_block_ids,
                given.connector_logical_block_ids)
        if len({len(row) for row in rows}) != 1:
            raise ValueError("the step's lists differ in length: "
                             f"{', '.join(str(len(row)) for row in rows)} entries for running "
                             "requests, token counts, block ids and logical block ids")
        for request, tokens, blocks, logical in zip(*rows):
            if _has_media(request) or self._has_stale_kv(request):
                continue
            state, end = self._state_of(request), int(tokens) // self._block_tokens
            first = state.next_save
            if not self._begins_valid(request, state, end) or end <= first:
                continue
            if end > min(len(blocks), len(logical)):
                raise RuntimeError(f"request {request.seq_id} has {tokens} tokens, but only "
                                   f"{min(len(blocks), len(logical))} blocks")
            names = self._block_names(request, state, end)
            made.append(Save(self._next_save, int(request.session_id), tuple(blocks[first:end]),
                             tuple(logical[first:end]), tuple(names[first:end])))
            if state.first_saved is None:
                state.first_saved = first
            state.saving.add(self._next_save)
            self._next_save += 1
            state.next_save = end
        return tuple(made)

    def _begins_valid(self, request: Any, state: _Request, end: int) -> bool:
        """Whether the KV that a request began with is valid. Notes its blocks up to `end` as valid
        if so, except those that lmdeploy computes again although it has them."""
        if self._valid is None:
            return True
        if not state.started:
            state.started = True
            reused = int(request.num_history_ids) // self._block_tokens
            names = self._block_names(request, state, max(reused, end))[:reused]
            if any(name not in self._valid for name in names):
                state.stale = True
                return False
        limit, overlap = self._loadable(request)
        usable = max(0, min(end, (limit - overlap) // self._block_tokens))
        self._set_valid(self._block_names(request, state, usable))
        return True

    def _set_valid(self, names: Sequence[bytes]) -> None:
        if self._valid is None:
            return
        for name in names:
            self._valid[name] = None
            self._valid.move_to_end(name)
        while len(self._valid) > _MAX_VALID:
            self._valid.popitem(last=False)

    def progress(self, output: Any) -> KVConnectorResult:
        """Handles transfers that completed on all workers, and returns the engine's result."""
        saved = frozenset(number for number in output.completed_save_ids or ()
                          if number in self._saves)
        for number in saved:
            save = self._saves.pop(number)
            if self._advisor is not None:
                self._update_advisor()
                self._advisor.stored(_names.numbers(save.names))
        self._saves_ended(saved)
        self._bad_blocks.update(output.invalid_block_ids)
        results = []
        for number in sorted(output.finished_receiving or ()):
            load = self._loading.pop(number, None)
            if load is not None:
                results.append(self._loaded(number, load))
        return KVConnectorResult(tuple(results), saved)

    def _saves_ended(self, saves: "frozenset[int]") -> None:
        """Removes completed saves, and releases the hints that waited for them."""
        if not saves:
            return
        for state in self._requests.values():
            state.saving -= saves
        for remaining, hint in self._deferred_hints:
            remaining -= saves
            if not remaining:
                self._hints.append(hint)
        self._deferred_hints = [one for one in self._deferred_hints if one[0]]

    def _loaded(self, number: int, load: Load) -> KVLoadResult:
        blocks = set(load.blocks)
        state = self._requests.get(number)
        success = blocks.isdisjoint(self._bad_blocks) and (state is None or not state.stale)
        self._bad_blocks -= blocks
        if success:
            self._set_valid(load.names)
        if state is not None:
            state.load = None
            # After a failure the request computes: another load could fail for ever.
            state.failed = not success
            state.next_save = state.load_start + (len(load.blocks) if success else 0)
        return KVLoadResult(number, success)

    # Requests.

    def request_started(self, request: Any) -> None:
        """Starts the state of a request, or of a session's next turn."""
        self._requests[int(request.seq_id)] = _Request(self._variant(request))

    def request_finished(self, request: Any) -> None:
        """Ends a request: cancels its lookup and load, and queues its hint."""
        number = int(request.seq_id)
        self.lookups.cancel(number)
        state = self._requests.pop(number, None)
        if state is not None and self._sends_hints and not state.stale:
            self._queue_hint(request, state)
        load = self._pending.pop(number, None) or self._loading.pop(number, None)
        if load is not None:
            self._bad_blocks.difference_update(load.blocks)

    def _queue_hint(self, request: Any, state: _Request) -> None:
        """Queues one hint for the workers' policies: why the request ended."""
        stop = _future.stop_of(request)
        next_use_s, never = _future.expected(stop, self._lifetimes)
        names = tuple(state.names)
        if never:  # other requests may share the blocks that this one did not save
            names = () if state.first_saved is None else names[state.first_saved:]
        if names:
            hint = Hint(_future.STOPS[stop], names, next_use_s, never)
            if state.saving:
                self._deferred_hints.append((state.saving, hint))
            else:
                self._hints.append(hint)

    def set_weights(self, version: str) -> None:
        """Changes block names to those of the new weights, and marks running requests as stale."""
        if version != self._weights:
            self._weights = version
            self._engine_kv_is_invalid()

    def _engine_kv_is_invalid(self) -> None:
        """KV in the engine's cache, which lmdeploy may still find, is of no use."""
        self._valid = OrderedDict()
        for state in self._requests.values():
            state.stale = True

    def switch(self, tier: int, spec: str) -> None:
        """Sets a tier's policy from the next step on."""
        self._switches.append(Switch(tier, spec))
        if self._advisor is not None and tier == TIER_HOST:
            self._advisor.switch(spec)

    def advice(self, batch: int) -> Optional[Advice]:
        """Returns a recommended batch size; None if advice is off or the capacity is unknown."""
        if self._advisor is None:
            return None
        if self.lookups.closed:
            raise make(abi.KVT_E_CLOSED, "the connector was shut down: advice is available only "
                       "before shutdown()")
        self._update_advisor()
        return self._advisor.advise(batch) if self._capacity.blocks else None

    def _update_advisor(self) -> None:
        if self._advisor is not None and self._capacity.update():
            self._advisor.resize(self._capacity.blocks)
            self._advisor.use_store_policy(self._capacity.policy)

    def workers_drained(self) -> None:
        """Forgets all transfers: the workers have ended them without reporting results."""
        for number in (*self._pending, *self._loading):
            state = self._requests.get(number)
            if state is not None:
                state.load = None
        self._pending.clear()
        self._loading.clear()
        self._saves_ended(frozenset(self._saves))
        self._saves.clear()
        self._bad_blocks.clear()
        self._engine_kv_is_invalid()
        if not self._keeps_weights:  # the engine may wake from its sleep with other weights
            self.set_weights(secrets.token_hex(16))

    def close(self) -> None:
        """Closes lookups and the advisor, and forgets all requests."""
        self.lookups.close()
        if self._advisor is not None:
            self._advisor.close()
        self.workers_drained()
        self._requests.clear()

    def _state_of(self, request: Any) -> _Request:
        state = self._requests.get(int(request.seq_id))
        if state is None:
            state = self._requests[int(request.seq_id)] = _Request(self._variant(request))
        return state

    def _variant(self, request: Any) -> str:
        """Returns what block names contain besides tokens: the weights' version and the adapter.

        An adapter's name does not identify its content. Without a configured description the
        engine's nonce makes the names unique to this engine."""
        name = request.adapter_name or ""
        if not name and not self._weights:
            return ""
        description = self._adapters.get(name)
        adapter = [description] if description else [name, self._nonce] if name else []
        return json.dumps([self._weights, adapter])

    def _has_stale_kv(self, request: Any) -> bool:
        """Whether part of a request's KV comes from other weights or another adapter."""
        state = self._state_of(request)
        return state.stale or state.variant != self._variant(request)

    def _block_names(self, request: Any, state: _Request, blocks: int) -> List[bytes]:
        _names.extend(state.names, request.all_ids, self._block_tokens, state.variant, blocks)
        return state.names[:blocks]


def _has_media(request: Any) -> bool:
    """Whether a request has images or audio: its tokens do not identify these."""
    return not request.history_multimodals.empty() or len(request.history_embeddings) > 0
