"""What the store's remote is asked for, between the steps of the engine."""

from __future__ import annotations

from typing import Dict, List, Optional, Set

import kvtier
from kvtier._errors import Error

from .settings import logger

#: Names of one question.
_MOST = 1024


class _Question:
    """Blocks that a remote is asked for, and for which requests."""

    def __init__(self, blocks: kvtier.Blocks) -> None:
        self.blocks = blocks
        self.op: Optional[kvtier.Op] = None
        self.keys: List[bytes] = []
        self.askers: Set[str] = set()

    def is_over(self) -> bool:
        return self.op is not None and self.op.info().released


class Asks:
    """Lookups come one by one, and must not wait. So what is not here is gathered in a step, asked
    for at its end with one call, and looked up again in the next ones. A request is told once of
    a block that it is nowhere: what others store meanwhile is the next request's."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._fresh: List[_Question] = []
        self._sent: List[_Question] = []
        self._waiting: Dict[bytes, _Question] = {}
        self._told: Dict[str, Set[bytes]] = {}

    def begin(self, request: str) -> None:
        """It looks up from now on."""
        self._told.setdefault(request, set())

    def end(self, request: str) -> None:
        """It is forgotten."""
        self._told.pop(request, None)

    def find(self, blocks: kvtier.Blocks, key: bytes, request: str) -> Optional[int]:
        """What `exists` says of a block; None while the remote has not answered."""
        found, told = blocks.exists([key])[0], self._told.get(request)
        if found or not self._seconds or told is None or key in told or not blocks.has_remote:
            return found
        question = self._waiting.get(key)
        if question is None:
            question = self._waiting[key] = self._room(blocks)
            question.keys.append(key)
        question.askers.add(request)
        if not question.is_over():
            return None
        self._answered(question)
        return blocks.exists([key])[0]

    def _room(self, blocks: kvtier.Blocks) -> _Question:
        for question in self._fresh:
            if question.blocks is blocks and len(question.keys) < _MOST:
                return question
        self._fresh.append(_Question(blocks))
        return self._fresh[-1]

    def _answered(self, question: _Question) -> None:
        if question.op is not None:
            question.op.close()
            self._sent.remove(question)
        for key in question.keys:
            del self._waiting[key]
        for request in question.askers & self._told.keys():
            self._told[request].update(question.keys)

    def send(self) -> None:
        """Asks, at the end of a step; forgets answers that nobody has come for."""
        for question in [one for one in self._sent if one.is_over()]:
            if not question.askers & self._told.keys():
                self._answered(question)
        fresh, self._fresh = self._fresh, []
        for question in fresh:
            try:
                question.op = question.blocks.locate(question.keys, timeout=self._seconds)
                self._sent.append(question)
            except Error as error:
                # As if it had said that it has none of them.
                logger.warning("a question for %d blocks was refused: %s", len(question.keys),
                               str(error))
                self._answered(question)

    @property
    def is_open(self) -> bool:
        """Whether something is asked for, or is to be."""
        return bool(self._fresh or self._sent)

    def forget(self) -> None:
        """Nothing of what was asked for counts, or is waited for, any more."""
        while self._sent:
            op = self._sent[-1].op
            assert op is not None
            op.cancel()
            op.wait()
            self._sent.pop()
            op.close()
        self._fresh = []
        self._waiting.clear()
