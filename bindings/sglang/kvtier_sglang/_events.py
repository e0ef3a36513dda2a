"""KV events of a backend or linker: which pages its store has, on a socket of its own."""

from __future__ import annotations

import logging
from typing import Any, List, Optional, Sequence

import kvtier
from kvtier.events import Block, Publisher

from ._config import Settings

logger = logging.getLogger("kvtier_sglang")
#: SGLang's names of the media (StorageMedium).
_MEDIA = {kvtier.TIER_HOST: "CPU_PINNED", kvtier.TIER_DISK: "DISK"}


class KvEvents:
    """Publishes the pages of the KV pool that this engine has stored or loaded, under the hashes
    of SGLang's own events. They have no tokens: a router knows a page's tokens from the engine's
    events. Only the first rank of each engine or data parallel rank publishes."""

    def __init__(self, store: kvtier.Store, settings: Settings, config: Any) -> None:
        self._publisher: Optional[Publisher] = None
        if not settings.events or config.tp_rank or config.pp_rank or config.attn_cp_rank:
            return
        try:
            self._publisher = Publisher(
                store, _at_rank(settings.events, config.dp_rank), media=_MEDIA, described=True,
                replay_endpoint=_at_rank(settings.events_replay, config.dp_rank) or None,
                data_parallel_rank=config.dp_rank)
        except (kvtier.Error, ImportError) as error:
            logger.warning("no KV events are published, and the engine goes on: %s", error)

    def found(self, blocks: kvtier.Blocks, names: Sequence[bytes], ok: Sequence[bool],
              page_tokens: int) -> None:
        """Notes that pages were stored or loaded."""
        if self._publisher is None:
            return
        found = [name for name, is_found in zip(names, ok) if is_found]
        described: List[Block] = []
        for name in found:
            hash_ = _event_hash(name)
            if hash_ is None:
                return  # names of another kind, as tests and other callers use
            described.append(Block(hash_, extra={"block_size": page_tokens}))
        keys = blocks.keys(found) if found else b""
        self._publisher.describe([keys[at: at + 32] for at in range(0, len(keys), 32)], described)

    def close(self) -> None:
        """Clears the routers' view."""
        if self._publisher is not None:
            self._publisher.close()


def _event_hash(name: bytes) -> Optional[int]:
    """A page's hash in SGLang's events: the first 64 bits of its name, as a signed number."""
    try:
        bits = int(name[:16], 16)
    except ValueError:
        return None
    return bits - (1 << 64) if bits >= 1 << 63 else bits


def _at_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a data parallel rank: its port is that much higher, as SGLang's own."""
    head, _, port = endpoint.rpartition(":")
    if not rank or not endpoint.startswith("tcp:") or not port.isdigit():
        return f"{endpoint}.{rank}" if rank and endpoint else endpoint
    return f"{head}:{int(port) + rank}"
