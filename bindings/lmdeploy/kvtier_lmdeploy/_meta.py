"""Metadata that the scheduler's side sends to the workers with each step of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple

from lmdeploy.pytorch.kv_connector.base import KVConnectorMetadata, KVSaveBlockLease


@dataclass(frozen=True)
class Load:
    """Blocks to load for a waiting request."""

    request: int
    session: int
    blocks: Tuple[int, ...]
    names: Tuple[bytes, ...]


@dataclass(frozen=True)
class Save:
    """Blocks to save: they are full after this step's forward pass."""

    number: int
    session: int
    blocks: Tuple[int, ...]
    logical: Tuple[int, ...]
    names: Tuple[bytes, ...]


@dataclass(frozen=True)
class Switch:
    """A new eviction policy for a tier."""

    tier: int
    spec: str


@dataclass(frozen=True)
class Hint:
    """Expected reuse of an ended request's blocks: the stop reason, the seconds until the next
    use (None: unknown), and `done` if they are never used again."""

    stop: int
    names: Tuple[bytes, ...]
    next_use_s: Optional[float] = None
    done: bool = False


@dataclass(frozen=True)
class StepMeta(KVConnectorMetadata):
    """Metadata of one step. An empty one makes workers report completed transfers."""

    loads: Tuple[Load, ...] = ()
    saves: Tuple[Save, ...] = ()
    switches: Tuple[Switch, ...] = ()
    hints: Tuple[Hint, ...] = ()

    def get_save_block_leases(self) -> Tuple[KVSaveBlockLease, ...]:
        """Blocks that the engine must keep until their saves have completed."""
        return tuple(KVSaveBlockLease(save.number, save.logical) for save in self.saves)
