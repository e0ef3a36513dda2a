"""Pinned chunks. A pin of LMCache is a hold of the store; the chunks of one lookup share a hold."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Deque, Dict, List, NamedTuple, Optional, Sequence

import kvtier

log = logging.getLogger("kvtier_lmcache")


class Held(NamedTuple):
    """A hold, and the chunks that it was asked to hold."""

    blocks: kvtier.Blocks
    names: List[bytes]
    hold: kvtier.Hold

    def without(self, name: bytes) -> Held:
        """Releases one chunk; the others stay held. Keeps the hold if that fails."""
        if name not in self.names:
            return self
        rest = [one for one in self.names if one != name]
        try:
            held = Held(self.blocks, rest, self.blocks.hold(rest))
        except kvtier.Error as error:
            log.warning("a chunk stays pinned with its lookup: %s", error)
            return self
        self.hold.close()
        return held


class _Batch:
    """The pins of one lookup."""

    __slots__ = ("began", "holds", "left", "lookup")

    def __init__(self, holds: Sequence[Held], count: int, lookup: Optional[str]) -> None:
        self.holds, self.left, self.lookup = holds, count, lookup
        self.began = time.monotonic()

    def end(self) -> None:
        """Releases the chunks."""
        self.left = 0
        for held in self.holds:
            held.hold.close()

    def release(self, name: bytes) -> None:
        """Ends a pin, and releases its chunk although the batch has other pins."""
        self.left -= 1
        self.holds = [held.without(name) for held in self.holds]


class Pins:
    """Counts pins by name. The chunks of a batch are released when all its pins have ended, or
    after `timeout_s`, because LMCache may forget a pin. Any thread may use it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._batches: Deque[_Batch] = deque()
        self._by_name: Dict[bytes, List[_Batch]] = {}

    def add(self, holds: Sequence[Held], names: Sequence[bytes],
            lookup: Optional[str] = None) -> None:
        """Adds one pin for each name. `lookup` names the lookup, for `end_lookup`."""
        batch = _Batch(holds, len(names), lookup)
        with self._lock:
            self._expire()
            self._batches.append(batch)
            for name in names:
                self._by_name.setdefault(name, []).append(batch)

    def _expire(self) -> None:
        """Ends pins that are too old."""
        oldest, expired = time.monotonic() - self._timeout_s, 0
        while self._batches and (not self._batches[0].left or self._batches[0].began < oldest):
            batch = self._batches.popleft()
            expired += batch.left
            batch.end()
        if expired:
            log.warning("%d pins of chunks ended after %.0f s (pin_timeout_sec) without an unpin",
                        expired, self._timeout_s)
            self._by_name = {name: live for name, batches in self._by_name.items()
                             if (live := [batch for batch in batches if batch.left])}

    def remove(self, name: bytes, every: bool = False) -> bool:
        """Ends one pin of a name, or every pin. Returns False if there is none. `every` also
        releases the name from holds of batches that have other pins."""
        with self._lock:
            batches = self._by_name.get(name, [])
            found = False
            while batches and (every or not found):
                batch = batches.pop()
                found = found or bool(batch.left)
                if batch.left == 1:
                    batch.end()
                elif batch.left and every:
                    batch.release(name)
                elif batch.left:
                    batch.left -= 1
            if not batches:
                self._by_name.pop(name, None)
            return found

    def end_lookup(self, lookup: str, names: Sequence[bytes]) -> None:
        """Ends the pins that a lookup has on some names."""
        with self._lock:
            for name in names:
                batches = self._by_name.get(name, [])
                for batch in [one for one in batches if one.lookup == lookup]:
                    batches.remove(batch)
                    batch.left -= 1
                    if batch.left <= 0:
                        batch.end()
                if not batches:
                    self._by_name.pop(name, None)

    def close(self) -> None:
        """Ends all pins."""
        with self._lock:
            while self._batches:
                self._batches.popleft().end()
            self._by_name.clear()
