"""kvtier as the medium of vLLM's OffloadingConnector, without a CPU tier of vLLM's between:

    "spec_name": "KvtierSpec", "spec_module_path": "kvtier_vllm.spec", "host_bytes": "64GiB", ...
"""

from __future__ import annotations

import os
import time
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
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    TransferResult,
)

from .spec_manager import (  # noqa: E402
    TIER,
    KvtierBlocks,
    KvtierManager,
    SharedMedium,
    by_group,
    media,
)

__all__ = ["KvtierBlocks", "KvtierManager", "KvtierSpec", "KvtierWorker"]

#: Options of vLLM's own that may stand beside a store's.
_ENGINES = ("spec_name", "spec_module_path", "block_size", "blocks_per_chunk", "canonical_layout",
            "offload_prompt_only", "self_describing_kv_events", "sync_load_budget_bytes")


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
        self._config = config
        # Keys name a group by its number among all; jobs have those that are offloaded.
        self._ids = [group.group_id for group in config.groups]
        if len(self._ids) != len(self._groups):
            raise invalid(f"{len(self._groups)} groups of KV caches for {len(self._ids)}")
        self._medium = media[key] = SharedMedium(self._shared, self._make)
        self._jobs: Dict[int, _Job] = {}

    def _make(self, again: str) -> Dict[int, kvtier.Blocks]:
        """The blocks of each group, as they are named since the last reset."""
        assert self._shared is not None
        spaces = {}
        for group, places in zip(self._ids, self._groups):
            parts = [place.nbytes for place in places]
            same = identity.of_offloading(self._config, self._settings.weights, "spec", parts,
                                          again)
            spaces[group] = kvtier.Blocks(self._shared.store, same, parts)
        return spaces

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
                     ) -> bool:
        return self._submit(job_id, dst_spec, src_spec, False)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec,
                    expedited: bool = False) -> bool:
        return self._submit(job_id, src_spec, dst_spec, True)

    def _submit(self, job_id: int, named: Any, placed: Any, is_load: bool) -> bool:
        shared = self._shared
        if shared is None or named.token.partition(":")[0] != shared.token:
            raise kvtier.StateError(f"these blocks are in the store of another process; {TIER}",
                                    kvtier.abi.KVT_E_STATE, "KVT_E_STATE")
        if named.token != self._medium.token:
            # From before a reset: KV of other weights, it may be, which must not be stored.
            if is_load:
                raise kvtier.StateError("these blocks were forgotten by reset_cache",
                                        kvtier.abi.KVT_E_STATE, "KVT_E_STATE")
            self._jobs[job_id] = _Job([], False, 0, time.monotonic())
            return True
        after, moves = caches.stream_event(shared.device), self._matched(named, placed)
        ops: List[kvtier.Op] = []
        self._jobs[job_id] = _Job(ops, is_load, sum(
            len(keys) * self._medium.spaces[self._ids[group]].block_bytes for group, keys, _ in moves),
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
        groups, first, moves = by_group(named.keys), 0, []
        for group, count in enumerate(placed.group_sizes):
            ids, keys = placed.block_ids[first: first + count], groups.get(
                self._ids[group], [])
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
        places, blocks = self._groups[group], self._medium.spaces[self._ids[group]]
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
        media.pop(self._key, None)
        self._medium.close()
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
            raise unsupported(f"{config.parallel.world_size} workers have no common store: {TIER}")
        if self.blocks_per_chunk != 1 or config.canonical_layout:
            raise unsupported("chunks of several blocks, and the canonical layout, are not taken: "
                              "leave block_size, blocks_per_chunk and canonical_layout away")
        self._key = f"spec:{config.engine_id}:{os.getpid()}"
        self._manager: Optional[KvtierManager] = None
        self._worker: Optional[KvtierWorker] = None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            self._manager = KvtierManager(self._key,
                                          self.kv_events_config.enable_kv_cache_events,
                                          self._settings.ask_s)
        return self._manager

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            self._worker = KvtierWorker(self._key, self._settings, self.config, kv_caches)
        return self._worker
