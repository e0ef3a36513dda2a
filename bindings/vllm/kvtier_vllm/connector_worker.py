"""The connector's side in a worker: its store, and the moves between that and the KV caches."""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from collections import OrderedDict
from typing import Any, Dict, List, Optional, Set, Tuple

import kvtier
from kvtier._errors import Error

from . import caches, hints, identity
from .connector_meta import Ask, KvtierAnswers, KvtierMetadata, Move, Who
from .settings import Settings, Shared, acquire, invalid, logger, release

#: Namespaces of LoRAs and salts that are kept open; others are opened again.
_MOST_SPACES = 256

_lock = threading.Lock()
_workers: "weakref.WeakValueDictionary[str, Worker]" = weakref.WeakValueDictionary()


def worker_here(engine: str) -> "Optional[Worker]":
    """The engine's worker, where it is its only one and in this process."""
    with _lock:
        found = _workers.get(engine)
    return found if found is not None and found.process == os.getpid() else None


class _Question:
    """What a remote is asked for a request."""

    def __init__(self, space: kvtier.Namespace, ask: Ask, seconds: float) -> None:
        self.tokens = len(ask.tokens)
        self._session = space.session()
        try:
            self._session.append(ask.tokens, ask.who.media)
            self.op = self._session.locate(timeout=seconds)
        except BaseException:
            self._session.close()
            raise

    def close(self) -> None:
        self.op.cancel()
        self.op.wait()
        self.op.close()
        self._session.close()


