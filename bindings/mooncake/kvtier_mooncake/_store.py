"""`MooncakeDistributedStore`: the methods that engines call, on raw addresses and sizes."""

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
from ._core import Core, borrow, give_back
from ._moves import Mover, fetched
from ._shapes import Shapes, check_shape

log = logging.getLogger("kvtier.mooncake")

#: What `setup` takes and has no use for.
IGNORED = ("metadata_server", "local_buffer_size", "protocol", "device_name",
           "master_server_address", "engine")


class BufferHandle:
    """An object's bytes, as a buffer."""

    def __init__(self, data: bytearray) -> None:
        self._data = data

    def ptr(self) -> int:
        """Where they are."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._data))

    def size(self) -> int:
        """How many."""
        return len(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def view(self) -> memoryview:
        """The bytes themselves."""
        return memoryview(self._data)


class ReplicaDescriptor:
    """Where an object is: what `batch_get_replica_desc` says of it."""

    def __init__(self, tiers: int) -> None:
        self._tiers = tiers

    def is_memory_replica(self) -> bool:
        """All of it is in memory."""
        return bool(self._tiers & 1 << TIER_HOST)

    def is_disk_replica(self) -> bool:
        """No: a disk that several share."""
        return False

    def is_local_disk_replica(self) -> bool:
        """All of it is on this process's disk."""
        return bool(self._tiers & 1 << TIER_DISK)


