"""Messages between the scheduler side and the worker side of the connector.

vLLM passes one message in each direction per step, and pickles them between processes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from . import _engine
from .connector_events import DescribeBlocks, RankChange

_engine.require("connector")

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


class KvScope(NamedTuple):
    """The fields of a request, besides its tokens, that decide which KV it can reuse."""

    lora: bytes
    salt: bytes
    media: Tuple[Tuple[int, bytes], ...]


class Lookup(NamedTuple):
    """The question how many of these tokens every store could load."""

    request: str
    scope: KvScope
    tokens: List[int]


class OpenSession(NamedTuple):
    """Opens a session for a request that will load or save KV."""

    request: str
    scope: KvScope
    tenant: int
    priority: Optional[int]
    #: Seconds after the last use after which the KV that it stores is removed.
    ttl_s: Optional[float] = None


class AppendTokens(NamedTuple):
    """Appends tokens to a request's session. `first` is the index of the first token."""

    request: str
    first: int
    tokens: List[int]


class BlockTransfer(NamedTuple):
    """A load or save: a range of a request's tokens, and the blocks that hold their KV."""

    request: str
    first: int
    length: int
    blocks: List[int]


class EndRequest(NamedTuple):
    """Closes the session of a finished request, with hints about its next use."""

    request: str
    stop: int
    next_use_s: Optional[float]
    done: bool
    #: Seconds for which its KV is pinned, and the class of the pin.
    keep_s: Optional[float] = None
    priority: int = 0


@dataclass
class KvtierMetadata(KVConnectorMetadata):
    """One step's message from the scheduler to each worker, which applies the fields in order."""

    #: Incremented by `reset_cache`: KV of earlier epochs must not be found.
    epoch: int = 0
    #: Number of the step.
    step: int = 0
    #: Eviction policies to switch to: the number of the tier, and the policy's spec.
    policies: List[Tuple[int, str]] = field(default_factory=list)
    opened: List[OpenSession] = field(default_factory=list)
    appended: List[AppendTokens] = field(default_factory=list)
    #: Names of blocks that are loaded or saved, for KV events.
    described: List[DescribeBlocks] = field(default_factory=list)
    loads: List[BlockTransfer] = field(default_factory=list)
    saves: List[BlockTransfer] = field(default_factory=list)
    lookups: List[Lookup] = field(default_factory=list)
    #: Requests whose lookup results the scheduler has received; workers stop repeating them.
    acknowledged: List[str] = field(default_factory=list)
    ended: List[EndRequest] = field(default_factory=list)


@dataclass
class KvtierWorkerMetadata(KVConnectorWorkerMetadata):
    """One step's message from a worker to the scheduler."""

    epoch: int
    #: Results of lookups by request: the number of tokens asked for, and of usable tokens.
    tokens: Dict[str, Tuple[int, int]]
    #: The last step whose layer-wise loads have all ended, so that failures are reported.
    step: int = 0
    #: Blocks that fit into the memory of the worker's store.
    capacity_blocks: int = 0
    #: The eviction policy of that memory.
    policy: str = ""
    #: Changes of the worker's store, for KV events.
    changes: List[RankChange] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Combines two workers: a token is usable only when both workers have it."""
        assert isinstance(other, KvtierWorkerMetadata)
        epoch, step = max(self.epoch, other.epoch), min(self.step, other.step)
        capacity = min(self.capacity_blocks, other.capacity_blocks)
        policy, changes = self.policy or other.policy, self.changes + other.changes
        if other.epoch != self.epoch:
            newer = self if self.epoch > other.epoch else other
            return KvtierWorkerMetadata(epoch, newer.tokens, step, capacity, policy,
                                        changes)
        # Workers may finish a lookup in different steps. Each repeats its result until the
        # scheduler acknowledges it.
        common = [request for request, (size, _) in self.tokens.items()
                  if other.tokens.get(request, (-1, 0))[0] == size]
        tokens = {request: min(self.tokens[request], other.tokens[request]) for request in common}
        return KvtierWorkerMetadata(epoch, tokens, step, capacity, policy, changes)


def scope_of(request: Any) -> KvScope:
    """The scope of an engine's request."""
    lora = request.lora_request
    media: Dict[int, bytes] = {}
    for feature in request.mm_features:
        # Several parts of one item may begin at the same token, which has one digest.
        at = int(feature.mm_position.offset)
        media[at] = hashlib.sha256(media.get(at, b"") + feature.identifier.encode()).digest()
    name = b"" if lora is None else f"{lora.lora_name}\0{lora.lora_path}".encode()
    return KvScope(name, (request.cache_salt or "").encode(), tuple(sorted(media.items())))
