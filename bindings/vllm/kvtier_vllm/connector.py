"""kvtier as a KV connector of its own, without a CPU tier of vLLM's:

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

_engine.require()

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats  # noqa: E402

from .connector_meta import KvtierAnswers, KvtierMetadata  # noqa: E402
from .connector_scheduler import Scheduler  # noqa: E402
from .connector_worker import Worker  # noqa: E402

_OWN = ("layerwise", "save_decode", "hints")
_ADVICE = "use OffloadingConnector with the kvtier tier (kvtier_vllm.tier)"


@dataclass
class KvtierStats(KVConnectorStats):
    """Counts of an interval."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, more in other.data.items():
            self.data[name] = self.data.get(name, 0) + more
        return self

    def reduce(self) -> Dict[str, Any]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


def _refuse(vllm_config: Any, kv_cache_config: Any, role: str) -> None:
    """What this connector does not do, told at the start."""
    parallel, groups = vllm_config.parallel_config, kv_cache_config.kv_cache_groups
    for name in ("pipeline_parallel_size", "decode_context_parallel_size",
                 "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise unsupported(f"{name}={getattr(parallel, name)} is not supported: {_ADVICE}")
    if role not in ("kv_both", "kv_producer", "kv_consumer"):
        raise invalid(f"kv_role={role!r}")
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
        raise unsupported("layers of a draft model (EAGLE, MTP) depend on the token after: "
                          f"{_ADVICE}")
    if group.host_resident or not group.enable_kv_transfer:
        raise unsupported(f"KV that is in host memory already is not supported: {_ADVICE}")


def _rank(parallel: Any) -> int:
    if parallel.tensor_parallel_size == 1:
        return 0
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):
    """KV goes straight from the engine's caches to a kvtier store and back, by tokens."""

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what was not saved is computed."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Dict[str, Any]) -> bool:
        """Layers that are waited for, and saved, one after the other are not in graphs."""
        return flag(extra_config, "layerwise", False)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """No: the caches' addresses are kept."""
        return False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        _refuse(vllm_config, kv_cache_config, transfer.kv_role)
        extra = dict(transfer.kv_connector_extra_config or {})
        reject_unknown(extra, [*Settings.names(), *_OWN])
        settings = Settings.take(extra)
        layerwise, save_decode, use_hints = (flag(extra, "layerwise", False), flag(
            extra, "save_decode", True), flag(extra, "hints", True))
        self._group = kv_cache_config.kv_cache_groups[0]
        block = int(self._group.kv_cache_spec.block_size)
        self._scheduler: Optional[Scheduler] = None
        self._worker: Optional[Worker] = None
        self._sent: Dict[str, int] = {}
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(
                transfer.engine_id, block, layerwise=layerwise,
                save_decode=save_decode, use_hints=use_hints, policy=settings.policy)
            return
        model, rank, count = vllm_config.model_config, _rank(parallel), (
            parallel.tensor_parallel_size)
        terms = {
            "engine": "vllm", "seam": "connector", "block": block, "dtype": str(model.dtype),
            "cache_dtype": str(vllm_config.cache_config.cache_dtype),
            "revision": str(model.revision), "layers": list(self._group.layer_names),
            "layout": str(kv_cache_config.kv_cache_layout),
            # What the engine is told to make of the same checkpoint.
            "quantization": str(getattr(model, "quantization", None)),
            "overrides": repr(getattr(model, "hf_overrides", None) or None),
        }
        folder = f"dp{getattr(parallel, 'data_parallel_index', 0)}-tp{rank}"
        self._worker = Worker(
            transfer.engine_id, settings.under(folder), terms, model=str(model.model),
            shard=(rank, count), block_tokens=block, layerwise=layerwise)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler's side."""
        if self._scheduler is None:
            raise invalid("this is the connector of a worker")
        return self._scheduler

    @property
    def worker(self) -> Worker:
        """The worker's side, with its store."""
        if self._worker is None:
            raise invalid("this is the connector of the scheduler")
        return self._worker

    def _meta(self) -> KvtierMetadata:
        meta = self._get_connector_metadata()
        assert isinstance(meta, KvtierMetadata)
        return meta

    # The worker's side.

    def register_kv_caches(self, kv_caches: Dict[str, Any]) -> None:
        self.worker.register(kv_caches, list(self._group.layer_names),
                             self._kv_cache_config.num_blocks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker.start_loads(self._meta())

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any,
                      **kwargs: Any) -> None:
        self.worker.save_layer(layer_name, self._meta())

    def wait_for_save(self) -> None:
        self.worker.finish_step(self._meta())

    def get_finished(self, finished_req_ids: Set[str]) -> Tuple[Optional[Set[str]],
                                                                Optional[Set[str]]]:
        return None, self.worker.loaded() or None

    def get_block_ids_with_load_errors(self) -> Set[int]:
        return self.worker.bad_blocks()

    def build_connector_worker_meta(self) -> Optional[KvtierAnswers]:
        return None if self._worker is None else self._worker.answers()

    def get_kv_connector_stats(self) -> Optional[KVConnectorStats]:
        now: Dict[str, int] = {}
        if self._worker is not None:
            now = dict(self._worker.counts)
        if self._scheduler is not None:
            now = {"lookup_tokens": self._scheduler.queries, "hit_tokens": self._scheduler.hits}
        told = {name: n - self._sent.get(name, 0) for name, n in now.items()}
        self._sent = now
        return KvtierStats(data=told) if any(told.values()) else None

    @classmethod
    def build_kv_connector_stats(cls, data: Optional[Dict[str, Any]] = None
                                 ) -> Optional[KVConnectorStats]:
        return KvtierStats(data=data if data is not None else {})

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.shutdown()

    # The scheduler's side.

    def on_new_request(self, request: Any) -> None:
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int
                                   ) -> Tuple[Optional[int], bool]:
        return self.scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any,
                                 num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self.scheduler.meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler.failed(connector_output.invalid_block_ids)
        self.scheduler.heard(connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Any, block_ids: Any
                         ) -> Tuple[bool, Optional[Dict[str, Any]]]:
        self.scheduler.finished(request)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any
                                    ) -> Tuple[bool, Optional[Dict[str, Any]]]:
        return self.request_finished(request, block_ids)

    def take_events(self) -> Iterable[Any]:
        return ()

    def reset_cache(self) -> Optional[bool]:
        self.scheduler.forget()
        return True