class MooncakeDistributedStore:
    """A store in this process, of one tenant. Any thread may use it; calls wait for the move and
    let other threads run. Nothing is raised but for arguments that are no arguments (`TypeError`):
    what fails is a code, and a line of the log `kvtier.mooncake`."""

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
        """Opens the store: as the settings say, else with `global_segment_size` bytes of memory.
        A mapping of the same names is taken, too."""
        if isinstance(local_hostname, Mapping):
            return self._setup_mapping(local_hostname)
        given = {"metadata_server": metadata_server, "local_buffer_size": local_buffer_size,
                 "protocol": protocol, "device_name": device_name,
                 "master_server_address": master_server_address, "engine": engine}
        if self._core is not None:
            log.error("setup: it is set up already")
            return codes.INVALID_PARAMS
        self._hostname = local_hostname
        self._tenant = "" if tenant_id in ("", "default", None) else str(tenant_id)
        return self._guard("setup", lambda: self._open(
            int(global_segment_size), enable_ssd_offload, ssd_offload_path, given))

    def _setup_mapping(self, given: Mapping[str, Any]) -> int:
        names = ("metadata_server", "global_segment_size", "local_buffer_size", "protocol",
                 "device_name", "master_server_address", "ssd_offload_path", "tenant_id")
        known = {name: given[name] for name in names if given.get(name) not in (None, "")}
        more = sorted(set(given) - {*names, "local_hostname", "enable_ssd_offload"})
        if more:
            log.info("setup: %s mean nothing here", ", ".join(more))
        offload = str(given.get("enable_ssd_offload", "")).lower() in ("1", "true", "yes", "on")
        return self.setup(str(given.get("local_hostname", "")), enable_ssd_offload=offload, **known)

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int,
                    server_address: str) -> int:
        """A client of a store in another process: there is none here, so it is one of its own."""
        return self.setup("localhost", global_segment_size=int(mem_pool_size),
                          local_buffer_size=local_buffer_size,
                          master_server_address=server_address)

    def _open(self, segment_bytes: int, offload: bool, path: Optional[str],
              given: Dict[str, Any]) -> int:
        settings = current()
        if offload and path and not (settings.spec or settings.disk_path):
            if not settings.disk_bytes:
                log.error("setup: ssd_offload_path without a size: set disk_bytes in "
                          "KVTIER_MOONCAKE_CONFIG")
                return codes.INVALID_PARAMS
            settings = _with_disk(settings, path, segment_bytes)
        core = borrow(settings, segment_bytes)
        try:  # the catalogue is read now, not in the first lookup
            core.shapes(self._tenant)
        except BaseException:
            give_back(core)
            raise
        self._core = core
        ignored = [f"{name}={given[name]!r}" for name in IGNORED if given[name] not in ("", None)]
        log.info("kvtier's store answers for Mooncake's (%s); not used: %s",
                 core.opened, ", ".join(ignored) or "nothing")
        return codes.OK

    def close(self) -> int:
        """Lets it go: the last of the process that has these settings closes the store."""
        core, self._core = self._core, None
        self._regions.clear()
        return codes.OK if core is None else self._guard("close", lambda: _gone(core))

    def get_hostname(self) -> str:
        """What `setup` was told."""
        return self._hostname

    # Buffers.

    def register_buffer(self, buffer_ptr: int, size: int, location: str = "") -> int:
        """Memory that may be named from now on. What the processor cannot reach is taken for
        the device's, which must have been configured."""
        if size <= 0 or buffer_ptr <= 0:
            log.error("register_buffer: %d bytes at %#x", size, buffer_ptr)
            return codes.INVALID_PARAMS
        on_device = location.startswith(("cuda", "device"))
        if not on_device and memory.mapped(buffer_ptr, size):
            self._regions.add(buffer_ptr, size, memory.HOST)
            return codes.OK
        if self._core is None or self._core.device is None:
            log.error("register_buffer: %d bytes at %#x are no memory that the processor reaches; "
                      "for a GPU's set \"device\": \"cuda\" in KVTIER_MOONCAKE_CONFIG",
                      size, buffer_ptr)
            return codes.INVALID_PARAMS
        self._regions.add(buffer_ptr, size, memory.DEVICE)
        return codes.OK

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """From now on it may not be named. Moves that may use it have ended when this returns."""
        if self._regions.remove(buffer_ptr):
            return codes.OK
        log.error("unregister_buffer: nothing was registered at %#x", buffer_ptr)
        return codes.INVALID_PARAMS

    # What is there.

    def is_exist(self, key: str) -> int:
        """1, 0, or a code."""
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: Sequence[str]) -> List[int]:
        """1, 0, or a code, for each."""
        return self._each("batch_is_exist", keys, lambda shapes: shapes.states(_names(keys)))

    def get_size(self, key: str) -> int:
        """How many bytes an object has."""
        def ask(shapes: Shapes) -> List[int]:
            shape = shapes.find(_names([key]))[0]
            return [codes.OBJECT_NOT_FOUND if shape is None else sum(shape)]

        return self._each("get_size", [key], ask)[0]

    def batch_get_replica_desc(self, keys: Sequence[str]) -> Dict[str, List[ReplicaDescriptor]]:
        """In which tiers objects are."""
        found: Dict[str, List[ReplicaDescriptor]] = {}

        def ask(shapes: Shapes) -> List[int]:
            names = _names(keys)
            for _, blocks in shapes.known():
                for key, tiers in zip(keys, blocks.exists(names)):
                    if tiers:
                        found[key] = [ReplicaDescriptor(tiers)]
            return []

        self._each("batch_get_replica_desc", keys, ask)
        return found

    # Moves from and to registered buffers.

    def batch_put_from_multi_buffers(
            self, keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]],
            all_sizes: Sequence[Sequence[int]], config: Any = None) -> List[int]:
        """Stores objects, each from some buffers: 0, or a code, for each. One that is there
        already from buffers of these sizes stays, and that is 0."""
        return self._move("batch_put_from_multi_buffers", keys, all_buffer_ptrs, all_sizes, True)

    def batch_get_into_multi_buffers(
            self, keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]],
            all_sizes: Sequence[Sequence[int]],
            prefer_alloc_in_same_node: bool = False) -> List[int]:
        """Loads objects: how many bytes came, or a code, for each."""
        return self._move("batch_get_into_multi_buffers", keys, all_buffer_ptrs, all_sizes, False)

    def batch_put_from(self, keys: Sequence[str], buffer_ptrs: Sequence[int],
                       sizes: Sequence[int], config: Any = None) -> List[int]:
        """The same from a buffer each."""
        return self._move("batch_put_from", keys, [(one,) for one in buffer_ptrs],
                          [(one,) for one in sizes], True)

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int],
                       sizes: Sequence[int]) -> List[int]:
        """The same into a buffer each."""
        return self._move("batch_get_into", keys, [(one,) for one in buffer_ptrs],
                          [(one,) for one in sizes], False)

    def put_from(self, key: str, buffer_ptr: int, size: int, config: Any = None) -> int:
        """One of them."""
        return self.batch_put_from([key], [buffer_ptr], [size], config)[0]

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """One of them."""
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def _move(self, what: str, keys: Sequence[str], rows: Sequence[Sequence[int]],
              sizes: Sequence[Sequence[int]], put: bool) -> List[int]:
        if not len(keys) == len(rows) == len(sizes):
            log.error("%s: %d keys, %d buffers, %d sizes", what, len(keys), len(rows), len(sizes))
            return [codes.INVALID_PARAMS] * len(keys)
        core = self._core
        move = self._regions.begin()
        try:
            return self._each(what, keys, lambda shapes: Mover(
                what, shapes, self._regions, 0 if core is None else LEVELS[core.settings.level],
                put).run(_names(keys), rows, sizes))
        finally:
            self._regions.end(move)

    # Values.

    def put(self, key: str, value: Any, config: Any = None) -> int:
        """Stores bytes."""
        return self.put_parts(key, value, config=config)

    def put_parts(self, key: str, *parts: Any, config: Any = None) -> int:
        """Stores the bytes of some buffers as one object."""
        data = bytearray(b"".join(memoryview(part).cast("B") for part in parts))
        if not data:
            log.error("put: %s without bytes", key)
            return codes.INVALID_PARAMS
        level = LEVELS[self._core.settings.level] if self._core is not None else 0

        def store(shapes: Shapes) -> List[int]:
            if shapes.states(_names([key]))[0]:
                return [codes.OK]
            shape = check_shape((len(data),))
            with shapes.of(shape).put(_names([key]), Pool(data, len(data)).at([0]),
                                      level=level) as op:
                op.result()
            shapes.noted(shape)
            return [codes.OK]

        return self._each("put", [key], store)[0]

    def get(self, key: str) -> bytes:
        """An object's bytes; none where it is not there."""
        found = self._buffers([key])[0]
        return b"" if found is None else bytes(found)

    def get_buffer(self, key: str) -> Optional[BufferHandle]:
        """The same as a buffer, or None."""
        found = self._buffers([key])[0]
        return None if found is None else BufferHandle(found)

    def batch_get_buffer(self, keys: Sequence[str]) -> List[Optional[bytearray]]:
        """The same for some."""
        return self._buffers(keys)

    def _buffers(self, keys: Sequence[str]) -> List[Optional[bytearray]]:
        found: List[Optional[bytearray]] = [None] * len(keys)

        def load(shapes: Shapes) -> List[int]:
            names = _names(keys)
            for at, shape in enumerate(shapes.find(names)):
                if shape is not None:
                    found[at] = fetched(shapes, shape, names[at])
            return []

        self._each("get", keys, load)
        return found

    # Taking away.

    def remove(self, key: str, force: bool = False) -> int:
        """Takes an object away, in all shapes that it was put in."""
        def drop(shapes: Shapes) -> List[int]:
            names = _names([key])
            found = shapes.find(names)[0]  # at a remote, too
            gone, held = shapes.drop(names[0])
            if not (found or gone or held):
                return [codes.OBJECT_NOT_FOUND]
            return [codes.OK if gone and not held else codes.UNAVAILABLE_IN_CURRENT_STATUS]

        return self._each("remove", [key], drop)[0]

    def remove_all(self, force: bool = False) -> int:
        """Takes all objects of the tenant away, and says how many there were."""
        return self._each("remove_all", [""], lambda shapes: [shapes.clear()])[0]

    # How calls fail.

    def _each(self, what: str, keys: Sequence[str],
              call: Callable[[Shapes], List[int]]) -> List[int]:
        """A call for some keys; where it fails as a whole, each has its code."""
        core = self._core
        if core is None:
            log.error("%s: the store is not set up", what)
            return [codes.UNAVAILABLE_IN_CURRENT_STATUS] * len(keys)
        if not keys:
            return []
        try:
            answers = call(core.shapes(self._tenant))
            core.log_evictions()
            return answers
        except kvtier.Error as error:
            log.error("%s: %s", what, error)
            return [codes.of_error(error)] * len(keys)

    def _guard(self, what: str, call: Callable[[], int]) -> int:
        try:
            return call()
        except kvtier.Error as error:
            log.error("%s: %s", what, error)
            return codes.of_error(error)

    # What kvtier has beside Mooncake's methods.

    @property
    def kvtier_store(self) -> Optional[kvtier.Store]:
        """The store itself: `stats`, `tenants`, `set_policy`, `evictions`, `metrics`."""
        return None if self._core is None else self._core.store


def _gone(core: Core) -> int:
    give_back(core)
    return codes.OK


def _with_disk(settings: Settings, path: str, host_bytes: int) -> Settings:
    return replace(settings, disk_path=path, host_bytes=settings.host_bytes or host_bytes)


def _names(keys: Iterable[str]) -> List[bytes]:
    return [key.encode() for key in keys]

