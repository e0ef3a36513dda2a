"""Stand-in for the connector interface of lmdeploy 0.18.0: names, parameters and defaults.

`tests/engine/test_seam.py` compares it with the installed interface."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Dict, Optional, Sequence, Set, Tuple


class KVConnectorRole(enum.Enum):
    SCHEDULER = enum.auto()
    WORKER = enum.auto()


@dataclass
class KVConnectorStepInput:
    running: list = field(default_factory=list)
    connector_token_lens: tuple = ()
    connector_block_ids: tuple = ()
    connector_logical_block_ids: tuple = ()


class KVConnectorMetadata(ABC):
    def get_save_block_leases(self) -> tuple:
        return ()


@dataclass(frozen=True)
class KVSaveBlockLease:
    operation_id: int
    logical_block_ids: tuple


@dataclass
class KVConnectorOutput:
    completed_save_ids: Optional[Set[int]] = None
    finished_receiving: Optional[Set[int]] = None
    invalid_block_ids: Set[int] = field(default_factory=set)


@dataclass(frozen=True)
class KVLoadResult:
    request_id: int
    success: bool


@dataclass(frozen=True)
class KVConnectorResult:
    load_results: tuple = ()
    completed_save_ids: frozenset = frozenset()


class KVConnectorBase(ABC):
    def __init__(self, role: KVConnectorRole) -> None:
        self._connector_metadata: Any = None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def _get_connector_metadata(self) -> Any:
        assert self._connector_metadata is not None
        return self._connector_metadata

    def register_kv_caches(self, kv_caches: Dict[str, Any]) -> None:
        return None

    def start_load_kv(self) -> None:
        return None

    def start_save_kv(self) -> None:
        return None

    def get_finished(self) -> KVConnectorOutput:
        return KVConnectorOutput()

    def shutdown(self) -> None:
        return None

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int
                                   ) -> Tuple[Optional[int], bool]:
        raise NotImplementedError

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int],
                                 num_external_tokens: int) -> None:
        raise NotImplementedError

    @abstractmethod
    def build_connector_meta(self, step_input: KVConnectorStepInput) -> Any:
        raise NotImplementedError

    def on_new_request(self, request: Any) -> None:
        return None

    def is_lookup_pending(self, request_id: int) -> bool:
        return False

    def cancel_lookup(self, request_id: int) -> None:
        return None

    def update_connector_output(self, connector_output: KVConnectorOutput) -> KVConnectorResult:
        return KVConnectorResult()

    def finish_transfers_after_worker_drain(self) -> None:
        return None

    def request_finished(self, request: Any) -> None:
        return None
