"""kvtier below vLLM's CPU tier: `TieringOffloadingSpec` with

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
from .asks import Asks
from .settings import Settings, Shared, acquire, flag, invalid, logger, reject_unknown, release

_engine.require()

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
    TIER_LABEL,
    JobResult,
    SecondaryTierManager,
    TransferJob,
)

_PREFIX = "vllm:kv_offload_kvtier_"
#: What of `Store.stats()` is a level, and what only grows.
GAUGES = ("host_used_bytes", "host_limit_bytes", "disk_used_bytes", "disk_limit_bytes", "chunks",
          "moves")
COUNTERS = ("host_hit_cells", "disk_hit_cells", "missed_cells", "corrupt_cells", "evicted_chunks",
            "dropped_chunks", "written_bytes", "loaded_bytes", "failed_writes", "failed_reads")
_OWN = ("locality", "enable_kv_events", "name", "hints")
_MOST_OWNERS = 64
_WARN_AFTER_S = 5.0


class _Job(NamedTuple):
    """A job underway."""

    op: kvtier.Op
    keys: List[bytes]
    is_load: bool
    request: str
    told: hints.Told


class KvtierTier(SecondaryTierManager):
    """A tier of vLLM's offloading in a kvtier store: memory, disk and what is below them. A row
    of the CPU tier is a block under its offload key; jobs are one native call each, and copy
    between the engine's memory and the store's, nothing else.

    Lookups ask a table in memory, so they are answered at once, unless the store has a remote:
    what is not here is asked for there, and looked up again in a later step. While a job is
    underway its rows are the library's; it is told of as finished only when they are the engine's
    again. A row that does not come is reported as failed, and is a miss for that request from
    then on.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str,
                 backpressure_detector: Any = None, **options: Any) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        reject_unknown(options, [*Settings.names(), *_OWN])
        settings = Settings.take(options)
        self._hints, has_events = flag(options, "hints", True), flag(
            options, "enable_kv_events", False)
        where = options.get("locality")
        self.locality = None if where is None else Locality(where)
        self._events: Optional[List[OffloadingEvent]] = None
        if has_events:
            if offloading_spec.kv_events_config.enable_kv_cache_events:
                self._events = []
            else:
                logger.warning("enable_kv_events of tier %s has no effect: KV cache events are "
                               "off (kv_events_config)", tier_type)
        row = self.block_size_bytes
        if row <= 0 or not primary_kv_view.c_contiguous or primary_kv_view.readonly:
            raise invalid(f"the CPU tier's memory has rows of {row} bytes, and must be writable "
                          "and without gaps")
        self._level = settings.put_level()
        self._parts = identity.parts(row)
        self._identity = identity.of_offloading(offloading_spec.config, settings.weights, "tier",
                                                self._parts)
        self._store_key = f"tier:{options.get('name', '')}:{settings.disk_path or id(self)}"
        self._shared: Optional[Shared] = acquire(self._store_key, settings)
        try:
            self._queue = self._shared.runtime.queue()
            self._pool: Optional[kvtier.Pool] = kvtier.Pool(primary_kv_view, row)
            self._owners: Dict[Tuple[int, Optional[int]], kvtier.Blocks] = {}
            self._blocks = self._owned_by(hints.NOTHING)
        except BaseException:
            release(self._store_key)
            raise
        self._jobs: Dict[int, _Job] = {}
        self._asks = Asks(settings.ask_s)
        self._ready: List[JobResult] = []
        #: What did not come, for each request there is.
        self._failed: Dict[str, Set[bytes]] = {}
        #: Chunks of requests that say something of their future.
        self._used: Dict[str, Dict[bytes, None]] = {}
        self._counted: Dict[str, int] = {}
        self._advisor = kvtier.Advisor(self._shared.policy, logger=logger)
        #: What was asked for since the last step, by request.
        self._asked: Dict[str, Dict[int, None]] = {}

    @property
    def store(self) -> kvtier.Store:
        """The store, for `stats`, `set_policy`, `evictions` and `tenants`."""
        return self._open().store

    def set_policy(self, spec: str, tier: int = kvtier.TIER_HOST) -> None:
        """Goes on with another policy, while everything runs."""
        self._open().set_policy(spec, tier)
        if tier == kvtier.TIER_HOST:
            self._advisor.switch(spec)

    def advice(self, batch: int) -> Optional[kvtier.Advice]:
        """How many requests to run, from the number that run now. It goes by lookups and stores
        since it was first asked for."""
        room = kvtier.Advisor.room_of(self._open().store, self.block_size_bytes)
        return self._advisor.advise(batch, room)

    def _open(self) -> Shared:
        if self._shared is None:
            raise kvtier.ClosedError("this tier was shut down", kvtier.abi.KVT_E_CLOSED,
                                     "KVT_E_CLOSED")
        return self._shared

    def _owned_by(self, told: hints.Told) -> kvtier.Blocks:
        """The same blocks for all; whoever stores one first pays for it."""
        who = (told.tenant, told.priority)
        if who not in self._owners:
            if len(self._owners) >= _MOST_OWNERS:
                return self._blocks
            self._owners[who] = kvtier.Blocks(
                self._open().store, self._identity, self._parts, tenant=told.tenant,
                priority=told.priority)
        return self._owners[who]

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        self._failed.setdefault(req_context.req_id, set())
        self._asks.begin(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._failed.pop(req_context.req_id, None)
        self._asks.end(req_context.req_id)
        used = self._used.pop(req_context.req_id, None)
        if used:
            self._hint(self._told(req_context), list(used))

    def _told(self, req_context: Any) -> hints.Told:
        return hints.of(req_context) if self._hints else hints.NOTHING

    def _note(self, req_context: Any, keys: Iterable[bytes]) -> None:
        """Chunks that are to be hinted when the request has ended."""
        if req_context.req_id in self._failed and self._told(req_context).has_future:
            self._used.setdefault(req_context.req_id, {}).update(dict.fromkeys(keys))

    def _hint(self, told: hints.Told, keys: List[bytes]) -> None:
        if self._shared is None:
            return
        try:
            self._owned_by(told).hint(keys, stop=told.stop, done=told.done,
                                      next_use_ns=hints.moment(told.next_use_s))
        except Error as error:
            logger.warning("a hint of %d chunks was refused: %s", len(keys), str(error))

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        if self._advisor.learns:
            self._asked.setdefault(req_context.req_id, {})[_number(key)] = None
        failed = self._failed.get(req_context.req_id)
        if failed is not None and key in failed:
            return LookupResult.MISS
        found = self._asks.find(self._blocks, key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        if not found:
            return LookupResult.MISS
        self._note(req_context, (key,))
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
        told = self._told(context)
        try:
            blocks = self._owned_by(told)
            places = self._pool.at(job.chunk_ids.tolist())
            if is_load:
                op = blocks.get(keys, places, queue=self._queue, tag=job.job_id)
            else:
                op = blocks.put(keys, places, level=self._level, queue=self._queue,
                                tag=job.job_id)
        except Error as error:
            # The engine's scheduler has no place for exceptions here: the job has failed.
            # As text: whoever kept the exception would keep the CPU tier's memory with it.
            logger.warning("a job of %d chunks was refused: %s", len(keys), str(error))
            if is_load:
                self._lose(context.req_id, keys)
            self._ready.append(JobResult(job.job_id, False))
            return
        self._note(context, keys)
        self._jobs[job.job_id] = _Job(op, keys, is_load, context.req_id, told)

    def _lose(self, request: str, keys: List[bytes]) -> None:
        """They are misses for a request; jobs may end after theirs has."""
        if request in self._failed:
            self._failed[request].update(keys)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        while self._jobs and self._take(self._queue.poll()):
            pass
        ready, self._ready = self._ready, []
        return ready

    def _take(self, told: List[kvtier.Completion]) -> bool:
        for one in told:
            if one.events & kvtier.RELEASED and isinstance(one.tag, int):
                self._finish(one.tag, one.ok)
        return bool(told)

    def _finish(self, job_id: int, ok: bool) -> None:
        job = self._jobs.pop(job_id)
        bad = set() if ok else set(job.op.failed()) or set(range(len(job.keys)))
        if bad:
            logger.warning("%d of %d chunks were not %s: %s", len(bad), len(job.keys),
                           "loaded" if job.is_load else "stored", job.op.error())
        job.op.close()
        good: List[Any] = [key for at, key in enumerate(job.keys) if at not in bad]
        if bad and job.is_load:
            self._lose(job.request, [job.keys[at] for at in bad])
        if good and job.told.has_future and job.request not in self._failed:
            self._hint(job.told, good)  # its request had ended before
        if not job.is_load and self._advisor.learns:
            self._advisor.stored([_number(key) for key in good])
        if self._events is not None and good and not job.is_load:
            self._events.append(OffloadingEvent(keys=good, medium=self.medium, removed=False,
                                                locality=self.locality))
        partly = tuple(good) if bad and good and job.is_load else None
        self._ready.append(JobResult(job_id, not bad, partly,
                                     transfer_bytes=len(good) * self.block_size_bytes))

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._events:
            events, self._events = self._events, []
            return events
        return ()

    def drain_jobs(self) -> None:
        """Waits until no job touches the CPU tier's memory. None is cut short."""
        begun = time.monotonic()
        while self._jobs:
            if not self._take(self._queue.wait(_WARN_AFTER_S)):
                logger.warning("waiting for %d jobs of the kvtier tier since %.0f s",
                               len(self._jobs), time.monotonic() - begun)

    def on_schedule_end(self, context: Any) -> None:
        asked, self._asked = self._asked, {}
        for keys in asked.values():
            self._advisor.looked_up(list(keys))
        self._asks.send()
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
        told, now, label = OffloadingConnectorStats(), self._shared.store.stats(), (self.tier_type,)
        for name in GAUGES:
            told.set_gauge(_PREFIX + name, now[name], label)
        for name in COUNTERS:
            more = now[name] - self._counted.get(name, 0)
            self._counted[name] = now[name]
            if more:
                told.increase_counter(_PREFIX + name, more, label)
        return told

    def shutdown(self) -> None:
        """Lets jobs underway end, so that what was begun is stored, and lets go of the CPU
        tier's memory: its owner unmaps it next."""
        if self._shared is None:
            return
        self.drain_jobs()
        self._shared, self._pool = None, None
        self._asks.forget()
        self._advisor.close()
        for blocks in self._owners.values():
            blocks.close()
        self._owners.clear()
        self._queue.close()
        release(self._store_key)

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        """Nothing: what the CPU tier has is not used from here, and policies go by loads."""


def _number(key: bytes) -> int:
    """A block as the advisor knows it."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
