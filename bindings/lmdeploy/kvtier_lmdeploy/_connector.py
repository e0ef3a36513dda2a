"""The connector class that lmdeploy builds. It forwards calls to its scheduler or worker side."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from kvtier import TIER_DISK, TIER_HOST, Advice, Policy, abi
from kvtier._errors import make

from . import _engine

_engine.require()

from lmdeploy.pytorch.kv_connector.base import (  # noqa: E402
    KVConnectorBase,
    KVConnectorOutput,
    KVConnectorResult,
    KVConnectorRole,
)

from ._lookup import LookupClient  # noqa: E402
from ._meta import StepMeta  # noqa: E402
from ._scheduler import SchedulerSide  # noqa: E402
from ._settings import INTERNAL, Settings, invalid, refuse_hybrid  # noqa: E402
from ._worker import WorkerSide  # noqa: E402

_TIERS = {"host": TIER_HOST, "disk": TIER_DISK}


class KvtierConnector(KVConnectorBase):
    """Connects lmdeploy's PyTorch engine to kvtier's tiers.

    lmdeploy builds one instance for the scheduler and one for each worker. The scheduler's
    instance is `engine.scheduler.kv_connector`. Only that instance offers `advice`,
    `set_weights`, `set_policy`, `stats`, `metrics` and `evictions`."""

    def __init__(self, role: KVConnectorRole, cache_config: Any, *, global_rank: int = 0,
                 tp_rank: int = 0, tp_size: int = 1, kv_head_replica_num: int = 1) -> None:
        super().__init__(role)
        transfer = cache_config.kv_transfer_config
        extra: Dict[str, Any] = transfer.kv_connector_extra_config
        settings = Settings.from_extra(extra)
        refuse_hybrid(cache_config)
        engine = extra.get(INTERNAL)
        if engine is None:
            raise make(abi.KVT_E_STATE, "kv_connector_extra_config was not prepared: call "
                       "kvtier_lmdeploy.activate() before you create the engine, or start with "
                       "python -m kvtier_lmdeploy -m lmdeploy ...")
        if tp_size % max(1, kv_head_replica_num):
            raise invalid(f"tp_size is {tp_size}; it must be a multiple of kv_head_replica_num, "
                          f"which is {kv_head_replica_num}")
        self._scheduler: Optional[SchedulerSide] = None
        self._worker: Optional[WorkerSide] = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(cache_config, settings, engine, LookupClient(
                engine, range(tp_size), float(settings.lookup_timeout_s), settings.lookup_async))
        else:
            self._worker = WorkerSide(cache_config, settings, engine,
                                      (global_rank, tp_rank, tp_size, max(1, kv_head_replica_num)))

    def _scheduler_side(self) -> SchedulerSide:
        if self._scheduler is None:
            raise make(abi.KVT_E_STATE, "this is a worker's connector: call this method on the "
                       "scheduler's connector (engine.scheduler.kv_connector)")
        return self._scheduler

    def _worker_side(self) -> WorkerSide:
        if self._worker is None:
            raise make(abi.KVT_E_STATE, "this is the scheduler's connector: call this method on a "
                       "worker's connector")
        return self._worker

    # Interface of the engine, scheduler's side.

    def get_num_new_matched_tokens(self, request: Any,
                                   num_computed_tokens: int) -> Tuple[Optional[int], bool]:
        """See KVConnectorBase."""
        return self._scheduler_side().match(request, int(num_computed_tokens))

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int],
                                 num_external_tokens: int) -> None:
        """See KVConnectorBase."""
        self._scheduler_side().blocks_allocated(request, block_ids, int(num_external_tokens))

    def build_connector_meta(self, step_input: Any) -> Optional[StepMeta]:
        """See KVConnectorBase."""
        return self._scheduler_side().step(step_input)

    def on_new_request(self, request: Any) -> None:
        """See KVConnectorBase."""
        self._scheduler_side().request_started(request)

    def is_lookup_pending(self, request_id: int) -> bool:
        """See KVConnectorBase."""
        return self._scheduler_side().lookups.pending(int(request_id))

    def cancel_lookup(self, request_id: int) -> None:
        """See KVConnectorBase."""
        self._scheduler_side().lookups.cancel(int(request_id))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> KVConnectorResult:
        """See KVConnectorBase."""
        return self._scheduler_side().progress(connector_output)

    def finish_transfers_after_worker_drain(self) -> None:
        """See KVConnectorBase."""
        self._scheduler_side().workers_drained()

    def request_finished(self, request: Any) -> None:
        """See KVConnectorBase."""
        self._scheduler_side().request_finished(request)

    # Interface of the engine, worker's side.

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """See KVConnectorBase."""
        self._worker_side().register(kv_caches)

    def start_load_kv(self) -> None:
        """See KVConnectorBase."""
        self._worker_side().start_loads(self._get_connector_metadata())

    def start_save_kv(self) -> None:
        """See KVConnectorBase."""
        self._worker_side().start_saves(self._get_connector_metadata())

    def get_finished(self) -> KVConnectorOutput:
        """See KVConnectorBase."""
        return self._worker_side().progress()

    def shutdown(self) -> None:
        """See KVConnectorBase."""
        if self._scheduler is not None:
            self._scheduler.close()
        else:
            self._worker_side().shutdown()

    # Extensions of kvtier, on the scheduler's side.

    def advice(self, batch: int) -> Optional[Advice]:
        """Recommends how many requests to run; `batch` is the number that run now.

        Returns None without `advice` in the settings, or while the stores' capacity is unknown."""
        return self._scheduler_side().advice(batch)

    def set_weights(self, version: str) -> None:
        """Declares that the engine's weights changed; "" names the weights at its start.

        From now on only KV that was computed under the same `version` is loaded. Requests that
        run now mix KV of both weights, so their KV is neither saved nor loaded."""
        self._scheduler_side().set_weights(str(version))

    def set_policy(self, tier: str, spec: str) -> None:
        """Sets the eviction policy of tier "host" or "disk", from the engine's next step on."""
        tier_id = _tier_id(tier)
        Policy(spec, holes=True).close()  # reports a wrong spec here, not in a worker's log
        self._scheduler_side().switch(tier_id, spec)

    def stats(self) -> List[Optional[Dict[str, Any]]]:
        """Statistics of each worker's store; None for a worker that does not answer."""
        return self._scheduler_side().lookups.query_all({"query": "describe"})

    def metrics(self) -> List[Optional[str]]:
        """Metrics of each worker's store as Prometheus text; None for one that does not answer."""
        return self._scheduler_side().lookups.query_all({"query": "metrics"})

    def evictions(self, tier: str = "host", most: int = 256) -> List[Optional[List[Any]]]:
        """The last `most` evictions of each worker's store, oldest first."""
        _tier_id(tier)
        return self._scheduler_side().lookups.query_all(
            {"query": "evictions", "tier": tier, "most": most})


def _tier_id(tier: str) -> int:
    if tier not in _TIERS:
        raise invalid(f"tier {tier!r} is unknown: use one of {', '.join(_TIERS)}")
    return _TIERS[tier]

