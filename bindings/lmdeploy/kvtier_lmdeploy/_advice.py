"""What a scheduler is advised: a policy of kvtier's beside the store that sees the same lookups
and saves, one object a block, and judges by them how large a batch should be."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any, Callable, Dict, List, Optional, Sequence

import kvtier

from ._lookup import Asker
from ._names import numbers
from ._settings import Settings

log = logging.getLogger("kvtier.lmdeploy")

#: How many blocks are followed until it is known how many fit.
AT_FIRST = 1 << 16


class Advisor:
    """The policy, and how many blocks fit. The engine's loop alone uses it. What goes wrong in it
    ends advice, and nothing else."""

    def __init__(self, settings: Settings, asker: Asker) -> None:
        self._policy = kvtier.Policy(settings.policy or "lru", holes=True)
        self._asker, self._capacity = asker, AT_FIRST
        self._asked: "Optional[Future[List[Any]]]" = None
        self._known = self._failed = False

    def looked_up(self, names: Sequence[bytes]) -> None:
        """A lookup of a request's blocks, in their order."""
        self._guard(lambda: self._policy.lookup(numbers(names)))

    def saved(self, names: Sequence[bytes]) -> None:
        """Blocks that are in the store now; others leave for them."""
        self._learn()
        self._guard(lambda: self._record(names))

    def _record(self, names: Sequence[bytes]) -> None:
        self._policy.record(numbers(names))
        over = int(self._policy.stats()["units"]) - self._capacity
        if over > 0:
            self._policy.evict(over)

    def switch(self, spec: str) -> None:
        """The store goes on with another policy."""
        self._guard(lambda: self._policy.switch(spec))

    def advise(self, batch: int) -> Optional[kvtier.Advice]:
        """The batch to run, from the one that runs; None where nothing is known yet."""
        self._learn()
        if self._failed or not self._known:
            return None
        return self._policy.advise(batch)

    def _learn(self) -> None:
        """Asks the workers once how much they hold, without waiting for them."""
        if self._known:
            return
        if self._asked is None:
            self._asked = self._asker.later({"ask": "describe"})
        if not self._asked.done():
            return
        room, self._asked = _capacity(self._asked.result()), None
        if room:
            self._capacity, self._known = room, True
            self._guard(lambda: self._policy.set_capacity(room))

    def _guard(self, call: Callable[[], Any]) -> None:
        if self._failed:
            return
        try:
            call()
        except kvtier.Error as error:
            self._failed = True
            log.warning("no advice from now on: %s", error)

    def close(self) -> None:
        """Closes the policy."""
        self._policy.close()


def _capacity(workers: List[Optional[Dict[str, Any]]]) -> int:
    """The blocks that the worker with the least room has room for; 0 where one does not say."""
    rooms = [int(one["room_bytes"]) // int(one["block_bytes"]) for one in workers
             if one and one.get("block_bytes")]
    return min(rooms) if rooms and len(rooms) == len(workers) else 0
