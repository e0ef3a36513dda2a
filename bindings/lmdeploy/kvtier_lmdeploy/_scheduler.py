"""The scheduler's side: what to load, what to save, and when both have ended."""

from __future__ import annotations

import json
import logging
import secrets
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

from kvtier import TIER_HOST, Advice, Advisor, abi
from kvtier._errors import make
from lmdeploy.pytorch.kv_connector.base import KVConnectorResult, KVLoadResult

from . import _future, _names
from ._lookup import Asker
from ._meta import Hint, Load, Save, StepMeta, Switch
from ._room import AT_FIRST, Room
from ._settings import Settings

log = logging.getLogger("kvtier.lmdeploy")


@dataclass
class _Request:
    """What is known of one request."""

    #: What it is computed with, besides its tokens.
    kind: str = ""
    names: List[bytes] = field(default_factory=list)
    #: How many tokens from the start on a lookup found, until they are loaded.
    found_tokens: Optional[int] = None
    #: The next block to be saved.
    next_save: int = 0
    #: From this block on it has saved them itself; those before may be everybody's.
    own: Optional[int] = None
    #: Saves that have not ended.
    saving: Set[int] = field(default_factory=set)
    load: Optional[Load] = None
    #: After this many blocks a load goes on.
    load_start: int = 0
    failed: bool = False
    #: The weights changed while it was there.
    spoilt: bool = False


