"""`KvtierLinker`: transfers pages between device pools and a kvtier store, layer by layer."""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

import kvtier
import torch
from kvtier import _abi
from kvtier._errors import make

from . import _engine

_engine.require("linker")

from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageConfig,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (  # noqa: E402
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (  # noqa: E402
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)
from sglang.srt.runtime_context import get_model, get_parallel  # noqa: E402
from sglang.srt.utils import get_device_module  # noqa: E402

from . import _hints  # noqa: E402
from ._config import LEVELS, Settings, open_store, shard  # noqa: E402
from ._eviction_log import EvictionLog  # noqa: E402
from ._events import KvEvents  # noqa: E402
from ._layers import LayerPages  # noqa: E402
from ._prefixes import loadable_prefixes  # noqa: E402

logger = logging.getLogger("kvtier_sglang")
Transfers = List[PoolTransfer]


@dataclass(frozen=True)
class _Pool:
    pages: LayerPages
    blocks: kvtier.Blocks


class KvtierLinker(UnifiedCacheLinker):
    """The linker of one rank, created by the engine.

    `offload` writes pages from the device pools, after the forward pass. `load` brings them back
    one layer at a time, so that the first layers compute while the others load. Each rank has its
    own store, and writes its own pages, even if they are equal on all ranks.
    """

    def __init__(self, server_args: Any, params: Any, *, components: Any,
                 extra_config: Optional[Dict[str, Any]] = None,
                 forward_stream: Any = None) -> None:
        self.settings = Settings.of(extra_config)
        self.forward_stream = forward_stream
        self.pool_group = resolve_hybrid_device_pool_group(
            kvcache=params.token_to_kv_pool_allocator.get_kvcache(), page_size=params.page_size,
            params=params, components=components)
        self.pools = self.pool_group.entry_map
        pages = {name: LayerPages(entry, str(name)) for name, entry in self.pools.items()}
        config = _rank_config(params, self.pool_group.rank_replicated)
        gpu = next((one.gpu for one in pages.values()), None)
        self._runtime, self._store = open_store(self.settings, config, gpu)
        self._evictions = EvictionLog(self._store)
        self._events, self._page_tokens = KvEvents(self._store, self.settings, config), int(
            params.page_size)
        self._advisor = kvtier.Advisor(
            self.settings.policy or kvtier.Advisor.policy_of(self._store), logger=logger)
        try:
            self._pools = {name: _Pool(one, self._blocks(config, one))
                           for name, one in pages.items()}
        except BaseException:
            self._events.close()
            self._runtime.close()
            raise
        self.layer_done_counter = LayerWiseLoadCounter(self.pool_group.num_layers)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._queued: Dict[str, Transfers] = {}
        self._loads: "queue.Queue[Optional[Tuple[int, List[Transfers], Any]]]" = queue.Queue()
        self._offloads: "queue.Queue[Optional[Tuple[Transfers, List[Any]]]]" = queue.Queue()
        self._results: "queue.Queue[bool]" = queue.Queue()
        self._closed = False
        self._threads = [threading.Thread(target=target, args=(tasks, work), daemon=True,
                                          name=name)
                         for name, target, tasks, work in (
                             ("kvtier-load", _run_tasks, self._loads, self._load),
                             ("kvtier-offload", _run_tasks, self._offloads, self._offload))]
        for thread in self._threads:
            thread.start()

    def _blocks(self, config: HiCacheStorageConfig, pages: LayerPages) -> kvtier.Blocks:
        identity = kvtier.Identity(model=(config.model_name or "").encode(), shard=shard(config),
                                   salt=self.settings.tag.encode() or None, recipe=pages.recipe)
        return kvtier.Blocks(self._store, identity, pages.parts, tenant=self.settings.tenant,
                             priority=self.settings.priority)

    def _require_open(self) -> None:
        if self._closed:
            raise make(_abi.KVT_E_CLOSED, "the kvtier linker is closed")

    def lookup(self, rid: str, transfers: Transfers) -> List[int]:
        """All prefix lengths, in pages, that every pool can serve."""
        self._require_open()
        resolved = self.pool_group.resolve_transfers(transfers)
        keys = next((one.keys for one in transfers if one.name == PoolName.KV), None)
        if not resolved or not keys:
            return []
        names = [key.encode() for key in keys]
        self._advisor.looked_up(names)
        ready = kvtier.Names(names)
        _, _, usable = loadable_prefixes(len(names), resolved,
                                         lambda name: self._pools[PoolName(name)].blocks.exists(
                                             ready, self.settings.linker_remote_lookup_s),
                                         PoolName.KV)
        return usable

    def load(self, rid: str, transfers: Transfers) -> bool:
        """Queues a load for the next batch."""
        self._require_open()
        resolved = self.pool_group.resolve_transfers(transfers, allow_partial=True,
                                                     allow_missing_kv=True)
        if not resolved:
            return False
        if rid in self._queued:
            raise make(_abi.KVT_E_STATE, f"a load of request {rid} is queued already: start or "
                       "cancel it first")
        self._queued[rid] = resolved
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Cancels a load that has not started, and returns whether there was one."""
        return self._queued.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        """Starts the queued loads, and returns the number of their batch; -1 if none is queued."""
        self._require_open()
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        index = int(self.layer_done_counter.update_producer())
        ready = get_device_module().Event()
        ready.record()
        self._loads.put((index, list(queued.values()), ready))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Waits until a batch has ended, and returns whether all pages were loaded."""
        return bool(self.layer_done_counter.finish(counter_index))

    def _load(self, task: Tuple[int, List[Transfers], Any]) -> None:
        index, requests, ready = task
        ops: List[List[kvtier.Op]] = []
        try:
            ready.synchronize()
            # The names are converted once for all layers.
            merged = [(pool, kvtier.Names(names), rows)
                      for pool, names, rows in self._merge(requests)]
            for layer in range(self.pool_group.num_layers):
                ops.append([])
                for pool, names, rows in merged:
                    if layer in pool.pages.layers:
                        ops[-1].append(self._get(pool, names, rows, layer))
            for layer, layer_ops in enumerate(ops):
                for op in layer_ops:
                    op.result()
                self.layer_done_counter.complete(index, layer)
            self._found([key.encode() for transfers in requests for one in transfers
                         if one.name == PoolName.KV for key in one.keys or ()])
        except BaseException as error:
            # The engine may reuse the slots only when the last copy into them has ended.
            for op in [op for layer_ops in ops for op in layer_ops]:
                op.cancel()
                op.wait()
            self.layer_done_counter.fail(index, error)
            logger.warning("a layer-wise load of %d requests failed: %s", len(requests), error)
        finally:
            for op in [op for layer_ops in ops for op in layer_ops]:
                op.close()

    def _get(self, pool: _Pool, names: kvtier.Names, rows: Any, layer: int) -> kvtier.Op:
        first, count = pool.pages.layers[layer]
        places = kvtier.PartAddresses(pool.pages.tables(rows, first, count), pool.pages.device,
                                      pool.pages.entry.kv_buffer)
        return pool.blocks.get(names, places, timeout=self.settings.timeout_s, first_part=first,
                               parts=count)

    def _merge(self, requests: List[Transfers]) -> List[Tuple[_Pool, List[bytes], Any]]:
        """Merges the transfers of several requests into one per pool."""
        found: Dict[Any, Tuple[List[str], List[Any]]] = {}
        for transfers in requests:
            for one in transfers:
                keys, slots = found.setdefault(one.name, ([], []))
                keys.extend(one.keys or ())
                slots.append(one.host_indices)
        merged = []
        for name, (keys, slots) in found.items():
            pool = self._pools[name]
            rows = pool.pages.rows(torch.cat(slots), len(keys))
            merged.append((pool, [key.encode() for key in keys], rows))
        return merged

    def offload(self, transfers: Transfers, session_id: Optional[str] = None) -> bool:
        """Queues pages, which are stored once the forward pass has written them."""
        self._require_open()
        resolved = self.pool_group.resolve_transfers(transfers, allow_partial=True)
        if not resolved:
            return False
        self._offloads.put((resolved, self.record_offload_ready()))
        return True

    def _offload(self, task: Tuple[Transfers, List[Any]]) -> None:
        transfers, ready = task
        ops: List[kvtier.Op] = []
        kv: List[bytes] = []
        ok = False
        try:
            for event in ready:
                event.synchronize()
            for pool, names, rows in self._merge([transfers]):
                places = kvtier.PartAddresses(pool.pages.tables(rows), pool.pages.device,
                                              pool.pages.entry.kv_buffer)
                ops.append(pool.blocks.put(names, places, level=LEVELS[self.settings.level],
                                           timeout=self.settings.timeout_s))
                if pool is self._pools.get(PoolName.KV):
                    kv = names
            for op in ops:
                op.wait()
            errors = [error for error in (op.error() for op in ops) if error is not None]
            ok = not errors
            if errors:
                logger.warning("an offload failed for some pages: %s", errors[0])
            else:
                self._advisor.stored(kv)
                self._found(kv)
            if self.settings.log_evictions:
                self._evictions.log()
        except BaseException as error:
            logger.warning("an offload failed: %s", error)
        finally:
            for op in ops:
                op.wait()
                op.close()
            self._results.put(ok)

    def _found(self, names: List[bytes]) -> None:
        """Notes pages that were stored or loaded, for KV events."""
        if names:
            self._events.found(self._pools[PoolName.KV].blocks, names, [True] * len(names),
                               self._page_tokens)

    def num_completed_offloads(self) -> int:
        """The number of offloads that have ended."""
        return self._results.qsize()

    def pop_completed_offload(self) -> bool:
        """Removes the oldest offload that has ended, and returns whether it succeeded."""
        return self._results.get_nowait()

    def hint(self, keys: Sequence[str], *, stop: str = "", next_use_s: Optional[float] = None,
             done: bool = False, keep_s: Optional[float] = None) -> None:
        """Gives the policies hints about pages, in all pools: why the request that used them
        stopped, the seconds until their next use, that they are not used again, or the seconds
        for which they are pinned."""
        self._require_open()
        hints = _hints.of(stop=stop, next_use_s=next_use_s, done=done, keep_s=keep_s)
        if keys and self.settings.hints:
            _hints.send(hints, [pool.blocks for pool in self._pools.values()],
                        [key.encode() for key in keys])

    def set_policy(self, spec: str, tier: int = kvtier.TIER_HOST) -> None:
        """Switches a tier to another policy. Stored pages stay."""
        self._store.set_policy(tier, spec)
        if tier == kvtier.TIER_HOST:
            self._advisor.switch(spec)

    def advice(self, batch: int) -> Optional[kvtier.Advice]:
        """The recommended number of running requests, from the current number. It depends on the
        lookups and offloads since the first call."""
        self._require_open()
        page = sum(pool.blocks.block_bytes for pool in self._pools.values())
        return self._advisor.advise(batch, kvtier.Advisor.capacity_of(self._store, page))

    def stats(self) -> Dict[str, float]:
        """The store's counters and levels."""
        return self._store.stats()

    def tenants(self) -> List[kvtier.Tenant]:
        """The store's statistics by tenant."""
        return self._store.tenants()

    def evictions(self, tier: int = kvtier.TIER_HOST, most: int = 256) -> List[kvtier.LogEntry]:
        """The last evictions of a tier, with their reasons."""
        return self._store.evictions(tier, most)

    def metrics(self) -> str:
        """The store's statistics in Prometheus' text format."""
        return self._store.metrics()

    def reset(self) -> None:
        """Waits for all transfers, and forgets their results. Stored pages stay."""
        self._queued.clear()
        self._loads.join()
        self._offloads.join()
        while not self._results.empty():
            self._results.get_nowait()
        self.layer_done_counter.reset()

    def close(self) -> None:
        """Waits for all transfers, and closes the store."""
        if self._closed:
            return
        self.reset()
        self._closed = True
        self._loads.put(None)
        self._offloads.put(None)
        for thread in self._threads:
            thread.join()
        if self.settings.log_evictions:
            self._evictions.log()
        self._advisor.close()
        self._events.close()
        for pool in self._pools.values():
            pool.blocks.close()
        self._store.close()
        self._runtime.close()


def _run_tasks(tasks: "queue.Queue[Any]", work: Any) -> None:
    while True:
        task = tasks.get()
        try:
            if task is None:
                return
            work(task)
        finally:
            tasks.task_done()


def _rank_config(params: Any, replicated: bool) -> HiCacheStorageConfig:
    """The configuration of this rank, in the form that storage backends get."""
    rank, size = 0, get_parallel().tp_size
    group = params.attn_tp_cache_group or params.tp_cache_group
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank(group=group)
        size = torch.distributed.get_world_size(group=group)
    return HiCacheStorageConfig(
        tp_rank=rank, tp_size=size, pp_rank=params.pp_rank, pp_size=params.pp_size,
        attn_cp_rank=params.attn_cp_rank, attn_cp_size=params.attn_cp_size,
        is_mla_model=replicated, enable_storage_metrics=False, is_page_first_layout=False,
        model_name=get_model().model_path,
        dp_rank=int(getattr(get_parallel(), "attn_dp_rank", 0) or 0))
