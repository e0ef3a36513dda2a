"""The kvtier stores of this process. Mooncake stores with equal settings share one, because a
directory can be open only once."""

from __future__ import annotations

import atexit
import logging
import threading
from dataclasses import replace
from typing import Dict, List, Optional, Tuple

import kvtier
from kvtier import TIER_DISK, TIER_HOST, abi
from kvtier._errors import make

from ._config import Settings, rank_of
from ._shapes import Shapes

log = logging.getLogger("kvtier.mooncake")

#: Most directories that `{slot}` tries.
MAX_SLOTS = 64

#: Most evictions of a tier that are read at once.
MAX_EVICTIONS = 4096

#: Most seconds that closing waits for running writes.
CLOSE_S = 30.0


class Core:
    """A kvtier store with its runtime and, if configured, its device."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.runtime = kvtier.Runtime(workers=settings.workers, name="mooncake")
        self._lock = threading.Lock()
        self._shapes: Dict[str, Shapes] = {}
        self.device: Optional[kvtier.Device] = None
        self.store: Optional[kvtier.Store] = None
        self.users = 0
        self._logged: Dict[int, int] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        settings = self.settings
        self.device = _device(self.runtime, settings.device)
        self.store, self.opened = _open_store(self.runtime, settings, self.device)
        self.on_disk = self.store.stats()["disk_limit_bytes"] > 0
        if settings.level in ("disk", "durable") and not self.on_disk:
            raise make(abi.KVT_E_INVALID, f"level {settings.level!r} needs a disk, which the store "
                       "does not have: set disk_path and disk_bytes, or level \"ram\"")
        remote = self.store.remote_stats()
        if settings.level == "remote" and not remote["write_circuit"]:
            raise make(abi.KVT_E_INVALID, "level 'remote' needs a remote that the store writes to: "
                       "set remote= in the spec, or level \"ram\"")
        if (self.on_disk or remote["read_circuit"]) and not settings.model:
            log.warning("objects on a disk or a remote outlive the process, but the engine's keys "
                        "name only a model, not its weights: set \"model\" to a text that changes "
                        "with the weights")

    def shapes(self, tenant: str) -> Shapes:
        """The objects of a tenant, by shape."""
        with self._lock:
            found = self._shapes.get(tenant)
            if found is None:
                assert self.store is not None
                found = self._shapes[tenant] = Shapes(
                    self.store, self.settings.model, tenant, self.settings.max_shapes,
                    self._catalogue_level(), self.settings.remote_lookup_s)
            return found

    def _catalogue_level(self) -> int:
        """The level of the catalogue's writes. Processes that find objects need their shapes."""
        if self.settings.level == "remote":
            return abi.KVT_LEVEL_REMOTE
        return abi.KVT_LEVEL_DURABLE if self.on_disk else abi.KVT_LEVEL_RAM

    def log_evictions(self) -> None:
        """Logs the evictions since the last call, if `log_evictions` is set."""
        if not self.settings.log_evictions or self.store is None:
            return
        tiers = {TIER_HOST: "host", TIER_DISK: "disk"} if self.on_disk else {TIER_HOST: "host"}
        with self._lock:
            for tier, name in tiers.items():
                for entry in self.store.evictions(tier, MAX_EVICTIONS):
                    if entry.number >= self._logged.get(tier, 0):
                        self._logged[tier] = entry.number + 1
                        log.info("evicted from %s: %s", name, entry)

    def close(self) -> None:
        """Closes the store. Completed puts stay at their level."""
        for shapes in self._shapes.values():
            shapes.close()
        if self.store is not None:
            self.store.close(CLOSE_S)
        if self.device is not None:
            self.device.close()
        self.runtime.close(CLOSE_S)


def _device(runtime: kvtier.Runtime, text: str) -> Optional[kvtier.Device]:
    if not text:
        return None
    kind, colon, ordinal = text.partition(":")
    if colon and not ordinal.isdecimal():
        raise make(abi.KVT_E_INVALID, f"device {text!r} is invalid: give a kind, such as \"cuda\", "
                   "or a kind and a number, such as \"cuda:1\"")
    return kvtier.Device(runtime, kind, ordinal=int(ordinal or 0))


def _open_store(runtime: kvtier.Runtime, settings: Settings,
                device: Optional[kvtier.Device]) -> Tuple[kvtier.Store, Settings]:
    if settings.has_placeholder("rank"):
        rank = rank_of(settings)
        if rank is None:
            raise make(abi.KVT_E_INVALID, "spec or disk_path contains {rank}, but the rank of this "
                       "process is unknown: set KVTIER_RANK in each process, or use {slot}")
        settings = settings.fill_placeholder("rank", rank)
    if not settings.has_placeholder("slot"):
        return _open_one(runtime, settings, device), settings
    for slot in range(MAX_SLOTS):
        chosen = settings.fill_placeholder("slot", slot)
        try:
            return _open_one(runtime, chosen, device), chosen
        except kvtier.BusyError:
            continue
    raise make(abi.KVT_E_BUSY, f"all {MAX_SLOTS} directories for {{slot}} are in use by other "
               "processes: end some, or use another path")


def _open_one(runtime: kvtier.Runtime, settings: Settings,
              device: Optional[kvtier.Device]) -> kvtier.Store:
    try:
        return kvtier.Store(
            runtime, settings.spec or "store", host_bytes=settings.host_bytes,
            disk_path=settings.disk_path, disk_bytes=settings.disk_bytes,
            policy=settings.policy, disk_policy=settings.disk_policy, write=settings.write,
            device=device)
    except kvtier.BusyError as error:
        advice = "a directory belongs to one process: use {rank} or {slot} in its path"
        raise make(error.status, f"{error.message} ({advice})") from error


_cores: List[Core] = []
_cores_lock = threading.Lock()


def acquire(settings: Settings, segment_bytes: int) -> Core:
    """The process's store with these settings; each caller calls `release`. Settings without a
    size get `segment_bytes` of host memory. If that is 0, too, an open store is shared."""
    if not (settings.spec or settings.host_bytes or settings.disk_bytes):
        settings = replace(settings, host_bytes=segment_bytes)
    with _cores_lock:
        found = next((core for core in _cores if core.settings == settings), None)
        if found is None and not (settings.spec or settings.host_bytes):
            if not _cores:
                raise make(abi.KVT_E_INVALID, "the store has no size, and this process has no "
                           "other store to share: set KVTIER_MOONCAKE_SPEC, or pass a "
                           "global_segment_size above 0")
            found = _cores[0]
        if found is None:
            found = Core(settings)
            _cores.append(found)
        found.users += 1
        return found


def release(core: Core) -> None:
    """Gives up one use of a store; the last one closes it."""
    with _cores_lock:
        core.users -= 1
        if core.users > 0 or core not in _cores:
            return
        _cores.remove(core)
        core.close()  # under the lock: opening the same directory meanwhile would fail


def _at_exit() -> None:
    # Some engines never close their stores. Running transfers finish here.
    with _cores_lock:
        left = list(_cores)
        _cores.clear()
    for core in left:
        try:
            core.close()
        except kvtier.Error as error:
            log.warning("closing a store at exit failed: %s", error)


atexit.register(_at_exit)