class SchedulerSide:
    """One engine's. The engine's loop alone uses it, but for `asker`."""

    def __init__(self, cache_config: Any, settings: Settings, engine: Dict[str, Any],
                 asker: Asker) -> None:
        transfer = cache_config.kv_transfer_config
        self._loads_kv, self._saves_kv = transfer.is_kv_consumer, transfer.is_kv_producer
        self._block_tokens = int(cache_config.block_size)
        self.asker = asker
        self._advisor = Advisor(settings.policy, room=AT_FIRST, logger=log) if (
            settings.advice) else None
        self._room = Room(asker)
        self._requests: Dict[int, _Request] = {}
        self._pending: Dict[int, Load] = {}
        self._moving: Dict[int, Load] = {}
        self._saves: Dict[int, Save] = {}
        self._next_save = 0
        self._bad_blocks: Set[int] = set()
        self._switches: List[Switch] = []
        self._hints: List[Hint] = []
        #: Of requests that ended before their saves did.
        self._late: List[Tuple[Set[int], Hint]] = []
        self._tells, self._lifetimes = settings.hints, settings.lifetimes
        self._adapters, self._nonce = dict(engine["adapters"]), str(engine["nonce"])
        self._keeps_weights, self._weights = settings.sleep_keeps_weights, ""

    # Lookups and loads.

    def matched(self, request: Any, computed: int) -> Tuple[Optional[int], bool]:
        """How many tokens after those that are computed could be loaded."""
        if not self._loads_kv or _has_media(request):
            return 0, False
        number, each = int(request.seq_id), self._block_tokens
        limit = request.clamp_prefix_cache_match_step(request.get_prefix_cache_max_candidate_step())
        limit = limit // each * each
        # Blocks whose rows also depend on the token after them are computed again.
        overlap = max(0, request.prefix_cache.recompute_overlap.recompute_blocks) * each
        state = self._of(request)
        if limit < each or computed >= limit - overlap or state.failed or self._mixed(request):
            return 0, False
        if state.found_tokens is not None:
            if state.found_tokens > computed:  # there was no room for it yet
                return state.found_tokens - computed, True
            state.found_tokens = None
        names = self._named(request, state, limit // each)
        found = self.asker.prefix(number, names)
        if found is None:
            return None, False
        if self._advisor is not None:
            self._advisor.looked_up(_names.numbers(names))
        tokens = max(0, found * each - overlap)
        if tokens <= computed:
            # Also less than it has saved: that has left, or was not stored.
            state.next_save = tokens // each
            return 0, False
        state.found_tokens = tokens
        return tokens - computed, True

    def allocated(self, request: Any, blocks: Sequence[int], tokens: int) -> None:
        """There are blocks for what was found."""
        if tokens <= 0:
            return
        number, each = int(request.seq_id), self._block_tokens
        state = self._of(request)
        found, state.found_tokens = state.found_tokens, None
        start = int(request.num_history_ids) // each
        end = start + len(blocks)
        if found is None or tokens != len(blocks) * each or end * each > found:
            raise ValueError(f"request {number}: {len(blocks)} blocks for {tokens} tokens from "
                             f"block {start} on, and {found} tokens were found")
        if state.load is not None:
            raise RuntimeError(f"request {number} is being loaded already")
        state.load = Load(number, int(request.session_id), tuple(map(int, blocks)),
                          tuple(state.names[start:end]))
        state.load_start = start
        self._pending[number] = state.load

    # Steps.

    def step(self, given: Any) -> Optional[StepMeta]:
        """What the workers are to do now; None where nothing is, and nothing is under way."""
        saves = self._new_saves(given)
        switches, self._switches = tuple(self._switches), []
        hints, self._hints = tuple(self._hints), []
        if not (saves or switches or hints or self._pending or self._moving or self._saves):
            return None
        loads = tuple(self._pending.values())
        self._moving.update(self._pending)
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
            raise ValueError("a step with lengths and blocks of other requests than run")
        for request, tokens, blocks, logical in zip(*rows):
            if _has_media(request) or self._mixed(request):
                continue
            state, end = self._of(request), int(tokens) // self._block_tokens
            first = state.next_save
            if end <= first:
                continue
            if end > min(len(blocks), len(logical)):
                raise RuntimeError(f"request {request.seq_id}: {tokens} tokens in {len(blocks)} "
                                   "blocks")
            names = self._named(request, state, end)
            made.append(Save(self._next_save, int(request.session_id), tuple(blocks[first:end]),
                             tuple(logical[first:end]), tuple(names[first:end])))
            if state.own is None:
                state.own = first
            state.saving.add(self._next_save)
            self._next_save += 1
            state.next_save = end
        return tuple(made)

    def progress(self, output: Any) -> KVConnectorResult:
        """What all workers have ended since the last time."""
        saved = frozenset(number for number in output.completed_save_ids or ()
                          if number in self._saves)
        for number in saved:
            save = self._saves.pop(number)
            if self._advisor is not None:
                self._learn()
                self._advisor.stored(_names.numbers(save.names))
        self._ended(saved)
        self._bad_blocks.update(output.invalid_block_ids)
        results = []
        for number in sorted(output.finished_receiving or ()):
            load = self._moving.pop(number, None)
            if load is not None:
                results.append(self._loaded(number, load))
        return KVConnectorResult(tuple(results), saved)

    def _ended(self, saves: "frozenset[int]") -> None:
        """What is known of blocks can be told once they are stored."""
        if not saves:
            return
        for state in self._requests.values():
            state.saving -= saves
        for left, hint in self._late:
            left -= saves
            if not left:
                self._hints.append(hint)
        self._late = [one for one in self._late if one[0]]

    def _loaded(self, number: int, load: Load) -> KVLoadResult:
        blocks = set(load.blocks)
        state = self._requests.get(number)
        well = blocks.isdisjoint(self._bad_blocks) and (state is None or not state.spoilt)
        self._bad_blocks -= blocks
        if state is not None:
            state.load = None
            # What failed once is computed: asking again could fail as well, for ever.
            state.failed = not well
            state.next_save = state.load_start + (len(load.blocks) if well else 0)
        return KVLoadResult(number, well)

    # Requests.

    def begun(self, request: Any) -> None:
        """A request, or one more turn of a session."""
        self._requests[int(request.seq_id)] = _Request(self._kind(request))

    def finished(self, request: Any) -> None:
        """It is over."""
        number = int(request.seq_id)
        self.asker.cancel(number)
        state = self._requests.pop(number, None)
        if state is not None and self._tells and not state.spoilt:
            self._tell(request, state)
        load = self._pending.pop(number, None) or self._moving.pop(number, None)
        if load is not None:
            self._bad_blocks.difference_update(load.blocks)

    def _tell(self, request: Any, state: _Request) -> None:
        """Has the policies told why a request ended, in one call a worker."""
        stop = _future.stop_of(request)
        next_use_s, never = _future.expected(stop, self._lifetimes)
        names = tuple(state.names)
        if never:  # what others have saved, or have used, too, may be theirs
            names = () if state.own is None else names[state.own:]
        if names:
            hint = Hint(_future.STOPS[stop], names, next_use_s, never)
            if state.saving:
                self._late.append((state.saving, hint))
            else:
                self._hints.append(hint)

    def set_weights(self, version: str) -> None:
        """Other weights: names of blocks are others, and requests of both are left alone."""
        if version != self._weights:
            self._weights = version
            for state in self._requests.values():
                state.spoilt = True

    def switch(self, tier: int, spec: str) -> None:
        """Another policy from the next step on."""
        self._switches.append(Switch(tier, spec))
        if self._advisor is not None and tier == TIER_HOST:
            self._advisor.switch(spec)

    def advice(self, batch: int) -> Optional[Advice]:
        """How many requests to run; None where it was not asked for, or the store's size is not
        known yet."""
        if self._advisor is None:
            return None
        if self.asker.closed:
            raise make(abi.KVT_E_CLOSED, "the connector was shut down")
        self._learn()
        return self._advisor.advise(batch) if self._room.blocks else None

    def _learn(self) -> None:
        if self._advisor is not None and self._room.learned():
            self._advisor.resize(self._room.blocks)
            self._advisor.store_has(self._room.policy)

    def drained(self) -> None:
        """The workers have ended all, and what they said of it was not heard."""
        for number in (*self._pending, *self._moving):
            state = self._requests.get(number)
            if state is not None:
                state.load = None
        self._pending.clear()
        self._moving.clear()
        self._ended(frozenset(self._saves))
        self._saves.clear()
        self._bad_blocks.clear()
        if not self._keeps_weights:  # the engine slept, and may wake with others
            self.set_weights(secrets.token_hex(16))

    def close(self) -> None:
        """Ends lookups and forgets all."""
        self.asker.close()
        if self._advisor is not None:
            self._advisor.close()
        self.drained()
        self._requests.clear()

    def _of(self, request: Any) -> _Request:
        state = self._requests.get(int(request.seq_id))
        if state is None:
            state = self._requests[int(request.seq_id)] = _Request(self._kind(request))
        return state

    def _kind(self, request: Any) -> str:
        """What blocks' names say beside tokens: the adapter, and which weights by now. Names
        of adapters are no proof of what is in them: what is not configured is this engine's."""
        name = request.adapter_name or ""
        if not name and not self._weights:
            return ""
        said = self._adapters.get(name)
        adapter = [said] if said else [name, self._nonce] if name else []
        return json.dumps([self._weights, adapter])

    def _mixed(self, request: Any) -> bool:
        """Whether some of its KV is of other weights, or of another adapter."""
        state = self._of(request)
        return state.spoilt or state.kind != self._kind(request)

    def _named(self, request: Any, state: _Request, blocks: int) -> List[bytes]:
        _names.extend(state.names, request.all_ids, self._block_tokens, state.kind, blocks)
        return state.names[:blocks]


def _has_media(request: Any) -> bool:
    """Images and sounds: tokens do not say what they are."""
    return not request.history_multimodals.empty() or len(request.history_embeddings) > 0
