"""How many blocks the workers' stores have room for, and by what policy, which the scheduler's
side is told."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Dict, List, Optional

from ._lookup import Asker

#: How many blocks are followed until it is known how many fit.
AT_FIRST = 1 << 16


class Room:
    """Asks the workers once, without waiting for them. The engine's loop alone uses it."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker
        self._asked: "Optional[Future[List[Any]]]" = None
        #: The blocks that fit; 0 as long as nobody knows.
        self.blocks = 0
        #: What their memory goes by.
        self.policy = ""

    def learned(self) -> bool:
        """Whether it has come to be known just now."""
        if self.blocks:
            return False
        if self._asked is None:
            self._asked = self._asker.later({"ask": "describe"})
        if not self._asked.done():
            return False
        workers, self._asked = self._asked.result(), None
        self.blocks = _least(workers)
        if self.blocks:
            self.policy = str(workers[0]["policy"])
        return self.blocks > 0


def _least(workers: List[Optional[Dict[str, Any]]]) -> int:
    """The blocks that the worker with the least room has room for; 0 where one does not say."""
    rooms = [int(one["room_bytes"]) // int(one["block_bytes"]) for one in workers
             if one and one.get("block_bytes")]
    return min(rooms) if rooms and len(rooms) == len(workers) else 0
