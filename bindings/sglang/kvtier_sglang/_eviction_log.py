"""Logs the evictions of a store."""

from __future__ import annotations

import logging
import threading
from typing import Dict

import kvtier

logger = logging.getLogger("kvtier_sglang")

#: Most evictions of a tier that are read at once.
_MAX_ENTRIES = 4096


class EvictionLog:
    """Logs each eviction of a store once. Any thread may use it."""

    def __init__(self, store: kvtier.Store) -> None:
        self._store = store
        self._logged: Dict[int, int] = {}
        self._lock = threading.Lock()

    def log(self) -> None:
        """Logs the evictions since the last call."""
        with self._lock:
            for tier, name in ((kvtier.TIER_HOST, "host"), (kvtier.TIER_DISK, "disk")):
                try:
                    entries = self._store.evictions(tier, _MAX_ENTRIES)
                except kvtier.NotFoundError:  # no disk
                    continue
                seen = self._logged.get(tier, -1)
                for entry in entries:
                    if entry.number > seen:
                        logger.info("evicted from %s: %016x, %d blocks of 4 KiB, score %g, %s",
                                    name, entry.id, entry.units, entry.score, entry.policy)
                        self._logged[tier] = entry.number
