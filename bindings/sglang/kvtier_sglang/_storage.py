"""`KvtierStorage`: HiCache's third level in a kvtier store."""

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

from ._engine import imports

with imports():
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
    )

from ._config import (
    LEVELS,
    Settings,
    check_version,
    invalid,
    open_store,
    shard,
    unsupported,
)
from ._hints import Told, take
from ._hits import fold
from ._pages import Pages, firsts, pages_of
from ._watch import Evictions

logger = logging.getLogger("kvtier_sglang")

#: Transfers whose pages and speed are kept until the engine asks for them.
_KEPT_METRICS = 4096


@dataclass(frozen=True)
class _Pool:
    """A registered pool: where its pages are, and the blocks that they are stored as."""

    pages: Pages
    blocks: kvtier.Blocks


class _Ran:
    """What transfers of one direction came to, until the engine takes it."""

    def __init__(self) -> None:
        self.pages: Deque[int] = deque(maxlen=_KEPT_METRICS)
        self.speed: Deque[float] = deque(maxlen=_KEPT_METRICS)

    def add(self, pages: int, nbytes: int, seconds: float) -> None:
        """A transfer has ended."""
        self.pages.append(pages)
        self.speed.append(nbytes / max(seconds, 1e-9) / (1 << 30))

    def take(self) -> Tuple[List[int], List[float]]:
        """What there is since the last time."""
        count = min(len(self.pages), len(self.speed))
        return ([self.pages.popleft() for _ in range(count)],
                [self.speed.popleft() for _ in range(count)])


def refuse_layout(config: HiCacheStorageConfig, settings: Settings) -> None:
    """What cannot go well is refused when the server starts."""
    if config.dcp_size > 1:
        raise unsupported("decode context parallelism: SGLang allows it with its file and "
                          "Mooncake backends alone")
    if config.should_split_heads:
        raise unsupported("tp_lcm_size splits pages by heads for servers with another tp size to "
                          "read; a kvtier store belongs to one rank: leave tp_lcm_size out")
    if config.is_mla_model and config.tp_size > 1 and not settings.mla_copies:
        raise unsupported(
            f"this model's KV is the same on all {config.tp_size} ranks, so SGLang has rank 0 "
            "alone write it, and the others would never find it in stores of their own: set "
            "\"mla_copies\": true (each rank then keeps a copy), use --enable-dp-attention, or "
            "a storage that ranks share")


def mine(config: HiCacheStorageConfig, settings: Settings) -> kvtier.Identity:
    """Who the KV of a rank belongs to; a pool's recipe is added."""
    return kvtier.Identity(
        model=(config.model_name or "").encode(), shard=shard(config),
        salt=settings.tag.encode() if settings.tag else None)


