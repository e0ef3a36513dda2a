"""kvtier as the medium of vLLM's OffloadingConnector, without a CPU tier of vLLM's between:

    "spec_name": "KvtierSpec", "spec_module_path": "kvtier_vllm.spec", "host_bytes": "64GiB", ...
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

import kvtier
from kvtier._errors import Error

from . import _engine, caches, identity
from .settings import (
    Settings,
    Shared,
    acquire,
    invalid,
    logger,
    reject_unknown,
    release,
    unsupported,
)

_engine.require()

from vllm.v1.kv_offload.base import (  # noqa: E402
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
    get_offload_group_idx,
)

#: Options of vLLM's own that may stand beside a store's.
_ENGINES = ("spec_name", "spec_module_path", "block_size", "blocks_per_chunk", "canonical_layout",
            "offload_prompt_only", "self_describing_kv_events", "sync_load_budget_bytes")
_TIER = "use TieringOffloadingSpec with the kvtier tier (kvtier_vllm.tier), which serves any " \
        "number of workers"


class KvtierBlocks(LoadStoreSpec):
    """Blocks by their offload keys, and the store that has them."""

    def __init__(self, keys: Sequence[bytes], token: str) -> None:
        self.keys, self.token = list(keys), token

    def __repr__(self) -> str:
        return f"{len(self.keys)} blocks"


class _Medium:
    """The blocks of each KV cache group in one store. The worker opens it, since it knows what
    blocks consist of; the manager finds it."""

    def __init__(self, shared: Shared, spaces: List[kvtier.Blocks]) -> None:
        self.shared, self.spaces = shared, spaces


class _Hold(NamedTuple):
    """Blocks that must not leave: gets whose memory never becomes ready."""

    ready: kvtier.Event
    ops: List[kvtier.Op]

    def let_go(self) -> None:
        self.ready.close()
        for op in self.ops:
            op.wait()
            op.close()


_media: Dict[str, _Medium] = {}


def _by_group(keys: Iterable[Any]) -> Dict[int, List[bytes]]:
    groups: Dict[int, List[bytes]] = {}
    for key in keys:
        groups.setdefault(get_offload_group_idx(key), []).append(key)
    return groups


class KvtierManager(OffloadingManager):
    """The scheduler's side. What is stored is the store's to say; what is underway is noted here.

    A load of this seam that fails ends vLLM. So a block is a hit once it is in memory, where its
    bytes have been checked, and is held from `prepare_load` to `complete_load`. What is on disk
    alone is fetched for all requests of a step at once."""

    def __init__(self, key: str, events: bool) -> None:
        self._key = key
        self._storing: Set[bytes] = set()
        self._wanted: Dict[bytes, None] = {}
        self._coming: Dict[bytes, kvtier.Op] = {}
        self._fetches: Dict[kvtier.Op, List[bytes]] = {}
        self._lost: Dict[str, Set[bytes]] = {}
        self._holds: Dict[str, _Hold] = {}
        self._events: Optional[List[OffloadingEvent]] = [] if events else None

    @property
    def _medium(self) -> _Medium:
        if self._key not in _media:
            raise kvtier.StateError(
                "the worker is not in this process, or has no KV caches: a store belongs to one "
                f"process; {_TIER}", kvtier.abi.KVT_E_STATE, "KVT_E_STATE")
        return _media[self._key]

    @property
    def store(self) -> kvtier.Store:
        """The store, for `stats`, `set_policy`, `evictions` and `tenants`."""
        return self._medium.shared.store

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._lost.pop(req_context.req_id, None)

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        if key in self._storing:
            return LookupResult.HIT_PENDING
        if key in self._wanted:
            return LookupResult.RETRY
        op = self._coming.get(key)
        if op is not None:
            if not op.info().released:
                return LookupResult.RETRY
            self._arrived(op, req_context)
        if key in self._lost.get(req_context.req_id, ()):
            return LookupResult.MISS
        found = self._medium.spaces[get_offload_group_idx(key)].exists([key])[0]
        if not found:
            return LookupResult.MISS
        if found & (1 << kvtier.TIER_HOST | 1 << kvtier.TIER_DEVICE):
            return LookupResult.HIT
        self._wanted[key] = None
        return LookupResult.RETRY

    def _arrived(self, op: kvtier.Op, req_context: Any) -> None:
        keys = self._fetches.pop(op)
        lost = {keys[at] for at in op.failed()}
        if lost:
            logger.warning("%d of %d blocks did not come from disk: %s", len(lost), len(keys),
                           op.error())
            self._lost.setdefault(req_context.req_id, set()).update(lost)
        for key in keys:
            del self._coming[key]
        op.close()

    def on_schedule_end(self, context: Any) -> None:
        wanted, self._wanted = self._wanted, {}
        for group, keys in _by_group(wanted).items():
            try:
                op = self._medium.spaces[group].prefetch(keys)
            except Error as error:
                logger.warning("%d blocks are not fetched now: %s", len(keys), str(error))
                continue
            self._fetches[op] = keys
            self._coming.update(dict.fromkeys(keys, op))
        if self._key in _media:
            _media[self._key].shared.log_evictions()

    def has_pending_work(self) -> bool:
        return bool(self._wanted) or any(not op.info().released for op in self._fetches)

    def prepare_load(self, keys: Collection[Any], req_context: Any) -> LoadStoreSpec:
        medium = self._medium
        before = self._holds.pop(req_context.req_id, None)
        if before is not None:
            before.let_go()
        hold = self._holds[req_context.req_id] = _Hold(kvtier.Event(), [])
        for group, some in _by_group(keys).items():
            blocks = medium.spaces[group]
            # Nothing is ever written there, as the event is never signalled. (Two places in
            # turn, because a target twice in a row is taken for a mistake.)
            pool = kvtier.Pool(bytearray(2 * blocks.block_bytes), blocks.block_bytes)
            turns = [at % 2 for at in range(len(some))]
            hold.ops.append(blocks.get(some, pool.at(turns), ready=hold.ready))
        return KvtierBlocks(list(keys), medium.shared.token)

    def complete_load(self, keys: Collection[Any], req_context: Any) -> None:
        hold = self._holds.pop(req_context.req_id, None)
        if hold is not None:
            hold.let_go()

    def prepare_store(self, keys: Collection[Any], req_context: Any
                      ) -> Optional[PrepareStoreOutput]:
        medium = self._medium
        there: Set[bytes] = set()
        for group, some in _by_group(keys).items():
            found = medium.spaces[group].exists(some)
            there.update(key for key, one in zip(some, found) if one)
        new = [key for key in keys if key not in there and key not in self._storing]
        self._storing.update(new)
        return PrepareStoreOutput(new, KvtierBlocks(new, medium.shared.token), [])

    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True
                       ) -> None:
        self._storing.difference_update(keys)
        if self._events is not None and success and keys:
            stored: List[Any] = [key for group, some in _by_group(keys).items() for key, one in zip(
                some, self._medium.spaces[group].exists(some)) if one]
            self._events.append(OffloadingEvent(keys=stored, medium=Medium.CPU, removed=False))

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._events:
            events, self._events = self._events, []
            return events
        return ()

    def reset_cache(self) -> None:
        for hold in self._holds.values():
            hold.let_go()
        self._holds.clear()
        self._storing.clear()
        self._wanted.clear()
        if self._key in _media:
            for blocks in _media[self._key].spaces:
                report = blocks.clear()
                if report.held_chunks or report.moving_chunks:
                    logger.warning("not all could be forgotten: %s", report)

    def shutdown(self) -> None:
        for hold in self._holds.values():
            hold.let_go()
        self._holds.clear()
        for op in self._fetches:
            op.cancel()
            op.wait()
            op.close()
        self._fetches.clear()
        self._coming.clear()


class _Place(NamedTuple):
    """A tensor of blocks."""

    address: int
    stride: int
    blocks: int
    nbytes: int


class _Job(NamedTuple):
    """A job underway: an op for each group."""

    ops: List[kvtier.Op]
    is_load: bool
    nbytes: int
    begun: float


class KvtierWorker(OffloadingWorker):
    """The worker's side: blocks go from the engine's caches to the store and back, one native
    call for each KV cache group of a job."""

    def __init__(self, key: str, settings: Settings, config: Any, kv_caches: Any) -> None:
        self._key, self._settings = key, settings
        self._tensors = [one.tensor for one in kv_caches.tensors]
        kinds = {(tensor.device.type, tensor.device.index) for tensor in self._tensors}
        if len(kinds) != 1 or next(iter(kinds))[0] not in ("cpu", "cuda"):
            raise unsupported(f"KV caches on {sorted(map(str, kinds))}: one CUDA device, or the "
                              "processor's memory, can be used")
        kind, ordinal = next(iter(kinds))
        self._on_device = kind == "cuda"
        self._groups: List[List[_Place]] = []
        for refs in kv_caches.group_data_refs:
            places = []
            for ref in refs:
                one = self._tensors[ref.tensor_idx]
                each = one.element_size()
                if one[0].numel() and not one[0].is_contiguous():
                    raise unsupported("a block of a KV cache has gaps")
                places.append(_Place(one.data_ptr(), one.stride(0) * each, one.shape[0],
                                     ref.page_size_bytes))
                if places[-1].nbytes > one[0].numel() * each:
                    raise invalid(f"a page of {places[-1].nbytes} bytes in blocks of "
                                  f"{one[0].numel() * each}")
            self._groups.append(places)
        self._shared: Optional[Shared] = acquire(key, settings,
                                                 (ordinal or 0) if self._on_device else None)
        self._spaces: List[kvtier.Blocks] = []
        for places in self._groups:
            parts = [place.nbytes for place in places]
            same = identity.of_offloading(config, settings.weights, "spec", parts)
            self._spaces.append(kvtier.Blocks(self._shared.store, same, parts))
        _media[key] = _Medium(self._shared, self._spaces)
        self._jobs: Dict[int, _Job] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
                     ) -> bool:
        return self._submit(job_id, dst_spec, src_spec, False)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec,
                    expedited: bool = False) -> bool:
        return self._submit(job_id, src_spec, dst_spec, True)

    def _submit(self, job_id: int, named: Any, placed: Any, is_load: bool) -> bool:
        shared = self._shared
        if shared is None or named.token != shared.token:
            raise kvtier.StateError(f"these blocks are in the store of another process; {_TIER}",
                                    kvtier.abi.KVT_E_STATE, "KVT_E_STATE")
        after, moves = caches.stream_event(shared.device), self._matched(named, placed)
        ops: List[kvtier.Op] = []
        self._jobs[job_id] = _Job(ops, is_load, sum(
            len(keys) * self._spaces[group].block_bytes for group, keys, _ in moves),
            time.monotonic())
        for group, keys, ids in moves:
            try:
                ops.append(self._move(group, keys, ids, is_load, after))
            except Error as error:
                if is_load:
                    self.wait({job_id})
                    del self._jobs[job_id]
                    raise
                logger.warning("%d blocks are not stored: %s", len(keys), str(error))
        return True

    def _matched(self, named: Any, placed: Any) -> List[Tuple[int, List[bytes], Any]]:
        """Groups that move, their keys, and the blocks in which those are."""
        groups, first, moves = _by_group(named.keys), 0, []
        for group, count in enumerate(placed.group_sizes):
            ids, keys = placed.block_ids[first: first + count], groups.get(group, [])
            first += count
            if len(keys) != count:
                raise invalid(f"{len(keys)} keys for {count} blocks of group {group}")
            if not count:
                continue
            least, most = int(ids.min()), int(ids.max())
            if least < 0 or most >= min(place.blocks for place in self._groups[group]):
                raise invalid(f"blocks {least} to {most} of a cache of "
                              f"{self._groups[group][0].blocks}")
            moves.append((group, keys, ids))
        return moves

    def _move(self, group: int, keys: List[bytes], ids: Any, is_load: bool,
              after: Any) -> kvtier.Op:
        places, blocks = self._groups[group], self._spaces[group]
        numbers = ids.astype("uint64")
        tables = [place.address + numbers * place.stride for place in places]
        where = kvtier.Each(tables, device=self._on_device, kept=self._tensors)
        if is_load:
            return blocks.get(keys, where, after=after)
        level = self._settings.put_level() if self._settings.level else kvtier.LEVEL_RAM
        return blocks.put(keys, where, level=level, after=after)

    def get_finished(self) -> List[TransferResult]:
        done = [job_id for job_id, job in self._jobs.items()
                if all(op.info().released for op in job.ops)]
        return [self._result(job_id) for job_id in done]

    def _result(self, job_id: int) -> TransferResult:
        job = self._jobs.pop(job_id)
        wrong = None
        for op in job.ops:
            wrong = wrong or op.error()
            op.close()
        if wrong is not None:
            logger.log(40 if job.is_load else 30, "job %d: not all blocks were %s: %s", job_id,
                       "loaded" if job.is_load else "stored", wrong)
        # What was not stored is a miss, which the store itself will say; what was not loaded
        # must never be computed with.
        return TransferResult(job_id, wrong is None or not job.is_load, job.nbytes,
                              time.monotonic() - job.begun)

    def wait(self, job_ids: Set[int]) -> None:
        for job_id in job_ids:
            job = self._jobs.get(job_id)
            for op in job.ops if job else ():
                op.wait()

    def shutdown(self) -> None:
        if self._shared is None:
            return
        self.wait(set(self._jobs))
        for job_id in list(self._jobs):
            self._result(job_id)
        self._shared = None
        _media.pop(self._key, None)
        for blocks in self._spaces:
            blocks.close()
        release(self._key)


class KvtierSpec(OffloadingSpec):
    """A kvtier store as the medium of vLLM's OffloadingConnector, for engines whose scheduler
    and only worker are one process."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        own = {name: value for name, value in self.extra_config.items() if name not in _ENGINES}
        reject_unknown(own, [*Settings.names(), *_ENGINES])
        self._settings = Settings.take(own)
        if config.parallel.world_size != 1:
            raise unsupported(f"{config.parallel.world_size} workers have no common store: {_TIER}")
        if self.blocks_per_chunk != 1 or config.canonical_layout:
            raise unsupported("chunks of several blocks, and the canonical layout, are not taken: "
                              "leave block_size, blocks_per_chunk and canonical_layout away")
        self._key = f"spec:{config.engine_id}:{os.getpid()}"
        self._manager: Optional[KvtierManager] = None
        self._worker: Optional[KvtierWorker] = None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            self._manager = KvtierManager(self._key,
                                          self.kv_events_config.enable_kv_cache_events)
        return self._manager

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            self._worker = KvtierWorker(self._key, self._settings, self.config, kv_caches)
        return self._worker
