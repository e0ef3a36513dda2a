"""KV events of the connector: which blocks of vLLM the workers' stores have, in which medium.

The scheduler names each block by vLLM's block hash, a worker follows its store, and the scheduler
gives vLLM the changes. vLLM publishes them beside those of its own cache (--kv-events-config).
"""

from __future__ import annotations

from array import array
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

from . import _engine
from .settings import logger


class BlockLabel(NamedTuple):
    """What vLLM's events say about a block."""

    hash: bytes
    parent: Optional[bytes]
    tokens: bytes
    lora: Optional[Tuple[int, str]]
    extra_keys: Any


class DescribeBlocks(NamedTuple):
    """The labels of a request's blocks, from one block on."""

    request: str
    first: int
    labels: List[BlockLabel]


class RankChange(NamedTuple):
    """A block is resident in a medium of one worker's store (`stored`), or no longer."""

    rank: int
    stored: bool
    medium: str
    label: BlockLabel


class KvEvents:
    """The scheduler side. A block is announced while the stores of all ranks have it."""

    def __init__(self, block_tokens: int, ranks: int, kv_cache_spec: Any) -> None:
        # Imported here, because only engines with events need them.
        _engine.require("kv_events")
        from vllm.distributed import kv_events
        from vllm.v1 import kv_cache_interface
        from vllm.v1.core import kv_cache_utils

        self._schema, self._utils = kv_events, kv_cache_utils
        self._block, self._all_ranks = block_tokens, (1 << ranks) - 1
        self._kind = kv_cache_interface.get_kv_cache_spec_kind(kv_cache_spec).value
        #: The ranks that have a block, as bits, by hash and medium.
        self._ranks: Dict[Tuple[bytes, str], int] = {}
        self._events: List[Any] = []
        self._has_warned = False

    def labels(self, request: Any, first: int, end: int) -> List[BlockLabel]:
        """The labels of a request's blocks from `first` to `end`, as far as vLLM has hashed it."""
        hashes = request.block_hashes
        if len(hashes) > len(request.all_token_ids) // self._block and not self._has_warned:
            self._has_warned = True
            logger.warning("no KV events of the connector, because vLLM hashes parts of blocks: "
                           "%d tokens have %d hashes", len(request.all_token_ids), len(hashes))
        if self._has_warned:
            return []
        lora = request.lora_request
        name = None if lora is None else (int(lora.adapter_id), str(lora.name))
        labels = []
        for at in range(first, min(end, len(hashes))):
            start = at * self._block
            extra, _ = self._utils.generate_block_hash_extra_keys(
                request, start, start + self._block, 0)
            tokens = array("q", request.all_token_ids[start: start + self._block]).tobytes()
            labels.append(BlockLabel(bytes(hashes[at]), bytes(hashes[at - 1]) if at else None,
                                     tokens, name, extra))
        return labels

    def apply(self, changes: Iterable[RankChange]) -> None:
        """Takes the changes of workers in their order."""
        for rank, stored, medium, label in changes:
            place = label.hash, medium
            before = self._ranks.get(place, 0)
            after = before | 1 << rank if stored else before & ~(1 << rank)
            self._ranks[place] = after
            if not after:
                del self._ranks[place]
            if (before == self._all_ranks) != (after == self._all_ranks):
                self._events.append(self._event(stored, medium, label))

    def _event(self, stored: bool, medium: str, label: BlockLabel) -> Any:
        convert = self._utils.maybe_convert_block_hash
        if not stored:
            return self._schema.BlockRemoved(block_hashes=[convert(label.hash)], medium=medium,
                                             group_idx=0)
        lora_id, lora_name = label.lora or (None, None)
        return self._schema.BlockStored(
            block_hashes=[convert(label.hash)],
            parent_block_hash=None if label.parent is None else convert(label.parent),
            token_ids=list(array("q", label.tokens)), block_size=self._block, lora_id=lora_id,
            medium=medium, lora_name=lora_name,
            extra_keys=self._utils.to_event_extra_keys([label.extra_keys]), group_idx=0,
            kv_cache_spec_kind=self._kind)

    def take(self) -> List[Any]:
        """vLLM's events since the last call."""
        events, self._events = self._events, []
        return events
