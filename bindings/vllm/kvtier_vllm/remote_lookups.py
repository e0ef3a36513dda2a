"""Remote lookups of blocks, collected during an engine step and sent at its end."""

from __future__ import annotations

from typing import Dict, List, Optional, Set

import kvtier
from kvtier._errors import Error

from .settings import logger

#: Most keys of one remote lookup.
_MAX_KEYS = 1024


class _Batch:
    """The keys of one remote lookup, and the requests that wait for its answer."""

    def __init__(self, blocks: kvtier.Blocks) -> None:
        self.blocks = blocks
        self.op: Optional[kvtier.Op] = None
        self.keys: List[bytes] = []
        self.requests: Set[str] = set()

    def is_done(self) -> bool:
        return self.op is not None and self.op.info().released


class RemoteLookups:
    """Batches the engine's lookups, which come one by one and must not block.

    Keys that local tiers lack are collected during a step. One call at its end sends them to the
    remote, and the engine looks them up again in later steps. A request gets one remote answer
    per key: a block that others store later is found by later requests only.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._unsent: List[_Batch] = []
        self._sent: List[_Batch] = []
        self._batch_of: Dict[bytes, _Batch] = {}
        self._answered_keys: Dict[str, Set[bytes]] = {}

    def begin(self, request: str) -> None:
        """Begins to track the lookups of a request."""
        self._answered_keys.setdefault(request, set())

    def end(self, request: str) -> None:
        """Forgets a request."""
        self._answered_keys.pop(request, None)

    def find(self, blocks: kvtier.Blocks, key: bytes, request: str) -> Optional[int]:
        """The result of `exists` for a block; None while the remote has not answered."""
        found, answered = blocks.exists([key])[0], self._answered_keys.get(request)
        if found or not self._seconds or not blocks.has_remote:
            return found
        if answered is None or key in answered:
            return found
        batch = self._batch_of.get(key)
        if batch is None:
            batch = self._batch_of[key] = self._open_batch(blocks)
            batch.keys.append(key)
        batch.requests.add(request)
        if not batch.is_done():
            return None
        self._finish(batch)
        return blocks.exists([key])[0]

    def _open_batch(self, blocks: kvtier.Blocks) -> _Batch:
        for batch in self._unsent:
            if batch.blocks is blocks and len(batch.keys) < _MAX_KEYS:
                return batch
        self._unsent.append(_Batch(blocks))
        return self._unsent[-1]

    def _finish(self, batch: _Batch) -> None:
        if batch.op is not None:
            batch.op.close()
            self._sent.remove(batch)
        for key in batch.keys:
            del self._batch_of[key]
        for request in batch.requests & self._answered_keys.keys():
            self._answered_keys[request].update(batch.keys)

    def send(self) -> None:
        """Sends the lookups of a step, and drops answers whose requests have all ended."""
        for batch in [sent for sent in self._sent if sent.is_done()]:
            if not batch.requests & self._answered_keys.keys():
                self._finish(batch)
        unsent, self._unsent = self._unsent, []
        for batch in unsent:
            try:
                batch.op = batch.blocks.remote_lookup(batch.keys, timeout=self._seconds)
                self._sent.append(batch)
            except Error as error:
                # Counts as the answer that the remote has none of them.
                logger.warning("a remote lookup of %d blocks failed and counts as a miss: %s",
                               len(batch.keys), str(error))
                self._finish(batch)

    @property
    def is_pending(self) -> bool:
        """Whether a lookup is collected or underway."""
        return bool(self._unsent or self._sent)

    def cancel(self) -> None:
        """Cancels all lookups, and waits until they have ended."""
        while self._sent:
            op = self._sent[-1].op
            assert op is not None
            op.cancel()
            op.wait()
            self._sent.pop()
            op.close()
        self._unsent = []
        self._batch_of.clear()
