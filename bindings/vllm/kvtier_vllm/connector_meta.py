"""What the connector's two sides tell each other, step by step. All of it can be pickled."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from . import _engine

_engine.require()

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


class Who(NamedTuple):
    """What makes a request's KV other KV, beside its tokens."""

    lora: bytes
    salt: bytes
    media: Tuple[Tuple[int, bytes], ...]


class Ask(NamedTuple):
    """How far could this go on?"""

    request: str
    who: Who
    tokens: List[int]


class Opened(NamedTuple):
    """A request whose KV is going to move."""

    request: str
    who: Who
    tenant: int
    priority: Optional[int]


class Grown(NamedTuple):
    """Tokens of a request, from an index on."""

    request: str
    first: int
    tokens: List[int]


class Move(NamedTuple):
    """Tokens of a request and the blocks in which they are."""

    request: str
    first: int
    length: int
    blocks: List[int]


class Ended(NamedTuple):
    """A request has finished, and what is known of its future."""

    request: str
    stop: int
    next_use_s: Optional[float]
    done: bool


@dataclass
class KvtierMetadata(KVConnectorMetadata):
    """A step, from the scheduler to each worker. Lists are gone through in this order."""

    #: Grows when all that was stored is to be forgotten.
    epoch: int = 0
    #: Counts steps.
    step: int = 0
    #: Policies that tiers go on with: the tier's number, and the spec.
    policies: List[Tuple[int, str]] = field(default_factory=list)
    opened: List[Opened] = field(default_factory=list)
    grown: List[Grown] = field(default_factory=list)
    loads: List[Move] = field(default_factory=list)
    saves: List[Move] = field(default_factory=list)
    asks: List[Ask] = field(default_factory=list)
    #: Requests whose answers have come, and need not be said again.
    heard: List[str] = field(default_factory=list)
    ended: List[Ended] = field(default_factory=list)


@dataclass
class KvtierAnswers(KVConnectorWorkerMetadata):
    """From a worker: how many tokens each request that was asked for could go on with, of how many,
    and the last step whose loads within it have ended, so that those which failed are known. `room`
    is how many blocks its store has room for, `policy` what its memory goes by."""

    epoch: int
    tokens: Dict[str, Tuple[int, int]]
    step: int = 0
    room: int = 0
    policy: str = ""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """What all workers have: what one lacks is lacking."""
        assert isinstance(other, KvtierAnswers)
        epoch, step = max(self.epoch, other.epoch), min(self.step, other.step)
        room, policy = min(self.room, other.room), self.policy or other.policy
        if other.epoch != self.epoch:
            newer = self if self.epoch > other.epoch else other
            return KvtierAnswers(epoch, newer.tokens, step, room, policy)
        # Workers may know in different steps; each says it until it was heard.
        both = [request for request, (size, _) in self.tokens.items()
                if other.tokens.get(request, (-1, 0))[0] == size]
        return KvtierAnswers(epoch, {
            request: min(self.tokens[request], other.tokens[request]) for request in both},
            step, room, policy)


def who(request: Any) -> Who:
    """That of a request."""
    lora = request.lora_request
    media: Dict[int, bytes] = {}
    for feature in request.mm_features:
        # One at each token: parts of one item may begin at the same.
        at = int(feature.mm_position.offset)
        media[at] = hashlib.sha256(media.get(at, b"") + feature.identifier.encode()).digest()
    name = b"" if lora is None else f"{lora.lora_name}\0{lora.lora_path}".encode()
    return Who(name, (request.cache_salt or "").encode(), tuple(sorted(media.items())))
