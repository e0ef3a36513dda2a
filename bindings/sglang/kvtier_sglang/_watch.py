"""What there is to know of a store while it runs: who left it, and how large batches should be."""

from __future__ import annotations

import hashlib
import logging
import threading
from typing import Any, Callable, Dict, List, Optional, Sequence

import kvtier

logger = logging.getLogger("kvtier_sglang")

#: Evictions that are read at a time.
_MOST = 4096


class Evictions:
    """Those of a store, each told the log once."""

    def __init__(self, store: kvtier.Store) -> None:
        self._store = store
        self._logged: Dict[int, int] = {}
        self._lock = threading.Lock()

    def log(self) -> None:
        """Logs those since the last time."""
        with self._lock:
            for tier, name in ((kvtier.TIER_HOST, "host"), (kvtier.TIER_DISK, "disk")):
                try:
                    entries = self._store.evictions(tier, _MOST)
                except kvtier.NotFoundError:  # no disk
                    continue
                seen = self._logged.get(tier, -1)
                for one in entries:
                    if one.number > seen:
                        logger.info("evicted from %s: %016x, %d blocks of 4 KiB, score %g, %s",
                                    name, one.id, one.units, one.score, one.policy)
                        self._logged[tier] = one.number


class Advisor:
    """A policy beside the store that sees the same lookups and writes, one object a page. There
    is none before advice is first asked for, so it costs whoever asks, and nobody else. What
    goes wrong in it ends advice, and nothing else. Any thread may use it."""

    def __init__(self, spec: str) -> None:
        self._spec, self._room = spec or "lru", 0
        self._policy: Optional[kvtier.Policy] = None
        self._failed = False
        self._lock = threading.Lock()

    def looked_up(self, keys: Sequence[bytes]) -> None:
        """Pages that were asked for, in their order."""
        if self._policy is not None and keys:
            self._guard(lambda policy: policy.lookup(_numbers(keys)))

    def stored(self, keys: Sequence[bytes]) -> None:
        """Pages that are in the store now; others leave for them."""
        if self._policy is not None and keys:
            self._guard(lambda policy: self._record(policy, keys))

    def _record(self, policy: kvtier.Policy, keys: Sequence[bytes]) -> None:
        policy.record(_numbers(keys))
        over = int(policy.stats()["units"]) - self._room
        if over > 0:
            policy.evict(over)

    def switch(self, spec: str) -> None:
        """The store goes on with another policy."""
        self._spec = spec
        if self._policy is not None:
            self._guard(lambda policy: policy.switch(spec))

    def advise(self, batch: int, room: int) -> Optional[kvtier.Advice]:
        """The batch to run, from the one that runs, for a store with room for so many pages."""
        with self._lock:
            if self._policy is None and not self._failed and room:
                self._room = room
                self._policy = kvtier.Policy(self._spec, holes=True, capacity_units=room)
        answer: Optional[kvtier.Advice] = self._guard(lambda policy: policy.advise(batch))
        return answer

    def _guard(self, call: Callable[[kvtier.Policy], Any]) -> Any:
        with self._lock:
            if self._policy is None:
                return None
            try:
                return call(self._policy)
            except kvtier.Error as error:
                self._failed = True
                self._policy.close()
                self._policy = None
                logger.warning("no advice from now on: %s", error)
                return None

    def close(self) -> None:
        """Closes the policy; there is no advice any more."""
        with self._lock:
            self._failed = True
            if self._policy is not None:
                self._policy.close()
                self._policy = None


def room_of(store: kvtier.Store, page_bytes: int) -> int:
    """How many pages the larger of its tiers has room for."""
    stats = store.stats()
    return max(stats["host_limit_bytes"], stats["disk_limit_bytes"]) // page_bytes


def _numbers(keys: Sequence[bytes]) -> List[int]:
    """Pages as policies know them."""
    return [int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") for key in keys]