class KvtierStorage(HiCacheStorage):
    """A store of the rank's own, on which pages are blocks named by the engine's hashes.

    The engine makes one by `--hicache-storage-backend dynamic`; what else it may be asked is
    `stats`, `tenants`, `metrics`, `evictions`, `advice`, and `set_policy` while it runs. Any
    thread may use it. After `close` calls raise `kvtier.ClosedError`.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: object = None) -> None:
        self.settings = Settings.of(storage_config.extra_config)
        check_version(self.settings)
        refuse_layout(storage_config, self.settings)
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            # The controller asks this very object who writes. Each rank has a store of its
            # own, so each of them does.
            storage_config.is_mla_model = False
        self._identity = mine(storage_config, self.settings)
        self._level = LEVELS[self.settings.level]
        self._counts = bool(storage_config.enable_storage_metrics)
        self._read, self._written = _Ran(), _Ran()
        self._lock = threading.Lock()
        self._pools: Dict[str, _Pool] = {}
        self._logical = False
        self._closed = False
        self._runtime, self._store = open_store(self.settings, storage_config)
        self._evictions = Evictions(self._store)
        self._advisor = kvtier.Advisor(
            self.settings.policy or kvtier.Advisor.policy_of(self._store), logger=logger)

    # Pools.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool that pages of KV are in."""
        self.mem_pool_host = mem_pool_host
        # Models whose KV is in side pools alone have a pool that only gives out slots.
        self._logical = getattr(mem_pool_host, "kv_buffer", None) is None
        if not self._logical:
            # A group of pools hands the address of its anchor's pages out, and not its buffers.
            anchor = getattr(mem_pool_host, "anchor_entry", None)
            self._register(getattr(anchor, "host_pool", mem_pool_host), PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool beside it."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if getattr(host_pool, "kv_buffer", None) is None and not hasattr(
                host_pool, "get_hybrid_pool_buffer"):
            return
        self._register(host_pool, host_pool_name)

    def _register(self, pool: Any, name: Any) -> None:
        with self._lock:
            self._open()
            there = self._pools.get(str(name))
            if there is not None and there.pages.pool is pool:
                return
            pages = pages_of(pool, str(name))
            who = kvtier.Identity(model=self._identity.model, shard=self._identity.shard,
                                  salt=self._identity.salt, recipe=pages.recipe)
            blocks = kvtier.Blocks(self._store, who, pages.parts, tenant=self.settings.tenant,
                                   priority=self.settings.priority)
            self._pools[str(name)] = _Pool(pages, blocks)

    def _open(self) -> None:
        if self._closed:
            raise make(_abi.KVT_E_CLOSED, "the storage backend is closed")

    def _pool(self, name: Any) -> _Pool:
        self._open()
        pool = self._pools.get(str(name))
        if pool is None:
            raise invalid(f"pool {str(name)!r} is not registered; known are "
                          f"{sorted(self._pools)}")
        return pool

    def _kv(self) -> _Pool:
        self._open()
        pool = self._pools.get(str(PoolName.KV))
        if pool is None:
            raise make(_abi.KVT_E_STATE, "register_mem_pool_host comes first: pages have no "
                       "size before")
        return pool

    # Moves.

    def _move(self, pool: _Pool, names: List[bytes], places: Any, write: bool) -> List[bool]:
        """One native call; which pages went well."""
        began, timeout = time.perf_counter(), self.settings.timeout_s
        if write:
            op = pool.blocks.put(names, places, level=self._level, timeout=timeout)
        else:
            op = pool.blocks.get(names, places, timeout=timeout)
        with op:  # where waiting is broken off it is ended: the pages are the engine's
            op.wait()
            failed = op.failed()
            error = op.error() if failed else None
        if error is not None and not isinstance(error, kvtier.NotFoundError):
            logger.warning("%s of %d pages: %d failed: %s", "write" if write else "read",
                           len(names), len(failed), error)
        good = [True] * len(names)
        for at in failed:
            good[at] = False
        if self._counts:
            done = len(names) - len(failed)
            ran = self._written if write else self._read
            ran.add(done, done * pool.blocks.block_bytes, time.perf_counter() - began)
        return good

    def _set(self, pool: _Pool, keys: Sequence[str], indices: Any) -> List[bool]:
        first = firsts(indices, len(keys), pool.pages.page_tokens, pool.pages.tokens)
        if not keys:
            return []
        return self._stored(pool, _names(keys), pool.pages.take(first))

    def _stored(self, pool: _Pool, names: List[bytes], places: Any) -> List[bool]:
        good = self._move(pool, names, places, True)
        if pool is self._pools.get(str(PoolName.KV)):
            self._advisor.stored([name for name, well in zip(names, good) if well])
        return good

    def _get(self, pool: _Pool, keys: Sequence[str], indices: Any) -> List[bool]:
        first = firsts(indices, len(keys), pool.pages.page_tokens, pool.pages.tokens)
        if not keys:
            return []
        places, held = pool.pages.room(first)
        good = self._move(pool, _names(keys), places, False)
        pool.pages.arrived(first, held, good)
        return good

    def batch_get_v1(self, keys: List[str], host_indices: torch.Tensor,
                     extra_info: Optional[HiCacheStorageExtraInfo] = None) -> List[bool]:
        """Pages into slots of the pool; which of them came."""
        if self._logical:
            self._open()
            return [True] * len(keys)
        good = self._get(self._kv(), keys, host_indices)
        self._heard([(self._kv(), keys)], extra_info)
        return good

    def batch_set_v1(self, keys: List[str], host_indices: torch.Tensor,
                     extra_info: Optional[HiCacheStorageExtraInfo] = None) -> List[bool]:
        """Pages from slots of the pool; which of them are stored."""
        if self._logical:
            self._open()
            return [True] * len(keys)
        good = self._set(self._kv(), keys, host_indices)
        self._heard([(self._kv(), keys)], extra_info)
        return good

    def batch_get_v2(self, transfers: List[PoolTransfer],
                     extra_info: Optional[HiCacheStorageExtraInfo] = None
                     ) -> Dict[str, List[bool]]:
        """The same for several pools, one native call each."""
        good = {one.name: self._get(self._pool(one.name), one.keys or [], _slots(one))
                for one in transfers}
        self._heard([(self._pool(one.name), one.keys or []) for one in transfers], extra_info)
        return good

    def batch_set_v2(self, transfers: List[PoolTransfer],
                     extra_info: Optional[HiCacheStorageExtraInfo] = None
                     ) -> Dict[str, List[bool]]:
        """The same for several pools, one native call each."""
        good = {one.name: self._set(self._pool(one.name), one.keys or [], _slots(one))
                for one in transfers}
        self._heard([(self._pool(one.name), one.keys or []) for one in transfers], extra_info)
        return good

    # What is to come.

    def _heard(self, moved: Sequence[Tuple[_Pool, Sequence[str]]],
               extra_info: Optional[HiCacheStorageExtraInfo]) -> None:
        """Passes on what a call says of the pages that it has moved, once a pool."""
        told = take(extra_info) if self.settings.hints else None
        if told is None:
            return
        for pool, keys in moved:
            try:
                if keys:
                    told.tell([pool.blocks], _names(keys))
            except kvtier.Error as error:  # the pages have been moved all the same
                logger.warning("a hint of %d pages was refused: %s", len(keys), error)

    def hint(self, keys: Sequence[str], *, stop: str = "", next_use_s: Optional[float] = None,
             done: bool = False) -> None:
        """Tells the policies what is known of the future of pages, in all pools: why the request
        that used them stopped, in how many seconds they are wanted again, that they never are."""
        self._open()
        told = Told.of(stop, next_use_s, done)
        if keys and self.settings.hints:
            told.tell([pool.blocks for pool in self._pools.values()], _names(keys))

    # What is there.

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: List[str],
                     extra_info: Optional[HiCacheStorageExtraInfo] = None) -> int:
        """How many pages from the first on are there."""
        if self._logical:
            self._open()
            return len(keys)
        pool = self._kv()
        names = _names(keys)
        self._advisor.looked_up(names)
        return pool.blocks.prefix(names, self.settings.ask_s) if keys else 0

    def batch_exists_v2(self, keys: List[str],
                        pool_transfers: Optional[List[PoolTransfer]] = None,
                        extra_info: Optional[HiCacheStorageExtraInfo] = None
                        ) -> PoolTransferResult:
        """Up to where all pools have what their rule asks for."""
        pages, names = self.batch_exists(keys), _names(keys)
        there = fold(pages, pool_transfers or (),
                     lambda name: self._pool(name).blocks.exists(names[:pages],
                                                                 self.settings.ask_s),
                     PoolName.KV)
        return PoolTransferResult(*there)

    # The engine's older calls: a tensor a page, without interface_v1.

    def get(self, key: str, target_location: Optional[torch.Tensor] = None,
            target_sizes: object = None) -> Optional[torch.Tensor]:
        """A page into a tensor, which comes back, or None."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: List[str],
                  target_locations: Optional[Sequence[Optional[torch.Tensor]]] = None,
                  target_sizes: object = None) -> List[Optional[torch.Tensor]]:
        """Pages into tensors, each of which comes back, or None where it was missing."""
        if not keys:
            return []
        pool, targets = self._kv(), list(target_locations or ())
        places = _tensors(keys, targets, pool.blocks.block_bytes)
        good = self._move(pool, _names(keys), places, False)
        return [target if came else None for target, came in zip(targets, good)]

    def set(self, key: str, value: Optional[torch.Tensor] = None,
            target_location: object = None, target_sizes: object = None) -> bool:
        """Stores a page that is in a tensor."""
        return self.batch_set([key], [value])

    def batch_set(self, keys: List[str],
                  values: Optional[Sequence[Optional[torch.Tensor]]] = None,
                  target_locations: object = None, target_sizes: object = None) -> bool:
        """Stores pages that are in tensors; whether all are."""
        if not keys:
            return True
        pool = self._kv()
        places = _tensors(keys, list(values or ()), pool.blocks.block_bytes)
        return all(self._stored(pool, _names(keys), places))

    # Running it.

    def clear(self) -> None:
        """Takes all pages of this model and rank away."""
        with self._lock:
            self._open()
            for pool in self._pools.values():
                pool.blocks.clear()

    def set_policy(self, spec: str, tier: int = kvtier.TIER_HOST) -> None:
        """Goes on with another policy; what is there stays."""
        self._store.set_policy(tier, spec)
        if tier == kvtier.TIER_HOST:
            self._advisor.switch(spec)

    def advice(self, batch: int) -> Optional[kvtier.Advice]:
        """How many requests to run, from the number that run now; None before a pool is
        registered. It goes by lookups and writes since the first time that it was asked for."""
        self._open()
        pool = self._pools.get(str(PoolName.KV))
        if pool is None:
            return None
        room = kvtier.Advisor.room_of(self._store, pool.blocks.block_bytes)
        return self._advisor.advise(batch, room)

    def stats(self) -> Dict[str, int]:
        """What the store counts and has."""
        return self._store.stats()

    def tenants(self) -> List[kvtier.Tenant]:
        """The same by tenant."""
        return self._store.tenants()

    def metrics(self) -> str:
        """The same in Prometheus' text format."""
        return self._store.metrics()

    def evictions(self, tier: int = kvtier.TIER_HOST, most: int = 256) -> List[kvtier.LogEntry]:
        """Who left last, and why."""
        return self._store.evictions(tier, most)

    def get_stats(self) -> Any:
        """Pages and speeds since the last call, for the engine's own metrics."""
        if self.settings.log_evictions and not self._closed:
            self._evictions.log()
        if not self._counts:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        (read, read_speed), (written, write_speed) = self._read.take(), self._written.take()
        return StorageMetrics(prefetch_pgs=read, backup_pgs=written,
                              prefetch_bandwidth=read_speed, backup_bandwidth=write_speed)

    def close(self) -> None:
        """Ends what is open, writes what is in memory alone to disk as far as the spec says so,
        and lets the directory go. Pools are not touched any more when it returns."""
        with self._lock:
            if self._closed:
                return
            if self.settings.log_evictions:
                self._evictions.log()
            self._closed = True
            self._advisor.close()
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
            raise invalid(f"pool {transfer.name}: {len(transfer.keys)} keys without host_indices")
        return torch.empty(0, dtype=torch.int64)
    slots: torch.Tensor = transfer.host_indices
    return slots


def _tensors(keys: Sequence[str], given: Sequence[Any], page_bytes: int) -> kvtier.At:
    """Tensors that each have a page, as it is in the engine's flat form."""
    if len(given) != len(keys):
        raise invalid(f"{len(given)} tensors for {len(keys)} keys")
    for key, one in zip(keys, given):
        if not isinstance(one, torch.Tensor):
            raise invalid(f"page {key}: {type(one).__name__} is no tensor")
        if one.device.type != "cpu":
            raise unsupported(f"page {key}: a tensor on {one.device}; copy it to host memory "
                              "first, as HiCache's host pools do")
        if not one.is_contiguous():
            raise invalid(f"page {key}: a tensor with strides {one.stride()}; pass .contiguous()")
        if one.nbytes != page_bytes:
            raise invalid(f"page {key}: a tensor of {one.nbytes} bytes ({one.dtype}); a page of "
                          f"the registered pool has {page_bytes}")
    return kvtier.At([one.data_ptr() for one in given], kept=list(given))
