"""`KvtierStorage`: a HiCache storage backend that keeps pages in a kvtier store."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Deque, Dict, List, Optional, Sequence, Tuple

import kvtier
import torch
from kvtier import _abi
from kvtier._errors import make
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from . import _hints, _versions
from ._config import (
    LEVELS,
    Settings,
    invalid,
    open_store,
    shard,
    unsupported,
)
from ._eviction_log import EvictionLog
from ._events import KvEvents
from ._pages import Pages, first_slots, pages_of
from ._prefixes import loadable_prefixes

logger = logging.getLogger("kvtier_sglang")

#: Most transfers whose pages and bandwidth are kept until the engine reads its metrics.
_MAX_METRICS = 4096


@dataclass(frozen=True)
class _Pool:
    """A registered pool: the location of its pages, and the blocks of the store."""

    pages: Pages
    blocks: kvtier.Blocks


class _TransferStats:
    """Pages and bandwidth of the transfers in one direction, until the engine reads them."""

    def __init__(self) -> None:
        self.pages: Deque[int] = deque(maxlen=_MAX_METRICS)
        self.speed: Deque[float] = deque(maxlen=_MAX_METRICS)

    def add(self, pages: int, nbytes: int, seconds: float) -> None:
        """Adds a completed transfer."""
        self.pages.append(pages)
        self.speed.append(nbytes / max(seconds, 1e-9) / (1 << 30))

    def take(self) -> Tuple[List[int], List[float]]:
        """Returns and forgets the pages, and the bandwidths in GiB/s."""
        count = min(len(self.pages), len(self.speed))
        return ([self.pages.popleft() for _ in range(count)],
                [self.speed.popleft() for _ in range(count)])


def reject_unsupported(config: HiCacheStorageConfig, settings: Settings) -> None:
    """Rejects configurations that cannot work, when the server starts."""
    if _versions.dcp_size(config) > 1:
        raise unsupported(f"decode context parallelism (dcp_size={config.dcp_size}) is not "
                          "supported: SGLang allows it with its file and Mooncake backends only")
    if config.should_split_heads:
        raise unsupported("tp_lcm_size is not supported: it splits pages by heads for servers with "
                          "another tp size, but a kvtier store belongs to one rank: leave "
                          "tp_lcm_size out")
    if config.is_mla_model and config.tp_size > 1 and not settings.mla_copies:
        raise unsupported(
            f"this model's KV is equal on all {config.tp_size} ranks, and SGLang lets only rank 0 "
            "write it; the other ranks would never find it in their own stores: set "
            "\"mla_copies\": true (each rank then keeps a copy), use --enable-dp-attention, or "
            "a storage that ranks share")
    if config.is_mla_model and config.tp_size > 1 and not _versions.asks_later_who_writes(config):
        raise unsupported('"mla_copies": true needs SGLang 0.5.23 or newer: before, only rank 0 '
                          "can write KV that is equal on all ranks: run pip install "
                          "sglang==0.5.23, or use --enable-dp-attention")


def rank_identity(config: HiCacheStorageConfig, settings: Settings) -> kvtier.Identity:
    """The identity of a rank's KV. Each pool adds its recipe."""
    return kvtier.Identity(
        model=(config.model_name or "").encode(), shard=shard(config),
        salt=settings.tag.encode() if settings.tag else None)


