"""The connector that lmdeploy builds: it passes calls on to the side that it has."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from kvtier import TIER_DISK, TIER_HOST, Advice, Policy, abi
from kvtier._errors import make

from ._engine import imports

with imports():
    from lmdeploy.pytorch.kv_connector.base import (
        KVConnectorBase,
        KVConnectorOutput,
        KVConnectorResult,
        KVConnectorRole,
    )

from ._lookup import Asker
from ._meta import StepMeta
from ._scheduler import SchedulerSide
from ._settings import INTERNAL, Settings, invalid, refuse_hybrid
from ._worker import WorkerSide

_TIERS = {"host": TIER_HOST, "disk": TIER_DISK}


class KvtierConnector(KVConnectorBase):
    """KV of lmdeploy's PyTorch engine in kvtier's tiers. One for the scheduler, one for each
    worker; on the scheduler's are also `advice`, `set_policy`, `set_weights`,
    `metrics`, `evictions` (`engine.scheduler.kv_connector`)."""

    def __init__(self, role: KVConnectorRole, cache_config: Any, *, global_rank: int = 0,
                 tp_rank: int = 0, tp_size: int = 1, kv_head_replica_num: int = 1) -> None:
        super().__init__(role)
        transfer = cache_config.kv_transfer_config
        extra: Dict[str, Any] = transfer.kv_connector_extra_config
        settings = Settings.from_extra(extra)
        refuse_hybrid(cache_config)
        engine = extra.get(INTERNAL)
        if engine is None:
            raise make(abi.KVT_E_STATE, "the engine's configuration was not prepared: call "
                       "kvtier_lmdeploy.activate() before the engine is made, or start with "
                       "python -m kvtier_lmdeploy -m lmdeploy ...")
        if tp_size % max(1, kv_head_replica_num):
            raise invalid(f"{tp_size} workers, and {kv_head_replica_num} with the same heads")
        self._scheduler: Optional[SchedulerSide] = None
        self._worker: Optional[WorkerSide] = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(cache_config, settings, engine, Asker(
                engine, range(tp_size), float(settings.lookup_timeout_s), settings.lookup_async))
        else:
            self._worker = WorkerSide(cache_config, settings, engine,
                                      (global_rank, tp_rank, tp_size, max(1, kv_head_replica_num)))

    def _scheduler_side(self) -> SchedulerSide:
        if self._scheduler is None:
            raise make(abi.KVT_E_STATE, "a call for the scheduler's side, of a worker's connector")
        return self._scheduler

    def _worker_side(self) -> WorkerSide:
        if self._worker is None:
            raise make(abi.KVT_E_STATE, "a call for a worker's side, of the scheduler's connector")
        return self._worker

    # What the engine calls on the scheduler's side.

    def get_num_new_matched_tokens(self, request: Any,
                                   num_computed_tokens: int) -> Tuple[Optional[int], bool]:
        """See KVConnectorBase."""
        return self._scheduler_side().matched(request, int(num_computed_tokens))

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int],
                                 num_external_tokens: int) -> None:
        """See KVConnectorBase."""
        self._scheduler_side().allocated(request, block_ids, int(num_external_tokens))

    def build_connector_meta(self, step_input: Any) -> Optional[StepMeta]:
        """See KVConnectorBase."""
        return self._scheduler_side().step(step_input)

    def on_new_request(self, request: Any) -> None:
        """See KVConnectorBase."""
        self._scheduler_side().begun(request)

    def is_lookup_pending(self, request_id: int) -> bool:
        """See KVConnectorBase."""
        return self._scheduler_side().asker.pending(int(request_id))

    def cancel_lookup(self, request_id: int) -> None:
        """See KVConnectorBase."""
        self._scheduler_side().asker.cancel(int(request_id))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> KVConnectorResult:
        """See KVConnectorBase."""
        return self._scheduler_side().progress(connector_output)

    def finish_transfers_after_worker_drain(self) -> None:
        """See KVConnectorBase."""
        self._scheduler_side().drained()

    def request_finished(self, request: Any) -> None:
        """See KVConnectorBase."""
        self._scheduler_side().finished(request)

    # What it calls on a worker's.

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

    # What kvtier has beside, on the scheduler's side.

    def advice(self, batch: int) -> Optional[Advice]:
        """How many requests to run, from the number that run now."""
        return self._scheduler_side().advice(batch)

    def set_weights(self, version: str) -> None:
        """The engine has other weights from now on: only KV that was computed with the same
        `version` is loaded, and what requests that run now go on with is neither saved nor
        loaded. "" are those that the engine began with."""
        self._scheduler_side().set_weights(str(version))

    def set_policy(self, tier: str, spec: str) -> None:
        """Another policy for "host" or "disk", from the engine's next step on."""
        if tier not in _TIERS:
            raise invalid(f"tier {tier!r} is none of {', '.join(_TIERS)}")
        Policy(spec, holes=True).close()  # a spec that is none is refused here, not in a worker
        self._scheduler_side().switch(_TIERS[tier], spec)

    def stats(self) -> List[Optional[Dict[str, Any]]]:
        """What each worker's store counts; None of one that does not answer."""
        return self._scheduler_side().asker.all({"ask": "describe"})

    def metrics(self) -> List[Optional[str]]:
        """The same for Prometheus."""
        return self._scheduler_side().asker.all({"ask": "metrics"})

    def evictions(self, tier: str = "host", most: int = 256) -> List[Optional[List[Any]]]:
        """The last evictions of each worker's store, the oldest of them first."""
        if tier not in _TIERS:
            raise invalid(f"tier {tier!r} is none of {', '.join(_TIERS)}")
        return self._scheduler_side().asker.all({"ask": "evictions", "tier": tier, "most": most})

