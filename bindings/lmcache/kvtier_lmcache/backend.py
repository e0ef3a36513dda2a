"""A storage backend for LMCache, loaded by its storage plugins:

    storage_plugins: [kvtier]
    extra_config:
      storage_plugin.kvtier.module_path: kvtier_lmcache
      storage_plugin.kvtier.class_name: KvtierBackend
      storage_plugin.kvtier.disk_path: /var/lib/lmcache
      storage_plugin.kvtier.disk_bytes: 500GiB
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

import kvtier
from kvtier import BlockAddresses
from kvtier._errors import make
from kvtier_vllm.settings import SharedStore, unsupported

from . import _config

with _config.NEEDS.imports(_config.check_version):
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from ._chunks import Kind, Kinds, kind_of, name_of  # noqa: E402
from ._pins import Held, Pins  # noqa: E402
from ._puts import Callback, Puts  # noqa: E402

if TYPE_CHECKING:
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.memory_management import MemoryObj

log = logging.getLogger("kvtier_lmcache")

#: Seconds after which a pin ends by itself, if LMCache's configuration has no `pin_timeout_sec`.
PIN_TIMEOUT_S = 300.0


class KvtierBackend(StoragePluginInterface):  # type: ignore[misc]
    """LMCache's chunks in a kvtier store with memory, disk and a remote.

    A chunk is one block, read and written in LMCache's own memory. A call for several chunks is
    one native call per kind of chunk, and an engine usually has one kind. Any thread may use it.
    """

    def __init__(self, config: Any, metadata: Any, local_cpu_backend: Any, loop: Any = None,
                 dst_device: str = "cpu") -> None:
        super().__init__(dst_device=dst_device, config=config, metadata=metadata,
                         local_cpu_backend=local_cpu_backend, loop=loop)
        self._closed = True  # until all of it is open
        settings, accepted = _config.read(config)
        _config.check_version(accepted)
        _check_engine(config, metadata, local_cpu_backend)
        folder = f"rank{metadata.worker_id}of{metadata.world_size}"
        with contextlib.ExitStack() as resources:
            try:
                self._shared = SharedStore(settings.under(folder))
            except kvtier.BusyError as error:
                raise make(error.status, f"{error.message}: another engine uses this directory; "
                           "give each engine a disk_path of its own") from error
            resources.callback(self._shared.close)
            self._kinds = Kinds(self._shared.store, settings.weights, settings.put_level(),
                                settings.remote_lookup_s)
            resources.callback(self._kinds.close)
            self._pins = Pins(float(getattr(config, "pin_timeout_sec", 0) or PIN_TIMEOUT_S))
            resources.callback(self._pins.close)
            self._puts = Puts(self._shared.runtime, settings.put_level())
            resources.callback(self._puts.close)
            self._resources = resources.pop_all()
        self._lock = threading.Lock()
        self._memory_closed = False
        self._close_memory = local_cpu_backend.close
        # LMCache closes its memory before its other backends, while puts may still read it.
        local_cpu_backend.close = self._close_local_cpu
        self._closed = False

    def __str__(self) -> str:
        return "KvtierBackend"

    @property
    def store(self) -> kvtier.Store:
        """The store, for `stats`, `set_policy`, `evictions` and `tenants`."""
        return self._shared.store

    def _find(self, names: Sequence[bytes], remote: bool = True) -> List[Optional[Kind]]:
        """The kind of each chunk; None if it is not stored. No call of the engine fails because
        of the store."""
        if self._closed:
            return [None] * len(names)
        try:
            return self._kinds.find(names, remote)
        except kvtier.Error as error:
            log.warning("a lookup of %d chunks failed and counts as a miss: %s", len(names), error)
            return [None] * len(names)

    def _prefix(self, keys: Sequence[CacheEngineKey], pin: bool, lookup: Optional[str] = None
                ) -> int:
        """How many leading chunks are stored, and pinned if `pin` is set. A chunk that only the
        remote has cannot be held: it counts, and a get fetches it."""
        names = [name_of(key) for key in keys]
        kinds = self._find(names)
        count = kinds.index(None) if None in kinds else len(kinds)
        return self._pin(names[:count], kinds[:count], lookup) if pin and count else count

    def _pin(self, names: Sequence[bytes], kinds: Sequence[Optional[Kind]],
             lookup: Optional[str]) -> int:
        """Pins stored chunks, and returns how many leading chunks are still stored."""
        stored, holds = [False] * len(names), []
        try:
            for kind, at in _by_kind(kinds).items():
                blocks = self._kinds.of(kind)
                if blocks is None:
                    continue
                wanted = [names[place] for place in at]
                hold = blocks.hold(wanted)
                holds.append(Held(blocks, wanted, hold))
                found = hold.held if all(hold.held) else blocks.exists(wanted)
                for place, states in zip(at, zip(hold.held, found)):
                    stored[place] = any(states)
        except kvtier.Error as error:
            log.warning("%d chunks could not be pinned: %s", len(names), error)
        count = stored.index(False) if False in stored else len(stored)
        if count:
            self._pins.add(holds, names[:count], lookup)
        else:
            for one in holds:
                one.hold.close()
        return count

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        return self._prefix([key], pin) == 1

    def batched_contains(self, keys: List[CacheEngineKey], pin: bool = False) -> int:
        return self._prefix(keys, pin)

    async def batched_async_contains(self, lookup_id: str, keys: List[CacheEngineKey],
                                     pin: bool = False) -> int:
        return await asyncio.to_thread(self._prefix, keys, pin, lookup_id)

    def pin(self, key: CacheEngineKey) -> bool:
        return self._prefix([key], True) == 1

    def unpin(self, key: CacheEngineKey) -> bool:
        return self._pins.remove(name_of(key))

    def touch_cache(self) -> None:
        """Does nothing: the policies see each get."""

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        return name_of(key) in self._puts

    def batched_submit_put_task(self, keys: Sequence[CacheEngineKey], objs: List[MemoryObj],
                                transfer_spec: Any = None, on_complete_callback: Callback = None
                                ) -> "Optional[List[Future[None]]]":
        """Starts to store chunks, except those that are stored already or are being stored. The
        memory objects stay referenced until the futures end."""
        names = [name_of(key) for key in keys[:len(objs)]]
        futures: "List[Future[None]]" = []
        with self._lock:  # memory and store must not close in between
            if self._closed or self._memory_closed:
                return None
            new = self._puts.claim(names)
            stored = self._find([names[at] for at in new], remote=False)
            kinds: List[Optional[Kind]] = [None] * len(names)
            for at, found in zip(new, stored):
                kinds[at] = _storable(objs[at]) if found is None else None
            started = set()
            for kind, positions in _by_kind(kinds).items():
                blocks = self._kinds.of(kind)
                if blocks is not None:
                    started.update(positions)
                    futures.append(self._puts.start(
                        blocks, [keys[at] for at in positions], [names[at] for at in positions],
                        [objs[at] for at in positions], on_complete_callback))
            self._puts.unclaim([names[at] for at in new if at not in started])
            self._shared.log_evictions()
        return futures or None

    def get_blocking(self, key: CacheEngineKey) -> Optional[MemoryObj]:
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: List[CacheEngineKey]) -> List[Optional[MemoryObj]]:
        """Loads chunks into new memory objects, which the caller releases. None for a chunk that
        is missing or damaged, or for which there is no memory."""
        return self._load([name_of(key) for key in keys], wait=True)

    def _load(self, names: List[bytes], wait: bool) -> List[Optional[MemoryObj]]:
        kinds = self._find(names)
        objects: List[Any] = [None] * len(names)
        for at, kind in enumerate(kinds):
            if kind is None:
                continue
            objects[at] = self.local_cpu_backend.allocate(
                kind.torch_shapes(), kind.torch_dtypes(), MemoryFormat[kind.fmt], busy_loop=wait)
            # Waiting for memory is right only before this call has some itself: it is LMCache's
            # busy loop, without an end.
            wait = False
            if objects[at] is None:
                log.warning("LMCache has no memory for %d of %d chunks, which count as missing: "
                            "raise max_local_cpu_size", len(names) - at, len(names))
                break
        for kind, positions in _by_kind(
                [kind if obj is not None else None for kind, obj in zip(kinds, objects)]).items():
            for at in self._get(kind, [names[one] for one in positions],
                                [objects[one] for one in positions]):
                objects[positions[at]].ref_count_down()
                objects[positions[at]] = None
        return objects

    def _get(self, kind: Kind, names: List[bytes], objects: List[Any]) -> Sequence[int]:
        """Loads chunks of one kind, and returns the positions of those that failed."""
        try:
            # First counted, then tested: memory that closes after the test waits for this get.
            with self._puts.using_memory():
                blocks = self._kinds.of(kind)
                if self._closed or self._memory_closed or blocks is None:
                    return range(len(names))
                places = BlockAddresses([obj.data_ptr for obj in objects], kept=objects)
                with blocks.get(names, places) as op:
                    op.wait()
                    failed, error = op.failed(), op.error()
        except kvtier.Error as raised:
            failed, error = list(range(len(names))), raised
        if failed:
            log.warning("%d of %d chunks were not loaded: %s", len(failed), len(names), error)
        return failed

    async def batched_get_non_blocking(self, lookup_id: str, keys: List[CacheEngineKey],
                                       transfer_spec: Any = None) -> List[MemoryObj]:
        """The leading chunks that could be loaded. Ends the pins of the lookup: the bytes are in
        memory objects of the caller now."""
        names = [name_of(key) for key in keys]
        try:
            loaded = await asyncio.to_thread(self._load, names, False)
        finally:
            self._pins.end_lookup(lookup_id, names)
        count = loaded.index(None) if None in loaded else len(loaded)
        for obj in loaded[count:]:
            if obj is not None:
                obj.ref_count_down()
        return [obj for obj in loaded[:count] if obj is not None]

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        return self.batched_remove([key], force) == 1

    def batched_remove(self, keys: List[CacheEngineKey], force: bool = True) -> int:
        """Removes chunks of the store from all tiers, and returns their number. A chunk that only
        the remote has is no chunk of the store. `force` ends their pins."""
        names = [name_of(key) for key in keys]
        kinds = self._find(names, remote=False)
        if force:
            for name in names:
                self._pins.remove(name, every=True)
        removed = 0
        for kind, positions in _by_kind(kinds).items():
            blocks = self._kinds.of(kind)
            try:
                if blocks is not None:
                    removed += blocks.drop([names[at] for at in positions]).removed_chunks
            except kvtier.Error as error:
                log.warning("%d chunks could not be removed: %s", len(positions), error)
        return removed

    def clear(self) -> int:
        """Removes all chunks that are not pinned, and returns the number of their tokens."""
        tokens = 0
        for kind, blocks in () if self._closed else self._kinds.known():
            try:
                count = blocks.clear().removed_chunks
            except kvtier.Error as error:
                log.warning("chunks could not be removed: %s", error)
                continue
            tokens += count * kind.shapes[0][MemoryFormat[kind.fmt].token_dim()]
        return tokens

    def get_allocator_backend(self) -> Any:
        return self.local_cpu_backend

    def _close_local_cpu(self) -> None:
        """Closes LMCache's memory after the transfers that use it."""
        with self._lock:
            self._memory_closed = True
            self._puts.drain()
            self._close_memory()

    def close(self) -> None:
        """Waits for all puts, and closes the store."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.local_cpu_backend.close = self._close_memory
            self._resources.close()


def _check_engine(config: Any, metadata: Any, local_cpu_backend: Any) -> None:
    """Rejects what the backend cannot do."""
    if metadata is None or metadata.role == "scheduler":
        raise unsupported("kvtier cannot look up in LMCache's scheduler, because a store belongs "
                          "to the worker's process: leave out enable_scheduler_bypass_lookup")
    if local_cpu_backend is None:
        raise unsupported("kvtier loads chunks into LMCache's host memory, but LMCache has none: "
                          "set max_local_cpu_size above 0, without enable_pd")
    if getattr(config, "enable_blending", False):
        raise unsupported("kvtier does not keep the positions of chunks, which blending needs: set "
                          "enable_blending to false")


def _storable(obj: MemoryObj) -> Optional[Kind]:
    """The kind of a memory object; None if its bytes cannot be stored."""
    tensor = obj.raw_tensor
    kind = kind_of(obj) if tensor is not None and tensor.device.type == "cpu" else None
    if kind is None or kind.nbytes != obj.get_size():
        log.warning("a chunk in the format %s is not stored: kvtier stores tensors in host memory",
                    obj.get_memory_format().name)
        return None
    return kind


def _by_kind(kinds: Sequence[Optional[Kind]]) -> Dict[Kind, List[int]]:
    """The positions of each kind."""
    found: Dict[Kind, List[int]] = {}
    for at, kind in enumerate(kinds):
        if kind is not None:
            found.setdefault(kind, []).append(at)
    return found