class KvtierStorage(HiCacheStorage):
    """The rank's own store. A page is a block that is named by the engine's hash.

    The engine creates it for `--hicache-storage-backend dynamic`. Beside the engine's interface
    it offers `stats`, `tenants`, `metrics`, `evictions`, `advice`, `hint` and `set_policy`. Any
    thread may use it. After `close`, calls raise `kvtier.ClosedError`.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: object = None) -> None:
        self.settings = Settings.of(storage_config.extra_config)
        reject_unsupported(storage_config, self.settings)
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            # The controller reads this object to decide which rank writes. Each rank has its
            # own store, so each rank must write.
            storage_config.is_mla_model = False
        self._identity = rank_identity(storage_config, self.settings)
        self._level = LEVELS[self.settings.level]
        self._has_metrics = bool(storage_config.enable_storage_metrics)
        self._read, self._written = _TransferStats(), _TransferStats()
        self._lock = threading.Lock()
        self._pools: Dict[str, _Pool] = {}
        self._is_logical = False
        self._closed = False
        self._runtime, self._store = open_store(self.settings, storage_config)
        self._evictions = EvictionLog(self._store)
        self._events = KvEvents(self._store, self.settings, storage_config)
        self._advisor = kvtier.Advisor(
            self.settings.policy or kvtier.Advisor.policy_of(self._store), logger=logger)

    # Pools.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Registers the pool that holds pages of KV."""
        self.mem_pool_host = mem_pool_host
        # If all KV is in side pools, this pool only allocates slots and has no buffer.
        self._is_logical = getattr(mem_pool_host, "kv_buffer", None) is None
        if not self._is_logical:
            # A group of pools gives the page addresses of its anchor, but no buffers.
            anchor = getattr(mem_pool_host, "anchor_entry", None)
            self._register(getattr(anchor, "host_pool", mem_pool_host), PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Registers a side pool."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if getattr(host_pool, "kv_buffer", None) is None and not hasattr(
                host_pool, "get_hybrid_pool_buffer"):
            return
        self._register(host_pool, host_pool_name)

    def _register(self, pool: Any, name: Any) -> None:
        with self._lock:
            self._require_open()
            registered = self._pools.get(str(name))
            if registered is not None and registered.pages.pool is pool:
                return
            pages = pages_of(pool, str(name))
            identity = kvtier.Identity(model=self._identity.model, shard=self._identity.shard,
                                       salt=self._identity.salt, recipe=pages.recipe)
            blocks = kvtier.Blocks(self._store, identity, pages.parts, tenant=self.settings.tenant,
                                   priority=self.settings.priority)
            self._pools[str(name)] = _Pool(pages, blocks)

    def _require_open(self) -> None:
        if self._closed:
            raise make(_abi.KVT_E_CLOSED, "the kvtier storage backend is closed")

    def _pool(self, name: Any) -> _Pool:
        self._require_open()
        pool = self._pools.get(str(name))
        if pool is None:
            raise invalid(f"pool {str(name)!r} is not registered; the registered pools are "
                          f"{sorted(self._pools)}")
        return pool

    def _kv_pool(self) -> _Pool:
        self._require_open()
        pool = self._pools.get(str(PoolName.KV))
        if pool is None:
            raise make(_abi.KVT_E_STATE, "no KV pool is registered, so the size of pages is "
                       "unknown: call register_mem_pool_host first")
        return pool

    # Transfers.

    def _transfer(self, pool: _Pool, names: List[bytes], places: Any, write: bool) -> List[bool]:
        """Transfers pages in one native call, and returns which pages succeeded."""
        start, timeout = time.perf_counter(), self.settings.timeout_s
        if write:
            op = pool.blocks.put(names, places, level=self._level, timeout=timeout)
        else:
            op = pool.blocks.get(names, places, timeout=timeout)
        with op:  # an interrupted wait ends the op, because the engine reuses the pages
            op.wait()
            failed = op.failed()
            error = op.error() if failed else None
        if error is not None and not isinstance(error, kvtier.NotFoundError):
            logger.warning("a %s of %d pages failed for %d: %s", "write" if write else "read",
                           len(names), len(failed), error)
        ok = [True] * len(names)
        for at in failed:
            ok[at] = False
        if pool is self._pools.get(str(PoolName.KV)):
            self._events.found(pool.blocks, names, ok, pool.pages.page_tokens)
        if self._has_metrics:
            done = len(names) - len(failed)
            stats = self._written if write else self._read
            stats.add(done, done * pool.blocks.block_bytes, time.perf_counter() - start)
        return ok

    def _set(self, pool: _Pool, keys: Sequence[str], indices: Any) -> List[bool]:
        first = first_slots(indices, len(keys), pool.pages.page_tokens, pool.pages.tokens)
        if not keys:
            return []
        return self._put(pool, _names(keys), pool.pages.source(first))

    def _put(self, pool: _Pool, names: List[bytes], places: Any) -> List[bool]:
        ok = self._transfer(pool, names, places, True)
        if pool is self._pools.get(str(PoolName.KV)):
            self._advisor.stored([name for name, stored in zip(names, ok) if stored])
        return ok

    def _get(self, pool: _Pool, keys: Sequence[str], indices: Any) -> List[bool]:
        first = first_slots(indices, len(keys), pool.pages.page_tokens, pool.pages.tokens)
        if not keys:
            return []
        places, buffer = pool.pages.destination(first)
        ok = self._transfer(pool, _names(keys), places, False)
        pool.pages.finish_read(first, buffer, ok)
        return ok

    def batch_get_v1(self, keys: List[str], host_indices: torch.Tensor,
                     extra_info: Optional[HiCacheStorageExtraInfo] = None) -> List[bool]:
        """Loads pages into slots of the pool, and returns which pages were loaded."""
        if self._is_logical:
            self._require_open()
            return [True] * len(keys)
        ok = self._get(self._kv_pool(), keys, host_indices)
        self._send_hints([(self._kv_pool(), keys)], extra_info)
        return ok

    def batch_set_v1(self, keys: List[str], host_indices: torch.Tensor,
                     extra_info: Optional[HiCacheStorageExtraInfo] = None) -> List[bool]:
        """Stores pages from slots of the pool, and returns which pages are stored."""
        if self._is_logical:
            self._require_open()
            return [True] * len(keys)
        ok = self._set(self._kv_pool(), keys, host_indices)
        self._send_hints([(self._kv_pool(), keys)], extra_info)
        return ok

    def batch_get_v2(self, transfers: List[PoolTransfer],
                     extra_info: Optional[HiCacheStorageExtraInfo] = None
                     ) -> Dict[str, List[bool]]:
        """Loads pages of several pools, with one native call per pool."""
        ok = {one.name: self._get(self._pool(one.name), one.keys or [], _slots(one))
              for one in transfers}
        self._send_hints([(self._pool(one.name), one.keys or []) for one in transfers], extra_info)
        return ok

    def batch_set_v2(self, transfers: List[PoolTransfer],
                     extra_info: Optional[HiCacheStorageExtraInfo] = None
                     ) -> Dict[str, List[bool]]:
        """Stores pages of several pools, with one native call per pool."""
        ok = {one.name: self._set(self._pool(one.name), one.keys or [], _slots(one))
              for one in transfers}
        self._send_hints([(self._pool(one.name), one.keys or []) for one in transfers], extra_info)
        return ok

    # Hints.

    def _send_hints(self, moved: Sequence[Tuple[_Pool, Sequence[str]]],
                    extra_info: Optional[HiCacheStorageExtraInfo]) -> None:
        """Passes a call's hints on to the policies, for the pages that the call has moved."""
        hints = _hints.parse(extra_info) if self.settings.hints else None
        if hints is None:
            return
        for pool, keys in moved:
            try:
                if keys:
                    _hints.send(hints, [pool.blocks], _names(keys))
            except kvtier.Error as error:  # the transfer itself has succeeded
                logger.warning("the store rejected a hint about %d pages: %s", len(keys), error)

    def hint(self, keys: Sequence[str], *, stop: str = "", next_use_s: Optional[float] = None,
             done: bool = False, keep_s: Optional[float] = None) -> None:
        """Gives the policies hints about pages, in all pools: why the request that used them
        stopped, the seconds until their next use, that they are not used again, or the seconds
        for which they are pinned."""
        self._require_open()
        hints = _hints.of(stop=stop, next_use_s=next_use_s, done=done, keep_s=keep_s)
        if keys and self.settings.hints:
            _hints.send(hints, [pool.blocks for pool in self._pools.values()], _names(keys))

    # Lookups.

    def exists(self, key: str) -> bool:
        """Whether a page is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: List[str],
                     extra_info: Optional[HiCacheStorageExtraInfo] = None) -> int:
        """The number of pages before the first one that is not stored."""
        if self._is_logical:
            self._require_open()
            return len(keys)
        pool = self._kv_pool()
        names = _names(keys)
        self._advisor.looked_up(names)
        return pool.blocks.prefix(names, self.settings.remote_lookup_s) if keys else 0

    def batch_exists_v2(self, keys: List[str],
                        pool_transfers: Optional[List[PoolTransfer]] = None,
                        extra_info: Optional[HiCacheStorageExtraInfo] = None
                        ) -> PoolTransferResult:
        """The prefixes for which every pool has the pages that its hit policy needs."""
        pages, names = self.batch_exists(keys), _names(keys)
        prefixes = loadable_prefixes(
            pages, pool_transfers or (),
            lambda name: self._pool(name).blocks.exists(names[:pages],
                                                        self.settings.remote_lookup_s),
            PoolName.KV)
        return PoolTransferResult(*prefixes)

    # The engine's older calls, without interface_v1: one tensor per page.

    def get(self, key: str, target_location: Optional[torch.Tensor] = None,
            target_sizes: object = None) -> Optional[torch.Tensor]:
        """Loads a page into a tensor, and returns the tensor, or None on a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: List[str],
                  target_locations: Optional[Sequence[Optional[torch.Tensor]]] = None,
                  target_sizes: object = None) -> List[Optional[torch.Tensor]]:
        """Loads pages into tensors, and returns for each its tensor, or None on a miss."""
        if not keys:
            return []
        pool, targets = self._kv_pool(), list(target_locations or ())
        places = _tensors(keys, targets, pool.blocks.block_bytes)
        ok = self._transfer(pool, _names(keys), places, False)
        return [target if loaded else None for target, loaded in zip(targets, ok)]

    def set(self, key: str, value: Optional[torch.Tensor] = None,
            target_location: object = None, target_sizes: object = None) -> bool:
        """Stores a page from a tensor, and returns whether it is stored."""
        return self.batch_set([key], [value])

    def batch_set(self, keys: List[str],
                  values: Optional[Sequence[Optional[torch.Tensor]]] = None,
                  target_locations: object = None, target_sizes: object = None) -> bool:
        """Stores pages from tensors, and returns whether all are stored."""
        if not keys:
            return True
        pool = self._kv_pool()
        places = _tensors(keys, list(values or ()), pool.blocks.block_bytes)
        return all(self._put(pool, _names(keys), places))

    # Operation.

    def clear(self) -> None:
        """Drops all pages of this model and rank."""
        with self._lock:
            self._require_open()
            for pool in self._pools.values():
                pool.blocks.clear()

    def set_policy(self, spec: str, tier: int = kvtier.TIER_HOST) -> None:
        """Switches a tier to another policy. Stored pages stay."""
        self._store.set_policy(tier, spec)
        if tier == kvtier.TIER_HOST:
            self._advisor.switch(spec)

    def advice(self, batch: int) -> Optional[kvtier.Advice]:
        """The recommended number of running requests, from the current number; None before a pool
        is registered. It depends on the lookups and writes since the first call."""
        self._require_open()
        pool = self._pools.get(str(PoolName.KV))
        if pool is None:
            return None
        capacity = kvtier.Advisor.capacity_of(self._store, pool.blocks.block_bytes)
        return self._advisor.advise(batch, capacity)

    def stats(self) -> Dict[str, float]:
        """The store's counters and levels."""
        return self._store.stats()

    def tenants(self) -> List[kvtier.Tenant]:
        """The store's statistics by tenant."""
        return self._store.tenants()

    def metrics(self) -> str:
        """The store's statistics in Prometheus' text format."""
        return self._store.metrics()

    def evictions(self, tier: int = kvtier.TIER_HOST, most: int = 256) -> List[kvtier.LogEntry]:
        """The last evictions of a tier, with their reasons."""
        return self._store.evictions(tier, most)

    def get_stats(self) -> Any:
        """Pages and bandwidths since the last call, for the engine's metrics."""
        if self.settings.log_evictions and not self._closed:
            self._evictions.log()
        if not self._has_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        (read, read_speed), (written, write_speed) = self._read.take(), self._written.take()
        return StorageMetrics(prefetch_pgs=read, backup_pgs=written,
                              prefetch_bandwidth=read_speed, backup_bandwidth=write_speed)

    def close(self) -> None:
        """Ends all transfers, writes pages back to disk as the spec says, and releases the
        directory. It does not touch the pools after it has returned."""
        with self._lock:
            if self._closed:
                return
            if self.settings.log_evictions:
                self._evictions.log()
            self._closed = True
            self._advisor.close()
            self._events.close()
            self._store.close()
            for pool in self._pools.values():
                pool.blocks.close()
            self._pools.clear()
        self._runtime.close()


