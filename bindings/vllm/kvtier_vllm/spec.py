"""An offloading spec that makes a kvtier store the medium of vLLM's OffloadingConnector, without
vLLM's CPU tier:

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
    SharedStore,
    acquire,
    invalid,
    logger,
    reject_unknown,
    release,
    unsupported,
)

_engine.require("spec")

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

#: vLLM's own options, which may stand beside those of a store.
_ENGINE_OPTIONS = ("spec_name", "spec_module_path", "block_size", "blocks_per_chunk",
                   "canonical_layout", "offload_prompt_only", "self_describing_kv_events",
                   "sync_load_budget_bytes")


class _CacheTensor(NamedTuple):
    """A KV cache tensor of blocks, by address. `nbytes` is the used part of a block."""

    address: int
    stride: int
    blocks: int
    nbytes: int


class _Job(NamedTuple):
    """A load or store that is underway, with one op per KV cache group."""

    ops: List[kvtier.Op]
    is_load: bool
    nbytes: int
    start: float


class KvtierWorker(OffloadingWorker):
    """The worker side: transfers blocks between the engine's caches and the store, with one
    native call per KV cache group of a job."""

    def __init__(self, key: str, settings: Settings, config: Any, kv_caches: Any) -> None:
        self._key, self._settings = key, settings
        self._tensors = [cache.tensor for cache in kv_caches.tensors]
        kinds = {(tensor.device.type, tensor.device.index) for tensor in self._tensors}
        if len(kinds) != 1 or next(iter(kinds))[0] not in ("cpu", "cuda"):
            raise unsupported(f"KV caches on {sorted(map(str, kinds))} are not supported: they "
                              "must all be on one CUDA device or in host memory")
        kind, ordinal = next(iter(kinds))
        self._on_device = kind == "cuda"
        self._groups: List[List[_CacheTensor]] = []
        for refs in kv_caches.group_data_refs:
            tensors = []
            for ref in refs:
                tensor = self._tensors[ref.tensor_idx]
                each = tensor.element_size()
                if tensor[0].numel() and not tensor[0].is_contiguous():
                    raise unsupported(f"a block of a KV cache has gaps: {TIER}")
                tensors.append(_CacheTensor(tensor.data_ptr(), tensor.stride(0) * each,
                                            tensor.shape[0], ref.page_size_bytes))
                if tensors[-1].nbytes > tensor[0].numel() * each:
                    raise invalid(f"a page of {tensors[-1].nbytes} bytes does not fit into a block "
                                  f"of {tensor[0].numel() * each} bytes")
            self._groups.append(tensors)
        self._shared: Optional[SharedStore] = acquire(
            key, settings, (ordinal or 0) if self._on_device else None)
        self._config = config
        # Keys number a group among all groups; jobs list only the groups that are offloaded.
        self._ids = [group.group_id for group in config.groups]
        if len(self._ids) != len(self._groups):
            raise invalid(f"{len(self._groups)} groups of KV caches were registered, but the "
                          f"configuration has {len(self._ids)}")
        self._medium = media[key] = SharedMedium(self._shared, self._open_blocks)
        self._jobs: Dict[int, _Job] = {}

    def _open_blocks(self, epoch: str) -> Dict[int, kvtier.Blocks]:
        """Opens the blocks of each group. `epoch` is part of their identity since a reset."""
        assert self._shared is not None
        blocks = {}
        for group, tensors in zip(self._ids, self._groups):
            parts = [tensor.nbytes for tensor in tensors]
            kv_identity = identity.for_offloading(self._config, self._settings.weights, "spec",
                                                  parts, epoch)
            blocks[group] = kvtier.Blocks(self._shared.store, kv_identity, parts)
        return blocks

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
                     ) -> bool:
        return self._submit(job_id, dst_spec, src_spec, False)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec,
                    expedited: bool = False) -> bool:
        return self._submit(job_id, src_spec, dst_spec, True)

    def _submit(self, job_id: int, store_spec: Any, gpu_spec: Any, is_load: bool) -> bool:
        shared = self._shared
        if shared is None or store_spec.token.partition(":")[0] != shared.token:
            raise kvtier.StateError(f"the job's blocks are in the store of another process: {TIER}",
                                    kvtier.abi.KVT_E_STATE, "KVT_E_STATE")
        if store_spec.token != self._medium.token:
            # The job was prepared before a reset. Its KV may be of other weights: not stored.
            if is_load:
                raise kvtier.StateError("the job was prepared before reset_cache, and its blocks "
                                        "cannot be loaded: look them up again",
                                        kvtier.abi.KVT_E_STATE, "KVT_E_STATE")
            self._jobs[job_id] = _Job([], False, 0, time.monotonic())
            return True
        after, transfers = caches.stream_event(shared.device), self._match(store_spec, gpu_spec)
        ops: List[kvtier.Op] = []
        nbytes = sum(len(keys) * self._medium.blocks[self._ids[group]].block_bytes
                     for group, keys, _ in transfers)
        self._jobs[job_id] = _Job(ops, is_load, nbytes, time.monotonic())
        for group, keys, ids in transfers:
            try:
                ops.append(self._transfer(group, keys, ids, is_load, after))
            except Error as error:
                if is_load:
                    self.wait({job_id})
                    del self._jobs[job_id]
                    raise
                logger.warning("a store of %d blocks could not start; they are not stored: %s",
                               len(keys), str(error))
        return True

    def _match(self, store_spec: Any, gpu_spec: Any) -> List[Tuple[int, List[bytes], Any]]:
        """The groups of a job, with the keys and the block numbers of each."""
        groups, first, transfers = by_group(store_spec.keys), 0, []
        for group, count in enumerate(gpu_spec.group_sizes):
            ids, keys = gpu_spec.block_ids[first: first + count], groups.get(
                self._ids[group], [])
            first += count
            if len(keys) != count:
                raise invalid(f"the job has {len(keys)} keys for {count} blocks of group {group}; "
                              "the numbers must be equal")
            if not count:
                continue
            lowest, highest = int(ids.min()), int(ids.max())
            if lowest < 0 or highest >= min(tensor.blocks for tensor in self._groups[group]):
                raise invalid(f"the job has blocks {lowest} to {highest}, but the cache has only "
                              f"{self._groups[group][0].blocks} blocks")
            transfers.append((group, keys, ids))
        return transfers

    def _transfer(self, group: int, keys: List[bytes], ids: Any, is_load: bool,
                  after: Any) -> kvtier.Op:
        tensors, blocks = self._groups[group], self._medium.blocks[self._ids[group]]
        numbers = ids.astype("uint64")
        tables = [tensor.address + numbers * tensor.stride for tensor in tensors]
        where = kvtier.PartAddresses(tables, device=self._on_device, kept=self._tensors)
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
        error = None
        for op in job.ops:
            error = error or op.error()
            op.close()
        if error is not None:
            logger.log(40 if job.is_load else 30, "job %d: not all blocks were %s: %s", job_id,
                       "loaded" if job.is_load else "stored", error)
        # A block that was not stored is just a miss later. A block that was not loaded must fail
        # the job, because the engine would compute with it.
        return TransferResult(job_id, error is None or not job.is_load, job.nbytes,
                              time.monotonic() - job.start)

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
    """Makes a kvtier store the medium of vLLM's OffloadingConnector. The engine's scheduler and
    its only worker must share a process."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        store_options = {name: value for name, value in self.extra_config.items()
                         if name not in _ENGINE_OPTIONS}
        reject_unknown(store_options, [*Settings.names(), *_ENGINE_OPTIONS])
        self._settings = Settings.from_config(store_options)
        if config.parallel.world_size != 1:
            raise unsupported(f"{config.parallel.world_size} workers cannot share a store, which "
                              f"belongs to one process: {TIER}")
        if self.blocks_per_chunk != 1 or config.canonical_layout:
            raise unsupported(f"blocks_per_chunk={self.blocks_per_chunk} with canonical_layout="
                              f"{config.canonical_layout} is not supported: leave out block_size, "
                              "blocks_per_chunk and canonical_layout")
        self._key = f"spec:{config.engine_id}:{os.getpid()}"
        self._manager: Optional[KvtierManager] = None
        self._worker: Optional[KvtierWorker] = None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            if self._key not in media:
                raise unsupported(
                    "the worker is in another process, and a store belongs to one: on GPUs start "
                    f"vLLM with --distributed-executor-backend uni, or {TIER}; on a processor use "
                    "the connector, since vLLM's server has its worker elsewhere there")
            self._manager = KvtierManager(self._key,
                                          self.kv_events_config.enable_kv_cache_events,
                                          self._settings.remote_lookup_s)
        return self._manager

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            self._worker = KvtierWorker(self._key, self._settings, self.config, kv_caches)
        return self._worker
