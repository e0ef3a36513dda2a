"""How many requests an engine should run, by what it asks a store for."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Sequence, Union

from ._errors import Error
from ._policy import Advice, Policy

if TYPE_CHECKING:
    from ._store import Store


#: What a store goes by that is told nothing.
_DEFAULT = "horizon"
_LABEL = re.compile(r'^kvtier_policy_objects\{tier="host",policy="([^"]*)"', re.MULTILINE)


class Advisor:
    """A policy beside a store that is told the same lookups and stores, one object a block, and
    judges by them how large a batch should be. Blocks are names, or 64-bit numbers that stand
    for them.

    There is no policy before advice is first asked for, so it costs whoever asks, and nobody
    else; with `room` (so many blocks fit) it learns from the start on. What goes wrong in it
    ends advice, with a line of the log, and nothing else. Any thread may use it. Without
    `policy` it goes by the one that a store has which is told nothing.

    >>> import kvtier
    >>> with kvtier.Advisor("lru") as advisor:
    ...     before = advisor.learns
    ...     batch = advisor.advise(8, room=100).batch
    ...     advisor.looked_up([b"a", b"b"])
    ...     advisor.stored([b"a", b"b"])
    ...     before, batch, advisor.learns
    (False, 8, True)
    >>> advisor.advise(8, room=100) is None
    True
    """

    def __init__(self, policy: str = "", *, room: int = 0,
                 logger: Optional[logging.Logger] = None) -> None:
        self._spec, self._room = policy, 0
        self._logger = logger or logging.getLogger("kvtier")
        self._policy: Optional[Policy] = None
        self._ended = False
        self._lock = threading.Lock()
        if room:
            self._begin(room)

    def _begin(self, room: int) -> None:
        self._policy = Policy(self._spec or _DEFAULT, holes=True, capacity_units=room)
        self._room = room

    @property
    def learns(self) -> bool:
        """Whether it wants to be told."""
        return self._policy is not None

    def looked_up(self, blocks: Sequence[Union[bytes, int]]) -> None:
        """Blocks that were asked for, in their order."""
        if blocks and self.learns:
            self._guard(lambda policy: policy.lookup(_numbers(blocks)))

    def stored(self, blocks: Sequence[Union[bytes, int]]) -> None:
        """Blocks that are in the store now; others leave for them."""
        if blocks and self.learns:
            self._guard(lambda policy: self._record(policy, blocks))

    def _record(self, policy: Policy, blocks: Sequence[Union[bytes, int]]) -> None:
        policy.record(_numbers(blocks))
        over = int(policy.stats()["units"]) - self._room
        if over > 0:
            policy.evict(over)

    def switch(self, spec: str) -> None:
        """The store goes on with another policy."""
        with self._lock:
            self._spec = spec
        self._guard(lambda policy: policy.switch(spec))

    def store_has(self, spec: str) -> None:
        """What the store goes by, where that is known later; nothing if a policy was said."""
        if spec and not self._spec:
            self.switch(spec)

    def resize(self, room: int) -> None:
        """So many blocks fit, where that is known later, or has changed."""
        self._guard(lambda policy: self._resize(policy, room))

    def _resize(self, policy: Policy, room: int) -> None:
        policy.set_capacity(room)
        self._room = room

    def advise(self, batch: int, room: int = 0) -> Optional[Advice]:
        """The batch to run, from the one that runs; None where there is no advice. The first
        time says for a store with room for how many blocks."""
        with self._lock:
            if room and self._policy is None and not self._ended:
                self._begin(room)
        answer: Optional[Advice] = self._guard(lambda policy: policy.advise(batch))
        return answer

    @staticmethod
    def room_of(store: "Store", block_bytes: int) -> int:
        """How many blocks the larger of a store's tiers has room for."""
        stats = store.stats()
        return max(stats["host_limit_bytes"], stats["disk_limit_bytes"]) // block_bytes

    @staticmethod
    def policy_of(store: "Store") -> str:
        """What a store's memory goes by, as its metrics name it: without options."""
        found = _LABEL.search(store.metrics())
        return found[1] if found else _DEFAULT

    def _guard(self, call: Callable[[Policy], Any]) -> Any:
        with self._lock:
            if self._policy is None:
                return None
            try:
                return call(self._policy)
            except Error as error:
                self._end()
                # As text: whoever kept the exception would keep all that its frames have.
                self._logger.warning("no advice from now on: %s", str(error))
                return None

    def _end(self) -> None:
        self._ended = True
        if self._policy is not None:
            self._policy.close()
            self._policy = None

    def close(self) -> None:
        """There is no advice any more; doing so twice is fine."""
        with self._lock:
            self._end()

    def __enter__(self) -> "Advisor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _numbers(blocks: Sequence[Union[bytes, int]]) -> List[int]:
    """Blocks as policies know them."""
    return [one if isinstance(one, int) else int.from_bytes(
        hashlib.blake2b(one, digest_size=8).digest(), "little") for one in blocks]