def _names(keys: Sequence[str]) -> List[bytes]:
    return [key.encode() for key in keys]


def _slots(transfer: PoolTransfer) -> torch.Tensor:
    if transfer.host_indices is None:
        if transfer.keys:
            raise invalid(f"pool {transfer.name} got {len(transfer.keys)} keys without "
                          "host_indices: give the slots of each page")
        return torch.empty(0, dtype=torch.int64)
    slots: torch.Tensor = transfer.host_indices
    return slots


def _tensors(keys: Sequence[str], tensors: Sequence[Any], page_bytes: int) -> kvtier.BlockAddresses:
    """The addresses of tensors, each with a page in the engine's flat form."""
    if len(tensors) != len(keys):
        raise invalid(f"there are {len(tensors)} tensors for {len(keys)} keys; the numbers must be "
                      "equal")
    for key, tensor in zip(keys, tensors):
        if not isinstance(tensor, torch.Tensor):
            raise invalid(f"page {key} is a {type(tensor).__name__}: give a tensor")
        if tensor.device.type != "cpu":
            raise unsupported(f"the tensor of page {key} is on {tensor.device}: copy it to host "
                              "memory first, as HiCache's host pools do")
        if not tensor.is_contiguous():
            raise invalid(f"the tensor of page {key} has strides {tensor.stride()}: pass "
                          ".contiguous()")
        if tensor.nbytes != page_bytes:
            raise invalid(f"the tensor of page {key} has {tensor.nbytes} bytes ({tensor.dtype}), "
                          f"but a page of the registered pool has {page_bytes}")
    return kvtier.BlockAddresses([tensor.data_ptr() for tensor in tensors], kept=list(tensors))
