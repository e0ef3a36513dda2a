"""Offloading: manager, worker, spec."""

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

OffloadKey = bytes


def make_offload_key(block_hash, group_idx):
    return block_hash + group_idx.to_bytes(4, "big")


def get_offload_group_idx(key):
    return int.from_bytes(key[-4:], "big")


class Medium(enum.Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(enum.Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class LookupResult(enum.Enum):
    MISS = enum.auto()
    HIT = enum.auto()
    HIT_PENDING = enum.auto()
    RETRY = enum.auto()


class OffloadPolicy(enum.Enum):
    CHUNK_LEVEL = "chunk_level"
    REQUEST_LEVEL = "request_level"


@dataclass
class ReqContext:
    req_id: str
    kv_transfer_params: Any = None
    kv_hints: Any = None
    load_tier_filter: Any = "ALL"
    _state: dict = field(default_factory=dict, init=False)
    _positions: dict = field(default_factory=dict, init=False)

    def set_state(self, val):
        self._state[type(val)] = val

    def get_state(self, cls):
        return self._state.get(cls)

    def set_offload_key_position(self, key, end_token):
        self._positions[key] = end_token

    def get_offload_key_position(self, key):
        return self._positions.get(key)


@dataclass
class RequestOffloadingContext:
    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL


class ScheduleEndContext(NamedTuple):
    new_req_ids: Any
    preempted_req_ids: Any


class LoadStoreSpec:
    pass


@dataclass
class PrepareStoreOutput:
    keys_to_store: list
    store_spec: LoadStoreSpec
    evicted_keys: list


@dataclass
class OffloadingEvent:
    keys: list
    medium: Medium
    removed: bool
    locality: Any = None
    ownership: Any = None
    removal_expected: bool = False
    metadata_only: bool = False


@dataclass(frozen=True)
class OffloadingMetricMetadata:
    documentation: str
    labelnames: tuple = ()


@dataclass(frozen=True)
class OffloadingCounterMetadata(OffloadingMetricMetadata):
    pass


@dataclass(frozen=True)
class OffloadingGaugeMetadata(OffloadingMetricMetadata):
    multiprocess_mode: str = "mostrecent"


@dataclass(frozen=True)
class OffloadingKVEventsConfig:
    enable_kv_cache_events: bool
    self_describing_kv_events: bool


class OffloadingManager(ABC):
    @abstractmethod
    def lookup(self, key, req_context): ...

    @abstractmethod
    def prepare_load(self, keys, req_context): ...

    def touch(self, keys, req_context):
        return

    def complete_load(self, keys, req_context):
        return

    @abstractmethod
    def prepare_store(self, keys, req_context): ...

    def complete_store(self, keys, req_context, success=True):
        return

    @abstractmethod
    def on_new_request(self, req_context): ...

    def on_request_finished(self, req_context):
        return

    def take_events(self):
        return ()

    def on_schedule_end(self, context):
        return

    def has_pending_work(self):
        return False

    def reset_cache(self):
        return

    def on_reset_flushed(self):
        return

    def get_stats(self):
        return None

    def shutdown(self):
        return


class BlockIDsLoadStoreSpec(LoadStoreSpec, ABC):
    def __init__(self, block_ids):
        self.block_ids = np.array(block_ids, dtype=np.int32)


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    def __init__(self, block_ids, group_sizes, block_indices):
        super().__init__(block_ids)
        self.group_sizes, self.block_indices = group_sizes, block_indices


@dataclass
class CanonicalKVCacheTensor:
    tensor: Any
    page_size_bytes: int


@dataclass
class CanonicalKVCacheRef:
    tensor_idx: int
    page_size_bytes: int
    mapping: Any = None


@dataclass
class CanonicalKVCaches:
    tensors: list
    group_data_refs: list


@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: Any = None
    transfer_time: Any = None


class OffloadingWorker(ABC):
    @abstractmethod
    def submit_store(self, job_id, src_spec, dst_spec): ...

    @abstractmethod
    def submit_load(self, job_id, src_spec, dst_spec, expedited=False): ...

    @abstractmethod
    def get_finished(self): ...

    @abstractmethod
    def wait(self, job_ids): ...

    def shutdown(self):
        return


class OffloadingSpec(ABC):
    @classmethod
    def build_metric_definitions(cls, extra_config):
        return {}

    def __init__(self, config):
        self.config, self.extra_config = config, config.extra_config
        self.replicated_layout = False
        self.kv_events_config = OffloadingKVEventsConfig(config.enable_kv_cache_events, False)
        self.tokens_per_hash = config.cache.tokens_per_hash
        self.blocks_per_chunk = config.cache.blocks_per_chunk

    @abstractmethod
    def get_manager(self): ...

    @abstractmethod
    def get_worker(self, kv_caches): ...
