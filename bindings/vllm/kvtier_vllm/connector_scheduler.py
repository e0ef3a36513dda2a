"""The connector's scheduler side: decides which tokens each step loads and saves."""

from __future__ import annotations

import hashlib
import time
from array import array
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Set, Tuple

import kvtier

from . import hints
from .connector_events import DescribeBlocks, KvEvents
from .connector_meta import (
    AppendTokens,
    BlockTransfer,
    EndRequest,
    KvtierMetadata,
    KvtierWorkerMetadata,
    Lookup,
    OpenSession,
    scope_of,
)
from .connector_worker import Worker, local_worker
from .settings import logger

#: Most blocks of a long request that its KV events wait for; the rest follows at its end.
_DESCRIBED_BLOCKS = 64


@dataclass
class _Request:
    """State of a request that the scheduler knows."""

    request: Any
    blocks: List[int] = field(default_factory=list)
    #: Tokens that are saved, and tokens that the workers' sessions have.
    saved: int = 0
    appended: int = 0
    opened: bool = False
    #: Blocks that the workers know by vLLM's hash.
    described: int = 0
    #: Whether a lookup was made for it.
    looked_up: bool = False
    load: Optional[BlockTransfer] = None
    #: Number of the first block that it loads between steps.
    loads: Optional[int] = None
    #: True after `reset_cache`: its KV was computed before the reset and must not be saved.
    stale: bool = False
    #: Numbers that identify its blocks to the advisor.
    block_ids: List[int] = field(default_factory=list)
    hints: hints.RequestHints = hints.NONE


