"""Capacity and policy of the workers' stores, as the scheduler's side needs them for advice."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Dict, List, Optional

from ._lookup import LookupClient

#: Blocks that the advisor tracks until the capacity is known.
INITIAL_BLOCKS = 1 << 16


class StoreCapacity:
    """Queries the workers' capacity in the background. Only the engine's loop uses it."""

    def __init__(self, lookups: LookupClient) -> None:
        self._lookups = lookups
        self._query: "Optional[Future[List[Any]]]" = None
        #: Blocks that every worker's store can hold; 0: not known yet.
        self.blocks = 0
        #: Eviction policy of the stores' host tier.
        self.policy = ""

    def update(self) -> bool:
        """Polls the query. Returns True once: when the capacity becomes known."""
        if self.blocks:
            return False
        if self._query is None:
            self._query = self._lookups.query_all_async({"query": "describe"})
        if not self._query.done():
            return False
        workers, self._query = self._query.result(), None
        self.blocks = _smallest(workers)
        if self.blocks:
            self.policy = str(workers[0]["policy"])
        return self.blocks > 0


def _smallest(workers: List[Optional[Dict[str, Any]]]) -> int:
    """Returns the smallest capacity in blocks; 0 if a worker did not answer."""
    capacities = [int(one["room_bytes"]) // int(one["block_bytes"]) for one in workers
                  if one and one.get("block_bytes")]
    return min(capacities) if capacities and len(capacities) == len(workers) else 0
