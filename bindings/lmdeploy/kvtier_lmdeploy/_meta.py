"""What a scheduler's side tells the workers with each step of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple

from ._engine import imports

with imports():
    from lmdeploy.pytorch.kv_connector.base import KVConnectorMetadata, KVSaveBlockLease


@dataclass(frozen=True)
class Load:
    """Blocks that a request waits for."""

    request: int
    session: int
    blocks: Tuple[int, ...]
    names: Tuple[bytes, ...]


@dataclass(frozen=True)
class Save:
    """Blocks that are full after this step's forward."""

    number: int
    session: int
    blocks: Tuple[int, ...]
    logical: Tuple[int, ...]
    names: Tuple[bytes, ...]


@dataclass(frozen=True)
class Switch:
    """Another policy for a tier."""

    tier: int
    spec: str


@dataclass(frozen=True)
class Hint:
    """What is known of the future of a request's blocks: why it stopped, in how many seconds
    they are wanted again, or that they never are."""

    stop: int
    names: Tuple[bytes, ...]
    next_use_s: Optional[float] = None
    done: bool = False


@dataclass(frozen=True)
class StepMeta(KVConnectorMetadata):
    """All of it. One without anything has workers say what has ended."""

    loads: Tuple[Load, ...] = ()
    saves: Tuple[Save, ...] = ()
    switches: Tuple[Switch, ...] = ()
    hints: Tuple[Hint, ...] = ()

    def get_save_block_leases(self) -> Tuple[KVSaveBlockLease, ...]:
        """The blocks that must stay until their saves have ended."""
        return tuple(KVSaveBlockLease(save.number, save.logical) for save in self.saves)
