"""What a scheduler is advised: a policy beside a store that sees the same lookups and stores, one
object a block, and judges by them how large a batch should be."""

from __future__ import annotations

from typing import Any, Callable, List, Optional

import kvtier

from .settings import logger


class Advisor:
    """There is no policy before advice is first asked for, so it costs whoever asks, and nobody
    else. What goes wrong in it ends advice, and nothing else."""

    def __init__(self, spec: str) -> None:
        self._spec, self._room = spec or "lru", 0
        self._policy: Optional[kvtier.Policy] = None
        self._ended = False

    @property
    def learns(self) -> bool:
        """Whether it wants to be told."""
        return self._policy is not None

    def looked_up(self, blocks: List[int]) -> None:
        """Blocks that were asked for, in their order."""
        if blocks:
            self._guard(lambda policy: policy.lookup(blocks))

    def stored(self, blocks: List[int]) -> None:
        """Blocks that are stored; others leave for them."""
        if blocks:
            self._guard(lambda policy: self._record(policy, blocks))

    def _record(self, policy: kvtier.Policy, blocks: List[int]) -> None:
        policy.record(blocks)
        over = int(policy.stats()["units"]) - self._room
        if over > 0:
            policy.evict(over)

    def switch(self, spec: str) -> None:
        """The store goes on with another policy."""
        self._spec = spec
        self._guard(lambda policy: policy.switch(spec))

    def advise(self, batch: int, room: int) -> Optional[kvtier.Advice]:
        """The batch to run, from the one that runs, for a store with room for so many blocks."""
        if self._policy is None and not self._ended and room:
            self._room = room
            self._policy = kvtier.Policy(self._spec, holes=True, capacity_units=room)
        answer: Optional[kvtier.Advice] = self._guard(lambda policy: policy.advise(batch))
        return answer

    def _guard(self, call: Callable[[kvtier.Policy], Any]) -> Any:
        if self._policy is None:
            return None
        try:
            return call(self._policy)
        except kvtier.Error as error:
            self.close()
            logger.warning("no advice from now on: %s", str(error))
            return None

    def close(self) -> None:
        """There is no advice any more."""
        self._ended = True
        if self._policy is not None:
            self._policy.close()
            self._policy = None


def room_of(store: kvtier.Store, block_bytes: int) -> int:
    """How many blocks the larger of its tiers has room for."""
    stats = store.stats()
    return max(stats["host_limit_bytes"], stats["disk_limit_bytes"]) // block_bytes
