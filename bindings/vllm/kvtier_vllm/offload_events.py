"""KV events of the tier and the offloading spec: which of their blocks the store has."""

from __future__ import annotations

from typing import Any, List, Optional

import kvtier
from kvtier._errors import Error
from kvtier.events import Follower
from vllm.v1.kv_offload.base import Medium, OffloadingEvent

from .settings import logger


class OffloadEvents:
    """Reports blocks as stored while host memory or the disk has all of them, and as removed when
    neither does any longer. It reports the blocks that this engine has stored or loaded."""

    def __init__(self, store: kvtier.Store, medium: Medium, locality: Any = None,
                 ownership: Optional[str] = None) -> None:
        self._medium, self._locality, self._ownership = medium, locality, ownership
        name = medium.name
        self._follower: Optional[Follower] = Follower(
            store, {kvtier.TIER_HOST: name, kvtier.TIER_DISK: name}, labelled=True)

    def found(self, blocks: kvtier.Blocks, names: List[bytes]) -> None:
        """Notes that the store has blocks, or will have: those that are resident are reported."""
        if self._follower is not None and names:
            keys = blocks.keys(names)
            self._follower.label([keys[at: at + 32] for at in range(0, len(keys), 32)], names)

    def reset(self) -> None:
        """Reports all blocks as removed. Those that are found again are reported again."""
        if self._follower is not None:
            self._follower.unlabel_all()

    def take(self) -> List[OffloadingEvent]:
        """The events since the last call."""
        events: List[OffloadingEvent] = []
        if self._follower is None:
            return events
        try:
            changes = self._follower.poll()
        except Error as error:
            logger.warning("KV events end, because the store's events cannot be read; blocks of "
                           "the store are reported as removed, and the engine goes on: %s",
                           str(error))
            changes, self._follower = self._follower.end(), None
        for change in changes:
            if not events or events[-1].removed == change.stored:
                events.append(OffloadingEvent(
                    keys=[], medium=self._medium, removed=not change.stored,
                    locality=self._locality, ownership=self._ownership, removal_expected=True))
            events[-1].keys.append(change.label)
        return events
