"""Stand-ins for the connector's inputs: tensors over numpy arrays, requests, configurations."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Dict, List

import numpy as np


class Tensor:
    """The part of torch.Tensor that the connector uses."""

    def __init__(self, array: Any, device: str = "cpu", dtype: str = "") -> None:
        self.array, self.device = array, SimpleNamespace(type=device, index=0)
        self.dtype = dtype or array.dtype

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def numel(self) -> int:
        return int(self.array.size)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def is_contiguous(self) -> bool:
        return bool(self.array.flags["C_CONTIGUOUS"])


@dataclass
class Transfer:
    """Stand-in for KVTransferConfig."""

    kv_connector: str = "KvtierConnector"
    kv_role: str = "kv_both"
    kv_connector_extra_config: Dict[str, Any] = field(default_factory=dict)

    @property
    def is_kv_transfer_instance(self) -> bool:
        return True

    @property
    def is_kv_producer(self) -> bool:
        return self.kv_role != "kv_consumer"

    @property
    def is_kv_consumer(self) -> bool:
        return self.kv_role != "kv_producer"


@dataclass
class Cache:
    """Stand-in for CacheConfig."""

    kv_transfer_config: Transfer
    num_gpu_blocks: int = 8
    block_size: int = 16
    kernel_block_size: int = 16
    num_cpu_blocks: int = 0
    window_size: int = -1
    states_shapes: List[Any] = field(default_factory=list)
    quant_policy: int = 0


class Request:
    """Stand-in for SchedulerSequence."""

    def __init__(self, seq_id: int, tokens: Any, session_id: int = 0, adapter: str = "") -> None:
        self.seq_id, self.session_id, self.adapter_name = seq_id, session_id, adapter or None
        self.all_ids = np.asarray(tokens, np.int64)
        self.num_history_ids = 0
        self.num_new_tokens = 0
        self.history_multimodals = SimpleNamespace(empty=lambda: True)
        self.history_embeddings: List[Any] = []
        self.prefix_cache = SimpleNamespace(
            recompute_overlap=SimpleNamespace(recompute_blocks=0))
        self.sampling_param = SimpleNamespace(max_new_tokens=8, stop_words=[2])
        self.status = SimpleNamespace(name="STOPPED")

    @property
    def generated_ids(self) -> Any:
        return self.all_ids[len(self.all_ids) - self.num_new_tokens:]

    def get_prefix_cache_max_candidate_step(self) -> int:
        return len(self.all_ids) - 1

    def clamp_prefix_cache_match_step(self, step: int) -> int:
        return step


def cache_config(extra: Dict[str, Any], blocks: int = 8, **more: Any) -> Cache:
    """Returns a configuration that was prepared as an engine prepares it."""
    import kvtier_lmdeploy
    from lmdeploy.pytorch.kv_connector import factory

    kvtier_lmdeploy.activate()
    extra = {"weights": "of model-a", **extra}
    cache = Cache(Transfer(kv_connector_extra_config=extra), num_gpu_blocks=blocks, **more)
    factory.prepare_kv_connector_config(cache, model_path="model-a")
    return cache


def worker(cache: Cache, caches: Dict[str, Any], **given: Any) -> Any:
    """Builds a worker's connector with a registered cache."""
    from lmdeploy.pytorch.kv_connector import factory
    from lmdeploy.pytorch.kv_connector.base import KVConnectorRole

    made = factory.build_kv_connector(KVConnectorRole.WORKER, cache, **given)
    made.register_kv_caches(caches)
    return made


def scheduler(cache: Cache, **given: Any) -> Any:
    """Builds the scheduler's connector."""
    from lmdeploy.pytorch.kv_connector import factory
    from lmdeploy.pytorch.kv_connector.base import KVConnectorRole

    return factory.build_kv_connector(KVConnectorRole.SCHEDULER, cache, **given)
