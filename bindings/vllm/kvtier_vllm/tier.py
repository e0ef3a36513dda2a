"""A secondary tier below vLLM's CPU tier, for `TieringOffloadingSpec`:

    {"type": "KvtierTier", "module_path": "kvtier_vllm.tier", "disk_path": ..., "disk_bytes": ...}
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable
from typing import Any, ClassVar, Dict, List, NamedTuple, Optional, Set, Tuple

import kvtier
from kvtier._errors import Error

from . import _engine, hints, identity
from ._versions import TIER_LABEL
from .remote_lookups import RemoteLookups
from .settings import Settings, SharedStore, acquire, flag, invalid, logger, reject_unknown, release

_engine.require("tier")

from vllm.v1.kv_offload.base import (  # noqa: E402
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import (  # noqa: E402
    JobResult,
    SecondaryTierManager,
    TransferJob,
)

from .offload_events import OffloadEvents  # noqa: E402

_PREFIX = "vllm:kv_offload_kvtier_"
#: The counts of `Store.stats()` that vLLM's metrics get: levels, and counters that only grow.
GAUGES = ("host_used_bytes", "host_limit_bytes", "disk_used_bytes", "disk_limit_bytes", "chunks",
          "transfers")
COUNTERS = ("host_hit_cells", "disk_hit_cells", "missed_cells", "corrupt_cells", "evicted_chunks",
            "dropped_chunks", "written_bytes", "loaded_bytes", "failed_writes", "failed_reads")
_TIER_OPTIONS = ("locality", "enable_kv_events", "name", "hints")
_MAX_OWNERS = 64
#: Tenant, priority and lifetime.
_Owner = Tuple[int, Optional[int], Optional[float]]
_WARN_AFTER_S = 5.0


class _Job(NamedTuple):
    """A load or store that is underway."""

    op: kvtier.Op
    keys: List[bytes]
    is_load: bool
    request: str
    request_hints: hints.RequestHints


class KvtierTier(SecondaryTierManager):
    """A secondary tier of vLLM's offloading, in a kvtier store with memory, disk and a remote.

    A row of the CPU tier is one block, named by its offload key. A job is one native call that
    copies between the rows and the store. Its rows belong to the library until the job is
    reported as finished. A row that cannot be loaded is reported as failed, and is a miss for
    that request from then on.

    A lookup reads a table in memory and is answered at once, unless the store has a remote. Then
    blocks that local tiers lack are looked up there, and the engine retries in a later step.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str,
                 backpressure_detector: Any = None, **options: Any) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        reject_unknown(options, [*Settings.names(), *_TIER_OPTIONS])
        settings = Settings.from_config(options)
        self._hints, has_events = flag(options, "hints", True), flag(
            options, "enable_kv_events", False)
        locality = options.get("locality")
        self.locality = None if locality is None else Locality(locality)
        if has_events and not offloading_spec.kv_events_config.enable_kv_cache_events:
            has_events = False
            logger.warning("enable_kv_events of tier %s has no effect: KV cache events are "
                           "off (kv_events_config)", tier_type)
        row = self.block_size_bytes
        if row <= 0 or not primary_kv_view.c_contiguous or primary_kv_view.readonly:
            raise invalid(f"the CPU tier's memory, in rows of {row} bytes, cannot be used: it must "
                          "be writable and without gaps between rows")
        self._level = settings.put_level()
        self._part_bytes = identity.parts(row)
        self._identity = identity.for_offloading(offloading_spec.config, settings.weights, "tier",
                                                 self._part_bytes)
        self._store_key = f"tier:{options.get('name', '')}:{settings.disk_path or id(self)}"
        self._shared: Optional[SharedStore] = acquire(self._store_key, settings)
        try:
            self._queue = self._shared.runtime.queue()
            self._pool: Optional[kvtier.Pool] = kvtier.Pool(primary_kv_view, row)
            self._blocks_by_owner: Dict[_Owner, kvtier.Blocks] = {}
            self._blocks = self._blocks_of(hints.NONE)
            self._events = OffloadEvents(self.store, self.medium, self.locality, tier_type
                                         ) if has_events else None
        except BaseException:
            release(self._store_key)
            raise
        self._jobs: Dict[int, _Job] = {}
        self._remote_lookups = RemoteLookups(settings.remote_lookup_s)
        self._ready: List[JobResult] = []
        #: Keys whose load failed, by running request.
        self._failed: Dict[str, Set[bytes]] = {}
        #: Keys of running requests that have hints about their next use.
        self._hint_keys: Dict[str, Dict[bytes, None]] = {}
        self._counted: Dict[str, int] = {}
        self._advisor = kvtier.Advisor(self._shared.policy, logger=logger)
        #: Keys that were looked up since the last step, by request, for the advisor.
        self._step_lookups: Dict[str, Dict[int, None]] = {}

    @property
    def store(self) -> kvtier.Store:
        """The store, for `stats`, `set_policy`, `evictions` and `tenants`."""
        return self._open().store

    def set_policy(self, spec: str, tier: int = kvtier.TIER_HOST) -> None:
        """Switches a tier to another policy while jobs run."""
        self._open().set_policy(spec, tier)
        if tier == kvtier.TIER_HOST:
            self._advisor.switch(spec)

    def advice(self, batch: int) -> Optional[kvtier.Advice]:
        """The recommended number of running requests, from the current number. It depends on the
        lookups and stores since the first call."""
        capacity = kvtier.Advisor.capacity_of(self._open().store, self.block_size_bytes)
        return self._advisor.advise(batch, capacity)

    def _open(self) -> SharedStore:
        if self._shared is None:
            raise kvtier.ClosedError("the kvtier tier was shut down", kvtier.abi.KVT_E_CLOSED,
                                     "KVT_E_CLOSED")
        return self._shared

    def _blocks_of(self, request_hints: hints.RequestHints) -> kvtier.Blocks:
        """Access to the blocks for one owner. All owners share the blocks; the owner that stores
        a block first is charged for it."""
        owner = (request_hints.tenant, request_hints.priority, request_hints.ttl_s)
        if owner not in self._blocks_by_owner:
            if len(self._blocks_by_owner) >= _MAX_OWNERS:
                self._evict_owner()
            self._blocks_by_owner[owner] = kvtier.Blocks(
                self._open().store, self._identity, self._part_bytes, tenant=request_hints.tenant,
                priority=request_hints.priority, ttl=request_hints.ttl_s)
        return self._blocks_by_owner[owner]

    def _evict_owner(self) -> None:
        """Closes the access of an owner, the first of those that opened it. Its transfers continue
        and its blocks stay."""
        for owner, blocks in self._blocks_by_owner.items():
            if blocks is not self._blocks:
                del self._blocks_by_owner[owner]
                blocks.close()
                return

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        self._failed.setdefault(req_context.req_id, set())
        self._remote_lookups.begin(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._failed.pop(req_context.req_id, None)
        self._remote_lookups.end(req_context.req_id)
        keys = self._hint_keys.pop(req_context.req_id, None)
        if keys:
            self._hint(self._hints_of(req_context), list(keys))

    def _hints_of(self, req_context: Any) -> hints.RequestHints:
        return hints.of_request(req_context) if self._hints else hints.NONE

    def _remember_for_hint(self, req_context: Any, keys: Iterable[bytes]) -> None:
        """Keeps keys whose chunks get a hint when the request ends."""
        if req_context.req_id in self._failed and self._hints_of(req_context).has_future:
            self._hint_keys.setdefault(req_context.req_id, {}).update(dict.fromkeys(keys))

    def _hint(self, given: hints.RequestHints, keys: List[bytes]) -> None:
        if self._shared is None:
            return
        try:
            blocks = self._blocks_of(given)
            blocks.hint(keys, stop=given.stop, done=given.done,
                        next_use_ns=hints.clock_ns(given.next_use_s))
            if given.keep_s is not None:
                blocks.pin(keys, priority=1 if given.priority is None else given.priority,
                           timeout=given.keep_s)
        except Error as error:
            logger.warning("the store rejected a hint about %d chunks: %s", len(keys), str(error))

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        if self._advisor.observes:
            self._step_lookups.setdefault(req_context.req_id, {})[_advisor_id(key)] = None
        failed = self._failed.get(req_context.req_id)
        if failed is not None and key in failed:
            return LookupResult.MISS
        found = self._remote_lookups.find(self._blocks, key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        if not found:
            return LookupResult.MISS
        self._remember_for_hint(req_context, (key,))
        return LookupResult.HIT

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, True)

    def _submit(self, job: TransferJob, is_load: bool) -> None:
        self._open()
        assert self._pool is not None
        keys: List[bytes] = list(job.keys)
        context = job.req_context
        request_hints = self._hints_of(context)
        try:
            blocks = self._blocks_of(request_hints)
            places = self._pool.at(job.chunk_ids.tolist())
            if is_load:
                op = blocks.get(keys, places, queue=self._queue, tag=job.job_id)
            else:
                op = blocks.put(keys, places, level=self._level, queue=self._queue,
                                tag=job.job_id)
        except Error as error:
            # The engine's scheduler does not handle exceptions here: the job counts as failed.
            # Logged as text, because a kept exception would keep the CPU tier's memory alive.
            logger.warning("a %s of %d chunks could not start and counts as failed: %s",
                           "load" if is_load else "store", len(keys), str(error))
            if is_load:
                self._mark_failed(context.req_id, keys)
            self._ready.append(JobResult(job.job_id, False))
            return
        self._remember_for_hint(context, keys)
        self._jobs[job.job_id] = _Job(op, keys, is_load, context.req_id, request_hints)

    def _mark_failed(self, request: str, keys: List[bytes]) -> None:
        """Makes keys misses for a request, unless it has ended: jobs may outlive it."""
        if request in self._failed:
            self._failed[request].update(keys)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        while self._jobs and self._process(self._queue.poll()):
            pass
        ready, self._ready = self._ready, []
        return ready

    def _process(self, completions: List[kvtier.Completion]) -> bool:
        for completion in completions:
            if completion.events & kvtier.RELEASED and isinstance(completion.tag, int):
                self._finish(completion.tag, completion.ok)
        return bool(completions)

    def _finish(self, job_id: int, ok: bool) -> None:
        job = self._jobs.pop(job_id)
        failed = set() if ok else set(job.op.failed()) or set(range(len(job.keys)))
        if failed:
            logger.warning("%d of %d chunks were not %s: %s", len(failed), len(job.keys),
                           "loaded" if job.is_load else "stored", job.op.error())
        job.op.close()
        succeeded: List[Any] = [key for at, key in enumerate(job.keys) if at not in failed]
        if failed and job.is_load:
            self._mark_failed(job.request, [job.keys[at] for at in failed])
        if succeeded and job.request_hints.has_future and job.request not in self._failed:
            self._hint(job.request_hints, succeeded)  # the request has ended already
        if not job.is_load and self._advisor.observes:
            self._advisor.stored([_advisor_id(key) for key in succeeded])
        if self._events is not None:
            self._events.found(self._blocks, succeeded)
        partly = tuple(succeeded) if failed and succeeded and job.is_load else None
        self._ready.append(JobResult(job_id, not failed, partly,
                                     transfer_bytes=len(succeeded) * self.block_size_bytes))

    def take_events(self) -> Iterable[OffloadingEvent]:
        return () if self._events is None else self._events.take()

    def drain_jobs(self) -> None:
        """Waits until all jobs have ended and none touches the CPU tier's memory. vLLM calls it
        when it resets its caches, and may tell routers that all blocks are gone."""
        if self._events is not None:
            self._events.reset()
        start = time.monotonic()
        while self._jobs:
            if not self._process(self._queue.wait(_WARN_AFTER_S)):
                logger.warning("still waiting for %d jobs of the kvtier tier after %.0f s",
                               len(self._jobs), time.monotonic() - start)

    def on_schedule_end(self, context: Any) -> None:
        lookups, self._step_lookups = self._step_lookups, {}
        for keys in lookups.values():
            self._advisor.looked_up(list(keys))
        self._remote_lookups.send()
        if self._shared is not None:
            self._shared.log_evictions()

    @classmethod
    def build_metric_definitions(cls, extra_config: Dict[str, Any]) -> Dict[str, Any]:
        metrics: Dict[str, Any] = {}
        for name in GAUGES:
            metrics[_PREFIX + name] = OffloadingGaugeMetadata(
                documentation=f"kvtier store: {name}.", labelnames=(TIER_LABEL,))
        for name in COUNTERS:
            metrics[_PREFIX + name] = OffloadingCounterMetadata(
                documentation=f"kvtier store: {name}.", labelnames=(TIER_LABEL,))
        return metrics

    def get_stats(self) -> Any:
        if self._shared is None:
            return None
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
            OffloadingConnectorStats,
        )
        stats, counts = OffloadingConnectorStats(), self._shared.store.stats()
        label = (self.tier_type,)
        for name in GAUGES:
            stats.set_gauge(_PREFIX + name, counts[name], label)
        for name in COUNTERS:
            increase = counts[name] - self._counted.get(name, 0)
            self._counted[name] = counts[name]
            if increase:
                stats.increase_counter(_PREFIX + name, increase, label)
        return stats

    def shutdown(self) -> None:
        """Waits for all jobs, so that started stores complete, and closes the store. It releases
        the CPU tier's memory, which its owner unmaps next."""
        if self._shared is None:
            return
        self.drain_jobs()
        self._shared, self._pool, self._events = None, None, None
        self._remote_lookups.cancel()
        self._advisor.close()
        for blocks in self._blocks_by_owner.values():
            blocks.close()
        self._blocks_by_owner.clear()
        self._queue.close()
        release(self._store_key)

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        """Does nothing: a use of a chunk in the CPU tier is no use of its copy in this tier."""


def _advisor_id(key: bytes) -> int:
    """The 64-bit number that identifies a block to the advisor."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
