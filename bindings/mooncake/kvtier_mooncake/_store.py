"""`MooncakeDistributedStore`: Mooncake's methods on raw addresses and sizes, over kvtier."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Union

import kvtier
from kvtier import TIER_DISK, TIER_HOST, Pool

from . import _codes as codes
from . import _memory as memory
from ._config import LEVELS, Settings, current
from ._core import Core, acquire, release
from ._shapes import Shapes, check_shape
from ._transfers import Transfer, fetch

log = logging.getLogger("kvtier.mooncake")

#: Arguments of `setup` that have no effect.
IGNORED = ("metadata_server", "local_buffer_size", "protocol", "device_name",
           "master_server_address", "engine")


class BufferHandle:
    """A buffer with an object's bytes."""

    def __init__(self, data: bytearray) -> None:
        self._data = data

    def ptr(self) -> int:
        """The address of the bytes."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._data))

    def size(self) -> int:
        """The number of bytes."""
        return len(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def view(self) -> memoryview:
        """A view of the bytes."""
        return memoryview(self._data)


class ReplicaDescriptor:
    """The tiers of an object, as `batch_get_replica_desc` returns them."""

    def __init__(self, tiers: int) -> None:
        self._tiers = tiers

    def is_memory_replica(self) -> bool:
        """Whether the whole object is in host memory."""
        return bool(self._tiers & 1 << TIER_HOST)

    def is_disk_replica(self) -> bool:
        """False: there is no disk that several processes share."""
        return False

    def is_local_disk_replica(self) -> bool:
        """Whether the whole object is on this process's disk."""
        return bool(self._tiers & 1 << TIER_DISK)


