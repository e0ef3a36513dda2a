"""A KV connector that stores KV in kvtier directly, without vLLM's CPU tier:

    --kv-transfer-config '{"kv_connector": "KvtierConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvtier_vllm.connector",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {...}}'
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Dict, Optional, Set, Tuple

from . import _engine
from .settings import Settings, flag, invalid, reject_unknown, unsupported

_engine.require("connector")

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats  # noqa: E402

from .connector_events import KvEvents  # noqa: E402
from .connector_meta import KvtierMetadata, KvtierWorkerMetadata  # noqa: E402
from .connector_scheduler import Scheduler  # noqa: E402
from .connector_worker import Worker  # noqa: E402

_OWN = ("layerwise", "save_decode", "hints", "kv_events")
_ADVICE = ("use OffloadingConnector with the kvtier tier (kvtier_vllm.tier) on GPUs, or with one "
           "worker and kvtier's offloading spec (kvtier_vllm.spec)")


@dataclass
class KvtierStats(KVConnectorStats):
    """Counters of one reporting interval."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> Dict[str, Any]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


def _reject_unsupported(vllm_config: Any, kv_cache_config: Any, role: str) -> None:
    """Rejects configurations that this connector does not support, when the engine starts."""
    parallel, groups = vllm_config.parallel_config, kv_cache_config.kv_cache_groups
    for name in ("pipeline_parallel_size", "decode_context_parallel_size",
                 "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise unsupported(f"{name}={getattr(parallel, name)} is not supported: {_ADVICE}")
    if role not in ("kv_both", "kv_producer", "kv_consumer"):
        raise invalid(f"kv_role={role!r} is unknown: use kv_both, kv_producer or kv_consumer")
    if len(groups) != 1:
        raise unsupported(f"a model with {len(groups)} KV cache groups (hybrid attention) is not "
                          f"supported: {_ADVICE}")
    group = groups[0]
    kind = type(group.kv_cache_spec).__name__
    if kind not in ("FullAttentionSpec", "MLAAttentionSpec"):
        raise unsupported(f"KV of {kind} is not supported, only full attention: {_ADVICE}")
    if getattr(group.kv_cache_spec, "sliding_window", None):
        raise unsupported(f"KV with a sliding window is not supported: {_ADVICE}")
    if getattr(group, "is_eagle_group", False):
        raise unsupported("layers of a draft model (EAGLE, MTP) are not supported, because their "
                          f"KV depends on the next token: {_ADVICE}")
    if group.host_resident or not group.enable_kv_transfer:
        raise unsupported("a KV cache group that stays in host memory, or has KV transfer "
                          f"disabled, is not supported: {_ADVICE}")


def _rank(parallel: Any) -> int:
    if parallel.tensor_parallel_size == 1:
        return 0
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):
    """Transfers KV between the engine's KV caches and a kvtier store, keyed by tokens."""

    @property
    def requires_kv_delivery(self) -> bool:
        """False: the engine computes KV that was not saved."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Dict[str, Any]) -> bool:
        """True for layer-wise transfers: waits between layers cannot be part of a full graph."""
        return flag(extra_config, "layerwise", False)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """False: sleep mode frees the caches, but the connector keeps their addresses."""
        return False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        _reject_unsupported(vllm_config, kv_cache_config, transfer.kv_role)
        extra = dict(transfer.kv_connector_extra_config or {})
        reject_unknown(extra, [*Settings.names(), *_OWN])
        settings = Settings.from_config(extra)
        layerwise, save_decode, use_hints = (flag(extra, "layerwise", False), flag(
            extra, "save_decode", True), flag(extra, "hints", True))
        engine_events = getattr(vllm_config, "kv_events_config", None)
        has_events = flag(extra, "kv_events", True) and engine_events is not None and (
            engine_events.enable_kv_cache_events)
        self._group = kv_cache_config.kv_cache_groups[0]
        block = int(self._group.kv_cache_spec.block_size)
        self._scheduler: Optional[Scheduler] = None
        self._worker: Optional[Worker] = None
        self._reported_counts: Dict[str, int] = {}
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(
                transfer.engine_id, block, layerwise=layerwise,
                save_decode=save_decode, use_hints=use_hints, policy=settings.policy,
                role=transfer.kv_role,
                events=KvEvents(block, parallel.tensor_parallel_size, self._group.kv_cache_spec)
                if has_events else None)
            return
        model, rank, count = vllm_config.model_config, _rank(parallel), (
            parallel.tensor_parallel_size)
        terms = {
            "engine": "vllm", "seam": "connector", "block": block, "dtype": str(model.dtype),
            "cache_dtype": str(vllm_config.cache_config.cache_dtype),
            "revision": str(model.revision), "layers": list(self._group.layer_names),
            "layout": str(kv_cache_config.kv_cache_layout),
            # These options change the KV that the engine computes from one checkpoint.
            "quantization": str(getattr(model, "quantization", None)),
            "overrides": repr(getattr(model, "hf_overrides", None) or None),
        }
        folder = f"dp{getattr(parallel, 'data_parallel_index', 0)}-tp{rank}"
        self._worker = Worker(
            transfer.engine_id, settings.under(folder), terms, model=str(model.model),
            shard=(rank, count), block_tokens=block, layerwise=layerwise, events=has_events)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler side."""
        if self._scheduler is None:
            raise invalid("this connector has the role of a worker, and no scheduler side: ask "
                          "the scheduler's connector")
        return self._scheduler

    @property
    def worker(self) -> Worker:
        """The worker side, which owns the store."""
        if self._worker is None:
            raise invalid("this connector has the role of the scheduler, and no worker side: ask "
                          "a worker's connector")
        return self._worker

    def _meta(self) -> KvtierMetadata:
        meta = self._get_connector_metadata()
        assert isinstance(meta, KvtierMetadata)
        return meta

    # Worker side.

    def register_kv_caches(self, kv_caches: Dict[str, Any]) -> None:
        self.worker.register(kv_caches, list(self._group.layer_names),
                             self._kv_cache_config.num_blocks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker.start_loads(self._meta())

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.worker.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any,
                      **kwargs: Any) -> None:
        self.worker.save_layer(layer_name, self._meta())

    def wait_for_save(self) -> None:
        self.worker.finish_step(self._meta())

    def get_finished(self, finished_req_ids: Set[str]) -> Tuple[Optional[Set[str]],
                                                                Optional[Set[str]]]:
        return None, self.worker.take_finished_loads() or None

    def get_block_ids_with_load_errors(self) -> Set[int]:
        return self.worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> Optional[KvtierWorkerMetadata]:
        return None if self._worker is None else self._worker.metadata()

    def get_kv_connector_stats(self) -> Optional[KVConnectorStats]:
        counts: Dict[str, int] = {}
        if self._worker is not None:
            counts = dict(self._worker.counts)
        if self._scheduler is not None:
            counts = {"lookup_tokens": self._scheduler.queries, "hit_tokens": self._scheduler.hits}
        increase = {name: n - self._reported_counts.get(name, 0) for name, n in counts.items()}
        self._reported_counts = counts
        return KvtierStats(data=increase) if any(increase.values()) else None

    @classmethod
    def build_kv_connector_stats(cls, data: Optional[Dict[str, Any]] = None
                                 ) -> Optional[KVConnectorStats]:
        return KvtierStats(data=data if data is not None else {})

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.shutdown()

    # Scheduler side.

    def on_new_request(self, request: Any) -> None:
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int
                                   ) -> Tuple[Optional[int], bool]:
        return self.scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any,
                                 num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self.scheduler.build_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler.on_failed_blocks(connector_output.invalid_block_ids)
        self.scheduler.on_worker_metadata(connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Any, block_ids: Any
                         ) -> Tuple[bool, Optional[Dict[str, Any]]]:
        self.scheduler.finished(request)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any
                                    ) -> Tuple[bool, Optional[Dict[str, Any]]]:
        return self.request_finished(request, block_ids)

    def take_events(self) -> Iterable[Any]:
        return self.scheduler.take_events()

    def reset_cache(self) -> Optional[bool]:
        self.scheduler.reset()
        return True