class Worker:
    """A worker: one store, a session a request. A load that fails names its blocks, and the
    engine computes them."""

    def __init__(self, engine: str, settings: Settings, terms: Dict[str, Any], *, model: str,
                 shard: Tuple[int, int], block_tokens: int, layerwise: bool) -> None:
        self._engine, self._settings, self._terms = engine, settings, terms
        self._model, self._shard, self._block = model, shard, block_tokens
        self.layerwise, self.process = layerwise, os.getpid()
        # The scheduler looks up from its own thread.
        self._guard = threading.RLock()
        self._key = f"connector:{engine}:{settings.disk_path}:{shard[0]}"
        self._shared: Optional[Shared] = None
        self._has_remote = False
        self._layers: List[caches.Layer] = []
        self._index: Dict[str, int] = {}
        self._groups: List[kvtier.Group] = []
        self._spaces: "OrderedDict[Tuple[bytes, bytes], kvtier.Namespace]" = OrderedDict()
        self._sessions: Dict[str, kvtier.Session] = {}
        self._media: Dict[str, Tuple[Tuple[int, bytes], ...]] = {}
        self._loading: Dict[str, Tuple[kvtier.Op, Move]] = {}
        self._by_layer: List[Tuple[List[kvtier.Op], Move]] = []
        self._saving: List[kvtier.Op] = []
        self._saved_layers: Set[int] = set()
        #: What is asked for, and was not answered yet; what was, until that was heard.
        self._asked: Dict[str, Ask] = {}
        self._answers: Dict[str, Tuple[int, int]] = {}
        self._questions: Dict[str, _Question] = {}
        self._loaded_step = 0
        self._bad: Set[int] = set()
        self._refused: Set[str] = set()
        self._epoch = 0
        self._done: Optional[KvtierMetadata] = None
        self.counts: Dict[str, int] = {}

    @property
    def store(self) -> kvtier.Store:
        """The store, for `stats`, `set_policy`, `evictions` and `tenants`."""
        return self._open().store

    def set_policy(self, spec: str, tier: int = kvtier.TIER_HOST) -> None:
        """Goes on with another policy, while everything runs."""
        self._open().set_policy(spec, tier)

    def room(self) -> int:
        """How many blocks there is room for; 0 without KV caches."""
        if self._shared is None:
            return 0
        return kvtier.Advisor.room_of(self._shared.store,
                                      sum(one.block_bytes for one in self._layers))

    def policy(self) -> str:
        """What memory goes by; "" without KV caches."""
        return "" if self._shared is None else self._shared.policy

    def _open(self) -> Shared:
        if self._shared is None:
            raise kvtier.ClosedError("the connector has no KV caches, or was shut down",
                                     kvtier.abi.KVT_E_CLOSED, "KVT_E_CLOSED")
        return self._shared

    def register(self, tensors: Dict[str, Any], names: List[str], blocks: int) -> None:
        """The KV caches: from now on there is a store."""
        self._close()
        self._layers = caches.layers(tensors, names, blocks)
        self._index = {one.name: at for at, one in enumerate(self._layers)}
        sizes: Dict[int, List[int]] = {}
        for at, one in enumerate(self._layers):
            if one.block_bytes % self._block:
                raise invalid(f"a block of {one.name} has {one.block_bytes} bytes, which "
                              f"{self._block} tokens do not share evenly")
            sizes.setdefault(one.block_bytes // self._block, []).append(at)
        self._groups = [kvtier.Group(layers=of, k_bytes=size) for size, of in sizes.items()]
        # Attention backends differ in the order inside a block, which has as many bytes in all.
        orders = [[list(one.shape[1:]), list(one.stride()[1:]), one.element_size()]
                  for one in (tensors[name] for name in names)]
        self._terms = {**self._terms, "orders": orders}
        self._shared = acquire(self._key, self._settings, self._layers[0].ordinal)
        self._has_remote = bool(self._shared.store.remote_stats()["read_circuit"])
        if self._shard[1] == 1:
            with _lock:
                _workers[self._engine] = self

    def _space(self, who: Who) -> kvtier.Namespace:
        of = (who.lora, who.salt)
        if of not in self._spaces:
            if len(self._spaces) >= _MOST_SPACES:
                self._spaces.popitem(last=False)[1].close()
            same = identity.of(self._model, self._settings.weights, self._terms,
                               lora=who.lora or None, salt=who.salt or None, shard=self._shard)
            self._spaces[of] = self._open().store.namespace(
                same, chunk_tokens=self._block, groups=self._groups)
        self._spaces.move_to_end(of)
        return self._spaces[of]

    def lookup(self, ask: Ask) -> Optional[int]:
        """How many tokens could be gone on with; None while the store's remote has not answered: it
        is asked again in the next step."""
        if self._shared is None or not ask.tokens:
            return 0
        with self._guard:
            try:
                return self._look(ask)
            except Error as error:  # a miss: what leaves this ends the engine
                self._count("failed_lookups", 1)
                logger.warning("what there is of %s is not known: %s", ask.request, str(error))
                return 0

    def _look(self, ask: Ask) -> Optional[int]:
        space = self._space(ask.who)
        if not self._asks_remote:
            return space.lookup(ask.tokens, ask.who.media).reusable_tokens
        one = self._questions.get(ask.request)
        if one is None or one.tokens != len(ask.tokens):
            self._drop_question(ask.request)
            try:
                one = _Question(space, ask, self._settings.ask_s)
            except Error as error:
                logger.warning("the remote is not asked for %s: %s", ask.request, str(error))
                return space.lookup(ask.tokens, ask.who.media).reusable_tokens
            self._questions[ask.request] = one
        info = one.op.info()
        if not info.released:
            return None
        self._drop_question(ask.request)
        # What is here counts, whatever became of the question.
        return info.value if not info.status else space.lookup(
            ask.tokens, ask.who.media).reusable_tokens

    @property
    def _asks_remote(self) -> bool:
        return bool(self._settings.ask_s) and self._has_remote

    def _drop_question(self, request: str) -> None:
        with self._guard:
            one = self._questions.pop(request, None)
        if one is not None:
            one.close()

    def enter(self, epoch: int) -> None:
        """Forgets all that was stored before an epoch."""
        if epoch <= self._epoch:
            return
        self._epoch = epoch
        self._finish_saves()
        for op, _ in self._loading.values():
            op.wait()
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
        self._forget_questions()
        # What is open is cleared. What is not, or is held, has another identity from now on.
        with self._guard:
            self._terms = {**self._terms, "reset": uuid.uuid4().hex}
            spaces, self._spaces = self._spaces, OrderedDict()
            for space in spaces.values():
                try:
                    space.clear()
                except Error as error:
                    logger.warning("what was stored is not found, and was not cleared: %s",
                                   str(error))
                space.close()

    def apply(self, meta: KvtierMetadata) -> None:
        """What a step says of requests; whoever needs it first has it done."""
        if self._done is meta:
            return
        self._done, self._saved_layers = meta, set()
        self.enter(meta.epoch)
        for tier, spec in meta.policies:
            try:
                self.set_policy(spec, tier)
            except Error as error:
                logger.warning("set_policy(%r, %d): %s", spec, tier, str(error))
        for opened in meta.opened:
            # A session of its own id that is left is of a request that was given up.
            self._end(opened.request)
            try:
                with self._guard:
                    self._sessions[opened.request] = self._space(opened.who).session(
                        tenant=opened.tenant, priority=opened.priority)
            except Error as error:
                self._without(opened.request, error)
                continue
            self._media[opened.request] = opened.who.media
        for grown in meta.grown:
            session = self._sessions.get(grown.request)
            if session is None:
                continue
            end = grown.first + len(grown.tokens)
            try:
                session.append(grown.tokens, [
                    (at - grown.first, digest) for at, digest in self._media[grown.request]
                    if grown.first <= at < end])
            except Error as error:  # what came after would have these tokens' places
                self._end(grown.request)
                self._without(grown.request, error)

    def _without(self, request: str, error: Error) -> None:
        """A request that goes on without the store: what is to be loaded for it is computed."""
        self._count("failed_sessions", 1)
        logger.warning("KV of %s is neither loaded nor stored: %s", request, str(error))

    def _views(self, move: Move) -> List[kvtier.View]:
        return [one.view(move.blocks, self._block) for one in self._layers]

    def start_loads(self, meta: KvtierMetadata) -> None:
        """Begins what is to be loaded, and answers what is asked."""
        self.apply(meta)
        after: Optional[kvtier.DeviceEvent] = None
        if self.layerwise and meta.loads:
            self._loaded_step = meta.step
        for move in meta.loads:
            session = self._sessions.get(move.request)
            try:
                if session is None:
                    raise invalid(f"nothing is known of request {move.request}")
                after = after or caches.stream_event(self._open().device)
                if self.layerwise:
                    self._by_layer.append((session.get_each(
                        self._views(move), first_token=move.first, tokens=move.length,
                        after=after), move))
                else:
                    self._loading[move.request] = (session.get(
                        self._views(move), first_token=move.first, tokens=move.length,
                        after=after), move)
            except Error as error:
                self._lost(move, 0, error)
                if not self.layerwise:
                    self._count("refused_loads", 1)
                    self._refused.add(move.request)
        for name in meta.heard:
            self._answers.pop(name, None)
        self._asked.update((ask.request, ask) for ask in meta.asks)
        for name, ask in list(self._asked.items()):
            usable = self.lookup(ask)
            if usable is not None:
                self._answers[name] = len(ask.tokens), usable
                del self._asked[name]

    def _forget_questions(self) -> None:
        for name in list(self._questions):
            self._drop_question(name)
        self._asked.clear()
        self._answers.clear()

    def _lost(self, move: Move, tokens: int, error: Optional[Error]) -> None:
        """All from the first gap on is to be computed."""
        blocks = move.blocks[tokens // self._block:]
        self._bad.update(blocks)
        self._count("lost_blocks", len(blocks))
        logger.warning("%d of %d blocks of %s did not come and are computed: %s", len(blocks),
                       len(move.blocks), move.request, str(error))

    def _count(self, name: str, more: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + more

    def wait_layer(self, name: str) -> None:
        """Until what is loaded of a layer is there."""
        at = self._index.get(name)
        if at is not None:
            for ops, _ in self._by_layer:
                ops[at].wait()

    def _finish_layers(self) -> None:
        for ops, _ in self._by_layer:  # known until then, should waiting be broken off
            for op in ops:
                op.wait()
        loads, self._by_layer = self._by_layer, []
        for ops, move in loads:
            came, wrong = move.length, None
            for op in ops:
                info = op.info()
                if info.status:
                    came, wrong = min(came, info.value), op.error()
                op.close()
            self._count("loaded_tokens", came)
            if wrong is not None:
                self._lost(move, came, wrong)

    def save_layer(self, name: str, meta: KvtierMetadata) -> None:
        """Begins to store a layer, while the next ones are computed."""
        at = self._index.get(name)
        if not self.layerwise or at is None or not meta.saves:
            return
        self.apply(meta)
        if at not in self._saved_layers:
            self._saved_layers.add(at)
            self._put(meta, at, at + 1)

    def _put(self, meta: KvtierMetadata, first: int, end: int) -> None:
        after: Optional[kvtier.DeviceEvent] = None
        level = self._settings.put_level() if self._settings.level else kvtier.LEVEL_RAM
        for move in meta.saves:
            session = self._sessions.get(move.request)
            if session is None:
                continue
            views = [one.view(move.blocks, self._block) for one in self._layers[first:end]]
            try:
                after = after or caches.stream_event(self._open().device)
                self._saving.append(session.put(
                    views, first_token=move.first, tokens=move.length, first_layer=first,
                    level=level, after=after))
            except Error as error:
                self._count("failed_saves", 1)
                logger.warning("%d tokens of %s are not stored: %s", move.length, move.request,
                               str(error))

    def finish_step(self, meta: KvtierMetadata) -> None:
        """Stores what was not yet, and waits until the caches are the engine's alone."""
        self.apply(meta)
        self._finish_layers()
        if meta.saves:
            at = 0
            while at < len(self._layers):
                if at in self._saved_layers:
                    at += 1
                    continue
                end = at
                while end < len(self._layers) and end not in self._saved_layers:
                    end += 1
                self._put(meta, at, end)
                at = end
            self._count("saved_tokens", sum(move.length for move in meta.saves))
        self._finish_saves()
        for ended in meta.ended:
            self._end(ended.request, ended.stop, ended.next_use_s, ended.done)
        if self._shared is not None:
            self._shared.log_evictions()

    def _finish_saves(self) -> None:
        for op in self._saving:  # they read the caches, also where waiting is broken off
            op.wait()
        saving, self._saving = self._saving, []
        for op in saving:
            error = op.error()
            if error is not None:
                self._count("failed_saves", 1)
                logger.warning("KV was not stored: %s", str(error))
            op.close()

    def _end(self, request: str, stop: int = kvtier.STOP_UNKNOWN,
             next_use_s: Optional[float] = None, done: bool = False) -> None:
        session = self._sessions.pop(request, None)
        self._media.pop(request, None)
        self._drop_question(request)
        self._asked.pop(request, None)
        self._answers.pop(request, None)
        if session is None:
            return
        try:
            if stop or done or next_use_s is not None:
                session.hint(stop=stop, next_use_ns=hints.moment(next_use_s), done=done)
        except Error as error:
            logger.warning("a hint of %s was refused: %s", request, str(error))
        session.close()

    def loaded(self) -> Set[str]:
        """Requests whose loads have ended, however."""
        ended, self._refused = self._refused, set()
        for name, (op, move) in list(self._loading.items()):
            info = op.info()
            if not info.released:
                continue
            del self._loading[name]
            ended.add(name)
            if info.status:
                self._lost(move, info.value, op.error())
            self._count("loaded_tokens", info.value)
            op.close()
        return ended

    def bad_blocks(self) -> Set[int]:
        """Blocks that did not come, each told once. The engine may ask before it waits for
        saves, and what it has computed with a block counts unless it is told now."""
        self._finish_layers()
        bad, self._bad = self._bad, set()
        return bad

    def answers(self) -> Optional[KvtierAnswers]:
        """What is known of what was asked, and that the step's loads have ended."""
        if not self._answers and not self._asked and not self._loaded_step:
            return None
        step, self._loaded_step = self._loaded_step, 0
        return KvtierAnswers(self._epoch, dict(self._answers), step, self.room(),
                             self.policy())

    def _close(self) -> None:
        if self._shared is None:
            return
        for op, _ in self._loading.values():
            op.cancel()
        loads = [op for op, _ in self._loading.values()] + [
            op for ops, _ in self._by_layer for op in ops]
        for op in loads:
            op.wait()
        self._loading.clear()
        self._by_layer.clear()
        for op in loads:
            op.close()
        self._finish_saves()
        for name in list(self._sessions):
            self._end(name)
        self._forget_questions()
        with self._guard:
            for space in self._spaces.values():
                space.close()
            self._spaces.clear()
            self._shared, self._layers = None, []
        release(self._key)

    def shutdown(self) -> None:
        """Ends what is underway: loads are given up, saves are waited for."""
        with _lock:
            if _workers.get(self._engine) is self:
                del _workers[self._engine]
        self._close()
