"""The connector's worker side: its store, and transfers between the store and the KV caches."""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from array import array
from collections import OrderedDict
from typing import Any, Dict, List, Optional, Set, Tuple

import kvtier
from kvtier._errors import Error
from kvtier.events import Follower

from . import caches, hints, identity
from .connector_events import DescribeBlocks, RankChange
from .connector_meta import (
    BlockTransfer,
    EndRequest,
    KvScope,
    KvtierMetadata,
    KvtierWorkerMetadata,
    Lookup,
)
from .settings import Settings, SharedStore, acquire, invalid, logger, release

#: Most namespaces (pairs of a LoRA and a salt) that stay open; others are reopened on use.
_MAX_NAMESPACES = 256

_lock = threading.Lock()
_workers: "weakref.WeakValueDictionary[str, Worker]" = weakref.WeakValueDictionary()


def local_worker(engine: str) -> "Optional[Worker]":
    """The engine's worker, if it is the only one and runs in this process."""
    with _lock:
        found = _workers.get(engine)
    return found if found is not None and found.process == os.getpid() else None


class _RemoteLookup:
    """A remote lookup of one request's tokens, in a session of its own."""

    def __init__(self, namespace: kvtier.Namespace, lookup: Lookup, seconds: float) -> None:
        self.tokens = len(lookup.tokens)
        self._session = namespace.session()
        try:
            self._session.append(lookup.tokens, lookup.scope.media)
            self.op = self._session.remote_lookup(timeout=seconds)
        except BaseException:
            self._session.close()
            raise

    def close(self) -> None:
        self.op.cancel()
        self.op.wait()
        self.op.close()
        self._session.close()


