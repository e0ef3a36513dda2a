"""The kvtier store behind the stores of a process: those with the same settings share it, since a
directory is open once."""

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

#: How many directories `{slot}` goes through.
SLOTS = 64

#: Evictions that are read at a time.
MOST_EVICTIONS = 4096

#: How long closing may wait for what is being written.
CLOSE_S = 30.0


class Core:
    """A runtime, a device if there is one, and the store on them."""

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
        self.store, self.opened = _open(self.runtime, settings, self.device)
        self.on_disk = self.store.stats()["disk_limit_bytes"] > 0
        if settings.level in ("disk", "durable") and not self.on_disk:
            raise make(abi.KVT_E_INVALID, f"level {settings.level!r}, and the store has no "
                       "disk: say disk_path and disk_bytes, or level \"ram\"")
        remote = self.store.remote_stats()
        if settings.level == "remote" and not remote["writes"]:
            raise make(abi.KVT_E_INVALID, "level 'remote', and the store sends to none: say "
                       "remote= in the spec, or level \"ram\"")
        if (self.on_disk or remote["reads"]) and not settings.model:
            log.warning("objects on a disk or a remote outlive the process under the engine's keys "
                        "alone, which name a model but not its weights: say \"model\", a text "
                        "that changes with them")

    def shapes(self, tenant: str) -> Shapes:
        """A tenant's objects."""
        with self._lock:
            found = self._shapes.get(tenant)
            if found is None:
                assert self.store is not None
                found = self._shapes[tenant] = Shapes(
                    self.store, self.settings.model, tenant, self.settings.max_shapes,
                    self._catalogue_level(), self.settings.ask_s)
            return found

    def _catalogue_level(self) -> int:
        """Who finds objects has to know their shapes."""
        if self.settings.level == "remote":
            return abi.KVT_LEVEL_REMOTE
        return abi.KVT_LEVEL_DURABLE if self.on_disk else abi.KVT_LEVEL_RAM

    def log_evictions(self) -> None:
        """Those since the last time, each a line of the log, where that was asked for."""
        if not self.settings.log_evictions or self.store is None:
            return
        tiers = {TIER_HOST: "host", TIER_DISK: "disk"} if self.on_disk else {TIER_HOST: "host"}
        with self._lock:
            for tier, name in tiers.items():
                for entry in self.store.evictions(tier, MOST_EVICTIONS):
                    if entry.number >= self._logged.get(tier, 0):
                        self._logged[tier] = entry.number + 1
                        log.info("evicted from %s: %s", name, entry)

    def close(self) -> None:
        """Closes all; what was answered at its level stays."""
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
    what, colon, ordinal = text.partition(":")
    if colon and not ordinal.isdecimal():
        raise make(abi.KVT_E_INVALID, f"device {text!r}: a number is after the colon")
    return kvtier.Device(runtime, what, ordinal=int(ordinal or 0))


def _open(runtime: kvtier.Runtime, settings: Settings,
          device: Optional[kvtier.Device]) -> Tuple[kvtier.Store, Settings]:
    if settings.wants("rank"):
        rank = rank_of(settings)
        if rank is None:
            raise make(abi.KVT_E_INVALID, "{rank} in the store's place, and nobody says which "
                       "process this is: set KVTIER_RANK in each, or say {slot}")
        settings = settings.with_number("rank", rank)
    if not settings.wants("slot"):
        return _one(runtime, settings, device), settings
    for slot in range(SLOTS):
        chosen = settings.with_number("slot", slot)
        try:
            return _one(runtime, chosen, device), chosen
        except kvtier.BusyError:
            continue
    raise make(abi.KVT_E_BUSY, f"{SLOTS} slots, and all are open in other processes")


def _one(runtime: kvtier.Runtime, settings: Settings,
         device: Optional[kvtier.Device]) -> kvtier.Store:
    try:
        return kvtier.Store(
            runtime, settings.spec or "store", host_bytes=settings.host_bytes,
            disk_path=settings.disk_path, disk_bytes=settings.disk_bytes,
            policy=settings.policy, disk_policy=settings.disk_policy, write=settings.write,
            device=device)
    except kvtier.BusyError as error:
        advice = "a process has a directory to itself: say {rank} or {slot} in its path"
        raise make(error.status, f"{error.message} ({advice})") from error


_cores: List[Core] = []
_cores_lock = threading.Lock()


def borrow(settings: Settings, segment_bytes: int) -> Core:
    """The process's store with these settings; `give_back` when done. Without a size of its
    own a store has what `setup` says, and where that is nothing another's."""
    if not (settings.spec or settings.host_bytes or settings.disk_bytes):
        settings = replace(settings, host_bytes=segment_bytes)
    with _cores_lock:
        found = next((core for core in _cores if core.settings == settings), None)
        if found is None and not (settings.spec or settings.host_bytes):
            if not _cores:
                raise make(abi.KVT_E_INVALID, "a client without memory of its own, and no store "
                           "in this process: set KVTIER_MOONCAKE_SPEC, or global_segment_size")
            found = _cores[0]
        if found is None:
            found = Core(settings)
            _cores.append(found)
        found.users += 1
        return found


def give_back(core: Core) -> None:
    """The last to give it back closes it."""
    with _cores_lock:
        core.users -= 1
        if core.users > 0 or core not in _cores:
            return
        _cores.remove(core)
        core.close()  # meanwhile nobody opens its directory again: it would be refused


def _at_exit() -> None:
    # Some engines never close theirs. What is in flight then is let finish.
    with _cores_lock:
        left = list(_cores)
        _cores.clear()
    for core in left:
        try:
            core.close()
        except kvtier.Error as error:
            log.warning("the store at exit: %s", error)


atexit.register(_at_exit)
