"""Advice on batch sizes, from the lookups and stores of an engine."""

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


#: The default policy of a store.
_DEFAULT = "horizon"
_LABEL = re.compile(r'^kvtier_policy_objects\{tier="host",policy="([^"]*)"', re.MULTILINE)


class Advisor:
    """A policy beside a store that observes the same lookups and stores, one object per block.
    It derives from them how large a batch should be. Blocks are names, or 64-bit numbers.

    The policy is created when advice is first requested, so an unused advisor costs nothing.
    With `capacity_blocks`, the number of blocks that fit, the advisor observes from the start. An
    error of the policy ends the advice and is logged; it has no other effect. Any thread may use
    an advisor. Without `policy` it uses the default policy of stores.

    >>> import kvtier
    >>> with kvtier.Advisor("lru") as advisor:
    ...     before = advisor.observes
    ...     batch = advisor.advise(8, capacity_blocks=100).batch
    ...     advisor.looked_up([b"a", b"b"])
    ...     advisor.stored([b"a", b"b"])
    ...     before, batch, advisor.observes
    (False, 8, True)
    >>> advisor.advise(8, capacity_blocks=100) is None
    True
    """

    def __init__(self, policy: str = "", *, capacity_blocks: int = 0,
                 logger: Optional[logging.Logger] = None) -> None:
        self._spec, self._capacity = policy, 0
        self._logger = logger or logging.getLogger("kvtier")
        self._policy: Optional[Policy] = None
        self._ended = False
        self._lock = threading.Lock()
        if capacity_blocks:
            self._begin(capacity_blocks)

    def _begin(self, capacity_blocks: int) -> None:
        self._policy = Policy(self._spec or _DEFAULT, holes=True, capacity_units=capacity_blocks)
        self._capacity = capacity_blocks

    @property
    def observes(self) -> bool:
        """Whether the advisor has a policy that observes lookups and stores."""
        return self._policy is not None

    def looked_up(self, blocks: Sequence[Union[bytes, int]]) -> None:
        """Records a lookup of blocks, in their order."""
        if blocks and self.observes:
            self._guard(lambda policy: policy.lookup(_numbers(blocks)))

    def stored(self, blocks: Sequence[Union[bytes, int]]) -> None:
        """Records blocks that were stored, and evicts what exceeds the capacity."""
        if blocks and self.observes:
            self._guard(lambda policy: self._record(policy, blocks))

    def _record(self, policy: Policy, blocks: Sequence[Union[bytes, int]]) -> None:
        policy.record(_numbers(blocks))
        over = int(policy.stats()["units"]) - self._capacity
        if over > 0:
            policy.evict(over)

    def switch(self, spec: str) -> None:
        """Switches to another policy, as the store did."""
        with self._lock:
            self._spec = spec
        self._guard(lambda policy: policy.switch(spec))

    def use_store_policy(self, spec: str) -> None:
        """Sets the store's policy after opening; no effect if the caller named a policy."""
        if spec and not self._spec:
            self.switch(spec)

    def resize(self, capacity_blocks: int) -> None:
        """Changes the number of blocks that fit."""
        self._guard(lambda policy: self._resize(policy, capacity_blocks))

    def _resize(self, policy: Policy, capacity_blocks: int) -> None:
        policy.set_capacity(capacity_blocks)
        self._capacity = capacity_blocks

    def advise(self, batch: int, capacity_blocks: int = 0) -> Optional[Advice]:
        """Returns the batch to run, given the current one; None if there is no advice. The first
        call needs `capacity_blocks`, the number of blocks that fit into the store."""
        with self._lock:
            if capacity_blocks and self._policy is None and not self._ended:
                self._begin(capacity_blocks)
        answer: Optional[Advice] = self._guard(lambda policy: policy.advise(batch))
        return answer

    @staticmethod
    def capacity_of(store: "Store", block_bytes: int) -> int:
        """Returns how many blocks fit into the larger of a store's host and disk tiers."""
        stats = store.stats()
        return int(max(stats["host_limit_bytes"], stats["disk_limit_bytes"])) // block_bytes

    @staticmethod
    def policy_of(store: "Store") -> str:
        """Returns the host policy of a store from its metrics, without options."""
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
                # As text: a handler that kept the exception would keep its frames alive.
                self._logger.warning("no advice from now on, because the advisor's policy "
                                     "failed: %s", str(error))
                return None

    def _end(self) -> None:
        self._ended = True
        if self._policy is not None:
            self._policy.close()
            self._policy = None

    def close(self) -> None:
        """Ends the advice. A second call has no effect."""
        with self._lock:
            self._end()

    def __enter__(self) -> "Advisor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _numbers(blocks: Sequence[Union[bytes, int]]) -> List[int]:
    """Returns the 64-bit object ids of blocks; names are hashed."""
    return [block if isinstance(block, int) else int.from_bytes(
        hashlib.blake2b(block, digest_size=8).digest(), "little") for block in blocks]