class Worker:
    """A worker with one store, and one session per request. A failed load reports its blocks,
    and the engine computes them."""

    def __init__(self, engine: str, settings: Settings, terms: Dict[str, Any], *, model: str,
                 shard: Tuple[int, int], block_tokens: int, layerwise: bool,
                 events: bool = False) -> None:
        self._has_events = events
        self._follower: Optional[Follower] = None
        #: The scopes and tokens of requests with sessions, for events.
        self._described_tokens: Dict[str, Tuple[KvScope, "array[int]"]] = {}
        self._engine, self._settings, self._terms = engine, settings, terms
        self._model, self._shard, self._block = model, shard, block_tokens
        self.layerwise, self.process = layerwise, os.getpid()
        # The scheduler's thread looks up, too, and opens namespaces.
        self._namespace_lock = threading.RLock()
        self._key = f"connector:{engine}:{settings.disk_path}:{shard[0]}"
        self._shared: Optional[SharedStore] = None
        self._has_remote = False
        self._layers: List[caches.Layer] = []
        self._index: Dict[str, int] = {}
        self._groups: List[kvtier.Group] = []
        self._namespaces: "OrderedDict[Tuple[bytes, bytes], kvtier.Namespace]" = OrderedDict()
        self._sessions: Dict[str, kvtier.Session] = {}
        self._media: Dict[str, Tuple[Tuple[int, bytes], ...]] = {}
        self._loading: Dict[str, Tuple[kvtier.Op, BlockTransfer]] = {}
        self._by_layer: List[Tuple[List[kvtier.Op], BlockTransfer]] = []
        self._saving: List[kvtier.Op] = []
        self._saved_layers: Set[int] = set()
        #: Lookups without a result yet, and results that the scheduler has not acknowledged.
        self._pending_lookups: Dict[str, Lookup] = {}
        self._lookup_results: Dict[str, Tuple[int, int]] = {}
        self._remote_lookups: Dict[str, _RemoteLookup] = {}
        self._loaded_step = 0
        self._failed_blocks: Set[int] = set()
        self._rejected_loads: Set[str] = set()
        self._epoch = 0
        self._applied: Optional[KvtierMetadata] = None
        self.counts: Dict[str, int] = {}

    @property
    def store(self) -> kvtier.Store:
        """The store, for `stats`, `set_policy`, `evictions` and `tenants`."""
        return self._open().store

    def set_policy(self, spec: str, tier: int = kvtier.TIER_HOST) -> None:
        """Switches a tier to another policy while transfers run."""
        self._open().set_policy(spec, tier)

    def capacity_blocks(self) -> int:
        """Number of blocks that fit into host memory; 0 without KV caches."""
        if self._shared is None:
            return 0
        return kvtier.Advisor.capacity_of(self._shared.store,
                                          sum(layer.block_bytes for layer in self._layers))

    def policy(self) -> str:
        """The eviction policy of host memory; "" without KV caches."""
        return "" if self._shared is None else self._shared.policy

    def _open(self) -> SharedStore:
        if self._shared is None:
            raise kvtier.ClosedError(
                "the connector has no store: register_kv_caches was not called, or the connector "
                "was shut down", kvtier.abi.KVT_E_CLOSED, "KVT_E_CLOSED")
        return self._shared

    def register(self, tensors: Dict[str, Any], names: List[str], blocks: int) -> None:
        """Registers the KV caches, and opens the store."""
        self._close()
        self._layers = caches.layers(tensors, names, blocks)
        self._index = {layer.name: at for at, layer in enumerate(self._layers)}
        sizes: Dict[int, List[int]] = {}
        for at, layer in enumerate(self._layers):
            if layer.block_bytes % self._block:
                raise invalid(f"a block of {layer.name} has {layer.block_bytes} bytes, which is "
                              f"not a multiple of its {self._block} tokens")
            sizes.setdefault(layer.block_bytes // self._block, []).append(at)
        self._groups = [kvtier.Group(layers=at, k_bytes=size) for size, at in sizes.items()]
        # Attention backends order the bytes of a block differently, with the same block size.
        orders = [[list(cache.shape[1:]), list(cache.stride()[1:]), cache.element_size()]
                  for cache in (tensors[name] for name in names)]
        self._terms = {**self._terms, "orders": orders}
        self._shared = acquire(self._key, self._settings, self._layers[0].ordinal)
        self._has_remote = bool(self._shared.store.remote_stats()["read_circuit"])
        if self._has_events:
            self._follower = Follower(self._shared.store, labelled=True)
        if self._shard[1] == 1:
            with _lock:
                _workers[self._engine] = self

    def _namespace(self, scope: KvScope) -> kvtier.Namespace:
        key = (scope.lora, scope.salt)
        if key not in self._namespaces:
            if len(self._namespaces) >= _MAX_NAMESPACES:
                self._namespaces.popitem(last=False)[1].close()
            kv_identity = identity.build(
                self._model, self._settings.weights, self._terms, lora=scope.lora or None,
                salt=scope.salt or None, shard=self._shard)
            self._namespaces[key] = self._open().store.namespace(
                kv_identity, chunk_tokens=self._block, groups=self._groups)
        self._namespaces.move_to_end(key)
        return self._namespaces[key]

    def lookup(self, lookup: Lookup) -> Optional[int]:
        """The number of leading tokens that can be loaded. It is None while the store's remote has
        not answered: the scheduler looks up again in the next step."""
        if self._shared is None or not lookup.tokens:
            return 0
        with self._namespace_lock:
            try:
                return self._lookup_store(lookup)
            except Error as error:  # a miss: an exception here would end the engine
                self._count("failed_lookups", 1)
                logger.warning("the lookup of request %s failed and counts as a miss: %s",
                               lookup.request, str(error))
                return 0

    def _lookup_store(self, lookup: Lookup) -> Optional[int]:
        namespace = self._namespace(lookup.scope)
        if not self._uses_remote:
            return namespace.lookup(lookup.tokens, lookup.scope.media).reusable_tokens
        pending = self._remote_lookups.get(lookup.request)
        if pending is None or pending.tokens != len(lookup.tokens):
            self._cancel_remote_lookup(lookup.request)
            try:
                pending = _RemoteLookup(namespace, lookup, self._settings.remote_lookup_s)
            except Error as error:
                logger.warning("the remote lookup of request %s could not start; only local tiers "
                               "count: %s", lookup.request, str(error))
                return namespace.lookup(lookup.tokens, lookup.scope.media).reusable_tokens
            self._remote_lookups[lookup.request] = pending
        info = pending.op.info()
        if not info.released:
            return None
        self._cancel_remote_lookup(lookup.request)
        # KV in local tiers counts even when the remote lookup failed.
        return info.value if not info.status else namespace.lookup(
            lookup.tokens, lookup.scope.media).reusable_tokens

    @property
    def _uses_remote(self) -> bool:
        return bool(self._settings.remote_lookup_s) and self._has_remote

    def _cancel_remote_lookup(self, request: str) -> None:
        with self._namespace_lock:
            pending = self._remote_lookups.pop(request, None)
        if pending is not None:
            pending.close()

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch: KV of earlier epochs is not found any more."""
        if epoch <= self._epoch:
            return
        self._epoch = epoch
        if self._follower is not None:
            self._follower.unlabel_all()
        self._described_tokens.clear()
        self._finish_saves()
        for op, _ in self._loading.values():
            op.wait()
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
        self._cancel_lookups()
        # Open namespaces are cleared. The new term changes every identity, so that KV in closed
        # namespaces, or KV that is held, is not found either.
        with self._namespace_lock:
            self._terms = {**self._terms, "reset": uuid.uuid4().hex}
            namespaces, self._namespaces = self._namespaces, OrderedDict()
            for namespace in namespaces.values():
                try:
                    namespace.clear()
                except Error as error:
                    logger.warning("reset_cache could not clear a namespace; its KV stays in the "
                                   "store and is not found: %s", str(error))
                namespace.close()

    def apply(self, meta: KvtierMetadata) -> None:
        """Applies the session changes of a step, once: the first call of the step does it."""
        if self._applied is meta:
            return
        self._applied, self._saved_layers = meta, set()
        self.begin_epoch(meta.epoch)
        for tier, spec in meta.policies:
            try:
                self.set_policy(spec, tier)
            except Error as error:
                logger.warning("set_policy(%r, %d) failed, the old policy stays: %s", spec, tier,
                               str(error))
        for opened in meta.opened:
            # A session that still has this id belongs to a request that was aborted.
            self._end(opened.request)
            try:
                with self._namespace_lock:
                    self._sessions[opened.request] = self._namespace(opened.scope).session(
                        tenant=opened.tenant, priority=opened.priority, ttl=opened.ttl_s)
            except Error as error:
                self._disable_store(opened.request, error)
                continue
            self._media[opened.request] = opened.scope.media
            if self._follower is not None:
                self._described_tokens[opened.request] = opened.scope, array("I")
        for appended in meta.appended:
            session = self._sessions.get(appended.request)
            if session is None:
                continue
            end = appended.first + len(appended.tokens)
            try:
                session.append(appended.tokens, [
                    (at - appended.first, digest) for at, digest in self._media[appended.request]
                    if appended.first <= at < end])
            except Error as error:  # later tokens would get the positions of these
                self._end(appended.request)
                self._disable_store(appended.request, error)
                continue
            if appended.request in self._described_tokens:
                self._described_tokens[appended.request][1].extend(appended.tokens)
        for described in meta.described:
            self._describe(described)

    def _describe(self, described: DescribeBlocks) -> None:
        """Names blocks of a request, so that their residency is reported."""
        if described.request not in self._described_tokens or self._follower is None:
            return
        scope, tokens = self._described_tokens[described.request]
        end = (described.first + len(described.labels)) * self._block
        try:
            with self._namespace_lock:
                keys = self._namespace(scope).chunk_keys(tokens[:end], scope.media)
        except Error as error:
            logger.warning("%d blocks of request %s have no KV events: %s", len(described.labels),
                           described.request, str(error))
            return
        self._follower.label(keys[described.first:], described.labels)

    def _changes(self) -> List[RankChange]:
        """What has changed in the store since the last step."""
        if self._follower is None:
            return []
        try:
            changes = self._follower.poll()
        except Error as error:
            logger.warning("KV events end, because the store's events cannot be read; blocks of "
                           "the store are reported as removed, and the engine goes on: %s",
                           str(error))
            changes, self._follower = self._follower.end(), None
        return [RankChange(self._shard[0], stored, medium, label)
                for stored, medium, _, label, _ in changes]

    def _disable_store(self, request: str, error: Error) -> None:
        """Counts a request that continues without the store: the engine computes its KV."""
        self._count("failed_sessions", 1)
        logger.warning("KV of request %s is neither loaded nor stored: %s", request, str(error))

    def _views(self, transfer: BlockTransfer) -> List[kvtier.View]:
        return [layer.view(transfer.blocks, self._block) for layer in self._layers]

    def start_loads(self, meta: KvtierMetadata) -> None:
        """Starts the step's loads, and answers its lookups."""
        self.apply(meta)
        after: Optional[kvtier.DeviceEvent] = None
        if self.layerwise and meta.loads:
            self._loaded_step = meta.step
        for transfer in meta.loads:
            session = self._sessions.get(transfer.request)
            try:
                if session is None:
                    raise invalid(f"request {transfer.request} has no session")
                after = after or caches.stream_event(self._open().device)
                if self.layerwise:
                    self._by_layer.append((session.get_each(
                        self._views(transfer), first_token=transfer.first, tokens=transfer.length,
                        after=after), transfer))
                else:
                    self._loading[transfer.request] = (session.get(
                        self._views(transfer), first_token=transfer.first, tokens=transfer.length,
                        after=after), transfer)
            except Error as error:
                self._fail_load(transfer, 0, error)
                if not self.layerwise:
                    self._count("refused_loads", 1)
                    self._rejected_loads.add(transfer.request)
        for name in meta.acknowledged:
            self._lookup_results.pop(name, None)
        self._pending_lookups.update((lookup.request, lookup) for lookup in meta.lookups)
        for name, lookup in list(self._pending_lookups.items()):
            usable = self.lookup(lookup)
            if usable is not None:
                self._lookup_results[name] = len(lookup.tokens), usable
                del self._pending_lookups[name]

    def _cancel_lookups(self) -> None:
        for name in list(self._remote_lookups):
            self._cancel_remote_lookup(name)
        self._pending_lookups.clear()
        self._lookup_results.clear()

    def _fail_load(self, transfer: BlockTransfer, tokens: int, error: Optional[Error]) -> None:
        """Reports the blocks after the first `tokens` as failed: the engine computes them."""
        blocks = transfer.blocks[tokens // self._block:]
        self._failed_blocks.update(blocks)
        self._count("lost_blocks", len(blocks))
        logger.warning("%d of %d blocks of request %s could not be loaded; the engine computes "
                       "them: %s", len(blocks), len(transfer.blocks), transfer.request, str(error))

    def _count(self, name: str, more: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + more

    def wait_for_layer_load(self, name: str) -> None:
        """Waits for the loads of a layer."""
        at = self._index.get(name)
        if at is not None:
            for ops, _ in self._by_layer:
                ops[at].wait()

    def _finish_layers(self) -> None:
        for ops, _ in self._by_layer:  # they stay listed in case the wait is interrupted
            for op in ops:
                op.wait()
        loads, self._by_layer = self._by_layer, []
        for ops, transfer in loads:
            loaded, error = transfer.length, None
            for op in ops:
                info = op.info()
                if info.status:
                    loaded, error = min(loaded, info.value), op.error()
                op.close()
            self._count("loaded_tokens", loaded)
            if error is not None:
                self._fail_load(transfer, loaded, error)

    def save_layer(self, name: str, meta: KvtierMetadata) -> None:
        """Starts to save a layer while the engine computes the next ones."""
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
        for transfer in meta.saves:
            session = self._sessions.get(transfer.request)
            if session is None:
                continue
            views = [layer.view(transfer.blocks, self._block) for layer in self._layers[first:end]]
            try:
                after = after or caches.stream_event(self._open().device)
                self._saving.append(session.put(
                    views, first_token=transfer.first, tokens=transfer.length, first_layer=first,
                    level=level, after=after))
            except Error as error:
                self._count("failed_saves", 1)
                logger.warning("%d tokens of request %s are not stored: %s", transfer.length,
                               transfer.request, str(error))

    def finish_step(self, meta: KvtierMetadata) -> None:
        """Saves the remaining layers, and waits until no transfer uses the caches."""
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
            self._count("saved_tokens", sum(transfer.length for transfer in meta.saves))
        self._finish_saves()
        for ended in meta.ended:
            self._pin(ended)
            self._end(ended.request, ended.stop, ended.next_use_s, ended.done)
        if self._shared is not None:
            self._shared.log_evictions()

    def _finish_saves(self) -> None:
        for op in self._saving:  # they stay listed in case the wait is interrupted
            op.wait()
        saving, self._saving = self._saving, []
        for op in saving:
            error = op.error()
            if error is not None:
                self._count("failed_saves", 1)
                logger.warning("a save failed; its KV is not stored: %s", str(error))
            op.close()

    def _pin(self, ended: EndRequest) -> None:
        """Pins the KV of a request that is to be kept. Pins have a share of the store only."""
        session = self._sessions.get(ended.request)
        if session is None or ended.keep_s is None:
            return
        try:
            session.pin(priority=ended.priority, timeout=ended.keep_s)
            self._count("pinned_requests", 1)
        except Error as error:
            self._count("rejected_pins", 1)
            logger.warning("the KV of request %s is not kept for %.0f s: %s", ended.request,
                           ended.keep_s, str(error))

    def _end(self, request: str, stop: int = kvtier.STOP_UNKNOWN,
             next_use_s: Optional[float] = None, done: bool = False) -> None:
        session = self._sessions.pop(request, None)
        self._media.pop(request, None)
        self._described_tokens.pop(request, None)
        self._cancel_remote_lookup(request)
        self._pending_lookups.pop(request, None)
        self._lookup_results.pop(request, None)
        if session is None:
            return
        try:
            if stop or done or next_use_s is not None:
                session.hint(stop=stop, next_use_ns=hints.clock_ns(next_use_s), done=done)
        except Error as error:
            logger.warning("the store rejected a hint about request %s: %s", request, str(error))
        session.close()

    def take_finished_loads(self) -> Set[str]:
        """Returns and forgets the requests whose loads have ended, with or without success."""
        ended, self._rejected_loads = self._rejected_loads, set()
        for name, (op, transfer) in list(self._loading.items()):
            info = op.info()
            if not info.released:
                continue
            del self._loading[name]
            ended.add(name)
            if info.status:
                self._fail_load(transfer, info.value, op.error())
            self._count("loaded_tokens", info.value)
            op.close()
        return ended

    def take_failed_blocks(self) -> Set[int]:
        """Returns and forgets the blocks whose load failed. It waits for layer-wise loads: the
        engine may call it before it waits for saves, and would use a failed block otherwise."""
        self._finish_layers()
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def metadata(self) -> Optional[KvtierWorkerMetadata]:
        """The message to the scheduler: lookup results, and the step whose loads have ended."""
        changes = self._changes()
        if not (self._lookup_results or self._pending_lookups or self._loaded_step or changes):
            return None
        step, self._loaded_step = self._loaded_step, 0
        return KvtierWorkerMetadata(self._epoch, dict(self._lookup_results), step,
                                    self.capacity_blocks(), self.policy(), changes)

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
        self._cancel_lookups()
        with self._namespace_lock:
            for namespace in self._namespaces.values():
                namespace.close()
            self._namespaces.clear()
            self._shared, self._layers, self._follower = None, [], None
        release(self._key)

    def shutdown(self) -> None:
        """Cancels loads, waits for saves, and closes the store."""
        with _lock:
            if _workers.get(self._engine) is self:
                del _workers[self._engine]
        self._close()
