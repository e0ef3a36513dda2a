"""The connector's side in the scheduler: which tokens there are, what to load, what to save."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Set, Tuple

import kvtier

from . import hints
from .connector_meta import (
    Ask,
    Ended,
    Grown,
    KvtierAnswers,
    KvtierMetadata,
    Move,
    Opened,
    who,
)
from .connector_worker import Worker, worker_here
from .settings import logger


@dataclass
class _Request:
    """A request that the scheduler has."""

    request: Any
    blocks: List[int] = field(default_factory=list)
    #: Tokens that are stored, and that the workers were told.
    saved: int = 0
    told: int = 0
    opened: bool = False
    #: Workers were asked for it.
    asked: bool = False
    load: Optional[Move] = None
    #: Computed by what was forgotten since: none of it is to be kept.
    stale: bool = False
    #: Its blocks as the advisor knows them.
    names: List[int] = field(default_factory=list)


class Scheduler:
    """Asks the worker's store where that is in this process, else the workers by way of the next
    step: a store's directory belongs to one process alone."""

    def __init__(self, engine: str, block_tokens: int, *, layerwise: bool, save_decode: bool,
                 use_hints: bool, policy: str = "") -> None:
        self._engine, self._block = engine, block_tokens
        self._layerwise, self._save_decode, self._hints = layerwise, save_decode, use_hints
        self._requests: Dict[str, _Request] = {}
        self._asked: Dict[str, int] = {}
        self._answers: Dict[str, Tuple[int, int]] = {}
        self._found: Dict[str, int] = {}
        self._epoch = 0
        self._next, self._step = KvtierMetadata(), 1
        # Blocks that are loaded within a step, until all workers have said how that went.
        self._unsure: List[Tuple[int, Set[int]]] = []
        self.queries = self.hits = 0
        self._advisor, self._room = kvtier.Advisor(policy, logger=logger), 0
        self._policy = ""

    def _here(self) -> Optional[Worker]:
        return worker_here(self._engine)

    def on_new_request(self, request: Any) -> None:
        """It is known from now on."""
        self._requests.setdefault(request.request_id, _Request(request))

    def matched(self, request: Any, computed: int) -> Tuple[Optional[int], bool]:
        """How many tokens beyond the computed ones can be loaded, and whether between steps."""
        limit = (request.num_tokens - 1) // self._block * self._block
        if request.prompt_embeds is not None or computed % self._block:
            return 0, False
        name, tokens = request.request_id, list(request.all_token_ids[:limit])
        self.on_new_request(request)
        one, worker = self._requests[name], self._here()
        if computed >= limit:
            one.saved = max(one.saved, limit)  # it was saved when it was computed
            return 0, False
        one.asked = True
        if worker is not None:
            answer = worker.lookup(Ask(name, who(request), tokens))
            if answer is None:
                return None, False
            usable = answer
        else:
            size, usable = self._answers.pop(name, (0, 0))
            if size != limit:
                if self._asked.get(name) != limit:
                    self._asked[name] = limit
                    self._next.asks.append(Ask(name, who(request), tokens))
                return None, False
            self._asked.pop(name, None)
        self.queries += limit
        if self._advisor.learns:
            self._advisor.looked_up(self._names(one, limit))
        one.saved = max(one.saved, min(usable, limit) // self._block * self._block)
        more = min(usable, limit) // self._block * self._block - computed
        if more <= 0:
            return 0, False
        self._found[name] = computed
        return more, not self._layerwise

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """There is room for what is to be loaded."""
        if not external:
            return
        one = self._requests[request.request_id]
        first = self._found.pop(request.request_id)
        ids = blocks.get_block_ids()[0]
        end = first + external
        self._tell(one, end)
        one.load = Move(request.request_id, first, external, list(
            ids[first // self._block: end // self._block]))
        self._next.loads.append(one.load)
        if self._layerwise:
            self._unsure.append((self._step, set(one.load.blocks)))
        self.hits += external

    def _tell(self, one: _Request, end: int) -> None:
        name = one.request.request_id
        if not one.opened:
            one.opened = True
            told = hints.take(one.request.kv_transfer_params) if self._hints else hints.NOTHING
            self._next.opened.append(Opened(name, who(one.request), told.tenant, told.priority))
        if end > one.told:
            self._next.grown.append(
                Grown(name, one.told, list(one.request.all_token_ids[one.told: end])))
            one.told = end

    def meta(self, output: Any) -> KvtierMetadata:
        """What the workers have to do in this step."""
        for new in output.scheduled_new_reqs:
            one = self._requests.get(new.req_id)
            if one is not None:
                one.blocks = list(new.block_ids[0])
                self._save(one, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            one = self._requests.get(name)
            if one is None:
                continue
            more = cached.new_block_ids[at]
            if name in cached.resumed_req_ids:
                one.blocks = list(more[0]) if more else []
            elif more:
                one.blocks.extend(more[0])
            self._save(one, cached.num_computed_tokens[at], output)
        meta, self._next = self._next, KvtierMetadata()
        meta.epoch, meta.step = self._epoch, self._step
        self._step += 1
        return meta

    def _save(self, one: _Request, computed: int, output: Any) -> None:
        request = one.request
        if one.stale or request.prompt_embeds is not None:
            return
        # What is computed from blocks that then turn out not to have come is garbage, on every
        # rank. It must not be stored, so nothing is before that is known.
        if any(not blocks.isdisjoint(one.blocks) for _, blocks in self._unsure):
            return
        # Drafts that are not accepted are computed, too: only tokens that are certain count.
        known = len(request.all_token_ids) if self._save_decode else request.num_prompt_tokens
        end = min(computed + output.num_scheduled_tokens.get(request.request_id, 0), known)
        end = min(end // self._block, len(one.blocks)) * self._block
        if end <= one.saved:
            return
        self._tell(one, end)
        self._next.saves.append(Move(request.request_id, one.saved, end - one.saved, one.blocks[
            one.saved // self._block: end // self._block]))
        if self._advisor.learns:
            self._advisor.stored(self._names(one, end)[one.saved // self._block:])
        one.saved = end

    def _names(self, one: _Request, end: int) -> List[int]:
        """Its blocks up to a token: the same for the same tokens after the same."""
        before = one.names[-1] if one.names else hints.number(repr(who(one.request)))
        for at in range(len(one.names) * self._block, end, self._block):
            tokens = array("q", one.request.all_token_ids[at: at + self._block])
            before = int.from_bytes(hashlib.blake2b(
                tokens.tobytes(), key=before.to_bytes(8, "little"), digest_size=8).digest(),
                "little")
            one.names.append(before)
        return one.names[:end // self._block]

    def advice(self, batch: int) -> Optional[kvtier.Advice]:
        """How many requests to run, from the number that run now. It goes by lookups and saves
        since it was first asked for; None while no worker has said how much it holds."""
        worker = self._here()
        room, policy = (self._room, self._policy) if worker is None else (
            worker.room(), worker.policy())
        self._advisor.store_has(policy)
        return self._advisor.advise(batch, room)

    def set_policy(self, spec: str, tier: int = kvtier.TIER_HOST) -> None:
        """All workers' stores go on with another policy, from the next step on."""
        kvtier.Policy(spec, holes=True).close()  # what is none is refused here, not in a worker
        self._next.policies.append((tier, spec))
        if tier == kvtier.TIER_HOST:
            self._advisor.switch(spec)

    def shutdown(self) -> None:
        """Ends advice."""
        self._advisor.close()

    def failed(self, blocks: Any) -> None:
        """Blocks that did not come: they are computed, and are to be saved then."""
        for one in self._requests.values():
            if one.load is None or not blocks:
                continue
            lost = [at for at, block in enumerate(one.load.blocks) if block in blocks]
            if lost:
                one.saved = min(one.saved, one.load.first + lost[0] * self._block)

    def heard(self, answers: Any) -> None:
        """What the workers answered."""
        if not isinstance(answers, KvtierAnswers):
            return
        self._unsure = [one for one in self._unsure if one[0] > answers.step]
        self._room = answers.room or self._room
        self._policy = answers.policy or self._policy
        if answers.epoch == self._epoch:
            for name, (size, usable) in answers.tokens.items():
                self._next.heard.append(name)
                if self._asked.get(name) == size:
                    self._answers[name] = (size, usable)

    def finished(self, request: Any) -> None:
        """A request has ended."""
        name = request.request_id
        self._asked.pop(name, None)
        self._answers.pop(name, None)
        self._found.pop(name, None)
        one = self._requests.pop(name, None)
        if one is None or not (one.opened or one.asked):
            return
        told = hints.take(request.kv_transfer_params) if self._hints else hints.NOTHING
        stop = told.stop or (_stop(request) if self._hints else kvtier.STOP_UNKNOWN)
        self._next.ended.append(Ended(name, stop, told.next_use_s, told.done))

    def forget(self) -> None:
        """Nothing that was stored until now is to be found again."""
        self._epoch += 1
        self._answers.clear()
        self._asked.clear()
        for one in self._requests.values():
            one.stale, one.opened, one.told = True, False, 0
        self._next.saves.clear()
        worker = self._here()
        if worker is not None:
            worker.enter(self._epoch)


def _stop(request: Any) -> int:
    name = getattr(request.status, "name", "")
    return {"FINISHED_STOPPED": kvtier.STOP_END_TURN, "FINISHED_LENGTH_CAPPED": kvtier.STOP_LENGTH,
            "FINISHED_ABORTED": kvtier.STOP_CANCELLED}.get(name, kvtier.STOP_UNKNOWN)
