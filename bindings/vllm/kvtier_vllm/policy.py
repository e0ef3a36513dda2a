"""A cache policy for vLLM's CPU tier, in which any kvtier policy chooses the victims:

    "eviction_policy": "kvtier:s3fifo", "cache_policy_module_path": "kvtier_vllm.policy"

The text after the colon is a policy's spec, such as `horizon`, `arc` or `qos(inner=lru)`.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Dict, List, Optional, Tuple

import kvtier

from . import _engine, hints
from ._versions import StoreContexts

_engine.require("policy")

from vllm.v1.kv_offload.cpu.policies.base import (  # noqa: E402
    CachePolicy,
    ChunkStatus,
    order_request_keys,
)

_PREFIX = "kvtier:"
_BITS = (1 << 64) - 1
_lock = threading.Lock()
_live: "weakref.WeakSet[KvtierPolicy]" = weakref.WeakSet()


class _Entry:
    """A chunk in the cache.

    `is_pinned` is vLLM's state, and `is_acquired` the state that the policy was notified of.
    `is_inserted` is true once the policy was notified of the chunk.
    """

    __slots__ = ("id", "key", "chunk", "is_pinned", "is_acquired", "is_inserted")

    def __init__(self, number: int, key: bytes, chunk: ChunkStatus) -> None:
        self.id, self.key, self.chunk = number, key, chunk
        self.is_pinned, self.is_acquired, self.is_inserted = chunk.ref_cnt != 0, False, False


class KvtierPolicy(CachePolicy):
    """A kvtier policy over the chunks of vLLM's CPU tier. vLLM notifies it of one chunk at a
    time. The notifications are batched, one call per kind, before the policy decides."""

    spec: ClassVar[str] = "horizon"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._policy = self._open_policy(self.spec)
        self._entries: Dict[bytes, _Entry] = {}
        self._by_id: Dict[int, _Entry] = {}
        self._evictable = 0
        self._pending_inserts: List[Tuple[_Entry, Any]] = []
        self._pin_changes: Dict[int, _Entry] = {}
        self._chunk_tokens = 0
        self._contexts = StoreContexts(CachePolicy)
        with _lock:
            _live.add(self)

    def _open_policy(self, spec: str) -> kvtier.Policy:
        capacity = max(1, self.cache_capacity)
        # Chunks may be evicted in any order: the engine computes holes.
        policy = kvtier.Policy(spec, holes=True, max_objects=capacity, capacity_units=capacity,
                               log_entries=1024, remember=max(4 * capacity, 1024))
        self._only_recency = policy.stats()["name"] == "lru"
        return policy

    def switch(self, spec: str) -> None:
        """Switches to another policy, which takes over the state that it can use."""
        self._flush()
        self._policy.switch(spec)
        self._only_recency = self._policy.stats()["name"] == "lru"

    @property
    def policy(self) -> kvtier.Policy:
        """The policy, for its `stats`, `log`, `gauges` and `advise`."""
        self._flush()
        return self._policy

    def get(self, key: Any) -> Optional[ChunkStatus]:
        entry = self._entries.get(key)
        return None if entry is None else entry.chunk

    def insert(self, key: Any, chunk: ChunkStatus, req_context: Any = None) -> None:
        number = _chunk_id(key)
        while number in self._by_id:
            number = (number + 1) & _BITS
        entry = _Entry(number, key, chunk)
        self._entries[key] = self._by_id[number] = entry
        self._evictable += not entry.is_pinned
        self._pending_inserts.append((entry, self._contexts.of_insert(key, req_context)))

    def remove(self, key: Any) -> None:
        entry = self._entries[key]
        self._forget(entry)
        if not entry.is_inserted:
            return
        if entry.is_acquired:
            self._policy.release([entry.id])
        self._policy.remove([entry.id])

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.key], self._by_id[entry.id]
        self._pin_changes.pop(entry.id, None)
        self._evictable -= not entry.is_pinned

    def touch(self, keys: Iterable[Any], req_context: Any) -> None:
        self._flush()
        ids = [entry.id for entry in map(self._entries.get, keys) if entry is not None]
        if ids:
            self._policy.touch(ids, self._context(req_context, 0))

    def on_store_miss(self, keys: Iterable[Any], req_context: Any) -> None:
        self._flush()
        keys = list(keys)
        self._contexts.missed(keys, req_context)
        ids = [number for number in map(_chunk_id, keys) if number not in self._by_id]
        if ids:
            self._policy.lookup(ids, self._context(req_context, len(ids)))

    def on_request_finished(self, key_groups: Sequence[Sequence[Any]], insertion_only_keys: Any,
                            reused_keys: Any, req_context: Any) -> None:
        self._flush()
        ordered = order_request_keys(key_groups, req_context)
        self._contexts.finished(ordered, req_context)
        keys = [key for key in ordered if key in self._entries]
        given = hints.of_request(req_context)
        # A store is no use of a chunk. It counts as one only for lru, which has no use counts.
        used = keys if self._only_recency else [key for key in keys if key in reused_keys]
        context = self._context(req_context, len(keys))
        if used:
            self._policy.lookup([self._entries[key].id for key in used], context)
        if keys and given.has_future:
            self._policy.hint([self._entries[key].id for key in keys], context, stop=given.stop,
                              next_use_ns=hints.clock_ns(given.next_use_s), done=given.done)

    def evict(self, n: int, protected: Any) -> Optional[List[Tuple[Any, ChunkStatus]]]:
        if n == 0:
            return []
        self._flush()
        protected_ids = [entry.id for entry in map(self._entries.get, protected)
                         if entry is not None and not entry.is_pinned]
        if self._evictable - len(protected_ids) < n:
            return None
        if protected_ids:
            self._policy.acquire(protected_ids)
        try:
            if self._policy.preview(n, n).freed_units < n:
                return None
            victims = self._policy.evict(n, n).victims
        finally:
            if protected_ids:
                self._policy.release(protected_ids)
        evicted = [self._by_id[victim.id] for victim in victims]
        for entry in evicted:
            self._forget(entry)
        return [(entry.key, entry.chunk) for entry in evicted]

    def clear(self) -> None:
        spec = self._policy.spec
        self._policy.close()
        self._policy = self._open_policy(spec)
        self._entries.clear()
        self._by_id.clear()
        self._pending_inserts.clear()
        self._pin_changes.clear()
        self._evictable = 0

    def mark_evictable(self, key: Any) -> None:
        self._mark(key, False)

    def mark_non_evictable(self, key: Any) -> None:
        self._mark(key, True)

    def _mark(self, key: Any, is_pinned: bool) -> None:
        entry = self._entries[key]
        if entry.is_pinned != is_pinned:
            entry.is_pinned = is_pinned
            self._evictable += -1 if is_pinned else 1
            self._pin_changes[entry.id] = entry

    def _flush(self) -> None:
        inserts, self._pending_inserts = self._pending_inserts, []
        batch: List[Tuple[_Entry, Any]] = []
        for item in inserts:
            if batch and item[1] is not batch[-1][1]:
                self._insert(batch)
                batch = []
            batch.append(item)
        if batch:
            self._insert(batch)
        if not self._pin_changes:
            return
        changes, self._pin_changes = list(self._pin_changes.values()), {}
        for is_pinned, call in ((True, self._policy.acquire), (False, self._policy.release)):
            changed = [entry for entry in changes
                       if entry.is_pinned == is_pinned != entry.is_acquired]
            if changed:
                call([entry.id for entry in changed])
            for entry in changed:
                entry.is_acquired = is_pinned

    def _insert(self, batch: List[Tuple[_Entry, Any]]) -> None:
        context = batch[0][1]
        entries = [entry for entry, _ in batch if self._by_id.get(entry.id) is entry]
        if not entries:
            return
        ends = [context.get_offload_key_position(entry.key) for entry in entries]
        if all(end is not None for end in ends):
            # A batch lists the youngest chunk first. The first chunk of a path is the youngest,
            # so that the path is evicted from its end.
            order = sorted(range(len(entries)), key=ends.__getitem__)
        else:
            order = list(range(len(entries) - 1, -1, -1))
        shortest = min((end for end in ends if end), default=0)
        if shortest and (not self._chunk_tokens or shortest < self._chunk_tokens):
            self._chunk_tokens = shortest
        tokens = self._chunk_tokens
        rows = [kvtier.PolicyObject(entries[at].id, tokens=tokens,
                                    context=max(0, (ends[at] or 0) - tokens))
                for at in order]
        self._policy.insert(rows, self._context(context, len(rows)))
        for entry in entries:
            entry.is_inserted = True
            if entry.is_pinned:
                self._pin_changes[entry.id] = entry

    def _context(self, req_context: Any, chunks: int) -> kvtier.PolicyContext:
        given = hints.of_request(req_context)
        return kvtier.PolicyContext(
            session=hints.hash64(given.session or req_context.req_id), tenant=given.tenant,
            priority=given.priority, length=chunks * self._chunk_tokens,
            tokens_each=self._chunk_tokens)


def _chunk_id(key: bytes) -> int:
    """The chunk's id for the policy: the same after an eviction, for policies with ghosts."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def live() -> List[KvtierPolicy]:
    """The policies of this process."""
    with _lock:
        return list(_live)


def switch(spec: str) -> int:
    """Switches all policies of this process to another policy, and returns their number."""
    policies = live()
    for policy in policies:
        policy.switch(spec)
    return len(policies)


def __getattr__(name: str) -> Any:
    # vLLM passes a policy only its capacity, so the name of the class carries the spec.
    if name.startswith(_PREFIX):
        return type("KvtierPolicy", (KvtierPolicy,), {"spec": name[len(_PREFIX):]})
    raise AttributeError(name)