class Scheduler:
    """Looks up in the worker's store where the only worker is in this process. Otherwise it sends
    lookups to all workers with the next step, because a store belongs to one process. `role` is
    the engine's `kv_role`: a producer loads nothing, a consumer saves nothing."""

    def __init__(self, engine: str, block_tokens: int, *, layerwise: bool, save_decode: bool,
                 use_hints: bool, policy: str = "", role: str = "kv_both",
                 events: Optional[KvEvents] = None) -> None:
        self._events = events
        self._engine, self._block = engine, block_tokens
        self._loads, self._saves = role != "kv_producer", role != "kv_consumer"
        self._layerwise, self._save_decode, self._hints = layerwise, save_decode, use_hints
        self._requests: Dict[str, _Request] = {}
        self._pending_lookups: Dict[str, int] = {}
        self._lookup_results: Dict[str, Tuple[int, int]] = {}
        self._load_starts: Dict[str, int] = {}
        #: The request that loads a block between steps, by the number of the block.
        self._loaders: Dict[int, str] = {}
        self._epoch = 0
        self._next_meta, self._step = KvtierMetadata(), 1
        # Steps with layer-wise loads, and their blocks, until all workers report the results.
        self._unconfirmed: List[Tuple[int, Set[int]]] = []
        self.queries = self.hits = 0
        self._advisor, self._capacity_blocks = kvtier.Advisor(policy, logger=logger), 0
        self._policy = ""
        self._gaps, self._clock = hints.ToolGaps(), time.monotonic

    def _local_worker(self) -> Optional[Worker]:
        return local_worker(self._engine)

    def on_new_request(self, request: Any) -> None:
        """Begins to track a request."""
        if request.request_id in self._requests:
            return
        given = hints.parse(request.kv_transfer_params) if self._hints else hints.NONE
        self._requests[request.request_id] = _Request(request, hints=given)
        self._gaps.began(given.session, self._clock())

    def matched(self, request: Any, computed: int) -> Tuple[Optional[int], bool]:
        """The number of tokens beyond `computed` that can be loaded, and whether they load
        between steps. The number is None while a lookup is not answered."""
        limit = (request.num_tokens - 1) // self._block * self._block
        if not self._loads or request.prompt_embeds is not None or computed % self._block:
            return 0, False
        name, tokens = request.request_id, list(request.all_token_ids[:limit])
        self.on_new_request(request)
        state, worker = self._requests[name], self._local_worker()
        if computed >= limit:
            state.saved = max(state.saved, limit)  # saved when it was computed
            return 0, False
        if self._is_loading(self._block_ids(state, computed + self._block)[-1], name):
            return None, False  # vLLM's own cache will have these blocks
        state.looked_up = True
        if worker is not None:
            answer = worker.lookup(Lookup(name, scope_of(request), tokens))
            if answer is None:
                return None, False
            usable = answer
        else:
            size, usable = self._lookup_results.pop(name, (0, 0))
            if size != limit:
                if self._pending_lookups.get(name) != limit:
                    self._pending_lookups[name] = limit
                    self._next_meta.lookups.append(Lookup(name, scope_of(request), tokens))
                return None, False
            self._pending_lookups.pop(name, None)
        self.queries += limit
        if self._advisor.observes:
            self._advisor.looked_up(self._block_ids(state, limit))
        state.saved = max(state.saved, min(usable, limit) // self._block * self._block)
        more = min(usable, limit) // self._block * self._block - computed
        if more <= 0:
            return 0, False
        self._load_starts[name] = computed
        return more, not self._layerwise

    def _is_loading(self, block: int, name: str) -> bool:
        """Whether another request loads a block now. Requests that share a prefix and arrive
        together would else each load a copy of it."""
        loader = self._loaders.get(block, name)
        if loader == name:
            return False
        state = self._requests.get(loader)
        if state is not None and state.request.status.name == "WAITING_FOR_REMOTE_KVS":
            return True
        del self._loaders[block]
        return False

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Schedules a load, for which the engine has allocated blocks."""
        if not external:
            return
        state = self._requests[request.request_id]
        first = self._load_starts.pop(request.request_id)
        ids = blocks.get_block_ids()[0]
        end = first + external
        self._extend_session(state, end)
        state.load = BlockTransfer(request.request_id, first, external, list(
            ids[first // self._block: end // self._block]))
        self._next_meta.loads.append(state.load)
        if self._layerwise:
            self._unconfirmed.append((self._step, set(state.load.blocks)))
        else:
            state.loads = self._block_ids(state, first + self._block)[-1]
            self._loaders[state.loads] = request.request_id
        self.hits += external

    def _extend_session(self, state: _Request, end: int) -> None:
        """Has the workers' sessions of a request cover its tokens up to `end`."""
        request = state.request
        name = request.request_id
        if not state.opened:
            state.opened = True
            hint = state.hints
            self._next_meta.opened.append(
                OpenSession(name, scope_of(request), hint.tenant, hint.priority, hint.ttl_s))
        if end > state.appended:
            tokens = list(request.all_token_ids[state.appended: end])
            self._next_meta.appended.append(AppendTokens(name, state.appended, tokens))
            state.appended = end
        # A worker computes the keys of all blocks before them, too.
        self._describe(state, min(_DESCRIBED_BLOCKS, 1 + state.described // 16))

    def _describe(self, state: _Request, least: int) -> None:
        """Has the workers know a request's further blocks by vLLM's hashes, if there are `least`
        of them."""
        end = state.appended // self._block
        if self._events is None or end < state.described + least:
            return
        labels = self._events.labels(state.request, state.described, end)
        if labels:
            self._next_meta.described.append(
                DescribeBlocks(state.request.request_id, state.described, labels))
            state.described += len(labels)

    def build_meta(self, output: Any) -> KvtierMetadata:
        """Builds the message to the workers for this step."""
        for new in output.scheduled_new_reqs:
            state = self._requests.get(new.req_id)
            if state is not None:
                state.blocks = list(new.block_ids[0])
                self._save(state, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            state = self._requests.get(name)
            if state is None:
                continue
            more = cached.new_block_ids[at]
            if name in cached.resumed_req_ids:
                state.blocks = list(more[0]) if more else []
            elif more:
                state.blocks.extend(more[0])
            self._save(state, cached.num_computed_tokens[at], output)
        meta, self._next_meta = self._next_meta, KvtierMetadata()
        meta.epoch, meta.step = self._epoch, self._step
        self._step += 1
        return meta

    def _save(self, state: _Request, computed: int, output: Any) -> None:
        request = state.request
        if not self._saves or state.stale or request.prompt_embeds is not None:
            return
        # KV computed from blocks whose load then fails is garbage on every rank. So nothing is
        # saved before the results of these loads are known.
        if any(not blocks.isdisjoint(state.blocks) for _, blocks in self._unconfirmed):
            return
        # The engine also computes draft tokens that it may reject: only accepted tokens count.
        known = len(request.all_token_ids) if self._save_decode else request.num_prompt_tokens
        end = min(computed + output.num_scheduled_tokens.get(request.request_id, 0), known)
        end = min(end // self._block, len(state.blocks)) * self._block
        if end <= state.saved:
            return
        self._extend_session(state, end)
        self._next_meta.saves.append(BlockTransfer(
            request.request_id, state.saved, end - state.saved,
            state.blocks[state.saved // self._block: end // self._block]))
        if self._advisor.observes:
            self._advisor.stored(self._block_ids(state, end)[state.saved // self._block:])
        state.saved = end

    def _block_ids(self, state: _Request, end: int) -> List[int]:
        """Numbers that identify a request's blocks up to a token: hashes of the whole prefix."""
        ids = state.block_ids
        before = ids[-1] if ids else hints.hash64(repr(scope_of(state.request)))
        for at in range(len(ids) * self._block, end, self._block):
            tokens = array("q", state.request.all_token_ids[at: at + self._block])
            before = int.from_bytes(hashlib.blake2b(
                tokens.tobytes(), key=before.to_bytes(8, "little"), digest_size=8).digest(),
                "little")
            ids.append(before)
        return ids[:end // self._block]

    def advice(self, batch: int) -> Optional[kvtier.Advice]:
        """The recommended number of running requests, from the current number. It depends on the
        lookups and saves since the first call; None while no worker has reported a capacity."""
        worker = self._local_worker()
        capacity, policy = (self._capacity_blocks, self._policy) if worker is None else (
            worker.capacity_blocks(), worker.policy())
        self._advisor.use_store_policy(policy)
        return self._advisor.advise(batch, capacity)

    def set_policy(self, spec: str, tier: int = kvtier.TIER_HOST) -> None:
        """Switches the stores of all workers to another policy, with the next step."""
        kvtier.Policy(spec, holes=True).close()  # rejects a bad spec here, not in a worker
        self._next_meta.policies.append((tier, spec))
        if tier == kvtier.TIER_HOST:
            self._advisor.switch(spec)

    def shutdown(self) -> None:
        """Closes the advisor."""
        self._advisor.close()

    def on_failed_blocks(self, blocks: Any) -> None:
        """Marks blocks whose load failed as unsaved: the engine computes them, then saves them."""
        for state in self._requests.values():
            if state.load is None or not blocks:
                continue
            lost = [at for at, block in enumerate(state.load.blocks) if block in blocks]
            if lost:
                state.saved = min(state.saved, state.load.first + lost[0] * self._block)

    def on_worker_metadata(self, metadata: Any) -> None:
        """Takes the workers' combined message of a step."""
        if not isinstance(metadata, KvtierWorkerMetadata):
            return
        self._unconfirmed = [entry for entry in self._unconfirmed if entry[0] > metadata.step]
        self._capacity_blocks = metadata.capacity_blocks or self._capacity_blocks
        self._policy = metadata.policy or self._policy
        if self._events is not None:
            self._events.apply(metadata.changes)
        if metadata.epoch == self._epoch:
            for name, (size, usable) in metadata.tokens.items():
                self._next_meta.acknowledged.append(name)
                if self._pending_lookups.get(name) == size:
                    self._lookup_results[name] = (size, usable)

    def take_events(self) -> List[Any]:
        """The changes of what the stores have, as vLLM's events."""
        return [] if self._events is None else self._events.take()

    def finished(self, request: Any) -> None:
        """Ends a request: its sessions close with the next step."""
        name = request.request_id
        self._pending_lookups.pop(name, None)
        self._lookup_results.pop(name, None)
        self._load_starts.pop(name, None)
        state = self._requests.pop(name, None)
        if state is None:
            return
        if state.loads is not None and self._loaders.get(state.loads) == name:
            del self._loaders[state.loads]
        hint = state.hints
        next_use_s = self._gaps.expected(hint.tool) if hint.next_use_s is None else hint.next_use_s
        self._gaps.ended(hint.session, hint.tool, self._clock())
        if hint.keep_s is not None and state.saved and not state.stale:
            # A request that the engine's own cache served has no session yet.
            self._extend_session(state, state.saved)
        if not (state.opened or state.looked_up):
            return
        self._describe(state, 1)
        stop = hint.stop or (_stop_reason(request) if self._hints else kvtier.STOP_UNKNOWN)
        self._next_meta.ended.append(EndRequest(
            name, stop, next_use_s, hint.done, hint.keep_s,
            1 if hint.priority is None else hint.priority))

    def reset(self) -> None:
        """Begins a new epoch: KV that was stored before is not found again."""
        self._epoch += 1
        self._lookup_results.clear()
        self._pending_lookups.clear()
        for state in self._requests.values():
            state.stale, state.opened, state.appended = True, False, 0
            state.described = 0
        self._next_meta.saves.clear()
        worker = self._local_worker()
        if worker is not None:
            worker.begin_epoch(self._epoch)


def _stop_reason(request: Any) -> int:
    name = getattr(request.status, "name", "")
    return {"FINISHED_STOPPED": kvtier.STOP_END_TURN, "FINISHED_LENGTH_CAPPED": kvtier.STOP_LENGTH,
            "FINISHED_ABORTED": kvtier.STOP_CANCELLED}.get(name, kvtier.STOP_UNKNOWN)
