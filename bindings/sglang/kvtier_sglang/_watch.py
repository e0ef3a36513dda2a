"""What there is to know of a store while it runs: who left it."""

from __future__ import annotations

import logging
import threading
from typing import Dict

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
