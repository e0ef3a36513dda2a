"""Any kvtier policy chooses what leaves vLLM's CPU tier:

    "eviction_policy": "kvtier:s3fifo", "cache_policy_module_path": "kvtier_vllm.policy"

After the colon comes a spec string, such as `horizon`, `arc` or `qos(inner=lru)`.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Dict, List, Optional, Tuple

import kvtier

from . import _engine, hints

_engine.require()

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
    """A chunk that is in the cache. `pinned` is what vLLM says, `held` what the policy knows."""

    __slots__ = ("id", "key", "chunk", "pinned", "held", "known")

    def __init__(self, number: int, key: bytes, chunk: ChunkStatus) -> None:
        self.id, self.key, self.chunk = number, key, chunk
        self.pinned, self.held, self.known = chunk.ref_cnt != 0, False, False


class KvtierPolicy(CachePolicy):
    """A kvtier policy over the chunks of vLLM's CPU tier. What vLLM tells it a chunk at a time
    is gathered, and handed over in one call of each kind before the policy decides."""

    spec: ClassVar[str] = "horizon"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._policy = self._make(self.spec)
        self._entries: Dict[bytes, _Entry] = {}
        self._by_id: Dict[int, _Entry] = {}
        self._free = 0
        self._new: List[Tuple[_Entry, Any]] = []
        self._moved: Dict[int, _Entry] = {}
        self._chunk_tokens = 0
        with _lock:
            _live.add(self)

    def _make(self, spec: str) -> kvtier.Policy:
        most = max(1, self.cache_capacity)
        # Chunks may leave in any order: what is missing is computed.
        policy = kvtier.Policy(spec, holes=True, max_objects=most, capacity_units=most,
                               log_entries=1024, remember=max(4 * most, 1024))
        self._only_recency = policy.stats()["name"] == "lru"
        return policy

    def switch(self, spec: str) -> None:
        """Goes on with another policy; what carries over does."""
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

    def insert(self, key: Any, chunk: ChunkStatus, req_context: Any) -> None:
        number = _number(key)
        while number in self._by_id:
            number = (number + 1) & _BITS
        entry = _Entry(number, key, chunk)
        self._entries[key] = self._by_id[number] = entry
        self._free += not entry.pinned
        self._new.append((entry, req_context))

    def remove(self, key: Any) -> None:
        entry = self._entries[key]
        self._forget(entry)
        if not entry.known:
            return
        if entry.held:
            self._policy.release([entry.id])
        self._policy.remove([entry.id])

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.key], self._by_id[entry.id]
        self._moved.pop(entry.id, None)
        self._free -= not entry.pinned

    def touch(self, keys: Iterable[Any], req_context: Any) -> None:
        self._flush()
        ids = [entry.id for entry in map(self._entries.get, keys) if entry is not None]
        if ids:
            self._policy.touch(ids, self._who(req_context, 0))

    def on_store_miss(self, keys: Iterable[Any], req_context: Any) -> None:
        self._flush()
        ids = [number for number in map(_number, keys) if number not in self._by_id]
        if ids:
            self._policy.lookup(ids, self._who(req_context, len(ids)))

    def on_request_finished(self, key_groups: Sequence[Sequence[Any]], insertion_only_keys: Any,
                            reused_keys: Any, req_context: Any) -> None:
        self._flush()
        keys = [key for key in order_request_keys(key_groups, req_context)
                if key in self._entries]
        told = hints.of(req_context)
        # A store is no use: it counts as one only where nothing but the order is counted.
        used = keys if self._only_recency else [key for key in keys if key in reused_keys]
        who = self._who(req_context, len(keys))
        if used:
            self._policy.lookup([self._entries[key].id for key in used], who)
        if keys and told.has_future:
            self._policy.hint([self._entries[key].id for key in keys], who, stop=told.stop,
                              next_use_ns=hints.moment(told.next_use_s), done=told.done)

    def evict(self, n: int, protected: Any) -> Optional[List[Tuple[Any, ChunkStatus]]]:
        if n == 0:
            return []
        self._flush()
        spared = [entry.id for entry in map(self._entries.get, protected)
                  if entry is not None and not entry.pinned]
        if self._free - len(spared) < n:
            return None
        if spared:
            self._policy.acquire(spared)
        try:
            if self._policy.preview(n, n).freed_units < n:
                return None
            left = self._policy.evict(n, n).victims
        finally:
            if spared:
                self._policy.release(spared)
        gone = [self._by_id[victim.id] for victim in left]
        for entry in gone:
            self._forget(entry)
        return [(entry.key, entry.chunk) for entry in gone]

    def clear(self) -> None:
        spec = self._policy.spec
        self._policy.close()
        self._policy = self._make(spec)
        self._entries.clear()
        self._by_id.clear()
        self._new.clear()
        self._moved.clear()
        self._free = 0

    def mark_evictable(self, key: Any) -> None:
        self._mark(key, False)

    def mark_non_evictable(self, key: Any) -> None:
        self._mark(key, True)

    def _mark(self, key: Any, pinned: bool) -> None:
        entry = self._entries[key]
        if entry.pinned != pinned:
            entry.pinned = pinned
            self._free += -1 if pinned else 1
            self._moved[entry.id] = entry

    def _flush(self) -> None:
        new, self._new = self._new, []
        batch: List[Tuple[_Entry, Any]] = []
        for one in new:
            if batch and one[1] is not batch[-1][1]:
                self._insert(batch)
                batch = []
            batch.append(one)
        if batch:
            self._insert(batch)
        if not self._moved:
            return
        moved, self._moved = list(self._moved.values()), {}
        for pinned, call in ((True, self._policy.acquire), (False, self._policy.release)):
            some = [entry for entry in moved if entry.pinned == pinned != entry.held]
            if some:
                call([entry.id for entry in some])
            for entry in some:
                entry.held = pinned

    def _insert(self, batch: List[Tuple[_Entry, Any]]) -> None:
        context = batch[0][1]
        alive = [entry for entry, _ in batch if self._by_id.get(entry.id) is entry]
        if not alive:
            return
        ends = [context.get_offload_key_position(entry.key) for entry in alive]
        if all(end is not None for end in ends):
            # The first of a path is the youngest: paths leave from their end.
            order = sorted(range(len(alive)), key=ends.__getitem__)
        else:
            order = list(range(len(alive) - 1, -1, -1))
        least = min((end for end in ends if end), default=0)
        if least and (not self._chunk_tokens or least < self._chunk_tokens):
            self._chunk_tokens = least
        tokens = self._chunk_tokens
        rows = [kvtier.Row(alive[at].id, tokens=tokens, context=max(0, (ends[at] or 0) - tokens))
                for at in order]
        self._policy.insert(rows, self._who(context, len(rows)))
        for entry in alive:
            entry.known = True
            if entry.pinned:
                self._moved[entry.id] = entry

    def _who(self, req_context: Any, chunks: int) -> kvtier.PolicyContext:
        told = hints.of(req_context)
        return kvtier.PolicyContext(session=hints.number(told.session or req_context.req_id),
                          tenant=told.tenant, priority=told.priority,
                          length=chunks * self._chunk_tokens, tokens_each=self._chunk_tokens)


def _number(key: bytes) -> int:
    """What a chunk is called, also after it has left: policies remember whom they evicted."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def live() -> List[KvtierPolicy]:
    """The policies of this process."""
    with _lock:
        return list(_live)


def switch(spec: str) -> int:
    """Has all of them go on with another policy; how many."""
    found = live()
    for one in found:
        one.switch(spec)
    return len(found)


def __getattr__(name: str) -> Any:
    # vLLM passes a policy nothing but its capacity, so the class's name says the spec.
    if name.startswith(_PREFIX):
        return type("KvtierPolicy", (KvtierPolicy,), {"spec": name[len(_PREFIX):]})
    raise AttributeError(name)