class MooncakeDistributedStore:
    """A store of one tenant in this process. Any thread may use it; calls block until their
    transfer has ended, and let other threads run. A failure returns a code, and logs a line to
    `kvtier.mooncake`. Only arguments of a wrong type raise an exception (`TypeError`)."""

    def __init__(self) -> None:
        self._core: Optional[Core] = None
        self._regions = memory.Regions()
        self._hostname = ""
        self._tenant = ""

    # Opening and closing.

    def setup(self, local_hostname: Union[str, Mapping[str, Any]], metadata_server: str = "",
              global_segment_size: int = 16 << 20, local_buffer_size: int = 16 << 20,
              protocol: str = "tcp", device_name: str = "", master_server_address: str = "",
              engine: Any = None, *, enable_ssd_offload: bool = False,
              ssd_offload_path: Optional[str] = None, tenant_id: str = "") -> int:
        """Opens the store with the configured settings, else with `global_segment_size` bytes of
        host memory. The arguments may be one mapping. Returns 0 or a code."""
        if isinstance(local_hostname, Mapping):
            return self._setup_mapping(local_hostname)
        given = {"metadata_server": metadata_server, "local_buffer_size": local_buffer_size,
                 "protocol": protocol, "device_name": device_name,
                 "master_server_address": master_server_address, "engine": engine}
        if self._core is not None:
            log.error("setup: the store is set up already: close it first")
            return codes.INVALID_PARAMS
        self._hostname = local_hostname
        self._tenant = "" if tenant_id in ("", "default", None) else str(tenant_id)
        return self._guard("setup", lambda: self._open(
            int(global_segment_size), enable_ssd_offload, ssd_offload_path, given))

    def _setup_mapping(self, given: Mapping[str, Any]) -> int:
        names = ("metadata_server", "global_segment_size", "local_buffer_size", "protocol",
                 "device_name", "master_server_address", "ssd_offload_path", "tenant_id")
        known = {name: given[name] for name in names if given.get(name) not in (None, "")}
        unknown = sorted(set(given) - {*names, "local_hostname", "enable_ssd_offload"})
        if unknown:
            log.info("setup: these keys have no effect: %s", ", ".join(unknown))
        offload = str(given.get("enable_ssd_offload", "")).lower() in ("1", "true", "yes", "on")
        return self.setup(str(given.get("local_hostname", "")), enable_ssd_offload=offload, **known)

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int,
                    server_address: str) -> int:
        """Sets up a store of its own: kvtier has no clients of stores in other processes."""
        return self.setup("localhost", global_segment_size=int(mem_pool_size),
                          local_buffer_size=local_buffer_size,
                          master_server_address=server_address)

    def _open(self, segment_bytes: int, offload: bool, path: Optional[str],
              given: Dict[str, Any]) -> int:
        settings = current()
        if offload and path and not (settings.spec or settings.disk_path):
            if not settings.disk_bytes:
                log.error("setup: ssd_offload_path=%r needs a size: set disk_bytes in "
                          "KVTIER_MOONCAKE_CONFIG", path)
                return codes.INVALID_PARAMS
            settings = _with_disk(settings, path, segment_bytes)
        core = acquire(settings, segment_bytes)
        try:  # read the catalogue now, not in the first lookup
            core.shapes(self._tenant)
        except BaseException:
            release(core)
            raise
        self._core = core
        ignored = [f"{name}={given[name]!r}" for name in IGNORED if given[name] not in ("", None)]
        log.info("kvtier replaces Mooncake's store (%s); arguments without effect: %s",
                 core.opened, ", ".join(ignored) or "nothing")
        return codes.OK

    def close(self) -> int:
        """Closes this store. The last one of the process with equal settings closes kvtier's."""
        core, self._core = self._core, None
        self._regions.clear()
        return codes.OK if core is None else self._guard("close", lambda: _release(core))

    def get_hostname(self) -> str:
        """The host name that `setup` got."""
        return self._hostname

    # Buffers.

    def register_buffer(self, buffer_ptr: int, size: int, location: str = "") -> int:
        """Registers memory for transfers. Memory that is not mapped in this process counts as
        device memory, and needs the option `device`."""
        if size <= 0 or buffer_ptr <= 0:
            log.error("register_buffer: %d bytes at %#x are no buffer: both must be above 0", size,
                      buffer_ptr)
            return codes.INVALID_PARAMS
        on_device = location.startswith(("cuda", "device"))
        if not on_device and memory.mapped(buffer_ptr, size):
            self._regions.add(buffer_ptr, size, memory.HOST)
            return codes.OK
        if self._core is None or self._core.device is None:
            log.error("register_buffer: %d bytes at %#x are not in host memory of this process: "
                      "for GPU memory set \"device\": \"cuda\" in KVTIER_MOONCAKE_CONFIG",
                      size, buffer_ptr)
            return codes.INVALID_PARAMS
        self._regions.add(buffer_ptr, size, memory.DEVICE)
        return codes.OK

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Unregisters a buffer, and waits for transfers that may use it."""
        if self._regions.remove(buffer_ptr):
            return codes.OK
        log.error("unregister_buffer: no buffer is registered at %#x", buffer_ptr)
        return codes.INVALID_PARAMS

    # Lookups.

    def is_exist(self, key: str) -> int:
        """1 if the object is stored, 0 if not, or a code."""
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: Sequence[str]) -> List[int]:
        """For each object: 1 if it is stored, 0 if not, or a code."""
        return self._call("batch_is_exist", keys, lambda shapes: shapes.states(_names(keys)))

    def get_size(self, key: str) -> int:
        """The number of bytes of an object, or a code."""
        def lookup(shapes: Shapes) -> List[int]:
            shape = shapes.find(_names([key]))[0]
            return [codes.OBJECT_NOT_FOUND if shape is None else sum(shape)]

        return self._call("get_size", [key], lookup)[0]

    def batch_get_replica_desc(self, keys: Sequence[str]) -> Dict[str, List[ReplicaDescriptor]]:
        """The tiers of each stored object."""
        found: Dict[str, List[ReplicaDescriptor]] = {}

        def lookup(shapes: Shapes) -> List[int]:
            names = _names(keys)
            for _, blocks in shapes.known():
                for key, tiers in zip(keys, blocks.exists(names)):
                    if tiers:
                        found[key] = [ReplicaDescriptor(tiers)]
            return []

        self._call("batch_get_replica_desc", keys, lookup)
        return found

    # Transfers from and to registered buffers.

    def batch_put_from_multi_buffers(
            self, keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]],
            all_sizes: Sequence[Sequence[int]], config: Any = None) -> List[int]:
        """Stores objects, each from several buffers: 0 or a code for each. An object that is
        already stored in the same shape stays, and counts as 0."""
        return self._transfer("batch_put_from_multi_buffers", keys, all_buffer_ptrs, all_sizes,
                              True)

    def batch_get_into_multi_buffers(
            self, keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]],
            all_sizes: Sequence[Sequence[int]],
            prefer_alloc_in_same_node: bool = False) -> List[int]:
        """Loads objects, each into several buffers: the bytes loaded, or a code, for each."""
        return self._transfer("batch_get_into_multi_buffers", keys, all_buffer_ptrs, all_sizes,
                              False)

    def batch_put_from(self, keys: Sequence[str], buffer_ptrs: Sequence[int],
                       sizes: Sequence[int], config: Any = None) -> List[int]:
        """Stores objects, each from one buffer: 0 or a code for each."""
        return self._transfer("batch_put_from", keys, [(one,) for one in buffer_ptrs],
                              [(one,) for one in sizes], True)

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int],
                       sizes: Sequence[int]) -> List[int]:
        """Loads objects, each into one buffer: the bytes loaded, or a code, for each."""
        return self._transfer("batch_get_into", keys, [(one,) for one in buffer_ptrs],
                              [(one,) for one in sizes], False)

    def put_from(self, key: str, buffer_ptr: int, size: int, config: Any = None) -> int:
        """Stores one object from one buffer: 0 or a code."""
        return self.batch_put_from([key], [buffer_ptr], [size], config)[0]

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Loads one object into one buffer: the bytes loaded, or a code."""
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def _transfer(self, method: str, keys: Sequence[str], rows: Sequence[Sequence[int]],
                  sizes: Sequence[Sequence[int]], put: bool) -> List[int]:
        if not len(keys) == len(rows) == len(sizes):
            log.error("%s: got %d keys, %d buffers and %d sizes; the numbers must be equal", method,
                      len(keys), len(rows), len(sizes))
            return [codes.INVALID_PARAMS] * len(keys)
        core = self._core
        transfer = self._regions.begin()
        try:
            return self._call(method, keys, lambda shapes: Transfer(
                method, shapes, self._regions, 0 if core is None else LEVELS[core.settings.level],
                put).run(_names(keys), rows, sizes))
        finally:
            self._regions.end(transfer)

    # Values.

    def put(self, key: str, value: Any, config: Any = None) -> int:
        """Stores bytes as an object: 0 or a code."""
        return self.put_parts(key, value, config=config)

    def put_parts(self, key: str, *parts: Any, config: Any = None) -> int:
        """Stores the bytes of several buffers as one object: 0 or a code."""
        data = bytearray(b"".join(memoryview(part).cast("B") for part in parts))
        if not data:
            log.error("put: the value of %s is empty; it needs at least 1 byte", key)
            return codes.INVALID_PARAMS
        level = LEVELS[self._core.settings.level] if self._core is not None else 0

        def store(shapes: Shapes) -> List[int]:
            if shapes.states(_names([key]))[0]:
                return [codes.OK]
            shape = check_shape((len(data),))
            with shapes.of(shape).put(_names([key]), Pool(data, len(data)).at([0]),
                                      level=level) as op:
                op.result()
            shapes.wait_for_catalogue(shape)
            return [codes.OK]

        return self._call("put", [key], store)[0]

    def get(self, key: str) -> bytes:
        """An object's bytes; empty if it is not stored."""
        found = self._buffers([key])[0]
        return b"" if found is None else bytes(found)

    def get_buffer(self, key: str) -> Optional[BufferHandle]:
        """An object's bytes as a buffer; None if it is not stored."""
        found = self._buffers([key])[0]
        return None if found is None else BufferHandle(found)

    def batch_get_buffer(self, keys: Sequence[str]) -> List[Optional[bytearray]]:
        """The bytes of several objects; None for each that is not stored."""
        return self._buffers(keys)

    def _buffers(self, keys: Sequence[str]) -> List[Optional[bytearray]]:
        found: List[Optional[bytearray]] = [None] * len(keys)

        def load(shapes: Shapes) -> List[int]:
            names = _names(keys)
            for at, shape in enumerate(shapes.find(names)):
                if shape is not None:
                    found[at] = fetch(shapes, shape, names[at])
            return []

        self._call("get", keys, load)
        return found

    # Removal.

    def remove(self, key: str, force: bool = False) -> int:
        """Removes an object, in all shapes that it was put in: 0 or a code."""
        def drop(shapes: Shapes) -> List[int]:
            names = _names([key])
            found = shapes.find(names)[0]  # also at the remote
            removed, blocked = shapes.drop(names[0])
            if not (found or removed or blocked):
                return [codes.OBJECT_NOT_FOUND]
            return [codes.OK if removed and not blocked else codes.UNAVAILABLE_IN_CURRENT_STATUS]

        return self._call("remove", [key], drop)[0]

    def remove_all(self, force: bool = False) -> int:
        """Removes all objects of the tenant, and returns their number."""
        return self._call("remove_all", [""], lambda shapes: [shapes.clear()])[0]

    # Failures.

    def _call(self, method: str, keys: Sequence[str],
              call: Callable[[Shapes], List[int]]) -> List[int]:
        """Runs a method for some keys. If it fails as a whole, each key gets the code."""
        core = self._core
        if core is None:
            log.error("%s: the store is not set up, or closed: call setup first", method)
            return [codes.UNAVAILABLE_IN_CURRENT_STATUS] * len(keys)
        if not keys:
            return []
        try:
            answers = call(core.shapes(self._tenant))
            core.log_evictions()
            return answers
        except kvtier.Error as error:
            log.error("%s: %s", method, error)
            return [codes.of_error(error)] * len(keys)

    def _guard(self, method: str, call: Callable[[], int]) -> int:
        try:
            return call()
        except kvtier.Error as error:
            log.error("%s: %s", method, error)
            return codes.of_error(error)

    # Beyond Mooncake's methods.

    @property
    def kvtier_store(self) -> Optional[kvtier.Store]:
        """The kvtier store, for `stats`, `tenants`, `set_policy`, `evictions` and `metrics`."""
        return None if self._core is None else self._core.store


def _release(core: Core) -> int:
    release(core)
    return codes.OK


def _with_disk(settings: Settings, path: str, host_bytes: int) -> Settings:
    return replace(settings, disk_path=path, host_bytes=settings.host_bytes or host_bytes)


def _names(keys: Iterable[str]) -> List[bytes]:
    return [key.encode() for key in keys]

